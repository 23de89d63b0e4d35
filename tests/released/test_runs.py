"""Benchmark runs end to end on the golden checkpoint, and EvalPlus.

pytest tests/released/test_runs.py           # CPU, under a minute
"""

import importlib.util
import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from common import command_line, refused
from test_benchmarks import code_record, write_task

import convert_weights
from checkpoint import load_model, save_adapter, save_model
from lib.util import generator
from released import run as runs
from released import tables
from released.benchmarks import TASKS

GOLDEN = Path(__file__).parent.parent / "data" / "golden_a"


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The golden checkpoint in our layout, with room for every prompt, and a random adapter for it."""
    folder = tmp_path_factory.mktemp("golden")
    convert_weights.convert(GOLDEN, folder / "base")
    config = json.loads((folder / "base" / "config.json").read_text())
    (folder / "base" / "config.json").write_text(json.dumps(config | {"max_len": 1024, "block_length": 8}))
    model = load_model(folder / "base", "cpu", torch.float32, n_last=2)
    model.add_lora(2, 4, generator("adapter"))
    for name, p in model.named_parameters():
        if "lora_" in name or name == "markers":
            p.data.copy_(torch.randn(p.shape, generator=generator("adapter", name)) * 0.3)
    save_adapter(model, folder / "cocommit", {"base": str(folder / "base"), "lora_r": 2, "lora_alpha": 4})
    return folder


@pytest.fixture
def run(golden, tmp_path, monkeypatch, capsys):
    """`run(task, out, *flags)` -> (exit code, stdout, stderr) of a short benchmark run over the golden checkpoint."""

    def call(task: str, out: Path, *flags: object) -> tuple[int, str, str]:
        argv = ["--task", task, "--task_file", write_task(tmp_path, task), "--ckpt", golden / "base", "--out", out]
        argv += ["--gen_length", 16, "--device", "cpu", *flags]
        return command_line(runs, monkeypatch, capsys, *argv)

    return call


def lines(path: Path) -> list[dict]:
    """The lines of a run file without what a clock says, and without how many prompts ran beside."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in ("seconds", "batch")} for r in records]


# ---------------------------------------------------------------------------------------------------------------------
# runs


@pytest.mark.parametrize("task", TASKS)
def test_a_task_end_to_end_killed_half_way(task, run, golden, tmp_path, monkeypatch):
    cocommit = ["--adapter", golden / "cocommit"]
    code, out, err = run(task, tmp_path / "a.jsonl", *cocommit)
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
        assert run(task, tmp_path / "b.jsonl", *cocommit)[0] == 0
        assert lines(tmp_path / "b.jsonl") == [header, *items]
    with monkeypatch.context() as m:  # a finished run decodes nothing
        m.setattr(runs, "generate", None)
        assert ", 0 to go" in run(task, tmp_path / "a.jsonl", *cocommit)[1]
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
        "cocommit": (["--adapter", golden / "cocommit"], (1, 0.7, 0.0)),
        "off": (["--adapter", golden / "cocommit", "--n_rounds", 0], (0, 0.7, 0.5)),
        "gated": (["--adapter", golden / "cocommit", "--tau_t2t", 0.5], (1, 0.7, 0.5)),
        "no edits": (["--tau_t2t", "none", "--tau_m2t", 0.3], (0, 0.3, None)),
        "speed": (["--mode", "s"], (0, 0.5, 0.0)),
        "from A": (["--adapter", golden / "cocommit", "--edit_from", "A", "--select", "entropy"], (1, 0.7, 0.0)),
    }
    for name, (flags, expected) in cases.items():
        assert run("gsm8k", tmp_path / f"{name}.jsonl", "--limit", 1, *flags)[0] == 0
        d = lines(tmp_path / f"{name}.jsonl")[0]["settings"]["decoding"]
        assert (d["n_rounds"], d["tau_m2t"], d["tau_t2t"]) == expected
        assert (d["max_post_steps"], d["eos_early_stop"], d["temperature"]) == (16, True, 0.0)
    assert (d["edit_from"], d["fill_from"], d["select"], d["marker"]) == ("A", "B", "entropy", True)
    parser = runs.build_parser()
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
        (["--adapter", golden / "cocommit"], "adapter"),
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
    "no checkpoint": (["--task", "gsm8k", "--task_file", "a", "--out", "a.jsonl"], "--ckpt"),
    "nothing": ([], "--task"),
    "stray flag": (["--data", "modes", "--ckpt", "x", "--limit", 3], "--task"),
}


@pytest.mark.parametrize("argv, word", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_on_the_command_line(argv, word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert word in refused(runs, monkeypatch, capsys, *argv)
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
