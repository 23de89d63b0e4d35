"""Answers by hand: model output, gold -> what is extracted, whether it is correct. `pytest tests/llada`"""

import time

import pytest

from llada import answers
from llada.benchmarks import TASKS


def check(name: str, output: str, gold, extracted, correct: bool) -> None:
    task = TASKS[name]
    assert task.find(output, gold) == extracted
    assert task.right(extracted, gold) is correct


@pytest.mark.parametrize("output, gold, extracted, correct", [
    (r"\boxed{−3}", "-3", "-3", True),  # U+2212
    ("5 + 67 = 72\n#### 72\nChecked 2 times.", "72", "72", True),  # naive last number: 2
    ("The answer is 2,125.", "2125", "2125", True),
    (r"\boxed{1{,}450{,}000}", "1450000", "1450000", True),
    ("It ends at -$3.", "-3", "-3", True),
    (r"\boxed{.5}", "0", ".5", False),
    (r"\boxed{\text{18 dollars in 3 days}}", "18", "18", True),  # the last number in the box is no answer
    (r"\boxed{5 + 6 = 11}", "11", "11", True),
    (r"First \boxed{12}. No, it is \boxed{18}.", "18", "18", True),
    (r"\boxed{18}. To check: 18 / 2 = 9", "18", "18", True),  # naive last number: 9
    (r"\boxed{\dfrac{\text{36}}{2}}", "18", "36/2", True),
    (r"\boxed{1\frac{1}{2}}", "2", "1 1/2", False),
    ("\\boxed{}\nThe answer is 18.", "18", "18", True),  # a blank box is the prompt repeated
    (r"After 18 days: \boxed{\text{none}}", "18", None, False),
    ("**Answer:** 18 apples (3 boxes of 6)", "18", "18", True),  # naive: 6
    ("The answer is 12, since 12 - 4 = 8 are left.", "12", "12", True),  # naive: 8
    ("The answer is 12. 12 - 4 = 8", "12", "12", True),  # naive: 8
    ("The answer is $5 x 3 = $15.", "15", "15", True),
    ("The answer is 18.\nWait. The answer is 20.", "20", "20", True),
    ("She buys 10-12 eggs", "12", "12", True),  # a range, no minus
    ("The garden has 18 m^2, which is x_2", "18", "18", True),  # an exponent or an index is no answer
    ("It is H2O", "2", None, False),
    ("It is 10/0", "0", None, False),
    ("It is 10/0,000.0", "0", None, False),
    # Chinese
    ("答案是18。验算：18-3=15", "18", "18", True),  # naive last number: 15
    ("答案是3+4=7（个）", "7", "7", True),
    ("答案：每份100，200是总数", "100", "100", True),  # a Chinese comma groups no thousands
    ("答案是1又7分之2", "9/7", "1 2/7", True),
    ("答案是一又七分之二", "9/7", "1 2/7", True),
    ("答案是一样的，十五", "15", "15", True),  # 一样 is no number
    (r"\boxed{二〇二四年}", "2024", "2024", True),
    (r"\boxed{一亿二千万}", "120000000", "120000000", True),
    ("便宜了百分之四十", "40%", "40/100", True),
    (r"\boxed{\frac25}", "4/10", "2/5", True),
    (r"\boxed{-\frac{1}{2}}", "1/2", "-1/2", False),
    ("温度是负5度", "-5", "-5", True),
    (r"\boxed{83.33}", "250/3", "83.33", False),  # 1/300 off
    (r"\boxed{83.333}", "250/3", "83.333", True),  # 1/3000 off
    (r"\boxed{40}", "40%", "40", True),  # 百分之几 was asked
    (r"\boxed{0.4}", "40%", "0.4", True),
    (r"\boxed{8万}", "80000", "8万", True),
    (r"\boxed{21.22万册}", "21.22", "21.22万", True),  # 多少万册 was asked
    (r"\boxed{x≈3.14}", "3.14", "3.14", True),
])  # fmt: skip
def test_numbers(output, gold, extracted, correct):
    check("gsm8k", output, gold, extracted, correct)
    check("cmath", output, gold, extracted, correct)


@pytest.mark.parametrize("output, letter", [
    (r"Answer: $\boxed{D}$", "D"),
    ("Answer: option A", "A"),
    (r"The final answer is \boxed{C}.", "C"),
    ("I think the answer would be B.", "B"),
    (r"\boxed{\text{(B) } 5}", "B"),
    ("(b)", "B"),
    ("B. Use a towel, not option A", "B"),  # naive last letter: A
    ("Answer: A\nWait, no.\nAnswer: C", "C"),  # naive first match: A
    ("Answer: Because of symmetry", None),  # naive: B
    ("The answer is a photon", None),  # naive: A
    ("A better way is to use a sponge", None),  # naive first letter: A
    ("Answer: ABCD", None),
    ("The last line is 'Answer: $LETTER'.", None),
    ("The answer is not A, but B", None),
    ("Option C looks right", None),
])  # fmt: skip
def test_letters(output, letter):
    for gold in "ABCD":
        check("gpqa", output, gold, letter, letter == gold)


@pytest.mark.parametrize("output, gold, extracted, em, f1", [
    (r"So it is \boxed{\text{Bears}}.", [("Bears",)], "Bears", 1, 1.0),
    ("Answer: 3\nWait.\nAnswer: 4", [("4",)], "4", 1, 1.0),  # simple-evals takes the first
    ("Answer: 49", [("47",), ("49",)], "49", 1, 1.0),
    ("Answer: 13 yards", [("13",)], "13 yards", 0, 0.67),  # bags {13.0, yards}, {13.0}: 2 * 1 / 3
    ("Answer: 12 yards", [("13 yards",)], "12 yards", 0, 0.0),  # no number of the gold's
    ("The answer is 13", [("13",)], "The answer is 13", 0, 0.5),  # no "Answer:"; 2 * 1 / (3 + 1)
    ("Answer: the Bears", [("Bears",)], "the Bears", 1, 1.0),
    ("Answer: 7.60", [("7.6",)], "7.60", 1, 1.0),
    ("Answer: 7.6%", [("7.6",)], "7.6%", 0, 0.0),  # official trap: 76.0
    ("Answer: -5", [("5",)], "-5", 1, 1.0),  # official trap: the sign is a separator
    ("Answer: February 5, 1284", [("5 February 1284",)], "February 5, 1284", 0, 1.0),  # same bag, other order
    ("Answer: ale, rum", [("ale and rum",), ("ale", "rum")], "ale, rum", 1, 1.0),
    ("Answer: May 5, 1998 and 1999", [("1999", "May 5, 1998")], "May 5, 1998 and 1999", 1, 1.0),
    ("Answer: ale, rum, and gin", [("gin", "ale", "rum")], "ale, rum, and gin", 1, 1.0),
    ("Answer: ale", [("ale", "rum")], "ale", 0, 0.5),  # one of two paired
    ("Answer: ale, rum, gin", [("ale", "rum")], "ale, rum, gin", 0, 0.67),  # 2 of 3
    ("Answer: rum", [("rum", "rum")], "rum", 0, 0.5),  # the same set, but not as many
    ("Answer: 1e" + "9" * 400, [("3",)], "1e" + "9" * 400, 0, 0.0),  # infinite
    ("Answer: " + "9" * 400 + "x", [("3",)], "9" * 400 + "x", 0, 0.0),
    ("", [("13",)], None, 0, 0.0),
])  # fmt: skip
def test_drop(output, gold, extracted, em, f1):
    check("drop", output, gold, extracted, em == 1)
    assert TASKS["drop"].f1(extracted, gold) == f1


def test_drop_f1_pairs_spans_for_the_greatest_sum():
    # red fox - red 2/3, red fox - red cat 1/2, red - red 1, red - red cat 2/3: the best is 1/2 + 1, not 2/3 + 2/3
    assert answers.exact_match_and_f1(["red fox", "red"], ["red", "red cat"]) == (0.0, 0.75)


# --- code extraction by hand. F stands for the entry point, ~ for a backtick
BODY = "def F(x):\n    return x\n"
DOCUMENTED = 'def F(x):\n    """Same.\n\n    ~~~\n    F(1)\n    ~~~\n    """\n    return x\n'


def indented(text: str) -> str:
    return "".join(f"   {line}" if line.strip() else line for line in text.splitlines(keepends=True))


BLOCKS = {
    "untagged": (f"~~~\n{BODY}~~~", BODY),
    "prose on the fence's line": (f"Code: ~~~python\n{BODY}~~~", BODY),
    "title after the tag": (f'~~~Python3 title="f.py"\n{BODY}~~~', BODY),
    "four backticks": (f"~~~~python\n{BODY}~~~~", BODY),
    "unclosed and cut": ("~~~python\ndef F(x):\n    retu", "def F(x):\n    retu"),
    "windows line ends": ("~~~python\r\ndef F(x):\r\n    return x\r\n~~~", BODY),
    "in a list": ("1. First\n   ~~~python\n   def F(x):\n       return x\n   ~~~", BODY),
    "an indented fence, its code not": ("  ~~~python\ndef F(x):\n  return x\n  ~~~", "def F(x):\n  return x\n"),
    "two answers: the first": (f"~~~python\n{BODY}~~~\nor\n~~~python\ndef F(x): return 0\n~~~", BODY),
    "usage before": (f"~~~python\nprint(F(1))\n~~~\n~~~python\n{BODY}~~~", BODY),
    "a longer name is another name": (f"~~~python\ndef F2(x): return 0\n~~~\n~~~python\n{BODY}~~~", BODY),
    "entry point nowhere": ("~~~bash\npip\n~~~\n~~~python\nx = 1\n~~~\n~~~python\ny = 2\n~~~", "x = 1\n"),
    "no fence, with prose": (f"Here it is:\n{BODY}", f"Here it is:\n{BODY}"),
    "a class": ("~~~python\nx = 1\n~~~\n~~~python\nclass F:\n    pass\n~~~", "class F:\n    pass\n"),
    "empty block": ("~~~python\n~~~", None),
    "the question again, then an answer": (f'~~~python\ndef F(x):\n    """Same."""\n~~~\n~~~python\n{BODY}~~~', BODY),
    "a signature alone, then an answer": (f"~~~python\ndef F(x):\n~~~\n~~~python\n{BODY}~~~", BODY),
    "a stub, then an answer": (f"~~~python\ndef F(x):\n    ...\n~~~\n~~~python\n{BODY}~~~", BODY),
    "one that does not parse, then an answer": (f"~~~python\ndef F(x):\n  ret urn x\n~~~\n~~~python\n{BODY}~~~", BODY),
    "the question again, and no answer": ('~~~python\ndef F(x):\n    """Same."""\n~~~', 'def F(x):\n    """Same."""\n'),
    "no fence, and no end": ("x = 1\n" * 4000, "x = 1\n" * 300),
    "a line without end": (f"~~~python\n{BODY}x = {'1 + ' * 4000}1\n~~~", BODY),
    "a fence in a docstring": (f"~~~python\n{DOCUMENTED}~~~\nDone.", DOCUMENTED),
    "a fence in a docstring, in a list": ("1. a\n   ~~~python\n" + indented(DOCUMENTED) + "   ~~~\nDone.", DOCUMENTED),
    "three blanks before the closing fence": (f"~~~python\n{BODY}   ~~~\nDone.", BODY),
    "a number that Python does not read": (f"~~~python\n{BODY}x = {'9' * 5000}\n~~~", BODY),
}


@pytest.mark.parametrize("output, expected", BLOCKS.values(), ids=BLOCKS)
def test_code(output, expected):
    output, expected = (text and text.replace("F", "same").replace("~", "`") for text in (output, expected))
    assert answers.find_code(output, "same") == expected


# --- answers that never end: judged wrong, and quickly
LOOPS = [
    # numbers without end
    "The answer is " + "9" * 4301,
    "The answer is -" + "9" * 60_000,
    "0." + "3" * 60_000,
    "1/" + "7" * 4301,
    "7" * 60_000 + "/2",
    "1" + ",000" * 1500,
    "1/\u0660",  # an Arabic zero below a line
    "答案是" + "十" * 1000,
    "一" * 8000,
    "一点" + "三" * 8000,
    "三分之" + "二" * 8000,
    # and other text
    "I cannot answer" + " " * 64_000 + "this",
    "The answer is" + "\n" * 64_000,
    "Answer: " * 8000,
    "Answer: a, b; " * 4600,
    "答案" * 32_000,
    "1." * 32_000,
    "1 " * 32_000,
    "1" + " " * 64_000,
    "1" + " " * 64_000 + "1/2",
    "一" * 64_000,
    "十一 " * 21_000,
    "9" * 64_000 + "x",
    "b " * 32_000,
    "a, " * 21_000,
    " and x" * 10_000,
    "Answer: " + "; ".join(f"{letter} {i}" for i in range(70) for letter in "abcdefghij"),
    "x" + " " * 64_000 + "^2",
    r"\boxed{" * 9000,
    r"\boxed{" + "{" * 32_000 + "}" * 32_000 + "}",
    r"\text{" * 10_000,
    r"\frac{1}{" * 7000,
    "`" * 64_000,
    "```" + "x" * 64_000 + "`",
    "```python\n" + "\n" * 64_000,
    "```python\ndef f(x):\n" + "    (" * 12_000,
    "```python\ndef f(x):\n" + "-" * 64_000,
]


@pytest.mark.parametrize("output", LOOPS, ids=range(len(LOOPS)))
def test_a_looping_answer_is_read_in_a_second(output):
    spans = [("13",), ("1", "x"), tuple("abcdefghij")]  # the longest reference of DROP has ten spans
    for name, gold in (("gsm8k", "3"), ("cmath", "4/10"), ("gpqa", "A"), ("drop", spans), ("mbpp", ["f", ""])):
        task = TASKS[name]
        answers.normalised.cache_clear()
        start = time.process_time()
        found = task.find(output, gold)
        right = task.right(found, gold) if task.right else False
        f1 = task.f1(found, gold) if task.f1 else 0.0
        assert time.process_time() - start < 1, name
        assert not right and f1 < 1
