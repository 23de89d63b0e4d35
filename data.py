"""Text and tokenizers: what goes into the model, as ids, and the small things that every script shares.

    Tokenizer    bytes, or a byte-level BPE `tokenizer.json`: a released one, or one that learn_bpe made
    load_text    names of Unicode characters, Python's own sources, .txt, a folder, FineWeb-Edu records -> documents
    Sequences    documents -> rows of seq_len ids, never two documents in one row; the same row for the same index

Nothing is downloaded, and what cannot be read exactly is refused.
"""

import argparse
import gzip
import hashlib
import json
import math
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

try:
    import unicodedata
except ImportError:  # a Python built without it: `names` is refused
    unicodedata = None

# R rows, T positions of a row, N rows in the corpus
NAMES_VOCAB = 1024  # ids of the BPE that is learned for the corpus `names`
EOS, MASK = "<|endoftext|>", "<|mask|>"  # the released names; every tokenizer uses them


def fail(message: str) -> NoReturn:
    """A user's mistake: one line that says what is wrong and what to do, exit code 2."""
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """argparse whose error is one line, and whose --help keeps the layout of the script's docstring."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def bounded(kind: type, low: float, high: float = math.inf, none: bool = False) -> Callable[[str], float | None]:
    """The type of a flag: a finite number of this kind in [low, high], or the word "none" where that is allowed."""

    def parse(text: str) -> float | None:
        if none and text.lower() == "none":
            return None
        try:
            value = kind(text)
        except ValueError:
            what = 'neither a number nor "none"' if none else "no whole number" if kind is int else "no number"
            raise argparse.ArgumentTypeError(f"{text!r} is {what}") from None
        if not low <= value <= high or value == math.inf:
            span = f"must be at least {low}, and finite" if high == math.inf else f"must lie in {low}..{high}"
            raise argparse.ArgumentTypeError(f"{span}, not {text}")
        return value

    return parse


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
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
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        fail(f"--device {name} is not usable here: {str(e).splitlines()[0]}")
    return torch.device(name)


@dataclass
class Tokenizer:
    """A tiktoken.Encoding, which numbers its tokens by merge rank, and the model's ids, which may have any order."""

    encoding: tiktoken.Encoding
    ids: list[int]  # rank -> id
    special: dict[str, int]
    nfc: bool = False  # whether the released normaliser is Unicode NFC
    token_bytes: dict[int, bytes] = field(default_factory=dict)  # none for special and unused ids

    def __post_init__(self) -> None:
        self.vocab_size = 1 + max([*self.ids, *self.special.values()])
        self.eos_id, self.mask_id = self.special.get(EOS), self.special.get(MASK)

    def encode(self, text: str) -> list[int]:
        """Text to ids; names of special tokens become those tokens, as in the released tokenizer."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        return [self.ids[r] for r in self.encoding.encode(text, allowed_special="all")]

    def encode_document(self, text: str) -> np.ndarray:
        """Corpus text to int32 ids: here the name of a special token is ordinary text."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        return np.array([self.ids[r] for r in self.encoding.encode_ordinary(text)], dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Ids to text; special tokens are left out and bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes.get(i, b"") for i in ids).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        """A token's text, all of it visible (an accent on ◌), bytes that are no UTF-8 as <E2>, special ones by name."""
        if not (raw := self.token_bytes.get(token, b"")):
            return {i: name for name, i in self.special.items()}.get(token, f"<{token}>")
        text, glyphs = raw.decode("utf-8", errors="surrogateescape"), {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
        glyphs |= {chr(0xDC00 + b): f"<{b:02X}>" for b in range(128, 256)}  # surrogateescape's stand-ins for bytes
        shown = (glyphs.get(c) or (c if c.isprintable() else f"<U+{ord(c):04X}>") for c in text)
        return ("◌" if unicodedata and unicodedata.combining(text[0]) else "") + "".join(shown)


def byte_tokenizer() -> Tokenizer:
    return bpe_tokenizer(Path("bytes"), learn_bpe([], 258))  # a BPE without merges: eos 256, mask 257


def byte_alphabet() -> list[str]:
    """The printable stand-in that byte-level BPE files use for each byte: itself if printable, else U+0100 onwards."""
    others = map(chr, range(256, 512))
    return [chr(b) if chr(b).isprintable() and b != ord(" ") else next(others) for b in range(256)]


def bpe_tokenizer(path: Path, spec: dict | None = None) -> Tokenizer:
    """A `tokenizer.json` (byte-level BPE; `spec` is its content, if known) as a tiktoken.Encoding with the same ids on
    every text. Refused with the reason: anything whose result tiktoken could not reproduce exactly."""
    spec = spec or read_json(path, "tokenizer")
    try:
        pattern, nfc = check_pipeline(spec, path)
        alphabet = {ch: byte for byte, ch in enumerate(byte_alphabet())}
        vocab = {bytes(alphabet[ch] for ch in token): i for token, i in spec["model"]["vocab"].items()}
        special = {t["content"]: t["id"] for t in spec["added_tokens"]}
        ranks = {bytes([b]): b for b in range(256)}
        for merge in spec["model"]["merges"]:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            left, right = (bytes(alphabet[ch] for ch in part) for part in pair)
            # tiktoken merges any neighbours whose concatenation is known; that equals this merge list only if the pair
            # is what the earlier merges make of those bytes, and if no other merge makes the same token.
            if left + right in ranks or merge_bytes(left + right, ranks) != [left, right]:
                fail(f"{path}: merge {left!r} + {right!r} is not expressible in tiktoken (duplicate or out of order)")
            ranks[left + right] = len(ranks)
        ids = [vocab[token] for token in ranks] + list(special.values())
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        fail(f"{path} is not a byte-level BPE tokenizer.json: unexpected or missing {e}")
    last = {name: len(ranks) + i for i, name in enumerate(special)}
    encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=last)
    return Tokenizer(encoding, ids, special, nfc, token_bytes={i: t for t, i in vocab.items()})


def check_pipeline(spec: dict, path: Path) -> tuple[str, bool]:
    """(pre-tokenizer pattern, whether NFC is applied) of a tokenizer.json; refuses every step that is not modelled."""
    model, pre, normalizer, post = (spec.get(k) for k in ("model", "pre_tokenizer", "normalizer", "post_processor"))
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
    for what in (what for bad, what in refused if bad):
        fail(f"{path}: {what} cannot be expressed exactly in tiktoken, so this tokenizer is refused")
    return steps[0]["pattern"]["Regex"], normalizer is not None


def merge_bytes(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair merging of one token under the merges known so far, lowest rank first."""
    parts = [bytes([b]) for b in token]
    while known := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        i = min(known)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def learn_bpe(texts: Iterable[str], vocab_size: int) -> dict:
    """The content of a `tokenizer.json` with vocab_size ids: bytes, merges learned from these texts, EOS and MASK.

    Each merge joins the pair most often side by side in words, of equals the first in string order, if it is so twice.
    """
    pattern = r" ?\S+|\s+"  # a word and the blank before it
    words = Counter(word for text in texts for word in re.findall(pattern, text))
    letters = byte_alphabet()
    parts = {word: [letters[b] for b in word.encode()] for word in words}
    counts, holders = Counter(), defaultdict(set)  # of a pair: how often it occurs; the words that hold it, or once did

    def count(word: str, sign: int) -> None:
        for pair in pairwise(parts[word]):
            counts[pair] += sign * words[word]
            holders[pair].add(word)

    for word in words:
        count(word, 1)
    merges = []
    while len(letters) + len(merges) + 2 < vocab_size and (most := max(counts.values(), default=0)) > 1:
        pair = min(p for p, n in counts.items() if n == most)
        merges.append(list(pair))
        for word in holders.pop(pair):
            count(word, -1)
            for i in range(len(parts[word]) - 1):  # from the left; a slice at the end of a shortened list is no pair
                if parts[word][i : i + 2] == merges[-1]:
                    parts[word][i : i + 2] = ["".join(pair)]
            count(word, 1)
    tokens = letters + ["".join(pair) for pair in merges]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "added_tokens": [{"id": len(tokens) + i, "content": name} | plain for i, name in enumerate((EOS, MASK))],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges},
    }


def load_text(sources: list[str], max_docs: int = 0) -> list[tuple[str, str]]:
    """Documents as (stable name, text), the first max_docs (0: all) of `names`, `stdlib`, or paths: .txt / folder /
    .jsonl / .jsonl.gz / .parquet."""
    documents = list(islice((document for source in sources for document in read_source(source)), max_docs or None))
    if not any(text for _, text in documents):
        fail(f"--data {' '.join(sources)} holds no text (or the filter on score and length left none)")
    return documents


def read_source(source: str) -> Iterator[tuple[str, str]]:
    """The documents of one source; those of a folder in a fixed order, without its hidden files."""
    stdlib = source == "stdlib"
    skip = {"test", "tests", "idle_test", "site-packages"} if stdlib else set()
    root = Path(sysconfig.get_path("stdlib") if stdlib else source)
    if source == "names":
        yield from ((name, name) for name in unicode_names())
    elif root.is_dir():
        for path in sorted(root.rglob("*.py" if stdlib else "*")):
            inside = path.relative_to(root)
            if path.is_file() and not any(part in skip or part.startswith(".") for part in inside.parts):
                yield from read_file(path, inside.as_posix(), pass_over=True)
    elif root.exists():
        yield from read_file(root, root.name)
    else:
        fail(f"--data {source}: no such file or folder (and not `names`, `stdlib` or the name of a toy)")


def unicode_names() -> Iterator[str]:
    """The names of all characters (about 31,600) but the numbered ones, which teach and test nothing: those that end in
    their code point (CJK UNIFIED IDEOGRAPH-4E00), the computed ones of Hangul, and two long runs of numbers."""
    if unicodedata is None:
        fail("--data names: this Python was built without its module unicodedata; use another Python")
    numbered = ("HANGUL SYLLABLE ", "TANGUT COMPONENT-", "VARIATION SELECTOR-")
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if name and not name.startswith(numbered) and not name.endswith(f"-{code:04X}"):
            yield name


def exists(name: str) -> str | None:
    """The character of exactly this name in `unicodedata.unidata_version`, numbered or not, or None."""
    try:
        found = unicodedata.lookup(name)  # takes lower case, aliases and sequences too: no character's own name
    except (KeyError, UnicodeEncodeError):  # unknown; a lone surrogate
        return None
    return found if unicodedata.name(found[0], "") == name else None


def check_names(folder: Path, prompts: list[str]) -> bool:
    """Whether completions can be judged: by a model of names, in a Python that knows them. A line for each doubt."""
    taught = read_json(folder / "names.json", "names").get("unidata_version")
    known = unicodedata and unicodedata.unidata_version
    if known != taught:
        here = known or "unknown: it has no module unicodedata"
        print(f"note: the model learned the names of Unicode {taught}, this Python's are {here}", file=sys.stderr)
    for prompt in prompts if known else ():
        if not any(unicodedata.name(chr(code), "").startswith(prompt) for code in range(sys.maxunicode + 1)):
            print(f"note: no character's name begins with {prompt!r}", file=sys.stderr)
    return bool(known)


def read_file(path: Path, name: str, pass_over: bool = False) -> Iterator[tuple[str, str]]:
    """The documents of one file: one of text, or its records, those with FineWeb-Edu's fields by the paper's filter
    (Training); or none, if it may be no text."""
    limits = ("int_score", 3, math.inf), ("token_count", 256, 1800)
    holds_records = path.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))
    try:
        if not holds_records:
            yield name, path.read_text(encoding="utf-8")
        for n, record in read_records(path) if holds_records else ():
            kinds = {"text": str, "int_score": int | float | None, "token_count": int | float | None}
            if not isinstance(record, dict) or not all(isinstance(record.get(k), kind) for k, kind in kinds.items()):
                fail(f"--data {path}: record {n} has no `text` field, or an int_score or token_count that is no number")
            if all(record.get(field) is None or low <= record[field] <= high for field, low, high in limits):
                yield f"{name}:{n}", record["text"]
    except (OSError, EOFError, ValueError, zlib.error) as e:  # errors of JSON, UTF-8 and pyarrow are ValueErrors
        if holds_records or not pass_over:
            fail(f"--data {path} cannot be read as text, or as one JSON record a line: {e}")


def read_records(path: Path) -> Iterator[tuple[int, object]]:
    """(number of the line or row, record)"""
    if path.suffix != ".parquet":
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            yield from ((n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip())
        return
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        fail(f"--data {path}: reading .parquet needs pyarrow: pip install pyarrow, or convert the file to .jsonl")
    table = parquet.ParquetFile(path)
    columns = [c for c in ("text", "int_score", "token_count") if c in table.schema_arrow.names]
    yield from enumerate((row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist()), 1)


def is_validation(name: str) -> bool:
    """A stable split: one document in twenty by the hash of its name, whatever the order or the number of files."""
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


@dataclass
class Sequences:
    """Documents cut into rows of at most seq_len ids, one document a row, padded with eos at the end. Row i of the
    stream is a function of (seed, i) alone: epoch i // N has its own permutation."""

    rows: list[np.ndarray]  # N rows of 1..seq_len int32 ids; a document's last row ends in eos
    seq_len: int
    pad_id: int
    seed: int
    order: dict[int, list[int]] = field(default_factory=dict)  # the epoch in use and its permutation

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, first: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows first .. first+rows of the stream: x (R, T) int64, real (R, T) bool, prompt (R, T) bool (none)."""
        x = torch.full((rows, self.seq_len), self.pad_id)
        real = torch.zeros_like(x, dtype=torch.bool)
        for r in range(rows):
            row = torch.from_numpy(self.rows[self.shuffled(first + r)])
            x[r, : len(row)], real[r, : len(row)] = row, True
        return x, real, torch.zeros_like(real)

    def count_real(self, first: int, rows: int) -> int:
        return sum(len(self.rows[self.shuffled(i)]) for i in range(first, first + rows))

    def describe(self) -> str:
        return f"{len(self):,} rows, {sum(map(len, self.rows)):,} tokens"

    def shuffled(self, i: int) -> int:
        epoch, position = divmod(i, len(self))
        if epoch not in self.order:
            permutation = torch.randperm(len(self), generator=generator(self.seed, "order", epoch))
            self.order = {epoch: permutation.tolist()}
        return self.order[epoch][position]


def load_sequences(
    sources: list[str], tokenizer: Tokenizer, seq_len: int, seed: int, max_docs: int = 0, block_length: int = 1
) -> list[Sequences]:
    """[train, validation] rows of a corpus. A corpus of few documents keeps its last 5 % of rows for validation. The
    block in which a document ends is filled with eos: decoding fills it too, and must not learn a length."""
    documents = load_text(sources, max_docs)
    train, val = [], []
    for name, text in tqdm(documents, desc="tokenize", leave=False, disable=None):
        ids = tokenizer.encode_document(text)
        ids = np.pad(ids, (0, 1 + (-len(ids) - 1) % block_length), constant_values=tokenizer.eos_id)
        (val if is_validation(name) else train).extend(ids[i : i + seq_len] for i in range(0, len(ids), seq_len))
    if not train or not val:
        every = train + val
        cut = max(1, len(every) // 20)
        train, val = every[:-cut] or every, every[-cut:]
    return [Sequences(part, seq_len, tokenizer.eos_id, seed) for part in (train, val)]
