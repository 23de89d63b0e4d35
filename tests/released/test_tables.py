"""The paper's tables from samples made by hand, and the statistics. `pytest tests/released/test_tables.py`"""

import json
from functools import partial
from pathlib import Path

import pytest
from common import caller

from released import harness, tables
from released.ablation import BASE, COCOMMIT, MECHANISM
from released.tables import PAPER, TASKS


def write_run(folder: Path, task: str, row: str, correct: list, full: int, n_last: int = 3) -> None:
    """What is logged of items 0, 1, ... with 10 tokens each; 20 layers; one refresh; partial = full with Stage B."""
    folder.mkdir(parents=True)
    settings = {"row": row, "n_last": n_last, "partial_cost": n_last / 20}
    (folder / "settings.json").write_text(json.dumps(settings))
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
    return {c[0]: c[1:] for c in cells}


def test_table_1_by_hand(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base", "gsm8k", BASE, WORSE, 3)
    write_run(tmp_path / "sub" / "cocommit", "gsm8k", COCOMMIT, BETTER, 4)
    write_run(tmp_path / "six", "gsm8k", COCOMMIT, WORSE, 4, n_last=6)  # Table 3's, not Table 1's
    rows = printed("main", tmp_path, monkeypatch, capsys)
    # 3 full and one refresh for 10 tokens; with Stage B 4 + 1 + 4 * 3/20
    assert rows["GSM8K base"] == ["20/1319", "25.00", "-", "-", "0.300", "0.400", "89.61", "-", "0.26"]
    cocommit = rows["GSM8K CoCommit"]
    assert cocommit[:3] == ["20/1319", "65.00", "+40.00"]
    assert cocommit[4:] == ["0.400", "0.560", "91.13", "+1.52", "0.34"]
    # of 20: nine +1, one -1, mean 0.4, deviation sqrt(10/20 - 0.16) / sqrt(20) = 0.130: 0.4 -+ 0.256
    low, high = (float(x) for x in cocommit[3].split(" .. "))
    assert 12 <= low <= 17 and 63 <= high <= 68
    assert rows["PIQA CoCommit"] == [*"------", "84.60", "+3.70", "0.44"]


def test_what_is_no_run_and_two_of_one_row(tmp_path, monkeypatch, capsys):
    fails = partial(caller(tables, monkeypatch, capsys).fails, "main", "--runs", tmp_path)
    assert "holds no samples_*.jsonl" in fails()
    write_run(tmp_path / "a", "gsm8k", BASE, [1.0], 1)
    write_run(tmp_path / "b", "gsm8k", BASE, [1.0], 1)
    assert "/a and" in fails()
    (tmp_path / "b" / "settings.json").write_text('{"n_last": 3}')
    assert "b/settings.json is damaged" in fails()


def test_only_equal_prompts_are_paired(tmp_path):
    write_run(tmp_path / "base", "drop", BASE, [0.0, 0.0, 1.0], 3)
    write_run(tmp_path / "cocommit", "drop", COCOMMIT, [1.0, 1.0, 1.0, 1.0], 3)
    base, cocommit = tables.read_runs(tmp_path)
    cocommit.items[0]["prompt_hash"] = "another"
    assert tables.paired(cocommit, base)[0] == 0.5  # items 1 and 2
    base.items.clear()
    assert tables.paired(cocommit, base) is None


def test_table_2_by_hand(tmp_path, monkeypatch, capsys):
    for i, name in enumerate(MECHANISM):
        write_run(tmp_path / f"{i}", "gsm8k", name, [1.0] * (i + 1) + [0.0] * (19 - i), i + 1)
    rows = printed("mechanism", tmp_path, monkeypatch, capsys)
    for i, name in enumerate(MECHANISM):
        assert rows[name][1] == f"{5 * (i + 1):.2f}" and rows[name][4] == f"{(i + 1) / 10:.3f}"
        assert rows[name][2] == ("-" if i == 3 else f"{5 * (i - 3):+.2f}")  # against the default, the fourth row
    assert rows["B fills, edits off"][6:] == ["88.40", "-2.73", "0.30"]

    # the third and the fourth row, side by side: edits with a gate, and without
    rows = printed("gates", tmp_path, monkeypatch, capsys)
    assert rows["GSM8K gated"][1] == "15.00" and rows["GSM8K ungated"][2] == "+5.00"
    assert rows["GPQA-Diamond gated"][6:] == ["45.45", "-", "-"] and rows["GPQA-Diamond ungated"][7] == "+1.52"


def test_table_3_by_hand(tmp_path, monkeypatch, capsys):
    for i, task in enumerate(PAPER):
        write_run(tmp_path / task, task, COCOMMIT, [1.0] * i + [0.0] * (10 - i), 4)
    write_run(tmp_path / "six", "piqa", COCOMMIT, WORSE, 4, n_last=6)
    for task in ("humaneval", "mbpp"):  # EvalPlus's verdicts
        (run,) = tables.read_runs(tmp_path / task)
        verdicts = {name: [dict(base_status="pass", plus_status="pass")] for name in run.programs()}
        run.programs_folder().mkdir()
        path = run.programs_folder() / "samples-sanitized_eval_results.json"
        path.write_text(json.dumps({"eval": verdicts}))
    rows = printed("lastn", tmp_path, monkeypatch, capsys)
    assert [rows[f"PIQA n = {n}"][1] for n in (3, 6, 9)] == ["40.00", "25.00", "-"]
    assert [rows[f"PIQA n = {n}"][5] for n in (3, 6)] == ["0.560", "0.620"]  # 0.5 + 0.4 n/20
    assert rows["PIQA n = 6"][6:] == ["83.68", "-0.92", "0.47"]
    # 0, 10, 20, 30, 40 and twice 100 %
    assert rows["average, n = 3"] == ["-", "42.86", *"----", "78.72", *"--"]
    assert rows["average, n = 6"] == [*"------", "77.50", *"--"]


def test_the_papers_figures():
    """The columns of the printed tables, added by hand."""
    assert [TASKS[task].n_official for task in PAPER] == [1319, 1098, 198, 9536, 1838, 164, 378]
    for n, accuracies, forwards in (("base", 536.46, 2.40), (3, 551.05, 2.21), (6, 542.51, 2.21), (9, 543.58, 2.10)):
        sums = [round(sum(column), 2) for column in zip(*(figures[n] for figures in PAPER.values()), strict=True)]
        assert sums == [accuracies, forwards]
    assert [round(sum(row[k] for row in MECHANISM.values()), 2) for k in (3, 4)] == [1487.26, 4.3]
    assert sum(figures["ungated"] for figures in PAPER.values()) == pytest.approx(3.29)


def test_without_lm_eval_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "LM", object)
    flags = ["--tasks", "gsm8k", "--task_file", "test.jsonl", "--ckpt", tmp_path, "--out", tmp_path / "out"]
    assert "pip install -e '.[benchmarks]'" in caller(harness, monkeypatch, capsys).fails(*flags)
