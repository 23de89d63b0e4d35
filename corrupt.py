"""Corruption: what the model is shown, the bundle for Stage B, and the loss of every position.

A clean row x becomes z with three kinds of positions (paper, Sec. 3.1):

    M  masked          z = [M]                 weight lambda_m2t    fill it
    W  wrong-visible   z != x, not [M]         weight lambda_edit   correct it
    G  clean-visible   z == x                  weight lambda_clean  leave it

m2t is mask to token; t2t, of edits, token to token.

What is corrupted and what is not:

    prompt (toys, conditional data)   never corrupted, no loss
    padding                           never corrupted, no loss, not attended to
    eos that ends a document          masked, drafted and predicted like any other token
    [M] and other special tokens      never drawn as a random substitute; [M] is never written by a draft

Corruptions (each block draws its own mask ratio, U(0, 1) or a power of it):

    mask      masks alone; there is no W
    random    masks, and some visible tokens are replaced by a random ordinary one (base LLaDA2.1)
    draft     masks, then one Stage A pass without gradient fills some of them with its argmax: the wrong ones are W,
              the right ones join G, the rest stay M (the paper, which takes its W from the model's own errors)

Every draw takes generators, one a row, so a row's corruption does not depend on the rows beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from lib.util import first_masked, uniform
from model import Model

# R rows, T positions (a multiple of B), B block_length, C channels, V vocabulary, P positions that carry a loss

# kinds of positions
NONE = 0  # prompt and padding: no loss
M = 1
W = 2
G = 3

# lambda_m2t, lambda_edit and lambda_clean of the paper
LAMBDA_M2T = 1.0
LAMBDA_EDIT = 0.3
LAMBDA_CLEAN = 0.2

CORRUPTIONS = ("mask", "random", "draft")

# neither the paper nor LLaDA2.1 publishes a rate
REPLACE_RATE = 0.2  # random: a block replaces U(0, 1) times this share of its visible tokens
DRAFT_RATE = 0.3  # draft: the share of masks that the draft fills

# one generator a row, from which all of its random numbers come
Draws = list[torch.Generator]

# the model's own guesses for some masks: z (R, T), where (R, T) bool -> (P,) int64
Draft = Callable[[Tensor, Tensor], Tensor]


# --- what the model is shown
@dataclass(frozen=True)
class Corruption:
    name: str  # one of CORRUPTIONS
    block_length: int
    mask_id: int
    plain: Tensor  # int64 ids of ordinary tokens, of which random ones are drawn
    mask_power: float = 1.0  # a block's mask ratio is U(0, 1) to this power: below 1, many masks
    ends: float = 0.0  # the share of blocks that are masked from some place to their end, as writing leaves them


def corrupt(
    x: Tensor, free: Tensor, how: Corruption, draws: Draws, draft: Draft | None = None, as_asked: Tensor | bool = True
) -> tuple[Tensor, Tensor]:
    """x (R, T) int64, clean; free (R, T) bool, real positions outside the prompt; as_asked (R, 1) bool: False
    for rows whose masks are drawn by themselves, whatever how.ends says.

    -> z (R, T) int64 and kind (R, T) uint8. M, W and G partition the free positions, the rest is NONE.
    """
    R, T = x.shape

    # each block draws a mask ratio, then each of its positions is masked with that probability; of these
    # masks a draft fills DRAFT_RATE
    ratio = of_blocks(draws, T, how.block_length) ** how.mask_power
    masked = uniform(draws, T) < ratio
    if how.ends > 0:
        # in some blocks from a place on, any of its positions
        to_the_end = (of_blocks(draws, T, how.block_length) < how.ends) & as_asked
        first = (of_blocks(draws, T, how.block_length) * how.block_length).long()
        place = torch.arange(T) % how.block_length
        masked = torch.where(to_the_end, place >= first, masked)
    masked = free & masked.to(x.device)
    z = x.masked_fill(masked, how.mask_id)

    if how.name == "random":
        # some of what is visible becomes a random token, which may happen to be the right one
        rate = REPLACE_RATE * of_blocks(draws, T, how.block_length)
        replaced = uniform(draws, T) < rate
        replaced = free & ~masked & replaced.to(x.device)
        token = how.plain[(uniform(draws, T) * len(how.plain)).long()]
        z = torch.where(replaced, token.to(x.device), z)

    if how.name == "draft":
        # some of the masks are filled with the model's own guess
        drafted = uniform(draws, T) < DRAFT_RATE
        drafted = masked & drafted.to(x.device)
        z = z.masked_scatter(drafted, draft(z, drafted))

    return z, kinds(x, z, free, how.mask_id)


def of_blocks(draws: Draws, T: int, block_length: int) -> Tensor:
    """(R, T) in [0, 1): a number a block, the same at all of its positions."""
    return uniform(draws, T // block_length).repeat_interleave(block_length, dim=1)


def kinds(x: Tensor, z: Tensor, free: Tensor, mask_id: int) -> Tensor:
    """M, W or G for each free position of z, NONE elsewhere: (R, T) uint8."""
    kind = torch.full_like(x, W, dtype=torch.uint8)
    kind[z == mask_id] = M
    kind[z == x] = G
    kind[~free] = NONE
    return kind


# --- the bundle
def draw_bundle(masked: Tensor, block_length: int, s_min: int, s_max: int, draws: Draws) -> Tensor:
    """The bundle of a training row: of each block s ~ Uniform{s_min..s_max} masks, uniformly.

    masked (R, T) bool -> (R, T) bool. The paper (Sec. 4.1 i) draws s once for an example. A size for each block is
    ours: in decoding a bundle lies in one block. So of 64 blocks up to 64 times as many masks are marked. It is a
    function of z and of chance alone, never of x. So the bundle says nothing new about the text, and the sum of
    cross-entropies cannot teach a Stage B that sees no tokens how they depend on one another (results/theorem).
    """
    T = masked.shape[1]

    # how many, in each block
    size = s_min + (uniform(draws, T // block_length) * (s_max - s_min + 1)).long()  # (R, T / B)
    size = size.to(masked.device)

    # which ones: those that draw the smallest numbers
    key = uniform(draws, T).to(masked.device)
    of_block = (-1, block_length)
    bundle = first_masked(key.unflatten(1, of_block), masked.unflatten(1, of_block), size[..., None])
    return bundle.flatten(1)


# --- the loss
def three_term_loss(
    model: Model, h: Tensor, target: Tensor, kind: Tensor, fill: Tensor, alpha: float = 0.0,
    stage_a: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Eq. 1: weighted cross-entropies to `target` at the same position (no shift), summed, in nats.

    h (R, T, C) final states, or (R, 2T, C) with a clean copy, which has no loss; target (R, T) int64; kind
    (R, T) uint8; fill (R, T) bool: the masks that carry the fill loss, all of M in Stage A and the bundle
    in Stage B; alpha: of the fill loss, 0 is the paper's; stage_a: Stage A's final states, where h are of a Stage B
    that adds to its answer. There is no 1/t, as an ELBO would have.

    -> a scalar, and for m2t, edit and clean (2,) float32: the unweighted sum of cross-entropies and the
    number of positions.
    """
    h = h[:, : kind.shape[1]]
    terms = {"m2t": fill & (kind == M), "edit": kind == W, "clean": kind == G}

    # logits are made only where there is a loss
    chosen = terms["m2t"] | terms["edit"] | terms["clean"]
    ce = torch.zeros(kind.shape, device=h.device)
    beside = None if stage_a is None else stage_a[:, : kind.shape[1]][chosen]
    ce[chosen] = cross_entropy(model, h[chosen], target[chosen], beside)  # (R, T), 0 elsewhere

    # the three terms
    filled = ce * terms["m2t"]
    loss = LAMBDA_M2T * alpha_loss(filled.unflatten(1, (-1, model.cfg.block_length)).sum(-1), alpha)
    loss = loss + LAMBDA_EDIT * (ce * terms["edit"]).sum() + LAMBDA_CLEAN * (ce * terms["clean"]).sum()

    # and apart, for the log
    return loss, {name: torch.stack([(ce.detach() * at).sum(), at.sum()]) for name, at in terms.items()}


def alpha_loss(ce: Tensor, alpha: float) -> Tensor:
    """(1 - P^alpha) / alpha, summed over bundles; P is the probability of a whole bundle, a product.

    ce (...) float32: of each bundle -log P, the sum of its cross-entropies. At alpha 0, the limit, it is that
    sum, which is least where every token has its own probabilities. At alpha 1 it is 1 - P, in
    expectation least for one tuple, the likeliest. Between, it charges total correlation
    (results/theorem). Its gradient is cross-entropy's times P^alpha. AlphaDLM (arXiv 2609.38066) trains a plain
    one-stage denoiser by it.
    """
    if alpha == 0:
        return ce.sum()
    return (-torch.expm1(-alpha * ce) / alpha).sum()


def cross_entropy(model: Model, h: Tensor, target: Tensor, stage_a: Tensor | None = None) -> Tensor:
    """h (P, C), target (P,) int64 -> (P,) float32 in nats; stage_a (P, C): as in three_term_loss."""

    # all three terms and the log are made of this: a term of one's own is returned beside it
    def part(h: Tensor, target: Tensor, stage_a: Tensor | None) -> Tensor:
        logits = model.logits(h) if stage_a is None else model.logits_b(h, model.logits(stage_a))
        return F.cross_entropy(logits, target, reduction="none")

    # 64 MB of logits at a time, which the backward makes again: those of 8 rows of 2,048 with 157,184
    # tokens in the vocabulary would take 20 GB in two stages
    size = max(64, 2**24 // model.cfg.vocab_size)
    if len(h) <= size:
        return part(h, target, stage_a)
    beside = repeat(None) if stage_a is None else stage_a.split(size)
    parts = zip(h.split(size), target.split(size), beside, strict=False)
    return torch.cat([recompute(part, a, b, c, use_reentrant=False) for a, b, c in parts])
