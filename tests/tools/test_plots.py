"""The figures are what is committed. `pytest tests/tools/test_plots.py`"""

import json
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


def write_records(path, systems) -> None:
    """Two seeds of each: .25 of the names for one forward, and .75 for two; half of it a token."""
    records = []
    for seed, (digits, cost) in enumerate((("0100", 1.0), ("1110", 2.0))):
        figures = dict(seed=seed, n=4, exist=digits, forwards=cost, per_token=cost / 2, tokens=2.0)
        for name in systems:
            system, way = name.split("/")
            setting = dict(system=system, way=way, edits=plots.NAMED[name][3])
            records += [setting | figures | dict(dial=dial) for dial in (0.5, 1.0)]
    path.write_text("\n".join(map(json.dumps, records)))


def test_names_are_drawn_from_what_was_measured(tmp_path, monkeypatch):
    """Seeds of .25 for one forward and .75 for two make .5 for one and a half. What was not measured has no line and no
    name; a setting with edits has none where others have none."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    (tmp_path / "names").mkdir()
    path = tmp_path / "names" / "records.jsonl"
    write_records(path, ["base/run", "causal/run", "base/ones", "base/threshold"])
    odd = dict(system="base", way="threshold", dial=0.1, edits=None, seed=0, exist="0000", forwards=9.0, per_token=9.0)
    path.write_text(path.read_text() + "\n" + json.dumps(odd))
    seeds = [(0.25, 1.0, 0.5), (0.75, 2.0, 1.0)]
    assert plots.read_settings(path)["causal/run"] == {(dial, None): seeds for dial in (0.5, 1.0)}
    figure = plots.draw_names()
    [ax] = figure.axes
    names = [text for text in ax.texts if text.get_text()]
    drawn = ["causal/run", "base/ones", "base/run", "base/threshold"]
    assert [text.get_text() for text in names] == [plots.NAMED[system][0] for system in drawn]
    assert all(text.xy == (1.5, 0.5) for text in names)
    assert ax.get_xlim()[1] < 3, "the axis is as long as its data"
    plots.plt.close(figure)


def test_names_of_systems_do_not_overlap():
    """In the picture that is committed."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    figure = plots.draw_names()
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == len(plots.NAMED)
    assert all(box.count_overlaps(boxes) == 1 for box in boxes), "each overlaps itself alone"
    plots.plt.close(figure)
