"""What every script needs: a user's mistakes, flags, printing, files, random numbers, the device."""

import argparse
import functools
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

# R rows, T positions


# --- a user's mistakes
class Mistake(Exception):
    """A user's mistake: one line that says what is wrong and what to do."""


def fail(message: str) -> NoReturn:
    raise Mistake(message)


def command(main: Callable) -> Callable:
    """Wrap a script's main: a user's mistake, an OSError, lack of memory and Ctrl-C are one line, with exit code 2."""

    @functools.wraps(main)
    def run(*args, **kwargs):
        # a console shows a question mark for a character that it cannot show, and a pipe gets each line at once
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace", line_buffering=True)
        try:
            return main(*args, **kwargs)
        except (Mistake, OSError) as e:
            message = str(e)
        except KeyboardInterrupt:
            message = "interrupted"
        except (MemoryError, RuntimeError) as e:
            # the CPU's allocator raises a plain RuntimeError
            known = isinstance(e, (MemoryError, torch.OutOfMemoryError))
            if not known and "can't allocate memory" not in str(e):
                raise
            message = "out of memory: take fewer or shorter rows at a time, or --dtype bf16"
        tqdm.write(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)  # on a line apart from a bar
        raise SystemExit(2)

    return run


WALK = (LookupError, TypeError, AttributeError)  # what a look into a parsed file raises if it has another shape


@contextmanager
def reading(path: Path | str, what: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn an error of reading or parsing a user's file into a mistake. also: WALK, where nothing is done inside but to
    look into what was parsed; elsewhere a KeyError is ours, and keeps its traceback."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        fail(f"there is no {what} at {path}")
    except (OSError, EOFError, ValueError, RecursionError, SafetensorError, zlib.error, *also) as e:
        why = f"no entry {e}" if isinstance(e, KeyError) else str(e)
        fail(f"{what} {path} cannot be read, is damaged, or of another kind: {why:.300}")


def checked_entry(about: dict, key: str, kind: type, where: Path | str) -> Any:
    """about[key] if it is of this type, else a mistake. Python itself would take true for 1, and compute with NaN."""
    value = about.get(key)
    fits = type(value) is kind
    if kind is float:
        # an integer will do, too, but not NaN, and not a number that no float can hold
        fits = type(value) in (int, float) and abs(value) < 1e300
    if not fits:
        fail(f"{where} is damaged, or of another kind: {key} is {value!r:.80}, and should be of type {kind.__name__}")
    return kind(value)


# --- flags
class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and a --help that keeps the docstring's layout and shows the defaults."""

    def __init__(self, doc: str):
        main = sys.modules["__main__"].__spec__  # None without `python -m`; argparse would name the module's file
        prog = f"python -m {main.name}" if main else None
        super().__init__(prog, description=doc, formatter_class=Manual, allow_abbrev=False)
        self.register("type", Path, user_path)
        self.register("action", None, Given)

    def parse_known_args(self, args=None, namespace=None):
        # argparse would read --prompt=-- as a flag without a value
        for word in sys.argv[1:] if args is None else args:
            if re.fullmatch("--[^=]+=--", word):
                self.error(f"{word}: -- cannot be a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.endswith(("expected one argument", "expected at least one argument")):
            message += "; one that begins with a dash is given with =, as in --prompt=-->"
        fail(f"{message} (see {self.prog} --help)")


class Given(argparse.Action):
    """Keep what a flag is given. A list flag that is given twice adds up; the first time it replaces its default."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest, None)
        more = self.nargs == "+" and before is not self.default
        setattr(namespace, self.dest, before + values if more else values)


def user_path(text: str) -> Path:
    """The path that a user has typed: ~/runs is a folder at home. It is printed as it is, so it must be printable."""
    if not text:
        raise argparse.ArgumentTypeError("this path is empty")
    if printable(text) != text or "\n" in text:
        raise argparse.ArgumentTypeError(f"this path has control characters in it: {text!r}")
    return Path(os.path.expanduser(text))


def place(text: str) -> str:
    """The type of a flag that is a path, or a word such as scratch."""
    return str(user_path(text))


class Manual(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if default in (None, argparse.SUPPRESS, []) or default is False or "(default" in action.help:
            return action.help
        # several values as a user types them
        typed = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{action.help} (default: {typed})"


def bounded(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """The type of a flag: a finite number of this kind in [low, high]."""

    def parse(text: str) -> float:
        value = kind(text)
        # NaN is in no range
        if not low <= value <= high or value == math.inf:
            least = f"lie in {low}..{high}" if high < math.inf else f"be finite, and at least {low}"
            raise argparse.ArgumentTypeError(f"must {least}, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse: "invalid int value: 'x'"
    return parse


def or_word(word: str, meaning: float | None, parse: Callable[[str], float]) -> Callable[[str], float | None]:
    """The type of a flag that may also be this word."""

    def number(text: str) -> float | None:
        return meaning if text.lower() == word else parse(text)

    return number


# --- what is printed
MASK = "▒"  # how a mask is typed and shown
# what a terminal obeys: control characters, halves of characters, and changes of the direction of writing
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """Text without commands for a terminal: "a\x1b[2J" -> "a<U+001B>[2J". Line ends and tabs stay."""
    return OBEYED.sub(lambda found: f"<U+{ord(found[0]):04X}>", str(text))


def quoted(path: Path | str) -> str:
    """A path in a command that is printed, as a shell reads it: my run -> 'my run'"""
    return shlex.quote(str(path))


def progress(items: Iterable, what: str, done: int = 0) -> tqdm:
    """Yield the items one by one, and show on a terminal how many have come. done: how many came before these."""
    total = done + len(items) if hasattr(items, "__len__") else None
    return tqdm(items, what, total=total, initial=done, leave=False, disable=None)  # None: unless it is a terminal


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    """Print a table. Its first column is aligned to the left, and the others to the right."""
    lines = [[printable(cell) for cell in line] for line in (titles, *rows)]
    width = [max(len(line[k]) for line in lines) for k in range(len(titles))]
    for first, *others in lines:
        cells = [first.ljust(width[0])]
        cells += [cell.rjust(w) for cell, w in zip(others, width[1:], strict=True)]
        print("  ".join(cells))


# --- files
UNFINISHED = ".unfinished"  # how the folders begin where files are until they are whole
LOCKED: dict[Path, int | None] = {}  # the folders that this process has locked, and their descriptors


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file in a folder of its own, then rename it: so even after a power cut the file is
    whole or not there. What a killed process leaves, the next `alone_in` removes."""
    check_same_folder(path.parent)
    try:
        make_folder(path.parent)
        with tempfile.TemporaryDirectory(prefix=f"{UNFINISHED}-", dir=path.parent, ignore_cleanup_errors=True) as own:
            temporary = Path(own) / path.name
            temporary.touch()
            usual = stat.S_IMODE(temporary.stat().st_mode)
            write(temporary)

            # safetensors makes files that only their owner may read: give them the usual permissions
            temporary.chmod(usual)
            flush(temporary)
            os.replace(temporary, path)
            flush(path.parent)
    except (OSError, SafetensorError) as e:  # no permission, no space
        fail(f"cannot write {path}: {e}; choose another folder or free some space")


def make_folder(folder: Path) -> None:
    """mkdir -p that a power cut does not undo."""
    if folder.is_symlink() and not folder.exists():
        fail(f"{folder} is a link to {os.readlink(folder)}, and nothing is there")
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folder
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder while a run writes into it, so that another run is refused. The folder is made if it is not there,
    and what a killed run left unfinished is removed. The kernel drops the lock when the process ends."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    make_folder(folder)
    number = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        lock(number, folder)
        LOCKED[folder] = number
        for left in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    except (OSError, Mistake):
        check_same_folder(folder)  # if the folder is gone, this is why the run failed
        raise
    finally:
        # a run that fails before it writes anything leaves no folder behind
        with suppress(OSError, Mistake):
            check_same_folder(folder)
            for place in new:
                place.rmdir()
        LOCKED.pop(folder, None)
        if number is not None:
            os.close(number)


def check_same_folder(folder: Path) -> None:
    """Refuse to write into a locked folder's place once that folder was deleted or moved: another run may be there."""
    number = LOCKED.get(folder)
    if number is not None and not (folder.exists() and os.path.samestat(folder.stat(), os.fstat(number))):
        fail(f"{folder} was deleted or moved while this run was writing into it, so the run cannot go on")


def lock(number: int | None, path: Path, wait: bool = False) -> None:
    """Lock a folder or file by its descriptor. If another process has locked it, fail at once, or wait for it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        fail(f"another run is writing into {path}: wait for its end, or write elsewhere")
    except OSError:
        pass  # some file systems, such as those of a network, have no locks


def write_json(path: Path, value: object) -> None:
    data = json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"
    replace_file(path, lambda temporary: temporary.write_bytes(data))


def copy_file(source: Path, path: Path) -> None:
    replace_file(path, lambda temporary: shutil.copyfile(source, temporary))


def read_json(path: Path, what: str) -> dict:
    """The JSON object in a file."""
    with reading(path, what):
        value = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
    return value


# --- records: lines of JSON, which are appended one by one
def whole_lines(data: bytes) -> bytes:
    """The data without a last line that a kill has cut short: b'{"a": 1}\\n{"a"' -> b'{"a": 1}\\n'"""
    before, end, last = data.rpartition(b"\n")
    try:
        json.loads(last)
        return data + b"\n"  # the last line is whole, and lacks only the line end
    except ValueError:
        return before + end


def read_lines(path: Path, kinds: dict[str, type], what: str = "file of records") -> list[dict]:
    """The records in the whole lines of a file. Each must be an object with entries of these kinds."""
    with reading(path, what):
        lines = whole_lines(path.read_bytes()).splitlines()
    records = []
    for n, line in enumerate(lines, 1):
        place = f"line {n} of {path}"
        with reading(place, f"{what}:"):
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
        records.append(record | {name: checked_entry(record, name, kind, place) for name, kind in kinds.items()})
    return records


def append_line(path: Path, record: dict) -> None:
    """Append a record to the whole lines of a file, of which there are none if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        lock(file.fileno(), path, wait=True)
        file.seek(0)
        held = file.read()
        whole = whole_lines(held)
        file.truncate(min(len(held), len(whole)))
        file.write(whole[len(held) :] + json.dumps(record).encode() + b"\n")


# --- randomness and the device
def generator(*key: int | str | tuple) -> torch.Generator:
    """A CPU generator that is a function of its key alone, so no random state needs to be saved."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def uniform(draws: list[torch.Generator], n: int) -> Tensor:
    """(R, n) float32 in [0, 1): each row is drawn by its own generator."""
    return torch.stack([torch.rand(n, generator=g) for g in draws])


def pick_device(name: str) -> torch.device:
    """The device with this name, after a try that it works; `auto`: an accelerator, or the CPU if there is none."""
    if name == "auto":
        name = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        fail(f"--device {name} is not usable here: {str(e).splitlines()[0]}")
    return torch.device(name)


# --- places
def smallest_masks(key: Tensor, masked: Tensor, size: Tensor | int) -> Tensor:
    """The `size` masks with the smallest keys; of equal keys the leftmost: key (..., T) float, masked (..., T) bool,
    size (..., 1) int64 or one for all -> (..., T) bool."""
    # positions that are not masked come last, whatever their keys are
    key = key.masked_fill(~masked, float("inf"))

    # order: which entry comes at each place; rank: the place of each entry. For .7 .9 .2 they are 2 0 1 and 1 2 0
    order = key.argsort(dim=-1, stable=True)
    rank = order.argsort(dim=-1)
    return masked & (rank < size)
