"""Write the tables of the results pages from the records beside them.

On a page a table stands between two marks:

    <!-- table NAME -->
    ...
    <!-- end -->

All pages are written again:

    python -m tools.tables
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from lib.util import Parser, command, fail

RESULTS = Path(__file__).parents[1] / "results"
Table = list[list[str]]  # the titles, then the rows


def of_records(name: str, columns: dict[str, tuple[str, int]], seeds: str = "") -> Table:
    """A row for each system and row of the records, in their order, with the means over seeds of these figures (title:
    key, digits). seeds: the figure whose seeds are shown, too, behind its mean."""
    found: dict[str, list[dict]] = {}
    for line in (RESULTS / name).read_text().splitlines():
        record = json.loads(line)
        found.setdefault(f"{record['system']}: {record['row']}", []).append(record)

    titles = ["", *columns]
    if seeds:
        titles.insert(2, "seeds " + ", ".join(str(r["seed"]) for r in next(iter(found.values()))))
    rows = [titles]
    for row, of_row in found.items():
        cells = [row]
        for key, digits in columns.values():
            values = [r[key] for r in of_row if key in r]
            cells.append(f"{mean(values):.{digits}f}" if values else "")
            if key == seeds:
                cells.append(" ".join(f"{value:.{digits}f}" for value in values))
        rows.append(cells)
    return rows


# what evaluate.py prints of a toy, from the left for a decoder with a KL; counted from the right for all
KL, POSSIBLE, LIKELIEST, FORWARDS = 0, -4, -3, -2
# a run of experiments/toys.sh, and one of its decoders
STAGE_A = ("base", "Stage A, one step")
STAGE_B = ("base", "Stage B, one step")
GATES = ("base", "released gates (0.7, 0.5)")
CAUSAL = ("causal", "causal Stage B, one step")
SUREST = ("base", "one at a time")
LEFT = ("masks", "one at a time, from the left")


def of_toys(columns: dict[str, tuple[tuple[str, str], int]]) -> Table:
    """A row for each toy, with the means over seeds of these figures (title: run and decoder, figure)."""
    found: dict[str, list[str]] = {}
    log = (RESULTS / "theorem" / "toys.txt").read_text()
    for part in re.split(r"^== ", log, flags=re.M)[1:]:
        found.setdefault(part.split()[0], []).append(part)

    rows = [["toy", "TC", *columns]]
    for toy, seeds in found.items():
        cells = [f"`{toy}`", re.search(r"TC = ([\d.]+)", seeds[0])[1]]
        for (run, decoder), figure in columns.values():
            line = re.compile(rf"^-- {run}$.*?^{re.escape(decoder)}  +([^\n]*)$", re.M | re.S)
            values = [float(line.search(part)[1].split()[figure]) for part in seeds]
            cells.append(f"{mean(values):.{2 if figure == FORWARDS else 3}f}")
        rows.append(cells)
    return rows


def table_2() -> Table:
    """The paper's Table 2 on three models of names: what llada.ablation has printed of each."""
    found: dict[str, list[tuple[float, float]]] = {}
    for base in (1, 2, 3):
        log = (RESULTS / "names" / f"table2-{base}.txt").read_text()
        for row, exist, forwards in re.findall(r"^(\S.*?)  +(0\.\d+) +(\d+\.\d+) ", log, re.M):
            found.setdefault(row, []).append((float(exist), float(forwards)))
    rows = [["row of Table 2", "exist", "bases 1, 2, 3", "forwards a name"]]
    for row, bases in found.items():
        exist, forwards = zip(*bases, strict=True)
        rows.append([row, f"{mean(exist):.3f}", " ".join(f"{x:.3f}" for x in exist), f"{mean(forwards):.2f}"])
    return rows


TIMES = {"forwards a byte": ("forwards", 2), "ms a byte: 1 text": ("ms_1", 1), "16 texts": ("ms_16", 1)}
TABLES: dict[str, Callable[[], Table]] = {
    "bits": lambda: of_records("text/bits.jsonl", {"bits a byte": ("bits", 3)}, "bits"),
    "draws": lambda: of_records("text/draws.jsonl", TIMES),
    "names": lambda: of_records(
        "names/names.jsonl", {"exist": ("exist", 3), "forwards a name": ("forwards", 1)}, "exist"
    ),
    "Table 2": table_2,
    "KL": lambda: of_toys({
        "Stage A, all at once": (STAGE_A, KL), "paper, all at once": (STAGE_B, KL), "causal": (CAUSAL, KL),
        "one at a time: base, surest first": (SUREST, KL), "mask-only base, from the left": (LEFT, KL),
    }),
    "greedy": lambda: of_toys({
        "possible: Stage A, all at once": (STAGE_A, POSSIBLE), "paper, all at once": (STAGE_B, POSSIBLE),
        "Stage A at the gates": (GATES, POSSIBLE), "causal": (CAUSAL, POSSIBLE),
        "one at a time": (LEFT, POSSIBLE),
        "likeliest: Stage A, all at once": (STAGE_A, LIKELIEST), "paper, all at once ": (STAGE_B, LIKELIEST),
        "Stage A at the gates ": (GATES, LIKELIEST), "causal ": (CAUSAL, LIKELIEST),
        "one at a time ": (LEFT, LIKELIEST),
        "forwards: Stage A at the gates": (GATES, FORWARDS), "causal  ": (CAUSAL, FORWARDS),
    }),
}  # fmt: skip


def written(page: str) -> str:
    """A page's text with its tables written again."""

    def write(found: re.Match) -> str:
        name = found[1]
        if name not in TABLES:
            fail(f"there is no table {name}: the tables are {', '.join(TABLES)}")
        titles, *rows = TABLES[name]()
        lines = [titles, ["---"] * len(titles), *rows]
        table = "\n".join("|" + "|".join(cell.strip() for cell in line) + "|" for line in lines)
        return f"<!-- table {name} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table (.*?) -->\n.*?<!-- end -->", write, page, flags=re.S)


@command
def main() -> None:
    Parser(__doc__).parse_args()
    for path in sorted(RESULTS.glob("*/README.md")):
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
