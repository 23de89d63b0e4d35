"""What goes into the model: documents, and rows of ids. And the small things that every script
shares.

    load_text    names of Unicode characters, Python's own sources, .txt, a folder, FineWeb-Edu records -> documents
    Sequences    documents -> rows of seq_len ids, never two documents in one row; the same row for the same index

Nothing is downloaded, and what cannot be read exactly is refused. Tokenizers are in tokenizer.py.
"""

import gzip
import hashlib
import json
import math
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lib.tokenizer import Tokenizer
from lib.util import fail, generator

try:
    import unicodedata
except ImportError:  # a Python built without it: `names` is refused
    unicodedata = None

# R rows, T positions of a row, N rows in the corpus

NAMES_VOCAB = 1024  # ids of the BPE that is learned for the corpus `names`


# ---------------------------------------------------------------------------------------------------------------------
# documents


def load_text(sources: list[str], max_docs: int = 0) -> list[tuple[str, str]]:
    """Documents as (stable name, text), the first max_docs (0: all) of `names`, `stdlib`, or paths:
    .txt / folder / .jsonl / .jsonl.gz / .parquet.
    """
    stream = chain.from_iterable(read_source(source) for source in sources)
    if max_docs:
        stream = islice(stream, max_docs)
    documents = list(stream)
    if not any(text for _, text in documents):
        fail(f"--data {' '.join(sources)} holds no text (or the filter on score and length left none)")
    return documents


def read_source(source: str) -> Iterator[tuple[str, str]]:
    """The documents of one source."""
    if source == "names":
        for name in unicode_names():
            yield name, name
        return

    if source == "stdlib":
        tests = {"test", "tests", "idle_test", "site-packages"}
        yield from read_folder(Path(sysconfig.get_path("stdlib")), "*.py", tests)
        return

    root = Path(source)
    if root.is_dir():
        yield from read_folder(root, "*", set())
    elif root.exists():
        yield from read_file(root, root.name)
    else:
        fail(f"--data {source}: no such file or folder (and not `names`, `stdlib` or the name of a toy)")


def read_folder(root: Path, pattern: str, skip: set[str]) -> Iterator[tuple[str, str]]:
    """The documents of a folder in a fixed order, without its hidden files and the folders named in
    `skip`.
    """
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root)
        hidden = any(part.startswith(".") for part in inside.parts)
        skipped = any(part in skip for part in inside.parts)
        if path.is_file() and not hidden and not skipped:
            yield from read_file(path, inside.as_posix(), pass_over=True)


RECORDS = (".jsonl", ".jsonl.gz", ".parquet")


def read_file(path: Path, name: str, pass_over: bool = False) -> Iterator[tuple[str, str]]:
    """The documents of one file: its records, or one document of text. `pass_over`: none, if it
    holds no text.
    """
    holds_records = path.name.endswith(RECORDS)
    try:
        if holds_records:
            for number, record in read_records(path):
                check_record(path, number, record)
                if passes_filter(record):
                    yield f"{name}:{number}", record["text"]
        else:
            yield name, path.read_text(encoding="utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as e:  # errors of JSON, UTF-8 and pyarrow are ValueErrors
        if holds_records or not pass_over:
            fail(f"--data {path} cannot be read as text, or as one JSON record a line: {e}")


def check_record(path: Path, number: int, record: object) -> None:
    """A record has a text. FineWeb-Edu's fields may be missing, but are numbers."""
    good = isinstance(record, dict) and isinstance(record.get("text"), str)
    for field_name in ("int_score", "token_count"):
        good = good and isinstance(record.get(field_name), int | float | None)
    if not good:
        fail(f"--data {path}: record {number} has no `text` field, or an int_score or token_count that is no number")


def passes_filter(record: dict) -> bool:
    """The paper's filter (Training): educational score 3 or more, 256 to 1800 tokens. What is not
    stated passes.
    """
    score = record.get("int_score")
    if score is not None and not score >= 3:
        return False
    count = record.get("token_count")
    return count is None or 256 <= count <= 1800


def read_records(path: Path) -> Iterator[tuple[int, object]]:
    """(number of the line or row, record)"""
    if path.suffix == ".parquet":
        yield from enumerate(read_parquet(path), 1)
        return

    open_text = open
    if path.suffix == ".gz":
        open_text = gzip.open
    with open_text(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, json.loads(line)


def read_parquet(path: Path) -> Iterator[dict]:
    """The rows of a .parquet file, of the three columns that matter."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        fail(f"--data {path}: reading .parquet needs pyarrow: pip install pyarrow, or convert the file to .jsonl")
    table = parquet.ParquetFile(path)
    there = table.schema_arrow.names
    columns = [column for column in ("text", "int_score", "token_count") if column in there]
    for batch in table.iter_batches(columns=columns):
        yield from batch.to_pylist()


# ---------------------------------------------------------------------------------------------------------------------
# names


def unicode_names() -> Iterator[str]:
    """The names of all characters (about 31,600) but the numbered ones, which teach and test
    nothing: those that end in their code point (CJK UNIFIED IDEOGRAPH-4E00), the computed ones of
    Hangul, and two long runs of numbers.
    """
    if unicodedata is None:
        fail("--data names: this Python was built without its module unicodedata; use another Python")
    numbered = ("HANGUL SYLLABLE ", "TANGUT COMPONENT-", "VARIATION SELECTOR-")
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if not name or name.startswith(numbered):
            continue
        if not name.endswith(f"-{code:04X}"):
            yield name


def exists(name: str) -> str | None:
    """The character of exactly this name in `unicodedata.unidata_version`, numbered or not, or
    None.
    """
    try:
        found = unicodedata.lookup(name)
    except (KeyError, UnicodeEncodeError):  # unknown; a lone surrogate
        return None

    # lookup also takes lower case, aliases and sequences: none of them is a character's own name
    if unicodedata.name(found[0], "") != name:
        return None
    return found


def check_names(about: dict, prompts: list[str]) -> bool:
    """Whether completions can be judged: by a model of names, in a Python that knows them. A line
    for each doubt.
    """
    taught = about.get("unidata_version")
    if unicodedata is None:
        here = "unknown: it has no module unicodedata"
        print(f"note: the model learned the names of Unicode {taught}, this Python's are {here}", file=sys.stderr)
        return False

    known = unicodedata.unidata_version
    if known != taught:
        print(f"note: the model learned the names of Unicode {taught}, this Python's are {known}", file=sys.stderr)
    for prompt in prompts:
        if not begins_a_name(prompt):
            print(f"note: no character's name begins with {prompt!r}", file=sys.stderr)
    return True


def begins_a_name(prompt: str) -> bool:
    every = range(sys.maxunicode + 1)
    return any(unicodedata.name(chr(code), "").startswith(prompt) for code in every)


# ---------------------------------------------------------------------------------------------------------------------
# rows


def is_validation(name: str) -> bool:
    """A stable split: one document in twenty by the hash of its name, whatever the order or the
    number of files.
    """
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


@dataclass
class Sequences:
    """Documents cut into rows of at most seq_len ids, one document a row, padded with eos at the
    end.

    The stream goes through all rows again and again. Row i of it is a function of (seed, i) alone.
    In training every batch holds rows of one width: one block, two, four ... up to seq_len. So
    little of it is padding; and a row's width, on which its random numbers depend, does not depend
    on the rows beside it.
    """

    rows: list[np.ndarray]  # N rows of 1..seq_len int32 ids; a document's last row ends in eos
    seq_len: int
    pad_id: int
    seed: int
    block_length: int = 1
    batch_size: int = 0  # rows 0..batch_size-1 are of one width, and so on; 0: all rows are padded to seq_len
    order: dict[int, list[int]] = field(default_factory=dict)  # the epoch in use, and its rows in order

    def __post_init__(self) -> None:
        self.widths = [self.width(len(row)) for row in self.rows]
        self.epoch_length = len(self.epoch_order(0))

    def __len__(self) -> int:
        return len(self.rows)

    def width(self, n: int) -> int:
        """Of a row of n ids: one block, two, four ..., seq_len, the first that holds it."""
        if self.batch_size == 0:
            return self.seq_len
        width = self.block_length
        while width < n:
            width *= 2
        return min(width, self.seq_len)

    def batch(self, first: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows first .. first+rows of the stream: x (R, T) int64, real (R, T) bool, prompt (R, T)
        bool (none).
        """
        chosen = [self.row(i) for i in range(first, first + rows)]
        x = torch.full((rows, max(self.widths[i] for i in chosen)), self.pad_id)
        real = torch.zeros_like(x, dtype=torch.bool)
        prompt = torch.zeros_like(real)
        for r, i in enumerate(chosen):
            ids = torch.from_numpy(self.rows[i])
            x[r, : len(ids)] = ids
            real[r, : len(ids)] = True
        return x, real, prompt

    def count_real(self, first: int, rows: int) -> int:
        """How many positions of these rows are no padding."""
        return sum(len(self.rows[self.row(i)]) for i in range(first, first + rows))

    def describe(self) -> str:
        tokens = sum(len(row) for row in self.rows)
        return f"{len(self):,} rows, {tokens:,} tokens"

    def row(self, i: int) -> int:
        """Which of the N rows is row i of the stream."""
        epoch, position = divmod(i, self.epoch_length)
        if epoch not in self.order:
            self.order = {epoch: self.epoch_order(epoch)}
        return self.order[epoch][position]

    def epoch_order(self, epoch: int) -> list[int]:
        """All rows in random order, in batches of one width."""
        rng = generator(self.seed, "order", epoch)
        shuffled = torch.randperm(len(self), generator=rng).tolist()
        if self.batch_size == 0:
            return shuffled

        # of each width whole batches: the last one is filled up with rows from the first
        batches = []
        for width in sorted(set(self.widths)):
            alike = [i for i in shuffled if self.widths[i] == width]
            n_batches = math.ceil(len(alike) / self.batch_size)
            alike = np.resize(alike, (n_batches, self.batch_size))  # repeats what it has
            batches += alike.tolist()

        # in random order
        order = []
        for b in torch.randperm(len(batches), generator=rng).tolist():
            order += batches[b]
        return order


def load_sequences(
    sources: list[str], tokenizer: Tokenizer, seq_len: int, seed: int, max_docs: int = 0, block_length: int = 1,
    batch_size: int = 0,
) -> tuple[Sequences, Sequences]:  # fmt: skip
    """(train, validation) rows of a corpus. A corpus of few documents keeps its last 5 % of rows
    for validation.

    The training rows come in batches of one width; the validation rows, which are few, all at
    seq_len.
    """
    documents = load_text(sources, max_docs)
    train, val = [], []
    for name, text in tqdm(documents, desc="tokenize", leave=False, disable=None):
        ids = tokenizer.encode_document(text)

        # eos ends a document, and fills its last block: decoding fills it too, and must not learn a
        # length
        n_eos = block_length - len(ids) % block_length
        ids = np.pad(ids, (0, n_eos), constant_values=tokenizer.eos_id)

        part = val if is_validation(name) else train
        part.extend(ids[i : i + seq_len] for i in range(0, len(ids), seq_len))

    # few documents may all fall on one side of the split
    if not train or not val:
        every = train + val
        cut = max(1, len(every) // 20)
        train = every[:-cut]
        val = every[-cut:]
        if not train:  # a single row is both
            train = every

    return (
        Sequences(train, seq_len, tokenizer.eos_id, seed, block_length, batch_size),
        Sequences(val, seq_len, tokenizer.eos_id, seed, block_length),
    )
