"""Who gains, by what, and at what cost: systems on held-out names, seed by seed, and what their differences are worth.

A system is a name, and of each seed of training a folder. A way is how it decodes, and its dial trades forwards for
quality. `measure` appends a record a line, and never measures anything twice:

    {"system", "ckpt", "way", "dial", "tau_t2t", "setting", "seed", "n", "exist": a digit a name, "forwards": a name}

`compare` prints every setting: the share that exists and its forwards a name, means of the seeds. Then, for some
budgets, what each system has within them. Two settings may be mixed, some names by one and the rest by the other.
The mixture is chosen on one half of the names and judged on the other. A difference is paired by names and by seeds,
and its 95 % interval has the seed as its unit: Student's t of one difference a seed.

    threshold         Stage A, masks above the dial (tau_m2t); with --tau_t2t also edits
    stage_b           the same with Stage B
    end_last          Stage A by another bundle, see opponents.py
    left left_ones    one token at a time, from the left; read in blocks of one
    refusing          Stage B looks at all masks; the dial is the product that it must have
    head              the dial is tau_keep

    python -m beyond.evidence measure --system alpha --ckpt out/a --seed 1 --way stage_b --dial 0.7 0.3 -1 --out r.jsonl
    python -m beyond.evidence compare r.jsonl --against base/threshold --budgets 1.5 2 3 4
"""

import json
import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from beyond import opponents
from beyond.head import READ_BY, head_step, load_head
from evaluate import NAMES, complete, draw_names
from lib.util import Parser, bounded, command, fail, or_none, pick_device, print_table, reading
from model import Model
from sample import Decoding, Step, denoise

# Student's t: 97.5 % of it lies below, for 1, 2 ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


# --- ways to decode: is Stage B on, the step, and which of its settings the dial is
WAYS: dict[str, tuple[bool, Callable[..., Step], str]] = {
    "threshold": (False, denoise, "tau_m2t"),
    "stage_b": (True, denoise, "tau_m2t"),
    "end_last": (False, opponents.end_last, "tau_m2t"),
    "left": (False, opponents.first_left, ""),
    "left_ones": (False, opponents.first_left, ""),
    "refusing": (True, opponents.refusing, "keep"),
    "head": (False, head_step, "tau_keep"),
}
EDITING = ("threshold", "stage_b")


def way_of(about: dict, model: Model) -> tuple[Decoding, Callable[..., Step]]:
    """The settings and the step of a record."""
    stage_b, step, dial_is = WAYS[about["way"]]
    n_rounds = model.cfg.n_rounds if stage_b else 0
    d = replace(NAMES, n_rounds=n_rounds, tau_m2t=-1.0, tau_t2t=about["tau_t2t"])
    if dial_is == "tau_m2t":
        d = replace(d, tau_m2t=about["dial"])
    if dial_is in ("keep", "tau_keep"):
        step = partial(step, **{dial_is: about["dial"]})
    return d, step


def load(folder: Path, way: str, device: torch.device) -> Model:
    """A system's seed, if this way can decode it."""
    if checkpoint.names_of(folder) is None:
        fail(f"{folder} is no model of names, which can be judged")
    about = checkpoint.about_adapter(folder)
    if (about.get("read_by") == READ_BY) != (way == "head"):
        fail(f"{folder}: --way head is for the folder of a head, and that for no other way")
    if way == "head":
        return load_head(folder, device, torch.float32)
    return checkpoint.load_model(folder, device, torch.float32, block_length=1 if way == "left_ones" else None)


# --- measure
def measure() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--system", required=True, help="its name")
    add("--ckpt", required=True, help="its folder")
    add("--seed", type=int, required=True, help="of its training")
    add("--way", choices=WAYS, required=True)
    add("--dial", type=float, nargs="+", default=[-1.0], help="each a setting")
    add("--tau_t2t", type=or_none(bounded(float, 0, 1)), nargs="+", default=[None], help='"none", or the gate on edits')
    add("--prompts", type=bounded(int, 2), default=512, help="held-out names that are completed")
    add("--device", default="auto")
    add("--out", type=Path, required=True, help="records are appended here")
    args = parser.parse_args()
    if args.tau_t2t != [None] and args.way not in EDITING:
        fail(f"--way {args.way} does not edit: leave out --tau_t2t")

    # what is there already is not measured again
    there = {key_of(record) for record in read_records(args.out)} if args.out.exists() else set()
    model = load(Path(args.ckpt), args.way, pick_device(args.device))
    for record in tqdm(wanted(args), desc=f"{args.ckpt} {args.way}", unit="setting", leave=False, disable=None):
        if key_of(record) not in there:
            found = decode(model, record)
            with open(args.out, "a") as out:
                out.write(json.dumps(record | found) + "\n")


def wanted(args: Namespace) -> list[dict]:
    """What is to be measured: records without results."""
    dials = args.dial if WAYS[args.way][2] else [0.0]
    same = {"system": args.system, "ckpt": args.ckpt, "way": args.way, "seed": args.seed, "n": args.prompts}
    records = []
    for dial in dials:
        for tau_t2t in args.tau_t2t:
            setting = f"{dial:g}" + ("" if tau_t2t is None else f", edits {tau_t2t:g}")
            records.append(same | {"dial": dial, "tau_t2t": tau_t2t, "setting": setting})
    return records


def key_of(record: dict) -> tuple:
    return tuple(record[name] for name in ("system", "way", "setting", "seed", "n"))


def decode(model: Model, about: dict) -> dict:
    """Complete held-out names -> which of the completions exist, and forwards a name."""
    tokenizer = checkpoint.load_tokenizer(Path(about["ckpt"]), model.cfg.tokenizer)
    prompts = draw_names(about["n"], "held out", tokenizer)
    found = complete(model, tokenizer, prompts, *way_of(about, model))

    # in blocks of one the pass that reads a mask reads the token before it, too: of 2 m - 1 forwards m are needed
    forwards = found["forwards"]
    if model.cfg.block_length == 1:
        forwards = (forwards + 1) / 2
    return {"exist": "".join("01"[real] for real in found["found"]), "forwards": forwards}


# --- compare
Settings = dict[str, dict[int, dict]]  # of a system decoded in one way: {setting: {seed: record}}


def compare() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("records", type=Path, nargs="+", help="files of `measure`")
    add("--against", required=True, metavar="SYSTEM/WAY", help="every difference is to this one")
    add("--budgets", type=bounded(float, 0), nargs="+", default=[1.5, 2, 3, 4, 6], help="forwards a name")
    args = parser.parse_args()
    systems = by_system([record for path in args.records for record in read_records(path)])
    if args.against not in systems:
        fail(f"--against {args.against}: the records have {', '.join(systems)}")

    # every setting: means of its seeds
    rows = []
    for name, settings in systems.items():
        for setting, seeds in settings.items():
            share = statistics.mean(exist(record["exist"]) for record in seeds.values())
            cost = statistics.mean(record["forwards"] for record in seeds.values())
            rows.append([name, setting, str(len(seeds)), f"{share:.3f}", f"{cost:.2f}"])
    print_table(["system/way", "setting", "seeds", "exist", "forwards/name"], rows)

    # what a budget pays for
    print()
    head = ["exist, and the difference", *(f"within {budget:g}" for budget in args.budgets)]
    rows = []
    for name, settings in systems.items():
        cells = [cell(affords(settings, b), affords(systems[args.against], b)) for b in args.budgets]
        rows.append([name, *cells])
    print_table(head, rows)


def by_system(records: list[dict]) -> dict[str, Settings]:
    """{system/way: its settings}"""
    sizes = {record["n"] for record in records}
    if len(sizes) > 1:
        fail(f"these records are of {sorted(sizes)} names: compare those of as many")
    found: dict[str, Settings] = {}
    for record in records:
        settings = found.setdefault(f"{record['system']}/{record['way']}", {})
        settings.setdefault(record["setting"], {})[record["seed"]] = record
    return found


def affords(settings: Settings, budget: float) -> dict[int, float]:
    """What each seed has within a budget; a seed whose every setting costs more is left out."""
    found = {}
    for seed in set().union(*settings.values()):
        share = within([records[seed] for records in settings.values() if seed in records], budget)
        if share is not None:
            found[seed] = share
    return found


def cell(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """.812 +.034 [-.010, +.078]: the mean of our seeds, and the difference on those that both have."""
    if not ours:
        return "-"
    text = f"{statistics.mean(ours.values()):.3f}"
    differences = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
    if differences:
        mean, low, high = paired(differences)
        text += f" {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    return text


def paired(differences: list[float]) -> tuple[float, float, float]:
    """The mean of one difference a seed, and its 95 % interval: Student's t; of one seed there is none."""
    mean = statistics.mean(differences)
    S = len(differences)
    if S < 2:
        return mean, -math.inf, math.inf
    t = STUDENT[min(S - 1, len(STUDENT)) - 1]
    margin = t * statistics.stdev(differences) / math.sqrt(S)
    return mean, mean - margin, mean + margin


# --- what a seed has within a budget
def exist(digits: str) -> float:
    """0110 -> .5"""
    return digits.count("1") / len(digits)


def within(records: list[dict], budget: float) -> float | None:
    """What the best affordable mixture of two settings has, chosen on one half of the names, judged on the other, and
    the reverse; None where every setting costs more."""
    costs = [record["forwards"] for record in records]
    even = [exist(record["exist"][0::2]) for record in records]
    odd = [exist(record["exist"][1::2]) for record in records]
    if min(costs) > budget:
        return None
    return (mixture(costs, even, odd, budget) + mixture(costs, odd, even, budget)) / 2


def mixture(costs: list[float], chooses: list[float], judges: list[float], budget: float) -> float:
    """Of all mixtures of a setting within the budget with another one, the best by `chooses`: what it has by `judges`.

    Costs 1 and 3, shares .2 and .6, budget 2: half of the names by each, .4.
    """
    found = []
    for i, cheap in enumerate(costs):
        for j, dear in enumerate(costs):
            if cheap > budget or dear < cheap:
                continue
            # the share of the names that the dearer one decodes
            part = 1.0 if dear <= budget else (budget - cheap) / (dear - cheap)
            found.append([(1 - part) * shares[i] + part * shares[j] for shares in (chooses, judges)])
    return max(found, key=lambda mixed: mixed[0])[1]


def read_records(path: Path) -> list[dict]:
    with reading(path, "records"):
        return [json.loads(line) for line in path.read_text().splitlines()]


COMMANDS = {"measure": measure, "compare": compare}


@command
def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        fail(f"python -m beyond.evidence COMMAND, one of {', '.join(COMMANDS)}; each has --help")
    COMMANDS[sys.argv.pop(1)]()


if __name__ == "__main__":
    main()
