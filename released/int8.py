"""Weights in int8: the released 16 B parameters in 16.6 GB, memory-mapped, for a 24 GB GPU or a laptop of 32 GB.

    # the released layout or ours -> our layout in int8; every script takes the folder by --ckpt alone
    python -m released.int8 --src LLaDA2.1-mini/ --out weights/mini-int8

Every matrix (experts, attention, head) is stored as integers -127 .. 127 with one scale a row. The embedding, which is
looked up and never multiplied, the router, the norms and the biases stay as they are. A matrix `x` (..., N, K) is two
tensors, `x` in int8 and `x_scale` (..., N) in bfloat16, and stands for x * x_scale[..., None]. No weight is off by more
than half of its row's scale.

On a CPU nothing is copied while loading: the files are memory-mapped, and a pass reads the experts that it uses. With
--dtype bf16 products of few rows go through torch's int8 kernel, and all others unpack the matrix a part at a time; so
does --dtype fp32, which is exact and slower. On a GPU the active experts of a layer are unpacked for the pass.
The weights are frozen: gradients go through them to adapters, markers and heads, which train as on any base.

One layer at a time is in memory while converting. `config.json` names this module and is written last: a folder without
one is incomplete, and the same command completes it.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import check_fit, fingerprint, read_config, read_tensors, save_tensors, stored, weight_files
from convert_weights import TEXT, Shard, Stored, copies, copy_file, plan, read, read_released, survey, write_checkpoint
from lib.config import Config
from lib.util import Parser, command, fail, read_json, write_json
from model import Linear, Model, MoE

# M rows of activations, N and K rows and columns of a matrix, E experts, A active experts, C channels, T tokens

FEW = 12  # rows up to which the CPU's kernel is faster than unpacking
# the CPU's kernel reads so many columns at once, from addresses that are a multiple of it; elsewhere it reads past the
# end of a matrix, or the process is killed
KERNEL_WIDTH = 16
# numbers of a matrix that are unpacked at a time: what a CPU's caches hold, what keeps a GPU busy
UNPACKED = {"cpu": 2**20, "cuda": 2**27, "mps": 2**25}


# ---------------------------------------------------------------------------------------------------------------------
# numbers


def row_scales(w: Tensor) -> Tensor:
    """(..., N, K) any float -> (..., N) bfloat16: the least scales for which no number leaves -127 .. 127."""
    exact = w.abs().amax(-1).float() / 127
    scale = exact.bfloat16()
    # rounding to bfloat16 must not make a scale too small
    too_small = scale.float() < exact
    scale = torch.where(too_small, torch.nextafter(scale, torch.full_like(scale, math.inf)), scale)
    # a row of zeros has any scale
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """(..., N, K) any float -> int8 numbers of that shape, and their rows' scales (..., N) bfloat16."""
    rows = w.reshape(-1, w.shape[-1])
    numbers = torch.empty(rows.shape, dtype=torch.int8)
    scale = torch.empty(len(rows), dtype=torch.bfloat16)
    for some in row_chunks(numbers):
        scale[some] = row_scales(rows[some])
        numbers[some] = (rows[some].float() / scale[some, None].float()).round().to(torch.int8)
    return numbers.view(w.shape), scale.view(w.shape[:-1])


def row_chunks(numbers: Tensor) -> Iterator[slice]:
    """Rows of a matrix (N, K), as many at a time as are unpacked together."""
    size = max(1, UNPACKED.get(numbers.device.type, 2**20) // numbers.shape[1])
    for first in range(0, len(numbers), size):
        yield slice(first, first + size)


def kernel_takes(x: Tensor, numbers: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or len(x) > FEW:
        return False
    return numbers.shape[1] % KERNEL_WIDTH == 0 and numbers.data_ptr() % KERNEL_WIDTH == 0


def multiply(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) times the matrix (N, K), transposed -> (M, N). The scales are applied to the product, not to the matrix:
    integers up to 127 are exact in every dtype."""
    if kernel_takes(x, numbers):
        return torch._weight_int8pack_mm(x.contiguous(), numbers, scale)
    products = [F.linear(x, numbers[rows].to(x.dtype)) for rows in row_chunks(numbers)]
    return torch.cat(products, dim=1) * scale.to(x.dtype)


def multiply_back(g: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """The gradient of `multiply` with respect to x: g (M, N) times the matrix (N, K) -> (M, K)."""
    scaled = g * scale.to(g.dtype)
    total = torch.zeros(len(g), numbers.shape[1], device=g.device)
    for rows in row_chunks(numbers):
        total += scaled[:, rows] @ numbers[rows].to(g.dtype)
    return total.to(g.dtype)


class Product(torch.autograd.Function):
    """Rows times matrices that stay as they are. x (M, K) is sorted by matrix: `ends` says where the rows of each of
    the E matrices (E, N, K) end. Nothing of a pass is kept for the backward but the matrices themselves."""

    @staticmethod
    def forward(ctx, x: Tensor, numbers: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(numbers, scale, ends)
        return by_matrix(x, numbers, scale, ends, back=False)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None, None]:
        return by_matrix(g.contiguous(), *ctx.saved_tensors, back=True), None, None, None


def by_matrix(x: Tensor, numbers: Tensor, scale: Tensor, ends: Tensor, back: bool) -> Tensor:
    """Each run of rows of x times its matrix, (M, K) -> (M, N); `back`: the way of the gradient, (M, N) -> (M, K)."""
    if x.device.type != "cpu" and len(numbers) > 1:
        return all_active(x, numbers, scale, ends, back)
    step = multiply
    width = numbers.shape[1]
    if back:
        step = multiply_back
        width = numbers.shape[2]

    y = x.new_empty(len(x), width)
    first = 0
    for e, end in enumerate(ends.tolist()):
        if end > first:
            y[first:end] = step(x[first:end], numbers[e], scale[e])
        first = end
    return y


def all_active(x: Tensor, numbers: Tensor, scale: Tensor, ends: Tensor, back: bool) -> Tensor:
    """What `by_matrix` does, for a GPU: the matrices that have rows are unpacked together, for one grouped matmul."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    active = counts.nonzero()[:, 0]
    unpacked = numbers[active].to(x.dtype)  # (active, N, K)
    row_scale = scale[active].to(x.dtype).repeat_interleave(counts[active], dim=0)  # (M, N)
    if back:
        return F.grouped_mm(x * row_scale, unpacked, offs=ends[active])
    return F.grouped_mm(x, unpacked.transpose(1, 2), offs=ends[active]) * row_scale


# ---------------------------------------------------------------------------------------------------------------------
# the model's layers, with such weights


def int8_buffers(module: nn.Module, name: str) -> None:
    """The parameter `name` becomes two buffers, which nothing trains: the numbers, and `name`_scale."""
    shape = getattr(module, name).shape
    delattr(module, name)
    module.register_buffer(name, torch.empty(shape, dtype=torch.int8))
    module.register_buffer(f"{name}_scale", torch.empty(shape[:-1], dtype=torch.bfloat16))


class Int8Linear(Linear):
    """model.Linear with a frozen int8 matrix; its bias and its LoRA are as they were."""

    def __init__(self, n_in: int, n_out: int, bias: bool):
        super().__init__(n_in, n_out, bias)
        int8_buffers(self, "weight")

    def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        end = torch.tensor([len(flat)], dtype=torch.int32)
        y = Product.apply(flat, self.weight[None], self.weight_scale[None], end)
        y = y.view(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        if self.lora_A is None:
            return y
        delta = self.lora_scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        if where is not None:
            delta = delta * where
        return y + delta


class Int8MoE(MoE):
    """model.MoE with frozen int8 experts: only those that are chosen are read."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        int8_buffers(self, "gate_up")
        int8_buffers(self, "down")

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x (T, C), chosen (T, A) int64, weights (T, A) float32 -> (T, C), as model.MoE.experts."""
        expert, order = chosen.flatten().sort(stable=True)
        every = torch.arange(len(self.router), device=x.device)
        ends = torch.searchsorted(expert, every, right=True, out_int32=True)

        # each expert on its run of rows
        rows = F.embedding(order // self.n_active, x)  # (T*A, C)
        gate, up = Product.apply(rows, self.gate_up, self.gate_up_scale, ends).chunk(2, dim=-1)
        out = Product.apply(F.silu(gate) * up, self.down, self.down_scale, ends)

        # the weighted sum of each token's A rows, in float32
        place = order.argsort().view_as(chosen)
        return F.embedding_bag(place, out.float(), per_sample_weights=weights, mode="sum").to(x.dtype)


def use_int8(model: Model) -> None:
    """The layers above in the place of the model's own, on `meta`. A tied head is the embedding, and stays."""
    with torch.device("meta"):
        for block in model.layers:
            if isinstance(block.mlp, MoE):
                block.register_module("mlp", Int8MoE(model.cfg))
        for parent in [model, *model.layers.modules()]:
            for name, layer in list(parent.named_children()):
                tied = layer is model.lm_head and model.cfg.tied
                if type(layer) is Linear and not tied:
                    small = Int8Linear(layer.in_features, layer.out_features, layer.bias is not None)
                    parent.register_module(name, small)


def load_weights(model: Model, folder: Path, device: torch.device | str, dtype: torch.dtype) -> None:
    """What checkpoint.load_model calls for such a folder. `dtype` is that of the activations; tensors stay as stored,
    and on a CPU where they are: in the files."""
    use_int8(model)
    cfg = model.cfg
    state = {name: tensor.to(device) for name, tensor in read_tensors(weight_files(folder))}
    markers = state.get("markers", torch.zeros(1, cfg.n_embd, device=device))
    state["markers"] = F.pad(markers, (0, 0, 0, cfg.n_rounds - len(markers)))

    expected = stored(model)
    check_fit(folder, state, expected, "the checkpoint is incomplete: convert it again")
    for name, tensor in state.items():
        if (tensor.dtype == torch.int8) != (expected[name].dtype == torch.int8):
            fail(f"{folder}: {name} is stored as {tensor.dtype}: convert it again")
    model.load_state_dict(state, assign=True, strict=False)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight
    model.compute_dtype = dtype


# ---------------------------------------------------------------------------------------------------------------------
# converting


def read_ours(src: Path) -> tuple[Config, list[Shard]]:
    """A folder in our layout, a shard a layer."""
    cfg = read_config(src)
    found = survey(src)
    names = [[planned.name for planned in shard] for shard in plan(cfg)]
    if "markers" in found:
        names[0].append("markers")
    with torch.device("meta"):
        expected = stored(Model(cfg))
    check_fit(src, found, {name: expected[name] for name in sum(names, [])}, "the checkpoint is incomplete")
    return cfg, [partial(some_tensors, found, some) for some in names]


def some_tensors(found: dict[str, Stored], names: list[str]) -> dict[str, Tensor]:
    return dict(zip(names, read([found[name] for name in names]), strict=True))


def int8_tensors(shard: Shard, matrices: set[str]) -> dict[str, Tensor]:
    """The matrices of a shard as numbers and scales, everything else as it is."""
    tensors = {}
    for name, tensor in shard().items():
        if name not in matrices:
            tensors[name] = tensor
            continue
        tensors[name], scale = quantise(tensor)
        if not scale.isfinite().all():
            fail(f"{name}: a weight is infinite or no number")
        tensors[f"{name}_scale"] = scale
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
    raw = read_json(src / "config.json", "config of a checkpoint")
    if "loader" in raw:
        fail(f"{src} is stored by {raw['loader']} already")
    files = copies(src, *TEXT, "names.json", "toy.json", "released_config.json")
    ours = "n_layer" in raw
    if ours:
        cfg, shards = read_ours(src)
    else:
        cfg, shards, _ = read_released(src)
        files["released_config.json"] = partial(copy_file, src / "config.json")

    # the matrices, by what a model of this geometry makes of them
    with torch.device("meta"):
        small = Model(cfg)
    use_int8(small)
    matrices = {name for name, tensor in stored(small).items() if tensor.dtype == torch.int8}

    config = asdict(cfg) | {"loader": "released.int8"}
    if ours:  # that base's adapters fit this one, too
        config["fingerprint"] = fingerprint(src)
    files["config.json"] = partial(write_json, value=config)
    shards = [partial(int8_tensors, shard, matrices) for shard in shards]
    write_checkpoint(out, shards, files, save_aligned)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--src", type=Path, required=True, help="a checkpoint in the released layout, or in ours")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder, or one left incomplete")
    args = parser.parse_args()
    convert(args.src, args.out)


if __name__ == "__main__":
    main()
