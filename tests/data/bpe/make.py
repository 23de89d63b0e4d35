"""How the files beside this one were made: small byte-level BPEs, trained and saved by the `tokenizers` library
(0.23.3), texts, and the ids that the library gives them. The tests read the files alone.

    pip install tokenizers
    python tests/data/bpe/make.py
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, ByteLevelBPETokenizer, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|mask|>"]
RELEASED = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
CORPUS = [line for file in sorted((HERE.parents[2] / "lib").glob("*.py")) for line in file.read_text().splitlines(True)]

# parts of random texts: words, numbers, blanks, signs, letters of many scripts, what is composed, names of tokens
PARTS = ["the", "def", "self", "It's", "WE'LL", "'re", "'S", "\u017f", "12", "3456", "\u0664\u0665", "\u00bd", " ",
         "  ", "     ", "\t", "\n", "\r\n", "\n\n ", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\ufeff", ".", "...",
         "!?", "_", "==", "->", "\u2026", "na\u00efve", "e\u0301", "\u212b", "\uac00", "\u1112\u1161", "\u65e5\u672c",
         "\u0645\u0631\u062d", "\u0928\u093f", "\U0001f469\u200d\U0001f4bb", "\U0010ffff", "\U00010d40", "\u1c8a", "\0",
         "<|endoftext|>", "<|mask|>", "<|", "|>", "foo", "foobar", "barfoo", "na\u00ef"]  # fmt: skip


def texts(n: int, seed: int) -> list[str]:
    """Random texts: of these parts, some of them again and again, and of any characters."""
    rng = random.Random(seed)
    found = ["", " ", "a", "  a", " " * 700 + "a", "\t" * 600, "a" * 300]
    while len(found) < n:
        text = ""
        for _ in range(rng.randrange(1, 12)):
            part = rng.choice(PARTS)
            if rng.random() < 0.1:
                part = chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
            text += part * (rng.randrange(2, 9) if rng.random() < 0.1 else 1)
        found.append(text)
    return found[:n]


def stock() -> Tokenizer:
    """As most people train one: special tokens come first."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(CORPUS, vocab_size=340, special_tokens=SPECIAL, show_progress=False)
    return tokenizer


def prefix() -> Tokenizer:
    """With a blank before text, and NFC; special tokens come last, and a word is added."""
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=True, unicode_normalizer="nfc")
    tokenizer.train_from_iterator(CORPUS, vocab_size=320, show_progress=False)
    tokenizer.add_tokens(["na\u00ef", AddedToken("e\u0301", normalized=False)])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def split() -> Tokenizer:
    """The released pattern; added words, one of them the beginning of another, one of them in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    step = pre_tokenizers.Split(Regex(RELEASED), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([step, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["foo", "foobar", "self", AddedToken("barfoo", normalized=False)])
    return tokenizer


def main() -> None:
    """A text and its ids on each line: with special tokens, and with their names as text."""
    for make in (stock, prefix, split):
        tokenizer = make()
        content = json.loads(tokenizer.to_str())
        if make is prefix:
            # as older versions write merges
            content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        raw = json.dumps(content, ensure_ascii=False)
        (HERE / f"{make.__name__}.json").write_text(raw + "\n", encoding="utf-8")

        read = Tokenizer.from_str(raw)
        lines = []
        for text in texts(60, seed=7):
            read.encode_special_tokens = False
            ids = read.encode(text).ids
            read.encode_special_tokens = True
            lines.append(json.dumps([text, ids, read.encode(text).ids], separators=(",", ":")))
        (HERE / f"{make.__name__}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
