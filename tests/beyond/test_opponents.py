"""Opponents: what each step writes, by hand, and where it is another one. `pytest tests/beyond/test_opponents.py`"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import MASK, caller, random_ids, random_lora, tiny_config, tiny_model
from runs import TOY, a_base, resumes
from test_chain import a_batch, flags

from beyond import opponents
from beyond.opponents import (
    at_random,
    bundle_itself,
    elsewhere,
    end_last,
    first_left,
    half,
    marking,
    nothing,
    refusing,
    soft_drafts,
    soft_step,
    stage_a_step,
    with_drafts,
)
from checkpoint import load_model
from lib.util import generator
from sample import Decoding, denoise, generate
from train import base_step, cocommit_step

EOS = 7  # of these tables
D = Decoding(gen_length=21, tau_t2t=None)
PROMPTS = [random_ids(1, n, n)[0].tolist() for n in (3, 8)]


def rng():
    return generator("tests", "positions")


def table(sure):
    """(probability, token) of each position -> logits (1, B, 10) whose best token has this probability."""
    p = torch.zeros(1, len(sure), 10)
    for i, (probability, token) in enumerate(sure):
        p[0, i] = (1 - probability) / 9
        p[0, i, token] = probability
    return p.log()


class ByHand:
    """An engine whose stages have these tables as their states; it remembers what was marked."""

    def __init__(self, a, b=None):
        cfg = tiny_config(vocab_size=10, mask_id=9, eos_id=EOS, block_length=4)
        self.model = SimpleNamespace(cfg=cfg, logits=lambda states: states)
        self.a = table(a)
        self.b = None if b is None else table(b)

    def stage_a(self, z):
        return self.a, self.a

    def stage_b(self, h, marked):
        self.marked = marked
        return self.b


def after(step, engine, z=(9, 9, 9, 9), tau_m2t=0.4, **how):
    z = torch.tensor([z])
    done = step(engine, z, z < 0, torch.zeros(1, 2, 4), replace(D, tau_m2t=tau_m2t), **how)
    assert torch.equal(done.after != z, done.bundle) and not done.edited.any()
    return done.after[0].tolist(), float(done.partial)


A = [(0.5, 1), (0.3, 2), (0.6, 3), (0.2, 4)]
B = [(0.8, 5), (0.9, 6), (0.7, 5), (0.5, 6)]


# --- by hand
def test_from_the_left():
    assert after(first_left, ByHand(A)) == ([1, 9, 9, 9], 0)
    assert after(first_left, ByHand(A), (0, 9, 8, 9)) == ([0, 2, 8, 9], 0)


def test_at_random_as_many_as_the_threshold_takes():
    """Two are above .4, of three masks two are written, each as often as another; above .7 there is none: one is."""
    engine = ByHand([(0.9, 1), (0.5, 2), (0.5, 3), (0.3, 4)])
    found = [after(at_random, engine, (0, 9, 9, 9), rng=generator(i))[0] for i in range(300)]
    assert all(z[0] == 0 and z.count(9) == 1 for z in found)
    for i, token in ((1, 2), (2, 3), (3, 4)):
        share = sum(z[i] == token for z in found) / 300
        assert abs(share - 2 / 3) < 0.1
    assert after(at_random, ByHand(A), tau_m2t=0.7, rng=rng())[0].count(9) == 3


def test_an_end_is_sure_only_where_no_mask_before_it_wants_a_word():
    ends = [(0.3, 1), (0.9, EOS), (0.8, EOS), (0.5, 2)]
    assert after(end_last, ByHand(ends)) == ([9, 9, 9, 2], 0)  # the first mask wants 1
    assert after(end_last, ByHand(ends), (5, 9, 9, 9)) == ([5, EOS, EOS, 2], 0)  # what is visible wants nothing
    surest = [(0.3, 1), (0.9, EOS), (0.2, 3), (0.1, EOS)]
    assert after(end_last, ByHand(surest)) == ([1, 9, 9, 9], 0)  # none is above: the surest word
    assert after(end_last, ByHand([(0.3, EOS)] * 4)) == ([EOS, 9, 9, 9], 0)


def test_refusing_writes_the_prefix_that_is_sure_enough_together():
    """Surest first .9 .72 .504 .252 at the places 1 0 2 3; from the left .8 .72 .504 .252."""
    for order, keep, expected in (
        ("surest", 0.8, [9, 6, 9, 9]),
        ("left", 0.75, [5, 9, 9, 9]),
        ("surest", 0.6, [5, 6, 9, 9]),
        ("left", 0.5, [5, 6, 5, 9]),
        ("surest", 0.0, [5, 6, 5, 6]),
    ):
        assert after(refusing, ByHand(A, B), tau_m2t=-1.0, keep=keep, order=order) == (expected, 1)

    # none is sure enough: Stage A's surest, or first; Stage B has looked all the same
    assert after(refusing, ByHand(A, B), tau_m2t=-1.0, keep=0.95) == ([9, 9, 3, 9], 1)
    assert after(refusing, ByHand(A, B), tau_m2t=-1.0, keep=0.95, order="left") == ([1, 9, 9, 9], 1)


def test_the_marker_on_other_positions():
    """The bundle is 0 and 2, above .4; Stage B writes it whatever it is shown."""
    for mark, marked in ((bundle_itself, [1, 0, 1, 0]), (nothing, [0, 0, 0, 0]), (elsewhere, [0, 1, 0, 1])):
        engine = ByHand(A, B)
        assert after(marking, engine, mark=mark, rng=rng()) == ([5, 9, 5, 9], 1)
        assert engine.marked.int().tolist() == [marked]

    bundle = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]).bool()
    masked = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
    of_half = half(bundle, masked, rng())
    assert of_half.sum(-1).tolist() == [2, 1, 2] and not (of_half & ~bundle).any()

    # other masks, then what is visible, then the bundle itself
    other = elsewhere(bundle, masked, rng())
    assert other[:2].int().tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 0]]
    assert other[2, 4:].all() and other[2].sum() == 4


def test_soft_drafts_are_expected_embeddings_where_it_is_marked():
    model = tiny_model()
    h = torch.randn(2, 16, 64, generator=generator("h"))  # rows of 8 beside their clean copy
    states = torch.randn(2, 16, 64, generator=generator("states"))
    marked = torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1], [0] * 8]).bool()
    found = with_drafts(model, h, states, marked)
    expected = h.clone()
    for i in (1, 7):
        p = model.logits(states[0, i]).softmax(-1)
        expected[0, i] += sum(p[v] * model.wte.weight[v] for v in range(len(p)))
    torch.testing.assert_close(found, expected)
    assert torch.equal(with_drafts(model, h, states, marked & False), h)


# --- where one step is another
def decoded(step, d, model):
    return [(o.tokens, o.nfe) for o in generate(model, PROMPTS, d, step=step)]


@pytest.mark.parametrize("tau_m2t", [-1.0, 0.7, 1.0])
@pytest.mark.parametrize("n_rounds", [1, 2])
def test_with_nothing_changed_each_is_the_papers_step_without_edits(n_rounds, tau_m2t):
    model = tiny_model()
    model.lm_head.weight.data[MASK] = 0.0
    on = replace(D, tau_m2t=tau_m2t, n_rounds=n_rounds)
    paper = decoded(denoise, on, model)
    assert decoded(partial(marking, mark=bundle_itself, rng=rng()), on, model) == paper
    assert decoded(partial(refusing, keep=0.0), on, model) == paper
    if tau_m2t == -1.0:  # many tokens at once: what Stage B is shown tells
        assert decoded(partial(marking, mark=nothing, rng=rng()), on, model) != paper
        assert decoded(soft_drafts, on, model) != paper

    # without an end, an end is never sure too early; and at random it takes as many steps
    off = replace(on, n_rounds=0)
    model.lm_head.weight.data[model.cfg.eos_id] = 0.0
    stage_a = decoded(denoise, off, model)
    assert decoded(end_last, off, model) == stage_a
    drawn = decoded(partial(at_random, rng=rng()), off, model)
    if tau_m2t == -1.0:
        assert drawn == stage_a
    if tau_m2t == 1.0:
        assert drawn != stage_a
        assert [nfe for _, nfe in drawn] == [nfe for _, nfe in stage_a]


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


def test_soft_drafts_are_all_that_soft_step_changes(monkeypatch):
    model = tiny_model()
    random_lora(model, "stage_b")
    x = random_ids(3, 24)
    args = flags(alpha=0.5, bundle="whole")
    loss, terms = soft_step(model, a_batch(x), args)
    paper, paper_terms = cocommit_step(model, a_batch(x), args)
    assert torch.equal(terms["m2t_A"], paper_terms["m2t_A"]) and not torch.equal(terms["m2t_B"], paper_terms["m2t_B"])
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    monkeypatch.setattr(opponents, "with_drafts", lambda model, h, states, marked: h)
    assert torch.equal(soft_step(model, a_batch(x), args)[0], paper)


@pytest.mark.parametrize("way", ["stage_a", "soft"])
def test_they_train_resume_and_say_how_they_are_decoded(way, tmp_path, monkeypatch, capsys):
    run = [*TOY, "--init_from", a_base(tmp_path, monkeypatch, capsys), "--alpha", 0.5]
    resumes(opponents, [way], run, tmp_path, monkeypatch, capsys)
    model = load_model(tmp_path / "whole", "cpu", torch.float32)
    assert model.adapter["alpha"] == 0.5 and model.lora_in == {"stage_a": "both", "soft": "stage_b"}[way]
    fails = caller(opponents, monkeypatch, capsys).fails
    assert "stage_a, soft" in fails("other")
    assert "--init_from DIR" in fails(way, *TOY, "--out_dir", tmp_path / "new")
