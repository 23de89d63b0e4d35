"""The tables, from records made by hand: a digit for each prompt says how many of its completions exist."""

import gzip
import json
import math

import numpy as np
from common import ROOT, approx, caller

from beyond import report, seeds
from beyond.report import Unit, measured

GROUPS = {"held out": [0, 1], "trained": [2, 3]}
COUNTS = {"full": 8, "partial": 2.5, "commit": 1, "looks": 5}


def record(system, setting, found, cost=1.0, n_layer=4, draws=1, **more):
    """A name has 2 tokens."""
    own = {"system": system, "setting": setting, "found": found, "n_layer": n_layer, "draws": draws, "distinct": 0.25}
    own |= {"cost": {"all": 2 * cost}, "per": {"token": 2, "name": 1}, "counts": COUNTS, "second": "head"}
    return own | {"temperature": 0.0, "top_p": 1.0, "ckpt": "c"} | more


def older(r):
    """The same as it was written before: the cost of a token alone, beside others, and an adapter."""
    new = ("cost", "per", "counts", "second")
    cost = {"all/token": r["cost"]["all"] / r["per"]["token"], "mult/token": 9.0, "adapter": "a"}
    return {k: v for k, v in r.items() if k not in new} | cost


def written(path, *records, clusters=GROUPS):
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"clusters": clusters}, *records]))
    return path


def tables(out):
    """Of each table the cells of each line."""
    cells = lambda line: [cell.strip() for cell in line.split("  ") if cell.strip()]  # noqa: E731
    return [[cells(line) for line in table.splitlines()] for table in out.strip().split("\n\n")]


# --- systems
def test_a_system_is_its_settings_over_its_seeds():
    """Two seeds, whose settings stand in another order; the second one has more draws."""
    seed = dict(ckpt="d", draws=4)
    records = [record("a", "x", "11", 2.0), record("a", "y", "10", 1.0)]
    records += [record("a", "y", "30", 0.5, **seed), record("a", "x", "24", 1.0, **seed)]
    systems, cluster = measured(records, {"held out": [5], "trained": [9]}, "exist")
    system = systems["a"]
    assert system.labels == ["x", "y"] and cluster.tolist() == [0, 1]
    assert system.values.tolist() == [[[1, 1], [0.5, 1]], [[1, 0], [0.75, 0]]]
    assert system.figures["all"].tolist() == [[2.0, 1.0], [1.0, 0.5]]
    assert system.figures["distinct"].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert np.isnan(system.figures["entropy"]).all()  # one draw has none


def test_what_a_cost_is_of():
    """5 layers beside the first system's 4: 1.25 times as much. In time, 8 full forwards of 2 seconds, a commit of 1
    and 5 looks of .2 are 18 seconds: 9 full forwards, for 2 tokens."""
    a = record("a", "x", "11", 0.8)
    deep = record("deep", "x", "11", 0.8, 5)
    assert [Unit("token", a).forwards(r) for r in (a, deep)] == approx([0.8, 1.0])
    assert [Unit("name", deep).forwards(r) for r in (a, deep)] == approx([1.28, 1.6])

    prices = {"full": 2.0, "commit": 1.0, "head": 0.2, "stage_b": 0.5}
    assert Unit("token", a, prices).time(deep) == approx(9 / 2 * 1.25)
    assert Unit("name", a, prices).time(a | {"second": "stage_b"}) == approx((16 + 1 + 2.5) / 2)
    assert Unit("name", a, prices).time(a | {"second": ""}) == approx(17 / 2)


def test_what_does_not_apply_is_left_out():
    """Spans 0 and 2 are Python, of documents 5 and 7."""
    nan = math.nan
    spans = [record("base", "one", "", parses=[1.0, nan, 0.0, nan])]
    systems, cluster = measured(spans, {"documents": [5, 6, 7, 7]}, "parses")
    assert systems["base"].values.tolist() == [[[1, 0]]] and cluster.tolist() == [0, 1]


# --- tables
def test_the_tables_by_hand(tmp_path, monkeypatch, capsys):
    """Both systems have one greedy setting, the head's at 0.8. Of its completions all exist, of the base's none: the
    difference is 1 in every resample. Older records print the same."""
    call = caller(report, monkeypatch, capsys)
    drawn = dict(temperature=0.5, top_p=0.9, draws=2, entropy=0.125)
    records = [record("base", "x", "0000", 0.4), record("head", "x", "1111", 0.8)]
    records += [record("base", "y, drawn", "0000", 0.4, **drawn), record("head", "y, drawn", "2222", 0.8, **drawn)]
    path = written(tmp_path / "r.jsonl", *records)
    out = call(path, "--unit", "token", "--against", "head")
    within, minus, leads, sampled = tables(out)

    none, full, more = "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]", "+1.000 [+1.000, +1.000]"
    assert within[0][0] == "at most, all/token" and within[0][1:] == [f"{b}" for b in report.BUDGETS["token"]]
    assert within[1:] == [["base", "-", *[none] * 11], ["head", *["-"] * 6, *[full] * 6]]
    assert minus[0][0] == "head minus, all/token" and minus[1:] == [["base", *["-"] * 6, *[more] * 6]]
    assert leads == [["head minus, over budgets of 0.36 to 1.0", "all, mean", "all, least"], ["base", "-", "-"]]
    assert sampled[0] == ["temperature 0.5, top_p 0.9"]
    assert sampled[1] == ["system", "setting", "seeds", "exist", "distinct", "entropy", "all"]
    assert sampled[3] == ["head", "y, drawn", "1", full, "0.250", "0.125", "0.800"]

    assert "minus" not in call(path)
    old = tmp_path / "old.jsonl.gz"
    old.write_bytes(gzip.compress(written(tmp_path / "old.jsonl", *map(older, records)).read_bytes()))
    assert call(old, "--against", "head") == out
    assert "at most, all/name" in call(path)  # where records have it


def test_mixing_two_settings(tmp_path, monkeypatch, capsys):
    """No prompt at 0.4 and every prompt at 0.8: by turns half of them at 0.6. S2D2 has a price of its own."""
    call = caller(report, monkeypatch, capsys)
    two = [record("base", "x 1", "0000", 0.4), record("base", "x 2", "1111", 0.8)]
    path = written(tmp_path / "r.jsonl", *two)
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"full": 1.0, "commit": 1.0, "head": 0.1}))
    mixed, time = tables(call(path, "--unit", "token", "--mix", "--prices", prices))
    assert dict(zip(mixed[0], mixed[1], strict=True))["0.6"].startswith("0.500 ")
    assert time[0][0] == "at most, time/token" and time[1][-3:] == ["-"] * 3  # 9.5 forwards for two tokens
    (plain,) = tables(call(path, "--unit", "token"))
    assert dict(zip(plain[0], plain[1], strict=True))["0.6"] == "0.000 [0.000, 0.000]"
    two[0]["second"] = "s2d2"
    assert "lacks s2d2" in call.fails(written(path, *two), "--prices", prices)


def test_leads_over_budgets(tmp_path, monkeypatch, capsys):
    """Four prompts, of which the base completes none, and the head a quarter of the draws by its first setting and
    three by its second: a lead of 1/4 at one budget and of 3/4 at the other."""
    monkeypatch.setitem(report.AVERAGED, "token", (0.45, 0.55))
    records = [record("base", "one", "0000", 0.2, draws=4)]
    records += [record("head", "one", "1111", 0.4, draws=4), record("head", "two", "3333", 0.5, draws=4)]
    call = caller(report, monkeypatch, capsys)
    out = call(written(tmp_path / "r", *records), "--unit", "token", "--against", "head")
    _, (name, mean, least) = tables(out)[-1]
    assert name == "base" and mean.split()[0] == "+0.500" and least == "+0.250 [+0.250, +0.250]"


def test_a_table_of_rules(tmp_path, monkeypatch, capsys):
    """Of a system with three rules: b has every name for 0.4 and none for 0.35, and of c's settings the dearer is the
    better one. A head that is on or off has no such table."""
    records = [record("base", "a 1", "0000", 0.35), record("base", "b 1", "1111", 0.4)]
    records += [record("base", "c 1", "0000", 0.5), record("base", "c 2", "1111", 0.9)]
    records += [record("head", "tau_keep 0", "1111", 0.4), record("head", "off, a 1", "1111", 0.8)]
    path = written(tmp_path / "r.jsonl", *records)
    title, a, b, c = tables(caller(report, monkeypatch, capsys)(path, "--unit", "token"))[-1]
    none, full = "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]"
    assert title[0] == "base, all/token"
    assert a == ["a", *[none] * 12] and b == ["b", "-", *[full] * 11]
    assert c[:8] == ["c", *["-"] * 3, *[none] * 4] and [cell.split()[0] for cell in c[8:]] == ["1.000"] * 5


def test_the_tables_of_text_by_hand(tmp_path, monkeypatch, capsys):
    """Two documents of a span each, two systems of one setting and two seeds. A mean of -1 and 0 is -1, -1/2 or 0 in a
    quarter, a half and a quarter of the resamples; the head is 1/4 better in each span, so in each resample. No span
    parses or not. Older records have a cost for each span."""
    records = []
    for ckpt in "cd":
        same = dict(exact=[0.5, 0.5], parses=[math.nan] * 2, ckpt=ckpt)
        records.append(record("base", "one", "", 0.4, score=[-1.0, 0.0], **same))
        records.append(record("head", "one", "", 0.45, score=[-0.75, 0.25], **same))
    call = caller(report, monkeypatch, capsys)
    path = written(tmp_path / "r.jsonl", *records, clusters={"documents": [3, 7]})
    out = call(path, "--unit", "token", "--against", "head")
    assert "parses" not in out
    title, score, minus, leads, *_ = tables(out)
    assert title == [["score: the best setting that costs no more"]]
    at = {row[0]: dict(zip(score[0], row, strict=True)) for row in score[1:]}
    assert at["base"]["0.35"] == at["head"]["0.4"] == "-"
    assert at["base"]["0.4"] == at["base"]["1.0"] == "-0.500 [-1.000, 0.000]"
    assert at["head"]["0.45"] == "-0.250 [-0.750, 0.250]"
    assert dict(zip(minus[0], minus[1], strict=True))["0.45"] == "+0.250 [+0.250, +0.250]"
    assert leads[0][0] == "head minus, over budgets of 0.2 to 0.6"

    new = ("cost", "per", "counts", "found", "n_layer")
    old = [{k: v for k, v in r.items() if k not in new} | {"all": [0.3, r["cost"]["all"] - 0.3]} for r in records]
    assert call(written(path, *old, clusters={"documents": [3, 7]}), "--against", "head") == out


def test_the_committed_records_print_the_page():
    """The head's line in both tables of results/pays: within three and four forwards a name, or their time."""
    page = (ROOT / "results" / "pays" / "README.md").read_text()
    lines = [line.replace("*", "").split(" | ")[1:] for line in page.splitlines() if "**head** |" in line]
    budgets = [line.split(" | ")[1:] for line in page.splitlines() if line.startswith("| at most | 2 |")]
    prices = json.loads((ROOT / "beyond" / "prices.json").read_text())
    clusters, records = report.load(ROOT / "results" / "pays" / "records.jsonl.gz")
    for kind, of, line, limits in zip(("all", "time"), (None, prices), lines, budgets, strict=True):
        systems, cluster = measured(records, clusters, "exist", report.Unit("name", records[0], of))
        head = systems["head"]
        sums = seeds.by_beginning(head.values, cluster)
        costs = {kind: head.figures[kind]}
        within = seeds.within_budgets(sums, costs, [3.0, 4.0], seeds.draw(cluster), seeds.mixture)[kind]
        shown = dict(zip([limit.strip(" |") for limit in limits], [cell.strip(" |") for cell in line], strict=True))
        assert [seeds.interval(share)[1:5] for share in within] == [shown["3"], shown["4"]]


def test_what_cannot_be_compared_is_refused(tmp_path, monkeypatch, capsys):
    call = caller(report, monkeypatch, capsys)
    r = record("a", "x", "1010")
    whole = written(tmp_path / "whole", r)
    assert "none of the systems: a" in call.fails(whole, "--against", "b")
    assert "other prompts" in call.fails(whole, written(tmp_path / "other", r, clusters={"held out": [0] * 4}))
    assert "lacks 'all/token'" in call.fails(written(tmp_path / "damaged", {"found": "1"}))
    assert "twice" in call.fails(whole, whole)
    more = written(tmp_path / "more", r, record("a", "y", "1010"), record("a", "x", "1010", ckpt="d"))
    assert "y was not measured for all of its 2 seeds" in call.fails(more)
    old = written(tmp_path / "old", older(r))
    assert "per token" in call.fails(old, "--unit", "name")
    assert "measure again" in call.fails(old, "--prices", ROOT / "beyond" / "prices.json")
