"""The paper's three tables from what lm-eval logs of our runs, beside the paper's own figures.

Beside each of our differences is the 95 % interval of a paired bootstrap over the items of both runs. HumanEval+ and
MBPP+ count when EvalPlus has judged them.

    python -m released.tables main --runs runs/            # Table 1, n = 3: base, CoCommit, delta, forwards per token
    python -m released.tables mechanism --runs runs/       # Table 2, n = 3: GSM8K, what each part of the method adds
    python -m released.tables gates --runs runs/           # the text below Table 2, n = 3: edits without a gate
    python -m released.tables lastn --runs runs/           # Table 3: n = 3, 6, 9, and their averages
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decoding import in_full
from lib.util import WALK, Parser, checked_entry, command, fail, print_table, read_json, read_lines, reading
from released.ablation import BASE, COCOMMIT, GATED, MECHANISM

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

# the paper's Tables 1 and 3: accuracy and full forwards per token, of the base and of CoCommit with each n; and by its
# text, what ungated edits gain over gated ones at n = 3
PAPER = {
    "gsm8k": {"base": (89.61, 0.26), 3: (91.13, 0.34), 6: (90.75, 0.30), 9: (90.83, 0.30), "ungated": 0.00},
    "cmath": {"base": (92.26, 0.32), 3: (91.99, 0.45), 6: (93.08, 0.44), 9: (92.17, 0.40), "ungated": -0.45},
    "gpqa": {"base": (43.94, 0.41), 3: (46.97, 0.35), 6: (42.93, 0.36), 9: (39.39, 0.35), "ungated": 1.52},
    "drop": {"base": (84.14, 0.33), 3: (83.93, 0.29), 6: (82.80, 0.32), 9: (84.32, 0.35), "ungated": 0.44},
    "piqa": {"base": (80.90, 0.76), 3: (84.60, 0.44), 6: (83.68, 0.47), 9: (84.77, 0.38), "ungated": 0.11},
    "humaneval": {"base": (76.83, 0.14), 3: (82.32, 0.16), 6: (80.49, 0.14), 9: (79.88, 0.14), "ungated": 0.61},
    "mbpp": {"base": (68.78, 0.18), 3: (70.11, 0.18), 6: (68.78, 0.18), 9: (72.22, 0.18), "ungated": 1.06},
}


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
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()[:16]


def read_runs(folder: Path) -> list[Run]:
    """Every run under a folder."""
    runs = []
    for place in sorted(folder.rglob("settings.json")):
        for task, (_, _, judged) in TASKS.items():
            kinds = {"doc_id": int, "prompt_hash": str, "tokens": int}
            kinds |= dict.fromkeys(["full", "partial", "refresh", *["exact_match"] * judged], float)

            # a call of lm-eval has a file of its own, with the date in its name; a question asked twice counts once
            items = {}
            for path in sorted(place.parent.glob(f"samples_{task}_*.jsonl")):
                items |= {sample["doc_id"]: sample for sample in read_lines(path, kinds, "file of samples")}
            if items:
                settings = read_json(place, "settings of a run")
                for name, kind in {"row": str, "n_last": int, "partial_cost": float}.items():
                    checked_entry(settings, name, kind, place)
                runs.append(Run(task, settings, place.parent, items))
                judge(runs[-1])
    if not runs:
        fail(f"--runs {folder} holds no samples_*.jsonl: `python -m released.harness` makes them")
    return runs


def judge(run: Run) -> None:
    """Add the verdicts: lm-eval's, or those of EvalPlus 0.3.1, if it has given them."""
    if TASKS[run.task].judged:
        for item in run.items.values():
            item["correct"] = bool(item["exact_match"])
        return

    with reading(run.folder, "samples of programs in", WALK):
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
    """The difference of two runs and the 95 % interval of a paired bootstrap, as shares of the questions that both
    have; None if there are none."""
    gained = []
    for number, mine in run.items.items():
        other = reference.items.get(number, {})
        if mine["prompt_hash"] == other.get("prompt_hash") and "correct" in mine and "correct" in other:
            gained.append(mine["correct"] - other["correct"])
    if not gained:
        return None

    # the percentiles of the means of 10,000 draws, each of as many values as there are; times: how often each is drawn
    n = len(gained)
    values, counts = np.unique(gained, return_counts=True)
    times = np.random.default_rng(0).multinomial(n, counts / n, 10_000)
    low, high = np.quantile(times @ values / n, (0.025, 0.975))
    return np.mean(gained), low, high


# --- the rows of the tables
class Row(NamedTuple):
    label: str
    task: str
    name: str  # the row's name in Table 2
    n: int | None  # n_last of the run; None: any, for a base
    accuracy: float  # the paper's, and its NFE/token
    nfe: float | None = None


def groups(table: str) -> list[list[Row]]:
    """The rows of a table; the others of a group are compared with its first."""
    if table == "mechanism":
        rows = []
        for name, (weights, _, _, *figures) in MECHANISM.items():
            rows.append(Row(name, "gsm8k", name, None if weights == "base" else 3, *figures))
        return [sorted(rows, key=lambda row: row.name != COCOMMIT)]

    found = []
    for task, figures in PAPER.items():
        title = TASKS[task].title
        if table == "main":
            base = Row(f"{title} base", task, BASE, None, *figures["base"])
            found.append([base, Row(f"{title} CoCommit", task, COCOMMIT, 3, *figures[3])])
        elif table == "gates":
            gated = Row(f"{title} gated", task, GATED, 3, round(figures[3][0] - figures["ungated"], 2))
            found.append([gated, Row(f"{title} ungated", task, COCOMMIT, 3, *figures[3])])
        else:
            found.append([Row(f"{title} n = {n}", task, COCOMMIT, n, *figures[n]) for n in (3, 6, 9)])
    return found


def pick(runs: list[Run], row: Row) -> Run | None:
    """The run of a row, if there is one."""
    found = [run for run in runs if (run.task, run.settings["row"]) == (row.task, row.name)]
    found = [run for run in found if row.n in (None, run.settings["n_last"])]
    if len(found) > 1:
        fail(f"{found[0].folder} and {found[1].folder} are both the row {row.label!r}: keep one of them in --runs")
    return found[0] if found else None


# --- their cells
HEAD = ["", "items", "score", "delta", "95 %, paired", "NFE/token", "in all", "| paper:", "delta", "NFE/token"]


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
    if tokens > 0:
        nfe = {kind: sum(item[kind] for item in items) / tokens for kind in ("full", "partial", "refresh")}
        cells[4:] = [f"{nfe['full']:.3f}", f"{in_full(nfe, run.settings['partial_cost']):.3f}"]
    return cells


def average_cells(runs: list[Run], rows: tuple[Row, ...]) -> list[str]:
    """A last line of Table 3 for one n: the average of the seven scores; ours is there when all seven are."""
    scores = [score_of(run) for run in (pick(runs, row) for row in rows) if run]
    score = "-" if len(scores) < len(rows) or None in scores else f"{np.mean(scores):.2f}"
    paper = np.mean([row.accuracy for row in rows])
    return [f"average, n = {rows[0].n}", "-", score, *"----", f"| {paper:.2f}", "-", "-"]


@command
def main() -> None:
    parser = Parser(__doc__)
    tables = ["main", "mechanism", "gates", "lastn"]
    parser.add_argument("table", choices=tables, help="the paper's Table 1, 2, the text below it, or Table 3")
    parser.add_argument("--runs", type=Path, required=True, help="a folder with what released.harness logs")
    args = parser.parse_args()

    runs = read_runs(args.runs)
    cells = []
    for group in groups(args.table):
        first = group[0]
        for row in group:
            ours = measured(pick(runs, row), None if row is first else pick(runs, first))
            delta = "-" if row is first else f"{row.accuracy - first.accuracy:+.2f}"
            nfe = "-" if row.nfe is None else f"{row.nfe:.2f}"
            cells.append([row.label, *ours, f"| {row.accuracy:.2f}", delta, nfe])
    if args.table == "lastn":
        cells += [average_cells(runs, rows) for rows in zip(*groups("lastn"), strict=True)]
    print_table(HEAD, cells)
    print("delta: over items in both runs, with a paired bootstrap's interval")
    print("NFE/token: full forwards, as the paper counts; in all: with refreshes, and a pass of Stage B as n/L of one")


if __name__ == "__main__":
    main()
