"""What every script stands on: a user's mistakes, flags, files, random numbers, the device."""

import argparse
import functools
import hashlib
import io
import json
import math
import os
import shlex
import shutil
import stat
import sys
import time
import unicodedata
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
        # where a console has no sign for a character it shows a question mark; a pipe gets each line when it is written
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace", line_buffering=True)
        try:
            result = main(*args, **kwargs)
            if sys.stdout:  # None where a shell has closed it
                sys.stdout.flush()
            return result
        except Mistake as e:
            message = str(e)
        except BrokenPipeError:
            # `... | head -1`: nothing more can be written there, not even when Python closes it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(READER_IS_GONE) from None
        except KeyboardInterrupt:
            message = "interrupted"
        except OSError as e:
            message = str(e)
        except (MemoryError, RuntimeError) as e:  # the CPU's allocator raises a plain RuntimeError
            known = isinstance(e, (MemoryError, torch.OutOfMemoryError))
            if not known and "can't allocate memory" not in str(e):
                raise
            message = "out of memory: take fewer or shorter rows at a time, or --dtype bf16"
        print("error:", printable(" ".join(message.split())), file=sys.stderr)
        raise SystemExit(2)

    return run


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """While a user's file is read and parsed, and nothing else is done: what is raised meanwhile is its mistake."""
    try:
        # a pipe, or a device like /dev/zero, may never come to its end
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError("it is no ordinary file")
        yield
    except (FileNotFoundError, NotADirectoryError):
        fail(f"no {what} at {path}")
    except (
        OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError,
        SafetensorError, zlib.error,
    ) as e:  # fmt: skip
        why = f"no entry {e}" if isinstance(e, KeyError) else str(e)
        fail(f"{what} {path} cannot be read, is damaged, or of another kind: {why:.300}")


def checked_entry(about: dict, key: str, kind: type, where: Path | str) -> Any:
    """about[key], of this type, or one line about why not: Python would take true for 1, and count with NaN."""
    value = about.get(key)
    fits = type(value) is kind
    if kind is float:
        # a whole number is one, too; NaN, and what no float can hold, is none
        fits = type(value) in (int, float) and abs(value) < 1e300
    if not fits:
        fail(f"{where} is damaged, or of another kind: {key} is {value!r:.80}, and should be of type {kind.__name__}")
    return kind(value)


# --- flags
class Parser(argparse.ArgumentParser):
    """argparse whose error is one line, and whose --help keeps the layout of the docstring and shows every default."""

    def __init__(self, doc: str):
        main = sys.modules["__main__"].__spec__  # of `python -m`, which argparse takes for a file
        prog = f"python -m {main.name}" if main else None
        super().__init__(prog, description=doc, formatter_class=Manual, allow_abbrev=False)
        self.register("type", Path, place)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # Path("") is the folder that one happens to be in
        if action.type is Path and not text:
            raise argparse.ArgumentError(action, "this path is empty")
        return super()._get_value(action, text)

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


class Manual(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.help or ""
        switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        if action.default in (None, argparse.SUPPRESS, []) or "(default" in shown or switch:
            return shown
        # as one types it: folders without quotes, several with blanks between them
        values = action.default if isinstance(action.default, list) else [action.default]
        typed = " ".join("none" if value is None else str(value) for value in values).replace("%", "%%")
        return f"{shown} (default: {typed})"


def place(text: str) -> Path:
    """The type of a flag that names a file or a folder: Parser puts it wherever a flag says `type=Path`."""
    if not text:
        raise argparse.ArgumentTypeError("names no file and no folder: it is empty")
    return Path(text)


def as_flags(settings: dict, parser: Parser) -> list[str]:
    """{"seed": 1, "causal": true} -> --seed=1 --causal"""
    known = {action.dest for action in parser._actions} - {"help", "config"}
    flags = []
    for name, value in settings.items():
        if name not in known:
            fail(f"{name} = {value!r:.80} is no setting: see --help")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{name}")
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


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


# --- what is printed
COMMANDS = ("LRE", "RLE", "LRO", "RLO", "LRI", "RLI", "FSI", "PDF", "PDI")  # which turn the direction of writing


def printable(text: object) -> str:
    """Text in which a terminal finds no command: "a\x1b[2Jb" -> "a<U+001B>[2Jb". Lines and tabs stay as they are.

    For whatever comes from a model, a prompt, a file or its name.
    """
    shown = ""
    for character in str(text):
        obeyed = unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in COMMANDS
        shown += code_point(character) if obeyed and character not in "\n\t" else character
    return shown


def code_point(character: str) -> str:
    return f"<U+{ord(character):04X}>"


def quoted(path: Path | str) -> str:
    """A file or folder as a shell reads it, for commands that are printed: my run -> 'my run'"""
    return printable(shlex.quote(str(path)))


EVERY = 30  # seconds between two lines of progress


def progress(items: Iterable, what: str, total: int | None = None, done: int = 0) -> Iterator:
    """The items one by one, and how far they are: a bar in a terminal, and through a pipe a line now and then.

    total: how many there are, with the `done` ones that came before; left out, done + len(items) where that is known.
    """
    if total is None and hasattr(items, "__len__"):
        total = done + len(items)
    if sys.stderr and sys.stderr.isatty():
        yield from tqdm(items, what, total=total, initial=done, leave=False)
        return

    last = time.monotonic()
    for n, item in enumerate(items, done + 1):
        yield item
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            print(f"{what}: {n:,}" + (f" of {total:,}" if total else ""), file=sys.stderr, flush=True)


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    """A table whose first column stands to the left and whose others stand to the right."""
    lines = [[printable(cell) for cell in line] for line in (titles, *rows)]
    width = [max(len(line[k]) for line in lines) for k in range(len(titles))]
    for first, *others in lines:
        cells = [first.ljust(width[0])]
        cells += [cell.rjust(w) for cell, w in zip(others, width[1:], strict=True)]
        print("  ".join(cells))


MASK = "▒"  # how a mask is typed and shown


# --- files
UNFINISHED = ".unfinished"  # the folder, inside the one that is written to, where files are until they are whole


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then rename it: whole or not at all, also after a power cut.

    What a killed run leaves in UNFINISHED, under whatever name, the next `alone_in` removes.
    """
    temporary = path.parent / UNFINISHED / path.name
    try:
        make_folder(path.parent)
        temporary.parent.mkdir(exist_ok=True)
        temporary.touch()
        usual = stat.S_IMODE(temporary.stat().st_mode)
        write(temporary)

        # safetensors makes files of its own, which their owner alone may read: all get the rights that others have
        if stat.S_IMODE(temporary.stat().st_mode) != usual:
            temporary.chmod(usual)
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except (OSError, ValueError, SafetensorError) as e:  # no right, no space, a NUL byte in the name
        fail(f"cannot write {path}: {e}; choose another folder or free some space")
    finally:
        with suppress(ValueError):
            shutil.rmtree(temporary.parent, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """mkdir -p, which a power cut does not undo."""
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
    """While a run writes into a folder, which is made where there is none: another run is refused, and what a killed
    one left unfinished is removed. The kernel holds the lock for this process, and lets go of it when it ends."""
    if fcntl is None:
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        yield
        return

    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        make_folder(folder)
        number = os.open(folder, os.O_RDONLY)
    except (OSError, ValueError) as e:
        fail(f"cannot write {folder}: {e}; choose another folder")
    try:
        lock(number, folder)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        try:
            yield
        finally:
            # what fails before it has written anything leaves nothing behind
            with suppress(OSError):
                for place in new:
                    place.rmdir()
    finally:
        os.close(number)


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """While a run appends to a file, which is made where there is none: another run is refused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except (OSError, ValueError) as e:
        fail(f"cannot write {path}: {e}; choose another file")
    with file:
        lock(file.fileno(), path)
        yield


def lock(number: int, path: Path) -> None:
    """Lock a folder or a file, open under this number, for this process; fail at once where another one has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"another run is writing into {path}: wait for its end, or write elsewhere")
    except OSError:
        pass  # some file systems, as those of a network, have no locks


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    replace_file(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def copy_file(source: Path, path: Path) -> None:
    """A small file as it is."""
    content = read_bytes(source, "file to copy")
    replace_file(path, lambda temporary: temporary.write_bytes(content))


def read_bytes(path: Path, what: str) -> bytes:
    """A file's content, or one line about why not."""
    with reading(path, what):
        return path.read_bytes()


def read_json(path: Path, what: str) -> dict:
    """A JSON object from a file, or one line about why not."""
    with reading(path, what):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("it is no JSON object")
    return value


# --- records: a line of JSON each, appended one by one
def whole_lines(data: bytes) -> bytes:
    """Without a last line that a kill has cut short: b'{"a": 1}\\n{"a"' -> b'{"a": 1}\\n'"""
    before, end, last = data.rpartition(b"\n")
    try:
        json.loads(last)
        return data + b"\n"  # it lacks nothing but its end
    except ValueError:
        return before + end


def read_lines(path: Path, kinds: dict[str, type], what: str = "file of records") -> list[dict]:
    """The whole lines of a file of records, each an object with entries of these kinds."""
    with reading(path, what):
        records = [json.loads(line) for line in whole_lines(path.read_bytes()).splitlines()]
        if not all(isinstance(record, dict) for record in records):
            raise TypeError("a line of it is no JSON object")
    for n, record in enumerate(records, 1):
        record |= {name: checked_entry(record, name, kind, f"line {n} of {path}") for name, kind in kinds.items()}
    return records


def append_line(path: Path, record: dict) -> None:
    """A record behind the whole lines of a file, which may be new."""
    line = json.dumps(record).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            held = file.read()
            file.truncate(min(len(held), len(whole_lines(held))))
            file.write(whole_lines(held)[len(held) :] + line)
    except OSError as e:
        fail(f"cannot write {path}: {e}")


SPECIAL = {"eos_id": "<|endoftext|>", "mask_id": "<|mask|>"}  # the released names; every tokenizer.json has them


def check_special(folder: Path, where: Path, eos_id: int, mask_id: int) -> None:
    """Refuse ids in the file `where` that a folder's tokenizer.json has for other tokens."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    spec = read_json(path, "tokenizer")
    with reading(path, "tokenizer"):
        ids = {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
    for name, own in (("eos_id", eos_id), ("mask_id", mask_id)):
        if ids.get(SPECIAL[name], own) != own:
            fail(f"{where}: {name} is {own}, and {path} has {ids[SPECIAL[name]]} for it: which one is meant?")


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


THREADS = torch.get_num_threads()


def one_thread_if_small(n_embd: int) -> None:
    """On a CPU matrices this small are done before two threads have met. On a busy machine two threads trained a model
    of names seven times slower than one. Whoever makes a model says its width here; the last one counts.
    OMP_NUM_THREADS, where it is set, decides."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if n_embd <= 256 else THREADS)


# --- places
def smallest_masks(key: Tensor, masked: Tensor, size: Tensor | int) -> Tensor:
    """The `size` masks of smallest key, leftmost of equals.

    key (..., T) float, masked (..., T) bool, size (..., 1) int64 or one for all -> (..., T) bool.
    """
    # what is not masked comes last, whatever its key is
    key = key.masked_fill(~masked, float("inf"))

    # argsort says which entry stands at a place, its argsort where an entry stands:
    # .7 .2 .9 -> 1 0 2
    order = key.argsort(dim=-1, stable=True)
    rank = order.argsort(dim=-1)
    return masked & (rank < size)
