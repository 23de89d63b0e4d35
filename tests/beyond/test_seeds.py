"""How sure a share is: closed forms, and a slow twin of the fast sums. `pytest tests/beyond/test_seeds.py`"""

import math

import numpy as np
from common import approx

from beyond import seeds
from beyond.seeds import interval

# P settings, S seeds, R prompts, C beginnings


def sums_of(found, cluster):
    """found: a string of digits for each seed of each setting, a digit a prompt."""
    values = np.array([[[int(digit) for digit in seed] for seed in setting] for setting in found], dtype=float)
    return seeds.by_beginning(values, cluster)


def drawn(found, cluster):
    """The share of one setting in every resample, the sample first; found: a string for each seed."""
    return seeds.shares(sums_of([found], cluster), seeds.draw(cluster))[:, 0]


def best(found, cluster, budget=1.0, costs=None):
    """The share within a budget, of the sample. A setting costs 1, by any seed, unless `costs` has it."""
    sums = sums_of(found, cluster)
    costs = np.outer(costs or [1.0] * len(found), [1.0] * sums.shape[1])  # (P, S)
    return seeds.within_budgets(sums, {"all": costs}, [budget], seeds.draw(cluster))["all"][0, 0]


# --- intervals
def test_an_interval_leaves_out_an_end_of_each_forty():
    """The first number is the estimate, the others its resamples."""
    assert interval(np.array([0.5, *np.arange(41) / 40])) == "0.500 [0.025, 0.975]"
    assert interval(np.full(3, np.nan)) == "-"


def test_rows_of_a_cluster_are_drawn_together():
    drawn = seeds.resamples(range(5))
    assert drawn.shape == (1001, 5) and (drawn[0] == 1).all() and (drawn.sum(-1) == 5).all()
    assert np.array_equal(seeds.resamples([0, 1, 0]), seeds.resamples([0, 1])[:, [0, 1, 0]])


def test_two_beginnings_are_drawn_twice_once_or_never():
    """Shares of a resample: 1, 1/2 and 0, with probability 1/4, 1/2, 1/4; of 3 and 1 prompts 1, 3/4 and 0."""
    assert interval(drawn(["10"], [0, 1])) == "0.500 [0.000, 1.000]"
    x = drawn(["1110"], [0, 0, 0, 1])
    assert set(x[1:]) == {0.0, 0.75, 1.0} and x[0] == 0.75
    assert np.mean(x[1:] == 0.75) == approx(0.5, abs=0.05)  # three standard deviations of 1,000 draws


def test_different_beginnings_have_the_binomial_interval():
    """200 beginnings, 60 exist: a resample's number is binomial (200, 0.3), whose 2.5 and 97.5 % points are known."""
    low, high = map(float, interval(drawn(["1" * 60 + "0" * 140], range(200)))[7:-1].split(", "))
    cdf = np.cumsum([math.comb(200, k) * 0.3**k * 0.7 ** (200 - k) for k in range(201)])
    assert 200 * low == approx(np.searchsorted(cdf, 0.025), abs=2)
    assert 200 * high == approx(np.searchsorted(cdf, 0.975), abs=2)


def test_seeds_are_drawn_as_beginnings_are():
    """What one seed completes the other does not: with 200 prompts the share is still 0, 1/2 or 1."""
    x = drawn(["1" * 200, "0" * 200], range(200))
    assert x[0] == 0.5 and set(x[1:]) == {0.0, 0.5, 1.0}
    assert np.mean(x[1:] == 0.5) == approx(0.5, abs=0.05)
    assert interval(x) == "0.500 [0.000, 1.000]"


def test_a_difference_is_paired_by_beginning_and_by_seed():
    """The first seed completes every prompt, the second none; a completes prompt 0 once more than b in both."""
    a, b = (drawn(found, range(20)) for found in (["21" * 10, "10" * 10], ["11" * 10, "00" * 10]))
    assert interval(a) != interval(b) and b[1:].max() - b[1:].min() == 1
    extra = drawn(["10" * 10], range(20))
    assert (a - b)[1:] == approx(extra[1:])


# --- the choice of settings
def test_what_is_best_on_one_half_is_judged_on_the_other():
    """Of two beginnings each half has one. x completes the first, y the second: chosen by one, nothing of the other."""
    assert best([["10"], ["01"]], range(2)) == 0
    # each half finds the third as good as the other best, and cheaper
    assert best([["10"], ["01"], ["11"]], range(2), costs=[1.0, 1.0, 0.5]) == 1
    # one setting leaves nothing to choose
    assert best([["10"]], range(2)) == 0.5


def test_a_budget_takes_what_it_can_pay():
    settings = [["1111"], ["0100"]]
    assert best(settings, range(4), 1.49, [1.5, 0.5]) == 0.25
    assert best(settings, range(4), 1.5, [1.5, 0.5]) == 1
    assert math.isnan(best(settings, range(4), 0.49, [1.5, 0.5]))


def test_a_resample_pays_the_costs_of_its_own_seeds():
    """0.4 by the first seed and 0.8 by the second: 0.6 is enough for both, and not for the second twice."""
    sums = sums_of([["11", "11"]], range(2))
    costs = {"all": np.array([[0.4, 0.8]])}
    found = seeds.within_budgets(sums, costs, [0.6], seeds.draw(range(2)))["all"][0]
    twice_the_second = seeds.times_of_seeds(2)[:, 1] == 2
    assert found[0] == 1 and twice_the_second.any()
    assert np.array_equal(np.isnan(found), twice_the_second) and (found[~twice_the_second] == 1).all()


def test_of_equals_the_cheapest():
    """Two resamples of two settings, the cheaper one first: in the first resample one half finds them equal."""
    here = np.array([[3.0, 3.0], [2.0, 5.0]])
    there = np.array([[7.0, 1.0], [1.0, 4.0]])
    cost = np.array([[0.5, 0.6], [0.5, 0.6]])
    assert seeds.one_setting(cost, here, there, [1.0]).tolist() == [[7, 4]]
    assert seeds.one_setting(cost, there, here, [1.0]).tolist() == [[3, 5]]
    # without the second setting, and then without any
    only, none = seeds.one_setting(cost, here, there, [0.55, 0.1])
    assert only.tolist() == [7, 1] and np.isnan(none).all()
    assert best([["11"], ["00"]], range(2), costs=[0.5, 0.6]) == 1
    # z completes beginning 0 as x does, and nothing else: the cheaper of the two is taken, judged on beginning 1
    assert best([["11"], ["10"]], range(2), costs=[0.5, 0.6]) == 1
    assert best([["11"], ["10"]], range(2), costs=[0.6, 0.5]) == 0.5


def test_the_sums_are_those_of_a_plain_loop():
    """Every resample and halving, prompt by prompt."""
    rng = np.random.default_rng(1)
    cluster = [0, 1, 2, 0, 3, 4, 1, 5, 6]
    P, S, R = 4, 3, len(cluster)
    values = rng.integers(0, 2, (P, S, R)).astype(float)
    costs = rng.uniform(0.3, 0.9, (P, S))
    draws = seeds.draw(cluster)
    budgets = [0.2, 0.5, 0.8, 1.0]
    sums = seeds.by_beginning(values, cluster)
    found = seeds.within_budgets(sums, {"all": costs}, budgets, draws)["all"]

    share = seeds.shares(seeds.by_beginning(values, cluster), draws)

    of_seeds = seeds.times_of_seeds(S)
    for w in (0, 1, 17, 1000):
        # how often each completion of this resample counts
        weight = draws.times[w][cluster] * of_seeds[w][:, None]  # (S, R)
        assert share[w] == approx([(values[p] * weight).sum() / weight.sum() for p in range(P)])
        for row, budget in zip(found, budgets, strict=True):
            cost = [sum(of_seeds[w] * costs[p]) / S for p in range(P)]
            pay = [p for p in np.argsort(costs.mean(-1)) if cost[p] <= budget]
            if not pay:
                assert math.isnan(row[w])
                continue
            total = 0.0
            for half in draws.halves:
                for chooses in (half[cluster], ~half[cluster]):
                    scores = [(values[p] * weight * chooses).sum() for p in pay]
                    total += (values[pay[int(np.argmax(scores))]] * weight * ~chooses).sum()
            assert row[w] == approx(total / weight.sum() / len(draws.halves))


def test_halvings_are_even_and_differ():
    halves = seeds.draw(range(11)).halves
    assert halves.shape == (20, 11) and set(halves.sum(1)) == {5}
    assert len({tuple(half) for half in halves}) > 15


# --- mixtures
def test_the_hull_by_hand():
    """Costs 1, 2, 3, 4 with shares 0, .2, .6, .5: setting 1 lies below the line from 0 to 2, and 3 gains nothing. Above
    the line, at .4, setting 1 is a corner. In any order, and of the cheapest ones the best.
    """
    cost = np.array([[1.0, 2.0, 3.0, 4.0]] * 3 + [[3.0, 1.0, 1.0, 5.0]])
    share = np.array([[0.0, 0.2, 0.6, 0.5], [0.0, 0.4, 0.6, 0.7], [0.9, 0.4, 0.6, 0.7], [0.6, 0.1, 0.2, 0.6]])
    corners = np.array([at for at, _ in seeds.hull(cost, share)]).T
    assert corners.tolist() == [[0, 2, 2, 2], [0, 1, 2, 3], [0, 0, 0, 0], [2, 0, 0, 0]]

    # between 0 and 2, by the other half's shares
    other = np.array([[0.1, 9.0, 0.5, 9.0]])
    found = seeds.mixture(cost[:1], share[:1], other, [0.5, 1.0, 1.5, 3.0, 8.0])[:, 0]
    assert math.isnan(found[0]) and found[1:].tolist() == approx([0.1, 0.2, 0.5, 0.5])


def test_a_mixture_is_chosen_on_one_half_and_judged_on_the_other():
    """Of two beginnings each half has one. x completes neither, for 1; y the first, for 3: one half mixes them and gets
    nothing of the other; the other half stays with x, which has nothing either. z completes both, for 3."""

    def share(found, budget):
        sums = sums_of(found, range(2))
        costs = {"all": np.array([[1.0], [3.0]])}
        return seeds.within_budgets(sums, costs, [budget], seeds.draw(range(2)), seeds.mixture)["all"][0, 0]

    assert share([["00"], ["10"]], 2.0) == 0
    assert share([["00"], ["11"]], 2.0) == approx(0.5) and share([["00"], ["11"]], 2.5) == approx(0.75)
    assert share([["00"], ["11"]], 9.0) == approx(1) and math.isnan(share([["00"], ["11"]], 0.9))
