"""Checkpoints of this project -> the released (Hugging Face) layout, with an adapter's LoRA merged into the weights.

    # a converted model comes out bit for bit; of an adapter, LoRA is merged, and the markers get a file of their own
    python -m released.export --to hf --src weights/llada2.1-mini --out weights/back
    python -m released.export --to hf --src out/cocommit --out weights/merged

Copy the released code (modeling_*.py) from the released folder yourself. If the command was interrupted, run it again.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import convert_weights
from checkpoint import about_adapter, base_of
from config import Config
from convert_weights import Plan, copies, plan, survey, write_checkpoint
from layers import LORA_SCALE
from lib.util import Parser, command, copy_file, fail, read_json, write_json


def config_file(base: Path, cfg: Config) -> Callable[[Path], None]:
    """What writes config.json: the released one, byte for byte, if there is one. Sizes that it lacks are added."""
    original = base / "released_config.json"
    if original.exists():
        raw = read_json(original, "released config")
    else:
        raw = convert_weights.MUST_BE | {name: getattr(cfg, field) for name, field in convert_weights.FIELDS.items()}
        raw |= {"partial_rotary_factor": cfg.rotary_dim / cfg.head_dim, "rotary_dim": cfg.rotary_dim}
        raw |= {"pad_token_id": cfg.eos_id, "use_cache": False}

    assumed = convert_weights.assumed_sizes(cfg.n_layer)
    sizes = {name: getattr(cfg, name) for name in assumed}
    added = {name: value for name, value in sizes.items() if value != raw.get(name, assumed[name])}
    if original.exists() and not added:
        return partial(copy_file, original)
    return partial(write_json, value=raw | added)


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
        tensors |= zip(planned.released, whole.view(-1, *planned.part), strict=True)
    return tensors


def to_hf(src: Path, out: Path) -> None:
    """Convert the model in `src`, or the base of the adapter in `src` with its LoRA, to the released layout."""
    base = base_of(src)
    about = about_adapter(src)
    cfg = checkpoint.read_config(src)
    if cfg.stage_b != "paper":
        fail(f"{src}: its Stage B is not the paper's, and the released layout has no place for it")
    if cfg.router != Config.router:
        fail(f"{src}: the released layout has no place for its router, {cfg.router!r}")
    adapter = {}
    if about:
        checkpoint.check_base(src, checkpoint.base_hash(base))
        adapter = checkpoint.attach(checkpoint.empty_model(cfg), src)  # of the base shapes alone, which take no memory
    found = survey(base)
    shards = plan(cfg)
    expected = {planned.name: torch.empty(planned.shape, device="meta") for planned in sum(shards, [])}
    dropped = {
        "lm_head.weight": "tied to the embedding",
        "markers": "the released layout has no place for them; they go to markers.safetensors",
    }
    checkpoint.check_fit(base, found, expected, "the checkpoint is incomplete", dropped)

    # the other files: the markers, with the n for which they were trained; and the config
    files = copies(base, *convert_weights.TEXT)
    markers = adapter.get("markers", found.get("markers"))
    if markers is not None:
        made_for = {"n_last": str(cfg.n_last)}
        files["markers.safetensors"] = partial(checkpoint.save_tensors, tensors={"markers": markers}, metadata=made_for)
    files["config.json"] = config_file(base, cfg)

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
