"""What the model is shown in training, which masks are Stage B's bundle, and the loss of every position.

A row x of clean text becomes z, which the model reads. Its positions are of three kinds (paper, Sec. 3.1):

    M  masked    z = [M]              weight lambda_m2t    the model fills it
    W  wrong     z != x, not [M]      weight lambda_edit   the model corrects it
    G  right     z == x               weight lambda_clean  the model leaves it

m2t means "mask to token", and t2t means "token to token", which is an edit.

What is corrupted and what is not:

    prompt (if rows have one)         is not corrupted, and has no loss (but base.py's --one_by_one fills it, too)
    padding                           is never corrupted, has no loss, and no other position attends to it
    eos that ends a document          is masked, drafted (see below) and predicted like any other token
    [M] and other special tokens      are never drawn as random tokens; a draft is never [M]

Each block draws its own mask ratio. The rules for wrong tokens (--corruption):

    mask      there are only masks, and no wrong tokens
    random    random ordinary tokens replace some visible ones, as in LLaDA2.1's training
    draft     as random, but with the model's own tokens (the default): the same places are masked in a pass without
              gradient, and Stage A's likeliest tokens then stand there. A wrong one is W, a right one is G. (Paper,
              Sec. 4.1: the model's errors "rather than" random tokens, by Yao, arXiv 2606.17175, which fills masks by
              such a pass.)

Each row has its own random numbers, so a row's corruption does not depend on the rows beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from lib.util import smallest_masks, uniform
from model import Model

# R rows, T positions (a multiple of B), B block_length, C channels, P chosen positions

# kinds of positions
NONE = 0  # prompt and padding: no loss
M = 1
W = 2
G = 3

# lambda_m2t, lambda_edit and lambda_clean of the paper
LAMBDA_M2T = 1.0
LAMBDA_EDIT = 0.3
LAMBDA_CLEAN = 0.2

# neither the paper nor LLaDA2.1 publishes this rate
REPLACE_RATE = 0.2  # a block draws a rate from U(0, 0.2), and that share of its visible tokens is replaced

# one generator for each row: all random numbers of the row come from it
Draws = list[torch.Generator]

# a function that gives Stage A's tokens at some masks: z (R, T), where (R, T) bool -> (P,) int64
Draft = Callable[[Tensor, Tensor], Tensor]


# --- what the model is shown
@dataclass(frozen=True)
class Corruption:
    """How rows are corrupted, and what that takes."""

    name: str  # one of CORRUPTIONS
    block_length: int
    mask_id: int
    plain: Tensor  # int64: the ordinary ids, from which random tokens are drawn
    draws: Draws  # each row's generator
    draft: Draft | None = None
    mask_power: float = 1.0  # a block's mask ratio is U(0, 1) to this power; a power below 1 makes more masks


def corrupt(x: Tensor, corruptible: Tensor, how: Corruption) -> tuple[Tensor, Tensor]:
    """x (R, T) int64: clean rows; corruptible (R, T) bool: the positions that are neither prompt nor padding.

    -> z (R, T) int64 and kind (R, T) uint8: M, W or G at every corruptible position, NONE at the others.
    """
    T = x.shape[1]

    # each block draws a mask ratio, then each of its positions is masked with that probability
    ratio = of_blocks(how.draws, T, how.block_length) ** how.mask_power
    masked = uniform(how.draws, T) < ratio
    masked = corruptible & masked.to(x.device)
    z = x.masked_fill(masked, how.mask_id)

    # then some tokens become wrong
    z = CORRUPTIONS[how.name](z, masked, corruptible & ~masked, how)
    return z, kinds(x, z, corruptible, how.mask_id)


# a rule makes tokens wrong: z (R, T) int64; masked and visible (R, T) bool, the corruptible positions -> z
def masks_alone(z: Tensor, masked: Tensor, visible: Tensor, how: Corruption) -> Tensor:
    return z


def random_tokens(z: Tensor, masked: Tensor, visible: Tensor, how: Corruption) -> Tensor:
    """Replace some visible tokens by random ones. A random token may happen to be the right one."""
    replaced = to_replace(visible, how)
    place = (uniform(how.draws, z.shape[1]) * len(how.plain)).long()
    return torch.where(replaced, how.plain[place].to(z.device), z)


def own_drafts(z: Tensor, masked: Tensor, visible: Tensor, how: Corruption) -> Tensor:
    """Replace them by what Stage A writes there if they are masked, too."""
    replaced = to_replace(visible, how)
    drafts = how.draft(z.masked_fill(replaced, how.mask_id), replaced)
    return z.masked_scatter(replaced, drafts)


CORRUPTIONS = {"mask": masks_alone, "random": random_tokens, "draft": own_drafts}


def to_replace(visible: Tensor, how: Corruption) -> Tensor:
    """Draw which of the visible tokens are replaced: (R, T) bool."""
    T = visible.shape[1]
    rate = REPLACE_RATE * of_blocks(how.draws, T, how.block_length)
    return visible & (uniform(how.draws, T) < rate).to(visible.device)


def of_blocks(draws: Draws, T: int, block_length: int) -> Tensor:
    """Random numbers (R, T) in [0, 1): all positions of a block get the same one."""
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
    """Draw the bundle of each row (paper, Sec. 4.1 i): a size s ~ Uniform{s_min..s_max}, then s of the row's masks,
    uniformly, whatever blocks they are in. If a row has fewer masks, its bundle is all of them.

    masked (R, T) bool -> (R, T) bool. It depends on where z has masks, and on chance, not on x.
    """
    R, T = masked.shape
    size = s_min + (uniform(draws, 1) * (s_max - s_min + 1)).long()  # (R, 1)

    # every position draws a number, and the masks with the smallest numbers are taken
    lot = uniform(draws, T)
    return smallest_masks(lot.to(masked.device), masked, size.to(masked.device))


# --- the loss
def three_term_loss(model: Model, h: Tensor, target: Tensor, kind: Tensor, fill: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 1: the weighted sum of cross-entropies, in nats. Nothing is shifted: a position predicts its own token.
    Unlike LLaDA's own loss, no term is divided by the mask ratio.

    h (R, T, C): a stage's states. target (R, T) int64. kind (R, T) uint8. fill (R, T) bool: the masks with a fill loss,
    which are all of M in Stage A, and the bundle in Stage B.

    -> a scalar, and (R, T) float32: the cross-entropy at every position with a loss, without gradient.
    """
    filled = fill & (kind == M)
    wrong = kind == W
    right = kind == G

    # make logits only where there is a loss
    chosen = filled | wrong | right
    ce = torch.zeros(kind.shape, device=h.device)
    ce[chosen] = cross_entropy(model, h[chosen], target[chosen])

    # the three terms; add one of your own here (if it needs logits: in `part` of cross_entropy, below)
    loss = LAMBDA_M2T * (ce * filled).sum()
    loss = loss + LAMBDA_EDIT * (ce * wrong).sum()
    loss = loss + LAMBDA_CLEAN * (ce * right).sum()
    return loss, ce.detach()


def kinds_apart(ce_a: Tensor, ce_b: Tensor | None, kind: Tensor, bundle: Tensor | None = None) -> dict[str, Tensor]:
    """For the log: the cross-entropies of Stage A at masks and of Stage B at its bundle, of both at wrong and at right
    tokens, and that of Stage A at Stage B's bundle.

    ce_a, ce_b, kind, bundle (R, T); without a Stage B, ce_b and bundle are None -> under each name (2,) float32: the
    sum in nats, and the number of positions.
    """
    places = {"m2t_A": (ce_a, kind == M), "edit_A": (ce_a, kind == W), "clean_A": (ce_a, kind == G)}
    if ce_b is not None:
        places |= {"m2t_A_bundle": (ce_a, bundle), "m2t_B": (ce_b, bundle)}
        places |= {"edit_B": (ce_b, kind == W), "clean_B": (ce_b, kind == G)}
    return {name: torch.stack([(ce * where).sum(), where.sum()]) for name, (ce, where) in places.items()}


@torch.no_grad()
def sizes(markers: Tensor, h: Tensor) -> dict[str, Tensor]:
    """For the log: the root mean squares of markers (K, C), and of the states h (P, C) to which they are added: as in
    kinds_apart, a sum over P, and P."""
    rms = {"marker": markers.double().square().mean().sqrt().expand(len(h))}
    rms["states"] = h.double().square().mean(-1).sqrt()
    return {name: torch.stack([size.sum(), torch.ones_like(size).sum()]).float() for name, size in rms.items()}


def cross_entropy(model: Model, h: Tensor, target: Tensor) -> Tensor:
    """h (P, C), target (P,) int64 -> (P,) float32 in nats."""

    def part(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(h), target, reduction="none")

    # make 64 MB of logits at a time, and make them again in the backward: for 8 rows of 2,048 tokens, and a
    # vocabulary of 157,184, the logits of both stages would take 20 GB
    size = max(64, 2**24 // model.cfg.vocab_size)
    if len(h) <= size:
        return part(h, target)
    parts = zip(h.split(size), target.split(size), strict=True)
    return torch.cat([recompute(part, a, b, use_reentrant=False) for a, b in parts])
