"""Names of Unicode characters. Every completed name can be judged, because `unicodedata` knows all names."""

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


def draw_names(n: int, group: str, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """n names of data/names, "held out" or "trained" on: name -> the first third of its tokens, rounded up."""
    split = "val" if group == "held out" else "train"
    documents, starts, _ = read_split(FOLDER / f"{split}.safetensors")
    own = load_tokenizer(FOLDER)
    order = torch.randperm(len(starts) - 1, generator=generator("names", group))
    prompts = {}
    for i in order[:n].tolist():
        name = own.decode(documents[starts[i] : starts[i + 1]].tolist())
        ids = tokenizer.encode_document(name).tolist()
        prompts[name] = ids[: math.ceil(len(ids) / 3)]
    return prompts


def each_once(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """The first name of each beginning: the others would only repeat its greedy answer."""
    first: dict[tuple[int, ...], str] = {}
    for name, ids in prompts.items():
        first.setdefault(tuple(ids), name)
    return {name: list(ids) for ids, name in first.items()}
