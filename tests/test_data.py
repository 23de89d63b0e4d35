"""Corpora, tokenizers and rows. `pytest tests/test_data.py` (the released tokenizer: test_convert.py)"""

import copy
import gzip
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.data import is_validation, learn_bpe, load_text, text_corpus, unicode_names
from lib.tokenizer import bpe_tokenizer, byte_tokenizer
from lib.util import Mistake, exists, read_json

NAMES = Path(__file__).parent.parent / "assets" / "names"
TEXT = "naïve café, 日本\n"


def refusal(*sources) -> str:
    """The words with which a corpus is refused."""
    with pytest.raises(Mistake) as mistake:
        load_text([str(s) for s in sources])
    return str(mistake.value)


def splits(sources: list, tokenizer, seq_len: int, seed: int = 0, **how):
    """The rows of training and those of validation."""
    corpus = text_corpus([str(s) for s in sources], tokenizer, "bytes", seq_len, seed, **how)
    return corpus.rows["train"], corpus.rows["val"]


# --- tokenizers
def test_bytes_round_trip_and_specials():
    t = byte_tokenizer()
    assert t.encode(TEXT) == list(TEXT.encode()) and t.decode(t.encode(TEXT)) == TEXT
    assert (t.eos_id, t.mask_id, t.vocab_size) == (256, 257, 258)
    assert t.encode("<|endoftext|>") == [256]  # typed by a user it is the token ...
    assert t.encode_document("<|endoftext|>").tolist() == list(b"<|endoftext|>")  # ... in a corpus it is text
    assert t.encode_document("").tolist() == []
    assert t.decode([104, 105, 256, 257]) == "hi" and t.decode([0xC3]) == "\ufffd"
    for text in [*map(chr, range(256)), "\u2028\U0010ffff \t \u00a0\u3000\x1c\x85", "x" * 100_000, " " * 100_000]:
        assert t.encode(text) == list(text.encode())


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

    # older files write a merge as one string, and ids may have any order; NFC composes
    spec["model"]["merges"] = [" ".join(merge) for merge in spec["model"]["merges"]]
    spec["model"]["vocab"] = {token: 259 - i for token, i in spec["model"]["vocab"].items()}
    t = bpe_tokenizer(Path("older"), spec | {"normalizer": {"type": "NFC"}})
    assert t.encode("aaa ab") == [1, 0] and t.encode("b") == [259 - 98] and t.decode([1, 0]) == "aaa ab"
    assert t.encode("e\u0301") == t.encode_document("e\u0301").tolist() == t.encode("é")


REFUSED = [
    (lambda s: s["model"].update(type="Unigram"), "model Unigram cannot be expressed exactly"),
    (lambda s: s["model"].update(byte_fallback=True), "BPE option"),
    (lambda s: s.update(normalizer={"type": "Lowercase"}), "normalizer"),
    (lambda s: s["pre_tokenizer"]["pretokenizers"].pop(), "pre-tokenizer"),
    (lambda s: s["pre_tokenizer"]["pretokenizers"][0].update(invert=True), "split behaviour"),
    (lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "prefix space"),
    (lambda s: s.update(post_processor={"type": "TemplateProcessing"}), "post-processor"),
    (lambda s: s["added_tokens"][1].update(rstrip=True), "stripping added token"),
    (lambda s: s["model"]["merges"].reverse(), "not expressible"),
    (lambda s: s["model"]["merges"].append(["a", "a"]), "not expressible"),
    (lambda s: s["model"]["vocab"].pop("ab"), "lacks b'ab'"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_what_tiktoken_cannot_reproduce_is_refused(change, says):
    spec = copy.deepcopy(learn_bpe(["aaa ab", "aaa ab"], 1024))
    change(spec)
    with pytest.raises(Mistake) as mistake:
        bpe_tokenizer(Path("changed"), spec)
    assert says in str(mistake.value) and "changed" in str(mistake.value)


# --- names
@pytest.fixture(scope="module")
def names():
    return list(unicode_names())


@pytest.fixture(scope="module")
def learned(names):
    """The content of the tokenizer.json learned from the names."""
    return learn_bpe(names, 1024)


def test_the_names_tokenizer_is_the_shipped_one(learned):
    if read_json(NAMES / "names.json", "names")["unidata_version"] == unicodedata.unidata_version:
        assert learned == read_json(NAMES / "tokenizer.json", "tokenizer")
    assert bpe_tokenizer(Path("names"), learned).vocab_size == 1024


def test_names_are_all_but_the_numbered(names):
    if unicodedata.unidata_version == "14.0.0":
        assert len(names) == 31_623
    kept = {"SPACE", "LATIN SMALL LETTER A", "SQUARED CJK UNIFIED IDEOGRAPH-7981", "BRAILLE PATTERN DOTS-12345678"}
    kept |= {"TANGUT ITERATION MARK", "HANGUL CHOSEONG KIYEOK", "MONGOLIAN FREE VARIATION SELECTOR ONE"}
    assert kept <= set(names)
    numbered = {"CJK UNIFIED IDEOGRAPH-4E00", "CJK UNIFIED IDEOGRAPH-20000", "CJK COMPATIBILITY IDEOGRAPH-F900"}
    numbered |= {"NUSHU CHARACTER-1B170", "HANGUL SYLLABLE GAG", "TANGUT COMPONENT-768", "VARIATION SELECTOR-17"}
    assert all(exists(name) for name in numbered) and not numbered & set(names)


def test_exists_is_the_exact_judge():
    assert exists("LATIN SMALL LETTER A") == "a" and exists("CJK UNIFIED IDEOGRAPH-4E00") == "一"
    alias, sequence = "LATIN CAPITAL LETTER GHA", "LATIN SMALL LETTER A WITH MACRON AND GRAVE"
    assert unicodedata.lookup(alias) == "Ƣ" and len(unicodedata.lookup(sequence)) == 2
    for no_name in (alias, sequence, "NULL", "latin small letter a", "LATIN SMALL LETTER A ", "", "\ud800", "A" * 999):
        assert exists(no_name) is None


def test_a_name_is_its_own_document_and_split(names, learned):
    assert load_text(["names"], max_docs=2) == [("SPACE", "SPACE"), ("EXCLAMATION MARK", "EXCLAMATION MARK")]
    t = bpe_tokenizer(Path("names"), learned)
    train, val = splits(["names"], t, 48)  # the longest name has 33 tokens
    for part, held_out in ((train, False), (val, True)):
        decoded = [t.decode(row.tolist()) for row in part.rows]
        assert decoded == [name for name in names if is_validation(name) == held_out]
    assert [n for n in range(60) if is_validation(f"{n}.py")] == [20, 41]  # one in twenty, whatever else there is


def test_a_name_has_a_random_beginning_that_is_its_prompt(learned):
    """From nothing to all of the name but its last token, the same one for the same row; never its end or padding."""
    rows = splits(["names"], bpe_tokenizer(Path("names"), learned), 32, block_length=8, batch_size=4)[0]
    x, real, prompt = rows.batch(0, 400)
    n_text = (x != rows.pad_id).sum(-1)
    n_prompt = prompt.sum(-1)
    assert torch.equal(prompt, torch.arange(x.shape[1]) < n_prompt[:, None])
    assert (n_prompt < n_text).all() and (real | ~prompt).all()
    share = (n_prompt / n_text)[n_text > 8]
    assert share.min() < 0.1 and share.max() > 0.8 and share.mean() == pytest.approx(0.5 - 1 / 25, abs=0.06)
    for first in (0, 8, 396):
        assert torch.equal(rows.batch(first, 4)[2], prompt[first : first + 4, : rows.batch(first, 4)[0].shape[1]])

    # other text has none, and its rows of validation are those of every seed
    assert not splits([NAMES / "tokenizer.json"], byte_tokenizer(), 32)[0].batch(0, 4)[2].any()
    held_out = [splits(["names"], bpe_tokenizer(Path("names"), learned), 32, seed)[1].batch(0, 9) for seed in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*held_out, strict=True))


# --- documents
def record(n, **fields):
    return {"text": f"document {n} " * 4, "int_score": 4, "token_count": 300} | fields


def write_records(path, records):
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), path)
    else:
        lines = "".join(json.dumps(r) + "\n" for r in records).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def test_paper_filter(tmp_path):
    kept = [record(1), {"text": "no fields"}, record(1, int_score=None), record(1, int_score=3)]
    kept += [record(1, token_count=256), record(1, token_count=1800)]
    dropped = [record(1, int_score=2), record(1, token_count=255), record(1, token_count=1801)]
    write_records(tmp_path / "a.jsonl", dropped + kept)
    names = [name for name, _ in load_text([str(tmp_path / "a.jsonl")])]
    assert names == [f"a.jsonl:{n}" for n in (4, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_records_are_the_same_documents_alone_and_in_a_folder(tmp_path, name):
    """A folder is read in order, each file by its kind; what is binary or hidden is passed over."""
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / name
    write_records(path, [record(n, int_score=n) for n in range(6)])
    texts = [record(n)["text"] for n in (3, 4, 5)]
    assert [text for _, text in load_text([str(path)])] == texts

    (tmp_path / ".git").mkdir()
    for file in ("b.md", "a.txt", ".hidden", ".git/config"):
        (tmp_path / file).write_text(file)
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    inside = load_text([str(tmp_path)])
    assert [file for file, _ in inside] == ["a.txt", "b.md", *(f"sub/{name}:{k}" for k in (4, 5, 6))]
    assert [text for _, text in inside] == ["a.txt", "b.md", *texts]
    assert "c.bin" in refusal(tmp_path / "c.bin")  # but not where it is asked for


def test_damaged_records_are_refused_in_a_folder_too(tmp_path):
    for number, (ending, content) in enumerate((
        ("jsonl", b'{"text": "fine"}\n{"text": \n'),
        ("jsonl", b'{"text": 3}\n'),
        ("jsonl", b'{"text": "fine", "int_score": "three"}\n'),
        ("jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 99)[:-9]),
    )):  # fmt: skip
        path = tmp_path / str(number) / f"a.{ending}"
        path.parent.mkdir()
        path.write_bytes(content)
        assert path.name in refusal(path) and refusal(path.parent) == refusal(path)


def test_nothing_to_read_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "d.txt") and "holds no text" in refusal(tmp_path)
    assert "a\0b.jsonl" in refusal(tmp_path / "a\0b.jsonl")
    write_records(tmp_path / "a.jsonl", [record(1, int_score=1)])
    assert "filter" in refusal(tmp_path / "a.jsonl")


def test_stdlib_is_python_source_without_tests():
    names = [n for n, _ in load_text(["stdlib"])]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not any("test" in n.split("/")[:-1] or "site-packages" in n for n in names)
    assert names == sorted(names)


# --- rows
def rows_of(folder: Path, lengths: dict[int, int], seq_len: int, **how):
    """(training, validation) rows of so many documents of each length: one letter, again and again."""
    folder.mkdir(exist_ok=True)
    for n, times in lengths.items():
        for k in range(times):
            (folder / f"{n}-{k:02}.txt").write_text(chr(ord("a") + k % 26) * n)
    return splits([folder], byte_tokenizer(), seq_len, **how)


def test_one_document_a_row_padded_and_closed_by_eos(tmp_path):
    train, val = rows_of(tmp_path / "8", {11: 40}, 8)
    assert len(train) + len(val) == 80 and len(val) > 0  # 11 letters and eos: a row of 8 and a row of 4
    x, real, prompt = train.batch(0, 40)
    assert not prompt.any() and (x[~real] == 256).all()
    for row, r in zip(x.tolist(), real.sum(1).tolist(), strict=True):
        assert len(set(row[:r]) - {256}) == 1
        assert r == 8 or (r == 4 and row[3] == 256)
    assert train.count_real(0, 40) == int(real.sum())
    assert train.describe() == f"{len(train)} rows, {6 * len(train)} tokens"

    # the block in which a document ends is filled: in blocks of 4 nothing is added, in blocks of 8 four more eos
    for block_length, expected in ((4, 12), (8, 16)):
        train, val = rows_of(tmp_path / "24", {11: 40}, 24, block_length=block_length)
        assert {len(row) for row in train.rows + val.rows} == {expected}
        assert all((row[11:] == 256).all() and (row[:11] < 256).all() for row in train.rows + val.rows)


def test_the_rows_of_a_training_batch_have_one_width(tmp_path):
    """Documents of 3, 6, 12 and 17 letters in blocks of 4: with their eos rows of 1, 2, 4 and 5 blocks."""
    train, val = rows_of(tmp_path, dict.fromkeys((3, 6, 12, 17), 30), 20, block_length=4, batch_size=7)
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
    assert val.batch(0, len(val))[0].shape == (len(val), 20)


def test_a_single_text_keeps_its_last_rows_for_validation(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(799))
    (tmp_path / "one.txt").write_text(text)
    train, val = splits([tmp_path / "one.txt"], byte_tokenizer(), 8)
    assert (len(train), len(val)) == (95, 5)
    assert np.concatenate(train.rows).tolist() == list(text[:760].encode())
    assert np.concatenate(val.rows).tolist() == [*text[760:].encode(), 256]
