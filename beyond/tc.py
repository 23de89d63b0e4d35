"""Text: the dependence inside the bundles that a decoder really commits.

Every bundle of two or more tokens that the base commits at any of TAUS, in held-out spans (spans.py). Its chain
writes it one token at a time, the surest position first, each drawn from the conditional p(x_i | z, written): a
joint distribution of the bundle, with marginals of its own. Stage A says p_i(x_i | z) of the same positions at once.

    TC          of the chain: the sum of its marginals' entropies less its own. What one step by marginals, even by
                the right ones, cannot write
    mismatch    sum_i KL(chain's marginal_i || p_i): Stage A's marginals are not those of its own chain
    both        KL(chain || product of p_i), what one step of Stage A pays in all

`both` is estimated without bias: the chain's entropy and its cross-entropy to p_i are linear in draws of the chain. Its
split is not. A chain's marginal is the average of its conditionals over draws, at the moment when that position is
written, and `between` has two bounds of its entropy, in the mean over draws. The entropy of the average is too low. The
cross-entropy of each draw to the others' average, with a little of p_i, is too high. TC is the middle of the two,
because with many draws both miss the truth by about as much; mismatch is the rest. Where the bounds are far apart, take
more --draws.

    python -m beyond.tc --data stdlib --ckpt out/text
"""

import copy
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from beyond.chain import beam_chain
from beyond.spans import LogProbs, Spans, stage_a_log_probs
from cache import Cached
from checkpoint import load_model, load_tokenizer
from evaluate import print_table
from lib.output import Row
from lib.util import Parser, bounded, command, generator, pick_device
from model import Model
from sample import Step, generate

# R rows, B block_length, V vocabulary, D draws, n positions of a bundle, N different bundles

EDGES = tuple(k / 10 for k in range(11))
ROWS = 512  # rows in one forward
TAUS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TERMS = ("TC", "mismatch", "both", "low", "high")
Bundle = tuple[int, tuple[int, ...], tuple[bool, ...]]  # row, block, where its bundle is
Bundles = dict[Bundle, list]  # -> [how often, lowest confidence]


# --- the estimator
def conditionals(log_p: LogProbs, z: Tensor, bundle: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One draw of each bundle's chain, by u (R, B) -> (R, B, V) log-probabilities twice: Stage A's now, and those with
    which the chain writes each position when its turn comes (unwritten positions: as now)."""
    alone = log_p(z)
    written = alone

    def look(z: Tensor, left: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal written

        # what is not left keeps what it was written by; in the first step nothing is written yet
        if not torch.equal(left, bundle):
            written = torch.where(left[..., None], log_p(z), written)

        # the token in whose share of the mass u falls (rounding: not past the last one)
        cdf = written.exp().cumsum(-1)
        height = u[..., None].to(cdf.dtype) * cdf[..., -1:]
        token = torch.searchsorted(cdf, height, right=True)
        last = (cdf < cdf[..., -1:]).sum(-1, keepdim=True)
        token = torch.minimum(token, last)

        sure = written.amax(-1).masked_fill(~left, float("-inf"))
        return sure, written.gather(-1, token), token

    beam_chain(look, z, bundle, 1)
    return alone, written


def entropy(p: Tensor) -> Tensor:
    """Of the last dimension, summed over positions: (..., n, V) -> (...)."""
    return torch.special.entr(p).sum((-1, -2))


def cross_entropy(p: Tensor, q: Tensor) -> Tensor:
    """-sum p ln q of the last dimension, summed over positions: (..., n, V) twice -> (...)."""
    return -torch.xlogy(p, q).sum((-1, -2))


def others(c: Tensor, p: Tensor) -> Tensor:
    """What each draw's conditionals c (D, n, V) are held against: the average of the other draws', in which Stage A's
    p (n, V) counts as sqrt(D) / 2 draws more. It does not know the draw, and gives nothing 0 that p does not."""
    D = len(c)

    # more of p brings the upper bound down where Stage A is right, and up where it is wrong; beside D this fades
    weight = math.sqrt(D) / 2
    total = (c.sum(0) - c).clamp(min=0)  # rounding
    return (total + weight * p) / (D - 1 + weight)


def terms(alone: Tensor, written: Tensor) -> dict[str, float]:
    """TERMS of one bundle, nats, from log-probabilities: Stage A's (n, V), and the chain's in D draws (D, n, V)."""
    p = alone.double().exp()
    c = written.double().exp()
    average = c.mean(0)

    # linear in the draws: the chain's own entropy, by the chain rule, and what Stage A's marginals would pay
    chain = float(entropy(c).mean())
    cross = float(cross_entropy(average, p))

    # the entropies of the chain's marginals, from below (Jensen) and from above (Gibbs)
    below = float(entropy(average))
    above = float(cross_entropy(c, others(c, p)).mean())
    marginals = (below + above) / 2
    return {
        "TC": marginals - chain,
        "mismatch": cross - marginals,
        "both": cross - chain,
        "low": below - chain,
        "high": above - chain,
    }


# --- the bundles of a decoder
def committed(base: Model, task: Spans, taus: Sequence[float]) -> Bundles:
    """Every bundle that Stage A commits in filling the spans, at every tau."""
    found: Bundles = {}

    def see(rows: list[Row], step: Step) -> None:
        lowest = step.stage_a.conf.masked_fill(~step.bundle, 2.0).amin(-1)
        of_rows = zip(rows, step.stage_a.z.tolist(), step.bundle.tolist(), lowest.tolist(), strict=True)
        for row, block, here, low in of_rows:
            if any(here):
                key = (row.number, tuple(block), tuple(here))
                record = found.setdefault(key, [0, low])
                record[0] += 1

    for tau in tqdm(taus, desc="bundles", disable=None):
        generate(base, task.prompts, replace(task.start, tau_m2t=tau), on_step=see)
    return found


def at_rows(engine: Cached, rows: list[int]) -> Cached:
    """The same contexts' forwards, of these rows, which may repeat."""
    part = copy.copy(engine)
    part.cache = copy.copy(engine.cache)
    part.cache.keep(rows)
    return part


def estimate(engine: Cached, bundles: list[Bundle], draws: int) -> np.ndarray:
    """TERMS of every bundle (N, 5). Draws are a function of the bundle alone."""
    order = sorted(range(len(bundles)), key=lambda n: sum(bundles[n][2]))  # chains of one length go side by side
    at_once = max(1, ROWS // draws)
    found = np.zeros((len(bundles), len(TERMS)))
    for start in tqdm(range(0, len(order), at_once), desc="tc", disable=None):
        part = order[start : start + at_once]
        found[part] = estimate_part(engine, [bundles[n] for n in part], draws)
    return found


def estimate_part(engine: Cached, part: list[Bundle], draws: int) -> list[list[float]]:
    """TERMS of these bundles, whose draws go through the model side by side."""
    device = engine.model.wte.weight.device
    repeated = [key for key in part for _ in range(draws)]
    z = torch.tensor([block for _, block, _ in repeated], device=device)
    bundle = torch.tensor([here for _, _, here in repeated], device=device)
    u = torch.cat([torch.rand(draws, z.shape[1], generator=generator("bundle", *key)) for key in part])

    log_p = stage_a_log_probs(at_rows(engine, [row for row, _, _ in repeated]))
    alone, written = conditionals(log_p, z, bundle, u.to(device))

    found = []
    for start in range(0, len(repeated), draws):
        here = bundle[start]
        values = terms(alone[start, here], written[start : start + draws, here])
        found.append([values[name] for name in TERMS])
    return found


# --- by confidence
def by_confidence(bundles: Bundles, values: np.ndarray) -> list[dict]:
    """One record for each bin of the lowest confidence: bundles, their mean size, and the mean of every term of values
    (N, 5). A bundle counts as often as it was committed."""
    size = np.array([sum(here) for _, _, here in bundles])
    often = np.array([count for count, _ in bundles.values()])
    lowest = np.array([confidence for _, confidence in bundles.values()])

    table = []
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        here = (lowest > low) & (lowest <= high)
        if here.any():
            count = often[here]
            record = {"bin": f"{low:.1f}..{high:.1f}", "bundles": int(count.sum())}
            record["size"] = np.average(size[here], weights=count)
            means = np.average(values[here], axis=0, weights=count)
            table.append(record | dict(zip(TERMS, means, strict=True)))
    return table


def print_bins(table: list[dict]) -> None:
    rows = []
    for r in table:
        between = f"{r['low']:.4f} .. {r['high']:.4f}"
        tc, mismatch, both = (f"{r[name]:.4f}" for name in TERMS[:3])
        rows.append([r["bin"], str(r["bundles"]), f"{r['size']:.2f}", tc, between, mismatch, both])
    head = ["lowest confidence", "bundles", "mean size", "TC", "TC between", "mismatch", "both"]
    print_table(head, rows)


# --- the command line
@torch.inference_mode()
def measure(args: Namespace) -> list[dict]:
    base = load_model(args.ckpt, pick_device(args.device), torch.float32)
    task = Spans(args.data, args.spans, load_tokenizer(Path(args.ckpt), base.cfg.tokenizer), base.cfg)
    print(f"{len(task.spans)} spans, {task.length.sum()} tokens; blocks of {base.cfg.block_length}")

    # every bundle that is committed, and those of several tokens
    everything = committed(base, task, TAUS)
    several = {key: record for key, record in everything.items() if sum(key[2]) > 1}
    count = sum(often for often, _ in several.values())
    of_one = sum(often for often, _ in everything.values()) - count
    print(f"{count} bundles of two and more ({len(several)} different), {of_one} of one; {args.draws} draws each")
    return by_confidence(several, estimate(task.read_by(base), list(several), args.draws))


@command
def main() -> None:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("--ckpt", required=True, help="the base: a checkpoint folder of a model of text")
    add("--data", nargs="+", default=["stdlib"], help="stdlib, or a folder of Python files")
    add("--spans", type=bounded(int, 2), default=512, help="held-out spans to fill")
    add("--draws", type=bounded(int, 2), default=32, help="draws of each bundle's chain")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    # fmt: on
    print_bins(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
