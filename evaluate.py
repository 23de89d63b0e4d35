"""Measure how good a decoder is on toys and names, where answers can be checked, and how many bits a text costs it.

Toys: KL(truth || drawn) in nats of the draws that can be enumerated; the shares of contexts whose greedy answer is
possible, and the most probable one (the joint mode).
Names: held-out names of Unicode characters are completed from their first third of tokens. A completion counts if some
character has that name. All forwards are counted: full ones, refreshes, and partial ones at their share of the layers.
Text, or any model with --bits: held-out blocks are filled from masks, after the right text. All at once, Stage A pays
for each token alone; one at a time, for each after those before it, by the chain rule. ms are those of drawing.

    python evaluate.py                                               # assets/names/paper, half a minute
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
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import toy
from cache import Engine
from checkpoint import base_of, check_same_tokens, judge_of, load_model
from decoding import ALL, PAPER, SETTINGS, Decoding, Output, add_decoding, asked_for, decoding_of, in_full, settings_of
from lib.names import draw_names, exists
from lib.rows import Batch, Corpus, get_batch, read_corpus
from lib.run import setting_of_run
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import Parser, bounded, command, fail, pick_device, print_table, progress, quoted
from model import Model
from sample import SELECT, generate

# R rows, T positions, N contexts, S support tuples, m answer positions, V symbols, B block_length

TOY_BATCH = 4096  # the rows in one forward of a toy
TEXT_BATCH = 64  # the rows in one forward of text
NAME_LENGTH = 32  # the most tokens of a completed name

# how a base decodes, with Stage B off
LEFT = SETTINGS["left"]
AT_ONCE = replace(LEFT, select="confidence", tau_m2t=ALL)
BASE_ROWS = {
    "one at a time, from the left": LEFT,
    "one at a time, surest first": SETTINGS["a2d"],
    "certified": replace(SETTINGS["llada"], tau_t2t=None, select="certified"),
    "gates .7 and .5 (released)": SETTINGS["llada"],
    "all at once": AT_ONCE,
}
OFF = "Stage B off, gates .7 and 0"
ON = "Stage B, gates .7 and 0 (paper)"


def rows_of(model: Model) -> dict[str, Decoding]:
    """How a model with a trained Stage B decodes: the paper's rows, or another Stage B's own settings."""
    own = replace(settings_of(model), n_rounds=model.cfg.n_rounds)
    if settings_of(model) is not PAPER:
        rows = {"Stage B, all at once": own}
        return rows | ({} if "beam" in model.unread else {"Stage B, a beam of 4": replace(own, beam=4)})
    return {
        OFF: replace(own, n_rounds=0),
        ON: own,
        "Stage B off, all at once": AT_ONCE,
        "Stage B, all at once": replace(own, tau_m2t=ALL, tau_t2t=None),
    }


def forwards(model: Model, outputs: list[Output]) -> float:
    """All forwards of these outputs, counted in full ones."""
    return sum(in_full(output.nfe, model.partial_cost) for output in outputs)


# --- toys
def task_of(folder: Path) -> toy.Toy | None:
    """The toy that a checkpoint was trained on; None if it was trained on other rows."""
    about = dict(judge_of(folder))
    return toy.make(about.pop("toy"), **about) if "toy" in about else None


@torch.no_grad()
def answer_log_probs(model: Model, task: toy.Toy, c: Tensor, z: Tensor, x: Tensor | None = None) -> Tensor:
    """log q(x_i | z) (R, m, V) float64 of answers z (R, m) int64, -1 where masked, in contexts c (R,): by Stage A or,
    if the answers x (R, m) are given, by Stage B with every masked position in the bundle."""
    # each distinct row once
    rows = torch.cat([task.prompt(c), z.masked_fill(z < 0, task.mask_id)] + ([] if x is None else [x]), dim=1)
    rows, back = torch.unique(rows, dim=0, return_inverse=True)
    logits = []
    for part in rows.to(model.wte.weight.device).split(TOY_BATCH):
        prompt, answer, *right = part.split(task.m, dim=1)
        engine = Engine(model, prompt.tolist(), model.cfg.n_rounds if right else 0)
        h, states = engine.stage_a(answer)
        if right:
            bundle = answer == task.mask_id
            told = model.told(right[0][bundle], states[bundle])
            states = engine.stage_b(h, bundle, answer.masked_scatter(bundle, told))
        logits.append(model.logits(states).cpu().double())

    # normalise over all tokens, then cut to the symbols: probability on any other token is lost
    return torch.cat(logits).log_softmax(-1)[back, :, : task.V]


def one_step_table(model: Model, task: toy.Toy, stage_b: bool) -> Tensor:
    """q over the support when Stage A or Stage B draws all positions in one step: (N, S) float64. Of a Stage B that is
    told the true tokens on the left this is the chain rule."""
    N, S, m = task.support.shape
    c = torch.arange(N).repeat_interleave(S)
    x = task.support.reshape(N * S, m)
    log_p = answer_log_probs(model, task, c, torch.full_like(x, -1), x if stage_b else None)
    log_q = log_p.gather(2, x[..., None]).sum((1, 2))
    return log_q.exp().view(N, S) * (task.prob > 0)


def chain_table(model: Model, task: toy.Toy, from_the_left: bool) -> Tensor:
    """q over the support when tokens are drawn one at a time: (N, S) float64. The next position is the leftmost one, or
    the one whose likeliest token is surest, after what has been written."""
    N, S, m = task.support.shape
    c = torch.arange(N).repeat_interleave(S)
    x = task.support.reshape(N * S, m)
    z = torch.full_like(x, -1)
    log_q = torch.zeros(N * S, dtype=torch.float64)
    for _ in range(m):
        # which open position is written next
        log_p = answer_log_probs(model, task, c, z)
        written = z >= 0
        if from_the_left:
            at = written.sum(1)
        else:
            at = log_p.amax(-1).masked_fill(written, -math.inf).argmax(-1)
        token = x.gather(1, at[:, None])
        log_q += log_p[torch.arange(N * S), at, token[:, 0]]
        z = z.scatter(1, at[:, None], token)
    return log_q.exp().view(N, S) * (task.prob > 0)


def quality(model: Model, task: toy.Toy, d: Decoding) -> tuple[float, float, float, float]:
    """Decode every context once, greedily, by the decoder that users run -> the shares of possible and of likeliest
    answers, all forwards of an answer, counted in full ones, and its passes of Stage B."""
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m))

    # an answer that eos ends early gets more of them
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]
    log_p = task.log_prob(c, torch.tensor(answers))
    possible = (log_p > -math.inf).double().mean()
    likeliest = (log_p >= task.prob.amax(-1).log() - 1e-9).double().mean()  # any of the most probable tuples
    partial = sum(output.nfe["partial"] for output in outputs) / task.n_ctx
    return float(possible), float(likeliest), forwards(model, outputs) / task.n_ctx, partial / model.cfg.n_rounds


def evaluate_toy(model: Model, task: toy.Toy) -> None:
    """First print TC, which is the least that one step of independent draws can lose, then a row for each decoder."""
    decoders = BASE_ROWS | rows_of(model)
    del decoders["gates .7 and .5 (released)"]
    decoders.pop("Stage B off, all at once", None)  # it is "all at once", too

    # these draw from a distribution that can be enumerated
    tables = {
        "one at a time, from the left": chain_table(model, task, True),
        "one at a time, surest first": chain_table(model, task, False),
        "all at once": one_step_table(model, task, False),
        "Stage B, all at once": one_step_table(model, task, True),
    }
    lost = {name: f"{float(toy.kl(task.prob, q).mean()):.3f}" for name, q in tables.items()}
    tc = f"{float(task.tc().mean()):.3f}"
    rows = [["independent draws, at best", tc, "", "", "", ""]]
    for name, d in decoders.items():
        possible, likeliest, cost, passes = quality(model, task, d)
        figures = [f"{possible:.3f}", f"{likeliest:.3f}", f"{cost:.2f}", f"{passes:.2f}"]
        rows.append([name, lost.get(name, ""), *figures])

    print(f"{task.name}: TC = {tc} nats; a step that draws each position by itself loses at least that")
    print_table(["decoder", "KL", "possible", "likeliest", "forwards", "passes"], rows)
    print("KL(truth || drawn) in nats; possible, likeliest: shares of the greedy answers; passes: of Stage B")


# --- names
def complete(
    model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], d: Decoding, step: Callable | None = None
) -> dict:
    """Complete every prompt (name -> ids), and count which completions are names, and what they cost."""
    outputs = generate(model, list(prompts.values()), d, step=step)
    written = [tokenizer.decode(output.prompt + output.tokens) for output in outputs]
    tokens = sum(len(output.tokens) for output in outputs)
    cost = forwards(model, outputs)
    return {
        "exist": sum(exists(name) is not None for name in written) / len(prompts),
        "forwards": cost / len(prompts),
        "per_token": cost / max(1, tokens),
        "full": sum(output.nfe["full"] for output in outputs) / len(prompts),
        "written": written,
    }


def compare(off: list[str], on: list[str]) -> dict[str, int]:
    """How many completions are names with Stage B on alone (gained), how many with it off alone (lost), and how many
    differ."""
    both = [(exists(a) is not None, exists(b) is not None) for a, b in zip(off, on, strict=True)]
    differ = sum(a != b for a, b in zip(off, on, strict=True))
    return dict(gained=both.count((False, True)), lost=both.count((True, False)), differ=differ)


def evaluate_names(models: dict[Path, Model], args: Namespace) -> None:
    """Print a row for each decoder: how well it completes held-out names, and what that costs."""
    rows = []
    for folder, model in models.items():
        if base_of(folder) == folder:
            rows += [(folder, f"base, {name}", d) for name, d in BASE_ROWS.items()]
        if folder in args.ckpt and model.trained_b:
            rows += [(folder, name, d) for name, d in rows_of(model).items()]

    # flags of decoding leave one row for each folder
    if asked_for(args):
        rows = [(folder, "as asked", decoding_of(args, models[folder])) for folder in args.ckpt]

    tokenizers = {folder: load_tokenizer(base_of(folder)) for folder in models}
    drawn = {folder: draw_names(args.prompts, tokenizer) for folder, tokenizer in tokenizers.items()}
    lines = []
    written = {}
    for folder, name, d in progress(rows, "evaluate"):
        prompts = drawn[folder]
        found = complete(models[folder], tokenizers[folder], prompts, replace(d, gen_length=NAME_LENGTH))
        figures = [f"{found['exist']:.3f}", f"{found['forwards']:.2f}", f"{found['per_token']:.3f}"]
        lines.append([f"{folder}  {name}", *figures])
        written[folder, name] = found["written"]

    print(f"{len(prompts)} held-out names, completed from their first third; trained on Unicode "
          f"{judge_of(args.ckpt[0])['names']!r}, judged by {unicodedata.unidata_version}")  # fmt: skip
    print_table(["", "exist", "forwards a name", "a token"], lines)
    for folder in args.ckpt:
        if (folder, ON) in written:
            found = compare(written[folder, OFF], written[folder, ON])
            print(f"{folder}: at the paper's gates Stage B changes {found['differ']} of {len(prompts)} completions: "
                  f"{found['gained']} names gained, {found['lost']} lost")  # fmt: skip
    print(f"next: python evaluate.py --ckpt {' '.join(map(quoted, args.ckpt))} --bits")


# --- any rows, in bits
@torch.no_grad()
def log_probs_of_batch(model: Model, batch: Batch, way: str) -> Tensor:
    """Log-probabilities (R, T, V) in nats, if every block is filled from masks at the corruptible positions, after the
    right text: by "Stage A" or "Stage B" all at once, or by Stage A "one at a time" from the left."""
    z = batch.clean.masked_fill(batch.corruptible, model.cfg.mask_id)
    ctx = model.read_clean(batch.clean, batch.real)
    h = model.prefix(z, ctx)
    states = model.last_n(h, ctx)
    if way == "Stage B":
        masked = batch.corruptible
        tokens = z.masked_scatter(masked, model.told(batch.clean[masked], states[masked]))
        states = model.coordinate(h, masked, tokens, ctx)
    if way == "one at a time":
        # write a position of every block, then read the next one
        B = model.cfg.block_length
        for j in range(1, B):
            z[:, j - 1 :: B] = batch.clean[:, j - 1 :: B]
            states[:, j::B] = model.last_n(model.prefix(z, ctx), ctx)[:, j::B]
    return model.logits(states).log_softmax(-1)


def bits_of_rows(model: Model, corpus: Corpus, way: str, n: int, tokenizer: Tokenizer | None, hole: int = 0) -> dict:
    """Fill the blocks of as many held-out rows as have n tokens together, or of all. hole: mask only so many tokens in
    the middle of a block (0: all) -> bits; tokens; bytes, 0 if tokens are no text; blocks that have masks; missed:
    blocks in which some token is not the likeliest after the right ones."""
    B = model.cfg.block_length
    token_bytes = tokenizer.token_bytes if tokenizer else {}
    found = dict(bits=0.0, tokens=0, bytes=0, blocks=0, missed=0)
    n_rows = len(corpus.rows["val"])
    for first in range(0, n_rows, TEXT_BATCH):
        batch = get_batch(corpus, "val", first, min(TEXT_BATCH, n_rows - first), 0, model.wte.weight.device)
        if hole:
            place = torch.arange(batch.clean.shape[1], device=batch.clean.device) % B
            batch.corruptible &= (place >= (B - hole) // 2) & (place < (B + hole) // 2)

        # the eos that fill up a document's last block are not text, and are not counted. They are masked all the same,
        # because they would show where the document ends
        ends = (batch.clean == corpus.meta.eos_id).long()
        counted = batch.corruptible & (ends.cumsum(-1) - ends == 0)
        log_p = log_probs_of_batch(model, batch, way)
        right = log_p.gather(-1, batch.clean[..., None])[..., 0][counted]
        found["bits"] -= float(right.cpu().double().sum()) / math.log(2)
        found["tokens"] += len(right)
        found["bytes"] += sum(len(token_bytes.get(i, b"")) for i in batch.clean[counted].tolist())

        wrong = counted & (log_p.argmax(-1) != batch.clean)
        found["blocks"] += int(counted.unflatten(1, (-1, B)).any(-1).sum())
        found["missed"] += int(wrong.unflatten(1, (-1, B)).any(-1).sum())
        if found["tokens"] >= n:
            break
    if not math.isfinite(found["bits"]):
        fail("the model's logits are not finite: its weights are damaged, or its training diverged")
    return found


def ms_a_token(model: Model, corpus: Corpus, d: Decoding, n: int) -> float:
    """Milliseconds a token, when a decoder draws what follows the first halves of n held-out rows together."""
    half = corpus.rows["val"].seq_len // 2
    rows = corpus.rows["val"].rows
    long = [row for row in rows if len(row) >= half] or rows
    prompts = [row[:half].tolist() for row in long[:n]]
    d = replace(d, temperature=1.0, gen_length=half, eos_early_stop=False)
    began = time.perf_counter()
    generate(model, prompts, d)
    return 1e3 * (time.perf_counter() - began) / (half * len(prompts))


def ways_of(folder: Path, model: Model, asked: bool) -> dict[str, tuple[str, Decoding]]:
    """The ways in which a model fills blocks -> the title of each, and the decoder that draws so."""
    ways = {}
    is_base = base_of(folder) == folder
    changed = any("lora" in name for name in model.learned())  # training has changed an adapter's Stage A
    if (is_base or changed) and model.cfg.block_length > 1:
        ways["Stage A"] = ("Stage A, all at once", AT_ONCE)
    if is_base:
        ways["one at a time"] = ("one at a time, from the left", LEFT)
    if asked and model.trained_b:
        ways["Stage B"] = (f"{model.cfg.stage_b} Stage B, all at once", rows_of(model)["Stage B, all at once"])
    return ways


def evaluate_bits(models: dict[Path, Model], args: Namespace) -> None:
    """Print what held-out blocks cost in bits, and ms, a row for each way of filling them."""
    data = args.data or Path(run_of(args.ckpt[0], "data", str))
    for folder in models:
        check_same_tokens(data, base_of(folder))
    tokenizer = load_tokenizer(base_of(args.ckpt[0]))

    # the same rows for all models
    longest = min(model.cfg.max_len for model in models.values())
    seq_len = args.seq_len or min(run_of(args.ckpt[0], "seq_len", int), longest)
    length = math.lcm(*(model.cfg.block_length for model in models.values()))
    if seq_len % length or not 0 < seq_len <= longest:
        fail(f"--seq_len {seq_len} must be a multiple of the block length, {length}, and at most {longest}")
    if args.hole > min(model.cfg.block_length for model in models.values()):
        fail(f"--hole {args.hole}: blocks have fewer tokens")
    corpus = read_corpus(data, seq_len, 0, length, 0)

    lines = []
    for folder, model in progress(models.items(), "bits"):
        for way, (title, d) in ways_of(folder, model, folder in args.ckpt).items():
            found = bits_of_rows(model, corpus, way, args.tokens, tokenizer, args.hole)
            a_byte = f"{found['bits'] / found['bytes']:.3f}" if found["bytes"] else ""
            if args.hole:
                more = [f"{1 - found['missed'] / found['blocks']:.3f}"]
            else:
                more = [f"{ms_a_token(model, corpus, d, n):.2f}" for n in (1, 16)]
            title = f"{folder}  {title}, blocks of {model.cfg.block_length}"
            lines.append([title, f"{found['bits'] / found['tokens']:.3f}", a_byte, *more])

    masks = f"{args.hole} masks in the middle of each block" if args.hole else "each block from masks"
    threads = torch.get_num_threads()
    print(f"{found['tokens']:,} held-out tokens of {data} in rows of {seq_len}, {masks}; threads: {threads}")
    print_table(["", "bits a token", "a byte", *(["exact"] if args.hole else ["ms a token", "of 16 texts"])], lines)

    if tokenizer:
        print(f'next: python sample.py --ckpt {quoted(args.ckpt[0])} --prompt "..." --temperature 1')


def run_of(folder: Path, name: str, kind: type) -> str | int:
    """A setting of the run that made a checkpoint. A model of names may be a shipped one, which has no train.json."""
    if "names" in judge_of(folder):
        return {"data": "data/names", "seq_len": 32}[name]
    for run in (folder, base_of(folder)):
        found = setting_of_run(run, name, kind)
        if found is not None:
            return found
    fail(f"{folder} does not say which rows it was trained on, nor how long they were: give --data and --seq_len")


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("what is evaluated").add_argument
    # fmt: off
    add("--ckpt", type=Path, nargs="+", default=[Path("assets/names/paper")],
        help="a model's folder, or an adapter's; several to compare")
    add("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    add("--prompts", type=bounded(int, 1), default=256, help="how many names are completed")
    add("--bits", action="store_true", help="count bits also for a toy or for names")
    add("--data", type=Path, help="bits: rows with the checkpoint's tokens (default: those that it was trained on)")
    add("--seq_len", type=bounded(int, 1), help="bits: the most tokens of a row (default: as in training)")
    add("--tokens", type=bounded(int, 1), default=16384, help="bits: read 64 rows at a time, until they have so many")
    add("--hole", type=bounded(int, 0, 4096), default=0,
        help="bits: mask only so many tokens in the middle of each block, and count the holes filled exactly; 0: all")
    # fmt: on
    add_decoding(parser, SELECT)  # for names alone
    args = parser.parse_args()

    folders = dict.fromkeys([*map(base_of, args.ckpt), *args.ckpt])  # bases come first
    models = {folder: load_model(folder, pick_device(args.device), torch.float32) for folder in folders}
    of_names = not args.bits and all("names" in judge_of(folder) for folder in args.ckpt)
    task = task_of(args.ckpt[0]) if len(args.ckpt) == 1 and not args.bits else None
    unread = [] if of_names else ["prompts", *asked_for(args)]
    for name in unread + (["data", "seq_len", "tokens", "hole"] if of_names or task else []):
        if getattr(args, name) != parser.get_default(name):
            fail(f"--{name} does nothing here: names, toys and bits are evaluated by flags of their own (see --help)")
    if of_names:
        evaluate_names(models, args)
    elif task:
        evaluate_toy(models[args.ckpt[0]], task)
        ids = ",".join(map(str, task.prompt(torch.tensor([0]))[0].tolist()))
        print(f"next: python sample.py --ckpt {quoted(args.ckpt[0])} --prompt_ids {ids} --gen_length {task.m}")
    else:
        evaluate_bits(models, args)


if __name__ == "__main__":
    main()
