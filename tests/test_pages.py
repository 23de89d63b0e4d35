"""The tables on names and toys are what the records say. `pytest tests/test_pages.py`"""

import json
import re
from collections import defaultdict
from statistics import mean, stdev

import pytest
from common import ROOT

from experiments.names import share

FOLDER = ROOT / "results" / "names"
README = (ROOT / "README.md").read_text()
PAGE = (FOLDER / "README.md").read_text()
THEOREM = (ROOT / "results" / "theorem" / "README.md").read_text()


def records(name: str) -> list[dict]:
    return list(map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines()))


RECORDS, TRAININGS, TEACHER = records("records"), records("control"), records("teacher")
SEEDS = (1, 2, 3)

# system, way, dial, edits: its row of the page, named as evaluate.py names it
ROWS = [
    (("left to right", "ones", 1, None), "a left-to-right model"),
    (("base", "ones", 1, None), "base, in blocks of one token"),
    (("base", "run", 1, None), "base, one at a time from the left"),
    (("base", "run", 0.7, None), "base, longest run above 0.7"),
    (("base", "threshold", 0.7, 0.5), "base, above 0.7, gated edits (released)"),
    (("causal", "run", 0, None), "causal, whole blocks"),
    (("causal", "run", 0.5, None), "causal, longest run above 0.5"),
    (("causal", "run", 0.8, None), "causal, longest run above 0.8"),
]
BEAM = "rows by the base's beam"
BETTER = "rows by a left-to-right model's beam"


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


def middle_low_high(pairs: list[float]) -> tuple[float, float, float]:
    """The mean of differences and its 95 % interval: 12.706 standard errors for two, 4.303 for three."""
    margin = {2: 12.706, 3: 4.303}[len(pairs)] * stdev(pairs) / len(pairs) ** 0.5
    return mean(pairs), mean(pairs) - margin, mean(pairs) + margin


def interval(pairs: list[float]) -> str:
    """As names' page writes it: +.046 (.041 to .052)"""
    middle, low, high = middle_low_high(pairs)
    return f"{middle:+.3f} ({low:.3f} to {high:.3f})".replace("0.", ".")


def short(x: float, digits: int = 3) -> str:
    return f"{x:.{digits}f}".lstrip("0")


def numbers(text: str, label: str) -> list[str]:
    """All shares of the line or the paragraph that begins with a label, in their order: .891, .51"""
    return re.findall(r"(?<![\d.])\.\d{2,}", text.split(label)[1].split("\n")[0])


# --- settings
def check_row(name: str, found: list[dict]) -> None:
    """The page has all seeds, and their mean."""
    own = shares(found)
    assert len(own) == 3
    exist, forwards = cells(PAGE, name)[:2]
    assert (exist, forwards) == (f"{short(mean(own))} ({' '.join(map(short, own))})", f"{cost(found):.1f}"), name


def shipped(name: str, digits: int) -> list[str]:
    """The figures of a row that evaluate.py has printed of what ships, as the page has them."""
    row = re.search(rf"^assets/names\S*  {re.escape(name)} +(.*)$", (FOLDER / "shipped.txt").read_text(), re.M)
    first, second, _ = row[1].split()
    return [short(float(first)) if digits == 1 else first, f"{float(second):.{digits}f}"]


def test_rows():
    for setting, name in ROWS:
        check_row(name, of(*setting))
        ships = ["", ""] if setting[1] == "ones" else shipped(name, 1)
        assert cells(PAGE, name)[2:] == ships

    # the paper's adapter is the shipped one: the code of the other columns drew a bundle in each block
    paper = "Stage B, ungated edits (paper)"
    assert cells(PAGE, paper) == ["", "", *shipped(paper, 1)]
    assert shipped("Stage B off, ungated edits", 1)[0] == shipped(paper, 1)[0]


def test_what_the_readme_says_of_names():
    settings = [("left to right", "ones", 1, None), ("base", "ones", 1, None), ("causal", "run", 0.5, None)]
    found = [of(*setting) for setting in settings]
    found += [trained(name, 0.5) for name in (f"{BEAM}: causal", "the text alone: causal", BEAM)]
    assert numbers(README, "On [names]") == [short(mean(shares(own))) for own in found]
    assert re.findall(r"\d\.\d", README.split("On [names]")[1].split("\n")[0]) == [f"{cost(own):.1f}" for own in found]


BITS = {  # the page's row, and evaluate.py's
    "base: Stage A, all at once": "assets/names  Stage A, all at once",
    "base: one at a time, from the left": "assets/names  one at a time, from the left",
    "paper: Stage B, all at once": "assets/names/paper  Stage B, all at once",
    "causal Stage B, whole blocks": "assets/names/causal  causal Stage B, whole blocks",
}


def test_bits():
    log = (FOLDER / "shipped.txt").read_text().split("bits a token")[1]
    for row, printed in BITS.items():
        assert cells(PAGE, row) == [re.search(rf"^{printed} +([\d.]+)", log, re.M)[1]]


def same(name: str, **what) -> list[dict]:
    """The records of a file that have all of this."""
    return [record for record in records(name) if what.items() <= record.items()]


def test_what_is_said_of_names():
    """A bullet's shares, in their order."""
    exist = lambda *setting: short(mean(shares(of(*setting))))  # noqa: E731
    first = lambda system: [exist(system, "first", k, None) for k in (1, 2)]  # noqa: E731
    left = exist("base", "run", 1, None)
    assert numbers(PAGE, "**Order.**") == [exist("base", "threshold", 1, None), left]
    control = [short(mean(shares(same("control", system="control", way="first", dial=k)))) for k in (1, 2)]
    assert numbers(PAGE, "**Agreement.**") == [left, first("base")[1], *first("causal"), *control]
    others = [same("other", system="causal", way="run", dial=0.5), same("other", system="base", way="run", dial=0.7)]
    assert numbers(PAGE, "**Other beginnings.**") == [short(mean(shares(found))) for found in others]


def test_what_is_said_of_holes_and_looks():
    holes = (FOLDER / "holes.txt").read_text()
    ways = ("causal, in looks", "Stage A, all at once", "Stage A, one at a time")
    found = [mean(map(float, re.findall(rf"^causal +{way} +(\S+)", holes, re.M))) for way in ways]
    assert numbers(PAGE, "Two masks stand inside a name.")[:3] == list(map(short, found))
    table = [line.split() for line in (FOLDER / "looks.txt").read_text().splitlines()[1:]]
    looks = sum(float(row[1]) * int(row[3]) for row in table) / sum(int(row[3]) for row in table)
    assert f"takes [{looks:.1f} looks](looks.txt)" in PAGE


def test_what_is_said_of_the_teacher_and_of_draws():
    beam = re.findall(r"^seed \d +(\S+)", (FOLDER / "beam.txt").read_text(), re.M)
    tried = [
        same("tried", system=f"{name}, drawn bundles in a fifth", dial=0.5) for name in ("beam of 4", "greedy teacher")
    ]
    ours, greedy = (share(record["exist"]) for [record] in tried)
    assert numbers(PAGE, "Two thirds of causal Stage B's rows") == [short(mean(map(float, beam)))]
    assert f"A greedy teacher costs Stage B {100 * (ours - greedy):.1f} points" in PAGE

    same_text = [re.search(rf"{name} +(\S+)", (FOLDER / "vary.txt").read_text())[1] for name in
                 ("causal  causal, longest run above 0.5", "names  base, longest run above 0.5")]  # fmt: skip
    drawn = [mean(shares(same("control_draws", system=system))) for system in ("causal_text", "control_text")]
    assert numbers(PAGE, "At temperature 1") == [*(short(float(x), 2) for x in same_text), *map(short, drawn)]


# --- causal Stage B with the token before and without: system, and the file of its records
COMPARED = {
    f"{BEAM}: causal": ("causal", TRAININGS),
    BEAM: ("control", TRAININGS),
    f"{BETTER}: causal": ("causal", TEACHER),
    BETTER: ("control", TEACHER),
    "the text alone: causal": ("causal_text", TRAININGS),
    "the text alone": ("control_text", TRAININGS),
}
WITHOUT = ": without the token before"


def trained(name: str, dial: float, skip: int = 0) -> list[dict]:
    """Three trainings on one base."""
    system, among = COMPARED[name]
    found = of(system, "run", dial, None, skip, among)
    assert tuple(record["seed"] for record in found) == SEEDS
    return found


def test_what_the_token_before_is_worth():
    dials = (0, 0.5, 0.8)
    for name in COMPARED:
        found = [trained(name, dial) for dial in dials]
        row = name if name.endswith("causal") else name + WITHOUT
        assert cells(PAGE, row) == [f"{short(mean(shares(own)))}, {cost(own):.1f}" for own in found]
    # the differences on these beginnings, and below them on 512 others
    below = re.split(r"^\|.*: causal\|", PAGE, flags=re.M)[1:]
    for part, rows in zip(below, (BEAM, BETTER, "the text alone"), strict=True):
        for name, skip in (("difference", 0), ("difference on 512 other beginnings", 512)):
            if skip and rows == "the text alone":
                continue  # not measured
            both = [[trained(system, dial, skip) for system in (f"{rows}: causal", rows)] for dial in dials]
            pairs = [zip(shares(causal), shares(control), strict=True) for causal, control in both]
            assert cells(part, name) == [interval([a - b for a, b in of_dial]) for of_dial in pairs]


def test_a_better_teacher():
    """The share of its own names; the table above has those that learned its rows."""
    found = [same("teacher", system="teacher"), of("base", "ones", 1, None)]
    assert numbers(PAGE, "A better teacher helps") == [short(mean(shares(own))) for own in found]


# --- other pages
def test_the_marker():
    """On and off: means of three seeds. tiny.py's alpha needs it."""
    on, off = (
        [share(r["digits"]) for r in same("marker", marker=marker, way="all at once") if r["ckpt"].startswith("alpha-")]
        for marker in ("on", "off")
    )
    assert len(on) == len(off) == 3
    assert numbers(THEOREM, "Of the names that their Stage B writes") == [short(mean(on)), short(mean(off))]
    margin = interval([a - b for a, b in zip(on, off, strict=True)])
    low, high = (100 * float(x) for x in re.search(r"\((\S+) to (\S+)\)", margin).groups())
    assert f"from {low:.1f} to {high:.1f} points" in THEOREM
    log = (FOLDER / "tiny-marker.txt").read_text()
    tiny = [mean(map(float, re.findall(rf"alpha1 plain.*\n(?: +o.*\n)*? +{marker} .* none (\S+)", log)))
            for marker in ("on", "off")]  # fmt: skip
    assert tiny[0] < 0.01 and tiny[1] > 0.4


def test_alpha_on_names():
    found = [of(system, "run", 0, None) for system in ("alpha", "base")]
    assert numbers(THEOREM, "Of [names]") == [short(mean(shares(own))) for own in found]


def test_the_dropped_head():
    page = (ROOT / "results" / "dropped" / "README.md").read_text()
    for dial in (0, 0.5, 0.8):
        found = of("head", "run", dial, None)
        assert f"{short(mean(shares(found)))} at {cost(found):.2f}" in page


def test_the_marker_on_three_bases():
    """The page's rows are means, and the README quotes the first one's texts."""
    path = ROOT / "results" / "paper_tables"
    page = (path / "README.md").read_text()
    found = list(map(json.loads, (path / "marker.jsonl").read_text().splitlines()))
    for row, kind, setting in (
        ("the paper's marker, 300 steps", "paper", "300 steps"),
        ("scaled by rms(h), 300 steps", "scaled", "300 steps"),
    ):
        bases = [r for r in found if (r["kind"], r["setting"]) == (kind, setting)]
        assert len(bases) == 3
        of = {key: mean(r[key] for r in bases) for key in bases[0] if key not in ("kind", "setting")}
        nats = [f"{of[key]:.4f}" for key in ("nats_A", "nats_B", "nats_elsewhere")]
        exist = [f"{of[key]:.3f}" for key in ("gates_off", "gates_on", "gates_elsewhere")]
        differ = [f"{of[key]:.1f}" for key in ("gates_on_differ", "gates_elsewhere_differ")]
        assert cells(page, row)[1:4] == nats and cells(page, row)[5:] == exist + differ
        if kind == "paper":
            assert f"Stage B changes {differ[0]} of 256 completions on average" in README


def test_the_papers_table_2_in_small():
    """A row is the mean of three bases, each base, and forwards; three rows of the paper's are one here."""
    page = (ROOT / "results" / "paper_tables" / "README.md").read_text()
    logs = [(ROOT / "results" / "paper_tables" / f"names-{k}.txt").read_text() for k in SEEDS]
    found = {}
    for log in logs:
        for name, exist, forwards in re.findall(r"^(\S.*?)  +(0\.\d+) +(\d+\.\d+) ", log, re.M):
            found.setdefault(name, []).append((float(exist), float(forwards)))
    alike = {"B fills, A edits", "A fills, B edits", "Stage B without marker"}
    off = {f"adapter, Stage B off, tau_m2t {gate}": f"Stage B, tau_m2t {gate}" for gate in (0.5, 0.3)}
    for name, bases in found.items():
        exist, forwards = zip(*bases, strict=True)
        if name in alike:
            assert bases == found["Stage B, gated edits"]
        elif name in off:
            assert exist == tuple(x for x, _ in found[off[name]])
        else:
            seeds = " ".join(map(short, exist))
            assert cells(page, name)[:2] == [short(mean(exist)), seeds], name
            assert float(cells(page, name)[2]) == pytest.approx(mean(forwards), abs=0.0051), name


# of a toy's log: the run, and the decoder of it
SYSTEMS = {
    "Stage A": ("base", "Stage A, one step"),
    "paper": ("base", "Stage B, one step"),
    "causal": ("causal", "causal Stage B, one step"),
    "one at a time": ("base", "one at a time"),
    "masks alone, from the left": ("masks", "one at a time, from the left"),
}


def figures_of(log: str, decoder: str) -> list[str]:
    """KL, possible, likeliest, forwards and looks."""
    return re.search(rf"^{decoder}" + r" +([\d.]+)" * 5, log, re.M).groups()


def toys() -> dict[str, list[str]]:
    """Each toy's parts of the log, one for each seed."""
    log = (ROOT / "results" / "theorem" / "toys.txt").read_text()
    found = defaultdict(list)
    for part in re.split(r"^== ", log, flags=re.M)[1:]:
        found[part.split()[0]].append(part)
    assert len(found) == 7 and {len(parts) for parts in found.values()} == {3}
    return found


@pytest.mark.parametrize("task, parts", toys().items())
def test_toys(task, parts):
    """The page's rows are the means of the log's seeds, and so is the README's, where it has one."""
    seeds = defaultdict(list)
    for part in parts:
        runs = {run.split()[0]: run for run in re.split(r"^-- ", part, flags=re.M)[1:]}
        for name, (run, decoder) in SYSTEMS.items():
            seeds[name].append(list(map(float, figures_of(runs[run], decoder))))
    kl, possible, likeliest, forwards, looks = (
        [mean(figures[i] for figures in seeds[name]) for name in SYSTEMS] for i in range(5)
    )
    (tc,) = {re.search(r"TC = ([\d.]+)", part)[1] for part in parts}
    own = lambda values, digits=3: [f"{value:.{digits}f}" for value in values]  # noqa: E731

    # the first table's last column: causal Stage B on a base of masks alone
    log = (ROOT / "results" / "theorem" / "on_masks.txt").read_text()
    on_masks = [part for part in re.split(r"^== ", log, flags=re.M)[1:] if part.split()[0] == task]
    lost = mean(float(figures_of(part, SYSTEMS["causal"][1])[0]) for part in on_masks)
    assert len(on_masks) == 3

    first, second = THEOREM.split("|likeliest: Stage A|")
    assert cells(first, f"`{task}`") == [tc, *own([*kl, lost])]
    # one at a time there and in the README: the strongest, from masks alone and from the left
    kl, possible, likeliest = ([*values[:3], values[4]] for values in (kl, possible, likeliest))
    assert cells(second, f"`{task}`") == [*own(possible), *own(likeliest), *own([looks[2], forwards[2]], 2)]
    if f"|`{task}` (TC" in README:
        check_toy_of_the_readme(task, tc, [kl, possible, likeliest], looks[2], forwards[2])


def check_toy_of_the_readme(task: str, tc: str, shares_of: list, looks: float, forwards: float) -> None:
    """A row of the README's table has a system, and two or three of its columns have a toy: KL, can occur, likeliest.
    Where the second is missing, every answer can occur."""
    head, table = re.search(r"^\|system\|(`modes`.*)\|\n\|[-|]*\n((?:\|.*\n)+)", README, re.M).groups()
    heads = head.split("|")
    first = heads.index(f"`{task}` (TC {float(tc):.2f}): KL")
    columns = [first] + [i for i in (first + 1, first + 2) if i < len(heads) and "share" in heads[i]]
    kl, possible, likeliest = shares_of
    whole = list(zip(kl, possible, likeliest, strict=True))
    assert len(columns) == 3 or set(possible) == {1.0}
    rows = [row.strip("|").split("|") for row in table.splitlines()]
    for row, figures in zip(rows, whole, strict=True):
        figures = figures if len(columns) == 3 else (figures[0], figures[2])
        assert [row[1 + i] for i in columns] == [f"{x:.2f}" for x in figures]
    place = [h for h in heads if h.startswith("`")].index(heads[first])
    causal = re.search(r"\((\S+) looks, (\S+) forwards; `gaussian`: (\S+), (\S+)\)", rows[2][0]).groups()
    assert causal[2 * place : 2 * place + 2] == (f"{looks:.1f}", f"{forwards:.1f}")


def test_alpha_on_toys():
    """The shares of possible answers that Stage B by alpha writes, means of three seeds."""
    log = (ROOT / "results" / "theorem" / "alpha.txt").read_text()
    said = re.search(
        r"is ([\d.]+), ([\d.]+) and ([\d.]+) on `modes`, `mixed` and `permutation`, and ([\d.]+) and ([\d.]+) on",
        THEOREM,
    )
    for task, cell in zip(("modes", "mixed", "permutation", "pairs", "sum"), said.groups(), strict=True):
        parts = [part for part in re.split(r"^== ", log, flags=re.M)[1:] if part.startswith(task)]
        shares_of = [float(figures_of(part, "Stage B, one step")[1]) for part in parts]
        assert len(shares_of) == 3 and cell == short(mean(shares_of))


# --- text: a row of the page, and the README's name of it
TEXT = (ROOT / "results" / "text" / "README.md").read_text()
IN_BITS = {
    ("base", "Stage A"): "base: Stage A, all at once",
    ("paper", "Stage A"): "paper: Stage A, all at once",
    ("paper", "Stage B"): "paper: Stage B, all at once, 300 steps",
    ("control", "Stage B"): "causal Stage B without the token before, 800 steps",
    ("short", "Stage B"): "causal Stage B, 800 steps",
    ("causal", "Stage B"): "causal Stage B, 3,000 steps",
    ("base", "one at a time"): "base: one at a time, from the left",
    ("base", "in blocks of one"): "base: in blocks of one byte",
    ("left", "Stage A"): "a left-to-right model",
}

IN_README = {
    "a left-to-right model": "a left-to-right model of the base's size",
}

# a row of the README, and the rule by which its system draws
RULES = {
    "base: Stage A, all at once": "all at once",
    "paper: Stage B, all at once, 300 steps": "all at once",
    "causal Stage B, 3,000 steps": "whole blocks",
    "base: one at a time, from the left": "one at a time",
    "a left-to-right model": "one at a time",
}


def of_text(name: str) -> list[dict]:
    return list(map(json.loads, (ROOT / "results" / "text" / name).read_text().splitlines()))


def bits_by_seed(system: str, way: str, name: str = "bits.jsonl") -> list[float]:
    found = sorted((r["seed"], r["bits"]) for r in of_text(name) if (r["system"], r.get("way")) == (system, way))
    return [bits for _, bits in found]


def drawn_by_seed(system: str, rule: str, name: str = "draws.jsonl") -> list[dict]:
    return [r for r in of_text(name) if (r["system"], r.get("rule")) == (system, rule)]


@pytest.mark.parametrize("key, row", IN_BITS.items())
def test_bits_of_text(key, row):
    """Mean and seeds. The README's row also has the score of the draws, their forwards and their time."""
    seeds = bits_by_seed(*key)
    assert len(seeds) == 3
    assert cells(TEXT, row) == [f"{mean(seeds):.3f}", " ".join(f"{bits:.3f}" for bits in seeds)]
    if key == ("paper", "Stage A"):
        return
    drawn = [""] * 4
    if row in RULES:
        found = drawn_by_seed(key[0], RULES[row])
        assert len(found) == 3
        figures = {"bits": 2, "forwards": 2, "ms_1": 1, "ms_16": 1}
        drawn = [f"{mean(r[name] for r in found):.{digits}f}" for name, digits in figures.items()]
    assert cells(README, IN_README.get(row, row)) == [f"{mean(seeds):.2f}", *drawn]


def test_what_is_said_of_bits():
    """What is lost, what comes back, and how far causal Stage B is from one at a time, with the interval of seeds."""
    stage_a, causal = bits_by_seed("base", "Stage A"), bits_by_seed("causal", "Stage B")
    chain = bits_by_seed("base", "one at a time")
    said = TEXT.split("Stage A predicts each")[1].split("\n")[0]
    gaps = [theirs - ours for ours, theirs in zip(causal, chain, strict=True)]
    middle, low, high = middle_low_high(gaps)
    lost, back = mean(stage_a) - mean(chain), mean(stage_a) - mean(causal)
    expected = [f"{lost:.2f}", f"{back:.2f}", f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}"]
    assert re.findall(r"-?\d\.\d+", said) == expected


LONGER = {
    ("base", "one at a time"): "base of 3,500 steps: one at a time, from the left",
    ("base", "in blocks of one"): "base of 3,500 steps: in blocks of one byte",
    ("causal", "Stage B"): "causal Stage B, 3,000 steps, on the base of 3,500",
}


def test_a_base_that_learned_as_long():
    """And causal Stage B on it; their difference, with the interval of seeds."""
    found = {key: bits_by_seed(*key, "base3500.jsonl") for key in LONGER}
    for key, row in LONGER.items():
        assert len(found[key]) == 3
        assert cells(TEXT, row) == [f"{mean(found[key]):.3f}", " ".join(f"{bits:.3f}" for bits in found[key])]
    chain, _, causal = found.values()
    difference = middle_low_high([ours - theirs for ours, theirs in zip(causal, chain, strict=True)])
    said = TEXT.split("**Causal Stage B learned for longer.**")[1].split("\n")[0]
    shorter = mean(bits_by_seed("causal", "Stage B")) - mean(chain)
    assert re.findall(r"-?\d\.\d{3}", said) == [f"{value:.3f}" for value in (shorter, *difference)]
    assert all(longer > short for longer, short in zip(causal, bits_by_seed("causal", "Stage B"), strict=True))
    said = f"costs {mean(chain):.2f} one at a time, and causal Stage B on it {mean(causal):.2f}."
    assert f"But a base trained for the time of both stages {said}" in README


def test_what_causal_stage_b_learns_from():
    """One seed: base, whole_share, optimizer. Then the means of three with share 0."""
    part = TEXT.split("## What causal Stage B learns from")[1].split("## ")[0]
    rows = re.findall(r"^\|(.* steps, n = .*)\|(.*)\|(.*)\|(.*)\|$", part, re.M)
    found = {(r["setting"], r["whole"], r["optimizer"]): r["bits"] for r in of_text("recipe.jsonl")}
    found |= {
        ("800 steps, n = 1, 800", "0", "AdamW"): bits_by_seed("short", "Stage B", "base800.jsonl")[0],
        ("2,000 steps, n = 1, 3,000", "0", "AdamW"): bits_by_seed("causal", "Stage B", "longer.jsonl")[0],
        ("2,000 steps, n = 2, 3,000", "0", "AdamW"):
            bits_by_seed("causal, n = 2, 3,000 steps", "Stage B", "longer.jsonl")[0],
        ("2,000 steps, n = 2, 3,000", "0.5", "Muon"): bits_by_seed("causal", "Stage B")[0],
    }  # fmt: skip
    assert {tuple(key): bits for *key, bits in rows} == {key: f"{bits:.3f}" for key, bits in found.items()}

    said = part.split("With n = 1, share 0, AdamW and 3,000 steps,")[1].split("(three seeds;")[0]
    means = [[mean(bits_by_seed(*key, name)) for key in (("causal", "Stage B"), ("base", "one at a time"))]
             for name in ("base800.jsonl", "longer.jsonl")]  # fmt: skip
    expected = [f"{x:.3f}" for x in (means[0][1] - means[0][0], means[1][0] - means[1][1])]
    assert re.findall(r"\d\.\d{3}", said) == expected


def test_blocks_of_8():
    """Beside blocks of 16, both on bases of 800 steps: means of three seeds."""
    part = TEXT.split("- **Blocks of 8.**")[1].split("\n")[0]
    files = ("blocks8.jsonl", "base800.jsonl")
    expected = []
    for name in files:
        found = [bits_by_seed(*key, name) for key in (("causal", "Stage B"), ("base", "one at a time"))]
        assert [len(seeds) for seeds in found] == [3, 3]
        expected += [f"{mean(seeds):.3f}" for seeds in found]
    assert re.findall(r"\d\.\d{3}", part) == expected


def test_a_base_of_8_layers():
    keys = (("base", "one at a time", "layers8.jsonl"), ("causal", "Stage B", "layers8.jsonl"))
    said = TEXT.split("- **More layers.**")[1].split("\n")[0]
    found = [bits_by_seed(*key) for key in keys]
    assert [len(seeds) for seeds in found] == [3, 3]
    recipe = {(r["setting"], r["whole"]): r["bits"] for r in of_text("recipe.jsonl") if r["optimizer"] == "Muon"}
    pair = [recipe[f"800 steps, n = {n}, 800", "0.5"] for n in (1, 2)]
    expected = [*pair, *map(mean, found), recipe["2,000 steps, n = 1, 3,000", "1"]]
    assert re.findall(r"\d\.\d{3}", said) == [f"{bits:.3f}" for bits in expected]


TOGETHER = {  # begins from, n, steps: its row
    ("base", 2, 1050): "together, from the base, n = 2, 1,050 steps",
    ("scratch", 2, 2600): "together, from scratch, n = 2, 2,600 steps",
    ("scratch", 1, 2600): "together, from scratch, n = 1, 2,600 steps",
    ("scratch", 2, 5000): "together, from scratch, n = 2, 5,000 steps",
}


def test_what_is_trained_together():
    """Stage A, one at a time, whole blocks, means of three seeds; above them a base and its Stage B."""
    ways = (("Stage A", "base"), ("one at a time", "base"), ("Stage B", "causal"))
    found = {"a base, then Stage B, n = 2": [bits_by_seed(system, way) for way, system in ways]}
    records = of_text("together.jsonl")
    for key, row in TOGETHER.items():
        own = [r for r in records if (r["start"], r["n"], r["steps"]) == key]
        found[row] = [[r["bits"] for r in own if r["way"] == way] for way, _ in ways]
    for row, bits in found.items():
        assert {len(seeds) for seeds in bits} == {3}
        assert cells(TEXT, row) == [f"{mean(seeds):.3f}" for seeds in bits]


def test_draws_in_the_readme_are_the_first_beginnings():
    """Those of seed 1, which ships, cut after 60 bytes, whatever they say."""
    shown = re.findall(r"^(base|causal), ([a-z ]*[a-z])  +(.*)$", README, re.M)
    assert len(shown) == 3
    for system, rule, text in shown:
        record = next(r for r in drawn_by_seed(system, rule) if r["seed"] == 1)
        assert text == record["first"][0][56:116].replace("\n", " / ")


def test_what_the_text_costs_the_judge():
    cost = f"{mean(r['bits'] for r in drawn_by_seed('text', '')):.2f}"
    assert f"real text costs it {cost}." in README and f"The real text scores {cost} bits" in TEXT


def test_draws_of_text():
    for row in re.findall(r"^\|([^|]*), ([^|]*)\|(\d.*)\|$", TEXT.split("## Draws")[1].split("## ")[0], re.M):
        system, rule, figures = row
        rule = rule.removeprefix("longest run ")
        found = drawn_by_seed({"left-to-right model": "left"}.get(system, system), rule)
        keys = (("bits", 2), ("own", 2), ("distinct", 3), ("forwards", 2), ("ms_1", 1), ("ms_16", 1))
        had = {key: [r[key] for r in found if key in r] for key, _ in keys}
        own = [f"{mean(had[key]):.{digits}f}" if had[key] else "" for key, digits in keys]
        assert figures.split("|") == own, row
