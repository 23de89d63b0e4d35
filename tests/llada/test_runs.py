"""Benchmark runs end to end on the golden checkpoint. `pytest tests/llada/test_runs.py`"""

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from common import caller, random_adapter
from test_benchmarks import write_task

from lib.util import alone_with, read_json, write_json
from llada import run as runs
from llada import tables
from llada.ablation import COCOMMIT
from llada.benchmarks import TASKS


@pytest.fixture(scope="module")
def weights(golden, tmp_path_factory):
    """The golden checkpoint with room for every prompt, and a random adapter for it."""
    folder = tmp_path_factory.mktemp("weights")
    shutil.copytree(golden, folder / "base")
    config = read_json(golden / "config.json", "config")
    write_json(folder / "base" / "config.json", config | {"max_len": 1024, "block_length": 8})
    random_adapter(folder / "cocommit", folder / "base", n_last=2)
    return folder


@pytest.fixture
def run(weights, tmp_path, monkeypatch, capsys):
    """`run(task, out, *flags)` -> what a short benchmark run with the adapter prints; `run.fails`: its one error."""
    call = caller(runs, monkeypatch, capsys)

    def run(task: str, out: Path, *flags: object, how=call) -> str:
        given = ["--task", task, "--task_file", write_task(tmp_path, task), "--out", out]
        return how(*given, "--ckpt", weights / "cocommit", "--gen_length", 16, "--device", "cpu", *flags)

    run.fails = partial(run, how=call.fails)
    return run


def lines(path: Path) -> list[dict]:
    """The lines of a run file without what a clock says."""
    records = map(json.loads, path.read_text().splitlines())
    return [record | {"seconds": 0} for record in records]


@pytest.mark.parametrize("task", ["gsm8k", "drop", "humaneval"])
def test_a_task_end_to_end(task, run, tmp_path):
    """Of each kind one: with a verdict, with F1 beside it, and without."""
    out = run(task, tmp_path / "a.jsonl")
    assert ("F1: " in out) == (task == "drop")
    header, *items = lines(tmp_path / "a.jsonl")
    assert header["settings"]["row"] == COCOMMIT and COCOMMIT in out
    assert len(items) == len(TASKS[task].load(write_task(tmp_path, task))) > 0
    for item in items:
        assert 0 < item["tokens"] <= 16 and item["nfe"]["full"] >= item["nfe"]["partial"] > 0
        assert (item["correct"] is None) == (TASKS[task].right is None)


def test_killed_half_way_it_goes_on(run, tmp_path, monkeypatch):
    run("gsm8k", tmp_path / "a.jsonl", "--part", "1/2")
    whole = lines(tmp_path / "a.jsonl")
    data = (tmp_path / "a.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for kept in (first // 2, first + 20, len(data) - 30):  # in the header, in the first item, in the last
        (tmp_path / "b.jsonl").write_bytes(data[:kept])
        run("gsm8k", tmp_path / "b.jsonl", "--part", "1/2")
        assert lines(tmp_path / "b.jsonl") == whole
    monkeypatch.setattr(runs, "generate", None)  # a finished run decodes nothing
    assert ", 0 to go" in run("gsm8k", tmp_path / "a.jsonl", "--part", "1/2")
    assert (tmp_path / "a.jsonl").read_bytes() == data


def test_two_runs_do_not_append_to_one_file(run, tmp_path):
    """Beside it, in the same folder, another one may."""
    out = tmp_path / "a.jsonl"
    with alone_with(out):
        assert f"another run is writing into {out}" in run.fails("gsm8k", out, "--part", "1/3")
        assert out.read_bytes() == b""
        run("gsm8k", tmp_path / "b.jsonl", "--part", "2/3")
    run("gsm8k", out, "--part", "1/3")


def test_parts_make_the_whole(run, tmp_path):
    for part in ("1/2", "2/2"):
        run("gsm8k", tmp_path / f"parts/{part[0]}.jsonl", "--part", part)
    (parts,) = tables.read_runs(tmp_path / "parts")

    # a part is not a setting: the first one grows into the whole
    assert len(lines(tmp_path / "parts/1.jsonl")) == 3
    run("gsm8k", tmp_path / "parts/1.jsonl")
    whole, _ = tables.read_run(tmp_path / "parts/1.jsonl")
    assert len(parts.items) == 3 and tables.measured(parts, None) == tables.measured(whole, None)


def test_what_a_run_decodes_with(run, weights, tmp_path, monkeypatch):
    """The paper's default, of a base the released gate; or a row of Table 2."""
    assert "prompt 1" in run.fails("gsm8k", tmp_path / "none.jsonl", "--gen_length", 1024)  # and that much do not fit
    monkeypatch.setattr(runs, "answer", lambda *given: None)
    for number, (flags, expected) in enumerate((
        (["--ckpt", weights / "base"], dict(n_rounds=0, tau_m2t=0.7, tau_t2t=0.5)),
        ([], dict(n_rounds=1, tau_m2t=0.7, tau_t2t=0.0)),
        (["--row", "B fills, edits off"], dict(n_rounds=1, tau_m2t=0.7, tau_t2t=None)),
        (["--row", "A fills, B edits"], dict(n_rounds=1, tau_m2t=0.7, tau_t2t=0.5)),
    )):  # fmt: skip
        run("gsm8k", tmp_path / f"{number}.jsonl", *flags)
        d = lines(tmp_path / f"{number}.jsonl")[0]["settings"]
        always = dict(max_post_steps=16, eos_early_stop=True, temperature=0.0, gen_length=16)
        assert d | expected | always == d
    assert runs.build_parser().get_default("gen_length") == 16384
    assert "is about the base" in run.fails("gsm8k", tmp_path / "none.jsonl", "--row", "released, tau_m2t 0.5")
    random_adapter(tmp_path / "causal", weights / "base", "causal", n_rounds=1)
    assert "causal Stage B is not a row" in run.fails("gsm8k", tmp_path / "none.jsonl", "--ckpt", tmp_path / "causal")
    assert "--out: this path is empty" in run.fails("gsm8k", "")


def test_without_role_tokens_there_is_no_chat_template(run, weights, tmp_path):
    assert "chat template" not in run("gsm8k", tmp_path / "chat.jsonl", "--part", "1/3")
    for name in ("base", "cocommit"):
        shutil.copytree(weights / name, tmp_path / "plain" / name)
    path = tmp_path / "plain" / "base" / "tokenizer.json"
    path.write_text(path.read_text().replace("<role>", "<turn>"))
    flags = ["--part", "1/3", "--ckpt", tmp_path / "plain" / "cocommit"]
    assert "no chat template: the tokenizer of" in run("gsm8k", tmp_path / "plain.jsonl", *flags)
    settings, items = {}, {}
    for name in ("chat", "plain"):
        header, items[name] = lines(tmp_path / f"{name}.jsonl")
        settings[name] = header["settings"]
    assert tables.differences(settings["chat"], settings["plain"]) == "chat_template (True, False)"
    assert items["chat"]["prompt"] != items["plain"]["prompt"]


def test_other_settings_do_not_mix(run, weights, tmp_path):
    out = tmp_path / "a.jsonl"
    run("gpqa", out)
    before = out.read_bytes()
    template = tmp_path / "template.txt"
    template.write_text("{question} {A} {B} {C} {D}")
    for flags, word in (
        (["--row", "Stage B, gated edits"], "tau_t2t (0.0, 0.5)"),
        (["--ckpt", weights / "base"], "adapter"),
        (["--template", template], "questions"),
        (["--dtype", "bf16"], "dtype"),
    ):
        line = run.fails("gpqa", out, *flags)
        assert "other settings" in line and word in line

    # nor is a damaged file touched
    damaged = before[:-20] + b"\n"
    out.write_bytes(damaged)
    assert "run file" in run.fails("gpqa", out) and out.read_bytes() == damaged


def test_samples_for_evalplus_are_handed_over(run, tmp_path):
    folder = tmp_path / "runs" / "he.evalplus"
    text = run("humaneval", tmp_path / "runs" / "he.jsonl", "--part", "1/2")
    assert [record["task_id"] for record in lines(folder / "dataset.jsonl")] == ["HumanEval/900"]

    # a verdict counts for the very program that it is about
    (sample,) = lines(folder / "samples.jsonl")
    verdict = sample | {"base_status": "pass", "plus_status": "pass"}
    for told, expected in (
        (verdict, True),
        (verdict | {"plus_status": "fail"}, False),
        (verdict | {"solution": "another"}, None),
    ):
        write_json(folder / "samples_eval_results.json", {"eval": {"HumanEval/900": [told]}})
        (scored,) = tables.read_runs(tmp_path / "runs")
        assert scored.items["HumanEval/900"]["correct"] is expected

    # or about what sanitize made of it, as long as that lies beside it
    cut = {"task_id": "HumanEval/900", "solution": "cut"}
    (folder / "samples-sanitized.jsonl").write_text(json.dumps(cut) + "\n")
    told = verdict | {"solution": "cut"}
    write_json(folder / "samples-sanitized_eval_results.json", {"eval": {"HumanEval/900": [told]}})
    for given, expected in ((sample["solution"], True), ("another", None)):
        (folder / "samples.jsonl").write_text(json.dumps(sample | {"solution": given}) + "\n")
        (scored,) = tables.read_runs(tmp_path / "runs")
        assert scored.items["HumanEval/900"]["correct"] is expected

    # the printed command, with a stand-in for EvalPlus: a clean environment, and no old result
    stand_in = tmp_path / "runs" / "bin" / "python"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\nenv >> seen; ls >> seen; echo $@ >> seen\n")
    stand_in.chmod(0o755)
    command = next(line for line in text.splitlines() if line.startswith("  cd "))
    environment = {"PATH": f"{stand_in.parent}:/usr/bin:/bin", "SOME_SECRET": "hush"}
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    seen = (folder / "seen").read_text()
    sanitize = seen.index("-m evalplus.sanitize --samples samples.jsonl\n")
    assert sanitize < seen.index("-m evalplus.evaluate --dataset humaneval --samples samples-sanitized.jsonl\n")
    for setting in (f"HUMANEVAL_OVERRIDE_PATH={folder}/dataset.jsonl\n", "MBPP_OVERRIDE_PATH=/dev/null\n"):
        assert seen.count(setting) == 2
    assert seen.count("EVALPLUS_MAX_MEMORY_BYTES=8589934592\n") == 2
    assert "hush" not in seen and "eval_results" not in seen
