"""Pictures of measurements, with matplotlib: the dial, and the canvas on which beyond/ draws its own.

The dial: on the left each one-step decoder's error against total correlation, one point a checkpoint; on the right the
first checkpoint's training between the floors of a joint and of a factorised one-step loss.

It refuses, before it measures, a name that is no picture's and checkpoints of another toy.

    python -m tools.plots dial --data copy --ckpt out/dial-0.1 out/dial-0.4 out/dial-1.0 --out dial.svg
"""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

import toy
from checkpoint import load_model
from data import Parser, fail, pick_device, replace_file
from evaluate import load_task, one_step_table
from model import Model
from toy import Toy

# N contexts, S support tuples, m answer positions


def canvas(path: Path, columns: int = 1):
    """(matplotlib's pyplot, axes), or one line about its absence or about a kind of file that it cannot draw."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "cocommit"  # the same picture from the same numbers, byte for byte
        import matplotlib.pyplot as plt
    except ImportError:
        fail("pictures need matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(1, columns, figsize=(1 + 4.5 * columns, 4), constrained_layout=True)
    if path.suffix[1:] not in (kinds := figure.canvas.get_supported_filetypes()):
        fail(f"{path}: the name of a picture must end in one of {', '.join(kinds)}")
    return plt, axes


def save(plt, path: Path) -> None:
    """Write the picture that pyplot holds to the file that the user named, whole or not at all."""
    date = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    replace_file(path, lambda p: plt.savefig(p, format=path.suffix[1:], **date))
    print(f"wrote {path}")


def read_curve(path: Path) -> list[dict]:
    """The validations in a log of train.py --data TOY: step, and the loss of the whole answer in both stages."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as e:
        fail(f"the training curve needs the first checkpoint's log, but {path} cannot be read: {e}")
    return [r for r in records if "block_A" in r] or fail(f"{path} holds no validation on a toy (--eval_interval)")


def chain_table(model: Model, task: Toy) -> Tensor:
    """q over the support when tokens are drawn one at a time, the most confident position first: (N, S) float64. A
    tuple has one path through the states: the position is a function of the state. Equal states are computed once."""
    N, S, m = task.support.shape
    c, x = torch.arange(N).repeat_interleave(S), task.support.reshape(N * S, m)
    z, log_q = torch.full_like(x, -1), torch.zeros(N * S, dtype=torch.float64)
    for _ in range(m):
        states, back = torch.unique(torch.cat([c[:, None], z], dim=1), dim=0, return_inverse=True)
        log_p = toy.answer_log_probs(model, task, states[:, 0], states[:, 1:], 0)
        at = log_p.amax(-1).masked_fill(states[:, 1:] >= 0, -math.inf).argmax(-1)[back]  # (N*S,)
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


def draw_dial(path: Path, name: str, points: list[tuple[float, dict]], floor: float, curve: list[dict]) -> None:
    """points: (TC, errors) of each checkpoint; floor: the entropy H of the first one's toy; curve: see read_curve."""
    plt, (dial, training) = canvas(path, 2)
    for decoder in points[0][1]:
        dial.plot(*zip(*sorted((tc, e[decoder]) for tc, e in points), strict=True), marker="o", label=decoder)
    top = max(tc for tc, _ in points)
    dial.plot([0, top], [0, top], color="grey", linestyle=":", label="TC: the least for any product")
    dial.set(xlabel="total correlation (nats)", ylabel="KL(p || decoder) (nats)", title=name)
    dial.legend()
    for stage in "AB":
        training.plot([r["step"] for r in curve], [r[f"block_{stage}"] for r in curve], label=f"Stage {stage}")
    training.axhline(floor + points[0][0], color="grey", linestyle=":", label="H + TC: best factorised")
    training.axhline(floor, color="grey", linestyle="--", label="H: best joint")
    training.set(xlabel="step", ylabel="loss of the whole answer in one step (nats)", title="between the floors")
    training.legend()
    save(plt, path)


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("dial")
    group.add_argument("picture", choices=["dial"], help="what to draw")
    group.add_argument("--data", choices=toy.TASKS, required=True, help="the toy that the checkpoints were trained on")
    group.add_argument("--ckpt", nargs="+", required=True, help="checkpoint folders; the curve is the first one's")
    group.add_argument("--out", type=Path, required=True, help="the picture to write, .svg, .png or .pdf")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()
    canvas(args.out)  # refused now, not after measuring
    device, curve = pick_device(args.device), read_curve(Path(args.ckpt[0]) / "log.jsonl")
    tasks = [load_task(args.data, folder) for folder in args.ckpt]
    models = (load_model(folder, device, torch.float32) for folder in args.ckpt)
    points = [(float(t.tc().mean()), errors(model, t)) for model, t in zip(models, tasks, strict=True)]
    draw_dial(args.out, args.data, points, float(tasks[0].h_joint().mean()), curve)


if __name__ == "__main__":
    main()
