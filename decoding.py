"""What all decoders share: their settings and flags, what a step reports, how a token is chosen, the state of a row,
and how prompts are read.

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
from lib import names
from lib.tokenizer import Tokenizer
from lib.util import MASK, Parser, bounded, fail, generator, or_word, reading
from model import Model

# R rows that are being decoded, B block_length, V vocabulary, K = n_rounds


ALL = -1.0  # a gate that everything passes; in flags it is the word "all"


@dataclass(frozen=True)
class Decoding:
    """The settings of a decoder. The defaults are the paper's, except for gen_length, which is 16,384 in the paper.
    The paper also sets "32 steps per block". Here no limit is needed, because every step fills at least one mask.
    (Only a model that writes [M] itself could need more steps.)"""

    gen_length: int = 256  # tokens; the last block is decoded whole
    tau_m2t: float = 0.7  # fill the masks whose probability is above this; ALL: all masks at once
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
    beam: int = 1  # of causal.py alone: how many texts are kept while a block is written; 1: greedy

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
CAUSAL = Decoding(holes=True, tau_t2t=None, tau_m2t=ALL)  # causal.py: whole blocks

# how a base decodes, with Stage B off: what Config.decoder may be
SETTINGS = {
    "llada": Decoding(holes=True, tau_t2t=0.5, n_rounds=0),  # LLaDA2.1's own quality setting
    "sdar": Decoding(holes=True, tau_t2t=None, tau_m2t=0.85, n_rounds=0),  # SDAR's own: no edits
    "a2d": Decoding(holes=True, tau_t2t=None, tau_m2t=1.0, n_rounds=0),  # Tiny-A2D's own: the surest token of a step
    "left": Decoding(holes=True, tau_t2t=None, tau_m2t=1.0, n_rounds=0, select="left"),  # one at a time, from the left
}
RELEASED = SETTINGS["llada"]


def settings_of(model: Model) -> Decoding:
    """How a model with a trained Stage B decodes."""
    return getattr(model, "settings", PAPER)


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

    p = (logits / d.temperature).softmax(-1)
    order = None
    if d.top_k or d.top_p < 1:
        # the likeliest tokens first; of equal ones the first
        p, order = p.sort(dim=-1, descending=True, stable=True)

        # cut to the top k, then to top_p: keep the likeliest tokens, up to and with the one that crosses it
        if d.top_k:
            p = p * (torch.arange(p.shape[-1], device=p.device) < d.top_k)
        p = p.masked_fill(p.cumsum(-1) - p > d.top_p * p.sum(-1, keepdim=True), 0.0)

    # draw: the token in whose share of the remaining probability u falls
    cdf = p.cumsum(-1)
    mass = cdf[..., -1:]
    last = (cdf < mass).sum(-1, keepdim=True)  # by rounding the place may be past the last token that has a share
    place = torch.searchsorted(cdf, u[..., None] * mass, right=True).minimum(last)
    p = p.gather(-1, place) / mass
    token = place if order is None else order.gather(-1, place)
    return token[..., 0], p[..., 0]


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
    """One prompt, the text that has been written after it, and the current block with its counts."""

    def __init__(self, number: int, prompt: list[int], twins: int, d: Decoding, cfg: Config, seed: int):
        """twins: how many equal prompts come before this one; the random numbers depend on the prompt and on this."""
        self.number = number
        self.prompt = prompt
        self.d = d
        self.cfg = cfg
        self.rng = generator(seed, "sample", tuple(prompt), twins)
        self.output = Output(prompt)
        # decoding begins with the block where the prompt ends, or where its first hole is
        first = len(prompt)
        if d.holes and cfg.mask_id in prompt:
            first = prompt.index(cfg.mask_id)
        self.ids = prompt[: first // cfg.block_length * cfg.block_length]  # finished blocks
        self.over = len(self.ids) >= len(prompt) + d.gen_length
        self.begin()

    def begin(self) -> None:
        """The next block: the prompt's tokens in it, then masks."""
        B = self.cfg.block_length
        of_prompt = self.prompt[len(self.ids) :][:B]
        self.block = of_prompt + [self.cfg.mask_id] * (B - len(of_prompt))
        # positions that are never edited
        self.given = [not (self.d.holes and i == self.cfg.mask_id) for i in of_prompt]
        self.given += [False] * (B - len(of_prompt))
        self.full = 0
        self.partial = 0.0
        self.without_mask = 0  # steps after the last mask was filled
        self.finished = False

    def take(self, after: list[int], partial: float, over: bool, max_steps: int) -> None:
        """The block after a step, and what the step cost. The block is finished if nothing would change any more, or if
        a bound is reached."""
        self.changed = after != self.block
        self.block = after
        self.full += 1
        self.partial += partial
        self.without_mask += self.cfg.mask_id not in after
        self.finished = over or self.without_mask > self.d.post_steps or self.full >= max_steps

    def close(self) -> None:
        """Add the finished block and its forwards to the output.

        If it was not the last one, the next block will read it. That takes a refresh if the last step has changed the
        block, and K - 1 partial forwards for its keys in the further rounds.
        """
        out = self.output
        self.ids = self.ids + self.block
        n = len(self.prompt)
        new = self.ids[n:]
        out.prompt = self.ids[:n] + self.prompt[len(self.ids) :]
        out.tokens = up_to_eos(new[: self.d.gen_length], self.cfg.eos_id)
        if self.cfg.mask_id in self.block:
            out.warning = f"a block still has masks after {self.full} forwards, because no step fills them"

        ended = self.cfg.eos_id in new and self.cfg.mask_id not in new
        self.over = len(self.ids) >= n + self.d.gen_length or (self.d.eos_early_stop and ended)
        out.nfe["full"] += self.full
        out.nfe["partial"] += self.partial
        if not self.over:
            out.nfe["partial"] += max(0, self.d.n_rounds - 1)
            out.nfe["refresh"] += int(self.changed and not reads_pairs(self.cfg, self.d))


def reads_pairs(cfg: Config, d: Decoding) -> bool:
    """In blocks of one token, without edits, a step reads the token before along with its own: no refresh is needed."""
    return cfg.block_length == 1 and d.tau_t2t is None and d.n_rounds <= 1


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
        "decoding (default: the settings of the checkpoint's Stage B, PAPER or CAUSAL in decoding.py; with Stage B "
        "off, or without one, those of its base in SETTINGS)", argument_default=argparse.SUPPRESS,
    ).add_argument  # fmt: skip
    # fmt: off
    add("--n_rounds", type=some, help="K, the rounds of Stage B; 0: Stage B off")
    add("--tau_m2t", type=or_word("all", ALL, share),
        help='the bundle: the masks whose probability is above this; "all": all masks of a block at once (PAPER 0.7). '
             "With --select left, and for causal Stage B, the longest run from the left whose product is above this "
             "(CAUSAL all)")
    add("--tau_t2t", type=or_word("none", None, share),
        help='edit a visible token if the likeliest one is another, with a probability above this; 0: any other; '
             '"none": never (PAPER 0, but none with a temperature; LLaDA2.1 0.5; causal Stage B edits nothing)')
    add("--select", choices=rules, help="the rule for the bundle of the paper's step (PAPER confidence)")
    add("--beam", type=bounded(int, 1, 1024),
        help="how many texts causal Stage B keeps while it writes a block; the beam ends with the block (CAUSAL 1)")
    add("--temperature", type=bounded(float, 0), help="0: the likeliest tokens; above: draw (default: 0)")
    add("--top_k", type=some, help="with a temperature: draw from the k likeliest tokens; 0: from all")
    add("--top_p", type=bounded(float, 1e-6, 1),
        help="with a temperature: draw from the likeliest tokens, up to this sum of probabilities")
    # fmt: on


def asked_for(args: Namespace) -> dict[str, float | str | None]:
    """The fields of a Decoding that were given as flags."""
    flags = ("n_rounds", "tau_m2t", "tau_t2t", "select", "beam", "temperature", "top_k", "top_p")
    return {name: getattr(args, name) for name in flags if hasattr(args, name)}


def decoding_of(args: Namespace, model: Model) -> Decoding:
    """The settings of the model's Stage B, changed by flags. Stage B is off if it was never trained: it would be Stage
    A. A flag that the step does not read is refused."""
    asked = asked_for(args)
    K = asked.setdefault("n_rounds", model.cfg.n_rounds if model.trained_b else 0)
    if model.cfg.n_rounds < K:
        fail(f"--n_rounds {K}: this checkpoint has markers for 0..{model.cfg.n_rounds} rounds")
    own = settings_of(model) if K > 0 else SETTINGS[model.cfg.decoder]
    for name in model.unread if K > 0 else Model.unread:
        if name in asked:
            kind = f"{model.cfg.stage_b} Stage B" if K > 0 else "Stage A"
            fail(f"--{name} does nothing here: {kind} does not read it, {READ_BY[name]} does")

    if asked.get("temperature", 0) > 0:
        asked.setdefault("tau_t2t", None)  # a draw would be drawn again in every step
    for name in ("top_k", "top_p"):
        if name in asked and not asked.get("temperature"):
            fail(f"--{name} does nothing without a temperature: add --temperature 1")
    if asked.get("select") == "certified" and "tau_m2t" in asked:
        fail("--tau_m2t does nothing here: --select certified has a bound of its own")
    if "select" in asked and asked.get("tau_m2t") == ALL:
        fail("--select does nothing here: --tau_m2t all fills all masks")
    if hasattr(args, "gen_length"):
        asked["gen_length"] = args.gen_length
    d = replace(own, **asked)
    if d.beam > 1 and d.temperature > 0:
        fail("--beam looks for the likeliest text: leave out --temperature, or --beam")
    if 0 < d.temperature < 1e-3:
        fail(f"--temperature {d.temperature:g} is too small to divide by: give 0 (greedy), or at least 0.001")
    return d


# who reads a flag that another step does not read
READ_BY = dict(beam="causal Stage B", select="the paper's step", tau_t2t="the paper's step")


# --- prompts
def token_ids(text: str) -> list[int]:
    """1,2,3 -> [1, 2, 3]"""
    return [int(i) for i in text.split(",")]


def read_prompts(
    args: Namespace, tokenizer: Tokenizer | None, cfg: Config, gen_length: int, of_names: bool
) -> list[list[int]]:
    """Every prompt as ids, each checked to fit the model. Each MASK in a text is one mask."""
    if (args.prompt or args.prompt_file) and tokenizer is None:
        fail("this checkpoint has no tokenizer (a toy's tokens are numbers): use --prompt_ids")
    texts = list(args.prompt)
    for path in args.prompt_file:
        with reading(path, "prompt"):
            texts.append(path.read_text(encoding="utf-8-sig"))
    texts = [names.as_written(text) for text in texts] if of_names else texts
    prompts = []
    for text in texts:
        ids = []
        for part in text.split(MASK):
            ids += [*tokenizer.encode(part), cfg.mask_id]
        prompts.append(ids[:-1])
    prompts += args.prompt_ids
    if not prompts:
        fail("nothing to continue: give --prompt TEXT or --prompt_ids 1,2,3")
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, number, gen_length, cfg)
    return prompts


def check_prompt(prompt: list[int], number: int, gen_length: int, cfg: Config) -> None:
    if not prompt:
        fail(f"prompt {number} is empty: the model continues a text, give it at least one token")
    if not all(0 <= i < cfg.vocab_size for i in prompt):
        fail(f"prompt {number} has ids outside 0..{cfg.vocab_size - 1}, the model's vocabulary")
    # the last block is decoded whole
    need = math.ceil((len(prompt) + gen_length) / cfg.block_length) * cfg.block_length
    if need > cfg.max_len:
        fail(
            f"prompt {number} of {len(prompt)} tokens and --gen_length {gen_length} need {need} positions, the model "
            f"has {cfg.max_len}: shorten one of them"
        )
