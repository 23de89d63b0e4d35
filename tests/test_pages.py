"""The tables on names and toys are what the records say. `pytest tests/test_pages.py`"""

import json
import re
from itertools import product
from statistics import mean, stdev

import pytest
from common import ROOT

from experiments.names import share, within

RECORDS = [json.loads(line) for line in (ROOT / "results" / "names" / "records.jsonl").read_text().splitlines()]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "results" / "names" / "README.md").read_text()

# a row of the page: system, way, dial, edits
ROWS = {
    "a left-to-right model of the base's size": ("left to right", "ones", 1, None),
    "the same, 1,000 steps": ("left to right, 1,000 steps", "ones", 1, None),
    "base, one at a time, text read in blocks of one": ("base", "ones", 1, None),
    "base, one at a time from the left": ("base", "run", 1, None),
    "base, longest run above .7": ("base", "run", 0.7, None),
    "base, longest run above .5": ("base", "run", 0.5, None),
    "base, surest first, above .7, edits above .5 (LLaDA2.1's rule)": ("base", "threshold", 0.7, 0.5),
    "base, all at once": ("base", "threshold", -1, None),
    "paper, longest run above .7": ("paper", "run", 0.7, None),
    "paper, Stage B on, above .7, ungated edits": ("paper", "stage_b", 0.7, 0),
    "the same, Stage B off": ("paper", "threshold", 0.7, 0),
    "alpha, longest run above .7": ("alpha", "run", 0.7, None),
    "alpha, above .7, no edits": ("alpha", "stage_b", 0.7, None),
    "alpha, all at once, no edits": ("alpha", "stage_b", -1, None),
    "causal, whole blocks": ("causal", "run", 0, None),
    "causal, longest run above .5": ("causal", "run", 0.5, None),
    "causal, longest run above .8": ("causal", "run", 0.8, None),
    "causal, longest run above .95": ("causal", "run", 0.95, None),
}
# and of the README
SHORT = {
    "a left-to-right model of its size": ("left to right", "ones", 1, None),
    "base, one at a time, in blocks of one": ("base", "ones", 1, None),
    "base, longest run above .7": ("base", "run", 0.7, None),
    "base, LLaDA2.1's rule: fill above .7, edit above .5": ("base", "threshold", 0.7, 0.5),
    "base, all at once": ("base", "threshold", -1, None),
    "paper, longest run above .7": ("paper", "run", 0.7, None),
    "paper: fill above .7, edit on disagreement": ("paper", "stage_b", 0.7, 0),
    "the same, Stage B off": ("paper", "threshold", 0.7, 0),
    "alpha .5, all at once": ("alpha", "stage_b", -1, None),
    "causal, whole blocks": ("causal", "run", 0, None),
    "causal, longest run above .5": ("causal", "run", 0.5, None),
}


def of(system: str, way: str, dial: float, edits: float | None) -> list[dict]:
    """A setting's records, seed by seed."""
    key = (system, way, dial, edits)
    found = [r for r in RECORDS if (r["system"], r["way"], r["dial"], r["edits"]) == key]
    return sorted(found, key=lambda record: record["seed"])


def means(records: list[dict]) -> tuple[float, float]:
    """The share that exists, and forwards a name."""
    return mean(share(record["exist"]) for record in records), mean(record["forwards"] for record in records)


def cells(text: str, name: str) -> list[str]:
    row = re.search(rf"^\| ?{re.escape(name)} ?\|(.*)\|$", text, re.M)
    return [cell.strip() for cell in row[1].split("|")]


def interval(pairs: list[float]) -> str:
    """The mean of differences and its 95 % interval: 12.706 standard errors for two, 4.303 for three."""
    margin = {2: 12.706, 3: 4.303}[len(pairs)] * stdev(pairs) / len(pairs) ** 0.5
    middle, low, high = (mean(pairs) + x for x in (0, -margin, margin))
    return f"{middle:+.3f} ({low:.3f} to {high:.3f})".replace("0.", ".")


def short(x: float, digits: int = 3) -> str:
    return f"{x:.{digits}f}".lstrip("0")


@pytest.mark.parametrize("text, rows", [(PAGE, ROWS), (README, SHORT)], ids=["the page", "the README"])
def test_rows(text, rows):
    """In the README of three seeds the lowest and the highest."""
    for name, setting in rows.items():
        records = of(*setting)
        shares = [share(record["exist"]) for record in records]
        exist, forwards, per_token = cells(text, name)
        seeds = " ".join(map(short, shares)) if text is PAGE else f"{short(min(shares))}, {short(max(shares))}"
        assert exist == f"{short(mean(shares))} ({seeds})", name
        assert text is PAGE or len(shares) == 3
        assert forwards == f"{mean(record['forwards'] for record in records):.1f}", name
        assert float(per_token) == pytest.approx(mean(record["per_token"] for record in records), abs=0.0051), name


# causal Stage B with the token before and without: system, how many beginnings were left out
TOLD = {
    "a beam's rows: causal": ("causal", 0),
    "a beam's rows: told": ("told", 0),
    "512 other beginnings: causal": ("causal", 512),
    "512 other beginnings: told": ("told", 512),
    "the text alone: causal": ("causal_text", 0),
    "the text alone: told": ("told_text", 0),
}


TRAININGS = [json.loads(line) for line in (ROOT / "results" / "names" / "told.jsonl").read_text().splitlines()]


def trainings(name: str, dial: float) -> list[dict]:
    """Three of them, on one base."""
    system, skip = TOLD[name]
    own = [r for r in TRAININGS if (r["system"], r["way"], r["dial"], r.get("skip", 0)) == (system, "run", dial, skip)]
    assert sorted(r["seed"] for r in own) == [1, 2, 3]
    return sorted(own, key=lambda r: r["seed"])


@pytest.mark.parametrize("name", TOLD)
def test_what_the_token_before_is_worth(name):
    found = [trainings(name, dial) for dial in (0, 0.5, 0.8)]
    figures = map(means, found)
    assert cells(PAGE, name) == [f"{short(exist)}, {forwards:.1f}" for exist, forwards in figures]


def test_differences_of_trainings_have_their_intervals():
    rows = re.findall(r"^\|difference\|(.*)\|$", PAGE, re.M)
    for row, rule in zip(rows, ("a beam's rows", "the text alone"), strict=True):
        expected = []
        for dial in (0, 0.5, 0.8):
            ours, theirs = ([share(r["exist"]) for r in trainings(f"{rule}: {of}", dial)] for of in ("causal", "told"))
            assert len(ours) == 3
            expected.append(interval([a - b for a, b in zip(ours, theirs, strict=True)]))
        assert row.split("|") == expected


def test_the_readmes_row_without_the_token_before():
    own = trainings("a beam's rows: told", 0.5)
    shares = [share(r["exist"]) for r in own]
    expected = [f"{short(mean(shares))} ({short(min(shares))}, {short(max(shares))})"]
    expected += [f"{mean(r['forwards'] for r in own):.1f}", short(mean(r["per_token"] for r in own), 2)]
    assert cells(README, "without the token before, on one base (with it .889)") == expected


# a row: the system, and the way where it is one of several
BUDGETS = {
    "base": ("base", None),
    "base, by the longest run alone": ("base", "run"),
    "paper": ("paper", None),
    "alpha": ("alpha", None),
    "one stage by alpha, surest first": ("one stage by alpha", None),
    "causal": ("causal", None),
    "a head of its own, taught by a beam of 4": ("head", None),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_what_a_budget_pays_for(name):
    system, way = BUDGETS[name]
    row = cells(PAGE, name)
    for cell, budget in zip(row, (2.1, 2.7, 3.3, 5, 6), strict=True):
        seeds = []
        for seed in (1, 2, 3):
            own = [r for r in RECORDS if (r["system"], r["seed"]) == (system, seed) and way in (r["way"], None)]
            seeds.append(within(own, budget))
        assert cell == short(mean(x for x in seeds if x is not None))


@pytest.mark.parametrize("other", ["base", "head"])
def test_differences_within_a_budget_have_their_intervals(other):
    """Of the seeds that both have."""
    for found, budget in zip(cells(PAGE, f"causal, less the {other}"), (2.1, 2.7, 3.3, 5, 6), strict=True):
        pairs = []
        for seed in (1, 2, 3):
            of_seed = [r for r in RECORDS if r["seed"] == seed]
            ours, theirs = (within([r for r in of_seed if r["system"] == of], budget) for of in ("causal", other))
            pairs += [ours - theirs] if theirs is not None else []
        assert found == (interval(pairs) if len(pairs) > 1 else "–")


@pytest.mark.parametrize("system", ["base", "paper", "alpha"])
def test_settings_that_are_chosen_elsewhere_have_the_same(system):
    """The best mixture of two on a base apart and other beginnings, by the table's seeds and beginnings."""
    text = (ROOT / "results" / "names" / "choice.jsonl").read_text()
    elsewhere = [r for r in map(json.loads, text.splitlines()) if r["system"] == system]
    assert all((r["seed"], r["skip"]) == (3, 512) for r in elsewhere)
    settings = {(r["way"], r["dial"], r["edits"]): (share(r["exist"]), r["forwards"]) for r in elsewhere}
    for cell, budget in zip(cells(PAGE, system), (2.1, 2.7, 3.3, 5, 6), strict=True):
        best = (-1.0,)
        for (cheap, (a, low)), (dear, (b, high)) in product(settings.items(), settings.items()):
            if low <= min(budget, high):
                part = 1.0 if high <= budget else (budget - low) / (high - low)
                best = max(best, ((1 - part) * a + part * b, part, cheap, dear), key=lambda mixture: mixture[0])
        _, part, cheap, dear = best
        exist, cost = zip(*map(means, (of(system, *cheap), of(system, *dear))), strict=True)
        assert -0.0125 < (1 - part) * exist[0] + part * exist[1] - float(cell) < 0.0215
        assert (1 - part) * cost[0] + part * cost[1] < budget + 0.225

        # orders: all at once is both
        orders = {way for way, dial, _ in (cheap, dear) if dial > 0}
        if budget < 3:
            assert orders <= {"threshold", "stage_b"}
        if budget == 6:
            assert orders <= {"run", "ones"}


@pytest.mark.parametrize("system", ["base", "paper", "alpha", "causal"])
def test_agreement(system):
    page = PAGE.split("## Order and agreement")[1]
    for k, cell in enumerate(cells(page, system), 1):
        records = of(system, "run", 1, None) if (system, k) == ("base", 1) else of(system, "first", k, None)
        assert len(records) == 3 and cell == short(mean(share(record["exist"]) for record in records))


@pytest.mark.parametrize("row, marker", [("on", "on"), ("off", "off"), ("at all other positions", "elsewhere")])
def test_the_marker(row, marker):
    found = [json.loads(line) for line in (ROOT / "results" / "names" / "marker.jsonl").read_text().splitlines()]
    expected = []
    for way in ("all at once", "above .3", "above .7"):
        own = [r for r in found if (r.get("way"), r.get("marker")) == (way, marker) and r["ckpt"].startswith("alpha-")]
        assert len(own) == 3
        expected.append(short(mean(share(r["digits"]) for r in own)))
    assert cells(PAGE, row) == expected


# of a toy's log: the run, and the decoder of it
SYSTEMS = {
    "Stage A": ("base", "Stage A, one step"),
    "paper": ("base", "Stage B, one step"),
    "alpha": ("alpha", "Stage B, one step"),
    "causal": ("causal", "causal Stage B, one step"),
    "one at a time": ("base", "one at a time"),
}


def toys() -> dict[str, dict[str, list[list[float]]]]:
    """Of each toy, by system: KL, possible, likeliest, forwards and looks of three seeds, and TC."""
    log = (ROOT / "results" / "theorem" / "toys.txt").read_text()
    found: dict = {}
    for part in re.split(r"^== ", log, flags=re.M)[1:]:
        task = found.setdefault(part.split()[0], {name: [] for name in SYSTEMS})
        task["TC"] = re.search(r"TC = ([\d.]+)", part)[1]
        runs = {run.split()[0]: run for run in re.split(r"^-- ", part, flags=re.M)[1:]}
        for name, (run, decoder) in SYSTEMS.items():
            figures = re.search(rf"^{decoder}" + r" +([\d.]+)" * 5, runs[run], re.M).groups()
            task[name].append([float(x) for x in figures])
    return found


@pytest.mark.parametrize("task, seeds", toys().items())
def test_toys(task, seeds):
    """The README's row and the page's are means of the log's three seeds."""
    page = (ROOT / "results" / "theorem" / "README.md").read_text()
    figures = {name: list(zip(*seeds[name], strict=True)) for name in SYSTEMS}
    kl = {name: f"{mean(of_seeds[0]):.3f}" for name, of_seeds in figures.items()}
    four = ("Stage A", "paper", "alpha", "causal")
    assert len(seeds["causal"]) == 3
    possible, likeliest = ([f"{mean(figures[name][k]):.3f}" for name in four] for k in (1, 2))
    assert cells(README, f"`{task}`") == [seeds["TC"], *(kl[name] for name in four), possible[3]]

    losses = figures["causal"][0]
    causal = f"{kl['causal']} ({min(losses):.3f} to {max(losses):.3f})"
    first, second = page.split("|likeliest: Stage A|")
    assert cells(first, f"`{task}`") == [seeds["TC"], *(kl[name] for name in four[:3]), causal, kl["one at a time"]]
    assert cells(second, f"`{task}`") == [*possible, *likeliest, f"{mean(figures['causal'][4]):.2f}"]
