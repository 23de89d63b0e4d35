"""Evaluation: what a decoder does where every answer can be checked, on toys and on names.

On a toy (toy.py) a decoder that writes all positions in one step draws each by itself, and so it
loses at least the total correlation, TC. Coherence alone is won by always writing one answer.

    loses      KL(truth || drawn) in nats, enumerated, a mean over contexts: in one step, and one
               token at a time; what the other decoders draw cannot be enumerated
    coherent   the share of contexts whose greedy answer is possible
    mode       the share whose greedy answer is the most probable one

Held-out names of Unicode characters are completed from their first third of tokens (rounded up), and
`unicodedata` judges: a completion counts if some character has that name. The rows are those of the
paper's Table 2 in small, and their cost is in forwards a name, everything counted: full ones, commits,
and partial ones at their share of the layers. With --json also `itself`, the share of completions that
are the very name drawn, and `distinct`, of different existing names.

    python evaluate.py                                              # assets/names/alpha, a minute
    python evaluate.py --ckpt assets/names/paper assets/names/alpha # side by side
    python evaluate.py --holes 2                                    # two tokens of a block masked: infilling
    python evaluate.py --ckpt out/modes                             # a toy's decoders
"""

import json
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import toy
from cache import Output, in_full
from checkpoint import base_of, load_model, load_tokenizer, names_of
from lib import data
from lib.tokenizer import Tokenizer
from lib.util import (
    Mistake,
    Parser,
    bounded,
    command,
    entry,
    exists,
    fail,
    generator,
    pick_device,
    print_table,
    read_json,
)
from model import Config, Model
from sample import Decoding, Step, denoise, generate
from toy import Toy

# R rows, N contexts, S support tuples, m answer positions, V symbols

ROWS = 4096  # in one forward of a toy

ONE_STEP = Decoding(tau_m2t=-1, tau_t2t=None)  # every mask at once
TOY_DECODERS = {
    "one at a time": Decoding(tau_m2t=1.0, tau_t2t=None, n_rounds=0),
    "Stage A, one step": replace(ONE_STEP, n_rounds=0),
    "Stage B, one step": ONE_STEP,
    "all at once, then edits": replace(ONE_STEP, n_rounds=0, tau_t2t=0.0, max_post_steps=64),
    "released gates (0.7, 0.5)": Decoding(tau_m2t=0.7, tau_t2t=0.5, n_rounds=0),
}

# the paper's Table 2 in small: of the base, and of an adapter on it
NAMES = Decoding(gen_length=32)
OFF = dict(n_rounds=0)
BASE_ROWS = {
    "base, gated edits (released)": OFF | dict(tau_t2t=0.5),
    "base, edits off": OFF | dict(tau_t2t=None),
    "base, all at once": OFF | dict(tau_m2t=-1.0, tau_t2t=None),
}
ADAPTER_ROWS = {
    "Stage B off, gated edits": OFF | dict(tau_t2t=0.5),
    "Stage B off, ungated edits": OFF,
    "Stage B, gated edits": dict(tau_t2t=0.5),
    "Stage B, ungated edits (paper)": {},
    "Stage B, edits off": dict(tau_t2t=None),
    "Stage B, ungated, tau_m2t 0.5": dict(tau_m2t=0.5),
    "Stage B, ungated, tau_m2t 0.3": dict(tau_m2t=0.3),
    "Stage B, all at once": dict(tau_m2t=-1.0),
    "Stage B, all at once, edits off": dict(tau_m2t=-1.0, tau_t2t=None),
    "Stage B off, all at once, edits off": OFF | dict(tau_m2t=-1.0, tau_t2t=None),
}
HOLE_ROWS = {
    "Stage A, one at a time": OFF | dict(tau_m2t=1.0, tau_t2t=None),
    "Stage A, all at once": OFF | dict(tau_m2t=-1.0, tau_t2t=None),
    "Stage B, all at once": dict(tau_m2t=-1.0, tau_t2t=None),
}


def forwards(model: Model, outputs: list[Output]) -> float:
    """All forwards of a decode, in full ones."""
    return sum(in_full(output.nfe, model.partial_cost) for output in outputs)


# --- toys
@torch.no_grad()
def answer_log_probs(model: Model, task: Toy, c: Tensor, z: Tensor, n_rounds: int) -> Tensor:
    """log q(x_i | z) (R, m, V) float64 of answers z (R, m) int64, -1 where masked, in contexts c (R,).

    By Stage A if n_rounds is 0, else by Stage B with every masked position in the bundle.
    """
    device = next(model.parameters()).device
    logits = []
    for c_part, z_part in zip(c.split(ROWS), z.split(ROWS), strict=True):
        answer = z_part.masked_fill(z_part < 0, task.mask_id)
        ids = torch.cat([task.prompt(c_part), answer], dim=1).to(device)
        bundle = ids == task.mask_id
        ctx = model.context(torch.ones_like(bundle))

        h = model.prefix(ids, ctx)
        if n_rounds > 0:
            h = model.coordinate(h, bundle, ctx, n_rounds)
        else:
            h = model.last_n(h, ctx)
        logits.append(model.logits(h[:, task.m :]).cpu().double())

    # normalised over all tokens, then cut to the symbols: mass on any other token stays lost
    return torch.cat(logits).log_softmax(-1)[..., : task.V]


def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    q = answer_log_probs(model, task, c, masks, n_rounds).exp()
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
        log_p = answer_log_probs(model, task, states[:, 0], states[:, 1:], 0)

        # the open position with the surest token is written next
        written = states[:, 1:] >= 0
        at = log_p.amax(-1).masked_fill(written, -math.inf).argmax(-1)[back]  # (N*S,)
        token = x.gather(1, at[:, None])
        log_q += log_p[back, at, token[:, 0]]
        z = z.scatter(1, at[:, None], token)
    return log_q.exp().view(N, S) * (task.prob > 0)


def quality(model: Model, task: Toy, d: Decoding, step: Callable[..., Step] = denoise) -> dict[str, float]:
    """Every context decoded once, greedily, by the decoder that users run: shares of coherent answers and
    of joint modes, forwards an answer, everything counted and full ones alone.
    """
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m), step=step)

    # an eos inside cuts the answer: fill it up again
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]
    log_p = task.log_prob(c, torch.tensor(answers))
    best = task.prob.amax(-1).log()

    coherent = log_p > -math.inf
    mode = log_p >= best - 1e-9  # any of the most probable tuples is the mode
    return {
        "coherent": float(coherent.double().mean()),
        "mode": float(mode.double().mean()),
        "forwards": forwards(model, outputs) / task.n_ctx,
        "full": sum(output.nfe["full"] for output in outputs) / task.n_ctx,
    }


def evaluate_toy(model: Model, task: Toy) -> None:
    """A row for each decoder, beside the least that one step can lose."""
    # a decoder that uses Stage B, once, takes the model's number of rounds
    K = model.cfg.n_rounds

    # in one step, and one at a time, what is drawn has a distribution that can be enumerated
    tables = {
        "one at a time": chain_table(model, task),
        "Stage A, one step": one_step_table(model, task, 0),
        "Stage B, one step": one_step_table(model, task, K),
    }
    lost = {name: f"{toy.kl(task.prob, q).mean():.3f}" for name, q in tables.items()}

    # the least, then what each decoder loses; what it writes greedily; its cost
    tc = f"{task.tc().mean():.3f}"
    rows = [["one step, at best", tc, "", "", ""]]
    for name, d in TOY_DECODERS.items():
        measured = quality(model, task, replace(d, n_rounds=K * d.n_rounds))
        shares = [f"{measured[key]:.3f}" for key in ("coherent", "mode")]
        rows.append([name, lost.get(name, ""), *shares, f"{measured['forwards']:.2f}"])

    print(f"{task.name}: TC = {tc} nats; one step draws each position by itself, and loses at least that")
    print_table(["decoder", "loses", "coherent", "mode", "forwards"], rows)
    print("loses: KL(truth || drawn) in nats; coherent, mode: greedy answers that are possible, the likeliest")


def load_task(folder: Path) -> Toy:
    """The toy that a checkpoint was trained on, from its toy.json."""
    path = folder / "toy.json"
    settings = read_json(path, "toy or names to judge by (a folder of train.py --data names, or a toy)")
    name = entry(settings, "name", str, path)
    if name not in toy.TASKS:
        fail(f"{path} names a toy {name!r}: there are {', '.join(toy.TASKS)}")
    sizes = [f"{key}={value}" for key, value in settings.items() if key != "name"]
    try:
        return toy.make(name, **toy.sizes(sizes))
    except Mistake as e:
        fail(f"{path}: {e}")


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


def complete(
    model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], d: Decoding,
    step: Callable[..., Step] = denoise,
) -> dict:  # fmt: skip
    """Complete every prompt (name -> ids), judge the names that come of it, and count."""
    outputs = generate(model, list(prompts.values()), d, step=step)
    written = [tokenizer.decode(output.prompt + output.tokens) for output in outputs]
    found = [exists(name) is not None for name in written]
    n = len(prompts)
    return {
        "exist": sum(found) / n,
        "forwards": forwards(model, outputs) / n,
        "full": sum(output.nfe["full"] for output in outputs) / n,
        "tokens": sum(len(output.tokens) for output in outputs) / n,
        "itself": sum(name == drawn for name, drawn in zip(written, prompts, strict=True)) / n,
        "distinct": len({name for name, real in zip(written, found, strict=True) if real}) / n,
        "found": found,
        "written": written,
    }


def name_rows(folders: list[Path], device: torch.device, holes: bool) -> list[tuple[str, Path, Decoding]]:
    """What is evaluated: a row's name, the folder that decodes, and how."""
    # of an adapter's base the rows that it is compared with
    bases = dict.fromkeys(base_of(folder) for folder in folders)
    rows = [(name, base, replace(NAMES, **how)) for base in bases for name, how in BASE_ROWS.items() if not holes]
    for name, how in (HOLE_ROWS if holes else ADAPTER_ROWS).items():
        if holes:
            how = how | dict(gen_length=0, holes=True)
        rows += [(name, folder, replace(NAMES, **how)) for folder in folders if holes or folder not in bases]
    return rows


def evaluate_names(folders: list[Path], device: torch.device, args: Namespace) -> None:
    """Print what every decoder writes for held-out names, a column a folder."""
    rows = name_rows(folders, device, args.holes > 0)
    models = {folder: load_model(folder, device, torch.float32) for folder in dict.fromkeys(row[1] for row in rows)}
    cfg = models[rows[0][1]].cfg
    tokenizer = load_tokenizer(folders[0], cfg.tokenizer)
    asked = "completed from their first third"
    prompts = draw_names(args.prompts, "held out", tokenizer)
    if args.holes:
        asked = f"{args.holes} tokens of a block masked"
        prompts = draw_holes(args.prompts, args.holes, "held out", tokenizer, cfg)

    # a line a row; a folder's column has its share, and its cost
    table: dict[str, dict[Path, str]] = {}
    for name, folder, d in tqdm(rows, desc="evaluate", unit="decoder", leave=False, disable=None):
        model = models[folder]
        found = complete(model, tokenizer, prompts, replace(d, n_rounds=d.n_rounds * model.cfg.n_rounds))
        if args.json:
            found["found"] = "".join("01"[real] for real in found["found"])
            print(json.dumps({"ckpt": str(folder), "decoder": name, "prompts": len(prompts)} | found))
        table.setdefault(name, {})[folder] = f"{found['exist']:.3f} {found['forwards']:5.2f}"

    if not args.json:
        trained = names_of(folders[0])["unidata_version"]
        judged = data.unicodedata.unidata_version
        print(f"{len(prompts)} held-out names, {asked}; trained on Unicode {trained}, judged by {judged}")
        columns = list(models)
        lines = [[name, *(cells.get(folder, "") for folder in columns)] for name, cells in table.items()]
        print_table(["share that exists, forwards a name", *map(str, columns)], lines)


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("toys and names").add_argument
    add("--ckpt", type=Path, nargs="+", default=[Path("assets/names/alpha")], help="a model's folder, or an adapter's; "
        "of names several, side by side")  # fmt: skip
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add = parser.add_argument_group("names only").add_argument
    add("--json", action="store_true", help="an object a line: one decoder's measures, and every completion")
    add("--prompts", type=bounded(int, 1), default=256, help="names that are completed")
    add("--holes", type=bounded(int, 0), default=0, help="mask so many tokens of a block of each name, and fill these")
    args = parser.parse_args()

    device = pick_device(args.device)
    of_names = [names_of(folder) is not None for folder in args.ckpt]
    if all(of_names):
        evaluate_names(args.ckpt, device, args)
    elif len(args.ckpt) == 1:
        task = load_task(args.ckpt[0])
        evaluate_toy(load_model(args.ckpt[0], device, torch.float32), task)
    else:
        fail("--ckpt: several folders are compared on names alone")


if __name__ == "__main__":
    main()
