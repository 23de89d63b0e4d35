"""A Stage B of one's own, as a fork would write it. `pytest tests/test_stage_b_of_ones_own.py`

A fork puts class Draft into a file of its own, and names it in checkpoint.STAGE_B. That is all.
"""

from dataclasses import replace

import pytest
import torch
from common import assert_as_specified, caller, random_ids, tiny_model
from torch import Tensor, nn

import base
import checkpoint
import evaluate
import sample
import train
from checkpoint import load_model
from config import Config
from model import Context, Model


# --- the fork's file
class Draft(Model):
    """Each position of the bundle is shown Stage A's draft there: h + marker + Show(draft)."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.show = nn.Parameter(torch.zeros(cfg.vocab_size, cfg.n_embd))

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        for i in range(ctx.n_rounds):
            h = h + bundle[..., None] * (self.markers[i] + self.show[tokens]).to(h.dtype)
            h = self.last_n(h, replace(ctx, i_round=i))
        return h


# --- what the project does with it
@pytest.fixture
def stage_b(monkeypatch) -> list:
    monkeypatch.setitem(checkpoint.STAGE_B, "draft", Draft)
    return ["--stage_b", "draft", "--max_iters", 3, "--learning_rate", 0.01, "--batch_size", 4, "--device", "cpu"]


def test_it_trains_decodes_and_is_measured(stage_b, pairs, on_pairs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    caller(base, monkeypatch, capsys)(*on_pairs, "--max_iters", 1, "--out_dir", tmp_path / "base")
    how = ["--data", pairs, "--init_from", tmp_path / "base", "--n_last", 2, "--out_dir", out]
    caller(train, monkeypatch, capsys)(*how, *stage_b)

    # its parameter has learned, and is in the adapter
    model = load_model(out, "cpu", torch.float32)
    assert type(model) is Draft and model.show.any() and model.markers.any()

    # sample.py decodes with the paper's gates and edits, and counts n/L = 1/2 of a forward
    said = caller(sample, monkeypatch, capsys)("--ckpt", out, "--prompt_ids", "1,2", "--gen_length", 4)
    assert "partial x 0.5" in said and "draft Stage B, n = 2 of 4, K = 1, gates 0.7 and 0" in said

    # evaluate.py measures it on a toy, and in bits
    measured = caller(evaluate, monkeypatch, capsys)
    short = ["--ckpt", out, "--device", "cpu"]
    assert "Stage B, gates .7 and 0" in measured(*short)
    assert "draft Stage B, all at once" in measured(*short, "--bits", "--tokens", 50)


def test_it_is_shown_the_same_in_training_and_in_decoding(stage_b):
    """Stage A's drafts, and never the answer: so what is learned is what decodes."""
    model = tiny_model(stage_b="draft", n_rounds=1)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    clean = random_ids(1, 5)[0]
    assert torch.equal(model.told(clean, states), model.drafts(states)) and not torch.equal(model.drafts(states), clean)
    (out,) = assert_as_specified(model, [[3, 4, 5]], replace(sample.PAPER, gen_length=9, tau_m2t=0.2))
    assert out.nfe["partial"] > 0


def test_a_parameter_that_gets_no_gradient_is_said(stage_b, pairs, tmp_path, monkeypatch, capsys):
    class Idle(Draft):
        def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
            return Model.coordinate(self, h, bundle, tokens, ctx)

    monkeypatch.setitem(checkpoint.STAGE_B, "draft", Idle)
    how = ["--data", pairs, "--init_from", "scratch", "--n_last", 2, "--out_dir", tmp_path / "run"]
    said = caller(train, monkeypatch, capsys)(*how, *stage_b)
    assert "without a gradient after the first step: show" in said
