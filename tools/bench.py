"""Speed, as ratios measured side by side in one process, on a CPU.

The two sides of every ratio take turns (A, B, A, B, ...) and the medians of the processor's time are divided, so that
a busy machine disturbs both alike. Weights are random, because speed does not depend on them; with --names they are the
shipped ones, because forwards do.

    python -m tools.bench                                                   # the cache against none; minutes
    python -m tools.bench --names assets/names/paper assets/names/causal    # time beside forwards, a name; a minute
    python -m tools.bench --official DIR               # instead: whole decodes against the released code in DIR
    python -m tools.bench --official DIR --compile     # and with compiled steps, see llada/compiled.py

DIR holds the released checkpoint's two Python files, or those of a fork. They need transformers:
pip install transformers==4.57.3
"""

import copy
import importlib
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cache import Cached, Output, Uncached
from checkpoint import PRESETS, base_of, load_model, new_model
from convert_weights import plan
from evaluate import draw_names, forwards, name_rows
from lib.tokenizer import load_tokenizer
from lib.util import Parser, bounded, command, fail, generator, print_table
from llada.compiled import compile_for_one_row, compile_steps
from llada.export import released_config, released_tensors
from model import Config, Model
from sample import Decoding, Step, denoise, generate

# R rows, B block_length

# enough to see the ratios, little enough for two cores
TEXT = replace(PRESETS["text"], eos_id=256, mask_id=257, block_length=8)  # as train.py builds it
WIDE = replace(TEXT, n_layer=20, n_embd=512, n_head=8, head_dim=64, rotary_dim=32, d_dense=1536, d_expert=256)

# for the released code, 17 M parameters
OFFICIAL = replace(TEXT, n_layer=10, n_embd=256, n_head=8, n_kv_head=4, d_dense=512, d_expert=64, n_expert=32,
                   n_active=4, block_length=32)  # fmt: skip

CONTEXTS = (0, 64, 128, 256, 512, 1024, 1536, 2048)  # tokens before the block
LENGTHS = (128, 512, 2048)  # of whole decodes
ROWS = 16  # that are decoded at once
CASES = ((TEXT, 1), (WIDE, 1), (TEXT, ROWS))
NAMES_TIMED = 64
TIMED = (
    "base, one at a time from the left", "base, longest run above 0.5", "Stage B, gated edits",
    "causal, whole blocks", "causal, longest run above 0.5", "causal, longest run above 0.8",
)  # fmt: skip
REPEATS = 3

# no probability is above 1: one token a step, always the same steps
ONE_BY_ONE = Decoding(tau_m2t=1.0, tau_t2t=None)


# --- the clock
def interleaved(*sides: Callable[[], object], repeats: int) -> list[float]:
    """Median seconds of each side, of this process's own work; they take turns, after one untimed round."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(repeats + 1):
        for side, taken in zip(sides, seconds, strict=True):
            start = time.process_time()
            side()
            if turn > 0:
                taken.append(time.process_time() - start)
    return [statistics.median(taken) for taken in seconds]


# --- what time is taken of
def geometry(cfg: Config) -> str:
    return f"{cfg.n_layer} layers of {cfg.n_embd}, {cfg.n_expert} experts, blocks of {cfg.block_length}"


def random_model(cfg: Config) -> Model:
    """Random weights; the mask is nobody's best token, or a block would never end."""
    model = new_model(cfg, generator("bench"))
    model.lm_head.weight.data[cfg.mask_id] = 0
    return model


def prompt(n: int, row: int = 0) -> list[int]:
    return torch.randint(256, (n,), generator=generator("bench", "prompt", row)).tolist()


# --- the cache
def one_step(engine: Cached | Uncached, R: int) -> Callable[[], Step]:
    """One decoding step of R rows in the middle of a block: half of it written, half masks, no prompt."""
    B = engine.cfg.block_length
    z = torch.tensor([prompt(B, 1)] * R)
    z[:, B // 2 :] = engine.cfg.mask_id
    given = torch.zeros_like(z, dtype=torch.bool)
    u = torch.zeros(R, 2, B)
    return partial(denoise, engine, z, given, u, ONE_BY_ONE)


@torch.inference_mode()
def cache_against_none(cfg: Config, rows: int) -> None:
    """A step behind contexts of several lengths, and whole decodes integrated over them."""
    model = random_model(cfg)
    print(f"\n{geometry(cfg)}; rows: {rows}; Stage A and B in every step")
    print("  context   cached ms a step   uncached ms a step   ratio")
    measured = []
    for context in CONTEXTS:
        engines = [engine(model, [prompt(context)] * rows, 1) for engine in (Cached, Uncached)]
        steps = [one_step(engine, rows) for engine in engines]
        cached, uncached = interleaved(*steps, repeats=REPEATS if rows == 1 else 1)
        measured.append((cached, uncached))
        print(f"  {context:7}   {1e3 * cached:16.1f}   {1e3 * uncached:18.1f}   {uncached / cached:4.1f}x", flush=True)

    # the cost of a step is read off between the measured contexts; a block is as many steps as tokens on either side
    for length in LENGTHS:
        starts = np.arange(length) // cfg.block_length * cfg.block_length
        cached, uncached = (np.interp(starts, CONTEXTS, side).sum() for side in np.array(measured).T)
        print(f"  all of {length} tokens (integrated): cached {cached:.2f} s, uncached {uncached:.2f} s: "
              f"{uncached / cached:.1f}x")  # fmt: skip


# --- names: seconds beside forwards
def seconds_a_name(folders: list[Path]) -> None:
    """The decoders of these adapters, and their base's, complete the same names in turns: one at once, then 16."""
    decoders = [row for row in name_rows(folders) if row[0] in TIMED]
    models = {folder: load_model(folder, "cpu", torch.float32) for _, folder, _ in decoders}
    prompts = list(draw_names(NAMES_TIMED, "held out", load_tokenizer(base_of(folders[0]))).values())

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
        print(f"\n{len(prompts)} held-out names, {rows} at once")
        print_table(["", "ms a name", "forwards a name", "ms a forward"], lines)


# --- against the released code
def official_model(folder: Path, ours: Model) -> torch.nn.Module:
    """The released class, from its files in `folder`, with our model's weights."""
    # a package, so that the one file finds the other
    sys.modules["official"] = types.ModuleType("official")
    sys.modules["official"].__path__ = [str(folder)]
    try:
        configuration = importlib.import_module("official.configuration_llada2_moe")
        modeling = importlib.import_module("official.modeling_llada2_moe")
    except ImportError as e:
        fail(f"--official {folder}: {e}; it needs the released files, and pip install transformers==4.57.3")

    theirs = modeling.LLaDA2MoeModelLM(configuration.LLaDA2MoeConfig(**released_config(ours.cfg)))
    theirs.load_state_dict(released_tensors(ours.state_dict(), sum(plan(ours.cfg), []), []))

    # their generate() makes masks in bfloat16, which attention refuses beside float32 weights
    def cast(part: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"attention_mask": kwargs["attention_mask"].float()}

    theirs.model.register_forward_pre_hook(cast, with_kwargs=True)
    return theirs.eval()


def our_decode(model: Model, length: int, rows: int) -> list[list[int]]:
    """The tokens of each row."""
    d = replace(ONE_BY_ONE, gen_length=length, n_rounds=0)
    return [output.tokens for output in generate(model, [prompt(8, row) for row in range(rows)], d)]


def their_decode(theirs: torch.nn.Module, cfg: Config, length: int, rows: int) -> list[list[int]]:
    """The same; of many rows by the fork's generate_batch()."""
    inputs = [torch.tensor([prompt(8, row)]) for row in range(rows)]
    ids = dict(eos_id=cfg.eos_id, mask_id=cfg.mask_id)
    settings = dict(gen_length=length, block_length=cfg.block_length, threshold=1.0, editing_threshold=2.0, **ids)
    if rows == 1:
        return [theirs.generate(inputs[0], **settings)[0].tolist()]
    return [row[0].tolist() for row in theirs.generate_batch(inputs, **settings)]


def compare(theirs: torch.nn.Module, models: dict[str, Model], length: int, rows: int) -> None:
    """Whole decodes in turns, once every side has written the same tokens."""
    sides = {name: partial(our_decode, model, length, rows) for name, model in models.items()}
    sides["theirs"] = partial(their_decode, theirs, models["ours"].cfg, length, rows)
    written = sides["theirs"]()
    for name, side in sides.items():
        if side() != written:
            fail(f"{length} tokens differ from the released code's ({name}): there is nothing to compare")

    *seconds, other = interleaved(*sides.values(), repeats=REPEATS)
    tokens = rows * length
    print(f"    {rows} x {length} tokens, all the same: theirs {tokens / other:.1f} tokens/s")
    for name, s in zip(models, seconds, strict=True):
        print(f"      {name}: {tokens / s:.1f} tokens/s, {other / s:.2f}x", flush=True)


def official(folder: Path, lengths: list[int], compiled: bool) -> None:
    """Tokens a second of ours and of the released generate(), or of a fork of it that keeps keys and values: one row,
    then 16 if there is a generate_batch()."""
    model = random_model(OFFICIAL)
    model.lm_head.weight.data *= 16  # far from ties, which rounding decides
    model.lm_head.weight.data[model.cfg.eos_id] = 0  # nor does the text end
    theirs = official_model(folder, model)
    models = {"ours": model}
    if compiled:
        fast = copy.deepcopy(model)
        compile_steps(fast)
        compile_for_one_row(fast)
        models["ours, compiled"] = fast

    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"\nAgainst the released code: {geometry(model.cfg)}, {size:.0f} M parameters, one token a step, no edits")
    # the fork of synsis/remasked_DLM keeps the keys and values of finished blocks
    forked = hasattr(theirs, "generate_batch")
    print("  the fork with a cache:" if forked else "  the released file, which has no cache:")
    for length in lengths:
        compare(theirs, models, length, 1)
    if forked:
        compare(theirs, models, lengths[0], ROWS)


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("what to measure").add_argument
    add("--names", type=Path, nargs="+", metavar="CKPT", help="instead: time a name takes by these adapters and base")
    add("--official", type=Path, metavar="DIR", help="instead: whole decodes against the code in this folder")
    add("--compile", action="store_true", help="with --official: ours with compiled steps, too")
    add("--lengths", type=bounded(int, 1), nargs="+", default=[256, 512], help="tokens of those decodes")
    args = parser.parse_args()
    print(f"$ python -m tools.bench {' '.join(sys.argv[1:])}")
    print(f"{date.today()}: {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch {torch.__version__}")
    if args.official:
        official(args.official, args.lengths, args.compile)
    elif args.names:
        seconds_a_name(args.names)
    else:
        for cfg, rows in CASES:
            cache_against_none(cfg, rows)


if __name__ == "__main__":
    main()
