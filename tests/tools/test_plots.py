"""The loss of a run. `pytest tests/tools/test_plots.py`"""

import pytest
from common import caller

from lib.util import append_line
from tools import plots

pytest.importorskip("matplotlib", reason="pip install matplotlib")


def test_the_loss_of_a_run(tmp_path, monkeypatch, capsys):
    """Three steps and two validations, of a base: it has no Stage B to draw."""
    for step, loss in enumerate((3.0, 2.0, 1.0)):
        append_line(tmp_path / "log.jsonl", dict(step=step, loss=loss, m2t_A=2.5))
    for step in (0, 3):
        append_line(tmp_path / "log.jsonl", dict(step=step, val=True, m2t_A=2.5))
    lines = {line.get_label(): line.get_xydata().tolist() for line in plots.draw_log(tmp_path).axes[0].lines}
    assert lines == {"loss (Eq. 1)": [[1, 3], [2, 2], [3, 1]], "m2t_A, held out": [[0, 2.5], [3, 2.5]]}
    caller(plots, monkeypatch, capsys)(tmp_path)
    assert (tmp_path / "loss.svg").read_text().endswith("</svg>\n")
    for odd in (dict(loss="3"), dict(val=True, m2t_B=[1])):
        (tmp_path / "log.jsonl").write_text('{"step": 0, "loss": 1}\n')
        append_line(tmp_path / "log.jsonl", dict(step=4) | odd)
        assert "log.jsonl is damaged" in caller(plots, monkeypatch, capsys).fails(tmp_path)
    (tmp_path / "log.jsonl").write_text("")
    assert "no steps yet" in caller(plots, monkeypatch, capsys).fails(tmp_path)
