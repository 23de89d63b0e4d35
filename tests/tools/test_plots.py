"""Pictures: numbers under the dial, what is refused, the same bytes twice. `pytest tests/tools/test_plots.py`"""

import json
import sys

import pytest
import torch
from common import approx, command_line, refused, tiny_model

import evaluate
import toy
from checkpoint import save_model
from data import write_json
from tools import plots


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the toy `copy` as train.py leaves them, one nearly independent and one nearly certain."""
    folders = []
    for eps in (0.9, 0.1):
        settings, folder = dict(name="copy", V=3, m=3, n_ctx=2, eps=eps), tmp_path_factory.mktemp("run")
        task = toy.make(**settings)
        size = dict(vocab_size=task.vocab_size, eos_id=task.eos_id, mask_id=task.mask_id, block_length=task.m)
        save_model(tiny_model(tokenizer="toy", **size), folder)
        write_json(folder / "toy.json", settings)
        log = [dict(step=0, loss=3.0), dict(step=1, val=True, block_A=3.5, block_B=3.2), dict(step=2, loss=2.0)]
        (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
        folders.append(folder)
    return folders


def test_the_dial_shows_what_evaluate_measures(runs):
    task, model = evaluate.load_task("copy", str(runs[0])), plots.load_model(runs[0], "cpu", torch.float32)
    decoders = evaluate.evaluate_toy(model, task)["decoders"]
    found = plots.errors(model, task)
    one_step = {name: approx(value["forward_kl"]) for name, value in decoders.items() if "forward_kl" in value}
    assert found == one_step | {"one at a time": found["one at a time"]} and len(found) == 3
    assert plots.read_curve(runs[0] / "log.jsonl") == [dict(step=1, val=True, block_A=3.5, block_B=3.2)]


def test_a_dial_from_the_command_line(runs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    for name in ("a.svg", "b.svg", "a.svg", "c.png"):  # a.svg twice: the user named it, it is written again
        argv = ["dial", "--data", "copy", "--ckpt", *runs, "--out", tmp_path / "new" / name, "--device", "cpu"]
        code, out, err = command_line(plots, monkeypatch, capsys, *argv)
        assert code == 0 and out == f"wrote {tmp_path / 'new' / name}\n", err
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["a.svg", "b.svg", "c.png"]
    picture = (tmp_path / "new" / "a.svg").read_text()
    assert picture == (tmp_path / "new" / "b.svg").read_text()
    for words in ("Stage A, one step", "Stage B, one step", "one at a time", "Stage A", "Stage B"):
        assert f"<!-- {words} -->" in picture


def test_refusals(runs, tmp_path, monkeypatch, capsys):
    """Before anything is measured."""
    dial = ["dial", "--data", "copy", "--ckpt", *runs, "--out"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "factorised").mkdir()
    (tmp_path / "factorised" / "log.jsonl").write_text('{"step": 0}\n')
    monkeypatch.setattr(plots, "errors", None)
    assert "--data" in refused(plots, monkeypatch, capsys, "dial", "--data", "names", "--ckpt", "a", "--out", "a.svg")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert "pip install matplotlib" in refused(plots, without, capsys, *dial, tmp_path / "a.svg")
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    assert ".txt" in refused(plots, monkeypatch, capsys, *dial, tmp_path / "a.txt")
    for folder, words in (("empty", "log.jsonl"), ("factorised", "no validation")):
        argv = ["dial", "--data", "copy", "--ckpt", tmp_path / folder, "--out", tmp_path / "a.svg"]
        assert words in refused(plots, monkeypatch, capsys, *argv)
    other = ["dial", "--data", "pairs", "--ckpt", *runs, "--out", tmp_path / "a.svg"]
    assert "another toy" in refused(plots, monkeypatch, capsys, *other)
    assert not (tmp_path / "a.svg").exists()
