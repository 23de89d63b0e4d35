"""Export: every byte there and back, merged weights, PEFT's layout, and every refusal by name.

pytest tests/released/test_export.py        # CPU, seconds; the golden checkpoint is tests/data/golden_a
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import caller, command_line, random_ids
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_convert import GOLDEN, INDEX, VARIANTS, bits, released, variant

import convert_weights
from checkpoint import PRESETS, load_model, new_model, save_adapter, save_model
from lib.util import generator
from model import sequence_context
from released import export


@pytest.fixture
def run(monkeypatch, capsys):
    call = caller(export, monkeypatch, capsys)
    call.convert = lambda *args: command_line(convert_weights, monkeypatch, capsys, *args)
    return call


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """The golden checkpoint in our layout."""
    folder = tmp_path_factory.mktemp("golden") / "ours"
    convert_weights.convert(GOLDEN, folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# there and back


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_is_exact(name, run, tmp_path):
    tensors, config = variant(name)
    src = released(tmp_path / "src", tensors, **config)
    assert run.convert("--src", src, "--out", tmp_path / "ours")[0] == 0
    run("--to", "hf", "--src", tmp_path / "ours", "--out", tmp_path / "back")
    assert bits(tmp_path / "back") == bits(src)
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (src / file).read_bytes()
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors.values())
    for k, file in index["weight_map"].items():
        with safe_open(tmp_path / "back" / file, "pt") as f:
            assert k in f.keys()  # noqa: SIM118 (a safe_open is no dict)


def test_a_model_trained_here_exports_and_converts_back(run, tmp_path):
    cfg = replace(PRESETS["tiny"], eos_id=256, mask_id=257)  # the byte tokenizer's, which goes with it as a file
    model = new_model(cfg, torch.Generator().manual_seed(0))
    model.markers.data.fill_(0.5)
    save_model(model, tmp_path / "ours")
    out = run("--to", "hf", "--src", tmp_path / "ours", "--out", tmp_path / "hf")
    markers = load_file(tmp_path / "hf" / "markers.safetensors")["markers"]
    assert "dropped markers" in out and torch.equal(markers, model.markers)
    run.convert("--src", tmp_path / "hf", "--out", tmp_path / "back")
    back = load_model(tmp_path / "back", "cpu", torch.float32)
    assert back.cfg == replace(cfg, tokenizer="bpe")
    for k, v in model.state_dict().items():
        assert k == "markers" or torch.equal(v, back.state_dict()[k]), k


# ---------------------------------------------------------------------------------------------------------------------
# adapters


@pytest.fixture
def adapter(ours, tmp_path):
    """(a folder as train.py writes it, with random LoRA and markers; the model with it)."""
    model = load_model(ours, "cpu", torch.float32, n_last=2, n_rounds=2).eval()
    model.add_lora(4, 8, generator("lora"))
    for name, p in model.named_parameters():
        if "lora_" in name or name == "markers":
            p.data.copy_(torch.randn(p.shape, generator=generator("adapter", name)) * 0.1)
    save_adapter(model, tmp_path / "adapter", {"base": str(ours), "lora_r": 4, "lora_alpha": 8})
    return tmp_path / "adapter", model


def extend(folder: Path, extension: str) -> None:
    """Make the adapter one of an extension, its LoRA in the last two of four layers."""
    settings = json.loads((folder / "adapter.json").read_text())
    (folder / "adapter.json").write_text(json.dumps(settings | {"extension": extension}))
    state = load_file(folder / "adapter.safetensors")
    kept = {k: v for k, v in state.items() if not k.startswith(("layers.0.", "layers.1."))}
    save_file(kept, folder / "adapter.safetensors")


def test_merged_export_has_the_logits_of_the_adapter(run, ours, adapter, tmp_path):
    folder, model = adapter
    run("--to", "hf", "--src", ours, "--adapter", folder, "--out", tmp_path / "merged")
    run.convert("--src", tmp_path / "merged", "--out", tmp_path / "reloaded")
    reloaded = load_model(tmp_path / "reloaded", "cpu", torch.float32).eval()
    base = load_model(ours, "cpu", torch.float32).eval()
    ids = random_ids(2, 64)
    context = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)
    with torch.no_grad():
        want, got, without = model(ids, context), reloaded(ids, context), base(ids, context)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert (want - without).abs().max() > 0.1
    for i, layer in enumerate(model.layers):
        for name, linear in (("qkv", layer.attn.qkv), ("proj", layer.attn.proj)):
            merged = linear.weight + 2.0 * linear.lora_B @ linear.lora_A  # alpha / r = 2
            assert torch.equal(reloaded.state_dict()[f"layers.{i}.attn.{name}.weight"], merged)
    changed = {k for k, v in bits(tmp_path / "merged").items() if v != bits(GOLDEN)[k]}
    assert len(changed) == 8 and all(".query_key_value." in k or ".dense." in k for k in changed)
    with safe_open(tmp_path / "merged" / "markers.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("markers"), model.markers) and f.metadata() == {"n_last": "2"}


def test_peft_layout(run, adapter, tmp_path):
    folder, model = adapter
    run("--to", "peft", "--adapter", folder, "--out", tmp_path / "peft", "--src", "LLaDA2.1-mini")
    state = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(state) == 16
    prefix = "base_model.model.model.layers.3.attention"
    assert torch.equal(state[f"{prefix}.query_key_value.lora_A.weight"], model.layers[3].attn.qkv.lora_A)
    assert torch.equal(state[f"{prefix}.dense.lora_B.weight"], model.layers[3].attn.proj.lora_B)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == ["query_key_value", "dense"] and config["layers_to_transform"] is None
    assert config["base_model_name_or_path"] == "LLaDA2.1-mini"
    assert torch.equal(load_file(tmp_path / "peft" / "markers.safetensors")["markers"], model.markers)


def test_an_adapter_of_stage_b_alone_goes_to_peft_but_not_into_the_weights(run, ours, adapter, tmp_path):
    folder, _ = adapter
    extend(folder, "beyond.stage_b_only")
    line = run.fails("--to", "hf", "--src", ours, "--adapter", folder, "--out", tmp_path / "merged")
    assert "in Stage B only" in line and not (tmp_path / "merged").exists()
    assert "in Stage B only" in run("--to", "peft", "--adapter", folder, "--out", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["layers_to_transform"] == [2, 3] and config["layers_pattern"] == "layers"
    assert len(load_file(tmp_path / "peft" / "adapter_model.safetensors")) == 8
    with safe_open(tmp_path / "peft" / "markers.safetensors", "pt") as f:
        assert f.metadata() == {"n_last": "2", "extension": "beyond.stage_b_only"}


def test_an_adapter_of_another_extension_goes_nowhere(run, ours, adapter, tmp_path):
    folder, _ = adapter
    extend(folder, "beyond.noise")
    for to in (["hf", "--src", ours], ["peft"]):
        line = run.fails("--to", *to, "--adapter", folder, "--out", tmp_path / "out")
        assert "made by beyond.noise" in line and not (tmp_path / "out").exists()


def test_refused_adapters(run, ours, adapter, tmp_path):
    folder, _ = adapter
    out = ("--to", "hf", "--out", tmp_path / "merged", "--src", ours, "--adapter")
    assert "no adapter" in run.fails(*out, tmp_path / "nowhere")
    other = load_model(ours, "cpu", torch.float32)
    other.wte.weight.data[0] += 1
    save_model(other, tmp_path / "other")
    line = run.fails("--to", "hf", "--out", tmp_path / "merged", "--src", tmp_path / "other", "--adapter", folder)
    assert "wrong --ckpt" in line and str(tmp_path / "other") in line
    settings = json.loads((folder / "adapter.json").read_text())
    (folder / "adapter.json").write_text(json.dumps(settings | {"lora_r": 5}))
    assert "not of rank 5" in run.fails(*out, folder)
    (folder / "adapter.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "lora_alpha"}))
    assert "lora_alpha is missing" in run.fails(*out, folder)
    (folder / "adapter.json").write_text(json.dumps(settings | {"model": settings["model"] | {"n_layer": 5}}))
    assert "layers.4.attn.proj.lora_A is missing" in run.fails(*out, folder)
    (folder / "adapter.json").write_text(json.dumps(settings))
    whole = load_file(folder / "adapter.safetensors")
    save_file(whole | {"noise": torch.zeros(16, 64)}, folder / "adapter.safetensors")
    assert "noise is unexpected" in run.fails(*out, folder)
    state = {k: torch.zeros(4, 5) if k.endswith("lora_A") else v for k, v in whole.items()}
    save_file(state, folder / "adapter.safetensors")
    assert "[128, 5], " in run.fails(*out, folder)
    assert not (tmp_path / "merged").exists()


# ---------------------------------------------------------------------------------------------------------------------
# output folders and flags


def test_an_interrupted_export_is_no_checkpoint_and_runs_again(run, ours, tmp_path, monkeypatch):
    out, write = tmp_path / "out", convert_weights.write_shard

    def stop(path, tensors):
        if "00004-of" in path.name:
            raise KeyboardInterrupt
        write(path, tensors)

    monkeypatch.setattr(convert_weights, "write_shard", stop)
    assert "interrupted" in run.fails("--to", "hf", "--src", ours, "--out", out)
    assert len(list(out.iterdir())) == 3
    monkeypatch.setattr(convert_weights, "write_shard", write)
    run("--to", "hf", "--src", ours, "--out", out)
    assert bits(out) == bits(GOLDEN) and (out / "config.json").exists()


@pytest.mark.parametrize(
    "args, says",
    [
        ([], "--to"),
        (["--to", "hf", "--out", "x"], "--src"),
        (["--to", "hf", "--src", GOLDEN], "--out"),
        (["--to", "peft", "--out", "x"], "--adapter"),
        (["--to", "onnx", "--src", GOLDEN, "--out", "x"], "onnx"),
        (["--to", "hf", "--src", "nowhere", "--out", "x"], "nowhere"),
        (["--to", "hf", "--src", GOLDEN, "--out", "x"], "released checkpoint"),
    ],
)
def test_wrong_flags(args, says, run):
    assert says in run.fails(*args)
    assert not Path("x").exists()


def test_an_export_does_not_write_over_a_checkpoint(run, ours):
    before = {p.name: p.stat().st_mtime_ns for p in ours.iterdir()}
    assert "already holds" in run.fails("--to", "hf", "--src", ours, "--out", ours)
    assert before == {p.name: p.stat().st_mtime_ns for p in ours.iterdir()}
