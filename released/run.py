"""Benchmark runs: one of the seven tasks over one checkpoint, as the paper sets it up, into a run file.

A run file is JSON lines and only ever appended to: first the settings in clear with their hash, then one line an item
(id, prompt hash, output, extracted, gold, correct, tokens, forwards, seconds, settings hash). Stopped or killed, the
same command goes on: a line cut short is dropped, and no finished item runs again. tables.py reads run files and makes
the paper's tables of them.

Going on with other settings is refused: whatever changes an output, weights, decoding, questions, prompts, precision.
Model-written code never runs in this process: HumanEval+ and MBPP+ leave samples in EvalPlus's format beside the run
file, and the command that scores them is printed.

    python -m released.run --task gsm8k --task_file test.jsonl --ckpt weights/llada2.1-mini --out runs/gsm8k_base.jsonl
    python -m released.run --task gsm8k --task_file test.jsonl --ckpt out/cocommit --out runs/gsm8k_cocommit.jsonl
    # the paper's settings; --help lists what may be changed
"""

import hashlib
import json
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checkpoint import base_of, decoding_defaults, fingerprint, load_model, load_tokenizer
from lib.config import DTYPES
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, command, fail, or_none, pick_device, replace_file
from model import Model
from released.ablation import Switches, plain, switched
from released.benchmarks import TASKS, Item, Task, read_jsonl
from released.chat import chat
from released.tables import Run, differences, digest, evalplus_folder, read_run, summary
from sample import Decoding, generate, settle_decoding


# fmt: off
def build_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument_group("what").add_argument
    known = "; ".join(f"{n}: {k}: {v}" for n, t in TASKS.items() if n != "mbpp" for k, v in t.options.items())
    add("--task", choices=TASKS, required=True)
    add("--task_file", type=Path, required=True, help="the published file of the task; nothing is downloaded")
    add("--option", action="append", default=[], metavar="K=V",
        help=f"of the task ({known}); every task: template: a text file with another prompt, fields in braces")
    add("--ckpt", type=Path, required=True, help="a model's folder, or an adapter's")
    add("--out", type=Path, required=True, help="run file, .jsonl; the same command goes on where it stopped")
    add("--limit", type=bounded(int, 0), default=0, help="only the first so many items (0: all)")
    add("--shard", type=shard, default=(1, 1), metavar="I/N",
        help="part i of n, 1/4 to 4/4, an --out for each; tables put them together")
    add("--batch", type=bounded(int, 1), default=1,
        help="prompts decoded at once, each as if alone but for exact ties (paper: 1)")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")

    add = parser.add_argument_group("decoding, the paper's unless given").add_argument
    add("--gen_length", type=bounded(int, 1), default=16384, help="tokens of an answer")
    add("--n_rounds", type=bounded(int, 0), help="K; 0: the released decoder (default: as trained)")
    add("--tau_m2t", type=bounded(float, -1, 1), default=SUPPRESS,
        help="fill masks whose probability is above this (0.7; -1: all at once)")
    add("--tau_t2t", type=or_none(bounded(float, 0, 1)), default=SUPPRESS,
        help='edit above this, or "none" (0.5 without Stage B, 0 with it: any disagreement)')
    add("--fill_from", choices=["A", "B"], default="B", help="which stage's logits fill masks")
    add("--edit_from", choices=["A", "B"], default="B", help="which stage's logits edit")
    add("--no_marker", dest="marker", action="store_false", help="run the last n layers again, but unmarked")
    add("--select", choices=["confidence", "entropy"], default="confidence",
        help="the bundle: above the gate, or as many but least entropic")
    return parser
# fmt: on


def shard(text: str) -> tuple[int, int]:
    part, n = map(int, text.split("/"))
    if not 1 <= part <= n:
        raise ValueError
    return part, n


# ---------------------------------------------------------------------------------------------------------------------
# what is asked


def load_items(task: Task, file: Path, options: list[str]) -> tuple[list[Item], dict[str, Any]]:
    """The task's items, and its options in clear."""
    kinds = {
        "repeats": int,
        "seed": int,
        "prefill": {"true": True, "false": False}.__getitem__,
        "template": lambda path: Path(path).read_text(encoding="utf-8"),
    }
    values: dict[str, Any] = {}
    for option in options:
        key, _, text = option.partition("=")
        if key not in [*task.options, "template"]:
            fail(f"--option {key}: {task.name} takes {', '.join([*task.options, 'template'])}")
        try:
            values[key] = kinds[key](text)
        except (ValueError, KeyError) as e:
            fail(f"--option {option} cannot be used ({type(e).__name__}: {e})")
    return task.load(file, **values), values


def encode(items: list[Item], tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Their prompts by id, in the released chat template where the tokenizer has one."""
    prompts = {}
    for item in items:
        text = item.prompt
        if "<role>" in tokenizer.special:
            text = chat(text)
        prompts[item.id] = tokenizer.encode(text + item.extra.get("prefill", ""))
    return prompts


# ---------------------------------------------------------------------------------------------------------------------
# run files


def identity(args: Namespace, items: list[Item], options: dict, model: Model, decoding: dict, chatty: bool) -> dict:
    """Everything that changes an output, as JSON; where files lie, and how the work is cut up, does not."""
    adapter = None
    if base_of(args.ckpt) != args.ckpt:
        adapter = hashlib.sha256((args.ckpt / "adapter.safetensors").read_bytes()).hexdigest()[:16]
    settings = {
        "task": args.task,
        "options": options,
        "questions": digest([[i.id, i.prompt, i.gold, i.extra] for i in items]),
        "model": asdict(model.cfg) | {"weights": fingerprint(base_of(args.ckpt))},
        "adapter": adapter,
        "partial_cost": model.partial_cost,
        "decoding": decoding,
        "chat": chatty,
        "dtype": args.dtype,
    }
    return json.loads(json.dumps(settings))


def open_run(path: Path, settings: dict) -> Run:
    """The run at `path` as far as it got, its cut line dropped; or a new one, its first line written."""
    run = None
    whole = 0
    if path.exists():
        run, whole = read_run(path)
    if run and run.settings != settings:
        different = "; ".join(differences(run.settings, settings))
        fail(f"{path} holds a run with other settings: {different} (there, now); choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(whole)
        if run is None:
            run = Run(settings, digest(settings), {})
            file.write(line({"settings": settings, "hash": run.hash}))
    return run


def line(record: dict) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


# ---------------------------------------------------------------------------------------------------------------------
# one run


def run_task(args: Namespace) -> None:
    """What is missing from the run file, and for code the samples."""
    if args.out.suffix != ".jsonl":
        fail("--out is named *.jsonl")
    task = TASKS[args.task]
    items, options = load_items(task, args.task_file, args.option)
    part, parts = args.shard
    mine = items[: args.limit or None][part - 1 :: parts]

    # the model, and how it decodes
    model = load_model(args.ckpt, pick_device(args.device), DTYPES[args.dtype])
    tokenizer = load_tokenizer(args.ckpt, model.cfg.tokenizer)
    if tokenizer is None:
        fail(f"{args.ckpt} has no tokenizer (a toy's tokens are numbers): it cannot read {task.title}")
    d = settle_decoding(args, model, decoding_defaults(args.ckpt))
    switches = Switches(args.select, args.fill_from, args.edit_from, args.marker)
    if model.second_look and switches != Switches():
        fail(f"{args.ckpt} is a head, which has no stages to switch: leave --select, --*_from and --no_marker out")

    # what is to do
    chatty = "<role>" in tokenizer.special
    run = open_run(args.out, identity(args, items, options, model, plain(d, switches), chatty))
    todo = [item for item in mine if item.id not in run.items]
    style = "chat template" if chatty else "plain prompts (the tokenizer has no chat template)"
    print(
        f"{task.title}: {len(mine)} items, {len(todo)} to go; {style}; K = {d.n_rounds}, n = {model.cfg.n_last}, "
        f"tau_m2t {d.tau_m2t}, tau_t2t {d.tau_t2t}, gen_length {d.gen_length}, {args.dtype}; settings {run.hash}"
    )
    answer(model, tokenizer, switched(d, switches), todo, run, args)

    print(f"{task.title}: {summary(run)}")
    if task.f1 and run.items:
        print(f"  F1: {100 * sum(record['f1'] for record in run.items.values()) / len(run.items):.2f} %")
    if task.right is None:
        hand_over(args, run)


def answer(model: Model, tokenizer: Tokenizer, d: Decoding, todo: list[Item], run: Run, args: Namespace) -> None:
    """Decode the items of `todo` and append them to the run file, a line at a time."""
    prompts = encode(todo, tokenizer)
    B = model.cfg.block_length
    places = model.cfg.max_len // B * B
    for name, prompt in prompts.items():
        if len(prompt) + d.gen_length > places:
            fail(f"{name} has {len(prompt)} tokens, which leave {places - len(prompt)} of the model's {places}: "
                 f"--gen_length {d.gen_length} is too much")  # fmt: skip

    with args.out.open("ab") as file, tqdm(total=len(todo), unit="item", disable=None) as bar:
        for at in range(0, len(todo), args.batch):
            items = todo[at : at + args.batch]
            for record in decode(model, tokenizer, items, [prompts[item.id] for item in items], d, run):
                file.write(line(record))
                run.items[record["id"]] = record
            file.flush()
            bar.update(len(items))
            bar.set_postfix_str(summary(run))


def decode(
    model: Model, tokenizer: Tokenizer, items: list[Item], prompts: list[list[int]], d: Decoding, run: Run
) -> Iterator[dict]:
    """One line of the run file for each item; they are decoded together."""
    task = TASKS[run.settings["task"]]
    start = time.perf_counter()
    outputs = generate(model, prompts, d)
    seconds = (time.perf_counter() - start) / len(items)

    for item, prompt, output in zip(items, prompts, outputs, strict=True):
        text = tokenizer.decode(output.tokens)
        extracted = task.find(text, item)
        record = {"id": item.id, "prompt": digest(prompt), "output": text, "extracted": extracted, "gold": item.gold}
        record["correct"] = task.right and task.right(extracted, item.gold)
        if task.f1:
            record["f1"] = task.f1(extracted, item.gold)
        cost = {"tokens": len(output.tokens), "nfe": output.nfe, "seconds": round(seconds, 3), "batch": len(items)}
        yield record | cost | {"note": output.warning, "settings": run.hash}


# ---------------------------------------------------------------------------------------------------------------------
# HumanEval+ and MBPP+: EvalPlus judges, outside this process


def hand_over(args: Namespace, run: Run) -> None:
    """Write the samples for EvalPlus, and print the command that scores them."""
    folder = evalplus_folder(args.out)
    samples = [{"task_id": name, "solution": record["extracted"] or ""} for name, record in run.items.items()]
    # EvalPlus wants a sample of every problem that it is given
    problems = [record for _, record in read_jsonl(args.task_file) if record["task_id"] in run.items]
    for name, records in (("samples.jsonl", samples), ("dataset.jsonl", problems)):
        data = b"".join(map(line, records))
        replace_file(folder / name, lambda path, data=data: path.write_bytes(data))

    # a clean environment: EVALPLUS_TIMEOUT_PER_TASK, for one, makes 0.3.1 hang, and secrets are nobody's business; a
    # home of its own, because EvalPlus un-pickles its cache; else it downloads a release; under its 4 GiB the right
    # programs of Mbpp/255 and 392 fail; an old result would be reported again
    print(
        f"wrote {folder}/samples.jsonl; to score it with EvalPlus 0.3.1, in a container without network and as an "
        f"unprivileged user, for this EXECUTES the model's code:\n"
        f"  cd {folder} && rm -f samples_eval_results.json && env -i PATH=\"$PATH\" HOME=\"$(mktemp -d)\" "
        f"{args.task.upper()}_OVERRIDE_PATH=\"$PWD/dataset.jsonl\" EVALPLUS_MAX_MEMORY_BYTES=8589934592 "
        f"python -m evalplus.evaluate --dataset {args.task} --samples samples.jsonl\n"
        f"then: python -m released.tables main --runs {args.out.parent}"
    )  # fmt: skip


@command
def main() -> None:
    run_task(build_parser().parse_args())


if __name__ == "__main__":
    main()
