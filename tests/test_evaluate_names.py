"""The judge of names: shares and forwards by hand, every decoder in the table. `pytest tests/test_evaluate_names.py`"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from common import approx, command_line, refused, tiny_model

import evaluate
import sample
from cache import Output, in_full
from checkpoint import new_model, save_adapter, save_model
from evaluate import draw_names, judge, name_decoders, wilson
from lib import show
from lib.data import exists, is_validation
from lib.tokenizer import byte_tokenizer, learn_bpe
from lib.util import generator, write_json

TOKENIZER = byte_tokenizer()
MODEL = SimpleNamespace(partial_cost=1 / 4, cfg=SimpleNamespace(order="surest"))
GATES = ["tau_m2t 0.4", "tau_m2t 0.3", "tau_m2t 0.2", "tau_m2t 0.15", "tau_m2t 0.1", "all at once"]
FACTORISED = ["one at a time", *GATES, "released Q", "released S"]


def judged(prompts: dict[str, list[int]], written: list[str], **nfe: float) -> dict:
    """The verdict on a decoder that completes the prompts to these names, each with these forwards."""
    rest = [TOKENIZER.encode(name)[len(p) :] for name, p in zip(written, prompts.values(), strict=True)]
    return judge(list(prompts), written, [Output([*ids, TOKENIZER.eos_id], nfe) for ids in rest], MODEL.partial_cost)


def test_the_verdict_is_the_character_or_that_there_is_none():
    assert show.verdict("LATIN SMALL LETTER A") == "a (U+0061)"
    assert show.verdict("ARABIC LIGATURE LAM WITH WITH MEEM ISOLATED FORM") == "(no such character)"
    assert "upper case" in show.verdict("latin small letter a")


def test_wilson():
    # 8 of 10, z = 1.96: (0.8 + 3.8415/20) / 1.38415 = 0.71674, 1.96 * sqrt(0.016 + 3.8415/400) / 1.38415 = 0.22658
    assert wilson(8, 10) == approx((0.49016, 0.94332), abs=2e-5)
    assert wilson(0, 10) == approx((0.0, 3.841459 / 13.841459), abs=1e-6)  # z^2 / (n + z^2)
    assert wilson(10, 10) == approx((10 / 13.841459, 1.0), abs=1e-6)


def test_forwards_in_full_ones():
    """2 full, 1 commit, and 4 partial of a quarter each; a partial one of half a block is half a partial one."""
    assert in_full({"full": 2, "partial": 4, "commit": 1}, MODEL.partial_cost) == 4
    assert in_full({"full": 2, "partial": 0.5, "commit": 0}, MODEL.partial_cost) == 2.125


def test_shares_and_forwards_by_hand():
    """Letters A to F are asked for; written are A, A, A, D, ? and ?. Four of six exist, two different ones, A and D are
    the very names; five completions equal another's, the name that is none included. Each row of 2 tokens takes 2 full
    and 1 commit forwards and 0.5 partial ones of n/L = 1/4: 1 full a token, and (2 + 1 + 0.125) / 2 in all."""
    letter = "LATIN SMALL LETTER {}".format
    prompts = {letter(x): TOKENIZER.encode(letter("")) for x in "ABCDEF"}
    r = judged(prompts, [letter(x) for x in "AAAD??"], full=2, partial=0.5, commit=1)
    assert r["exist"] == approx(4 / 6) and (r["low"], r["high"]) == wilson(4, 6)
    assert (r["itself"], r["distinct"], r["repeated"]) == approx((2 / 6, 2 / 6, 5 / 6))
    assert (r["full/token"], r["partial/token"], r["all/token"]) == (1.0, 0.25, 1.5625)
    assert (r["full/name"], r["partial/name"], r["all/name"]) == (2.0, 0.5, 3.125)


@pytest.mark.parametrize("group", ["held out", "trained"])
def test_prompts_are_the_first_third_of_names_of_the_group_and_a_function_of_it_alone(group):
    prompts = draw_names(40, group, TOKENIZER)
    assert len(prompts) == 40 and all(exists(name) for name in prompts)
    assert {is_validation(name) for name in prompts} == {group == "held out"}
    for name, ids in prompts.items():  # a byte is a token
        assert TOKENIZER.decode(ids) == name[: (len(name) + 2) // 3]
    assert list(draw_names(7, group, TOKENIZER).items()) == list(prompts.items())[:7]
    r = judged(prompts, list(prompts), full=1, partial=0, commit=0)  # a model that knows all names by heart
    assert (r["exist"], r["itself"], r["distinct"], r["repeated"]) == (1, 1, 1, 0)


def test_decoders_are_factorised_released_and_of_each_stage_b():
    joint = SimpleNamespace(cfg=SimpleNamespace(n_rounds=2))
    decoders = name_decoders(MODEL, {"out/j": joint}, 0.5)
    assert list(decoders) == [*FACTORISED, *(f"out/j, {gate}" for gate in GATES)]
    edits = {"released Q": 0.5, "released S": 0.0}
    for name, (model, d) in decoders.items():
        assert model is (joint if "out/j" in name else MODEL) and d.n_rounds == (2 if "out/j" in name else 0)
        assert d.tau_t2t == edits.get(name) and d.temperature == 0.5 and d.eos_early_stop
    taus = [1.0, 0.4, 0.3, 0.2, 0.15, 0.1, -1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, -1.0]
    assert [d.tau_m2t for _, d in decoders.values()] == taus


def test_from_the_left_the_gates_are_of_products_and_nothing_is_released():
    model = SimpleNamespace(cfg=SimpleNamespace(order="leftmost"))
    joint = SimpleNamespace(cfg=SimpleNamespace(n_rounds=1, order="leftmost"))
    decoders = name_decoders(model, {"out/j": joint}, 0.0)
    products = {"longest prefix 0.9": 0.9, "longest prefix 0.5": 0.5, "longest prefix 0.2": 0.2, "all at once": -1.0}
    taus = {"one at a time": 1.0} | products | {f"out/j, {gate}": tau for gate, tau in products.items()}
    assert {name: d.tau_m2t for name, (_, d) in decoders.items()} == taus
    assert all(d.tau_t2t is None for _, d in decoders.values())


@pytest.fixture
def short(monkeypatch):
    """Completions of one block: random weights never write an eos, and would go on to the end of four."""
    monkeypatch.setattr(evaluate, "NAME_TOKENS", 8)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    """A model of names with random weights and no Stage B."""
    folder = tmp_path_factory.mktemp("names")
    write_json(folder / "tokenizer.json", learn_bpe([], 258))
    write_json(folder / "names.json", {"unidata_version": "0"})
    cfg = replace(PRESETS["tiny"], vocab_size=272, eos_id=256, mask_id=257, block_length=8, tokenizer="bpe", n_last=2)
    save_model(new_model(cfg, generator("names")), folder)
    return folder


def test_every_decoder_is_judged_on_held_out_and_trained_names(ckpt, short, tmp_path, monkeypatch, capsys):
    model = evaluate.load_model(ckpt, "cpu", evaluate.DTYPES["fp32"])
    model.add_lora(2, 4, generator("lora"))
    model.markers.data.fill_(0.1)
    save_adapter(model, tmp_path / "joint", dict(base=str(ckpt), lora_r=2, lora_alpha=4))
    argv = ["--data", "names", "--ckpt", ckpt, "--adapter", tmp_path / "joint", "--prompts", 2]
    code, out, err = command_line(evaluate, monkeypatch, capsys, *argv, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    names = [*FACTORISED, *(f"{tmp_path / 'joint'}, {gate}" for gate in GATES)]
    assert code == 0 and [(r["group"], r["decoder"]) for r in records] == [
        (group, name) for group in ("held out", "trained") for name in names
    ]
    assert err.count("2 different prompts; trained on Unicode 0, judged by") == 2
    for r in records:
        assert r["prompts"] == 2 and 0 <= r["low"] <= r["exist"] <= r["high"] <= 1
        assert (r["partial/name"] > 0) == ("joint" in r["decoder"])
        commits = r["all/name"] - r["full/name"] - r["partial/name"] * 2 / 4
        assert commits >= 0 and 2 * commits == approx(round(2 * commits), abs=1e-9)
    code, out, _ = command_line(evaluate, monkeypatch, capsys, *argv)
    assert code == 0 and out.count("one at a time") == 2 and all(name in out for name in names)
    code, out, _ = command_line(sample, monkeypatch, capsys, "--ckpt", ckpt, "--prompt", "LATIN ", "--gen_length", 4)
    assert code == 0 and "no such character" in out


def test_a_checkpoint_that_learned_both_stages_shows_its_own_stage_b(ckpt, short, tmp_path, monkeypatch, capsys):
    model = evaluate.load_model(ckpt, "cpu", evaluate.DTYPES["fp32"])
    model.markers.data.fill_(0.1)
    save_model(model, tmp_path)
    for name in ("tokenizer.json", "names.json"):
        (tmp_path / name).write_bytes((ckpt / name).read_bytes())
    argv = ["--data", "names", "--ckpt", tmp_path, "--prompts", 1, "--json"]
    _, out, _ = command_line(evaluate, monkeypatch, capsys, *argv, "--temperature", 1)
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["decoder"] for r in records[9:15]] == [f"Stage B, {gate}" for gate in GATES]
    assert all(r["partial/token"] > 0 for r in records[9:15])
    _, again, _ = command_line(evaluate, monkeypatch, capsys, *argv, "--temperature", 1)
    _, other, _ = command_line(evaluate, monkeypatch, capsys, *argv, "--temperature", 1, "--seed", 1)
    assert again == out != other  # the seed alone decides what is drawn


def test_mistakes(ckpt, tmp_path, monkeypatch, capsys):
    save_model(tiny_model(tokenizer="toy"), tmp_path)
    names = ["--data", "names", "--ckpt"]
    assert "no names.json" in refused(evaluate, monkeypatch, capsys, *names, tmp_path)
    assert "adapter" in refused(evaluate, monkeypatch, capsys, *names, ckpt, "--adapter", tmp_path)
    assert "--prompts" in refused(evaluate, monkeypatch, capsys, *names, ckpt, "--prompts", 0)
