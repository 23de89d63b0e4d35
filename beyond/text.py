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
from dataclasses import dataclass, replace
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
from sample import Decoding
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
    figures = dict(exact=[], parses=[], stutter=[])
    for s, block in zip(cut, written.tolist(), strict=True):
        end = s.start + len(block)
        figures["exact"].append(block == s.piece[s.start : end])

        # is the piece still Python, with the block in it?
        parses = np.nan
        if s.python:
            parses = is_python(tokenizer.decode(s.piece[: s.start] + block + s.piece[end:]))
        figures["parses"].append(parses)

        # from the block before, so that a word which repeats its last one counts
        before = s.piece[max(0, s.start - len(block)) : s.start]
        figures["stutter"].append(stutter(tokenizer.decode(before + block)))
    return {name: np.asarray(values, dtype=float) for name, values in figures.items()}


def stutter(text: str) -> float:
    """The share of neighbouring words that are equal: of "a a b" a half."""
    words = re.findall(r"\w+", text)
    pairs = list(zip(words, words[1:], strict=False))
    if not pairs:
        return 0.0
    return sum(a == b for a, b in pairs) / len(pairs)


def scores(judge: Cached, z: Tensor, inside: Tensor, written: Tensor, known: dict[tuple, float]) -> np.ndarray:
    """Log-probability of the written blocks (R, B) under the judge's chain, nats (R,). What is known, (row, *block) ->
    score, is looked up: settings differ in few blocks."""
    keys = [(row, *block) for row, block in enumerate(written.tolist())]
    new = [row for row, key in enumerate(keys) if key not in known]
    if new:
        log_p = stage_a_log_probs(at_rows(judge, new), mask_too=True)
        _, score = chain(log_p, z[new], inside[new], forced=written[new])
        for row, value in zip(new, score.tolist(), strict=True):
            known[keys[row]] = value
    return np.array([known[key] for key in keys])


# ---------------------------------------------------------------------------------------------------------------------
# the systems, at their settings


def systems(args: Namespace) -> dict[str, list[list[str]]]:
    """Name -> the folders of each seed, a checkpoint's and perhaps an adapter's; the base first."""
    named = defaultdict(list)
    for name, *folders in args.system:
        named[name].append(folders)

    # the base has no adapter, and as many seeds as every other system
    seeds = next(iter(named.values()))
    if any(len(s) not in (2, 3) for s in args.system) or any(len(folders) > 1 for folders in seeds):
        fail("--system takes NAME CKPT, the base first, or NAME CKPT ADAPTER")
    for name, of in named.items():
        if len(of) != len(seeds):
            fail(f"--system {name} has {len(of)} seeds, the base has {len(seeds)}: each is judged by its own")
    if args.against is not None and args.against not in named:
        fail(f"--against {args.against} is none of the systems: {', '.join(named)}")
    return named


def settings(model: Model, args: Namespace) -> list[tuple[float, float | None]]:
    """(tau_m2t, tau_keep) of everything that a model is run at; None: it has no tau_keep, or never refuses."""
    taus = sorted(ENDS | set(args.taus))
    if not hasattr(model, "tau_keep"):
        return [(tau, None) for tau in sorted(FINE.union(taus))]

    # one at a time there is nothing to refuse
    refusing = [(tau, keep) for keep in sorted(set(args.keep)) for tau in taus if tau < 1]
    return [*refusing, (1.0, None)]


def load(named: dict[str, list[list[str]]], device: torch.device) -> dict[str, list[Model]]:
    """Name -> its seeds' models. What does not belong together is refused now, not after hours."""
    models = defaultdict(list)
    expected = None
    for name, seeds in named.items():
        for ckpt, *adapter in seeds:
            model = load_model(ckpt, device, torch.float32, *adapter)
            tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
            reads = (tokenizer and tokenizer.token_bytes, model.cfg.mask_id, model.cfg.block_length)
            if expected is None:
                expected = reads
            if reads != expected:
                fail(f"{ckpt} reads other tokens or blocks than the base: it would fill other spans")
            models[name].append(model)
        if len({hasattr(model, "tau_keep") for model in models[name]}) > 1:
            fail(f"--system {name}: one of its seeds has a tau_keep and one has none, they are not of one kind")
    return models


@dataclass
class Task:
    """What all systems are asked to fill."""

    cut: list[Span]
    tokenizer: Tokenizer
    z: Tensor  # (R, B) int64, the span masked
    inside: Tensor  # (R, B) bool, where the span is
    contexts: list[list[int]]  # the text before each block
    length: np.ndarray  # (R,) tokens in each span


def read_task(args: Namespace, ckpt: str, base: Model) -> Task:
    cut, tokenizer = spans.read(args, ckpt, base)
    z, inside = spans.blocks(cut, base.cfg.block_length, base.cfg.mask_id)
    device = base.wte.weight.device
    contexts = [s.piece[: s.start] for s in cut]
    length = inside.sum(-1).numpy()
    return Task(cut, tokenizer, z.to(device), inside.to(device), contexts, length)


@torch.inference_mode()
def curves(args: Namespace, device: torch.device) -> tuple[Curves, list[int]]:
    """What every system wrote, in the mean over its seeds, and each span's document."""
    named = systems(args)
    models = load(named, device)
    base = next(iter(named))
    task = read_task(args, named[base][0][0], models[base][0])

    # the base of each seed judges that seed of all systems
    judges = [(Cached(model, task.contexts, 0), {}) for model in models[base]]

    found = {}
    for name, seeds in tqdm(named.items(), desc="systems", disable=None):
        points = defaultdict(list)  # (tau, keep) -> figures of each seed
        for (ckpt, *adapter), model, judge in zip(seeds, models[name], judges, strict=True):
            n_rounds = model.cfg.n_rounds if adapter else 0
            engine = Cached(model, task.contexts, n_rounds)
            for tau, keep in tqdm(settings(model, args), desc=f"{name} {ckpt}", leave=False, disable=None):
                if keep is not None:
                    model.tau_keep = keep
                d = replace(FILL, tau_m2t=tau, n_rounds=n_rounds)
                points[tau, keep].append(measure(engine, d, task, *judge))
        found[name] = [{"tau": tau, "keep": keep} | mean_of(of) for (tau, keep), of in points.items()]
    return found, [s.document for s in task.cut]


def measure(engine: Cached, d: Decoding, task: Task, judge: Cached, known: dict[tuple, float]) -> dict[str, np.ndarray]:
    """Every figure of every span, (R,) each, of one seed at one setting."""
    written, full, partial = fill(engine, task.z, d)
    full = full.double().cpu().numpy() / task.length
    partial = partial.double().cpu().numpy() / task.length
    nfe = dict(full=full, partial=partial, commit=0)

    score = scores(judge, task.z, task.inside, written, known) / task.length
    figures = {"score": score} | quality(task.cut, written, task.tokenizer)
    return figures | {"full": full, "all": in_full(nfe, engine.model.partial_cost)}


def mean_of(seeds: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.mean([figures[name] for figures in seeds], axis=0) for name in seeds[0]}


# ---------------------------------------------------------------------------------------------------------------------
# tables and a picture


def print_curves(found: Curves, weights: np.ndarray) -> None:
    figures = (*MEASURES, "stutter")
    rows = []
    for name, points in found.items():
        for p in points:
            keep = "-"
            if p["keep"] is not None:
                keep = f"{p['keep']:.2f}"
            forwards = [f"{p[count].mean():.3f}" for count in ("full", "all")]
            shares = [interval(means(p[m], weights)) for m in figures]
            rows.append([name, f"{p['tau']:.2f}", keep, *forwards, *shares])
    print_table(["system", "tau", "keep", "full", "all", *figures], rows)


def print_budgets(found: Curves, documents: list[int], against: str | None) -> None:
    """The best within each budget, and what `against` has more than it, in the same resamples of documents (R,)."""
    weights = spans.resamples(documents)
    half = np.array(documents) % 2 == 0
    rows = []
    for budget in BUDGETS:
        best = {name: best_within(budget, points, weights, half) for name, points in found.items()}
        for name, measures in best.items():
            row = [name, f"{budget:.2f}"]
            for m in MEASURES:
                row.append(interval(measures[m]))
                if against and name != against:
                    row.append(interval(best[against][m] - measures[m], "+"))
                elif against:
                    row.append("")
            rows.append(row)

    head = []
    for m in MEASURES:
        head.append(m)
        if against:
            head.append(f"{against} has more")
    print("\nthe best setting that costs no more, all forwards a token")
    print_table(["system", "at most", *head], rows)


def best_within(budget: float, points: list[dict], weights: np.ndarray, half: np.ndarray) -> dict[str, np.ndarray]:
    """A system's MEASURES at its best setting within a budget, (W,) each."""
    costs = np.array([p["all"].mean() for p in points])
    best = {}
    for m in MEASURES:
        values = np.stack([p[m] for p in points])  # (P, R)
        best[m] = within(budget, values, costs, weights, half)
    return best


def plot(path: Path, found: Curves, weights: np.ndarray) -> None:
    from tools.plots import canvas, save

    # a line for each system, or for each of its tau_keep
    lines = defaultdict(list)
    for name, points in found.items():
        for p in points:
            label = name
            if p["keep"] is not None:
                label = f"{name}, keep {p['keep']:g}"
            lines[label].append(p)

    # a panel for each figure that the text has
    first = next(iter(found.values()))[0]
    drawn = [m for m in MEASURES if not np.isnan(first[m]).all()]
    plt, axes = canvas(path, len(drawn))
    axes = np.atleast_1d(axes)
    for ax, m in zip(axes, drawn, strict=True):
        for label, points in lines.items():
            draw_line(ax, label, sorted(points, key=lambda p: p["all"].mean()), m, weights)
        unit = m
        if m == "score":
            unit = "score (nats a token)"
        ax.set(xlabel="forwards a token, all in full ones", ylabel=unit)
    axes[0].legend()
    save(plt, path)


def draw_line(ax, label: str, points: list[dict], m: str, weights: np.ndarray) -> None:
    """One system's figure against its cost, with 95 % of the resamples."""
    x = [p["all"].mean() for p in points]
    y = means(np.stack([p[m] for p in points]), weights).T  # (P, W)
    low, high = np.nanquantile(y[:, 1:], [0.025, 0.975], axis=1)
    error = np.stack([y[:, 0] - low, high - y[:, 0]]).clip(min=0)
    ax.errorbar(x, y[:, 0], error, marker="o", markersize=3, capsize=2, label=label)


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def main() -> None:
    parser = spans.build_parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("--system", nargs="+", action="append", metavar=("NAME", "CKPT [ADAPTER]"), required=True,
        help="what is compared, the base first; again for more seeds of a name")
    add("--keep", nargs="+", type=bounded(float, 0, 1), default=[0.0, 0.5, 0.7],
        help="values of a joint head's tau_keep")
    add("--against", metavar="NAME", help="the system that all others are compared with")
    # fmt: on
    args = parser.parse_args()
    found, documents = curves(args, pick_device(args.device))
    weights = spans.resamples(documents)
    print_curves(found, weights)
    print_budgets(found, documents, args.against)
    if args.plot:
        plot(args.plot, found, weights)


if __name__ == "__main__":
    main()
