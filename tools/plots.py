"""The figures of the results pages, drawn with matplotlib from the numbers that are committed beside them.

    python -m tools.plots pays --out results/pays/pays.svg

    pays          existing names against forwards per token                  results/pays/records.jsonl.gz
    text          quality of Python text against forwards per token          results/text/records.jsonl.gz
    joint         what Stage B writes in one step, toy by toy                results/theorem/joint.json
    paper_tables  the paper's Table 2: thresholds, Stage B on and off        results/paper_tables/paper_tables.json
    dial          error of one step against total correlation                results/theorem/dial.json
    tc            dependence inside committed bundles                        results/tc/tc.json
    cache         the cache's gain against the length of the context         results/speed/log.txt

Text stays text in the SVGs, and is of a grey that is readable on white and on black pages.
"""

import json
import math
import re
from pathlib import Path

import numpy as np

from beyond import report, seeds
from beyond.report import System, Unit
from lib.util import Parser, command, fail, replace_file

# R prompts, C clusters of equal prompts, W resamples, the first of which is the sample itself

RESULTS = Path(__file__).parents[1] / "results"

# colours that are readable on white and on GitHub's dark page
INK = "#737d88"
BLUE = "#3d8bd4"
ORANGE = "#d9772b"
GREEN = "#2f9e6e"
PURPLE = "#9a6dd7"
GREY = "#8b949e"
STYLE = {
    "svg.hashsalt": "cocommit",  # the same picture from the same numbers, byte for byte
    "svg.fonttype": "none",  # text stays text
    "font.size": 10,
    "savefig.transparent": True,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


# --- the canvas
def canvas(path: Path, columns: int = 1):
    """(matplotlib's pyplot, axes), or one line about its absence or about a kind of file that it cannot draw."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams.update(STYLE)
        import matplotlib.pyplot as plt
    except ImportError:
        fail("pictures need matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(1, columns, figsize=(1.5 + 4.5 * columns, 4), constrained_layout=True)
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        fail(f"{path}: the name of a picture must end in one of {', '.join(kinds)}")
    return plt, axes


def save(plt, path: Path) -> None:
    """Write the picture that pyplot holds to the file that the user named, whole or not at all."""
    date = {}
    if path.suffix == ".svg":
        date = {"metadata": {"Date": None}}
    replace_file(path, lambda p: plt.savefig(p, format=path.suffix[1:], **date))
    plt.close("all")
    print(f"wrote {path}")


def name_lines(ax, ends: dict[str, tuple[float, float, str]]) -> None:
    """Each line's name at its end (x, y, colour), pushed up where two would overlap."""
    bottom, top = ax.transData.transform([(0, end) for end in ax.get_ylim()])[:, 1]
    lowest = 0.0  # in heights of the panel
    for name, (x, y, color) in sorted(ends.items(), key=lambda end: end[1][1]):
        height = (ax.transData.transform((x, y))[1] - bottom) / (top - bottom)
        place = max(height, lowest)
        lowest = place + 0.055
        ax.annotate(name, (x, place), xycoords=("data", "axes fraction"), xytext=(5, 0), textcoords="offset points",
                    color=color, va="center", fontsize=9, annotation_clip=False)  # fmt: skip


def read_figure(path: str) -> dict:
    """The numbers of a figure that has no other records, by their place in results/."""
    return json.loads((RESULTS / path).read_text())


def whiskers(drawn: np.ndarray) -> tuple[float, list]:
    """(estimate, its distances to both ends of 95 %) of resamples (W,), the first of which is the sample itself."""
    low, high = np.nanquantile(drawn[1:], [0.025, 0.975])
    return drawn[0], [[max(0, drawn[0] - low)], [max(0, high - drawn[0])]]


# --- names and text: the records of beyond/sweep.py

# who is drawn, and how: four lines are as many as one can tell apart; the page's tables have the rest
LEAD = "joint head"
LOOKS = {
    LEAD: {"color": BLUE, "linestyle": "-"},
    "distilled": {"color": ORANGE, "linestyle": "--"},
    "base": {"color": INK, "linestyle": "-."},
    "left to right": {"color": PURPLE, "linestyle": ":"},
}

# forwards a token that the figures show
PAYS_BUDGETS = np.arange(0.3, 1.61, 0.05).round(2)
TEXT_BUDGETS = np.arange(0.15, 1.06, 0.05).round(2)


def read_pays(path: Path) -> tuple[dict[str, System], np.ndarray]:
    """The systems of the greedy records, and each prompt's beginning, (R,)."""
    clusters, records = report.load(path)
    greedy = [r for r in records if r["temperature"] == 0]
    return report.measured(greedy, clusters, "exist", Unit("token", records[0]))


def within_limits(systems: dict[str, System], cluster: np.ndarray, limits: np.ndarray) -> tuple[dict, dict]:
    """System -> its mean within each of these budgets of `all`, (budgets, W); of those with one setting, which have no
    dial: system -> (what it costs, its mean (W,))."""
    draws = seeds.draw(cluster)
    lines = {}
    points = {}
    for name in LOOKS.keys() & systems.keys():
        of = systems[name]
        sums = seeds.by_beginning(of.values, cluster)
        if len(of.labels) == 1:
            points[name] = (of.figures["all"].mean(), seeds.shares(sums, draws)[:, 0])
        else:
            lines[name] = seeds.within_budgets(sums, {"all": of.figures["all"]}, limits, draws)["all"]
    return lines, points


def draw_systems(axes, systems: dict[str, System], cluster: np.ndarray, limits: np.ndarray, scale: float = 1) -> None:
    """On the left each system's mean within each budget of forwards; on the right what the joint head has more, paired,
    times scale. Bands are 95 %. Systems with a dial are lines, and the others points."""
    if LEAD not in systems:
        fail(f"the records have no system {LEAD}, whose lead is drawn")
    lines, points = within_limits(systems, cluster, limits)
    ends = [{}, {}]
    for name, drawn in lines.items():
        ends[0][name] = band(axes[0], limits, drawn, name)
        if name != LEAD:
            ends[1][f"over {name}"] = band(axes[1], limits, scale * (lines[LEAD] - drawn), name)
    for name, (cost, drawn) in points.items():
        lead = scale * (lines[LEAD][dearest(limits, cost)] - drawn)
        for ax, label, of_ax in ((axes[0], name, drawn), (axes[1], f"over {name}", lead)):
            mean, error = whiskers(of_ax)
            color = LOOKS[name]["color"]
            ax.errorbar(cost, mean, yerr=error, fmt="s", color=color, capsize=3)
            ax.annotate(label, (cost, mean), xytext=(7, -3), textcoords="offset points", color=color, fontsize=9)

    axes[1].axhline(0, color=INK, linewidth=0.8)
    for ax, names in zip(axes, ends, strict=True):
        ax.set(xlabel="at most so many forwards per token, everything counted", xlim=(limits[0], limits[-1]))
        ax.grid(axis="y")
        name_lines(ax, names)


def band(ax, limits: np.ndarray, drawn: np.ndarray, name: str) -> tuple[float, float, str]:
    """A line over budgets, and a band of 95 % of resamples (budgets, W); nothing where all settings cost more. Some
    resamples have seeds that can pay for nothing: they are left out, as seeds.interval does. -> where it ends."""
    paid = ~np.isnan(drawn[:, 0])
    low, high = np.nanquantile(drawn[paid, 1:], [0.025, 0.975], axis=1)
    ax.plot(limits[paid], drawn[paid, 0], **LOOKS[name])
    ax.fill_between(limits[paid], low, high, color=LOOKS[name]["color"], alpha=0.15, linewidth=0)
    return limits[paid][-1], drawn[paid, 0][-1], LOOKS[name]["color"]


def dearest(limits: np.ndarray, cost: float) -> int:
    """Which is the dearest budget that a point of this cost can pay; the first, if it can pay none."""
    at = int(np.searchsorted(limits, cost + 1e-9, side="right")) - 1
    return max(at, 0)


def draw_pays(path: Path) -> None:
    """Existing names within each budget of forwards."""
    plt, axes = canvas(path, 2)
    systems, cluster = read_pays(RESULTS / "pays" / "records.jsonl.gz")
    axes[0].set(ylabel="share of completions that exist", ylim=(0, 1))
    axes[1].set(ylabel="lead of the joint head (points)")
    draw_systems(axes, systems, cluster, PAYS_BUDGETS, scale=100)
    save(plt, path)


def draw_text(path: Path) -> None:
    """The score of what was written, within each budget of forwards."""
    plt, axes = canvas(path, 2)
    clusters, records = report.load(RESULTS / "text" / "records.jsonl.gz")
    systems, cluster = report.measured(records, clusters, "score")
    axes[0].set(ylabel="score (nats a token)")
    axes[1].set(ylabel="lead of the joint head (nats a token)")
    draw_systems(axes, systems, cluster, TEXT_BUDGETS)
    save(plt, path)


# --- toys, the paper's tables, bundles
def draw_joint(path: Path) -> None:
    """Shares of contexts, means and worst of three seeds: possible answers on the left, the likeliest on the right."""
    plt, axes = canvas(path, 2)
    rows = read_figure("theorem/joint.json")["rows"]
    clean = {(r["toy"], r["n"]): r for r in rows if r["target"] == "clean"}
    chain = list(reversed([r for r in rows if r["target"] == "chain"]))
    for ax, measure in zip(axes, ("B coherent", "B mode"), strict=True):
        for row, r in enumerate(chain):
            kinds = [("Stage B, chain target", BLUE, r[measure], 0)]
            plain = clean.get((r["toy"], r["n"]))
            if plain is not None:  # three layers were trained with the chain target alone
                kinds += [("Stage B, clean target", ORANGE, plain[measure], -0.15)]
            if measure == "B coherent":
                kinds += [("Stage A", GREY, r["A coherent"], 0.15)]
            for label, color, (mean, worst), offset in kinds:
                name = label if row == 0 else None
                ax.errorbar(mean, row + offset, xerr=[[mean - worst], [0]], fmt="o", color=color, label=name)
        ax.set(xlim=(-0.05, 1.05), ylim=(-0.6, len(chain) - 0.4))
        ax.grid(axis="x")
    axes[0].set_yticks(range(len(chain)), [f"{r['toy']}, n = {r['n']}" for r in chain])
    axes[1].set_yticks(range(len(chain)), [])
    axes[0].set(xlabel="contexts whose answer is possible at all")
    axes[1].set(xlabel="contexts with the likeliest answer")
    axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    save(plt, path)


def draw_paper_tables(path: Path) -> None:
    """Accuracy by threshold: the toy's on the left, the paper's GSM8K on the right."""
    plt, axes = canvas(path, 2)
    rows = read_figure("paper_tables/paper_tables.json")["rows"]
    looks = {"released": (GREY, "o", "without adapters"), "Stage B off": (ORANGE, "s", "adapters, Stage B off")}
    looks["Stage B on"] = (BLUE, "D", "the same adapters, Stage B on")
    gates = sorted({r["tau_m2t"] for r in rows})
    for ax, measure in zip(axes, ("coherent", "GSM8K"), strict=True):
        for shift, (weights, (color, marker, label)) in zip((-0.12, 0, 0.12), looks.items(), strict=True):
            value = {r["tau_m2t"]: r[measure] for r in rows if r["weights"] == weights}
            x = np.arange(len(gates)) + shift
            error = None
            if measure == "GSM8K":  # one standard error of an accuracy, of 1,319 answers
                error = [100 * math.sqrt(v / 100 * (1 - v / 100) / 1319) for v in map(value.get, gates)]
            y = [value[gate] for gate in gates]
            ax.errorbar(x, y, error, fmt=marker, color=color, capsize=2, label=label)
        ax.set_xticks(range(len(gates)), [f"{gate:g}" for gate in gates])
        ax.set(xlabel="tau_m2t", xlim=(-0.5, len(gates) - 0.5))
        ax.grid(axis="y")
    axes[0].set(ylabel="contexts whose answer is possible", title="the toy modes, here", ylim=(0, 1.05))
    axes[1].set(ylabel="GSM8K accuracy, %", title="16B, as the paper prints it")
    axes[0].legend(loc="lower right")
    save(plt, path)


def draw_dial(path: Path) -> None:
    """On the left each one-step decoder's error against TC, one point a checkpoint; on the right the first one's
    training. points: (TC, errors) of each; floor: the entropy H of the first one's toy."""
    plt, (dial, training) = canvas(path, 2)
    figure = read_figure("theorem/dial.json")
    points = sorted(figure["points"], key=lambda point: point[0])
    x = [tc for tc, _ in points]
    colors = (GREY, BLUE, GREEN)
    ends = {"TC, the least for any product": (x[-1], x[-1], INK)}
    dial.plot([0, x[-1]], [0, x[-1]], color=INK, linestyle=":")
    for decoder, style, color in zip(points[0][1], ("o-", "x--", "s-"), colors, strict=True):  # A and B lie together
        y = [error[decoder] for _, error in points]
        dial.plot(x, y, style, color=color)
        ends[decoder] = (x[-1], y[-1], color)
    dial.set(xlabel="total correlation (nats)", ylabel="KL(p || decoder) (nats)", title=f"the toy {figure['toy']}")
    name_lines(dial, ends)

    curve = figure["curve"]
    last = curve[-1]["step"]
    tc = figure["points"][0][0]
    ends = {}
    for stage, style, color in (("A", "-", GREY), ("B", "--", BLUE)):
        values = [r[f"block_{stage}"] for r in curve]
        training.plot([r["step"] for r in curve], values, style, color=color)
        ends[f"Stage {stage}"] = (last, values[-1], color)
    for floor, name in ((figure["floor"] + tc, "H + TC: best factorised"), (figure["floor"], "H: best joint")):
        training.axhline(floor, color=INK, linestyle=":")
        ends[name] = (last, floor, INK)
    training.set(
        xlim=(0, last), xlabel="step", ylabel="loss of the whole answer in one step (nats)", title="between the floors"
    )
    name_lines(training, ends)
    save(plt, path)


def draw_tc(path: Path) -> None:
    """Total correlation and mismatch of committed bundles by the lowest confidence in them: each seed a point, their
    mean a dash, bars between the mean bounds."""
    plt, ax = canvas(path)
    trained = read_figure("tc/tc.json")["seeds"]  # a list of bins for each
    bins = trained[0]
    for name, color, shift in (("TC", BLUE, -0.1), ("mismatch", ORANGE, 0.1)):
        x = np.arange(len(bins)) + shift
        y = np.array([[b[name] for b in of_seed] for of_seed in trained])  # (seeds, bins)
        bounds = np.array([[b[f"{name} between"] for b in of_seed] for of_seed in trained]).mean(0)  # (bins, 2)
        mean = y.mean(0)
        error = [mean - bounds[:, 0], bounds[:, 1] - mean]
        label = {"TC": "dependence (TC)", "mismatch": "wrong marginals (mismatch)"}[name]
        ax.errorbar(x, mean, error, fmt="_", markersize=10, color=color, capsize=2, label=f"{label}, and its bounds")
        ax.plot(np.broadcast_to(x, y.shape), y, "o", markersize=3, color=color)
    ax.set_xticks(range(len(bins)), [b["lowest"].replace(" to ", "–") for b in bins], fontsize=8)
    ax.set(xlabel="lowest confidence in the bundle", ylabel="nats a bundle", ylim=(0, None))
    ax.grid(axis="y")
    ax.legend()
    save(plt, path)


# --- speed
def read_cache(path: Path) -> dict[tuple[str, str], list[list[float]]]:
    """(rows, model) -> [context, uncached / cached] of each line of the tables that tools/bench.py printed."""
    found, lines = {}, None
    for line in path.read_text().splitlines():
        head = re.match(r"Decoding (\d+) at once, cached against not: (.*?) \(\d+ layers", line)
        row = re.match(r" +(\d+) +([\d.]+) +([\d.]+) +[\d.]+x", line)
        if head:
            lines = found.setdefault((head[1], head[2]), [])
        elif row and lines is not None:
            lines.append([float(row[1]), float(row[3]) / float(row[2])])
    return found


def draw_cache(path: Path) -> None:
    """How many times as long a step takes without the cache."""
    plt, ax = canvas(path)
    names = {("1", "text"): "6 layers of 128", ("16", "text"): "16 rows, 6 layers of 128"}
    names |= {("1", "20 layers"): "20 layers of 128", ("1", "20 layers, wide"): "20 layers of 512"}
    found = read_cache(RESULTS / "speed" / "log.txt")
    ends = {}
    for key, color in zip(names, (BLUE, GREEN, ORANGE, PURPLE), strict=True):
        context, ratio = np.array(found[key]).T
        ax.plot(context, ratio, color=color, marker="o", markersize=4)
        ends[names[key]] = (context[-1], ratio[-1], color)
    ax.axhline(1, color=INK, linewidth=0.8)
    ax.set(xlabel="tokens before the block", ylabel="time of a step, without / with the cache", yscale="log")
    ax.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    ax.minorticks_off()
    ax.grid(axis="y")
    name_lines(ax, ends)
    save(plt, path)


PICTURES = {
    "pays": draw_pays,
    "text": draw_text,
    "joint": draw_joint,
    "paper_tables": draw_paper_tables,
    "dial": draw_dial,
    "tc": draw_tc,
    "cache": draw_cache,
}


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("picture", choices=list(PICTURES), help="what to draw")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write, .svg, .png or .pdf")
    args = parser.parse_args()
    PICTURES[args.picture](args.out)


if __name__ == "__main__":
    main()
