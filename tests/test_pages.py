"""The tables on names and toys are what the records say. `pytest tests/test_pages.py`"""

import json
import re
from itertools import product
from statistics import mean, stdev

import pytest
from common import ROOT

from experiments.names import share, within

FOLDER = ROOT / "results" / "names"
README = (ROOT / "README.md").read_text()
PAGE = (FOLDER / "README.md").read_text()


def records(name: str) -> list[dict]:
    return list(map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines()))


RECORDS, TRAININGS = records("records"), records("told")
SEEDS = (1, 2, 3)
BUDGETS = (2.1, 2.7, 3.3, 5, 6)  # forwards a name

# system, way, dial, edits: its row of the page, and of the README
ROWS = [
    (("left to right", "ones", 1, None), "a left-to-right model of the base's size",
     "a left-to-right model of its size"),
    (("left to right, 1,000 steps", "ones", 1, None), "the same, 1,000 steps", None),
    (("base", "ones", 1, None), "base, one at a time, text read in blocks of one", None),
    (("base", "run", 1, None), "base, one at a time from the left", None),
    (("base", "run", 0.7, None), "base, longest run above .7", "base, longest run above .7"),
    (("base", "run", 0.5, None), "base, longest run above .5", None),
    (("base", "threshold", 0.7, 0.5), "base, surest first, above .7, edits above .5 (LLaDA2.1's rule)",
     None),
    (("base", "threshold", -1, None), "base, all at once", None),
    (("paper", "run", 0.7, None), "paper, longest run above .7", None),
    (("paper", "stage_b", 0.7, 0), "paper, Stage B on, above .7, ungated edits", None),
    (("paper", "threshold", 0.7, 0), "the same, Stage B off", None),
    (("alpha", "run", 0.7, None), "alpha, longest run above .7", None),
    (("alpha", "stage_b", 0.7, None), "alpha, above .7, no edits", None),
    (("alpha", "stage_b", -1, None), "alpha, all at once, no edits", None),
    (("causal", "run", 0, None), "causal, whole blocks", "causal, whole blocks"),
    (("causal", "run", 0.5, None), "causal, longest run above .5", "causal, longest run above .5"),
    (("causal", "run", 0.8, None), "causal, longest run above .8", None),
    (("causal", "run", 0.95, None), "causal, longest run above .95", None),
]  # fmt: skip


def of(system: str, way: str, dial: float, edits: float | None, skip: int = 0, among: list = RECORDS) -> list[dict]:
    """A setting's records, seed by seed; skip: beginnings that were left out."""
    keys = ("system", "way", "dial", "edits")
    found = [r for r in among if (*map(r.get, keys), r.get("skip", 0)) == (system, way, dial, edits, skip)]
    return sorted(found, key=lambda record: record["seed"])


def shares(found: list[dict]) -> list[float]:
    """Of each seed what exists."""
    return [share(record["exist"]) for record in found]


def cost(found: list[dict]) -> float:
    """Forwards a name."""
    return mean(record["forwards"] for record in found)


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


# --- settings
def check_row(text: str, name: str, found: list[dict]) -> None:
    """The page has all seeds, the README of three the lowest and the highest."""
    own = shares(found)
    assert text is PAGE or len(own) == 3
    seeds = " ".join(map(short, own)) if text is PAGE else f"{short(min(own))}, {short(max(own))}"
    exist, forwards, per_token = cells(text, name)
    assert (exist, forwards) == (f"{short(mean(own))} ({seeds})", f"{cost(found):.1f}"), name
    assert float(per_token) == pytest.approx(mean(record["per_token"] for record in found), abs=0.0051), name


def test_rows():
    for setting, of_page, of_readme in ROWS:
        check_row(PAGE, of_page, of(*setting))
        if of_readme:
            check_row(README, of_readme, of(*setting))
    check_row(README, "without the token before, on one base (with it .889)", told("a beam's rows: told", 0.5))


# --- causal Stage B with the token before and without: system, how many beginnings were left out
TOLD = {
    "a beam's rows: causal": ("causal", 0),
    "a beam's rows: told": ("told", 0),
    "512 other beginnings: causal": ("causal", 512),
    "512 other beginnings: told": ("told", 512),
    "the text alone: causal": ("causal_text", 0),
    "the text alone: told": ("told_text", 0),
}


def told(name: str, dial: float) -> list[dict]:
    """Three trainings on one base."""
    system, skip = TOLD[name]
    found = of(system, "run", dial, None, skip, TRAININGS)
    assert tuple(record["seed"] for record in found) == SEEDS
    return found


def test_what_the_token_before_is_worth():
    dials = (0, 0.5, 0.8)
    for name in TOLD:
        found = [told(name, dial) for dial in dials]
        assert cells(PAGE, name) == [f"{short(mean(shares(own)))}, {cost(own):.1f}" for own in found]
    for row, rule in zip(re.findall(r"^\|difference\|(.*)\|$", PAGE, re.M), ("a beam's rows", "the text alone"),
                         strict=True):  # fmt: skip
        pairs = [
            zip(*(shares(told(f"{rule}: {of}", dial)) for of in ("causal", "told")), strict=True) for dial in dials
        ]
        assert row.split("|") == [interval([a - b for a, b in of_dial]) for of_dial in pairs]


# --- budgets. A row: the system, and the way where it is one of several
PAID = {
    "base": ("base", None),
    "base, by the longest run alone": ("base", "run"),
    "paper": ("paper", None),
    "alpha": ("alpha", None),
    "one stage by alpha, surest first": ("one stage by alpha", None),
    "causal": ("causal", None),
    "a head of its own, taught by a beam of 4": ("head", None),
}


def paid(system: str, budget: float, way: str | None = None) -> list[float | None]:
    """What a budget pays for, seed by seed."""
    own = [
        [r for r in RECORDS if (r["system"], r["seed"]) == (system, seed) and way in (r["way"], None)] for seed in SEEDS
    ]
    return [within(of_seed, budget) for of_seed in own]


def test_what_a_budget_pays_for():
    for name, (system, way) in PAID.items():
        found = [paid(system, budget, way) for budget in BUDGETS]
        assert cells(PAGE, name) == [short(mean(x for x in own if x is not None)) for own in found]
    for other in ("base", "head"):
        for cell, budget in zip(cells(PAGE, f"causal, less the {other}"), BUDGETS, strict=True):
            both = zip(paid("causal", budget), paid(other, budget), strict=True)
            pairs = [ours - theirs for ours, theirs in both if theirs is not None]
            assert cell == (interval(pairs) if len(pairs) > 1 else "–")


@pytest.mark.parametrize("system", ["base", "paper", "alpha"])
def test_settings_that_are_chosen_elsewhere_have_the_same(system):
    """The best mixture of two on a base apart and other beginnings, by the table's seeds and beginnings."""
    elsewhere = [r for r in records("choice") if r["system"] == system]
    assert all((r["seed"], r["skip"]) == (3, 512) for r in elsewhere)
    settings = {(r["way"], r["dial"], r["edits"]): (share(r["exist"]), r["forwards"]) for r in elsewhere}
    for cell, budget in zip(cells(PAGE, system), BUDGETS, strict=True):
        best = (-1.0,)
        for (cheap, (a, low)), (dear, (b, high)) in product(settings.items(), settings.items()):
            if low <= min(budget, high):
                part = 1.0 if high <= budget else (budget - low) / (high - low)
                best = max(best, ((1 - part) * a + part * b, part, cheap, dear), key=lambda mixture: mixture[0])
        _, part, cheap, dear = best
        both = of(system, *cheap), of(system, *dear)
        exist, forwards = ((1 - part) * a + part * b for a, b in (map(mean, map(shares, both)), map(cost, both)))
        assert -0.0125 < exist - float(cell) < 0.0215 and forwards < budget + 0.225

        # orders: all at once is both
        orders = {way for way, dial, _ in (cheap, dear) if dial > 0}
        if budget < 3:
            assert orders <= {"threshold", "stage_b"}
        if budget == 6:
            assert orders <= {"run", "ones"}


def test_agreement():
    page = PAGE.split("## Order and agreement")[1]
    for system in ("base", "paper", "alpha", "causal"):
        for k, cell in enumerate(cells(page, system), 1):
            found = of(system, "run", 1, None) if (system, k) == ("base", 1) else of(system, "first", k, None)
            assert len(found) == 3 and cell == short(mean(shares(found)))


def test_the_marker():
    for row, marker in (("on", "on"), ("off", "off"), ("at all other positions", "elsewhere")):
        own = [r for r in records("marker") if r.get("marker") == marker and r["ckpt"].startswith("alpha-")]
        found = [
            [share(r["digits"]) for r in own if r["way"] == way] for way in ("all at once", "above .3", "above .7")
        ]
        assert [len(of_way) for of_way in found] == [3, 3, 3]
        assert cells(PAGE, row) == [short(mean(of_way)) for of_way in found]


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
    three = [kl[name] for name in ("Stage A", "paper", "causal")]
    assert cells(README, f"`{task}`") == [*possible[:2], possible[3], seeds["TC"], *three]

    losses = figures["causal"][0]
    causal = f"{kl['causal']} ({min(losses):.3f} to {max(losses):.3f})"
    first, second = page.split("|likeliest: Stage A|")
    assert cells(first, f"`{task}`") == [seeds["TC"], *(kl[name] for name in four[:3]), causal, kl["one at a time"]]
    assert cells(second, f"`{task}`") == [*possible, *likeliest, f"{mean(figures['causal'][4]):.2f}"]
