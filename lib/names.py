"""Names of Unicode characters. Every completed name can be judged, because `unicodedata` knows all names."""

import itertools
import math
import re
import unicodedata
from pathlib import Path

import torch

from lib.rows import read_split
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import MASK, generator, printable

FOLDER = Path(__file__).parent.parent / "data" / "names"


def exists(name: str) -> str | None:
    """The character with exactly this name, or None."""
    try:
        found = unicodedata.lookup(name)
    except (KeyError, UnicodeEncodeError):  # an unknown name; a lone surrogate in it
        return None
    # lookup also finds lower case, aliases and sequences, which are not a character's own name
    return found if unicodedata.name(found[0], "") == name else None


def verdict(name: str) -> str:
    """The character with this name and its code point, or "(no such character)"."""
    char = exists(name)
    return f"{printable(char)} (U+{ord(char):04X})" if char else "(no such character)"


def as_written(prompt: str) -> str:
    """A typed beginning in the form of names: in upper case, and each _ is a hole. A blank belongs to the token after
    it, so there is none at the end or before a hole."""
    text = prompt.upper().replace("_", MASK)
    return re.sub(rf"\s+({MASK}|$)", r"\1", text)


def names_of(split: str) -> list[str]:
    """The names of data/names: "train" or "val"."""
    documents, starts, _ = read_split(FOLDER / f"{split}.safetensors")
    own = load_tokenizer(FOLDER)
    return [own.decode(documents[a:b].tolist()) for a, b in itertools.pairwise(starts.tolist())]


def draw_names(n: int, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Up to n held-out names: name -> its beginning, the first third of its tokens, rounded up. No two of them have the
    same beginning, for a greedy decoder would only repeat its answer."""
    names = names_of("val")
    prompts = {}
    for i in torch.randperm(len(names), generator=generator("names", "held out")).tolist():
        ids = tokenizer.encode_document(names[i]).tolist()
        prompts.setdefault(tuple(ids[: math.ceil(len(ids) / 3)]), names[i])
        if len(prompts) == n:
            break
    return {name: list(ids) for ids, name in prompts.items()}
