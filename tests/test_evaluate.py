"""What decoders do where every answer can be checked. `pytest tests/test_evaluate.py`

A small model of a toy is trained here; the statements are theorems plus "the marginals were learned".
"""

import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import (
    approx,
    caller,
    conditional,
    merged_spec,
    names_folder,
    random_adapter,
    random_lora,
    tiny_config,
    tiny_model,
)  # fmt: skip

import evaluate
import sample
import toy
import train
from cache import Cached, Output
from checkpoint import PRESETS, load_model, save_model
from evaluate import answer_log_probs, causal_table, chain_table, one_step_table
from lib.tokenizer import byte_tokenizer
from lib.util import exists
from prepare import is_validation
from toy import Toy

# as small as the toy may be, and as many steps as leave its marginals well below the 2 % asked for
PAIRS = ["--init_from", "scratch", "--n_last", 1, "--batch_size", 64, "--max_iters", 200, "--learning_rate", 5e-3]
PAIRS += ["--corruption", "mask", "--mask_power", 1, "--eval_interval", 10_000, "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a small model of a toy, trained once, and the folder of its rows."""
    folder = tmp_path_factory.mktemp("pairs") / "run"
    rows = folder.parent / "rows"
    toy.write_toy(rows, "pairs", dict(V=3, m=2), rows=20_000, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", tiny_config(n_layer=2, n_embd=32, d_dense=64, n_rounds=1))
        patch.setattr(sys, "argv", ["train.py", *map(str, PAIRS), "--data", str(rows), "--out_dir", str(folder)])
        train.main()
    return folder, rows


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
    folder, _ = trained
    net = load_model(folder, "cpu", torch.float32)
    t = evaluate.load_task(folder)
    p, tc = t.marginals(), t.tc()
    for n_rounds in (0, 1):
        q = answer_log_probs(net, t, torch.arange(t.n_ctx), torch.full((t.n_ctx, t.m), -1), n_rounds)
        own = (torch.xlogy(p, p) - p * q).sum((1, 2))
        forward = toy.kl(t.prob, one_step_table(net, t, n_rounds))
        torch.testing.assert_close(forward, tc + own, rtol=0, atol=1e-6)
        assert (forward >= tc - 1e-9).all() and float(own.mean()) < 0.02 * float(tc.mean())
    assert evaluate.quality(net, t, evaluate.TOY_DECODERS["one at a time"])["possible"] >= 0.99
    assert toy.kl(t.prob, chain_table(net, t)).mean() < tc.mean()  # what no product can reach


def oracle(model, task: Toy, c, z, n_rounds: int, tokens=None):
    """The ideal decoder in the place of answer_log_probs, the factorised one, or the causal one, which reads tokens."""
    if tokens is None:
        return conditional(task, c, z).log()
    before = [torch.where(torch.arange(task.m) < i, tokens, z) for i in range(task.m)]
    return torch.stack([conditional(task, c, before[i])[:, i] for i in range(task.m)], 1).log()


@pytest.mark.parametrize("task", toy.TASKS)
def test_with_exact_conditionals_chains_are_exact_and_the_product_pays_tc(task, monkeypatch):
    """The chain of Stage A, which reads what is written, and the chain of causal Stage B."""
    t = toy.make(task)
    t = t if t.support.shape[1] <= 512 else toy.make(task, V=4, m=3)
    monkeypatch.setattr(evaluate, "answer_log_probs", oracle)  # the ideal decoder in every model's place
    torch.testing.assert_close(chain_table(None, t), t.prob, rtol=0, atol=1e-12)
    torch.testing.assert_close(causal_table(any_model(), t), t.prob, rtol=0, atol=1e-12)
    assert float(toy.kl(t.prob, one_step_table(None, t, 0)).mean()) == approx(float(t.tc().mean()), abs=1e-9)


def any_model(causal: bool = True) -> SimpleNamespace:
    return SimpleNamespace(cfg=SimpleNamespace(n_rounds=2, causal=causal), partial_cost=0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_table_of_a_toy_by_hand(causal, monkeypatch, capsys):
    """Exact conditionals lose TC in one step and nothing one at a time, nor in causal Stage B. Of four contexts'
    answers one is the likeliest, one is possible, two are neither; each costs a forward, and a look, two halves."""
    t = toy.make("modes", n_ctx=4)
    TC = float(t.tc()[0])
    answers = [t.support[0, 0].tolist(), t.support[1, 2].tolist(), [0] * 4, [t.mask_id] * 4]
    outputs = [Output([], tokens=answer, nfe=dict(full=1, partial=2, refresh=0)) for answer in answers]
    asked = []
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, d: asked.append(d) or outputs)

    # exact in Stage A; Stage B loses a quarter of a nat more at every position
    worse = lambda model, t, c, z, n_rounds, tokens=None: oracle(model, t, c, z, 0, tokens) - n_rounds / 8  # noqa: E731
    monkeypatch.setattr(evaluate, "answer_log_probs", worse)
    evaluate.evaluate_toy(any_model(causal), t)

    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:-1]]
    tc = f"{TC:.3f}"
    titles, least, *rows = [[cell.strip() for cell in row] for row in rows]
    assert titles == ["decoder", "KL", "possible", "likeliest", "forwards", "looks"]
    assert least[1] == tc
    assert all(row[-4:] == ["0.500", "0.250", "2.00", "1.00"] for row in rows)
    lost = {row[0]: row[1] for row in rows if len(row) == 6}
    of_b = {"causal Stage B, one step": "1.000"} if causal else {"Stage B, one step": f"{TC + 1:.3f}"}
    assert lost == {"one at a time": "0.000", "Stage A, one step": tc} | of_b

    # the decoder of each row, in the model's own number of rounds
    decoders = dict(zip([row[0] for row in rows], asked, strict=True))
    assert decoders["Stage A, one step"] == replace(evaluate.TOY_DECODERS["Stage A, one step"], gen_length=4)
    b = decoders[next(iter(of_b))]
    assert (b.n_rounds, b.tau_t2t, b.tau_joint, b.tau_m2t) == (2, None, *((0.0, 0.7) if causal else (None, -1)))


def test_a_toy_from_the_command_line(trained, tmp_path, monkeypatch, capsys):
    """A base, and a causal adapter, whose masks are written in one look at least and two at most."""
    base, rows = trained
    run = caller(evaluate, monkeypatch, capsys)
    head, *lines = run("--ckpt", base, "--device", "cpu").splitlines()
    assert head.startswith("pairs: TC = 1.099 nats")  # of one pair log 3
    names = ["decoder", "independent draws, at best", *evaluate.TOY_DECODERS]
    assert [line.split("  ")[0] for line in lines[:-1]] == names

    # two rounds are two halves of a forward, and one look
    causal = ["--n_rounds", 2, "--n_last", 1, "--causal", "--stage_b", "lora", "--out_dir", tmp_path / "causal"]
    short = ["--data", rows, "--init_from", base, "--batch_size", 4, "--max_iters", 2]
    caller(train, monkeypatch, capsys)(*short, *causal)
    costs = {line.split("  ")[0]: line.split()[-2:] for line in run("--ckpt", tmp_path / "causal").splitlines()}
    forwards, looks = map(float, costs["causal Stage B, one step"])
    assert "Stage B, one step" not in costs and 1 <= looks <= 2 and forwards == approx(1 + looks, abs=0.011)


def test_what_judges_a_model_is_read_or_refused(tmp_path, monkeypatch, capsys):
    run = caller(evaluate, monkeypatch, capsys)
    assert "no checkpoint config" in run.fails("--ckpt", tmp_path)
    save_model(tiny_model(), tmp_path)
    wrong = [{"V": "many"}, {"toy": "poems"}, {"toy": 3}, {"colour": 1}, {"name": 1}]
    for content in ([3], *({"judge": {"toy": "modes"} | judge} for judge in wrong)):
        (tmp_path / "meta.json").write_text(json.dumps(content))
        assert "meta.json" in run.fails("--ckpt", tmp_path)


# --- names
def test_shares_and_forwards_by_hand(monkeypatch):
    """Letters A to F are asked for; written are A, A, A, D, ? and ?. Four of six exist. A row costs 2 full, 1 refresh,
    and half a partial one of n/L = 1/4."""
    letter = "LATIN SMALL LETTER {}".format
    nfe = dict(full=2, partial=0.5, refresh=1)
    outputs = [Output(list(letter(x).encode()), [256], nfe) for x in "AAAD??"]
    asked = []
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, d, step: asked.append(step) or outputs)
    prompts = {letter(x): [] for x in "ABCDEF"}
    model = SimpleNamespace(partial_cost=1 / 4, cfg=SimpleNamespace(causal=False, mask_id=257))
    found = evaluate.complete(model, byte_tokenizer(), prompts, evaluate.NAMES, step="mine")
    assert found["exist"] == approx(4 / 6)
    assert (found["forwards"], found["full"], found["tokens"]) == (3.125, 2, 1)
    assert found["per_token"] == 3.125 and found["tc"] is None
    assert found["found"] == [True] * 4 + [False] * 2 and asked == ["mine"]
    assert found["written"] == [letter(x) for x in "AAAD??"]

    # a hole is a token, too
    holed = {name: [257, 257, 65] for name in prompts}
    assert evaluate.complete(model, byte_tokenizer(), holed, evaluate.NAMES)["tokens"] == 3
    assert asked[1:] == [sample.denoise]


@pytest.mark.parametrize("group", ["held out", "trained"])
def test_prompts_are_the_first_third_of_names_of_the_group_and_a_function_of_it_alone(group):
    tokenizer = byte_tokenizer()
    prompts = evaluate.draw_names(40, group, tokenizer)
    assert len(prompts) == 40 and all(exists(name) for name in prompts)
    assert {is_validation(name) for name in prompts} == {group == "held out"}
    for name, ids in prompts.items():  # a byte is a token
        assert tokenizer.decode(ids) == name[: (len(name) + 2) // 3]
    assert list(evaluate.draw_names(7, group, tokenizer).items()) == list(prompts.items())[:7]


def test_names_from_the_command_line(tmp_path, monkeypatch, capsys):
    """A base has its rows, an adapter its own; adapters share the base's and follow one another."""
    monkeypatch.setattr(evaluate, "NAMES", replace(evaluate.NAMES, gen_length=4))
    base = names_folder(tmp_path / "base", n_layer=2, n_last=1)
    for name in ("one", "two"):
        random_adapter(tmp_path / name, base)
    random_adapter(tmp_path / "causal", base, "copy", causal=True)
    run = caller(evaluate, monkeypatch, capsys)
    argv = ["--prompts", 2, "--device", "cpu", "--ckpt"]
    out = run(*argv, tmp_path / "one", tmp_path / "causal", tmp_path / "two")
    own = {"one": evaluate.ADAPTER_ROWS, "causal": evaluate.CAUSAL_ROWS, "two": evaluate.ADAPTER_ROWS}
    rows = [(name, "base") for name in evaluate.BASE_ROWS]
    rows += [(name, folder) for folder, names in own.items() for name in names]
    title, _, *lines = out.splitlines()
    assert "2 held-out names" in title and len(lines) == len(rows)
    for line, (name, folder) in zip(lines, rows, strict=True):
        assert line.startswith(f"{tmp_path / folder}  {name}  ")

        # the share that exists, forwards a name and a token; and what the tokens of a bundle depend on one another,
        # which is known where causal Stage B writes runs
        figures = line.removeprefix(f"{tmp_path / folder}  {name}").split()
        assert float(figures[0]) in (0, 0.5, 1) and float(figures[1]) >= 1
        assert len(figures) == 3 or name.startswith(("causal, whole", "causal, longest"))
        assert len(figures) == 4 or name != "causal, whole blocks"

    # one tokenizer reads for all of them
    other = names_folder(tmp_path / "other", merged_spec(), n_layer=2, n_last=1)
    assert "read by one tokenizer" in run.fails(*argv, base, other)

    # of a base alone its own rows
    out = run(*argv, base)
    assert "base, all at once" in out and "Stage B" not in out


def test_what_a_bundle_depends_on_by_hand():
    """Stage B gives a bundle of two 1/2 and 1/4, Stage A gives these tokens 1/4 and 1/8: log 4 nats. A bundle of one,
    and a row without one, tell nothing."""
    p_a = torch.tensor([[[0.25, 0.25, 0.25, 0.25], [0.125, 0.125, 0.5, 0.25]]] * 3)
    engine = SimpleNamespace(model=SimpleNamespace(logits=lambda h: p_a.log()), stage_a=lambda z: (z, z))
    bundle = torch.tensor([[True, True], [True, False], [False, False]])
    token, conf = torch.tensor([[0, 1]] * 3), torch.tensor([[0.5, 0.25]] * 3)
    done = SimpleNamespace(bundle=bundle, conf=conf, token=token)
    step = evaluate.Dependence(lambda *given: done)
    assert step(engine, token, None, None, sample.Decoding()) is done and step.nats == approx([math.log(4)])


@pytest.mark.parametrize("stage_b", ["lora", "copy"])
def test_what_bundles_depend_on_is_what_both_stages_say_of_them(stage_b):
    """A run of causal Stage B on random weights: of each bundle the log-probability that teacher forcing gives it, less
    the sum of Stage A's."""
    model = tiny_model(causal=True, n_rounds=1)
    random_lora(model, stage_b)
    step = evaluate.Dependence(sample.longest_run)
    expected = []

    def on_step(rows, done):
        for r, row in enumerate(rows):
            engine = Cached(model, [row.ids], 1)
            z, bundle, after = done.z[r : r + 1], done.bundle[r : r + 1], done.after[r : r + 1]
            h, states = engine.stage_a(z)
            logits_a = model.logits(states)
            logits_b = model.logits_b(engine.stage_b(h, bundle, after), logits_a)
            log_b, log_a = (x.log_softmax(-1).gather(-1, after[..., None])[..., 0] for x in (logits_b, logits_a))
            if bundle.sum() > 1:
                expected.append(float((log_b - log_a)[bundle].sum()))

    d = sample.Decoding(gen_length=16, tau_joint=0.0, tau_t2t=None, eos_early_stop=False)
    sample.generate(model, [[1, 2, 3], list(range(8))], d, step=step, on_step=on_step)
    assert len(expected) == 3 + 2 and step.nats == approx(expected, abs=1e-3)
