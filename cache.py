"""The fast twin of sample.generate_one: many rows at once, and the keys and values of finished blocks kept.

Rows finish blocks at their own pace, each as if it were alone: tokens, counts and draws. The one exception is an exact
tie: a matmul over more rows may round the last bit otherwise, and so decide between two logits that are equal.

A finished block costs no pass of its own: the forward that closes it (it finds nothing left to change, or reads once
more what the last one changed) carries the next block's first beside it, 2B positions in one pass. No block attends to
a later one; if the first half was changed after all, the second is thrown away.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from corrupt import uniform
from data import generator
from model import Config, Context, Model, rotary, sequence_context

if TYPE_CHECKING:
    from sample import Decoding

# R rows in flight, T positions, B block_length, S keys, C channels, G key/value heads, D head dim, V vocabulary,
# L layers, n = n_last, K = n_rounds

MAX_STEPS = 1024  # forwards in one block


class KVCache:
    """Keys and values of finished blocks. Exact, not approximate: no block attends to a later one, so what a finished
    block computed can never change (tested: cached decode = uncached decode).

    A slot is one layer in one round: L slots for round 0 and n more for each further round of Stage B, whose context
    is the context's own states of that round. In a slot, keys 0..B-1 are the next block, B..2B-1 the current one (each
    rewritten by every pass that reads it) and the row's context follows. Rotation has already put the position into a
    key, so this order does not matter to attention, and the keys in use are one view without a copy, at any length.
    """

    def __init__(self, cfg: Config, lengths: list[int], n_rounds: int, device: torch.device, dtype: torch.dtype):
        self.cfg, self.B, R = cfg, cfg.block_length, len(lengths)
        slots = cfg.n_layer + max(0, n_rounds - 1) * cfg.n_last
        self.kv = torch.zeros(2, slots, R, cfg.n_kv_head, 2 * self.B, cfg.head_dim, device=device, dtype=dtype)
        self.set_lengths(lengths)
        self.filling: int | None = None  # the row whose prompt is being read, if any

    def set_lengths(self, lengths: list[int]) -> None:
        """Context tokens of each row, and room for them, doubled so that a long answer is copied only a few times."""
        self.lengths, self.length = lengths, torch.tensor(lengths, device=self.kv.device)
        self.used, room = 2 * self.B + max(lengths), self.kv.shape[4]
        if self.used > room:
            self.kv = F.pad(self.kv, (0, 0, 0, max(self.used - room, room)))
        self.contexts: dict[bool, Context] = {}  # what context() has built for these lengths

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: (R, G, T, D) of the current pass -> keys and values to attend to, (R, G, S, D)."""
        slot = layer + round * self.cfg.n_last  # round 0 has slots 0..L-1, each further round the next n
        kv, new, end, T = self.kv[:, slot], torch.stack([k, v]), 2 * self.B, k.shape[2]
        if self.filling is not None:  # the prompt's complete blocks: straight into the context, nothing before them
            kv[:, self.filling, :, end : end + T] = new[:, 0]
            return k, v
        kv[:, :, :, end - T : end] = new
        return kv[:, :, :, end - T : self.used].unbind()

    def close(self, rows: list[int]) -> None:
        """The current block of `rows` joins their context, and the next one is current."""
        at, B = torch.tensor(rows, device=self.kv.device), self.B
        place = 2 * B + self.length[at, None] + torch.arange(B, device=self.kv.device)  # (rows, B)
        self.set_lengths([n + B * (r in rows) for r, n in enumerate(self.lengths)])
        block = self.kv[:, :, at, :, B : 2 * B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)
        self.kv[:, :, at, :, B : 2 * B] = self.kv[:, :, at, :, :B]

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.kv = self.kv[:, :, rows]
        self.set_lengths([self.lengths[r] for r in rows])

    def context(self, ahead: bool = False) -> Context:
        """Context of each row's current block, or of [next ; current]; built once for as long as the lengths stay."""
        if ahead not in self.contexts:
            B, T = self.B, 2 * self.B if ahead else self.B
            order = torch.arange(T, device=self.kv.device).roll(T - B)  # B..2B-1, 0..B-1 where the next one is read
            cos, sin = rotary(self.cfg, self.length[:, None] + order, self.kv.dtype)
            mask = None
            if ahead or len(set(self.lengths)) > 1:
                key = torch.arange(-T, max(self.lengths), device=self.kv.device)  # from 0 on the context's
                mask = (key < self.length[:, None])[:, None, None]  # (R, 1, 1, S)
                # nobody sees a later block, (R, 1, T, S)
                mask = mask & ((order >= B)[:, None] | (key >= -B)) if ahead else mask
            self.contexts[ahead] = Context(cos, sin, mask, self)
        return self.contexts[ahead]


class Cached:
    """The forwards of decoding over the current blocks alone; finished blocks are keys and values."""

    def __init__(self, model: Model, prompts: list[list[int]], n_rounds: int):
        self.model, self.cfg, self.n_rounds = model, model.cfg, n_rounds
        device, dtype, B = model.wte.weight.device, model.compute_dtype, model.cfg.block_length
        lengths = [len(p) // B * B for p in prompts]
        self.cache = KVCache(model.cfg, lengths, n_rounds, device, dtype)
        for r, n in enumerate(lengths):
            if n:  # a prompt's complete blocks are read once; this is no decoding forward and not counted
                self.cache.filling = r
                ids = torch.tensor([prompts[r][:n]], device=device)
                ctx = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), dtype)
                ctx.cache = self.cache
                h = model.prefix(ids, ctx)
                for i in range(max(1, n_rounds)):  # in every round of Stage B finished positions are unmarked
                    h = model.last_n(h, replace(ctx, round=i))
        self.cache.filling = None
        self.passes = self.blocks = 0  # Stage A's forwards so far, and how many blocks of a row they read
        self.ready = self.next = None  # Stage A's states of the current and the next blocks, where a forward was ahead

    def read(self, z: Tensor, ahead: bool = False) -> None:
        """Stage A's forward of the current blocks z (R, B) and, with `ahead`, of the next ones too, which are masks."""
        B, ctx = z.shape[1], self.cache.context(ahead)
        h = self.model.prefix(F.pad(z, (B * ahead, 0), value=self.cfg.mask_id), ctx)
        both = h, self.model.last_n(h, ctx)  # prefix states and final states, (R, B or 2B, C)
        self.ready, self.next = [h[:, -B:] for h in both], [h[:, :B] for h in both] if ahead else None
        self.h_a, self.passes, self.blocks = self.ready[1], self.passes + 1, self.blocks + 1 + ahead

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """One full forward of the current blocks z (R, B), or `read`'s -> prefix states (R, B, C), logits (R, B, V)."""
        if self.ready is None:
            self.read(z)
        (h, self.h_a), self.ready = self.ready, None
        return h, self.model.head(self.h_a)

    def stage_b(self, h: Tensor, bundle: Tensor) -> Tensor:
        """Stage B from those states -> logits (R, B, V). It leaves no trace: the block's own keys stay Stage A's."""
        B = self.cfg.block_length
        current = self.cache.kv[:, self.cfg.n_layer - self.cfg.n_last :, :, :, B : 2 * B]
        kept = current.clone()
        logits = self.model.head(self.model.coordinate(h, bundle, self.cache.context(), self.n_rounds))
        current.copy_(kept)
        return logits

    def close(self, rows: list[int]) -> None:
        """The blocks of `rows` are finished, as last read. If their next ones were read beside them, and what was read
        of every other row still holds, the next stage_a has its forward."""
        h = self.h_a
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.cache.context(), round=i))
        self.cache.close(rows)
        if self.next and (self.ready or len(rows) == len(h)):
            closed = torch.tensor([r in rows for r in range(len(h))], device=h.device)[:, None, None]
            self.ready = [torch.where(closed, n, c) for n, c in zip(self.next, self.ready or self.next, strict=True)]
        self.next = None

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.cache.keep(rows)
        self.h_a, self.next = self.h_a[rows], self.next and [h[rows] for h in self.next]


@dataclass
class Output:
    """One row: generated tokens up to and with eos, forwards by kind, and every step (if a trace was asked for)."""

    tokens: list[int]
    nfe: dict[str, float]  # full: Stage A; partial: Stage B rounds, n/L of a full one each; commit: see Row.finish
    passes: int = 0  # of Stage A, one after the other, until the row was done: at most full + commit of it alone
    blocks: int = 0  # of the row that they read: one a pass, or two
    steps: list[dict] = field(default_factory=list)
    warning: str | None = None


def in_full(nfe: dict[str, float], cfg: Config) -> float:
    """Forwards of all kinds in full ones: a commit forward is one, a partial one n/L of one."""
    return nfe["full"] + nfe["commit"] + nfe["partial"] * cfg.n_last / cfg.n_layer


class Row:
    """What the host knows of one prompt."""

    def __init__(self, number: int, prompts: list[list[int]], d: "Decoding", block_length: int, seed: int):
        self.number, self.prompt, self.end = number, prompts[number], len(prompts[number]) + d.gen_length
        self.ids = self.prompt[: len(self.prompt) // block_length * block_length]  # finished blocks
        # a function of the prompt, and of how many equal prompts come before it
        self.rng = generator(seed, "sample", tuple(self.prompt), prompts[:number].count(self.prompt))
        self.output = Output([], {"full": 0, "partial": 0, "commit": 0})

    def finish(self, block: list[int], counts: list[float], changed: bool, d: "Decoding", cfg: Config) -> bool:
        """Book a finished block -> whether it was the last one. If not, the next block will read it, which takes a
        commit forward if the last one still changed it, and K - 1 passes for its states of the further rounds."""
        self.ids, out = self.ids + block, self.output
        full, partial, _ = (int(n) if n == int(n) else n for n in counts)
        new = self.ids[len(self.prompt) :]
        tokens = new[: d.gen_length]
        out.tokens = tokens[: tokens.index(cfg.eos_id) + 1] if cfg.eos_id in tokens else tokens
        last = len(self.ids) >= self.end or (d.eos_early_stop and cfg.eos_id in new and cfg.mask_id not in new)
        out.nfe["full"] += full
        out.nfe["partial"] += partial + (0 if last else max(0, d.n_rounds - 1))
        out.nfe["commit"] += changed and not last
        if cfg.mask_id in block:
            out.warning = f"a block was left with masks after {full} forwards that would never fill it"
        return last


def step_record(s: dict[str, Tensor], r: int, start: int) -> dict:
    """One step of one row in plain numbers; positions are absolute."""
    v = {k: t[r].tolist() for k, t in s.items()}
    before, after, token_a = v["before"], v["after"], v["token_a"]
    conf, conf_a = ([round(p, 4) for p in v[k]] for k in ("conf", "conf_a"))
    bundle, edited = ([i for i, here in enumerate(v[k]) if here] for k in ("bundle", "edited"))
    fill = [dict(at=start + i, token=after[i], conf=conf[i], token_a=token_a[i], conf_a=conf_a[i]) for i in bundle]
    edit = [dict(at=start + i, old=before[i], token=after[i], conf=conf[i]) for i in edited]
    bundle = [start + i for i in bundle]
    return dict(start=start, before=before, after=after, bundle=bundle, fill=fill, edit=edit, conf=conf)


@torch.inference_mode()
def decode(
    model: Model, prompts: list[list[int]], d: "Decoding", step: Callable, seed: int, trace: bool,
    on_block: Callable[[int, Output], None] | None,
) -> list[Output]:  # fmt: skip
    """Decode every prompt (ids) by `step`; `on_block(i, output so far)` is called when row i finishes a block."""
    cfg, B, device = model.cfg, model.cfg.block_length, model.wte.weight.device
    engine, rows = Cached(model, prompts, d.n_rounds), [Row(i, prompts, d, B, seed) for i in range(len(prompts))]
    outputs, rest = [row.output for row in rows], [row.prompt[len(row.ids) :] for row in rows]
    z = torch.tensor([p + [cfg.mask_id] * (B - len(p)) for p in rest], device=device)  # (R, B), the current blocks
    prompt = torch.arange(B, device=device) < torch.tensor([len(p) for p in rest], device=device)[:, None]  # (R, B)
    counts = torch.zeros(3, len(rows), device=device)  # of this block: full, partial, post steps
    # rows whose block is finished; is one to be read again; may all go on to another block; has any a mask left
    done, commit, ahead, busy = [], False, False, True
    while True:
        if commit or ahead:  # twice the positions: where a pass is due anyway, or all rows may go on with it
            engine.read(z, ahead=True)
        if done:
            engine.close(done)
            z[done], prompt[done], counts[:, done], busy = cfg.mask_id, False, 0, True
        u = torch.zeros(len(rows), 3, B, device=device)
        if d.temperature > 0:
            u = uniform([row.rng for row in rows], 3 * B).view(-1, 3, B).to(device)
        s = step(engine, z, prompt, busy, u, d)
        changed, z = (s["after"] != z).any(-1), s["after"]
        has_mask = (z == cfg.mask_id).any(-1)
        partial = s.get("partial", d.n_rounds * s["bundle"].any(-1))  # (R,); a step may say what part of a block it ran
        counts += torch.stack([torch.ones_like(partial), partial, ~has_mask])
        for r, row in enumerate(rows if trace else []):
            row.output.steps.append(step_record(s, r, len(row.ids)))
        # nothing changed and nothing ever will; or a stated bound, without which the released loop would go on for ever
        closing = ~changed & (~has_mask | (d.temperature == 0))
        closing = closing | (counts[2] > d.max_post_steps * (d.tau_t2t is not None)) | (counts[0] >= MAX_STEPS)
        full = ~(closing | has_mask | d.eos_early_stop * (z == cfg.eos_id).any(-1))
        closing, has_mask, changed, full = torch.stack([closing, has_mask, changed, full]).tolist()  # a step's one sync
        kept = []
        for r, row in enumerate(rows):
            row.output.passes, row.output.blocks = engine.passes, engine.blocks
            if not closing[r] or not row.finish(z[r].tolist(), counts[:, r].tolist(), changed[r], d, cfg):
                kept.append(r)
            if closing[r] and on_block:
                on_block(row.number, row.output)
        done = [i for i, r in enumerate(kept) if closing[r]]
        ahead = all(full[r] and len(rows[r].ids) + B < rows[r].end for r in kept)
        busy, commit = any(has_mask), any(closing[r] and changed[r] for r in kept)
        if not kept:
            return outputs
        if len(kept) < len(rows):
            engine.keep(kept)
            rows, z, prompt, counts = [rows[r] for r in kept], z[kept], prompt[kept], counts[:, kept]
