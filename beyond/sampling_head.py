"""The sampling head: several positions are sampled in one step, and what is written follows a joint law.

A factorised pass draws every position from a distribution of its own, q_i: draws that need not go together. Here they
are drafts. The head reads them in the model's order, the surest position first or the leftmost, and gives each of
the bundle a distribution p_i: given the block, and the drafts before i. Each draft is then accepted or repaired:

    accept    with probability min(1, p_i(draft) / q_i(draft))
    repair    else: draw from the excess (p_i - q_i)+

Accepting writes min(p_i, q_i), and repairing fills it up to p_i, whatever q_i is: what is written has exactly the law
p_i. What comes behind a repair has read a draft that is not there. It stays masked, for the head's next look (--looks)
or for the next step. The first draft stands: there is nothing before it to read.

So a step follows the head's chain rule. temperature, top_k and top_p filter p_i and q_i alike. The order and the
bundle come from how sure Stage A is, or from the places, and never from what was drawn. (sample.step writes draws
that happen to be likely tokens, and a joint head refuses what it is not sure of: both sharpen.) Where a step ends
early, the rest follows the rule in the new context; the whole block has the head's law as far as its rules in both
contexts agree.

The target is the clean token. A marker says only where the bundle is, and with it the minimiser is each position's own
marginal (results/theorem); this head reads tokens, so its minimiser is their conditional. Training runs no chain. To
accept or reject the drafts of a plain pass by a last layer that is causal in some order is SSMD's idea (2510.03929).

    python -m beyond.sampling_head --data names --init_from assets/names --max_iters 3000 --out_dir out/sampling
    python sample.py --ckpt assets/names --adapter out/sampling --tau_m2t -1 --tau_t2t none --temperature 1 \
        --top_p 0.8 --prompt "ARABIC LIGATURE"
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor

import settings
import train
from beyond.chain import AT_ONCE, CleanCache
from beyond.joint_head import dense_blocks, masks_as_decoded
from cache import Cached
from corrupt import M, cross_entropy
from lib.util import Parser, bounded, fail, generator, ranks
from model import Context, Linear, Model, rotary
from sample import Decoding, precedence, select_bundle
from train import Batch, Losses, Recipe

# R rows, B block_length, N blocks of a batch, C channels, V vocabulary, P positions that are asked


# --- a draft, accepted or repaired
def draw(weight: Tensor, u: Tensor) -> Tensor:
    """weight (..., V), not normalised, and u (...) in [0, 1) -> (...) int64: the token in which u falls."""
    cdf = weight.cumsum(-1)
    mass = cdf[..., -1:]
    token = torch.searchsorted(cdf, u[..., None] * mass, right=True)[..., 0]
    last = (cdf < mass).sum(-1)
    return torch.minimum(token, last)  # rounding: not past the last one


def accept_or_repair(p: Tensor, q: Tensor, draft: Tensor, coin: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from p that is the draft as often as it can be.

    p, q (P, V) float32; draft (P,) int64, drawn from q; coin and u (P,) in [0, 1), to accept by and to repair by
    -> tokens (P,) int64 and which drafts were accepted (P,) bool.
    """
    p_draft = probability_of(p, draft)
    q_draft = probability_of(q, draft)
    excess = (p - q).clamp(min=0)

    # without any excess p is q, but for rounding
    nothing_to_repair = excess.sum(-1) == 0
    accepted = (coin * q_draft < p_draft) | nothing_to_repair
    return torch.where(accepted, draft, draw(excess, u)), accepted


def probability_of(p: Tensor, token: Tensor) -> Tensor:
    """p (..., V), token (...) int64 -> (...)"""
    return p.gather(-1, token[..., None])[..., 0]


def earlier(key: Tensor, bundle: Tensor) -> Tensor:
    """The order of the bundle, the smallest key first (sample.precedence), the leftmost of equals: key (R, B) float,
    bundle (R, B) bool -> before (R, B, B) bool, True at [r, i, j] where j is in the bundle and comes before i.

    key = [-.2, -.9, -.5], all in the bundle:    . 1 1       0 comes last
                                                 . . .       1 comes first
                                                 . 1 .
    """
    rank = ranks(key.masked_fill(~bundle, float("inf")))
    comes_before = rank[:, None, :] < rank[:, :, None]
    return comes_before & bundle[:, None, :]


# --- the head
class SamplingHead(Model):
    """A model with a sampling head; Stage A is the base bit for bit."""

    def give_head(self, head_layers: int, width: int, looks: int, rng: torch.Generator) -> None:
        """Freeze the base, and add dense blocks that change nothing yet and the map that shows them a draft. Float32,
        as all trained weights are."""
        self.requires_grad_(False)
        self.looks = looks
        C = self.cfg.n_embd
        self.sampling_head = dense_blocks(self.cfg, head_layers, width, rng)
        self.show_draft = Linear(C, C)
        self.show_draft.weight.data.normal_(0.0, C**-0.5, generator=rng)

        device = self.wte.weight.device
        self.sampling_head.to(device)
        self.show_draft.to(device)

    @property
    def partial_cost(self) -> float:
        """What one look at a whole block costs, in full forwards: the head's layers beside the model's."""
        return len(self.sampling_head) / self.cfg.n_layer

    def adapter_state(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.state_dict().items() if k.startswith(("sampling_head.", "show_draft."))}

    def second_look(self, h: Tensor, asked: Tensor, draft: Tensor, before: Tensor) -> Tensor:
        """The states from which p_i comes, at the positions that are asked: (P, C), before the LM head.

        h (R, B, C) Stage A's final states of one block a row, asked (R, B) bool, draft (R, B) int64, before (R, B, B)
        bool: whose drafts each position reads. What they may attend to is drawn in `head_mask`.
        """
        # states grow with depth, and the LM head norms them anyway
        y = F.rms_norm(h, h.shape[-1:])

        # what is read beside one's own state, the same for all layers: the block without drafts, and with them
        embedded = self.wte(draft).to(y.dtype)
        with_draft = y + self.show_draft(embedded)
        read = torch.cat([y, with_draft], dim=1)  # (R, 2B, C)

        # the copies of a position have its rotation
        position = torch.arange(h.shape[1], device=h.device).repeat(3)
        cos, sin = rotary(self.cfg, position, h.dtype)
        ctx = Context(cos, sin, head_mask(before))
        for block in self.sampling_head:
            # the copies are keys; what they find as queries is not read
            all_states = block.norm_1(torch.cat([y, read], dim=1))  # (R, 3B, C)
            attended = block.attn(all_states, ctx)
            attended = attended[:, : h.shape[1]]

            # the asked positions alone are changed
            x = y[asked] + attended[asked]
            x = x + block.mlp(block.norm_2(x))
            y = y.masked_scatter(asked[..., None], x)
        return y[asked]

    # --- decoding
    def step(
        self, engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding
    ) -> dict[str, Tensor]:
        """As `sample.step`, without edits: z (R, B), u (R, 3, B) -> what was written, and where ("bundle").

        u[:, 0] draws the drafts, u[:, 1] repairs, u[:, 2] accepts. "looks" (R,) is how often the head looked, "partial"
        (R,) the shares of the block that it looked at, summed.
        """
        if d.edits:
            fail("a sampling head writes each token once: --tau_t2t none")
        masked = z == self.cfg.mask_id

        # Stage A: a distribution and a draft for every position
        _, logits = engine.stage_a(z)
        q = self.filtered(logits, d)
        draft = draw(q, u[:, 0])

        # the bundle and its order, which do not depend on what was drawn
        sure = logits.softmax(-1).amax(-1)
        bundle = select_bundle(sure, masked, d, self.cfg.order)
        before = earlier(precedence(sure, self.cfg.order), bundle)

        # the first draft stands; without the head all of them do
        written = bundle
        if d.n_rounds > 0:
            written = bundle & ~before.any(-1)

        # the others are accepted, repaired, or wait for a look that has read the repair
        token = draft
        conf_a = probability_of(q, draft)
        conf = conf_a
        looks = torch.zeros(len(z), dtype=torch.long, device=z.device)
        partial = torch.zeros(len(z), device=z.device)
        for _ in range(self.looks):
            left = bundle & ~written
            if not left.any():
                break

            # the head's distributions, each after the drafts before it: accept or repair
            p = self.look(engine.h_a, left, token, before, d)  # (P, V)
            drawn, accepted = accept_or_repair(p, q[left], draft[left], u[:, 2][left], u[:, 1][left])

            # up to its first repair, and with it, a block is written; what is behind waits
            now = left & ~behind_a_repair(left, accepted, before)
            token = torch.where(now, token.masked_scatter(left, drawn), token)
            conf = torch.where(now, conf.masked_scatter(left, probability_of(p, drawn)), conf)
            written = written | now
            looks = looks + left.any(-1)
            partial = partial + left.float().mean(-1)

        after = torch.where(written, token, z)
        return dict(
            before=z, after=after, bundle=written, edited=torch.zeros_like(masked), conf=conf, token_a=draft,
            conf_a=conf_a, looks=looks, partial=partial,
        )  # fmt: skip

    def look(self, h: Tensor, asked: Tensor, draft: Tensor, before: Tensor, d: Decoding) -> Tensor:
        """p_i of the positions that are asked, as it is drawn from: (P, V) float32; see `second_look`."""
        return self.filtered(self.head(self.second_look(h, asked, draft, before)), d)

    def filtered(self, logits: Tensor, d: Decoding) -> Tensor:
        """(..., V) -> the probabilities that are drawn from, (..., V) float32; never a mask. Greedy: the argmax."""
        mask_id = torch.tensor(self.cfg.mask_id, device=logits.device)
        logits = logits.index_fill(-1, mask_id, float("-inf"))
        if d.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()

        # the best first, cut to the top k
        p, token = (logits / d.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        if d.top_k:
            p[..., d.top_k :] = 0
        p = p / p.sum(-1, keepdim=True)

        # cut to top_p: up to and with the token that crosses it
        p = p.masked_fill(p.cumsum(-1) - p > d.top_p, 0.0)
        p = p / p.sum(-1, keepdim=True)
        return torch.zeros_like(p).scatter(-1, token, p)


def behind_a_repair(left: Tensor, accepted: Tensor, before: Tensor) -> Tensor:
    """Which positions have read a draft that was repaired: left (R, B) bool, accepted (P,) bool, whether each of the
    left positions' drafts was, before (R, B, B) bool -> (R, B) bool.

    Four positions from left to right, the third one's draft repaired:      . . . 1
    """
    repaired = torch.zeros_like(left).masked_scatter(left, ~accepted)
    return (before & repaired[:, None, :]).any(-1)


def head_mask(before: Tensor) -> Tensor:
    """before (R, B, B) bool -> (R, 1, 3B, 3B) bool: what the head's positions may attend to.

    Keys are the block three times: its own states, which the layers change, the states without drafts, and with them.
    A position attends to itself, to all others without their drafts, and to those before it with their drafts.
    B = 3, decided from left to right:

                own states    without    with drafts
        0         1 . .        . 1 1        . . .
        1         . 1 .        1 . 1        1 . .
        2         . . 1        1 1 .        1 1 .

    Attention asks every key for its row, too: the copies repeat these rows, and what they find is not read.
    """
    B = before.shape[1]
    itself = torch.eye(B, dtype=torch.bool, device=before.device).expand_as(before)
    rows = torch.cat([itself, ~itself, before], dim=-1)  # (R, B, 3B)
    return rows.repeat(1, 3, 1)[:, None]


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    head_layers = settings.get("head_layers")
    width = settings.get("width")
    looks = settings.get("looks")
    for name, value in (("head_layers", head_layers), ("width", width), ("looks", looks)):
        if type(value) is not int or not 0 < value < 2**20:
            fail(f"adapter.json of a sampling head: {name} must be a positive number, not {value!r}")
    if model.cfg.n_rounds > 1:
        fail("adapter.json of a sampling head: n_rounds must be 1")
    model.__class__ = SamplingHead
    model.give_head(head_layers, width, looks, torch.Generator())


# --- the training step
def sampling_head_step(model: SamplingHead, batch: Batch, args: Namespace) -> Losses:
    """The head's loss on clean tokens, with the clean tokens as the drafts before them; Stage A is the frozen base."""
    # what the model is shown: masks alone, in half of the blocks at its end, as a prompt leaves them
    z, kind = masks_as_decoded(model, batch, args)

    # Stage A's final states, a block a row
    B = model.cfg.block_length
    blocks = z.view(-1, B)
    finished = CleanCache(model, batch)
    h = finished.read(blocks, torch.arange(len(blocks), device=z.device))  # (N, B, C)

    # all masks are the bundle, in the model's order; the first one of a block has no draft to read
    bundle = (kind == M).view(-1, B)
    before = earlier(precedence(how_sure(model, h, bundle), model.cfg.order), bundle)
    asked = bundle & before.any(-1)

    # each token after the clean tokens before it
    clean = batch.clean.view(-1, B)
    ce = cross_entropy(model, model.second_look(h, asked, clean, before), clean[asked])
    terms = torch.zeros(2, 3, 2, device=z.device)
    terms[1, 0] = torch.stack([ce.detach().sum(), asked.sum()])

    # in validation, what Stage A says of the same positions
    if not torch.is_grad_enabled():
        ce_a = cross_entropy(model, h[asked], clean[asked])
        terms[0, 0] = torch.stack([ce_a.sum(), asked.sum()])
    return ce.sum(), terms


@torch.no_grad()
def how_sure(model: Model, h: Tensor, where: Tensor) -> Tensor:
    """The probability of Stage A's best token at the True positions of where (N, B), 0 elsewhere: (N, B) float32."""
    best = []
    for part in h[where].split(AT_ONCE):
        best.append(model.head(part).softmax(-1).amax(-1))
    return torch.zeros(where.shape, device=h.device).masked_scatter(where, torch.cat(best))


# --- the command line
def build_parser(doc: str) -> Parser:
    p = settings.build_parser(doc)
    p.set_defaults(corruption="mask", context="clean", learning_rate=5e-3, batch_size=64)
    add = p.add_argument_group("sampling head (beyond the paper)").add_argument
    # fmt: off
    add("--head_layers", type=bounded(int, 1), default=1, help="dense blocks of the head")
    add("--width", type=bounded(int, 1), default=192, help="of their SwiGLU")
    add("--looks", type=bounded(int, 1), default=1, help="in decoding, how often the head looks in a step")
    # fmt: on
    return p


def check(args: Namespace) -> None:
    """Refuse what cannot be meant."""
    if args.corruption != "mask" or args.context != "clean":
        fail("a sampling head reads what decoding will show it: --corruption mask and --context clean")
    if args.n_rounds > 1:
        fail(f"--n_rounds {args.n_rounds}: a sampling head has no rounds; to look more than once, --looks")
    if args.stage_a_only or args.init_from == "scratch":
        fail("a sampling head reads the drafts of a trained base: give it by --init_from DIR")


def give_head(model: Model, args: Namespace) -> None:
    """What learns: the head."""
    model.__class__ = SamplingHead
    model.give_head(args.head_layers, args.width, args.looks, generator(args.seed, "sampling head"))


def choose(args: Namespace) -> Recipe:
    check(args)
    extension = dict(extension="beyond.sampling_head", head_layers=args.head_layers, width=args.width, looks=args.looks)
    return Recipe(sampling_head_step, give_head, "python -m beyond.sampling_head", extension)


def main() -> None:
    train.main(build_parser(__doc__), choose)


if __name__ == "__main__":
    main()
