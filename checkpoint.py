"""The folders that train.py and convert_weights.py write, and how a model, an adapter and a run
come back from them.

config.json            the model's geometry and ids, written last: a folder that has one is whole
model.safetensors      all parameters and markers, or shards with model.safetensors.index.json
tokenizer.json         where the model reads byte-level BPE
adapter.json           instead of config.json: the base and its fingerprint, LoRA's rank and scale, the geometry, and
                       perhaps the module of beyond/ that made it
adapter.safetensors    LoRA matrices and markers
state.safetensors      what a training run resumes from: trained weights and AdamW's moments; log.jsonl, train.json
"""

import hashlib
import importlib
import json
import re
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer
from lib.util import fail, generator, read_json, replace_file, write_json
from model import Config, Model
from presets import FIELDS, PRESETS, SIZE, check, fits, new_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------------------
# files of tensors


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all."""
    on_cpu = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        # save_file makes a file that its owner alone may read: give it what others have
        temporary.touch()
        usual = temporary.stat().st_mode
        try:
            save_file(on_cpu, temporary, metadata)
        except SafetensorError as e:  # a full disk
            raise OSError(str(e)) from e
        temporary.chmod(usual)

    replace_file(path, write)


@contextmanager
def open_tensors(path: Path) -> Iterator[safe_open]:
    """A safetensors file, memory-mapped; a missing or damaged one is one line."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as e:
        fail(f"{path} is missing, cut short, damaged or no safetensors file ({e}): copy or convert it again")


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors of these files, one at a time."""
    for path in files:
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                yield name, file.get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights: one, or the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]

    shard_of = read_json(index, "weight index").get("weight_map")
    if not isinstance(shard_of, dict):
        fail(f"{index}: weight_map must say for each tensor in which file it is: copy the folder again")
    for shard in shard_of.values():
        # a name and no path: what lies outside the folder is none of its weights
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", shard):
            fail(f"{index}: {shard!r} in weight_map is not the name of a .safetensors file of this folder")
    return [folder / shard for shard in sorted(set(shard_of.values()))]


def check_fit(path: Path, held: dict, expected: dict, hint: str, dropped: dict[str, str] | None = None) -> None:
    """Refuse tensors that are unknown, missing or of another shape; `dropped`: what may be left,
    and why.
    """

    def describe(tensors: dict, name: str) -> str:
        if name not in tensors:
            return "no such tensor"
        return f"shape {list(tensors[name].shape)}"

    for name in sorted(held.keys() | expected.keys()):
        if dropped and name in dropped and name not in expected:
            print(f"dropped {name}: {dropped[name]}")
            continue
        there = describe(held, name)
        wanted = describe(expected, name)
        if there != wanted:
            fail(f"{path}: {name}: {there} there, {wanted} in the model: {hint}")


# ---------------------------------------------------------------------------------------------------------------------
# a model's folder


def stored(model: Model) -> dict[str, Tensor]:
    """What model.safetensors holds: all but adapters, and a tied head once."""
    kept = {}
    for name, tensor in model.state_dict().items():
        repeated = model.cfg.tied and name == "lm_head.weight"
        if "lora_" not in name and not repeated:
            kept[name] = tensor
    return kept


def save_model(model: Model, folder: Path) -> None:
    """Weights first, config last: a folder with a config.json has the weights that it speaks of."""
    save_tensors(folder / "model.safetensors", stored(model))
    write_json(folder / "config.json", asdict(model.cfg))


def read_config(folder: Path) -> Config:
    """A folder's geometry, checked."""
    path = folder / "config.json"
    raw = read_json(path, "checkpoint config (is this a checkpoint folder? an adapter's is given by --adapter)")
    raw.pop("fingerprint", None)  # of the base, not of the geometry: see fingerprint()
    raw.pop("loader", None)  # how the weights are stored: see weights_loader()
    try:
        cfg = Config(**raw)
    except TypeError as e:
        hint = f"`python convert_weights.py --src {folder} --out DIR`"
        fail(f"{path} does not fit this version ({e}); if this is a released checkpoint, convert it first: {hint}")
    return check(cfg)


def check_last_layer(folder: Path, files: list[Path], cfg: Config) -> None:
    """Refuse a config of more layers than are stored, before they are built."""
    prefix = f"layers.{cfg.n_layer - 1}."
    for path in files:
        with open_tensors(path) as file:
            if any(name.startswith(prefix) for name in file.keys()):  # noqa: SIM118 (it is no dict)
                return
    fail(f"{folder}: config.json has n_layer {cfg.n_layer}, but no tensor {prefix}* is stored: copy the folder again")


def load_model(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype, adapter: str | Path | None = None, **overrides
) -> Model:
    """A model from its folder. Parameters take `dtype`, expert_bias stays float32. `overrides`
    change config fields (n_last, n_rounds, block_length); an `adapter` (a folder) brings its own.
    Markers that the checkpoint lacks start at zero.
    """
    folder = Path(folder)
    cfg = read_config(folder)
    changes = {name: value for name, value in overrides.items() if value is not None}
    if adapter:
        check_base(folder, adapter)
        trained = adapter_settings(adapter)["model"]
        changes["n_last"] = trained["n_last"]
        changes["n_rounds"] = trained["n_rounds"]
    cfg = check(replace(cfg, **changes))

    model = weights_loader(folder)(folder, cfg, device, dtype)
    if adapter:
        load_adapter(model, adapter)
    return model


def weights_loader(folder: Path) -> Callable[..., Model]:
    """`load_weights`; or that of the module of released/ that config.json names, whose weights are
    stored otherwise."""
    name = read_json(folder / "config.json", "checkpoint config").get("loader")
    if name is None:
        return load_weights
    if not re.fullmatch(r"released\.\w+", str(name)):
        fail(f"{folder}/config.json: loader {name!r} is no module of released/")
    try:
        return importlib.import_module(name).load_weights
    except (ImportError, AttributeError):
        fail(f"{folder}/config.json: there is no module {name} that loads weights")


def load_weights(folder: Path, cfg: Config, device: torch.device | str, dtype: torch.dtype) -> Model:
    """A model built on `meta` and filled tensor by tensor, so that no second copy exists."""
    # building takes time and memory by the layer: first see that so many are stored
    files = weight_files(folder)
    check_last_layer(folder, files, cfg)

    # no memory yet, only names and shapes
    with torch.device("meta"):
        model = Model(cfg)

    state = {}
    for name, tensor in read_tensors(files):
        kept_dtype = torch.float32 if name.endswith("expert_bias") else dtype
        state[name] = tensor.to(device=device, dtype=kept_dtype)

    # as many markers as there are rounds: the stored ones, then zeros
    markers = state.get("markers", torch.zeros(1, cfg.n_embd, device=device, dtype=dtype))
    if markers.dim() == 2:
        state["markers"] = F.pad(markers, (0, 0, 0, cfg.n_rounds - len(markers)))

    check_fit(folder, state, stored(model), "the checkpoint is incomplete, or another model's")
    model.load_state_dict(state, assign=True, strict=False)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight
    model.compute_dtype = dtype
    return model


def load_tokenizer(folder: Path, kind: str) -> Tokenizer | None:
    """None where there is none: a toy's tokens are numbers, a released checkpoint may come without
    its tokenizer.
    """
    if kind == "bytes":
        return byte_tokenizer()
    path = folder / "tokenizer.json"
    if kind == "bpe" and path.exists():
        return bpe_tokenizer(path)
    return None


def start(args: Namespace, tokens: dict, adapt: Callable[[Model, Namespace], None], device: torch.device) -> Model:
    """What train.py's settings mean: a preset for these tokens (fields of a Config), or a folder's
    model to adapt.
    """
    is_toy = tokens["tokenizer"] == "toy"
    if args.init_from == "scratch":
        preset = PRESETS[args.preset]
        n_last = args.n_last
        if n_last is None:
            n_last = max(1, preset.n_layer // 2)
        cfg = check(replace(preset, n_last=n_last, n_rounds=args.n_rounds, **tokens))
        model = new_model(cfg, generator(args.seed, "init"), device)
        model.compute_dtype = DTYPES[args.dtype]
    else:
        changes = {"n_last": args.n_last, "n_rounds": args.n_rounds, "block_length": args.block_length}
        model = load_model(args.init_from, device, DTYPES[args.dtype], **changes)
        if is_toy and any(getattr(model.cfg, name) != value for name, value in tokens.items()):
            fail(f"--init_from {args.init_from} was trained on a toy of another size: give the same --toy")
        adapt(model, args)

    # a toy's rows have the length of its one block
    block_length = model.cfg.block_length
    longest = model.cfg.max_len
    if not is_toy and (args.seq_len % block_length or args.seq_len > longest):
        fail(f"--seq_len {args.seq_len} must be a multiple of --block_length {block_length}, at most {longest}")
    model.checkpointing = args.checkpointing
    return model


# ---------------------------------------------------------------------------------------------------------------------
# an adapter's folder

# an adapter fits a model that agrees in these
ADAPTER_GEOMETRY = ("n_layer", "n_embd", "n_head", "n_kv_head", "n_last", "n_rounds")


def fingerprint(folder: str | Path) -> str:
    """Which base a folder holds, as 16 hex digits. Only a few KB of each tensor are read, however
    large it is.

    It is a hash of the names and shapes of the stored tensors and of some of their values, rounded
    to bfloat16. So a base keeps its fingerprint when it is cast from float32 to bfloat16, cut into
    other shards, or converted to the released layout and back. Markers do not count: the released
    layout loses them, and an adapter brings its own.

    A folder whose values are no longer those of its base (int8 rows with scales, say) carries the
    fingerprint of what it was made from, as `fingerprint` in config.json. Where there is one, it is
    the answer.
    """
    folder = Path(folder)
    inherited = read_json(folder / "config.json", "checkpoint config").get("fingerprint")
    if inherited is not None:
        return str(inherited)

    parts = {}
    for path in weight_files(folder):
        # opened only to refuse a damaged file: what is memory-mapped may be read ahead, megabytes
        # for every value
        with open_tensors(path):
            parts |= extracts(path)
    parts.pop("markers", None)

    # sorted: which file a tensor is in, and in which order, is no part of a base
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(name.encode() + parts[name])
    return digest.hexdigest()[:16]


def extracts(path: Path) -> dict[str, bytes]:
    """name -> shape and some values of each tensor of a safetensors file."""
    floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    found = {}
    with open(path, "rb") as file:
        # the file: the header's size in 8 bytes, the header in JSON, the tensors
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = floats.get(entry["dtype"], torch.uint8)  # others by their bytes
            found[name] = str(entry["shape"]).encode()

            # four runs of at most 256 values, from the tensor's first to its last
            count = (end - begin) // dtype.itemsize
            for k in range(4):
                first = max(0, count - 256) * k // 3
                file.seek(8 + header_size + begin + first * dtype.itemsize)
                raw = file.read(min(256, count) * dtype.itemsize)
                if raw:
                    values = torch.frombuffer(bytearray(raw), dtype=dtype)
                    found[name] += values.bfloat16().view(torch.uint8).numpy().tobytes()
    return found


def check_base(base: str | Path, adapter: str | Path) -> None:
    """Refuse an adapter that was trained on another base."""
    settings = adapter_settings(adapter)
    expected = settings["base_fingerprint"]
    found = fingerprint(base)
    if found != expected:
        fail(f"wrong --ckpt for this adapter: {adapter} was trained on {settings['base']} when its fingerprint was "
             f"{expected}; the fingerprint of {base} is {found}")  # fmt: skip


def save_adapter(model: Model, folder: Path, settings: dict) -> None:
    """settings["base"] is the folder of the model that was adapted; its fingerprint is taken now."""
    geometry = {name: getattr(model.cfg, name) for name in ADAPTER_GEOMETRY}
    known = {"base_fingerprint": fingerprint(settings["base"]), "model": geometry}
    save_tensors(folder / "adapter.safetensors", model.adapter_state())
    write_json(folder / "adapter.json", settings | known)


def adapter_settings(folder: str | Path) -> dict:
    """adapter.json, checked: base, base_fingerprint, lora_r, lora_alpha, model (the geometry it was
    trained at), perhaps extension.
    """
    settings = read_json(Path(folder) / "adapter.json", "adapter (a folder that train.py --init_from DIR wrote)")
    model = settings.get("model")
    if not isinstance(model, dict):
        model = {}

    wrong = []
    for name in ("base", "base_fingerprint"):
        if not isinstance(settings.get(name), str):
            wrong.append(name)
    if not fits(settings.get("lora_r"), int, 1, SIZE):
        wrong.append("lora_r")
    if not fits(settings.get("lora_alpha"), float, 1e-12, 1e12):
        wrong.append("lora_alpha")
    for name in ADAPTER_GEOMETRY:
        if not fits(model.get(name), *FIELDS[name]):
            wrong.append(name)

    # the module that loads it is one of beyond/, and nothing else
    extension = settings.get("extension", "beyond.none")
    if not isinstance(extension, str) or not re.fullmatch(r"beyond\.\w+", extension):
        wrong.append("extension")

    if wrong:
        fail(f"{folder}/adapter.json: {wrong[0]} is missing or wrong: train the adapter again")
    return settings


def load_adapter(model: Model, folder: str | Path) -> None:
    """LoRA and markers into a loaded model; an extension's adapter through the module that it
    names.
    """
    settings = adapter_settings(folder)
    trained = settings["model"]
    for name in ADAPTER_GEOMETRY:
        if getattr(model.cfg, name) != trained[name]:
            fail(f"{folder} was trained with {name} {trained[name]}: wrong --ckpt for this adapter")

    if "extension" not in settings:
        model.add_lora(settings["lora_r"], settings["lora_alpha"], torch.Generator())
    else:
        # the one door to beyond/: the module makes the model ready for its adapter
        try:
            attach = importlib.import_module(settings["extension"]).attach
        except (ImportError, AttributeError):
            fail(f"{folder}/adapter.json: there is no extension {settings['extension']} that loads adapters")
        attach(model, settings)

    path = Path(folder) / "adapter.safetensors"
    state = dict(read_tensors([path]))
    check_fit(path, state, model.adapter_state(), "wrong --ckpt for this adapter?")
    model.load_state_dict(state, strict=False)


# ---------------------------------------------------------------------------------------------------------------------
# a training run's folder


def save_state(model: Model, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Trained weights and moments of one step in one file, so that they belong together whenever
    the power goes.
    """
    state = {}
    name_of = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            name_of[p] = name
            state[f"param.{name}"] = p
    for p, moments in optimizer.state.items():
        for kind, tensor in moments.items():
            state[f"{kind}.{name_of[p]}"] = tensor
    save_tensors(folder / "state.safetensors", state, {"step": str(step)})


def restore_state(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Weights, moments -> the number of steps taken. Generators need nothing: they are functions of
    the row.
    """
    # an adapter goes on with the base that it began with
    if (folder / "adapter.json").exists():
        check_base(adapter_settings(folder)["base"], folder)

    path = folder / "state.safetensors"
    state = dict(read_tensors([path]))
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {key.removeprefix("param."): tensor for key, tensor in state.items() if key.startswith("param.")}
    check_fit(path, weights, learned, "start again in a new --out_dir")

    # keys are param.NAME, exp_avg.NAME, exp_avg_sq.NAME and step.NAME
    steps = 0
    for key, tensor in state.items():
        kind, name = key.split(".", 1)
        p = learned[name]
        if kind == "param":
            p.data.copy_(tensor)
        else:
            optimizer.state[p][kind] = tensor.to(p.device)
        if kind == "step":
            steps = max(steps, int(tensor))
    return steps


def rewind_log(path: Path, step: int) -> None:
    """Drop lines at or after `step` (written after the last save) and a line cut short by a kill."""
    lines = []
    if path.exists():
        lines = path.read_bytes().splitlines()
    kept = []
    for line in lines:
        try:
            record = json.loads(line)
            earlier = record["step"] < step
            validation = record["step"] == step and "val" in record  # of the weights after `step` steps
        except (ValueError, KeyError, TypeError):
            break
        if earlier or validation:
            kept.append(line + b"\n")
    replace_file(path, lambda temporary: temporary.write_bytes(b"".join(kept)))


def resumable(folder: Path, flags: dict, given: set[str]) -> dict:
    """The settings of the run in a folder; `given` flags, which a resumed run cannot change, must
    agree with them.
    """
    path = folder / "train.json"
    saved = read_json(path, "training run to resume (--out_dir of an earlier run)")
    for name in flags:
        if name not in saved:
            fail(f"{path} lacks {name}: it is not a whole run's settings; start in a new --out_dir")
    for name in given:
        if flags[name] != saved[name]:
            fail(f"--{name} {flags[name]} differs from the run's {saved[name]}: leave it out, or use a new --out_dir")
    return saved


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask the loop to finish its step and save; a second one stops at once."""
    caught: list[int] = []

    def handler(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handler)
    try:
        yield caught
    finally:
        for number, old in before.items():
            signal.signal(number, old)
