"""Split-forward training: Stage A and Stage B of every row after one shared prefix, one backward
(paper, Sec. 4.1).

`cocommit_step` is the method, `run` the loop around it. From a checkpoint the backbone is frozen, LoRA and
markers train: the paper's setting. From `scratch` everything trains. Every random number is a function of
(seed, row): a resumed run continues bit for bit, and other micro-batches draw the same.

    python train.py --n_last 3                                   # the paper's training on assets/names, one minute
    python train.py --init_from scratch --out_dir out/scratch    # names of Unicode characters, everything trains
    python train.py --data modes --n_last 2 --out_dir out/modes  # a toy with known total correlation, a minute
    python train.py --init_from resume --out_dir out/names       # go on after Ctrl-C, kill or power cut
    python train.py --init_from weights/llada2.1-mini --n_last 3 --data fineweb_edu/*.parquet --out_dir out/cocommit

To change   what Stage B is asked to write   call   main(choose=lambda args: Recipe(partial(cocommit_step, target=f)))
            how the bundle is drawn          hand   cocommit_step another `bundle`
            the loss                         edit   three_term_loss in corrupt.py
            flags and defaults               edit   lib/settings.py
"""

import math
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import checkpoint
from corrupt import Corruption, Draws, M, corrupt, draw_bundle, three_term_loss
from lib import settings, toy
from lib.config import DTYPES, PRESETS, Config
from lib.run import Processes, check_finite, means, micro_batches, report, schedule, sign, tell_what_is_next
from lib.settings import Corpus, is_toy
from lib.util import Parser, command, fail, generator, interruptible, rewind_log, write_json
from model import Context, Model

# R rows, T positions, C channels


@dataclass
class Batch:
    """Some rows of a corpus, all (R, T)."""

    clean: Tensor  # int64
    real: Tensor  # bool, False on padding
    free: Tensor  # bool, the positions that may be corrupted: real ones outside the prompt
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    draws: Draws  # a generator a row


# the weighted sum of Eq. 1 in nats, to be divided by the number of real tokens; and for the log, by
# name, (2,) float32: a cross-entropy summed, positions counted
Losses = tuple[Tensor, dict[str, Tensor]]
Step = Callable[[Model, Batch, Namespace], Losses]


# --- the training step
def corrupt_batch(model: Model, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor]:
    """What the model is shown: z (R, T) int64 and kind (R, T) uint8, see corrupt.py."""
    how = Corruption(args.corruption, model.cfg.block_length, model.cfg.mask_id, batch.n_plain)
    draft = partial(stage_a_draft, model, real=batch.real)
    return corrupt(batch.clean, batch.free, how, batch.draws, draft)


def random_masks(model: Model, batch: Batch, z: Tensor, masked: Tensor, args: Namespace) -> Tensor:
    """The paper's bundle: some masks of each block, chosen without a look at the text. (R, T) bool."""
    return draw_bundle(masked, model.cfg.block_length, args.s_min, args.s_max, batch.draws)


def clean_tokens(model: Model, batch: Batch, z: Tensor, bundle: Tensor, args: Namespace) -> Tensor:
    """The paper's target for Stage B, the clean tokens: (R, T) int64."""
    return batch.clean


def cocommit_step(
    model: Model, batch: Batch, args: Namespace, shown: Callable = corrupt_batch,
    bundle: Callable = random_masks, target: Callable = clean_tokens,
) -> Losses:  # fmt: skip
    """One step of the paper: both stages of these rows, Eq. 1 in each."""
    # what the model is shown: masked, wrong and right positions
    z, kind = shown(model, batch, args)
    masked = kind == M

    # the bundle, and what Stage B is asked to write there
    bundle = bundle(model, batch, z, masked, args)
    wanted = target(model, batch, z, bundle, args)

    # the split: one prefix, then the last n layers unmarked and marked
    ctx = batch_context(model, batch, args)
    h = model.prefix(z, ctx)
    stage_a = model.last_n(h, ctx)
    stage_b = model.coordinate(h, bundle, ctx, model.cfg.n_rounds)

    # Eq. 1 in both stages: Stage A fills every mask, Stage B its bundle
    loss_a, terms_a = three_term_loss(model, stage_a, batch.clean, kind, fill=masked)
    loss_b, terms_b = three_term_loss(model, stage_b, wanted, kind, fill=bundle)
    return loss_a + loss_b, of_stage("A", terms_a) | of_stage("B", terms_b)


def stage_a_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """The same without Stage B (--stage_a_only): a plain masked diffusion model."""
    z, kind = corrupt_batch(model, batch, args)
    ctx = batch_context(model, batch, args)
    stage_a = model.last_n(model.prefix(z, ctx), ctx)
    loss, terms = three_term_loss(model, stage_a, batch.clean, kind, fill=kind == M)
    return loss, of_stage("A", terms)


# --- what a step is made of
@torch.no_grad()
def stage_a_draft(model: Model, z: Tensor, where: Tensor, real: Tensor) -> Tensor:
    """Stage A's argmax at the True positions of where (R, T), in their order: (P,) int64.

    It reads z without a clean copy of earlier blocks: a draft has to be plausible, no better.
    """
    ctx = model.context(real)
    h = model.last_n(model.prefix(z, ctx), ctx)[where]

    # the logits of 1,024 positions at a time
    tokens = []
    for part in h.split(1024):
        logits = model.head(part)
        logits[:, model.cfg.mask_id] = float("-inf")  # a draft that stays masked is none
        tokens.append(logits.argmax(-1))
    return torch.cat(tokens)


def batch_context(model: Model, batch: Batch, args: Namespace) -> Context:
    """Earlier blocks corrupted, too (paper), or clean: rows beside their clean copy."""
    clean = batch.clean if args.context == "clean" else None
    return model.context(batch.real, clean)


def of_stage(stage: str, terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """Eq. 1's terms under the names that the log has for them: m2t_A, edit_A, clean_A, ..."""
    return {f"{name}_{stage}": term for name, term in terms.items()}


def get_batch(corpus: Corpus, split: str, first: int, n: int, args: Namespace, device: torch.device) -> Batch:
    """Rows first .. first+n of "train" or "val"; a row's draws come from its index."""
    clean, real, prompt = corpus.rows[split].batch(first, n)
    draws = [generator(args.seed, split, i) for i in range(first, first + n)]
    free = real & ~prompt
    return Batch(clean.to(device), real.to(device), free.to(device), corpus.n_plain, draws)


# --- what the loop is handed
def lora_everywhere(model: Model, args: Namespace) -> None:
    """What learns from a checkpoint: LoRA in every layer and the markers (paper, Sec. 5.1)."""
    model.add_lora(args.lora_r, 2 * args.lora_r, generator(args.seed, "lora"))


def about_lora(args: Namespace) -> dict:
    """What adapter.json says of it."""
    return dict(lora_r=args.lora_r, lora_alpha=2 * args.lora_r)


def make_optimizer(model: Model, args: Namespace) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone: norms and markers are not pulled to zero."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in learned.items() if p.dim() >= 2 and name != "markers"]
    others = [p for name, p in learned.items() if p.dim() < 2 or name == "markers"]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay, "peak": args.learning_rate},
        {"params": others, "weight_decay": 0.0, "peak": args.learning_rate},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)


@dataclass(frozen=True)
class Recipe:
    """A way of training: the paper's as it stands here, or an extension's."""

    step: Step = cocommit_step
    # from a checkpoint: what learns, and what adapter.json says of it
    adapt: Callable[[Model, Namespace], None] = lora_everywhere
    about: Callable[[Namespace], dict] = about_lora
    head: Callable[[Config, Namespace], nn.Module] | None = None  # a new head, which learns alone
    whole: bool = False  # all weights learn, and what is saved is a model of its own
    geometry: Callable[[Namespace], Config] = lambda args: PRESETS[args.preset]  # from scratch
    optimizer: Callable[[Model, Namespace], torch.optim.Optimizer] = make_optimizer


def the_papers(args: Namespace) -> Recipe:
    if args.stage_a_only:
        return Recipe(step=stage_a_step)
    return Recipe()


# --- the loop
def run(args: Namespace, recipe: Recipe, processes: Processes) -> None:
    # what is learned from, and what learns
    device = processes.device(args)
    folder = Path(args.out_dir)
    corpus = load_corpus(args)
    model = start(args, corpus.tokens, recipe, processes.cradle(device))
    optimizer = recipe.optimizer(model, args)

    # a resumed run goes on where it was saved; one without a save starts again
    done = 0
    if args.resume and (folder / "state.safetensors").exists():
        done = checkpoint.restore_state(model, optimizer, folder)
    optimizer = processes.place(model, optimizer, partial(recipe.optimizer, args=args), device)
    if processes.rank == 0:
        write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k != "resume"})
        rewind_log(folder / "log.jsonl", done)
    describe(args, corpus, model, device, done)

    saved = done
    log_file = folder / "log.jsonl" if processes.rank == 0 else os.devnull
    with interruptible() as caught, open(log_file, "a", buffering=1) as log:
        for step in tqdm(range(done, args.max_iters), initial=done, total=args.max_iters, desc="train", disable=None):
            # forward, backward, update
            record = take_step(model, optimizer, recipe.step, corpus, step, args, device, processes)
            check_finite(record, "loss", step, saved, args)
            report(record, f"step {step + 1}/{args.max_iters}", log, (step + 1) % args.log_interval == 0)

            # validate, and save what has been validated
            stop = processes.any(bool(caught))  # asked once: a signal before the break would lose this step
            due = (step + 1) % args.eval_interval == 0 or step + 1 == args.max_iters
            if due or stop:
                validation = validate(model, recipe.step, corpus, step + 1, args, device, processes)
                check_finite(validation, "validation", step, saved, args)
                if due:  # a run that was stopped here logs what it would have logged otherwise
                    report(validation, f"validation after step {step + 1}", log, shown=True)
                save(model, optimizer, step + 1, args, recipe, processes)
                saved = step + 1
                processes.any(False)  # nobody leaves before it is written
            if stop:
                break
    tell_what_is_next(saved, bool(caught), args)


def take_step(
    model: Model, optimizer: torch.optim.Optimizer, step_of: Step, corpus: Corpus, step: int, args: Namespace,
    device: torch.device, processes: Processes,
) -> dict[str, float]:  # fmt: skip
    """One update, if loss and gradient are finite -> what the log says of it."""
    began = time.perf_counter()
    first = step * args.batch_size

    # gradients of all micro-batches, with one denominator
    n_real = corpus.rows["train"].count_real(first, args.batch_size)
    loss = torch.zeros((), device=device)
    terms = []
    for at, n in micro_batches(*processes.share(first, args.batch_size), args):
        batch = get_batch(corpus, "train", at, n, args, device)
        part, part_terms = processes.within(model, step_of, model, batch, args)
        (part / n_real).backward()
        loss += part.detach() / n_real
        terms.append(part_terms)
    loss = float(processes.total(loss))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)
    norm = float(processes.gather({"norm": norm})["norm"])

    # the update, along the schedule
    share = schedule(step, args)
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    if math.isfinite(loss + norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    record = dict(step=step, loss=loss, grad_norm=norm, lr=share * args.learning_rate, tokens=n_real)
    record |= means(terms, processes)
    record["ms"] = 1e3 * (time.perf_counter() - began)
    return record


@torch.no_grad()
def validate(
    model: Model, step_of: Step, corpus: Corpus, step: int, args: Namespace, device: torch.device, processes: Processes
) -> dict[str, float]:
    """The step's terms on held-out rows."""
    terms = []
    for first, n in micro_batches(*processes.share(0, args.eval_rows), args):
        batch = get_batch(corpus, "val", first, n, args, device)
        terms.append(processes.within(model, step_of, model, batch, args)[1])
    return {"step": step, "val": True} | means(terms, processes)


# --- what it starts from
def load_corpus(args: Namespace) -> Corpus:
    """What the settings say to read; text by the tokens of the checkpoint that it starts from."""
    if is_toy(args):
        return settings.toy_corpus(args)
    if args.init_from == "scratch":
        folder = Path(args.out_dir)
        kind = settings.learn_tokenizer(folder, args)
        block_length = args.block_length
    else:
        folder = Path(args.init_from)
        cfg = checkpoint.read_config(folder)
        kind = cfg.tokenizer
        block_length = args.block_length or cfg.block_length
    tokenizer = checkpoint.load_tokenizer(folder, kind)
    if tokenizer is None:
        fail(f"{folder} has no tokenizer.json to read text with")
    return settings.text_corpus(args, tokenizer, kind, block_length)


def start(args: Namespace, tokens: dict, recipe: Recipe, device: torch.device) -> Model:
    """A fresh model for these tokens (fields of a Config), or a folder's to adapt."""
    if args.init_from == "scratch":
        cfg = recipe.geometry(args)
        n_last = args.n_last or max(1, cfg.n_layer // 2)
        cfg = replace(cfg, n_last=n_last, n_rounds=args.n_rounds, **tokens)
        model = checkpoint.new_model(cfg, generator(args.seed, "init"), device)
        model.compute_dtype = DTYPES[args.dtype]
    else:
        changes = {"n_last": args.n_last, "n_rounds": args.n_rounds, "block_length": args.block_length}
        make_head = recipe.head and partial(recipe.head, args=args)
        model = checkpoint.load_model(args.init_from, device, DTYPES[args.dtype], make_head=make_head, **changes)
        if is_toy(args) and any(getattr(model.cfg, name) != value for name, value in tokens.items()):
            fail(f"--init_from {args.init_from} was trained on a toy of another size: give the same --toy")
        recipe.adapt(model, args)

    # a toy's rows have the length of its one block
    block_length = model.cfg.block_length
    longest = model.cfg.max_len
    if not is_toy(args) and (args.seq_len % block_length or args.seq_len > longest):
        fail(f"--seq_len {args.seq_len} must be a multiple of --block_length {block_length}, at most {longest}")
    model.checkpointing = args.checkpointing
    return model


# --- what is printed, logged and saved
def describe(args: Namespace, corpus: Corpus, model: Model, device: torch.device, done: int) -> None:
    cfg = model.cfg
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    about = {split: rows.describe() for split, rows in corpus.rows.items()}
    print(f"{' '.join(args.data)}: {about['train']} to train on, {about['val']} to validate")
    print(
        f"training {learned:,} parameters on {device} in {args.dtype}, from {args.init_from}; n = {cfg.n_last} of "
        f"{cfg.n_layer} layers, K = {cfg.n_rounds}, blocks of {cfg.block_length}; steps {done}..{args.max_iters} -> "
        f"{args.out_dir}"
    )


def save(
    model: Model, optimizer: torch.optim.Optimizer, step: int, args: Namespace, recipe: Recipe, processes: Processes
) -> None:
    """The resume file first, then the checkpoint that sample.py reads."""
    folder = Path(args.out_dir)
    whole = args.init_from == "scratch" or recipe.whole
    state = processes.gather(checkpoint.training_state(model, optimizer))
    weights = processes.gather(checkpoint.stored(model) if whole else model.adapter_state())
    if processes.rank > 0:
        return
    checkpoint.save_tensors(folder / "state.safetensors", state, {"step": str(step)})
    if whole:
        # a model of its own keeps what lies beside the one that it started from
        for name in ("tokenizer.json", "names.json"):
            if args.init_from != "scratch" and (Path(args.init_from) / name).exists():
                shutil.copyfile(Path(args.init_from) / name, folder / name)
        checkpoint.save_model(model, folder, weights)
    else:
        checkpoint.save_adapter(model, folder, Path(args.init_from), recipe.about(args), weights)
    if is_toy(args):
        write_json(folder / "toy.json", {"name": args.data[0]} | toy.sizes(args.toy))


@command
def main(
    parser: Parser | None = None, choose: Callable[[Namespace], Recipe] = the_papers, processes: Processes | None = None
) -> None:
    """The command line of the paper's training, or of an extension's: its parser and its recipes."""
    processes = processes or Processes()
    args = settings.settle(parser or settings.build_parser(__doc__), checkpoint.read_config)
    recipe = choose(args)
    sign(args, recipe.step, processes.launcher)
    run(args, recipe, processes)


if __name__ == "__main__":
    main()
