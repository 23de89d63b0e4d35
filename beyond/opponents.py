"""Beside the paper's Stage B: three other bundles, and one stage that is taught alone, by alpha or by the chain.

    first_left    one token a step, from the left
    end_last      the threshold, but an end is sure only where no mask before it wants a word (LLaDA)
    refusing      Stage B looks at every mask, and writes the surest of them whose probabilities have a product above
                  a threshold

They are steps beside sample.denoise; they never edit. Left to right in one more way: a base of `train.py --one_by_one
1`, decoded in blocks of one.

    python -m beyond.opponents --init_from assets/names --alpha 0.5    # one stage by alpha (arXiv 2609.38066)
    python -m beyond.opponents --init_from assets/names --chain --out_dir out/chained    # by the base's own writing

Other flags are train.py's.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import train
from beyond.chain import chain_target
from beyond.head import prefix
from cache import Cached
from corrupt import M, three_term_loss
from lib.util import command, fail, first_masked
from model import Model
from sample import Decoding, Step, candidates, select_bundle
from train import Batch, Losses, batch_context, clean_tokens, corrupt_batch, of_stage

# R rows, B positions of a block

ONE_STAGE = dict(
    chain=False, lora_in="both", corruption="mask", context="clean", max_iters=1500, learning_rate=2e-3,
    out_dir="out/one-stage",
)  # fmt: skip


# --- other bundles
def first_left(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """The leftmost mask."""
    _, token, conf = stage_a(engine, z, u, d)
    place = torch.arange(z.shape[1], device=z.device).float().expand(z.shape)
    bundle = first_masked(place, z == engine.model.cfg.mask_id, 1)
    return written(z, bundle, (token, conf), (token, conf), 0)


def end_last(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """The threshold's bundle, but an end behind a mask that wants a word counts as unsure."""
    _, token, conf = stage_a(engine, z, u, d)
    masked = z == engine.model.cfg.mask_id
    ends = token == engine.model.cfg.eos_id
    words = masked & ~ends
    word_before = words.cumsum(-1) > 0
    sure = conf.masked_fill(ends & word_before, -1.0)  # not above any threshold
    bundle = select_bundle(sure, masked, d.tau_m2t, d.num_to_transfer)
    return written(z, bundle, (token, conf), (token, conf), 0)


def refusing(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding, keep: float) -> Step:
    """Of all masks those that Stage B, the surest first, finds above `keep` together; where that is nothing, the one
    mask of which Stage A is surest."""
    h, token_a, conf_a = stage_a(engine, z, u, d)
    masked = z == engine.model.cfg.mask_id
    states = engine.stage_b(h, masked)
    token_b, conf_b = candidates(engine.model.logits(states), u[:, 1], d)

    kept = prefix(conf_b, masked, keep, -conf_b)
    one = first_masked(-conf_a, masked, 1)
    alone = ~kept.any(-1, keepdim=True)
    token = torch.where(alone, token_a, token_b)
    conf = torch.where(alone, conf_a, conf_b)
    return written(z, torch.where(alone, one, kept), (token_a, conf_a), (token, conf), d.n_rounds)


def stage_a(engine: Cached, z: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor, Tensor]:
    """A full forward of z (R, B): prefix states, the best tokens, their probabilities."""
    h, states = engine.stage_a(z)
    token, conf = candidates(engine.model.logits(states), u[:, 0], d)
    return h, token, conf


def written(z: Tensor, bundle: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], n_rounds: int) -> Step:
    """The step that fills the bundle by b; a and b are tokens and probabilities, of Stage A and of what looked last."""
    after = torch.where(bundle, b[0], z)
    looked = bundle.any(-1).float()  # where there is no mask left there is nothing to look at
    return Step(z, after, bundle, torch.zeros_like(bundle), *b, *a, n_rounds * looked)


# --- one stage
def stage_a_step(model: Model, batch: Batch, args: Namespace, target: Callable = clean_tokens) -> Losses:
    """Stage A alone, by alpha (0: cross-entropy): all masks of a block are its bundle. LoRA is in every layer.

    target: as in train.cocommit_step.
    """
    z, kind = corrupt_batch(model, batch, args)
    masked = kind == M
    wanted = target(model, batch, z, masked)
    ctx = batch_context(model, batch, args)
    stage_a = model.last_n(model.prefix(z, ctx), ctx)
    loss, terms = three_term_loss(model, stage_a, wanted, kind, fill=masked, alpha=args.alpha)
    return loss, of_stage("A", terms)


def teachers_chain(model: Model, batch: Batch, z: Tensor, bundle: Tensor, teacher: Model) -> Tensor:
    """The target that the teacher, the base as it was, writes one token at a time."""
    return chain_target(teacher, batch, z, bundle)


@command
def main() -> None:
    parser = train.build_parser(__doc__)
    parser.add_argument("--chain", action="store_true", help="teach it the base's own writing, in the place of alpha")
    args = train.read_arguments(parser, "-m beyond.opponents", **ONE_STAGE)
    if args.init_from == "scratch":
        fail("an adapter is trained here: give a trained base by --init_from DIR")
    if args.chain == (args.alpha > 0):
        fail("one stage learns by --alpha 0.5, or by --chain: give one of them")
    corpus = train.load_corpus(args)
    model = train.start(args, corpus)
    step = stage_a_step
    if args.chain:
        target = partial(teachers_chain, teacher=train.load_base(args, corpus))
        step = partial(stage_a_step, target=target)
    train.loop(model, corpus, step, train.make_optimizer(model, args), args)


if __name__ == "__main__":
    main()
