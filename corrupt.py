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

Each block draws its own mask ratio. Then wrong tokens are made in one of three ways:

    mask      masks alone; there is no W
    random    some visible tokens are replaced by a random ordinary one (base LLaDA2.1)
    draft     one Stage A pass without gradient fills some of the masks with its argmax: the wrong ones are W, the
              right ones join G, the rest stay M (the paper takes its W from the model's own errors, as Yao,
              arXiv 2606.17175)

To add a way of one's own, write a function like `random_tokens`, and give it a name in CORRUPTIONS.

Every draw takes generators, one a row, so a row's corruption does not depend on the rows beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from lib.util import smallest_masks, uniform
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

# the paper publishes no rate, and neither does LLaDA2.1
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
    plain: Tensor  # int64: ordinary ids, of which random tokens are drawn
    mask_power: float = 1.0  # a block's mask ratio is U(0, 1) to this power: below 1, many masks


def corrupt(
    x: Tensor, corruptible: Tensor, how: Corruption, draws: Draws, draft: Draft | None = None
) -> tuple[Tensor, Tensor]:
    """x (R, T) int64, clean; corruptible (R, T) bool: what may be corrupted, real positions outside the prompt.

    -> z (R, T) int64 and kind (R, T) uint8. M, W and G partition the corruptible positions, the rest is NONE.
    """
    R, T = x.shape

    # each block draws a mask ratio, then each of its positions is masked with that probability
    ratio = of_blocks(draws, T, how.block_length) ** how.mask_power
    masked = uniform(draws, T) < ratio
    masked = corruptible & masked.to(x.device)
    z = x.masked_fill(masked, how.mask_id)

    # then other tokens become wrong ones
    z = CORRUPTIONS[how.name](z, masked, corruptible, how, draws, draft)
    return z, kinds(x, z, corruptible, how.mask_id)


def masks_alone(z: Tensor, masked: Tensor, corruptible: Tensor, how: Corruption, draws: Draws, draft: Draft) -> Tensor:
    return z


def random_tokens(
    z: Tensor, masked: Tensor, corruptible: Tensor, how: Corruption, draws: Draws, draft: Draft
) -> Tensor:
    """Some of what is visible becomes a random token, which may happen to be the right one."""
    T = z.shape[1]
    rate = REPLACE_RATE * of_blocks(draws, T, how.block_length)
    replaced = uniform(draws, T) < rate
    replaced = corruptible & ~masked & replaced.to(z.device)
    place = (uniform(draws, T) * len(how.plain)).long()
    return torch.where(replaced, how.plain[place].to(z.device), z)


def own_drafts(z: Tensor, masked: Tensor, corruptible: Tensor, how: Corruption, draws: Draws, draft: Draft) -> Tensor:
    """Some of the masks are filled with the model's own guess."""
    drafted = uniform(draws, z.shape[1]) < DRAFT_RATE
    drafted = masked & drafted.to(z.device)
    return z.masked_scatter(drafted, draft(z, drafted))


CORRUPTIONS = {"mask": masks_alone, "random": random_tokens, "draft": own_drafts}


def of_blocks(draws: Draws, T: int, block_length: int) -> Tensor:
    """(R, T) in [0, 1): a number a block, the same at all of its positions."""
    return uniform(draws, T // block_length).repeat_interleave(block_length, dim=1)


def kinds(x: Tensor, z: Tensor, corruptible: Tensor, mask_id: int) -> Tensor:
    """M, W or G for each corruptible position of z, NONE elsewhere: (R, T) uint8."""
    kind = torch.full_like(x, W, dtype=torch.uint8)
    kind[z == mask_id] = M
    kind[z == x] = G
    kind[~corruptible] = NONE
    return kind


# --- the bundle
def draw_bundle(masked: Tensor, s_min: int, s_max: int, draws: Draws) -> Tensor:
    """The bundle of each row (paper, Sec. 4.1 i): s ~ Uniform{s_min..s_max}, then s of the row's masks, uniformly,
    in whatever blocks they are. A row with fewer masks gives all of them.

    masked (R, T) bool -> (R, T) bool. It is a function of z and of chance alone, never of x.
    """
    R, T = masked.shape
    size = s_min + (uniform(draws, 1) * (s_max - s_min + 1)).long()  # (R, 1)

    # which ones: those that draw the smallest numbers
    lot = uniform(draws, T)
    return smallest_masks(lot.to(masked.device), masked, size.to(masked.device))


# --- the loss
def three_term_loss(
    model: Model, h: Tensor, target: Tensor, kind: Tensor, fill: Tensor, head: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Eq. 1: weighted cross-entropies to `target` at the same position (no shift), summed, in nats.

    h (R, T, C) final states, or (R, 2T, C) with a clean copy, which has no loss; target (R, T) int64; kind
    (R, T) uint8; fill (R, T) bool: the masks that carry the fill loss, all of M in Stage A and the bundle
    in Stage B; head: maps states to logits (left out: the model's own). Unlike an ELBO's, the terms are not weighted
    by 1/t.

    -> a scalar, and (R, T) float32: the cross-entropy of every position that carries a loss, without gradient.
    """
    h = h[:, : kind.shape[1]]
    filled = fill & (kind == M)
    edited = kind == W
    clean = kind == G

    # logits are made only where there is a loss
    chosen = filled | edited | clean
    ce = torch.zeros(kind.shape, device=h.device)
    ce[chosen] = cross_entropy(head or model.logits, h[chosen], target[chosen], model.cfg.vocab_size)

    # the three terms; one of your own is added here
    loss = LAMBDA_M2T * (ce * filled).sum()
    loss = loss + LAMBDA_EDIT * (ce * edited).sum()
    loss = loss + LAMBDA_CLEAN * (ce * clean).sum()
    return loss, ce.detach()


def kinds_apart(ce_a: Tensor, ce_b: Tensor | None, kind: Tensor, bundle: Tensor | None = None) -> dict[str, Tensor]:
    """For the log: each stage's cross-entropy on masks, wrong and right positions, and Stage A's on Stage B's bundle.

    ce_a, ce_b, kind, bundle (R, T); a step without a Stage B gives None -> by name (2,) float32: the sum in nats, and
    the number of positions.
    """
    places = {"m2t_A": (ce_a, kind == M), "edit_A": (ce_a, kind == W), "clean_A": (ce_a, kind == G)}
    if ce_b is not None:
        places |= {"m2t_A_bundle": (ce_a, bundle), "m2t_B": (ce_b, bundle)}
        places |= {"edit_B": (ce_b, kind == W), "clean_B": (ce_b, kind == G)}
    return {name: torch.stack([(ce * where).sum(), where.sum()]) for name, (ce, where) in places.items()}


def cross_entropy(head: Callable[[Tensor], Tensor], h: Tensor, target: Tensor, vocab_size: int) -> Tensor:
    """h (P, C), target (P,) int64 -> (P,) float32 in nats."""

    def part(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head(h), target, reduction="none")

    # 64 MB of logits at a time, which the backward makes again: those of 8 rows of 2,048 with 157,184
    # tokens in the vocabulary would take 20 GB in two stages
    size = max(64, 2**24 // vocab_size)
    if len(h) <= size:
        return part(h, target)
    parts = zip(h.split(size), target.split(size), strict=True)
    return torch.cat([recompute(part, a, b, use_reentrant=False) for a, b in parts])
