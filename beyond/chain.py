"""Chain targets: Stage B's bundle is filled with what Stage A itself would write one token at a time.

The paper's target, the clean tokens, has the marginals as its minimiser (results/theorem). This one is a function of
z: cross-entropy to one tuple has that tuple as its minimiser, so Stage B can learn to write one that holds together.
It is written in the base's own order (Config.order), without gradient, all blocks of a batch at once; its total
correlation is zero by construction.

Earlier blocks that are masked themselves (--context corrupted on rows of several blocks) are refused: the chain reads
finished text before a block, where Stage B would see masks.

    python -m beyond.chain --data modes --init_from out/base --n_last 2 --beam 4 --corruption mask --out_dir out/chain
    python -m beyond.chain --target clean ...      # the paper's target in the same scope, to compare with

`chain_step` below is cocommit_step of train.py with two lines changed: the bundle and the target.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import settings
import train
from beyond.stage_b_only import stage_b_losses, stage_b_recipe
from corrupt import M, draw_bundle, three_term_loss
from lib.util import Parser, bounded, fail, first_masked, uniform
from model import Model, sequence_context
from sample import precedence
from train import Batch, Losses, Recipe, batch_context, corrupt_batch

# R rows, T positions, B block_length, Z = T / B blocks of a row, N blocks of the batch or some of them, C channels,
# P selected positions, G key/value heads, D head dim, V vocabulary, U = beam, U' hypotheses so far (1, then U)

TIE = 0.1  # nats
AT_ONCE = 1024  # positions whose logits are made at once

# of blocks (N, B) at the positions (N, B) bool, for k tokens: how sure the best token is (N, B), and the k candidates'
# log-probabilities and tokens (N, B, k)
Look = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


# --- the training step
def chain_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """The paper's step with bundles like those of decoding, and with the chain as Stage B's target."""
    # what the model is shown
    z, kind = corrupt_batch(model, batch, args)
    masked = kind == M

    # finished text before each block, read once; then the bundle, and what the model would write into it
    finished = CleanCache(model, batch)
    bundle = bundle_as_decoded(finished, z, masked, batch, args)
    wanted = stage_b_target(finished, z, bundle, batch, args)

    # adapters in Stage B alone, Stage A is the base
    if args.lora == "stage_b":
        return stage_b_losses(model, batch, z, kind, bundle, wanted, args)

    # or everywhere, as in the paper
    ctx = batch_context(model, batch, args)
    h = model.prefix(z, ctx)
    stage_a, stage_b = model.both_stages(h, bundle, ctx, model.cfg.n_rounds)
    loss_a, terms_a = three_term_loss(model, stage_a, batch.clean, kind, fill=masked)
    loss_b, terms_b = three_term_loss(model, stage_b, wanted, kind, fill=bundle)
    return loss_a + loss_b, torch.stack([terms_a, terms_b])


def bundle_as_decoded(finished: "CleanCache", z: Tensor, masked: Tensor, batch: Batch, args: Namespace) -> Tensor:
    """(R, T) bool: in a share of the blocks the first masks of the model's order, as decoding would have it; in the
    others random ones, as the paper draws them."""
    B = finished.B
    if args.confident_share == 0:
        group = train.bundle_group(finished.model, batch, args)
        return draw_bundle(masked, group, args.s_min, args.s_max, batch.draws)

    # how many in each block, and in which order: by chance
    n_blocks = z.shape[1] // B
    size = args.s_min + (uniform(batch.draws, n_blocks) * (args.s_max - args.s_min + 1)).long()
    key = uniform(batch.draws, z.shape[1]).to(z.device)

    # or as decoding would choose them
    decoded = uniform(batch.draws, n_blocks) < args.confident_share
    decoded = decoded.repeat_interleave(B, dim=1).to(z.device)
    order = finished.model.cfg.order
    sure = torch.zeros(z.shape, device=z.device)
    if order == "surest":
        sure, _, _ = stage_a_look(finished)(z.view(-1, B), masked.view(-1, B), 1)
        sure = sure.view(z.shape).masked_fill(~masked, 0.0)
    key = torch.where(decoded, precedence(sure, order), key)
    return first_masked(key, masked, size.to(z.device), B)


def stage_b_target(finished: "CleanCache", z: Tensor, bundle: Tensor, batch: Batch, args: Namespace) -> Tensor:
    """What Stage B is asked to write: (R, T) int64, the chain in the bundle and the clean tokens elsewhere."""
    if args.target == "clean":
        return batch.clean
    B = finished.B
    order = finished.model.cfg.order
    blocks = z.view(-1, B)
    in_bundle = bundle.view(-1, B)
    if args.beam == 1:
        written, _ = greedy_chain(stage_a_look(finished), blocks, in_bundle, order)
    else:
        written, _ = beam_chain(stage_a_look(finished), blocks, in_bundle, args.beam, order)
    return torch.where(bundle, written.reshape(z.shape), batch.clean)


# --- the chain
@torch.no_grad()
def greedy_chain(look: Look, blocks: Tensor, bundle: Tensor, order: str = "surest") -> tuple[Tensor, Tensor]:
    """The model's own decode of each block's bundle, one token at a time.

    blocks (N, B) int64, bundle (N, B) bool -> blocks with the bundle written (N, B), and the log-probability of what
    was written (N,). All blocks advance together, each by one position a step: its surest, or its leftmost.
    """
    left = bundle.clone()
    score = torch.zeros(len(blocks), device=blocks.device)
    for _ in range(longest(bundle)):
        sure, log_p, token = look(blocks, left, 1)

        # each block writes the next position of the order; a block that is done writes nothing
        place = next_place(sure, left, order)
        here = torch.zeros_like(left).scatter(1, place, True) & left
        blocks = torch.where(here, token[..., 0], blocks)
        score = score + log_p[..., 0].masked_fill(~here, 0.0).sum(-1)
        left = left & ~here
    return blocks, score


@torch.no_grad()
def beam_chain(look: Look, blocks: Tensor, bundle: Tensor, beam: int, order: str = "surest") -> tuple[Tensor, Tensor]:
    """`greedy_chain` that keeps `beam` hypotheses of each block: an approximation of the joint mode.

    All hypotheses are filled at the same positions (the best one chooses), so that they are different tuples.
    """
    N, B = blocks.shape
    U = beam
    left = bundle.clone()
    hypotheses = blocks[:, None]  # (N, U', B), the best first
    score = torch.zeros(N, 1, device=blocks.device)  # (N, U')
    for _ in range(longest(bundle)):
        # a look at each hypothesis
        looks = [look(h, left, U) for h in hypotheses.unbind(1)]
        sure = looks[0][0]  # (N, B), the best hypothesis's
        log_p = torch.stack([found[1] for found in looks], dim=1)  # (N, U', B, U)
        token = torch.stack([found[2] for found in looks], dim=1)

        # the candidates at the position that is written
        place = next_place(sure, left, order)
        at = place[:, None, :, None].expand(N, len(looks), 1, U)
        log_p = log_p.gather(2, at)[:, :, 0]  # (N, U', U)
        token = token.gather(2, at)[:, :, 0]

        # the U best of all U' * U continuations: which hypothesis each goes on from, and with which token
        grown = (score[..., None] + log_p).flatten(1)
        best = leaders(grown, U)  # (N, U)
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


def next_place(sure: Tensor, left: Tensor, order: str) -> Tensor:
    """The position that a chain writes next: sure (N, B) log-probabilities, left (N, B) bool -> (N, 1) int64."""
    if order == "leftmost":
        return left.to(torch.uint8).argmax(-1, keepdim=True)
    return leaders(sure, 1)


def longest(bundle: Tensor) -> int:
    """(N, B) bool -> the size of the largest bundle: how many steps a chain takes."""
    return int(bundle.sum(-1).max())


def leaders(score: Tensor, k: int) -> Tensor:
    """Indices of the k largest of (..., n) log-probabilities; those within TIE of the largest count as equal, and come
    by index. Which of two near-equals the model puts first is noise that a target must not depend on."""
    n = score.shape[-1]
    equal = score >= score.amax(-1, keepdim=True) - TIE
    by_index = torch.arange(n, 0, -1, device=score.device, dtype=score.dtype)
    return torch.where(equal, by_index, score).topk(k, dim=-1).indices


# --- Stage A's candidates
def best_tokens(log_p: Tensor, k: int, chunk: slice) -> tuple[Tensor, Tensor]:
    """Of (P, V) log-probabilities the k best and their tokens, (P, k) each. (chunk: which of all positions these are,
    for an extension that draws.)"""
    token = leaders(log_p, k)
    return log_p.gather(-1, token), token


def stage_a_look(finished: "CleanCache", pick: Callable = best_tokens) -> Look:
    """Stage A of the batch's noisy blocks, without gradient, and without logits where nobody asks."""
    model = finished.model

    @torch.no_grad()
    def look(blocks: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        # a block without a position to look at needs no pass; but of many processes each has to make as many
        busy = where.any(-1)
        if not busy.any():
            busy = busy.clone()
            busy[0] = True
        at = busy.nonzero()[:, 0]
        h = finished.read(blocks[at], at)[where[at]]  # (P, C)

        # logits of some positions at a time
        sure = [h.new_empty(0)]
        log_p = [h.new_empty(0, k)]
        token = [blocks.new_empty(0, k)]
        for start in range(0, len(h), AT_ONCE):
            chunk = slice(start, start + AT_ONCE)
            part = model.head(h[chunk])
            part[:, model.cfg.mask_id] = float("-inf")  # a target that stays masked is none
            part = part.log_softmax(-1)
            sure.append(part.amax(-1))
            picked = pick(part, k, chunk)
            log_p.append(picked[0])
            token.append(picked[1])

        # back to blocks, -inf where nobody asked
        everywhere = where[..., None].expand(*where.shape, k)
        nowhere = torch.full(where.shape, float("-inf"), device=h.device)
        all_sure = nowhere.masked_scatter(where, torch.cat(sure).float())
        all_log_p = nowhere[..., None].expand(everywhere.shape).masked_scatter(everywhere, torch.cat(log_p).float())
        all_token = torch.zeros_like(everywhere, dtype=torch.long).masked_scatter(everywhere, torch.cat(token))
        return all_sure, all_log_p, all_token

    return look


class CleanCache:
    """Keys and values of a batch's clean rows: what decoding keeps of finished blocks.

    A chain takes many passes; with this each pass runs only the blocks in work, a block a row. The states are those of
    rows read beside their clean copy, [noisy ; clean].
    """

    def __init__(self, model: Model, batch: Batch):
        R, T = batch.clean.shape
        B = model.cfg.block_length
        Z = T // B
        self.model = model
        self.B = B
        self.Z = Z
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows: Tensor | None = None  # whose blocks are in work; None while the clean rows are read
        self.clean: Tensor | None = batch.clean  # what is still to be read, when a block first asks for it
        ctx = sequence_context(model.cfg, batch.real, model.compute_dtype)
        self.ctx = replace(ctx, cache=self)

        # what each position of a block may attend to: its own block, then the clean blocks before it in its row
        sees = ctx.mask.expand(R, 1, T, T).view(R, Z, B, Z, B)
        itself = sees.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # (R, Z, B, B)
        block = torch.arange(Z, device=batch.clean.device)
        earlier = block[:, None] > block
        before = (sees & earlier[:, None, :, None]).flatten(3)  # (R, Z, B, T)
        if Z == 1:
            before = before[..., :0]
        mask = torch.cat([itself, before], dim=-1)
        self.mask = mask.flatten(0, 1)[:, None]  # (R * Z, 1, B, B + T)

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (N, G, B, D) of this pass -> what it may attend to: its own keys, then its row's, (N, G, B + T, D)."""
        if self.rows is None:
            self.kv[layer] = (k, v)
            return k, v
        if layer not in self.kv:  # rows of a single block
            return k, v
        row_k, row_v = self.kv[layer]
        return torch.cat([k, row_k[self.rows]], dim=2), torch.cat([v, row_v[self.rows]], dim=2)

    @torch.no_grad()
    def read(self, blocks: Tensor, at: Tensor) -> Tensor:
        """Stage A's final states (N, B, C) of noisy blocks (N, B), which are the batch's blocks at (N,), 0..R*Z-1."""
        # the clean rows first; a row of a single block has no context
        if self.clean is not None and self.Z > 1:
            self.model.last_n(self.model.prefix(self.clean, self.ctx), self.ctx)
        self.clean = None

        self.rows = at // self.Z
        position = (at % self.Z * self.B)[:, None] + torch.arange(self.B, device=blocks.device)
        ctx = replace(self.ctx, cos=self.ctx.cos[position], sin=self.ctx.sin[position], mask=self.mask[at], slices=None)
        return self.model.last_n(self.model.prefix(blocks, ctx), ctx)


# --- the command line
def build_parser(doc: str) -> Parser:
    p = settings.build_parser(doc)
    p.set_defaults(context="clean")
    add = p.add_argument_group("chain (beyond the paper)").add_argument
    # fmt: off
    add("--target", choices=["chain", "clean"], default="chain", help="what Stage B writes into the bundle")
    add("--beam", type=bounded(int, 1), default=1, help="hypotheses (1: greedy; 8: near the joint mode)")
    add("--confident_share", type=bounded(float, 0, 1), default=0.0,
        help="share of the blocks whose bundle is the first masks of the base's order, as in decoding")
    add("--lora", choices=["stage_b", "all"], default="stage_b",
        help="adapters in Stage B alone, Stage A stays the base; or everywhere (the paper)")
    # fmt: on
    return p


def check(args: Namespace) -> None:
    """Refuse what cannot be meant."""
    several_blocks = not settings.is_toy(args)
    if args.target == "chain" and args.context == "corrupted" and several_blocks:
        fail("chain targets read finished text before a block: they need --context clean on rows of several blocks")
    if args.target == "chain" and args.bundle_scope == "sequence":
        fail("a chain decodes a bundle inside its block: it needs --bundle_scope block")
    if args.stage_a_only or args.init_from == "scratch":
        fail("chain targets are the base's own: give a trained base by --init_from DIR")

    # before a run has a folder, which a corrected command could not use
    vocab_size = checkpoint.read_config(Path(args.init_from)).vocab_size
    if args.beam >= vocab_size:
        fail(f"--beam {args.beam} is more than the vocabulary of {vocab_size} can fill")


def choose(args: Namespace) -> Recipe:
    check(args)
    command = "python -m beyond.chain"
    if args.lora == "stage_b":
        return stage_b_recipe(chain_step, command)
    return Recipe(chain_step, command=command)


def main() -> None:
    train.main(build_parser(__doc__), choose)


if __name__ == "__main__":
    main()
