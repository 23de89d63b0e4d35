"""Every rule on one block of five positions and four tokens, worked out by hand.

position      0     1     2     3     4
probability  .90   .60   .50   .80   .98     of the best token
             .10   .40   .25   .10   .02     of the second
              0     0    .25   .10    0      and so on
state        mask  mask  mask  mask  visible

Then Stage B that refuses.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from common import EOS, MASK, random_ids, tiny_model

from beyond import opponents
from beyond.opponents import DIALS, entropy_bound, factor, fixed, longest_prefix, margin, product, threshold
from sample import Decoding, generate

# R = 1 row, B = 5 positions, V = 4 tokens

TABLE = [[0.9, 0.1, 0, 0], [0.4, 0.6, 0, 0], [0.25, 0.25, 0.5, 0], [0.8, 0.1, 0.1, 0], [0.98, 0.02, 0, 0]]
P = torch.tensor([TABLE])
MASKED = torch.tensor([[True, True, True, True, False]])
OFF = Decoding(gen_length=8, tau_t2t=None, n_rounds=0)


def at(bundle: torch.Tensor) -> list[int]:
    return bundle[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("rule", "dial", "bundle"),
    [
        # strictly above; the visible position, surest of all, is never chosen
        (threshold, 0.55, [0, 1, 3]),
        (threshold, 0.95, [0]),  # none passes: the surest
        (threshold, 0.0, [0, 1, 2, 3]),
        # margins: .8, .2, .25, .7
        (margin, 0.75, [0]),
        (margin, 0.22, [0, 2, 3]),
        (margin, -1.0, [0, 1, 2, 3]),
        # products, surest first: .9, .72, .432, .216
        (product, 0.73, [0]),
        (product, 0.71, [0, 3]),
        (product, 0.43, [0, 1, 3]),
        (product, 0.2, [0, 1, 2, 3]),
        # entropies: 0 .325, 3 .639, 1 .673, 2 1.040; sum without the largest: 0, .325, .964, 1.637
        (entropy_bound, -1.0, [0]),
        (entropy_bound, 0.33, [0, 3]),
        (entropy_bound, 0.97, [0, 1, 3]),
        (entropy_bound, math.inf, [0, 1, 2, 3]),
        # (n + 1) (1 - c_n): .2, .6, 1.6, 2.5
        (factor, 0.1, [0]),
        (factor, 0.61, [0, 3]),
        (factor, 1.61, [0, 1, 3]),
        (factor, 3.0, [0, 1, 2, 3]),
        # the surest so many, at most all
        (fixed, 2, [0, 3]),
        (fixed, 9, [0, 1, 2, 3]),
        # products, from the left: .9, .54, .27, .216
        (longest_prefix, 1.0, [0]),
        (longest_prefix, 0.53, [0, 1]),
        (longest_prefix, 0.22, [0, 1, 2]),
        (longest_prefix, 0.0, [0, 1, 2, 3]),
    ],
)
def test_what_a_rule_picks(rule, dial, bundle):
    assert at(rule(P, MASKED, dial)) == bundle


@pytest.mark.parametrize("rule", DIALS)
def test_rows_are_chosen_apart_and_a_finished_row_is_left_alone(rule):
    both = torch.cat([P, P])
    masked = torch.cat([MASKED, torch.zeros_like(MASKED)])
    alone = rule(P, MASKED, 1)
    assert torch.equal(rule(both, masked, 1), torch.cat([alone, torch.zeros_like(alone)]))


def test_a_prefix_ends_at_the_first_that_fails():
    # (n + 1) (1 - c_n) need not rise: 2 * .4 = .8, then 3 * .4 = 1.2, then 4 * .4 = 1.6; a later mask is no way round
    passes = lambda sure: torch.tensor([[True, False, True]])  # noqa: E731
    assert at(opponents.surest(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), passes)) == [0]
    equal = torch.tensor([[[0.6, 0.4, 0, 0]] * 3])
    assert at(factor(equal, torch.ones(1, 3, dtype=torch.bool), 1.3)) == [0, 1]


def small():
    """A tiny model of which no step writes a mask, or an end: other tokens are above them."""
    model = tiny_model(std=0.05)
    model.lm_head.weight.data[[MASK, EOS]] = 0
    return model.requires_grad_(False)


@pytest.mark.parametrize("rule", DIALS)
def test_the_ends_of_a_dial_are_one_at_a_time_and_all_at_once(rule):
    """On a block of 8, of which this model is never sure: 8 forwards, and 1."""
    model = small()
    prompt = random_ids(1, 8)[0].tolist()
    forwards = []
    for dial in (DIALS[rule][0], DIALS[rule][-1]):
        d = replace(OFF, select=partial(rule, dial=dial))
        forwards.append(generate(model, [prompt], d)[0].nfe["full"])
    assert forwards == [8, 1]


# --- Stage B that refuses
@torch.inference_mode()
def test_stage_b_writes_the_longest_prefix_that_is_sure_enough():
    """All masks of a block at once, against Stage B's own probabilities; of nothing sure Stage A's first token."""
    model = small()
    model.markers.data *= 100  # the two stages differ
    steps = []
    prompt = random_ids(1, 3)[0].tolist()
    d = replace(OFF, gen_length=5, tau_m2t=-1.0, n_rounds=1)
    generate(model, [prompt], d, on_step=lambda rows, s: steps.append(s))
    together = steps[0].look.conf[0, 3:].cumprod(-1)
    stage_b = steps[0].look.token
    for k in range(5):
        refused = replace(d, tau_keep=float(together[k]), look=opponents.refusing)
        steps.clear()
        generate(model, [prompt], refused, on_step=lambda rows, s: steps.append(s))
        look = steps[0].look
        assert at(look.written) == [3, *range(4, 3 + k)] and look.looks == 1
        whose = steps[0].stage_a.token if k == 0 else stage_b
        assert torch.equal(look.token[look.written], whose[look.written])
    assert steps[0].stage_a.token[0, 3] != stage_b[0, 3]
