"""Kill -9 a training run and a benchmark run at random moments, go on each time with the documented command, and
compare the end with runs that nobody disturbed.

The two are a toy trained for a few steps, a checkpoint after each of them, and gsm8k's format with a few questions
decoded by a random byte model. Killed anywhere between the start of Python and the last line, they must end in the same
weights, moments and log lines, bit for bit, and in the same records apart from `seconds`. A run that ends before its
turn to be killed is compared, and another one begins. Exits with 1 on a difference.

    python -m tools.survive                 # 20 kills of each, a few minutes on 2 cores
    python -m tools.survive --kills 3
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from checkpoint import PRESETS, new_model, save_model
from lib.util import Parser, generator

ROOT = Path(__file__).resolve().parent.parent
CLOCK = {"ms", "seconds"}  # what a clock says


def run(command: list[str], wait: float | None = None) -> bool:
    """Whether the command came to its end; with `wait`, it is killed -9 after so many seconds."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, err = process.communicate(timeout=wait)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with {process.returncode}: {err}")
    return True


def lines(path: Path) -> list[dict]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in CLOCK} for r in records]


class Training:
    """A toy's short run: first the command, then `--init_from resume` until it is done."""

    def __init__(self, folder: Path, steps: int):
        self.folder = folder
        self.steps = steps

    def command(self, name: str) -> list[str]:
        out = ["--out_dir", str(self.folder / name), "--device", "cpu"]
        if (self.folder / name / "train.json").exists():
            return [sys.executable, "train.py", "--init_from", "resume", *out]
        size = ["--toy", "V=12", "m=4", "n_ctx=8", "--batch_size", "16", "--eval_rows", "16"]
        steps = ["--eval_interval", "1", "--max_iters", str(self.steps)]
        return [sys.executable, "train.py", "--data", "modes", *size, *steps, *out]

    def progress(self, name: str) -> int:
        log = self.folder / name / "log.jsonl"
        if not log.exists():
            return 0
        return log.read_bytes().count(b'"loss"')

    def end(self, name: str) -> tuple[dict, list]:
        run = self.folder / name
        tensors = load_file(run / "state.safetensors")
        for key, tensor in load_file(run / "model.safetensors").items():
            tensors[f"model.{key}"] = tensor
        return tensors, lines(run / "log.jsonl")


class Evaluation:
    """One benchmark over a random model: the same command, again and again."""

    def __init__(self, folder: Path, items: int):
        self.folder = folder
        self.model = folder / "model"
        self.questions = folder / "test.jsonl"
        cfg = replace(PRESETS["tiny"], n_layer=2, n_last=1, vocab_size=272, eos_id=256, mask_id=257)
        save_model(new_model(cfg, generator("survive")), self.model)
        sums = [{"question": f"What is {k} and {k + 1}?", "answer": f"#### {2 * k + 1}"} for k in range(items)]
        self.questions.write_text("".join(json.dumps(s) + "\n" for s in sums))

    def command(self, name: str) -> list[str]:
        what = ["--task", "gsm8k", "--task_file", str(self.questions), "--ckpt", str(self.model), "--gen_length", "32"]
        command = [sys.executable, "-m", "released.run", *what, "--device", "cpu"]
        return [*command, "--out", str(self.folder / f"{name}.jsonl")]

    def progress(self, name: str) -> int:
        out = self.folder / f"{name}.jsonl"
        if not out.exists():
            return 0
        return max(0, out.read_bytes().count(b"\n") - 1)  # the first line holds the settings

    def end(self, name: str) -> tuple[dict, list]:
        return {}, lines(self.folder / f"{name}.jsonl")


def survive(what: Training | Evaluation, kills: int, moments: random.Random) -> tuple[int, int, int]:
    """-> kills that came while steps or items were being written, runs, and runs that ended as the undisturbed one."""
    start = time.perf_counter()
    run(what.command("undisturbed"))
    whole = time.perf_counter() - start
    expected = what.end("undisturbed")

    killed = 0
    at_work = 0
    runs = 0
    same = 0
    while killed < kills:
        runs += 1
        name = f"killed_{runs}"
        done = False
        while not done:
            # after the last kill of all, undisturbed to the end
            wait = None
            if killed < kills:
                wait = moments.uniform(0, whole)
            before = what.progress(name)
            done = run(what.command(name), wait)
            if not done:
                killed += 1
                at_work += what.progress(name) != before
        same += equal(what.end(name), expected)
    return at_work, runs, same


def equal(one: tuple[dict, list], other: tuple[dict, list]) -> bool:
    """The same tensors, bit for bit, and the same lines."""
    tensors, log = one
    expected, expected_log = other
    if tensors.keys() != expected.keys() or log != expected_log:
        return False
    return all(torch.equal(tensors[name], expected[name]) for name in tensors)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of training, and as many of the evaluation (20)")
    parser.add_argument("--length", type=int, default=60, help="training steps; questions are half as many (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    print("run          kills  at work  runs  ends equal to the undisturbed run's")
    lost = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:  # one core each
        both = Training(Path(folder), args.length), Evaluation(Path(folder), args.length // 2)
        ends = pool.map(lambda what: survive(what, args.kills, random.Random(args.seed)), both)
        for what, (at_work, runs, same) in zip(both, ends, strict=True):
            print(f"{type(what).__name__.lower():<12}{args.kills:6}{at_work:9}{runs:6}  {same} of {runs}", flush=True)
            lost += runs - same
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
