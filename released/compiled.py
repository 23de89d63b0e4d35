"""sample.py with compiled steps: the same tokens on a CPU in less time, after some seconds of compiling.

A step passes the few tokens of a block through every layer, in many small calls. Here a layer is compiled as a whole,
attention and cache included. All routed layers share it: a graph serves any length of the text, and any number of
rows from two on, for which it is compiled when they first come. It pays for thousands of tokens, in one text or in
many one after the other: results/speed has the numbers.

The flags are sample.py's, on a CPU in fp32. It needs a C++ compiler (g++, or the one that CXX names) and Python's
headers, and refuses int8 weights, which have a kernel of their own.

    python -m released.compiled --ckpt out/text --prompt "def " --gen_length 512
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo

import sample
from cache import Cached
from checkpoint import load_model
from lib.config import Config
from lib.util import fail
from model import Block, Context, Model, MoE, rotate

# R rows, T positions of a pass (B, or 2B with the next block), N = R*T tokens, S keys, C channels, H heads,
# G key/value heads, D head dim, B block_length, E experts, A active experts, F expert width

FEW = 8  # tokens an expert, on average, up to which reading its weights once a token is faster than sorting tokens
GRAPHS = 64  # at most: a layer with adapters has graphs of its own


# --- the compiled function
def run_block(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, used: int, B: int,
    mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Block.forward with KVCache.update inside: x (R, T, C) -> (R, T, C).

    cos, sin (R, T, 1, ...). keys, values (R, G, room, D): a slot of the cache, where the pass writes those of its own
    positions and attends to all up to `used`. There is always more room than that, so that one graph does: the whole
    would be another one. mask (R, 1, T, S) is added to the scores; None: nothing is hidden.
    """
    R, T, C = x.shape
    tokens = x.reshape(R * T, C)

    # queries, keys and values, as in Attention.forward
    attn = block.attn
    qkv = attn.qkv(block.norm_1(tokens)).view(R, T, -1, attn.head_dim)
    q, k, v = qkv.split([attn.n_head, attn.n_kv_head, attn.n_kv_head], dim=2)
    qk = rotate(torch.cat([attn.q_norm(q), attn.k_norm(k)], dim=2), Context(cos, sin, None))
    q, k = qk.split([attn.n_head, attn.n_kv_head], dim=2)

    # the cache comes whole and is written by index: given a view, or to write a slice, the compiler copies all of it
    start = 2 * B - T
    place = torch.arange(start, 2 * B)
    keys[:, :, place] = k.transpose(1, 2)
    values[:, :, place] = v.transpose(1, 2)
    k, v = keys[:, :, start:used], values[:, :, start:used]  # (R, G, S, D)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True)
    tokens = tokens + attn.proj(y.transpose(1, 2).reshape(R * T, -1))

    # the experts
    h = block.norm_2(tokens)
    chosen, weights = block.mlp.route(h)
    out = tokens + chosen_experts(block.mlp, h, chosen, weights)
    if block.mlp.shared is not None:
        out = out + block.mlp.shared(h)
    return out.view(R, T, C)


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


# --- the model
class CompiledModel(Model):
    """A float32 model on a CPU, whose routed layers decode few tokens by the compiled function."""

    def __init__(self, cfg: Config, second_look: nn.Module | None = None):
        super().__init__(cfg, second_look)
        dynamo.recompile_limit = GRAPHS
        self.run_block = torch.compile(run_block, fullgraph=True, options={"cpp_wrapper": True})

    def run_layers(self, h: Tensor, ctx: Context, first: int, end: int) -> Tensor:
        """As Model.run_layers: (R, T, C) -> (R, T, C)."""
        R, T, _ = h.shape
        decoding = ctx.cache is not None and ctx.cache.filling is None
        few = R * T * self.cfg.n_active <= FEW * self.cfg.n_expert
        if not decoding or not few or ctx.lora is not None:
            return super().run_layers(h, ctx, first, end)

        cache = ctx.cache
        mask = added_mask(ctx, R, T)
        for layer in self.layers[first:end]:
            if isinstance(layer.mlp, MoE):
                keys, values = cache.kv[:, cache.slot(layer.attn.layer, ctx.round)]
                h = self.run_block(layer, h, ctx.cos, ctx.sin, keys, values, cache.used, cache.B, mask)
            else:
                h = layer(h, ctx)
        return h


def added_mask(ctx: Context, R: int, T: int) -> Tensor | None:
    """ctx.mask as numbers, 0 or -inf, (R, 1, T, S): attention would convert a bool mask in every layer.

    One row often needs none. Several rows always get one, which saves compiling them without.
    """
    if ctx.mask is None and R == 1:
        return None
    S = ctx.cache.used - 2 * ctx.cache.B + T
    mask = torch.zeros(R, 1, T, S)
    if ctx.mask is not None:
        mask = mask.masked_fill(~ctx.mask, float("-inf"))
    return mask


@torch.inference_mode()
def compile_for_one_row(model: CompiledModel) -> None:
    """First steps, whose results nobody reads. The compiler takes sizes for fixed until they change, so there are two
    lengths; and the next block may be beside the current one."""
    print("compiling: seconds on an idle machine, minutes on a busy one", file=sys.stderr)
    masks = torch.full((1, model.cfg.block_length), model.cfg.mask_id)
    for n_blocks in (1, 3):
        engine = Cached(model, [[0] * n_blocks * model.cfg.block_length], 0)
        engine.read(masks)
        engine.read(masks, masks)


def load_compiled(folder: Path, device: torch.device, dtype: torch.dtype) -> CompiledModel:
    if device.type != "cpu" or dtype != torch.float32:
        fail("compiled steps are for float32 on a CPU: add --device cpu --dtype fp32, or use sample.py")
    model = load_model(folder, device, dtype, CompiledModel)
    if not any(type(layer.mlp) is MoE for layer in model.layers):
        fail(f"{folder} has no experts in float32, at which compiled steps are faster: use sample.py")
    try:
        compile_for_one_row(model)
    except RuntimeError as e:  # what dynamo and the compiler raise is one
        reason = str(e).strip().partition("\n")[0]
        fail(f"the steps cannot be compiled ({reason}): install g++ and Python's headers, or use sample.py")
    return model


if __name__ == "__main__":
    sample.main(load_compiled)  # the one thing that differs from sample.py
