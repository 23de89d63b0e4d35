"""The seven tasks by lm-eval, end to end on the golden checkpoint. `make test-benchmarks`; with --bench_data DIR also
two items of each published file, DIR/gsm8k/test.jsonl and so on (FILES)."""

import csv
import gzip
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from common import caller, random_adapter

pytest.importorskip("lm_eval", reason="lm-eval is not installed: `make test-benchmarks` installs it, in some minutes")

from lm_eval.__main__ import cli_evaluate

from lib.util import Mistake, read_json, write_json
from released import harness, tables
from released.ablation import BASE, COCOMMIT
from released.tasks import docs, rules

FILES = {
    "gsm8k": "gsm8k/test.jsonl",
    "cmath": "cmath/test.jsonl",
    "gpqa": "gpqa/gpqa_diamond.csv",
    "drop": "drop/drop_v0_dev.jsonl.gz",
    "piqa": "piqa/dev.jsonl",
    "humaneval": "humaneval_plus/HumanEvalPlus.jsonl.gz",
    "mbpp": "mbpp_plus/MbppPlus.jsonl.gz",
}


# --- two records by hand of each task, in the published shapes
GPQA = [
    ["Question", *docs.GPQA_ANSWERS],
    ["Which metal floats,\nin water?", "sodium", "lead", "gold", 'so-called "iron"'],
    ["Which gas glows red?", "neon", "argon", "helium", "oxygen"],
]
PROGRAM = dict(entry_point="f", canonical_solution="    return x\n", plus_input=[])
RECORDS = {
    "gsm8k": [
        {"question": "A hen lays {3} eggs a day. How many in 2 days?", "answer": "3*2=<<3*2=6>>6 eggs.\n#### 6"},
        {"question": "How many grains are 85 bags of 25?", "answer": "85*25 = 2,125\n#### 2,125"},
    ],
    "cmath": [
        {"question": "6元的书便宜了百分之几？", "golden": "27.3%"},
        {"question": "占几分之几？", "golden": "4/10"},
    ],
    "drop": [
        {"context": "Passage: A, then\nB won.\nQuestion: Who won?\nAnswer:", "ref_text": "B|the B"},
        {"context": "Passage: P.\nQuestion: Which two?\nAnswer:", "ref_text": "ale and rum"},
    ],
    "piqa": [
        {"id": "x1", "goal": "dry a cup", "sol1": "use a towel", "sol2": "use a lake"},
        {"id": "x2", "goal": "cut bread", "sol1": "use soup", "sol2": "use a knife"},
    ],
    "humaneval": [PROGRAM | {"task_id": f"HumanEval/90{i}", "prompt": f"def f(x):  # {i}\n"} for i in (0, 1)],
    "mbpp": [PROGRAM | {"task_id": f"Mbpp/90{i}", "prompt": f"Write f. {i}\n"} for i in (0, 1)],
}
# of gpqa random.Random(0).sample(range(4), 4) is 3, 1, 0, 2: the right option is the third
GOLDS = {"gsm8k": ["6", "2125"], "cmath": ["27.3%", "4/10"], "gpqa": ["C", "D"], "piqa": ["A", "B"]}


def write_task(folder: Path, name: str) -> Path:
    """The records of one task where its real file would lie."""
    path = folder / FILES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    if name == "gpqa":
        csv.writer(text).writerows(GPQA)
    for record in RECORDS.get(name, []):
        text.write(json.dumps(record) + "\n")
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    if name == "piqa":
        (path.parent / "dev-labels.lst").write_text("0\n1\n")
    return path


@pytest.fixture(scope="module")
def weights(golden, tmp_path_factory) -> Path:
    """The golden checkpoint with room for every prompt, and a random adapter for it."""
    folder = tmp_path_factory.mktemp("weights")
    shutil.copytree(golden, folder / "base")
    config = read_json(golden / "config.json", "config")
    write_json(folder / "base" / "config.json", config | {"max_len": 8192, "block_length": 8})
    random_adapter(folder / "cocommit", folder / "base", n_last=3)
    return folder


@pytest.fixture
def run(weights, tmp_path, monkeypatch, capsys):
    """`run(task, out, *flags)` -> what the command prints; `run.fails`: its one error."""
    call = caller(harness, monkeypatch, capsys)

    def flags(task: str, out: Path, *more: object, task_file: Path | None = None) -> list:
        where = ["--out", out, "--ckpt", weights / "cocommit", "--gen_length", 8, "--device", "cpu"]
        return ["--tasks", task, "--task_file", task_file or write_task(tmp_path, task), *where, *more]

    def run(*given: object, **how: Path) -> str:
        return call(*flags(*given, **how))

    run.fails = lambda *given, **how: call.fails(*flags(*given, **how))
    return run


def samples(out: Path, task: str) -> list[dict]:
    (path,) = out.glob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the tasks
@pytest.mark.parametrize("task", FILES)
def test_a_task_ends_in_a_score_and_a_cost(task, run, tmp_path, request):
    """Also for the first two items of the published file, if there is one."""
    out = tmp_path / "out"
    said = run(task, out)
    assert f"{COCOMMIT}: 2 items, 2 to go" in said and f"\n{tables.TASKS[task].title}" in said
    items = samples(out, task)
    for item, gold in zip(items, GOLDS.get(task, [None] * 2), strict=True):
        assert 0 < item["tokens"] <= 8 and item["full"] >= item["partial"] > 0
        assert item["doc"]["question" if task != "piqa" else "goal"] in item["arguments"]["gen_args_0"]["arg_0"]
        assert gold in (item["target"], None)
        assert item.get("exact_match", "no verdict") in ([0.0, 1.0] if tables.TASKS[task].judged else ["no verdict"])
        assert ("f1" in item) == (task == "drop")
    (made,) = tables.read_runs(out)
    assert made.task == task and made.items[1]["full"] == items[1]["full"]

    real = Path(request.config.getoption("--bench_data") or "nowhere") / FILES[task]
    if real.exists():
        assert "2 items, 2 to go" in run(task, tmp_path / "real", "--limit", 2, task_file=real)
        assert len(list(getattr(docs, task)(**{task: real})["test"])) == tables.TASKS[task].n_official
        assert all(item["tokens"] for item in samples(tmp_path / "real", task))


def test_lm_evals_own_command_logs_the_same(run, weights, tmp_path, monkeypatch):
    run("gsm8k", tmp_path / "a")
    given = f"ckpt={weights}/cocommit,out={tmp_path}/b,gen_length=8 --device cpu --apply_chat_template --log_samples"
    task = f"{harness.FOLDER}/gsm8k.yaml --metadata gsm8k={tmp_path}/gsm8k/test.jsonl"
    words = f"run --model cocommit --model_args {given} --tasks {task} --output_path {tmp_path}/b/results.json"
    words += f" --batch_size auto --use_cache {tmp_path}/cache"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words.split()])
    cli_evaluate()
    cli_evaluate()  # out of the cache
    (a,), (b,) = tables.read_runs(tmp_path / "a"), tables.read_runs(tmp_path / "b")
    assert (a.task, a.settings, a.items) == (b.task, b.settings, b.items)


@pytest.mark.parametrize("answer, references, em, f1", [
    ("49", [["47"], ["49"]], 1, 1.0),
    ("ale, rum, gin", [["ale", "rum"]], 0, 0.67),
])  # fmt: skip
def test_spans_are_scored_by_lm_evals_code(answer, references, em, f1):
    assert rules.span_scores({"references": references}, [harness.Answer(answer, {})]) == {"exact_match": em, "f1": f1}


def test_a_reference_of_several_spans_is_read_both_ways(tmp_path):
    _, which = docs.read_drop(write_task(tmp_path, "drop"))
    assert which["references"] == [["ale and rum"], ["ale", "rum"]]


# --- a run
def test_killed_half_way_it_goes_on(run, tmp_path, monkeypatch):
    run("gsm8k", tmp_path / "a", "--batch_size", 2)
    path = tmp_path / "a" / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert "2 items, 1 to go" in run("gsm8k", tmp_path / "a")
    assert path.read_bytes() == whole  # one at a time as two together
    monkeypatch.setattr(harness, "generate", None)  # a finished run decodes nothing
    assert ", 0 to go" in run("gsm8k", tmp_path / "a")


def test_what_a_run_decodes_with_and_what_does_not_mix(run, weights, tmp_path):
    """The paper's decoder, of a base the released one; or a row of Table 2. Another one is refused."""
    run("gsm8k", tmp_path / "a")
    for name, flags, row in (
        ("base", ["--ckpt", weights / "base"], BASE),
        ("row", ["--row", "Stage B, gated edits"], "Stage B, gated edits"),
    ):
        run("gsm8k", tmp_path / name, *flags)
        assert read_json(tmp_path / name / "settings.json", "settings")["row"] == row
        assert "other settings: row" in run.fails("gsm8k", tmp_path / "a", *flags)
    assert "dtype (fp32, bf16)" in run.fails("gsm8k", tmp_path / "a", "--dtype", "bf16")
    assert "give each task once" in run.fails("gsm8k", tmp_path / "b", "--tasks", "piqa", "gsm8k")

    # other questions, or other golds
    path = tmp_path / "other.jsonl"
    for change in ({"question": "How many?"}, {"answer": "#### 7"}):
        path.write_text("".join(json.dumps(record | change) + "\n" for record in RECORDS["gsm8k"]))
        assert "answers another item 0 of gsm8k" in run.fails("gsm8k", tmp_path / "a", task_file=path)
    path.write_text("")
    assert "has no items" in run.fails("gsm8k", tmp_path / "a", task_file=path)


def test_stop_strings_and_what_the_model_cannot_do(weights, tmp_path, capsys):
    model = harness.CoCommit(weights / "cocommit", tmp_path / "out", gen_length=16, device="cpu")
    ((_, whole),) = model.decode({"": ("Hello", {"until": []})})
    ((_, cut),) = model.decode({"": ("Hello", {"until": whole[3], "temperature": 0.5, "do_sample": False})})
    assert capsys.readouterr().out.startswith("not read: temperature=0.5 (")
    assert cut == whole[:3].partition(whole[3])[0] and cut.cost == whole.cost
    with pytest.raises(Mistake, match="no log-likelihoods"):
        model.loglikelihood([])
    assert model.apply_chat_template([{"role": "user", "content": "Hi"}]).startswith("<role>SYSTEM</role>detailed")


def test_evalplus_judges_programs_in_a_clean_environment(run, tmp_path, monkeypatch):
    """The printed command, with a stand-in for EvalPlus that judges two samples."""
    out = tmp_path / "runs" / "he"
    text = run("humaneval", out)
    assert not any("correct" in item for item in tables.read_runs(out)[0].items.values())

    verdicts = [{"base_status": "pass", "plus_status": status} for status in ("pass", "fail")]
    result = {"eval": {f"HumanEval/90{i}": [verdict] for i, verdict in enumerate(verdicts)}}
    write_json(tmp_path / "result.json", result)
    stand_in = tmp_path / "bin" / "python"
    stand_in.parent.mkdir()
    judged = f"cp {tmp_path}/result.json samples-sanitized_eval_results.json"
    stand_in.write_text(f"#!/bin/sh\nenv >> seen; echo $@ >> seen; {judged}\n")
    stand_in.chmod(0o755)
    command = next(line for line in text.splitlines() if line.startswith("  cd "))
    environment = {"PATH": f"{stand_in.parent}:/usr/bin:/bin", "SOME_SECRET": "hush"}
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    assert [item["correct"] for item in tables.read_runs(out)[0].items.values()] == [True, False]

    (folder,) = out.glob("evalplus_humaneval_*")
    seen = (folder / "seen").read_text()
    sanitize = seen.index("-m evalplus.sanitize --samples samples.jsonl\n")
    assert sanitize < seen.index("-m evalplus.evaluate --dataset humaneval --samples samples-sanitized.jsonl\n")
    assert seen.count(f"HUMANEVAL_OVERRIDE_PATH={folder}/dataset.jsonl\n") == 2 and "hush" not in seen
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 2
