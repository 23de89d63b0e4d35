"""The joint head: a dense block of its own that looks once more at Stage A's final states and writes the bundle.

    y <- y + 1_S * Block(y)      from y = Stage A's final states, normed; S the bundle

The paper's Stage B runs the last n layers again, with a marker. The joint head is no Stage B: it has weights of its
own (a dense block beside a mixture of experts is small), reads no cache (attention stays inside the block of text,
whose states have seen the context), keeps what is not in the bundle at Stage A's states, and starts as Stage A,
because its output projections are zero. It is trained on chain targets (chain.py). A bundle of one token has nothing
to coordinate and is written as it is.

It may refuse. What does not pass tau_keep, by the same rule as Stage A's tau_m2t, stays masked, for the next step to
decide. A chain starts with Stage A's own first token, which is therefore always written; where the head would write
another there, the rest of what it wants is refused as well.

    python train.py --init_from scratch --stage_a_only --out_dir out/base
    python -m beyond.joint_head --data names --init_from out/base --max_iters 1200 --out_dir out/joint
    python sample.py --ckpt out/joint --tau_m2t 0.1 --prompt "ARABIC LIGATURE"
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train
from beyond import chain
from beyond.chain import bundle_as_decoded, masks_as_decoded
from cache import Cached, Uncached
from corrupt import M, cross_entropy, summed
from lib.config import Config
from lib.settings import build_parser
from lib.util import bounded, fail, generator
from model import Block, Context, Model, rotary
from sample import Look, StageA, candidates, select_bundle
from train import Batch, Losses, Recipe, batch_context

# R rows, T positions, B block_length, C channels, V vocabulary, P bundle positions

LEAST = 2  # tokens in a bundle that is looked at again


class JointHead(nn.Module):
    n_layer = 1  # what one look at a whole block costs, in layers of the model

    def __init__(self, cfg: Config, width: int):
        super().__init__()
        self.cfg = replace(cfg, n_dense=cfg.n_layer, d_dense=width)
        self.block = Block(self.cfg, 0)

    def init_weights(self, rng: torch.Generator) -> None:
        """Random, but for the projections to the residual stream: with those at zero it changes nothing yet."""
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight", "bias")):
                p.data.zero_()
            elif p.dim() == 2:
                p.data.normal_(0.0, self.cfg.n_embd**-0.5, generator=rng)

    def forward(self, h: Tensor, bundle: Tensor) -> Tensor:
        """h (R, B, C) Stage A's final states of one block a row, bundle (R, B) bool -> states before the LM head at
        the bundle's positions, (P, C)."""
        # states grow with depth, and the LM head norms them anyway
        y = F.rms_norm(h, h.shape[-1:])
        cos, sin = rotary(self.cfg, torch.arange(h.shape[1], device=h.device), h.dtype)
        ctx = Context(cos, sin, mask=None)

        # all positions are read, the bundle's alone are changed
        y = y[bundle] + self.block.attn(self.block.norm_1(y), ctx)[bundle]
        return y + self.block.mlp(self.block.norm_2(y))

    def look(self, engine: Cached | Uncached, a: StageA, bundle: Tensor) -> Look:
        """What is written of the bundle (R, B) in the place of Stage B, see sample.stage_b_look."""
        looked_at = bundle & (bundle.sum(-1, keepdim=True) >= LEAST)
        cost = looked_at.float().mean(-1)
        looks = looked_at.any(-1).long()
        if not looked_at.any():
            return Look(a.token, a.conf, bundle, cost, looks)

        # its tokens, and how sure it is of them
        logits = engine.model.head(self(a.states, looked_at))  # (P, V)
        token, conf = candidates(logits, a.u[looked_at], a.d)
        token = a.token.masked_scatter(looked_at, token)
        conf = a.conf.masked_scatter(looked_at, conf)
        if a.d.tau_keep == 0:
            return Look(token, conf, bundle, cost, looks)

        # what passes is kept, and Stage A's first token always
        order = self.cfg.order
        passing = select_bundle(conf, looked_at, a.d.tau_keep, 0, order)
        first = select_bundle(a.conf, looked_at, 1.0, 1, order)  # no probability is above 1: the first of the order

        # a head that wants another first token has another chain in mind: nothing of it is kept
        other = first & (token != a.token)
        token = torch.where(other, a.token, token)
        conf = torch.where(other, a.conf, conf)
        kept = first | (passing & ~other.any(-1, keepdim=True))
        return Look(token, conf, bundle & ~(looked_at & ~kept), cost, looks)


def build(cfg: Config, about: dict) -> JointHead:
    """The head that adapter.json speaks of, for the tensors beside it."""
    return JointHead(cfg, about["width"])


# --- the training step
def joint_head_step(model: Model, batch: Batch, args: Namespace, target: Callable) -> Losses:
    """The head's loss on chain targets; Stage A is the frozen base."""
    # what the model is shown: masks alone, in half of the blocks at its end, as a prompt leaves them
    z, kind = masks_as_decoded(model, batch, args)
    B = model.cfg.block_length

    # the bundle, and what the base would write into it one token at a time; a small one has nothing to coordinate
    bundle = bundle_as_decoded(model, batch, z, kind == M, args)
    size = bundle.view(len(z), -1, B).sum(-1)
    bundle = bundle & (size >= LEAST).repeat_interleave(B, dim=1)
    wanted = target(model, batch, z, bundle, args)

    # Stage A's final states, block by block
    with torch.no_grad():
        ctx = batch_context(model, batch, args)
        h = model.last_n(model.prefix(z, ctx), ctx)[:, : z.shape[1]]
    h = h.reshape(-1, B, h.shape[-1])

    # the head looks again, and is asked for the bundle alone
    h = model.second_look(h, bundle.view(-1, B))
    ce = cross_entropy(model, h, wanted[bundle])
    return ce.sum(), {"head": summed(ce)}


# --- what the loop is handed
def make_head(cfg: Config, args: Namespace) -> JointHead:
    head = JointHead(cfg, args.width)
    head.init_weights(generator(args.seed, "joint head"))
    return head


def head_alone(model: Model, args: Namespace) -> None:
    """What learns."""
    model.requires_grad_(False)
    model.second_look.requires_grad_(True)


def about(args: Namespace) -> dict:
    """What adapter.json says of it, and how it is decoded: every mask at once, no edits, and what is refused waits."""
    head = dict(module="beyond.joint_head", width=args.width)
    return dict(head=head, decoding=dict(tau_m2t=-1.0, tau_t2t=None, tau_keep=0.5))


def choose(args: Namespace) -> Recipe:
    if args.corruption != "mask" or args.context != "clean":
        fail("a joint head reads what decoding will show it: --corruption mask and --context clean")
    if args.n_rounds > 1:
        fail(f"--n_rounds {args.n_rounds}: a joint head looks once")
    step = partial(joint_head_step, target=chain.target_of(args))
    return Recipe(step, head_alone, about, make_head)


def main() -> None:
    parser = build_parser(__doc__)
    chain.add_flags(parser)
    parser.set_defaults(
        corruption="mask", confident_share=0.75, s_min=2, s_max=8, learning_rate=5e-3, batch_size=64
    )  # fmt: skip
    parser.add_argument("--width", type=bounded(int, 1), default=192, help="of the head's SwiGLU")
    train.main(parser, choose)


if __name__ == "__main__":
    main()
