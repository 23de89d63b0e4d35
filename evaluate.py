"""Evaluation: what each decoder does to a joint distribution that is known exactly, and the paper's tables on it.

On a toy (toy.py) nothing is estimated where it can be enumerated: the output distribution of a one-step decoder is a
product, that of one-at-a-time decoding a chain, and both are compared with the true table. Validity alone can be won
by always writing one phrase, so a distance between distributions stands beside it.

It refuses a checkpoint that was trained on another toy, or with other parameters.

    python evaluate.py --data modes --ckpt out/modes                                    # the decoders' table
    python evaluate.py --data modes --ckpt out/modes --json --plot modes.png            # numbers; pictures (matplotlib)
    python evaluate.py --data copy --ckpt out/copy_* --plot dial.png                    # error against the TC dial
    python evaluate.py --table mechanism --data modes     # paper, Table 2, of out/base and out/n2 (or --ckpt ...)
    python evaluate.py --table lastn --data modes         # paper, Table 3, of out/base and out/n1, out/n2, out/n3

The seven benchmarks: --task makes run files (runs.py), --table with --runs makes the paper's tables (tables.py). Text:
--curve and --tc (curves.py).
"""

import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import curves
import parallel
import runs
import tables
import toy
from checkpoint import load_model
from data import Parser, fail, read_json
from model import Model
from sample import MODES, Decoding, Output, generate
from toy import Toy

# N contexts, S support tuples, m answer positions, V answer symbols, R rows of a forward

ROWS = 4096  # rows in one forward

ONE_STEP = Decoding(select="all", tau_t2t=None, max_post_steps=0)
DECODERS = {
    "Stage A, one step": replace(ONE_STEP, n_rounds=0),
    "Stage B, one step": ONE_STEP,
    "threshold, no edits": Decoding(tau_m2t=0.95, tau_t2t=None),
    "threshold, edits": Decoding(tau_m2t=0.95, tau_t2t=0.9),
    "edits only (ICM)": replace(ONE_STEP, n_rounds=0, tau_t2t=0.0, max_post_steps=64),
    "one at a time": Decoding(tau_m2t=1.0, tau_t2t=None, n_rounds=0, max_post_steps=0),
    "released Q": Decoding(**MODES["q"], n_rounds=0),
    "released S": Decoding(**MODES["s"], n_rounds=0),
}


# ---------------------------------------------------------------------------------------------------------------------
# output distributions, by enumeration


@torch.inference_mode()
def answer_log_probs(model: Model, task: Toy, c: Tensor, z: Tensor, n_rounds: int) -> Tensor:
    """log q(x_i | z) of answer blocks z (R, m) int64, masked where -1, in contexts c (R,): (R, m, V) float64. Stage A
    for n_rounds 0, else Stage B with every masked position in the bundle. Mass on non-answer tokens stays lost."""
    out = []
    for c_part, z_part in zip(c.split(ROWS), z.split(ROWS), strict=True):
        ids = torch.cat([task.prompt(c_part), z_part.masked_fill(z_part < 0, task.mask_id)], dim=1)
        out.append(toy.answer_logits(model, ids.to(model.wte.weight.device), n_rounds).cpu().double())
    return torch.cat(out).log_softmax(-1)[..., : task.V]


def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    q = answer_log_probs(model, task, c, torch.full((task.n_ctx, task.m), -1), n_rounds).exp()
    return toy.product_table(task, c, q)


def chain_table(model: Model, task: Toy) -> Tensor:
    """q over the support when tokens are drawn one at a time, the most confident position first: (N, S) float64.

    A tuple has one path through the states, because the position is a function of the state; equal states of different
    tuples are computed once."""
    N, S, m = task.support.shape
    c, x = torch.arange(N).repeat_interleave(S), task.support.reshape(N * S, m)
    z, log_q = torch.full_like(x, -1), torch.zeros(N * S, dtype=torch.float64)
    for _ in range(m):
        states, back = torch.unique(torch.cat([c[:, None], z], dim=1), dim=0, return_inverse=True)
        log_p = answer_log_probs(model, task, states[:, 0], states[:, 1:], 0)
        at = log_p.amax(-1).masked_fill(states[:, 1:] >= 0, -math.inf).argmax(-1)[back]  # (N*S,)
        token = x.gather(1, at[:, None])
        log_q += log_p[back, at, token[:, 0]]
        z = z.scatter(1, at[:, None], token)
    return log_q.exp().view(N, S) * (task.prob > 0)


def distances(task: Toy, q: Tensor) -> dict[str, float]:
    """Means over contexts, nats. Reverse KL is infinite as soon as q writes anything outside the support."""
    outside = float(toy.outside(q).mean())
    reverse = float(toy.kl(q, task.prob).mean()) if outside < 1e-9 else math.inf
    return {
        "forward_kl": float(toy.kl(task.prob, q).mean()),
        "tv": float(toy.total_variation(task.prob, q).mean()),
        "reverse_kl": reverse,
        "outside": outside,
    }


# ---------------------------------------------------------------------------------------------------------------------
# greedy decoding, by the decoder that users run


def greedy(model: Model, task: Toy, d: Decoding) -> tuple[Tensor, list[Output]]:
    """Every context decoded once: answers (N, m) int64 and the decoder's records."""
    prompts = task.prompt(torch.arange(task.n_ctx)).tolist()
    outputs = generate(model, prompts, replace(d, gen_length=task.m))
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]  # an eos inside cuts the answer
    return torch.tensor(answers), outputs


def quality(model: Model, task: Toy, d: Decoding) -> dict[str, float]:
    """coherent, joint-mode hit, mean log-probability lost to the mode (over coherent answers), forwards a token."""
    answers, outputs = greedy(model, task, d)
    c = torch.arange(task.n_ctx)
    log_p, best = task.log_prob(c, answers), task.log_prob(c, task.mode())
    coherent = log_p > -math.inf
    tokens = task.n_ctx * task.m
    return {
        "coherent": float(coherent.double().mean()),
        # several tuples can be equally probable: hitting any of them is hitting the mode
        "mode_hit": float((log_p >= best - 1e-9).double().mean()),
        "lost": float((best - log_p)[coherent].mean()) if coherent.any() else math.inf,
        "nfe_full": sum(o.nfe["full"] for o in outputs) / tokens,
        "nfe_partial": sum(o.nfe["partial"] for o in outputs) / tokens,
    }


def evaluate_toy(model: Model, task: Toy) -> dict:
    """{task, tc, h_joint, decoders: {name: {...}}}, nats and means over contexts."""
    K = model.cfg.n_rounds
    tables = {
        "Stage A, one step": one_step_table(model, task, 0),
        "Stage B, one step": one_step_table(model, task, K),
        "one at a time": chain_table(model, task),
    }
    decoders = {}
    for name, d in DECODERS.items():
        decoders[name] = quality(model, task, d if d.n_rounds == 0 else replace(d, n_rounds=K))
        if name in tables:
            decoders[name] |= distances(task, tables[name])
    h, tc = float(task.h_joint().mean()), float(task.tc().mean())
    return {"task": task.name, "tc": tc, "h_joint": h, "decoders": decoders}


# ---------------------------------------------------------------------------------------------------------------------
# tables


def number(value: float | None) -> str:
    return "-" if value is None else "inf" if math.isinf(value) else f"{value:.3f}"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    width = [max(len(r[k]) for r in [head, *rows]) for k in range(len(head))]
    for r in [head, *rows]:
        print("  ".join([r[0].ljust(width[0]), *(cell.rjust(w) for cell, w in zip(r[1:], width[1:], strict=True))]))


def finite(report: dict) -> dict:
    """The report with null for infinite: JSON has no infinity."""
    decoders = {n: {k: v if math.isfinite(v) else None for k, v in d.items()} for n, d in report["decoders"].items()}
    return report | {"decoders": decoders}


def print_toy(report: dict) -> None:
    h, tc = report["h_joint"], report["tc"]
    print(f"{report['task']}: H = {h:.4f} and H + TC = {h + tc:.4f} nats (the floors of a joint and of a factorised"
          f" one-step loss), TC = {tc:.4f}")  # fmt: skip
    print("greedy: coherent, joint-mode hit, log-probability lost; sampling: KL(p||q), total variation, KL(q||p)")
    keys = ["coherent", "mode_hit", "lost", "forward_kl", "tv", "reverse_kl", "nfe_full", "nfe_partial"]
    head = ["decoder", "coherent", "mode", "lost", "KL(p||q)", "TV", "KL(q||p)", "full/tok", "partial/tok"]
    print_table(head, [[name] + [number(v.get(k)) for k in keys] for name, v in report["decoders"].items()])


def table_mechanism(args: Namespace, device: torch.device, task: Toy) -> None:
    if len(args.ckpt) != 1 or len(args.adapter) != 1:
        fail("--table mechanism compares one --ckpt (the base) with one --adapter trained from it")
    models = {"base": load(args.ckpt[0], None, device), "ours": load(args.ckpt[0], args.adapter[0], device)}
    q, rows = Decoding(**MODES["q"], n_rounds=models["ours"].cfg.n_rounds), []
    for name, which, changes, accuracy, nfe in tables.MECHANISM:
        d = replace(q, **changes)
        r = quality(models[which], task, d)
        gates = [number(None if d.select == "all" else d.tau_m2t), number(d.tau_t2t)]
        measured = [number(r[k]) for k in ("coherent", "mode_hit", "lost", "nfe_full", "nfe_partial")]
        rows.append([name, *gates, *measured, f"{accuracy:.2f}", f"{nfe:.2f}"])
    head = ["variant", "tau_m2t", "tau_t2t", "coherent", "mode", "lost", "full/tok", "partial/tok", "paper", "NFE"]
    print_table(head, rows)


def table_lastn(args: Namespace, device: torch.device, task: Toy) -> None:
    if len(args.ckpt) != 1 or not args.adapter:
        fail("--table lastn takes one --ckpt (the base) and one --adapter for each n trained from it")
    rows = []
    for folder in args.adapter:
        model = load(args.ckpt[0], folder, device)
        K = model.cfg.n_rounds
        r = quality(model, task, replace(ONE_STEP, n_rounds=K)) | distances(task, one_step_table(model, task, K))
        default = quality(model, task, Decoding(tau_m2t=0.7, tau_t2t=0.0, n_rounds=K))
        cells = [
            r["coherent"],
            r["mode_hit"],
            r["forward_kl"],
            default["coherent"],
            default["mode_hit"],
            default["nfe_full"],
        ]
        rows.append([f"n = {model.cfg.n_last}", str(K), *map(number, cells)])
    print("one step: Stage B writes the whole answer at once; default: tau_m2t 0.7, ungated edits")
    head = [
        "trained and run at",
        "K",
        "one step: coherent",
        "mode",
        "KL(p||q)",
        "default: coherent",
        "mode",
        "full/tok",
    ]
    print_table(head, rows)


# ---------------------------------------------------------------------------------------------------------------------
# pictures


def plot(path: Path, reports: list[dict], logs: list[Path]) -> None:
    """Left: error of each one-step decoder against TC, one point a checkpoint. Right: training between the floors."""
    plt, (dial, curve) = curves.canvas(path, 2)
    for name in ("Stage A, one step", "Stage B, one step", "one at a time"):
        points = sorted((r["tc"], r["decoders"][name]["forward_kl"]) for r in reports)
        dial.plot(*zip(*points, strict=True), marker="o", label=name)
    top = max(r["tc"] for r in reports)
    dial.plot([0, top], [0, top], color="grey", linestyle=":", label="TC: the least for any product")
    dial.set(xlabel="total correlation (nats)", ylabel="KL(p || decoder) (nats)", title=reports[0]["task"])
    dial.legend()
    records = [json.loads(line) for line in logs[0].read_text().splitlines()]
    records = [r for r in records if "block_1" in r]
    for branch in (1, 2):
        curve.plot([r["step"] for r in records], [r[f"block_{branch}"] for r in records], label=f"branch {branch}")
    h, tc = reports[0]["h_joint"], reports[0]["tc"]
    curve.axhline(h + tc, color="grey", linestyle=":", label="H + TC: best factorised")
    curve.axhline(h, color="grey", linestyle="--", label="H: best joint")
    curve.set(xlabel="step", ylabel="loss of the whole answer in one step (nats)", title="training between the floors")
    curve.legend()
    curves.save(plt, path)


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def load(ckpt: str, adapter: str | None, device: torch.device) -> Model:
    return load_model(ckpt, device, torch.float32, adapter)


def load_task(name: str, ckpt: str) -> Toy:
    """The toy that a checkpoint was trained on, from the toy.json beside it."""
    if name not in toy.TASKS:
        fail(f"--data {name} is no toy: choose from {', '.join(toy.TASKS)}")
    settings = read_json(Path(ckpt) / "toy.json", "toy settings (a checkpoint of train.py --data TOY)")
    if settings.pop("name", None) != name:
        fail(f"{ckpt} was trained on another toy than --data {name}")
    try:
        return toy.make(name, **settings)
    except (TypeError, ValueError) as e:
        fail(f"{ckpt}/toy.json is damaged: {e}")


def main() -> None:
    parallel.start()
    parser = Parser(__doc__)
    group = parser.add_argument_group("what")
    group.add_argument("--data", help=f"a toy: {', '.join(toy.TASKS)}; or text, with --curve or --tc")
    group.add_argument("--ckpt", nargs="+", default=[], help="checkpoint folder; several for the dial")
    group.add_argument("--adapter", nargs="+", default=[], help="LoRA and markers of train.py --init_from CKPT")
    group.add_argument(
        "--table", choices=["main", "mechanism", "lastn"], help="the paper's Table 1, 2 or 3: --data TOY or --runs DIR"
    )
    group.add_argument("--runs", type=Path, help="folder of run files that --task wrote (Table 1 is for them alone)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="{task, tc, h_joint, decoders} a line for each checkpoint")
    group.add_argument("--plot", type=Path, help="draw the dial and the first checkpoint's training curve to this file")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    only_text = curves.add_arguments(parser)
    only_task = runs.add_arguments(parser)
    args = parser.parse_args()
    if parallel.WORLD > 1 and not args.task:
        fail("several processes are for --task; the rest is the work of one: leave torchrun out")
    if args.plot:
        curves.canvas(args.plot)  # refused now, not after hours of measuring
    if args.curve and args.tc:
        fail("--curve or --tc, one at a time")
    if args.curve or args.tc:
        if not args.data or not args.ckpt or args.task or args.table:
            fail("--curve and --tc measure text: give --data (stdlib, a file or a folder) and --ckpt, and no --task")
        (curves.curve if args.curve else curves.bundle_tc)(args, parallel.pick_device(args.device))
        return
    if stray := [f for f in only_text if getattr(args, f) != parser.get_default(f)]:
        fail(f"--{stray[0]} means nothing without --curve or --tc")
    if not args.task and (stray := [f for f in only_task if f in args and getattr(args, f) != parser.get_default(f)]):
        fail(f"--{stray[0]} means nothing without --task")
    what = [flag for flag in ("data", "task", "runs") if getattr(args, flag)]
    if len(what) != 1:
        fail("say what to evaluate: --data TOY, or --task BENCHMARK, or --table TABLE --runs DIR")
    if args.data and args.table and not args.ckpt:  # the folders of the commands in the README
        args.ckpt, args.adapter = (
            ["out/base"],
            [f"out/n{n}" for n in ((2,) if args.table == "mechanism" else (1, 2, 3))],
        )
        if lacking := [f for f in (*args.ckpt, *args.adapter) if not Path(f).is_dir()]:
            make = f"python train.py --data {args.data} --factorised --out_dir out/base"
            adapt = f"python train.py --data {args.data} --init_from out/base --n_last N --learning_rate 1e-3"
            adapt += " --max_iters 500 --out_dir out/nN"
            fail(f"{lacking[0]} is missing: give --ckpt and --adapter, or run `{make}`, then `{adapt}` for each N")
    if not args.runs and not args.ckpt:
        fail(f"--{what[0]} needs --ckpt")
    if (args.runs and not args.table) or (args.task and args.table) or (args.data and args.table == "main"):
        fail("--runs needs a --table, --table main needs --runs, and --task makes runs, not tables")
    if args.runs:
        head, rows, notes = tables.table(args.table, args.runs)
        print_table(head, rows)
        print("\n".join(notes))
        return
    device = parallel.pick_device(args.device)
    if args.task:
        runs.run_task(args, device)
        return
    tasks = [load_task(args.data, ckpt) for ckpt in args.ckpt]
    if args.table:
        (table_mechanism if args.table == "mechanism" else table_lastn)(args, device, tasks[0])
        return
    if len(args.adapter) > 1:
        fail("one --adapter at a time (several only with --table lastn)")
    reports = []
    for ckpt, task in zip(args.ckpt, tasks, strict=True):
        reports.append(evaluate_toy(load(ckpt, args.adapter[0] if args.adapter else None, device), task))
        print(json.dumps(finite(reports[-1]), allow_nan=False)) if args.json else print_toy(reports[-1])
    if args.plot:
        plot(args.plot, reports, [Path(args.adapter[0] if args.adapter else args.ckpt[0]) / "log.jsonl"])


if __name__ == "__main__":
    main()
