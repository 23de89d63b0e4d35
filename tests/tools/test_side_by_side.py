"""The same names three ways. `pytest tests/tools/test_side_by_side.py`"""

from common import ROOT, approx, caller, tiny_model

from checkpoint import save_model
from tools import side_by_side


def test_side_by_side_adds_up(tmp_path, monkeypatch, capsys):
    call = caller(side_by_side, monkeypatch, capsys)
    monkeypatch.chdir(ROOT)
    lines = call("--prompts", 6).splitlines()
    for way in ("one at a time", "factorised", "jointly"):
        shown = [line.split() for line in lines if line.startswith(f"  {way}")]
        found = sum("+" in line for line in shown)
        forwards = sum(float(line[line.index("forwards") - 1]) for line in shown)
        (total,) = (line for line in lines if line.startswith(way))
        assert len(shown) == 6 and f": {found} of 6 exist" in total
        assert float(total.split()[-4]) == approx(forwards / 6, abs=0.011)
    save_model(tiny_model(), tmp_path)
    assert "wrong --ckpt" in call.fails("--ckpt", tmp_path)
