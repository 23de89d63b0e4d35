"""What the alpha loss asks for, on tables that are small enough to try everything: its best answer among products.

A table q gives each tuple of tokens its probability, a product p has a distribution for each position. In expectation
the loss is (1 - E_q[P^alpha]) / alpha with P = prod p_i(x_i), so its best product has the largest E_q[P^alpha].
"""

import math

import pytest
import torch
from common import approx
from torch import Tensor

from corrupt import alpha_loss


def random_table(seed: int, *shape: int) -> Tensor:
    q = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return q / q.sum()


def product(logs: list[Tensor]) -> Tensor:
    """Log P of every tuple, of independent positions: position i has (..., n_i) -> (..., n_1, n_2, ..)."""
    table = logs[0]
    for i, log_p in enumerate(logs[1:], start=1):
        table = table[..., None] + log_p[(..., *[None] * i, slice(None))]
    return table


def marginals(table: Tensor) -> list[Tensor]:
    return [table.sum([j for j in range(table.dim()) if j != i]) for i in range(table.dim())]


def descend(xs: list[Tensor], q: Tensor, alpha: float) -> list[Tensor]:
    """Products (starts, n_i) by their logits -> where the loss in expectation, summed over all starts, leads them."""
    xs = [x.requires_grad_() for x in xs]
    how = dict(max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe")
    descent = torch.optim.LBFGS(xs, **how)

    def closure() -> Tensor:
        descent.zero_grad()
        ce = -product([x.log_softmax(-1) for x in xs]).flatten(1)  # of each product, of each tuple
        loss = sum(q_t * alpha_loss(ce_t, alpha) for q_t, ce_t in zip(q.flatten(), ce.T, strict=True))
        loss.backward()
        return loss

    descent.step(closure)
    return [x.detach() for x in xs]


def expected(q: Tensor, xs: list[Tensor], alpha: float) -> Tensor:
    """E_q[P^alpha] of every start."""
    log_p = product([x.log_softmax(-1) for x in xs])
    return (q * (alpha * log_p).exp()).flatten(1).sum(1)


def best_product(q: Tensor, alpha: float) -> tuple[float, list[Tensor]]:
    """The product that has the least loss from twenty random starts, and its E_q[P^alpha]."""
    g = torch.Generator().manual_seed(0)
    xs = descend([3 * torch.randn(20, n, generator=g, dtype=torch.float64) for n in q.shape], q, alpha)
    best = expected(q, xs, alpha).argmax()

    # that one alone, to its end
    xs = descend([x[best, None] for x in xs], q, alpha)
    return float(expected(q, xs, alpha)), [x.softmax(-1)[0] for x in xs]


@pytest.mark.parametrize("shape", [(3, 4), (3, 3, 2)])
def test_at_alpha_one_the_best_product_is_the_joint_mode(shape):
    """One tuple with probability 1, and no other, whatever the marginals say."""
    others = 0
    for seed in range(8):
        q = random_table(seed, *shape)
        best, ps = best_product(q, 1.0)
        mode = [int(i) for i in torch.unravel_index(q.argmax(), shape)]
        assert best == approx(q.max().item(), abs=1e-4)
        assert [p.argmax().item() for p in ps] == mode and all(p.max() > 0.999 for p in ps)
        others += [p.argmax().item() for p in marginals(q)] != mode
    assert others >= 2  # or the marginals could have told it


@pytest.mark.parametrize("alpha", [0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2)])
def test_between_them_the_loss_charges_total_correlation(shape, alpha):
    """The best product has the marginals of pi ~ q P^alpha, which among all tables has the least
    KL(pi || q_T) + alpha / (1 - alpha) TC(pi), where q_T ~ q^(1 / (1 - alpha))."""
    q = random_table(3, *shape)
    scale = (q ** (1 / (1 - alpha))).sum()
    q_t = q ** (1 / (1 - alpha)) / scale

    def charge(pi: Tensor) -> float:
        kl = (pi * (pi / q_t).log()).sum()
        tc = (pi * (pi.log() - product([p.log() for p in marginals(pi)]))).sum()
        return float(kl + alpha / (1 - alpha) * tc)

    best, ps = best_product(q, alpha)
    pi = q * (alpha * product([p.log() for p in ps])).exp() / best
    for ours, theirs in zip(ps, marginals(pi), strict=True):
        assert ours.tolist() == approx(theirs.tolist(), abs=1e-4)
    assert math.log(best) == approx((1 - alpha) * (math.log(scale) - charge(pi)), abs=1e-6)

    # no other table has less: neighbours, and tables from everywhere
    for seed in range(300):
        other = random_table(100 + seed, *shape) ** (1 + seed % 8)
        for share in (0.01, 0.1, 1.0):
            assert charge((1 - share) * pi + share * other / other.sum()) > charge(pi)


def test_near_zero_the_best_product_is_the_marginals():
    q = random_table(3, 3, 4)
    _, ps = best_product(q, 1e-4)
    for ours, theirs in zip(ps, marginals(q), strict=True):
        assert ours.tolist() == approx(theirs.tolist(), abs=1e-3)


@pytest.mark.parametrize("N, m", [(3, 2), (4, 3), (2, 4)])
def test_tuples_that_share_nothing_give_way_to_one_tuple_at_alpha_m_of_one(N, m):
    """N tuples, equally likely: the marginals have N^(-alpha m), one tuple 1 / N, and nothing else is better."""
    q = torch.zeros((N,) * m, dtype=torch.float64)
    for k in range(N):
        q[(k,) * m] = 1 / N
    for alpha, expected in ((0.9 / m, N**-0.9), (1.1 / m, 1 / N)):
        best, ps = best_product(q, alpha)
        assert best == approx(expected, abs=1e-4)
    assert len({p.argmax().item() for p in ps}) == 1 and all(p.max() > 0.99 for p in ps)
