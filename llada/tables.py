"""Run files read: the paper's three tables, beside the paper's figures.

A delta without its noise says little, so each stands with the 95 % interval of a paired bootstrap over the items that
both runs have, and the paper's with what its own number of items can tell apart. A run's settings say which row it is.
HumanEval+ and MBPP+ count once EvalPlus's verdicts lie beside the run file.

    python -m llada.tables main --runs runs/            # Table 1, n = 3: base, CoCommit, delta, forwards per token
    python -m llada.tables mechanism --runs runs/       # Table 2, n = 3: GSM8K, what each part of the method adds
    python -m llada.tables lastn --runs runs/           # Table 3: n = 3, 6, 9
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cache import in_full
from lib.util import Parser, command, entry, fail, print_table, read_json, reading
from llada.ablation import BASE, COCOMMIT, MECHANISM
from llada.benchmarks import TASKS

# Shares are 0..1 in run files and percent in tables.

# the paper's Tables 1 and 3: accuracy, and full forwards per token, of the plain sampler and of joint commitment at n
PAPER = {
    "gsm8k": {"base": (89.61, 0.26), 3: (91.13, 0.34), 6: (90.75, 0.30), 9: (90.83, 0.30)},
    "cmath": {"base": (92.26, 0.32), 3: (91.99, 0.45), 6: (93.08, 0.44), 9: (92.17, 0.40)},
    "gpqa": {"base": (43.94, 0.41), 3: (46.97, 0.35), 6: (42.93, 0.36), 9: (39.39, 0.35)},
    "drop": {"base": (84.14, 0.33), 3: (83.93, 0.29), 6: (82.80, 0.32), 9: (84.32, 0.35)},
    "piqa": {"base": (80.90, 0.76), 3: (84.60, 0.44), 6: (83.68, 0.47), 9: (84.77, 0.38)},
    "humaneval": {"base": (76.83, 0.14), 3: (82.32, 0.16), 6: (80.49, 0.14), 9: (79.88, 0.14)},
    "mbpp": {"base": (68.78, 0.18), 3: (70.11, 0.18), 6: (68.78, 0.18), 9: (72.22, 0.18)},
}


# --- run files
RECORD = ("prompt", "correct", "tokens", "nfe")  # what the tables read of an answer, beside its id


@dataclass
class Run:
    settings: dict
    items: dict[str, dict]  # by id


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def differences(a: dict, b: dict) -> str:
    """In words: "tau_m2t (0.7, 0.5); dtype (fp32, bf16)"."""
    return "; ".join(f"{key} ({a.get(key)}, {b.get(key)})" for key in a | b if a.get(key) != b.get(key))


def read_run(path: Path) -> tuple[Run | None, int]:
    """A run file, and how many bytes its whole lines have: a line cut short at the end does not count. None where not
    even the first line is whole."""
    with reading(path, "run file"):
        data = path.read_bytes()
        start = b'{"settings": '
        if not start.startswith(data[: len(start)]):
            fail(f"{path} is no run file: choose another --out, or take it out of the folder")
        whole = data.rfind(b"\n") + 1
        lines = [json.loads(line) for line in data[:whole].splitlines()]
        items = {record["id"]: record for record in lines[1:]}
        lacking = {name for record in items.values() for name in RECORD if name not in record}
        if lacking:
            raise ValueError(f"records without {', '.join(sorted(lacking))}")
    if not lines:
        return None, 0

    settings = entry(lines[0], "settings", dict, path)
    if settings.get("task") not in TASKS:
        fail(f"{path} is a run of {settings.get('task')!r}, and there are {', '.join(TASKS)}")
    return Run(settings, items), whole


def read_runs(folder: Path) -> list[Run]:
    """Every run under a folder: files of the same settings are one run, and code has EvalPlus's verdicts."""
    runs: dict[str, Run] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        if path.parent.suffix == ".evalplus":
            continue
        run, _ = read_run(path)
        if run:
            judge(path, run)
            runs.setdefault(digest(run.settings), Run(run.settings, {})).items.update(run.items)
    if not runs:
        fail(f"--runs {folder} holds no run file: `python -m llada.run` makes them")
    return list(runs.values())


def judge(path: Path, run: Run) -> None:
    """Take over EvalPlus 0.3.1's verdicts, each only for the very program that it was given."""
    result = path.with_suffix(".evalplus") / "samples_eval_results.json"
    if TASKS[run.settings["task"]].right or not result.exists():
        return
    verdicts = entry(read_json(result, "EvalPlus result"), "eval", dict, result)
    with reading(result, "result of EvalPlus 0.3.1"):
        for name, (sample, *_) in verdicts.items():
            if name in run.items and sample["solution"] == (run.items[name].get("extracted") or ""):
                run.items[name]["correct"] = sample["base_status"] == sample["plus_status"] == "pass"


# --- statistics
def wilson(k: int, n: int) -> tuple[float, float]:
    """95 % interval (Wilson's) of a share of which k of n were seen."""
    z2 = 1.959963984540054**2
    middle = (k + z2 / 2) / (n + z2)
    spread = math.sqrt(z2 * k * (n - k) / n + z2 * z2 / 4) / (n + z2)
    return middle - spread, middle + spread


def paired(run: Run, reference: Run) -> tuple[float, float, float] | None:
    """(delta, its 95 % interval) in shares over the items of both; None where there are none."""
    gained = []
    for name, mine in run.items.items():
        other = reference.items.get(name)
        if other and mine["prompt"] == other["prompt"] and None not in (mine["correct"], other["correct"]):
            gained.append(mine["correct"] - other["correct"])
    if not gained:
        return None
    return np.mean(gained), *bootstrap(np.array(gained), np.random.default_rng(0))


def bootstrap(x: np.ndarray, rng: np.random.Generator, n: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of the mean of x, by drawing as many of its values again."""
    values, counts = np.unique(x, return_counts=True)
    times = rng.multinomial(len(x), counts / len(x), n)  # how often each value is drawn
    return tuple(np.quantile(times @ values / len(x), (0.025, 0.975)))


# --- the rows of the tables
@dataclass
class Row:
    label: str
    task: str
    name: str  # in Table 2
    paper: tuple[float, float]  # accuracy, NFE/token
    n: int | None = 3  # layers that Stage B runs again; None: any, of a base
    against: "Row | None" = None  # what its delta is to


def main_table() -> list[Row]:
    """Table 1: CoCommit against the base."""
    rows = []
    for task, figures in PAPER.items():
        base = Row(f"{TASKS[task].title} base", task, BASE, figures["base"], None)
        rows += [base, Row(f"{TASKS[task].title} CoCommit", task, COCOMMIT, figures[3], 3, base)]
    return rows


def mechanism_table() -> list[Row]:
    """Table 2: every variant against the default."""
    rows = {}
    for name, (weights, _, _, *figures) in MECHANISM.items():
        rows[name] = Row(name, "gsm8k", name, tuple(figures), None if weights == "base" else 3)
    for name in rows.keys() - {COCOMMIT}:
        rows[name].against = rows[COCOMMIT]
    return list(rows.values())


def lastn_table() -> list[Row]:
    """Table 3: every n against n = 3."""
    rows = []
    for task, figures in PAPER.items():
        default, *others = [Row(f"{TASKS[task].title} n = {n}", task, COCOMMIT, figures[n], n) for n in (3, 6, 9)]
        for row in others:
            row.against = default
        rows += [default, *others]
    return rows


def pick(runs: list[Run], row: Row) -> Run | None:
    """The run of a row, if there is one."""
    wanted = (row.task, row.name)
    found = [run for run in runs if (run.settings["task"], run.settings["row"]) == wanted]
    found = [run for run in found if row.n in (None, run.settings["n_last"])]
    if len(found) > 1:
        different = differences(found[0].settings, found[1].settings)
        fail(f"{len(found)} runs are the row {row.label!r}; they differ in {different}: keep one in the folder")
    return found[0] if found else None


# --- their cells
HEAD = ["", "items", "score", "95 %", "delta", "95 %, paired", "NFE/token", "in all"]
HEAD += ["| paper:", "delta", "noise", "NFE/token"]
LEGEND = (
    "delta: over items in both runs, with a paired bootstrap's interval; the paper's noise: two scores that far apart "
    "differ by chance (95 %, unpaired, from its number of items)\n"
    "NFE/token: full forwards, as the paper counts; in all: refreshes and Stage B's n/L of one included"
)


def measured(run: Run | None, reference: Run | None) -> list[str]:
    cells = ["-"] * 7
    if run is None:
        return cells
    records = run.items.values()
    n = TASKS[run.settings["task"]].n_official
    cells[0] = f"{len(records)}"
    if len(records) < n:
        cells[0] += f"/{n}"

    # the score, and what it gains on the reference
    judged = [record["correct"] for record in records if record["correct"] is not None]
    if judged:
        low, high = wilson(sum(judged), len(judged))
        cells[1:3] = [f"{100 * sum(judged) / len(judged):.2f}", f"{100 * low:.1f} .. {100 * high:.1f}"]
    found = reference and paired(run, reference)
    if found:
        delta, low, high = found
        cells[3:5] = [f"{100 * delta:+.2f}", f"{100 * low:+.2f} .. {100 * high:+.2f}"]

    # forwards per token
    tokens = max(1, sum(record["tokens"] for record in records))
    nfe = {k: sum(record["nfe"][k] for record in records) / tokens for k in ("full", "partial", "refresh")}
    cells[5:] = [f"{nfe['full']:.3f}", f"{in_full(nfe, run.settings['partial_cost']):.3f}"]
    return cells


def printed(row: Row) -> list[str]:
    """The paper's cells."""
    accuracy, nfe = row.paper
    delta = noise = "-"
    if row.against:
        other = row.against.paper[0]
        delta = f"{accuracy - other:+.2f}"
        # 1.96 standard errors of a difference of two shares, unpaired
        variance = accuracy * (100 - accuracy) + other * (100 - other)
        noise = f"+-{1.96 * math.sqrt(variance / TASKS[row.task].n_official):.2f}"
    return [f"| {accuracy:.2f}", delta, noise, f"{nfe:.2f}"]


def notes(run: Run, reference: Run | None) -> list[str]:
    """What a reader must know before trusting a row."""
    title = TASKS[run.settings["task"]].title
    said = []
    if any(record["correct"] is None for record in run.items.values()):
        said.append(f"{title}: items without EvalPlus's verdict do not count")
    # what a method leaves alone
    alike = ("questions", "weights", "int8", "gen_length", "dtype")
    theirs, ours = ({key: of.settings.get(key) for key in alike} for of in (reference or run, run))
    if theirs != ours:
        said.append(f"{title}: the runs compared differ in more than the method: {differences(theirs, ours)}")
    return said


@command
def main() -> None:
    parser = Parser(__doc__)
    tables = {"main": main_table, "mechanism": mechanism_table, "lastn": lastn_table}
    parser.add_argument("table", choices=tables, help="the paper's Table 1, 2 or 3")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run files that llada.run wrote")
    args = parser.parse_args()

    runs = read_runs(args.runs)
    cells = []
    said = []
    for row in tables[args.table]():
        run = pick(runs, row)
        reference = row.against and pick(runs, row.against)
        cells.append([row.label, *measured(run, reference), *printed(row)])
        if run:
            said += notes(run, reference)
    print_table(HEAD, cells)
    print("\n".join([*dict.fromkeys(said), LEGEND]))


if __name__ == "__main__":
    main()
