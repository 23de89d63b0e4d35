"""Training with a split forward (paper, Sec. 4.1): both stages of a row share the first L - n layers (the prefix) and
the backward pass.

`cocommit_step` is the method, and `run` is everything around it. A run that starts from a checkpoint freezes the model,
and only LoRA and the markers learn, as in the paper (or what another --stage_b adds). From `scratch`, or with
--lora_r 0, everything learns. Every random number of a row is a function of (seed, row): a resumed run continues
bit for bit, and no draw depends on --micro_batch.

    python train.py --n_last 3                                # the paper's training on assets/names, minutes
    python train.py --data data/fineweb --config configs/llada.toml               # the paper's own run, on the 16B
    python train.py --init_from resume --out_dir out/names    # go on after Ctrl-C, kill or power cut
    python train.py --init_from resume --out_dir out/names --max_iters 600        # or go on for longer

The defaults are the paper's, except for the sizes (model, rows, blocks, batch, steps), the learning rate and the
marker's (--marker_rate), and bf16 and checkpointing, which are off because small models do not need them. A run prints
which of the paper's settings it changes. For these settings the paper gives no value, so the values are ours:

    mask ratio                    U(0, 1) as in LLaDA, drawn for each block       corrupt.py
    tokens that drafts replace    at a rate of U(0, .2), by Stage A's argmax      corrupt.py, REPLACE_RATE
    size of a bundle              drawn once for each row, whatever its blocks    corrupt.py, draw_bundle
    when decoding stops           after the block in which an eos stands          decoding.py, eos_early_stop
    weights of the two stages     equal                                           cocommit_step
    denominator of the loss       all tokens of the batch except padding          loop
    Adam                          betas 0.9 and 0.95, decay 0.01 on matrices      lib/optimizers.py, adamw
    gradient clipping             at a norm of 1                                  GRAD_CLIP
    LoRA                          one A for the fused qkv, no dropout, fp32       model.py, Linear
    schedule                      linear warm-up, a cosine to 0                   lib/run.py, cosine
    validation rows               one document in twenty, by its text's hash      prepare.py
    fields of the text filter     int_score, or else score; token_count           prepare.py, passes_filter
"""

import lib.first  # noqa: F401

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

import checkpoint
import lib.run
from cache import check_stage_b
from checkpoint import DTYPES
from config import PRESETS
from corrupt import Corruption, M, corrupt, draw_bundle, kinds_apart, sizes, three_term_loss
from lib.optimizers import OPTIMIZERS
from lib.rows import Batch, Corpus, copy_tokens, get_batch, read_corpus
from lib.run import check_finite, check_hash, cosine, interruptible, means, report, show, tell_what_is_next
from lib.util import alone_in, command, fail, flush, generator, pick_device, progress
from model import Context, Model
from settings import build_parser, differences, read_arguments, refuse_used, saves_adapter

# R rows, T positions, P chosen positions

S_MIN = 1  # the smallest bundle (paper)
GRAD_CLIP = 1.0
LOG_INTERVAL = 50
EVAL_ROWS = 64
BALANCE = 0.001  # how far a step moves an expert's bias where the routers learn
# what a step returns: the weighted sum of Eq. 1 in nats, which the loop divides by the number of real tokens; and for
# the log, under each name, (2,) float32: a sum of cross-entropies, and the number of positions
Losses = tuple[Tensor, dict[str, Tensor]]


# --- the training step
def cocommit_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """One step of the paper: Eq. 1 in both stages of these rows."""
    # who sees whom: a block reads the corrupted blocks before it, as in the paper, or a clean copy of them
    if args.context == "clean":
        ctx = model.read_clean(batch.clean, batch.real)
    else:
        ctx = model.context(batch.real)

    # what the model is shown: masked, wrong and right positions; and the bundle, drawn without reading the text. (A
    # Stage B of one's own may have a rule of its own.)
    show = getattr(model, "corrupt_and_draw", partial(corrupt_and_draw, model))
    z, kind, bundle = show(batch, ctx, args)

    # the split: one prefix, then the last n layers. The paper runs both stages as one doubled batch, with the same
    # result
    h = model.prefix(z, ctx)
    stage_a = model.last_n(h, ctx)

    # the last n layers again with the bundle marked (Eq. 4). The paper's Stage B does not read `tokens`
    tokens = z.masked_scatter(bundle, model.told(batch.clean[bundle], stage_a[bundle]))
    stage_b = model.coordinate(h, bundle, tokens, ctx)

    # Eq. 1 in both stages: Stage A fills every mask, Stage B its bundle
    loss_a, ce_a = three_term_loss(model, stage_a, batch.clean, kind, fill=kind == M)
    loss_b, ce_b = three_term_loss(model, stage_b, batch.clean, kind, fill=bundle)

    # what cannot learn is no part of the loss: Stage A of a frozen base, beside a Stage B that has layers of its own
    loss = loss_a + loss_b if loss_a.requires_grad else loss_b
    return loss, kinds_apart(ce_a, ce_b, kind, bundle) | sizes(model.markers, h[bundle])


# --- what a step is made of
def corrupt_and_draw(model: Model, batch: Batch, ctx: Context, args: Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's z, kind and bundle, (R, T) each: see corrupt.py."""
    z, kind = corrupt_batch(model, batch, ctx, args)
    bundle = draw_bundle(kind == M, S_MIN, args.s_max, batch.draws)
    return z, kind, bundle


def corrupt_batch(
    model: Model, batch: Batch, ctx: Context, args: Namespace, mask_power: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What the model is shown: z (R, T) int64 and kind (R, T) uint8, see corrupt.py. ctx: for the model's drafts."""

    def draft(z: Tensor, where: Tensor) -> Tensor:
        with torch.no_grad():
            return model.drafts(model.last_n(model.prefix(z, ctx), ctx)[where])

    cfg = model.cfg
    how = Corruption(args.corruption, cfg.block_length, cfg.mask_id, batch.plain, batch.draws, draft, mask_power)
    return corrupt(batch.clean, batch.corruptible, how)


# --- a run: rows, model, optimizer, then the loop
def run(args: Namespace, step: Callable[..., Losses] = cocommit_step) -> None:
    """Train, validate and save. step: a function like cocommit_step."""
    with alone_in(Path(args.out_dir)):
        refuse_used(args)
        corpus = read_corpus(Path(args.data), args.seq_len, args.seed, args.block_length, args.batch_size)
        model = start(args, corpus)
        optimizer = OPTIMIZERS[args.optimizer](model.learned(), args.learning_rate, args.marker_rate)
        loop(model, corpus, step, optimizer, args)


def loop(
    model: Model, corpus: Corpus, step: Callable[..., Losses], optimizer: torch.optim.Optimizer, args: Namespace
) -> None:
    """Train until max_iters, or until a signal asks for an earlier end."""
    done = begin(model, corpus, optimizer, args)
    saved = done
    if is_due(done, args):
        validate(model, corpus, step, done, args)
    with interruptible() as caught:
        for it in progress(range(done, args.max_iters), "train", done=done):
            record = update(model, corpus, step, optimizer, it, saved, args, second=it == done + 1)
            report(record, Path(args.out_dir))

            # first save: neither a validation nor what is printed can then lose a step
            stop = bool(caught)
            due = is_due(it + 1, args)
            if due or stop:
                norm = float(sum(p.detach().norm() for p in model.learned().values()))
                check_finite({"norm": norm}, "weights' norm", it, saved, args)
                saved = it + 1
                save(model, optimizer, saved, args)
            if (it + 1) % LOG_INTERVAL == 0:
                show(record, f"step {it + 1}/{args.max_iters}")
            if due:
                validate(model, corpus, step, it + 1, args)
            if stop:
                break

    # the run may have been killed after it saved its state, and before it saved what was learned
    if saved == done:
        save(model, optimizer, done, args)
    tell_what_is_next(saved, args)
    if saved < args.max_iters:
        raise SystemExit(130)  # the exit code of a program that Ctrl-C has ended


def update(
    model: Model, corpus: Corpus, step: Callable[..., Losses], optimizer: torch.optim.Optimizer, it: int, saved: int,
    args: Namespace, second: bool,
) -> dict[str, float]:  # fmt: skip
    """One update of what learns -> its record for the log. saved: the last step that was saved."""
    # forward and backward: the gradients of all micro-batches, with one denominator
    began = time.perf_counter()
    row = it * args.batch_size
    n_real = corpus.rows["train"].count_real(row, args.batch_size)
    loss = 0.0
    terms = []
    drawn = torch.get_rng_state()
    for batch in micro_batches(corpus, "train", row, args.batch_size, it, model, args):
        part, part_terms = step(model, batch, args)
        (part / n_real).backward()
        loss += float(part.detach()) / n_real
        terms.append(part_terms)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))
    if second and "m2t_B" in terms[0]:
        tell_what_does_not_learn(model)
    if second and not torch.equal(drawn, torch.get_rng_state()):
        print("the step draws from torch's own generator, so a resumed run draws anew: take batch.draws")

    # update, at the schedule's rate
    share = cosine(it, args.max_iters)
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    record = dict(step=it, loss=loss, grad_norm=norm, lr=share * args.learning_rate, tokens=n_real)
    check_finite(record, "loss", it, saved, args)
    optimizer.step()

    # if the model's routers learn, move the bias of each expert by how often it was chosen. The experts of a Stage B's
    # own layers keep the biases that they began with
    for layer in model.layers[model.cfg.n_dense :]:
        if layer.mlp.router.requires_grad:
            layer.mlp.balance(BALANCE)
    optimizer.zero_grad(set_to_none=True)
    return record | means(terms) | dict(ms=1e3 * (time.perf_counter() - began))


def begin(model: Model, corpus: Corpus, optimizer: torch.optim.Optimizer, args: Namespace) -> int:
    """Go on where the run was saved, and write what a run begins with -> how many steps it has taken."""
    folder = Path(args.out_dir)
    done = checkpoint.restore_state(model, optimizer, folder) if args.resume else 0
    if done > args.max_iters:
        fail(f"--max_iters {args.max_iters}: this run has taken {done} steps already")
    if type(model) is not Model:
        check_stage_b(model)
    lib.run.rewind_log(folder / "log.jsonl", done)
    lib.run.save_settings(args)
    if not saves_adapter(args):
        # the checkpoint needs the rows' meta.json and tokenizer.json, and the rows may go away later
        copy_tokens(Path(args.data), folder)
    describe(args, corpus, model, done)
    return done


def is_due(steps: int, args: Namespace) -> bool:
    """Is the run saved and validated after so many steps?"""
    return steps % args.eval_interval == 0 or steps == args.max_iters


@torch.no_grad()
def validate(model: Model, corpus: Corpus, step: Callable[..., Losses], it: int, args: Namespace) -> None:
    """The cross-entropies on held-out rows after `it` steps, and what Stage B gains there. The rows are the same in
    every run with the same sizes. A run that was stopped before it logged this validation logs it now."""
    rows = min(EVAL_ROWS, 8 * args.batch_size)  # one row takes the 16B model minutes
    terms = [step(model, batch, args)[1] for batch in micro_batches(corpus, "val", 0, rows, it, model, args)]
    found = means(terms)
    if "m2t_B" in found:
        found["B_less_A"] = found["m2t_B"] - found["m2t_A_bundle"]
    if not all(map(math.isfinite, found.values())):
        fail(f"the validation after step {it} is not finite: lower --learning_rate in a new --out_dir")
    record = {"step": it, "val": True} | found
    report(record, Path(args.out_dir))
    show(record, f"validation after step {it}" if it else "validation before the first step", explained=it == 0)


def micro_batches(
    corpus: Corpus, split: str, first: int, n: int, it: int, model: Model, args: Namespace
) -> Iterator[Batch]:
    """Rows first .. first+n of "train" or "val", a micro-batch at a time, after `it` steps."""
    size = args.micro_batch or args.batch_size
    for at in range(first, first + n, size):
        batch = get_batch(corpus, split, at, min(size, first + n - at), args.seed, model.wte.weight.device)
        batch.elapsed = it / args.max_iters
        yield batch


def tell_what_does_not_learn(model: Model) -> None:
    """Name the parameters of Stage B's own that have no gradient, or one of zero, though the model has moved once; and
    the markers, if a round does not read its own."""
    idle = []
    for name, p in model.own().items():
        if isinstance(p, Parameter):
            parts = [p.grad] if name != "markers" or p.grad is None else p.grad
            if any(part is None or not part.any() for part in parts):
                idle.append(name)
    if idle:
        print(f"no gradient in the second step, or one of zero: {', '.join(idle)}")


# --- what learns
def start(args: Namespace, corpus: Corpus) -> Model:
    """The model that learns: a new one, a checkpoint with an adapter or, with --lora_r 0, a whole checkpoint."""
    device = pick_device(args.device)
    sizes = dict(n_last=args.n_last, n_rounds=args.n_rounds, block_length=args.block_length)
    if args.init_from == "scratch":
        meta = corpus.meta
        ids = dict(vocab_size=meta.vocab_size, eos_id=meta.eos_id, mask_id=meta.mask_id)
        cfg = replace(PRESETS[args.preset], **sizes, **ids, stage_b=args.stage_b, window=args.seq_len)
        cfg = replace(cfg, decoder=getattr(args, "decoder", cfg.decoder))
        folder = Path(args.out_dir)
        if args.resume and (folder / "config.json").exists():
            cfg = checkpoint.read_config(folder)  # the preset may have been edited since
        model = checkpoint.new_model(cfg, generator(args.seed, "init"), device)
    else:
        # what learns is always float32
        dtype = DTYPES[args.dtype] if saves_adapter(args) else torch.float32
        seed = generator(args.seed, "init").initial_seed() % 2**32
        model = checkpoint.load_model(args.init_from, device, dtype, args.stage_b, seed, **sizes)
        check_hash(args, "base_hash", model.base_hash, args.init_from)
        if model.cfg.int8 and (type(model) is not Model or args.lora_r == 0):
            fail(f"{args.init_from} is int8, and cannot learn: give --stage_b paper and a --lora_r above 0")
        if saves_adapter(args):
            model.adapt(args.lora_r, generator(args.seed, "lora"))
    model.compute_dtype = DTYPES[args.dtype]
    model.checkpointing = args.checkpointing
    return model


def save(model: Model, optimizer: torch.optim.Optimizer, steps: int, args: Namespace) -> None:
    """Save what the run resumes from, then what it has learned: an adapter, or a whole model."""
    folder = Path(args.out_dir)
    flush(folder / "log.jsonl")  # the state must not be ahead of the log
    state = checkpoint.training_state(model, optimizer)
    about = {"step": str(steps), "config": repr(model.cfg)}
    checkpoint.save_tensors(folder / "state.safetensors", state, about)
    if saves_adapter(args):
        checkpoint.save_adapter(model, folder, Path(args.init_from), args.lora_r)
    else:
        checkpoint.save_model(model, folder)


# --- what is printed
def describe(args: Namespace, corpus: Corpus, model: Model, done: int) -> None:
    """Print what the rows are, what learns, and what differs from the paper's run."""
    cfg = model.cfg
    train, val = (corpus.rows[split].describe() for split in ("train", "val"))
    learned = sum(p.numel() for p in model.learned().values())
    print(f"{args.data}: {train} to train on, {val} to validate")
    print(f"training {learned:,} parameters on {model.wte.weight.device} in {args.dtype}, from {args.init_from}; "
          f"n = {cfg.n_last} of {cfg.n_layer} layers, K = {cfg.n_rounds}, blocks of {cfg.block_length}; "
          f"steps {done}..{args.max_iters} -> {args.out_dir}")  # fmt: skip
    print(f"differs from the paper's run: {differences(args)}")


@command
def main() -> None:
    run(read_arguments(build_parser(__doc__)))


if __name__ == "__main__":
    main()
