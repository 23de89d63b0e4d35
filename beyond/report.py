"""Print the tables of a sweep's records: what a user gets who may pay so much.

    exist     share of the completions that are names (a text's measures: see spans.py)
    distinct  different existing names, a share of one seed's completions
    entropy   of the draws of one prompt, nats, mean over prompts; plug-in, so at most ln(draws)
    all       forwards a name or a token, everything counted, in full ones of the first system: one of more layers is
              charged its n_layer over the first's
    time      the same by a list of prices, --prices beyond/prices.json: seconds of a full forward, a commit, a run of
              Stage B, a look of a head, S2D2's reading. In full forwards of that list

A table of budgets has of the settings that cost no more the best on one half of the beginnings, judged on the other
(seeds.py). With --mix a user may also use two settings by turns, and has what lies between them. With --against NAME
the differences of these, paired, and their mean and least over many budgets. A setting's cost is its mean over the
seeds, and in a resample over its own.

    python -m beyond.report results/pays/records.jsonl.gz --against head --unit name --mix
"""

import gzip
import json
import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beyond import seeds
from beyond.seeds import Choice, Draws, interval
from evaluate import print_table
from lib.util import Parser, command, fail, read_json, reading

# P settings, S seeds of training, R prompts, C beginnings, W resamples

VARIETY = ("distinct", "entropy")
MEASURES = ("score", "exact", "parses")  # of text

# by unit: budgets, and those of the mean lead. A name has seven tokens
BUDGETS = {
    "token": (0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0),
    "name": (2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 14.0),
    "token of a span": (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.8, 1.0),
}
AVERAGED = {
    "token": tuple(n / 100 for n in range(36, 101)),
    "name": tuple(n / 10 for n in range(25, 71)),
    "token of a span": tuple(n / 100 for n in range(20, 61)),
}


# --- records
def load(path: Path) -> tuple[dict, list[dict]]:
    """Which cluster each prompt is of, and the records, from a file, gzipped or not."""
    with reading(path, "file of records"), gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        head, *records = [json.loads(line) for line in file]
        return head["clusters"], [with_cost(r) for r in records]


def with_cost(r: dict) -> dict:
    """A record of today. An older one has the cost of a token alone: a number for all names, or a list of each
    span's."""
    if "cost" in r:
        return r
    cost = r["all/token"] if "found" in r else float(np.mean(r["all"]))
    return {"n_layer": 1, "cost": {"all": cost}, "per": {"token": 1}} | r


def read_records(paths: list[Path]) -> tuple[dict, list[dict]]:
    """Several files about the same prompts."""
    clusters: dict = {}
    records: list[dict] = []
    for path in paths:
        found, more = load(path)
        if clusters and found != clusters:
            fail(f"{path} is about other prompts than the file before it")
        clusters = found
        records += more
    return clusters, records


def in_order(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """System -> setting -> the record of each seed, in one order. All have the seeds of the system's first setting."""
    groups: dict = defaultdict(lambda: defaultdict(dict))
    for r in records:
        of_setting = groups[r["system"]][r["setting"]]
        seed = (r["ckpt"], r.get("adapter"))
        if seed in of_setting:
            fail(f"{r['system']} has {r['setting']} of {r['ckpt']} twice: give each of its seeds once")
        of_setting[seed] = r

    found: dict = defaultdict(dict)
    for name, by_setting in groups.items():
        trained = list(next(iter(by_setting.values())))
        for label, of in by_setting.items():
            if of.keys() != set(trained):
                fail(f"{name}: {label} was not measured for all of its {len(trained)} seeds: are they of one kind?")
            found[name][label] = [of[seed] for seed in trained]
    return found


# --- systems
@dataclass
class System:
    """What is known of a system at one temperature and top_p: its settings, over its seeds."""

    labels: list[str]
    values: np.ndarray  # (P, S, R): the measure of each prompt
    figures: dict[str, np.ndarray]  # of costs and VARIETY: (P, S)


@dataclass(frozen=True)
class Unit:
    """In which unit a cost is."""

    name: str  # token or name
    first: dict  # the record of whose model a forward is
    prices: dict | None = None  # seconds

    @property
    def kind(self) -> str:
        """What the tables are of."""
        return "time" if self.prices else "all"

    def forwards(self, r: dict) -> float:
        return self.of_one(r, r["cost"]["all"])

    def time(self, r: dict) -> float:
        """All of its forwards, by their prices, in full forwards."""
        counts = r["counts"]
        seconds = counts["full"] * self.prices["full"] + counts["commit"] * self.prices["commit"]
        if r["second"]:
            seconds += counts["looks"] * self.prices[r["second"]]
        return self.of_one(r, seconds / self.prices["full"])

    def of_one(self, r: dict, cost: float) -> float:
        """The cost of one token or name, in forwards of the first model."""
        return cost / r["per"][self.name] * r["n_layer"] / self.first["n_layer"]


def measured(
    records: list[dict], clusters: dict, measure: str, unit: Unit | None = None
) -> tuple[dict[str, System], np.ndarray]:
    """Each system by this measure at the prompts that it applies to, and each such prompt's cluster, numbered anew. (A
    span parses or not only if it is of Python, whatever is written there.)"""
    unit = unit or Unit("token", records[0])
    systems = {}
    for name, by_setting in in_order(records).items():
        values = of_each(by_setting, lambda r: value(r, measure))  # (P, S, R)
        applies = ~np.isnan(values[0, 0])
        figures = {k: of_each(by_setting, lambda r, k=k: r.get(k, math.nan)) for k in VARIETY}
        figures["all"] = of_each(by_setting, unit.forwards)
        if unit.prices:
            figures["time"] = of_each(by_setting, unit.time)
        systems[name] = System(list(by_setting), values[..., applies], figures)
    cluster = np.array(sum(clusters.values(), []))[applies]
    return systems, np.unique(cluster, return_inverse=True)[1]


def of_each(by_setting: dict[str, list[dict]], read: Callable[[dict], np.ndarray | float]) -> np.ndarray:
    """What is read of every record: (P, S, ..)."""
    return np.array([[read(r) for r in of_seeds] for of_seeds in by_setting.values()])


def value(r: dict, measure: str) -> np.ndarray:
    """(R,): a record's measure of each prompt."""
    if measure == "exist":
        return np.array([int(digit, 36) for digit in r["found"]]) / r["draws"]
    return np.array(r[measure], dtype=float)


def by_rule(of: System) -> dict[str, System]:
    """A system's settings by the first word of their labels: its rules, as if each were a system."""
    settings_of = defaultdict(list)
    for p, label in enumerate(of.labels):
        settings_of[label.split()[0]].append(p)
    found = {}
    for rule, every in settings_of.items():
        labels = [of.labels[p] for p in every]
        found[rule] = System(labels, of.values[every], {k: figure[every] for k, figure in of.figures.items()})
    return found


# --- tables
@dataclass
class Tables:
    """What all tables of some systems share."""

    systems: dict[str, System]
    cluster: np.ndarray
    draws: Draws
    unit: Unit
    of: str  # a key of BUDGETS
    choice: Choice

    def within(self, limits: Sequence[float], systems: dict[str, System] | None = None) -> dict[str, np.ndarray]:
        """System -> its mean within each of these budgets, (budgets, W)."""
        kind = self.unit.kind
        found = {}
        for name, of in (systems or self.systems).items():
            sums = seeds.by_beginning(of.values, self.cluster)
            costs = {kind: of.figures[kind]}
            found[name] = seeds.within_budgets(sums, costs, limits, self.draws, self.choice)[kind]
        return found

    def show_settings(self) -> None:
        """A row for each system and setting."""
        shown = (*VARIETY, self.unit.kind)
        rows = []
        for name, of in self.systems.items():
            share = seeds.shares(seeds.by_beginning(of.values, self.cluster), self.draws)  # (W, P)
            for p, label in enumerate(of.labels):
                figures = [f"{of.figures[k][p].mean():.3f}" for k in shown]
                rows.append([name, label, str(of.values.shape[1]), interval(share[:, p]), *figures])
        print_table(["system", "setting", "seeds", "exist", *shown], rows)

    def show_budgets(self, against: str | None) -> None:
        """Every system within every budget; `against` minus each other one."""
        limits = BUDGETS[self.of]
        within = self.within(limits)
        title = f"{self.unit.kind}/{self.unit.name}"
        self.show_shares(f"at most, {title}", within)
        if against:
            rows = []
            for name, share in within.items():
                if name != against:
                    rows.append([name, *(interval(lead, "+") for lead in within[against] - share)])
            print()
            print_table([f"{against} minus, {title}", *map(str, limits)], rows)

    def show_shares(self, title: str, within: dict[str, np.ndarray]) -> None:
        """A row for each of these."""
        print()
        rows = [[name, *map(interval, share)] for name, share in within.items()]
        print_table([title, *map(str, BUDGETS[self.of])], rows)

    def show_leads(self, against: str) -> None:
        """What `against` has more than each other system over many budgets, the mean and the least: a mean hangs
        little on which system's next setting just misses a budget. "-" where a budget pays for nothing."""
        limits = AVERAGED[self.of]
        within = self.within(limits)
        rows = []
        for name, share in within.items():
            if name != against:
                lead = within[against] - share  # (budgets, W)
                least = lead[:, 0].argmin()
                rows.append([name, interval(lead.mean(0), "+"), interval(lead[least], "+")])
        kind = self.unit.kind
        print()
        title = f"{against} minus, over budgets of {limits[0]} to {limits[-1]}"
        print_table([title, f"{kind}, mean", f"{kind}, least"], rows)

    def show_rules(self) -> None:
        """Of each system that was decoded by several rules, what each has within each budget."""
        for name, of in self.systems.items():
            rules = by_rule(of)
            if len(rules) > 2:  # a head is on or off
                title = f"{name}, {self.unit.kind}/{self.unit.name}"
                self.show_shares(title, self.within(BUDGETS[self.of], rules))


def show_names(records: list[dict], clusters: dict, unit: Unit, args: Namespace) -> None:
    """Greedy: all tables of budgets. Of what was sampled, every setting."""
    for temperature, top_p in dict.fromkeys((r["temperature"], r["top_p"]) for r in records):
        of = [r for r in records if (r["temperature"], r["top_p"]) == (temperature, top_p)]
        systems, cluster = measured(of, clusters, "exist", unit)
        tables = Tables(systems, cluster, seeds.draw(cluster), unit, unit.name, args.choice)
        if temperature > 0:
            print(f"\ntemperature {temperature:g}, top_p {top_p:g}")
            tables.show_settings()
            continue
        tables.show_budgets(args.against)
        if args.against:
            tables.show_leads(args.against)
        tables.show_rules()


def show_text(records: list[dict], clusters: dict, unit: Unit, args: Namespace) -> None:
    """Of each measure the tables of budgets, and of the score all of them."""
    for m in MEASURES:
        if np.isnan(value(records[0], m)).all():  # no prose parses
            continue
        systems, cluster = measured(records, clusters, m, unit)
        tables = Tables(systems, cluster, seeds.draw(cluster), unit, "token of a span", args.choice)
        print(f"\n{m}: the best setting that costs no more")
        tables.show_budgets(args.against)
        if m == "score":
            tables.show_rules()
            if args.against:
                tables.show_leads(args.against)


# --- the command line
def read_units(records: list[dict], args: Namespace) -> list[Unit]:
    """What --unit and --prices ask for, where the records have it: forwards, and their time if it is asked for."""
    per = set.intersection(*(set(r["per"]) for r in records))
    name = args.unit or ("name" if "name" in per else "token")
    if name not in per:
        fail(f"--unit {name}: these records have costs per {' or '.join(sorted(per))}")
    units = [Unit(name, records[0])]
    if args.prices:
        prices = read_json(args.prices, "list of prices")
        if not all("counts" in r for r in records):
            fail("--prices: these records have no counts of forwards: measure again with beyond.sweep")
        wanted = {"full", "commit"} | {r["second"] for r in records if r["second"]}
        if missing := wanted - prices.keys():
            fail(f"--prices {args.prices} lacks {', '.join(sorted(missing))}")
        units.append(Unit(name, records[0], prices))
    return units


@command
def main() -> None:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("records", nargs="+", type=Path, help="files of beyond.sweep, gzipped or not, about the same prompts")
    add("--against", metavar="NAME", help="the system whose share minus every other's is shown, too")
    add("--unit", choices=["token", "name"], help="what a cost is of (a name, where records have it)")
    add("--mix", dest="choice", action="store_const", const=seeds.mixture, default=seeds.one_setting,
        help="two settings may be used by turns")
    add("--prices", type=Path, help="a JSON of prices, like beyond/prices.json: all tables again, in time")
    # fmt: on
    args = parser.parse_args()
    clusters, records = read_records(args.records)
    if not records:
        fail("there are no records yet")
    names = list(dict.fromkeys(r["system"] for r in records))
    if args.against and args.against not in names:
        fail(f"--against {args.against} is none of the systems: {', '.join(names)}")
    if len(set(sum(clusters.values(), []))) < 2:
        fail("all prompts are equal: give more --prompts, the halves need two different ones")
    show = show_text if "documents" in clusters else show_names
    for unit in read_units(records, args):
        show(records, clusters, unit, args)


if __name__ == "__main__":
    main()
