"""Run systems over all settings that their users could choose, and write down what comes of it.

A system is a name and the folders of its seeds of training. A model of names completes the same held-out and trained
beginnings (evaluate.py says how); any other fills the same spans of held-out Python (spans.py says which). There the
first system is the base, whose seeds judge those of the others.

    a Stage A             every rule of opponents.py, at each value of its dial
    a head                all masks are looked at, and tau_keep is the dial; or it is off, for the rule that goes with
                          the model's order, with a careful dial
    Stage B               at every tau_m2t, or at all masks with the dial tau_keep
    a left-to-right model (block_length 1)     one token after the other

That is greedy. With a temperature a Stage A is decoded at every tau_m2t, in the model's own order.

A record is a JSON object a line: the setting, what each prompt's completions are worth, and costs of all of them
together (`price` below). --out keeps what it holds: nothing is measured twice.

    python -m beyond.sweep --system base out/base-0 out/base-1 --system head out/head-0 out/head-1 --out r.jsonl
    python -m beyond.report r.jsonl --against head
"""

import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import evaluate
from beyond import opponents, report
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
def settings(model: Model, start: Decoding) -> dict[str, Decoding]:
    """Every setting of a model, by what it is. start: Stage A alone, at some temperature."""
    if model.cfg.block_length == 1:
        return {"left to right": replace(start, tau_m2t=1.0)}
    if model.second_look is not None:
        return head_settings(model, start)
    if model.markers.any():
        return stage_b_settings(model, start)
    if start.temperature > 0:
        return {f"tau_m2t {tau:g}": replace(start, tau_m2t=tau) for tau in SAMPLED}

    # every rule at each value of its dial
    found = {}
    for rule, dials in opponents.DIALS.items():
        if model.cfg.block_length > 8:
            dials += opponents.MORE_DIALS.get(rule, ())
        found |= by_rule(rule, dials, start)
    return found


def by_rule(rule: Callable, dials: tuple, start: Decoding) -> dict[str, Decoding]:
    """A setting for each value of a rule's dial."""
    return {f"{rule.__name__} {dial:g}": replace(start, select=partial(rule, dial=dial)) for dial in dials}


def stage_b_settings(model: Model, start: Decoding) -> dict[str, Decoding]:
    """At every gate, or at all masks with what is not sure refused; and off, where Stage A is the base's own."""
    on = replace(start, n_rounds=model.cfg.n_rounds)
    refusing = replace(on, tau_m2t=-1.0, look=opponents.refusing)
    found = {f"tau_m2t {tau:g}": replace(on, tau_m2t=tau) for tau in GATES}
    found |= {f"tau_keep {keep:g}": replace(refusing, tau_keep=keep) for keep in KEEP[1:]}
    if model.lora_in_stage_b_alone:
        found |= off_settings(model, start)
    return found


def head_settings(model: Model, start: Decoding) -> dict[str, Decoding]:
    """On, and off as its user may have it."""
    on = replace(start, n_rounds=1, tau_m2t=-1.0)
    return {f"tau_keep {keep:g}": replace(on, tau_keep=keep) for keep in KEEP} | off_settings(model, start)


def off_settings(model: Model, start: Decoding) -> dict[str, Decoding]:
    """The base with care, greedily."""
    if start.temperature > 0:
        return {}
    rule = opponents.threshold if model.cfg.order == "surest" else opponents.longest_prefix
    careful = tuple(dial for dial in opponents.DIALS[rule] if dial >= CAREFUL)
    return {f"off, {label}": d for label, d in by_rule(rule, careful, start).items()}


# --- what it costs
def price(model: Model, d: Decoding, outputs: list[Output]) -> dict:
    """What these outputs cost together: `all` in full forwards, of which a commit is one and a partial one
    model.partial_cost of one; and the counts of forwards, for a list of prices."""
    counts = {kind: sum(o.nfe[kind] for o in outputs) for kind in ("full", "partial", "commit", "looks")}

    # left to right, the pass that reads a position's mask reads the token before it, too
    if model.cfg.block_length == 1:
        counts["commit"] = 0

    # what looks again: a price of prices.json
    second = "stage_b" if model.second_look is None else "head"
    if d.n_rounds == 0:
        second = ""
    cost = {"all": in_full(counts, model.partial_cost)}
    return {"n_layer": model.cfg.n_layer, "counts": counts, "second": second, "cost": cost}


# --- what it is asked for
class Names:
    """Names to complete, held out and trained ones; equal beginnings are one cluster."""

    start = evaluate.NAMES

    def __init__(self, tokenizer: Tokenizer, n: int):
        self.tokenizer = tokenizer
        self.names = []
        self.prompts = []
        self.clusters = {}
        numbers: dict[tuple, int] = {}  # of beginnings, in the order in which they appear
        for group in ("held out", "trained"):
            drawn = evaluate.draw_names(n, group, tokenizer)
            self.names += drawn
            self.prompts += drawn.values()
            self.clusters[group] = [numbers.setdefault(tuple(ids), len(numbers)) for ids in drawn.values()]

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
def measure(model: Model, task: Names | Spans, base: Model, args: Namespace) -> Iterator[dict]:
    """A record of each setting."""
    start = replace(task.start, temperature=args.temperature, top_p=args.top_p)
    draws = args.draws if args.temperature > 0 else 1
    for label, d in tqdm(settings(model, start).items(), leave=False, disable=None):
        outputs = []
        for seed in range(draws):
            outputs += generate(model, task.prompts, d, seed)
        record = {"setting": label, "temperature": d.temperature, "top_p": d.top_p, "per": task.per(outputs)}
        yield record | price(model, d, outputs) | task.figures(outputs, base)


def ask(folder: str, model: Model, args: Namespace) -> Names | Spans:
    """What a model is asked for: names if it is one of names, else spans of text."""
    tokenizer = load_tokenizer(Path(folder), model.cfg.tokenizer)
    if names_of(Path(folder)) is not None:
        return Names(tokenizer, args.prompts)
    if args.temperature > 0:
        fail(f"{folder} fills spans, and each has one filling that is judged: greedily, without --temperature")
    return Spans(args.data, args.prompts, tokenizer, model.cfg)


@torch.inference_mode()
def sweep(args: Namespace, clusters: dict, records: list[dict]) -> None:
    """Measure what the records lack, and save them after each model: nothing is lost."""
    known = {(r["system"], r["ckpt"]) for r in records}
    device = pick_device(args.device)
    bases = args.system[0][1:]

    # before hours of work
    for name, *folders in args.system:
        if len(folders) != len(bases):
            fail(f"--system {name} has {len(folders)} seeds, the base {len(bases)}: give as many of all")

    for name, *folders in args.system:
        for folder, of_base in zip(folders, bases, strict=True):
            if (name, folder) in known:
                continue
            known.add((name, folder))
            model = load_model(folder, device, torch.float32)
            task = ask(folder, model, args)
            if clusters and task.clusters != clusters:
                fail(f"{folder} would be asked for other texts than the records before it: see --prompts and --data")
            clusters = task.clusters

            # each seed of a system is judged by that seed of the base
            base = load_model(of_base, device, torch.float32)
            for record in measure(model, task, base, args):
                records.append({"system": name, "ckpt": folder} | record)
            text = "".join(json.dumps(line) + "\n" for line in [{"clusters": clusters}, *records])
            replace_file(args.out, lambda path, text=text: path.write_text(text))


@command
def main() -> None:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument_group("what is run").add_argument
    add("--system", nargs="+", action="append", metavar=("NAME", "CKPT"), required=True,
        help="a name and the folders of its seeds; again for another one, of all in one order, the base first")
    add("--out", type=Path, required=True, help="file for the records, a JSON object a line")
    add("--prompts", type=bounded(int, 2), default=512, help="names held out, and as many trained; or spans of text")
    add("--data", nargs="+", default=["stdlib"], help="text: stdlib, or a folder of Python files")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=bounded(float, 0), default=0.0, help="0: greedy")
    add("--top_p", type=bounded(float, 1e-6, 1), default=1.0, help="with a temperature")
    add("--draws", type=bounded(int, 1, 35), default=1, help="completions of a prompt, if not greedy")
    # fmt: on
    args = parser.parse_args()
    clusters, records = {}, []
    if args.out.exists():
        clusters, records = report.load(args.out)
        if records[0]["temperature"] != args.temperature:
            fail(f"{args.out} was measured at another --temperature: choose another --out")
    sweep(args, clusters, records)


if __name__ == "__main__":
    main()
