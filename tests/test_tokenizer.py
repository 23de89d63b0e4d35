"""Text to ids and back: bytes, merges, and which library reads what. `pytest tests/test_tokenizer.py`"""

import json
import sys
from pathlib import Path

import pytest
from common import merged_spec

from lib.tokenizer import GPT2, MASK_TOKEN, QWEN, RELEASED, WORDS, Tokenizer, bpe_tokenizer, load_tokenizer
from lib.util import Mistake
from prepare import BYTES

# a byte-level BPE that the `tokenizers` library (0.23.3) trained on lib/*.py and saved; and 60 random texts, each with
# the ids that the library gives it with special tokens, and with their names as text
BPE = Path(__file__).parent / "data" / "bpe"
TEXT = "naïve café, 日本\n"


def test_bytes_round_trip_and_specials():
    t = load_tokenizer(BYTES)
    assert t.encode(TEXT) == list(TEXT.encode()) and t.decode(t.encode(TEXT)) == TEXT
    assert (t.eos_id, t.mask_id, t.vocab_size) == (256, 257, 258)
    assert t.encode("a<|endoftext|>") == [97, 256]  # typed by a user it is the token ...
    assert t.encode_document("<|endoftext|>").tolist() == list(b"<|endoftext|>")  # ... in a corpus it is text
    assert t.encode_document("").tolist() == []
    assert t.decode([104, 105, 256, 257]) == "hi" and t.decode([0xC3]) == "\ufffd"


def test_merges_worked_by_hand():
    spec = merged_spec()
    t = bpe_tokenizer(Path("by hand"), spec)
    assert (t.eos_id, t.mask_id, t.vocab_size, t.pattern) == (260, 261, 262, WORDS)
    assert t.encode("aaa ab") == [258, 259] and t.encode("aaaa") == [256, 256]
    assert t.encode("ab<|mask|>") == [257, 261] and t.decode([258, 259, 260, 261]) == "aaa ab"

    # older files write a merge as one string
    spec["model"]["merges"] = [" ".join(merge) for merge in spec["model"]["merges"]]
    assert bpe_tokenizer(Path("older"), spec).encode("aaa ab") == [258, 259]


def test_nfc_and_added_words_worked_by_hand():
    spec = merged_spec()
    word(spec, normalized=False)
    spec["normalizer"] = {"type": "NFC"}
    t = bpe_tokenizer(Path("by hand"), spec)

    # an added word is found in a document, too
    assert t.encode("a b<|mask|>") == [262, 261] and t.vocab_size == 263
    assert t.encode_document("xa b<|mask|>").tolist() == [120, 262, *b"<|mask|>"] and t.decode([262, 97]) == "a ba"

    # marks in both orders are one text, but a mark is not joined with what stands before an added token
    both = t.encode("e\u0301\u0323"), t.encode("e\u0323\u0301")
    assert both == (list("ẹ\u0301".encode()),) * 2 and t.encode("\u1112\u1161\u11ab") == list("한".encode())
    assert t.encode("e<|mask|>\u0301") == [101, 261, *"\u0301".encode()]


@pytest.mark.parametrize("pattern", [GPT2, RELEASED, QWEN])
def test_blanks_go_to_the_word_behind_them_however_many_there_are(pattern):
    """The last blank belongs to the word, and the others are tokens of their own: here of one and of two blanks."""
    spec = merged_spec()
    spec["model"]["merges"].append(["Ġ", "Ġ"])
    spec["model"]["vocab"] |= {"ĠĠ": 262}
    if pattern == GPT2:
        spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    else:
        spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    t = bpe_tokenizer(Path("blanks"), spec)
    for n in (*range(1, 200), 10**6, 10**6 + 1):
        blanks = [262] * ((n - 1) // 2) + [32] * ((n - 1) % 2)
        assert t.encode(" " * n + "ab") == [*blanks, 259]
        assert t.encode("x" + " " * n) == [120] + [262] * (n // 2) + [32] * (n % 2)


def test_ids_of_a_plain_bpe_are_those_of_the_library_that_made_it():
    """In prompts the names of special tokens are tokens, and in documents they are text."""
    t = bpe_tokenizer(BPE / "stock.json")
    lines = [json.loads(line) for line in (BPE / "stock.jsonl").read_text().splitlines()]
    assert len(lines) == 60 and t.pattern == GPT2
    for text, ids, of_document in lines:
        assert (t.encode(text), t.encode_document(text).tolist()) == (ids, of_document), text


# --- what tiktoken would read otherwise
def word(spec: dict, **how) -> None:
    spec["added_tokens"].append({"id": 262, "content": "a b", "special": False, "normalized": True} | how)


OTHERS = {
    "another pattern": lambda s: s["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\d|\D+"),
    "a normaliser": lambda s: s.update(normalizer={"type": "NFKC"}),
    "a normal word": lambda s: (word(s), s.update(normalizer={"type": "NFC"})),
    "merges by other ids": lambda s: s["model"]["vocab"].update(aa=257, ab=256),
    "a token that nothing makes": lambda s: s["model"]["vocab"].update(aab=262),
}


def read_by_the_library(change) -> Tokenizer:
    pytest.importorskip("tokenizers")
    spec = merged_spec()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    change(spec)
    spec["added_tokens"] = [plain | token for token in spec["added_tokens"]]
    t = bpe_tokenizer(Path("changed"), spec)
    assert t.pattern is None
    return t


@pytest.mark.parametrize("name", OTHERS)
def test_what_tiktoken_lacks_is_left_to_the_library_that_has_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as where it is not installed
    spec = merged_spec()
    OTHERS[name](spec)
    with pytest.raises(Mistake, match="changed is read by the library that writes such files: pip install tokenizers"):
        bpe_tokenizer(Path("changed"), spec)


def test_ids_of_the_library_worked_by_hand():
    read = read_by_the_library
    t = read(OTHERS["another pattern"])
    assert t.encode("aaa 1ab<|mask|>") == [258, 32, 49, 257, 261] and t.decode([258, 259, 261]) == "aaa ab"
    assert t.encode_document("ab<|mask|>").tolist() == [257, *b"<|mask|>"]
    assert read(OTHERS["a normaliser"]).encode("\ufb01") == list(b"fi")
    assert read(OTHERS["merges by other ids"]).encode("aa ab") == [257, 259]


# --- what is no tokenizer of ours
@pytest.mark.parametrize(("change", "says"), [
    (lambda s: s["model"].update(type="Unigram"), "it is no byte-level BPE"),
    (lambda s: s["added_tokens"].pop(), f"no {MASK_TOKEN} among its special tokens"),
    (lambda s: s["model"]["vocab"].pop("!"), "lacks some bytes"),
])  # fmt: skip
def test_what_is_no_byte_level_bpe_is_refused(change, says):
    spec = merged_spec()
    change(spec)
    with pytest.raises(Mistake) as mistake:
        bpe_tokenizer(Path("changed"), spec)
    assert says in str(mistake.value) and "changed" in str(mistake.value)


def test_blanks_and_added_tokens_that_the_library_reads_otherwise_are_refused():
    with pytest.raises(Mistake, match="adds blanks"):  # one before each part of a text with holes
        read_by_the_library(lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True))
    with pytest.raises(Mistake, match="number them in order"):
        read_by_the_library(lambda s: (word(s, id=999), s.update(normalizer={"type": "NFC"})))
