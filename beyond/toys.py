"""Adapters on the toys, measured: one row for each kind, over toys and seeds.

Every adapter is compared with its own frozen base (it knows which), the whole answer in one step:

    A, B coherent    share of contexts in which Stage A's and Stage B's argmax tuple is possible at all
    chain            the same for the base one token at a time: what a chain target can teach at most
    B mode           share in which Stage B writes the joint mode
    A drift          KL(base's marginal || adapted Stage A's), nats, the mean over positions and contexts

Seeds of one kind are one row: the mean, and the worst seed in brackets.

    python -m beyond.toys --ckpt out/*-chain             # the table of what is there
"""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint import base_of, load_model
from evaluate import ONE_STEP, TOY_DECODERS, load_task, print_table, quality
from lib import toy
from lib.util import Parser, command, fail, pick_device, read_json

COLUMNS = ("A coherent", "B coherent", "chain", "B mode", "A drift")
SMALLER_IS_BETTER = {"A drift"}

# what adapters of one row may differ in: the seed, and where things lie
FREE = {"seed", "init_from", "base", "out_dir", "device", "log_interval", "eval_interval", "micro_batch"}


@torch.inference_mode()
def measure(folder: Path, device: torch.device) -> tuple[str, str, dict[str, float]]:
    """n and K of one adapter, and its figures, by column."""
    base = load_model(base_of(folder), device, torch.float32)
    model = load_model(folder, device, torch.float32)
    task = load_task(base_of(folder))

    # what Stage A says of the whole answer, before and after
    c = torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    p = toy.answer_log_probs(base, task, c, masks, 0)
    q = toy.answer_log_probs(model, task, c, masks, 0)

    b = quality(model, task, replace(ONE_STEP, n_rounds=model.cfg.n_rounds))
    figures = {
        "A coherent": quality(model, task, TOY_DECODERS["Stage A, one step"])["coherent"],
        "B coherent": b["coherent"],
        "chain": quality(base, task, TOY_DECODERS["one at a time"])["coherent"],
        "B mode": b["mode_hit"],
        "A drift": float((p.exp() * (p - q)).sum(-1).mean()),
    }
    return str(model.cfg.n_last), str(model.cfg.n_rounds), figures


def read_settings(folder: Path) -> dict:
    """train.json of an adapter of a toy."""
    settings = read_json(folder / "train.json", "settings of an adapter (train.py --init_from DIR)")
    if not settings.get("data") or settings["data"][0] not in toy.TASKS:
        fail(f"{folder} was trained on {settings.get('data')}, which is no toy: its distribution is not known")
    return settings


def kind(settings: dict) -> list[str]:
    """Toy, target, and where the adapters are. (train.py itself has neither target nor scope.)"""
    target = settings.get("target", "clean")
    beam = settings.get("beam", 1)
    if target == "chain":
        target = "chain greedy" if beam == 1 else f"chain beam {beam}"
    return [settings["data"][0], target, settings.get("lora", "all")]


def same_but_for_the_seed(settings: dict) -> str:
    """What adapters of one row share."""
    return json.dumps({k: v for k, v in settings.items() if k not in FREE}, sort_keys=True)


def cell(column: str, values: list[float]) -> str:
    """The mean, and of several the worst."""
    mean = f"{sum(values) / len(values):z.3f}"
    if len(values) == 1:
        return mean
    worst = max(values) if column in SMALLER_IS_BETTER else min(values)
    return f"{mean} ({worst:z.3f})"


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--ckpt", nargs="+", required=True, type=Path, help="folders of adapters that were trained on a toy")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()

    # the figures of each row's seeds
    device = pick_device(args.device)
    of_row = defaultdict(list)
    names = {}
    for folder, settings in [(folder, read_settings(folder)) for folder in args.ckpt]:
        row = same_but_for_the_seed(settings)
        n_last, n_rounds, figures = measure(folder, device)
        names[row] = [*kind(settings), n_last, n_rounds, str(settings["max_iters"])]
        of_row[row].append(figures)

    table = []
    for row, of_seeds in of_row.items():
        cells = [cell(c, [figures[c] for figures in of_seeds]) for c in COLUMNS]
        table.append([*names[row], str(len(of_seeds)), *cells])
    print_table(["toy", "target", "adapters", "n", "K", "steps", "seeds", *COLUMNS], table)


if __name__ == "__main__":
    main()
