"""Drafts as shared randomness: several positions are sampled in one pass, and what is written follows a joint law.

A factorised pass draws every position from its own marginal q_i: draws that need not go together. Here they are drafts.
Stage B, own blocks as in own_blocks.py, reads them in an order, the position that Stage A is surest of first: for each
position of the bundle it gives a distribution p_i, given the block and the drafts before i. The draft is accepted with
probability min(1, p_i / q_i), else the excess (p_i - q_i)+ is drawn from. What comes after such a repair has read a
draft that is not there: it stays masked, for Stage B's next look (--looks) or the next step. The first draft stands.

What a step writes follows Stage B's chain rule, exactly, whatever Stage A drafts: q min(1, p/q) + (p - q)+ = p, as the
excess has the mass that was rejected. temperature, top_k and top_p filter p_i and q_i alike. No position is chosen for
what was drawn there. (sample.step takes those whose draws are likely tokens, which sharpens; refusing what Stage B is
not sure of does, too.) Where a step ends early, after a repair, the rest follows the rule in the new context: the whole
block is Stage B's as far as its rules in both contexts agree. One position a step is the base.

The target is the clean token: Stage B sees tokens, so its minimiser is their conditional; with a marker alone it would
be the marginal (results/theorem). No chain is run in training. To accept or reject the drafts of a plain pass by a last
layer that is causal in some order is SSMD's idea (2510.03929).

    python -m beyond.drafts --data names --init_from assets/names --n_last 1 --max_iters 3000 --out_dir out/drafts
    python sample.py --ckpt assets/names --adapter out/drafts --tau_m2t -1 --tau_t2t none --temperature 1 --top_p 0.8 \
        --prompt "ARABIC LIGATURE"
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from beyond.own_blocks import OwnBlocks, Suffixes
from torch import Tensor

import train
from beyond.chain import Clean
from cache import Cached
from corrupt import Draws, M, three_term_loss
from data import bounded, fail, generator
from model import Context, Linear, Model, rotary
from sample import Decoding, select_bundle
from train import Losses, Objective

# R rows, T positions, B block_length, C channels, V vocabulary, n bundle positions


def draw(weight: Tensor, u: Tensor) -> Tensor:
    """weight (..., V), not normalised, and u (...) in [0, 1) -> (...) int64: the token in which u falls."""
    cdf = weight.cumsum(-1)
    token = torch.searchsorted(cdf, u[..., None] * cdf[..., -1:], right=True)[..., 0]
    return torch.minimum(token, (cdf < cdf[..., -1:]).sum(-1))  # rounding: not past the last one


def couple(p: Tensor, q: Tensor, draft: Tensor, coin: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from p that is the draft as often as can be. p, q (n, V) float32, draft (n,) int64 drawn from q; coin and
    u (n,) in [0, 1) -> tokens (n,) and which drafts were accepted (n,) bool."""
    p_draft, q_draft = (t.gather(-1, draft[:, None])[:, 0] for t in (p, q))
    excess = (p - q).clamp(min=0)
    accepted = (coin * q_draft < p_draft) | (excess.sum(-1) == 0)
    return torch.where(accepted, draft, draw(excess, u)), accepted


def earlier(sure: Tensor, bundle: Tensor) -> Tensor:
    """The order: sure (R, B) float, bundle (R, B) bool -> (R, B, B) bool, whether j comes before i: [r, i, j]."""
    rank = (-sure).masked_fill(~bundle, float("inf")).argsort(dim=-1, stable=True).argsort(dim=-1)
    return bundle[:, None] & (rank[:, None] < rank[..., None])


class Drafts(OwnBlocks):
    def give_blocks(self, width: int, looks: int, rng: torch.Generator) -> None:
        """Own blocks that change nothing yet, and the map that shows a draft to them."""
        super().give_blocks(width, 0.0, rng)
        C, self.looks = self.cfg.n_embd, looks
        self.own.append(Linear(C, C))
        self.own[-1].weight.data.normal_(0.0, C**-0.5, generator=rng)
        self.own.to(self.wte.weight.device)

    def second_look(self, h: Tensor, asked: Tensor, draft: Tensor, before: Tensor) -> Tensor:
        """Stage B. h (R, B, C) Stage A's final states of one block a row, asked (R, B) bool, draft (R, B) int64, before
        (R, B, B) bool: whose drafts each position reads, beside the states -> states before the head, (n, C)."""
        *blocks, show = self.own
        y, B = F.rms_norm(h, h.shape[-1:]), h.shape[1]
        read = torch.cat([y, y + show(self.wte(draft).to(y.dtype))], dim=1)  # (R, 2B, C): the same for all blocks
        itself = torch.eye(B, dtype=torch.bool, device=h.device).expand_as(before)
        mask = torch.cat([itself, ~itself, before], dim=-1)[:, None].repeat(1, 1, 3, 1)  # (R, 1, 3B, 3B)
        ctx = Context(*rotary(self.cfg, torch.arange(B, device=h.device).repeat(3), h.dtype), mask)
        for block in blocks:
            x = y[asked] + block.attn(block.norm_1(torch.cat([y, read], dim=1)), ctx)[:, :B][asked]
            y = y.masked_scatter(asked[..., None], x + block.mlp(block.norm_2(x)))
        return y[asked]

    def filtered(self, logits: Tensor, d: Decoding) -> Tensor:
        """(..., V) -> the probabilities that are drawn from, (..., V) float32; never a mask. Greedy: the argmax."""
        logits = logits.index_fill(-1, torch.tensor(self.cfg.mask_id, device=logits.device), float("-inf"))
        if d.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        p, token = (logits / d.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        p[..., d.top_k or p.shape[-1] :] = 0
        p = p / p.sum(-1, keepdim=True)
        p = p.masked_fill(p.cumsum(-1) - p > d.top_p, 0.0)
        return torch.zeros_like(p).scatter(-1, token, p / p.sum(-1, keepdim=True))

    def step(self, engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        """As `sample.step`: u[:, 0] draws the drafts, u[:, 1] from the excess, u[:, 2] accepts. "bundle" is what was
        written, "looks" (R,) how often Stage B looked, "partial" (R,) the shares of the block it ran at, summed."""
        if d.tau_t2t is not None:
            fail("drafts are written once: --tau_t2t none")
        logits, masked = engine.stage_a(z)[1], z == self.cfg.mask_id
        q, sure = self.filtered(logits, d), logits.softmax(-1).amax(-1)
        token = draft = draw(q, u[:, 0])
        conf = conf_a = q.gather(-1, draft[..., None])[..., 0]
        bundle, partial = select_bundle(sure, masked, d), torch.zeros(len(z), device=z.device)
        looks = partial.long()
        before = earlier(sure, bundle)
        written = bundle & ~before.any(-1) if d.n_rounds else bundle
        for _ in range(self.looks):
            left = bundle & ~written
            if not left.any():
                break
            p = self.filtered(self.head(self.second_look(engine.h_a, left, token, before)), d)
            drawn, accepted = couple(p, q[left], draft[left], u[:, 2][left], u[:, 1][left])
            accepted = written.masked_scatter(left, accepted)
            now = left & ~(before & ~accepted[:, None]).any(-1)  # every draft before it was right
            token = torch.where(now, token.masked_scatter(left, drawn), token)
            conf = torch.where(now, conf.masked_scatter(left, p.gather(-1, drawn[:, None])), conf)
            written, partial, looks = written | now, partial + left.float().mean(-1), looks + left.any(-1)
        after, edited = torch.where(written, token, z), torch.zeros_like(masked)
        return dict(before=z, after=after, bundle=written, edited=edited, conf=conf, token_a=draft, conf_a=conf_a,
                    partial=partial, looks=looks)  # fmt: skip


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    model.__class__ = Drafts
    if any(type(settings.get(k)) is not int or not 0 < settings[k] < 2**20 for k in ("width", "looks")):
        fail("adapter.json of drafts: width and looks must be positive numbers")
    if model.cfg.n_rounds > 1:
        fail("adapter.json of drafts: n_rounds must be 1")
    model.give_blocks(settings["width"], settings["looks"], torch.Generator())


class DraftsObjective(Objective):
    command = "python -m beyond.drafts"

    def __init__(self, model: Model, *given):
        super().__init__(model, *given)
        self.corruption = Suffixes(**vars(self.corruption))
        self.extension = {"extension": "beyond.drafts"} | {k: getattr(self.args, k) for k in ("width", "looks")}

    @staticmethod
    def adapt(model: Model, args: Namespace) -> None:
        model.__class__ = Drafts
        model.give_blocks(args.width, args.looks, generator(args.seed, "drafts"))

    def bundle(self, x: Tensor, z: Tensor, kind: Tensor, draws: Draws, ctx: Context) -> Tensor:
        return kind == M  # as decoding does

    def stages(self, x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, target: Tensor, ctx: Context) -> Losses:
        """Stage B's loss where a draft comes before; the drafts are the clean tokens. Stage A is the frozen base."""
        model, B = self.model, self.model.cfg.block_length
        bundle, z = bundle.view(-1, B), z.view(-1, B)
        h = Clean(model, x, ctx).read(z, torch.arange(len(z), device=z.device))  # (R, B, C), a block a row
        x = x.view(-1, B)
        with torch.no_grad():
            sure = torch.zeros_like(h[..., 0]).masked_scatter(bundle, model.head(h[bundle]).softmax(-1).amax(-1))
        before = earlier(sure, bundle)
        asked = bundle & before.any(-1)
        masks = torch.full_like(x[asked], M)
        loss, terms_b = three_term_loss(model, model.second_look(h, asked, x, before), x[asked], masks, masks == M)
        with torch.no_grad():
            terms_a = three_term_loss(model, h[asked], x[asked], masks, masks == M)[1]
        return loss, torch.stack([terms_a, terms_b])


def settle(args: Namespace) -> type[Objective]:
    if args.corruption != "mask" or args.context != "clean" or args.n_rounds > 1:
        fail("drafts read what decoding will show them, once: --corruption mask, --context clean and --n_rounds 1")
    if args.stage_a_only or args.init_from == "scratch":
        fail("drafts are a trained base's: give it by --init_from DIR")
    return DraftsObjective


def main() -> None:
    p = train.build_parser(__doc__)
    p.set_defaults(corruption="mask", context="clean", learning_rate=5e-3, batch_size=64)
    g = p.add_argument_group("drafts (beyond the paper; n_last own blocks)")
    g.add_argument("--width", type=bounded(int, 1), default=192, help="of their SwiGLU")
    g.add_argument("--looks", type=bounded(int, 1), default=1, help="in decoding, how often Stage B looks in a step")
    train.main(p, settle)


if __name__ == "__main__":
    main()
