"""What comes out of a decode: of each row its tokens, and the forwards that they cost."""

from dataclasses import dataclass, field
from typing import Any

from lib.config import Config
from lib.util import generator


@dataclass
class Output:
    """One row."""

    prompt: list[int]  # with its holes filled
    tokens: list[int] = field(default_factory=list)  # generated behind it, up to and with eos
    # forwards: full, Stage A; partial, Stage B's rounds or a head's looks; commit, a finished block
    # read once more; and looks, how many passes the partial ones took
    nfe: dict[str, float] = field(default_factory=lambda: dict(full=0, partial=0, commit=0, looks=0))
    warning: str | None = None


def in_full(nfe: dict[str, float], partial_cost: float) -> float:
    """All forwards in full ones: a commit is one, a partial one is partial_cost of one."""
    return nfe["full"] + nfe["commit"] + nfe["partial"] * partial_cost


def up_to_eos(tokens: list[int], eos_id: int) -> list[int]:
    """[5, 7, eos, 3] -> [5, 7, eos]"""
    if eos_id in tokens:
        return tokens[: tokens.index(eos_id) + 1]
    return tokens


class Row:
    """What the host knows of one prompt, and books of it. d is a sample.Decoding."""

    def __init__(self, number: int, prompts: list[list[int]], d: Any, cfg: Config, seed: int):
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

    def block(self, number: int) -> list[int]:
        """The current block (0) or the next one (1): what the prompt has of it, then masks."""
        B = self.cfg.block_length
        start = len(self.ids) + number * B
        given = self.prompt[start : start + B]
        return given + [self.cfg.mask_id] * (B - len(given))

    def given(self) -> list[bool]:
        """Of the current block the positions that are never edited."""
        of_prompt = self.prompt[len(self.ids) :][: self.cfg.block_length]
        given = [not (self.d.holes and i == self.cfg.mask_id) for i in of_prompt]
        return given + [False] * (self.cfg.block_length - len(of_prompt))

    def has_another_block(self) -> bool:
        return len(self.ids) + self.cfg.block_length < len(self.prompt) + self.d.gen_length

    def finish(self, block: list[int], cost: list[float], changed: bool) -> bool:
        """Book a finished block and what it cost -> whether it was the last one.

        If not, the next block will read it: that takes a commit forward if its last step still changed
        it, and K - 1 partial ones for its states of the further rounds.
        """
        out = self.output
        last = not self.has_another_block()
        self.ids = self.ids + block
        n = len(self.prompt)
        new = self.ids[n:]
        out.prompt = self.ids[:n] + self.prompt[len(self.ids) :]
        out.tokens = up_to_eos(new[: self.d.gen_length], self.cfg.eos_id)
        if self.d.eos_early_stop and self.cfg.eos_id in new and self.cfg.mask_id not in new:
            last = True

        full, partial, looks = cost
        out.nfe["full"] += int(full)
        out.nfe["partial"] += partial
        out.nfe["looks"] += int(looks)
        if not last:
            out.nfe["partial"] += max(0, self.d.n_rounds - 1)
            out.nfe["commit"] += int(changed)
        if self.cfg.mask_id in block:
            out.warning = f"a block was left with masks after {full:g} forwards that would never fill it"
        return last
