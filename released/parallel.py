"""train.py on several processes: torchrun starts this command N times, and each has its own rows of a batch.

FSDP2 shards backbone, adapters, markers, gradients and moments, on CPUs over gloo, on GPUs over nccl. Process 0 alone
prints and writes, and its checkpoints are those of one process: a run goes on with any number, also after one has died.
The flags are train.py's: --batch_size counts the rows of all processes. A recipe of one's own takes `Several`, too, if
its step makes the same number of forwards on every process: `train.main(parser, choose, Several())`.

    torchrun --nproc_per_node 8 -m released.parallel --init_from weights/llada2.1-mini --data docs.jsonl --dtype bf16
    torchrun --nproc_per_node 8 -m released.parallel --init_from resume --out_dir out/cocommit
"""

import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import train
from lib.run import Processes
from lib.util import command, fail, pick_device
from model import Model


class Within(nn.Module):
    """A model in which a function may call whatever it likes: prefix, last_n, coordinate, head.

    FSDP gathers a module's parameters when it is called. The model calls its Blocks; the others (embedding, final norm,
    LM head, markers) are this module's, and there all through f and its backward. The chunks of a loss, whose number
    differs between processes, then need no exchange.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, f: Callable, *args: object) -> object:
        return f(*args)


class Several(Processes):
    """The processes that torchrun has started. Every one must come to each exchange equally often."""

    def __init__(self) -> None:
        if "RANK" not in os.environ:
            fail("this is one process: start several by torchrun --nproc_per_node N -m released.parallel")
        self.rank = int(os.environ["RANK"])
        self.n = int(os.environ["WORLD_SIZE"])
        self.launcher = f"torchrun --nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE', self.n)}"
        self.whole: Within | None = None

    def device(self, args: Namespace) -> torch.device:
        """This process's own GPU, or the CPU; and the meeting of all, which have read the same settings by now."""
        if args.batch_size % self.n:
            fail(f"--batch_size {args.batch_size} does not divide by {self.n} processes: give a multiple of {self.n}")
        name = args.device
        if name in ("auto", "cuda") and torch.cuda.is_available():
            name = f"cuda:{os.environ['LOCAL_RANK']}"
        device = pick_device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        patience = timedelta(minutes=30)  # process 0 may write for long
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=patience)
        dist.barrier()  # nothing is written before every process has looked at what is there
        return device

    def cradle(self, device: torch.device) -> torch.device:
        """A model is built or mapped from its files on the CPU, and goes to the device a Block at a time."""
        return torch.device("cpu")

    def place(
        self, model: Model, optimizer: torch.optim.Optimizer, make: Callable, device: torch.device
    ) -> torch.optim.Optimizer:
        """Leave each process its part of every parameter, on `device`, and of its moments."""
        moments = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}

        # Parameters are gathered in the dtype in which they are kept, the backbone's bf16 and the adapters' float32:
        # the layers cast to their input's dtype themselves. Gradients are summed in float32 and not averaged, for the
        # loss is already divided by the tokens of all processes.
        self.whole = Within(model)
        mesh = init_device_mesh(device.type, (self.n,))
        for module in (*model.layers, self.whole):
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no op that divides

        optimizer = make(model)
        for name, p in model.named_parameters():
            for kind, tensor in moments.get(name, {}).items():
                tensor = tensor.to(device)
                if kind != "step":
                    tensor = distribute_tensor(tensor, p.device_mesh, p.placements, src_data_rank=None)
                optimizer.state[p][kind] = tensor
        return optimizer

    def share(self, first: int, n: int) -> tuple[int, int]:
        """As many rows for each; validation rows that do not divide are left out."""
        each = n // self.n
        return first + self.rank * each, each

    def within(self, model: Model, f: Callable, *args: object) -> object:
        return self.whole(f, *args)

    def total(self, t: Tensor) -> Tensor:
        dist.all_reduce(t)
        return t

    def any(self, flag: bool) -> bool:
        t = torch.tensor(int(flag))
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return bool(t)

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: t.detach().full_tensor().cpu() if isinstance(t, DTensor) else t for k, t in tensors.items()}


class NoTerminal(io.TextIOBase):  # stderr, where tqdm draws no bar
    def write(self, text: str) -> int:
        return sys.__stderr__.write(text)


@command
def main() -> None:
    processes = Several()
    with ExitStack() as quiet:
        if processes.rank:
            quiet.enter_context(redirect_stdout(quiet.enter_context(open(os.devnull, "w"))))
            quiet.enter_context(redirect_stderr(NoTerminal()))
        try:
            train.main(processes=processes)
        except RuntimeError as e:
            if not (isinstance(e, dist.DistError) or "gloo" in str(e)):
                raise
            fail("another process is gone; what was saved last is whole: go on with --init_from resume")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()  # or its threads may abort the process as it ends


if __name__ == "__main__":
    main()
