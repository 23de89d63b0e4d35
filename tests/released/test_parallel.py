"""Several processes give what one gives, and what a dying one leaves behind. `pytest tests/released/test_parallel.py`

Every pair of processes is started by torchrun, on the CPU over gloo.
"""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from common import command_line
from safetensors.torch import load_file
from test_benchmarks import write_task

import checkpoint
import train
from beyond import chain, noise
from checkpoint import PRESETS, new_model, save_model
from lib.util import generator
from released import parallel, tables
from released import run as runs

ROOT = Path(__file__).resolve().parent.parent.parent
TOY = ["--data", "modes", "--toy", "V=12", "m=4", "n_ctx=8", "--batch_size", 8, "--eval_rows", 8, "--log_interval", 1]
TOY += ["--device", "cpu"]
# Two processes differ from one by the order in which float32 sums are taken: 6e-8 a term, up to 1e-6 seen in a log.
CLOSE = dict(rel=1e-5, abs=1e-6)
COMMAND = "torchrun --nproc_per_node 2 -m released.parallel"
# each process leaves its id where a test can find it, then becomes the script
LEAVE_ID = 'echo $$$$ > "$0.$RANK"; exec "$@"'  # torchrun makes $$ of $$$$


def start(ids: Path, *argv: object) -> subprocess.Popen:
    """torchrun with two processes of `python -m *argv`."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no_python", "--"]
    run += ["sh", "-c", LEAVE_ID, str(ids), sys.executable, "-m", *map(str, argv)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(run, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def two(tmp_path: Path, *argv: object) -> str:
    process = start(tmp_path / "id", *argv)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


def until(process: subprocess.Popen, words: str) -> None:
    assert any(line.startswith(words) for line in iter(process.stdout.readline, ""))


def log(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "ms"} for r in records]


def assert_same_run(a: Path, b: Path) -> None:
    assert len(log(a)) == len(log(b)) > 0
    for one, other in zip(log(a), log(b), strict=True):
        assert one == pytest.approx(other, **CLOSE)
    files = sorted(p.name for p in a.glob("*.safetensors"))
    assert files == sorted(p.name for p in b.glob("*.safetensors"))
    for name in files:
        one, other = load_file(a / name), load_file(b / name)
        assert {k: (t.shape, t.dtype) for k, t in one.items()} == {k: (t.shape, t.dtype) for k, t in other.items()}


@pytest.fixture
def base(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 1, "--stage_a_only", "--out_dir", tmp_path / "base"]
    assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    return tmp_path / "base"


def test_one_process_then_two_then_one_is_one_run(tmp_path, monkeypatch, capsys):
    """From scratch, the clean copy as context and two rounds; a checkpoint has one layout, whoever wrote it. The two
    stop together, at a step that they agree on, though one of them alone is told to."""
    run = [*TOY, "--context", "clean", "--n_rounds", 2, "--max_iters", 40, "--learning_rate", 1e-4]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 2)[0] == 0
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "b"]
    process = start(tmp_path / "id", "released.parallel", *resume)
    until(process, "step 4/")
    os.kill(int((tmp_path / "id.1").read_text()), signal.SIGTERM)  # process 0 is not told
    out, _ = process.communicate(timeout=60)
    assert out.count("saved at step") == 1 and f"{COMMAND} --init_from resume" in out
    assert command_line(train, monkeypatch, capsys, *resume)[0] == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_two_processes_adapt_as_one_does(base, tmp_path, monkeypatch, capsys):
    """Frozen and trained parameters, drafts, chains whose lengths differ between processes, and (for two processes
    only) micro-batches that do not divide a process's rows, checkpointed."""
    run = [*TOY, "--init_from", base, "--learning_rate", 0.01, "--max_iters", 4, "--eval_interval", 2]
    run += ["--lora", "all", "--beam", 2]
    assert command_line(chain, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    cut = ["--micro_batch", 3, "--checkpointing", "--out_dir", tmp_path / "b"]
    two(tmp_path, "released.parallel", "beyond.chain", *run, *cut)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_killed_process_ends_the_run_which_goes_on_with_one(base, tmp_path, monkeypatch, capsys):
    """An extension whose adapters act in Stage B alone."""
    run = [*TOY, "--init_from", base, "--max_iters", 30, "--learning_rate", 1e-4, "--eval_interval", 5]
    assert command_line(noise, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    process = start(tmp_path / "id", "released.parallel", "beyond.noise", *run, "--out_dir", tmp_path / "b")
    until(process, "step 7/")
    os.kill(int((tmp_path / "id.1").read_text()), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and out.count("error: ") == 1
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "b"]
    assert f"go on with: {COMMAND} beyond.noise {' '.join(map(str, resume))}" in out
    code, out, _ = command_line(noise, monkeypatch, capsys, *resume)
    assert code == 0 and "steps 0.." not in out
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_one_process_is_refused_and_rows_that_do_not_divide(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parallel.join(torch.device("cpu"))
    assert "start several by torchrun" in capsys.readouterr().err
    monkeypatch.setattr(parallel, "WORLD", 3)
    with pytest.raises(SystemExit):
        parallel.join(torch.device("cpu"), batch_size=9, eval_rows=64)
    assert "--eval_rows 64 does not divide by 3 processes" in capsys.readouterr().err
    for n in (3, 6, 12):  # the parts of all processes are the rows, in order, whatever the pieces
        for size in (0, 1, 3, 5):
            rows = []
            for rank in range(3):
                monkeypatch.setattr(parallel, "RANK", rank)
                mine = parallel.share(100, n, Namespace(batch_size=n, micro_batch=size))
                rows += [i for a, k in mine for i in range(a, a + k)]
            assert rows == list(range(100, 100 + n))


def test_the_items_of_a_benchmark_are_shared_out(tmp_path, monkeypatch, capsys):
    save_model(new_model(PRESETS["tiny"], generator("benchmark")), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_id": 256, "mask_id": 257}))
    run = ["--task", "gsm8k", "--task_file", write_task(tmp_path, "gsm8k"), "--ckpt", tmp_path / "model"]
    run += ["--gen_length", 16, "--device", "cpu"]
    assert command_line(runs, monkeypatch, capsys, *run, "--out", tmp_path / "one" / "r.jsonl")[0] == 0
    out = two(tmp_path, "released.run", *run, "--out", tmp_path / "two" / "r.jsonl")
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["r.1of2.jsonl", "r.2of2.jsonl"]
    (one,), (both,) = tables.read_runs(tmp_path / "one"), tables.read_runs(tmp_path / "two")
    strip = lambda run: {k: {f: v for f, v in r.items() if f != "seconds"} for k, r in run.items.items()}  # noqa: E731
    assert strip(one) == strip(both) and len(one.items) == 3
    assert out.count("items in shard 1/2") == out.count(tables.summary(one)) == 1 and "shard 2/2" not in out


def test_compiled_layers_train_alike(tmp_path, monkeypatch, capsys):
    """The graphs that dynamo and autograd make, run without generated code: what a C++ compiler adds is rounding. At a
    small rate, because Adam's first step is the rate times the sign of a gradient, however small that is."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run = [*TOY, "--max_iters", 2, "--learning_rate", 1e-4, "--checkpointing"]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    plain = checkpoint.start

    def compiled(*args):
        model = plain(*args)
        parallel.compile_layers(model)
        return model

    monkeypatch.setattr(checkpoint, "start", compiled)
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b")[0] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_same_run(tmp_path / "a", tmp_path / "b")
