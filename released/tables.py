"""Run files read: the statistics, and the paper's three tables beside the paper's figures.

A delta without its noise says little, so each stands with the 95 % interval of a paired bootstrap and McNemar's exact p
over the items that both runs have, and the paper's with what their own number of items can tell apart. Rows are found
by the settings stored in the runs. HumanEval+ and MBPP+ count once EvalPlus's verdicts lie beside the run file.

    python -m released.tables main --runs runs/            # Table 1: base, CoCommit, delta, forwards per token
    python -m released.tables mechanism --runs runs/       # Table 2: GSM8K, what each part of the method adds
    python -m released.tables lastn --runs runs/           # Table 3: n = 3, 6, 9 (and whatever else was run)
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluate import print_table, wilson
from lib.output import in_full
from lib.util import Parser, command, fail, read_json, reading
from released.ablation import MECHANISM, plain, variant
from released.benchmarks import TASKS

# Shares are 0..1 in run files and percent in tables.

LASTN = {  # the paper's Table 3, n = 6 and 9; n = 3 is Table 1's column of the method
    "gsm8k": {6: (90.75, 0.30), 9: (90.83, 0.30)},
    "cmath": {6: (93.08, 0.44), 9: (92.17, 0.40)},
    "gpqa": {6: (42.93, 0.36), 9: (39.39, 0.35)},
    "drop": {6: (82.80, 0.32), 9: (84.32, 0.35)},
    "piqa": {6: (83.68, 0.47), 9: (84.77, 0.38)},
    "humaneval": {6: (80.49, 0.14), 9: (79.88, 0.14)},
    "mbpp": {6: (68.78, 0.18), 9: (72.22, 0.18)},
}


# ---------------------------------------------------------------------------------------------------------------------
# run files


@dataclass
class Run:
    settings: dict
    hash: str
    items: dict[str, dict]  # by id


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def differences(a: dict, b: dict, prefix: str = "") -> list[str]:
    """In words, key by key: ["decoding.tau_m2t (0.7, 0.5)"]."""
    found = []
    for key in sorted(a.keys() | b.keys()):
        x = a.get(key)
        y = b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            found += differences(x, y, f"{prefix}{key}.")
        elif x != y:
            found.append(f"{prefix}{key} ({str(x)[:24]}, {str(y)[:24]})")
    return found


def read_run(path: Path) -> tuple[Run | None, int]:
    """A run file, and how many bytes its whole lines have: a line cut short at the end does not count. None where not
    even the first line is whole."""
    run = None
    with reading(path, "run file"):
        data = path.read_bytes()
        start = b'{"settings": '
        if not start.startswith(data[: len(start)]):
            fail(f"{path} is no run file: choose another --out, or take it out of the folder")
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].split(b"\n")[:-1]:
            record = json.loads(line)
            if run is None:
                run = Run(record["settings"], record["hash"], {})
            elif record["settings"] != run.hash:
                fail(f"{path} holds {record['id']} of another run: delete that line, or start anew")
            else:
                run.items.setdefault(record["id"], record)
    return run, whole


def read_runs(folder: Path) -> list[Run]:
    """Every run under a folder: files of one settings hash are one run, and code has EvalPlus's verdicts."""
    runs: dict[str, Run] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        if path.parent.suffix == ".evalplus":
            continue
        run, _ = read_run(path)
        if run:
            judge(path, run)
            runs.setdefault(run.hash, Run(run.settings, run.hash, {})).items.update(run.items)
    if not runs:
        fail(f"--runs {folder} holds no run file: `python -m released.run` makes them")
    return list(runs.values())


def evalplus_folder(run_file: Path) -> Path:
    """Samples, their part of the dataset and the verdicts: all that a sandbox needs, apart from the run files."""
    return run_file.with_suffix(".evalplus")


def judge(path: Path, run: Run) -> None:
    """Take over EvalPlus 0.3.1's verdicts, each only for the very program that it was given."""
    result = evalplus_folder(path) / "samples_eval_results.json"
    if TASKS[run.settings["task"]].right or not result.exists():
        return
    with reading(result, "result of EvalPlus 0.3.1"):
        for name, (sample, *_) in read_json(result, "EvalPlus result")["eval"].items():
            if name in run.items and sample["solution"] == (run.items[name]["extracted"] or ""):
                run.items[name]["correct"] = sample["base_status"] == sample["plus_status"] == "pass"


@dataclass
class Tally:
    right: int
    judged: int
    full: float  # full forwards per token, as the paper counts
    in_all: float  # all forwards per token, in full ones


def tally(run: Run) -> Tally:
    judged = [record["correct"] for record in run.items.values() if record["correct"] is not None]
    tokens = max(1, sum(record["tokens"] for record in run.items.values()))
    nfe = {k: sum(record["nfe"][k] for record in run.items.values()) for k in ("full", "partial", "commit")}
    in_all = in_full(nfe, run.settings["partial_cost"])
    return Tally(sum(judged), len(judged), nfe["full"] / tokens, in_all / tokens)


def summary(run: Run) -> str:
    t = tally(run)
    score = "not judged here"
    if t.judged:
        low, high = wilson(t.right, t.judged)
        score = f"{100 * t.right / t.judged:.2f} % [{100 * low:.1f}, {100 * high:.1f}] ({t.right} of {t.judged})"
    return f"{score}, NFE/token {t.full:.3f} ({t.in_all:.3f} in all)"


# ---------------------------------------------------------------------------------------------------------------------
# statistics


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided p-value of b items that only one system has right against c that only the other has."""
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def paired_bootstrap(a: np.ndarray, b: np.ndarray, rng: np.random.Generator, n: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of mean(b) - mean(a), the scores of two systems on the same items."""
    difference = np.asarray(b, float) - np.asarray(a, float)
    means = [rng.choice(difference, len(difference)).mean() for _ in range(n)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def difference_se(p: float, q: float, n: int) -> float:
    """Standard error of p - q, two shares of n items each, unpaired: what a table of n items can tell apart."""
    return math.sqrt((p * (1 - p) + q * (1 - q)) / n)


def paired(run: Run, reference: Run) -> tuple[float, float, float, float | None] | None:
    """(delta, its 95 % interval, McNemar's p) in shares over the items of both; None where there are none.

    Repeats of one question (GPQA) are no independent items: they are averaged, and McNemar's test has no p for them."""
    a = defaultdict(list)
    b = defaultdict(list)
    for name, mine in run.items.items():
        other = reference.items.get(name)
        if other and mine["prompt"] == other["prompt"] and None not in (mine["correct"], other["correct"]):
            question = name
            if run.settings["task"] == "gpqa":
                question = name.partition("#")[0]
            a[question].append(other["correct"])
            b[question].append(mine["correct"])
    if not a:
        return None
    x = np.array([np.mean(scores) for scores in a.values()])
    y = np.array([np.mean(scores) for scores in b.values()])
    p = None
    if all(len(scores) == 1 for scores in a.values()):
        p = mcnemar(int((x > y).sum()), int((y > x).sum()))
    return float((y - x).mean()), *paired_bootstrap(x, y, np.random.default_rng(0)), p


# ---------------------------------------------------------------------------------------------------------------------
# the rows of the tables, and their runs


def kind(decoding: dict, adapted: bool) -> tuple:
    """What tells the rows of the tables apart. Without Stage B, where its logits would go makes no difference."""
    stage_b = decoding["n_rounds"] > 0
    routes = ("B", "B", True)
    if stage_b:
        routes = (decoding["fill_from"], decoding["edit_from"], decoding["marker"])
    return adapted or stage_b, stage_b, decoding["tau_m2t"], decoding["tau_t2t"], decoding["select"], *routes


KINDS = {name: kind(plain(*variant(changes, 1)), weights == "adapter") for name, weights, changes, *_ in MECHANISM}
BASE, _, _, COCOMMIT = list(KINDS)[:4]


def fitting(runs: list[Run], task: str, row: str) -> list[Run]:
    found = []
    for run in runs:
        adapted = run.settings["adapter"] is not None
        if run.settings["task"] == task and kind(run.settings["decoding"], adapted) == KINDS[row]:
            found.append(run)
    return found


def pick(runs: list[Run], task: str, row: str, n: int | None = None) -> Run | None:
    """The run of a row, if there is one. n None: where runs of several n fit, the paper's n = 3."""
    found = fitting(runs, task, row)
    of_n = [run for run in found if run.settings["model"]["n_last"] == (n or 3)]
    if n or of_n:
        found = of_n
    if len(found) > 1:
        different = "; ".join(differences(found[0].settings, found[1].settings))
        fail(f"{len(found)} runs of {task} fit the row {row!r}; they differ in {different}: keep one in the folder")
    return found[0] if found else None


# ---------------------------------------------------------------------------------------------------------------------
# the tables

HEAD = ["", "items", "score", "95 %", "delta", "95 %, paired", "p", "NFE/token", "in all"]
HEAD += ["| paper:", "delta", "noise", "NFE/token"]
LEGEND = (
    "delta: over items in both runs, with a paired bootstrap's interval and McNemar's exact p; the paper's noise: two "
    "scores that far apart differ by chance (95 %, unpaired, from its number of items)",
    "NFE/token: full forwards, as the paper counts; in all: commit forwards and Stage B's n/L of one included",
)


@dataclass
class Row:
    label: str
    task: str
    run: Run | None
    against: Run | None  # what its delta is to
    paper: tuple[float, float] | None  # accuracy, NFE/token
    theirs: float | None  # the accuracy that the paper's delta is to


def main_table(runs: list[Run]) -> Iterator[Row]:
    """Table 1: base, CoCommit, delta."""
    for name, task in TASKS.items():
        base = pick(runs, name, BASE)
        cocommit = pick(runs, name, COCOMMIT)
        yield Row(f"{task.title} base", name, base, None, (task.base, task.nfe_base), None)
        yield Row(f"{task.title} CoCommit", name, cocommit, base, (task.cocommit, task.nfe_cocommit), task.base)


def mechanism_table(runs: list[Run]) -> Iterator[Row]:
    """Table 2: every variant against the default."""
    default = pick(runs, "gsm8k", COCOMMIT)
    for name, _, _, accuracy, nfe in MECHANISM:
        if name == COCOMMIT:
            yield Row(name, "gsm8k", default, None, (accuracy, nfe), None)
        else:
            yield Row(name, "gsm8k", pick(runs, "gsm8k", name), default, (accuracy, nfe), TASKS["gsm8k"].cocommit)


def lastn_table(runs: list[Run]) -> Iterator[Row]:
    """Table 3: every n against n = 3."""
    for name, task in TASKS.items():
        default = pick(runs, name, COCOMMIT, 3)
        papers = LASTN[name] | {3: (task.cocommit, task.nfe_cocommit)}
        found = {run.settings["model"]["n_last"] for run in fitting(runs, name, COCOMMIT)}
        for n in sorted(papers.keys() | found):
            run = pick(runs, name, COCOMMIT, n)
            if n == 3:
                yield Row(f"{task.title} n = 3", name, default, None, papers[3], None)
            else:
                yield Row(f"{task.title} n = {n}", name, run, default, papers.get(n), task.cocommit)


def cells(row: Row) -> list[str]:
    n = TASKS[row.task].n_official
    measured = ["-"] * 8
    if row.run:
        t = tally(row.run)
        measured[0] = f"{len(row.run.items)}"
        if len(row.run.items) < n:
            measured[0] += f"/{n}"
        if t.judged:
            low, high = wilson(t.right, t.judged)
            measured[1:3] = [f"{100 * t.right / t.judged:.2f}", f"{100 * low:.1f} .. {100 * high:.1f}"]
        measured[6:] = [f"{t.full:.3f}", f"{t.in_all:.3f}"]
    found = row.run and row.against and paired(row.run, row.against)
    if found:
        delta, low, high, p = found
        measured[3:5] = [f"{100 * delta:+.2f}", f"{100 * low:+.2f} .. {100 * high:+.2f}"]
        if p is not None:
            measured[5] = f"{p:.3f}"

    printed = ["| -", "-", "-", "-"]
    if row.paper:
        accuracy, nfe = row.paper
        printed = [f"| {accuracy:.2f}", "-", "-", f"{nfe:.2f}"]
        if row.theirs is not None:
            noise = 196 * difference_se(accuracy / 100, row.theirs / 100, n)
            printed[1:3] = [f"{accuracy - row.theirs:+.2f}", f"+-{noise:.2f}"]
    return [row.label, *measured, *printed]


def notes(row: Row) -> list[str]:
    """What a reader must know before trusting a row."""
    if row.run is None:
        return []
    title = TASKS[row.task].title
    said = []
    if any(record["correct"] is None for record in row.run.items.values()):
        said.append(f"{title}: items without EvalPlus's verdict do not count")
    if row.against:
        of_the_method = ("adapter", "partial_cost", "decoding", "model.n_last", "model.n_rounds")
        other = differences(row.against.settings, row.run.settings)
        other = [d for d in other if not d.startswith(of_the_method) or d.startswith("decoding.gen_length")]
        if other:
            said.append(f"{title}: the runs compared differ in more than the method: {'; '.join(other)}")
    return said


@command
def main() -> None:
    parser = Parser(__doc__)
    make = {"main": main_table, "mechanism": mechanism_table, "lastn": lastn_table}
    parser.add_argument("table", choices=make, help="the paper's Table 1, 2 or 3")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run files that released.run wrote")
    args = parser.parse_args()
    rows = list(make[args.table](read_runs(args.runs)))
    print_table(HEAD, [cells(row) for row in rows])
    said = [note for row in rows for note in notes(row)]
    print("\n".join([*dict.fromkeys(said), *LEGEND]))


if __name__ == "__main__":
    main()
