"""Tokenizers: text to ids and back.

    byte_tokenizer()     256 bytes, an end-of-text token and a mask token
    bpe_tokenizer(path)  a byte-level BPE from a `tokenizer.json`: a released one, or one that learn_bpe made
    learn_bpe(texts)     the content of such a file, learned from texts

tiktoken does the encoding. A `tokenizer.json` that tiktoken cannot reproduce exactly, on every
text, is refused.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import tiktoken

from lib.util import fail, read_json

try:
    import unicodedata
except ImportError:  # a Python built without it
    unicodedata = None

# the released names; every tokenizer uses them
EOS = "<|endoftext|>"
MASK = "<|mask|>"


@dataclass
class Tokenizer:
    """A tiktoken.Encoding, which numbers its tokens by merge rank, and the model's ids, which may
    have any order.
    """

    encoding: tiktoken.Encoding
    ids: list[int]  # rank -> id
    special: dict[str, int]
    nfc: bool = False  # whether the released normaliser is Unicode NFC
    token_bytes: dict[int, bytes] = field(default_factory=dict)  # none for special and unused ids

    def __post_init__(self) -> None:
        self.vocab_size = 1 + max([*self.ids, *self.special.values()])
        self.eos_id = self.special.get(EOS)
        self.mask_id = self.special.get(MASK)

    def normalise(self, text: str) -> str:
        if self.nfc:
            return unicodedata.normalize("NFC", text)
        return text

    def encode(self, text: str) -> list[int]:
        """Text to ids; names of special tokens become those tokens, as in the released tokenizer."""
        ranks = self.encoding.encode(self.normalise(text), allowed_special="all")
        return [self.ids[rank] for rank in ranks]

    def encode_document(self, text: str) -> np.ndarray:
        """Corpus text to int32 ids: here the name of a special token is ordinary text."""
        ranks = self.encoding.encode_ordinary(self.normalise(text))
        return np.array([self.ids[rank] for rank in ranks], dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Ids to text; special tokens are left out and bytes that are no UTF-8 become U+FFFD."""
        raw = b"".join(self.token_bytes.get(i, b"") for i in ids)
        return raw.decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        """A token's text, all of it visible (an accent on ◌), bytes that are no UTF-8 as <E2>,
        special ones by name.
        """
        raw = self.token_bytes.get(token, b"")
        if not raw:
            names = {i: name for name, i in self.special.items()}
            return names.get(token, f"<{token}>")

        text = raw.decode("utf-8", errors="surrogateescape")
        shown = "".join(visible(character) for character in text)

        # an accent needs something to stand on
        if unicodedata is not None and unicodedata.combining(text[0]):
            return "◌" + shown
        return shown


GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(character: str) -> str:
    """One character as something that can be seen on one line."""
    if character in GLYPHS:
        return GLYPHS[character]

    # bytes that are no UTF-8 were decoded to U+DC80..U+DCFF by surrogateescape
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"<{code - 0xDC00:02X}>"

    if character.isprintable():
        return character
    return f"<U+{code:04X}>"


# ---------------------------------------------------------------------------------------------------------------------
# reading a tokenizer


def byte_tokenizer() -> Tokenizer:
    """A BPE without merges: ids 0..255 are bytes, eos is 256, mask is 257."""
    return bpe_tokenizer(Path("bytes"), learn_bpe([], 258))


def byte_alphabet() -> list[str]:
    """The printable stand-in that byte-level BPE files use for each byte: itself if printable, else
    U+0100 onwards.
    """
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
    """A `tokenizer.json` (byte-level BPE; `spec` is its content, if known) as a tiktoken.Encoding
    with the same ids on every text. Refused with the reason: anything whose result tiktoken could
    not reproduce exactly.
    """
    if spec is None:
        spec = read_json(path, "tokenizer")
    try:
        pattern, nfc = check_pipeline(spec, path)

        # the file writes bytes as printable characters
        byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}

        def to_bytes(token: str) -> bytes:
            return bytes(byte_of[character] for character in token)

        vocab = {to_bytes(token): i for token, i in spec["model"]["vocab"].items()}
        special = {token["content"]: token["id"] for token in spec["added_tokens"]}
        ranks = {bytes([byte]): byte for byte in range(256)}
        for merge in spec["model"]["merges"]:
            # older files write "a b", newer ones ["a", "b"]
            pair = merge.split(" ") if isinstance(merge, str) else merge
            left = to_bytes(pair[0])
            right = to_bytes(pair[1])

            # tiktoken merges any neighbours whose concatenation is known. That equals this list of
            # merges only if the pair is what the earlier merges make of those bytes, and if no
            # other merge makes the same token.
            known = left + right in ranks
            if known or merge_bytes(left + right, ranks) != [left, right]:
                fail(f"{path}: merge {left!r} + {right!r} is not expressible in tiktoken (duplicate or out of order)")
            ranks[left + right] = len(ranks)
        ids = [vocab[token] for token in ranks]
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        fail(f"{path} is not a byte-level BPE tokenizer.json: unexpected or missing {e}")

    # special tokens take the ranks after all others
    special_ranks = {name: len(ranks) + i for i, name in enumerate(special)}
    ids += special.values()
    encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_ranks)
    token_bytes = {i: token for token, i in vocab.items()}
    return Tokenizer(encoding, ids, special, nfc, token_bytes)


def check_pipeline(spec: dict, path: Path) -> tuple[str, bool]:
    """(pre-tokenizer pattern, whether NFC is applied) of a tokenizer.json; refuses every step that
    is not modelled.
    """

    def refuse(what: str) -> NoReturn:
        fail(f"{path}: {what} cannot be expressed exactly in tiktoken, so this tokenizer is refused")

    model = spec.get("model")
    if model["type"] != "BPE":
        refuse(f"model {model['type']}")
    if model.get("ignore_merges") or model.get("dropout") or model.get("byte_fallback"):
        refuse("a BPE option")

    # before the merges: NFC or nothing
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        refuse(f"normalizer {normalizer}")

    # a pattern that splits text into words, then bytes
    pre = spec.get("pre_tokenizer")
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    kinds = [step["type"] for step in steps]
    if kinds != ["Split", "ByteLevel"]:
        refuse(f"pre-tokenizer {kinds}")
    split, byte_level = steps
    if split.get("behavior") != "Isolated" or split.get("invert"):
        refuse(f"split behaviour {split}")
    if byte_level.get("add_prefix_space") or byte_level.get("use_regex"):
        refuse("ByteLevel with prefix space or regex")

    # after the merges: nothing that changes an id
    post = spec.get("post_processor")
    if post is not None and post["type"] != "ByteLevel":
        refuse(f"post-processor {post}")
    for token in spec["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            refuse("a stripping added token")
    return split["pattern"]["Regex"], normalizer is not None


def merge_bytes(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair merging of one token under the merges known so far, lowest rank first."""
    parts = [bytes([byte]) for byte in token]
    while True:
        known = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


# ---------------------------------------------------------------------------------------------------------------------
# learning one


class Pairs:
    """Words cut into parts, and how often each pair of neighbouring parts occurs in all of them."""

    def __init__(self, words: Counter, letters: list[str]):
        self.words = words  # word -> how often it occurs
        self.parts = {word: [letters[byte] for byte in word.encode()] for word in words}
        self.counts: Counter = Counter()
        self.holders = defaultdict(set)  # pair -> the words that hold it, or once did
        for word in words:
            self.count(word, 1)

    def count(self, word: str, sign: int) -> None:
        """Add a word's pairs to the counts (sign 1), or take them out (sign -1)."""
        for pair in pairwise(self.parts[word]):
            self.counts[pair] += sign * self.words[word]
            self.holders[pair].add(word)

    def most_frequent(self) -> tuple[str, str] | None:
        """The pair most often side by side, of equals the first in string order; None if none
        occurs twice.
        """
        most = max(self.counts.values(), default=0)
        if most < 2:
            return None
        return min(pair for pair, n in self.counts.items() if n == most)

    def join(self, pair: tuple[str, str]) -> None:
        """Make the pair one part, in every word that holds it."""
        for word in self.holders.pop(pair):
            self.count(word, -1)
            self.parts[word] = join_pair(self.parts[word], pair)
            self.count(word, 1)


def join_pair(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Join the pair wherever it stands, from the left: of a, a, a the first two."""
    joined = []
    i = 0
    while i < len(parts):
        if tuple(parts[i : i + 2]) == pair:
            joined.append("".join(pair))
            i += 2
        else:
            joined.append(parts[i])
            i += 1
    return joined


def learn_bpe(texts: Iterable[str], vocab_size: int) -> dict:
    """The content of a `tokenizer.json` with vocab_size ids: bytes, merges learned from these
    texts, EOS and MASK.

    Each merge joins the pair most often side by side in words, of equals the first in string order,
    if it is so twice.
    """
    # a word takes the blank before it along
    pattern = r" ?\S+|\s+"
    words = Counter(word for text in texts for word in re.findall(pattern, text))

    letters = byte_alphabet()
    pairs = Pairs(words, letters)
    merges = []
    while len(letters) + len(merges) + 2 < vocab_size:
        pair = pairs.most_frequent()
        if pair is None:
            break
        merges.append(list(pair))
        pairs.join(pair)

    # ids: the bytes, the merges in order, then the two special tokens
    tokens = letters + ["".join(pair) for pair in merges]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    eos = {"id": len(tokens), "content": EOS} | plain
    mask = {"id": len(tokens) + 1, "content": MASK} | plain

    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {token: i for i, token in enumerate(tokens)}
    return {
        "added_tokens": [eos, mask],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
