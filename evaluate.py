"""Evaluation: what a decoder does where every answer can be checked.

On a toy (toy.py) a one-step decoder's output distribution is a product. It is enumerated and
compared with the true table, because validity alone can be won by always writing one phrase.

Names of Unicode characters are completed from their first third of tokens (rounded up), those held
out and those trained on apart, and `unicodedata` judges. Shares of the names drawn:

    exist     the completion is some character's name (low, high: Wilson's 95 % interval)
    itself    it is the very name drawn: of a held-out prompt, a name that was never trained on
    distinct  different existing names
    repeated  completions that another drawn name's completion equals, real or not

Forwards are counted for each name and for each token: full ones, partial ones, and all of them in
units of a full one.

    python evaluate.py --data modes --ckpt out/base --adapter out/n2  # the decoders' table, of the base with an adapter
    python evaluate.py --data names --ckpt assets/names --json        # factorised decoders, for a script to read
"""

import json
import math
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cache import Output, in_full
from checkpoint import DTYPES, load_model, load_tokenizer
from lib import data, toy, util
from lib.tokenizer import Tokenizer
from lib.toy import Toy
from lib.util import Parser, bounded, fail, pick_device, read_json
from model import Model
from sample import MODES, Decoding, generate

# N contexts, S support tuples, m answer positions

ONE_STEP = Decoding(tau_m2t=-1, tau_t2t=None, max_post_steps=0)  # every mask at once
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

# columns of a toy's table: heading -> measure
COLUMNS = {
    "coherent": "coherent",
    "mode": "mode_hit",
    "lost": "lost",
    "KL(p||q)": "forward_kl",
    "TV": "tv",
    "KL(q||p)": "reverse_kl",
    "full/tok": "nfe_full",
    "partial/tok": "nfe_partial",
}

NAME_TOKENS = 32  # that a completion may have

# tau_m2t by the model's order: the surest first, it is a gate on each mask's probability; from the
# left, on the product of all up to and with its own
GATES = {
    "surest": {
        "tau_m2t 0.4": 0.4,
        "tau_m2t 0.3": 0.3,
        "tau_m2t 0.2": 0.2,
        "tau_m2t 0.15": 0.15,
        "tau_m2t 0.1": 0.1,
        "all at once": -1.0,
    },
    "leftmost": {
        "longest prefix 0.9": 0.9,
        "longest prefix 0.5": 0.5,
        "longest prefix 0.2": 0.2,
        "all at once": -1.0,
    },
}


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """A table whose first column stands to the left and whose others stand to the right."""
    lines = [head, *rows]
    width = [max(len(line[k]) for line in lines) for k in range(len(head))]
    for first, *others in lines:
        cells = [first.ljust(width[0])]
        cells += [cell.rjust(w) for cell, w in zip(others, width[1:], strict=True)]
        print("  ".join(cells))


# ----------------------------------------------------------------------------------------------------------------
# toys


def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    q = toy.answer_log_probs(model, task, c, masks, n_rounds).exp()
    return toy.product_table(task, c, q)


def distances(task: Toy, q: Tensor) -> dict[str, float]:
    """Means over contexts, in nats, of a table q (N, S). The reverse KL is infinite as soon as q
    writes anything outside the support.
    """
    # what q lacks of 1 was written outside the support
    outside = float((1 - q.sum(-1)).clamp(min=0).mean())
    forward = float(toy.kl(task.prob, q).mean())
    inside = float((task.prob - q).abs().sum(-1).mean())
    reverse = math.inf
    if outside < 1e-9:
        reverse = float(toy.kl(q, task.prob).mean())
    return {"forward_kl": forward, "tv": 0.5 * (inside + outside), "reverse_kl": reverse, "outside": outside}


def quality(model: Model, task: Toy, d: Decoding) -> dict[str, float]:
    """Every context decoded once, greedily, by the decoder that users run: the share of coherent
    answers and of joint modes, the mean log-probability lost to the mode (over coherent answers),
    and forwards a token.
    """
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m))

    # an eos inside cuts the answer: fill it up again
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]
    log_p = task.log_prob(c, torch.tensor(answers))
    best = task.log_prob(c, task.mode())

    coherent = log_p > -math.inf
    mode_hit = log_p >= best - 1e-9  # any of the most probable tuples is the mode
    lost = math.inf
    if coherent.any():
        lost = float((best - log_p)[coherent].mean())

    tokens = task.n_ctx * task.m
    return {
        "coherent": float(coherent.double().mean()),
        "mode_hit": float(mode_hit.double().mean()),
        "lost": lost,
        "nfe_full": sum(o.nfe["full"] for o in outputs) / tokens,
        "nfe_partial": sum(o.nfe["partial"] for o in outputs) / tokens,
    }


def evaluate_toy(model: Model, task: Toy) -> dict:
    """{task, tc, h_joint, decoders: {name: {...}}}, nats and means over contexts."""
    # a decoder that uses Stage B takes the model's number of rounds
    K = model.cfg.n_rounds
    decoders = {}
    for name, d in DECODERS.items():
        if d.n_rounds > 0:
            d = replace(d, n_rounds=K)
        decoders[name] = quality(model, task, d)

    # only a decoder of one step has a distribution that can be enumerated here
    decoders["Stage A, one step"] |= distances(task, one_step_table(model, task, 0))
    decoders["Stage B, one step"] |= distances(task, one_step_table(model, task, K))
    return {
        "task": task.name,
        "tc": float(task.tc().mean()),
        "h_joint": float(task.h_joint().mean()),
        "decoders": decoders,
    }


def load_task(name: str, ckpt: str) -> Toy:
    """The toy that a checkpoint was trained on, from the toy.json beside it."""
    settings = read_json(Path(ckpt) / "toy.json", "toy settings (a checkpoint of train.py --data TOY)")
    if settings.pop("name", None) != name:
        fail(f"{ckpt} was trained on another toy than --data {name}")
    given = [f"{size}={value}" for size, value in settings.items()]
    return toy.make(name, **toy.sizes(given))


def evaluate_toys(ckpt: str, args: Namespace, device: torch.device) -> None:
    """Print what every decoder does: of the checkpoint, or of it with each of the adapters."""
    task = load_task(args.data, ckpt)
    adapters = args.adapter
    if not adapters:
        adapters = [None]
    for adapter in adapters:
        model = load_model(ckpt, device, DTYPES[args.dtype], adapter)
        report = evaluate_toy(model, task)
        if args.json:
            # JSON has no infinity
            print(json.dumps(report).replace("Infinity", "null"))
        else:
            print_toy(report)


def print_toy(report: dict) -> None:
    h = report["h_joint"]
    tc = report["tc"]
    print(
        f"{report['task']}: H = {h:.4f} and H + TC = {h + tc:.4f} nats"
        f" (the floors of a joint and of a factorised one-step loss), TC = {tc:.4f}"
    )
    print("greedy: coherent, joint-mode hit, log-probability lost; sampling: KL(p||q), total variation, KL(q||p)")
    rows = []
    for name, measured in report["decoders"].items():
        row = [name]
        for key in COLUMNS.values():
            cell = f"{measured[key]:.3f}" if key in measured else "-"
            row.append(cell)
        rows.append(row)
    print_table(["decoder", *COLUMNS], rows)


# ----------------------------------------------------------------------------------------------------------------
# names


def wilson(k: int, n: int) -> tuple[float, float]:
    """95 % interval (Wilson's) of a share of which k of n were seen."""
    z2 = 1.959963984540054**2
    middle = (k + z2 / 2) / (n + z2)
    spread = math.sqrt(z2 * k * (n - k) / n + z2 * z2 / 4) / (n + z2)
    return middle - spread, middle + spread


def draw_names(n: int, group: str, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """n names of a group ("held out" or "trained"), drawn by it alone -> the first third of each
    one's tokens.
    """
    held_out = group == "held out"
    names = [name for name in data.unicode_names() if data.is_validation(name) == held_out]
    order = torch.randperm(len(names), generator=util.generator("names", group))
    prompts = {}
    for i in order[:n].tolist():
        ids = tokenizer.encode_document(names[i]).tolist()
        prompts[names[i]] = ids[: math.ceil(len(ids) / 3)]
    return prompts


def judge(asked: list[str], written: list[str], outputs: list[Output], partial_cost: float) -> dict:
    """The shares of one decoder's completions (see above) and its forwards a name and a token.

    asked: the names drawn; written: what became of each; outputs: how."""
    n = len(written)
    found = [name for name in written if data.exists(name)]
    times = Counter(written)
    low, high = wilson(len(found), n)
    result = {
        "exist": len(found) / n,
        "low": low,
        "high": high,
        "distinct": len(set(found)) / n,
        "itself": sum(name == drawn for name, drawn in zip(written, asked, strict=True)) / n,
        "repeated": sum(times[name] > 1 for name in written) / n,
    }

    # forwards of each kind, and all together in units of a full one
    nfe = {kind: sum(o.nfe[kind] for o in outputs) for kind in ("full", "partial", "commit")}
    nfe["all"] = in_full(nfe, partial_cost)
    tokens = sum(len(o.tokens) for o in outputs)
    for unit, count in {"name": n, "token": tokens}.items():
        for kind in ("full", "partial", "all"):
            result[f"{kind}/{unit}"] = nfe[kind] / count
    return result


def name_decoders(model: Model, joint: dict[str, Model], temperature: float) -> dict[str, tuple[Model, Decoding]]:
    """Name -> (weights, settings): the factorised ones, the released ones with edits where the
    surest masks are written first, as they do, and every Stage B there is.

    joint: the weights that have a Stage B, by label.
    """
    d = Decoding(
        gen_length=NAME_TOKENS,
        tau_t2t=None,
        eos_early_stop=True,
        n_rounds=0,
        temperature=temperature,
    )
    order = model.cfg.order
    decoders = {"one at a time": (model, replace(d, tau_m2t=1.0))}
    for gate, tau in GATES[order].items():
        decoders[gate] = (model, replace(d, tau_m2t=tau))
    if order == "surest":
        for mode, taus in MODES.items():
            decoders[f"released {mode.upper()}"] = (model, replace(d, **taus))
    for label, net in joint.items():
        for gate, tau in GATES[order].items():
            decoders[f"{label}, {gate}"] = (net, replace(d, tau_m2t=tau, n_rounds=net.cfg.n_rounds))
    return decoders


def evaluate_names(ckpt: str, args: Namespace, device: torch.device) -> None:
    """Print what every decoder writes for the names drawn of each group, of the checkpoint and of
    its adapters.
    """
    about = read_json(Path(ckpt) / "names.json", "names.json (of train.py --data names)")
    dtype = DTYPES[args.dtype]
    model = load_model(ckpt, device, dtype)
    tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)

    # a checkpoint has a Stage B of its own if its markers are not all 0; every adapter has one
    joint = {}
    if model.markers.any():
        joint["Stage B"] = model
    for adapter in args.adapter:
        joint[adapter] = load_model(ckpt, device, dtype, adapter)

    decoders = name_decoders(model, joint, args.temperature)
    groups = {group: draw_names(args.prompts, group, tokenizer) for group in ("held out", "trained")}
    total = len(decoders) * sum(len(prompts) for prompts in groups.values())
    with tqdm(total=total, desc="judge", unit="name", disable=None) as bar:
        for group, prompts in groups.items():
            different = {tuple(ids) for ids in prompts.values()}
            bar.write(
                f"{ckpt}: {len(prompts)} {group} names, {len(different)} different prompts;"
                f" trained on Unicode {about.get('unidata_version')}, judged by {data.unicodedata.unidata_version}",
                file=sys.stderr,
            )
            rows = []
            for name, (net, d) in decoders.items():
                result = complete(net, tokenizer, prompts, d, args.seed)
                bar.update(len(prompts))
                if args.json:
                    record = {"ckpt": ckpt, "decoder": name, "group": group, "prompts": len(prompts)}
                    print(json.dumps(record | result))
                rows.append([name] + [f"{value:.3f}" for value in result.values()])
            if not args.json:
                print_table([group, *result], rows)


def complete(model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], d: Decoding, seed: int) -> dict:
    """Complete every prompt (name -> ids) and judge the names that come of it."""
    outputs = generate(model, list(prompts.values()), d, seed)
    written = []
    for ids, output in zip(prompts.values(), outputs, strict=True):
        written.append(tokenizer.decode(ids + output.tokens))
    return judge(list(prompts), written, outputs, model.partial_cost)


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("toys and names")
    group.add_argument("--data", choices=["names", *toy.TASKS], required=True, help="what the checkpoint learned")
    group.add_argument("--ckpt", nargs="+", required=True, help="checkpoint folders, each with its own tables")
    group.add_argument("--adapter", nargs="+", default=[], help="folders of adapters that were trained from it")
    group.add_argument("--json", action="store_true", help="an object a line: a toy's table, or one decoder of names")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    group.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    group = parser.add_argument_group("names only")
    group.add_argument("--prompts", type=bounded(int, 1), default=256, help="names drawn of each group")
    group.add_argument("--temperature", type=bounded(float, 0), default=0.0, help="0: greedy")
    group.add_argument("--seed", type=int, default=0, help="of the tokens drawn, with a temperature")
    args = parser.parse_args()
    if args.data != "names":
        for flag in ("prompts", "temperature", "seed"):
            if getattr(args, flag) != parser.get_default(flag):
                parser.error("--prompts, --temperature and --seed are for --data names")

    device = pick_device(args.device)
    for ckpt in args.ckpt:
        if args.data == "names":
            evaluate_names(ckpt, args, device)
        else:
            evaluate_toys(ckpt, args, device)


if __name__ == "__main__":
    main()
