"""Which masks does a step write? Rules that need no training, to compare a trained look with.

Stage A gives every mask a distribution. A rule reads these distributions and picks the bundle, at least one mask, so
that a block always ends. Each has a dial, which trades forwards for quality: Decoding(select=rule("product", 0.3))

    dial            its range          one token a step at    all at once at
    threshold       probability        1                      0
    margin          probability        1                      -1
    product         probability        1                      0
    entropy_bound   nats               below 0                infinity
    factor          a number           0                      infinity
    fixed           tokens a step      1                      the block's length
    longest_prefix  probability        1, left to right       0

Two more look again at what was written or drafted. They stand where Stage B would:

    t2m     a written token that has become improbable is a mask again
            Decoding(select=rule("threshold", 0.7), look=t2m(), tau_t2t=1.0)
    s2d2    the same weights read the drafts from left to right, and keep those they agree with
            Decoding(tau_m2t=-1.0, look=s2d2)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from cache import Cached
from model import Context, rotary
from sample import Look, StageA, select_bundle, stage_b_look

# R rows, B positions of a block, V vocabulary, S context tokens of the longest row


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


RULES = {f.__name__: f for f in (threshold, margin, product, entropy_bound, factor, fixed, longest_prefix)}


def rule(name: str, dial: float) -> Callable[[Tensor, Tensor], Tensor]:
    """For Decoding(select=...)."""
    return partial(RULES[name], dial=dial)


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

T2M_DIALS = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the threshold that writes; s2d2 has no dial


# --- a look that takes back
def refusing(engine: Cached, a: StageA, bundle: Tensor) -> Look:
    """Stage B that refuses as a head does: it writes the longest prefix of the bundle whose product of its
    probabilities is above tau_keep; where that is nothing, Stage A's first token.
    """
    b = stage_b_look(engine, a, bundle)
    written = select_bundle(b.conf, bundle, a.d.tau_keep, 1, "leftmost")
    alone = written & (b.conf <= a.d.tau_keep)
    return replace(b, token=torch.where(alone, a.token, b.token), written=written)


def t2m(doubt: float = 0.1, most: int = 3) -> Callable[[Cached, StageA, Tensor], Look]:
    """T2M (Yao, arXiv 2604.18738, by the author of CoCommit and on this backbone): the same pass that picks the bundle
    says how probable the written tokens are, and `doubted` are masks again.

    It needs a Decoding with edits (tau_t2t 1, a gate that nothing passes): without them a block ends with its last
    mask, before the tokens that were written last are judged.
    """
    # of each decode, and there of each row's current block: how often each token was taken back
    of_decode: WeakKeyDictionary[Cached, dict[tuple[int, int], Tensor]] = WeakKeyDictionary()

    def look(engine: Cached, a: StageA, bundle: Tensor) -> Look:
        # a block is known by its row's number and by how many tokens come before it
        before = of_decode.get(engine, {})
        blocks = list(zip(engine.rows, engine.cache.lengths, strict=True))
        never = torch.zeros_like(a.z[0])
        times = torch.stack([before.get(block, never) for block in blocks])

        written = (a.z != engine.cfg.mask_id) & ~a.given
        taken = doubted(a.logits.softmax(-1), a.z, written, times, doubt, most)
        of_decode[engine] = dict(zip(blocks, times + taken, strict=True))

        token = a.token.masked_fill(taken, engine.cfg.mask_id)
        nothing = torch.zeros(len(bundle), device=bundle.device)
        return Look(token, a.conf, bundle | taken, nothing, nothing.long())

    return look


def doubted(p: Tensor, z: Tensor, written: Tensor, times: Tensor, doubt: float, most: int) -> Tensor:
    """The tokens to which the model, reading them, gives less than `doubt`, at most `most` times a position; of a
    row's written tokens at most a quarter a step, the least probable first, and at least one.

    p (R, B, V); z, times (R, B) int64: tokens, and how often each was taken back; written (R, B) bool.
    """
    own = p.gather(-1, z[..., None])[..., 0]
    improbable = written & (own < doubt) & (times < most)
    quarter = written.sum(-1, keepdim=True) // 4
    return surest(-own, improbable, lambda _: places(z) < quarter)


# --- a look that verifies
def s2d2(engine: Cached, a: StageA, bundle: Tensor) -> Look:
    """S2D2 (arXiv 2603.25702), greedy: all masks are drafted (tau_m2t -1), and the drafts read from left to right,
    always (the paper also decides when that is worth it). A single mask is written as it is drafted, without a second
    reading, which costs two blocks' forward."""
    several = bundle.sum(-1, keepdim=True) > 1
    draft = torch.where(bundle, a.token, a.z)
    token = draft
    written = bundle
    if several.any():
        causal = read_beside(engine, draft)
        verified_token, kept = verified(causal, draft, bundle)
        token = torch.where(several, verified_token, draft)
        written = torch.where(several, kept, bundle)
    looks = several[:, 0].long()
    two_blocks = 2 / engine.model.partial_cost  # in partial forwards
    return Look(token, a.conf, written, looks * two_blocks, looks)


def verified(causal: Tensor, draft: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts are kept up to the first that a left-to-right reading would not have written; in its place stands what it
    would have written.

    causal (R, B, V): logits of position i after the drafts before it; draft (R, B) int64: z with every mask drafted ->
    tokens (R, B) int64, and which masks are filled (R, B) bool: the leftmost run of masks alone is judged.
    """
    own = causal.argmax(-1)

    # the leftmost run of masks
    begun = masked.long().cumsum(-1) > 0
    interrupted = (begun & ~masked).long().cumsum(-1) > 0
    run = begun & ~interrupted

    # of it what has no disagreement further left
    differs = (run & (own != draft)).long()
    further_left = differs.cumsum(-1) - differs
    filled = run & (further_left == 0)
    return torch.where(filled, own, draft), filled


def read_beside(engine: Cached, z: Tensor) -> Tensor:
    """B masks beside the blocks z (R, B), at the same positions, each of which sees what is before it -> the masks'
    logits (R, B, V). The engine's keys are put back: the reading leaves no trace."""
    cache = engine.cache
    R, B = z.shape
    place = torch.arange(B, device=z.device).repeat(2)
    cos, sin = rotary(engine.cfg, cache.length[:, None] + place, cache.kv.dtype)

    # a shorter row has keys in use that are none of its own
    context = torch.arange(max(cache.lengths), device=z.device) < cache.length[:, None]  # (R, S)
    context = context[:, None, None].expand(-1, -1, 2 * B, -1)
    sees = causal_mask(B).to(z.device).expand(R, 1, -1, -1)
    ctx = Context(cos, sin, torch.cat([sees, context], dim=-1), cache)

    # the cache takes these for a pass over the next block and the current one
    keys = cache.kv[:, :, :, :, : 2 * B]
    as_they_were = keys.clone()
    both = F.pad(z, (0, B), value=engine.cfg.mask_id)
    h = engine.model.last_n(engine.model.prefix(both, ctx), ctx)
    keys.copy_(as_they_were)
    return engine.model.head(h[:, B:])


def causal_mask(B: int) -> Tensor:
    """(2B, 2B) bool: a block read in blocks of one. A mask sees the drafts before it, and itself.

    B = 2:      drafts     1 .   . .
                           1 1   . .
                masks      . .   1 .
                           1 .   . 1
    """
    itself = torch.eye(B, dtype=torch.bool)
    none = torch.zeros(B, B, dtype=torch.bool)
    place = torch.arange(B)
    before = place[:, None] > place
    drafts = torch.cat([before | itself, none], dim=1)
    masks = torch.cat([before, itself], dim=1)
    return torch.cat([drafts, masks])
