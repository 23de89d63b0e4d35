"""Spans of held-out Python to fill, and what is worth what was written there. For sweep.py and tc.py.

The pieces are the functions of held-out Python files. In each one a span inside one block is masked, with the text
before it and the rest of its block left to read.

    score     log-probability of what was written under a base's own one-at-a-time chain, nats a token.
              Chain targets train this: a gain here alone says that they were learned, not that the text is better
    exact     whether the span is as it was
    parses    whether the function is still Python with the span in it
"""

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from beyond.chain import beam_chain
from cache import Cached
from lib.config import Config
from lib.data import is_validation, load_text
from lib.output import Output
from lib.tokenizer import Tokenizer
from lib.util import fail
from model import Model
from sample import Decoding

# R spans (rows), B block_length, V vocabulary

LONGEST = 256  # tokens of a function

LogProbs = Callable[[Tensor], Tensor]  # blocks (R, B) int64 -> (R, B, V) float32 log-probabilities


# --- spans
@dataclass
class Span:
    document: int  # its number among the held-out ones
    piece: list[int]  # ids of the whole piece
    start: int  # where the block begins
    at: slice  # the masked positions, inside the block


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def functions(text: str) -> Iterator[str]:
    """The functions of a Python file, each by itself."""
    if not is_python(text):
        return
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            piece = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
            if is_python(piece):  # a string or comment at the margin keeps a method indented
                yield piece


def cut(documents: list[tuple[str, str]], tokenizer: Tokenizer, B: int, n: int) -> list[Span]:
    """n spans of held-out documents, a function of their order and of B alone: at most one in a function, a quarter to
    three quarters of a block long, in a block after the first."""
    rng = np.random.default_rng(0)
    spans = []
    held_out = [text for name, text in documents if is_validation(name)]
    for number, text in enumerate(held_out):
        for piece in functions(text):
            ids = tokenizer.encode_document(piece).tolist()
            if 3 * B <= len(ids) <= LONGEST:
                start = B * int(rng.integers(1, len(ids) // B))
                length = int(rng.integers(max(2, B // 4), 3 * B // 4 + 1))
                first = int(rng.integers(0, B - length + 1))
                spans.append(Span(number, ids, start, slice(first, first + length)))
    if len({s.document for s in spans}) < 2:
        fail(f"fewer than two held-out Python files have functions of {3 * B}..{LONGEST} tokens: give more by --data")

    return [spans[i] for i in sorted(rng.permutation(len(spans))[:n])]


class Spans:
    """Spans to fill; those of one document are one cluster."""

    start = Decoding(gen_length=0, tau_t2t=None, n_rounds=0, holes=True)

    def __init__(self, data: list[str], n: int, tokenizer: Tokenizer | None, cfg: Config):
        if tokenizer is None:
            fail("a model that reads numbers has no text to fill (a toy's tables are exact: see evaluate.py)")
        self.tokenizer = tokenizer
        self.B = cfg.block_length
        self.mask_id = cfg.mask_id
        self.spans = cut(load_text(data), tokenizer, self.B, n)
        self.prompts = [masked(s, self.B, self.mask_id) for s in self.spans]
        self.clusters = {"documents": [s.document for s in self.spans]}

        # the blocks that the spans are in, (R, B)
        self.z = torch.tensor([prompt[-self.B :] for prompt in self.prompts])
        self.length = (self.z == self.mask_id).sum(-1).numpy()  # (R,) tokens in each span

    def per(self, outputs: list[Output]) -> dict[str, int]:
        """What a cost is of, and how many of it there are."""
        return {"token": int(self.length.sum())}

    def read_by(self, base: Model) -> Cached:
        """Forwards of the blocks, with the text before them."""
        return Cached(base, [s.piece[: s.start] for s in self.spans], 0)

    def figures(self, outputs: list[Output], base: Model) -> dict:
        """The measures of every span."""
        blocks = [o.prompt[-self.B :] for o in outputs]
        log_p = stage_a_log_probs(self.read_by(base), mask_too=True)
        z = self.z.to(base.wte.weight.device)
        score = chain_score(log_p, z, z == self.mask_id, torch.tensor(blocks, device=z.device)).cpu().numpy()

        pairs = list(zip(self.spans, blocks, strict=True))
        return {
            "score": (score / self.length).astype(float).round(5).tolist(),
            "exact": [float(block == s.piece[s.start : s.start + self.B]) for s, block in pairs],
            "parses": [parses(s, block, self.tokenizer) for s, block in pairs],
        }


def masked(s: Span, B: int, mask_id: int) -> list[int]:
    """The piece up to and with the span's block, the span masked."""
    ids = list(s.piece[: s.start + B])
    for i in range(s.at.start, s.at.stop):
        ids[s.start + i] = mask_id
    return ids


# --- what was written
def parses(s: Span, block: list[int], tokenizer: Tokenizer) -> float:
    """Is the function still Python, with this block in it? 0 or 1."""
    behind = s.piece[s.start + len(block) :]
    return float(is_python(tokenizer.decode(s.piece[: s.start] + block + behind)))


# --- the base's chain
def stage_a_log_probs(engine: Cached, mask_too: bool = False) -> LogProbs:
    """Stage A of the current blocks; a mask is nothing to write, but a decoder may have left one (mask_too)."""

    def log_p(z: Tensor) -> Tensor:
        logits = engine.model.head(engine.stage_a(z)[1])
        if not mask_too:
            logits[..., engine.cfg.mask_id] = float("-inf")
        return logits.log_softmax(-1)

    return log_p


def chain_score(log_p: LogProbs, z: Tensor, bundle: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability (R,) with which a one-at-a-time decode of the bundle (R, B), the surest position first,
    writes these tokens (R, B)."""

    def look(z: Tensor, left: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        at = log_p(z)  # (R, B, V)
        sure = at.amax(-1).masked_fill(~left, float("-inf"))
        return sure, at.gather(-1, tokens[..., None]), tokens[..., None]

    _, score = beam_chain(look, z, bundle, 1)
    return score
