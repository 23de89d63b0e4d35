"""Text: the dependence inside the bundles that a decoder really commits.

Every bundle of two or more tokens that the base commits at any of the tau_m2t below, in held-out spans (spans.py). Its
chain writes it one token at a time, most confident position first, each drawn from the conditional p(x_i | z, written):
a joint distribution of the bundle, with marginals of its own. Stage A says p_i(x_i | z) of the same positions at once.

    TC          of the chain: the sum of its marginals' entropies less its own. What one step by marginals, even by
                the right ones, cannot write
    mismatch    sum_i KL(chain's marginal_i || p_i): Stage A's marginals are not those of its own chain
    both        KL(chain || product of p_i), what one step of Stage A pays in all

`both`, the chain's entropy and its cross-entropy to p_i are linear in draws of the chain, so their estimates have no
bias. A chain's marginal is the average of its conditionals over draws, at the moment when that position is written; an
entropy of an average is too small: TC is corrected by the jackknife over draws, mismatch is the rest. `between` has
the bounds, in the mean over draws: below the uncorrected average's, above the cross-entropy of each draw under the
others' average. Where they are far apart, take more --draws. +- is one standard error, by a bootstrap over spans (a
span recurs at every tau).

    python -m beyond.tc --data stdlib --ckpt out/text --plot tc.svg
"""

from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from beyond import spans
from beyond.chain import greedy_chain
from beyond.noise import quantile
from beyond.spans import FILL, LogProbs, at_rows, fill, stage_a_log_probs
from cache import Cached
from checkpoint import load_model
from data import bounded, fail, generator, pick_device
from evaluate import print_table

# R rows, B block_length, V vocabulary, D draws, N different bundles

EDGES = tuple(k / 10 for k in range(11))
ROWS = 512  # rows in one forward
TERMS = ("TC", "mismatch", "both", "low", "high")
Bundles = dict[tuple, list]  # (row, block, bundle) -> [how often, lowest confidence]


# ---------------------------------------------------------------------------------------------------------------------
# the estimator


def conditionals(log_p: LogProbs, z: Tensor, bundle: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One draw of each bundle's chain, by u (R, B) -> (R, B, V) log-probabilities twice: Stage A's now, and those with
    which the chain writes each position when its turn comes (unwritten positions: as now)."""
    alone = written = log_p(z)

    def look(z: Tensor, left: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal written
        if not torch.equal(left, bundle):  # in the first step nothing is written yet: as now
            written = torch.where(left[..., None], log_p(z), written)  # what is not left keeps what it was written by
        sure = written.amax(-1).masked_fill(~left, float("-inf"))
        drawn_log_p, token = quantile(written.flatten(0, 1), u.flatten().to(written.dtype))
        return sure, drawn_log_p.view(*left.shape, 1), token.view(*left.shape, 1)

    greedy_chain(look, z, bundle)
    return alone, written


def entropy(p: Tensor) -> Tensor:
    """Of the last dimension, summed over positions: (..., n, V) -> (...)."""
    return torch.special.entr(p).sum((-1, -2))


def terms(alone: Tensor, written: Tensor) -> dict[str, float]:
    """TERMS of one bundle, nats, from log-probabilities: Stage A's (n, V), and the chain's in D draws (D, n, V)."""
    p, c, D = alone.double().exp(), written.double().exp(), len(written)
    mean = c.mean(0)
    others = ((D * mean - c) / (D - 1)).clamp(min=0)  # (D, n, V) the average without each draw
    chain = float(entropy(c).mean())  # the chain's own entropy, by the chain rule
    cross = -float(torch.xlogy(mean, p).sum())
    below = float(entropy(mean))
    jackknife = D * below - (D - 1) * float(entropy(others).mean())
    # any distribution that does not know the draw gives a bound; with p in it none of the draw's tokens has 0
    above = -float(torch.xlogy(c, ((D - 1) * others + p) / D).sum((-1, -2)).mean())
    return {"TC": jackknife - chain, "mismatch": cross - jackknife, "both": cross - chain,
            "low": below - chain, "high": above - chain}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# the bundles of a decoder


def committed(engine: Cached, z: Tensor, taus: list[float]) -> Bundles:
    """Every bundle that Stage A commits in filling the blocks z (R, B), at every tau."""
    found: Bundles = {}

    def see(z: Tensor, bundle: Tensor, conf: Tensor) -> None:
        lowest = conf.masked_fill(~bundle, 2.0).amin(-1).tolist()
        for row, (block, here) in enumerate(zip(z.tolist(), bundle.tolist(), strict=True)):
            if any(here):
                found.setdefault((row, tuple(block), tuple(here)), [0, lowest[row]])[0] += 1

    for tau in tqdm(taus, desc="bundles", disable=None):
        fill(engine, z, replace(FILL, tau_m2t=tau, n_rounds=0), see)
    return found


def estimate(engine: Cached, bundles: Bundles, draws: int) -> np.ndarray:
    """TERMS of every bundle (N, 5). Bundles of one size go together; draws are a function of the bundle alone."""
    device, sizes, out = engine.model.wte.weight.device, defaultdict(list), {}
    for key in bundles:
        sizes[sum(key[2])].append(key)
    bar = tqdm(total=len(bundles), desc="tc", disable=None)
    for keys in sizes.values():
        for a in range(0, len(keys), max(1, ROWS // draws)):
            part = keys[a : a + max(1, ROWS // draws)]
            rows = [key[0] for key in part for _ in range(draws)]
            z, bundle = (torch.tensor([key[k] for key in part for _ in range(draws)], device=device) for k in (1, 2))
            u = torch.cat([torch.rand(draws, z.shape[1], generator=generator("bundle", *key)) for key in part])
            log_p = stage_a_log_probs(at_rows(engine, rows))
            alone, written = (t.unflatten(0, (-1, draws)) for t in conditionals(log_p, z, bundle, u.to(device)))
            for k, key in enumerate(part):
                here = torch.tensor(key[2], device=device)
                out[key] = list(terms(alone[k, 0][here], written[k][:, here]).values())
            bar.update(len(part))
    bar.close()
    return np.array([out[key] for key in bundles])


# ---------------------------------------------------------------------------------------------------------------------
# by confidence


def by_confidence(bundles: Bundles, values: np.ndarray, documents: list[int]) -> list[dict]:
    """One record for each bin of the lowest confidence: bundles, mean size and confidence, and the mean of every term,
    with the standard error that a bootstrap over the spans' documents (R,) gives."""
    weights, rows, table = spans.resamples(documents), len(documents), []
    row, size = (np.array([f(key) for key in bundles]) for f in (lambda k: k[0], lambda k: sum(k[2])))
    often, lowest = np.array(list(bundles.values())).T
    for a, b in zip(EDGES, EDGES[1:], strict=False):
        here = (lowest > a) & (lowest <= b)
        if len({documents[r] for r in row[here]}) < 2:  # one document has no error
            continue
        per_span = [np.bincount(row[here], often[here] * v[here], rows) for v in (np.ones(len(row)), *values.T)]
        n, *sums = (weights @ s for s in per_span)  # (W,) each
        drawn = {name: s[n > 0] / n[n > 0] for name, s in zip(TERMS, sums, strict=True)}
        record = {"bin": f"{a:.1f}..{b:.1f}", "bundles": int(n[0]), "size": np.average(size[here], weights=often[here])}
        record["lowest"] = np.average(lowest[here], weights=often[here])
        table.append(record | {k: (float(v[0]), float(v[1:].std(ddof=1))) for k, v in drawn.items()})
    return table


def print_bins(table: list[dict]) -> None:
    head = ["lowest confidence", "bundles", "mean size", "TC", "+-", "TC between", "mismatch", "+-", "mismatch between"]
    head += ["both", "+-"]
    rows = []
    for r in table:
        tc, mismatch, both = ([f"{v:.4f}" for v in r[k]] for k in TERMS[:3])
        low, high, sum_of_both = (r[k][0] for k in ("low", "high", "both"))
        between = f"{low:.4f} .. {high:.4f}"
        rest = f"{sum_of_both - high:.4f} .. {sum_of_both - low:.4f}"  # TC's bias is mismatch's with the other sign
        rows.append([r["bin"], str(r["bundles"]), f"{r['size']:.2f}", *tc, between, *mismatch, rest, *both])
    print_table(head, rows)


def plot(path: Path, table: list[dict]) -> None:
    from tools.plots import canvas, save

    plt, axes = canvas(path)
    for name in TERMS[:2]:
        y, error = np.array([r[name] for r in table]).T
        axes.errorbar([r["lowest"] for r in table], y, error, marker="o", capsize=2, label=name)
    axes.set(xlabel="lowest confidence in the bundle", ylabel="nats a bundle")
    axes.legend()
    save(plt, path)


@torch.inference_mode()
def measure(args: Namespace) -> list[dict]:
    base = load_model(args.ckpt, pick_device(args.device), torch.float32)
    cut, _ = spans.read(args, args.ckpt, base)
    z, _ = (t.to(base.wte.weight.device) for t in spans.blocks(cut, base.cfg.block_length, base.cfg.mask_id))
    engine = Cached(base, [s.piece[: s.start] for s in cut], 0)
    everything = committed(engine, z, args.taus)
    several = {key: v for key, v in everything.items() if sum(key[2]) > 1}
    if not several:
        fail("no bundle of two tokens was committed at these --taus: lower them")
    count, alone = (sum(v[0] for v in some.values()) for some in (several, everything))
    print(f"{count} bundles of two and more ({len(several)} different), {alone - count} of one (TC 0); "
          f"{args.draws} draws each; tau_m2t {', '.join(map(str, args.taus))}")  # fmt: skip
    return by_confidence(several, estimate(engine, several, args.draws), [s.document for s in cut])


def main() -> None:
    parser = spans.build_parser(__doc__)
    parser.add_argument("--ckpt", required=True, help="the base: a checkpoint folder of a model of text")
    parser.add_argument("--draws", type=bounded(int, 2), default=32, help="draws of each bundle's chain")
    args = parser.parse_args()
    table = measure(args)
    print_bins(table)
    if args.plot:
        plot(args.plot, table)


if __name__ == "__main__":
    main()
