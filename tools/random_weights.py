"""Random weights of a preset, with the byte tokenizer: speed and memory of a geometry without its checkpoint.

It refuses a folder that already holds a checkpoint.

    python -m tools.random_weights --preset text --out weights/random
    python -m tools.random_weights --preset llada2.1-mini --dtype bf16 --out weights/random    # 65 GB while building
"""

from dataclasses import replace
from pathlib import Path

from checkpoint import DTYPES, PRESETS, new_model, save_model
from lib.util import Parser, fail, generator


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("random weights")
    group.add_argument("--preset", choices=PRESETS, default="tiny", help="geometry; building takes 4 bytes a parameter")
    group.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the stored weights")
    group.add_argument("--out", type=Path, required=True, help="folder to write; it must not hold a checkpoint")
    args = parser.parse_args()
    if (args.out / "config.json").exists():
        fail(f"{args.out} already holds a checkpoint: choose another --out")

    # the byte tokenizer's special tokens, where the preset has none of its own
    cfg = replace(PRESETS[args.preset], tokenizer="bytes")
    if cfg.mask_id < 0:
        cfg = replace(cfg, eos_id=256, mask_id=257)
    model = new_model(cfg, generator("random weights"))
    for p in model.parameters():  # not .to(): the router's bias stays float32
        p.data = p.data.to(DTYPES[args.dtype])
    save_model(model, args.out)
    print(f"wrote {args.out}: {sum(p.numel() for p in model.parameters()):,} random parameters in {args.dtype}")


if __name__ == "__main__":
    main()
