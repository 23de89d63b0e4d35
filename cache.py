"""The forwards that decoding makes, in two engines with the same results:

    Cached      reads only the current blocks, and keeps keys and values of the finished blocks
    Uncached    reads the whole text every time: it is slow, and it is the specification of Cached

Keeping keys and values is exact, because:

    1. No block attends to a later one, so the keys and values of a finished block can never change.
    2. Each pass over the current block writes its keys anew, so the keys of the last pass are kept.
    3. Stage B marks only the current block. Afterwards the unmarked keys are put back, so no marked key stays.
    4. A finished block has no marker. On it Stage B's first round is LastN(h), which is Stage A, with the same keys.
    5. A further round computes LastN(LastN(h)) of the finished blocks, which has other keys. These are kept as well.

Tests check that both engines agree in fp32. In bf16 they differ by rounding.

With edits, the last pass over a block usually changes no token, and then its keys are those of the final tokens. If it
has changed a token, as it always has without edits, the block is read once more. This is a refresh.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Config, Context, Model, rotary

# R rows that are being decoded, T positions of a pass, B block_length, S keys, C channels, G key/value heads,
# D head dim, L layers, n = n_last, K = n_rounds


# --- keys and values
class KVCache:
    """Keys and values of finished blocks, in slots.

    A slot belongs to one layer in one round. Round 0, which is Stage A and the first round of Stage B, has L slots, and
    each further round has n more. A slot holds the keys of

        the current block     0 .. B-1    rewritten by every pass over it
        the finished blocks   B ..        in the order of the text

    So the keys in use are one view, without a copy. Their order does not matter: rotary embeddings carry the positions.
    """

    def __init__(self, cfg: Config, lengths: list[int], n_rounds: int, device: torch.device, dtype: torch.dtype):
        self.cfg = cfg
        self.B = cfg.block_length
        slots = cfg.n_layer + max(0, n_rounds - 1) * cfg.n_last
        shape = (2, slots, len(lengths), cfg.n_kv_head, self.B, cfg.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)  # (2, slots, R, G, room, D): keys, then values
        self.filling: list[int] = []  # while a prompt is read: the rows that have this prompt
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Set how many finished tokens each row has, and make room for them; a room too small at least doubles."""
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

        # the complete blocks of a prompt are finished blocks of these rows
        if self.filling:
            end = self.B + k.shape[2]
            kv[:, self.filling, :, self.B : end] = new
            return k, v

        kv[:, :, :, : self.B] = new
        return kv[:, :, :, : self.used].unbind()

    def slot(self, layer: int, i_round: int) -> int:
        """Round 0 has the slots 0..L-1, and each further round has the next n."""
        return layer + i_round * self.cfg.n_last

    def close(self, rows: list[int]) -> None:
        """The current block of `rows` is finished: copy its keys after those of their finished blocks."""
        at = torch.tensor(rows, device=self.kv.device)
        # where the block goes: behind the row's finished blocks
        place = self.B + self.length[at, None] + torch.arange(self.B, device=self.kv.device)  # (rows, B)
        self.set_lengths([n + self.B * (row in rows) for row, n in enumerate(self.lengths)])
        block = self.kv[:, :, at, :, : self.B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.kv = self.kv[:, :, rows]
        self.set_lengths([self.lengths[r] for r in rows])

    def build_context(self) -> Context:
        """The Context of a pass over the current blocks."""
        offset = torch.arange(self.B, device=self.kv.device)
        cos, sin = rotary(self.cfg, self.length[:, None] + offset, self.kv.dtype)

        # rows of one length attend to all keys in use; a shorter row may not attend to those after its own
        mask = None
        if len(set(self.lengths)) > 1:
            key = torch.arange(-self.B, max(self.lengths), device=self.kv.device)
            mask = key < self.length[:, None, None, None]  # (R, 1, 1, S)
        return Context(cos, sin, mask, self)


# --- forwards of only the current blocks
class Cached:
    """Stage A and Stage B of the current blocks, with the keys and values of the finished ones."""

    def __init__(self, model: Model, finished: list[list[int]], n_rounds: int):
        """finished: the ids of each row's finished blocks."""
        self.model = model
        self.cfg = model.cfg
        self.n_rounds = n_rounds
        device = model.wte.weight.device
        lengths = [len(ids) for ids in finished]
        self.cache = KVCache(model.cfg, lengths, n_rounds, device, model.compute_dtype)
        # rows with the same finished blocks read them once
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, ids in enumerate(finished):
            rows_of.setdefault(tuple(ids), []).append(row)
        for ids, rows in rows_of.items():
            if ids:
                self.read_prompt(rows, torch.tensor([ids], device=device))
        # the token before the current block, or a mask if there is none
        self.before_block = torch.tensor([(ids or [model.cfg.mask_id])[-1] for ids in finished], device=device)

    def read_prompt(self, rows: list[int], ids: Tensor) -> None:
        """Read the complete blocks of these rows' prompt, ids (1, T). This is not a forward of decoding, and is not
        counted."""
        self.cache.filling = rows
        ctx = replace(self.model.context(torch.ones_like(ids, dtype=torch.bool)), cache=self.cache)
        h = self.model.prefix(ids, ctx)
        for i in range(max(1, self.n_rounds)):  # finished positions are unmarked in every round
            h = self.model.last_n(h, replace(ctx, i_round=i))
        self.cache.filling = []

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """One full forward: z (R, B) -> prefix states and final states, (R, B, C) each."""
        h = self.model.prefix(z, self.cache.context)
        self.final = self.model.last_n(h, self.cache.context)
        return h, self.final

    def stage_b(self, h: Tensor, bundle: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Stage B on these prefix states h (R, B, C): final states (R, B, C). The block's keys stay Stage A's.

        tokens (R, B) int64: for causal Stage B, which reads these and the token before the block.
        """
        read = () if tokens is None else (tokens, self.before_block)

        # put the unmarked keys back afterwards
        first = self.cfg.n_layer - self.cfg.n_last
        current = self.cache.kv[:, first:, :, :, : self.cfg.block_length]
        unmarked = current.clone()
        states = self.model.coordinate(h, bundle, self.cache.context, self.n_rounds, *read)
        current.copy_(unmarked)
        return states

    def close(self, rows: list[int], z: Tensor, changed: bool) -> None:
        """The blocks z (R, B) of `rows` are finished. changed: did the last step change any of them?"""
        if changed:
            self.stage_a(z)

        # make their keys of the further rounds
        h = self.final
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.cache.context, i_round=i))
        self.cache.close(rows)
        self.before_block[rows] = z[rows, -1]

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.cache.keep(rows)
        self.final = self.final[rows]
        self.before_block = self.before_block[rows]


# --- forwards of the whole text
class Uncached:
    """`Cached` without a cache: every forward reads the whole text again, row by row."""

    def __init__(self, model: Model, finished: list[list[int]], n_rounds: int):
        self.model = model
        self.n_rounds = n_rounds
        self.finished = [torch.tensor(ids, dtype=torch.long, device=model.wte.weight.device) for ids in finished]
        self.read: list[tuple[Tensor, Context]] = []  # each row's prefix states of the whole text, and their Context

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """As in Cached."""
        self.read = []
        prefixes = []
        finals = []
        for before, block in zip(self.finished, z, strict=True):
            # finished blocks do not change any more, so the text is its own clean copy
            ids = torch.cat([before, block])[None]  # (1, T)
            ctx = self.model.context(torch.ones_like(ids, dtype=torch.bool), ids if self.model.needs_copy else None)
            h = self.model.prefix(ids, ctx)
            final = self.model.last_n(h, ctx)
            self.read.append((h, ctx))

            # the states of the current block
            current = slice(len(before), len(before) + len(block))
            prefixes.append(h[:, current])
            finals.append(final[:, current])
        return torch.cat(prefixes), torch.cat(finals)

    def stage_b(self, h: Tensor, bundle: Tensor, tokens: Tensor | None = None) -> Tensor:
        """As in Cached. h is not used, because Stage A has kept the prefix states of the whole text."""
        finals = []
        for row, (before, (whole, ctx)) in enumerate(zip(self.finished, self.read, strict=True)):
            n = len(before)
            marked = F.pad(bundle[row : row + 1], (n, 0), value=False)  # (1, T)
            read = () if tokens is None else (torch.cat([before, tokens[row]])[None],)
            final = self.model.coordinate(whole, marked, ctx, self.n_rounds, *read)
            finals.append(final[:, n : marked.shape[1]])
        return torch.cat(finals)

    def close(self, rows: list[int], z: Tensor, changed: bool) -> None:
        """As in Cached."""
        for row in rows:
            self.finished[row] = torch.cat([self.finished[row], z[row]])

    def keep(self, rows: list[int]) -> None:
        """As in Cached."""
        self.finished = [self.finished[r] for r in rows]
