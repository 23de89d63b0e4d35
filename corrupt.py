"""Corruption: what the model is shown, the loss of every position, and the bundle that Stage B will mark.

A clean row x becomes z with three kinds of positions (paper, Sec. 3.1):
    M  masked          z = [M]                 weight lambda_m2t    fill it
    W  wrong-visible   z != x, not [M]         weight lambda_edit   correct it
    G  clean-visible   z == x                  weight lambda_clean  leave it

What is and is not corrupted:
    prompt (toys, conditional data)   never corrupted, no loss
    padding                           never corrupted, no loss, not attended to
    eos that ends a document          an ordinary token: masked, drafted and predicted like any other
    [M] and other special tokens      never drawn as a random substitute; [M] is never written by a draft

Corruptions (each block draws its own mask ratio from U(0, 1)):
    mask      masks alone; there is no W
    random    masks, and visible tokens replaced by a random ordinary token (base LLaDA2.1)
    draft     masks, then one no-gradient Stage A pass fills part of them with its argmax: wrong ones are W, right ones
              join G, the rest stay M (the paper, after Yao's self-generated errors)

Every draw takes generators, one a row: a row's corruption depends neither on the rows beside it nor on their number.
    python -m tools.gallery       # one text under each corruption, with the loss weight of every position
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from model import Model

# R rows, T positions (a multiple of B), B block_length, n selected positions, C channels, V vocabulary

NONE, M, W, G = 0, 1, 2, 3
LAMBDAS = (1.0, 0.3, 0.2)  # lambda_m2t, lambda_edit, lambda_clean of the paper
WRONG_RATE = {"mask": 0.0, "random": 0.1, "draft": 0.3}  # neither the paper nor LLaDA2.1 publishes one

Draws = list[torch.Generator]  # one a row, from which all of its random numbers come
Draft = Callable[[Tensor, Tensor], Tensor]  # (z (R, T), where (R, T) bool with n True) -> (n,) int64 predictions


def uniform(draws: Draws, n: int) -> Tensor:
    """(R, n) float32 in [0, 1), each row from its own generator."""
    return torch.stack([torch.rand(n, generator=g) for g in draws])


@dataclass(frozen=True)
class Corruption:
    kind: str  # mask | random | draft
    block_length: int
    mask_id: int
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    wrong_rate: float  # share of visible tokens replaced (random), or of masks that the draft fills (draft)

    def __call__(self, x: Tensor, free: Tensor, draws: Draws, draft: Draft) -> tuple[Tensor, Tensor]:
        """x (R, T) int64 clean; free (R, T) bool, the positions that may be corrupted (real and not prompt).
        -> z (R, T) int64 and kind (R, T) uint8. M, W and G partition the free positions; the rest is NONE."""
        R, T = x.shape
        ratio = uniform(draws, T // self.block_length).repeat_interleave(self.block_length, dim=1)  # (R, T)
        masked = free & (uniform(draws, T) < ratio).to(x.device)
        z = x.masked_fill(masked, self.mask_id)
        if self.kind == "random":
            replaced = free & ~masked & (uniform(draws, T) < self.wrong_rate).to(x.device)
            z = torch.where(replaced, (uniform(draws, T) * self.n_plain).long().to(x.device), z)
        elif self.kind == "draft":
            written = masked & (uniform(draws, T) < self.wrong_rate).to(x.device)
            z = z.masked_scatter(written, draft(z, written))
        kind = torch.where(z == x, G, torch.where(z == self.mask_id, M, W))
        return z, torch.where(free, kind, NONE).to(torch.uint8)


def draw_bundle(masked: Tensor, group: int, s_min: int, s_max: int, draws: Draws) -> Tensor:
    """The bundle that Stage B marks: in each run of `group` positions (a block, or the whole row), s ~
    Uniform{s_min..s_max} of the masked ones, uniformly; all of them where fewer than s are masked (paper, Sec. 4.1 i).

    masked (R, T) bool -> (R, T) bool. A function of z and of chance alone, never of x: results/theorem builds on that.
    """
    R, T = masked.shape
    size = s_min + (uniform(draws, T // group) * (s_max - s_min + 1)).long()  # (R, T / group)
    return first_masked(uniform(draws, T).to(masked.device), masked, size.to(masked.device), group)


def first_masked(key: Tensor, masked: Tensor, size: Tensor, group: int) -> Tensor:
    """In each group the `size` (R, T / group) masked positions with the smallest key (R, T) float, the leftmost of
    equals: (R, T) bool."""
    key = key.masked_fill(~masked, float("inf")).view(len(key), -1, group)  # unmasked positions sort last
    rank = key.argsort(dim=-1, stable=True).argsort(dim=-1)
    return masked & (rank < size[..., None]).view_as(masked)


def loss_weights(kind: Tensor, fill: Tensor) -> Tensor:
    """Eq. 1's weight of every position, (R, T) float32. fill (R, T) bool: the masked positions that carry the fill
    loss, all of M in Stage A and the bundle in Stage B.

    No 1/t weight stands here, as an ELBO of masked diffusion would have: the paper's loss is Eq. 1, a plain sum."""
    m2t, edit, clean = LAMBDAS
    return m2t * (fill & (kind == M)).float() + edit * (kind == W).float() + clean * (kind == G).float()


def three_term_loss(model: "Model", h: Tensor, target: Tensor, kind: Tensor, fill: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 1: weighted sum of cross-entropies to `target` at the same position (no shift), in nats.

    h (R, T, C) states before the head; target (R, T) int64; kind, fill as in `loss_weights` -> the sum, a scalar to be
    divided by the number of real tokens (one denominator keeps the three terms in Eq. 1's ratio), and terms (3, 2):
    unweighted sum of cross-entropy and number of positions for m2t, edit, clean.

    Logits are made only where there is a loss, and in chunks that the backward pass makes again: at 157,184 tokens of
    vocabulary the full logits of 8 x 2048 positions in two stages would be 20 GB.
    """
    weight = loss_weights(kind, fill)
    chosen = weight > 0
    h, target, kind, weight = h[chosen], target[chosen], kind[chosen], weight[chosen]  # (n, C), (n,), (n,), (n,)

    def cross_entropy(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.head(h), target, reduction="none")

    size = max(64, 2**24 // model.cfg.vocab_size)  # 64 MB of float32 logits a chunk
    again = partial(checkpoint, cross_entropy, use_reentrant=False) if len(h) > size else cross_entropy
    ce = torch.cat([again(*chunk) for chunk in zip(h.split(size), target.split(size), strict=True)])
    terms = torch.stack([torch.stack([ce.detach()[kind == k].sum(), (kind == k).sum()]) for k in (M, W, G)])
    return (weight * ce).sum(), terms
