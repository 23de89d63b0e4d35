"""Opponents of Stage B: steps of decoding, each a few lines beside sample.denoise, and two other ways to train.

    first_left      one token a step, from the left
    at_random       as many masks as the threshold takes, drawn uniformly (arXiv 2608.25505)
    end_last        the threshold, but an end is sure only where no mask before it wants a word (LLaDA)
    refusing        Stage B looks at every mask, and writes the first of them, in some order, whose product of its own
                    probabilities is above a threshold
    marking         Stage B with the marker on other positions, on none, or on half of the bundle
    soft_drafts     Stage B also sees Stage A's expected embedding at the marked positions

    tilted          a bundle that looks at the text: some answers are shown to the loss more often than others

They write and never edit. Left to right in one more way: a base of `train.py --one_by_one 1`, decoded in blocks of one.

    python -m beyond.opponents stage_a --alpha 0.5 --out_dir out/one-stage   # alpha in Stage A alone (arXiv 2609.38066)
    python -m beyond.opponents soft --alpha 0.5 --out_dir out/soft           # Stage B that is trained with soft drafts
    python -m beyond.opponents tilt --data pairs --init_from out/pairs --alpha 1    # alpha, pushed off flat marginals

Other flags are train.py's.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import train
from beyond.head import prefix
from cache import Cached
from corrupt import M, three_term_loss
from lib.util import command, fail, first_masked, generator, uniform
from model import Model
from sample import Decoding, Step, candidates, select_bundle
from train import Batch, Losses, batch_context, bundle_of, cocommit_step, corrupt_batch, of_stage

# R rows, T positions, B positions of a block, C channels, V vocabulary, P marked positions


# --- what the steps share
def stage_a(engine: Cached, z: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A full forward of z (R, B): prefix states and final states (R, B, C), the best tokens, their probabilities."""
    h, states = engine.stage_a(z)
    token, conf = candidates(engine.model.logits(states), u[:, 0], d)
    return h, states, token, conf


def stage_b(engine: Cached, h: Tensor, marked: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor]:
    """K partial forwards: the best tokens, and their probabilities."""
    return candidates(engine.model.logits(engine.stage_b(h, marked)), u[:, 1], d)


def written(z: Tensor, bundle: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], n_rounds: int) -> Step:
    """The step that fills the bundle by b; a and b are tokens and probabilities, of Stage A and of what looked last."""
    looked = bundle.any(-1).float()  # where there is no mask left there is nothing to look at
    after = torch.where(bundle, b[0], z)
    return Step(z, after, bundle, torch.zeros_like(bundle), *b, *a, n_rounds * looked)


def places(z: Tensor) -> Tensor:
    """0 .. B-1 of (R, B), as a key: from the left."""
    return torch.arange(z.shape[1], device=z.device).float().expand(z.shape)


# --- other bundles, written by Stage A
def first_left(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """The leftmost mask."""
    _, _, *a = stage_a(engine, z, u, d)
    bundle = first_masked(places(z), z == engine.model.cfg.mask_id, 1)
    return written(z, bundle, a, a, 0)


def at_random(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding, rng: torch.Generator) -> Step:
    """As many masks as tau_m2t would take, drawn uniformly."""
    _, _, token, conf = stage_a(engine, z, u, d)
    masked = z == engine.model.cfg.mask_id
    size = select_bundle(conf, masked, d.tau_m2t, d.num_to_transfer).sum(-1, keepdim=True)
    bundle = first_masked(drawn(z, rng), masked, size)
    return written(z, bundle, (token, conf), (token, conf), 0)


def end_last(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """The threshold's bundle, but an end behind a mask that wants a word counts as unsure."""
    _, _, token, conf = stage_a(engine, z, u, d)
    masked = z == engine.model.cfg.mask_id
    ends = token == engine.model.cfg.eos_id
    words = masked & ~ends
    word_before = words.cumsum(-1) > 0
    sure = conf.masked_fill(ends & word_before, -1.0)  # not above any threshold
    bundle = select_bundle(sure, masked, d.tau_m2t, d.num_to_transfer)
    return written(z, bundle, (token, conf), (token, conf), 0)


def drawn(z: Tensor, rng: torch.Generator) -> Tensor:
    """(R, B) in [0, 1), as a key: in random order."""
    return torch.rand(z.shape, generator=rng).to(z.device)


# --- Stage B that refuses
def refusing(
    engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding, keep: float, order: str = "surest"
) -> Step:
    """Of the bundle what Stage B, in this order ("surest" or "left"), finds above `keep` together; where that is
    nothing, the one mask that Stage A has first in this order."""
    h, _, token_a, conf_a = stage_a(engine, z, u, d)
    masked = z == engine.model.cfg.mask_id
    bundle = select_bundle(conf_a, masked, d.tau_m2t, d.num_to_transfer)
    token_b, conf_b = stage_b(engine, h, bundle, u, d)

    from_left = order == "left"
    kept = prefix(conf_b, bundle, keep, places(z) if from_left else -conf_b)
    one = first_masked(places(z) if from_left else -conf_a, masked, 1)
    alone = ~kept.any(-1, keepdim=True)
    token = torch.where(alone, token_a, token_b)
    conf = torch.where(alone, conf_a, conf_b)
    return written(z, torch.where(alone, one, kept), (token_a, conf_a), (token, conf), d.n_rounds)


# --- Stage B with the marker elsewhere
def marking(
    engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding, mark: Callable, rng: torch.Generator
) -> Step:
    """The threshold's bundle is written by Stage B, which has its marker on `mark` (R, B) bool."""
    h, _, token_a, conf_a = stage_a(engine, z, u, d)
    masked = z == engine.model.cfg.mask_id
    bundle = select_bundle(conf_a, masked, d.tau_m2t, d.num_to_transfer)
    b = stage_b(engine, h, mark(bundle, masked, rng), u, d)
    return written(z, bundle, (token_a, conf_a), b, d.n_rounds)


def bundle_itself(bundle: Tensor, masked: Tensor, rng: torch.Generator) -> Tensor:
    """As in the paper."""
    return bundle


def nothing(bundle: Tensor, masked: Tensor, rng: torch.Generator) -> Tensor:
    """No marker; LoRA of Stage B acts."""
    return torch.zeros_like(bundle)


def half(bundle: Tensor, masked: Tensor, rng: torch.Generator) -> Tensor:
    """Half of the bundle at random, of one token that one."""
    return first_masked(drawn(bundle, rng), bundle, (bundle.sum(-1, keepdim=True) + 1) // 2)


def elsewhere(bundle: Tensor, masked: Tensor, rng: torch.Generator) -> Tensor:
    """As many positions: other masks at random, then visible ones, and the bundle itself when there is no more."""
    rank = torch.where(masked, 0, 1) + 2 * bundle
    everywhere = torch.ones_like(bundle)
    return first_masked(rank + drawn(bundle, rng), everywhere, bundle.sum(-1, keepdim=True))


# --- soft drafts
def with_drafts(model: Model, h: Tensor, states: Tensor, marked: Tensor) -> Tensor:
    """Prefix states h (R, T, C), plus Stage A's expected embedding at the marked positions (R, T) bool.

    states (R, T, C): Stage A's final ones. A clean copy behind the rows is never marked.
    """
    marked = F.pad(marked, (0, h.shape[1] - marked.shape[1]))
    p = model.logits(states[marked]).softmax(-1).detach()  # (P, V)
    drafts = p @ model.wte.weight.float()
    return h.index_put(marked.nonzero(as_tuple=True), h[marked] + drafts.to(h.dtype))


def soft_drafts(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """The threshold's bundle, written by Stage B with soft drafts. (An engine with a cache: the other one keeps its
    own prefix states.)"""
    h, states, token_a, conf_a = stage_a(engine, z, u, d)
    masked = z == engine.model.cfg.mask_id
    bundle = select_bundle(conf_a, masked, d.tau_m2t, d.num_to_transfer)
    b = stage_b(engine, with_drafts(engine.model, h, states, bundle), bundle, u, d)
    return written(z, bundle, (token_a, conf_a), b, d.n_rounds)


# --- other ways to train
def soft_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """train.cocommit_step with soft drafts."""
    z, kind = corrupt_batch(model, batch, args)
    masked = kind == M
    marked = bundle_of(model, batch, masked, args)

    ctx = batch_context(model, batch, args)
    h = model.prefix(z, ctx)
    stage_a = model.last_n(h, ctx)
    stage_b = model.coordinate(with_drafts(model, h, stage_a, marked), marked, ctx, model.cfg.n_rounds)

    loss_a, terms_a = three_term_loss(model, stage_a, batch.clean, kind, fill=masked)
    loss_b, terms_b = three_term_loss(model, stage_b, batch.clean, kind, fill=marked, alpha=args.alpha)
    return loss_a + loss_b, of_stage("A", terms_a) | of_stage("B", terms_b)


def stage_a_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """Stage A alone, by alpha: all masks of a block are its bundle. LoRA is in every layer."""
    z, kind = corrupt_batch(model, batch, args)
    ctx = batch_context(model, batch, args)
    stage_a = model.last_n(model.prefix(z, ctx), ctx)
    loss, terms = three_term_loss(model, stage_a, batch.clean, kind, fill=kind == M, alpha=args.alpha)
    return loss, of_stage("A", terms)


TILT = 0.5


def tilted(model: Model, batch: Batch, masked: Tensor, args: Namespace) -> Tensor:
    """All masks of some blocks: a block is kept with probability exp(-TILT * the sum of a cost in [0, 1) over its
    masks), which is a fixed random function of place and token. So flat marginals are flat no more."""
    B = model.cfg.block_length
    cost = torch.rand(B, model.cfg.vocab_size, generator=generator("tilt"))  # (B, V)
    R, T = masked.shape
    of_token = cost[torch.arange(T) % B, batch.clean.cpu()] * masked.cpu()  # (R, T)
    of_block = of_token.view(R, -1, B).sum(-1)
    kept = uniform(batch.draws, T // B) < (-TILT * of_block).exp()
    return masked & kept.repeat_interleave(B, dim=1).to(masked.device)


WAYS = {
    "tilt": (partial(cocommit_step, bundle=tilted), dict(out_dir="out/tilt")),
    "stage_a": (stage_a_step, dict(lora_in="both", out_dir="out/one-stage")),
    "soft": (soft_step, dict(out_dir="out/soft")),
}


@command
def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in WAYS:
        fail(f"python -m beyond.opponents WAY, one of {', '.join(WAYS)}; each has --help")
    way = sys.argv.pop(1)
    step, own = WAYS[way]
    args = train.read_arguments(train.build_parser(__doc__), f"-m beyond.opponents {way}", **own)
    if args.init_from == "scratch":
        fail("all ways train adapters: give a trained base by --init_from DIR")
    corpus = train.load_corpus(args)
    model = train.start(args, corpus)
    model.adapter["way"] = way  # evidence.py decodes it as it was trained
    train.loop(model, corpus, step, train.make_optimizer(model, args), args)


if __name__ == "__main__":
    main()
