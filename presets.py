"""Which models there are: presets, which geometries are possible, and fresh weights."""

import math
from typing import NoReturn

import torch

from lib.util import fail
from model import Config, Model

# L layers, C channels (n_embd)

# fmt: off
PRESETS = {
    # tests and toys: every mechanism is there, and nothing is larger than it must be
    "tiny": Config(
        n_layer=4, n_embd=64, n_head=4, n_kv_head=2, head_dim=16, rotary_dim=8,
        d_dense=128, d_expert=32, n_expert=8, n_active=2, n_group=4, topk_group=2,
        vocab_size=320, max_len=4096,
    ),
    # names of Unicode characters, in minutes on two CPU cores
    "names": Config(
        n_layer=4, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, rotary_dim=16, rope_theta=1e4,
        d_dense=384, d_expert=64, n_expert=8, n_active=2, n_group=2, topk_group=2,
        vocab_size=1024, max_len=512,
    ),
    # any text, in bytes
    "text": Config(
        n_layer=6, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, rotary_dim=16, rope_theta=1e4,
        d_dense=384, d_expert=128, n_expert=16, n_active=2, n_group=4, topk_group=2,
        vocab_size=272, max_len=8192,
    ),
    # the released 16B geometry
    "llada2.1-mini": Config(
        n_layer=20, n_embd=2048, n_head=16, n_kv_head=4, head_dim=128,
        d_dense=5120, d_expert=512, n_expert=256, n_active=8, n_group=8, topk_group=4,
        vocab_size=157184, eos_id=156892, mask_id=156895, tokenizer="bpe",
    ),
}
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# which geometries are possible

SIZE = 2**20  # no width, vocabulary or length is larger
COUNT = 10_000  # nor are there more heads, experts or groups

# every number of a Config: its type, its lowest and its highest value
FIELDS = {
    "n_layer": (int, 1, 1000),
    "n_head": (int, 1, COUNT),
    "n_kv_head": (int, 1, COUNT),
    "n_embd": (int, 1, SIZE),
    "head_dim": (int, 1, SIZE),
    "vocab_size": (int, 1, SIZE),
    "d_dense": (int, 1, SIZE),
    "d_expert": (int, 1, SIZE),
    "n_expert": (int, 1, COUNT),
    "n_active": (int, 1, COUNT),
    "n_group": (int, 1, COUNT),
    "topk_group": (int, 1, COUNT),
    "eos_id": (int, -1, SIZE),  # -1: none
    "mask_id": (int, -1, SIZE),
    "n_dense": (int, 0, 1000),
    "n_shared": (int, 0, COUNT),
    "routed_scaling": (float, 1e-12, 1e12),
    "rope_theta": (float, 1e-12, 1e12),
    "rotary_dim": (int, 1, SIZE),
    "norm_eps": (float, 1e-12, 1.0),
    "max_len": (int, 1, SIZE),
    "block_length": (int, 1, SIZE),
    "qkv_bias": (bool, False, True),
    "proj_bias": (bool, False, True),
    "tied": (bool, False, True),
    "n_last": (int, 1, 1000),
    "n_rounds": (int, 1, 1000),
}


def fits(value: object, kind: type, low: float, high: float) -> bool:
    """Whether a value from a JSON file is of this kind and in low..high. A bool is no int, but an
    int is a float.
    """
    if kind is float and type(value) is int:
        kind = int
    if type(value) is not kind:
        return False
    return low <= value <= high  # false for NaN


def check(cfg: Config) -> Config:
    """The same geometry, or one line about why no model can be built from it."""

    def refuse(why: str) -> NoReturn:
        fail(f"impossible model: {why}")

    for name, (kind, low, high) in FIELDS.items():
        value = getattr(cfg, name)
        if not fits(value, kind, low, high):
            refuse(f"{name} must be {in_words(kind, low, high)}, not {value!r}")

    # attention
    if cfg.n_head % cfg.n_kv_head != 0:
        refuse("n_head must be a multiple of n_kv_head")
    if cfg.rotary_dim % 2 != 0 or cfg.rotary_dim > cfg.head_dim:
        refuse("rotary_dim must be even and at most head_dim")

    # experts: a group's score is that of its two best
    if cfg.n_expert % cfg.n_group != 0 or cfg.n_expert < 2 * cfg.n_group:
        refuse("n_expert must make n_group groups of two or more")
    if cfg.topk_group > cfg.n_group:
        refuse("topk_group must be at most n_group")
    group_size = cfg.n_expert // cfg.n_group
    if cfg.n_active > cfg.topk_group * group_size:
        refuse("n_active experts must fit into topk_group groups")

    # Stage B runs some of the layers there are; a block fits into the longest row
    if cfg.n_last > cfg.n_layer:
        refuse(f"n_last must be 1..{cfg.n_layer} (n_layer), not {cfg.n_last}")
    if cfg.block_length > cfg.max_len:
        refuse(f"block_length must be 1..{cfg.max_len} (max_len), not {cfg.block_length}")

    # tokens, and the order in which they are written
    if max(cfg.eos_id, cfg.mask_id) >= cfg.vocab_size:
        refuse("eos_id and mask_id must be inside the vocabulary")
    if cfg.order not in ("surest", "leftmost"):
        refuse(f"order {cfg.order!r} is not surest or leftmost")
    if cfg.tokenizer not in ("bytes", "bpe", "toy"):
        refuse(f"tokenizer {cfg.tokenizer!r} is not bytes, bpe or toy")
    return cfg


def in_words(kind: type, low: float, high: float) -> str:
    """What a field of this kind may hold."""
    if kind is bool:
        return "true or false"
    number = "whole number" if kind is int else "number"
    if low > 0:
        return f"a positive {number} of at most {high:,.0f}"
    return f"a {number} in {low}..{high}"


# ---------------------------------------------------------------------------------------------------------------------
# fresh weights


def new_model(cfg: Config, generator: torch.Generator, device: torch.device | str = "cpu") -> Model:
    """Fresh weights: matrices are normal (initial_std), norms are one, markers and biases are zero."""
    with torch.device("meta"):
        model = Model(cfg)
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    for name, p in model.named_parameters():
        if name == "markers" or name.endswith("bias"):
            p.data.zero_()
        elif p.dim() == 1:  # norms
            p.data.fill_(1.0)
        else:
            # drawn on the CPU, so that every device gets the same weights
            drawn = torch.empty(p.shape).normal_(0.0, initial_std(name, cfg), generator=generator)
            p.data.copy_(drawn)
    return model


def initial_std(name: str, cfg: Config) -> float:
    """Standard deviation of a matrix's first values."""
    # at 0.02 the layers drown a token's identity within steps, and copying visible tokens (two
    # thirds of the terms) is learned late
    if name == "wte.weight":
        return 1.0
    if name == "lm_head.weight":
        return 0.02

    # 2 L projections write to the residual stream: scaled down as in GPT-2, their sum keeps its
    # size
    std = cfg.n_embd**-0.5
    if name.endswith(("proj.weight", "down.weight", "mlp.down")):
        std = std / math.sqrt(2 * cfg.n_layer)
    return std
