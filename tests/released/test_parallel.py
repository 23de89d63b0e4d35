"""Two processes, as torchrun starts them, give what one gives; what a dying one leaves.
`pytest tests/released/test_parallel.py`
"""

import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from common import caller
from resuming import end_state, toy_rows

import checkpoint
import train
from released import parallel

# Two processes differ from one by the order in which float32 sums are taken: 6e-8 a term, up to 1e-6 seen in a log.
CLOSE = dict(rel=1e-5, abs=1e-6)
# processes are forked from one that has imported everything, and trained nothing
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["released.parallel"])
EVAL_ROWS = 16  # in a validation


def work(rank: int, port: int, said: Path, argv: list[str], dies: tuple[int, int]) -> None:
    """One of two processes of torchrun, which leaves its words in a file. dies: process 1 gets such a signal behind
    such a step."""
    os.environ |= dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    sys.argv = ["parallel.py", *argv]
    sys.stdout = sys.stderr = said.open("a", buffering=1)
    report = train.report

    def then_die(record, *rest, **how):
        report(record, *rest, **how)
        number, step = dies
        if rank == 1 and record["step"] == step:
            os.kill(os.getpid(), number)

    train.report = then_die
    train.EVAL_ROWS = EVAL_ROWS
    parallel.main()


def two(folder: Path, *argv: object, dies: tuple[int, int] = (0, -1)) -> tuple[list[int], str]:
    """`torchrun --nproc_per_node 2 -m released.parallel *argv` -> the two exit codes, and what is printed."""
    said = folder / "said.txt"
    said.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = [SERVER.Process(target=work, args=(rank, port, said, list(map(str, argv)), dies)) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
    return [process.exitcode for process in both], said.read_text()


def assert_same_run(a: Path, b: Path) -> None:
    (state, log), (other_state, other_log) = end_state(a), end_state(b)
    assert len(log) == len(other_log) > 0
    for one, other in zip(log, other_log, strict=True):
        assert one == pytest.approx(other, **CLOSE)
    assert {k: (t.shape, t.dtype) for k, t in state.items()} == {k: (t.shape, t.dtype) for k, t in other_state.items()}
    checkpoint.load_model(b, "cpu", torch.float32)


@pytest.fixture
def toy(tmp_path, monkeypatch, capsys) -> list:
    """Flags of a run on a toy, from a base that has just begun to learn it."""
    rows = ["--data", toy_rows(tmp_path / "rows", "modes", V=12, m=4, n_ctx=8), "--batch_size", 8, "--device", "cpu"]
    base = ["--init_from", "scratch", "--n_last", 2, "--corruption", "random", "--max_iters", 1]
    monkeypatch.setattr(train, "EVAL_ROWS", EVAL_ROWS)
    caller(train, monkeypatch, capsys)(*rows, *base, "--out_dir", tmp_path / "base")
    return [*rows, "--init_from", tmp_path / "base", "--learning_rate", 1e-4, "--max_iters", 6]


def test_one_process_then_two_then_one_is_one_run(toy, tmp_path, monkeypatch, capsys):
    """Causal Stage B, whose layers are its own; a checkpoint has one layout, whoever wrote it. The two stop together,
    at a step that they agree on, though one of them alone is told to."""
    run = [*toy, "--stage_b", "causal"]
    call = caller(train, monkeypatch, capsys)
    call(*run, "--out_dir", tmp_path / "a")
    codes, said = two(tmp_path, *run, "--out_dir", tmp_path / "b", dies=(signal.SIGTERM, 2))
    assert codes == [130, 130] and said.count("saved at step 3 of 6") == 1, said
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "b"]
    again = "go on with: python -m torch.distributed.run --nproc_per_node 2 -m released.parallel"
    assert f"{again} {' '.join(map(str, resume))}" in said
    call(*resume)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_two_processes_adapt_as_one_does_also_when_one_is_killed(toy, tmp_path, monkeypatch, capsys):
    """Frozen layers in parts, drafts, two rounds; and (for two processes only) micro-batches, checkpointed."""
    run = [*toy, "--n_rounds", 2, "--eval_interval", 2]
    caller(train, monkeypatch, capsys)(*run, "--out_dir", tmp_path / "a")
    more = ["--shard", "--micro_batch", 6, "--checkpointing"]
    codes, said = two(tmp_path, *run, *more, "--out_dir", tmp_path / "b", dies=(signal.SIGKILL, 2))
    assert codes == [2, -signal.SIGKILL] and said.count("error: another process is gone") == 1, said

    codes, said = two(tmp_path, "--shard", "--init_from", "resume", "--out_dir", tmp_path / "b")
    assert codes == [0, 0] and "steps 2..6" in said, said
    assert_same_run(tmp_path / "a", tmp_path / "b")
