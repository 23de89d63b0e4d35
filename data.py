"""Text and tokenizers: what goes into the model, as ids.

    Tokenizer    bytes (built in memory), or a released byte-level BPE `tokenizer.json`, both through tiktoken
    load_text    the running Python's standard library, a .txt, a folder, or FineWeb-Edu style records -> documents
    Sequences    documents -> rows of seq_len ids, never two documents in one row; the same row for the same index
    fail, Parser, replace_file, generator    the four small things that every script shares

It refuses what it cannot read exactly: a tokenizer that tiktoken cannot express, a record without text, no text at
all. Nothing is downloaded.

    python data.py --data stdlib --seq_len 256        # what a corpus holds, and its first row
"""

import argparse
import gzip
import hashlib
import json
import os
import sys
import sysconfig
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

# R rows, T positions of a row, N rows in the corpus

EOS, MASK = "<|endoftext|>", "<|mask|>"  # the released names; both tokenizers use them


# ---------------------------------------------------------------------------------------------------------------------
# what every script shares


def first_to_fail() -> bool:
    """Whether to speak for the run; of several processes (parallel.py), only the first one does."""
    return True


def fail(message: str) -> NoReturn:
    """A user's mistake: one line that says what is wrong and what to do, exit code 2."""
    if first_to_fail():
        print("error: " + " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """argparse whose error is one line, and whose --help keeps the layout of the script's docstring."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except (FileExistsError, NotADirectoryError):
        fail(f"cannot write {path}: {path.parent} is, or lies in, a file and not a folder; choose another one")
    except OSError as e:
        fail(f"cannot write {path}: {e.strerror or e}; choose another folder or free some space")
    finally:
        temporary.unlink(missing_ok=True) if path.parent.is_dir() else None


def write_json(path: Path, value: object) -> None:
    replace_file(path, lambda p: p.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n"))


def read_json(path: Path, what: str) -> dict:
    """A JSON object from a file, or one line about why not."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        fail(f"no {what} at {path}")
    except (OSError, ValueError) as e:
        fail(f"{what} {path} cannot be read as JSON: {e}")
    return value if isinstance(value, dict) else fail(f"{what} {path} is not a JSON object")


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator that is a function of its key alone, so that nothing random has a state to save or to lose."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def pick_device(name: str) -> torch.device:
    """`auto` takes cuda, then mps, then cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        fail(f"--device {name} is not usable here: {str(e).splitlines()[0]}")
    return torch.device(name)


def peak_memory(device: torch.device) -> str:
    """What the device has held at most; nothing on a CPU, where the operating system knows better."""
    return f", peak {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB" if device.type == "cuda" else ""


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


@dataclass
class Tokenizer:
    """A tiktoken.Encoding plus a map between its ranks and the model's ids.

    tiktoken wants a token's id to be its merge rank; a released vocabulary may number its tokens in any order, so the
    rank -> id map is kept beside it. `token_bytes[id]` is what a token stands for, b"" for special and unused ids.
    """

    encoding: tiktoken.Encoding
    ids: list[int]  # rank -> id
    special: dict[str, int]
    nfc: bool = False  # whether the released normaliser is Unicode NFC
    token_bytes: dict[int, bytes] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return 1 + max(*self.ids, *self.special.values())

    @property
    def eos_id(self) -> int:
        return self.special[EOS]

    @property
    def mask_id(self) -> int:
        return self.special[MASK]

    def encode(self, text: str) -> list[int]:
        """Text to ids; names of special tokens inside the text become those tokens, as in the released tokenizer."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        return [self.ids[r] for r in self.encoding.encode(text, allowed_special="all")]

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """Corpus text to int32 ids: here the name of a special token is ordinary text."""
        texts = [unicodedata.normalize("NFC", t) for t in texts] if self.nfc else texts
        ids = np.asarray(self.ids, dtype=np.int32)
        return [ids[np.asarray(r, dtype=np.int64)] for r in self.encoding.encode_ordinary_batch(texts, num_threads=2)]

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.token_bytes.get(i, b"") for i in ids)

    def decode(self, ids: list[int]) -> str:
        """Ids to text; special tokens are left out and bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def chat(self, user: str, system: str | None = None) -> list[int]:
        """The released chat template: a SYSTEM turn that is always there, one HUMAN turn, the opening of an answer."""
        missing = [t for t in ("<role>", "</role>", "<|role_end|>") if t not in self.special]
        if missing:
            fail(f"--chat needs a tokenizer with {', '.join(missing)}; this one has none: use --prompt without --chat")
        head = system + "\n" if system is not None else ""
        return self.encode(
            f"<role>SYSTEM</role>{head}detailed thinking off<|role_end|>"
            f"<role>HUMAN</role>{user}<|role_end|><role>ASSISTANT</role>"
        )


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens, eos 256, mask 257; nothing to download and every file is valid input."""
    ranks = {bytes([i]): i for i in range(256)}
    special = {EOS: 256, MASK: 257}
    encoding = tiktoken.Encoding("bytes", pat_str=r"(?s:.{1,256})", mergeable_ranks=ranks, special_tokens=special)
    return Tokenizer(encoding, list(range(258)), special, token_bytes={i: b for b, i in ranks.items()})


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in that byte-level BPE files use for each byte: itself if printable, else U+0100 onwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(shifted)}


def bpe_tokenizer(path: Path) -> Tokenizer:
    """A released `tokenizer.json` (byte-level BPE) as a tiktoken.Encoding with the same ids on every text.

    Refused with the reason: anything whose result tiktoken could not reproduce exactly.
    """
    spec = read_json(path, "tokenizer")
    try:
        pattern, nfc = check_pipeline(spec, path)
        alphabet = byte_alphabet()
        vocab = {bytes(alphabet[ch] for ch in token): i for token, i in spec["model"]["vocab"].items()}
        merges = [m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"]]
        merges = [tuple(bytes(alphabet[ch] for ch in part) for part in pair) for pair in merges]
        special = {t["content"]: t["id"] for t in spec["added_tokens"]}
    except (KeyError, TypeError, AttributeError) as e:
        fail(f"{path} is not a byte-level BPE tokenizer.json: unexpected or missing {e}")
    ranks = {bytes([b]): b for b in range(256)}
    for left, right in merges:
        # tiktoken merges any neighbours whose concatenation is known; that equals this merge list only if the pair is
        # what the earlier merges make of those bytes, and if no other merge makes the same token.
        if left + right in ranks or merge_bytes(left + right, ranks) != [left, right]:
            fail(f"{path}: merge {left!r} + {right!r} is not expressible in tiktoken (duplicate or out of order)")
        ranks[left + right] = len(ranks)
    if lacking := [t for t in ranks if t not in vocab]:
        fail(f"{path}: {len(lacking)} byte or merged tokens have no id, {lacking[0]!r} the first")
    encoding = tiktoken.Encoding(
        path.parent.name,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(special)},
    )
    ids = [vocab[t] for t in ranks] + list(special.values())
    return Tokenizer(encoding, ids, special, nfc, token_bytes={i: t for t, i in vocab.items()})


def check_pipeline(spec: dict, path: Path) -> tuple[str, bool]:
    """(pre-tokenizer pattern, whether NFC is applied) of a tokenizer.json; refuses every step that is not modelled."""
    model, normalizer, post = spec["model"], spec.get("normalizer"), spec.get("post_processor")
    pre = spec["pre_tokenizer"]
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    refused = [
        (model["type"] != "BPE", f"model {model['type']}"),
        (bool(model.get("ignore_merges") or model.get("dropout") or model.get("byte_fallback")), "a BPE option"),
        (normalizer is not None and normalizer["type"] != "NFC", f"normalizer {normalizer}"),
        (post is not None and post["type"] != "ByteLevel", f"post-processor {post}"),
        ([s["type"] for s in steps] != ["Split", "ByteLevel"], f"pre-tokenizer {[s['type'] for s in steps]}"),
        (steps[-1].get("add_prefix_space") or steps[-1].get("use_regex"), "ByteLevel with prefix space or regex"),
        (steps[0].get("behavior") != "Isolated" or steps[0].get("invert"), f"split behaviour {steps[0]}"),
        (any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in spec["added_tokens"]), "a stripping added token"),
    ]
    for bad, what in refused:
        if bad:
            fail(f"{path}: {what} cannot be expressed exactly in tiktoken, so this tokenizer is refused")
    return steps[0]["pattern"]["Regex"], normalizer is not None


def merge_bytes(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair merging of one token under the merges known so far, lowest rank first."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 1:
        rank, i = min((ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)))
        if rank == len(ranks):
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# documents


@dataclass(frozen=True)
class Filter:
    """The paper's document filter (Training): FineWeb-Edu score >= 3 and 256..1800 tokens; records without the
    fields pass. `max_docs` 0 means no limit."""

    min_score: int = 3
    min_tokens: int = 256
    max_tokens: int = 1800
    max_docs: int = 0

    def keeps(self, record: dict) -> bool:
        score, count = record.get("int_score"), record.get("token_count")
        return (score is None or score >= self.min_score) and (
            count is None or self.min_tokens <= count <= self.max_tokens
        )


def load_text(sources: list[str], keep: Filter) -> list[tuple[str, str]]:
    """Documents as (stable name, text): `stdlib`, or .txt / folder / .jsonl / .jsonl.gz / .parquet paths."""
    documents: list[tuple[str, str]] = []
    for source in sources:
        path = Path(source)
        if source == "stdlib":
            skip = {"test", "tests", "idle_test", "site-packages"}
            found = walk(Path(sysconfig.get_path("stdlib")), "*.py", skip)
        elif not path.exists():
            fail(f"--data {source}: no such file or folder (and not `stdlib` or the name of a toy)")
        else:
            found = walk(path, "*", set()) if path.is_dir() else read_file(path, path.name, keep)
        for document in found:
            documents.append(document)
            if len(documents) == keep.max_docs:
                return documents
    if not any(text for _, text in documents):
        fail(f"--data {' '.join(sources)} holds no text (or the filter on score and length left none)")
    return documents


def walk(root: Path, pattern: str, skip: set[str]) -> Iterator[tuple[str, str]]:
    """Every text file under a folder, in a fixed order; files that are not UTF-8 text are passed over."""
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root)
        if path.is_file() and not skip.intersection(inside.parts) and not any(p.startswith(".") for p in inside.parts):
            try:
                yield inside.as_posix(), path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue


def read_file(path: Path, name: str, keep: Filter) -> Iterator[tuple[str, str]]:
    """The documents of one file: a .txt is one document, records are filtered and one document each."""
    try:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
                records = ((n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip())
                yield from texts_of(records, name, keep)
        elif path.suffix == ".parquet":
            yield from texts_of(parquet_records(path), name, keep)
        else:
            yield name, path.read_text(encoding="utf-8")
    except json.JSONDecodeError as e:
        fail(f"--data {path}: a line is not JSON ({e}); expected one record with a `text` field a line")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as e:
        fail(f"--data {path} cannot be read as text: {e}")


def texts_of(records: Iterator[tuple[int, dict]], name: str, keep: Filter) -> Iterator[tuple[str, str]]:
    for n, record in records:
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            fail(f"--data {name}: record {n} has no `text` field")
        if not all(isinstance(record.get(f), int | float | None) for f in ("int_score", "token_count")):
            fail(f"--data {name}: record {n} has an int_score or token_count that is no number")
        if keep.keeps(record):
            yield f"{name}:{n}", record["text"]


def parquet_records(path: Path) -> Iterator[tuple[int, dict]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        fail(f"--data {path}: reading .parquet needs pyarrow: pip install pyarrow, or convert the file to .jsonl")
    try:
        table = parquet.ParquetFile(path)
        columns = [c for c in ("text", "int_score", "token_count") if c in table.schema_arrow.names]
        rows = (row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist())
        yield from enumerate(rows, 1)
    except (OSError, ValueError) as e:  # pyarrow's own errors derive from ValueError
        fail(f"--data {path} is not a readable parquet file: {e}")


def is_validation(name: str) -> bool:
    """A stable split: one document in twenty by the hash of its name, whatever the order or the number of files."""
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


# ---------------------------------------------------------------------------------------------------------------------
# rows


@dataclass
class Sequences:
    """Documents cut into rows of at most seq_len ids, one document a row, padded with eos at the end.

    Row i of the training stream is a function of (seed, i) alone: epoch i // N has its own permutation.
    """

    ids: np.ndarray  # int32, all documents end to end, each closed by eos
    spans: np.ndarray  # (N, 2) int64, first id and length of each row
    seq_len: int
    pad_id: int
    seed: int
    order: tuple[int, np.ndarray] = field(default=(-1, np.empty(0)))  # the epoch in use and its permutation

    def __len__(self) -> int:
        return len(self.spans)

    def batch(self, first: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows first .. first+rows of the stream: x (R, T) int64, real (R, T) bool, prompt (R, T) bool (none)."""
        x = torch.full((rows, self.seq_len), self.pad_id)
        real = torch.zeros_like(x, dtype=torch.bool)
        for r, i in enumerate(range(first, first + rows)):
            start, length = self.spans[self.shuffled(i)]
            x[r, :length] = torch.from_numpy(self.ids[start : start + length].astype(np.int64))
            real[r, :length] = True
        return x, real, torch.zeros_like(real)

    def count_real(self, first: int, rows: int) -> int:
        """Real tokens in these rows: the denominator of the loss, known before any forward."""
        return sum(int(self.spans[self.shuffled(i), 1]) for i in range(first, first + rows))

    def describe(self) -> str:
        return f"{len(self):,} rows, {int(self.spans[:, 1].sum()):,} tokens"

    def shuffled(self, i: int) -> int:
        epoch, position = divmod(i, len(self))
        if self.order[0] != epoch:
            permutation = torch.randperm(len(self), generator=generator(self.seed, "order", epoch))
            self.order = (epoch, permutation.numpy())
        return int(self.order[1][position])


def load_sequences(
    sources: list[str], tokenizer: Tokenizer, seq_len: int, seed: int, keep: Filter
) -> tuple[Sequences, Sequences]:
    """(train, validation) rows of a corpus. A corpus of few documents keeps its last 5 % of rows for validation."""
    documents = load_text(sources, keep)
    rows: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    parts, at = [], 0
    step = 256  # documents a batch: enough to keep tiktoken's threads busy, few enough for a moving bar
    for k in tqdm(range(0, len(documents), step), desc="tokenize", unit_scale=step, leave=False, disable=None):
        chunk = documents[k : k + step]
        for (name, _), ids in zip(chunk, tokenizer.encode_documents([text for _, text in chunk]), strict=True):
            ids = np.append(ids, np.int32(tokenizer.eos_id))
            starts = range(0, len(ids), seq_len)
            rows[is_validation(name)] += [(at + s, min(seq_len, len(ids) - s)) for s in starts]
            parts.append(ids)
            at += len(ids)
    train, val = rows[False], rows[True]
    if not train or not val:
        train = sorted(train + val)
        cut = max(1, len(train) // 20)
        train, val = train[:-cut] or train, train[-cut:]
    ids = np.concatenate(parts)
    return tuple(Sequences(ids, np.asarray(s, dtype=np.int64), seq_len, tokenizer.eos_id, seed) for s in (train, val))


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--data", nargs="+", default=["stdlib"], help="stdlib, or .txt / folder / .jsonl[.gz] / .parquet"
    )
    group.add_argument("--seq_len", type=int, default=256, help="ids in a row")
    args = parser.parse_args()
    if args.seq_len < 1:
        fail(f"--seq_len {args.seq_len}: a row holds at least one id")
    tokenizer = byte_tokenizer()
    train, val = load_sequences(args.data, tokenizer, args.seq_len, 0, Filter())
    for name, part in (("train", train), ("validation", val)):
        print(f"{name}: {part.describe()}, at most {args.seq_len} a row")
    x, real, _ = train.batch(0, 1)
    print(f"row 0 ({int(real.sum())} tokens):\n{tokenizer.decode(x[0, real[0]].tolist())}")


if __name__ == "__main__":
    main()
