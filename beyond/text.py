"""Text: quality against forwards, on spans of held-out documents.

A system is a name, a checkpoint, perhaps an adapter: Stage A alone, with Stage B, or as an extension's own step
decodes, a joint head at every tau_keep of --keep. Systems of one name are its seeds: the first ones of all names belong
together, then the second ones, and a figure is the mean over them. All fill the same spans of held-out documents
(spans.py says which), at many tau_m2t, from every mask at once (-1) to one at a time (1). The first name is the base.

    score       log-probability of what was written under its base's own one-at-a-time chain, nats a token. This is what
                chain targets train: a gain here alone says that they were learned, not that the text is better
    exact       share of spans as they were
    parses      share of Python pieces that are still Python with the span in them
    stutter     share of the block's neighbouring words that are equal
    full, all   forwards a token: full ones (the paper's count), and all of them in full ones, a partial one as
                model.partial_cost, times the share of the block that it ran at where a step says so

Brackets are 95 % of a bootstrap over documents, each with its spans, the same resamples for all. The second table is
what a user with a budget gets: of each system the best setting that costs no more in `all`, chosen on every other
document and reported on the rest, both ways and anew in every resample, so that many settings to choose from flatter
nobody; and what --against NAME has more than each other one. It refuses toys (their tables are exact) and text without
a long enough piece.

    python -m beyond.text --data stdlib --system base out/text --system head out/text out/joint --against head
"""

import re
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from beyond import spans
from beyond.spans import FILL, Span, at_rows, chain, fill, interval, is_python, means, stage_a_log_probs, within
from cache import Cached, in_full
from checkpoint import load_model, load_tokenizer
from data import bounded, fail, pick_device
from evaluate import print_table
from model import Model
from tokenizer import Tokenizer

# R spans (rows), B block_length, P settings, W resamples

Curves = dict[str, list[dict]]  # system -> for each of its settings tau, keep, and each figure of every span, (R,)

ENDS = {-1.0, 1.0}  # every mask at once, one at a time
FINE = {0.0, 0.02, 0.05, 0.08, 0.1, 0.12, 0.15, *(k / 20 for k in range(4, 19)), 0.95}  # for whom has no tau_keep
BUDGETS = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.8, 1.0)
MEASURES = ("score", "exact", "parses")


# ---------------------------------------------------------------------------------------------------------------------
# what a system wrote


def quality(cut: list[Span], written: Tensor, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """What the written blocks (R, B) are worth, (R,) float64 each; nan where a figure does not apply."""
    exact, parses, stutter = [], [], []
    for s, row in zip(cut, written.tolist(), strict=True):
        end = s.start + len(row)
        exact.append(row == s.piece[s.start : end])
        text = tokenizer.decode(s.piece[: s.start] + row + s.piece[end:])
        parses.append(is_python(text) if s.python else np.nan)
        words = re.findall(r"\w+", tokenizer.decode(s.piece[max(0, s.start - len(row)) : s.start] + row))
        pairs = list(zip(words, words[1:], strict=False))
        stutter.append(sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0)
    return {k: np.asarray(v, dtype=float) for k, v in dict(exact=exact, parses=parses, stutter=stutter).items()}


def scores(judge: Cached, z: Tensor, inside: Tensor, written: Tensor, known: dict[tuple, float]) -> np.ndarray:
    """Log-probability of the written blocks (R, B) under the judge's chain, nats (R,). What is known, (row, *block) ->
    score, is looked up: settings differ in few blocks."""
    keys = [(row, *block) for row, block in enumerate(written.tolist())]
    if new := [row for row, key in enumerate(keys) if key not in known]:
        log_p = stage_a_log_probs(at_rows(judge, new), mask_too=True)
        score = chain(log_p, z[new], inside[new], forced=written[new])[1]
        known |= zip((keys[row] for row in new), score.tolist(), strict=True)
    return np.array([known[key] for key in keys])


# ---------------------------------------------------------------------------------------------------------------------
# the systems, at their settings


def systems(args: Namespace) -> dict[str, list[list[str]]]:
    """Name -> the folders of each seed, a checkpoint's and perhaps an adapter's; the base first."""
    named = defaultdict(list)
    for name, *folders in args.system:
        named[name].append(folders)
    seeds = next(iter(named.values()))
    if any(len(s) not in (2, 3) for s in args.system) or any(len(of) > 1 for of in seeds):
        fail("--system takes NAME CKPT, the base first, or NAME CKPT ADAPTER")
    if odd := [name for name, of in named.items() if len(of) != len(seeds)]:
        fail(f"--system {odd[0]} has {len(named[odd[0]])} seeds, the base has {len(seeds)}: each is judged by its own")
    if args.against not in (None, *named):
        fail(f"--against {args.against} is none of the systems: {', '.join(named)}")
    return named


def settings(model: Model, args: Namespace) -> list[tuple[float, float | None]]:
    """(tau_m2t, tau_keep) of everything that a model is run at; None: it has no tau_keep, or never refuses."""
    taus = sorted(ENDS | set(args.taus))
    if not hasattr(model, "tau_keep"):
        return [(tau, None) for tau in sorted(FINE.union(taus))]
    return [(tau, keep) for keep in sorted(set(args.keep)) for tau in taus if tau < 1] + [(1.0, None)]


def load(named: dict[str, list[list[str]]], device: torch.device) -> dict[str, list[Model]]:
    """Name -> its seeds' models. What does not belong together is refused now, not after hours."""
    models = {name: [load_model(ckpt, device, torch.float32, *adapter) for ckpt, *adapter in seeds]
              for name, seeds in named.items()}  # fmt: skip
    expected = None
    for name, seeds in named.items():
        for (ckpt, *_), model in zip(seeds, models[name], strict=True):
            tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
            reads = tokenizer and tokenizer.token_bytes, model.cfg.mask_id, model.cfg.block_length
            expected = expected or reads
            if reads != expected:
                fail(f"{ckpt} reads other tokens or blocks than the base: it would fill other spans")
        if len({hasattr(model, "tau_keep") for model in models[name]}) > 1:
            fail(f"--system {name}: one of its seeds has a tau_keep and one has none, they are not of one kind")
    return models


@torch.inference_mode()
def curves(args: Namespace, device: torch.device) -> tuple[Curves, list[int]]:
    """What every system wrote, in the mean over its seeds, and each span's document."""
    named, found = systems(args), {}
    models, base = load(named, device), next(iter(named))
    cut, tokenizer = spans.read(args, named[base][0][0], models[base][0])
    cfg = models[base][0].cfg
    z, inside = (t.to(device) for t in spans.blocks(cut, cfg.block_length, cfg.mask_id))
    contexts, length = [s.piece[: s.start] for s in cut], inside.sum(-1).cpu().numpy()
    judges = [(Cached(model, contexts, 0), {}) for model in models[base]]
    for name, seeds in tqdm(named.items(), desc="systems", disable=None):
        points = defaultdict(list)  # (tau, keep) -> figures of each seed
        for (ckpt, *adapter), model, (judge, known) in zip(seeds, models[name], judges, strict=True):
            n_rounds = model.cfg.n_rounds if adapter else 0
            engine = Cached(model, contexts, n_rounds)
            for tau, keep in tqdm(settings(model, args), desc=f"{name} {ckpt}", leave=False, disable=None):
                if keep is not None:
                    model.tau_keep = keep
                written, full, partial = fill(engine, z, replace(FILL, tau_m2t=tau, n_rounds=n_rounds))
                full, partial = (t.double().cpu().numpy() / length for t in (full, partial))
                forwards = {
                    "full": full,
                    "all": in_full(dict(full=full, partial=partial, commit=0), model.partial_cost),
                }
                score = {"score": scores(judge, z, inside, written, known) / length}
                points[tau, keep].append(score | quality(cut, written, tokenizer) | forwards)
        found[name] = [{"tau": tau, "keep": keep} | {k: np.mean([p[k] for p in of], axis=0) for k in of[0]}
                       for (tau, keep), of in points.items()]  # fmt: skip
    return found, [s.document for s in cut]


# ---------------------------------------------------------------------------------------------------------------------
# tables and a picture


def print_curves(found: Curves, weights: np.ndarray) -> None:
    rows, figures = [], (*MEASURES, "stutter")
    for name, points in found.items():
        for p in points:
            label = [name, f"{p['tau']:.2f}", "-" if p["keep"] is None else f"{p['keep']:.2f}"]
            forwards = [f"{p[count].mean():.3f}" for count in ("full", "all")]
            rows.append(label + forwards + [interval(means(p[m], weights)) for m in figures])
    print_table(["system", "tau", "keep", "full", "all", *figures], rows)


def print_budgets(found: Curves, documents: list[int], against: str | None) -> None:
    """The best within each budget, and what `against` has more than it, in the same resamples of documents (R,)."""
    rows, weights, half = [], spans.resamples(documents), np.array(documents) % 2 == 0
    stacked = {name: {k: np.stack([p[k] for p in of]) for k in ("all", *MEASURES)} for name, of in found.items()}
    for budget in BUDGETS:
        best = {name: [within(budget, x[m], x["all"].mean(-1), weights, half) for m in MEASURES]
                for name, x in stacked.items()}  # fmt: skip
        for name, drawn in best.items():
            row = [name, f"{budget:.2f}"]
            for mine, theirs in zip(best.get(against, drawn), drawn, strict=True):
                row.append(interval(theirs))
                if against:
                    row.append("" if name == against else interval(mine - theirs, "+"))
            rows.append(row)
    head = [h for m in MEASURES for h in ([m, f"{against} has more"] if against else [m])]
    print("\nthe best setting that costs no more, all forwards a token")
    print_table(["system", "at most", *head], rows)


def plot(path: Path, found: Curves, weights: np.ndarray) -> None:
    from tools.plots import canvas, save

    lines: dict[str, list[dict]] = {}
    for name, points in found.items():
        for p in points:
            lines.setdefault(name if p["keep"] is None else f"{name}, keep {p['keep']:g}", []).append(p)
    drawn = [m for m in MEASURES if not np.isnan(next(iter(found.values()))[0][m]).all()]
    plt, axes = canvas(path, len(drawn))
    for ax, m in zip(np.atleast_1d(axes), drawn, strict=True):
        for name, points in lines.items():
            points = sorted(points, key=lambda p: p["all"].mean())
            y = means(np.stack([p[m] for p in points]), weights).T  # (P, W)
            x, (low, high) = [p["all"].mean() for p in points], np.nanquantile(y[:, 1:], [0.025, 0.975], axis=1)
            error = np.stack([y[:, 0] - low, high - y[:, 0]]).clip(min=0)
            ax.errorbar(x, y[:, 0], error, marker="o", markersize=3, capsize=2, label=name)
        ax.set(xlabel="forwards a token, all in full ones", ylabel=f"{m} (nats a token)" if m == "score" else m)
    np.atleast_1d(axes)[0].legend()
    save(plt, path)


def main() -> None:
    parser = spans.build_parser(__doc__)
    parser.add_argument("--system", nargs="+", action="append", metavar=("NAME", "CKPT [ADAPTER]"),
                        required=True,
                        help="what is compared, the base first; again for more seeds of a name")  # fmt: skip
    parser.add_argument("--keep", nargs="+", type=bounded(float, 0, 1), default=[0.0, 0.5, 0.7],
                        help="values of a joint head's tau_keep")  # fmt: skip
    parser.add_argument("--against", metavar="NAME", help="the system that all others are compared with")
    args = parser.parse_args()
    found, documents = curves(args, pick_device(args.device))
    weights = spans.resamples(documents)
    print_curves(found, weights)
    print_budgets(found, documents, args.against)
    if args.plot:
        plot(args.plot, found, weights)


if __name__ == "__main__":
    main()
