"""The table of who pays: intervals, budgets, cost, what a record holds. `pytest tests/beyond/test_pays.py`

Records are made by hand: a digit for each prompt says how many of its completions exist.
"""

import gzip
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from beyond.drafts import Drafts
from beyond.own_blocks import OwnBlocks
from common import ROOT, approx, caller, random_ids, tiny_model

import evaluate
from beyond import pays
from beyond.spans import interval, means, resamples, within
from cache import Output
from data import generator
from sample import Decoding, generate


def record(system, setting, found, cost=1.0, n_layer=4, draws=1, **more):
    """serial costs twice as much as all"""
    costs = {"full/token": cost, "all/token": cost, "serial/token": 2 * cost, "distinct": 0.25, "repeated": 0.5}
    own = {"system": system, "setting": setting, "found": found, "n_layer": n_layer, "draws": draws}
    return own | {"temperature": 0.0} | costs | more


def cell(records, cluster, system="a", setting="x"):
    return interval(means(pays.pool(records)[system, setting]["exist"], resamples(cluster)))


def best(records, cluster, budget, count="all/token", system="a"):
    """The share within a budget, of the sample."""
    of = [p for (name, _), p in pays.pool(records).items() if name == system]
    exist, costs = (np.array([p[k] for p in of]) for k in ("exist", count))
    return within(budget, exist, costs, np.ones((1, len(cluster))), np.array(cluster) % 2 == 1)[0]


def ours(model):
    model.__class__ = OwnBlocks
    model.give_blocks(8, 0.5, generator("own"))
    return model


# --- intervals
def test_two_beginnings_are_drawn_twice_once_or_never():
    """Shares of a resample: 1, 1/2 and 0, with probability 1/4, 1/2, 1/4; of 3 and 1 prompts 1, 3/4 and 0."""
    assert cell([record("a", "x", "10")], [0, 1]) == "0.500 [0.000, 1.000]"
    assert cell([record("a", "x", "1110")], [0, 0, 0, 1]) == "0.750 [0.000, 1.000]"
    x = means(pays.pool([record("a", "x", "1110")])["a", "x"]["exist"], resamples([0, 0, 0, 1]))
    assert set(x[1:]) == {0.0, 0.75, 1.0} and x[0] == 0.75
    assert np.mean(x[1:] == 0.75) == approx(0.5, abs=0.05)  # three standard deviations of 1,000 draws


def test_different_beginnings_have_the_binomial_interval():
    """200 beginnings, 60 exist: a resample's number is binomial (200, 0.3), whose 2.5 and 97.5 % points are known."""
    low, high = map(float, cell([record("a", "x", "1" * 60 + "0" * 140)], range(200))[7:-1].split(", "))
    cdf = np.cumsum([math.comb(200, k) * 0.3**k * 0.7 ** (200 - k) for k in range(201)])
    assert 200 * low == approx(np.searchsorted(cdf, 0.025), abs=2)
    assert 200 * high == approx(np.searchsorted(cdf, 0.975), abs=2)


def test_copies_of_a_beginning_say_nothing_new():
    """The interval of one prompt each is that of five seeds, of equal prompts in both groups, and of 9 equal draws."""
    one, found = cell([record("a", "x", "1101000")], range(7)), "1101000"
    assert cell([record("a", "x", found, ckpt=seed) for seed in range(5)], range(7)) == one
    assert cell([record("a", "x", found * 3)], [*range(7)] * 3) == one
    assert cell([record("a", "x", found.replace("1", "9"), draws=9)], range(7)) == one
    assert cell([record("a", "x", found.replace("1", "z"), draws=35)], range(7)) == one
    assert cell([record("a", "x", found * 3)], range(21)) != one


def test_seeds_are_pooled_each_completion_counted_once():
    records = [record("a", "x", "11", 2.0), record("a", "x", "10", 1.0), record("a", "x", "30", 0.5, draws=4)]
    p = pays.pool(records)["a", "x"]
    assert p["exist"] == approx([5 / 6, 1 / 6])
    assert p["all/token"] == approx((2 + 1 + 4 * 0.5) / 6) and p["serial/token"] == approx(2 * p["all/token"])
    assert math.isnan(p["entropy"])  # one draw has none
    mixed = [record("a", "x", "11", draws=2, entropy=0.5), record("a", "x", "11", draws=6, entropy=0.1)]
    assert pays.pool(mixed)["a", "x"]["entropy"] == approx((2 * 0.5 + 6 * 0.1) / 8)


def test_a_difference_is_paired():
    """Each beginning is completed twice, by a once more often than by b: any resample differs by 1/2."""
    records = [record("a", "x", "12" * 10, draws=2), record("b", "x", "01" * 10, draws=2)]
    pooled, weights = pays.pool(records), resamples(range(20))
    a, b = (means(pooled[name, "x"]["exist"], weights) for name in "ab")
    assert interval(a - b, "+") == "+0.500 [+0.500, +0.500]"
    assert a[1:].max() - a[1:].min() > 0.2 and interval(b - a, "+").startswith("-0.500 [")


# --- budgets
def test_what_is_best_on_one_half_is_judged_on_the_other():
    """x completes the even beginnings, y the odd ones. Chosen by the even ones, x has none of the odd ones."""
    records = [record("a", "x", "101010"), record("a", "y", "010101")]
    assert best(records, range(6), 1.0) == 0
    good = [record("a", "x", "101000"), record("a", "y", "010100"), record("a", "z", "111111")]
    assert best(good, range(6), 1.0) == 1
    # y, 2 of 3 even ones, is chosen by them and has 1 of the odd ones; x, 3 odd ones, by those, and has 1 even one
    halves = [record("a", "x", "110101", 0.4), record("a", "y", "111000", 0.8)]
    assert best(halves, range(6), 1.0) == approx(2 / 6)


def test_equal_prompts_are_of_one_half():
    """Beginnings 0, 1, 0, 1: x completes the first, y the second; no copy of a beginning chooses for another."""
    records = [record("a", "x", "1010"), record("a", "y", "0101")]
    assert best(records, [0, 1, 0, 1], 1.0) == 0


def test_a_budget_takes_what_it_can_pay_over_all_prompts():
    records = [record("a", "slow", "1111", 2.0), record("a", "slow", "1111", 1.0), record("a", "fast", "1000", 0.5)]
    assert best(records, range(4), 1.49) == 0.25 and best(records, range(4), 1.5) == 1
    assert best(records, range(4), 1.5, "serial/token") == 0.25
    assert math.isnan(best(records, range(4), 0.99, "serial/token"))


def test_a_forward_of_more_layers_costs_more():
    """5 layers beside the first system's 4: 1.25 times as much, whatever is counted. 4 beside 5: 0.8 times."""
    deep = record("deep", "x", "11", 0.8, 5)
    p = pays.pool([record("a", "x", "11", 0.8), deep])
    assert [p["deep", "x"][k] for k in pays.COUNTED] == approx([1.0, 1.0, 2.0])
    assert [p["a", "x"][k] for k in pays.COUNTED] == approx([0.8, 0.8, 1.6])
    assert pays.pool([deep, record("a", "x", "11", 0.8)])["a", "x"]["all/token"] == approx(0.64)
    assert p["deep", "x"]["repeated"] == 0.5


def test_the_tables_by_hand(tmp_path, monkeypatch, capsys):
    """Both systems have one setting at each temperature; ours is out of the budgets below 0.8 in all and 1.6 in serial
    forwards. Of ours all exist, of the base none: the difference is 1 in every resample."""
    call, path = caller(pays, monkeypatch, capsys), tmp_path / "r.jsonl"
    drawn = dict(temperature=0.5, draws=2, entropy=0.125)
    records = [record("base", "x", "0000", 0.4), record("ours", "x", "1111", 0.8)]
    records += [record("base", "x, T 0.5", "0000", 0.4, **drawn), record("ours", "x, T 0.5", "2222", 0.8, **drawn)]
    head = {"clusters": {"held out": [0, 1], "trained": [2, 3]}}
    path.write_text("".join(json.dumps(r) + "\n" for r in [head, *records]))
    tables = [
        [line.split("  ") for line in t.splitlines()]
        for t in call("--records", path, "--against", "ours").split("\n\n")
    ]
    tables = [[[c.strip() for c in line if c.strip()] for line in t] for t in tables]
    titles = [f"{what}, {count}/token{T}" for T in ("", ", T 0.5") for count in ("all", "serial")
              for what in ("at most", "ours minus")]  # fmt: skip
    assert [t[0][0] for t in tables] == ["system", *titles]
    assert tables[0][4][:3] == ["ours", "x, T 0.5", "1.000 [1.000, 1.000]"]
    none, all_, minus = "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]", "+1.000 [+1.000, +1.000]"
    assert tables[1][1:] == [["base", *[none] * 9], ["ours", *["-"] * 4, *[all_] * 5]]
    assert tables[2][1:] == [["base", *["-"] * 4, *[minus] * 5]]
    assert tables[4][1:] == [["base", *["-"] * 8, minus]]  # 2.0 alone
    assert "minus" not in call("--records", path)
    assert call.fails("--records", path, "--against", "b").endswith("none of the systems: base, ours")


# --- what is measured
@pytest.mark.parametrize("own", [False, True])
def test_serial_forwards_count_each_run_of_stage_b_once(own):
    """One row, one block of 8 masks after 8 of prompt: Stage B runs in each step that has a bundle (of two, if own)."""
    model, prompt = tiny_model(n_rounds=1, eos_id=-1), random_ids(1, 8)[0].tolist()
    model = ours(model) if own else model
    d, looks = Decoding(gen_length=8, tau_m2t=0.2, tau_t2t=None), Counter()
    steps = generate(model, [prompt], d, trace=True)[0].steps
    pays.counting(model, looks)
    out = generate(model, [prompt], d)[0]
    assert len(steps) == out.nfe["full"]
    assert 0 < looks[0] <= out.nfe["full"] if own else looks[0] == out.nfe["partial"]
    looks.clear()
    generate(model, [prompt], replace(d, n_rounds=0))
    assert looks.total() == 0


def test_serial_forwards_count_every_look_of_drafts():
    """Stage B's steps as generate's trace has them, and how often it really ran for its one row."""
    model, prompt, ran = tiny_model(n_rounds=1, eos_id=-1), random_ids(1, 8)[0].tolist(), []
    model.__class__ = Drafts
    model.give_blocks(8, 8, generator("drafts"))
    for p in model.own.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator("drafts", *p.shape))
    model.second_look = lambda *args, look=model.second_look: ran.append(1) or look(*args)
    d, looks = Decoding(gen_length=24, tau_m2t=-1.0, tau_t2t=None, temperature=1.0), Counter()
    pays.counting(model, looks)
    out = generate(model, [prompt], d)[0]
    assert looks[0] == len(ran) > out.nfe["full"]  # several looks in a step


@pytest.mark.parametrize("own", [False, True])
def test_equal_prompts_are_decoded_once_with_the_same_result(own):
    """Tokens, forwards and runs of Stage B of every row: those of decoding all rows, and each alone. Rows end at
    different steps."""
    model = tiny_model(n_rounds=1)
    model, looks, (a, b, c) = ours(model) if own else model, Counter(), random_ids(3, 8).tolist()
    prompts, d = [a, b, a, c[:3], b, a], Decoding(gen_length=16, tau_m2t=0.3, tau_t2t=None, eos_early_stop=True)
    assert pays.numbered(prompts) == [0, 1, 0, 2, 1, 0]
    pays.counting(model, looks)
    outputs, ran = pays.complete(model, prompts, d, range(1), looks)
    assert looks.keys() == {0, 1, 2}  # so many rows were decoded
    looks.clear()
    every = generate(model, prompts, d)
    assert [(o.tokens, o.nfe) for o in outputs] == [(o.tokens, o.nfe) for o in every]
    assert ran == [looks[i] for i in range(6)]
    assert len(set(ran)) > 1 and len({o.nfe["full"] for o in outputs}) > 1  # or nothing would tell rows apart
    for prompt, output, n in zip(prompts, outputs, ran, strict=True):
        looks.clear()
        assert generate(model, [prompt], d)[0].tokens == output.tokens and looks == {0: n}


def test_with_a_temperature_every_draw_of_every_prompt_is_another():
    model, looks, (a, b) = tiny_model(n_rounds=1), Counter(), random_ids(2, 8).tolist()
    d = Decoding(gen_length=8, tau_m2t=0.3, tau_t2t=None, temperature=2.0)
    pays.counting(model, looks)
    outputs, ran = pays.complete(model, [a, b, a], d, range(5, 8), looks)
    assert len(ran) == 9 and len({tuple(o.tokens) for o in outputs}) == 9
    alone = [generate(model, [a, b, a], d, seed) for seed in (5, 6, 7)]
    assert [o.tokens for o in outputs] == [o.tokens for drawn in alone for o in drawn]


def test_entropy():
    assert pays.entropy(["a", "a", "b", "c"]) == approx(1.5 * math.log(2))  # 1/2, 1/4, 1/4
    assert pays.entropy(["a"] * 7) == 0 and pays.entropy(list("abcdefgh")) == approx(math.log(8))


def test_a_record_by_hand():
    """Two equal prompts, 2 draws: A and B, then A and ?. Of the first both exist, of the second one of two. 3 full, 1
    commit, 0.5 partial forwards of 1/4, and 2 runs of Stage B for 2 tokens each."""
    stem, tokenizer = "LATIN SMALL LETTER ", SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)).rstrip("\0"))
    model = SimpleNamespace(cfg=SimpleNamespace(n_last=1, n_layer=4))
    outputs = [Output([ord(x), 0], {"full": 3, "partial": 0.5, "commit": 1}) for x in "ABA?"]
    prompts = dict.fromkeys((stem + "C", stem + "B"), [ord(x) for x in stem])
    r = pays.describe(model, tokenizer, prompts, outputs, [2, 2, 2, 2])
    assert r["found"] == "21" and (r["draws"], r["n_layer"]) == (2, 4)
    assert (r["exist"], r["distinct"], r["repeated"], r["itself"]) == (3 / 4, 2 / 4, 2 / 4, 1 / 4)
    assert r["entropy"] == approx(math.log(2) / 2)  # of A and A, and of B and ?
    assert (r["full/token"], r["all/token"], r["serial/token"]) == (1.5, (3 + 1 + 0.125) / 2, (3 + 1 + 2) / 2)
    assert "low" not in r  # Wilson's, of independent completions


def test_the_table_of_the_shipped_model(tmp_path, monkeypatch, capsys):
    call, names = caller(pays, monkeypatch, capsys), ROOT / "assets" / "names"
    path = tmp_path / "r.jsonl"
    argv = ["--system", "base", names, "--system", "ours", names, names / "joint", "--prompts", 4, "--keep", 0, 1]
    table = call(*argv, "--against", "ours", "--temperature", 0, 0.7, "--draws", 3, "--out", path)
    assert "at most, all/token, T 0.7" in table and "ours minus, serial/token" in table
    head, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {group: len(of) for group, of in head["clusters"].items()} == {"held out": 4, "trained": 4}
    assert len(records) == 2 * (len(pays.TAUS) + len(pays.FINER) + 2 * (len(pays.TAUS) - 1))
    for r in records:
        drawn = r["setting"].endswith(", T 0.7")
        assert r["draws"] == (3 if drawn else 1) and len(r["found"]) == 8 and ("entropy" in r) == drawn
        assert sum(map(int, r["found"])) == round(r["exist"] * 8 * r["draws"]) and r["n_layer"] == 4
        assert 0 <= r.get("entropy", 0) <= math.log(3) and r["serial/token"] >= r["all/token"] - 1e-9
    assert call("--records", path, "--against", "ours") == table
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert call("--records", tmp_path / "r.jsonl.gz", "--against", "ours") == table


def test_greedy_records_are_the_judges_of_both_groups(tmp_path, monkeypatch, capsys):
    """At one gate, and with more prompts than different ones: what evaluate.py says of them, decoded one by one."""
    names, d = ROOT / "assets" / "names", Decoding(gen_length=32, eos_early_stop=True, tau_m2t=0.1, tau_t2t=None)
    monkeypatch.setattr(pays, "settings", lambda *_: {"x": ({"tau_keep": 0.5}, d)})
    call, path = caller(pays, monkeypatch, capsys), tmp_path / "r.jsonl"
    call("--system", "ours", names, names / "joint", "--prompts", 20, "--out", path)
    head, r = [json.loads(line) for line in path.read_text().splitlines()]
    model = pays.load_model(names, "cpu", evaluate.DTYPES["fp32"], names / "joint")
    tokenizer, model.tau_keep = pays.load_tokenizer(names, "bpe"), 0.5
    drawn = evaluate.draw_names(20, "held out", tokenizer) | evaluate.draw_names(20, "trained", tokenizer)
    outputs = generate(model, list(drawn.values()), d)
    written = [tokenizer.decode(p + o.tokens) for p, o in zip(drawn.values(), outputs, strict=True)]
    judged = evaluate.judge(list(drawn), written, outputs, model.partial_cost)
    assert {k: r[k] for k in judged.keys() & r.keys()} == approx({k: judged[k] for k in judged.keys() & r.keys()})
    cluster = sum(head["clusters"].values(), [])
    assert max(cluster) + 1 == len(set(map(tuple, drawn.values()))) < 40
    assert all((p == q) == (i == j) for p, i in zip(drawn.values(), cluster, strict=True)
               for q, j in zip(drawn.values(), cluster, strict=True))  # fmt: skip


def test_mistakes(tmp_path, monkeypatch, capsys):
    call, names = caller(pays, monkeypatch, capsys), ROOT / "assets" / "names"

    def written(name, *lines):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    head, r = {"clusters": {"held out": [0], "trained": [1]}}, record("a", "x", "10")
    whole, other = written("whole", head, r), written("other", {"clusters": {"held out": [0], "trained": [0]}}, r)
    assert "--system" in call.fails() and "--system" in call.fails("--system", "a")
    without = {k: v for k, v in r.items() if k != "found"} | {"exist": 0.5, "group": "held out"}
    for old in (written("old", without, without), written("mixed", head, r, without), written("empty")):
        assert "measure again" in call.fails("--records", old)
    assert "no-such-file" in call.fails("--records", tmp_path / "no-such-file")
    (tmp_path / "short.gz").write_bytes(gzip.compress(whole.read_bytes())[:40])
    assert "measure again" in call.fails("--records", tmp_path / "short.gz")
    assert "--taus 1" in call.fails("--system", "a", names, names / "joint", "--prompts", 2, "--taus", 1)
    assert "other prompts" in call.fails("--records", whole, other)
    assert "other prompts" in call.fails("--records", whole, "--system", "a", names, "--prompts", 2)
    assert "equal" in call.fails("--records", other)
    assert "--temperature" in call.fails("--system", "a", names, "--draws", 2)
    assert "35" in call.fails("--system", "a", names, "--draws", 36, "--temperature", 1)
