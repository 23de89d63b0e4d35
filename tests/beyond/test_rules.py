"""Every rule on one block of five positions and four tokens, worked out by hand.

position      0     1     2     3     4
probability  .90   .60   .50   .80   .98     of the best token
             .10   .40   .25   .10   .02     of the second
              0     0    .25   .10    0      and so on
state        mask  mask  mask  mask  visible
"""

import math

import pytest
import torch
from common import MASK, random_ids, tiny_model

from beyond import rules
from sample import Decoding, generate

# R = 1 row, B = 5 positions, V = 4 tokens

TABLE = [[0.9, 0.1, 0, 0], [0.4, 0.6, 0, 0], [0.25, 0.25, 0.5, 0], [0.8, 0.1, 0.1, 0], [0.98, 0.02, 0, 0]]
MASKED = torch.tensor([[True, True, True, True, False]])


def logits(table: list) -> torch.Tensor:
    return torch.tensor([table]).log()


def at(bundle: torch.Tensor) -> list[int]:
    return bundle[0].nonzero()[:, 0].tolist()


def test_confidence_and_entropy():
    assert torch.allclose(rules.confidence(logits(TABLE)), torch.tensor([[0.9, 0.6, 0.5, 0.8, 0.98]]))
    two = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    fair = 1.5 * math.log(2)  # a half and two quarters
    assert torch.allclose(rules.entropy(logits(TABLE))[0, [0, 2]], torch.tensor([two, fair]))


@pytest.mark.parametrize(
    ("rule", "dial", "bundle"),
    [
        # strictly above; the visible position, surest of all, is never chosen
        ("threshold", 0.55, [0, 1, 3]),
        ("threshold", 0.85, [0]),
        ("threshold", 0.95, [0]),  # none passes: the surest
        ("threshold", 0.0, [0, 1, 2, 3]),
        # margins: .8, .2, .25, .7
        ("margin", 0.75, [0]),
        ("margin", 0.22, [0, 2, 3]),
        ("margin", -1.0, [0, 1, 2, 3]),
        # products, surest first: .9, .72, .432, .216
        ("product", 0.73, [0]),
        ("product", 0.71, [0, 3]),
        ("product", 0.43, [0, 1, 3]),
        ("product", 0.2, [0, 1, 2, 3]),
        ("product", 0.95, [0]),
        # entropies: 0 .325, 3 .639, 1 .673, 2 1.040; sum without the largest: 0, .325, .964, 1.637
        ("entropy_bound", -1.0, [0]),
        ("entropy_bound", 0.0, [0]),
        ("entropy_bound", 0.33, [0, 3]),
        ("entropy_bound", 0.97, [0, 1, 3]),
        ("entropy_bound", math.inf, [0, 1, 2, 3]),
        # (n + 1) (1 - c_n): .2, .6, 1.6, 2.5
        ("factor", 0.1, [0]),
        ("factor", 0.61, [0, 3]),
        ("factor", 1.59, [0, 3]),
        ("factor", 1.61, [0, 1, 3]),
        ("factor", 3.0, [0, 1, 2, 3]),
        # the surest so many, at most all
        ("fixed", 1, [0]),
        ("fixed", 2, [0, 3]),
        ("fixed", 9, [0, 1, 2, 3]),
        # products, from the left: .9, .54, .27, .216
        ("longest_prefix", 1.0, [0]),
        ("longest_prefix", 0.55, [0]),
        ("longest_prefix", 0.53, [0, 1]),
        ("longest_prefix", 0.22, [0, 1, 2]),
        ("longest_prefix", 0.0, [0, 1, 2, 3]),
    ],
)
def test_what_a_rule_picks(rule, dial, bundle):
    assert at(rules.RULES[rule](logits(TABLE), MASKED, dial)) == bundle


@pytest.mark.parametrize("rule", rules.RULES)
def test_rows_are_chosen_apart_and_a_finished_row_is_left_alone(rule):
    both = torch.cat([logits(TABLE), logits(TABLE)])
    masked = torch.cat([MASKED, torch.zeros_like(MASKED)])
    alone = rules.RULES[rule](logits(TABLE), MASKED, 1)
    assert torch.equal(rules.RULES[rule](both, masked, 1), torch.cat([alone, torch.zeros_like(alone)]))


def test_a_prefix_ends_at_the_first_that_fails():
    # (n + 1) (1 - c_n) need not rise: 2 * .4 = .8, then 3 * .4 = 1.2, then 4 * .4 = 1.6; a later mask is no way round
    assert rules.leading(torch.tensor([[True, False, True]])).item() == 1
    equal = logits([[0.6, 0.4, 0, 0]] * 3)
    assert at(rules.factor(equal, torch.ones(1, 3, dtype=torch.bool), 1.3)) == [0, 1]


def test_of_equals_the_leftmost():
    equal = logits([[0.6, 0.4, 0, 0]] * 3)
    masked = torch.tensor([[False, True, True]])
    assert at(rules.fixed(equal, masked, 1)) == [1]


def test_the_longest_prefix_goes_past_what_is_visible():
    masked = torch.tensor([[False, True, False, True, True]])
    assert at(rules.longest_prefix(logits(TABLE), masked, 0.61)) == [1]
    assert at(rules.longest_prefix(logits(TABLE), masked, 0.475)) == [1, 3]  # .6, .48, .4704


def test_entropy_bound_bounds_what_is_lost():
    """Two fair coins that always agree: TC = ln 2 is what writing both at once loses, and sum H - max H is the same.
    With a smaller bound they are written one after the other."""
    coins = logits([[0.5, 0.5], [0.5, 0.5]])
    masked = torch.ones(1, 2, dtype=torch.bool)
    assert at(rules.entropy_bound(coins, masked, math.log(2) + 1e-6)) == [0, 1]
    assert at(rules.entropy_bound(coins, masked, math.log(2) - 1e-6)) == [0]


def test_klass_waits_for_two_calm_steps():
    """Position 0 stays as it is and is sure; 3 stays, and is not; 1 becomes sure but has moved."""
    moved = [[0.9, 0.1, 0, 0], [0.04, 0.96, 0, 0], [0.25, 0.25, 0.5, 0], [0.8, 0.1, 0.1, 0], [0.98, 0.02, 0, 0]]
    bundle, before, calm = rules.klass(logits(TABLE), MASKED, 0.85, None, None)
    assert at(bundle) == [0] and calm.tolist() == [[0, 0, 0, 0, 0]]  # nothing is known to be calm: the surest
    _, before, calm = rules.klass(logits(TABLE), MASKED, 0.85, before, calm)
    assert calm.tolist() == [[1, 1, 1, 1, 1]]
    bundle, _, calm = rules.klass(logits(moved), MASKED, 0.85, before, calm)
    assert calm.tolist() == [[2, 0, 2, 2, 2]]
    assert at(bundle) == [0]  # and not 1, the surest of all masks now
    bundle, _, _ = rules.klass(logits(moved), MASKED, 0.7, before, torch.full((1, 5), 1))
    assert at(bundle) == [0, 3]


def test_klass_measures_from_the_new_distribution_to_the_old():
    """KL((.5, .5) || (.9, .1)) = .5 ln(.5 / .9) + .5 ln(.5 / .1) = .511; the other way round it is .368."""
    old, new = logits([[0.9, 0.1]]), logits([[0.5, 0.5]])
    masked, none = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    assert rules.klass(new, masked, 0.4, old, none, kl_below=0.512)[2].item() == 1
    assert rules.klass(new, masked, 0.4, old, none, kl_below=0.510)[2].item() == 0


# own probabilities of the tokens in z: .1, .4, .5, .1, .02
Z = torch.tensor([[1, 0, 2, 1, 1]])


def test_t2m_takes_back_what_became_improbable():
    written = torch.tensor([[False, True, True, True, True]])
    never = torch.zeros_like(Z)
    assert at(rules.t2m(logits(TABLE), Z, written, never)) == [4]
    # a quarter of four written tokens is one, the least probable; of eight it would be two
    assert at(rules.t2m(logits(TABLE), Z, written, never, dial=0.45)) == [4]
    eight = torch.cat([logits(TABLE), logits(TABLE)], dim=1)
    twice = torch.cat([Z, Z], dim=1), torch.cat([written, written], dim=1), torch.cat([never, never], dim=1)
    assert at(rules.t2m(eight, *twice, dial=0.45)) == [4, 9]
    # three times a position, and no more; a prompt never
    assert at(rules.t2m(logits(TABLE), Z, written, torch.tensor([[0, 0, 0, 0, 3]]), dial=0.45)) == [3]
    assert at(rules.t2m(logits(TABLE), Z, torch.zeros_like(written), never)) == []


def test_wino_takes_back_less_than_was_written():
    written = torch.tensor([[False, True, True, True, True]])

    def taken(n_new: int, n_last: int, dial: float) -> list[int]:
        return at(rules.wino(logits(TABLE), Z, written, torch.tensor([[n_new]]), torch.tensor([[n_last]]), dial))

    assert taken(2, 9, 0.45) == [1, 3, 4]
    assert taken(2, 3, 0.45) == [3, 4]  # one fewer than the last step wrote, the least probable
    assert taken(2, 1, 0.45) == []
    assert taken(1, 9, 0.45) == []  # a step of one token takes nothing back, or the block might never end


def test_verified_keeps_drafts_up_to_the_first_that_differs():
    """Read from left to right the model would write 0, 1, 2, 0, 0."""
    tokens, filled = rules.verified(logits(TABLE), torch.tensor([[0, 1, 0, 0, 3]]), MASKED)
    assert at(filled) == [0, 1, 2]  # 2 is the first that differs: it is written as the model would
    assert tokens.tolist() == [[0, 1, 2, 0, 3]]
    tokens, filled = rules.verified(logits(TABLE), torch.tensor([[0, 1, 2, 0, 3]]), MASKED)
    assert at(filled) == [0, 1, 2, 3]  # all agree; position 4 is visible and stays


def test_verified_judges_the_leftmost_run_alone():
    masked = torch.tensor([[False, True, False, True, True]])
    tokens, filled = rules.verified(logits(TABLE), torch.tensor([[3, 1, 3, 1, 1]]), masked)
    assert at(filled) == [1]
    assert tokens.tolist() == [[3, 1, 3, 1, 1]]


@pytest.mark.parametrize(("order", "rule"), [("surest", rules.threshold), ("leftmost", rules.longest_prefix)])
def test_two_rules_are_those_of_sample_py(order, rule):
    """The same tokens and forwards as sample.step in a model of that order, at several gates."""
    model = tiny_model(n_rounds=1, order=order)
    prompts = random_ids(6, 11).tolist()
    found = set()
    for tau in (0.9, 0.4, 0.1, 0.02, 0.0):
        off = Decoding(gen_length=24, tau_m2t=tau, tau_t2t=None, n_rounds=0)
        model.step = None
        expected = generate(model, prompts, off)
        model.step = rules.step_of(rule, tau)
        ours = generate(model, prompts, off)
        assert [(o.tokens, o.nfe) for o in ours] == [(o.tokens, o.nfe) for o in expected]
        found.add(sum(o.nfe["full"] for o in ours))
    assert len(found) >= 3  # the dial does something


@pytest.mark.parametrize("rule", rules.RULES)
def test_the_ends_of_a_dial_are_one_at_a_time_and_all_at_once(rule):
    """On a block of 8, of which this model is never sure: 8 forwards, and 1."""
    model = tiny_model(eos_id=-1, std=0.05)
    model.lm_head.weight.data[MASK] = 0  # others are above it: no step writes a mask
    prompt = random_ids(1, 8)[0].tolist()
    off = Decoding(gen_length=8, tau_t2t=None, n_rounds=0)
    forwards = []
    for dial in (rules.DIALS[rule][0], rules.DIALS[rule][-1]):
        model.step = rules.step_of(rules.RULES[rule], dial)
        forwards.append(generate(model, [prompt], off)[0].nfe["full"])
    assert forwards == [8, 1]
