"""Shakespeare: what a block of 16 bytes costs when it is written at once, and what draws are like.

`together` trains a base and its causal Stage B at once, from scratch, or from a base (--init_from BASE without --preset
and --block_length). `half` stores a base in bfloat16, as it ships. `bits` and `draws` append their records, one a line,
and skip what is already there; `table` prints means over seeds.

    python -m experiments.text together --config configs/text.toml --data data/shakespeare --seed 1 \\
        --init_from scratch --preset text --lora_r 0 --block_length 16 --max_iters 2600 --out_dir out/together
    python -m experiments.text bits --system causal --seed 1 --ckpt out/text --out out/bits.jsonl
    python -m experiments.text draws --system causal --seed 1 --ckpt out/text --judge out/left --judge_seed 2 \\
        --out out/draws.jsonl
    python -m experiments.text table out/bits.jsonl out/draws.jsonl
"""

import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import Tensor

import experiments.control  # noqa: F401  (the control's models can be loaded)
import train
from checkpoint import load_model, save_model
from decoding import Decoding, Output, in_full
from evaluate import TEXT_BATCH, bits_of_batch, bits_of_rows
from lib.rows import Batch, Corpus, read_corpus
from lib.tokenizer import load_tokenizer
from lib.util import Parser, append_line, command, fail, print_table, progress, read_lines, run_command
from model import Model
from sample import generate

DATA = Path("data/shakespeare")
SEQ_LEN = 256
BLOCK = 16
N_BYTES = 16384  # held out, for bits
N = 256  # beginnings that are continued
BEGINNING = 56  # bytes of each
LENGTH = 200  # bytes written behind it

# what is measured of a system in bits
WAYS = {
    "base": ["Stage A", "one at a time", "in blocks of one"],  # the last as a left-to-right model writes
    "paper": ["Stage A", "Stage B"],
    "causal": ["Stage B"],
    "short": ["Stage B"],  # causal Stage B by its config's own steps, which are the control's
    "control": ["Stage B"],
    "together": ["Stage A", "one at a time", "Stage B"],
    "left": ["Stage A"],  # in blocks of one: what a mask says is the next byte
}
DRAWN = Decoding(gen_length=LENGTH, temperature=1.0, tau_t2t=None, eos_early_stop=False)
# by which rules it draws
RULES = {
    "base": {
        "all at once": dict(tau_m2t=-1.0, n_rounds=0),
        "above 0.7": dict(tau_m2t=0.7, n_rounds=0),
        "above 0.9": dict(tau_m2t=0.9, n_rounds=0),
        "one at a time": dict(tau_joint=1.0, n_rounds=0),
    },
    "paper": {
        "all at once": dict(tau_m2t=-1.0),
        "all at once without Stage B": dict(tau_m2t=-1.0, n_rounds=0),
    },
    "causal": {
        "whole blocks": dict(tau_joint=0.0),
        "above 0.7": dict(tau_joint=0.7),
        "above 0.9": dict(tau_joint=0.9),
    },
    "left": {"one at a time": dict(tau_joint=1.0, n_rounds=0)},
}


def together(parser: Parser) -> None:
    sys.argv[0] = "-m experiments.text together"  # the run prints how to go on
    train.run(train.read_arguments())


def half(parser: Parser) -> None:
    """Store a base in bfloat16, in half of the space. Adapters are then trained on the rounded weights."""
    parser.add_argument("--ckpt", type=Path, required=True)
    folder = parser.parse_args().ckpt
    save_model(load_model(folder, torch.device("cpu"), torch.bfloat16), folder)


# --- bits of held-out text
def bits(parser: Parser) -> None:
    args = read_flags(parser)
    corpus = read_text()
    for way in WAYS[args.system]:
        record = dict(system=args.system, seed=args.seed, way=way)
        if is_there(record, args.out):
            continue
        ones = way == "in blocks of one"
        model = load(args.ckpt, 1 if ones else None)
        total, n, _ = bits_of_rows(model, corpus, "Stage A" if ones else way, N_BYTES, None)
        append_line(args.out, record | dict(bits=total / n, bytes=n))


# --- draws
def draws(parser: Parser) -> None:
    parser.add_argument("--judge", type=Path, required=True, help="a left-to-right model of another seed")
    parser.add_argument("--judge_seed", type=int, required=True)
    args = read_flags(parser)
    if args.system not in RULES:
        fail(f"--system {args.system}: there are draws of {', '.join(RULES)}")
    model = load(args.ckpt)
    judge = load(args.judge)
    corpus = read_text()
    text = torch.from_numpy(np.concatenate(corpus.rows["val"].rows)).long()
    beginnings, endings = cut(text)
    tokenizer = load_tokenizer(DATA)
    about = dict(seed=args.seed, judge_seed=args.judge_seed)

    # the text itself, judged
    record = dict(system="text", rule="", **about)
    if not is_there(record, args.out):
        append_line(args.out, record | judged(judge, beginnings, endings) | dict(distinct=distinct(endings)))

    for rule, settings in progress(list(RULES[args.system].items()), "rules"):
        record = dict(system=args.system, rule=rule, **about)
        if is_there(record, args.out):
            continue
        d = replace(DRAWN, **settings)
        outputs = generate(model, beginnings.tolist(), d, seed=args.seed)
        # a text that ended early is left out
        kept = [i for i, output in enumerate(outputs) if len(output.tokens) == LENGTH]
        begun = beginnings[kept]
        drawn = torch.tensor([outputs[i].tokens for i in kept])
        record["texts"] = len(kept)
        record |= judged(judge, begun, drawn) | dict(distinct=distinct(drawn))
        record["forwards"] = mean(in_full(o.nfe, model.partial_cost) for o in outputs) / LENGTH
        record |= timed(model, beginnings, d)
        # in blocks of one, our loop takes two forwards a byte: one fills its mask, and one reads it. A loop for such
        # models alone does both in one forward, in half of the time
        if model.cfg.block_length == 1:
            record |= dict(forwards=1.0, ms_1=record["ms_1"] / 2, ms_16=record["ms_16"] / 2)

        # what its draws cost the system itself, in bits: an estimate of its own entropy
        way = {"whole blocks": "Stage B", "one at a time": "one at a time", "all at once": "Stage A"}.get(rule)
        if way and args.system != "paper":
            record["own"] = cost_of(model, begun, drawn, way)

        # the first four of them, in order
        shown = [tokenizer.decode(row) for row in torch.cat([begun, drawn], dim=1)[:4].tolist()]
        append_line(args.out, record | dict(first=shown))


def cut(text: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of held-out text as beginnings (N, BEGINNING) and endings (N, LENGTH): they lie evenly in it."""
    starts = torch.linspace(0, len(text) - BEGINNING - LENGTH - 1, N).long()
    rows = torch.stack([text[at : at + BEGINNING + LENGTH] for at in starts])
    return rows[:, :BEGINNING], rows[:, BEGINNING:]


def judged(judge: Model, beginnings: Tensor, endings: Tensor) -> dict[str, float]:
    return {"bits": cost_of(judge, beginnings, endings, "Stage A")}


@torch.inference_mode()
def cost_of(model: Model, beginnings: Tensor, endings: Tensor, way: str) -> float:
    """Bits a byte of the endings, given the beginnings."""
    x = torch.cat([beginnings, endings], dim=1)
    corruptible = torch.zeros_like(x, dtype=torch.bool)
    corruptible[:, beginnings.shape[1] :] = True
    real = torch.ones_like(corruptible)
    total = 0.0
    for at in range(0, len(x), TEXT_BATCH):
        part = slice(at, at + TEXT_BATCH)
        batch = Batch(x[part], real[part], corruptible[part], torch.empty(0), [])
        total += float(bits_of_batch(model, batch, way).double().sum())
    return total / endings.numel()


def distinct(rows: Tensor) -> float:
    """How many of the rows' 4-grams are the first of their kind, as a share."""
    grams = Counter(tuple(gram) for row in rows.tolist() for gram in zip(*(row[i:] for i in range(4)), strict=False))
    return len(grams) / grams.total()


def timed(model: Model, beginnings: Tensor, d: Decoding) -> dict[str, float]:
    """ms a byte, of one row and of 16 rows together."""
    found = {}
    for n in (1, 16):
        began = time.perf_counter()
        outputs: list[Output] = generate(model, beginnings[:n].tolist(), d)
        found[f"ms_{n}"] = 1e3 * (time.perf_counter() - began) / sum(len(o.tokens) for o in outputs)
    return found


# --- what all commands read
def read_flags(parser: Parser) -> Namespace:
    parser.add_argument("--system", choices=WAYS, required=True, help="what --ckpt is")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ckpt", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def load(folder: Path, block_length: int | None = None) -> Model:
    return load_model(folder, torch.device("cpu"), torch.float32, block_length=block_length)


def read_text() -> Corpus:
    """The rows that all models are judged on, whatever their blocks are."""
    return read_corpus(DATA, SEQ_LEN, 0, BLOCK, 0)


def is_there(record: dict, out: Path) -> bool:
    return out.exists() and any(record.items() <= other.items() for other in read_lines(out, {"system": str}))


# --- means over seeds
def table(parser: Parser) -> None:
    parser.add_argument("records", nargs="+", type=Path)
    found = defaultdict(list)
    for path in parser.parse_args().records:
        for r in read_lines(path, {"system": str}):
            found[r["system"], r.get("way", r.get("rule")), "way" in r].append(r)
    rows = []
    for (system, way, _), records in found.items():
        cells = []
        for key, digits in (("bits", 3), ("forwards", 3), ("distinct", 3), ("own", 2), ("ms_1", 2), ("ms_16", 2)):
            values = [r[key] for r in records if key in r]
            cells.append(f"{mean(values):.{digits}f}" if values else "")
        seeds = " ".join(f"{r['bits']:.3f}" for r in records)
        rows.append([f"{system}, {way}", *cells, seeds])
    print_table(["", "bits a byte", "forwards a byte", "distinct", "own bits", "ms, 1 row", "16 rows", "seeds"], rows)


@command
def main() -> None:
    run_command({"together": together, "half": half, "bits": bits, "draws": draws, "table": table}, __doc__)


if __name__ == "__main__":
    main()
