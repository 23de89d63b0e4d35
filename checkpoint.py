"""The folders that train.py and convert_weights.py write, and what comes back from them.

config.json            the model's geometry and ids, written last: a folder that has one is whole
model.safetensors      all parameters and markers, or shards with model.safetensors.index.json
tokenizer.json         where the model reads byte-level BPE
adapter.json           instead of config.json: where the base lies (relative to this folder) and its fingerprint, n and
                       K, LoRA's rank and scale or a head of beyond/, and the settings to decode it by
adapter.safetensors    LoRA matrices and markers, or the head
state.safetensors      what a training run resumes from: trained weights and AdamW's moments; log.jsonl, train.json

A folder of either kind is loaded by load_model.
"""

import hashlib
import importlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lib.config import Config
from lib.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer
from lib.util import fail, read_json, reading, replace_file, write_json
from model import Model


# --- files of tensors
def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all."""
    on_cpu = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        # save_file makes a file that its owner alone may read: give it what others have
        temporary.touch()
        usual = temporary.stat().st_mode
        save_file(on_cpu, temporary, metadata)
        temporary.chmod(usual)

    replace_file(path, write)


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors of these files. They are mapped: what is not used is not read."""
    for path in files:
        with reading(path, "safetensors file"), safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        yield from found.items()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights: one, or the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]

    with reading(index, "weight index"):
        shards = sorted(set(read_json(index, "weight index")["weight_map"].values()))
    for shard in shards:
        # a name and no path: what lies outside the folder is none of its weights
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", str(shard)):
            fail(f"{index}: {shard!r} in weight_map is not the name of a .safetensors file of this folder")
    return [folder / shard for shard in shards]


def check_fit(path: Path, held: dict, expected: dict, hint: str, dropped: dict[str, str] | None = None) -> None:
    """Refuse unknown tensors, missing ones, other shapes. dropped: what may be left, and why."""

    def shape(tensors: dict, name: str) -> str:
        return f"shape {list(tensors[name].shape)}" if name in tensors else "no such tensor"

    for name in sorted(held.keys() | expected.keys()):
        there = shape(held, name)
        wanted = shape(expected, name)
        if dropped and name in dropped and name not in expected:
            print(f"dropped {name}: {dropped[name]}")
        elif there != wanted:
            fail(f"{path}: {name}: {there} there, {wanted} in the model: {hint}")


# --- a model's folder
def new_model(cfg: Config, generator: torch.Generator, device: torch.device | str = "cpu") -> Model:
    """Fresh weights: matrices are normal (initial_std), norms are one, markers and biases are zero."""
    with torch.device(device):
        model = Model(cfg)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.zero_()
        elif p.dim() > 1 and name != "markers":
            # drawn on the CPU, so that every device gets the same weights
            drawn = torch.empty(p.shape).normal_(0.0, initial_std(name, cfg), generator=generator)
            p.data.copy_(drawn)
    return model


def initial_std(name: str, cfg: Config) -> float:
    """Standard deviation of a matrix's first values."""
    # at 0.02 the layers drown a token's identity, and copying visible tokens is learned late
    if name == "wte.weight":
        return 1.0
    if name == "lm_head.weight":
        return 0.02

    # 2 L projections write to the residual stream: scaled as in GPT-2, their sum keeps its size
    std = cfg.n_embd**-0.5
    if name.endswith(("proj.weight", "down.weight", "mlp.down")):
        std = std / math.sqrt(2 * cfg.n_layer)
    return std


def stored(model: Model) -> dict[str, Tensor]:
    """What model.safetensors holds: all but adapters and heads, and a tied LM head once."""
    kept = {k: v for k, v in model.state_dict().items() if "lora_" not in k and not k.startswith("second_look.")}
    if model.cfg.tied:
        del kept["lm_head.weight"]
    return kept


def save_model(model: Model, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Config last: a folder that has one is whole. weights: stored(model), if at hand."""
    save_tensors(folder / "model.safetensors", weights or stored(model))
    write_json(folder / "config.json", asdict(model.cfg))


def read_config(folder: Path) -> Config:
    """The geometry of a folder, or of an adapter's base."""
    folder = base_of(folder)
    path = folder / "config.json"
    raw = read_json(path, "checkpoint config (is this a checkpoint folder?)")
    if "model_type" in raw:
        fail(f"{path} is a released checkpoint's: `python convert_weights.py --src {folder} --out DIR` first")
    raw.pop("fingerprint", None)  # of the base, not of the geometry: see fingerprint()
    raw.pop("loader", None)  # how the weights are stored: see loader_of()
    with reading(path, "checkpoint config"):
        return Config(**raw)


def load_model(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype, kind: type[Model] = Model,
    make_head: Callable[[Config], nn.Module] | None = None, **overrides,
) -> Model:  # fmt: skip
    """A model from its folder, or a base with an adapter from the adapter's.

    Parameters take `dtype`; expert_bias and adapters stay float32. `kind`: Model, or one with other layers.
    `make_head`: a new head, to be trained. `overrides`: of config fields (n_last, n_rounds, block_length);
    an adapter brings its own. Markers that the checkpoint lacks start at zero.
    """
    folder = Path(folder)
    base = base_of(folder)
    changes = {name: value for name, value in overrides.items() if value is not None}
    adapter = about_adapter(folder)
    if adapter:
        check_base(base, folder)
        with reading(folder / "adapter.json", "adapter"):
            changes |= {name: adapter["model"][name] for name in ("n_last", "n_rounds")}
    cfg = replace(read_config(base), **changes)

    # no memory yet for the base, only names and shapes
    head = None
    if make_head:
        head = make_head(cfg)
    elif "head" in adapter:
        head = build_head(folder, adapter["head"], cfg)
    with torch.device("meta"):
        model = kind(cfg, head)
    loader_of(base)(model, base, device, dtype)
    if head is not None:
        head.to(device)
    if adapter:
        load_adapter(model, folder, adapter)
    return model


def loader_of(folder: Path) -> Callable[[Model, Path, torch.device | str, torch.dtype], None]:
    """`load_weights`, or that of the module of released/ that config.json names: stored otherwise."""
    name = read_json(folder / "config.json", "checkpoint config").get("loader")
    if name is None:
        return load_weights
    return import_from("released", name, folder).load_weights


def import_from(door: str, name: str, folder: Path) -> object:
    """The module of one folder of this repository that a JSON file names."""
    with reading(folder, "model in"):
        if not re.fullmatch(rf"{door}\.\w+", name):
            fail(f"{folder}: {name!r} is no module of {door}/")
        try:
            return importlib.import_module(name)
        except ImportError:
            fail(f"{folder}: there is no module {name}")


def load_weights(model: Model, folder: Path, device: torch.device | str, dtype: torch.dtype) -> None:
    """Tensor by tensor, so that no second copy exists."""
    state = {}
    for name, tensor in read_tensors(weight_files(folder)):
        kept_dtype = torch.float32 if name.endswith("expert_bias") else dtype
        state[name] = tensor.to(device=device, dtype=kept_dtype)
    fill(model, state, folder, device, dtype)


def fill(
    model: Model, state: dict[str, Tensor], folder: Path, device: torch.device | str, dtype: torch.dtype
) -> None:  # fmt: skip
    """Give a model that was built on `meta` its tensors. `dtype` is that of its activations."""
    # as many markers as there are rounds: the stored ones, then zeros
    markers = state.get("markers", torch.zeros(1, model.cfg.n_embd, device=device, dtype=dtype))
    if markers.dim() == 2:
        state["markers"] = F.pad(markers, (0, 0, 0, model.cfg.n_rounds - len(markers)))

    check_fit(folder, state, stored(model), "the checkpoint is incomplete, or another model's")
    model.load_state_dict(state, assign=True, strict=False)
    model.tie()
    model.compute_dtype = dtype


def load_tokenizer(folder: Path, kind: str) -> Tokenizer | None:
    """None where there is none: a toy's tokens are numbers."""
    if kind == "bytes":
        return byte_tokenizer()
    path = base_of(folder) / "tokenizer.json"
    if kind == "bpe" and path.exists():
        return bpe_tokenizer(path)
    return None


def names_of(folder: Path) -> dict | None:
    """What a model of names knows of its names; None of any other model."""
    path = base_of(folder) / "names.json"
    return read_json(path, "names") if path.exists() else None


# --- an adapter's folder
def about_adapter(folder: Path) -> dict:
    """What adapter.json says; of any other folder nothing."""
    path = folder / "adapter.json"
    return read_json(path, "adapter") if path.exists() else {}


def base_of(folder: Path) -> Path:
    """Where the base of an adapter lies; of any other folder, itself."""
    folder = Path(folder)
    path = folder / "adapter.json"
    if not path.exists():
        return folder
    with reading(path, "adapter"):
        base = Path(os.path.normpath(folder / about_adapter(folder)["base"]))
    if not (base / "config.json").exists():
        fail(f"{path} names {base} as its base, where no checkpoint is: put it there, or correct `base`")
    return base


def decoding_defaults(folder: Path) -> dict:
    """The settings of a decode that an adapter was made for; of any other folder none."""
    path = Path(folder) / "adapter.json"
    settings = {}
    with reading(path, "adapter"):
        for name, value in about_adapter(path.parent).get("decoding", {}).items():
            if name not in ("tau_m2t", "tau_t2t", "tau_keep"):
                fail(f"{path}: {name!r} is no setting of a decode")
            settings[name] = None if (name, value) == ("tau_t2t", None) else float(value)
    return settings


def check_base(base: Path, folder: Path) -> None:
    """Refuse a base that is another one than the adapter in `folder` was trained on."""
    with reading(folder / "adapter.json", "adapter"):
        expected = about_adapter(folder)["base_fingerprint"]
    found = fingerprint(base)
    if found != expected:
        fail(f"{folder} was trained on a base whose fingerprint is {expected}; {base} has {found}: it is another one")


def save_adapter(
    model: Model, folder: Path, base: Path, settings: dict, weights: dict[str, Tensor] | None = None
) -> None:
    """settings: what else adapter.json says. weights: model.adapter_state(), if at hand."""
    about = {
        "base": Path(os.path.relpath(base, folder)).as_posix(),
        "base_fingerprint": fingerprint(base),
        "model": {"n_last": model.cfg.n_last, "n_rounds": model.cfg.n_rounds},
    }
    save_tensors(folder / "adapter.safetensors", weights or model.adapter_state())
    write_json(folder / "adapter.json", about | settings)


def build_head(folder: Path, about: dict, cfg: Config) -> nn.Module:
    """The head that adapter.json speaks of: this is the one door to beyond/."""
    with reading(folder / "adapter.json", "adapter"):
        return import_from("beyond", about["module"], folder).build(cfg, about)


def load_adapter(model: Model, folder: Path, settings: dict) -> None:
    """LoRA and markers, or a head, into a loaded model. They are float32 in every dtype of it."""
    if model.second_look is None:
        with reading(folder / "adapter.json", "adapter"):
            alone = settings.get("lora_in_stage_b_alone", False)
            model.add_lora(int(settings["lora_r"]), float(settings["lora_alpha"]), torch.Generator(), alone)

    path = folder / "adapter.safetensors"
    state = dict(read_tensors([path]))
    check_fit(path, state, model.adapter_state(), "is this adapter whole?")
    model.load_state_dict(state, strict=False)


def fingerprint(folder: Path) -> str:
    """Which base a folder holds, as 16 hex digits: a hash of its tensors' names, shapes and some values.

    Values are rounded to bfloat16, so a cast from float32, other shards, or a way through the released
    layout change nothing. Markers do not count: the released layout loses them, an adapter has its own.
    """
    # int8 rows, say, are no longer their base's values: they carry its fingerprint
    inherited = read_json(folder / "config.json", "checkpoint config").get("fingerprint")
    if inherited is not None:
        return str(inherited)

    parts = {name: extract(tensor) for name, tensor in read_tensors(weight_files(folder))}
    parts.pop("markers", None)

    # sorted: which file a tensor is in, and in which order, is no part of a base
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(name.encode() + parts[name])
    return digest.hexdigest()[:16]


def extract(tensor: Tensor) -> bytes:
    """Its shape and some of its values. The tensor lies in its file, of which no more is read."""
    found = str(list(tensor.shape)).encode()
    values = tensor.flatten()
    # four runs of at most 256 values, from the first to the last
    for k in range(4):
        first = max(0, len(values) - 256) * k // 3
        run = values[first : first + 256].bfloat16()
        found += run.view(torch.uint8).numpy().tobytes()
    return found


# --- a training run's folder
def training_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Trained weights and their moments: param.NAME, exp_avg.NAME, exp_avg_sq.NAME and step.NAME."""
    state = {}
    moments = optimizer.state
    for name, p in model.named_parameters():
        if p.requires_grad:
            state[f"param.{name}"] = p
            state |= {f"{kind}.{name}": tensor for kind, tensor in moments[p].items()}
    return state


def restore_state(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Weights, moments -> the number of steps taken. Generators are functions of the row."""
    # an adapter goes on with the base that it began with
    if (folder / "adapter.json").exists():
        check_base(base_of(folder), folder)

    path = folder / "state.safetensors"
    state = dict(read_tensors([path]))
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {key.removeprefix("param."): tensor for key, tensor in state.items() if key.startswith("param.")}
    check_fit(path, weights, learned, "start again in a new --out_dir")
    for key, tensor in state.items():
        kind, name = key.split(".", 1)
        p = learned[name]
        if kind == "param":
            p.data.copy_(tensor)
        else:
            optimizer.state[p][kind] = tensor.to(p.device)
    with reading(path, "state"), safe_open(path, "pt") as file:
        return int(file.metadata()["step"])
