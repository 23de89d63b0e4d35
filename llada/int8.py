"""Weights in int8: the released 16 B parameters in 16.6 GB, memory-mapped, for a 24 GB GPU or a laptop of 32 GB.

    # every script takes the new folder by --ckpt alone
    python -m llada.int8 --src weights/llada2.1-mini --out weights/mini-int8

Every matrix (experts, attention, output layer) is stored as integers -127 .. 127 with one scale a row. The embedding,
which is looked up and never multiplied, the router, the norms and the biases stay as they are. A matrix `x` (..., N, K)
is two tensors, `x` in int8 and `x_scale` (..., N) in bfloat16, and stands for x * x_scale[..., None]. No weight is off
by more than half of its row's scale. Weights are frozen: gradients go through them to adapters and markers. README.md
says how to use them.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import check_fit, fill, read_config, read_tensors, save_tensors, stored, weight_files
from convert_weights import TEXT, copies, plan, survey, write_checkpoint
from lib.util import Parser, command, write_json
from model import Linear, Model, MoE

# M rows of activations, N and K rows and columns of a matrix; N tokens, A active experts, C channels

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


# --- the model's layers, with such weights
class Int8Linear(Linear):
    """model.Linear with a frozen int8 matrix; its bias and its LoRA are as they were."""

    def product(self, x: Tensor) -> Tensor:
        y = multiply(x.reshape(-1, self.in_features), self.weight, self.weight_scale)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


class Int8MoE(MoE):
    """model.MoE with frozen int8 experts: only those that are chosen are read."""

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows (N*A, C), sorted by expert, expert e's up to ends[e] -> (N*A, C)."""
        out = []
        for e, run in enumerate(rows.tensor_split(ends[:-1].tolist())):
            if len(run) > 0:
                gate, up = multiply(run, self.gate_up[e], self.gate_up_scale[e]).chunk(2, dim=-1)
                out.append(multiply(F.silu(gate) * up, self.down[e], self.down_scale[e]))
        return torch.cat(out)


def use_int8(model: Model) -> None:
    """The layers above in the place of a `meta` model's own. A tied output layer is the embedding, and stays."""
    for layer in model.modules():
        tied = layer is model.lm_head and model.cfg.tied
        if type(layer) is Linear and not tied:
            become(layer, Int8Linear, "weight")
        elif type(layer) is MoE:
            become(layer, Int8MoE, "gate_up", "down")


def become(layer: nn.Module, kind: type, *matrices: str) -> None:
    """Of each matrix two buffers are made, which nothing trains: its numbers, and its scales under the name _scale."""
    layer.__class__ = kind
    for name in matrices:
        shape = getattr(layer, name).shape
        delattr(layer, name)
        layer.register_buffer(name, torch.empty(shape, dtype=torch.int8, device="meta"))
        layer.register_buffer(f"{name}_scale", torch.empty(shape[:-1], dtype=torch.bfloat16, device="meta"))


def load_weights(model: Model, folder: Path, device: torch.device | str, dtype: torch.dtype) -> None:
    """What checkpoint.load_model calls for such a folder. `dtype` is that of the activations; tensors stay as stored,
    and on a CPU where they are: in the files."""
    use_int8(model)
    state = {name: tensor.to(device) for name, tensor in read_tensors(weight_files(folder))}
    fill(model, state, folder, device, dtype)


# --- converting
def int8_tensors(found: dict[str, Tensor], names: list[str], matrices: set[str]) -> dict[str, Tensor]:
    """The tensors of a shard: matrices as numbers and scales, everything else as it is."""
    tensors = {}
    for name in names:
        tensors[name] = found.pop(name)
        if name in matrices:
            tensors[name], tensors[f"{name}_scale"] = quantise(tensors[name])
    return tensors


def save_aligned(path: Path, tensors: dict[str, Tensor]) -> None:
    """A file whose numbers lie where the kernel can read them: they are its last tensors, and what is before them is a
    multiple of 8 bytes. Where that is none of 16, the header gets 8 bytes more."""
    for padding in ("", " " * 8):
        save_tensors(path, tensors, {"padding": padding})
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if (8 + header) % KERNEL_WIDTH == 0:
            break


def convert(src: Path, out: Path) -> None:
    cfg = read_config(src)
    found = survey(src)
    shards = [[planned.name for planned in shard] for shard in plan(cfg)]
    if "markers" in found:
        shards[0].append("markers")

    # the matrices are what the layers above have as numbers
    with torch.device("meta"):
        model = Model(cfg)
    expected = stored(model)
    check_fit(src, found, {name: expected[name] for name in sum(shards, [])}, "the checkpoint is incomplete")
    use_int8(model)
    matrices = {name for name, tensor in stored(model).items() if tensor.dtype == torch.int8}

    files = copies(src, *TEXT, "names.json", "toy.json", "released_config.json")
    files["config.json"] = partial(write_json, value=asdict(cfg) | {"int8": True})
    write_checkpoint(out, [partial(int8_tensors, found, names, matrices) for names in shards], files, save_aligned)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--src", type=Path, required=True, help="a checkpoint in our layout")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder, or one left incomplete")
    args = parser.parse_args()
    convert(args.src, args.out)


if __name__ == "__main__":
    main()
