"""Folders of rows: what is written, and what is read from them. `pytest tests/test_rows.py`"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT
from safetensors.torch import load_file

from lib.rows import Corpus, Meta, Rows, get_batch, read_corpus, read_meta, write_meta, write_rows

NAMES = ROOT / "data" / "names"
EOS = 256
BYTES = Meta(272, EOS, 257, 256)


def write(folder: Path, train: list, val: list | None = None, meta: Meta = BYTES) -> Path:
    """A folder of rows; documents are (ids, length of the prompt)."""
    for split, documents in (("train", train), ("val", val or train)):
        ids = [np.array(ids) for ids, _ in documents]
        write_rows(folder, split, ids, [prompt for _, prompt in documents], meta.vocab_size)
    write_meta(folder, meta)
    return folder


def letters(lengths: dict[int, int]) -> list:
    """So many documents of each length: each repeats one letter, and ends with eos."""
    return [([97 + k % 26] * n + [EOS], 0) for n, times in lengths.items() for k in range(times)]


def in_order(rows: Rows) -> list[list[int]]:
    return [row.tolist() for row in rows.rows]


# --- the format
def test_a_folder_worked_by_hand(tmp_path):
    write(tmp_path, [([5, 6, EOS], 1), ([7, EOS], -1)], [([8], 0)])
    train = load_file(tmp_path / "train.safetensors")
    assert {name: (str(t.dtype), t.tolist()) for name, t in train.items()} == {
        "ids": ("torch.int16", [5, 6, EOS, 7, EOS]),
        "starts": ("torch.int64", [0, 3, 5]),
        "prompts": ("torch.int32", [1, -1]),
    }
    about = dict(vocab_size=272, eos_id=256, mask_id=257, n_plain=256, block_length=None, judge=None)
    assert json.loads((tmp_path / "meta.json").read_text()) == about and read_meta(tmp_path) == BYTES

    # 32768 ids fit into 16 bits, one more does not
    for vocab_size, kind in ((32768, torch.int16), (32769, torch.int32)):
        folder = write(tmp_path / str(vocab_size), [([0, vocab_size - 1], 0)], meta=Meta(vocab_size, 1, 2, 1))
        assert load_file(folder / "val.safetensors")["ids"].dtype == kind
        assert in_order(read_corpus(folder, 8, 0, 1, 1).rows["train"]) == [[0, vocab_size - 1]]


# --- names
def test_a_name_has_a_random_beginning_that_is_its_prompt():
    """From no token to all tokens of the name except the last one, but never eos or padding; always the same."""
    rows = read_corpus(NAMES, 32, 0, 8, 4).rows["train"]
    x, real, prompt = rows.batch(0, 400)
    n_text = (x != rows.pad_id).sum(-1)
    n_prompt = prompt.sum(-1)
    assert torch.equal(prompt, torch.arange(x.shape[1]) < n_prompt[:, None])
    assert (n_prompt < n_text).all() and (real | ~prompt).all()
    share = (n_prompt / n_text)[n_text > 8]
    assert share.min() < 0.1 and share.max() > 0.8 and share.mean() == pytest.approx(0.5 - 1 / 25, abs=0.06)
    again = rows.batch(8, 4)[2]
    assert torch.equal(again, prompt[8:12, : again.shape[1]])


def test_a_rows_random_numbers_follow_its_number_and_in_training_the_seed():
    def draws(split: str, first: int, seed: int) -> list[float]:
        return [
            torch.rand(1, generator=g).item()
            for g in get_batch(names, split, first, 2, seed, torch.device("cpu")).draws
        ]

    names = read_corpus(NAMES, 32, 0, 8, 4)
    assert draws("train", 0, 1)[1] == draws("train", 1, 1)[0] != draws("train", 1, 2)[0]
    assert draws("val", 0, 1) == draws("val", 0, 2) != draws("val", 1, 2)


# --- rows
def test_one_document_a_row_padded_and_closed_by_eos(tmp_path):
    rows = read_corpus(write(tmp_path, letters({11: 40})), 8, 0, 1, 0).rows["train"]
    assert rows.describe() == "80 rows, 480 tokens"  # 11 letters and eos: a row of 8 and a row of 4
    x, real, prompt = rows.batch(0, 40)
    assert not prompt.any() and (x[~real] == EOS).all()
    for row, r in zip(x.tolist(), real.sum(1).tolist(), strict=True):
        assert len(set(row[:r]) - {EOS}) == 1
        assert r == 8 or (r == 4 and row[3] == EOS)
    assert rows.count_real(0, 40) == int(real.sum())

    # the block in which a document ends is filled: in blocks of 4 nothing is added, in blocks of 8 four more eos
    for block_length, expected in ((4, 12), (8, 16)):
        rows = read_corpus(tmp_path, 24, 0, block_length, 0).rows["train"]
        assert {len(row) for row in rows.rows} == {expected}
        assert all((row[11:] == EOS).all() and (row[:11] < EOS).all() for row in rows.rows)


def test_what_is_not_closed_by_eos_is_not_filled(tmp_path):
    """The first part of a text goes on in another row, and an empty text is one block of eos."""
    write(tmp_path, [([1, 2, 3, 4, 5], 0), ([EOS], 0), ([6, 7, 8, EOS], 0)])
    rows = read_corpus(tmp_path, 4, 0, 4, 1).rows["train"]
    assert in_order(rows) == [[1, 2, 3, 4], [5], [EOS] * 4, [6, 7, 8, EOS]]


def test_a_fixed_prompt_goes_on_in_the_pieces_of_its_document(tmp_path):
    """Of 10 tokens 6 are the prompt: in rows of 4 this is all of the first row, and two tokens of the second."""
    write(tmp_path, [(list(range(10, 19)) + [EOS], 6), ([1, EOS], 2), ([2, EOS], 0)])
    rows = read_corpus(tmp_path, 4, 0, 2, 0).rows["train"]
    assert in_order(rows) == [[10, 11, 12, 13], [14, 15, 16, 17], [18, EOS], [1, EOS], [2, EOS]]
    assert rows.prompts == [4, 2, 0, 2, 0]
    batch = get_batch(Corpus({"train": rows}, BYTES), "train", 0, 5, 0, torch.device("cpu"))
    free = {tuple(row.tolist()): f.tolist() for row, f in zip(batch.clean, batch.corruptible, strict=True)}
    assert free[10, 11, 12, 13] == [False] * 4
    assert free[14, 15, 16, 17] == [False, False, True, True]
    assert free[18, EOS, EOS, EOS] == [True, True, False, False]  # the last two are padding


def test_the_rows_of_a_training_batch_have_one_width(tmp_path):
    """Documents of 3, 6, 12 and 17 letters, each with its eos, are rows of 1, 2, 4 and 5 blocks of 4."""
    write(tmp_path, letters(dict.fromkeys((3, 6, 12, 17), 30)))
    corpus = read_corpus(tmp_path, 20, 0, 4, 7)
    train = corpus.rows["train"]
    epoch = len(train.order)
    assert epoch % 7 == 0 and epoch < len(train) + 4 * 7
    widths = []
    for first in range(0, epoch, 7):
        x, real, _ = train.batch(first, 7)
        widths.append(x.shape[1])
        assert set(real.sum(1).tolist()) == {x.shape[1]}
        for r in range(7):  # a micro-batch has the rows of the batch
            assert torch.equal(train.batch(first + r, 1)[0], x[r : r + 1])
    assert sorted(set(widths)) == [4, 8, 16, 20] and widths != sorted(widths)

    # every epoch has all rows, in another order, and is what it was when it is read again
    first, second, again = ([train.row(start + i) for i in range(epoch)] for start in (0, epoch, 0))
    assert set(first) == set(second) == set(range(len(train))) and first == again != second
    assert corpus.rows["val"].batch(0, 120)[0].shape == (120, 20)
