"""Chains, one token at a time: by enumeration and by decoding. `pytest tests/beyond/test_chain.py`"""

import itertools
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from common import EOS, MASK, caller, coherent, conditional, random_ids, tiny_model
from runs import TOY, a_base, resumes
from safetensors.torch import load_file

import toy
from beyond import chain, opponents
from beyond.chain import Text, chain_target, leaders, log_probs, write_chain
from checkpoint import load_model, save_model
from lib.util import generator
from sample import Decoding, denoise, generate
from train import PAPER, Batch, cocommit_step

ONE_A_STEP = Decoding(tau_m2t=1.0, tau_t2t=None, n_rounds=0)
STEPS = {"surest": denoise, "left": opponents.first_left}


def flags(**values):
    """The settings that a training step reads."""
    return Namespace(**PAPER | dict(corruption="mask", s_max=4, context="clean") | values)


def a_batch(clean, key="draws"):
    real = torch.ones_like(clean, dtype=torch.bool)
    return Batch(clean, real, real, MASK, [generator("tests", key, i) for i in range(len(clean))])


def whole_rows(model, before, one_by_one=False):
    """To ask about the last block of rows that are read as they are: before (N, T) stands before it."""

    def ask(hypotheses, busy):
        n, U, B = hypotheses.shape
        ids = torch.cat([before[busy][:, None].expand(n, U, -1), hypotheses], dim=2).flatten(0, 1)
        rows = torch.ones(len(ids), dtype=torch.bool) if one_by_one else None
        ctx = model.context(torch.ones_like(ids, dtype=torch.bool), one_by_one=rows)
        states = model.last_n(model.prefix(ids, ctx), ctx)[:, -B:]
        return log_probs(model, states).unflatten(0, (n, U))

    return ask


# --- the chain
@pytest.mark.parametrize("order", ["surest", "left"])
def test_the_greedy_chain_is_the_one_at_a_time_decode(order):
    model = tiny_model(n_rounds=1)
    model.lm_head.weight.data[[MASK, EOS]] = 0.0  # no end, and no [M]: to a decoder that is a candidate like any other
    prompt = random_ids(3, 8, 7)
    text = Text(model, torch.cat([prompt, prompt], dim=1), one_by_one=False)
    blocks = torch.stack([prompt, torch.full((3, 8), MASK)], dim=1).view(-1, 8)  # two blocks a row
    written, _ = write_chain(text.ask, blocks, blocks == MASK, 1, order)
    d = replace(ONE_A_STEP, gen_length=8)
    greedy = torch.tensor([o.tokens for o in generate(model, prompt.tolist(), d, step=STEPS[order])])
    assert torch.equal(written.view(3, 2, 8), torch.stack([prompt, greedy], dim=1))


def test_a_wide_beam_finds_the_likeliest_of_all_tuples():
    """Three masks from five tokens: 125 tuples, each by three forwards. A beam of 25 forgets none before the end."""
    model = tiny_model(n_rounds=1, vocab_size=6, mask_id=5, eos_id=4, block_length=4)
    clean = torch.tensor([[0, 1, 2, 3, 3, 1, 4, 2]])
    ask = whole_rows(model, clean[:, :4], one_by_one=True)
    tuples = torch.tensor(list(itertools.product(range(5), repeat=3)))  # (125, 3)
    log_p = torch.zeros(125)
    for i in range(3):
        block = torch.full((125, 1, 4), 5)
        block[:, 0, 0] = 3
        block[:, 0, 1 : i + 1] = tuples[:, :i]
        log_p += ask(block, torch.zeros(125, dtype=torch.long))[torch.arange(125), 0, i + 1, tuples[:, i]]
    torch.testing.assert_close(log_p.exp().sum(), torch.tensor(1.0))

    start = torch.tensor([[0, 1, 2, 3], [3, 5, 5, 5]])
    ask = Text(model, clean, one_by_one=True).ask
    written, score = write_chain(ask, start, start == 5, 25, "left")
    assert written.tolist() == [[0, 1, 2, 3], [3, *tuples[log_p.argmax()].tolist()]]
    torch.testing.assert_close(score, torch.stack([torch.tensor(0.0), log_p.max()]), rtol=0, atol=1e-5)
    greedy = write_chain(ask, start, start == 5, 1, "left")[1]
    assert greedy[1] < score[1] - 0.5


@pytest.mark.parametrize("task", ["modes", "pairs", "permutation", "sum"])
def test_with_exact_conditionals_a_chain_is_coherent_and_a_beam_finds_the_joint_mode(task):
    t = toy.make(task)
    c = torch.arange(t.n_ctx)
    z = torch.full((t.n_ctx, t.m), t.mask_id)

    def exact(hypotheses, busy):
        n, U, m = hypotheses.shape
        rows = hypotheses.flatten(0, 1)
        p = conditional(t, c[busy].repeat_interleave(U), rows.masked_fill(rows == t.mask_id, -1))
        return p.log().float().unflatten(0, (n, U))

    everything = torch.ones_like(z, dtype=torch.bool)
    greedy, greedy_score = write_chain(exact, z, everything, 1, tie=0.1)
    beam, beam_score = write_chain(exact, z, everything, 5, tie=0.1)
    assert coherent(t, c, greedy).all() and coherent(t, c, beam).all()
    best = t.prob.amax(-1).log()
    torch.testing.assert_close(t.log_prob(c, beam), best)
    torch.testing.assert_close(beam_score.double(), best, rtol=0, atol=1e-6)
    torch.testing.assert_close(greedy_score.double(), t.log_prob(c, greedy), rtol=0, atol=1e-6)
    if task == "modes":  # the shared token is the most probable one, and belongs to the lesser phrases
        assert (t.log_prob(c, greedy) < best - 0.1).all()


def test_near_equals_come_by_index():
    score = torch.tensor([[0.30, 0.29, 0.06, 0.31, 0.04], [0.2, 0.12, 0.5, 0.1, 0.08]]).log()
    assert leaders(score, 4, 0.1).tolist() == [[0, 1, 3, 2], [2, 0, 1, 3]]
    assert leaders(score, 4, 0.0).tolist() == [[3, 0, 1, 2], [2, 0, 1, 3]]


def test_a_mask_is_no_token():
    model = tiny_model()
    h = torch.randn(4, 64, generator=generator("states"))
    model.lm_head.weight.data[MASK] *= 50.0
    assert (model.logits(h).argmax(-1) == MASK).any()
    log_p = log_probs(model, h)
    assert (log_p[:, MASK] == float("-inf")).all()
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(4))


# --- as a target
@pytest.mark.parametrize("beam, one_by_one", [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("order", ["surest", "left"])
def test_a_later_blocks_target_is_that_of_the_block_alone(beam, one_by_one, order):
    """Rows of three blocks with masks and a bundle in each: every chain reads finished text, as decoding does."""
    model = tiny_model(seed=1)
    x = random_ids(4, 24, 1)
    masked = random_ids(4, 24, 2, 3) > 0
    masked[:, 0] = False  # in a block of masks that nothing stands before all are equally sure
    bundle = masked & (random_ids(4, 24, 3, 3) > 0)
    z = x.masked_fill(masked, MASK)
    target = chain_target(model, a_batch(x), z, bundle, beam, order, one_by_one)
    assert torch.equal(target[~bundle], x[~bundle])
    for start in (0, 8, 16):
        block = slice(start, start + 8)
        ask = whole_rows(model, x[:, :start], one_by_one)
        written, _ = write_chain(ask, z[:, block], bundle[:, block], beam, order)
        assert torch.equal(target[:, block][bundle[:, block]], written[bundle[:, block]])


def test_stage_b_is_asked_to_write_the_chain_and_stage_a_the_text():
    """A target that is wrong everywhere but in the bundle changes Stage B's fill loss alone."""
    model = tiny_model()
    batch = random_ids(3, 24)
    clean = cocommit_step(model, a_batch(batch), flags())[1]
    found = cocommit_step(model, a_batch(batch), flags(), target=chain_target)[1]
    assert torch.equal(found["m2t_A"], clean["m2t_A"]) and torch.equal(found["clean_B"], clean["clean_B"])
    assert found["m2t_B"][0] != clean["m2t_B"][0] and found["m2t_B"][1] == clean["m2t_B"][1]


# --- the command
def test_it_trains_resumes_and_decodes(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--init_from", a_base(tmp_path, monkeypatch, capsys), "--beam", 3, "--tie", 0.1]
    resumes(chain, [], run, tmp_path, monkeypatch, capsys)
    adapter = load_file(tmp_path / "whole" / "adapter.safetensors")
    assert {int(name.split(".")[1]) for name in adapter if "lora" in name} == {2, 3}  # the last two layers, in Stage B
    model = load_model(tmp_path / "whole", "cpu", torch.float32)
    (out,) = generate(model, [[4, 4, 4, 4]], Decoding(gen_length=4, tau_m2t=-1.0, tau_t2t=None))
    assert out.nfe == {"full": 1, "partial": 1, "commit": 0}


def test_mistakes_are_one_line_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    base = a_base(tmp_path, monkeypatch, capsys)
    fails = caller(chain, monkeypatch, capsys).fails
    run = [*TOY, "--init_from", base, "--out_dir", tmp_path / "run"]
    assert "--init_from DIR" in fails(*run, "--init_from", "scratch")
    text = tmp_path / "a.txt"
    text.write_text("one two three")
    save_model(tiny_model(vocab_size=272), tmp_path / "bytes")
    run = ["--data", text, "--init_from", tmp_path / "bytes", "--context", "corrupted", "--out_dir", tmp_path / "run"]
    assert "--context clean" in fails(*run)
    assert not (tmp_path / "run").exists()
