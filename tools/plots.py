"""The figures of the results pages, drawn with matplotlib from the numbers that are committed beside them.

    python -m tools.plots pays --out results/pays/pays.svg

    pays          existing names against forwards per token, every system    results/pays/records.jsonl.gz
    text          quality of Python text against forwards per token          results/text/records.jsonl.gz
    joint         what Stage B writes in one step, toy by toy                results/joint/figure.json
    paper_tables  the paper's Table 2: thresholds, Stage B on and off        results/paper_tables/figure.json
    cache         the cache's gain against the length of the context         results/speed/log.txt
    step_time     where the time of a decoding step goes                     results/speed/figure.json
    dial          error of one step against total correlation                results/dial/figure.json
    tc            dependence inside committed bundles                        results/tc/figure.json

The dial can be measured anew, from checkpoints of one toy: on the left each one-step decoder's error against total
correlation, one point a checkpoint; on the right the first checkpoint's training.

    python -m tools.plots dial --data copy --ckpt out/dial-0.1 out/dial-0.4 out/dial-1.0 --out dial.svg

Text stays text in the SVGs, and is of a grey that is readable on white and on black pages.
"""

import json
import math
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from beyond import pays, seeds, text
from beyond.pays import System
from checkpoint import load_model
from evaluate import load_task, one_step_table
from lib import toy
from lib.toy import Toy
from lib.util import Parser, fail, pick_device, replace_file
from model import Model

# N contexts, S support tuples, m answer positions, P settings, R prompts, C clusters of equal prompts, W resamples

RESULTS = Path(__file__).parents[1] / "results"

# colours that are readable on white and on GitHub's dark page; one system has one colour in every figure
INK = "#737d88"
BLUE = "#3d8bd4"
ORANGE = "#d9772b"
GREEN = "#2f9e6e"
PURPLE = "#9a6dd7"
RED = "#d1495b"
GREY = "#8b949e"
GOLD = "#b8942a"
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
    "axes.prop_cycle": f"cycler('color', {[BLUE, ORANGE, GREEN, PURPLE, RED, GREY]})",
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


# ---------------------------------------------------------------------------------------------------------------------
# the canvas


def canvas(path: Path, columns: int = 1, size: tuple[float, float] | None = None):
    """(matplotlib's pyplot, axes), or one line about its absence or about a kind of file that it cannot draw; size:
    width and height in inches, where 4.5 a column and 4 are not enough."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams.update(STYLE)
        import matplotlib.pyplot as plt
    except ImportError:
        fail("pictures need matplotlib: pip install matplotlib")
    if size is None:
        size = (1 + 4.5 * columns, 4)
    figure, axes = plt.subplots(1, columns, figsize=size, constrained_layout=True)
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


def read_figure(page: str) -> dict:
    """The numbers of a page that has no other records: results/<page>/figure.json."""
    return json.loads((RESULTS / page / "figure.json").read_text())


def whiskers(drawn: np.ndarray) -> tuple[float, list]:
    """(estimate, its distances to both ends of 95 %) of resamples (W,), the first of which is the sample itself."""
    low, high = np.nanquantile(drawn[1:], [0.025, 0.975])
    return drawn[0], [[max(0, drawn[0] - low)], [max(0, high - drawn[0])]]


# ---------------------------------------------------------------------------------------------------------------------
# names and text: the records of beyond/pays.py and of beyond/text.py

LEAD = "joint head"
SYSTEM_COLORS = {"base": GREY, LEAD: BLUE, "distilled": ORANGE, "joint head on the distilled": GREEN}
OTHER_COLORS = (PURPLE, GOLD, RED, INK)
LINES = ("-", "--", "-.", ":")  # one after the other, so that lines can be told apart without colours

# forwards a token that the figures show
PAYS_BUDGETS = np.arange(0.3, 1.61, 0.05).round(2)
TEXT_BUDGETS = np.arange(0.15, 1.06, 0.05).round(2)


def read_pays(path: Path) -> tuple[dict[str, System], np.ndarray]:
    """The systems of the greedy records, and each prompt's beginning, (R,)."""
    clusters, records = pays.load(str(path))
    greedy = [r for r in records if r["temperature"] == 0]
    cluster = np.array(clusters["held out"] + clusters["trained"])
    return pays.by_system(greedy, records[0]), cluster


def within_limits(systems: dict[str, System], cluster: np.ndarray, limits: np.ndarray) -> tuple[dict, dict]:
    """System -> its mean within each of these budgets of `all`, (budgets, W); of those with one setting, which have no
    dial: system -> (what it costs, its mean (W,))."""
    draws = seeds.draw(cluster)
    lines = {}
    points = {}
    for name, of in systems.items():
        sums = seeds.by_beginning(of.values, cluster)
        if len(of.labels) == 1:
            points[name] = (of.figures["all"].mean(), seeds.shares(sums, draws)[:, 0])
        else:
            lines[name] = seeds.within_budgets(sums, {"all": of.figures["all"]}, limits, draws)["all"]
    return lines, points


def system_styles(names: list[str]) -> dict[str, dict]:
    """Each system's colour and line."""
    others = iter(OTHER_COLORS * len(names))
    styles = {}
    for k, name in enumerate(names):
        color = SYSTEM_COLORS.get(name)
        if color is None:
            color = next(others)
        styles[name] = {"color": color, "linestyle": LINES[k % len(LINES)]}
    return styles


def draw_systems(axes, systems: dict[str, System], cluster: np.ndarray, limits: np.ndarray, scale: float = 1) -> None:
    """On the left each system's mean within each budget of forwards; on the right what the joint head has more, paired,
    times scale. Bands are 95 %."""
    if LEAD not in systems:
        fail(f"the records have no system {LEAD}, whose lead is drawn")
    means, more = axes
    lines, points = within_limits(systems, cluster, limits)
    styles = system_styles(list(systems))

    # systems with a dial are lines, and the others points
    for name, drawn in lines.items():
        band(means, limits, drawn, name, styles[name])
        if name != LEAD:
            band(more, limits, scale * (lines[LEAD] - drawn), name, styles[name])
    for name, (cost, drawn) in points.items():
        mean, error = whiskers(drawn)
        color = styles[name]["color"]
        means.errorbar(cost, mean, yerr=error, fmt="s", color=color, capsize=3, label=name)
        lead, error = whiskers(scale * (lines[LEAD][dearest(limits, cost)] - drawn))
        more.errorbar(cost, lead, yerr=error, fmt="s", color=color, capsize=3)

    means.legend(loc="lower right")
    more.axhline(0, color=INK, linewidth=0.8)
    for ax in axes:
        ax.set(xlabel="at most so many forwards per token, everything counted", xlim=(limits[0], limits[-1]))
        ax.grid(axis="y")


def band(ax, limits: np.ndarray, drawn: np.ndarray, label: str, style: dict) -> None:
    """A line over budgets, and a band of 95 % of resamples (budgets, W); nothing where all settings cost more. Some
    resamples have seeds that can pay for nothing: they are left out, as seeds.interval does."""
    paid = ~np.isnan(drawn[:, 0])
    low, high = np.nanquantile(drawn[paid, 1:], [0.025, 0.975], axis=1)
    ax.plot(limits[paid], drawn[paid, 0], label=label, **style)
    ax.fill_between(limits[paid], low, high, color=style["color"], alpha=0.15, linewidth=0)


def dearest(limits: np.ndarray, cost: float) -> int:
    """Which is the dearest budget that a point of this cost can pay; the first, if it can pay none."""
    at = int(np.searchsorted(limits, cost + 1e-9, side="right")) - 1
    return max(at, 0)


def draw_pays(path: Path) -> None:
    """Existing names within each budget of forwards."""
    plt, axes = canvas(path, 2)
    systems, cluster = read_pays(RESULTS / "pays" / "records.jsonl.gz")
    draw_systems(axes, systems, cluster, PAYS_BUDGETS, scale=100)
    axes[0].set(ylabel="share of completions that exist", ylim=(0, 1))
    axes[1].set(ylabel="lead of the joint head (points)")
    save(plt, path)


def draw_text(path: Path) -> None:
    """The score of what was written, within each budget of forwards."""
    plt, axes = canvas(path, 2)
    clusters, records = pays.load(str(RESULTS / "text" / "records.jsonl.gz"), text.FIGURES)
    systems, cluster = text.measured_by("score", records, clusters["documents"])
    draw_systems(axes, systems, cluster, TEXT_BUDGETS)
    axes[0].set(ylabel="score (nats a token)")
    axes[1].set(ylabel="lead of the joint head (nats a token)")
    save(plt, path)


# ---------------------------------------------------------------------------------------------------------------------
# toys, the paper's tables, bundles


def draw_joint(path: Path) -> None:
    """Shares of contexts, means and worst of three seeds: possible answers on the left, the likeliest on the right."""
    plt, axes = canvas(path, 2)
    rows = read_figure("joint")["rows"]
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
    rows = read_figure("paper_tables")["rows"]
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


def draw_tc(path: Path) -> None:
    """Total correlation and mismatch of committed bundles by the lowest confidence in them: each seed a point, their
    mean a dash, bars between the mean bounds."""
    plt, ax = canvas(path)
    trained = read_figure("tc")["seeds"]  # a list of bins for each
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


# ---------------------------------------------------------------------------------------------------------------------
# speed


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
    names = {("1", "text"): "6 layers of 128, one row", ("16", "text"): "6 layers of 128, 16 rows"}
    names |= {("1", "20 layers"): "20 layers of 128, one row", ("1", "20 layers, wide"): "20 layers of 512, one row"}
    found = read_cache(RESULTS / "speed" / "log.txt")
    for key, color in zip(names, (BLUE, GREEN, ORANGE, PURPLE), strict=True):
        context, ratio = np.array(found[key]).T
        ax.plot(context, ratio, color=color, marker="o", markersize=4, label=names[key])
    ax.axhline(1, color=INK, linewidth=0.8)
    ax.set(xlabel="tokens before the block", ylabel="time of a step, without / with the cache", yscale="log")
    ax.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    ax.minorticks_off()
    ax.grid(axis="y")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.08))
    save(plt, path)


def draw_step_time(path: Path) -> None:
    """Shares of the time of a step, and of one layer in it."""
    plt, ax = canvas(path, size=(10, 2.8))
    bars = read_figure("speed")["bars"]
    for row, bar in enumerate(reversed(bars)):
        total = sum(us for _, us in bar["parts"])
        left = 0.0
        for k, (name, us) in enumerate(bar["parts"]):
            share = 100 * us / total
            color = [BLUE, ORANGE, GREEN, PURPLE, RED, GREY, INK][k]
            ax.barh(row, share, left=left, color=color, alpha=0.45, height=0.45)
            # short parts have their names below one another
            lower = 0.33 + 0.14 * (k % 2)
            ax.text(left + share / 2, row - lower, f"{name} {us:,}", ha="center", va="center", fontsize=8)
            left += share
    ax.set_yticks(range(len(bars)), [f"{b['name']}\n{sum(us for _, us in b['parts']):,} µs" for b in reversed(bars)])
    ax.set(xlabel="% of its processor time", xlim=(0, 102), ylim=(-0.6, len(bars) - 0.6))
    save(plt, path)


# ---------------------------------------------------------------------------------------------------------------------
# the dial


def read_curve(path: Path) -> list[dict]:
    """The validations in a log of train.py --data TOY: step, and the loss of the whole answer in both stages."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as e:
        fail(f"the training curve needs the first checkpoint's log, but {path} cannot be read: {e}")
    curve = [r for r in records if "block_A" in r]
    if not curve:
        fail(f"{path} holds no validation on a toy (--eval_interval)")
    return curve


def chain_table(model: Model, task: Toy) -> Tensor:
    """q over the support when tokens are drawn one at a time, the most confident position first: (N, S) float64. A
    tuple has one path through the states: the position is a function of the state. Equal states are computed once."""
    N, S, m = task.support.shape
    c = torch.arange(N).repeat_interleave(S)
    x = task.support.reshape(N * S, m)
    z = torch.full_like(x, -1)
    log_q = torch.zeros(N * S, dtype=torch.float64)
    for _ in range(m):
        # the distinct states: a context, and what has been written of its answer
        states, back = torch.unique(torch.cat([c[:, None], z], dim=1), dim=0, return_inverse=True)
        log_p = toy.answer_log_probs(model, task, states[:, 0], states[:, 1:], 0)

        # the open position with the surest token is written next
        written = states[:, 1:] >= 0
        at = log_p.amax(-1).masked_fill(written, -math.inf).argmax(-1)[back]  # (N*S,)
        token = x.gather(1, at[:, None])
        log_q += log_p[back, at, token[:, 0]]
        z = z.scatter(1, at[:, None], token)
    return log_q.exp().view(N, S) * (task.prob > 0)


def errors(model: Model, task: Toy) -> dict[str, float]:
    """KL(p || q) of each decoder, exactly: nats, means over contexts."""
    tables = {
        "Stage A, one step": one_step_table(model, task, 0),
        "Stage B, one step": one_step_table(model, task, model.cfg.n_rounds),
        "one at a time": chain_table(model, task),
    }
    return {name: float(toy.kl(task.prob, q).mean()) for name, q in tables.items()}


def measure_dial(args: Namespace) -> dict:
    """What draw_dial draws, from checkpoints of one toy."""
    device = pick_device(args.device)
    curve = read_curve(Path(args.ckpt[0]) / "log.jsonl")
    tasks = [load_task(args.data, folder) for folder in args.ckpt]
    points = []
    for folder, task in zip(args.ckpt, tasks, strict=True):
        model = load_model(folder, device, torch.float32)
        points.append((float(task.tc().mean()), errors(model, task)))
    return {"toy": args.data, "points": points, "floor": float(tasks[0].h_joint().mean()), "curve": curve}


def draw_dial(path: Path, figure: dict) -> None:
    """points: (TC, errors) of each checkpoint; floor: the entropy H of the first one's toy; curve: see read_curve."""
    plt, (dial, training) = canvas(path, 2)
    points = sorted(figure["points"], key=lambda point: point[0])
    x = [tc for tc, _ in points]
    for decoder, style in zip(points[0][1], ("o-", "x--", "s-"), strict=True):  # Stages A and B lie on one another
        dial.plot(x, [error[decoder] for _, error in points], style, label=decoder)
    dial.plot([0, x[-1]], [0, x[-1]], color=INK, linestyle=":", label="TC: the least for any product")
    dial.set(xlabel="total correlation (nats)", ylabel="KL(p || decoder) (nats)", title=f"the toy {figure['toy']}")
    dial.legend()

    curve = figure["curve"]
    floor = figure["floor"]
    tc = figure["points"][0][0]
    for stage, style in (("A", "-"), ("B", "--")):
        values = [r[f"block_{stage}"] for r in curve]
        training.plot([r["step"] for r in curve], values, style, label=f"Stage {stage}")
    training.axhline(floor + tc, color=INK, linestyle=":", label="H + TC: best factorised")
    training.axhline(floor, color=INK, linestyle="--", label="H: best joint")
    training.set(xlabel="step", ylabel="loss of the whole answer in one step (nats)", title="between the floors")
    training.legend(loc="center right")
    save(plt, path)


def draw_recorded_dial(path: Path) -> None:
    draw_dial(path, read_figure("dial"))


PICTURES = {
    "pays": draw_pays,
    "text": draw_text,
    "joint": draw_joint,
    "paper_tables": draw_paper_tables,
    "cache": draw_cache,
    "step_time": draw_step_time,
    "dial": draw_recorded_dial,
    "tc": draw_tc,
}


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("figure")
    group.add_argument("picture", choices=list(PICTURES), help="what to draw")
    group.add_argument("--out", type=Path, required=True, help="the picture to write, .svg, .png or .pdf")
    group = parser.add_argument_group("dial, measured anew")
    group.add_argument("--data", choices=toy.TASKS, help="the toy that the checkpoints were trained on")
    group.add_argument("--ckpt", nargs="+", help="checkpoint folders; the curve is the first one's")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()

    canvas(args.out)  # what cannot be drawn is refused now, not after measuring
    measured = args.data is not None or args.ckpt is not None
    if not measured:
        PICTURES[args.picture](args.out)
        return
    if args.picture != "dial" or args.data is None or args.ckpt is None:
        fail("--data and --ckpt go together, and only the dial is measured from checkpoints")
    draw_dial(args.out, measure_dial(args))


if __name__ == "__main__":
    main()
