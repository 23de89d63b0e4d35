"""The sizes of a model, the presets, and which sizes are possible. To change a model's size, edit a preset.

python base.py --preset text_small       # a model of these sizes, from scratch
"""

from dataclasses import dataclass, replace
from pathlib import Path

from lib.util import fail


@dataclass(kw_only=True)
class Config:
    """A model's geometry."""

    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    head_dim: int
    vocab_size: int  # rows of the embedding; released vocabularies are padded, so the tokenizer may use fewer
    d_dense: int  # width of the SwiGLU in the first n_dense layers
    n_dense: int = 1  # the layers after these have experts; n_layer: none has
    d_expert: int = 0
    n_expert: int = 0
    n_active: int = 0
    n_group: int = 0  # experts are chosen inside the `topk_group` best of `n_group` groups
    topk_group: int = 0
    n_shared: int = 1  # shared experts, as one SwiGLU of n_shared * d_expert
    routed_scaling: float = 2.5
    eos_id: int = -1
    mask_id: int = -1
    rope_theta: float = 600000.0
    rotary_dim: int = 64
    norm_eps: float = 1e-6
    max_len: int = 32768
    window: int = 0  # a position attends to at most so many tokens: no row of its training was longer; 0: to all
    block_length: int = 32
    qkv_bias: bool = False
    proj_bias: bool = False
    tied: bool = False  # the embedding's matrix is the output layer's, too
    n_last: int = 3  # n: how many layers Stage B runs again
    n_rounds: int = 1  # K: how many markers there are
    router: str = "grouped sigmoid"  # how experts are chosen, a name in layers.ROUTERS; it is learned with
    stage_b: str = "paper"  # the kind of Stage B, a name in checkpoint.STAGE_B
    decoder: str = "llada"  # how the base decodes without a Stage B, a name in decoding.SETTINGS
    int8: bool = False  # are the matrices integers, see lib/int8.py? They cannot learn


# --- presets
# fmt: off
PRESETS = {
    # for tests and toys: it has every mechanism, in the least size
    "tiny": Config(
        n_layer=4, n_embd=64, n_head=4, n_kv_head=2, head_dim=16, rotary_dim=8,
        d_dense=128, d_expert=32, n_expert=8, n_active=2, n_group=4, topk_group=2,
        vocab_size=320, max_len=4096,
    ),
    # for names of Unicode characters: it trains in an hour on one quiet thread
    "names": Config(
        n_layer=8, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, rotary_dim=16, rope_theta=1e4,
        d_dense=384, d_expert=64, n_expert=8, n_active=2, n_group=2, topk_group=2,
        vocab_size=1024, max_len=512,
    ),
    # for any text, in bytes
    "text": Config(
        n_layer=6, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, rotary_dim=16, rope_theta=1e4,
        d_dense=384, d_expert=64, n_expert=8, n_active=2, n_group=2, topk_group=2,
        vocab_size=272, max_len=8192,
    ),
    # the released 16B geometry
    "llada2.1-mini": Config(
        n_layer=20, n_embd=2048, n_head=16, n_kv_head=4, head_dim=128,
        d_dense=5120, d_expert=512, n_expert=256, n_active=8, n_group=8, topk_group=4,
        vocab_size=157184, eos_id=156892, mask_id=156895,
    ),
}
# fmt: on
# text with half of the layers, and with a third
PRESETS["text_small"] = replace(PRESETS["text"], n_layer=3)
PRESETS["text_two"] = replace(PRESETS["text"], n_layer=2, n_last=2)


# --- which sizes are possible
def check_config(cfg: Config, where: Path | str = "impossible model") -> None:
    """Refuse a geometry that cannot be computed. Wrong shapes of tensors are refused in loading."""
    group = cfg.n_expert // max(1, cfg.n_group)
    dense = cfg.n_layer <= cfg.n_dense
    ids = (cfg.eos_id, cfg.mask_id)
    sizes = [size for name, size in vars(cfg).items() if type(size) is int and name not in ("eos_id", "mask_id")]
    for holds, what in (
        (min(cfg.n_head, cfg.n_kv_head, cfg.n_embd, cfg.head_dim, cfg.vocab_size) > 0, "sizes are above 0"),
        (cfg.n_layer <= 1024, f"n_layer is at most 1,024, not {cfg.n_layer}"),
        (cfg.n_head % max(1, cfg.n_kv_head) == 0, "n_kv_head divides n_head"),
        (
            dense or cfg.n_embd % 8 == cfg.d_expert % 8 == 0,
            "n_embd and d_expert are multiples of 8: the experts' grouped products read 16 bytes at a time",
        ),
        (cfg.rotary_dim in range(2, cfg.head_dim + 1, 2), "rotary_dim is even, and at most head_dim"),
        (dense or (cfg.n_expert == group * cfg.n_group and group > 1), "n_group divides n_expert, in twos or more"),
        (dense or 1 <= cfg.topk_group <= cfg.n_group, "topk_group is 1..n_group"),
        (dense or 1 <= cfg.n_active <= cfg.topk_group * group, "n_active experts fit into topk_group groups"),
        (1 <= cfg.n_last <= cfg.n_layer, f"n_last is 1..{cfg.n_layer} (n_layer), not {cfg.n_last}"),
        (1 <= cfg.n_rounds <= 1024, f"n_rounds is 1..1,024, not {cfg.n_rounds}"),
        (all(0 <= size <= 2**20 for size in sizes), "sizes are 0..1,048,576"),
        (cfg.n_dense == 0 or cfg.d_dense > 0, "d_dense is above 0"),
        (dense or min(cfg.d_expert, cfg.n_shared) > 0, "d_expert and n_shared are above 0"),
        (cfg.rope_theta > 0 <= cfg.norm_eps, "rope_theta is above 0, and norm_eps is not below 0"),
        (1 <= cfg.block_length <= cfg.max_len, f"block_length is 1..{cfg.max_len} (max_len), not {cfg.block_length}"),
        # a preset without ids has -1 for both
        (ids == (-1, -1) or all(i in range(cfg.vocab_size) for i in ids), "eos_id and mask_id are in the vocabulary"),
        (cfg.eos_id != cfg.mask_id or cfg.mask_id == -1, f"eos_id and mask_id, both {cfg.mask_id}, are two tokens"),
    ):
        if not holds:
            fail(f"{where}: this must hold: {what}")
