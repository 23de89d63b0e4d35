"""How the files beside this one were made: a small byte-level BPE, trained and saved by the `tokenizers` library
(0.23.3), texts, and the ids that the library gives them. The tests read the files alone.

    pip install tokenizers
    python tests/data/bpe/make.py
"""

import json
import random
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer, Tokenizer

HERE = Path(__file__).parent
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


def main() -> None:
    """A text and its ids on each line: with special tokens, and with their names as text."""
    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|mask|>"]
    bpe.train_from_iterator(CORPUS, vocab_size=340, special_tokens=special, show_progress=False)
    raw = json.dumps(json.loads(bpe.to_str()), ensure_ascii=False)
    (HERE / "stock.json").write_text(raw + "\n", encoding="utf-8")

    read = Tokenizer.from_str(raw)
    lines = []
    for text in texts(60, seed=7):
        read.encode_special_tokens = False
        ids = read.encode(text).ids
        read.encode_special_tokens = True
        lines.append(json.dumps([text, ids, read.encode(text).ids], separators=(",", ":")))
    (HERE / "stock.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
