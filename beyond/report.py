"""Print the tables of a sweep's records: what a user gets who may pay so much.

    names     share of the completions that exist, by forwards a name
    drawn     names with a temperature: every setting, by forwards a token. distinct: different existing names, a share
              of one seed's completions. entropy: of the draws of one prompt, nats, plug-in, so at most ln(draws)
    text      score, exact and parses (spans.py says what they are), by forwards a token

Forwards are everything counted, in full ones. With --prices, seconds of a full forward, of a commit and of what a
record's `second` names, all tables come again in time, in full forwards of that list.

A table of budgets has of what costs no more, a setting or two by turns, the best on one half of the beginnings, judged
on the other (seeds.py). With --against NAME the differences of these, paired. A setting's cost is its mean over the
seeds, and in a resample over its own.

    python -m beyond.report results/pays/records.jsonl.gz --against head --prices beyond/prices.json
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from beyond import seeds
from beyond.seeds import interval
from evaluate import print_table
from lib.data import read_records
from lib.util import Parser, command, fail, reading

# P settings, S seeds of training, R prompts, W resamples

# of a name, which has seven tokens; and of a token of a span
BUDGETS = {
    "name": (2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0, 10.0, 14.0),
    "token": (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.8, 1.0),
}
NEEDED = itemgetter("cost", "per", "system", "ckpt", "setting", "temperature")  # of a record
AVERAGED = tuple(n / 100 for n in range(25, 61))  # budgets of text's mean lead


# --- records
def load(path: Path) -> tuple[dict, list[dict]]:
    """Which cluster each prompt is of, and the records, from a file, gzipped or not."""
    with reading(path, "file of records"):
        (_, head), (_, first), *others = read_records(path)
        records = [first, *(r for _, r in others)]
        for r in records:  # what one lacks is said before a table, or before hours of work
            NEEDED(r)
        return head["clusters"], records


def in_order(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """System -> setting -> the record of each seed."""
    found: dict = defaultdict(lambda: defaultdict(list))
    for r in records:
        found[r["system"]][r["setting"]].append(r)
    for name, by_setting in found.items():
        if len({len(of) for of in by_setting.values()}) > 1:
            fail(f"{name}: not every setting was measured for all of its seeds: are they of one kind?")
    return found


# --- systems
@dataclass(frozen=True)
class Unit:
    """In which unit a cost is."""

    of: str  # name or token
    prices: dict | None = None  # seconds

    @property
    def title(self) -> str:
        kind = "all" if self.prices is None else "time"
        return f"{kind}/{self.of}"

    def cost(self, r: dict) -> float:
        """What one name or token of a record cost, in full forwards, or in the time of as many."""
        cost = r["cost"]["all"]
        if self.prices is not None:
            counts = r["counts"]
            seconds = counts["full"] * self.prices["full"] + counts["commit"] * self.prices["commit"]
            if r["second"]:
                seconds += counts["looks"] * self.prices[r["second"]]
            cost = seconds / self.prices["full"]
        return cost / r["per"][self.of]


@dataclass(frozen=True)
class System:
    """What is known of a system by one measure: its settings, over its seeds."""

    labels: list[str]
    values: np.ndarray  # (P, S, R): the measure of each prompt
    costs: np.ndarray  # (P, S)
    cluster: np.ndarray  # (R,) each prompt's beginning, 0 and up

    def within(self, budgets: Sequence[float]) -> np.ndarray:
        """Its mean within each of these budgets: (budgets, W)."""
        return seeds.within_budgets(self.values, self.costs, self.cluster, budgets)

    def by_rule(self) -> dict[str, "System"]:
        """Its settings by the first word of their labels: its rules, as if each were a system."""
        settings_of = defaultdict(list)
        for p, label in enumerate(self.labels):
            settings_of[label.split()[0]].append(p)
        found = {}
        for rule, every in settings_of.items():
            labels = [self.labels[p] for p in every]
            found[rule] = System(labels, self.values[every], self.costs[every], self.cluster)
        return found


def measured(records: list[dict], clusters: dict, measure: str, unit: Unit) -> dict[str, System]:
    """Each system by this measure."""
    cluster = np.unique(sum(clusters.values(), []), return_inverse=True)[1]
    systems = {}
    for name, by_setting in in_order(records).items():
        values = [[value(r, measure) for r in of_seeds] for of_seeds in by_setting.values()]
        costs = [[unit.cost(r) for r in of_seeds] for of_seeds in by_setting.values()]
        systems[name] = System(list(by_setting), np.array(values), np.array(costs), cluster)
    return systems


def value(r: dict, measure: str) -> np.ndarray:
    """(R,): a record's measure of each prompt."""
    if measure == "exist":
        return np.array([int(digit, 36) for digit in r["found"]]) / r["draws"]
    return np.array(r[measure], dtype=float)


# --- tables
def show_names(records: list[dict], clusters: dict, unit: Unit, against: str | None) -> None:
    systems = measured(records, clusters, "exist", unit)
    show_budgets(systems, unit, against)
    show_rules(systems, unit)


def show_text(records: list[dict], clusters: dict, unit: Unit, against: str | None) -> None:
    for m in ("score", "exact", "parses"):
        systems = measured(records, clusters, m, unit)
        print(f"\n{m}: the best that costs no more")
        show_budgets(systems, unit, against)
        if m == "score":
            show_rules(systems, unit)
            show_leads(systems, against)


def show_drawn(records: list[dict], clusters: dict, unit: Unit, against: str | None) -> None:
    """A row for each setting."""
    rows = []
    for name, by_setting in in_order(records).items():
        for label, of_seeds in by_setting.items():
            figures = [(r["exist"], r["distinct"], r.get("entropy", math.nan), unit.cost(r)) for r in of_seeds]
            rows.append([name, label, *(f"{mean:.3f}" for mean in np.mean(figures, axis=0))])
    print()
    print_table(["system", "setting", "exist", "distinct", "entropy", unit.title], rows)


def show_budgets(systems: dict[str, System], unit: Unit, against: str | None) -> None:
    """Every system within every budget; `against` minus each other one."""
    within = {name: of.within(BUDGETS[unit.of]) for name, of in systems.items()}
    show_shares(f"at most, {unit.title}", within, unit)
    if against:
        leads = {name: within[against] - share for name, share in within.items() if name != against}
        show_shares(f"{against} minus, {unit.title}", leads, unit, "+")


def show_rules(systems: dict[str, System], unit: Unit) -> None:
    """What each rule of the first system, the base, has within each budget."""
    name, base = next(iter(systems.items()))
    within = {rule: of.within(BUDGETS[unit.of]) for rule, of in base.by_rule().items()}
    show_shares(f"{name}, {unit.title}", within, unit)


def show_shares(title: str, within: dict[str, np.ndarray], unit: Unit, sign: str = "") -> None:
    """A row for each of these."""
    rows = [[name, *(interval(share, sign) for share in of)] for name, of in within.items()]
    print()
    print_table([title, *map(str, BUDGETS[unit.of])], rows)


def show_leads(systems: dict[str, System], against: str | None) -> None:
    """What `against` has more than each other system, the mean over many budgets: it hangs little on which system's
    next setting just misses one."""
    if against:
        within = {name: of.within(AVERAGED).mean(0) for name, of in systems.items()}
        own = within.pop(against)
        rows = [[name, interval(own - mean, "+")] for name, mean in within.items()]
        print()
        print_table([f"{against} minus, over budgets of {AVERAGED[0]} to {AVERAGED[-1]}", "mean"], rows)


# --- the command line
@command
def main() -> None:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("records", type=Path, help="a file of beyond.sweep, gzipped or not")
    add("--against", metavar="NAME", help="the system whose share minus every other's is shown, too")
    add("--prices", type=Path, help="a JSON of prices, like beyond/prices.json: all tables again, in time")
    # fmt: on
    args = parser.parse_args()
    clusters, records = load(args.records)
    names = list(dict.fromkeys(r["system"] for r in records))
    if args.against and args.against not in names:
        fail(f"--against {args.against} is none of the systems: {', '.join(names)}")

    # what they are records of
    show, of = show_names, "name"
    if "documents" in clusters:
        show, of = show_text, "token"
    elif records[0]["temperature"] > 0:
        show, of = show_drawn, "token"

    show(records, clusters, Unit(of), args.against)
    if args.prices:
        with reading(args.prices, "list of prices"):
            unit = Unit(of, json.loads(args.prices.read_text()))
            for r in records:  # what it lacks is said before a table
                unit.cost(r)
        show(records, clusters, unit, args.against)


if __name__ == "__main__":
    main()
