"""Adapters on the toys, measured: one row for each kind, over toys and seeds.

Every adapter is compared with its own frozen base (it knows which), the whole answer in one step:

    A, B coherent    share of contexts in which Stage A's and Stage B's argmax tuple is possible at all
    chain            the same for the base one token at a time: what a chain target can teach at most
    B mode           share in which Stage B writes the joint mode
    A drift          KL(base's marginal || adapted Stage A's), nats, the mean over positions and contexts
    sampled KL/TC    KL(p || q) of joint samples (beyond.noise), as a share of TC; and the estimate's standard error

Seeds of one kind are one row: the mean, and the worst seed in brackets. It refuses adapters that were not trained on a
toy, and folders without their train.json.

    python -m beyond.toys --adapter out/*-chain             # the table of what is there
"""

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint import adapter_settings, load_model
from evaluate import DECODERS, ONE_STEP, load_task, print_table, quality
from lib import toy
from lib.toy import ROWS, Toy
from lib.util import Parser, bounded, fail, generator, pick_device, read_json
from model import Model

# N contexts, S support tuples, m answer positions, V answer symbols, n draws

COLUMNS = ["A coherent", "B coherent", "chain", "B mode", "A drift", "sampled KL/TC", "error"]
SMALLER_IS_BETTER = {"A drift", "sampled KL/TC", "error"}


@torch.inference_mode()
def sampled_kl(model: Model, task: Toy, draws: int) -> tuple[float, float]:
    """KL(p || q) of one pass of Stage B whose markers carry u, nats, the mean over contexts; and its standard error.

    Given u the readout is a product, so q(x) = E_u prod_i q_i(x_i | u), estimated by the mean over `draws` of u. The
    logarithm of a mean is too low by about var / (2 q^2): that is taken off the estimate again. The error is the delta
    method's: a draw's influence is sum_x p(x) q(x | u) / q(x).
    """
    kl, variance = [], []
    for n in range(task.n_ctx):
        u = torch.rand(draws, 2 * task.m, generator=generator("joint samples", n)).to(model.wte.weight.device)
        parts = []
        for part in u.split(ROWS):
            model.u = part  # what the markers of this pass carry
            context, masks = torch.full((len(part),), n), torch.full((len(part), task.m), -1)
            q_i = toy.answer_log_probs(model, task, context, masks, model.cfg.n_rounds).exp()
            parts.append(toy.product_table(task, context, q_i)[:, task.prob[n] > 0])
        model.u = None
        q, p = torch.cat(parts), task.prob[n][task.prob[n] > 0]  # (n, S), (S,)
        mean = q.mean(0)
        bias = float((p * q.var(0) / (2 * draws * mean.square())).sum())
        kl.append(float(toy.kl(p, mean)) - bias)
        variance.append(float((q * (p / mean)).sum(-1).var()) / draws)
    return sum(kl) / len(kl), math.sqrt(sum(variance)) / len(variance)


def measure(folder: str, settings: dict, draws: int, device: torch.device) -> dict[str, float]:
    """The figures of one adapter, by column."""
    base, task = load_model(settings["base"], device, torch.float32), load_task(settings["data"][0], settings["base"])
    model, everywhere = load_model(settings["base"], device, torch.float32, folder), torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    p, q = (toy.answer_log_probs(net, task, everywhere, masks, 0) for net in (base, model))
    b = quality(model, task, replace(ONE_STEP, n_rounds=model.cfg.n_rounds))
    row = {
        "A coherent": quality(model, task, DECODERS["Stage A, one step"])["coherent"],
        "B coherent": b["coherent"],
        "chain": quality(base, task, DECODERS["one at a time"])["coherent"],
        "B mode": b["mode_hit"],
        "A drift": float((p.exp() * (p - q)).sum(-1).mean()),
    }
    if is_noise(settings):
        kl, error = sampled_kl(model, task, draws)
        row |= {"sampled KL/TC": kl / float(task.tc().mean()), "error": error / float(task.tc().mean())}
    return row


def read_settings(folder: str) -> dict:
    """train.json and adapter.json of an adapter of a toy."""
    settings = read_json(Path(folder) / "train.json", "settings of an adapter (train.py --init_from DIR)")
    if not settings.get("data") or settings["data"][0] not in toy.TASKS:
        fail(f"{folder} was trained on {settings.get('data')}, which is no toy: its distribution is not known")
    return settings | adapter_settings(folder)


def is_noise(settings: dict) -> bool:
    return settings.get("extension") == "beyond.noise"


def kind(settings: dict) -> tuple[str, ...]:
    """The columns that name a row. (train.py itself has neither target nor scope.)"""
    target, beam = settings.get("target", "clean"), settings.get("beam", 1)
    if is_noise(settings):
        target += " noise"
    elif target == "chain":
        target += f" beam {beam}" if beam > 1 else " greedy"
    n, K = settings["model"]["n_last"], settings["model"]["n_rounds"]
    return settings["data"][0], target, settings.get("lora", "all"), str(n), str(K), str(settings["max_iters"])


def same_but_for_the_seed(settings: dict) -> str:
    """What adapters of one row share: every setting but the seed and where things lie."""
    free = {"seed", "init_from", "base", "out_dir", "device", "log_interval", "eval_interval", "stop_at"}
    free |= {"micro_batch", "checkpointing"}
    return json.dumps({k: v for k, v in settings.items() if k not in free}, sort_keys=True)


def cell(column: str, values: list[float]) -> str:
    if not values:
        return "-"
    worst = max(values) if column in SMALLER_IS_BETTER else min(values)
    digits = 4 if column in ("sampled KL/TC", "error") else 3
    return f"{sum(values) / len(values):z.{digits}f}" + (f" ({worst:z.{digits}f})" if len(values) > 1 else "")


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("table")
    group.add_argument("--adapter", nargs="+", required=True, help="folders of adapters that were trained on a toy")
    group.add_argument("--draws", type=bounded(int, 2), default=8192, help="draws of u for a sampled KL")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()
    device, rows = pick_device(args.device), defaultdict(list)
    for folder, settings in [(folder, read_settings(folder)) for folder in args.adapter]:
        row = kind(settings), same_but_for_the_seed(settings)
        rows[row].append(measure(folder, settings, args.draws, device))
    used = [c for c in COLUMNS if any(c in r for group in rows.values() for r in group)]
    table = [
        [*names, str(len(group)), *(cell(c, [r[c] for r in group if c in r]) for c in used)]
        for (names, _), group in rows.items()
    ]
    print_table(["toy", "target", "adapters", "n", "K", "steps", "seeds", *used], table)


if __name__ == "__main__":
    main()
