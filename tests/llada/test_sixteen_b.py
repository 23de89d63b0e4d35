"""A random checkpoint of the released layout, converted and checked; the geometry is a tiny one here."""

import pytest
import torch
from common import caller, tiny_config
from safetensors.torch import load_file, save_file

import convert_weights
from checkpoint import load_model
from llada import sixteen_b


def test_written_converted_and_checked(tmp_path, monkeypatch, capsys):
    """Four layers of width 64 that read bytes."""
    released = tmp_path / "released"
    ours = tmp_path / "ours"
    cfg = tiny_config(vocab_size=320, eos_id=256, mask_id=257, block_length=32, n_last=3, n_rounds=1)
    monkeypatch.setitem(sixteen_b.PRESETS, "llada2.1-mini", cfg)
    run = caller(sixteen_b, monkeypatch, capsys)
    run("write", "--layers", 4, "--out", released)
    weights = dict(convert_weights.survey(released))
    down = [weights[f"model.layers.2.mlp.experts.{e}.down_proj.weight"].float() for e in range(8)]
    assert not torch.equal(down[0], down[1])
    # of std 1 / sqrt(width of a row): 8 x 64 x 32 numbers, so within 1 % or so
    assert torch.cat(down).std() == pytest.approx(32**-0.5, rel=0.05)
    assert weights["model.norm.weight"].unique().tolist() == [1]

    convert_weights.convert(released, ours)
    assert load_model(ours, "cpu", torch.float32).cfg == cfg
    assert "117 released tensors are in their places" in run("check", "--ckpt", ours)

    # two experts are swapped
    path = ours / "model-00004-of-00006.safetensors"
    state = load_file(path)
    name = "layers.2.mlp.down"
    save_file(state | {name: state[name].flip(0)}, path)
    said = run.fails("check", "--ckpt", ours)
    assert f"{name} does not hold what was written as model.layers.2.mlp.experts.0.down_proj" in said
