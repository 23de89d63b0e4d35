"""The paper's seven benchmarks: how a published file is read, and how a question is asked. answers.py reads answers.

`TASKS[name].load(path)` reads the *published* file (JSONL, also in gzip, or CSV). run.py generates, and `find` and
`right` judge. The paper states no prompts, numbers of examples or answer rules. Beside each default here is its source,
and a template may replace a prompt. `pytest tests/llada/test_benchmarks.py --bench_data DIR` reads the real files in
DIR.
"""

import csv
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lib.util import fail, reading
from llada.answers import clean, drop_scores, equal_numbers, find_code, find_letter, find_number, find_spans, numbers
from prepare import read_records

Rows = Iterator[tuple[str, dict[str, str], Any]]  # id ("": to be numbered), the prompt's fields, the gold answer


@dataclass(frozen=True)
class Item:
    """One question. `prompt` is the user's turn without chat markup, and `gold` is the right answer."""

    id: str
    prompt: str
    gold: Any


@dataclass(frozen=True)
class Task:
    """One benchmark. `find` also gets the gold answer. `right` is None if only EvalPlus can judge."""

    name: str
    title: str
    n_official: int
    read: Callable[..., Rows]
    prompt: str
    find: Callable[[str, Any], str | None]
    right: Callable[[str | None, Any], bool] | None
    f1: Callable[[str | None, Any], float] | None = None  # a score beside right and wrong

    def load(self, path: Path, template: str | None = None) -> list[Item]:
        """The items of the published file at `path`."""
        template = template or self.prompt
        items = []
        with reading(path, f"{self.title} file (the published one)"):
            for number, (name, values, gold) in enumerate(self.read(path)):
                for key in values:
                    if "{" + key + "}" not in template:
                        fail(f"{self.title}: the prompt template lacks {{{key}}}: add it")
                # replace all fields in one pass, because a question may have braces, too
                prompt = re.sub(r"\{(" + "|".join(values) + r")\}", lambda match, put=values: put[match[1]], template)
                items.append(Item(name or f"{self.name}/{number}", prompt, gold))
        if not items:
            fail(f"{path} holds no record: fetch the published {self.title} file again")
        return items


# --- files
def text(record: dict, name: str) -> str:
    """A field of a record. In the published file it is text."""
    value = record.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, and should be text")
    value.encode()  # raises an error for half of a character
    return value


# --- GSM8K: openai/grade-school-math test.jsonl, {"question", "answer"}; the worked answer ends "#### 72"
# CMATH: the test split, {"question", "golden"}

# OpenCompass, 0-shot; lm-evaluation-harness and LLaDA's own runs show 4 or 5 worked examples
GSM8K_PROMPT = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
CMATH_PROMPT = "{question}\n请通过逐步推理来解答问题，并把最终答案放置于\\boxed{}中。"  # DeepSeek-Math


def read_numbers(path: Path, answer: str) -> Rows:
    """The gold answer is the one number in the field `answer`, or after "####" in it, as it is written ("27.3%")."""
    for _, record in read_records(path):
        final = text(record, answer).rpartition("####")[2]
        found = numbers(clean(final))
        if len(found) != 1:
            raise ValueError(f'"{answer}: {final}" is not one number')
        yield "", {"question": text(record, "question")}, found[0]


# --- GPQA-Diamond: gpqa_diamond.csv, out of the authors' zip. They ask not to publish its records: never print one
GPQA_PROMPT = (  # simple-evals
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
    "{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}"
)
GPQA_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read_gpqa(path: Path) -> Rows:
    """Columns are found by name. Options are permuted as in simple-evals, by one draw for each row, in order.
    simple-evals asks all rows four times; the paper's scores are k/198, so it asked once."""
    csv.field_size_limit(2**24)  # explanations are longer than the default limit
    rng = random.Random(0)
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            order = rng.sample(range(4), 4)
            options = {letter: text(row, GPQA_ANSWERS[i]) for letter, i in zip("ABCD", order, strict=True)}
            yield text(row, "Record ID"), {"question": text(row, "Question")} | options, "ABCD"[order.index(0)]


# --- PIQA: dev.jsonl (or valid.jsonl), {"goal", "sol1", "sol2"}, and a file of labels, one 0 or 1 a line
PIQA_PROMPT = "{goal}\nA. {sol1}\nB. {sol2}\nAnswer with the letter A or B.\nAnswer:"  # OpenCompass + our line


def read_piqa(path: Path) -> Rows:
    """Options keep their order, as in all harnesses. The labels of dev.jsonl are dev-labels.lst, beside it."""
    labels = path.with_name(path.name.partition(".")[0] + "-labels.lst").read_text().split()
    for (_, record), label in zip(read_records(path), labels, strict=True):
        shown = {name: text(record, name) for name in ("goal", "sol1", "sol2")}
        if label not in ("0", "1"):
            raise ValueError(f"{label!r} is not a label")
        yield "", shown, "AB"[int(label)]


# --- DROP: simple-evals' drop_v0_dev.jsonl.gz, {"context", "ref_text"}; golds as "a|b and c"
DROP_PROMPT = (  # simple-evals without its 3 examples; what the answer line may hold is our addition
    "You will be asked to read a passage and answer a question.\n\nPassage: {passage}\nQuestion: {question}\n\n"
    'Think step by step, then write a line of the form "Answer: $ANSWER" at the end of your response. '
    "Give only the number, date or span(s) there; separate several spans with commas."
)


def read_drop(path: Path) -> Rows:
    """`gold` is a list of references, each a tuple of spans. The file joins the spans of a reference by " and ", which
    may also be part of a span, so both readings count."""
    for _, record in read_records(path):
        shape = re.fullmatch(r"Passage: (.*)\nQuestion: (.*?)\nAnswer:\s*", text(record, "context"), re.DOTALL)
        gold = [(reference,) for reference in text(record, "ref_text").split("|") if reference.strip()]
        if shape is None or not gold:
            raise ValueError('no "Passage: ... Question: ... Answer:", or no answer')
        gold += [tuple(reference.split(" and ")) for (reference,) in gold if " and " in reference]
        yield "", {"passage": shape[1], "question": shape[2]}, gold


# --- HumanEval+ and MBPP+: the EvalPlus releases; its harness judges, see run.py
CODE_PROMPT = (  # EvalPlus; simple-evals and OpenCompass word it differently
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```\n{problem}\n```\n"
)


def read_code(path: Path, family: str) -> Rows:
    """`gold` is the name that a program must define, and the canonical program."""
    for _, record in read_records(path):
        name = text(record, "task_id")
        if not name.startswith(family) or "plus_input" not in record:  # the original files have no "plus_input"
            raise ValueError(f"{name}: not a record of EvalPlus's {family} file")
        entry_point = text(record, "entry_point")
        if not entry_point.isidentifier():
            raise ValueError(f"{name}: entry_point {entry_point!r} is not a name in Python")
        program = text(record, "prompt") + text(record, "canonical_solution")
        yield name, {"problem": text(record, "prompt").strip()}, [entry_point, program]


# --- the functions of a task: how an answer is found in a text, when it is right, and its F1
NUMBERS = (
    lambda output, gold: find_number(output),
    lambda found, gold: found is not None and equal_numbers(found, gold),
)
SPANS = (
    lambda output, gold: find_spans(output),
    lambda found, gold: drop_scores(found, gold)[0] == 1,  # official exact match with any reference
    lambda found, gold: drop_scores(found, gold)[1],
)
CODE = (lambda output, gold: find_code(output, gold[0]), None)


def letters(of: str) -> tuple[Callable, Callable]:
    return lambda output, gold: find_letter(output, of), lambda found, gold: found == gold


ALL = (
    Task("gsm8k", "GSM8K", 1319, partial(read_numbers, answer="answer"), GSM8K_PROMPT, *NUMBERS),
    Task("cmath", "CMATH", 1098, partial(read_numbers, answer="golden"), CMATH_PROMPT, *NUMBERS),
    Task("gpqa", "GPQA-Diamond", 198, read_gpqa, GPQA_PROMPT, *letters("ABCD")),
    Task("drop", "DROP", 9536, read_drop, DROP_PROMPT, *SPANS),
    Task("piqa", "PIQA", 1838, read_piqa, PIQA_PROMPT, *letters("AB")),
    Task("humaneval", "HumanEval+", 164, partial(read_code, family="HumanEval"), CODE_PROMPT, *CODE),
    Task("mbpp", "MBPP+", 378, partial(read_code, family="Mbpp"), CODE_PROMPT, *CODE),
)
TASKS = {task.name: task for task in ALL}
