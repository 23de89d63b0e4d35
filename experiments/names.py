"""Names, system by system and seed by seed: what each writes for held-out beginnings, and what differences are worth.

`measure` appends a record a line and measures nothing twice:

    {"system", "way", "dial", "edits", "seed", "n", "exist": a digit a name, "forwards": a name, "per_token", "tokens"}

`compare` prints each setting's means over seeds, and what every system has within some budgets of forwards a name. Two
settings of a system may be mixed, some names by one and the rest by the other: the mixture is chosen on one half of the
names and judged on the other. A difference is paired by seeds; its 95 % interval is Student's t, a difference a seed.

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
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import base_of, load_model
from evaluate import NAMES, complete, draw_names
from lib.tokenizer import load_tokenizer
from lib.util import Parser, bounded, command, fail, or_none, print_table
from sample import Step, longest_run

STUDENT = (12.706, 4.303, 3.182, 2.776)  # 97.5 % of Student's t lies below, for 1, 2 ... degrees of freedom
BUDGETS = (2.1, 2.7, 3.3, 4, 5, 6)
KEY = ("system", "way", "dial", "edits", "seed", "n")


# --- measure
def measure() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--system", required=True)
    add("--ckpt", type=Path, required=True)
    add("--seed", type=int, required=True)
    add("--way", choices=["run", "threshold", "stage_b", "first", "ones"], required=True)
    add("--dial", type=float, nargs="+", default=[1.0])
    add("--edits", type=or_none(bounded(float, 0, 1)), nargs="+", default=[None])
    add("--prompts", type=bounded(int, 2), default=512)
    add("--skip", type=bounded(int, 0), default=0, help="leave out so many: other names, to choose settings on")
    add("--out", type=Path, required=True)
    args = parser.parse_args()

    # what is there already is not measured again
    there = [tuple(record[name] for name in KEY) for record in read(args.out)] if args.out.exists() else []
    model = load_model(args.ckpt, "cpu", torch.float32, block_length=1 if args.way == "ones" else None)
    tokenizer = load_tokenizer(base_of(args.ckpt))
    names = draw_names(args.skip + args.prompts, "held out", tokenizer)
    prompts = dict(list(names.items())[args.skip :])
    for dial, edits in tqdm([(dial, edits) for dial in args.dial for edits in args.edits], disable=None):
        about = dict(zip(KEY, (args.system, args.way, dial, edits, args.seed, len(prompts)), strict=True))
        if tuple(about.values()) not in there:
            found = decode(model, tokenizer, prompts, args.way, dial, edits)
            with open(args.out, "a") as out:
                out.write(json.dumps(about | found) + "\n")


def decode(model, tokenizer, prompts: dict, way: str, dial: float, edits: float | None) -> dict:
    """Complete every beginning -> which of the completions exist, and what they cost."""
    n_rounds = model.cfg.n_rounds if model.markers.any() and way not in ("threshold", "ones") else 0
    d = replace(NAMES, n_rounds=n_rounds, tau_t2t=edits)
    step = None
    if way in ("threshold", "stage_b"):
        d = replace(d, tau_m2t=dial)
    elif way == "first":
        d = replace(d, tau_joint=0.0)
        step = partial(leftmost, int(dial))
    else:
        d = replace(d, tau_joint=1.0 if way == "ones" else dial)
    found = complete(model, tokenizer, prompts, d, step)

    # in blocks of one the pass that reads a mask reads the token before it, too: of 2 m - 1 forwards m are needed
    cost = found["forwards"]
    if way == "ones":
        cost = (cost + 1) / 2
    digits = "".join("01"[real] for real in found["found"])
    figures = dict(forwards=cost, per_token=cost / found["tokens"], tokens=found["tokens"], tc=found["tc"])
    return {"exist": digits} | {name: value and round(value, 4) for name, value in figures.items()}


def leftmost(k: int, engine, z: Tensor, *others) -> Step:
    """A step that writes the k leftmost of the tokens that it would write."""
    done = longest_run(engine, z, *others)
    bundle = done.bundle & (done.bundle.cumsum(-1) <= k)
    return replace(done, bundle=bundle, after=torch.where(bundle, done.token, z))


# --- compare
def compare() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("records", type=Path, nargs="+")
    add("--against", required=True, metavar="SYSTEM/WAY", help="every difference is to this one")
    args = parser.parse_args()
    systems: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    settings: dict[tuple, list[dict]] = defaultdict(list)
    for record in (record for path in args.records for record in read(path)):
        systems[f"{record['system']}/{record['way']}"][record["seed"]].append(record)
        settings[tuple(record[name] for name in ("system", "way", "dial", "edits"))].append(record)
    if args.against not in systems:
        fail(f"--against {args.against}: the records have {', '.join(systems)}")

    # every setting: means of its seeds
    rows = []
    for (system, way, dial, edits), records in settings.items():
        means = [statistics.mean(values) for values in zip(*map(figures_of, records), strict=True)]
        name = f"{dial:g}" + ("" if edits is None else f", edits {edits:g}")
        seeds = [f"{share(record['exist']):.3f}" for record in sorted(records, key=lambda record: record["seed"])]
        rows.append([f"{system}/{way}", name, *(f"{mean:.3f}" for mean in means), " ".join(seeds)])
    print_table(["system/way", "setting", "exist", "forwards/name", "/token", "seeds"], rows)

    # what a budget pays for
    rows = []
    for name, seeds in systems.items():
        cells = []
        for budget in BUDGETS:
            ours = {seed: within(records, budget) for seed, records in seeds.items()}
            theirs = {seed: within(records, budget) for seed, records in systems[args.against].items()}
            cells.append(cell(ours, theirs))
        rows.append([name, *cells])
    print()
    print_table(["exist, and the difference", *(f"within {budget:g}" for budget in BUDGETS)], rows)


def figures_of(record: dict) -> tuple[float, ...]:
    return share(record["exist"]), record["forwards"], record.get("per_token") or math.nan


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
    the reverse; None where every setting costs more. Costs 1 and 3, shares .2 and .6, budget 2: half by each, .4."""
    even = [share(record["exist"][0::2]) for record in records]
    odd = [share(record["exist"][1::2]) for record in records]
    mixtures = []
    for i, cheap in enumerate(records):
        for j, dear in enumerate(records):
            low, high = cheap["forwards"], dear["forwards"]
            if low <= budget and low <= high:
                part = 1.0 if high <= budget else (budget - low) / (high - low)
                mixtures.append([(1 - part) * shares[i] + part * shares[j] for shares in (even, odd)])
    if not mixtures:
        return None
    return (max(mixtures, key=lambda m: m[0])[1] + max(mixtures, key=lambda m: m[1])[0]) / 2


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


COMMANDS = {"measure": measure, "compare": compare}


@command
def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        fail(f"python -m experiments.names COMMAND, one of {', '.join(COMMANDS)}; each has --help")
    COMMANDS[sys.argv.pop(1)]()


if __name__ == "__main__":
    main()
