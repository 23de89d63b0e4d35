"""The base of names: what a row may read in training, which positions are masks, and how a stopped run goes on."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from beyond import names_base
from checkpoint import PRESETS, load_model, new_model
from lib.util import generator
from model import block_causal_mask, doubled_mask, sequence_context

ASSETS = Path(__file__).parents[2] / "assets/names"
SMALL = ["--batch_size", "8", "--n_layer", "1", "--n_embd", "64", "--width", "32"]


def tiny(block_length: int):
    cfg = replace(PRESETS["tiny"], block_length=block_length, mask_id=300, eos_id=299)
    return new_model(cfg, generator("test"))


def test_the_mask_of_three_blocks_of_one_is_the_docstrings():
    ctx = names_base.beside_clean(PRESETS["tiny"], 3, 1, torch.float32)
    rows = ["10000", "01010", "00111", "00010", "00011"]
    assert ctx.mask.tolist() == [[c == "1" for c in row] for row in rows]


def test_only_the_last_clean_block_is_missing():
    """Of [noisy ; clean] as train.py has it the last clean block is read by nobody else; the rest is the same."""
    whole = doubled_mask(24, 8)
    kept = torch.ones(48, dtype=torch.bool)
    kept[40:] = False
    assert not whole[kept][:, ~kept].any()
    assert torch.equal(names_base.beside_clean(PRESETS["tiny"], 24, 8, torch.float32).mask, whole[kept][:, kept])


def test_a_noisy_block_is_read_as_decoding_reads_it():
    """Finished text in clean blocks, the block in work with its masks: the states are those of the plain row."""
    model = tiny(4)
    x = torch.randint(0, 290, (2, 12), generator=generator("rows"))
    z = x.clone()
    z[:, 9:] = model.cfg.mask_id
    ctx = names_base.beside_clean(model.cfg, 12, 4, torch.float32)
    beside = model(torch.cat([z, x[:, :8]], dim=1), ctx)[:, 8:12]
    plain = model(z, sequence_context(model.cfg, torch.ones_like(z, dtype=torch.bool), torch.float32))[:, 8:]
    assert torch.allclose(beside, plain, atol=1e-5)


def test_blocks_of_one_are_a_left_to_right_model():
    """Each mask is read after the tokens before it, by themselves: the loss is the sum of T separate readings."""
    model = tiny(1)
    x = torch.randint(0, 290, (1, 5), generator=generator("rows"))
    total = 0.0
    for i in range(5):
        z = x[:, : i + 1].clone()
        z[:, i] = model.cfg.mask_id
        real = torch.ones_like(z, dtype=torch.bool)
        ctx = sequence_context(model.cfg, real, torch.float32)
        assert torch.equal(ctx.mask, block_causal_mask(i + 1, 1))
        total += float(torch.nn.functional.cross_entropy(model(z, ctx)[:, i], x[:, i]).detach())
    loss = names_base.fill_loss(model, x, torch.ones_like(x, dtype=torch.bool), 1)
    assert abs(float(loss.detach()) - total) < 1e-4


def test_masks_are_ends_scattered_ends_and_random_ones():
    """Of 40,000 blocks of 8: all eight are masks in 30 % / 8 (the end begins at 0), in 30 % / 8 * 1/5 (a scattered end
    from 0, and the mean of r^4 for a ratio sqrt r) and in 40 % / 9 (the mean of r^8). The share of masks is 30 % * 9/16
    + 30 % * 9/16 * 2/3 + 40 % / 2."""
    masked = names_base.draw_masks(40000, 8, generator("masks"))
    whole = 0.3 / 8 + 0.3 / 8 / 5 + 0.4 / 9
    assert abs(float(masked.all(-1).float().mean()) - whole) < 5 * (whole / 40000) ** 0.5
    share = 0.3 * 9 / 16 + 0.3 * 9 / 16 * 2 / 3 + 0.4 / 2
    assert abs(float(masked.float().mean()) - share) < 0.01


def test_every_row_once_an_epoch():
    rows = [torch.full((8 if i % 3 else 16,), i) for i in range(12)]
    seen = [int(r[0]) for step in range(3) for x in names_base.batch(rows, step, 4, seed=0) for r in x]
    assert sorted(seen) == list(range(12))
    again = [int(r[0]) for step in range(3, 6) for x in names_base.batch(rows, step, 4, seed=0) for r in x]
    assert sorted(again) == list(range(12)) and again != seen


def run(folder, *flags, stop_after: int = 0):
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "names.json"):  # learning the tokenizer takes most of the time of so short a run
        shutil.copy(ASSETS / name, folder)
    command = [sys.executable, "-m", "beyond.names_base", "--out_dir", str(folder), *flags]
    if not stop_after:
        return subprocess.run(command, capture_output=True, text=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if f"step {stop_after}:" in line:
            os.kill(process.pid, signal.SIGINT)
            break
    process.stdout.read()
    process.wait()
    return process


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    steps = ["--max_iters", "6", "--eval_interval", "2", *SMALL]
    assert run(tmp_path / "whole", *steps).returncode == 0
    assert run(tmp_path / "parts", *steps, stop_after=2).returncode in (0, 130)
    assert run(tmp_path / "parts", "--init_from", "resume").returncode == 0
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    log = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "parts")]
    assert log[0] == log[1]
    refused = run(tmp_path / "whole", *steps)
    assert refused.returncode == 2 and "--init_from resume" in refused.stderr


def test_the_left_to_right_model_decodes_in_blocks_of_one(tmp_path):
    assert run(tmp_path / "causal", "--one_by_one", "1", "--max_iters", "1", *SMALL).returncode == 0
    assert load_model(tmp_path / "causal", torch.device("cpu"), torch.float32, None).cfg.block_length == 1
