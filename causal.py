"""Causal Stage B: our one change to the paper. Read model.py, train.py and sample.py first, and then this.

The paper's Stage B knows which masks are being filled, but not with what. Here each position of the bundle is also
shown x_{i-1}, the token on its left, through a learned matrix, Show:

    h_i + marker   becomes   h_i + rms(h_i) * (marker + Show(norm(x_{i-1})))

h_i is what the first L - n layers give at position i, rms(h_i) is its size, and norm(x_{i-1}) is the embedding of the
token, normalised. (The first position of a block is shown a mask: it reads the blocks before its own by attention.) A
position of the bundle sees itself, the bundle on its left, and all that is outside the bundle. Positions outside see
none of it.

In training x_{i-1} is the true token. So if the masks of the bundle stand side by side, the paper's own sum of
cross-entropies over it is -log prod p(x_i | x_<i) = -log p(bundle), by the chain rule. This is a joint loss: at its
optimum no total correlation is lost (results/theorem). If visible tokens stand amid the bundle, the token before them
is shown to nobody, and what it shares with the tokens behind them is lost.

In decoding x_{i-1} is a draft at first, which is Stage A's token. A pass of Stage B is `coordinate`, as in training: it
reads the whole block, and gives a token for every draft. The leftmost token that differs from its draft is final, and
so are all before it, for they have read final tokens alone. The tokens found are the drafts of the next pass. In the
end these are the tokens that one would get from left to right, one at a time (Jacobi decoding). Each pass costs n/L of
a forward.

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
from decoding import CAUSAL, Decoding, Step, candidates
from lib.rows import Batch
from lib.util import fail, uniform
from model import Context, Layer, Model

# R rows, T positions, B block_length, U texts of a beam, S keys, C channels, V vocabulary, n = n_last

HOLE_SHARE = 0.5  # of the blocks that are not masked whole, the share in which masks are anywhere: see corrupt_and_draw


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
    fixed = dict(corruption="mask", context="clean", marker_rate=1.0)
    settings = CAUSAL
    unread = ("select", "tau_t2t")

    def __init__(self, cfg: Config):
        if cfg.n_rounds != 1:
            fail(f"causal Stage B has one marker: give --n_rounds 1, not {cfg.n_rounds}")
        super().__init__(cfg)
        # its own last n layers, which read Stage A's keys of the blocks before a block
        first = cfg.n_layer - cfg.n_last
        self.layers_b = nn.ModuleList(Layer(cfg, i) for i in range(first, cfg.n_layer))
        for i, layer in enumerate(self.layers_b):
            layer.attn.slot = first + i
        # Show, which takes the embedding of the token on the left
        self.show = nn.Parameter(torch.zeros(cfg.n_embd, cfg.n_embd))

    def begin_from(self, state: dict[str, Tensor]) -> None:
        """As Model.begin_from, but its own layers begin as a copy of the base's last n."""
        first = self.cfg.n_layer - self.cfg.n_last
        for name in self.own():
            if name.startswith("layers_b."):
                _, i, rest = name.split(".", 2)
                state.setdefault(name, state[f"layers.{first + int(i)}.{rest}"].clone())
        super().begin_from(state)

    def adapt(self, r: int, generator: torch.Generator) -> None:
        """Freeze the base, and let learn what is beside it. There is no LoRA, so its rank r does nothing."""
        super().adapt(0, generator)

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        """Stage B in one pass.

        h (R, T, C): prefix states. bundle (R, T) bool. tokens (R, T) int64: true tokens or drafts in the bundle, and z
        elsewhere -> (R, T, C)
        """
        # the note: you are written together, and this token is before you. It is scaled to the size of the state
        before = token_before(tokens, self.cfg.block_length, self.cfg.mask_id)
        shown = F.rms_norm(self.wte(before).float(), [self.cfg.n_embd])
        note = self.markers[0] + F.linear(shown, self.show.float())
        size = h.float().square().mean(-1, keepdim=True).sqrt()
        h = h + bundle[..., None] * (size * note).to(h.dtype)
        return self.run_layers(h, replace(ctx, mask=bundle_mask(bundle, ctx)), self.layers_b)

    def told(self, clean: Tensor, states: Tensor) -> Tensor:
        """The true tokens: no position sees its own, nor one on its right."""
        return clean

    @property
    def partial_cost(self) -> float:
        """A pass runs its own n layers, and not the base's."""
        return self.cfg.n_last / self.cfg.n_layer

    # --- training: train.cocommit_step, with these masks and this bundle
    def corrupt_and_draw(self, batch: Batch, ctx: Context, args: Namespace) -> tuple[Tensor, Tensor, Tensor]:
        """What the model is shown, and the bundle: z, kind and bundle, (R, T) each. A random number picks how a block
        is masked. All of its masks are the bundle, as in decoding.

        to write it whole   ▒▒▒▒▒▒▒▒    a share of whole_share
        to continue it      abc▒▒▒▒▒    masked from a random place on
        to fill holes       a▒c▒e▒gh    each position with a probability from U(0, 1)
        """
        T = batch.clean.shape[1]
        B = self.cfg.block_length
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
        z = batch.clean.masked_fill(bundle, self.cfg.mask_id)
        return z, kinds(batch.clean, z, batch.corruptible, self.cfg.mask_id), bundle

    # --- decoding
    def denoise(self, engine: Engine, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
        """One step on the current blocks z (R, B) int64, as sample.denoise. All masks of a block are the bundle.

        Stage B takes passes until all tokens that may be written are final. Then the step writes the longest run of
        them: from the left, as many as have a joint probability above tau_m2t, and at least one. (given is not used:
        nothing is edited.)
        """
        masked = z == self.cfg.mask_id

        # Stage A: one full forward, whose tokens are the first drafts. Both stages draw by the same random numbers, so
        # that most drafts stay. (sample.denoise must not do this: there Stage A's draw decides what is written. Here
        # drafts decide how many passes are taken, and not what is written.)
        h, states = engine.stage_a(z)
        token_a, conf_a = candidates(never_mask(self.logits(states), self), u[:, 1], d)
        drafts = torch.where(masked, token_a, z)
        if d.beam > 1:
            token, conf, passes = beam_search(engine.several(d.beam), h, masked, drafts, d.beam)
            final = torch.ones_like(masked)
        else:
            token, conf, final, passes = passes_until_final(engine, h, masked, drafts, u[:, 1], d)

        # write the longest run, and at least its first token
        sure = masked & final & (conf.log().cumsum(-1) > d.log_gate)
        written = sure | (masked & (masked.cumsum(-1) == 1))
        after = torch.where(written, token, z)
        over = ~(after == self.cfg.mask_id).any(-1)
        return Step(z, after, written, torch.zeros_like(masked), token, conf, token_a, conf_a, passes, over)


def never_mask(logits: Tensor, model: Model) -> Tensor:
    """Logits (..., V) in which [M] cannot be written: a mask that stays would leave the chain rule."""
    logits[..., model.cfg.mask_id] = float("-inf")
    return logits


def passes_until_final(
    engine: Engine, h: Tensor, masked: Tensor, drafts: Tensor, u: Tensor, d: Decoding
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Take passes until every token that may be written is final.

    drafts (R, B) int64 -> tokens, their probabilities, and which are final, (R, B) each; passes (R,).
    """
    conf = torch.ones(drafts.shape, device=drafts.device)
    final = ~masked
    passes = torch.zeros_like(conf[:, 0])
    while True:
        # a row needs no more passes when all its tokens are final, or when the joint probability of the final ones is
        # not above the gate, because then no later token can be written; but each row with masks takes one
        log_p = torch.where(final, conf, 1.0).log().sum(-1)
        live = ~final.all(-1) & ((log_p > d.log_gate) | (passes == 0))
        if not live.any():
            return drafts, conf, final, passes

        # a pass: each position reads the draft on its left. What is final stays
        logits = never_mask(engine.model.logits(engine.stage_b(h, masked, drafts)), engine.model)
        found, p = candidates(logits, u, d)
        new = live[:, None] & ~final
        found = torch.where(new, found, drafts)
        conf = torch.where(new, p, conf)

        # the first token that differs from its draft is final, and all before it are: they have read only final tokens
        #     differs  0 0 1 0 1    differs.cumsum - differs  0 0 0 1 1    final  1 1 1 0 0
        differs = (found != drafts).long()
        final = final | (new & (differs.cumsum(-1) - differs == 0))
        drafts = found
        passes = passes + live


def beam_search(engine: Engine, h: Tensor, masked: Tensor, token: Tensor, U: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the block from left to right by the likeliest text that a beam of U texts finds. Stage A has run once for
    all of them. The beam ends with the block.

    engine: with U rows for each row of h (R, B, C), masked (R, B) bool and token (R, B) int64 -> tokens and their
    probabilities, (R, B) each; passes (R,).
    """
    R, B = masked.shape
    row = torch.arange(R, device=h.device)[:, None]
    h, masked, token = (of.repeat_interleave(U, dim=0) for of in (h, masked, token))
    conf = torch.ones(token.shape, device=h.device)
    # the texts of a beam are the same at first, so only one may count
    score = torch.full((R, U), -math.inf, device=h.device)
    score[:, 0] = 0.0
    for i in range(B):
        if not masked[:, i].any():
            continue

        # the log-probabilities of each text's next token; a text that has a token here goes on with that
        logits = never_mask(engine.model.logits(engine.stage_b(h, masked, token)[:, i]), engine.model)
        log_p = logits.log_softmax(-1)  # (R*U, V)
        stays = torch.full_like(log_p, -math.inf).scatter(1, token[:, [i]], 0.0)
        log_p = torch.where(masked[:, [i]], log_p, stays)

        # the best continuations of each beam: which text each continues, and by which token
        V = log_p.shape[-1]
        score, best = (score[..., None] + log_p.view(R, U, V)).flatten(1).topk(U, dim=-1)
        parent = (row * U + best // V).flatten()
        new = (best % V).flatten()
        token = token[parent]
        token[:, i] = new
        conf = conf[parent]
        conf[:, i] = log_p[parent, new].exp()

    # the best text of each beam comes first
    first = row[:, 0] * U
    return token[first], conf[first], masked[first].sum(-1).float()
