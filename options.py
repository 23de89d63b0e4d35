"""What train.py can be told: its flags, what they default to, the refusals, and the data and model that they mean.

    python train.py --help        # this file, as a manual

It refuses settings that cannot be meant, a folder that already holds a run, and a resumed run with other settings.
"""

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch

import toy
from checkpoint import DTYPES, load_model, read_config
from data import Filter, Parser, bpe_tokenizer, byte_tokenizer, fail, generator, load_sequences, read_json
from model import PRESETS, Model, MoE, new_model

# What a run takes when a flag is not given: by what the model reads ("bpe" is the paper's), and by where it starts.
# From scratch there is no draft worth learning from yet; blocks of 8 bytes hold about as much text as 2 BPE tokens.
READS = {
    "bytes": dict(preset="text", seq_len=256, batch_size=8, max_iters=1300, out_dir="out/stdlib"),
    "toy": dict(preset="tiny", batch_size=128, max_iters=1000, out_dir="out/toy"),
    "bpe": dict(seq_len=2048, batch_size=8, max_iters=12500, out_dir="out/cocommit"),
}
STARTS = {
    "scratch": dict(learning_rate=3e-3, corruption="random"),
    "adapter": dict(learning_rate=1e-5, corruption="draft"),
}
FREE_ON_RESUME = {"init_from", "out_dir", "device", "stop_at", "log_interval", "eval_interval", "save_interval"}
FREE_ON_RESUME |= {"micro_batch", "checkpointing", "compile"}  # what an out-of-memory error wants changed


# fmt: off
def build_parser(doc: str) -> Parser:
    p = Parser(doc)
    g = p.add_argument_group("data")
    g.add_argument("--data", nargs="+", default=["stdlib"],
                   help=f"stdlib, a toy ({', '.join(toy.TASKS)}), or .txt / folder / .jsonl[.gz] / .parquet")
    g.add_argument("--seq_len", type=int, help="tokens in a row; one document a row (256 bytes; 2048 for a BPE model)")
    g.add_argument("--min_score", type=int, default=3, help="records below this int_score are left out (paper: 3)")
    g.add_argument("--min_tokens", type=int, default=256, help="... and records shorter than this (paper: 256)")
    g.add_argument("--max_tokens", type=int, default=1800, help="... or longer than this (paper: 1800)")
    g.add_argument("--max_docs", type=int, default=0,
                   help="stop reading after so many documents (paper: 50000; 0: all)")
    toy.add_flags(p.add_argument_group("toy (only with --data TOY; default: the toy's own)"))
    g = p.add_argument_group("model")
    g.add_argument("--init_from", default="scratch",
                   help="scratch, resume, or a checkpoint folder (LoRA + markers train)")
    g.add_argument("--preset", choices=PRESETS, help="geometry from scratch (text for text, tiny for toys)")
    g.add_argument("--n_last", type=int,
                   help="n, the layers that Stage B runs again (paper: 3 of 20; default 3, or half)")
    g.add_argument("--n_rounds", type=int, default=1, help="K, rounds of Stage B, one marker each (paper: 1)")
    g.add_argument("--block_length", type=int,
                   help="tokens decoded together (8 bytes; a checkpoint's own; toys: the answer)")
    g.add_argument("--lora_r", type=int, default=16, help="rank of the adapters (paper: 16)")
    g.add_argument("--lora_alpha", type=float, default=32.0, help="scale is alpha / r (paper: 32)")
    g.add_argument("--lora_scope", choices=["all", "marked"], default="all",
                   help="adapters in every layer and pass (paper), or in the marked pass of the last n layers alone: "
                        "Stage A stays the base bit for bit, and training needs no gradient in the prefix")
    g.add_argument("--target", choices=["clean", "chain"], default="clean",
                   help="what branch 2 fills the bundle with: the clean tokens (paper), or what the unmarked model "
                        "itself would write one token at a time (beyond the paper)")
    g.add_argument("--chain_beam", type=int, default=1,
                   help="hypotheses of the chain (1: greedy; 8: near the joint mode)")
    g.add_argument("--chain_noise", action="store_true",
                   help="targets are draws of the chain, and the marker carries the numbers they were drawn with: "
                        "Stage B learns to sample the bundle jointly (beyond the paper)")
    g.add_argument("--sample_rounds", action="store_true",
                   help="draw K of each step from 1..n_rounds, so that decoding may stop at any of them")
    g.add_argument("--mark_visible", action="store_true",
                   help="draw D from visible positions too: Stage B learns to rewrite marked text as if it were "
                        "masked, jointly (beyond the paper; sample.py --mark_visible uses it)")
    g.add_argument("--factorised", action="store_true", help="train branch 1 alone: a base model to adapt later")
    g = p.add_argument_group("corruption and bundle")
    g.add_argument("--corruption", choices=["mask", "random", "draft"],
                   help="how visible tokens go wrong: not at all, random ones (default from scratch, as base "
                        "LLaDA2.1), or the model's own drafts (default from a checkpoint, the paper)")
    g.add_argument("--random_rate", type=float, default=0.1, help="share of visible tokens replaced (unpublished)")
    g.add_argument("--draft_rate", type=float, default=0.3, help="share of masks that the draft fills (unpublished)")
    g.add_argument("--context", choices=["corrupted", "clean"], default="corrupted",
                   help="what earlier blocks look like: corrupted too (paper), or clean as in decoding ([noisy ; "
                        "clean])")
    g.add_argument("--bundle_scope", choices=["block", "sequence"], default="block",
                   help="draw D per block (a decoded bundle lies in one block) or once per row (the paper leaves it "
                        "open)")
    g.add_argument("--s_min", type=int, default=1, help="smallest bundle (paper: 1)")
    g.add_argument("--s_max", type=int, default=16, help="largest bundle (paper: 16)")
    g.add_argument("--confident_share", type=float, default=0.0,
                   help="share of the blocks whose D is their most confident positions, as in decoding, and not random "
                        "ones (paper: 0)")
    g = p.add_argument_group("optimisation")
    g.add_argument("--max_iters", type=int, help="optimizer steps; the cosine ends here (paper: 12500)")
    g.add_argument("--batch_size", type=int, help="rows in one optimizer step (paper: 8)")
    g.add_argument("--micro_batch", type=int, default=0,
                   help="rows in one forward (of each process); gradients accumulate (0: all rows)")
    g.add_argument("--learning_rate", type=float, help="peak; default 3e-3 from scratch, 1e-5 for adapters (paper)")
    g.add_argument("--warmup", type=float, default=0.01, help="share of the steps that warm up linearly (paper: 0.01)")
    g.add_argument("--weight_decay", type=float, default=0.01, help="AdamW, on matrices only")
    g.add_argument("--grad_clip", type=float, default=1.0, help="largest gradient norm (0: no clipping)")
    g.add_argument("--checkpointing", action="store_true",
                   help="recompute layers in the backward: less memory, more time")
    g.add_argument("--compile", action="store_true",
                   help="torch.compile each layer (needs a C++ compiler on CPU); the losses change by rounding")
    g = p.add_argument_group("run")
    g.add_argument("--out_dir", help="where checkpoints and log.jsonl go (out/stdlib, out/toy, out/cocommit)")
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    g.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32",
                   help="activations and frozen weights; trained ones are fp32")
    g.add_argument("--log_interval", type=int, default=1, help="print every so many steps (log.jsonl has them all)")
    g.add_argument("--eval_interval", type=int, default=250, help="validate every so many steps, and at the end")
    g.add_argument("--eval_rows", type=int, default=64, help="validation rows, the same ones each time")
    g.add_argument("--save_interval", type=int, default=250, help="save every so many steps, and at the end")
    g.add_argument("--stop_at", type=int, default=0,
                   help="save and stop after this step, as Ctrl-C would (0: run through)")
    return p
# fmt: on


def settle(args: Namespace, given: set[str]) -> Namespace:
    """Fill in what was not given, from the saved run when resuming, else from READS and STARTS; then check it all."""
    if args.init_from == "resume":
        args = settle_resume(args, given)
        check(args)
        return args
    args.resume, scratch = False, args.init_from == "scratch"
    reads = "toy" if is_toy(args) else "bytes"
    if not scratch:
        checkpoint_reads = read_config(Path(args.init_from)).tokenizer
        if (checkpoint_reads == "toy") != is_toy(args):
            fail(f"--init_from {args.init_from} reads other tokens than --data {' '.join(args.data)} has")
        reads = checkpoint_reads
    if is_toy(args) and not scratch:  # the checkpoint's own size, unless another one is asked for
        saved = read_json(Path(args.init_from) / "toy.json", "toy settings of the checkpoint")
        for name in toy.FLAGS:
            if getattr(args, name) is None and args.data == [saved.get("name")]:
                setattr(args, name, saved.get(name))
    if args.preset and not scratch:
        fail("--preset is a geometry from scratch; a checkpoint has its own: leave it out")
    if is_toy(args) and (args.block_length is not None or args.seq_len is not None):
        fail("a toy's block is its answer: leave --block_length and --seq_len out, size it with --m")
    for name, value in (READS[reads] | STARTS["scratch" if scratch else "adapter"]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check(args)
    if (Path(args.out_dir) / "train.json").exists():
        fail(f"{args.out_dir} already holds a run: add --init_from resume to go on, or choose another --out_dir")
    if (Path(args.out_dir) / "config.json").exists():
        fail(f"{args.out_dir} already holds a checkpoint: choose another --out_dir")
    return args


def settle_resume(args: Namespace, given: set[str]) -> Namespace:
    """The saved run's settings, with what may change from the command line."""
    folder = Path(args.out_dir or READS["bytes"]["out_dir"])
    saved = read_json(folder / "train.json", "training run to resume (--out_dir of an earlier train.py)")
    if lacking := [k for k in vars(args) if k not in saved]:
        fail(f"{folder / 'train.json'} lacks {lacking[0]}: it is not a whole run's settings; start in a new --out_dir")
    for name in given - FREE_ON_RESUME:
        if getattr(args, name) != saved[name]:
            fail(f"--{name} {getattr(args, name)} differs from the run's {saved[name]}: a resumed run keeps its "
                 "settings; leave the flag out, or start a new --out_dir")  # fmt: skip
    free = {k: getattr(args, k) for k in FREE_ON_RESUME & given | {"stop_at"}}
    return Namespace(**saved | free | {"init_from": saved["init_from"], "resume": True, "out_dir": str(folder)})


def is_toy(args: Namespace) -> bool:
    return len(args.data) == 1 and args.data[0] in toy.TASKS


def check(args: Namespace) -> None:
    at_least_1 = (
        "batch_size max_iters s_min n_rounds eval_rows eval_interval save_interval lora_r log_interval chain_beam"
    )
    for name in [*at_least_1.split(), "seq_len", "n_last", "block_length"]:
        value = getattr(args, name)
        if value is not None and value < 1:
            fail(f"--{name} must be at least 1, not {value}")
    for name in ("micro_batch", "stop_at", "grad_clip", "weight_decay", "max_docs"):
        if not 0 <= getattr(args, name) < math.inf:
            fail(f"--{name} must be 0 or more, and finite, not {getattr(args, name)}")
    for name in ("random_rate", "draft_rate", "confident_share", "warmup"):
        if not 0 <= getattr(args, name) <= 1:
            fail(f"--{name} is a share: between 0 and 1, not {getattr(args, name)}")
    if args.lora_scope == "marked" and args.init_from == "scratch":
        fail("--lora_scope marked adapts a frozen checkpoint: give it with --init_from DIR")
    if args.target == "chain" and args.bundle_scope == "sequence":
        fail("--target chain decodes a bundle inside its block: it needs --bundle_scope block")
    if args.chain_noise and (args.target != "chain" or args.chain_beam > 1):
        fail("--chain_noise draws from the chain: it needs --target chain, and --chain_beam 1")
    if args.sample_rounds and args.n_rounds < 2:
        fail("--sample_rounds draws K from 1..n_rounds: it needs --n_rounds 2 or more")
    if args.factorised and args.mark_visible:
        fail("--factorised has no branch 2 whose marks --mark_visible could put on visible positions")
    if args.factorised and (args.target == "chain" or args.init_from != "scratch"):
        fail("--factorised trains a base from scratch: it has no branch 2 for --target, and no adapters to train")
    if args.s_max < args.s_min:
        fail(f"--s_max {args.s_max} is below --s_min {args.s_min}")
    if not 0 < args.learning_rate < math.inf or not 0 < args.lora_alpha < math.inf:
        fail(f"--learning_rate {args.learning_rate} and --lora_alpha {args.lora_alpha} must be positive and finite")


# ---------------------------------------------------------------------------------------------------------------------
# data and model


class Data(dict):
    """{"train": rows, "val": rows} and n_plain, how many ordinary tokens there are."""

    n_plain: int


def load_data(args: Namespace, folder: Path | None) -> tuple[Data, toy.Toy | None]:
    """Rows to train and validate on. folder: a checkpoint whose tokenizer is used, or None for bytes."""
    data = Data()
    if is_toy(args):
        try:
            task = toy.make(args.data[0], **{k: getattr(args, k) for k in toy.FLAGS})
        except ValueError as e:
            fail(e)
        data["train"], data["val"] = toy.Rows(task, args.seed, "rows"), toy.Rows(task, args.seed, "validation rows")
        data.n_plain = task.V
        return data, task
    tokenizer = bpe_tokenizer(folder / "tokenizer.json") if folder else byte_tokenizer()
    keep = Filter(args.min_score, args.min_tokens, args.max_tokens, args.max_docs)
    data["train"], data["val"] = load_sequences(args.data, tokenizer, args.seq_len, args.seed, keep)
    data.n_plain = min(tokenizer.special.values())
    return data, None


def build_model(args: Namespace, task: toy.Toy | None, device: torch.device) -> Model:
    if args.init_from == "scratch":
        cfg = PRESETS[args.preset]
        n_last = args.n_last or max(1, cfg.n_layer // 2)
        ids = dict(eos_id=256, mask_id=257, tokenizer="bytes")
        if task is not None:
            ids = dict(eos_id=task.eos_id, mask_id=task.mask_id, vocab_size=task.vocab_size, tokenizer="toy")
        block_length = task.m if task else args.block_length or 8
        cfg = replace(
            cfg, block_length=block_length, n_last=n_last, n_rounds=args.n_rounds, noise=args.chain_noise, **ids
        )
        model = new_model(cfg, generator(args.seed, "init"), device)
        model.compute_dtype = DTYPES[args.dtype]
    else:
        given = dict(n_last=args.n_last, n_rounds=args.n_rounds, block_length=args.block_length)
        given["noise"] = args.chain_noise or None  # None: as the checkpoint
        model = load_model(args.init_from, device, DTYPES[args.dtype], **given)
        if task is not None and (model.cfg.vocab_size, model.cfg.block_length) != (task.vocab_size, task.m):
            fail(f"--init_from {args.init_from} was trained on a toy of another size: give the same --V, --m, --n_ctx")
        model.add_lora(args.lora_r, args.lora_alpha, generator(args.seed, "lora"), args.lora_scope)
    if args.chain_beam >= model.cfg.vocab_size:
        fail(f"--chain_beam {args.chain_beam} is more than the vocabulary of {model.cfg.vocab_size} can fill")
    model.checkpointing = args.checkpointing
    if args.compile:
        # dense or routed, R or 2R rows, with and without gradient and padding
        torch._dynamo.config.recompile_limit = 64
        for layer in model.layers:  # not the routed experts: in a graph, grouped_mm takes nothing but bf16
            if isinstance(layer.mlp, MoE):
                layer.mlp.experts = torch.compiler.disable(layer.mlp.experts)
            layer.forward = torch.compile(layer.forward, dynamic=False)
    return model
