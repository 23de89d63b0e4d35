"""Causal Stage B: our one change to the paper. Read model.py, train.py and sample.py first, and then this.

The paper's Stage B knows which masks are being filled, but not with what. Here each position of the bundle is also
shown x_{i-1}, the token on its left, through a learned matrix, Show:

    h_i + marker   becomes   h_i + rms(h_i) * (marker + Show(x_{i-1}))

h_i is what the first L - n layers give at position i, and rms(h_i) is its size. A position of the bundle sees itself,
the bundle on its left, and all that is outside the bundle. Positions outside see none of it.

In training x_{i-1} is the clean token. (If it is outside the bundle, see token_before.) So the paper's own sum of
cross-entropies over the bundle is -log prod p(x_i | x_<i) = -log p(bundle), by the chain rule. This is a joint loss: at
its optimum no total correlation is lost (results/theorem).

In decoding x_{i-1} is a draft, which is a token that may still change. The first drafts are Stage A's tokens. Stage B
reads all drafts of a block at once and writes better ones. Each such pass of n layers is a look. After at most one look
for each mask, the tokens are those that one would get from left to right, one at a time (Jacobi decoding).

What else is not the paper's:

    layers      Stage B begins as a copy of the base's last n layers, and all weights of the copy learn. On a frozen
                base Stage A learns nothing, and stays the base bit for bit
    logits      Stage B's are added to Stage A's log-probabilities
    training    every corrupted token is a mask, and the blocks before a block are clean. A share of the blocks can be
                masked whole (--whole_share)
    decoding    of the bundle the longest run is written, from the left, and nothing is edited

    python prepare.py data/names --written_by assets/names --out data/written
    python train.py --config configs/causal.toml                          # that is --stage_b causal
    python sample.py --ckpt assets/names/causal --prompt "CANADIAN"

To change   what a position is shown       edit   token_before, CausalModel.note
            whom it sees                          bundle_mask
            which masks it learns from            masks_and_bundle
            when a token is final                 look_until_final
"""

from argparse import Namespace
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache import Cached, Uncached
from corrupt import kinds, kinds_apart, of_blocks, three_term_loss
from decoding import Decoding, Step, candidates
from lib.rows import Batch
from lib.util import fail, smallest_masks, uniform
from model import Config, Context, Layer, Model

# R rows, T positions, B block_length, S keys, C channels, V vocabulary, G key/value heads, D head dim, n = n_last

# of the blocks that are not masked whole, the share that learn to fill holes: see masks_and_bundle
HOLE_SHARE = 0.5


# --- what a position of the bundle is shown, and whom it sees
def token_before(tokens: Tensor, bundle: Tensor, before_blocks: Tensor, block_length: int) -> Tensor:
    """What each position of the bundle is shown: the token on its left. If that token is not in the bundle, Stage A has
    read it already, so the position is shown the nearest earlier token of its block's bundle instead. (If there is
    none, it is shown the token on its left all the same.) With the bundle {1, 2, 4} of five positions:

        position    1           2           3       4
        is shown    token 0     token 1     -       token 2

    tokens (R, T) int64: clean tokens or drafts in the bundle, and z elsewhere. bundle (R, T) bool. before_blocks
    (R, T / B) int64: the token before each block. -> (R, T) int64
    """
    R, T = tokens.shape
    B = min(T, block_length)
    blocks = tokens.view(R, -1, B)
    before = torch.cat([before_blocks[..., None], blocks[..., :-1]], dim=-1)  # (R, T / B, B)

    # the place in its block of the nearest bundle token before each position; -1: there is none
    place = torch.arange(B, device=tokens.device)
    nearest = torch.where(bundle.view(R, -1, B), place, -1).cummax(-1).values
    nearest = F.pad(nearest[..., :-1], (1, 0), value=-1)
    of_bundle = blocks.gather(-1, nearest.clamp(min=0))
    return torch.where(nearest >= 0, of_bundle, before).view(R, T)


def bundle_mask(bundle: Tensor, ctx: Context) -> Tensor:
    """Who sees whom: (R, 1, T, S) bool, query by key. The T keys of the pass itself come first.

    Positions 1 and 2 of three are the bundle:      1 . .
                                                    1 1 .
                                                    1 1 1
    """
    T = bundle.shape[1]
    left = torch.ones(T, T, dtype=torch.bool, device=bundle.device).tril()
    sees = ~bundle[:, None, :] | (bundle[:, :, None] & left)  # (R, T, T)

    # earlier blocks are seen as in Stage A
    S = ctx.cache.used if ctx.mask is None else ctx.mask.shape[-1]
    sees = F.pad(sees, (0, S - T), value=True)[:, None]
    if ctx.mask is None:
        return sees
    return sees & ctx.mask[..., :T, :]


class CleanKeys:
    """The keys and values of the clean half of rows [corrupted ; clean], (R, G, T, D) each. Stage A's pass over both
    halves leaves them here, and Stage B reads those of the blocks before its own. In decoding, too, Stage B reads Stage
    A's keys of the earlier blocks."""

    def __init__(self, T: int, first_layer: int):
        self.T = T
        self.used = 2 * T
        self.first_layer = first_layer
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (R, G, T or 2T, D) of a pass -> what it attends to, (R, G, 2T, D) each."""
        if k.shape[2] == self.used:
            if layer >= self.first_layer:
                self.kept[layer] = (k[:, :, self.T :], v[:, :, self.T :])
            return k, v
        if layer not in self.kept:
            raise RuntimeError("Stage B reads keys that Stage A's last_n leaves in the same Context: run that first")
        clean_k, clean_v = self.kept[layer]
        return torch.cat([k, clean_k], dim=2), torch.cat([v, clean_v], dim=2)


# --- the model
class CausalModel(Model):
    name_b = "causal Stage B"
    needs_copy = True
    begin_at_zero = ("markers", "show")
    # its step makes only masks, and a block reads clean blocks before it, whatever the flags say
    settings = dict(corruption="mask", context="clean")

    def __init__(self, cfg: Config):
        if cfg.n_rounds != 1:
            fail(f"causal Stage B has one marker, and takes as many looks as it needs: give --n_rounds 1, not "
                 f"{cfg.n_rounds}")  # fmt: skip
        super().__init__(cfg)
        # its own last n layers, and Show, which takes the embedding of the token on the left
        self.layers_b = nn.ModuleList(Layer(cfg, i) for i in range(cfg.n_layer - cfg.n_last, cfg.n_layer))
        self.show = nn.Parameter(torch.zeros(cfg.n_embd, cfg.n_embd))

    def context(self, real: Tensor, clean: Tensor | None = None, one_by_one: Tensor | None = None) -> Context:
        """As Model.context. With a clean copy, Stage A's pass keeps the copy's keys for Stage B."""
        ctx = super().context(real, clean, one_by_one)
        if ctx.clean is not None:
            ctx.cache = CleanKeys(real.shape[1], self.cfg.n_layer - self.cfg.n_last)
        return ctx

    def coordinate(
        self, h: Tensor, bundle: Tensor, ctx: Context, n_rounds: int, tokens: Tensor, before_block: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Stage B: one look, whatever n_rounds says. Stage A's last_n must have run on h in ctx.

        h (R, T, C): prefix states, or (R, 2T, C) with a clean copy. bundle (R, T) bool. tokens (R, T) int64: clean
        tokens or drafts in the bundle, and z elsewhere. before_block (R,) int64: in decoding, the token before the
        block. -> (R, T, C)
        """
        T = bundle.shape[1]
        h = h[:, :T]
        if ctx.clean is not None:
            ctx = replace(ctx, cos=ctx.cos[:T], sin=ctx.sin[:T])

        # the note, which is what is added to a state, is scaled to the size of that state
        note = self.note(bundle, ctx, tokens, before_block)
        size = h.float().square().mean(-1, keepdim=True).sqrt()
        h = h + bundle[..., None] * (size * note).to(h.dtype)
        return self.run_layers(h, replace(ctx, mask=self.sees(bundle, ctx)), self.layers_b)

    def sees(self, bundle: Tensor, ctx: Context) -> Tensor:
        """Whom each position sees: see bundle_mask."""
        return bundle_mask(bundle, ctx)

    def note(self, bundle: Tensor, ctx: Context, tokens: Tensor, before_block: Tensor | None) -> Tensor:
        """The marker and the token on the left: (R, T, C) float32, in units of a state's size."""
        # the token before each block; the first block of a text has a mask there
        B = self.cfg.block_length
        before_blocks = torch.full_like(tokens[:, ::B], self.cfg.mask_id)
        if before_block is not None:
            before_blocks[:, 0] = before_block
        if ctx.clean is not None:
            before_blocks[:, 1:] = ctx.clean[:, B - 1 : -1 : B]

        shown = self.wte(token_before(tokens, bundle, before_blocks, B))
        embedded = F.rms_norm(shown.float(), [self.cfg.n_embd])
        return self.markers[0] + F.linear(embedded, self.show.float())

    def add_to(self, log_p_a: Tensor, states: Tensor) -> Tensor:
        """Stage A's log-probabilities plus the logits of Stage B's states (..., C): (..., V) float32."""
        return log_p_a + self.logits(states)

    def logits_b(self, both: Tensor) -> Tensor:
        """The same sum from the states of both stages: (..., 2C), Stage B's and then Stage A's -> (..., V) float32."""
        stage_b, stage_a = both.chunk(2, dim=-1)
        return self.add_to(self.logits(stage_a).log_softmax(-1), stage_b)

    def adapt(self, r: int, generator: torch.Generator) -> None:
        """Freeze the model except its own layers, the marker and Show, which learn in float32. There is no LoRA, so
        r does nothing."""
        self.requires_grad_(False)
        self.layers_b.float().requires_grad_(True)
        self.markers = nn.Parameter(self.markers.float())
        self.show = nn.Parameter(self.show.float())

    def begin_from(self, state: dict[str, Tensor]) -> None:
        """As Model.begin_from. Its own layers begin as a copy of the base's last n, and Show begins at zero."""
        super().begin_from(state)
        state.setdefault("show", torch.zeros_like(self.show, device=state["markers"].device))

        # layers that were trained for another n began as a copy of other layers
        trained = len({name.split(".")[1] for name in state if name.startswith("layers_b.")})
        if trained not in (0, self.cfg.n_last):
            fail(f"this causal Stage B has {trained} layers of its own: give --n_last {trained}, not {self.cfg.n_last}")
        first = self.cfg.n_layer - self.cfg.n_last
        for name in self.state_dict():
            if name.startswith("layers_b.") and not trained:
                _, i, rest = name.split(".", 2)
                state[name] = state[f"layers.{first + int(i)}.{rest}"].clone()


# --- training
def causal_step(model: CausalModel, batch: Batch, args: Namespace) -> tuple[Tensor, dict[str, Tensor]]:
    """One step: Eq. 1 in both stages, as in train.cocommit_step. Stage B's fill loss is now -log p(bundle)."""
    masked, bundle = masks_and_bundle(batch, model.cfg.block_length, args.whole_share)
    z = batch.clean.masked_fill(masked, model.cfg.mask_id)
    kind = kinds(batch.clean, z, batch.corruptible, model.cfg.mask_id)

    # Stage B reads the clean tokens of the bundle: each is shown to the next position of the bundle
    ctx = model.context(batch.real, batch.clean)
    h = model.prefix(z, ctx)
    stage_a = model.last_n(h, ctx)[:, : z.shape[1]]
    tokens = torch.where(bundle, batch.clean, z)
    stage_b = model.coordinate(h, bundle, ctx, 1, tokens)

    # Stage B's logits are added to Stage A's, so its loss needs the states of both
    # (loss_a teaches a frozen Stage A nothing; it is for the log, and for a run in which all weights learn)
    both = torch.cat([stage_b, stage_a], dim=-1)
    loss_a, ce_a = three_term_loss(model, stage_a, batch.clean, kind, fill=masked)
    loss_b, ce_b = three_term_loss(model, both, batch.clean, kind, fill=bundle, head=model.logits_b)
    return loss_a + loss_b, kinds_apart(ce_a, ce_b, kind, bundle)


def masks_and_bundle(batch: Batch, block_length: int, whole_share: float = 0.0) -> tuple[Tensor, Tensor]:
    """masked and bundle, (R, T) bool each. A random number picks for which of three cases of decoding a block is
    trained. (In rows that prepare.py marks HOLES_ALONE, all blocks are trained to fill holes.)

    to write it whole   all positions are masked, and are the bundle: a share of whole_share
    to continue         all positions from a random place on are masked, and all masks are the bundle
    to fill holes       each position is masked with a probability from U(0, 1), and s ~ Uniform{1..B} masks are the
                        bundle: of the blocks that are not masked whole half (HOLE_SHARE)
    """
    corruptible = batch.corruptible
    draws = batch.draws
    T = corruptible.shape[1]
    B = block_length
    coin = of_blocks(draws, T, B)
    whole = coin >= 1 - whole_share
    as_holes = (coin < HOLE_SHARE * (1 - whole_share)) | batch.holes_alone
    # u: in a block with holes its mask ratio; in any other block where its masks begin, from 0 (its start) to 1
    u = of_blocks(draws, T, B)
    size = 1 + (uniform(draws, T // B) * B).long()  # (R, T / B)
    lot = uniform(draws, T)

    # masked: positions that draw below the probability, or those from the place on
    place = torch.arange(T) % B
    masked = torch.where(as_holes, uniform(draws, T) < u, whole | (place >= (u * B).long()))
    masked = corruptible & masked.to(corruptible.device)

    # the bundle
    drawn = smallest_masks(lot.to(masked.device).view(-1, B), masked.view(-1, B), size.to(masked.device).view(-1, 1))
    bundle = torch.where(as_holes.to(masked.device), drawn.view_as(masked), masked)
    return masked, bundle


# --- decoding
def causal_denoise(engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """One step on the current blocks z (R, B) int64, as sample.denoise.

    In Stage B all masks of a block are the bundle. It looks until all tokens that may be written are final. Then the
    step writes the longest run of them: from the left, as many as have a joint probability above tau_joint, and at
    least one. (given is not used, because nothing is edited.)
    """
    model = engine.model
    masked = z == model.cfg.mask_id

    # Stage A: one full forward, whose tokens are the first drafts. Both stages draw by the same random numbers, so that
    # most drafts stay. This does not change what is drawn: drafts decide how many looks are taken, not what is written
    h, states_a = engine.stage_a(z)
    logits_a = model.logits(states_a)
    token_a, conf_a = candidates(logits_a, u[:, 1], d)
    draft = torch.where(masked, token_a, z)

    log_p_a = logits_a.log_softmax(-1)
    token, conf, final, looks = look_until_final(engine, h, log_p_a, draft, masked, u[:, 1], d)

    # write the longest run, and at least its first token
    sure = masked & final & (conf.log().cumsum(-1) > d.log_gate)
    written = sure | (masked & (masked.cumsum(-1) == 1))
    after = torch.where(written, token, z)
    return Step(z, after, written, torch.zeros_like(masked), token, conf, token_a, conf_a, looks)


def look_until_final(
    engine: Cached | Uncached, h: Tensor, log_p_a: Tensor, token: Tensor, masked: Tensor, u: Tensor, d: Decoding
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Take looks, each with the tokens of the one before as its drafts, until every token that may be written is final.

    token (R, B) int64: the first drafts -> tokens, their probabilities, and which are final, (R, B) each; looks (R,).
    """
    model = engine.model
    conf = torch.ones(token.shape, device=token.device)
    final = ~masked
    looks = torch.zeros_like(conf[:, 0])
    while True:
        # a row is done when all its tokens are final, or when the joint probability of the final ones is not above the
        # gate, because then no later token can be written; but each row with masks takes a look
        log_p = torch.where(final, conf, 1.0).log().sum(-1)
        live = ~final.all(-1) & ((log_p > d.log_gate) | (looks == 0))
        if not live.any():
            return token, conf, final, looks

        # one look: each position reads the draft on its left
        states = engine.stage_b(h, masked, token)
        found, p = candidates(model.add_to(log_p_a, states), u, d)
        new = live[:, None] & ~final
        found = torch.where(new, found, token)
        conf = torch.where(new, p, conf)

        # a token is final if no token on its left differs from its draft, because then it has read the right ones. So
        # the first token that differs is final, and all before it are: for these differs.cumsum - differs is 0
        differs = (found != token).long()
        final = final | (live[:, None] & (differs.cumsum(-1) - differs == 0))
        token = found
        looks = looks + live


CausalModel.training_step = staticmethod(causal_step)
CausalModel.decoding_step = staticmethod(causal_denoise)
