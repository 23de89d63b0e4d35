"""The figures are what is committed. `pytest tests/tools/test_plots.py`"""

import re

import pytest
from common import ROOT, approx, caller

from tools import plots


def words(svg: str) -> list[str]:
    """The text elements of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def places(svg: str) -> list[float]:
    """All coordinates of a picture, in their order."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", svg.partition("</style>")[2])]


@pytest.mark.parametrize("name", plots.PICTURES)
def test_the_committed_figures_are_drawn_from_the_committed_numbers(name, tmp_path, monkeypatch, capsys):
    """`make pages` draws what is committed: the same words, as text, in less than 100 kB, and by the same matplotlib
    the same lines."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    caller(plots, monkeypatch, capsys)(name, "--out", tmp_path)
    place, _ = plots.PICTURES[name]
    drawn = (tmp_path / place).read_text()
    committed = (ROOT / place).read_text()
    assert words(drawn) == words(committed) and len(words(drawn)) > 10
    assert "DejaVuSans-" not in drawn, "letters were drawn as shapes"
    assert len(drawn.encode()) < 100_000
    if re.search(r"Matplotlib v[\d.]+,", drawn)[0] in committed:
        assert places(drawn) == approx(places(committed), abs=0.01)


def test_names_of_systems_do_not_overlap():
    """In the picture that is committed."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    figure = plots.draw_names()
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == len(plots.NAMED)
    assert all(box.count_overlaps(boxes) == 1 for box in boxes), "each overlaps itself alone"
    plots.plt.close(figure)
