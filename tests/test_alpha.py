"""What the alpha loss of tiny.py asks for, where both sides can be computed: its best product, on small tables.

A table q gives each tuple of tokens its probability, a product p has a distribution for each position. The loss is
(1 - E_q[P^alpha]) / alpha with P = prod p_i(x_i), so its best product has the largest E_q[P^alpha].
"""

import pytest
import torch
from common import approx
from torch import Tensor

import tiny


def random_table(seed: int, *shape: int) -> Tensor:
    q = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return q / q.sum()


def product(ps: list[Tensor]) -> Tensor:
    """The joint tables of independent positions: of each position i (..., n_i) -> (..., n_1, n_2, ..)."""
    table = ps[0]
    for i, p in enumerate(ps[1:], start=1):
        table = table[..., None] * p[(..., *[None] * i, slice(None))]
    return table


def marginals(table: Tensor) -> list[Tensor]:
    return [table.sum([j for j in range(table.dim()) if j != i]) for i in range(table.dim())]


def best_product(q: Tensor, alpha: float) -> tuple[float, list[Tensor]]:
    """The largest E_q[P^alpha] and its product, one position at a time, from a hundred random products.

    If the others are fixed, position i maximises sum_a w_a p_i(a)^alpha, which has p_i(a) ~ w_a^(1 / (1 - alpha)).
    """
    g = torch.Generator().manual_seed(0)
    ps = [(4 * torch.randn(100, n, generator=g, dtype=torch.float64)).softmax(-1) for n in q.shape]
    for _ in range(1000):
        before = torch.cat(ps, dim=-1)
        for i in range(q.dim()):
            others = product([*ps[:i], torch.ones_like(ps[i]), *ps[i + 1 :]])
            w = (q * others**alpha).sum([j + 1 for j in range(q.dim()) if j != i])
            if alpha < 1:
                ps[i] = (w.log() / (1 - alpha)).softmax(-1)
            else:
                ps[i] = (w == w.amax(-1, keepdim=True)).double()
        if (torch.cat(ps, dim=-1) - before).abs().max() < 1e-12:
            break
    value = (q * product(ps) ** alpha).flatten(1).sum(1)
    best = value.argmax()
    return value[best].item(), [p[best] for p in ps]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_it_is_the_loss_of_tiny(alpha):
    """In seven rows, of which the first has nothing to fill. At alpha 0 the loss is -log P. The gradient is that of the
    cross-entropy times P^alpha."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 6, 5, generator=g, dtype=torch.float64).requires_grad_()
    target = torch.randint(5, (7, 6), generator=g)
    fill = torch.rand(7, 6, generator=g) < torch.arange(7)[:, None] / 6
    ce = -(logits.log_softmax(-1).gather(-1, target[..., None])[..., 0] * fill).sum(1)
    power = (-alpha * ce).exp().detach()
    loss = tiny.fill_loss(logits, target, fill, alpha)
    assert loss.item() == approx(((1 - power) / alpha if alpha else ce).sum().item() / 42)
    slopes = [torch.autograd.grad(of, logits, retain_graph=True)[0] for of in (loss, (power * ce).sum() / 42)]
    torch.testing.assert_close(*slopes)


def test_at_alpha_one_the_best_product_is_the_joint_mode():
    """The best product gives one tuple the probability 1, whatever the marginals are."""
    shape, others = (3, 3, 2), 0
    for seed in range(8):
        q = random_table(seed, *shape)
        best, ps = best_product(q, 1.0)
        mode = [int(i) for i in torch.unravel_index(q.argmax(), shape)]
        assert best == approx(q.max().item())
        assert [p.argmax().item() for p in ps] == mode and all(p.max() == 1 for p in ps)
        others += [p.argmax().item() for p in marginals(q)] != mode
    assert others >= 2  # or the marginals could have told it


@pytest.mark.parametrize("shape, alpha", [((3, 4), 0.4), ((2, 3, 2), 0.2), ((2, 3, 2), 0.6)])
def test_between_them_the_optimum_is_sharper_and_has_less_total_correlation(shape, alpha):
    """Where the gradient is zero, the product has the marginals of pi ~ q P^alpha. At the best product this pi has less
    entropy than the table q, and less TC."""
    q = random_table(3, *shape)
    best, ps = best_product(q, alpha)
    pi = q * product(ps) ** alpha / best
    for ours, theirs in zip(ps, marginals(pi), strict=True):
        assert ours.tolist() == approx(theirs.tolist(), abs=1e-4)

    def entropy(table: Tensor) -> float:
        return -float((table * table.log()).sum())

    def tc(table: Tensor) -> float:
        return sum(map(entropy, marginals(table))) - entropy(table)

    assert entropy(pi) < entropy(q) and tc(pi) < tc(q)


def test_near_zero_the_best_product_is_the_marginals():
    q = random_table(3, 3, 4)
    _, ps = best_product(q, 1e-4)
    for ours, theirs in zip(ps, marginals(q), strict=True):
        assert ours.tolist() == approx(theirs.tolist(), abs=1e-3)
