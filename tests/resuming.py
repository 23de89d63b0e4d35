"""Runs of train.py, or of another script with its loop: one that is stopped, and what it has come to."""

import json
import signal

import torch
from common import command_line
from safetensors.torch import load_file

import train


def end_state(folder) -> tuple[dict, list[dict]]:
    """What it would resume from, and its log without the clock."""
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return load_file(folder / "state.safetensors"), [{k: v for k, v in r.items() if k != "ms"} for r in log]


def stopped(step: int, script, monkeypatch, capsys, *argv) -> str:
    """What a run prints that gets Ctrl-C in this step."""
    report = train.report

    def then_interrupt(record, *rest, **how):
        report(record, *rest, **how)
        if record["step"] == step - 1 and "loss" in record:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(train, "report", then_interrupt)
        code, out, err = command_line(script, monkeypatch, capsys, *argv)
    assert code == 130, err
    return out


def assert_same_end(a, b) -> None:
    (tensors_a, log_a), (tensors_b, log_b) = end_state(a), end_state(b)
    assert log_a == log_b and tensors_a.keys() == tensors_b.keys()
    assert all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)
