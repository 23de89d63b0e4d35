"""Text: quality against forwards, on spans of held-out documents.

Every decoder fills the same spans of held-out documents (spans.py says which):

    base            Stage A alone, the frozen checkpoint, at many more tau_m2t than the others; 1: one at a time
    NAME            an adapter with Stage B
    NAME, B off     the same weights, Stage A alone (left out where adapters act in Stage B only: it is base)

    exact       share of spans as they were
    parses      share of Python pieces that are still Python with the span in them
    score       log-probability of what was written under the base's own one-at-a-time chain, nats a token. This is what
                chain targets train: a gain here alone says that they were learned, not that the text is better
    stutter     share of the block's neighbouring words that are equal
    full, all   forwards a token: full ones (the paper's count), and all of them, a partial one as n/L

Brackets are 95 % of a bootstrap over spans. A second table compares every adapter with the base at equal forwards: with
the chord between the base's two nearest points, and with the better one of the two. Where the base has no points on
both sides it says so. It refuses toys (their tables are exact) and text without a long enough piece.

    python -m beyond.text --data stdlib --ckpt out/text --adapter out/text-clean out/text-chain --plot curve.svg
"""

import argparse
import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from beyond import spans
from beyond.spans import FILL, Span, chain, fill, stage_a_log_probs
from cache import Cached, in_full
from checkpoint import adapter_settings, load_model
from data import Tokenizer, pick_device
from evaluate import print_table

# R spans (rows), B block_length, P points of the base's curve, W resamples

Curves = dict[str, list[dict]]  # decoder -> for every tau the mean of each figure under every resample, (W,) each

# between two of its points the base's curve is not known: many of them, from every mask at once to one at a time
BASE_TAUS = {0.0, 0.02, 0.05, 0.08, 0.1, 0.12, 0.15, *(k / 20 for k in range(4, 19)), 0.95, 1.0}
MEASURES = ("exact", "parses", "score")


# ---------------------------------------------------------------------------------------------------------------------
# what a decoder wrote


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


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# means, intervals, differences


def means(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Values (R,), nan where they do not apply, under weights (W, R) -> (W,)."""
    applies = ~np.isnan(values)
    n = weights @ applies
    return np.divide(weights @ np.where(applies, values, 0.0), n, out=np.full(len(n), np.nan), where=n > 0)


def interval(drawn: np.ndarray, sign: str = "") -> str:
    """Estimate (the first) and 95 % of its bootstrap (the rest)."""
    if np.isnan(drawn[0]):
        return "-"
    low, high = np.nanquantile(drawn[1:], [0.025, 0.975])
    return f"{drawn[0]:{sign}.4f} [{low:{sign}.4f}, {high:{sign}.4f}]"


def differences(x: np.ndarray, y: np.ndarray, base_x: np.ndarray, base_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y less the base's at equal forwards x, in every resample: x, y (W,), base_x, base_y (W, P) -> (W,) twice.

    First the chord between the base's two nearest points: below a concave curve, so it flatters us. Then the better one
    of the two: above a rising curve, so it does not. nan outside the base's range: nothing is extrapolated.
    """
    x, base_x = x.round(9), base_x.round(9)  # the same forwards are the same, whatever order they were added in
    chord, safe = np.full((2, len(x)), np.nan)
    for w, (bx, by) in enumerate(zip(base_x, base_y, strict=True)):
        order = np.lexsort((by, bx))
        bx, by = bx[order], by[order]
        best = np.append(bx[1:] != bx[:-1], True)  # of points with the same forwards
        bx, by = bx[best], by[best]
        if bx[0] <= x[w] <= bx[-1]:
            k = np.searchsorted(bx, x[w])
            near = by[k : k + 1] if bx[k] == x[w] else by[k - 1 : k + 1]
            chord[w], safe[w] = y[w] - np.interp(x[w], bx, by), y[w] - near.max()
    return chord, safe


# ---------------------------------------------------------------------------------------------------------------------
# the curves


@torch.inference_mode()
def curves(args: argparse.Namespace, device: torch.device) -> Curves:
    base = load_model(args.ckpt, device, torch.float32)
    decoders = {"base": (base, 0, sorted(BASE_TAUS | set(args.taus)))}
    for folder in args.adapter:
        model = load_model(args.ckpt, device, torch.float32, folder)
        decoders[folder] = model, model.cfg.n_rounds, args.taus
        if "extension" not in adapter_settings(folder):  # extensions leave Stage A alone
            decoders[f"{folder}, B off"] = model, 0, args.taus
    cut, tokenizer = spans.read(args, base)
    z, inside = (t.to(device) for t in spans.blocks(cut, base.cfg.block_length, base.cfg.mask_id))
    contexts, length = [s.piece[: s.start] for s in cut], inside.sum(-1).cpu().numpy()
    judge, weights = stage_a_log_probs(Cached(base, contexts, 0), mask_too=True), spans.resamples(len(cut))
    found: Curves = {}
    bar = tqdm(total=sum(len(taus) for _, _, taus in decoders.values()), desc="curves", disable=None)
    for name, (model, n_rounds, taus) in decoders.items():
        engine, found[name] = Cached(model, contexts, n_rounds), []
        for tau in taus:
            written, full, partial = fill(engine, z, replace(FILL, tau_m2t=tau, n_rounds=n_rounds))
            score = chain(judge, z, inside, forced=written)[1].double().cpu().numpy() / length
            full, partial = full.cpu().numpy() / length, partial.cpu().numpy() / length
            row = quality(cut, written, tokenizer) | dict(score=score, full=full)
            row["all"] = in_full(dict(full=full, partial=partial, commit=0), model.cfg)
            found[name].append({k: means(v, weights) for k, v in row.items()} | {"tau": tau})
            bar.update()
    bar.close()
    return found


def print_curves(found: Curves) -> None:
    rows = []
    for name, points in found.items():
        for p in points:
            cells = [f"{p['full'][0]:.3f}", f"{p['all'][0]:.3f}", *(interval(p[m]) for m in MEASURES)]
            rows.append([name, f"{p['tau']:.2f}", *cells, f"{p['stutter'][0]:.4f}"])
    print_table(["decoder", "tau", "full", "all", *MEASURES, "stutter"], rows)


def print_differences(found: Curves) -> None:
    rows = []
    for name, points in list(found.items())[1:]:
        for p in points:
            for count in ("full", "all"):
                x = np.stack([b[count] for b in found["base"]], axis=1)  # (W, P)
                cells = [f"{p[count][0]:.3f}"]
                for m in MEASURES:
                    y = np.stack([b[m] for b in found["base"]], axis=1)
                    cells += compare(p[count], p[m], x, y)
                rows.append([name, f"{p['tau']:.2f}", count, *cells])
    if rows:
        print("\nless the base's at equal forwards, full or all: by the chord between its two nearest points, which "
              "flatters where its\ncurve is concave; at least: by the better one of the two; outside: it has no points "
              "on both sides")  # fmt: skip
        print_table(["decoder", "tau", "count", "forwards", *(c for m in MEASURES for c in (m, "at least"))], rows)


def compare(x: np.ndarray, y: np.ndarray, base_x: np.ndarray, base_y: np.ndarray) -> list[str]:
    """Both differences with their intervals; "outside" if too many resamples are to tell 95 % of them."""
    if np.isnan(y[0]):
        return ["-", "-"]
    both = differences(x, y, base_x, base_y)
    if np.isnan(both[0][0]) or np.isnan(both[0]).mean() > 0.025:
        return ["outside"] * 2
    return [interval(d, "+") for d in both]


def plot(path: Path, found: Curves) -> None:
    from tools.plots import canvas, save

    drawn = [m for m in MEASURES if not np.isnan(found["base"][0][m][0])]
    plt, axes = canvas(path, len(drawn))
    for ax, m in zip(np.atleast_1d(axes), drawn, strict=True):
        for name, points in found.items():
            x, y = (np.stack([p[k] for p in points]) for k in ("all", m))  # (points, W)
            order, (low, high) = np.argsort(x[:, 0]), np.nanquantile(y[:, 1:], [0.025, 0.975], axis=1)
            error = np.stack([y[:, 0] - low, high - y[:, 0]]).clip(min=0)[:, order]
            ax.errorbar(x[order, 0], y[order, 0], error, marker="o", markersize=3, capsize=2, label=name)
        ax.set(xlabel="forwards a token, partial ones as n/L", ylabel=f"{m} (nats a token)" if m == "score" else m)
    np.atleast_1d(axes)[0].legend()
    save(plt, path)


def main() -> None:
    parser = spans.build_parser(__doc__)
    parser.add_argument("--adapter", nargs="+", default=[], help="folders of adapters of that base")
    args = parser.parse_args()
    found = curves(args, pick_device(args.device))
    print_curves(found)
    print_differences(found)
    if args.plot:
        plot(args.plot, found)


if __name__ == "__main__":
    main()
