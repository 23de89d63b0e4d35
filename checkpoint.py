"""Where a model comes from: presets, fresh weights, and the folders that train.py and convert_weights.py write.

config.json        the model's geometry and ids, written last: a folder that has one is whole
model.safetensors  all parameters and markers, or shards with model.safetensors.index.json
tokenizer.json     where the model reads byte-level BPE
adapter.json       instead of config.json: base, LoRA's rank and scale, geometry, the module of beyond/ that made it
adapter.safetensors    LoRA matrices and markers
state.safetensors  what a training run resumes from: trained weights and AdamW's moments; log.jsonl, train.json
"""

import importlib
import json
import math
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

from data import Tokenizer, bpe_tokenizer, byte_tokenizer, fail, generator, read_json, replace_file, write_json
from model import Config, Model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST = {"n_dense": 0, "n_shared": 0, "eos_id": -1, "mask_id": -1}  # of a Config's numbers; the others are positive
ADAPTER_GEOMETRY = ("n_layer", "n_embd", "n_head", "n_kv_head", "n_last", "n_rounds")


# fmt: off
PRESETS = {
    # tests and toys (every mechanism present, nothing larger than it must be); names of Unicode characters, in minutes
    # on two CPU cores; any text, in bytes; the released 16B geometry
    "tiny": Config(n_layer=4, n_head=4, n_kv_head=2, n_embd=64, head_dim=16, vocab_size=320, d_dense=128, d_expert=32,
                   n_expert=8, n_active=2, n_group=4, topk_group=2, rotary_dim=8, max_len=4096),
    "names": Config(n_layer=4, n_head=4, n_kv_head=2, n_embd=128, head_dim=32, vocab_size=1024, d_dense=384,
                    d_expert=64, n_expert=8, n_active=2, n_group=2, topk_group=2, rotary_dim=16, max_len=512,
                    rope_theta=1e4),
    "text": Config(n_layer=6, n_head=4, n_kv_head=2, n_embd=128, head_dim=32, vocab_size=272, d_dense=384, d_expert=128,
                   n_expert=16, n_active=2, n_group=4, topk_group=2, rotary_dim=16, max_len=8192, rope_theta=1e4),
    "llada2.1-mini": Config(n_layer=20, n_head=16, n_kv_head=4, n_embd=2048, head_dim=128, vocab_size=157184,
                            d_dense=5120, d_expert=512, n_expert=256, n_active=8, n_group=8, topk_group=4,
                            eos_id=156892, mask_id=156895, tokenizer="bpe"),
}
# fmt: on


def new_model(cfg: Config, generator: torch.Generator, device: torch.device | str = "cpu") -> Model:
    """Fresh weights: normal matrices of std 1/sqrt(C), unit norms, zero markers and biases; projections that write to
    the residual stream are scaled down by sqrt(2 L), as in GPT-2. Embeddings are of unit size: at 0.02 the layers drown
    a token's identity within steps, and copying visible tokens (two thirds of the terms) is learned late."""
    with torch.device("meta"):
        model = Model(cfg)
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    for name, p in model.named_parameters():
        writes = name.endswith(("proj.weight", "down.weight", "mlp.down"))
        std = {"wte.weight": 1.0, "lm_head.weight": 0.02}.get(name, cfg.n_embd**-0.5)
        std = std / math.sqrt(2 * cfg.n_layer) if writes else std
        if name == "markers" or name.endswith("bias"):
            p.data.zero_()
        elif p.dim() == 1:  # norms
            p.data.fill_(1.0)
        else:
            p.data.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))
    return model


def start(args: Namespace, tokens: dict, adapt: Callable[[Model, Namespace], None], device: torch.device) -> Model:
    """What train.py's settings mean: a preset for these tokens (fields of a Config), or a folder's model to adapt."""
    if args.init_from == "scratch":
        cfg = PRESETS[args.preset]
        cfg = replace(cfg, n_last=args.n_last or max(1, cfg.n_layer // 2), n_rounds=args.n_rounds, **tokens)
        model = new_model(check(cfg), generator(args.seed, "init"), device)
        model.compute_dtype = DTYPES[args.dtype]
    else:
        given = dict(n_last=args.n_last, n_rounds=args.n_rounds, block_length=args.block_length)
        model = load_model(args.init_from, device, DTYPES[args.dtype], **given)
        if tokens["tokenizer"] == "toy" and any(getattr(model.cfg, k) != v for k, v in tokens.items()):
            fail(f"--init_from {args.init_from} was trained on a toy of another size: give the same --toy")
        adapt(model, args)
    B, longest = model.cfg.block_length, model.cfg.max_len
    if tokens["tokenizer"] != "toy" and (args.seq_len % B or args.seq_len > longest):
        fail(f"--seq_len {args.seq_len} must be a multiple of --block_length {B}, at most {longest}")
    model.checkpointing = args.checkpointing
    return model


def check(cfg: Config) -> Config:
    """The same geometry, or one line about why no model can be built from it."""
    small = [k for k, v in asdict(cfg).items() if not isinstance(v, str | bool) and v < LEAST.get(k, 1e-12)]
    groups = max(1, cfg.n_group)
    rules = {
        f"{', '.join(small)} must be positive": not small,
        "n_head must be a multiple of n_kv_head": cfg.n_head % max(1, cfg.n_kv_head) == 0,
        "rotary_dim must be even and at most head_dim": cfg.rotary_dim in range(2, cfg.head_dim + 1, 2),
        # a group's score is that of its two best experts
        "n_expert must make n_group groups of two or more": cfg.n_expert % groups == 0 and cfg.n_expert >= 2 * groups,
        "topk_group must be at most n_group": cfg.topk_group <= cfg.n_group,
        "n_active experts must fit into topk_group groups": cfg.n_active <= cfg.topk_group * (cfg.n_expert // groups),
        f"n_last must be 1..{cfg.n_layer} (n_layer), not {cfg.n_last}": cfg.n_last <= cfg.n_layer,
        f"block_length must be 1..{cfg.max_len} (max_len)": cfg.block_length <= cfg.max_len,
        "eos_id and mask_id must be inside the vocabulary": max(cfg.eos_id, cfg.mask_id) < cfg.vocab_size,
        f"tokenizer {cfg.tokenizer!r} is not bytes, bpe or toy": cfg.tokenizer in ("bytes", "bpe", "toy"),
    }
    return next((fail(f"impossible model: {rule}") for rule, holds in rules.items() if not holds), cfg)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    def write(temporary: Path) -> None:
        try:
            save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, temporary, metadata)
        except SafetensorError as e:  # a full disk
            raise OSError(str(e)) from e

    replace_file(path, write)


def stored(model: Model) -> dict[str, Tensor]:
    """What model.safetensors holds: all but adapters, and a tied head once."""
    left_out = ("lm_head.weight",) if model.cfg.tied else ()
    return {k: v for k, v in model.state_dict().items() if "lora_" not in k and k not in left_out}


def save_model(model: Model, folder: Path) -> None:
    """Weights first, config last: a folder with a config.json has the weights that it speaks of."""
    save_tensors(folder / "model.safetensors", stored(model))
    write_json(folder / "config.json", asdict(model.cfg))


def save_adapter(model: Model, folder: Path, settings: dict) -> None:
    save_tensors(folder / "adapter.safetensors", model.adapter_state())
    write_json(folder / "adapter.json", settings | {"model": {k: getattr(model.cfg, k) for k in ADAPTER_GEOMETRY}})


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
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (it is no dict)


def check_fit(path: Path, held: dict, expected: dict, hint: str, dropped: dict[str, str] | None = None) -> None:
    """Refuse tensors that are unknown, missing or of another shape; `dropped`: what may be left, and why."""
    for name in sorted(held.keys() | expected.keys()):
        a, b = (f"shape {list(t[name].shape)}" if name in t else "no such tensor" for t in (held, expected))
        if dropped and name in dropped and name not in expected:
            print(f"dropped {name}: {dropped[name]}")
        elif a != b:
            fail(f"{path}: {name}: {a} there, {b} in the model: {hint}")


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = read_json(index, "weight index").get("weight_map") or {}
    return [folder / n for n in sorted(set(names.values()))]


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    raw = read_json(path, "checkpoint config (is this a checkpoint folder? an adapter's is given by --adapter)")
    raw.pop("loader", None)  # says how the weights are stored: see weights_loader
    try:
        return check(Config(**raw))
    except TypeError as e:
        fail(f"{path} does not fit this version ({e}); if this is a released checkpoint, convert it first: "
             f"`python convert_weights.py --src {folder} --out DIR`")  # fmt: skip


def weights_loader(folder: Path) -> Callable[..., Model]:
    """`load_weights`; or that of the module of released/ that config.json names, whose weights are stored otherwise."""
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
    with torch.device("meta"):
        model = Model(cfg)
    state = {}
    for name, tensor in read_tensors(weight_files(folder)):
        state[name] = tensor.to(device=device, dtype=torch.float32 if name.endswith("expert_bias") else dtype)
    markers = state.get("markers", torch.zeros(1, cfg.n_embd, device=device, dtype=dtype))
    state["markers"] = F.pad(markers, (0, 0, 0, cfg.n_rounds - len(markers)))
    check_fit(folder, state, stored(model), "the checkpoint is incomplete, or another model's")
    model.load_state_dict(state, assign=True, strict=False)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight
    model.compute_dtype = dtype
    return model


def load_model(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype, adapter: str | Path | None = None, **overrides
) -> Model:
    """A model from its folder. Parameters take `dtype`, expert_bias stays float32. `overrides` change config fields
    (n_last, n_rounds, block_length); an `adapter` (a folder) brings its own. Markers that the checkpoint lacks start at
    zero."""
    folder = Path(folder)
    overrides |= {k: adapter_settings(adapter)["model"][k] for k in ("n_last", "n_rounds")} if adapter else {}
    cfg = check(replace(read_config(folder), **{k: v for k, v in overrides.items() if v is not None}))
    load = weights_loader(folder)
    model = load(folder, cfg, device, dtype)
    if adapter:
        load_adapter(model, adapter)
    return model


def load_tokenizer(folder: Path, kind: str) -> Tokenizer | None:
    """None where there is none: a toy's tokens are numbers, a released checkpoint may come without its tokenizer."""
    if kind == "bpe":
        return bpe_tokenizer(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else None
    return byte_tokenizer() if kind == "bytes" else None


def adapter_settings(folder: str | Path) -> dict:
    """adapter.json, checked: base, lora_r, lora_alpha, model (the geometry it was trained at), perhaps extension."""
    settings = read_json(Path(folder) / "adapter.json", "adapter (a folder that train.py --init_from DIR wrote)")
    model = settings.get("model")
    values = settings | (model if isinstance(model, dict) else {})
    kinds = {"base": str, "lora_alpha": int | float} | dict.fromkeys(("lora_r", *ADAPTER_GEOMETRY), int)
    bad = [k for k, kind in kinds.items() if not isinstance(values.get(k), kind)]
    bad += [k for k in kinds if k != "base" and not bad and not 0 < values[k] < 2**20]
    bad += [] if re.fullmatch(r"beyond\.\w+", str(settings.get("extension", "beyond.x"))) else ["extension"]
    return fail(f"{folder}/adapter.json: {bad[0]} is missing or wrong") if bad else settings


def load_adapter(model: Model, folder: str | Path) -> None:
    """LoRA and markers into a loaded model; an extension's adapter through the module that it names."""
    settings, path = adapter_settings(folder), Path(folder) / "adapter.safetensors"
    if odd := [k for k in ADAPTER_GEOMETRY if getattr(model.cfg, k) != settings["model"][k]]:
        fail(f"{folder} was trained with {odd[0]} {settings['model'][odd[0]]}: wrong --ckpt for this adapter")
    if "extension" not in settings:
        model.add_lora(settings["lora_r"], settings["lora_alpha"], torch.Generator())
    else:  # the one door to beyond/: the module makes the model ready for its adapter
        try:
            attach = importlib.import_module(settings["extension"]).attach
        except (ImportError, AttributeError):
            fail(f"{folder}/adapter.json: there is no extension {settings['extension']} that loads adapters")
        attach(model, settings)
    state = dict(read_tensors([path]))
    check_fit(path, state, model.adapter_state(), "wrong --ckpt for this adapter?")
    model.load_state_dict(state, strict=False)


def save_state(model: Model, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Trained weights and moments of one step in one file, so that they belong together whenever the power goes."""
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    state = {f"param.{n}": p for p, n in names.items()}
    for p, moments in optimizer.state.items():
        state |= {f"{k}.{names[p]}": v for k, v in moments.items()}
    save_tensors(folder / "state.safetensors", state, {"step": str(step)})


def restore_state(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Weights, moments -> the number of steps taken. Generators need nothing: they are functions of the row."""
    path = folder / "state.safetensors"
    named, state = {n: p for n, p in model.named_parameters() if p.requires_grad}, dict(read_tensors([path]))
    weights = {key.removeprefix("param."): t for key, t in state.items() if key.startswith("param.")}
    check_fit(path, weights, named, "start again in a new --out_dir")
    for key, tensor in state.items():
        kind, name = key.split(".", 1)
        if kind == "param":
            named[name].data.copy_(tensor)
        else:
            optimizer.state[named[name]][kind] = tensor.to(named[name].device)
    return max((int(t) for key, t in state.items() if key.startswith("step.")), default=0)


def rewind_log(path: Path, step: int) -> None:
    """Drop lines at or after `step` (written after the last save) and a line cut short by a kill."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            if record["step"] < step or (record["step"] == step and "val" in record):
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            break
    replace_file(path, lambda p: p.write_bytes(b"".join(kept)))


def resumable(folder: Path, flags: dict, given: set[str]) -> dict:
    """The settings of the run in a folder; `given` flags, which a resumed run cannot change, must agree with them."""
    saved = read_json(folder / "train.json", "training run to resume (--out_dir of an earlier run)")
    if lacking := [k for k in flags if k not in saved]:
        fail(f"{folder / 'train.json'} lacks {lacking[0]}: it is not a whole run's settings; start in a new --out_dir")
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

    before = [(s, signal.signal(s, handler)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield caught
    finally:
        for number, old in before:
            signal.signal(number, old)
