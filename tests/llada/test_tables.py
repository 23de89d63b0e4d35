"""The paper's tables from results and samples made by hand, and the statistics. `pytest tests/llada/test_tables.py`"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from common import caller, refused

from llada import harness, tables
from llada.ablation import BASE, COCOMMIT, GATED, MECHANISM
from llada.tables import PAPER, TASKS, wilson


def write_run(folder: Path, task: str, row: str, correct: list, full: int, n_last: int = 3, gen_length: int = 64):
    """What lm-eval logs of items 0, 1, ... with 10 tokens each; 20 layers; one refresh; partial = full with Stage B."""
    settings = {"row": row, "n_last": n_last, "partial_cost": n_last / 20, "gen_length": gen_length}
    folder.mkdir(parents=True, exist_ok=True)
    results = {"config": {"model": "CoCommit", "settings": settings}, "configs": {task: {}}}
    (folder / "results_2026-01-01T00-00-00.1.json").write_text(json.dumps(results))
    cost = {"tokens": 10, "full": full, "partial": 0 if row == BASE else full, "refresh": 1}
    samples = []
    for i, c in enumerate(correct):
        samples.append({"doc_id": i, "prompt_hash": f"p{i}", "exact_match": c} | cost)
        samples[-1] |= {"doc": {"task_id": f"t/{i}"}, "filtered_resps": ["x = 1"]}
    path = folder / f"samples_{task}_2026-01-01T00-00-00.1.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


WORSE = [1.0] * 5 + [0.0] * 15
BETTER = [0.0] + [1.0] * 13 + [0.0] * 6  # one lost, nine won


def printed(kind: str, folder: Path, monkeypatch, capsys) -> dict[str, list[str]]:
    """The rows of a table as the command line prints it: name -> cells."""
    out = caller(tables, monkeypatch, capsys)(kind, "--runs", folder)
    cells = [[c.strip() for c in line.replace("| ", "  ").split("  ") if c.strip()] for line in out.splitlines()]
    return {c[0]: c[1:] for c in cells if c} | {"out": [out]}


def test_table_1_by_hand(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base", "gsm8k", BASE, WORSE, 3)
    write_run(tmp_path / "sub" / "cocommit", "gsm8k", COCOMMIT, BETTER, 4)
    write_run(tmp_path / "six", "gsm8k", COCOMMIT, WORSE, 4, n_last=6)  # Table 3's, not Table 1's
    rows = printed("main", tmp_path, monkeypatch, capsys)
    low, high = (100 * x for x in wilson(5, 20))
    # 3 full and one refresh for 10 tokens; with Stage B 4 + 1 + 4 * 3/20
    measured = ["20/1319", "25.00", f"{low:.1f} .. {high:.1f}", "-", "-", "0.300", "0.400"]
    assert rows["GSM8K base"] == [*measured, "89.61", *"----", "0.26"]
    cocommit = rows["GSM8K CoCommit"]
    assert cocommit[:2] == ["20/1319", "65.00"] and cocommit[3] == "+40.00" and cocommit[5:7] == ["0.400", "0.560"]
    # of 20: nine +1, one -1, mean 0.4, deviation sqrt(10/20 - 0.16) / sqrt(20) = 0.130: 0.4 -+ 0.256
    low, high = (float(x) for x in cocommit[4].split(" .. "))
    assert 12 <= low <= 17 and 63 <= high <= 68
    # noise: sqrt(.8961 * .1039 + .9113 * .0887) / sqrt(1319) = 0.011475. 89.61 % of 1319 is 1181.96, 91.13 % is 1202.0;
    # 2 * 0.5**20 = 1.9e-6
    assert cocommit[7:] == ["91.13", "+1.52", "+-2.25", "+20", "1.9e-06", "0.34"]
    assert rows["PIQA CoCommit"] == [*"-------", "84.60", "+3.70", "+-2.44", "+68", "6.8e-21", "0.44"]
    # 1010 - 1013 of 1098, 93 - 87 of 198, 8004 - 8024 of 9536, 135 - 126 of 164, 265 - 260 of 378
    for task, net, p in (
        ("CMATH", "-3", "0.25"), ("GPQA-Diamond", "+6", "0.031"), ("DROP", "-20", "1.9e-06"),
        ("HumanEval+", "+9", "0.0039"), ("MBPP+", "+5", "0.062"),
    ):  # fmt: skip
        assert rows[f"{task} CoCommit"][10:12] == [net, p]


def test_notes_and_ambiguity(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base", "mbpp", BASE, [None] * 4, 3)
    write_run(tmp_path / "cocommit", "mbpp", COCOMMIT, [None] * 4, 3, gen_length=32)
    out = printed("main", tmp_path, monkeypatch, capsys)["out"][0]
    assert "MBPP+: items without EvalPlus's verdict" in out
    assert "MBPP+: the runs compared differ in more than the method: gen_length (64, 32)\n" in out
    write_run(tmp_path / "again", "mbpp", COCOMMIT, [None] * 4, 3, gen_length=16)
    line = refused(tables, monkeypatch, capsys, "main", "--runs", tmp_path)
    assert "2 runs are the row 'MBPP+ CoCommit'" in line and "gen_length (16, 32)" in line


def test_what_is_no_run(tmp_path, monkeypatch, capsys):
    def says() -> str:
        return refused(tables, monkeypatch, capsys, "main", "--runs", tmp_path)

    assert "holds no results_*.json" in says()
    write_run(tmp_path, "gsm8k", BASE, [1.0], 1)
    (samples,) = tmp_path.glob("samples_*")
    samples.write_text(samples.read_text().replace('"full"', '"half"'))
    assert "full is None" in says()
    samples.unlink()
    assert f"there is no file of samples at {samples}" in says()
    (tmp_path / "results_2026-01-01T00-00-00.1.json").write_text('{"config": {"model": "hf"}}')
    assert "results of the model cocommit" in says()


def test_only_equal_prompts_are_paired(tmp_path):
    write_run(tmp_path / "base", "drop", BASE, [0.0, 0.0, 1.0], 3)
    write_run(tmp_path / "cocommit", "drop", COCOMMIT, [1.0, 1.0, 1.0, 1.0], 3)
    base, cocommit = tables.read_runs(tmp_path)
    cocommit.items[0]["prompt"] = "another"
    assert tables.paired(cocommit, base)[0] == 0.5  # items 1 and 2
    assert tables.paired(replace(cocommit, items={}), base) is None


def test_table_2_by_hand(tmp_path, monkeypatch, capsys):
    for i, name in enumerate(MECHANISM):
        write_run(tmp_path / f"{i}", "gsm8k", name, [1.0] * (i + 1) + [0.0] * (19 - i), i + 1)
    rows = printed("mechanism", tmp_path, monkeypatch, capsys)
    for i, name in enumerate(MECHANISM):
        assert rows[name][1] == f"{5 * (i + 1):.2f}" and rows[name][5] == f"{(i + 1) / 10:.3f}"
        assert rows[name][3] == ("-" if i == 3 else f"{5 * (i - 3):+.2f}")  # against the default, the fourth row
    assert rows["B fills, edits off"][7:10] == ["88.40", "-2.73", "+-2.31"]
    assert rows["Stage B without marker"][10:12] == ["-10", "0.002"]  # 90.37 % of 1319 is 1191.98


def test_table_3_by_hand(tmp_path, monkeypatch, capsys):
    for i, task in enumerate(PAPER):
        write_run(tmp_path / task, task, COCOMMIT, [1.0] * i + [0.0] * (10 - i), 4)
    write_run(tmp_path / "six", "piqa", COCOMMIT, WORSE, 4, n_last=6)
    for task in ("humaneval", "mbpp"):  # EvalPlus's verdicts
        (run,) = tables.read_runs(tmp_path / task)
        verdicts = {name: [dict(base_status="pass", plus_status="pass")] for name in run.programs()}
        folder = tables.programs_folder(tmp_path / task, run)
        folder.mkdir()
        (folder / "samples-sanitized_eval_results.json").write_text(json.dumps({"eval": verdicts}))
    rows = printed("lastn", tmp_path, monkeypatch, capsys)
    assert [rows[f"PIQA n = {n}"][1] for n in (3, 6, 9)] == ["40.00", "25.00", "-"]
    assert [rows[f"PIQA n = {n}"][6] for n in (3, 6)] == ["0.560", "0.620"]  # 0.5 + 0.4 n/20
    assert rows["PIQA n = 6"][7:10] == ["83.68", "-0.92", "+-2.36"]
    assert rows["GPQA-Diamond n = 9"][10:12] == ["-15", "6.1e-05"]  # 78 - 93 of 198
    # 0, 10, 20, 30, 40 and twice 100 %
    assert rows["average, n=3"] == ["7/7", "42.86", *"-----", "78.72", *"-----"]
    assert rows["average, n=6"] == ["1/7", *"------", "77.50", "-1.22", *"----"]


def test_edits_without_a_gate_by_hand(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "gated", "gpqa", GATED, WORSE, 3)
    write_run(tmp_path / "ungated", "gpqa", COCOMMIT, BETTER, 4)
    rows = printed("gates", tmp_path, monkeypatch, capsys)
    assert rows["GPQA-Diamond gated"][1] == "25.00" and rows["GPQA-Diamond gated"][7:] == ["45.45", *"-----"]
    assert rows["GPQA-Diamond ungated"][3] == "+40.00" and rows["GPQA-Diamond ungated"][7:9] == ["46.97", "+1.52"]
    # the paper's text, in answers of 198, 378, 164, 9536, 1838, 1319 and 1098
    for task, net in (
        ("GPQA-Diamond", "+3"), ("MBPP+", "+4"), ("HumanEval+", "+1"), ("DROP", "+42"), ("PIQA", "+2"), ("GSM8K", "+0"),
        ("CMATH", "-5"),
    ):  # fmt: skip
        assert rows[f"{task} ungated"][10] == net


def test_the_papers_figures():
    """The columns of the printed tables, added by hand; and the averages are those of its rows."""
    assert [TASKS[task].n_official for task in PAPER] == [1319, 1098, 198, 9536, 1838, 164, 378]
    for n, accuracies, forwards in (("base", 536.46, 2.40), (3, 551.05, 2.21), (6, 542.51, 2.21), (9, 543.58, 2.10)):
        sums = [round(sum(column), 2) for column in zip(*(figures[n] for figures in PAPER.values()), strict=True)]
        assert sums == [accuracies, forwards]
        assert n == "base" or tables.AVERAGES[n] == round(accuracies / 7, 2)
    assert [round(sum(row[k] for row in MECHANISM.values()), 2) for k in (3, 4)] == [1487.26, 4.3]


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


def test_without_lm_eval_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "LM", object)
    flags = ["--tasks", "gsm8k", "--task_file", "test.jsonl", "--ckpt", tmp_path, "--out", tmp_path / "out"]
    assert "pip install -e '.[benchmarks]'" in refused(harness, monkeypatch, capsys, *flags)
