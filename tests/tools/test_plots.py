"""The figures are what is committed; the loss of a run. `pytest tests/tools/test_plots.py`"""

import re

import pytest
from common import ROOT, approx, caller

from lib.util import append_line
from tools import plots

pytest.importorskip("matplotlib", reason="pip install matplotlib")


def words(svg: str) -> list[str]:
    """The text elements of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def places(svg: str) -> list[float]:
    """All coordinates of a picture, in their order."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", svg.partition("</style>")[2])]


@pytest.mark.parametrize("name", plots.PICTURES)
def test_the_committed_figures_are_drawn_from_the_committed_numbers(name, tmp_path, monkeypatch, capsys):
    """`make pages` draws what is committed: the same words, as text, and by the same matplotlib the same lines."""
    caller(plots, monkeypatch, capsys)(name, "--out", tmp_path)
    place, _ = plots.PICTURES[name]
    drawn = (tmp_path / place).read_text()
    committed = (ROOT / place).read_text()
    assert words(drawn) == words(committed) and len(words(drawn)) > 10
    if re.search(r"Matplotlib v[\d.]+,", drawn)[0] in committed:
        assert places(drawn) == approx(places(committed), abs=0.01)


def test_the_loss_of_a_run(tmp_path, monkeypatch, capsys):
    """Three steps and two validations, of a base: it has no Stage B to draw."""
    for step, loss in enumerate((3.0, 2.0, 1.0)):
        append_line(tmp_path / "log.jsonl", dict(step=step, loss=loss, m2t_A=2.5))
    for step in (0, 3):
        append_line(tmp_path / "log.jsonl", dict(step=step, val=True, m2t_A=2.5))
    lines = {line.get_label(): line.get_xydata().tolist() for line in plots.draw_log(tmp_path).axes[0].lines}
    assert lines == {"loss (Eq. 1)": [[1, 3], [2, 2], [3, 1]], "m2t_A, held out": [[0, 2.5], [3, 2.5]]}
    caller(plots, monkeypatch, capsys)("log", tmp_path)
    assert "m2t_A, held out" in words((tmp_path / "loss.svg").read_text())
    for odd in (dict(loss="3"), dict(val=True, m2t_B=[1])):
        (tmp_path / "log.jsonl").write_text('{"step": 0, "loss": 1}\n')
        append_line(tmp_path / "log.jsonl", dict(step=4) | odd)
        assert "log.jsonl is damaged" in caller(plots, monkeypatch, capsys).fails("log", tmp_path)
    (tmp_path / "log.jsonl").write_text("")
    assert "no steps yet" in caller(plots, monkeypatch, capsys).fails("log", tmp_path)
