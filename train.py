"""Split-forward training: Stage A and Stage B of every row after one shared prefix, one backward
(paper, Sec. 4.1).

`cocommit_step` is the method, `loop` what goes around it. From a checkpoint the backbone is frozen, LoRA and
markers train: the paper's setting. From `scratch` everything trains. Every random number is a function of
(seed, row): a resumed run continues bit for bit, and other micro-batches draw the same.

    python train.py --n_last 3                                   # the paper's training on assets/names, two minutes
    python train.py --n_last 3 --alpha 0.5                       # on top of it, Stage B by the alpha loss
    python train.py --data modes --out_dir out/modes             # a toy with known total correlation, a minute
    python train.py --init_from resume --out_dir out/names       # go on after Ctrl-C, kill or power cut
    python train.py --init_from scratch --stage_a_only --out_dir out/base     # assets/names, an hour on one thread
    python train.py --data FOLDER --stage_a_only --out_dir out/text           # text of your own: first a base,
    python train.py --data FOLDER --init_from out/text --out_dir out/cocommit # then the adapters

To change   what Stage B is asked to write   call   loop with partial(cocommit_step, target=f)
            how the bundle is drawn                 partial(cocommit_step, bundle=f)
            the loss                         edit   three_term_loss in corrupt.py
            a default                               RUNS, below
"""

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import checkpoint
import toy
from checkpoint import DTYPES, PRESETS
from corrupt import CORRUPTIONS, Corruption, M, corrupt, draw_bundle, three_term_loss
from lib import data
from lib.data import (
    Batch,
    Corpus,
    Together,
    check_finite,
    cosine,
    draw_curve,
    fast_kernels,
    get_batch,
    interruptible,
    means,
    report,
    resume_flags,
    resumed,
    rewind_log,
)
from lib.util import (
    Parser,
    bounded,
    command,
    entry,
    fail,
    generator,
    pick_device,
    read_json,
    settings_line,
    uniform,
    write_json,
)
from model import Config, Context, Model

# R rows, T positions, C channels, B block_length

# --- settings: what is not given by a flag is what the run of this kind has. PAPER is the paper's training, but for
# bf16, checkpointing and 50,000 documents, which are flags
PAPER = dict(
    data=["names"], toy=[], seq_len=2048, max_docs=0, preset=None,
    init_from=None, n_last=None, n_rounds=None, block_length=None, lora_r=16, lora_in="both", stage_a_only=False,
    corruption="draft", mask_power=1.0, replace_rate=0.2, one_by_one=0.0, context="corrupted", bundle="drawn",
    s_max=None, alpha=0.0,
    max_iters=12500, batch_size=8, micro_batch=0, optimizer="adamw", learning_rate=1e-5, weight_decay=0.01,
    grad_clip=1.0, checkpointing=False,
    out_dir="out/cocommit", seed=0, device="auto", dtype="fp32", eval_interval=250,
)  # fmt: skip
ADAPT_NAMES = dict(
    init_from="assets/names", seq_len=32, batch_size=64, max_iters=300, learning_rate=3e-4, context="clean",
    mask_power=0.5, out_dir="out/names",
)  # fmt: skip
ALPHA = dict(corruption="mask", bundle="whole", lora_in="stage_b")
RUNS = {
    # what it reads, where it starts
    "bpe": PAPER,
    "names": PAPER | ADAPT_NAMES,
    "names by alpha": PAPER | ADAPT_NAMES | ALPHA | dict(
        init_from="assets/names/paper", max_iters=1500, learning_rate=8e-3, out_dir="out/alpha",
    ),
    "names from scratch": PAPER | dict(
        preset="names", n_last=3, block_length=8, seq_len=32, batch_size=256, max_iters=3000,
        corruption="random", context="clean", mask_power=0.5, one_by_one=0.33, optimizer="muon", learning_rate=0.01,
        dtype="bf16", out_dir="out/base",
    ),
    "toy": PAPER | dict(batch_size=128, max_iters=1000, out_dir="out/toy"),
    "toy by alpha": PAPER | ALPHA | dict(batch_size=128, max_iters=1500, learning_rate=1e-3, out_dir="out/toy-alpha"),
    "toy from scratch": PAPER | dict(
        preset="tiny", n_last=2, batch_size=128, max_iters=1000, learning_rate=3e-3, corruption="random",
        out_dir="out/toy",
    ),
    "bpe by alpha": PAPER | ALPHA,
    "bytes": PAPER | dict(seq_len=256, max_iters=1300, learning_rate=1e-3, out_dir="out/text"),
    "bytes by alpha": PAPER | ALPHA | dict(seq_len=256, max_iters=1300, learning_rate=1e-3, out_dir="out/alpha"),
    "bytes from scratch": PAPER | dict(
        preset="text", n_last=3, block_length=8, seq_len=256, max_iters=1300, learning_rate=3e-3, corruption="random",
        out_dir="out/text",
    ),
}  # fmt: skip
FREE_ON_RESUME = {"out_dir", "device", "micro_batch", "checkpointing"}

# neither is worth a flag
LOG_INTERVAL = 50
EVAL_ROWS = 64
BALANCE = 0.001  # how far a step moves an expert's bias where the routers learn
ADAM = 0.4  # Muon's run: the peak of Adam's rate, of embeddings, output layer, experts and norms, beside the matrices'


# the weighted sum of Eq. 1 in nats, to be divided by the number of real tokens; and for the log, by
# name, (2,) float32: a cross-entropy summed, positions counted
Losses = tuple[Tensor, dict[str, Tensor]]


# --- the training step
def clean_tokens(model: Model, batch: Batch, z: Tensor, bundle: Tensor) -> Tensor:
    """The paper's target for Stage B, the clean tokens: (R, T) int64."""
    return batch.clean


def bundle_of(model: Model, batch: Batch, masked: Tensor, args: Namespace) -> Tensor:
    """The paper's bundle: some masks of each block, chosen without a look at the text; or all of them. (R, T) bool."""
    if args.bundle == "whole":
        return masked
    return draw_bundle(masked, model.cfg.block_length, 1, args.s_max, batch.draws)


def cocommit_step(
    model: Model, batch: Batch, args: Namespace, bundle: Callable = bundle_of, target: Callable = clean_tokens
) -> Losses:
    """One step of the paper: both stages of these rows, Eq. 1 in each."""
    # what the model is shown: masked, wrong and right positions
    z, kind = corrupt_batch(model, batch, args)
    masked = kind == M

    # the bundle, and what Stage B is asked to write there
    marked = bundle(model, batch, masked, args)
    wanted = target(model, batch, z, marked)

    # the split: one prefix, then the last n layers unmarked and marked
    ctx = batch_context(model, batch, args)
    h = model.prefix(z, ctx)
    stage_a = model.last_n(h, ctx)
    stage_b = model.coordinate(h, marked, ctx, model.cfg.n_rounds)

    # Eq. 1 in both stages: Stage A fills every mask, Stage B its bundle, by alpha as a whole
    loss_a, terms_a = three_term_loss(model, stage_a, batch.clean, kind, fill=masked)
    loss_b, terms_b = three_term_loss(model, stage_b, wanted, kind, fill=marked, alpha=args.alpha)
    return loss_a + loss_b, of_stage("A", terms_a) | of_stage("B", terms_b)


def base_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """Without Stage B (--stage_a_only): the model that Stage B is added to, as LLaDA2.1 is trained."""
    z, kind = corrupt_batch(model, batch, args)

    # some rows are read from left to right, in blocks of one, and every token of theirs is asked for
    one_by_one = None
    if args.one_by_one > 0:
        one_by_one = (uniform(batch.draws, 1)[:, 0] < args.one_by_one).to(z.device)
        asked = one_by_one[:, None] & batch.real
        z = z.masked_fill(asked, model.cfg.mask_id)
        kind = kind.masked_fill(asked, M)

    ctx = batch_context(model, batch, args, one_by_one)
    stage_a = model.last_n(model.prefix(z, ctx), ctx)
    loss, terms = three_term_loss(model, stage_a, batch.clean, kind, fill=kind == M)
    return loss, of_stage("A", terms)


# --- what a step is made of
def corrupt_batch(model: Model, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor]:
    """What the model is shown: z (R, T) int64 and kind (R, T) uint8, see corrupt.py."""
    cfg = model.cfg
    how = Corruption(
        args.corruption, cfg.block_length, cfg.mask_id, batch.n_plain, args.mask_power, args.replace_rate
    )  # fmt: skip
    draft = partial(stage_a_draft, model, batch, args)
    return corrupt(batch.clean, batch.free, how, batch.draws, draft)


@torch.no_grad()
def stage_a_draft(model: Model, batch: Batch, args: Namespace, z: Tensor, where: Tensor) -> Tensor:
    """Stage A's argmax at the True positions of where (R, T), in their order: (P,) int64."""
    ctx = batch_context(model, batch, args)
    h = model.last_n(model.prefix(z, ctx), ctx)[:, : z.shape[1]][where]

    # the logits of 1,024 positions at a time
    tokens = []
    for part in h.split(1024):
        logits = model.logits(part)
        logits[:, model.cfg.mask_id] = float("-inf")  # a draft that stays masked is none
        tokens.append(logits.argmax(-1))
    return torch.cat(tokens)


def batch_context(model: Model, batch: Batch, args: Namespace, one_by_one: Tensor | None = None) -> Context:
    """Earlier blocks corrupted, too (paper), or clean: rows beside their clean copy."""
    clean = batch.clean if args.context == "clean" else None
    return model.context(batch.real, clean, one_by_one)


def of_stage(stage: str, terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """Eq. 1's terms under the names that the log has for them: m2t_A, edit_A, clean_A, ..."""
    return {f"{name}_{stage}": term for name, term in terms.items()}


# --- the loop
def loop(model: Model, corpus: Corpus, step: Callable[..., Losses], optimizer: torch.optim.Optimizer,
         args: Namespace) -> None:  # fmt: skip
    """Train, validate, save. `step` is cocommit_step, or one of your own."""
    folder = Path(args.out_dir)
    done = 0
    if args.resume and (folder / "state.safetensors").exists():
        done = checkpoint.restore_state(model, optimizer, folder)
    write_settings(args)
    rewind_log(folder / "log.jsonl", done)
    describe(args, corpus, model, done)

    saved = done
    with interruptible() as caught, open(folder / "log.jsonl", "a", buffering=1) as log:
        for it in tqdm(range(done, args.max_iters), initial=done, total=args.max_iters, desc="train", disable=None):
            # forward, backward, update
            record = update(model, corpus, step, optimizer, it, args)
            check_finite(record, "loss", it, saved, args)
            report(record, f"step {it + 1}/{args.max_iters}", log, (it + 1) % LOG_INTERVAL == 0)

            # validate, and save what has been validated; a run that is stopped here logs no more than otherwise
            stop = bool(caught)
            due = (it + 1) % args.eval_interval == 0 or it + 1 == args.max_iters
            if due or stop:
                validation = validate(model, corpus, step, it + 1, args)
                check_finite(validation, "validation", it, saved, args)
                if due:
                    report(validation, f"validation after step {it + 1}", log, shown=True)
                state = checkpoint.training_state(model, optimizer)
                checkpoint.save_tensors(folder / "state.safetensors", state, {"step": str(it + 1)})
                checkpoint.save(model, folder, Path(args.init_from))
                saved = it + 1
            if stop:
                break
    draw_curve(folder)
    tell_what_is_next(saved, bool(caught), args)


def write_settings(args: Namespace) -> None:
    """What a resumed run and evaluate.py read."""
    folder = Path(args.out_dir)
    write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k != "resume"})
    if is_toy(args):
        write_json(folder / "toy.json", {"name": args.data[0]} | toy.sizes(args.toy))


def update(model: Model, corpus: Corpus, step: Callable[..., Losses], optimizer: torch.optim.Optimizer, it: int,
           args: Namespace) -> dict[str, float]:  # fmt: skip
    """One update, if loss and gradient are finite -> what the log says of it."""
    began = time.perf_counter()
    first = it * args.batch_size

    # gradients of all micro-batches, with one denominator
    n_real = corpus.rows["train"].count_real(first, args.batch_size)
    loss = 0.0
    terms = []
    for batch in micro_batches(corpus, "train", first, args.batch_size, model, args):
        with fast_kernels(model.wte.weight.device, model.compute_dtype):
            part, part_terms = step(model, batch, args)
            (part / n_real).backward()
        loss += float(part.detach()) / n_real
        terms.append(part_terms)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf))

    # the update, along the schedule
    share = cosine(it, args.max_iters)
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    if math.isfinite(loss + norm):
        optimizer.step()
        balance_experts(model)
    optimizer.zero_grad(set_to_none=True)

    record = dict(step=it, loss=loss, grad_norm=norm, lr=share * args.learning_rate, tokens=n_real)
    return record | means(terms) | dict(ms=1e3 * (time.perf_counter() - began))


@torch.no_grad()
def validate(model: Model, corpus: Corpus, step: Callable[..., Losses], it: int, args: Namespace) -> dict[str, float]:
    """The step's terms on held-out rows, the same ones in every run."""
    rows = min(EVAL_ROWS, 8 * args.batch_size)  # at full size a row takes minutes
    with fast_kernels(model.wte.weight.device, model.compute_dtype):
        terms = [step(model, batch, args)[1] for batch in micro_batches(corpus, "val", 0, rows, model, args)]
    return {"step": it, "val": True} | means(terms)


def micro_batches(corpus: Corpus, split: str, first: int, n: int, model: Model, args: Namespace) -> Iterator[Batch]:
    """Rows first .. first+n of "train" or "val", a micro-batch at a time."""
    size = args.micro_batch or args.batch_size
    device = model.wte.weight.device
    for at in range(first, first + n, size):
        yield get_batch(corpus, split, at, min(size, first + n - at), args.seed, device)


def balance_experts(model: Model) -> None:
    """Where the routers learn, each expert's bias follows how often it is chosen."""
    for layer in model.layers[model.cfg.n_dense :]:
        if layer.mlp.router.requires_grad:
            layer.mlp.balance(BALANCE)


# --- the optimizer
def make_optimizer(model: Model, args: Namespace) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone: norms and markers are not pulled to zero.

    With --optimizer muon the layers' matrices, which map states to states, are Muon's, all the rest Adam's.
    """
    peak = args.learning_rate
    adam = partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if args.optimizer == "muon":
        matrices = [p for name, p in learned.items() if name.startswith("layers.") and p.dim() == 2]
        others = [p for name, p in learned.items() if not (name.startswith("layers.") and p.dim() == 2)]
        muon = dict(params=matrices, peak=peak, momentum=0.95, weight_decay=args.weight_decay)
        rest = dict(params=others, peak=ADAM * peak, weight_decay=0.0)
        return Together(torch.optim.Muon([muon], adjust_lr_fn="match_rms_adamw"), adam([rest]))

    matrices = [p for name, p in learned.items() if p.dim() >= 2 and name != "markers"]
    others = [p for name, p in learned.items() if p.dim() < 2 or name == "markers"]
    decayed = dict(params=matrices, peak=peak, weight_decay=args.weight_decay)
    return adam([decayed, dict(params=others, peak=peak, weight_decay=0.0)])


# --- what is learned from, and what learns
def load_corpus(args: Namespace) -> Corpus:
    """What the settings say to read; text by the tokens of the checkpoint that it starts from."""
    if is_toy(args):
        task = toy.make(args.data[0], **toy.sizes(args.toy))
        rows = {"train": toy.Rows(task, args.seed, "rows"), "val": toy.Rows(task, "validation rows")}
        geometry = dict(
            tokenizer="toy", eos_id=task.eos_id, mask_id=task.mask_id, vocab_size=task.vocab_size, block_length=task.m
        )
        return Corpus(rows, task.V, geometry)

    # a tokenizer: a checkpoint's own; of a new model bytes, or of names a BPE, learned once
    folder = Path(args.out_dir if args.init_from == "scratch" else args.init_from)
    kind = "bytes"
    if args.init_from != "scratch":
        kind = checkpoint.read_config(folder).tokenizer
    elif args.data == ["names"]:
        kind = "bpe"
        data.learn_names(folder)
    tokenizer = checkpoint.load_tokenizer(folder, kind)
    if tokenizer is None:
        fail(f"{folder} has no tokenizer.json to read text with")
    return data.text_corpus(
        args.data, tokenizer, kind, args.seq_len, args.seed, args.max_docs, args.block_length, args.batch_size
    )  # fmt: skip


def start(args: Namespace, corpus: Corpus) -> Model:
    """A fresh model for these tokens; or a folder's, with LoRA and markers to train."""
    if args.init_from == "scratch":
        cfg = replace(PRESETS[args.preset], n_last=args.n_last, n_rounds=args.n_rounds, **corpus.geometry)
        model = checkpoint.new_model(cfg, generator(args.seed, "init"), pick_device(args.device))
        model.compute_dtype = DTYPES[args.dtype]
    else:
        model = load_base(args, corpus)
        model.add_lora(args.lora_r, generator(args.seed, "lora"), args.lora_in)
        model.adapter["alpha"] = args.alpha
    model.checkpointing = args.checkpointing
    return model


def load_base(args: Namespace, corpus: Corpus) -> Model:
    """What --init_from names, without adapters."""
    sizes = dict(n_last=args.n_last, n_rounds=args.n_rounds, block_length=args.block_length)
    model = checkpoint.load_model(args.init_from, pick_device(args.device), DTYPES[args.dtype], **sizes)
    if is_toy(args) and any(getattr(model.cfg, name) != value for name, value in corpus.geometry.items()):
        fail(f"--init_from {args.init_from} was trained on a toy of another size: give the same --toy")
    checkpoint.merge(model, Path(args.init_from))
    return model


# --- flags
def build_parser(doc: str = __doc__) -> Parser:
    parser = Parser(doc, RUNS)
    count = bounded(int, 1, 10**9)
    some = bounded(int, 0, 10**9)
    share = bounded(float, 0, 1)

    # fmt: off
    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+",
        help=f"names, stdlib, a toy ({', '.join(toy.TASKS)}), or .txt / folder / .jsonl[.gz] / .parquet")
    add("--toy", nargs="+", metavar="KEY=VALUE", help="sizes of a toy, see toy.py")
    add("--seq_len", type=count, help="tokens in a row, one document a row")
    add("--max_docs", type=some, help="stop reading after so many documents (paper 50000; 0: read all)")

    add = parser.add_argument_group("model").add_argument
    add("--init_from", help="scratch, resume, or a checkpoint's folder, as in the paper: LoRA and markers train (names "
        "start from assets/names, by alpha from assets/names/paper; everything else from scratch)")
    add("--preset", choices=PRESETS, help="from scratch: the geometry")
    add("--n_last", type=count, help="n, the layers of Stage B (paper 3; a checkpoint's own)")
    add("--n_rounds", type=count, help="K, rounds of Stage B, one marker each (paper 1; a checkpoint's own)")
    add("--block_length", type=count, help="tokens decoded together (paper 32; a checkpoint's own)")
    add("--lora_r", type=count, help="rank of the adapters, LoRA's own alpha is 2 r")
    add("--lora_in", choices=["both", "stage_b"], help="the stages in which LoRA acts; stage_b: of the last n layers")
    add("--stage_a_only", action="store_true", help="from scratch without Stage B: a base to adapt later")

    add = parser.add_argument_group("corruption, bundle and loss").add_argument
    add("--corruption", choices=CORRUPTIONS, help="see corrupt.py")
    add("--mask_power", type=bounded(float, 0.01),
        help="a block's mask ratio is U(0, 1) to this power: below 1 many masks, as decoding begins")
    add("--replace_rate", type=share, help="random: a block replaces U(0, 1) times this share of its visible tokens")
    add("--one_by_one", type=share,
        help="with --stage_a_only: the share of rows that are read from left to right, in blocks of one")
    add("--context", choices=["corrupted", "clean"],
        help="earlier blocks: corrupted, too, or clean as in decoding, rows [noisy ; clean]")
    add("--bundle", choices=["drawn", "whole"], help="of each block 1 to s_max masks, or all of them")
    add("--s_max", type=count, help="largest bundle (paper 16; half a block, a toy's whole answer)")
    add("--alpha", type=bounded(float, 0), help="of Stage B's fill loss; 0: the paper's sum of cross-entropies")

    add = parser.add_argument_group("optimisation").add_argument
    add("--max_iters", type=count, help="optimizer steps; the cosine ends here")
    add("--batch_size", type=count, help="rows in one optimizer step")
    add("--micro_batch", type=some, help="rows in one forward; gradients accumulate (0: all)")
    add("--optimizer", choices=["adamw", "muon"], help="muon: for the layers' matrices, from scratch")
    add("--learning_rate", type=bounded(float, 1e-12), help="peak")
    add("--weight_decay", type=share, help="on matrices; not on norms and markers")
    add("--grad_clip", type=bounded(float, 0), help="largest gradient norm (0: no clipping)")
    add("--checkpointing", action="store_true", help="recompute layers in the backward (paper): less memory, slower")

    add = parser.add_argument_group("run").add_argument
    add("--out_dir", help="where checkpoints and log.jsonl go")
    add("--seed", type=int, help="any whole number, of any size: it is hashed")
    add("--device", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, help="activations; frozen weights too (paper bf16)")
    add("--eval_interval", type=count, help="validate and save every so many steps")
    # fmt: on
    return parser


def read_arguments(parser: Parser | None = None, script: str = "train.py", **own: Any) -> Namespace:
    """The command line with every default filled in: a new run's, or those of the run that is resumed.

    parser, own: another script's, its flags beside those here, and their defaults.
    """
    parser = parser or build_parser()
    given = vars(parser.parse_args())
    if given.get("init_from") == "resume":
        folder = Path(given.get("out_dir", (RUNS["names"] | own)["out_dir"]))
        runs = {kind: defaults | own for kind, defaults in RUNS.items()}
        args = Namespace(**resumed(given, folder, parser, runs, FREE_ON_RESUME), resume=True)
        sizes = (args.init_from, args.n_last, args.n_rounds, args.block_length, args.s_max)
        if None in sizes or (args.init_from == "scratch" and args.preset is None):
            fail(f"{folder}/train.json is damaged, or another script's: it lacks a size")
        of = entry(vars(args), "script", str, folder / "train.json")
        if of != script:
            fail(f"{folder} is a run of another script: python {of} {resume_flags(folder)}")
        return args

    # what it reads, and where it starts, say which run this is
    args = Namespace(**PAPER | given)
    if args.init_from is None:
        args.init_from = "scratch"
        if args.data == ["names"] and not args.stage_a_only:
            args.init_from = RUNS["names by alpha" if args.alpha > 0 else "names"]["init_from"]
    cfg = None if args.init_from == "scratch" else checkpoint.read_config(Path(args.init_from))
    kind = what_it_reads(args, cfg)
    if cfg is None:
        kind += " from scratch"
    elif args.alpha > 0:
        kind += " by alpha"
    settled = dict(init_from=args.init_from, run=kind, script=script, resume=False)
    args = Namespace(**RUNS[kind] | own | given | settled)
    refuse(args, cfg, given)

    # sizes are the checkpoint's, or those of the toy
    if is_toy(args):
        args.toy = args.toy or toy_of_the_checkpoint(args)
        args.block_length = toy.make(args.data[0], **toy.sizes(args.toy)).m
    for name in ("n_last", "n_rounds", "block_length"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(cfg or PRESETS[args.preset], name))
    if args.s_max is None:
        args.s_max = args.block_length if is_toy(args) else max(1, args.block_length // 2)
    longest = (cfg or PRESETS[args.preset]).max_len
    if not is_toy(args) and (args.seq_len % args.block_length or args.seq_len > longest):
        fail(f"--seq_len {args.seq_len} must be a multiple of --block_length {args.block_length}, at most {longest}")
    return args


def refuse(args: Namespace, cfg: Config | None, given: dict) -> None:
    """What cannot be meant."""
    if args.toy and not is_toy(args):
        fail("--toy gives a toy its size; name the toy by --data")
    if is_toy(args) and ("block_length" in given or "seq_len" in given):
        fail("--block_length and --seq_len are for text, a toy has its size from --toy m=4")
    if args.stage_a_only and (cfg or args.alpha > 0):
        fail("--stage_a_only trains a base from scratch, without Stage B: leave out --init_from and --alpha")
    if args.one_by_one > 0 and not args.stage_a_only and "one_by_one" in given:
        fail("--one_by_one is of a base: add --stage_a_only")
    if cfg and args.optimizer == "muon":
        fail("--optimizer muon is for training from scratch: LoRA has no square matrices")
    for name in ("train.json", "config.json", "adapter.json"):
        if (Path(args.out_dir) / name).exists():
            fail(f"{args.out_dir} already holds a run or a checkpoint: choose another --out_dir, or --init_from resume")


def is_toy(args: Namespace) -> bool:
    return len(args.data) == 1 and args.data[0] in toy.TASKS


def what_it_reads(args: Namespace, cfg: Config | None) -> str:
    """toy, names, bytes or bpe; cfg is that of the checkpoint that it starts from, if it does."""
    if cfg and (cfg.tokenizer == "toy") != is_toy(args):
        fail(f"--init_from {args.init_from} reads other tokens than --data {' '.join(args.data)} has")
    if is_toy(args):
        return "toy"
    if args.data == ["names"]:
        return "names"
    return cfg.tokenizer if cfg else "bytes"


def toy_of_the_checkpoint(args: Namespace) -> list[str]:
    """The sizes of the toy that a checkpoint was trained on, where it is the toy of this run."""
    path = Path(args.init_from) / "toy.json"
    saved = read_json(path, "toy settings of the checkpoint") if args.init_from != "scratch" else {}
    same = saved.pop("name", None) == args.data[0]
    return [f"{k}={v}" for k, v in saved.items()] if same else []


# --- what is printed
def describe(args: Namespace, corpus: Corpus, model: Model, done: int) -> None:
    cfg = model.cfg
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    about = {split: rows.describe() for split, rows in corpus.rows.items()}
    print(f"{' '.join(args.data)}: {about['train']} to train on, {about['val']} to validate")
    print(f"a run of the kind {args.run!r}: {settings_line(vars(args))}")
    print(
        f"training {learned:,} parameters on {model.wte.weight.device} in {args.dtype}, from {args.init_from}; n = "
        f"{cfg.n_last} of {cfg.n_layer} layers, K = {cfg.n_rounds}, blocks of {cfg.block_length}; steps "
        f"{done}..{args.max_iters} -> {args.out_dir}"
    )


def tell_what_is_next(saved: int, interrupted: bool, args: Namespace) -> None:
    if saved < args.max_iters:
        again = f"python {args.script} {resume_flags(args.out_dir)}"
        print(f"saved at step {saved} of {args.max_iters}; go on with: {again}")
        raise SystemExit(130 if interrupted else 0)  # as Ctrl-C ends other programs
    if args.script != "train.py":
        print(f"done: {args.out_dir}")
        return
    reads = "evaluate.py" if args.data == ["names"] or is_toy(args) else "sample.py --prompt TEXT"
    print(f"done; what it does now: python {reads} --ckpt {args.out_dir}")


@command
def main() -> None:
    args = read_arguments(build_parser())
    corpus = load_corpus(args)
    model = start(args, corpus)
    optimizer = make_optimizer(model, args)
    step = base_step if args.stage_a_only else cocommit_step
    loop(model, corpus, step, optimizer, args)


if __name__ == "__main__":
    main()
