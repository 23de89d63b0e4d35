"""Export: a model of ours, and merged adapters. (There and back: test_convert.) `pytest tests/llada/test_export.py`"""

from dataclasses import replace

import pytest
import torch
from common import caller, random_adapter
from safetensors import safe_open
from test_convert import GOLDEN, bits

import convert_weights
from checkpoint import PRESETS, load_model, new_model, save_model
from lib.util import generator, read_json, write_json
from llada import export


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(folder)` exports it to tmp_path / "hf" -> what is printed."""
    call = caller(export, monkeypatch, capsys)
    run = lambda src: call("--to", "hf", "--src", src, "--out", tmp_path / "hf")  # noqa: E731
    run.fails = lambda src: call.fails("--to", "hf", "--src", src, "--out", tmp_path / "hf")
    return run


def test_a_model_trained_here_exports_and_converts_back(run, tmp_path):
    cfg = replace(PRESETS["tiny"], eos_id=256, mask_id=257)  # the byte tokenizer's, which goes with it as a file
    model = new_model(cfg, generator("export"))
    model.markers.data.fill_(0.5)
    save_model(model, tmp_path / "ours")
    assert "dropped markers" in run(tmp_path / "ours")
    with safe_open(tmp_path / "hf" / "markers.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("markers"), model.markers)
    convert_weights.convert(tmp_path / "hf", tmp_path / "back")
    back = load_model(tmp_path / "back", "cpu", torch.float32)
    assert back.cfg == replace(cfg, tokenizer="bpe")
    for k, v in model.state_dict().items():
        assert k == "markers" or torch.equal(v, back.state_dict()[k]), k


@pytest.mark.parametrize("depth", [1, 2])
def test_lora_is_merged_and_nothing_else_changes(depth, run, golden, tmp_path):
    """Also of an adapter on an adapter: where the second is read, the first is in the weights already."""
    base = load_model(golden, "cpu", torch.float32)
    random_adapter(tmp_path / "1", golden, n_last=2, n_rounds=2)
    random_adapter(tmp_path / "2", tmp_path / "1")
    model = load_model(tmp_path / str(depth), "cpu", torch.float32)
    run(tmp_path / str(depth))
    convert_weights.convert(tmp_path / "hf", tmp_path / "reloaded")
    reloaded = load_model(tmp_path / "reloaded", "cpu", torch.float32).state_dict()
    for i, layer in enumerate(model.layers):
        assert torch.equal(layer.attn.qkv.weight, base.layers[i].attn.qkv.weight) == (depth == 1)
        for name, linear in (("qkv", layer.attn.qkv), ("proj", layer.attn.proj)):
            merged = linear.weight + 2.0 * linear.lora_B @ linear.lora_A  # alpha / r = 2
            assert torch.equal(reloaded[f"layers.{i}.attn.{name}.weight"], merged)
    changed = {k for k, v in bits(tmp_path / "hf").items() if v != bits(GOLDEN)[k]}
    assert len(changed) == 8 and all(".query_key_value." in k or ".dense." in k for k in changed)
    with safe_open(tmp_path / "hf" / "markers.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("markers"), model.markers) and f.metadata() == {"n_last": "2"}


def test_what_is_not_exported(run, golden, tmp_path):
    """An adapter that acts in Stage B alone, and an adapter of another base."""
    random_adapter(tmp_path / "adapter", golden, n_last=2, n_rounds=2)
    path = tmp_path / "adapter" / "adapter.json"
    about = read_json(path, "adapter")
    for change, says in (({"lora_in": "stage_b"}, "in Stage B only"), ({"base_fingerprint": "another"}, "another")):
        write_json(path, about | change)
        assert says in run.fails(tmp_path / "adapter")
    assert not (tmp_path / "hf").exists()
