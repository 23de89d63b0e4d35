"""Checkpoints of this project -> the released (Hugging Face) layout, adapters merged in.

    # a checkpoint -> released, bit for bit; of an adapter's folder the LoRA is merged, and its markers lie beside
    python -m llada.export --to hf --src weights/llada2.1-mini --out back/
    python -m llada.export --to hf --src out/cocommit --out merged/

An adapter that acts in Stage B alone goes nowhere. The released remote code (modeling_*.py) is no weight: copy it from
the released folder yourself. `config.json` is written last: a folder without one is incomplete, and running the same
command again completes it.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import convert_weights
from checkpoint import about_adapter, base_of
from convert_weights import Plan, copies, copy_file, plan, survey, write_checkpoint
from lib.data import learn_bpe
from lib.util import Parser, command, entry, fail, write_json
from model import LORA_SCALE, Config

# C channels (n_embd), K = n_rounds, r rank of an adapter

DROPPED = {
    "lm_head.weight": "tied to the embedding",
    "markers": "the released layout has no place for them; they go to markers.safetensors",
}

State = dict[str, Tensor]  # LoRA matrices and markers, by our names


def read_adapters(folder: Path) -> list[State]:
    """The adapter in a folder, and those that it stands on, the lowest first; none in a model's folder."""
    found = []
    while about := about_adapter(folder):
        if entry(about, "lora_in", str, folder) == "stage_b":
            fail(f"{folder} acts in Stage B only: in any other layout it would act in every pass")
        base = checkpoint.next_base(folder)
        checkpoint.check_base(base, folder)
        found.append(dict(checkpoint.read_tensors([folder / "adapter.safetensors"])))
        folder = base
    return found[::-1]


def released_config(cfg: Config) -> dict:
    """A released config.json for a model that was not converted from one."""
    fields = {name: getattr(cfg, field) for name, field in convert_weights.FIELDS.items()}
    rotary = {"partial_rotary_factor": cfg.rotary_dim / cfg.head_dim, "rotary_dim": cfg.rotary_dim}
    return {**convert_weights.MUST_BE, **fields, **rotary, "pad_token_id": cfg.eos_id, "use_cache": False}


def released_tensors(found: dict[str, Tensor], shard: list[Plan], adapters: list[State]) -> dict[str, Tensor]:
    """The released tensors of one shard of ours, with the LoRA of all adapters."""
    tensors = {}
    for planned in shard:
        whole = found.pop(planned.name)
        name = planned.name.removesuffix("weight")
        # each is added in float32 and rounded, as where one is trained on the other
        for adapter in adapters:
            if f"{name}lora_A" in adapter:
                delta = LORA_SCALE * adapter[f"{name}lora_B"].float() @ adapter[f"{name}lora_A"].float()
                whole = (whole.float() + delta).to(whole.dtype)
        tensors |= zip(planned.released, whole.view(-1, *planned.part), strict=True)
    return tensors


def to_hf(src: Path, out: Path) -> None:
    """A checkpoint, or a base with the adapter in `src`, -> released."""
    base = base_of(src)
    cfg = checkpoint.read_config(base)
    found = survey(base)
    shards = plan(cfg)
    expected = {planned.name: torch.empty(planned.shape, device="meta") for planned in sum(shards, [])}
    checkpoint.check_fit(base, found, expected, "the checkpoint is incomplete", DROPPED)

    # markers, the last adapter's or the model's own, and how many layers they are made for
    adapters = read_adapters(src)
    markers = found.get("markers")
    n_last = cfg.n_last
    if adapters:
        markers = adapters[-1]["markers"]
        n_last = about_adapter(src)["model"]["n_last"]

    # what goes with the weights, its own released config where it was converted from one
    files = copies(base, *convert_weights.TEXT)
    if cfg.tokenizer == "bytes":  # a word in our config; there it is a file, and the converter reads the ids from it
        files["tokenizer.json"] = partial(write_json, value=learn_bpe([], 258))
    if markers is not None:
        about = {"n_last": str(n_last)}
        files["markers.safetensors"] = partial(checkpoint.save_tensors, tensors={"markers": markers}, metadata=about)
    files["config.json"] = partial(write_json, value=released_config(cfg))
    if (base / "released_config.json").exists():
        files["config.json"] = partial(copy_file, base / "released_config.json")

    write_checkpoint(out, [partial(released_tensors, found, shard, adapters) for shard in shards], files)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--to", choices=["hf"], required=True, help="layout to write")
    parser.add_argument("--src", type=Path, required=True, help="a checkpoint in our layout, or an adapter's folder")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder, or one left incomplete")
    args = parser.parse_args()
    to_hf(args.src, args.out)


if __name__ == "__main__":
    main()
