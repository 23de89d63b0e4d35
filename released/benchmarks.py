"""The paper's seven benchmarks: how a file is read, a question put, an answer found in the model's text, and scored.

One short section a task: GSM8K, CMATH, GPQA-Diamond, DROP, PIQA, HumanEval+, MBPP+.
`TASKS[name].load(path)` reads the *published* file (JSONL, JSON, CSV, zip, gzip); the caller generates; `extract` and
`correct` give the headline score, `extra_scores` the other rules in use. The paper names no prompt, shot count or
answer rule: each default here has its source beside it, and what harnesses do differently is an option.

Refuses: downloading, guessing at a damaged file (ValueError: what is wrong, where, what to do), and running
model-written code: HumanEval+ and MBPP+ are judged by the EvalPlus harness, which run.py starts apart.

    pytest tests/released/test_benchmarks.py            # add --bench_data DIR to go through the real files
"""

import csv
import gzip
import io
import json
import random
import re
import string
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from released.numbers_in_text import BOX, clean, equal, find_answer, numbers, readings

Rows = Iterator[tuple[str, dict[str, str], Any, dict]]  # id ("": number it), what fills the prompt, gold, extra


@dataclass(frozen=True)
class Item:
    """One question: `prompt` is the user turn (chat markup is added elsewhere), `gold` what `correct` compares with."""

    id: str
    prompt: str
    gold: Any
    extra: dict


@dataclass(frozen=True)
class Task:
    """One benchmark. `correct` is None where only EvalPlus can judge; `options` says what else `load` takes, and why.

    `base`, `cocommit` (percent), `nfe_base`, `nfe_cocommit` (forward passes a token) are the paper's Table 1: the plain
    sampler and joint commitment.
    """

    name: str
    title: str
    n_official: int
    base: float
    cocommit: float
    nfe_base: float
    nfe_cocommit: float
    read: Callable[..., Rows]
    extract: Callable[[str, Item], str | None]
    correct: Callable[[str | None, Item], bool] | None
    extra_scores: Callable[[str, Item], dict[str, float]]
    prompt: str
    options: dict[str, str]

    def load(self, path: str | Path, template: str | None = None, **options: Any) -> list[Item]:
        """Reads the published file at `path`; ValueError names what is wrong with it, or with the prompt template."""
        template, items = template or self.prompt, []
        for number, (name, values, gold, extra) in enumerate(self.read(Path(path), **options)):
            if unused := [key for key in values if "{" + key + "}" not in template]:
                raise ValueError(f"{self.title}: the prompt template lacks {{{unused[0]}}}; add it")
            # in one pass, for a question may hold braces too
            prompt = re.sub(r"\{(" + "|".join(values) + r")\}", lambda match, put=values: put[match[1]], template)
            items.append(Item(name or f"{self.name}/{number}", prompt, gold, extra))
        if not items:
            raise ValueError(f"{path}: the file holds no record; fetch the published {self.title} file again")
        return items


# ---- Files ----------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """UTF-8 text of a plain or gzip file (told by its first bytes); ValueError where it cannot be read."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); give the path of the published file") from error


def read_jsonl(path: Path) -> Iterator[tuple[str, dict]]:
    """("file:line", record) for each line that is not blank; ValueError where a line is no JSON object."""
    for number, line in enumerate(read_text(path).split("\n"), 1):  # not splitlines(): a string may hold U+2028
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: the line is not a JSON object; fetch the published file again")
            yield f"{path}:{number}", record


def fields(where: str, record: dict, *names: str) -> list[str]:
    """The named fields as text ("a|b": the first one there); ValueError where one is absent or blank."""
    values = [next((record[key] for key in name.split("|") if key in record), None) for name in names]
    for name, value in zip(names, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
            raise ValueError(f'{where}: field "{name}" is missing, blank or no text; use the published file')
    return [str(value) for value in values]


# ---- Answers that are numbers (GSM8K, CMATH); how they are found: numbers_in_text.py -------------------------------


def read_numbers(path: Path, question: str, answer: str, mark: str) -> Rows:
    """Questions whose gold is the one number that follows `mark` in the field `answer`, kept as written ("27.3%")."""
    for where, record in read_jsonl(path):
        asked, text = fields(where, record, question, answer)
        found = numbers(clean(text.partition(mark)[2] if mark else text))
        if len(found) != 1:
            raise ValueError(f'{where}: "{answer}" does not give one number after "{mark}"; use the published file')
        yield "", {"question": asked}, found[0], {}


def correct_number(extracted: str | None, item: Item) -> bool:
    """The same number in any reading; no number is wrong."""
    return extracted is not None and equal(extracted, item.gold)


# ---- GSM8K: openai/grade-school-math test.jsonl, {"question", "answer"}; the worked answer ends "#### 72" -----------

# OpenCompass, 0-shot; lm-evaluation-harness and LLaDA's own runs show 4 or 5 worked examples
GSM8K_PROMPT = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
read_gsm8k = partial(read_numbers, question="question", answer="answer", mark="####")


def extra_gsm8k(output: str, item: Item) -> dict[str, float]:
    """lm-evaluation-harness "flexible-extract": its last match, equal as a string but for , $ and a final dot."""
    found = [a or b for a, b in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", output)]
    return {"flexible": float(bool(found) and re.sub(r",|\$|\.$", "", found[-1]) == item.gold)}


# ---- CMATH: the test split, {"question", "golden"}; the authors' own dev file says "input" --------------------------

CMATH_PROMPT = "{question}\n请通过逐步推理来解答问题，并把最终答案放置于\\boxed{}中。"  # DeepSeek-Math
read_cmath = partial(read_numbers, question="question|input", answer="golden|answer", mark="")


def extra_cmath(output: str, item: Item) -> dict[str, float]:
    """The authors' rule: one of the last two numbers is within 1 % of the gold, or equal where both are integers.

    How numbers are found is this project's own: their patterns miss bold, minus and Chinese numerals.
    """
    gold, official = readings(item.gold)[0], False
    for value in (readings(number)[0] for number in numbers(clean(output))[-2:]):
        close = abs(value - gold) < (min(abs(value), abs(gold)) + Fraction("1e-6")) / 100
        official |= value == gold if value.denominator == gold.denominator == 1 else close
    return {"official": float(official)}


# ---- Letters in text (GPQA, PIQA) -----------------------------------------------------------------------------------


def extract_letter(output: str, item: Item) -> str | None:
    r"""The chosen option's letter, or None. Markup (** $ ( \text{) is dropped, then the first rule that applies counts:

    the last "Answer: X" or "answer is X" (simple-evals, widened) -> the last \boxed{X} -> a letter and no more -> where
    a letter was all we asked for (PIQA): a leading "X." or "X is" -> the last "option X". A capital must not start a
    word and a small letter must end its line: "Answer: Because" and "the answer is a pump" choose nothing.
    """
    letters = item.extra["letters"]
    one = rf"([{letters}](?![A-Za-z0-9])|[{letters.lower()}](?=\W*$))"
    link = r"\s*(?:is|would be|should be)?\s*:?\s*"
    markup = r"[*`$(\[\"'“”]|\\(?:boxed|text\w*|math\w*)\s*\{"
    text, boxed = re.sub(markup, "", output), [re.sub(markup, "", box) for box in BOX.findall(output)]
    rules = [
        (rf"(?i:\banswer{link}(?:option|choice)?\s*){one}", [text]),
        (rf"\A\W*{one}", boxed),
        (rf"\A\W*{one}\W*\Z", [text]),
    ]
    if item.extra["letter_only"]:
        rules.append((rf"\A\W*([{letters}])(?=[).:,;\]]|\s*$|\s+(?:is|because|since)\b)", [text]))
        rules.append((rf"(?i:\b(?:option|choice|solution|choose|pick|select){link}){one}", [text]))
    for pattern, places in rules:
        if found := [letter for place in places for letter in re.findall(pattern, place, re.MULTILINE)]:
            return found[-1].upper()
    return None


def correct_letter(extracted: str | None, item: Item) -> bool:
    """The same letter; no letter is wrong."""
    return extracted == item.gold


# ---- GPQA-Diamond: gpqa_diamond.csv or the authors' zip. They ask not to publish its records: never print one -------


GPQA_PROMPT = (  # simple-evals
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
    "{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}"
)
GPQA_OPTIONS = {
    "repeats": "runs over the questions, options reordered: 1, or 4 (simple-evals, and LLaDA2.1's scores are k/792)",
    "seed": "of the option orders; 0 in simple-evals",
    "password": "of the authors' zip; it is in GPQA's README",
}


def read_gpqa(path: Path, repeats: int = 1, seed: int = 0, password: str | None = None) -> Rows:
    """Columns by name; options permuted as in simple-evals: one draw a row in order, all rows again for each repeat."""
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                name = next((n for n in archive.namelist() if n.endswith("gpqa_diamond.csv")), "gpqa_diamond.csv")
                text = archive.read(name, pwd=(password or "").encode() or None).decode("utf-8-sig")
        except (KeyError, RuntimeError, zipfile.BadZipFile, zlib.error, UnicodeDecodeError) as error:
            advice = "give the password from GPQA's README, or the extracted gpqa_diamond.csv (a must for an AES zip)"
            raise ValueError(f"{path}: the zip cannot be unpacked ({error}); {advice}") from error
    else:
        text = read_text(path)
    csv.field_size_limit(2**24)  # explanations outgrow the default cell
    try:
        rng, rows = random.Random(seed), list(csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(f"{path}: damaged CSV ({error}); extract gpqa_diamond.csv again") from error
    columns = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    for repeat in range(repeats):
        for number, row in enumerate(rows, 1):
            question, *answers = fields(f"{path}: record {number}", row, *columns)
            order = rng.sample(range(4), 4)
            options = {letter: answers[index] for letter, index in zip("ABCD", order, strict=True)}
            name = f"{row.get('Record ID') or f'gpqa/{number}'}#{repeat}"
            extra = {"letters": "ABCD", "letter_only": False}
            yield name, {"question": question} | options, "ABCD"[order.index(0)], extra


def extra_gpqa(output: str, item: Item) -> dict[str, float]:
    """simple-evals' own rule: the first "Answer: X", markup in place, case kept."""
    match = re.search(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?", output)
    return {"simple_evals": float(match is not None and match[1] == item.gold)}


# ---- DROP: drop_dataset_dev.json (nested), or simple-evals' drop_v0_dev.jsonl.gz (golds as "a|b and c") -------------

DROP_PROMPT = (  # simple-evals without its 3 examples; what the answer line may hold is our addition
    "You will be asked to read a passage and answer a question.\n\nPassage: {passage}\nQuestion: {question}\n\n"
    'Think step by step, then write a line of the form "Answer: $ANSWER" at the end of your response. '
    "Give only the number, date or span(s) there; separate several spans with commas."
)
FLOAT = re.compile(r"\+?(\d+\.?\d*|\.\d+)(e\+?\d+)?|nan|inf(inity)?")  # what float() reads where "-" has split words


def read_drop(path: Path) -> Rows:
    """`gold` is a list of references (answer and validated answers), each a tuple of spans.

    simple-evals joins a reference's spans with " and ", which one span may hold too: both readings are references.
    """
    try:
        passages = json.loads(read_text(path))
    except json.JSONDecodeError:
        passages = {"context": "the file is JSON lines"}
    if isinstance(passages, dict) and "context" not in passages:
        for key, entry in passages.items():
            try:
                yield from drop_passage(f"{path}: passage {key!r}", entry)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}: passage {key!r} is damaged ({error}); use DROP's dev file") from error
        return
    for where, record in read_jsonl(path):
        context, references = fields(where, record, "context", "ref_text")
        shape = re.fullmatch(r"Passage: (.*)\nQuestion: (.*?)\nAnswer:\s*", context, re.DOTALL)
        if shape is None or not references.strip("| "):
            raise ValueError(f'{where}: no "Passage: ... Question: ... Answer:", or no answer; use the published file')
        gold = [(reference,) for reference in references.split("|") if reference.strip()]
        gold += [tuple(reference.split(" and ")) for (reference,) in gold if " and " in reference]
        yield "", {"passage": shape[1], "question": shape[2]}, gold, {}


def drop_passage(where: str, entry: dict) -> Rows:
    """One passage's questions in the official shape: of number, spans and date one is filled, or (by some) none."""
    (passage,) = fields(where, entry, "passage")
    for pair in entry["qa_pairs"]:
        question, name = fields(where, pair, "question", "query_id")
        gold = []
        for answer in [pair["answer"], *(pair.get("validated_answers") or [])]:
            date = " ".join(answer.get("date", {}).get(part, "") for part in ("day", "month", "year")).strip()
            number = answer.get("number")
            gold.append(tuple([str(number)] if number else answer.get("spans") or [date]))
        if not (gold := [spans for spans in gold if spans != ("",)]):
            raise KeyError("every answer is blank")
        yield name, {"passage": passage, "question": question}, gold, {}


def extract_drop(output: str, item: Item) -> str | None:
    r"""The last "Answer: ..." line (simple-evals), else the last \boxed{}, else the whole output."""
    text = re.sub(r"\*\*|`", "", output)
    answer = (re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text) or [text])[-1]
    answer = (BOX.findall(answer) or [answer])[-1]
    answer = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer).strip()
    return re.sub(r"\A\$([^$]+)\$\Z", r"\1", answer) or None  # $13$ is markup, a lone leading $ is money and stays


def normalise_drop(text: str) -> str:
    """DROP's official normalisation (AllenNLP), traps included: 7.6% -> 76.0, $5.50 -> 550.0, -5 -> 5.0."""
    words = []
    for token in re.split(" |-", text.lower()):
        if not FLOAT.fullmatch(token):
            token = "".join(char for char in token if char not in string.punctuation)
        words += (str(float(token)) if FLOAT.fullmatch(token) else re.sub(r"\b(a|an|the)\b", " ", token)).split()
    return " ".join(words)


def drop_em_f1(predicted: list[str], gold: Iterable[str]) -> tuple[float, float]:
    """Official DROP exact match and F1 (AllenNLP; 0..1, F1 to two decimals) of predicted spans and one reference.

    EM: the same set of normalised spans, and as many. F1: bags of words, paired one to one for the greatest sum; a pair
    counts 0 where the gold bag has numbers and the predicted one has none of them.
    """
    spans, wanted = [normalise_drop(span) for span in predicted], [normalise_drop(span) for span in gold]
    best = {0: 0.0}  # bit mask of the gold spans paired so far -> greatest sum
    for bag in (set(span.split()) for span in spans):
        step = dict(best)
        for index, other in enumerate(set(span.split()) for span in wanted):
            digits = {word for word in other if FLOAT.fullmatch(word)}
            shared = len(bag & other) if not digits or digits & bag else 0
            f1 = 2 * shared / (len(bag) + len(other)) if bag or other else 1.0
            for mask, total in best.items():
                if not mask >> index & 1:
                    step[mask | 1 << index] = max(step.get(mask | 1 << index, 0.0), total + f1)
        best = step
    exact = set(spans) == set(wanted) and len(spans) == len(wanted)
    return float(exact), round(max(best.values()) / max(len(spans), len(wanted)), 2)


def drop_scores(extracted: str | None, item: Item) -> tuple[float, float]:
    """EM and F1, each the best over references and, for a reference of several spans, over ways to cut the answer."""
    cuts, scores = (r"\s*;\s*", r"\s+and\s+", r",?\s+and\s+|[,;]\s+"), [(0.0, 0.0)]
    for gold in item.gold if extracted else ():
        whole_and_cut = [[extracted], *(re.split(cut, extracted) for cut in cuts if len(gold) > 1)]
        scores += [drop_em_f1(spans, gold) for spans in whole_and_cut]
    return max(em for em, _ in scores), max(f1 for _, f1 in scores)


def correct_drop(extracted: str | None, item: Item) -> bool:
    """Official exact match with any reference."""
    return drop_scores(extracted, item)[0] == 1.0


def extra_drop(output: str, item: Item) -> dict[str, float]:
    """Official F1, and the fuzzy match that simple-evals and OpenCompass report: one string contains the other."""
    extracted = extract_drop(output, item)
    texts = [extracted or "", *(" and ".join(gold) for gold in item.gold)]
    texts = ["".join(char for char in text.lower() if char not in string.punctuation) for text in texts]
    given, *golds = [" ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()) for text in texts]
    fuzzy = any((given in gold or gold in given) if given and gold else given == gold for gold in golds)
    return {"f1": drop_scores(extracted, item)[1], "fuzzy": float(fuzzy)}


# ---- PIQA: dev.jsonl (or valid.jsonl), {"goal", "sol1", "sol2"}, and a file of labels, one 0 or 1 a line ------------

PIQA_PROMPT = "{goal}\nA. {sol1}\nB. {sol2}\nAnswer with the letter A or B.\nAnswer:"  # OpenCompass + our line
PIQA_OPTIONS = {"labels_file": "the labels; default <stem>-labels.lst beside the questions"}


def read_piqa(path: Path, labels_file: str | Path | None = None) -> Rows:
    """Options keep their order, as in all harnesses; ValueError where labels are not 0 or 1, one a record."""
    labels_file = Path(labels_file or path.with_name(path.name.partition(".")[0] + "-labels.lst"))
    records, labels = list(read_jsonl(path)), read_text(labels_file).split()
    if len(labels) != len(records):
        raise ValueError(f"{labels_file}: {len(labels)} labels for {len(records)} records; give the labels of {path}")
    for number, ((where, record), label) in enumerate(zip(records, labels, strict=True), 1):
        if label not in ("0", "1"):
            raise ValueError(f"{labels_file}:{number}: the label {label!r} is not 0 or 1; use the published file")
        names = ("goal", "sol1", "sol2")
        options = dict(zip(names, fields(where, record, *names), strict=True))
        yield "", options, "AB"[int(label)], {"letters": "AB", "letter_only": True}


# ---- HumanEval+ and MBPP+: the EvalPlus releases; its harness judges, see run.py -------------------------------

CODE_PROMPT = (  # EvalPlus; simple-evals and OpenCompass word it differently
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```\n{problem}\n```\n"
)
CODE_OPTIONS = {"prefill": "start the assistant's turn as EvalPlus does; off, since other harnesses do not"}
PREFILL = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
FENCE = re.compile(r"^([^\n`]*)(`{3,})[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*\2|\Z)", re.MULTILINE | re.DOTALL)


def read_code(path: Path, family: str, prefill: bool = False) -> Rows:
    """`gold` is the canonical program, `extra["prefill"]` what the caller starts the assistant's turn with."""
    for where, record in read_jsonl(path):
        name, prompt, entry, solution = fields(where, record, "task_id", "prompt", "entry_point", "canonical_solution")
        if not name.startswith(family) or "plus_input" not in record:  # the original files have no "plus_input"
            raise ValueError(f"{where}: not a record of EvalPlus's {family} file; give its release of {family}")
        extra = {"entry_point": entry, "code": prompt, "prefill": PREFILL if prefill else ""}
        yield name, {"problem": prompt.strip()}, prompt + solution, extra


def extract_code(output: str, item: Item) -> str | None:
    """The program for EvalPlus, or None for a blank output.

    The first Python (or untagged) fenced block that defines the entry point, else the first such block, else the whole
    output; an unclosed block runs to the end. An indented body alone goes under the problem's own header, as EvalPlus
    does with a "completion". Cutting away what is no code is left to `evalplus.sanitize`.
    """
    text, blocks = item.extra["prefill"] + output.replace("\r\n", "\n"), []
    defines = re.compile(rf"^\s*(?:async\s+)?(?:def|class)\s+{item.extra['entry_point']}\b", re.MULTILINE)
    for before, _, language, code in FENCE.findall(text):
        if language.lower() in ("", "py", "python", "python3"):
            indent = before if before.isspace() else ""  # a fence inside a list is indented, and its code with it
            blocks.append(re.sub(f"^{indent}", "", code, flags=re.MULTILINE))
    code = next((block for block in blocks if defines.search(block)), (blocks or [text])[0])
    if not code.strip():
        return None
    body = code.lstrip("\n").startswith((" ", "\t")) and not defines.search(code)
    return item.extra["code"] + code if body and defines.search(item.extra["code"]) else code


# ---- The paper's Table 1 and who does what. Score and forward passes a token: without, with joint commitment --------

GSM8K = (read_gsm8k, lambda output, item: find_answer(output), correct_number, extra_gsm8k, GSM8K_PROMPT, {})
CMATH = (read_cmath, lambda output, item: find_answer(output), correct_number, extra_cmath, CMATH_PROMPT, {})
GPQA = (read_gpqa, extract_letter, correct_letter, extra_gpqa, GPQA_PROMPT, GPQA_OPTIONS)
DROP = (read_drop, extract_drop, correct_drop, extra_drop, DROP_PROMPT, {})
PIQA = (read_piqa, extract_letter, correct_letter, lambda output, item: {}, PIQA_PROMPT, PIQA_OPTIONS)
CODE = (extract_code, None, lambda output, item: {}, CODE_PROMPT, CODE_OPTIONS)
HUMANEVAL = (partial(read_code, family="HumanEval"), *CODE)
MBPP = (partial(read_code, family="Mbpp"), *CODE)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("gsm8k", "GSM8K", 1319, 89.61, 91.13, 0.26, 0.34, *GSM8K),
        Task("cmath", "CMATH", 1098, 92.26, 91.99, 0.32, 0.45, *CMATH),
        Task("gpqa", "GPQA-Diamond", 198, 43.94, 46.97, 0.41, 0.35, *GPQA),
        Task("drop", "DROP", 9536, 84.14, 83.93, 0.33, 0.29, *DROP),
        Task("piqa", "PIQA", 1838, 80.90, 84.60, 0.76, 0.44, *PIQA),
        Task("humaneval", "HumanEval+", 164, 76.83, 82.32, 0.14, 0.16, *HUMANEVAL),
        Task("mbpp", "MBPP+", 378, 68.78, 70.11, 0.18, 0.18, *MBPP),
    )
}
