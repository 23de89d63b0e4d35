"""The toy tables against closed forms, independent integration, published values and brute force.

pytest -q tests/test_toy.py
"""

import itertools
import math

import numpy as np
import pytest
import torch
from common import coherent, command_line, conditional, refused

from evaluate import distances
from lib import toy
from lib.toy import Toy, kl, make, product_table
from lib.util import generator
from tools import toys

torch.set_num_threads(1)

# R rows, N contexts, S support tuples, m answer positions, V symbols


def contexts(t: Toy) -> torch.Tensor:
    return torch.arange(t.n_ctx)


def random_product(t: Toy, rng: np.random.Generator) -> torch.Tensor:
    """(N, m, V): one strictly positive distribution per position."""
    return torch.from_numpy(rng.dirichlet(np.ones(t.V), (t.n_ctx, t.m)))


def random_toy(rng: np.random.Generator, n_ctx: int = 1) -> Toy:
    """A random sparse table: some tuples of V**m, with random probabilities."""
    V, m = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    S = int(rng.integers(1, V**m + 1))
    everything = np.array(list(itertools.product(range(V), repeat=m)))
    support = np.stack([rng.permutation(everything)[:S] for _ in range(n_ctx)])
    prob = rng.dirichlet(np.full(S, 0.5), n_ctx)
    return Toy("random", V, torch.from_numpy(support), torch.from_numpy(prob))


def uneven_toy() -> Toy:
    """Contexts of two, one and one tuples, the later ones padded as the class says."""
    support = torch.tensor([[[0, 1], [2, 0]], [[1, 1], [1, 1]], [[0, 0], [0, 0]]])
    prob = torch.tensor([[0.25, 0.75], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    return Toy("uneven", 3, support, prob)


def draw(t: Toy, c: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """One exact draw per row."""
    return t.quantile(c, torch.rand(len(c), dtype=torch.float64, generator=generator(seed)))


# --- every task ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy.TASKS)
def test_table_is_a_distribution_and_the_context_matters(name):
    t = make(name)
    assert t.support.dtype == torch.int64 and t.prob.dtype == torch.float64
    assert t.support.shape == (t.n_ctx, t.prob.shape[1], t.m)
    assert t.support.min() >= 0 and t.support.max() < t.V
    torch.testing.assert_close(t.prob.sum(-1), torch.ones(t.n_ctx).double(), rtol=0, atol=1e-12)
    tables = []
    for tuples, prob in zip(t.support.tolist(), t.prob.tolist(), strict=True):
        table = {tuple(x): p for x, p in zip(tuples, prob, strict=True)}
        assert len(table) == len(tuples)  # no tuple twice
        tables.append(table)
    for one, other in itertools.combinations(tables, 2):
        assert sum(abs(one.get(x, 0) - other.get(x, 0)) for x in one.keys() | other.keys()) > 0.1
    assert torch.equal(make(name).support, t.support)
    assert (t.tc() > 0.5).all()


def test_seed_draws_the_contexts():
    for name in ("modes", "copy", "gaussian", "permutation"):
        assert not torch.equal(make(name, seed=1).support, make(name).support)


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def tc_of_modes(m: int, n_modes: int) -> float:
    """The marginals' entropies, those of the positions that phrases 1 and 2 share first, less the joint one."""
    phrases = [4 / (3 * n_modes + 1)] + [3 / (3 * n_modes + 1)] * (n_modes - 1)
    merged = [phrases[0], 2 * phrases[1], *phrases[3:]]
    return m // 2 * entropy(merged) + (m - m // 2) * entropy(phrases) - entropy(phrases)


def tc_of_copy(m: int, V: int, eps: float) -> float:
    """Every position but the first has ln V alone, and given the first only the entropy of the noise."""
    return (m - 1) * (math.log(V) - entropy([1 - eps + eps / V] + [eps / V] * (V - 1)))


@pytest.mark.parametrize(
    ("name", "params", "tc"),
    [
        ("modes", {}, tc_of_modes(4, 3)),
        ("modes", {"n_modes": 5}, tc_of_modes(4, 5)),
        ("modes", {"n_modes": 5, "m": 8}, tc_of_modes(8, 5)),
        ("pairs", {}, 2 * math.log(8)),
        ("pairs", {"m": 8}, 4 * math.log(8)),
        ("pairs", {"V": 5, "m": 6}, 3 * math.log(5)),
        ("mixed", {}, math.log(8)),
        ("mixed", {"m": 8}, 2 * math.log(8)),
        ("mixed", {"V": 4, "m": 8}, 2 * math.log(4)),
        ("copy", {}, tc_of_copy(4, 8, 0.05)),
        ("copy", {"V": 3, "m": 8}, tc_of_copy(8, 3, 0.05)),
        ("copy", {"eps": 0}, 3 * math.log(8)),
        ("copy", {"eps": 1}, 0.0),
        ("copy", {"eps": 0.5, "V": 2, "m": 2}, math.log(2) + 0.75 * math.log(0.75) + 0.25 * math.log(0.25)),
        ("permutation", {}, 4 * math.log(4) - math.log(24)),
        ("permutation", {"m": 6, "V": 9}, 6 * math.log(6) - math.log(720)),
        ("permutation", {"m": 8}, 8 * math.log(8) - math.log(40_320)),
        ("sum", {}, math.log(5)),
        ("sum", {"V": 3, "m": 8}, math.log(3)),
        ("sum", {"V": 2, "m": 8}, math.log(2)),
    ],
)
def test_total_correlation_is_the_known_number(name, params, tc):
    t = make(name, **params)
    assert t.tc().tolist() == pytest.approx([tc] * t.n_ctx, abs=1e-9)


def test_copy_is_a_dial():
    tc = [make("copy", eps=eps).tc()[0].item() for eps in (0, 0.05, 0.2, 0.5, 0.9, 1)]
    assert all(a > b + 1e-3 for a, b in itertools.pairwise(tc))


def test_exact_copy_keeps_only_its_support():
    t = make("copy", eps=0)
    assert t.support.shape[1] == 8
    q = product_table(t, contexts(t), t.marginals())
    assert distances(t, q)["tv"] == pytest.approx(1 - 8.0**-3)
    torch.testing.assert_close(kl(t.prob, q), t.tc())


def test_every_proper_subset_of_sum_is_independent():
    t = make("sum", V=3, m=4)
    for n, subset in itertools.product(range(3), itertools.combinations(range(4), 3)):
        # Three of four positions: each of the 27 triples exactly once among the 27 tuples.
        assert len({tuple(x) for x in t.support[n][:, subset].tolist()}) == 27 == t.support.shape[1]
    torch.testing.assert_close(t.prob, torch.full((3, 27), 1 / 27).double())


@pytest.mark.parametrize("params", [{}, {"n_modes": 6}, {"m": 2}, {"V": 3, "m": 7}, {"V": 3, "m": 3}, {"m": 32},
                                    {"n_modes": 24}, {"V": 40, "n_modes": 40, "m": 9, "n_ctx": 128}])  # fmt: skip
def test_modes_mislead_the_argmaxes(params):
    t = make("modes", **params)
    top2 = t.prob.topk(2).values
    assert (top2[:, 0] > top2[:, 1] + 1e-3).all()  # the joint mode is unique
    marginals = t.marginals()
    assert (marginals.topk(2).values.diff().abs() > 1e-3).all()  # and so is every argmax
    for n in range(t.n_ctx):
        assert marginals[n].argmax(-1).tolist() not in t.support[n].tolist()
    assert not coherent(t, contexts(t), toys.first_max(marginals)).any()
    assert torch.equal(t.mode(), t.support[:, 0])
    if not params:
        assert t.prob[0].tolist() == pytest.approx([0.4, 0.3, 0.3])


def test_mixed_hides_its_pairs_from_the_marginals():
    t = make("mixed")
    marginals = t.marginals()
    assert (marginals[:, 0].max(-1).values == 1).all()
    torch.testing.assert_close(marginals[:, 1:], torch.full((8, 3, 8), 1 / 8).double())
    f, u, a, partner = t.support.unbind(-1)
    assert torch.equal(partner, 7 - a) and torch.equal(f, contexts(t)[:, None].expand_as(f))


# --- gaussian --------------------------------------------------------------------------------------------------------


def panels(edges: list[float], width: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes, weights and cell numbers for panels of at most `width` inside each cell."""
    x, w = np.polynomial.legendre.leggauss(10)
    nodes, weights, cells = [], [], []
    for cell, (low, high) in enumerate(itertools.pairwise(edges)):
        cuts = np.linspace(low, high, int((high - low) / width) + 2)
        for a, b in itertools.pairwise(cuts):
            nodes.append((a + b) / 2 + (b - a) / 2 * x)
            weights.append((b - a) / 2 * w)
            cells.append(np.full(len(x), cell))
    return np.concatenate(nodes), np.concatenate(weights), np.concatenate(cells)


def normal_cdf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)) / 2 + 0.5


def quantiles(levels: int) -> list[float]:
    """Cell edges by bisection on erf, the outermost at +-9, where the normal tail is 1e-19."""
    edges = [-9.0]
    for k in range(1, levels):
        low, high = -9.0, 9.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if math.erf(middle / math.sqrt(2)) / 2 + 0.5 < k / levels else (low, middle)
        edges.append(low)
    return [*edges, 9.0]


def binned_tc(levels: int, m: int, rho: float, width: float) -> float:
    """TC of the binned normal by integrating over z_1..z_{m-1} and taking the conditional CDF of z_m: no factor."""
    edges = quantiles(levels)
    z, w, cell = panels(edges, width)
    density = w * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    one_hot = np.eye(levels)[cell]  # (nodes, V)
    if m == 2:
        mean, sd = rho * z, math.sqrt(1 - rho**2)
    else:
        step = (z[None] - rho * z[:, None]) / math.sqrt(1 - rho**2)  # z_2 given z_1, standardised
        density = density[:, None] * w * np.exp(-(step**2) / 2) / math.sqrt(2 * math.pi * (1 - rho**2))
        mean, sd = rho * (z[:, None] + z) / (1 + rho), math.sqrt(1 - 2 * rho**2 / (1 + rho))
    inside = np.diff([normal_cdf((edge - mean) / sd) for edge in edges], axis=0)  # (V, nodes[, nodes])
    table = np.einsum(
        "vi,ia->av" if m == 2 else "vij,ia,jb->abv", inside * density, *[one_hot] * (m - 1), optimize=True
    )
    assert abs(table.sum() - 1) < 1e-9
    return m * math.log(levels) + float((table * np.log(np.maximum(table, 1e-300))).sum())


@pytest.mark.parametrize(
    ("levels", "m", "rho", "width"),
    [(8, 2, 0.5, 0.5), (8, 2, 0.9, 0.2), (8, 2, 0.99, 0.05), (4, 3, 0.9, 0.3), (3, 3, 0.6, 0.5)],
)
def test_gaussian_equals_direct_integration(levels, m, rho, width):
    tc = make("gaussian", levels=levels, m=m, rho=rho).tc()
    assert tc.tolist() == pytest.approx([binned_tc(levels, m, rho, width)] * len(tc), abs=1e-6)


@pytest.mark.parametrize(
    ("levels", "rho", "bits"),
    [(8, 0.5, 0.184), (8, 0.9, 1.006), (8, 0.99, 2.001), (4, 0.5, 0.151), (4, 0.9, 0.779), (4, 0.99, 1.414)]
    + [(16, 0.5, 0.198), (16, 0.9, 1.114), (16, 0.99, 2.422)],
)
def test_gaussian_pair_equals_the_published_value(levels, rho, bits):
    assert make("gaussian", levels=levels, m=2, rho=rho).tc()[0] / math.log(2) == pytest.approx(bits, abs=5e-4)


def test_gaussian_pair_of_signs_has_the_arcsine_law():
    for rho in (0.3, 0.9, 0.9999):
        t = make("gaussian", levels=2, m=2, rho=rho, n_ctx=1)
        same = t.prob[0][(t.support[0] == t.mode()).all(-1)].item() * 2
        assert same == pytest.approx(0.5 + math.asin(rho) / math.pi, abs=1e-12)


@pytest.mark.parametrize(("m", "rho"), [(2, 0.5), (2, 0.9), (3, 0.6)])
def test_gaussian_rises_to_its_continuous_limit(m, rho):
    limit = -0.5 * math.log((1 - rho) ** (m - 1) * (1 + (m - 1) * rho))
    tc = [make("gaussian", levels=levels, m=m, rho=rho, n_ctx=1).tc().item() for levels in (2, 4, 8, 16, 32)]
    assert all(a < b for a, b in itertools.pairwise([*tc, limit]))
    assert tc[-1] > 0.95 * limit


def test_gaussian_far_tails_are_symmetric():
    p = make("gaussian", rho=0.99, n_ctx=1).prob[0]
    assert p.min() < 1e-50  # so that a cancellation between two numbers near 1 would show
    torch.testing.assert_close(p, p.flip(0), rtol=1e-6, atol=0)


def test_gaussian_marginals_are_uniform_and_rho_0_is_independent():
    torch.testing.assert_close(make("gaussian", rho=0.99).marginals(), torch.full((32, 3, 8), 1 / 8).double())
    assert make("gaussian", rho=0).tc().abs().max() < 1e-12


# --- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy.TASKS)
def test_kl_to_a_product_is_tc_plus_marginal_kls(name):
    t = make(name)
    q = random_product(t, np.random.default_rng(0))
    expected = t.tc() + kl(t.marginals(), q).sum(-1)
    torch.testing.assert_close(kl(t.prob, product_table(t, contexts(t), q)), expected, rtol=0, atol=1e-9)


def test_no_product_beats_total_correlation():
    rng = np.random.default_rng(0)
    for _ in range(300):
        t = random_toy(rng)
        tc = t.tc()
        assert tc >= -1e-12
        assert kl(t.prob, product_table(t, contexts(t), random_product(t, rng))) >= tc - 1e-12
        torch.testing.assert_close(kl(t.prob, product_table(t, contexts(t), t.marginals())), tc, rtol=0, atol=1e-9)


def test_distances_on_a_worked_example():
    t = uneven_toy()
    q = torch.full((3, 2, 3), 1 / 3, dtype=torch.float64)
    table = product_table(t, contexts(t), q)
    torch.testing.assert_close(table, torch.tensor([[1, 1], [1, 0], [1, 0]]).double() / 9)  # the padding counts once
    d = distances(t, table)
    assert d["outside"] == d["tv"] == pytest.approx((7 + 8 + 8) / 27) and d["reverse_kl"] == math.inf
    expected = [0.25 * math.log(9 / 4) + 0.75 * math.log(27 / 4), math.log(9), math.log(9)]
    assert kl(t.prob, table).tolist() == pytest.approx(expected)
    assert kl(t.prob, table * torch.tensor([0.0, 1.0]))[0] == math.inf
    total = torch.zeros(3, 3, dtype=torch.float64)
    total[0, 1], total[2, 0] = 0.25, 0.75
    brute = 0.5 * (total - 1 / 9).abs().sum()
    first = Toy("first", 3, t.support[:1], t.prob[:1])
    assert distances(first, table[:1])["tv"] == pytest.approx(float(brute))


# --- reading the table -----------------------------------------------------------------------------------------------


def test_token_ids_and_prompt():
    t = make("sum")
    assert (t.V, t.n_ctx, t.eos_id, t.mask_id, t.vocab_size) == (5, 5, 10, 11, 12)
    assert t.prompt(torch.tensor([0, 4])).tolist() == [[5, 5, 5], [9, 9, 9]]


def test_mode_takes_the_first_of_a_split_tie():
    prob = torch.tensor([[0.2, 0.4 - 1e-16, 0.4]], dtype=torch.float64)
    t = Toy("tie", 3, torch.tensor([[[2], [1], [0]]]), prob)
    assert t.mode().tolist() == [[1]]


def test_log_prob_and_coherent():
    t = uneven_toy()
    c = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    tuples = torch.tensor([[0, 1], [2, 0], [1, 1], [0, 1], [1, 1], [1, t.mask_id], [0, 0]])
    expected = [math.log(0.25), math.log(0.75), -math.inf, -math.inf, 0, -math.inf, 0]
    assert t.log_prob(c, tuples).tolist() == expected
    assert coherent(t, c, tuples).tolist() == [e > -math.inf for e in expected]
    # as numbers in base 3 these would be (0, 1) and (0, -1): ids that are no symbol are no tuple
    assert not coherent(t, c[:2], torch.tensor([[3, 0], [-3, 2]])).any()
    padded = Toy("padded", 3, torch.full((1, 500, 1), 2), torch.eye(500, dtype=torch.float64)[:1])
    assert padded.log_prob(c[:1], torch.tensor([[2]])).tolist() == [0]
    for name in toy.TASKS:
        t = make(name)
        for i in (0, 1, t.support.shape[1] - 1):
            torch.testing.assert_close(t.log_prob(contexts(t), t.support[:, i]).exp(), t.prob[:, i])


@pytest.mark.parametrize(("name", "params"), [("modes", {}), ("permutation", {}), ("copy", {"V": 3, "m": 3}), ("", {})])
def test_samples_follow_the_table(name, params):
    t = make(name, n_ctx=4, **params) if name else uneven_toy()
    R = 40_000
    for n in range(t.n_ctx):
        c = torch.full((R,), n)
        draws = draw(t, c, n)
        assert coherent(t, c, draws).all()
        p = t.prob[n]
        count = (draws[:, None] == t.support[n]).all(-1).sum(0)
        sigma = (R * p * (1 - p)).sqrt()
        assert ((count - R * p).abs() <= 4 * sigma)[p > 0].all()
    mixed_rows = torch.arange(1000) % t.n_ctx
    assert coherent(t, mixed_rows, draw(t, mixed_rows)).all()


@pytest.mark.parametrize(("u", "second"), [(0.0, False), (0.25 - 2**-54, False), (0.25, True), (1 - 2**-53, True)])
def test_quantile_at_the_ends_of_the_unit_interval(u, second):
    t = uneven_toy()
    c, u = torch.tensor([0, 1, 2]), torch.full((3,), u, dtype=torch.float64)
    assert t.quantile(c, u).tolist() == [[2, 0] if second else [0, 1], [1, 1], [0, 0]]


def test_conditional_equals_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(40):
        t = random_toy(rng, n_ctx=2)
        c = torch.from_numpy(rng.integers(0, 2, 8))
        z = draw(t, c)
        z[torch.from_numpy(rng.random(z.shape) < 0.5)] = -1
        p = conditional(t, c, z)
        for r in range(8):
            expected = torch.zeros(t.m, t.V, dtype=torch.float64)
            for x, weight in zip(t.support[c[r]].tolist(), t.prob[c[r]].tolist(), strict=True):
                if all(seen in (-1, v) for seen, v in zip(z[r].tolist(), x, strict=True)):
                    for i, v in enumerate(x):
                        expected[i, v] += weight
            torch.testing.assert_close(p[r], expected / expected.sum(-1, keepdim=True))


def test_conditional_of_nothing_visible_and_of_the_impossible():
    t = uneven_toy()
    c = torch.tensor([1, 0, 0])
    p = conditional(t, c, torch.tensor([[-1, -1], [-1, -1], [1, -1]]))
    torch.testing.assert_close(p[:2], t.marginals()[c[:2]])
    torch.testing.assert_close(p[2], torch.full((2, 3), 1 / 3).double())


@pytest.mark.parametrize("name", toy.TASKS)
def test_a_chain_of_conditionals_is_the_joint(name):
    t = make(name)
    rng = np.random.default_rng(0)
    c = torch.from_numpy(rng.integers(0, t.n_ctx, 16))
    x = draw(t, c)
    z = torch.full_like(x, -1)
    chain = torch.zeros(16, dtype=torch.float64)
    for i in rng.permutation(t.m).tolist():
        chain += conditional(t, c, z)[torch.arange(16), i, x[:, i]].log()
        z[:, i] = x[:, i]
    torch.testing.assert_close(chain, t.log_prob(c, x), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "params", "valid"),
    [
        ("pairs", {"V": 8, "m": 6}, 8.0**-3),
        ("pairs", {"V": 10, "m": 2}, 0.1),
        ("mixed", {"V": 8, "m": 8}, 1 / 64),
        ("permutation", {}, 0.09375),
        ("permutation", {"m": 6}, 0.015432098765432098),
        ("sum", {}, 0.2),
        ("sum", {"V": 2, "m": 8}, 0.5),
        ("modes", {}, 0.4**4 + 2 * 0.3**2 * 0.6**2),
    ],
)
def test_one_step_of_the_ideal_decoder(name, params, valid):
    t = make(name, **params)
    q = product_table(t, contexts(t), conditional(t, contexts(t), torch.full((t.n_ctx, t.m), -1)))
    assert q.sum(-1).tolist() == pytest.approx([valid] * t.n_ctx, abs=1e-12)
    if name != "modes":  # uniform tables, and products uniform on them
        assert distances(t, q)["tv"] == pytest.approx(1 - valid, abs=1e-12)


def test_training_rows_depend_on_their_number_alone():
    t = make("pairs")
    x, real, prompt = toy.Rows(t, 0, "rows").batch(3, 5)
    assert x.shape == real.shape == prompt.shape == (5, 2 * t.m)
    assert real.all() and torch.equal(prompt[0], torch.arange(8) < 4)
    assert torch.equal(x[2:4], toy.Rows(t, 0, "rows").batch(5, 2)[0])
    c = x[:, 0] - t.V
    assert torch.equal(x[:, : t.m], t.prompt(c)) and coherent(t, c, x[:, t.m :]).all()
    assert not torch.equal(x, toy.Rows(t, 0, "validation rows").batch(3, 5)[0])


def test_two_steps_of_the_ideal_decoder_are_exact_with_the_right_groups():
    t = make("mixed")
    c = torch.arange(1000) % t.n_ctx
    z = draw(t, c)
    z[:, 1:3] = torch.randint(8, (1000, 2), generator=generator(1))  # u and a, drawn independently
    z[:, 3] = -1
    p = conditional(t, c, z)[:, 3]
    assert (p.max(-1).values == 1).all()
    z[:, 3] = p.argmax(-1)
    assert coherent(t, c, z).all()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("copy", {"m": 8}, "8**8 = 16,777,216 tuples, more than 65,536: take fewer symbols or a smaller m"),
        ("pairs", {"V": 41, "m": 6}, "41**3 = 68,921 tuples"),
        ("mixed", {"m": 12}, "8**6 = 262,144 tuples"),
        ("sum", {"V": 17, "m": 5}, "17**4 = 83,521 tuples"),
        ("gaussian", {"m": 6}, "8**6 = 262,144 tuples, more than 65,536"),
        ("permutation", {"V": 9, "m": 9}, "m! <= 65,536, not m = 9"),
        ("modes", {"m": 33}, "m must lie in 2..32, not 33"),
        ("permutation", {"V": 3}, "m = 4 and V = 3"),
        ("modes", {"n_modes": 25}, "25 modes"),
        ("modes", {"n_modes": 2}, "n_modes must lie in 3..1024, not 2"),
        ("pairs", {"m": 3}, "even m, not 3"),
        ("mixed", {"m": 6}, "not 6"),
        ("sum", {"n_ctx": 6}, "n_ctx must lie in 1..5 here, not 6"),
        ("sum", {"n_ctx": 0}, "not 0"),
        ("modes", {"n_ctx": 129}, "n_ctx must lie in 1..128, not 129"),
        ("sum", {"m": 1}, "m must lie in 2..32, not 1"),
        ("copy", {"eps": 1.1}, "eps must lie in 0..1, not 1.1"),
        ("gaussian", {"rho": 1.0}, "rho must lie in 0..0.9999"),
        ("gaussian", {"rho": math.nan}, "not nan"),
        ("gaussian", {"V": 8}, "does not use V: it uses levels, m, n_ctx, rho"),
        ("sum", {"eps": 0.1}, "the sum task does not use eps: it uses V, m, n_ctx"),
    ],
)
def test_refusals_name_the_numbers(name, params, words, capsys):
    with pytest.raises(SystemExit):
        make(name, **params)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_largest_tables_are_accepted():
    assert make("copy", V=256, m=2, n_ctx=1).support.shape == (1, 65_536, 2)
    assert make("gaussian", levels=2, m=16, n_ctx=1).tc() > 5


MISTAKES = {
    "--wrong": "--wrong",
    "nope": "nope",
    "sum V=x": "'V=x' is no size of a toy: KEY=VALUE with V, m, n_ctx",
    "sum V": "'V' is no size",
    "sum colour=3": "'colour=3' is no size",
    "sum m=2.5": "'m=2.5' is no size",
    "sum rho=0.5": "the sum task does not use rho",
    "copy m=9": "8**9 = 134,217,728 tuples",
    "copy eps=nan": "eps must lie in 0..1, not nan",
    "sum --seed -1": "--seed",
    "sum --context 5": "one of its contexts 0..4",
    "sum --context -1": "one of its contexts 0..4",
    "--context 0": "needs a task",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, monkeypatch, capsys):
    assert MISTAKES[line] in refused(toys, monkeypatch, capsys, *line.split())


def test_sizes_and_build():
    assert toy.sizes(["V=12", "eps=0.3"]) == {"V": 12, "eps": 0.3} and toy.sizes([]) == {}
    assert torch.equal(
        make("copy", seed=3, **toy.sizes(["V=4", "eps=1"])).prob, make("copy", V=4, eps=1.0, seed=3).prob
    )
    assert [type(v) for v in toy.sizes(["m=2", "rho=0"]).values()] == [int, float]


@pytest.mark.parametrize("given", [["V=x"], ["rho=0.5"], ["V=41", "m=6"]])
def test_build_refuses_in_one_line(given, capsys):
    with pytest.raises(SystemExit) as end:
        make("pairs", **toy.sizes(given))
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_the_printed_table(monkeypatch, capsys):
    code, out, _ = command_line(toys, monkeypatch, capsys)
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[2:]] == list(toy.TASKS)
    assert lines[-1].split()[:10] == ["sum", "5", "3", "5", "25", "3.2189", "4.8283", "1.6094", "0.0400", "1/5"]
    assert " 0/32 " in command_line(toys, monkeypatch, capsys, "modes", "m=3")[1]
    assert command_line(toys, monkeypatch, capsys, "modes", "--seed", 1)[1] != lines[2]


def test_the_printed_context(monkeypatch, capsys):
    code, out, _ = command_line(toys, monkeypatch, capsys, "modes", "--context", 1, "V=6")
    t = make("modes", V=6)
    alone = t.marginals()[1].argmax(-1).tolist()
    phrases = [f"  {p:.4f}  {t.support[1, i].tolist()}" for i, p in enumerate((0.4, 0.3, 0.3))]
    assert code == 0 and out.splitlines()[3:] == [
        "context 1, prompt [7, 7, 7, 7], its likeliest answers:",
        *phrases,
        f"  each token by itself: {alone} (impossible)",
    ]
    lines = command_line(toys, monkeypatch, capsys, "copy", "--context", 0)[1].splitlines()
    assert len(lines) == 3 + 1 + 8 + 1 and lines[-1].endswith("(coherent)")
