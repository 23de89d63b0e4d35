"""Measure how good a decoder is on toys and names, where answers can be checked, and how many bits a text costs it.

Toys (toy.py). A step that draws each position by itself loses at least the total correlation, TC. A decoder that always
writes the same possible answer is never wrong, so `possible` is not enough.

    KL         KL(truth || drawn) in nats, the mean over contexts. It can be enumerated for a decoder that has one
               step, or that writes one token at a time, and not for the others
    possible   the share of contexts whose greedy answer is possible
    likeliest  the share whose greedy answer is the most probable one (the joint mode, which the paper aims at)
    looks      the passes of Stage B for an answer; here the paper's passes are called looks, too

Names. Held-out names of Unicode characters are completed from their first third of tokens (rounded up). A completion
counts if some character has that name; `unicodedata` knows this. All forwards are counted: full ones, refreshes, and
partial ones at their share of the layers.

Text. Models of text are judged in bits, as are several toys; with --bits any model is. Each held-out block is filled
from masks, with the text before it given, and the table says how many bits a token costs. Nothing is drawn: these are
the probabilities that a model gives to the right tokens. All at once, Stage A pays for each token alone; one at a time,
it pays for each token after those before it, by the chain rule. The difference estimates the total correlation of a
block.

    python evaluate.py                                               # assets/names/paper, a minute
    python evaluate.py --ckpt assets/names/paper assets/names/causal # two adapters side by side
    python evaluate.py --ckpt assets/names/causal --bits             # in bits
    python evaluate.py --ckpt assets/shakespeare/causal              # Shakespeare, in bits a byte
    python evaluate.py --ckpt out/toy                                # a toy's decoders
    python evaluate.py --ckpt out/text --data data/mine              # bits a byte of your own text
"""

import lib.first  # noqa: F401

import math
import unicodedata
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import toy
from cache import Cached
from causal import CausalModel
from checkpoint import base_of, check_same_tokens, judge_of, load_model, read_config
from decoding import Decoding, Output, Step, in_full
from lib.names import draw_names, exists
from lib.rows import Batch, Corpus, get_batch, read_corpus
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import Mistake, Parser, bounded, command, fail, pick_device, print_table, progress, read_json
from model import Model
from sample import generate, temperature
from toy import Toy

# R rows, T positions, N contexts, S support tuples, m answer positions, V symbols, B block_length

TOY_BATCH = 4096  # the rows in one forward of a toy
TEXT_BATCH = 64  # the rows in one forward of text

OFF = dict(n_rounds=0)
ONE_STEP = Decoding(tau_m2t=-1, tau_t2t=None)  # every mask at once
JOINT = Decoding(tau_joint=0.0, tau_t2t=None)  # every mask of a block, in as many looks as it takes
TOY_DECODERS = {
    "one at a time": Decoding(tau_m2t=1.0, tau_t2t=None, n_rounds=0),
    "one at a time, from the left": Decoding(tau_joint=1.0, tau_t2t=None, n_rounds=0),
    "Stage A, one step": replace(ONE_STEP, n_rounds=0),
    "all at once, then edits": replace(ONE_STEP, n_rounds=0, tau_t2t=0.0, max_post_steps=64),
    "released gates (0.7, 0.5)": Decoding(tau_m2t=0.7, tau_t2t=0.5, n_rounds=0),
}

# the rows of the table for a base, for the paper's adapter (a small Table 2), and for causal Stage B
NAME_DECODING = Decoding(gen_length=32)
NO_EDITS = dict(tau_t2t=None)
BASE_ROWS = {
    "base, one at a time from the left": OFF | NO_EDITS | dict(tau_joint=1.0),
    "base, longest run above 0.7": OFF | NO_EDITS | dict(tau_joint=0.7),
    "base, longest run above 0.5": OFF | NO_EDITS | dict(tau_joint=0.5),
    "base, longest run above 0.3": OFF | NO_EDITS | dict(tau_joint=0.3),
    "base, above 0.7, gated edits (released)": OFF | dict(tau_t2t=0.5),
    "base, above 0.7, edits off": OFF | NO_EDITS,
    "base, all at once": OFF | NO_EDITS | dict(tau_m2t=-1.0),
}
ADAPTER_ROWS = {
    "Stage B off, gated edits": OFF | dict(tau_t2t=0.5),
    "Stage B off, ungated edits": OFF,
    "Stage B, gated edits": dict(tau_t2t=0.5),
    "Stage B, ungated edits (paper)": {},
    "Stage B, edits off": NO_EDITS,
    "Stage B, ungated, tau_m2t 0.5": dict(tau_m2t=0.5),
    "Stage B, ungated, tau_m2t 0.3": dict(tau_m2t=0.3),
    "Stage B, all at once": dict(tau_m2t=-1.0),
    "Stage B, all at once, edits off": NO_EDITS | dict(tau_m2t=-1.0),
    "Stage B off, all at once, edits off": OFF | NO_EDITS | dict(tau_m2t=-1.0),
}
CAUSAL_ROWS = {
    "causal, whole blocks": NO_EDITS | dict(tau_joint=0.0),
    "causal, longest run above 0.2": NO_EDITS | dict(tau_joint=0.2),
    "causal, longest run above 0.5": NO_EDITS | dict(tau_joint=0.5),
    "causal, longest run above 0.8": NO_EDITS | dict(tau_joint=0.8),
}


def forwards(model: Model, outputs: list[Output]) -> float:
    """All forwards of these outputs, counted in full ones."""
    return sum(in_full(output.nfe, model.partial_cost) for output in outputs)


# --- toys
@torch.no_grad()
def answer_log_probs(
    model: Model, task: Toy, c: Tensor, z: Tensor, n_rounds: int, tokens: Tensor | None = None
) -> Tensor:
    """log q(x_i | z) (R, m, V) float64 of answers z (R, m) int64, -1 where masked, in contexts c (R,).

    Stage A computes them if n_rounds is 0, else Stage B with every masked position in the bundle. In causal Stage B
    a position reads what tokens (R, m) int64 has before it. The engine is the decoder's.
    """
    device = model.wte.weight.device
    logits = []
    for at in range(0, len(c), TOY_BATCH):
        part = slice(at, at + TOY_BATCH)
        answer = z[part].masked_fill(z[part] < 0, task.mask_id).to(device)
        engine = Cached(model, task.prompt(c[part]).tolist(), n_rounds)
        h, states = engine.stage_a(answer)
        found = model.logits(states)
        if n_rounds > 0 and tokens is None:
            found = model.logits(engine.stage_b(h, answer == task.mask_id))
        elif n_rounds > 0:
            states_b = engine.stage_b(h, answer == task.mask_id, tokens[part].to(device))
            found = model.logits_b(torch.cat([states_b, states], dim=-1))
        logits.append(found.cpu().double())

    # normalise over all tokens, then cut to the symbols: probability on any other token is lost
    return torch.cat(logits).log_softmax(-1)[..., : task.V]


def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    q = answer_log_probs(model, task, c, masks, n_rounds).exp()
    return toy.product_table(task, c, q)


def causal_table(model: Model, task: Toy) -> Tensor:
    """q over the support when causal Stage B draws all positions, by the chain rule: each position of a tuple reads the
    tuple's positions before it. (N, S) float64."""
    N, S, m = task.support.shape
    c = torch.arange(N).repeat_interleave(S)
    x = task.support.reshape(N * S, m)
    masks = torch.full_like(x, -1)
    log_p = answer_log_probs(model, task, c, masks, model.cfg.n_rounds, tokens=x)
    log_q = log_p.gather(2, x[..., None]).sum((1, 2))
    return log_q.exp().view(N, S) * (task.prob > 0)


def chain_table(model: Model, task: Toy, from_the_left: bool = False) -> Tensor:
    """q over the support when tokens are drawn one at a time: (N, S) float64.

    The next position is the leftmost one, or the one whose likeliest token is surest. What has been written so far
    decides which this is, so a tuple is written in one order. (At temperature 1 sample.py first draws at all
    positions, and then writes the surest of the drawn tokens, which favours likely tokens.)
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

        # which open position is written next
        written = states[:, 1:] >= 0
        if from_the_left:
            at = written.sum(1)
        else:
            at = log_p.amax(-1).masked_fill(written, -math.inf).argmax(-1)
        at = at[back]  # (N*S,)
        token = x.gather(1, at[:, None])
        log_q += log_p[back, at, token[:, 0]]
        z = z.scatter(1, at[:, None], token)
    return log_q.exp().view(N, S) * (task.prob > 0)


def quality(model: Model, task: Toy, d: Decoding) -> dict[str, float]:
    """Decode every context once, greedily, by the decoder that users run -> the shares of possible and of likeliest
    answers, all forwards of an answer, counted in full ones, and its partial forwards.
    """
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m))

    # an eos ends an answer early: add eos up to m tokens
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
    """First print TC, which is the least that one step of independent draws can lose, then a row for each decoder."""
    # a decoder with Stage B on has n_rounds 1 above, and this model's Stage B has K rounds
    K = model.cfg.n_rounds

    # these draw from a distribution that can be enumerated
    decoders = dict(TOY_DECODERS)
    tables = {
        "one at a time": chain_table(model, task),
        "one at a time, from the left": chain_table(model, task, from_the_left=True),
        "Stage A, one step": one_step_table(model, task, 0),
    }
    if isinstance(model, CausalModel):
        decoders["causal Stage B, one step"] = JOINT
        tables["causal Stage B, one step"] = causal_table(model, task)
    else:
        decoders["Stage B, one step"] = ONE_STEP
        tables["Stage B, one step"] = one_step_table(model, task, K)
    lost = {name: f"{toy.kl(task.prob, q).mean():.3f}" for name, q in tables.items()}

    # TC; then of each decoder its KL, the shares of its greedy answers, and its cost
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
        fail(f"{folder} was not trained on a toy")
    sizes = {key: value for key, value in judge.items() if key != "toy"}
    try:
        task = toy.make(judge["toy"], **sizes)
    except (Mistake, TypeError) as e:
        fail(f"{base_of(folder)}/meta.json: {e}")
    cfg = read_config(folder)
    if (task.m, task.eos_id, task.mask_id) != (cfg.block_length, cfg.eos_id, cfg.mask_id):
        fail(f"{base_of(folder)}/meta.json: the model has other tokens or blocks than this toy")
    return task


# --- names
def complete(
    model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], d: Decoding,
    step: Callable[..., Step] | None = None, select: Callable | None = None,
) -> dict:  # fmt: skip
    """Complete every prompt (name -> ids), and count which completions are names, and what they cost."""
    outputs = generate(model, list(prompts.values()), d, step=step, select=select)
    written = [tokenizer.decode(output.prompt + output.tokens) for output in outputs]
    found = [exists(name) is not None for name in written]
    n = len(prompts)
    tokens = sum(len(output.tokens) for output in outputs)
    tokens += sum(ids.count(model.cfg.mask_id) for ids in prompts.values())
    return {
        "exist": sum(found) / n,
        "forwards": forwards(model, outputs) / n,
        "per_token": forwards(model, outputs) / max(1, tokens),
        "full": sum(output.nfe["full"] for output in outputs) / n,
        "tokens": tokens / n,
        "found": found,
        "written": written,
    }


def names_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model of names; any other folder is refused."""
    tokenizer = load_tokenizer(base_of(folder))
    if tokenizer is None or "names" not in judge_of(folder):
        fail(f"{folder} cannot complete names: give a model of names whose folder has tokenizer.json")
    return tokenizer


def name_rows(models: dict[Path, Model], folders: list[Path]) -> list[tuple[str, Path, Decoding]]:
    """What is evaluated: a row's name, the folder whose model decodes, and how it decodes. models: those of the folders
    and of their bases."""
    # the rows of an adapter's base, for comparison
    bases = dict.fromkeys(base_of(folder) for folder in folders)
    rows = [(name, base, replace(NAME_DECODING, **how)) for base in bases for name, how in BASE_ROWS.items()]
    for folder in folders:
        own = CAUSAL_ROWS if isinstance(models[folder], CausalModel) else ADAPTER_ROWS
        if folder in bases and not models[folder].trained_b:
            continue
        rows += [(name, folder, replace(NAME_DECODING, **how)) for name, how in own.items()]
    return rows


def evaluate_names(folders: list[Path], device: torch.device, args: Namespace) -> None:
    """Print a row for each decoder: how well it completes held-out names, and what that costs."""
    models = load_all(folders, device)
    rows = name_rows(models, folders)
    tokenizer = names_tokenizer(folders[0])
    prompts = draw_names(args.prompts, "held out", tokenizer)

    lines = []
    for name, folder, d in progress(rows, "evaluate"):
        model = models[folder]
        d = replace(d, n_rounds=d.n_rounds * model.cfg.n_rounds, temperature=args.temperature)
        found = complete(model, tokenizer, prompts, d)
        figures = [f"{found[key]:.{digits}f}" for key, digits in (("exist", 3), ("forwards", 2), ("per_token", 3))]
        lines.append([f"{folder}  {name}", *figures])

    trained = judge_of(folders[0]).get("names")
    judged = unicodedata.unidata_version
    print(f"{len(prompts)} held-out names, completed from their first third; "
          f"trained on Unicode {trained}, judged by {judged}")  # fmt: skip
    print_table(["", "exist", "forwards a name", "a token"], lines)


def load_all(folders: list[Path], device: torch.device) -> dict[Path, Model]:
    """The models of these folders and of their bases, which must have the same tokenizer."""
    every = dict.fromkeys([*map(base_of, folders), *folders])
    models = {folder: load_model(folder, device, torch.float32) for folder in every}
    pieces = {path.read_bytes() if path.exists() else b"" for path in map(tokenizer_of, models)}
    if len(pieces) > 1:
        fail("--ckpt: only models with the same tokenizer can be compared")
    return models


def tokenizer_of(folder: Path) -> Path:
    return base_of(folder) / "tokenizer.json"


# --- any rows, in bits
@torch.no_grad()
def bits_of_batch(model: Model, batch: Batch, way: str) -> Tensor:
    """What each corruptible token costs if its block is filled from masks, and all text before the block is given:
    (R, T) float32 in bits, 0 elsewhere.

    way: "Stage A" fills all masks at once. "Stage B" does, too, with all masks in the bundle (if it is causal, by the
    chain rule). "one at a time" is Stage A from the left, with a forward for each token.
    """
    B = model.cfg.block_length
    mask_id = model.cfg.mask_id
    T = batch.clean.shape[1]
    masked = batch.corruptible
    z = batch.clean.masked_fill(masked, mask_id)
    ctx = model.context(batch.real, batch.clean)
    if way != "one at a time":
        h = model.prefix(z, ctx)
        stage_a = model.last_n(h, ctx)[:, :T]
        logits = model.logits(stage_a)
        if way == "Stage B" and isinstance(model, CausalModel):
            states = model.coordinate(h, masked, ctx, 1, batch.clean)
            logits = model.logits_b(torch.cat([states, stage_a], dim=-1))
        elif way == "Stage B":
            logits = model.logits(model.coordinate(h, masked, ctx, model.cfg.n_rounds)[:, :T])
        return token_bits(logits, batch.clean) * masked

    # read the j-th position of every block after those before it are written
    place = torch.arange(T, device=z.device) % B
    bits = torch.zeros(z.shape, device=z.device)
    for j in range(B):
        seen = torch.where(place < j, batch.clean, z)
        states = model.last_n(model.prefix(seen, ctx), ctx)[:, :T]
        bits += token_bits(model.logits(states), batch.clean) * (masked & (place == j))
    return bits


def token_bits(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log2 p of each token: logits (R, T, the vocabulary's size), tokens (R, T) -> (R, T)."""
    return -logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] / math.log(2)


def evaluate_bits(folders: list[Path], device: torch.device, args: Namespace) -> None:
    """Print what held-out blocks cost in bits, a row for each way of filling them."""
    bases = dict.fromkeys(base_of(folder) for folder in folders)
    models = load_all(folders, device)
    data = args.data or Path(run_of(folders[0], "data"))
    check_same_tokens(data, base_of(folders[0]), "--ckpt")
    tokenizer = load_tokenizer(base_of(folders[0]))

    # the same rows for all models, once for each block length
    longest = min(model.cfg.max_len for model in models.values())
    if args.seq_len and args.seq_len > longest:
        fail(f"--seq_len {args.seq_len} must be at most {longest}, the positions of the model")
    seq_len = args.seq_len or min(run_of(folders[0], "seq_len"), longest)
    corpora = {}
    for length in {model.cfg.block_length for model in models.values()}:
        if seq_len % length:
            fail(f"--seq_len {seq_len} must be a multiple of the block length, {length}")
        corpora[length] = read_corpus(data, seq_len, 0, length, 0)

    # of each base Stage A, all at once and one at a time; of each adapter its Stage A, if training has changed it, and
    # its Stage B
    ways = [(folder, way) for folder in bases for way in ("Stage A", "one at a time")]
    for folder in folders:
        if folder not in bases and not isinstance(models[folder], CausalModel):
            ways.append((folder, "Stage A"))
        if models[folder].trained_b:
            ways.append((folder, "Stage B"))
    names = {"Stage A": "Stage A, all at once", "one at a time": "one at a time, from the left"}

    lines = []
    first = None
    for folder, way in progress(ways, "bits"):
        model = models[folder]
        causal = isinstance(model, CausalModel)
        corpus = corpora[model.cfg.block_length]
        bits, tokens, n_bytes = bits_of_rows(model, corpus, way, args.tokens, tokenizer)
        first = first or bits
        name = names.get(way, f"{model.name_b}, {'whole blocks' if causal else 'all at once'}")
        if len(corpora) > 1:
            name += f", blocks of {model.cfg.block_length}"
        cells = [f"{bits / tokens:.3f}", f"{bits / n_bytes:.3f}" if n_bytes else "", f"{(first - bits) / tokens:+.3f}"]
        lines.append([f"{folder}  {name}", *cells])
    blocks = f"in blocks of {model.cfg.block_length}, " if len(corpora) == 1 else ""
    width = corpus.rows["val"].seq_len  # rows of a toy have a length of their own
    print(f"{tokens:,} held-out tokens of {data} in rows of {width}, {blocks}each block from masks")
    print_table(["", "bits a token", "a byte", "saved a token"], lines)
    print("saved: bits fewer than in the first row. What one at a time saves against all at once estimates the total "
          "correlation, which independent tokens lose")  # fmt: skip


def bits_of_rows(model: Model, corpus: Corpus, way: str, n: int, tokenizer: Tokenizer | None) -> tuple[float, int, int]:
    """Bits, tokens and, if tokens are text, bytes of held-out rows: of as many as have n tokens together, or of all."""
    device = model.wte.weight.device
    bits = 0.0
    tokens = 0
    n_bytes = 0
    for first in range(0, len(corpus.rows["val"]), TEXT_BATCH):
        size = min(TEXT_BATCH, len(corpus.rows["val"]) - first)
        batch = get_batch(corpus, "val", first, size, 0, device)

        # the eos that fill up a document's last block are not text, and are not counted. They are masked all the same,
        # because they would show where the document ends
        ends = (batch.clean == corpus.meta.eos_id).long()
        counted = batch.corruptible & (ends.cumsum(-1) - ends == 0)
        bits += float((bits_of_batch(model, batch, way) * counted).double().sum())
        tokens += int(counted.sum())
        if tokenizer:
            written = batch.clean[counted].tolist()
            n_bytes += sum(len(tokenizer.token_bytes.get(i, b"")) for i in written)
        if tokens >= n:
            break
    return bits, tokens, n_bytes


def run_of(folder: Path, name: str) -> str | int:
    """A setting of the run that made a checkpoint. A model of names may be a shipped one, which has no train.json."""
    if "names" in judge_of(folder):
        return {"data": "data/names", "seq_len": 32}[name]
    for run in (folder, base_of(folder)):
        if (run / "train.json").exists():
            return read_json(run / "train.json", "training run")[name]
    fail(f"{folder} does not say which rows it was trained on, nor how long they were: give --data and --seq_len")


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("what is evaluated").add_argument
    add(
        "--ckpt",
        type=Path,
        nargs="+",
        default=[Path("assets/names/paper")],
        help="a model's folder, or an adapter's; several to compare (default: assets/names/paper)",
    )
    add("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    add = parser.add_argument_group("names").add_argument
    add("--prompts", type=bounded(int, 1), default=256, help="how many names are completed")
    add("--temperature", type=temperature, default=0.0, help="0: the likeliest tokens; 1: draw")
    add = parser.add_argument_group("bits").add_argument
    add("--bits", action="store_true", help="count bits also for a toy or for names")
    add("--data", type=Path, help="rows with the checkpoint's tokens (default: for a model of names data/names, "
        "else those that it was trained on)")  # fmt: skip
    add("--seq_len", type=bounded(int, 1), help="the most tokens of a row (default: for a model of names 32, else as "
        "in the training of the first --ckpt)")  # fmt: skip
    add("--tokens", type=bounded(int, 1), default=16384, help="read 64 held-out rows at a time, until they have "
        "this many tokens")  # fmt: skip
    args = parser.parse_args()

    device = pick_device(args.device)
    judges = [judge_of(folder) for folder in args.ckpt]
    of_names = not args.bits and all("names" in judge for judge in judges)
    of_toy = not args.bits and len(judges) == 1 and "toy" in judges[0]

    # refuse flags that would do nothing
    idle = {}
    if not of_names:
        idle |= dict.fromkeys(("prompts", "temperature"), "leave it out")
    if of_names or of_toy:
        idle |= dict.fromkeys(("data", "seq_len", "tokens"), "leave it out, or give --bits")
    for name, advice in idle.items():
        if getattr(args, name) != parser.get_default(name):
            fail(f"--{name} does nothing here, see --help: {advice}")

    if of_names:
        evaluate_names(args.ckpt, device, args)
    elif of_toy:
        task = load_task(args.ckpt[0])
        evaluate_toy(load_model(args.ckpt[0], device, torch.float32), task)
    else:
        evaluate_bits(args.ckpt, device, args)


if __name__ == "__main__":
    main()
