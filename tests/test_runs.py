"""Benchmark runs end to end on the golden checkpoint, tables from hand-made run files, EvalPlus, and the statistics.

pytest tests/test_runs.py           # CPU, under a minute
"""

import importlib.util
import json
import stat
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from common import command_line, refused
from test_benchmarks import code_record, write_task

import convert_weights
import evaluate
import runs
import tables
from benchmarks import TASKS
from checkpoint import load_model, save_adapter, save_model
from data import generator

GOLDEN = Path(__file__).parent / "data" / "golden_a"


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The golden checkpoint in our layout, with room for every prompt, and a random adapter for it."""
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as m:
        m.setattr("sys.argv", ["convert_weights.py", "--src", str(GOLDEN), "--out", str(folder / "base")])
        convert_weights.main()
    config = json.loads((folder / "base" / "config.json").read_text())
    (folder / "base" / "config.json").write_text(json.dumps(config | {"max_len": 1024, "block_length": 8}))
    model = load_model(folder / "base", "cpu", torch.float32, n_last=2)
    model.add_lora(2, 4, generator("adapter"))
    for name, p in model.named_parameters():
        if "lora_" in name or name == "markers":
            p.data.copy_(torch.randn(p.shape, generator=generator("adapter", name)) * 0.3)
    save_adapter(model, folder / "ours", {"base": "anywhere", "lora_r": 2, "lora_alpha": 4, "lora_scope": "all"})
    return folder


@pytest.fixture
def run(golden, tmp_path, monkeypatch, capsys):
    """`run(task, out, *flags)` -> (exit code, stdout, stderr) of a short benchmark run over the golden checkpoint."""

    def call(task: str, out: Path, *flags: object) -> tuple[int, str, str]:
        argv = ["--task", task, "--task_file", write_task(tmp_path, task), "--ckpt", golden / "base", "--out", out]
        argv += ["--gen_length", 16, "--device", "cpu", *flags]
        return command_line(evaluate, monkeypatch, capsys, *argv)

    return call


def lines(path: Path) -> list[dict]:
    """The lines of a run file without what a clock says, and without how many prompts ran beside."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in ("seconds", "batch")} for r in records]


# ---------------------------------------------------------------------------------------------------------------------
# runs


@pytest.mark.parametrize("task", TASKS)
def test_a_task_end_to_end_killed_half_way(task, run, golden, tmp_path, monkeypatch):
    ours = ["--adapter", golden / "ours"]
    code, out, err = run(task, tmp_path / "a.jsonl", *ours)
    assert code == 0, err
    assert "chat template" in out and "K = 1, n = 2, tau_m2t 0.7, tau_t2t 0.0" in out
    header, *items = lines(tmp_path / "a.jsonl")
    assert len(items) == len(TASKS[task].load(write_task(tmp_path, task))) > 0
    for item in items:
        assert 0 < item["tokens"] <= 16 and item["nfe"]["full"] >= item["nfe"]["partial"] > 0
        assert item["settings"] == header["hash"] and (item["correct"] is None) == (TASKS[task].correct is None)
    data = (tmp_path / "a.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for kept in (first // 2, first, first + 20, len(data) - 30):  # in the header, after it, in the first, in the last
        (tmp_path / "b.jsonl").write_bytes(data[:kept])
        assert run(task, tmp_path / "b.jsonl", *ours)[0] == 0
        assert lines(tmp_path / "b.jsonl") == [header, *items]
    with monkeypatch.context() as m:  # a finished run decodes nothing
        m.setattr(runs, "generate", None)
        assert ", 0 to go" in run(task, tmp_path / "a.jsonl", *ours)[1]
    assert (tmp_path / "a.jsonl").read_bytes() == data


def test_several_prompts_at_once_and_shards_are_the_whole(run, tmp_path):
    assert run("gsm8k", tmp_path / "whole.jsonl", "--n_rounds", 1)[0] == 0
    assert run("gsm8k", tmp_path / "batch.jsonl", "--n_rounds", 1, "--batch", 2)[0] == 0
    assert lines(tmp_path / "batch.jsonl") == lines(tmp_path / "whole.jsonl")
    for part in ("1/2", "2/2"):
        assert run("gsm8k", tmp_path / f"parts/{part[0]}.jsonl", "--n_rounds", 1, "--shard", part)[0] == 0
    (whole,) = tables.read_runs(tmp_path / "parts")
    assert len(whole.items) == 3 and tables.tally(whole) == tables.tally(tables.read_run(tmp_path / "whole.jsonl")[0])
    assert run("gsm8k", tmp_path / "few.jsonl", "--n_rounds", 1, "--limit", 1)[0] == 0
    assert lines(tmp_path / "few.jsonl") == lines(tmp_path / "whole.jsonl")[:2]
    assert run("gsm8k", tmp_path / "few.jsonl", "--n_rounds", 1)[0] == 0  # a limit is no setting: the run grows
    assert lines(tmp_path / "few.jsonl") == lines(tmp_path / "whole.jsonl")


def test_what_a_run_decodes_with(run, golden, tmp_path):
    """Base: the released gate. With Stage B: edits on any disagreement. Flags come first."""
    cases = {
        "base": ([], (0, 0.7, 0.5)),
        "ours": (["--adapter", golden / "ours"], (1, 0.7, 0.0)),
        "off": (["--adapter", golden / "ours", "--n_rounds", 0], (0, 0.7, 0.5)),
        "gated": (["--adapter", golden / "ours", "--tau_t2t", 0.5], (1, 0.7, 0.5)),
        "no edits": (["--tau_t2t", "none", "--tau_m2t", 0.3], (0, 0.3, None)),
        "speed": (["--mode", "s"], (0, 0.5, 0.0)),
    }
    for name, (flags, expected) in cases.items():
        assert run("gsm8k", tmp_path / f"{name}.jsonl", "--limit", 1, *flags)[0] == 0
        d = lines(tmp_path / f"{name}.jsonl")[0]["settings"]["decoding"]
        assert (d["n_rounds"], d["tau_m2t"], d["tau_t2t"]) == expected
        assert (d["max_post_steps"], d["eos_early_stop"], d["temperature"]) == (16, True, 0.0)
    parser = evaluate.Parser("")
    runs.add_arguments(parser)
    assert parser.get_default("gen_length") == 16384 and parser.get_default("batch") == 1


def test_other_settings_do_not_mix(run, golden, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a.jsonl"
    assert run("gpqa", out)[0] == 0
    before = out.read_bytes()
    other = tmp_path / "base"
    model = load_model(golden / "base", "cpu", torch.float32)
    model.lm_head.weight.data[0, 0] += 1
    runs.replace_file(other / "tokenizer.json", lambda p: p.write_bytes((GOLDEN / "tokenizer.json").read_bytes()))
    save_model(model, other)
    for flags, word in (
        (["--tau_m2t", 0.5], "decoding.tau_m2t"),
        (["--adapter", golden / "ours"], "adapter"),
        (["--option", "seed=1"], "questions"),
        (["--dtype", "bf16"], "dtype"),
        (["--gen_length", 8], "gen_length"),
        (["--ckpt", other], "model.weights"),
    ):
        code, _, err = run("gpqa", out, *flags)
        assert code == 2 and "other settings" in err and word in err and len(err.splitlines()) == 1
    assert out.read_bytes() == before


def test_prompts_that_hardly_fit_or_not_at_all(run, golden, tmp_path):
    config = golden / "base" / "config.json"
    before = config.read_text()
    length = len(TASKS["gsm8k"].load(write_task(tmp_path, "gsm8k"))[0].prompt)
    try:
        found = {}
        for size in (64, 256):  # positions; the byte-like golden tokenizer spends about one token a character
            config.write_text(json.dumps(json.loads(before) | {"max_len": size}))
            code, out, _ = run("gsm8k", tmp_path / f"{size}.jsonl", "--gen_length", 200)
            assert code == 0 and out.count("note:") == 1 and length > 64
            found[size] = lines(tmp_path / f"{size}.jsonl")[1:]
    finally:
        config.write_text(before)
    assert all(r["tokens"] == 0 and r["correct"] is False and "no room" in r["note"] for r in found[64])
    assert all(0 < r["tokens"] < 200 and "clipped" in r["note"] for r in found[256])


def test_samples_for_evalplus_are_handed_over(run, tmp_path, monkeypatch):
    out, folder = tmp_path / "runs" / "he.jsonl", tmp_path / "runs" / "he.evalplus"
    code, text, _ = run("humaneval", out, "--limit", 1)
    assert code == 0 and "-m evalplus.evaluate --dataset humaneval --samples samples.jsonl" in text
    assert [json.loads(x)["task_id"] for x in (folder / "dataset.jsonl").read_text().splitlines()] == ["HumanEval/900"]
    program = json.loads((folder / "samples.jsonl").read_text())["solution"]
    verdict = {"solution": program, "base_status": "pass", "plus_status": "pass"}
    result = folder / "samples_eval_results.json"
    for told, expected in ((verdict, True), (verdict | {"plus_status": "fail"}, False)):
        result.write_text(json.dumps({"eval": {"HumanEval/900": [told]}}))
        (scored,) = tables.read_runs(tmp_path / "runs")
        assert scored.items["HumanEval/900"]["correct"] is expected
    result.write_text(json.dumps({"eval": {"HumanEval/900": [verdict | {"solution": "another"}]}}))
    assert tables.read_runs(tmp_path / "runs")[0].items["HumanEval/900"]["correct"] is None
    assert run("humaneval", out)[0] == 0 and not result.exists()  # more samples: EvalPlus must not report the old ones
    seen = []
    scores = {"base": 1.0, "plus": 0.5, "per_task": {"a": {"plus": True}, "b": {"plus": False}}, "notes": ["mind 32"]}
    monkeypatch.setattr(runs, "score_with_evalplus", lambda *args: seen.append(args) or scores)
    _, text, _ = run("humaneval", out, "--score")
    assert seen == [(folder / "samples.jsonl", "humaneval", folder / "dataset.jsonl")]
    assert "pass@1 50.00 %" in text and "note: mind 32" in text

    def missing(*_):
        raise runs.MissingEvalplus("cd there && python -m evalplus.evaluate")

    monkeypatch.setattr(runs, "score_with_evalplus", missing)
    (folder / "samples.jsonl").unlink()
    code, _, err = run("humaneval", out, "--score")
    assert code == 2 and err.startswith("error: EvalPlus is not installed") and "cd there" in err
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 2


MISTAKES = {
    "no task file": (["--task", "gsm8k", "--ckpt", "x", "--out", "a.jsonl"], "--task_file"),
    "no out": (["--task", "gsm8k", "--ckpt", "x", "--task_file", "a"], "--out"),
    "unknown task": (["--task", "mmlu", "--ckpt", "x"], "mmlu"),
    "no checkpoint": (["--task", "gsm8k"], "--ckpt"),
    "nothing": ([], "--task"),
    "two things": (["--task", "gsm8k", "--data", "modes", "--ckpt", "x"], "--data"),
    "runs without a table": (["--runs", "nowhere"], "--table"),
    "table of nothing": (["--table", "main", "--runs", "nowhere"], "no run file"),
    "stray flag": (["--data", "modes", "--ckpt", "x", "--limit", 3], "--limit"),
}


@pytest.mark.parametrize("argv, word", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_on_the_command_line(argv, word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert word in refused(evaluate, monkeypatch, capsys, *argv)
    assert not list(tmp_path.iterdir())


def test_mistakes_of_a_run(run, tmp_path):
    out = tmp_path / "a.jsonl"
    for flags, word in (
        (["--task_file", tmp_path / "missing"], "missing"),
        (["--option", "repeats=4"], "gsm8k takes template"),
        (["--option", "template=nowhere"], "nowhere"),
        (["--shard", "0/2"], "--shard 0/2"),
        (["--limit", -1], "--limit -1"),
        (["--batch", 0], "--batch"),
        (["--out", tmp_path / "a.json"], "*.jsonl"),
        (["--n_rounds", 5], "--n_rounds 5"),
        (["--score"], "--score"),
        (["--ckpt", tmp_path], "config"),
    ):
        code, _, err = run("gsm8k", out, *flags)
        assert code == 2 and word in err and len(err.splitlines()) == 1, (flags, err)
    assert not out.exists()
    code, _, err = run("gpqa", out, "--option", "repeats=many")
    assert code == 2 and "repeats=many" in err


def test_damaged_run_files_are_refused_and_left_alone(run, tmp_path):
    out = tmp_path / "a.jsonl"
    assert run("gsm8k", out)[0] == 0
    header, first, *rest = out.read_bytes().splitlines(keepends=True)
    for damaged, word in (
        (b"my notes", "no run file"),
        (b'{"a": 1}\n', "no run file"),
        (header.replace(b'"gen_length": 16', b'"gen_length": 32') + first, ":1 "),
        (header + first[:-20] + b"\n" + rest[0], ":2 "),
        (header + first + rest[0].replace(json.loads(first)["settings"].encode(), b"0" * 16), ":3 "),
        (header + b'{"id": "gsm8k/0"}\n', ":2 "),
    ):
        out.write_bytes(damaged)
        code, _, err = run("gsm8k", out)
        assert code == 2 and "a.jsonl" in err and word in err and len(err.splitlines()) == 1, (damaged[:40], err)
        assert out.read_bytes() == damaged


# ---------------------------------------------------------------------------------------------------------------------
# tables, from run files by hand


def write_run(path: Path, task: str, correct: list, full: int, n_last: int = 3, adapter: bool = True, **decoding):
    """A run file of items 0, 1, ... with 10 tokens each; 20 layers; partial = full and one commit in Stage B's runs."""
    d = asdict(replace(tables.Q, **{"tau_t2t": 0.0, "n_rounds": int(adapter)} | decoding))
    model = {"n_last": n_last, "n_layer": 20, "n_rounds": 1}
    settings = {"task": task, "model": model, "adapter": {"n": n_last} if adapter else None, "decoding": d}
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
    code, out, err = command_line(evaluate, monkeypatch, capsys, "--table", kind, "--runs", folder)
    assert code == 0, err
    cells = [[c.strip() for c in line.replace("| ", "  ").split("  ") if c.strip()] for line in out.splitlines()]
    return {c[0]: c[1:] for c in cells if c} | {"out": [out]}


def test_table_1_by_hand(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base.jsonl", "gsm8k", WORSE, 3, **BASE)
    write_run(tmp_path / "sub" / "ours.jsonl", "gsm8k", BETTER, 4)
    write_run(tmp_path / "six.jsonl", "gsm8k", WORSE, 4, n_last=6)  # Table 3's, not Table 1's
    rows = printed("main", tmp_path, monkeypatch, capsys)
    low, high = (100 * x for x in tables.wilson(5, 20))
    # 3 full and one commit for 10 tokens; with Stage B 4 + 1 + 4 * 3/20
    assert rows["GSM8K base"] == ["20/1319", "25.00", f"{low:.1f} .. {high:.1f}", "-", "-", "-", "0.300", "0.400"] + [
        "89.61", "-", "-", "0.26"]  # fmt: skip
    ours = rows["GSM8K ours"]
    assert ours[:2] == ["20/1319", "65.00"] and ours[3] == "+40.00" and ours[6:8] == ["0.400", "0.560"]
    assert ours[5] == f"{22 / 1024:.3f}"  # McNemar: 1 against 9
    # of 20: nine +1, one -1, mean 0.4, deviation sqrt(10/20 - 0.16) / sqrt(20) = 0.130: 0.4 -+ 0.256
    low, high = (float(x) for x in ours[4].split(" .. "))
    assert 12 <= low <= 17 and 63 <= high <= 68
    # sqrt(.8961 * .1039 + .9113 * .0887) / sqrt(1319) = 0.011475
    assert ours[8:] == ["91.13", "+1.52", "+-2.25", "0.34"]
    assert rows["PIQA ours"] == ["-"] * 8 + ["84.60", "+3.70", "+-2.44", "0.44"]
    assert "+0.38 points = 5 of 1319 GSM8K answers" in rows["out"][0] and "0.062" in rows["out"][0]
    assert len([name for name in rows if name.endswith((" base", " ours"))]) == 14


def test_notes_and_ambiguity(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "base.jsonl", "mbpp", [None] * 4, 3, **BASE)
    write_run(tmp_path / "ours.jsonl", "mbpp", [None] * 4, 3, gen_length=64)
    out = printed("main", tmp_path, monkeypatch, capsys)["out"][0]
    assert "MBPP+: items without EvalPlus's verdict" in out and "gen_length [64, 16384]" in out
    write_run(tmp_path / "again.jsonl", "mbpp", [None] * 4, 3, gen_length=32)
    line = refused(evaluate, monkeypatch, capsys, "--table", "main", "--runs", tmp_path)
    assert "2 runs of mbpp" in line and "decoding.gen_length" in line


def test_only_equal_prompts_are_paired(tmp_path):
    write_run(tmp_path / "base.jsonl", "drop", [False, False, True, None], 3, **BASE)
    write_run(tmp_path / "ours.jsonl", "drop", [True, True, True, True], 3)
    ours = tmp_path / "ours.jsonl"
    ours.write_text(ours.read_text().replace('"p0"', '"another"'))
    ours, base = (tables.pick(tables.read_runs(tmp_path), "drop", row) for row in (tables.OURS, tables.BASE))
    assert tables.paired(ours, base)[0] == 0.5  # items 1 and 2; 3 is not judged
    assert tables.paired(replace(ours, items={}), base) is None


def test_repeats_of_a_question_are_no_independent_items(tmp_path):
    write_run(tmp_path / "base.jsonl", "gpqa", [False] * 8, 3, **BASE)
    write_run(tmp_path / "ours.jsonl", "gpqa", [True] * 4 + [False] * 4, 3)
    for path in tmp_path.iterdir():  # two questions, four orders of options each
        text = path.read_text()
        for i in range(8):
            text = text.replace(f'"gpqa/{i}"', f'"q{i // 4}#{i % 4}"')
        path.write_text(text)
    ours, base = (tables.pick(tables.read_runs(tmp_path), "gpqa", row) for row in (tables.OURS, tables.BASE))
    delta, low, high, p = tables.paired(ours, base)
    assert (delta, low, high, p) == (0.5, 0.0, 1.0, None)  # eight independent items would say 0.125 .. 0.875


def test_table_2_by_hand(tmp_path, monkeypatch, capsys):
    variants = {name: (weights, changes) for name, weights, changes, *_ in tables.MECHANISM}
    for i, (weights, changes) in enumerate(variants.values()):
        d = {"tau_t2t": 0.5, "n_rounds": 1} | changes
        right = [True] * (i + 1) + [False] * (19 - i)
        write_run(tmp_path / f"{i}.jsonl", "gsm8k", right, i + 1, adapter=weights == "ours", **d)
    rows = printed("mechanism", tmp_path, monkeypatch, capsys)
    for i, name in enumerate(variants):
        assert rows[name][1] == f"{5 * (i + 1):.2f}" and rows[name][6] == f"{(i + 1) / 10:.3f}"
        assert rows[name][3] == ("-" if i == 3 else f"{5 * (i - 3):+.2f}")  # against the default, the fourth row
    assert rows["all masks at once"][5] == f"{2 / 2**13:.3f}"  # 13 won, none lost
    assert rows["B fills, edits off"][8:] == ["88.40", "-2.73", "+-2.31", "0.30"]
    assert rows["released, tau_m2t 0.3"][8:10] == ["79.15", "-11.98"]
    sums = [round(sum(column), 2) for column in zip(*(row[3:] for row in tables.MECHANISM), strict=True)]
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
# EvalPlus


def test_samples_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "samples.jsonl"
    runs.write_samples(path, [("HumanEval/0", "x = '§'\n"), ("HumanEval/1", None)])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"task_id": "HumanEval/0", "solution": "x = '§'\n"}, {"task_id": "HumanEval/1", "solution": ""}]

    def interrupted():
        yield "HumanEval/0", "y"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.write_samples(path, interrupted())
    assert len(path.read_text().splitlines()) == 2 and [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]
    with pytest.raises(ValueError, match="rename"):
        runs.write_samples(tmp_path / "samples.json", [])


def stand_in(folder: Path, script: str) -> str:
    """A program in the place of the Python that has EvalPlus."""
    path = folder / "stand_in"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_harness_gets_a_clean_environment_and_its_verdicts_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALPLUS_TIMEOUT_PER_TASK", "5")
    monkeypatch.setenv("SOME_SECRET", "hush")
    samples, stale = tmp_path / "s.jsonl", tmp_path / "s_eval_results.json"
    stale.write_text('{"eval": {"HumanEval/0": [{"base_status": "pass", "plus_status": "pass"}]}}')
    told = {"a": ("pass", "pass"), "b": ("pass", "fail"), "c": ("fail", "pass"), "HumanEval/32": ("timeout", "fail")}
    evaluated = {name: [{"base_status": base, "plus_status": plus}] for name, (base, plus) in told.items()}
    python = stand_in(
        tmp_path,
        f"seen = dict(os.environ), sys.argv[1:], os.getcwd(), sys.stdin.read(), os.path.exists({str(stale)!r})\n"
        "json.dump(seen, open('seen.json', 'w'))\n"
        f"json.dump({{'eval': {evaluated}}}, open('s_eval_results.json', 'w'))\n",
    )
    scores = runs.score_with_evalplus(samples, "humaneval", tmp_path / "data.jsonl", python)
    assert (scores["base"], scores["plus"]) == (0.5, 0.25)
    assert scores["per_task"]["b"] == {"base": True, "plus": False}
    assert scores["per_task"]["c"] == {"base": False, "plus": False}  # plus asks for the base tests too
    assert "HumanEval/32" in scores["notes"][0]
    env, argv, folder, read, stale_seen = json.loads((tmp_path / "seen.json").read_text())
    assert argv == ["-m", "evalplus.evaluate", "--dataset", "humaneval", "--samples", "s.jsonl"]
    assert (folder, read, stale_seen) == (str(tmp_path), "", False)
    assert env["HUMANEVAL_OVERRIDE_PATH"] == str(tmp_path / "data.jsonl")
    assert env["EVALPLUS_MAX_MEMORY_BYTES"] == "8589934592"
    assert not {"EVALPLUS_TIMEOUT_PER_TASK", "SOME_SECRET"} & set(env)
    assert env["HOME"] == env["XDG_CACHE_HOME"] and not Path(env["HOME"]).exists()  # private, and gone afterwards


def test_a_harness_that_gives_no_result_is_quoted(tmp_path):
    python = stand_in(tmp_path, "sys.exit('AssertionError: Missing problems in samples')\n")
    with pytest.raises(ValueError, match="Missing problems in samples"):
        runs.score_with_evalplus(tmp_path / "s.jsonl", "mbpp", tmp_path / "data.jsonl", python)


if importlib.util.find_spec("evalplus"):

    @pytest.mark.parametrize("dataset, prefix", [("humaneval", "HumanEval/90"), ("mbpp", "Mbpp/90")])
    def test_evalplus_end_to_end(dataset, prefix, tmp_path):
        header = '"""\n{}\n"""\ndef {}(x):\n' if dataset == "mbpp" else 'def {1}(x):\n    """{0}"""\n'
        rows = [
            code_record(f"{prefix}0", header.format("2x", "twice"), "twice", "    return 2 * x\n", [[-3]]),
            code_record(f"{prefix}1", header.format("|x|", "size"), "size", "    return abs(x)\n", [[-3]]),
        ]
        data, samples = tmp_path / "data.jsonl", tmp_path / "samples.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        right, base_only = "def twice(x):\n    return x + x\n", "def size(x):\n    return x\n"
        runs.write_samples(samples, [(f"{prefix}0", right), (f"{prefix}1", base_only)])
        scores = runs.score_with_evalplus(samples, dataset, data)
        assert scores["per_task"] == {
            f"{prefix}0": {"base": True, "plus": True},
            f"{prefix}1": {"base": True, "plus": False},  # right for 1 and 2, wrong for -3
        }
        assert (scores["base"], scores["plus"], scores["notes"]) == (1.0, 0.5, [])

else:

    def test_without_evalplus_the_command_is_given(tmp_path):
        with pytest.raises(runs.MissingEvalplus, match="pip install evalplus==0.3.1") as caught:
            runs.score_with_evalplus(tmp_path / "s.jsonl", "mbpp", tmp_path / "data.jsonl")
        command = caught.value.command
        assert command.startswith(
            f"cd {tmp_path} && MBPP_OVERRIDE_PATH={tmp_path}/data.jsonl EVALPLUS_MAX_MEMORY_BYTES="
        )
        assert command.endswith("-m evalplus.evaluate --dataset mbpp --samples s.jsonl")


# ---------------------------------------------------------------------------------------------------------------------
# statistics


def test_wilson():
    # 8 of 10, z = 1.96: (0.8 + 3.8415/20) / 1.38415 = 0.71674, 1.96 * sqrt(0.016 + 3.8415/400) / 1.38415 = 0.22658
    assert tables.wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=2e-5)
    assert tables.wilson(0, 10) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)  # z^2 / (n + z^2)
    assert tables.wilson(10, 10) == pytest.approx((10 / 13.841459, 1.0), abs=1e-6)


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
