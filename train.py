"""Split-forward training: both branches in one doubled batch after one shared prefix, one backward (paper, Sec. 4.1).

Two starting points. From `scratch` everything trains, markers included. From a checkpoint folder the backbone is frozen
and only LoRA and the markers train: the paper's setting, whose recipe is the default there.

Random numbers have no state: each is a function of (seed, row), so a resumed run continues bit for bit, and the same
rows split over other micro-batches draw the same. It refuses a non-finite loss: it stops before the step is taken.

    python train.py --n_last 3                                          # stdlib bytes from scratch, minutes on 2 cores
    python train.py --data modes --n_last 2 --out_dir out/modes         # a toy with known total correlation, a minute
    python train.py --init_from resume --out_dir out/stdlib             # go on after Ctrl-C, kill or power cut
    python train.py --init_from weights/llada2.1-mini --n_last 3 --data fineweb_edu/*.parquet --out_dir out/cocommit
    torchrun --nproc_per_node 2 train.py --data modes --device cpu      # several processes or GPUs, see parallel.py
"""

import json
import math
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

import parallel
import toy
from checkpoint import read_config, restore_state, rewind_log, save_adapter, save_model, save_state
from corrupt import (
    NONE,
    Corruption,
    Draft,
    M,
    Predict,
    Rows,
    chain_decode,
    choose,
    draw_bundle,
    three_term_loss,
    uniform,
)
from data import fail, generator, peak_memory, write_json
from model import Context, Model, sequence_context
from options import Data, build_model, build_parser, is_toy, load_data, settle
from parallel import share, within

# R rows, T positions, C channels

# ---------------------------------------------------------------------------------------------------------------------
# the learning signal


@dataclass
class Marked:
    """What branch 2 is given beside branch 1's rows, all (R, T)."""

    bundle: Tensor  # bool: D, the positions that carry the marker and the fill loss
    target: Tensor  # int64: what the loss asks for (paper: the clean x)
    kind: Tensor  # uint8: branch 1's kinds, with visible positions of D as masked ones
    n_rounds: int  # K of this step
    u: Tensor | None = None  # float32 in [0, 1): the numbers that the chain was drawn with, if it was


def split_forward(model: Model, x: Tensor, z: Tensor, kind: Tensor, two: Marked, ctx: Context) -> tuple[Tensor, Tensor]:
    """Both branches of the paper's Sec. 4.1. x, z, kind (R, T).
    ctx is the context of these rows, or of doubled rows [z ; x] of 2T. -> loss sum (nats), terms (2 branches, 3, 2)."""
    T = x.shape[1]
    ids, marks, u = beside_clean_copy(x, z, ctx), no_marks_on_copy(two.bundle, ctx), no_marks_on_copy(two.u, ctx)

    h = model.prefix(ids, ctx)  # once
    h = model.last_n(torch.cat([h, model.mark(h, marks, 0, u)]), ctx.doubled())  # branch 1 unmarked, branch 2 marked
    h_1, h_2 = h.chunk(2)
    for i in range(1, two.n_rounds):  # further rounds are branch 2's alone
        h_2 = model.last_n(model.mark(h_2, marks, i, u), ctx)
    loss_1, terms_1 = three_term_loss(model, h_1[:, :T], x, kind, fill=kind == M)  # fill on all of M
    loss_2, terms_2 = three_term_loss(model, h_2[:, :T], two.target, two.kind, fill=two.bundle)  # fill on D only
    return loss_1 + loss_2, torch.stack([terms_1, terms_2])


def marked_forward(
    model: Model, x: Tensor, z: Tensor, kind: Tensor, two: Marked, ctx: Context
) -> tuple[Tensor, Tensor]:
    """split_forward for adapters that act in the marked pass alone: branch 1 is the frozen base and needs no gradient,
    nor does the prefix; forward and backward go through the last n layers of branch 2. Branch 1's terms: validation."""
    T = x.shape[1]
    ids, marks, u = beside_clean_copy(x, z, ctx), no_marks_on_copy(two.bundle, ctx), no_marks_on_copy(two.u, ctx)
    ctx.current = torch.arange(ids.shape[1], device=ids.device)[:, None] < T
    with torch.no_grad():
        h = model.prefix(ids, ctx)
    h_2 = model.coordinate(h, marks, ctx, two.n_rounds, u)[:, :T]
    loss, terms = three_term_loss(model, h_2, two.target, two.kind, fill=two.bundle)
    terms_1 = torch.zeros_like(terms)
    if not torch.is_grad_enabled():
        terms_1 = three_term_loss(model, model.last_n(h, ctx)[:, :T], x, kind, kind == M)[1]
    return loss, torch.stack([terms_1, terms])


def factorised_forward(model: Model, x: Tensor, z: Tensor, kind: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """Branch 1 alone: what a base model is trained on. Returns what split_forward does."""
    h = model.last_n(model.prefix(beside_clean_copy(x, z, ctx), ctx), ctx)[:, : x.shape[1]]
    loss, terms = three_term_loss(model, h, x, kind, fill=kind == M)
    return loss, torch.stack([terms, torch.zeros_like(terms)])


def beside_clean_copy(x: Tensor, z: Tensor, ctx: Context) -> Tensor:
    """Input ids (R, T): z, or [z ; x] where ctx is of doubled rows."""
    return z if len(ctx.cos) == x.shape[1] else torch.cat([z, x], dim=1)


def no_marks_on_copy(marks: Tensor | None, ctx: Context) -> Tensor | None:
    """The bundle or its u, with nothing on the clean copy where ctx is of doubled rows."""
    if marks is None or len(ctx.cos) == marks.shape[1]:
        return marks
    return torch.cat([marks, torch.zeros_like(marks)], dim=1)


class Objective:
    """Rows -> loss: data, corruption and bundle of rows first .. first+R of a stream, all drawn from their index."""

    def __init__(self, model: Model, data: Data, args: Namespace, device: torch.device):
        cfg = model.cfg
        self.model, self.data, self.args, self.device = model, data, args, device
        self.target_seconds = 0.0  # spent on chain targets so far
        self.corruption = Corruption(
            args.corruption, cfg.block_length, cfg.mask_id, data.n_plain, args.random_rate, args.draft_rate
        )

    def rows(self, first: int, n: int, validation: bool = False) -> tuple[Tensor, Tensor]:
        """-> loss sum (scalar) and terms (2, 3, 2) of n rows."""
        args, cfg = self.args, self.model.cfg
        stream = "val" if validation else "train"
        rows = [generator(args.seed, stream, i) for i in range(first, first + n)]
        x, real, prompt = (t.to(self.device) for t in self.data[stream].batch(first, n))
        z, kind = self.corruption(x, real & ~prompt, rows, self.draft(real))
        ctx = sequence_context(cfg, real, self.model.compute_dtype, clean_copy=args.context == "clean")
        if args.factorised:
            return factorised_forward(self.model, x, z, kind, ctx)
        two = self.marked(x, z, kind, ctx, rows, first, validation)
        forward = split_forward if args.lora_scope == "all" else marked_forward
        return forward(self.model, x, z, kind, two, ctx)

    def marked(
        self, x: Tensor, z: Tensor, kind: Tensor, ctx: Context, rows: Rows, first: int, validation: bool
    ) -> Marked:
        """Draw D, K and u, and find the target that D is to be filled with."""
        args, cfg = self.args, self.model.cfg
        group = cfg.block_length if args.bundle_scope == "block" else x.shape[1]
        may_join, sure = kind != NONE if args.mark_visible else kind == M, None
        if args.confident_share:
            sure = torch.zeros(z.shape, device=z.device)
            sure = sure.masked_scatter(may_join, self.predict(x, ctx, None)(z, may_join, 1)[2])
        bundle = draw_bundle(may_join, group, args.s_min, args.s_max, rows, sure, args.confident_share)
        two = Marked(bundle, x, kind.masked_fill(bundle, M), cfg.n_rounds)
        if args.sample_rounds and not validation:  # one K a step, whatever the micro-batches
            rng = generator(args.seed, "rounds", first // args.batch_size)
            two.n_rounds = int(torch.randint(1, cfg.n_rounds + 1, (1,), generator=rng))
        if cfg.noise:
            two.u = uniform(rows, x.shape[1]).to(x.device)
        if args.target == "chain":
            start = time.perf_counter()
            undecided = z.masked_fill(bundle, cfg.mask_id)  # visible positions of D are to be written anew
            two.target = chain_decode(undecided, bundle, group, args.chain_beam, self.predict(x, ctx, two.u))[0]
            two.target = torch.where(bundle, two.target, x)
            self.target_seconds += time.perf_counter() - start
        return two

    def draft(self, real: Tensor) -> Draft:
        """The no-gradient pass that writes the model's own errors into z (unmarked: what Stage A would write)."""
        ctx = sequence_context(self.model.cfg, real, self.model.compute_dtype)

        def draft(z: Tensor, where: Tensor) -> Tensor:
            return self.predict(z, ctx, None)(z, where, 1)[1][:, 0]

        return draft

    def predict(self, x: Tensor, ctx: Context, u: Tensor | None) -> Predict:
        """Stage A's best tokens at chosen positions (or the ones that u (R, T) falls in), without gradient and without
        logits anywhere else."""

        @torch.no_grad()
        def best(z: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
            T, mask_id, found = z.shape[1], self.model.cfg.mask_id, []
            for a in range(0, len(z), len(x)):  # hypotheses of a beam come as further rows of the same contexts
                part = slice(a, a + len(x))
                h = self.model.last_n(self.model.prefix(beside_clean_copy(x, z[part], ctx), ctx), ctx)
                h = h[:, :T][where[part]]  # (n, C)
                numbers = h.new_zeros(len(h)) if u is None else u[where[part]]
                for some, drawn in zip(h.split(1024), numbers.split(1024), strict=True):
                    log_p = self.model.head(some)
                    log_p[:, mask_id] = float("-inf")  # a target that stays masked is none
                    found.append(choose(log_p.log_softmax(-1), k, None if u is None else drawn))
            return tuple(torch.cat(f) for f in zip(*found, strict=True))

        return best

    def validate(self) -> Tensor:
        with torch.no_grad():
            pieces = share(0, self.args.eval_rows, self.args.micro_batch or self.args.batch_size)
            parts = [within(self.model, self.rows, a, n, True)[1] for a, n in pieces]
        return parallel.total(torch.stack(parts).sum(0))


# ---------------------------------------------------------------------------------------------------------------------
# one step


def learning_rate(step: int, args: Namespace) -> float:
    """Linear warm-up, then a cosine to zero at max_iters."""
    warm = max(1, round(args.warmup * args.max_iters))
    if step < warm:
        return args.learning_rate * (step + 1) / warm
    return args.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, args.max_iters - warm)))


def train_step(objective: Objective, optimizer: torch.optim.Optimizer, step: int, args: Namespace) -> dict:
    """One optimizer step on rows step*batch .. (step+1)*batch; micro-batches share one denominator, so that how the
    rows are split changes nothing but rounding."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    first = step * args.batch_size
    n_real = objective.data["train"].count_real(first, args.batch_size)
    total, terms = 0.0, 0.0
    for a, n in share(first, args.batch_size, args.micro_batch or args.batch_size):
        loss, part = within(objective.model, objective.rows, a, n)
        (loss / n_real).backward()
        total, terms = total + loss.detach() / n_real, terms + part
    total, terms = parallel.total(total), parallel.total(terms)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    norm = parallel.whole(torch.nn.utils.clip_grad_norm_(params, args.grad_clip or math.inf))
    record = {"step": step, "loss": float(total), "grad_norm": float(norm), "lr": learning_rate(step, args)}
    if math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return record | {"tokens": n_real} | named_terms(terms)


def named_terms(terms: Tensor) -> dict[str, float]:
    """Mean cross-entropy in nats of each term of each branch; a term without positions is left out."""
    names = [f"{term}_{branch}" for branch in (1, 2) for term in ("m2t", "edit", "clean")]
    return {k: float(s / n) for k, (s, n) in zip(names, terms.view(6, 2).tolist(), strict=True) if n}


def make_optimizer(model: Model, args: Namespace) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2 and p is not model.markers], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.dim() < 2 or p is model.markers], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))


# ---------------------------------------------------------------------------------------------------------------------
# the run


def save(model: Model, optimizer: torch.optim.Optimizer, step: int, args: Namespace, task: toy.Toy | None) -> None:
    """The resume file first, then the checkpoint that sample.py reads."""
    folder = Path(args.out_dir)
    save_state(model, optimizer, step, folder)
    if args.init_from == "scratch":
        save_model(model, folder)
    else:
        settings = dict(base=args.init_from, lora_r=args.lora_r, lora_alpha=args.lora_alpha, lora_scope=args.lora_scope)
        save_adapter(model, folder, settings)
    if task is not None and parallel.RANK == 0:
        write_json(folder / "toy.json", {k: getattr(args, k) for k in toy.FLAGS} | {"name": task.name})


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask the loop to finish its step and save; a second one stops at once."""
    caught: list[int] = []

    def handler(number: int, frame: object) -> None:
        if caught and not parallel.LAUNCHED:  # torchrun passes on what a terminal has sent already
            raise KeyboardInterrupt
        caught.append(number)

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def validation(objective: Objective, step: int, task: toy.Toy | None) -> dict:
    """The terms of both branches on held-out rows; on a toy also the loss of the whole answer in one step, exactly."""
    record = {"step": step, "val": True} | named_terms(objective.validate())
    if task is not None:
        h, tc = float(task.h_joint().mean()), float(task.tc().mean())
        model = objective.model
        losses = [within(model, toy.block_loss, model, task, k) for k in (0, model.cfg.n_rounds)]
        record |= {"block_1": losses[0], "block_2": losses[1], "floor_joint": h, "floor_factorised": h + tc}
    return record


def report(record: dict, log: TextIO, args: Namespace, shown: bool) -> None:
    """One line of log.jsonl, and one for people."""
    log.write(json.dumps(record) + "\n")
    if not shown:
        return
    parts = [f"validation after step {record['step']}"]
    if "loss" in record:
        parts = [f"step {record['step'] + 1}/{args.max_iters}", f"loss {record['loss']:.4f}"]
    for b in (1, 2):
        terms = [f"{t} {record[f'{t}_{b}']:.3f}" for t in ("m2t", "edit", "clean") if f"{t}_{b}" in record]
        parts += [f"branch {b} " + " ".join(terms)] if terms else []
    if "loss" in record:
        parts += [f"lr {record['lr']:.1e}", f"norm {record['grad_norm']:.2f}", f"{record['ms']:.0f} ms"]
        if args.target == "chain":
            parts[-1] += f", {record['times_plain_step']:.1f} x a step without chain targets"
    if "block_1" in record:
        parts.append(
            f"answer in one step: branch 1 {record['block_1']:.4f} branch 2 {record['block_2']:.4f} "
            f"(floors H {record['floor_joint']:.4f}, H + TC {record['floor_factorised']:.4f})"
        )
    tqdm.write(" | ".join(parts))


def run(args: Namespace) -> None:
    device, folder = parallel.pick_device(args.device), Path(args.out_dir)
    parallel.join(device, batch_size=args.batch_size, eval_rows=args.eval_rows)
    checkpoint = None if args.init_from == "scratch" else Path(args.init_from)
    uses_bpe = checkpoint is not None and read_config(checkpoint).tokenizer == "bpe"
    data, task = load_data(args, checkpoint if uses_bpe else None)
    model = build_model(args, task, torch.device("cpu") if parallel.LAUNCHED else device)
    parallel.shard(model, device)
    cfg = model.cfg
    if task is None and (args.seq_len % cfg.block_length or args.seq_len > cfg.max_len):
        fail(f"--seq_len {args.seq_len} must be a multiple of --block_length {cfg.block_length}, at most {cfg.max_len}")
    optimizer = make_optimizer(model, args)
    started = args.resume and (folder / "state.safetensors").exists()  # a run killed before its first save starts again
    done = restore_state(model, optimizer, folder) if started else 0
    if parallel.RANK == 0:
        write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k != "resume"})
        rewind_log(folder / "log.jsonl", done)
        if uses_bpe:
            shutil.copyfile(checkpoint / "tokenizer.json", folder / "tokenizer.json")

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{' '.join(args.data)}: {data['train'].describe()} to train on, {data['val'].describe()} to validate")
    print(
        f"training {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters on {device} in {args.dtype}"
    )
    print(f"prefix {cfg.n_layer - cfg.n_last} layers, last n = {cfg.n_last}, K = {cfg.n_rounds}, blocks of "
          f"{cfg.block_length}; steps {done}..{args.max_iters} of {args.batch_size} rows -> {folder}")  # fmt: skip
    objective = Objective(model, data, args, device)
    loop(objective, optimizer, done, args, task)


def loop(
    objective: Objective, optimizer: torch.optim.Optimizer, done: int, args: Namespace, task: toy.Toy | None
) -> None:
    folder, saved, stop = Path(args.out_dir), done, 0
    last = min(args.max_iters, args.stop_at or args.max_iters)
    resume, log_file = how_to_resume(args), folder / "log.jsonl" if parallel.RANK == 0 else os.devnull
    with interruptible() as caught, open(log_file, "a", buffering=1) as log:
        for step in tqdm(range(done, last), initial=done, total=args.max_iters, desc="train", disable=None):
            start, objective.target_seconds = time.perf_counter(), 0.0
            record = train_step(objective, optimizer, step, args)
            seconds = time.perf_counter() - start
            record |= {"ms": 1e3 * seconds, "times_plain_step": seconds / (seconds - objective.target_seconds)}
            if not math.isfinite(record["loss"] + record["grad_norm"]):
                good = f"step {saved} in {folder} ({resume})" if saved else "none yet"
                fail(
                    f"the loss is {record['loss']} (gradient norm {record['grad_norm']}) at step {step + 1}; "
                    f"last good checkpoint: {good}; lower --learning_rate in a new --out_dir"
                )
            report(record, log, args, shown=(step + 1) % args.log_interval == 0)
            if (step + 1) % args.eval_interval == 0 or step + 1 == args.max_iters:
                report(validation(objective, step + 1, task), log, args, shown=True)
            stop = parallel.largest(bool(caught))
            if stop or step + 1 == last or (step + 1) % args.save_interval == 0:
                save(objective.model, optimizer, step + 1, args, task)
                saved = step + 1
            if stop:
                break
    if saved < args.max_iters:
        print(f"saved at step {saved} of {args.max_iters}; go on with: {resume}")
        raise SystemExit(130 if stop else 0)
    print(f"done: {folder}{peak_memory(objective.device)}; next: {how_to_sample(args)}")


def how_to_resume(args: Namespace) -> str:
    return f"{parallel.launcher()} train.py --init_from resume --out_dir {args.out_dir}"


def how_to_sample(args: Namespace) -> str:
    folder = args.out_dir if args.init_from == "scratch" else f"{args.init_from} --adapter {args.out_dir}"
    if is_toy(args):
        return f"python evaluate.py --data {args.data[0]} --ckpt {folder}"
    return f"python sample.py --ckpt {folder} --prompt 'def '"


def main() -> None:
    parallel.start()
    args = build_parser(__doc__).parse_args()
    given = {a[2:].split("=")[0] for a in sys.argv[1:] if a.startswith("--")}
    args = settle(args, given)
    try:
        with parallel.together(how_to_resume(args)):
            run(args)
    except KeyboardInterrupt:
        fail(f"interrupted at once: what was done since the last save is lost; go on with: {how_to_resume(args)}")
    except torch.OutOfMemoryError:
        fail("out of memory: lower --micro_batch or --seq_len, or add --checkpointing")


if __name__ == "__main__":
    main()
