"""The settings of a training run: the flags of train.py and base.py, and what they must fit."""

import argparse
import tomllib
from argparse import Namespace
from pathlib import Path

import checkpoint
from checkpoint import DTYPES, STAGE_B
from config import PRESETS, Config
from corrupt import CORRUPTIONS
from lib.optimizers import OPTIMIZERS
from lib.rows import WHOLE, read_meta, rows_hash
from lib.run import PLACES, check_hash, run_settings
from lib.util import Parser, bounded, fail, place, quoted

# the settings that a resumed run may change. The schedule is computed again for another max_iters
FREE_ON_RESUME = {"out_dir", "device", "micro_batch", "checkpointing", "max_iters", "eval_interval", *PLACES}

MARKER_RATE = 3000.0  # a marker then reaches a twelfth of the states of a frozen base in 300 steps (results/names)


def build_parser(doc: str) -> Parser:
    parser = Parser(doc)
    count = bounded(int, 1, 10**9)
    some = bounded(int, 0, 10**9)
    flag = argparse.BooleanOptionalAction

    # a run keeps its flags as --name=value, so a flag of your own takes one value, or is a BooleanOptionalAction
    # fmt: off
    add = parser.add_argument_group("data").add_argument
    add("--config", type=place, metavar="TOML", help="a file of flags, as in configs/; the command line's flags win")
    add("--data", type=place, default="data/names", help="a folder of rows, written by prepare.py or toy.py")
    add("--seq_len", type=count, default=32, help="the most tokens of a row, which never mixes documents (paper 2048)")

    add = parser.add_argument_group("model").add_argument
    add("--init_from", type=place, default="assets/names", help="scratch, resume, or the folder of a model")
    add("--preset", choices=PRESETS, default="tiny", help="the geometry of a model from scratch")
    add("--n_last", type=count, help="n, the layers of Stage B (paper 3; left out: the checkpoint's or preset's)")
    add("--n_rounds", type=count,
        help="K, the rounds of Stage B, a marker each (paper 1; left out: the checkpoint's or preset's)")
    add("--block_length", type=count,
        help="tokens decoded together (paper 32; left out: the rows', or else the checkpoint's or preset's)")
    add("--lora_r", type=some, default=16, help="the rank of LoRA (paper 16; its scale is 2); 0: all weights learn")
    add("--stage_b", choices=STAGE_B, default="paper",
        help="the paper's Stage B, or the one of causal.py, which fixes --corruption mask and --context clean, and "
             "does not use --s_max, nor --lora_r unless it is 0: then the base learns, too")

    add = parser.add_argument_group("corruption and bundle").add_argument
    add("--corruption", choices=CORRUPTIONS, help="how tokens are made wrong, see corrupt.py (default: draft)")
    add("--context", choices=["corrupted", "clean"],
        help="how a block sees the blocks before it: corrupted (paper), or clean, as in decoding (default: corrupted)")
    add("--s_max", type=count, default=16, help="the most masks of a row's bundle (paper 16)")
    add("--whole_share", type=bounded(float, 0, 1), default=0.0,
        help="the share of blocks that are masked whole, for the Stage B of causal.py alone")

    add = parser.add_argument_group("optimisation").add_argument
    add("--max_iters", type=count, default=300, help="optimizer steps; the cosine ends here (paper 12500)")
    add("--batch_size", type=count, default=64, help="rows in one optimizer step (paper 8)")
    add("--micro_batch", type=some, default=0, help="rows in one forward; gradients are added up (0: all rows)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw",
        help="adamw (paper); or muon, for the matrices of the layers that learn, beside Adam for the rest")
    add("--learning_rate", type=bounded(float, 1e-12), default=3e-4, help="the highest rate (paper 1e-5)")
    add("--marker_rate", type=bounded(float, 0),
        help=f"the markers' rate as a multiple of --learning_rate, by adamw (paper 1; default: {MARKER_RATE:g} for the "
             "paper's Stage B on a frozen base, or else 1)")
    add("--checkpointing", action=flag, default=False,
        help="recompute the layers in the backward (paper), which is slower and takes less memory")

    add = parser.add_argument_group("run").add_argument
    add("--out_dir", type=place, default="out/names", help="the folder of the checkpoint and of log.jsonl")
    add("--seed", type=int, default=0, help="any whole number, of any size: it is hashed")
    add("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    add("--dtype", choices=DTYPES, default="fp32",
        help="the precision of activations and frozen weights (paper bf16); what learns is fp32")
    add("--eval_interval", type=count, default=250, help="steps from one validation to the next; each also saves")
    # fmt: on
    return parser


def read_arguments(parser: Parser) -> Namespace:
    """The flags of the command line, on top of those in --config or of the run that is resumed."""
    args = run_settings(parser, FREE_ON_RESUME)
    settle(args)
    return args


def settle(args: Namespace) -> None:
    """Take the sizes that were left out from the checkpoint or the rows, and refuse settings that do not fit."""
    refuse_used(args)
    fixed = STAGE_B[args.stage_b].fixed
    as_papers = saves_adapter(args) and args.stage_b == Config.stage_b
    usual = dict(corruption="draft", context="corrupted", marker_rate=MARKER_RATE if as_papers else 1.0)
    for name, papers in (usual | fixed).items():
        if getattr(args, name) is None:
            setattr(args, name, papers)
        elif name in fixed and getattr(args, name) != papers:
            fail(f"--{name} {getattr(args, name)}: {args.stage_b} Stage B learns with --{name} {papers} alone")
    meta = read_meta(Path(args.data))
    if args.init_from == "scratch":
        cfg = PRESETS[args.preset]
    else:
        cfg = checkpoint.read_config(Path(args.init_from))
        check_rows_fit(args)
    for name in ("n_last", "n_rounds"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(cfg, name))
    if args.n_last > cfg.n_layer:
        fail(f"--n_last {args.n_last}: this model has {cfg.n_layer} layers")
    if args.block_length is None:
        args.block_length = meta.block_length or cfg.block_length
    if meta.block_length and args.block_length != meta.block_length:
        fail(f"--block_length {args.block_length}: the rows in {args.data} are made for blocks of {meta.block_length}")
    if "toy" in (meta.judge or {}):
        args.seq_len = 2 * args.block_length  # all rows of a toy have this length

    if args.seq_len % args.block_length or args.seq_len > cfg.max_len:
        sizes = f"--block_length {args.block_length}, at most {cfg.max_len}"
        fail(f"--seq_len {args.seq_len} must be a multiple of {sizes}")

    check_hash(args, "rows_hash", rows_hash(Path(args.data)), args.data)


def refuse_used(args: Namespace) -> None:
    """Refuse a folder with a file that a run would write: only the run itself overwrites its files."""
    folder = Path(args.out_dir)
    tensors = [f"{name}.safetensors" for name in ("model", "adapter", "state")]
    if not args.resume:
        for name in (*WHOLE, "log.jsonl", "tokenizer.json", *tensors):
            if (folder / name).exists():
                fail(f"{folder} already holds a run or a checkpoint ({name}): choose another --out_dir, or go on by "
                     f"--init_from resume --out_dir {quoted(folder)}, without --config")  # fmt: skip


def check_rows_fit(args: Namespace) -> None:
    """Refuse a checkpoint that training cannot start from, and rows with other tokens than the checkpoint's."""
    base = Path(args.init_from)
    if checkpoint.about_adapter(base):
        fail(f"--init_from {base} is an adapter, and training starts from a model: give its base, "
             f"--init_from {quoted(checkpoint.base_of(base))}")  # fmt: skip
    own = checkpoint.read_config(base).stage_b
    if own not in ("paper", args.stage_b):
        fail(f"--init_from {base} has a Stage B of its own, which goes on learning: give --stage_b {own}")
    checkpoint.check_same_tokens(Path(args.data), base)


def saves_adapter(args: Namespace) -> bool:
    """Does an adapter learn beside a frozen base? Else the whole model learns."""
    return args.init_from != "scratch" and args.lora_r > 0


def differences(args: Namespace) -> str:
    """The settings of the paper (Sec. 3.1, 4.1 and 5.1) that differ here, with the paper's in brackets: seq_len 32
    (2048), batch_size 64 (8)"""
    paper = tomllib.loads((Path(__file__).parent / "configs" / "llada.toml").read_text())
    values = vars(args)
    here = ("init_from", "out_dir")
    found = [f"{k} {values.get(k)} ({v})" for k, v in paper.items() if k not in here and values.get(k) != v]
    if not saves_adapter(args):
        found.append("all weights learn (LoRA on a frozen model)")
    return ", ".join(found) or "nothing but the model and the rows"
