"""Weights in int8: the released 16 B parameters in 16.6 GB, memory-mapped, for a 24 GB GPU or a laptop of 32 GB.

    # the released layout or ours -> our layout in int8; every script takes the folder by --ckpt alone
    python -m released.int8 --src LLaDA2.1-mini/ --out weights/mini-int8
    python -m released.chat --ckpt weights/mini-int8 --dtype bf16 --prompt "Write a quicksort in Python."

Every matrix (experts, attention, head) is stored as integers -127 .. 127 with one scale a row. The embedding, which is
looked up and never multiplied, the router, the norms and the biases stay as they are. A matrix `x` (..., N, K) is two
tensors, `x` in int8 and `x_scale` (..., N) in bfloat16, and stands for x * x_scale[..., None]. No weight is off by more
than half of its row's scale.

On a CPU nothing is copied while loading: the files are memory-mapped, and a pass reads the experts that it uses. With
--dtype bf16 products of few rows go through torch's int8 kernel, and all others unpack the matrix a part at a time; so
does --dtype fp32, which is exact and slower. On a GPU the active experts of a layer are unpacked for the pass.
The weights are frozen: gradients go through them to adapters, markers and joint heads, which train as on any base.

`config.json` names this module and is written last: a folder without one is incomplete, and the same command completes
it. Memory while converting is that of one layer.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convert_weights
from checkpoint import check_fit, fingerprint, open_tensors, read_config, read_tensors, stored, weight_files
from convert_weights import (
    INDEX,
    Shards,
    Target,
    announce,
    checkpoint_files,
    copy_file,
    our_config,
    plan,
    survey,
    to_ours,
    write_folder,
)
from lib.tokenizer import bpe_tokenizer
from lib.util import fail, read_json, replace_file, write_json
from model import Config, Linear, Model, MoE

# M rows of activations, N and K rows and columns of a matrix, E experts, A active experts, C channels, T tokens

VERSION = "1"  # of the layout of such a folder, in its index
FEW = 12  # rows up to which the CPU's kernel is faster than unpacking
# the CPU's kernel reads so many columns at once, from addresses that are a multiple of it; elsewhere it reads past the
# end of a matrix, or the process is killed
KERNEL_WIDTH = 16
# numbers of a matrix that are unpacked at a time: what a CPU's caches hold, what keeps a GPU busy
UNPACKED = {"cpu": 2**20, "cuda": 2**27, "mps": 2**25}
KEPT_FILES = ("names.json", "toy.json", "released_config.json")


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
    scale = row_scales(w)
    numbers = w.to(torch.float32, copy=True).div_(scale.float()[..., None]).round_()
    return numbers.to(torch.int8), scale


def dequantise(numbers: Tensor, scale: Tensor) -> Tensor:
    """The matrix that they stand for, (..., N, K) float32, without rounding."""
    return numbers.float() * scale.float()[..., None]


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
    step = multiply_back if back else multiply
    y = x.new_empty(len(x), numbers.shape[2 if back else 1])
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


def store_as_int8(module: nn.Module, name: str) -> None:
    """The parameter `name` becomes two buffers, which nothing trains: the numbers, and `name`_scale."""
    shape = getattr(module, name).shape
    delattr(module, name)
    module.register_buffer(name, torch.empty(shape, dtype=torch.int8, device="meta"))
    module.register_buffer(f"{name}_scale", torch.empty(shape[:-1], dtype=torch.bfloat16, device="meta"))


class Int8Linear(Linear):
    """model.Linear with a frozen int8 matrix; its bias and its LoRA are as they were."""

    def forward(self, x: Tensor, lora: bool | Tensor = True) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        end = torch.tensor([len(flat)], dtype=torch.int32)
        y = Product.apply(flat, self.weight[None], self.weight_scale[None], end)
        y = y.view(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        if self.lora_A is None or lora is False:
            return y
        delta = self.lora_scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        return y + (delta if lora is True else delta * lora)


class Int8MoE(MoE):
    """model.MoE with frozen int8 experts: only those that are chosen are read."""

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


def int8_model(cfg: Config) -> Model:
    """The model on `meta`, with the layers above in place of its own. A tied head is the embedding, and stays."""
    with torch.device("meta"):
        model = Model(cfg)
    for module in model.modules():
        if type(module) is Linear and not (cfg.tied and module is model.lm_head):
            module.__class__ = Int8Linear
            store_as_int8(module, "weight")
        elif type(module) is MoE:
            module.__class__ = Int8MoE
            store_as_int8(module, "gate_up")
            store_as_int8(module, "down")
    return model


# ---------------------------------------------------------------------------------------------------------------------
# loading


def load_weights(folder: Path, cfg: Config, device: torch.device | str, dtype: torch.dtype) -> Model:
    """What checkpoint.load_model calls for such a folder. `dtype` is that of the activations; tensors stay as stored,
    and on a CPU where they are: in the files. Bad folders are refused before a weight is read."""
    device = torch.device(device)
    model = int8_model(cfg)
    check_folder(folder, model)
    check_machine(folder, device, dtype)

    state = {name: tensor.to(device) for name, tensor in read_tensors(weight_files(folder))}
    markers = state.get("markers", torch.zeros(1, cfg.n_embd, device=device))
    state["markers"] = F.pad(markers, (0, 0, 0, cfg.n_rounds - len(markers)))
    model.load_state_dict(state, assign=True, strict=False)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight
    model.compute_dtype = dtype
    return model


def check_folder(folder: Path, model: Model) -> None:
    """Refuse another version, and tensors that are missing, unknown, or of another shape or kind."""
    metadata = read_json(folder / INDEX, "weight index").get("metadata")
    version = None
    if isinstance(metadata, dict):
        version = metadata.get("int8")
    if version != VERSION:
        fail(f"{folder} holds int8 weights of version {version}, this code reads {VERSION}: convert them again")
    held = {}
    integers = set()
    for path in weight_files(folder):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(name)
                held[name] = torch.empty(part.get_shape(), device="meta")
                if part.get_dtype() == "I8":
                    integers.add(name)
    expected = stored(model)
    if "markers" not in held:  # a converted checkpoint has none: they are zero
        del expected["markers"]
    else:
        expected["markers"] = held["markers"]
    check_fit(folder, held, expected, "the checkpoint is incomplete: convert it again")
    for name, tensor in expected.items():
        if (tensor.dtype == torch.int8) != (name in integers):
            kinds = {True: "int8", False: "floating point"}
            fail(f"{folder}: {name} is {kinds[name in integers]}, not {kinds[name not in integers]}: convert it again")


def check_machine(folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a CPU without the kernel, and a device whose memory is smaller than the weights."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not hasattr(torch, "_weight_int8pack_mm"):
        fail("this torch has no int8 kernel for a CPU (torch._weight_int8pack_mm): take --dtype fp32, or torch 2.13")
    needed = sum(path.stat().st_size for path in weight_files(folder))
    room = memory(device)
    if needed > room:
        fail(f"{folder} needs {needed / 1e9:.1f} GB of memory, {device} has {room / 1e9:.1f}: take a larger device")


def memory(device: torch.device) -> float:
    """Bytes: what is free of a GPU's, all of the machine's otherwise (mapped files share it with everything else)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---------------------------------------------------------------------------------------------------------------------
# converting


@dataclass
class Quantised(Target):
    """The numbers ("I8") or the scales ("BF16") of the matrix `source`, which may lie in pieces."""

    source: Target = None

    @property
    def size(self) -> int:
        itemsize = {"I8": 1, "BF16": 2}[self.dtype]
        return math.prod(self.shape) * itemsize

    def parts(self) -> Iterator[Tensor]:
        columns = self.source.shape[-1]
        for piece in self.source.parts():
            for w in piece.view(-1, columns).split(512):
                yield self.numbers_or_scales(w)

    def numbers_or_scales(self, w: Tensor) -> Tensor:
        numbers, scale = quantise(w) if self.dtype == "I8" else (None, row_scales(w))
        if not scale.isfinite().all():
            fail(f"{self.source.pieces[0].file}: {self.source.pieces[0].name}: a weight is infinite or no number")
        return scale if numbers is None else numbers


def to_int8(shards: Shards, cfg: Config) -> Shards:
    """Every matrix as numbers and scales, everything else as it is."""
    expected = stored(int8_model(cfg))
    small: Shards = []
    for tensors in shards:
        small.append({})
        for name, source in tensors.items():
            if expected[name].dtype == torch.int8:
                small[-1][name] = Quantised("I8", source.shape, source.pieces, source)
                small[-1][f"{name}_scale"] = Quantised("BF16", source.shape[:-1], source.pieces, source)
            else:
                small[-1][name] = source
    return small


def read_ours(src: Path) -> tuple[Config, Shards]:
    """A folder in our layout, one shard a layer."""
    cfg = read_config(src)
    found = survey(src)
    expected = {name: torch.empty(shape, device="meta") for _, name, shape, _, _ in plan(cfg)}
    shards: Shards = [{} for _ in range(cfg.n_layer + 2)]
    if "markers" in found:
        expected["markers"] = torch.empty(found["markers"].shape, device="meta")
        shards[0]["markers"] = Target(found["markers"].dtype, found["markers"].shape, [found["markers"]])
    check_fit(src, found, expected, "the checkpoint is incomplete")
    for shard, name, shape, _, _ in plan(cfg):
        shards[shard][name] = Target(found[name].dtype, shape, [found[name]])
    return cfg, shards


def read_released(src: Path, raw: dict) -> tuple[Config, Shards]:
    """A folder in the released layout, refused where convert_weights.py refuses it."""
    tokenizer = bpe_tokenizer(src / "tokenizer.json")
    cfg = our_config(raw, src / "config.json", tokenizer.eos_id, tokenizer.mask_id)
    return cfg, to_ours(survey(src), cfg, src)


def write_aligned(path: Path, tensors: dict[str, Target]) -> None:
    """A safetensors file, written piece by piece, whose int8 tensors lie where the kernel can read them: the numbers
    come first, and the header fills up whole lines of memory."""
    order = sorted(tensors, key=lambda name: tensors[name].dtype != "I8")  # stable
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        end = at + tensors[name].size
        header[name] = {"dtype": tensors[name].dtype, "shape": tensors[name].shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % 64)  # 8: the number in front of it

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for name in order:
                for part in tensors[name].parts():
                    file.write(part.contiguous().flatten().view(torch.uint8).numpy())

    replace_file(path, write)


def unless_there(path: Path, write: Callable[[Path], None]) -> None:
    """Shards are renamed into place when they are whole: what an interrupted run has written is not written again."""
    if not path.exists():
        write(path)


def convert(src: Path, out: Path) -> None:
    raw = read_json(src / "config.json", "config of a checkpoint")
    if "loader" in raw:
        fail(f"{src} is stored by {raw['loader']} already")
    cfg, shards = read_ours(src) if "n_layer" in raw else read_released(src, raw)
    shards = to_int8(shards, cfg)
    files = checkpoint_files(shards, src, int8=VERSION)
    names = [name for name in files if name.endswith(".safetensors")]
    for name, tensors in zip(names, shards, strict=True):
        files[name] = partial(write_aligned, tensors=tensors)
    for name in KEPT_FILES:
        if (src / name).exists():
            files[name] = partial(copy_file, src / name)
    if "n_layer" not in raw:
        files["released_config.json"] = partial(copy_file, src / "config.json")
    files = {name: partial(unless_there, write=write) for name, write in files.items()}
    config = asdict(cfg) | {"loader": "released.int8"}
    if "n_layer" in raw:  # made from a folder of ours: that base's adapters fit this one, too
        config["fingerprint"] = fingerprint(src)
    files["config.json"] = partial(write_json, value=config)
    write_folder(out, files, announce(survey(src), shards, src, out))


def main() -> None:
    convert_weights.main(__doc__, "a checkpoint in the released layout, or in ours", convert)


if __name__ == "__main__":
    main()
