"""The seven benchmarks: published shapes, prompts, damaged files. (Answers by hand: test_answers.py.)

pytest -q tests/released/test_benchmarks.py                     # records written by hand in the published shapes
pytest -q tests/released/test_benchmarks.py --bench_data DIR    # and the real files: DIR/gsm8k/test.jsonl ... (FILES)
"""

import csv
import gzip
import io
import json
import random
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from released.benchmarks import TASKS, Item

FILES = {
    "gsm8k": "gsm8k/test.jsonl",
    "cmath": "cmath/test.jsonl",
    "gpqa": "gpqa/gpqa_diamond.csv",
    "drop": "drop/drop_v0_dev.jsonl.gz",
    "piqa": "piqa/dev.jsonl",
    "humaneval": "humaneval_plus/HumanEvalPlus.jsonl.gz",
    "mbpp": "mbpp_plus/MbppPlus.jsonl.gz",
}


# ---------------------------------------------------------------------------------------------------------------------
# records by hand, in the published shapes


def code_record(name: str, prompt: str, entry: str, solution: str, plus: list) -> dict:
    inputs = {"base_input": [[1], [2]], "plus_input": plus, "contract": "", "atol": 0}
    return {"task_id": name, "prompt": prompt, "entry_point": entry, "canonical_solution": solution} | inputs


def answer(number: str = "", date: tuple = ("", "", ""), spans: tuple = ()) -> dict:
    return {"number": number, "date": dict(zip(("day", "month", "year"), date, strict=True)), "spans": list(spans)}


GSM8K = [
    {"question": "A hen lays {3} eggs a day. How many in 2 days?", "answer": "3*2=<<3*2=6>>6 eggs.\n#### 6"},
    {"question": "How many grains are 85 bags of 25?", "answer": "85*25 = 2,125\n#### 2,125"},
    {"question": "It was 5 degrees and fell by 15. How many now?", "answer": "5-15=-10\n#### -10"},
]
CMATH = [
    {"grade": 1, "question": "3包糖，每包6颗，一共多少颗？", "golden": "18", "reasoning_step": 1, "num_digits": 2},
    {"grade": 6, "question": "6元的书便宜了百分之几？", "golden": "27.3%", "reasoning_step": 2, "num_digits": 1},
    {"grade": 5, "input": "10个球中有4个红球，占几分之几？", "answer": "4/10"},
]
GPQA = [
    ["Which metal floats,\nin water?", "sodium", "lead", "gold", 'so-called "iron"', "rec1"],
    ["Which gas glows red?", "neon", "argon", "helium", "oxygen", "rec2"],
]
DROP_LINES = [
    {"context": "Passage: A, then\nB won.\nQuestion: Who won?\nAnswer:", "completion": " B", "ref_text": "B|the B"},
    {"context": "Passage: P.\nQuestion: Which two?\nAnswer:", "completion": " x", "ref_text": "ale and rum"},
]
DROP_NESTED = {
    "history_1": {
        "passage": "In March 1743 Ann and Bo met 12 men.",
        "qa_pairs": [
            {
                "question": "How many men?",
                "query_id": "q1",
                "answer": answer("12"),
                "validated_answers": [answer("13")],
            },
            {"question": "When?", "query_id": "q2", "answer": answer(date=("", "March", "1743"))},
            {
                "question": "Who?",
                "query_id": "q3",
                "answer": answer(spans=("Ann", "Bo")),
                "validated_answers": [answer(), answer(spans=("Ann",))],
            },
        ],
        "wiki_url": "",
    }
}
PIQA = [
    {"id": "x1", "goal": "dry a cup", "sol1": "use a towel", "sol2": "use a lake"},
    {"id": "x2", "goal": "cut bread", "sol1": "use soup", "sol2": "use a knife"},
]
HUMANEVAL = [
    code_record("HumanEval/900", 'def twice(x):\n    """2x"""\n', "twice", "    return 2 * x\n", [[-3]]),
    code_record("HumanEval/901", 'def size(x):\n    """|x|"""\n', "size", "    return abs(x)\n", [[-3]]),
]
MBPP = [
    code_record("Mbpp/900", '"""\nTwice.\nassert twice(1) == 2\n"""\n', "twice", "\ndef twice(x):\n  return 2*x\n", [])
]
RECORDS = {"gsm8k": GSM8K, "cmath": CMATH, "drop": DROP_LINES, "piqa": PIQA, "humaneval": HUMANEVAL, "mbpp": MBPP}


def gpqa_csv(rows: list = GPQA) -> str:
    text = io.StringIO()
    wrong = [f"Incorrect Answer {i}" for i in (1, 2, 3)]
    writer = csv.writer(text)
    writer.writerow(["Subdomain", "Question", "Correct Answer", *wrong, "Record ID"])
    writer.writerows([["Chemistry", *row] for row in rows])
    return text.getvalue()


def write_task(folder: Path, name: str) -> Path:
    """The hand-written records of one task where its real file would lie."""
    path = folder / FILES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS.get(name, []))
    data = (gpqa_csv() if name == "gpqa" else lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    if name == "piqa":
        (path.parent / "dev-labels.lst").write_text("0\n1\n")
    return path


def pytest_generate_tests(metafunc):
    # the hand-written files always; the real ones only where a folder of them is given
    if "bench_folder" in metafunc.fixturenames:
        real = metafunc.config.getoption("--bench_data")
        cases = [(name, None) for name in FILES]
        cases += (
            [(name, Path(real)) for name in FILES if name != "gpqa" or (Path(real) / FILES[name]).exists()]
            if real
            else []
        )
        names = [f"{name}-{'real' if folder else 'by_hand'}" for name, folder in cases]
        metafunc.parametrize("name, bench_folder", cases, ids=names)


def gold_outputs(name: str, item: Item) -> list[str]:
    """The gold answer as a model that follows the prompt would write it: once for each reference."""
    if name in ("gsm8k", "cmath"):
        return [f"Some steps with 3 and 4.\n\\boxed{{{item.gold}}}", f"The answer is {item.gold}."]
    if name in ("gpqa", "piqa"):
        return [f"Let me think about A and B.\nAnswer: {item.gold}"]
    marks = ["; " if ";" not in "".join(spans) else " and " for spans in item.gold]
    return [f"Let me think.\nAnswer: {mark.join(spans)}" for mark, spans in zip(marks, item.gold, strict=True)]


def test_every_item_loads_and_its_gold_is_correct(name, bench_folder, tmp_path):
    task = TASKS[name]
    items = task.load((bench_folder / FILES[name]) if bench_folder else write_task(tmp_path, name))
    assert len(items) == (task.n_official if bench_folder else len(RECORDS.get(name, GPQA)))
    assert len({item.id for item in items}) == len(items)
    for item in items:
        if task.correct is None:
            assert task.extract(f"Here it is:\n```python\n{item.gold}\n```\nDone.", item).strip() == item.gold.strip()
        else:
            outputs = gold_outputs(name, item)
            assert [task.correct(task.extract(output, item), item) for output in outputs] == [True] * len(outputs), (
                item.id
            )
            assert not task.correct(task.extract("", item), item), item.id


def test_the_official_counts():
    counts = {name: task.n_official for name, task in TASKS.items()}
    assert counts == dict(gsm8k=1319, cmath=1098, gpqa=198, drop=9536, piqa=1838, humaneval=164, mbpp=378)


def test_table_1():
    figures = {name: (t.base, t.cocommit, t.nfe_base, t.nfe_cocommit) for name, t in TASKS.items()}
    assert figures["gsm8k"] == (89.61, 91.13, 0.26, 0.34)
    assert figures["piqa"] == (80.90, 84.60, 0.76, 0.44)
    sums = [round(sum(column), 2) for column in zip(*figures.values(), strict=True)]
    assert sums == [536.46, 551.05, 2.40, 2.21]  # the columns of the printed table, added by hand


# ---------------------------------------------------------------------------------------------------------------------
# prompts


def test_the_prompts_are_those_of_the_named_sources(tmp_path):
    first = {name: TASKS[name].load(write_task(tmp_path, name))[0] for name in FILES}
    assert first["gsm8k"].prompt == (
        "A hen lays {3} eggs a day. How many in 2 days?\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    assert first["cmath"].prompt == (
        "3包糖，每包6颗，一共多少颗？\n请通过逐步推理来解答问题，并把最终答案放置于\\boxed{}中。"
    )
    assert first["piqa"].prompt == ("dry a cup\nA. use a towel\nB. use a lake\nAnswer with the letter A or B.\nAnswer:")
    assert "\n\nPassage: A, then\nB won.\nQuestion: Who won?\n\nThink step by step, then" in first["drop"].prompt
    assert first["humaneval"].prompt == (
        "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        '```\ndef twice(x):\n    """2x"""\n```\n'
    )
    assert first["mbpp"].prompt.endswith('```\n"""\nTwice.\nassert twice(1) == 2\n"""\n```\n')


def test_a_template_replaces_the_prompt_and_must_hold_every_field(tmp_path):
    path = write_task(tmp_path, "gsm8k")
    assert TASKS["gsm8k"].load(path, template="Q: {question} A:")[0].prompt == (
        "Q: A hen lays {3} eggs a day. How many in 2 days? A:"
    )
    with pytest.raises(ValueError, match=r"lacks \{question\}"):
        TASKS["gsm8k"].load(path, template="Q: ")


def test_gpqa_options_are_permuted_as_in_simple_evals(tmp_path):
    path = write_task(tmp_path, "gpqa")
    items = TASKS["gpqa"].load(path, repeats=4)
    assert [item.id for item in items[:3]] == ["rec1#0", "rec2#0", "rec1#1"] and len(items) == 8
    rng = random.Random(0)
    for item, row in zip(items, GPQA * 4, strict=True):
        options = [row[1:5][index] for index in rng.sample(range(4), 4)]
        shown = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
        assert item.prompt.endswith(f"before answering.\n\n{row[0]}\n\n{shown}")
        assert options["ABCD".index(item.gold)] == row[1]
    assert [item.prompt for item in TASKS["gpqa"].load(path)] == [item.prompt for item in items[:2]]
    assert [item.gold for item in TASKS["gpqa"].load(path, repeats=4, seed=1)] != [item.gold for item in items]


def test_drop_golds_in_both_shapes(tmp_path):
    lines = TASKS["drop"].load(write_task(tmp_path, "drop"))
    assert lines[0].gold == [("B",), ("the B",)]
    assert lines[1].gold == [("ale and rum",), ("ale", "rum")]
    nested = tmp_path / "drop_dataset_dev.json"
    nested.write_text(json.dumps(DROP_NESTED))
    items = TASKS["drop"].load(nested)
    assert [item.id for item in items] == ["q1", "q2", "q3"]
    assert [item.gold for item in items] == [[("12",), ("13",)], [("March 1743",)], [("Ann", "Bo"), ("Ann",)]]
    assert "Passage: In March 1743 Ann and Bo met 12 men.\nQuestion: When?" in items[1].prompt


def test_piqa_labels(tmp_path):
    path = write_task(tmp_path, "piqa")
    assert [item.gold for item in TASKS["piqa"].load(path)] == ["A", "B"]
    other = tmp_path / "other.lst"
    other.write_text("1\n1\n")
    assert [item.gold for item in TASKS["piqa"].load(path, labels_file=other)] == ["B", "B"]


def test_files_may_be_plain_or_gzip_and_have_a_byte_order_mark(tmp_path):
    path = write_task(tmp_path, "gsm8k")
    expected = TASKS["gsm8k"].load(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n")
    assert TASKS["gsm8k"].load(path) == expected
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert TASKS["gsm8k"].load(path) == expected


# ---------------------------------------------------------------------------------------------------------------------
# damaged files


DAMAGED = [
    ("gsm8k", b"", "holds no record"),
    ("gsm8k", b"\n\n", "holds no record"),
    (
        "gsm8k",
        b'{"question": "1+1?", "answer": "#### 2"}\n{"question": "2',
        r"test.jsonl:2: the line is not a JSON object",
    ),
    ("gsm8k", b'["question"]', r"test.jsonl:1: the line is not a JSON object"),
    ("gsm8k", b'{"question": "1+1?", "answer": "2"}', r"test.jsonl:1: .*one number after"),
    ("gsm8k", b'{"question": "1+1?", "answer": "#### two or 2, 3"}', r"test.jsonl:1: .*one number after"),
    ("gsm8k", b'{"question": " ", "answer": "#### 2"}', r'test.jsonl:1: field "question"'),
    ("gsm8k", b'{"question": ["a"], "answer": "#### 2"}', r'test.jsonl:1: field "question"'),
    ("gsm8k", b"\xff\xfe", "cannot be read"),
    ("gsm8k", gzip.compress(b"x" * 100)[:-9], "cannot be read"),
    ("gsm8k", b"\x1f\x8b\x08\x00zzzzzzzzzzzz", "cannot be read"),
    ("cmath", '{"question": "几？", "golden": "很多"}'.encode(), r"test.jsonl:1: .*one number"),
    ("cmath", '{"question": "几？", "golden": true}'.encode(), r'test.jsonl:1: field "golden'),
    ("cmath", b'{"golden": "1"}', r'test.jsonl:1: field "question'),
    ("gpqa", b"", "holds no record"),
    ("gpqa", b"Question,Correct Answer\nq,a\n", r'record 1: field "Incorrect Answer 1"'),
    ("gpqa", gpqa_csv([["q", "a", "b", "", "d", "r"]]).encode(), r'record 1: field "Incorrect Answer 2"'),
    ("gpqa", b'Question\n"' + b"x" * (2**24 + 1) + b'"\n', "damaged CSV"),
    ("drop", b"[]", r"gz:1: the line is not a JSON object"),
    ("drop", b"{}", "holds no record"),
    ("drop", b'{"context": "no passage", "ref_text": "1"}', "gz:1: no .Passage"),
    ("drop", b'{"context": "Passage: a\\nQuestion: b\\nAnswer:", "ref_text": "|"}', "gz:1: .*no answer"),
    ("drop", b'{"p1": {"passage": "a"}}', "passage 'p1' is damaged"),
    ("drop", b'{"p1": ["passage"]}', "passage 'p1' is damaged"),
    ("drop", b'{"p1": {"passage": "a", "qa_pairs": [{"question": "q", "query_id": "1"}]}}', "passage 'p1' is damaged"),
    (
        "drop",
        json.dumps(
            {"p1": {"passage": "a", "qa_pairs": [{"question": "q", "query_id": "1", "answer": answer()}]}}
        ).encode(),
        "every answer is blank",
    ),
    ("piqa", b'{"goal": "g", "sol1": "a", "sol2": "b"}', "2 labels for 1 records"),
    ("piqa", b'{"goal": "g", "sol1": "a", "sol2": "b"}\n{"goal": "g", "sol1": "a"}', r'dev.jsonl:2: field "sol2"'),
    ("humaneval", b'{"task_id": "HumanEval/0"}', r'gz:1: field "prompt"'),
    ("humaneval", json.dumps(MBPP[0]).encode(), "give its release of HumanEval"),
    ("mbpp", json.dumps(HUMANEVAL[0]).encode(), "give its release of Mbpp"),
    (
        "humaneval",
        json.dumps({k: v for k, v in HUMANEVAL[0].items() if k != "plus_input"}).encode(),
        "EvalPlus's HumanEval",
    ),
]


@pytest.mark.parametrize("name, data, message", DAMAGED)
def test_a_damaged_file_is_named_in_one_sentence(name, data, message, tmp_path):
    path = write_task(tmp_path, name)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        TASKS[name].load(path)
    text = str(caught.value)
    assert str(path) in text or "dev-labels.lst" in text
    assert "\n" not in text and "; " in text  # what is wrong; what to do


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name, tmp_path):
    with pytest.raises(ValueError, match="nowhere.*cannot be read.*give the path"):
        TASKS[name].load(tmp_path / "nowhere")


def test_piqa_labels_that_are_missing_or_wrong(tmp_path):
    path = write_task(tmp_path, "piqa")
    labels = path.parent / "dev-labels.lst"
    labels.write_text("0\n2\n")
    with pytest.raises(ValueError, match="dev-labels.lst:2: the label '2' is not 0 or 1"):
        TASKS["piqa"].load(path)
    labels.unlink()
    with pytest.raises(ValueError, match="dev-labels.lst: cannot be read"):
        TASKS["piqa"].load(path)


def zip_crypto(data: bytes, password: bytes, method: int = 0) -> bytes:
    """A zip with one stored member under PKWARE's traditional encryption (APPNOTE 6.1), which zipfile only reads."""
    keys = [0x12345678, 0x23456789, 0x34567890]

    def crc(old: int, byte: int) -> int:
        return zlib.crc32(bytes([byte]), old ^ 0xFFFFFFFF) ^ 0xFFFFFFFF

    def update(byte: int) -> None:
        keys[0] = crc(keys[0], byte)
        keys[1] = ((keys[1] + (keys[0] & 0xFF)) * 134775813 + 1) & 0xFFFFFFFF
        keys[2] = crc(keys[2], keys[1] >> 24)

    for byte in password:
        update(byte)
    name, checksum, secret = b"dataset/gpqa_diamond.csv", zlib.crc32(data), b""
    for byte in bytes(11) + bytes([checksum >> 24]) + data:  # 12 bytes go before; the last one checks the password
        low = (keys[2] | 2) & 0xFFFF
        secret += bytes([byte ^ (low * (low ^ 1) >> 8) & 0xFF])
        update(byte)
    common = struct.pack("<HHHHHIIIHH", 20, 1, method, 0, 33, checksum, len(secret), len(data), len(name), 0)
    local = b"PK\x03\x04" + common + name + secret
    central = b"PK\x01\x02" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    return local + central + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def test_gpqa_zip_with_its_password(tmp_path):
    path = tmp_path / "dataset.zip"
    path.write_bytes(zip_crypto(gpqa_csv().encode(), b"open sesame"))
    expected = TASKS["gpqa"].load(write_task(tmp_path, "gpqa"))
    assert TASKS["gpqa"].load(path, password="open sesame") == expected
    for password in (None, "wrong"):
        with pytest.raises(ValueError, match="dataset.zip: .*password.*give the password from GPQA's README"):
            TASKS["gpqa"].load(path, password=password)


def test_gpqa_zip_under_aes_or_without_the_file(tmp_path):
    path = tmp_path / "dataset.zip"
    path.write_bytes(zip_crypto(gpqa_csv().encode(), b"open sesame", method=99))  # 99 is the mark of AES
    with pytest.raises(ValueError, match="extracted gpqa_diamond.csv .a must for an AES zip"):
        TASKS["gpqa"].load(path, password="open sesame")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("gpqa_main.csv", gpqa_csv())
    with pytest.raises(ValueError, match="no item named 'gpqa_diamond.csv'"):
        TASKS["gpqa"].load(path)
    with zipfile.ZipFile(path, "w") as archive:  # a zip without a password needs none
        archive.writestr("gpqa_diamond.csv", gpqa_csv())
    assert len(TASKS["gpqa"].load(path)) == 2
