"""The figures of the results pages, drawn with matplotlib from the numbers that are committed. (assets/step.svg is
written by hand.)

    python -m tools.plots                    # all of them, each to its place
    python -m tools.plots tiny speed         # two of them

In the SVGs text stays text. Each SVG has a background of its own, white or dark as the reader's system is. It has other
colours on dark, because no colour is readable on both (a contrast of 4.5 : 1).
"""

import io
import json
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from lib.util import Parser, command, fail, printable, read_lines, replace_file

try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

# each colour on white -> the colour in its place on GitHub's dark page
DARK = {
    "#ffffff": "#0d1117",
    "#59636e": "#9ba5b1",
    "#0a5ca8": "#79bcff",
    "#a84300": "#ffab6e",
    "#1a7f4b": "#57d197",
    "#8a3fa0": "#d6a2e8",
    "#006d77": "#5fd0da",
}
PAGE, INK, BLUE, ORANGE, GREEN, PURPLE, TEAL = DARK
STYLE = {
    "svg.hashsalt": "cocommit",  # the same picture from the same numbers, byte for byte
    "svg.fonttype": "none",  # text stays text
    "font.size": 11,
    "figure.facecolor": PAGE,
    "figure.constrained_layout.use": True,
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

WIDTH = 5.4  # inches, of most figures: shown 400 pixels wide, its letters are as large as the page's


# --- the canvas
def name_lines(ax) -> None:
    """Write each line's name behind its end; all ends are at one x. A name that would overlap another is pushed up."""
    bottom, top = ax.get_ylim()
    lowest = bottom
    for line in sorted(ax.lines, key=lambda line: line.get_ydata()[-1]):
        x, y = line.get_xydata()[-1]
        place = max(y, lowest)
        lowest = place + 0.09 * (top - bottom)
        ax.annotate(line.get_label(), (x, place), xytext=(7, 0), textcoords="offset points", color=line.get_color(),
                    va="center", annotation_clip=False)  # fmt: skip


def svg(figure) -> str:
    """The picture as text, with the colours of a dark page for readers who have one."""
    buffer = io.StringIO()
    # the picture is as large as what is drawn, so that no name is cut at an edge
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.1)
    style = "</metadata>\n<style>@media (prefers-color-scheme: dark) {"
    for light, dark in DARK.items():
        for use in ("fill", "stroke"):
            style += f'\n[style*="{use}: {light}"] {{ {use}: {dark} !important }}'
    return buffer.getvalue().replace("</metadata>", style + "\n}</style>", 1)


# --- tiny.py
def draw_tiny():
    """The table that tiny.py prints: a bar for each model shows what it writes after "city" if it draws words."""
    table = (RESULTS / "theorem" / "tiny.txt").read_text()
    columns = re.split(r"  +", table.splitlines()[1])[1:4]
    # a name and three probabilities; the line below the table has none. Training for twice as long changes nothing,
    # and gets no bar
    rows = re.findall(r"^(\S.*?)  +(\d\.\d\d) +(\d\.\d\d) +(\d\.\d\d)", table, re.M)
    rows = [row for row in rows if row[0] != "Stage A, twice as long"]

    figure, ax = plt.subplots(figsize=(4.6, 5))
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


# --- names: the share that exists, against its cost
# system/way -> its name, its colour, its line, the gate on edits in the settings that are drawn, and where its name is
# written: points to the right of the line's end and above it, and which end of the name is there
NAMED = {
    "causal/run": ("causal Stage B, longest run", BLUE, "o-", None, (0, 11, "center")),
    "left to right/ones": ("a left-to-right model", INK, "D", None, (8, 8, "left")),
    "base/ones": ("base, in blocks of one", TEAL, "D", None, (8, 6, "left")),
    "base/run": ("base, longest run", GREEN, "o-", None, (0, -11, "right")),
    "base/threshold": ("base, gated edits (released)", PURPLE, "o-", 0.5, (0, 11, "right")),
}


def draw_names():
    """The share of held-out names that each system completes to a name (experiments/names.py), against forwards a name:
    a dot for each setting, which is the mean of its seeds."""
    found = read_settings(RESULTS / "names" / "records.jsonl")
    figure, ax = plt.subplots(figsize=(WIDTH, 4.6))
    for system, (name, color, style, edits, (right, above, end)) in NAMED.items():
        own = [np.mean(seeds, axis=0) for key, seeds in found[system].items() if key[1] == edits]
        points = sorted((forwards, exist) for exist, forwards, _ in own)
        if points:
            ax.plot(*zip(*points, strict=True), style, color=color, markersize=4)
            ax.annotate(name, points[-1], xytext=(right, above), textcoords="offset points", color=color, va="center",
                        ha=end)  # fmt: skip
    ax.grid(axis="y")
    ax.set_title("share of held-out names that exist", loc="left", pad=18)
    ax.set(xlabel="forwards a name, everything counted")
    return figure


def read_records(path: Path) -> list[dict]:
    """The records of experiments/names.py: one for each setting and seed."""
    kinds = dict(system=str, way=str, seed=int, dial=float, exist=str, forwards=float)
    records = read_lines(path, kinds)
    for n, record in enumerate(records, 1):
        if not re.fullmatch("[01]+", record["exist"]):
            fail(f"line {n} of {path} is damaged, or of another kind: exist is a digit for each name, 0 or 1")
    return records


def share(digits: str) -> float:
    """0110 -> .5"""
    return digits.count("1") / len(digits)


def read_settings(path: Path) -> dict[str, dict[tuple, list]]:
    """{system/way: {(dial, edits): for each seed the share that exists, forwards a name, forwards a token}}"""
    found = defaultdict(lambda: defaultdict(list))
    for record in sorted(read_records(path), key=lambda record: record["seed"]):
        # older records have no forwards a token
        figures = share(record["exist"]), record["forwards"], record.get("per_token") or math.nan
        found[f"{record['system']}/{record['way']}"][record["dial"], record.get("edits")].append(figures)
    return found


# --- the paper's tables
def draw_paper_tables():
    """A toy's possible answers, and the paper's GSM8K, against tau_m2t: with Stage B on, with it off, and the base."""
    log = (RESULTS / "paper_tables" / "log.txt").read_text()
    row = r"^(ours|our weights|released), .*?(\d\.\d{3}) +0\.500 +(\S+).* (\S+) +\S+$"
    found = re.findall(row, log, re.M)
    styles = {"ours": ("Stage B on", BLUE, "-"), "our weights": ("off", ORANGE, "--"), "released": ("base", INK, "-.")}
    panes = {2: "a toy: share of possible answers", 3: "the paper's 16B: GSM8K, %"}
    figure, axes = plt.subplots(2, figsize=(WIDTH, 5), sharex=True)
    for ax, (column, title) in zip(axes, panes.items(), strict=True):
        values = {}
        for weights, (name, color, style) in styles.items():
            values[weights] = {float(of[1]): float(of[column]) for of in found if of[0] == weights}
            points = sorted(values[weights].items())
            ax.plot(*zip(*points, strict=True), style, marker="o", color=color, label=name)

        # what Stage B gains
        for x, on in values["ours"].items():
            gain = f"{on - values['our weights'][x]:+.2f}"
            ax.annotate(gain, (x, on), xytext=(0, 8), textcoords="offset points", color=BLUE, ha="right")
        ax.set_title(title, loc="left", pad=18)
        ax.grid(axis="y")
        name_lines(ax)
    axes[1].set(xlim=(0.23, 0.72), xticks=(0.3, 0.5, 0.7), xlabel="tau_m2t; numbers: Stage B on minus off")
    return figure


# --- speed
def draw_speed():
    """Tokens per second, as a multiple of the author's fork: a dot for each of the log's last runs, and the lowest and
    the highest multiple in words."""
    log = (RESULTS / "speed" / "official.txt").read_text().partition("# a layer in one graph")[2]
    run = r"^ +((?:\d+ (?:x|rows of) )?\d+) tokens.*\n +ours: .* ([\d.]+)x.*\n +ours, compiled: .* ([\d.]+)x"
    styles = {"plain": (ORANGE, 0), "compiled": (BLUE, 0.35)}
    found = {name: defaultdict(list) for name in styles}
    for label, *ratios in re.findall(run, log, re.M):
        label = label.removeprefix("1 x ").replace("x", "rows of") + " tokens"
        for name, ratio in zip(styles, ratios, strict=True):
            found[name][label].append(float(ratio))

    labels = list(found["plain"])
    figure, ax = plt.subplots(figsize=(WIDTH, 0.6 + 0.7 * len(labels)))
    for name, (color, below) in styles.items():
        for row, label in enumerate(labels):
            values = sorted(found[name][label])
            low, high = values[0], values[-1]
            words = f"{name} {low:.2f} to {high:.2f}" if low < high else f"{name} {low:.2f}"
            ax.plot(values, [row + below] * len(values), "o-", color=color)
            ax.annotate(words, (high, row + below), xytext=(7, 0), textcoords="offset points", color=color, va="center")
    ax.axvline(1, color=INK, linestyle=":")
    ax.set_yticks(np.arange(len(labels)) + 0.17, labels)
    ax.set(xlim=(0.9, 3.4), ylim=(len(labels) - 0.4, -0.3))
    ax.set_title("tokens a second, times the author's", loc="left")
    return figure


def draw_sixteen_b():
    """The seconds of each pass. A line shows what Stage B would take by its share of the layers alone."""
    log = (RESULTS / "sixteen_b" / "prices.txt").read_text()
    prices = json.loads(re.search(r"^\{.*\}$", log, re.M)[0])
    names = {"full": "full forward", "commit": "refresh", "stage_b": "Stage B, n = 3 of 20"}
    figure, ax = plt.subplots(figsize=(WIDTH, 2))
    bars = ax.barh(list(names.values()), [round(prices[of], 3) for of in names], height=0.3, color=BLUE)
    ax.bar_label(bars, fmt="%.3g s", padding=4, color=BLUE)
    share = prices["full"] * 3 / 20
    ax.vlines(share, 1.8, 2.3, color=ORANGE)
    ax.annotate("3/20 of a full forward", (share + 0.02, 2.4), color=ORANGE, va="center")
    ax.set(xlim=(0, 1.2), ylim=(2.7, -0.5))
    ax.set_title("seconds, a block of 32, int8, two cores", loc="left")
    return figure


# --- toys
# a run of experiments/toys.sh, and one of its decoders
ON_TOYS = {
    ("base", "Stage A, one step"): (ORANGE, "o"),
    ("base", "Stage B, one step"): (PURPLE, "x"),
    ("masks", "one at a time, from the left"): (GREEN, "s"),
    ("causal", "causal Stage B, one step"): (BLUE, "D"),
}


def draw_toys():
    """What the draws of a decoder lose on each toy, against the toy's total correlation; means of the seeds."""
    log = (RESULTS / "theorem" / "toys.txt").read_text()
    toys = defaultdict(list)
    for part in re.split(r"^== ", log, flags=re.M)[1:]:
        toys[part.split()[0]].append(part)
    tc = [float(re.search(r"TC = ([\d.]+)", parts[0])[1]) for parts in toys.values()]
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    # draws of each token by itself cannot be below this line
    ax.plot([0, max(tc)], [0, max(tc)], color=INK, linestyle=":", label="TC, the least for a product")
    for (run, decoder), (color, mark) in ON_TOYS.items():
        of_seed = re.compile(rf"^-- {run}$.*?^{decoder} +([\d.]+)", re.M | re.S)
        lost = [np.mean([float(of_seed.search(part)[1]) for part in parts]) for parts in toys.values()]
        # a ring, so that what lies on the same point is seen inside of it
        fill = "none" if mark == "o" else color
        ax.plot(tc, lost, mark, color=color, label=decoder, markerfacecolor=fill, markersize=9 if mark == "o" else 6)
    for x, toy in zip(tc, toys, strict=True):
        below = toy in ("permutation", "sum")  # their TC is nearly that of modes, and of gaussian
        ax.annotate(toy, (x, x), xytext=(6, -14) if below else (-6, 6), textcoords="offset points",
                    ha="left" if below else "right", color=INK, fontsize=9)  # fmt: skip
    ax.set(xlabel="total correlation (nats)", xlim=(0, 6), ylim=(-0.3, 8.6))
    ax.set_title("KL(truth || drawn), nats", loc="left")
    ax.legend(frameon=False, labelcolor="linecolor", loc="upper left")
    return figure


# --- text
# system and rule -> the name, its colour, and how many points above its dot it is written
DRAWN = {
    ("base", "all at once"): ("base, all at once", ORANGE, -8),
    ("base", "above 0.7"): ("base, above 0.7", ORANGE, 13),
    ("base", "one at a time"): ("base, one at a time", GREEN, 2),
    ("paper", "all at once"): ("paper, Stage B, all at once", PURPLE, 6),
    ("causal", "whole blocks"): ("causal, whole blocks", BLUE, 0),
    ("causal", "above 0.7"): ("causal, run above 0.7", BLUE, 0),
    ("left", "one at a time"): ("a left-to-right model", INK, -8),
}


def draw_text():
    """The bits that a byte of drawn text costs another model (experiments/text.py), against forwards a byte; means of
    the seeds. A draw has 200 bytes."""
    found = defaultdict(list)
    for r in read_lines(RESULTS / "text" / "draws.jsonl", {"system": str, "rule": str, "bits": float}):
        found[r["system"], r["rule"]].append((r.get("forwards", 0), r["bits"]))
    figure, ax = plt.subplots(figsize=(WIDTH, 4))
    for key, (name, color, above) in DRAWN.items():
        x, y = np.mean(found[key], axis=0)
        ax.plot(x, y, "o", color=color)
        ax.annotate(name, (x, y), xytext=(9, above), textcoords="offset points", color=color, va="center")
    own = np.mean([bits for _, bits in found["text", ""]])
    ax.axhline(own, color=INK, linestyle=":")
    ax.annotate("the text itself", (0.02, own), xytext=(0, -11), textcoords="offset points", color=INK)
    ticks = (2, 2.5, 3, 4, 5, 6, 8)
    ax.set(xlim=(0, 1.85), xlabel="forwards a byte, everything counted", yscale="log")
    ax.set_yticks(ticks, map(str, ticks))
    ax.minorticks_off()
    ax.set_title("bits a byte of the draws, by another model", loc="left")
    return figure


# name -> its place, and the function that draws it
PICTURES = {
    "tiny": ("assets/tiny.svg", draw_tiny),
    "names": ("results/names/names.svg", draw_names),
    "paper_tables": ("results/paper_tables/gates.svg", draw_paper_tables),
    "speed": ("results/speed/speed.svg", draw_speed),
    "sixteen_b": ("results/sixteen_b/prices.svg", draw_sixteen_b),
    "toys": ("results/theorem/toys.svg", draw_toys),
    "text": ("results/text/text.svg", draw_text),
}


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"some of {', '.join(PICTURES)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder to draw them in (default: the repository)")
    args = parser.parse_args()
    for name in args.pictures:
        if name not in PICTURES:
            fail(f"there is no picture {name}: the pictures are {', '.join(PICTURES)}")
    if plt is None:
        fail("pictures need matplotlib: pip install matplotlib")
    plt.rcParams.update(STYLE)
    for name in args.pictures or PICTURES:
        place, draw = PICTURES[name]
        text = svg(draw())
        replace_file(args.out / place, lambda path, text=text: path.write_text(text, encoding="utf-8"))
        plt.close()
        print(f"wrote {printable(args.out / place)}")


if __name__ == "__main__":
    main()
