"""sample.py with compiled steps: the same tokens on a CPU in less time, after some seconds of compiling.

A step passes the few tokens of a block through every layer, in many small calls. Here a layer with experts, its
attention and the cache are one compiled function. It is compiled twice for a single row (for the first length of text,
and then for any), and once more for any number of rows. Compiling saves time if thousands of tokens are written, in one
text or in many: results/speed has the numbers. Causal Stage B is not compiled, but the Stage A beside it is.

The flags are sample.py's, on a CPU in fp32. This needs a C++ compiler (g++, or the one that CXX names) and Python's
headers, and it refuses int8 weights, which have a kernel of their own.

    python -m llada.compiled --ckpt out/text_base --prompt "def " --gen_length 512
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo

import sample
from cache import Cached, KVCache
from checkpoint import load_model
from lib.util import command, fail, pick_device
from model import Context, Layer, Model, MoE

# R rows, T positions of a pass (a block), N = R*T tokens, S keys, C channels, G key/value heads, D head dim,
# A active experts, F expert width

FEW = 8  # up to this many tokens for an expert, on average, it is faster to read its weights again for each token
GRAPHS = 64  # the most graphs, which are for two lengths of one row and for several rows, with LoRA and without


# --- the compiled function
class Slot:
    """A slot of the cache, as Attention sees it: keys and values (R, G, room, D), of which `used` are in use. There is
    always more room than that, because a full slot would need another graph."""

    def __init__(self, keys: Tensor, values: Tensor, used: int):
        self.keys = keys
        self.values = values
        self.used = used

    def update(self, layer: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As KVCache.update. It writes at indices, because for a slice the compiler would copy the whole cache."""
        place = torch.arange(k.shape[2])
        self.keys[:, :, place] = k
        self.values[:, :, place] = v
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


def run_layer(
    layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, used: int, length: Tensor
) -> Tensor:
    """As Layer.forward: x (R, T, C) -> (R, T, C). length (R,): how many finished tokens each row has."""
    # as in KVCache.build_context: a shorter row may not attend to keys after its own
    R, T, C = x.shape
    length = length.view(R, 1, 1, 1)  # for one row, too, or the compiler would fix the number of rows
    mask = torch.arange(-T, used - T) < length if R > 1 else None  # (R, 1, 1, S)
    ctx = Context(cos, sin, mask, Slot(keys, values, used))
    x = x + layer.attn.forward(layer.norm_1(x), ctx)

    # the experts
    h = layer.norm_2(x).view(R * T, C)
    y = chosen_experts(layer.mlp, h, *layer.mlp.route(h))
    if layer.mlp.shared is not None:
        y = y + layer.mlp.shared(h)
    return x + y.view(R, T, C)


def chosen_experts(moe: MoE, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As MoE.experts, in a form for the compiler: x (N, C), chosen and weights (N, A) -> (N, C).

    Every choice has its own copy of its expert's matrices, (N*A, 2F, C) and (N*A, C, F). The compiler fuses the copy
    with the product, so that no copy is made. Without the compiler this is slow and takes much memory.
    """
    # the choices of one expert come together, so that its weights stay in the processor's cache
    expert, order = chosen.flatten().sort(stable=True)
    rows = x[order // moe.cfg.n_active]

    gate, up = (moe.gate_up[expert] * rows[:, None]).sum(-1).chunk(2, dim=-1)
    h = F.silu(gate) * up
    out = (moe.down[expert] * h[:, None]).sum(-1)  # (N*A, C)

    # back to tokens
    place = order.argsort().view_as(chosen)
    return (out[place] * weights[..., None]).sum(1)


# --- the model
def compile_steps(model: Model) -> None:
    """In a float32 model on a CPU, let the compiled function run the layers with experts when tokens are few."""
    compiled = torch.compile(run_layer, fullgraph=True, options={"cpp_wrapper": True})
    model.run_layers = partial(run_layers, model, compiled)


def run_layers(model: Model, run: Callable[..., Tensor], h: Tensor, ctx: Context, layers: nn.ModuleList) -> Tensor:
    """As Model.run_layers: (R, T, C) -> (R, T, C). run: the compiled function."""
    R, T, _ = h.shape
    few = R * T * model.cfg.n_active <= FEW * model.cfg.n_expert
    # the compiled function makes the mask of a decoding pass over all rows, and knows no other
    cache = ctx.cache
    usual = isinstance(cache, KVCache) and not cache.filling and ctx.mask is cache.context.mask
    if not few or not usual:
        return Model.run_layers(model, h, ctx, layers)

    with dynamo.patch(recompile_limit=GRAPHS):
        for layer in layers:
            if isinstance(layer.mlp, MoE):
                keys, values = cache.kv[:, cache.slot(layer.attn.layer, ctx.i_round)]
                h = run(layer, h, ctx.cos, ctx.sin, keys, values, cache.used, cache.length)
            else:
                h = layer(h, ctx)
    return h


@torch.inference_mode()
def compile_for_one_row(model: Model) -> None:
    """Compile by taking steps whose results are not used. They have two lengths, because the compiler takes a size as
    fixed until it changes."""
    print("compiling: seconds on an idle machine, minutes on a busy one", file=sys.stderr)
    masks = torch.full((1, model.cfg.block_length), model.cfg.mask_id)
    for n_blocks in (1, 3):
        Cached(model, [[0] * n_blocks * model.cfg.block_length], 0).stage_a(masks)


@command
def main() -> None:
    args = sample.build_parser(__doc__).parse_args()
    device = pick_device(args.device)
    if device.type != "cpu" or args.dtype != "fp32":
        fail("compiled steps are for float32 on a CPU: give --device cpu --dtype fp32, or use sample.py")
    model = load_model(args.ckpt, device, torch.float32)
    if not any(type(layer.mlp) is MoE for layer in model.layers):
        fail(f"{args.ckpt} has no experts in float32, and only with these are compiled steps faster: use sample.py")
    compile_steps(model)
    try:
        compile_for_one_row(model)
    except RuntimeError as e:  # dynamo and the compiler raise kinds of it
        reason = str(e).strip().partition("\n")[0]
        fail(f"the steps cannot be compiled ({reason}): install g++ and Python's headers, or use sample.py")
    sample.write(args, model)  # only the model differs from sample.py


if __name__ == "__main__":
    main()
