"""Training runs of the extensions in this process: one that is stopped and goes on, against one that is not. Python
text with spans to fill."""

import json
import signal

import torch
from common import command_line
from safetensors.torch import load_file

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


def steps_of(folder) -> list[dict]:
    """The log without its clock."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "ms"} for line in lines]


def goes_on_bit_for_bit(script, run, folder, monkeypatch, capsys) -> None:
    """Four steps in folder/whole; as many in folder/parts, interrupted after two."""
    run = [*run, "--max_iters", 4]
    code, _, err = command_line(script, monkeypatch, capsys, *run, "--out_dir", folder / "whole")
    assert code == 0, err

    report = train.report

    def interrupted(record, *rest, **how):
        report(record, *rest, **how)
        if record["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(train, "report", interrupted)
        code, out, _ = command_line(script, monkeypatch, capsys, *run, "--out_dir", folder / "parts")
    resume = ["--init_from", "resume", "--out_dir", folder / "parts"]
    assert code == 130 and f"saved at step 2 of 4; go on with: python {script.__name__}" in out
    code, _, err = command_line(script, monkeypatch, capsys, *resume)
    assert code == 0, err

    whole, parts = (load_file(folder / name / "state.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[k], parts[k]) for k in whole)
    assert steps_of(folder / "whole") == steps_of(folder / "parts")


def held_out_text(folder):
    """A folder of held-out files, each with two functions."""
    folder.mkdir()
    for name in [n for n in (f"{i}.py" for i in range(200)) if is_validation(n)]:
        (folder / name).write_text(SOURCE)
    return folder
