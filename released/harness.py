"""The paper's seven benchmarks by lm-eval, the harness that the field uses, with our decoder as its model.

An --out folder has settings.json, answers.jsonl (each answer and its cost), and what lm-eval logs: results_*.json, and
samples_*.jsonl with each item's scores and cost. If a run was stopped or killed, the same command goes on; other
settings are refused. tables.py makes the paper's tables from such folders.

    python -m released.harness --tasks gsm8k piqa --task_file test.jsonl dev.jsonl --ckpt out/cocommit --out runs/mine

The same by lm-eval's own command, which finds the name of our model in the task's file:

    lm_eval run --model cocommit --model_args ckpt=out/cocommit,out=runs/cocommit --device cuda --apply_chat_template \\
        --tasks released/tasks/gsm8k.yaml --metadata gsm8k=test.jsonl \\
        --log_samples --output_path runs/cocommit/results.json

Code that a model wrote never runs in this process: for HumanEval+ and MBPP+ this command leaves samples in EvalPlus's
format beside the results, and prints the command that scores them.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from checkpoint import DTYPES, base_of, load_model
from decoding import SETTINGS, check_prompt
from lib import util
from lib.tokenizer import load_tokenizer
from lib.util import Parser, alone_in, bounded, command, fail, pick_device, progress, quoted, read_json, write_json
from prepare import read_records
from released.ablation import BASE, ROWS, decoder_of, row_of
from released.chat import chat
from released.tables import HEAD, TASKS, Run, digest, measured, read_runs
from sample import generate

try:
    from lm_eval.api.model import LM
except ImportError:  # `main` says what to install
    LM = object

FOLDER = Path(__file__).parent / "tasks"


class Answer(str):
    """A text, and its `cost`: tokens, and full, partial and refresh forwards."""

    def __new__(cls, text: str, cost: dict[str, float]) -> "Answer":
        answer = super().__new__(cls, text)
        answer.cost = cost
        return answer

    def __getnewargs__(self) -> tuple[str, dict[str, float]]:  # lm-eval's --use_cache keeps copies
        return str(self), self.cost


class CoCommit(LM):
    """A checkpoint that lm-eval asks. Every row of a batch is decoded as if it were alone."""

    def __init__(
        self, ckpt: str | Path, out: str | Path, row: str | None = None, gen_length: int = 16384, dtype: str = "fp32",
        device: str = "auto", batch_size: int | str = 1, max_batch_size: int = 1,
    ):  # fmt: skip
        super().__init__()
        self.ckpt = Path(ckpt).expanduser()
        self.out = Path(out).expanduser()
        self.batch_size = int(max_batch_size if str(batch_size).startswith("auto") else batch_size)
        base = base_of(self.ckpt)
        self.model = load_model(self.ckpt, pick_device(device), DTYPES[dtype])
        self.text = load_tokenizer(base)
        row = row_of(self.model, row)
        d, self.step = decoder_of(row, self.model.cfg.n_rounds)
        if row == BASE:
            d = replace(SETTINGS[self.model.cfg.decoder], holes=False)  # as the base was made for
        self.d = replace(d, gen_length=gen_length)

        # what may change an answer on one device; the places of files do not
        adapter = self.ckpt / "adapter.safetensors"
        self.settings = {
            "row": row,
            "weights": self.model.base_hash,  # of the config and the tokenizer, too
            "adapter": digest(adapter.read_bytes().hex()) if base != self.ckpt else None,
            "partial_cost": self.model.partial_cost,
            "dtype": dtype,
        }
        self.settings |= asdict(self.model.cfg) | asdict(self.d)  # n_rounds is the decoder's

    # --- what lm-eval asks of a model
    @property
    def tokenizer_name(self) -> str:
        return str(self.ckpt)

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        """The model's chat template around one question, or around a system message and one question."""
        *system, user = [turn["content"] for turn in chat_history]
        return chat(user, *system, decoder=self.model.cfg.decoder)

    def loglikelihood(self, requests: list) -> list:
        fail("this decoder has no log-likelihoods: choose a task whose output_type is generate_until")

    loglikelihood_rolling = loglikelihood

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[Answer]:
        """The answers to lm-eval's requests. Those in answers.jsonl are taken from there, and the others are added."""
        items = [f"item {request.doc_id} of {request.task_name}" for request in requests]
        asked = dict(zip(items, requests, strict=True))
        keys = {item: digest((request.args, request.doc)) for item, request in asked.items()}
        with alone_in(self.out):
            place = self.out / "settings.json"
            if not place.exists():
                write_json(place, self.settings)
            there = read_json(place, "settings of a run")
            for name, now in self.settings.items():
                if there.get(name) != now:
                    differs = f"{name} ({there.get(name)}, {now})"
                    fail(f"{self.out} has a run with other settings: {differs} (there, now); choose another --out")

            path = self.out / "answers.jsonl"
            kinds = {"item": str, "key": str, "text": str, "cost": dict}
            lines = util.read_lines(path, kinds) if path.exists() else []
            for line in lines:
                if keys.get(line["item"], line["key"]) != line["key"]:
                    fail(f"{self.out} answers another {line['item']} (task file or prompt): choose another --out")
            answers = {line["item"]: Answer(line["text"], line["cost"]) for line in lines}
            todo = {item: request.args for item, request in asked.items() if item not in answers}
            print(f"{self.settings['row']}: {len(asked)} items, {len(todo)} to go")
            for item, answer in self.decode(todo):
                util.append_line(path, {"item": item, "key": keys[item], "text": answer, "cost": answer.cost})
                answers[item] = answer
        return [answers[item] for item in items]

    def decode(self, asked: dict[str, tuple[str, dict]]) -> Iterator[tuple[str, Answer]]:
        """Answer questions (key -> text and lm-eval's settings for it), batch by batch and greedily. An answer is cut
        before the first stop string, but its cost is that of all tokens. Of a task's settings only `until` is read."""
        unread = {f"{k}={v}" for _, how in asked.values() for k, v in how.items() if k != "until" and v}
        if unread:
            print(f"not read: {', '.join(sorted(unread))} (an answer is greedy, and ends by itself or at gen_length)")
        prompts = {key: self.text.encode(text) for key, (text, _) in asked.items()}
        for number, ids in enumerate(prompts.values(), 1):
            check_prompt(ids, number, self.d.gen_length, self.model.cfg)

        keys = list(asked)
        batches = [keys[i : i + self.batch_size] for i in range(0, len(keys), self.batch_size)]
        for keys in progress(batches, "batches"):
            outputs = generate(self.model, [prompts[key] for key in keys], self.d, step=self.step)
            for key, output in zip(keys, outputs, strict=True):
                text = self.text.decode(output.tokens)
                stops = asked[key][1].get("until", [])
                for stop in [stops] if isinstance(stops, str) else stops:
                    text = text.partition(stop)[0]
                yield key, Answer(text, {"tokens": len(output.tokens)} | output.nfe)


# --- HumanEval+ and MBPP+: EvalPlus judges, outside this process
def hand_over(run: Run, task_file: Path) -> None:
    """Write the samples for EvalPlus, and print the command that scores them."""
    # EvalPlus needs a sample of every problem that it is given
    programs = run.programs()
    samples = [{"task_id": name, "solution": program} for name, program in programs.items()]
    problems = [record for _, record in read_records(task_file) if record["task_id"] in programs]
    folder = run.programs_folder()
    folder.mkdir(exist_ok=True)
    for name, records in (("samples.jsonl", samples), ("dataset.jsonl", problems)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    # `sanitize` cuts prose and calls away. It reads both data sets; the other one is empty, or it would be downloaded.
    # The environment is empty, because EVALPLUS_TIMEOUT_PER_TASK makes 0.3.1 hang, and because it may hold secrets. The
    # home is new, because EvalPlus un-pickles its cache. With 4 GiB the right programs of Mbpp/255 and 392 fail
    override = {"HUMANEVAL": "/dev/null", "MBPP": "/dev/null"} | {run.task.upper(): '"$PWD/dataset.jsonl"'}
    sealed = 'env -i PATH="$PATH" HOME="$(mktemp -d)" EVALPLUS_MAX_MEMORY_BYTES=8589934592'
    sealed += "".join(f" {name}_OVERRIDE_PATH={path}" for name, path in override.items())
    print(
        f"{TASKS[run.task].title}: to score it, run this in a container without network, as an unprivileged user, "
        f"because it EXECUTES the model's code:\n"
        f"  cd {quoted(folder)} && {sealed} python -m evalplus.sanitize --samples samples.jsonl && "
        f"{sealed} python -m evalplus.evaluate --dataset {run.task} --samples samples-sanitized.jsonl"
    )


# --- the command line
# fmt: off
def build_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument_group("what is asked").add_argument
    add("--tasks", choices=TASKS, required=True, nargs="+")
    add("--task_file", type=Path, required=True, nargs="+", metavar="FILE",
        help="the published file of each task, in the same order; nothing is downloaded")
    add("--limit", type=bounded(int, 1), help="only the first items of each task")

    add = parser.add_argument_group("what answers, and where the answers go").add_argument
    add("--ckpt", type=Path, required=True, help="a model's folder, or an adapter's")
    add("--row", choices=ROWS, metavar="NAME",
        help="decode as this row of Table 2 (left out: as the base was made for, or for an adapter as the paper does)")
    add("--gen_length", type=bounded(int, 1, 10**9), default=16384, help="the most tokens of an answer")
    add("--batch_size", type=bounded(int, 1), default=1, help="prompts that are decoded together")
    add("--out", type=Path, required=True, help="a folder; the same command goes on where it stopped")
    add("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    return parser
# fmt: on


@command
def main() -> None:
    args = build_parser().parse_args()
    if LM is object:
        fail("the benchmarks need lm-eval, which is not installed: pip install -e '.[benchmarks]'")
    if not len(set(args.tasks)) == len(args.tasks) == len(args.task_file):
        fail(f"--tasks {' '.join(args.tasks)}: give each task once, and one --task_file for each, in the same order")
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import setup_logging

    setup_logging(logging.ERROR)
    model = CoCommit(args.ckpt, args.out, args.row, args.gen_length, args.dtype, args.device, args.batch_size)
    files = dict(zip(args.tasks, args.task_file, strict=True))
    tasks = TaskManager(include_path=FOLDER, include_defaults=False, metadata={k: str(v) for k, v in files.items()})
    log = EvaluationTracker(output_path=str(model.out / "results.json"))
    results = simple_evaluate(
        model, tasks=args.tasks, task_manager=tasks, evaluation_tracker=log, limit=args.limit,
        apply_chat_template=True,
    )  # fmt: skip
    samples = results.pop("samples")
    log.save_results_aggregated(results, samples)
    for task in args.tasks:
        log.save_results_samples(task, samples[task])

    # lm-eval only warns if it cannot write, so what is printed comes from its files
    runs = [run for run in read_runs(model.out) if run.task in files]
    util.print_table(HEAD[:7], [[TASKS[run.task].title, *measured(run, None)] for run in runs])
    for run in runs:
        if not TASKS[run.task].judged:
            hand_over(run, files[run.task])


if __name__ == "__main__":
    main()
