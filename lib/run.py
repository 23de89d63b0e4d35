"""What a training run has beside its step: processes, a schedule, a log, and words for its user."""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lib.toy import TASKS
from lib.util import fail, pick_device


class Processes:
    """The processes of a run: this one alone. released/parallel.py has several."""

    rank = 0
    launcher = "python"

    def device(self, args: Namespace) -> torch.device:
        return pick_device(args.device)

    def cradle(self, device: torch.device) -> torch.device:
        """Where the model is built, before it is shared out."""
        return device

    def place(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, make: Callable, device: torch.device
    ) -> torch.optim.Optimizer:
        """Share out the model and its moments -> the optimizer of this process's part."""
        return optimizer

    def share(self, first: int, n: int) -> tuple[int, int]:
        """Of rows first .. first+n this process's: the first, and how many."""
        return first, n

    def within(self, model: nn.Module, f: Callable, *args: object) -> object:
        """f(*args), which may call the model."""
        return f(*args)

    def total(self, t: Tensor) -> Tensor:
        """The sum over all processes."""
        return t

    def any(self, flag: bool) -> bool:
        """Whether it is set in any process."""
        return flag

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, in process 0."""
        return tensors


# --- rows, and the learning rate
def micro_batches(first: int, n: int, args: Namespace) -> list[tuple[int, int]]:
    """Rows first .. first+n in micro-batches: the first row and the number of rows of each."""
    size = args.micro_batch or args.batch_size
    return [(at, min(size, first + n - at)) for at in range(first, first + n, size)]


def schedule(step: int, args: Namespace) -> float:
    """The rate as a share of its peak: up over 1 % of the steps (paper), then a cosine to 0."""
    warm = max(1, round(0.01 * args.max_iters))
    if step < warm:
        return (step + 1) / warm
    progress = (step - warm) / max(1, args.max_iters - warm)
    return 0.5 * (1 + math.cos(math.pi * progress))


def means(parts: list[dict[str, Tensor]], processes: Processes) -> dict[str, float]:
    """Mean cross-entropy in nats of each term, where it has positions, over micro-batches."""
    found = {}
    for name in dict.fromkeys(name for terms in parts for name in terms):
        term = sum(terms[name] for terms in parts if name in terms)
        ce, count = processes.total(term).tolist()
        if count:
            found[name] = ce / count
    return found


# --- what is logged and printed
def report(record: dict, head: str, log: TextIO, shown: bool) -> None:
    """One line of log.jsonl, and one for people."""
    log.write(json.dumps(record) + "\n")
    if shown:
        figures = [f"{k} {v:.4g}" for k, v in record.items() if k not in ("step", "val")]
        tqdm.write(" | ".join([head, *figures]))


def check_finite(record: dict, what: str, step: int, saved: int, args: Namespace) -> None:
    """Stop a run that has diverged, and name the good checkpoint: its own validation was finite."""
    bad = [f"{k} {v}" for k, v in record.items() if not math.isfinite(v)]
    if not bad:
        return
    good = "none was saved yet"
    if saved:
        good = f"the checkpoint of step {saved} in {args.out_dir} is good ({resume_command(args)})"
    fail(f"the {what} of step {step + 1} is not finite ({bad[0]}): {good}; lower --learning_rate in a new --out_dir")


def tell_what_is_next(saved: int, interrupted: bool, args: Namespace) -> None:
    if saved < args.max_iters:
        print(f"saved at step {saved} of {args.max_iters}; go on with: {resume_command(args)}")
        raise SystemExit(130 if interrupted else 0)  # as Ctrl-C ends other programs
    script = "sample.py --prompt TEXT"
    if args.data == ["names"] or args.data[0] in TASKS:
        script = "evaluate.py"
    print(f"done; what it does now: python {script} --ckpt {args.out_dir}")


# --- what began a run goes on with it
def sign(args: Namespace, step: Callable, launcher: str) -> None:
    """Write into the settings what trains this run, and the command that does. A resumed run has both:
    the same step must go on with it.
    """
    made_of = trained_by(step)
    if args.resume and args.trained_by != made_of:
        fail(f"{args.out_dir} is trained by {args.trained_by}, this is {made_of}: go on with {resume_command(args)}")
    args.trained_by = made_of

    script = os.path.relpath(sys.argv[0])
    args.command = f"{launcher} {script}"
    if "/" in script and not script.startswith(".."):
        args.command = f"{launcher} -m {script.removesuffix('.py').replace('/', '.')}"


def trained_by(f: Callable) -> str:
    """A step in words: the file and name of every function that it is made of."""
    if isinstance(f, partial):
        parts = [f"{name}={trained_by(value)}" for name, value in sorted(f.keywords.items()) if callable(value)]
        return f"{trained_by(f.func)}({', '.join(parts)})"
    if isinstance(f, nn.Module):
        return type(f).__name__
    return f"{Path(f.__code__.co_filename).name}:{f.__qualname__}"


def resume_command(args: Namespace) -> str:
    return f"{args.command} --init_from resume --out_dir {args.out_dir}"
