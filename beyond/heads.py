"""Heads of another kind on names, each trained as beyond/head.py is and judged beside it.

two_layers      two blocks in the place of one
wrong_drafts    three in ten of the tokens that it is shown are Stage A's drafts, right or wrong
taught_drafts   the head itself, on a Stage A that was taught the chain (--init_from); --teacher is the base
both_sides      a look sees a draft at each position, and attends to both sides; repeated until none changes
joint_twice     a first look sees no token of the bundle, as the joint head; a second sees its answers, on both sides
mixed           half of the rows are taught the text's own tokens in place of the chain
ties            the chain takes the first answer within .1 nats of its best, as on toys
sureness        causal in the order of Stage A's probabilities: a mask sees the tokens of all surer ones, each at its
                own place, beside Stage A's states (two streams), and the product of tau_keep runs in that order

python -m beyond.heads --kind two_layers --init_from assets/names --out_dir out/two-layers
python evaluate.py --ckpt out/two-layers --prompts 512 --json
python -m beyond.heads --kind taught_drafts --teacher assets/names --init_from out/distilled
python -m beyond.heads --kind sureness --data stdlib --read_in blocks --beam 1 --batch_size 4 --max_iters 1000 \\
    --eval_interval 500 --init_from out/text-base-0 --seed 0 --out_dir out/text-sure-0
"""

from argparse import Namespace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train
from beyond import chain, head
from beyond.chain import from_the_left, masks_as_decoded
from checkpoint import load_model
from corrupt import M, summed
from lib.config import DTYPES, Config
from lib.settings import build_parser
from lib.util import bounded, generator, pick_device
from model import Block, Context, block_causal_mask, rotary
from sample import Look, candidates, select_bundle
from train import Recipe, batch_context

WRONG = 0.3  # share of drafts among the tokens that are shown
MOST = 7  # looks of both_sides
MIX = torch.Generator().manual_seed(1)  # whose rows are mixed
ANSWERS = 3  # how often both_sides reads its own answer in a training step


class Two(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.first = Block(cfg, 0)
        self.second = Block(cfg, 0)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.second(self.first(x, ctx), ctx)


class TwoLayers(head.Head):
    n_layer = 2

    def __init__(self, cfg: Config, width: int):
        super().__init__(cfg, width)
        self.block = Two(self.cfg)


class BothSides(head.Head):
    def forward(self, model, states, tokens, asked):
        x = F.rms_norm(states, states.shape[-1:]) + self.show(model.wte(tokens).to(states.dtype))
        B = tokens.shape[1]
        cos, sin = rotary(self.cfg, torch.arange(B, device=x.device), x.dtype)
        x = self.block(x, Context(cos, sin, block_causal_mask(B, B, x.device)))
        return model.head(x[asked])

    def look(self, engine, a, bundle):
        stage_a = head.log_probs(a.logits, self.cfg.mask_id)
        mine = bundle & ~self.stands_aside(a.z, bundle)[:, None]
        tokens = torch.where(mine, candidates(stage_a, a.u, a.d)[0], a.z)
        conf = torch.ones_like(a.conf)
        looks = torch.zeros_like(tokens[:, 0])

        # until no token changes
        live = mine.any(-1)
        while live.any():
            asked = mine & live[:, None]
            added = self(engine.model, a.states[live], tokens[live], asked[live])
            found, p = candidates(stage_a[asked] + added, a.u[asked], a.d)
            new = tokens.masked_scatter(asked, found)
            conf = conf.masked_scatter(asked, p)
            looks = looks + live
            live = live & (new != tokens).any(-1) & (looks < MOST)
            tokens = new

        sure = torch.where(mine, conf, 0.0)
        written = select_bundle(sure, bundle, a.d.tau_keep, 1, "leftmost")
        own = mine & ~(written & (sure <= a.d.tau_keep))
        token = torch.where(own, tokens, a.token)
        return Look(token, torch.where(own, conf, a.conf), written, partial=looks.float(), looks=looks)


class JointTwice(BothSides):
    def forward(self, model, states, tokens, asked):
        # a mask shows nothing
        known = (tokens != self.cfg.mask_id)[..., None]
        x = F.rms_norm(states, states.shape[-1:]) + self.show(model.wte(tokens).to(states.dtype) * known)
        B = tokens.shape[1]
        cos, sin = rotary(self.cfg, torch.arange(B, device=x.device), x.dtype)
        x = self.block(x, Context(cos, sin, block_causal_mask(B, B, x.device)))
        return model.head(x[asked])

    def look(self, engine, a, bundle):
        stage_a = head.log_probs(a.logits, self.cfg.mask_id)
        mine = bundle & ~self.stands_aside(a.z, bundle)[:, None]
        tokens = a.z
        conf = torch.ones_like(a.conf)
        for _ in range(2):
            added = self(engine.model, a.states, tokens, mine)
            found, p = candidates(stage_a[mine] + added, a.u[mine], a.d)
            tokens = tokens.masked_scatter(mine, found)
            conf = conf.masked_scatter(mine, p)
        looks = 2 * mine.any(-1)

        sure = torch.where(mine, conf, 0.0)
        written = select_bundle(sure, bundle, a.d.tau_keep, 1, "leftmost")
        own = mine & ~(written & (sure <= a.d.tau_keep))
        token = torch.where(own, tokens, a.token)
        return Look(token, torch.where(own, conf, a.conf), written, partial=looks.float(), looks=looks)


def by_sureness(conf: Tensor, asked: Tensor) -> Tensor:
    """Positions (R, B) int64: what is visible, then the masks, the surest first."""
    return torch.where(asked, conf, 2.0).argsort(dim=-1, descending=True, stable=True)


class BySureness(head.Head):
    def forward(self, model, states, tokens, asked, order):
        h = F.rms_norm(states, states.shape[-1:])
        x = torch.cat([h, h + self.show(model.wte(tokens).to(h.dtype))], dim=1)  # what asks ; what is seen
        R, B = tokens.shape
        at = torch.arange(B, device=x.device)
        cos, sin = rotary(self.cfg, torch.cat([at, at]), x.dtype)

        # a position sees the tokens before it in the order, and itself
        rank = order.argsort(-1)
        earlier = rank[:, None, :] < rank[:, :, None]
        itself = torch.eye(B, dtype=torch.bool, device=x.device).expand(R, B, B)
        asks = torch.cat([itself, earlier], dim=2)
        seen = torch.cat([torch.zeros_like(itself), itself], dim=2)
        x = self.block(x, Context(cos, sin, torch.cat([asks, seen], dim=1)[:, None]))
        return model.head(x[:, :B][asked])

    def look(self, engine, a, bundle):
        stage_a = head.log_probs(a.logits, self.cfg.mask_id)
        order = by_sureness(a.conf, bundle)
        back = order.argsort(-1)
        tokens = torch.where(bundle, candidates(stage_a, a.u, a.d)[0], a.z)
        conf = torch.ones_like(a.conf)
        final = ~bundle
        looks = torch.zeros_like(tokens[:, 0])
        live = bundle.any(-1)
        while live.any():
            asked = ~final & live[:, None]
            added = self(engine.model, a.states[live], tokens[live], asked[live], order[live])
            found, p = candidates(stage_a[asked] + added, a.u[asked], a.d)
            new = tokens.masked_scatter(asked, found)
            conf = conf.masked_scatter(asked, p)
            looks = looks + live

            # final: all up to and with the first of the order that differs
            differs = (new != tokens).gather(-1, order)
            earlier = (differs.cumsum(-1) - differs.long()).gather(-1, back)
            final = final | (asked & (earlier == 0))
            tokens = new
            together = conf.masked_fill(~(bundle & final), 1.0).prod(-1)
            live = live & ~final.all(-1) & (together > a.d.tau_keep)

        # the longest prefix of the order that is sure enough
        sure = torch.where(bundle, conf, 0.0)
        in_order = (sure.gather(-1, order), (bundle & final).gather(-1, order))
        written = select_bundle(*in_order, a.d.tau_keep, 1, "leftmost").gather(-1, back)
        own = bundle & ~(written & (sure <= a.d.tau_keep))
        token = torch.where(own, tokens, a.token)
        return Look(token, torch.where(own, conf, a.conf), written, partial=looks.float(), looks=looks)


KINDS = {
    "sureness": BySureness,
    "two_layers": TwoLayers,
    "wrong_drafts": head.Head,
    "taught_drafts": head.Head,
    "both_sides": BothSides,
    "joint_twice": JointTwice,
    "mixed": head.Head,
    "ties": head.Head,
}


def build(cfg: Config, about: dict) -> head.Head:
    return KINDS[about["kind"]](cfg, about["width"])


def step(model, batch, args, target, teacher):
    z, kind = masks_as_decoded(model, batch, args)
    masked = kind == M
    wanted = target(teacher or model, batch, z, masked, args)
    with torch.no_grad():
        ctx = batch_context(model, batch, args)
        states = model.last_n(model.prefix(z, ctx), ctx)[:, : z.shape[1]]
        stage_a = head.log_probs(model.head(states[masked]), model.cfg.mask_id)
    if args.kind == "mixed":
        own = torch.rand(len(z), 1, generator=MIX) < 0.5
        wanted = torch.where(own.to(z.device) & masked, batch.clean, wanted)
    drafts = wanted.masked_scatter(masked, stage_a.argmax(-1))

    # what is shown: the wanted tokens, drafts among them, or drafts and then its own answers
    shown = wanted
    if args.kind == "wrong_drafts":
        rng = torch.Generator().manual_seed(int(wanted.sum()) % 2**31)
        wrong = torch.rand(wanted.shape, generator=rng) < WRONG
        shown = torch.where(wrong.to(z.device), drafts, wanted)
    times = 1
    if args.kind == "both_sides":
        shown = drafts
        times = ANSWERS
    if args.kind == "joint_twice":
        shown = z
        times = 2

    B = model.cfg.block_length
    blocks = states.reshape(-1, B, states.shape[-1])
    order = ()
    if args.kind == "sureness":
        conf = torch.zeros(z.shape, device=z.device).masked_scatter(masked, stage_a.amax(-1).exp())
        order = (by_sureness(conf.view(-1, B), masked.view(-1, B)),)
    total = 0.0
    for _ in range(times):
        logits = stage_a + model.second_look(model, blocks, shown.view(-1, B), masked.view(-1, B), *order)
        ce = F.cross_entropy(logits, wanted[masked], reduction="none")
        total = total + ce.sum() / times
        if args.kind in ("both_sides", "joint_twice"):
            shown = shown.masked_scatter(masked, logits.detach().argmax(-1))
    return total, {"head": summed(ce)}


def make(cfg: Config, args: Namespace) -> head.Head:
    made = KINDS[args.kind](cfg, args.width)
    made.init_weights(generator(args.seed, "head"))
    return made


def about(args: Namespace) -> dict:
    found = head.about(args)
    return found | dict(head=dict(module="beyond.heads", width=args.width, kind=args.kind))


def choose(args: Namespace) -> Recipe:
    teacher = None
    if args.teacher:
        teacher = load_model(args.teacher, pick_device(args.device), DTYPES[args.dtype]).requires_grad_(False)
    if args.kind == "ties":
        look, beam = chain.stage_a_look, chain.beam_chain
        chain.stage_a_look = lambda *of, tie: look(*of, tie=chain.TIE)
        chain.beam_chain = lambda *of, tie: beam(*of, tie=chain.TIE)
    target = chain.target_of(args, partial(from_the_left, known={}))
    return Recipe(partial(step, target=target, teacher=teacher), head.head_alone, about, make)


if __name__ == "__main__":
    parser = build_parser(__doc__)
    chain.add_flags(parser)
    parser.set_defaults(**chain.FROM_THE_LEFT, learning_rate=5e-3, n_last=1, seed=1, out_dir="out/heads")
    parser.add_argument("--width", type=bounded(int, 1), default=384)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--teacher", help="whose chain is the target (default: --init_from's)")
    train.main(parser, choose)
