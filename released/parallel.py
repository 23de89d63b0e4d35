"""The same training on several processes: torchrun starts this command N times, and each has its own rows of a batch.

FSDP2 shards frozen backbone, adapters, markers, gradients and moments, on CPUs over gloo and on GPUs over nccl. Process
0 alone prints and writes, and its checkpoints are those of one process: a run goes on with any number, also after one
has died. The flags are train.py's (--batch_size: rows of all processes; --micro_batch: rows in one forward of one), or
those of an extension named first; --compile compiles each layer. It refuses rows that do not divide by the processes,
more processes than GPUs, and devices other than these two. released/run.py shares out its items too.

    torchrun --nproc_per_node 8 -m released.parallel --init_from weights/llada2.1-mini --data docs.jsonl --dtype bf16
    torchrun --nproc_per_node 8 -m released.parallel --init_from resume --out_dir out/cocommit
    torchrun --nproc_per_node 2 -m released.parallel beyond.chain --data modes --init_from out/base --device cpu
"""

import importlib
import math
import os
import signal
import sys
import time
from argparse import Namespace
from collections import defaultdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm

import checkpoint
import data
import train
from checkpoint import save_tensors
from model import Model, MoE
from train import Objective, named_terms, pieces

EXTENSIONS = ("beyond.chain", "beyond.noise")
LAUNCHED = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # by torchrun, be it with one process
RANK, WORLD = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if LAUNCHED else (0, 1)


# --- starting and ending
def start() -> None:
    """The first thing that a command does. Process 0 alone prints; an error is printed by the process that meets it
    first, whichever that is, and by no other."""
    global store
    if not LAUNCHED:
        return
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except (ValueError, RuntimeError) as e:
        data.fail(f"RANK is set, but the other processes cannot be reached ({e}): start them with torchrun")
    data.print = lambda *words, **how: print(*words, **how) if store.add("errors", 1) == 1 else None
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
        sys.stderr.isatty = lambda: False  # tqdm draws no bar there
        checkpoint.print = lambda *args, **how: None  # "loading ...", which goes to stderr


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
    if not LAUNCHED:
        data.fail("this is one process: start several by torchrun --nproc_per_node N -m released.parallel")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    group, patience = dist.PrefixStore("group", store), timedelta(minutes=30)  # process 0 may write for long
    dist.init_process_group(backend, store=group, rank=RANK, world_size=WORLD, timeout=patience)
    dist.barrier()  # nothing is written before every process has looked at what is there


def last() -> bool:
    """Whether all the other processes have been here already: then this one may print, and speaks for all of them."""
    here = not LAUNCHED or store.add("done", 1) == WORLD
    sys.stdout = sys.__stdout__ if here and RANK else sys.stdout
    return here


# --- the exchanges: every process must come to each of them equally often
def share(first: int, n: int, args: Namespace) -> list[tuple[int, int]]:
    """train.pieces of this process's part of rows first .. first+n."""
    start, stop = (first + r * n // WORLD for r in (RANK, RANK + 1))
    return pieces(start, stop - start, args)


def total(t: Tensor) -> Tensor:
    """The sum over processes, the same bits on each."""
    dist.all_reduce(t)
    return t


def largest(n: int | bool) -> int:
    """The largest of all processes' numbers; of flags, whether any is set."""
    t = torch.tensor(int(n))
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return int(t)


def save_whole(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """checkpoint.save_tensors of tensors put together one by one, which process 0 alone keeps."""
    whole = ((k, t.detach().full_tensor() if isinstance(t, DTensor) else t) for k, t in tensors.items())
    save_tensors(path, {k: t.cpu() if RANK == 0 else t.new_empty(0) for k, t in whole}, metadata)


# --- the sharded model
def shard(model: Model, device: torch.device) -> None:
    """Leave each process its part of every parameter, on `device`; model was built on the CPU of each.

    A checkpoint in the dtype asked for is memory-mapped there, one copy in the page cache for all processes, and goes
    to the device a Block at a time. (From scratch each process draws the whole model first, as one process would.)

    Parameters are gathered in the dtype in which they are kept: the backbone's bf16, the adapters' float32, which may
    lie in one group because only one of them is trained. There is no param_dtype to cast to, because the layers cast to
    their input's dtype themselves, and the router must not be rounded. Gradients are summed in float32, not averaged:
    the loss is already divided by the tokens of all processes.

    model.within(f, *args) is f(*args), which may call prefix, last_n, head and mark. A Block gathers its parameters as
    it is called; those of the root, which belong to no one method, are there all through f and its backward. So the
    chunks of the loss, whose number differs between processes, need no exchange.
    """
    mesh, policy = init_device_mesh(device.type, (WORLD,)), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*model.layers, model):  # the model itself: embedding, final norm, LM head and markers
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no op that divides
    model.within = lambda f, *args: f(*args)
    register_fsdp_forward_method(model, "within")


def compile_layers(model: Model) -> None:
    """Not the routed experts: in a graph, grouped_mm takes nothing but bf16."""
    torch._dynamo.config.recompile_limit = 64  # dense or routed, R or 2R rows, with and without gradient and padding
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.experts = torch.compiler.disable(layer.mlp.experts)
        layer.forward = torch.compile(layer.forward, dynamic=False)


# --- the run: train.run once more, line for line, with the exchanges
def run(args: Namespace, kind: type[Objective], command: str, compiled: bool) -> None:
    """In the place of train.run."""
    resume = f"{command} --init_from resume --out_dir {args.out_dir}"
    try:
        loop(*prepare(args, kind, compiled), resume)
    except RuntimeError as e:
        if not (isinstance(e, dist.DistError) or "gloo" in str(e)):
            raise
        why = str(e).splitlines()[0].split(". ")[0]
        data.fail(f"another process is gone ({why}); what was saved last is whole, go on with: {resume}")


def prepare(args: Namespace, kind: type[Objective], compiled: bool) -> tuple[Objective, torch.optim.Optimizer, int]:
    """The sharded model and its optimizer, and the number of steps taken."""
    device, folder = pick_device(args.device), Path(args.out_dir)
    join(device, batch_size=args.batch_size, eval_rows=args.eval_rows)
    rows, n_plain, tokens = train.load_rows(args)
    if RANK:  # not before the rows: they may need a tokenizer that each process writes for itself
        data.replace_file = checkpoint.replace_file = lambda path, write: None
    model = checkpoint.start(args, tokens, kind.adapt, torch.device("cpu"))
    optimizer = train.make_optimizer(model, args)
    started = args.resume and (folder / "state.safetensors").exists()
    done = checkpoint.restore_state(model, optimizer, folder) if started else 0
    moments = {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}
    if compiled:
        compile_layers(model)
    shard(model, device)
    optimizer = train.make_optimizer(model, args)
    for p, state in ((p, moments[n]) for n, p in model.named_parameters() if n in moments):
        part = partial(distribute_tensor, device_mesh=p.device_mesh, placements=p.placements, src_data_rank=None)
        optimizer.state[p] = {k: t.to(device) if k == "step" else part(t.to(device)) for k, t in state.items()}
    data.write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k != "resume"})
    checkpoint.rewind_log(folder / "log.jsonl", done)
    print(f"{' '.join(args.data)}: {rows['train'].describe()} to train on, {WORLD} processes on {device} in "
          f"{args.dtype}; steps {done}..{args.max_iters} of {args.batch_size} rows -> {folder}")  # fmt: skip
    objective = kind(model, rows, n_plain, args, device)
    # each forward gathers weights from all processes, and all must make as many: one, of rows at full length
    objective.by_length = lambda real: [(slice(None), real.shape[1])]
    return objective, optimizer, done


def loop(objective: Objective, optimizer: torch.optim.Optimizer, done: int, resume: str) -> None:
    model, args, folder = objective.model, objective.args, Path(objective.args.out_dir)
    objective.notes = defaultdict(float)  # what a step adds to the log, of process 0's rows
    end, saved, stop = min(args.max_iters, args.stop_at or args.max_iters), done, 0
    with checkpoint.interruptible() as caught, open(os.devnull if RANK else folder / "log.jsonl", "a", 1) as log:
        for s in (signal.SIGINT, signal.SIGTERM):  # the second signal is what torchrun passes on of the first
            signal.signal(s, lambda number, frame: caught.append(number))
        for step in tqdm(range(done, end), initial=done, total=args.max_iters, desc="train", disable=None):
            start, first = time.perf_counter(), step * args.batch_size
            n_real = objective.rows["train"].count_real(first, args.batch_size)
            loss, terms = 0.0, 0.0
            for a, n in share(first, args.batch_size, args):
                part, part_terms = model.within(objective, a, n)
                (part / n_real).backward()
                loss, terms = loss + part.detach() / n_real, terms + part_terms
            loss = float(total(loss))
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf).full_tensor())
            if not math.isfinite(loss + norm):
                good = f"step {saved} in {folder} ({resume})" if saved else "none yet"
                data.fail(f"the loss is {loss} (gradient norm {norm}) at step {step + 1}; last good checkpoint: "
                          f"{good}; lower --learning_rate in a new --out_dir")  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = train.learning_rate(step, args)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record = dict(step=step, loss=loss, grad_norm=norm, lr=train.learning_rate(step, args), tokens=n_real)
            record |= train.named_terms(terms) | {"ms": 1e3 * (time.perf_counter() - start)} | objective.notes
            train.report(record, f"step {step + 1}/{args.max_iters}", log, shown=(step + 1) % args.log_interval == 0)
            if (step + 1) % args.eval_interval == 0 or step + 1 == args.max_iters:
                record = model.within(train.validate, objective, step + 1)
                train.report(record, f"validation after step {step + 1}", log, shown=True)
            stop = largest(bool(caught))
            if stop or step + 1 == end or (step + 1) % args.eval_interval == 0:
                train.save(model, optimizer, step + 1, args, type(objective))
                saved = step + 1
            if stop:
                break
    if saved < args.max_iters:
        print(f"saved at step {saved} of {args.max_iters}; go on with: {resume}")
        raise SystemExit(130 if stop else 0)
    print(f"done: {folder}")


def main() -> None:
    """train.py's main or an extension's, with the functions of all processes in the place of those of one."""
    start()
    own = [word for word in sys.argv if word in ("--compile", *EXTENSIONS)]
    sys.argv = [word for word in sys.argv if word not in own]
    command = f"torchrun --nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE', WORLD)} -m released.parallel"
    train.run = partial(run, command=" ".join([command, *own]), compiled="--compile" in own)
    train.pieces, train.named_terms = share, lambda terms: named_terms(total(terms))
    checkpoint.save_tensors = save_whole
    extension = [word for word in own if word in EXTENSIONS]
    if not extension:
        return train.main(train.build_parser(__doc__))
    chain = importlib.import_module("beyond.chain")
    longest = chain.longest
    chain.longest = lambda bundle, B: largest(longest(bundle, B))  # the same number of forwards on each process
    importlib.import_module(extension[0]).main()


if __name__ == "__main__":
    main()
