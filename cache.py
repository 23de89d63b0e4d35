"""Two ways to run the forwards of decoding: with the keys and values of finished blocks, and plainly.

`Cached` runs the current blocks only. `Naive` reads every sequence from its first token at every step, and stays as
the twin that the fast one must equal: same tokens, same forwards, same steps (tests/test_sample.py). Both offer

    stage_a(z)          one full forward of the current blocks z (R, B): prefix states and logits of Stage A
    stage_b(h, bundle, u)   Stage B from those states: logits, and no trace left behind
    close(z, rows, changed)   the blocks of `rows` are finished and become context
    keep(rows)          the other rows are done
"""

from dataclasses import replace

import torch
from torch import Tensor

from model import Config, Context, Model, rotary, sequence_context

# R rows, T positions, B block_length, S keys, C channels, G key/value heads, D head dim, V vocabulary, L layers,
# n = n_last, K = n_rounds


class KVCache:
    """Keys and values of finished blocks. Exact, not approximate: no block attends to a later one, so what a finished
    block computed can never change (tested: cached decode = naive decode).

    A slot is one layer in one round: L slots for round 0 and n more for each further round of Stage B, whose context
    is the context's own states of that round. In a slot, keys 0..B-1 are the current block (rewritten by every pass)
    and the row's context follows. Rotation has already put the position into a key, so this order does not matter to
    attention, and the keys in use are one view without a copy, however long each row's context is.
    """

    def __init__(self, cfg: Config, rows: int, rounds: int, device: torch.device, dtype: torch.dtype):
        slots = cfg.n_layer + max(0, rounds - 1) * cfg.n_last
        self.first_last, self.n_layer, self.n_last = cfg.n_layer - cfg.n_last, cfg.n_layer, cfg.n_last
        self.B = cfg.block_length
        self.kv = torch.zeros(2, slots, rows, cfg.n_kv_head, 9 * self.B, cfg.head_dim, device=device, dtype=dtype)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)  # context tokens of each row
        self.used = 0  # the longest row's, known to the host
        self.ragged = False  # whether rows differ in length
        self.filling: int | None = None  # the row whose prompt is being read, if any

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: (R, G, T, D) of the current pass -> keys and values to attend to, (R, G, S, D)."""
        slot = layer if round == 0 else self.n_layer + (round - 1) * self.n_last + layer - self.first_last
        if self.filling is not None:  # the prompt's complete blocks: straight into the context, nothing before them
            self.kv[0, slot, self.filling, :, self.B : self.B + k.shape[2]] = k[0]
            self.kv[1, slot, self.filling, :, self.B : self.B + v.shape[2]] = v[0]
            return k, v
        keys, values = (self.kv[i, slot, :, :, : self.B + self.used] for i in (0, 1))
        keys[:, :, : self.B] = k
        values[:, :, : self.B] = v
        return keys, values

    def close(self, rows: list[int], lengths: list[int]) -> None:
        """The current block of `rows` joins their context. lengths: every row's context length after this."""
        self.reserve(max(lengths))
        at = torch.tensor(rows, device=self.kv.device)
        place = self.B + self.length[at, None] + torch.arange(self.B, device=self.kv.device)  # (rows, B)
        block = self.kv[:, :, at, :, : self.B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)
        self.set_lengths(lengths)

    def reserve(self, tokens: int) -> None:
        """Room for a context of `tokens`, doubling so that a long answer copies its cache only a few times."""
        have, need = self.kv.shape[4], self.B + tokens
        if need > have:
            more = self.kv.new_zeros(*self.kv.shape[:4], max(need - have, have), self.kv.shape[5])
            self.kv = torch.cat([self.kv, more], dim=4)

    def set_lengths(self, lengths: list[int]) -> None:
        self.length = torch.tensor(lengths, device=self.kv.device)
        self.used, self.ragged = max(lengths), len(set(lengths)) > 1

    def current_block(self) -> Tensor:
        """What Stage B overwrites of it: the last n layers of round 0, and the further rounds."""
        return self.kv[:, self.first_last :, :, :, : self.B].clone()

    def restore_block(self, block: Tensor) -> None:
        self.kv[:, self.first_last :, :, :, : self.B] = block

    def keep(self, rows: list[int]) -> None:
        """Drop finished rows."""
        self.kv, lengths = self.kv[:, :, rows], self.length[rows].tolist()
        self.set_lengths(lengths)

    def context(self, cfg: Config, start: Tensor) -> Context:
        """Context of each row's current block. start: (R,) position of its first token."""
        positions = start[:, None] + torch.arange(self.B, device=start.device)
        cos, sin = rotary(cfg, positions, self.kv.dtype)
        mask = None
        if self.ragged:
            key = torch.arange(self.B + self.used, device=start.device)
            mask = (key < self.B + self.length[:, None])[:, None, None]  # (R, 1, 1, S)
        return Context(cos, sin, mask, self)


class Cached:
    """Only the current blocks run; finished blocks are keys and values."""

    def __init__(self, model: Model, prompts: list[list[int]], n_rounds: int):
        self.model, self.cfg, self.n_rounds = model, model.cfg, n_rounds
        device, B = model.wte.weight.device, model.cfg.block_length
        self.cache = KVCache(model.cfg, len(prompts), n_rounds, device, model.compute_dtype)
        lengths = [len(p) // B * B for p in prompts]
        self.cache.reserve(max(lengths))
        for r, (p, n) in enumerate(zip(prompts, lengths, strict=True)):
            if n:  # a prompt's complete blocks are read once; this is no decoding forward and not counted
                self.cache.filling = r
                ids = torch.tensor([p[:n]], device=device)
                ctx = sequence_context(self.cfg, torch.ones_like(ids, dtype=torch.bool), model.compute_dtype)
                ctx.cache = self.cache
                h = model.prefix(ids, ctx)
                for i in range(max(1, n_rounds)):  # in the rounds of Stage B finished positions are unmarked
                    h = model.last_n(h, replace(ctx, round=i))
        self.cache.filling = None
        self.cache.set_lengths(lengths)

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        self.ctx = self.cache.context(self.cfg, self.cache.length)
        h = self.model.prefix(z, self.ctx)
        self.h_1 = self.model.last_n(h, self.ctx)
        return h, self.model.head(self.h_1)

    def stage_b(self, h: Tensor, bundle: Tensor, u: Tensor | None = None) -> Tensor:
        """Stage B must leave no trace in the cache: the block's own keys and values stay Stage A's."""
        kept = self.cache.current_block()
        logits = self.model.head(self.model.coordinate(h, bundle, self.ctx, self.n_rounds, u))
        self.cache.restore_block(kept)
        return logits

    def close(self, z: Tensor, rows: list[int], changed: bool) -> None:
        """The blocks of `rows` are finished. If the last forward still changed one it is read once more (a commit
        forward); further rounds of Stage B need the block's own unmarked states of each round."""
        if changed:
            self.stage_a(z)
        h = self.h_1
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.ctx, round=i))
        lengths = self.cache.length.tolist()
        for r in rows:
            lengths[r] += self.cfg.block_length
        self.cache.close(rows, lengths)

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)


class Naive:
    """Every forward reads the whole sequence from its first token, one row at a time. Slow and obviously right."""

    def __init__(self, model: Model, prompts: list[list[int]], n_rounds: int):
        self.model, self.cfg, self.n_rounds = model, model.cfg, n_rounds
        device, B = model.wte.weight.device, model.cfg.block_length
        self.past = [torch.tensor(p[: len(p) // B * B], dtype=torch.long, device=device) for p in prompts]

    def stage_a(self, z: Tensor) -> tuple[list[Tensor], Tensor]:
        h = []
        for past, block in zip(self.past, z, strict=True):
            ids = torch.cat([past, block])[None]
            h.append(self.model.prefix(ids, self.context(ids)))
        return h, self.logits([self.model.last_n(x, self.context(x)) for x in h])

    def stage_b(self, h: list[Tensor], bundle: Tensor, u: Tensor | None = None) -> Tensor:
        out = []
        numbers = torch.zeros(bundle.shape, device=bundle.device) if u is None else u
        for x, marked, number in zip(h, bundle, numbers, strict=True):
            marks, number = (torch.cat([t.new_zeros(x.shape[1] - len(t)), t])[None] for t in (marked, number))
            ctx = self.context(x)
            ctx.current = torch.arange(x.shape[1], device=x.device)[:, None] >= x.shape[1] - len(marked)
            out.append(self.model.coordinate(x, marks, ctx, self.n_rounds, number))
        return self.logits(out)

    def context(self, x: Tensor):
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return sequence_context(self.cfg, real, self.model.compute_dtype)

    def logits(self, h: list[Tensor]) -> Tensor:
        return self.model.head(torch.cat([x[:, -self.cfg.block_length :] for x in h]))

    def close(self, z: Tensor, rows: list[int], changed: bool) -> None:
        for r in rows:
            self.past[r] = torch.cat([self.past[r], z[r]])

    def keep(self, rows: list[int]) -> None:
        self.past = [self.past[r] for r in rows]
