"""Write text as rows of token ids, for train.py to read.

    python prepare.py names --out data/names2       # names of Unicode characters, as in data/names
    python prepare.py stdlib --out data/stdlib      # Python's own sources
    python prepare.py FOLDER --out data/mine        # .txt and other text, or FineWeb-Edu's .jsonl[.gz] and .parquet
    python prepare.py FOLDER --out data/mine --like CKPT    # with the tokenizer of a checkpoint, or a tokenizer.json

lib/rows.py describes a folder of rows. Names are read with the tokenizer of data/names, and other text as bytes, unless
--like names another tokenizer. One document in twenty is for validation, by the hash of its name; if these are too few
or too long, as of a single text, the last 5 % of all tokens are.
Line ends become those of Unix, and a byte order mark is left out. Nothing is downloaded, and a text that cannot be read
exactly is refused (in a folder, a text that is not UTF-8 is left out). `python toy.py modes --out DIR` writes the rows
of a toy.

The `tokenizers` library makes a BPE of your own (pip install tokenizers), and --like reads it:

    from tokenizers import ByteLevelBPETokenizer
    bpe = ByteLevelBPETokenizer()
    bpe.train(["FOLDER/a.txt"], vocab_size=4096, special_tokens=["<|endoftext|>", "<|mask|>"])
    bpe.save("bpe.json")

    python prepare.py FOLDER --out data/mine --like bpe.json
"""

import lib.first  # noqa: F401

import argparse
import gzip
import hashlib
import json
import math
import sys
import sysconfig
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from lib.rows import Meta, read_meta, refuse_full, write_meta, write_rows
from lib.tokenizer import Tokenizer, bpe_tokenizer, byte_spec, byte_tokenizer
from lib.util import (
    Mistake,
    Parser,
    alone_in,
    bounded,
    checked_entry,
    command,
    copy_file,
    fail,
    progress,
    quoted,
    read_json,
    reading,
    write_json,
)

NAMES = Path(__file__).parent / "data" / "names"
RELEASED = Path("weights/llada2.1-mini")  # where configs/llada.toml starts from
RECORDS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")  # or in upper case
SHORT = 640  # of fewer tokens, 5 % are less than one block of the paper's size, 32
FEW, MANY = 0.01, 0.2  # the split by names is not used if validation would get fewer or more of the tokens

Document = tuple[np.ndarray, int]  # its ids, and how many of them are its prompt (see lib/rows.py)


# --- documents
@dataclass
class LeftOut:
    """What is not read: files, documents and records; str() puts it into words."""

    not_utf8: list[str] = field(default_factory=list)  # names of files
    empty: int = 0  # documents
    filtered: int = 0  # records

    def __str__(self) -> str:
        said = []
        if self.not_utf8:
            more = ", ..." if len(self.not_utf8) > 5 else ""
            said.append(f"{len(self.not_utf8):,} that are not UTF-8 text ({', '.join(self.not_utf8[:5])}{more})")
        if self.empty:
            said.append(f"{self.empty:,} without a character")
        if self.filtered:
            said.append(f"{self.filtered:,} by the filter on score and length")
        return f"; left out: {', and '.join(said)}" if said else ""


def load_text(sources: list[str], max_docs: int = 0) -> list[tuple[str, str]]:
    """The documents of `names`, `stdlib` or paths, as (stable name, text). max_docs: stop after this many documents
    to train on (0: read all)."""
    left_out = LeftOut()
    stream = chain.from_iterable(read_source(source, left_out) for source in sources)
    documents = list(progress(first_documents(stream, max_docs, left_out), "read"))
    if not documents:
        fail(f"{' '.join(sources)} has no text{left_out}")
    if str(left_out):
        print(f"read   {len(documents):,} documents{left_out}")
    return documents


def first_documents(stream: Iterator[tuple[str, str]], max_docs: int, left_out: LeftOut) -> Iterator[tuple[str, str]]:
    """The documents that have text, until max_docs of them are to train on (0: all)."""
    n_train = 0
    for name, text in stream:
        if not text:
            left_out.empty += 1
            continue
        yield name, text
        n_train += not is_validation(name)
        if n_train == max_docs > 0:
            return


def read_source(source: str, left_out: LeftOut) -> Iterator[tuple[str, str]]:
    """The documents of one source."""
    path = Path(source)
    if source == "names":
        return ((name, name) for name in unicode_names())
    if source == "stdlib":
        tests = {"test", "tests", "idle_test", "site-packages"}
        return read_folder(Path(sysconfig.get_path("stdlib")), "*.py", tests, left_out)
    if (path / "meta.json").exists() and (path / "train.safetensors").exists():
        fail(f"{source} holds rows already, which train.py reads, and no texts")
    if path.is_dir():
        return read_folder(path, "*", set(), left_out)
    if path.exists():
        return read_file(path, path.name, left_out)
    fail(f"{source}: there is no such file or folder (toy.py --out writes the rows of toys)")


def read_folder(root: Path, pattern: str, skip: set[str], left_out: LeftOut) -> Iterator[tuple[str, str]]:
    """The documents of a folder in a fixed order, without hidden files, folders to skip, and texts that are not
    UTF-8."""
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root)
        hidden = any(part.startswith(".") for part in inside.parts)
        skipped = not skip.isdisjoint(inside.parts)
        if path.is_file() and not hidden and not skipped:
            yield from read_file(path, inside.as_posix(), left_out, pass_over=True)


def read_file(path: Path, name: str, left_out: LeftOut, pass_over: bool = False) -> Iterator[tuple[str, str]]:
    """The documents of one file: its records, or its text. pass_over: leave a text out if it is not UTF-8."""
    with reading(path, "corpus"):
        if path.name.lower().endswith(RECORDS):
            for number, record in read_records(path):
                where = f"record {number} of corpus {path}"
                text = checked_entry(record, "text", str, where)
                if passes_filter(record, where):
                    yield f"{name}:{number}", unix_text(text)
                else:
                    left_out.filtered += 1
            return

        try:
            yield name, unix_text(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            if not pass_over:
                raise
            left_out.not_utf8.append(name)


def unix_text(text: str) -> str:
    """The text without a byte order mark, and with the line ends of Unix."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def passes_filter(record: dict, where: str) -> bool:
    """The paper's filter on score and length (its section Training). A record without these entries passes. int_score
    is the rounded score."""
    score = "score" if record.get("int_score") is None else "int_score"
    for key, low, high in ((score, 3, math.inf), ("token_count", 256, 1800)):
        if record.get(key) is not None and not low <= checked_entry(record, key, float, where) <= high:
            return False
    return True


def read_records(path: Path) -> Iterator[tuple[int, dict]]:
    """The records of a file, each with the number of its line or row."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from enumerate(read_parquet(path), 1)
        return

    open_text = gzip.open if name.endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8-sig") as lines:
        if name.removesuffix(".gz").endswith(".json"):
            records = enumerate(listed_records(lines.read()), 1)
        else:
            records = ((number, read_line(line, number)) for number, line in enumerate(lines, 1) if line.strip())
        for number, record in records:
            if not isinstance(record, dict):
                fail(f"record {number} of {path} is not a JSON object")
            yield number, record


def read_line(line: str, number: int) -> object:
    """The value of a line of JSON."""
    try:
        return json.loads(line)
    except ValueError as e:
        raise ValueError(f"line {number} is no JSON: {e}") from e


def listed_records(content: str) -> list:
    """The records of a .json file, which is a list, one record, or one record a line."""
    try:
        value = json.loads(content)
    except ValueError:
        return [read_line(line, number) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    return value if isinstance(value, list) else [value]


def read_parquet(path: Path) -> Iterator[dict]:
    """The rows of a .parquet file."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        fail(f"{path}: to read .parquet, pip install pyarrow, or convert the file to .jsonl")
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def unicode_names() -> Iterator[str]:
    """The names of all characters (about 31,600) except numbered ones, which teach nothing: names that end in the code
    point (CJK UNIFIED IDEOGRAPH-4E00), those of Hangul syllables, and two long numbered series."""
    numbered = ("HANGUL SYLLABLE ", "TANGUT COMPONENT-", "VARIATION SELECTOR-")
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if name and not name.startswith(numbered) and not name.endswith(f"-{code:04X}"):
            yield name


# --- the split
def is_validation(name: str) -> bool:
    """A stable split: one document in twenty, by the hash of its name alone."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()[0] % 20 == 0


def tokenize(texts: list[tuple[str, str]], tokenizer: Tokenizer, prompt: int) -> dict[str, list[Document]]:
    """The documents of "train" and of "val". Each ends in eos, unless hold_out cuts it, and all have the
    same `prompt`, see Document."""
    documents = []
    split = {"train": [], "val": []}
    for name, text in progress(texts, "tokenize"):
        try:
            ids = np.append(tokenizer.encode_document(text), np.int32(tokenizer.eos_id))
        except Mistake as e:
            fail(f"document {name}: {e}")
        documents.append((ids, prompt))
        split["val" if is_validation(name) else "train"].append(documents[-1])

    # a few texts may all fall on one side, or a long one on the wrong side
    n_train, n_val = (sum(len(ids) for ids, _ in documents) for documents in split.values())
    if not FEW <= n_val / (n_train + n_val) <= MANY:
        split["train"], split["val"] = hold_out(documents)
    return split


def hold_out(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents by place: the last 5 % of the tokens are for validation. A short text is used for both."""
    n = sum(len(ids) for ids, _ in documents)
    if n < SHORT:
        print(f"only {n:,} tokens: they are used to train and to validate")
        return documents, documents

    train = []
    val = []
    left = n - n // 20  # tokens to train on
    for ids, prompt in documents:
        if left > 0:
            train.append((ids[:left], prompt))
        if left < len(ids):
            val.append((ids[max(left, 0) :], prompt))
        left -= len(ids)
    return train, val


# --- a folder of rows
def prepare_text(sources: list[str], folder: Path, like: Path | None, max_docs: int) -> None:
    """Read documents, tokenise them, and write them as rows."""
    refuse_full(folder)
    refuse_users(folder, sources, like)
    names = sources == ["names"]
    if like is None and names:
        like = NAMES
    tokenizer = byte_tokenizer() if like is None else bpe_tokenizer(tokenizer_file(like))

    # the prompt of a name is a random beginning of it
    split = tokenize(load_text(sources, max_docs), tokenizer, prompt=-1 if names else 0)

    # ordinary ids, from which random tokens are drawn: every id of a token that is not special
    plain = set(tokenizer.token_bytes)
    n_plain = max(plain) + 1
    meta = Meta(
        vocab_size=math.ceil(tokenizer.vocab_size / 16) * 16,
        eos_id=tokenizer.eos_id,
        mask_id=tokenizer.mask_id,
        n_plain=n_plain,
        judge={"names": unicodedata.unidata_version} if names else None,
        not_plain=sorted(set(range(n_plain)) - plain),
    )
    for part, documents in split.items():
        ids, prompts = zip(*documents, strict=True)
        write_rows(folder, part, list(ids), list(prompts), meta.vocab_size)
        print(f"{part:5}  {len(ids):,} documents, {sum(map(len, ids)):,} tokens")

    # the tokenizer, and at last meta.json, with which the folder is whole
    if like is None:
        write_json(folder / "tokenizer.json", byte_spec())
    else:
        copy_file(tokenizer_file(like), folder / "tokenizer.json")
    write_meta(folder, meta)


def refuse_users(folder: Path, sources: list[str], like: Path | None) -> None:
    """Refuse to write among the texts that are read, or over a tokenizer that is not the one to be used."""
    for source in map(Path, sources):
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            fail(f"--out {folder} lies in {source}, whose texts are read: choose another --out")
    theirs = folder / "tokenizer.json"
    if theirs.exists() and (like is None or not theirs.samefile(tokenizer_file(like))):
        fail(f"{theirs} is there already: choose another --out, or give --like {theirs}")


def tokenizer_file(like: Path) -> Path:
    """The tokenizer.json that --like names, or the one in the folder that it names."""
    path = like / "tokenizer.json" if like.is_dir() else like
    if not path.exists():
        fail(f"--like {like} has no tokenizer.json" if like.is_dir() else f"--like {like}: there is no such file")
    return path


# --- what comes next
def next_command(args: argparse.Namespace) -> str:
    """The command that trains on these rows."""
    data = f"--data {quoted(args.out)}"
    judge = read_meta(args.out).judge
    # rows with the tokens of a checkpoint: train an adapter on that checkpoint
    if args.like and (args.like / "config.json").exists():
        init = f" --init_from {quoted(args.like)}"
        if is_released(args.like):
            return f"python train.py {data} --config configs/llada.toml{'' if args.like == RELEASED else init}"
        return f"python train.py {data}{'' if judge else ' --config configs/text.toml'}{init}"

    # names without --like have a base, and all other rows need one first
    if judge and args.like:
        return f"python base.py {data} --config configs/base.toml"
    if judge:
        return f"python train.py {data}"
    train = f"python train.py {data} --config configs/text.toml"
    return f"python base.py {data} --config configs/text_base.toml && {train}"


def is_released(folder: Path) -> bool:
    """Are these the converted 16B weights, in whatever folder? Their tokenizer knows the chat template."""
    added = read_json(folder / "tokenizer.json", "tokenizer")["added_tokens"]
    return folder == RELEASED or "<role>" in [token["content"] for token in added]


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("what is read").add_argument
    kinds = "names, stdlib, a text file, a folder, or a file of records: .jsonl, .ndjson, .json [.gz], .parquet"
    add("sources", nargs="+", metavar="SOURCE", help=kinds)
    so_many = "read up to this many documents to train on, or all if 0 (paper 50000)"
    add("--max_docs", type=bounded(int, 0, 10**9), default=0, help=so_many)
    whose = "use the tokenizer of this checkpoint or folder of rows, or this tokenizer.json (byte-level BPE)"
    add("--like", type=Path, metavar="DIR or FILE", help=whose)

    add = parser.add_argument_group("what is written").add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder of rows")
    args = parser.parse_args()

    if "" in args.sources:
        fail("a SOURCE is empty: name a file or a folder")
    if args.like and (args.like / "adapter.json").exists():
        from checkpoint import base_of

        args.like = base_of(args.like)

    with alone_in(args.out):
        prepare_text(args.sources, args.out, args.like, args.max_docs)
    print(f"{args.out} is ready: {next_command(args)}")


if __name__ == "__main__":
    main()
