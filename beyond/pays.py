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


def settings(model: Model, K: int, args: Namespace) -> dict[str, tuple[dict, Decoding]]:
    """What a system is decoded by: label -> (attributes of the model, settings). The released settings have edits."""
    start = Decoding(gen_length=32, tau_t2t=None, n_rounds=K)
    knob, values = ("looks", LOOKS) if hasattr(model, "looks") else ("tau_keep", args.keep)
    looks_again = hasattr(model, knob)
    taus = args.taus or [*TAUS, *([] if looks_again else FINER)]
    gates = {f"tau_m2t {TAUS.get(tau, tau)}": replace(start, tau_m2t=tau) for tau in taus}
    if args.edits:
        gates = {f"released {mode.upper()}": replace(start, **gate) for mode, gate in MODES.items()}
        gates |= {f"tau_m2t {tau}, edits {e}": replace(start, tau_m2t=tau, tau_t2t=e)
                  for tau in (0.3, 0.2, 0.1, -1.0) for e in (0.0, 0.5)}  # fmt: skip
    kept = {label: ({}, d) for label, d in gates.items()}
    if looks_again:  # one at a time there is nothing to look at again
        kept = {f"{label}, {knob} {v}": ({knob: v}, d) for v in values for label, d in gates.items() if d.tau_m2t < 1}
    drawn = [(T, p) for T in args.temperature for p in (args.top_p if T else [1.0])]
    return {label + f", T {T:g}" * (T > 0) + f", top_p {p:g}" * (p < 1): (of, replace(d, temperature=T, top_p=p))
            for T, p in drawn for label, (of, d) in kept.items()}  # fmt: skip


class Followed(Cached):
    """An engine that knows which rows of its decode are still in flight."""

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.numbers = [self.numbers[r] for r in rows]


def counting(model: Model, looks: Counter) -> None:
    """Let the model's step add to looks[i] how often Stage B or a head ran for row i of a decode."""
    plain = getattr(model, "step", sample.step)

    def step(engine, z, prompt, any_masked, u, d):
        if type(engine) is Cached:
            engine.__class__, engine.numbers = Followed, list(range(len(z)))
        s = plain(engine, z, prompt, any_masked, u, d)
        ran = s["partial"] > 0 if "partial" in s else s["bundle"].any(-1) & bool(d.n_rounds)
        ran = s.get("looks", ran * max(1, d.n_rounds))
        looks.update(dict(zip(engine.numbers, ran.tolist(), strict=True)))
        return s

    model.step = step


def numbered(prompts: list[list[int]]) -> list[int]:
    """Each prompt's cluster, (P,): prompts of equal ids are one, numbered in the order in which they appear."""
    seen = {}
    return [seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts]


def complete(
    model: Model, prompts: list[list[int]], d: Decoding, seeds: range, looks: Counter
) -> tuple[list[Output], list[int]]:
    """-> outputs and second looks, (len(seeds) * P) each, seed after seed. Greedy completions of equal prompts are
    equal, and are decoded once."""
    at = range(len(prompts)) if d.temperature else numbered(prompts)
    rows, outputs, ran = dict(zip(at, prompts, strict=True)), [], []
    for seed in seeds:
        looks.clear()
        decoded = generate(model, list(rows.values()), d, seed)
        outputs += [decoded[i] for i in at]
        ran += [looks[i] for i in at]
    return outputs, ran


def entropy(texts: list[str]) -> float:
    """Of the distribution of these texts, nats: the plug-in estimate."""
    return sum(n / len(texts) * math.log(len(texts) / n) for n in Counter(texts).values())


def describe(model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], outputs: list, ran: list[int]) -> dict:
    """What a record holds of one decode, draw after draw; prompts: name -> ids. "found" has a digit (base 36) for each
    prompt: how many of its completions exist."""
    P, draws, tokens = len(prompts), len(outputs) // len(prompts), sum(len(o.tokens) for o in outputs)
    written = [tokenizer.decode(p + o.tokens) for p, o in zip([*prompts.values()] * draws, outputs, strict=True)]
    r = evaluate.judge(list(prompts) * draws, written, outputs, model.partial_cost)
    r["serial/token"] = (sum(o.nfe["full"] + o.nfe["commit"] for o in outputs) + sum(ran)) / tokens
    r["found"] = "".join(np.base_repr(sum(map(bool, map(exists, written[p::P]))), 36) for p in range(P))
    if draws > 1:
        r["entropy"] = sum(entropy(written[p::P]) for p in range(P)) / P
    of = {"draws": draws, "n_layer": model.cfg.n_layer}
    return of | {k: v for k, v in r.items() if k not in ("low", "high") and not k.endswith("/name")}


def measure(name: str, ckpt: str, adapter: str | None, known: dict, args: Namespace) -> tuple[dict, list[dict]]:
    """The prompts' clusters by group (the known ones, if any are), and a record for each setting."""
    model = load_model(ckpt, pick_device("cpu"), torch.float32, adapter)
    tokenizer, looks, records = load_tokenizer(Path(ckpt), model.cfg.tokenizer), Counter(), []
    if tokenizer is None or not (Path(ckpt) / "names.json").exists():
        fail(f"{ckpt} is no checkpoint of train.py --data names")
    groups = {group: evaluate.draw_names(args.prompts, group, tokenizer) for group in ("held out", "trained")}
    prompts = {name: ids for drawn in groups.values() for name, ids in drawn.items()}
    cluster = iter(numbered(list(prompts.values())))
    clusters = {group: [next(cluster) for _ in drawn] for group, drawn in groups.items()}
    if known not in ({}, clusters):
        fail(f"{ckpt} would complete other prompts than the records before it: the same tokenizer and --prompts?")
    jobs = settings(model, model.cfg.n_rounds if adapter else 0, args)
    if not jobs:
        fail(f"--taus 1 leaves {name} nothing to look at again: give a lower one, too")
    counting(model, looks)
    for label, (attributes, d) in tqdm(jobs.items(), desc=f"{name} {adapter or ckpt}", leave=False, disable=None):
        for knob, value in attributes.items():
            setattr(model, knob, value)
        seeds = range(args.seed, args.seed + (args.draws if d.temperature else 1))
        decoded = complete(model, list(prompts.values()), d, seeds, looks)
        of = {"system": name, "ckpt": ckpt, "adapter": adapter, "setting": label, "temperature": d.temperature}
        records.append(of | describe(model, tokenizer, prompts, *decoded))
    return clusters, records


def load(path: str) -> tuple[dict, list[dict]]:
    """As `measure` returns them, from a file, gzipped or not: clusters in its first line, a record in each other."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path) as file:
            head, *records = [json.loads(line) for line in file]
        return head["clusters"], [r for r in records if r["found"]]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as e:
        fail(f"--records {path} does not say line by line which prompts were completed (measure again): {e!r}")


def pool(records: list[dict]) -> dict[tuple[str, str], dict]:
    """(system, setting) -> share of each prompt's completions that exist, over seeds and draws, (P,) "exist"; means of
    the rest over the same. Forwards are the first record's."""
    groups, pooled = defaultdict(list), {}
    for r in records:
        groups[r["system"], r["setting"]].append(r)
    for key, of in groups.items():
        draws = [r["draws"] for r in of]
        found = sum(np.array([int(digit, 36) for digit in r["found"]]) for r in of)
        pooled[key] = {"temperature": of[0]["temperature"], "exist": found / sum(draws)}
        for k in (*VARIETY, *COUNTED):
            values = [r.get(k, math.nan) * (r["n_layer"] / records[0]["n_layer"] if k in COUNTED else 1) for r in of]
            pooled[key][k] = float(np.average(values, weights=draws))
    return pooled


def show_budgets(pooled: dict, weights: np.ndarray, half: np.ndarray, against: str | None) -> None:
    """For each temperature and way to count, every system within every budget; `against` minus each other one."""
    for T in sorted({p["temperature"] for p in pooled.values()}):
        systems = defaultdict(list)
        for (name, _), p in pooled.items():
            systems[name] += [p] if p["temperature"] == T else []
        for count in ("all/token", "serial/token"):
            title, shares = count + f", T {T:g}" * (T > 0), {}
            for name, of in systems.items():
                exist, costs = (np.array([p[k] for p in of]) for k in ("exist", count))
                shares[name] = [within(budget, exist, costs, weights, half) for budget in BUDGETS]
            rows = [[name, *map(interval, of)] for name, of in shares.items()]
            print()
            print_table([f"at most, {title}", *map(str, BUDGETS)], rows)
            if against:
                print()
                rows = [[name, *(interval(a - b, "+") for a, b in zip(shares[against], of, strict=True))]
                        for name, of in shares.items() if name != against]  # fmt: skip
                print_table([f"{against} minus, {title}", *map(str, BUDGETS)], rows)


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("what is compared")
    group.add_argument("--system", nargs="+", action="append", metavar=("NAME", "CKPT [ADAPTER]"), default=[])
    group.add_argument("--against", metavar="NAME", help="the system whose share minus every other's is shown, too")
    group.add_argument("--prompts", type=bounded(int, 1), default=256, help="names held out, and as many trained")
    group.add_argument("--taus", nargs="+", type=bounded(float, -1, 1), help="values of tau_m2t (default: 7, or 13)")
    group.add_argument("--keep", nargs="+", type=bounded(float, 0, 1), default=KEEP, help="tau_keep of a joint head")
    group.add_argument("--edits", action="store_true", help="with edits: the released settings, and gates 0 and 0.5")
    group.add_argument("--temperature", nargs="+", type=bounded(float, 0), default=[0.0], help="several; 0: greedy")
    group.add_argument("--top_p", nargs="+", type=bounded(float, 1e-6, 1), default=[1.0], help="with a temperature")
    group.add_argument("--draws", type=bounded(int, 1, 35), default=1, help="completions of a prompt, if not greedy")
    group.add_argument("--seed", type=int, default=0, help="of the first draw; the next ones take the numbers after it")
    group.add_argument("--out", help="file for the records, a JSON object a line")
    group.add_argument("--records", nargs="+", default=[], help="files of records that were written before")
    args = parser.parse_args()
    if any(len(s) not in (2, 3) for s in args.system) or not args.system + args.records:
        fail("--system takes NAME CKPT or NAME CKPT ADAPTER; give at least one, or --records")
    if args.draws > 1 and not any(args.temperature):
        fail(f"--draws {args.draws}: greedy completions of a prompt are all the same; give a --temperature")
    clusters, records = {}, []
    for path in args.records:
        known, (clusters, more) = clusters, load(path)
        records += more
        if known not in ({}, clusters):
            fail(f"--records {path} is about other prompts than the file before it")
    names = {r["system"] for r in records} | {s[0] for s in args.system}
    if args.against not in (None, *names):
        fail(f"--against {args.against} is none of the systems: {', '.join(sorted(names))}")
    for name, ckpt, *adapter in args.system:
        clusters, more = measure(name, ckpt, adapter[0] if adapter else None, clusters, args)
        records += more
        if args.out:  # after each system: nothing that was measured is lost
            lines = "".join(json.dumps(r) + "\n" for r in [{"clusters": clusters}, *records])
            replace_file(Path(args.out), lambda p, lines=lines: p.write_text(lines))
    cluster = np.array(sum(clusters.values(), []))
    if cluster.max() == 0:
        fail("all prompts are equal: give more --prompts, the halves need two different ones")
    pooled, weights = pool(records), resamples(cluster)
    columns = [k for k in (*VARIETY, *COUNTED) if any(k in r for r in records)]
    rows = [[*key, interval(means(p["exist"], weights)), *(f"{p[k]:.3f}" for k in columns)]
            for key, p in pooled.items()]  # fmt: skip
    print_table(["system", "setting", "exist", *columns], rows)
    show_budgets(pooled, weights, cluster % 2 == 1, args.against)


if __name__ == "__main__":
    main()
