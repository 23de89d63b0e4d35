"""Write text as rows of token ids, for train.py to read.

    python prepare.py names --out data/names2       # names of Unicode characters, as in data/names
    python prepare.py FOLDER --out data/mine        # .txt and other text, or FineWeb-Edu's .jsonl[.gz] and .parquet
    python prepare.py FOLDER --out data/mine --like CKPT    # with the tokenizer of a checkpoint, or a tokenizer.json

lib/rows.py describes a folder of rows. Names are read with the tokenizer of data/names, and other text as bytes, unless
--like names another tokenizer. One document in twenty is for validation, by the hash of its text; if these have less
than 1 % of all bytes or more than half, as of a single text, the last twentieth of all tokens is. Equal texts are kept
once. Line ends become those of Unix, and a byte order mark is left out, as is what has no text.

The `tokenizers` library makes a BPE of your own, and --like bpe.json reads it:

    import tokenizers
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(["FOLDER/a.txt"], vocab_size=4096, special_tokens=["<|endoftext|>", "<|mask|>"])
    bpe.save("bpe.json")
"""

import lib.first  # noqa: F401

import gzip
import hashlib
import json
import math
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path

import numpy as np

from checkpoint import base_of
from lib.rows import Meta, refuse_full, write_meta, write_rows
from lib.tokenizer import Tokenizer, bpe_tokenizer, ids_beside, load_tokenizer
from lib.util import Parser, alone_in, bounded, command, fail, progress, quoted, read_json, reading, write_json

NAMES = Path(__file__).parent / "data" / "names"
BYTES = NAMES.parent / "shakespeare"  # its tokenizer.json has a token for each byte
RECORDS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")
TABLES = (".csv", ".tsv")  # not read: which column is the text?


# --- documents
class LeftOut(Enum):
    """What stands in place of a text that is not taken, and why."""

    NO_UTF8 = "that are not in UTF-8"
    TABLE = "that are tables, of which no column is known to be the text"
    NOWHERE = "that lead nowhere"
    FILTERED = "by the paper's filter"
    EMPTY = "without text (in records: under --field)"
    TWIN = "that are equal to an earlier text"


def load_text(sources: list[Path], max_docs: int = 0, field: str = "text") -> list[tuple[str, str]]:
    """The documents of the sources, as (name, text), up to max_docs of them to train on (0: all); no text twice."""
    documents = {}  # text -> its name
    left_out = defaultdict(list)  # the reason -> names
    n_train = 0
    for name, text in progress((pair for source in sources for pair in read_source(source, field)), "read"):
        if text in documents:
            text = LeftOut.TWIN
        if isinstance(text, LeftOut):
            left_out[text].append(name)
            continue
        documents[text] = name
        n_train += not is_validation(text)
        if n_train == max_docs > 0:
            break

    for reason, names in left_out.items():
        print(f"left out {len(names):,} {reason.value}, such as {names[:5]}")
    if not documents:
        fail(f"{' '.join(map(str, sources))} has no text")
    return [(name, text) for text, name in documents.items()]


def read_source(source: Path, field: str) -> Iterator[tuple[str, str | LeftOut]]:
    """The documents of `names`, a folder or a file. field: the key of a record's text."""
    if source == Path("names"):
        yield from ((name, name) for name in unicode_names())
    elif (source / "train.safetensors").exists():
        fail(f"{source} holds rows already, which train.py reads")
    elif source.is_dir():
        for path in files_of(source, set()):
            name = path.relative_to(source).as_posix()
            yield from read_file(path, name, field) if path.is_file() else [(name, LeftOut.NOWHERE)]  # a link
    else:
        yield from read_file(source, source.name, field)


def files_of(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """What a folder holds, in a fixed order, without hidden files. A folder with several links to it is read once."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            yield from files_of(path, seen) if path.is_dir() else [path]


def read_file(path: Path, name: str, field: str) -> Iterator[tuple[str, str | LeftOut]]:
    """The documents of one file: its records, or its text."""
    with reading(path, "corpus"):
        if name.lower().endswith(RECORDS):
            for number, record in read_records(path):
                entries = record if isinstance(record, dict) else {}
                yield f"{name}:{number}", whole_text(entries.get(field)) if passes_filter(entries) else LeftOut.FILTERED
            return
        text = LeftOut.NO_UTF8
        with suppress(UnicodeDecodeError):
            # its lines end in \n, whatever they end in there
            text = path.read_text(encoding="utf-8-sig") or LeftOut.EMPTY
        yield name, LeftOut.TABLE if name.lower().endswith(TABLES) else text


def whole_text(text: object) -> str | LeftOut:
    """A record's text with the line ends of Unix, if it is one, and has no half of a character (\\ud800)."""
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError):
        return LeftOut.EMPTY
    return text.replace("\r\n", "\n").replace("\r", "\n") or LeftOut.EMPTY


def passes_filter(record: dict) -> bool:
    """The paper's filter on score and length. A record without these entries passes."""
    score = "score" if record.get("int_score") is None else "int_score"
    for key, low, high in ((score, 3, math.inf), ("token_count", 256, 1800)):
        value = record.get(key)
        if value is not None and not (isinstance(value, (int, float)) and low <= value <= high):
            return False
    return True


def read_records(path: Path) -> Iterator[tuple[int, object]]:
    """The records of a file, each with the number of its line or row; None in place of a line that is not JSON."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            fail(f"{path}: to read .parquet, pip install pyarrow, or convert the file to .jsonl")
        batches = parquet.ParquetFile(path).iter_batches()
        yield from enumerate((record for batch in batches for record in batch.to_pylist()), 1)
        return

    open_file = gzip.open if name.endswith(".gz") else open
    with open_file(path, "rb") as lines:
        if name.removesuffix(".gz").endswith(".json"):  # one record, a list of them, or else a record on each line
            content = read_json_value(lines.read())
            if content is not None:
                yield from enumerate(content if isinstance(content, list) else [content], 1)
                return
            lines.seek(0)
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, read_json_value(line)


def read_json_value(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def unicode_names() -> Iterator[str]:
    """The names of all characters (about 31,600) except numbered ones, which teach nothing: names that end in the code
    point (CJK UNIFIED IDEOGRAPH-4E00), those of Hangul syllables, and two long numbered series."""
    numbered = ("HANGUL SYLLABLE ", "TANGUT COMPONENT-", "VARIATION SELECTOR-")
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if name and not name.startswith(numbered) and not name.endswith(f"-{code:04X}"):
            yield name


# --- the split
def is_validation(text: str) -> bool:
    """A stable split: one document in twenty, by the hash of its text alone."""
    return hashlib.sha256(text.encode()).digest()[0] % 20 == 0


def tokenize(texts: list[tuple[str, str]], tokenizer: Tokenizer) -> dict[str, list[np.ndarray]]:
    """The documents of "train" and of "val" as ids. Each ends in eos, unless it is cut in two."""
    documents = []
    split = {"train": [], "val": []}
    for _, text in progress(texts, "tokenize"):
        documents.append(np.append(tokenizer.encode_document(text), np.int32(tokenizer.eos_id)))
        split["val" if is_validation(text) else "train"].append(documents[-1])

    held_out, whole = (sum(len(t.encode()) for _, t in texts if part(t)) for part in (is_validation, bool))
    if 0.01 <= held_out / whole <= 0.5:
        return split

    # a few texts, or one long one, may fall on one side: then the last twentieth of all tokens is held out
    ends = np.cumsum([len(ids) for ids in documents])
    cut = ends[-1] - max(1, ends[-1] // 20)  # the number of tokens to train on
    parts = np.split(np.concatenate(documents), sorted({*ends[:-1], cut}))
    first = 1 + (ends < cut).sum()  # the first part to hold out
    return {"train": parts[:first], "val": parts[first:]}


# --- a folder of rows
def prepare_text(sources: list[Path], folder: Path, like: Path | None, max_docs: int, field: str) -> None:
    """Read documents, tokenise them, and write them as rows."""
    refuse_full(folder)
    names = sources == [Path("names")]
    file = like or (NAMES if names else BYTES)
    if file.is_dir():
        file = file / "tokenizer.json"
    spec = read_json(file, "tokenizer")
    tokenizer = bpe_tokenizer(file, spec, *ids_beside(file))

    # a run that was killed may have left the same tokenizer there
    theirs = folder / "tokenizer.json"
    if theirs.exists() and read_json(theirs, "tokenizer") != spec:
        fail(f"{theirs} is there already, and is another tokenizer: choose another --out, or give --like {theirs}")

    # ordinary ids, from which random tokens are drawn: those of all tokens that are not special
    split = tokenize(load_text(sources, max_docs, field), tokenizer)
    n_plain = max(tokenizer.token_bytes) + 1
    meta = Meta(
        vocab_size=math.ceil(tokenizer.vocab_size / 16) * 16,
        eos_id=tokenizer.eos_id,
        mask_id=tokenizer.mask_id,
        n_plain=n_plain,
        judge={"names": unicodedata.unidata_version} if names else None,
        not_plain=sorted(set(range(n_plain)) - tokenizer.token_bytes.keys()),
    )

    # the prompt of a name is a random beginning of it; other text has none
    for part, documents in split.items():
        prompts = [-1 if names else 0] * len(documents)
        write_rows(folder, part, documents, prompts, meta.vocab_size)
        print(f"{part:5}  {len(documents):,} documents, {sum(map(len, documents)):,} tokens")

    # at last meta.json, with which the folder is whole
    if not theirs.exists():
        write_json(theirs, spec)
    write_meta(folder, meta)


def next_command(folder: Path, like: Path | None, names: bool) -> str:
    """The command that trains on these rows, into a folder of their own name."""
    out = Path("out", folder.resolve().name)
    rows = f"--data {quoted(folder)} --out_dir {quoted(out)}"

    # rows with the tokens of a checkpoint train an adapter on it
    if like and (like / "config.json").exists():
        config = "" if names else " --config configs/text.toml"
        # the tokens of a chat template: these are released weights
        special = load_tokenizer(like).special
        for token, name in (("<role>", "llada"), ("<|im_start|>", "tiny_a2d")):
            config = f" --config configs/{name}.toml" if token in special else config
        return f"python train.py {rows}{config} --init_from {quoted(like)}"

    # names have a base, and other text needs one first
    if names:
        return f"python train.py {rows}"
    if folder == Path("data/mine"):  # the folder of the two configs
        return "python base.py --config configs/text_base.toml && python train.py --config configs/text.toml"
    base = quoted(f"{out}_base")
    before = f"python base.py --data {quoted(folder)} --out_dir {base} --config configs/text_base.toml"
    return f"{before} && python train.py {rows} --config configs/text.toml --init_from {base}"


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="SOURCE", help=f"names, a text, a folder, or {', '.join(RECORDS)}")
    add("--field", default="text", metavar="KEY", help="the key of a record's text")
    add("--max_docs", type=bounded(int, 0, 10**9), default=0, help="most documents to train on (paper 50000); 0: all")
    whose = "take the tokenizer of this model or folder of rows, or this tokenizer.json (byte-level BPE)"
    add("--like", type=Path, metavar="DIR or FILE", help=whose)
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder of rows")
    args = parser.parse_args()

    like = args.like and base_of(args.like)  # an adapter has the tokenizer of its base
    with alone_in(args.out):
        prepare_text(args.sources, args.out, like, args.max_docs, args.field)
    print(f"{args.out} is ready: {next_command(args.out, like, args.sources == [Path('names')])}")


if __name__ == "__main__":
    main()
