"""Evaluation: what a decoder does where every answer can be checked, on toys and on names.

On a toy (toy.py) a decoder that writes all positions in one step draws each by itself, and so it
loses at least the total correlation, TC; causal Stage B need not. Coherence alone is won by always writing one answer.

    KL         KL(truth || drawn) in nats, enumerated, a mean over contexts; what the loops of the other
               decoders draw cannot be enumerated
    possible   the share of contexts whose greedy answer is possible
    likeliest  the share whose greedy answer is the most probable one

Held-out names of Unicode characters are completed from their first third of tokens (rounded up), and
`unicodedata` judges: a completion counts if some character has that name. Costs are in forwards, everything
counted: full ones, refreshes, and partial ones at their share of the layers.

Above Stage A: causal Stage B's log-probability of what it writes together, less the sum of Stage A's, in nats a bundle.
Where tokens are drawn, --temperature 1, that estimates the bundle's total correlation.

    python evaluate.py                                              # assets/names/causal, a minute
    python evaluate.py --ckpt assets/names/paper assets/names/causal # side by side
    python evaluate.py --ckpt out/toy                               # a toy's decoders
"""

import math
import unicodedata
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import toy
from cache import Cached, Output, Uncached, in_full
from checkpoint import about_adapter, base_of, judge_of, load_model, read_config
from lib.rows import read_meta, read_split
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import (
    Mistake,
    Parser,
    bounded,
    command,
    exists,
    fail,
    generator,
    pick_device,
    print_table,
    quoted,
)
from model import Model
from sample import Decoding, Step, generate, step_of, temperature
from toy import Toy

# R rows, N contexts, S support tuples, m answer positions, V symbols

ROWS = 4096  # in one forward of a toy
NAMES_FOLDER = Path(__file__).parent / "data" / "names"

OFF = dict(n_rounds=0)
ONE_STEP = Decoding(tau_m2t=-1, tau_t2t=None)  # every mask at once
JOINT = Decoding(tau_joint=0.0, tau_t2t=None)  # every mask of a block, in looks
TOY_DECODERS = {
    "one at a time": Decoding(tau_m2t=1.0, tau_t2t=None, n_rounds=0),
    "Stage A, one step": replace(ONE_STEP, n_rounds=0),
    "Stage B, one step": ONE_STEP,
    "all at once, then edits": replace(ONE_STEP, n_rounds=0, tau_t2t=0.0, max_post_steps=64),
    "released gates (0.7, 0.5)": Decoding(tau_m2t=0.7, tau_t2t=0.5, n_rounds=0),
}

# of a base, of the paper's adapter (Table 2 in small), and of causal Stage B
NAMES = Decoding(gen_length=32)
RUN = dict(tau_t2t=None)
BASE_ROWS = {
    "base, one at a time from the left": OFF | RUN | dict(tau_joint=1.0),
    "base, longest run above 0.7": OFF | RUN | dict(tau_joint=0.7),
    "base, longest run above 0.5": OFF | RUN | dict(tau_joint=0.5),
    "base, longest run above 0.3": OFF | RUN | dict(tau_joint=0.3),
    "base, above 0.7, gated edits (released)": OFF | dict(tau_t2t=0.5),
    "base, above 0.7, edits off": OFF | dict(tau_t2t=None),
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
CAUSAL_ROWS = {
    "causal, whole blocks": RUN | dict(tau_joint=0.0),
    "causal, longest run above 0.2": RUN | dict(tau_joint=0.2),
    "causal, longest run above 0.5": RUN | dict(tau_joint=0.5),
    "causal, longest run above 0.8": RUN | dict(tau_joint=0.8),
    "causal, one look, above 0.7": RUN,
    "causal, one look, above 0.3": RUN | dict(tau_m2t=0.3),
    "causal, one look, all at once": RUN | dict(tau_m2t=-1.0),
}


def forwards(model: Model, outputs: list[Output]) -> float:
    """All forwards of a decode, in full ones."""
    return sum(in_full(output.nfe, model.partial_cost) for output in outputs)


# --- toys
@torch.no_grad()
def answer_log_probs(
    model: Model, task: Toy, c: Tensor, z: Tensor, n_rounds: int, tokens: Tensor | None = None
) -> Tensor:  # fmt: skip
    """log q(x_i | z) (R, m, V) float64 of answers z (R, m) int64, -1 where masked, in contexts c (R,).

    By Stage A if n_rounds is 0, else by Stage B with every masked position in the bundle; causal Stage B also reads
    tokens (R, m) int64, each position those before it. The decoder's own forwards: what counts is what decodes.
    """
    device = model.wte.weight.device
    logits = []
    for at in range(0, len(c), ROWS):
        part = slice(at, at + ROWS)
        answer = z[part].masked_fill(z[part] < 0, task.mask_id).to(device)
        engine = Cached(model, task.prompt(c[part]).tolist(), n_rounds)
        h, states = engine.stage_a(answer)
        found = model.logits(states)
        if n_rounds > 0:
            read = answer if tokens is None else tokens[part].to(device)
            states = engine.stage_b(h, answer == task.mask_id, read)
            found = model.logits_b(states, found)
        logits.append(found.cpu().double())

    # normalised over all tokens, then cut to the symbols: mass on any other token stays lost
    return torch.cat(logits).log_softmax(-1)[..., : task.V]


def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    q = answer_log_probs(model, task, c, masks, n_rounds).exp()
    return toy.product_table(task, c, q)


def causal_table(model: Model, task: Toy) -> Tensor:
    """q over the support when causal Stage B draws all positions, by the chain rule: each tuple is read as what stands
    before its own positions. (N, S) float64."""
    N, S, m = task.support.shape
    c = torch.arange(N).repeat_interleave(S)
    x = task.support.reshape(N * S, m)
    masks = torch.full_like(x, -1)
    log_p = answer_log_probs(model, task, c, masks, model.cfg.n_rounds, tokens=x)
    log_q = log_p.gather(2, x[..., None]).sum((1, 2))
    return log_q.exp().view(N, S) * (task.prob > 0)


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


def quality(model: Model, task: Toy, d: Decoding) -> dict[str, float]:
    """Every context decoded once, greedily, by the decoder that users run: shares of possible answers and
    of the likeliest ones, forwards an answer, everything counted, full and partial ones.
    """
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m))

    # an eos inside cuts the answer: fill it up again
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]
    log_p = task.log_prob(c, torch.tensor(answers))
    best = task.prob.amax(-1).log()

    possible = log_p > -math.inf
    likeliest = log_p >= best - 1e-9  # any of the most probable tuples
    return {
        "possible": float(possible.double().mean()),
        "likeliest": float(likeliest.double().mean()),
        "forwards": forwards(model, outputs) / task.n_ctx,
        "partial": sum(output.nfe["partial"] for output in outputs) / task.n_ctx,
    }


def evaluate_toy(model: Model, task: Toy) -> None:
    """A row for each decoder, beside the least that one step of independent draws can lose."""
    # a decoder that uses Stage B, once, takes the model's number of rounds
    K = model.cfg.n_rounds

    # these draw from a distribution that can be enumerated
    decoders = dict(TOY_DECODERS)
    tables = {"one at a time": chain_table(model, task), "Stage A, one step": one_step_table(model, task, 0)}
    if model.cfg.causal:
        del decoders["Stage B, one step"]
        decoders["causal Stage B, one step"] = JOINT
        tables["causal Stage B, one step"] = causal_table(model, task)
    else:
        tables["Stage B, one step"] = one_step_table(model, task, K)
    lost = {name: f"{toy.kl(task.prob, q).mean():.3f}" for name, q in tables.items()}

    # the least, then what each decoder loses; what it writes greedily; its cost
    tc = f"{task.tc().mean():.3f}"
    rows = [["independent draws, at best", tc, "", "", "", ""]]
    for name, d in decoders.items():
        found = quality(model, task, replace(d, n_rounds=K * d.n_rounds))
        shares = [f"{found[key]:.3f}" for key in ("possible", "likeliest")]
        rows.append([name, lost.get(name, ""), *shares, f"{found['forwards']:.2f}", f"{found['partial'] / K:.2f}"])

    print(f"{task.name}: TC = {tc} nats; a step that draws each position by itself loses at least that")
    print_table(["decoder", "KL", "possible", "likeliest", "forwards", "looks"], rows)
    print("KL(truth || drawn) in nats; possible, likeliest: shares of the greedy answers; looks: passes of Stage B")


def load_task(folder: Path) -> Toy:
    """The toy that a checkpoint was trained on."""
    judge = judge_of(folder)
    if "toy" not in judge:
        shown = f"python sample.py --ckpt {quoted(folder)}"
        fail(f"{folder} was trained on no toy and on no names, so nothing judges it: {shown}")
    sizes = {key: value for key, value in judge.items() if key != "toy"}
    try:
        task = toy.make(judge["toy"], **sizes)
    except (Mistake, TypeError) as e:
        fail(f"{base_of(folder)}/meta.json: {e}")
    cfg = read_config(folder)
    if (task.m, task.eos_id, task.mask_id) != (cfg.block_length, cfg.eos_id, cfg.mask_id):
        fail(f"{base_of(folder)}/meta.json: of this toy the model has other tokens, or other blocks")
    return task


# --- names
def read_names(group: str) -> list[str]:
    """All names of data/names, "held out" or "trained" ones."""
    split = "val" if group == "held out" else "train"
    ids, starts, _ = read_split(NAMES_FOLDER / f"{split}.safetensors", read_meta(NAMES_FOLDER).vocab_size)
    tokenizer = load_tokenizer(NAMES_FOLDER)
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def names_tokenizer(folder: Path) -> Tokenizer:
    """What a model of names reads with; any other folder is refused."""
    tokenizer = load_tokenizer(base_of(folder))
    if tokenizer is None or "names" not in judge_of(folder):
        fail(f"{folder} is no model of names with its tokenizer.json, and names are what it should complete here")
    return tokenizer


def draw_names(n: int, group: str, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """n names, "held out" or "trained" ones -> the first third of their tokens."""
    names = read_names(group)
    order = torch.randperm(len(names), generator=generator("names", group))
    prompts = {}
    for i in order[:n].tolist():
        ids = tokenizer.encode_document(names[i]).tolist()
        prompts[names[i]] = ids[: math.ceil(len(ids) / 3)]
    return prompts


class Dependence:
    """A step, and beside it what its bundles depend on each other: log p_B(bundle) less the sum of Stage A's."""

    def __init__(self, step: Callable[..., Step]):
        self.step = step
        self.nats: list[float] = []

    def __call__(self, engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
        done = self.step(engine, z, given, u, d)
        _, states = engine.stage_a(z)
        logits = engine.model.logits(states) / (d.temperature or 1.0)
        log_a = logits.log_softmax(-1).gather(-1, done.token[..., None])[..., 0]
        nats = torch.where(done.bundle, done.conf.log() - log_a, 0.0).sum(-1)
        self.nats += nats[done.bundle.sum(-1) > 1].tolist()
        return done


def complete(
    model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], d: Decoding,
    step: Callable[..., Step] | None = None,
) -> dict:  # fmt: skip
    """Complete every prompt (name -> ids), judge the names that come of it, and count."""
    step = step or step_of(d)
    if model.cfg.causal and d.tau_joint is not None and d.n_rounds > 0:
        step = Dependence(step)
    outputs = generate(model, list(prompts.values()), d, step=step)
    written = [tokenizer.decode(output.prompt + output.tokens) for output in outputs]
    found = [exists(name) is not None for name in written]
    n = len(prompts)
    tokens = sum(len(output.tokens) for output in outputs)
    tokens += sum(ids.count(model.cfg.mask_id) for ids in prompts.values())
    nats = step.nats if isinstance(step, Dependence) else []
    return {
        "exist": sum(found) / n,
        "forwards": forwards(model, outputs) / n,
        "per_token": forwards(model, outputs) / max(1, tokens),
        "full": sum(output.nfe["full"] for output in outputs) / n,
        "tokens": tokens / n,
        "tc": sum(nats) / len(nats) if nats else None,
        "found": found,
        "written": written,
    }


def name_rows(folders: list[Path]) -> list[tuple[str, Path, Decoding]]:
    """What is evaluated: a row's name, the folder that decodes, and how."""
    # of an adapter's base the rows that it is compared with
    bases = dict.fromkeys(base_of(folder) for folder in folders)
    rows = [(name, base, replace(NAMES, **how)) for base in bases for name, how in BASE_ROWS.items()]
    for folder in folders:
        causal = about_adapter(folder).get("causal", read_config(folder).causal)
        own = CAUSAL_ROWS if causal else ADAPTER_ROWS
        if folder in bases and not causal:
            continue
        rows += [(name, folder, replace(NAMES, **how)) for name, how in own.items()]
    return rows


def evaluate_names(folders: list[Path], device: torch.device, args: Namespace) -> None:
    """Print what every decoder writes for held-out names, a column a folder."""
    rows = name_rows(folders)
    models = {folder: load_model(folder, device, torch.float32) for folder in dict.fromkeys(row[1] for row in rows)}
    if len({(base_of(folder) / "tokenizer.json").read_bytes() for folder in models}) > 1:
        fail("--ckpt: models that read by one tokenizer are compared")
    tokenizer = load_tokenizer(base_of(folders[0]))
    prompts = draw_names(args.prompts, "held out", tokenizer)

    lines = []
    for name, folder, d in tqdm(rows, desc="evaluate", unit="decoder", leave=False, disable=None):
        model = models[folder]
        d = replace(d, n_rounds=d.n_rounds * model.cfg.n_rounds, temperature=args.temperature)
        found = complete(model, tokenizer, prompts, d)
        tc = "" if found["tc"] is None else f"{found['tc']:.2f}"
        figures = [f"{found[key]:.{digits}f}" for key, digits in (("exist", 3), ("forwards", 2), ("per_token", 3))]
        lines.append([f"{folder}  {name}", *figures, tc])

    trained = judge_of(folders[0]).get("names")
    judged = unicodedata.unidata_version
    print(f"{len(prompts)} held-out names, completed from their first third; "
          f"trained on Unicode {trained}, judged by {judged}")  # fmt: skip
    print_table(["", "exist", "forwards a name", "a token", "above Stage A"], lines)


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("toys and names").add_argument
    add("--ckpt", type=Path, nargs="+", default=[Path("assets/names/causal")], help="a model's folder, or an "
        "adapter's; of names several (default: assets/names/causal)")  # fmt: skip
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add = parser.add_argument_group("names only").add_argument
    add("--prompts", type=bounded(int, 1), default=256, help="names that are completed")
    add("--temperature", type=temperature, default=0.0, help="0: the likeliest tokens; 1: draws")
    args = parser.parse_args()

    device = pick_device(args.device)
    if all("names" in judge_of(folder) for folder in args.ckpt):
        evaluate_names(args.ckpt, device, args)
    elif len(args.ckpt) == 1:
        task = load_task(args.ckpt[0])
        evaluate_toy(load_model(args.ckpt[0], device, torch.float32), task)
    else:
        fail("--ckpt: several folders are compared on names alone")


if __name__ == "__main__":
    main()
