"""The toys' tables against closed forms and worked examples. `pytest tests/test_toy.py`"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import coherent, command_line, refused
from torch import nn

from lib import toy
from lib.toy import Toy, answer_log_probs, floors, kl, make, product_table
from lib.util import Mistake
from tools import toys

torch.set_num_threads(1)

# R rows, N contexts, S support tuples, m answer positions, V symbols


def contexts(t: Toy) -> torch.Tensor:
    return torch.arange(t.n_ctx)


def uneven_toy() -> Toy:
    """Contexts of two, one and one tuples, the later ones padded as the class says."""
    support = torch.tensor([[[0, 1], [2, 0]], [[1, 1], [1, 1]], [[0, 0], [0, 0]]])
    prob = torch.tensor([[0.25, 0.75], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    return Toy("uneven", 3, support, prob)


# --- the tasks
@pytest.mark.parametrize("name", toy.TASKS)
def test_table_is_a_distribution_and_the_context_matters(name):
    t = make(name)
    assert t.support.dtype == torch.int64 and t.prob.dtype == torch.float64
    assert t.support.shape == (t.n_ctx, t.prob.shape[1], t.m)
    assert t.support.min() == 0 and t.support.max() == t.V - 1
    torch.testing.assert_close(t.prob.sum(-1), torch.ones(t.n_ctx).double(), rtol=0, atol=1e-12)

    # no tuple twice, and no two contexts alike
    tables = [
        {tuple(x): p for x, p in zip(tuples, prob, strict=True)}
        for tuples, prob in zip(t.support.tolist(), t.prob.tolist(), strict=True)
    ]
    assert all(len(table) == t.support.shape[1] for table in tables)
    for one, other in itertools.combinations(tables, 2):
        assert sum(abs(one.get(x, 0) - other.get(x, 0)) for x in one.keys() | other.keys()) > 0.1

    # the seed draws the contexts, of those tasks that have more than they take
    drawn = name in ("modes", "copy", "gaussian", "permutation")
    assert torch.equal(make(name, seed=1).support, t.support) != drawn
    assert t.n_ctx == {"pairs": 8, "mixed": 8, "sum": 5}.get(name, 32)


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
        ("modes", {"n_modes": 5, "m": 7}, tc_of_modes(7, 5)),
        ("pairs", {}, 2 * math.log(8)),
        ("pairs", {"V": 5, "m": 6}, 3 * math.log(5)),
        ("mixed", {}, math.log(8)),
        ("mixed", {"V": 4, "m": 8}, 2 * math.log(4)),
        ("copy", {}, tc_of_copy(4, 8, 0.05)),
        ("copy", {"V": 3, "m": 8, "eps": 0.5}, tc_of_copy(8, 3, 0.5)),
        ("copy", {"eps": 0}, 3 * math.log(8)),
        ("copy", {"eps": 1}, 0.0),
        ("gaussian", {"rho": 0}, 0.0),
        ("permutation", {}, 4 * math.log(4) - math.log(24)),
        ("permutation", {"m": 6, "V": 9}, 6 * math.log(6) - math.log(720)),
        ("sum", {}, math.log(5)),
        ("sum", {"V": 2, "m": 8}, math.log(2)),
    ],
)
def test_total_correlation_is_the_known_number(name, params, tc):
    t = make(name, **params)
    assert t.tc().tolist() == pytest.approx([tc] * t.n_ctx, abs=1e-9)


def test_exact_copy_keeps_only_its_support():
    assert make("copy", eps=0).support.shape == (32, 8, 4)


@pytest.mark.parametrize("params", [{}, {"n_modes": 6, "m": 7}, {"V": 3, "m": 2}, {"V": 24, "n_modes": 24}])
def test_modes_mislead_the_argmaxes(params):
    t = make("modes", **params)
    assert torch.equal(t.mode(), t.support[:, 0])
    best = t.marginals().topk(2).values
    assert (best[..., 0] > best[..., 1] + 1e-3).all()  # every argmax is unique
    assert not coherent(t, contexts(t), t.marginals().argmax(-1)).any()
    if not params:
        assert t.prob[0].tolist() == pytest.approx([0.4, 0.3, 0.3])


def test_pairs_and_groups_and_sums_are_what_their_docstrings_say():
    t = make("pairs")
    first, second = t.support[..., 0::2], t.support[..., 1::2]
    assert ((second - first) % 8 == contexts(t)[:, None, None]).all()

    # (0, 1, 1): both copies are noise, though they are alike
    t = make("copy", V=3, m=3, n_ctx=1, eps=0.3)
    assert t.prob[0, [0, 1, 4]].tolist() == pytest.approx([0.8**2 / 3, 0.8 * 0.1 / 3, 0.1**2 / 3])

    t = make("mixed")
    f, u, a, partner = t.support.unbind(-1)
    assert torch.equal(partner, 7 - a) and torch.equal(f, contexts(t)[:, None].expand_as(f))
    torch.testing.assert_close(t.marginals()[:, 1:], torch.full((8, 3, 8), 1 / 8).double())
    assert len({tuple(x) for x in t.support[0][:, 1:3].tolist()}) == 64  # u says nothing about a

    # any three of four positions: each of the 27 triples exactly once among the 27 tuples
    t = make("sum", V=3, m=4)
    assert (t.support.sum(-1) % 3 == contexts(t)[:, None]).all()
    for n, subset in itertools.product(range(3), itertools.combinations(range(4), 3)):
        assert len({tuple(x) for x in t.support[n][:, subset].tolist()}) == 27 == t.support.shape[1]


@pytest.mark.parametrize("rho", [0.3, 0.9, 0.9999])
@pytest.mark.parametrize(("levels", "m"), [(2, 2), (8, 2), (2, 3), (8, 3)])
def test_gaussian_has_the_orthant_probabilities(levels, m, rho):
    """That all z_i are positive: 1/4 + asin(rho) / 2 pi for two of them, 1/8 + 3 asin(rho) / 4 pi for three. A shift
    permutes the levels, so context and table are read through the tuple that stands first, which is (0, .., 0)."""
    t = make("gaussian", levels=levels, m=m, rho=rho, n_ctx=2)
    positive = ((t.support - t.support[:, :1]) % levels >= levels // 2).all(-1)
    expected = {2: 0.25 + math.asin(rho) / (2 * math.pi), 3: 0.125 + 3 * math.asin(rho) / (4 * math.pi)}[m]
    assert (positive * t.prob).sum(-1).tolist() == pytest.approx([expected] * 2, abs=1e-12)
    torch.testing.assert_close(t.marginals(), torch.full((2, m, levels), 1 / levels).double())


def test_gaussian_far_tails_are_symmetric():
    p = make("gaussian", rho=0.99, n_ctx=1).prob[0]
    assert p.min() < 1e-50  # so that a cancellation between two numbers near 1 would show
    torch.testing.assert_close(p, p.flip(0), rtol=1e-6, atol=0)


# --- reading the table
@pytest.mark.parametrize("name", toy.TASKS)
def test_kl_to_a_product_is_tc_plus_marginal_kls(name):
    t = make(name)
    q = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(t.V), (t.n_ctx, t.m)))
    expected = t.tc() + kl(t.marginals(), q).sum(-1)
    torch.testing.assert_close(kl(t.prob, product_table(t, contexts(t), q)), expected, rtol=0, atol=1e-9)


def test_products_and_distances_of_uneven_contexts():
    t = uneven_toy()
    third = torch.full((3, 2, 3), 1 / 3, dtype=torch.float64)
    table = product_table(t, contexts(t), third)
    torch.testing.assert_close(table, torch.tensor([[1, 1], [1, 0], [1, 0]]).double() / 9)  # the padding counts once
    expected = [0.25 * math.log(9 / 4) + 0.75 * math.log(27 / 4), math.log(9), math.log(9)]
    assert kl(t.prob, table).tolist() == pytest.approx(expected)
    assert kl(t.prob, table * torch.tensor([0.0, 1.0]))[0] == math.inf


def test_token_ids_and_prompt():
    t = make("sum")
    assert (t.V, t.n_ctx, t.eos_id, t.mask_id, t.vocab_size) == (5, 5, 10, 11, 12)
    assert t.prompt(torch.tensor([0, 4])).tolist() == [[5, 5, 5], [9, 9, 9]]


def test_mode_takes_the_first_of_a_split_tie():
    prob = torch.tensor([[0.2, 0.4 - 1e-16, 0.4]], dtype=torch.float64)
    assert Toy("tie", 3, torch.tensor([[[2], [1], [0]]]), prob).mode().tolist() == [[1]]


def test_log_prob():
    t = uneven_toy()
    c = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    tuples = torch.tensor([[0, 1], [2, 0], [1, 1], [0, 1], [1, 1], [1, t.mask_id], [0, 0]])
    expected = [math.log(0.25), math.log(0.75), -math.inf, -math.inf, 0, -math.inf, 0]
    assert t.log_prob(c, tuples).tolist() == expected


def test_quantile_at_the_ends_of_the_unit_interval():
    t = uneven_toy()
    for u, first in ((0.0, [0, 1]), (0.25 - 2**-54, [0, 1]), (0.25, [2, 0]), (1 - 2**-53, [2, 0])):
        same = torch.full((3,), u, dtype=torch.float64)
        assert t.quantile(contexts(t), same).tolist() == [first, [1, 1], [0, 0]]

    # a sum below 1 leaves no gap
    t = Toy("short", 2, torch.tensor([[[0], [1]]]), torch.tensor([[0.5, 0.25]], dtype=torch.float64))
    u = torch.tensor([0.6, 0.7, 1.0], dtype=torch.float64)
    assert t.quantile(torch.zeros(3, dtype=torch.int64), u).tolist() == [[0], [1], [1]]


def test_every_tuple_has_its_share_of_the_unit_interval():
    t = make("copy", V=3, m=3, n_ctx=2)
    middle = t.prob.cumsum(-1) - t.prob / 2
    for i in range(27):
        assert torch.equal(t.quantile(contexts(t), middle[:, i]), t.support[:, i])


def test_training_rows_depend_on_their_number_alone():
    t = make("pairs")
    rows = toy.Rows(t, 0, "rows")
    x, real, prompt = rows.batch(3, 5)
    assert x.shape == real.shape == prompt.shape == (5, 8)
    assert real.all() and prompt.tolist() == [[True] * 4 + [False] * 4] * 5
    assert torch.equal(x[2:4], rows.batch(5, 2)[0]) and rows.count_real(3, 5) == 40
    c = x[:, 0] - t.V
    assert torch.equal(x[:, :4], t.prompt(c)) and coherent(t, c, x[:, 4:]).all()
    assert len(set(c.tolist())) > 1
    assert not torch.equal(x, toy.Rows(t, 0, "validation rows").batch(3, 5)[0])


# --- a model's distribution
class Echo(nn.Module):
    """Its states are the ids, one-hot; Stage B adds n_rounds to them where the bundle is."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.cfg = SimpleNamespace(n_rounds=2)
        self.eye = nn.Parameter(torch.eye(vocab_size))

    def context(self, real: torch.Tensor) -> torch.Tensor:
        assert real.all()
        return real

    def prefix(self, ids: torch.Tensor, ctx: torch.Tensor) -> torch.Tensor:
        assert ids.shape == ctx.shape
        return self.eye[ids]

    def last_n(self, h: torch.Tensor, ctx: torch.Tensor) -> torch.Tensor:
        return h

    def coordinate(self, h: torch.Tensor, bundle: torch.Tensor, ctx: torch.Tensor, n_rounds: int) -> torch.Tensor:
        return h + n_rounds * bundle[..., None] * h

    def head(self, h: torch.Tensor) -> torch.Tensor:
        return h


def test_answer_log_probs_by_hand(monkeypatch):
    """Of 8 logits that of the token there is 1, in Stage B 3 if it is a mask; the others are 0. A mask is no symbol."""
    monkeypatch.setattr(toy, "ROWS", 2)
    t = uneven_toy()
    z = torch.tensor([[0, -1], [-1, 2], [-1, -1]])
    seen = 1 - math.log(math.e + 7)
    other = -math.log(math.e + 7)
    marked = -math.log(math.e**3 + 7)
    expected = torch.full((3, 2, 3), other, dtype=torch.float64)
    expected[0, 0, 0] = expected[1, 1, 2] = seen
    torch.testing.assert_close(answer_log_probs(Echo(8), t, contexts(t), z, 0), expected)
    expected[z < 0] = marked
    torch.testing.assert_close(answer_log_probs(Echo(8), t, contexts(t), z, 2), expected)

    # the whole answer is two masks. Context 0 has entropy h, as each of its positions has; the others have none
    found = floors(Echo(8), t)
    h = entropy([0.25, 0.75])
    assert found == pytest.approx(
        {"block_A": -2 * other, "block_B": -2 * marked, "floor_joint": h / 3, "floor_factorised": 2 * h / 3}
    )


# --- mistakes, and the printed tables
@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("copy", {"m": 8}, "8**8 = 16,777,216 tuples, more than 65,536: take fewer symbols or a smaller m"),
        ("permutation", {"V": 9, "m": 9}, "m! <= 65,536, not m = 9"),
        ("permutation", {"V": 3}, "m = 4 and V = 3"),
        ("modes", {"n_modes": 25}, "25 modes"),
        ("modes", {"n_modes": 2}, "n_modes must lie in 3..1024, not 2"),
        ("pairs", {"m": 3}, "even m, not 3"),
        ("mixed", {"m": 6}, "not 6"),
        ("gaussian", {"rho": math.nan}, "rho must lie in 0..0.9999, not nan"),
        ("gaussian", {"V": 8}, "does not use V: it uses levels, m, n_ctx, rho"),
    ],
)
def test_refusals_name_the_numbers(name, params, words):
    with pytest.raises(Mistake) as mistake:
        make(name, **params)
    assert words in str(mistake.value)


def test_sizes():
    assert toy.sizes(["V=12", "eps=0.3"]) == {"V": 12, "eps": 0.3} and toy.sizes([]) == {}
    assert [type(v) for v in toy.sizes(["m=2", "rho=0"]).values()] == [int, float]
    for wrong in ("V=x", "V", "colour=3", "m=2.5"):
        with pytest.raises(Mistake, match=f"'{wrong}' is no size of a toy: KEY=VALUE with V, m, n_ctx"):
            toy.sizes([wrong])
    assert make("sum", V=128, m=2, n_ctx=128).support.shape == (128, 128, 2)  # as large as they may be


def test_the_printed_tables(monkeypatch, capsys):
    code, out, _ = command_line(toys, monkeypatch, capsys)
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[2:]] == list(toy.TASKS)
    assert lines[-1].split()[:10] == ["sum", "5", "3", "5", "25", "3.2189", "4.8283", "1.6094", "0.0400", "1/5"]

    _, out, _ = command_line(toys, monkeypatch, capsys, "modes", "--context", 1, "V=6")
    t = make("modes", V=6)
    alone = t.marginals()[1].argmax(-1).tolist()
    phrases = [f"  {p:.4f}  {t.support[1, i].tolist()}" for i, p in enumerate((0.4, 0.3, 0.3))]
    assert out.splitlines()[3:] == [
        "context 1, prompt [7, 7, 7, 7], its likeliest answers:",
        *phrases,
        f"  each token by itself: {alone} (impossible)",
    ]
    assert "one of its contexts 0..4" in refused(toys, monkeypatch, capsys, "sum", "--context", 5)
