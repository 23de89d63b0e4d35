"""Figures: the numbers in them, text that is text. `pytest tests/tools/test_plots.py`"""

import gzip
import json
import re

import numpy as np
import pytest
from common import ROOT, command_line, refused

from tools import plots


def words(svg: str) -> list[str]:
    """The text elements of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def test_refusals(tmp_path, monkeypatch, capsys):
    assert "no picture nosuch: tiny, pays" in refused(plots, monkeypatch, capsys, "nosuch", "--out", tmp_path)
    monkeypatch.setattr(plots, "plt", None)
    assert "pip install matplotlib" in refused(plots, monkeypatch, capsys, "tiny", "--out", tmp_path)


def test_the_committed_figures_are_drawn_from_the_committed_numbers(tmp_path, monkeypatch, capsys):
    """`make pages` draws what is committed: the same words, as text, in less than 100 kB; and a page shows it."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    code, _, err = command_line(plots, monkeypatch, capsys, "--out", tmp_path)
    assert code == 0, err
    for place, _ in plots.PICTURES.values():
        drawn = (tmp_path / place).read_text()
        committed = (ROOT / place).read_text()
        assert words(drawn) == words(committed) and len(words(drawn)) > 10, place
        assert "DejaVuSans-" not in drawn, "letters were drawn as shapes"
        assert len(drawn.encode()) < 100_000
    assert "python -m tools.plots" in (ROOT / "Makefile").read_text().split("\npages:")[1]


def pays_record(system, setting, found, forwards, ckpt="c", **more):
    """Two names; a forward costs 2 seconds, and there is nothing else."""
    own = {"system": system, "setting": setting, "found": found, "ckpt": ckpt, "second": ""}
    costs = {"counts": {"full": 2 * forwards, "commit": 0, "looks": 0}, "cost": {"all": 2 * forwards, "mult": 1}}
    costs["cost"]["serial"] = 1
    return own | {"temperature": 0.0, "draws": 1, "n_layer": 4, "mult/full": 1, "per": {"name": 2}} | costs | more


@pytest.fixture
def drawn(tmp_path, monkeypatch, capsys):
    """(words, axes) of the figure of these records, of four prompts, no two of them equal."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    monkeypatch.setattr(plots, "RESULTS", tmp_path)

    def draw(records):
        (tmp_path / "pays").mkdir(exist_ok=True)
        lines = [{"clusters": {"held out": [0, 1], "trained": [2, 3]}}, *records]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "pays" / "records.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        axes = plots.draw_pays().axes
        return [[a.get_text() for a in ax.texts] for ax in axes], axes

    return draw


def test_the_figure_of_pays_by_hand(drawn):
    """Two seeds of a head of two settings, mixed between them, and a left-to-right model of one, a point. What is
    sampled is left out, and so is a system that has no line."""
    head = [pays_record("head", label, found, cost, ckpt)
            for ckpt in "cd" for label, found, cost in (("x", "0000", 3), ("y", "1111", 5))]  # fmt: skip
    records = [*head, pays_record("left to right", "x", "1110", 7)]
    records += [pays_record("mine", label, "0000", cost) for label, cost in (("x", 2), ("y", 4))]
    records += [pays_record("head", "z", "1111", 2, temperature=1.0)]
    names, axes = drawn(records)
    assert names == [["left to right", "head"]] * 2
    for ax in axes:
        lines = {len(line.get_xdata()): line.get_data() for line in ax.lines}
        assert np.array_equal(lines[1], ([7], [0.75]))

        # nothing below 3, all from 5 on, and halfway half
        limits, share = lines[31]
        paid = limits > 3 - 1e-6
        assert np.isnan(share[~paid]).all()
        np.testing.assert_allclose(share[paid], np.clip((limits[paid] - 3) / 2, 0, 1), atol=1e-6)


def test_logs_are_read_as_they_were_printed(tmp_path):
    """Lines of a log, with their known numbers."""
    log = tmp_path / "log.txt"
    log.write_text(
        "Decoding 16 at once, cached against not: text (6 layers of width 128), Stage A and B in every step\n"
        "  context   cached ms a step   uncached ms a step   ratio\n"
        "      512               20.0                900.0   45.0x                 65x\n"
        "  all of 512 tokens (integrated): cached 10.18 s, uncached 204.14 s: 20.1x (goal 10)\n"
    )
    assert plots.read_cache(log) == {("16", "text"): [[512, 45]]}
