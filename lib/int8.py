"""Matrices of 8-bit integers, and the layers that multiply by them. released/int8.py writes such a checkpoint.

A matrix `x` (..., N, K) becomes two tensors: `x`, integers in -127 .. 127, and `x_scale` (..., N) in bfloat16. Together
they mean x * x_scale[..., None], and no weight is off by more than half of its row's scale. These tensors do not learn,
but gradients go through them to LoRA and the markers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# M rows of activations, N and K rows and columns of a matrix; in Int8Experts N tokens, A active experts, C channels

FEW = 12  # up to this many rows the CPU's kernel is faster than unpacking
# the CPU's kernel reads this many columns at once, from addresses that are a multiple of this number; with other sizes
# it reads past the end of a matrix, or the process is killed
KERNEL_WIDTH = 16
UNPACKED = 2**20  # this many numbers of a matrix are unpacked at a time, so that they fit into a CPU's caches


# --- numbers
def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """(..., N, K) in any float dtype -> int8 numbers of that shape, and the scales of their rows, (..., N) bfloat16."""
    matrix = w.reshape(-1, w.shape[-1])
    numbers = torch.empty(matrix.shape, dtype=torch.int8)
    scales = []
    for rows, place in zip(some_rows(matrix), some_rows(numbers), strict=True):
        # by rounding a scale may be too small by 1/512 of itself; 127 / 512 is below .5, so no number rounds to 128
        scale = (rows.abs().amax(-1).float() / 127).bfloat16()
        scale = scale.masked_fill(scale == 0, 1.0)  # for a row of zeros any scale will do
        place.copy_((rows.float() / scale[:, None].float()).round())
        scales.append(scale)
    return numbers.view(w.shape), torch.cat(scales).view(w.shape[:-1])


def some_rows(matrix: Tensor) -> tuple[Tensor, ...]:
    """The rows of a matrix (N, K), in parts; one part at a time is unpacked."""
    return matrix.split(max(1, UNPACKED // matrix.shape[1]))


def kernel_takes(x: Tensor, numbers: Tensor) -> bool:
    few = x.dtype == torch.bfloat16 and len(x) <= FEW
    return few and numbers.shape[1] % KERNEL_WIDTH == 0 and numbers.data_ptr() % KERNEL_WIDTH == 0


def multiply(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) times the transposed matrix (N, K) -> (M, N). The product is scaled: integers are exact in any dtype."""
    # unpack the whole matrix on a GPU, or if x needs a gradient: autograd keeps it for the backward
    if x.requires_grad or x.device.type != "cpu":
        return F.linear(x, numbers.to(x.dtype)) * scale.to(x.dtype)

    if kernel_takes(x, numbers):
        return torch._weight_int8pack_mm(x.contiguous(), numbers, scale)
    products = [F.linear(x, rows.to(x.dtype)) for rows in some_rows(numbers)]
    return torch.cat(products, dim=1) * scale.to(x.dtype)


# --- the model's layers, with such matrices
class Int8Product:
    """Methods for layers.Linear with a frozen matrix of integers. The bias and LoRA are as before."""

    matrices = ("weight",)

    def product(self, x: Tensor) -> Tensor:
        y = multiply(x.reshape(-1, self.in_features), self.weight, self.weight_scale)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


class Int8Experts:
    """Methods for layers.MoE with frozen experts of integers. Only the chosen experts are read."""

    matrices = ("gate_up", "down")

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows (N*A, C), sorted by expert; those of expert e end at ends[e] -> (N*A, C)."""
        out = []
        for e, own in enumerate(rows.tensor_split(ends[:-1].tolist())):
            if len(own) > 0:
                gate, up = multiply(own, self.gate_up[e], self.gate_up_scale[e]).chunk(2, dim=-1)
                out.append(multiply(F.silu(gate) * up, self.down[e], self.down_scale[e]))
        return torch.cat(out)


def use_int8(model: nn.Module) -> None:
    """Give every layer of a `meta` model the product or products above. A tied output layer, the embedding, stays."""
    for layer in model.modules():
        if hasattr(layer, "products"):
            front = Int8Experts
        elif hasattr(layer, "product") and not (layer is model.lm_head and model.cfg.tied):
            front = Int8Product
        else:
            continue
        kind = type(layer)
        layer.__class__ = type(f"Int8{kind.__name__}", (front, kind), {})  # with the methods of `front` before its own

        # each matrix becomes two buffers, which do not learn: its numbers, and the scales of its rows
        for name in front.matrices:
            shape = getattr(layer, name).shape
            delattr(layer, name)
            layer.register_buffer(name, torch.empty(shape, dtype=torch.int8, device="meta"))
            layer.register_buffer(f"{name}_scale", torch.empty(shape[:-1], dtype=torch.bfloat16, device="meta"))
