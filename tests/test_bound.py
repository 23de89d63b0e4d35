"""The gate's bound (results/theorem), by enumeration of random joint tables. `pytest tests/test_bound.py`"""

import pytest
import torch
from torch import Tensor

from decoding import PAPER
from sample import certified


def random_tables(seed: int, n: int, V: int, k: int) -> Tensor:
    """(n, V, .., V) float64 with k axes: from tables where many tuples are likely to those of a single one."""
    g = torch.Generator().manual_seed(seed)
    sharpness = torch.logspace(0.5, 3, n, dtype=torch.float64)[:, None]
    table = torch.rand(n, V**k, generator=g, dtype=torch.float64) ** sharpness
    return (table / table.sum(1, keepdim=True)).view(n, *[V] * k)


def surest(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens, each by itself: their probabilities (n, k), that of all together, and the mode's, (n,)."""
    k = table.dim() - 1
    marginals = [table.sum([j + 1 for j in range(k) if j != i]) for i in range(k)]
    p = torch.stack([marginal.amax(1) for marginal in marginals], dim=1)
    tokens = [marginal.argmax(1) for marginal in marginals]
    return p, table[torch.arange(len(table)), *tokens], table.flatten(1).amax(1)


@pytest.mark.parametrize("V", [2, 3])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_what_is_certified_is_the_likeliest_tuple(V, k):
    p, together, mode = surest(random_tables(10 * V + k, 50_000, V, k))
    agree = together >= mode - 1e-12
    sharp = certified(None, p, torch.ones_like(p, dtype=torch.bool), PAPER).all(1)
    # Fast-dLLM's form, with the largest gate that all of them exceed
    gate = (k + 1) * (1 - p).amax(1) <= 1
    assert agree[sharp].all() and not (gate & ~sharp).any()
    # tables of all kinds: the bound holds, it does not hold and they agree all the same, and they do not agree
    assert min(gate.sum(), (sharp & ~gate).sum(), (~sharp & agree).sum(), (~agree).sum()) > 100
