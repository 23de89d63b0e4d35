"""Figures: the numbers in them, text that is text, what is refused. `pytest tests/tools/test_plots.py`"""

import gzip
import json
import re
import sys

import numpy as np
import pytest
from common import ROOT, approx, command_line, refused

from tools import plots

PLACES = {"joint": "theorem", "dial": "theorem", "cache": "speed"}


def words(svg: str) -> list[str]:
    """The text elements of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def test_refusals(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert "pip install matplotlib" in refused(plots, without, capsys, "tc", "--out", tmp_path / "a.svg")
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    assert ".txt" in refused(plots, monkeypatch, capsys, "tc", "--out", tmp_path / "a.txt")


@pytest.mark.parametrize("picture", plots.PICTURES)
def test_the_committed_figures_are_drawn_from_the_committed_numbers(picture, tmp_path, monkeypatch, capsys):
    """The command of the page draws the page's figure: the same words, as text, in less than 100 kB."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    out = tmp_path / "figure.svg"
    code, _, err = command_line(plots, monkeypatch, capsys, picture, "--out", out)
    assert code == 0, err
    drawn = out.read_text()
    page = ROOT / "results" / PLACES.get(picture, picture)
    committed = (page / f"{picture}.svg").read_text()
    assert words(drawn) == words(committed) and len(words(drawn)) > 10
    assert "DejaVuSans-" not in drawn, "letters were drawn as shapes"
    assert len(drawn.encode()) < 100_000
    assert f"({picture}.svg)" in (page / "README.md").read_text()
    assert re.search(rf"\b{picture}\b", (ROOT / "Makefile").read_text().split("\npages:")[1])


def pays_record(system, setting, found, cost, **more):
    costs = {f"{kind}/token": cost for kind in ("all", "mult", "serial")} | {"mult/full": 1}
    own = {"system": system, "setting": setting, "found": found, "ckpt": "c", "adapter": None}
    return own | {"temperature": 0.0, "top_p": 1.0, "n_layer": 4, "draws": 1} | costs | more


def write_pays(folder, records):
    """results/pays/records.jsonl.gz of four prompts, no two of them equal."""
    (folder / "pays").mkdir(exist_ok=True)
    lines = [{"clusters": {"held out": [0, 1], "trained": [2, 3]}}, *records]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "pays" / "records.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def test_the_figure_of_pays_by_hand(tmp_path):
    """Two seeds of a joint head of two settings, and a left-to-right model of one. What is sampled is left out."""
    head = [pays_record("joint head", label, "1111", cost, ckpt=seed)
            for seed in "cd" for label, cost in (("x", 0.5), ("y", 1.0))]  # fmt: skip
    one = pays_record("left to right", "left to right", "1110", 1.0)
    drawn = pays_record("joint head", "z", "0000", 0.4, temperature=1.0)
    write_pays(tmp_path, [*head, one, drawn])
    systems, cluster = plots.read_pays(tmp_path / "pays" / "records.jsonl.gz")
    assert systems["joint head"].values.shape == (2, 2, 4)
    lines, points = plots.within_limits(systems, cluster, plots.PAYS_BUDGETS)
    assert list(lines) == ["joint head"] and list(points) == ["left to right"]
    cost, share = points["left to right"]
    assert cost == 1 and share[0] == 0.75

    # nothing below 0.5, and all of them from there on
    paid = plots.PAYS_BUDGETS >= 0.5
    assert np.isnan(lines["joint head"][~paid]).all() and (lines["joint head"][paid] == 1).all()
    limits = np.array([0.5, 0.9, 1.0, 1.05])
    assert [plots.dearest(limits, cost) for cost in (0.1, 0.5, 0.99, 1.0, 1.02, 9)] == [0, 0, 1, 2, 2, 3]


def test_the_figure_of_pays_names_who_is_drawn(tmp_path, monkeypatch, capsys):
    """Lines at their ends, points beside them; a system that the page's tables alone have is not drawn."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    records = [pays_record("base", "x", "0100", 0.4), pays_record("base", "y", "0101", 0.9)]
    records += [pays_record("left to right", "x", "1110", 1.0)]
    records += [pays_record("mine", "x", "0111", 0.4), pays_record("mine", "y", "0111", 0.6)]
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    write_pays(tmp_path, records)
    assert "no system joint head" in refused(plots, monkeypatch, capsys, "pays", "--out", tmp_path / "a.svg")

    head = [pays_record("joint head", "x", "1111", 0.4), pays_record("joint head", "y", "1111", 0.8)]
    write_pays(tmp_path, records + head)
    code, _, err = command_line(plots, monkeypatch, capsys, "pays", "--out", tmp_path / "a.svg")
    assert code == 0, err
    shown = words((tmp_path / "a.svg").read_text())
    names = {"base", "joint head", "left to right", "over base", "over left to right"}
    assert names <= set(shown) and not any("mine" in word for word in shown)


def test_a_band_leaves_out_resamples_that_can_pay_for_nothing():
    """Two budgets, the second of which pays for nothing in one resample. The others are from 1 to 3."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    drawn = np.array([[2.0, 1.0, 2.0, 3.0], [2.0, 1.0, np.nan, 3.0]])  # the estimate first
    assert plots.band(ax, np.array([0.3, 0.4]), drawn, "base")[:2] == (0.4, 2.0)
    budgets, edges = ax.collections[0].get_paths()[0].vertices.T
    assert budgets.min() == 0.3 and budgets.max() == 0.4
    assert edges.min() == approx(1.05) and edges.max() == approx(2.95)  # 2.5 % of the way from an end to the other


@pytest.mark.parametrize("figure", ["theorem/joint.json", "paper_tables/paper_tables.json", "tc/tc.json"])
def test_numbers_of_a_figure_stand_on_its_page_or_in_its_log(figure):
    path = ROOT / "results" / figure
    beside = [*path.parent.glob("*.md"), *path.parent.glob("*.txt")]
    text = "".join(file.read_text() for file in beside).replace(",", "")
    shown = {float(number) for number in re.findall(r"\d+\.?\d*", text)}
    drawn = path.read_text().split("\n", 2)[2]  # but for the line that says where they come from
    numbers = re.findall(r"(?<![\w.])\d+\.?\d*(?![\w.])", drawn)
    assert len(numbers) > 8 and {float(number) for number in numbers} <= shown


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
