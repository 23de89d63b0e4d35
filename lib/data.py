"""What a training run reads, and what it leaves.

    load_text    names of Unicode characters, Python's own sources, .txt, a folder, FineWeb-Edu records -> documents
    learn_bpe    texts -> the content of a tokenizer.json
    Sequences    documents -> rows of seq_len ids, never two documents in one row; the same row for the same index
    the run      its settings when it is resumed, its log, its curve, its rate

Nothing is downloaded, and what cannot be read exactly is refused.
"""

import argparse
import gzip
import hashlib
import json
import math
import re
import signal
import statistics
import sys
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from lib.tokenizer import EOS, MASK, WORDS, Tokenizer, byte_alphabet
from lib.util import Mistake, Parser, entry, fail, generator, is_number, read_json, reading, replace_file, write_json

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


def learn_names(folder: Path) -> None:
    """A BPE of the names, learned once, and the Unicode version that it is of."""
    if not (folder / "tokenizer.json").exists():
        write_json(folder / "tokenizer.json", learn_bpe(unicode_names(), NAMES_VOCAB))
        write_json(folder / "names.json", {"unidata_version": unicodedata.unidata_version})


def learn_bpe(texts: Iterable[str], vocab_size: int) -> dict:
    """The content of a `tokenizer.json` with vocab_size ids: bytes, learned merges, EOS and MASK.

    Each merge joins the pair of tokens that is most often side by side in words, if it is so twice.
    """
    found = Counter(word for text in texts for word in re.findall(WORDS, text))

    # while merges are learned a token is one character, chr(id), and a pair is two
    tokens = byte_alphabet()
    words = {word.encode().decode("latin-1"): n for word, n in found.items()}
    counts: Counter[str] = Counter()
    for word, n in words.items():
        count_pairs(counts, word, n)

    merges = []
    while len(tokens) + 2 < vocab_size:
        most = max(counts.values(), default=0)
        if most < 2:
            break

        # of equals the first in string order
        equals = [pair for pair, n in counts.items() if n == most]
        pair = min(equals, key=lambda pair: [tokens[ord(token)] for token in pair])
        merge = [tokens[ord(token)] for token in pair]
        merges.append(merge)
        joined = chr(len(tokens))
        tokens.append("".join(merge))

        # in every word that holds it, from the left: of a, a, a the first two
        for word in [word for word in words if pair in word]:
            n = words.pop(word)
            count_pairs(counts, word, -n)
            word = word.replace(pair, joined)
            count_pairs(counts, word, n)
            words[word] = n

    # ids: the bytes, the merges in order, then the two special tokens
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    eos = {"id": len(tokens), "content": EOS} | plain
    mask = {"id": len(tokens) + 1, "content": MASK} | plain

    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {token: i for i, token in enumerate(tokens)}
    return {
        "added_tokens": [eos, mask],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def count_pairs(counts: Counter, word: str, n: int) -> None:
    """Add n to the count of every two neighbours of a word."""
    for left, right in pairwise(word):
        counts[left + right] += n


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


@dataclass
class Batch:
    """Some rows of a corpus, all (R, T)."""

    clean: Tensor  # int64
    real: Tensor  # bool, False on padding
    free: Tensor  # bool, the positions that may be corrupted: real ones outside the prompt
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens
    draws: list[torch.Generator]  # one a row, a function of its index


def get_batch(corpus: Corpus, split: str, first: int, n: int, seed: int, device: torch.device) -> Batch:
    """Rows first .. first+n of "train" or "val"; those of "val" draw the same in every run."""
    clean, real, prompt = corpus.rows[split].batch(first, n)
    key = (seed, "train") if split == "train" else ("val",)
    draws = [generator(*key, i) for i in range(first, first + n)]
    free = real & ~prompt
    return Batch(clean.to(device), real.to(device), free.to(device), corpus.n_plain, draws)


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


def fast_kernels(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """On a CPU in bf16 plain products are faster than flash attention on rows as short as a name."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()
