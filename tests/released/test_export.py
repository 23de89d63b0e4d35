"""Export: a model of ours, and merged adapters. (There and back: test_convert.) `pytest tests/released`"""

from functools import partial

import pytest
import torch
from common import caller, names_folder, random_adapter, tiny_model
from safetensors import safe_open
from test_convert import GOLDEN, bits

import convert_weights
from checkpoint import load_model, read_tensors, save_model, save_tensors
from layers import ROUTERS
from lib.util import read_json, write_json
from released import export


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(folder)` exports it to tmp_path / "hf" -> what is printed; `run.fails`: its one error."""
    call = caller(export, monkeypatch, capsys)
    run = partial(call, "--to", "hf", "--out", tmp_path / "hf", "--src")
    run.fails = partial(call.fails, "--to", "hf", "--out", tmp_path / "hf", "--src")
    return run


def test_a_model_trained_here_exports_and_converts_back(run, tmp_path):
    ours = names_folder(tmp_path / "ours")  # its sizes are not those that a released config stands for
    run(ours)
    convert_weights.convert(tmp_path / "hf", tmp_path / "back")
    model, back = (load_model(folder, "cpu", torch.float32) for folder in (ours, tmp_path / "back"))
    assert back.cfg == model.cfg
    for k, v in model.state_dict().items():
        assert k == "markers" or torch.equal(v, back.state_dict()[k]), k


def test_lora_is_merged_and_nothing_else_changes(run, golden, tmp_path):
    base = load_model(golden, "cpu", torch.float32)
    model = random_adapter(tmp_path / "adapter", golden, n_last=2, n_rounds=2)
    run(tmp_path / "adapter")
    convert_weights.convert(tmp_path / "hf", tmp_path / "reloaded")
    reloaded = load_model(tmp_path / "reloaded", "cpu", torch.float32)
    assert reloaded.cfg == model.cfg  # n = 2 and K = 2 are the adapter's
    reloaded = reloaded.state_dict()
    for i, layer in enumerate(model.layers):
        assert torch.equal(layer.attn.qkv.weight, base.layers[i].attn.qkv.weight)
        for name, linear in (("qkv", layer.attn.qkv), ("proj", layer.attn.proj)):
            merged = linear.weight + 2.0 * linear.lora_B @ linear.lora_A  # alpha / r = 2
            assert torch.equal(reloaded[f"layers.{i}.attn.{name}.weight"], merged)
    changed = {k for k, v in bits(tmp_path / "hf").items() if v != bits(GOLDEN)[k]}
    assert len(changed) == 8 and all(".query_key_value." in k or ".dense." in k for k in changed)
    with safe_open(tmp_path / "hf" / "markers.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("markers"), model.markers) and f.metadata() == {"n_last": "2"}


def test_what_is_not_exported(run, golden, tmp_path, monkeypatch):
    """A Stage B or a router that is not the paper's, an adapter of another base, and one that would not load."""
    random_adapter(tmp_path / "causal", golden, "causal", n_last=2, n_rounds=1)
    assert "its Stage B is not the paper's" in run.fails(tmp_path / "causal")
    monkeypatch.setitem(ROUTERS, "mine", None)
    save_model(tiny_model(router="mine"), tmp_path / "routed")
    assert "no place for its router, 'mine'" in run.fails(tmp_path / "routed")

    random_adapter(tmp_path / "adapter", golden)
    path = tmp_path / "adapter" / "adapter.safetensors"
    tensors = dict(read_tensors([path]))
    tensors.pop("layers.1.attn.qkv.lora_B")
    save_tensors(path, tensors)
    assert "no such tensor there" in run.fails(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter.json"
    write_json(path, read_json(path, "adapter") | {"base_hash": "another"})
    assert "trained on another model" in run.fails(tmp_path / "adapter")
    assert not (tmp_path / "hf").exists()
