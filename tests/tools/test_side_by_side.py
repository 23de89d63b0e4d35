"""The same names three ways; what a joint head refused. `pytest tests/tools/test_side_by_side.py`"""

import shutil

import pytest
from common import ROOT, approx, caller, tiny_model

from checkpoint import load_tokenizer, save_model
from evaluate import draw_names
from lib import show
from lib.util import write_json
from tools import side_by_side

NAMES = ROOT / "assets" / "names"


@pytest.fixture
def call(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    return caller(side_by_side, monkeypatch, capsys)


def test_side_by_side_adds_up(call):
    lines = call("--prompts", 6).splitlines()
    for way in ("one at a time", "factorised", "joint head"):
        shown = [line.split() for line in lines if line.startswith(f"  {way}")]
        found = sum("+" in line for line in shown)
        forwards = sum(float(line[line.index("forwards") - 1]) for line in shown)
        (total,) = (line for line in lines if line.startswith(way))
        assert len(shown) == 6 and f": {found} of 6 exist" in total
        assert float(total.split()[-4]) == approx(forwards / 6, abs=0.011)


def test_a_beginning_that_ends_inside_a_word_is_marked(call):
    """The title says which name it is of; what stands before the mark is the name's own beginning."""
    inside = side_by_side.inside_a_word
    assert [at for at in range(12) if inside("GREEK SMALL", at)] == [1, 2, 3, 4, 7, 8, 9, 10]
    assert not inside("HEXAGRAM-12", 8) and not inside("HEXAGRAM-12", 9) and inside("HEXAGRAM-12", 10)

    titles = [line for line in call("--prompts", 6).splitlines() if "   (of " in line]
    drawn = draw_names(6, "held out", load_tokenizer(NAMES, "bpe"))
    assert len(titles) == 6
    cut = 0
    for title, name in zip(titles, drawn, strict=True):
        start, _, of = title.partition("   (of ")
        marked = start.endswith("~")
        start = start.removesuffix("~")
        assert name.startswith(start) and of.startswith(name)
        assert marked == of.endswith("cut inside a word)") == inside(name, len(start))
        cut += marked
    assert 0 < cut < 6  # both kinds are among them


def test_mistakes(call, tmp_path):
    save_model(tiny_model(), tmp_path / "bytes")
    assert "no names.json" in call.fails("--ckpt", tmp_path / "bytes")
    other = tmp_path / "other"
    save_model(tiny_model(), other)
    shutil.copy(NAMES / "tokenizer.json", other)
    write_json(other / "names.json", {})
    assert "wrong --ckpt" in call.fails("--ckpt", other)  # the joint head is of another base
    assert "is empty" in call.fails("--prompt", " ")


def test_what_a_joint_head_refused_is_seen_on_a_terminal(monkeypatch, capsys):
    """A step writes AB at 8 and 9, refuses Z at 10 and leaves 11: after it Z stands struck out beside the mask."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(show.time, "sleep", lambda seconds: None)
    fill = [dict(at=at, token=at - 8, conf=0.9, token_a=at - 8, conf_a=0.9) for at in (8, 9)]
    step = dict(
        start=8, before=[3] * 4, after=[0, 1, 3, 3], fill=fill, edit=[], refused=[dict(at=10, token=2, conf=0.2)]
    )
    pieces = {"0": "A", "1": "B", "2": "Z", "3": show.MASK}
    show.play(dict(text="AB", pieces=pieces, mask_id=3, steps=[step]))
    before, after = capsys.readouterr().out.replace("\x1b[K", "").split("\r")[1:]
    M = show.MASK
    assert f"step   1  {M * 4}\x1b" in before
    assert f"step   1  AB{M}(A:Z){M}\x1b" in after
