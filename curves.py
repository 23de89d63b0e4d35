"""Text: quality against forwards, and the total correlation of the bundles that a decoder really commits.

Held-out documents give pieces (the functions of Python files, windows of other text); in each one a span inside one
block is masked, with the text before it and the rest of its block left to read. Every decoder fills the same spans:

    base            Stage A alone, the frozen checkpoint; one at a time: the same with tau_m2t 1
    NAME            an adapter with Stage B
    NAME, B off     the same weights, Stage A alone (left out where adapters act in the marked pass only: it is base)

    score       log-probability of what was written under the base's own one-at-a-time chain, nats a token
    exact       the span as it was;  parses: the piece with the span in it is still Python
    stutter     share of the block's neighbouring words that are equal
    NFE         full forwards a token (the paper's count), and all of them, a partial one as n/L

Differences to the base are taken at equal NFE, on the same spans: the base's curve is interpolated, and a bootstrap
over spans gives the 95 % interval. It refuses toys (their tables are exact) and text without a long enough piece.

    python evaluate.py --data stdlib --ckpt out/text --adapter out/text_clean out/text_chain --curve --plot curve.svg
    python evaluate.py --data stdlib --ckpt out/text --tc --plot tc.svg
"""

import ast
import re
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cache import Cached
from checkpoint import load_model, load_tokenizer
from corrupt import chain_decode, choose
from data import Filter, Tokenizer, fail, generator, is_validation, load_text, replace_file
from model import Model
from sample import Decoding, step

# R spans (rows), B block_length, V vocabulary, n positions of a bundle

LogProbs = Callable[[Tensor], Tensor]  # blocks (R, B) int64 -> (R, B, V) float32 log-probabilities

BOOTSTRAP = 1000
FILL = Decoding(tau_t2t=None)


def add_arguments(parser) -> list[str]:
    g = parser.add_argument_group("text (only with --curve or --tc)")
    names = [
        g.add_argument("--curve", action="store_true", help="quality against forwards a token, over tau_m2t"),
        g.add_argument("--tc", action="store_true", help="total correlation of the base's bundles, by confidence"),
        g.add_argument("--spans", type=int, default=512, help="held-out spans to fill"),
        g.add_argument("--taus", type=float, nargs="+", default=[0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
                       help="values of tau_m2t"),
        g.add_argument("--draws", type=int, default=8, help="chain samples of each bundle (--tc)"),
    ]  # fmt: skip
    return [a.dest for a in names]


# ---------------------------------------------------------------------------------------------------------------------
# spans


@dataclass
class Span:
    piece: list[int]  # ids of the whole piece
    start: int  # where the block begins
    at: slice  # the masked positions, inside the block
    python: bool


def pieces(name: str, text: str) -> Iterator[tuple[str, bool]]:
    """The functions of a Python file, each by itself; of any other text the whole. -> (text, whether it is Python)."""
    if not name.endswith(".py"):
        yield text, False
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            yield textwrap.dedent("\n".join(lines)) + "\n", True


def cut_spans(documents: list[tuple[str, str]], tokenizer: Tokenizer, B: int, longest: int, n: int) -> list[Span]:
    """n spans of held-out documents, a function of their order and of B alone: at most one in a piece, a quarter to
    three quarters of a block long, in a block after the first."""
    rng, spans = np.random.default_rng(0), []
    for name, text in documents:
        if not is_validation(name):
            continue
        for piece, python in pieces(name, text):
            ids = tokenizer.encode_documents([piece])[0].tolist()
            if not python:
                ids = ids[:longest]
            if not 3 * B <= len(ids) <= longest:
                continue
            start = B * int(rng.integers(1, len(ids) // B))
            length = int(rng.integers(max(2, B // 4), 3 * B // 4 + 1))
            first = int(rng.integers(0, B - length + 1))
            spans.append(Span(ids, start, slice(first, first + length), python))
    if len(spans) < 2:
        fail(f"the held-out documents have no pieces of {3 * B}..{longest} tokens: give more text by --data")
    return [spans[i] for i in sorted(rng.permutation(len(spans))[:n])]


def blocks(spans: list[Span], B: int, mask_id: int) -> tuple[Tensor, Tensor]:
    """Blocks with the span masked (R, B) int64, and where the span is (R, B) bool."""
    z = torch.tensor([s.piece[s.start : s.start + B] for s in spans])
    inside = torch.zeros_like(z, dtype=torch.bool)
    for row, s in zip(inside, spans, strict=True):
        row[s.at] = True
    return z.masked_fill(inside, mask_id), inside


# ---------------------------------------------------------------------------------------------------------------------
# decoders and their scores


@dataclass
class Filled:
    """What one decoder wrote at one tau_m2t, row by row."""

    z: Tensor  # (R, B) int64
    full: Tensor  # (R,) forwards
    partial: Tensor  # (R,) passes over the last n layers
    score: Tensor | None = None  # (R,) float32, nats of the whole span


def fill(engine: Cached, z: Tensor, d: Decoding, on_step: Callable[[Tensor, Tensor, Tensor], None] | None = None):
    """Fill all masks of the blocks z (R, B). `on_step(z, bundle, conf of Stage A)` sees every commitment."""
    prompt, u = torch.ones_like(z, dtype=torch.bool), torch.zeros(len(z), 3, z.shape[1], device=z.device)
    full, partial = torch.zeros(2, len(z), dtype=torch.long, device=z.device)
    for _ in range(4 * z.shape[1]):  # a model may write masks for ever
        masked = z == engine.cfg.mask_id
        if not masked.any():
            break
        s = step(engine, z, prompt, True, u, d)
        if on_step:
            on_step(z, s["bundle"], s["conf_a"])
        full, partial = full + masked.any(-1), partial + d.n_rounds * s["bundle"].any(-1)
        z = s["after"]
    return Filled(z, full, partial)


def stage_a_log_probs(engine: Cached) -> LogProbs:
    def log_p(z: Tensor) -> Tensor:
        logits = engine.stage_a(z)[1]
        logits[..., engine.cfg.mask_id] = float("-inf")
        return logits.log_softmax(-1)

    return log_p


def chain(log_p: LogProbs, z: Tensor, bundle: Tensor, u: Tensor | None = None, forced: Tensor | None = None):
    """The one-at-a-time decode of a bundle (R, B), most confident position first: by argmax, by u (R, B), or with the
    tokens `forced` (R, B) upon it. -> tokens (R, B), their log-probability (R,)."""

    def predict(z: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        at = log_p(z)[where]  # (n, V)
        if forced is None:
            return choose(at, 1, None if u is None else u[where])
        token = forced[where][:, None]
        return at.gather(1, token), token, at.amax(-1)

    tokens, score = chain_decode(z, bundle, z.shape[1], 1, predict)
    return tokens, score[:, 0]


def excess(log_p: LogProbs, z: Tensor, bundle: Tensor, u: Tensor) -> Tensor:
    """log p_chain(x_S) - sum_i log p_i(x_i) of one joint sample x_S of each bundle, by u (R, B): (R,) nats. Its mean
    over u is KL(chain || product of marginals): the conditional TC, if the marginals are the chain's own."""
    alone = log_p(z)
    tokens, score = chain(log_p, z, bundle, u)
    product = alone.gather(-1, tokens.masked_fill(~bundle, 0)[..., None])[..., 0].masked_fill(~bundle, 0.0).sum(-1)
    return score - product


def quality(spans: list[Span], filled: Filled, tokenizer: Tokenizer, share: float) -> dict[str, np.ndarray]:
    """Per-row figures, (R,) float64 each; nan where a figure does not apply."""
    lengths = np.array([s.at.stop - s.at.start for s in spans], dtype=float)
    exact, parses, stutter = [], [], []
    for s, row in zip(spans, filled.z.tolist(), strict=True):
        end = s.start + len(row)
        exact.append(row == s.piece[s.start : end])
        text = tokenizer.decode(s.piece[: s.start] + row + s.piece[end:])
        parses.append(float(is_python(text)) if s.python else np.nan)
        words = re.findall(r"\w+", tokenizer.decode(s.piece[max(0, s.start - len(row)) : s.start] + row))
        pairs = list(zip(words, words[1:], strict=False))
        stutter.append(sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0)
    full, partial = filled.full.cpu().numpy() / lengths, filled.partial.cpu().numpy() / lengths
    score = filled.score.double().cpu().numpy() / lengths
    figures = dict(score=score, exact=exact, parses=parses, stutter=stutter, nfe=full, total=full + share * partial)
    return {k: np.asarray(v, dtype=float) for k, v in figures.items()}


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# the curve


def difference(ours: dict, base: list[dict], measure: str, resamples: np.ndarray) -> tuple[float, float, float]:
    """Our mean score less the base's at the same `measure` (nfe or total): estimate and 95 % interval. ours: the rows
    of one tau; base: of every tau; resamples (BOOTSTRAP, R) row numbers."""

    def gap(rows: np.ndarray) -> float:
        x, y = (np.array([b[k][rows].mean() for b in base]) for k in (measure, "score"))
        order = np.argsort(x)
        return ours["score"][rows].mean() - np.interp(ours[measure][rows].mean(), x[order], y[order])

    drawn = np.array([gap(rows) for rows in resamples])
    return gap(np.arange(resamples.shape[1])), *np.quantile(drawn, [0.025, 0.975])


def load_decoders(args: Namespace, device: torch.device) -> tuple[Model, dict[str, tuple[Model, int]]]:
    """The base, and every decoder's model and number of rounds, by name."""
    base = load_model(args.ckpt[0], device, torch.float32)
    decoders = {"base": (base, 0)}
    for folder in args.adapter:
        model = load_model(args.ckpt[0], device, torch.float32, folder)
        decoders[folder] = model, model.cfg.n_rounds
        if model.lora_scope == "all":
            decoders[f"{folder}, B off"] = model, 0
    return base, decoders


def read_spans(args: Namespace, model: Model) -> tuple[list[Span], Tokenizer]:
    if len(args.ckpt) != 1:
        fail("--curve and --tc take one --ckpt, the base; what is compared with it goes to --adapter")
    if args.spans < 2 or args.draws < 1 or not all(0 <= t < 1 for t in args.taus):
        fail("--spans must be at least 2, --draws at least 1, and every tau of --taus in [0, 1)")
    tokenizer = load_tokenizer(Path(args.ckpt[0]), model.cfg.tokenizer)
    if tokenizer is None:
        fail(f"--ckpt {args.ckpt[0]} is of a toy: its tables are exact, leave --curve and --tc out")
    documents = load_text([args.data], Filter())
    longest = min(256 if model.cfg.tokenizer == "bytes" else 2048, model.cfg.max_len)
    spans = cut_spans(documents, tokenizer, model.cfg.block_length, longest, args.spans)
    tokens = sum(s.at.stop - s.at.start for s in spans)
    python = sum(s.python for s in spans)
    print(
        f"{len(spans)} spans, {tokens} tokens, {python} of them in Python functions; blocks of {model.cfg.block_length}"
    )
    return spans, tokenizer


@torch.inference_mode()
def curve(args: Namespace, device: torch.device) -> None:
    base, decoders = load_decoders(args, device)
    spans, tokenizer = read_spans(args, base)
    z, inside = (t.to(device) for t in blocks(spans, base.cfg.block_length, base.cfg.mask_id))
    contexts = [s.piece[: s.start] for s in spans]
    judge = stage_a_log_probs(Cached(base, contexts, 0))
    found: dict[str, list[dict]] = {}
    bar = tqdm(total=len(decoders) * len(args.taus) + 1, desc="curve", disable=None)
    for name, (model, n_rounds) in decoders.items():
        engine = Cached(model, contexts, n_rounds)
        for tau in [*args.taus, 1.0] if name == "base" else args.taus:
            filled = fill(engine, z, replace(FILL, tau_m2t=tau, n_rounds=n_rounds))
            filled.score = chain(judge, z, inside, forced=filled.z)[1]
            found.setdefault(name, []).append(quality(spans, filled, tokenizer, model.cfg.n_last / model.cfg.n_layer))
            bar.update()
    bar.close()
    print_curve(found, args.taus)
    if args.plot:
        plot_curve(args.plot, found)


def print_curve(found: dict[str, list[dict]], taus: list[float]) -> None:
    rows = len(found["base"][0]["score"])
    resamples = np.random.default_rng(0).integers(0, rows, (BOOTSTRAP, rows))
    print(f"{'decoder':24} {'tau':>5} {'NFE':>6} {'all':>6} {'score':>8} {'+-':>6} {'exact':>6} {'parses':>6} "
          f"{'stutter':>7}   score - base at equal NFE      at equal forwards in all")  # fmt: skip
    for name, curve in found.items():
        for tau, r in zip([*taus, 1.0], curve, strict=False):
            m = {k: np.nanmean(v) if not np.isnan(v).all() else np.nan for k, v in r.items()}
            error = r["score"].std(ddof=1) / np.sqrt(rows)
            gaps = ""
            if name != "base":
                for measure in ("nfe", "total"):
                    gap, low, high = difference(r, found["base"], measure, resamples)
                    gaps += f"   {gap:+.4f} [{low:+.4f}, {high:+.4f}]"
            label = f"{name}, one at a time" if tau == 1.0 else name
            print(f"{label:24} {tau:5.2f} {m['nfe']:6.3f} {m['total']:6.3f} {m['score']:8.4f} {error:6.4f} "
                  f"{m['exact']:6.3f} {m['parses']:6.3f} {m['stutter']:7.4f}{gaps}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# the TC of real bundles

EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@torch.inference_mode()
def bundle_tc(args: Namespace, device: torch.device) -> None:
    """Every bundle of two or more tokens that the base commits, at every tau: its TC by `draws` joint samples."""
    base, _ = load_decoders(Namespace(**vars(args) | {"adapter": []}), device)
    spans, _ = read_spans(args, base)
    z, _ = (t.to(device) for t in blocks(spans, base.cfg.block_length, base.cfg.mask_id))
    engine = Cached(base, [s.piece[: s.start] for s in spans], 0)
    judge = stage_a_log_probs(engine)
    rng, found, alone = generator("bundles"), [], 0
    bar = tqdm(args.taus, desc="tc", disable=None)

    def measure(z: Tensor, bundle: Tensor, conf: Tensor) -> None:
        nonlocal alone
        size = bundle.sum(-1)
        alone += int((size == 1).sum())
        joint = bundle & (size > 1)[:, None]
        if joint.any():
            u = torch.rand(args.draws, *z.shape, generator=rng).to(z.device)
            gain = torch.stack([excess(judge, z, joint, v) for v in u]).mean(0)
            lowest = conf.masked_fill(~bundle, 2.0).amin(-1)
            found.append(torch.stack([lowest, size.float(), gain])[:, size > 1].cpu())

    for tau in bar:
        fill(engine, z, replace(FILL, tau_m2t=tau, n_rounds=0), measure)
    if not found:
        fail("no bundle of two tokens was committed at these --taus: lower them")
    lowest, size, gain = torch.cat(found, dim=1).double().numpy()
    print(f"{len(gain)} bundles of two and more ({alone} of one, TC 0), tau_m2t {', '.join(map(str, args.taus))}")
    print("lowest confidence   bundles   mean size   TC (nats)       +-   TC a token")
    table = []
    for a, b in zip(EDGES, EDGES[1:], strict=False):
        here = (lowest > a) & (lowest <= b)
        if here.sum() > 1:
            error = gain[here].std(ddof=1) / np.sqrt(here.sum())
            table.append((lowest[here].mean(), gain[here].mean(), error))
            print(f"{f'{a:.1f}..{b:.1f}':>17} {here.sum():9} {size[here].mean():11.2f} {gain[here].mean():11.4f} "
                  f"{error:8.4f} {gain[here].sum() / size[here].sum():12.4f}")  # fmt: skip
    if args.plot:
        plot_tc(args.plot, table)


# ---------------------------------------------------------------------------------------------------------------------
# pictures


def plot_curve(path: Path, found: dict[str, list[dict]]) -> None:
    plt, axes = canvas(path)
    for name, curve in found.items():
        x, y = (np.array([r[k].mean() for r in curve]) for k in ("nfe", "score"))
        error = np.array([r["score"].std(ddof=1) / np.sqrt(len(r["score"])) for r in curve])
        order = np.argsort(x)
        axes.errorbar(x[order], y[order], error[order], marker="o", markersize=3, capsize=2, label=name)
    axes.set(xlabel="full forwards a token", ylabel="log p under the base's chain (nats a token)")
    axes.legend()
    save(plt, path)


def plot_tc(path: Path, table: list[tuple[float, float, float]]) -> None:
    plt, axes = canvas(path)
    x, y, error = np.array(table).T
    axes.errorbar(x, y, error, marker="o", capsize=2)
    axes.set(xlabel="lowest confidence in the bundle", ylabel="total correlation (nats)", ylim=(0, None))
    save(plt, path)


def canvas(path: Path, columns: int = 1):
    """(matplotlib's pyplot, axes), or one line about its absence or about a kind of file that it cannot draw."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "cocommit"  # the same picture from the same numbers, byte for byte
        import matplotlib.pyplot as plt
    except ImportError:
        fail("--plot needs matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(1, columns, figsize=(1 + 4.5 * columns, 4), constrained_layout=True)
    if path.suffix[1:] not in (kinds := figure.canvas.get_supported_filetypes()):
        fail(f"--plot {path}: the name must end in one of {', '.join(kinds)}")
    return plt, axes


def save(plt, path: Path) -> None:
    date = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    replace_file(path, lambda p: plt.savefig(p, format=path.suffix[1:], **date))
    print(f"wrote {path}")
