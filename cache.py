"""The forwards that decoding makes, in two engines with the same results:

    Cached      the current blocks alone; finished blocks are keys and values
    Uncached    the whole text, every time: slow, and the specification of the other

and a Row, what the host knows of one prompt.

Why keeping keys and values is exact, and no approximation (tested: cached = uncached):

    1. No block attends to a later one, so what a finished block has computed can never change.
    2. While a block is in work, each pass over it writes its keys anew; what counts is its last pass.
    3. Stage B marks the current block alone, and its keys are put back afterwards: a marked state leaves no key behind.
    4. A finished block has no mark. On it Stage B's first round is LastN(h), which is Stage A: their keys are the same.
    5. A further round reads LastN(LastN(h)) of the context, and has keys of its own.

The last pass over a block usually changes nothing, and then its keys are those of the final tokens. Where it did change
something, the block is read once more, a refresh.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.util import generator
from model import Config, Context, Model, rotary

if TYPE_CHECKING:
    from sample import Decoding

# R rows in flight, T positions of a pass, B block_length, S keys, C channels, G key/value heads, D head dim,
# L layers, n = n_last, K = n_rounds


# --- keys and values
class KVCache:
    """Keys and values of finished blocks, in slots.

    A slot is one layer in one round: L slots for round 0, which is Stage A and Stage B's first
    round, and n more for each further round. In a slot lie the keys of

        the current block   0 .. B-1    rewritten by every pass that reads it
        the context         B ..        in the order of the text

    So the keys in use are one view without a copy. Their order is nothing to attention: they are rotated.
    """

    def __init__(self, cfg: Config, lengths: list[int], n_rounds: int, device: torch.device, dtype: torch.dtype):
        self.cfg = cfg
        self.B = cfg.block_length
        slots = cfg.n_layer + max(0, n_rounds - 1) * cfg.n_last
        shape = (2, slots, len(lengths), cfg.n_kv_head, self.B, cfg.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)  # (2, slots, R, G, room, D): keys, then values
        self.filling: list[int] = []  # the rows whose prompt is being read, if any: they have the same
        self.rows: Tensor | None = None  # the rows of this pass; None: all
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Context tokens of each row, and room for them, which doubles as they grow."""
        self.lengths = lengths
        self.length = torch.tensor(lengths, device=self.kv.device)
        self.used = self.B + max(lengths)
        if self.used >= self.kv.shape[4]:
            self.kv = F.pad(self.kv, (0, 0, 0, self.used))
        self.context = self.build_context()

    def update(self, layer: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (R, G, T, D) of this pass -> what it attends to, (R, G, S, D) each."""
        kv = self.kv[:, self.slot(layer, i_round)]
        new = torch.stack([k, v])

        # the prompt's complete blocks go straight into their rows' context
        if self.filling:
            end = self.B + k.shape[2]
            kv[:, self.filling, :, self.B : end] = new
            return k, v

        # a pass over some of the rows has keys of its own, and leaves none behind
        if self.rows is not None:
            kv = kv[:, self.rows]

        kv[:, :, :, : self.B] = new
        return kv[:, :, :, : self.used].unbind()

    def slot(self, layer: int, i_round: int) -> int:
        """Round 0 has slots 0..L-1, each further round the next n."""
        return layer + i_round * self.cfg.n_last

    def close(self, rows: list[int]) -> None:
        """The current block of `rows` joins their context."""
        at = torch.tensor(rows, device=self.kv.device)
        place = self.B + self.length[at, None] + torch.arange(self.B, device=self.kv.device)  # (rows, B)
        self.set_lengths([n + self.B * (row in rows) for row, n in enumerate(self.lengths)])
        block = self.kv[:, :, at, :, : self.B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.kv = self.kv[:, :, rows]
        self.set_lengths([self.lengths[r] for r in rows])

    def build_context(self) -> Context:
        """The Context of the current blocks, which lie behind the context."""
        offset = torch.arange(self.B, device=self.kv.device)
        cos, sin = rotary(self.cfg, self.length[:, None] + offset, self.kv.dtype)

        # rows of one length may attend to all keys in use; a shorter row has keys in use that are none of its own
        mask = None
        if len(set(self.lengths)) > 1:
            key = torch.arange(-self.B, max(self.lengths), device=self.kv.device)
            mask = key < self.length[:, None, None, None]  # (R, 1, 1, S)
        return Context(cos, sin, mask, self)


# --- the forwards of the current blocks alone
class Cached:
    """Stage A and Stage B of the current blocks; finished blocks are keys and values."""

    def __init__(self, model: Model, contexts: list[list[int]], n_rounds: int):
        """contexts: of each row the finished blocks, their ids."""
        self.model = model
        self.cfg = model.cfg
        self.n_rounds = n_rounds
        device = model.wte.weight.device
        lengths = [len(ids) for ids in contexts]
        self.cache = KVCache(model.cfg, lengths, n_rounds, device, model.compute_dtype)
        # what several rows begin with is read once
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, ids in enumerate(contexts):
            rows_of.setdefault(tuple(ids), []).append(row)
        for ids, rows in rows_of.items():
            if ids:
                self.read_prompt(rows, torch.tensor([ids], device=device))
        # the token before the current block: of a row without a context a mask
        self.last = torch.tensor([(ids or [model.cfg.mask_id])[-1] for ids in contexts], device=device)

    def read_prompt(self, rows: list[int], ids: Tensor) -> None:
        """The complete blocks of these rows' prompt, ids (1, T): no decoding forward, and not counted."""
        self.cache.filling = rows
        ctx = replace(self.model.context(torch.ones_like(ids, dtype=torch.bool)), cache=self.cache)
        h = self.model.prefix(ids, ctx)
        for i in range(max(1, self.n_rounds)):  # finished positions are unmarked in every round
            h = self.model.last_n(h, replace(ctx, i_round=i))
        self.cache.filling = []

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The full forward of z (R, B) -> prefix states and final states, (R, B, C) each."""
        h = self.model.prefix(z, self.cache.context)
        self.final = self.model.last_n(h, self.cache.context)
        return h, self.final

    def stage_b(
        self, h: Tensor, bundle: Tensor, tokens: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Stage B from those prefix states: final states (R, B, C). The block keeps its keys.

        tokens (R, B) int64: what causal Stage B reads, see Model.coordinate. rows (r,) int64: of these rows alone,
        (r, B, C).
        """
        ctx = replace(self.cache.context, last=self.last)
        if rows is not None:
            ctx = some_rows(ctx, rows)
            self.cache.rows = rows
            states = self.model.coordinate(h[rows], bundle[rows], ctx, self.n_rounds, tokens[rows])
            self.cache.rows = None
            return states

        first = self.cfg.n_layer - self.cfg.n_last
        current = self.cache.kv[:, first:, :, :, : self.cfg.block_length]
        unmarked = current.clone()
        states = self.model.coordinate(h, bundle, ctx, self.n_rounds, tokens)
        current.copy_(unmarked)
        return states

    def close(self, rows: list[int], z: Tensor, changed: bool) -> None:
        """The blocks of `rows` are finished, z (R, B). changed: did the last step change any of them?"""
        if changed:
            self.stage_a(z)

        # their keys of the further rounds
        h = self.final
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.cache.context, i_round=i))
        self.cache.close(rows)
        self.last[rows] = z[rows, -1]

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.cache.keep(rows)
        self.final = self.final[rows]
        self.last = self.last[rows]


def some_rows(ctx: Context, rows: Tensor) -> Context:
    """The context of these rows (r,) int64 alone."""
    mask = None if ctx.mask is None else ctx.mask[rows]
    return replace(ctx, cos=ctx.cos[rows], sin=ctx.sin[rows], mask=mask, last=ctx.last[rows])


# --- the forwards of the whole text
class Uncached:
    """`Cached` without a cache: row by row, everything is read again in every forward."""

    def __init__(self, model: Model, contexts: list[list[int]], n_rounds: int):
        self.model = model
        self.cfg = model.cfg
        self.n_rounds = n_rounds
        self.contexts = [torch.tensor(ids, dtype=torch.long, device=model.wte.weight.device) for ids in contexts]
        self.prefixes: list[Tensor] = []  # of each row the prefix states of the whole text, (1, T, C)

    def whole_context(self, row: int, T: int) -> Context:
        """Of a row's whole text of T tokens, in whose last block is decoded."""
        device = self.model.wte.weight.device
        ctx = self.model.context(torch.ones(1, T, dtype=torch.bool, device=device))
        B = self.cfg.block_length
        if T == B:
            return ctx
        return replace(ctx, decoded=slice(T - B, T), before=slice(0, T - B), last=self.contexts[row][-1:])

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """As in Cached."""
        B = self.cfg.block_length
        self.prefixes = []
        final = []
        for row, (context, block) in enumerate(zip(self.contexts, z, strict=True)):
            ids = torch.cat([context, block])[None]  # (1, T)
            ctx = self.whole_context(row, ids.shape[1])
            h = self.model.prefix(ids, ctx)
            self.prefixes.append(h)
            final.append(self.model.last_n(h, ctx)[:, -B:])
        return torch.cat([h[:, -B:] for h in self.prefixes]), torch.cat(final)

    def stage_b(
        self, h: Tensor, bundle: Tensor, tokens: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """As in Cached; h is the current block's part of what Stage A kept."""
        final = []
        for row in range(len(bundle)) if rows is None else rows.tolist():
            prefix = self.prefixes[row]  # (1, T, C)
            ctx = self.whole_context(row, prefix.shape[1])
            read = None if tokens is None else tokens[row : row + 1]
            final.append(self.model.coordinate(prefix, bundle[row : row + 1], ctx, self.n_rounds, read))
        return torch.cat(final)

    def close(self, rows: list[int], z: Tensor, changed: bool) -> None:
        """As in Cached."""
        for row in rows:
            self.contexts[row] = torch.cat([self.contexts[row], z[row]])

    def keep(self, rows: list[int]) -> None:
        """As in Cached."""
        self.contexts = [self.contexts[r] for r in rows]


# --- what the host knows of a row, and what comes out of it
@dataclass
class Output:
    """What comes out of a decode of one row."""

    prompt: list[int]  # with its holes filled
    tokens: list[int] = field(default_factory=list)  # generated behind it, up to and with eos
    # forwards: full, Stage A; partial, Stage B's rounds; refresh, a finished block read once more
    nfe: dict[str, float] = field(default_factory=lambda: dict(full=0, partial=0, refresh=0))
    warning: str | None = None


class Row:
    """One prompt, and what has been written behind it."""

    def __init__(self, number: int, prompts: list[list[int]], d: "Decoding", cfg: Config, seed: int):
        self.number = number
        self.prompt = prompts[number]
        self.d = d
        self.cfg = cfg
        # finished blocks: those before the prompt's end, or before its first hole
        first = len(self.prompt)
        if d.holes and cfg.mask_id in self.prompt:
            first = self.prompt.index(cfg.mask_id)
        self.ids = self.prompt[: first // cfg.block_length * cfg.block_length]
        # random numbers are a function of the prompt, and of how many equal prompts come before it
        twins = prompts[:number].count(self.prompt)
        self.rng = generator(seed, "sample", tuple(self.prompt), twins)
        self.output = Output(self.prompt)

    def block(self) -> list[int]:
        """The current block: what the prompt has of it, then masks."""
        B = self.cfg.block_length
        given = self.prompt[len(self.ids) :][:B]
        return given + [self.cfg.mask_id] * (B - len(given))

    def given(self) -> list[bool]:
        """Of the current block the positions that are never edited."""
        B = self.cfg.block_length
        of_prompt = self.prompt[len(self.ids) :][:B]
        given = [not (self.d.holes and i == self.cfg.mask_id) for i in of_prompt]
        return given + [False] * (B - len(of_prompt))

    def finish(self, block: list[int], full: float, partial: float, changed: bool) -> bool:
        """Book a finished block and what it cost -> whether it was the last one.

        If not, the next block will read it: that takes a refresh if its last step still changed
        it, and K - 1 partial ones for its states of the further rounds.
        """
        out = self.output
        self.ids = self.ids + block
        n = len(self.prompt)
        new = self.ids[n:]
        out.prompt = self.ids[:n] + self.prompt[len(self.ids) :]
        out.tokens = up_to_eos(new[: self.d.gen_length], self.cfg.eos_id)
        if self.cfg.mask_id in block:
            out.warning = f"a block was left with masks after {full:g} forwards that would never fill it"

        ended = self.cfg.eos_id in new and self.cfg.mask_id not in new
        last = len(self.ids) >= n + self.d.gen_length or (self.d.eos_early_stop and ended)
        out.nfe["full"] += int(full)
        out.nfe["partial"] += partial
        if not last:
            out.nfe["partial"] += max(0, self.d.n_rounds - 1)
            out.nfe["refresh"] += int(changed)
        return last


def in_full(nfe: dict[str, float], partial_cost: float) -> float:
    """All forwards in full ones: a refresh is one, a partial one is partial_cost of one."""
    return nfe["full"] + nfe["refresh"] + nfe["partial"] * partial_cost


def up_to_eos(tokens: list[int], eos_id: int) -> list[int]:
    """[5, 7, eos, 3] -> [5, 7, eos]"""
    if eos_id in tokens:
        return tokens[: tokens.index(eos_id) + 1]
    return tokens
