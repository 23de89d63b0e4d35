"""The fast twin of sample.generate_one: many rows at once, and the keys and values of finished
blocks kept.

Rows finish blocks at their own pace, each as if it were alone: tokens, counts and draws. The one
exception is an exact tie: a matmul over more rows may round the last bit otherwise, and so decide
between two logits that are equal.

Why keeping keys and values is exact, and no approximation (tested: cached = uncached):

    1. No block attends to a later one, so what a finished block has computed can never change.
    2. While a block is in work, each pass over it writes its keys anew; what counts is its last pass.
    3. Stage B marks the current block alone, and its keys are put back afterwards: a marked state leaves no key behind.
    4. A finished block has no mark. On it Stage B's first round is LastN(h), which is Stage A: their keys are the same.
    5. A further round reads LastN(LastN(h)) of the context, and has keys of its own.

A finished block costs no pass of its own. The forward that closes it (it finds nothing left to
change, or reads once more what the last one changed) carries the next block's first beside it, 2B
positions in one pass. If the first half was changed after all, the second is thrown away.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.util import generator, uniform
from model import Config, Context, Model, rotary, sequence_context

if TYPE_CHECKING:
    from sample import Decoding

# R rows in flight, T positions of a pass (B, or 2B with the next block), B block_length, S keys, C channels,
# G key/value heads, D head dim, V vocabulary, L layers, n = n_last, K = n_rounds

MAX_STEPS = 1024  # forwards in one block


# --- keys and values
class KVCache:
    """Keys and values of finished blocks, in slots.

    A slot is one layer in one round: L slots for round 0, which is Stage A and Stage B's first
    round, and n more for each further round. In a slot lie the keys of

        the next block   0 .. B-1       each rewritten by every pass that reads it
        the current one  B .. 2B-1
        the context      2B ..          in the order of the text

    Rotation has already put the position into a key, so this order does not matter to attention,
    and the keys in use are one view without a copy, at any length.
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
        """Context tokens of each row, and room for more than them, doubled so that a long answer is
        copied only a few times.
        """
        self.lengths = lengths
        self.length = torch.tensor(lengths, device=self.kv.device)
        self.used = 2 * self.B + max(lengths)
        if self.used >= self.kv.shape[4]:
            self.kv = F.pad(self.kv, (0, 0, 0, self.used))
        self.contexts: dict[bool, Context] = {}  # what context() has built for these lengths

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (R, G, T, D) of the current pass -> the keys and values to attend to, (R, G, S, D)
        each.
        """
        kv = self.kv[:, self.slot(layer, round)]
        new = torch.stack([k, v])
        T = k.shape[2]
        end = 2 * self.B  # of the current block

        # the prompt's complete blocks go straight into the context of their row, with nothing
        # before them
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
        longer = list(self.lengths)
        for row in rows:
            longer[row] += B
        self.set_lengths(longer)
        block = self.kv[:, :, at, :, B : 2 * B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)
        self.kv[:, :, at, :, B : 2 * B] = self.kv[:, :, at, :, :B]

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.kv = self.kv[:, :, rows]
        self.set_lengths([self.lengths[r] for r in rows])

    def context(self, ahead: bool = False) -> Context:
        """The Context of each row's current block, or of [next ; current]; built once while the
        lengths stay.
        """
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

        # a shorter row has keys in use that are none of its own: keys are numbered -T.., from 0 on
        # the context's
        key = torch.arange(-T, max(self.lengths), device=device)
        mask = key < self.length[:, None]  # (R, S)
        mask = mask[:, None, None]  # (R, 1, 1, S)
        if ahead:
            # the first B keys are the next block's, which nobody but itself sees
            is_next = offset >= B
            mask = mask & (is_next[:, None] | (key >= -B))  # (R, 1, T, S)
        return Context(cos, sin, mask, self)


# --- the forwards of decoding
class Cached:
    """Stage A and Stage B of the current blocks alone; finished blocks are keys and values.

    After a pass of Stage A, h_a (R, B, C) holds its final states: those that an extension may look
    at again.
    """

    def __init__(self, model: Model, prompts: list[list[int]], n_rounds: int):
        self.model = model
        self.cfg = model.cfg
        self.n_rounds = n_rounds
        B = model.cfg.block_length
        device = model.wte.weight.device
        lengths = [len(p) // B * B for p in prompts]  # complete blocks
        self.cache = KVCache(model.cfg, lengths, n_rounds, device, model.compute_dtype)
        for row, n in enumerate(lengths):
            if n:
                self.read_prompt(row, torch.tensor([prompts[row][:n]], device=device))
        self.passes = 0  # Stage A's forwards so far
        self.blocks = 0  # how many blocks of a row they read
        self.h_a: Tensor | None = None
        # prefix and final states that were read before they are asked for: of the current and of
        # the next blocks
        self.ready: list[Tensor] | None = None
        self.next: list[Tensor] | None = None

    def read_prompt(self, row: int, ids: Tensor) -> None:
        """A prompt's complete blocks, ids (1, T), once; this is no decoding forward and is not
        counted.
        """
        self.cache.filling = row
        real = torch.ones_like(ids, dtype=torch.bool)
        ctx = sequence_context(self.cfg, real, self.model.compute_dtype)
        ctx.cache = self.cache
        h = self.model.prefix(ids, ctx)
        for i in range(max(1, self.n_rounds)):  # finished positions are unmarked in every round
            h = self.model.last_n(h, replace(ctx, round=i))
        self.cache.filling = None

    def read(self, z: Tensor, ahead: bool = False) -> None:
        """Stage A's forward of the current blocks z (R, B) and, with `ahead`, of the next ones too,
        which are masks.
        """
        B = self.cfg.block_length
        ctx = self.cache.context(ahead)
        if ahead:
            z = F.pad(z, (B, 0), value=self.cfg.mask_id)
        h = self.model.prefix(z, ctx)
        both = [h, self.model.last_n(h, ctx)]  # prefix states and final states, (R, T, C) each

        self.ready = [states[:, -B:] for states in both]
        self.next = None
        if ahead:
            self.next = [states[:, :B] for states in both]
        self.h_a = self.ready[1]
        self.passes += 1
        self.blocks += len(z[0]) // B

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """One full forward of the current blocks z (R, B), unless `read` has made it already.

        -> prefix states (R, B, C), logits (R, B, V).
        """
        if self.ready is None:
            self.read(z)
        h, self.h_a = self.ready
        self.ready = None
        return h, self.model.head(self.h_a)

    def stage_b(self, h: Tensor, bundle: Tensor) -> Tensor:
        """Stage B from those prefix states -> logits (R, B, V). The block's own keys stay Stage
        A's.
        """
        B = self.cfg.block_length
        first = self.cfg.n_layer - self.cfg.n_last
        current = self.cache.kv[:, first:, :, :, B : 2 * B]
        unmarked = current.clone()
        h = self.model.coordinate(h, bundle, self.cache.context(), self.n_rounds)
        current.copy_(unmarked)
        return self.model.head(h)

    def close(self, rows: list[int]) -> None:
        """The blocks of `rows` are finished, as last read."""
        # their keys of the further rounds
        h = self.h_a
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.cache.context(), round=i))
        self.cache.close(rows)

        # if their next blocks were read beside them, and what was read of every other row still
        # holds, the next stage_a has its forward
        others_hold = self.ready is not None or len(rows) == len(h)
        if self.next is not None and others_hold:
            closed = torch.tensor([r in rows for r in range(len(h))], device=h.device)[:, None, None]
            current = self.next
            if self.ready is not None:
                current = self.ready
            self.ready = [torch.where(closed, n, c) for n, c in zip(self.next, current, strict=True)]
        self.next = None

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.cache.keep(rows)
        self.h_a = self.h_a[rows]
        if self.next is not None:
            self.next = [states[rows] for states in self.next]


# --- what comes out
@dataclass
class Output:
    """One row."""

    tokens: list[int]  # generated, up to and with eos
    # forwards: full, Stage A; partial, Stage B's rounds; commit, a finished block read once more,
    # see Row.finish
    nfe: dict[str, float]
    passes: int = 0  # of Stage A, one after the other, until the row was done: at most full + commit of it alone
    blocks: int = 0  # of the row that they read: one a pass, or two
    steps: list[dict] = field(default_factory=list)  # if a trace was asked for
    warning: str | None = None


def in_full(nfe: dict[str, float], partial_cost: float) -> float:
    """Forwards of all kinds in full ones. A commit forward is one, a partial one model.partial_cost
    of one.
    """
    return nfe["full"] + nfe["commit"] + nfe["partial"] * partial_cost


def up_to_eos(tokens: list[int], eos_id: int) -> list[int]:
    """[5, 7, eos, 3] -> [5, 7, eos]"""
    if eos_id in tokens:
        return tokens[: tokens.index(eos_id) + 1]
    return tokens


class Row:
    """What the host knows of one prompt."""

    def __init__(self, number: int, prompts: list[list[int]], d: "Decoding", cfg: Config, seed: int):
        self.number = number
        self.prompt = prompts[number]
        self.d = d
        self.cfg = cfg
        self.end = len(self.prompt) + d.gen_length
        # finished blocks, and what the prompt has of the current one
        whole = len(self.prompt) // cfg.block_length * cfg.block_length
        self.ids = self.prompt[:whole]
        self.rest = self.prompt[whole:]
        # random numbers are a function of the prompt, and of how many equal prompts come before it
        twins = prompts[:number].count(self.prompt)
        self.rng = generator(seed, "sample", tuple(self.prompt), twins)
        self.output = Output([], {"full": 0, "partial": 0, "commit": 0})

    def finish(self, block: list[int], counts: list[float], changed: bool) -> bool:
        """Book a finished block, with its full and partial forwards -> whether it was the last one.

        If it was not, the next block will read it: that takes a commit forward if the last one
        still changed it, and K - 1 partial ones for its states of the further rounds.
        """
        d = self.d
        out = self.output
        full, partial = counts
        self.ids = self.ids + block
        new = self.ids[len(self.prompt) :]
        out.tokens = up_to_eos(new[: d.gen_length], self.cfg.eos_id)
        ended = d.eos_early_stop and self.cfg.eos_id in new and self.cfg.mask_id not in new
        last = ended or len(self.ids) >= self.end

        out.nfe["full"] += whole_number(full)
        out.nfe["partial"] += whole_number(partial)
        if not last:
            out.nfe["partial"] += max(0, d.n_rounds - 1)
            out.nfe["commit"] += int(changed)
        if self.cfg.mask_id in block:
            out.warning = f"a block was left with masks after {full:g} forwards that would never fill it"
        return last

    def has_another_block(self) -> bool:
        return len(self.ids) + self.cfg.block_length < self.end


def whole_number(count: float) -> float:
    """3.0 -> 3, for counts that are whole; an extension may run a part of a block, and then they
    are not.
    """
    if count == int(count):
        return int(count)
    return count


def step_record(s: dict[str, Tensor], r: int, start: int) -> dict:
    """One step of row r in plain numbers; positions are absolute."""
    of_row = {name: tensor[r].tolist() for name, tensor in s.items()}
    conf = [round(p, 4) for p in of_row["conf"]]
    conf_a = [round(p, 4) for p in of_row["conf_a"]]
    bundle = places(of_row["bundle"])

    fill = []
    for i in bundle:
        written = dict(at=start + i, token=of_row["after"][i], conf=conf[i])
        fill.append(written | dict(token_a=of_row["token_a"][i], conf_a=conf_a[i]))
    edit = []
    for i in places(of_row["edited"]):
        edit.append(dict(at=start + i, old=of_row["before"][i], token=of_row["after"][i], conf=conf[i]))
    record = dict(
        start=start, before=of_row["before"], after=of_row["after"], bundle=[start + i for i in bundle],
        fill=fill, edit=edit, conf=conf,
    )  # fmt: skip

    # an extension may leave masked what it is not sure of
    if "refused" in of_row:
        token = of_row["token"]
        record["refused"] = [dict(at=start + i, token=token[i], conf=conf[i]) for i in places(of_row["refused"])]
    return record


def places(here: list[bool]) -> list[int]:
    """[False, True, True] -> [1, 2]"""
    return [i for i, true in enumerate(here) if true]


# --- the loop
def first_blocks(rows: list[Row], cfg: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first blocks (R, B) int64: the rest of the prompt, then masks; and where the prompt is,
    (R, B) bool.
    """
    B = cfg.block_length
    z = torch.tensor([row.rest + [cfg.mask_id] * (B - len(row.rest)) for row in rows], device=device)
    rest = torch.tensor([len(row.rest) for row in rows], device=device)
    return z, torch.arange(B, device=device) < rest[:, None]


def random_numbers(rows: list[Row], d: "Decoding", B: int) -> Tensor:
    """(R, 3, B) in [0, 1), of each row's own generator; zeros where nothing is drawn."""
    if d.temperature == 0:
        return torch.zeros(len(rows), 3, B)
    return uniform([row.rng for row in rows], 3 * B).view(-1, 3, B)


def is_finished(changed: Tensor, masked: Tensor, counts: Tensor, d: "Decoding") -> Tensor:
    """Which rows' blocks are finished, (R,) bool: nothing changes any more, or a bound is reached.

    changed, masked (R,) bool: did the step change the block, has it a mask left. counts (3, R), see
    `decode`.
    """
    still = ~changed
    if d.temperature > 0:  # a sampled step may change nothing, and the next one something
        still = still & ~masked
    post_steps = d.max_post_steps if d.edits else 0  # without edits nothing can happen after the last mask
    return still | (counts[2] > post_steps) | (counts[0] >= MAX_STEPS)


@torch.inference_mode()
def decode(
    model: Model, prompts: list[list[int]], d: "Decoding", step: Callable, seed: int, trace: bool,
    on_block: Callable[[int, Output], None] | None,
) -> list[Output]:  # fmt: skip
    """Decode every prompt (ids) by `step`; `on_block(i, output so far)` is called when row i
    finishes a block.
    """
    cfg = model.cfg
    device = model.wte.weight.device
    engine = Cached(model, prompts, d.n_rounds)
    rows = [Row(i, prompts, d, cfg, seed) for i in range(len(prompts))]
    outputs = [row.output for row in rows]
    z, prompt = first_blocks(rows, cfg, device)
    counts = torch.zeros(3, len(rows), device=device)  # of these blocks: full, partial, steps without a mask

    any_masked = True
    closed: list[int] = []  # rows whose block is finished
    read_ahead = False
    while True:
        # finished blocks join the context. One pass over twice the positions serves two ends: it
        # reads again what the last step has changed, and it reads the blocks that come next
        if read_ahead:
            engine.read(z, ahead=True)
        if closed:
            engine.close(closed)
            z[closed] = cfg.mask_id
            prompt[closed] = False
            counts[:, closed] = 0
            any_masked = True

        # one step
        u = random_numbers(rows, d, cfg.block_length).to(device)
        s = step(engine, z, prompt, any_masked, u, d)
        changed = (s["after"] != z).any(-1)  # (R,)
        z = s["after"]

        # what it cost; an extension's step may say what part of a block it ran
        masked = (z == cfg.mask_id).any(-1)
        partial = s.get("partial", d.n_rounds * s["bundle"].any(-1))
        counts += torch.stack([torch.ones_like(partial), partial, ~masked])
        if trace:
            for r, row in enumerate(rows):
                row.output.steps.append(step_record(s, r, len(row.ids)))

        # which blocks are finished, and which rows could go on with their next block at once,
        # should the next forward find nothing to change in this one
        finished = is_finished(changed, masked, counts, d)
        goes_on = ~(finished | masked)
        if d.eos_early_stop:
            goes_on = goes_on & ~(z == cfg.eos_id).any(-1)

        # a step's one wait for the device
        finished, masked, changed, goes_on = torch.stack([finished, masked, changed, goes_on]).tolist()
        staying = []
        for r, row in enumerate(rows):
            row.output.passes = engine.passes
            row.output.blocks = engine.blocks
            last = finished[r] and row.finish(z[r].tolist(), counts[:2, r].tolist(), changed[r])
            if not last:
                staying.append(r)
            if finished[r] and on_block:
                on_block(row.number, row.output)
        if not staying:
            return outputs

        # the next pass reads ahead where a commit forward is due anyway, or where all rows may go
        # on with it
        any_masked = any(masked)
        closed = [place for place, r in enumerate(staying) if finished[r]]
        commit_due = any(finished[r] and changed[r] for r in staying)
        all_go_on = all(goes_on[r] and rows[r].has_another_block() for r in staying)
        read_ahead = commit_due or all_go_on
        if len(staying) < len(rows):
            engine.keep(staying)
            rows = [rows[r] for r in staying]
            z = z[staying]
            prompt = prompt[staying]
            counts = counts[:, staying]
