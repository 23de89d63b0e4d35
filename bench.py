"""Speed: ratios measured side by side in one process, and what the released geometry could do at best, on paper.

The two sides of every ratio take turns (A, B, A, B, ...) and the medians are divided, so that a busy machine disturbs
both alike. Weights are random: speed does not depend on them. It refuses a section that it does not have.

    python bench.py                                   # every section, minutes on 2 cores
    python bench.py --only decode stageb              # decode batch stageb train loss moe limits: any of them
    python bench.py --only limits --bandwidth 4800    # no measurement: bytes and FLOPs of the released geometry
    python bench.py --ckpt weights/random --device cuda --dtype bf16   # a checkpoint's forward against its floor
"""

import ctypes
import gc
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cache import Cached, Naive
from checkpoint import DTYPES, load_model
from corrupt import Corruption, M, draw_bundle, loss_weights, three_term_loss
from data import Parser, fail, generator, pick_device
from limits import distinct_experts, forward_bytes, report_limits
from model import PRESETS, Config, Model, MoE, new_model, sequence_context
from sample import Decoding, generate, step
from train import Marked, factorised_forward, marked_forward, split_forward

# R rows, T positions, B block_length, C channels, V vocabulary, L layers, n = n_last, E experts, A active experts,
# N tokens, H heads, G key/value heads, D head dim

TEXT = replace(PRESETS["text"], eos_id=256, mask_id=257, block_length=8)  # as train.py builds it, and 20 layers of it
RELEASED = PRESETS["llada2.1-mini"]


# what is measured: enough to see the ratios, little enough for two cores
S = SimpleNamespace(
    text=TEXT,
    deep=replace(TEXT, n_layer=20),
    wide=replace(TEXT, n_layer=20, n_embd=512, n_head=8, head_dim=64, rotary_dim=32, d_dense=1536, d_expert=256),
    lengths=(128, 512, 2048),
    contexts=(0, 64, 128, 256, 512, 1024, 1536, 2048),
    whole=128,  # tokens that both sides really decode, to check the integral
    batch=(1, 4, 16),
    batch_tokens=64,
    rows=4,  # of a training step
    seq_len=256,
    loss=replace(PRESETS["tiny"], n_layer=1, n_last=1, vocab_size=RELEASED.vocab_size, mask_id=257),
    loss_positions=2048,
    moe=replace(RELEASED, n_embd=512, d_expert=128, n_layer=2, n_last=1, vocab_size=8, eos_id=0, mask_id=1),
    moe_tokens=(32, 512, 4096),
    repeats=5,
    compile=True,
)


# ---------------------------------------------------------------------------------------------------------------------
# taking time and memory


def sync() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interleaved(*sides: Callable[[], object], repeats: int) -> list[float]:
    """Median seconds of each side; they take turns, after one untimed round."""
    seconds: list[list[float]] = [[] for _ in sides]
    for i in range(repeats + 1):
        for side, taken in zip(sides, seconds, strict=True):
            sync()
            start = time.perf_counter()
            side()
            sync()
            taken += [time.perf_counter() - start] if i else []
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
    """Peak bytes of each job. On a CPU in a child process whose allocator hands every freed tensor back at once."""
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


def mb(size: int | None) -> str:
    return "not measured" if size is None else f"{size / 1e6:,.0f} MB"


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


def one_step(engine: Cached | Naive, cfg: Config, n_rounds: int, rows: int = 1) -> Callable[[], object]:
    """One decoding step of rows in the middle of a block: half of it written, half masks, no prompt."""
    z = torch.tensor([prompt(cfg.block_length, 1)] * rows, device=engine.model.wte.weight.device)
    z[:, cfg.block_length // 2 :] = cfg.mask_id
    nothing, u = torch.zeros_like(z, dtype=torch.bool), torch.zeros(rows, 3, cfg.block_length, device=z.device)
    return lambda: step(engine, z, nothing, True, u, replace(ONE_BY_ONE, n_rounds=n_rounds))


@torch.inference_mode()
def decode(device: torch.device, args: Namespace) -> None:
    """Cached against naive: a step behind contexts of several lengths, and whole decodes integrated over them."""
    many = max(S.batch)
    for name, cfg, rows in (("text", S.text, 1), ("text", S.text, many), ("20 layers", S.deep, 1),
                            ("20 layers, wide", S.wide, 1)):  # fmt: skip
        model = random_model(cfg, device)
        print(f"\nDecoding {rows} at once, cached against naive: {name} ({geometry(cfg)}), Stage A and B in every step")
        at = []
        for context in S.contexts:
            sides = [one_step(E(model, [prompt(context)] * rows, 1), cfg, 1, rows) for E in (Cached, Naive)]
            at.append(interleaved(*sides, repeats=1 if rows > 1 else 3 if context > 512 else S.repeats))
        cached, naive = np.array(at).T
        beside = "   of bare matmuls on them" if rows == 1 else ""
        print(f"  context   cached ms a step   naive ms a step   ratio   of positions read{beside}")
        for context, c, n in zip(S.contexts, cached, naive, strict=True):
            print(f"  {context:7}   {1e3 * c:16.1f}   {1e3 * n:15.1f}   {n / c:4.1f}x   "
                  f"{1 + context // cfg.block_length:16}x"
                  + (f"   {matmul_ratio(model, context):22.1f}x" if rows == 1 else ""))  # fmt: skip
        ends = S.contexts[0], S.contexts[-1]
        sides = [one_step(Cached(model, [prompt(c)], 1), cfg, 1) for c in ends]
        sides += [attention_of_a_step(cfg, c, device) for c in ends]
        short, long, some, more = (1e3 * s for s in interleaved(*sides, repeats=4 * S.repeats))
        print(f"  cached at {ends[1]} against {ends[0]}, side by side: {long / short:.2f}x; {long - short:+.1f} ms, of "
              f"which attention over the longer context {more - some:+.1f} ms")  # fmt: skip
        for length in S.lengths:
            # the cost of a step is read off between the measured contexts; a block is B steps on either side
            starts = np.arange(0, length, cfg.block_length)
            c, n = (cfg.block_length * np.interp(starts, S.contexts, side).sum() for side in (cached, naive))
            print(f"  all of {length} tokens (integrated): cached {c:.2f} s, naive {n:.2f} s: {n / c:.1f}x")
    model = random_model(S.text, device)
    d = replace(ONE_BY_ONE, gen_length=S.whole)
    c, n = interleaved(*(lambda u=u: generate(model, [prompt(1)], d, use_cache=u) for u in (True, False)), repeats=2)
    print(f"  check: text, {S.whole} tokens really decoded: cached {c:.2f} s, naive {n:.2f} s: {n / c:.1f}x")


def matmul_ratio(model: Model, context: int) -> float:
    """What a matmul library makes of the positions that the cache saves: the qkv matrices of all layers, nothing else,
    applied to context + B rows and to B rows. Few rows are bound by reading the weights, whoever asks."""
    weights, B = [layer.attn.qkv.weight for layer in model.layers], model.cfg.block_length
    sides = [normal(rows, model.cfg.n_embd, device=weights[0].device) for rows in (context + B, B)]
    naive, cached = interleaved(*(lambda x=x: [F.linear(x, w) for w in weights] for x in sides), repeats=S.repeats)
    return naive / cached


def attention_of_a_step(cfg: Config, context: int, device: torch.device) -> Callable[[], object]:
    """Attention alone of a step's L + n layers: B queries, context + B keys, every layer its own."""
    q = normal(1, cfg.n_head, cfg.block_length, cfg.head_dim, device=device)
    shape = (2, 1, cfg.n_kv_head, context + cfg.block_length, cfg.head_dim)
    kv = [normal(*shape, device=device) for _ in range(cfg.n_layer)]
    kv += kv[cfg.n_layer - cfg.n_last :]
    return lambda: [F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in kv]


def batch(device: torch.device, args: Namespace) -> None:
    """Tokens a second of 1, 4 and 16 rows whose blocks end at different steps."""
    model, d = random_model(S.text, device), replace(ONE_BY_ONE, gen_length=S.batch_tokens)
    prompts = [prompt(1 + r % S.text.block_length, r) for r in range(max(S.batch))]
    sides = [lambda n=n: generate(model, prompts[:n], d) for n in S.batch]
    rates = [n * S.batch_tokens / s for n, s in zip(S.batch, interleaved(*sides, repeats=3), strict=True)]
    print(f"\nRows of a batch: text ({geometry(S.text)}), prompts of 1..{S.text.block_length} tokens, "
          f"{S.batch_tokens} tokens each")  # fmt: skip
    for n, rate in zip(S.batch, rates, strict=True):
        print(f"  {n:3} rows: {rate:7.0f} tokens/s, {rate / rates[0]:.1f}x one row")


@torch.inference_mode()
def stageb(device: torch.device, args: Namespace) -> None:
    """What Stage B adds to a step, in units of n/L of a full forward."""
    print("\nStage B: (step with it - step without) / (n/L x a full forward), context 256; goal at most 1.15")
    for name, cfg in (("text", S.text), ("20 layers", S.deep), ("20 layers, wide", S.wide)):
        model = random_model(cfg, device)
        engine = Cached(model, [prompt(256)], 1)
        z = torch.tensor([prompt(cfg.block_length, 1)], device=device)
        sides = one_step(engine, cfg, 0), one_step(engine, cfg, 1), lambda e=engine, z=z: e.stage_a(z)
        a, b, full = interleaved(*sides, repeats=16 * S.repeats)
        share = cfg.n_last / cfg.n_layer
        print(f"  {name} ({geometry(cfg)}, n = {cfg.n_last}): step {1e3 * a:.2f} -> {1e3 * b:.2f} ms, full forward "
              f"{1e3 * full:.2f} ms: {(b - a) / (share * full):.2f}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# training


def random_rows(cfg: Config, R: int, T: int, device: torch.device) -> tuple[Tensor, ...]:
    """x, z, kind, bundle (R, T) of random tokens under the default corruption."""
    rows = [generator("bench", "row", i) for i in range(R)]
    x = torch.stack([torch.randint(256, (T,), generator=g) for g in rows])
    everywhere = torch.ones_like(x, dtype=torch.bool)
    z, kind = Corruption("random", cfg.block_length, cfg.mask_id, 256)(x, everywhere, rows, None)
    bundle = draw_bundle(kind == M, cfg.block_length, 1, 16, rows)
    return tuple(t.to(device) for t in (x, z, kind, bundle))


def training_step(cfg: Config, R: int, T: int, variant: str, device: str) -> Callable[[], None]:
    """Forward and backward of R rows, the optimizer left out: it costs the same in every variant.
    variant: words out of factorised, adapters, marked, checkpointing, bf16, compile."""
    model = new_model(cfg, generator("bench"), device)
    if "adapters" in variant:
        model.add_lora(16, 32, generator("bench", "lora"), "marked" if "marked" in variant else "all")
    model.checkpointing = "checkpointing" in variant
    model.compute_dtype = torch.bfloat16 if "bf16" in variant else torch.float32
    if "compile" in variant:
        for layer in model.layers:
            layer.compile()
    x, z, kind, bundle = random_rows(cfg, R, T, torch.device(device))
    ctx = sequence_context(cfg, torch.ones_like(x, dtype=torch.bool), model.compute_dtype)

    def run() -> None:
        if "factorised" in variant:
            loss, _ = factorised_forward(model, x, z, kind, ctx)
        else:
            forward = marked_forward if "marked" in variant else split_forward
            loss, _ = forward(model, x, z, kind, Marked(bundle, x, kind, 1), ctx)
        (loss / x.numel()).backward()
        model.zero_grad(set_to_none=False)

    return run


def warm_step(*args: object) -> Callable[[], None]:
    """A training step that has run once: it is compiled, and its gradients are there."""
    run = training_step(*args)
    run()
    return run


def train(device: torch.device, args: Namespace) -> None:
    """Two branches against one, then what each switch costs and saves."""
    cfg = S.deep
    L, n = cfg.n_layer, cfg.n_last
    shape = (cfg, S.rows, S.seq_len)
    print(f"\nTraining step, forward and backward: {geometry(cfg)}, n = {n}, {S.rows} rows of {S.seq_len}")
    one, two = interleaved(
        *(training_step(*shape, v, device.type) for v in ("factorised", "split")), repeats=2 * S.repeats
    )
    print(f"  one branch {1e3 * one:.0f} ms, two branches {1e3 * two:.0f} ms: {two / one:.3f}x; (L + n) / L = "
          f"{(L + n) / L:.3f}, so {two / one / ((L + n) / L):.3f} of it; two full passes would be 2")  # fmt: skip
    variants = ["fp32", "fp32 checkpointing", "fp32 adapters", "fp32 adapters marked", "bf16"]
    variants += ["bf16 compile"] if S.compile else []
    seconds = interleaved(*(training_step(*shape, v, device.type) for v in variants), repeats=3)
    memory = peaks([(warm_step, (*shape, v, device.type)) for v in variants], device)
    for variant, s, size in zip(variants, seconds, memory, strict=True):
        print(f"  {variant:20}  {1e3 * s:6.0f} ms, {s / seconds[0]:.2f}x; peak beyond weights and gradients "
              f"{mb(size)}")  # fmt: skip
    print("  (adapters: LoRA on a frozen model, in every pass or in the marked pass of the last n layers alone)")
    print("  (compile: each layer; only in bf16, the one dtype in which grouped_mm can be traced)")


def loss_step(cfg: Config, T: int, which: str, device: str) -> Callable[[], None]:
    """Head and cross-entropy of T positions, forward and backward. which: branch 1, branch 2, or all logits at once."""
    model = new_model(cfg, generator("bench"), device).requires_grad_(False)
    x, z, kind, bundle = random_rows(cfg, 1, T, torch.device(device))
    fill = bundle if which == "branch 2" else kind == M
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
    fills = {"all logits": kind == M, "branch 1": kind == M, "branch 2": bundle}
    memory = peaks([(loss_step, (cfg, T, which, device.type)) for which in fills], device)
    print(f"\nLM head and loss: vocabulary {cfg.vocab_size:,}, {T} positions; their logits in fp32 are "
          f"{mb(4 * T * cfg.vocab_size)}")  # fmt: skip
    for (which, fill), size in zip(fills.items(), memory, strict=True):
        n = T if which == "all logits" else int((loss_weights(kind, fill) > 0).sum())
        print(f"  {which:10}  {n:5} positions of {T} get logits, peak {mb(size)}")


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

        def forward(run: Callable, x=x, chosen=chosen, weights=weights) -> None:
            with torch.no_grad():
                run(x, chosen, weights)

        def both(run: Callable, x=x, chosen=chosen, weights=weights) -> None:
            run(x, chosen, weights).sum().backward()
            layer.zero_grad()

        sides = [lambda f=f, run=run: f(run) for f in (forward, both) for run in (layer.experts, layer.experts_loop)]
        a, b, c, d = (1e3 * s for s in interleaved(*sides, repeats=3))
        print(f"  {N:5} tokens: forward {a:.1f} against {b:.1f} ms, {b / a:.1f}x; with backward {c:.1f} against "
              f"{d:.1f} ms, {d / c:.1f}x")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# a checkpoint on the device, and the command line


@torch.inference_mode()
def checkpoint_forward(device: torch.device, args: Namespace) -> None:
    """One block, batch 1, no context: eager, with compiled layers, and as a CUDA graph; beside the floor."""
    model = load_model(args.ckpt, device, DTYPES[args.dtype])
    cfg = model.cfg
    ids = torch.randint(cfg.vocab_size, (1, cfg.block_length), generator=generator("bench", "block")).to(device)
    ctx = sequence_context(cfg, torch.ones_like(ids, dtype=torch.bool), model.compute_dtype)
    B = cfg.block_length
    size = sum(forward_bytes(cfg, B, 0, distinct_experts(cfg, B), model.compute_dtype.itemsize).values())
    print(f"\nOne forward of one block: {args.ckpt} ({geometry(cfg)}), {args.dtype}; at least {size / 1e9:.3f} GB read")

    def report(name: str, run: Callable[[], object]) -> None:
        (s,) = interleaved(run, repeats=4 * S.repeats)
        floor = f", {s * args.bandwidth * 1e9 / size:.2f}x the floor" if args.bandwidth else ""
        print(f"  {name:15}  {1e3 * s:7.2f} ms, {size / s / 1e9:.1f} GB/s{floor}")

    run = lambda: model(ids, ctx)  # noqa: E731
    report("eager", run)
    if device.type == "cuda":
        report("CUDA graph", as_graph(run))
    if model.compute_dtype == torch.bfloat16 and S.compile:  # see train()
        for layer in model.layers:
            layer.compile()
        report("compiled", run)
        if device.type == "cuda":
            report("compiled, graph", as_graph(run))


def as_graph(run: Callable[[], object]) -> Callable[[], None]:
    """The kernels of one run, recorded: replaying them costs the host one call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def limits(device: torch.device, args: Namespace) -> None:
    speeds = {"given": args.bandwidth} if args.bandwidth else {"H200": 4800.0, "H100 SXM": 3350.0}
    print(f"\nLimits on paper: {geometry(RELEASED)}, bf16")
    report_limits(RELEASED, args.context, speeds, args.peak_flops)


SECTIONS = dict(decode=decode, batch=batch, stageb=stageb, train=train, loss=loss, moe=moe, limits=limits)


def machine(device: torch.device) -> str:
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch {torch.__version__}, {device}{gpu}"
    )


def main() -> None:
    parser = Parser(__doc__)
    g = parser.add_argument_group("what to measure")
    g.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections (default: all)")
    g.add_argument("--ckpt", help="instead: a checkpoint folder's batch-1 forward against its floor")
    g.add_argument("--device", default="cpu", help="auto (cuda, then mps, then cpu), or one by name")
    g.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the checkpoint's weights and activations")
    g = parser.add_argument_group("limits on paper")
    g.add_argument("--bandwidth", type=float, help="GB/s of the device's memory (default: H200 and H100 SXM, public)")
    g.add_argument("--peak_flops", type=float, default=989e12, help="FLOP/s (default: H100 and H200, dense bf16)")
    g.add_argument("--context", type=int, default=1024, help="tokens in the cache")
    args = parser.parse_args()
    if args.ckpt and args.only:
        fail("--ckpt is a measurement of its own: leave --only out")
    for name in ("bandwidth", "peak_flops"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < float("inf"):
            fail(f"--{name} must be positive and finite, not {getattr(args, name)}")
    if args.context < 0:
        fail(f"--context must be 0 or more, not {args.context}")
    device = pick_device(args.device)
    print(f"$ python {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}\n{date.today()}: {machine(device)}")
    for section in [checkpoint_forward] if args.ckpt else [SECTIONS[name] for name in args.only or SECTIONS]:
        section(device, args)


if __name__ == "__main__":
    main()
