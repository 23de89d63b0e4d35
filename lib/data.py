"""What goes into the model: documents, and rows of ids.

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
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lib.tokenizer import Tokenizer, learn_bpe
from lib.util import entry, fail, generator, reading, write_json

# R rows, T positions of a row, N rows in the corpus

NAMES_VOCAB = 1024  # ids of the BPE that is learned for the corpus `names`
RECORDS = (".jsonl", ".jsonl.gz", ".parquet")


# --- documents
def load_text(sources: list[str], max_docs: int = 0) -> list[tuple[str, str]]:
    """Documents as (stable name, text): the first max_docs (0: all) of `names`, `stdlib`, or paths."""
    stream = chain.from_iterable(read_source(source) for source in sources)
    if max_docs:
        stream = islice(stream, max_docs)
    documents = list(stream)
    if not any(text for _, text in documents):
        fail(f"--data {' '.join(sources)} holds no text (or the filter on score and length left none)")
    return documents


def read_source(source: str) -> Iterator[tuple[str, str]]:
    """The documents of one source."""
    path = Path(source)
    if source == "names":
        return ((name, name) for name in unicode_names())
    if source == "stdlib":
        tests = {"test", "tests", "idle_test", "site-packages"}
        return read_folder(Path(sysconfig.get_path("stdlib")), "*.py", tests)
    if path.is_dir():
        return read_folder(path, "*", set())
    if path.exists():
        return read_file(path, path.name)
    fail(f"--data {source}: no such file or folder (and not `names`, `stdlib` or the name of a toy)")


def read_folder(root: Path, pattern: str, skip: set[str]) -> Iterator[tuple[str, str]]:
    """The documents of a folder in a fixed order, without what is hidden, skipped, or no text."""
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root)
        hidden = any(part.startswith(".") for part in inside.parts)
        skipped = not skip.isdisjoint(inside.parts)
        if path.is_file() and not hidden and not skipped:
            yield from read_file(path, inside.as_posix(), pass_over=True)


def read_file(path: Path, name: str, pass_over: bool = False) -> Iterator[tuple[str, str]]:
    """The documents of one file: its records, or its text. `pass_over`: none, if that is no UTF-8."""
    with reading(path, "corpus"):
        if path.name.endswith(RECORDS):
            for number, record in read_records(path):
                where = f"record {number} of corpus {path}"
                text = entry(record, "text", str, where)
                if passes_filter(record, where):
                    yield f"{name}:{number}", text
            return

        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            if not pass_over:
                raise


def passes_filter(record: dict, where: str) -> bool:
    """The paper's filter (Training). What is not stated passes."""
    for key, low, high in (("int_score", 3, math.inf), ("token_count", 256, 1800)):
        if record.get(key) is not None and not low <= entry(record, key, float, where) <= high:
            return False
    return True


def read_records(path: Path) -> Iterator[tuple[int, dict]]:
    """(number of the line or row, record)"""
    if path.suffix == ".parquet":
        yield from enumerate(read_parquet(path), 1)
        return
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                record = json.loads(line)
                if not isinstance(record, dict):
                    fail(f"record {number} of {path} is not a JSON object")
                yield number, record


def read_parquet(path: Path) -> Iterator[dict]:
    """The rows of a .parquet file."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        fail(f"--data {path}: reading .parquet needs pyarrow: pip install pyarrow, or convert the file to .jsonl")
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


# --- names
def unicode_names() -> Iterator[str]:
    """The names of all characters (about 31,600) but the numbered ones, which teach nothing: those that end
    in their code point (CJK UNIFIED IDEOGRAPH-4E00), Hangul's, and two long runs of numbers.
    """
    numbered = ("HANGUL SYLLABLE ", "TANGUT COMPONENT-", "VARIATION SELECTOR-")
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if name and not name.startswith(numbered) and not name.endswith(f"-{code:04X}"):
            yield name


def exists(name: str) -> str | None:
    """The character of exactly this name, or None."""
    try:
        found = unicodedata.lookup(name)
    except (KeyError, UnicodeEncodeError):  # unknown; a lone surrogate
        return None
    # lookup also takes lower case, aliases and sequences: none of them is a character's own name
    return found if unicodedata.name(found[0], "") == name else None


def learn_names(folder: Path) -> None:
    """A BPE of the names, learned once, and the Unicode version that it is of."""
    if not (folder / "tokenizer.json").exists():
        write_json(folder / "tokenizer.json", learn_bpe(unicode_names(), NAMES_VOCAB))
        write_json(folder / "names.json", {"unidata_version": unicodedata.unidata_version})


# --- rows
def is_validation(name: str) -> bool:
    """A stable split: one document in twenty, by the hash of its name alone."""
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


@dataclass
class Sequences:
    """Documents cut into rows of at most seq_len ids, one document a row, padded with eos.

    The stream goes through all rows again and again; row i of it is a function of (seed, i) alone. In
    training every batch has rows of one width, one block, two, four ... up to seq_len: so little is
    padding, and a row's random numbers, which depend on its width, do not depend on the rows beside it.
    """

    rows: list[np.ndarray]  # N rows of 1..seq_len int32 ids; a document's last row ends in eos
    seq_len: int
    pad_id: int
    seed: int
    block_length: int = 1
    batch_size: int = 0  # rows 0..batch_size-1 are of one width, and so on; 0: all rows are padded to seq_len
    prompts: bool = False  # a random beginning of each row is its prompt, as in conditional data

    def __post_init__(self) -> None:
        self.widths = [self.width(len(row)) for row in self.rows]
        self.epoch = 0  # the one in use, and its rows in order
        self.order = self.epoch_order(0)

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
        """Rows first .. first+rows of the stream: x (R, T) int64, real and prompt (R, T) bool."""
        chosen = [self.row(i) for i in range(first, first + rows)]
        x = torch.full((rows, max(self.widths[i] for i in chosen)), self.pad_id)
        real = torch.zeros_like(x, dtype=torch.bool)
        prompt = torch.zeros_like(real)
        for r, i in enumerate(chosen):
            ids = torch.from_numpy(self.rows[i])
            x[r, : len(ids)] = ids
            real[r, : len(ids)] = True
            if self.prompts:
                # from nothing to all of the text but its last token
                share = torch.rand(1, generator=generator(self.seed, "prompt", first + r))
                n_text = int((ids != self.pad_id).sum())
                prompt[r, : int(share * n_text)] = True
        return x, real, prompt

    def count_real(self, first: int, rows: int) -> int:
        """How many positions of these rows are no padding."""
        return sum(len(self.rows[self.row(i)]) for i in range(first, first + rows))

    def describe(self) -> str:
        return f"{len(self):,} rows, {sum(map(len, self.rows)):,} tokens"

    def row(self, i: int) -> int:
        """Which of the N rows is row i of the stream."""
        epoch, position = divmod(i, len(self.order))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = self.epoch_order(epoch)
        return self.order[position]

    def epoch_order(self, epoch: int) -> list[int]:
        """All rows in random order, in batches of one width. Every epoch is as long."""
        rng = generator(self.seed, "order", epoch)
        shuffled = torch.randperm(len(self), generator=rng).tolist()
        if self.batch_size == 0:
            return shuffled

        # of each width whole batches: np.resize fills the last one up with rows from the first
        batches = []
        for width in sorted(set(self.widths)):
            alike = [i for i in shuffled if self.widths[i] == width]
            n_batches = math.ceil(len(alike) / self.batch_size)
            batches += np.resize(alike, (n_batches, self.batch_size)).tolist()

        # in random order
        mixed = torch.randperm(len(batches), generator=rng).tolist()
        return [i for b in mixed for i in batches[b]]


@dataclass
class Corpus:
    """What a training run reads. A split's rows have batch, count_real and describe."""

    rows: dict[str, Any]  # "train" and "val"
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    geometry: dict  # what its tokens ask of a model's Config


def text_corpus(
    sources: list[str], tokenizer: Tokenizer, kind: str, seq_len: int, seed: int, max_docs: int = 0,
    block_length: int = 1, batch_size: int = 0,
) -> Corpus:  # fmt: skip
    """Rows of training in batches of one width; those of validation, the same in every run, all at seq_len."""
    train = []
    val = []
    for name, text in tqdm(load_text(sources, max_docs), desc="tokenize", leave=False, disable=None):
        ids = tokenizer.encode_document(text)

        # eos ends a document, and fills its last block: decoding fills it too, and must learn no length
        n_eos = block_length - len(ids) % block_length
        ids = np.pad(ids, (0, n_eos), constant_values=tokenizer.eos_id)

        part = val if is_validation(name) else train
        part.extend(ids[i : i + seq_len] for i in range(0, len(ids), seq_len))

    # all documents may fall on one side of the split: then the last 5 % of rows are for validation,
    # and a single row is both
    if not train or not val:
        every = train + val
        cut = max(1, len(every) // 20)
        train = every[:-cut] or every
        val = every[-cut:]

    # names are conditional data: each has a prompt
    make = partial(
        Sequences, seq_len=seq_len, pad_id=tokenizer.eos_id, block_length=block_length, prompts=sources == ["names"]
    )
    rows = {"train": make(train, seed=seed, batch_size=batch_size), "val": make(val, seed=0)}
    geometry = dict(
        tokenizer=kind, eos_id=tokenizer.eos_id, mask_id=tokenizer.mask_id, block_length=block_length,
        vocab_size=math.ceil(tokenizer.vocab_size / 16) * 16,  # padded, in a new model
    )  # fmt: skip
    return Corpus(rows, min(tokenizer.special.values()), geometry)
