"""A training run beside its loop: its settings, its log, what stops it, and means over its micro-batches."""

import json
import math
import signal
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from lib.util import Parser, as_flags, fail, quoted, read_bytes, read_json, reading, replace_file


def run_settings(parser: Parser, free: set[str]) -> Namespace:
    """The command line, on top of --config, or of the run that is resumed, of which only `free` ones may change."""
    given = parser.parse_args()
    for name in ("data", "init_from", "out_dir"):
        if not getattr(given, name):
            fail(f"--{name} is empty: name a folder")
    resume = given.init_from == "resume"
    settings = {}
    if resume:
        path = Path(given.out_dir) / "train.json"
        settings = read_json(path, "training run to resume (--out_dir of an earlier run)")
    elif given.config:
        with reading(Path(given.config), "config"):
            settings = tomllib.loads(Path(given.config).read_text(encoding="utf-8"))

    # settings as flags, then the flags of the command line, which win
    args = parser.parse_args([*as_flags(settings, parser), *sys.argv[1:]])
    args.resume = resume
    if resume:
        args.init_from = str(settings.get("init_from"))
        saved = parser.parse_args(as_flags(settings, parser))
        for name, value in vars(saved).items():
            if getattr(args, name) != value and name not in free:
                fail(f"--{name} {getattr(args, name)} differs from the run's {value}: leave it out, or start a new run")
    return args


def report(record: dict, log: Path | None, title: str, shown: bool) -> None:
    """One line of log.jsonl, and one for people; none where log is None, in processes that do not write."""
    if log is None:
        return
    with open(log, "a") as file:
        file.write(json.dumps(record) + "\n")
    if shown:
        figures = [f"{k} {v:.4g}" for k, v in record.items() if k not in ("step", "val")]
        tqdm.write(" | ".join([title, *figures]))


def rewind_log(path: Path, it: int) -> None:
    """Drop lines at or after iteration `it` (written after the last save), and what is no line, cut short by a kill."""
    kept = []
    for line in read_bytes(path, "log").splitlines() if path.exists() else []:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            end = it + ("val" in record and it > 0)  # a validation at `it` is of the weights that were saved
            if record["step"] < end:
                kept.append(line + b"\n")
    replace_file(path, lambda temporary: temporary.write_bytes(b"".join(kept)))


def check_finite(record: dict, what: str, it: int, saved: int, args: Namespace) -> None:
    """Stop a run that has diverged, and name the good checkpoint: its own validation was finite."""
    bad = [f"{k} {v}" for k, v in record.items() if not math.isfinite(v)]
    if not bad:
        return
    good = "none was saved yet"
    if saved:
        again = f"--init_from resume --out_dir {quoted(args.out_dir)}"
        good = f"the checkpoint of step {saved} in {args.out_dir} is good ({again})"
    fail(f"the {what} of step {it + 1} is not finite ({bad[0]}): {good}; lower --learning_rate in a new --out_dir")


def means(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Mean cross-entropy in nats of each term, where it has positions, over micro-batches."""
    found = {}
    for name in parts[0]:
        ce, count = sum(terms[name] for terms in parts).tolist()
        if count:
            found[name] = ce / count
    return found


def cosine(it: int, max_iters: int) -> float:
    """The rate as a share of its peak: up over 1 % of the steps (paper), then a cosine to 0."""
    warm = max(1, round(0.01 * max_iters))
    if it < warm:
        return (it + 1) / warm
    progress = (it - warm) / max(1, max_iters - warm)
    return 0.5 * (1 + math.cos(math.pi * progress))


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask the loop to finish its step and save; a second one stops at once."""
    caught: list[int] = []

    def handler(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def tell_what_is_next(saved: int, args: Namespace) -> None:
    """The command that goes on, or shows what was learned."""
    if saved < args.max_iters:
        script = sys.argv[0] if sys.argv[0].startswith("-m ") else quoted(sys.argv[0])
        again = f"python {script} --init_from resume --out_dir {quoted(args.out_dir)}"
        print(f"saved at step {saved} of {args.max_iters}; go on with: {again}")
        return
    print(f"done; what it does now: python evaluate.py --ckpt {quoted(args.out_dir)}")
