"""The flags of train.py: what they mean, what they default to, and which of them belong together.

What is not given depends on what the model reads (names, bytes, a toy's numbers, or a released
checkpoint's BPE: the paper's setting) and on where it starts (from scratch, or from a checkpoint).
"""

import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lib import data, toy
from lib.config import DTYPES, Config
from lib.tokenizer import Tokenizer, learn_bpe
from lib.util import Parser, bounded, fail, read_json, write_json

# --- defaults: by what is read; by where it starts; and by both, which goes before
OF_DATA = {
    "names": dict(batch_size=64, out_dir="out/names"),
    "bytes": dict(seq_len=256, batch_size=8, max_iters=1300, out_dir="out/text"),
    "toy": dict(batch_size=128, max_iters=1000, out_dir="out/toy"),
    "bpe": dict(seq_len=2048, batch_size=8, max_iters=12500, out_dir="out/cocommit"),
}
OF_START = {
    "scratch": dict(learning_rate=3e-3, corruption="random", block_length=8),  # no draft is worth learning from yet
    "checkpoint": dict(learning_rate=1e-5, corruption="draft"),
}
OF_BOTH = {
    ("names", "scratch"): dict(preset="names", seq_len=16, learning_rate=4e-3, corruption="mask", max_iters=1800),
    ("names", "checkpoint"): dict(seq_len=32, learning_rate=1e-3, max_iters=300),
    ("bytes", "scratch"): dict(preset="text"),
    ("toy", "scratch"): dict(preset="tiny", block_length=None),  # its answer is one block
}
BASE_OF_NAMES = "assets/names"

# what a resumed run may change
FREE_ON_RESUME = {"out_dir", "device", "micro_batch", "checkpointing"}


# --- flags
def build_parser(doc: str) -> Parser:
    """train.py's command line; an extension adds its own group to it."""
    parser = Parser(doc)
    count = bounded(int, 1)
    some = bounded(int, 0)
    share = bounded(float, 0, 1)

    # fmt: off
    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", default=["names"],
        help=f"names, stdlib, a toy ({', '.join(toy.TASKS)}), or .txt / folder / .jsonl[.gz] / .parquet")
    add("--toy", nargs="+", default=[], metavar="KEY=VALUE", help="sizes of a toy, see lib/toy.py")
    add("--seq_len", type=count, help="tokens in a row, one document a row (paper 2048; names 32, bytes 256)")
    add("--max_docs", type=some, default=0, help="stop reading after so many documents (paper 50000; 0: read all)")

    add = parser.add_argument_group("model").add_argument
    add("--init_from", help="scratch, resume, or a checkpoint's folder, as in the paper: LoRA and markers train (names "
        "start from assets/names, everything else from scratch)")
    add("--n_last", type=count, help="n, the layers of Stage B (paper 3; from scratch half of them)")
    add("--n_rounds", type=count, default=1, help="K, rounds of Stage B, one marker each (paper 1)")
    add("--block_length", type=count, help="tokens decoded together (paper 32: a checkpoint's own; scratch 8)")
    add("--lora_r", type=count, default=16, help="rank of the adapters, alpha = 2 r (paper 16 and 32)")
    add("--stage_a_only", action="store_true", help="from scratch without Stage B: a base to adapt later")

    add = parser.add_argument_group("corruption and bundle").add_argument
    add("--corruption", choices=("mask", "random", "draft"),
        help="see corrupt.py (paper draft; from scratch random, masks alone for names)")
    add("--context", choices=["corrupted", "clean"], default="corrupted",
        help="earlier blocks: corrupted too (paper), or clean as in decoding, rows [noisy ; clean]")
    add("--s_max", type=count, help="largest bundle, the smallest is 1 (paper 16: half a block; a toy's answer)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--max_iters", type=count, help="optimizer steps; the cosine ends here (paper 12500)")
    add("--batch_size", type=count, help="rows in one optimizer step (paper 8)")
    add("--micro_batch", type=some, default=0, help="rows in one forward; gradients accumulate (0: all)")
    add("--learning_rate", type=bounded(float, 1e-12), help="peak (paper 1e-5; names 1e-3; from scratch 3e-3)")
    add("--weight_decay", type=share, default=0.01, help="on matrices; not on norms and markers")
    add("--grad_clip", type=bounded(float, 0), default=1.0, help="largest gradient norm (0: no clipping)")
    add("--checkpointing", action="store_true", help="recompute layers in the backward (paper): less memory, slower")

    add = parser.add_argument_group("run").add_argument
    add("--out_dir", help="where checkpoints and log.jsonl go")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, default="fp32", help="activations; frozen weights too (paper bf16)")
    add("--eval_interval", type=count, default=250, help="validate and save every so many steps")
    # fmt: on
    parser.set_defaults(preset=None, s_min=1, eval_rows=64, log_interval=50)
    return parser


# --- what the flags mean
def settle(parser: Parser, config_of: Callable[[Path], Config]) -> Namespace:
    """The command line with every default filled in. config_of reads the geometry of a folder."""
    args = parser.parse_args()
    if args.init_from == "resume":
        return settle_resumed(args)
    return settle_new(args, config_of)


def settle_resumed(args: Namespace) -> Namespace:
    """The saved run's settings, and those of the command line that a resumed run may change."""
    given = {word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
    folder = Path(args.out_dir or OF_DATA["names"]["out_dir"])
    path = folder / "train.json"
    saved = read_json(path, "training run to resume (--out_dir of an earlier run)")
    for name in vars(args):
        if name not in saved:
            fail(f"{path} lacks {name}: it is no whole run's settings, or another script's; start in a new --out_dir")
    for name in given - {"init_from"}:
        value = getattr(args, name)
        if value != saved[name] and name not in FREE_ON_RESUME:
            fail(f"--{name} {value} differs from the run's {saved[name]}: leave it out, or use a new --out_dir")
        saved[name] = value
    return Namespace(**saved | {"out_dir": str(folder), "resume": True})


def settle_new(args: Namespace, config_of: Callable[[Path], Config]) -> Namespace:
    """Refuse what cannot be meant, then fill in what was not given."""
    args.resume = False
    if args.init_from is None:
        args.init_from = "scratch"
        if args.data == ["names"] and not args.stage_a_only:
            args.init_from = BASE_OF_NAMES
    start = "scratch"
    cfg = None
    if args.init_from != "scratch":
        start = "checkpoint"
        cfg = config_of(Path(args.init_from))
        if is_toy(args) and not args.toy:
            args.toy = toy_of_the_checkpoint(args)
    reads = what_it_reads(args, cfg)

    if args.toy and not is_toy(args):
        fail("--toy gives a toy its size; name the toy by --data")
    if is_toy(args) and (args.block_length or args.seq_len):
        fail("--block_length and --seq_len are for text, a toy has its size from --toy m=4")
    if args.stage_a_only and cfg:
        fail("--stage_a_only trains a base from scratch, from a checkpoint Stage B is what there is to train")

    for name, value in (OF_START[start] | OF_DATA[reads] | OF_BOTH.get((reads, start), {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    # enough to tell, and never more than a few steps' worth: at full size a row takes minutes
    args.eval_rows = min(args.eval_rows, 8 * args.batch_size)
    if args.n_last is None and cfg:
        args.n_last = min(3, cfg.n_layer)

    # a bundle is at most half a block, but a toy's answer may be all of it
    if args.s_max is None and is_toy(args):
        args.s_max = toy_corpus(args).tokens["block_length"]
    elif args.s_max is None:
        args.s_max = max(args.s_min, (args.block_length or cfg.block_length) // 2)
    if args.s_max < args.s_min:
        fail(f"--s_max {args.s_max} is below the smallest bundle, {args.s_min}")

    for name in ("train.json", "config.json", "adapter.json"):
        if (Path(args.out_dir) / name).exists():
            fail(f"{args.out_dir} already holds a run or a checkpoint: choose another --out_dir, or --init_from resume")
    return args


def is_toy(args: Namespace) -> bool:
    return len(args.data) == 1 and args.data[0] in toy.TASKS


def what_it_reads(args: Namespace, cfg: Config | None) -> str:
    """A key of OF_DATA; cfg is that of the checkpoint that it starts from, if it does."""
    if cfg and (cfg.tokenizer == "toy") != is_toy(args):
        fail(f"--init_from {args.init_from} reads other tokens than --data {' '.join(args.data)} has")
    if is_toy(args):
        return "toy"
    if args.data == ["names"]:
        return "names"
    return cfg.tokenizer if cfg else "bytes"


def toy_of_the_checkpoint(args: Namespace) -> list[str]:
    """The sizes of the toy that a checkpoint was trained on, where it is the toy of this run."""
    saved = read_json(Path(args.init_from) / "toy.json", "toy settings of the checkpoint")
    same = saved.pop("name", None) == args.data[0]
    return [f"{k}={v}" for k, v in saved.items()] if same else []


# --- what is read
@dataclass
class Corpus:
    rows: dict[str, data.Sequences | toy.Rows]  # "train" and "val"
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    tokens: dict  # what these tokens make of a Config


def toy_corpus(args: Namespace) -> Corpus:
    task = toy.make(args.data[0], **toy.sizes(args.toy))
    rows = {"train": toy.Rows(task, args.seed, "rows"), "val": toy.Rows(task, args.seed, "validation rows")}
    tokens = dict(
        tokenizer="toy", eos_id=task.eos_id, mask_id=task.mask_id, vocab_size=task.vocab_size, block_length=task.m
    )
    return Corpus(rows, task.V, tokens)


def text_corpus(args: Namespace, tokenizer: Tokenizer, kind: str, block_length: int) -> Corpus:
    train, val = data.load_sequences(
        args.data, tokenizer, args.seq_len, args.seed, args.max_docs, block_length, args.batch_size
    )
    tokens = dict(
        tokenizer=kind, eos_id=tokenizer.eos_id, mask_id=tokenizer.mask_id, block_length=block_length,
        vocab_size=math.ceil(tokenizer.vocab_size / 16) * 16,  # padded, in a new model
    )  # fmt: skip
    return Corpus({"train": train, "val": val}, min(tokenizer.special.values()), tokens)


def learn_tokenizer(folder: Path, args: Namespace) -> str:
    """What a model from scratch reads: bytes; of names a BPE, learned once."""
    if args.data != ["names"]:
        return "bytes"
    if not (folder / "tokenizer.json").exists():
        write_json(folder / "tokenizer.json", learn_bpe(data.unicode_names(), data.NAMES_VOCAB))
        write_json(folder / "names.json", {"unidata_version": data.unicodedata.unidata_version})
    return "bpe"
