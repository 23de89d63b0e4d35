"""What a system has within a budget, by hand, and how it is measured. `pytest tests/beyond/test_evidence.py`"""

import json
import math
import re
import shutil
from pathlib import Path
from statistics import mean

import pytest
from common import ROOT, approx, caller, random_adapter, tiny_model

from beyond import evidence
from beyond.evidence import WAYS, affords, by_system, mixture, paired, read_records, within
from checkpoint import save_model
from lib.util import write_json


# --- by hand
def test_intervals_are_students():
    """Differences .1 .2 .3: mean .2, deviation .1, t of two degrees of freedom 4.303."""
    margin = 4.303 * 0.1 / math.sqrt(3)
    assert paired([0.1, 0.2, 0.3]) == approx((0.2, 0.2 - margin, 0.2 + margin), abs=1e-9)
    assert paired([0.2, 0.2]) == approx((0.2, 0.2, 0.2))
    assert paired([0.2]) == (0.2, -math.inf, math.inf)


def test_the_best_mixture_is_chosen_by_one_half_and_judged_by_the_other():
    assert mixture([1, 3], [0.2, 0.6], [0.1, 0.9], 2) == approx(0.5)
    assert mixture([1, 3], [0.2, 0.6], [0.1, 0.9], 3) == approx(0.9)
    assert mixture([1, 3], [0.6, 0.2], [0.1, 0.9], 3) == approx(0.1)  # dearer, and no better
    assert mixture([1, 2, 3], [0.2, 0.3, 0.6], [0, 1, 0], 2) == approx(0.0)  # .4 by 1 and 3, .3 by 2 alone
    assert mixture([1, 2, 3], [0.2, 0.5, 0.6], [0, 1, 0], 2) == approx(1.0)

    # names 0 and 2 are one half, 1 and 3 the other
    records = [{"forwards": 1.0, "exist": "0100"}, {"forwards": 3.0, "exist": "1011"}]
    assert within(records, 0.9) is None
    assert within(records, 1.0) == approx(0.25)
    # even names: 0 and 1; odd ones: .5 and .5, where the first of equals is taken
    assert within(records, 3.0) == approx((0.5 + 0.0) / 2)


def test_compare_on_three_seeds(tmp_path, monkeypatch, capsys):
    """A is .5 for one forward, B .75 .75 1 for two: within 1 A alone, within 2 B by .33."""
    rows = []
    for seed, digits in enumerate(("11110000", "00001111", "11001100")):
        rows.append(dict(system="A", way="threshold", setting="1", seed=seed, n=8, exist=digits, forwards=1.0))
    for seed, digits in enumerate(("11111100", "11111100", "11111111")):
        rows.append(dict(system="B", way="stage_b", setting="1", seed=seed, n=8, exist=digits, forwards=2.0))
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = caller(evidence, monkeypatch, capsys)
    out = call("compare", path, "--against", "A/threshold", "--budgets", 1, 2)
    settings, budgets = out.split("\n\n")
    assert [line.split()[-3:] for line in settings.splitlines()[1:]] == [["3", "0.500", "1.00"], ["3", "0.833", "2.00"]]
    a, b = budgets.splitlines()[1:]
    assert a.split() == ["A/threshold", *["0.500", "+0.000", "[+0.000,", "+0.000]"] * 2]
    margin = 4.303 * math.sqrt(1 / 48) / math.sqrt(3)  # of .25 .25 .5
    assert b.split() == ["B/stage_b", "-", "0.833", "+0.333", f"[{1 / 3 - margin:+.3f},", f"{1 / 3 + margin:+.3f}]"]
    assert "A/threshold, B/stage_b" in call.fails("compare", path, "--against", "A")
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1] | {"n": 9}))
    assert "of [8, 9] names" in call.fails("compare", path, "--against", "A/threshold")


# --- the page
SHOWN = {
    "base, with its edits": "base/threshold",
    "Stage B, the paper's, with its edits": "paper-3/stage_b",
    "Stage B by alpha, on top of it, with edits": "alpha/stage_b",
    "Stage B by alpha, on the base": "alpha-base/stage_b",
    "Stage B by the chain": "chain/stage_b",
    "the same, writing only what is sure together": "chain/refusing",
    "Stage A by alpha: one stage": "stage-a/threshold",
    "Stage A by the chain: one stage": "stage-a-chain/threshold",
    "base, where an end waits for the words before it": "base/end_last",
    "the head": "head/head",
}


def test_the_pages_table_is_that_of_the_records():
    """What each system has within 2, 3, 4 and 6 forwards, means of its seeds; an empty cell where all costs more."""
    folder = ROOT / "results" / "names"
    page = (folder / "README.md").read_text()
    systems = by_system(read_records(folder / "records.jsonl"))
    for label, system in SHOWN.items():
        row = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", page, re.M)
        shown = [cell.strip(" *") for cell in row[1].split("|")]
        shares = [affords(systems[system], budget) for budget in (2, 3, 4, 6)]
        assert shown == [f"{mean(found.values()):.3f}"[1:] if found else "" for found in shares], label


# --- measured
@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A random model of names, and a random adapter on it."""
    folder = tmp_path_factory.mktemp("names")
    save_model(tiny_model(n_rounds=1, vocab_size=1024, mask_id=1023, eos_id=1022, tokenizer="bpe"), folder / "base")
    shutil.copy(ROOT / "assets" / "names" / "tokenizer.json", folder / "base")
    write_json(folder / "base" / "names.json", {"unidata_version": "0"})
    random_adapter(folder / "adapter", folder / "base")
    return folder


def test_it_measures_every_way_once(folders, tmp_path, monkeypatch, capsys):
    call = caller(evidence, monkeypatch, capsys)
    given = ["--prompts", 3, "--device", "cpu", "--out", tmp_path / "r.jsonl"]
    ways = [way for way in WAYS if way != "head"]
    for way in ways:
        of_seed = ["--system", "S", "--ckpt", folders / "adapter", "--seed", 1]
        call("measure", *of_seed, "--way", way, "--dial", 0.1, *given)
    for seed, folder in ((1, "adapter"), (2, "base")):
        of_seed = ["--system", "S", "--ckpt", folders / folder, "--seed", seed]
        call("measure", *of_seed, "--way", "threshold", "--dial", 0.1, -1, "--tau_t2t", "none", 0.5, *given)
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [r["way"] for r in records] == ways + ["threshold"] * 7
    assert [r["setting"] for r in records[-4:]] == ["0.1", "0.1, edits 0.5", "-1", "-1, edits 0.5"]
    assert [r["seed"] for r in records[-7:]] == [1, 1, 1, 2, 2, 2, 2]
    assert all(len(r["exist"]) == r["n"] == 3 for r in records)

    # in blocks of one a name costs as many forwards as it has tokens
    cost = {r["way"]: r["forwards"] for r in records[: len(ways)]}
    assert cost["left_ones"] * 3 == approx(round(cost["left_ones"] * 3))
    assert cost["stage_b"] > cost["threshold"]


def test_mistakes(folders, tmp_path, monkeypatch, capsys):
    fails = caller(evidence, monkeypatch, capsys).fails
    given = ["--out", tmp_path / "r.jsonl", "--system", "S", "--seed", 1, "--ckpt", folders / "adapter", "--way"]
    assert "--way head" in fails("measure", *given, "head")
    assert "does not edit" in fails("measure", *given, "left", "--tau_t2t", 0)
    assert "measure, compare" in fails("other")
    save_model(tiny_model(), tmp_path / "no-names")
    given[-2] = tmp_path / "no-names"
    assert "no model of names" in fails("measure", *given, "left")
