"""Corpora, tokenizers and rows. `pytest tests/test_data.py` (the released tokenizer: test_convert.py)"""

import gzip
import json
import re
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lib import data
from lib.data import exists, is_validation, load_sequences, load_text, unicode_names
from lib.tokenizer import bpe_tokenizer, byte_tokenizer, learn_bpe
from lib.util import read_json, write_json

TEXT = "naïve café, 日本\n"


def record(n, **fields):
    return {"text": f"document {n} " * 4, "int_score": 4, "token_count": 300} | fields


def refusal(capsys, *sources):
    """The one line with which a corpus is refused."""
    with pytest.raises(SystemExit) as stop:
        load_text([str(s) for s in sources])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1
    return lines[0]


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


def test_bytes_round_trip_and_specials():
    t = byte_tokenizer()
    assert t.encode(TEXT) == list(TEXT.encode()) and t.decode(t.encode(TEXT)) == TEXT
    assert (t.eos_id, t.mask_id, t.vocab_size) == (256, 257, 258)
    assert t.encode("<|endoftext|>") == [256]  # typed by a user it is the token ...
    assert t.encode_document("<|endoftext|>").tolist() == list(b"<|endoftext|>")  # ... in a corpus it is text
    assert t.encode_document("").tolist() == []
    assert t.decode([104, 105, 256, 257]) == "hi"
    assert t.decode(list("é".encode())[:1]) == "\ufffd"
    every = [c for n in range(256) if (c := chr(n)).encode()] + ["\u2028", "\U0010ffff", " \t \u00a0\u3000\x1c\x85"]
    assert all(t.encode(c) == list(c.encode()) for c in every)
    for long in ("x" * 100_000, " " * 100_000, "日" * 30_000):
        assert t.encode(long) == list(long.encode())


def test_learned_merges_worked_by_hand():
    """Ġ is the blank. Twice "aaa ab" and once "xy" are the words aaa (2), Ġab (2), xy (1):

    1. aa occurs 2 * 2 = 4 times, ab and Ġa twice, xy once: a+a. Now aaa is aa a: of three a, the left two.
    2. ab, aa+a and Ġa occur twice. In string order a b comes first, since "a" < "aa" < "Ġ": a+b. Now Ġab is Ġ ab.
    3. aa+a and Ġ+ab occur twice: aa+a, then 4. Ġ+ab. Only xy is left, which occurs once: the end.
    """
    spec = learn_bpe(["aaa ab", "aaa ab", "xy"], 1024)
    assert spec["model"]["merges"] == [["a", "a"], ["a", "b"], ["aa", "a"], ["Ġ", "ab"]]
    t = bpe_tokenizer(Path("by hand"), spec)
    assert (t.eos_id, t.mask_id, t.vocab_size) == (260, 261, 262)
    assert t.encode("aaa ab") == [258, 259] and t.encode("xy") == [120, 121]
    assert t.encode("aaaa") == [256, 256] and t.encode("abab ") == [257, 257, 32]
    assert t.encode("ab<|mask|>") == [257, 261] and t.decode([258, 259, 260, 261]) == "aaa ab"
    assert learn_bpe(["aaa ab", "aaa ab", "xy"], 260)["model"]["merges"] == [["a", "a"], ["a", "b"]]
    assert learn_bpe(["xy", "aaa ab", "aaa ab"], 1024) == spec  # whatever the order of the texts


@pytest.fixture(scope="module")
def names():
    return list(unicode_names())


@pytest.fixture(scope="module")
def learned(names, tmp_path_factory):
    """(content of the tokenizer.json learned from the names, the tokenizer read from that file)"""
    path = tmp_path_factory.mktemp("names") / "tokenizer.json"
    write_json(path, learn_bpe(names, 1024))
    return json.loads(path.read_text()), bpe_tokenizer(path)


def in_order(text, merges):
    """The plain meaning of a merge list: every merge in turn, over the whole word, from the left."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = []
    for word in re.findall(r" ?\S+|\s+", text):
        parts = [letter[b] for b in word.encode()]
        for left, right in merges:
            joined = []
            while parts:
                both = parts[:2] == [left, right]
                joined.append(left + right if both else parts[0])
                parts = parts[1 + both :]
            parts = joined
        tokens += parts
    return tokens


def test_encoding_is_the_merges_in_order(names, learned):
    spec, t = learned
    assert (t.eos_id, t.mask_id, t.vocab_size) == (1022, 1023, 1024) and len(spec["model"]["merges"]) == 766
    vocab = spec["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(1022))
    for text in [*names[::300], "  LATIN  SMALL\n\tLETTERS", "Naïve LETTER-A1 日本", "AAAAAAAA", ""]:
        assert t.encode(text) == [vocab[token] for token in in_order(text, spec["model"]["merges"])], text


def test_each_merge_was_the_most_frequent_pair(names):
    """The incremental counts against counts from nothing, on some names."""
    texts = names[::800]
    merges = learn_bpe(texts, 300)["model"]["merges"]
    assert len(merges) == 42
    for k, merge in enumerate(merges):
        counts = {}
        for text in texts:
            for word in re.findall(r" ?\S+|\s+", text):
                for pair in pairwise(in_order(word, merges[:k])):
                    counts[pair] = counts.get(pair, 0) + 1
        assert tuple(merge) == min(counts, key=lambda pair: (-counts[pair], pair))


def test_all_names_come_back(names, learned):
    _, t = learned
    rows = [t.encode_document(name) for name in names]
    assert [t.decode(row.tolist()) for row in rows] == names
    assert 7.0 < np.mean([len(row) for row in rows]) < 7.4  # 24 bytes a name
    assert np.mean([len(row) > 15 for row in rows]) < 0.025  # a row of 16 holds nearly all of them, with eos


# ---------------------------------------------------------------------------------------------------------------------
# names


def test_names_are_all_but_the_numbered(names):
    if unicodedata.unidata_version == "14.0.0":
        assert len(names) == 31_623
    assert 31_000 < len(names) < 40_000 and len(set(names)) == len(names)
    kept = {"SPACE", "LATIN SMALL LETTER A", "SQUARED CJK UNIFIED IDEOGRAPH-7981", "BRAILLE PATTERN DOTS-12345678"}
    kept |= {"TANGUT ITERATION MARK", "HANGUL CHOSEONG KIYEOK", "MONGOLIAN FREE VARIATION SELECTOR ONE"}
    assert kept <= set(names)
    numbered = ["CJK UNIFIED IDEOGRAPH-4E00", "CJK UNIFIED IDEOGRAPH-20000", "CJK COMPATIBILITY IDEOGRAPH-F900"]
    numbered += ["NUSHU CHARACTER-1B170", "KHITAN SMALL SCRIPT CHARACTER-18B00", "HANGUL SYLLABLE GAG"]
    numbered += ["TANGUT COMPONENT-768", "VARIATION SELECTOR-17"]
    assert all(unicodedata.lookup(n) for n in numbered)
    starts = tuple(re.split("(?<=-)|(?<=SYLLABLE )", n)[0] for n in numbered) + ("TANGUT IDEOGRAPH-",)
    assert [n for n in names if n.startswith(starts)] == []


def test_exists_is_the_exact_judge(names):
    assert exists("LATIN SMALL LETTER A") == "a" and exists("LATIN SMALL LETTER AA A") is None
    assert exists("CJK UNIFIED IDEOGRAPH-4E00") == "一"  # a name, though not one of the corpus
    assert all(unicodedata.name(exists(name)) == name for name in names)
    alias, sequence = "LATIN CAPITAL LETTER GHA", "LATIN SMALL LETTER A WITH MACRON AND GRAVE"
    assert unicodedata.lookup(alias) == "Ƣ" and len(unicodedata.lookup(sequence)) == 2
    for no_name in (alias, sequence, "NULL", "latin small letter a", "LATIN SMALL LETTER A ", "", "\ud800", "A" * 999):
        assert exists(no_name) is None


def test_a_name_is_its_own_document_and_split(names, learned):
    assert load_text(["names"]) == [(name, name) for name in names]
    assert load_text(["names"], max_docs=2) == [("SPACE", "SPACE"), ("EXCLAMATION MARK", "EXCLAMATION MARK")]
    t = learned[1]
    train, val = load_sequences(["names"], t, 48, 0)  # 48: the longest name has 33 tokens
    assert len(train) + len(val) == len(names)
    assert [t.decode(row.tolist()) for row in val.rows] == [name for name in names if is_validation(name)]
    x, real, _ = train.batch(0, 4)
    for row, r in zip(x.tolist(), real.sum(1).tolist(), strict=True):
        assert row[r - 1 :] == [t.eos_id] * (48 - r + 1) and t.eos_id not in row[: r - 1]
        assert exists(t.decode(row)) and not is_validation(t.decode(row))


def test_every_token_can_be_seen():
    t = byte_tokenizer()
    shown = [t.piece(token) for token in (*b"a \n\t\r", 0xE2, 0, t.eos_id, 300)]
    assert shown == ["a", "·", "↵", "⇥", "␍", "<E2>", "<U+0000>", "<|endoftext|>", "<300>"]
    accent = "\u0301"
    t.token_bytes[300] = accent.encode()
    assert t.piece(300) == "◌" + accent


def test_no_names_without_unicodedata(monkeypatch, capsys):
    monkeypatch.setattr(data, "unicodedata", None)
    assert "unicodedata" in refusal(capsys, "names")


# ---------------------------------------------------------------------------------------------------------------------
# documents


def test_paper_filter(tmp_path):
    kept = [record(1), {"text": "no fields"}, record(1, int_score=None), record(1, int_score=3)]
    kept += [record(1, token_count=256), record(1, token_count=1800)]
    dropped = [record(1, int_score=2), record(1, token_count=255), record(1, token_count=1801)]
    rows = [r for pair in zip(kept, dropped, strict=False) for r in pair] + kept[len(dropped) :]
    write_records(tmp_path / "a.jsonl", rows)
    names = [name for name, _ in load_text([str(tmp_path / "a.jsonl")])]
    assert names == [f"a.jsonl:{n}" for n in (1, 3, 5, 7, 8, 9)]


def write_records(path, records):
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), path)
    else:
        lines = "".join(json.dumps(r) + "\n" for r in records).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


KINDS = pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])


@KINDS
def test_records_are_filtered_documents(tmp_path, name):
    path = tmp_path / name
    write_records(path, [record(n, int_score=n) for n in range(6)])
    assert [n for n, _ in load_text([str(path)])] == [f"{name}:{k}" for k in (4, 5, 6)]
    assert len(load_text([str(path)], max_docs=2)) == 2


@KINDS
def test_a_folder_reads_each_file_by_its_kind(tmp_path, name):
    """Records inside a folder are what they are alone: filtered, one document each, and compressed files are read."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    write_records(tmp_path / "sub" / name, [record(n, int_score=n) for n in range(6)])
    alone = [text for _, text in load_text([str(tmp_path / "sub" / name)])]
    inside = load_text([str(tmp_path)])
    assert [n for n, _ in inside] == ["b.txt", *(f"sub/{name}:{k}" for k in (4, 5, 6))]
    assert [text for _, text in inside] == ["b", *alone]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n'),
        ("a.jsonl", b'{"text": "fine"}\n{"body": "no text"}\n'),
        ("a.jsonl", b'{"text": "fine", "int_score": "three"}\n'),
        ("a.jsonl", b'["text"]\n'),
        ("a.jsonl", b"\xff\xfe\x00"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 99)[:-9]),
    ],
)
def test_damaged_records_are_refused_in_a_folder_too(tmp_path, capsys, name, content):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("b")
    alone = refusal(capsys, tmp_path / name)
    assert name in alone and refusal(capsys, tmp_path) == alone


def test_folder_reads_text_and_passes_over_binary_and_hidden(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("h")
    assert load_text([str(tmp_path)]) == [("a.txt", "a"), ("sub/b.md", "b")]
    assert "c.bin" in refusal(capsys, tmp_path / "c.bin")  # but not where it is asked for
    assert "no such file" in refusal(capsys, tmp_path / "d.txt")


def test_nothing_to_read_is_refused(tmp_path, capsys):
    assert "holds no text" in refusal(capsys, tmp_path)
    write_records(tmp_path / "a.jsonl", [record(1, int_score=1)])
    assert "filter" in refusal(capsys, tmp_path / "a.jsonl")


def test_stdlib_is_python_source_without_tests():
    names = [n for n, _ in load_text(["stdlib"])]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not any("test" in n.split("/")[:-1] or "site-packages" in n for n in names)
    assert names == sorted(names)
    share = np.mean([is_validation(n) for n in names])
    assert 0.01 < share < 0.12  # one in twenty, by hash


@pytest.mark.parametrize("call", [load_text, read_json, write_json], ids=lambda call: call.__name__)
def test_a_path_with_a_nul_byte_is_one_line(call, tmp_path, capsys):
    path = tmp_path / "a\0b.jsonl"
    arguments = {load_text: ([str(path)],), read_json: (path, "settings"), write_json: (path, {})}[call]
    with pytest.raises(SystemExit) as stop:
        call(*arguments)
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and r"a\0b.jsonl" in lines[0]


# ---------------------------------------------------------------------------------------------------------------------
# rows


def two_documents(tmp_path, seq_len=8, fill=1):
    tmp_path.mkdir(exist_ok=True)
    for k in range(40):
        (tmp_path / f"{k:02}.txt").write_text(chr(ord("a") + k % 26) * 11)
    return load_sequences([str(tmp_path)], byte_tokenizer(), seq_len, 0, 0, fill)


def test_one_document_a_row_padded_and_closed_by_eos(tmp_path):
    train, val = two_documents(tmp_path)
    assert len(train) + len(val) == 80 and len(val) > 0  # 11 letters and eos: a row of 8 and a row of 4
    x, real, prompt = train.batch(0, 40)
    assert not prompt.any() and (x[~real] == 256).all()
    for row, r in zip(x, real, strict=True):
        letters = set(row[r].tolist()) - {256}
        assert len(letters) <= 1 and int(r.sum()) in (8, 4)
        if int(r.sum()) == 4:
            assert row[3] == 256
    assert train.count_real(0, 40) == int(real.sum())
    assert train.describe() == f"{len(train)} rows, {6 * len(train)} tokens"


def test_the_block_in_which_a_document_ends_is_filled_with_eos(tmp_path):
    """11 letters and eos: in blocks of 4 nothing is added, in blocks of 8 four more eos."""
    for fill, expected in ((4, 12), (8, 16)):
        train, val = two_documents(tmp_path / str(fill), 24, fill)
        assert {len(row) for row in train.rows + val.rows} == {expected}
        assert all((row[11:] == 256).all() and (row[:11] < 256).all() for row in train.rows + val.rows)


def test_every_row_once_an_epoch_in_another_order(tmp_path):
    train, _ = two_documents(tmp_path)
    n = len(train)
    epochs = [[train.row(e * n + i) for i in range(n)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(n)) and epochs[0] != epochs[1]
    assert torch.equal(train.batch(5, 3)[0], torch.cat([train.batch(5, 1)[0], train.batch(6, 2)[0]]))


def test_the_rows_of_a_training_batch_have_one_width(tmp_path):
    """Documents of 3, 6, 12 and 17 letters in blocks of 4: with their eos rows of 1, 2, 4 and 5 blocks."""
    for n in (3, 6, 12, 17):
        for k in range(30):
            (tmp_path / f"{n}-{k:02}.txt").write_text("abcdefghijklmnopq"[:n])
    train, val = load_sequences([str(tmp_path)], byte_tokenizer(), 20, 0, 0, block_length=4, batch_size=7)
    epoch = train.epoch_length
    assert epoch % 7 == 0 and epoch < len(train) + 4 * 7
    widths = []
    for first in range(0, epoch, 7):
        x, real, _ = train.batch(first, 7)
        widths.append(x.shape[1])
        assert {1: 4, 2: 8, 4: 16, 5: 20}[int(real.sum(1).max()) // 4] == x.shape[1]
        assert real.sum(1).min() > x.shape[1] / 2 or x.shape[1] == 4  # a row of half the width is in another batch
        for r in range(7):  # a micro-batch has the rows of the batch
            assert torch.equal(train.batch(first + r, 1)[0], x[r : r + 1])
    assert sorted(set(widths)) == [4, 8, 16, 20] and widths != sorted(widths)
    assert {train.row(i) for i in range(epoch)} == set(range(len(train)))
    assert {train.row(epoch + i) for i in range(epoch)} == set(range(len(train)))
    assert val.batch(0, len(val))[0].shape == (len(val), 20)


def test_a_single_text_keeps_its_last_rows_for_validation(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(799))
    (tmp_path / "one.txt").write_text(text)
    train, val = load_sequences([str(tmp_path / "one.txt")], byte_tokenizer(), 8, 0)
    assert (len(train), len(val)) == (95, 5)
    assert np.concatenate(train.rows).tolist() == list(text[:760].encode())
    assert np.concatenate(val.rows).tolist() == [*text[760:].encode(), 256]
