"""Write text as rows of token ids, for train.py to read.

    python prepare.py names --out data/names2       # names of Unicode characters, as in data/names
    python prepare.py stdlib --out data/stdlib      # Python's own sources
    python prepare.py FOLDER --out data/mine        # .txt and other text, or FineWeb-Edu's .jsonl[.gz] and .parquet
    python prepare.py FOLDER --out data/mine --like CKPT    # with the tokenizer of a checkpoint, or a tokenizer.json
    python prepare.py data/names --written_by assets/names --out data/written
                                                    # beginnings of these rows, each continued by a model

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

--written_by makes a teacher's rows: a model continues the beginnings of documents by beam search, which is
sequence-level distillation (Kim and Rush, 2016). In the text a beginning has many endings, but the teacher gives it
only one, so causal Stage B becomes surer when it learns these rows. With one ending for each beginning the rows have no
total correlation (TC), and the token on the left is worth little there (results/names). Half of the text is added as it
is, because continuations do not teach a model to fill holes.
"""

import lib.first  # noqa: F401

import argparse
import gzip
import hashlib
import json
import math
import sys
import sysconfig
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lib.rows import HOLES_ALONE, Meta, read_meta, read_split, refuse_full, write_meta, write_rows
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
    generator,
    pick_device,
    progress,
    quoted,
    read_bytes,
    read_json,
    reading,
    write_json,
)

if TYPE_CHECKING:
    from model import Model

# R rows, U texts of a beam, T positions, V vocabulary

NAMES = Path(__file__).parent / "data" / "names"
RELEASED = Path("weights/llada2.1-mini")  # where configs/llada.toml starts from
RECORDS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")  # or in upper case
BEAM = 4
AT_ONCE = 256  # the most beginnings that are continued together
TOKENS = 2**18  # the most tokens in all texts of their beams
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
        fail(f"{source} holds rows already, which train.py reads, and no texts (--written_by continues them)")
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


# --- a teacher's rows
def prepare_written(source: Path, by: Path, folder: Path, beam: int, gen_length: int) -> None:
    """Write random beginnings of `source`'s documents, as the model in `by` continues them to an end, and half of its
    text."""
    from checkpoint import base_of, load_model  # preparing text does not need these

    refuse_full(folder)
    meta = read_meta(source)
    tokenizer = read_bytes(source / "tokenizer.json", "tokenizer")
    model = load_model(by, pick_device("auto"), torch.float32, block_length=1)
    theirs = base_of(by) / "tokenizer.json"
    same = (model.cfg.eos_id, model.cfg.mask_id) == (meta.eos_id, meta.mask_id)
    if not same or theirs.exists() and read_bytes(theirs, "tokenizer") != tokenizer:
        fail(f"{source} has other tokens than {by}: prepare it with --like {by}")
    most = model.cfg.max_len - gen_length
    if most < 2:
        fail(f"--gen_length {gen_length}: the model has {model.cfg.max_len} positions, which leaves no beginning")
    for part in ("train", "val"):
        # beginnings of about one length are written together
        prompts = sorted(beginnings(source, part, meta, most), key=len)
        start = time.monotonic()
        parts = some_at_once(prompts, beam, gen_length)
        texts = (text for some in parts for text in beam_search(model, some, beam, gen_length))
        written = list(progress(texts, f"write {part}", total=len(prompts)))

        # a beginning that got no end is left out
        documents = [(np.array(p + w), len(p)) for p, w in zip(prompts, written, strict=True) if w]
        if not documents:
            fail(f"{by} ended none of {len(prompts)} documents within --gen_length {gen_length} tokens")

        # add half of the text as it is, because it teaches to fill holes
        ids, starts, _ = read_split(source / f"{part}.safetensors", meta.vocab_size)
        text = np.split(ids.numpy(), starts[1:-1].numpy())[::2]
        seconds = f"{time.monotonic() - start:.0f} s"
        print(f"{part:5}  {len(documents):,} of {len(prompts):,} beginnings continued, {len(text):,} texts, {seconds}")
        ids, lengths = zip(*documents, *((document, HOLES_ALONE) for document in text), strict=True)
        write_rows(folder, part, list(ids), list(lengths), meta.vocab_size)
    copy_file(source / "tokenizer.json", folder / "tokenizer.json")
    write_meta(folder, meta)


@torch.inference_mode()
def beam_search(model: "Model", prompts: list[list[int]], beam: int, gen_length: int) -> list[list[int]]:
    """Continue each prompt from left to right until eos, by the likeliest text that beam search finds. A beam of one
    takes the likeliest token each time. The result is [] if the best text has no eos after gen_length tokens.

    model: a model with blocks of one token, so that a mask reads everything on its left, and nothing else.
    """
    eos, mask = model.cfg.eos_id, model.cfg.mask_id
    device = model.wte.weight.device
    place = torch.tensor([len(prompt) for prompt in prompts], device=device)  # (R,): where each row writes
    T = int(place.max()) + gen_length
    ids = torch.tensor([prompt + [mask] * (T - len(prompt)) for prompt in prompts], device=device)
    ids = ids[:, None].repeat(1, beam, 1)  # (R, U, T)

    # the texts of a beam, the best first; at the start they are all the same, so only one may count
    score = torch.full(ids.shape[:2], -math.inf, device=device)
    score[:, 0] = 0.0
    ended = torch.zeros_like(score, dtype=torch.bool)
    found = [[] for _ in prompts]
    row = torch.arange(len(prompts), device=device)
    for _ in range(gen_length):
        # log-probabilities of the next token, (R, U, V); after its end a text goes on with eos, with probability 1
        x = ids[..., : int(place.max()) + 1].flatten(0, 1)
        ctx = model.context(torch.ones_like(x, dtype=torch.bool))
        states = model.last_n(model.prefix(x, ctx), ctx).unflatten(0, (-1, beam))
        logits = model.logits(states[torch.arange(len(place)), :, place])
        logits[..., mask] = -math.inf
        log_p = logits.log_softmax(-1)
        log_p[ended] = -math.inf
        log_p[..., eos] = log_p[..., eos].masked_fill(ended, 0.0)

        # the best continuations of all texts: which text each continues, and by which token
        V = log_p.shape[-1]
        score, best = (score[..., None] + log_p).flatten(1).topk(beam, dim=-1)
        ids = ids.gather(1, (best // V)[..., None].expand_as(ids))
        ids[torch.arange(len(place)), :, place] = best % V
        ended = best % V == eos
        place = place + 1

        # a row is done when its best text has ended, because no other text can become likelier
        done = ended[:, 0]
        for r in done.nonzero()[:, 0].tolist():
            text = ids[r, 0, len(prompts[row[r]]) : place[r]].tolist()
            found[row[r]] = text[: text.index(eos) + 1]
        if done.all():
            break
        ids, score, ended, place, row = (tensor[~done] for tensor in (ids, score, ended, place, row))
    return found


def some_at_once(prompts: list[list[int]], beam: int, gen_length: int) -> Iterator[list[list[int]]]:
    """The beginnings, from short to long, in parts that fit into memory."""
    at = 0
    while at < len(prompts):
        some = prompts[at : at + AT_ONCE]
        while len(some) > 1 and len(some) * beam * (len(some[-1]) + gen_length) > TOKENS:
            some = some[: len(some) // 2]
        yield some
        at += len(some)


def beginnings(source: Path, part: str, meta: Meta, most: int) -> list[list[int]]:
    """The beginning of each document of two tokens or more: a random number of them, at least one and not all. Only the
    first `most` tokens of a document count."""
    ids, starts, _ = read_split(source / f"{part}.safetensors", meta.vocab_size)
    share = torch.rand(len(starts) - 1, generator=generator("beginnings", part))
    found = []
    for start, end, u in zip(starts[:-1].tolist(), starts[1:].tolist(), share.tolist(), strict=True):
        text = ids[start:end].tolist()
        text = text[:-1] if text[-1] == meta.eos_id else text
        text = text[:most]
        if len(text) > 1:
            found.append(text[: 1 + int(u * (len(text) - 1))])
    return found


# --- what comes next
def next_command(args: argparse.Namespace) -> str:
    """The command that trains on these rows."""
    data = f"--data {quoted(args.out)}"
    judge = read_meta(args.out).judge
    if args.written_by:
        from checkpoint import base_of

        config = "configs/causal.toml" if judge else "configs/text.toml"
        return f"python train.py {data} --config {config} --init_from {quoted(base_of(args.written_by))}"

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

    add = parser.add_argument_group("a teacher's rows").add_argument
    add("--written_by", type=Path, metavar="CKPT", help="SOURCE is a folder of rows, and this model continues "
        "beginnings of its documents")  # fmt: skip
    add("--gen_length", type=bounded(int, 1, 10**6), default=32,
        help="leave out a continuation that has not ended after this many tokens")  # fmt: skip
    add("--beam", type=bounded(int, 1, 1000), default=BEAM, help="the width of the beam search; 1: greedy")

    add = parser.add_argument_group("what is written").add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder of rows")
    args = parser.parse_args()

    if "" in args.sources:
        fail("a SOURCE is empty: name a file or a folder")
    if args.like and (args.like / "adapter.json").exists():
        from checkpoint import base_of

        args.like = base_of(args.like)

    # refuse flags that would do nothing
    if args.written_by and (len(args.sources) > 1 or args.max_docs or args.like):
        fail("--written_by reads all of one folder of rows by its own tokenizer: leave out --max_docs and --like")
    for name in () if args.written_by else ("gen_length", "beam"):
        if getattr(args, name) != parser.get_default(name):
            fail(f"--{name} does nothing without --written_by: leave it out")

    with alone_in(args.out):
        if args.written_by:
            prepare_written(Path(args.sources[0]), args.written_by, args.out, args.beam, args.gen_length)
        else:
            prepare_text(args.sources, args.out, args.like, args.max_docs)
    print(f"{args.out} is ready: {next_command(args)}")


if __name__ == "__main__":
    main()
