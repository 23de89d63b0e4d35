"""The figures are what is committed. `pytest tests/tools/test_plots.py`"""

import json
import re

import pytest
from common import ROOT, approx, caller

from lib.util import Mistake
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


def luminance(color: str) -> float:
    """WCAG's, of #rrggbb."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_is_readable_on_both_pages():
    assert luminance("#ffffff") == approx(1) and luminance("#777777") == approx(0.1845, abs=1e-4)
    for page, colors in ((plots.PAGE, plots.DARK), (plots.DARK[plots.PAGE], plots.DARK.values())):
        for color in colors:
            light, dark = sorted((luminance(page), luminance(color)), reverse=True)
            assert color == page or (light + 0.05) / (dark + 0.05) >= 4.5, color


def test_the_hull_is_what_mixing_two_settings_can_reach():
    points = [(1, 0.2), (2, 0.3), (3, 0.8), (4, 0.7), (5, 0.9), (5, 0.85)]
    assert plots.concave_hull(points) == [(1, 0.2), (3, 0.8), (5, 0.9)]
    assert plots.concave_hull([(2, 0.5)]) == [(2, 0.5)]


def test_a_setting_is_the_mean_of_its_seeds(tmp_path):
    """Seeds of .25 for one forward and .75 for two: .5 for one and a half."""
    records = []
    for seed, (digits, cost) in enumerate((("0100", 1.0), ("1110", 2.0))):
        for name in (*plots.NAMED, plots.LEFT):
            system, way = name.split("/")
            records.append(dict(system=system, way=way, setting="1", seed=seed, exist=digits, forwards=cost))
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    assert plots.read_existing(path)["head/head"] == [(1.5, 0.5)]
    path.write_text(json.dumps(records[0]))
    with pytest.raises(Mistake, match="no record of .*head/head"):
        plots.read_existing(path)
