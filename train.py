"""Split-forward training: Stage A and Stage B of every row after one shared prefix, one backward
(paper, Sec. 4.1).

`cocommit_step` is the method, `run` what goes around it. From a checkpoint the model is frozen, and only LoRA and
the markers learn, as in the paper. From `scratch`, or with --lora_r 0, everything learns. Every random number is a
function of (seed, row): a resumed run continues bit for bit, and the size of a micro-batch changes no draw.

    python train.py --n_last 3                                # the paper's training on assets/names, minutes
    python train.py --data data/fineweb --config configs/llada.toml               # the paper's own run, on the 16B
    python train.py --init_from resume --out_dir out/names    # go on after Ctrl-C, kill or power cut
    python train.py --init_from resume --out_dir out/names --max_iters 600        # or go on for longer

By default everything is the paper's but sizes: model, rows, block length, steps, batch and rate; and fp32 without
checkpointing, which small models do not need. A run prints what differs. The paper leaves these open, and the values
are ours:

    mask ratio                    U(0, 1) as LLaDA, but drawn for each block      corrupt.py
    share that a draft fills      0.3 of the masks, by Stage A's argmax           corrupt.py, DRAFT_RATE
    weights of the two branches   equal                                           cocommit_step
    denominator of the loss       all real (unpadded) tokens of the batch         loop
    Adam                          betas 0.9 and 0.95, decay 0.01 on matrices      adamw
    gradient clipping             at a norm of 1                                  GRAD_CLIP
    LoRA                          one A for the fused qkv, no dropout, fp32       model.py, Linear
    schedule                      linear warm-up, a cosine to 0                   lib/run.py, cosine
    validation rows               one document in twenty, by its name's hash      prepare.py
    which score, which length     int_score if there is one; the record's own     prepare.py, passes_filter

To change   how the bundle is drawn    edit   draw_bundle in corrupt.py
            the loss                          three_term_loss in corrupt.py
            what is corrupted                 CORRUPTIONS in corrupt.py
            what a step does           write  a function like cocommit_step, and call run(args, step=yours)
"""

import lib.interrupt  # noqa: F401

import argparse
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
from checkpoint import DTYPES, PRESETS, STAGE_B
from corrupt import CORRUPTIONS, Corruption, M, corrupt, draw_bundle, kinds_apart, three_term_loss
from lib.rows import Batch, Corpus, Meta, copy_tokens, get_batch, read_corpus, read_meta
from lib.run import check_finite, cosine, interruptible, means, report, rewind_log, run_settings, tell_what_is_next
from lib.util import (
    Parser,
    alone_in,
    bounded,
    command,
    fail,
    flush,
    generator,
    pick_device,
    printable,
    progress,
    quoted,
    read_bytes,
    write_json,
)
from model import Config, Context, Model

# R rows, T positions, C channels, B block_length

S_MIN = 1  # the smallest bundle (paper)
GRAD_CLIP = 1.0
WEIGHT_DECAY = 0.01
LOG_INTERVAL = 50
EVAL_ROWS = 64
BALANCE = 0.001  # how far a step moves an expert's bias where the routers learn
# with a larger max_iters the cosine goes on as one of that length; every other setting is the run's own
FREE_ON_RESUME = {"init_from", "out_dir", "device", "micro_batch", "checkpointing", "max_iters", "eval_interval"}

# what the paper states (Sec. 5.1)
PAPER = dict(
    seq_len=2048,
    n_last=3,
    n_rounds=1,
    block_length=32,
    lora_r=16,
    stage_b="paper",
    corruption="draft",
    context="corrupted",
    s_max=16,
    max_iters=12500,
    batch_size=8,
    learning_rate=1e-5,
    checkpointing=True,
    dtype="bf16",
)

# the figures of the log: of a step, and then of its validation, which are cross-entropies in nats a position
FIGURES = dict(
    loss="Eq. 1, in nats a token",
    grad_norm=f"the gradient's norm, before it is clipped at {GRAD_CLIP:g}",
    lr="the learning rate",
    tokens="real tokens in the step, which are all but padding",
    ms="the time of the step in milliseconds",
    m2t_A="Stage A's cross-entropy at masks, in nats a position, like all that follow",
    edit_A="Stage A's at wrong tokens",
    clean_A="Stage A's at right tokens",
    m2t_A_bundle="Stage A's at the masks of Stage B's bundle",
    m2t_B="Stage B's at its bundle",
    edit_B="Stage B's at wrong tokens",
    clean_B="Stage B's at right tokens",
    B_less_A="m2t_B less m2t_A_bundle: below 0 Stage B fills its bundle better than Stage A",
)

# the weighted sum of Eq. 1 in nats, to be divided by the number of real tokens; and for the log, by
# name, (2,) float32: a cross-entropy summed, positions counted
Losses = tuple[Tensor, dict[str, Tensor]]


# --- the training step
def cocommit_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """One step of the paper: both stages of these rows, Eq. 1 in each."""
    # what the model is shown: masked, wrong and right positions
    z, kind = corrupt_batch(model, batch, args)
    masked = kind == M

    # the bundle of each row, chosen without a look at the text
    bundle = draw_bundle(masked, S_MIN, args.s_max, batch.draws)

    # the split: one prefix, then the last n layers unmarked, and again marked (Eq. 4). The paper runs both as one
    # doubled batch, with the same result
    ctx = batch_context(model, batch, args)
    h = model.prefix(z, ctx)
    stage_a = model.last_n(h, ctx)
    stage_b = model.coordinate(h, bundle, ctx, model.cfg.n_rounds)

    # Eq. 1 in both stages: Stage A fills every mask, Stage B its bundle
    loss_a, ce_a = three_term_loss(model, stage_a, batch.clean, kind, fill=masked)
    loss_b, ce_b = three_term_loss(model, stage_b, batch.clean, kind, fill=bundle)
    return loss_a + loss_b, kinds_apart(ce_a, ce_b, kind, bundle)


# --- what a step is made of
def corrupt_batch(model: Model, batch: Batch, args: Namespace, mask_power: float = 1.0) -> tuple[Tensor, Tensor]:
    """What the model is shown: z (R, T) int64 and kind (R, T) uint8, see corrupt.py."""
    cfg = model.cfg
    how = Corruption(args.corruption, cfg.block_length, cfg.mask_id, batch.plain, mask_power)
    draft = partial(stage_a_draft, model, batch, args)
    return corrupt(batch.clean, batch.corruptible, how, batch.draws, draft)


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
    """Earlier blocks are corrupted, too (paper); or clean: rows beside their clean copy."""
    clean = batch.clean if args.context == "clean" else None
    return model.context(batch.real, clean, one_by_one)


# --- a run: rows, model, optimizer, then the loop
def run(args: Namespace, step: Callable[..., Losses] | None = None, make_optimizer: Callable | None = None) -> None:
    """Train, validate, save. step: one of your own; left out, the model's or the paper's."""
    with alone_in(Path(args.out_dir)):
        refuse_used(args)
        corpus = read_corpus(Path(args.data), args.seq_len, args.seed, args.block_length, args.batch_size)
        model = start(args, corpus)
        optimizer = (make_optimizer or adamw)(model, args)
        loop(model, corpus, step or model.training_step or cocommit_step, optimizer, args)


def loop(
    model: Model, corpus: Corpus, step: Callable[..., Losses], optimizer: torch.optim.Optimizer, args: Namespace,
    writes: bool = True, total: Callable[[Tensor], Tensor] = torch.clone,
) -> None:  # fmt: skip
    """The loop. Of several processes one `writes`; `total` sums a tensor over all of them."""
    folder = Path(args.out_dir)
    log = folder / "log.jsonl" if writes else None
    done = checkpoint.restore_state(model, optimizer, folder) if args.resume else 0
    if writes:
        write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k not in ("resume", "config")})
        rewind_log(folder / "log.jsonl", done)
        if not saves_adapter(args):
            copy_tokens(Path(args.data), folder)  # as the run begins, while they are there
        describe(args, corpus, model, done)

    # where it begins
    if done == 0:
        validation = validate(model, corpus, step, 0, args)
        if writes:
            explain(validation)
        report(validation, log, "validation before the first step", shown=True)

    saved = done
    steps = range(done, args.max_iters)
    if writes:
        steps = progress(steps, "train", done=done)
    with interruptible() as caught:
        for it in steps:
            # forward, backward: gradients of all micro-batches, with one denominator
            began = time.perf_counter()
            n_real = corpus.rows["train"].count_real(it * args.batch_size, args.batch_size)
            loss = 0.0
            terms = []
            for batch in micro_batches(corpus, "train", it * args.batch_size, args.batch_size, model, args):
                part, part_terms = step(model, batch, args)
                (part / n_real).backward()
                loss += float(part.detach()) / n_real
                terms.append(part_terms)
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))

            # update, along the schedule
            share = cosine(it, args.max_iters)
            for group in optimizer.param_groups:
                group["lr"] = share * group["peak"]
            record = dict(step=it, loss=loss, grad_norm=norm, lr=share * args.learning_rate, tokens=n_real)
            check_finite(record, "loss", it, saved, args)
            optimizer.step()
            balance_experts(model, total)
            optimizer.zero_grad(set_to_none=True)

            # report
            record |= means(terms) | dict(ms=1e3 * (time.perf_counter() - began))
            report(record, log, f"step {it + 1}/{args.max_iters}", shown=(it + 1) % LOG_INTERVAL == 0)

            # validate, and save what has been validated; a run that is stopped here writes the log of one that is not
            stop = bool(total(torch.tensor(len(caught))))
            due = (it + 1) % args.eval_interval == 0 or it + 1 == args.max_iters
            if due or stop:
                validation = validate(model, corpus, step, it + 1, args)
                check_finite(validation, "validation", it, saved, args)
                if due:
                    report(validation, log, f"validation after step {it + 1}", shown=True)
                if writes:
                    save(model, optimizer, it + 1, args)
                saved = it + 1
            if stop:
                break
    if writes:
        steps.close()
        # a kill after the last saved state may have left the adapter unwritten
        if saved == done:
            save(model, optimizer, done, args)
        tell_what_is_next(saved, args)
    if saved < args.max_iters:
        raise SystemExit(130)  # as Ctrl-C ends other programs


@torch.no_grad()
def validate(model: Model, corpus: Corpus, step: Callable[..., Losses], it: int, args: Namespace) -> dict[str, float]:
    """The step's terms on held-out rows, the same ones in every run; and what Stage B is worth there."""
    rows = min(EVAL_ROWS, 8 * args.batch_size)  # at full size a row takes minutes
    terms = [step(model, batch, args)[1] for batch in micro_batches(corpus, "val", 0, rows, model, args)]
    found = means(terms)
    if "m2t_B" in found:
        found["B_less_A"] = found["m2t_B"] - found["m2t_A_bundle"]
    return {"step": it, "val": True} | found


def micro_batches(corpus: Corpus, split: str, first: int, n: int, model: Model, args: Namespace) -> Iterator[Batch]:
    """Rows first .. first+n of "train" or "val", a micro-batch at a time."""
    size = args.micro_batch or args.batch_size
    for at in range(first, first + n, size):
        yield get_batch(corpus, split, at, min(size, first + n - at), args.seed, model.wte.weight.device)


def balance_experts(model: Model, total: Callable[[Tensor], Tensor]) -> None:
    """Where a router learns, the bias of each of its experts follows how often all processes have chosen it."""
    for moe in model.learning_experts().values():
        moe.times_chosen = total(torch.as_tensor(moe.times_chosen))
        moe.balance(BALANCE)


def adamw(model: Model, args: Namespace) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone: norms and markers are not pulled to zero."""
    learned = model.learned()
    matrices = [p for name, p in learned.items() if p.dim() >= 2 and name != "markers"]
    others = [p for name, p in learned.items() if p.dim() < 2 or name == "markers"]
    decayed = dict(params=matrices, peak=args.learning_rate, weight_decay=WEIGHT_DECAY)
    undecayed = dict(params=others, peak=args.learning_rate, weight_decay=0.0)
    return torch.optim.AdamW([decayed, undecayed], betas=(0.9, 0.95), fused=True)


# --- what learns
def start(args: Namespace, corpus: Corpus) -> Model:
    """A new model, or a checkpoint with an adapter, or (--lora_r 0) a checkpoint that learns whole."""
    device = pick_device(args.device)
    sizes = dict(n_last=args.n_last, n_rounds=args.n_rounds, block_length=args.block_length)
    if args.init_from == "scratch":
        meta = corpus.meta
        ids = dict(vocab_size=meta.vocab_size, eos_id=meta.eos_id, mask_id=meta.mask_id)
        cfg = replace(PRESETS[args.preset], **sizes, **ids)
        model = checkpoint.new_model(cfg, generator(args.seed, "init"), device, args.stage_b)
    else:
        # what learns is float32 in every dtype
        dtype = DTYPES[args.dtype] if saves_adapter(args) else torch.float32
        model = checkpoint.load_model(args.init_from, device, dtype, args.stage_b, **sizes)
        if checkpoint.is_int8(model) and (args.stage_b != "paper" or args.lora_r == 0):
            fail(f"{args.init_from} is int8, and cannot learn: give --stage_b paper, and a --lora_r")
        if saves_adapter(args):
            model.adapt(args.lora_r, generator(args.seed, "lora"))
    model.compute_dtype = DTYPES[args.dtype]
    model.checkpointing = args.checkpointing
    return model


def saves_adapter(args: Namespace) -> bool:
    """Does something learn beside a frozen base?"""
    return args.init_from != "scratch" and args.lora_r > 0


def save(model: Model, optimizer: torch.optim.Optimizer, steps: int, args: Namespace) -> None:
    """What the run resumes from, then what it has learned: an adapter, or a whole model."""
    folder = Path(args.out_dir)
    flush(folder / "log.jsonl")  # up to the state, which goes on behind it
    state = checkpoint.training_state(model, optimizer)
    checkpoint.save_tensors(folder / "state.safetensors", state, {"step": str(steps)})
    if saves_adapter(args):
        checkpoint.save_adapter(model, folder, Path(args.init_from), args.lora_r)
    else:
        checkpoint.save_model(model, folder)


# --- flags
def build_parser(doc: str = __doc__) -> Parser:
    parser = Parser(doc)
    count = bounded(int, 1, 10**9)
    some = bounded(int, 0, 10**9)
    flag = argparse.BooleanOptionalAction

    # fmt: off
    add = parser.add_argument_group("data").add_argument
    add("--config", metavar="TOML", help="a file of flags, as configs/ has them; those of the command line win")
    add("--data", default="data/names", help="a folder of rows, by prepare.py or toy.py")
    add("--seq_len", type=count, default=32, help="tokens in a row, of one document (paper 2048)")

    add = parser.add_argument_group("model").add_argument
    add("--init_from", default="assets/names", help="scratch, resume, or a checkpoint's folder")
    add("--preset", choices=PRESETS, default="tiny", help="from scratch: the geometry")
    add("--n_last", type=count, help="n, the layers of Stage B (paper 3; left out: the checkpoint's own)")
    add("--n_rounds", type=count, help="K, rounds of Stage B, one marker each (paper 1; the checkpoint's own)")
    add("--block_length", type=count, help="tokens decoded together (paper 32; the rows' or the checkpoint's own)")
    add("--lora_r", type=some, default=16, help="rank of LoRA (paper 16), whose scale is 2; 0: all weights learn")
    add("--stage_b", choices=STAGE_B, default="paper", help="the paper's, or one with a file of its own")

    add = parser.add_argument_group("corruption and bundle").add_argument
    add("--corruption", choices=CORRUPTIONS, default="draft", help="see corrupt.py")
    add("--context", choices=["corrupted", "clean"], default="corrupted",
        help="are earlier blocks corrupted, too (paper), or clean, as in decoding?")
    add("--s_max", type=count, default=16, help="the largest bundle; each row has one (paper 16)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--max_iters", type=count, default=300, help="optimizer steps; the cosine ends here (paper 12500)")
    add("--batch_size", type=count, default=64, help="rows in one optimizer step (paper 8)")
    add("--micro_batch", type=some, default=0, help="rows in one forward; gradients accumulate (0: all)")
    add("--learning_rate", type=bounded(float, 1e-12), default=3e-4, help="peak (paper 1e-5)")
    add("--checkpointing", action=flag, default=False,
        help="recompute layers in the backward (paper): less memory, slower")

    add = parser.add_argument_group("run").add_argument
    add("--out_dir", default="out/names", help="where checkpoints and log.jsonl go")
    add("--seed", type=int, default=0, help="any whole number, of any size: it is hashed")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, default="fp32",
        help="precision of activations and of frozen weights; what learns is fp32 (paper bf16)")
    add("--eval_interval", type=count, default=250, help="validate and save every so many steps")
    # fmt: on
    return parser


def read_arguments(parser: Parser | None = None) -> Namespace:
    """The command line, on top of --config, or of the run that is resumed."""
    args = run_settings(parser or build_parser(), FREE_ON_RESUME)
    settle(args)
    return args


def settle(args: Namespace) -> None:
    """Sizes that were left out are the checkpoint's or the rows' own; what cannot be meant is refused."""
    refuse_used(args)
    vars(args).update(STAGE_B[args.stage_b].settings)
    meta = read_meta(Path(args.data))
    if args.init_from == "scratch":
        cfg = PRESETS[args.preset]
    else:
        cfg = checkpoint.read_config(Path(args.init_from))
        check_rows_fit(args, cfg, meta)
    for name in ("n_last", "n_rounds"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(cfg, name))
    if args.block_length is None:
        args.block_length = meta.block_length or cfg.block_length
    if "toy" in (meta.judge or {}):
        args.seq_len = 2 * args.block_length  # its rows have this length, whatever is given

    if args.seq_len % args.block_length or args.seq_len > cfg.max_len:
        sizes = f"--block_length {args.block_length}, at most {cfg.max_len}"
        fail(f"--seq_len {args.seq_len} must be a multiple of {sizes}")


def refuse_used(args: Namespace) -> None:
    """Nothing is overwritten but by the run itself."""
    folder = Path(args.out_dir)
    if not args.resume:
        for name in ("train.json", "config.json", "adapter.json", "meta.json"):
            if (folder / name).exists():
                fail(f"{folder} already holds a run or a checkpoint: choose another --out_dir, or --init_from resume")


def check_rows_fit(args: Namespace, cfg: Config, meta: Meta) -> None:
    """Are these rows of the checkpoint's own tokens?"""
    base = Path(args.init_from)
    if checkpoint.about_adapter(base):
        fail(f"--init_from {base} is an adapter, and training starts from a model: give its base, "
             f"--init_from {quoted(checkpoint.base_of(base))}")  # fmt: skip
    own = checkpoint.stage_b_of(base)
    if own not in ("paper", args.stage_b):
        fail(f"--init_from {base} has a Stage B of its own, which goes on learning: give --stage_b {own}")
    same = (cfg.eos_id, cfg.mask_id) == (meta.eos_id, meta.mask_id) and meta.vocab_size <= cfg.vocab_size
    if not same or meaning(base, checkpoint.judge_of(base)) != meaning(Path(args.data), meta.judge or {}):
        fail(f"--data {args.data} has other tokens than --init_from {base}: prepare it with --like {quoted(base)}")


def meaning(folder: Path, judge: dict) -> object:
    """What the ids of a folder stand for: its tokenizer's pieces, or a toy of these sizes."""
    path = folder / "tokenizer.json"
    return read_bytes(path, "tokenizer") if path.exists() else judge


# --- what is printed
def describe(args: Namespace, corpus: Corpus, model: Model, done: int) -> None:
    """The rows, what learns, and what differs from the paper's run."""
    cfg = model.cfg
    learned = sum(p.numel() for p in model.learned().values())
    about = {split: rows.describe() for split, rows in corpus.rows.items()}
    print(f"{printable(args.data)}: {about['train']} to train on, {about['val']} to validate")
    print(
        f"training {learned:,} parameters on {model.wte.weight.device} in {args.dtype}, from {args.init_from}; n = "
        f"{cfg.n_last} of {cfg.n_layer} layers, K = {cfg.n_rounds}, blocks of {cfg.block_length}; steps "
        f"{done}..{args.max_iters} -> {args.out_dir}"
    )
    print(f"differs from the paper's run: {differences(args)}")


def explain(record: dict) -> None:
    """What the figures of this run's log are, a line each: those that every run has, and those of its step."""
    for name in ("loss", "grad_norm", "lr", "tokens", "ms", *record):
        if name in FIGURES:
            print(f"  {name:13} {FIGURES[name]}")


def differences(args: Namespace) -> str:
    """What is not as the paper has it: seq_len 32 (2048), batch_size 64 (8)"""
    found = [f"{name} {getattr(args, name)} ({value})" for name, value in PAPER.items() if getattr(args, name) != value]
    if not saves_adapter(args):
        found.append("all weights learn (LoRA on a frozen model)")
    return ", ".join(found) or "nothing but the model and the rows"


@command
def main() -> None:
    run(read_arguments())


if __name__ == "__main__":
    main()
