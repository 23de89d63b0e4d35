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
import os
import signal
import sys
import time
from argparse import Namespace
from dataclasses import replace
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
import train
from checkpoint import save_tensors
from lib import data, util
from model import Model, MoE
from settings import Corpus, build_parser, load_corpus
from train import Recipe, Step, micro_batches, named_terms

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
        util.fail(f"RANK is set, but the other processes cannot be reached ({e}): start them with torchrun")
    data.print = lambda *words, **how: print(*words, **how) if store.add("errors", 1) == 1 else None
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
        sys.stderr.isatty = lambda: False  # tqdm draws no bar there
        checkpoint.print = lambda *args, **how: None  # "loading ...", which goes to stderr


def pick_device(name: str) -> torch.device:
    """util.pick_device, and of several GPUs this process's own."""
    if LAUNCHED and name not in ("auto", "cpu", "cuda"):
        util.fail(f"--device {name}: under torchrun it is cpu or cuda, each process taking the GPU of its number")
    if LAUNCHED and name != "cpu" and torch.cuda.is_available():
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            util.fail(f"more processes here than the {torch.cuda.device_count()} GPUs: lower --nproc_per_node")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" is this one from here on
    return util.pick_device("cpu" if LAUNCHED and name == "auto" and not torch.cuda.is_available() else name)


def join(device: torch.device, **rows: int) -> None:
    """Meet the other processes, all of which have read the same settings by then. rows: flags that they share out."""
    for flag, n in rows.items():
        if n % WORLD:
            util.fail(f"--{flag} {n} does not divide by {WORLD} processes: give a multiple of {WORLD}")
    if not LAUNCHED:
        util.fail("this is one process: start several by torchrun --nproc_per_node N -m released.parallel")
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
    """train.micro_batches of this process's part of rows first .. first+n."""
    start, stop = (first + r * n // WORLD for r in (RANK, RANK + 1))
    return micro_batches(start, stop - start, args)


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
def run(args: Namespace, recipe: Recipe, command: str, compiled: bool) -> None:
    """In the place of train.run."""
    recipe = replace(recipe, command=command)
    try:
        loop(*prepare(args, recipe, compiled), args, recipe)
    except RuntimeError as e:
        if not (isinstance(e, dist.DistError) or "gloo" in str(e)):
            raise
        why = str(e).splitlines()[0].split(". ")[0]
        go_on = train.resume_command(args, recipe)
        util.fail(f"another process is gone ({why}); what was saved last is whole, go on with: {go_on}")


def prepare(
    args: Namespace, recipe: Recipe, compiled: bool
) -> tuple[Model, torch.optim.Optimizer, Corpus, torch.device, int]:
    """The sharded model and its optimizer, what it learns from and where, and the number of steps taken."""
    device = pick_device(args.device)
    folder = Path(args.out_dir)
    join(device, batch_size=args.batch_size, eval_rows=args.eval_rows)
    corpus = load_corpus(args)
    if RANK:  # not before the rows: they may need a tokenizer that each process writes for itself
        train.write_json = util.replace_file = checkpoint.replace_file = lambda path, write: None
    model = checkpoint.start(args, corpus.tokens, recipe.adapt, torch.device("cpu"))

    # what was saved, while the model is still whole
    optimizer = train.make_optimizer(model, args)
    done = 0
    if args.resume and (folder / "state.safetensors").exists():
        done = checkpoint.restore_state(model, optimizer, folder)
    moments = {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}

    # each process keeps its part of the weights, and of the moments
    if compiled:
        compile_layers(model)
    shard(model, device)
    optimizer = train.make_optimizer(model, args)
    for name, p in model.named_parameters():
        if name not in moments:
            continue
        part = partial(distribute_tensor, device_mesh=p.device_mesh, placements=p.placements, src_data_rank=None)
        optimizer.state[p] = {k: t.to(device) if k == "step" else part(t.to(device)) for k, t in moments[name].items()}

    train.write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k != "resume"})
    checkpoint.rewind_log(folder / "log.jsonl", done)
    print(f"{WORLD} processes:", end=" ")
    train.describe(args, corpus, model, device, done)
    return model, optimizer, corpus, device, done


def loop(
    model: Model, optimizer: torch.optim.Optimizer, corpus: Corpus, device: torch.device, done: int, args: Namespace,
    recipe: Recipe,
) -> None:  # fmt: skip
    saved = done
    stop = 0
    last = args.max_iters
    if args.stop_at:
        last = min(last, args.stop_at)
    log_file = os.devnull if RANK else Path(args.out_dir) / "log.jsonl"
    with checkpoint.interruptible() as caught, open(log_file, "a", buffering=1) as log:
        for s in (signal.SIGINT, signal.SIGTERM):  # the second signal is what torchrun passes on of the first
            signal.signal(s, lambda number, frame: caught.append(number))
        for step in tqdm(range(done, last), initial=done, total=args.max_iters, desc="train", disable=None):
            record = take_step(model, optimizer, recipe.step, corpus, step, args, device)
            train.check_finite(record, "loss", step, saved, args, recipe)
            shown = (step + 1) % args.log_interval == 0
            train.report(record, f"step {step + 1}/{args.max_iters}", log, shown)

            stop = largest(bool(caught))  # all processes stop at one step
            due = (step + 1) % args.eval_interval == 0 or step + 1 == args.max_iters
            if due or stop or step + 1 == last:
                validation = model.within(train.validate, model, recipe.step, corpus, step + 1, args, device)
                train.check_finite(validation, "validation", step, saved, args, recipe)
                if due:
                    train.report(validation, f"validation after step {step + 1}", log, shown=True)
                train.save(model, optimizer, step + 1, args, recipe)
                saved = step + 1
            if stop:
                break
    train.tell_what_is_next(saved, bool(stop), args, recipe)


def take_step(
    model: Model, optimizer: torch.optim.Optimizer, step_of: Step, corpus: Corpus, step: int, args: Namespace,
    device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """train.take_step on this process's share of the rows."""
    start = time.perf_counter()
    first = step * args.batch_size
    n_real = corpus.rows["train"].count_real(first, args.batch_size)
    loss = 0.0
    terms = 0.0
    for at, n in share(first, args.batch_size, args):
        batch = train.get_batch(corpus, "train", at, n, args, device)
        part, part_terms = model.within(step_of, model, batch, args)
        (part / n_real).backward()
        loss = loss + part.detach() / n_real
        terms = terms + part_terms
    loss = float(total(loss))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_at(args))
    norm = float(norm.full_tensor())

    record = train.update(optimizer, loss, norm, step, args)
    record["tokens"] = n_real
    record |= train.named_terms(terms)
    record["ms"] = 1e3 * (time.perf_counter() - start)
    return record


def main() -> None:
    """train.py's main or an extension's, with the functions of all processes in the place of those of one."""
    start()
    flags = [word for word in sys.argv if word in ("--compile", *EXTENSIONS)]
    sys.argv = [word for word in sys.argv if word not in flags]
    command = f"torchrun --nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE', WORLD)} -m released.parallel"
    train.run = partial(run, command=" ".join([command, *flags]), compiled="--compile" in flags)
    train.micro_batches = share
    train.named_terms = lambda terms: named_terms(total(terms))
    checkpoint.save_tensors = save_whole
    extension = [word for word in flags if word in EXTENSIONS]
    if not extension:
        return train.main(build_parser(__doc__))
    chain = importlib.import_module("beyond.chain")
    longest = chain.longest
    chain.longest = lambda bundle: largest(longest(bundle))  # the same number of forwards on each process
    importlib.import_module(extension[0]).main()


if __name__ == "__main__":
    main()
