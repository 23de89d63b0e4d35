"""Two processes of torchrun give what one gives; what a dying one leaves. `pytest tests/llada/test_parallel.py`"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from common import ROOT, caller, refused
from resuming import end_state, toy_rows

import checkpoint
import train
from llada import parallel

TINY = ["--batch_size", 8, "--device", "cpu"]
# Two processes differ from one by the order in which float32 sums are taken: 6e-8 a term, up to 1e-6 seen in a log.
CLOSE = dict(rel=1e-5, abs=1e-6)
# each process leaves its id where a test can find it, then becomes the script
LEAVE_ID = 'echo $$$$ > "$0.$RANK"; exec "$@"'  # torchrun makes $$ of $$$$


def start(ids: Path, *argv: object) -> subprocess.Popen:
    """torchrun with two processes of `python -m llada.parallel *argv`."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no_python", "--"]
    run += ["sh", "-c", LEAVE_ID, ids, sys.executable, "-m", "llada.parallel", *argv]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(list(map(str, run)), cwd=ROOT, env=env, **pipes)


def tell_the_second(number: int, ids: Path, folder: Path, steps: int) -> None:
    """A signal for process 1, and it alone, once the log has so many lines."""
    log = folder / "log.jsonl"
    for _ in range(6000):
        if log.exists() and log.read_text().count("\n") >= steps:
            os.kill(int(ids.with_suffix(".1").read_text()), number)
            return
        time.sleep(0.05)
    raise TimeoutError


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
    rows = ["--data", toy_rows(tmp_path / "rows", "modes", V=12, m=4, n_ctx=8), *TINY]
    base = ["--init_from", "scratch", "--n_last", 2, "--corruption", "random", "--max_iters", 1]
    caller(train, monkeypatch, capsys)(*rows, *base, "--out_dir", tmp_path / "base")
    return [*rows, "--init_from", tmp_path / "base", "--learning_rate", 1e-4]


def test_one_process_then_two_then_one_is_one_run(toy, tmp_path, monkeypatch, capsys):
    """The clean copy as context, a causal Stage B with LoRA of its own and two rounds; a checkpoint has one layout,
    whoever wrote it. The two stop together, at a step that they agree on, though one of them alone is told to."""
    run = [*toy, "--context", "clean", "--stage_b", "lora", "--causal", "--n_rounds", 2, "--max_iters", 60]
    call = caller(train, monkeypatch, capsys)
    call(*run, "--out_dir", tmp_path / "a")
    process = start(tmp_path / "id", *run, "--out_dir", tmp_path / "b")
    tell_the_second(signal.SIGTERM, tmp_path / "id", tmp_path / "b", 4)
    out, _ = process.communicate(timeout=300)
    assert out.count("saved at step") == 1, out
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "b"]
    again = "go on with: python -m torch.distributed.run --nproc_per_node 2 -m llada.parallel"
    assert f"{again} {' '.join(map(str, resume))}" in out
    call(*resume)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_two_processes_adapt_as_one_does_also_when_one_is_killed(toy, tmp_path, monkeypatch, capsys):
    """Frozen layers in parts, drafts, alpha; and (for two processes only) micro-batches, checkpointed."""
    run = [*toy, "--alpha", 0.5, "--corruption", "draft", "--stage_b", "shared", "--context", "corrupted"]
    run += ["--max_iters", 30, "--eval_interval", 5]
    call = caller(train, monkeypatch, capsys)
    call(*run, "--out_dir", tmp_path / "a")
    more = ["--shard", "--micro_batch", 6, "--checkpointing"]
    process = start(tmp_path / "id", *run, *more, "--out_dir", tmp_path / "b")
    tell_the_second(signal.SIGKILL, tmp_path / "id", tmp_path / "b", 8)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0 and out.count("error: ") == 1, out

    process = start(tmp_path / "id", "--shard", "--init_from", "resume", "--out_dir", tmp_path / "b")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "steps 0.." not in out, out
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_what_is_refused(toy, tmp_path, monkeypatch, capsys):
    """One process, all weights learning, a Stage B with layers of its own in parts, and rows that do not divide."""
    run = [*toy, "--out_dir", tmp_path / "a"]
    assert "start several by torchrun" in refused(parallel, monkeypatch, capsys, *run)
    monkeypatch.setenv("RANK", "0")
    for flags in (["--init_from", "scratch"], ["--lora_r", 0]):
        assert "train adapters" in refused(parallel, monkeypatch, capsys, *run, *flags)
    for stage_b in ("lora", "copy"):
        says = refused(parallel, monkeypatch, capsys, "--shard", *run, "--stage_b", stage_b)
        assert f"--stage_b {stage_b}" in says and "--shard" in says
    for n, word in ((3, "--batch_size 8 does not divide by 3"), (4, "--micro_batch 2 does not divide by 4")):
        monkeypatch.setenv("WORLD_SIZE", str(n))
        assert word in refused(parallel, monkeypatch, capsys, *run, "--micro_batch", 2)
    assert not (tmp_path / "a").exists()
