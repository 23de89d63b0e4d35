"""Corpora and rows. `pytest tests/test_data.py` (the released tokenizer: test_convert.py)"""

import gzip
import json

import numpy as np
import pytest
import torch

from data import Filter, byte_tokenizer, is_validation, load_sequences, load_text

TEXT = "naïve café, 日本\n"


def record(n, **fields):
    return {"text": f"document {n} " * 4, "int_score": 4, "token_count": 300} | fields


def test_bytes_round_trip_and_specials():
    t = byte_tokenizer()
    assert t.encode(TEXT) == list(TEXT.encode()) and t.decode(t.encode(TEXT)) == TEXT
    assert (t.eos_id, t.mask_id, t.vocab_size) == (256, 257, 258)
    assert t.encode("<|endoftext|>") == [256]  # typed by a user it is the token ...
    assert t.encode_documents(["<|endoftext|>"])[0].tolist() == list(b"<|endoftext|>")  # ... in a corpus it is text
    assert t.decode([104, 105, 256, 257]) == "hi"
    assert t.decode(list("é".encode())[:1]) == "\ufffd"
    long = "x" * 100_000
    assert len(t.encode(long)) == 100_000


def test_paper_filter():
    keep = Filter()
    assert keep.keeps(record(1)) and keep.keeps({"text": "no fields"})
    for bad in (dict(int_score=2), dict(token_count=255), dict(token_count=1801)):
        assert not keep.keeps(record(1, **bad))
    for good in (dict(int_score=3), dict(token_count=256), dict(token_count=1800)):
        assert keep.keeps(record(1, **good))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_records_are_filtered_documents(tmp_path, name):
    lines = "\n".join(json.dumps(record(n, int_score=n)) for n in range(6)) + "\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    assert [n for n, _ in load_text([str(path)], Filter())] == [f"{name}:{k}" for k in (4, 5, 6)]
    assert len(load_text([str(path)], Filter(max_docs=2))) == 2


def test_folder_reads_text_and_passes_over_binary_and_hidden(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("h")
    assert load_text([str(tmp_path)], Filter()) == [("a.txt", "a"), ("sub/b.md", "b")]


def test_stdlib_is_python_source_without_tests():
    names = [n for n, _ in load_text(["stdlib"], Filter())]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not any("test" in n.split("/")[:-1] or "site-packages" in n for n in names)
    assert names == sorted(names)
    share = np.mean([is_validation(n) for n in names])
    assert 0.01 < share < 0.12  # one in twenty, by hash


def two_documents(tmp_path, seq_len=8):
    for k in range(40):
        (tmp_path / f"{k:02}.txt").write_text(chr(ord("a") + k % 26) * 11)
    return load_sequences([str(tmp_path)], byte_tokenizer(), seq_len, 0, Filter())


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


def test_every_row_once_an_epoch_in_another_order(tmp_path):
    train, _ = two_documents(tmp_path)
    n = len(train)
    epochs = [[train.shuffled(e * n + i) for i in range(n)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(n)) and epochs[0] != epochs[1]
    assert torch.equal(train.batch(5, 3)[0], torch.cat([train.batch(5, 1)[0], train.batch(6, 2)[0]]))


def test_a_single_text_keeps_its_last_rows_for_validation(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(799)))
    train, val = load_sequences([str(path)], byte_tokenizer(), 8, 0, Filter())
    assert (len(train), len(val)) == (95, 5)
    assert val.spans[:, 0].min() > train.spans[:, 0].max()
