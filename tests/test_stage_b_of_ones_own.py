"""A Stage B of one's own, as a fork would write it. `pytest tests/test_stage_b_of_ones_own.py`

A fork puts class Draft into a file of its own, and names it in checkpoint.STAGE_B. That is all. `check_stage_b` says
whether training, decoding and a batch agree; train.py calls it before the first step.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from common import assert_as_specified, caller, random_adapter, tiny_model
from torch import Tensor, nn

import base
import checkpoint
import evaluate
import sample
import train
from cache import check_stage_b
from causal import CausalModel
from checkpoint import load_model
from config import Config
from decoding import PAPER
from layers import MoE
from lib.util import Mistake
from model import Context, Layer, Model


# --- the fork's file
class Draft(Model):
    """Each position of the bundle is shown Stage A's draft there, and a layer of its own comes after the last n."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.show = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layer = Layer(cfg)

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        h = h + bundle[..., None] * (self.markers[0] + self.show(tokens)).to(h.dtype)
        return self.layer(self.last_n(h, ctx), ctx)


# --- what the project does with it
@pytest.fixture
def fork(monkeypatch):
    """fork(kind): name a class as the Stage B called "draft"."""
    return partial(monkeypatch.setitem, checkpoint.STAGE_B, "draft")


@pytest.fixture
def trained(fork, on_pairs, tmp_path, monkeypatch, capsys):
    """A base, and the class trained on it -> the folder, and what was printed."""

    def train_it(kind: type[Model]) -> tuple[Path, str]:
        fork(kind)
        caller(base, monkeypatch, capsys)(*on_pairs, "--max_iters", 1, "--out_dir", tmp_path / "base")
        how = ["--init_from", tmp_path / "base", "--stage_b", "draft", "--n_last", 2, "--learning_rate", 0.01]
        how += ["--max_iters", 2, "--out_dir", tmp_path / "out"]
        return tmp_path / "out", caller(train, monkeypatch, capsys)(*on_pairs, *how)

    return train_it


def test_it_trains_decodes_and_is_measured(trained, tmp_path, monkeypatch, capsys):
    out, said = trained(Draft)
    assert "no gradient" not in said and "own generator" not in said

    # what it has of its own began as its class makes it, has learned, and is in the adapter
    model = load_model(out, "cpu", torch.float32)
    begun = load_model(tmp_path / "base", "cpu", torch.float32, "draft", n_last=2)
    assert type(model) is Draft
    first = begun.layer.attn.qkv.weight  # 64 columns: their products keep their size
    assert abs(first.std() - 0.125) < 0.01 and abs(first.mean()) < 0.01
    for name, tensor in begun.own().items():
        assert not torch.equal(tensor, model.own()[name]), name

    # sample.py decodes with the paper's gates and edits, and counts n + 1 of L layers: 3/4 of a forward
    said = caller(sample, monkeypatch, capsys)("--ckpt", out, "--prompt_ids", "1,2", "--gen_length", 4)
    assert "partial x 0.75" in said and "draft Stage B, n = 2 of 4, K = 1, gates 0.7 and 0" in said

    # evaluate.py measures it on a toy, and in bits
    measured = caller(evaluate, monkeypatch, capsys)
    short = ["--ckpt", out, "--device", "cpu"]
    assert "Stage B, gates .7 and 0" in measured(*short)
    assert "draft Stage B, all at once" in measured(*short, "--bits", "--tokens", 50)


def test_an_own_mixture_of_experts_is_saved_with_its_biases(fork, tmp_path):
    class Experts(Draft):
        def __init__(self, cfg: Config):
            super().__init__(cfg)
            self.layer.mlp = MoE(cfg)
            self.layer.mlp.expert_bias += 0.25

    fork(Experts)
    checkpoint.save_model(tiny_model(n_rounds=1), tmp_path / "base")
    random_adapter(tmp_path / "out", tmp_path / "base", "draft")
    assert load_model(tmp_path / "out", "cpu", torch.float32).layer.mlp.expert_bias.tolist() == [0.25] * 8


# --- training, decoding and a batch agree, or it is said
def test_a_stage_b_agrees_with_itself(fork):
    fork(Draft)
    model = tiny_model(stage_b="draft", n_rounds=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_stage_b(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    (out, *_) = assert_as_specified(model, [[3, 4, 5], [1] * 9], replace(PAPER, gen_length=9))
    assert out.nfe["partial"] > 0


class Slot(Draft):
    """Its own layer has the slot of a layer that it does not run again."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.layer.attn.slot = 0


class Sums(Draft):
    """It reads the blocks before its own past the cache."""

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        return self.last_n(h + bundle[..., None] * h.cumsum(1), ctx)


class Told(Draft):
    """It is told one right token, as causal Stage B is, and reads it at its own place."""

    def told(self, clean: Tensor, states: Tensor) -> Tensor:
        return torch.cat([self.drafts(states)[:-1], clean[-1:]])


class Right(CausalModel):
    """Causal Stage B, but each position reads the token on its right."""

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        return super().coordinate(h, bundle, tokens.roll(-2, dims=1), ctx)


class Listed(Draft):
    """Its layers are in a Python list."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.more = [Layer(cfg)]


class Plain(Draft):
    """Its tensor is neither a parameter nor a buffer."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.more = torch.ones(3)


class Counts(Draft):
    """It counts in whole numbers, which an adapter does not hold."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("kind, words", [
    (Listed, "self.more hides layers"), (Plain, "self.more hides"), (Counts, "seen is torch.int64"),
    (Slot, "keys of its own"), (Sums, "something else in training"), (Told, "sees the answer"),
    (Right, "sees the answer"),
])  # fmt: skip
def test_a_stage_b_that_does_not_agree_is_refused(kind, words, fork):
    fork(kind)
    with pytest.raises(Mistake, match=words):
        check_stage_b(tiny_model(stage_b="draft", n_rounds=1))


def test_what_learns_nothing_is_said_and_what_draws_past_the_rows_generators(trained):
    """A parameter that is not used; and two factors that are both zero, each of which holds the other there."""

    class Idle(Draft):
        def __init__(self, cfg: Config):
            super().__init__(cfg)
            self.unused = nn.Parameter(torch.ones(3))
            self.a = nn.Parameter(torch.zeros(cfg.n_embd, 2))
            self.b = nn.Parameter(torch.zeros(2, cfg.n_embd))

        def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
            h = h + 0 * torch.rand(1)
            return super().coordinate(h + h @ self.a @ self.b, bundle, tokens, ctx)

    _, said = trained(Idle)
    assert "no gradient in the second step, or one of zero: unused, a, b" in said
    assert "draws from torch's own generator" in said
