"""What each kind of model is decoded by, what that costs, and what a record says of it."""

import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import MASK, ROOT, approx, caller, tiny_model
from runs import SOURCE, held_out_text

import evaluate
from beyond import head, opponents, spans, sweep
from beyond.spans import Spans, chain_score, cut, functions, stage_a_log_probs
from beyond.sweep import price, settings
from cache import Cached
from checkpoint import load_model, load_tokenizer, save_model
from lib.data import is_validation
from lib.output import Output
from lib.tokenizer import byte_tokenizer
from model import Model
from sample import Decoding, generate

START = Decoding(gen_length=32, tau_t2t=None, n_rounds=0)
NAMES = ROOT / "assets" / "names"


def headed(**changes) -> Model:
    model = tiny_model(n_rounds=1, **changes)
    model.second_look = head.Head(model.cfg, width=8)
    return model


def without_stage_b(**changes):
    model = tiny_model(**changes)
    model.markers.data.zero_()
    return model


# --- what a system is decoded by
def test_stage_a_has_every_rule_at_every_dial():
    every = [f"{rule.__name__} {dial:g}" for rule, dials in opponents.DIALS.items() for dial in dials]
    greedy = settings(without_stage_b(), START)
    assert list(greedy) == every and len(set(every)) == 91
    assert all(d.n_rounds == 0 for d in greedy.values())

    # blocks of 16 have more dials
    more = [f"{rule.__name__} {dial:g}" for rule, dials in opponents.MORE_DIALS.items() for dial in dials]
    assert sorted(settings(without_stage_b(block_length=16), START)) == sorted(every + more)

    # with a temperature gates take their place
    drawn = settings(without_stage_b(), replace(START, temperature=1.0, top_p=0.7))
    assert [d.tau_m2t for d in drawn.values()] == [1.0, 0.9, 0.5, 0.2, 0.05, 0.005, -1.0]
    assert all(d.top_p == 0.7 and d.select is None for d in drawn.values())

    # from left to right there is no choice
    assert list(settings(tiny_model(block_length=1), START)) == ["left to right"]


@pytest.mark.parametrize(("order", "rule"), [("surest", "threshold"), ("leftmost", "longest_prefix")])
def test_a_head_is_on_at_every_tau_keep_or_off(order, rule):
    model = headed(order=order)
    found = settings(model, START)
    on, off = list(found.values())[:13], list(found.values())[13:]
    assert [d.tau_keep for d in on] == [*sweep.KEEP] and all(d.tau_m2t == -1 and d.n_rounds == 1 for d in on)
    dials = [0.98 if rule == "threshold" else 1, 0.9, 0.8, 0.7, 0.6, 0.5]
    assert list(found)[13:] == [f"off, {rule} {dial:g}" for dial in dials]
    assert all(d.n_rounds == 0 and d.select for d in off)
    assert list(settings(model, replace(START, temperature=1.0))) == list(found)[:13]  # drawn: on alone


def test_the_papers_stage_b_is_at_every_gate_or_refuses():
    found = list(settings(tiny_model(n_rounds=2), START).values())
    assert {d.n_rounds for d in found} == {2} and [d.tau_m2t for d in found[:13]] == [*sweep.GATES]
    assert [d.tau_keep for d in found[13:]] == [*sweep.KEEP[1:]]
    assert all(d.tau_m2t == -1 and d.look is opponents.refusing for d in found[13:])


def test_what_a_setting_is_charged():
    """Two outputs, by the paper's Stage B, n = 2 of 4 layers; by a head, a block beside 4; left to right."""
    outputs = [Output([1]), Output([1])]
    for o in outputs:
        o.nfe = {"full": 3, "partial": 0.75, "commit": 1, "looks": 1}
    model = tiny_model()
    r = price(model, replace(START, n_rounds=1), outputs)
    assert r["second"] == "stage_b" and r["n_layer"] == 4 and r["cost"] == {"all": 6 + 2 + 1.5 / 2}
    assert r["counts"] == {"full": 6, "partial": 1.5, "commit": 2, "looks": 2}
    assert price(model, START, outputs)["second"] == ""
    r = price(headed(), replace(START, n_rounds=1), outputs)
    assert r["second"] == "head" and r["cost"] == {"all": 6 + 2 + 1.5 / 4}
    r = price(tiny_model(block_length=1), START, outputs)
    assert r["counts"]["commit"] == 0 and r["cost"] == {"all": 6 + 1.5 / 2}


# --- what is completed
def test_what_names_are_worth_by_hand(monkeypatch):
    """Two equal prompts, 2 draws: A and B, then A and ?. Of the first both exist, of the second one of two."""
    stem = "LATIN SMALL LETTER "
    prompt = [ord(x) for x in stem]
    monkeypatch.setattr(
        evaluate, "draw_names", lambda n, group, _: {stem + ("C" if group == "trained" else "B"): prompt}
    )
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)).rstrip("\0"))
    task = sweep.Names(tokenizer, 1)
    assert task.clusters == {"held out": [0], "trained": [0]}
    outputs = [Output(prompt, [ord(x), 0]) for x in "ABA?"]
    r = task.figures(outputs, base=None)
    assert r["found"] == "21" and r["draws"] == 2 and task.per(outputs) == {"token": 8, "name": 4}
    assert (r["exist"], r["distinct"], r["itself"]) == (3 / 4, 2 / 4, 0)
    assert r["entropy"] == approx(math.log(2) / 2)  # of A and A, and of B and ?
    assert sweep.entropy(["a", "a", "b", "c"]) == approx(1.5 * math.log(2))  # 1/2, 1/4, 1/4


# --- spans of text
def test_spans_lie_inside_a_later_block_of_held_out_functions():
    assert list(functions(SOURCE)) == [
        "def f(a, b):\n    # add\n    return a + b\n",
        "def double(self, x):\n    return 2 * x\n",
    ]
    odd = "class A:\n    def f(self):\n        return 1\n# at the margin\n        pass\n\x0c\ndef g(b):\n    return b\n"
    assert list(functions(odd)) == ["def g(b):\n    return b\n"]  # f's own text is no Python
    assert list(functions("def (")) == []
    names = [n for n in (f"{i}.py" for i in range(400)) if is_validation(n)]
    documents = [(n, SOURCE) for n in names] + [("0.py" if not is_validation("0.py") else "x", SOURCE * 3)]
    found = cut(documents, byte_tokenizer(), 8, 1000)
    assert len(found) == 2 * len(names)  # nothing from a training document
    for s in found:
        prompt = spans.masked(s, 8, MASK)
        assert s.start >= 8 and s.start % 8 == 0 and len(prompt) == s.start + 8 <= len(s.piece)
        masks = [i - s.start for i, token in enumerate(prompt) if token == MASK]
        assert masks == [*range(s.at.start, s.at.stop)] and 2 <= len(masks) <= 6
        assert all(a in (b, MASK) for a, b in zip(prompt, s.piece, strict=False))


@torch.inference_mode()
def test_the_score_is_that_of_writing_one_at_a_time():
    """The greedy decode of 4 and 3 masks scores the product of the probabilities that it was written by; of a single
    mask the score is the marginal. (No two positions are nearly as sure: their order is the chain's own.)"""
    model = without_stage_b(n_rounds=1)
    context = [1, 2, 3, 4, 5, 6, 7, 8]
    z = torch.tensor([[9, MASK, 3, 4, MASK, MASK, MASK, 8], [1, MASK, MASK, 4, 5, 6, MASK, 8]])
    written, steps = [], []
    for row in z.tolist():
        log_p = []
        d = replace(Spans.start, tau_m2t=1.0)
        see = lambda _, step, of=log_p: of.append(step.stage_a.conf[step.bundle].log().sum())  # noqa: E731
        written.append(generate(model, [context + row], d, on_step=see)[0].prompt[8:])
        steps.append(sum(log_p))
    engine = Cached(model, [context] * 2, 0)
    score = chain_score(stage_a_log_probs(engine, mask_too=True), z, z == MASK, torch.tensor(written))
    torch.testing.assert_close(score, torch.stack(steps), rtol=1e-4, atol=1e-4)

    one = torch.tensor([[9, MASK, 9, 9, 9, 9, 9, 9]] * 2)
    log_p = stage_a_log_probs(engine)
    sevens = torch.full_like(one, 7)
    torch.testing.assert_close(chain_score(log_p, one, one == MASK, sevens), log_p(one)[:, 1, 7])
    left = stage_a_log_probs(engine, mask_too=True)  # a mask that a decoder has left there has a score too
    assert chain_score(left, one, one == MASK, one).isfinite().all()


# --- records, from the command line
@pytest.fixture
def few(monkeypatch):
    """Few settings: one at a time, all at once, and one between."""
    monkeypatch.setattr(opponents, "DIALS", {opponents.threshold: (1.0, 0.0), opponents.longest_prefix: (0.9,)})
    monkeypatch.setattr(sweep, "KEEP", (0.0, 1.0))
    monkeypatch.setattr(sweep, "SAMPLED", (1.0, -1.0))
    monkeypatch.setattr(sweep, "GATES", (1.0, 0.3))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_records_of_the_shipped_model(few, tmp_path, monkeypatch, capsys):
    """Its base and its head. A record is what evaluate.py says of the same prompts."""
    call, path = caller(sweep, monkeypatch, capsys), tmp_path / "r.jsonl"
    argv = ["--prompts", 4, "--out", path]
    call("--system", "base", NAMES, *argv)
    call("--system", "base", NAMES, "--system", "head", NAMES / "head", *argv)
    clusters, *records = read(path)
    assert {group: len(of) for group, of in clusters["clusters"].items()} == {"held out": 4, "trained": 4}
    base = ["threshold 1", "threshold 0", "longest_prefix 0.9"]
    looks = ["tau_keep 0", "tau_keep 1", "off, longest_prefix 0.9"]
    expected = [("base", s) for s in base] + [("head", s) for s in looks]  # and base was measured once
    assert [(r["system"], r["setting"]) for r in records] == expected
    for r in records:
        assert r["draws"] == 1 and r["per"]["name"] == len(r["found"]) == 8 and r["n_layer"] == 8
        assert sum(map(int, r["found"])) == round(r["exist"] * 8) and "entropy" not in r

    model, tokenizer = load_model(NAMES / "head", "cpu", torch.float32), load_tokenizer(NAMES, "bpe")
    prompts = evaluate.draw_names(4, "held out", tokenizer) | evaluate.draw_names(4, "trained", tokenizer)
    found = evaluate.complete(model, tokenizer, prompts, settings(model, evaluate.NAMES)["tau_keep 0"])
    r = records[3]
    assert r["exist"] == found["exist"] and r["per"]["token"] == found["tokens/name"] * 8
    assert r["cost"]["all"] / r["per"]["token"] == approx(found["forwards/token"])

    # draws differ
    drawn = ["--temperature", 0.7, "--draws", 3]
    call("--system", "base", NAMES, "--prompts", 2, *drawn, "--out", tmp_path / "drawn.jsonl")
    _, *records = read(tmp_path / "drawn.jsonl")
    assert [r["setting"] for r in records] == ["tau_m2t 1", "tau_m2t -1"]
    assert all(r["draws"] == 3 and r["per"]["name"] == 12 and r["entropy"] > 0 for r in records)

    # mistakes
    assert "other texts" in call.fails("--system", "more", NAMES, "--prompts", 2, "--out", path)
    assert "--temperature" in call.fails("--system", "more", NAMES, *argv, *drawn)


@pytest.fixture
def text(tmp_path):
    """Two bases, of which the second likes other tokens, and some files to fill."""
    ids = dict(vocab_size=272, eos_id=256, mask_id=257, n_rounds=1)
    base = without_stage_b(**ids)
    save_model(base, tmp_path / "base")
    base.lm_head.weight.data = base.lm_head.weight.data.roll(1, 0)
    save_model(base, tmp_path / "other")
    save_model(tiny_model(**ids), tmp_path / "stage_b")
    held_out_text(tmp_path / "text")
    return tmp_path


def test_what_was_written_is_judged_as_text(text):
    base = load_model(text / "base", "cpu", torch.float32)
    task = Spans([text / "text"], 6, byte_tokenizer(), base.cfg)
    blocks = [s.piece[: s.start + 8] for s in task.spans]
    r = task.figures([Output(ids) for ids in blocks], base)
    assert r["exact"] == r["parses"] == [1] * 6 and max(r["score"]) < 0
    r = task.figures([Output(ids[:-1] + [ord(")")]) for ids in blocks], base)
    assert r["exact"] == r["parses"] == [0] * 6


def test_the_records_of_spans(few, text, monkeypatch, capsys):
    """Spans are filled inside one block, and each seed is judged by its own base: a system that is both bases the
    wrong way round has the same figures but for the score."""
    call, path = caller(sweep, monkeypatch, capsys), text / "r.jsonl"
    base, other, stage_b = text / "base", text / "other", text / "stage_b"
    argv = ["--data", text / "text", "--prompts", 6, "--device", "cpu", "--out", path]
    systems = ["--system", "base", base, other, "--system", "crossed", other, base]
    call(*systems, "--system", "paper", stage_b, stage_b, *argv)
    clusters, *records = read(path)
    assert len(clusters["clusters"]["documents"]) == 6
    n = Counter((r["system"], r["ckpt"]) for r in records)
    assert n["base", str(base)] == 3 and n["paper", str(stage_b)] == 3  # two gates and a tau_keep, once

    of = {(r["system"], r["ckpt"], r["setting"]): r for r in records}
    for (system, ckpt, setting), r in of.items():
        assert r["counts"]["commit"] == 0 and len(r["score"]) == 6
        if system == "base":
            crossed = of["crossed", ckpt, setting]
            assert crossed["cost"] == r["cost"] and crossed["exact"] == r["exact"]
            assert np.mean(crossed["score"]) < np.mean(r["score"]) - 0.1  # a judge likes what it would have written
    one, once = of["base", str(base), "threshold 1"], of["base", str(base), "threshold 0"]
    assert one["counts"]["full"] == one["per"]["token"] and once["counts"]["full"] == 6

    # mistakes
    assert "has 1 seeds, the base 2" in call.fails(*systems, "--system", "b", stage_b, *argv)
    new = [*argv[:-1], text / "new.jsonl"]
    assert "without --temperature" in call.fails("--system", "b", base, *new, "--temperature", 1)
    save_model(tiny_model(tokenizer="toy"), text / "toy")
    assert "tables are exact" in call.fails("--system", "toy", text / "toy", *new)
