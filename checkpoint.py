"""Checkpoint folders: what train.py and convert_weights.py write, and what every other script loads.

    config.json        the model's geometry and ids, written last: a folder that has one is whole
    model.safetensors  all parameters and markers, or shards with model.safetensors.index.json
    adapter.json       instead of the two above: base folder, LoRA's rank and scale, the geometry that it was trained at
    adapter.safetensors    LoRA matrices and markers
    state.safetensors  what a training run resumes from: trained weights and AdamW's moments; log.jsonl, train.json

It refuses, with one line, a folder whose tensors are missing, cut off, unknown or of another shape, and an adapter that
belongs to another model. Weights are safetensors, the rest is JSON; there is no pickle.

    python checkpoint.py --preset llada2.1-mini --dtype bf16 --out weights/random     # random weights, to measure speed
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import parallel
from data import (
    Parser,
    Tokenizer,
    bpe_tokenizer,
    byte_tokenizer,
    fail,
    generator,
    read_json,
    replace_file,
    write_json,
)
from model import PRESETS, Config, Model, new_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAPTER_GEOMETRY = ("n_layer", "n_embd", "n_head", "n_kv_head", "n_last", "n_rounds", "noise")


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """One file of whole tensors, sharded ones gathered one by one; every process takes part, process 0 writes."""
    whole = {k: parallel.gather(v) for k, v in tensors.items()}
    if parallel.RANK == 0:
        replace_file(path, lambda p: write_tensors(p, whole, metadata))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as e:  # a full disk
        raise OSError(str(e)) from e


def save_model(model: Model, folder: Path, metadata: dict[str, str] | None = None) -> None:
    """Weights first, config last: a folder with a config.json has the weights that it speaks of."""
    tensors = {k: v for k, v in model.state_dict().items() if "lora_" not in k}
    if model.cfg.tied:
        del tensors["lm_head.weight"]
    save_tensors(folder / "model.safetensors", tensors, metadata)
    if parallel.RANK == 0:
        write_json(folder / "config.json", asdict(model.cfg))


def save_adapter(model: Model, folder: Path, settings: dict) -> None:
    save_tensors(folder / "adapter.safetensors", model.adapter_state())
    if parallel.RANK == 0:
        write_json(folder / "adapter.json", settings | {"model": {k: getattr(model.cfg, k) for k in ADAPTER_GEOMETRY}})


def read_tensors(files: list[Path]) -> Iterator[tuple[Path, str, Tensor]]:
    """Tensors of safetensors files, one at a time, memory-mapped; a damaged file is one line."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 (a safe_open is no dict)
                    yield path, name, f.get_tensor(name)
        except FileNotFoundError:
            fail(f"{path} is missing: the checkpoint is incomplete, copy it again")
        except (SafetensorError, OSError, ValueError) as e:
            fail(f"{path} is damaged or not a safetensors file ({e}): copy or convert it again")


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = read_json(index, "weight index").get("weight_map")
    if not names or not isinstance(names, dict):
        fail(f"{index} has no weight_map")
    return [folder / n for n in sorted(set(names.values()))]


def read_config(folder: Path) -> Config:
    if (folder / "adapter.json").exists() and not (folder / "config.json").exists():
        base = read_json(folder / "adapter.json", "adapter settings").get("base")
        fail(f"{folder} holds an adapter, not a model: the model is {base}, the adapter goes with it by --adapter")
    raw = read_json(folder / "config.json", "checkpoint config (is this a checkpoint folder?)")
    if "architectures" in raw or "hidden_size" in raw:
        fail(f"{folder} is a released checkpoint: run `python convert_weights.py --src {folder} --out DIR` first")
    try:
        return Config(**raw)
    except TypeError as e:
        known = ", ".join(f.name for f in fields(Config))
        fail(f"{folder / 'config.json'} does not fit this version ({e}); known fields: {known}")


def load_model(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype, adapter: str | Path | None = None, **overrides
) -> Model:
    """A model from its folder, built on `meta` and filled tensor by tensor, so that no second copy exists.

    Parameters take `dtype`; expert_bias stays float32. `overrides` change config fields (n_last, n_rounds,
    block_length); markers that the checkpoint lacks start at zero. With `adapter`, a folder of LoRA and markers, these
    are added, and the fields are the adapter's. Exits with one line on any mismatch.
    """
    folder = Path(folder)
    overrides |= adapter_geometry(adapter)
    cfg = replace(read_config(folder), **{k: v for k, v in overrides.items() if v is not None})
    with torch.device("meta"):
        model = Model(cfg)
    expected = model.state_dict()
    need = sum(t.numel() for t in expected.values()) * dtype.itemsize / 1e9
    if need > 0.1 and parallel.RANK == 0:
        print(f"loading {folder}: {need:.1f} GB of weights in {dtype}, onto {device}", file=sys.stderr)
    state: dict[str, Tensor] = {}
    for path, name, tensor in read_tensors(weight_files(folder)):
        if name not in expected:
            fail(f"{path}: unknown tensor {name}: this file belongs to another model or version")
        if name == "markers" and len(tensor) != cfg.n_rounds:
            tensor = F.pad(tensor, (0, 0, 0, max(0, cfg.n_rounds - len(tensor))))[: cfg.n_rounds]
        if tensor.shape != expected[name].shape:
            fail(f"{path}: {name} has shape {list(tensor.shape)}, the config says {list(expected[name].shape)}")
        state[name] = tensor.to(device=device, dtype=torch.float32 if name.endswith("expert_bias") else dtype)
    for name in {"markers", "noise"} & set(expected):  # a plain checkpoint has neither: they start at zero
        state.setdefault(name, torch.zeros(expected[name].shape, device=device, dtype=dtype))
    if cfg.tied:
        state["lm_head.weight"] = state.get("wte.weight", expected["wte.weight"])
    if missing := [k for k in expected if k not in state]:
        fail(f"{folder}: {len(missing)} tensors are missing, {missing[0]} the first: the checkpoint is incomplete")
    model.load_state_dict(state, assign=True)
    if cfg.tied:
        model.lm_head.weight = model.wte.weight  # one parameter again: assigning made two of one storage
    model.compute_dtype = dtype
    if adapter:
        load_adapter(model, adapter)
    return model


def load_tokenizer(folder: Path, kind: str) -> Tokenizer | None:
    """None for toys, whose tokens are numbers."""
    if kind == "bpe":
        return bpe_tokenizer(folder / "tokenizer.json")
    return byte_tokenizer() if kind == "bytes" else None


def adapter_settings(folder: str | Path) -> dict:
    """adapter.json, checked: base, lora_r, lora_alpha, lora_scope, model (the geometry it was trained at)."""
    settings = read_json(Path(folder) / "adapter.json", "adapter (a folder that train.py --init_from DIR wrote)")
    known = {"base": str, "lora_r": int, "lora_alpha": (int, float), "lora_scope": str, "model": dict}
    bad = [k for k, kind in known.items() if not isinstance(settings.get(k), kind)]
    bad += [k for k in ADAPTER_GEOMETRY if not isinstance((settings.get("model") or {}).get(k), int)]
    bad += ["lora_r"] if not bad and settings["lora_r"] < 1 else []
    return fail(f"{folder}/adapter.json: {bad[0]} is missing or wrong") if bad else settings


def adapter_geometry(folder: str | Path | None) -> dict[str, int]:
    """An adapter brings its own n, K and noise: the overrides of load_model."""
    return {k: adapter_settings(folder)["model"][k] for k in ("n_last", "n_rounds", "noise")} if folder else {}


def load_adapter(model: Model, folder: str | Path) -> None:
    """LoRA and markers into a loaded model."""
    settings = adapter_settings(folder)
    for key in ADAPTER_GEOMETRY:
        if getattr(model.cfg, key) != settings["model"][key]:
            fail(f"{folder} was trained with {key} {settings['model'][key]}, this model has {getattr(model.cfg, key)}: "
                 "wrong --ckpt for this adapter")  # fmt: skip
    model.add_lora(settings["lora_r"], settings["lora_alpha"], torch.Generator(), settings["lora_scope"])
    expected, state = model.adapter_state(), {}
    for path, name, tensor in read_tensors([Path(folder) / "adapter.safetensors"]):
        if name not in expected or tensor.shape != expected[name].shape:
            fail(f"{path}: {name} {list(tensor.shape)} does not fit the loaded model: wrong --ckpt for this adapter?")
        state[name] = tensor.to(expected[name])
    if len(state) != len(expected):
        fail(f"{folder}/adapter.safetensors lacks {sorted(set(expected) - set(state))[0]}: train or copy it again")
    model.load_state_dict(state, strict=False)


# ---------------------------------------------------------------------------------------------------------------------
# what a training run resumes from


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
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    left, steps = {f"param.{n}" for n in named}, 0
    for _, key, tensor in read_tensors([path]):
        kind, name = key.split(".", 1)
        if name not in named:
            fail(f"{path}: {name} is not trained by this run: the folder holds another model")
        p = named[name]
        if kind == "param":
            p.data.copy_(parallel.like(tensor, p))
            left.discard(key)
        else:
            optimizer.state[p][kind] = tensor if kind == "step" else parallel.like(tensor, p)
            steps = int(tensor) if kind == "step" else steps
    return fail(f"{path} lacks {sorted(left)[0]}: start again in a new --out_dir") if left else steps


def rewind_log(path: Path, step: int) -> None:
    """Drop lines at or after `step` (written after the last save) and a line cut short by a kill."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            keep = record["step"] < step or (record["step"] == step and "val" in record)
        except (ValueError, KeyError, TypeError):
            break
        kept += [line + b"\n"] if keep else []
    replace_file(path, lambda p: p.write_bytes(b"".join(kept)))


def main() -> None:
    """Random weights of a preset, with the byte tokenizer: speed and memory of a geometry without its checkpoint."""
    parser = Parser(__doc__)
    group = parser.add_argument_group("random weights")
    group.add_argument("--preset", choices=PRESETS, default="tiny", help="geometry; building takes 4 bytes a parameter")
    group.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the stored weights")
    group.add_argument("--out", type=Path, required=True, help="folder to write; it must not hold a checkpoint")
    args = parser.parse_args()
    if (args.out / "config.json").exists():
        fail(f"{args.out} already holds a checkpoint: choose another --out")
    cfg = replace(PRESETS[args.preset], tokenizer="bytes")
    cfg = replace(cfg, eos_id=256, mask_id=257) if cfg.mask_id < 0 else cfg
    model = new_model(cfg, generator("random weights"))
    if args.dtype == "bf16":
        for p in model.parameters():
            p.data = p.data.bfloat16()
    save_model(model, args.out)
    print(f"wrote {args.out}: {sum(p.numel() for p in model.parameters()):,} random parameters in {args.dtype}")


if __name__ == "__main__":
    main()
