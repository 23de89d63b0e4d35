"""Names, system by system and seed by seed: what each writes for held-out beginnings, and what differences are worth.

`measure` appends a record a line, with a digit for each name, and measures nothing twice. `compare` prints means over
seeds, and what every system has within some budgets of forwards a name. Two settings of a system may be mixed, some
names by one and the rest by the other: the mixture is chosen on one half of the names and judged on the other. A
difference is paired by seeds; its 95 % interval is Student's t, a difference a seed.

    run         the longest run from the left whose product is above the dial, by causal Stage B, or by Stage A
    threshold   Stage A, masks above the dial; edits: none, or above a gate
    stage_b     the same with Stage B
    first       of a whole block's tokens so many at once, the leftmost; one is the system's own writing one at a time
    ones        one token at a time from the left, the text read in blocks of one

    python -m experiments.names measure --system causal --ckpt out/causal --seed 1 --way run --dial 0 0.5 --out r.jsonl
    python -m experiments.names compare r.jsonl --against base/run
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import base_of, load_model
from evaluate import NAMES, complete, draw_names
from lib.tokenizer import load_tokenizer
from lib.util import Parser, bounded, command, fail, or_none, print_table
from sample import Step, longest_run

STUDENT = (12.706, 4.303, 3.182, 2.776)  # 97.5 % of Student's t lies below, for 1, 2 ... degrees of freedom
BUDGETS = (2.1, 2.7, 3.3, 4, 5, 6)
N = 512  # names


# --- measure
def measure(parser: Parser) -> None:
    add = parser.add_argument
    add("--system", required=True)
    add("--ckpt", type=Path, required=True)
    add("--seed", type=int, required=True)
    add("--way", choices=["run", "threshold", "stage_b", "first", "ones"], required=True)
    add("--dial", type=float, nargs="+", default=[1.0])
    add("--edits", type=or_none(bounded(float, 0, 1)), nargs="+", default=[None])
    add("--skip", type=bounded(int, 0), default=0, help="leave out so many names: others, to choose settings on")
    add("--temperature", type=bounded(float, 0), default=0.0, help="0: the likeliest tokens; 1: draws")
    add("--out", type=Path, required=True)
    args = parser.parse_args()

    model = load_model(args.ckpt, "cpu", torch.float32, block_length=1 if args.way == "ones" else None)
    n_rounds = 0 if args.way == "threshold" or not model.markers.any() else model.cfg.n_rounds
    tokenizer = load_tokenizer(base_of(args.ckpt))
    prompts = dict(list(draw_names(args.skip + N, "held out", tokenizer).items())[args.skip :])
    rare = ("skip", "temperature")
    special = {name: getattr(args, name) for name in rare if getattr(args, name)}
    there = read(args.out) if args.out.exists() else []
    there = [other for other in there if {name: other[name] for name in rare if name in other} == special]
    for dial, edits in product(args.dial, args.edits):
        record = dict(system=args.system, way=args.way, dial=dial, edits=edits, seed=args.seed, n=N)
        record |= special
        if any(record.items() <= other.items() for other in there):
            continue

        # complete every beginning
        d = replace(NAMES, n_rounds=n_rounds, tau_t2t=edits, tau_joint=dial, temperature=args.temperature)
        step = None
        if args.way in ("threshold", "stage_b"):
            d = replace(d, tau_joint=None, tau_m2t=dial)
        if args.way == "first":
            d = replace(d, tau_joint=0.0)
            step = partial(leftmost, int(dial))
        found = complete(model, tokenizer, prompts, d, step)

        # in blocks of one the pass that reads a mask reads the token before it, too: of 2 m - 1 forwards m are needed
        cost = found["forwards"]
        if args.way == "ones":
            cost = (cost + 1) / 2
        record["exist"] = "".join("01"[real] for real in found["found"])
        figures = dict(forwards=cost, per_token=cost / found["tokens"], tokens=found["tokens"], tc=found["tc"])
        record |= {name: value and round(value, 4) for name, value in figures.items()}
        with open(args.out, "a") as out:
            out.write(json.dumps(record) + "\n")


def leftmost(k: int, engine, z: Tensor, *others) -> Step:
    """A step that writes the k leftmost of the tokens that it would write."""
    done = longest_run(engine, z, *others)
    bundle = done.bundle & (done.bundle.cumsum(-1) <= k)
    return replace(done, bundle=bundle, after=torch.where(bundle, done.token, z))


# --- compare
def compare(parser: Parser) -> None:
    parser.add_argument("records", type=Path)
    parser.add_argument("--against", required=True, metavar="SYSTEM/WAY", help="every difference is to this one")
    args = parser.parse_args()
    systems: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    settings: dict[tuple, list[dict]] = defaultdict(list)
    for record in read(args.records):
        name = f"{record['system']}/{record['way']}"
        systems[name][record["seed"]].append(record)
        settings[name, record["dial"], record["edits"]].append(record)
    if args.against not in systems:
        fail(f"--against {args.against}: the records have {', '.join(systems)}")

    # every setting: means of its seeds
    rows = []
    for (name, dial, edits), records in settings.items():
        setting = f"{dial:g}" + ("" if edits is None else f", edits {edits:g}")
        seeds = [f"{share(record['exist']):.3f}" for record in sorted(records, key=lambda record: record["seed"])]
        rows.append([name, setting, *(f"{mean:.3f}" for mean in means(records)), " ".join(seeds)])
    print_table(["system/way", "setting", "exist", "forwards/name", "/token", "seeds"], rows)

    # what a budget pays for, seed by seed
    paid = {}
    for name, seeds in systems.items():
        paid[name] = [{seed: within(records, budget) for seed, records in seeds.items()} for budget in BUDGETS]
    rows = [[name, *map(cell, shares, paid[args.against])] for name, shares in paid.items()]
    print()
    print_table(["exist, and the difference", *(f"within {budget:g}" for budget in BUDGETS)], rows)


def means(records: list[dict]) -> list[float]:
    """Of a setting's seeds: the share that exists, forwards a name, and a token, which older records lack."""
    figures = [(share(of["exist"]), of["forwards"], of.get("per_token") or math.nan) for of in records]
    return [statistics.mean(values) for values in zip(*figures, strict=True)]


def share(digits: str) -> float:
    """0110 -> .5"""
    return digits.count("1") / len(digits)


def cell(ours: dict[int, float | None], theirs: dict[int, float | None]) -> str:
    """.812 +.034 [-.010, +.078]: the mean of our seeds, and the difference on those that both have."""
    have = {seed: value for seed, value in ours.items() if value is not None}
    if not have:
        return "-"
    text = f"{statistics.mean(have.values()):.3f}"
    pairs = [value - theirs[seed] for seed, value in have.items() if theirs.get(seed) is not None]
    if len(pairs) < 2:
        return text
    mean = statistics.mean(pairs)
    margin = STUDENT[min(len(pairs) - 2, 3)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{text} {mean:+.3f} [{mean - margin:+.3f}, {mean + margin:+.3f}]"


def within(records: list[dict], budget: float) -> float | None:
    """What the best affordable mixture of two settings has, chosen on one half of the names, judged on the other, and
    the reverse; of several that are chosen the mean. None where every setting costs more. Costs 1 and 3, shares .2 and
    .6, budget 2: half by each, .4."""
    points = [(of["forwards"], share(of["exist"][0::2]), share(of["exist"][1::2])) for of in records]
    mixtures = []
    for (low, *cheap), (high, *dear) in product(points, points):
        if low <= min(budget, high):
            part = 1.0 if high <= budget else (budget - low) / (high - low)
            mixtures.append([(1 - part) * a + part * b for a, b in zip(cheap, dear, strict=True)])
    if not mixtures:
        return None
    judged = []
    for chosen_on, judged_on in ((0, 1), (1, 0)):
        best = max(m[chosen_on] for m in mixtures) - 1e-9
        judged.append(statistics.mean(m[judged_on] for m in mixtures if m[chosen_on] >= best))
    return statistics.mean(judged)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@command
def main() -> None:
    commands = {"measure": measure, "compare": compare}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        fail(f"python -m experiments.names COMMAND, one of {', '.join(commands)}; each has --help")
    commands[sys.argv.pop(1)](Parser(__doc__))


if __name__ == "__main__":
    main()
