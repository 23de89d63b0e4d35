"""Checkpoints of this project -> the released (Hugging Face) layout, with an adapter's LoRA merged into the weights.

    # a converted model comes out bit for bit; of an adapter, LoRA is merged, and the markers get a file of their own
    python -m released.export --to hf --src weights/llada2.1-mini --out weights/back
    python -m released.export --to hf --src out/cocommit --out weights/merged

Copy the released code (modeling_*.py) from the released folder yourself. If the command was interrupted, run it again.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import convert_weights
from checkpoint import attach, base_hash, base_of, check_base, check_fit, empty_model, read_config, save_tensors
from config import Config
from convert_weights import BESIDE, FAMILIES, Family, Plan, our_config, plan, read_released, write_checkpoint
from layers import LORA_SCALE
from lib.util import Parser, command, copy_file, fail, write_json


def released_config(src: Path, base: Path, cfg: Config) -> tuple[dict, Family]:
    """config.json of the released layout, and its family: the released one, if there is one, with what is different."""
    original = base / "released_config.json"
    if original.exists():
        raw, family = read_released(original)
    else:
        kind = next((kind for kind, family in FAMILIES.items() if family.decoder == cfg.decoder), "llada2_moe")
        family = FAMILIES[kind]
        raw = family.must_be | {name: getattr(cfg, field) for name, field in family.fields.items()}
        raw |= {"model_type": kind, "partial_rotary_factor": cfg.rotary_dim / cfg.head_dim}
        raw |= {"pad_token_id": cfg.eos_id, "use_cache": False}

    # convert_weights.py must read the same sizes. What a released config has no place for stands beside its fields
    place = {ours: name for name, ours in family.fields.items() if name in raw} | {name: name for name in BESIDE}
    read = our_config(base, raw, family)
    for name, value in asdict(cfg).items():
        if value != getattr(read, name):
            if name not in place:
                fail(f"{src}: the released layout has no place for its {name}, {value!r}")
            raw = raw | {place[name]: value}
    return raw, family


def released_tensors(found: dict[str, Tensor], shard: list[Plan], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """The released tensors of one shard of ours, with the adapter's LoRA in them; adapter: {} for none."""
    tensors = {}
    for planned in shard:
        whole = found.pop(planned.name)
        name = planned.name.removesuffix("weight")
        if f"{name}lora_A" in adapter:
            # added in float32, then rounded
            delta = LORA_SCALE * adapter[f"{name}lora_B"].float() @ adapter[f"{name}lora_A"].float()
            whole = (whole.float() + delta).to(whole.dtype)
        parts = [whole]
        if len(planned.released) > 1:
            parts = whole.flatten(0, -2).split([rows for rows, _ in planned.released.values()])
        tensors |= zip(planned.released, parts, strict=True)
    return tensors


def to_hf(src: Path, out: Path) -> None:
    """Convert the model in `src`, or the base of the adapter in `src` with its LoRA, to the released layout."""
    base = base_of(src)
    cfg = read_config(src)
    raw, family = released_config(src, base, cfg)
    adapter = {}
    if base != src:
        check_base(src, base_hash(base))
        adapter = attach(empty_model(cfg), src)  # of the base shapes alone, which take no memory
    found = convert_weights.survey(base)
    shards = plan(cfg, family)
    expected = {planned.name: torch.empty(planned.shape, device="meta") for planned in sum(shards, [])}
    dropped = {
        "lm_head.weight": "tied to the embedding",
        "markers": "the released layout has no place for them; they go to markers.safetensors",
    }
    check_fit(base, found, expected, "the checkpoint is incomplete", dropped)

    # the other files: the markers, with the n for which they were trained; and the config
    files = convert_weights.copies(base, *convert_weights.TEXT)
    markers = adapter.get("markers", found.get("markers"))
    if markers is not None:
        made_for = {"n_last": str(cfg.n_last)}
        files["markers.safetensors"] = partial(save_tensors, tensors={"markers": markers}, metadata=made_for)
    files["config.json"] = partial(write_json, value=raw)
    original = base / "released_config.json"
    if original.exists() and read_released(original)[0] == raw:
        files["config.json"] = partial(copy_file, original)  # byte for byte

    write_checkpoint(out, [partial(released_tensors, found, shard, adapter) for shard in shards], files)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--to", choices=["hf"], required=True, help="the layout to write")
    parser.add_argument("--src", type=Path, required=True, help="a model's folder, or an adapter's")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder, or an incomplete one")
    args = parser.parse_args()
    to_hf(args.src, args.out)


if __name__ == "__main__":
    main()
