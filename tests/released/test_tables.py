"""The paper's tables from run files made by hand, and the statistics. `pytest tests/released/test_tables.py`"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from common import command_line, refused

from evaluate import wilson
from released import tables
from released.ablation import MECHANISM, plain, variant


def write_run(path: Path, task: str, correct: list, full: int, n_last: int = 3, adapter: bool = True, **changes):
    """A run file of items 0, 1, ... with 10 tokens each; 20 layers; partial = full and one commit in Stage B's runs."""
    d = plain(*variant({"tau_t2t": 0.0} | changes, n_rounds=int(adapter))) | {"gen_length": 16384}
    model = {"n_last": n_last, "n_rounds": 1}
    settings = {"task": task, "model": model, "adapter": "x" if adapter else None, "decoding": d | changes}
    settings["partial_cost"] = n_last / 20
    name = tables.digest(settings)
    nfe = {"full": full, "partial": full if d["n_rounds"] else 0, "commit": 1}
    items = [
        {"id": f"{task}/{i}", "prompt": f"p{i}", "correct": c, "tokens": 10, "nfe": nfe, "settings": name}
        for i, c in enumerate(correct)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(x) + "\n" for x in [{"settings": settings, "hash": name}, *items]))


BASE = dict(adapter=False, tau_t2t=0.5)
WORSE, BETTER = [True] * 5 + [False] * 15, [False] + [True] * 13 + [False] * 6  # one lost, nine won


def printed(kind: str, folder: Path, monkeypatch, capsys) -> dict[str, list[str]]:
    """The rows of a table as the command line prints it: name -> cells."""
    code, out, err = command_line(tables, monkeypatch, capsys, kind, "--runs", folder)
    assert code == 0, err
    cells = [[c.strip() for c in line.replace("| ", "  ").split("  ") if c.strip()] for line in out.splitlines()]
    return {c[0]: c[1:] for c in cells if c} | {"out": [out]}


def test_table_1_by_hand(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base.jsonl", "gsm8k", WORSE, 3, **BASE)
    write_run(tmp_path / "sub" / "cocommit.jsonl", "gsm8k", BETTER, 4)
    write_run(tmp_path / "six.jsonl", "gsm8k", WORSE, 4, n_last=6)  # Table 3's, not Table 1's
    rows = printed("main", tmp_path, monkeypatch, capsys)
    low, high = (100 * x for x in wilson(5, 20))
    # 3 full and one commit for 10 tokens; with Stage B 4 + 1 + 4 * 3/20
    assert rows["GSM8K base"] == ["20/1319", "25.00", f"{low:.1f} .. {high:.1f}", "-", "-", "-", "0.300", "0.400"] + [
        "89.61", "-", "-", "0.26"]  # fmt: skip
    cocommit = rows["GSM8K CoCommit"]
    assert cocommit[:2] == ["20/1319", "65.00"] and cocommit[3] == "+40.00" and cocommit[6:8] == ["0.400", "0.560"]
    assert cocommit[5] == f"{22 / 1024:.3f}"  # McNemar: 1 against 9
    # of 20: nine +1, one -1, mean 0.4, deviation sqrt(10/20 - 0.16) / sqrt(20) = 0.130: 0.4 -+ 0.256
    low, high = (float(x) for x in cocommit[4].split(" .. "))
    assert 12 <= low <= 17 and 63 <= high <= 68
    # sqrt(.8961 * .1039 + .9113 * .0887) / sqrt(1319) = 0.011475
    assert cocommit[8:] == ["91.13", "+1.52", "+-2.25", "0.34"]
    assert rows["PIQA CoCommit"] == ["-"] * 8 + ["84.60", "+3.70", "+-2.44", "0.44"]
    assert len([name for name in rows if name.endswith((" base", " CoCommit"))]) == 14


def test_notes_and_ambiguity(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base.jsonl", "mbpp", [None] * 4, 3, **BASE)
    write_run(tmp_path / "cocommit.jsonl", "mbpp", [None] * 4, 3, gen_length=64)
    out = printed("main", tmp_path, monkeypatch, capsys)["out"][0]
    assert "MBPP+: items without EvalPlus's verdict" in out and "gen_length (16384, 64)" in out
    write_run(tmp_path / "again.jsonl", "mbpp", [None] * 4, 3, gen_length=32)
    line = refused(tables, monkeypatch, capsys, "main", "--runs", tmp_path)
    assert "2 runs of mbpp" in line and "decoding.gen_length" in line


def test_only_equal_prompts_are_paired(tmp_path):
    write_run(tmp_path / "base.jsonl", "drop", [False, False, True, None], 3, **BASE)
    write_run(tmp_path / "cocommit.jsonl", "drop", [True, True, True, True], 3)
    cocommit = tmp_path / "cocommit.jsonl"
    cocommit.write_text(cocommit.read_text().replace('"p0"', '"another"'))
    cocommit, base = (tables.pick(tables.read_runs(tmp_path), "drop", row) for row in (tables.COCOMMIT, tables.BASE))
    assert tables.paired(cocommit, base)[0] == 0.5  # items 1 and 2; 3 is not judged
    assert tables.paired(replace(cocommit, items={}), base) is None


def test_repeats_of_a_question_are_no_independent_items(tmp_path):
    write_run(tmp_path / "base.jsonl", "gpqa", [False] * 8, 3, **BASE)
    write_run(tmp_path / "cocommit.jsonl", "gpqa", [True] * 4 + [False] * 4, 3)
    for path in tmp_path.iterdir():  # two questions, four orders of options each
        text = path.read_text()
        for i in range(8):
            text = text.replace(f'"gpqa/{i}"', f'"q{i // 4}#{i % 4}"')
        path.write_text(text)
    cocommit, base = (tables.pick(tables.read_runs(tmp_path), "gpqa", row) for row in (tables.COCOMMIT, tables.BASE))
    delta, low, high, p = tables.paired(cocommit, base)
    assert (delta, low, high, p) == (0.5, 0.0, 1.0, None)  # eight independent items would say 0.125 .. 0.875


def test_table_2_by_hand(tmp_path, monkeypatch, capsys):
    variants = {name: (weights, changes) for name, weights, changes, *_ in MECHANISM}
    for i, (weights, changes) in enumerate(variants.values()):
        d = {"tau_t2t": 0.5, "n_rounds": 1} | changes
        right = [True] * (i + 1) + [False] * (19 - i)
        write_run(tmp_path / f"{i}.jsonl", "gsm8k", right, i + 1, adapter=weights == "adapter", **d)
    rows = printed("mechanism", tmp_path, monkeypatch, capsys)
    for i, name in enumerate(variants):
        assert rows[name][1] == f"{5 * (i + 1):.2f}" and rows[name][6] == f"{(i + 1) / 10:.3f}"
        assert rows[name][3] == ("-" if i == 3 else f"{5 * (i - 3):+.2f}")  # against the default, the fourth row
    assert rows["all masks at once"][5] == f"{2 / 2**13:.3f}"  # 13 won, none lost
    assert rows["B fills, edits off"][8:] == ["88.40", "-2.73", "+-2.31", "0.30"]
    assert rows["released, tau_m2t 0.3"][8:10] == ["79.15", "-11.98"]
    sums = [round(sum(column), 2) for column in zip(*(row[3:] for row in MECHANISM), strict=True)]
    assert sums == [1487.26, 4.3]  # the columns of the printed table, added by hand


def test_table_3_by_hand(tmp_path, monkeypatch, capsys):
    for n, right in ((1, 2), (3, 10), (6, 5)):
        write_run(tmp_path / f"{n}.jsonl", "piqa", [True] * right + [False] * (20 - right), 4, n_last=n)
    rows = printed("lastn", tmp_path, monkeypatch, capsys)
    assert [rows[f"PIQA n = {n}"][3] for n in (1, 3, 6, 9)] == ["-40.00", "-", "-25.00", "-"]
    assert [rows[f"PIQA n = {n}"][7] for n in (1, 3, 6)] == ["0.520", "0.560", "0.620"]  # 0.5 + 0.4 n/20
    assert rows["PIQA n = 6"][8:] == ["83.68", "-0.92", "+-2.36", "0.47"] and rows["PIQA n = 1"][8] == "-"
    assert "GSM8K n = 1" not in rows and len([name for name in rows if " n = " in name]) == 22
    sums = [round(sum(t[n][k] for t in tables.LASTN.values()), 2) for n in (6, 9) for k in (0, 1)]
    assert sums == [542.51, 2.21, 543.58, 2.10]  # the paper's averages are 77.50 and 77.65


# ---------------------------------------------------------------------------------------------------------------------
# statistics


def test_mcnemar():
    assert tables.mcnemar(1, 9) == 22 / 1024  # 2 (1 + 10) / 2^10
    assert tables.mcnemar(9, 1) == 22 / 1024
    assert tables.mcnemar(0, 5) == 2 / 32
    assert tables.mcnemar(4, 4) == 1.0 and tables.mcnemar(0, 0) == 1.0
    assert 0 < tables.mcnemar(900, 1100) < 1e-5  # z = 4.5: no overflow


def test_paired_bootstrap():
    a, b = np.zeros(400), np.repeat([1.0, 0.0], [100, 300])
    low, high = tables.paired_bootstrap(a, b, np.random.default_rng(0))
    # a mean of 400 draws of 1 with probability 1/4: 0.25 -+ 1.96 sqrt(0.25 * 0.75 / 400) = 0.25 -+ 0.0424
    assert (low, high) == pytest.approx((0.2076, 0.2924), abs=0.004)
    assert (low, high) == tables.paired_bootstrap(a, b, np.random.default_rng(0))
    assert tables.paired_bootstrap(b, b + 0.5, np.random.default_rng(1), n=10) == (0.5, 0.5)  # pairs stay paired
    assert tables.paired_bootstrap(b, a, np.random.default_rng(0))[1] < 0


def test_what_the_papers_n_can_tell_apart():
    # GSM8K, 90.75 against 91.13 on 1319: sqrt((0.08394375 + 0.08083231) / 1319) = 0.011177, so 0.38 points are a third
    assert tables.difference_se(0.9075, 0.9113, 1319) == pytest.approx(0.011177, abs=1e-6)
    assert tables.difference_se(0.5, 0.5, 198) == pytest.approx((1 / 396) ** 0.5)
