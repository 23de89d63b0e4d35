"""What every script stands on: a user's mistakes, flags, files, random numbers, the device, time."""

import argparse
import functools
import hashlib
import json
import math
import os
import signal
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

# R rows, T positions


# --- a user's mistakes
class Mistake(Exception):
    """What a user can mend: one line that says what is wrong and what to do."""


def fail(message: str) -> NoReturn:
    raise Mistake(message)


READER_IS_GONE = 128 + 13  # the exit status of a Unix tool that SIGPIPE has ended


def command(main: Callable) -> Callable:
    """Around every script's main, the one handler: a mistake becomes one line and exit code 2.

    So does what Python raises over a full disk, a missing right, Ctrl-C.
    """

    @functools.wraps(main)
    def run(*args, **kwargs):
        try:
            result = main(*args, **kwargs)
            sys.stdout.flush()
            return result
        except Mistake as e:
            message = str(e)
        except BrokenPipeError:
            # `... | head -1`: nothing more can be written there, not even when Python closes it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(READER_IS_GONE) from None
        except KeyboardInterrupt:
            message = "interrupted; a training run goes on from its last save with --init_from resume"
        except OSError as e:
            message = str(e)
        except (MemoryError, RuntimeError) as e:  # the CPU's allocator raises a plain RuntimeError
            known = isinstance(e, (MemoryError, torch.OutOfMemoryError))
            if not known and "can't allocate memory" not in str(e):
                raise
            message = "out of memory: take fewer or shorter rows at a time, or --dtype bf16"
        line = " ".join(message.split()).replace("\0", "\\0")
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2)

    return run


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """While a user's file is taken apart: what is raised meanwhile is its mistake."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        fail(f"no {what} at {path}")
    except KeyError as e:
        fail(f"{what} {path} is damaged, or of another kind: it lacks {e}")
    except (OSError, ValueError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError,
            SafetensorError, EOFError, zlib.error) as e:  # fmt: skip
        fail(f"{what} {path} cannot be read, is damaged, or of another kind: {e}")


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


# --- flags
class Parser(argparse.ArgumentParser):
    """argparse whose error is one line, and whose --help keeps the layout of the docstring."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def bounded(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """The type of a flag: a finite number of this kind in [low, high]."""

    def parse(text: str) -> float:
        value = kind(text)
        # NaN is in no range
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"must lie in {low}..{high}, and be finite, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse: "invalid int value: 'x'"
    return parse


def or_none(parse: Callable[[str], float]) -> Callable[[str], float | None]:
    """The type of a flag that may also be the word "none"."""

    def number(text: str) -> float | None:
        return None if text.lower() == "none" else parse(text)

    return number


# --- files
def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then rename it: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except (OSError, ValueError, SafetensorError) as e:  # no right, no space, a NUL byte in the name
        fail(f"cannot write {path}: {e}; choose another folder or free some space")
    finally:
        if temporary.exists():  # only if writing was stopped
            temporary.unlink()


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    replace_file(path, lambda temporary: temporary.write_text(text + "\n"))


def read_json(path: Path, what: str) -> dict:
    """A JSON object from a file, or one line about why not."""
    with reading(path, what):
        value = json.loads(path.read_text())
    if not isinstance(value, dict):
        fail(f"{what} {path} is not a JSON object")
    return value


def rewind_log(path: Path, step: int) -> None:
    """Drop lines at or after `step` (written after the last save) and a line cut short by a kill."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            end = step + ("val" in record)  # a validation at `step` is of the weights that were saved
            if record["step"] < end:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            break
    replace_file(path, lambda temporary: temporary.write_bytes(b"".join(kept)))


# --- randomness and the device
def generator(*key: int | str) -> torch.Generator:
    """A CPU generator that is a function of its key alone: no random state is to be saved."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def uniform(draws: list[torch.Generator], n: int) -> Tensor:
    """(R, n) float32 in [0, 1), each row from its own generator."""
    return torch.stack([torch.rand(n, generator=g) for g in draws])


def pick_device(name: str) -> torch.device:
    """The device of this name, after trying it; `auto`: an accelerator, or the CPU."""
    if name == "auto":
        name = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        fail(f"--device {name} is not usable here: {str(e).splitlines()[0]}")
    return torch.device(name)


# --- time
def interleaved(
    *sides: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of each side; they take turns, after one untimed round."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(repeats + 1):
        for side, taken in zip(sides, seconds, strict=True):
            start = clock()
            side()
            if turn > 0:
                taken.append(clock() - start)
    return [statistics.median(taken) for taken in seconds]


# --- places
def first_masked(key: Tensor, masked: Tensor, size: Tensor, group: int) -> Tensor:
    """In each run of `group` positions the `size` masks of smallest key, leftmost of equals.

    key (R, T) float, masked (R, T) bool, size (R, T / group) int64 -> (R, T) bool.
    """
    # what is not masked comes last, whatever its key is
    key = key.masked_fill(~masked, float("inf")).unflatten(1, (-1, group))

    # argsort says which entry stands at a place, its argsort where an entry stands:
    # .7 .2 .9 -> 1 0 2
    order = key.argsort(dim=-1, stable=True)
    rank = order.argsort(dim=-1)
    first = rank < size[..., None]
    return masked & first.flatten(1)
