"""Chain targets: Stage B's bundle is filled with what Stage A itself would write one token at a time.

The paper's target, the clean tokens, has the marginals as its minimiser (results/theorem). This one is a function of
z: cross-entropy to one tuple has that tuple as its minimiser, so Stage B can learn to write one that holds together.
It is written in the base's own order (Config.order), without gradient, all blocks of a batch at once.

The training step is the paper's, train.cocommit_step, with functions handed in:

    masks_as_decoded      what is shown, of a model that writes from the left: masks at the end of a block
    chain_target          what Stage B is asked to write in the bundle

    python -m beyond.chain --data modes --init_from out/base --n_last 2 --beam 4 --corruption mask --out_dir out/chain
    python -m beyond.chain --target clean ...      # the paper's target in the same scope, to compare with
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import train
from corrupt import M, kinds
from lib.settings import build_parser, is_toy
from lib.util import Parser, bounded, fail, first_masked, generator, uniform
from model import Context, Model, block_causal_mask, rotary
from train import Batch, Recipe, about_lora, clean_tokens, cocommit_step, corrupt_batch

# R rows, T positions, B block_length, Z = T / B blocks of a row, N blocks of the batch or some of them, C channels,
# P positions that are asked, G key/value heads, D head dim, V vocabulary, k candidates, U = beam

TIE = 0.1  # nats, of chains on toys
REMEMBERED = 2**18  # blocks
FROM_THE_LEFT = dict(corruption="mask", beam=4, read_in="ones", max_iters=1500, batch_size=64)  # as the head is taught
AT_ONCE = 1024  # positions whose logits are made at once

# of blocks (N, B) at the positions (N, B) bool, for k tokens: how sure the best token is (N, B), and the k candidates'
# log-probabilities and tokens (N, B, k)
Look = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


# --- what a training step is handed
def chain_target(model: Model, batch: Batch, z: Tensor, bundle: Tensor, args: Namespace) -> Tensor:
    """What Stage B is asked to write: (R, T) int64, the chain in the bundle and the clean tokens elsewhere."""
    B = model.cfg.block_length
    look = stage_a_look(model, batch)
    written, _ = beam_chain(look, z.view(-1, B), bundle.view(-1, B), args.beam, model.cfg.order)
    return torch.where(bundle, written.reshape(z.shape), batch.clean)


def from_the_left(
    model: Model, batch: Batch, z: Tensor, masked: Tensor, args: Namespace, known: dict[bytes, Tensor]
) -> Tensor:
    """What the base writes at the masks (R, T) bool, one after the other from the left: the best of a beam. (R, T)
    int64.

    It is a function of what is visible in a block and before it. `known` remembers it from step to step, (B,) by what
    is visible and asked for: of names every second block comes again.
    """
    B = model.cfg.block_length
    if len(known) > REMEMBERED:
        known.clear()

    # which blocks are new
    keys = []
    for clean, shown, where in zip(batch.clean, z, masked, strict=True):
        for at in range(0, z.shape[1], B):
            block = slice(at, at + B)
            key = torch.cat([clean[:at], shown[block], where[block]])
            keys.append(key.cpu().numpy().tobytes())
    new = torch.tensor([[key not in known] for key in keys], device=z.device)

    # they are written, the others are remembered
    look = stage_a_look(model, batch, 1 if args.read_in == "ones" else B, tie=0.0)
    written, _ = beam_chain(look, z.view(-1, B), masked.view(-1, B) & new, args.beam, "leftmost", tie=0.0)
    for key, block in zip(keys, written, strict=True):
        known.setdefault(key, block)
    return torch.stack([known[key] for key in keys]).view(z.shape)


def masks_as_decoded(model: Model, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor]:
    """z and kind (R, T): masks alone. In half of the blocks they are moved to its end, as many: a prompt leaves the
    rest of its block to be written. In all of them where the leftmost are written first: then nothing else is met."""
    z, kind = corrupt_batch(model, batch, args)
    R, T = z.shape
    B = model.cfg.block_length
    masked = kind == M

    # as many positions, counted from the end
    size = masked.view(R, T // B, B).sum(-1)
    from_the_end = -torch.arange(T, device=z.device).float().expand(R, T)
    last = first_masked(from_the_end, batch.free, size, B)

    share = 0.5
    if model.cfg.order == "leftmost":
        share = 1.0
    moved = uniform(batch.draws, T // B) < share
    moved = moved.repeat_interleave(B, dim=1).to(z.device)
    z = batch.clean.masked_fill(torch.where(moved, last, masked), model.cfg.mask_id)
    return z, kinds(batch.clean, z, batch.free, model.cfg.mask_id)


# --- the chain
@torch.no_grad()
def beam_chain(
    look: Look, blocks: Tensor, bundle: Tensor, beam: int, order: str = "surest", tie: float = TIE
) -> tuple[Tensor, Tensor]:
    """The model's own decode of each block's bundle, one token at a time, with `beam` hypotheses of each block: the
    greedy chain with one, with more an approximation of the joint mode.

    blocks (N, B) int64, bundle (N, B) bool -> blocks with the bundle written (N, B), and the log-probability of what
    was written (N,). All blocks advance together, each by one position a step: its surest, or its leftmost. All
    hypotheses are filled at the same positions (the best one chooses), so that they are different tuples.
    """
    N, B = blocks.shape
    U = beam
    left = bundle.clone()
    hypotheses = blocks[:, None]  # (N, U', B), the best first; U' is 1, and U after the first step
    score = torch.zeros(N, 1, device=blocks.device)  # (N, U')
    longest = int(bundle.sum(-1).max())
    for _ in range(longest):
        # where it looks, of what is left: from the left at the next position alone
        asked = left
        if order == "leftmost":
            asked = left & (left.cumsum(-1) == 1)

        # a look at each hypothesis
        looks = [look(h, asked, U) for h in hypotheses.unbind(1)]
        sure = looks[0][0]  # (N, B), the best hypothesis's
        log_p = torch.stack([found[1] for found in looks], dim=1)  # (N, U', B, U)
        token = torch.stack([found[2] for found in looks], dim=1)

        # the candidates at the position that is written
        place = leaders(sure.masked_fill(~asked, float("-inf")), 1, tie)  # (N, 1)
        at = place[:, None, :, None].expand(N, len(looks), 1, U)
        log_p = log_p.gather(2, at)[:, :, 0]  # (N, U', U)
        token = token.gather(2, at)[:, :, 0]

        # the U best of all U' * U continuations: which hypothesis each goes on from, and with which token
        grown = (score[..., None] + log_p).flatten(1)
        best = leaders(grown, U, tie)  # (N, U)
        parent = best // U
        token = token.flatten(1).gather(1, best)
        here = torch.zeros_like(left).scatter(1, place, True)
        longer = hypotheses.gather(1, parent[..., None].expand(N, U, B))
        longer = torch.where(here[:, None], token[..., None], longer)

        # a block that is done stays as it is
        busy = left.any(-1)
        hypotheses = torch.where(busy[:, None, None], longer, hypotheses)
        score = torch.where(busy[:, None], grown.gather(1, best), score)
        left = left & ~here
    return hypotheses[:, 0], score[:, 0]


def leaders(score: Tensor, k: int, tie: float) -> Tensor:
    """Indices of the k largest of (..., n) log-probabilities; those within `tie` of the largest count as equal, and
    come by index.

    On a toy many answers are equally probable, and which of them the model puts first is noise. On names it is not:
    a head taught with ties is five points worse (results/names).
    """
    n = score.shape[-1]
    equal = score >= score.amax(-1, keepdim=True) - tie
    by_index = torch.arange(n, 0, -1, device=score.device, dtype=score.dtype)
    return torch.where(equal, by_index, score).topk(k, dim=-1).indices


# --- Stage A's candidates
def candidates_of(model: Model, h: Tensor, k: int, tie: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of final states (P, C): how sure the best token is (P,), and the k candidates (P, k), see `Look`."""
    logits = model.head(h)
    logits[:, model.cfg.mask_id] = float("-inf")  # a target that stays masked is none
    log_p = logits.log_softmax(-1)
    token = leaders(log_p, k, tie)
    return log_p.amax(-1), log_p.gather(-1, token), token


def stage_a_look(model: Model, batch: Batch, block_length: int | None = None, tie: float = TIE) -> Look:
    """Stage A of the batch's noisy blocks, without gradient, and without logits where nobody asks. block_length: they
    are read in smaller blocks than the model's own; in blocks of one, a position sees what is before it and itself."""
    finished = CleanRows(model, batch, block_length or model.cfg.block_length)

    @torch.no_grad()
    def look(blocks: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        # a block without a position to look at needs no pass; but attention takes no batch of nothing
        busy = where.any(-1)
        busy[0] |= ~busy.any()
        at = busy.nonzero()[:, 0]
        h = finished.read(blocks[at], at)[where[at]]  # (P, C)

        # the answers, -inf where nobody asked
        sure = torch.full(where.shape, float("-inf"), device=h.device)
        log_p = sure[..., None].repeat(1, 1, k)
        token = torch.zeros_like(log_p, dtype=torch.long)
        found = [candidates_of(model, part, k, tie) for part in h.split(AT_ONCE)]
        sure[where], log_p[where], token[where] = (torch.cat(parts) for parts in zip(*found, strict=True))
        return sure, log_p, token

    return look


class CleanRows:
    """Keys and values of a batch's clean rows: what decoding keeps of finished blocks.

    A chain takes many passes; with this each one runs only the blocks in work, a block a row. Their states are those
    of rows beside their clean copy, [noisy ; clean]. (Padding fills whole blocks, which nobody asks for.)
    """

    @torch.no_grad()
    def __init__(self, model: Model, batch: Batch, block_length: int):
        B = model.cfg.block_length
        self.model = model
        self.read_in = block_length  # blocks of this length, of which B is a multiple
        self.n_blocks = batch.clean.shape[1] // B
        self.past = (self.n_blocks - 1) * B  # positions of a clean row; the last block is read by none
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer
        self.row: Tensor | None = None  # whose blocks are in work; None while the clean rows are read
        if self.past:
            clean = batch.clean[:, : self.past]
            ctx = model.context(torch.ones_like(clean, dtype=torch.bool), block_length=block_length)
            ctx = replace(ctx, cache=self)
            model.last_n(model.prefix(clean, ctx), ctx)

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (N, G, B, D) of this pass -> what it may attend to: its own keys, then its row's, (N, G, T, D)."""
        if self.row is None:
            self.kv[layer] = (k, v)
            return k, v
        if not self.past:
            return k, v
        past_k, past_v = self.kv[layer]
        return torch.cat([k, past_k[self.row]], dim=2), torch.cat([v, past_v[self.row]], dim=2)

    def read(self, blocks: Tensor, at: Tensor) -> Tensor:
        """Stage A's final states (N, B, C) of noisy blocks (N, B), which are the batch's blocks at (N,), 0..R*Z-1."""
        cfg = self.model.cfg
        start = at % self.n_blocks * cfg.block_length
        positions = start[:, None] + torch.arange(cfg.block_length, device=at.device)
        cos, sin = rotary(cfg, positions, self.model.compute_dtype)

        # each block sees itself, and the clean blocks before it in its row
        N, B = blocks.shape
        itself = block_causal_mask(B, self.read_in, at.device)  # (B, B)
        before = torch.arange(self.past, device=at.device) < start[:, None]
        mask = torch.cat([itself.expand(N, B, B), before[:, None].expand(N, B, self.past)], dim=2)
        mask = mask[:, None]  # (N, 1, B, T)
        self.row = at // self.n_blocks
        ctx = Context(cos, sin, mask, cache=self)
        return self.model.last_n(self.model.prefix(blocks, ctx), ctx)


# --- the command line
def add_flags(parser: Parser) -> None:
    """Of all that is trained on chains."""
    parser.set_defaults(context="clean")
    add = parser.add_argument_group("chain (beyond the paper)").add_argument
    # fmt: off
    add("--target", choices=["chain", "clean"], default="chain", help="what is written into the bundle")
    add("--beam", type=bounded(int, 1), default=1, help="hypotheses (1: greedy; 8: near the joint mode)")
    add("--read_in", choices=["ones", "blocks"], default="blocks",
        help="how the base reads while it writes the chain: in blocks of one, from the left, or in its own")
    add("--s_min", type=bounded(int, 1), default=1, help="smallest bundle")
    # fmt: on


def target_of(args: Namespace, of_the_base: Callable) -> Callable:
    """The target that --target names, after a look at whether it can be meant."""
    if args.init_from == "scratch":
        fail("chain targets are the base's own: give a trained base by --init_from DIR")
    if args.target == "clean":
        return clean_tokens
    if args.context == "corrupted" and not is_toy(args):
        fail("chain targets read finished text before a block: they need --context clean on rows of several blocks")

    # before a run has a folder, which a corrected command could not use
    vocab_size = checkpoint.read_config(Path(args.init_from)).vocab_size
    if args.beam >= vocab_size:
        fail(f"--beam {args.beam} is more than the vocabulary of {vocab_size} can fill")
    return of_the_base


def lora_in_stage_b(model: Model, args: Namespace) -> None:
    """What learns: LoRA in the last n layers, which acts in Stage B alone, and the markers."""
    model.add_lora(args.lora_r, 2 * args.lora_r, generator(args.seed, "lora"), stage_b_alone=True)


def about_lora_in_stage_b(args: Namespace) -> dict:
    return about_lora(args) | dict(lora_in_stage_b_alone=True)


def choose(args: Namespace) -> Recipe:
    of_the_base = chain_target
    if args.read_in == "ones":
        of_the_base = partial(from_the_left, known={})
    step = partial(cocommit_step, target=target_of(args, of_the_base))

    # a model that writes from the left meets masks at the end of a block, and nothing else
    if checkpoint.read_config(Path(args.init_from)).order == "leftmost":
        if args.corruption != "mask":
            fail("a base that writes from the left has not learned to judge visible tokens: --corruption mask")
        step = partial(step, shown=masks_as_decoded)
    if args.lora == "all":
        return Recipe(step)
    return Recipe(step, lora_in_stage_b, about_lora_in_stage_b)


def main() -> None:
    parser = build_parser(__doc__)
    add_flags(parser)
    parser.add_argument(
        "--lora", choices=["stage_b", "all"], default="stage_b",
        help="adapters in Stage B alone, Stage A stays the base; or everywhere (the paper)",
    )  # fmt: skip
    train.main(parser, choose)


if __name__ == "__main__":
    main()
