"""The tables on names and toys are what the records say. `pytest tests/test_pages.py`"""

import json
import re
from statistics import mean

import pytest
from common import ROOT

from experiments.names import share, within

RECORDS = [json.loads(line) for line in (ROOT / "results" / "names" / "records.jsonl").read_text().splitlines()]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "results" / "names" / "README.md").read_text()

# a row of the page: system, way, dial, edits
ROWS = {
    "base, one at a time, text read in blocks of one": ("base", "ones", 1, None),
    "base, one at a time from the left": ("base", "run", 1, None),
    "base, longest run above .7": ("base", "run", 0.7, None),
    "base, longest run above .5": ("base", "run", 0.5, None),
    "base, longest run above .3": ("base", "run", 0.3, None),
    "base, surest first, above .7, gated edits (released)": ("base", "threshold", 0.7, 0.5),
    "base, all at once": ("base", "threshold", -1, None),
    "paper, Stage B on, above .7, ungated edits": ("paper", "stage_b", 0.7, 0),
    "the same, Stage B off": ("paper", "threshold", 0.7, 0),
    "paper, all at once, no edits": ("paper", "stage_b", -1, None),
    "alpha, above .7, no edits": ("alpha", "stage_b", 0.7, None),
    "alpha, all at once, no edits": ("alpha", "stage_b", -1, None),
    "causal, whole blocks": ("causal", "run", 0, None),
    "causal, longest run above .5": ("causal", "run", 0.5, None),
    "causal, longest run above .8": ("causal", "run", 0.8, None),
    "causal, longest run above .95": ("causal", "run", 0.95, None),
}
# and of the README
SHORT = {
    "base, one at a time, in blocks of one": ("base", "ones", 1, None),
    "base, the longest run surer than .5": ("base", "run", 0.5, None),
    "paper: fill above .7, edit on any disagreement": ("paper", "stage_b", 0.7, 0),
    "the same, Stage B off": ("paper", "threshold", 0.7, 0),
    "alpha, all at once": ("alpha", "stage_b", -1, None),
    "causal, whole blocks": ("causal", "run", 0, None),
    "causal, the longest run surer than .5": ("causal", "run", 0.5, None),
}


def of(system: str, way: str, dial: float, edits: float | None) -> list[dict]:
    """A setting's records, seed by seed."""
    key = (system, way, dial, edits)
    found = [r for r in RECORDS if (r["system"], r["way"], r["dial"], r["edits"]) == key]
    return sorted(found, key=lambda record: record["seed"])


def cells(text: str, name: str) -> list[str]:
    row = re.search(rf"^\| ?{re.escape(name)} ?\|(.*)\|$", text, re.M)
    return [cell.strip() for cell in row[1].split("|")]


def short(x: float, digits: int = 3) -> str:
    return f"{x:.{digits}f}".lstrip("0")


@pytest.mark.parametrize("name", ROWS)
def test_the_pages_rows(name):
    records = of(*ROWS[name])
    shares = [share(record["exist"]) for record in records]
    exist, forwards, per_token = cells(PAGE, name)
    assert exist == f"{short(mean(shares))} ({' '.join(map(short, shares))})"
    assert forwards == f"{mean(record['forwards'] for record in records):.1f}"
    costs = [record["per_token"] for record in records if record["per_token"]]
    assert float(per_token) == pytest.approx(mean(costs), abs=0.0051)


@pytest.mark.parametrize("name", SHORT)
def test_the_readmes_rows(name):
    records = of(*SHORT[name])
    shares = [share(record["exist"]) for record in records]
    exist, forwards, per_token = cells(README, name)
    assert len(shares) == 3 and exist == f"{short(mean(shares))} ({short(min(shares))}, {short(max(shares))})"
    assert forwards == f"{mean(record['forwards'] for record in records):.1f}"
    if per_token:
        assert float(per_token) == pytest.approx(mean(record["per_token"] for record in records), abs=0.0051)


BUDGETS = {
    "base, longest run": ("base", "run"),
    "base, surest first": ("base", "threshold"),
    "alpha": ("alpha", "stage_b"),
    "one stage by alpha": ("one stage by alpha", "threshold"),
    "causal": ("causal", "run"),
    "a head of its own, taught by a beam of 4": ("head", "run"),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_what_a_budget_pays_for(name):
    system, way = BUDGETS[name]
    row = cells(PAGE, name)
    for cell, budget in zip(row, (2.1, 2.7, 3.3, 5, 6), strict=True):
        seeds = []
        for seed in (1, 2, 3):
            own = [r for r in RECORDS if (r["system"], r["way"], r["seed"]) == (system, way, seed)]
            seeds.append(within(own, budget))
        assert cell == short(mean(x for x in seeds if x is not None))


WRITING = {
    "base (three seeds)": "base",
    "paper (seed 1)": "paper",
    "alpha (seed 1)": "alpha",
    "causal (three seeds)": "causal",
}


@pytest.mark.parametrize("name", WRITING)
def test_agreement(name):
    system = WRITING[name]
    for k, cell in enumerate(cells(PAGE, name), 1):
        records = of(system, "run", 1, None) if (system, k) == ("base", 1) else of(system, "first", k, None)
        assert cell == short(mean(share(record["exist"]) for record in records))


def test_toys():
    """The README's rows and the page's are the log's."""
    log = (ROOT / "results" / "theorem" / "toys.txt").read_text()
    page = (ROOT / "results" / "theorem" / "README.md").read_text()
    parts = re.split(r"^== ", log, flags=re.M)[1:]
    assert len(parts) >= 4
    for part in parts:
        task = part.split()[0]
        tc = re.search(r"TC = ([\d.]+)", part)[1]
        found = dict(re.findall(r"^(Stage A|Stage B|causal Stage B), one step +([\d.]+)", part, re.M))
        possible, likeliest, _, looks = re.search(
            r"^causal Stage B.*?[\d.]+ +(\S+) +(\S+) +(\S+) +(\S+)", part, re.M
        ).groups()
        kl = [tc, found["Stage A"], found["Stage B"], found["causal Stage B"]]
        one = re.search(r"^one at a time +([\d.]+)", part, re.M)[1]
        assert cells(README, f"`{task}`") == [*kl, possible]
        assert cells(page, f"`{task}`") == [*kl, one, possible, likeliest, looks]
