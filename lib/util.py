"""What every script stands on: a user's mistakes, flags, files, random numbers, the device, time."""

import argparse
import functools
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
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
        # where a console has no sign for a character it shows a question mark
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
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
    """While a user's file is read and parsed: what is raised meanwhile is its mistake."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        fail(f"no {what} at {path}")
    except (OSError, ValueError, RecursionError, SafetensorError, EOFError, zlib.error) as e:
        fail(f"{what} {path} cannot be read, is damaged, or of another kind: {e}")


def entry(about: dict, key: str, kind: type, where: Path | str) -> Any:
    """about[key], of this type, or one line about why not. about is a JSON object, found in `where`."""
    value = about.get(key)
    fits = type(value) is kind
    if kind is float:
        fits = is_number(value) and type(value) is not bool
    if not fits:
        fail(f"{where} is damaged, or of another kind: {key} is {value!r:.80}, and should be of type {kind.__name__}")
    return kind(value)


def is_number(value: object) -> bool:
    """A whole number is one, too; NaN, and what no float can hold, is none."""
    return isinstance(value, (int, float)) and abs(value) < 1e300


def objects(about: dict, key: str, where: Path | str) -> list[dict]:
    """about[key], a list of JSON objects, or one line about why not."""
    values = entry(about, key, list, where)
    if not all(type(value) is dict for value in values):
        fail(f"{where} is damaged, or of another kind: {key} is not a list of objects alone")
    return values


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
TABLE = "defaults, by kind of run; of each after the first, where it differs from the first:"


class Parser(argparse.ArgumentParser):
    """argparse whose error is one line, and whose --help keeps the layout of the docstring.

    runs: {a kind of run: all its defaults}. Then parse_args returns what was given alone, and --help has
    the defaults as a table: the first kind's, and where each other one differs.
    """

    def __init__(self, doc: str, runs: dict[str, dict] | None = None):
        how = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        if runs:
            first, *others = runs
            lines = [f"  {first}: {settings_line(runs[first])}"]
            for kind in others:
                own = {k: v for k, v in runs[kind].items() if v != runs[first][k]}
                lines.append(f"  {kind}: {settings_line(own)}")
            wrapped = [textwrap.fill(line, 110, subsequent_indent="      ") for line in lines]
            how |= dict(argument_default=argparse.SUPPRESS, epilog="\n".join([TABLE, *wrapped]))
        super().__init__(description=doc, **how)

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


# --- what is printed
def print_table(titles: list[str], rows: list[list[str]]) -> None:
    """A table whose first column stands to the left and whose others stand to the right."""
    lines = [titles, *rows]
    width = [max(len(line[k]) for line in lines) for k in range(len(titles))]
    for first, *others in lines:
        cells = [first.ljust(width[0])]
        cells += [cell.rjust(w) for cell, w in zip(others, width[1:], strict=True)]
        print("  ".join(cells))


MASK = "▒"
END = "∎"
LEGEND = f"[written now]  [Stage B's](A: what Stage A would write)  {{edited}}  {MASK} a mask  {END} the end"
PACE = 0.4  # seconds that a drawn step stands


class Screen:
    """A line for each row, drawn again in place after every step; a plain log through a pipe, or with NO_COLOR.

    tokenizer: a lib.tokenizer.Tokenizer, or None where tokens are numbers.
    """

    CODES = {"green": 32, "yellow": 33, "magenta": 35, "dim": 2}

    def __init__(self, n_rows: int, tokenizer: Any, mask_id: int, eos_id: int):
        self.tokenizer = tokenizer
        self.signs = {eos_id: END, mask_id: MASK}
        self.moves = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.lines = [""] * n_rows
        self.steps = 0
        print(LEGEND)

    def on_step(self, rows: list[Any], step: Any) -> None:
        """Show the rows in flight, each a cache.Row, after a sample.Step."""
        self.steps += 1
        for r, row in enumerate(rows):
            before = self.tokenizer.decode(row.ids) if self.tokenizer else "".join(f"{i} " for i in row.ids)
            self.draw(row.number, before, self.block(step, r))

        # in place: from the first line on
        if self.moves:
            if self.steps > 1:
                print(f"\x1b[{len(self.lines)}F", end="")
            for line in self.lines:
                print(f"\x1b[2K{line}")
            sys.stdout.flush()
            time.sleep(PACE)

    def draw(self, number: int, before: str, block: str) -> None:
        """The line of the row of this number: the text before its block, and the block."""
        # a line that is too long loses its beginning, or the cursor would not find it again
        room = shutil.get_terminal_size().columns - 10 - len(re.sub(r"\x1b\[\d+m", "", block))
        if self.moves and len(before) > room:
            before = before[len(before) - max(0, room) :]
        self.lines[number] = f"step {self.steps:3}  {before}{block}"
        if not self.moves:
            print(self.lines[number])

    def block(self, step: Any, r: int) -> str:
        """Row r's block after the step, marked as LEGEND says."""
        line = ""
        for i, token in enumerate(step.after[r].tolist()):
            word = self.word(token)
            alone = int(step.token_a[r, i])
            if step.edited[r, i]:
                line += self.paint(f"{{{word}}}", "magenta")
            elif step.bundle[r, i] and token == alone:
                line += self.paint(f"[{word}]", "green")
            elif step.bundle[r, i]:
                line += self.paint(f"[{word}]", "yellow") + self.paint(f"(A: {self.word(alone)})", "dim")
            else:
                line += self.paint(word, "dim") if word.startswith(MASK) else word
        return line

    def word(self, token: int) -> str:
        """A token as it is shown; numbers stand apart."""
        if not self.tokenizer:
            return self.signs.get(token, str(token)) + " "
        return self.signs.get(token) or self.tokenizer.piece(token).replace("·", " ")

    def paint(self, text: str, colour: str) -> str:
        return f"\x1b[{self.CODES[colour]}m{text}\x1b[0m" if self.moves else text


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


def rewind_log(path: Path, it: int) -> None:
    """Drop lines at or after iteration `it` (written after the last save) and a line cut short by a kill."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            end = it + ("val" in record)  # a validation at `it` is of the weights that were saved
            if not all(is_number(value) for value in record.values()):
                break
            if record["step"] < end:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            break
    replace_file(path, lambda temporary: temporary.write_bytes(b"".join(kept)))


# --- a training run: its settings, its log, its rate
def resumed(given: dict, folder: Path, parser: Parser, runs: dict[str, dict], free: set[str]) -> dict:
    """The saved run's settings, and those of the command line that a resumed run may change."""
    path = folder / "train.json"
    saved = read_json(path, "training run to resume (--out_dir of an earlier run)")

    # what is saved has to be what the flags could say
    kind = entry(saved, "run", str, path)
    if kind not in runs:
        fail(f"{path}: there is no run of the kind {kind!r}; start in a new --out_dir")
    for name, default in runs[kind].items():
        if name not in saved:
            fail(f"{path} lacks {name}: it is damaged, or another script's; start in a new --out_dir")
        value = saved[name]
        if (type(value) is bool and type(default) is bool) or value == default:
            continue
        words = value if isinstance(value, list) and isinstance(default, list) else [value]
        try:
            parsed = vars(parser.parse_args([f"--{name}", *map(str, words)]))
        except Mistake:
            parsed = {}
        if name not in parsed or parsed[name] != value:
            fail(f"{path}: {name} is {value!r:.80}: it is damaged, or another script's; start in a new --out_dir")

    for name in given.keys() - {"init_from", "out_dir"}:
        if given[name] != saved[name] and name not in free:
            fail(f"--{name} {given[name]} differs from the run's {saved[name]}: leave it out, or use a new --out_dir")
        saved[name] = given[name]
    return saved | {"out_dir": str(folder)}


def resume_flags(out_dir: str | Path) -> str:
    return f"--init_from resume --out_dir {out_dir}"


def settings_line(settings: dict) -> str:
    """{"seed": 0, "toy": ["V=3", "m=2"], "preset": None} -> seed 0, toy V=3 m=2"""
    shown = {name: " ".join(value) if isinstance(value, list) else value for name, value in settings.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value not in (None, ""))


def report(record: dict, title: str, log: TextIO, shown: bool) -> None:
    """One line of log.jsonl, and one for people."""
    log.write(json.dumps(record) + "\n")
    if shown:
        figures = [f"{k} {v:.4g}" for k, v in record.items() if k not in ("step", "val")]
        tqdm.write(" | ".join([title, *figures]))


def draw_curve(folder: Path) -> None:
    """log.jsonl as a small picture beside it, curve.svg: the loss of every step, and a line through their means."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    loss = [record["loss"] for record in records if "loss" in record]
    if not loss:
        return
    width, height = 640, 240
    top = 1.05 * max(loss)

    def line(points: list[tuple[float, float]], style: str) -> str:
        places = " ".join(f"{50 + x / len(loss) * (width - 120):.1f},{height - 30 - y / top * (height - 50):.1f}"
                          for x, y in points)  # fmt: skip
        return f'<polyline points="{places}" fill="none" {style}/>'

    # means of forty stretches
    n = max(1, len(loss) // 40)
    means = [(i + n / 2, statistics.mean(loss[i : i + n])) for i in range(0, len(loss), n)]
    last = height - 30 - means[-1][1] / top * (height - 50)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        line(list(enumerate(loss)), 'stroke="#b9c3cd"'),
        line(means, 'stroke="#1f6fb5" stroke-width="2"'),
        f'<text x="{width - 65}" y="{last:.0f}" fill="#1f6fb5">{means[-1][1]:.2f}</text>',
        f'<text x="8" y="20" fill="#444444">{top:.1f}</text><text x="8" y="{height - 26}" fill="#444444">0</text>',
        f'<text x="50" y="{height - 8}" fill="#444444">training loss a real token, nats; {len(loss):,} steps</text>',
        "</svg>",
    ]
    replace_file(folder / "curve.svg", lambda temporary: temporary.write_text("\n".join(parts) + "\n"))


def check_finite(record: dict, what: str, it: int, saved: int, args: argparse.Namespace) -> None:
    """Stop a run that has diverged, and name the good checkpoint: its own validation was finite."""
    bad = [f"{k} {v}" for k, v in record.items() if not math.isfinite(v)]
    if not bad:
        return
    good = "none was saved yet"
    if saved:
        good = f"the checkpoint of step {saved} in {args.out_dir} is good ({resume_flags(args.out_dir)})"
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


class Together:
    """Several optimizers as one, each with one group of parameters."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        self.param_groups = [part.param_groups[0] for part in parts]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """What they remember of each parameter."""
        return {p: part.state[p] for part in self.parts for p in part.param_groups[0]["params"]}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


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


def fast_kernels(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """On a CPU in bf16 plain products are faster than flash attention on rows as short as a name."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


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
def first_masked(key: Tensor, masked: Tensor, size: Tensor | int) -> Tensor:
    """The `size` masks of smallest key, leftmost of equals.

    key (..., B) float, masked (..., B) bool, size (..., 1) int64 or one for all -> (..., B) bool.
    """
    # what is not masked comes last, whatever its key is
    key = key.masked_fill(~masked, float("inf"))

    # argsort says which entry stands at a place, its argsort where an entry stands:
    # .7 .2 .9 -> 1 0 2
    order = key.argsort(dim=-1, stable=True)
    rank = order.argsort(dim=-1)
    return masked & (rank < size)
