"""Rows: the folder that prepare.py and toy.py write, and that train.py reads.

    train.safetensors, val.safetensors
        ids       all documents end to end; int16 if the vocabulary is at most 32768, else int32
        starts    (documents + 1,) int64: document d is ids[starts[d] : starts[d + 1]]
        prompts   (documents,) int32: how many of its first ids are its prompt, which is never corrupted
                  (except in rows of base.py's --one_by_one);
                  -1: its prompt is a random beginning, which depends on the seed and on the row's place in the stream
    meta.json         what the ids mean, see Meta; it is written last, so a folder that has it is whole
    tokenizer.json    the tokenizer, if the ids are text

The last id of a document is eos if the text ends there. Documents are cut into rows when they are read.
"""

import hashlib
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lib.util import WALK, copy_file, fail, generator, read_json, reading, replace_file, write_json

# R rows, T positions of a row


@dataclass
class Meta:
    """What the ids of a folder of rows mean."""

    vocab_size: int  # a multiple of 16
    eos_id: int
    mask_id: int
    n_plain: int  # ids 0..n_plain-1 are ordinary tokens, except those in not_plain
    block_length: int | None = None  # the only block length of a model on these rows; None: any
    judge: dict | None = None  # {"names": version of Unicode}, or {"toy": name, "V": 8, and other sizes}
    not_plain: list[int] = field(default_factory=list)  # the ids below n_plain of special tokens, or of no token

    def plain(self) -> Tensor:
        """All ordinary ids, from which random tokens are drawn: int64, in order."""
        kept = torch.ones(self.n_plain, dtype=torch.bool)
        kept[self.not_plain] = False
        return kept.nonzero()[:, 0]


# --- writing
WHOLE = ("meta.json", "config.json", "adapter.json", "train.json")  # a folder of rows, a checkpoint or a run has one


def refuse_full(folder: Path) -> None:
    """Refuse a folder that already holds rows, a checkpoint or a run: nothing is overwritten."""
    for name in WHOLE:
        if (folder / name).exists():
            fail(f"{folder} already holds rows, a checkpoint or a run: choose another --out")


def write_rows(folder: Path, split: str, documents: list[np.ndarray], prompts: list[int], vocab_size: int) -> None:
    """Write the documents of "train" or "val", each an array of at least one id."""
    ids = torch.from_numpy(np.concatenate(documents))
    tensors = {
        "ids": ids.to(torch.int16 if vocab_size <= 2**15 else torch.int32),
        "starts": torch.tensor([0, *map(len, documents)]).cumsum(0),
        "prompts": torch.tensor(prompts, dtype=torch.int32),
    }
    replace_file(folder / f"{split}.safetensors", lambda temporary: save_file(tensors, temporary))


def write_meta(folder: Path, meta: Meta) -> None:
    about = asdict(meta)
    if not meta.not_plain:
        del about["not_plain"]
    write_json(folder / "meta.json", about)


def copy_tokens(source: Path, folder: Path) -> None:
    """Copy tokenizer.json, if there is one, and meta.json, which says how the text can be checked."""
    for name in ("tokenizer.json", "meta.json"):
        if (source / name).exists():
            copy_file(source / name, folder / name)


# --- reading
def read_meta(folder: Path) -> Meta:
    path = folder / "meta.json"
    about = read_json(path, "folder of rows (prepare.py and toy.py write one)")
    with reading(path, "folder of rows", WALK):
        return Meta(**about)


def read_split(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """ids, starts and prompts."""
    with reading(path, "rows", WALK):
        tensors = load_file(path)
        return tensors["ids"], tensors["starts"], tensors["prompts"]


def rows_hash(folder: Path) -> str:
    """A hash of both splits and meta.json, in 16 hex digits."""
    digest = hashlib.sha256()
    for name in ("train.safetensors", "val.safetensors", "meta.json"):
        with reading(folder / name, "rows"), open(folder / name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


class Rows:
    """The documents of a split, cut into rows of at most seq_len ids. Each row has one document, and eos as padding.

    Training reads an endless stream of all rows in random order, again and again. Row i of the stream is a function of
    the rows, the seed, the sizes and i alone. All rows of a batch have one width, so that a row's random numbers, which
    depend on it, do not depend on the rows beside it.
    """

    def __init__(
        self, folder: Path, split: str, meta: Meta, seq_len: int, seed: int, block_length: int = 1, batch_size: int = 0
    ):
        ids, starts, prompts = read_split(folder / f"{split}.safetensors")
        self.pad_id = meta.eos_id
        self.seed = seed
        self.batch_size = batch_size

        # the rows of a toy are its documents, which all have the same length
        self.seq_len = seq_len
        if meta.judge and "toy" in meta.judge:
            self.seq_len = int(starts[1])

        self.rows: list[np.ndarray] = []
        self.prompts: list[int] = []  # each row's number of prompt tokens, or -1: a random number of them
        documents = np.split(ids.numpy(), starts[1:-1].numpy())
        for document, prompt in zip(documents, prompts.tolist(), strict=True):
            # eos ends a document, and also fills its last block, or the number of masks would give away the length
            if document[-1] == self.pad_id:
                n_eos = -len(document) % block_length
                document = np.append(document, np.full(n_eos, self.pad_id, document.dtype))

            for at in range(0, len(document), self.seq_len):
                row = document[at : at + self.seq_len]
                self.rows.append(row)
                self.prompts.append(prompt if prompt < 0 else min(max(prompt - at, 0), len(row)))

        # the width of a row: one block, two, four, ..., or seq_len; with a batch_size of 0 always seq_len
        self.widths = []
        for row in self.rows:
            width = block_length if batch_size > 0 else self.seq_len
            while width < len(row):
                width *= 2
            self.widths.append(min(width, self.seq_len))
        self.epoch = 0  # the epoch in use, and the order of its rows
        self.order = self.epoch_order(0)

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        return f"{len(self):,} rows, {sum(map(len, self.rows)):,} tokens"

    def epoch_order(self, epoch: int) -> list[int]:
        """The numbers of all rows in random order, in batches of one width. All epochs have the same length."""
        rng = generator(self.seed, "order", epoch)
        shuffled = torch.randperm(len(self), generator=rng).tolist()
        if self.batch_size == 0:
            return shuffled

        # whole batches of each width; np.resize fills the last batch with rows of the first
        batches = []
        for width in sorted(set(self.widths)):
            alike = [i for i in shuffled if self.widths[i] == width]
            n_batches = math.ceil(len(alike) / self.batch_size)
            batches += np.resize(alike, (n_batches, self.batch_size)).tolist()

        # in random order
        mixed = torch.randperm(len(batches), generator=rng).tolist()
        return [i for b in mixed for i in batches[b]]

    def row(self, i: int) -> int:
        """The number of the row that is row i of the stream."""
        epoch, position = divmod(i, len(self.order))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = self.epoch_order(epoch)
        return self.order[position]

    def count_real(self, first: int, rows: int) -> int:
        """How many positions of these rows are not padding."""
        return sum(len(self.rows[self.row(i)]) for i in range(first, first + rows))

    def batch(self, first: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows first .. first+rows of the stream: x (R, T) int64, real and prompt (R, T) bool."""
        chosen = [self.row(i) for i in range(first, first + rows)]
        x = torch.full((rows, max(self.widths[row] for row in chosen)), self.pad_id)
        real = torch.zeros_like(x, dtype=torch.bool)
        prompt = torch.zeros_like(real)
        for r, row in enumerate(chosen):
            ids = torch.from_numpy(self.rows[row])
            x[r, : len(ids)] = ids
            real[r, : len(ids)] = True

            n_prompt = self.prompts[row]
            if n_prompt == -1:
                # a random number of tokens, from none to all but the last of the text
                share = torch.rand(1, generator=generator(self.seed, "prompt", first + r))
                n_text = int((ids != self.pad_id).sum())
                n_prompt = int(share * n_text)
            prompt[r, :n_prompt] = True
        return x, real, prompt


# --- what a training run reads
@dataclass
class Corpus:
    rows: dict[str, Rows]  # "train" and "val"
    meta: Meta


@dataclass
class Batch:
    """Some rows of a corpus. Tensors are (R, T) if no other shape is given."""

    clean: Tensor  # int64
    real: Tensor  # bool, False on padding
    corruptible: Tensor  # bool: real positions outside the prompt
    plain: Tensor  # (ids,) int64: the ordinary ids, from which random tokens are drawn; on the CPU, like all draws
    draws: list[torch.Generator]  # each row's generator, a function of the row's number
    elapsed: float = 0.0  # the share of the run's steps that have been taken, for a weight that changes


def read_corpus(folder: Path, seq_len: int, seed: int, block_length: int, batch_size: int) -> Corpus:
    """The rows to train on, in batches of one width, and those to validate on, in one order and of width seq_len."""
    meta = read_meta(folder)
    train = Rows(folder, "train", meta, seq_len, seed, block_length, batch_size)
    val = Rows(folder, "val", meta, seq_len, 0, block_length)
    return Corpus({"train": train, "val": val}, meta)


def get_batch(corpus: Corpus, split: str, first: int, n: int, seed: int, device: torch.device) -> Batch:
    """Rows first .. first+n of "train" or "val". Those of "val" have the same random numbers in every run."""
    clean, real, prompt = corpus.rows[split].batch(first, n)
    key = (seed, "train") if split == "train" else ("val",)
    draws = [generator(*key, i) for i in range(first, first + n)]
    corruptible = real & ~prompt
    return Batch(clean.to(device), real.to(device), corruptible.to(device), corpus.meta.plain(), draws)
