"""The paper's three tables from what lm-eval logs of our runs, beside the paper's own figures.

Beside each of our differences is the 95 % interval of a paired bootstrap over the items of both runs. HumanEval+ and
MBPP+ count when EvalPlus has judged them.

    python -m llada.tables main --runs runs/            # Table 1, n = 3: base, CoCommit, delta, forwards per token
    python -m llada.tables mechanism --runs runs/       # Table 2, n = 3: GSM8K, what each part of the method adds
    python -m llada.tables gates --runs runs/           # the text below Table 2, n = 3: edits without a gate
    python -m llada.tables lastn --runs runs/           # Table 3: n = 3, 6, 9, and their averages
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decoding import in_full
from lib.util import WALK, Parser, command, fail, print_table, read_json, read_lines, reading
from llada.ablation import BASE, COCOMMIT, GATED, MECHANISM

# Shares are 0..1 in files, and in percent in tables.


class Task(NamedTuple):
    title: str
    n_official: int
    judged: bool = True  # by lm-eval; programs are judged by EvalPlus


TASKS = {
    "gsm8k": Task("GSM8K", 1319),
    "cmath": Task("CMATH", 1098),
    "gpqa": Task("GPQA-Diamond", 198),
    "drop": Task("DROP", 9536),
    "piqa": Task("PIQA", 1838),
    "humaneval": Task("HumanEval+", 164, judged=False),
    "mbpp": Task("MBPP+", 378, judged=False),
}

# the paper's Tables 1 and 3: accuracy and full forwards per token, of the base and of CoCommit with each n
PAPER = {
    "gsm8k": {"base": (89.61, 0.26), 3: (91.13, 0.34), 6: (90.75, 0.30), 9: (90.83, 0.30)},
    "cmath": {"base": (92.26, 0.32), 3: (91.99, 0.45), 6: (93.08, 0.44), 9: (92.17, 0.40)},
    "gpqa": {"base": (43.94, 0.41), 3: (46.97, 0.35), 6: (42.93, 0.36), 9: (39.39, 0.35)},
    "drop": {"base": (84.14, 0.33), 3: (83.93, 0.29), 6: (82.80, 0.32), 9: (84.32, 0.35)},
    "piqa": {"base": (80.90, 0.76), 3: (84.60, 0.44), 6: (83.68, 0.47), 9: (84.77, 0.38)},
    "humaneval": {"base": (76.83, 0.14), 3: (82.32, 0.16), 6: (80.49, 0.14), 9: (79.88, 0.14)},
    "mbpp": {"base": (68.78, 0.18), 3: (70.11, 0.18), 6: (68.78, 0.18), 9: (72.22, 0.18)},
}

# what ungated edits gain over gated ones at n = 3, by the paper's text
UNGATED_ADDS = {
    "gsm8k": 0.00, "cmath": -0.45, "gpqa": 1.52, "drop": 0.44, "piqa": 0.11, "humaneval": 0.61, "mbpp": 1.06
}  # fmt: skip


# --- what lm-eval has logged
@dataclass
class Run:
    """The answers of one model to one task. items: number of a question -> what lm-eval has logged of it, and
    `correct`, unless EvalPlus still has to judge it."""

    task: str
    settings: dict
    folder: Path
    items: dict[int, dict]

    def programs(self) -> dict[str, str]:
        return {item["doc"]["task_id"]: item["filtered_resps"][0] for item in self.items.values()}

    def programs_folder(self) -> Path:
        """Where EvalPlus judges these very programs."""
        return self.folder / f"evalplus_{self.task}_{digest(self.programs())}"


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def read_runs(folder: Path) -> list[Run]:
    """Every run under a folder."""
    runs = []
    for place in sorted(folder.rglob("settings.json")):
        for task in TASKS:
            run = Run(task, read_json(place, "settings of a run"), place.parent, {})
            # a call of lm-eval has a file of its own, with the date in its name; a question asked twice counts once
            for path in sorted(run.folder.glob(f"samples_{task}_*.jsonl")):
                run.items |= read_samples(path, task)
            if run.items:
                judge(run)
                runs.append(run)
    if not runs:
        fail(f"--runs {folder} holds no samples_*.jsonl: `python -m llada.harness` makes them")
    return runs


def read_samples(path: Path, task: str) -> dict[int, dict]:
    kinds = {"doc_id": int, "prompt_hash": str, "tokens": int, "full": float, "partial": float, "refresh": float}
    if TASKS[task].judged:
        kinds["exact_match"] = float
    return {sample["doc_id"]: sample for sample in read_lines(path, kinds, "file of samples")}


def judge(run: Run) -> None:
    """Add the verdicts: lm-eval's, or those of EvalPlus 0.3.1, if it has given them."""
    if TASKS[run.task].judged:
        for item in run.items.values():
            item["correct"] = bool(item["exact_match"])
        return

    path = run.programs_folder() / "samples-sanitized_eval_results.json"
    if not path.exists():
        return
    result = read_json(path, "result of EvalPlus")
    with reading(path, "result of EvalPlus 0.3.1", WALK):
        for item in run.items.values():
            verdict = result["eval"][item["doc"]["task_id"]][0]
            item["correct"] = verdict["base_status"] == verdict["plus_status"] == "pass"


# --- statistics
def paired(run: Run, reference: Run) -> tuple[float, float, float] | None:
    """The difference of two runs and its 95 % interval, as shares of the questions that both have; None if there is
    no such question."""
    gained = []
    for number, mine in run.items.items():
        other = reference.items.get(number, {})
        if mine["prompt_hash"] == other.get("prompt_hash") and "correct" in mine and "correct" in other:
            gained.append(mine["correct"] - other["correct"])
    if not gained:
        return None
    return np.mean(gained), *bootstrap(np.array(gained), np.random.default_rng(0))


def bootstrap(x: np.ndarray, rng: np.random.Generator, n: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the mean of x: the percentiles of the means of n draws, each of as many values of x."""
    values, counts = np.unique(x, return_counts=True)
    times = rng.multinomial(len(x), counts / len(x), n)  # how often each value is drawn
    return tuple(np.quantile(times @ values / len(x), (0.025, 0.975)))


# --- the rows of the tables
@dataclass
class Row:
    label: str
    task: str
    name: str  # the row's name in Table 2
    paper: tuple[float, float | None]  # the paper's accuracy and NFE/token
    n: int | None = 3  # n_last of the run; None: any, for a base
    against: "Row | None" = None  # the row that it is compared with


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


def gates_table() -> list[Row]:
    """The paper's text on edits: with Stage B, edits without a gate against edits with one."""
    rows = []
    for task, added in UNGATED_ADDS.items():
        ungated = PAPER[task][3]
        title = TASKS[task].title
        gated = Row(f"{title} gated", task, GATED, (round(ungated[0] - added, 2), None))
        rows += [gated, Row(f"{title} ungated", task, COCOMMIT, ungated, against=gated)]
    return rows


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
    found = [run for run in runs if (run.task, run.settings["row"]) == (row.task, row.name)]
    found = [run for run in found if row.n in (None, run.settings["n_last"])]
    if len(found) > 1:
        fail(f"{found[0].folder} and {found[1].folder} are both the row {row.label!r}: keep one of them in --runs")
    return found[0] if found else None


# --- their cells
HEAD = ["", "items", "score", "delta", "95 %, paired", "NFE/token", "in all", "| paper:", "delta", "NFE/token"]
FOOTNOTE = (
    "delta: over items in both runs, with a paired bootstrap's interval\n"
    "NFE/token: full forwards, as the paper counts; in all: with refreshes, and a pass of Stage B as n/L of one"
)


def score_of(run: Run) -> float | None:
    """The share of right answers, in percent; None if EvalPlus has not judged them."""
    judged = [item["correct"] for item in run.items.values() if "correct" in item]
    return 100 * sum(judged) / len(judged) if judged else None


def measured(run: Run | None, reference: Run | None) -> list[str]:
    """Our cells."""
    cells = ["-"] * 6
    if run is None:
        return cells
    items = run.items.values()
    cells[0] = f"{len(items)}/{TASKS[run.task].n_official}"

    # the score, and its difference from the reference
    score = score_of(run)
    if score is not None:
        cells[1] = f"{score:.2f}"
    found = reference and paired(run, reference)
    if found:
        delta, low, high = found
        cells[2] = f"{100 * delta:+.2f}"
        cells[3] = f"{100 * low:+.2f} .. {100 * high:+.2f}"

    # forwards per token
    tokens = sum(item["tokens"] for item in items)
    nfe = {kind: sum(item[kind] for item in items) / tokens for kind in ("full", "partial", "refresh")}
    cells[4:] = [f"{nfe['full']:.3f}", f"{in_full(nfe, run.settings['partial_cost']):.3f}"]
    return cells


def printed(row: Row) -> list[str]:
    """The paper's cells."""
    accuracy, nfe = row.paper
    delta = f"{accuracy - row.against.paper[0]:+.2f}" if row.against else "-"
    return [f"| {accuracy:.2f}", delta, "-" if nfe is None else f"{nfe:.2f}"]


def average_cells(runs: list[Run], n: int) -> list[str]:
    """A last line of Table 3 for this n: the average of the seven scores; ours is there when all seven are."""
    found = [pick(runs, row) for row in lastn_table() if row.n == n]
    scores = [score_of(run) for run in found if run]
    score = "-" if len(scores) < len(PAPER) or None in scores else f"{np.mean(scores):.2f}"
    paper = np.mean([figures[n][0] for figures in PAPER.values()])
    return [f"average, n = {n}", "-", score, *"----", f"| {paper:.2f}", "-", "-"]


@command
def main() -> None:
    parser = Parser(__doc__)
    tables = {"main": main_table, "mechanism": mechanism_table, "gates": gates_table, "lastn": lastn_table}
    parser.add_argument("table", choices=tables, help="the paper's Table 1, 2, the text below it, or Table 3")
    parser.add_argument("--runs", type=Path, required=True, help="a folder with what llada.harness logs")
    args = parser.parse_args()

    runs = read_runs(args.runs)
    cells = []
    for row in tables[args.table]():
        reference = row.against and pick(runs, row.against)
        cells.append([row.label, *measured(pick(runs, row), reference), *printed(row)])
    if args.table == "lastn":
        cells += [average_cells(runs, n) for n in (3, 6, 9)]
    print_table(HEAD, cells)
    print(FOOTNOTE)


if __name__ == "__main__":
    main()
