"""The whole released geometry with random weights: 20 layers, 256 experts, 157,184 tokens, on the machine at hand.

Random weights say nothing about answers. They read as many bytes, take as much memory and pass through the same code as
trained ones, so they show what the released model needs. experiments/sixteen_b.sh is the whole run.

    python -m released.sixteen_b write --out weights/released      # 32.5 GB in the released layout, a layer at a time
    python -m released.sixteen_b watch -- COMMAND ...              # run it; its time and its memory at the peak
    python -m released.sixteen_b measure --ckpt weights/int8       # forwards against their floor, and 64 tokens
"""

import json
import math
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from checkpoint import DTYPES, PRESETS, load_model
from convert_weights import Target, checkpoint_files, plan, write_folder
from lib.tokenizer import learn_bpe
from lib.util import Parser, bounded, fail, generator, pick_device, write_json
from model import Config, Model, MoE, sequence_context
from released.export import released_config
from sample import Decoding, generate

# B block_length, C channels, E experts, L layers, n = n_last, K = n_rounds

GB = 1e9
POOL = 2**25  # random numbers that are drawn


# ---------------------------------------------------------------------------------------------------------------------
# a random checkpoint


@cache
def pool(std: float) -> Tensor:
    """Normal numbers, of which every matrix is made: to draw each weight anew takes minutes."""
    numbers = torch.empty(POOL).normal_(0.0, std, generator=generator("sixteen_b", "pool"))
    return numbers.bfloat16()


@dataclass
class Random(Target):
    """A tensor of random numbers, a function of its name. Matrices are pieces of the pool from random places on, of a
    size that keeps a sum over a row at 1; norms are ones, router biases zeros."""

    name: str = ""

    def parts(self) -> Iterator[Tensor]:
        places = generator("sixteen_b", self.name)
        left = math.prod(self.shape)
        if self.name.endswith("expert_bias"):
            yield torch.zeros(left)
        elif len(self.shape) == 1:
            yield torch.ones(left, dtype=torch.bfloat16)
        else:
            numbers = pool(self.shape[-1] ** -0.5)
            while left:
                size = min(left, POOL // 4)
                first = int(torch.randint(POOL - size, (1,), generator=places))
                yield numbers[first : first + size]
                left -= size


def write(args: Namespace) -> None:
    """The released layout, a file a layer, with a tokenizer of bytes: 258 of the 157,184 tokens have a text."""
    cfg = replace(PRESETS["llada2.1-mini"], n_layer=args.layers, n_last=min(3, args.layers))
    shards: list[dict[str, Target]] = [{} for _ in range(cfg.n_layer + 2)]
    for shard, name, _, released, part in plan(cfg):
        dtype = "F32" if name.endswith("expert_bias") else "BF16"
        shards[shard] |= {r: Random(dtype, part, [], r) for r in released}
    files = checkpoint_files(shards, args.out)
    files["tokenizer.json"] = partial(write_json, value=learn_bpe([], 258))
    config = released_config(cfg)
    config["pad_token_id"] = 256  # the end of a text, in that tokenizer
    files["config.json"] = partial(write_json, value=config)
    tensors = sum(len(tensors) for tensors in shards)
    size = sum(t.size for tensors in shards for t in tensors.values())
    write_folder(args.out, files, size)
    print(f"wrote {args.out}: {tensors:,} tensors, {size:,} bytes, random")


# ---------------------------------------------------------------------------------------------------------------------
# memory


def memory(process: int | str = "self") -> dict[str, int]:
    """Bytes of a process now: VmHWM its peak, RssAnon its own, RssFile pages of mapped files, which others may drop."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {k: 1024 * int(fields[k].split()[0]) for k in ("VmHWM", "RssAnon", "RssFile") if k in fields}


def watch(args: Namespace) -> None:
    """Run a command; print its time, the peak of its resident memory, and the peaks of the two kinds apart."""
    start = time.perf_counter()
    most: dict[str, int] = {}
    with subprocess.Popen(args.command) as process:
        while process.poll() is None:
            for kind, size in memory(process.pid).items():
                most[kind] = max(size, most.get(kind, 0))
            time.sleep(0.1)
    seconds = time.perf_counter() - start
    if most:
        print(f"[{seconds:.1f} s; peak memory {most['VmHWM'] / GB:.2f} GB; its own at most {most['RssAnon'] / GB:.2f}, "
              f"mapped files at most {most['RssFile'] / GB:.2f}]", flush=True)  # fmt: skip
    raise SystemExit(process.returncode)


# ---------------------------------------------------------------------------------------------------------------------
# time


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Median of some runs after an untimed one."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def bandwidth() -> float:
    """Bytes a second of a plain read of memory by all threads: the sum of 2 GB of floats, five times."""
    x = torch.ones(2**29)
    return x.nbytes / seconds_of(x.sum, 5)


def bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


class Read:
    """Counts the bytes of the weights that forwards read: every tensor of a layer that runs, but of its experts those
    that are chosen; the head; an embedding row a token."""

    def __init__(self, model: Model):
        self.bytes = 0
        self.experts: list[int] = []
        for layer in model.layers:
            layer.register_forward_hook(self.layer)
            if isinstance(layer.mlp, MoE):
                layer.mlp.experts = partial(self.chosen, layer.mlp, layer.mlp.experts)
        model.lm_head.register_forward_hook(self.head)

    def layer(self, layer: torch.nn.Module, *_: object) -> None:
        routed = ()
        if isinstance(layer.mlp, MoE):
            routed = ("mlp.gate_up", "mlp.down", "mlp.gate_up_scale", "mlp.down_scale")
        self.bytes += bytes_of({k: t for k, t in layer.state_dict().items() if k not in routed})

    def head(self, head: torch.nn.Module, *_: object) -> None:
        self.bytes += bytes_of(head.state_dict())

    def chosen(self, moe: MoE, experts: Callable, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        active = len(chosen.unique())
        self.experts.append(active)
        stacks = {k: t for k, t in moe.state_dict().items() if k.split("_scale")[0] in ("gate_up", "down")}
        self.bytes += bytes_of(stacks) * active // len(moe.router)
        return experts(x, chosen, weights)

    def of(self, run: Callable[[], object]) -> tuple[int, float]:
        """(bytes, experts a layer) that a run reads."""
        self.bytes = 0
        self.experts.clear()
        run()
        return self.bytes, self.a_layer()

    def a_layer(self) -> float:
        """Experts that were active in a layer, on average."""
        return sum(self.experts) / max(1, len(self.experts))


@torch.inference_mode()
def forwards(model: Model, read: Read, rate: float, rows: int) -> None:
    """A random block in each row, without context: Stage A, and one round of Stage B, each against its floor."""
    cfg = model.cfg
    ids = torch.randint(cfg.vocab_size, (rows, cfg.block_length), generator=generator("sixteen_b", "block"))
    ids = ids.to(model.wte.weight.device)
    bundle = torch.arange(cfg.block_length, device=ids.device)[None] % 4 == 0
    ctx = sequence_context(cfg, torch.ones_like(ids, dtype=torch.bool), model.compute_dtype)
    h = model.prefix(ids, ctx)
    stage_a = partial(model, ids, ctx)
    sides = {"forward": stage_a, "Stage B": lambda: model.head(model.coordinate(h, bundle, ctx, 1))}
    seconds = {}
    for name, run in sides.items():
        size, experts = read.of(run)
        seconds[name] = seconds_of(run, 5)
        floor = size / rate
        print(f"{name}: {seconds[name]:.3f} s; it reads {size / GB:.2f} GB of weights, {experts:.1f} experts a layer; "
              f"floor {floor:.3f} s, so {seconds[name] / floor:.2f} x the floor", flush=True)  # fmt: skip
    share = cfg.n_last / cfg.n_layer
    ratio = seconds["Stage B"] / seconds["forward"] / share
    print(f"Stage B costs {ratio:.2f} x n/L of a forward (n/L = {share:.2f})")
    print(f"at 0.28 forwards a token that forward would be {1 / 0.28 / seconds['forward']:.2f} tokens/s")


def decode(model: Model, read: Read, tokens: int, rows: int, n_rounds: int) -> None:
    """So many tokens a row after a prompt of 32, one a step (nothing is likely to a random model), without edits."""
    cfg = model.cfg
    ordinary = max(1, cfg.vocab_size - 512)  # without what is special at the end of the vocabulary
    prompts = torch.randint(ordinary, (rows, 32), generator=generator("sixteen_b", "prompt")).tolist()
    read.experts.clear()
    start = time.perf_counter()
    outputs = generate(model, prompts, Decoding(gen_length=tokens, tau_t2t=None, n_rounds=n_rounds))
    seconds = time.perf_counter() - start

    written = sum(len(out.tokens) for out in outputs)
    passes = max(out.passes for out in outputs)
    stages = "Stage A alone"
    if n_rounds:
        stages = "Stage A and Stage B"
    print(f"{stages}: {written} tokens in {seconds:.1f} s, {written / seconds:.2f} tokens/s; forwards of the first row "
          f"{json.dumps(outputs[0].nfe)}, {passes} passes of Stage A, {seconds / passes:.2f} s each with all that is "
          f"beside it, {read.a_layer():.1f} experts a layer", flush=True)  # fmt: skip


def measure(args: Namespace) -> None:
    device = pick_device(args.device)
    start = time.perf_counter()
    model = load_model(args.ckpt, device, DTYPES[args.dtype])
    loaded = time.perf_counter() - start
    cfg: Config = model.cfg
    stored = bytes_of(model.state_dict())
    print(f"{args.ckpt}: {cfg.n_layer} layers, {stored / GB:.2f} GB, loaded in {loaded:.2f} s; "
          f"{torch.get_num_threads()} threads, {device}, {args.dtype}", flush=True)  # fmt: skip
    read = Read(model)
    if args.what != "decode":
        rate = args.bandwidth * GB if args.bandwidth else bandwidth()
        print(f"plain reads of memory: {rate / GB:.1f} GB/s", flush=True)
        forwards(model, read, rate, args.rows)
    if args.what != "forwards":
        for n_rounds in (0, 1):
            decode(model, read, args.tokens, args.rows, n_rounds)
    now = memory()
    if now:
        print(f"memory: peak {now['VmHWM'] / GB:.2f} GB, of it mapped files {now['RssFile'] / GB:.2f} now, "
              f"its own {now['RssAnon'] / GB:.2f} now")  # fmt: skip


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("job", choices=["write", "watch", "measure"], help="see above")
    parser.add_argument("command", nargs="*", help="watch: the command, after --")
    group = parser.add_argument_group("write")
    group.add_argument("--layers", type=bounded(int, 2), default=20, help="of 20; each is of full size")
    group.add_argument("--out", type=Path, help="new or empty folder")
    group = parser.add_argument_group("measure")
    group.add_argument("--ckpt", type=Path, help="checkpoint folder, in int8 or not")
    group.add_argument("--what", choices=["all", "forwards", "decode"], default="all", help="all, or one of the two")
    group.add_argument("--tokens", type=bounded(int, 1), default=64, help="to decode, in each row")
    group.add_argument("--rows", type=bounded(int, 1), default=1, help="beside one another")
    group.add_argument("--device", default="cpu", help="auto (cuda, then mps, then cpu), or one by name")
    group.add_argument("--dtype", choices=DTYPES, default="bf16", help="of activations")
    group.add_argument("--bandwidth", type=bounded(float, 1e-6), help="GB/s of the device's memory (CPU: measured)")
    args = parser.parse_args()

    needed = {"write": "out", "watch": "command", "measure": "ckpt"}[args.job]
    if not getattr(args, needed):
        fail(f"{args.job} needs --{needed}" if needed != "command" else "watch needs a command, after --")
    if args.job == "measure" and args.device != "cpu" and args.what != "decode" and not args.bandwidth:
        fail("--bandwidth: give that of the device's memory, only the CPU's is measured here")
    {"write": write, "watch": watch, "measure": measure}[args.job](args)


if __name__ == "__main__":
    main()
