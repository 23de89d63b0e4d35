"""Decoding steps of the rules that remember, take back, or read a second time. (rules.step_of makes the others' steps.)

    klass    remembers what the last passes said: it fills what is sure and has been calm
    t2m      fills by the threshold; a written token that has become improbable is a mask again
    wino     fills by the threshold; shadow masks beside the block judge what was written before, and take it back
    s2d2     drafts every mask; the same weights read the drafts from left to right, and keep those that they agree with

What a step remembers lies in its engine: of each row, and of its current block alone. Second readings are counted in
"looks" (R,), and costs.py has what one costs.

    python -m beyond.pays --system base out/base        # sweeps these rules and those of rules.py
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from beyond import rules
from cache import Cached
from model import Context, rotary
from sample import Decoding

# R rows in flight, B block_length, V vocabulary, S context tokens of the longest row

# from careful to bold, for blocks of 8 tokens; s2d2 has no dial
DIALS = {
    "klass": (0.9, 0.7, 0.5, 0.3, 0.2),
    "wino": (0.9, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    "t2m": (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1),
}


# --- whose block is it?
class Followed(Cached):
    """An engine that knows which rows of its decode are in flight, and what a step remembers of their blocks."""

    numbers: list[int]  # of the rows in flight, 0.. as the decode began
    memory: dict[tuple[int, int], tuple[Tensor, ...]]  # by block, see current_blocks

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.numbers = [self.numbers[r] for r in rows]

    def current_blocks(self) -> list[tuple[int, int]]:
        """What tells each row's block from all others: the row's number, and how many tokens come before the block."""
        return list(zip(self.numbers, self.cache.lengths, strict=True))

    def remember(self, *values: Tensor) -> None:
        """values (R, ...) each, for the next step on these blocks. What was remembered before is forgotten."""
        self.memory = dict(zip(self.current_blocks(), zip(*values, strict=True), strict=True))

    def recall(self, *first: Tensor) -> list[Tensor]:
        """What the last step remembered, (R, ...) each; a row whose block has just begun has its row of `first`."""
        of_rows = []
        for block, beginning in zip(self.current_blocks(), zip(*first, strict=True), strict=True):
            of_rows.append(self.memory.get(block, beginning))
        return [torch.stack(value) for value in zip(*of_rows, strict=True)]


def follow(engine: Cached, n_rows: int) -> None:
    """Called as a step begins: in a decode's first one all of its rows are in flight, and nothing is known."""
    if type(engine) is Cached:
        engine.__class__ = Followed
        engine.numbers = list(range(n_rows))
        engine.memory = {}


# --- a rule that remembers
def klass(dial: float) -> Callable:
    """A step of KLASS, see rules.klass: what is surer than the dial, and has been calm for two steps."""

    def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        follow(engine, len(z))
        _, logits = engine.stage_a(z)

        # what the step before saw. Where the block has just begun all was improbable: everything has moved
        nothing = torch.full_like(logits, -math.inf)
        before, calm = engine.recall(nothing, torch.zeros_like(z))

        masked = z == engine.cfg.mask_id
        bundle, log_p, calm = rules.klass(logits, masked, dial, before, calm)
        engine.remember(log_p, calm)
        return rules.fill(z, logits, bundle)

    return step


# --- rules that take back
def t2m(dial: float) -> Callable:
    """A step of T2M, see rules.t2m, over the threshold `dial`.

    It needs a Decoding with edits (by a gate that nothing passes), or a block would end with its last mask, before the
    tokens that were written last are judged."""

    def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        follow(engine, len(z))
        _, logits = engine.stage_a(z)
        masked = z == engine.cfg.mask_id
        bundle = rules.threshold(logits, masked, dial)

        # the same pass says how probable the written tokens are
        written = ~masked & ~prompt
        [times] = engine.recall(torch.zeros_like(z))
        taken = rules.t2m(logits, z, written, times)
        engine.remember(times + taken)
        return taken_back(rules.fill(z, logits, bundle), taken, engine.cfg.mask_id)

    return step


def wino(dial: float) -> Callable:
    """A step of WINO, see rules.wino, over the threshold `dial`, without the published code's cap on a step's tokens.

    There block and shadows are read in one pass. Here they take two, because decode's loop may have read the block
    already: no position of the block sees a shadow, so the logits are the same, and costs.py charges the one pass.
    A block without a written token needs no shadows."""

    def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        follow(engine, len(z))
        _, logits = engine.stage_a(z)
        masked = z == engine.cfg.mask_id
        bundle = rules.threshold(logits, masked, dial)

        # how many tokens this step writes, and how many the last one wrote (in a block's first step nothing is judged)
        n_new = bundle.sum(-1, keepdim=True)
        [n_last] = engine.recall(n_new)
        engine.remember(n_new)

        # the shadows judge what was written before
        written = ~masked & ~prompt
        judged = written.any(-1)
        taken = torch.zeros_like(written)
        if judged.any():
            unseen = read_beside(engine, z, shadow_mask(z.shape[1]))
            taken = rules.wino(unseen, z, written, n_new, n_last)
        s = taken_back(rules.fill(z, logits, bundle), taken, engine.cfg.mask_id)
        return s | {"looks": judged.long()}

    return step


def taken_back(s: dict[str, Tensor], taken: Tensor, mask_id: int) -> dict[str, Tensor]:
    """The step s, after which `taken` (R, B) are masks again."""
    return s | {"after": s["after"].masked_fill(taken, mask_id)}


# --- a rule that verifies
def s2d2() -> Callable:
    """A step of S2D2, see rules.verified: all masks are drafted, and the drafts read from left to right, always (the
    paper also decides when that is worth it). A single mask is written as it is drafted, without a second reading."""

    def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        follow(engine, len(z))
        _, logits = engine.stage_a(z)
        masked = z == engine.cfg.mask_id
        s = rules.fill(z, logits, masked)
        several = masked.sum(-1, keepdim=True) > 1
        if several.any():
            # the drafts stand where the masks were; what is kept of them is the bundle
            draft = s["after"]
            causal = read_beside(engine, draft, causal_mask(z.shape[1]))
            token, kept = rules.verified(causal, draft, masked)
            s["bundle"] = torch.where(several, kept, masked)
            s["after"] = torch.where(several, torch.where(kept, token, z), draft)
        return s | {"looks": several[:, 0].long()}

    return step


# --- a second reading
def read_beside(engine: Cached, z: Tensor, sees: Tensor) -> Tensor:
    """B masks beside the blocks z (R, B), at the same positions -> the masks' logits (R, B, V).

    sees (2B, 2B) bool: which of [block ; masks] each of them may attend to, beside the context. The engine's keys are
    put back: the reading leaves no trace.
    """
    cache = engine.cache
    R, B = z.shape
    place = torch.arange(B, device=z.device).repeat(2)
    cos, sin = rotary(engine.cfg, cache.length[:, None] + place, cache.kv.dtype)

    # a shorter row has keys in use that are none of its own
    context = torch.arange(max(cache.lengths), device=z.device) < cache.length[:, None]  # (R, S)
    context = context[:, None, None].expand(-1, -1, 2 * B, -1)
    sees = sees.to(z.device).expand(R, 1, -1, -1)
    ctx = Context(cos, sin, torch.cat([sees, context], dim=-1), cache)

    # the cache takes these for a pass over the next block and the current one
    keys = cache.kv[:, :, :, :, : 2 * B]
    as_they_were = keys.clone()
    both = F.pad(z, (0, B), value=engine.cfg.mask_id)
    h = engine.model.last_n(engine.model.prefix(both, ctx), ctx)
    keys.copy_(as_they_were)
    return engine.model.head(h[:, B:])


def shadow_mask(B: int) -> Tensor:
    """WINO's, (2B, 2B) bool: a shadow sees all but the token at its own position, and is seen by shadows alone.

    B = 2:      block      1 1   . .
                           1 1   . .
                shadows    . 1   1 1
                           1 .   1 1
    """
    itself = torch.eye(B, dtype=torch.bool)
    every = torch.ones(B, B, dtype=torch.bool)
    block = torch.cat([every, ~every], dim=1)
    shadows = torch.cat([~itself, every], dim=1)
    return torch.cat([block, shadows])


def causal_mask(B: int) -> Tensor:
    """S2D2's, (2B, 2B) bool: a block read in blocks of one. A mask sees the drafts before it, and itself.

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
