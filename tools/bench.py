"""What the cache saves: generate, which keeps the keys and values of finished blocks, against generate_one, which reads
the whole text in every forward. Both write the same tokens.

The two take turns, and the medians of their processor time are divided: so a busy machine disturbs both alike. Weights
are random, because speed does not depend on them. No gate is passed, so each step writes one token.

    python -m tools.bench       # a quarter of an hour on one thread
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial

import torch

from checkpoint import new_model
from config import PRESETS, Config
from decoding import Decoding
from lib.util import Parser, command, generator, print_table, progress
from sample import generate, generate_one

# sizes that are small enough for two cores, and large enough to show the ratios
TEXT = replace(PRESETS["text"], eos_id=256, mask_id=257, block_length=8)  # a model of bytes
WIDE = replace(TEXT, n_layer=20, n_embd=512, n_head=8, head_dim=64, rotary_dim=32, d_dense=1536, d_expert=256)
SIZES = {"6 layers of 128": TEXT, "20 layers of 512": WIDE}
LENGTHS = (64, 256)  # tokens that are written
ROWS = 16  # texts that generate decodes at once
REPEATS = 3

ONE_BY_ONE = Decoding(tau_m2t=1.0, tau_t2t=None, eos_early_stop=False)


def interleaved(*sides: Callable[[], object]) -> list[float]:
    """The median seconds of processor time of each side. The sides take turns, after one round that is not timed."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in progress(range(REPEATS + 1), "rounds"):
        for side, taken in zip(sides, seconds, strict=True):
            start = time.process_time()
            side()
            if turn > 0:
                taken.append(time.process_time() - start)
    return [statistics.median(taken) for taken in seconds]


def measure(cfg: Config, length: int) -> list[str]:
    """Milliseconds a token with the cache, of one text and of 16; without it; and how many times as long it takes."""
    model = new_model(cfg, generator("bench"))
    d = replace(ONE_BY_ONE, gen_length=length)
    prompts = [[i] for i in range(ROWS)]
    one, many, whole = interleaved(
        partial(generate, model, prompts[:1], d),
        partial(generate, model, prompts, d),
        partial(generate_one, model, prompts[0], d),
    )
    times = [1e3 * seconds / length for seconds in (one, many / ROWS, whole)]
    return [*(f"{ms:.1f}" for ms in times), f"{whole / one:.1f}", f"{whole * ROWS / many:.1f}"]


@command
def main() -> None:
    Parser(__doc__).parse_args()
    print("$ python -m tools.bench")
    print(f"{date.today()}: {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch {torch.__version__}")
    rows = []
    for name, cfg in SIZES.items():
        rows += [[f"{name}, {length} tokens", *measure(cfg, length)] for length in LENGTHS]
    titles = ["ms a token", "cached, 1 text", f"{ROWS} texts", "whole text", "ratio, 1 text", f"ratio, {ROWS} texts"]
    print_table(titles, rows)


if __name__ == "__main__":
    main()
