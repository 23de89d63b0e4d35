r"""Answers by hand: what each filter reads in a model's text, and whether it is right. `pytest tests/released`"""

import time

import pytest

from released.harness import Answer
from released.tasks import rules


def verdict(kind: str, answer: str, doc: dict) -> tuple[str, dict]:
    """What the task's filter finds in an answer, and its scores, as lm-eval calls them."""
    ((found,),) = getattr(rules, f"{kind}_filter")([[Answer(answer, {"tokens": 7})]], [doc])
    scores = getattr(rules, f"{kind}_scores")(doc, [found])
    assert scores.pop("tokens") == 7
    return found, scores


@pytest.mark.parametrize("answer, gold, found, right", [
    (r"\boxed{12,345}", "12345", "12345", True),
    ("The answer is 12 345.", "12345", "12345", True),
    (r"\boxed{40\%}", "2/5", "40%", True),
    ("答案是3亿5000万。", "350000000", "3亿5000万", True),
    ("答案：３／４", "6/8", "3/4", True),  # full-width characters
    ("\\boxed{\u22121{,}450{,}000}", "-1450000", "-1450000", True),  # the sign of mathematics
    (r"\boxed{\text{18 dollars in 3 days}}", "18", "18", True),  # the last number in the box is no answer
    (r"\boxed{5 + 6 = 11}", "11", "11", True),
    ("\\boxed{}\nThe answer is 18.", "18", "18", True),  # an empty box is the prompt repeated
    (r"After 18 days: \boxed{\text{none}}", "18", "", False),
    ("**Answer:** 18 apples (3 boxes of 6)", "18", "18", True),
    ("The answer is 12, since 12 - 4 = 8 are left.", "12", "12", True),
    ("The garden has 10-12 m^2, which is x_2", "12", "12", True),  # a range, no minus
    ("It is 10/0", "0", "10/0", False),
    ("每份100，200是总数。答案：每份100，200是总数", "100", "100", True),  # a Chinese comma groups no thousands
    ("答案是负1又7分之2", "-9/7", "-1 2/7", True),
    ("便宜了百分之40", "40%", "40%", True),
    (r"\boxed{83.33}", "250/3", "83.33", False),  # 1/300 off
    (r"\boxed{21.22万册}", "21.22", "21.22万", True),  # how many 万?
    (r"It costs US\$–18", "-18", "-18", True),  # a dash for a minus
])  # fmt: skip
def test_numbers(answer, gold, found, right):
    assert verdict("number", answer, {"gold": gold}) == (found, {"exact_match": float(right)})


@pytest.mark.parametrize("answer, letter", [
    ("**Answer:** (C)", "C"),
    (r"\boxed{\text{(B) } 5}", "B"),
    ("B. Use a towel, not option A", "B"),
    ("Answer: A\nWait, no.\nAnswer: C", "C"),
    *((f"{said} Answer A is wrong.", "B") for said in (r"\boxed{B}", "The best answer to the question must be **B**;",
      "Option B is correct.", "B is the right one.", "The correct answer is clearly (B).", "The correct option is B.")),
    *((f"{said}答案A是错的。选项A不对。", "B") for said in ("正确答案是B。", "正确选项是【B】。")),
    ("A) ice\nB) fire\n\nB", "B"),
    ("Final answer - B", "B"),
    ("Answer A is wrong.", ""),
    ("The answer is a photon", ""),
    ("A right triangle is best", ""),
])  # fmt: skip
def test_letters(answer, letter):
    for gold in "ABCD":
        doc = {"gold": gold, "letters": "ABCD"}
        assert verdict("letter", answer, doc) == (letter, {"exact_match": float(letter == gold)})


@pytest.mark.parametrize("answer, found", [
    (r"So it is \boxed{\text{Bears}}.", "Bears"),
    ("Answer: 3\nWait.\n**Answer:** 4", "4"),
    (r"Answer: \boxed{-3.50}", "-3.50"),
])  # fmt: skip
def test_spans(answer, found):
    assert rules.find_spans(answer) == found


# --- programs. F stands for the entry point, ~ for a backtick
BODY = "def F(x):\n    return x"
DOCSTRING = 'def F(x):\n    """Same.\n\n    ~~~\n    F(1)\n    ~~~\n    """\n    return x'
OPENERS = ["", 'Python3 title="x"', "{python} \r"]
PROGRAMS = {f"opened by {word}": (f"Here: ~~~{word}\n{BODY}\n~~~\nSo it is.\n", BODY) for word in OPENERS} | {
    "unclosed and cut": ("~~~python\ndef F(x):\n    retu", "def F(x):\n    retu"),
    "in a list": ("1. First\n   ~~~python\n   def F(x):\n       return x\n   ~~~", BODY),
    "two answers: the first": (f"~~~python\n{BODY}\n~~~\nor\n~~~python\ndef F(x): return 0\n~~~", BODY),
    "code without a fence": (f"{BODY}\n~~~\nF(1)\n~~~", f"{BODY}\n~~~\nF(1)\n~~~"),
    "a docstring with a fence": (f"~~~\n{DOCSTRING}\n~~~\nSo.\n", DOCSTRING),
    "not a line's end": ('~~~python\ndef F(): return "\x0c\u2028"\n~~~\nSo.', 'def F(): return "\x0c\u2028"'),
    "a method before": (f"~~~\nclass G:\n    def F(self): 1\n~~~\n~~~\n{BODY}\n~~~", BODY),
    "no fence, and no end": ("x = 1\n" * 4000, "x = 1\n" * 299 + "x = 1"),
    "a line without end": (f"~~~python\n{BODY}\nx = {'1 + ' * 4000}1\n~~~", BODY),
}


@pytest.mark.parametrize("answer, expected", PROGRAMS.values(), ids=PROGRAMS)
def test_programs(answer, expected):
    answer, expected = (text.replace("F", "same").replace("~", "`") for text in (answer, expected))
    assert verdict("program", answer, {"entry_point": "same"}) == (expected, {})


# --- answers that never end
LOOPS = [
    "The answer is " + "9" * 5000,
    "1/" + "\u0660" * 5000,  # Arabic zeros below a line
    "(" * 20_000,
    r"\boxed{" * 3000,
    r"\boxed{" + "{" * 32_000 + "}" * 32_000 + "}",
    r"\frac{1}{" * 7000,
    "1" + " " * 64_000 + "1/2",
    "1万" * 32_000,
    "```python\ndef f(x):\n" + "    (" * 12_000,
]  # fmt: skip


@pytest.mark.parametrize("answer", LOOPS, ids=range(len(LOOPS)))
def test_an_answer_without_an_end_is_read_in_a_second_and_wrong(answer):
    start = time.monotonic()
    assert verdict("number", answer, {"gold": "3"})[1] == {"exact_match": 0.0}
    verdict("letter", answer, {"gold": "A", "letters": "ABCD"})
    rules.find_spans(answer)
    verdict("program", answer, {"entry_point": "f"})
    assert time.monotonic() - start < 1
