"""Checkpoints of this project -> the released (Hugging Face) layout, an adapter merged in or not; adapters -> PEFT.

    # a checkpoint -> released, bit for bit; with --adapter its LoRA is merged, and its markers lie beside the weights
    python -m released.export --to hf --src weights/llada2.1-mini --adapter out/cocommit --out merged/
    # an adapter -> the folder that PEFT loads, and the markers, which PEFT has no place for
    python -m released.export --to peft --adapter out/cocommit --out adapter/

It refuses what convert_weights.py refuses, an adapter of another base or with other tensors than its settings say, and
to merge one that does not act alike in every pass. The released remote code (modeling_*.py) is no weight: copy it
from the released folder yourself. `config.json` (PEFT: `adapter_config.json`) is written last: a folder without one is
incomplete, and running the same command again completes it.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import adapter_settings, check_base, check_fit, open_tensors, read_config, read_tensors, save_tensors
from convert_weights import (
    DTYPES,
    FIELDS,
    INDEX,
    MUST_BE,
    NAMES,
    Files,
    Shards,
    Stored,
    Target,
    announce,
    checkpoint_files,
    copy_file,
    plan,
    survey,
    write_folder,
)
from lib.tokenizer import learn_bpe
from lib.util import Parser, fail, read_json, write_json
from model import Config

# C channels (n_embd), K = n_rounds, r rank of an adapter

STAGE_B_ONLY = "beyond.stage_b_only"  # the extension whose LoRA acts in Stage B alone, in the last n layers
DROPPED = {
    "lm_head.weight": "tied to the embedding",
    "markers": "the released layout has no place for them; they go to markers.safetensors",
}


@dataclass
class Part(Target):
    """Part `at` of a stored tensor that is several released ones end to end; `lora` (A, B, scale) merged into it."""

    at: int = 0
    lora: tuple[Tensor, Tensor, float] | None = None

    def parts(self) -> Iterator[Tensor]:
        with open_tensors(self.pieces[0].file) as f:
            part = f.get_tensor(self.pieces[0].name).view(-1, *self.shape)[self.at]
            if self.lora is not None:  # a float32 sum, rounded once
                A, B, scale = self.lora
                part = part.float() + scale * (B.float() @ A.float())
            yield part.to(DTYPES[self.dtype])


def read_adapter(folder: Path) -> tuple[dict, dict[str, Tensor], Tensor]:
    """(adapter.json, LoRA matrices by our names, markers (K, C)); exactly the matrices of its layers, of its rank."""
    settings = adapter_settings(folder)
    shape, r, extension = settings["model"], settings["lora_r"], settings.get("extension")
    if extension not in (None, STAGE_B_ONLY):
        fail(f"{folder} was made by {extension}: no other layout has a place for what that adds")
    layers = range(shape["n_layer"] - shape["n_last"] if extension else 0, shape["n_layer"])
    path, markers_shape = folder / "adapter.safetensors", (shape["n_rounds"], shape["n_embd"])
    state = {name: t.clone() for name, t in read_tensors([path])}
    expected = {f"layers.{i}.attn.{m}.lora_{side}" for i in layers for m in ("qkv", "proj") for side in "AB"}
    if odd := sorted((expected | {"markers"}).symmetric_difference(state)):
        fail(f"{path}: tensor {odd[0]} is {'unexpected' if odd[0] in state else 'missing'}")
    if state["markers"].shape != markers_shape:
        fail(f"{path}: markers {list(state['markers'].shape)} should be {list(markers_shape)}")
    for name in expected:
        if state[name].dim() != 2 or state[name].shape[name.endswith("B")] != r:
            fail(f"{path}: {name} {list(state[name].shape)} is not of rank {r}")
    return settings, state, state.pop("markers")


# ---------------------------------------------------------------------------------------------------------------------
# a checkpoint -> released


def released_config(cfg: Config) -> dict:
    """A released config.json for a model that was not converted from one."""
    fields = {name: getattr(cfg, field) for name, field in FIELDS.items()}
    rotary = {"partial_rotary_factor": cfg.rotary_dim / cfg.head_dim, "rotary_dim": cfg.rotary_dim}
    return {**MUST_BE, **fields, **rotary, "pad_token_id": cfg.eos_id, "use_cache": False}


def to_released(
    found: dict[str, Stored], cfg: Config, folder: Path, lora: dict[str, Tensor], scale: float, bias_dtype: str
) -> Shards:
    """Released tensors from a checkpoint's, `lora` (by this project's names) merged in."""
    expected = {name: torch.empty(shape, device="meta") for _, name, shape, _, _ in plan(cfg)}
    check_fit(folder, found, expected, "the checkpoint is incomplete", DROPPED)
    shards: Shards = [{} for _ in range(cfg.n_layer + 2)]
    for shard, name, shape, released, part in plan(cfg):
        whole = found[name]
        dtype = bias_dtype if name.endswith("expert_bias") else whole.dtype
        A, B = (lora.get(name.removesuffix("weight") + side) for side in ("lora_A", "lora_B"))
        if A is not None and [B.shape[0], A.shape[1]] != shape:
            fail(f"the adapter's {name} is {[B.shape[0], A.shape[1]]}, {folder} has {shape}: trained on another model?")
        for at, r in enumerate(released):
            shards[shard][r] = Part(dtype, part, [whole], at, None if A is None else (A, B, scale))
    return shards


def to_hf(args: Namespace) -> None:
    """A checkpoint, with or without an adapter, -> released."""
    cfg, found = read_config(args.src), survey(args.src)
    lora, scale, markers, n_last = {}, 0.0, None, cfg.n_last
    if args.adapter is not None:
        settings, lora, markers = read_adapter(args.adapter)
        shape, scale = settings["model"], settings["lora_alpha"] / settings["lora_r"]
        n_last = shape["n_last"]
        if settings.get("extension"):
            fail(f"{args.adapter} acts in Stage B only ({STAGE_B_ONLY}): merged it would act in every pass")
        if (shape["n_layer"], shape["n_embd"]) != (cfg.n_layer, cfg.n_embd):
            fail(f"{args.adapter} is for {shape['n_layer']} layers of {shape['n_embd']}, not for {args.src}")
        check_base(args.src, args.adapter)
    elif "markers" in found:
        markers = dict(read_tensors([found["markers"].file]))["markers"].clone()
    index = read_json(args.src / INDEX, "weight index") if (args.src / INDEX).exists() else {}
    bias = index.get("metadata", {}).get("released_expert_bias", "F32")
    shards = to_released(found, cfg, args.src, lora, scale, bias)
    files = checkpoint_files(shards, args.src)
    if cfg.tokenizer == "bytes":  # known by its name here; there it is a file, and the converter reads the ids from it
        files["tokenizer.json"] = partial(write_json, value=learn_bpe([], 258))
    if markers is not None:
        files["markers.safetensors"] = markers_file(markers, n_last)
    kept = args.src / "released_config.json"
    write_config = partial(copy_file, kept) if kept.exists() else partial(write_json, value=released_config(cfg))
    write_folder(args.out, files | {"config.json": write_config}, announce(found, shards, args.src, args.out))


def markers_file(markers: Tensor, n_last: int, **metadata: str) -> partial:
    return partial(save_tensors, tensors={"markers": markers}, metadata={"n_last": str(n_last), **metadata})


# ---------------------------------------------------------------------------------------------------------------------
# adapters -> PEFT


def to_peft(args: Namespace) -> None:
    settings, lora, markers = read_adapter(args.adapter)
    modules = {own.split(".")[3]: name for name, own in NAMES.items() if re.search(r"(qkv|proj)\.weight$", own)}
    state = {}
    for name, tensor in lora.items():
        _, i, _, module, side = name.split(".")
        state[f"base_model.model.{modules[module].format(i=i).removesuffix('weight')}{side}.weight"] = tensor
    partly = settings.get("extension") == STAGE_B_ONLY
    if partly:
        print("note: this adapter acts in Stage B only; PEFT users must switch it off in Stage A")
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": str(args.src or settings["base"]),
        "r": settings["lora_r"],
        "lora_alpha": settings["lora_alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": [name.split(".")[-2] for name in modules.values()],
        "layers_to_transform": sorted({int(name.split(".")[1]) for name in lora}) if partly else None,
        "layers_pattern": "layers" if partly else None,
    }
    metadata = {"extension": STAGE_B_ONLY} if partly else {}
    files: Files = {
        "adapter_model.safetensors": partial(save_tensors, tensors=state, metadata={"format": "pt"}),
        "markers.safetensors": markers_file(markers, settings["model"]["n_last"], **metadata),
        "adapter_config.json": partial(write_json, value=config),
    }
    write_folder(args.out, files, sum(t.nbytes for t in state.values()))


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--to", choices=["hf", "peft"], required=True, help="layout to write")
    add("--src", type=Path, help="checkpoint in our layout; with --to peft: the name of the base to record")
    add("--adapter", type=Path, help="a folder of train.py --init_from: merged by --to hf, rewritten by --to peft")
    add("--out", type=Path, required=True, help="a new or empty folder, or one that an interrupted run left incomplete")
    args = parser.parse_args()
    needed = "src" if args.to == "hf" else "adapter"
    if getattr(args, needed) is None:
        parser.error(f"--to {args.to} needs --{needed}")
    try:
        (to_hf if args.to == "hf" else to_peft)(args)
    except KeyboardInterrupt:
        fail(f"interrupted: {args.out} is incomplete; the same command completes it")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
