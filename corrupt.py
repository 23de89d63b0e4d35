"""Corruption: what the model is shown, the bundle for Stage B, and the loss of every position.

A clean row x becomes z with three kinds of positions (paper, Sec. 3.1):

    M  masked          z = [M]                 weight lambda_m2t    fill it
    W  wrong-visible   z != x, not [M]         weight lambda_edit   correct it
    G  clean-visible   z == x                  weight lambda_clean  leave it

What is corrupted and what is not:

    prompt (toys, conditional data)   never corrupted, no loss
    padding                           never corrupted, no loss, not attended to
    eos that ends a document          an ordinary token: masked, drafted and predicted like any other
    [M] and other special tokens      never drawn as a random substitute; [M] is never written by a draft

Corruptions (each block draws its own mask ratio from U(0, 1)):

    mask      masks alone; there is no W
    random    masks, and some visible tokens are replaced by a random ordinary one (base LLaDA2.1)
    draft     masks, then one Stage A pass without gradient fills some of them with its argmax: the wrong ones are W,
              the right ones join G, the rest stay M (the paper, which takes its W from the model's own errors)

Every draw takes generators, one a row, so a row's corruption does not depend on the rows beside it.

    python -m tools.gallery       # one text under each corruption, with the loss weight of every position
"""

from collections.abc import Callable
from dataclasses import dataclass

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
REPLACE_RATE = 0.1  # random: the share of visible tokens that are replaced
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
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens


def corrupt(
    x: Tensor, free: Tensor, how: Corruption, draws: Draws, draft: Draft | None = None
) -> tuple[Tensor, Tensor]:
    """x (R, T) int64, clean; free (R, T) bool, real positions outside the prompt.

    -> z (R, T) int64 and kind (R, T) uint8. M, W and G partition the free positions, the rest is NONE.
    """
    R, T = x.shape

    # each block draws a mask ratio, then each of its positions is masked with that probability
    ratio = uniform(draws, T // how.block_length)
    ratio = ratio.repeat_interleave(how.block_length, dim=1)  # (R, T)
    masked = uniform(draws, T) < ratio
    masked = free & masked.to(x.device)
    z = x.masked_fill(masked, how.mask_id)

    if how.name == "random":
        # some of what is visible becomes a random token, which may happen to be the right one
        replaced = uniform(draws, T) < REPLACE_RATE
        replaced = free & ~masked & replaced.to(x.device)
        token = (uniform(draws, T) * how.n_plain).long()
        z = torch.where(replaced, token.to(x.device), z)

    if how.name == "draft":
        # some of the masks are filled with the model's own guess
        drafted = uniform(draws, T) < DRAFT_RATE
        drafted = masked & drafted.to(x.device)
        z = z.masked_scatter(drafted, draft(z, drafted))

    return z, kinds(x, z, free, how.mask_id)


def kinds(x: Tensor, z: Tensor, free: Tensor, mask_id: int) -> Tensor:
    """M, W or G for each free position of z, NONE elsewhere: (R, T) uint8."""
    kind = torch.full_like(x, W, dtype=torch.uint8)
    kind[z == mask_id] = M
    kind[z == x] = G
    kind[~free] = NONE
    return kind


# --- the bundle
def draw_bundle(masked: Tensor, block_length: int, s_min: int, s_max: int, draws: Draws) -> Tensor:
    """The bundle of a training row (paper, Sec. 4.1 i): of each block s ~ Uniform{s_min..s_max} masks, uniformly.

    masked (R, T) bool -> (R, T) bool. It is a function of z and of chance alone, never of x. So the
    bundle says nothing new about the text, and the clean tokens as a target cannot teach Stage B
    how they depend on one another (results/theorem).
    """
    n_blocks = masked.shape[1] // block_length

    # how many, in each block: the paper leaves it open, but in decoding a bundle lies in one block
    size = s_min + (uniform(draws, n_blocks) * (s_max - s_min + 1)).long()  # (R, n_blocks)

    # which ones: those that draw the smallest numbers
    key = uniform(draws, masked.shape[1])
    return first_masked(key.to(masked.device), masked, size.to(masked.device), block_length)


# --- the loss
def loss_weights(kind: Tensor, fill: Tensor) -> Tensor:
    """Eq. 1's weight of every position, (R, T) float32. fill (R, T) bool: the masks that carry the fill
    loss, all of M in Stage A and the bundle in Stage B. There is no 1/t, as an ELBO would have.
    """
    weight = torch.zeros(kind.shape, device=kind.device)
    weight[fill & (kind == M)] = LAMBDA_M2T
    weight[kind == W] = LAMBDA_EDIT
    weight[kind == G] = LAMBDA_CLEAN
    return weight


def three_term_loss(
    model: Model, h: Tensor, target: Tensor, kind: Tensor, fill: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 1: weighted cross-entropies to `target` at the same position (no shift), summed, in nats.

    h (R, T, C) states before the head, or (R, 2T, C) with a clean copy, which has no loss; target (R, T)
    int64; kind (R, T) uint8; fill (R, T) bool -> a scalar, and for m2t, edit and clean (2,) float32: the
    unweighted sum of cross-entropies and the number of positions.
    """
    h = h[:, : kind.shape[1]]

    # logits are made only where there is a loss
    weight = loss_weights(kind, fill)
    chosen = weight > 0
    weight = weight[chosen]  # (P,)
    kind = kind[chosen]
    ce = cross_entropy(model, h[chosen], target[chosen])  # (P,)

    # the three terms apart, for the log
    terms = {name: summed(ce[kind == k]) for name, k in (("m2t", M), ("edit", W), ("clean", G))}
    return (weight * ce).sum(), terms


def summed(ce: Tensor) -> Tensor:
    """(P,) cross-entropies -> (2,) float32, a term of the log: their sum and their number."""
    return torch.stack([ce.detach().sum(), ce.new_tensor(len(ce))])


def cross_entropy(model: Model, h: Tensor, target: Tensor) -> Tensor:
    """h (P, C), target (P,) int64 -> (P,) float32 in nats."""

    def part(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.head(h), target, reduction="none")

    # 64 MB of logits at a time, which the backward makes again: those of 8 rows of 2,048 with 157,184
    # tokens in the vocabulary would take 20 GB in two stages
    size = max(64, 2**24 // model.cfg.vocab_size)
    if len(h) <= size:
        return part(h, target)
    parts = zip(h.split(size), target.split(size), strict=True)
    return torch.cat([recompute(part, a, b, use_reentrant=False) for a, b in parts])
