"""Chain targets: what they are, bundles and masks as decoding meets them. `pytest tests/beyond/test_chain.py`"""

import json
import math

import pytest
import torch
from common import EOS, MASK, coherent, command_line, conditional, random_ids, refused, settings, tiny_model
from resuming import goes_on_bit_for_bit
from runs import TOY, a_base
from safetensors.torch import load_file

import sample
from beyond import chain
from beyond.chain import TIE, beam_chain, chain_target, leaders, masks_as_decoded, stage_a_look
from corrupt import G, M
from lib import toy
from lib.settings import build_parser
from lib.util import generator
from sample import Decoding, generate
from train import Batch, cocommit_step, corrupt_batch


def flags(**values):
    parser = build_parser("")
    chain.add_flags(parser)
    return settings(parser, **{"corruption": "mask"} | values)


def a_batch(clean, key="draws", real=None, free=None):
    if real is None:
        real = torch.ones_like(clean, dtype=torch.bool)
    if free is None:
        free = real
    return Batch(clean, real, free, MASK, [generator("tests", key, i) for i in range(len(clean))])


def whole_rows(model):
    """A look at every position of rows z (R, T) that are read as they are, the last block being in work."""

    def look(z, where, k):
        logits = model(z, model.context(torch.ones_like(z, dtype=torch.bool)))
        logits[..., MASK] = float("-inf")
        log_p = logits.log_softmax(-1)
        token = leaders(log_p, k, TIE)
        sure = log_p.amax(-1).masked_fill(~where, float("-inf"))
        return sure, log_p.gather(-1, token), token

    return look


# --- the chain
@pytest.mark.parametrize("order", ["surest", "leftmost"])
def test_the_greedy_chain_is_the_one_at_a_time_decode(order):
    """What the released loop writes when it may fill one token a step, but for near-equals."""
    model = tiny_model(n_rounds=1, order=order)
    model.lm_head.weight.data[[MASK, EOS]] = 0.0  # no end, and no [M]: to the loop that is a candidate like any other
    prompt = random_ids(3, 8, 7)
    look = stage_a_look(model, a_batch(torch.cat([prompt, prompt], dim=1)), tie=0.0)
    last = torch.stack([prompt, torch.full((3, 8), MASK)], dim=1).view(-1, 8)  # two blocks a row
    written, _ = beam_chain(look, last, last == MASK, 1, order, tie=0.0)
    d = Decoding(gen_length=8, tau_m2t=1.0, tau_t2t=None, n_rounds=0, max_post_steps=0)
    greedy = torch.tensor([o.tokens for o in generate(model, prompt.tolist(), d)])
    assert torch.equal(written.view(3, 2, 8), torch.stack([prompt, greedy], dim=1))


@pytest.mark.parametrize("task", ["modes", "pairs", "permutation", "sum"])
def test_with_exact_conditionals_a_chain_is_coherent_and_a_beam_finds_the_joint_mode(task):
    t = toy.make(task)
    c = torch.arange(t.n_ctx)
    z = torch.full((t.n_ctx, t.m), t.mask_id)

    def exact(z, where, k):
        log_p = conditional(t, c, z.masked_fill(z == t.mask_id, -1)).log()
        token = leaders(log_p, k, TIE)
        return log_p.amax(-1).masked_fill(~where, float("-inf")), log_p.gather(-1, token).float(), token

    everything = torch.ones_like(z, dtype=torch.bool)
    greedy, greedy_score = beam_chain(exact, z, everything, 1)
    beam, beam_score = beam_chain(exact, z, everything, 5)
    assert coherent(t, c, greedy).all() and coherent(t, c, beam).all()
    best = t.log_prob(c, t.mode())
    torch.testing.assert_close(t.log_prob(c, beam), best)
    torch.testing.assert_close(beam_score.double(), best, rtol=0, atol=1e-6)
    torch.testing.assert_close(greedy_score.double(), t.log_prob(c, greedy), rtol=0, atol=1e-6)
    if task == "modes":  # the shared token is the most probable one, and belongs to the lesser phrases
        assert (t.log_prob(c, greedy) < best - 0.1).all()


def test_near_equals_come_by_index():
    score = torch.tensor([[0.30, 0.29, 0.06, 0.31, 0.04], [0.2, 0.12, 0.5, 0.1, 0.08]]).log()
    assert leaders(score, 4, TIE).tolist() == [[0, 1, 3, 2], [2, 0, 1, 3]]


def test_a_look_takes_the_lower_id_of_near_equals_and_says_how_sure_the_best_is(monkeypatch):
    """Token 7 has 1.0, token 21 has 1.05, and the mask, which is no target, 9."""
    model = tiny_model()
    logits = torch.full((40,), -5.0)
    logits[[7, 21, MASK]] = torch.tensor([1.0, 1.05, 9.0])
    monkeypatch.setattr(model, "head", lambda h: logits.repeat(len(h), 1))
    monkeypatch.setattr(chain, "AT_ONCE", 3)
    x = random_ids(2, 16)
    bundle = random_ids(2, 16, 3, 2).bool()
    asked = bundle.view(-1, 8)
    sure, log_p, token = stage_a_look(model, a_batch(x))(x.view(-1, 8), asked, 1)
    assert token[asked].tolist() == [[7]] * int(bundle.sum())
    torch.testing.assert_close(sure[asked] - log_p[asked][:, 0], torch.full((int(bundle.sum()),), 0.05))
    assert (sure[~asked] == -math.inf).all() and (log_p[~asked] == -math.inf).all()
    z = x.masked_fill(bundle, MASK)
    assert torch.equal(chain_target(model, a_batch(x), z, bundle, flags()), torch.where(bundle, 7, x))


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("order", ["surest", "leftmost"])
def test_a_later_blocks_target_is_that_of_the_block_alone(beam, order):
    """Rows of three blocks with masks and a bundle in each: every chain reads finished text, as decoding does."""
    model = tiny_model(seed=1, order=order)
    x = random_ids(4, 24, 1)
    masked = random_ids(4, 24, 2, 3) > 0
    bundle = masked & (random_ids(4, 24, 3, 3) > 0)
    z = x.masked_fill(masked, MASK)
    target = chain_target(model, a_batch(x), z, bundle, flags(beam=beam))
    assert torch.equal(target[~bundle], x[~bundle])
    for start in (0, 8, 16):
        end = start + 8
        ids = torch.cat([x[:, :start], z[:, start:end]], dim=1)
        here = bundle[:, :end] & (torch.arange(end) >= start)
        written, _ = beam_chain(whole_rows(model), ids, here, beam, order)
        alone = torch.where(here, written, x[:, :end])
        assert torch.equal(target[:, start:end], alone[:, start:])


# --- masks
def test_half_of_the_blocks_have_their_masks_at_the_end():
    x = random_ids(400, 16)
    real = (torch.arange(16) < 14).expand(400, 16)
    free = real & (torch.arange(16) >= 2)  # a prompt, and padding
    model = tiny_model()
    plain = corrupt_batch(model, a_batch(x, "b", real, free), flags())[1] == M
    z, kind = masks_as_decoded(model, a_batch(x, "b", real, free), flags())
    assert torch.equal(kind == M, z == MASK) and torch.equal((kind == G) | (kind == M), free)
    assert torch.equal(z[kind != M], x[kind != M])
    count, before = (k.view(400, 2, 8).sum(-1) for k in (kind == M, plain))
    assert torch.equal(count, before)
    ends = torch.stack([torch.arange(8) >= 8 - count[:, 0, None], torch.arange(8) >= 6 - count[:, 1, None]], dim=1)
    suffix = ((kind == M).view(400, 2, 8) == ends & free.view(400, 2, 8)).all(-1)
    same = ((kind == M) == plain).view(400, 2, 8).all(-1)
    assert (suffix | same).all() and 0.5 < suffix.float().mean() < 0.75  # half, and those that were so before


def test_all_masks_are_at_the_end_where_the_leftmost_are_written_first():
    z, kind = masks_as_decoded(tiny_model(order="leftmost"), a_batch(random_ids(100, 16)), flags())
    masked = (z == MASK).view(200, 8)
    count = masked.sum(-1, keepdim=True)
    assert torch.equal(masked, torch.arange(8) >= 8 - count) and set(count[:, 0].tolist()) == set(range(9))


# --- the step, and the command line
@pytest.mark.parametrize("context", ["corrupted", "clean"])
def test_adapters_in_stage_b_alone_learn_and_stage_a_stays(context):
    model = tiny_model()
    args = flags(lora_r=4, context=context, s_max=4)
    before = cocommit_step(model, a_batch(random_ids(3, 24)), args)[1]
    chain.lora_in_stage_b(model, args)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1, generator=generator(name))
    loss, terms = cocommit_step(model, a_batch(random_ids(3, 24)), args, target=chain_target)
    assert torch.equal(terms["m2t_A"], before["m2t_A"]) and not torch.equal(terms["m2t_B"], before["m2t_B"])
    loss.backward()
    learned = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    lora = {f"layers.{i}.attn.{w}.lora_{a}" for i in (2, 3) for w in ("qkv", "proj") for a in "AB"}
    assert learned == lora | {"markers"}


def test_chain_targets_train_resume_and_decode(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--init_from", a_base(tmp_path, monkeypatch, capsys), "--beam", 3, "--n_last", 2]
    goes_on_bit_for_bit(chain, run, tmp_path, monkeypatch, capsys)
    adapter = load_file(tmp_path / "whole" / "adapter.safetensors")
    assert {int(k.split(".")[1]) for k in adapter if "lora" in k} == {2, 3}
    assert json.loads((tmp_path / "whole" / "adapter.json").read_text())["lora_in_stage_b_alone"]
    given = ["--ckpt", tmp_path / "whole", "--prompt_ids", "4,4", "--gen_length", 2, "--n_rounds", 1, "--json"]
    code, out, _ = command_line(sample, monkeypatch, capsys, *given)
    assert code == 0 and json.loads(out)["nfe"]["partial"] > 0

    # --lora all is the paper's scope
    run = [*run, "--lora", "all", "--max_iters", 1, "--out_dir", tmp_path / "all"]
    assert command_line(chain, monkeypatch, capsys, *run)[0] == 0
    adapter = load_file(tmp_path / "all" / "adapter.safetensors")
    assert {int(k.split(".")[1]) for k in adapter if "lora" in k} == {0, 1, 2, 3}


def test_mistakes_are_one_line_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    base, text = a_base(tmp_path, monkeypatch, capsys), tmp_path / "a.txt"
    run = [*TOY, "--init_from", base, "--out_dir", tmp_path / "run"]
    assert "--init_from DIR" in refused(chain, monkeypatch, capsys, *run, "--init_from", "scratch")
    assert "vocabulary" in refused(chain, monkeypatch, capsys, *run, "--beam", 8)
    text.write_text("one two three")
    run = ["--data", text, "--init_from", "assets/names", "--context", "corrupted", "--out_dir", tmp_path / "run"]
    assert "--context clean" in refused(chain, monkeypatch, capsys, *run)
    assert not (tmp_path / "run").exists()
