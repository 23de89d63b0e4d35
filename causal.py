"""Causal Stage B: our one change to the paper. Read model.py, train.py and sample.py first, and then this.

The paper's Stage B knows which masks are being filled, but not with what. Here each position of the bundle is also
shown x_{i-1}, the token on its left, through a learned matrix, Show:

    h_i + marker   becomes   h_i + rms(h_i) * (marker + Show(norm(x_{i-1})))

h_i is what the first L - n layers give at position i, rms(h_i) is its size, and norm(x_{i-1}) is the embedding of the
token, normalised. (The first position of a block is shown a mask: it reads the blocks before its own by attention.) A
position of the bundle sees itself, the bundle on its left, and all that is outside the bundle. Positions outside see
none of it.

In training x_{i-1} is the right token. So the paper's own sum of cross-entropies over the bundle is
-log prod p(x_i | x_<i) = -log p(bundle), by the chain rule. This is a joint loss: at its optimum no total correlation
is lost (results/theorem).

In decoding x_{i-1} is a draft at first, which is Stage A's token. A pass of Stage B reads the next `lookahead`
positions that are not final, with their drafts. A token is final when all tokens that it has read are final. These
are the tokens that one would get from left to right, one at a time (Jacobi decoding). Stage B's keys of final positions
are kept, so no position is read again once it is final. Each pass costs n/L of a forward.

What else is not the paper's:

    layers      Stage B begins as a copy of the base's last n layers, and all weights of the copy learn. The base is
                frozen, so Stage A stays as it was, bit for bit
    training    every corrupted token is a mask, all masks of a block are its bundle, and the blocks before it are
                clean. A share of the blocks is masked whole (--whole_share)
    decoding    all masks of a block are the bundle, nothing is edited, and [M] is never written

    python train.py --config configs/text.toml                          # that is --stage_b causal, on a base of text
    python sample.py --ckpt assets/shakespeare/causal --prompt "ROMEO:" --temperature 1
    python sample.py --ckpt assets/names/causal --prompt "CANADIAN" --beam 4
"""

import math
from argparse import Namespace
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache import Engine
from config import Config
from corrupt import kinds, of_blocks
from decoding import Decoding, Step, candidates
from lib.rows import Batch
from lib.util import fail, uniform
from model import Context, Layer, Model

# R rows, T positions, B block_length, P positions of a pass, U texts of a beam, S keys, C channels, V vocabulary,
# n = n_last

HOLE_SHARE = 0.5  # of the blocks that are not masked whole, the share in which masks are anywhere: see blocks_to_write


# --- what a position of the bundle is shown, and whom it sees
def token_before(tokens: Tensor, block_length: int, mask_id: int) -> Tensor:
    """The token on the left of each position in its block; the first position has a mask there. (R, T) -> (R, T)

    blocks of 3:    tokens  a b c d e f    ->    [M] a b [M] d e
    """
    blocks = tokens.unflatten(1, (-1, min(block_length, tokens.shape[1])))
    return F.pad(blocks[..., :-1], (1, 0), value=mask_id).flatten(1)


def bundle_mask(bundle: Tensor, ctx: Context) -> Tensor:
    """Who sees whom: (R, 1, T, S) bool, query by key. The T keys of the pass itself come first.

    Positions 1 and 2 of three are the bundle:      1 . .
                                                    1 1 .
                                                    1 1 1
    """
    T = bundle.shape[1]
    left = torch.ones(T, T, dtype=torch.bool, device=bundle.device).tril()
    sees = ~bundle[:, None, :] | (bundle[:, :, None] & left)  # (R, T, T)

    # the keys of earlier blocks are seen as in Stage A
    sees = F.pad(sees, (0, ctx.mask.shape[-1] - T), value=True)[:, None]
    return sees & ctx.mask


# --- the model
class CausalModel(Model):
    def __init__(self, cfg: Config):
        if cfg.n_rounds != 1:
            fail(f"causal Stage B has one marker: give --n_rounds 1, not {cfg.n_rounds}")
        super().__init__(cfg)
        # its own last n layers, and Show, which takes the embedding of the token on the left
        self.layers_b = nn.ModuleList(Layer(cfg, i) for i in range(cfg.n_layer - cfg.n_last, cfg.n_layer))
        self.show = nn.Parameter(torch.zeros(cfg.n_embd, cfg.n_embd))

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        """Stage B in one pass. Its layers read Stage A's keys of the blocks before a block.

        h (R, T, C): prefix states. bundle (R, T) bool. tokens (R, T) int64: right tokens or drafts in the bundle, and z
        elsewhere -> (R, T, C)
        """
        before = token_before(tokens, self.cfg.block_length, self.cfg.mask_id)
        sees = bundle_mask(bundle, ctx)
        return self.run_layers(self.mark(h, bundle, before), replace(ctx, mask=sees), self.layers_b)

    def mark(self, h: Tensor, bundle: Tensor, before: Tensor) -> Tensor:
        """The states with the marker and the token before, in the bundle: h (R, T, C), bundle and before (R, T)."""
        shown = F.rms_norm(self.wte(before).float(), [self.cfg.n_embd])
        note = self.markers[0] + F.linear(shown, self.show.float())
        size = h.float().square().mean(-1, keepdim=True).sqrt()
        return h + bundle[..., None] * (size * note).to(h.dtype)

    def told(self, clean: Tensor, states: Tensor) -> Tensor:
        """The right tokens: no position sees its own, nor one on its right."""
        return clean

    def adapt(self, r: int, generator: torch.Generator) -> None:
        """Freeze the base, and let learn what is beside it. There is no LoRA, so its rank r does nothing."""
        super().adapt(0, generator)

    def begin_from(self, state: dict[str, Tensor]) -> None:
        """As Model.begin_from, but its own layers begin as a copy of the base's last n."""
        first = self.cfg.n_layer - self.cfg.n_last
        for name in self.state_dict():
            if name.startswith("layers_b."):
                _, i, rest = name.split(".", 2)
                state.setdefault(name, state[f"layers.{first + int(i)}.{rest}"].clone())
        super().begin_from(state)


# --- training: train.cocommit_step, with these masks and this bundle
def blocks_to_write(model: CausalModel, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """What the model is shown, and the bundle: z, kind and bundle, (R, T) each. A random number picks how a block is
    masked. All of its masks are the bundle, as in decoding.

    to write it whole   ▒▒▒▒▒▒▒▒    a share of whole_share
    to continue it      abc▒▒▒▒▒    masked from a random place on
    to fill holes       a▒c▒e▒gh    each position with a probability from U(0, 1)
    """
    T = batch.clean.shape[1]
    B = model.cfg.block_length
    which = of_blocks(batch.draws, T, B)
    whole = which < args.whole_share
    as_holes = which >= args.whole_share + (1 - args.whole_share) * (1 - HOLE_SHARE)

    # u: in a block with holes the share of masks; in a block to continue the place where they begin
    u = of_blocks(batch.draws, T, B)
    place = torch.arange(T) % B
    holes = uniform(batch.draws, T) < u
    rest = place >= (u * B).long()
    masked = whole | torch.where(as_holes, holes, rest)

    bundle = batch.corruptible & masked.to(batch.clean.device)
    z = batch.clean.masked_fill(bundle, model.cfg.mask_id)
    return z, kinds(batch.clean, z, batch.corruptible, model.cfg.mask_id), bundle


# --- decoding
def causal_denoise(engine: Engine, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """One step on the current blocks z (R, B) int64, as sample.denoise. All masks of a block are the bundle.

    Stage B takes passes until all tokens that may be written are final. Then the step writes the longest run of them:
    from the left, as many as have a joint probability above tau_m2t, and at least one. (given is not used: nothing is
    edited.)
    """
    model = engine.model
    masked = z == model.cfg.mask_id

    # Stage A: one full forward, whose tokens are the first drafts. Both stages draw by the same random numbers, so that
    # most drafts stay. (sample.denoise must not do this: there Stage A's draw decides what is written. Here drafts
    # decide how many passes are taken, and not what is written.)
    h, states = engine.stage_a(z)
    token_a, conf_a = candidates(never_mask(model.logits(states), model), u[:, 1], d)
    drafts = torch.where(masked, token_a, z)

    if d.beam > 1:
        token, conf, passes = beam_search(engine.several(d.beam), h, masked, drafts, d.beam)
        final = torch.ones_like(masked)
    else:
        with engine.own_keys():
            token, conf, final, passes = passes_until_final(engine, h, masked, drafts, u[:, 1], d)

    # write the longest run, and at least its first token
    sure = masked & final & (conf.log().cumsum(-1) > d.log_gate)
    written = sure | (masked & (masked.cumsum(-1) == 1))
    after = torch.where(written, token, z)
    over = ~(after == model.cfg.mask_id).any(-1)
    return Step(z, after, written, torch.zeros_like(masked), token, conf, token_a, conf_a, passes, over)


def never_mask(logits: Tensor, model: Model) -> Tensor:
    """Logits (..., V) in which [M] cannot be written: a mask that stays would leave the chain rule."""
    logits[..., model.cfg.mask_id] = float("-inf")
    return logits


def one_pass(engine: Engine, h: Tensor, masked: Tensor, token: Tensor, places: Tensor) -> Tensor:
    """A pass of Stage B over some positions of the block: places (R, P) int64 -> their logits (R, P, V).

    It leaves their keys in the engine. A position reads those of earlier blocks, and of its own block those that
    bundle_mask allows, which an earlier pass or this one has made.
    """
    model = engine.model
    with engine.reading_at(places) as ctx:
        before = token_before(token, model.cfg.block_length, model.cfg.mask_id)
        sees = bundle_mask(masked, engine.cache.context)
        sees = sees.expand(len(h), -1, -1, -1).gather(2, places[:, None, :, None].expand(-1, 1, -1, sees.shape[-1]))
        picked = h.gather(1, places[..., None].expand(-1, -1, h.shape[-1]))
        marked = model.mark(picked, masked.gather(1, places), before.gather(1, places))
        states = model.run_layers(marked, replace(ctx, mask=sees), model.layers_b)
    return never_mask(model.logits(states), model)


def next_places(final: Tensor, masked: Tensor, lookahead: int, first: bool) -> Tensor:
    """Which positions a pass reads: the next `lookahead` that are not final. The first pass reads those outside the
    bundle, too, so it reads the whole block if there are any. (R, B) bool -> (R, P) int64

    A row with fewer than P reads some of its final positions again, with the same keys.
    """
    P = final.shape[1] if first and not masked.all() else min(lookahead, final.shape[1])
    return final.long().argsort(dim=-1, stable=True)[:, :P]  # the first False of 1 1 0 0 0 is place 2


def passes_until_final(
    engine: Engine, h: Tensor, masked: Tensor, token: Tensor, u: Tensor, d: Decoding
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Take passes until every token that may be written is final.

    token (R, B) int64: the first drafts -> tokens, their probabilities, and which are final, (R, B) each; passes (R,).
    """
    conf = torch.ones(token.shape, device=token.device)
    final = ~masked
    passes = torch.zeros_like(conf[:, 0])
    while True:
        # a row is done when all its tokens are final, or when the joint probability of the final ones is not above the
        # gate, because then no later token can be written; but each row with masks takes a pass
        log_p = torch.where(final, conf, 1.0).log().sum(-1)
        live = ~final.all(-1) & ((log_p > d.log_gate) | (passes == 0))
        if not live.any():
            return token, conf, final, passes

        # one pass: each position reads the draft on its left. In a first pass more may be read, for the keys alone: so
        # a row takes as many passes as it takes alone
        width = d.lookahead or token.shape[1]
        places = next_places(final, masked, width, not passes.any())
        found, p = candidates(one_pass(engine, h, masked, token, places), u.gather(1, places), d)
        asked = ~final & ((~final).cumsum(-1) <= width)
        new = live[:, None] & asked.gather(1, places)
        draft = token.gather(1, places)
        found = torch.where(new, found, draft)

        # the first token that differs from its draft is final, and all before it are: they have read only final tokens
        #     differs  0 0 1 0 1    differs.cumsum - differs  0 0 0 1 1    final  1 1 1 0 0
        differs = (found != draft).long()
        now_final = new & (differs.cumsum(-1) - differs == 0)
        token = token.scatter(1, places, found)
        conf = conf.scatter(1, places, torch.where(new, p, conf.gather(1, places)))
        final = final.scatter(1, places, final.gather(1, places) | now_final)
        passes = passes + live


def beam_search(
    engine: Engine, h: Tensor, masked: Tensor, token: Tensor, U: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Fill the block from left to right by the likeliest text that a beam of U texts finds. Stage A has run once for
    all of them, and a pass of Stage B reads one position of each. The beam ends with the block.

    engine: with U rows for each row of h (R, B, C), masked (R, B) bool and token (R, B) int64 -> tokens and their
    probabilities, (R, B) each; passes (R,).
    """
    R = len(h)
    row = torch.arange(R, device=h.device)
    h, masked, token = (of.repeat_interleave(U, dim=0) for of in (h, masked, token))
    conf = torch.ones(token.shape, device=h.device)
    final = ~masked
    # the texts of a beam are the same at first, so only one may count
    score = torch.full((R, U), -math.inf, device=h.device)
    score[:, 0] = 0.0
    while not final.all():
        # the log-probabilities of each text's next token; a text that is full goes on as it is
        full = final.all(-1, keepdim=True)
        place = final.long().argmin(-1, keepdim=True)  # (R*U, 1)
        places = next_places(final, masked, 1, bool((final == ~masked).all()))
        logits = one_pass(engine, h, masked, token, places)
        at = (places == place).long().argmax(-1)
        log_p = logits[torch.arange(R * U, device=h.device), at].log_softmax(-1)
        stays = torch.full_like(log_p, -math.inf).scatter(1, token.gather(1, place), 0.0)
        log_p = torch.where(full, stays, log_p)

        # the best continuations of each beam: which text each continues, and by which token
        V = log_p.shape[-1]
        score, best = (score[..., None] + log_p.view(R, U, V)).flatten(1).topk(U, dim=-1)
        parent = (row[:, None] * U + best // V).flatten()
        new = (best % V).view(-1, 1)
        engine.reorder(parent)
        token = token[parent].scatter(1, place, new)
        conf = conf[parent]
        p = log_p[parent].gather(1, new).exp()
        conf = conf.scatter(1, place, torch.where(full, conf.gather(1, place), p))
        final = final.scatter(1, place, True)

    # the best text of each beam comes first
    return token[row * U], conf[row * U], masked[row * U].sum(-1).float()
