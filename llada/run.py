"""Benchmark runs: a checkpoint answers one of the paper's seven tasks, and its answers go into a run file.

A run file has lines of JSON: first the settings, then one line for each item. It is only appended to. If a run was
stopped or killed, the same command goes on: it drops a line that was cut short, and answers no finished item again. It
refuses other settings if they may change an answer. tables.py makes the paper's tables from run files.

Code that a model wrote never runs in this process: for HumanEval+ and MBPP+ the run leaves samples in EvalPlus's format
beside its file, and prints the command that scores them.

    python -m llada.run --task gsm8k --task_file test.jsonl --ckpt weights/llada2.1-mini --out runs/gsm8k_base.jsonl
    python -m llada.run --task gsm8k --task_file test.jsonl --ckpt out/cocommit --out runs/gsm8k_cocommit.jsonl
    python -m llada.run --task gsm8k --task_file test.jsonl --ckpt out/cocommit --out runs/gsm8k_gated.jsonl \\
        --row "Stage B, gated edits"      # of Table 2
"""

import json
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from checkpoint import DTYPES, base_of, is_int8, load_model, weights_hash
from decoding import Decoding, Step
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import (
    Parser,
    alone_with,
    bounded,
    command,
    fail,
    pick_device,
    print_table,
    printable,
    progress,
    quoted,
    reading,
    replace_file,
)
from llada.ablation import BASE, COCOMMIT, MECHANISM, decoder_of, refuse_other_steps
from llada.benchmarks import TASKS, Item
from llada.chat import ROLES, chat
from llada.tables import HEAD, Run, differences, digest, measured, read_run, read_samples
from model import Model
from prepare import read_records
from sample import check_prompt, generate


# fmt: off
def build_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument_group("what is asked").add_argument
    add("--task", choices=TASKS, required=True)
    add("--task_file", type=Path, required=True, help="the published file of the task; nothing is downloaded")
    add("--template", type=Path, help="a text file with another prompt, in which the fields are in braces")
    add("--part", type=part, default="1/1", metavar="I/N",
        help="answer items I, I + N, I + 2 N ...; run 1/4 to 4/4 with an --out each, and tables.py joins them")

    add = parser.add_argument_group("what answers, and where the answers go").add_argument
    add("--ckpt", type=Path, required=True, help="a model's folder, or an adapter's")
    add("--row", choices=MECHANISM, metavar="NAME",
        help=f"decode as this row of Table 2 (left out: {BASE!r}, or for an adapter {COCOMMIT!r})")
    add("--gen_length", type=bounded(int, 1, 10**9), default=16384, help="the most tokens of an answer")
    add("--out", type=Path, required=True, help="the run file, *.jsonl; the same command goes on where it stopped")
    add("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    return parser
# fmt: on


def part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError
    return number, parts


def row_of(args: Namespace, model: Model) -> str:
    """The row of Table 2 that is asked for, if it is a row of these weights."""
    refuse_other_steps(model)
    given = "adapter" if model.trained_b else "base"
    row = args.row or {"adapter": COCOMMIT, "base": BASE}[given]
    weights, *_ = MECHANISM[row]
    if weights != given:
        fail(f"--row {row!r} is about the {weights}, and {args.ckpt} is the {given}")
    return row


# --- run files
def identity(args: Namespace, items: list[Item], model: Model, templated: bool, row: str, d: Decoding) -> dict:
    """What may change an answer on one device; the places of files and --part do not."""
    base = base_of(args.ckpt)
    about = {
        "task": args.task,
        "row": row,
        "questions": digest([[item.id, item.prompt, item.gold] for item in items]),
        "chat_template": templated,
        "weights": weights_hash(base),
        "int8": is_int8(model),
        "adapter": digest((args.ckpt / "adapter.safetensors").read_bytes().hex()) if args.ckpt != base else None,
        "partial_cost": model.partial_cost,
        "dtype": args.dtype,
    }
    return about | asdict(model.cfg) | asdict(d)  # n_rounds is the decoder's


def open_run(path: Path, settings: dict) -> Run:
    """The run in a file, without a line that was cut short; a new run if the file is empty."""
    run, whole = read_run(path)
    with path.open("ab") as file:
        if run is None:
            file.truncate(0)
            file.write(line({"settings": settings}))
            return Run(settings, {})
        if run.settings != settings:
            different = differences(run.settings, settings)
            fail(f"{path} holds a run with other settings: {different} (there, now); choose another --out")
        file.truncate(whole)
    return run


def line(record: dict) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


# --- answers
def answer(
    model: Model, tokenizer: Tokenizer, d: Decoding, step: Callable[..., Step], todo: list[Item], run: Run, out: Path
) -> None:  # fmt: skip
    """Decode the items of `todo`, one at a time, and append them to the run file."""
    task = TASKS[run.settings["task"]]
    markup = chat if run.settings["chat_template"] else str
    prompts = [tokenizer.encode(markup(item.prompt)) for item in todo]
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, number, d.gen_length, model.cfg)

    for item, prompt in zip(progress(todo, "items"), prompts, strict=True):
        start = time.perf_counter()
        (output,) = generate(model, [prompt], d, step=step)
        seconds = round(time.perf_counter() - start, 3)

        text = tokenizer.decode(output.tokens)
        extracted = task.find(text, item.gold)
        record = {"id": item.id, "prompt": digest(prompt), "output": text, "extracted": extracted}
        record |= {"gold": item.gold, "correct": task.right and task.right(extracted, item.gold)}
        if task.f1:
            record["f1"] = task.f1(extracted, item.gold)
        record |= {"tokens": len(output.tokens), "nfe": output.nfe, "seconds": seconds, "note": output.warning}
        with out.open("ab") as file:
            file.write(line(record))
        run.items[item.id] = record


# --- HumanEval+ and MBPP+: EvalPlus judges, outside this process
def hand_over(args: Namespace, run: Run) -> None:
    """Write the samples for EvalPlus, and print the command that scores them."""
    folder = args.out.with_suffix(".evalplus")
    programs = {name: record["extracted"] or "" for name, record in run.items.items()}
    # EvalPlus needs a sample of every problem that it is given
    problems = [record for _, record in read_records(args.task_file) if record["task_id"] in run.items]
    if read_samples(folder / "samples.jsonl") != programs:
        # these were made from other programs
        (folder / "samples-sanitized.jsonl").unlink(missing_ok=True)
    samples = [{"task_id": name, "solution": program} for name, program in programs.items()]
    for name, records in (("samples.jsonl", samples), ("dataset.jsonl", problems)):
        data = "".join(json.dumps(record) + "\n" for record in records)
        replace_file(folder / name, lambda temporary, data=data: temporary.write_text(data))

    # before it judges, EvalPlus cuts prose and calls away. For this it reads both data sets; here the other one is
    # empty, because otherwise EvalPlus would download it
    override = {"HUMANEVAL": "/dev/null", "MBPP": "/dev/null"} | {args.task.upper(): '"$PWD/dataset.jsonl"'}
    # the environment is empty, because EVALPLUS_TIMEOUT_PER_TASK makes 0.3.1 hang, and because it may hold secrets. The
    # home is new, because EvalPlus un-pickles its cache. The limit is raised, because with 4 GiB the right programs of
    # Mbpp/255 and 392 fail. Old results are removed, because EvalPlus would report them again
    sealed = 'env -i PATH="$PATH" HOME="$(mktemp -d)" EVALPLUS_MAX_MEMORY_BYTES=8589934592'
    sealed += "".join(f" {name}_OVERRIDE_PATH={path}" for name, path in override.items())
    print(
        f"wrote {printable(folder)}/samples.jsonl. To score it, run this with EvalPlus 0.3.1 in a container without "
        f"network, as an unprivileged user, because it EXECUTES the model's code:\n"
        f"  cd {quoted(folder)} && rm -f samples-sanitized* samples_eval_results.json && "
        f"{sealed} python -m evalplus.sanitize --samples samples.jsonl && "
        f"{sealed} python -m evalplus.evaluate --dataset {args.task} --samples samples-sanitized.jsonl\n"
        f"then: python -m llada.tables main --runs {quoted(args.out.parent)}"
    )  # fmt: skip


# --- the command line
@command
def main() -> None:
    args = build_parser().parse_args()
    if args.out.suffix != ".jsonl":
        fail("--out must be named *.jsonl")
    task = TASKS[args.task]
    template = None
    if args.template:
        with reading(args.template, "template"):
            template = args.template.read_text(encoding="utf-8")
    items = task.load(args.task_file, template)

    # the model, and how it decodes
    model = load_model(args.ckpt, pick_device(args.device), DTYPES[args.dtype])
    tokenizer = load_tokenizer(base_of(args.ckpt))
    if tokenizer is None:
        fail(f"{args.ckpt} has no tokenizer, because a toy's tokens are numbers: it cannot read {task.title}")
    row = row_of(args, model)
    d, step = decoder_of(row, model.cfg.n_rounds)
    d = replace(d, gen_length=args.gen_length)

    # use the released chat template if the tokenizer has its tokens
    missing = [role for role in ROLES if role not in tokenizer.special]
    if missing:
        print(f"no chat template: the tokenizer of {args.ckpt} has no {missing[0]}, so questions are plain text")

    # answer the items that have no answer yet
    number, parts = args.part
    mine = items[number - 1 :: parts]
    with alone_with(args.out):
        run = open_run(args.out, identity(args, items, model, not missing, row, d))
        todo = [item for item in mine if item.id not in run.items]
        print(f"{task.title}, {row}: {len(mine)} items, {len(todo)} to go")
        answer(model, tokenizer, d, step, todo, run, args.out)

    print_table(HEAD[:8], [[task.title, *measured(run, None)]])
    if task.f1 and run.items:
        print(f"  F1: {100 * sum(record['f1'] for record in run.items.values()) / len(run.items):.2f} %")
    if task.right is None:
        hand_over(args, run)


if __name__ == "__main__":
    main()
