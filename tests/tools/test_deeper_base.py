"""Bases of another depth. `pytest tests/tools/test_deeper_base.py`"""

import pytest
import torch
from common import caller

import presets
from checkpoint import load_model, read_tensors, weight_files
from model import Model
from tools import deeper_base


@pytest.fixture
def call(monkeypatch, capsys):
    monkeypatch.setitem(presets.PRESETS, "names", presets.PRESETS["names"])  # put back what the script changes
    monkeypatch.setattr(presets, "Model", Model)
    return caller(deeper_base, monkeypatch, capsys)


def test_the_last_layer_twice_is_trained_saved_resumed_and_read(call, tmp_path):
    """Two steps at once and one after the other: the same weights. Both last layers hold the same, and have learned."""
    run = ["--layers", 3, "--twice", "--max_iters", 2, "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]
    call(*run, "--out_dir", tmp_path / "whole")
    call(*run, "--out_dir", tmp_path / "parts", "--stop_at", 1)
    call("--init_from", "resume", "--out_dir", tmp_path / "parts")
    whole = dict(read_tensors(weight_files(tmp_path / "whole")))
    parts = dict(read_tensors(weight_files(tmp_path / "parts")))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)

    last = [name for name in whole if name.startswith("layers.2.")]
    assert last
    for name in last:
        assert torch.equal(whole[name], whole[name.replace("layers.2.", "layers.1.")]), name
    assert not torch.equal(whole["layers.1.attn.proj.weight"], whole["layers.0.attn.proj.weight"])

    model = load_model(tmp_path / "whole", "cpu", torch.float32)
    assert (model.cfg.n_layer, model.cfg.n_expert, model.cfg.d_expert, model.cfg.n_last) == (3, 4, 128, 2)
    assert not model.markers.any()  # a base without Stage B


def test_a_plain_depth_has_layers_of_its_own(call, tmp_path):
    call("--layers", 3, "--max_iters", 1, "--batch_size", 2, "--eval_rows", 2, "--out_dir", tmp_path / "deep")
    tensors = dict(read_tensors(weight_files(tmp_path / "deep")))
    assert not torch.equal(tensors["layers.2.attn.proj.weight"], tensors["layers.1.attn.proj.weight"])
    assert "layers" in call.fails("--layers", 1, "--out_dir", tmp_path / "one")
