r"""How an answer is found in a model's text, and when it is right. There are four kinds of answers:

numbers    GSM8K, CMATH       \boxed{18}, "The answer is 2,125.", 答案是一又七分之二
letters    GPQA, PIQA         "**Answer:** (C)"
spans      DROP               "Answer: ale, rum": official exact match and F1
programs   HumanEval+, MBPP+  the fenced block that defines the entry point; EvalPlus judges it

Harnesses do not agree on these rules. Each rule here has its source beside it.

A model may write anything, even 64,000 characters of it. So the time of every function here grows in proportion to the
text: a pattern begins to match only where such characters begin ("(?<![...])"), and never goes back ("++", "*+").
"""

import ast
import re
import string
import textwrap
import warnings
from fractions import Fraction
from functools import lru_cache

BRACE = re.compile(r"(\\boxed\s*+)?\{|\}")


def boxes(text: str) -> list[str]:
    r"""The content of each \boxed{...} in order, with balanced braces; if a box is in a box, the outer one's."""
    open_braces = []  # for each: whether a box begins here, and where its content begins
    found = []
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append((brace[1] is not None, brace.end()))
        elif open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, brace.start()))
    return [text[start:end] for start, end in found]


# --- numbers, in English, Chinese and LaTeX
WIDE = "０１２３４５６７８９．％－−–＋／＝≈：￥（）", "0123456789.%---+/==:¥()"
CHARACTERS = str.maketrans(*WIDE) | {ord("，"): ", "}
CN_DIGIT = {char: i for i, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
CN_UNIT = {"亿": 10**8, "万": 10**4, "千": 1000, "百": 100, "十": 10}
CN = "".join(CN_DIGIT) + "十百千万亿点"
CN_NUMBER = re.compile(f"[{CN}]+(?![共样定起般直])")  # 一共, 一样, 一定 ... are words in which 一 does not mean one
CN_LONGEST = 100  # the most characters before the point of a Chinese numeral that is read exactly
LONGEST = 4000  # the most characters of a number that is read; Python reads integers of up to 4,300 digits
PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(  # sign and currency, then "w a/b", "a/b" or one number, then % and 万 or 亿
    r"((?:(?<![A-Za-z\d)\]%])-|(?<![A-Za-z\d]))(?:[$¥€£]-?)?)"  # a minus after a digit, unit or bracket subtracts
    rf"(?:(\d+)\s+(\d+)/(\d+)|({PLAIN})\s*/\s*({PLAIN})|({PLAIN}))\s*(%?)([万亿]?)"
)
ANSWER_MARK = re.compile(r"(?i:answer)\s*(?:is|[:=])|答案|####")


def chinese_number(match: re.Match) -> str:
    """A Chinese numeral in decimal digits: 一百零五 -> 105, 二〇二四 -> 2024, 三点一四 -> 3.14."""
    whole, _, decimals = match[0].partition("点")
    if not whole:
        return match[0]
    if len(whole) > CN_LONGEST:
        return "".join(str(CN_DIGIT.get(char, 9)) for char in whole)
    tail = "".join(str(CN_DIGIT[char]) for char in decimals if char in CN_DIGIT)
    return str(chinese_integer(whole)) + ("." + tail if tail else "")


def chinese_integer(text: str) -> int:
    """The number before the greatest unit is multiplied by this unit: 三千万零五 is 三千 times 万, plus 五."""
    for unit, value in CN_UNIT.items():
        before, found, after = text.rpartition(unit)
        if found:
            count = chinese_integer(before)
            if value <= 1000:  # 十五 is 15
                count = count or 1
            return count * value + chinese_integer(after)
    return int("".join(str(CN_DIGIT[char]) for char in text) or 0)


def clean(text: str) -> str:
    r"""Full-width characters, LaTeX and n分之m rewritten for NUMBER: 1\frac23 and 1又3分之2 become 1 2/3."""
    text = text.translate(CHARACTERS).replace("**", " ")
    text = re.sub(r"[^\D0-9]", lambda digit: str(int(digit[0])), text)  # the digits of every script in ASCII

    # LaTeX: escapes and thin spaces, words, fractions
    text = re.sub(r"\\([%$])|\{(,)\}|\\[,!; ]", lambda m: m[1] or m[2] or "", text)
    text = re.sub(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<=\d)\s*(?=\\[cdt]?frac)", " ", text)  # a mixed number; a minus stays next to its fraction
    part = r"\s*(?:\{([^{}]*)\}|(\d))"
    text = re.sub(rf"\\[cdt]?frac{part}{part}", lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)

    # exponents and indices, as in cm^2 and x_1, are not numbers
    text = re.sub(r"\^\s*(?:\{[^{}]*\}|\\?\w+)|(?<=[A-Za-z])_(?:\{[^{}]*\}|\w)", "", text)
    text = re.sub(r"\\[A-Za-z]+", lambda m: "=" if m[0] == r"\approx" else " ", text)

    # Chinese fractions and minus
    part = rf"[{CN}\d.又]"
    text = re.sub(rf"(?<!{part}){part}++分之[{CN}\d.]+", lambda m: CN_NUMBER.sub(chinese_number, m[0]), text)
    text = re.sub(r"(?<![\d.])([\d.]++)分之([\d.]*\d)", r" \2/\1", text)
    text = re.sub(r"(?<=\d)又(?= [\d.]++/)", "", text)
    return re.sub(rf"负\s*(?=[{CN}\d])", "-", text)


def numbers(text: str) -> list[str]:
    """The numbers in cleaned text. Chinese numerals count only if no other digits are there: 一, 两 are often words."""
    if not re.search(r"\d", text):
        text = CN_NUMBER.sub(chinese_number, text)
    found = []
    for match in NUMBER.finditer(text):
        below = match[4] or match[6] or "1"
        if not re.fullmatch(r"[0.,]+", below):  # n/0 is not a number
            found.append(re.sub(r"[,$¥€£]|(?<!\s)\s++(?=[/%万亿])|(?<=/)\s+", "", match[0]).strip())
    return found


def readings(number: str) -> list[Fraction]:
    """The values that a string of `numbers` may have: 40% is 2/5 or 40, and 8万 is 8 or 80000.

    Only the question tells which ("how many percent?", "how many 万?"), and DeepSeek-Math drops such units as well.
    A number of more than LONGEST characters has none.
    """
    if len(number) > LONGEST:
        return []
    sign, whole, top, bottom, a, b, plain, percent, unit = NUMBER.fullmatch(number).groups()
    value = Fraction(a or top or plain) / Fraction(b or bottom or 1) + Fraction(whole or 0)
    if "-" in sign:
        value = -value
    if percent:
        return [value / 100, value]
    return [value, value * {"": 1, "万": 10**4, "亿": 10**8}[unit]]


def find_number(output: str) -> str | None:
    r"""The answer's number as it is written, or None. The first of these rules that applies counts:

    the last \boxed{} that is not blank (OpenCompass, DeepSeek-Math; a box without a number is no answer) -> the last
    "####" (GSM8K's own mark), "answer is", "answer:" or 答案 with a number on its line -> the last number
    (lm-evaluation-harness).
    """
    boxed = [box for box in boxes(output) if box.strip()]
    if boxed:
        found = numbers(clean(boxed[-1]).rpartition("=")[2])
        return found[0] if found else None

    text = clean(output)
    end = len(text)
    for mark in reversed(list(ANSWER_MARK.finditer(text))):
        # up to the next mark, after which there was no number
        line = text[mark.end() : end].lstrip(" \t\n:=是为").partition("\n")[0]
        end = mark.start()
        sentence = re.split(r"[.。!;；](?!\d)", line, maxsplit=1)[0]
        # "5 + 6 = 11" answers 11, but "12, since 12 - 4 = 8" answers 12: only bare arithmetic before "=" is skipped
        found = numbers(re.sub(r"^[^A-WYZa-wyz\u4e00-\u9fff]*=", "", sentence))
        if found:
            return found[0]
    found = numbers(text)
    return found[-1] if found else None


def equal_numbers(a: str, b: str) -> bool:
    """Do any readings of the two differ by less than 1e-3 (DeepSeek-Math, for GSM8K and CMATH alike)?"""
    return any(abs(x - y) < Fraction("1e-3") for x in readings(a) for y in readings(b))


# --- letters
def find_letter(output: str, letters: str) -> str | None:
    r"""The chosen option's letter, or None. Markup (** $ ( \text{) is dropped, then the first rule that applies counts:

    the last "Answer: X" or "answer is X" (simple-evals, widened) -> the last \boxed{X} -> a letter and nothing else ->
    an "X." at the beginning. A capital must not begin a word, and a small letter must end its line: "Answer: Because"
    and "the answer is a pump" choose nothing.
    """
    one = rf"([{letters}](?![A-Za-z0-9])|[{letters.lower()}](?=\W*$))"
    link = r"\s*+(?:is|would be|should be)?\s*+:?\s*+"
    markup = r"[*`$(\[\"'“”]|\\(?:boxed|text\w*|math\w*)\s*\{"
    text = re.sub(markup, "", output)
    boxed = [re.sub(markup, "", box) for box in boxes(output)]

    rules = [
        (rf"(?i:\banswer{link}(?:option|choice)?\s*+){one}", [text]),
        (rf"\A\W*{one}", boxed),
        (rf"\A\W*{one}\W*\Z", [text]),
        (rf"\A\W*([{letters}])(?=[).:,;\]]|\s*$)", [text]),
    ]
    for pattern, places in rules:
        found = [letter for place in places for letter in re.findall(pattern, place, re.MULTILINE)]
        if found:
            return found[-1].upper()
    return None


# --- spans (DROP). A gold answer is a list of references, and each reference is a tuple of spans
FLOAT = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)(e\+?\d+)?|nan|inf(inity)?")  # what float() reads where "-" has split words


def find_spans(output: str) -> str | None:
    r"""The last "Answer: ..." line (simple-evals), or else the whole output; of either, what is in its last \boxed{},
    if it has one."""
    text = re.sub(r"\*\*|`", "", output)
    answer = (re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text) or [text])[-1]
    answer = (boxes(answer) or [answer])[-1]
    return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer).strip() or None


@lru_cache(maxsize=64)  # one answer meets every reference
def normalised(text: str) -> str:
    """DROP's official normalisation (AllenNLP), traps included: 7.6% -> 76.0, $5.50 -> 550.0, -5 -> 5.0."""
    words = []
    for token in re.split(" |-", text.lower()):
        if not FLOAT.fullmatch(token):
            token = "".join(char for char in token if char not in string.punctuation)
        if FLOAT.fullmatch(token):
            words.append(str(float(token)))
        else:
            words += re.sub(r"\b(a|an|the)\b", " ", token).split()
    return " ".join(words)


def exact_match_and_f1(predicted: list[str], gold: tuple[str, ...]) -> tuple[float, float]:
    """Official DROP exact match and F1 (AllenNLP; 0..1, F1 to two decimals) of predicted spans and one reference.

    EM: the same set of normalised spans, and the same number. F1: a span is a bag of words, and bags are paired one to
    one, so that the sum of F1 is greatest.
    """
    if len(predicted) > 200 * len(gold):  # so many that F1 rounds to zero
        return 0.0, 0.0
    spans = [normalised(span) for span in predicted]
    wanted = [normalised(span) for span in gold]
    exact = set(spans) == set(wanted) and len(spans) == len(wanted)

    # for the greatest sum a gold span needs only its best partners, as many as there are gold spans: if all others
    # have taken one of these, one is still left
    bags = [set(span.split()) for span in spans]
    f1 = [[bag_f1(bag, set(other.split())) for bag in bags] for other in wanted]
    partners = [sorted(range(len(bags)), key=of.__getitem__)[-len(wanted) :] for of in f1]

    # a bit for each gold span that is paired so far -> the greatest sum
    best = {0: 0.0}
    for j in set().union(*partners):
        extended = dict(best)
        for i, of in enumerate(f1):
            for paired, total in best.items():
                if of[j] > 0 and not paired >> i & 1:
                    both = paired | 1 << i
                    extended[both] = max(extended.get(both, 0.0), total + of[j])
        best = extended
    return float(exact), round(max(best.values()) / max(len(spans), len(wanted)), 2)


def bag_f1(bag: set[str], gold: set[str]) -> float:
    """F1 of two bags of words; 0 if the gold bag has numbers and the other bag has none of these numbers."""
    digits = {word for word in gold if FLOAT.fullmatch(word)}
    if digits and not digits & bag:
        return 0.0
    if not bag and not gold:
        return 1.0
    return 2 * len(bag & gold) / (len(bag) + len(gold))


def drop_scores(extracted: str | None, gold: list[tuple[str, ...]]) -> tuple[float, float]:
    """EM and F1, each the best over all references; for a reference of several spans the answer is cut in several
    ways."""
    if extracted is None:
        return 0.0, 0.0
    scores = []
    squeezed = " ".join(extracted.split())
    ways = [[span.strip() for span in re.split(cut, squeezed)] for cut in (";", " and ", ",? and |[,;] ")]
    for reference in gold:
        scores.append(exact_match_and_f1([extracted], reference))
        if len(reference) > 1:
            scores += [exact_match_and_f1(spans, reference) for spans in ways]
    return max(em for em, _ in scores), max(f1 for _, f1 in scores)


# --- programs
# `evalplus.sanitize` parses every sequence of lines, and a thousand nested brackets make it crash, so the answer of a
# model that repeats itself is cut. In both data sets the longest right program has 58 lines, and the longest line has
# 410 characters
MOST_LINES = 300
LONGEST_LINE = 900
# the parts of a line that opens fenced code: what is before the fence, the fence, the language, and a title
OPENING = re.compile(r"([^`]*+)(`{3,}+)[ \t]*+([\w+-]*+)[^`\n]*+\n")


def fenced(text: str) -> list[tuple[str, str]]:
    """The fenced code of a text: (language, code). A fence that is never closed ends with the text."""
    blocks = []
    closing = None
    for line in re.split(r"(?<=\n)", text):
        if closing is None:
            opening = OPENING.fullmatch(line)
            if opening:
                before, fence, language = opening.groups()
                indent = len(before) if before.isspace() else 0
                blocks.append((language.lower(), indent, []))
                # a fence further to the right is part of the code, such as an example in a docstring
                closing = re.compile(rf"[ \t]{{0,{indent}}} {{0,3}}{fence}")
            continue

        if closing.match(line):
            closing = None
        else:
            blocks[-1][2].append(line)

    # in a list the fence is indented, and so is its code
    joined = [(language, indent, "".join(lines)) for language, indent, lines in blocks]
    return [(language, textwrap.dedent(code) if indent else code) for language, indent, code in joined]


def writes(code: str, name: str) -> bool:
    """Is this Python code that defines `name`, with more than a docstring, `...`, `pass` or `raise` in it?"""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    definitions = [node for node in tree.body if getattr(node, "name", None) == name]
    return any(not is_stub(statement) for node in definitions for statement in node.body)


def is_stub(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, (ast.Pass, ast.Raise))


def find_code(output: str, entry_point: str) -> str | None:
    """The program for EvalPlus, or None for a blank output.

    It is the first of: fenced Python (or fenced code without a language) that defines the entry point with a body;
    fenced Python that has only its signature, as the question does; any fenced Python; the whole output.
    `evalplus.sanitize` then cuts away what is not code.
    """
    text = output.replace("\r\n", "\n")
    blocks = [code for language, code in fenced(text) if language in ("", "py", "python", "python3")]

    defines = re.compile(rf"^[ \t]*+(?:async[ \t]++)?(?:def|class)[ \t]++{re.escape(entry_point)}\b", re.MULTILINE)
    defining = [block for block in blocks if defines.search(block)]
    written = [block for block in defining if writes(block, entry_point)]
    code = [*written, *defining, *blocks, text][0]
    lines = [line for line in re.split(r"(?<=\n)", code) if len(line) <= LONGEST_LINE]
    program = "".join(lines[:MOST_LINES])
    return program if program.strip() else None
