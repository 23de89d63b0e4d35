"""The base of names: what a row may read in training, which positions are masks, what learns by which optimizer.
`pytest tests/beyond/test_names_base.py`
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, caller, random_ids, tiny_model
from resuming import goes_on_bit_for_bit
from test_chain import a_batch

from beyond import names_base
from beyond.names_base import MuonAndAdam, draw_masks, fill_loss, names_step
from checkpoint import new_model, read_config
from lib.config import PRESETS
from lib.util import generator


@pytest.mark.parametrize("block_length", [1, 4])
def test_a_mask_is_read_after_the_clean_blocks_before_its_own(block_length):
    """In blocks of one that is a left-to-right model: T separate readings. The model's own blocks do not matter."""
    model = tiny_model(block_length=8)
    plain = replace(model.cfg, block_length=block_length)
    x = random_ids(1, 12)
    masked = random_ids(1, 12, 1, 2).bool()
    ce = []
    for start in range(0, 12, block_length):
        block = slice(start, start + block_length)
        z = x[:, : block.stop].clone()
        z[:, block] = z[:, block].masked_fill(masked[:, block], MASK)
        model.cfg = plain
        logits = model(z, model.context(torch.ones_like(z, dtype=torch.bool)))[:, block]
        ce.append(F.cross_entropy(logits[masked[:, block]], x[:, block][masked[:, block]], reduction="none"))
    model.cfg = replace(plain, block_length=8)
    found = fill_loss(model, x, torch.ones_like(masked), masked, block_length)
    torch.testing.assert_close(found, torch.cat(ce), rtol=1e-4, atol=1e-4)


def test_masks_are_ends_scattered_ends_and_random_ones():
    """Of 40,000 blocks of 8: all eight are masks in 30 % / 8 (the end begins at 0), in 30 % / 8 * 1/5 (a scattered end
    from 0, and the mean of r^4 for a ratio sqrt r) and in 40 % / 9 (the mean of r^8). The share of masks is 30 % *
    9/16 + 30 % * 9/16 * 2/3 + 40 % / 2."""
    masked = draw_masks([generator("masks", i) for i in range(40)], 8000, 8).view(40000, 8)
    whole = 0.3 / 8 + 0.3 / 8 / 5 + 0.4 / 9
    assert abs(float(masked.all(-1).float().mean()) - whole) < 5 * (whole / 40000) ** 0.5
    share = 0.3 * 9 / 16 + 0.3 * 9 / 16 * 2 / 3 + 0.4 / 2
    assert abs(float(masked.float().mean()) - share) < 0.01


def test_a_share_of_the_rows_is_read_in_blocks_of_one():
    model, args = tiny_model(), SimpleNamespace(one_by_one=0.35)
    x = random_ids(200, 16)
    real = torch.arange(16) < torch.tensor([16, 8])[torch.arange(200) % 2][:, None]
    loss, terms = names_step(model, a_batch(x, "n", real), args)
    total = terms["causal"][0] + terms["any_order"][0]
    torch.testing.assert_close(loss.detach(), total)

    # every real token of the rows in blocks of one is a target, half of the others are
    draws = a_batch(x, "n").draws
    chosen = torch.cat([torch.rand(1, generator=g) for g in draws]) < 0.35
    assert terms["causal"][1] == real[chosen].sum() and 0.25 < chosen.float().mean() < 0.45
    masked = (draw_masks(draws, 16, 8) & real)[~chosen]
    assert terms["any_order"][1] == masked.sum()
    ce = fill_loss(model, x[~chosen], real[~chosen], masked, 8)
    torch.testing.assert_close(terms["any_order"][0], ce.detach().sum())
    for share, name in ((0.0, "any_order"), (1.0, "causal")):
        _, terms = names_step(model, a_batch(x[:4], "n", real[:4]), SimpleNamespace(one_by_one=share))
        assert set(terms) == {name}


def test_muon_has_the_matrices_of_the_layers_and_adam_the_rest():
    cfg = replace(PRESETS["tiny"], n_dense=4, eos_id=300, mask_id=301)
    model = new_model(cfg, generator("m"))
    optimizer = MuonAndAdam(model, SimpleNamespace(learning_rate=0.01, weight_decay=0.01))
    muon, adam = optimizer.param_groups
    names = {p: name for name, p in model.named_parameters()}
    matrices = {names[p] for p in muon["params"]}
    assert len(matrices) == 4 * 4 and all(name.startswith("layers.") and "norm" not in name for name in matrices)
    assert matrices | {names[p] for p in adam["params"]} == set(names.values())
    assert (muon["peak"], adam["peak"]) == (0.01, pytest.approx(0.004))

    # the schedule's rate reaches both; a matrix moves by an orthogonal one, as far as Adam would move it
    for group in optimizer.param_groups:
        group["lr"] = group["peak"]
    before = {name: p.detach().clone() for p, name in names.items()}
    model(random_ids(2, 32), model.context(torch.ones(2, 32, dtype=torch.bool))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    moved = {name: (p.detach() - before[name]) for p, name in names.items()}
    spectrum = torch.linalg.svdvals(moved["layers.1.attn.qkv.weight"])
    assert spectrum.max() < 2 * spectrum.median() and 0.0005 < moved["layers.1.attn.qkv.weight"].std() < 0.005
    assert moved["lm_head.weight"].abs().max() == pytest.approx(0.004, rel=0.01)
    assert {names[p] for p, moments in optimizer.state.items() if moments} == set(names.values()) - {"markers"}


@pytest.fixture
def text(tmp_path):
    """Text in bytes: learning the tokenizer of names takes most of the time of so short a run."""
    (tmp_path / "a.txt").write_text("GREEK SMALL LETTER ALPHA\nCANADIAN SYLLABICS CARRIER DZU\n" * 20)
    return ["--data", tmp_path / "a.txt", "--batch_size", 4, "--device", "cpu"]


def test_a_stopped_run_goes_on_bit_for_bit(text, tmp_path, monkeypatch, capsys):
    goes_on_bit_for_bit(names_base, text, tmp_path, monkeypatch, capsys)
    cfg = read_config(tmp_path / "whole")
    assert (cfg.n_layer, cfg.n_dense, cfg.order, cfg.block_length, cfg.n_last) == (8, 8, "leftmost", 8, 1)


def test_a_left_to_right_model_decodes_in_blocks_of_one(text, tmp_path, monkeypatch, capsys):
    run = [*text, "--one_by_one", 1, "--max_iters", 1, "--out_dir", tmp_path / "run"]
    call = caller(names_base, monkeypatch, capsys)
    call(*run)
    assert read_config(tmp_path / "run").block_length == 1
    assert "begins from scratch" in call.fails(*text, "--init_from", tmp_path / "run", "--out_dir", tmp_path / "b")
