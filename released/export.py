"""Checkpoints of this project -> the released (Hugging Face) layout, an adapter merged in or not; adapters -> PEFT.

    # a checkpoint -> released, bit for bit; of an adapter's folder the LoRA is merged, and its markers lie beside
    python -m released.export --to hf --src weights/llada2.1-mini --out back/
    python -m released.export --to hf --src out/cocommit --out merged/
    # an adapter -> the folder that PEFT loads, and the markers, which PEFT has no place for
    python -m released.export --to peft --src out/cocommit --out adapter/

An adapter that acts in Stage B alone goes nowhere, and neither does a head. The released remote code
(modeling_*.py) is no weight: copy it from the released folder yourself. `config.json` (PEFT: `adapter_config.json`) is
written last: a folder without one is incomplete, and running the same command again completes it.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import convert_weights
from checkpoint import base_of, check_base, check_fit, read_config, read_tensors, save_tensors
from convert_weights import Plan, copies, copy_file, plan, survey, write_checkpoint
from lib.config import Config
from lib.tokenizer import learn_bpe
from lib.util import Parser, command, fail, read_json, reading, write_json

# C channels (n_embd), K = n_rounds, r rank of an adapter

DROPPED = {
    "lm_head.weight": "tied to the embedding",
    "markers": "the released layout has no place for them; they go to markers.safetensors",
}


# --- adapters
@dataclass
class Adapter:
    settings: dict  # adapter.json
    lora: dict[str, Tensor]  # by our names
    markers: Tensor  # (K, C)
    n_last: int
    scale: float


def read_adapter(folder: Path) -> Adapter:
    """An adapter of LoRA and markers, whose base is the one that it was trained on."""
    path = folder / "adapter.json"
    settings = read_json(path, "adapter")
    if "head" in settings:
        fail(f"{folder} is a head: no other layout has a place for it")
    if settings.get("lora_in_stage_b_alone"):
        fail(f"{folder} acts in Stage B only: in any other layout it would act in every pass")
    check_base(base_of(folder), folder)
    lora = dict(read_tensors([folder / "adapter.safetensors"]))
    with reading(path, "adapter"):
        scale = settings["lora_alpha"] / settings["lora_r"]
        return Adapter(settings, lora, lora.pop("markers"), settings["model"]["n_last"], scale)


def save_markers(path: Path, markers: Tensor, n_last: int) -> None:
    save_tensors(path, {"markers": markers}, {"n_last": str(n_last)})


def to_peft(src: Path, out: Path) -> None:
    adapter = read_adapter(src)
    renamed = {}
    for name, tensor in adapter.lora.items():
        # layers.3.attn.qkv.lora_A -> base_model.model.model.layers.3.attention.query_key_value.lora_A.weight
        module, side = name.rsplit(".", 1)
        (theirs,) = convert_weights.released_names(f"{module}.weight", 0)
        renamed[f"base_model.model.{theirs.removesuffix('weight')}{side}.weight"] = tensor

    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": adapter.settings["base"],
        "r": adapter.settings["lora_r"],
        "lora_alpha": adapter.settings["lora_alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": ["dense", "query_key_value"],
    }
    convert_weights.prepare(out, ["adapter_model.safetensors", "markers.safetensors", "adapter_config.json"])
    save_tensors(out / "adapter_model.safetensors", renamed, {"format": "pt"})
    save_markers(out / "markers.safetensors", adapter.markers, adapter.n_last)
    write_json(out / "adapter_config.json", config)
    print(f"wrote {out}")


# --- a checkpoint -> released
def released_config(cfg: Config) -> dict:
    """A released config.json for a model that was not converted from one."""
    fields = {name: getattr(cfg, field) for name, field in convert_weights.FIELDS.items()}
    rotary = {"partial_rotary_factor": cfg.rotary_dim / cfg.head_dim, "rotary_dim": cfg.rotary_dim}
    return {**convert_weights.MUST_BE, **fields, **rotary, "pad_token_id": cfg.eos_id, "use_cache": False}


def released_tensors(found: dict[str, Tensor], shard: list[Plan], adapter: Adapter | None) -> dict[str, Tensor]:
    """The released tensors of one shard of ours, the adapter's LoRA merged in."""
    tensors = {}
    for planned in shard:
        whole = found.pop(planned.name)
        name = planned.name.removesuffix("weight")
        if adapter and f"{name}lora_A" in adapter.lora:  # a float32 sum, rounded once
            delta = adapter.lora[f"{name}lora_B"].float() @ adapter.lora[f"{name}lora_A"].float()
            whole = (whole.float() + adapter.scale * delta).to(whole.dtype)
        tensors |= zip(planned.released, whole.view(-1, *planned.part), strict=True)
    return tensors


def to_hf(src: Path, out: Path) -> None:
    """A checkpoint, or a base with the adapter in `src`, -> released."""
    base = base_of(src)
    cfg = read_config(base)
    found = survey(base)
    shards = plan(cfg)
    expected = {planned.name: torch.empty(planned.shape, device="meta") for planned in sum(shards, [])}
    check_fit(base, found, expected, "the checkpoint is incomplete", DROPPED)

    adapter = None
    markers = None
    n_last = cfg.n_last
    if src != base:
        adapter = read_adapter(src)
        markers = adapter.markers
        n_last = adapter.n_last
    elif "markers" in found:
        markers = found["markers"]

    # what goes with the weights, its own released config where it was converted from one
    files = copies(base, *convert_weights.TEXT)
    if cfg.tokenizer == "bytes":  # a word in our config; there it is a file, and the converter reads the ids from it
        files["tokenizer.json"] = partial(write_json, value=learn_bpe([], 258))
    if markers is not None:
        files["markers.safetensors"] = partial(save_markers, markers=markers, n_last=n_last)
    files["config.json"] = partial(write_json, value=released_config(cfg))
    if (base / "released_config.json").exists():
        files["config.json"] = partial(copy_file, base / "released_config.json")

    write_checkpoint(out, [partial(released_tensors, found, shard, adapter) for shard in shards], files)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--to", choices=["hf", "peft"], required=True, help="layout to write")
    parser.add_argument("--src", type=Path, required=True, help="a checkpoint in our layout, or an adapter's folder")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder, or one left incomplete")
    args = parser.parse_args()
    if args.to == "hf":
        to_hf(args.src, args.out)
    else:
        to_peft(args.src, args.out)


if __name__ == "__main__":
    main()
