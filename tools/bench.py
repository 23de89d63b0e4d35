"""Speed, as ratios measured side by side in one process.

The two sides of every ratio take turns (A, B, A, B, ...) and the medians are divided, so that a busy machine disturbs
both alike. Weights are random: speed does not depend on them. It refuses a section that it does not have. What the
released geometry could do at best, on paper, is tools/limits.py's.

    python -m tools.bench                                   # every section, minutes on 2 cores
    python -m tools.bench --only decode stageb              # decode passes batch stageb train loss moe: any of them
    python -m tools.bench --official DIR [DIR ...]          # against the released code in DIR, or a fork of it that
                                                            # keeps keys and values; needs transformers
    python -m tools.bench --official DIR --compile          # and with compiled steps, see released/compiled.py
    python -m tools.bench --ckpt weights/random --device cuda --dtype bf16   # a checkpoint's forward against its floor
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
import types
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from beyond import stage_b_only
from cache import Cached, Output
from checkpoint import DTYPES, PRESETS, load_model, new_model
from convert_weights import plan
from corrupt import Corruption, M, corrupt, draw_bundle, loss_weights, three_term_loss
from lib.util import Parser, bounded, fail, generator, pick_device
from model import Config, Context, Model, MoE, sequence_context
from released.compiled import compile_blocks
from released.export import released_config
from sample import Decoding, generate, generate_one, step
from tools.limits import distinct_experts, forward_bytes
from train import Batch, Losses, cocommit_step, corrupt_batch, lora_everywhere, stage_a_step

# R rows, T positions, B block_length, C channels, V vocabulary, L layers, n = n_last, E experts, A active experts,
# N tokens

TEXT = replace(PRESETS["text"], eos_id=256, mask_id=257, block_length=8)  # as train.py builds it, and 20 layers of it
RELEASED = PRESETS["llada2.1-mini"]

# what is measured: enough to see the ratios, little enough for two cores
# fmt: off
S = Namespace(
    text=TEXT, deep=replace(TEXT, n_layer=20),
    wide=replace(TEXT, n_layer=20, n_embd=512, n_head=8, head_dim=64, rotary_dim=32, d_dense=1536, d_expert=256),
    contexts=(0, 64, 128, 256, 512, 1024, 1536, 2048), lengths=(128, 512, 2048),
    whole=128,  # tokens that both sides really decode, to check the integral
    batch=(1, 4, 16), batch_tokens=64,
    official=replace(TEXT, n_layer=10, n_embd=256, n_head=8, n_kv_head=4, d_dense=512, d_expert=64, n_expert=32,
                     n_active=4, block_length=32),  # 17 M parameters
    compared=512,  # tokens up to which the released code really decodes them all
    rows=4, seq_len=256,  # of a training step
    loss=replace(PRESETS["tiny"], n_layer=1, n_last=1, vocab_size=RELEASED.vocab_size, mask_id=257),
    loss_positions=2048,
    moe=replace(RELEASED, n_embd=512, d_expert=128, n_layer=2, n_last=1, vocab_size=8, eos_id=0, mask_id=1),
    moe_tokens=(32, 512, 4096),
    repeats=5,
)
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# taking time and memory


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def processor_or(device: torch.device) -> Callable[[], float]:
    """The clock of this process's own work, which other programs hardly disturb; a GPU's work has no such clock."""
    return time.process_time if device.type == "cpu" else now


def interleaved(*sides: Callable[[], object], repeats: int, clock: Callable[[], float] = now) -> list[float]:
    """Median seconds of each side; they take turns, after one untimed round."""
    seconds: list[list[float]] = [[] for _ in sides]
    for i in range(repeats + 1):
        for side, taken in zip(sides, seconds, strict=True):
            start = clock()
            side()
            taken += [clock() - start] if i else []
    return [statistics.median(taken) for taken in seconds]


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most since the last reset (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)" if peak else r"VmRSS:\s+(\d+)", status)[1])


def job_peak(job: Callable, args: tuple, device: str) -> int:
    """Bytes that what job(*args) returns needs at its peak, beyond what it finds."""
    run = job(*args)
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident()
    run()
    return resident(peak=True) - before


def peaks(jobs: list[tuple[Callable, tuple]], device: torch.device) -> list[int | None]:
    """Peak bytes of each job, None where the system does not tell. On a CPU in a child process whose allocator hands
    every freed tensor back at once."""
    if device.type == "cuda":
        return [job_peak(job, args, "cuda") for job, args in jobs]
    if not Path("/proc/self/clear_refs").exists():
        return [None] * len(jobs)
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1"
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = [pool.apply(job_peak, (job, args, "cpu")) for job, args in jobs]
            pool.close()
            pool.join()
            return found
    finally:
        del os.environ["GLIBC_TUNABLES"]


def goal(at: int, goals: dict[int, float]) -> str:
    return f" (goal {goals[at]})" if at in goals else ""


def mb(size: int | None, what: str) -> str:
    return "" if size is None else f"{what} {size / 1e6:,.0f} MB"


def geometry(cfg: Config) -> str:
    return f"{cfg.n_layer} layers of width {cfg.n_embd}, {cfg.n_expert} experts, blocks of {cfg.block_length}"


# ---------------------------------------------------------------------------------------------------------------------
# decoding

ONE_BY_ONE = Decoding(tau_m2t=1.0, tau_t2t=None)  # no probability is above 1: one token a step, the same steps always


def random_model(cfg: Config, device: torch.device) -> Model:
    """Random weights; the mask is nobody's best token, or a block would never end."""
    model = new_model(cfg, generator("bench"), device)
    model.lm_head.weight.data[cfg.mask_id] = 0
    return model


def normal(*shape: int, device: torch.device | str) -> Tensor:
    return torch.randn(shape, generator=generator("bench", "normal", *shape)).to(device)


def prompt(n: int, row: int = 0) -> list[int]:
    return torch.randint(256, (n,), generator=generator("bench", "prompt", row)).tolist()


class Uncached:
    """What cache.Cached is to `step`, without a cache: every forward reads the rows from their first token, as
    sample.generate_one does. The prompts are of one length."""

    def __init__(self, model: Model, prompts: list[list[int]], n_rounds: int):
        self.model, self.cfg, self.n_rounds = model, model.cfg, n_rounds
        self.past = torch.tensor(prompts, dtype=torch.long, device=model.wte.weight.device)  # (R, T)

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The current blocks z (R, B) -> prefix states (R, T + B, C), logits of the blocks (R, B, V)."""
        ids = torch.cat([self.past, z], dim=1)
        self.ctx = sequence_context(self.cfg, torch.ones_like(ids, dtype=torch.bool), self.model.compute_dtype)
        h = self.model.prefix(ids, self.ctx)
        return h, self.model.head(self.model.last_n(h, self.ctx)[:, -z.shape[1] :])

    def stage_b(self, h: Tensor, bundle: Tensor) -> Tensor:
        marks = F.pad(bundle, (h.shape[1] - bundle.shape[1], 0))
        return self.model.head(self.model.coordinate(h, marks, self.ctx, self.n_rounds)[:, -bundle.shape[1] :])


def one_step(engine: Cached | Uncached, n_rounds: int, rows: int = 1) -> Callable[[], dict[str, Tensor]]:
    """One decoding step of rows in the middle of a block: half of it written, half masks, no prompt."""
    cfg, device = engine.cfg, engine.model.wte.weight.device
    z = torch.tensor([prompt(cfg.block_length, 1)] * rows, device=device)
    z[:, cfg.block_length // 2 :] = cfg.mask_id
    nothing, u = torch.zeros_like(z, dtype=torch.bool), torch.zeros(rows, 3, cfg.block_length, device=device)
    return lambda: step(engine, z, nothing, True, u, replace(ONE_BY_ONE, n_rounds=n_rounds))


@torch.inference_mode()
def decode(device: torch.device, args: Namespace) -> None:
    """Cached against uncached: a step behind contexts of several lengths, and whole decodes integrated over them."""
    many = max(S.batch)
    for name, cfg, rows in (("text", S.text, 1), ("text", S.text, many), ("20 layers", S.deep, 1),
                            ("20 layers, wide", S.wide, 1)):  # fmt: skip
        model, B = random_model(cfg, device), cfg.block_length
        print(f"\nDecoding {rows} at once, cached against not: {name} ({geometry(cfg)}), Stage A and B in every step")
        at = []
        for context in S.contexts:
            sides = [one_step(E(model, [prompt(context)] * rows, 1), 1, rows) for E in (Cached, Uncached)]
            at.append(interleaved(*sides, repeats=1 if rows > 1 else 3 if context > 512 else S.repeats))
        cached, uncached = np.array(at).T
        print("  context   cached ms a step   uncached ms a step   ratio   of positions read   of bare matmuls on them")
        for context, c, n in zip(S.contexts, cached, uncached, strict=True):
            print(f"  {context:7}   {1e3 * c:16.1f}   {1e3 * n:18.1f}   {n / c:4.1f}x   {1 + context // B:16}x   "
                  f"{matmul_ratio(model, rows, context):22.1f}x")  # fmt: skip
        for length in S.lengths:
            # the cost of a step is read off between the measured contexts; a block is B steps on either side
            starts = np.arange(0, length, B)
            c, n = (B * np.interp(starts, S.contexts, side).sum() for side in (cached, uncached))
            print(f"  all of {length} tokens (integrated): cached {c:.2f} s, uncached {n:.2f} s: {n / c:.1f}x"
                  + goal(length, {512: 10, 2048: 30}))  # fmt: skip
    model, d, start = random_model(S.text, device), replace(ONE_BY_ONE, gen_length=S.whole), prompt(1)
    with device if device.type != "cpu" else nullcontext():  # where generate_one makes its tensors; it slows every call
        c, n = interleaved(lambda: generate(model, [start], d), lambda: generate_one(model, start, d), repeats=2)
    print(f"  check: text, {S.whole} tokens really decoded: cached {c:.2f} s, generate_one {n:.2f} s: {n / c:.1f}x")


def passes(device: torch.device, args: Namespace) -> None:
    """What closes a block goes beside the next one's first forward: forwards counted, passes taken."""
    model, B = random_model(S.text, device), S.text.block_length
    print(f"\nPasses: text ({geometry(S.text)}), 8 blocks, no edits, Stage B off; limit: a pass fewer for each block "
          "but the last")  # fmt: skip
    for edits, what in ((1.0, "forwards that find nothing to edit"), (None, "commits")):  # no probability is above 1
        for many in (1, B // 2, B):
            d = replace(ONE_BY_ONE, gen_length=8 * B - 1, n_rounds=0, num_to_transfer=many, tau_t2t=edits)
            out = generate(model, [prompt(1)], d)[0]
            forwards = out.nfe["full"] + out.nfe["commit"]
            print(f"  {many} tokens a step, blocks closed by {what}: {forwards} forwards in {out.passes} passes, "
                  f"{forwards / out.passes:.2f}x; blocks read {out.blocks}")  # fmt: skip


def matmul_ratio(model: Model, rows: int, context: int) -> float:
    """What a matmul library makes of the positions that the cache saves: the qkv matrices of all layers, nothing else,
    applied to context + B positions of each row and to B. Few are bound by reading the weights, whoever asks."""
    weights, B = [layer.attn.qkv.weight for layer in model.layers], model.cfg.block_length
    sides = [normal(rows * n, model.cfg.n_embd, device=weights[0].device) for n in (context + B, B)]
    uncached, cached = interleaved(*(lambda x=x: [F.linear(x, w) for w in weights] for x in sides), repeats=S.repeats)
    return uncached / cached


def arithmetic(model: Model, rows: int, context: int) -> Callable[[], object]:
    """What no pass over the current blocks can do without: its matrix products (of as many experts as uniform routing
    touches, each on its share of the positions) and its attention."""
    cfg, T, jobs = model.cfg, rows * model.cfg.block_length, []
    used = round(distinct_experts(cfg, T))
    for name, p in model.named_parameters():
        if p.dim() > 1 and name not in ("wte.weight", "markers"):
            x = normal(T if p.dim() == 2 else -(-T * cfg.n_active // used), p.shape[-1], device=p.device)
            jobs += [(x, w) for w in p.view(-1, *p.shape[-2:])[:used]]
    q = normal(rows, cfg.n_head, cfg.block_length, cfg.head_dim, device=p.device)
    kv = normal(rows, cfg.n_kv_head, context + cfg.block_length, cfg.head_dim, device=p.device)

    @torch.inference_mode()
    def run() -> None:
        for x, w in jobs:
            F.linear(x, w)
        for _ in range(cfg.n_layer):
            F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)

    return run


def batch(device: torch.device, args: Namespace) -> None:
    """Tokens a second of 1, 4 and 16 rows whose blocks end at different steps."""
    model, d = random_model(S.text, device), replace(ONE_BY_ONE, gen_length=S.batch_tokens)
    prompts = [prompt(1 + r % S.text.block_length, r) for r in range(max(S.batch))]
    sides = [lambda n=n: generate(model, prompts[:n], d) for n in S.batch]
    rates = [n * S.batch_tokens / s for n, s in zip(S.batch, interleaved(*sides, repeats=3), strict=True)]
    print(f"\nRows of a batch: text ({geometry(S.text)}), prompts of 1..{S.text.block_length} tokens, "
          f"{S.batch_tokens} tokens each; limit: arithmetic alone, against the measured row")  # fmt: skip
    for n, rate in zip(S.batch, rates, strict=True):
        out, share = generate(model, prompts[:n], d), model.cfg.n_last / model.cfg.n_layer
        passes = sum(o.blocks + share * o.nfe["partial"] for o in out) / n  # of n blocks each
        least = passes * interleaved(arithmetic(model, n, S.batch_tokens // 2), repeats=20)[0]
        print(f"  {n:3} rows: {rate:7.0f} tokens/s, {rate / rates[0]:.1f}x one row{goal(n, {16: 4})}; "
              f"limit {n * S.batch_tokens / least / rates[0]:.1f}x")  # fmt: skip


@torch.inference_mode()
def stageb(device: torch.device, args: Namespace) -> None:
    """What Stage B adds to a step, in units of n/L of a full forward."""
    print("\nStage B: (step with it - step without) / (n/L x a full forward), context 256; goal at most 1.15")
    for name, cfg in (("text", S.text), ("20 layers", S.deep), ("20 layers, wide", S.wide)):
        model = random_model(cfg, device)
        engine = Cached(model, [prompt(256)], 1)
        z = torch.tensor([prompt(cfg.block_length, 1)], device=device)
        sides = one_step(engine, 0), one_step(engine, 1), lambda e=engine, z=z: e.stage_a(z)
        a, b, full = interleaved(*sides, repeats=16 * S.repeats)
        share = cfg.n_last / cfg.n_layer
        print(f"  {name} ({geometry(cfg)}, n = {cfg.n_last}): step {1e3 * a:.2f} -> {1e3 * b:.2f} ms, full forward "
              f"{1e3 * full:.2f} ms: {(b - a) / (share * full):.2f}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# against the released code

OFFICIAL = ("configuration_llada2_moe.py", "modeling_llada2_moe.py")


def official_model(folder: Path, ours: Model) -> torch.nn.Module:
    """The released class, from its files in `folder`, with our model's weights."""
    if missing := [name for name in OFFICIAL if not (folder / name).exists()]:
        fail(f"--official {folder} holds no {missing[0]}: it is a file of the released checkpoint")
    try:
        importlib.import_module("transformers")
    except ImportError:
        fail("--official runs the released code, which needs transformers: pip install transformers==4.57.3")

    # a package of its own for each folder, so that the one file finds the other
    package = f"official_{len([name for name in sys.modules if re.fullmatch('official_[0-9]+', name)])}"
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(folder)]
    configuration, modeling = (importlib.import_module(f"{package}.{name.removesuffix('.py')}") for name in OFFICIAL)

    theirs = modeling.LLaDA2MoeModelLM(configuration.LLaDA2MoeConfig(**released_config(ours.cfg)))
    state = ours.state_dict()
    parts = {name: part for _, whole, _, names, shape in plan(ours.cfg)
             for name, part in zip(names, state[whole].view(-1, *shape), strict=True)}  # fmt: skip
    parts = {name: part.view(theirs.state_dict()[name].shape) for name, part in parts.items()}
    theirs.load_state_dict(parts)
    masks_in_float32(theirs)
    return theirs.to(ours.wte.weight.device).eval()


def keeps_cache(theirs: torch.nn.Module) -> bool:
    """Whether it is the fork of synsis/remasked_DLM, whose generate() keeps the keys and values of finished blocks."""
    return hasattr(theirs, "_forward_block")


def masks_in_float32(theirs: torch.nn.Module) -> None:
    """Their generate() makes masks in bfloat16, which attention refuses beside float32 weights."""

    def cast(part: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"attention_mask": kwargs["attention_mask"].float()}

    theirs.model.register_forward_pre_hook(cast, with_kwargs=True)


def official(device: torch.device, args: Namespace) -> None:
    """Tokens a second of ours and of the released generate(): the same weights and prompts, and the same tokens or it
    stops. One row, then 16. The limit: our passes as arithmetic alone. On a CPU seconds are of processor time."""
    model = random_model(S.official, device)
    model.lm_head.weight.data *= 16  # far from ties, which rounding decides
    model.lm_head.weight.data[model.cfg.eos_id] = 0  # nor does the text end
    models = {"ours": model}
    if args.compile:
        models["ours, compiled"] = deepcopy(model)
        compile_blocks(models["ours, compiled"])

    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"\nAgainst the released code: {geometry(model.cfg)}, {size:.0f} M parameters, one token a step, no edits")
    for folder in args.official:
        theirs = official_model(folder, model)
        if keeps_cache(theirs):
            print("  the fork with a cache (synsis/remasked_DLM):")
        else:
            print("  the released file, which has no cache:")
        for length in args.lengths:
            compare_one_row(theirs, models, length, device)
        if keeps_cache(theirs):
            compare_many_rows(theirs, models, args.lengths[0], device)


def row_prompts(rows: int) -> list[list[int]]:
    return [prompt(8, r) for r in range(rows)]


def our_decode(model: Model, length: int, rows: int = 1) -> list[Output]:
    return generate(model, row_prompts(rows), replace(ONE_BY_ONE, gen_length=length, n_rounds=0))


def their_decode(theirs: torch.nn.Module, cfg: Config, length: int, ids: list[list[int]]) -> list[list[int]]:
    """Prompts -> tokens; of many prompts by the fork's generate_batch()."""
    device = next(theirs.parameters()).device
    inputs = [torch.tensor([row], device=device) for row in ids]
    settings = dict(gen_length=length, block_length=cfg.block_length, threshold=1.0, editing_threshold=2.0)
    settings |= dict(eos_id=cfg.eos_id, mask_id=cfg.mask_id)
    if len(ids) == 1:
        return [theirs.generate(inputs[0], **settings)[0].tolist()]
    return [row[0].tolist() for row in theirs.generate_batch(inputs, **settings)]


def same_tokens(models: dict[str, Model], theirs: torch.nn.Module, length: int, rows: int) -> None:
    """Stop unless every side writes the same."""
    written = None
    for name, model in models.items():
        tokens = [output.tokens for output in our_decode(model, length, rows)]
        if written is None:
            written = their_decode(theirs, model.cfg, length, row_prompts(rows))
        if tokens != written:
            fail(f"{length} tokens differ from the released code's ({name}): there is nothing to compare")


def limit(model: Model, length: int, rows: int, device: torch.device) -> float:
    """Seconds that a decode would take if its passes were nothing but arithmetic."""
    passes = our_decode(model, length, rows)[0].passes
    return passes * interleaved(arithmetic(model, rows, length // 2), repeats=20, clock=processor_or(device))[0]


def compare_one_row(theirs: torch.nn.Module, models: dict[str, Model], length: int, device: torch.device) -> None:
    """Whole decodes in turns; of a long one by the released file, blocks behind some contexts."""
    cfg = models["ours"].cfg
    clock = processor_or(device)
    ours = [partial(our_decode, model, length) for model in models.values()]
    if length <= S.compared:
        how = "all the same"
        same_tokens(models, theirs, length, rows=1)
        released = partial(their_decode, theirs, cfg, length, row_prompts(1))
        *seconds, other = interleaved(*ours, released, repeats=3, clock=clock)
    else:  # it reads everything in every step: its blocks behind some contexts are timed, the rest lies between
        how, B, quarter = "blocks integrated", cfg.block_length, length // 4
        behind = [B, *range(quarter, length + 1, quarter)]
        blocks = [partial(their_decode, theirs, cfg, B, [prompt(n)]) for n in behind]
        timed = [interleaved(block, repeats=1, clock=clock)[0] for block in blocks]
        other = np.interp(range(0, length, B), behind, timed).sum()
        seconds = interleaved(*ours, repeats=1, clock=clock)

    wanted = 1.8 if keeps_cache(theirs) else {256: 8, 512: 12, 2048: 35}.get(length)
    aim = "" if wanted is None else f" (goal {wanted})"
    print(f"    {length} tokens, {how}: theirs {length / other:.1f} tokens/s; "
          f"limit {other / limit(models['ours'], length, 1, device):.1f}x")  # fmt: skip
    for name, s in zip(models, seconds, strict=True):
        print(f"      {name}: {length / s:.1f} tokens/s, {other / s:.2f}x{aim}", flush=True)


def compare_many_rows(theirs: torch.nn.Module, models: dict[str, Model], length: int, device: torch.device) -> None:
    """As many rows as a batch has, ours and the fork's generate_batch(), and one row of either."""
    cfg = models["ours"].cfg
    rows = max(S.batch)
    same_tokens(models, theirs, length, rows)
    sides = []
    for n in (1, rows):
        sides += [partial(our_decode, model, length, n) for model in models.values()]
        sides += [partial(their_decode, theirs, cfg, length, row_prompts(n))]
    seconds = interleaved(*sides, repeats=2, clock=processor_or(device))

    least = limit(models["ours"], length, rows, device)
    names = [*models, "theirs"]
    ours, fork = seconds[0], seconds[-1]
    print(f"    {rows} rows of {length} tokens; limit {rows * ours / least:.1f}x the tokens/s of our one row")
    for name, one, many in zip(names, seconds, seconds[len(names) :], strict=False):
        against_one = f"{rows * one / many:.1f}x one such row, {rows * ours / many:.1f}x our row{goal(rows, {16: 4})}"
        print(f"      {name}: {rows * length / many:.0f} tokens/s, {against_one}; {fork / many:.2f}x the fork's rows")


# ---------------------------------------------------------------------------------------------------------------------
# training


def random_rows(cfg: Config, R: int, T: int, device: torch.device) -> tuple[Tensor, ...]:
    """x, z, kind, bundle (R, T) of random tokens under the default corruption."""
    rows = [generator("bench", "row", i) for i in range(R)]
    x = torch.stack([torch.randint(256, (T,), generator=g) for g in rows])
    everywhere = torch.ones_like(x, dtype=torch.bool)
    z, kind = corrupt(x, everywhere, Corruption("random", cfg.block_length, cfg.mask_id, 256), rows)
    bundle = draw_bundle(kind == M, cfg.block_length, 1, 16, rows)
    return tuple(t.to(device) for t in (x, z, kind, bundle))


def training_step(cfg: Config, R: int, T: int, variant: str, device: str) -> Callable[[], None]:
    """Forward and backward of R rows, the optimizer left out: it costs the same in every variant. variant: words out of
    Stage A alone, one after the other, adapters, in Stage B alone, checkpointing, bf16."""
    model = new_model(cfg, generator("bench"), device)
    args = Namespace(
        corruption="random", replace_rate=0.1, draft_rate=0.3, context="corrupted", bundle_scope="block", s_min=1,
        s_max=16, lora_r=16, seed=0,
    )  # fmt: skip
    step_of = cocommit_step
    if "Stage A alone" in variant:
        step_of = stage_a_step
    if "in Stage B alone" in variant:
        stage_b_only.adapt(model, args.lora_r, generator("lora"))
        step_of = stage_b_step
    elif "adapters" in variant:
        lora_everywhere(model, args)
    if "one after the other" in variant:
        model.both_stages = partial(one_after_the_other, model)
    model.checkpointing = "checkpointing" in variant
    model.compute_dtype = torch.bfloat16 if "bf16" in variant else torch.float32
    x = random_rows(cfg, R, T, torch.device(device))[0]
    everywhere = torch.ones_like(x, dtype=torch.bool)

    def run() -> None:
        draws = [generator("bench", "draws", i) for i in range(R)]
        loss, _ = step_of(model, Batch(x, everywhere, everywhere, 256, draws), args)
        (loss / x.numel()).backward()
        model.zero_grad(set_to_none=False)

    run()  # from here on the gradients are there
    return run


def one_after_the_other(model: Model, h: Tensor, bundle: Tensor, ctx: Context, n_rounds: int) -> tuple[Tensor, Tensor]:
    """In the place of Model.both_stages, which runs both as one doubled batch."""
    return model.last_n(h, ctx), model.coordinate(h, bundle, ctx, n_rounds)


def stage_b_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """Adapters in Stage B alone, on the clean tokens."""
    z, kind = corrupt_batch(model, batch, args)
    bundle = draw_bundle(kind == M, model.cfg.block_length, args.s_min, args.s_max, batch.draws)
    return stage_b_only.stage_b_losses(model, batch, z, kind, bundle, batch.clean, args)


def train(device: torch.device, args: Namespace) -> None:
    """Both stages against Stage A alone, the two ways of running both, then what each switch costs and saves."""
    cfg = S.deep
    L, n = cfg.n_layer, cfg.n_last
    shape = (cfg, S.rows, S.seq_len)
    print(f"\nTraining step, forward and backward: {geometry(cfg)}, n = {n}, {S.rows} rows of {S.seq_len}")
    variants = ["Stage A alone", "both, doubled", "both, one after the other"]
    one, two, apart = interleaved(*(training_step(*shape, v, device.type) for v in variants), repeats=2 * S.repeats)
    print(f"  Stage A alone {1e3 * one:.0f} ms, both stages {1e3 * two:.0f} ms: {two / one:.3f}x; (L + n) / L = "
          f"{(L + n) / L:.3f}, so {two / one / ((L + n) / L):.3f} of it; two full passes would be 2")  # fmt: skip
    print(f"  both stages one after the other {1e3 * apart:.0f} ms, as one doubled batch "
          f"(both_stages) {1e3 * two:.0f} ms: {apart / two:.3f}x")  # fmt: skip
    variants = ["fp32", "fp32 checkpointing", "fp32 adapters", "fp32 adapters in Stage B alone", "bf16"]
    seconds = interleaved(*(training_step(*shape, v, device.type) for v in variants), repeats=3)
    memory = peaks([(training_step, (*shape, v, device.type)) for v in variants], device)
    for variant, s, size in zip(variants, seconds, memory, strict=True):
        held = mb(size, "; peak beyond weights and gradients")
        print(f"  {variant:30}  {1e3 * s:6.0f} ms, {s / seconds[0]:.2f}x{held}")
    print("  (adapters: LoRA on a frozen model, in every layer and both stages unless said otherwise)")


def loss_step(cfg: Config, T: int, which: str, device: str) -> Callable[[], None]:
    """Head and cross-entropy of T positions, forward and backward. which: Stage A, Stage B, or all logits at once."""
    model = new_model(cfg, generator("bench"), device).requires_grad_(False)
    x, z, kind, bundle = random_rows(cfg, 1, T, torch.device(device))
    fill = bundle if which == "Stage B" else kind == M
    h = normal(1, T, cfg.n_embd, device=device).requires_grad_()

    def run() -> None:
        if which == "all logits":
            ce = F.cross_entropy(model.head(h[0]), x[0], reduction="none")
            (loss_weights(kind, fill)[0] * ce).sum().backward()
        else:
            three_term_loss(model, h, x, kind, fill)[0].backward()

    return run


def loss(device: torch.device, args: Namespace) -> None:
    """Logits exist only where there is a loss, and a chunk at a time."""
    cfg, T = replace(S.loss, block_length=32), S.loss_positions
    _, _, kind, bundle = random_rows(cfg, 1, T, torch.device("cpu"))
    fills = {"all logits": kind == M, "Stage A": kind == M, "Stage B": bundle}
    memory = peaks([(loss_step, (cfg, T, which, device.type)) for which in fills], device)
    print(f"\nLM head and loss: vocabulary {cfg.vocab_size:,}, {T} positions; "
          f"{mb(4 * T * cfg.vocab_size, 'their logits in fp32 are')}")  # fmt: skip
    for (which, fill), size in zip(fills.items(), memory, strict=True):
        n = T if which == "all logits" else int((loss_weights(kind, fill) > 0).sum())
        print(f"  {which:10}  {n:5} positions of {T} get logits{mb(size, ', peak')}")


def experts_loop(layer: MoE, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The plain twin of `MoE.experts`, obviously right; tests/test_model.py holds the two together, gradients too."""
    y = torch.zeros(x.shape, device=x.device)
    # unbind: indexing the stack would give each expert a gradient of the whole stack's size
    for e, (gate_up, down) in enumerate(zip(layer.gate_up.unbind(), layer.down.unbind(), strict=True)):
        token, place = (chosen == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up.to(x.dtype)).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down.to(x.dtype))
        y = y.index_add(0, token, out.float() * weights[token, place, None])
    return y.to(x.dtype)


def moe(device: torch.device, args: Namespace) -> None:
    """All experts in one grouped matmul against a loop over them."""
    cfg = RELEASED if device.type == "cuda" else S.moe
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = MoE(cfg)
    for p in layer.parameters():
        p.data = p.data.normal_(0, cfg.n_embd**-0.5, generator=generator("bench")).to(device, dtype)
    layer.to(device)
    print(f"\nExperts: {cfg.n_active} of {cfg.n_expert}, width {cfg.n_embd}, expert width {cfg.d_expert}; grouped "
          "against a loop over the experts")  # fmt: skip
    for N in S.moe_tokens:
        x = normal(N, cfg.n_embd, device=device).to(dtype).requires_grad_()
        chosen, weights = (t.detach() for t in layer.route(x))

        def run(experts: Callable, backward: bool, x=x, chosen=chosen, weights=weights) -> None:
            with torch.set_grad_enabled(backward):
                y = experts(x, chosen, weights).sum()
            if backward:
                y.backward()
                layer.zero_grad()

        both = layer.experts, partial(experts_loop, layer)
        sides = [lambda f=f, b=b: run(f, b) for b in (False, True) for f in both]
        a, b, c, d = (1e3 * s for s in interleaved(*sides, repeats=3))
        print(f"  {N:5} tokens: forward {a:.1f} against {b:.1f} ms, {b / a:.1f}x; with backward {c:.1f} against "
              f"{d:.1f} ms, {d / c:.1f}x")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# a checkpoint on the device, and the command line


@torch.inference_mode()
def checkpoint_forward(device: torch.device, args: Namespace) -> None:
    """One block, batch 1, no context, beside the floor."""
    model = load_model(args.ckpt, device, DTYPES[args.dtype])
    cfg, B = model.cfg, model.cfg.block_length
    ids = torch.randint(cfg.vocab_size, (1, B), generator=generator("bench", "block")).to(device)
    ctx = sequence_context(cfg, torch.ones_like(ids, dtype=torch.bool), model.compute_dtype)
    itemsize = model.layers[0].attn.qkv.weight.itemsize  # 1 where the checkpoint is in int8
    size = sum(forward_bytes(cfg, B, 0, distinct_experts(cfg, B), itemsize).values())
    print(f"\nOne forward of one block: {args.ckpt} ({geometry(cfg)}), {args.dtype}; at least {size / 1e9:.3f} GB read")
    (s,) = interleaved(lambda: model(ids, ctx), repeats=4 * S.repeats)
    floor = f", {s * args.bandwidth * 1e9 / size:.2f}x the floor" if args.bandwidth else ""
    print(f"  {1e3 * s:.2f} ms, {size / s / 1e9:.1f} GB/s{floor}")


SECTIONS = dict(decode=decode, passes=passes, batch=batch, stageb=stageb, train=train, loss=loss, moe=moe)


def machine(device: torch.device) -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    name = found[1] if found else platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{name}, {threads}; torch {torch.__version__}, {device}{gpu}"


def main() -> None:
    parser = Parser(__doc__)
    g = parser.add_argument_group("what to measure")
    g.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections (default: all)")
    g.add_argument("--ckpt", help="instead: a checkpoint folder's batch-1 forward against its floor")
    g.add_argument("--official", type=Path, nargs="+", help="instead: whole decodes against the code in these folders")
    g.add_argument("--compile", action="store_true", help="with --official: ours with compiled steps, too")
    g.add_argument("--lengths", type=bounded(int, 1), nargs="+", default=[256, 512], help="tokens of those decodes")
    g.add_argument("--device", default="cpu", help="auto (cuda, then mps, then cpu), or one by name")
    g.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the checkpoint's weights and activations")
    g.add_argument("--bandwidth", type=bounded(float, 1e-6), help="GB/s of the device's memory: the floor of --ckpt")
    args = parser.parse_args()
    if bool(args.ckpt) + bool(args.official) + bool(args.only) > 1:
        fail("--ckpt and --official are measurements of their own: give one of them, or --only")
    if args.compile and not args.official:
        fail("--compile is for --official; to decode with compiled steps: python -m released.compiled")
    if args.bandwidth and not args.ckpt:
        fail("--bandwidth is for the floor under --ckpt; the limits on paper are python -m tools.limits")
    device = pick_device(args.device)
    print(f"$ python -m tools.bench {' '.join(sys.argv[1:])}\n{date.today()}: {machine(device)}")
    alone = [checkpoint_forward] if args.ckpt else [official] if args.official else []
    for section in alone or [SECTIONS[name] for name in args.only or SECTIONS]:
        section(device, args)


if __name__ == "__main__":
    main()
