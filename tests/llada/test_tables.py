"""The paper's tables from run files made by hand, and the statistics. `pytest tests/llada/test_tables.py`"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from common import caller, refused

from llada import tables
from llada.ablation import BASE, COCOMMIT, GATED, MECHANISM
from llada.benchmarks import TASKS
from llada.tables import PAPER, wilson


def write_run(path: Path, task: str, row: str, correct: list, full: int, n_last: int = 3, gen_length: int = 64):
    """A run file of items 0, 1, ... with 10 tokens each; 20 layers; one refresh; partial = full in Stage B's runs."""
    stage_b = row != BASE
    settings = {"task": task, "row": row, "n_last": n_last, "partial_cost": n_last / 20, "gen_length": gen_length}
    settings |= dict.fromkeys(("questions", "weights", "dtype"), "same")
    nfe = {"full": full, "partial": full if stage_b else 0, "refresh": 1}
    records = [{"settings": settings}]
    for i, c in enumerate(correct):
        records.append({"id": f"{task}/{i}", "prompt": f"p{i}", "correct": c, "tokens": 10, "nfe": nfe})
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


WORSE, BETTER = [True] * 5 + [False] * 15, [False] + [True] * 13 + [False] * 6  # one lost, nine won


def printed(kind: str, folder: Path, monkeypatch, capsys) -> dict[str, list[str]]:
    """The rows of a table as the command line prints it: name -> cells."""
    out = caller(tables, monkeypatch, capsys)(kind, "--runs", folder)
    cells = [[c.strip() for c in line.replace("| ", "  ").split("  ") if c.strip()] for line in out.splitlines()]
    return {c[0]: c[1:] for c in cells if c} | {"out": [out]}


def test_table_1_by_hand(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base.jsonl", "gsm8k", BASE, WORSE, 3)
    write_run(tmp_path / "sub" / "cocommit.jsonl", "gsm8k", COCOMMIT, BETTER, 4)
    write_run(tmp_path / "six.jsonl", "gsm8k", COCOMMIT, WORSE, 4, n_last=6)  # Table 3's, not Table 1's
    rows = printed("main", tmp_path, monkeypatch, capsys)
    low, high = (100 * x for x in wilson(5, 20))
    # 3 full and one refresh for 10 tokens; with Stage B 4 + 1 + 4 * 3/20
    measured = ["20/1319", "25.00", f"{low:.1f} .. {high:.1f}", "-", "-", "0.300", "0.400"]
    assert rows["GSM8K base"] == measured + ["89.61", "-", "-", "0.26"]
    cocommit = rows["GSM8K CoCommit"]
    assert cocommit[:2] == ["20/1319", "65.00"] and cocommit[3] == "+40.00" and cocommit[5:7] == ["0.400", "0.560"]
    # of 20: nine +1, one -1, mean 0.4, deviation sqrt(10/20 - 0.16) / sqrt(20) = 0.130: 0.4 -+ 0.256
    low, high = (float(x) for x in cocommit[4].split(" .. "))
    assert 12 <= low <= 17 and 63 <= high <= 68
    # sqrt(.8961 * .1039 + .9113 * .0887) / sqrt(1319) = 0.011475
    assert cocommit[7:] == ["91.13", "+1.52", "+-2.25", "0.34"]
    assert rows["PIQA CoCommit"] == ["-"] * 7 + ["84.60", "+3.70", "+-2.44", "0.44"]
    assert len([name for name in rows if name.endswith((" base", " CoCommit"))]) == 14


def test_notes_and_ambiguity(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base.jsonl", "mbpp", BASE, [None] * 4, 3)
    write_run(tmp_path / "cocommit.jsonl", "mbpp", COCOMMIT, [None] * 4, 3, gen_length=32)
    out = printed("main", tmp_path, monkeypatch, capsys)["out"][0]
    assert "MBPP+: items without EvalPlus's verdict" in out
    assert "MBPP+: the runs compared differ in more than the method: gen_length (64, 32)\n" in out
    write_run(tmp_path / "again.jsonl", "mbpp", COCOMMIT, [None] * 4, 3, gen_length=16)
    line = refused(tables, monkeypatch, capsys, "main", "--runs", tmp_path)
    assert "2 runs are the row 'MBPP+ CoCommit'" in line and "gen_length (16, 32)" in line


@pytest.mark.parametrize("record, word", [
    ("notes", "not a run file"), ({"settings": 5}, "settings is 5"), ({"settings": {"task": "chess"}}, "'chess'"),
    ({"settings": {"task": "gsm8k"}}, "row is None"),
])  # fmt: skip
def test_what_is_no_run_file(record, word, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    assert word in refused(tables, monkeypatch, capsys, "main", "--runs", tmp_path)


@pytest.mark.parametrize("damage, word", [
    ("null", "not a JSON object"), ("[]", "not a JSON object"), ("{}", "id is None"), ('{"id": "a', "damaged"),
    ('{"id": "a", "prompt": "p", "tokens": 1, "nfe": {}}', "full is None"),
    ('{"id": "a", "prompt": "p", "tokens": 1, "nfe": {"full": 1, "partial": 1, "refresh": 1}}', "neither right"),
])  # fmt: skip
def test_a_damaged_line_is_refused_and_one_cut_short_at_the_end_is_not_there(
    damage, word, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "a.jsonl"
    write_run(path, "gsm8k", BASE, [True], 1)
    whole = path.read_bytes()
    path.write_bytes(whole + damage.encode() + b"\n")
    assert word in refused(tables, monkeypatch, capsys, "main", "--runs", tmp_path)
    path.write_bytes(whole + damage.encode())
    assert list(tables.read_run(path)[0].items) == ["gsm8k/0"]


def test_only_equal_prompts_are_paired(tmp_path):
    write_run(tmp_path / "base.jsonl", "drop", BASE, [False, False, True, None], 3)
    write_run(tmp_path / "cocommit.jsonl", "drop", COCOMMIT, [True, True, True, True], 3)
    cocommit = tmp_path / "cocommit.jsonl"
    cocommit.write_text(cocommit.read_text().replace('"p0"', '"another"'))
    cocommit, base = (tables.read_run(tmp_path / f"{name}.jsonl")[0] for name in ("cocommit", "base"))
    assert tables.paired(cocommit, base)[0] == 0.5  # items 1 and 2; 3 is not judged
    assert tables.paired(replace(cocommit, items={}), base) is None


def test_table_2_by_hand(tmp_path, monkeypatch, capsys):
    for i, name in enumerate(MECHANISM):
        write_run(tmp_path / f"{i}.jsonl", "gsm8k", name, [True] * (i + 1) + [False] * (19 - i), i + 1)
    rows = printed("mechanism", tmp_path, monkeypatch, capsys)
    for i, name in enumerate(MECHANISM):
        assert rows[name][1] == f"{5 * (i + 1):.2f}" and rows[name][5] == f"{(i + 1) / 10:.3f}"
        assert rows[name][3] == ("-" if i == 3 else f"{5 * (i - 3):+.2f}")  # against the default, the fourth row
    assert rows["B fills, edits off"][7:] == ["88.40", "-2.73", "+-2.31", "0.30"]
    assert rows["released, tau_m2t 0.3"][7:9] == ["79.15", "-11.98"]


def test_table_3_by_hand(tmp_path, monkeypatch, capsys):
    for n, right in ((3, 10), (6, 5)):
        write_run(tmp_path / f"{n}.jsonl", "piqa", COCOMMIT, [True] * right + [False] * (20 - right), 4, n_last=n)
    rows = printed("lastn", tmp_path, monkeypatch, capsys)
    assert [rows[f"PIQA n = {n}"][3] for n in (3, 6, 9)] == ["-", "-25.00", "-"]
    assert [rows[f"PIQA n = {n}"][6] for n in (3, 6)] == ["0.560", "0.620"]  # 0.5 + 0.4 n/20
    assert rows["PIQA n = 6"][7:] == ["83.68", "-0.92", "+-2.36", "0.47"]
    assert len([name for name in rows if " n = " in name]) == 21


def test_the_papers_figures():
    """The columns of the printed tables, added by hand; the paper's averages of n = 6 and 9 are 77.50 and 77.65."""
    assert [TASKS[task].n_official for task in PAPER] == [1319, 1098, 198, 9536, 1838, 164, 378]
    for n, accuracies, forwards in (("base", 536.46, 2.40), (3, 551.05, 2.21), (6, 542.51, 2.21), (9, 543.58, 2.10)):
        sums = [round(sum(column), 2) for column in zip(*(figures[n] for figures in PAPER.values()), strict=True)]
        assert sums == [accuracies, forwards]
    assert PAPER["gsm8k"] == {"base": (89.61, 0.26), 3: (91.13, 0.34), 6: (90.75, 0.30), 9: (90.83, 0.30)}
    assert [round(sum(row[k] for row in MECHANISM.values()), 2) for k in (3, 4)] == [1487.26, 4.3]


def own(rows: dict[str, list[str]], label: str) -> list[str]:
    """The cells of one of the paper's own differences."""
    return rows[f"{label}, the paper's"]


def test_the_papers_differences_in_answers(tmp_path, monkeypatch, capsys):
    """By hand: 89.61 % of 1319 is 1181.96, 91.13 % is 1202.0; 2 * 0.5**20 = 1.9e-6."""
    write_run(tmp_path / "base.jsonl", "gsm8k", BASE, WORSE, 3)
    rows = printed("main", tmp_path, monkeypatch, capsys)
    assert own(rows, "GSM8K CoCommit") == ["1202 - 1182 of 1319", "+20", "1.9e-06"]
    assert own(rows, "CMATH CoCommit") == ["1010 - 1013 of 1098", "-3", "0.25"]
    assert own(rows, "GPQA-Diamond CoCommit") == ["93 - 87 of 198", "+6", "0.031"]
    assert own(rows, "DROP CoCommit") == ["8004 - 8024 of 9536", "-20", "1.9e-06"]
    assert own(rows, "PIQA CoCommit")[:2] == ["1555 - 1487 of 1838", "+68"]  # 2 * 0.5**68 = 6.8e-21
    assert own(rows, "PIQA CoCommit")[2] == "6.8e-21"
    assert own(rows, "HumanEval+ CoCommit") == ["135 - 126 of 164", "+9", "0.0039"]
    assert own(rows, "MBPP+ CoCommit") == ["265 - 260 of 378", "+5", "0.062"]

    # one function twice: 90.75 % is 1196.99, 90.37 % is 1191.98
    rows = printed("mechanism", tmp_path, monkeypatch, capsys)
    assert own(rows, "Stage B without marker") == ["1192 - 1202 of 1319", "-10", "0.002"]
    said = rows["out"][0]
    assert "90.75 (1197 of 1319)" in said and "90.37 (1192)" in said and "5 answers apart" in said
    assert "1202 - 1197 = 5 answers" in said

    rows = printed("lastn", tmp_path, monkeypatch, capsys)
    assert own(rows, "GPQA-Diamond n=9") == ["78 - 93 of 198", "-15", "6.1e-05"]  # 39.39 % of 198 is 77.99


def test_edits_without_a_gate_by_hand(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "gated.jsonl", "gpqa", GATED, WORSE, 3)
    write_run(tmp_path / "ungated.jsonl", "gpqa", COCOMMIT, BETTER, 4)
    rows = printed("gates", tmp_path, monkeypatch, capsys)
    assert rows["GPQA-Diamond gated"][1] == "25.00" and rows["GPQA-Diamond gated"][7:] == ["45.45", "-", "-", "-"]
    assert rows["GPQA-Diamond ungated"][3] == "+40.00" and rows["GPQA-Diamond ungated"][7:9] == ["46.97", "+1.52"]
    # the paper's text, in answers of 198, 378, 164, 9536, 1838, 1319 and 1098
    for task, net in (
        ("GPQA-Diamond", "+3"), ("MBPP+", "+4"), ("HumanEval+", "+1"), ("DROP", "+42"), ("PIQA", "+2"), ("GSM8K", "+0"),
        ("CMATH", "-5"),
    ):  # fmt: skip
        assert own(rows, f"{task} ungated")[1] == net
    assert own(rows, "GSM8K ungated")[2] == own(rows, "HumanEval+ ungated")[2] == "1"


def test_averages(tmp_path, monkeypatch, capsys):
    for i, task in enumerate(PAPER):
        write_run(tmp_path / f"{task}.jsonl", task, COCOMMIT, [True] * i + [False] * (10 - i), 4)
    write_run(tmp_path / "six.jsonl", "gsm8k", COCOMMIT, WORSE, 4, n_last=6)
    rows = printed("lastn", tmp_path, monkeypatch, capsys)
    # 0, 10, ... 60 %
    assert rows["average, n=3"] == ["7/7", "30.00", *"-----", "78.72", "-", "-", "-"]
    assert rows["average, n=6"] == ["1/7", *"------", "77.50", "-1.22", "-", "-"]
    # the paper's averages are those of its rows
    for n, average in tables.AVERAGES.items():
        assert round(sum(figures[n][0] for figures in PAPER.values()) / 7, 2) == average


# --- statistics
@pytest.mark.parametrize("k, p", [(0, 1.0), (1, 1.0), (-2, 0.5), (5, 0.0625), (6, 0.03125)])
def test_mcnemar_at_best(k, p):
    assert tables.mcnemar_at_best(k) == p


def test_wilson():
    # 8 of 10, z = 1.96: (0.8 + 3.8415/20) / 1.38415 = 0.71674, 1.96 * sqrt(0.016 + 3.8415/400) / 1.38415 = 0.22658
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=2e-5)


def test_bootstrap():
    x = np.repeat([1.0, 0.0], [100, 300])
    low, high = tables.bootstrap(x, np.random.default_rng(0))
    # a mean of 400 draws of 1 with probability 1/4: 0.25 -+ 1.96 sqrt(0.25 * 0.75 / 400) = 0.25 -+ 0.0424
    assert (low, high) == pytest.approx((0.2076, 0.2924), abs=0.004)
