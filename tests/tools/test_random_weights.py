"""Random weights: they can be sampled and adapted like any checkpoint. `pytest tests/tools/test_random_weights.py`"""

import torch
from common import command_line, refused

import sample
import train
from checkpoint import load_model, read_tensors, weight_files
from tools import random_weights


def test_random_weights_of_a_preset_can_be_sampled_and_adapted(tmp_path, monkeypatch, capsys):
    out = tmp_path / "random"
    code, text, err = command_line(random_weights, monkeypatch, capsys, "--dtype", "bf16", "--out", out)
    assert code == 0 and "random parameters in bf16" in text, err
    stored = {name: tensor.dtype for name, tensor in read_tensors(weight_files(out))}
    bias = {name for name in stored if name.endswith("expert_bias")}
    assert bias and {stored[name] for name in bias} == {torch.float32}
    assert {dtype for name, dtype in stored.items() if name not in bias} == {torch.bfloat16}
    run = ["--ckpt", out, "--prompt", "ab", "--gen_length", 8, "--dtype", "bf16", "--device", "cpu"]
    code, text, err = command_line(sample, monkeypatch, capsys, *run)
    assert code == 0 and "8 tokens; forwards: " in text, err
    adapter, words = tmp_path / "adapter", tmp_path / "words.txt"
    words.write_text("a few words to learn from, and a few more\n" * 20)
    run = ["--init_from", out, "--data", words, "--n_last", 2, "--device", "cpu", "--out_dir", adapter]
    run += ["--max_iters", 1, "--batch_size", 1, "--seq_len", 32, "--eval_rows", 1]
    code, _, err = command_line(train, monkeypatch, capsys, *run)
    assert code == 0, err
    assert load_model(out, "cpu", torch.float32, adapter).cfg.n_last == 2


def test_it_does_not_overwrite_a_checkpoint(tmp_path, monkeypatch, capsys):
    assert command_line(random_weights, monkeypatch, capsys, "--out", tmp_path)[0] == 0
    before = (tmp_path / "model.safetensors").read_bytes()
    assert "already holds" in refused(random_weights, monkeypatch, capsys, "--out", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
