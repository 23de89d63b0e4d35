"""Speed on a CPU: ratios that are measured side by side in one process, and the CPU time of a name.

The two sides of a ratio take turns (A, B, A, B, ...), and the medians of their processor time are divided: so a busy
machine disturbs both alike. Weights are random, because speed does not depend on them. With --names they are a trained
model's, because the number of forwards depends on them.

    python -m tools.bench                                                   # with the cache and without; minutes
    python -m tools.bench --names assets/names/paper assets/names/causal    # time and forwards of a name; a minute
"""

import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cache import Cached, Uncached
from checkpoint import PRESETS, new_model
from decoding import Decoding, Output, Step
from evaluate import forwards, load_all, name_rows, names_tokenizer
from lib.names import draw_names
from lib.util import Parser, command, generator, print_table, printable, progress
from model import Config, Model
from sample import denoise, generate

# R rows, B block_length

# sizes that are small enough for two cores, and large enough to show the ratios
TEXT = replace(PRESETS["text"], eos_id=256, mask_id=257, block_length=8)  # a model of bytes
WIDE = replace(TEXT, n_layer=20, n_embd=512, n_head=8, head_dim=64, rotary_dim=32, d_dense=1536, d_expert=256)

BEFORE = (0, 64, 128, 256, 512, 1024, 1536, 2048)  # tokens before the block
LENGTHS = (128, 512, 2048)  # tokens of a whole text
ROWS = 16  # rows that are decoded at once
CASES = ((TEXT, 1), (WIDE, 1), (TEXT, ROWS))
NAMES_TIMED = 64
TIMED = (
    "base, one at a time from the left", "base, longest run above 0.5", "Stage B, gated edits",
    "causal, whole blocks", "causal, longest run above 0.5", "causal, longest run above 0.8",
)  # fmt: skip
REPEATS = 3

# no probability is above 1, so each step writes one token
ONE_BY_ONE = Decoding(tau_m2t=1.0, tau_t2t=None)


# --- the clock
def interleaved(*sides: Callable[[], object], repeats: int) -> list[float]:
    """The median seconds of processor time of each side. The sides take turns, after one round that is not timed."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in progress(range(repeats + 1), "rounds"):
        for side, taken in zip(sides, seconds, strict=True):
            start = time.process_time()
            side()
            if turn > 0:
                taken.append(time.process_time() - start)
    return [statistics.median(taken) for taken in seconds]


# --- what is timed
def random_model(cfg: Config) -> Model:
    return new_model(cfg, generator("bench"))


def prompt(n: int, row: int = 0) -> list[int]:
    return torch.randint(256, (n,), generator=generator("bench", "prompt", row)).tolist()


# --- the cache
def one_step(engine: Cached | Uncached, R: int) -> Callable[[], Step]:
    """One decoding step of R rows in the middle of a block: half of the block is written, and half are masks."""
    B = engine.model.cfg.block_length
    z = torch.tensor([prompt(B, 1)] * R)
    z[:, B // 2 :] = engine.model.cfg.mask_id
    given = torch.zeros_like(z, dtype=torch.bool)
    u = torch.zeros(R, 2, B)
    return partial(denoise, engine, z, given, u, ONE_BY_ONE)


@torch.inference_mode()
def cache_against_none(cfg: Config, rows: int) -> None:
    """Time a step after texts of several lengths, and add up the steps of whole texts."""
    model = random_model(cfg)
    size = f"{cfg.n_layer} layers of {cfg.n_embd}, {cfg.n_expert} experts, blocks of {cfg.block_length}"
    print(f"\n{size}; rows: {rows}; Stage A and B in every step; threads: {torch.get_num_threads()}")
    print("  context   cached ms a step   uncached ms a step   ratio")
    measured = []
    for before in BEFORE:
        engines = [engine(model, [prompt(before)] * rows, 1) for engine in (Cached, Uncached)]
        steps = [one_step(engine, rows) for engine in engines]
        cached, uncached = interleaved(*steps, repeats=REPEATS if rows == 1 else 1)
        measured.append((cached, uncached))
        print(f"  {before:7}   {1e3 * cached:16.1f}   {1e3 * uncached:18.1f}   {uncached / cached:4.1f}x", flush=True)

    # between the measured lengths the time of a step is interpolated; on both sides a step writes one token
    for length in LENGTHS:
        starts = np.arange(length) // cfg.block_length * cfg.block_length
        cached, uncached = (np.interp(starts, BEFORE, side).sum() for side in np.array(measured).T)
        print(f"  all of {length} tokens (sum of its steps): cached {cached:.2f} s, uncached {uncached:.2f} s: "
              f"{uncached / cached:.1f}x")  # fmt: skip


# --- names: seconds beside forwards
def seconds_a_name(folders: list[Path]) -> None:
    """Time the decoders of these adapters and of their base on the same names: one name at a time, then 16 at once."""
    tokenizer = [names_tokenizer(folder) for folder in folders][0]
    models = load_all(folders, torch.device("cpu"))
    decoders = [row for row in name_rows(models, folders) if row[0] in TIMED]
    prompts = list(draw_names(NAMES_TIMED, "held out", tokenizer).values())

    def decode(folder: Path, d: Decoding, rows: int) -> list[Output]:
        parts = [generate(models[folder], prompts[at : at + rows], d) for at in range(0, len(prompts), rows)]
        return sum(parts, [])

    for rows in (1, ROWS):
        sides = [partial(decode, folder, d, rows) for _, folder, d in decoders]
        seconds = interleaved(*sides, repeats=REPEATS)
        lines = []
        for (name, folder, d), taken in zip(decoders, seconds, strict=True):
            cost = forwards(models[folder], decode(folder, d, rows)) / len(prompts)
            taken *= 1e3 / len(prompts)
            lines.append([name, f"{taken:.1f}", f"{cost:.2f}", f"{taken / cost:.1f}"])
        print(f"\n{len(prompts)} held-out names, {rows} at once; threads: {torch.get_num_threads()}")
        print_table(["", "ms a name", "forwards a name", "ms a forward"], lines)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--names", type=Path, nargs="+", metavar="CKPT", help="time these adapters on names instead")
    args = parser.parse_args()
    print("$", printable(shlex.join(["python", "-m", "tools.bench", *sys.argv[1:]])))
    print(f"{date.today()}: {os.cpu_count()} cores; torch {torch.__version__}")
    if args.names:
        seconds_a_name(args.names)
    else:
        for cfg, rows in CASES:
            cache_against_none(cfg, rows)


if __name__ == "__main__":
    main()
