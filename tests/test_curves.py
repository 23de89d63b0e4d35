"""Text: spans, the estimator of TC against exact tables, a difference by hand. `pytest tests/test_curves.py`"""

import sys

import numpy as np
import pytest
import torch
from common import MASK, approx, command_line, refused, tiny_model
from test_train import CDF_STEPS, grid

import evaluate
from cache import Cached
from checkpoint import save_model
from curves import FILL, blocks, chain, cut_spans, difference, excess, fill, pieces, stage_a_log_probs
from data import byte_tokenizer, is_validation

SOURCE = "class A:\n    def double(self, x):\n        return 2 * x\n\n\ndef f(a, b):\n    # add\n    return a + b\n"


@pytest.mark.parametrize("task", CDF_STEPS)
def test_the_estimator_on_exact_conditionals_is_the_exact_tc(task):
    """A grid of u that no conditional CDF cuts gives every joint sample its own weight: the mean is TC itself."""
    t, u, z = grid(task)
    for context in range(t.n_ctx):
        c = torch.full((len(u),), context)
        gain = excess(lambda z, c=c: t.conditional(c, z.masked_fill(z == t.mask_id, -1)).log(), z, z == t.mask_id, u)
        assert float(gain.double().mean()) == approx(float(t.tc()[context]), abs=1e-5)
        first = torch.arange(t.m) < 1  # one token alone has no TC
        alone = excess(
            lambda z, c=c: t.conditional(c, z.masked_fill(z == t.mask_id, -1)).log(), z, first.expand_as(z), u
        )
        assert float(alone.abs().max()) < 1e-6


def test_a_forced_chain_scores_what_is_forced_and_the_greedy_one_scores_itself():
    model = tiny_model()
    engine = Cached(model, [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, 0)
    z = torch.tensor([[MASK] * 8, [1, MASK, MASK, 4, 5, 6, MASK, 8]])
    log_p = stage_a_log_probs(engine)
    tokens, score = chain(log_p, z, z == MASK)
    again, forced = chain(log_p, z, z == MASK, forced=tokens)
    assert torch.equal(again, tokens) and torch.equal(forced, score)
    one = torch.tensor([[9, MASK, 9, 9, 9, 9, 9, 9]] * 2)  # a single mask: the chain is the marginal
    token = torch.full_like(one, 7)
    _, score = chain(log_p, one, one == MASK, forced=token)
    torch.testing.assert_close(score, log_p(one)[:, 1, 7])


def test_one_at_a_time_fills_what_the_greedy_chain_does():
    model = tiny_model(n_rounds=1)
    engine = Cached(model, [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, 0)
    z = torch.tensor([[MASK] * 8, [1, MASK, MASK, 4, 5, 6, MASK, 8]])
    filled = fill(engine, z, evaluate.replace(FILL, tau_m2t=1.0, n_rounds=0))
    assert filled.full.tolist() == [8, 3] and filled.partial.tolist() == [0, 0]
    assert torch.equal(filled.z, chain(stage_a_log_probs(engine), z, z == MASK)[0])


def test_spans_lie_inside_a_later_block_of_held_out_functions():
    assert [p for p, _ in pieces("a.py", SOURCE)] == [
        "def f(a, b):\n    # add\n    return a + b\n",
        "def double(self, x):\n    return 2 * x\n",
    ]
    assert list(pieces("a.txt", "x")) == [("x", False)] and list(pieces("a.py", "def (")) == []
    names = [n for n in (f"{i}.py" for i in range(400)) if is_validation(n)]
    tokenizer = byte_tokenizer()
    documents = [(n, SOURCE) for n in names] + [("0.py" if not is_validation("0.py") else "x", SOURCE * 3)]
    spans = cut_spans(documents, tokenizer, 8, 64, 1000)
    assert len(spans) == 2 * len(names)  # nothing from a training document
    z, inside = blocks(spans, 8, MASK)
    assert torch.equal(z == MASK, inside) and inside.any(-1).all() and inside.sum(-1).max() <= 6
    for s, row, here in zip(spans, z.tolist(), inside.tolist(), strict=True):
        assert s.start >= 8 and s.start % 8 == 0 and s.start + 8 <= len(s.piece)
        assert [t for t, h in zip(row, here, strict=True) if not h] == [
            t for t, h in zip(s.piece[s.start : s.start + 8], here, strict=True) if not h
        ]


def test_a_difference_at_equal_forwards_by_hand():
    """Base: score -1 at 0.2, -0.5 at 0.6. Ours: -0.5 at 0.4, where the base's line is at -0.75."""
    base = [dict(nfe=np.full(4, x), score=np.full(4, y)) for x, y in ((0.6, -0.5), (0.2, -1.0))]
    ours = dict(nfe=np.array([0.3, 0.5, 0.3, 0.5]), score=np.array([-0.4, -0.6, -0.4, -0.6]))
    rows = np.array([[0, 1, 2, 3], [0, 0, 2, 2]])  # the second: -0.4 at 0.3, where the line is at -0.875
    gap, low, high = difference(ours, base, "nfe", rows)
    assert gap == approx(0.25) and low == approx(0.25 + 0.025 * 0.225) and high == approx(0.475 - 0.025 * 0.225)


def test_both_reports_from_the_command_line(tmp_path, monkeypatch, capsys):
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257), tmp_path / "base")
    (tmp_path / "text").mkdir()
    for i in range(200):
        (tmp_path / "text" / f"{i}.py").write_text(SOURCE)
    given = ["--data", tmp_path / "text", "--ckpt", tmp_path / "base", "--taus", 0.0, 0.5, "--spans", 6]
    code, out, _ = command_line(evaluate, monkeypatch, capsys, *given, "--curve")
    assert code == 0 and "6 of them in Python functions" in out and "base, one at a time" in out
    code, out, _ = command_line(evaluate, monkeypatch, capsys, *given, "--tc", "--draws", 2)
    assert code == 0 and "TC (nats)" in out
    assert "--spans" in refused(evaluate, monkeypatch, capsys, "--task", "gsm8k", "--spans", 3)
    assert "--taus" in refused(evaluate, monkeypatch, capsys, *given, "--tc", "--taus", 1.5)
    assert "one at a time" in refused(evaluate, monkeypatch, capsys, *given, "--curve", "--tc")
    assert "--ckpt" in refused(evaluate, monkeypatch, capsys, "--data", tmp_path / "text", "--curve")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = ["--plot", tmp_path / "c.svg"]
    assert "pip install matplotlib" in refused(evaluate, monkeypatch, capsys, *given, "--curve", *plot)
