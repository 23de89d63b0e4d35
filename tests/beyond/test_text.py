"""Text: spans, forced chains, differences at equal forwards by hand. `pytest tests/beyond/test_text.py`"""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import MASK, approx, command_line, refused, tiny_model

from beyond import spans, stage_b_only, text
from beyond.spans import FILL, blocks, chain, cut, fill, pieces, stage_a_log_probs
from beyond.text import compare, differences, interval, means
from cache import Cached
from checkpoint import save_adapter, save_model
from data import byte_tokenizer, generator, is_validation

SOURCE = "class A:\n    def double(self, x):\n        return 2 * x\n\n\ndef f(a, b):\n    # add\n    return a + b\n"


def test_spans_lie_inside_a_later_block_of_held_out_functions():
    assert [p for p, _ in pieces("a.py", SOURCE)] == [
        "def f(a, b):\n    # add\n    return a + b\n",
        "def double(self, x):\n    return 2 * x\n",
    ]
    assert list(pieces("a.txt", "x")) == [("x", False)] and list(pieces("a.py", "def (")) == []
    names = [n for n in (f"{i}.py" for i in range(400)) if is_validation(n)]
    documents = [(n, SOURCE) for n in names] + [("0.py" if not is_validation("0.py") else "x", SOURCE * 3)]
    found = cut(documents, byte_tokenizer(), 8, 64, 1000)
    assert len(found) == 2 * len(names)  # nothing from a training document
    z, inside = blocks(found, 8, MASK)
    assert torch.equal(z == MASK, inside) and inside.any(-1).all() and inside.sum(-1).max() <= 6
    for s, row, here in zip(found, z.tolist(), inside.tolist(), strict=True):
        assert s.start >= 8 and s.start % 8 == 0 and s.start + 8 <= len(s.piece)
        assert [t for t, h in zip(row, here, strict=True) if not h] == [
            t for t, h in zip(s.piece[s.start : s.start + 8], here, strict=True) if not h
        ]


@torch.inference_mode()
def test_a_forced_chain_scores_what_is_forced_and_the_greedy_one_scores_itself():
    model = tiny_model()
    engine = Cached(model, [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, 0)
    z = torch.tensor([[MASK] * 8, [1, MASK, MASK, 4, 5, 6, MASK, 8]])
    log_p = stage_a_log_probs(engine)
    tokens, score = chain(log_p, z, z == MASK)
    again, forced = chain(log_p, z, z == MASK, forced=tokens)
    assert torch.equal(again, tokens) and torch.equal(forced, score)
    one = torch.tensor([[9, MASK, 9, 9, 9, 9, 9, 9]] * 2)  # a single mask: the chain is the marginal
    _, score = chain(log_p, one, one == MASK, forced=torch.full_like(one, 7))
    torch.testing.assert_close(score, log_p(one)[:, 1, 7])
    left = stage_a_log_probs(engine, mask_too=True)  # a mask that a decoder has left there has a score too
    assert chain(left, one, one == MASK, forced=one)[1].isfinite().all()


@torch.inference_mode()
def test_one_at_a_time_fills_what_the_greedy_chain_does():
    engine = Cached(tiny_model(n_rounds=1), [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, 0)
    z = torch.tensor([[MASK] * 8, [1, MASK, MASK, 4, 5, 6, MASK, 8]])
    written, full, partial = fill(engine, z, replace(FILL, tau_m2t=1.0, n_rounds=0))
    assert full.tolist() == [8, 3] and partial.tolist() == [0, 0]
    assert torch.equal(written, chain(stage_a_log_probs(engine), z, z == MASK)[0])
    assert fill(engine, z, replace(FILL, tau_m2t=0.0, n_rounds=0))[1].tolist() == [1, 1]  # the base's first point


def test_what_was_written_is_judged_as_text():
    tokenizer, piece = byte_tokenizer(), "def f(a):\n    return a + a\n"
    ids = tokenizer.encode_document(piece).tolist()
    python, prose = (spans.Span(ids, 8, slice(4, 7), kind) for kind in (True, False))
    written = torch.tensor([list(s) for s in (b":\n    re", b":\n  ) re", b": f f f ")])
    got = text.quality([python, python, prose], written, tokenizer)
    assert got["exact"].tolist() == [1, 0, 0]
    assert got["parses"].tolist()[:2] == [1, 0] and np.isnan(got["parses"][2])  # prose parses never, and is not asked
    assert got["stutter"].tolist() == [0, 0, approx(2 / 5)]  # def f a | f f f, from the block before: 5 pairs


def test_means_and_intervals_by_hand():
    """The first row of weights is the sample itself; nan takes no part; a row without any value has no mean."""
    weights = np.array([[1, 1, 1], [3, 0, 0], [0, 2, 1], [0, 0, 3]])
    assert means(np.array([1.0, 2.0, 6.0]), weights) == approx([3, 1, 10 / 3, 6])
    assert means(np.array([1.0, 2.0, np.nan]), weights) == approx([1.5, 1, 2, np.nan], nan_ok=True)
    assert interval(np.array([0.5, *np.arange(41) / 40])) == "0.5000 [0.0250, 0.9750]"
    assert interval(np.full(3, np.nan)) == "-"
    drawn = spans.resamples(5)
    assert drawn.shape == (1001, 5) and (drawn[0] == 1).all() and (drawn.sum(-1) == 5).all()


def line(*values: float) -> np.ndarray:
    return np.array([values], dtype=float)


def test_a_difference_at_equal_forwards_by_hand():
    """Base: -1 at 0.2, -0.5 at 0.6. Ours: -0.5 at 0.4, where the chord is at -0.75 and the better neighbour at -0.5."""
    x, y = line(0.6, 0.2), line(-0.5, -1.0)
    assert [float(d[0]) for d in differences(line(0.4)[0], line(-0.5)[0], x, y)] == approx([0.25, 0.0])
    assert [float(d[0]) for d in differences(line(0.2)[0], line(-0.5)[0], x, y)] == approx([0.5, 0.5])  # a point itself
    for outside in (0.19, 0.61):  # nothing is extrapolated, and nothing clamped
        assert all(np.isnan(d[0]) for d in differences(line(outside)[0], line(-0.5)[0], x, y))
    twice = differences(line(0.3)[0], line(0.0)[0], line(0.2, 0.2, 0.6), line(-3.0, -1.0, -1.0))
    assert [float(d[0]) for d in twice] == approx([1.0, 1.0])  # of two settings with the same forwards the better one


def test_on_a_concave_curve_the_chord_flatters_and_the_neighbour_does_not():
    """A decoder on the base's own curve, sqrt(x): the truth is 0. More points bring both columns nearer to it."""
    wide = differences(line(0.25)[0], line(0.5)[0], line(0.16, 0.36), line(0.4, 0.6))
    near = differences(line(0.25)[0], line(0.5)[0], line(0.2401, 0.2601), line(0.49, 0.51))
    assert [float(d[0]) for d in wide] == approx([0.01, -0.1]) and [float(d[0]) for d in near] == approx([1e-4, -0.01])


def test_outside_is_said_when_too_many_resamples_are():
    base_x, base_y = np.tile([0.2, 0.6], (1001, 1)), np.tile([0.0, 1.0], (1001, 1))
    x, y = np.full(1001, 0.4), np.full(1001, 0.5)
    assert compare(x, y, base_x, base_y) == ["+0.0000 [+0.0000, +0.0000]", "-0.5000 [-0.5000, -0.5000]"]
    x[1:25] = 0.7
    assert compare(x, y, base_x, base_y)[0] == "+0.0000 [+0.0000, +0.0000]"
    x[1:35] = 0.7
    assert compare(x, y, base_x, base_y) == ["outside", "outside"]
    assert compare(x, np.full(1001, np.nan), base_x, base_y) == ["-", "-"]  # no Python, nothing to parse


@pytest.fixture
def folders(tmp_path):
    """A base, an adapter of both stages, one of Stage B alone, and text."""
    model = tiny_model(vocab_size=272, eos_id=256, mask_id=257)
    save_model(model, tmp_path / "base")
    settings = dict(base=str(tmp_path / "base"), lora_r=2, lora_alpha=4)
    for name, attach, extension in (
        ("all", lambda m: m.add_lora(2, 4, generator("lora")), {}),
        ("b", lambda m: stage_b_only.adapt(m, 2, generator("lora")), {"extension": "beyond.stage_b_only"}),
    ):
        model = tiny_model(vocab_size=272, eos_id=256, mask_id=257)
        attach(model)
        save_adapter(model, tmp_path / name, settings | extension)
    (tmp_path / "text").mkdir()
    for name in [n for n in (f"{i}.py" for i in range(200)) if is_validation(n)]:
        (tmp_path / "text" / name).write_text(SOURCE)
    return tmp_path


def test_the_report_from_the_command_line(folders, monkeypatch, capsys):
    given = ["--data", folders / "text", "--ckpt", folders / "base", "--spans", 6, "--device", "cpu"]
    adapters = ["--adapter", folders / "all", folders / "b", "--taus", 0.0, 0.5]
    monkeypatch.setattr(text, "BASE_TAUS", {0.0, 0.3, 1.0})
    code, out, _ = command_line(text, monkeypatch, capsys, *given, *adapters)
    lines = out.splitlines()
    assert code == 0 and "6 of them in Python functions" in lines[0]
    assert lines[1].split() == ["decoder", "tau", "full", "all", "exact", "parses", "score", "stutter"]
    levels = [line.split("  ")[0] for line in lines[2 : lines.index("")]]
    names = [str(folders / "all"), f"{folders / 'all'}, B off", str(folders / "b")]  # no "B off" where it is the base
    assert levels == ["base"] * 4 + [n for n in names for _ in range(2)]
    rows = lines[lines.index("") + 4 :]
    assert len(rows) == 3 * 2 * 2 and "at least" in lines[lines.index("") + 3]
    off = [r for r in rows if "B off" in r]  # untrained adapters: Stage A is the base
    assert all(r.count("+0.0000 [+0.0000, +0.0000]") == 6 for r in off)


def test_the_picture(folders, monkeypatch, capsys):
    given = ["--data", folders / "text", "--ckpt", folders / "base", "--spans", 6, "--device", "cpu", "--taus", 0.5]
    monkeypatch.setattr(text, "BASE_TAUS", {0.0, 1.0})
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        assert "pip install matplotlib" in refused(text, m, capsys, *given, "--plot", folders / "c.svg")
    pytest.importorskip("matplotlib")
    assert "must end in" in refused(text, monkeypatch, capsys, *given, "--plot", folders / "c.what")
    code, out, _ = command_line(text, monkeypatch, capsys, *given, "--plot", folders / "c.svg")
    assert code == 0 and out.splitlines()[-1].startswith("wrote") and (folders / "c.svg").stat().st_size > 1000


def test_what_cannot_be_compared_is_refused(folders, monkeypatch, capsys):
    given = ["--data", folders / "text", "--ckpt", folders / "base"]
    assert "--taus" in refused(text, monkeypatch, capsys, *given, "--taus", 1.5)
    assert "--spans" in refused(text, monkeypatch, capsys, *given, "--spans", 1)
    save_model(tiny_model(tokenizer="toy"), folders / "toy")
    toy = ["--data", folders / "text", "--ckpt", folders / "toy"]
    assert "tables are exact" in refused(text, monkeypatch, capsys, *toy)
    (folders / "text" / "short.txt").write_text("x")
    short = ["--data", folders / "text" / "short.txt", "--ckpt", folders / "base"]
    assert "give more text" in refused(text, monkeypatch, capsys, *short)
