"""Which masks does a step write? Rules that need no training, to compare a trained look with.

Stage A gives every mask a distribution. A rule reads these distributions and picks the bundle, at least one mask, so
that a block always ends. Each has a dial that trades forwards for quality: Decoding(select=partial(product, dial=0.3))

    dial            its range          one token a step at    all at once at
    threshold       probability        1                      0
    margin          probability        1                      -1
    product         probability        1                      0
    entropy_bound   nats               below 0                infinity
    factor          a number           0                      infinity
    fixed           tokens a step      1                      the block's length
    longest_prefix  probability        1, left to right       0

One looks again, as a head does, with the paper's Stage B: Decoding(tau_m2t=-1.0, tau_keep=0.5, look=refusing)
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cache import Cached
from sample import Look, StageA, select_bundle, stage_b_look

# R rows, B positions of a block, V vocabulary


# --- rules: probabilities (R, B, V), masked (R, B) bool and the dial -> the bundle (R, B) bool
def surest(sureness: Tensor, masked: Tensor, passes: Callable[[Tensor], Tensor]) -> Tensor:
    """The surest masks up to the first that does not pass, at least one, of equals the leftmost: (R, B) bool.

    passes: sureness (R, B), in falling order -> bool.
    """
    order = sureness.masked_fill(~masked, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    passing = passes(sureness.gather(1, order))
    count = passing.long().cumprod(-1).sum(-1, keepdim=True)
    count = count.clamp(min=1).minimum(masked.sum(-1, keepdim=True))
    return torch.zeros_like(masked).scatter(1, order, places(masked) < count)


def places(z: Tensor) -> Tensor:
    """0 .. B - 1 of (R, B)."""
    return torch.arange(z.shape[1], device=z.device)


def threshold(p: Tensor, masked: Tensor, dial: float) -> Tensor:
    """p1 > dial: the released decoder of LLaDA2, and Fast-dLLM's simpler rule (arXiv 2505.22618)."""
    return select_bundle(p.amax(-1), masked, dial, 1, "surest")


def margin(p: Tensor, masked: Tensor, dial: float) -> Tensor:
    """p1 - p2 > dial: the best token against the second best (Kim and others, arXiv 2502.06768)."""
    best = p.topk(2, dim=-1).values
    return select_bundle(best[..., 0] - best[..., 1], masked, dial, 1, "surest")


def product(p: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The surest masks, as long as the product of their probabilities stays above the dial: that all of them are
    right, if they were independent."""
    return surest(p.amax(-1), masked, lambda sure: sure.cumprod(-1) > dial)


def entropy_bound(p: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The masks of lowest entropy H, as long as sum H - max H <= dial. This bounds the total correlation of what is
    written together (EB-Sampler, arXiv 2505.24857; the default decoder of DiffusionGemma, with 0.1)."""
    # rising, so the last one is the largest
    return surest(-torch.special.entr(p).sum(-1), masked, lambda sure: sure - sure.cumsum(-1) <= dial)


def factor(p: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The n surest masks, as long as (n + 1) (1 - c_n) < dial, where c_n is the least probability among them
    (Fast-dLLM's factor, arXiv 2505.22618)."""
    n = places(masked) + 1
    return surest(p.amax(-1), masked, lambda sure: (n + 1) * (1 - sure) < dial)


def fixed(p: Tensor, masked: Tensor, dial: int) -> Tensor:
    """The `dial` surest masks, whatever they are (LLaDA, arXiv 2502.09992)."""
    return surest(p.amax(-1), masked, lambda sure: places(sure) < dial)


def longest_prefix(p: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The leftmost masks, as long as the product of their probabilities stays above the dial (SDLM's longest prefix
    decoding, arXiv 2509.24007). At 1 this is left to right, one token a step."""
    return select_bundle(p.amax(-1), masked, dial, 1, "leftmost")


# --- dials: for blocks of 8 tokens, from one token a step to all at once
DIALS = {
    threshold: (0.98, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0),
    margin: (0.98, 0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02, 0.0, -1.0),
    product: (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 1e-4, 0.0),
    entropy_bound: (-1.0, 0.01, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 99.0),
    factor: (0.1, 0.2, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 9.0),
    fixed: (1, 2, 3, 4, 5, 6, 8),
    longest_prefix: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.005, 0.001, 0.0),
}

# what blocks of up to 16 tokens need beside them: a step may write more, and less sure, tokens
MORE_DIALS = {
    product: (1e-5, 1e-6, 1e-8),
    entropy_bound: (12.0, 16.0, 24.0),
    factor: (6.0, 7.0, 12.0, 17.0),
    fixed: (10, 12, 16),
    longest_prefix: (1e-4, 1e-5, 1e-6),
}


# --- a look that refuses
def refusing(engine: Cached, a: StageA, bundle: Tensor) -> Look:
    """Stage B that refuses as a head does: it writes the longest prefix of the bundle whose product of its
    probabilities is above tau_keep; where that is nothing, Stage A's first token.
    """
    b = stage_b_look(engine, a, bundle)
    written = select_bundle(b.conf, bundle, a.d.tau_keep, 1, "leftmost")
    alone = written & (b.conf <= a.d.tau_keep)
    return replace(b, token=torch.where(alone, a.token, b.token), written=written)
