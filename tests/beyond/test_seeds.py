"""How sure a share is: closed forms, and a slow twin of the fast sums. `pytest tests/beyond/test_seeds.py`"""

import itertools
import math

import numpy as np
from common import approx

from beyond import seeds
from beyond.seeds import interval

# P settings, S seeds, R prompts, C beginnings


def values_of(found):
    """found: a string of digits for each seed of each setting, a digit a prompt."""
    return np.array([[[int(digit) for digit in seed] for seed in setting] for setting in found], dtype=float)


def drawn(found, cluster):
    """The share of one setting in every resample, the sample first; found: a string for each seed."""
    return seeds.within_budgets(values_of([found]), np.ones((1, len(found))), cluster, [1.0])[0]


def best(found, cluster, budget=1.0, costs=None):
    """The share within a budget, of the sample. A setting costs 1, by any seed, unless `costs` has it."""
    values = values_of(found)
    costs = np.outer(costs or [1.0] * len(found), [1.0] * values.shape[1])  # (P, S)
    return seeds.within_budgets(values, costs, cluster, [budget])[0, 0]


# --- intervals
def test_an_interval_leaves_out_an_end_of_each_forty():
    """The first number is the estimate, the others its resamples."""
    assert interval(np.array([0.5, *np.arange(41) / 40])) == "0.500 [0.025, 0.975]"
    assert interval(np.full(3, np.nan)) == "-"


def test_a_resample_has_as_many_as_the_sample():
    drawn = seeds.resamples(5, 0)
    assert drawn.shape == (1001, 5) and (drawn[0] == 1).all() and (drawn.sum(-1) == 5).all()
    assert np.mean(drawn[1:, 0] == 0) == approx(0.8**5, abs=0.05)


def test_beginnings_and_seeds_are_drawn_twice_once_or_never():
    """Shares of a resample: 1, 1/2 and 0, with probability 1/4, 1/2, 1/4; of 3 and 1 prompts 1, 3/4 and 0. What one
    seed completes the other does not: with 200 prompts the share is still 0, 1/2 or 1."""
    assert interval(drawn(["10"], [0, 1])) == "0.500 [0.000, 1.000]"
    x = drawn(["1110"], [0, 0, 0, 1])
    assert set(x[1:]) == {0.0, 0.75, 1.0} and x[0] == 0.75
    assert np.mean(x[1:] == 0.75) == approx(0.5, abs=0.05)  # three standard deviations of 1,000 draws
    of_seeds = drawn(["1" * 200, "0" * 200], range(200))
    assert of_seeds[0] == 0.5 and set(of_seeds[1:]) == {0.0, 0.5, 1.0}
    assert np.mean(of_seeds[1:] == 0.5) == approx(0.5, abs=0.05)


# --- the choice of settings
def test_what_is_best_on_one_half_is_judged_on_the_other():
    """Of two beginnings each half has one. x completes the first, y the second: chosen by one, nothing of the other."""
    assert best([["10"], ["01"]], range(2)) == 0
    # each half finds the third as good as the other best, and cheaper
    assert best([["10"], ["01"], ["11"]], range(2), costs=[1.0, 1.0, 0.5]) == 1
    # one setting leaves nothing to choose
    assert best([["10"]], range(2)) == 0.5

    # halvings are even and differ
    halves = seeds.halvings(11)
    assert halves.shape == (20, 11) and set(halves.sum(1)) == {5}
    assert len({tuple(half) for half in halves}) > 15


def mixtures(cost, by_one, by_other, budget):
    """Of each affordable setting, and pair of settings that uses up the budget: what it has by one half, what is left
    of the budget, and what it has by the other half."""
    for i, j in itertools.product(range(len(cost)), repeat=2):
        share = 0.0
        if cost[j] > cost[i]:
            share = min(1, (budget - cost[i]) / (cost[j] - cost[i]))
        if cost[i] <= budget:
            yield tuple((1 - share) * of[i] + share * of[j] for of in (by_one, budget - cost, by_other))


def test_the_sums_are_those_of_a_plain_loop():
    """Every resample and halving, prompt by prompt, and every pair of settings; of equals the cheapest."""
    rng = np.random.default_rng(1)
    cluster = [0, 1, 2, 0, 3, 4, 1, 5, 6]
    P, S, R = 4, 3, len(cluster)
    values = rng.uniform(0, 1, (P, S, R))
    costs = rng.uniform(0.3, 0.9, (P, S))
    budgets = [0.2, 0.5, 0.8, 1.0]
    found = seeds.within_budgets(values, costs, cluster, budgets)

    times = seeds.resamples(7, 0)
    of_seeds = seeds.times_of_seeds(S)
    for w in (0, 1, 17, 1000):
        # how often each completion of this resample counts
        weight = times[w][cluster] * of_seeds[w][:, None]  # (S, R)
        for row, budget in zip(found, budgets, strict=True):
            cost = costs @ of_seeds[w] / S
            total = 0.0
            for half in seeds.halvings(7):
                for chooses in (half[cluster], ~half[cluster]):
                    by_one = (values * weight * chooses).sum((1, 2))
                    by_other = (values * weight * ~chooses).sum((1, 2))
                    total += max(mixtures(cost, by_one, by_other, budget), default=[math.nan])[-1]
            assert row[w] == approx(total / weight.sum() / seeds.HALVINGS, abs=1e-5, nan_ok=True)


# --- mixtures
def test_the_hull_by_hand():
    """Costs 1, 2, 3, 4 with shares 0, .2, .6, .5: setting 1 lies below the line from 0 to 2, and 3 gains nothing.
    Above the line, at .4, setting 1 is a corner. In any order, and of the cheapest ones the best."""
    cost = np.array([[1.0, 2.0, 3.0, 4.0]] * 3 + [[3.0, 1.0, 1.0, 5.0]])
    share = np.array([[0.0, 0.2, 0.6, 0.5], [0.0, 0.4, 0.6, 0.7], [0.9, 0.4, 0.6, 0.7], [0.6, 0.1, 0.2, 0.6]])
    corners = np.array([at for at, _ in seeds.hull(cost, share)]).T
    assert corners.tolist() == [[0, 2, 2, 2], [0, 1, 2, 3], [0, 0, 0, 0], [2, 0, 0, 0]]

    # between 0 and 2, by the other half's shares
    other = np.array([[0.1, 9.0, 0.5, 9.0]])
    found = seeds.mixture(cost[:1], share[:1], other, [0.5, 1.0, 1.5, 3.0, 8.0])[:, 0]
    assert math.isnan(found[0]) and found[1:].tolist() == approx([0.1, 0.2, 0.5, 0.5])


def test_a_mixture_is_chosen_on_one_half_and_judged_on_the_other():
    """Of two beginnings each half has one. x completes neither, for 1; y the first, for 3: one half mixes them and
    gets nothing of the other; the other half stays with x, which has nothing either. z completes both, for 3."""
    share = lambda found, budget: best(found, range(2), budget, [1.0, 3.0])  # noqa: E731
    assert share([["00"], ["10"]], 2.0) == 0
    assert share([["00"], ["11"]], 2.0) == approx(0.5) and share([["00"], ["11"]], 2.5) == approx(0.75)
    assert share([["00"], ["11"]], 9.0) == approx(1) and math.isnan(share([["00"], ["11"]], 0.9))
