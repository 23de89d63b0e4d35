"""Evaluation: what a decoder does where every answer can be checked, on toys and on names.

On a toy (lib/toy.py) a one-step decoder's output distribution is a product. It is enumerated and
compared with the true table, because validity alone can be won by always writing one phrase.

    coherent   the share of contexts whose greedy answer is one of the toy's phrases
    mode       the share whose answer is the most probable one
    KL         from the true distribution to the decoder's draws, in nats, a mean over contexts

Names of Unicode characters are completed from their first third of tokens (rounded up), held-out
names and trained ones apart, and `unicodedata` judges. Shares of the names drawn:

    exist      the completion is some character's name
    itself     it is the very name drawn: of a held-out prompt, a name that was never trained on
    distinct   different existing names

Forwards are per token, everything counted: full ones, commits, and partial ones at their share of
the layers. Of names --json has all measures, for a script to read.

    python evaluate.py --ckpt assets/names/head      # a base with a head, held-out names, twelve seconds
    python evaluate.py --holes 2                      # the same with two tokens of a block masked
    python evaluate.py --ckpt out/modes               # a toy's decoders
"""

import json
import math
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import load_model, load_tokenizer, names_of
from lib import data, toy
from lib.config import Config
from lib.output import Output, in_full
from lib.tokenizer import Tokenizer
from lib.toy import Toy
from lib.util import Parser, bounded, command, fail, generator, pick_device, read_json, reading
from model import Model
from sample import Decoding, generate, select_bundle

# N contexts, S support tuples, m answer positions

ONE_STEP = Decoding(tau_m2t=-1, tau_t2t=None)  # every mask at once
TOY_DECODERS = {
    "one at a time": Decoding(tau_m2t=1.0, tau_t2t=None, n_rounds=0),
    "Stage A, one step": replace(ONE_STEP, n_rounds=0),
    "Stage B, one step": ONE_STEP,
    "edits only (ICM)": replace(ONE_STEP, n_rounds=0, tau_t2t=0.0, max_post_steps=64),
    "released": Decoding(tau_m2t=0.7, tau_t2t=0.5, n_rounds=0),
}

NAMES = Decoding(gen_length=32, tau_t2t=None, n_rounds=0)

# tau_m2t: where the surest masks are written first it is a gate on each one's probability; from the
# left, on the product of all up to and with its own
GATES = {"surest": (0.4, 0.2, 0.1, -1.0), "leftmost": (0.9, 0.5, 0.2, -1.0)}
KEEP = (0.0, 0.5, 0.8, 0.95)  # tau_keep of a head


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """A table whose first column stands to the left and whose others stand to the right."""
    lines = [head, *rows]
    width = [max(len(line[k]) for line in lines) for k in range(len(head))]
    for first, *others in lines:
        cells = [first.ljust(width[0])]
        cells += [cell.rjust(w) for cell, w in zip(others, width[1:], strict=True)]
        print("  ".join(cells))


def per_token(model: Model, outputs: list[Output], tokens: int) -> dict[str, float]:
    """Forwards a token: full ones, partial ones, and all in units of a full one."""
    nfe = {kind: sum(o.nfe[kind] for o in outputs) for kind in ("full", "partial", "commit", "looks")}
    nfe["forwards"] = in_full(nfe, model.partial_cost)
    return {f"{kind}/token": count / tokens for kind, count in nfe.items()}


# --- toys
def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    q = toy.answer_log_probs(model, task, c, masks, n_rounds).exp()
    return toy.product_table(task, c, q)


def chain_table(model: Model, task: Toy) -> Tensor:
    """q over the support when tokens are drawn one at a time, the surest position first: (N, S) float64.

    A tuple has one path through the states: the position is a function of the state.
    """
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


def quality(model: Model, task: Toy, d: Decoding) -> dict[str, float]:
    """Every context decoded once, greedily, by the decoder that users run: shares of coherent answers and
    of joint modes, forwards a token.
    """
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m))

    # an eos inside cuts the answer: fill it up again
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]
    log_p = task.log_prob(c, torch.tensor(answers))
    best = task.log_prob(c, task.mode())

    coherent = log_p > -math.inf
    mode = log_p >= best - 1e-9  # any of the most probable tuples is the mode
    shares = {"coherent": float(coherent.double().mean()), "mode": float(mode.double().mean())}
    return shares | per_token(model, outputs, task.n_ctx * task.m)


def evaluate_toy(model: Model, task: Toy) -> None:
    """Print a row for every decoder: shares, nats, means over contexts."""
    # a decoder that uses Stage B, once, takes the model's number of rounds
    K = model.cfg.n_rounds
    decoders = {}
    for name, d in TOY_DECODERS.items():
        decoders[name] = quality(model, task, replace(d, n_rounds=K * d.n_rounds))

    # in one step, and one at a time, what is drawn has a distribution that can be enumerated
    tables = {
        "one at a time": chain_table(model, task),
        "Stage A, one step": one_step_table(model, task, 0),
        "Stage B, one step": one_step_table(model, task, K),
    }
    for name, q in tables.items():
        decoders[name]["KL"] = float(toy.kl(task.prob, q).mean())

    tc = float(task.tc().mean())
    h = float(task.h_joint().mean())
    print(f"{task.name}: TC = {tc:.4f} nats; in one step a joint decoder loses at least H = {h:.4f}, "
          f"one apart H + TC = {h + tc:.4f}")  # fmt: skip
    columns = ("coherent", "mode", "KL")
    rows = []
    for name, measured in decoders.items():
        cells = [f"{measured[key]:.3f}" if key in measured else "" for key in columns]
        rows.append([name, *cells, f"{measured['forwards/token']:.2f}"])
    print_table(["decoder", *columns, "forwards/token"], rows)


def load_task(folder: Path) -> Toy:
    """The toy that a checkpoint was trained on, from its toy.json."""
    path = folder / "toy.json"
    settings = read_json(path, "toy or names to judge by (a folder of train.py --data names, or a toy)")
    with reading(path, "toy settings"):
        return toy.make(settings.pop("name"), **settings)


# --- names
def draw_names(n: int, group: str, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """n names, "held out" or "trained" ones -> the first third of their tokens."""
    held_out = group == "held out"
    names = [name for name in data.unicode_names() if data.is_validation(name) == held_out]
    order = torch.randperm(len(names), generator=generator("names", group))
    prompts = {}
    for i in order[:n].tolist():
        ids = tokenizer.encode_document(names[i]).tolist()
        prompts[names[i]] = ids[: math.ceil(len(ids) / 3)]
    return prompts


def draw_holes(n: int, k: int, group: str, tokenizer: Tokenizer, cfg: Config) -> dict[str, list[int]]:
    """n names with k tokens of one block masked, and something visible behind them in this block."""
    B = cfg.block_length
    rng = generator("holes", k)
    prompts = {}
    for name in draw_names(3 * n, group, tokenizer):
        if len(prompts) == n:
            break

        # the blocks with more tokens than that
        ids = tokenizer.encode_document(name).tolist()
        blocks = [at for at in range(0, len(ids), B) if len(ids[at : at + B]) > k]
        if not blocks:
            continue

        # k tokens of one of them, but not its last; the name, and its end, in whole blocks
        at = blocks[int(torch.randint(len(blocks), (), generator=rng))]
        before_last = len(ids[at : at + B]) - 1
        ids += [cfg.eos_id] * (-len(ids) % B)
        for place in torch.randperm(before_last, generator=rng)[:k].tolist():
            ids[at + place] = cfg.mask_id
        prompts[name] = ids
    if not prompts:
        fail(f"--holes {k}: no name has so many tokens in a block of {B}, and one behind them")
    return prompts


def judge(asked: list[str], written: list[str]) -> dict[str, float]:
    """The shares of one decoder's completions (see above): the names drawn, and what became of each."""
    n = len(written)
    found = [name for name in written if data.exists(name)]
    return {
        "exist": len(found) / n,
        "distinct": len(set(found)) / n,
        "itself": sum(name == drawn for name, drawn in zip(written, asked, strict=True)) / n,
    }


def name_decoders(model: Model) -> dict[str, Decoding]:
    """Stage A at several gates; the same with Stage B, or a head at several tau_keep."""
    above = "above" if model.cfg.order == "surest" else "prefix above"
    gates = {"all at once" if tau < 0 else f"{above} {tau}": tau for tau in GATES[model.cfg.order]}
    decoders = {"one at a time": replace(NAMES, tau_m2t=1.0)}
    for gate, tau in gates.items():
        decoders[gate] = replace(NAMES, tau_m2t=tau)

    if model.second_look is not None:
        for keep in KEEP:
            decoders[f"head, tau_keep {keep}"] = replace(NAMES, tau_m2t=-1.0, tau_keep=keep, n_rounds=1)
    elif model.markers.any():
        for gate, tau in gates.items():
            decoders[f"Stage B, {gate}"] = replace(NAMES, tau_m2t=tau, n_rounds=model.cfg.n_rounds)
    return decoders


def hole_decoders(model: Model) -> dict[str, Decoding]:
    """Nothing is written behind the text, so a block ends with its last hole."""

    def first(order: str, p: Tensor, masked: Tensor) -> Tensor:
        return select_bundle(p.amax(-1), masked, 1.0, 1, order)

    start = replace(NAMES, gen_length=0, holes=True)
    decoders = {
        "one at a time, from the left": replace(start, select=partial(first, "leftmost")),
        "one at a time, surest first": replace(start, select=partial(first, "surest")),
        "all at once": replace(start, tau_m2t=-1.0),
    }
    if model.second_look is not None:
        decoders["head"] = replace(start, tau_m2t=-1.0, tau_keep=0.5, n_rounds=1)
    return decoders


def complete(model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], d: Decoding) -> dict:
    """Complete every prompt (name -> ids), judge the names that come of it, and count."""
    outputs = generate(model, list(prompts.values()), d)
    written = [tokenizer.decode(o.prompt + o.tokens) for o in outputs]
    holes = sum(ids.count(model.cfg.mask_id) for ids in prompts.values())
    tokens = holes + sum(len(o.tokens) for o in outputs)
    return judge(list(prompts), written) | per_token(model, outputs, tokens) | {"tokens/name": tokens / len(prompts)}


def evaluate_names(folder: Path, model: Model, about: dict, args: Namespace) -> None:
    """Print what every decoder writes for held-out names; with --json also for trained ones."""
    tokenizer = load_tokenizer(folder, model.cfg.tokenizer)
    asked = "completed from their first third"
    decoders = name_decoders(model)
    if args.holes:
        asked = f"{args.holes} tokens of a block masked"
        decoders = hole_decoders(model)
    groups = ("held out", "trained") if args.json else ("held out",)
    rows = []
    for group in groups:
        if args.holes:
            prompts = draw_holes(args.prompts, args.holes, group, tokenizer, model.cfg)
        else:
            prompts = draw_names(args.prompts, group, tokenizer)
        for name, d in tqdm(decoders.items(), desc=group, unit="decoder", disable=None):
            found = complete(model, tokenizer, prompts, d)
            if args.json:
                about_it = {"ckpt": str(folder), "decoder": name, "group": group, "prompts": len(prompts)}
                print(json.dumps(about_it | found))
            rows.append([name, f"{found['exist']:.3f}", f"{found['forwards/token']:.3f}"])
    if not args.json:
        versions = f"trained on Unicode {about.get('unidata_version')}, judged by {data.unicodedata.unidata_version}"
        print(f"{folder}: {len(prompts)} held-out names, {asked}; {versions}")
        print_table(["decoder", "exist", "forwards/token"], rows)


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("toys and names").add_argument
    add("--ckpt", default="assets/names/head", help="a model's folder, or an adapter's")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add = parser.add_argument_group("names only").add_argument
    add("--json", action="store_true", help="an object a line: one decoder's measures, of held-out or trained names")
    add("--prompts", type=bounded(int, 1), default=256, help="names drawn of each group")
    add("--holes", type=bounded(int, 0), default=0, help="mask so many tokens of a block of each name, and fill these")
    args = parser.parse_args()

    folder = Path(args.ckpt)
    about = names_of(folder)
    task = load_task(folder) if about is None else None
    model = load_model(folder, pick_device(args.device), torch.float32)
    if about is not None:
        evaluate_names(folder, model, about, args)
    else:
        evaluate_toy(model, task)


if __name__ == "__main__":
    main()
