"""The figures of the README and of the results pages, drawn with matplotlib from the numbers that are committed.

    python -m tools.plots                    # all of them, each to its place
    python -m tools.plots pays tiny          # two of them

    tiny          what each stage of tiny.py writes               the table in README.md
    pays          existing names against time and forwards        results/pays/records.jsonl.gz
    names         the shipped head and its base                   results/names/head.jsonl, heads.jsonl
    text          quality of Python text against forwards         results/text/records.jsonl.gz
    tc            dependence and mismatch in bundles              results/tc/log.txt
    paper_tables  gates with Stage B and without it               results/paper_tables/log.txt
    speed         against the author's cached decoder             results/speed/official.txt
    sixteen_b     what a pass costs on the released geometry      beyond/prices.json
    joint         what Stage B writes in one step, toy by toy     results/theorem/joint.json
    dial          error of one step against total correlation     results/theorem/dial.json

Text stays text in the SVGs, and is of a grey that is readable on white and on black pages.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from beyond import report
from beyond.report import System, Unit
from lib.data import read_records
from lib.util import Parser, command, fail, replace_file

try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

# colours that are readable on white and on GitHub's dark page
INK = "#737d88"
BLUE = "#3d8bd4"
ORANGE = "#d9772b"
GREEN = "#2f9e6e"
STYLE = {
    "svg.hashsalt": "cocommit",  # the same picture from the same numbers, byte for byte
    "svg.fonttype": "none",  # text stays text
    "font.size": 11,
    "savefig.transparent": True,
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


# --- the canvas
def panels(rows: int, columns: int, width: float, height: float, **shared: bool):
    """(figure, axes), in inches."""
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **shared)


def name_lines(ax, ends: dict[str, tuple[float, float, str]], before: bool = False) -> None:
    """Each line's name behind its end, or before its start (x, y, colour), pushed up where two would overlap."""
    bottom, top = ax.get_ylim()
    lowest = bottom
    for name, (x, y, color) in sorted(ends.items(), key=lambda end: end[1][1]):
        place = max(y, lowest)
        lowest = place + 0.075 * (top - bottom)
        ax.annotate(name, (x, place), xytext=(-6 if before else 6, 0), textcoords="offset points", color=color,
                    ha="right" if before else "left", va="center", annotation_clip=False)  # fmt: skip


# --- tiny.py
def read_tiny(page: str) -> tuple[list[str], dict[str, list[float]]]:
    """The table that tiny.py printed on a page: its phrases, and of each row their probabilities."""
    head, *lines = page.partition("$ python tiny.py\n")[2].partition("```")[0].splitlines()
    phrases = re.findall(r"[A-Z]\w+ [A-Z]\w+|no phrase", head.partition(")")[2])
    rows = {}
    for line in lines:
        # losses, a name, and the probabilities
        found = re.match(r"(?:\d\.\d\d )* *(\S.*?)  +((?: *\d\.\d\d\b)+)", line)
        rows[found[1]] = [float(share) for share in found[2].split()]
    return phrases, rows


def draw_tiny():
    """A bar for each cell: the phrases side by side, and a row for each model under its name."""
    phrases, rows = read_tiny((ROOT / "README.md").read_text())
    figure, ax = panels(1, 1, 5.4, 4.8)
    for row, (name, shares) in enumerate(rows.items()):
        ax.annotate(name, (0, row - 0.32), va="center")
        for column, share in enumerate(shares):
            color = ORANGE if phrases[column] == "no phrase" else BLUE
            ax.barh(row + 0.1, 0.68 * share, height=0.36, left=column, color=color)
            ax.annotate(f"{share:.2f}", (column + 0.68 * share + 0.03, row + 0.1), va="center", color=color)
    for column, phrase in enumerate(phrases):
        ax.annotate(phrase, (column, -0.85), va="center", weight="bold")
    ax.set(xlim=(-0.02, len(phrases) - 0.02), ylim=(len(rows) - 0.6, -1.1))
    ax.set_axis_off()
    return figure


# --- names and text: the records of beyond/sweep.py

# who is drawn, and how: four lines are as many as one can tell apart; the page's tables have the rest
LOOKS = {
    "head": ("head", BLUE, "-"),
    "distilled": ("taught Stage A", ORANGE, "--"),
    "base": ("base", INK, "-."),
    "paper's Stage B, chain": ("Stage B, chain", GREEN, ":"),
}


def draw_systems(ax, systems: dict[str, System], limits: np.ndarray) -> None:
    """A line for each system, two of whose settings may be mixed, named at its start."""
    starts = {}
    for system, (name, color, style) in LOOKS.items():
        if system not in systems:
            continue
        share = systems[system].within(limits)[:, 0]  # nan where nothing is so cheap
        ax.plot(limits, share, color=color, linestyle=style)
        paid = ~np.isnan(share)
        starts[name] = (limits[paid][0], share[paid][0], color)
    name_lines(ax, starts, before=True)
    ax.grid(axis="y")


def draw_pays():
    """Existing names for at most so much time, and so many forwards; two settings may be mixed."""
    clusters, records = report.load(RESULTS / "pays" / "records.jsonl.gz")
    prices = json.loads((ROOT / "beyond" / "prices.json").read_text())
    units = {
        "time a name, in full forwards of the 16B geometry": Unit("name", prices),
        "forwards a name, everything counted": Unit("name"),
    }
    limits = np.arange(2, 8.01, 0.2)
    figure, axes = panels(2, 1, 5.4, 5.2)
    for ax, (words, unit) in zip(axes, units.items(), strict=True):
        ax.set(ylim=(0, 1.05))
        draw_systems(ax, report.measured(records, clusters, "exist", unit), limits)
        ax.set(xlim=(0, limits[-1]), xlabel=words)
    axes[0].set_title("share of the completed names that exist", loc="left")
    return figure


def draw_text():
    """The score of what was written, within each budget of forwards; two settings may be mixed."""
    clusters, records = report.load(RESULTS / "text" / "records.jsonl.gz")
    figure, ax = panels(1, 1, 5.4, 3.6)
    limits = np.arange(0.15, 1.06, 0.05)
    draw_systems(ax, report.measured(records, clusters, "score", Unit("token")), limits)
    ax.set(xlim=(-0.2, limits[-1]), xticks=np.arange(1, 6) / 5, ylabel="score (nats a token)")
    ax.set(xlabel="forwards a token, everything counted")
    return figure


# --- the shipped head
def draw_names():
    """Held-out names that exist, by what a name cost: a line for each decoder, and one for a head taught otherwise."""
    records = []
    for file in ("head.jsonl", "heads.jsonl"):
        records += [r for _, r in read_records(RESULTS / "names" / file) if r["group"] == "held out"]
    lines = {
        "head": (BLUE, "assets/names/head", "head"),
        "usual chain": (ORANGE, "out/head-usual", "head"),
        "base, longest prefix": (INK, "assets/names/head", "prefix"),
    }
    figure, ax = panels(1, 1, 5.4, 3.6)
    ends = {}
    for name, (color, ckpt, decoder) in lines.items():
        of = [r for r in records if r["ckpt"] == ckpt and r["decoder"].startswith(decoder)]
        points = sorted((r["forwards/token"] * r["tokens/name"], r["exist"]) for r in of)
        ax.plot(*zip(*points, strict=True), "o-", color=color)
        ends[name] = (*points[-1], color)
    ax.set(xlim=(2, 7), ylim=(0.6, 0.95), xlabel="forwards a name, everything counted")
    ax.set_title("share of 512 held-out names that exist", loc="left")
    ax.grid(axis="y")
    name_lines(ax, ends)
    return figure


def draw_tc():
    """What Stage A loses in a bundle, in two parts, by its lowest confidence: means of the seeds."""
    log, *_ = (RESULTS / "tc" / "log.txt").read_text().split("\n## ")
    losses = defaultdict(list)
    for bundles, tc, mismatch in re.findall(r"\n(0.\d\.\.\d.\d) +\S+ +\S+ +(\S+) .* \.\. \S+ +(\S+) .* \.\.", log):
        losses[bundles.replace("..", " to ")].append((float(tc), float(mismatch)))
    figure, ax = panels(1, 1, 5.4, 3.6)
    for row, of_seeds in enumerate(losses.values()):
        tc, mismatch = np.mean(of_seeds, axis=0)
        ax.barh(row, tc, height=0.6, color=BLUE)
        ax.barh(row, mismatch, height=0.6, left=tc, color=ORANGE)
        ax.annotate(f"{tc:.2f} + {mismatch:.2f}", (tc + mismatch + 0.06, row), va="center")
    ax.annotate("dependence", (2.1, -0.7), color=BLUE, ha="center", va="center")
    ax.annotate("mismatch", (4.6, -0.7), color=ORANGE, ha="center", va="center")
    ax.set_yticks(range(len(losses)), losses)
    ax.set(xlim=(0, 6), ylim=(len(losses) - 0.5, -1), xlabel="nats a bundle", ylabel="lowest confidence in it")
    return figure


def draw_paper_tables():
    """A toy's possible answers and the paper's GSM8K by tau_m2t: Stage B on, off, and the base."""
    log = (RESULTS / "paper_tables" / "log.txt").read_text()
    row = r"^(ours|our weights|released), .*?(\d\.\d{3}) +0\.500 +(\S+).* (\S+) +\S+$"
    looks = {"ours": ("Stage B on", BLUE, "-"), "our weights": ("off", ORANGE, "--"), "released": ("base", INK, "-.")}
    figure, axes = panels(2, 1, 5.4, 5, sharex=True)
    for ax, column, title in zip(axes, (2, 3), ("possible answers, a toy", "GSM8K, %, the paper's 16B"), strict=True):
        ends = {}
        for weights, (name, color, style) in looks.items():
            found = [of for of in re.findall(row, log, re.M) if of[0] == weights]
            points = sorted((float(of[1]), float(of[column])) for of in found)
            ax.plot(*zip(*points, strict=True), style, marker="o", color=color)
            ends[name] = (*points[0], color)
        ax.set_title(title, loc="left")
        ax.grid(axis="y")
        name_lines(ax, ends, before=True)
    axes[1].set(xlim=(0.12, 0.72), xlabel="tau_m2t")
    return figure


# --- speed
def draw_bars(ax, values: list[float], unit: str, color: str, below: float = 0.0) -> None:
    """A bar for each value, which stands behind it."""
    places = np.arange(len(values)) + below
    ax.barh(places, values, height=0.3, color=color)
    for place, value in zip(places, values, strict=True):
        ax.annotate(f"{value:g}{unit}", (value, place), xytext=(4, 0), textcoords="offset points", color=color,
                    va="center")  # fmt: skip


def draw_speed():
    """Tokens per second over the fork's, of the log's last run."""
    *_, last = (RESULTS / "speed" / "official.txt").read_text().split("$ ")
    found = re.findall(r"(\d+) x (\d+) tokens.*\n +ours: .*, ([\d.]+)x\n +ours, compiled: .*, ([\d.]+)x", last)
    labels = [f"{tokens} tokens" if rows == "1" else f"{rows} rows of {tokens}" for rows, tokens, *_ in found]
    figure, ax = panels(1, 1, 5.4, 2.6)
    for column, name, color, below in ((2, "plain", ORANGE, 0.0), (3, "compiled", BLUE, 0.35)):
        draw_bars(ax, [float(of[column]) for of in found], f" {name}", color, below)
    ax.axvline(1, color=INK, linestyle=":")
    ax.set_yticks(np.arange(len(labels)) + 0.17, labels)
    ax.set(xlim=(0, 3), ylim=(len(labels) - 0.4, -0.3), xlabel="times the tokens a second of the author's decoder")
    return figure


def draw_sixteen_b():
    """Seconds of each pass; a line where its share of the layers alone would put it."""
    prices = json.loads((ROOT / "beyond" / "prices.json").read_text())
    names = {"full": "full forward", "commit": "commit", "stage_b": "Stage B, n = 3 of 20", "head": "look of the head"}
    figure, ax = panels(1, 1, 5.4, 2.2)
    draw_bars(ax, [prices[of] for of in names], " s", BLUE)
    for row, layers in ((2, 3), (3, 1)):
        ax.vlines(prices["full"] * layers / 20, row - 0.3, row + 0.3, color=ORANGE)
    ax.annotate("orange: its share of the layers", (0.42, 3), color=ORANGE, va="center")
    ax.set_yticks(range(len(names)), names.values())
    ax.set(xlim=(0, 1.2), ylim=(3.5, -0.5), xlabel="seconds, a block of 32, int8, two cores")
    return figure


# --- toys
def draw_joint():
    """Shares of contexts, means and worst of three seeds: possible answers on the left, the likeliest on the right."""
    figure, axes = panels(1, 2, 8, 3.8, sharey=True)
    rows = json.loads((RESULTS / "theorem" / "joint.json").read_text())["rows"]
    toys = [(r["toy"], r["n"]) for r in rows if r["target"] == "chain"]
    looks = {"chain": (BLUE, 0), "clean": (ORANGE, 0.2)}
    for ax, measure in zip(axes, ("B coherent", "B mode"), strict=True):
        for r in rows:
            color, below = looks[r["target"]]
            mean, worst = r[measure]
            y = toys.index((r["toy"], r["n"])) + below
            ax.errorbar(mean, y, xerr=[[mean - worst], [0]], fmt="o", color=color)
        ax.set(xlim=(-0.05, 1.05))
        ax.grid(axis="x")
    axes[0].set_yticks(range(len(toys)), [f"{toy}, n = {n}" for toy, n in toys])
    axes[0].set(ylim=(len(toys) - 0.5, -0.5), xlabel="contexts whose answer is possible")
    axes[1].set(xlabel="contexts with the likeliest answer")
    for ax in axes:
        ax.annotate("chain target", (0.95, 0), color=BLUE, ha="right", va="center")
        ax.annotate("clean target", (0.05, 0.2), color=ORANGE, va="center")
    return figure


def draw_dial():
    """Each decoder's error against TC, one point a checkpoint."""
    figure, ax = panels(1, 1, 5.4, 3.8)
    points = sorted(json.loads((RESULTS / "theorem" / "dial.json").read_text())["points"])
    x = [tc for tc, _ in points]
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
    "pays": ("results/pays/pays.svg", draw_pays),
    "names": ("results/names/names.svg", draw_names),
    "text": ("results/text/text.svg", draw_text),
    "tc": ("results/tc/tc.svg", draw_tc),
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
        replace_file(args.out / place, lambda path, of=figure: of.savefig(path, format="svg", metadata={"Date": None}))
        plt.close(figure)
        print(f"wrote {args.out / place}")


if __name__ == "__main__":
    main()
