"""Tokenizers: text to ids and back. All are byte-level BPEs in a `tokenizer.json`, bytes too, which have no merges.

tiktoken reads the released tokenizer, those of this project (bytes, and the BPE of data/names), and BPEs with the
pattern of GPT-2. Any other byte-level BPE is read by `tokenizers`, the library that writes such files.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from lib.util import WALK, fail, read_json, reading

# the released names, which every tokenizer.json has
EOS_TOKEN = "<|endoftext|>"
MASK_TOKEN = "<|mask|>"

# the patterns by which tiktoken splits text into words: that of this project (the blank before a word belongs to
# it), that of GPT-2, which is ByteLevel's own, and the released one
WORDS = r" ?\S+|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
RELEASED = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

Reader = Callable[[str, bool], list[int]]  # text to ids; true: the name of a special token becomes that token


@dataclass
class Tokenizer:
    reader: Reader
    pattern: str | None  # the pattern that splits text into words, if tiktoken reads it
    special: dict[str, int]
    token_bytes: dict[int, bytes]  # special and unused ids have no entry

    def __post_init__(self) -> None:
        self.vocab_size = 1 + max(*self.token_bytes, *self.special.values())
        self.eos_id = self.special[EOS_TOKEN]
        self.mask_id = self.special[MASK_TOKEN]

    def encode(self, text: str) -> list[int]:
        """Text to ids. The name of a special token becomes that token."""
        return self.reader(text, True)

    def encode_document(self, text: str) -> np.ndarray:
        """A document to int32 ids. Here the name of a special token is ordinary text."""
        return np.array(self.reader(text, False), dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Ids to text. Special tokens are left out, and bytes that are not UTF-8 become U+FFFD."""
        raw = b"".join(self.token_bytes.get(i, b"") for i in ids)
        return raw.decode("utf-8", errors="replace")


# --- reading a tokenizer
def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint or of a folder of rows; None if its ids are no text, as of a toy."""
    path = folder / "tokenizer.json"
    return bpe_tokenizer(path) if path.exists() else None


def byte_tokenizer() -> Tokenizer:
    return bpe_tokenizer(Path("bytes"), byte_spec())


def byte_spec() -> dict:
    """The content of a `tokenizer.json` without merges."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": 256, "content": EOS_TOKEN} | plain, {"id": 257, "content": MASK_TOKEN} | plain]
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    return {
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def byte_alphabet() -> list[str]:
    """The character that BPE files write for each byte: its own if it is printable, else one from U+0100 on."""
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
    """The tokenizer of a `tokenizer.json`. spec: the file's content, if known."""
    spec = spec or read_json(path, "tokenizer")
    with reading(path, "tokenizer", WALK):
        if spec["model"]["type"] != "BPE" or spec["decoder"]["type"] != "ByteLevel":
            raise ValueError("it is no byte-level BPE")

        # the tokens that were added to the vocabulary, in plain text: special ones, and words
        added = {token["content"]: token["id"] for token in spec["added_tokens"]}
        special = {token["content"]: token["id"] for token in spec["added_tokens"] if token.get("special")}
        for name in (EOS_TOKEN, MASK_TOKEN):
            if name not in special:
                fail(f"{path}: there is no {name} among its special tokens, so no text could end or be masked: add it "
                     "by add_special_tokens of `tokenizers`")  # fmt: skip

        ids = (spec["model"]["vocab"] | added).values()
        if not all(type(i) is int and 0 <= i < 2**20 for i in ids) or len(set(ids)) < len(ids):
            raise ValueError("its ids are not different numbers in 0..1,048,575")

        # the others, in characters that stand for bytes
        vocab = {token: i for token, i in spec["model"]["vocab"].items() if token not in added}
        byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        token_bytes = {i: bytes(byte_of[character] for character in token) for token, i in vocab.items()}
        token_bytes |= {i: name.encode() for name, i in added.items() if name not in special}

        if not byte_of.keys() <= spec["model"]["vocab"].keys():
            fail(f"{path}: its vocabulary lacks some bytes: train it with initial_alphabet=ByteLevel.alphabet()")

        pattern = known_pattern(spec, vocab)
        if pattern is None:
            return Tokenizer(read_by_library(path, spec, added), None, special, token_bytes)

        ranks = {token: i for i, token in token_bytes.items()}
        bpe = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

        def read(text: str, names: bool) -> list[int]:
            return bpe.encode(text, allowed_special="all" if names else set(), disallowed_special=())

        return Tokenizer(read, pattern, special, token_bytes)


def known_pattern(spec: dict, vocab: dict[str, int]) -> str | None:
    """The pattern by which this tokenizer splits text, if tiktoken has it and all else that changes its ids."""
    match spec["pre_tokenizer"]:
        case {
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]
        } if pattern in (WORDS, RELEASED):
            pass
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            pattern = GPT2
        case _:
            return None

    of_bpe = ("dropout", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    options = [spec.get("normalizer"), *(spec["model"].get(option) for option in of_bpe)]
    for token in spec["added_tokens"]:
        options += [not token.get("special"), *(token.get(option) for option in ("lstrip", "rstrip", "single_word"))]
    if any(options):
        return None

    # tiktoken takes the order of ids for the order of merges, and merges whatever gives a token
    merged = ["".join(merge).replace(" ", "") for merge in spec["model"]["merges"]]  # ["a", "b"], in old files "a b"
    ids = [vocab[token] for token in merged]
    in_order = ids == sorted(set(ids)) and vocab.keys() == {*byte_alphabet(), *merged}
    return pattern if in_order else None


def read_by_library(path: Path, spec: dict, added: dict[str, int]) -> Reader:
    try:
        import tokenizers
    except ImportError:
        fail(f"{path} is read by the library that writes such files: pip install tokenizers")
    try:
        bpe = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as e:  # the library has no type of its own
        raise ValueError(e) from e
    bpe.no_truncation()
    bpe.no_padding()
    if any(bpe.token_to_id(name) != i for name, i in added.items()):
        fail(f"{path}: the library gives its added tokens other ids than the file has: number them in order")

    def read(text: str, names: bool) -> list[int]:
        bpe.encode_special_tokens = not names
        return bpe.encode(text, add_special_tokens=False).ids

    return read
