"""The figures of the results pages, drawn with matplotlib from the numbers beside them; and the loss of a run.
(assets/step.svg is written by hand.) Each SVG is white or dark as the reader's system is.

    python -m tools.plots                    # all figures, each to its place
    python -m tools.plots text               # one of them
    python -m tools.plots log out/names      # the loss of a run, to out/names/loss.svg
"""

import io
import os
from collections import defaultdict
from pathlib import Path

import numpy as np

from lib.util import Parser, checked_entry, command, fail, printable, read_lines, replace_file

# a notebook's backend is not there outside of it
os.environ["MPLBACKEND"] = "svg"
try:
    import matplotlib
    import matplotlib.pyplot as plt
except ImportError:
    plt = None

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

# each colour on white -> the colour in its place on GitHub's dark page; no colour is readable on both
DARK = {
    "#ffffff": "#0d1117",
    "#59636e": "#9ba5b1",
    "#0a5ca8": "#79bcff",
    "#a84300": "#ffab6e",
    "#1a7f4b": "#57d197",
    "#8a3fa0": "#d6a2e8",
}
PAGE, INK, BLUE, ORANGE, GREEN, PURPLE = DARK
IN_INK = ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"]
STYLE = dict.fromkeys(IN_INK, INK) | {
    "svg.hashsalt": "cocommit",  # the same picture from the same numbers, byte for byte
    "svg.fonttype": "none",  # text stays text
    "font.size": 11,
    "figure.facecolor": PAGE,
    "figure.constrained_layout.use": True,
    "axes.facecolor": "none",
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "lines.linewidth": 2,
}
WIDTH = 5.4  # inches: shown 400 pixels wide, a figure's letters are as large as the page's


def svg(figure) -> str:
    """The picture as text, with the colours of a dark page for readers who have one."""
    buffer = io.StringIO()
    # the picture is as large as what is drawn, so that no name is cut at an edge
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)
    style = "</metadata>\n<style>@media (prefers-color-scheme: dark) {"
    for light, dark in DARK.items():
        for use in ("fill", "stroke"):
            style += f'\n[style*="{use}: {light}"] {{ {use}: {dark} !important }}'
    return buffer.getvalue().replace("</metadata>", style + "\n}</style>", 1)


# --- text
# system and row of draws.jsonl -> those of bits.jsonl, the colour, and how many points above the dot the name stands
ON_TEXT = {
    "base: all at once": ("base, 2,000 steps: Stage A", ORANGE, 10),
    "paper: all at once": ("paper, 300 steps: Stage B", PURPLE, -12),
    "causal: all at once": ("causal, 3,000 steps: Stage B", BLUE, -12),
    "base: one at a time": ("base, 2,000 steps: one at a time", GREEN, 10),
    "left-to-right, 2 layers: one at a time": ("left-to-right, 2 layers: one at a time", INK, 10),
    "left-to-right, 6 layers: one at a time": ("left-to-right, 6 layers: one at a time", INK, -26),
}


def draw_text():
    """What a byte of held-out text costs, against the time that a byte takes; means of the seeds."""
    found = defaultdict(list)
    for name, keys in (("bits", ("bits",)), ("draws", ("ms_16", "ms_1"))):
        for r in read_lines(RESULTS / "text" / f"{name}.jsonl", {"system": str, "row": str}):
            found[name, f"{r['system']}: {r['row']}"].append([r.get(key) for key in keys])

    figure, ax = plt.subplots(figsize=(WIDTH, 3.4))
    for name, (in_bits, color, above) in ON_TEXT.items():
        together, alone = np.mean(found["draws", name], axis=0)
        [bits] = np.mean(found["bits", in_bits], axis=0)
        ax.plot([together, alone], [bits, bits], color=color, linewidth=1)
        ax.plot(alone, bits, "o", color=color)
        ax.plot(together, bits, "o", color=color, markerfacecolor=PAGE)
        label = name.split(": one")[0] if name.startswith("left") else name.replace(":", ",")
        ax.annotate(label, (alone, bits), xytext=(6, above), textcoords="offset points", color=color, va="center",
                    ha="right")  # fmt: skip
    ax.set(xscale="log", xlim=(0.12, 9), ylim=(1.6, 4.9), xlabel="ms a byte: one text (dot), 16 together (ring)")
    ax.set_xticks((0.2, 0.5, 1, 2, 5), ("0.2", "0.5", "1", "2", "5"))
    ax.minorticks_off()
    ax.grid(axis="y")
    ax.set_title("bits a byte of held-out text", loc="left")
    return figure


# name -> its place, and the function that draws it
PICTURES = {
    "text": ("results/text/text.svg", draw_text),
}


# --- the loss of a run
def draw_log(folder: Path):
    """The loss of each logged step and, on held-out rows, the cross-entropies of both stages at masks."""
    path = folder / "log.jsonl"
    records = read_lines(path, {"step": int}, "log of a run")
    steps = {r["step"] + 1: checked_entry(r, "loss", float, path) for r in records if "loss" in r}
    if not steps:
        fail(f"{path} has no steps yet")
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    ax.plot(steps.keys(), steps.values(), color=INK, linewidth=1, label="loss (Eq. 1)")
    for term, color in {"m2t_A": ORANGE, "m2t_B": BLUE}.items():
        held_out = [r for r in records if r.get("val") and term in r]  # a model without a Stage B has no m2t_B
        if held_out:
            points = [(r["step"], checked_entry(r, term, float, path)) for r in held_out]
            ax.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=f"{term}, held out")
    ax.set(xlabel="step", ylim=(0, None))
    ax.set_title("nats a token", loc="left")
    ax.grid(axis="y")
    ax.legend(frameon=False, labelcolor="linecolor")
    return figure


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"some of {', '.join(PICTURES)} (default: all), or "
        "log and a run's folder")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder to draw them in (default: the repository)")
    args = parser.parse_args()
    if plt is None:
        fail("pictures need matplotlib: pip install matplotlib")
    matplotlib.rcdefaults()  # not what the user's matplotlibrc says, which may need TeX
    plt.rcParams.update(STYLE)

    names = args.pictures or list(PICTURES)
    if names[0] == "log" and len(names) == 2:
        folder = Path(names[1])
        drawn = {folder / "loss.svg": lambda: draw_log(folder)}
    elif set(names) <= PICTURES.keys():
        drawn = {args.out / place: draw for place, draw in map(PICTURES.get, names)}
    else:
        fail(f"the pictures are {', '.join(PICTURES)}; or give log and a run's folder")
    for path, draw in drawn.items():
        text = svg(draw())
        replace_file(path, lambda path, text=text: path.write_text(text, encoding="utf-8"))
        print(f"wrote {printable(path)}")


if __name__ == "__main__":
    main()
