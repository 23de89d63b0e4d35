"""The forwards that decoding makes, of the current blocks alone: keys and values of finished blocks are kept.

This is exact, because:

    1. No block attends to a later one, so the keys and values of a finished block can never change.
    2. Each pass over the current block writes its keys anew, so the keys of the last pass are kept.
    3. Stage B marks only the current block. Afterwards the unmarked keys are put back, so no marked key stays.
    4. A finished block has no marker. On it Stage B's first round is LastN(h), which is Stage A, with the same keys.
    5. A further round computes LastN(LastN(h)) of the finished blocks, which has other keys. These are kept as well.

Tests check that this equals sample.generate_one, which reads the whole text every time, in fp32. In bf16 they differ by
rounding.

With edits, the last pass over a block usually changes no token, and then its keys are those of the final tokens. If it
has changed a token, as it always has without edits, the block is read once more. This is a refresh. In blocks of one
token the next step reads that token along with its own mask, so a left-to-right model takes one forward a token.
"""

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config
from lib.util import fail, generator
from model import Context, Model, block_causal_mask, rotary

# R rows that are being decoded, T positions of a pass, B block_length, S keys, C channels, G key/value heads,
# D head dim, L layers, n = n_last, K = n_rounds

PIECE = 512  # so many tokens of a prompt are read at a time, in whole blocks


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
        self.n_rounds = n_rounds
        slots = cfg.n_layer + max(0, n_rounds - 1) * cfg.n_last
        shape = (2, slots, len(lengths), cfg.n_kv_head, self.B, cfg.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)  # (2, slots, R, G, room, D): keys, then values
        # while a prompt is read: the rows that have this prompt, and how many of its tokens have been read
        self.filling: tuple[list[int], int] | None = None
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Set how many finished tokens each row has, and make room for them; a room too small at least doubles."""
        self.lengths = lengths
        self.length = torch.tensor(lengths, device=self.kv.device)
        self.used = self.B + max(lengths)
        if self.used >= self.kv.shape[4]:
            self.kv = F.pad(self.kv, (0, 0, 0, self.used))

        # the Context of a pass over the current blocks
        offset = torch.arange(self.B, device=self.kv.device)
        cos, sin = rotary(self.cfg, self.length[:, None] + offset, self.kv.dtype)

        # a row attends to its current block, and to its own finished blocks that are in the window
        key = torch.arange(-self.B, max(self.lengths), device=self.kv.device)
        length = self.length[:, None, None, None]
        mask = key < length  # (R, 1, 1, S)
        if self.cfg.window:
            blocks_back = length // self.B - key // self.B
            mask = mask & ((key < 0) | (blocks_back * self.B < self.cfg.window))
        self.context = Context(cos, sin, mask, self.add_keys, n_rounds=self.n_rounds)

    def add_keys(self, slot: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (R, G, T, D) of this pass -> what it attends to, (R, G, S, D) each; see Context.add_keys."""
        kv = self.kv[:, slot + i_round * self.cfg.n_last]  # round 0 has the slots 0..L-1, a further one the next n
        new = torch.stack([k, v])

        # a piece of a prompt: its blocks are finished blocks of these rows, after those that have been read
        if self.filling:
            rows, read = self.filling
            end = self.B + read + k.shape[2]
            kv[:, rows, :, self.B + read : end] = new
            return kv[:, rows[:1], :, self.B : end].unbind()

        # a pair: the token before, which is the last of the finished ones, and the current block of one token
        if k.shape[2] > self.B:
            row = torch.arange(len(self.length), device=k.device)
            kv[:, row, :, self.B + self.length - 1] = new[:, :, :, 0].transpose(0, 1)
            new = new[:, :, :, 1:]
        kv[:, :, :, : self.B] = new
        return kv[:, :, :, : self.used].unbind()

    def close(self, rows: list[int]) -> None:
        """The current block of `rows` is finished: copy its keys after those of their finished blocks."""
        at = torch.tensor(rows, device=self.kv.device)
        # where the block goes: behind the row's finished blocks
        place = self.B + self.length[at, None] + torch.arange(self.B, device=self.kv.device)  # (rows, B)
        self.set_lengths([n + self.B * (row in rows) for row, n in enumerate(self.lengths)])
        block = self.kv[:, :, at, :, : self.B]  # (2, slots, rows, G, B, D)
        self.kv[:, :, at[:, None], :, place] = block.permute(2, 4, 0, 1, 3, 5)

    def keep(self, rows: list[int]) -> None:
        """Keep these rows alone, in this order; a row may be there several times."""
        self.kv = self.kv[:, :, rows]
        self.set_lengths([self.lengths[r] for r in rows])

    def context_of_pair(self) -> Context:
        """The Context of a pass over the last finished token and the current block of one token."""
        ctx = self.context
        cos, sin = rotary(self.cfg, self.length[:, None] + torch.tensor([-1, 0], device=self.kv.device), self.kv.dtype)
        key = torch.arange(-1, max(self.lengths), device=self.kv.device)
        length = self.length[:, None, None, None]
        window = self.cfg.window or self.used
        before = (key >= 0) & (key < length) & (length - 1 - key < window)  # what the token before sees
        return replace(ctx, cos=cos, sin=sin, mask=torch.cat([before, ctx.mask], dim=2))


# --- forwards of the current blocks
class Engine:
    """Stage A and Stage B of the current blocks, with the keys and values of the finished ones."""

    def __init__(self, model: Model, finished: list[list[int]], n_rounds: int, pairs: bool = False):
        """finished: the ids of each row's finished blocks. n_rounds: K, or 0 if Stage B is off. pairs: a step reads the
        token before along with its block of one token, see decoding.reads_pairs."""
        self.model = model
        self.cfg = model.cfg
        self.n_rounds = n_rounds
        self.pairs = pairs
        self.unread: Tensor | None = None  # (R, 1) int64: the tokens before, if their keys are still those of masks
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

    def read_prompt(self, rows: list[int], ids: Tensor) -> None:
        """Read the complete blocks of these rows' prompt, ids (1, T). This is not a forward of decoding, and is not
        counted."""
        B = self.cfg.block_length
        piece = max(1, PIECE // B) * B
        for at, part in zip(range(0, ids.shape[1], piece), ids.split(piece, dim=1), strict=True):
            end = at + part.shape[1]
            self.cache.filling = (rows, at)
            cos, sin = rotary(self.cfg, torch.arange(at, end, device=ids.device), self.model.compute_dtype)
            mask = block_causal_mask(end, B, self.cfg.window or end, ids.device, first=at)
            ctx = Context(cos, sin, mask, self.cache.add_keys)
            h = self.model.prefix(part, ctx)
            for i in range(max(1, self.n_rounds)):  # finished positions are unmarked in every round
                h = self.model.last_n(h, replace(ctx, i_round=i))
        self.cache.filling = None

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """One full forward: z (R, B) -> prefix states and final states, (R, B, C) each."""
        ctx = self.cache.context
        n = z.shape[1]
        if self.unread is not None:
            z = torch.cat([self.unread, z], dim=1)
            ctx = self.cache.context_of_pair()
            self.unread = None
        h = self.model.prefix(z, ctx)
        self.states = self.model.last_n(h, ctx)[:, -n:]
        return h[:, -n:], self.states

    def stage_b(self, h: Tensor, bundle: Tensor, tokens: Tensor) -> Tensor:
        """Stage B on these prefix states h (R, B, C), see Model.coordinate: final states (R, B, C). The keys that it
        leaves for the current block are its own, so afterwards those of Stage A are put back."""
        if self.n_rounds == 0:
            fail("this step runs Stage B, and n_rounds is 0: give a Decoding with rounds")
        first = self.cfg.n_layer - self.cfg.n_last
        current = self.cache.kv[:, first:, :, :, : self.cfg.block_length]
        unmarked = current.clone()
        states = self.model.coordinate(h, bundle, tokens, self.cache.context)
        current.copy_(unmarked)
        return states

    def close(self, rows: list[int], z: Tensor, changed: bool) -> None:
        """The blocks z (R, B) of `rows` are finished. changed: did the last step change any of them?"""
        if changed and self.pairs and len(rows) == len(z):
            self.unread = z
        elif changed:
            self.stage_a(z)

        # make their keys of the further rounds
        h = self.states
        for i in range(1, self.n_rounds):
            h = self.model.last_n(h, replace(self.cache.context, i_round=i))
        self.cache.close(rows)

    def keep(self, rows: list[int]) -> None:
        """Drop the other rows, which are finished."""
        self.cache.keep(rows)
        self.states = self.states[rows]
        self.unread = None if self.unread is None else self.unread[rows]

    def several(self, U: int) -> "Engine":
        """A new engine with U copies of each row side by side; this one stays as it is."""
        other = copy.copy(self)
        other.cache = copy.copy(self.cache)
        other.keep([row for row in range(len(self.cache.lengths)) for _ in range(U)])
        return other


# --- is what is trained what decodes?
@torch.no_grad()
def check_stage_b(model: Model) -> None:
    """Refuse a Stage B that computes something else in training, where whole rows are read beside their clean copy,
    than in decoding, where a block is read after the finished ones before it, beside blocks of other rows. It is tried
    with noise on Stage B's own parameters, for what is zero would hide a mistake. Raises Mistake."""
    check_own(model)
    B = model.cfg.block_length
    device = model.wte.weight.device
    g = generator("check_stage_b")
    own = {name: tensor.clone() for name, tensor in model.own().items()}
    for tensor in model.own().values():
        tensor += (0.1 * torch.randn(tensor.shape, generator=g)).to(tensor)
    dtype, model.compute_dtype = model.compute_dtype, torch.float32

    # training: three rows of three blocks, in which a third of the tokens are masks, and most masks are the bundle
    clean = torch.randint(model.cfg.vocab_size, (3, 3 * B), generator=g).to(device)
    chance = torch.rand(clean.shape, generator=g).to(device)
    chance[:, ::B] = 0.0  # each block has one
    z = clean.masked_fill(chance < 0.33, model.cfg.mask_id)
    bundle = chance < 0.25
    tokens = torch.where(bundle, clean, z)
    ctx = model.read_clean(clean, torch.ones_like(bundle))
    h = model.prefix(z, ctx)
    trained = model.logits(model.coordinate(h, bundle, tokens, ctx))

    # if Stage B is told true tokens, which are not Stage A's drafts, no position may read one at its own place or on
    # its right: another token at place i of each block may not move what is found at places 0..i
    states = model.last_n(h, ctx)[bundle]
    told = model.told(clean[bundle], states)
    moved = 0.0
    if ((told == clean[bundle]) & (told != model.drafts(states))).any():
        for i in range(B):
            other = tokens.clone()
            other[:, i::B] = (tokens[:, i::B] + 1) % model.cfg.vocab_size
            change = model.logits(model.coordinate(h, bundle, other, ctx)) - trained
            moved = max(moved, float(change.unflatten(1, (3, B))[:, :, : i + 1].abs().max() / trained.std()))

    # decoding: the rows together, each in another block
    row = torch.arange(3, device=device)[:, None]
    place = row * B + torch.arange(B, device=device)
    engine = Engine(model, [clean[r, : r * B].tolist() for r in range(3)], model.cfg.n_rounds)
    h, _ = engine.stage_a(z[row, place])
    keys = engine.cache.kv.clone()
    decoded = model.logits(engine.stage_b(h, bundle[row, place], tokens[row, place]))
    intact = torch.equal(engine.cache.kv, keys)
    off = float((decoded - trained[row, place]).abs().max() / trained.std())

    for name, tensor in own.items():
        model.own()[name].copy_(tensor)
    model.compute_dtype = dtype

    # in its own dtype an error comes now, and not when a trained model decodes
    engine = Engine(model, [[]] * 3, model.cfg.n_rounds)
    engine.stage_b(engine.stage_a(z[:, :B])[0], bundle[:, :B], tokens[:, :B])
    if moved > 1e-3:
        fail("Stage B sees the answer while it learns: it is told true tokens, and a position reads its own, or "
             "one on its right; see Model.told")  # fmt: skip
    if not intact:
        fail("Stage B leaves keys of its own in the place of Stage A's: a layer of it has the slot of a layer that it "
             "does not run again")  # fmt: skip
    if not off < 1e-3:
        fail(f"Stage B computes something else in training than in decoding: its logits differ by {off:.2g} of their "
             "spread. It may read other blocks than its own, or later tokens, or draw something")  # fmt: skip


def check_own(model: Model) -> None:
    """Refuse layers and tensors of Stage B's own that an adapter could not hold. Raises Mistake."""
    for name, tensor in model.own().items():
        if not tensor.is_floating_point():
            fail(f"{name} is {tensor.dtype}, and an adapter holds floats alone: make it torch.float32")

    # PyTorch keeps what it knows of in attributes that begin with _
    for name, value in vars(model).items():
        items = [value]
        if isinstance(value, (list, tuple)):
            items = value
        if isinstance(value, dict):
            items = value.values()
        if not name.startswith("_") and any(isinstance(item, (nn.Module, Tensor)) for item in items):
            fail(f"self.{name} hides layers or tensors, which neither learn nor are saved: make it an nn.ModuleList, "
                 "nn.ModuleDict, nn.Parameter or buffer")  # fmt: skip
