"""Write the tables of the results pages from the records beside them.

On a page a table stands between <!-- table NAME --> and <!-- end -->.

    python -m tools.tables      # writes all pages again
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from lib.util import Parser, command

RESULTS = Path(__file__).parents[1] / "results"
Table = list[list[str]]  # the titles, then the rows


def of_records(name: str, columns: dict[str, tuple[str, int]], seeds: str = "") -> Table:
    """A row for each system and row of the records, in their order, with the means over seeds of these figures (title:
    key, digits). seeds: the figure whose seeds are shown, too, behind its mean."""
    found: dict[str, list[dict]] = {}
    for line in (RESULTS / name).read_text().splitlines():
        record = json.loads(line)
        # a left-to-right model has one way alone
        left = record["system"].startswith("left-to-right")
        label = record["system"] if left else f"{record['system']}: {record['row']}"
        found.setdefault(label, []).append(record)

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
                cells.append(" ".join(f"{value:.{digits}f}" for value in values if len(values) > 1))
        rows.append(cells)
    return rows


# a row of the toys' tables -> the run in their logs, the decoder, and the tables that show it
TOYS = {
    "Stage A, all at once": ("base", "all at once", "KL"),
    "paper, all at once": ("base", "Stage B, all at once", "KL"),
    "Stage B off, gates": ("base", "Stage B off, gates .7 and 0", "likeliest"),
    "paper, gates": ("base", "Stage B, gates .7 and 0 (paper)", "likeliest"),
    "causal": ("causal", "Stage B, whole blocks", "KL likeliest"),
    "causal, a beam of 4": ("causal", "Stage B, a beam of 4", "likeliest"),
    "base, from the left": ("base", "one at a time, from the left", "KL likeliest"),
    "mask-only base, from the left": ("masks", "one at a time, from the left", "KL likeliest"),
}
# what evaluate.py prints of a decoder, counted from the right; some have no KL
FIGURES = {"KL": 0, "likeliest": -3}


def of_toys(figure: str) -> Table:
    """A row for each decoder, with a figure of each toy, the mean over seeds."""
    logs = "".join((RESULTS / "theorem" / f"{name}.txt").read_text() for name in ("toys", "masks"))
    found: dict[str, str] = {}
    for part in re.split(r"^== ", logs, flags=re.M)[1:]:
        toy = part.split()[0]
        found[toy] = found.get(toy, "") + part

    table = [["", *(f"`{toy}`" for toy in found)]]
    if figure == "KL":
        table.append(["TC", *(re.search(r"TC = ([\d.]+)", log)[1] for log in found.values())])
    for title, (run, decoder, tables) in TOYS.items():
        if figure not in tables.split():
            continue
        line = re.compile(rf"^-- {run}$.*?^{re.escape(decoder)}  +([^\n]*)$", re.M | re.S)
        cells = [[figures.split() for figures in line.findall(log)] for log in found.values()]
        row = [f"{mean(float(seed[FIGURES[figure]]) for seed in seeds):.3f}" for seeds in cells]
        table.append([title, *row])

    # the strongest opponents with the same beam
    beams = [json.loads(line) for line in (RESULTS / "theorem" / "beams.jsonl").read_text().splitlines()]
    row = "one at a time, a beam of 4"
    for system in dict.fromkeys(record["system"] for record in beams) if figure == "likeliest" else ():
        alike = [record for record in beams if (record["system"], record["row"]) == (system, row)]
        of_toy = [[r["likeliest"] for r in alike if r["toy"] == toy] for toy in found]
        table.append([f"{system}, a beam of 4", *(f"{mean(values):.3f}" for values in of_toy)])
    return table


# a column of the controls' table -> the row of its record
CONTROLS = {
    "Stage B": "Stage B, ungated edits (default)",
    "every mask marked": "every mask marked",
    "other masks marked": "only other masks marked",
    "where one is filled": "Stage B where one mask is filled",
    "where several are": "Stage B where several are",
}


def controls() -> Table:
    """At the paper's gate, a row for each training: the share of real names with Stage B off and on, and what each
    control gained / lost."""
    found: dict[str, dict[str, dict]] = {}
    for line in (RESULTS / "names" / "controls.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["gate"] == 0.7 and record["against"] == "off":
            found.setdefault(f"{record['system']}, seed {record['seed']}", {})[record["row"]] = record
    rows = [["trained with", "off", "on", "p", *CONTROLS]]
    for title, of in found.items():
        on = of[CONTROLS["Stage B"]]
        shares = [f"{r['exist']:.3f}" for r in (of["off"], on)]
        counts = [f"{of[row]['gained']} / {of[row]['lost']}" for row in CONTROLS.values()]
        rows.append([title, *shares, f"{on['p']:.1g}", *counts])
    return rows


TABLES: dict[str, Callable[[], Table]] = {
    "bits": lambda: of_records("text/bits.jsonl", {"bits a byte": ("bits", 3)}, "bits"),
    "names": lambda: of_records(
        "names/names.jsonl", {"exist": ("exist", 3), "forwards a name": ("forwards", 1)}, "exist"
    ),
    "controls": controls,
    "KL": lambda: of_toys("KL"),
    "likeliest": lambda: of_toys("likeliest"),
}


def written(page: str) -> str:
    """A page's text with its tables written again."""

    def write(found: re.Match) -> str:
        name = found[1]
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
