"""The table of who pays: pooling, budgets, and the count of serial forwards. `pytest tests/beyond/test_pays.py`"""

import json
from dataclasses import replace

import pytest
from common import ROOT, approx, caller, random_ids, tiny_model

from beyond import pays
from beyond.own_blocks import OwnBlocks
from data import generator
from evaluate import wilson
from sample import Decoding, generate


def record(system, setting, exist, all_, prompts=100, group="held out"):
    cost = {"full/token": all_, "all/token": all_, "serial/token": 2 * all_, "distinct": 0.0, "repeated": 0.0}
    return {"system": system, "setting": setting, "exist": exist, "prompts": prompts, "group": group} | cost


def test_seeds_and_groups_are_pooled_and_a_budget_takes_the_best_that_it_can_pay():
    records = [record("a", "slow", 0.5, 2.0), record("a", "slow", 0.3, 1.0, group="trained")]
    records += [record("a", "fast", 0.1, 0.5, 300), record("b", "fast", 0.25, 0.5, 4)]
    pooled = pays.pool(records)
    assert pooled["a", "slow"]["exist"] == approx(0.4) and pooled["a", "slow"]["all/token"] == approx(1.5)
    assert (pooled["a", "slow"]["low"], pooled["a", "slow"]["high"]) == wilson(80, 200)
    low, high = wilson(30, 300)
    assert pays.within(pooled, "a", 1.49, "all/token") == f"0.100 ({low:.3f}..{high:.3f})"
    assert pays.within(pooled, "a", 1.5, "all/token").startswith("0.400 (")
    assert pays.within(pooled, "b", 0.5, "serial/token") == "-"  # there it costs twice as much


@pytest.mark.parametrize("own", [False, True])
def test_serial_forwards_count_each_run_of_stage_b_once(own):
    """One row, one block of 8 masks after 8 of prompt: Stage B runs in each step that has a bundle (of two, if own)."""
    model, prompt = tiny_model(n_rounds=1, eos_id=-1), random_ids(1, 8)[0].tolist()
    if own:
        model.__class__ = OwnBlocks
        model.give_blocks(8, 0.5, generator("own"))
    d, looks = Decoding(gen_length=8, tau_m2t=0.2, tau_t2t=None), [0]
    steps = generate(model, [prompt], d, trace=True)[0].steps
    pays.counting(model, looks)
    out = generate(model, [prompt], d)[0]
    assert len(steps) == out.nfe["full"]
    assert 0 < looks[0] <= out.nfe["full"] if own else looks[0] == out.nfe["partial"]
    looks[0] = 0
    generate(model, [prompt], replace(d, n_rounds=0))
    assert looks == [0]


def test_the_table_of_the_shipped_model(tmp_path, monkeypatch, capsys):
    call, names = caller(pays, monkeypatch, capsys), ROOT / "assets" / "names"
    argv = ["--system", "base", names, "--system", "ours", names, names / "joint", "--prompts", 4, "--keep", 0, 1]
    assert "at most, all/token" in call(*argv, "--out", tmp_path / "r.jsonl")
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(records) == 2 * (len(pays.TAUS | pays.FINER) + 2 * (len(pays.TAUS) - 1))
    assert call("--records", tmp_path / "r.jsonl").startswith("system")
    assert "--system" in call.fails() and "--system" in call.fails("--system", "a")
