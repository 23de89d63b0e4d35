"""The seven benchmarks: published shapes, damaged files, hand-checked answers.

pytest -q tests/test_benchmarks.py                          # records written by hand in the published shapes
pytest -q tests/test_benchmarks.py --bench_data DIR         # and the real files: DIR/gsm8k/test.jsonl ... (see FILES)
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

import benchmarks
from benchmarks import TASKS, Item

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
    figures = {name: (t.base, t.ours, t.nfe_base, t.nfe_ours) for name, t in TASKS.items()}
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


# ---------------------------------------------------------------------------------------------------------------------
# answers by hand: model output, gold -> what is extracted, whether it is correct


def check(name: str, output: str, gold, extracted, correct: bool, **extra) -> None:
    task, item = TASKS[name], Item("", "", gold, extra)
    assert task.extract(output, item) == extracted
    assert task.correct(extracted, item) is correct


@pytest.mark.parametrize(
    "output, gold, extracted, correct",
    [
        (r"16 - 3 - 4 = 9 eggs, 9 * 2 = \boxed{18}", "18", "18", True),
        (r"\boxed{-10}", "-10", "-10", True),
        (r"\boxed{−3}", "-3", "-3", True),  # U+2212
        (r"\boxed{10}", "-10", "10", False),
        ("5 + 67 = 72\n#### 72", "72", "72", True),
        ("The answer is 2,125.", "2125", "2125", True),
        (r"\boxed{1{,}450{,}000}", "1450000", "1450000", True),
        (r"\boxed{65\,960}", "65960", "65960", True),
        (r"\boxed{\$18}", "18", "18", True),
        ("It ends at -$3.", "-3", "-3", True),
        (r"\boxed{18.00}", "18", "18.00", True),
        (r"\boxed{18.5}", "18", "18.5", False),
        (r"\boxed{.5}", "0", ".5", False),
        (r"\boxed{20\%}", "20", "20%", True),
        (r"\boxed{\text{18 dollars in 3 days}}", "18", "18", True),  # the last number in the box is no answer
        (r"\boxed{x = 18}", "18", "18", True),
        (r"\boxed{5 + 6 = 11}", "11", "11", True),
        (r"First \boxed{12}. No, it is \boxed{18}.", "18", "18", True),
        (r"\boxed{18}. To check: 18 / 2 = 9", "18", "18", True),  # naive last number: 9
        (r"\boxed{\frac{36}{2}}", "18", "36/2", True),
        (r"\boxed{\dfrac{\text{36}}{2}}", "18", "36/2", True),
        (r"\boxed{1\frac{1}{2}}", "2", "1 1/2", False),
        (r"\boxed{1½}", "1", "1 1/2", False),
        ("\\boxed{}\nThe answer is 18.", "18", "18", True),  # a blank box is the prompt repeated
        (r"After 18 days: \boxed{\text{none}}", "18", None, False),
        ("The answer is 18. I checked it 2 times.", "18", "18", True),  # naive: 2
        ("**Answer:** 18 apples (3 boxes of 6)", "18", "18", True),  # naive: 6
        ("The answer is 12, since 12 - 4 = 8 are left.", "12", "12", True),  # naive: 8
        ("The answer is $5 x 3 = $15.", "15", "15", True),
        ("The final answer is:\n\n18", "18", "18", True),
        ("The answer is 18.\nWait. The answer is 20.", "20", "20", True),
        ("She buys 10-12 eggs", "12", "12", True),  # a range, no minus
        ("The garden has 18 m^2", "18", "18", True),  # an exponent is no answer
        (r"so we need \boxed{18", "18", "18", True),  # cut off
        ("It is H2O", "2", None, False),
        ("１８ eggs", "18", "18", True),
        ("It is 10/0", "0", None, False),
        ("I do not know.", "18", None, False),
        ("", "18", None, False),
    ],
)
def test_gsm8k(output, gold, extracted, correct):
    check("gsm8k", output, gold, extracted, correct)


@pytest.mark.parametrize(
    "output, gold, score",
    [
        ("The answer is 18.", "18", 1.0),
        (r"\boxed{2,125}", "2125", 1.0),
        ("It costs $18", "18", 1.0),
        ("It is -10.", "-10", 1.0),
        ("18.00", "18", 0.0),  # compared as strings
        ("The answer is 18 (2 a day)", "18", 0.0),  # the last match is 2
        ("none", "18", 0.0),
    ],
)
def test_gsm8k_flexible(output, gold, score):
    assert TASKS["gsm8k"].extra_scores(output, Item("", "", gold, {})) == {"flexible": score}


@pytest.mark.parametrize(
    "output, gold, extracted, correct",
    [
        (r"3×6=18，所以\boxed{18}", "18", "18", True),
        (r"\boxed{18平方厘米}", "18", "18", True),
        ("所以答案是18个。", "18", "18", True),
        ("**答案**：18", "18", "18", True),
        ("答案为：１８．", "18", "18", True),
        ("答案是18。验算：18-3=15", "18", "18", True),  # naive last number: 15
        ("答案是3+4=7（个）", "7", "7", True),
        ("答案：每份100，200是总数", "100", "100", True),  # a Chinese comma groups no thousands
        ("答案是十八个", "18", "18", True),
        ("答案是一样的，十五", "15", "15", True),  # 一样 is no number
        ("一共有18个，分成两份", "18", "18", True),  # 两 beside digits is no number
        (r"\boxed{一百零五}", "105", "105", True),
        (r"\boxed{二〇二四年}", "2024", "2024", True),
        (r"\boxed{一亿二千万}", "120000000", "120000000", True),
        (r"\boxed{三点一四}", "3.14", "3.14", True),
        (r"\boxed{五分之三}", "3/5", "3/5", True),
        ("红球占全部的8分之3。", "3/8", "3/8", True),
        ("答案是一又七分之二", "9/7", "1 2/7", True),
        ("答案：1又7分之2米", "9/7", "1 2/7", True),
        (r"\boxed{1\frac{2}{7}}", "9/7", "1 2/7", True),
        (r"\boxed{\frac{4}{10}}", "4/10", "4/10", True),
        (r"\boxed{\frac25}", "4/10", "2/5", True),
        (r"\boxed{0.4}", "4/10", "0.4", True),
        (r"\boxed{-\frac{1}{2}}", "1/2", "-1/2", False),
        ("温度是负5度", "-5", "-5", True),
        (r"\boxed{83.33}", "250/3", "83.33", False),  # 1/300 off
        (r"\boxed{83.333}", "250/3", "83.333", True),  # 1/3000 off
        (r"\boxed{40\%}", "40%", "40%", True),
        (r"\boxed{40％}", "40%", "40%", True),
        (r"\boxed{40}", "40%", "40", True),  # 百分之几 was asked
        (r"\boxed{0.4}", "40%", "0.4", True),
        ("便宜了百分之四十", "40%", "40/100", True),
        (r"\boxed{27.27\%}", "27.3%", "27.27%", True),  # 0.0003 off
        (r"\boxed{25\%}", "27.3%", "25%", False),
        (r"\boxed{8万}", "80000", "8万", True),
        (r"\boxed{21.22万册}", "21.22", "21.22万", True),  # 多少万册 was asked
        (r"\boxed{x≈3.14}", "3.14", "3.14", True),
        (r"\boxed{0.03}", "0.0303", "0.03", True),  # within 1e-3
        (r"\boxed{0.029}", "0.0303", "0.029", False),
        ("不知道", "18", None, False),
        ("", "18", None, False),
    ],
)
def test_cmath(output, gold, extracted, correct):
    check("cmath", output, gold, extracted, correct)


@pytest.mark.parametrize(
    "output, gold, score",
    [
        ("答案是83.3", "250/3", 1.0),  # 0.04 % off
        ("18，再检查20", "18", 1.0),  # one of the last two
        ("1，2，3", "1", 0.0),  # the third from the end
        ("答案是19", "18", 0.0),
        ("答案是101", "100", 0.0),  # within 1 % + 1e-6, but integers must be equal
        ("答案是18.1", "18", 1.0),  # 0.56 % off
        ("答案是18.2", "18", 0.0),  # 1.1 % off
        ("便宜40%", "0.4", 1.0),
        ("-18", "18", 0.0),
        ("不知道", "18", 0.0),
    ],
)
def test_cmath_official(output, gold, score):
    assert TASKS["cmath"].extra_scores(output, Item("", "", gold, {})) == {"official": score}


@pytest.mark.parametrize(
    "output, letter",
    [
        ("Answer: B", "B"),
        ("answer: b", "B"),
        ("ANSWER : C", "C"),
        ("**Answer:** C", "C"),
        ("**Answer: C**", "C"),
        ("Answer: (D)", "D"),
        ('Answer: "B"', "B"),
        ("Answer: $A$", "A"),
        (r"Answer: $\boxed{D}$", "D"),
        (r"Answer: \text{B}", "B"),
        ("Answer:\n\nB", "B"),
        ("Answer: C) 5 kJ", "C"),
        ("Answer: option A", "A"),
        (r"The final answer is \boxed{C}.", "C"),
        ("The correct answer is option D.", "D"),
        ("I think the answer would be B.", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B) } 5}", "B"),
        ("B", "B"),
        ("(b)", "B"),
        ("Answer: A\nWait, no.\nAnswer: C", "C"),  # naive first match: A
        ("A and B are wrong. Answer: D.", "D"),  # naive first letter: A
        ("Consider option A first. Answer: B", "B"),
        ("Answer: Because of symmetry", None),  # naive: B
        ("The answer is a photon", None),  # naive: A
        ("Answer: ABCD", None),
        ("Answer: D2 receptor", None),
        ("The last line is 'Answer: $LETTER'.", None),
        ("The answer is not A, but B", None),
        ("Answer: E", None),
        ("Cancer answers Dogma", None),
        ("Option C looks right", None),
        ("A. is polar, so no", None),
        ("", None),
    ],
)
def test_gpqa(output, letter):
    for gold in "ABCD":
        check("gpqa", output, gold, letter, letter == gold, letters="ABCD", letter_only=False)


@pytest.mark.parametrize(
    "output, gold, score",
    [
        ("Answer: C", "C", 1.0),
        ("Answer: $C", "C", 1.0),
        ("Answer: A\nAnswer: C", "C", 0.0),  # the first counts
        ("**Answer:** C", "C", 0.0),
        ("Answer: c", "C", 0.0),
        ("Answer: Because", "B", 1.0),
        ("", "C", 0.0),
    ],
)
def test_gpqa_simple_evals(output, gold, score):
    assert TASKS["gpqa"].extra_scores(output, Item("", "", gold, {})) == {"simple_evals": score}


@pytest.mark.parametrize(
    "output, letter",
    [
        ("A", "A"),
        ("B", "B"),
        ("b", "B"),
        ("a.", "A"),
        ("B.", "B"),
        ("(A)", "A"),
        ("[A]", "A"),
        ("**B**", "B"),
        (" \n B\n", "B"),
        (r"\boxed{A}", "A"),
        (r"It is safe, so $\boxed{\text{B}}$.", "B"),
        ("Answer: B", "B"),
        ("Answer:\nA", "A"),
        ("The answer is A.", "A"),
        ("I think the answer should be B, not A", "B"),
        ("The answer is B because option A breaks", "B"),  # naive last letter: A
        ("B. use a sponge", "B"),
        ("A, because glue dries", "A"),
        ("A is safer than B", "A"),
        ("A\nThe second one would break.", "A"),
        ("Option B is better", "B"),
        ("I would choose A.", "A"),
        ("The correct choice is B", "B"),
        ("The best solution would be B.", "B"),
        ("Option A fails, so pick B", "B"),
        ("A better way is to use a sponge", None),  # naive first letter: A
        ("Because of the glue", None),  # naive: B
        ("Apply glue", None),  # naive: A
        ("The answer is a sponge", None),
        ("Both A and B would work", None),
        ("Answer: AB", None),
        ("C", None),
        ("Neither", None),
        ("", None),
    ],
)
def test_piqa(output, letter):
    for gold in "AB":
        check("piqa", output, gold, letter, letter == gold, letters="AB", letter_only=True)


@pytest.mark.parametrize(
    "output, gold, extracted, em, f1, fuzzy",
    [
        ("Answer: 13", [("13",)], "13", 1, 1.0, 1),
        ("13", [("13",)], "13", 1, 1.0, 1),
        ("Answer:\n13", [("13",)], "13", 1, 1.0, 1),
        ("**Answer:** 13.", [("13",)], "13.", 1, 1.0, 1),
        ("Answer: $13$", [("13",)], "13", 1, 1.0, 1),
        (r"Answer: \boxed{13}", [("13",)], "13", 1, 1.0, 1),
        (r"So it is \boxed{\text{Bears}}.", [("Bears",)], "Bears", 1, 1.0, 1),
        ("Answer: 3\nWait.\nAnswer: 4", [("4",)], "4", 1, 1.0, 1),  # simple-evals takes the first
        ("Answer: 49", [("47",), ("49",)], "49", 1, 1.0, 1),
        ("Answer: 12", [("13",)], "12", 0, 0.0, 0),
        ("Answer: 13 yards", [("13",)], "13 yards", 0, 0.67, 1),  # bags {13.0, yards}, {13.0}: 2 * 1 / 3
        ("Answer: 12 yards", [("13 yards",)], "12 yards", 0, 0.0, 0),  # no number of the gold's
        ("The answer is 13", [("13",)], "The answer is 13", 0, 0.5, 1),  # no "Answer:"; 2 * 1 / (3 + 1)
        ("Answer: the Bears", [("Bears",)], "the Bears", 1, 1.0, 1),
        ("Answer: Chicago Bears", [("Bears",)], "Chicago Bears", 0, 0.67, 1),
        ("Answer: 1,234", [("1234",)], "1,234", 1, 1.0, 1),
        ("Answer: 7.60", [("7.6",)], "7.60", 1, 1.0, 1),  # "760" holds "76"
        ("Answer: 7.6%", [("7.6",)], "7.6%", 0, 0.0, 1),  # official trap: 76.0
        ("Answer: $5.50", [("5.5",)], "$5.50", 0, 0.0, 1),  # official trap: 550.0; "550" holds "55"
        ("Answer: -5", [("5",)], "-5", 1, 1.0, 1),  # official trap: the sign is a separator
        ("Answer: 80-yard", [("80",)], "80-yard", 0, 0.67, 1),
        ("Answer: 5 February 1284", [("5 February 1284",)], "5 February 1284", 1, 1.0, 1),
        ("Answer: February 5, 1284", [("5 February 1284",)], "February 5, 1284", 0, 1.0, 0),  # same bag, other order
        ("Answer: February 1284", [("5 February 1284",)], "February 1284", 0, 0.8, 1),  # 2 * 2 / (2 + 3)
        ("Answer: ale, rum", [("ale and rum",), ("ale", "rum")], "ale, rum", 1, 1.0, 0),
        ("Answer: rum and ale", [("ale and rum",), ("ale", "rum")], "rum and ale", 1, 1.0, 0),
        ("Answer: rum; ale", [("ale", "rum")], "rum; ale", 1, 1.0, 0),
        ("Answer: ale, rum, and gin", [("gin", "ale", "rum")], "ale, rum, and gin", 1, 1.0, 0),
        ("Answer: 10,000 men, 5,000 men", [("10,000 men", "5,000 men")], "10,000 men, 5,000 men", 1, 1.0, 0),
        ("Answer: ale", [("ale", "rum")], "ale", 0, 0.5, 1),  # one of two paired
        ("Answer: ale, rum, gin", [("ale", "rum")], "ale, rum, gin", 0, 0.67, 0),  # 2 of 3
        ("Answer: rum, rum", [("rum", "rum")], "rum, rum", 1, 1.0, 0),
        ("Answer: rum", [("rum", "rum")], "rum", 0, 0.5, 1),  # the same set, but not as many
        ("I think it was the Bears", [("Bears",)], "I think it was the Bears", 0, 0.33, 1),  # 2 * 1 / (5 + 1)
        ("", [("13",)], None, 0, 0.0, 0),
        ("Answer: ?", [("13",)], "?", 0, 0.0, 0),
    ],
)
def test_drop(output, gold, extracted, em, f1, fuzzy):
    check("drop", output, gold, extracted, em == 1)
    assert TASKS["drop"].extra_scores(output, Item("", "", gold, {})) == {"f1": f1, "fuzzy": fuzzy}


def test_drop_f1_pairs_spans_for_the_greatest_sum():
    # red fox - red 2/3, red fox - red cat 1/2, red - red 1, red - red cat 2/3: the best is 1/2 + 1, not 2/3 + 2/3
    assert benchmarks.drop_em_f1(["red fox", "red"], ["red", "red cat"]) == (0.0, 0.75)


# ---------------------------------------------------------------------------------------------------------------------
# code extraction by hand. F stands for the entry point, P for the problem's own header, ~ for a backtick

BODY = "def F(x):\n    return x\n"
BLOCKS = {
    "python": (f"~~~python\n{BODY}~~~", BODY),
    "py": (f"~~~py\n{BODY}~~~", BODY),
    "python3": (f"~~~Python3\n{BODY}~~~", BODY),
    "untagged": (f"~~~\n{BODY}~~~", BODY),
    "prose around": (f"Sure!\n\n~~~python\n{BODY}~~~\nIt returns x.", BODY),
    "prose on the fence's line": (f"Code: ~~~python\n{BODY}~~~", BODY),
    "title after the tag": (f'~~~python title="f.py"\n{BODY}~~~', BODY),
    "four backticks": (f"~~~~python\n{BODY}~~~~", BODY),
    "unclosed": (f"~~~python\n{BODY}", BODY),
    "unclosed and cut": ("~~~python\ndef F(x):\n    retu", "def F(x):\n    retu"),
    "windows line ends": ("~~~python\r\ndef F(x):\r\n    return x\r\n~~~", BODY),
    "in a list": ("1. First\n   ~~~python\n   def F(x):\n       return x\n   ~~~", BODY),
    "imports first": (f"~~~python\nimport math\n\n{BODY}~~~", f"import math\n\n{BODY}"),
    "helper first": (f"~~~python\ndef g(x):\n    return x\n\n{BODY}~~~", f"def g(x):\n    return x\n\n{BODY}"),
    "two answers: the first": (f"~~~python\n{BODY}~~~\nor\n~~~python\ndef F(x): return 0\n~~~", BODY),
    "usage after": (f"~~~python\n{BODY}~~~\n~~~python\nprint(F(1))\n~~~", BODY),
    "usage before": (f"~~~python\nprint(F(1))\n~~~\n~~~python\n{BODY}~~~", BODY),
    "shell before": (f"~~~bash\npip install x\n~~~\n~~~python\n{BODY}~~~", BODY),
    "a longer name is another name": (f"~~~python\ndef F2(x): return 0\n~~~\n~~~python\n{BODY}~~~", BODY),
    "entry point nowhere": ("~~~python\nx = 1\n~~~\n~~~python\ny = 2\n~~~", "x = 1\n"),
    "only another language": ("~~~java\nint x;\n~~~", "~~~java\nint x;\n~~~"),
    "no fence": (BODY, BODY),
    "no fence, with prose": (f"Here it is:\n{BODY}", f"Here it is:\n{BODY}"),
    "inline code in prose": ("Use ~F(x)~.", "Use ~F(x)~."),
    "a class": ("~~~python\nclass F:\n    pass\n~~~", "class F:\n    pass\n"),
    "empty block": ("~~~python\n~~~", None),
    "empty output": ("", None),
    "white space": (" \n\n", None),
}
HEADER = 'def F(x):\n    """Say x."""\n'
BODY_ONLY = {
    "body without a fence": ("    return x\n", f"{HEADER}    return x\n", "    return x\n"),
    "body in a fence": ("~~~python\n    return x\n~~~", f"{HEADER}    return x\n", "    return x\n"),
    "body after a blank line": ("\n    return x", f"{HEADER}\n    return x", "\n    return x"),
    "indented program is no body": ("~~~\n  def F(x):\n    return x\n~~~",) + ("  def F(x):\n    return x\n",) * 2,
}


def code_item(name: str, prefill: bool = False) -> Item:
    header = HEADER.replace("F", "same") if name == "humaneval" else '"""\nSay x.\nassert same(1) == 1\n"""\n'
    extra = {"entry_point": "same", "code": header, "prefill": benchmarks.PREFILL if prefill else ""}
    return Item("", "", "", extra)


@pytest.mark.parametrize("case", BLOCKS | BODY_ONLY)
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_code(name, case):
    output, humaneval, *mbpp = (BLOCKS | BODY_ONLY)[case]
    expected = mbpp[0] if mbpp and name == "mbpp" else humaneval  # a body needs a header, which MBPP does not give
    output, expected = (text and text.replace("F", "same").replace("~", "`") for text in (output, expected))
    assert TASKS[name].extract(output, code_item(name)) == expected


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_code_after_a_prefilled_turn_starts_inside_the_block(name, tmp_path):
    item = TASKS[name].load(write_task(tmp_path, name), prefill=True)[0]
    assert item.extra["prefill"].endswith("passes corresponding tests:\n```python\n")
    assert (
        TASKS[name].extract("def twice(x):\n    return 2 * x\n```\nDone.", item) == "def twice(x):\n    return 2 * x\n"
    )
    assert TASKS[name].load(write_task(tmp_path, name))[0].extra["prefill"] == ""
