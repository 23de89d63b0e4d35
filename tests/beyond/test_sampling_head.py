"""The sampling head: its law by enumeration, decoding, training. `pytest tests/beyond/test_sampling_head.py`"""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, caller, random_ids, settings, tiny_model
from safetensors.torch import load_file

import sample
import train
from beyond import sampling_head
from beyond.joint_head import masks_as_decoded
from beyond.sampling_head import SamplingHead, accept_or_repair, draw, earlier, head_mask, sampling_head_step
from corrupt import M
from lib.util import generator
from model import sequence_context
from sample import Decoding, generate

TOY = ["--data", "pairs", "--toy", "V=3", "m=4", "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]
SAMPLING = Decoding(gen_length=21, tau_m2t=-1.0, tau_t2t=None, temperature=1.0, eos_early_stop=False)


def with_head(model, head_layers=1, looks=1, std=0.3, width=24):
    model.__class__ = SamplingHead
    model.give_head(head_layers, width, looks, generator("head"))
    for name, p in model.adapter_state().items():
        p.data += std * torch.randn(p.shape, generator=generator(name))
    return model


def small(n_masks, head_layers):
    """A block of a 0 and n masks; tokens 0, 1 and 2 (3 is the mask). (Masks alone would be exact ties.)"""
    sizes = dict(vocab_size=4, mask_id=3, eos_id=-1, block_length=1 + n_masks, n_rounds=1)
    model = with_head(tiny_model(std=0.35, **sizes), head_layers, std=0.6)
    model.lm_head.weight.data *= 0.4
    return model.requires_grad_(False), Here(model), torch.tensor([[0] + [3] * n_masks])


class Here:
    """The engine of one step, on equal blocks without a context: one of them is run."""

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg

    def stage_a(self, z):
        ctx = sequence_context(self.cfg, torch.ones_like(z[:1], dtype=torch.bool), torch.float32)
        self.h_a = self.model.last_n(self.model.prefix(z[:1], ctx), ctx).expand(len(z), -1, -1)
        return None, self.model.head(self.h_a)


def grid(n):
    return (torch.arange(n) + 0.5) / n


# --- a draft, accepted or repaired
def test_draw_is_the_inverse_cdf():
    weight = torch.tensor([0.0, 2.0, 0.0, 6.0, 0.0]).expand(9, 5)
    u = torch.tensor([0, 0.1, 0.2499, 0.25, 0.26, 0.5, 0.9, 0.9999999, 1.0])
    assert draw(weight, u).tolist() == [1, 1, 1, 3, 3, 3, 3, 3, 3]


def test_what_is_accepted_or_repaired_has_exactly_the_law_p():
    """Every draft, coin and u of a grid on which all of these probabilities are whole numbers of cells."""
    p, q = torch.tensor([0.5, 0.0, 0.125, 0.375]), torch.tensor([0.25, 0.25, 0.5, 0.0])
    cells = torch.cartesian_prod(torch.arange(4.0), grid(8), grid(5 * 3))
    draft, coin, u = cells[:, 0].long(), cells[:, 1], cells[:, 2]
    token, accepted = accept_or_repair(p.expand(len(cells), 4), q.expand(len(cells), 4), draft, coin, u)
    mass = q[draft] / (8 * 15)
    law = torch.zeros(4).index_add(0, token, mass)  # the excess, 2 : 0 : 0 : 3, in fifths
    torch.testing.assert_close(law, p)
    assert float(mass[accepted].sum()) == pytest.approx(float(torch.minimum(p, q).sum()))
    assert torch.equal(accepted, token == draft)


def test_what_is_certain():
    p = torch.randn(50, 7, generator=generator("p")).softmax(-1)
    draft, coin, u = random_ids(1, 50, high=7)[0], torch.rand(50, generator=generator("c")), torch.rand(50)
    token, accepted = accept_or_repair(p, p.clone(), draft, coin, u)
    assert accepted.all() and torch.equal(token, draft)  # p = q: every draft
    one_hot = F.one_hot(random_ids(1, 50, 1, high=7)[0], 7).float()
    token, accepted = accept_or_repair(
        one_hot, F.one_hot(draft, 7).float(), draft, coin, u
    )  # greedy: the head's argmax
    assert torch.equal(token, one_hot.argmax(-1)) and torch.equal(accepted, token == draft)


def test_the_surest_comes_first_and_the_leftmost_of_equals():
    before = earlier(-torch.tensor([[0.2, 0.9, 0.9, 0.5]]), torch.tensor([[True, False, True, True]]))[0]
    assert [before[i].nonzero().flatten().tolist() for i in (0, 2, 3)] == [[2, 3], [], [2]]
    before = earlier(torch.full((1, 3), 0.5), torch.ones(1, 3, dtype=torch.bool))[0]
    assert torch.equal(before, torch.ones(3, 3).tril(-1).bool())


# --- the head
def test_who_sees_whom_is_the_drawing():
    """head_mask's: three positions that are decided from left to right."""
    before = torch.ones(3, 3).tril(-1).bool()[None]
    drawn = ["1.. .11 ...", ".1. 1.1 1..", "..1 11. 11."]
    rows = [[c == "1" for c in row.replace(" ", "")] for row in drawn]
    assert head_mask(before)[0, 0].tolist() == rows * 3


@pytest.mark.parametrize("head_layers", [1, 3])
def test_a_position_reads_the_drafts_before_it_and_no_others(head_layers):
    model = with_head(tiny_model(), head_layers, std=0.1)
    h = torch.randn(1, 8, 64, generator=generator("h"))
    bundle, sure = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1]]).bool(), torch.rand(1, 8, generator=generator("s"))
    before, draft = earlier(-sure, bundle), random_ids(1, 8)
    plain = torch.zeros(1, 8, 64).masked_scatter(bundle[..., None], model.second_look(h, bundle, draft, before))
    for j in range(8):
        other = draft.clone()
        other[0, j] = (other[0, j] + 1) % MASK
        new = torch.zeros_like(plain).masked_scatter(bundle[..., None], model.second_look(h, bundle, other, before))
        changed = ((new - plain).abs() > 1e-6).any(-1)[0]
        assert torch.equal(changed, before[0, :, j] & bundle[0])
    some = bundle & (sure < 0.6)  # what is not asked any more is read by its draft alone
    torch.testing.assert_close(model.second_look(h, some, draft, before), plain[some])


def chain_rule(model, engine, z, d):
    """The head's p(x) of the masks of z (1, B), by enumeration: {tokens in the order of deciding: probability}, the
    order (positions), and the probability that a draft was repaired before the last one."""
    logits = engine.stage_a(z)[1]
    q, sure, masked = model.filtered(logits, d)[0], logits.softmax(-1).amax(-1), z == 3
    before, order = earlier(-sure, masked), sorted((z == 3).nonzero()[:, 1].tolist(), key=lambda i: -float(sure[0, i]))
    law, repaired = {}, {}
    for t in itertools.product(range(3), repeat=len(order)):
        token = z.clone()
        token[0, order] = torch.tensor(t)
        p = model.filtered(model.head(model.second_look(engine.h_a, masked, token, before)), d)
        p = q.masked_scatter(masked[0, :, None], p)
        of = [float((q if k == 0 else p)[i, t[k]]) for k, i in enumerate(order)]
        law[t] = math.prod(of)
        repaired[t[:2]] = of[0] * max(0.0, of[1] - float(q[order[1], t[1]])) if len(order) == 3 else 0.0
    return law, order, sum(repaired.values())


def distance(after, order, law):
    """Total variation between what was written, (R, B), and a law."""
    seen = Counter(map(tuple, after[:, order].tolist()))
    return 0.5 * sum(abs(seen[t] / len(after) - law.get(t, 0.0)) for t in {*seen, *law})


@pytest.mark.parametrize("head_layers", [1, 2])
@pytest.mark.parametrize("d", [SAMPLING, replace(SAMPLING, temperature=1.5, top_p=0.9), replace(SAMPLING, top_k=2)])
def test_a_step_follows_the_heads_chain_rule(d, head_layers):
    """Whatever Stage A's drafts are. Two positions are always decided: the second one's draft, or its repair."""
    (model, engine, z), u = small(2, head_layers), torch.rand(10_000, 3, 3, generator=generator("two"))
    s = model.step(engine, z.expand(10_000, -1), z < 0, True, u, d)
    law, order, _ = chain_rule(model, engine, z, d)
    assert distance(s["after"], order, law) < 0.02 and sum(law.values()) == pytest.approx(1)
    assert distance(torch.where(z == 3, s["token_a"], z), order, law) > 0.05  # the drafts' own law is another


def test_a_look_ends_at_the_first_repair_and_more_looks_finish_with_the_same_law():
    (model, engine, z), rows = small(3, head_layers=2), 10_000
    u, z = torch.rand(rows, 3, 4, generator=generator("three")), z.expand(rows, -1)
    one = model.step(engine, z, z < 0, True, u, SAMPLING)
    model.looks = 2
    two = model.step(engine, z, z < 0, True, u, SAMPLING)
    left = one["after"] == 3
    assert not (two["after"] == 3).any() and (left.sum(-1) <= 1).all()
    assert torch.equal(one["after"][~left], two["after"][~left])  # and then it goes on
    assert torch.equal(one["partial"], torch.full((rows,), 2 / 4))
    assert torch.equal(two["partial"], 2 / 4 + left.sum(-1) / 4)
    assert torch.equal(one["looks"], torch.ones(rows)) and torch.equal(two["looks"], 1 + left.any(-1).long())
    law, order, repaired = chain_rule(model, engine, z[:1], SAMPLING)
    assert distance(two["after"], order, law) < 0.03
    assert float(left.any(-1).float().mean()) == pytest.approx(repaired, abs=0.015) and repaired > 0.1


# --- the decoder
def test_a_fresh_head_writes_stage_as_drafts():
    """Zero output projections: the head's distributions are Stage A's, every draft is accepted, one forward a block."""
    prompt = random_ids(1, 5)[0].tolist()
    fresh = with_head(tiny_model(n_rounds=1, eos_id=-1), std=0.0)
    out = generate(fresh, [prompt], SAMPLING, seed=3, trace=True)[0]
    assert all(f["token"] == f["token_a"] for s in out.steps for f in s["fill"])
    assert (out.nfe["full"], out.nfe["partial"]) == (4, 2 / 8 + 3 * 7 / 8)  # the first of a block is not asked
    off = generate(fresh, [prompt], replace(SAMPLING, n_rounds=0), seed=3)[0]
    assert off.tokens == out.tokens and off.nfe["partial"] == 0


def test_one_token_at_a_time_is_not_looked_at_and_greedy_is_the_base():
    model, prompt = with_head(tiny_model(n_rounds=1, eos_id=-1)), random_ids(1, 5)[0].tolist()
    greedy = replace(SAMPLING, temperature=0.0, tau_m2t=1.0)
    out = generate(model, [prompt], greedy)[0]
    base = generate(tiny_model(n_rounds=1, eos_id=-1), [prompt], replace(greedy, n_rounds=0))[0]
    assert out.nfe["partial"] == 0 and out.nfe["full"] == 27  # 3 masks in the prompt's block, then 24
    assert MASK in base.tokens or out.tokens == base.tokens


@pytest.mark.parametrize("head_layers, looks", [(1, 1), (2, 4)])
def test_rows_are_decoded_as_if_alone(head_layers, looks):
    model = with_head(tiny_model(n_rounds=1, eos_id=-1), head_layers, looks)
    prompts = [random_ids(1, n, n)[0].tolist() for n in (3, 8, 13)]
    for d in (SAMPLING, replace(SAMPLING, tau_m2t=0.1, top_p=0.8), replace(SAMPLING, temperature=0.0)):
        together = generate(model, prompts, d, seed=1)
        for prompt, out in zip(prompts, together, strict=True):
            alone = generate(model, [prompt], d, seed=1)[0]
            assert out.tokens == alone.tokens and MASK not in out.tokens
            assert out.nfe["full"] == alone.nfe["full"] and out.nfe["partial"] == pytest.approx(alone.nfe["partial"])


# --- training
def test_the_loss_is_of_clean_tokens_after_clean_tokens():
    model = tiny_model(n_rounds=1)
    args = settings(sampling_head.build_parser(""), width=8)
    sampling_head.give_head(model, args)

    def batch():
        everywhere = torch.ones(16, 16, dtype=torch.bool)
        draws = [generator("t", i) for i in range(16)]
        return train.Batch(random_ids(16, 16), everywhere, everywhere, MASK, draws)

    with torch.no_grad():
        validation = sampling_head_step(model, batch(), args)[1]
    torch.testing.assert_close(validation[0], validation[1])  # a head that changes nothing yet is Stage A
    loss, terms = sampling_head_step(model, batch(), args)
    _, kind = masks_as_decoded(model, batch(), args)
    masked = (kind == M).view(-1, 8).sum(-1)
    assert int(terms[1, 0, 1]) == int((masked - 1).clamp(min=0).sum())  # all but the first of each block
    torch.testing.assert_close(loss.detach(), terms[1, 0, 0])
    assert torch.equal(terms[1], validation[1]) and not terms[0].any()
    loss.backward()
    learned = {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None}
    assert learned == {"sampling_head", "show_draft"}


@pytest.fixture
def base(tmp_path, monkeypatch, capsys):
    caller(train, monkeypatch, capsys)(*TOY, "--max_iters", 2, "--stage_a_only", "--out_dir", tmp_path / "base")
    return tmp_path / "base"


def test_adapters_train_resume_and_decode(base, tmp_path, monkeypatch, capsys):
    call = caller(sampling_head, monkeypatch, capsys)
    run = [*TOY, "--init_from", base, "--max_iters", 4]
    call(*run, "--out_dir", tmp_path / "a")
    call(*run, "--out_dir", tmp_path / "b", "--stop_at", 2)
    call("--init_from", "resume", "--out_dir", tmp_path / "b")
    a, b = (load_file(tmp_path / name / "adapter.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert {k.split(".")[0] for k in a} == {"sampling_head", "show_draft"}
    given = ["--ckpt", base, "--adapter", tmp_path / "a", "--prompt_ids", "4,4,5", "--gen_length", 4, "--json"]
    record = json.loads(caller(sample, monkeypatch, capsys)(*given, "--tau_t2t", "none", "--temperature", 1))
    assert len(record["tokens"]) > 0 and record["partial_cost"] == 1 / 4


def test_mistakes_are_one_line(base, tmp_path, monkeypatch, capsys):
    call = caller(sampling_head, monkeypatch, capsys)
    run = [*TOY, "--init_from", base, "--out_dir", tmp_path / "run"]
    for wrong in (["--corruption", "draft"], ["--context", "corrupted"], ["--n_rounds", 2]):
        assert wrong[0] in call.fails(*run, *wrong)
    assert "--init_from" in call.fails(*TOY, "--out_dir", tmp_path / "run")
    call(*run, "--max_iters", 1)
    saved = json.loads((tmp_path / "run" / "adapter.json").read_text())
    decode = caller(sample, monkeypatch, capsys)
    given = ["--ckpt", base, "--adapter", tmp_path / "run", "--prompt_ids", "4,4,5"]
    assert "--tau_t2t none" in decode.fails(*given, "--temperature", 1)
    wrong = [("width", "wide"), ("width", True), ("width", 10**12), ("head_layers", None), ("looks", 0), ("looks", 1.5)]
    wrong += [("model", saved["model"] | {"n_rounds": 2})]
    for key, value in wrong:
        (tmp_path / "run" / "adapter.json").write_text(json.dumps(saved | {key: value}))
        line = decode.fails(*given)
        assert ("n_rounds" if key == "model" else key) in line
