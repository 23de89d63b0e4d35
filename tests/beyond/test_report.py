"""The tables, from records made by hand: a digit for each prompt says how many of its completions exist."""

import json

from common import ROOT, approx, caller

from beyond import report
from beyond.report import Unit, measured

GROUPS = {"held out": [0, 1], "trained": [2, 3]}
COUNTS = {"full": 8, "partial": 2.5, "commit": 1, "looks": 5}


def record(system, setting, found, cost, **more):
    """cost: of a name, which has 2 tokens."""
    own = {"system": system, "setting": setting, "found": found, "draws": 1, "exist": 0.75, "distinct": 0.25}
    own |= {"cost": {"all": cost}, "per": {"token": 2, "name": 1}, "counts": COUNTS, "second": "head"}
    return own | {"temperature": 0.0, "top_p": 1.0, "ckpt": "c"} | more


def written(path, *records, clusters=GROUPS):
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"clusters": clusters}, *records]))
    return path


def tables(out):
    """Of each table the cells of each line."""
    cells = lambda line: [cell.strip() for cell in line.split("  ") if cell.strip()]  # noqa: E731
    return [[cells(line) for line in table.splitlines()] for table in out.strip().split("\n\n")]


def estimates(rows):
    """Of each row its name and its cells, without their intervals."""
    return [[row[0], *(cell.split()[0] for cell in row[1:])] for row in rows]


# --- systems
def test_a_system_is_its_settings_over_its_seeds():
    """Two seeds, whose settings stand in another order; the second one has more draws."""
    seed = dict(ckpt="d", draws=4)
    records = [record("a", "x", "11", 2.0), record("a", "y", "10", 1.0)]
    records += [record("a", "y", "30", 0.5, **seed), record("a", "x", "24", 1.0, **seed)]
    system = measured(records, {"held out": [5], "trained": [9]}, "exist", Unit("name"))["a"]
    assert system.labels == ["x", "y"] and system.cluster.tolist() == [0, 1]
    assert system.values.tolist() == [[[1, 1], [0.5, 1]], [[1, 0], [0.75, 0]]]
    assert system.costs.tolist() == [[2.0, 1.0], [1.0, 0.5]]


def test_what_a_cost_is_of():
    """In time, 8 full forwards of 2 seconds, a commit of 1 and 5 looks of .2 are 18 seconds: 9 full forwards."""
    r = record("a", "x", "11", 1.6)
    assert Unit("name").cost(r) == 1.6 and Unit("token").cost(r) == 0.8
    prices = {"full": 2.0, "commit": 1.0, "head": 0.2, "stage_b": 0.5}
    assert Unit("name", prices).cost(r) == 9 and Unit("token", prices).cost(r) == 4.5
    assert Unit("name", prices).cost(r | {"second": "stage_b"}) == (16 + 1 + 2.5) / 2
    assert Unit("name", prices).cost(r | {"second": ""}) == 17 / 2


# --- tables
def test_the_tables_of_names_by_hand(tmp_path, monkeypatch, capsys):
    """The head completes every name for 4 forwards. The base has three rules: b as the head, but for 3; of c's settings
    the dearer is the better one. By turns the base has a third at 2.5, between 2.25 and 3, and c half at 6, between 5
    and 7. In time each costs 8.6."""
    records = [record("base", "a 1", "0000", 2.25), record("base", "b 1", "1111", 3.0)]
    records += [record("base", "c 1", "0000", 5.0), record("base", "c 2", "1111", 7.0)]
    path = written(tmp_path / "r.jsonl", *records, record("head", "tau_keep 0", "1111", 4.0))
    call = caller(report, monkeypatch, capsys)
    within, minus, rules = tables(call(path, "--against", "head"))
    none, full = "0.000", "1.000"
    assert within[0] == ["at most, all/name", *map(str, report.BUDGETS["name"])]
    assert estimates(within[1:]) == [["base", "-", "0.333", *[full] * 10], ["head", *["-"] * 4, *[full] * 8]]
    assert within[2][6] == "1.000 [1.000, 1.000]"
    assert minus[0][0] == "head minus, all/name" and estimates(minus[1:]) == [["base", *["-"] * 4, *["+0.000"] * 8]]
    a, b, c = estimates(rules[1:])
    assert rules[0][0] == "base, all/name" and a == ["a", "-", *[none] * 11] and b == ["b", *["-"] * 2, *[full] * 10]
    assert c == ["c", *["-"] * 6, none, "0.500", *[full] * 4]

    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"full": 1.0, "commit": 0.1, "head": 0.1}))
    _, _, time, _ = tables(call(path, "--prices", prices))
    assert time[0][0] == "at most, time/name" and time[2][10:] == ["-", *within[2][6:8]]

    # mistakes
    prices.write_text("{}")
    assert "lacks 'full'" in call.fails(path, "--prices", prices)
    assert "none of the systems: base, head" in call.fails(path, "--against", "b")
    assert "lacks 'cost'" in call.fails(written(tmp_path / "damaged", {"system": "a", "temperature": 0}))
    assert "of another kind" in call.fails(written(tmp_path / "empty"))
    more = record("base", "a 1", "0000", 2.25, ckpt="d")
    assert "are they of one kind" in call.fails(written(path, *records, more))


def test_what_was_drawn_is_every_setting_by_the_token(tmp_path, monkeypatch, capsys):
    drawn = dict(temperature=0.5, top_p=0.9, draws=2, entropy=0.125)
    path = written(tmp_path / "r.jsonl", record("head", "y", "2222", 0.8, **drawn), record("b", "z", "00", 4, **drawn))
    (table,) = tables(caller(report, monkeypatch, capsys)(path))
    assert table[0] == ["system", "setting", "exist", "distinct", "entropy", "all/token"]
    assert table[1:] == [["head", "y", "0.750", "0.250", "0.125", "0.400"], ["b", "z", *table[1][2:5], "2.000"]]


def test_the_tables_of_text_by_hand(tmp_path, monkeypatch, capsys):
    """Two documents of a span each, two systems of one setting and two seeds. A mean of -1 and 0 is -1, -1/2 or 0 in a
    quarter, a half and a quarter of the resamples; the head is 1/4 better in each span, so in each resample."""
    monkeypatch.setattr(report, "AVERAGED", (0.5, 0.7))
    records = []
    for ckpt in "cd":
        same = dict(exact=[0.5, 0.5], parses=[1.0, 0.0], ckpt=ckpt)
        records.append(record("base", "one", "", 0.8, score=[-1.0, 0.0], **same))
        records.append(record("head", "one", "", 0.9, score=[-0.75, 0.25], **same))
        records.append(record("head", "two", "", 1.2, score=[0.75, 1.75], **same))
    call = caller(report, monkeypatch, capsys)
    path = written(tmp_path / "r.jsonl", *records, clusters={"documents": [3, 7]})
    out = call(path, "--against", "head")
    title, score, minus, rules, leads, *others = tables(out)
    assert title == [["score: the best that costs no more"]] and rules[0][0] == "base, all/token"
    at = {row[0]: dict(zip(score[0], row, strict=True)) for row in score[1:]}
    assert at["base"]["0.35"] == at["head"]["0.4"] == "-"
    assert at["base"]["0.4"] == at["base"]["1.0"] == "-0.500 [-1.000, 0.000]"
    assert at["head"]["0.45"] == "-0.250 [-0.750, 0.250]"
    assert dict(zip(minus[0], minus[1], strict=True))["0.45"] == "+0.250 [+0.250, +0.250]"
    # a lead of 3/4 at .5, a third of the way from 1/4 to 7/4, and of 7/4 at .7
    assert estimates(leads[1:]) == [["base", "+1.250"]]
    assert [table[0][0].split(":")[0] for table in others[::3]] == ["exact", "parses"]


def test_the_committed_records_print_the_page():
    """results/pays: head and left to right, and the head's lead over the taught Stage A in forwards and in time."""
    page = (ROOT / "results" / "pays" / "README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    budgets, leads = [row for row in rows if row[0] == "at most"]
    shown = {row[0]: row for row in rows}
    over = rows.index(shown["taught Stage A, in forwards"])
    prices = json.loads((ROOT / "beyond" / "prices.json").read_text())
    clusters, records = report.load(ROOT / "results" / "pays" / "records.jsonl.gz")
    for unit, row in ((Unit("name", prices), rows[over + 1]), (Unit("name"), rows[over])):
        systems = measured(records, clusters, "exist", unit)
        head, taught = (systems[name].within([3.0, 4.0])[:, 0] for name in ("head", "distilled"))
        assert [row[leads.index(at)].split()[0] for at in "34"] == [f"{100 * lead:+.0f}" for lead in head - taught]
    assert [float(shown["**head**"][budgets.index(at)]) for at in "34"] == approx(head, abs=0.0005)
    assert float(shown["left to right"][-1]) == approx(systems["left to right"].values.mean(), abs=0.0005)


def test_the_committed_records_of_text_print_their_page():
    """Base, head and taught Stage A within a quarter of a forward and half of one."""
    page = (ROOT / "results" / "text" / "README.md").read_text()
    clusters, records = report.load(ROOT / "results" / "text" / "records.jsonl.gz")
    systems = measured(records, clusters, "score", Unit("token"))
    for budget in ("0.25", "0.50"):
        row = next(line for line in page.splitlines() if line.startswith(f"| {budget} |"))
        _, base, head, _, distilled, *_ = row.strip("| ").split(" | ")
        shown = {"base": base, "head": head, "distilled": distilled}
        for name, score in shown.items():
            within = systems[name].within([float(budget)])[0, 0]
            assert float(score) == approx(within, abs=0.005)
