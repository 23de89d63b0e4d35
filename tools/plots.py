"""The loss of a run, drawn with matplotlib.

python -m tools.plots out/names      # writes out/names/loss.svg
"""

import os
from pathlib import Path

from lib.util import Parser, checked_entry, command, fail, printable, read_lines, replace_file

# a notebook's backend is not there outside of it
os.environ["MPLBACKEND"] = "svg"
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None


def draw_log(folder: Path):
    """The loss of each logged step and, on held-out rows, the cross-entropies of both stages at masks."""
    path = folder / "log.jsonl"
    records = read_lines(path, {"step": int}, "log of a run")
    steps = {r["step"] + 1: checked_entry(r, "loss", float, path) for r in records if "loss" in r}
    if not steps:
        fail(f"{path} has no steps yet")
    figure, ax = plt.subplots(layout="constrained")
    ax.plot(steps.keys(), steps.values(), color="gray", linewidth=1, label="loss (Eq. 1)")
    for term in ("m2t_A", "m2t_B"):
        held_out = [r for r in records if r.get("val") and term in r]  # a model without a Stage B has no m2t_B
        if held_out:
            points = [(r["step"], checked_entry(r, term, float, path)) for r in held_out]
            ax.plot(*zip(*points, strict=True), "o-", markersize=4, label=f"{term}, held out")
    ax.set(xlabel="step", ylabel="nats a token", ylim=(0, None))
    ax.legend()
    return figure


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="a run's folder")
    folder = parser.parse_args().folder
    if plt is None:
        fail("pictures need matplotlib: pip install matplotlib")
    out = folder / "loss.svg"
    figure = draw_log(folder)
    replace_file(out, lambda path: figure.savefig(path, format="svg"))
    print(f"wrote {printable(out)}")


if __name__ == "__main__":
    main()
