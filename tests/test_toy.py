"""The toys' tables against closed forms and worked examples. `pytest tests/test_toy.py`"""

import math

import pytest
import torch
from common import caller, coherent

import toy
from lib.rows import Meta, read_corpus
from toy import Toy, kl, make

# R rows, N contexts, S support tuples, m answer positions, V symbols


def contexts(t: Toy) -> torch.Tensor:
    return torch.arange(t.n_ctx)


# two contexts with two tuples each
SUPPORT = torch.tensor([[[0, 1], [2, 0]], [[1, 1], [0, 0]]])
BY_HAND = Toy("by hand", 3, SUPPORT, torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64))


# --- the tasks
@pytest.mark.parametrize("name", toy.TASKS)
def test_table_is_a_distribution_and_the_context_matters(name):
    t = make(name)
    assert t.support.dtype == torch.int64 and t.prob.dtype == torch.float64
    assert t.support.shape == (t.n_ctx, t.prob.shape[1], t.m)
    assert t.support.min() == 0 and t.support.max() == t.V - 1
    torch.testing.assert_close(t.prob.sum(-1), torch.ones(t.n_ctx).double(), rtol=0, atol=1e-12)

    # no tuple twice, and no two contexts alike: of every context the probabilities of all V**m tuples
    number = (t.support * t.V ** torch.arange(t.m)).sum(-1)  # (N, S)
    table = torch.zeros(t.n_ctx, t.V**t.m).scatter_add_(1, number, t.prob.float())
    assert ((table > 0).sum(-1) == t.support.shape[1]).all()
    assert (torch.cdist(table, table, p=1).fill_diagonal_(2) > 0.1).all()


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


# in one half of the positions two of three phrases share their tokens: the marginals, less the joint
TC_OF_MODES = 2 * entropy([0.4, 0.6]) + 2 * entropy([0.4, 0.3, 0.3]) - entropy([0.4, 0.3, 0.3])


def tc_of_copy(m: int, V: int, eps: float) -> float:
    """Alone every position has the entropy ln V; given the first position, the others have only the noise's entropy."""
    return (m - 1) * (math.log(V) - entropy([1 - eps + eps / V] + [eps / V] * (V - 1)))


@pytest.mark.parametrize("name, params, tc", [
    ("modes", {}, TC_OF_MODES),
    ("pairs", {"V": 5, "m": 6}, 3 * math.log(5)),
    ("mixed", {"V": 4, "m": 8}, 2 * math.log(4)),
    ("copy", {"V": 3, "m": 8, "eps": 0.5}, tc_of_copy(8, 3, 0.5)),
    ("gaussian", {"rho": 0.0, "m": 2, "levels": 7}, 0.0),
    ("permutation", {"m": 6, "V": 9}, 6 * math.log(6) - math.log(720)),
    ("sum", {"V": 2, "m": 8}, math.log(2)),
])  # fmt: skip
def test_total_correlation_is_the_known_number(name, params, tc):
    t = make(name, **params)
    assert t.tc().tolist() == pytest.approx([tc] * t.n_ctx, abs=1e-9) and (t.tc() >= 0).all()


def test_all_seven_are_shown(capsys):
    """Two pairs of 8 symbols: H is 2 ln 8, TC too, and 64 of the 8^4 tuples are possible."""
    toy.show_all()
    assert "4.159  4.159  0.016" in " ".join(capsys.readouterr().out.split()).replace(" ", "  ")


def test_modes_mislead_the_argmaxes():
    t = make("modes", m=7)
    assert (t.prob.argmax(-1) == 0).all()
    best = t.marginals().topk(2).values
    assert (best[..., 0] > best[..., 1] + 1e-3).all()  # every argmax is unique
    assert not coherent(t, contexts(t), t.marginals().argmax(-1)).any()


def test_pairs_and_groups_and_sums_are_what_their_docstrings_say():
    t = make("pairs")
    assert ((t.support[..., 1::2] - t.support[..., 0::2]) % 8 == contexts(t)[:, None, None]).all()

    # the last two are (0, 1, 1), where both copies are noise, though they are alike, and (1, 1, 1)
    t = make("copy", V=3, m=3, n_ctx=1, eps=0.3)
    assert t.prob[0, [0, 1, 4, 13]].tolist() == pytest.approx([0.8**2 / 3, 0.8 * 0.1 / 3, 0.1**2 / 3, 0.8**2 / 3])

    t = make("mixed")
    f, u, a, partner = t.support.unbind(-1)
    assert torch.equal(partner, 7 - a) and torch.equal(f, contexts(t)[:, None].expand_as(f))
    assert len({tuple(x) for x in t.support[0][:, 1:3].tolist()}) == 64  # u says nothing about a

    t = make("sum", V=3, m=4)
    assert (t.support.sum(-1) % 3 == contexts(t)[:, None]).all() and t.support.shape[1] == 27


@pytest.mark.parametrize(("levels", "m", "rho"), [(2, 2, 0.9999), (8, 3, 0.3)])
def test_gaussian_has_the_orthant_probabilities(levels, m, rho):
    """All z_i are positive with probability 1/4 + asin(rho) / 2 pi for two, and 1/8 + 3 asin(rho) / 4 pi for three.
    Each context shifts the levels, and the first tuple, (0, .., 0) before the shift, shows by how much."""
    t = make("gaussian", levels=levels, m=m, rho=rho, n_ctx=2)
    positive = ((t.support - t.support[:, :1]) % levels >= levels // 2).all(-1)
    expected = {2: 0.25 + math.asin(rho) / (2 * math.pi), 3: 0.125 + 3 * math.asin(rho) / (4 * math.pi)}[m]
    assert (positive * t.prob).sum(-1).tolist() == pytest.approx([expected] * 2, abs=1e-12)
    torch.testing.assert_close(t.marginals(), torch.full((2, m, levels), 1 / levels).double())


# --- reading the table
def test_distances_by_hand():
    table = torch.full((2, 2), 1 / 9, dtype=torch.float64)
    expected = [0.25 * math.log(9 / 4) + 0.75 * math.log(27 / 4), math.log(9 / 2)]
    assert kl(BY_HAND.prob, table).tolist() == pytest.approx(expected)
    assert kl(BY_HAND.prob, table * torch.tensor([0.0, 1.0]))[0] == math.inf


def test_quantile_at_the_ends_of_the_unit_interval():
    for u, first in ((0.0, [0, 1]), (0.25 - 2**-54, [0, 1]), (0.25, [2, 0]), (1 - 2**-53, [2, 0])):
        assert BY_HAND.quantile(torch.tensor([0]), torch.tensor([u], dtype=torch.float64)).tolist() == [first]


# --- rows of it
def test_a_folder_of_rows(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "rows"
    caller(toy, monkeypatch, capsys)("gaussian", "m=2", "rho=0.5", "--out", folder, "--rows", 3000)

    # what is written says of which task it is: 18 ids, in a multiple of 16
    sizes = {"levels": 8, "m": 2, "n_ctx": 32, "rho": 0.5}
    corpus = read_corpus(folder, 512, 0, 2, 100)
    t = make("gaussian", **sizes)
    assert corpus.meta == Meta(32, t.eos_id, t.mask_id, t.V, t.m, {"toy": "gaussian"} | sizes)

    # a block of the context's token is the prompt, the other one an answer
    for split, n in (("train", 3000), ("val", 4096)):
        x, real, prompt = corpus.rows[split].batch(0, n)
        assert x.shape == (len(corpus.rows[split]), 2 * t.m) and real.all()
        assert torch.equal(prompt, (torch.arange(2 * t.m) < t.m).expand_as(x))
        c = x[:, 0] - t.V
        assert torch.equal(x[:, : t.m], t.prompt(c)) and coherent(t, c, x[:, t.m :]).all()

        # of a context's answers as many as their probability says
        seen = torch.stack([(x[c == k][:, None, t.m :] == t.support[k]).all(-1).double().mean(0) for k in (0, 1)])
        assert (seen - t.prob[:2]).abs().max() < 0.12


def test_rows_to_train_on_follow_the_seed_and_those_of_validation_never(tmp_path):
    files = []
    for seed in (0, 1):
        toy.write_toy(tmp_path / str(seed), "modes", {}, 50, seed)
        files.append([(tmp_path / str(seed) / f"{split}.safetensors").read_bytes() for split in ("train", "val")])
    assert files[0][0] != files[1][0] and files[0][1] == files[1][1]


# --- the script
@pytest.mark.parametrize("name, size, says", [
    ("copy", "V=1025", "V must be in 2..1024"), ("copy", "m=33", "m must be in 2..32"),
    ("copy", "n_ctx=129", "n_ctx must be in 1..128"), ("copy", "eps=1.1", "eps must be in 0..1"),
    ("gaussian", "levels=1025", "levels must be in 2..1024"), ("gaussian", "rho=1", "rho must be in 0..0.9999"),
    ("pairs", "m=3", "an even m"), ("mixed", "m=6", "that 4 divides"), ("copy", "m=6", "8**6 = 262,144 tuples"),
    ("permutation", "m=9", "m <= V"), ("copy", "rho=0.1", "does not use rho"), ("copy", "V=x", "not a size"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_written(name, size, says, tmp_path, monkeypatch, capsys):
    assert says in caller(toy, monkeypatch, capsys).fails(name, size, "--out", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_a_row_for_each_task(monkeypatch, capsys):
    """V, m, contexts and answers; H and TC; and the share of possible answers if one step draws."""
    lines = [line.split() for line in caller(toy, monkeypatch, capsys)().splitlines()]
    assert [(name, *map(int, numbers)) for name, *numbers, _, _, _ in lines[1:8]] == [
        ("modes", 24, 4, 32, 3), ("pairs", 8, 4, 8, 8**2), ("mixed", 8, 4, 8, 8**2), ("copy", 8, 4, 32, 8**4),
        ("gaussian", 8, 3, 32, 8**3), ("permutation", 8, 4, 32, 24), ("sum", 5, 3, 5, 5**2),
    ]  # fmt: skip

    # modes: two positions have symbols with .4 .3 .3, and two with .4 .6
    exact = [entropy([0.4, 0.3, 0.3]), TC_OF_MODES, 0.4**4 + 2 * 0.3**2 * 0.6**2]
    assert lines[1] == ["modes", "24", "4", "32", "3", *(f"{x:.3f}" for x in exact)]
