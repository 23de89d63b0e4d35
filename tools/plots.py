"""The figures of the README and of the results pages, drawn with matplotlib from the numbers that are committed.

    python -m tools.plots                    # all of them, each to its place
    python -m tools.plots tiny speed         # two of them; PICTURES has all names, at the end of this file

Text stays text in the SVGs. Each has a background of its own, white or dark as the reader's system is, and
other colours on either: no colour can be read both on white and on black at 4.5 : 1.
"""

import io
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from lib.data import read_records
from lib.util import Parser, command, entry, fail, replace_file

try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

# on white
PAGE = "#ffffff"
INK = "#59636e"
BLUE = "#0a5ca8"
ORANGE = "#a84300"
GREEN = "#1a7f4b"
PURPLE = "#8a3fa0"
BROWN = "#7a5200"
TEAL = "#006d77"

# and what each is on GitHub's dark page
DARK = {
    PAGE: "#0d1117",
    INK: "#9ba5b1",
    BLUE: "#79bcff",
    ORANGE: "#ffab6e",
    GREEN: "#57d197",
    PURPLE: "#d6a2e8",
    BROWN: "#d9b36a",
    TEAL: "#5fd0da",
}
STYLE = {
    "svg.hashsalt": "cocommit",  # the same picture from the same numbers, byte for byte
    "svg.fonttype": "none",  # text stays text
    "font.size": 11,
    "figure.facecolor": PAGE,
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "lines.linewidth": 2,
}

WIDTH = 5.4  # inches, of every figure: its letters are those of the page where that is 400 pixels wide


# --- the canvas
def panels(rows: int, columns: int, width: float, height: float, **shared: bool):
    """(figure, axes), in inches."""
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **shared)


def name_lines(ax, ends: dict[str, tuple[float, float, str]], before: bool = False, room: float = 0.075) -> None:
    """Each line's name behind its end, or before its start (x, y, colour), pushed up where two would overlap.

    room: what a name needs of the axis' height.
    """
    bottom, top = ax.get_ylim()
    lowest = bottom
    for name, (x, y, color) in sorted(ends.items(), key=lambda end: end[1][1]):
        place = max(y, lowest)
        lowest = place + room * (top - bottom)
        ax.annotate(name, (x, place), xytext=(-6 if before else 6, 0), textcoords="offset points", color=color,
                    ha="right" if before else "left", va="center", annotation_clip=False)  # fmt: skip


def svg(figure) -> str:
    """The picture as text, with the colours of a dark page for readers who have one."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    rules = []
    for light, dark in DARK.items():
        for use in ("fill", "stroke"):
            rules.append(f'[style*="{use}: {light}"] {{ {use}: {dark} !important }}')
    style = "\n".join(["<style>@media (prefers-color-scheme: dark) {", *rules, "}</style>"])
    return buffer.getvalue().replace("</metadata>", f"</metadata>\n{style}", 1)


# --- tiny.py
def draw_tiny():
    """The table that tiny.py prints: a bar for each model, what it writes after "city", if words are drawn."""
    table = (RESULTS / "theorem" / "tiny.txt").read_text()
    columns = re.split(r"  +", table.splitlines()[1])[1:4]
    # a name and three probabilities; the lines below the table have fewer
    rows = re.findall(r"^(\S.*?)  +(\d\.\d\d) +(\d\.\d\d) +(\d\.\d\d)", table, re.M)

    figure, ax = panels(1, 1, 4.6, 5)
    for row, (name, *shares) in enumerate(rows):
        ax.annotate(name, (0, row - 0.36), va="center", fontsize=13)
        left = 0.0
        for column, color, share in zip(columns, (BLUE, GREEN, ORANGE), map(float, shares), strict=True):
            ax.barh(row + 0.08, share, height=0.44, left=left, color=color)
            if share >= 0.1:
                label = f"{column} {share:.2f}" if share >= 0.3 else f"{share:.2f}"
                ax.annotate(label, (left + share / 2, row + 0.08), ha="center", va="center", color=PAGE, fontsize=13)
            left += share
    ax.set(xlim=(0, 1.001), ylim=(len(rows) - 0.5, -0.7))
    ax.set_axis_off()
    return figure


# --- existing names against what they cost
def concave_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The best for its cost, (cost, share) each, the cheapest first: any two of them may be mixed.

    (1, .2) (2, .3) (3, .8) (4, .7)  ->  (1, .2) (3, .8): 2 is below the line from 1 to 3, 4 costs more and has less.
    """
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if hull and y <= hull[-1][1]:
            continue

        # what is now below a line goes
        while len(hull) > 1:
            (x1, y1), (x2, y2) = hull[-2:]
            if (y2 - y1) * (x - x1) > (y - y1) * (x2 - x1):
                break
            hull.pop()
        hull.append((x, y))
    return hull


NAMED = {
    "base/threshold": ("base", INK),
    "paper-3/stage_b": ("Stage B, the paper's", ORANGE),
    "alpha-base/stage_b": ("Stage B by alpha", BLUE),
    "chain/stage_b": ("Stage B by the chain", PURPLE),
    "stage-a/threshold": ("Stage A by alpha", GREEN),
    "stage-a-chain/threshold": ("Stage A by the chain", TEAL),
    "head/head": ("the head", BROWN),
}
LEFT = "base/left_ones"


def draw_names():
    """What each system writes for held-out names, see beyond/evidence.py: a dot for each setting, means of its seeds.

    The line is what its system has for at most so many forwards, if settings may be mixed.
    """
    points = read_existing(RESULTS / "names" / "records.jsonl")
    dearest = max(x for system in NAMED for x, _ in points[system])

    figure, ax = panels(1, 1, WIDTH, 4.4)
    ends = {}
    for system, (name, color) in NAMED.items():
        hull = concave_hull(points[system])
        hull.append((dearest, hull[-1][1]))
        ax.plot(*zip(*points[system], strict=True), "o", color=color, markersize=3)
        ax.plot(*zip(*hull, strict=True), color=color)
        ends[name] = (*hull[-1], color)
    [(x, y)] = points[LEFT]
    ax.plot(x, y, "D", color=INK)
    ax.annotate("base in blocks of one", (x, y), xytext=(0, -14), textcoords="offset points", ha="center")
    ax.set(xlabel="forwards a name, everything counted", xlim=(0, 1.75 * dearest))  # room for their names
    ax.set_title("share of held-out names that exist", loc="left")
    ax.grid(axis="y")
    name_lines(ax, ends, room=0.055)
    return figure


def read_existing(path: Path) -> dict[str, list[tuple[float, float]]]:
    """{system/way: of each setting forwards a name, and the share that exists, means of the seeds}"""
    found = defaultdict(list)
    for number, record in read_records(path):
        where = f"{path}:{number}"
        system, way, setting, digits = (entry(record, key, str, where) for key in ("system", "way", "setting", "exist"))
        cost = entry(record, "forwards", float, where)
        found[f"{system}/{way}", setting].append((cost, digits.count("1") / len(digits)))
    points = defaultdict(list)
    for (system, _), of_seeds in found.items():
        points[system].append(tuple(np.mean(of_seeds, axis=0).tolist()))
    if missing := {*NAMED, LEFT} - points.keys():
        fail(f"{path} has no record of {', '.join(sorted(missing))}")
    return points


# --- the paper's tables
def draw_paper_tables():
    """A toy's possible answers and the paper's GSM8K by tau_m2t: Stage B on, off, and the base."""
    log = (RESULTS / "paper_tables" / "log.txt").read_text()
    row = r"^(ours|our weights|released), .*?(\d\.\d{3}) +0\.500 +(\S+).* (\S+) +\S+$"
    looks = {"ours": ("Stage B on", BLUE, "-"), "our weights": ("off", ORANGE, "--"), "released": ("base", INK, "-.")}
    panes = {2: "possible answers, a toy", 3: "GSM8K, %, the paper's 16B"}
    figure, axes = panels(2, 1, WIDTH, 5, sharex=True)
    for ax, (column, title) in zip(axes, panes.items(), strict=True):
        ends = {}
        for weights, (name, color, style) in looks.items():
            found = re.findall(row, log, re.M)
            points = sorted((float(of[1]), float(of[column])) for of in found if of[0] == weights)
            ax.plot(*zip(*points, strict=True), style, marker="o", color=color)
            ends[name] = (*points[0], color)
        ax.set_title(title, loc="left")
        ax.grid(axis="y")
        name_lines(ax, ends, before=True)
    axes[1].set(xlim=(0.12, 0.72), xticks=(0.3, 0.5, 0.7), xlabel="tau_m2t")
    return figure


# --- speed
def draw_speed():
    """Tokens per second over the fork's: of the log's last runs a dot each, named by the lowest and the highest."""
    log = (RESULTS / "speed" / "official.txt").read_text().partition("# a layer in one graph")[2]
    run = r"^ +((?:\d+ (?:x|rows of) )?\d+) tokens.*\n +ours: .* ([\d.]+)x.*\n +ours, compiled: .* ([\d.]+)x"
    looks = {"plain": (ORANGE, 0), "compiled": (BLUE, 0.35)}
    found = {name: defaultdict(list) for name in looks}
    for label, *ratios in re.findall(run, log, re.M):
        label = label.removeprefix("1 x ").replace("x", "rows of") + " tokens"
        for name, ratio in zip(looks, ratios, strict=True):
            found[name][label].append(float(ratio))

    labels = list(found["plain"])
    figure, ax = panels(1, 1, WIDTH, 0.6 + 0.7 * len(labels))
    for name, (color, below) in looks.items():
        for row, label in enumerate(labels):
            values = sorted(found[name][label])
            low, high = values[0], values[-1]
            words = f"{name} {low:.2f} to {high:.2f}" if low < high else f"{name} {low:.2f}"
            ax.plot(values, [row + below] * len(values), "o-", color=color)
            ax.annotate(words, (high, row + below), xytext=(7, 0), textcoords="offset points", color=color, va="center")
    ax.axvline(1, color=INK, linestyle=":")
    ax.set_yticks(np.arange(len(labels)) + 0.17, labels)
    ax.set(xlim=(0.9, 2.9), ylim=(len(labels) - 0.4, -0.3))
    ax.set_title("times the tokens a second of the author's decoder", loc="left")
    return figure


def draw_sixteen_b():
    """Seconds of each pass; a line where its share of the layers alone would put it."""
    log = (RESULTS / "sixteen_b" / "prices.txt").read_text()
    prices = json.loads(re.search(r"^\{.*\}$", log, re.M)[0])
    names = {"full": "full forward", "commit": "commit", "stage_b": "Stage B, n = 3 of 20", "head": "look of the head"}
    figure, ax = panels(1, 1, WIDTH, 2.4)
    bars = ax.barh(list(names.values()), [round(prices[of], 3) for of in names], height=0.3, color=BLUE)
    ax.bar_label(bars, fmt="%.3g s", padding=4, color=BLUE)
    for row, layers in ((2, 3), (3, 1)):
        share = prices["full"] * layers / 20
        ax.vlines(share, row - 0.2, row + 0.3, color=ORANGE)
        ax.annotate(f"{layers}/20 of a full forward", (share + 0.02, row + 0.4), color=ORANGE, va="center")
    ax.set(xlim=(0, 1.2), ylim=(3.7, -0.5))
    ax.set_title("seconds, a block of 32, int8, two cores", loc="left")
    return figure


# --- toys
def draw_joint():
    """Shares of contexts, means and worst of three seeds: possible answers above, the likeliest below."""
    rows = json.loads((RESULTS / "theorem" / "joint.json").read_text())["rows"]
    toys = list(dict.fromkeys((r["toy"], r["n"]) for r in rows))
    looks = {"chain": ("chain target", BLUE, 0.0), "clean": ("clean target", ORANGE, 0.2)}
    panes = {"B coherent": "contexts whose answer is possible", "B mode": "contexts with the likeliest answer"}
    figure, axes = panels(2, 1, WIDTH, 6.4)
    for ax, (measure, title) in zip(axes, panes.items(), strict=True):
        for r in rows:
            name, color, below = looks[r["target"]]
            mean, worst = r[measure]
            row = toys.index((r["toy"], r["n"]))
            ax.errorbar(mean, row + below, xerr=[[mean - worst], [0]], fmt="o", color=color)
            # the first row says which is which
            if row == 0:
                side = dict(ha="right", xytext=(-8, 0)) if mean > 0.5 else dict(ha="left", xytext=(8, 0))
                ax.annotate(name, (mean, below), textcoords="offset points", color=color, va="center", **side)
        ax.set_yticks(range(len(toys)), [f"{toy}, n = {n}" for toy, n in toys])
        ax.set(xlim=(-0.05, 1.05), ylim=(len(toys) - 0.5, -0.5))
        ax.set_title(title, loc="left")
        ax.grid(axis="x")
    axes[1].set(xlabel="a dot is the mean of three seeds,\nits line goes to the worst")
    return figure


def draw_dial():
    """Each decoder's error against TC, one point a checkpoint."""
    figure, ax = panels(1, 1, WIDTH, 3.8)
    points = sorted(json.loads((RESULTS / "theorem" / "dial.json").read_text())["points"])
    x = [tc for tc, _ in points]
    # below this line no product of single tokens can be
    ax.plot([0, x[-1]], [0, x[-1]], color=INK, linestyle=":")
    ends = {"TC, the least for a product": (x[-1], x[-1], INK)}
    looks = {"Stage A, one step": (ORANGE, "o-"), "Stage B, one step": (BLUE, "x--"), "one at a time": (GREEN, "s-")}
    for decoder, (color, style) in looks.items():
        y = [error[decoder] for _, error in points]
        ax.plot(x, y, style, color=color)
        ends[decoder] = (x[-1], y[-1], color)
    ax.set(xlabel="total correlation (nats)", ylabel="KL(p || decoder) (nats)")
    name_lines(ax, ends)
    return figure


# name -> its place and who draws it
PICTURES = {
    "tiny": ("assets/tiny.svg", draw_tiny),
    "names": ("results/names/names.svg", draw_names),
    "paper_tables": ("results/paper_tables/gates.svg", draw_paper_tables),
    "speed": ("results/speed/speed.svg", draw_speed),
    "sixteen_b": ("results/sixteen_b/prices.svg", draw_sixteen_b),
    "joint": ("results/theorem/joint.svg", draw_joint),
    "dial": ("results/theorem/dial.svg", draw_dial),
}


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("pictures", nargs="*", metavar="NAME", help="which ones (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder that their places are in (the repository)")
    args = parser.parse_args()
    for name in args.pictures:
        if name not in PICTURES:
            fail(f"there is no picture {name}: {', '.join(PICTURES)}")
    if plt is None:
        fail("pictures need matplotlib: pip install matplotlib")
    plt.rcParams.update(STYLE)
    for name in args.pictures or PICTURES:
        place, draw = PICTURES[name]
        figure = draw()
        text = svg(figure)
        replace_file(args.out / place, lambda path, text=text: path.write_text(text, encoding="utf-8"))
        plt.close(figure)
        print(f"wrote {args.out / place}")


if __name__ == "__main__":
    main()
