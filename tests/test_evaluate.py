"""What decoders do where every answer can be checked. `pytest tests/test_evaluate.py`

A small model of a toy is trained here; the statements are theorems plus "the marginals were learned".
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import approx, command_line, conditional, refused, tiny_config, tiny_model

import evaluate
import train
from checkpoint import load_model, save_model
from evaluate import TOY_DECODERS, chain_table, draw_holes, draw_names, judge, one_step_table, quality
from lib import settings, toy
from lib.data import exists, is_validation
from lib.output import Output, in_full
from lib.tokenizer import byte_tokenizer, learn_bpe
from lib.toy import answer_log_probs
from lib.util import write_json

# as small as the toy may be, and as many steps as leave its marginals well below the 2 % asked for
PAIRS = ["--data", "pairs", "--toy", "V=3", "m=2", "--n_last", 1, "--batch_size", 64, "--max_iters", 200]
SMALL = train.Recipe(geometry=lambda args: tiny_config(n_layer=2, n_embd=32, d_dense=64, n_last=1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(model, toy, folder), trained once."""
    folder = tmp_path_factory.mktemp("pairs")
    parser = settings.build_parser("")
    parser.set_defaults(eval_rows=1, learning_rate=5e-3, corruption="mask", eval_interval=10_000, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *map(str, PAIRS), "--out_dir", str(folder)])
        train.main(parser, choose=lambda args: SMALL)
    return load_model(folder, "cpu", torch.float32), evaluate.load_task(folder), folder


# --- toys


def test_in_one_step_both_stages_pay_tc_and_one_at_a_time_nothing(trained):
    """KL(p || prod q_i) = TC + sum_i KL(p_i || q_i), and training left of the sum under 2 % of TC. Clean targets
    cannot take Stage B below TC either: its bundle is drawn independently of the clean tokens, so its minimiser is the
    marginals, as Stage A's is."""
    net, t, _ = trained
    p, tc = t.marginals(), t.tc()
    for n_rounds in (0, 1):
        q = answer_log_probs(net, t, torch.arange(t.n_ctx), torch.full((t.n_ctx, t.m), -1), n_rounds)
        own = (torch.xlogy(p, p) - p * q).sum((1, 2))
        forward = toy.kl(t.prob, one_step_table(net, t, n_rounds))
        torch.testing.assert_close(forward, tc + own, rtol=0, atol=1e-6)
        assert (forward >= tc - 1e-9).all() and float(own.mean()) < 0.02 * float(tc.mean())
    assert quality(net, t, TOY_DECODERS["one at a time"])["coherent"] >= 0.99
    assert toy.kl(t.prob, chain_table(net, t)).mean() < tc.mean()  # what no product can reach


@pytest.mark.parametrize("task", toy.TASKS)
def test_with_exact_conditionals_the_chain_is_exact_and_the_product_pays_tc(task, monkeypatch):
    t = toy.make(task)
    t = t if t.support.shape[1] <= 512 else toy.make(task, V=4, m=3)
    oracle = lambda model, task, c, z, n_rounds: conditional(task, c, z).log()  # noqa: E731
    monkeypatch.setattr(toy, "answer_log_probs", oracle)  # the ideal factorised decoder in every model's place
    torch.testing.assert_close(chain_table(None, t), t.prob, rtol=0, atol=1e-12)
    assert float(toy.kl(t.prob, one_step_table(None, t, 0)).mean()) == approx(float(t.tc().mean()), abs=1e-9)


def test_a_toy_from_the_command_line(trained, tmp_path, monkeypatch, capsys):
    _, t, run = trained
    code, out, _ = command_line(evaluate, monkeypatch, capsys, "--ckpt", run, "--device", "cpu")
    assert code == 0 and all(name in out for name in TOY_DECODERS) and f"TC = {float(t.tc().mean()):.4f}" in out
    assert f"H = {float(t.h_joint().mean()):.4f}" in out

    # an adapter is evaluated by its own rounds: two halves of a forward beside the full one, of two tokens
    argv = ["--data", "pairs", "--init_from", run, "--max_iters", 2, "--n_rounds", 2, "--out_dir", tmp_path / "two"]
    assert command_line(train, monkeypatch, capsys, *argv, "--n_last", 1, "--batch_size", 4)[0] == 0
    _, out, _ = command_line(evaluate, monkeypatch, capsys, "--ckpt", tmp_path / "two")
    costs = {line.split("  ")[0]: line.split()[-1] for line in out.splitlines()}
    assert (costs["Stage A, one step"], costs["Stage B, one step"]) == ("0.50", "1.00")


def test_mistakes(tmp_path, monkeypatch, capsys):
    assert "no toy or names to judge by" in refused(evaluate, monkeypatch, capsys, "--ckpt", tmp_path)
    for wrong in ({"name": "modes", "V": "many"}, {"name": "poems"}, {"V": 3}, [3]):
        (tmp_path / "toy.json").write_text(json.dumps(wrong))
        assert "toy.json" in refused(evaluate, monkeypatch, capsys, "--ckpt", tmp_path)


# --- names


def test_shares_and_forwards_by_hand():
    """Letters A to F are asked for; written are A, A, A, D, ? and ?. Four of six exist, two different ones, A and D are
    the very names."""
    letter = "LATIN SMALL LETTER {}".format
    r = judge([letter(x) for x in "ABCDEF"], [letter(x) for x in "AAAD??"])
    assert (r["exist"], r["itself"], r["distinct"]) == approx((4 / 6, 2 / 6, 2 / 6))

    # 2 full, 1 commit and half a partial one of n/L = 1/4 a row, of 2 tokens: 1 full a token, and 3.125 / 2 in all
    nfe = dict(full=2, partial=0.5, commit=1, looks=1)
    assert in_full(nfe, 1 / 4) == 3.125
    found = evaluate.per_token(SimpleNamespace(partial_cost=1 / 4), [Output([5], nfe=nfe)] * 6, 12)
    assert found == approx({f"{k}/token": v for k, v in zip(
        ("full", "partial", "commit", "looks", "forwards"), (1, 0.25, 0.5, 0.5, 3.125 / 2), strict=True)})  # fmt: skip


def test_prompts_are_the_first_third_of_names_of_the_group_and_a_function_of_it_alone():
    tokenizer = byte_tokenizer()
    for group in ("held out", "trained"):
        prompts = draw_names(40, group, tokenizer)
        assert len(prompts) == 40 and all(exists(name) for name in prompts)
        assert {is_validation(name) for name in prompts} == {group == "held out"}
        for name, ids in prompts.items():  # a byte is a token
            assert tokenizer.decode(ids) == name[: (len(name) + 2) // 3]
        assert list(draw_names(7, group, tokenizer).items()) == list(prompts.items())[:7]


def test_holes_are_in_one_block_with_something_visible_behind():
    """A byte is a token. The name is whole where it is not masked, and its end fills the last block."""
    tokenizer = byte_tokenizer()
    cfg = SimpleNamespace(block_length=8, mask_id=257, eos_id=256)
    for k in (1, 4):
        prompts = draw_holes(20, k, "held out", tokenizer, cfg)
        assert len(prompts) == 20 and all(is_validation(name) for name in prompts)
        for name, ids in prompts.items():
            whole = list(name.encode()) + [256] * (-len(name) % 8)
            masked = [i for i, token in enumerate(ids) if token == 257]
            assert len(masked) == k and len({i // 8 for i in masked}) == 1
            assert masked[-1] + 1 < len(name) and (masked[-1] + 1) % 8 > 0
            assert [i for i, (a, b) in enumerate(zip(ids, whole, strict=True)) if a != b] == masked


def test_a_base_fills_holes_in_as_many_forwards_as_its_order_asks_for(monkeypatch):
    """Three holes of the first of two blocks: a step each, or one for all, then a commit and the next block's step."""
    model = tiny_model(vocab_size=272, eos_id=256, mask_id=257, n_rounds=1)
    prompts = {"A NAME OF A SORT": [257 if i in (1, 2, 5) else ord(c) for i, c in enumerate("A NAME OF A SORT")]}
    costs = {}
    for name, d in evaluate.hole_decoders(model).items():
        found = evaluate.complete(model, byte_tokenizer(), prompts, d)
        costs[name] = round(3 * found["forwards/token"])
    assert costs == {"one at a time, from the left": 5, "one at a time, surest first": 5, "all at once": 3}


def test_names_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Random weights, with a marker and without; --json has both groups and every measure."""
    monkeypatch.setattr(evaluate, "NAMES", replace(evaluate.NAMES, gen_length=8))
    model = tiny_model(vocab_size=272, eos_id=256, mask_id=257, tokenizer="bpe", n_rounds=1)
    save_model(model, tmp_path)
    write_json(tmp_path / "tokenizer.json", learn_bpe([], 258))
    write_json(tmp_path / "names.json", {"unidata_version": "0"})
    argv = ["--ckpt", tmp_path, "--prompts", 2, "--device", "cpu"]
    code, _, err = command_line(evaluate, monkeypatch, capsys, *argv, "--holes", 8)
    assert code == 2 and "--holes 8: no name" in err and len(err.splitlines()) == 1
    code, out, err = command_line(evaluate, monkeypatch, capsys, *argv, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    names = list(evaluate.name_decoders(model))
    assert code == 0, err
    assert [(r["group"], r["decoder"]) for r in records] == [(g, n) for g in ("held out", "trained") for n in names]
    for r in records:
        assert r["prompts"] == 2 and 0 <= r["exist"] <= 1
        assert (r["partial/token"] > 0) == ("Stage B" in r["decoder"])
        assert r["forwards/token"] == approx(r["full/token"] + r["commit/token"] + r["partial/token"] / 2)

    # fewer columns for people
    model.markers.data.zero_()
    save_model(model, tmp_path)
    code, out, _ = command_line(evaluate, monkeypatch, capsys, *argv)
    assert code == 0 and "2 held-out names" in out and "one at a time" in out and "Stage B" not in out
