"""What each kind of model is decoded by. `pytest tests/beyond/test_decoders.py`"""

from argparse import Namespace

import pytest
import torch
from common import tiny_model

from beyond import decoders, distill, joint_head, rule_steps, rules, sampling_head
from beyond.costs import SHADOWS, VERIFICATION

GREEDY = Namespace(temperature=[0.0], top_p=[1.0])


def headed(extension, order="surest", **own):
    model = tiny_model(n_rounds=1, order=order)
    extension.attach(model, dict(head_layers=1, width=8) | own)
    return model


def labels(model, adapter="adapter", args=GREEDY):
    return [s.label for s in decoders.settings(model, adapter, args)]


def test_stage_a_has_every_rule_at_every_dial():
    every = [f"{rule} {dial:g}" for rule, dials in rules.DIALS.items() for dial in dials]
    assert set(rules.DIALS) == set(rules.RULES) and len(every) == len(set(every)) == 91
    every += [f"{rule} {dial:g}" for rule, dials in rule_steps.DIALS.items() for dial in dials] + ["s2d2"]
    assert labels(tiny_model(), None) == every and len(every) == len(set(every)) == 91 + 5 + 7 + 7 + 1
    distilled = tiny_model()
    distill.attach(distilled, {})
    assert labels(distilled) == every
    for s in decoders.settings(distilled, "adapter", GREEDY):
        assert s.decoding.n_rounds == 0 and s.step is not None


def test_what_a_rule_reads_twice_and_whether_it_looks_at_a_full_block():
    """T2M alone keeps a block open behind its last mask, by a gate that no probability passes."""
    for s in decoders.settings(tiny_model(), None, GREEDY):
        rule = s.label.split()[0]
        assert s.reading == {"wino": SHADOWS, "s2d2": VERIFICATION}.get(rule)
        assert s.decoding.tau_t2t == {"t2m": 1.0}.get(rule)


def test_blocks_of_16_have_more_dials():
    """A rule may write 16 tokens in a step, and be less sure of them."""
    more = [f"{rule} {dial:g}" for rule, dials in rules.MORE_DIALS.items() for dial in dials]
    every = labels(tiny_model(block_length=16), None)
    assert sorted(every) == sorted(labels(tiny_model(), None) + more) and len(every) == len(set(every)) == 111 + 16
    assert "fixed 16" in more and "fixed 16" not in labels(tiny_model(), None)

    # the boldest dial of each rule writes 16 masks at once, of which none is sure (but for the rounding of the last)
    masked = torch.ones(1, 16, dtype=torch.bool)
    for rule in rules.RULES:
        boldest = {"entropy_bound": 99.0, "factor": 17.0, "fixed": 16, "margin": -1.0}.get(rule, 0.0)
        assert f"{rule} {boldest:g}" in every
        assert rules.RULES[rule](torch.zeros(1, 16, 272), masked, boldest).all()


@pytest.mark.parametrize(("order", "rule"), [("surest", "threshold"), ("leftmost", "longest_prefix")])
def test_a_joint_head_is_on_at_every_tau_keep_or_off(order, rule):
    every = decoders.settings(headed(joint_head, order, tau_keep=0.5), "adapter", GREEDY)
    on, some, off = every[:13], every[13:-6], every[-6:]
    assert [s.attributes for s in on] == [{"tau_keep": keep} for keep in decoders.KEEP]
    assert all(s.decoding.tau_m2t == -1 and s.decoding.n_rounds == 1 and s.step is None for s in on)
    first = rules.DIALS[rule][0]
    dials = [first, 0.9, 0.8, 0.7, 0.6, 0.5]
    assert [s.label for s in off] == [f"off, {rule} {dial:g}" for dial in dials]
    assert all(s.decoding.n_rounds == 0 and s.step is not None for s in off)

    # where the surest are written first, it may look at those alone
    dials = [(tau, keep) for tau in decoders.ABOVE for keep in decoders.KEEP_OF_THOSE]
    if order == "leftmost":
        dials = []
    assert [(s.decoding.tau_m2t, s.attributes["tau_keep"]) for s in some] == dials
    assert [s.label for s in some] == [f"tau_m2t {tau:g}, tau_keep {keep:g}" for tau, keep in dials]
    assert all(s.decoding.n_rounds == 1 and s.step is None for s in some)


def test_a_model_is_set_up_as_a_setting_wants_it():
    model = headed(joint_head, tau_keep=0.5)
    on, off = (
        s for s in decoders.settings(model, "adapter", GREEDY) if s.label in ("tau_keep 0.3", "off, threshold 0.9")
    )
    assert decoders.set_up(model, on, own_step=model.step) == model.step and model.tau_keep == 0.3
    assert decoders.set_up(model, off, own_step=model.step) is off.step and model.tau_keep == 0.3


def test_the_papers_stage_b_is_on_and_off_at_the_same_gates():
    model = tiny_model(n_rounds=2)
    model.add_lora(2, 4.0, torch.Generator())
    every = decoders.settings(model, "adapter", GREEDY)
    on, off = every[:13], every[13:]
    assert [s.label for s in on] == [s.label for s in off] and not any(s.off for s in on) and all(s.off for s in off)
    assert [s.decoding.tau_m2t for s in on] == [s.decoding.tau_m2t for s in off] == [*decoders.GATES]
    assert {s.decoding.n_rounds for s in on} == {2} and {s.decoding.n_rounds for s in off} == {0}


def test_a_left_to_right_model_has_one_setting():
    assert labels(tiny_model(block_length=1), None) == ["left to right"]


def test_with_a_temperature_gates_take_the_place_of_rules():
    args = Namespace(temperature=[0.0, 1.0], top_p=[1.0, 0.7])
    every = decoders.settings(tiny_model(), None, args)
    assert len(every) == 111 + 2 * 7
    sampled = [(s.decoding.temperature, s.decoding.top_p, s.decoding.tau_m2t) for s in every[111:]]
    assert sampled == [(1.0, p, tau) for p in (1.0, 0.7) for tau in (1.0, 0.9, 0.5, 0.2, 0.05, 0.005, -1.0)]
    assert all(s.step is None for s in every[111:])

    # a joint head at every tau_keep, or off; a sampling head with so many looks
    args = Namespace(temperature=[1.0], top_p=[0.7])
    joint = labels(headed(joint_head, tau_keep=0.5), args=args)
    assert len(joint) == 13 + 3 and joint[13:] == ["off, tau_m2t 1", "off, tau_m2t 0.9", "off, tau_m2t 0.5"]
    sampling = decoders.settings(headed(sampling_head, looks=1), "adapter", args)
    assert [s.attributes["looks"] for s in sampling] == [1] * 6 + [8] * 6
    assert all(s.decoding.tau_m2t < 1 and s.decoding.n_rounds == 1 for s in sampling)
