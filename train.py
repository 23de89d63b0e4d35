"""Split-forward training: Stage A and Stage B of every row after one shared prefix, one backward
(paper, Sec. 4.1).

`cocommit_step` is the method, `run` the loop around it. From `scratch` everything trains, markers
included. From a checkpoint the backbone is frozen, LoRA and the markers train: the paper's setting,
whose recipe is the default there. Every random number is a function of (seed, row): a resumed run
continues bit for bit, and rows that are split over other micro-batches draw the same.

    python train.py --n_last 3                                       # names of Unicode characters, minutes on 2 cores
    python train.py --data modes --n_last 2 --out_dir out/modes      # a toy with known total correlation, a minute
    python train.py --init_from resume --out_dir out/names           # go on after Ctrl-C, kill or power cut
    python train.py --init_from weights/llada2.1-mini --n_last 3 --data fineweb_edu/*.parquet --out_dir out/cocommit

To change   what Stage B is asked to write   edit   `clean_tokens`, or hand `main` a step with a target of your own
            how the bundle is drawn                 draw_bundle in corrupt.py
            the loss                                three_term_loss in corrupt.py
            flags and defaults                      settings.py
"""

import json
import math
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

import checkpoint
from corrupt import Corruption, Draws, M, corrupt, draw_bundle, three_term_loss
from lib import toy
from lib.util import Parser, fail, generator, pick_device, write_json
from model import Context, Model, sequence_context
from settings import Corpus, build_parser, is_toy, load_corpus, settle

# R rows, T positions


@dataclass
class Batch:
    """Some rows of a corpus, all (R, T)."""

    clean: Tensor  # int64
    real: Tensor  # bool, False on padding
    free: Tensor  # bool, the positions that may be corrupted: real ones outside the prompt
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    draws: Draws  # a generator a row


# the weighted sum of Eq. 1 in nats, to be divided by the number of real tokens; and for the log, (2
# stages, 3 terms, 2) float32: cross-entropy summed, positions counted
Losses = tuple[Tensor, Tensor]
Step = Callable[[Model, Batch, Namespace], Losses]


# --- the training step
def clean_tokens(model: Model, batch: Batch, z: Tensor, bundle: Tensor) -> Tensor:
    """The paper's target for Stage B: the clean tokens. (R, T) int64. It is read at the bundle's
    fills, W and G.
    """
    return batch.clean


def cocommit_step(model: Model, batch: Batch, args: Namespace, target: Callable = clean_tokens) -> Losses:
    """One step of the paper: both stages of these rows, Eq. 1 in each."""
    # what the model is shown: masked, wrong and right positions
    z, kind = corrupt_batch(model, batch, args)
    masked = kind == M

    # the bundle: some masks of each block, chosen without a look at the text
    group = bundle_group(model, batch, args)
    bundle = draw_bundle(masked, group, args.s_min, args.s_max, batch.draws)

    # what Stage B is asked to write
    wanted = target(model, batch, z, bundle)

    # the split: one prefix, then the last n layers unmarked and marked
    ctx = batch_context(model, batch, args)
    h = model.prefix(z, ctx)
    stage_a, stage_b = model.both_stages(h, bundle, ctx, model.cfg.n_rounds)

    # Eq. 1 in both stages: Stage A fills every mask, Stage B its bundle
    loss_a, terms_a = three_term_loss(model, stage_a, batch.clean, kind, fill=masked)
    loss_b, terms_b = three_term_loss(model, stage_b, wanted, kind, fill=bundle)
    return loss_a + loss_b, torch.stack([terms_a, terms_b])


def stage_a_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """The same without Stage B (--stage_a_only): a plain masked diffusion model, a base to adapt
    later.
    """
    z, kind = corrupt_batch(model, batch, args)
    ctx = batch_context(model, batch, args)
    stage_a = model.last_n(model.prefix(z, ctx), ctx)
    loss, terms = three_term_loss(model, stage_a, batch.clean, kind, fill=kind == M)
    return loss, torch.stack([terms, torch.zeros_like(terms)])


# --- what a step is made of
def corrupt_batch(model: Model, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor]:
    """z (R, T) int64 and kind (R, T) uint8, see corrupt.py."""
    cfg = model.cfg
    how = Corruption(args.corruption, cfg.block_length, cfg.mask_id, batch.n_plain, args.replace_rate, args.draft_rate)

    def draft(z: Tensor, where: Tensor) -> Tensor:
        return stage_a_draft(model, z, where, batch.real)

    return corrupt(batch.clean, batch.free, how, batch.draws, draft)


@torch.no_grad()
def stage_a_draft(model: Model, z: Tensor, where: Tensor, real: Tensor) -> Tensor:
    """The model's own guesses: Stage A's argmax at the True positions of where (R, T), in their
    order, int64.

    It reads z as it is, without a clean copy of earlier blocks: a draft has to be plausible, not as
    good as decoding would have it.
    """
    ctx = sequence_context(model.cfg, real, model.compute_dtype)
    h = model.last_n(model.prefix(z, ctx), ctx)[where]

    # the logits of 1,024 positions at a time
    tokens = [z.new_empty(0)]
    for part in h.split(1024):
        logits = model.head(part)
        logits[:, model.cfg.mask_id] = float("-inf")  # a draft that stays masked is none
        tokens.append(logits.argmax(-1))
    return torch.cat(tokens)


def bundle_group(model: Model, batch: Batch, args: Namespace) -> int:
    """How many positions draw one bundle together: a block, as in decoding, or the whole row.

    Earlier blocks draw bundles too, so with --context corrupted a block sees marked masks before
    it, where decoding has finished text. The paper trains so; --context clean takes marks and masks
    out of what a block sees.
    """
    if args.bundle_scope == "block":
        return model.cfg.block_length
    return batch.clean.shape[1]


def batch_context(model: Model, batch: Batch, args: Namespace) -> Context:
    """Earlier blocks corrupted too (the paper), or clean, as decoding has them: rows beside their
    clean copy.
    """
    clean = None
    if args.context == "clean":
        clean = batch.clean
    return sequence_context(model.cfg, batch.real, model.compute_dtype, clean)


def get_batch(corpus: Corpus, split: str, first: int, n: int, args: Namespace, device: torch.device) -> Batch:
    """Rows first .. first+n of a split, "train" or "val"; all random numbers of a row come from its
    index.
    """
    clean, real, prompt = corpus.rows[split].batch(first, n)
    draws = [generator(args.seed, split, i) for i in range(first, first + n)]
    free = real & ~prompt
    return Batch(clean.to(device), real.to(device), free.to(device), corpus.n_plain, draws)


# --- what the loop is handed
def lora_everywhere(model: Model, args: Namespace) -> None:
    """What learns from a checkpoint: LoRA in every layer, in both stages, and the markers (paper,
    Sec. 5.1).
    """
    model.add_lora(args.lora_r, 2 * args.lora_r, generator(args.seed, "lora"))


@dataclass(frozen=True)
class Recipe:
    """A way of training: the paper's, or an extension's."""

    step: Step = cocommit_step
    adapt: Callable[[Model, Namespace], None] = lora_everywhere  # from a checkpoint: what learns
    command: str = "python train.py"
    extension: dict = field(default_factory=dict)  # written into adapter.json, so that its adapters load through it


def the_papers(args: Namespace) -> Recipe:
    if args.stage_a_only:
        return Recipe(step=stage_a_step)
    return Recipe()


# --- the loop
def run(args: Namespace, recipe: Recipe) -> None:
    # what is learned from, and what learns
    device = pick_device(args.device)
    folder = Path(args.out_dir)
    corpus = load_corpus(args)
    model = checkpoint.start(args, corpus.tokens, recipe.adapt, device)
    optimizer = make_optimizer(model, args)

    # a resumed run goes on where it was saved; one that was killed before its first save starts
    # again
    done = 0
    if args.resume and (folder / "state.safetensors").exists():
        done = checkpoint.restore_state(model, optimizer, folder)
    write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k != "resume"})
    checkpoint.rewind_log(folder / "log.jsonl", done)
    describe(args, corpus, model, device, done)

    saved = done
    last = args.max_iters
    if args.stop_at:
        last = min(last, args.stop_at)
    with checkpoint.interruptible() as caught, open(folder / "log.jsonl", "a", buffering=1) as log:
        for step in tqdm(range(done, last), initial=done, total=args.max_iters, desc="train", disable=None):
            # forward, backward, update
            record = take_step(model, optimizer, recipe.step, corpus, step, args, device)
            check_finite(record, "loss", step, saved, args, recipe)
            shown = (step + 1) % args.log_interval == 0
            report(record, f"step {step + 1}/{args.max_iters}", log, shown)

            # validate, and save what has been validated
            stop = bool(caught)  # asked once: a signal between the save and the break would lose this step
            due = (step + 1) % args.eval_interval == 0 or step + 1 == args.max_iters
            if due or stop or step + 1 == last:
                validation = validate(model, recipe.step, corpus, step + 1, args, device)
                check_finite(validation, "validation", step, saved, args, recipe)
                if due:  # a run that was stopped here logs what it would have logged otherwise
                    report(validation, f"validation after step {step + 1}", log, shown=True)
                save(model, optimizer, step + 1, args, recipe)
                saved = step + 1
            if stop:
                break
    tell_what_is_next(saved, bool(caught), args, recipe)


def take_step(
    model: Model, optimizer: torch.optim.Optimizer, step_of: Step, corpus: Corpus, step: int, args: Namespace,
    device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """One update -> what the log says of it. Nothing is updated where the loss or its gradient is
    not finite.
    """
    start = time.perf_counter()
    first = step * args.batch_size

    # gradients of all micro-batches, with one denominator
    n_real = corpus.rows["train"].count_real(first, args.batch_size)
    loss = 0.0
    terms = 0.0
    for at, n in micro_batches(first, args.batch_size, args):
        batch = get_batch(corpus, "train", at, n, args, device)
        part, part_terms = step_of(model, batch, args)
        (part / n_real).backward()
        loss += float(part.detach()) / n_real
        terms = terms + part_terms
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_at(args)))

    record = update(optimizer, loss, norm, step, args)
    record["tokens"] = n_real
    record |= named_terms(terms)
    record["ms"] = 1e3 * (time.perf_counter() - start)
    return record


def update(optimizer: torch.optim.Optimizer, loss: float, norm: float, step: int, args: Namespace) -> dict[str, float]:
    """The optimizer's step, unless the loss or its gradient is not finite -> the log's first fields."""
    rate = learning_rate(step, args)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if math.isfinite(loss + norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return dict(step=step, loss=loss, grad_norm=norm, lr=rate)


@torch.no_grad()
def validate(
    model: Model, step_of: Step, corpus: Corpus, step: int, args: Namespace, device: torch.device
) -> dict[str, float]:
    """The terms of both stages on held-out rows; on a toy also the loss of the whole answer in one
    step, exactly.
    """
    terms = 0.0
    for first, n in micro_batches(0, args.eval_rows, args):
        batch = get_batch(corpus, "val", first, n, args, device)
        terms = terms + step_of(model, batch, args)[1]
    record = {"step": step, "val": True} | named_terms(terms)
    if is_toy(args):
        record |= toy.floors(model, corpus.rows["val"].toy)
    return record


def micro_batches(first: int, n: int, args: Namespace) -> list[tuple[int, int]]:
    """Rows first .. first+n in micro-batches: the first row and the number of rows of each."""
    size = args.batch_size
    if args.micro_batch:
        size = args.micro_batch
    return [(at, min(size, first + n - at)) for at in range(first, first + n, size)]


def learning_rate(step: int, args: Namespace) -> float:
    """Linear warm-up over 1 % of the steps (paper), then a cosine to zero at max_iters."""
    warm = max(1, round(0.01 * args.max_iters))
    if step < warm:
        return args.learning_rate * (step + 1) / warm
    progress = (step - warm) / max(1, args.max_iters - warm)
    return args.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def clip_at(args: Namespace) -> float:
    """The largest gradient norm; --grad_clip 0 clips nothing."""
    if args.grad_clip == 0:
        return math.inf
    return args.grad_clip


def make_optimizer(model: Model, args: Namespace) -> torch.optim.AdamW:
    """Weight decay is for matrices: norms scale and markers are added, zero is not where they
    should be pulled to.
    """
    decayed = []
    undecayed = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.dim() >= 2 and not name.startswith("markers"):
            decayed.append(p)
        else:
            undecayed.append(p)
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)


# --- what is printed, logged and saved
def describe(args: Namespace, corpus: Corpus, model: Model, device: torch.device, done: int) -> None:
    cfg = model.cfg
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    train = corpus.rows["train"].describe()
    val = corpus.rows["val"].describe()
    print(f"{' '.join(args.data)}: {train} to train on, {val} to validate")
    print(
        f"training {learned:,} parameters on {device} in {args.dtype}; n = {cfg.n_last} of {cfg.n_layer} layers, K = "
        f"{cfg.n_rounds}, blocks of {cfg.block_length}; steps {done}..{args.max_iters} -> {args.out_dir}"
    )


def named_terms(terms: Tensor) -> dict[str, float]:
    """Mean cross-entropy in nats of each term of each stage; a term without positions is left out."""
    named = {}
    for stage, three in zip("AB", terms.tolist(), strict=True):
        for term, (ce, count) in zip(("m2t", "edit", "clean"), three, strict=True):
            if count:
                named[f"{term}_{stage}"] = ce / count
    return named


def report(record: dict, head: str, log: TextIO, shown: bool) -> None:
    """One line of log.jsonl, and one for people."""
    log.write(json.dumps(record) + "\n")
    if shown:
        figures = [f"{k} {v:.4g}" for k, v in record.items() if k not in ("step", "val")]
        tqdm.write(" | ".join([head, *figures]))


def check_finite(record: dict, what: str, step: int, saved: int, args: Namespace, recipe: Recipe) -> None:
    """Stop a run that has diverged, and name the checkpoint that is good: its own validation was
    finite.
    """
    bad = [f"{k} {v}" for k, v in record.items() if not math.isfinite(v)]
    if not bad:
        return
    good = "none was saved yet"
    if saved:
        good = f"the checkpoint of step {saved} in {args.out_dir} is good ({resume_command(args, recipe)})"
    fail(f"the {what} of step {step + 1} is not finite ({bad[0]}): {good}; lower --learning_rate in a new --out_dir")


def save(model: Model, optimizer: torch.optim.Optimizer, step: int, args: Namespace, recipe: Recipe) -> None:
    """The resume file first, then the checkpoint that sample.py reads."""
    folder = Path(args.out_dir)
    checkpoint.save_state(model, optimizer, step, folder)
    if args.init_from == "scratch":
        checkpoint.save_model(model, folder)
    else:
        settings = dict(base=args.init_from, lora_r=args.lora_r, lora_alpha=2 * args.lora_r)
        checkpoint.save_adapter(model, folder, settings | recipe.extension)
    if is_toy(args):
        write_json(folder / "toy.json", {"name": args.data[0]} | toy.sizes(args.toy))


def resume_command(args: Namespace, recipe: Recipe) -> str:
    return f"{recipe.command} --init_from resume --out_dir {args.out_dir}"


def tell_what_is_next(saved: int, interrupted: bool, args: Namespace, recipe: Recipe) -> None:
    if saved < args.max_iters:
        print(f"saved at step {saved} of {args.max_iters}; go on with: {resume_command(args, recipe)}")
        if interrupted:
            raise SystemExit(130)  # as Ctrl-C ends other programs
        raise SystemExit(0)
    ckpt = args.out_dir
    if args.init_from != "scratch":
        ckpt = f"{args.init_from} --adapter {args.out_dir}"
    script = "sample.py --prompt TEXT"
    if is_toy(args):
        script = f"evaluate.py --data {args.data[0]}"
    print(f"done; next: python {script} --ckpt {ckpt}")


def main(parser: Parser | None = None, choose: Callable[[Namespace], Recipe] = the_papers) -> None:
    """The command line, of the paper's training or of an extension's: its parser, and the recipe
    its flags choose.
    """
    if parser is None:
        parser = build_parser(__doc__)
    args = settle(parser)
    recipe = choose(args)
    if args.resume and args.command != recipe.command:
        fail(f"{args.out_dir} holds a run of another script: go on with {args.command} --init_from resume")
    args.command = recipe.command
    try:
        run(args, recipe)
    except KeyboardInterrupt:
        fail("interrupted at once: what was done since the last save is lost; go on with --init_from resume")
    except torch.OutOfMemoryError:
        fail("out of memory: lower --micro_batch or --seq_len, or add --checkpointing")


if __name__ == "__main__":
    main()
