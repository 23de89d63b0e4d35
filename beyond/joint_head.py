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

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache import Cached, Uncached
from lib.config import Config
from model import Block, Context, rotary
from sample import Look, StageA, candidates, select_bundle

# R rows, B block_length, C channels, V vocabulary, P bundle positions

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
