"""train.py in several processes: they train an adapter on a frozen base, each with its own rows of every batch.

torchrun starts this command N times. Every process holds the model, and gradients are summed over all processes. With
--shard (FSDP2, as in the paper), each process holds a part of the frozen layers, and a layer is gathered when it runs.
Checkpoints are those of a single process, so a run can be resumed with any number of processes. The other flags are
train.py's, and --batch_size counts the rows of all processes.

    torchrun --nproc_per_node 8 -m released.parallel --data data/fineweb --config configs/llada.toml
    torchrun --nproc_per_node 8 -m released.parallel --init_from resume --out_dir out/cocommit
"""

import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import train
from config import Config
from lib.rows import Batch, read_corpus
from lib.util import alone_in, command, fail, pick_device
from model import Model
from settings import build_parser, read_arguments, saves_adapter


# --- the processes
def meet(name: str) -> torch.device:
    """This process's own GPU, or the CPU, once all processes have read the same settings."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    # process 0 may read and write for long, but it writes nothing before all have read the settings
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    dist.barrier()
    return device


def total(t: Tensor) -> Tensor:
    """The sum over all processes."""
    t = t.detach().clone()
    dist.all_reduce(t)
    return t


def any_process(flag: bool) -> bool:
    """Is the flag set in any process?"""
    return bool(total(torch.tensor(int(flag))))


# --- the model and its step
def shard(model: Model, device: torch.device) -> None:
    """Keep only this process's part of the frozen layers, on its device. Parameters that learn stay whole."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        learned = {p for p in layer.parameters() if p.requires_grad}
        fully_shard(layer, mesh=mesh, ignored_params=learned)
    model.to(device)


def shared_step(model: Model, batch: Batch, args: Namespace) -> train.Losses:
    """The step on this process's rows: loss and terms are those of the whole batch, the gradient is that of these."""
    own = slice(dist.get_rank(), None, dist.get_world_size())
    rows = Batch(batch.clean[own], batch.real[own], batch.corruptible[own], batch.plain, batch.draws[own])
    loss, terms = train.cocommit_step(model, rows, args)
    of_others = total(loss) - loss.detach()
    return loss + of_others, {name: total(term) for name, term in terms.items()}


# --- the command line
def run() -> None:
    sharded = "--shard" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--shard"]
    args = read_arguments(build_parser(__doc__))
    if not saves_adapter(args):
        fail("several processes train adapters on a frozen base: give a model as --init_from, and --lora_r above 0")
    if sharded and args.stage_b != Config.stage_b:
        fail(f"--stage_b {args.stage_b} has layers of its own, which --shard cannot cut up: leave out one of the two")

    # every process has the same number of rows in every micro-batch
    n = int(os.environ["WORLD_SIZE"])
    for name in ("batch_size", "micro_batch"):
        rows = getattr(args, name)
        if rows % n:
            fail(f"--{name} {rows} does not divide by {n} processes: give a multiple of {n}")
    if train.EVAL_ROWS % n:
        fail(f"{train.EVAL_ROWS} validation rows do not divide by {n} processes: start 2, 4, 8, ...")

    device = meet(args.device)
    corpus = read_corpus(Path(args.data), args.seq_len, args.seed, args.block_length, args.batch_size)

    # with --shard the model is mapped from its files, and goes to the device layer by layer
    model = train.start(Namespace(**vars(args) | dict(device="cpu" if sharded else str(device))), corpus)
    if sharded:
        shard(model, device)

    # from now on every backward sums the gradients over all processes
    for p in model.learned().values():
        p.register_hook(total)

    # train.py's loop, in which process 0 writes, and prints a command to go on that begins with this
    again = f"-m torch.distributed.run --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} -m released.parallel"
    sys.argv[0] = again + " --shard" * sharded
    writes = dist.get_rank() == 0
    status = 0
    try:
        with alone_in(Path(args.out_dir)) if writes else nullcontext():
            optimizer = train.optimizer_of(model, args)
            train.loop(model, corpus, shared_step, optimizer, args, writes, agreed=any_process)
    except SystemExit:
        status = 130  # in every process, even if only one was asked to stop
    dist.barrier()  # no process ends before process 0 has written
    raise SystemExit(status)


@command
def main() -> None:
    if "RANK" not in os.environ:
        train.build_parser(__doc__).parse_known_args()  # --help needs no others
        fail("this is one process: start several by torchrun --nproc_per_node N -m released.parallel")
    try:
        run()
    except RuntimeError as e:
        if not (isinstance(e, dist.DistError) or "gloo" in str(e)):
            raise
        fail("another process is gone, but the last save is whole: go on with --init_from resume")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # otherwise its threads may abort the process as it ends


if __name__ == "__main__":
    main()
