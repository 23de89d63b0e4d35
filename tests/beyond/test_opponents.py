"""Opponents: what each step writes, by hand, and where it is another one. `pytest tests/beyond/test_opponents.py`"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import MASK, caller, random_ids, tiny_config, tiny_model
from runs import TOY, a_base, resumes
from test_chain import a_batch, flags

from beyond import opponents
from beyond.chain import chain_target
from beyond.opponents import end_last, first_left, refusing, stage_a_step, teachers_chain
from checkpoint import load_model
from corrupt import M, three_term_loss
from sample import Decoding, denoise, generate
from train import base_step, batch_context, corrupt_batch

EOS = 7  # of these tables
D = Decoding(gen_length=21, tau_t2t=None)
PROMPTS = [random_ids(1, n, n)[0].tolist() for n in (3, 8)]


def table(sure):
    """(probability, token) of each position -> logits (1, B, 10) whose best token has this probability."""
    p = torch.zeros(1, len(sure), 10)
    for i, (probability, token) in enumerate(sure):
        p[0, i] = (1 - probability) / 9
        p[0, i, token] = probability
    return p.log()


class ByHand:
    """An engine whose stages have these tables as their states."""

    def __init__(self, a, b=None):
        cfg = tiny_config(vocab_size=10, mask_id=9, eos_id=EOS, block_length=4)
        self.model = SimpleNamespace(cfg=cfg, logits=lambda states: states)
        self.a = table(a)
        self.b = None if b is None else table(b)

    def stage_a(self, z):
        return self.a, self.a

    def stage_b(self, h, marked):
        assert marked.all()
        return self.b


def after(step, a, z=(9, 9, 9, 9), b=None, **how):
    z = torch.tensor([z])
    done = step(ByHand(a, b), z, z < 0, torch.zeros(1, 2, 4), replace(D, tau_m2t=0.4), **how)
    assert torch.equal(done.after != z, done.bundle) and not done.edited.any()
    assert done.partial == (b is not None)
    return done.after[0].tolist()


# --- by hand
def test_from_the_left():
    sure = [(0.5, 1), (0.3, 2), (0.6, 3), (0.2, 4)]
    assert after(first_left, sure) == [1, 9, 9, 9]
    assert after(first_left, sure, (0, 9, 8, 9)) == [0, 2, 8, 9]


def test_an_end_is_sure_only_where_no_mask_before_it_wants_a_word():
    ends = [(0.3, 1), (0.9, EOS), (0.8, EOS), (0.5, 2)]
    assert after(end_last, ends) == [9, 9, 9, 2]  # the first mask wants 1
    assert after(end_last, ends, (5, 9, 9, 9)) == [5, EOS, EOS, 2]  # what is visible wants nothing
    surest = [(0.3, 1), (0.9, EOS), (0.2, 3), (0.1, EOS)]
    assert after(end_last, surest) == [1, 9, 9, 9]  # none is above: the surest word
    assert after(end_last, [(0.3, EOS)] * 4) == [EOS, 9, 9, 9]


def test_refusing_writes_the_prefix_that_is_sure_enough_together():
    """Surest first Stage B has .9 .72 .504 .252 at the places 1 0 2 3; Stage A is surest at 2."""
    a = [(0.5, 1), (0.3, 2), (0.6, 3), (0.2, 4)]
    b = [(0.8, 5), (0.9, 6), (0.7, 5), (0.5, 6)]
    assert after(refusing, a, b=b, keep=0.8) == [9, 6, 9, 9]
    assert after(refusing, a, b=b, keep=0.6) == [5, 6, 9, 9]
    assert after(refusing, a, b=b, keep=0.0) == [5, 6, 5, 6]
    assert after(refusing, a, b=b, keep=0.95) == [9, 9, 3, 9]


# --- where one step is another
def decoded(step, d, model):
    return [(o.tokens, o.nfe) for o in generate(model, PROMPTS, d, step=step)]


@pytest.mark.parametrize("tau_m2t", [-1.0, 0.7, 1.0])
def test_without_an_end_none_is_sure_too_early(tau_m2t):
    model = tiny_model()
    model.lm_head.weight.data[[MASK, model.cfg.eos_id]] = 0.0
    d = replace(D, tau_m2t=tau_m2t, n_rounds=0)
    assert decoded(end_last, d, model) == decoded(denoise, d, model)


def test_refusing_nothing_is_all_at_once():
    model = tiny_model()
    model.lm_head.weight.data[MASK] = 0.0
    d = replace(D, tau_m2t=-1.0)
    assert decoded(partial(refusing, keep=0.0), d, model) == decoded(denoise, d, model)


# --- training
def test_stage_a_by_alpha():
    """At alpha 0 it is the base's own step; at 1 a block costs 1 - P, the product of its masks' probabilities."""
    model = tiny_model()
    x = random_ids(3, 24)
    args = flags(lora_r=4, one_by_one=0.0)
    loss, terms = stage_a_step(model, a_batch(x), args)
    base, base_terms = base_step(model, a_batch(x), args)
    assert torch.equal(loss, base) and torch.equal(terms["m2t_A"], base_terms["m2t_A"])
    args.alpha = 1.0
    by_alpha, _ = stage_a_step(model, a_batch(x), args)
    assert by_alpha - 0.2 * terms["clean_A"][0] < 9  # nine blocks, each at most 1
    assert by_alpha < loss


def test_one_stage_is_taught_the_teachers_chain():
    """Its loss is that of the chain as clean text, and no gradient reaches the teacher."""
    model, teacher = tiny_model(), tiny_model(seed=1)
    x = random_ids(3, 24)
    args = flags(lora_r=4, one_by_one=0.0)
    loss, _ = stage_a_step(model, a_batch(x), args, partial(teachers_chain, teacher=teacher))
    z, kind = corrupt_batch(model, a_batch(x), args)
    wanted = chain_target(teacher, a_batch(x), z, kind == M)
    ctx = batch_context(model, a_batch(x), args)
    states = model.last_n(model.prefix(z, ctx), ctx)
    expected, _ = three_term_loss(model, states, wanted, kind, fill=kind == M)
    assert torch.equal(loss, expected) and not torch.equal(wanted, x)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("how", [["--alpha", 0.5], ["--chain"]])
def test_it_trains_and_resumes(how, tmp_path, monkeypatch, capsys):
    run = [*TOY, "--init_from", a_base(tmp_path, monkeypatch, capsys), *how]
    resumes(opponents, [], run, tmp_path, monkeypatch, capsys)
    model = load_model(tmp_path / "whole", "cpu", torch.float32)
    assert model.adapter["alpha"] == (0.5 if "--alpha" in how else 0) and model.lora_in == "both"
    fails = caller(opponents, monkeypatch, capsys).fails
    assert "--init_from DIR" in fails(*TOY, *how, "--out_dir", tmp_path / "new")
    assert "give one of them" in fails(*run[: -len(how)], "--chain", "--alpha", 1, "--out_dir", tmp_path / "new")
