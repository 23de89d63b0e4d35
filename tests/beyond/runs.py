"""Training runs of the extensions in this process: one that is stopped and goes on, against one that is not. Python
text with spans to fill."""

from common import caller, command_line
from resuming import assert_same_end, stopped

import train
from lib.data import is_validation

SOURCE = "class A:\n    def double(self, x):\n        return 2 * x\n\n\ndef f(a, b):\n    # add\n    return a + b\n"
TOY = ["--data", "pairs", "--toy", "V=3", "m=4", "--batch_size", 4, "--device", "cpu"]


def a_base(folder, monkeypatch, capsys):
    """A base of the toy, two steps old."""
    run = [*TOY, "--init_from", "scratch", "--stage_a_only", "--max_iters", 2, "--out_dir", folder / "base"]
    code, _, err = command_line(train, monkeypatch, capsys, *run)
    assert code == 0, err
    return folder / "base"


def goes_on_bit_for_bit(script, run, folder, monkeypatch, capsys) -> None:
    """Four steps in folder/whole; as many in folder/parts, interrupted after two."""
    call = caller(script, monkeypatch, capsys)
    run = [*run, "--max_iters", 4]
    call(*run, "--out_dir", folder / "whole")
    out = stopped(2, script, monkeypatch, capsys, *run, "--out_dir", folder / "parts")
    assert f"saved at step 2 of 4; go on with: python {script.__name__}" in out
    call("--init_from", "resume", "--out_dir", folder / "parts")
    assert_same_end(folder / "whole", folder / "parts")


def held_out_text(folder):
    """A folder of held-out files, each with two functions."""
    folder.mkdir()
    for name in [n for n in (f"{i}.py" for i in range(200)) if is_validation(n)]:
        (folder / name).write_text(SOURCE)
    return folder
