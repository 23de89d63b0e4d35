"""The small things that every script stands on: mistakes and flags, files, random numbers, the device."""

import argparse
import atexit
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

# R rows, T positions


# ---------------------------------------------------------------------------------------------------------------------
# mistakes and flags


def fail(message: str) -> NoReturn:
    """A user's mistake: one line that says what is wrong and what to do, exit code 2."""
    line = " ".join(str(message).split())
    print("error: " + line.replace("\0", "\\0"), file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """argparse whose error is one line, and whose --help keeps the layout of the script's
    docstring.

    A script that has one also ends quietly when whoever reads its output has left (`... | head
    -1`).
    """

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        sys.excepthook = end_quietly
        atexit.register(flush_quietly)

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


READER_IS_GONE = 128 + 13  # the exit status of a Unix tool that SIGPIPE has ended


def end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In the place of sys.excepthook: a closed pipe is no error."""
    if issubclass(kind, BrokenPipeError):
        os._exit(READER_IS_GONE)
    sys.__excepthook__(kind, error, trace)


def flush_quietly() -> None:
    """The last words, before Python's own flush could complain about a closed pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(READER_IS_GONE)
    except ValueError:  # already closed
        pass


def bounded(kind: type, low: float, high: float = math.inf, none: bool = False) -> Callable[[str], float | None]:
    """The type of a flag: a finite number of this kind in [low, high], or the word "none" where
    that is allowed.
    """
    not_one = "no number"
    if kind is int:
        not_one = "no whole number"
    if none:
        not_one = 'neither a number nor "none"'

    span = f"must lie in {low}..{high}"
    if high == math.inf:
        span = f"must be at least {low}, and finite"

    def parse(text: str) -> float | None:
        if none and text.lower() == "none":
            return None
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is {not_one}") from None

        # NaN is in no range
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{span}, not {text}")
        return value

    return parse


# ---------------------------------------------------------------------------------------------------------------------
# files


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: a reader sees the old file
    or the new one.
    """
    if "\0" in str(path):
        fail(f"cannot write {path}: a NUL byte is in its name")

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except OSError as e:
        fail(f"cannot write {path}: {e.strerror or e}; choose another folder or free some space")
    finally:
        # still there only if writing was stopped
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    replace_file(path, lambda temporary: temporary.write_text(text + "\n"))


def read_json(path: Path, what: str) -> dict:
    """A JSON object from a file, or one line about why not."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        fail(f"no {what} at {path}")
    except (OSError, ValueError, RecursionError) as e:
        fail(f"{what} {path} cannot be read as JSON: {e}")
    if not isinstance(value, dict):
        fail(f"{what} {path} is not a JSON object")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# randomness and the device


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator that is a function of its key alone, so that nothing random has a state to
    save or to lose.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    seed = int.from_bytes(digest[:7], "big")
    return torch.Generator().manual_seed(seed)


def pick_device(name: str) -> torch.device:
    """The device of this name, after trying it; `auto` is the first of cuda, mps and cpu that is
    there.
    """
    if name == "auto":
        name = "cpu"
        if torch.backends.mps.is_available():
            name = "mps"
        if torch.cuda.is_available():
            name = "cuda"
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        fail(f"--device {name} is not usable here: {str(e).splitlines()[0]}")
    return torch.device(name)


def uniform(draws: list[torch.Generator], n: int) -> Tensor:
    """(R, n) float32 in [0, 1), each row from its own generator."""
    return torch.stack([torch.rand(n, generator=g) for g in draws])


# ---------------------------------------------------------------------------------------------------------------------
# places


def first_masked(key: Tensor, masked: Tensor, size: Tensor, group: int) -> Tensor:
    """In each run of `group` positions the `size` masked ones with the smallest key, the leftmost
    of equals.

    key (R, T) float, masked (R, T) bool, size (R, T / group) int64 -> (R, T) bool.
    """
    R, T = masked.shape

    # what is not masked comes last, whatever its key is
    key = key.masked_fill(~masked, float("inf"))
    rank = ranks(key.view(R, T // group, group))
    first = rank < size[..., None]
    return masked & first.view(R, T)


def ranks(key: Tensor) -> Tensor:
    """(..., n) float -> (..., n) int64: the place of each entry in ascending order, the leftmost of
    equals first.

    ranks([.7, .2, .9]) = [1, 0, 2]. argsort says which entry stands at a place; the argsort of that
    says at which place an entry stands.
    """
    order = key.argsort(dim=-1, stable=True)
    return order.argsort(dim=-1)
