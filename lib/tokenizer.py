"""Tokenizers: text to ids and back.

    load_tokenizer(folder)  the one of a checkpoint or of prepared rows, if they have text
    bpe_tokenizer(path)     a byte-level BPE from a `tokenizer.json`
    byte_tokenizer()        256 bytes, an end-of-text token and a mask token

tiktoken does the encoding. A `tokenizer.json` that it cannot reproduce exactly, on every text, is refused.
"""

import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

from lib.util import SPECIAL, entry, fail, read_json, reading

EOS = SPECIAL["eos_id"]
MASK = SPECIAL["mask_id"]

WORDS = r" ?\S+|\s+"  # a word takes the blank before it along


@dataclass
class Tokenizer:
    """A tiktoken.Encoding, which numbers its tokens by merge rank, and the model's ids of them."""

    encoding: tiktoken.Encoding
    ids: list[int]  # rank -> id
    special: dict[str, int]
    nfc: bool  # whether the released normaliser is Unicode NFC
    token_bytes: dict[int, bytes]  # none for special and unused ids

    def __post_init__(self) -> None:
        self.vocab_size = 1 + max(self.ids)
        self.eos_id = self.special.get(EOS)
        self.mask_id = self.special.get(MASK)

    def normalise(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self.nfc else text

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


# --- reading a tokenizer
def load_tokenizer(folder: Path) -> Tokenizer | None:
    """That of the folder's tokenizer.json; None where there is none, as of a toy."""
    path = folder / "tokenizer.json"
    return bpe_tokenizer(path) if path.exists() else None


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are bytes, eos is 256, mask is 257."""
    return bpe_tokenizer(Path("bytes"), byte_spec())


def byte_spec() -> dict:
    """The content of a `tokenizer.json` without merges."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    eos = {"id": 256, "content": EOS} | plain
    mask = {"id": 257, "content": MASK} | plain

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
    """What byte-level BPE files write for each byte: itself if printable, else U+0100 onwards."""
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
    """The tokenizer of a `tokenizer.json` (`spec`: its content, if known), exact on every text."""
    if spec is None:
        spec = read_json(path, "tokenizer")
    with reading(path, "tokenizer"):
        pattern = read_pattern(spec, path)
        vocab, merges, special = read_tokens(spec, path)

    # ranks: the bytes, then the merges in order
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pair in merges:
        token = b"".join(pair)

        # tiktoken merges any neighbours whose concatenation is known. That equals this list of
        # merges only if the pair is what the earlier merges make of those bytes.
        if merge_bytes(token, ranks) != pair:
            fail(f"{path}: merge {pair} is not expressible in tiktoken (duplicate or out of order)")
        ranks[token] = len(ranks)
    for token in ranks:
        if token not in vocab:
            fail(f"{path}: its vocabulary lacks {token}")

    # special tokens take the ranks after all others
    ids = [vocab[token] for token in ranks] + list(special.values())
    special_ranks = {name: len(ranks) + i for i, name in enumerate(special)}
    with reading(path, "tokenizer"):
        encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_ranks)
    token_bytes = {i: token for token, i in vocab.items()}
    return Tokenizer(encoding, ids, special, spec.get("normalizer") is not None, token_bytes)


def read_tokens(spec: dict, path: Path) -> tuple[dict[bytes, int], list[list[bytes]], dict[str, int]]:
    """The vocabulary, the merges in order, each two tokens, and the special tokens."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}

    def to_bytes(token: str) -> bytes:
        return bytes(byte_of[character] for character in token)

    model = spec["model"]
    vocab = {to_bytes(token): i for token, i in model["vocab"].items()}
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}

    merges = []
    for merge in entry(model, "merges", list, path):
        # older files write "a b", newer ones ["a", "b"]
        text = merge if isinstance(merge, str) else " ".join(merge)
        first, second = text.split(" ")
        merges.append([to_bytes(first), to_bytes(second)])

    for name in (EOS, MASK):
        if name not in special:
            fail(f"{path}: no {name} among its added tokens, so no text could end or be masked")
    if not all(type(i) is int and 0 <= i < 2**20 for i in (*vocab.values(), *special.values())):
        raise ValueError("its ids are not 0..1,048,575")
    return vocab, merges, special


def read_pattern(spec: dict, path: Path) -> str:
    """The pattern that splits text into words; refuse a tokenizer.json with a step that is not modelled: its ids would
    silently differ."""

    def demand(holds: bool, what: str) -> None:
        if not holds:
            fail(f"{path}: {what} cannot be expressed exactly in tiktoken, so this tokenizer is refused")

    def none_of(holder: dict, *options: str) -> bool:
        return not any(holder.get(option) for option in options)

    # before the merges: NFC or nothing
    normalizer = spec.get("normalizer")
    demand(normalizer is None or normalizer["type"] == "NFC", f"normalizer {normalizer}")

    # a pattern that splits text into words, then bytes
    steps = spec["pre_tokenizer"]["pretokenizers"]
    kinds = [step["type"] for step in steps]
    demand(kinds == ["Split", "ByteLevel"], f"pre-tokenizer {kinds}")
    split, byte_level = steps
    demand(split.get("behavior") == "Isolated" and none_of(split, "invert"), f"split behaviour {split}")
    demand(none_of(byte_level, "add_prefix_space", "use_regex"), "ByteLevel with prefix space or regex")

    # the merges
    model = spec["model"]
    demand(model["type"] == "BPE", f"model {model['type']}")
    demand(none_of(model, "ignore_merges", "dropout", "byte_fallback"), "a BPE option")

    # after them: nothing that changes an id
    post = spec.get("post_processor")
    demand(post is None or post["type"] == "ByteLevel", f"post-processor {post}")
    for token in spec["added_tokens"]:
        demand(none_of(token, "lstrip", "rstrip", "single_word"), "a stripping added token")
    return split["pattern"]["Regex"]


def merge_bytes(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair merging of one token under the merges known so far, lowest rank first."""
    parts = [bytes([byte]) for byte in token]
    while True:
        known = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
