"""Benchmark runs: one of the seven tasks over one checkpoint, as the paper sets it up, into a run file.

A run file is JSON lines and only ever appended to: first the settings in clear with their hash, then one line an item
(id, prompt hash, output, extracted, gold, correct, the other scoring rules, tokens, forwards, seconds, settings hash).
Stopped or killed, the same command goes on: a line cut short is dropped, and no finished item runs again. tables.py
reads run files and makes the paper's tables of them. Under torchrun each process has its own items and run file.

Refuses: going on with other settings (whatever changes an output: weights, decoding, questions, prompts, precision)
and a damaged run file. Model-written code never runs in this process: HumanEval+ and MBPP+ leave samples in EvalPlus's
format beside the run file, and --score starts its harness apart.

    python -m released.run --task gsm8k --task_file test.jsonl --ckpt weights/llada2.1-mini --out runs/gsm8k_base.jsonl
    python -m released.run --task gsm8k --task_file test.jsonl --ckpt weights/llada2.1-mini --adapter out/cocommit \\
        --out runs/gsm8k_cocommit.jsonl                       # the paper's settings; --help lists what may be changed
"""

import hashlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from checkpoint import DTYPES, adapter_settings, load_model, load_tokenizer, read_config, weight_files
from evaluate import wilson
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, fail, replace_file
from model import Config, Model
from released import ablation, parallel
from released.ablation import Ablation
from released.benchmarks import TASKS, Item, Task, read_jsonl
from released.chat import chat
from released.tables import Q, Run, differences, digest, evalplus_folder, read_run, summary, verdict_file
from sample import MODES, Output, generate, settle_decoding

# ---------------------------------------------------------------------------------------------------------------------
# the command line


# fmt: off
def build_parser() -> Parser:
    p = Parser(__doc__)
    add = p.add_argument_group("what").add_argument
    known = "; ".join(f"{n}: {k}: {v}" for n, t in TASKS.items() if n != "mbpp" for k, v in t.options.items())
    add("--task", choices=TASKS, required=True)
    add("--task_file", type=Path, required=True, help="the published file of the task; nothing is downloaded")
    add("--option", action="append", default=[], metavar="K=V",
        help=f"of the task ({known}); every task: template: a text file with another prompt, fields in braces")
    add("--ckpt", type=Path, required=True, help="checkpoint folder of convert_weights.py or train.py")
    add("--adapter", type=Path, help="folder of LoRA and markers that train.py --init_from CKPT wrote")
    add("--out", type=Path, required=True, help="run file, .jsonl; the same command goes on where it stopped")
    add("--limit", type=int, default=0, help="only the first so many items (0: all)")
    add("--shard", default="1/1", help="part i of n, 1/4 to 4/4, an --out for each; tables put them together")
    add("--batch", type=int, default=1, help="prompts decoded at once, each as if alone but for exact ties (paper: 1)")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    add("--score", action="store_true", help="HumanEval+, MBPP+: let EvalPlus EXECUTE the model's code, in a "
        "subprocess that is no sandbox; use a container without network, as an unprivileged user")
    add = p.add_argument_group("decoding, the paper's unless given").add_argument
    add("--gen_length", type=bounded(int, 1), default=Q.gen_length, help="tokens, less where a prompt leaves less room")
    add("--mode", choices=MODES, default="q", help="q: tau_m2t 0.7, tau_t2t 0.5; s: 0.5 and 0.0")
    add("--tau_m2t", type=bounded(float, -1, 1), help="fill masks whose probability is above this (-1: all at once)")
    add("--tau_t2t", type=bounded(float, 0, 1, none=True), default=SUPPRESS,
        help='edit above this, or "none" (default: the mode\'s without Stage B, 0 with it: any disagreement)')
    add("--n_rounds", type=bounded(int, 0), help="K (default: the adapter's; without one 0, the released decoder)")
    add("--fill_from", choices=["A", "B"], default="B", help="which stage's logits fill masks")
    add("--edit_from", choices=["A", "B"], default="B", help="which stage's logits edit")
    add("--no_marker", action="store_true", help="run the last n layers again, but unmarked")
    add("--select", choices=["confidence", "entropy"], default="confidence",
        help="the bundle: above the gate, or as many but least entropic")
    return p
# fmt: on


def decoding(args: Namespace, cfg: Config) -> Ablation:
    """The paper's settings with the flags over them."""
    fixed = {k: v for k, v in asdict(Q).items() if k not in ("tau_m2t", "tau_t2t")}  # those are the mode's
    rounds = args.n_rounds
    if rounds is None:
        rounds = cfg.n_rounds if args.adapter else 0
    plain = settle_decoding(Namespace(**fixed | vars(args) | {"n_rounds": rounds}), SimpleNamespace(cfg=cfg))
    switches = {k: getattr(args, k) for k in ("select", "fill_from", "edit_from")}
    return Ablation(**asdict(plain), **switches, marker=not args.no_marker)


def load_items(task: Task, file: Path, options: list[str]) -> tuple[list[Item], dict[str, Any]]:
    """The task's items and its options in clear (a password and paths left out: the questions' hash covers them)."""
    kinds = {"repeats": int, "seed": int, "prefill": lambda text: {"true": True, "false": False}[text]}
    values: dict[str, Any] = {}
    for option in options:
        key, _, text = option.partition("=")
        if key not in task.options and key != "template":
            fail(f"--option {key}: {task.name} takes {', '.join([*task.options, 'template'])}")
        try:
            values[key] = Path(text).read_text(encoding="utf-8") if key == "template" else kinds.get(key, str)(text)
        except (OSError, ValueError, KeyError) as e:
            fail(f"--option {option} cannot be used ({type(e).__name__}: {e})")
    try:
        items = task.load(file, **values)
    except ValueError as e:
        fail(e)
    return items, {k: v for k, v in values.items() if k in kinds or k == "template"}


def share(items: list[Item], limit: int, shard: str) -> list[Item]:
    """What --limit and --shard leave."""
    part, _, parts = shard.partition("/")
    if limit < 0 or not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        fail(f"--limit {limit} --shard {shard}: a limit is 0 or more, a shard i/n with i from 1 to n, like 1/4")
    return items[: limit or None][int(part) - 1 :: int(parts)]


# ---------------------------------------------------------------------------------------------------------------------
# run files


def fingerprint(files: list[Path]) -> str:
    """Identity of files too large to read: sizes, and 256 pieces of 4 KiB spread evenly, the first and last included.

    A safetensors header alone would not do: it is the same for every checkpoint of one geometry."""
    h = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as f:
                size = f.seek(0, os.SEEK_END)
                h.update(size.to_bytes(8, "little"))
                for i in range(256):
                    f.seek(max(0, size - 4096) * i // 255)
                    h.update(f.read(4096))
        except OSError as e:
            fail(f"{path} cannot be read ({e.strerror}): the checkpoint is incomplete, copy it again")
    return h.hexdigest()[:16]


def identity(args: Namespace, items: list[Item], options: dict, cfg: Config, d: Ablation, chat: bool) -> dict:
    """Everything that changes an output, as JSON; where files lie, and how the work is cut up, does not."""
    adapter = None
    if args.adapter:
        adapter = {k: v for k, v in adapter_settings(args.adapter).items() if k != "base"}
        adapter["weights"] = fingerprint([args.adapter / "adapter.safetensors"])
    files = weight_files(args.ckpt) + ([args.ckpt / "tokenizer.json"] if cfg.tokenizer == "bpe" else [])
    settings = {
        "task": args.task,
        "options": options,
        "questions": digest([[i.id, i.prompt, i.gold, i.extra] for i in items]),
        "model": asdict(cfg) | {"weights": fingerprint(files)},
        "adapter": adapter,
        "decoding": asdict(d),
        "chat": chat,
        "dtype": args.dtype,
    }
    return json.loads(json.dumps(settings))


def open_run(path: Path, settings: dict) -> Run:
    """The run at `path` as far as it got, its cut line dropped; or a new one, its first line written."""
    run, whole = read_run(path) if path.exists() else (None, 0)
    if run and run.settings != settings:
        fail(f"{path} holds a run with other settings: {'; '.join(differences(run.settings, settings))} (there, now); "
             "choose another --out")  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as f:
            f.truncate(whole)
            if run is None:
                run = Run(settings, digest(settings), {})
                f.write((json.dumps({"settings": settings, "hash": run.hash}, ensure_ascii=False) + "\n").encode())
    except OSError as e:
        fail(f"cannot write {path}: {e.strerror}; choose another --out")
    return run


# ---------------------------------------------------------------------------------------------------------------------
# one run


def split(args: Namespace, items: list[Item]) -> tuple[list[Item], list[Path]]:
    """This process's items, and the run files of all processes; its own becomes --out."""
    parts = [args.out]
    if parallel.WORLD > 1:
        if args.shard != "1/1":
            fail("--shard under torchrun: its processes are shards already, leave it out")
        parts = [args.out.with_suffix(f".{i + 1}of{parallel.WORLD}.jsonl") for i in range(parallel.WORLD)]
        args.shard, args.out = f"{parallel.RANK + 1}/{parallel.WORLD}", parts[parallel.RANK]
    return share(items, args.limit, args.shard), parts


def run_task(args: Namespace, device: torch.device) -> None:
    """What is missing from the run file, and for code the samples."""
    if args.batch < 1 or args.out.suffix != ".jsonl":
        fail("a --batch is 1 or more, and --out is named *.jsonl")
    task = TASKS[args.task]
    if args.score and task.correct:
        fail(f"--score is for HumanEval+ and MBPP+: {task.title} is scored as it runs")
    items, options = load_items(task, args.task_file, args.option)
    mine, parts = split(args, items)
    trained = adapter_settings(args.adapter)["model"] if args.adapter else {}
    cfg = replace(read_config(args.ckpt), **{k: trained[k] for k in ("n_last", "n_rounds") if trained})
    tokenizer, d = load_tokenizer(args.ckpt, cfg.tokenizer), decoding(args, cfg)
    if tokenizer is None:
        fail(f"{args.ckpt} has no tokenizer (a toy's tokens are numbers): it cannot read {task.title}")
    chatty = "<role>" in tokenizer.special
    run = open_run(args.out, identity(args, items, options, cfg, d, chatty))
    todo = [item for item in mine if item.id not in run.items]
    style = "chat template" if chatty else "plain prompts (the tokenizer has no chat template)"
    part = "" if args.shard == "1/1" else f" in shard {args.shard}"
    print(f"{task.title}: {len(mine)} items{part}, {len(todo)} to go; {style}; K = {d.n_rounds}, n = {cfg.n_last}, "
          f"tau_m2t {d.tau_m2t}, tau_t2t {d.tau_t2t}, gen_length {d.gen_length}, {args.dtype}; settings {run.hash}"
    )  # fmt: skip
    try:
        answer(args, device, tokenizer, d, todo, run)
    except KeyboardInterrupt:
        fail(f"interrupted: {len(run.items)} items are in {args.out}, and the same command goes on")
    except torch.OutOfMemoryError:
        fail(f"out of memory: lower --batch or --gen_length, or take --dtype bf16; {args.out} keeps what is done")
    except OSError as e:
        fail(f"cannot write {args.out}: {e.strerror}; free some space, and the same command goes on")
    if parallel.last():
        report(args, task, parts)


def report(args: Namespace, task: Task, parts: list[Path]) -> None:
    """What all processes together have found."""
    runs = {path: read_run(path)[0] for path in parts}
    first = runs[parts[0]]
    whole = Run(first.settings, first.hash, {k: v for run in runs.values() for k, v in run.items.items()})
    print(f"{task.title}: {summary(whole)}")
    for rule in sorted({rule for record in whole.items.values() for rule in record["scores"]}):
        print(f"  by the rule {rule!r}: {100 * mean(r['scores'][rule] for r in whole.items.values()):.2f} %")
    if task.correct is None:
        for path, run in runs.items():
            hand_over(path, args, task, run)


def answer(
    args: Namespace, device: torch.device, tokenizer: Tokenizer, d: Ablation, todo: list[Item], run: Run
) -> None:
    """Decode the items of `todo` and append them to the run file, a line at a time."""
    if not todo:
        return
    model = load_model(args.ckpt, device, DTYPES[args.dtype], args.adapter)
    if d.switched():
        if model.step is not None:
            fail(f"{args.adapter} brings its own decoder: leave out --select, --fill_from, --edit_from and --no_marker")
        model.step = ablation.step
    read = (lambda text: tokenizer.encode(chat(text))) if run.settings["chat"] else tokenizer.encode
    prompts = {i.id: read(i.prompt) + tokenizer.encode(i.extra.get("prefill", "")) for i in todo}
    places = model.cfg.max_len // model.cfg.block_length * model.cfg.block_length
    room = {name: min(d.gen_length, places - len(prompt)) for name, prompt in prompts.items()}
    if clipped := [n for n in room.values() if n < d.gen_length]:
        print(f"note: {len(clipped)} of {len(todo)} prompts leave less than --gen_length {d.gen_length} of the model's "
              f"{places} positions, one only {max(0, min(clipped))}: answers are cut there")  # fmt: skip
    with args.out.open("ab") as f, tqdm(total=len(todo), unit="item", disable=None) as bar:
        for at in range(0, len(todo), args.batch):
            for n, group in itertools.groupby(todo[at : at + args.batch], key=lambda item: room[item.id]):
                group = list(group)
                for record in decode(model, tokenizer, group, [prompts[i.id] for i in group], n, d, run):
                    f.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
                    run.items[record["id"]] = record
                f.flush()
                bar.update(len(group))
                bar.set_postfix_str(summary(run))


def decode(
    model: Model, tokenizer: Tokenizer, items: list[Item], prompts: list[list[int]], n: int, d: Ablation, run: Run
) -> Iterator[dict]:
    """One line of the run file for each item, decoded together with n tokens for each; n < 1: no prompt fits."""
    task, start = TASKS[run.settings["task"]], time.perf_counter()
    if n >= 1:
        outputs = generate(model, prompts, replace(d, gen_length=n))
    else:
        why = f"no room: the prompt alone fills the model's {model.cfg.max_len} positions"
        outputs = [Output([], dict.fromkeys(("full", "partial", "commit"), 0), warning=why) for _ in items]
    seconds = (time.perf_counter() - start) / len(items)
    for item, prompt, output in zip(items, prompts, outputs, strict=True):
        text = tokenizer.decode(output.tokens)
        extracted = task.extract(text, item) if n >= 1 else None
        yield {
            "id": item.id,
            "prompt": digest(prompt),
            "output": text,
            "extracted": extracted,
            "gold": item.gold,
            "correct": task.correct(extracted, item) if task.correct else None,
            "scores": task.extra_scores(text, item),
            "tokens": len(output.tokens),
            "nfe": output.nfe,
            "seconds": round(seconds, 3),
            "batch": len(items),
            "note": output.warning or (f"clipped to {n} tokens" if n < d.gen_length else None),
            "settings": run.hash,
        }


# ---------------------------------------------------------------------------------------------------------------------
# HumanEval+ and MBPP+: EvalPlus judges, outside this process


def hand_over(out: Path, args: Namespace, task: Task, run: Run) -> None:
    """Write the samples; score them if --score says so, else print the command that does."""
    folder = evalplus_folder(out)
    samples, dataset = folder / "samples.jsonl", folder / "dataset.jsonl"
    records = [r for _, r in read_jsonl(args.task_file) if r["task_id"] in run.items]  # EvalPlus wants a sample of each
    replace_file(dataset, lambda p: p.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8"))
    before = samples.read_text(encoding="utf-8") if samples.exists() else None
    write_samples(samples, [(name, record["extracted"]) for name, record in run.items.items()])
    if samples.read_text(encoding="utf-8") != before:  # EvalPlus would report an old result again, and run nothing
        verdict_file(samples).unlink(missing_ok=True)
    if not args.score:
        shell = evalplus_command(samples, task.name, dataset, "python")[2]
        print(f"wrote {samples}; to score it, in a container without network and as an unprivileged user, for this "
              f"executes the model's code: {shell}")  # fmt: skip
        return
    try:
        scores = score_with_evalplus(samples, task.name, dataset)
    except ValueError as e:
        fail(e)
    right, n = sum(v["plus"] for v in scores["per_task"].values()), len(scores["per_task"])
    low, high = wilson(right, n)
    print(f"{task.title}: pass@1 {100 * scores['plus']:.2f} % [{100 * low:.1f}, {100 * high:.1f}] ({right} of {n}), "
          f"base tests alone {100 * scores['base']:.2f} %")  # fmt: skip
    for note in scores["notes"]:
        print(f"note: {note}")


def write_samples(path: str | Path, items: Iterable[tuple[str, str | None]]) -> None:
    """Writes (task id, program) pairs for EvalPlus, whole or not at all; None is an empty program: it wants all."""
    path = Path(path)
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: EvalPlus reads samples from .jsonl files only; rename it")
    lines = [json.dumps({"task_id": name, "solution": program or ""}) + "\n" for name, program in items]
    replace_file(path, lambda p: p.write_text("".join(lines), encoding="utf-8"))


class MissingEvalplus(ValueError):
    """EvalPlus is not installed; `command` scores the samples where it is."""

    def __init__(self, command: str):
        super().__init__(f"EvalPlus is not installed; pip install evalplus==0.3.1 in a sandbox, then run: {command}")
        self.command = command


def evalplus_command(samples: Path, dataset: str, dataset_file: Path, python: str) -> tuple[list[str], dict, str]:
    """(arguments, environment, the same for a shell) of EvalPlus 0.3.1 over samples; to run in the samples' folder."""
    command = [python, "-m", "evalplus.evaluate", "--dataset", dataset, "--samples", samples.name]
    settings = {
        f"{dataset.upper()}_OVERRIDE_PATH": str(dataset_file.resolve()),  # else it downloads a release
        "EVALPLUS_MAX_MEMORY_BYTES": "8589934592",  # under its 4 GiB the right programs of Mbpp/255 and 392 fail
    }
    prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    return command, settings, f"cd {shlex.quote(str(samples.resolve().parent))} && {prefix} {shlex.join(command)}"


def score_with_evalplus(
    samples: str | Path, dataset: str, dataset_file: str | Path, python: str = sys.executable
) -> dict[str, Any]:
    """Runs `evalplus.evaluate` (0.3.1) and returns {"base", "plus": pass@1 in 0..1, "per_task", "notes"}.

    dataset: "humaneval" or "mbpp"; dataset_file: its EvalPlus release, or a subset: each of its tasks needs a sample.
    This EXECUTES MODEL-WRITTEN CODE, in a subprocess with a fresh environment (no secrets), home and cache folder, no
    input and a memory limit; EvalPlus itself says that this is no sandbox: run in a container without network.
    Raises MissingEvalplus, or ValueError with the harness's last words where it gave no result.
    """
    samples = Path(samples).resolve()
    result = verdict_file(samples)
    result.unlink(missing_ok=True)  # EvalPlus would report an old one again, without running anything
    command, settings, shell = evalplus_command(samples, dataset, Path(dataset_file), python)
    # a list of what passes: EVALPLUS_TIMEOUT_PER_TASK, for one, makes 0.3.1 hang
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    with tempfile.TemporaryDirectory() as home:  # private, for EvalPlus un-pickles what it finds in its cache
        env = kept | settings | dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), home)
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        log = subprocess.run(command, cwd=samples.parent, env=env, encoding="utf-8", errors="replace", **streams).stdout
    if "No module named 'evalplus'" in log:
        raise MissingEvalplus(shell)
    if not result.exists():
        raise ValueError(f"{samples}: EvalPlus gave no result; mend what its last lines say: {log[-500:]}")
    per_task = {}
    for name, (run, *_) in json.loads(result.read_text(encoding="utf-8"))["eval"].items():  # one greedy sample a task
        base = run["base_status"] == "pass"
        per_task[name] = {"base": base, "plus": base and run["plus_status"] == "pass"}
    note = "HumanEval/32 fails in EvalPlus 0.3.1 whatever the program (mended since): the best is 163 of 164"
    share = {kind: sum(task[kind] for task in per_task.values()) / len(per_task) for kind in ("base", "plus")}
    return share | {"per_task": per_task, "notes": [note] if "HumanEval/32" in per_task else []}


def main() -> None:
    parallel.start()
    args = build_parser().parse_args()
    run_task(args, parallel.pick_device(args.device))


if __name__ == "__main__":
    main()
