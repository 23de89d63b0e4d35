r"""How an answer is read from a model's text, and when it is right: filters and scores of the tasks beside this file.

    numbers     GSM8K, CMATH       \boxed{18}, "The answer is 2,125.", 答案是3亿5000万
    letters     GPQA, PIQA         "**Answer:** (C)"
    spans       DROP               "Answer: ale, rum"; exact match and F1 are lm-eval's
    programs    HumanEval+, MBPP+  the fenced block that defines the entry point; EvalPlus judges it

Beside its scores lm-eval logs the tokens and forwards of an answer, its `cost` (released/harness.py).

A model may write anything, and the time of some patterns here grows with the square of the text. So a filter sees only
the last LONGEST characters of an answer, and of a program the first MOST_LINES lines.
"""

import re
import textwrap
import unicodedata
from collections.abc import Callable
from fractions import Fraction

LONGEST = 4000  # shorter than the longest integer that Python reads, which has 4,300 digits
# `evalplus.sanitize` parses every sequence of lines, and thousands of nested brackets make it crash. In both data sets
# the longest right program has 58 lines, and the longest line has 410 characters
MOST_LINES = 300
LONGEST_LINE = 900


def filtered(find: Callable[[str, dict], str | None]) -> Callable:
    """The function of an lm-eval filter: each answer becomes what is found in it ("": nothing), and keeps its cost."""

    def apply(answers: list[list[str]], docs: list[dict]) -> list[list[str]]:
        return [
            [type(text)(find(text, doc) or "", text.cost) for text in texts]
            for texts, doc in zip(answers, docs, strict=True)
        ]

    return apply


def plain(text: str) -> str:
    """The end of a text in plain characters, instead of full-width ones and thin spaces; without marks of bold type."""
    if len(text) > LONGEST:
        text = re.sub(r"^[\w.,]+", "", text[-LONGEST:])  # a number that was cut in two is another number
    text = re.sub("[−–]", "-", text.replace("，", ", "))
    text = re.sub(r"(?<=\d)(?=[¼½¾⅓⅔])", " ", text)
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    return re.sub(r"\\[()\[\]]|\*\*|`", "", text)


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is not empty: "\boxed{\frac{1}{2}}." -> "\frac{1}{2}"."""
    text = re.sub(r"\\boxed\s*\{\s*\}", "", text)
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if box and depth == 0:
            return rest[:i]
    return None


# --- numbers
DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)"
PLAIN = rf"(?:{DIGITS}(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(  # a sign; then "1 2/3", "2/3", or "3亿5000万" and the like; then %
    rf"(?<![A-Za-z\d_.])(?:(?<![A-Za-z\d)%])-)?(?:\d+ \d+/\d+|{PLAIN}/{PLAIN}|{PLAIN}(?:[万亿]{PLAIN})*[万亿]?)%?"
)
MARK = re.compile(r"(?:answer\s*(?:is\s*:?|:|=)|答案[是为]?:?|####)\s*([^\n]*)", re.IGNORECASE)
UNITS = {"": 1, "万": 10**4, "亿": 10**8}


def numbers(text: str) -> list[str]:
    r"""The numbers in plain text, without what groups their digits: "$12,345 or \frac12" -> ["12345", "1/2"]."""
    # LaTeX: thin spaces, money and percent, words, fractions; exponents and indices are no numbers
    text = re.sub(r"\\[,!;: ]|~", " ", text).replace("{,}", ",")
    text = re.sub(r"(?:\b[A-Z]{1,3})?\\?[$¥€£]", "", text).replace(r"\%", "%")
    text = re.sub(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<=\d)\s*\\[cdt]?frac", r" \\frac", text)
    text = re.sub(r"\\[cdt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r"\1\2/\3\4", text)
    text = re.sub(r"\^\s*(?:\{[^{}]*\}|\\?\w+)|(?<=[A-Za-z])_(?:\{[^{}]*\}|\w)", "", text)

    # Chinese: fractions and minus
    text = re.sub(r"百分之([\d.]+)", r"\1%", text)
    text = re.sub(r"(\d+)又(\d+)分之(\d+)", r"\1 \3/\2", text)
    text = re.sub(r"(\d+)分之(\d+)", r"\2/\1", text)
    text = re.sub(r"负(?=\d)", "-", text)

    # blanks around what belongs to a number
    text = re.sub(r"(?<=\d)\s*/\s*(?=\d)", "/", text)
    text = re.sub(r"(?<=\d) +(?=[%万亿])", "", text)
    found = [match[0] for match in NUMBER.finditer(text)]
    return [number if re.search(r"\d \d+/", number) else re.sub("[, ]", "", number) for number in found]


def find_number(answer: str, doc: dict | None = None) -> str | None:
    r"""The first of these rules that applies: the number in the last \boxed{} (OpenCompass, DeepSeek-Math; a box
    without one answers nothing); after the last "####", "answer is", "answer:" or 答案 with a number on its line; the
    last number (lm-eval)."""
    text = plain(answer)
    box = boxed(text)
    if box is not None:
        found = numbers(box.rpartition("=")[2])
        return found[0] if found else None

    for line in reversed(MARK.findall(text)):
        # "5 + 6 = 11" answers 11, but "12, since 12 - 4 = 8" answers 12: only bare arithmetic is left out
        sentence = re.split(r"[.。;](?!\d)", line)[0]
        found = numbers(re.sub(r"^[\d\s+*/x×÷().,$-]*=", "", sentence))
        if found:
            return found[0]
    return (numbers(text) or [None])[-1]


def readings(number: str) -> list[Fraction]:
    """The values that a number may have: 40% is 2/5 or 40, and 8万 is 80000 or 8. Only the question tells which ("how
    many percent?"), and DeepSeek-Math leaves such units out as well."""
    whole, _, fraction = number.strip("-%").rpartition(" ")
    if "/" in fraction:
        above, below = map(Fraction, fraction.split("/"))
        if below == 0:
            return []
        values = [Fraction(whole or 0) + above / below]
    else:
        parts = re.findall(r"([\d.]+)([万亿]?)", fraction)
        values = [sum(Fraction(digits) * UNITS[unit] for digits, unit in parts)]
        if len(parts) == 1:
            values.append(Fraction(parts[0][0]))
    if number.endswith("%"):
        values.append(values[0] / 100)
    return [-value if number.startswith("-") else value for value in values]


def number_scores(doc: dict, answers: list[str]) -> dict[str, float]:
    """Right, if any readings differ by less than 1e-3 (DeepSeek-Math, for GSM8K and CMATH alike)."""
    found = readings(answers[0]) if answers[0] else []
    right = any(abs(x - y) < Fraction("1e-3") for x in found for y in readings(doc["gold"]))
    return {"exact_match": float(right)} | answers[0].cost


# --- letters
def find_letter(answer: str, doc: dict) -> str | None:
    r"""The chosen option, or None. The first of these rules that applies: the last "Answer: X" or "answer is X"
    (simple-evals, widened); what is in the last \boxed{}; a last line with a letter and nothing else; an "X." or "(X)"
    at the beginning; the last "X is correct"; the last "answer X", "option X" or 选X. A capital may not begin a word,
    and a small letter must end its line: "Answer: Because" chooses nothing."""
    letters = doc["letters"]
    one = rf"([{letters}](?![A-Za-z0-9])|[{letters.lower()}](?=\W*$))"
    link = r"(?:[^.。,;\nA-Z]{0,30}?(?:\b(?:is|be|was)\b|[是为选])\s*:?|\s*[:=>-]+)\s*"  # "answer to the question is"
    option = r"(?:(?:therefore|thus|[a-z]{1,12}ly) )?(?:option|choice|letter|选项)?\s*"
    text = plain(answer)
    bare = re.sub(r"\\(?:boxed|text\w*|math\w*)|[*$\\(\[{【\"'“”]", "", text)
    for pattern, place in (
        (rf"(?:\b[Aa]nswer|ANSWER|答案|\b[Cc]orrect (?:option|choice)|正确选项){link}(?i:{option}){one}", bare),
        (rf"\A\W*(?:\\\w+\W*)?{one}", boxed(text) or ""),
        (rf"^[^\w\n]*{one}\W*\Z", bare),
        (rf"\A\W*([{letters}])(?=[).:,\]]|\s*$)", text),
        (rf"(?<![A-Za-z])([{letters}])\)?(?:\s+is (?:the )?(?:correct|right|best)\b|\s*是?正确)", bare),
        (rf"(?i:(?:\banswer|答案|\boption|选[择项]?)\s*{option}){one}(?!\s*(?:is|was|would|是?[错不]))", bare),
    ):
        found = re.findall(pattern, place, re.MULTILINE)
        if found:
            return found[-1].upper()
    return None


def letter_scores(doc: dict, answers: list[str]) -> dict[str, float]:
    return {"exact_match": float(answers[0] == doc["gold"])} | answers[0].cost


# --- spans (DROP)
def find_spans(answer: str, doc: dict | None = None) -> str | None:
    r"""The last "Answer: ..." line (simple-evals), or else the whole answer; of either, what its last box holds."""
    text = plain(answer)
    line = (re.findall(r"(?i)answer\s*:\s*([^\n]+)", text) or [text])[-1]
    line = boxed(line) or line
    return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", line).strip()


def span_scores(doc: dict, answers: list[str]) -> dict[str, float]:
    """Official exact match and F1, each the best over all references. For a reference of several spans the answer is
    cut in several ways, too, because it is one text."""
    from lm_eval.tasks.drop.utils import get_metrics

    squeezed = " ".join(answers[0].split())
    cut = [re.split(pattern, squeezed) for pattern in ("; *", " and ", ",? and |[,;] ")]
    pairs = [(0.0, 0.0)]
    for reference in doc["references"] if squeezed else []:
        ways = [[squeezed]] + (cut if len(reference) > 1 else [])
        pairs += [get_metrics(spans, reference) for spans in ways]
    em, f1 = map(max, zip(*pairs, strict=True))
    return {"exact_match": float(em), "f1": float(f1)} | answers[0].cost


# --- programs
# the fence that closes a block stands about as deep as the line that opens it; deeper ones are in a docstring
FENCE = re.compile(r"^([ \t]*+)[^\n]*?(```|~~~)[^`\n]*\n(.*?)(?:\n\1 {0,3}\2|\Z)", re.DOTALL | re.MULTILINE)


def find_program(answer: str, doc: dict) -> str | None:
    """The program for EvalPlus, whose `sanitize` then cuts away what is not code: the first fenced block that defines
    the entry point, or else the whole answer if it does, or else the first block."""
    lines = [line for line in answer.split("\n") if len(line) <= LONGEST_LINE]
    text = "\n".join(lines[:MOST_LINES])
    blocks = [textwrap.dedent(block) for *_, block in FENCE.findall(text)]
    defines = re.compile(rf"^(?:async )?(?:def|class) {re.escape(doc['entry_point'])}\b", re.MULTILINE)
    return [*filter(defines.search, [*blocks, text]), *blocks, text][0]


def program_scores(doc: dict, answers: list[str]) -> dict[str, float]:
    """Only what the answer cost: EvalPlus runs programs, and this process never does."""
    return answers[0].cost


number_filter = filtered(find_number)
letter_filter = filtered(find_letter)
span_filter = filtered(find_spans)
program_filter = filtered(find_program)
