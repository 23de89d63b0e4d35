"""Documents, the split, the script. `pytest tests/test_prepare.py` (the rows: test_rows.py)"""

import gzip
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from common import GOLDEN, ROOT, caller

import prepare
from lib.names import exists
from lib.rows import Meta, read_corpus, read_meta
from lib.tokenizer import byte_spec, byte_tokenizer, load_tokenizer
from lib.util import Mistake, write_json
from prepare import NAMES, hold_out, is_validation, load_text, tokenize, unicode_names

BPE = NAMES / "tokenizer.json"


def refusal(*sources) -> str:
    """The words with which a corpus is refused."""
    with pytest.raises(Mistake) as mistake:
        load_text([str(s) for s in sources])
    return str(mistake.value)


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
    """Every name is a document, ends with eos, and is in its split."""
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

    t = load_tokenizer(NAMES)
    corpus = read_corpus(NAMES, 48, 0, 1, 1)  # the longest name has 33 tokens
    for split, held_out in (("train", False), ("val", True)):
        rows = [row.tolist() for row in corpus.rows[split].rows]
        assert [t.decode(row) for row in rows] == [name for name in names if is_validation(name) == held_out]
        assert all(row.count(t.eos_id) == 1 and row[-1] == t.eos_id for row in rows)


def test_the_rows_of_shakespeare_are_what_the_script_writes(tmp_path, monkeypatch, capsys):
    """Every byte of the text is there once, and the last twentieth is held out."""
    folder = ROOT / "data" / "shakespeare"
    caller(prepare, monkeypatch, capsys)(folder / "input.txt", "--out", tmp_path / "rows")
    for path in (tmp_path / "rows").iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    rows = [row for split in ("train", "val") for row in read_corpus(folder, 256, 0, 8, 1).rows[split].rows]
    text = [i for row in rows for i in row.tolist() if i < 256]
    assert bytes(text) == (folder / "input.txt").read_bytes()


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
    # int_score is the score rounded; the score counts where it alone is stated
    kept += [record(1, score=2.6), record(1, score=3, int_score=None), {"text": "a score", "score": 3.5}]
    dropped = [record(1, int_score=2), record(1, token_count=255), record(1, token_count=1801)]
    dropped += [record(1, score=2.9, int_score=None), {"text": "a score", "score": 1}]
    write_records(tmp_path / "a.jsonl", dropped + kept)
    names = [name for name, _ in load_text([str(tmp_path / "a.jsonl")])]
    assert names == [f"a.jsonl:{n}" for n in range(6, 15)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_records_are_the_same_documents_alone_and_in_a_folder(tmp_path, name):
    """A folder is read in order, each file by its kind. Binary and hidden files are left out."""
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


@pytest.mark.parametrize("name, content, says", [
    ("a.jsonl", b'{"text": "fine", "int_score": "three"}\n', "int_score"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 99)[:-9], "damaged"),
    ("package.json", b'{"name": "x"}', "text is None"),
    ("package.json", b'["x"]', "record 1 of"),
    ("package.json", b"{'text': 1}", "damaged"),
])  # fmt: skip
def test_what_is_no_record_is_refused_in_a_folder_too(name, content, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    said = refusal(path)
    assert name in said and says in said and refusal(tmp_path) == said


SAME = [{"text": "one\r\ntwo\rthree\n"}, {"text": "four"}]
LINES = "".join(json.dumps(record) + "\r\n" for record in SAME).encode()
FILES = {
    "a.jsonl": LINES, "a.JSONL": LINES, "a.ndjson": b"\xef\xbb\xbf" + LINES, "a.NDJSON.gz": gzip.compress(LINES),
    "a.json": json.dumps(SAME, indent=1).encode(), "a.json.gz": gzip.compress(json.dumps(SAME).encode()),
    "lines.json": LINES, "bom.json": b"\xef\xbb\xbf" + json.dumps(SAME).encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_records_are_read_by_whatever_name(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    found = load_text([str(tmp_path / name)])
    assert [text for _, text in found] == ["one\ntwo\nthree\n", "four"]
    assert [at for at, _ in found] == [f"{name}:1", f"{name}:2"]


def test_text_has_no_byte_order_mark_and_ends_its_lines_as_records_do(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert load_text([str(tmp_path / "a.txt")]) == [("a.txt", "one\ntwo\nthree\n")]


def test_what_is_left_out_is_counted_and_named(tmp_path, capsys):
    for name in ("b.bin", "d.png"):
        (tmp_path / name).write_bytes(b"\x89\xff")
    says = "; left out: 2 that are not UTF-8 text (b.bin, d.png)"
    assert refusal(tmp_path) == f"{tmp_path} has no text{says}"

    (tmp_path / "a.txt").write_text("a text")
    write_records(tmp_path / "c.jsonl", [record(1, int_score=2), record(2), record(3, token_count=9)])
    (tmp_path / "e.txt").write_text("")
    assert len(load_text([str(tmp_path)])) == 2
    says += ", and 1 without a character, and 2 by the filter on score and length"
    assert capsys.readouterr().out == f"read   2 documents{says}\n"


def test_so_many_documents_to_train_on(tmp_path):
    """Files 20.txt, 41.txt and others are read in the order of their names. Those to validate are not counted."""
    for n in range(60):
        (tmp_path / f"{n:02}.txt").write_text("a text")
    held_out = [n for n in range(60) if is_validation(f"{n:02}.txt")]
    assert held_out
    for n_docs in (1, held_out[0] + 1, 50, 60 - len(held_out), 99):
        names = [int(name[:2]) for name, _ in load_text([str(tmp_path)], n_docs)]
        train = [n for n in range(60) if n not in held_out][:n_docs]
        assert [n for n in names if n not in held_out] == train and names == list(range(len(names)))
    assert len(load_text([str(tmp_path)])) == 60


def test_random_tokens_are_no_special_ones_wherever_these_stand(tmp_path):
    """Here special tokens are the first ids, and no token has the ids 2 to 4."""
    (tmp_path / "a.txt").write_text("a text\n" * 99)
    spec = byte_spec()
    spec["model"]["vocab"] = {token: 5 + i for token, i in spec["model"]["vocab"].items()}
    for i, token in enumerate(spec["added_tokens"]):
        token["id"] = i
    write_json(tmp_path / "tokenizer.json", spec)
    prepare.prepare_text([str(tmp_path / "a.txt")], tmp_path / "rows", like=tmp_path, max_docs=0)
    corpus = read_corpus(tmp_path / "rows", 8, 0, 8, 1)
    assert corpus.meta == Meta(272, 0, 1, 261, not_plain=[0, 1, 2, 3, 4])
    assert corpus.plain.tolist() == list(range(5, 261))
    t = load_tokenizer(tmp_path / "rows")
    assert t.decode(np.concatenate(corpus.rows["train"].rows)).startswith("a text\na text\n")


def test_nothing_to_read_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "d.txt") and "has no text" in refusal(tmp_path)
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


def test_a_long_text_is_not_all_held_out():
    """20.py is for validation by its name. It has half of all tokens, so the last 5 % are held out in its place."""
    split = tokenize([("1.py", "x" * 999), ("20.py", "y" * 999)], byte_tokenizer(), prompt=0)
    assert [len(ids) for ids, _ in split["train"]] == [1000, 900]
    assert [len(ids) for ids, _ in split["val"]] == [100]


def test_what_is_held_out_in_its_place_is_the_end_of_the_last_text():
    """The order is that of the texts, also if an earlier one is for validation by its name."""
    split = tokenize([("20.py", "y" * 999), ("1.py", "x" * 999)], byte_tokenizer(), prompt=0)
    assert [(len(ids), bytes(ids[:1].tolist())) for ids, _ in (*split["train"], *split["val"])] == [
        (1000, b"y"), (900, b"x"), (100, b"x")
    ]  # fmt: skip


def test_a_users_files_are_not_overwritten(tmp_path, monkeypatch, capsys):
    """The folder of the texts, a folder in it, and a tokenizer of the user's, unless it is the one to be used."""
    text = tmp_path / "texts"
    text.mkdir()
    (text / "a.txt").write_text("a text " * 200)
    run = caller(prepare, monkeypatch, capsys)
    for out in (text, text / "rows"):
        assert f"--out {out} lies in {text}" in run.fails(text, "--out", out)
    assert [path.name for path in text.iterdir()] == ["a.txt"]

    own = tmp_path / "rows" / "tokenizer.json"
    own.parent.mkdir()
    own.write_bytes((BPE).read_bytes())
    assert f"{own} is there already" in run.fails(text, "--out", own.parent)
    run(text, "--like", own, "--out", own.parent)
    assert own.read_bytes() == (BPE).read_bytes()

    # rows are no texts
    assert f"{own.parent} holds rows already" in run.fails(own.parent, "--out", tmp_path / "more")


def test_a_broken_line_of_records_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n{"text": "b"}\n{"txt')
    said = caller(prepare, monkeypatch, capsys).fails(tmp_path / "a.jsonl", "--out", tmp_path / "rows")
    assert "line 3 is no JSON" in said


def test_the_last_twentieth_of_some_texts():
    """Of 300, 300 and 200 tokens the last 40 are held out. If the cut is between two documents, no part is empty."""
    documents = [(np.arange(n), p) for n, p in ((300, 0), (300, -1), (200, 0))]
    train, val = hold_out(documents)
    assert [(ids.tolist(), p) for ids, p in train[:2]] == [(ids.tolist(), p) for ids, p in documents[:2]]
    assert [ids.tolist() for ids, _ in (*train[2:], *val)] == [list(range(160)), list(range(160, 200))]
    train, val = hold_out([(np.arange(760), 0), (np.arange(40), -1)])
    assert [(len(ids), p) for ids, p in train] == [(760, 0)] and [(len(ids), p) for ids, p in val] == [(40, -1)]

    # too short to be cut: both; and one that is just long enough
    assert [len(ids) for part in hold_out([(np.arange(640), 0)]) for ids, _ in part] == [608, 32]
    few = [(np.arange(639), 0)]
    assert hold_out(few) == (few, few)


# --- the script
def test_text_is_read_by_the_tokenizer_of_a_folder(tmp_path, monkeypatch, capsys):
    """Up to a number of documents to train on; 20.py is for validation."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(60):
        (texts / f"{n}.py").write_text("A SMALL LETTER")
    caller(prepare, monkeypatch, capsys)(texts, "--out", tmp_path / "bpe", "--like", NAMES, "--max_docs", 30)
    assert read_meta(tmp_path / "bpe") == Meta(1024, 1022, 1023, 1022)
    assert (tmp_path / "bpe" / "tokenizer.json").read_bytes() == (NAMES / "tokenizer.json").read_bytes()
    train, val = read_corpus(tmp_path / "bpe", 32, 0, 8, 1).rows.values()
    assert (len(train), len(val)) == (30, 1) and len(val.rows[0]) == 8


OWN = ("python base.py --data DATA --config configs/text_base.toml && "
       "python train.py --data DATA --config configs/text.toml")  # fmt: skip
HINTS = {
    "texts": OWN,
    "texts --like bpe.json": OWN,
    "texts --like text": "python train.py --data DATA --config configs/text.toml --init_from text",
    "texts --like released": "python train.py --data DATA --config configs/llada.toml --init_from released",
    "texts --like weights/llada2.1-mini": "python train.py --data DATA --config configs/llada.toml",
    "names": "python train.py --data DATA",
    "names --like bpe.json": "python base.py --data DATA --config configs/base.toml",
}


@pytest.mark.parametrize("given", HINTS)
def test_what_trains_on_the_rows_is_said_at_the_end(given, tmp_path, monkeypatch, capsys):
    """Rows with a checkpoint's tokens train on it, and other rows need a base first. A folder with a blank in its name
    is quoted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "unicode_names", lambda: iter(["SPACE", "COMMA"]))
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("a text")
    Path("bpe.json").symlink_to(BPE)
    for folder, tokenizer in (("text", BPE), ("released", GOLDEN / "tokenizer.json")):
        Path(folder).mkdir()
        write_json(Path(folder) / "config.json", {})
        (Path(folder) / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    Path("weights").mkdir()
    Path("weights/llada2.1-mini").symlink_to(tmp_path / "released")
    out = caller(prepare, monkeypatch, capsys)(*given.replace("NAMES", str(NAMES)).split(), "--out", "to train")
    assert out.splitlines()[-1] == "to train is ready: " + HINTS[given].replace("DATA", "'to train'")
