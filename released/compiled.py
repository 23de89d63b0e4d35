"""sample.py with compiled steps: the same tokens on a CPU in less time, after some seconds of compiling.

A step passes the few tokens of a block through every layer, in many small calls. Here two functions of a layer are
compiled, what comes before attention and what comes after it. All routed layers share them, for any number of tokens.
It pays for thousands of tokens, in one text or in many one after the other: results/speed has the numbers.

The flags are sample.py's, on a CPU in fp32. It needs a C++ compiler (g++, or the one that CXX names) and Python's
headers, and refuses int8 weights, which have a kernel of their own.

    python -m released.compiled --ckpt out/text --prompts_file prompts.txt --gen_length 512
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import sample
from cache import Cached
from checkpoint import load_model
from data import fail
from model import Block, Context, Model, MoE, attend, rotate
from terminal import build_parser

# R rows, T positions, N = R*T tokens, C channels, H heads, G key/value heads, D head dim, E experts, A active experts,
# F expert width

FEW = 8  # tokens an expert, on average, up to which reading its weights once a token is faster than sorting tokens


# --- the compiled functions
def before_attention(block: Block, x: Tensor, cos: Tensor, sin: Tensor, lora: bool) -> tuple[Tensor, Tensor]:
    """The first half of Attention.forward: x (N, C), cos and sin (N, 1, ...) -> queries and keys (N, H + G, D) and
    values (N, G, D)."""
    attn = block.attn
    qkv = attn.qkv(block.norm_1(x), lora).view(len(x), -1, attn.head_dim)
    q, k, v = qkv.split([attn.n_head, attn.n_kv_head, attn.n_kv_head], dim=1)
    qk = torch.cat([attn.q_norm(q), attn.k_norm(k)], dim=1)
    return rotate(qk, Context(cos, sin, None)), v


def after_attention(block: Block, x: Tensor, y: Tensor, lora: bool) -> Tensor:
    """The rest of Block.forward: x (N, C) and what attention found, y (N, H*D) -> (N, C)."""
    x = x + block.attn.proj(y, lora)
    h = block.norm_2(x)
    chosen, weights = block.mlp.route(h)
    x = x + chosen_experts(block.mlp, h, chosen, weights)
    if block.mlp.shared is not None:
        x = x + block.mlp.shared(h)
    return x


def chosen_experts(moe: MoE, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """MoE.experts, as the compiler likes it: x (N, C), chosen and weights (N, A) -> (N, C).

    Every choice has its own copy of its expert's matrices, (N*A, 2F, C) and (N*A, C, F). The compiler fuses the copy
    with the product, so that none is made. Uncompiled, this is slow and large.
    """
    # choices of one expert follow each other: its weights are in the processor's cache from the second on
    expert, order = chosen.flatten().sort(stable=True)
    rows = x[order // moe.n_active]

    gate, up = (moe.gate_up[expert] * rows[:, None]).sum(-1).chunk(2, dim=-1)
    h = F.silu(gate) * up
    out = (moe.down[expert] * h[:, None]).sum(-1)  # (N*A, C)

    # back to tokens
    place = order.argsort().view_as(chosen)
    return (out[place] * weights[..., None]).sum(1)


# --- in the place of Block.forward
def run_block(block: Block, before: partial, after: partial, x: Tensor, ctx: Context) -> Tensor:
    """Block.forward by the two compiled functions, with attention between them as it was. x (R, T, C) -> (R, T, C)."""
    R, T, C = x.shape
    if not pays(block.mlp, R * T) or isinstance(ctx.lora, Tensor):
        return Block.forward(block, x, ctx)

    # one row of R*T tokens: positions matter to attention alone
    tokens = x.reshape(R * T, C)
    cos = ctx.cos.expand(R, T, 1, -1).reshape(R * T, 1, -1)
    sin = ctx.sin.expand(R, T, 1, -1).reshape(R * T, 1, -1)
    qk, v = before(block, tokens, cos, sin, ctx.lora)

    # heads before positions, then attention with the cache
    attn = block.attn
    qk = qk.view(R, T, -1, attn.head_dim).transpose(1, 2)
    v = v.view(R, T, -1, attn.head_dim).transpose(1, 2)
    q, k = qk.split([attn.n_head, attn.n_kv_head], dim=1)
    if ctx.cache is not None:
        k, v = ctx.cache.update(attn.layer, ctx.round, k, v)
    y = attend(q, k, v, ctx).transpose(1, 2)

    out = after(block, tokens, y.reshape(R * T, -1), ctx.lora)
    return out.view(R, T, C)


def pays(moe: MoE, n_tokens: int) -> bool:
    """Whether so many tokens are few for its experts. More run faster as they are."""
    return n_tokens * moe.n_active <= FEW * len(moe.router)


def compile_blocks(model: Model) -> None:
    """Give every routed layer of a float32 model on a CPU the compiled functions, and compile them."""
    check_model(model)
    before = torch.compile(before_attention, dynamic=True, fullgraph=True)
    after = torch.compile(after_attention, dynamic=True, fullgraph=True)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.forward = partial(run_block, layer, before, after)

    # a first step, whose result nobody reads
    print("compiling: seconds on an idle machine, minutes on a busy one", file=sys.stderr)
    masks = torch.full((1, model.cfg.block_length), model.cfg.mask_id)
    try:
        with torch.inference_mode():
            Cached(model, [[0]], 0).stage_a(masks)
    except RuntimeError as e:  # what dynamo and the compiler raise is one
        reason = str(e).strip().partition("\n")[0]
        fail(f"the steps cannot be compiled ({reason}): install g++ and Python's headers, or use sample.py")


def check_model(model: Model) -> None:
    """Refuse what would not be faster, or was never tried."""
    cfg = model.cfg
    weights = model.wte.weight
    if weights.device.type != "cpu" or model.compute_dtype != torch.float32 or weights.dtype != torch.float32:
        fail("compiled steps are for float32 on a CPU: add --device cpu --dtype fp32, or use sample.py")
    routed = [layer.mlp for layer in model.layers[cfg.n_dense :]]
    if not routed:
        fail("compiled steps are faster at experts, and no layer of this model has any: use sample.py")
    if any(type(mlp) is not MoE for mlp in routed):
        fail("compiled steps are for experts in float32: int8 weights have a kernel of their own, use sample.py")
    if not pays(routed[-1], cfg.block_length):
        fail(
            f"a block of {cfg.block_length} gives each of {cfg.n_expert} experts more than {FEW} tokens: use sample.py"
        )


# --- the command line
def load_compiled(folder: Path, device: torch.device, dtype: torch.dtype, adapter: str | None = None) -> Model:
    model = load_model(folder, device, dtype, adapter)
    compile_blocks(model)
    return model


def main() -> None:
    args = build_parser(__doc__, sample.MODES).parse_args()
    # the one thing that differs from sample.py
    sample.load_model = load_compiled
    sample.main(args)


if __name__ == "__main__":
    main()
