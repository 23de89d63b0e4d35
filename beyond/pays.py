"""Does a second look pay? Existing names against everything that a decoder runs, for any systems, over their seeds.

A system is a name, a checkpoint, perhaps an adapter; systems of one name are its seeds, and are pooled. Each decodes
the same held-out and trained prompts (evaluate.py says how) at every tau_m2t, a joint head at every tau_keep, and a
sampling head at several `looks`, too.

    exist     share of the completions that are names, held-out and trained prompts together
    distinct  different existing names, and `repeated`, completions that another one equals: shares of one seed's
    entropy   of the draws of one prompt, nats, mean over prompts; plug-in, so at most ln(draws)
    full      Stage A's forwards a token
    all       everything, in full forwards: a partial one is model.partial_cost times the share of the block it ran at
    serial    forwards one after the other, a partial one like a full one: what latency pays where weights are the cost

All three in forwards of the first system: one of more layers is charged its n_layer over the first's for each.

Intervals: 95 %, 1,000 resamples of the different beginnings, each with all of its completions (equal prompts of both
groups, seeds, draws), the same for all systems. What other seeds of training would give is not in them.

The tables of budgets are what a user gets who may not pay more: the setting that is best on one half of the beginnings,
judged on the other, and the reverse, anew in every resample, so that no choice flatters. With --against NAME, the
differences of these shares, paired.

    python -m beyond.pays --system base out/base --system head out/base out/joint --against head --out pays.jsonl
"""

import gzip
import json
import math
from argparse import Namespace
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import evaluate
import sample
from beyond.spans import interval, means, resamples, within
from cache import Cached, Output
from checkpoint import load_model, load_tokenizer
from data import Parser, bounded, exists, fail, pick_device, replace_file
from evaluate import print_table
from model import Model
from sample import MODES, Decoding, generate
from tokenizer import Tokenizer

# P prompts, W resamples

TAUS = {1.0: "one at a time", 0.4: "0.4", 0.3: "0.3", 0.2: "0.2", 0.15: "0.15", 0.1: "0.1", -1.0: "all at once"}
FINER = (0.12, 0.14, 0.17, 0.22, 0.25, 0.28)  # for whom has no tau_keep
KEEP = (0.0, 0.3, 0.5, 0.7)
LOOKS = (1, 2, 8)  # of sampling_head.py
BUDGETS = (0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.5, 2.0)
COUNTED = ("full/token", "all/token", "serial/token")
VARIETY = ("distinct", "repeated", "entropy")
EDIT_TAUS = (0.3, 0.2, 0.1, -1.0)
EDIT_GATES = (0.0, 0.5)
PER_RECORD = {"low", "high"}  # Wilson's interval, of independent completions: these are not

Jobs = dict[str, tuple[dict, Decoding]]  # label -> attributes of the model, and how it decodes


# --- what a system is decoded by
def settings(model: Model, n_rounds: int, args: Namespace) -> Jobs:
    """Everything that a system is decoded by. The released settings have edits."""
    start = Decoding(gen_length=32, tau_t2t=None, n_rounds=n_rounds)

    # a head has a knob that others lack
    knob = "tau_keep"
    values = args.keep
    if hasattr(model, "looks"):
        knob = "looks"
        values = LOOKS
    has_knob = hasattr(model, knob)

    # the gates
    if args.edits:
        gates = gates_with_edits(start)
    elif args.taus:
        gates = gates_of(start, args.taus)
    elif has_knob:
        gates = gates_of(start, [*TAUS])
    else:
        gates = gates_of(start, [*TAUS, *FINER])

    # each of them with each value of the knob; one at a time there is nothing to look at again
    jobs = {label: ({}, d) for label, d in gates.items()}
    if has_knob:
        jobs = {}
        for value in values:
            for label, d in gates.items():
                if d.tau_m2t < 1:
                    jobs[f"{label}, {knob} {value}"] = ({knob: value}, d)
    return with_temperatures(jobs, args)


def gates_of(start: Decoding, taus: list[float]) -> dict[str, Decoding]:
    return {f"tau_m2t {TAUS.get(tau, tau)}": replace(start, tau_m2t=tau) for tau in taus}


def gates_with_edits(start: Decoding) -> dict[str, Decoding]:
    gates = {f"released {mode.upper()}": replace(start, **gate) for mode, gate in MODES.items()}
    for tau in EDIT_TAUS:
        for edits in EDIT_GATES:
            gates[f"tau_m2t {tau}, edits {edits}"] = replace(start, tau_m2t=tau, tau_t2t=edits)
    return gates


def with_temperatures(jobs: Jobs, args: Namespace) -> Jobs:
    """Each of them at every temperature, and with a temperature at every top_p."""
    drawn = {}
    for temperature in args.temperature:
        for top_p in args.top_p if temperature else [1.0]:
            for label, (attributes, d) in jobs.items():
                if temperature > 0:
                    label += f", T {temperature:g}"
                if top_p < 1:
                    label += f", top_p {top_p:g}"
                drawn[label] = (attributes, replace(d, temperature=temperature, top_p=top_p))
    return drawn


# --- how often it looked again
class Followed(Cached):
    """An engine that knows which rows of its decode are still in flight."""

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.numbers = [self.numbers[r] for r in rows]


def counting(model: Model, looks: Counter) -> None:
    """Let the model's step add to looks[i] how often Stage B or a head ran for row i of a decode."""
    plain = sample.step_of(model)

    def step(engine, z, prompt, any_masked, u, d):
        # an engine begins with all rows in flight
        if type(engine) is Cached:
            engine.__class__ = Followed
            engine.numbers = list(range(len(z)))
        s = plain(engine, z, prompt, any_masked, u, d)

        # a head says where it ran, or how often; Stage B runs where there is a bundle
        if "looks" in s:
            ran = s["looks"]
        elif "partial" in s:
            ran = (s["partial"] > 0) * max(1, d.n_rounds)
        else:
            ran = s["bundle"].any(-1) * d.n_rounds
        looks.update(dict(zip(engine.numbers, ran.tolist(), strict=True)))
        return s

    model.step = step


# --- completions
def numbered(prompts: list[list[int]]) -> list[int]:
    """Each prompt's cluster, (P,): prompts of equal ids are one, numbered in the order in which they appear."""
    seen = {}
    return [seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts]


def complete(
    model: Model, prompts: list[list[int]], d: Decoding, seeds: range, looks: Counter
) -> tuple[list[Output], list[int]]:
    """-> outputs and second looks, (len(seeds) * P) each, seed after seed.

    Greedy completions of equal prompts are equal, and are decoded once.
    """
    at = list(range(len(prompts)))  # which row of the decode is whose
    if d.temperature == 0:
        at = numbered(prompts)
    rows = dict(zip(at, prompts, strict=True))

    outputs = []
    ran = []
    for seed in seeds:
        looks.clear()
        decoded = generate(model, list(rows.values()), d, seed)
        outputs += [decoded[i] for i in at]
        ran += [looks[i] for i in at]
    return outputs, ran


def entropy(texts: list[str]) -> float:
    """Of the distribution of these texts, nats: the plug-in estimate."""
    n = len(texts)
    return sum(times / n * math.log(n / times) for times in Counter(texts).values())


def describe(model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], outputs: list, ran: list[int]) -> dict:
    """What a record holds of one decode, draw after draw; prompts: name -> ids. "found" has a digit (base 36) for each
    prompt: how many of its completions exist."""
    P = len(prompts)
    draws = len(outputs) // P
    every_prompt = [*prompts.values()] * draws
    written = [tokenizer.decode(p + o.tokens) for p, o in zip(every_prompt, outputs, strict=True)]

    # the judge's figures, but for those of a name and for its interval
    judged = evaluate.judge(list(prompts) * draws, written, outputs, model.partial_cost)
    r = {"draws": draws, "n_layer": model.cfg.n_layer}
    r |= {k: v for k, v in judged.items() if k not in PER_RECORD and not k.endswith("/name")}

    # forwards one after the other: every look is one
    tokens = sum(len(o.tokens) for o in outputs)
    in_turn = sum(o.nfe["full"] + o.nfe["commit"] for o in outputs) + sum(ran)
    r["serial/token"] = in_turn / tokens

    # written[p::P] are the completions of prompt p
    r["found"] = ""
    for p in range(P):
        n_exist = sum(exists(text) is not None for text in written[p::P])
        r["found"] += np.base_repr(n_exist, 36)
    if draws > 1:
        r["entropy"] = sum(entropy(written[p::P]) for p in range(P)) / P
    return r


# --- records
def measure(name: str, ckpt: str, adapter: str | None, known: dict, args: Namespace) -> tuple[dict, list[dict]]:
    """The prompts' clusters by group (the known ones, if any are), and a record for each setting."""
    model = load_model(ckpt, pick_device("cpu"), torch.float32, adapter)
    tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
    if tokenizer is None or not (Path(ckpt) / "names.json").exists():
        fail(f"{ckpt} is no checkpoint of train.py --data names")

    # held-out and trained prompts together; equal ones are of one cluster
    groups = {group: evaluate.draw_names(args.prompts, group, tokenizer) for group in ("held out", "trained")}
    prompts = {name: ids for drawn in groups.values() for name, ids in drawn.items()}
    cluster = iter(numbered(list(prompts.values())))
    clusters = {group: [next(cluster) for _ in drawn] for group, drawn in groups.items()}
    if known and known != clusters:
        fail(f"{ckpt} would complete other prompts than the records before it: the same tokenizer and --prompts?")

    # without an adapter there is no Stage B
    n_rounds = model.cfg.n_rounds if adapter else 0
    jobs = settings(model, n_rounds, args)
    if not jobs:
        fail(f"--taus 1 leaves {name} nothing to look at again: give a lower one, too")

    looks = Counter()
    counting(model, looks)
    records = []
    for label, (attributes, d) in tqdm(jobs.items(), desc=f"{name} {adapter or ckpt}", leave=False, disable=None):
        for knob, value in attributes.items():
            setattr(model, knob, value)
        draws = args.draws if d.temperature else 1
        outputs, ran = complete(model, list(prompts.values()), d, range(args.seed, args.seed + draws), looks)
        record = dict(system=name, ckpt=ckpt, adapter=adapter, setting=label, temperature=d.temperature)
        records.append(record | describe(model, tokenizer, prompts, outputs, ran))
    return clusters, records


def load(path: str) -> tuple[dict, list[dict]]:
    """As `measure` returns them, from a file, gzipped or not: clusters in its first line, a record in each other."""
    open_file = gzip.open if path.endswith(".gz") else open
    try:
        with open_file(path) as file:
            head, *records = [json.loads(line) for line in file]
        return head["clusters"], [r for r in records if r["found"]]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as e:
        fail(f"--records {path} does not say line by line which prompts were completed (measure again): {e!r}")


def save(path: Path, clusters: dict, records: list[dict]) -> None:
    lines = [json.dumps(record) + "\n" for record in [{"clusters": clusters}, *records]]
    replace_file(path, lambda p: p.write_text("".join(lines)))


def pool(records: list[dict]) -> dict[tuple[str, str], dict]:
    """(system, setting) -> share of each prompt's completions that exist, over seeds and draws, (P,) "exist"; means of
    the rest over the same. Forwards are the first record's."""
    groups = defaultdict(list)
    for r in records:
        groups[r["system"], r["setting"]].append(r)

    pooled = {}
    for key, of in groups.items():
        draws = [r["draws"] for r in of]
        found = sum(np.array([int(digit, 36) for digit in r["found"]]) for r in of)
        p = {"temperature": of[0]["temperature"], "exist": found / sum(draws)}
        for k in VARIETY:
            p[k] = float(np.average([r.get(k, math.nan) for r in of], weights=draws))
        for k in COUNTED:
            # a forward of more layers costs more
            costs = [r.get(k, math.nan) * (r["n_layer"] / records[0]["n_layer"]) for r in of]
            p[k] = float(np.average(costs, weights=draws))
        pooled[key] = p
    return pooled


# --- tables
def show_settings(pooled: dict, records: list[dict], weights: np.ndarray) -> None:
    """A row for each system and setting."""
    columns = [k for k in (*VARIETY, *COUNTED) if any(k in r for r in records)]
    rows = []
    for (name, setting), p in pooled.items():
        share = interval(means(p["exist"], weights))
        rows.append([name, setting, share, *(f"{p[k]:.3f}" for k in columns)])
    print_table(["system", "setting", "exist", *columns], rows)


def show_budgets(pooled: dict, weights: np.ndarray, half: np.ndarray, against: str | None) -> None:
    """For each temperature and way to count, every system within every budget; `against` minus each other one."""
    for temperature in sorted({p["temperature"] for p in pooled.values()}):
        # a system that was not run at this temperature has a row without figures
        systems = defaultdict(list)
        for (name, _), p in pooled.items():
            systems[name] += [p] if p["temperature"] == temperature else []

        for count in ("all/token", "serial/token"):
            title = count
            if temperature > 0:
                title += f", T {temperature:g}"
            shares = {name: best_within_budgets(of, count, weights, half) for name, of in systems.items()}
            rows = [[name, *map(interval, best)] for name, best in shares.items()]
            print()
            print_table([f"at most, {title}", *map(str, BUDGETS)], rows)
            if against:
                print()
                print_table([f"{against} minus, {title}", *map(str, BUDGETS)], differences(shares, against))


def best_within_budgets(of: list[dict], count: str, weights: np.ndarray, half: np.ndarray) -> list[np.ndarray]:
    """A system's share within each of BUDGETS, (W,) each."""
    exist = np.array([p["exist"] for p in of])
    costs = np.array([p[count] for p in of])
    return [within(budget, exist, costs, weights, half) for budget in BUDGETS]


def differences(shares: dict[str, list[np.ndarray]], against: str) -> list[list[str]]:
    """Rows: what `against` has more than each other system, in the same resamples."""
    rows = []
    for name, theirs in shares.items():
        if name != against:
            pairs = zip(shares[against], theirs, strict=True)
            rows.append([name, *(interval(a - b, "+") for a, b in pairs)])
    return rows


# --- the command line
def build_parser() -> Parser:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument_group("what is compared").add_argument
    add("--system", nargs="+", action="append", metavar=("NAME", "CKPT [ADAPTER]"), default=[],
        help="again for another one, or for more seeds of a name")
    add("--against", metavar="NAME", help="the system whose share minus every other's is shown, too")
    add("--prompts", type=bounded(int, 1), default=256, help="names held out, and as many trained")

    add = parser.add_argument_group("how").add_argument
    add("--taus", nargs="+", type=bounded(float, -1, 1), help="values of tau_m2t (default: 7, or 13)")
    add("--keep", nargs="+", type=bounded(float, 0, 1), default=KEEP, help="tau_keep of a joint head")
    add("--edits", action="store_true", help="with edits: the released settings, and gates 0 and 0.5")
    add("--temperature", nargs="+", type=bounded(float, 0), default=[0.0], help="several; 0: greedy")
    add("--top_p", nargs="+", type=bounded(float, 1e-6, 1), default=[1.0], help="with a temperature")
    add("--draws", type=bounded(int, 1, 35), default=1, help="completions of a prompt, if not greedy")
    add("--seed", type=int, default=0, help="of the first draw; the next ones take the numbers after it")

    add = parser.add_argument_group("records").add_argument
    add("--out", help="file for the records, a JSON object a line")
    add("--records", nargs="+", default=[], help="files of records that were written before")
    # fmt: on
    return parser


def read_records(paths: list[str]) -> tuple[dict, list[dict]]:
    """Clusters and records of several files about the same prompts."""
    clusters = {}
    records = []
    for path in paths:
        found, more = load(path)
        if clusters and found != clusters:
            fail(f"--records {path} is about other prompts than the file before it")
        clusters = found
        records += more
    return clusters, records


def check(args: Namespace) -> None:
    """Refuse what cannot be meant."""
    if any(len(system) not in (2, 3) for system in args.system) or not args.system + args.records:
        fail("--system takes NAME CKPT or NAME CKPT ADAPTER; give at least one, or --records")
    if args.draws > 1 and not any(args.temperature):
        fail(f"--draws {args.draws}: greedy completions of a prompt are all the same; give a --temperature")


def main() -> None:
    args = build_parser().parse_args()
    check(args)
    clusters, records = read_records(args.records)
    names = {r["system"] for r in records} | {name for name, *_ in args.system}
    if args.against and args.against not in names:
        fail(f"--against {args.against} is none of the systems: {', '.join(sorted(names))}")

    # saved after each system: nothing that was measured is lost
    for name, ckpt, *adapter in args.system:
        clusters, more = measure(name, ckpt, adapter[0] if adapter else None, clusters, args)
        records += more
        if args.out:
            save(Path(args.out), clusters, records)

    # one resampling of beginnings for all tables
    cluster = np.array(sum(clusters.values(), []))
    if cluster.max() == 0:
        fail("all prompts are equal: give more --prompts, the halves need two different ones")
    pooled = pool(records)
    weights = resamples(cluster)
    show_settings(pooled, records, weights)
    show_budgets(pooled, weights, cluster % 2 == 1, args.against)


if __name__ == "__main__":
    main()
