"""What all decoders share: their settings and flags, what a step reports, how a token is chosen, the state of a row.

The decoders themselves are in sample.py and causal.py, and their forwards are in cache.py.
"""

import argparse
import math
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from config import Config
from lib.util import Parser, bounded, fail, generator, or_none
from model import Model

# R rows that are being decoded, B block_length, V vocabulary, K = n_rounds


@dataclass(frozen=True)
class Decoding:
    """The settings of a decoder. The defaults are the paper's, except for gen_length, which is 16,384 in the paper.
    The paper also sets "32 steps per block". Here no limit is needed, because every step fills at least one mask.
    (Only a model that writes [M] itself could need more steps.)"""

    gen_length: int = 256  # tokens; the last block is decoded whole
    tau_m2t: float = 0.7  # fill the masks whose probability is above this; -1: all masks at once
    tau_t2t: float | None = 0.0  # edit a visible token if the likeliest is another, and above this; None: never
    n_rounds: int = 1  # K; 0: Stage B is off
    select: str = "confidence"  # which masks are written together: a name in sample.SELECT
    max_post_steps: int = 16  # the most forwards after the last mask is filled
    num_to_transfer: int = 1  # the least number of masks that the paper's rule fills in a step
    eos_early_stop: bool = True
    # fill the holes, which are masks in a prompt, in all blocks; the released decoder fills only those in the block
    # where the prompt ends
    holes: bool = False
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    # of causal.py alone
    lookahead: int = 0  # how many positions a pass of Stage B reads; 0: all that are not final
    beam: int = 1  # how many texts are kept while a block is written; 1: greedy

    @property
    def edit_gate(self) -> float:
        """What a probability must exceed to edit a token. It is infinite if edits are off."""
        return math.inf if self.tau_t2t is None else self.tau_t2t

    @property
    def log_gate(self) -> float:
        """The logarithm of what the probability of a run of tokens must exceed, where tau_m2t is about runs."""
        return math.log(self.tau_m2t) if self.tau_m2t > 0 else -math.inf

    @property
    def post_steps(self) -> int:
        """The most forwards after the last mask is filled. It is 0 without edits, because nothing could change."""
        return 0 if self.tau_t2t is None else self.max_post_steps


PAPER = Decoding(holes=True)
RELEASED = Decoding(holes=True, tau_t2t=0.5, n_rounds=0)  # LLaDA2.1's own quality setting, with Stage B off
CAUSAL = Decoding(holes=True, tau_t2t=None, tau_m2t=0.0, lookahead=2)  # causal.py: whole blocks
# how a base decodes, with Stage B off: what Config.decoder may be
SETTINGS = {
    "llada": RELEASED,
    "sdar": Decoding(holes=True, tau_t2t=None, tau_m2t=0.85, n_rounds=0),  # SDAR's own: no edits
    "a2d": Decoding(holes=True, tau_t2t=None, tau_m2t=1.0, n_rounds=0),  # Tiny-A2D's own: the surest token of a step
    "left": Decoding(holes=True, tau_t2t=None, tau_m2t=1.0, n_rounds=0, select="left"),  # one at a time, from the left
}


def settings_of(model: Model) -> Decoding:
    """How a model with a trained Stage B decodes."""
    return CAUSAL if model.cfg.stage_b == "causal" else PAPER


@dataclass
class Step:
    """What a step did to the current blocks, and what it cost besides Stage A's forward."""

    z: Tensor  # (R, B) int64: the blocks before the step
    after: Tensor  # (R, B) int64: the blocks after it
    bundle: Tensor  # (R, B) bool: the masks that it filled
    edited: Tensor  # (R, B) bool: the visible tokens that it changed
    token: Tensor  # (R, B) int64: the token that it would write at each position
    conf: Tensor  # (R, B) float32: that token's probability
    token_a: Tensor  # (R, B) int64: the token that Stage A would write
    conf_a: Tensor  # (R, B) float32: that token's probability
    partial: Tensor  # (R,) float32: partial forwards
    over: Tensor  # (R,) bool: no further step on this block would change it


# --- a token
def candidates(logits: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor]:
    """Each position's token and its probability: logits (..., V) -> (...) int64, (...) float32.

    Greedy: the argmax. With a temperature: drawn by u (...) in [0, 1) from the tokens that top_k and top_p leave.
    """
    if d.temperature == 0:
        token = logits.argmax(-1)
        p = logits.softmax(-1).gather(-1, token[..., None])
        return token, p[..., 0]

    # the likeliest tokens first; of equal ones the first
    p, order = (logits / d.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)

    # cut to the top k, then to top_p: keep the likeliest tokens, up to and with the one that crosses it
    if d.top_k:
        p = p * (torch.arange(p.shape[-1], device=p.device) < d.top_k)
    p = p.masked_fill(p.cumsum(-1) - p > d.top_p * p.sum(-1, keepdim=True), 0.0)

    # draw: the token in whose share of the remaining probability u falls
    cdf = p.cumsum(-1)
    mass = cdf[..., -1:]
    place = torch.searchsorted(cdf, u[..., None] * mass, right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    place = place.minimum(last).clamp(min=0)  # by rounding it may be past the last token; of NaN none is left
    return order.gather(-1, place)[..., 0], (p / mass).gather(-1, place)[..., 0]


# --- a row's state, and its output
@dataclass
class Output:
    """The output of one row."""

    prompt: list[int]  # with its holes filled
    tokens: list[int] = field(default_factory=list)  # the tokens written after it, up to and with eos
    # nfe: number of function evaluations, that is, of forwards. Full ones are Stage A's, partial ones are Stage B's
    # rounds, and a refresh reads a finished block again
    nfe: dict[str, float] = field(default_factory=lambda: dict(full=0, partial=0, refresh=0))
    warning: str | None = None


class Row:
    """One prompt, and the text that has been written after it."""

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
        # the random numbers depend on the prompt, and on how many equal prompts come before it
        twins = prompts[:number].count(self.prompt)
        self.rng = generator(seed, "sample", tuple(self.prompt), twins)
        self.output = Output(self.prompt)

    def block(self) -> list[int]:
        """The current block: the prompt's tokens in it, then masks."""
        B = self.cfg.block_length
        given = self.prompt[len(self.ids) :][:B]
        return given + [self.cfg.mask_id] * (B - len(given))

    def given(self) -> list[bool]:
        """Which positions of the current block are never edited."""
        B = self.cfg.block_length
        of_prompt = self.prompt[len(self.ids) :][:B]
        given = [not (self.d.holes and i == self.cfg.mask_id) for i in of_prompt]
        return given + [False] * (B - len(of_prompt))

    def finish(self, block: list[int], full: float, partial: float, changed: bool) -> bool:
        """Add a finished block and its forwards to the row -> was it the last block?

        If not, the next block will read it. That takes a refresh if the last step has changed the block, and K - 1
        partial forwards for its keys in the further rounds.
        """
        out = self.output
        self.ids = self.ids + block
        n = len(self.prompt)
        new = self.ids[n:]
        out.prompt = self.ids[:n] + self.prompt[len(self.ids) :]
        out.tokens = up_to_eos(new[: self.d.gen_length], self.cfg.eos_id)
        if self.cfg.mask_id in block:
            out.warning = f"a block still has masks after {full:g} forwards, because the model writes masks there"

        ended = self.cfg.eos_id in new and self.cfg.mask_id not in new
        last = len(self.ids) >= n + self.d.gen_length or (self.d.eos_early_stop and ended)
        out.nfe["full"] += int(full)
        out.nfe["partial"] += partial
        if not last:
            out.nfe["partial"] += max(0, self.d.n_rounds - 1)
            out.nfe["refresh"] += int(changed)
        return last


def in_full(nfe: dict[str, float], partial_cost: float) -> float:
    """All forwards, counted in full ones: a refresh costs one, and a partial forward costs partial_cost."""
    return nfe["full"] + nfe["refresh"] + nfe["partial"] * partial_cost


def up_to_eos(tokens: list[int], eos_id: int) -> list[int]:
    """[5, 7, eos, 3] -> [5, 7, eos]"""
    if eos_id in tokens:
        return tokens[: tokens.index(eos_id) + 1]
    return tokens


# --- flags
def add_decoding(parser: Parser, rules: Iterable[str]) -> None:
    """The flags that change fields of the checkpoint's Decoding. rules: the names for --select."""
    some = bounded(int, 0, 10**9)
    share = bounded(float, 0, 1)
    add = parser.add_argument_group(
        "decoding (default: the settings of the checkpoint's Stage B, PAPER or CAUSAL in decoding.py; RELEASED if it "
        "has none, or is off)"
    ).add_argument
    # fmt: off
    add("--n_rounds", type=some, help="K, the rounds of Stage B; 0: Stage B off")
    add("--tau_m2t", type=bounded(float, -1, 1),
        help="the bundle: the masks whose probability is above this; -1: every mask at once (PAPER 0.7). With --select "
             "left, and for causal Stage B, the longest run from the left whose product is above this (CAUSAL 0)")
    add("--tau_t2t", type=or_none(share), default=argparse.SUPPRESS,
        help='edit a visible token if the likeliest one is another, with a probability above this; 0: any other; '
             '"none": never (PAPER 0, RELEASED 0.5; causal Stage B edits nothing)')
    add("--select", choices=rules, help="the rule for the bundle of the paper's step (PAPER confidence)")
    add("--lookahead", type=some, help="how many positions a pass of causal Stage B reads; 0: all that are not final")
    add("--beam", type=bounded(int, 1, 1024),
        help="how many texts causal Stage B keeps while it writes a block; the beam ends with the block (CAUSAL 1)")
    add("--temperature", type=bounded(float, 0), help="0: the likeliest tokens; above: draw (default: 0)")
    add("--top_k", type=some, help="with a temperature: draw from the k likeliest tokens; 0: from all")
    add("--top_p", type=bounded(float, 1e-6, 1),
        help="with a temperature: draw from the likeliest tokens, up to this sum of probabilities")
    # fmt: on


def decoding_of(args: Namespace, model: Model) -> Decoding:
    """The settings of the model's Stage B, changed by flags. Stage B is off if it was never trained: it would be Stage
    A."""
    flags = ("n_rounds", "tau_m2t", "select", "lookahead", "beam", "temperature", "top_k", "top_p", "gen_length")
    given = {name: getattr(args, name) for name in flags if getattr(args, name, None) is not None}
    if hasattr(args, "tau_t2t"):
        given["tau_t2t"] = args.tau_t2t
    K = given.setdefault("n_rounds", model.cfg.n_rounds if model.trained_b else 0)
    if model.cfg.n_rounds < K:
        fail(f"--n_rounds {K}: this checkpoint has markers for 0..{model.cfg.n_rounds} rounds")
    d = replace(settings_of(model) if K > 0 else SETTINGS[model.cfg.decoder], **given)
    if d.beam > 1 and d.temperature > 0:
        fail("--beam looks for the likeliest text: leave out --temperature, or --beam")
    if 0 < d.temperature < 1e-3:
        fail(f"--temperature {d.temperature:g} is too small to divide by: give 0 (greedy), or at least 0.001")
    return d
