"""train.py on several processes: adapters on a frozen base, each process with its own rows of every batch.

torchrun starts this command N times. Every process holds the model, and gradients are summed over all. With --shard
(FSDP2, as in the paper) a process holds a part of the frozen layers, and a layer is gathered when it runs: for weights
that do not fit. Process 0 alone reads the text, prints and writes, and its checkpoints are those of one process: a run
goes on with any number, also after one has died. The other flags are train.py's, and count the rows of all processes.

    torchrun --nproc_per_node 8 -m llada.parallel --init_from weights/llada2.1-mini --data docs.jsonl --dtype bf16
    torchrun --nproc_per_node 8 -m llada.parallel --init_from resume --out_dir out/cocommit
"""

import os
import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checkpoint
import train
from lib.data import Corpus, check_finite, interruptible, report, resume_flags, rewind_log
from lib.util import command, fail, pick_device
from model import Model


# --- the processes
def check_rows(args: Namespace, n: int) -> None:
    """Every process has as many rows of every micro-batch."""
    for name in ("batch_size", "micro_batch"):
        rows = getattr(args, name)
        if rows % n:
            fail(f"--{name} {rows} does not divide by {n} processes: give a multiple of {n}")
    if train.EVAL_ROWS % n:
        fail(f"{n} processes: {train.EVAL_ROWS} validation rows do not divide by them, start 2, 4, 8, ...")


def meet(args: Namespace) -> torch.device:
    """This process's own GPU, or the CPU, once all processes have read the same settings."""
    name = args.device
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    # process 0 may read and write for long; and it writes nothing before all have looked at what is there
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    dist.barrier()
    return device


def shared_corpus(args: Namespace) -> Corpus:
    """What process 0 reads."""
    found = [train.load_corpus(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device=torch.device("cpu"))
    return found[0]


def total(t: Tensor) -> Tensor:
    """The sum over all processes."""
    t = t.detach().clone()
    dist.all_reduce(t)
    return t


# --- the model and its step
def shard(model: Model, device: torch.device) -> None:
    """Leave this process its part of the frozen layers, on its device; what learns stays whole."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        learned = {p for p in layer.parameters() if p.requires_grad}
        fully_shard(layer, mesh=mesh, ignored_params=learned)
    model.to(device)


def sum_gradients(model: Model) -> None:
    """From now on every backward leaves the gradients of all processes' rows, in all processes."""
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(total)


def shared_step(model: Model, batch: train.Batch, args: Namespace) -> train.Losses:
    """cocommit_step of this process's rows; what comes out is that of the whole batch, but for the gradient."""
    own = slice(dist.get_rank(), None, dist.get_world_size())
    rows = train.Batch(batch.clean[own], batch.real[own], batch.free[own], batch.n_plain, batch.draws[own])
    loss, terms = train.cocommit_step(model, rows, args)
    of_others = total(loss) - loss.detach()
    return loss + of_others, {name: total(term) for name, term in terms.items()}


# --- the loop: train.loop, where process 0 writes, and all stop at the same step
def loop(model: Model, corpus: Corpus, optimizer: torch.optim.Optimizer, args: Namespace) -> None:
    writes = dist.get_rank() == 0
    folder = Path(args.out_dir)
    done = 0
    if args.resume and (folder / "state.safetensors").exists():
        done = checkpoint.restore_state(model, optimizer, folder)
    if writes:
        train.write_settings(args)
        rewind_log(folder / "log.jsonl", done)
        train.describe(args, corpus, model, done)

    saved = done
    with interruptible() as caught, open(folder / "log.jsonl" if writes else os.devnull, "a", buffering=1) as log:
        for it in range(done, args.max_iters):
            record = train.update(model, corpus, shared_step, optimizer, it, args)
            check_finite(record, "loss", it, saved, args)
            shown = writes and (it + 1) % train.LOG_INTERVAL == 0
            report(record, f"step {it + 1}/{args.max_iters}", log, shown)

            # has a signal reached any process?
            stop = bool(total(torch.tensor(len(caught))))
            due = (it + 1) % args.eval_interval == 0 or it + 1 == args.max_iters
            if due or stop:
                validation = train.validate(model, corpus, shared_step, it + 1, args)
                check_finite(validation, "validation", it, saved, args)
                if due:
                    report(validation, f"validation after step {it + 1}", log, shown=writes)
                if writes:
                    state = checkpoint.training_state(model, optimizer)
                    checkpoint.save_tensors(folder / "state.safetensors", state, {"step": str(it + 1)})
                    checkpoint.save(model, folder, Path(args.init_from))
                saved = it + 1
                dist.barrier()  # nobody leaves before it is written
            if stop:
                break

    if saved < args.max_iters:
        if writes:
            launcher = f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} -m llada.parallel"
            print(f"saved at step {saved} of {args.max_iters}; go on with: {launcher} {resume_flags(args.out_dir)}")
        raise SystemExit(130)
    if writes:
        train.tell_what_is_next(saved, False, args)


# --- the command line
def run() -> None:
    sharded = "--shard" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--shard"]
    args = train.read_arguments(train.build_parser())
    if args.init_from == "scratch":
        fail("several processes train adapters: give --init_from a checkpoint, which train.py makes")
    check_rows(args, int(os.environ["WORLD_SIZE"]))
    device = meet(args)
    corpus = shared_corpus(args)

    # a sharded model is mapped from its files, and goes to the device a layer at a time
    model = train.start(Namespace(**vars(args) | dict(device="cpu" if sharded else str(device))), corpus)
    if sharded:
        shard(model, device)
    sum_gradients(model)
    loop(model, corpus, train.make_optimizer(model, args), args)


@command
def main() -> None:
    if "RANK" not in os.environ:
        fail("this is one process: start several by torchrun --nproc_per_node N -m llada.parallel")
    try:
        run()
    except RuntimeError as e:
        if not (isinstance(e, dist.DistError) or "gloo" in str(e)):
            raise
        fail("another process is gone; what was saved last is whole: go on with --init_from resume")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # or its threads may abort the process as it ends


if __name__ == "__main__":
    main()
