"""Chain targets: what a model itself writes one token at a time, as what Stage B or the head is asked to write at once.

The paper's target, the clean tokens, has the marginals as its minimiser (results/theorem). A chain is a function of
what is shown. Cross-entropy to one tuple has that tuple as its minimiser, so tokens are learned that belong together.

A chain is written without gradient, in all blocks of a batch at once, each behind its own clean text. Two orders:

    surest    each time the position whose best token is most probable, as decoding with tau_m2t 1
    left      from left to right, for the head

    python -m beyond.chain --out_dir out/chain                # on names, ten minutes; beside train.py --alpha 0.5
    python -m beyond.chain --data modes --init_from out/base --beam 4 --tie 0.1 --learning_rate 1e-3
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import train
from lib.util import bounded, command, fail
from model import Context, Model, block_causal_mask, rotary
from train import Batch, cocommit_step

# R rows, T positions, B block_length, N blocks of the batch, n those in work, U beam, C channels, V vocabulary,
# G key/value heads, D head dim, S keys

CHAIN = dict(
    beam=1, tie=0.0, corruption="mask", bundle="whole", lora_in="stage_b", max_iters=1500, learning_rate=2e-3,
    out_dir="out/chain",
)  # fmt: skip

# of hypotheses (n, U, B) for the blocks (n,) of the batch: log-probabilities of every token (n, U, B, V)
Ask = Callable[[Tensor, Tensor], Tensor]


def chain_target(
    model: Model, batch: Batch, z: Tensor, bundle: Tensor,
    beam: int = 1, order: str = "surest", one_by_one: bool = False, tie: float = 0.0,
) -> Tensor:  # fmt: skip
    """The chain in the bundle, the clean tokens elsewhere: z (R, T) int64, bundle (R, T) bool -> (R, T) int64."""
    B = model.cfg.block_length
    text = Text(model, batch.clean, one_by_one)
    written, _ = write_chain(text.ask, z.reshape(-1, B), bundle.reshape(-1, B), beam, order, tie)
    return torch.where(bundle, written.reshape(z.shape), batch.clean)


# --- the chain
@torch.no_grad()
def write_chain(
    ask: Ask, blocks: Tensor, bundle: Tensor, beam: int = 1, order: str = "surest", tie: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Write the bundle of each block, one token at a time: blocks (N, B) int64, bundle (N, B) bool -> the blocks with
    the likeliest hypothesis that was found (N, B), and its log-probability (N,).

    All hypotheses of a block are filled at the same positions (the best one chooses), so they are different tuples.
    """
    N, B = blocks.shape
    left = bundle.clone()

    # the best first; at the start they are all the same, and one of them counts
    hypotheses = blocks[:, None].repeat(1, beam, 1)  # (N, U, B)
    score = torch.full((N, beam), float("-inf"), device=blocks.device)
    score[:, 0] = 0.0

    while left.any():
        busy = left.any(-1).nonzero()[:, 0]  # (n,)
        log_p = ask(hypotheses[busy], busy)
        V = log_p.shape[-1]

        # where this token is written
        if order == "left":
            place = left[busy].int().argmax(-1)  # (n,)
        else:
            sure = log_p[:, 0].amax(-1).masked_fill(~left[busy], float("-inf"))
            place = leaders(sure, 1, tie)[:, 0]

        # the best of all continuations: which hypothesis each goes on from, and by which token
        at = torch.arange(len(busy), device=blocks.device)
        grown = score[busy][..., None] + log_p[at, :, place]  # (n, U, V)
        best = leaders(grown.flatten(1), beam, tie)  # (n, U)
        longer = hypotheses[busy[:, None], best // V]
        longer[at, :, place] = best % V

        hypotheses[busy] = longer
        score[busy] = grown.flatten(1).gather(1, best)
        left[busy, place] = False
    return hypotheses[:, 0], score[:, 0]


def leaders(score: Tensor, k: int, tie: float) -> Tensor:
    """Indices of the k largest of (..., m) log-probabilities; those within `tie` of the largest count as equal, and
    come by index.

    On a toy many answers are equally probable, and which of them the model puts first is noise. On names it
    is not: a head that was taught with ties was five points worse.
    """
    if tie == 0:
        return score.topk(k, dim=-1).indices
    m = score.shape[-1]
    equal = score >= score.amax(-1, keepdim=True) - tie
    by_index = torch.arange(m, 0, -1, device=score.device, dtype=score.dtype)
    return torch.where(equal, by_index, score).topk(k, dim=-1).indices


# --- Stage A of the blocks in work
def log_probs(model: Model, states: Tensor) -> Tensor:
    """Stage A's (..., V), among tokens: a mask is none."""
    logits = model.logits(states)
    no_mask = torch.arange(logits.shape[-1], device=logits.device) == model.cfg.mask_id
    return logits.masked_fill(no_mask, float("-inf")).log_softmax(-1)


class Text:
    """Keys and values of clean rows, which decoding keeps of finished blocks: any of their blocks may be in work.

    one_by_one: everything is read in blocks of one, from the left.
    """

    @torch.no_grad()
    def __init__(self, model: Model, clean: Tensor, one_by_one: bool):
        R, self.T = clean.shape
        self.model = model
        self.read_in = 1 if one_by_one else model.cfg.block_length
        self.n_blocks = self.T // model.cfg.block_length
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer
        self.row: Tensor | None = None  # (N,) the rows of the blocks in work; None: the text itself is read

        real = torch.ones_like(clean, dtype=torch.bool)
        rows = torch.ones(R, dtype=torch.bool, device=clean.device)
        ctx = model.context(real, one_by_one=rows if one_by_one else None)
        ctx.cache = self
        model.last_n(model.prefix(clean, ctx), ctx)

    def update(self, layer: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (N, G, B, D) of this pass -> what it may attend to, its own keys and its row's: (N, G, B + T, D)."""
        if self.row is None:
            self.kv[layer] = (k, v)
            return k, v
        text_k, text_v = self.kv[layer]
        return torch.cat([k, text_k[self.row]], dim=2), torch.cat([v, text_v[self.row]], dim=2)

    @torch.no_grad()
    def ask(self, hypotheses: Tensor, at: Tensor) -> Tensor:
        """Stage A's log-probabilities, see `Ask`: at (n,) counts the blocks of the batch, row after row."""
        _, U, B = hypotheses.shape
        blocks = hypotheses.flatten(0, 1)  # (n U, B)
        at = at.repeat_interleave(U)
        N = len(at)

        # each block sees itself, and the text before it
        start = at % self.n_blocks * B
        itself = block_causal_mask(B, self.read_in, at.device)  # (B, B)
        before = torch.arange(self.T, device=at.device) < start[:, None]  # (n U, T)
        mask = torch.cat([itself.expand(N, B, B), before[:, None].expand(N, B, self.T)], dim=2)

        positions = start[:, None] + torch.arange(B, device=at.device)
        cos, sin = rotary(self.model.cfg, positions, self.model.compute_dtype)
        self.row = at // self.n_blocks
        ctx = Context(cos, sin, mask[:, None], cache=self)
        states = self.model.last_n(self.model.prefix(blocks, ctx), ctx)
        return log_probs(self.model, states).unflatten(0, (-1, U))


@command
def main() -> None:
    parser = train.build_parser(__doc__)
    add = parser.add_argument_group("chain").add_argument
    add("--beam", type=bounded(int, 1), help="hypotheses (1: greedy; 8: near the joint mode)")
    add("--tie", type=bounded(float, 0), help="nats in which probabilities count as equal (0; toys 0.1)")
    args = train.read_arguments(parser, "-m beyond.chain", **CHAIN)
    if args.init_from == "scratch":
        fail("chain targets are the base's own: give a trained base by --init_from DIR")
    if args.context == "corrupted" and not train.is_toy(args):
        fail("a chain reads finished text before a block: add --context clean")

    # train.py's own, with another target
    corpus = train.load_corpus(args)
    model = train.start(args, corpus)
    target = partial(chain_target, beam=args.beam, tie=args.tie)
    train.loop(model, corpus, partial(cocommit_step, target=target), train.make_optimizer(model, args), args)


if __name__ == "__main__":
    main()
