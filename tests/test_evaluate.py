"""What decoders do where every answer can be checked. `pytest tests/test_evaluate.py`"""

import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import approx, byte_model, caller, conditional, names_folder, random_adapter, tiny_config, tiny_model
from resuming import byte_rows

import evaluate
import toy
import train
from cache import Engine
from checkpoint import load_model, save_model
from config import PRESETS
from decoding import Decoding, Output
from evaluate import BASE_ROWS, OFF, ON, answer_log_probs, bits_of_rows, chain_table, one_step_table
from lib.names import draw_names, exists, names_of
from lib.rows import copy_tokens, read_corpus
from lib.tokenizer import load_tokenizer
from lib.util import write_json
from model import Model
from prepare import BYTES
from toy import Toy

# the toy is as small as possible, and after so many steps the error of its marginals is well below the 2 % asked for
PAIRS = ["--init_from", "scratch", "--n_last", 1, "--batch_size", 64, "--max_iters", 200, "--learning_rate", 5e-3]
PAIRS += ["--corruption", "mask", "--eval_interval", 10_000, "--device", "cpu"]


# --- toys
def test_answer_log_probs(monkeypatch):
    """Normalised over all tokens, then cut to the symbols; Stage B marks what is masked. Equal rows are read once."""
    monkeypatch.setattr(evaluate, "TOY_BATCH", 2)
    support = torch.tensor([[[0, 1]], [[1, 1]], [[2, 0]]])  # three contexts, three symbols, two positions
    t = Toy("three", 3, support, torch.ones(3, 1, dtype=torch.float64))
    model = tiny_model(vocab_size=8, eos_id=6, mask_id=7, block_length=2)
    c = torch.tensor([0, 1, 2, 0])
    ids = torch.tensor([[3, 3, 0, 7], [4, 4, 7, 2], [5, 5, 7, 7], [3, 3, 0, 7]])
    z = torch.tensor([[0, -1], [-1, 2], [-1, -1], [0, -1]])
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    h = model.prefix(ids, ctx)
    for x in (None, z):
        states = model.last_n(h, ctx) if x is None else model.coordinate(h, ids == 7, ids, ctx)
        expected = model.logits(states)[:, 2:].double().softmax(-1)[..., :3]
        found = answer_log_probs(model, t, c, z, x)
        torch.testing.assert_close(found.exp(), expected, rtol=1e-4, atol=1e-5)


def test_in_one_step_both_stages_pay_tc_and_one_at_a_time_nothing(tmp_path, monkeypatch, capsys):
    """KL(p || prod q_i) = TC + sum_i KL(p_i || q_i), in both stages. After training the sum is below 2 % of TC."""
    toy.write_toy(tmp_path / "rows", "pairs", dict(V=3, m=2), rows=20_000, seed=0)
    monkeypatch.setitem(PRESETS, "tiny", tiny_config(n_layer=2, n_embd=32, d_dense=64, n_rounds=1))
    caller(train, monkeypatch, capsys)(*PAIRS, "--data", tmp_path / "rows", "--out_dir", tmp_path / "run")
    net = load_model(tmp_path / "run", "cpu", torch.float32)
    t = toy.make("pairs", V=3, m=2)
    p, tc = t.marginals(), t.tc()
    masks = torch.full((t.n_ctx, t.m), -1)
    for x, table in ((None, one_step_table(net, t, False)), (t.support[:, 0], one_step_table(net, t, True))):
        q = answer_log_probs(net, t, torch.arange(t.n_ctx), masks, x)
        own = (torch.xlogy(p, p) - p * q).sum((1, 2))
        forward = toy.kl(t.prob, table)
        torch.testing.assert_close(forward, tc + own, rtol=0, atol=1e-6)
        assert (forward >= tc - 1e-9).all() and float(own.mean()) < 0.02 * float(tc.mean())
    assert evaluate.quality(net, t, BASE_ROWS["one at a time, surest first"])[0] >= 0.99
    assert toy.kl(t.prob, chain_table(net, t, False)).mean() < tc.mean()  # what no product can reach


def oracle(model, task: Toy, c, z, x=None):
    """In the place of answer_log_probs: the ideal factorised decoder, or the ideal causal one, which reads x."""
    if x is None:
        return conditional(task, c, z).log()
    before = [torch.where(torch.arange(task.m) < i, x, z) for i in range(task.m)]
    return torch.stack([conditional(task, c, before[i])[:, i] for i in range(task.m)], 1).log()


@pytest.mark.parametrize("task", toy.TASKS)
def test_with_exact_conditionals_chains_are_exact_and_the_product_pays_tc(task, monkeypatch):
    """The chains of Stage A, which reads what is written, the surest first or from the left; and of causal Stage B."""
    t = toy.make(task, **{"copy": dict(V=4, m=3), "gaussian": dict(levels=4)}.get(task, {}))
    monkeypatch.setattr(evaluate, "answer_log_probs", oracle)  # the ideal decoder in every model's place
    torch.testing.assert_close(chain_table(None, t, False), t.prob, rtol=0, atol=1e-12)
    torch.testing.assert_close(chain_table(None, t, True), t.prob, rtol=0, atol=1e-12)
    torch.testing.assert_close(one_step_table(None, t, True), t.prob, rtol=0, atol=1e-12)
    assert float(toy.kl(t.prob, one_step_table(None, t, False)).mean()) == approx(float(t.tc().mean()), abs=1e-9)


def test_which_position_is_written_next_by_hand(monkeypatch):
    """Alone the first position has .6 .4, and the second one, which is surer, .1 .9. After the second the first has .8
    .2, and after the first the second has .5 .5. What is written already is sure, and is not written again."""
    first = {(-1, -1): [0.6, 0.4], (-1, 0): [0.8, 0.2], (-1, 1): [0.8, 0.2]}
    second = {(-1, -1): [0.1, 0.9], (0, -1): [0.5, 0.5], (1, -1): [0.5, 0.5]}
    model_says = lambda z: [of.get(tuple(z), [0.99, 0.01]) for of in (first, second)]  # noqa: E731
    says = lambda model, t, c, z, x=None: torch.tensor([*map(model_says, z.tolist())]).log().double()  # noqa: E731
    monkeypatch.setattr(evaluate, "answer_log_probs", says)
    t = Toy("two", 2, torch.tensor([[[0, 1], [1, 0]]]), torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    assert chain_table(None, t, False)[0].tolist() == approx([0.9 * 0.8, 0.1 * 0.2])
    assert chain_table(None, t, True)[0].tolist() == approx([0.6 * 0.5, 0.4 * 0.5])


def test_the_table_of_a_toy_by_hand(monkeypatch, capsys):
    """Exact conditionals lose TC in one step; this Stage B loses half a nat more at each of four positions. The chain
    from the left loses nothing, and the other one, here, a nat. Of the answers in four contexts one is the likeliest,
    one is possible, two are neither. Each costs a forward, and a pass of two halves."""
    t = toy.make("modes", n_ctx=4)
    answers = [t.support[0, 0].tolist(), t.support[1, 2].tolist(), [0] * 4, [t.mask_id] * 4]
    outputs = [Output([], tokens=answer, nfe=dict(full=1, partial=2, refresh=0)) for answer in answers]
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, d: outputs)
    worse = lambda model, t, c, z, x=None: oracle(model, t, c, z) - (0.0 if x is None else 0.5)  # noqa: E731
    monkeypatch.setattr(evaluate, "answer_log_probs", worse)
    monkeypatch.setattr(evaluate, "chain_table", lambda model, t, left: t.prob * math.exp(left - 1))
    model = SimpleNamespace(cfg=SimpleNamespace(n_rounds=2, stage_b="paper"), partial_cost=0.5)
    evaluate.evaluate_toy(model, t)

    TC = float(t.tc()[0])
    rows = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    for name, lost in {
        "one at a time, from the left": 0,
        "one at a time, surest first": 1,
        "all at once": TC,
        "Stage B, all at once": TC + 2,
    }.items():
        assert [name, f"{lost:.3f}", "0.500", "0.250", "2.00", "1.00"] in rows

    # the decoder of a row has the model's own number of rounds
    decoder = evaluate.rows_of(model)["Stage B, all at once"]
    assert (decoder.n_rounds, decoder.tau_m2t, decoder.tau_t2t) == (2, -1.0, None)


# --- names
def test_shares_and_forwards_by_hand(monkeypatch):
    """The letters A to F are asked for, and A, A, A, D, ? and ? are written, so four of six exist. A row costs 2 full
    forwards, 1 refresh, and half a partial forward of n/L = 1/4."""
    letter = "LATIN SMALL LETTER {}".format
    nfe = dict(full=2, partial=0.5, refresh=1)
    outputs = [Output(list(letter(x).encode()), [256], nfe) for x in "AAAD??"]
    asked = []
    monkeypatch.setattr(evaluate, "generate", lambda *given, **how: asked.append(how) or outputs)
    prompts = {letter(x): [] for x in "ABCDEF"}
    model = SimpleNamespace(partial_cost=1 / 4, cfg=SimpleNamespace(mask_id=257))
    found = evaluate.complete(model, load_tokenizer(BYTES), prompts, Decoding(), step="mine")
    assert found["exist"] == approx(4 / 6)
    assert (found["forwards"], found["full"], found["per_token"]) == (3.125, 2, 3.125)
    assert found["written"] == [letter(x) for x in "AAAD??"] and asked == [dict(step="mine")]


def test_prompts_are_the_first_third_of_held_out_names():
    tokenizer = load_tokenizer(BYTES)
    prompts = draw_names(40, tokenizer)
    assert len(prompts) == 40 and all(exists(name) for name in prompts)
    assert prompts.keys().isdisjoint(names_of("train"))
    beginnings = {name[: (len(name) + 2) // 3] for name in names_of("val")}
    assert sorted(map(tokenizer.decode, draw_names(10**6, tokenizer).values())) == sorted(beginnings)
    for name, ids in prompts.items():  # a byte is a token
        assert tokenizer.decode(ids) == name[: (len(name) + 2) // 3]


def test_names_from_the_command_line(tmp_path, monkeypatch, capsys):
    """First come the rows of the base, which the adapters share, then the rows of one adapter after the other."""
    monkeypatch.setattr(evaluate, "NAME_LENGTH", 4)
    base = names_folder(tmp_path / "base", n_layer=2, n_last=1)
    random_adapter(tmp_path / "one", base)
    random_adapter(tmp_path / "causal", base, "causal", n_rounds=1)
    run = caller(evaluate, monkeypatch, capsys)
    argv = ["--prompts", 2, "--device", "cpu", "--ckpt"]
    out = run(*argv, tmp_path / "one", tmp_path / "causal")
    rows = [(f"base, {name}", "base") for name in BASE_ROWS]
    rows += [(name, "one") for name in (OFF, ON, "Stage B off, all at once", "Stage B, all at once")]
    rows += [(name, "causal") for name in ("Stage B, all at once", "Stage B, a beam of 4")]
    lines = [line.split("  ")[:2] for line in out.splitlines()[2:-2]]
    assert lines == [[str(tmp_path / folder), name] for name, folder in rows]

    # flags that only bits read
    assert "--hole does nothing here" in run.fails(*argv, base, "--hole", 2)
    assert "--prompts does nothing here" in run.fails(*argv, base, "--bits", "--data", base)

    # one row of one's own by flags
    out = run(*argv, tmp_path / "one", tmp_path / "causal", "--tau_m2t", 0.9)
    assert out.count("as asked") == 2 and "base, " not in out

    # of five completions Stage B changes four: two become names, one was a name, and one is none in either
    written = {0: ["x", "x", "TILDE", "SPACE", "x"], 2: ["DIGIT ONE", "DIGIT TWO", "x", "SPACE", "y"]}
    found = lambda *of: dict(exist=0, forwards=0, per_token=0, written=written[of[-1].n_rounds])  # noqa: E731
    monkeypatch.setattr(evaluate, "complete", found)
    out = run(*argv, tmp_path / "one", "--prompts", 5)
    assert "Stage B changes 4 of 5 completions: 2 names gained, 1 lost" in out


# --- bits
WAYS = [("paper", "Stage A"), ("paper", "Stage B"), ("causal", "Stage B"), ("paper", "one at a time")]


def cost_by_decoding(model: Model, row: torch.Tensor, masked: torch.Tensor, way: str) -> torch.Tensor:
    """Bits of the masked tokens of a row (T,), by the decoder's own forwards, block after block."""
    B, K = model.cfg.block_length, model.cfg.n_rounds
    bits = torch.zeros(row.shape)
    for start in range(0, len(row), B):
        clean, hidden = row[None, start : start + B], masked[None, start : start + B]
        engine = Engine(model, [row[:start].tolist()], K)
        for j in range(B):
            z = clean.masked_fill(hidden, model.cfg.mask_id)
            if way == "one at a time":
                z[:, :j] = clean[:, :j]
            h, states = engine.stage_a(z)
            if way == "Stage B":  # the paper's does not read the tokens
                states = engine.stage_b(h, hidden, clean)
            logits = model.logits(states)
            bits[start + j] = -logits[0, j].softmax(-1)[clean[0, j]].log2()
    return bits * masked


@torch.no_grad()
@pytest.mark.parametrize("stage_b, way", WAYS)
def test_bits_are_what_the_decoders_own_forwards_give(stage_b, way, tmp_path, monkeypatch):
    """Of four texts, whose first three tokens are a prompt. They count up to their eos, which has no bytes. The eos
    that fill the last block are masks, too, or they would show where a text ends."""
    monkeypatch.setattr(evaluate, "TEXT_BATCH", 4)
    folder = byte_rows(tmp_path / "rows", prompt=3)
    model = byte_model(n_rounds=2 if stage_b == "paper" else 1, stage_b=stage_b)
    corpus = read_corpus(folder, 64, 0, 8, 0)
    by_hand = 0.0
    tokens = 0
    for r in corpus.rows["val"].order[:4]:
        row = torch.from_numpy(corpus.rows["val"].rows[r]).long()
        n = row.tolist().index(256) + 1
        row = row[: (n + 7) // 8 * 8]
        bits = cost_by_decoding(model, row, torch.arange(len(row)) > 2, way)
        by_hand += float(bits[:n].sum())
        tokens += n - 3
    found = bits_of_rows(model, corpus, way, 1, load_tokenizer(folder))
    assert found["bits"] == approx(by_hand, rel=1e-4)
    assert (found["tokens"], found["bytes"]) == (tokens, tokens - 4)


def test_holes_in_the_middle_of_a_block(tmp_path, monkeypatch):
    """Two of eight tokens are masked. A model that always says eos fills exactly the holes that have nothing else."""
    says_eos = lambda model, batch, way: F.one_hot(torch.full_like(batch.clean, 256), 272).float()  # noqa: E731
    monkeypatch.setattr(evaluate, "log_probs_of_batch", says_eos)
    corpus = read_corpus(byte_rows(tmp_path / "rows"), 64, 0, 8, 0)
    found = bits_of_rows(byte_model(), corpus, "Stage A", 10**9, None, hole=2)

    rows = [torch.from_numpy(row).long() for row in corpus.rows["val"].rows]
    rows = torch.stack([F.pad(row, (0, 64 - len(row)), value=256) for row in rows])
    text = (rows == 256).long().cumsum(1).cumsum(1) <= 1  # up to the first eos
    holes = text.view(40, 8, 8)[..., 3:5]
    wrong = holes & (rows.view(40, 8, 8)[..., 3:5] != 256)
    assert found["tokens"] == int(holes.sum())
    assert found["blocks"] == int(holes.any(-1).sum())
    assert 0 < found["missed"] == int(wrong.any(-1).sum()) < found["blocks"]


def test_bits_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Bits of a base and of its adapters. A run says which rows it read."""
    rows = byte_rows(tmp_path / "rows")
    base = tmp_path / "base"
    save_model(byte_model(n_layer=2, n_last=1, n_rounds=1), base)
    copy_tokens(rows, base)
    random_adapter(tmp_path / "paper", base)
    random_adapter(tmp_path / "causal", base, "causal")
    run = caller(evaluate, monkeypatch, capsys)
    short = ["--device", "cpu", "--tokens", 50, "--seq_len", 64, "--ckpt"]
    assert "give --data" in run.fails(*short, base)
    write_json(base / "train.json", {"data": str(rows)})

    out = run(*short, tmp_path / "paper", tmp_path / "causal")
    lines = [line.split(", blocks of 8  ") for line in out.splitlines() if ", blocks of 8  " in line]
    titles = [title for title, _ in lines]
    for _, figures in lines:
        a_token, a_byte = map(float, figures.split()[:2])
        assert a_token <= a_byte < 1.1 * a_token  # every token is a byte, but for eos
    assert titles == [
        f"{base}  Stage A, all at once",
        f"{base}  one at a time, from the left",
        f"{tmp_path / 'paper'}  Stage A, all at once",
        f"{tmp_path / 'paper'}  paper Stage B, all at once",
        f"{tmp_path / 'causal'}  causal Stage B, all at once",
    ]

    # a left-to-right model has one way
    save_model(byte_model(n_layer=2, n_last=1, n_rounds=1, block_length=1), tmp_path / "left")
    copy_tokens(rows, tmp_path / "left")
    assert "Stage A" not in run(*short, tmp_path / "left", "--data", rows)

    assert "8 masks in the middle" in run(*short, tmp_path / "causal", "--hole", 8)
    assert "--hole 9: blocks have fewer tokens" in run.fails(*short, base, "--hole", 9)


def test_ms_a_token_by_hand(monkeypatch):
    """Of four rows in a length of 8 three have a first half. After two of these 4 tokens each are drawn, in .4 s."""
    rows = [torch.arange(n) for n in (3, 4, 8, 7)]
    corpus = SimpleNamespace(rows={"val": SimpleNamespace(seq_len=8, rows=rows)})
    asked = []
    clock = iter([1.0, 1.4])
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, d: asked.append((prompts, d.gen_length)))
    assert evaluate.ms_a_token(None, corpus, Decoding(), 2) == approx(400 / 8)
    assert asked == [([[0, 1, 2, 3]] * 2, 4)]
