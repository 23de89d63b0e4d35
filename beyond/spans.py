"""Spans of held-out text to fill, and the two ways to fill them: by a decoder, and by the one-at-a-time chain.

For text.py and tc.py. Held-out documents give pieces (the functions of Python files, windows of other text); in each
one a span inside one block is masked, with the text before it and the rest of its block left to read. It refuses toys
(their tables are exact) and text without a long enough piece.
"""

import ast
import copy
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from beyond.chain import best_tokens, greedy_chain
from cache import Cached, is_finished
from checkpoint import load_tokenizer
from lib.data import is_validation, load_text
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, fail
from model import Model
from sample import Decoding, step_of

# R spans (rows), B block_length, V vocabulary, n masked positions

LogProbs = Callable[[Tensor], Tensor]  # blocks (R, B) int64 -> (R, B, V) float32 log-probabilities

FILL = Decoding(tau_t2t=None)


# fmt: off
def build_parser(doc: str) -> Parser:
    p = Parser(doc)
    g = p.add_argument_group("text")
    g.add_argument("--data", nargs="+", default=["stdlib"], help="stdlib, or .txt / folder / .jsonl[.gz] / .parquet")
    g.add_argument("--spans", type=bounded(int, 2), default=512, help="held-out spans to fill")
    g.add_argument("--plot", type=Path, help="also draw it: a file for matplotlib, .svg or .png")
    g.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    return p
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# spans


@dataclass
class Span:
    document: int  # its number among those that gave a span
    piece: list[int]  # ids of the whole piece
    start: int  # where the block begins
    at: slice  # the masked positions, inside the block
    python: bool


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def pieces(name: str, text: str) -> Iterator[tuple[str, bool]]:
    """The functions of a Python file, each by itself; of any other text the whole. -> (text, whether it is Python)."""
    if not name.endswith(".py"):
        yield text, False
        return
    if not is_python(text):
        return
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            piece = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
            if is_python(piece):  # a string or comment at the margin keeps a method indented
                yield piece, True


def cut(documents: list[tuple[str, str]], tokenizer: Tokenizer, B: int, most: int, n: int) -> list[Span]:
    """n spans of held-out documents, a function of their order and of B alone: at most one in a piece of up to `most`
    tokens, a quarter to three quarters of a block long, in a block after the first."""
    rng, spans = np.random.default_rng(0), []
    for number, (name, text) in enumerate(documents):
        if not is_validation(name):
            continue
        for piece, python in pieces(name, text):
            ids = tokenizer.encode_document(piece).tolist()
            if not python:
                ids = ids[:most]
            if not 3 * B <= len(ids) <= most:
                continue
            start = B * int(rng.integers(1, len(ids) // B))
            length = int(rng.integers(max(2, B // 4), 3 * B // 4 + 1))
            first = int(rng.integers(0, B - length + 1))
            spans.append(Span(number, ids, start, slice(first, first + length), python))
    if len({s.document for s in spans}) < 2:
        fail(f"fewer than two held-out documents have pieces of {3 * B}..{most} tokens: give more text by --data")
    drawn = [spans[i] for i in sorted(rng.permutation(len(spans))[:n])]
    numbers = {number: i for i, number in enumerate(dict.fromkeys(s.document for s in drawn))}
    return [replace(s, document=numbers[s.document]) for s in drawn]


def blocks(spans: list[Span], B: int, mask_id: int) -> tuple[Tensor, Tensor]:
    """Blocks with the span masked (R, B) int64, and where the span is (R, B) bool."""
    z = torch.tensor([s.piece[s.start : s.start + B] for s in spans])
    inside = torch.zeros_like(z, dtype=torch.bool)
    for row, s in zip(inside, spans, strict=True):
        row[s.at] = True
    return z.masked_fill(inside, mask_id), inside


def read(args: Namespace, ckpt: str, model: Model) -> tuple[list[Span], Tokenizer]:
    """The spans that the flags ask for, with what reads them; a picture that could not be drawn is refused as well."""
    if args.plot:
        from tools.plots import canvas

        canvas(args.plot)  # now, not after measuring
    tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
    if tokenizer is None:
        fail(f"{ckpt} has no tokenizer to read text with (a toy's tables are exact: python -m beyond.toys)")
    most = min(256 if model.cfg.tokenizer == "bytes" else 2048, model.cfg.max_len)
    spans = cut(load_text(args.data), tokenizer, model.cfg.block_length, most, args.spans)
    tokens, python = sum(s.at.stop - s.at.start for s in spans), sum(s.python for s in spans)
    print(f"{len(spans)} spans, {tokens} tokens, {python} of them in Python functions; "
          f"blocks of {model.cfg.block_length}")  # fmt: skip
    return spans, tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# decoders and what they wrote


def fill(
    engine: Cached, z: Tensor, d: Decoding, on_step: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the masks of the blocks z (R, B) by the model's own step (an extension's) or `step` -> the blocks, full and
    partial forwards of each row, (R,) float32 each. Rows end as in `sample.generate`. `on_step(rows, z, bundle, Stage
    A's confidence)`, (rows,) and (rows, B) each, sees every commitment of the rows that are left."""
    one_step = step_of(engine.model)
    mask_id = engine.cfg.mask_id
    prompt = z != mask_id
    z = z.clone()
    counts = torch.zeros(3, len(z), device=z.device)  # full, partial, and those since the last mask

    # the rows that are left, and an engine of theirs alone, which a step may leave something in
    rows = (~prompt).any(-1).nonzero()[:, 0]
    engine = at_rows(engine, rows.tolist())
    while len(rows) > 0:
        before = z[rows]
        any_masked = bool((before == mask_id).any())
        u = torch.zeros(len(rows), 3, z.shape[1], device=z.device)  # nothing is drawn
        s = one_step(engine, before, prompt[rows], any_masked, u, d)
        if on_step:
            on_step(rows, before, s["bundle"], s["conf_a"])

        # write, and count
        z[rows] = s["after"]
        masked = (s["after"] == mask_id).any(-1)
        partial = s.get("partial", d.n_rounds * s["bundle"].any(-1))
        counts[:, rows] += torch.stack([torch.ones_like(masked), partial, ~masked])

        # drop what is finished
        changed = (s["after"] != before).any(-1)
        left = (~is_finished(changed, masked, counts[:, rows], d)).nonzero()[:, 0]
        if 0 < len(left) < len(rows):
            engine.keep(left.tolist())
        rows = rows[left]
    return z, counts[0], counts[1]


def at_rows(engine: Cached, rows: list[int]) -> Cached:
    """The same contexts' forwards, of these rows, which may repeat."""
    part = copy.copy(engine)
    part.cache = copy.copy(engine.cache)
    part.cache.keep(rows)
    return part


def stage_a_log_probs(engine: Cached, mask_too: bool = False) -> LogProbs:
    """Stage A of the current blocks; a mask is nothing to write, but a decoder may have left one (mask_too)."""

    def log_p(z: Tensor) -> Tensor:
        logits = engine.stage_a(z)[1]
        if not mask_too:
            logits[..., engine.cfg.mask_id] = float("-inf")
        return logits.log_softmax(-1)

    return log_p


def chain(log_p: LogProbs, z: Tensor, bundle: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The one-at-a-time decode of a bundle (R, B), most confident position first: by argmax, or with the tokens
    `forced` (R, B) upon it. -> tokens (R, B), their log-probability (R,)."""

    def look(z: Tensor, left: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        at = log_p(z)  # (R, B, V)
        sure = at.amax(-1).masked_fill(~left, float("-inf"))
        if forced is None:
            return sure, *best_tokens(at, 1, slice(None))
        token = forced[..., None]
        return sure, at.gather(-1, token), token

    return greedy_chain(look, z, bundle)
