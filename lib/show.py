"""sample.py's command line: its flags, the prompts it reads, and what it shows of a decode."""

import argparse
import json
import os
import shutil
import sys
import time
from argparse import Namespace
from pathlib import Path

from cache import Output, in_full
from checkpoint import DTYPES
from lib.data import exists
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, fail
from model import Config, Model

MASK = "▒"
END = "∎"


# --- what is asked for
def build_parser(doc: str, modes: dict[str, dict]) -> Parser:
    parser = Parser(doc)
    probability = bounded(float, -1, 1)
    some = bounded(int, 0)

    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--ckpt", default="out/names", help="checkpoint folder of train.py or convert_weights.py")
    add("--adapter", help="folder that train.py --init_from DIR, or a script of beyond/, wrote")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], help="text; repeat the flag for several rows")
    add("--prompts_file", help="a text file, one prompt a line; blank lines are skipped")
    add("--prompt_ids", type=token_ids, action="append", default=[], help="token ids, 1,2,3; repeat for several rows")

    add = parser.add_argument_group("decoding").add_argument
    add("--mode", choices=modes, default="q", help="tau_m2t and tau_t2t: q 0.7, 0.5 (see there); s 0.5, 0")
    add("--gen_length", type=bounded(int, 1), default=256, help="tokens; the last block is decoded whole")
    add("--n_rounds", type=some,
        help="K; 0: Stage B off, the released decoder (default: as trained; 0 where no marker was trained)")
    add("--tau_m2t", type=probability,
        help="fill above this probability, or this product from the left (-1: every mask at once)")
    add("--tau_t2t", type=bounded(float, 0, 1, none=True), default=argparse.SUPPRESS,
        help='edit above this; 0: on any disagreement; "none": never (default: the mode\'s where Stage B is off, 0 '
             "where it is on, as in the paper; none for a model that is written from the left)")
    add("--max_post_steps", type=some, default=16, help="forwards after the last mask, at most")
    add("--run_on", dest="eos_early_stop", action="store_false", help="decode --gen_length past eos, too")
    add("--temperature", type=temperature, default=0.0, help="0: argmax; else at least 0.001")
    add("--top_k", type=some, default=0, help="with temperature: the k best tokens (0: all)")
    add("--top_p", type=bounded(float, 1e-6, 1), default=1.0, help="with temperature: so much mass (1: all)")
    add("--seed", type=int, default=0, help="any whole number, of any size: it is hashed")

    add = parser.add_argument_group("output").add_argument
    add("--watch", action="store_true", help=f"show every step; on a terminal in place ({MASK} a mask, {END} the end)")
    add("--json", action="store_true", help="one JSON object a prompt; tools/trace_page makes a page of it")
    # fmt: on
    return parser


def token_ids(text: str) -> list[int]:
    return [int(i) for i in text.split(",")]


def temperature(text: str) -> float:
    """0, or warm enough that logits divided by it stay finite."""
    value = bounded(float, 0)(text)
    if 0 < value < 1e-3:
        raise argparse.ArgumentTypeError(f"{text} is as good as 0, which is greedy: give 0, or at least 0.001")
    return value


def read_prompts(args: Namespace, tokenizer: Tokenizer | None, cfg: Config, of_names: bool) -> list[list[int]]:
    """Every prompt as ids, each checked to fit the model."""
    texts = args.prompt + read_lines(args.prompts_file)
    if texts and tokenizer is None:
        fail("this checkpoint has no tokenizer (a toy's tokens are numbers): use --prompt_ids")
    prompts = []
    for text in texts:
        if of_names:  # in names a blank belongs to the word after it
            text = text.rstrip()
        prompts.append(tokenizer.encode(text))
    prompts += args.prompt_ids

    if not prompts:
        fail("nothing to continue: give --prompt TEXT, --prompts_file FILE or --prompt_ids 1,2,3")
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, number, args.gen_length, cfg)
    return prompts


def read_lines(path: str | None) -> list[str]:
    """The lines of a text file that are not blank."""
    if path is None:
        return []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as e:  # a ValueError: not UTF-8, or a path with a NUL byte
        fail(f"--prompts_file {path!r} cannot be read as text: {e}")
    prompts = [line for line in lines if line.strip()]
    if len(prompts) < len(lines):
        print(f"note: {len(lines) - len(prompts)} blank lines of {path} were skipped", file=sys.stderr)
    return prompts


def check_prompt(prompt: list[int], number: int, gen_length: int, cfg: Config) -> None:
    if not prompt:
        fail(f"prompt {number} is empty: the model continues a text, give it at least one token")
    if not all(0 <= i < cfg.vocab_size for i in prompt):
        fail(f"prompt {number} has ids outside 0..{cfg.vocab_size - 1}, the model's vocabulary")
    # the last block is decoded whole
    blocks = -(-(len(prompt) + gen_length) // cfg.block_length)
    need = blocks * cfg.block_length
    if need > cfg.max_len:
        fail(
            f"prompt {number} of {len(prompt)} tokens and --gen_length {gen_length} need {need} positions, the model "
            f"has {cfg.max_len}: shorten one of them"
        )


# --- what is shown
class Stream:
    """Prints a text as its blocks finish, never half a character."""

    def __init__(self, prompt: list[int], tokenizer: Tokenizer | None):
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.shown = ""

    def show(self, row: int, output: Output) -> None:
        text = self.tokenizer.decode(self.prompt + output.tokens).rstrip("\ufffd")
        print(text[len(self.shown) :], end="", flush=True)
        self.shown = text

    def rest(self, record: dict) -> str:
        """The text of a row, or what of it has not been printed yet."""
        if self.tokenizer is None:
            return str(record["tokens"])
        return self.tokenizer.decode(record["prompt"] + record["tokens"])[len(self.shown) :]


def make_record(
    prompt: list[int], output: Output, model: Model, n_rounds: int, tokenizer: Tokenizer | None, judged: bool
) -> dict:
    """Everything about one row in plain values: --json prints it, the displays below and
    tools/trace_page show it.
    """
    cfg = model.cfg
    text = None  # a toy's tokens are numbers
    judgement = None
    if tokenizer:
        text = tokenizer.decode(output.tokens)
    if judged:
        judgement = verdict(tokenizer.decode(prompt + output.tokens))
    nfe = output.nfe | {"all": in_full(output.nfe, model.partial_cost), "passes": output.passes}
    return dict(
        text=text, tokens=output.tokens, steps=output.steps, verdict=judgement,
        nfe=nfe, nfe_per_token=nfe["full"] / max(1, len(output.tokens)), partial_cost=model.partial_cost,
        prompt=prompt, mask_id=cfg.mask_id, n_rounds=n_rounds, pieces=pieces(prompt, output, cfg, tokenizer),
    )  # fmt: skip


def pieces(prompt: list[int], output: Output, cfg: Config, tokenizer: Tokenizer | None) -> dict[str, str]:
    """The text of every id that occurs in a record."""
    ids = set(prompt)
    for s in output.steps:
        ids.update(s["after"])
        ids.update(f["token_a"] for f in s["fill"])
        ids.update(f["token"] for f in s.get("refused", []))
    names = {str(i): str(i) for i in sorted(ids)}
    if tokenizer:
        names = {str(i): tokenizer.piece(i) for i in sorted(ids)}
    return names | {str(cfg.eos_id): END, str(cfg.mask_id): MASK}


def show(record: dict, output: Output, stream: Stream, args: Namespace) -> None:
    """One row: its steps if they are asked for, its text, what it cost."""
    if output.warning:
        print(f"warning: {output.warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(record))
        return
    if args.watch and sys.stdout.isatty():
        play(record)
    elif args.watch:
        show_steps(record)

    ending = ""
    if record["verdict"]:
        ending = "   " + record["verdict"]
    print(stream.rest(record) + ending)
    print(cost(record))


def cost(record: dict) -> str:
    """What a decode cost, in one line; the README's glossary has the words."""
    nfe = record["nfe"]
    n = len(record["tokens"])
    return (
        f"[{n} tokens; forwards: {nfe['full']} full + {nfe['partial']:g} partial x {record['partial_cost']:.3g} + "
        f"{nfe['commit']} commit = {nfe['all']:.3g}, {nfe['all'] / max(1, n):.3f} per token]"
    )


def verdict(name: str) -> str:
    """Of a model of names: the character, or that there is none."""
    char = exists(name)
    if char:
        return f"{char} (U+{ord(char):04X})"
    if not name.isupper():
        return "(no such character; names are in upper case)"
    return "(no such character)"


def show_steps(record: dict) -> None:
    """One line a step for the block, and one for each token written: Stage A's choice where Stage
    B's differs.
    """
    name = record["pieces"]
    gap = " " if record["text"] is None else ""  # a toy's tokens are numbers
    for n, s in enumerate(record["steps"], 1):
        print(f"step {n:3} block {s['start']}: {gap.join(name[str(i)] for i in s['before'])}")
        for f in s["fill"]:
            other = ""
            if f["token_a"] != f["token"]:
                other = f"   (A: {name[str(f['token_a'])]} {f['conf_a']:.2f})"
            print(f"    fill {f['at']:5} {name[str(f['token'])]!r} {f['conf']:.2f}{other}")
        for f in s.get("refused", []):
            print(f"    keep {f['at']:5} masked: {name[str(f['token'])]!r} has only {f['conf']:.2f}")
        for e in s["edit"]:
            print(f"    edit {e['at']:5} {name[str(e['old'])]!r} -> {name[str(e['token'])]!r} {e['conf']:.2f}")
        print(f"    left {s['after'].count(record['mask_id'])} masked")


def play(record: dict) -> None:
    """The steps on a terminal: each block fills in place, on one line cut at the width."""
    width = shutil.get_terminal_size().columns
    last_start = None
    for n, s in enumerate(record["steps"], 1):
        if n > 1 and s["start"] != last_start:
            print()
        last_start = s["start"]
        for state in ("before", "after"):
            drawn = draw_block(record, s, s[state], f"step {n:3}  ", after=state == "after")
            # [?7l: never wrap
            print("\r\x1b[K\x1b[?7l" + "".join(drawn[:width]) + "\x1b[?7h", end="", flush=True)
            time.sleep(0.25)
    print()


def draw_block(record: dict, s: dict, ids: list[int], head: str, after: bool) -> list[str]:
    """A block as characters, each with its style.

    What the step writes is inverse. After it, Stage A's choice is struck out beside a token where
    another was written, and beside a mask that was refused. NO_COLOR leaves the styles out.
    """
    inverse = "\x1b[7m"
    struck = "\x1b[9m"
    off = "\x1b[0m"
    if os.environ.get("NO_COLOR"):
        inverse = struck = off = ""
    gap = " " if record["text"] is None else ""
    name = {int(i): piece.replace("·", " ") + gap for i, piece in record["pieces"].items()}

    # what Stage A, or the head that refused it, wanted at each position that the step looked at
    wish = {}
    for f in s["fill"] + s["edit"] + s.get("refused", []):
        wish[f["at"]] = f.get("token_a", f["token"])

    drawn = list(head)
    for at, i in enumerate(ids, s["start"]):
        if at not in wish:
            drawn += name[i]
            continue
        drawn += [inverse + c + off for c in name[i]]
        if after and wish[at] != i:
            drawn += [struck + c + off for c in f"(A:{name[wish[at]]})"]
    return drawn
