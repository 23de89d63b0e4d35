"""The head: a causal look at Stage A's final states, and at the token before each position.

    logits_i = log p_A(x_i) + LMHead(Block(norm(h_i) + Show(embedding(x_{i-1}))))      attention looks left in the block

Stage B is told which positions are written together, but not what is written there. The head sees it: x_{i-1} is the
token before, whether it was visible, or written by an earlier look, or at first a draft, Stage A's own.

It reads in parallel looks. A look gives a token at every position. All up to and with the first that differs from its
draft are final: they are what writing one by one would give. The new tokens are the next drafts. Usually two looks or
three find all of it; B always do. With temperature it draws by the chain rule: with given random numbers a draw is a
function of the tokens before it, and the same looks find it.

It may refuse. It writes the longest prefix of the bundle whose product of its probabilities is above tau_keep. Where
that is nothing, Stage A's first token is written alone, and the next step sees more. So it is at holes, too, of a base
that writes the leftmost first: the head stands aside there.

It is taught what the base writes from the left, the best of a beam, where the base reads in blocks of one. It reads
better so than in its own blocks (names_base.py trains both), but takes a forward a token. With the clean tokens as its
target the head learns the law of the text, for draws.

    python -m beyond.head --init_from assets/names --out_dir out/head                    # assets/names/head
    python -m beyond.head --init_from assets/names --target clean --out_dir out/draws    # then --temperature 1
    python -m beyond.head --data modes --init_from out/base --read_in blocks --out_dir out/head-modes
    python sample.py --ckpt out/head --prompt "ARABIC LIGATURE" --tau_keep 0.8
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
from beyond.chain import from_the_left, masks_as_decoded
from cache import Cached, Uncached
from corrupt import M, summed
from lib.config import Config
from lib.settings import build_parser
from lib.util import bounded, fail, generator
from model import Block, Context, Linear, Model, block_causal_mask, rotary
from sample import Look, StageA, candidates, select_bundle
from train import Batch, Losses, Recipe, batch_context

# R rows, T positions of a row, B block_length, C channels, V vocabulary, P positions that are asked


# --- the head
class Head(nn.Module):
    """One dense block of the model's geometry, and a map that shows each position the token before it."""

    n_layer = 1  # what one look at a whole block costs, in layers of the model

    def __init__(self, cfg: Config, width: int):
        super().__init__()
        self.cfg = replace(cfg, n_dense=cfg.n_layer, d_dense=width)
        self.block = Block(self.cfg, 0)
        self.show = Linear(cfg.n_embd, cfg.n_embd)

    def init_weights(self, rng: torch.Generator) -> None:
        """Random, but for the projections to the residual stream: with those at zero a block changes nothing."""
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight", "bias")):
                p.data.zero_()
            elif p.dim() == 2:
                p.data.normal_(0.0, self.cfg.n_embd**-0.5, generator=rng)

    def forward(self, model: Model, states: Tensor, tokens: Tensor, asked: Tensor) -> Tensor:
        """What the head adds to Stage A's log-probabilities where it is asked.

        states (R, B, C) Stage A's final ones; tokens (R, B) int64, as far as they are known; asked (R, B)
        bool -> (P, V) float32.
        """
        # the token before each position; before the first of a block there is none
        before = model.wte(tokens).to(states.dtype)
        before = F.pad(before[:, :-1], (0, 0, 1, 0))  # (R, B, C)

        # states grow with depth, and the LM head norms them anyway
        x = F.rms_norm(states, states.shape[-1:]) + self.show(before)

        # attention to the left, inside the block, whose states have seen the context
        B = tokens.shape[1]
        cos, sin = rotary(self.cfg, torch.arange(B, device=x.device), x.dtype)
        x = self.block(x, Context(cos, sin, block_causal_mask(B, 1, x.device)))
        return model.head(x[asked])

    def look(self, engine: Cached | Uncached, a: StageA, bundle: Tensor) -> Look:
        """Write the bundle (R, B) bool, or a prefix of it, in the place of Stage B: see sample.stage_b_look."""
        stage_a = log_probs(a.logits, self.cfg.mask_id)
        mine = bundle & ~self.stands_aside(a.z, bundle)[:, None]

        # the first drafts are Stage A's, drawn by the numbers that the head draws by
        draft, _ = candidates(stage_a, a.u, a.d)
        tokens = torch.where(mine, draft, a.z)
        conf = torch.ones_like(a.conf)
        final = ~mine
        looks = torch.zeros_like(tokens[:, 0])

        live = mine.any(-1)
        while live.any():
            # a look at the rows that are not done
            asked = ~final & live[:, None]
            added = self(engine.model, a.states[live], tokens[live], asked[live])
            found, p = candidates(stage_a[asked] + added, a.u[asked], a.d)
            new = tokens.masked_scatter(asked, found)
            conf = conf.masked_scatter(asked, p)
            looks = looks + live

            # what has read nothing but final tokens is final: all up to and with the first that differs
            differs = new != tokens
            earlier = differs.cumsum(-1) - differs.long()
            final = final | (asked & (earlier == 0))
            tokens = new

            # a row is done when all is final, or when what is final falls below tau_keep
            together = conf.masked_fill(~(mine & final), 1.0).cumprod(-1)
            live = live & ~final.all(-1) & (together[:, -1] > a.d.tau_keep)

        # the longest prefix that is sure enough, or else Stage A's first token alone
        sure = torch.where(mine, conf, 0.0)
        written = select_bundle(sure, bundle & final, a.d.tau_keep, 1, "leftmost")
        alone = written & (sure <= a.d.tau_keep)

        # elsewhere it says what Stage A says
        own = mine & ~alone
        token = torch.where(own, tokens, a.token)
        conf = torch.where(own, conf, a.conf)

        # every look reads the whole block
        return Look(token, conf, written, partial=looks.float(), looks=looks)

    def stands_aside(self, z: Tensor, bundle: Tensor) -> Tensor:
        """(R,) bool: is something visible behind a mask? Where the leftmost are written first the head has been taught
        masks at a block's end alone (chain.masks_as_decoded), and at holes it is worse than Stage A."""
        if self.cfg.order == "surest":
            return torch.zeros_like(bundle[:, 0])
        behind = bundle.cumsum(-1) > 0
        return (behind & (z != self.cfg.mask_id)).any(-1)


def log_probs(logits: Tensor, mask_id: int) -> Tensor:
    """Stage A's (..., V), among tokens: a mask is none."""
    no_mask = torch.arange(logits.shape[-1], device=logits.device) == mask_id
    return logits.masked_fill(no_mask, float("-inf")).log_softmax(-1)


def build(cfg: Config, about: dict) -> Head:
    """The head that adapter.json speaks of, for the tensors beside it."""
    return Head(cfg, about["width"])


# --- the training step
def head_step(model: Model, batch: Batch, args: Namespace, target: Callable) -> Losses:
    """The head's loss at all masks, each read after the wanted tokens before it; Stage A is the frozen base."""
    # what the model is shown: masks alone, mostly at the end of a block, as a prompt leaves them
    z, kind = masks_as_decoded(model, batch, args)
    masked = kind == M
    wanted = target(model, batch, z, masked, args)

    # Stage A's final states
    with torch.no_grad():
        ctx = batch_context(model, batch, args)
        states = model.last_n(model.prefix(z, ctx), ctx)[:, : z.shape[1]]  # (R, T, C)
        stage_a = log_probs(model.head(states[masked]), model.cfg.mask_id)  # (P, V)

    # all positions in one look, block by block
    B = model.cfg.block_length
    blocks = states.reshape(-1, B, states.shape[-1])
    added = model.second_look(model, blocks, wanted.view(-1, B), masked.view(-1, B))
    ce = F.cross_entropy(stage_a + added, wanted[masked], reduction="none")
    return ce.sum(), {"head": summed(ce)}


# --- what the loop is handed
def make_head(cfg: Config, args: Namespace) -> Head:
    head = Head(cfg, args.width)
    head.init_weights(generator(args.seed, "head"))
    return head


def head_alone(model: Model, args: Namespace) -> None:
    """What learns."""
    model.requires_grad_(False)
    model.second_look.requires_grad_(True)


def about(args: Namespace) -> dict:
    """What adapter.json says of it, and how it is decoded: every mask at once, no edits, and what is refused waits."""
    head = dict(module="beyond.head", width=args.width)
    return dict(head=head, decoding=dict(tau_m2t=-1.0, tau_t2t=None, tau_keep=0.5))


def choose(args: Namespace) -> Recipe:
    if args.corruption != "mask" or args.context != "clean":
        fail("a head reads what decoding will show it: --corruption mask and --context clean")
    if args.n_rounds > 1:
        fail(f"--n_rounds {args.n_rounds}: a head looks as often as it needs to")
    target = chain.target_of(args, partial(from_the_left, known={}))
    step = partial(head_step, target=target)
    return Recipe(step, head_alone, about, make_head)


def main() -> None:
    parser = build_parser(__doc__)
    chain.add_flags(parser)
    parser.set_defaults(**chain.FROM_THE_LEFT, learning_rate=5e-3, n_last=1, seed=1, out_dir="out/head")
    parser.add_argument("--width", type=bounded(int, 1), default=384, help="of the head's SwiGLU")
    train.main(parser, choose)


if __name__ == "__main__":
    main()
