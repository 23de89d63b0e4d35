"""Measure how good a decoder is on toys and names, where answers can be checked, and how many bits a text costs it.

Toys (toy.py). A step that draws each position by itself loses at least the total correlation, TC. A decoder that always
writes the same possible answer is never wrong, so `possible` is not enough.

    KL         KL(truth || drawn) in nats, the mean over contexts. It can be enumerated for a decoder that has one
               step, or that writes one token at a time, and not for the others
    possible   the share of contexts whose greedy answer is possible
    likeliest  the share whose greedy answer is the most probable one (the joint mode, which the paper aims at)
    passes     the passes of Stage B for an answer

Names. Held-out names of Unicode characters are completed from their first third of tokens. A completion counts if some
character has that name; `unicodedata` knows this. All forwards are counted: full ones, refreshes, and partial ones at
their share of the layers. With flags of decoding, which only names use, there is one row a checkpoint.

Text. Models of text are judged in bits; with --bits any model is. Each held-out block is filled from masks, with the
text before it given, and the table says how many bits a token costs. Nothing is drawn: these are the probabilities that
a model gives to the right tokens. All at once, Stage A pays for each token alone; one at a time, it pays for each token
after those before it, by the chain rule. The difference estimates the total correlation of a block. ms are those of
drawing, for one text alone and for 16 together.

    python evaluate.py                                               # assets/names/paper, a minute
    python evaluate.py --ckpt assets/names/paper assets/names/causal # two adapters side by side
    python evaluate.py --ckpt assets/shakespeare/causal              # Shakespeare, in bits a byte
    python evaluate.py --ckpt out/toy                                # a toy's decoders
    python evaluate.py --ckpt out/text --data data/mine              # bits a byte of your own text
"""

import lib.first  # noqa: F401

import math
import time
import unicodedata
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import toy
from cache import Engine
from checkpoint import base_of, check_same_tokens, judge_of, load_model, meaning, read_config
from decoding import PAPER, RELEASED, Decoding, Output, Step, add_decoding, decoding_of, in_full, settings_of
from lib.names import draw_names, exists
from lib.rows import Batch, Corpus, get_batch, read_corpus
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import (
    Mistake,
    Parser,
    bounded,
    checked_entry,
    command,
    fail,
    pick_device,
    print_table,
    progress,
    quoted,
    read_json,
)
from model import Model
from sample import SELECT, generate
from toy import Toy

# R rows, T positions, N contexts, S support tuples, m answer positions, V symbols, B block_length

TOY_BATCH = 4096  # the rows in one forward of a toy
TEXT_BATCH = 64  # the rows in one forward of text
NAME_LENGTH = 32  # the most tokens of a completed name

# the rows of a table: how a base decodes (Stage B is off), and how each kind of Stage B does
LEFT = replace(RELEASED, tau_t2t=None, select="left", tau_m2t=1.0)
AT_ONCE = replace(PAPER, tau_m2t=-1.0, tau_t2t=None)
BASE_ROWS = {
    "one at a time, from the left": LEFT,
    "one at a time, surest first": replace(RELEASED, tau_t2t=None, tau_m2t=1.0),
    "certified": replace(RELEASED, tau_t2t=None, select="certified"),
    "gates .7 and .5 (released)": RELEASED,
    "all at once": replace(AT_ONCE, n_rounds=0),
}
PAPER_ROWS = {
    "Stage B off, gates .7 and 0": replace(PAPER, n_rounds=0),
    "Stage B, gates .7 and 0 (paper)": PAPER,
    "Stage B off, all at once": replace(AT_ONCE, n_rounds=0),
    "Stage B, all at once": AT_ONCE,
}


def rows_of(model: Model) -> dict[str, Decoding]:
    """How a model with a trained Stage B decodes: the paper's rows, or another Stage B's own settings."""
    own = settings_of(model)
    if own is PAPER:
        return PAPER_ROWS
    return {"Stage B, whole blocks": own, "Stage B, a beam of 4": replace(own, beam=4)}


def forwards(model: Model, outputs: list[Output]) -> float:
    """All forwards of these outputs, counted in full ones."""
    return sum(in_full(output.nfe, model.partial_cost) for output in outputs)


# --- toys
@torch.no_grad()
def answer_log_probs(model: Model, task: Toy, c: Tensor, z: Tensor, x: Tensor | None = None) -> Tensor:
    """log q(x_i | z) (R, m, V) float64 of answers z (R, m) int64, -1 where masked, in contexts c (R,).

    Stage A computes them or, if the answers x (R, m) are given, Stage B, with every masked position in the bundle.
    """
    device = model.wte.weight.device
    logits = []
    for at in range(0, len(c), TOY_BATCH):
        part = slice(at, at + TOY_BATCH)
        answer = z[part].masked_fill(z[part] < 0, task.mask_id).to(device)
        engine = Engine(model, task.prompt(c[part]).tolist(), 0 if x is None else model.cfg.n_rounds)
        h, states = engine.stage_a(answer)
        if x is not None:
            bundle = answer == task.mask_id
            told = model.told(x[part].to(device)[bundle], states[bundle])
            states = engine.stage_b(h, bundle, answer.masked_scatter(bundle, told))
        logits.append(model.logits(states).cpu().double())

    # normalise over all tokens, then cut to the symbols: probability on any other token is lost
    return torch.cat(logits).log_softmax(-1)[..., : task.V]


def product_of_stage_a(model: Model, task: Toy) -> Tensor:
    """q over the support when Stage A draws all positions at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    masks = torch.full((task.n_ctx, task.m), -1)
    return toy.product_table(task, c, answer_log_probs(model, task, c, masks).exp())


def stage_b_table(model: Model, task: Toy) -> Tensor:
    """q over the support when Stage B draws all positions in one step: (N, S) float64. Where it is told the right
    tokens on the left, this is the chain rule."""
    N, S, m = task.support.shape
    c = torch.arange(N).repeat_interleave(S)
    x = task.support.reshape(N * S, m)
    log_p = answer_log_probs(model, task, c, torch.full_like(x, -1), x)
    log_q = log_p.gather(2, x[..., None]).sum((1, 2))
    return log_q.exp().view(N, S) * (task.prob > 0)


def chain_table(model: Model, task: Toy, from_the_left: bool) -> Tensor:
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
        log_p = answer_log_probs(model, task, states[:, 0], states[:, 1:])

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
    answers, all forwards of an answer, counted in full ones, and its partial forwards."""
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
    own = rows_of(model)
    decoders = {name: d for name, d in BASE_ROWS.items() if d is not RELEASED} | own

    # these draw from a distribution that can be enumerated
    tables = {
        "one at a time, from the left": chain_table(model, task, True),
        "one at a time, surest first": chain_table(model, task, False),
        "all at once": product_of_stage_a(model, task),
    }
    at_once = "Stage B, all at once" if own is PAPER_ROWS else "Stage B, whole blocks"
    tables[at_once] = stage_b_table(model, task)
    lost = {name: float(toy.kl(task.prob, q).mean()) for name, q in tables.items()}

    # TC; then of each decoder its KL, the shares of its greedy answers, and its cost
    tc = float(task.tc().mean())
    K = model.cfg.n_rounds
    rows = [["independent draws, at best", f"{tc:.3f}", "", "", "", ""]]
    for name, d in decoders.items():
        if name == "Stage B off, all at once":
            continue  # it is "all at once" above
        found = quality(model, task, replace(d, n_rounds=K * d.n_rounds))
        shares = [f"{found[key]:.3f}" for key in ("possible", "likeliest")]
        kl = f"{lost[name]:.3f}" if name in lost else ""
        rows.append([name, kl, *shares, f"{found['forwards']:.2f}", f"{found['partial'] / K:.2f}"])

    print(f"{task.name}: TC = {tc:.3f} nats; a step that draws each position by itself loses at least that")
    print_table(["decoder", "KL", "possible", "likeliest", "forwards", "passes"], rows)
    print("KL(truth || drawn) in nats; possible, likeliest: shares of the greedy answers; passes: of Stage B")
    print(f"Stage B loses {lost[at_once]:.3f} nats, and Stage A {lost['all at once']:.3f}; TC is {tc:.3f}")


def load_task(folder: Path) -> Toy:
    """The toy that a checkpoint was trained on."""
    judge = judge_of(folder)
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
    step: Callable[..., Step] | None = None,
) -> dict:  # fmt: skip
    """Complete every prompt (name -> ids), and count which completions are names, and what they cost."""
    outputs = generate(model, list(prompts.values()), d, step=step)
    written = [tokenizer.decode(output.prompt + output.tokens) for output in outputs]
    found = [exists(name) is not None for name in written]
    n = len(prompts)
    tokens = sum(len(output.tokens) for output in outputs)
    return {
        "exist": sum(found) / n,
        "forwards": forwards(model, outputs) / n,
        "per_token": forwards(model, outputs) / max(1, tokens),
        "full": sum(output.nfe["full"] for output in outputs) / n,
        "found": found,
        "written": written,
    }


def names_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model of names; any other folder is refused."""
    tokenizer = load_tokenizer(base_of(folder))
    if tokenizer is None or "names" not in judge_of(folder):
        fail(f"{folder} cannot complete names: give a model of names whose folder has tokenizer.json")
    return tokenizer


def name_rows(models: dict[Path, Model], folders: list[Path], args: Namespace) -> list[tuple[str, Path, Decoding]]:
    """What is evaluated: a row's name, the folder whose model decodes, and how it decodes. models: those of the folders
    and of their bases. Flags of decoding leave one row for each folder."""
    args.gen_length = NAME_LENGTH
    asked = [(folder, decoding_of(args, models[folder])) for folder in folders]
    plain = Namespace(gen_length=NAME_LENGTH)
    if any(d != decoding_of(plain, models[folder]) for folder, d in asked):
        return [("as asked", folder, d) for folder, d in asked]

    # the rows of an adapter's base, for comparison
    bases = dict.fromkeys(base_of(folder) for folder in folders)
    rows = [(f"base, {name}", base, d) for base in bases for name, d in BASE_ROWS.items()]
    for folder in folders:
        if models[folder].trained_b:
            rows += [(name, folder, d) for name, d in rows_of(models[folder]).items()]
    K = {folder: model.cfg.n_rounds for folder, model in models.items()}
    return [(name, f, replace(d, gen_length=NAME_LENGTH, n_rounds=K[f] * d.n_rounds)) for name, f, d in rows]


def evaluate_names(folders: list[Path], device: torch.device, args: Namespace) -> None:
    """Print a row for each decoder: how well it completes held-out names, and what that costs."""
    models = load_all(folders, device)
    rows = name_rows(models, folders, args)
    tokenizer = names_tokenizer(folders[0])
    prompts = draw_names(args.prompts, "held out", tokenizer)

    lines = []
    written = {}
    for name, folder, d in progress(rows, "evaluate"):
        found = complete(models[folder], tokenizer, prompts, d)
        figures = [f"{found[key]:.{digits}f}" for key, digits in (("exist", 3), ("forwards", 2), ("per_token", 3))]
        lines.append([f"{folder}  {name}", *figures])
        written[folder, name] = found["written"]

    trained = judge_of(folders[0]).get("names")
    judged = unicodedata.unidata_version
    print(f"{len(prompts)} held-out names, completed from their first third; "
          f"trained on Unicode {trained}, judged by {judged}")  # fmt: skip
    print_table(["", "exist", "forwards a name", "a token"], lines)
    for folder in folders:
        on, off = (written.get((folder, name)) for name in list(PAPER_ROWS)[1::-1])
        if on and off:
            n = sum(a != b for a, b in zip(on, off, strict=True))
            print(f"{folder}: Stage B changes {n} of {len(prompts)} completions at the paper's gates; for its loss to "
                  f"change none is the optimum, see results/theorem")  # fmt: skip
    print(f"next: python evaluate.py --ckpt {' '.join(map(quoted, folders))} --bits")


def load_all(folders: list[Path], device: torch.device) -> dict[Path, Model]:
    """The models of these folders and of their bases, which must have the same tokenizer."""
    every = dict.fromkeys([*map(base_of, folders), *folders])
    first, *others = (meaning(base_of(folder), {}) for folder in every)
    if any(other != first for other in others):
        fail("--ckpt: only models with the same tokenizer can be compared")
    return {folder: load_model(folder, device, torch.float32) for folder in every}


# --- any rows, in bits
@torch.no_grad()
def log_probs_of_batch(model: Model, batch: Batch, way: str) -> Tensor:
    """Log-probabilities (R, T, V) in nats, if every block is filled from masks, and all text before it is given. Masked
    are the corruptible positions.

    way: "Stage A" fills all masks at once. "Stage B" does, too, with all masks in the bundle (by the chain rule, where
    it is told the tokens on the left). "one at a time" is Stage A from the left, with a forward for each token.
    """
    B = model.cfg.block_length
    masked = batch.corruptible
    z = batch.clean.masked_fill(masked, model.cfg.mask_id)
    ctx = model.context(batch.real, batch.clean)
    if way != "one at a time":
        h = model.prefix(z, ctx)
        states = model.last_n(h, ctx)
        if way == "Stage B":
            tokens = z.masked_scatter(masked, model.told(batch.clean[masked], states[masked]))
            states = model.coordinate(h, masked, tokens, ctx)
        return model.logits(states).log_softmax(-1)

    # read the j-th position of every block after those before it are written
    place = torch.arange(z.shape[1], device=z.device) % B
    final = torch.zeros(*z.shape, model.cfg.n_embd, device=z.device)
    for j in range(B):
        seen = torch.where(place < j, batch.clean, z)
        states = model.last_n(model.prefix(seen, ctx), ctx)
        final = torch.where((place == j)[:, None], states.float(), final)
    return model.logits(final.to(model.compute_dtype)).log_softmax(-1)


@dataclass
class Found:
    """What held-out text costs a model in one way of filling blocks."""

    bits: float = 0.0
    tokens: int = 0
    n_bytes: int = 0  # 0 if tokens are no text
    blocks: int = 0  # that have masks
    exact: int = 0  # blocks whose likeliest tokens, each after the right ones, are all right


def bits_of_rows(
    model: Model, corpus: Corpus, way: str, n: int, tokenizer: Tokenizer | None, hole: int = 0
) -> Found:  # fmt: skip
    """Fill the blocks of held-out rows: of as many rows as have n tokens together, or of all. hole: mask only so many
    tokens in the middle of a block (0: all)."""
    B = model.cfg.block_length
    found = Found()
    for first in range(0, len(corpus.rows["val"]), TEXT_BATCH):
        size = min(TEXT_BATCH, len(corpus.rows["val"]) - first)
        batch = get_batch(corpus, "val", first, size, 0, model.wte.weight.device)
        if hole:
            place = torch.arange(batch.clean.shape[1], device=batch.clean.device) % B
            batch.corruptible = batch.corruptible & (place >= (B - hole) // 2) & (place < (B + hole) // 2)

        # the eos that fill up a document's last block are not text, and are not counted. They are masked all the same,
        # because they would show where the document ends
        ends = (batch.clean == corpus.meta.eos_id).long()
        counted = batch.corruptible & (ends.cumsum(-1) - ends == 0)
        log_p = log_probs_of_batch(model, batch, way)
        of_tokens = log_p.gather(-1, batch.clean[..., None])[..., 0] * counted
        wrong = counted & (log_p.argmax(-1) != batch.clean)
        has_masks = counted.unflatten(1, (-1, B)).any(-1)
        found.bits -= float(of_tokens.cpu().double().sum()) / math.log(2)
        found.tokens += int(counted.sum())
        found.blocks += int(has_masks.sum())
        found.exact += int((has_masks & ~wrong.unflatten(1, (-1, B)).any(-1)).sum())
        if tokenizer:
            written = batch.clean[counted].tolist()
            found.n_bytes += sum(len(tokenizer.token_bytes.get(i, b"")) for i in written)
        if found.tokens >= n:
            break
    if found.tokens == 0:
        fail("the held-out rows have nothing to fill: their documents are all prompt")
    if not math.isfinite(found.bits):
        fail("the model's logits are not finite: its weights are damaged, or its training diverged")
    return found


def ms_a_token(model: Model, corpus: Corpus, way: str, rows: int) -> float:
    """Milliseconds a token, when this way draws the second halves of some held-out rows together."""
    d = {"Stage A": BASE_ROWS["all at once"], "one at a time": LEFT, "Stage B": settings_of(model)}[way]
    if way == "Stage B" and d is PAPER:
        d = AT_ONCE
    half = corpus.rows["val"].seq_len // 2
    texts = [row.tolist() for row in corpus.rows["val"].rows if len(row) >= half][:rows]
    K = model.cfg.n_rounds if d.n_rounds else 0
    d = replace(d, temperature=1.0, n_rounds=K, gen_length=half, eos_early_stop=False)
    began = time.perf_counter()
    generate(model, [text[:half] for text in texts], d)
    ms = 1e3 * (time.perf_counter() - began) / (half * len(texts))
    # in blocks of one our loop takes two forwards a token: one fills its mask, and one reads it. A loop for such models
    # alone does both in one
    return ms / 2 if model.cfg.block_length == 1 else ms


def evaluate_bits(folders: list[Path], device: torch.device, args: Namespace) -> None:
    """Print what held-out blocks cost in bits, and ms, a row for each way of filling them."""
    bases = dict.fromkeys(base_of(folder) for folder in folders)
    models = load_all(folders, device)
    data = args.data or Path(run_of(folders[0], "data", str))
    check_same_tokens(data, base_of(folders[0]), "--ckpt")
    tokenizer = load_tokenizer(base_of(folders[0]))

    # the same rows for all models, once for each block length
    longest = min(model.cfg.max_len for model in models.values())
    seq_len = args.seq_len or min(run_of(folders[0], "seq_len", int), longest)
    corpora = {}
    for length in {model.cfg.block_length for model in models.values()}:
        if seq_len % length or not 0 < seq_len <= longest:
            fail(f"--seq_len {seq_len} must be a multiple of the block length, {length}, and at most {longest}")
        corpora[length] = read_corpus(data, seq_len, 0, length, 0)

    # of each base Stage A, all at once and one at a time, which are one in blocks of one token; of each adapter its
    # Stage A, if training has changed it, and its Stage B
    ways = []
    for folder in [*bases, *(folder for folder in folders if folder not in bases)]:
        changed = any("lora" in name for name in models[folder].learned())
        if (folder in bases or changed) and models[folder].cfg.block_length > 1:
            ways.append((folder, "Stage A"))
        if folder in bases:
            ways.append((folder, "one at a time"))
        if folder in folders and models[folder].trained_b:
            ways.append((folder, "Stage B"))

    found = {}
    lines = []
    for folder, way in progress(ways, "bits"):
        cfg = models[folder].cfg
        corpus = corpora[cfg.block_length]
        cost = bits_of_rows(models[folder], corpus, way, args.tokens, tokenizer, args.hole)
        found[folder, way] = cost.bits / cost.tokens
        name = {"Stage A": "Stage A, all at once", "one at a time": "one at a time, from the left"}.get(way)
        name = name or f"{cfg.stage_b} Stage B, all at once"
        a_byte = f"{cost.bits / cost.n_bytes:.3f}" if cost.n_bytes else ""
        if args.hole:
            times = [f"{cost.exact / cost.blocks:.3f}"]
        else:
            times = [f"{ms_a_token(models[folder], corpus, way, rows):.2f}" for rows in (1, 16)]
        lines.append([f"{folder}  {name}, blocks of {cfg.block_length}", f"{found[folder, way]:.3f}", a_byte, *times])

    width = corpus.rows["val"].seq_len  # rows of a toy have a length of their own
    masks = f"{args.hole} masks in the middle of each block" if args.hole else "each block from masks"
    print(f"{cost.tokens:,} held-out tokens of {data} in rows of {width}, {masks}")
    print_table(["", "bits a token", "a byte", *(["exact"] if args.hole else ["ms a token", "of 16 texts"])], lines)

    # what the figures mean
    for folder in folders:
        base = base_of(folder)
        if (folder, "Stage B") in found and (base, "Stage A") in found:
            saved = found[base, "Stage A"] - found[folder, "Stage B"]
            most = found[base, "Stage A"] - found[base, "one at a time"]
            print(f"{folder}: Stage B writes a block at once, and saves {saved:.3f} bits a token; its base saves "
                  f"{most:.3f} one at a time")  # fmt: skip
    print(f'next: python sample.py --ckpt {quoted(folders[-1])} --prompt "..." --temperature 1')


def run_of(folder: Path, name: str, kind: type) -> str | int:
    """A setting of the run that made a checkpoint. A model of names may be a shipped one, which has no train.json."""
    if "names" in judge_of(folder):
        return {"data": "data/names", "seq_len": 32}[name]
    for run in (folder, base_of(folder)):
        path = run / "train.json"
        if path.exists():
            return checked_entry(read_json(path, "training run"), name, kind, path)
    fail(f"{folder} does not say which rows it was trained on, nor how long they were: give --data and --seq_len")


@command
def main() -> None:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument_group("what is evaluated").add_argument
    add("--ckpt", type=Path, nargs="+", default=[Path("assets/names/paper")],
        help="a model's folder, or an adapter's; several to compare (default: assets/names/paper)")
    add("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    add("--prompts", type=bounded(int, 1), default=256, help="how many names are completed")
    add = parser.add_argument_group("bits").add_argument
    add("--bits", action="store_true", help="count bits also for a toy or for names")
    add("--data", type=Path, help="rows with the checkpoint's tokens (default: for a model of names data/names, "
        "else those that it was trained on)")
    add("--seq_len", type=bounded(int, 1), help="the most tokens of a row (default: for a model of names 32, else as "
        "in the training of the first --ckpt)")
    add("--tokens", type=bounded(int, 1), default=16384, help="read 64 held-out rows at a time, until they have "
        "this many tokens")
    add("--hole", type=bounded(int, 0, 4096), default=0,
        help="mask only so many tokens in the middle of each block, and say how many holes are filled exactly; 0: all")
    # fmt: on
    add_decoding(parser, SELECT)
    args = parser.parse_args()

    device = pick_device(args.device)
    judges = [judge_of(folder) for folder in args.ckpt]
    if not args.bits and all("names" in judge for judge in judges):
        evaluate_names(args.ckpt, device, args)
    elif not args.bits and len(judges) == 1 and "toy" in judges[0]:
        task = load_task(args.ckpt[0])
        evaluate_toy(load_model(args.ckpt[0], device, torch.float32), task)
    else:
        evaluate_bits(args.ckpt, device, args)


if __name__ == "__main__":
    main()
