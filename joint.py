"""Joint commitment on the toys, measured: one row for each kind of adapter, over toys and seeds.

Every adapter is compared with its own frozen base (it knows which), the whole answer in one step:

    A, B coherent    share of contexts in which Stage A's and Stage B's argmax tuple is possible at all
    chain            the same for the base one token at a time: what a chain target can teach at most
    B mode           share in which Stage B writes the joint mode
    A drift          KL(base's marginal || adapted Stage A's), nats, the mean over positions and contexts
    x a step         what a training step costs, as a multiple of the same step without chain targets
    sampled KL/TC    KL(p || q) of joint samples (--chain_noise), as a share of TC; and the estimator's standard error
    repair A, B      a planted incoherent answer made coherent in one step: by Stage A's edits, by joint revision

Seeds of one kind are one row: the mean, and the worst seed in brackets. It refuses adapters that were not trained on a
toy, and folders without their train.json.

    make joint                                        # trains them all (hours on 2 cores), then prints the table
    python joint.py --adapter out/joint/*             # the table of what is there
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

import toy
from cache import Cached
from checkpoint import adapter_settings
from data import Parser, fail, generator, pick_device, read_json
from evaluate import DECODERS, ONE_STEP, ROWS, answer_log_probs, load, load_task, print_table, quality
from model import Model
from sample import Decoding, step
from toy import Toy

# N contexts, S support tuples, m answer positions, V answer symbols, n draws


@torch.inference_mode()
def sampled_kl(model: Model, task: Toy, draws: int) -> tuple[float, float]:
    """KL(p || q) of one marked pass whose markers carry u, nats, the mean over contexts; and its standard error.

    Given u the readout is a product, so q(x) = E_u prod_i q_i(x_i | u), estimated by the mean over `draws` of u. The
    logarithm of a mean is too low by about var / (2 q^2): that is taken off the estimate again. The error is the delta
    method's: a draw's influence is sum_x p(x) q(x | u) / q(x).
    """
    kl, variance = [], []
    for n in range(task.n_ctx):
        u = torch.rand(draws, 2 * task.m, generator=generator("joint samples", n)).to(model.wte.weight.device)
        ids = torch.cat([task.prompt(torch.tensor([n])), torch.full((1, task.m), task.mask_id)], dim=1).to(u.device)
        parts = []
        for part in u.split(ROWS):
            logits = toy.answer_logits(model, ids.expand(len(part), -1), model.cfg.n_rounds, part)
            q_i = logits.cpu().double().softmax(-1)[..., : task.V]
            parts.append(toy.product_table(task, torch.full((len(part),), n), q_i)[:, task.prob[n] > 0])
        q, p = torch.cat(parts), task.prob[n][task.prob[n] > 0]  # (n, S), (S,)
        mean = q.mean(0)
        bias = float((p * q.var(0) / (2 * draws * mean.square())).sum())
        kl.append(float(toy.kl(p, mean)) - bias)
        variance.append(float((q * (p / mean)).sum(-1).var()) / draws)
    return sum(kl) / len(kl), math.sqrt(sum(variance)) / len(variance)


def planted(task: Toy, draws: int = 32) -> tuple[Tensor, Tensor]:
    """Contexts (R,) and incoherent answers (R, m): independent draws from the true marginals, the coherent left out."""
    c = torch.arange(task.n_ctx).repeat_interleave(draws)
    marginals = task.marginals()[c].flatten(0, 1)
    z = torch.multinomial(marginals, 1, generator=generator("planted", task.name)).view(-1, task.m)
    bad = ~task.coherent(c, z)
    return c[bad], z[bad]


@torch.inference_mode()
def repair(model: Model, task: Toy, d: Decoding) -> float:
    """The share of planted answers, visible as a whole, that one step of decoding makes coherent."""
    c, z = planted(task)
    if not len(c):
        return math.nan
    device = model.wte.weight.device
    engine = Cached(model, task.prompt(c).tolist(), d.n_rounds)
    no_prompt, u = torch.zeros_like(z, dtype=torch.bool), torch.zeros(len(z), 3, task.m)
    after = step(engine, z.to(device), no_prompt.to(device), True, u.to(device), d)["after"]
    return float(task.coherent(c, after.cpu()).double().mean())


EDIT = Decoding(tau_t2t=0.0, n_rounds=0)


def measure(folder: str, settings: dict, draws: int, device: torch.device) -> dict[str, float]:
    """The figures of one adapter, by column."""
    base, task = load(settings["base"], None, device), load_task(settings["data"][0], settings["base"])
    model, everywhere = load(settings["base"], folder, device), torch.arange(task.n_ctx)
    masks, K = torch.full((task.n_ctx, task.m), -1), model.cfg.n_rounds
    p, q = (answer_log_probs(net, task, everywhere, masks, 0) for net in (base, model))
    b = quality(model, task, Decoding(**vars(ONE_STEP) | {"n_rounds": K}))
    row = {
        "A coherent": quality(model, task, DECODERS["Stage A, one step"])["coherent"],
        "B coherent": b["coherent"],
        "chain": quality(base, task, DECODERS["one at a time"])["coherent"],
        "B mode": b["mode_hit"],
        "A drift": float((p.exp() * (p - q)).sum(-1).mean()),
        "x a step": settings["times_plain_step"],
    }
    if model.cfg.noise:
        kl, error = sampled_kl(model, task, draws)
        row |= {"sampled KL/TC": kl / float(task.tc().mean()), "error": error / float(task.tc().mean())}
    if settings["mark_visible"]:
        joint = Decoding(tau_t2t=0.0, mark_visible=True, n_rounds=K)
        row |= {"repair A": repair(model, task, EDIT), "repair B": repair(model, task, joint)}
    return row


def read_settings(folder: str) -> dict:
    """train.json and adapter.json of an adapter of a toy, and the median cost of its steps."""
    settings = read_json(Path(folder) / "train.json", "settings of an adapter (train.py --init_from DIR)")
    settings |= adapter_settings(folder)
    if not settings.get("data") or settings["data"][0] not in toy.TASKS:
        fail(f"{folder} was trained on {settings.get('data')}, which is no toy: its distribution is not known")
    log = Path(folder) / "log.jsonl"
    costs = [json.loads(line).get("times_plain_step") for line in log.read_text().splitlines()] if log.exists() else []
    costs = sorted(c for c in costs if c is not None)
    return settings | {"times_plain_step": costs[len(costs) // 2] if costs else math.nan}


def kind(settings: dict) -> tuple[str, ...]:
    """What makes adapters comparable: everything but the seed."""
    target = settings["target"]
    if settings["chain_noise"]:
        target += " noise"
    elif target == "chain":
        target += f" beam {settings['chain_beam']}" if settings["chain_beam"] > 1 else " greedy"
    marks = " visible" if settings["mark_visible"] else ""
    n, K = settings["model"]["n_last"], settings["model"]["n_rounds"]
    return settings["data"][0], target + marks, settings["lora_scope"], str(n), str(K), str(settings["max_iters"])


COLUMNS = ["A coherent", "B coherent", "chain", "B mode", "A drift", "x a step", "sampled KL/TC", "error"]
COLUMNS += ["repair A", "repair B"]
SMALLER_IS_BETTER = {"A drift", "x a step", "sampled KL/TC", "error"}


def cell(column: str, values: list[float]) -> str:
    if not values:
        return "-"
    worst = max(values) if column in SMALLER_IS_BETTER else min(values)
    digits = 4 if column in ("sampled KL/TC", "error") else 3
    return f"{sum(values) / len(values):.{digits}f}" + (f" ({worst:.{digits}f})" if len(values) > 1 else "")


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("table")
    group.add_argument("--adapter", nargs="+", required=True, help="folders of train.py --data TOY --init_from BASE")
    group.add_argument("--draws", type=int, default=8192, help="draws of u that a sampled KL is estimated from")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()
    if args.draws < 2:
        fail(f"--draws {args.draws}: an error needs at least 2 draws")
    device, rows = pick_device(args.device), defaultdict(list)
    for folder in args.adapter:
        settings = read_settings(folder)
        rows[kind(settings)].append(measure(folder, settings, args.draws, device))
    used = [c for c in COLUMNS if any(c in r for group in rows.values() for r in group)]
    table = [
        [*k, str(len(group)), *(cell(c, [r[c] for r in group if c in r]) for c in used)] for k, group in rows.items()
    ]
    print_table(["toy", "target", "adapters", "n", "K", "steps", "seeds", *used], table)


if __name__ == "__main__":
    main()
