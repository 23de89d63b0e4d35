"""One run on several processes: who this one is, which rows are its own, the sharded model, the few exchanges.

torchrun starts the same script N times. train.py then shards parameters, gradients and moments over the processes
(FSDP2: frozen backbone, LoRA and markers alike), on CPUs over gloo and on GPUs over nccl, and each process has its own
rows of every batch; evaluate.py --task gives each process its own items. Process 0 alone prints and writes checkpoints,
and they are those of one process: a run goes on with any number. Without torchrun nothing here does anything.

It refuses rows that do not divide by the processes, more processes than GPUs, and devices other than these two.

    torchrun --nproc_per_node 8 train.py --init_from weights/llada2.1-mini --data docs.jsonl --dtype bf16
    torchrun --nproc_per_node 2 train.py --data modes --device cpu --out_dir out/modes
    torchrun --nproc_per_node 2 train.py --init_from resume --out_dir out/modes         # also after a process has died
    torchrun --nproc_per_node 8 evaluate.py --task gsm8k --task_file test.jsonl --ckpt weights/llada2.1-mini \\
        --out runs/gsm8k.jsonl                                                          # gsm8k.1of8.jsonl ... 8of8
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

import data

LAUNCHED = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # by torchrun, be it with one process
RANK, WORLD = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if LAUNCHED else (0, 1)

# ---------------------------------------------------------------------------------------------------------------------
# starting and ending


def start() -> None:
    """The first thing that a script does. Process 0 alone prints; an error is printed by the process that meets it
    first, whichever that is, and by no other."""
    global store
    if not LAUNCHED:
        return
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except (ValueError, RuntimeError) as e:
        data.fail(f"RANK is set, but the other processes cannot be reached ({e}): start them with torchrun")
    data.first_to_fail = lambda: store.add("errors", 1) == 1
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
        sys.stderr.isatty = lambda: False  # tqdm draws no bar there


def pick_device(name: str) -> torch.device:
    """data.pick_device, and of several GPUs this process's own."""
    if LAUNCHED and name not in ("auto", "cpu", "cuda"):
        data.fail(f"--device {name}: under torchrun it is cpu or cuda, each process taking the GPU of its number")
    if LAUNCHED and name != "cpu" and torch.cuda.is_available():
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            data.fail(f"more processes here than the {torch.cuda.device_count()} GPUs: lower --nproc_per_node")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" is this one from here on
    return data.pick_device("cpu" if LAUNCHED and name == "auto" and not torch.cuda.is_available() else name)


def join(device: torch.device, **rows: int) -> None:
    """Meet the other processes, all of which have read the same settings by then. rows: flags that they share out."""
    for flag, n in rows.items():
        if n % WORLD:
            data.fail(f"--{flag} {n} does not divide by {WORLD} processes: give a multiple of {WORLD}")
    if LAUNCHED:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(minutes=30)  # the others wait while process 0 writes a checkpoint
        group = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=group, rank=RANK, world_size=WORLD, timeout=patience)
        dist.barrier()  # nothing is written before every process has looked at what is there


def last() -> bool:
    """Whether all the other processes have been here already: then this one may print, and speaks for all of them."""
    if LAUNCHED and store.add("done", 1) < WORLD:
        return False
    sys.stdout = sys.__stdout__ if RANK else sys.stdout
    return True


def launcher() -> str:
    return f"torchrun --nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE', WORLD)}" if LAUNCHED else "python"


@contextmanager
def together(resume: str) -> Iterator[None]:
    """A run after join(): where another process has died, one line and the command that goes on."""
    try:
        yield
    except RuntimeError as e:
        if not LAUNCHED or not (isinstance(e, dist.DistError) or "gloo" in str(e)):
            raise
        why = str(e).splitlines()[0].split(". ")[0]
        data.fail(f"another process is gone ({why}); what was saved last is whole, go on with: {resume}")


# ---------------------------------------------------------------------------------------------------------------------
# the exchanges: every process must come to each of them equally often


def share(first: int, n: int, size: int) -> list[tuple[int, int]]:
    """This process's part of rows first .. first+n, in pieces of at most `size`: (first, number) of each."""
    start, stop = (first + r * n // WORLD for r in (RANK, RANK + 1))
    return [(a, min(size, stop - a)) for a in range(start, stop, size)]


def total(t: Tensor) -> Tensor:
    """The sum over processes, the same bits on each."""
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


def largest(n: int | bool) -> int:
    """The largest of all processes' numbers; of flags, whether any is set."""
    t = torch.tensor(int(n))
    if dist.is_initialized():
        dist.all_reduce(t, dist.ReduceOp.MAX)
    return int(t)


# ---------------------------------------------------------------------------------------------------------------------
# the sharded model


def shard(model: nn.Module, device: torch.device) -> None:
    """Leave each process its part of every parameter, on `device`; model was built on the CPU of each.

    A checkpoint in the dtype asked for is memory-mapped there, one copy in the page cache for all processes, and goes
    to the device a Block at a time. (From scratch each process draws the whole model first, as one process would.)

    Parameters are gathered in the dtype in which they are kept: the backbone's bf16, the adapters' float32, which may
    lie in one group because only one of them is trained. There is no param_dtype to cast to, because the layers cast to
    their input's dtype themselves, and the router must not be rounded. Gradients are summed in float32, not averaged:
    the loss is already divided by the tokens of all processes.
    """
    if not LAUNCHED:
        return
    mesh, policy = init_device_mesh(device.type, (WORLD,)), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*model.layers, model):  # the model itself: embedding, final norm, LM head and markers
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no op that divides
    model.within = lambda f, *args: f(*args)
    register_fsdp_forward_method(model, "within")


def within(model: nn.Module, f: Callable, *args: Any) -> Any:
    """f(*args), which may call prefix, last_n, head and mark. A Block gathers its parameters as it is called; those of
    the root, which belong to no one method, are there all through f and its backward. So the chunks of the loss, whose
    number differs between processes, need no exchange."""
    return model.within(f, *args) if LAUNCHED else f(*args)


def whole(t: Tensor) -> Tensor:
    """A sharded tensor put together, on every process."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def gather(t: Tensor) -> Tensor:
    """The same on the CPU of process 0 alone; the others are left with nothing to keep."""
    t = whole(t.detach())
    return t.contiguous().cpu() if RANK == 0 else t.new_empty(0, device="cpu")


def like(t: Tensor, p: Tensor) -> Tensor:
    """A whole tensor on p's device; this process's part of it where p is sharded."""
    t = t.to(p.device)
    return distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else t
