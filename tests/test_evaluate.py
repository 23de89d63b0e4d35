"""What decoders do where every answer can be checked. `pytest tests/test_evaluate.py`

A small model of a toy is trained here; the statements are theorems plus "the marginals were learned".
"""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import approx, caller, conditional, names_folder, random_adapter, tiny_config, tiny_model

import evaluate
import toy
import train
from cache import Output
from checkpoint import PRESETS, load_model
from evaluate import answer_log_probs, chain_table, one_step_table
from lib.data import is_validation, learn_bpe
from lib.tokenizer import byte_tokenizer
from lib.util import exists
from toy import Toy

# as small as the toy may be, and as many steps as leave its marginals well below the 2 % asked for
PAIRS = ["--data", "pairs", "--toy", "V=3", "m=2", "--n_last", 1, "--batch_size", 64, "--max_iters", 200]
PAIRS += ["--learning_rate", 5e-3, "--corruption", "mask", "--eval_interval", 10_000, "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(model, toy, folder), trained once."""
    folder = tmp_path_factory.mktemp("pairs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", tiny_config(n_layer=2, n_embd=32, d_dense=64, n_rounds=1))
        patch.setattr(sys, "argv", ["train.py", *map(str, PAIRS), "--out_dir", str(folder)])
        train.main()
    return load_model(folder, "cpu", torch.float32), evaluate.load_task(folder), folder


# --- toys
def test_answer_log_probs(monkeypatch):
    """Normalised over all tokens, then cut to the symbols; Stage B marks what is masked."""
    monkeypatch.setattr(evaluate, "ROWS", 2)
    support = torch.tensor([[[0, 1]], [[1, 1]], [[2, 0]]])  # three contexts, three symbols, two positions
    t = Toy("three", 3, support, torch.ones(3, 1, dtype=torch.float64))
    model = tiny_model(vocab_size=8, eos_id=6, mask_id=7, block_length=2)
    ids = torch.tensor([[3, 3, 0, 7], [4, 4, 7, 2], [5, 5, 7, 7]])
    z = torch.tensor([[0, -1], [-1, 2], [-1, -1]])
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    h = model.prefix(ids, ctx)
    for n_rounds in (0, 1, 2):
        states = model.coordinate(h, ids == 7, ctx, n_rounds) if n_rounds else model.last_n(h, ctx)
        expected = model.logits(states)[:, 2:].double().softmax(-1)[..., :3]
        found = answer_log_probs(model, t, torch.arange(3), z, n_rounds)
        torch.testing.assert_close(found.exp(), expected, rtol=1e-4, atol=1e-5)


def test_in_one_step_both_stages_pay_tc_and_one_at_a_time_nothing(trained):
    """KL(p || prod q_i) = TC + sum_i KL(p_i || q_i), and training left of the sum under 2 % of TC. Clean targets
    cannot take Stage B below TC either."""
    net, t, _ = trained
    p, tc = t.marginals(), t.tc()
    for n_rounds in (0, 1):
        q = answer_log_probs(net, t, torch.arange(t.n_ctx), torch.full((t.n_ctx, t.m), -1), n_rounds)
        own = (torch.xlogy(p, p) - p * q).sum((1, 2))
        forward = toy.kl(t.prob, one_step_table(net, t, n_rounds))
        torch.testing.assert_close(forward, tc + own, rtol=0, atol=1e-6)
        assert (forward >= tc - 1e-9).all() and float(own.mean()) < 0.02 * float(tc.mean())
    assert evaluate.quality(net, t, evaluate.TOY_DECODERS["one at a time"])["coherent"] >= 0.99
    assert toy.kl(t.prob, chain_table(net, t)).mean() < tc.mean()  # what no product can reach


@pytest.mark.parametrize("task", toy.TASKS)
def test_with_exact_conditionals_the_chain_is_exact_and_the_product_pays_tc(task, monkeypatch):
    t = toy.make(task)
    t = t if t.support.shape[1] <= 512 else toy.make(task, V=4, m=3)
    oracle = lambda model, task, c, z, n_rounds: conditional(task, c, z).log()  # noqa: E731
    monkeypatch.setattr(evaluate, "answer_log_probs", oracle)  # the ideal factorised decoder in every model's place
    torch.testing.assert_close(chain_table(None, t), t.prob, rtol=0, atol=1e-12)
    assert float(toy.kl(t.prob, one_step_table(None, t, 0)).mean()) == approx(float(t.tc().mean()), abs=1e-9)


def test_the_table_of_a_toy_by_hand(monkeypatch, capsys):
    """Exact conditionals lose TC in one step and nothing one at a time. Of four contexts' answers one is the likeliest,
    one is possible, two are neither; each costs a forward."""
    t = toy.make("modes", n_ctx=4)
    TC = float(t.tc()[0])
    answers = [t.support[0, 0].tolist(), t.support[1, 2].tolist(), [0] * 4, [t.mask_id] * 4]
    outputs = [Output([], tokens=answer, nfe=dict(full=1, partial=0, commit=0)) for answer in answers]
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, d, step: outputs)

    # exact in Stage A; Stage B loses a quarter of a nat more at every position
    oracle = lambda model, t, c, z, n_rounds: conditional(t, c, z).log() - n_rounds / 4  # noqa: E731
    monkeypatch.setattr(evaluate, "answer_log_probs", oracle)
    evaluate.evaluate_toy(SimpleNamespace(cfg=SimpleNamespace(n_rounds=1), partial_cost=0.5), t)

    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    tc = f"{TC:.3f}"
    assert rows[0][1:] == ["loses", "coherent", "mode", "forwards"] and rows[1][-1] == tc
    assert all(row[-3:] == ["0.500", "0.250", "1.00"] for row in rows[2:])
    assert [row[-4] for row in rows[2:5]] == ["0.000", tc, f"{TC + 1:.3f}"]


def test_a_toy_from_the_command_line(trained, tmp_path, monkeypatch, capsys):
    _, t, base = trained
    run = caller(evaluate, monkeypatch, capsys)
    out = run("--ckpt", base, "--device", "cpu")
    tc = f"{float(t.tc().mean()):.3f}"
    assert f"pairs: TC = {tc} nats" in out
    _, *table, _ = [re.split("  +", line) for line in out.splitlines()]
    lost = {name: cells[0] for name, *cells in table}
    assert list(lost) == ["decoder", "one step, at best", *evaluate.TOY_DECODERS]
    assert lost["one step, at best"] == tc

    # an adapter is evaluated by its own rounds: two halves of a forward beside the full one
    two = ["--data", "pairs", "--init_from", base, "--n_rounds", 2, "--n_last", 1, "--batch_size", 4]
    caller(train, monkeypatch, capsys)(*two, "--max_iters", 2, "--out_dir", tmp_path / "two")
    costs = {line.split("  ")[0]: line.split()[-1] for line in run("--ckpt", tmp_path / "two").splitlines()}
    assert (costs["Stage A, one step"], costs["Stage B, one step"]) == ("1.00", "2.00")


def test_mistakes(tmp_path, monkeypatch, capsys):
    run = caller(evaluate, monkeypatch, capsys)
    assert "no toy or names to judge by" in run.fails("--ckpt", tmp_path)
    assert "on names alone" in run.fails("--ckpt", tmp_path, tmp_path)
    for wrong in ({"name": "modes", "V": "many"}, {"name": "poems"}, {"V": 3}, [3]):
        (tmp_path / "toy.json").write_text(json.dumps(wrong))
        assert "toy.json" in run.fails("--ckpt", tmp_path)


# --- names
def test_shares_and_forwards_by_hand(monkeypatch):
    """Letters A to F are asked for; written are A, A, A, D, ? and ?. Four of six exist, two different ones, A and D are
    the very names. A row costs 2 full, 1 commit, and half a partial one of n/L = 1/4."""
    letter = "LATIN SMALL LETTER {}".format
    nfe = dict(full=2, partial=0.5, commit=1)
    outputs = [Output(list(letter(x).encode()), [256], nfe) for x in "AAAD??"]
    asked = []
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, d, step: asked.append(step) or outputs)
    prompts = {letter(x): [] for x in "ABCDEF"}
    model = SimpleNamespace(partial_cost=1 / 4)
    found = evaluate.complete(model, byte_tokenizer(), prompts, evaluate.NAMES, step="mine")
    assert (found["exist"], found["itself"], found["distinct"]) == approx((4 / 6, 2 / 6, 2 / 6))
    assert (found["forwards"], found["full"], found["tokens"]) == (3.125, 2, 1)
    assert found["found"] == [True] * 4 + [False] * 2 and asked == ["mine"]


def test_prompts_are_the_first_third_of_names_of_the_group_and_a_function_of_it_alone():
    tokenizer = byte_tokenizer()
    for group in ("held out", "trained"):
        prompts = evaluate.draw_names(40, group, tokenizer)
        assert len(prompts) == 40 and all(exists(name) for name in prompts)
        assert {is_validation(name) for name in prompts} == {group == "held out"}
        for name, ids in prompts.items():  # a byte is a token
            assert tokenizer.decode(ids) == name[: (len(name) + 2) // 3]
        assert list(evaluate.draw_names(7, group, tokenizer).items()) == list(prompts.items())[:7]


def test_holes_are_in_one_block_with_something_visible_behind():
    """A byte is a token. The name is whole where it is not masked, and its end fills the last block."""
    tokenizer = byte_tokenizer()
    cfg = SimpleNamespace(block_length=8, mask_id=257, eos_id=256)
    for k in (1, 4):
        prompts = evaluate.draw_holes(20, k, "held out", tokenizer, cfg)
        assert len(prompts) == 20 and all(is_validation(name) for name in prompts)
        for name, ids in prompts.items():
            whole = list(name.encode()) + [256] * (-len(name) % 8)
            masked = [i for i, token in enumerate(ids) if token == 257]
            assert len(masked) == k and len({i // 8 for i in masked}) == 1
            assert masked[-1] + 1 < len(name) and (masked[-1] + 1) % 8 > 0
            assert [i for i, (a, b) in enumerate(zip(ids, whole, strict=True)) if a != b] == masked


def test_holes_cost_a_step_each_or_one_for_all(tmp_path, monkeypatch, capsys):
    """Three holes of the first of two blocks: one at a time three steps, then a commit and the next block's step; all
    at once one for three; Stage B is half of one more where there is a mask."""
    folder = names_folder(tmp_path, learn_bpe([], 258), n_rounds=1)
    name = "A NAME OF A SORT"
    prompts = {name: [257 if i in (1, 2, 5) else ord(c) for i, c in enumerate(name)]}
    monkeypatch.setattr(evaluate, "draw_holes", lambda *_: prompts)
    out = caller(evaluate, monkeypatch, capsys)("--ckpt", folder, "--holes", 3, "--json", "--device", "cpu")
    costs = [json.loads(line)["forwards"] for line in out.splitlines()]
    assert costs == [5, 3, 3.5]


def test_names_from_the_command_line(tmp_path, monkeypatch, capsys):
    """A base has its rows, an adapter its own; two adapters share the base's and have a column each."""
    monkeypatch.setattr(evaluate, "NAMES", replace(evaluate.NAMES, gen_length=8))
    base = names_folder(tmp_path / "base", learn_bpe([], 258))
    for name in ("one", "two"):
        random_adapter(tmp_path / name, base)
    run = caller(evaluate, monkeypatch, capsys)
    argv = ["--prompts", 2, "--device", "cpu", "--ckpt"]
    assert "--holes 8: no name" in run.fails(*argv, base, "--holes", 8)

    out = run(*argv, tmp_path / "one", tmp_path / "two", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    rows = [(name, str(base)) for name in evaluate.BASE_ROWS]
    rows += [(name, str(tmp_path / folder)) for name in evaluate.ADAPTER_ROWS for folder in ("one", "two")]
    assert [(r["decoder"], r["ckpt"]) for r in records] == rows
    for r in records:
        # K = 2 rounds of half a forward, as often as a step marks something
        off = r["decoder"].startswith(("base", "Stage B off"))
        assert r["prompts"] == 2 and 0 <= r["exist"] <= 1 and len(r["found"]) == 2
        assert (r["forwards"] - r["full"] < 1) if off else (r["forwards"] - r["full"] >= 1)

    # fewer columns for people; of a base alone its own rows
    out = run(*argv, base)
    assert "2 held-out names" in out and "base, all at once" in out and "Stage B" not in out
