"""A distilled Stage A as a checkpoint of its own: something can then be trained on it, or exported.

`beyond.distill --weights all` writes every weight of its model into an adapter. Here the base is read with it, and what
comes out is written as a checkpoint beside copies of the base's tokenizer. Other adapters are refused: what they add
(LoRA, markers, a head) is no part of a plain model. LoRA of both stages is merged by released/export.py.

    python -m tools.as_checkpoint --ckpt out/base --adapter out/distilled --out out/distilled-base
"""

import shutil
from pathlib import Path

import torch

from checkpoint import adapter_settings, load_model, save_model
from lib.util import Parser, fail

# what a model of names, of a learned BPE or of a toy has beside its weights
BESIDE = ("tokenizer.json", "names.json", "toy.json")


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("distilled").add_argument
    add("--ckpt", type=Path, required=True, help="the base")
    add("--adapter", type=Path, required=True, help="a folder of beyond.distill --weights all, trained on that base")
    add("--out", type=Path, required=True, help="folder to write; it must not hold a checkpoint")
    args = parser.parse_args()

    # refuse what cannot be meant, before anything is read
    settings = adapter_settings(args.adapter)
    if settings.get("extension") != "beyond.distill" or settings.get("weights") != "all":
        fail(f"{args.adapter} does not hold all weights of a model: give a folder of beyond.distill --weights all")
    if (args.out / "config.json").exists():
        fail(f"{args.out} already holds a checkpoint: choose another --out")

    # float32, as it was trained
    model = load_model(args.ckpt, "cpu", torch.float32, args.adapter)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in BESIDE:
        if (args.ckpt / name).exists():
            shutil.copy(args.ckpt / name, args.out / name)
    save_model(model, args.out)  # config.json comes last: a folder that has one is whole
    print(f"wrote {args.out}, a checkpoint like any other")


if __name__ == "__main__":
    main()
