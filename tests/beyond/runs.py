"""A base for the extensions to train on, and Python text with spans to fill."""

from common import caller

import train
from lib.data import is_validation

SOURCE = "class A:\n    def double(self, x):\n        return 2 * x\n\n\ndef f(a, b):\n    # add\n    return a + b\n"
TOY = ["--data", "pairs", "--toy", "V=3", "m=4", "--batch_size", 4, "--device", "cpu"]


def a_base(folder, monkeypatch, capsys):
    """A base of the toy, two steps old."""
    run = [*TOY, "--init_from", "scratch", "--stage_a_only", "--max_iters", 2, "--out_dir", folder / "base"]
    caller(train, monkeypatch, capsys)(*run)
    return folder / "base"


def held_out_text(folder):
    """A folder of held-out files, each with two functions."""
    folder.mkdir()
    for name in [n for n in (f"{i}.py" for i in range(200)) if is_validation(n)]:
        (folder / name).write_text(SOURCE)
    return folder
