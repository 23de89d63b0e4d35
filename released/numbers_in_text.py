"""Numbers in text, for GSM8K and CMATH: how they are found, read and compared, in English, Chinese and LaTeX.

clean          full-width characters, LaTeX and Chinese fractions rewritten
numbers        what is a number in cleaned text, as written
readings       what such a string may mean
find_answer    the one number that a model's text gives as its answer
equal          whether two of them mean the same
"""

import re
from fractions import Fraction

WIDE = "０１２３４５６７８９．％－−–＋／＝≈：￥（）", "0123456789.%---+/==:¥()"
CHARACTERS = str.maketrans(*WIDE) | {ord("，"): ", ", ord("½"): " 1/2", ord("¼"): " 1/4", ord("¾"): " 3/4"}
CN_DIGIT = {char: i for i, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
CN = "".join(CN_DIGIT) + "十百千万亿点"
CN_NUMBER = re.compile(f"[{CN}]+(?![共样定起般直])")  # 一共, 一样, 一定 ... are words, not ones
PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(  # sign and currency, then "w a/b", "a/b" or one number, then % and 万 or 亿
    r"((?:(?<![A-Za-z\d)\]%])-|(?<![A-Za-z\d]))(?:[$¥€£]-?)?)"  # a minus after a digit, unit or bracket subtracts
    rf"(?:(\d+)\s+(\d+)/(\d+)|({PLAIN})\s*/\s*({PLAIN})|({PLAIN}))\s*(%?)([万亿]?)"
)
BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}")  # braces in it: three levels
ANSWER_MARK = re.compile(r"(?i:answer)\s*(?:is|[:=])|答案|####")


def chinese_number(match: re.Match) -> str:
    """A Chinese numeral in decimal digits: 一百零五 -> 105, 二〇二四 -> 2024, 三点一四 -> 3.14."""
    whole, _, decimals = match[0].partition("点")
    total = section = digit = 0
    for char in whole:
        if char in CN_DIGIT:
            digit = 10 * digit + CN_DIGIT[char]
        elif char in "十百千":
            section, digit = section + (digit or 1) * {"十": 10, "百": 100, "千": 1000}[char], 0
        else:  # 亿 multiplies all that stands before it, 万 included
            section += digit
            total, section, digit = (total + section) * 10**8 if char == "亿" else total + section * 10**4, 0, 0
    tail = "".join(str(CN_DIGIT[char]) for char in decimals if char in CN_DIGIT)
    return f"{total + section + digit}" + (f".{tail}" if tail else "") if whole else match[0]


def clean(text: str) -> str:
    r"""Full-width characters, LaTeX and n分之m rewritten for `NUMBER`: both 1\frac23 and 1又3分之2 become 1 2/3."""
    text = text.translate(CHARACTERS).replace("**", " ")
    text = re.sub(r"\\([%$])|\{(,)\}|\\[,!; ]", lambda m: m[1] or m[2] or "", text)
    text = re.sub(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<=\d)\s*(?=\\[cdt]?frac)", " ", text)  # a mixed number; a minus stays next to its fraction
    part = r"\s*(?:\{([^{}]*)\}|(\d))"
    text = re.sub(rf"\\[cdt]?frac{part}{part}", lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)
    text = re.sub(r"\s*\^\s*(?:\{[^{}]*\}|\\?\w+)|(?<=[A-Za-z])_(?:\{[^{}]*\}|\w)", "", text)  # cm^2, x_1: no numbers
    text = re.sub(r"\\[A-Za-z]+", lambda m: "=" if m[0] == r"\approx" else " ", text)
    text = re.sub(rf"[{CN}\d.又]+分之[{CN}\d.]+", lambda m: CN_NUMBER.sub(chinese_number, m[0]), text)
    text = re.sub(r"(?:(\d+)又)?([\d.]+)分之([\d.]*\d)", lambda m: f"{m[1] or ''} {m[3]}/{m[2]}", text)
    return re.sub(rf"负\s*(?=[{CN}\d])", "-", text)


def numbers(text: str) -> list[str]:
    """The numbers of cleaned `text`. Chinese numerals count only where no other digit is: 一, 两 are mostly words."""
    if not re.search(r"\d", text):
        text = CN_NUMBER.sub(chinese_number, text)
    found = [m[0] for m in NUMBER.finditer(text) if not re.fullmatch(r"[0.]+", m[4] or m[6] or "1")]  # no n/0
    return [re.sub(r"[,$¥€£]|\s+(?=[/%万亿])|(?<=/)\s+", "", number).strip() for number in found]


def readings(number: str) -> list[Fraction]:
    """What a string of `numbers` may mean, its plain value first: 40% is 2/5 or 40, 8万 is 8 or 80000.

    Only the question tells ("how many percent?", "how many 万?"), and DeepSeek-Math drops such units as well.
    """
    sign, whole, top, bottom, a, b, plain, percent, unit = NUMBER.fullmatch(number).groups()
    value = Fraction(a or top or plain) / Fraction(b or bottom or 1) + Fraction(whole or 0)
    value *= -1 if "-" in sign else 1
    return [value / 100, value] if percent else [value, value * {"": 1, "万": 10**4, "亿": 10**8}[unit]]


def find_answer(output: str) -> str | None:
    r"""The answer's number as written, or None: the first rule that applies, each looking from the end.

    \boxed{} unless blank (OpenCompass, DeepSeek-Math; a box without a number is no answer) -> "####" (GSM8K's own
    mark), "answer is", "answer:" or 答案 with a number on its line -> the last number (lm-evaluation-harness).
    """
    if boxed := [box for box in BOX.findall(output) if box.strip()]:
        found = numbers(clean(boxed[-1]).rpartition("=")[2])
        return found[0] if found else None
    text = clean(output)
    for mark in reversed(list(ANSWER_MARK.finditer(text))):
        line = text[mark.end() :].lstrip(" \t\n:=是为").partition("\n")[0]
        sentence = re.split(r"[.。!;；](?!\d)", line)[0]
        # "5 + 6 = 11" answers 11, but "12, since 12 - 4 = 8" answers 12: only bare arithmetic before "=" is skipped
        if found := numbers(re.sub(r"^[^A-WYZa-wyz\u4e00-\u9fff]*=", "", sentence)):
            return found[0]
    found = numbers(text)
    return found[-1] if found else None


def equal(a: str, b: str) -> bool:
    """Within 1e-3 of each other (DeepSeek-Math, for GSM8K and CMATH alike), in any reading of either."""
    return any(abs(x - y) < Fraction("1e-3") for x in readings(a) for y in readings(b))
