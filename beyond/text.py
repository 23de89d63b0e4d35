"""Text: quality against forwards, on spans of held-out documents.

A system is a name, a checkpoint, perhaps an adapter, and is decoded in every setting that its user could choose
(decoders.py): Stage A alone by every rule that needs no training, a joint head at its dials, and so on. Systems of one
name are its seeds: the first ones of all names belong together, then the second ones. All fill the same spans of
held-out documents (spans.py says which). The first name is the base. The same weights with the paper's Stage B switched
off are a system of their own, "NAME, off".

    score       log-probability of what was written under its base's own one-at-a-time chain, nats a token. This is what
                chain targets train: a gain here alone says that they were learned, not that the text is better
    exact       share of spans as they were
    parses      share of Python pieces that are still Python with the span in them
    stutter     share of the block's neighbouring words that are equal
    all, mult, serial    what a token costs (costs.py), in full forwards: everything that a decoder runs,
                multiplications by weights, and passes one after the other

Brackets are 95 % of 1,000 resamples of the documents, each with its spans, and of the seeds (seeds.py). The tables of
budgets are what a user gets who may not pay more: of each system the best setting that costs no more, chosen on one
half of the documents and judged on the other, over 20 halvings and anew in every resample, so that many settings to
choose from flatter nobody. --against NAME adds what NAME has more than each other one. It refuses toys (their tables
are exact) and text without a long enough piece.

    python -m beyond.text --data stdlib --system base out/text --system head out/text out/joint --against head
"""

import re
from argparse import Namespace
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from beyond import decoders, pays, seeds, spans
from beyond.costs import costs, full_forward
from beyond.pays import COSTS, System, check_systems, counted, over_seeds, read_records, save
from beyond.seeds import interval
from beyond.spans import FILL, Span, at_rows, chain, fill, is_python, stage_a_log_probs
from cache import Cached
from checkpoint import load_model, load_tokenizer
from evaluate import print_table
from lib.tokenizer import Tokenizer
from lib.util import Parser, fail, pick_device
from model import Model
from sample import step_of

# R spans (rows), B block_length, P settings, S seeds of training, C documents, W resamples

Systems = dict[str, list[tuple[str, str | None]]]  # name -> of each seed a checkpoint, and an adapter or None

BUDGETS = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.8, 1.0)
AVERAGED = tuple(n / 100 for n in range(20, 61))  # budgets of the mean lead
MEASURES = ("score", "exact", "parses")
FIGURES = (*COSTS, *MEASURES, "stutter")


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
# the systems


def systems(args: Namespace) -> Systems:
    """The base first; it has no adapter, and as many seeds as every other system."""
    named = defaultdict(list)
    for name, ckpt, *rest in args.system:
        adapter = None
        if rest:
            adapter = rest[0]
        named[name].append((ckpt, adapter))

    base, of_base = next(iter(named.items()))
    if any(adapter is not None for _, adapter in of_base):
        fail(f"--system {base} has an adapter, and judges all others: give the base first, as NAME CKPT")
    for name, of in named.items():
        if len(of) != len(of_base):
            fail(f"--system {name} has {len(of)} seeds, the base has {len(of_base)}: each is judged by its own")
    return named


def settings(model: Model, adapter: str | None) -> list[decoders.Setting]:
    """Everything that a system is decoded by, greedily."""
    return decoders.settings_of(model, adapter, replace(FILL, n_rounds=0))


def load(named: Systems, device: torch.device) -> dict[str, list[Model]]:
    """Name -> its seeds' models. What does not belong together is refused now, not after hours."""
    models = defaultdict(list)
    expected = None
    for name, of_seeds in named.items():
        labels = set()
        for ckpt, adapter in of_seeds:
            model = load_model(ckpt, device, torch.float32, adapter)
            tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
            reads = (tokenizer and tokenizer.token_bytes, model.cfg.mask_id, model.cfg.block_length)
            if expected is None:
                expected = reads
            if reads != expected:
                fail(f"{ckpt} reads other tokens or blocks than the base: it would fill other spans")
            models[name].append(model)
            labels.add(tuple(s.label for s in settings(model, adapter)))
        if len(labels) > 1:
            fail(f"--system {name}: its seeds are decoded by different settings, they are not of one kind")
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


# ---------------------------------------------------------------------------------------------------------------------
# what is measured


@torch.inference_mode()
def measure(args: Namespace, known: dict, records: list[dict]) -> tuple[dict, list[dict]]:
    """Each span's document, as known from the records if there are any; and the records with one more for each seed and
    setting of every system that they lack."""
    named = systems(args)
    models = load(named, pick_device(args.device))
    base = next(iter(named))
    task = read_task(args, named[base][0][0], models[base][0])
    clusters = {"documents": [s.document for s in task.cut]}
    if known and known != clusters:
        fail("--records are about other spans than these: the same --data, --spans and tokens?")

    # the base of each seed judges that seed of all systems
    judges = [(Cached(model, task.contexts, 0), {}) for model in models[base]]

    measured = {(r["system"].removesuffix(", off"), r["ckpt"], r["adapter"]) for r in records}
    records = list(records)
    for name, of_seeds in named.items():
        for (ckpt, adapter), model, judge in zip(of_seeds, models[name], judges, strict=True):
            if (name, ckpt, adapter) in measured:
                continue
            records += measure_system(name, ckpt, adapter, model, task, judge)

            # nothing that was measured is lost
            if args.out:
                save(Path(args.out), clusters, records)
    return clusters, records


def measure_system(
    name: str, ckpt: str, adapter: str | None, model: Model, task: Task, judge: tuple[Cached, dict]
) -> list[dict]:
    """A record for each setting of one seed."""
    n_rounds = 0
    if adapter is not None:
        n_rounds = model.cfg.n_rounds
    engine = Cached(model, task.contexts, n_rounds)

    own_step = step_of(model)
    looks = Counter()
    records = []
    for s in tqdm(settings(model, adapter), desc=f"{name} {adapter or ckpt}", leave=False, disable=None):
        model.step = counted(decoders.set_up(model, s, own_step), looks)
        looks.clear()
        figures = measure_setting(engine, s, looks, task, *judge)
        record = dict(system=name, ckpt=ckpt, adapter=adapter, setting=s.label)
        if s.off:
            record["system"] += ", off"
        records.append(record | {k: figures[k].round(5).tolist() for k in FIGURES})
    return records


def measure_setting(
    engine: Cached, s: decoders.Setting, looks: Counter, task: Task, judge: Cached, known: dict[tuple, float]
) -> dict[str, np.ndarray]:
    """FIGURES of every span, (R,) each; looks: how often Stage B or a head ran for each row."""
    written, full, partial = fill(engine, task.z, s.decoding)
    full = full.double().cpu().numpy() / task.length
    partial = partial.double().cpu().numpy() / task.length
    ran = np.array([looks[row] for row in range(len(written))]) / task.length
    nfe = dict(full=full, partial=partial, commit=0)

    cost = costs(engine.model, nfe, ran, s.reading)
    cost["mult"] = cost["mult"] / full_forward(engine.model)

    score = scores(judge, task.z, task.inside, written, known) / task.length
    return {"score": score} | cost | quality(task.cut, written, task.tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# tables and a picture


def measured_by(m: str, records: list[dict], documents: list[int]) -> tuple[dict[str, System], np.ndarray]:
    """What is known of each system by this measure, at the spans that it applies to, and each such span's document,
    numbered anew. It applies to a span or not, whatever is written there."""
    systems = {}
    for name, by_setting in over_seeds(records).items():
        of_settings = list(by_setting.values())  # the records of a setting's seeds, of each setting
        values = np.array([[r[m] for r in of_seeds] for of_seeds in of_settings])  # (P, S, R)
        applies = ~np.isnan(values[0, 0])
        paid = {}
        for kind in COSTS:
            paid[kind] = np.array([[np.mean(r[kind]) for r in of_seeds] for of_seeds in of_settings])  # (P, S)
        systems[name] = System(list(by_setting), values[..., applies], paid)
    _, cluster = np.unique(np.array(documents)[applies], return_inverse=True)
    return systems, cluster


def present(records: list[dict]) -> list[str]:
    """The measures that this text has: no prose parses."""
    return [m for m in MEASURES if not np.isnan(records[0][m]).all()]


def show_settings(records: list[dict], documents: list[int]) -> None:
    """A row for each system and setting: what it costs, and every measure."""
    shown = [*present(records), "stutter"]
    rows = {}
    for m in shown:
        systems, cluster = measured_by(m, records, documents)
        draws = seeds.draw(cluster)
        for name, of in systems.items():
            shares = seeds.shares(seeds.by_beginning(of.values, cluster), draws)  # (W, P)
            for p, label in enumerate(of.labels):
                forwards = [f"{of.figures[kind][p].mean():.3f}" for kind in COSTS]
                row = rows.setdefault((name, label), [name, label, *forwards])
                row.append(interval(shares[:, p]))
    print_table(["system", "setting", *COSTS, *shown], list(rows.values()))


def show_budgets(records: list[dict], documents: list[int], against: str | None) -> None:
    """Of every measure the tables of budgets; of the score those of each rule, too."""
    for m in present(records):
        systems, cluster = measured_by(m, records, documents)
        draws = seeds.draw(cluster)
        print(f"\n{m}: the best setting that costs no more")
        pays.show_budgets(pays.budgets(systems, cluster, draws, BUDGETS), against, BUDGETS)
        if m == "score":
            pays.show_rules(systems, cluster, draws, BUDGETS)
            if against:
                pays.show_leads(systems, cluster, draws, against, AVERAGED)


def plot(path: Path, records: list[dict], documents: list[int]) -> None:
    """A panel for each measure that the text has."""
    from tools.plots import canvas, save

    drawn = present(records)
    plt, axes = canvas(path, len(drawn))
    axes = np.atleast_1d(axes)
    for ax, m in zip(axes, drawn, strict=True):
        systems, cluster = measured_by(m, records, documents)
        within = pays.budgets(systems, cluster, seeds.draw(cluster), BUDGETS)["all"]
        for name, of_system in within.items():
            draw_line(ax, name, of_system)
        unit = m
        if m == "score":
            unit = "score (nats a token)"
        ax.set(xlabel="at most so many forwards a token, all in full ones", ylabel=unit)
    axes[0].legend()
    save(plt, path)


def draw_line(ax, name: str, within: np.ndarray) -> None:
    """What a system has within each budget that pays for one of its settings, (budgets, W), with 95 % of the
    resamples."""
    paid = ~np.isnan(within[:, 0])
    y = within[paid]
    low, high = np.nanquantile(y[:, 1:], [0.025, 0.975], axis=1)
    error = np.stack([y[:, 0] - low, high - y[:, 0]]).clip(min=0)
    ax.errorbar(np.array(BUDGETS)[paid], y[:, 0], error, marker="o", markersize=3, capsize=2, label=name)


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def build_parser() -> Parser:
    parser = spans.build_parser(__doc__)
    # fmt: off
    add = parser.add_argument_group("what is compared").add_argument
    add("--system", nargs="+", action="append", metavar=("NAME", "CKPT [ADAPTER]"), default=[],
        help="the base first; again for another one, or for more seeds of a name, of all names in one order")
    add("--against", metavar="NAME", help="the system that all others are compared with")

    add = parser.add_argument_group("records").add_argument
    add("--out", help="file for the records of every setting and span, a JSON object a line")
    add("--records", nargs="+", default=[],
        help="files of records that were written before: what they hold is not measured again")
    # fmt: on
    return parser


def main() -> None:
    args = build_parser().parse_args()
    clusters, records = read_records(args.records, FIGURES)
    check_systems(args, records)
    if args.system:
        clusters, records = measure(args, clusters, records)

    documents = clusters["documents"]
    show_settings(records, documents)
    show_budgets(records, documents, args.against)
    if args.plot:
        plot(args.plot, records, documents)


if __name__ == "__main__":
    main()
