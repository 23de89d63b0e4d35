"""Export: a model of ours, and merged adapters. (There and back: test_convert.) `pytest tests/released`"""

import re
from dataclasses import asdict, fields

import pytest
import torch
from common import byte_model, caller, merged_spec, random_adapter
from safetensors import safe_open
from test_convert import GOLDEN, bits

import convert_weights
from checkpoint import load_model, save_model
from config import Config
from layers import ROUTERS
from lib.util import write_json
from released import export


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(folder)` exports it to tmp_path / "hf" -> what is printed; `run.fails`: its one error."""
    return caller(export, monkeypatch, capsys, "--to", "hf", "--out", tmp_path / "hf", "--src")


def test_every_field_of_config_comes_back_or_is_refused(run, tmp_path, monkeypatch):
    """A model trained here whose config has another value in every field; then what the released format lacks."""
    other = dict(n_layer=5, n_head=8, n_kv_head=4, n_embd=72, head_dim=24, vocab_size=288, d_dense=40, n_dense=4)
    other |= dict(d_expert=24, n_expert=12, n_active=3, n_group=2, topk_group=1, n_shared=2, routed_scaling=1.5)
    other |= dict(eos_id=262, mask_id=261, rope_theta=7.0, rotary_dim=6, norm_eps=1e-5, max_len=96, window=64)
    other |= dict(block_length=4, qkv_bias=True, proj_bias=True, tied=True, n_last=1, n_rounds=1, decoder="left")
    refused = dict(router="mine", stage_b="causal", int8=True)
    assert other.keys() | refused.keys() == {field.name for field in fields(Config)}
    spec = merged_spec()
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 262, "content": "[END]"})
    model = byte_model(**other)
    save_model(model, tmp_path / "ours")
    write_json(tmp_path / "ours" / "tokenizer.json", spec)
    run(tmp_path / "ours")
    convert_weights.convert(tmp_path / "hf", tmp_path / "back")
    back = load_model(tmp_path / "back", "cpu", torch.float32)
    assert back.cfg == model.cfg
    assert all(torch.equal(v, back.state_dict()[k]) for k, v in model.state_dict().items() if k != "markers")
    monkeypatch.setitem(ROUTERS, "mine", ROUTERS[Config.router])
    for name, value in refused.items():
        write_json(tmp_path / "ours" / "config.json", asdict(model.cfg) | {name: value})
        assert f"no place for its {name}, {value!r}" in run.fails(tmp_path / "ours")


@pytest.mark.parametrize(("name", "merged_names", "n"), [
    ("golden_a", r"query_key_value|attention\.dense", 8), ("golden_a2d", r"self_attn\.[qkvo]_proj", 12),
])  # fmt: skip
def test_lora_is_merged_and_nothing_else_changes(name, merged_names, n, run, tmp_path):
    released = GOLDEN.parent / name
    golden = tmp_path / "ours"
    convert_weights.convert(released, golden)
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
    changed = {k for k, v in bits(tmp_path / "hf").items() if v != bits(released)[k]}
    assert len(changed) == n and all(re.search(merged_names, k) for k in changed)
    with safe_open(tmp_path / "hf" / "markers.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("markers"), model.markers) and f.metadata() == {"n_last": "2"}
