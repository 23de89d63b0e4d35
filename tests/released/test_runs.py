"""Benchmark runs end to end on the golden checkpoint.

pytest tests/released/test_runs.py           # CPU, under a minute
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from common import command_line
from test_benchmarks import write_task

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
    change_config(folder / "base", max_len=1024, block_length=8)
    model = load_model(folder / "base", "cpu", torch.float32, n_last=2)
    model.add_lora(2, 4, generator("adapter"))
    for name, p in model.named_parameters():
        if "lora_" in name or name == "markers":
            p.data.copy_(torch.randn(p.shape, generator=generator("adapter", name)) * 0.3)
    save_adapter(model, folder / "cocommit", folder / "base", {"lora_r": 2, "lora_alpha": 4})
    return folder


def change_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.fixture
def run(golden, tmp_path, monkeypatch, capsys):
    """`run(task, out, *flags)` -> (exit code, stdout, stderr) of a short benchmark run with the adapter."""

    def call(task: str, out: Path, *flags: object) -> tuple[int, str, str]:
        argv = ["--task", task, "--task_file", write_task(tmp_path, task), "--ckpt", golden / "cocommit", "--out", out]
        argv += ["--gen_length", 16, "--device", "cpu", *flags]
        return command_line(runs, monkeypatch, capsys, *argv)

    return call


def lines(path: Path) -> list[dict]:
    """The lines of a run file without what a clock says, and without how many prompts ran beside."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in ("seconds", "batch")} for r in records]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_end_to_end(task, run, tmp_path):
    code, out, err = run(task, tmp_path / "a.jsonl")
    assert code == 0, err
    assert "chat template" in out and "K = 1, n = 2, tau_m2t 0.7, tau_t2t 0.0" in out
    header, *items = lines(tmp_path / "a.jsonl")
    assert len(items) == len(TASKS[task].load(write_task(tmp_path, task))) > 0
    for item in items:
        assert 0 < item["tokens"] <= 16 and item["nfe"]["full"] >= item["nfe"]["partial"] > 0
        assert item["settings"] == header["hash"] and (item["correct"] is None) == (TASKS[task].right is None)


def test_killed_half_way_it_goes_on(run, tmp_path, monkeypatch):
    assert run("gsm8k", tmp_path / "a.jsonl")[0] == 0
    whole = lines(tmp_path / "a.jsonl")
    data = (tmp_path / "a.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for kept in (first // 2, first + 20, len(data) - 30):  # in the header, in the first item, in the last
        (tmp_path / "b.jsonl").write_bytes(data[:kept])
        assert run("gsm8k", tmp_path / "b.jsonl")[0] == 0
        assert lines(tmp_path / "b.jsonl") == whole
    monkeypatch.setattr(runs, "generate", None)  # a finished run decodes nothing
    assert ", 0 to go" in run("gsm8k", tmp_path / "a.jsonl")[1]
    assert (tmp_path / "a.jsonl").read_bytes() == data


def test_several_prompts_at_once_and_shards_are_the_whole(run, tmp_path):
    assert run("gsm8k", tmp_path / "whole.jsonl")[0] == 0
    assert run("gsm8k", tmp_path / "batch.jsonl", "--batch", 2)[0] == 0
    assert lines(tmp_path / "batch.jsonl") == lines(tmp_path / "whole.jsonl")
    for part in ("1/2", "2/2"):
        assert run("gsm8k", tmp_path / f"parts/{part[0]}.jsonl", "--shard", part)[0] == 0
    (whole,) = tables.read_runs(tmp_path / "parts")
    assert len(whole.items) == 3 and tables.tally(whole) == tables.tally(tables.read_run(tmp_path / "whole.jsonl")[0])
    assert run("gsm8k", tmp_path / "few.jsonl", "--limit", 1)[0] == 0
    assert lines(tmp_path / "few.jsonl") == lines(tmp_path / "whole.jsonl")[:2]
    assert run("gsm8k", tmp_path / "few.jsonl")[0] == 0  # a limit is no setting: the run grows
    assert lines(tmp_path / "few.jsonl") == lines(tmp_path / "whole.jsonl")


def test_what_a_run_decodes_with(run, golden, tmp_path):
    """Base: the released gate. With Stage B: edits on any disagreement. Flags come first."""
    cases = {
        "base": (["--ckpt", golden / "base"], (0, 0.7, 0.5)),
        "cocommit": ([], (1, 0.7, 0.0)),
        "off": (["--n_rounds", 0], (0, 0.7, 0.5)),
        "gated": (["--tau_t2t", 0.5], (1, 0.7, 0.5)),
        "no edits": (["--tau_t2t", "none", "--tau_m2t", 0.3], (1, 0.3, None)),
        "from A": (["--edit_from", "A", "--select", "entropy"], (1, 0.7, 0.0)),
    }
    for name, (flags, expected) in cases.items():
        code, _, err = run("gsm8k", tmp_path / f"{name}.jsonl", "--limit", 1, *flags)
        assert code == 0, err
        d = lines(tmp_path / f"{name}.jsonl")[0]["settings"]["decoding"]
        assert (d["n_rounds"], d["tau_m2t"], d["tau_t2t"]) == expected
        assert (d["max_post_steps"], d["eos_early_stop"], d["temperature"]) == (16, True, 0.0)
    assert (d["edit_from"], d["fill_from"], d["select"], d["marker"]) == ("A", "B", "entropy", True)
    parser = runs.build_parser()
    assert parser.get_default("gen_length") == 16384 and parser.get_default("batch") == 1


def test_other_settings_do_not_mix(run, golden, tmp_path):
    out = tmp_path / "a.jsonl"
    assert run("gpqa", out, "--ckpt", golden / "base")[0] == 0
    before = out.read_bytes()
    other = tmp_path / "base"
    model = load_model(golden / "base", "cpu", torch.float32)
    model.lm_head.weight.data[0, 0] += 1
    runs.replace_file(other / "tokenizer.json", lambda p: p.write_bytes((GOLDEN / "tokenizer.json").read_bytes()))
    save_model(model, other)
    for flags, word in (
        (["--tau_m2t", 0.5], "decoding.tau_m2t"),
        (["--ckpt", golden / "cocommit"], "adapter"),
        (["--option", "seed=1"], "questions"),
        (["--dtype", "bf16"], "dtype"),
        (["--ckpt", other], "model.weights"),
    ):
        code, _, err = run("gpqa", out, "--ckpt", golden / "base", *flags)
        assert code == 2 and "other settings" in err and word in err and len(err.splitlines()) == 1
    # nor is what is no run of these settings touched
    header, first, *_ = before.splitlines(keepends=True)
    for damaged, word in (
        (b"my notes", "no run file"),
        (header + first[:-20] + b"\n", "run file"),
        (header + first.replace(json.loads(first)["settings"].encode(), b"0" * 16), "another run"),
    ):
        out.write_bytes(damaged)
        code, _, err = run("gpqa", out, "--ckpt", golden / "base")
        assert code == 2 and word in err and len(err.splitlines()) == 1
        assert out.read_bytes() == damaged


def test_samples_for_evalplus_are_handed_over(run, tmp_path):
    out, folder = tmp_path / "runs" / "he.jsonl", tmp_path / "runs" / "he.evalplus"
    code, text, _ = run("humaneval", out, "--limit", 1)
    assert code == 0
    assert [json.loads(x)["task_id"] for x in (folder / "dataset.jsonl").read_text().splitlines()] == ["HumanEval/900"]

    # a verdict counts for the very program that it is about
    program = json.loads((folder / "samples.jsonl").read_text())["solution"]
    verdict = {"solution": program, "base_status": "pass", "plus_status": "pass"}
    for told, expected in (
        (verdict, True),
        (verdict | {"plus_status": "fail"}, False),
        (verdict | {"solution": "another"}, None),
    ):
        (folder / "samples_eval_results.json").write_text(json.dumps({"eval": {"HumanEval/900": [told]}}))
        (scored,) = tables.read_runs(tmp_path / "runs")
        assert scored.items["HumanEval/900"]["correct"] is expected

    # the printed command, with a stand-in for EvalPlus: a clean environment, and no old result
    stand_in = tmp_path / "runs" / "bin"
    stand_in.mkdir()
    (stand_in / "python").write_text("#!/bin/sh\nenv > seen; ls >> seen; echo $@ >> seen\n")
    (stand_in / "python").chmod(0o755)
    command = next(line for line in text.splitlines() if line.startswith("  cd "))
    environment = {"PATH": f"{stand_in}:/usr/bin:/bin", "SOME_SECRET": "hush", "EVALPLUS_TIMEOUT_PER_TASK": "5"}
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    seen = (folder / "seen").read_text()
    assert "-m evalplus.evaluate --dataset humaneval --samples samples.jsonl" in seen
    assert f"HUMANEVAL_OVERRIDE_PATH={folder}/dataset.jsonl" in seen and "EVALPLUS_MAX_MEMORY_BYTES=8589934592" in seen
    assert "hush" not in seen and "TIMEOUT" not in seen and "eval_results" not in seen


def test_mistakes_of_a_run(run, tmp_path):
    out = tmp_path / "a.jsonl"
    for flags, word in (
        (["--option", "repeats=4"], "gsm8k takes template"),
        (["--option", "template=nowhere"], "nowhere"),
        (["--shard", "0/2"], "0/2"),
        (["--n_rounds", 5], "--n_rounds 5"),
        (["--gen_length", 1024], "gsm8k/0"),  # a prompt and that much do not fit
        (["--ckpt", tmp_path], "config"),
    ):
        code, _, err = run("gsm8k", out, *flags)
        assert code == 2 and word in err and len(err.splitlines()) == 1, (flags, err)
    assert not out.exists() or not tables.read_run(out)[0].items
