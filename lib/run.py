"""What a training run needs besides its loop: its settings, its log, its schedule, and ways to stop it."""

import json
import math
import os
import signal
import stat
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from lib import util
from lib.util import Mistake, checked_entry, fail, quoted, read_json, read_lines, reading, write_json

BESIDE = ("base_hash", "rows_hash")  # train.json has these beside the flags: hashes of what the run reads
PLACES = ("data", "init_from")  # the settings that are folders to read


# --- settings
def run_settings(parser: util.Parser, free: set[str]) -> Namespace:
    """The flags of the command line, on top of --config or of the run that is resumed, which may change only `free`."""
    given = parser.parse_args()
    resume = given.init_from == "resume"
    beside = dict.fromkeys(BESIDE)
    settings = {}
    path = Path(given.out_dir) / "train.json"
    if resume:
        if given.config:
            fail(f"--config {given.config}: leave it out, a resumed run takes its settings from {path}")
        settings = read_json(path, "training run to resume (--out_dir of an earlier run)")
        beside = {name: settings.pop(name, None) for name in BESIDE}
        settings |= {name: setting_of_run(path.parent, name, str) for name in PLACES}
    elif given.config:
        path = Path(given.config)
        with reading(path, "config"):
            settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    unknown = sorted(settings.keys() - (vars(given).keys() - {"config"}))
    if unknown or settings.get("init_from") == "resume":
        fail(f"{path}: a file cannot set {', '.join(unknown) or 'init_from to resume'} here: is it of another script?")

    # settings as flags: {"seed": 1, "checkpointing": true} -> --seed=1 --checkpointing
    flags = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name}={value}")
    try:
        saved = parser.parse_args(flags)
    except Mistake as e:
        fail(f"{path}: {e}")

    # then the flags of the command line, which win
    args = parser.parse_args([*flags, *sys.argv[1:]])
    if resume:
        args.init_from = settings["init_from"]
        for name, value in vars(args).items():
            before = getattr(saved, name)
            if value != before and name not in free:
                fail(f"--{name} {value} differs from the run's {before}: leave it out, or start a new run")
            if name in PLACES and value != "scratch" and not Path(value).exists():
                fail(f"there is no {name} at {value}: put it there, or correct {name} in {path}")
    args.resume = resume
    vars(args).update(beside)
    return args


def save_settings(args: Namespace) -> None:
    """Write train.json, from which the run is resumed. What the run reads is named from the run's folder."""
    folder = Path(args.out_dir)
    settings = vars(args) | {name: written_from(folder, getattr(args, name)) for name in PLACES}
    del settings["resume"], settings["config"]
    write_json(folder / "train.json", settings)


def written_from(folder: Path, place: Path | str) -> str:
    """How a file in `folder` names a place, so that both may be moved together."""
    path = os.path.relpath(os.path.realpath(place), os.path.realpath(folder))
    return "scratch" if place == "scratch" else Path(path).as_posix()


def found_from(folder: Path, place: str) -> Path:
    """The place that a file in `folder` names, from where the folder is; if it is a link, then else where it leads."""
    near, real = (Path(os.path.normpath(start / place)) for start in (folder, folder.resolve()))
    return near if near.exists() or near.resolve() == real.resolve() else real


def setting_of_run(folder: Path, name: str, kind: type) -> Any:
    """A setting in the train.json of a run's folder; None if there is no such file."""
    path = folder / "train.json"
    value = checked_entry(read_json(path, "training run"), name, kind, path) if path.exists() else None
    return str(found_from(folder, value)) if name in PLACES and value not in (None, "scratch") else value


def check_hash(args: Namespace, name: str, found: str, place: Path | str) -> None:
    """Note the hash of what is read, a name in BESIDE. A resumed run must read what it has read before."""
    if getattr(args, name) not in (None, found):
        what = "other rows" if name == "rows_hash" else "another model (config, tokenizer or weights)"
        fail(f"{args.out_dir} was trained on {what} than {place} holds now: put that there")
    setattr(args, name, found)


# --- the log
LEGEND = """the figures of the log:
  m2t, edit, clean   cross-entropies in nats at masks, wrong and right tokens: of Stage A (_A) and Stage B (_B)
  m2t_A_bundle       Stage A's at the masks of Stage B's bundle; B_less_A: m2t_B minus this
  marker, states     root mean squares of the markers, and of the states to which they are added
  loss, tokens, ms   of the step: Eq. 1 in nats a token, tokens without padding, milliseconds"""


def report(record: dict, folder: Path) -> None:
    """Append a record to the run's log.jsonl. Its `step` says how many updates came before it. A validation that is
    there already is not written again: the run was stopped after it, and goes on."""
    log = folder / "log.jsonl"
    util.check_same_folder(folder)
    if "val" in record and any("val" in r and r["step"] == record["step"] for r in read_lines(log, {"step": int})):
        return
    with open(log, "a", newline="\n") as file:
        file.write(json.dumps(record) + "\n")


def show(record: dict, title: str, explained: bool = False) -> None:
    """Print a record. explained: after LEGEND. If nobody reads on (`| head`), the run is asked to stop, as by a
    signal."""
    figures = [f"{k} {v:.4g}" for k, v in record.items() if k not in ("step", "val")]
    line = " | ".join([title, *figures])
    try:
        tqdm.write(f"{LEGEND}\n{line}" if explained else line)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signal.raise_signal(signal.SIGTERM)


def rewind_log(path: Path, it: int) -> None:
    """Drop a last line that was cut short, and all that came after the last save, which was after `it` updates. A log
    with another line that cannot be read is refused."""
    records = read_lines(path, {"step": int}, "log") if path.exists() else []
    # a validation at `it` is that of the weights that were saved
    kept = [json.dumps(r) + "\n" for r in records if r["step"] < it + ("val" in r and it > 0)]
    util.replace_file(path, lambda temporary: temporary.write_bytes("".join(kept).encode()))


def check_finite(record: dict, what: str, it: int, saved: int, args: Namespace) -> None:
    """Stop a run that has diverged, and name its last checkpoint, whose validation was finite."""
    bad = [f"{k} {v}" for k, v in record.items() if not math.isfinite(v)]
    if bad:
        good = f"the checkpoint of step {saved} in {args.out_dir} is good" if saved else "none was saved yet"
        fail(f"the {what} of step {it + 1} is not finite ({bad[0]}): {good}; lower --learning_rate in a new --out_dir")


# --- figures and schedule
def means(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """The mean cross-entropy in nats of each term that has positions, over all micro-batches."""
    found = {}
    for name in parts[0]:
        ce, count = sum(terms[name] for terms in parts).tolist()
        if count:
            found[name] = ce / count
    return found


def cosine(it: int, max_iters: int) -> float:
    """The learning rate as a share of its peak: it rises for 1 % of the steps (paper), then falls to 0 by a cosine."""
    warm = max(1, round(0.01 * max_iters))
    if it < warm:
        return (it + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * ((it - warm) / (max_iters - warm))))


# --- how it ends
@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and a lost terminal ask the loop to finish its step and save; a second one stops at once."""
    caught: list[int] = []

    def handler(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        if number in HANGUP:
            # the terminal is gone, and to print would be an error
            for output in (1, 2):
                if stat.S_ISCHR(os.fstat(output).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        # print may be what the signal has interrupted; and nobody may read on
        with suppress(OSError):
            os.write(2, b"\nthe run ends after this step and saves; Ctrl-C again stops at once, without saving\n")

    # nohup lets a run ignore that its terminal is gone
    asks = [signal.SIGINT, signal.SIGTERM, *(n for n in HANGUP if signal.getsignal(n) != signal.SIG_IGN)]
    before = {number: signal.signal(number, handler) for number in asks}
    try:
        yield caught
    finally:
        for number, old in before.items():
            signal.signal(number, old)


HANGUP = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []  # Windows has none


def tell_what_is_next(saved: int, args: Namespace) -> None:
    """Print the last validation, and whether it has risen, and the command that goes on or shows what was learned."""
    records = [record for record in read_lines(Path(args.out_dir) / "log.jsonl", {"step": int}) if "val" in record]
    name = "m2t_B" if any("m2t_B" in record for record in records) else "m2t_A"
    found = [(record[name], record["step"]) for record in records if name in record]
    if len(found) > 1:
        (last, step), (best, earlier) = found[-1], min(found)
        risen = f", and was {best:.4g} after step {earlier}: it has risen, so take fewer steps" if last > best else ""
        print(f"on held-out rows {name} is {last:.4g} after step {step}{risen}")
    if saved < args.max_iters:
        again = f"python {quoted(sys.argv[0])} --init_from resume --out_dir {quoted(args.out_dir)}"
        print(f"saved at step {saved} of {args.max_iters}; go on with: {again}")
    else:
        print(f"done; what it does now: python evaluate.py --ckpt {quoted(args.out_dir)}")
