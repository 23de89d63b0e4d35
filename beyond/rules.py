"""Which masks does a step fill? Rules that need no training, one function each, to compare a trained head with.

Stage A gives every masked position a distribution. A rule reads these distributions and picks the bundle. Each has one
dial, which trades forwards for quality. All of them fill at least one mask, so that a block always ends.

    dial            its range          one token a step at    all at once at
    threshold       probability        1                      0
    margin          probability        1                      -1
    product         probability        1                      0
    entropy_bound   nats               below 0                infinity
    factor          a number           0                      infinity
    fixed           tokens a step      1                      the block's length
    longest_prefix  probability        1, left to right       0
    klass           probability        1                      never: it waits for two forwards that agree

Some rules judge what was written or drafted, because a token that looked right alone may look wrong beside the others:

    t2m             a visible token that has become improbable is a mask again
    wino            the same, but a token is judged without being seen itself
    verified        the drafts that a left-to-right reading of the same model would have written, up to the first other

The first seven rules need one pass's logits alone, and step_of makes a decoding step of each. The others need more than
that: rule_steps.py has their steps.

    python -m pytest tests/beyond/test_rules.py     # each rule on distributions of four tokens
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cache import Cached
from sample import Decoding, select_bundle

# R rows, B positions of a block, V vocabulary


# --- what rules are made of
def confidence(logits: Tensor) -> Tensor:
    """The probability of each position's best token: (R, B, V) -> (R, B) float32."""
    return logits.float().softmax(-1).amax(-1)


def entropy(logits: Tensor) -> Tensor:
    """Of each position's distribution, in nats: (R, B, V) -> (R, B) float32."""
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)  # a token at probability 0 adds nothing


def surest_first(sureness: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Positions from the surest mask to the least sure, (R, B) int64, visible positions last; and how many masks each
    row has, (R, 1) int64. Of equals the leftmost comes first."""
    order = sureness.masked_fill(~masked, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    return order, masked.sum(-1, keepdim=True)


def first_few(order: Tensor, count: Tensor, masks: Tensor) -> Tensor:
    """The first `count` (R, 1) positions of an order, at least one and at most all masks: (R, B) bool."""
    count = count.clamp(min=1).minimum(masks)
    rank = torch.arange(order.shape[1], device=order.device)
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order, rank < count)


def leading(passes: Tensor) -> Tensor:
    """How many entries pass before the first that does not: (R, B) bool -> (R, 1) int64."""
    return passes.long().cumprod(-1).sum(-1, keepdim=True)


# --- rules that pick: logits (R, B, V), masked (R, B) bool and the dial -> the bundle (R, B) bool
def threshold(logits: Tensor, masked: Tensor, dial: float) -> Tensor:
    """p1 > dial: the released decoder of LLaDA2, and Fast-dLLM's simpler rule (arXiv 2505.22618)."""
    return select_bundle(confidence(logits), masked, Decoding(tau_m2t=dial), "surest")


def margin(logits: Tensor, masked: Tensor, dial: float) -> Tensor:
    """p1 - p2 > dial: the best token against the second best (Kim and others, arXiv 2502.06768)."""
    best = logits.float().softmax(-1).topk(2, dim=-1).values
    return select_bundle(best[..., 0] - best[..., 1], masked, Decoding(tau_m2t=dial), "surest")


def product(logits: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The surest masks, as long as the product of their confidences stays above the dial: the probability that all of
    them are right, if they were independent."""
    sure = confidence(logits)
    order, masks = surest_first(sure, masked)
    together = sure.gather(1, order).cumprod(-1)
    return first_few(order, leading(together > dial), masks)


def entropy_bound(logits: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The masks of lowest entropy, as long as sum H - max H <= dial. This bounds the total correlation of what is
    written together (EB-Sampler, arXiv 2505.24857; the default decoder of DiffusionGemma, with 0.1)."""
    h = entropy(logits)
    order, masks = surest_first(-h, masked)
    h = h.gather(1, order)  # rising, so the last one is the largest
    return first_few(order, leading(h.cumsum(-1) - h <= dial), masks)


def factor(logits: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The n surest masks, as long as (n + 1) (1 - c_n) < dial, where c_n is the least confidence among them
    (Fast-dLLM's factor, arXiv 2505.22618)."""
    sure = confidence(logits)
    order, masks = surest_first(sure, masked)
    n = torch.arange(1, sure.shape[1] + 1, device=sure.device)
    return first_few(order, leading((n + 1) * (1 - sure.gather(1, order)) < dial), masks)


def fixed(logits: Tensor, masked: Tensor, dial: int) -> Tensor:
    """The `dial` surest masks, whatever they are (LLaDA, arXiv 2502.09992)."""
    order, masks = surest_first(confidence(logits), masked)
    return first_few(order, torch.full_like(masks, dial), masks)


def longest_prefix(logits: Tensor, masked: Tensor, dial: float) -> Tensor:
    """The leftmost masks, as long as the product of their confidences stays above the dial (SDLM's longest prefix
    decoding, arXiv 2509.24007). At 1 this is left to right, one token a step."""
    return select_bundle(confidence(logits), masked, Decoding(tau_m2t=dial), "leftmost")


RULES = {f.__name__: f for f in (threshold, margin, product, entropy_bound, factor, fixed, longest_prefix)}

# for blocks of 8 tokens, from one token a step to all at once
DIALS = {
    "threshold": (0.98, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0),
    "margin": (0.98, 0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02, 0.0, -1.0),
    "product": (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 1e-4, 0.0),
    "entropy_bound": (-1.0, 0.01, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 99.0),
    "factor": (0.1, 0.2, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 9.0),
    "fixed": (1, 2, 3, 4, 5, 6, 8),
    "longest_prefix": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.005, 0.001, 0.0),
}

# what blocks of up to 16 tokens need beside them: a step may write more, and less sure, tokens
MORE_DIALS = {
    "product": (1e-5, 1e-6, 1e-8),
    "entropy_bound": (12.0, 16.0, 24.0),
    "factor": (6.0, 7.0, 12.0, 17.0),
    "fixed": (10, 12, 16),
    "longest_prefix": (1e-4, 1e-5, 1e-6),
}


def step_of(rule: Callable, dial: float) -> Callable:
    """A greedy decoding step (as sample.step) whose bundle this rule picks; nothing visible is edited."""

    def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        _, logits = engine.stage_a(z)
        bundle = rule(logits, z == engine.cfg.mask_id, dial)
        return fill(z, logits, bundle)

    return step


def fill(z: Tensor, logits: Tensor, bundle: Tensor) -> dict[str, Tensor]:
    """What such a step returns: each position of the bundle (R, B) bool becomes its most probable token."""
    conf, token = logits.softmax(-1).max(-1)
    after = torch.where(bundle, token, z)
    edited = torch.zeros_like(bundle)
    return dict(before=z, after=after, bundle=bundle, edited=edited, conf=conf, token_a=token, conf_a=conf)


# --- a rule that remembers
def klass(
    logits: Tensor, masked: Tensor, dial: float, before: Tensor | None, calm: Tensor | None, kl_below: float = 0.01
) -> tuple[Tensor, Tensor, Tensor]:
    """KLASS (arXiv 2511.05664): every mask surer than the dial (0.9 there) whose distribution has moved by less than
    kl_below nats in each of the last two steps; the surest one where there is none.

    before (R, B, V): log-probabilities of the step before; calm (R, B) int64: how many steps in a row a position has
    been that calm. None in a block's first step. -> the bundle, and both for the next step."""
    log_p = logits.float().log_softmax(-1)
    if before is None:
        calm = torch.zeros_like(masked, dtype=torch.long)
    else:
        moved = (log_p.exp() * (log_p - before)).nan_to_num(0.0).sum(-1)
        calm = torch.where(moved < kl_below, calm + 1, 0)
    sure = confidence(logits)
    order, masks = surest_first(sure, masked)
    ready = masked & (sure > dial) & (calm >= 2)
    surest = first_few(order, torch.ones_like(masks), masks)
    return torch.where(ready.any(-1, keepdim=True), ready, surest), log_p, calm


# --- rules that take back: -> the visible positions that become masks again, (R, B) bool
def t2m(logits: Tensor, z: Tensor, written: Tensor, times: Tensor, dial: float = 0.1, most: int = 3) -> Tensor:
    """T2M (Yao, arXiv 2604.18738, by the author of CoCommit and on this backbone): a token is taken back where the
    model, reading it, gives it less than the dial, at most `most` times a position; of a row's written tokens at most a
    quarter a step, the least probable first, and at least one.

    z (R, B) int64; written (R, B) bool: visible, and no prompt; times (R, B) int64: how often each was taken back."""
    own = logits.float().softmax(-1).gather(-1, z[..., None])[..., 0]
    doubted = written & (own < dial) & (times < most)
    order, doubts = surest_first(-own, doubted)
    quarter = (written.sum(-1, keepdim=True) // 4).clamp(min=1)
    return first_few(order, quarter, doubts)


def wino(unseen: Tensor, z: Tensor, written: Tensor, n_new: Tensor, n_last: Tensor, dial: float = 0.9) -> Tensor:
    """WINO (arXiv 2507.18578): written tokens are read a second time, beside the block, by masks that see all of it but
    the token at their own position. What these masks give less than the dial is taken back, the least probable first,
    fewer tokens than the step before wrote; nothing where this step wrote only one.

    unseen (R, B, V): those masks' logits; n_new, n_last (R, 1) int64: tokens written by this step, and the last."""
    own = unseen.float().softmax(-1).gather(-1, z[..., None])[..., 0]
    doubted = written & (own < dial) & (n_new > 1)
    order, doubts = surest_first(-own, doubted)
    allowed = torch.minimum(doubts, n_last - 1)
    return first_few(order, allowed, doubts) & (allowed > 0)


def verified(causal: Tensor, draft: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """S2D2's verification (arXiv 2603.25702), greedy: the same model reads the drafts from left to right, in blocks of
    one. Drafts are kept up to the first that it would not have written; in its place stands what it would have written.

    causal (R, B, V): logits of position i after the drafts before it; draft (R, B) int64: z with every mask drafted.
    -> tokens (R, B) int64, and which masks are filled (R, B) bool: the leftmost run of masks alone is judged."""
    own = causal.argmax(-1)
    begun = masked.long().cumsum(-1) > 0
    run = begun & ~((begun & ~masked).long().cumsum(-1) > 0)  # the leftmost run of masks
    agrees = ~run | (own == draft)
    before = (~agrees).long().cumsum(-1) - (~agrees).long()  # disagreements further left
    filled = run & (before == 0)
    return torch.where(filled, own, draft), filled
