"""The table of who pays: budgets, costs, what a record holds. `pytest tests/beyond/test_pays.py`

Records are made by hand: a digit for each prompt says how many of its completions exist.
"""

import gzip
import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import ROOT, approx, caller, random_ids, tiny_model

import evaluate
from beyond import decoders, pays, rule_steps, rules, seeds
from beyond.costs import layers_and_vocabulary, multiplications
from beyond.joint_head import JointHead
from beyond.sampling_head import SamplingHead
from cache import Output
from lib.util import generator, write_json
from sample import Decoding, generate, step_of


def record(system, setting, found, cost=1.0, n_layer=4, draws=1, **more):
    """mult and serial cost twice as much as all; a full forward multiplies by 100 weights"""
    costs = {"all/token": cost, "mult/token": 200 * cost, "serial/token": 2 * cost, "mult/full": 100}
    own = {"system": system, "setting": setting, "found": found, "n_layer": n_layer, "draws": draws, "distinct": 0.25}
    return own | {"temperature": 0.0, "top_p": 1.0, "ckpt": "c", "adapter": None} | costs | more


def pooled(*records):
    return pays.by_system(list(records), records[0])


def with_head(model):
    model.__class__ = JointHead
    model.give_head(head_layers=1, width=8, tau_keep=0.5, rng=generator("head"))
    return model


def count(model):
    looks = Counter()
    model.step = pays.counted(step_of(model), looks)
    return looks


# --- systems
def test_a_system_is_its_settings_over_its_seeds():
    """Two seeds, whose settings stand in another order; the second one has more draws."""
    seed = dict(ckpt="d", draws=4)
    system = pooled(
        record("a", "x", "11", 2.0), record("a", "y", "10", 1.0),
        record("a", "y", "30", 0.5, **seed), record("a", "x", "24", 1.0, **seed),
    )["a"]  # fmt: skip
    assert system.labels == ["x", "y"]
    assert system.values.tolist() == [[[1, 1], [0.5, 1]], [[1, 0], [0.75, 0]]]
    assert system.figures["all"].tolist() == [[2.0, 1.0], [1.0, 0.5]]
    assert system.figures["mult"].tolist() == system.figures["serial"].tolist() == [[4.0, 2.0], [2.0, 1.0]]
    assert system.figures["distinct"].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert np.isnan(system.figures["entropy"]).all()  # one draw has none


def test_adapters_tell_seeds_apart():
    same = [record("a", "x", "11"), record("a", "x", "10", adapter="j"), record("a", "x", "00", adapter="k")]
    assert pooled(*same)["a"].values.tolist() == [[[1, 1], [1, 0], [0, 0]]]


def test_costs_are_in_forwards_of_the_first_system():
    """5 layers beside the first system's 4: 1.25 times as much. Multiplications need no layers: 160 of 100."""
    deep = record("deep", "x", "11", 0.8, 5, **{"mult/full": 125})
    first = pooled(record("a", "x", "11", 0.8), deep)
    assert [first["deep"].figures[k].item() for k in pays.COSTS] == approx([1.0, 1.6, 2.0])
    assert [first["a"].figures[k].item() for k in pays.COSTS] == approx([0.8, 1.6, 1.6])
    last = pooled(deep, record("a", "x", "11", 0.8))
    assert [last["a"].figures[k].item() for k in pays.COSTS] == approx([0.64, 160 / 125, 1.28])


# --- tables
def test_a_table_of_rules(tmp_path, monkeypatch, capsys):
    """Of a system with three rules: b has every name for 0.4 and none for 0.35, and of c's settings the dearer is the
    better one. A head that is on or off has no such table."""
    call, path = caller(pays, monkeypatch, capsys), tmp_path / "r.jsonl"
    records = [record("base", "a 1", "0000", 0.35), record("base", "b 1", "1111", 0.4)]
    records += [record("base", "c 1", "0000", 0.5), record("base", "c 2", "1111", 0.9)]
    records += [record("head", "tau_keep 0", "1111", 0.4), record("head", "off, a 1", "1111", 0.8)]
    head = {"clusters": {"held out": [0, 1], "trained": [2, 3]}}
    path.write_text("".join(json.dumps(r) + "\n" for r in [head, *records]))

    last = call("--records", path).split("\n\n")[-1].splitlines()
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in last]
    none, full = "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]"
    assert rows[0][0] == "base, all/token" and len(rows) == 4
    assert rows[1] == ["a", *[none] * 12]
    assert rows[2] == ["b", "-", *[full] * 11]
    assert rows[3][:8] == ["c", *["-"] * 3, *[none] * 4]
    assert [cell.split()[0] for cell in rows[3][8:]] == ["1.000"] * 5


def test_the_tables_by_hand(tmp_path, monkeypatch, capsys):
    """Both systems have one greedy setting; the head is out of the budgets below 0.8 in all and 1.6 in the others. Of
    its completions all exist, of the base's none: the difference is 1 in every resample."""
    call, path = caller(pays, monkeypatch, capsys), tmp_path / "r.jsonl"
    drawn = dict(temperature=0.5, top_p=0.9, draws=2, entropy=0.125)
    records = [record("base", "x", "0000", 0.4), record("head", "x", "1111", 0.8)]
    records += [record("base", "y, drawn", "0000", 0.4, **drawn), record("head", "y, drawn", "2222", 0.8, **drawn)]
    head = {"clusters": {"held out": [0, 1], "trained": [2, 3]}}
    path.write_text("".join(json.dumps(r) + "\n" for r in [head, *records]))

    def cells(line):
        return [cell.strip() for cell in line.split("  ") if cell.strip()]

    shown = call("--records", path, "--against", "head").split("\n\n")
    tables = [[cells(line) for line in table.splitlines()] for table in shown]
    titles = [f"{what}, {kind}/token" for kind in ("all", "mult", "serial") for what in ("at most", "head minus")]
    leads = "head minus, over budgets of 0.36 to 1.0"
    assert [t[0][0] for t in tables] == ["largest share", *titles, leads, "temperature 0.5, top_p 0.9"]
    none, full, minus = "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]", "+1.000 [+1.000, +1.000]"
    assert tables[0][1] == ["base", "x", "1", none, "0.250", "0.400", "0.800", "0.800"]
    assert tables[0][2] == ["head", "x", "1", full, "0.250", "0.800", "1.600", "1.600"]
    assert tables[1][0][1:] == ["0.35", "0.4", "0.45", "0.5", "0.6", "0.7", "0.8", "0.9", "1.0", "1.2", "1.5", "2.0"]
    assert tables[1][1:] == [["base", "-", *[none] * 11], ["head", *["-"] * 6, *[full] * 6]]
    assert tables[2][1:] == [["base", *["-"] * 6, *[minus] * 6]]
    for serial in (tables[4], tables[6]):
        assert serial[1:] == [["base", *["-"] * 11, minus]]  # 2.0 alone
    assert tables[7][1:] == [["base", *["-"] * 6]]  # some budgets pay for nothing of the head
    assert tables[8][1] == ["system", "setting", "seeds", "exist", "distinct", "entropy", "all", "mult", "serial"]
    assert tables[8][3] == ["head", "y, drawn", "1", full, "0.250", "0.125", "0.800", "1.600", "1.600"]
    assert "minus" not in call("--records", path)
    assert "x, all/token" not in call("--records", path)
    assert call.fails("--records", path, "--against", "b").endswith("none of the systems: base, head")


def test_leads_over_budgets(capsys):
    """Four prompts, of which the base completes none, and the head a quarter of the draws by its first setting and
    three by its second: a lead of 1/4 at one budget and of 3/4 at the other. mult and serial pay for nothing."""
    same = dict(draws=4)
    systems = pooled(
        record("base", "one", "0000", 0.2, **same),
        record("head", "one", "1111", 0.4, **same), record("head", "two", "3333", 0.5, **same),
    )  # fmt: skip
    cluster = np.arange(4)
    pays.show_leads(systems, cluster, seeds.draw(cluster), "head", (0.45, 0.55))
    title, row = (
        [cell.strip() for cell in line.split("  ") if cell] for line in capsys.readouterr().out.split("\n")[1:3]
    )
    assert title[0] == "head minus, over budgets of 0.45 to 0.55" and title[1:3] == ["all, mean", "all, least"]
    assert row[0] == "base" and row[3:] == ["-"] * 4
    assert row[1].split()[0] == "+0.500" and row[2] == "+0.250 [+0.250, +0.250]"


def test_budgets_are_those_of_seeds_py():
    """Every kind of cost, with the shares that seeds.within_budgets gives."""
    systems = pooled(record("a", "x", "110100", 0.4), record("a", "y", "111001", 0.8))
    cluster = np.arange(6)
    draws = seeds.draw(cluster)
    found = pays.budgets(systems, cluster, draws)
    sums = seeds.by_beginning(systems["a"].values, cluster)
    for kind, cost in (("all", [[0.4], [0.8]]), ("mult", [[0.8], [1.6]]), ("serial", [[0.8], [1.6]])):
        expected = seeds.within_budgets(sums, {kind: np.array(cost)}, pays.BUDGETS, draws)[kind]
        assert np.array_equal(found[kind]["a"], expected, equal_nan=True)


# --- what is measured
@pytest.mark.parametrize("head", [False, True])
def test_each_run_of_stage_b_or_a_head_counts_once(head):
    """One row, one block of 8 masks after 8 of prompt: Stage B runs in each step that has a bundle, a head in
    each that has one of two."""
    model, prompt = tiny_model(n_rounds=1, eos_id=-1), random_ids(1, 8)[0].tolist()
    if head:
        model = with_head(model)
    d = Decoding(gen_length=8, tau_m2t=0.2, tau_t2t=None)
    steps = generate(model, [prompt], d, trace=True)[0].steps
    looks = count(model)
    out = generate(model, [prompt], d)[0]
    assert len(steps) == out.nfe["full"]
    if head:
        assert looks[0] == sum(len(s["fill"]) + len(s.get("refused", [])) > 1 for s in steps) > 0
    else:
        assert looks[0] == out.nfe["partial"] == out.nfe["full"]


def test_without_a_second_look_there_is_none_to_count():
    """Switched off, and by a rule."""
    prompt = random_ids(1, 8)[0].tolist()
    off = Decoding(gen_length=8, tau_m2t=0.2, tau_t2t=None, n_rounds=0)
    model = with_head(tiny_model(n_rounds=1, eos_id=-1))
    looks = count(model)
    generate(model, [prompt], off)
    assert looks.total() == 0
    model.step = pays.counted(rules.step_of(rules.threshold, 0.2), looks)
    assert generate(model, [prompt], off)[0].nfe["partial"] == looks.total() == 0


def test_every_look_of_a_sampling_head_counts():
    """How often it really ran for its one row."""
    model = tiny_model(n_rounds=1, eos_id=-1)
    model.__class__ = SamplingHead
    model.give_head(head_layers=1, width=8, looks=8, rng=generator("head"))
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data += 0.3 * torch.randn(p.shape, generator=generator("head", name))

    # every call is counted, whoever counts
    ran = []
    look = model.second_look
    model.second_look = lambda *args: ran.append(1) or look(*args)
    looks = count(model)
    d = Decoding(gen_length=24, tau_m2t=-1.0, tau_t2t=None, temperature=1.0)
    out = generate(model, random_ids(1, 8).tolist(), d)[0]
    assert looks[0] == len(ran) > out.nfe["full"]  # several looks in a step


@pytest.mark.parametrize("head", [False, True])
def test_equal_prompts_are_decoded_once_with_the_same_result(head):
    """Tokens, forwards and runs of Stage B of every row: those of decoding all rows, and each alone. Rows end at
    different steps."""
    model = tiny_model(n_rounds=1)
    if head:
        model = with_head(model)
    a, b, c = random_ids(3, 8).tolist()
    prompts, d = [a, b, a, c[:3], b, a], Decoding(gen_length=16, tau_m2t=0.3, tau_t2t=None)
    assert pays.numbered(prompts) == [0, 1, 0, 2, 1, 0]
    looks = count(model)
    outputs, ran = pays.complete(model, prompts, d, range(1), looks)
    assert looks.keys() == {0, 1, 2}  # so many rows were decoded

    # all rows
    looks.clear()
    every = generate(model, prompts, d)
    assert [(o.tokens, o.nfe) for o in outputs] == [(o.tokens, o.nfe) for o in every]
    assert ran == looks.total()

    # each alone
    alone = []
    for prompt, output in zip(prompts, outputs, strict=True):
        looks.clear()
        assert generate(model, [prompt], d)[0].tokens == output.tokens
        alone.append(looks[0])
    assert ran == sum(alone)
    assert len(set(alone)) > 1 and len({o.nfe["full"] for o in outputs}) > 1  # or nothing would tell rows apart


def test_with_a_temperature_every_draw_of_every_prompt_is_another():
    model, (a, b) = tiny_model(n_rounds=1), random_ids(2, 8).tolist()
    d = Decoding(gen_length=8, tau_m2t=0.3, tau_t2t=None, temperature=2.0)
    outputs, ran = pays.complete(model, [a, b, a], d, range(5, 8), count(model))
    assert len({tuple(o.tokens) for o in outputs}) == 9 and ran == sum(o.nfe["partial"] for o in outputs)
    alone = [generate(model, [a, b, a], d, seed) for seed in (5, 6, 7)]
    assert [o.tokens for o in outputs] == [o.tokens for drawn in alone for o in drawn]


def test_entropy():
    assert pays.entropy(["a", "a", "b", "c"]) == approx(1.5 * math.log(2))  # 1/2, 1/4, 1/4
    assert pays.entropy(["a"] * 7) == 0 and pays.entropy(list("abcdefgh")) == approx(math.log(8))


def test_a_record_by_hand():
    """Two equal prompts, 2 draws: A and B, then A and ?. Of the first both exist, of the second one of two. 3 full, 1
    commit, 0.5 partial forwards of 1/3 of the layers, and 2 runs of Stage B, for 2 tokens each."""
    stem, tokenizer = "LATIN SMALL LETTER ", SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)).rstrip("\0"))
    model = tiny_model(n_layer=3, n_last=1)
    outputs = [Output([ord(x), 0], {"full": 3, "partial": 0.5, "commit": 1}) for x in "ABA?"]
    prompts = dict.fromkeys((stem + "C", stem + "B"), [ord(x) for x in stem])
    r = pays.describe(model, tokenizer, prompts, outputs, 8)
    assert r["found"] == "21" and (r["draws"], r["n_layer"]) == (2, 3)
    assert (r["exist"], r["distinct"], r["repeated"], r["itself"]) == (3 / 4, 2 / 4, 2 / 4, 1 / 4)
    assert r["entropy"] == approx(math.log(2) / 2)  # of A and A, and of B and ?
    assert r["full/token"] == 1.5
    assert (r["all/token"], r["serial/token"]) == (approx((3 + 1 + 0.5 / 3) / 2), (3 + 1 + 2) / 2)
    assert r["mult/token"] == multiplications(model, {"full": 12, "partial": 2, "commit": 4}, 8) / 8
    assert "low" not in r  # Wilson's, of independent completions


def test_the_table_of_the_shipped_model(tmp_path, monkeypatch, capsys):
    call, names = caller(pays, monkeypatch, capsys), ROOT / "assets" / "names"
    path = tmp_path / "r.jsonl"
    monkeypatch.setattr(rules, "DIALS", {"longest_prefix": (0.9, 0.1), "fixed": (1,)})
    monkeypatch.setattr(rule_steps, "DIALS", {"klass": (0.5,), "wino": (0.2,), "t2m": (0.3,)})
    monkeypatch.setattr(decoders, "KEEP", (0.0, 1.0))
    monkeypatch.setattr(decoders, "SAMPLED", (1.0, -1.0))
    argv = ["--system", "base", names, "--system", "head", names, names / "joint", "--prompts", 4]
    table = call(*argv, "--against", "head", "--temperature", 0, 0.7, "--draws", 3, "--out", path)
    assert "temperature 0.7, top_p 1" in table and "head minus, serial/token" in table
    head, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {group: len(of) for group, of in head["clusters"].items()} == {"held out": 4, "trained": 4}
    settings = [(r["system"], r["setting"], r["temperature"]) for r in records]
    greedy = {"base": ["longest_prefix 0.9", "longest_prefix 0.1", "fixed 1"], "head": ["tau_keep 0", "tau_keep 1"]}
    greedy["base"] += ["klass 0.5", "wino 0.2", "t2m 0.3", "s2d2"]
    greedy["head"].append("off, longest_prefix 0.9")
    drawn = {"base": ["tau_m2t 1", "tau_m2t -1"], "head": ["tau_keep 0", "tau_keep 1", "off, tau_m2t 1"]}
    expected = [(s, label, T) for s in ("base", "head") for T, of in ((0, greedy), (0.7, drawn)) for label in of[s]]
    assert settings == expected
    for r in records:
        drawn = r["temperature"] == 0.7
        assert r["draws"] == (3 if drawn else 1) and len(r["found"]) == 8 and ("entropy" in r) == drawn
        assert sum(map(int, r["found"])) == round(r["exist"] * 8 * r["draws"]) and r["n_layer"] == 8
        assert 0 <= r.get("entropy", 0) <= math.log(3)
        reads_more = r["setting"] in ("wino 0.2", "s2d2")  # blocks than it takes passes
        assert (r["serial/token"] < r["all/token"] - 1e-9) == reads_more
    assert call("--records", path, "--against", "head") == table
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert call("--records", tmp_path / "r.jsonl.gz", "--against", "head") == table


def test_greedy_records_are_the_judges_of_both_groups(tmp_path, monkeypatch, capsys):
    """At one gate, and with more prompts than different ones: what evaluate.py says of them, decoded one by one."""
    names, d = ROOT / "assets" / "names", Decoding(gen_length=32, tau_m2t=0.1, tau_t2t=None)
    one = decoders.Setting("x", d, attributes={"tau_keep": 0.5})
    monkeypatch.setattr(pays, "settings", lambda *_: [one])
    call, path = caller(pays, monkeypatch, capsys), tmp_path / "r.jsonl"
    call("--system", "head", names, names / "joint", "--prompts", 20, "--out", path)
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


def test_stage_b_switched_off_is_a_system_of_its_own(tmp_path, monkeypatch, capsys):
    """One setting on, and one off with the same weights: off, nothing partial is run."""
    names, on = ROOT / "assets" / "names", Decoding(gen_length=32, tau_m2t=0.1, tau_t2t=None)
    off = Decoding(gen_length=32, tau_m2t=0.1, tau_t2t=None, n_rounds=0)
    both = [decoders.Setting("x", on), decoders.Setting("x", off, off=True)]
    monkeypatch.setattr(pays, "settings", lambda *_: both)
    call, path = caller(pays, monkeypatch, capsys), tmp_path / "r.jsonl"
    call("--system", "paper", names, names / "joint", "--prompts", 4, "--out", path, "--against", "paper, off")
    _, first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["system"], second["system"]) == ("paper", "paper, off")
    assert first["partial/token"] > 0 == second["partial/token"]


def test_a_left_to_right_model_is_charged_one_pass_a_token(tmp_path, monkeypatch, capsys):
    """The shipped model, read in blocks of one, is such a model. Its commit forwards are free."""
    for file in ("model.safetensors", "names.json", "tokenizer.json"):
        shutil.copy(ROOT / "assets" / "names" / file, tmp_path / file)
    config = json.loads((ROOT / "assets" / "names" / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"block_length": 1})
    call, path = caller(pays, monkeypatch, capsys), tmp_path / "r.jsonl"
    call("--system", "left to right", tmp_path, "--prompts", 3, "--out", path)
    _, r = [json.loads(line) for line in path.read_text().splitlines()]
    assert r["setting"] == "left to right"
    assert r["full/token"] == r["all/token"] == r["serial/token"] == 1
    layers, vocabulary = layers_and_vocabulary(pays.load_model(tmp_path, "cpu", torch.float32))
    assert r["mult/full"] == layers + vocabulary and r["mult/token"] == 2 * layers + vocabulary


def test_mistakes(tmp_path, monkeypatch, capsys):
    call, names = caller(pays, monkeypatch, capsys), ROOT / "assets" / "names"

    def written(name, *lines):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    head, r = {"clusters": {"held out": [0], "trained": [1]}}, record("a", "x", "10")
    whole, other = written("whole", head, r), written("other", {"clusters": {"held out": [0], "trained": [0]}}, r)
    assert "--system" in call.fails() and "--system" in call.fails("--system", "a")
    without = {k: v for k, v in r.items() if k != "found"} | {"exist": 0.5, "group": "held out"}
    no_mult = {k: v for k, v in r.items() if k != "mult/token"}
    for old in (written("old", without, without), written("mixed", head, r, no_mult), written("empty")):
        assert "measure again" in call.fails("--records", old)
    assert "no-such-file" in call.fails("--records", tmp_path / "no-such-file")
    (tmp_path / "short.gz").write_bytes(gzip.compress(whole.read_bytes())[:40])
    assert "measure again" in call.fails("--records", tmp_path / "short.gz")
    assert "other prompts" in call.fails("--records", whole, other)
    assert "other prompts" in call.fails("--records", whole, "--system", "a", names, "--prompts", 2)
    assert "equal" in call.fails("--records", other)
    assert "--temperature" in call.fails("--system", "a", names, "--draws", 2)
    assert "35" in call.fails("--system", "a", names, "--draws", 36, "--temperature", 1)

    # seeds
    assert "twice" in call.fails("--records", whole, whole)
    more = written("more", head, r, record("a", "y", "10"), record("a", "x", "10", ckpt="d"))
    assert "a: y was not measured for all of its 2 seeds" in call.fails("--records", more)
