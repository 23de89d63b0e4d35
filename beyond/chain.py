"""Chain targets: Stage B's bundle is filled with what Stage A itself would write one token at a time.

The paper's target, the clean tokens, has the marginals as its minimiser (results/theorem). This one is a function of z:
cross-entropy to one tuple has that tuple as its minimiser, so Stage B can learn to write one that holds together. Most
confident position first, total correlation zero by construction, without gradient, all blocks of the batch at once.

It refuses earlier blocks that are masked themselves (--context corrupted on rows of several blocks): the chain reads
finished text before a block, where Stage B would see masks.

    python -m beyond.chain --data modes --init_from out/base --n_last 2 --beam 4 --corruption mask --out_dir out/chain
    python -m beyond.chain --target clean ...      # the paper's target in the same scope, to compare with
"""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import train
from beyond.stage_b_only import StageBOnlyObjective
from corrupt import Draws, M, first_masked, uniform
from data import bounded, fail
from model import Context, Model
from train import Objective

# R rows (r of them at a time), T positions, B block_length, Z = T / B blocks, n selected positions, C channels,
# G key/value heads, D head dim, V vocabulary, U = beam

TIE = 0.1  # nats
PIECE = 1024  # positions whose logits are made at once
# (z (R, T), where (R, T) bool with n True, k) -> what `choose` returns for each of the n positions
Predict = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@torch.no_grad()
def chain_decode(z: Tensor, bundle: Tensor, B: int, beam: int, predict: Predict, steps: int) -> tuple[Tensor, Tensor]:
    """The model's own chain-rule decode of each block's bundle.

    z, bundle (R, T) -> z with the bundle written (R, T) int64, and the log-probability of what was written in each
    block (R, Z) float32. All blocks of all rows advance together, each by its most confident position a step, for
    `steps` steps, the size of the largest bundle. With `beam` U > 1 each block keeps its U best hypotheses, all filled
    at the same positions (the best one chooses), so that they are different tuples, and the best is the result.
    """
    (R, T), U = z.shape, beam
    Z = T // B
    hypotheses, left = z[None], bundle.clone()  # (h, R, T): h is 1, then U, sorted, the best first; (R, T)
    score = torch.zeros(R, Z, 1, device=z.device)  # (R, Z, h)
    start = B * torch.arange(Z, device=z.device)
    for _ in range(steps):
        h = len(hypotheses)
        log_p, token, sure = predict(hypotheses.flatten(0, 1), left.repeat(h, 1), U)  # (h * n, U) twice, (h * n,)
        everywhere = left.expand(h, R, T)[..., None]
        log_p = log_p.new_full((h, R, T, U), float("-inf")).masked_scatter(everywhere, log_p)
        token = token.new_zeros((h, R, T, U)).masked_scatter(everywhere, token)
        sure = sure.new_full((R, T), float("-inf")).masked_scatter(left, sure)  # the best hypothesis's, which is first
        busy = left.view(R, Z, B).any(-1)  # (R, Z)
        at = start + leaders(sure.view(R, Z, B), 1)[..., 0]  # (R, Z) the position that each block writes
        place = at[None, ..., None].expand(h, R, Z, U)
        log_p, token = (t.gather(2, place).permute(1, 2, 0, 3).flatten(2) for t in (log_p, token))  # (R, Z, h * U)
        grown_score = score.repeat_interleave(U, dim=-1) + log_p
        choice = leaders(grown_score, U)
        parent, token = choice // U, token.gather(-1, choice)
        blocks = hypotheses.view(h, R, Z, B).permute(1, 2, 0, 3)  # (R, Z, h, B)
        grown = blocks.gather(2, parent[..., None].expand(R, Z, U, B))
        inside = (at - start)[..., None, None].expand(R, Z, U, 1)
        grown = grown.scatter(3, inside, token[..., None])
        blocks = torch.where(busy[..., None, None], grown, blocks)
        score = torch.where(busy[..., None], grown_score.gather(-1, choice), score)
        hypotheses = blocks.permute(2, 0, 1, 3).reshape(U, R, T)
        left = left & ~torch.zeros_like(left).scatter(1, at, busy)
    return hypotheses[0], score[..., 0]


def longest(bundle: Tensor, B: int) -> int:
    """The size of the largest bundle: how many steps a chain takes."""
    return int(bundle.view(len(bundle), -1, B).sum(-1).max())


def leaders(score: Tensor, k: int) -> Tensor:
    """Indices of the k largest of (..., n) log-probabilities; those within TIE of the largest count as equal, and come
    by index. Which of two near-equals the model puts first is noise that a target must not depend on."""
    n = score.shape[-1]
    equal = score >= score.amax(-1, keepdim=True) - TIE
    by_index = torch.arange(n, 0, -1, device=score.device, dtype=score.dtype)
    return torch.where(equal, by_index, score).topk(k, dim=-1).indices


def choose(log_p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a chain needs of (n, V) log-probabilities: the k best, their tokens, (n, k) twice, and the largest (n,)."""
    token = leaders(log_p, k)
    return log_p.gather(-1, token), token, log_p.amax(-1)


class Clean:
    """The keys and values of a batch's clean rows: what decoding keeps of finished blocks. A chain's many passes run
    only blocks in work, each a row of its own. The same states as from [noisy ; clean], whatever the stages read."""

    @torch.no_grad()
    def __init__(self, model: Model, x: Tensor, ctx: Context):
        """x (R, T) int64; ctx is of these rows, or of rows [noisy ; clean] of 2T."""
        (R, T), B = x.shape, model.cfg.block_length
        self.model, self.x, self.kv, self.rows = model, x, {}, None
        cut = dict(cos=ctx.cos[:T], sin=ctx.sin[:T], mask=ctx.mask[..., -T:, -T:], pieces=None)
        self.ctx = replace(ctx, **cut, cache=self)
        if T > B:
            model.last_n(model.prefix(x, self.ctx), self.ctx)
        sees = self.ctx.mask.expand(R, 1, T, T).view(R, T // B, B, T // B, B)
        itself = sees.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # (R, Z, B, B)
        block = torch.arange(T // B, device=x.device)
        before = (sees & (block[:, None] > block)[:, None, :, None]).flatten(3)[..., : T * (T > B)]  # (R, Z, B, T)
        self.mask = torch.cat([itself, before], dim=-1).flatten(0, 1)[:, None]  # (R * Z, 1, B, B + T)

    def update(self, layer: int, round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (n, G, B, D) of this pass -> what it may attend to, (n, G, B + T, D): its own keys, then its row's."""
        if self.rows is None:
            self.kv[layer] = k, v
        elif self.kv:
            k, v = (torch.cat([new, t[self.rows]], dim=2) for new, t in zip((k, v), self.kv[layer], strict=True))
        return k, v

    @torch.no_grad()
    def read(self, z: Tensor, at: Tensor) -> Tensor:
        """Stage A's final states (n, B, C) of noisy blocks z (n, B), the batch's blocks at (n,), of 0..R*Z-1."""
        Z, B = self.x.shape[1] // z.shape[1], z.shape[1]
        self.rows, here = at // Z, (at % Z * B)[:, None] + torch.arange(B, device=z.device)
        ctx = replace(self.ctx, cos=self.ctx.cos[here], sin=self.ctx.sin[here], mask=self.mask[at])
        return self.model.last_n(self.model.prefix(z, ctx), ctx)


class Chain(Objective):
    """The paper's training with chain targets, and with bundles like those of decoding in a share of the blocks."""

    command = "python -m beyond.chain"

    def __init__(self, model: Model, *given):
        super().__init__(model, *given)
        self.notes["target_ms"] = 0.0  # what the targets of a step cost
        self.teacher, self.clean = model, None  # whose chain it is; the batch in work, as `reader` keeps it
        if self.args.beam >= model.cfg.vocab_size:
            fail(f"--beam {self.args.beam} is more than the vocabulary of {model.cfg.vocab_size} can fill")

    def __call__(self, first: int, n: int, stream: str = "train") -> tuple[Tensor, Tensor]:
        if first % self.args.batch_size == 0:
            self.notes["target_ms"] = 0.0
        self.clean = None
        return super().__call__(first, n, stream)

    def bundle(self, x: Tensor, z: Tensor, kind: Tensor, draws: Draws, ctx: Context) -> Tensor:
        """In a share of the blocks the most confident masks, what decoding would take; in the others random ones."""
        if not self.args.confident_share:
            return super().bundle(x, z, kind, draws, ctx)
        args, B, masked = self.args, self.model.cfg.block_length, kind == M
        blocks, device = z.shape[1] // B, z.device
        size = args.s_min + (uniform(draws, blocks) * (args.s_max - args.s_min + 1)).long().to(device)
        key = uniform(draws, z.shape[1]).to(device)
        confident = (uniform(draws, blocks) < args.confident_share).repeat_interleave(B, dim=1).to(device)
        sure = torch.zeros_like(key).masked_scatter(masked, self.predict(x, ctx)(z, masked, 1)[2])
        return first_masked(torch.where(confident, -sure, key), masked, size, B)

    def target(self, x: Tensor, z: Tensor, bundle: Tensor, draws: Draws, ctx: Context) -> Tensor:
        if self.args.target == "clean":
            return x
        start, B = time.perf_counter(), self.model.cfg.block_length
        written, _ = chain_decode(z, bundle, B, self.args.beam, self.predict(x, ctx), longest(bundle, B))
        self.notes["target_ms"] += 1e3 * (time.perf_counter() - start)
        return torch.where(bundle, written, x)

    def predict(self, x: Tensor, ctx: Context, pick: Callable = choose) -> Predict:
        """Stage A's best tokens at chosen positions, without gradient and without logits anywhere else. `pick` takes
        log-probabilities (n, V) of at most PIECE of them at a time, in their order, and k."""
        read, B = self.reader(x, ctx), self.model.cfg.block_length

        @torch.no_grad()
        def best(z: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
            found = []
            for part in range(0, len(z), len(x)):  # hypotheses of a beam come as further rows of the same contexts
                here = where[part : part + len(x)].reshape(-1, B)  # (R * Z, B)
                busy = here.any(-1)  # a chain that is written needs no further pass
                busy[0] |= ~busy.any()  # but of many processes, each has to make as many
                blocks = busy.nonzero()[:, 0]
                h = read(z[part : part + len(x)].reshape(-1, B)[blocks], blocks)[here[blocks]]  # (n, C)
                for a in range(0, max(1, len(h)), PIECE):
                    log_p = self.teacher.head(h[a : a + PIECE])
                    log_p[:, self.model.cfg.mask_id] = float("-inf")  # a target that stays masked is none
                    found.append(pick(log_p.log_softmax(-1), k))
            return tuple(torch.cat(f) for f in zip(*found, strict=True))

        return best

    def reader(self, x: Tensor, ctx: Context) -> Callable[[Tensor, Tensor], Tensor]:
        """`Clean.read` in this batch's contexts; its bundles, targets and stages read the same clean rows."""
        if self.clean is None or self.clean.x.data_ptr() != x.data_ptr():
            self.clean = Clean(self.teacher, x, ctx)
        return self.clean.read


class ChainStageBOnly(Chain, StageBOnlyObjective):
    pass


def build_parser(doc: str) -> train.Parser:
    p = train.build_parser(doc)
    p.set_defaults(context="clean")
    g = p.add_argument_group("chain (beyond the paper)")
    g.add_argument("--target", choices=["chain", "clean"], default="chain", help="what Stage B writes into the bundle")
    g.add_argument("--beam", type=bounded(int, 1), default=1, help="hypotheses (1: greedy; 8: near the joint mode)")
    g.add_argument("--confident_share", type=bounded(float, 0, 1), default=0.0,
                   help="share of the blocks whose bundle is their most confident masks, as in decoding")  # fmt: skip
    g.add_argument("--lora", choices=["stage_b", "all"], default="stage_b",
                   help="adapters in Stage B alone, Stage A stays the base; or everywhere (the paper)")  # fmt: skip
    return p


def settle(args: Namespace) -> type[Objective]:
    """Refuse what cannot be meant -> the objective."""
    several_blocks = not train.is_toy(args)
    if args.target == "chain" and args.context == "corrupted" and several_blocks:
        fail("chain targets read finished text before a block: they need --context clean on rows of several blocks")
    if args.target == "chain" and args.bundle_scope == "sequence":
        fail("a chain decodes a bundle inside its block: it needs --bundle_scope block")
    if args.stage_a_only or args.init_from == "scratch":
        fail("chain targets are the base's own: give a trained base by --init_from DIR")
    return ChainStageBOnly if args.lora == "stage_b" else Chain


def main() -> None:
    train.main(build_parser(__doc__), settle)


if __name__ == "__main__":
    main()
