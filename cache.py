"""The forwards that decoding makes, in two engines with the same results:

    Cached      the current blocks alone; finished blocks are keys and values
    Uncached    the whole text, every time: slow, and the specification of the other

Why keeping keys and values is exact, and no approximation (tested: cached = uncached):

    1. No block attends to a later one, so what a finished block has computed can never change.
    2. While a block is in work, each pass over it writes its keys anew; what counts is its last pass.
    3. Stage B marks the current block alone, and its keys are put back afterwards: a marked state leaves no key behind.
    4. A finished block has no mark. On it Stage B's first round is LastN(h), which is Stage A: their keys are the same.
    5. A further round reads LastN(LastN(h)) of the context, and has keys of its own.

A finished block costs no pass of its own. The pass that closes it carries the next block's first beside
it, 2B positions in one. If the block was changed after all, what was read of the next is thrown away.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from model import Context, Model, rotary

# R rows in flight, T positions of a pass (B, or 2B with the next block), B block_length, S keys, C channels,
# G key/value heads, D head dim, L layers, n = n_last, K = n_rounds


# --- keys and values
class KVCache:
    """Keys and values of finished blocks, in slots.

    A slot is one layer in one round: L slots for round 0, which is Stage A and Stage B's first
    round, and n more for each further round. In a slot lie the keys of

        the next block   0 .. B-1       each rewritten by every pass that reads it
        the current one  B .. 2B-1
        the context      2B ..          in the order of the text

    So the keys in use are one view without a copy. Their order is nothing to attention: they are rotated.
    """

    def __init__(self, cfg: Config, lengths: list[int], n_rounds: int, device: torch.device, dtype: torch.dtype):
        self.cfg = cfg
        self.B = cfg.block_length
        slots = cfg.n_layer + max(0, n_rounds - 1) * cfg.n_last
        shape = (2, slots, len(lengths), cfg.n_kv_head, 2 * self.B, cfg.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)  # (2, slots, R, G, room, D): keys, then values
        self.filling: int | None = None  # the row whose prompt is being read, if any
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Context tokens of each row, and room for them, which doubles as they grow."""
        self.lengths = lengths
        self.length = torch.tensor(lengths, device=self.kv.device)
        self.used = 2 * self.B + max(lengths)
        if self.used >= self.kv.shape[4]:
            self.kv = F.pad(self.kv, (0, 0, 0, self.used))
        self.contexts: dict[bool, Context] = {}  # what context() has built for these lengths

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (R, G, T, D) of this pass -> what it attends to, (R, G, S, D) each."""
        kv = self.kv[:, self.slot(layer, round)]
        new = torch.stack([k, v])
        T = k.shape[2]
        end = 2 * self.B  # of the current block

        # the prompt's complete blocks go straight into their row's context
        if self.filling is not None:
            kv[:, self.filling, :, end : end + T] = new[:, 0]
            return k, v

        # the current block, or the next one and the current one, then the context
        kv[:, :, :, end - T : end] = new
        return kv[:, :, :, end - T : self.used].unbind()

    def slot(self, layer: int, round: int) -> int:
        """Round 0 has slots 0..L-1, each further round the next n."""
        return layer + round * self.cfg.n_last

    def close(self, rows: list[int]) -> None:
        """The current block of `rows` joins their context, and the next one is current."""
        B = self.B
        at = torch.tensor(rows, device=self.kv.device)
        place = 2 * B + self.length[at, None] + torch.arange(B, device=self.kv.device)  # (rows, B)
        self.set_lengths([n + B * (row in rows) for row, n in enumerate(self.lengths)])
        block = self.kv[:, :, at, :, B : 2 * B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)
        self.kv[:, :, at, :, B : 2 * B] = self.kv[:, :, at, :, :B]

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.kv = self.kv[:, :, rows]
        self.set_lengths([self.lengths[r] for r in rows])

    def context(self, ahead: bool = False) -> Context:
        """The Context of the current blocks, or of [next ; current]; built once."""
        if ahead not in self.contexts:
            self.contexts[ahead] = self.build_context(ahead)
        return self.contexts[ahead]

    def build_context(self, ahead: bool) -> Context:
        B = self.B
        device = self.kv.device

        # where the positions of a pass lie behind the context: the current block's are 0..B-1, the
        # next one's B..2B-1
        offset = torch.arange(B, device=device)
        if ahead:
            offset = torch.cat([offset + B, offset])
        T = len(offset)
        cos, sin = rotary(self.cfg, self.length[:, None] + offset, self.kv.dtype)

        # rows of one length may attend to all keys in use
        if not ahead and len(set(self.lengths)) == 1:
            return Context(cos, sin, None, self)

        # a shorter row has keys in use that are none of its own; the context's are 0 and above
        key = torch.arange(-T, max(self.lengths), device=device)
        mask = key < self.length[:, None, None, None]  # (R, 1, 1, S)
        if ahead:
            # the first B keys are the next block's, which nobody but itself sees
            is_next = offset >= B
            mask = mask & (is_next[:, None] | (key >= -B))  # (R, 1, T, S)
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
        for row, ids in enumerate(contexts):
            if ids:
                self.read_prompt(row, torch.tensor([ids], device=device))

        # pairs of prefix states and final states, (R, B, C) each
        self.last: tuple[Tensor, Tensor] | None = None  # of the last pass over the current blocks
        self.next: tuple[Tensor, Tensor] | None = None  # of the next blocks, if they were read beside them
        self.ready = False  # whether Stage A's forward of the current blocks is made already

    def read_prompt(self, row: int, ids: Tensor) -> None:
        """A prompt's complete blocks, ids (1, T): no decoding forward, and not counted."""
        self.cache.filling = row
        ctx = replace(self.model.context(torch.ones_like(ids, dtype=torch.bool)), cache=self.cache)
        h = self.model.prefix(ids, ctx)
        for i in range(max(1, self.n_rounds)):  # finished positions are unmarked in every round
            h = self.model.last_n(h, replace(ctx, round=i))
        self.cache.filling = None

    def read(self, z: Tensor, next_z: Tensor | None = None) -> None:
        """Stage A's forward of the current blocks z (R, B), the next ones beside them."""
        B = self.cfg.block_length
        ahead = next_z is not None
        if ahead:
            z = torch.cat([next_z, z], dim=1)
        ctx = self.cache.context(ahead)
        h = self.model.prefix(z, ctx)
        y = self.model.last_n(h, ctx)

        self.last = (h[:, -B:], y[:, -B:])
        self.next = None
        if ahead:
            self.next = (h[:, :B], y[:, :B])
        self.ready = True

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The full forward of z (R, B) -> prefix states and final states, (R, B, C) each."""
        if not self.ready:
            self.read(z)
        self.ready = False
        return self.last

    def stage_b(self, h: Tensor, bundle: Tensor) -> Tensor:
        """Stage B from those prefix states: final states (R, B, C). The block keeps its keys."""
        B = self.cfg.block_length
        first = self.cfg.n_layer - self.cfg.n_last
        current = self.cache.kv[:, first:, :, :, B : 2 * B]
        unmarked = current.clone()
        h = self.model.coordinate(h, bundle, self.cache.context(), self.n_rounds)
        current.copy_(unmarked)
        return h

    def close(self, rows: list[int], z: Tensor) -> None:
        """The blocks of `rows` are finished, as last read: z (R, B)."""
        # their keys of the further rounds
        h = self.last[1]
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.cache.context(), round=i))
        self.cache.close(rows)

        # where their next blocks were read beside them, and what was read of every other row still
        # holds, the next Stage A has its forward
        self.ready = self.next is not None and (self.ready or len(rows) == len(z))
        if self.ready:
            closed = torch.zeros(len(z), 1, 1, dtype=torch.bool, device=z.device)
            closed[rows] = True
            self.last = tuple(torch.where(closed, new, old) for new, old in zip(self.next, self.last, strict=True))
        self.next = None

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.cache.keep(rows)
        self.last = tuple(states[rows] for states in self.last)
        if self.next is not None:
            self.next = tuple(states[rows] for states in self.next)


# --- the forwards of the whole text
class Uncached:
    """`Cached` without a cache: row by row, everything is read again in every forward."""

    def __init__(self, model: Model, contexts: list[list[int]], n_rounds: int):
        self.model = model
        self.cfg = model.cfg
        self.n_rounds = n_rounds
        self.contexts = [torch.tensor(ids, dtype=torch.long, device=model.wte.weight.device) for ids in contexts]
        self.prefixes: list[Tensor] = []  # of each row the prefix states of the whole text, (1, T, C)

    def whole_context(self, h: Tensor) -> Context:
        """Of a whole text (1, T, ...). Adapters of Stage B alone act in its last block."""
        T = h.shape[1]
        ctx = self.model.context(torch.ones(1, T, dtype=torch.bool, device=h.device))
        if self.model.lora_in_stage_b_alone:
            current = torch.arange(T, device=h.device) >= T - self.cfg.block_length
            ctx = replace(ctx, lora=current[:, None])
        return ctx

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """As in Cached."""
        B = self.cfg.block_length
        self.prefixes = []
        final = []
        for context, block in zip(self.contexts, z, strict=True):
            ids = torch.cat([context, block])[None]  # (1, T)
            ctx = self.whole_context(ids)
            h = self.model.prefix(ids, ctx)
            self.prefixes.append(h)
            final.append(self.model.last_n(h, ctx)[:, -B:])
        return torch.cat([h[:, -B:] for h in self.prefixes]), torch.cat(final)

    def stage_b(self, h: Tensor, bundle: Tensor) -> Tensor:
        """As in Cached; h is the current block's part of what Stage A kept."""
        B = self.cfg.block_length
        final = []
        for prefix, of_block in zip(self.prefixes, bundle, strict=True):
            whole = F.pad(of_block, (prefix.shape[1] - B, 0))[None]  # (1, T)
            y = self.model.coordinate(prefix, whole, self.whole_context(prefix), self.n_rounds)
            final.append(y[:, -B:])
        return torch.cat(final)

    def read(self, z: Tensor, next_z: Tensor | None = None) -> None:
        """Nothing is read before it is needed."""

    def close(self, rows: list[int], z: Tensor) -> None:
        """As in Cached."""
        for row in rows:
            self.contexts[row] = torch.cat([self.contexts[row], z[row]])

    def keep(self, rows: list[int]) -> None:
        """As in Cached."""
        self.contexts = [self.contexts[r] for r in rows]
