"""Evaluation: what a decoder does where every answer can be checked.

On a toy (toy.py) a one-step decoder's output distribution is a product, enumerated and compared with the true table:
validity alone can be won by always writing one phrase.

Names of Unicode characters are completed from their first third of tokens (rounded up), held out and trained apart;
`unicodedata` judges. Shares of the names drawn: `exist`, the completion is some character's name (low, high: Wilson's
95 %); `itself`, it is the very name drawn, so of a held-out prompt one never trained on; `distinct`, different existing
names; `repeated`, completions that another drawn name's completion equals, real or not. Forwards: all, in full ones.

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

import data
import toy
from cache import Output, in_full
from checkpoint import DTYPES, load_model, load_tokenizer
from data import Parser, Tokenizer, bounded, fail, pick_device, read_json
from model import Config, Model
from sample import MODES, Decoding, generate
from toy import Toy

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


def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    q = toy.answer_log_probs(model, task, c, torch.full((task.n_ctx, task.m), -1), n_rounds).exp()
    return toy.product_table(task, c, q)


def distances(task: Toy, q: Tensor) -> dict[str, float]:
    """Means over contexts, nats. Reverse KL is infinite as soon as q writes anything outside the support."""
    outside, forward = float((1 - q.sum(-1)).clamp(min=0).mean()), float(toy.kl(task.prob, q).mean())
    tv = 0.5 * (float((task.prob - q).abs().sum(-1).mean()) + outside)
    reverse = float(toy.kl(q, task.prob).mean()) if outside < 1e-9 else math.inf
    return {"forward_kl": forward, "tv": tv, "reverse_kl": reverse, "outside": outside}


def quality(model: Model, task: Toy, d: Decoding) -> dict[str, float]:
    """Every context decoded once, greedily, by the decoder that users run: share of coherent answers and of joint
    modes, mean log-probability lost to the mode (over coherent answers), forwards a token."""
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m))
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]  # an eos inside cuts the answer
    log_p, best = task.log_prob(c, torch.tensor(answers)), task.log_prob(c, task.mode())
    coherent, tokens = log_p > -math.inf, task.n_ctx * task.m
    return {
        "coherent": float(coherent.double().mean()),
        "mode_hit": float((log_p >= best - 1e-9).double().mean()),  # any of the most probable ones is the mode
        "lost": float((best - log_p)[coherent].mean()) if coherent.any() else math.inf,
        "nfe_full": sum(o.nfe["full"] for o in outputs) / tokens,
        "nfe_partial": sum(o.nfe["partial"] for o in outputs) / tokens,
    }


def evaluate_toy(model: Model, task: Toy) -> dict:
    """{task, tc, h_joint, decoders: {name: {...}}}, nats and means over contexts."""
    K = model.cfg.n_rounds
    decoders = {n: quality(model, task, replace(d, n_rounds=d.n_rounds and K)) for n, d in DECODERS.items()}
    decoders["Stage A, one step"] |= distances(task, one_step_table(model, task, 0))
    decoders["Stage B, one step"] |= distances(task, one_step_table(model, task, K))
    known = {"task": task.name, "tc": float(task.tc().mean()), "h_joint": float(task.h_joint().mean())}
    return known | {"decoders": decoders}


def print_table(head: list[str], rows: list[list[str]]) -> None:
    width = [max(len(r[k]) for r in [head, *rows]) for k in range(len(head))]
    for r in [head, *rows]:
        print("  ".join([r[0].ljust(width[0]), *(cell.rjust(w) for cell, w in zip(r[1:], width[1:], strict=True))]))


def load_task(name: str, ckpt: str) -> Toy:
    """The toy that a checkpoint was trained on, from the toy.json beside it."""
    settings = read_json(Path(ckpt) / "toy.json", "toy settings (a checkpoint of train.py --data TOY)")
    if settings.pop("name", None) != name:
        fail(f"{ckpt} was trained on another toy than --data {name}")
    return toy.make(name, **toy.sizes([f"{size}={value}" for size, value in settings.items()]))


def evaluate_toys(ckpt: str, args: Namespace, device: torch.device) -> None:
    task = load_task(args.data, ckpt)
    keys = ["coherent", "mode_hit", "lost", "forward_kl", "tv", "reverse_kl", "nfe_full", "nfe_partial"]
    head = ["decoder", "coherent", "mode", "lost", "KL(p||q)", "TV", "KL(q||p)", "full/tok", "partial/tok"]
    for adapter in args.adapter or [None]:
        report = evaluate_toy(load_model(ckpt, device, DTYPES[args.dtype], adapter), task)
        if args.json:
            print(json.dumps(report).replace("Infinity", "null"))
            continue
        h, tc = report["h_joint"], report["tc"]
        print(f"{task.name}: H = {h:.4f} and H + TC = {h + tc:.4f} nats (the floors of a joint and of a factorised"
              f" one-step loss), TC = {tc:.4f}")  # fmt: skip
        print("greedy: coherent, joint-mode hit, log-probability lost; sampling: KL(p||q), total variation, KL(q||p)")
        shown = {name: [f"{v[k]:.3f}" if k in v else "-" for k in keys] for name, v in report["decoders"].items()}
        print_table(head, [[name, *cells] for name, cells in shown.items()])


# --- names
def wilson(k: int, n: int) -> tuple[float, float]:
    """95 % interval (Wilson's) of a share of which k of n were seen."""
    z2 = 1.959963984540054**2
    middle, spread = (k + z2 / 2) / (n + z2), math.sqrt(z2 * k * (n - k) / n + z2 * z2 / 4) / (n + z2)
    return middle - spread, middle + spread


def draw_names(n: int, group: str, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """n names of a group ("held out" or "trained"), drawn by it alone -> the first third of each one's tokens."""
    names = [name for name in data.unicode_names() if data.is_validation(name) == (group == "held out")]
    drawn = [names[i] for i in torch.randperm(len(names), generator=data.generator("names", group))[:n].tolist()]
    ids = {name: tokenizer.encode_document(name).tolist() for name in drawn}
    return {name: i[: -(-len(i) // 3)] for name, i in ids.items()}


def judge(asked: list[str], written: list[str], outputs: list[Output], cfg: Config) -> dict:
    """Shares of one decoder's completions, see above, and its forwards a name and a token; asked: the names drawn."""
    n, found, times = len(written), [name for name in written if data.exists(name)], Counter(written)
    low, high = wilson(len(found), n)
    shares = {"exist": len(found) / n, "low": low, "high": high, "distinct": len(set(found)) / n}
    shares["itself"] = sum(name == drawn for name, drawn in zip(written, asked, strict=True)) / n
    shares["repeated"] = sum(times[name] > 1 for name in written) / n
    nfe = {kind: sum(o.nfe[kind] for o in outputs) for kind in ("full", "partial", "commit")}
    nfe, tokens = nfe | {"all": in_full(nfe, cfg)}, sum(len(o.tokens) for o in outputs)
    each = {"name": n, "token": tokens}
    return shares | {f"{kind}/{unit}": nfe[kind] / each[unit] for unit in each for kind in ("full", "partial", "all")}


def name_decoders(model: Model, joint: dict[str, Model], temperature: float) -> dict[str, tuple[Model, Decoding]]:
    """Name -> (weights, settings): the factorised ones, the released ones with edits, and every Stage B there is."""
    start = Decoding(gen_length=32, eos_early_stop=True, tau_t2t=None, n_rounds=0, temperature=temperature)
    gates = {f"tau_m2t {tau}": tau for tau in (0.4, 0.3, 0.2, 0.15, 0.1)} | {"all at once": -1.0}
    out = {name: (model, replace(start, tau_m2t=tau)) for name, tau in ({"one at a time": 1.0} | gates).items()}
    out |= {f"released {mode.upper()}": (model, replace(start, **taus)) for mode, taus in MODES.items()}
    for label, net in joint.items():
        stage_b = replace(start, n_rounds=net.cfg.n_rounds)
        out |= {f"{label}, {name}": (net, replace(stage_b, tau_m2t=tau)) for name, tau in gates.items()}
    return out


def evaluate_names(ckpt: str, args: Namespace, device: torch.device) -> None:
    version = read_json(Path(ckpt) / "names.json", "names.json (of train.py --data names)").get("unidata_version")
    model, *adapted = [load_model(ckpt, device, DTYPES[args.dtype], a) for a in (None, *args.adapter)]
    tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
    joint = {"Stage B": model} if model.markers.any() else {}
    jobs = name_decoders(model, joint | dict(zip(args.adapter, adapted, strict=True)), args.temperature)
    groups = {group: draw_names(args.prompts, group, tokenizer) for group in ("held out", "trained")}
    with tqdm(total=len(jobs) * sum(map(len, groups.values())), desc="judge", unit="name", disable=None) as bar:
        for group, prompts in groups.items():
            rows, different = [], len(set(map(tuple, prompts.values())))
            bar.write(f"{ckpt}: {len(prompts)} {group} names, {different} different prompts; trained on Unicode "
                      f"{version}, judged by {data.unicodedata.unidata_version}", file=sys.stderr)  # fmt: skip
            for name, (net, d) in jobs.items():
                outputs = generate(net, list(prompts.values()), d, args.seed)
                written = [tokenizer.decode(p + o.tokens) for p, o in zip(prompts.values(), outputs, strict=True)]
                r = judge(list(prompts), written, outputs, net.cfg)
                bar.update(len(prompts))
                if args.json:
                    print(json.dumps({"ckpt": ckpt, "decoder": name, "group": group, "prompts": len(prompts)} | r))
                rows.append([name, *(f"{v:.3f}" for v in r.values())])
            if not args.json:
                print_table([group, *r], rows)


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
    if args.data != "names" and (args.prompts, args.temperature, args.seed) != (256, 0.0, 0):
        parser.error("--prompts, --temperature and --seed are for --data names")
    for ckpt in args.ckpt:
        (evaluate_names if args.data == "names" else evaluate_toys)(ckpt, args, pick_device(args.device))


if __name__ == "__main__":
    main()
