"""Export: every byte there and back, merged weights, PEFT's layout. `pytest tests/released/test_export.py`"""

import json
from dataclasses import replace

import pytest
import torch
from common import caller, random_adapter
from safetensors import safe_open
from safetensors.torch import load_file
from test_convert import GOLDEN, INDEX, VARIANTS, bits, released, variant

import convert_weights
from checkpoint import load_model, new_model, save_model
from lib.config import PRESETS
from released import export


@pytest.fixture
def run(monkeypatch, capsys):
    return caller(export, monkeypatch, capsys)


# --- there and back
@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_is_exact(name, run, tmp_path):
    tensors, config = variant(name)
    src = released(tmp_path / "src", tensors, **config)
    convert_weights.convert(src, tmp_path / "ours")
    run("--to", "hf", "--src", tmp_path / "ours", "--out", tmp_path / "back")
    assert bits(tmp_path / "back") == bits(src)
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (src / file).read_bytes()
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors.values())
    for k, file in index["weight_map"].items():
        with safe_open(tmp_path / "back" / file, "pt") as f:
            assert k in f.keys()  # noqa: SIM118 (a safe_open is no dict)
            assert f.metadata() == {"format": "pt"}


def test_a_model_trained_here_exports_and_converts_back(run, tmp_path):
    cfg = replace(PRESETS["tiny"], eos_id=256, mask_id=257)  # the byte tokenizer's, which goes with it as a file
    model = new_model(cfg, torch.Generator().manual_seed(0))
    model.markers.data.fill_(0.5)
    save_model(model, tmp_path / "ours")
    out = run("--to", "hf", "--src", tmp_path / "ours", "--out", tmp_path / "hf")
    markers = load_file(tmp_path / "hf" / "markers.safetensors")["markers"]
    assert "dropped markers" in out and torch.equal(markers, model.markers)
    convert_weights.convert(tmp_path / "hf", tmp_path / "back")
    back = load_model(tmp_path / "back", "cpu", torch.float32)
    assert back.cfg == replace(cfg, tokenizer="bpe")
    for k, v in model.state_dict().items():
        assert k == "markers" or torch.equal(v, back.state_dict()[k]), k


# --- adapters
def test_lora_is_merged_and_nothing_else_changes(run, golden, tmp_path):
    model = random_adapter(tmp_path / "adapter", golden, n_last=2, n_rounds=2)
    run("--to", "hf", "--src", tmp_path / "adapter", "--out", tmp_path / "merged")
    convert_weights.convert(tmp_path / "merged", tmp_path / "reloaded")
    reloaded = load_model(tmp_path / "reloaded", "cpu", torch.float32).state_dict()
    for i, layer in enumerate(model.layers):
        for name, linear in (("qkv", layer.attn.qkv), ("proj", layer.attn.proj)):
            merged = linear.weight + 2.0 * linear.lora_B @ linear.lora_A  # alpha / r = 2
            assert torch.equal(reloaded[f"layers.{i}.attn.{name}.weight"], merged)
    changed = {k for k, v in bits(tmp_path / "merged").items() if v != bits(GOLDEN)[k]}
    assert len(changed) == 8 and all(".query_key_value." in k or ".dense." in k for k in changed)
    with safe_open(tmp_path / "merged" / "markers.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("markers"), model.markers) and f.metadata() == {"n_last": "2"}


def test_peft_layout(run, golden, tmp_path):
    model = random_adapter(tmp_path / "adapter", golden, n_last=2, n_rounds=2)
    run("--to", "peft", "--src", tmp_path / "adapter", "--out", tmp_path / "peft")
    state = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(state) == 16
    prefix = "base_model.model.model.layers.3.attention"
    assert torch.equal(state[f"{prefix}.query_key_value.lora_A.weight"], model.layers[3].attn.qkv.lora_A)
    assert torch.equal(state[f"{prefix}.dense.lora_B.weight"], model.layers[3].attn.proj.lora_B)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and (config["r"], config["lora_alpha"]) == (4, 8)
    assert sorted(config["target_modules"]) == ["dense", "query_key_value"] and "layers_to_transform" not in config
    assert torch.equal(load_file(tmp_path / "peft" / "markers.safetensors")["markers"], model.markers)


def test_what_is_not_exported(run, golden, tmp_path):
    """A head, an adapter of Stage B alone, and one of another base."""
    random_adapter(tmp_path / "adapter", golden, n_last=2, n_rounds=2)
    path = tmp_path / "adapter" / "adapter.json"
    settings = json.loads(path.read_text())
    for change, says in (
        ({"head": {"module": "beyond.head"}}, "is a head"),
        ({"lora_in_stage_b_alone": True}, "in Stage B only"),
        ({"base_fingerprint": "another"}, "another"),
    ):
        path.write_text(json.dumps(settings | change))
        for to in ("hf", "peft"):
            assert says in run.fails("--to", to, "--src", tmp_path / "adapter", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
