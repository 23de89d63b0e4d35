"""Train a base from scratch: a model that has only Stage A. It fills masks and corrects random tokens, as LLaDA2.1
does; --one_by_one and --mask_power are ours. Then train.py adds CoCommit to it.

The loop and most flags are train.py's. --init_from is scratch or resume, and --lora_r and --s_max do nothing. --n_last
and --n_rounds are only saved: on this base train.py uses them if its own flags are left out. A base has no Stage B, so
--stage_b causal is refused.

    python base.py --config configs/base.toml --seed 1    # assets/names, an hour on one quiet thread
    python base.py --config configs/text_base.toml        # text of your own (data/mine), six minutes
"""

import lib.first  # noqa: F401

from argparse import Namespace
from pathlib import Path

import train
from config import Config
from corrupt import M, kinds_apart, three_term_loss
from decoding import SETTINGS
from lib.rows import Batch
from lib.util import bounded, command, fail, read_json, uniform
from model import Model
from settings import build_parser, read_arguments
from train import Losses, corrupt_batch


def base_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """Eq. 1 in Stage A."""
    z, kind = corrupt_batch(model, batch, model.context(batch.real), args, args.mask_power)

    # some rows are read from left to right, in blocks of one token, and the model fills all of their positions
    one_by_one = None
    if args.one_by_one > 0:
        one_by_one = (uniform(batch.draws, 1)[:, 0] < args.one_by_one).to(z.device)
        asked = one_by_one[:, None] & batch.real
        z = z.masked_fill(asked, model.cfg.mask_id)
        kind = kind.masked_fill(asked, M)

    if args.context == "clean":
        ctx = model.read_clean(batch.clean, batch.real, one_by_one)
    else:
        ctx = model.context(batch.real)
    stage_a = model.last_n(model.prefix(z, ctx), ctx)
    loss, ce = three_term_loss(model, stage_a, batch.clean, kind, fill=kind == M)
    return loss, kinds_apart(ce, None, kind)


@command
def main() -> None:
    parser = build_parser(__doc__)
    parser.set_defaults(init_from="scratch", corruption="random", context="clean", out_dir="out/base")
    add = parser.add_argument_group("base").add_argument
    add("--one_by_one", type=bounded(float, 0, 1), default=0.0,
        help="the share of rows that are read from left to right, in blocks of one token")  # fmt: skip
    add("--mask_power", type=bounded(float, 0.01), default=1.0,
        help="a block's mask ratio is a draw from U(0, 1) to this power; below 1 there are more masks")  # fmt: skip
    add("--decoder", choices=SETTINGS, default="llada",
        help="how it decodes: llada fills and edits by gates; left: a token a step, from the left")  # fmt: skip
    args = read_arguments(parser)
    if args.resume and "one_by_one" not in read_json(Path(args.out_dir) / "train.json", "training run"):
        fail(f"{args.out_dir} is a run of train.py: resume it with train.py")
    if args.stage_b != Config.stage_b:
        fail("a base has no Stage B: leave out --stage_b, and give it to train.py")
    if args.init_from != "scratch":
        fail("a base is trained from scratch: leave out --init_from")
    if args.one_by_one > 0 and args.context == "corrupted":
        fail("with --one_by_one a row is all masks, so it must be read with its clean copy: give --context clean")

    train.run(args, base_step)


if __name__ == "__main__":
    main()
