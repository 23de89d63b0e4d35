"""Tokenizers: text to ids and back.

    load_tokenizer(folder)  the tokenizer of a checkpoint or of a folder of rows, if the ids there are text
    bpe_tokenizer(path)     a byte-level BPE from a `tokenizer.json`, as the `tokenizers` library saves it
    byte_tokenizer()        256 bytes, an end-of-text token and a mask token

tiktoken splits text into words and merges bytes. A `tokenizer.json` is refused if tiktoken cannot give the same ids on
every text, and a text is refused if its tokens do not spell it.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

from lib.util import SPECIAL, checked_entry, fail, read_json, reading

EOS_TOKEN = SPECIAL["eos_id"]
MASK_TOKEN = SPECIAL["mask_id"]

# patterns that split text into words
WORDS = r" ?\S+|\s+"  # the blank before a word belongs to it
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own

# All blanks before a word except the last one. tiktoken remembers a place to go back to for each blank, and gives up at
# a million of them. The second form finds the same blanks, and remembers a place for every 256 of them.
BLANKS = r"\s+(?!\S)"
MANY_BLANKS = r"(?:\s{256}(?=\s{256}))*\s+(?!\S)"

# The parts that a pattern may have: they mean the same in tiktoken and in `tokenizers`.
ESCAPE = r"\\(?:[sSdDrnt]|[pP]\{(?:[A-Z][a-z]?|Han|Hiragana|Katakana|Hangul)\}|[^\w\s])"
ONE = rf"(?P<one>{ESCAPE}|\[\^?(?:{ESCAPE}|[^\\\[\]&~-]|-(?!-)|&(?!&)|~(?!~))+\]|[^\\\[\](){{}}|*+?^$])"
PART = re.compile(
    ONE  # one character
    + r"|(?P<around>\(\?<?[=!])"  # a condition on what comes before or after
    + r"|\((?:\?(?:[:>]|i:))?|\||\)"  # groups and alternatives
    + r"|(?:[*+?][+?]?|\{\d+(?:,\d*)?\}(?![+?]))"  # how often
)


@dataclass
class Tokenizer:
    """A tiktoken.Encoding, which numbers its tokens by merge rank, with the model's ids for them."""

    encoding: tiktoken.Encoding
    ids: list[int]  # rank -> id
    special: dict[str, int]
    words: dict[str, int]  # words that were added to the tokens of the merges
    early: set[str]  # those special tokens and words that are found before the text is normalised
    nfc: bool  # whether text is normalised by Unicode's NFC
    prefix_blank: bool  # whether a blank is put before a text that does not begin with one
    pattern: str  # the pattern that splits text into words
    token_bytes: dict[int, bytes]  # special and unused ids have no entry

    def __post_init__(self) -> None:
        self.vocab_size = 1 + max(*self.token_bytes, *self.special.values())
        self.eos_id = self.special.get(EOS_TOKEN)
        self.mask_id = self.special.get(MASK_TOKEN)

    def normalise(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self.nfc else text

    def encode(self, text: str) -> list[int]:
        """Text to ids. The name of a special token becomes that token, as in the released tokenizer."""
        return self.encode_around(text, self.words | self.special)

    def encode_document(self, text: str) -> np.ndarray:
        """A document to int32 ids. Here the name of a special token is ordinary text."""
        return np.array(self.encode_around(text, self.words), dtype=np.int32)

    def encode_around(self, text: str, added: dict[str, int]) -> list[int]:
        """The ids of a text: first these added tokens are found in it, then the text between them is read."""
        early = {name: i for name, i in added.items() if name in self.early}
        late = {self.normalise(name): i for name, i in added.items() if name not in self.early}
        ids = []
        for between, token in cut(text, early):
            for part, inner in cut(self.normalise(between), late):
                ids += self.encode_part(part) + inner
            ids += token
        return ids

    def encode_part(self, text: str) -> list[int]:
        """Text without added tokens to ids. A text that the ids would not spell is refused."""
        if not text:
            return []
        if self.prefix_blank and not text.startswith(" "):
            text = " " + text
        try:
            raw = text.encode()
        except UnicodeEncodeError as e:
            fail(f"half of a character, {text[e.start]!a}, cannot be read as text")
        try:
            ranks = self.encoding.encode_ordinary(text)
        except BaseException as e:
            # tiktoken's Rust raises this type, and does not export it
            if type(e).__name__ != "PanicException":
                raise
            fail(f"the tokenizer cannot split this text into words by its pattern {self.pattern!r:.200}")
        if self.encoding.decode_bytes(ranks) != raw:
            fail(f"the tokenizer's pattern {self.pattern!r:.200} leaves out a part of this text")
        return [self.ids[rank] for rank in ranks]

    def decode(self, ids: list[int]) -> str:
        """Ids to text. Special tokens are left out, and bytes that are not UTF-8 become U+FFFD."""
        raw = b"".join(self.token_bytes.get(i, b"") for i in ids)
        return raw.decode("utf-8", errors="replace")


def cut(text: str, added: dict[str, int]) -> Iterator[tuple[str, list[int]]]:
    """Cut a text at these added tokens -> pairs of the text before a token and [the token's id], and at last the rest
    of the text and []. If several tokens begin at one place, the longest counts."""
    start = 0
    if added:
        longest_first = sorted(added, key=len, reverse=True)
        for found in re.finditer("|".join(map(re.escape, longest_first)), text):
            yield text[start : found.start()], [added[found[0]]]
            start = found.end()
    yield text[start:], []


# --- reading a tokenizer
def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in the folder's tokenizer.json; None if there is no such file, as for a toy."""
    path = folder / "tokenizer.json"
    return bpe_tokenizer(path) if path.exists() else None


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of bytes: ids 0..255 are bytes, eos is 256, and the mask is 257."""
    return bpe_tokenizer(Path("bytes"), byte_spec())


def byte_spec() -> dict:
    """The content of a `tokenizer.json` without merges."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    eos = {"id": 256, "content": EOS_TOKEN} | plain
    mask = {"id": 257, "content": MASK_TOKEN} | plain

    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    return {
        "added_tokens": [eos, mask],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE files write for each byte: the byte's own if it is printable, else one from
    U+0100 on."""
    alphabet = []
    next_code = 256
    for byte in range(256):
        character = chr(byte)
        if not character.isprintable() or character == " ":
            character = chr(next_code)
            next_code += 1
        alphabet.append(character)
    return alphabet


def bpe_tokenizer(path: Path, spec: dict | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, with the same ids on every text. spec: the file's content, if known."""
    if spec is None:
        spec = read_json(path, "tokenizer")
    with reading(path, "tokenizer"):
        pattern, prefix_blank = read_pattern(spec, path)
        special, words = read_added(spec, path)
        vocab, merges = read_tokens(spec, special, words, path)
        early = {token["content"] for token in spec["added_tokens"] if not token.get("normalized")}

    # the ranks: first the bytes, then the merges in order
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pair in merges:
        token = b"".join(pair)

        # tiktoken merges any two neighbours whose bytes together are a token. That equals this list
        # of merges only if the earlier merges make this pair of those bytes.
        if merge_bytes(token, ranks) != pair:
            fail(f"{path}: merge {pair} cannot be expressed in tiktoken (it is a duplicate, or out of order)")
        ranks[token] = len(ranks)
    for token in ranks:
        if token not in vocab:
            hint = "train it with initial_alphabet=ByteLevel.alphabet()" if len(token) == 1 else "or has it as special"
            fail(f"{path}: its vocabulary lacks {token}, {hint}")

    # with this option a word in the vocabulary is one token, even if the merges do not make it
    if spec["model"].get("ignore_merges") and len(vocab) > len(ranks):
        fail(f"{path}: ignore_merges cannot be expressed exactly in tiktoken, so this tokenizer is refused")

    with reading(path, "tokenizer"):
        unbroken = pattern.replace(BLANKS, MANY_BLANKS)
        encoding = tiktoken.Encoding("bpe", pat_str=unbroken, mergeable_ranks=ranks, special_tokens={})
        token_bytes = {i: token for token, i in vocab.items()} | {i: word.encode() for word, i in words.items()}
    nfc = spec.get("normalizer") is not None
    ids = [vocab[token] for token in ranks]
    return Tokenizer(encoding, ids, special, words, early, nfc, prefix_blank, pattern, token_bytes)


def read_added(spec: dict, path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The special tokens, and the words that were added to the tokens of the merges, each name -> id."""
    special = {}
    words = {}
    for token in spec["added_tokens"]:
        name = checked_entry(token, "content", str, path)
        if not name or name in special or name in words:
            fail(f"{path}: its added token {name!r} is empty, or is there twice")
        kind = special if token.get("special") or name in (EOS_TOKEN, MASK_TOKEN) else words
        kind[name] = token["id"]

    for name in (EOS_TOKEN, MASK_TOKEN):
        if name not in special:
            fail(f"{path}: there is no {name} among its added tokens, so no text could end or be masked: add it by "
                 "add_special_tokens of `tokenizers`")  # fmt: skip
    return special, words


def read_tokens(
    spec: dict, special: dict[str, int], words: dict[str, int], path: Path
) -> tuple[dict[bytes, int], list[list[bytes]]]:
    """The vocabulary without added tokens, and the merges in order, each a pair of tokens."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}

    def to_bytes(token: str) -> bytes:
        return bytes(byte_of[character] for character in token)

    # an added word may also be a token of the merges; other added tokens in the vocabulary are left out
    model = spec["model"]
    added = special | words
    vocab = {}
    of_merges = set()
    for token, i in model["vocab"].items():
        if added.get(token, i) != i:
            fail(f"{path}: its token {token!r} has two ids, {i} and {added[token]}")
        if token in words and token.isascii() and to_bytes(token) == token.encode():
            of_merges.add(token)
        elif token in added:
            continue
        vocab[to_bytes(token)] = i

    merges = []
    for merge in checked_entry(model, "merges", list, path):
        # older files write "a b", newer ones ["a", "b"]
        text = merge if isinstance(merge, str) else " ".join(merge)
        first, second = text.split(" ")
        merges.append([to_bytes(first), to_bytes(second)])

    ids = [*vocab.values(), *(i for token, i in added.items() if token not in of_merges)]
    if not all(type(i) is int and 0 <= i < 2**20 for i in ids):
        raise ValueError("its ids are not in 0..1,048,575")
    if len(set(ids)) < len(ids):
        fail(f"{path}: two of its tokens have the id {Counter(ids).most_common(1)[0][0]}")
    return vocab, merges


def read_pattern(spec: dict, path: Path) -> tuple[str, bool]:
    """The pattern that splits text into words, and whether a blank is put before a text. A tokenizer.json with a step
    that is not implemented is refused, because its ids would silently differ."""

    def demand(holds: bool, what: str) -> None:
        if not holds:
            fail(f"{path}: {what} cannot be expressed exactly in tiktoken, so this tokenizer is refused")

    def none_of(holder: dict, *options: str) -> bool:
        return not any(holder.get(option) for option in options)

    # before the merges: NFC or nothing
    normalizer = spec.get("normalizer")
    demand(normalizer is None or normalizer["type"] == "NFC", f"normalizer {normalizer}")
    demand(none_of(spec, "truncation", "padding"), "truncation or padding")

    # a pattern that splits text into words, ByteLevel's own or one before it, then bytes
    step = spec["pre_tokenizer"]
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    kinds = [step["type"] for step in steps]
    demand(kinds in (["ByteLevel"], ["Split", "ByteLevel"]), f"pre-tokenizer {kinds}")
    byte_level = steps[-1]
    own = byte_level.get("use_regex", True)
    prefix_blank = bool(byte_level.get("add_prefix_space"))
    pattern = GPT2
    if len(steps) == 2:
        split = steps[0]
        demand(split.get("behavior") == "Isolated" and none_of(split, "invert"), f"split behaviour {split}")
        demand(not own and not prefix_blank, "ByteLevel with prefix space or regex after a split")
        pattern = split["pattern"]["Regex"]
    else:
        demand(own, "ByteLevel without its regex")
    demand(splits_alike(pattern), f"pattern {pattern!r:.200}")

    # the merges
    model = spec["model"]
    demand(model["type"] == "BPE", f"model {model['type']}")
    options = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    demand(none_of(model, *options), "a BPE option")

    # after them: nothing that changes an id
    post = spec.get("post_processor")
    demand(post is None or post["type"] == "ByteLevel", f"post-processor {post}")
    for token in spec["added_tokens"]:
        demand(none_of(token, "lstrip", "rstrip", "single_word"), "a stripping added token")
    return pattern, prefix_blank


def splits_alike(pattern: str) -> bool:
    """Does the pattern mean the same to tiktoken and to `tokenizers`, and never match the empty text?"""
    shape = ""
    at = 0
    while at < len(pattern):
        part = PART.match(pattern, at)
        if part is None:
            return False
        # the pattern in a form that Python's `re` can read: each character is x, and a condition may match nothing
        shape += "x" if part["one"] else "(?:|" if part["around"] else part[0]
        at = part.end()
    try:
        return re.fullmatch(shape, "") is None
    except re.error:
        return False


def merge_bytes(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What the merges known so far make of a token's bytes, the lowest rank first."""
    parts = [bytes([byte]) for byte in token]
    while True:
        known = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
