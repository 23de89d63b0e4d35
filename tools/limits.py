"""What a geometry could do at best: bytes that a forward must read, FLOPs of a training step, counted from its Config.

Every weight and cached key is read once, nothing else is; activations stay on chip and no kernel waits. A real run is
slower: `python -m tools.bench --ckpt DIR` holds a checkpoint against its floor.

    python -m tools.limits                                      # the released geometry: its tensors, and its limits
    python -m tools.limits --preset text --bandwidth 3350       # any other, behind a memory of so many GB/s
"""

from dataclasses import replace

import torch

from checkpoint import PRESETS
from lib.util import Parser, bounded
from model import Config, Model

# T positions of a row, C channels, V vocabulary, D head dim, L layers, n = n_last


def parameters(cfg: Config) -> dict[str, int]:
    """Parameters by part; their sum is the model's (tested against every preset)."""
    C, D, moe_layers = cfg.n_embd, cfg.head_dim, cfg.n_layer - cfg.n_dense
    qkv, proj = (cfg.n_head + 2 * cfg.n_kv_head) * D, cfg.n_head * D
    return {
        "embedding": cfg.vocab_size * C,
        "attention": cfg.n_layer * (C * (qkv + proj) + cfg.qkv_bias * qkv + cfg.proj_bias * C),
        "norms": cfg.n_layer * (2 * C + 2 * D) + C,
        "dense": cfg.n_dense * 3 * C * cfg.d_dense,
        "router": moe_layers * cfg.n_expert * C,
        "shared": moe_layers * 3 * C * cfg.n_shared * cfg.d_expert,
        "experts": moe_layers * cfg.n_expert * 3 * C * cfg.d_expert,
        "head": 0 if cfg.tied else cfg.vocab_size * C,
        "markers": cfg.n_rounds * C,
    }


def distinct_experts(cfg: Config, tokens: int) -> float:
    """Expected number of experts that `tokens` touch in a layer if routing is uniform and independent."""
    return cfg.n_expert * (1 - (1 - cfg.n_active / cfg.n_expert) ** tokens)


def forward_bytes(cfg: Config, tokens: int, context: int, experts: float, itemsize: int = 2) -> dict[str, float]:
    """Bytes that one full forward of `tokens` reads: weights, of which `experts` in each layer, an embedding row a
    token, and the keys and values of `context` tokens."""
    n = parameters(cfg)
    n |= {"embedding": tokens * cfg.n_embd, "experts": n["experts"] * experts / cfg.n_expert, "markers": 0}
    n["head"] = cfg.vocab_size * cfg.n_embd
    n["cache"] = 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * context
    return {part: itemsize * count for part, count in n.items()}


def stage_b_bytes(cfg: Config, tokens: int, context: int, experts: float) -> float:
    """Bytes that one round of Stage B reads: the last n layers, the head and the marker."""
    tail = replace(cfg, n_layer=cfg.n_last, n_dense=max(0, cfg.n_dense - (cfg.n_layer - cfg.n_last)))
    parts = forward_bytes(tail, tokens, context, experts)
    return sum(parts.values()) - parts["embedding"] + 2 * cfg.n_embd


def joint_head(cfg: Config, width: int, n: int = 1) -> tuple[int, int]:
    """beyond/joint_head.py: parameters of n dense blocks, and the bytes that one pass reads in bf16, head included."""
    one = parameters(replace(cfg, n_layer=1, n_dense=1, d_dense=width))
    count = n * (one["attention"] + one["norms"] - cfg.n_embd + one["dense"])
    return count, 2 * (count + cfg.vocab_size * cfg.n_embd)


def step_flops(cfg: Config, T: int, r: int = 16, checkpointing: bool = False, draft_rate: float = 0.3) -> dict:
    """FLOPs of one adapter step on a row of T tokens, 2 a multiply-add; the last n layers and the head run twice.

    A frozen linear layer needs the gradient of its input alone: its backward costs one forward; that of attention and
    of LoRA costs two. The head's chunks are made again in the backward, and every position carries a loss in both
    stages (an upper bound). The draft reads all layers once, and the head where it writes: half the tokens are masks.
    """
    n, pairs = parameters(cfg), T * (T + cfg.block_length) / 2  # queries and keys that may meet, block-causally
    active = n["attention"] + n["dense"] + n["router"] + n["shared"] + n["experts"] * cfg.n_active / cfg.n_expert
    lora = cfg.n_layer * r * (2 * cfg.n_embd + 2 * (cfg.n_head + cfg.n_kv_head) * cfg.head_dim)
    linear, adapters = 2 * T * active, 2 * T * lora
    attention = cfg.n_layer * 4 * cfg.n_head * cfg.head_dim * pairs  # queries by keys, weights by values
    forward, head = linear + adapters + attention, 2 * T * cfg.vocab_size * cfg.n_embd
    passes = (cfg.n_layer + cfg.n_last) / cfg.n_layer  # an average layer's
    return {
        "draft": forward + draft_rate / 2 * head,
        "forward": passes * forward,
        "recomputed": passes * forward if checkpointing else 0.0,
        "backward": passes * (linear + 2 * (adapters + attention)),
        "head": 2 * 3 * head,
    }


def print_parameters(cfg: Config) -> None:
    """Every tensor's name and shape, and the sum over all of them."""
    with torch.device("meta"):
        named = list(Model(cfg).named_parameters())
    for name, p in named:
        layer = name.split(".")[1] if name.startswith("layers.") else "0"
        if int(layer) <= cfg.n_dense:  # the layers after the first mixture of experts are as that one
            print(f"  {name:34} {tuple(p.shape)}")
    print(f"  ... layers {cfg.n_dense + 1}..{cfg.n_layer - 1} as layer {cfg.n_dense}")
    print(f"  {sum(p.numel() for _, p in named):,} parameters\n")


def print_limits(cfg: Config, context: int, speeds: dict[str, float], peak_flops: float) -> None:
    """speeds: GB/s of each memory by name; peak_flops: FLOP/s."""
    B, GB = cfg.block_length, 1e9
    print(f"  one forward of one block, batch 1, {context} tokens of context:")
    worst = min(cfg.n_expert, B * cfg.n_active)
    for name, experts in (("uniform routing", distinct_experts(cfg, B)), ("worst case", worst)):
        parts = forward_bytes(cfg, B, context, experts)
        total = sum(parts.values())
        listed = {k: parts[k] for k in ("experts", "shared", "dense", "attention", "head", "cache")}
        listed["rest"] = total - sum(listed.values())
        print(f"  {name}, {experts:.1f} of {cfg.n_expert} experts: {total / GB:.2f} GB "
              f"({', '.join(f'{k} {v / GB:.3f}' for k, v in listed.items())})")  # fmt: skip
        for gpu, rate in speeds.items():
            print(f"    {gpu}, {rate:.0f} GB/s: at least {1e3 * total / GB / rate:.2f} ms")
    experts = distinct_experts(cfg, B)
    full = sum(forward_bytes(cfg, B, context, experts).values())
    again = stage_b_bytes(cfg, B, context, experts)
    print(f"  Stage B: {again / GB:.2f} GB, {again / full / (cfg.n_last / cfg.n_layer):.2f} x n/L of the forward's "
          "(the head is read again)")  # fmt: skip
    for n in (1, 2):
        count, read = joint_head(cfg, cfg.d_dense, n)
        print(f"  {n} dense block(s) as a joint head: {count / 1e6:.1f} M parameters, {2 * count / full:.2%} of the "
              f"forward's bytes, {read / full:.1%} with the head; {16 * count / GB:.2f} GB to train (float32: weights, "
              "gradients, two moments)")  # fmt: skip
    print(f"  a training step on 2048 tokens, LoRA of rank 16 on frozen weights, n = {cfg.n_last}, draft corruption:")
    for checkpointing in (False, True):
        flops = step_flops(cfg, 2048, checkpointing=checkpointing)
        total = sum(flops.values())
        print(f"    {'with' if checkpointing else 'without'} checkpointing: {total / 1e12:.1f} TFLOP "
              f"({', '.join(f'{k} {v / 1e12:.1f}' for k, v in flops.items() if v)})\n      "
              f"at least {1e3 * total / peak_flops:.0f} ms at {peak_flops / 1e12:.0f} TFLOP/s")  # fmt: skip


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("limits")
    group.add_argument("--preset", choices=PRESETS, default="llada2.1-mini", help="geometry")
    group.add_argument("--bandwidth", type=bounded(float, 1e-6), help="GB/s of a memory (default: H200 and H100 SXM)")
    group.add_argument("--peak_flops", type=bounded(float, 1), default=989e12, help="FLOP/s (H100, H200, dense bf16)")
    group.add_argument("--context", type=bounded(int, 0), default=1024, help="tokens in the cache")
    args = parser.parse_args()
    cfg = PRESETS[args.preset]
    speeds = {"given": args.bandwidth} if args.bandwidth else {"H200": 4800.0, "H100 SXM": 3350.0}
    print(f"{args.preset}, in bf16, n = {cfg.n_last}, blocks of {cfg.block_length}")
    print_parameters(cfg)
    print_limits(cfg, args.context, speeds, args.peak_flops)


if __name__ == "__main__":
    main()
