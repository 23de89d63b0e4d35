"""The figures are what is committed. `pytest tests/tools/test_plots.py`"""

import re

import pytest
from common import ROOT, approx, command_line

from tools import plots


def words(svg: str) -> list[str]:
    """The text elements of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def places(svg: str) -> list[float]:
    """All coordinates of a picture, in their order."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", svg.partition("</metadata>")[2])]


def test_the_committed_figures_are_drawn_from_the_committed_numbers(tmp_path, monkeypatch, capsys):
    """`make pages` draws what is committed: the same words, as text, in less than 100 kB, and by the same matplotlib
    the same lines."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    code, _, err = command_line(plots, monkeypatch, capsys, "--out", tmp_path)
    assert code == 0, err
    for place, _ in plots.PICTURES.values():
        drawn = (tmp_path / place).read_text()
        committed = (ROOT / place).read_text()
        assert words(drawn) == words(committed) and len(words(drawn)) > 10, place
        assert "DejaVuSans-" not in drawn, "letters were drawn as shapes"
        assert len(drawn.encode()) < 100_000
        if re.search(r"Matplotlib v[\d.]+,", drawn)[0] in committed:
            assert places(drawn) == approx(places(committed), abs=0.01), place
    assert "python -m tools.plots" in (ROOT / "Makefile").read_text().split("\npages:")[1]
