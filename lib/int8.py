"""Matrices as integers: their numbers, and the layers that multiply by them. llada/int8.py writes such a checkpoint.

A matrix `x` (..., N, K) is two tensors: `x`, integers -127 .. 127, and `x_scale` (..., N) in bfloat16. It stands for
x * x_scale[..., None]. No weight is off by more than half of its row's scale. Nothing trains these tensors; gradients
go through them, to what learns beside them.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# M rows of activations, N and K rows and columns of a matrix; in Int8Experts N tokens, A active experts, C channels

FEW = 12  # rows up to which the CPU's kernel is faster than unpacking
# the CPU's kernel reads so many columns at once, from addresses that are a multiple of it; elsewhere it reads past the
# end of a matrix, or the process is killed
KERNEL_WIDTH = 16
UNPACKED = 2**20  # numbers of a matrix that are unpacked at a time: what a CPU's caches hold


# --- numbers
def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """(..., N, K) any float -> int8 numbers of that shape, and their rows' scales (..., N) bfloat16."""
    matrix = w.reshape(-1, w.shape[-1])
    numbers = torch.empty(matrix.shape, dtype=torch.int8)
    scales = []
    for rows, place in zip(some_rows(matrix), some_rows(numbers), strict=True):
        # rounded, a scale is too small by 1/512 at most, and 127 times that is rounded away again
        scale = (rows.abs().amax(-1).float() / 127).bfloat16()
        scale = scale.masked_fill(scale == 0, 1.0)  # a row of zeros has any scale
        place.copy_((rows.float() / scale[:, None].float()).round())
        scales.append(scale)
    return numbers.view(w.shape), torch.cat(scales).view(w.shape[:-1])


def some_rows(matrix: Tensor) -> tuple[Tensor, ...]:
    """The rows of a matrix (N, K), as many at a time as are unpacked together."""
    return matrix.split(max(1, UNPACKED // matrix.shape[1]))


def kernel_takes(x: Tensor, numbers: Tensor) -> bool:
    few = x.dtype == torch.bfloat16 and len(x) <= FEW
    return few and numbers.shape[1] % KERNEL_WIDTH == 0 and numbers.data_ptr() % KERNEL_WIDTH == 0


def multiply(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) times the matrix (N, K), transposed -> (M, N). The scales are applied to the product, not to the matrix:
    integers up to 127 are exact in every dtype."""
    # a GPU unpacks the matrix whole, and so does autograd, which keeps it for the way back to x
    if x.requires_grad or x.device.type != "cpu":
        return F.linear(x, numbers.to(x.dtype)) * scale.to(x.dtype)

    if kernel_takes(x, numbers):
        return torch._weight_int8pack_mm(x.contiguous(), numbers, scale)
    products = [F.linear(x, rows.to(x.dtype)) for rows in some_rows(numbers)]
    return torch.cat(products, dim=1) * scale.to(x.dtype)


# --- the model's layers, with such matrices
class Int8Product:
    """In front of model.Linear: its matrix is frozen integers; its bias and its LoRA are as they were."""

    matrices = ("weight",)

    def product(self, x: Tensor) -> Tensor:
        y = multiply(x.reshape(-1, self.in_features), self.weight, self.weight_scale)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


class Int8Experts:
    """In front of model.MoE: its experts are frozen integers, and only those that are chosen are read."""

    matrices = ("gate_up", "down")

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows (N*A, C), sorted by expert, expert e's up to ends[e] -> (N*A, C)."""
        out = []
        for e, run in enumerate(rows.tensor_split(ends[:-1].tolist())):
            if len(run) > 0:
                gate, up = multiply(run, self.gate_up[e], self.gate_up_scale[e]).chunk(2, dim=-1)
                out.append(multiply(F.silu(gate) * up, self.down[e], self.down_scale[e]))
        return torch.cat(out)


def use_int8(model: nn.Module) -> None:
    """Every layer of a `meta` model that has a `product` or `products` gets the one above in its place. A tied output
    layer is the embedding, and stays."""
    for layer in model.modules():
        tied = layer is model.lm_head and model.cfg.tied
        if hasattr(layer, "product") and not tied:
            become(layer, Int8Product)
        elif hasattr(layer, "products"):
            become(layer, Int8Experts)


def become(layer: nn.Module, front: type) -> None:
    """Of each matrix two buffers are made, which nothing trains: its numbers, and its scales under the name _scale."""
    layer.__class__ = with_front(front, type(layer))
    for name in front.matrices:
        shape = getattr(layer, name).shape
        delattr(layer, name)
        layer.register_buffer(name, torch.empty(shape, dtype=torch.int8, device="meta"))
        layer.register_buffer(f"{name}_scale", torch.empty(shape[:-1], dtype=torch.bfloat16, device="meta"))


@cache
def with_front(front: type, kind: type) -> type:
    """A layer's class with other methods in front of its own."""
    return type(f"Int8{kind.__name__}", (front, kind), {})
