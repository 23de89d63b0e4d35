"""Corruption: what the model is shown, which positions carry which loss, and the bundle that branch 2 marks; beyond the
paper, `chain_decode`: what it is filled with.

A clean row x becomes z with three kinds of positions (paper, Sec. 3.1):
    M  masked          z = [M]                 weight lambda_m2t    fill it
    W  wrong-visible   z != x, not [M]         weight lambda_edit   correct it
    G  clean-visible   z == x                  weight lambda_clean  leave it

What is and is not corrupted:
    prompt (toys, conditional data)   never corrupted, no loss
    padding                           never corrupted, no loss, not attended to
    eos that ends a document          an ordinary token: masked, drafted and predicted like any other
    [M]                               never drawn as a random substitute, never written by a draft
    other special tokens              never drawn as a random substitute

Corruptions (each block draws its own mask ratio from U(0, 1)):
    mask      masks alone; there is no W
    random    masks, and visible tokens replaced by a random ordinary token (base LLaDA2.1)
    draft     masks, then one no-gradient pass fills part of them with the model's own argmax: wrong ones are W, right
              ones join G, the rest stay M (the paper, after Yao's self-generated errors)

It draws nothing from a global state: every draw takes generators, one a row, so that a row's corruption does not depend
on the rows beside it, on their number, or on the process that holds it. The gallery refuses an empty text.

    python corrupt.py --text "def add(a, b):\\n    return a + b\\n"           # gallery: one text under each corruption
"""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import parallel
from data import Parser, byte_tokenizer, fail, generator

if TYPE_CHECKING:
    from model import Model

# R rows, T positions (a multiple of B), B block_length, Z = T / group blocks, n selected positions, C channels,
# V vocabulary, U = beam

NONE, M, W, G = 0, 1, 2, 3
TIE = 0.1  # nats
LAMBDAS = (1.0, 0.3, 0.2)  # lambda_m2t, lambda_edit, lambda_clean of the paper

Rows = list[torch.Generator]  # one generator a row
Draft = Callable[[Tensor, Tensor], Tensor]  # (z (R, T), where (R, T) bool with n True) -> (n,) int64 predictions
# (z (R, T), where (R, T) bool with n True, k) -> what `choose` returns for each of the n positions
Predict = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def uniform(rows: Rows, n: int) -> Tensor:
    """(R, n) float32 in [0, 1), each row from its own generator."""
    return torch.stack([torch.rand(n, generator=g) for g in rows])


@dataclass(frozen=True)
class Corruption:
    kind: str  # mask | random | draft
    block_length: int
    mask_id: int
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    random_rate: float = 0.1  # share of visible tokens replaced (random); the paper and LLaDA2.1 publish no rate
    draft_rate: float = 0.3  # share of masks that the draft fills (draft); not published either

    def __call__(self, x: Tensor, free: Tensor, rows: Rows, draft: Draft) -> tuple[Tensor, Tensor]:
        """x (R, T) int64 clean; free (R, T) bool, the positions that may be corrupted (real and not prompt).
        -> z (R, T) int64 and kind (R, T) uint8. M, W and G partition the free positions; the rest is NONE."""
        R, T = x.shape
        ratio = uniform(rows, T // self.block_length).repeat_interleave(self.block_length, dim=1)  # (R, T)
        masked = free & (uniform(rows, T) < ratio).to(x.device)
        z = x.masked_fill(masked, self.mask_id)
        if self.kind == "random":
            replaced = free & ~masked & (uniform(rows, T) < self.random_rate).to(x.device)
            z = torch.where(replaced, (uniform(rows, T) * self.n_plain).long().to(x.device), z)
        elif self.kind == "draft":
            written = masked & (uniform(rows, T) < self.draft_rate).to(x.device)
            z = z.masked_scatter(written, draft(z, written))
        kind = torch.where(z == x, G, torch.where(z == self.mask_id, M, W))
        return z, torch.where(free, kind, NONE).to(torch.uint8)


def draw_bundle(
    masked: Tensor, group: int, s_min: int, s_max: int, rows: Rows, sure: Tensor | None = None, share: float = 0.0
) -> Tensor:
    """D of branch 2: in each run of `group` positions (a block, or the whole row), s ~ Uniform{s_min..s_max} of the
    masked positions, uniformly; all of them where fewer than s are masked. masked (R, T) bool -> (R, T) bool.

    In a `share` of the groups the s with the largest `sure` (R, T) float instead: what decoding would take. Both are
    functions of z and of chance alone, never of x.
    """
    R, T = masked.shape
    size = s_min + (uniform(rows, T // group) * (s_max - s_min + 1)).long()  # (R, T / group)
    key = uniform(rows, T)
    if share:
        confident = (uniform(rows, T // group) < share).repeat_interleave(group, dim=1)
        key = torch.where(confident, -sure.cpu(), key)
    key = key.masked_fill(~masked.cpu(), 2.0).view(R, -1, group)  # unmasked positions sort last
    rank = key.argsort(dim=-1).argsort(dim=-1)
    return masked & (rank < size[..., None]).view(R, T).to(masked.device)


@torch.no_grad()
def chain_decode(z: Tensor, bundle: Tensor, group: int, beam: int, predict: Predict) -> tuple[Tensor, Tensor]:
    """The model's own chain-rule decode of each group's bundle: what it would write one token at a time, where TC is
    zero by construction. Beyond the paper: unlike the clean tokens, this target is a function of z, so a coherent tuple
    minimises the cross-entropy to it.

    z, bundle (R, T) -> z with the bundle written (R, T) int64, and the log-probability of what was written in each
    group (R, Z) float32. All groups of all rows advance together, each by its most confident position a step; with
    `beam` U > 1 each group keeps its U best hypotheses, all filled at the same positions (the best one chooses), so
    that they are different tuples, and the best is the result.
    """
    (R, T), U = z.shape, beam
    Z = T // group
    hypotheses, left = z.repeat(U, 1, 1), bundle.clone()  # (U, R, T): sorted, the best first; (R, T)
    score = torch.zeros(R, Z, U, device=z.device)
    score[..., 1:] = float("-inf")  # one hypothesis to begin with
    start = group * torch.arange(Z, device=z.device)
    for _ in range(parallel.largest(bundle.view(R, Z, group).sum(-1).max())):  # as many forwards on every process
        log_p, token, sure = predict(hypotheses.flatten(0, 1), left.repeat(U, 1), U)  # (U * n, U) twice, (U * n,)
        everywhere = left.expand(U, R, T)[..., None]
        log_p = log_p.new_full((U, R, T, U), float("-inf")).masked_scatter(everywhere, log_p)
        token = token.new_zeros((U, R, T, U)).masked_scatter(everywhere, token)
        sure = sure.new_full((R, T), float("-inf")).masked_scatter(left, sure)  # the best hypothesis's, which is first
        busy = left.view(R, Z, group).any(-1)  # (R, Z)
        at = start + leaders(sure.view(R, Z, group), 1)[..., 0]  # (R, Z) the position that each group writes
        place = at[None, ..., None].expand(U, R, Z, U)
        log_p, token = (t.gather(2, place).permute(1, 2, 0, 3).flatten(2) for t in (log_p, token))  # (R, Z, U * U)
        grown_score = score.repeat_interleave(U, dim=-1) + log_p
        choice = leaders(grown_score, U)
        parent, token = choice // U, token.gather(-1, choice)
        blocks = hypotheses.view(U, R, Z, group).permute(1, 2, 0, 3)  # (R, Z, U, group)
        grown = blocks.gather(2, parent[..., None].expand_as(blocks))
        inside = (at - start)[..., None, None].expand(R, Z, U, 1)
        grown = grown.scatter(3, inside, token[..., None])
        blocks = torch.where(busy[..., None, None], grown, blocks)
        score = torch.where(busy[..., None], grown_score.gather(-1, choice), score)
        hypotheses = blocks.permute(2, 0, 1, 3).reshape(U, R, T)
        left = left & ~torch.zeros_like(left).scatter(1, at, busy)
    return hypotheses[0], score[..., 0]


def leaders(score: Tensor, k: int) -> Tensor:
    """Indices of the k largest of (..., n) log-probabilities; those within TIE of the largest count as equal, and come
    by index. Which of two near-equals the model puts first is noise that a target must not depend on."""
    n = score.shape[-1]
    equal = score >= score.amax(-1, keepdim=True) - TIE
    by_index = torch.arange(n, 0, -1, device=score.device, dtype=score.dtype)
    return torch.where(equal, by_index, score).topk(k, dim=-1).indices


def choose(log_p: Tensor, k: int, u: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What a chain needs of (n, V) log-probabilities: the k best and their tokens, (n, k) twice, and the largest (n,).

    With u (n,) in [0, 1) the one token in which u falls, the best token coming first and then the others by id: the
    inverse conditional CDF, so that uniform u make a sample of the joint distribution (Rosenblatt's transform) and
    u = 0 makes the greedy chain. By id, because the map from u to tokens is to be learned: see `leaders`.
    """
    if u is None:
        token = leaders(log_p, k)
        return log_p.gather(-1, token), token, log_p.amax(-1)
    p, best = log_p.exp(), leaders(log_p, 1)
    first = p.gather(-1, best)  # (n, 1)
    others = p.scatter(-1, best, 0.0).cumsum(-1)
    beyond = u[:, None] * (first + others[:, -1:]) - first
    other = torch.searchsorted(others, beyond, right=True)
    other = torch.minimum(other, (others < others[:, -1:]).sum(-1, keepdim=True))  # rounding: not past the last one
    token = torch.where(beyond < 0, best, other)
    return log_p.gather(-1, token), token, log_p.amax(-1)


def loss_weights(kind: Tensor, fill: Tensor, lambdas: tuple[float, float, float] = LAMBDAS) -> Tensor:
    """Eq. 1's weight of every position, (R, T) float32. fill: the masked positions that carry the fill loss, all of M
    in branch 1 and the bundle D in branch 2."""
    m2t, edit, clean = lambdas
    return m2t * (fill & (kind == M)).float() + edit * (kind == W).float() + clean * (kind == G).float()


def three_term_loss(
    model: "Model", h: Tensor, target: Tensor, kind: Tensor, fill: Tensor, lambdas: tuple[float, float, float] = LAMBDAS
) -> tuple[Tensor, Tensor]:
    """Eq. 1: weighted sum of cross-entropies to `target` at the same position (no shift), in nats.

    h (R, T, C) states before the head -> the sum, a scalar to be divided by the number of real tokens, and terms
    (3, 2): unweighted sum of cross-entropy and number of positions for m2t, edit, clean.

    Logits are made only where there is a loss, and in chunks that the backward pass makes again: at 157,184 tokens of
    vocabulary the full logits of 8 x 2048 positions in two branches would be 20 GB.
    """
    weight = loss_weights(kind, fill, lambdas)
    chosen = weight > 0
    h, target, kind, weight = h[chosen], target[chosen], kind[chosen], weight[chosen]  # (n, C), (n,), (n,), (n,)

    def cross_entropy(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.head(h), target, reduction="none")

    size = max(64, 2**24 // model.cfg.vocab_size)  # 64 MB of float32 logits a chunk
    chunks = list(zip(h.split(size), target.split(size), strict=True))
    if len(chunks) == 1:
        ce = cross_entropy(*chunks[0])
    else:
        ce = torch.cat([checkpoint(cross_entropy, *c, use_reentrant=False) for c in chunks])
    detached = ce.detach()
    terms = torch.stack([torch.stack([detached[kind == k].sum(), (kind == k).sum()]) for k in (M, W, G)])
    return (weight * ce).sum(), terms


# ---------------------------------------------------------------------------------------------------------------------
# the gallery

COLOUR = {NONE: "", M: "\033[33m", W: "\033[31m", G: "\033[32m"}


def successor_draft(x: list[int], mask_id: int) -> Draft:
    """A stand-in for the model: after each token, the token that follows it most often in this text."""
    follows: dict[int, Counter] = {}
    for a, b in zip(x, x[1:], strict=False):
        follows.setdefault(a, Counter())[b] += 1

    def predict(z: Tensor, where: Tensor) -> Tensor:
        guess, last = [], mask_id
        for token in z[0].tolist():
            last = token if token != mask_id else follows.get(last, Counter({mask_id: 1})).most_common(1)[0][0]
            guess.append(last)
        return torch.tensor([guess])[where]

    return predict


def model_draft(folder: str) -> tuple[Draft, int]:
    """The draft pass of a checkpoint, and its block length."""
    from checkpoint import load_model
    from model import sequence_context

    model = load_model(folder, "cpu", torch.float32)
    if model.cfg.tokenizer != "bytes":
        fail(f"--ckpt {folder}: the gallery shows byte models; this checkpoint's tokenizer is {model.cfg.tokenizer}")

    @torch.no_grad()
    def predict(z: Tensor, where: Tensor) -> Tensor:
        ctx = sequence_context(model.cfg, torch.ones_like(z, dtype=torch.bool), torch.float32)
        logits = model(z, ctx)[where]
        logits[:, model.cfg.mask_id] = float("-inf")
        return logits.argmax(-1)

    return predict, model.cfg.block_length


def show(x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, width: int, mask_id: int) -> None:
    """Rows of `width` positions: clean, input, kind, bundle, and the loss weight in both branches in tenths."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    glyph = lambda t: "▒" if t == mask_id else chr(t) if 32 < t < 127 else {32: "·", 10: "↵"}.get(t, "�")  # noqa: E731
    tenths = lambda w: "".join({10: "A"}.get(round(10 * v), str(round(10 * v))) for v in w.tolist())  # noqa: E731
    w1, w2 = loss_weights(kind, kind == M), loss_weights(kind, bundle)
    for a in range(0, x.shape[1], width):
        part = slice(a, a + width)
        cells = []
        for t, k, b in zip(z[0, part].tolist(), kind[0, part].tolist(), bundle[0, part].tolist(), strict=True):
            style = COLOUR[k] + ("\033[4;1m" if b else "")
            cells.append(f"{style}{glyph(t)}\033[0m" if colour else glyph(t))
        print("  clean    " + "".join(map(glyph, x[0, part].tolist())))
        print("  input    " + "".join(cells))
        print("  kind     " + "".join(".MWG"[k] for k in kind[0, part].tolist()))
        print("  bundle   " + "".join("^" if b else " " for b in bundle[0, part].tolist()))
        print("  weight 1 " + tenths(w1[0, part]))
        print("  weight 2 " + tenths(w2[0, part]) + "\n")


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("gallery")
    group.add_argument("--text", default="def add(a, b):\n    return a + b\n", help=r"the text; \n is a line break")
    group.add_argument("--ckpt", help="a byte checkpoint to write the draft; else the most frequent successor does")
    group.add_argument("--block_length", type=int, default=32, help="tokens that draw one mask ratio and one bundle")
    group.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode_documents([args.text.replace("\\n", "\n")])[0].tolist()
    if not ids or args.block_length < 1:
        fail("--text is empty or --block_length is not positive: give some text and at least 1")
    draft, B = successor_draft(ids, tokenizer.mask_id), args.block_length
    if args.ckpt:
        draft, B = model_draft(args.ckpt)
    T = math.ceil(len(ids) / B) * B
    x = torch.tensor([ids + [tokenizer.eos_id] * (T - len(ids))])
    free = torch.arange(T)[None] < len(ids)
    print("M masked (yellow), W wrong-visible (red), G clean-visible (green), ^ in the bundle (underlined)")
    print("weights in tenths: A = 1.0 fill, 3 = 0.3 edit, 2 = 0.2 clean, 0 = no loss; 1, 2: the branch\n")
    for kind_name in ("mask", "random", "draft"):
        corruption = Corruption(kind_name, B, tokenizer.mask_id, 256)
        rows = [generator(args.seed, "gallery")]
        z, kind = corruption(x, free, rows, draft)
        bundle = draw_bundle(kind == M, B, 1, 16, rows)
        print(f"{kind_name}: " + ", ".join(f"{int((kind == k).sum())} {n}" for k, n in ((M, "M"), (W, "W"), (G, "G"))))
        show(x, z, kind, bundle, B, tokenizer.mask_id)


if __name__ == "__main__":
    main()
