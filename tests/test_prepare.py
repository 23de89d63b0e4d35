"""Tokenizers, documents, the split, the script. `pytest tests/test_prepare.py` (the rows: test_rows.py)"""

import gzip
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from common import caller, merged_spec, refused
from safetensors.torch import load_file

import prepare
from lib.rows import Meta, read_corpus, read_meta
from lib.tokenizer import bpe_tokenizer, byte_spec, byte_tokenizer, load_tokenizer
from lib.util import Mistake, exists, read_json
from prepare import NAMES, hold_out, is_validation, load_text, tokenize, unicode_names

TEXT = "naïve café, 日本\n"


def refusal(*sources) -> str:
    """The words with which a corpus is refused."""
    with pytest.raises(Mistake) as mistake:
        load_text([str(s) for s in sources])
    return str(mistake.value)


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


def test_merges_worked_by_hand():
    spec = merged_spec()
    t = bpe_tokenizer(Path("by hand"), spec)
    assert (t.eos_id, t.mask_id, t.vocab_size) == (260, 261, 262)
    assert t.encode("aaa ab") == [258, 259] and t.encode("xy") == [120, 121]
    assert t.encode("aaaa") == [256, 256] and t.encode("abab ") == [257, 257, 32]
    assert t.encode("ab<|mask|>") == [257, 261] and t.decode([258, 259, 260, 261]) == "aaa ab"

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
    spec = merged_spec()
    change(spec)
    with pytest.raises(Mistake) as mistake:
        bpe_tokenizer(Path("changed"), spec)
    assert says in str(mistake.value) and "changed" in str(mistake.value)


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(NAMES).vocab_size == 1024


# --- names
@pytest.fixture(scope="module")
def names():
    return list(unicode_names())


def test_names_are_all_but_the_numbered(names):
    if unicodedata.unidata_version == "14.0.0":
        assert len(names) == 31_623
    kept = {"SPACE", "LATIN SMALL LETTER A", "SQUARED CJK UNIFIED IDEOGRAPH-7981", "BRAILLE PATTERN DOTS-12345678"}
    kept |= {"TANGUT ITERATION MARK", "HANGUL CHOSEONG KIYEOK", "MONGOLIAN FREE VARIATION SELECTOR ONE"}
    assert kept <= set(names)
    numbered = {"CJK UNIFIED IDEOGRAPH-4E00", "CJK UNIFIED IDEOGRAPH-20000", "CJK COMPATIBILITY IDEOGRAPH-F900"}
    numbered |= {"NUSHU CHARACTER-1B170", "HANGUL SYLLABLE GAG", "TANGUT COMPONENT-768", "VARIATION SELECTOR-17"}
    assert all(exists(name) for name in numbered) and not numbered & set(names)


def test_the_folder_of_names_is_what_the_script_writes(names, tmp_path, monkeypatch, capsys):
    """Every name a document, closed by eos, in its split. All of it is less than a megabyte."""
    if read_meta(NAMES).judge != {"names": unicodedata.unidata_version}:
        pytest.skip("data/names is of another version of Unicode")
    out = caller(prepare, monkeypatch, capsys)("names", "--out", tmp_path / "names")
    assert out.splitlines() == [
        "train  29,997 documents, 245,973 tokens",
        "val    1,626 documents, 13,256 tokens",
        f"{tmp_path}/names is ready: python train.py --data {tmp_path}/names",
    ]
    files = ["meta.json", "tokenizer.json", "train.safetensors", "val.safetensors"]
    assert sorted(path.name for path in (tmp_path / "names").iterdir()) == files
    for name in files:
        assert (tmp_path / "names" / name).read_bytes() == (NAMES / name).read_bytes(), name
    assert sum((NAMES / name).stat().st_size for name in files) < 1_000_000

    t = load_tokenizer(NAMES)
    corpus = read_corpus(NAMES, 48, 0, 1, 1)  # the longest name has 33 tokens
    for split, held_out in (("train", False), ("val", True)):
        rows = [row.tolist() for row in corpus.rows[split].rows]
        assert [t.decode(row) for row in rows] == [name for name in names if is_validation(name) == held_out]
        assert all(row.count(t.eos_id) == 1 and row[-1] == t.eos_id for row in rows)


def test_exists_is_the_exact_judge():
    assert exists("LATIN SMALL LETTER A") == "a" and exists("CJK UNIFIED IDEOGRAPH-4E00") == "一"
    alias, sequence = "LATIN CAPITAL LETTER GHA", "LATIN SMALL LETTER A WITH MACRON AND GRAVE"
    assert unicodedata.lookup(alias) == "Ƣ" and len(unicodedata.lookup(sequence)) == 2
    for no_name in (alias, sequence, "NULL", "latin small letter a", "LATIN SMALL LETTER A ", "", "\ud800", "A" * 999):
        assert exists(no_name) is None


# --- documents
def record(n, **fields):
    return {"text": f"document {n} " * 4, "int_score": 4, "token_count": 300} | fields


def write_records(path, records):
    lines = "".join(json.dumps(r) + "\n" for r in records).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), path)


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


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", b'{"text": "fine", "int_score": "three"}\n'),
    ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 99)[:-9]),
])  # fmt: skip
def test_damaged_records_are_refused_in_a_folder_too(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    assert name in refusal(path) and refusal(tmp_path) == refusal(path)


def test_a_tokenizer_whose_special_tokens_come_first_is_refused(tmp_path):
    """A random token is drawn from the ids below the special ones: here there would be none."""
    spec = byte_spec()
    for token, i in zip(spec["added_tokens"], (0, 1), strict=True):
        token["id"] = i
    spec["model"]["vocab"] = {piece: 2 + i for piece, i in spec["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(Mistake, match="its special tokens are not its last ids"):
        prepare.prepare_text([str(tmp_path / "a.txt")], tmp_path / "rows", like=tmp_path, max_docs=0)


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


# --- the split
def test_documents_are_closed_by_eos_and_split_by_their_name():
    texts = [(f"{n}.py", "x" * (n % 3)) for n in range(60)]
    split = tokenize(texts, byte_tokenizer(), prompt=0)
    assert [n for n in range(60) if is_validation(f"{n}.py")] == [20, 41]  # one in twenty, whatever else there is
    assert [ids.tolist() for ids, _ in split["val"]] == [[120, 120, 256]] * 2
    assert [len(ids) for ids, _ in split["train"]] == [1 + n % 3 for n in range(60) if n not in (20, 41)]
    assert {prompt for part in split.values() for _, prompt in part} == {0}


def test_a_single_text_keeps_its_end_for_validation(tmp_path, monkeypatch, capsys):
    """799 letters and eos: 760 tokens to train on, in rows of 8 95, and 40 to validate, 5."""
    text = "".join(chr(97 + i % 26) for i in range(799))
    (tmp_path / "one.txt").write_text(text)
    caller(prepare, monkeypatch, capsys)(tmp_path / "one.txt", "--out", tmp_path / "rows")
    train, val = read_corpus(tmp_path / "rows", 8, 0, 8, 1).rows.values()
    assert (len(train), len(val)) == (95, 5)
    assert np.concatenate(train.rows).tolist() == list(text[:760].encode())
    assert np.concatenate(val.rows).tolist() == [*text[760:].encode(), 256]


def test_the_last_twentieth_of_some_texts():
    """Of 300, 300 and 200 tokens the last 40; where the cut is a document's edge no part is empty."""
    documents = [(np.arange(n), p) for n, p in ((300, 0), (300, -1), (200, 0))]
    train, val = hold_out(documents)
    assert [(ids.tolist(), p) for ids, p in train[:2]] == [(ids.tolist(), p) for ids, p in documents[:2]]
    assert [ids.tolist() for ids, _ in (*train[2:], *val)] == [list(range(160)), list(range(160, 200))]
    train, val = hold_out([(np.arange(760), 0), (np.arange(40), -1)])
    assert [(len(ids), p) for ids, p in train] == [(760, 0)] and [(len(ids), p) for ids, p in val] == [(40, -1)]

    # too short to be cut: both
    few = [(np.arange(639), 0)]
    assert hold_out(few) == (few, few)


# --- the script
def test_text_is_read_as_bytes_or_by_the_tokenizer_of_a_folder(tmp_path, monkeypatch, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(60):
        (texts / f"{n}.py").write_text("A SMALL LETTER")  # 20 and 41 are for validation
    call = caller(prepare, monkeypatch, capsys)
    out = call(texts, "--out", tmp_path / "bytes")
    assert out.splitlines()[0] == "train  58 documents, 870 tokens"
    assert out.endswith(f"python base.py --data {tmp_path}/bytes --config configs/text_base.toml\n")
    assert read_meta(tmp_path / "bytes") == Meta(272, 256, 257, 256)
    assert read_json(tmp_path / "bytes" / "tokenizer.json", "tokenizer") == byte_spec()
    train = load_file(tmp_path / "bytes" / "train.safetensors")
    assert train["ids"][:15].tolist() == [*b"A SMALL LETTER", 256] and train["prompts"].tolist() == [0] * 58

    # as names are read; and as a checkpoint reads, which is trained further
    out = call(texts, "--out", tmp_path / "bpe", "--like", NAMES, "--max_docs", 30)
    assert out.endswith(f"python base.py --data {tmp_path}/bpe --config configs/text_base.toml\n")
    assert read_meta(tmp_path / "bpe") == Meta(1024, 1022, 1023, 1022)
    assert (tmp_path / "bpe" / "tokenizer.json").read_bytes() == (NAMES / "tokenizer.json").read_bytes()
    train, val = read_corpus(tmp_path / "bpe", 32, 0, 8, 1).rows.values()
    assert (len(train), len(val)) == (29, 1) and len(val.rows[0]) == 8
    (tmp_path / "bpe" / "config.json").write_text("{}")
    out = call(texts, "--out", tmp_path / "again", "--like", tmp_path / "bpe")
    flags = f"--data {tmp_path}/again --config configs/text.toml --init_from {tmp_path}/bpe"
    assert out.endswith(f"python train.py {flags}\n")


def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    argv = ["names", "--out", tmp_path / "a", "--like", tmp_path]
    assert "has no tokenizer.json" in refused(prepare, monkeypatch, capsys, *argv)
    assert "--max_docs: must lie in" in refused(prepare, monkeypatch, capsys, *argv[:3], "--max_docs", -1)
    assert not (tmp_path / "a").exists()
    assert "data/names already holds rows" in refused(prepare, monkeypatch, capsys, "names", "--out", NAMES)
