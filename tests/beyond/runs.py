"""A base of a toy for the extensions to train on, and a run of theirs that is stopped and goes on."""

from common import caller
from resuming import assert_same_end, stopped

import train

TOY = ["--data", "pairs", "--toy", "V=3", "m=4", "--batch_size", 4, "--device", "cpu"]


def a_base(folder, monkeypatch, capsys):
    """A base of the toy, two steps old."""
    run = [*TOY, "--init_from", "scratch", "--stage_a_only", "--max_iters", 2, "--out_dir", folder / "base"]
    caller(train, monkeypatch, capsys)(*run)
    return folder / "base"


def resumes(script, command, run, folder, monkeypatch, capsys):
    """Four steps in folder/whole, and bit for bit as many in folder/parts, interrupted after two.

    command: what stands before the flags, ["train"], or nothing.
    """
    call = caller(script, monkeypatch, capsys)
    run = [*command, *run, "--max_iters", 4]
    call(*run, "--out_dir", folder / "whole")
    out = stopped(2, script, monkeypatch, capsys, *run, "--out_dir", folder / "parts")
    name = " ".join(["-m", script.__name__, *command])
    assert f"saved at step 2 of 4; go on with: python {name} --init_from resume" in out

    # train.py would go on with another step
    refused = caller(train, monkeypatch, capsys).fails("--init_from", "resume", "--out_dir", folder / "parts")
    assert f"python {name} --init_from resume" in refused

    call(*command, "--init_from", "resume", "--out_dir", folder / "parts")
    assert_same_end(folder / "whole", folder / "parts")
