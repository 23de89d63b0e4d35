"""Run files read: one run or a folder of them, the statistics, and the paper's three tables beside the paper's figures.

A delta without its noise says little, so each stands with the 95 % interval of a paired bootstrap and McNemar's exact p
over the items that both runs have, and the paper's with what their own number of items can tell apart. Rows are found
by the settings stored in the runs. HumanEval+ and MBPP+ count once EvalPlus's verdicts lie beside the run file.

Refuses: a damaged run file, a folder without runs, two runs that fit one row.

    python -m released.tables main --runs runs/            # Table 1: base, CoCommit, delta, forwards a token
    python -m released.tables mechanism --runs runs/       # Table 2: GSM8K, what each part of the method adds
    python -m released.tables lastn --runs runs/           # Table 3: n = 3, 6, 9 (and whatever else was run)
"""

import hashlib
import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from cache import in_full
from evaluate import print_table, wilson
from lib.util import Parser, fail, read_json
from released.ablation import Ablation
from released.benchmarks import TASKS
from sample import MODES

# Shares are 0..1 in run files and percent in tables.

Q = Ablation(**MODES["q"], gen_length=16384, eos_early_stop=True)  # the paper's protocol, before Stage B's own gate
MECHANISM = [  # the paper's Table 2: row, whose weights, what differs from Q with Stage B, accuracy, full NFE/token
    ("released, factorised", "base", dict(n_rounds=0), 89.61, 0.26),
    ("adapter, Stage B off", "adapter", dict(n_rounds=0), 90.75, 0.28),
    ("Stage B, gated edits", "adapter", {}, 91.13, 0.28),
    ("Stage B, ungated edits (default)", "adapter", dict(tau_t2t=0.0), 91.13, 0.34),
    ("B fills, A edits", "adapter", dict(edit_from="A"), 90.90, 0.27),
    ("A fills, B edits", "adapter", dict(fill_from="A"), 90.90, 0.30),
    ("B fills, edits off", "adapter", dict(tau_t2t=None), 88.40, 0.30),
    ("Stage B without marker", "adapter", dict(marker=False), 90.37, 0.28),
    ("entropy selection, same size", "adapter", dict(select="entropy"), 90.30, 0.27),
    ("Stage B, tau_m2t 0.5", "adapter", dict(tau_m2t=0.5), 88.40, 0.24),
    ("Stage B, tau_m2t 0.3", "adapter", dict(tau_m2t=0.3), 84.00, 0.22),
    ("adapter, Stage B off, tau_m2t 0.5", "adapter", dict(tau_m2t=0.5, n_rounds=0), 88.48, 0.23),
    ("adapter, Stage B off, tau_m2t 0.3", "adapter", dict(tau_m2t=0.3, n_rounds=0), 83.70, 0.22),
    ("released, tau_m2t 0.5", "base", dict(tau_m2t=0.5, n_rounds=0), 86.73, 0.26),
    ("released, tau_m2t 0.3", "base", dict(tau_m2t=0.3, n_rounds=0), 79.15, 0.30),
    ("released, both gates removed", "base", dict(tau_m2t=0.0, tau_t2t=0.0, n_rounds=0), 83.40, 0.15),
    ("all masks at once", "adapter", dict(tau_m2t=-1.0, tau_t2t=0.0), 79.91, 0.10),
]
LASTN = {  # the paper's Table 3, n = 6 and 9; n = 3 is Table 1's column of the method
    "gsm8k": {6: (90.75, 0.30), 9: (90.83, 0.30)},
    "cmath": {6: (93.08, 0.44), 9: (92.17, 0.40)},
    "gpqa": {6: (42.93, 0.36), 9: (39.39, 0.35)},
    "drop": {6: (82.80, 0.32), 9: (84.32, 0.35)},
    "piqa": {6: (83.68, 0.47), 9: (84.77, 0.38)},
    "humaneval": {6: (80.49, 0.14), 9: (79.88, 0.14)},
    "mbpp": {6: (68.78, 0.18), 9: (72.22, 0.18)},
}
HEAD = ["", "items", "score", "95 %", "delta", "95 %, paired", "p", "NFE/token", "in all"]
HEAD += ["| paper:", "delta", "noise", "NFE/token"]


# ---------------------------------------------------------------------------------------------------------------------
# run files


@dataclass
class Run:
    """settings, their hash, and the items by id."""

    settings: dict
    hash: str
    items: dict[str, dict]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def differences(a: dict, b: dict, prefix: str = "") -> list[str]:
    found = []
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            found += differences(x, y, f"{prefix}{key}.")
        elif x != y:
            found.append(f"{prefix}{key} ({str(x)[:24]}, {str(y)[:24]})")
    return found


def read_run(path: Path) -> tuple[Run | None, int]:
    """A run file, and how many bytes its whole lines have; None where not even the first line is whole.

    A line cut short at the end does not count; whatever else is no line of this run exits with one line."""
    try:
        data = path.read_bytes()
    except OSError as e:
        fail(f"{path} cannot be read: {e.strerror}")
    run, whole = None, data.rfind(b"\n") + 1
    if not (start := b'{"settings": ').startswith(data[: len(start)]):
        fail(f"{path} is no run file: choose another --out, or take it out of the folder")
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            if run is None:
                run = Run(record["settings"], record["hash"], {})
                good = digest(run.settings) == run.hash
            else:
                good = record["settings"] == run.hash and {"full", "partial", "commit"} <= record["nfe"].keys()
                run.items.setdefault(record["id"], record)
                good = good and record["correct"] in (True, False, None) and record["tokens"] >= 0 and record["prompt"]
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            fail(f"{path}:{number} is damaged or a line of another run: delete that line, or start anew")
    return run, whole


def read_runs(folder: Path) -> list[Run]:
    """Every run under a folder: files of one settings hash are one run, and code has EvalPlus's verdicts."""
    runs: dict[str, Run] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        if path.parent.suffix != ".evalplus" and (run := read_run(path)[0]):
            judge(path, run)
            runs.setdefault(run.hash, Run(run.settings, run.hash, {})).items.update(run.items)
    return list(runs.values()) or fail(f"--runs {folder} holds no run file: `python -m released.run` makes them")


def evalplus_folder(run_file: Path) -> Path:
    """Samples, their part of the dataset and the verdicts: all that a sandbox needs, apart from the run files."""
    return run_file.with_suffix(".evalplus")


def verdict_file(samples: Path) -> Path:
    """Where EvalPlus 0.3.1 puts its verdicts."""
    return samples.with_name(samples.name.replace(".jsonl", "_eval_results.json"))


def judge(path: Path, run: Run) -> None:
    """Take over EvalPlus's verdicts, each only for the very program that it was given."""
    result = verdict_file(evalplus_folder(path) / "samples.jsonl")
    if TASKS[run.settings["task"]].correct or not result.exists():
        return
    try:
        for name, (sample, *_) in read_json(result, "EvalPlus result")["eval"].items():
            if name in run.items and sample["solution"] == (run.items[name]["extracted"] or ""):
                run.items[name]["correct"] = sample["base_status"] == sample["plus_status"] == "pass"
    except (KeyError, TypeError, ValueError, AttributeError):
        fail(f"{result} is no result of EvalPlus 0.3.1: delete it and score the samples again")


def tally(run: Run) -> tuple[int, int, float, float]:
    """(right, judged, full forwards a token as the paper counts, all forwards a token in full ones)."""
    judged = [r["correct"] for r in run.items.values() if r["correct"] is not None]
    tokens = max(1, sum(r["tokens"] for r in run.items.values()))
    nfe = {k: sum(r["nfe"][k] for r in run.items.values()) for k in ("full", "partial", "commit")}
    total = in_full(nfe, partial_cost(run.settings))
    return sum(judged), len(judged), nfe["full"] / tokens, total / tokens


def partial_cost(settings: dict) -> float:
    """What a partial forward cost in a run: Stage B runs n_last of the layers, a joint head has its own."""
    layers = settings["model"]["n_last"]
    if settings["adapter"]:
        layers = settings["adapter"].get("head_layers", layers)
    return layers / settings["model"]["n_layer"]


def summary(run: Run) -> str:
    right, judged, full, total = tally(run)
    score = "not judged here"
    if judged:
        low, high = wilson(right, judged)
        score = f"{100 * right / judged:.2f} % [{100 * low:.1f}, {100 * high:.1f}] ({right} of {judged})"
    return f"{score}, NFE/token {full:.3f} ({total:.3f} in all)"


# ---------------------------------------------------------------------------------------------------------------------
# statistics


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided p-value of b items that only one system has right against c that only the other has."""
    return min(1.0, 2 * sum(math.comb(b + c, i) for i in range(min(b, c) + 1)) / 2 ** (b + c))


def paired_bootstrap(a: np.ndarray, b: np.ndarray, rng: np.random.Generator, n: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of mean(b) - mean(a), the scores of two systems on the same items."""
    difference = np.asarray(b, float) - np.asarray(a, float)
    means = [rng.choice(difference, len(difference)).mean() for _ in range(n)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def difference_se(p: float, q: float, n: int) -> float:
    """Standard error of p - q, two shares of n items each, unpaired: what a table of n items can tell apart."""
    return math.sqrt((p * (1 - p) + q * (1 - q)) / n)


# ---------------------------------------------------------------------------------------------------------------------
# tables


def variant(settings: dict) -> tuple:
    """What tells the rows of the tables apart; without Stage B, where its logits would go makes no difference."""
    d, stage_b = settings["decoding"], settings["decoding"]["n_rounds"] > 0
    weights = "base"
    if settings["adapter"] or stage_b:
        weights = "adapter"
    routes = (d["fill_from"], d["edit_from"], d["marker"]) if stage_b else ("B", "B", True)
    return weights, stage_b, d["tau_m2t"], d["tau_t2t"], d["select"], *routes


VARIANTS = {
    name: variant({"adapter": weights == "adapter", "decoding": asdict(replace(Q, **changes))})
    for name, weights, changes, *_ in MECHANISM
}
BASE, STAGE_B_OFF, _, COCOMMIT = list(VARIANTS)[:4]


def pick(runs: list[Run], task: str, row: str, n: int | None = None) -> Run | None:
    """The run of a row, if there is one. n None: where runs of several n fit, the paper's n = 3."""
    found = [r for r in runs if r.settings["task"] == task and variant(r.settings) == VARIANTS[row]]
    threes = [r for r in found if r.settings["model"]["n_last"] == 3]
    found = [r for r in found if r.settings["model"]["n_last"] == n] if n else threes or found
    if len(found) > 1:
        fail(f"{len(found)} runs of {task} fit the row {row!r}; they differ in "
             f"{'; '.join(differences(found[0].settings, found[1].settings))}: keep one in the folder")  # fmt: skip
    return found[0] if found else None


def paired(run: Run, reference: Run) -> tuple[float, float, float, float | None] | None:
    """(delta, its 95 % interval, McNemar's p) in shares over the items of both; None where there are none.

    Repeats of one question (GPQA) are no independent items: they are averaged, and McNemar's test has no p for them."""
    a, b = defaultdict(list), defaultdict(list)
    for name, mine in run.items.items():
        other = reference.items.get(name)
        if other and mine["prompt"] == other["prompt"] and None not in (mine["correct"], other["correct"]):
            question = name.partition("#")[0] if run.settings["task"] == "gpqa" else name
            a[question].append(other["correct"])
            b[question].append(mine["correct"])
    if not a:
        return None
    x, y = (np.array([np.mean(v) for v in scores.values()]) for scores in (a, b))
    single = all(len(v) == 1 for v in a.values())
    p = mcnemar(int((x > y).sum()), int((y > x).sum())) if single else None
    return float((y - x).mean()), *paired_bootstrap(x, y, np.random.default_rng(0)), p


def line(
    label: str, task: str, run: Run | None, against: Run | None, paper: tuple | None, theirs: float | None
) -> list:
    """One row: measured (score, interval, delta to `against`, forwards), then the paper's (accuracy, NFE/token)
    and its delta to `theirs`."""
    cells, n = ["-"] * 8, TASKS[task].n_official
    if run is not None:
        right, judged, full, total = tally(run)
        cells[0] = f"{len(run.items)}" if len(run.items) >= n else f"{len(run.items)}/{n}"
        cells[6:] = f"{full:.3f}", f"{total:.3f}"
        if judged:
            low, high = wilson(right, judged)
            cells[1:3] = f"{100 * right / judged:.2f}", f"{100 * low:.1f} .. {100 * high:.1f}"
        if against is not None and against is not run and (found := paired(run, against)):
            delta, low, high, p = found
            cells[3:5] = f"{100 * delta:+.2f}", f"{100 * low:+.2f} .. {100 * high:+.2f}"
            cells[5] = "-" if p is None else f"{p:.3f}"
    accuracy, nfe = paper or (None, None)
    printed = [f"| {accuracy:.2f}", "-", "-", f"{nfe:.2f}"] if paper else ["| -", "-", "-", "-"]
    if paper and theirs is not None:
        noise = 196 * difference_se(accuracy / 100, theirs / 100, n)
        printed[1:3] = f"{accuracy - theirs:+.2f}", f"+-{noise:.2f}"
    return [label, *cells, *printed]


def notes(pairs: list[tuple[Run, Run | None]]) -> list[str]:
    """What a reader must know before trusting a row; pairs: (run, what its delta is against)."""
    said = []
    for run, against in pairs:
        task, expected = TASKS[run.settings["task"]], ("adapter", "decoding", "model.n_last", "model.n_rounds")
        if any(r["correct"] is None for r in run.items.values()):
            said.append(f"{task.title}: items without EvalPlus's verdict do not count; run again with --score")
        if against:
            other = [d for d in differences(against.settings, run.settings) if not d.startswith(expected)]
            lengths = {r.settings["decoding"]["gen_length"] for r in (run, against)}
            other += [f"gen_length {sorted(lengths)}"] if len(lengths) > 1 else []
            if other:
                said.append(f"{task.title}: the runs compared differ in more than the method: {'; '.join(other)}")
    return list(dict.fromkeys(said))


LEGEND = (
    "delta: over items in both runs, with a paired bootstrap's interval and McNemar's exact p; the paper's noise: two "
    "scores that far apart differ by chance (95 %, unpaired, from its number of items)",
    "NFE/token: full forwards, as the paper counts; in all: commit forwards and Stage B's n/L of one included",
)


def stage_b_note() -> str:
    """Table 2's own share of Stage B, and what GSM8K's number of items allows to say about it."""
    paper, n = {name: accuracy for name, _, _, accuracy, _ in MECHANISM}, TASKS["gsm8k"].n_official
    gain = paper[COCOMMIT] - paper[STAGE_B_OFF]
    noise, answers = difference_se(paper[COCOMMIT] / 100, paper[STAGE_B_OFF] / 100, n), round(gain / 100 * n)
    return (
        f"the paper's Stage B alone (Table 2, same weights): {gain:+.2f} points = {answers} of {n} GSM8K answers, "
        f"noise +-{196 * noise:.2f}; had none of the others got worse, McNemar's p would be {mcnemar(0, answers):.3f}"
    )


def table(kind: str, folder: Path) -> tuple[list[str], list[list[str]], list[str]]:
    """(head, rows, notes) of the paper's Table 1 (`main`), 2 (`mechanism`) or 3 (`lastn`) from the runs in a folder."""
    runs, rows, compared = read_runs(folder), [], []
    if kind == "mechanism":
        default, best = pick(runs, "gsm8k", COCOMMIT), TASKS["gsm8k"].cocommit
        for name, _, _, accuracy, nfe in MECHANISM:
            run = pick(runs, "gsm8k", name)
            rows.append(line(name, "gsm8k", run, default, (accuracy, nfe), None if name == COCOMMIT else best))
            compared += [(run, default)] if run else []
        return ["GSM8K", *HEAD[1:]], rows, [*notes(compared), *LEGEND, stage_b_note()]
    for task in TASKS.values():
        three = (task.cocommit, task.nfe_cocommit)
        if kind == "main":
            base = pick(runs, task.name, BASE)
            cocommit = pick(runs, task.name, COCOMMIT)
            rows.append(line(f"{task.title} base", task.name, base, None, (task.base, task.nfe_base), None))
            rows.append(line(f"{task.title} CoCommit", task.name, cocommit, base, three, task.base))
            compared += [(r, a) for r, a in ((base, None), (cocommit, base)) if r]
            continue
        mine = [r for r in runs if r.settings["task"] == task.name and variant(r.settings) == VARIANTS[COCOMMIT]]
        default = pick(runs, task.name, COCOMMIT, 3)
        for n in sorted({3, 6, 9} | {r.settings["model"]["n_last"] for r in mine}):
            run, paper = pick(runs, task.name, COCOMMIT, n), (LASTN[task.name] | {3: three}).get(n)
            rows.append(
                line(f"{task.title} n = {n}", task.name, run, default, paper, None if n == 3 else task.cocommit)
            )
            compared += [(run, default)] if run else []
    return HEAD, rows, [*notes(compared), *LEGEND, *([stage_b_note()] if kind == "main" else [])]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("table", choices=["main", "mechanism", "lastn"], help="the paper's Table 1, 2 or 3")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run files that released.run wrote")
    args = parser.parse_args()
    head, rows, said = table(args.table, args.runs)
    print_table(head, rows)
    print("\n".join(said))


if __name__ == "__main__":
    main()
