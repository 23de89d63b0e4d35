"""The paper's Tables 2 and 3 on a toy, from the command line. `pytest tests/released/test_toy_tables.py`"""

import pytest
from common import command_line, refused

import train
from released import ablation, toy_tables
from released.tables import MECHANISM

TOY = ["--data", "modes", "--toy", "V=6", "n_ctx=2", "--device", "cpu", "--batch_size", 4, "--max_iters", 2]


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """--data, --ckpt and --adapter of a base and adapters for n = 1 and 2, hardly trained."""
    base = [*TOY, "--stage_a_only", "--out_dir", tmp_path / "base"]
    assert command_line(train, monkeypatch, capsys, *base)[0] == 0
    for n in (1, 2):
        run = [*TOY, "--init_from", tmp_path / "base", "--n_last", n, "--out_dir", tmp_path / f"n{n}"]
        assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    one = ["--data", "modes", "--ckpt", tmp_path / "base", "--device", "cpu", "--adapter", tmp_path / "n1"]
    return one, tmp_path / "n2"


def test_mechanism_and_lastn_tables(trained, monkeypatch, capsys):
    one, second = trained
    seen, step = set(), ablation.step
    monkeypatch.setattr(ablation, "step", lambda *args: (seen.add(args[-1]), step(*args))[1])
    code, out, err = command_line(toy_tables, monkeypatch, capsys, "mechanism", *one)
    assert code == 0, err
    assert [line.split("  ")[0] for line in out.splitlines()[1:]] == [row[0] for row in MECHANISM]
    assert len(seen) > 10  # the switches reach the decoder
    code, out, err = command_line(toy_tables, monkeypatch, capsys, "lastn", *one, second)
    assert code == 0, err
    assert "n = 1" in out and "n = 2" in out


def test_mistakes(trained, monkeypatch, capsys):
    one, second = trained
    assert "one --adapter" in refused(toy_tables, monkeypatch, capsys, "mechanism", *one, second)
    assert "another toy" in refused(toy_tables, monkeypatch, capsys, "lastn", *one, "--data", "pairs")
    assert "--adapter" in refused(toy_tables, monkeypatch, capsys, "lastn", "--data", "modes", "--ckpt", "x")
    assert "main" in refused(toy_tables, monkeypatch, capsys, "main", *one)
