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


# what evaluate.py prints of a toy, counted from the right, but KL from the left
KL, POSSIBLE, LIKELIEST, FORWARDS = 0, -4, -3, -2
# the log of a decoder on toys, the run there, and the decoder
ALL_AT_ONCE = ("toys", "base", "all at once")
PAPER_AT_ONCE = ("toys", "base", "Stage B, all at once")
OFF_AT_GATES = ("toys", "base", "Stage B off, gates .7 and 0")
AT_GATES = ("toys", "base", "Stage B, gates .7 and 0 (paper)")
CERTIFIED = ("toys", "base", "certified")
SUREST = ("toys", "base", "one at a time, surest first")
LEFT = ("toys", "base", "one at a time, from the left")
CAUSAL = ("toys", "causal", "Stage B, whole blocks")
BEAM = ("toys", "causal", "Stage B, a beam of 4")
MASKS = ("masks", "masks", "one at a time, from the left")


def of_toys(rows: dict[str, tuple[str, str, str]], figure: int) -> Table:
    """A row for each decoder, with a figure of each toy; the mean over the seeds of its log, and over toys of
    forwards."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in {log for log, _, _ in rows.values()}:
        for part in re.split(r"^== ", (RESULTS / "theorem" / f"{name}.txt").read_text(), flags=re.M)[1:]:
            found.setdefault(name, {}).setdefault(part.split()[0], []).append(part)

    toys = list(found["toys"])
    table = [["", *(f"`{toy}`" for toy in toys)]]
    if figure == KL:
        table.append(["TC", *(re.search(r"TC = ([\d.]+)", found["toys"][toy][0])[1] for toy in toys)])
    if figure != KL:
        table[0].append("forwards")
    for title, (log, run, decoder) in rows.items():
        line = re.compile(rf"^-- {run}$.*?^{re.escape(decoder)}  +([^\n]*)$", re.M | re.S)
        cells = [[line.search(part)[1].split() for part in found[log][toy]] for toy in toys]
        means = [f"{mean(float(seed[figure]) for seed in seeds):.3f}" for seeds in cells]
        if figure != KL:
            means.append(f"{mean(float(seed[FORWARDS]) for seeds in cells for seed in seeds):.2f}")
        table.append([title, *means])
    return table


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
        "Stage A, all at once": ALL_AT_ONCE, "paper, all at once": PAPER_AT_ONCE, "causal": CAUSAL,
        "base, one at a time, surest first": SUREST, "base, one at a time, from the left": LEFT,
        "mask-only base, one at a time, from the left (three seeds)": MASKS,
    }, KL),
    "possible": lambda: of_toys({
        "Stage A, all at once": ALL_AT_ONCE, "paper, all at once": PAPER_AT_ONCE,
        "Stage B off, at the paper's gates": OFF_AT_GATES, "paper, at its gates": AT_GATES, "causal": CAUSAL,
    }, POSSIBLE),
    "likeliest": lambda: of_toys({
        "Stage A, all at once": ALL_AT_ONCE, "paper, all at once": PAPER_AT_ONCE,
        "Stage B off, at the paper's gates": OFF_AT_GATES, "paper, at its gates": AT_GATES, "certified": CERTIFIED,
        "causal": CAUSAL, "causal, a beam of 4": BEAM, "base, one at a time, from the left": LEFT,
        "mask-only base, one at a time, from the left (three seeds)": MASKS,
    }, LIKELIEST),
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
