"""Stage A taught the head's chain: no second look, and the opponent that one has to beat.

The targets are head.py's, what the base writes at all masks from the left. Here the model itself learns to write them
at once, in every pass, with all of its weights. What it forgets by that (decoding one at a time it is no longer the
base), the base's own loss, mixed in, is to keep. What is saved is a model of its own.

    python -m beyond.distill --init_from assets/names --out_dir out/distilled
    python sample.py --ckpt out/distilled --prompt "ARABIC LIGATURE" --tau_m2t 0.1
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import train
from beyond import chain
from beyond.chain import from_the_left, masks_as_decoded
from checkpoint import load_model
from corrupt import M, cross_entropy, summed, three_term_loss
from lib.config import DTYPES
from lib.settings import build_parser
from lib.util import bounded, fail, pick_device
from model import Model
from train import Batch, Losses, Recipe, batch_context, of_stage


def distill_step(model: Model, batch: Batch, args: Namespace, teacher: Model, target: Callable) -> Losses:
    """Stage A's loss to the chain at all masks, and own_loss times Eq. 1's to the clean tokens."""
    z, kind = masks_as_decoded(model, batch, args)
    masked = kind == M

    # the chain is the teacher's: the base, as it was before anything was learned
    wanted = target(teacher, batch, z, masked, args)

    # one pass, two losses
    ctx = batch_context(model, batch, args)
    h = model.last_n(model.prefix(z, ctx), ctx)[:, : z.shape[1]]
    own, terms = three_term_loss(model, h, batch.clean, kind, fill=masked)
    ce = cross_entropy(model, h[masked], wanted[masked])
    return ce.sum() + args.own_loss * own, of_stage("A", terms) | {"chain": summed(ce)}


def everything(model: Model, args: Namespace) -> None:
    """What learns: all weights, as they were loaded."""


def choose(args: Namespace) -> Recipe:
    if args.corruption != "mask":
        fail("the chain writes masks, and the opponent is trained on them alone: --corruption mask")
    target = chain.target_of(args, partial(from_the_left, known={}))
    teacher = load_model(
        args.init_from, pick_device(args.device), DTYPES[args.dtype], block_length=args.block_length
    ).requires_grad_(False)
    step = partial(distill_step, teacher=teacher, target=target)
    return Recipe(step, everything, whole=True)


def main() -> None:
    parser = build_parser(__doc__)
    chain.add_flags(parser)
    parser.set_defaults(**chain.FROM_THE_LEFT, learning_rate=1e-3, out_dir="out/distilled")
    parser.add_argument("--own_loss", type=bounded(float, 0), default=1.0, help="weight of the base's own loss")
    train.main(parser, choose)


if __name__ == "__main__":
    main()
