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
    """mult and serial cost twice as much as all; a full forward multiplies by 100 weights. A name has 2 tokens."""
    costs = {"all": 2 * cost, "mult": 400 * cost, "serial": 4 * cost}
    own = {"system": system, "setting": setting, "found": found, "n_layer": n_layer, "draws": draws, "distinct": 0.25}
    own |= {"cost": costs, "per": {"token": 2, "name": 1}, "counts": COUNTS, "second": "head", "mult/full": 100}
    return own | {"temperature": 0.0, "top_p": 1.0, "ckpt": "c"} | more


def older(r):
    """The same as it was written before: costs of a token alone, and an adapter."""
    cost = {f"{kind}/token": of / r["per"]["token"] for kind, of in r["cost"].items()}
    return {k: v for k, v in r.items() if k not in ("cost", "per", "counts", "second")} | cost | {"adapter": "a"}


def written(path, *records, clusters=GROUPS):
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"clusters": clusters}, *records]))
    return path


def cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def tables(out):
    return [[cells(line) for line in table.splitlines()] for table in out.split("\n\n")]


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
    assert system.figures["mult"].tolist() == system.figures["serial"].tolist() == [[4.0, 2.0], [2.0, 1.0]]
    assert system.figures["distinct"].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert np.isnan(system.figures["entropy"]).all()  # one draw has none


def test_costs_are_in_forwards_of_the_first_system_and_per_what_is_asked():
    """5 layers beside the first system's 4: 1.25 times as much. Multiplications need no layers: 160 of 100."""
    a = record("a", "x", "11", 0.8)
    deep = record("deep", "x", "11", 0.8, 5, **{"mult/full": 125})
    assert [Unit("token", a).cost(deep, k) for k in report.COSTS] == approx([1.0, 1.6, 2.0])
    assert [Unit("token", a).cost(a, k) for k in report.COSTS] == approx([0.8, 1.6, 1.6])
    assert [Unit("token", deep).cost(a, k) for k in report.COSTS] == approx([0.64, 160 / 125, 1.28])
    assert [Unit("name", a).cost(a, k) for k in report.COSTS] == approx([1.6, 3.2, 3.2])


def test_time_is_the_counts_by_their_prices():
    """8 full forwards of 2 seconds, a commit of 1 and 5 looks of .2 are 18 seconds: 9 full forwards, for 2 tokens."""
    prices = {"full": 2.0, "commit": 1.0, "head": 0.2, "stage_b": 0.5}
    a = record("a", "x", "11")
    assert Unit("token", a, prices).cost(a, "time") == approx(9 / 2)
    assert Unit("name", a, prices).cost(a | {"second": "stage_b"}, "time") == approx((16 + 1 + 2.5) / 2)
    assert Unit("name", a, prices).cost(a | {"second": ""}, "time") == approx(17 / 2)


def test_what_does_not_apply_is_left_out():
    """Spans 0 and 2 are Python, of documents 5 and 7."""
    nan = math.nan
    spans = [record("base", "one", "", parses=[1.0, nan, 0.0, nan])]
    systems, cluster = measured(spans, {"documents": [5, 6, 7, 7]}, "parses")
    assert systems["base"].values.tolist() == [[[1, 0]]] and cluster.tolist() == [0, 1]


# --- tables
def test_the_tables_by_hand(tmp_path, monkeypatch, capsys):
    """Both systems have one greedy setting; the head is out of the budgets below 0.8 in all and 1.6 in
    the others. Of its completions all exist, of the base's none: the difference is 1 in every resample.
    Older records print the same.
    """
    call = caller(report, monkeypatch, capsys)
    drawn = dict(temperature=0.5, top_p=0.9, draws=2, entropy=0.125)
    records = [record("base", "x", "0000", 0.4), record("head", "x", "1111", 0.8)]
    records += [record("base", "y, drawn", "0000", 0.4, **drawn), record("head", "y, drawn", "2222", 0.8, **drawn)]
    path = written(tmp_path / "r.jsonl", *records)
    out = call(path, "--unit", "token", "--against", "head")
    shown = tables(out)

    titles = [f"{what}, {kind}/token" for kind in ("all", "mult", "serial") for what in ("at most", "head minus")]
    leads = "head minus, over budgets of 0.36 to 1.0"
    assert [t[0][0] for t in shown] == ["largest share", *titles, leads, "temperature 0.5, top_p 0.9"]
    none, full, minus = "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]", "+1.000 [+1.000, +1.000]"
    assert shown[0][1] == ["base", "x", "1", none, "0.250", "0.400", "0.800", "0.800"]
    assert shown[0][2] == ["head", "x", "1", full, "0.250", "0.800", "1.600", "1.600"]
    assert shown[1][0][1:] == ["0.35", "0.4", "0.45", "0.5", "0.6", "0.7", "0.8", "0.9", "1.0", "1.2", "1.5", "2.0"]
    assert shown[1][1:] == [["base", "-", *[none] * 11], ["head", *["-"] * 6, *[full] * 6]]
    assert shown[2][1:] == [["base", *["-"] * 6, *[minus] * 6]]
    for serial in (shown[4], shown[6]):
        assert serial[1:] == [["base", *["-"] * 11, minus]]  # 2.0 alone
    assert shown[7][1:] == [["base", *["-"] * 6]]  # some budgets pay for nothing of the head
    assert shown[8][1] == ["system", "setting", "seeds", "exist", "distinct", "entropy", "all", "mult", "serial"]
    assert shown[8][3] == ["head", "y, drawn", "1", full, "0.250", "0.125", "0.800", "1.600", "1.600"]

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
    _, mixed, *_, time = tables(call(path, "--unit", "token", "--mix", "--prices", prices))
    assert dict(zip(mixed[0], mixed[1], strict=True))["0.6"].startswith("0.500 ")
    assert time[0][0] == "at most, time/token"
    plain = tables(call(path, "--unit", "token"))[1]
    assert dict(zip(plain[0], plain[1], strict=True))["0.6"] == "0.000 [0.000, 0.000]"
    two[0]["second"] = "s2d2"
    assert "lacks s2d2" in call.fails(written(path, *two), "--prices", prices)


def test_leads_over_budgets(tmp_path, monkeypatch, capsys):
    """Four prompts, of which the base completes none, and the head a quarter of the draws by its first
    setting and three by its second: a lead of 1/4 at one budget and of 3/4 at the other.
    """
    monkeypatch.setitem(report.AVERAGED, "token", (0.45, 0.55))
    records = [record("base", "one", "0000", 0.2, draws=4)]
    records += [record("head", "one", "1111", 0.4, draws=4), record("head", "two", "3333", 0.5, draws=4)]
    call = caller(report, monkeypatch, capsys)
    out = call(written(tmp_path / "r", *records), "--unit", "token", "--against", "head")
    title, row = tables(out)[7]
    assert title[:3] == ["head minus, over budgets of 0.45 to 0.55", "all, mean", "all, least"]
    assert row[0] == "base" and row[3:] == ["-"] * 4  # mult and serial pay for nothing
    assert row[1].split()[0] == "+0.500" and row[2] == "+0.250 [+0.250, +0.250]"


def test_a_table_of_rules(tmp_path, monkeypatch, capsys):
    """Of a system with three rules: b has every name for 0.4 and none for 0.35, and of c's settings the
    dearer is the better one. A head that is on or off has no such table.
    """
    records = [record("base", "a 1", "0000", 0.35), record("base", "b 1", "1111", 0.4)]
    records += [record("base", "c 1", "0000", 0.5), record("base", "c 2", "1111", 0.9)]
    records += [record("head", "tau_keep 0", "1111", 0.4), record("head", "off, a 1", "1111", 0.8)]
    path = written(tmp_path / "r.jsonl", *records)
    rows = tables(caller(report, monkeypatch, capsys)(path, "--unit", "token"))[-1]
    none, full = "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]"
    assert rows[0][0] == "base, all/token" and len(rows) == 4
    assert rows[1] == ["a", *[none] * 12]
    assert rows[2] == ["b", "-", *[full] * 11]
    assert rows[3][:8] == ["c", *["-"] * 3, *[none] * 4]
    assert [cell.split()[0] for cell in rows[3][8:]] == ["1.000"] * 5


def test_the_tables_of_text_by_hand(tmp_path, monkeypatch, capsys):
    """Two documents of a span each, two systems of one setting and two seeds. A mean of -1 and 0 is -1,
    -1/2 or 0 in a quarter, a half and a quarter of the resamples; the head is 1/4 better in each span, so
    in each resample. No span parses or not.
    """
    none = [math.nan] * 2
    records = []
    for ckpt in "cd":
        same = dict(exact=[0.5, 0.5], parses=none, stutter=[0.0, 0.0], ckpt=ckpt)
        records.append(record("base", "one", "", 0.4, score=[-1.0, 0.0], **same))
        records.append(record("head", "one", "", 0.45, score=[-0.75, 0.25], **same))
    path = written(tmp_path / "r.jsonl", *records, clusters={"documents": [3, 7]})
    out = caller(report, monkeypatch, capsys)(path, "--unit", "token", "--against", "head")
    assert "parses" not in out.replace("exact", "")
    settings, score, budgets, minus, *_ = tables(out.replace("more\n\n", "more\n"))[:4]
    assert settings[0] == ["system", "setting", "all", "mult", "serial", "score", "exact", "stutter"]
    half, flat, none = "-0.500 [-1.000, 0.000]", "0.500 [0.500, 0.500]", "0.000 [0.000, 0.000]"
    assert settings[1] == ["base", "one", "0.400", "0.800", "0.800", half, flat, none]
    at = {row[0]: dict(zip(score[1], row, strict=True)) for row in score[2:]}
    assert at["base"]["0.35"] == at["head"]["0.4"] == "-" and at["base"]["0.4"] == at["base"]["1.0"] == half
    assert at["head"]["0.45"] == "-0.250 [-0.750, 0.250]"
    assert dict(zip(budgets[0], budgets[1], strict=True))["0.45"] == "+0.250 [+0.250, +0.250]"


def test_the_committed_records_print_the_page():
    """A line of the appendix of results/pays."""
    clusters, records = report.load(ROOT / "results" / "pays" / "records.jsonl.gz")
    systems, cluster = measured(records, clusters, "exist")
    draws = seeds.draw(cluster)
    head = systems["joint head"]
    sums = seeds.by_beginning(head.values, cluster)
    within = seeds.within_budgets(sums, {"all": head.figures["all"]}, [0.35, 0.5], draws)["all"]
    assert [seeds.interval(share) for share in within] == ["0.707 [0.657, 0.754]", "0.812 [0.768, 0.851]"]


def test_what_cannot_be_compared_is_refused(tmp_path, monkeypatch, capsys):
    call = caller(report, monkeypatch, capsys)
    r = record("a", "x", "1010")
    whole = written(tmp_path / "whole", r)
    assert "none of the systems: a" in call.fails(whole, "--against", "b")
    assert "other prompts" in call.fails(whole, written(tmp_path / "other", r, clusters={"held out": [0] * 4}))
    assert "equal" in call.fails(tmp_path / "other")
    assert "lacks 'all/token'" in call.fails(written(tmp_path / "damaged", {"found": "1"}))
    assert "twice" in call.fails(whole, whole)
    more = written(tmp_path / "more", r, record("a", "y", "1010"), record("a", "x", "1010", ckpt="d"))
    assert "y was not measured for all of its 2 seeds" in call.fails(more)
    old = written(tmp_path / "old", older(r))
    assert "per token" in call.fails(old, "--unit", "name")
    assert "measure again" in call.fails(old, "--prices", ROOT / "beyond" / "prices.json")
