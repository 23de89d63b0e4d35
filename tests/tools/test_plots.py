"""Figures: the numbers in them, text that is text, what is refused. `pytest tests/tools/test_plots.py`"""

import json
import re
import sys

import pytest
import torch
from common import ROOT, approx, command_line, refused, tiny_model

import evaluate
import toy
from checkpoint import save_model
from data import write_json
from tools import plots

PLACES = {"pays": "pays", "ingredients": "pays", "sampling": "pays", "cache": "speed", "step_time": "speed"}


def words(svg: str) -> list[str]:
    """The text elements of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the toy `copy` as train.py leaves them, one nearly independent and one nearly certain."""
    folders = []
    for eps in (0.9, 0.1):
        settings, folder = dict(name="copy", V=3, m=3, n_ctx=2, eps=eps), tmp_path_factory.mktemp("run")
        task = toy.make(**settings)
        size = dict(vocab_size=task.vocab_size, eos_id=task.eos_id, mask_id=task.mask_id, block_length=task.m)
        save_model(tiny_model(tokenizer="toy", **size), folder)
        write_json(folder / "toy.json", settings)
        log = [dict(step=0, loss=3.0), dict(step=1, val=True, block_A=3.5, block_B=3.2), dict(step=2, loss=2.0)]
        (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
        folders.append(folder)
    return folders


def test_the_dial_shows_what_evaluate_measures(runs):
    task, model = evaluate.load_task("copy", str(runs[0])), plots.load_model(runs[0], "cpu", torch.float32)
    decoders = evaluate.evaluate_toy(model, task)["decoders"]
    found = plots.errors(model, task)
    one_step = {name: approx(value["forward_kl"]) for name, value in decoders.items() if "forward_kl" in value}
    assert found == one_step | {"one at a time": found["one at a time"]} and len(found) == 3
    assert plots.read_curve(runs[0] / "log.jsonl") == [dict(step=1, val=True, block_A=3.5, block_B=3.2)]


def test_a_dial_from_the_command_line(runs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    for name in ("a.svg", "b.svg", "a.svg", "c.png"):  # a.svg twice: the user named it, it is written again
        argv = ["dial", "--data", "copy", "--ckpt", *runs, "--out", tmp_path / "new" / name, "--device", "cpu"]
        code, out, err = command_line(plots, monkeypatch, capsys, *argv)
        assert code == 0 and out == f"wrote {tmp_path / 'new' / name}\n", err
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["a.svg", "b.svg", "c.png"]
    picture = (tmp_path / "new" / "a.svg").read_text()
    assert picture == (tmp_path / "new" / "b.svg").read_text()
    assert {"Stage A, one step", "Stage B, one step", "one at a time", "Stage A", "Stage B"} <= set(words(picture))


def test_refusals(runs, tmp_path, monkeypatch, capsys):
    """Before anything is measured."""
    dial = ["dial", "--data", "copy", "--ckpt", *runs, "--out"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "factorised").mkdir()
    (tmp_path / "factorised" / "log.jsonl").write_text('{"step": 0}\n')
    monkeypatch.setattr(plots, "errors", None)
    assert "--data" in refused(plots, monkeypatch, capsys, "dial", "--data", "names", "--ckpt", "a", "--out", "a.svg")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert "pip install matplotlib" in refused(plots, without, capsys, *dial, tmp_path / "a.svg")
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    assert ".txt" in refused(plots, monkeypatch, capsys, *dial, tmp_path / "a.txt")
    for folder, reason in (("empty", "log.jsonl"), ("factorised", "no validation")):
        argv = ["dial", "--data", "copy", "--ckpt", tmp_path / folder, "--out", tmp_path / "a.svg"]
        assert reason in refused(plots, monkeypatch, capsys, *argv)
    other = ["dial", "--data", "pairs", "--ckpt", *runs, "--out", tmp_path / "a.svg"]
    assert "another toy" in refused(plots, monkeypatch, capsys, *other)
    for argv in (["tc", "--data", "copy", "--ckpt", "a"], ["dial", "--data", "copy"]):
        assert "go together" in refused(plots, monkeypatch, capsys, *argv, "--out", tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


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
    assert f"python -m tools.plots {picture} " in (page / "README.md").read_text()


def test_the_figure_of_pays_shows_the_table_of_its_page():
    """Every share: the table was printed by beyond/pays.py, prompt by prompt; the figure goes by clusters of prompts.
    In a resample settings that tie may then be chosen otherwise, so the ends of intervals are left out."""
    page = (ROOT / "results" / "pays" / "appendix.md").read_text()
    pooled, cluster, _ = plots.read_pays("records")
    for system in plots.SYSTEMS:
        row = re.search(rf"^\| {system} \| (.*) \|$", page, re.M)[1]
        expected = [cell.split(" <br>")[0] for cell in row.split(" | ")]
        drawn = plots.best_within(pooled, cluster, system)[:, 0]
        assert [f"{share:.3f}".lstrip("0").replace("nan", "-") for share in drawn] == expected, system


@pytest.mark.parametrize("page", ["joint", "paper_tables", "tc", "speed"])
def test_transcribed_numbers_stand_on_their_page(page):
    text = "".join(path.read_text() for path in (ROOT / "results" / page).glob("*.md")).replace(",", "")
    text = set(re.findall(r"\d+\.?\d*", text))
    shown = {float(number) for number in text}
    figure = (ROOT / "results" / page / "figure.json").read_text()
    figure = figure.split("\n", 2)[2]  # but for the line that says where they come from
    numbers = re.findall(r"(?<![\w.])\d+\.?\d*(?![\w.])", figure)
    assert len(numbers) > 8 and {float(number) for number in numbers} <= shown


def test_logs_are_read_as_they_were_printed(tmp_path):
    """Lines of both logs, each with its known numbers."""
    log = tmp_path / "log.txt"
    log.write_text(
        "Decoding 16 at once, cached against not: text (6 layers of width 128), Stage A and B in every step\n"
        "  context   cached ms a step   uncached ms a step   ratio\n"
        "      512               20.0                900.0   45.0x                 65x\n"
        "  all of 512 tokens (integrated): cached 10.18 s, uncached 204.14 s: 20.1x (goal 10)\n"
    )
    assert plots.read_cache(log) == {("16", "text"): [[512, 45]]}
    log.write_text(
        "base   -1.00  0.1\n\nthe best setting that costs no more, all forwards a token\n"
        "system      at most  score  joint head has more  exact  joint head has more\n"
        "base           0.20  -1.5 [-1.6, -1.4]  +0.1 [-0.2, +0.3]  0.1 [0.0, 0.2]  +0.0 [-0.1, +0.1]\n"
        "joint head     0.20  -1.4 [-1.5, -1.3]                     0.1 [0.0, 0.2]\n"
    )
    base = (0.2, [-1.5, -1.6, -1.4], [0.1, -0.2, 0.3])
    assert plots.read_budgets(log) == {"base": [base], "joint head": [(0.2, [-1.4, -1.5, -1.3], None)]}
