"""Run systems over all settings that their users could choose, and write down what comes of it.

A system is a name and the folders of its seeds of training. A model of names completes the same held-out and trained
beginnings (evaluate.py says how); any other fills the same spans of held-out text (spans.py says which). There the
first system is the base, whose seeds judge those of the others.

    a Stage A             every rule of opponents.py, at each value of its dial
    a head                all masks are looked at, and tau_keep is the dial; or it is off, for the rule that goes with
                          the model's order, with a careful dial
    Stage B               at every tau_m2t, or at all masks with the dial tau_keep; and with Stage B off, a system of
                          its own: "NAME, off"
    a left-to-right model (block_length 1)     one token after the other

The rules are greedy. With a temperature tau_m2t, in the model's own order, takes their place.

A record is a JSON object a line: the setting, what each prompt's completions are worth, and costs of all of them
together (`price` below). --out keeps what it holds: nothing is measured twice.

    python -m beyond.sweep --system base out/base-0 out/base-1 --system head out/head-0 out/head-1 --out r.jsonl
    python -m beyond.report r.jsonl --against head
"""

import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import evaluate
from beyond import opponents
from beyond.report import read_records
from beyond.spans import Spans
from checkpoint import load_model, load_tokenizer, names_of
from lib.data import exists
from lib.output import Output, in_full
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, command, fail, pick_device, replace_file
from model import Model
from sample import Decoding, generate

# R prompts

GATES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01, -1.0)  # Stage B's tau_m2t
SAMPLED = (1.0, 0.9, 0.5, 0.2, 0.05, 0.005, -1.0)  # tau_m2t with a temperature
KEEP = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
CAREFUL = 0.5  # dials of a head that is off, from here to 1


# --- what a system is decoded by
@dataclass(frozen=True)
class Setting:
    label: str
    decoding: Decoding
    off: bool = False  # Stage B is off: a system of its own


def settings(model: Model, start: Decoding) -> Iterator[Setting]:
    """By what the model is. start: Stage A alone, at some temperature."""
    taus = GATES if start.temperature == 0 else SAMPLED
    if model.cfg.block_length == 1:
        yield Setting("left to right", replace(start, tau_m2t=1.0))
    elif model.second_look is not None:
        yield from head_settings(model, start)
    elif model.markers.any():
        for off in (False, True):
            for tau in taus:
                n_rounds = 0 if off else model.cfg.n_rounds
                yield Setting(f"tau_m2t {tau:g}", replace(start, tau_m2t=tau, n_rounds=n_rounds), off)
        for keep in KEEP[1:]:
            at_all = replace(start, tau_m2t=-1.0, n_rounds=model.cfg.n_rounds)
            yield Setting(f"tau_keep {keep:g}", replace(at_all, tau_keep=keep, look=opponents.refusing))
    elif start.temperature > 0:
        for tau in taus:
            yield Setting(f"tau_m2t {tau:g}", replace(start, tau_m2t=tau))
    else:
        yield from rule_settings(model, start)


def rule_settings(model: Model, start: Decoding) -> Iterator[Setting]:
    """Every rule at each value of its dial."""
    dials = list(opponents.DIALS.items())
    if model.cfg.block_length > 8:
        dials += opponents.MORE_DIALS.items()
    for name, of_rule in dials:
        for dial in of_rule:
            yield Setting(f"{name} {dial:g}", replace(start, select=opponents.rule(name, dial)))

    # T2M judges once more after the last mask, as edits do: a gate of 1, which nothing passes
    for dial in opponents.T2M_DIALS:
        judging = replace(start, select=opponents.rule("threshold", dial), look=opponents.t2m(), tau_t2t=1.0)
        yield Setting(f"t2m {dial:g}", judging)
    yield Setting("s2d2", replace(start, tau_m2t=-1.0, look=opponents.s2d2))


def head_settings(model: Model, start: Decoding) -> Iterator[Setting]:
    """On, and off as its user may have it."""
    on = replace(start, n_rounds=1, tau_m2t=-1.0)
    for keep in KEEP:
        yield Setting(f"tau_keep {keep:g}", replace(on, tau_keep=keep))
    if start.temperature > 0:
        for tau in SAMPLED:
            if tau >= CAREFUL:
                yield Setting(f"off, tau_m2t {tau:g}", replace(start, tau_m2t=tau))
        return

    rule = "threshold" if model.cfg.order == "surest" else "longest_prefix"
    for dial in opponents.DIALS[rule]:
        if dial >= CAREFUL:
            yield Setting(f"off, {rule} {dial:g}", replace(start, select=opponents.rule(rule, dial)))


# --- what it costs
def price(model: Model, d: Decoding, outputs: list[Output]) -> dict:
    """What these outputs cost together: `all` in full forwards, of which a commit is one and a partial one
    model.partial_cost of one; and the counts of forwards, for a list of prices."""
    counts = {kind: sum(o.nfe[kind] for o in outputs) for kind in ("full", "partial", "commit", "looks")}

    # left to right, the pass that reads a position's mask reads the token before it, too
    if model.cfg.block_length == 1:
        counts["commit"] = 0
    cost = {"all": in_full(counts, model.partial_cost)}
    return {"n_layer": model.cfg.n_layer, "counts": counts, "second": second_look(model, d), "cost": cost}


def second_look(model: Model, d: Decoding) -> str:
    """What looks again: a price of prices.json. T2M reads nothing again."""
    if d.look is opponents.s2d2:
        return "s2d2"
    if d.n_rounds == 0:
        return ""
    return "stage_b" if model.second_look is None else "head"


# --- what it is asked for
def numbered(prompts: list[list[int]]) -> list[int]:
    """Each prompt's beginning, (R,): equal prompts have one, numbered in the order in which they appear."""
    seen: dict[tuple, int] = {}
    return [seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts]


class Names:
    """Names to complete, held out and trained ones; equal beginnings are one cluster."""

    start = evaluate.NAMES

    def __init__(self, tokenizer: Tokenizer, n: int):
        groups = {group: evaluate.draw_names(n, group, tokenizer) for group in ("held out", "trained")}
        self.tokenizer = tokenizer
        self.names = [name for drawn in groups.values() for name in drawn]
        self.prompts = [ids for drawn in groups.values() for ids in drawn.values()]
        beginning = iter(numbered(self.prompts))
        self.clusters = {group: [next(beginning) for _ in drawn] for group, drawn in groups.items()}

    def per(self, outputs: list[Output]) -> dict[str, int]:
        """What a cost may be of, and how many of it there are."""
        return {"token": sum(len(o.tokens) for o in outputs), "name": len(outputs)}

    def figures(self, outputs: list[Output], base: Model) -> dict:
        """outputs: draw after draw. "found" has a digit (base 36) for each prompt: how many of its completions exist;
        no base is asked."""
        R = len(self.prompts)
        draws = len(outputs) // R
        written = [self.tokenizer.decode(o.prompt + o.tokens) for o in outputs]
        r = {"draws": draws} | evaluate.judge(self.names * draws, written)
        del r["low"], r["high"]  # Wilson's interval, of independent completions: these are not

        # written[p::R] are the completions of prompt p
        r["found"] = ""
        for p in range(R):
            n_exist = sum(exists(text) is not None for text in written[p::R])
            r["found"] += np.base_repr(n_exist, 36)
        if draws > 1:
            r["entropy"] = sum(entropy(written[p::R]) for p in range(R)) / R
        return r


def entropy(texts: list[str]) -> float:
    """Of the distribution of these texts, nats: the plug-in estimate."""
    n = len(texts)
    return sum(times / n * math.log(n / times) for times in Counter(texts).values())


# --- records
def complete(model: Model, prompts: list[list[int]], d: Decoding, draws: range) -> list[Output]:
    """len(draws) * R, draw after draw. Greedy completions of equal prompts are equal, and are decoded once."""
    at = list(range(len(prompts)))  # which row of the decode is whose
    if d.temperature == 0:
        at = numbered(prompts)
    rows = dict(zip(at, prompts, strict=True))

    outputs = []
    for seed in draws:
        decoded = generate(model, list(rows.values()), d, seed)
        outputs += [decoded[i] for i in at]
    return outputs


def measure(model: Model, task: Names | Spans, base: Model, args: Namespace) -> Iterator[tuple[Setting, dict]]:
    """Every setting, and what its record says of it."""
    starts = []
    for temperature in args.temperature:
        for top_p in args.top_p if temperature > 0 else [1.0]:
            starts.append(replace(task.start, temperature=temperature, top_p=top_p))
    every = [s for start in starts for s in settings(model, start)]
    for s in tqdm(every, leave=False, disable=None):
        d = s.decoding
        draws = range(args.seed, args.seed + (args.draws if d.temperature > 0 else 1))
        outputs = complete(model, task.prompts, d, draws)
        record = {"setting": s.label, "temperature": d.temperature, "top_p": d.top_p, "per": task.per(outputs)}
        yield s, record | price(model, d, outputs) | task.figures(outputs, base)


def ask(folder: str, model: Model, args: Namespace) -> Names | Spans:
    """What a model is asked for: names if it is one of names, else spans of text."""
    tokenizer = load_tokenizer(Path(folder), model.cfg.tokenizer)
    if names_of(Path(folder)) is not None:
        return Names(tokenizer, args.prompts)
    if any(args.temperature):
        fail(f"{folder} fills spans, and each has one filling that is judged: greedily, without --temperature")
    return Spans(args.data, args.prompts, tokenizer, model.cfg)


@torch.inference_mode()
def sweep(args: Namespace, clusters: dict, records: list[dict]) -> None:
    """Measure what the records lack, and save them after each model: nothing is lost."""
    known = {(r["system"].removesuffix(", off"), r["ckpt"]) for r in records}
    device = pick_device(args.device)
    bases = args.system[0][1:]
    for name, *folders in args.system:
        if len(folders) != len(bases):
            fail(f"--system {name} has {len(folders)} seeds, the base {len(bases)}: give as many of all")
        for folder, of_base in zip(folders, bases, strict=True):
            if (name, folder) in known:
                continue
            model = load_model(folder, device, torch.float32)
            task = ask(folder, model, args)
            if clusters and task.clusters != clusters:
                fail(f"{folder} would be asked for other texts than the records before it: see --prompts and --data")
            clusters = task.clusters

            # each seed of a system is judged by that seed of the base
            base = load_model(of_base, device, torch.float32)
            for s, record in measure(model, task, base, args):
                own = {"system": name + ", off" if s.off else name, "ckpt": folder}
                records.append(own | record)
            lines = [json.dumps(line) + "\n" for line in [{"clusters": clusters}, *records]]
            replace_file(args.out, lambda path, lines=lines: path.write_text("".join(lines)))


@command
def main() -> None:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument_group("what is run").add_argument
    add("--system", nargs="+", action="append", metavar=("NAME", "CKPT"), required=True,
        help="a name and the folders of its seeds; again for another one, of all in one order, the base first")
    add("--out", type=Path, required=True, help="file for the records, a JSON object a line")
    add("--prompts", type=bounded(int, 2), default=512, help="names held out, and as many trained; or spans of text")
    add("--data", nargs="+", default=["stdlib"], help="text: stdlib, or .txt / folder / .jsonl[.gz] / .parquet")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", nargs="+", type=bounded(float, 0), default=[0.0], help="several; 0: greedy")
    add("--top_p", nargs="+", type=bounded(float, 1e-6, 1), default=[1.0], help="with a temperature")
    add("--draws", type=bounded(int, 1, 35), default=1, help="completions of a prompt, if not greedy")
    add("--seed", type=int, default=0, help="of the first draw; the next ones take the numbers after it")
    # fmt: on
    args = parser.parse_args()
    clusters, records = {}, []
    if args.out.exists():
        clusters, records = read_records([args.out])
    sweep(args, clusters, records)


if __name__ == "__main__":
    main()
