"""Documents, the split, the script. `pytest tests/test_prepare.py`"""

import gzip
import json
import unicodedata
from pathlib import Path

import pytest
from common import ROOT, byte_spec, caller, merged_spec

import prepare
from lib.names import exists
from lib.rows import Meta, read_corpus, read_meta
from lib.tokenizer import load_tokenizer
from lib.util import Mistake, write_json
from prepare import BYTES, NAMES, load_text, tokenize


@pytest.fixture
def run(monkeypatch, capsys):
    return caller(prepare, monkeypatch, capsys)


def refusal(source: Path) -> str:
    """The words with which a corpus is refused."""
    with pytest.raises(Mistake) as mistake:
        load_text([source])
    return str(mistake.value)


# --- names
def test_the_folder_of_names_is_what_the_script_writes(run, tmp_path):
    if read_meta(NAMES).judge != {"names": unicodedata.unidata_version}:
        pytest.skip("data/names is of another version of Unicode")
    run("names", "--out", tmp_path / "names")
    for path in (tmp_path / "names").iterdir():
        assert path.read_bytes() == (NAMES / path.name).read_bytes(), path.name


def test_the_rows_of_shakespeare_are_what_the_script_writes(run, tmp_path):
    """Every byte of the text is there once, and the last twentieth is held out."""
    folder = ROOT / "data" / "shakespeare"
    run(folder / "input.txt", "--out", tmp_path / "rows")
    for path in (tmp_path / "rows").iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    rows = [row for split in ("train", "val") for row in read_corpus(folder, 256, 0, 8, 1).rows[split].rows]
    text = [i for row in rows for i in row.tolist() if i < 256]
    assert bytes(text) == (folder / "input.txt").read_bytes()


def test_exists_is_the_exact_judge():
    assert exists("LATIN SMALL LETTER A") == "a" and exists("CJK UNIFIED IDEOGRAPH-4E00") == "一"
    alias, sequence = "LATIN CAPITAL LETTER GHA", "LATIN SMALL LETTER A WITH MACRON AND GRAVE"
    assert unicodedata.lookup(alias) == "Ƣ" and len(unicodedata.lookup(sequence)) == 2
    for no_name in (alias, sequence, "NULL", "latin small letter a", "", "\ud800"):
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
    kept = [{"text": "no fields"}, record(1, int_score=3)]
    kept += [record(2, token_count=256), record(3, token_count=1800)]
    # int_score is the score rounded; the score counts where it alone is stated
    kept += [record(4, score=2.6), record(5, score=3, int_score=None)]
    dropped = [record(1, int_score=2), record(1, token_count=255), record(1, token_count=1801)]
    dropped += [record(1, score=2.9, int_score=None), record(1, int_score="three")]
    write_records(tmp_path / "a.jsonl", dropped + kept)
    assert [name for name, _ in load_text([tmp_path / "a.jsonl"])] == [f"a.jsonl:{n}" for n in range(6, 12)]


@pytest.mark.parametrize("name", ["a.JSONL.gz", "a.parquet"])
def test_records_are_documents_as_files_are(tmp_path, name):
    """A folder is read in order, each file by its kind, without hidden files."""
    (tmp_path / "sub").mkdir()
    write_records(tmp_path / "sub" / name, [record(n, int_score=n) for n in range(6)])
    texts = [record(n)["text"] for n in (3, 4, 5)]
    (tmp_path / ".git").mkdir()
    for file in ("b.md", "a.txt", ".hidden", ".git/config"):
        (tmp_path / file).write_text(file)
    inside = load_text([tmp_path])
    assert [file for file, _ in inside] == ["a.txt", "b.md", *(f"sub/{name}:{k}" for k in (4, 5, 6))]
    assert [text for _, text in inside] == ["a.txt", "b.md", *texts]


def test_lines_end_as_those_of_unix_and_a_byte_order_mark_is_no_text(tmp_path):
    records = [{"text": "one\r\ntwo\rthree\n"}, {"text": "four"}]
    lines = "\r\n".join(json.dumps(record) for record in records)
    listed = json.dumps(records, indent=1)
    for name, content in (("a.jsonl", lines), ("a.ndjson", lines), ("a.json", lines), ("b.json", listed)):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert load_text([tmp_path / name]) == [(f"{name}:1", "one\ntwo\nthree\n"), (f"{name}:2", "four")]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert load_text([tmp_path / "a.txt"]) == [("a.txt", "one\ntwo\nthree\n")]


def test_what_has_no_text_is_left_out_and_counted_with_its_reason(tmp_path, capsys):
    """Not UTF-8, empty, a .json that is no record, lines that are none, and half of a character."""
    (tmp_path / "b.bin").write_bytes(b"\x89\xff")
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    bad = [{"text": None}, {"text": "a\ud800"}, "x", {"text": "of a low score", "int_score": 1}]
    write_records(tmp_path / "c.jsonl", [record(2), *bad])
    with (tmp_path / "c.jsonl").open("ab") as file:
        file.write(b'{"text": "cut o')
    assert [name for name, _ in load_text([tmp_path])] == ["c.jsonl:1"]
    assert capsys.readouterr().out.splitlines()[:3] == [
        "left out 1 that are not in UTF-8, such as ['b.bin']",
        "left out 6 without text (in records: under --field), such as "
        "['c.jsonl:2', 'c.jsonl:3', 'c.jsonl:4', 'c.jsonl:6', 'd.txt']",
        "left out 1 by the paper's filter, such as ['c.jsonl:5']",
    ]


def test_equal_texts_and_linked_folders_are_read_once_and_tables_are_named(tmp_path, capsys):
    """A link to a folder is followed, also one that leads back, and a link to nowhere is named."""
    for folder in ("in/sub", "out"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in (("in/b.txt", "b"), ("in/sub/again.txt", "b"), ("in/c.CSV", "text"), ("out/d.txt", "b\n")):
        (tmp_path / name).write_text(text)
    for name, to in (("link", "out"), ("link2", "out"), ("sub/back", "in"), ("nowhere", "not there")):
        (tmp_path / "in" / name).symlink_to(tmp_path / to)
    assert load_text([tmp_path / "in"]) == [("b.txt", "b"), ("link/d.txt", "b\n")]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("left out 1 that are tables") and said[0].endswith("such as ['c.CSV']")
    assert said[1] == "left out 1 that lead nowhere, such as ['nowhere']"
    assert said[2] == "left out 1 that are equal to an earlier text, such as ['sub/again.txt']"


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no text" in refusal(tmp_path / "empty") and "there is no corpus" in refusal(tmp_path / "d.txt")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fine"}\n' * 99)[:-9])
    assert "a.jsonl.gz cannot be read, is damaged" in refusal(tmp_path)
    assert "holds rows already" in refusal(NAMES)


# --- the split
def test_documents_are_closed_by_eos_and_split_by_their_text():
    """Whatever its name is, and whatever else there is: of so many x the hash of two begins with a multiple of 20."""
    split = tokenize([(f"{n}.py", "x" * n) for n in range(1, 121)], load_tokenizer(BYTES))
    assert [ids.tolist() for ids in split["val"]] == [[120] * n + [256] for n in (114, 119)]
    assert [len(ids) for ids in split["train"]] == [n + 1 for n in range(1, 121) if n not in (114, 119)]


@pytest.mark.parametrize("lengths, train, val", [
    ([999], [950], [50]),  # a single text: its last twentieth
    ([999, 998], [1000, 900], [99]),  # the last twentieth of all
    ([1], [1], [1]),  # one token at least
    ([114, 113], [115, 103], [11]),  # 114 bytes are more than half
    ([114, 11286], [11287], [115]),  # they are 1 % of 11,400
])  # fmt: skip
def test_texts_are_cut_if_one_side_would_have_too_little(lengths, train, val):
    split = tokenize([("a", "x" * n) for n in lengths], load_tokenizer(BYTES))
    assert [len(ids) for ids in split["train"]] == train and [len(ids) for ids in split["val"]] == val


# --- the script
def test_text_is_read_by_the_tokenizer_of_a_folder(run, tmp_path):
    """Up to a number of documents to train on. Of these one alone is for validation, and it is not counted."""
    write_records(tmp_path / "a.jsonl", [{"body": f"A SMALL LETTER{n}"} for n in range(10, 60)])
    said = run(tmp_path / "a.jsonl", "--field", "body", "--out", tmp_path / "bpe", "--like", NAMES, "--max_docs", 30)
    assert "--out_dir out/bpe --config configs/text.toml --init_from out/bpe_base\n" in said
    assert read_meta(tmp_path / "bpe") == Meta(1024, 1022, 1023, 1022)
    assert (tmp_path / "bpe" / "tokenizer.json").read_bytes() == (NAMES / "tokenizer.json").read_bytes()
    train, val = read_corpus(tmp_path / "bpe", 32, 0, 8, 1).rows.values()
    assert (len(train), len(val)) == (30, 1) and len(val.rows[0]) == 8


def test_random_tokens_are_no_special_ones_wherever_these_stand(run, tmp_path):
    """Here special tokens are the first ids, and no token has the ids 2 to 4: the 256 bytes are the ordinary ids."""
    (tmp_path / "a.txt").write_text("a text\n" * 99)
    spec = byte_spec()
    spec["model"]["vocab"] = {token: 5 + i for token, i in spec["model"]["vocab"].items()}
    for i, token in enumerate(spec["added_tokens"]):
        token["id"] = i
    write_json(tmp_path / "tokenizer.json", spec)
    run(tmp_path / "a.txt", "--like", tmp_path, "--out", tmp_path / "rows")
    meta = read_meta(tmp_path / "rows")
    assert meta == Meta(272, 0, 1, 261, not_plain=[0, 1, 2, 3, 4]) and meta.plain().tolist() == [*range(5, 261)]


def test_a_tokenizer_that_is_there_is_kept(run, tmp_path):
    """If it is another one, the rows are refused. Line ends, as in a clone by Windows, make no other tokenizer."""
    (tmp_path / "a.txt").write_text("a text " * 200)
    own = tmp_path / "own" / "tokenizer.json"
    own.parent.mkdir()
    content = json.dumps(merged_spec(), indent=1).replace("\n", "\r\n").encode()
    own.write_bytes(content)
    assert f"{own} is there already" in run.fails(tmp_path / "a.txt", "--out", own.parent)
    run(tmp_path / "a.txt", "--like", own, "--out", own.parent)
    assert own.read_bytes() == content
