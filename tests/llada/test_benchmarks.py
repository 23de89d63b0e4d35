"""The seven benchmarks: published shapes, prompts, damaged files. (Answers by hand: test_answers.py.)
`pytest tests/llada/test_benchmarks.py`; with --bench_data DIR also the real files, DIR/gsm8k/test.jsonl ... (FILES).
"""

import csv
import gzip
import io
import json
import random
from pathlib import Path

import pytest

from lib.util import Mistake
from llada.benchmarks import GPQA_ANSWERS, TASKS

FILES = {
    "gsm8k": "gsm8k/test.jsonl",
    "cmath": "cmath/test.jsonl",
    "gpqa": "gpqa/gpqa_diamond.csv",
    "drop": "drop/drop_v0_dev.jsonl.gz",
    "piqa": "piqa/dev.jsonl",
    "humaneval": "humaneval_plus/HumanEvalPlus.jsonl.gz",
    "mbpp": "mbpp_plus/MbppPlus.jsonl.gz",
}


# --- records by hand, in the published shapes
def code_record(name: str, prompt: str, entry: str, solution: str) -> dict:
    return dict(task_id=name, prompt=prompt, entry_point=entry, canonical_solution=solution, plus_input=[])


GSM8K = [
    {"question": "A hen lays {3} eggs a day. How many in 2 days?", "answer": "3*2=<<3*2=6>>6 eggs.\n#### 6"},
    {"question": "How many grains are 85 bags of 25?", "answer": "85*25 = 2,125\n#### 2,125"},
    {"question": "It was 5 degrees and fell by 15. How many now?", "answer": "5-15=-10\n#### -10"},
]
CMATH = [
    {"question": "6元的书便宜了百分之几？", "golden": "27.3%"},
    {"question": "10个球中有4个红球，占几分之几？", "golden": "4/10"},
]
GPQA_COLUMNS = ["Question", *GPQA_ANSWERS, "Record ID"]
GPQA = [
    ["Which metal floats,\nin water?", "sodium", "lead", "gold", 'so-called "iron"', "rec1"],
    ["Which gas glows red?", "neon", "argon", "helium", "oxygen", "rec2"],
]
DROP = [
    {"context": "Passage: A, then\nB won.\nQuestion: Who won?\nAnswer:", "completion": " B", "ref_text": "B|the B"},
    {"context": "Passage: P.\nQuestion: Which two?\nAnswer:", "completion": " x", "ref_text": "ale and rum"},
]
PIQA = [
    {"id": "x1", "goal": "dry a cup", "sol1": "use a towel", "sol2": "use a lake"},
    {"id": "x2", "goal": "cut bread", "sol1": "use soup", "sol2": "use a knife"},
]
HUMANEVAL = [
    code_record("HumanEval/900", 'def twice(x):\n    """2x"""\n', "twice", "    return 2 * x\n"),
    code_record("HumanEval/901", 'def size(x):\n    """|x|"""\n', "size", "    return abs(x)\n"),
]
MBPP = [code_record("Mbpp/900", '"""\nTwice.\n"""\n', "twice", "\ndef twice(x):\n  return 2*x\n")]
RECORDS = {"gsm8k": GSM8K, "cmath": CMATH, "drop": DROP, "piqa": PIQA, "humaneval": HUMANEVAL, "mbpp": MBPP}


def write_task(folder: Path, name: str, data: bytes | None = None) -> Path:
    """The hand-written records of one task where its real file would lie, or other data."""
    path = folder / FILES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    if name == "gpqa":
        csv.writer(text).writerows([GPQA_COLUMNS, *GPQA])
    for record in RECORDS.get(name, []):
        text.write(json.dumps(record) + "\n")
    data = data or text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    if name == "piqa":
        (path.parent / "dev-labels.lst").write_text("0\n1\n")
    return path


def gold_outputs(name: str, gold) -> list[str]:
    """The gold answer as a model that follows the prompt would write it: once for each reference."""
    if name in ("gsm8k", "cmath"):
        return [f"Some steps with 3 and 4.\n\\boxed{{{gold}}}", f"The answer is {gold}."]
    if name in ("gpqa", "piqa"):
        return [f"Let me think about A and B.\nAnswer: {gold}"]
    marks = ["; " if ";" not in "".join(spans) else " and " for spans in gold]
    return [f"Let me think.\nAnswer: {mark.join(spans)}" for mark, spans in zip(marks, gold, strict=True)]


@pytest.mark.parametrize("name", FILES)
def test_every_item_loads_and_its_gold_is_right(name, request, tmp_path):
    task = TASKS[name]
    files = {write_task(tmp_path, name): len(RECORDS.get(name, GPQA))}
    real = Path(request.config.getoption("--bench_data") or "nowhere") / FILES[name]
    if real.exists():
        files[real] = task.n_official
    for path, expected in files.items():
        items = task.load(path)
        assert len(items) == len({item.id for item in items}) == expected
        for item in items:
            if task.right is None:
                program = item.gold[1].strip()
                assert task.find(f"Here it is:\n```python\n{program}\n```\nDone.", item.gold).strip() == program
                continue
            for output in gold_outputs(name, item.gold):
                assert task.right(task.find(output, item.gold), item.gold), item.id
            assert not task.right(task.find("", item.gold), item.gold), item.id


# --- prompts
def test_golds_by_hand(tmp_path):
    assert [item.gold for item in TASKS["piqa"].load(write_task(tmp_path, "piqa"))] == ["A", "B"]

    # a span that holds "and" is read both ways
    who, which = TASKS["drop"].load(write_task(tmp_path, "drop"))
    assert "\n\nPassage: A, then\nB won.\nQuestion: Who won?\n\nThink step by step, then" in who.prompt
    assert who.gold == [("B",), ("the B",)]
    assert which.gold == [("ale and rum",), ("ale", "rum")]


def test_a_template_replaces_the_prompt_and_must_hold_every_field(tmp_path):
    path = write_task(tmp_path, "gsm8k")
    asked = TASKS["gsm8k"].load(path, template="Q: {question} A:")[0].prompt
    assert asked == "Q: A hen lays {3} eggs a day. How many in 2 days? A:"
    with pytest.raises(Mistake, match=r"lacks \{question\}"):
        TASKS["gsm8k"].load(path, template="Q: ")


def test_gpqa_options_are_permuted_as_in_simple_evals(tmp_path):
    rng = random.Random(0)
    for item, row in zip(TASKS["gpqa"].load(write_task(tmp_path, "gpqa")), GPQA, strict=True):
        options = [row[1:5][index] for index in rng.sample(range(4), 4)]
        shown = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
        assert item.prompt.endswith(f"before answering.\n\n{row[0]}\n\n{shown}")
        assert (item.id, options["ABCD".index(item.gold)]) == (row[5], row[1])


# --- files that would give wrong questions or golds
DAMAGED = [
    ("gsm8k", b'{"question": "1+1?", "answer": "#### two or 2, 3"}', "is not one number"),
    ("drop", b'{"context": "no passage", "ref_text": "1"}', "no .Passage"),
    ("gsm8k", b'{"question": "1+1?", "final": "2"}', "answer is None"),
    ("cmath", b'["1+1?", "2"]', "is not a JSON object"),
    ("piqa", b'{"goal": "g", "sol1": "a", "sol2": "b"}', "PIQA file"),  # two labels
    ("gsm8k", b'{"question": "half of a \\ud83d", "answer": "#### 2"}', "surrogates"),
    ("mbpp", json.dumps(MBPP[0] | {"entry_point": "f(x)"}).encode(), "is not a name in Python"),
    ("mbpp", json.dumps({k: v for k, v in MBPP[0].items() if k != "plus_input"}).encode(), "EvalPlus's Mbpp"),
]


@pytest.mark.parametrize("name, data, says", DAMAGED)
def test_a_damaged_file_is_refused(name, data, says, tmp_path):
    path = write_task(tmp_path, name, data)
    with pytest.raises(Mistake, match=says) as caught:
        TASKS[name].load(path)
    assert str(path) in str(caught.value)
