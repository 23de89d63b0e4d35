"""sample.py's command line: its flags, the prompts it reads, and what it shows of a decode."""

import argparse
import json
import math
import sys
from argparse import Namespace
from typing import Any

from lib.config import DTYPES, Config
from lib.data import exists
from lib.output import Output, Row
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, fail, or_none

MASK = "▒"
END = "∎"


# --- what is asked for
def build_parser(doc: str) -> Parser:
    parser = Parser(doc)
    some = bounded(int, 0)
    own = argparse.SUPPRESS  # what is not given is not there: sample.settle_decoding has the defaults

    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--ckpt", default="assets/names/head", help="a model's folder, or an adapter's")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[],
        help=f"text, in which each {MASK} is one token to fill; repeat the flag for several rows")
    add("--prompt_ids", type=lambda text: [int(i) for i in text.split(",")], action="append", default=[],
        help="token ids, 1,2,3; repeat for several rows")

    add = parser.add_argument_group("decoding").add_argument
    add("--gen_length", type=some, default=own, help="tokens after the prompt (256); the last block is decoded whole")
    add("--n_rounds", type=some,
        help="K; 0: Stage B off, the released decoder (default: as trained; 0 where no marker was trained)")
    add("--tau_m2t", type=bounded(float, -1, 1), default=own,
        help="fill above this probability, from the left above this product (paper 0.7; -1: every mask at once)")
    add("--tau_t2t", type=or_none(bounded(float, 0, 1)), default=own,
        help='edit above this; 0: on any disagreement; "none": never (paper 0; 0.5, as released, where Stage B is off; '
             "none for a model that is written from the left)")
    add("--tau_keep", type=bounded(float, 0, 1), default=own, help="a head leaves masked what does not pass this")
    add("--temperature", type=temperature, default=own, help="0: argmax; else at least 0.001")
    add("--top_k", type=some, default=own, help="with temperature: the k best tokens (0: all)")
    add("--top_p", type=bounded(float, 1e-6, 1), default=own, help="with temperature: so much mass (1: all)")
    add("--seed", type=int, default=0, help="any whole number, of any size: it is hashed")

    add = parser.add_argument_group("output").add_argument
    add("--watch", action="store_true", help=f"show every step ({MASK} a mask, {END} the end)")
    add("--json", action="store_true", help="one JSON object a prompt; tools/playground shows it")
    # fmt: on
    return parser


def temperature(text: str) -> float:
    """0, or warm enough that logits divided by it stay finite."""
    value = bounded(float, 0)(text)
    if 0 < value < 1e-3:
        raise argparse.ArgumentTypeError(f"{text} is as good as 0, which is greedy: give 0, or at least 0.001")
    return value


def read_prompts(
    args: Namespace, tokenizer: Tokenizer | None, cfg: Config, gen_length: int, of_names: bool
) -> list[list[int]]:
    """Every prompt as ids, each checked to fit the model."""
    if args.prompt and tokenizer is None:
        fail("this checkpoint has no tokenizer (a toy's tokens are numbers): use --prompt_ids")
    prompts = [encode_with_holes(text, tokenizer, cfg.mask_id, of_names) for text in args.prompt]
    prompts += args.prompt_ids
    if not prompts:
        fail("nothing to continue: give --prompt TEXT or --prompt_ids 1,2,3")
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, number, gen_length, cfg)
    return prompts


def encode_with_holes(text: str, tokenizer: Tokenizer, mask_id: int, of_names: bool) -> list[int]:
    """Text to ids; each MASK in it is one mask."""
    ids = []
    for part in text.split(MASK):
        if of_names:  # in names a blank belongs to the word after it
            part = part.rstrip()
        ids += [*tokenizer.encode(part), mask_id]
    return ids[:-1]


def check_prompt(prompt: list[int], number: int, gen_length: int, cfg: Config) -> None:
    if not prompt:
        fail(f"prompt {number} is empty: the model continues a text, give it at least one token")
    if not all(0 <= i < cfg.vocab_size for i in prompt):
        fail(f"prompt {number} has ids outside 0..{cfg.vocab_size - 1}, the model's vocabulary")
    # the last block is decoded whole
    need = math.ceil((len(prompt) + gen_length) / cfg.block_length) * cfg.block_length
    if need > cfg.max_len:
        fail(
            f"prompt {number} of {len(prompt)} tokens and --gen_length {gen_length} need {need} positions, the model "
            f"has {cfg.max_len}: shorten one of them"
        )


# --- a decode in plain values
class Steps:
    """The steps of every row, for generate's on_step."""

    def __init__(self, n_rows: int):
        self.of_row: list[list[dict]] = [[] for _ in range(n_rows)]

    def add(self, rows: list[Row], step: Any) -> None:
        """step: a sample.Step of these rows."""
        for r, row in enumerate(rows):
            self.of_row[row.number].append(step_record(step, r, len(row.ids)))


def step_record(step: Any, r: int, start: int) -> dict:
    """One step of row r in plain numbers; positions are absolute."""
    before = step.stage_a.z[r].tolist()
    after = step.after[r].tolist()
    token = step.look.token[r].tolist()
    conf = [round(p, 4) for p in step.look.conf[r].tolist()]
    token_a = step.stage_a.token[r].tolist()
    conf_a = [round(p, 4) for p in step.stage_a.conf[r].tolist()]

    fill, edit, refused = [], [], []
    for i in range(len(after)):
        here = dict(at=start + i, token=token[i], conf=conf[i])
        if step.edited[r, i]:
            edit.append(here | dict(old=before[i]))
        elif step.bundle[r, i] and step.look.written[r, i]:
            fill.append(here | dict(token_a=token_a[i], conf_a=conf_a[i]))
        elif step.bundle[r, i]:  # what a head is not sure of stays masked
            refused.append(here)
    return dict(
        start=start, before=before, after=after, fill=fill, edit=edit, refused=refused, conf=conf,
        partial=float(step.look.partial[r]),
    )  # fmt: skip


def make_record(
    prompt: list[int], output: Output, steps: list[dict], cfg: Config, n_rounds: int, tokenizer: Tokenizer | None,
    judged: bool,
) -> dict:  # fmt: skip
    """Everything about one row in plain values: what --json prints, and every display shows."""
    return dict(
        text=tokenizer.decode(output.tokens) if tokenizer else None,  # a toy's tokens are numbers
        verdict=verdict(tokenizer.decode(output.prompt + output.tokens)) if judged else None,
        tokens=output.tokens, steps=steps, nfe=output.nfe,
        n_written=len(output.tokens) + prompt.count(cfg.mask_id),
        prompt=output.prompt, mask_id=cfg.mask_id, n_rounds=n_rounds, pieces=pieces(output, steps, cfg, tokenizer),
    )  # fmt: skip


def pieces(output: Output, steps: list[dict], cfg: Config, tokenizer: Tokenizer | None) -> dict[str, str]:
    """The text of every id that occurs in a record."""
    ids = set(output.prompt)
    for s in steps:
        ids.update(s["after"])
        ids.update(f["token_a"] for f in s["fill"])
        ids.update(f["token"] for f in s["refused"])
    name = tokenizer.piece if tokenizer else str
    return {str(i): name(i) for i in sorted(ids)} | {str(cfg.eos_id): END, str(cfg.mask_id): MASK}


def verdict(name: str) -> str:
    """Of a model of names: the character, or that there is none."""
    char = exists(name)
    if char:
        return f"{char} (U+{ord(char):04X})"
    return "(no such character)" if name.isupper() else "(no such character; names are in upper case)"


# --- what is shown
def show(record: dict, warning: str | None, tokenizer: Tokenizer | None, args: Namespace) -> None:
    """One row: its steps if they are asked for, its text, what it cost."""
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(record))
        return
    if args.watch:
        show_steps(record)

    # a toy's tokens are numbers
    text = str(record["tokens"])
    if tokenizer:
        text = tokenizer.decode(record["prompt"] + record["tokens"])
    ending = "   " + record["verdict"] if record["verdict"] else ""
    print(text + ending)

    # what it cost; the README's glossary has the words
    nfe = record["nfe"]
    n = record["n_written"]
    print(
        f"[{n} tokens; forwards: {nfe['full']} full + {nfe['partial']:.3g} partial x {record['partial_cost']:.3g} + "
        f"{nfe['commit']} commit = {nfe['all']:.3g}, {nfe['all'] / max(1, n):.3f} per token]"
    )


def show_steps(record: dict) -> None:
    """One line a step: the block after it, and in [] what the step wrote. In (): Stage A's choice where
    another was written, and beside a mask what a head was not sure of.
    """
    gap = " " if record["text"] is None else ""  # a toy's tokens are numbers
    name = {int(i): piece.replace("·", " ") + gap for i, piece in record["pieces"].items()}

    for number, s in enumerate(record["steps"], 1):
        drawn = [name[i] for i in s["after"]]
        for f in s["fill"] + s["edit"]:
            i = f["at"] - s["start"]
            drawn[i] = f"[{name[f['token']]}]"
            if f.get("token_a", f["token"]) != f["token"]:
                drawn[i] += f"(A: {name[f['token_a']]})"
        for f in s["refused"]:
            drawn[f["at"] - s["start"]] = f"{MASK}({name[f['token']]}? {f['conf']:.2f})"
        print(f"step {number:3}  block {s['start']:3}  " + "".join(drawn))
