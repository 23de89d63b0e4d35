"""TC and mismatch of bundles against chains that can be enumerated. `pytest tests/beyond/test_tc.py`"""

import itertools
import math

import numpy as np
import pytest
import torch
from common import MASK, approx, command_line, conditional, tiny_model
from runs import held_out_text

from beyond import spans, tc
from beyond.tc import at_rows, by_confidence, conditionals, estimate, terms
from cache import Cached
from checkpoint import load_model, save_model
from lib import toy
from lib.tokenizer import byte_tokenizer
from lib.util import generator


def exact(t: toy.Toy, context: int):
    """Stage A of a model that has learned the table."""

    def log_p(z):
        c = torch.full((len(z),), context)
        return conditional(t, c, z.masked_fill(z == t.mask_id, -1)).log()

    return log_p


def enumerated(p: torch.Tensor, q: torch.Tensor, tuples: torch.Tensor) -> tuple[float, float]:
    """TC of tuples (S, n) with probabilities q (S,), and sum_i KL(q_i || p_i) for p (n, V), in float64."""
    q_i = torch.zeros_like(p).scatter_add_(1, tuples.T, q.expand(tuples.shape[1], -1))
    entropies = torch.special.entr(q_i).sum()
    own = torch.special.entr(q).sum()
    return float(entropies - own), float((torch.xlogy(q_i, q_i) - torch.xlogy(q_i, p)).sum())


# task -> its size, and n: the conditional CDFs of these tables step at multiples of 1/n only (modes: 0.6 for the shared
# token, then 1/2). The midpoints between them count the joint exactly
CDF_STEPS = {"modes": (dict(V=6, n_ctx=2), 10), "pairs": (dict(V=4, m=2), 4), "sum": (dict(V=3, m=2), 3)}


@pytest.mark.parametrize("task", CDF_STEPS)
def test_on_exact_conditionals_the_grid_gives_the_exact_tc_and_no_mismatch(task):
    """The grid counts every draw with its own weight: its average is the marginal itself, without a bias to correct."""
    size, n = CDF_STEPS[task]
    t = toy.make(task, **size)
    u = torch.cartesian_prod(*[(torch.arange(n, dtype=torch.float64) + 0.5) / n] * t.m)  # (n**m, m)
    z = torch.full((len(u), t.m), t.mask_id)
    for context in range(t.n_ctx):
        alone, written = conditionals(exact(t, context), z, z == t.mask_id, u)
        got = terms(alone[0], written.repeat(1 + 2000 // len(u), 1, 1))  # so many that its bounds meet
        assert got["low"] == approx(float(t.tc()[context]), abs=1e-9) == got["both"]
        assert got["TC"] == approx(got["low"], abs=2e-3) and got["mismatch"] == approx(0, abs=2e-3)
        first = (torch.arange(t.m) < 1).expand_as(z)  # one token alone
        alone, written = conditionals(exact(t, context), z, first, u)
        one = terms(alone[0, :1], written[:, :1])
        assert all(abs(v) < 1e-9 for v in one.values())


# --- what is expected of the estimate, exactly
def test_four_draws_of_a_fair_coin_by_hand():
    """With four draws Stage A counts as one more. Three heads and a tail: what a head is held against saw two heads
    and a tail, the tail three heads; and half a head and half a tail from Stage A, a fourth in all."""
    head = [1.0, 0.0]
    tail = [0.0, 1.0]
    written = torch.tensor([[head], [head], [tail], [head]], dtype=torch.float64).log()
    fair = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    got = terms(fair, written)

    low = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    high = -0.75 * math.log(2.5 / 4) - 0.25 * math.log(0.5 / 4)
    assert got["both"] == approx(math.log(2))  # a conditional is certain, Stage A is not
    assert got["low"] == approx(low) and got["high"] == approx(high)
    assert got["TC"] == approx((low + high) / 2) and got["mismatch"] == approx(math.log(2) - (low + high) / 2)

    # with two draws, a head and a tail, Stage A counts as half the root of two: each has seen nothing but its half
    weight = math.sqrt(2) / 2
    two = terms(fair, written[1:3])
    assert two["low"] == approx(math.log(2)) and two["high"] == approx(-math.log(weight / 2 / (1 + weight)))


def table(*weighted: tuple[float, tuple[int, ...]], V: int = 4) -> toy.Toy:
    """(probability, tuple), .. -> the table of one context."""
    prob, tuples = zip(*weighted, strict=True)
    return toy.Toy("table", V, torch.tensor([tuples]), torch.tensor([prob], dtype=torch.float64))


TABLES = {
    "a nearly certain copy": table((0.94, (0, 0)), (0.03, (1, 1)), (0.02, (2, 2)), (0.01, (3, 3))),
    "two phrases": table((0.6, (0, 1, 2)), (0.4, (3, 2, 0))),
    "three positions": table((0.4, (0, 1, 2)), (0.3, (0, 2, 1)), (0.2, (1, 1, 3)), (0.1, (3, 0, 0))),
    "a fair copy": table(*((0.25, (k, k)) for k in range(4))),
}


def written_by(t: toy.Toy) -> torch.Tensor:
    """(S, m, V): the conditional by which each position of each tuple is written, from left to right."""
    x = t.support[0]
    steps = []
    for i in range(t.m):
        z = x.clone()
        z[:, i:] = -1
        steps.append(conditional(t, torch.zeros(len(x), dtype=torch.int64), z)[:, i])
    return torch.stack(steps, dim=1)


def expected(t: toy.Toy, p: torch.Tensor, draws: int) -> dict[str, float]:
    """The mean of every term over all sequences of so many draws, each with its probability."""
    log_written = written_by(t).log()
    mean = dict.fromkeys(tc.TERMS, 0.0)
    total = 0.0
    for drawn in itertools.product(range(len(t.prob[0])), repeat=draws):
        probability = float(t.prob[0][list(drawn)].prod())
        total += probability
        for name, value in terms(p.log(), log_written[list(drawn)]).items():
            mean[name] += probability * value
    assert total == approx(1)
    return mean


@pytest.mark.parametrize("draws", [2, 3, 4])
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_in_the_mean_over_draws_the_bounds_hold_and_both_has_no_bias(name, wrong, draws):
    t = TABLES[name]
    p = t.marginals()[0]
    if wrong:
        p = (p + torch.tensor([0.1, 0.2, 0.3, 0.4])) / 2
    tc_true, mismatch = enumerated(p, t.prob[0], t.support[0])
    assert tc_true == approx(float(t.tc()[0])) and (mismatch > 0.01 if wrong else mismatch == approx(0, abs=1e-9))

    mean = expected(t, p, draws)
    assert mean["both"] == approx(tc_true + mismatch)
    assert mean["low"] < tc_true < mean["high"]
    assert mean["TC"] == approx((mean["low"] + mean["high"]) / 2)
    assert mean["TC"] + mean["mismatch"] == approx(mean["both"])


# --- bundles of a model
@torch.inference_mode()
def test_bundles_of_a_model_with_a_cache_by_enumeration_of_every_pair():
    """A bundle of two and all V^2 tuples forced through its chain, against draws of it in rows of other lengths."""
    model, contexts = tiny_model(), [[1, 2, 3, 4, 5, 6, 7, 8], [9] * 16, [3] * 8]
    engine = Cached(model, contexts, 0)
    block, here = (4, MASK, 7, MASK, MASK, 1, 2, 3), (False, True, False, False, True, False, False, False)
    z, bundle = torch.tensor([block]), torch.tensor([here])
    V = model.cfg.vocab_size
    tuples = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    tuples = tuples[(tuples != MASK).all(-1)]
    forced = z.repeat(len(tuples), 1).masked_scatter(bundle.repeat(len(tuples), 1), tuples)
    everywhere = spans.stage_a_log_probs(at_rows(engine, [1] * len(tuples)))
    score = spans.chain_score(everywhere, z.expand_as(forced), bundle.expand_as(forced), forced)
    q, p = score.double().exp(), everywhere(z.expand_as(forced))[0, bundle[0]].double().exp()
    assert float(q.sum()) == approx(1, abs=1e-4)
    truth = enumerated(p, q, tuples)
    got = [estimate(engine, [(1, block, here), (0, block, (True,) + here[1:])], 32)[0]]
    for k in range(1, 40):  # draws are a function of the bundle alone: here they are drawn by hand
        u = torch.rand(32, 8, generator=generator("by hand", k))
        rows = spans.stage_a_log_probs(at_rows(engine, [1] * 32))
        alone, written = conditionals(rows, z.repeat(32, 1), bundle.repeat(32, 1), u)
        got.append(np.array(list(terms(alone[0, bundle[0]], written[:, bundle[0]]).values())))
    for k, true in ((0, truth[0]), (1, truth[1]), (2, sum(truth))):
        values = np.array(got)[:, k]
        mean, error = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
        assert true > 0 and abs(mean - true) < 4 * error + 0.005


def test_a_bundle_counts_as_often_as_it_was_committed():
    """One at three taus, with TC 1; another once, with TC 3; of another size and a higher confidence one more."""
    here = (True, True, True, False)
    bundles = {(0, (5,) * 4, here): [3, 0.55], (1, (6,) * 4, here): [1, 0.60], (0, (7,) * 4, (True,) * 4): [2, 0.95]}
    values = np.array([[1.0, 2.0, 3.0, 0.5, 1.5], [3.0, 2.0, 5.0, 2.5, 3.5], [9.0] * 5])
    low, high = by_confidence(bundles, values)
    assert low == dict(bin="0.5..0.6", bundles=4, size=3, TC=1.5, mismatch=2, both=3.5, low=1, high=2)
    assert high == dict(bin="0.9..1.0", bundles=2, size=4) | dict.fromkeys(tc.TERMS, 9)


def test_the_report_from_the_command_line(tmp_path, monkeypatch, capsys):
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257), tmp_path / "base")
    held_out_text(tmp_path / "text")
    given = ["--data", tmp_path / "text", "--ckpt", tmp_path / "base", "--spans", 6, "--draws", 2, "--device", "cpu"]
    code, out, _ = command_line(tc, monkeypatch, capsys, *given)
    assert code == 0 and "6 spans" in out and "2 draws each" in out and "TC between" in out

    # at -1 every mask of a span is one bundle, committed once
    base = load_model(tmp_path / "base", "cpu", torch.float32)
    task = spans.Spans([tmp_path / "text"], 6, byte_tokenizer(), base.cfg)
    found = tc.committed(base, task, [-1.0])
    expected = {(row, tuple(z), tuple(i == 257 for i in z)) for row, z in enumerate(task.z.tolist())}
    assert found.keys() == expected and {often for often, _ in found.values()} == {1}
