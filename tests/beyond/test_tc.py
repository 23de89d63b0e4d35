"""TC and mismatch of bundles against chains that can be enumerated. `pytest tests/beyond/test_tc.py`"""

import math

import numpy as np
import pytest
import torch
from common import MASK, approx, command_line, conditional, tiny_model
from grids import CDF_STEPS, grid

import toy
from beyond import spans, tc
from beyond.chain import leaders
from beyond.spans import at_rows
from beyond.tc import by_confidence, conditionals, estimate, terms
from cache import Cached
from checkpoint import save_model
from data import generator, is_validation


def exact(t: toy.Toy, context: int):
    """Stage A of a model that has learned the table."""

    def log_p(z):
        c = torch.full((len(z),), context)
        return conditional(t, c, z.masked_fill(z == t.mask_id, -1)).log()

    return log_p


def tilted(t: toy.Toy, context: int):
    """The same but for the answer that is all masked: its marginals are multiplied by 1, 2 .. V and normalised. Such
    conditionals are those of no joint."""
    known, p = exact(t, context), t.marginals()[context] * torch.arange(1, t.V + 1)
    first = (p / p.sum(-1, keepdim=True)).log()  # (m, V)
    return lambda z: torch.where((z == t.mask_id).all(-1)[:, None, None], first, known(z))


def enumerated(p: torch.Tensor, q: torch.Tensor, tuples: torch.Tensor) -> tuple[float, float]:
    """TC of tuples (S, n) with probabilities q (S,), and sum_i KL(q_i || p_i) for p (n, V), in float64."""
    q_i = torch.zeros_like(p).scatter_add_(1, tuples.T, q.expand(tuples.shape[1], -1))
    entropies = torch.special.entr(q_i).sum()
    own = torch.special.entr(q).sum()
    return float(entropies - own), float((torch.xlogy(q_i, q_i) - torch.xlogy(q_i, p)).sum())


@pytest.mark.parametrize("task", CDF_STEPS)
def test_on_exact_conditionals_the_grid_gives_the_exact_tc_and_no_mismatch(task):
    """The grid counts every draw with its own weight: its average is the marginal itself, without a bias to correct."""
    t, u, z = grid(task)
    for context in range(t.n_ctx):
        alone, written = conditionals(exact(t, context), z, z == t.mask_id, u)
        got = terms(alone[0], written.repeat(1 + 2000 // len(u), 1, 1))  # so many that the jackknife takes off nothing
        assert got["low"] == approx(float(t.tc()[context]), abs=1e-9) == got["both"]
        assert got["TC"] == approx(got["low"], abs=2e-3) and got["mismatch"] == approx(0, abs=2e-3)
        first = (torch.arange(t.m) < 1).expand_as(z)  # one token alone
        alone, written = conditionals(exact(t, context), z, first, u)
        one = terms(alone[0, :1], written[:, :1])
        assert all(abs(v) < 1e-9 for v in one.values())


def replicates(log_p, t: toy.Toy, draws: int, times: int, alone: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Every term of the whole masked answer, estimated so many times: (times,) each."""
    z = torch.full((times * draws, t.m), t.mask_id)
    u = torch.rand(z.shape, generator=generator("tc", t.name, draws), dtype=torch.float64)
    now, written = conditionals(log_p, z, z == t.mask_id, u)
    got = [terms(now[0] if alone is None else alone, part) for part in written.split(draws)]
    return {k: torch.tensor([g[k] for g in got], dtype=torch.float64) for k in tc.TERMS}


def mean_and_error(v: torch.Tensor) -> tuple[float, float]:
    return float(v.mean()), float(v.std()) / math.sqrt(len(v))


def contradiction(task: str):
    """The toy, Stage A, its marginals now (m, V), and its chain's joint over the support (S,): the first token comes
    from the tilted marginal and the rest exactly."""
    t = toy.make(task, **TILTED[task])
    log_p = tilted(t, 1)
    p = log_p(torch.full((1, t.m), t.mask_id))[0].exp()
    first = int(leaders(p.log().amax(-1), 1))
    token = t.support[1][:, first]
    return t, log_p, p, t.prob[1] * p[first, token] / t.marginals()[1, first, token]


TILTED = {"modes": dict(V=6, n_ctx=2), "gaussian": dict(levels=4, m=3, n_ctx=2), "permutation": dict(V=5, n_ctx=2)}


@pytest.mark.parametrize("task", TILTED)
def test_both_terms_of_a_model_that_contradicts_itself(task):
    t, log_p, p, q = contradiction(task)
    x = t.support[1]
    tc_true, mismatch = enumerated(p, q, x)
    both = float((q * (q / p[torch.arange(t.m), x].prod(-1)).log()).sum())
    assert float(q.sum()) == approx(1) and both == approx(tc_true + mismatch) and min(tc_true, mismatch) > 0.5
    got = replicates(log_p, t, 1024, 40)
    for name, true in (("TC", tc_true), ("mismatch", mismatch), ("both", both)):
        mean, error = mean_and_error(got[name])
        assert abs(mean - true) < 4 * error < 0.06, name
    got = replicates(log_p, t, 32, 400)
    mean, error = mean_and_error(got["both"])
    assert abs(mean - both) < 4 * error  # without bias, however few the draws
    assert mean_and_error(got["low"])[0] < tc_true < mean_and_error(got["high"])[0]


@pytest.mark.parametrize("task", TILTED)
def test_the_bias_at_the_default_number_of_draws(task):
    """Were Stage A's marginals the chain's own, both would be TC and mismatch 0: what is found of it is the bias, with
    the noise of the average in both entropies, and so without most of it."""
    t, log_p, _, q = contradiction(task)
    own = torch.zeros(t.m, t.V, dtype=torch.float64).scatter_add_(1, t.support[1].T, q.expand(t.m, -1))
    got = replicates(log_p, t, 32, 2500, own.log())
    bias, error = mean_and_error(-got["mismatch"])
    assert abs(bias) + 4 * error < 0.015  # nats a bundle
    before, error = mean_and_error(got["low"] - got["both"])
    assert before + 4 * error < -0.02  # what the jackknife took away


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
    _, score = spans.chain(everywhere, z.expand_as(forced), bundle.expand_as(forced), forced)
    q, p = score.double().exp(), everywhere(z.expand_as(forced))[0, bundle[0]].double().exp()
    assert float(q.sum()) == approx(1, abs=1e-4)
    truth = enumerated(p, q, tuples)
    got = [estimate(engine, {(1, block, here): [1, 0.5], (0, block, (True,) + here[1:]): [1, 0.5]}, 32)[0]]
    for k in range(1, 40):  # draws are a function of the bundle alone: here they are drawn by hand
        u = torch.rand(32, 8, generator=generator("by hand", k))
        rows = spans.stage_a_log_probs(at_rows(engine, [1] * 32))
        alone, written = conditionals(rows, z.repeat(32, 1), bundle.repeat(32, 1), u)
        got.append(np.array(list(terms(alone[0, bundle[0]], written[:, bundle[0]]).values())))
    for k, true in ((0, truth[0]), (1, truth[1]), (2, sum(truth))):
        mean, error = mean_and_error(torch.tensor(np.array(got)[:, k]))
        assert true > 0 and abs(mean - true) < 4 * error + 0.005


def test_a_span_counts_as_one_however_many_bundles_it_has():
    """Span 0 has one bundle, committed at three taus, with TC 1; span 1 one with TC 3; nothing in span 2. The mean is
    (3 + 3) / 4; a bootstrap of the two spans has 1, 1.5 and 3."""
    here = (True, True, True, False)
    bundles = {(0, (5,) * 4, here): [3, 0.55], (1, (6,) * 4, here): [1, 0.60], (0, (7,) * 4, here): [2, 0.95]}
    values = np.array([[1.0, 2.0, 3.0, 0.5, 1.5], [3.0, 2.0, 5.0, 2.5, 3.5], [9.0] * 5])
    (record,) = by_confidence(bundles, values, [0, 1])  # 0.9..1.0 has one span alone: no error, no row
    assert record["bin"] == "0.5..0.6" and record["bundles"] == 4 and record["size"] == 3
    assert record["lowest"] == approx((3 * 0.55 + 0.6) / 4)
    assert (
        record["TC"][0] == approx(1.5) and record["mismatch"] == (2.0, approx(0)) and record["both"][0] == approx(3.5)
    )
    assert record["TC"][1] == approx(0.75, rel=0.05)


SOURCE = "class A:\n    def double(self, x):\n        return 2 * x\n\n\ndef f(a, b):\n    # add\n    return a + b\n"


def test_the_report_from_the_command_line(tmp_path, monkeypatch, capsys):
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257), tmp_path / "base")
    (tmp_path / "text").mkdir()
    for name in [n for n in (f"{i}.py" for i in range(200)) if is_validation(n)]:
        (tmp_path / "text" / name).write_text(SOURCE)
    given = ["--data", tmp_path / "text", "--ckpt", tmp_path / "base", "--spans", 6, "--draws", 2, "--device", "cpu"]
    code, out, _ = command_line(tc, monkeypatch, capsys, *given, "--taus", 0, 0.1)
    assert code == 0 and "6 spans" in out and "2 draws each" in out and "TC between" in out
    code, again, _ = command_line(tc, monkeypatch, capsys, *given, "--taus", 0, 0.1)
    assert again == out
    pytest.importorskip("matplotlib")
    plot = ["--taus", 0, 0.1, "--plot", tmp_path / "tc.svg"]
    code, out, _ = command_line(tc, monkeypatch, capsys, *given, *plot)
    assert code == 0 and out.splitlines()[-1].startswith("wrote") and (tmp_path / "tc.svg").stat().st_size > 1000
