"""Tokenizers: text to ids and back. All are byte-level BPEs in a `tokenizer.json`, bytes too, which have no merges.

tiktoken reads the released tokenizers, those of this project (bytes, and the BPE of data/names), and BPEs with the
pattern of GPT-2. Any other byte-level BPE is read by `tokenizers`, the library that writes such files.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from lib.util import WALK, checked_entry, fail, read_json, reading

# the names of the token that ends a text, and of the mask, if nothing says their ids
EOS_TOKEN = "<|endoftext|>"
MASK_TOKENS = MASK_TOKEN, *_ = ("<|mask|>", "<|MASK|>", "<MASK>")
TURNS = {"<role>", "<|im_start|>"}  # special tokens that begin a turn of a chat

# the patterns by which tiktoken splits text into words: that of this project (the blank before a word belongs to
# it), that of GPT-2, which is ByteLevel's own, and those of LLaDA and of Qwen
WORDS = r" ?\S+|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
RELEASED = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Blanks but the last before a word. The second form finds the same, but goes back by at most 64 blanks: the first one
# would overflow tiktoken's stack at a million
BLANKS = r"\s+(?!\S)"
FEW_BACK = r"(?:\s\s)??(?:\s{64})*+\s+(?!\S)"

Reader = Callable[[str, bool], list[int]]  # text to ids; true: the name of a special token becomes that token


@dataclass
class Tokenizer:
    reader: Reader
    pattern: str | None  # the pattern that splits text into words, if tiktoken reads it
    special: dict[str, int]
    token_bytes: dict[int, bytes]  # special and unused ids have no entry
    eos_id: int
    mask_id: int

    def __post_init__(self) -> None:
        self.vocab_size = 1 + max(*self.token_bytes, *self.special.values())
        self.turns = {i for name, i in self.special.items() if name in TURNS}

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
    return bpe_tokenizer(path, None, *ids_beside(path)) if path.exists() else None


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


def bpe_tokenizer(
    path: Path, spec: dict | None = None, eos_id: int | None = None, mask_id: int | None = None, add_mask: bool = False
) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`. spec: the file's content, if known. eos_id, mask_id: what ends a text, and
    the mask (left out: by name). add_mask: if there is no mask, the first free id is one."""
    spec = spec or read_json(path, "tokenizer")
    with reading(path, "tokenizer", WALK):
        if spec["model"]["type"] != "BPE" or spec["decoder"]["type"] != "ByteLevel":
            raise ValueError("it is no byte-level BPE")

        # the tokens that were added to the vocabulary, in plain text: special ones, and words
        added = {token["content"]: token["id"] for token in spec["added_tokens"]}
        special = {token["content"]: token["id"] for token in spec["added_tokens"] if token.get("special")}
        ids = [*(spec["model"]["vocab"] | added).values()]
        if add_mask and mask_id is None and not special.keys() & {*MASK_TOKENS}:
            mask_id = 1 + max(ids)
        eos_id, mask_id = end_and_mask(path, ids, special, eos_id, mask_id)

        # the others, in characters that stand for bytes
        vocab = {token: i for token, i in spec["model"]["vocab"].items() if token not in added}
        byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        token_bytes = {i: bytes(byte_of[character] for character in token) for token, i in vocab.items()}
        token_bytes |= {i: name.encode() for name, i in added.items() if name not in special}

        if not byte_of.keys() <= spec["model"]["vocab"].keys():
            fail(f"{path}: its vocabulary lacks some bytes: train it with initial_alphabet=ByteLevel.alphabet()")

        pattern = known_pattern(spec, vocab)
        if pattern is None:
            read = read_by_library(path, spec, added)
            # a text with holes is read in parts, and these must fit together
            if b"".join(token_bytes.get(i, b"") for i in read("a ", False)) != b"a ":
                fail(f"{path} adds blanks to what it reads, or drops some: train it with add_prefix_space=False")
        else:
            ranks = {token_bytes[i]: i for i in vocab.values()}
            bpe = tiktoken.Encoding("bpe", pat_str=pattern.replace(BLANKS, FEW_BACK), mergeable_ranks=ranks,
                                    special_tokens={})  # fmt: skip
            read = read_by_tiktoken(bpe, added | special, special, nfc=bool(spec.get("normalizer")))
        return Tokenizer(read, pattern, special, token_bytes, eos_id, mask_id)


def ids_beside(path: Path) -> tuple[int | None, int | None]:
    """The ids of eos and of the mask, if the model's or the rows' folder of this tokenizer.json says them."""
    for name in ("config.json", "meta.json"):
        if (path.parent / name).exists():
            about = read_json(path.parent / name, "checkpoint or folder of rows")
            if "mask_id" in about:
                return tuple(checked_entry(about, key, int, path.parent / name) for key in ("eos_id", "mask_id"))
    return None, None


def end_and_mask(
    path: Path, ids: list[int], special: dict[str, int], eos_id: int | None, mask_id: int | None
) -> tuple[int, int]:
    """The token that ends a text, and the mask, by name where no id is given. A mask that the file lacks is added to
    `special`."""
    if eos_id is None:
        eos_id = special.get(EOS_TOKEN)
    if mask_id is None:
        mask_id = next((special[name] for name in MASK_TOKENS if name in special), None)
    elif mask_id not in ids:
        special.setdefault(MASK_TOKEN, mask_id)

    for name, i in ((EOS_TOKEN, eos_id), (MASK_TOKEN, mask_id)):
        if i is None:
            fail(f"{path}: there is no {name} among its special tokens, so no text could end or be masked: add it "
                 "by add_special_tokens of `tokenizers`")  # fmt: skip
        if i not in special.values():
            fail(f"{path}: token {i}, which should be {name}, is not among its special tokens")
    return eos_id, mask_id


def known_pattern(spec: dict, vocab: dict[str, int]) -> str | None:
    """The pattern by which this tokenizer splits text, if tiktoken has it and all else that changes its ids."""
    match spec["pre_tokenizer"]:
        case {
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]
        } if pattern in (WORDS, RELEASED, QWEN):
            pass
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            pattern = GPT2
        case _:
            return None

    of_bpe = ("dropout", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    options = [spec["model"].get(option) for option in of_bpe]
    for token in spec["added_tokens"]:
        options += [token.get(option) for option in ("lstrip", "rstrip", "single_word")]
    # NFC is applied between added tokens, so these must be looked for in the text as it is
    normalizer = spec.get("normalizer")
    if normalizer:
        options += [normalizer != {"type": "NFC"}, *(token.get("normalized") for token in spec["added_tokens"])]
    if any(options):
        return None

    # tiktoken takes the order of ids for the order of merges, and merges whatever gives a token
    merged = ["".join(merge).replace(" ", "") for merge in spec["model"]["merges"]]  # ["a", "b"], in old files "a b"
    ids = [vocab[token] for token in merged]
    in_order = ids == sorted(set(ids)) and vocab.keys() == {*byte_alphabet(), *merged}
    return pattern if in_order else None


def read_by_tiktoken(bpe: tiktoken.Encoding, added: dict[str, int], special: dict[str, int], nfc: bool) -> Reader:
    """tiktoken reads what stands between added tokens. Words among these are found in documents, too."""
    words = {name: i for name, i in added.items() if name not in special}
    found = [(words, split_at(words)), (added, split_at(added))]

    def read(text: str, names: bool) -> list[int]:
        ids = []
        tokens, split = found[names]
        for part in split(text):
            if part in tokens:
                ids.append(tokens[part])
            elif part:
                ids += bpe.encode_ordinary(unicodedata.normalize("NFC", part) if nfc else part)
        return ids

    return read


def split_at(names: dict[str, int]) -> Callable[[str], list[str]]:
    """Cut a text into these names, where the longest counts, and what stands between them."""
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"({longest_first})").split if names else lambda text: [text]


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
