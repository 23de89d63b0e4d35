"""The flags of train.py: what they mean, what they default to, and which of them belong together.

What is not given depends on two things: what the model reads (names, bytes, a toy's numbers, or a
released checkpoint's BPE, which is the paper's setting) and where it starts (from scratch, or from
a checkpoint).
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import checkpoint
from corrupt import CORRUPTIONS
from lib import data, toy, util
from lib.tokenizer import learn_bpe
from lib.util import Parser, bounded, fail

# --- defaults
READS = {
    "names": dict(
        preset="names", seq_len=16, block_length=8, batch_size=64, max_iters=2100, out_dir="out/names",
        learning_rate=4e-3, corruption="mask",
    ),
    "bytes": dict(preset="text", seq_len=256, block_length=8, batch_size=8, max_iters=1300, out_dir="out/text"),
    "toy": dict(preset="tiny", batch_size=128, max_iters=1000, out_dir="out/toy"),
    "bpe": dict(seq_len=2048, batch_size=8, max_iters=12500, out_dir="out/cocommit"),
}  # fmt: skip
SCRATCH = dict(learning_rate=3e-3, corruption="random")  # there is no draft worth learning from yet
ADAPTER = dict(learning_rate=1e-5, corruption="draft")
OF_A_CHECKPOINT = ("preset", "block_length")  # a checkpoint has its own

# what a resumed run may change
FREE_ON_RESUME = {"init_from", "out_dir", "device", "stop_at", "log_interval", "micro_batch", "checkpointing"}


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
    add("--toy", nargs="+", default=[], metavar="KEY=VALUE", help="sizes of a toy, see toy.py")
    add("--seq_len", type=count, help="tokens in a row, one document a row (names 16, bytes 256, else 2048)")
    add("--max_docs", type=some, default=0, help="stop reading after so many documents (paper 50000; 0: read all)")

    add = parser.add_argument_group("model").add_argument
    add("--init_from", default="scratch", help="scratch, resume, or a checkpoint (LoRA and markers train)")
    add("--preset", choices=checkpoint.PRESETS, help="geometry from scratch (names, text, tiny for toys)")
    add("--n_last", type=count, help="n, the layers of Stage B (paper 3 of 20; half, or a checkpoint's)")
    add("--n_rounds", type=count, default=1, help="K, rounds of Stage B, one marker each (paper 1)")
    add("--block_length", type=count, help="tokens decoded together (8; a checkpoint's own; a toy's answer)")
    add("--lora_r", type=count, default=16, help="rank of the adapters, alpha = 2 r (paper 16 and 32)")
    add("--stage_a_only", action="store_true", help="from scratch without Stage B: a base to adapt later")

    add = parser.add_argument_group("corruption and bundle").add_argument
    add("--corruption", choices=CORRUPTIONS,
        help="see corrupt.py (random from scratch, masks alone for names; draft from a checkpoint, the paper)")
    add("--replace_rate", type=share, default=0.1, help="random: the share of visible tokens that are replaced")
    add("--draft_rate", type=share, default=0.3, help="draft: the share of masks that the draft fills")
    add("--context", choices=["corrupted", "clean"], default="corrupted",
        help="earlier blocks: corrupted too (paper), or clean as in decoding, rows [noisy ; clean]")
    add("--bundle_scope", choices=["block", "sequence"], default="block",
        help="draw the bundle in each block, as decoding does, or once in a row (the paper leaves it open)")
    add("--s_min", type=count, default=1, help="smallest bundle (paper 1)")
    add("--s_max", type=count, default=16, help="largest bundle (paper 16, half a block; 8 is all of a names block)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--max_iters", type=count, help="optimizer steps; the cosine ends here (paper 12500)")
    add("--batch_size", type=count, help="rows in one optimizer step (paper 8)")
    add("--micro_batch", type=some, default=0, help="rows in one forward; gradients accumulate (0: all)")
    add("--learning_rate", type=bounded(float, 1e-12), help="peak (3e-3 from scratch; adapters 1e-5, paper)")
    add("--weight_decay", type=share, default=0.01, help="on matrices; not on norms and markers")
    add("--grad_clip", type=bounded(float, 0), default=1.0, help="largest gradient norm (0: no clipping)")
    add("--checkpointing", action="store_true", help="recompute layers in the backward: less memory, slower")

    add = parser.add_argument_group("run").add_argument
    add("--out_dir", help="where checkpoints and log.jsonl go")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=checkpoint.DTYPES, default="fp32", help="activations; frozen weights too")
    add("--log_interval", type=count, default=50, help="print every so many steps (log.jsonl has them all)")
    add("--eval_interval", type=count, default=250, help="validate and save every so many steps")
    add("--eval_rows", type=count, default=64, help="validation rows, the same ones each time")
    add("--stop_at", type=some, default=0, help="save and stop after this step, as Ctrl-C would (0: run on)")
    # fmt: on
    return parser


# --- what the flags mean
def settle(parser: Parser) -> Namespace:
    """The command line with every default filled in, or one line about what does not go together."""
    args = parser.parse_args()
    given = {word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
    if args.init_from == "resume":
        return settle_resumed(args, given)
    return settle_new(args)


def settle_resumed(args: Namespace, given: set[str]) -> Namespace:
    """The saved run's settings, and those of the command line that a resumed run may change."""
    if args.out_dir is None:
        args.out_dir = READS["names"]["out_dir"]
    saved = checkpoint.resumable(Path(args.out_dir), vars(args), given - FREE_ON_RESUME)
    settled = Namespace(**saved)
    for name in (given & FREE_ON_RESUME) | {"stop_at", "out_dir"}:
        setattr(settled, name, getattr(args, name))
    settled.init_from = saved["init_from"]
    settled.resume = True
    return settled


def settle_new(args: Namespace) -> Namespace:
    """Refuse what cannot be meant, then fill in what was not given."""
    args.resume = False
    scratch = args.init_from == "scratch"
    reads = what_it_reads(args)
    if is_toy(args) and not scratch and not args.toy:
        args.toy = toy_of_the_checkpoint(args)

    if args.preset and not scratch:
        fail("--preset is a geometry from scratch; a checkpoint has its own: leave it out")
    if args.toy and not is_toy(args):
        fail("--toy gives a toy its size; name the toy by --data")
    if is_toy(args) and (args.block_length or args.seq_len):
        fail("--block_length and --seq_len are for text, a toy has its size from --toy m=4")
    if args.stage_a_only and not scratch:
        fail("--stage_a_only trains a base from scratch, from a checkpoint Stage B is what there is to train")
    if args.s_max < args.s_min:
        fail(f"--s_max {args.s_max} is below --s_min {args.s_min}")

    # what the model reads decides before where it starts
    defaults = ADAPTER
    if scratch:
        defaults = SCRATCH
    for name, value in (defaults | READS[reads]).items():
        if getattr(args, name) is not None:
            continue
        if not scratch and name in OF_A_CHECKPOINT:
            continue
        setattr(args, name, value)

    for name in ("train.json", "config.json"):
        if (Path(args.out_dir) / name).exists():
            fail(f"{args.out_dir} already holds a run or a checkpoint: choose another --out_dir, or --init_from resume")
    return args


def is_toy(args: Namespace) -> bool:
    return len(args.data) == 1 and args.data[0] in toy.TASKS


def what_it_reads(args: Namespace) -> str:
    """A key of READS."""
    reads = "bytes"
    if is_toy(args):
        reads = "toy"
    elif args.data == ["names"]:
        reads = "names"
    if args.init_from == "scratch":
        return reads

    # a checkpoint reads what it was made for
    tokenizer = checkpoint.read_config(Path(args.init_from)).tokenizer
    if (tokenizer == "toy") != is_toy(args):
        fail(f"--init_from {args.init_from} reads other tokens than --data {' '.join(args.data)} has")
    if reads == "bytes":
        return tokenizer
    return reads


def toy_of_the_checkpoint(args: Namespace) -> list[str]:
    """The sizes of the toy that a checkpoint was trained on, where it is the toy of this run."""
    saved = util.read_json(Path(args.init_from) / "toy.json", "toy settings of the checkpoint")
    if saved.get("name") != args.data[0]:
        return []
    return [f"{k}={v}" for k, v in saved.items() if k != "name"]


# --- what is read
@dataclass
class Corpus:
    rows: dict[str, data.Sequences | toy.Rows]  # "train" and "val"
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    tokens: dict  # what these tokens make of a Config


def load_corpus(args: Namespace) -> Corpus:
    if is_toy(args):
        return load_toy(args)
    return load_text(args)


def load_toy(args: Namespace) -> Corpus:
    task = toy.make(args.data[0], **toy.sizes(args.toy))
    rows = {"train": toy.Rows(task, args.seed, "rows"), "val": toy.Rows(task, args.seed, "validation rows")}
    tokens = dict(
        tokenizer="toy", eos_id=task.eos_id, mask_id=task.mask_id, vocab_size=task.vocab_size, block_length=task.m
    )
    return Corpus(rows, task.V, tokens)


def load_text(args: Namespace) -> Corpus:
    scratch = args.init_from == "scratch"
    folder = Path(args.init_from)
    if scratch:
        folder = Path(args.out_dir)
        kind = learn_tokenizer(folder, args)
    else:
        kind = checkpoint.read_config(folder).tokenizer
    tokenizer = checkpoint.load_tokenizer(folder, kind)
    if tokenizer is None:
        fail(f"{folder} has no tokenizer.json to read text with")

    # rows end at the end of a block
    block_length = args.block_length
    if block_length is None:
        block_length = checkpoint.read_config(folder).block_length
    train, val = data.load_sequences(
        args.data, tokenizer, args.seq_len, args.seed, args.max_docs, block_length, args.batch_size
    )

    # the vocabulary of a new model is padded to a multiple of 16
    vocab_size = -(-tokenizer.vocab_size // 16) * 16
    tokens = dict(
        tokenizer=kind, eos_id=tokenizer.eos_id, mask_id=tokenizer.mask_id, vocab_size=vocab_size,
        block_length=args.block_length,
    )  # fmt: skip
    return Corpus({"train": train, "val": val}, min(tokenizer.special.values()), tokens)


def learn_tokenizer(folder: Path, args: Namespace) -> str:
    """Which tokens a model from scratch reads. Names have a BPE of their own, learned once, in the
    run's folder.
    """
    if args.data != ["names"]:
        return "bytes"
    if not (folder / "tokenizer.json").exists():
        util.write_json(folder / "tokenizer.json", learn_bpe(data.unicode_names(), data.NAMES_VOCAB))
        util.write_json(folder / "names.json", {"unidata_version": data.unicodedata.unidata_version})
    return "bpe"
