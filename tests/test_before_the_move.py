"""The same seeds give the numbers of before extensions moved into beyond/ and the stages were named A and B: the losses
of five runs and the steps of six decodes. No run with drafts is among them: their tie rule was a mistake, now mended.
`pytest tests/test_before_the_move.py`
"""

import importlib
import json

import pytest
from common import ROOT, approx, command_line

import sample

BEFORE = json.loads((ROOT / "tests" / "data" / "before_the_move.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def train_once(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run = BEFORE["runs"][name]
    argv = [*BEFORE["toy"].split(), *run["argv"].split()]
    if "base" in argv and not (folder / "base").exists():
        train_once("base", folder, monkeypatch, capsys)
    if not (folder / name).exists():
        script = importlib.import_module(run["module"])
        assert command_line(script, monkeypatch, capsys, *argv, "--out_dir", name)[0] == 0


@pytest.mark.parametrize("name", BEFORE["runs"])
def test_losses_are_those_of_before(name, folder, monkeypatch, capsys):
    train_once(name, folder, monkeypatch, capsys)
    log = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
    columns = {k: [r.get(k) for r in log] for k in dict.fromkeys(k for r in log for k in r)}
    before = BEFORE["runs"][name]["log"]
    assert columns.keys() - before.keys() <= {"ms", "lr", "tokens"}
    for key, values in before.items():
        assert [v is None for v in columns[key]] == [v is None for v in values], key
        known = [(a, b) for a, b in zip(columns[key], values, strict=True) if b is not None]
        assert [a for a, _ in known] == approx([b for _, b in known], rel=1e-5), key


@pytest.mark.parametrize("name", BEFORE["decodes"])
def test_decodes_are_those_of_before(name, folder, monkeypatch, capsys):
    before = BEFORE["decodes"][name]
    for run in {"base", *before["argv"].split()} & BEFORE["runs"].keys():
        train_once(run, folder, monkeypatch, capsys)
    argv = [*before["argv"].split(), "--json", "--device", "cpu"]
    code, out, _ = command_line(sample, monkeypatch, capsys, *argv)
    record = json.loads(out)
    after, nfe = before["after"], before["nfe"]
    if (
        name == "chain"
    ):  # no edits: each of its two blocks had a forward that changed nothing, after the one that filled
        after, nfe = (
            after[::2],
            nfe | {"full": 2, "commit": 1},
        )  # it; now the first block's is a commit, the last's gone
    assert code == 0 and record["tokens"] == before["tokens"] and record["nfe"].items() >= nfe.items()
    assert [s["after"] for s in record["steps"]] == after
