"""The questions of the tasks beside this file, out of the published files of the benchmarks. Nothing is downloaded.

lm-eval calls `gsm8k` and the like with what --metadata gives: gsm8k=test.jsonl. It imports this file before it makes a
model, so the model's name is registered here.
"""

import csv
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # lm-eval runs anywhere, and loads this file by its path

from datasets import Dataset
from lm_eval.api.registry import register_model

from lib.util import WALK, fail, reading
from prepare import read_records
from released.harness import CoCommit
from released.tasks.rules import numbers, plain

register_model("cocommit")(CoCommit)


def load(task: str, read: Callable[[Path], Iterator[dict]], /, **given) -> dict[str, Dataset]:
    """lm-eval's data set of a task."""
    if task not in given:
        fail(f"{task} is read from its published file: --metadata {task}=FILE")
    path = Path(given[task]).expanduser()
    with reading(path, f"{task} file (the published one)", WALK):
        return {"test": Dataset.from_list(list(read(path)) or fail(f"{task} file {path} has no items"))}


def read_numbers(path: Path, answer: str) -> Iterator[dict]:
    """The gold answer is the one number in the field `answer`, or after "####" in it."""
    for _, record in read_records(path):
        (gold,) = numbers(plain(record[answer].rpartition("####")[2]))
        yield {"question": record["question"], "gold": gold}


# gpqa_diamond.csv, out of the authors' zip. They ask not to publish its records: never print one
GPQA_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read_gpqa(path: Path) -> Iterator[dict]:
    """Options are shuffled as in simple-evals, by one draw a row. The paper's scores are k/198: each is asked once."""
    csv.field_size_limit(2**24)  # explanations are longer than the default limit
    rng = random.Random(0)
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            order = rng.sample(range(4), 4)
            options = {letter: row[GPQA_ANSWERS[i]] for letter, i in zip("ABCD", order, strict=True)}
            yield {"question": row["Question"], "gold": "ABCD"[order.index(0)], "letters": "ABCD"} | options


def read_piqa(path: Path) -> Iterator[dict]:
    """Options keep their order, as in all harnesses. The labels of dev.jsonl are in dev-labels.lst, beside it."""
    labels = path.with_name(path.name.partition(".")[0] + "-labels.lst").read_text().split()
    for (_, record), label in zip(read_records(path), labels, strict=True):
        shown = {name: record[name] for name in ("goal", "sol1", "sol2")}
        yield shown | {"gold": {"0": "A", "1": "B"}[label], "letters": "AB"}


def read_drop(path: Path) -> Iterator[dict]:
    """simple-evals' file. It joins spans by " and ", which may also be part of a span, so both readings count."""
    for _, record in read_records(path):
        shape = re.fullmatch(r"Passage: (.*)\nQuestion: (.*?)\nAnswer:\s*", record["context"], re.DOTALL)
        references = [[text] for text in record["ref_text"].split("|") if text.strip()]
        references += [text.split(" and ") for (text,) in references if " and " in text]
        yield {"passage": shape[1], "question": shape[2], "gold": record["ref_text"], "references": references}


def read_programs(path: Path) -> Iterator[dict]:
    """The releases of EvalPlus, whose records have "plus_input"."""
    for _, record in read_records(path):
        if "plus_input" not in record:
            raise ValueError("it is not a release of EvalPlus")
        asked = {name: record[name] for name in ("task_id", "entry_point")}
        yield asked | {"question": record["prompt"].strip(), "gold": record["canonical_solution"]}


gsm8k = partial(load, "gsm8k", partial(read_numbers, answer="answer"))
cmath = partial(load, "cmath", partial(read_numbers, answer="golden"))
gpqa = partial(load, "gpqa", read_gpqa)
drop = partial(load, "drop", read_drop)
piqa = partial(load, "piqa", read_piqa)
humaneval = partial(load, "humaneval", read_programs)
mbpp = partial(load, "mbpp", read_programs)
