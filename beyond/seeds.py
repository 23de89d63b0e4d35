"""How sure is a mean? Resamples of the beginnings and of the seeds of training, and a fair choice of settings.

A system has S seeds, and each of its P settings was decoded by every seed. There are R prompts; equal prompts are one
beginning, of which there are C. (Of text, prompts are spans, and beginnings documents.)

A resample draws C beginnings with replacement, each with all of its prompts, and S seeds with replacement. Beginnings
are drawn alike for all systems, and so are seeds for all that have as many: a difference of two systems is paired by
both. (S seeds drawn from S spread a little less than S seeds trained anew: their variance is (S - 1) / S of it.)

The best of many settings flatters where it is judged by what it was chosen by. So the beginnings are halved, what is
best on one half is judged on the other, and the reverse; 20 such halvings are averaged, anew in every resample.
What a setting costs is known from all prompts, and differs from seed to seed: a resample takes its own seeds' mean.

A user may mix two settings, one for some prompts and the other for the rest, for every cost between theirs, and has
the share between theirs. What is best lies on the concave hull of all settings.
"""

from collections.abc import Iterator, Sequence

import numpy as np

# P settings, S seeds, R prompts, C beginnings, W resamples, the first of which is the sample itself

BOOTSTRAP = 1000
HALVINGS = 20


def halvings(C: int) -> np.ndarray:
    """(HALVINGS, C) bool."""
    rng = np.random.default_rng(0)
    return np.array([rng.permutation(C) < C // 2 for _ in range(HALVINGS)])


def resamples(n: int, key: int | list[int]) -> np.ndarray:
    """How often a resample has each of n things, (W, n) float32: in row 0 once, then as a bootstrap draws them."""
    drawn = np.random.default_rng(key).multinomial(n, np.full(n, 1 / n), size=BOOTSTRAP)
    return np.concatenate([np.ones((1, n)), drawn]).astype(np.float32)


def times_of_seeds(S: int) -> np.ndarray:
    """How often a resample has each of S seeds: (W, S) float32."""
    return resamples(S, [1, S])


def interval(drawn: np.ndarray, sign: str = "") -> str:
    """Estimate (the first) and 95 % of its bootstrap (the rest, but for resamples that can pay for nothing)."""
    if np.isnan(drawn[0]):
        return "-"
    low, high = np.nanquantile(drawn[1:], [0.025, 0.975])
    return f"{drawn[0]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


# --- means
def by_beginning(values: np.ndarray, cluster: Sequence[int]) -> np.ndarray:
    """(P, S, R) -> sums over the prompts of each beginning, (P, S, C) float32."""
    P, S, _ = values.shape
    sums = np.array([np.bincount(cluster, row) for row in values.reshape(P * S, -1)])
    return sums.reshape(P, S, -1).astype(np.float32)


def totals(sums: np.ndarray, times: np.ndarray) -> np.ndarray:
    """sums (P, S, C) over resamples times (W, C) of the beginnings, and of the seeds: (W, P).

    Numbers of existing names are whole, and float32 adds them without rounding."""
    P, S, C = sums.shape
    of_each_seed = (times @ sums.reshape(P * S, C).T).reshape(-1, P, S)
    return np.einsum("wps,ws->wp", of_each_seed, times_of_seeds(S))


# --- what a budget pays for
def mixture(cost: np.ndarray, chooses: np.ndarray, judges: np.ndarray, budgets: Sequence[float]) -> np.ndarray:
    """What the affordable mixture of two settings that is best by one half has by the other, between corners of the
    hull that the first one chooses: (W, P) three times -> (budgets, W)."""
    every = np.arange(len(cost))
    found = np.full((len(budgets), len(cost)), np.nan)
    for at, to in hull(cost, chooses):
        length = cost[every, to] - cost[every, at]
        gain = judges[every, to] - judges[every, at]
        for row, budget in zip(found, budgets, strict=True):
            # what is left of the budget beyond the next corner, the next step sees
            spent = (budget - cost[every, at]).clip(max=length)
            share = np.divide(spent, length, out=np.zeros_like(spent), where=length > 0)
            reached = budget >= cost[every, at]
            row[reached] = (judges[every, at] + share * gain)[reached]
    return found


def hull(cost: np.ndarray, share: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Walk along the concave hull of every resample: from its cheapest setting on, each time to the one with the
    steepest gain, as long as there is a gain.

    cost (W, P), share (W, P) -> corner after corner the settings (W,) where each resample stands, and to which it
    goes: at its end the same.

    Costs 1, 2, 3, 4 and shares 0, .2, .6, .5: from 0 to 2. Setting 1 lies below that line, and 3 gains nothing.
    """
    every = np.arange(len(cost))
    cheapest = cost == cost.min(-1, keepdims=True)
    at = np.where(cheapest, share, -np.inf).argmax(-1)
    while True:
        dearer = cost - cost[every, at][:, None]
        better = share - share[every, at][:, None]
        gains = (dearer > 0) & (better > 0)
        slope = np.divide(better, dearer, out=np.zeros_like(dearer), where=gains)
        to = np.where(gains.any(-1), slope.argmax(-1), at)
        yield at, to
        if (to == at).all():
            return
        at = to


def within_budgets(
    values: np.ndarray, costs: np.ndarray, cluster: Sequence[int], budgets: Sequence[float]
) -> np.ndarray:
    """What a system has within each budget, by 20 halvings: values (P, S, R), costs (P, S), cluster (R,) -> (budgets,
    W), nan where every setting costs more. A resample pays the mean cost of the seeds that it has."""
    number = np.bincount(cluster)  # (C,) prompts of each beginning
    times = resamples(len(number), 0)  # (W, C)
    sums = by_beginning(values, cluster)
    whole = totals(sums, times)
    S = sums.shape[1]
    paid = times_of_seeds(S) @ costs.T / S  # (W, P)
    limits = np.array(budgets) + 1e-9  # rounding

    found = np.zeros((len(budgets), len(whole)))
    halves = halvings(len(number))
    for half in halves:
        here = totals(sums[..., half], times[:, half])
        there = whole - here
        found += mixture(paid, here, there, limits) + mixture(paid, there, here, limits)

    # the values that a resample has, of prompts and seeds
    n = times @ number * S
    return found / (n * len(halves))
