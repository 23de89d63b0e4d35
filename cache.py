"""The fast twin of sample.generate_one: many rows at once, and the keys and values of finished blocks kept.

Rows finish blocks at their own pace, each as if it were alone: tokens, counts and draws. The one exception is an exact
tie: a matmul over more rows may round the last bit otherwise, and so decide between two logits that are equal.
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
    is the context's own states of that round. In a slot, keys 0..B-1 are the current block (rewritten by every pass)
    and the row's context follows. Rotation has already put the position into a key, so this order does not matter to
    attention, and the keys in use are one view without a copy, however long each row's context is.
    """

    def __init__(self, cfg: Config, lengths: list[int], n_rounds: int, device: torch.device, dtype: torch.dtype):
        self.cfg, self.B = cfg, cfg.block_length
        slots = cfg.n_layer + max(0, n_rounds - 1) * cfg.n_last
        self.kv = torch.zeros(2, slots, len(lengths), cfg.n_kv_head, self.B, cfg.head_dim, device=device, dtype=dtype)
        self.set_lengths(lengths)
        self.filling: int | None = None  # the row whose prompt is being read, if any

    def set_lengths(self, lengths: list[int]) -> None:
        """Context tokens of each row, and room for them, doubled so that a long answer is copied only a few times."""
        self.lengths, self.length = lengths, torch.tensor(lengths, device=self.kv.device)
        self.used, room = self.B + max(lengths), self.kv.shape[4]
        if self.used > room:
            self.kv = F.pad(self.kv, (0, 0, 0, max(self.used - room, room)))

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: (R, G, T, D) of the current pass -> keys and values to attend to, (R, G, S, D)."""
        slot = layer + round * self.cfg.n_last  # round 0 has slots 0..L-1, each further round the next n
        keys, values = self.kv[0, slot], self.kv[1, slot]
        if self.filling is not None:  # the prompt's complete blocks: straight into the context, nothing before them
            keys[self.filling, :, self.B : self.B + k.shape[2]] = k[0]
            values[self.filling, :, self.B : self.B + k.shape[2]] = v[0]
            return k, v
        keys[:, :, : self.B] = k
        values[:, :, : self.B] = v
        return keys[:, :, : self.used], values[:, :, : self.used]

    def close(self, rows: list[int]) -> None:
        """The current block of `rows` joins their context."""
        at = torch.tensor(rows, device=self.kv.device)
        place = self.B + self.length[at, None] + torch.arange(self.B, device=self.kv.device)  # (rows, B)
        self.set_lengths([n + self.B * (r in rows) for r, n in enumerate(self.lengths)])
        block = self.kv[:, :, at, :, : self.B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.kv = self.kv[:, :, rows]
        self.set_lengths([self.lengths[r] for r in rows])

    def context(self) -> Context:
        """Context of each row's current block."""
        cos, sin = rotary(self.cfg, self.length[:, None] + torch.arange(self.B, device=self.kv.device), self.kv.dtype)
        mask = None
        if len(set(self.lengths)) > 1:
            key = torch.arange(self.used, device=self.kv.device)
            mask = (key < self.B + self.length[:, None])[:, None, None]  # (R, 1, 1, S)
        return Context(cos, sin, mask, self)


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

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """One full forward of the current blocks z (R, B) -> prefix states (R, B, C), logits (R, B, V)."""
        self.ctx = self.cache.context()
        h = self.model.prefix(z, self.ctx)
        self.h_a = self.model.last_n(h, self.ctx)
        return h, self.model.head(self.h_a)

    def stage_b(self, h: Tensor, bundle: Tensor) -> Tensor:
        """Stage B from those states -> logits (R, B, V). It leaves no trace: the block's own keys stay Stage A's."""
        current = self.cache.kv[:, self.cfg.n_layer - self.cfg.n_last :, :, :, : self.cfg.block_length]
        kept = current.clone()
        logits = self.model.head(self.model.coordinate(h, bundle, self.ctx, self.n_rounds))
        current.copy_(kept)
        return logits

    def close(self, z: Tensor, rows: list[int], changed: bool) -> None:
        """The blocks of `rows` are finished; if the last forward still changed one, it is read once more (a commit)."""
        if changed:
            self.stage_a(z)
        h = self.h_a
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.ctx, round=i))
        self.cache.close(rows)


@dataclass
class Output:
    """One row: generated tokens up to and with eos, forwards by kind, and every step (if a trace was asked for)."""

    tokens: list[int]
    nfe: dict[str, float]  # full: Stage A; partial: Stage B rounds, n/L of a full one each; commit: see Row.finish
    steps: list[dict] = field(default_factory=list)
    warning: str | None = None


class Row:
    """What the host knows of one prompt."""

    def __init__(self, number: int, prompts: list[list[int]], block_length: int, seed: int):
        self.number, self.prompt = number, prompts[number]
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
        last = len(new) >= d.gen_length or (d.eos_early_stop and cfg.eos_id in new and cfg.mask_id not in new)
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
    rows, engine = [Row(i, prompts, B, seed) for i in range(len(prompts))], Cached(model, prompts, d.n_rounds)
    outputs = [row.output for row in rows]
    z = torch.zeros(len(rows), B, dtype=torch.long, device=device)  # (R, B), the current blocks
    prompt = torch.zeros_like(z, dtype=torch.bool)  # (R, B), what of them is prompt
    counts = torch.zeros(3, len(rows), device=device)  # of this block: full, partial, post steps
    busy, opening = True, range(len(rows))  # whether any row has a mask left; the rows whose block begins
    while rows:
        for r in opening:
            rest = rows[r].prompt[len(rows[r].ids) :]  # what is left of the prompt, and then masks
            z[r] = torch.tensor(rest + [cfg.mask_id] * (B - len(rest)), device=device)
            prompt[r], counts[:, r], busy = torch.arange(B, device=device) < len(rest), 0, True
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
        closing = closing | (counts[2] > d.max_post_steps) | (counts[0] >= MAX_STEPS)
        closing, has_mask, changed = torch.stack([closing, has_mask, changed]).tolist()  # the one sync of a step
        busy, opening = any(has_mask), []
        if not any(closing):
            continue
        going = []  # the closing rows that have a further block
        for r in (r for r, ends in enumerate(closing) if ends):
            if not rows[r].finish(z[r].tolist(), counts[:, r].tolist(), changed[r], d, cfg):
                going.append(r)
            if on_block:
                on_block(rows[r].number, rows[r].output)
        if going:
            engine.close(z, going, any(changed[r] for r in going))
        kept = [r for r, ends in enumerate(closing) if not ends or r in going]
        if 0 < len(kept) < len(rows):
            engine.cache.keep(kept)
        opening = [kept.index(r) for r in going]
        rows, z, prompt, counts = [rows[r] for r in kept], z[kept], prompt[kept], counts[:, kept]
    return outputs
