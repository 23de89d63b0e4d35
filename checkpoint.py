"""The folders that train.py and convert_weights.py write, and how they are read. load_model reads either kind.

a model's folder
    config.json            the model's geometry and ids, its kind of Stage B, and whether it is int8; it is written
                           last, so a folder that has one is whole
    model.safetensors      all tensors, or shards of them with model.safetensors.index.json
    tokenizer.json         the tokenizer, copied from the rows, or from the released checkpoint
    meta.json              how the text can be checked: as names, as a toy, or not at all; copied from the rows

an adapter's folder, which holds what was learned beside a model that did not change, its base
    adapter.json           the base's folder and its hash, n, K, the block length, LoRA's rank, the kind of Stage B
    adapter.safetensors    LoRA matrices and markers, or what is another Stage B's own

the folder of a training run is of either kind, and also has
    state.safetensors      what has been trained, and the optimizer's moments; with train.json and log.jsonl the run
                           resumes from it
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from causal import CausalModel
from config import Config, check_config
from decoding import SETTINGS
from layers import ROUTERS, Linear
from lib.rows import read_meta
from lib.run import found_from, written_from
from lib.util import WALK, checked_entry, fail, printable, quoted, read_json, reading, replace_file, write_json
from model import Model

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes that weights may be stored in

# a model's class, by the kind of its Stage B; to add a kind, write a subclass of Model, and name it here
STAGE_B = {"paper": Model, "causal": CausalModel}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# --- files of tensors
def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all."""
    on_cpu = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    replace_file(path, lambda temporary: save_file(on_cpu, temporary, metadata))


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of these files: (name, tensor). The files are mapped, so a tensor is read when it is used."""
    for path in files:
        with reading(path, "safetensors file"), safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
        yield from found.items()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights: one, or the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    places = checked_entry(read_json(index, "weight index"), "weight_map", dict, index)
    return [folder / shard for shard in sorted(set(places.values()))]


def check_floats(where: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors of other dtypes than weights have."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            fail(f"{where}: {name} is stored as {tensor.dtype}, and should be float32, float16 or bfloat16")


def refuse_nan(where: Path | str, name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity, in one pass and without a copy: one NaN makes the least and the greatest number NaN."""
    if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, map(float, tensor.aminmax()))):
        fail(f"{where}: {name} holds NaN or infinity: the file is damaged, or its training diverged")


def check_fit(path: Path, held: dict, expected: dict, hint: str, dropped: dict[str, str] | None = None) -> None:
    """Refuse unknown tensors, missing ones, and wrong shapes. dropped: name -> why this unknown tensor is left out."""

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
def empty_model(cfg: Config, seed: int = 0) -> Model:
    """A model of this geometry. Its base is still to be filled, and takes no memory. What is Stage B's own is as its
    class has made it; what the class draws depends on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = STAGE_B[cfg.stage_b](cfg)
    if cfg.int8:
        from lib.int8 import use_int8

        use_int8(model)
    return model


def new_model(cfg: Config, generator: torch.Generator, device: torch.device | str = "cpu") -> Model:
    """A model with fresh weights. In the base matrices are normal (initial_std), norms are one, and biases are zero.
    What is Stage B's own begins as its class has made it."""
    check_config(cfg)
    check_names(cfg, "impossible model")
    model = empty_model(cfg, generator.initial_seed() % 2**32)
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_meta:
            state[name] = tensor.detach().to(device)
        elif tensor.dim() > 1:
            # drawn on the CPU, so that every device gets the same weights
            std = initial_std(name, cfg)
            state[name] = torch.empty(tensor.shape).normal_(0.0, std, generator=generator).to(device)
        else:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            state[name] = fill(tensor.shape, device=device)
    model.load_state_dict(state, assign=True)
    model.tie()
    return model


def initial_std(name: str, cfg: Config) -> float:
    """Standard deviation of a matrix's first values."""
    # with a std of 0.02 the embedding would be far smaller than what the layers add to it, and the model would learn
    # late to copy visible tokens
    if name == "wte.weight":
        return 1.0
    if name == "lm_head.weight":
        return 0.02

    # 2 L projections are added to the residual stream; scaled as in GPT-2, their sum keeps its size
    std = cfg.n_embd**-0.5
    if name.endswith(("proj.weight", "down.weight", "mlp.down")):
        std = std / math.sqrt(2 * cfg.n_layer)
    return std


def stored(model: Model) -> dict[str, Tensor]:
    """The tensors of model.safetensors: all except LoRA's, and except a tied output layer, which is the embedding."""
    kept = {k: v for k, v in model.state_dict().items() if "lora_" not in k}
    if model.cfg.tied:
        del kept["lm_head.weight"]
    return kept


def save_model(model: Model, folder: Path) -> None:
    """Write a model's folder. Its parameters are stored in the dtype of the activations."""
    weights = stored(model)
    for name, p in model.named_parameters():
        if name in weights:
            weights[name] = p.to(model.compute_dtype)
    save_tensors(folder / "model.safetensors", weights)
    write_json(folder / "config.json", asdict(model.cfg))


def read_config(folder: Path, **changes) -> Config:
    """The geometry of the model in a model's folder or in an adapter's. changes: other values for some fields."""
    about = about_adapter(folder)
    if about:
        own = {name: about[name] for name in (*SIZES, "stage_b")}
        return read_config(base_of(folder), **own | changes)

    path = folder / "config.json"
    raw = read_json(path, "checkpoint config (is this a checkpoint folder?)")
    if "model_type" in raw:
        fail(f"{path} is a released checkpoint's: `python convert_weights.py --src {quoted(folder)} --out DIR` first")

    # every field must be there, because a default could be another model's value; only these came later
    raw = {name: getattr(Config, name) for name in ("router", "stage_b", "decoder", "window", "int8")} | raw
    known = {field.name: field.type for field in fields(Config)}
    for name in sorted(raw.keys() - known.keys()):
        fail(f"{path}: unknown field {name}: it may change the model")
    cfg = Config(**{name: checked_entry(raw, name, kind, path) for name, kind in known.items()})
    cfg = replace(cfg, **changes)
    check_config(cfg, path)
    check_names(cfg, path)
    return cfg


def check_names(cfg: Config, where: Path | str) -> None:
    """Refuse a geometry with a name that is in no table."""
    for name, known in (("stage_b", STAGE_B), ("router", ROUTERS), ("decoder", SETTINGS)):
        if getattr(cfg, name) not in known:
            fail(f"{where}: {name} is one of {', '.join(known)}, not {getattr(cfg, name)!r:.80}")


def check_same_tokens(data: Path, base: Path) -> None:
    """Refuse rows of other tokens than those of a model's folder."""
    meta = read_meta(data)
    cfg = read_config(base)
    same = (cfg.eos_id, cfg.mask_id) == (meta.eos_id, meta.mask_id) and meta.vocab_size <= cfg.vocab_size
    if not same or meaning(base, judge_of(base)) != meaning(data, meta.judge or {}):
        fail(f"the rows in {printable(data)} have other tokens than the model in {base}: give rows that prepare.py has "
             f"made with --like {quoted(base)}")  # fmt: skip


def meaning(folder: Path, judge: dict) -> object:
    """What the ids of a folder mean: the tokens of its tokenizer, or a toy of these sizes."""
    path = folder / "tokenizer.json"
    return read_json(path, "tokenizer") if path.exists() else judge


def load_model(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype, stage_b: str | None = None, seed: int = 0,
    **sizes,
) -> Model:  # fmt: skip
    """The model in a model's folder, or an adapter's base with the adapter on it.

    Parameters get `dtype`; adapters stay float32, and expert_bias and the tensors of an int8 model stay as they are
    stored. stage_b: the kind of Stage B that will be trained on a base (left out: the folder's own), and seed: of what
    its class draws. sizes: other values of n_last, n_rounds and block_length.
    """
    folder = Path(folder)
    base = base_of(folder)
    changes = {name: value for name, value in dict(sizes, stage_b=stage_b).items() if value is not None}

    # build: of the base only names and shapes, which take no memory
    model = empty_model(read_config(folder, **changes), seed)
    expected = stored(model)

    # load tensor by tensor, so that there is no second copy
    model.base_hash = base_hash(base)
    state = {}
    for name, tensor in read_tensors(weight_files(base)):
        kept = model.cfg.int8 or name.endswith("expert_bias")
        if not kept:
            check_floats(base, {name: tensor})
        refuse_nan(base, name, tensor)
        state[name] = tensor.to(device=device, dtype=tensor.dtype if kept else dtype)
    if "wte.weight" in state:
        model.begin_from(state)
    check_fit(base, state, expected, "the checkpoint is incomplete, or another model's")

    # attach
    model.load_state_dict(state, assign=True, strict=False)
    model.tie()
    model.compute_dtype = dtype

    # an adapter stays float32, whatever dtype the base has
    if base != folder:
        check_base(folder, model.base_hash)
        model.load_state_dict(attach(model, folder), strict=False)
    return model


def judge_of(folder: Path) -> dict:
    """What judges the texts of a model, see lib.rows.Meta; {} if nothing does."""
    base = base_of(folder)
    meta = read_meta(base) if (base / "meta.json").exists() else None
    return (meta and meta.judge) or {}


# --- an adapter's folder
SIZES = {"n_last": int, "n_rounds": int, "block_length": int}  # the sizes that an adapter has of its own
ENTRIES = SIZES | {"base": str, "stage_b": str, "lora_r": int}  # the entries of adapter.json, besides base_hash


def about_adapter(folder: Path) -> dict:
    """What adapter.json says; {} for a folder that is not an adapter's."""
    path = folder / "adapter.json"
    if not path.exists():
        return {}
    about = read_json(path, "adapter")
    about |= {name: checked_entry(about, name, kind, path) for name, kind in ENTRIES.items()}
    if about["stage_b"] not in STAGE_B:
        fail(f"{path}: its Stage B is of the kind {about['stage_b']!r:.80}, and the kinds are {', '.join(STAGE_B)}")
    return about


def base_of(folder: Path) -> Path:
    """The folder of an adapter's base; a folder that is not an adapter's is its own base."""
    about = about_adapter(folder)
    if not about:
        return folder
    base = found_from(folder, about["base"])
    if not (base / "config.json").exists():
        fail(f"{folder}/adapter.json names {base} as its base, and no model is there: put it there, or correct `base`")
    return base


def save_adapter(model: Model, folder: Path, base: Path, lora_r: int) -> None:
    """Write what was learned beside the model in `base`, which still has the weights that were loaded."""
    if base_hash(base) != model.base_hash:
        fail(f"the model in {base} was replaced while an adapter was trained on it: put the old one back")
    about = {"base": written_from(folder, base), "base_hash": model.base_hash}
    sizes = {name: getattr(model.cfg, name) for name in SIZES} | dict(stage_b=model.cfg.stage_b, lora_r=lora_r)
    save_tensors(folder / "adapter.safetensors", adapter_tensors(model), {"about": json.dumps(sizes)})
    write_json(folder / "adapter.json", about | sizes)


def adapter_tensors(model: Model) -> dict[str, Tensor]:
    """The tensors of an adapter: what has learned beside the base, and the buffers that are Stage B's own."""
    return model.own() | model.learned()


def attach(model: Model, folder: Path) -> dict[str, Tensor]:
    """Prepare a base for the adapter in `folder` -> the adapter's tensors, by name, each of which has its place now."""
    path = folder / "adapter.safetensors"
    adapter = dict(read_tensors([path]))
    check_floats(path, adapter)
    about = about_adapter(folder)
    with reading(path, "safetensors file", WALK), safe_open(path, "pt") as file:
        written = json.loads((file.metadata() or {}).get("about", "{}")).items()
    for name, value in written:
        if about.get(name) != value:
            fail(f"{folder}/adapter.json has {name} {about.get(name)}, and was written with {value}")
    for name, tensor in adapter.items():
        refuse_nan(path, name, tensor)

    # the matrices that have LoRA are those for which the adapter has it
    model.adapt(0, torch.Generator())
    for name, layer in model.named_modules():
        lora_A = adapter.get(f"{name}.lora_A")
        if isinstance(layer, Linear) and lora_A is not None:
            layer.add_lora(len(lora_A), torch.Generator())
    check_fit(path, adapter, adapter_tensors(model), "is this adapter whole?")
    return adapter


def check_base(folder: Path, found: str) -> None:
    """Refuse a base whose hash is `found` if it is not the one that the adapter in `folder` was trained on."""
    if about_adapter(folder).get("base_hash", found) != found:
        fail(
            f"{folder} was trained on another model than {base_of(folder)} holds now (its config, its tokenizer or its "
            f"weights): put that there, or, if it is the same in another form, delete base_hash from adapter.json"
        )


def base_hash(folder: Path) -> str:
    """A hash of all of a base that decides what a model on it writes, in 16 hex digits: config.json without the sizes
    that an adapter has of its own, tokenizer.json, and of every file of weights its size and 4,096 pieces of 16 bytes.
    In another dtype, or in other shards, the same weights have another hash.
    """
    config = {k: v for k, v in read_json(folder / "config.json", "checkpoint config").items() if k not in SIZES}
    digest = hashlib.sha256(json.dumps([config, meaning(folder, {})], sort_keys=True).encode())
    for path in weight_files(folder):
        with reading(path, "safetensors file"), open(path, "rb") as file:
            size = path.stat().st_size
            digest.update(str(size).encode())
            for i in range(4096):
                file.seek(i * size // 4096)
                digest.update(file.read(16))
    return digest.hexdigest()[:16]


# --- a training run's folder
def training_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What has been trained, and the optimizer's moments: param.NAME (the experts' biases, too, if they move); Adam's
    exp_avg.NAME, exp_avg_sq.NAME and step.NAME; Muon's momentum_buffer.NAME."""
    state = {}
    for name, p in model.learned().items():
        state[f"param.{name}"] = p
        state |= {f"{kind}.{name}": tensor for kind, tensor in optimizer.state[p].items()}
    return state | {f"param.{name}": bias for name, bias in learned_biases(model).items()}


def learned_biases(model: Model) -> dict[str, Tensor]:
    """The experts' biases, which MoE.balance moves while the routers learn, and the buffers that are Stage B's own."""
    buffers = dict(model.named_buffers()).items()
    return {name: tensor for name, tensor in buffers if model.wte.weight.requires_grad or name in model.own()}


def restore_state(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Read weights and moments -> the number of steps that were taken. Random numbers need no state."""
    # a run that has not saved yet has no state
    path = folder / "state.safetensors"
    if not path.exists():
        if about_adapter(folder) or (folder / "config.json").exists():
            fail(f"{path} is gone, and without it the run cannot go on: start again in a new --out_dir")
        return 0

    with reading(path, "state", WALK), safe_open(path, "pt") as file:
        about = file.metadata()
        steps = int(about["step"])
    state = dict(read_tensors([path]))
    if about.get("config", repr(model.cfg)) != repr(model.cfg):
        fail(f"{folder} was trained with another config.json or train.json than it holds now: put the old one back")

    # a tensor that has been updated has Muon's moments or Adam's, and the state shows which
    learned = model.learned() | learned_biases(model)
    expected = {}
    for name, p in learned.items():
        expected[f"param.{name}"] = p
        if f"momentum_buffer.{name}" in state:
            expected[f"momentum_buffer.{name}"] = p
        elif f"step.{name}" in state:
            expected |= {f"step.{name}": torch.zeros(()), f"exp_avg.{name}": p, f"exp_avg_sq.{name}": p}
    check_fit(path, state, expected, "start again in a new --out_dir")

    for key, tensor in state.items():
        refuse_nan(path, key, tensor)
        kind, name = key.split(".", 1)
        p = learned[name]
        if kind == "param":
            p.data.copy_(tensor)
        else:
            optimizer.state[p][kind] = tensor.to(p.device)
    return steps
