"""What every decoder has: its settings, what a step reports, how a token is chosen, and what is known of a row.

sample.py decodes by these, and causal.py has a step of its own. The forwards are in cache.py.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lib.util import generator
from model import Config

# R rows in flight, B block_length, V vocabulary, K = n_rounds


@dataclass(frozen=True)
class Decoding:
    """The settings of a decode. As they stand here they are the paper's, but for gen_length, which is 16,384 there. The
    paper's "32 steps per block" is no bound: each step fills a mask at least."""

    gen_length: int = 256  # tokens; the last block is decoded whole
    tau_m2t: float = 0.7  # fill masks whose probability is above; -1: every mask at once
    tau_t2t: float | None = 0.0  # edit a visible token where another has more than this; None: never
    n_rounds: int = 1  # K; 0: Stage B is off
    tau_joint: float | None = None  # of a run from the left: its tokens together are surer than this (not the paper's)
    max_post_steps: int = 16  # forwards after the last mask
    num_to_transfer: int = 1  # masks that are written in a step at least
    eos_early_stop: bool = True
    holes: bool = False  # fill the masks in a prompt, too; the released decoder leaves them
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0

    @property
    def edit_gate(self) -> float:
        """What a probability must exceed to edit: nothing does where edits are off."""
        return math.inf if self.tau_t2t is None else self.tau_t2t

    @property
    def post_steps(self) -> int:
        """Forwards after the last mask: without edits nothing can change any more."""
        return 0 if self.tau_t2t is None else self.max_post_steps


@dataclass
class Step:
    """What a step did to the current blocks, and what it cost beside Stage A's forward."""

    z: Tensor  # (R, B) int64, before it
    after: Tensor  # (R, B) int64
    bundle: Tensor  # (R, B) bool: the masks that it wrote
    edited: Tensor  # (R, B) bool
    token: Tensor  # (R, B) int64: what it would write at each position
    conf: Tensor  # (R, B) float32: how probable that is
    token_a: Tensor  # (R, B) int64: what Stage A would write
    conf_a: Tensor  # (R, B) float32
    partial: Tensor  # (R,) float32: partial forwards


# --- a token
def candidates(logits: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor]:
    """Each position's token and its probability: logits (..., V) -> (...) int64, (...) float32.

    Greedy: the argmax. With temperature: drawn by u (...) in [0, 1) from what the filters leave.
    """
    if d.temperature == 0:
        token = logits.argmax(-1)
        p = logits.softmax(-1).gather(-1, token[..., None])
        return token, p[..., 0]

    # scale, and cut to the top k
    logits = logits / d.temperature
    if d.top_k:
        kth = logits.topk(min(d.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))

    # cut to top_p: up to and with the token that crosses it
    p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    p = p.masked_fill(p.cumsum(-1) - p > d.top_p, 0.0)

    # draw: the token in whose share of the mass that is left u falls
    cdf = p.cumsum(-1)
    mass = cdf[..., -1:]
    place = torch.searchsorted(cdf, u[..., None] * mass, right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    place = torch.minimum(place, last)  # rounding: not past the last one
    return order.gather(-1, place)[..., 0], (p / mass).gather(-1, place)[..., 0]


# --- what the host knows of a row, and what comes out of it
@dataclass
class Output:
    """What comes out of a decode of one row."""

    prompt: list[int]  # with its holes filled
    tokens: list[int] = field(default_factory=list)  # generated behind it, up to and with eos
    # forwards: full, Stage A; partial, Stage B's rounds; refresh, a finished block read once more
    nfe: dict[str, float] = field(default_factory=lambda: dict(full=0, partial=0, refresh=0))
    warning: str | None = None


class Row:
    """One prompt, and what has been written behind it."""

    def __init__(self, number: int, prompts: list[list[int]], d: Decoding, cfg: Config, seed: int):
        self.number = number
        self.prompt = prompts[number]
        self.d = d
        self.cfg = cfg
        # finished blocks: those before the prompt's end, or before its first hole
        first = len(self.prompt)
        if d.holes and cfg.mask_id in self.prompt:
            first = self.prompt.index(cfg.mask_id)
        self.ids = self.prompt[: first // cfg.block_length * cfg.block_length]
        # random numbers are a function of the prompt, and of how many equal prompts come before it
        twins = prompts[:number].count(self.prompt)
        self.rng = generator(seed, "sample", tuple(self.prompt), twins)
        self.output = Output(self.prompt)

    def block(self) -> list[int]:
        """The current block: what the prompt has of it, then masks."""
        B = self.cfg.block_length
        given = self.prompt[len(self.ids) :][:B]
        return given + [self.cfg.mask_id] * (B - len(given))

    def given(self) -> list[bool]:
        """Of the current block the positions that are never edited."""
        B = self.cfg.block_length
        of_prompt = self.prompt[len(self.ids) :][:B]
        given = [not (self.d.holes and i == self.cfg.mask_id) for i in of_prompt]
        return given + [False] * (B - len(of_prompt))

    def finish(self, block: list[int], full: float, partial: float, changed: bool) -> bool:
        """Book a finished block and what it cost -> whether it was the last one.

        If not, the next block will read it: that takes a refresh if its last step still changed
        it, and K - 1 partial ones for its states of the further rounds.
        """
        out = self.output
        self.ids = self.ids + block
        n = len(self.prompt)
        new = self.ids[n:]
        out.prompt = self.ids[:n] + self.prompt[len(self.ids) :]
        out.tokens = up_to_eos(new[: self.d.gen_length], self.cfg.eos_id)
        if self.cfg.mask_id in block:
            out.warning = f"a block was left with masks after {full:g} forwards that would never fill it"

        ended = self.cfg.eos_id in new and self.cfg.mask_id not in new
        last = len(self.ids) >= n + self.d.gen_length or (self.d.eos_early_stop and ended)
        out.nfe["full"] += int(full)
        out.nfe["partial"] += partial
        if not last:
            out.nfe["partial"] += max(0, self.d.n_rounds - 1)
            out.nfe["refresh"] += int(changed)
        return last


def in_full(nfe: dict[str, float], partial_cost: float) -> float:
    """All forwards in full ones: a refresh is one, a partial one is partial_cost of one."""
    return nfe["full"] + nfe["refresh"] + nfe["partial"] * partial_cost


def up_to_eos(tokens: list[int], eos_id: int) -> list[int]:
    """[5, 7, eos, 3] -> [5, 7, eos]"""
    if eos_id in tokens:
        return tokens[: tokens.index(eos_id) + 1]
    return tokens
