"""Names: what each system writes for held-out beginnings, seed by seed, and how certain the differences are.

`measure` appends one record for each setting, with a digit for each name, and measures nothing twice. `compare` prints
means over seeds. It also prints which share of a system's names exist within a budget of forwards a name, with the
95 % intervals of paired differences. A system writes in one of these ways, in which --dial is a number:

    run         the longest run from the left whose product is above the dial. Causal Stage B chooses and writes it;
                otherwise Stage A chooses it, and the paper's Stage B writes it, if there is one
    threshold   all masks above the dial, by Stage A; --edits: none, or above this gate
    stage_b     the same masks, which Stage B writes
    first       of a whole block's tokens the leftmost ones, as many as the dial says
    ones        one token at a time from the left, and the text is read in blocks of one

    python -m experiments.names measure --system causal --ckpt out/causal --seed 1 --way run --dial 0 --out out/r.jsonl
    python -m experiments.names compare out/r.jsonl --against base
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

import experiments.control  # noqa: F401  (the control's models can be loaded)
from checkpoint import load_model
from decoding import Step
from evaluate import NAME_DECODING, complete, names_tokenizer
from lib.names import draw_names
from lib.util import Parser, append_line, bounded, command, fail, or_none, print_table, progress, run_command
from sample import step_of, temperature
from tools.plots import read_records, read_settings, share

STUDENT = (12.706, 4.303, 3.182, 2.776)  # the 97.5 % quantile of Student's t, for 1, 2, 3 and 4 degrees of freedom
BUDGETS = (2.1, 2.7, 3.3, 4, 5, 6)  # forwards a name
N = 512  # how many names are completed
# the least and the largest dial of each way
WAYS = {"run": (0, 1), "threshold": (-1, 1), "stage_b": (-1, 1), "first": (1, 64), "ones": (0, 1)}


def measure(parser: Parser) -> None:
    parser.add_argument("--system", required=True)
    parser.add_argument("--ckpt", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--dial", type=float, nargs="+", default=[1.0])
    parser.add_argument("--edits", type=or_none(bounded(float, 0, 1)), nargs="+", default=[None])
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0: the likeliest tokens; 1: draw")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    low, high = WAYS[args.way]
    for dial in args.dial:
        if not low <= dial <= high:
            fail(f"--dial {dial:g}: with --way {args.way} it must lie in {low}..{high}")

    tokenizer = names_tokenizer(args.ckpt)
    model = load_model(args.ckpt, "cpu", torch.float32, block_length=1 if args.way == "ones" else None)
    n_rounds = 0 if args.way == "threshold" or not model.trained_b else model.cfg.n_rounds
    prompts = draw_names(N, "held out", tokenizer)
    there = read_records(args.out) if args.out.exists() else []
    for dial, edits in progress(list(product(args.dial, args.edits)), "settings"):
        record = {name: getattr(args, name) for name in ("system", "way", "seed", "temperature")}
        record |= dict(dial=dial, edits=edits, n=N)
        if any(record.items() <= ({"temperature": 0.0} | other).items() for other in there):
            continue

        # complete every beginning, by the longest run or by the paper's gate
        tau_joint = {"run": dial, "ones": dial, "first": 0.0}.get(args.way)
        d = replace(NAME_DECODING, n_rounds=n_rounds, tau_m2t=dial, tau_t2t=edits, tau_joint=tau_joint)
        d = replace(d, temperature=args.temperature)
        step = partial(leftmost, int(dial), step_of(model, d)) if args.way == "first" else None
        found = complete(model, tokenizer, prompts, d, step)

        # in blocks of one, the forward that fills a mask could also read the token before it. So a loop for such models
        # needs m forwards for m tokens, where ours takes 2 m - 1
        cost = (found["forwards"] + 1) / 2 if args.way == "ones" else found["forwards"]
        record["exist"] = "".join("01"[real] for real in found["found"])
        record |= dict(forwards=round(cost, 4), per_token=round(cost / found["tokens"], 4))
        append_line(args.out, record)


def leftmost(k: int, step: Callable[..., Step], engine, z: Tensor, *others) -> Step:
    """The step, but it writes only the k leftmost of its tokens."""
    done = step(engine, z, *others)
    bundle = done.bundle & (done.bundle.cumsum(-1) <= k)
    return replace(done, bundle=bundle, after=torch.where(bundle, done.token, z))


def compare(parser: Parser) -> None:
    parser.add_argument("records", type=Path)
    parser.add_argument("--against", required=True, metavar="SYSTEM[/WAY]", help="every difference is from this one")
    args = parser.parse_args()

    # for every setting the means of its seeds
    rows = []
    for name, settings in read_settings(args.records).items():
        for (dial, edits), seeds in settings.items():
            setting = f"{dial:g}" + ("" if edits is None else f", edits {edits:g}")
            means = [f"{mean(values):.3f}" for values in zip(*seeds, strict=True)]
            rows.append([name, setting, *means, " ".join(f"{exist:.3f}" for exist, *_ in seeds)])
    print_table(["system/way", "setting", "exist", "forwards/name", "/token", "seeds"], rows)

    # the share within each budget, seed by seed: of each way, and of a system in all of its ways
    systems: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for record in read_records(args.records):
        for name in (record["system"], f"{record['system']}/{record['way']}"):
            systems[name][record["seed"]].append(record)
    each = systems.items()
    paid = {name: [{seed: within(r, budget) for seed, r in of.items()} for budget in BUDGETS] for name, of in each}
    against = paid.get(args.against) or fail(f"--against {args.against}: the records have {', '.join(paid)}")
    rows = [[name, *map(cell, shares, against)] for name, shares in paid.items()]
    print_table(["exist, and the difference", *(f"within {budget:g}" for budget in BUDGETS)], rows)


def cell(ours: dict[int, float | None], theirs: dict[int, float | None]) -> str:
    """.812 +.034 [-.010, +.078]: the mean of our seeds, and the mean difference on the seeds that both have, with its
    interval."""
    have = {seed: value for seed, value in ours.items() if value is not None}
    pairs = [value - theirs[seed] for seed, value in have.items() if theirs.get(seed) is not None]
    text = f"{mean(have.values()):.3f}" if have else "-"
    if len(pairs) < 2:
        return text
    margin = STUDENT[min(len(pairs) - 2, 3)] * stdev(pairs) / math.sqrt(len(pairs))
    return f"{text} {mean(pairs):+.3f} [{mean(pairs) - margin:+.3f}, {mean(pairs) + margin:+.3f}]"


def within(records: list[dict], budget: float) -> float | None:
    """The share of names that exist by the best affordable mixture of two settings: one setting for some names, another
    for the rest. With costs 1 and 3, shares .2 and .6, and a budget of 2, half of the names by each give .4.

    A mixture is chosen on one half of the names and judged on the other half, then the reverse. If several are best,
    their mean counts. None if every setting costs more.
    """
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
        judged.append(mean(m[judged_on] for m in mixtures if m[chosen_on] >= best))
    return mean(judged)


@command
def main() -> None:
    run_command({"measure": measure, "compare": compare}, __doc__)


if __name__ == "__main__":
    main()
