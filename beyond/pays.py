"""Does a second look pay? Existing names against everything that a decoder runs, for any systems, over their seeds.

A system is a name, a checkpoint, perhaps an adapter; systems of one name are its seeds of training. Each decodes the
same held-out and trained prompts (evaluate.py says how) in every setting that its user could choose (decoders.py). The
same weights with the paper's Stage B switched off are a system of their own, "NAME, off".

    exist     share of the completions that are names, held-out and trained prompts together
    distinct  different existing names, a share of one seed's completions
    entropy   of the draws of one prompt, nats, mean over prompts; plug-in, so at most ln(draws)
    all, mult, serial    what a token costs (costs.py). `all` and `serial` are in forwards of the first system, and one
              of more layers is charged its n_layer over the first's; mult is in full forwards of the first system

Intervals: 95 %, 1,000 resamples of the different beginnings and of the seeds of training, see seeds.py.

The tables of budgets are what a user gets who may not pay more: of the settings that cost no more, the best on one half
of the beginnings, judged on the other. With --against NAME, the differences of these shares, paired, and
their mean and least over many budgets. A setting's cost is its mean over the seeds, and in a resample over its own.

    python -m beyond.pays --system base out/base --system head out/base out/joint --against head --out pays.jsonl
"""

import gzip
import json
import math
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import evaluate
import sample
from beyond import seeds
from beyond.costs import Reading, costs, full_forward
from beyond.decoders import set_up, settings
from beyond.rule_steps import follow
from beyond.seeds import Draws, interval
from cache import Output
from checkpoint import load_model, load_tokenizer
from evaluate import print_table
from lib.data import exists
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, fail, pick_device, replace_file
from model import Model
from sample import Decoding, generate

# P settings, S seeds of training, R prompts, C beginnings, W resamples

BUDGETS = (0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
AVERAGED = tuple(n / 100 for n in range(36, 101))  # budgets of the mean lead
COSTS = ("all", "mult", "serial")
VARIETY = ("distinct", "entropy")
NEEDED = ("found", "mult/token")  # what older records may lack
PER_RECORD = {"low", "high"}  # Wilson's interval, of independent completions: these are not


# --- how often it looked again
def counted(plain: Callable, looks: Counter) -> Callable:
    """A decoding step that adds to looks[i] how often Stage B, a head or a second reading ran for row i of a decode."""

    def step(engine, z, prompt, any_masked, u, d):
        follow(engine, len(z))
        s = plain(engine, z, prompt, any_masked, u, d)

        # a head says where it ran, or how often, and so does a rule; Stage B runs where there is a bundle
        if "looks" in s:
            ran = s["looks"]
        elif "partial" in s:
            ran = (s["partial"] > 0) * max(1, d.n_rounds)
        else:
            ran = s["bundle"].any(-1) * d.n_rounds
        looks.update(dict(zip(engine.numbers, ran.tolist(), strict=True)))
        return s

    return step


# --- completions
def numbered(prompts: list[list[int]]) -> list[int]:
    """Each prompt's beginning, (R,): equal prompts have one, numbered in the order in which they appear."""
    seen = {}
    return [seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts]


def complete(
    model: Model, prompts: list[list[int]], d: Decoding, draws: range, looks: Counter
) -> tuple[list[Output], int]:
    """-> outputs, len(draws) * R, draw after draw, and all their second looks. Greedy completions of equal prompts are
    equal, and are decoded once."""
    at = list(range(len(prompts)))  # which row of the decode is whose
    if d.temperature == 0:
        at = numbered(prompts)
    rows = dict(zip(at, prompts, strict=True))

    outputs = []
    ran = 0
    for seed in draws:
        looks.clear()
        decoded = generate(model, list(rows.values()), d, seed)
        outputs += [decoded[i] for i in at]
        ran += sum(looks[i] for i in at)
    return outputs, ran


def entropy(texts: list[str]) -> float:
    """Of the distribution of these texts, nats: the plug-in estimate."""
    n = len(texts)
    return sum(times / n * math.log(n / times) for times in Counter(texts).values())


def describe(
    model: Model, tokenizer: Tokenizer, prompts: dict[str, list[int]], outputs: list, looks: int,
    reading: Reading | None = None,
) -> dict:  # fmt: skip
    """What a record holds of one decode, draw after draw; prompts: name -> ids. "found" has a digit (base 36) for each
    prompt: how many of its completions exist."""
    R = len(prompts)
    draws = len(outputs) // R
    every_prompt = [*prompts.values()] * draws
    written = [tokenizer.decode(p + o.tokens) for p, o in zip(every_prompt, outputs, strict=True)]

    # the judge's figures, but for those of a name and for its interval
    judged = evaluate.judge(list(prompts) * draws, written, outputs, model.partial_cost)
    r = {"draws": draws, "n_layer": model.cfg.n_layer, "mult/full": full_forward(model)}
    r |= {k: v for k, v in judged.items() if k not in PER_RECORD and not k.endswith("/name")}

    # what a token costs
    tokens = sum(len(o.tokens) for o in outputs)
    nfe = {kind: sum(o.nfe[kind] for o in outputs) for kind in ("full", "partial", "commit")}
    r |= {f"{kind}/token": cost / tokens for kind, cost in costs(model, nfe, looks, reading).items()}

    # written[p::R] are the completions of prompt p
    r["found"] = ""
    for p in range(R):
        n_exist = sum(exists(text) is not None for text in written[p::R])
        r["found"] += np.base_repr(n_exist, 36)
    if draws > 1:
        r["entropy"] = sum(entropy(written[p::R]) for p in range(R)) / R
    return r


# --- records
def measure(name: str, ckpt: str, adapter: str | None, known: dict, args: Namespace) -> tuple[dict, list[dict]]:
    """The prompts' beginnings by group (the known ones, if any are), and a record for each setting."""
    model = load_model(ckpt, pick_device("cpu"), torch.float32, adapter)
    tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
    if tokenizer is None or not (Path(ckpt) / "names.json").exists():
        fail(f"{ckpt} is no checkpoint of train.py --data names, nor of beyond.names_base")

    # held-out and trained prompts together
    groups = {group: evaluate.draw_names(args.prompts, group, tokenizer) for group in ("held out", "trained")}
    prompts = {name: ids for drawn in groups.values() for name, ids in drawn.items()}
    beginning = iter(numbered(list(prompts.values())))
    clusters = {group: [next(beginning) for _ in drawn] for group, drawn in groups.items()}
    if known and known != clusters:
        fail(f"{ckpt} would complete other prompts than the records before it: the same tokenizer and --prompts?")

    looks = Counter()
    own_step = sample.step_of(model)
    records = []
    every = settings(model, adapter, args)
    for s in tqdm(every, desc=f"{name} {adapter or ckpt}", leave=False, disable=None):
        model.step = counted(set_up(model, s, own_step), looks)
        d = s.decoding
        draws = range(args.seed, args.seed + 1)
        if d.temperature > 0:
            draws = range(args.seed, args.seed + args.draws)
        outputs, ran = complete(model, list(prompts.values()), d, draws, looks)
        record = dict(system=name, ckpt=ckpt, adapter=adapter, setting=s.label, temperature=d.temperature)
        if s.off:
            record["system"] += ", off"
        record["top_p"] = d.top_p
        records.append(record | describe(model, tokenizer, prompts, outputs, ran, s.reading))
    return clusters, records


def load(path: str, needed: Sequence[str] = NEEDED) -> tuple[dict, list[dict]]:
    """As `measure` returns them, from a file, gzipped or not: clusters in its first line, a record in each other, with
    at least the fields that are needed."""
    open_file = open
    if path.endswith(".gz"):
        open_file = gzip.open
    try:
        with open_file(path) as file:
            head, *records = [json.loads(line) for line in file]
        for record in records:
            itemgetter(*needed)(record)
        return head["clusters"], records
    except (OSError, EOFError, ValueError, TypeError, KeyError) as e:
        fail(f"--records {path} does not say line by line what was measured, and on what (measure again): {e!r}")


def save(path: Path, clusters: dict, records: list[dict]) -> None:
    lines = [json.dumps(record) + "\n" for record in [{"clusters": clusters}, *records]]
    replace_file(path, lambda p: p.write_text("".join(lines)))


# --- systems
@dataclass
class System:
    """What is known of a system at one temperature and top_p: its settings, over its seeds."""

    labels: list[str]
    values: np.ndarray  # (P, S, R): share of each prompt's completions that exist (text.py: a measure of each span)
    figures: dict[str, np.ndarray]  # of COSTS, and here of VARIETY: (P, S)


def by_system(records: list[dict], first: dict) -> dict[str, System]:
    """In the order in which they appear. Costs are in forwards of the first record's model."""
    return {name: system(of, first) for name, of in over_seeds(records).items()}


def over_seeds(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """System -> setting -> the record of each seed, in one order. All have the seeds of the system's first setting."""
    groups = defaultdict(lambda: defaultdict(dict))
    for r in records:
        of_setting = groups[r["system"]][r["setting"]]
        seed = (r["ckpt"], r["adapter"])
        if seed in of_setting:
            fail(f"{r['system']} has {r['setting']} of {r['ckpt']} twice: give each of its seeds once")
        of_setting[seed] = r

    found = defaultdict(dict)
    for name, by_setting in groups.items():
        trained = list(next(iter(by_setting.values())))
        for label, of in by_setting.items():
            if of.keys() != set(trained):
                fail(f"{name}: {label} was not measured for all of its {len(trained)} seeds: are they of one kind?")
            found[name][label] = [of[seed] for seed in trained]
    return found


def system(by_setting: dict[str, list[dict]], first: dict) -> System:
    """by_setting: the record of each seed."""
    exist = []
    figures = defaultdict(list)
    for in_order in by_setting.values():
        exist.append([np.array([int(digit, 36) for digit in r["found"]]) / r["draws"] for r in in_order])
        for k in VARIETY:
            figures[k].append([r.get(k, math.nan) for r in in_order])
        for k in COSTS:
            figures[k].append([in_forwards_of(first, r, k) for r in in_order])
    return System(list(by_setting), np.array(exist), {k: np.array(of) for k, of in figures.items()})


def in_forwards_of(first: dict, r: dict, kind: str) -> float:
    """What a token costs by this record, in forwards of the first one's model."""
    if kind == "mult":
        return r["mult/token"] / first["mult/full"]
    return r[f"{kind}/token"] * r["n_layer"] / first["n_layer"]


# --- tables
def show_best(systems: dict[str, System], cluster: np.ndarray, draws: Draws) -> None:
    """Each system's largest share of all settings, which flatters a little, and what it costs."""
    rows = []
    for name, of in systems.items():
        best = int(of.values.mean((1, 2)).argmax())
        rows.append([name, *row_of(of, best, ("distinct", *COSTS), cluster, draws)])
    print_table(["largest share", "setting", "seeds", "exist", "distinct", *COSTS], rows)


def show_settings(systems: dict[str, System], cluster: np.ndarray, draws: Draws) -> None:
    """A row for each system and setting."""
    rows = []
    for name, of in systems.items():
        for p in range(len(of.labels)):
            rows.append([name, *row_of(of, p, (*VARIETY, *COSTS), cluster, draws)])
    print_table(["system", "setting", "seeds", "exist", *VARIETY, *COSTS], rows)


def row_of(of: System, p: int, shown: tuple[str, ...], cluster: np.ndarray, draws: Draws) -> list[str]:
    """A setting's cells, with these figures."""
    sums = seeds.by_beginning(of.values[p : p + 1], cluster)
    share = interval(seeds.shares(sums, draws)[:, 0])
    figures = [f"{of.figures[k][p].mean():.3f}" for k in shown]
    return [of.labels[p], str(of.values.shape[1]), share, *figures]


def budgets(
    systems: dict[str, System], cluster: np.ndarray, draws: Draws, limits: Sequence[float] = BUDGETS
) -> dict[str, dict[str, np.ndarray]]:
    """Kind of cost -> system -> its mean within each of these budgets, (budgets, W)."""
    found = {kind: {} for kind in COSTS}
    for name, of in systems.items():
        sums = seeds.by_beginning(of.values, cluster)
        within = seeds.within_budgets(sums, {kind: of.figures[kind] for kind in COSTS}, limits, draws)
        for kind in COSTS:
            found[kind][name] = within[kind]
    return found


def show_budgets(
    found: dict[str, dict[str, np.ndarray]], against: str | None, limits: Sequence[float] = BUDGETS
) -> None:
    """For each kind of cost, every system within every budget; `against` minus each other one."""
    for kind, within in found.items():
        print()
        rows = [[name, *map(interval, share)] for name, share in within.items()]
        print_table([f"at most, {kind}/token", *map(str, limits)], rows)
        if against:
            print()
            rows = list(differences(within, against))
            print_table([f"{against} minus, {kind}/token", *map(str, limits)], rows)


def differences(within: dict[str, np.ndarray], against: str) -> Iterator[list[str]]:
    """Rows: what `against` has more than each other system, in the same resamples."""
    for name, share in within.items():
        if name != against:
            yield [name, *(interval(more, "+") for more in within[against] - share)]


def show_leads(
    systems: dict[str, System], cluster: np.ndarray, draws: Draws, against: str, limits: Sequence[float] = AVERAGED
) -> None:
    """What `against` has more than each other system over many budgets, the mean and the least: a mean hangs little on
    which system's next setting just misses a budget. "-" where a budget pays for nothing."""
    rows = defaultdict(list)
    for within in budgets(systems, cluster, draws, limits).values():
        for name, share in within.items():
            if name != against:
                lead = within[against] - share  # (budgets, W)
                least = lead[:, 0].argmin()
                rows[name] += [interval(lead.mean(0), "+"), interval(lead[least], "+")]
    print()
    title = f"{against} minus, over budgets of {limits[0]} to {limits[-1]}"
    columns = [f"{kind}, {which}" for kind in COSTS for which in ("mean", "least")]
    print_table([title, *columns], [[name, *leads] for name, leads in rows.items()])


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


def show_rules(
    systems: dict[str, System], cluster: np.ndarray, draws: Draws, limits: Sequence[float] = BUDGETS
) -> None:
    """Of each system that was decoded by several rules, what each rule has within each budget of `all`."""
    for name, of in systems.items():
        rules = by_rule(of)
        if len(rules) > 2:  # a joint head is on or off
            print()
            within = budgets(rules, cluster, draws, limits)["all"]
            rows = [[rule, *map(interval, share)] for rule, share in within.items()]
            print_table([f"{name}, all/token", *map(str, limits)], rows)


def show(clusters: dict, records: list[dict], against: str | None) -> None:
    """All tables. Of what was sampled, every setting."""
    cluster = np.array(sum(clusters.values(), []))
    if cluster.max() == 0:
        fail("all prompts are equal: give more --prompts, the halves need two different ones")
    draws = seeds.draw(cluster)
    first = records[0]
    for temperature, top_p in dict.fromkeys((r["temperature"], r["top_p"]) for r in records):
        of = [r for r in records if (r["temperature"], r["top_p"]) == (temperature, top_p)]
        systems = by_system(of, first)
        if temperature == 0:
            show_best(systems, cluster, draws)
            show_budgets(budgets(systems, cluster, draws), against)
            if against:
                show_leads(systems, cluster, draws, against)
            show_rules(systems, cluster, draws)
        else:
            print(f"\ntemperature {temperature:g}, top_p {top_p:g}")
            show_settings(systems, cluster, draws)


# --- the command line
def build_parser() -> Parser:
    parser = Parser(__doc__)
    # fmt: off
    add = parser.add_argument_group("what is compared").add_argument
    add("--system", nargs="+", action="append", metavar=("NAME", "CKPT [ADAPTER]"), default=[],
        help="again for another one, or for more seeds of a name, of all names in one order")
    add("--against", metavar="NAME", help="the system whose share minus every other's is shown, too")
    add("--prompts", type=bounded(int, 1), default=256, help="names held out, and as many trained")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", nargs="+", type=bounded(float, 0), default=[0.0], help="several; 0: greedy")
    add("--top_p", nargs="+", type=bounded(float, 1e-6, 1), default=[1.0], help="with a temperature")
    add("--draws", type=bounded(int, 1, 35), default=1, help="completions of a prompt, if not greedy")
    add("--seed", type=int, default=0, help="of the first draw; the next ones take the numbers after it")

    add = parser.add_argument_group("records").add_argument
    add("--out", help="file for the records of every setting, a JSON object a line")
    add("--records", nargs="+", default=[], help="files of records that were written before")
    # fmt: on
    return parser


def read_records(paths: list[str], needed: Sequence[str] = NEEDED) -> tuple[dict, list[dict]]:
    """Clusters and records of several files about the same prompts."""
    clusters = {}
    records = []
    for path in paths:
        found, more = load(path, needed)
        if clusters and found != clusters:
            fail(f"--records {path} is about other prompts than the file before it")
        clusters = found
        records += more
    return clusters, records


def check_systems(args: Namespace, records: list[dict]) -> None:
    """Refuse what cannot be meant."""
    if any(len(system) not in (2, 3) for system in args.system) or not args.system + args.records:
        fail("--system takes NAME CKPT or NAME CKPT ADAPTER; give at least one, or --records")

    # Stage B, switched off, is a system of its own
    names = {r["system"] for r in records} | {name for name, *_ in args.system}
    if args.against and args.against.removesuffix(", off") not in names:
        fail(f"--against {args.against} is none of the systems: {', '.join(sorted(names))}")


def main() -> None:
    args = build_parser().parse_args()
    clusters, records = read_records(args.records)
    check_systems(args, records)
    if args.draws > 1 and not any(args.temperature):
        fail(f"--draws {args.draws}: greedy completions of a prompt are all the same; give a --temperature")

    # saved after each system: nothing that was measured is lost
    for name, ckpt, *rest in args.system:
        adapter = None
        if rest:
            adapter = rest[0]
        clusters, more = measure(name, ckpt, adapter, clusters, args)
        records += more
        if args.out:
            save(Path(args.out), clusters, records)
    show(clusters, records, args.against)


if __name__ == "__main__":
    main()
