"""Runs of train.py and base.py: rows for them, one that is stopped and goes on, and what it has come to."""

import json
import shlex
import signal
from pathlib import Path

import numpy as np
import torch
from common import byte_spec, caller, command_line
from safetensors.torch import load_file

import toy
import train
from lib.rows import Meta, write_meta, write_rows
from lib.util import write_json


# --- rows
def toy_rows(folder: Path) -> Path:
    """A toy's prepared folder: 64 rows to train on."""
    toy.write_toy(folder, "pairs", dict(V=3, m=2), rows=64, seed=0)
    return folder


def byte_rows(folder: Path, prompt: int = 0, judge: dict | None = None) -> Path:
    """A prepared folder of 40 short texts in random letters, read as bytes."""
    g = np.random.default_rng(0)
    documents = [np.append(g.integers(97, 123, g.integers(3, 60)), 256) for _ in range(40)]
    for split in ("train", "val"):
        write_rows(folder, split, documents, [prompt] * len(documents), 272)
    write_json(folder / "tokenizer.json", byte_spec())
    write_meta(folder, Meta(vocab_size=272, eos_id=256, mask_id=257, n_plain=256, judge=judge))
    return folder


# --- runs
def end_state(folder) -> tuple[dict, list[dict]]:
    """What a run would resume from, and its log without times."""
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return load_file(folder / "state.safetensors"), [{k: v for k, v in r.items() if k != "ms"} for r in log]


def stopped(step: int, script, monkeypatch, capsys, *argv) -> str:
    """What a run prints if it gets Ctrl-C in this step."""
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


def assert_resumes(script, folder, monkeypatch, capsys, *argv) -> Path:
    """A run that was stopped ends bit for bit as a run that was not -> the folder of the latter."""
    whole, halved = folder / "whole", folder / "with a blank"
    call = caller(script, monkeypatch, capsys)
    assert "done; what it does now" in call(*argv, "--out_dir", whole)

    # Ctrl-C in the second step, then the very line that the run prints
    out = stopped(2, script, monkeypatch, capsys, *argv, "--out_dir", halved)
    name, *again = shlex.split(out.split("go on with: python ")[1].splitlines()[0])
    assert "saved at step 2 of" in out and name == f"{script.__name__}.py"
    call(*again)
    assert_same_end(whole, halved)
    return whole
