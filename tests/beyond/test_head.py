"""The head: parallel looks against writing one by one, its law, what it refuses, what it learns.
`pytest tests/beyond/test_head.py`
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, caller, coherent, random_ids, tiny_model
from resuming import goes_on_bit_for_bit
from runs import TOY, a_base
from safetensors.torch import load_file
from test_chain import a_batch, flags

import sample
import train
from beyond import head
from beyond.chain import from_the_left, masks_as_decoded
from beyond.head import Head, head_step
from checkpoint import load_model
from corrupt import M
from lib import toy
from lib.util import generator
from model import Context, rotary
from sample import Decoding, Look, StageA, candidates, generate, generate_one
from train import clean_tokens

AT_ONCE = Decoding(gen_length=21, tau_m2t=-1.0, tau_t2t=None, max_post_steps=0, holes=True)


def with_head(std=0.3, **overrides):
    model = tiny_model(n_rounds=1, **overrides)
    model.second_look = Head(model.cfg, width=24)
    for name, p in model.second_look.named_parameters():
        p.data = std * torch.randn(p.shape, generator=generator(name)) + (1.0 if p.dim() == 1 else 0.0)
    return model.requires_grad_(False)


# --- decoding
def next_logits(model, states, logits, tokens, i):
    """The head's logits at position i of one block, after the tokens before it: nothing behind i is read."""
    second = model.second_look
    before = torch.cat([torch.zeros(1, states.shape[-1]), model.wte(torch.tensor(tokens[:i], dtype=torch.long))])
    x = F.rms_norm(states[: i + 1], states.shape[-1:]) + second.show(before)
    ctx = Context(*rotary(model.cfg, torch.arange(i + 1), torch.float32), mask=None)
    both = logits[i].log_softmax(-1) + model.head(second.block(x[None], ctx)[0, i])
    return both.masked_fill(torch.arange(len(both)) == model.cfg.mask_id, float("-inf"))


def slow_look(engine, a, bundle):
    """Row by row and token by token, with no drafts; what it costs is not counted."""
    none = torch.zeros(len(bundle))
    look = Look(a.token.clone(), a.conf.clone(), torch.zeros_like(bundle), none, none.long())
    for r, row in enumerate(bundle):
        places = row.nonzero()[:, 0].tolist()
        final = a.z[r].tolist()
        together = 1.0
        for i in places:
            logits = next_logits(engine.model, a.states[r], a.logits[r], final, i)
            token, p = candidates(logits, a.u[r, i], a.d)
            final[i] = int(token)
            together *= float(p)
            if together > a.d.tau_keep:
                look.token[r, i] = final[i]
                look.written[r, i] = True
        look.written[r, places[:1]] = True
    return look


def some(probability, masked):
    """A bundle with gaps: masks whose place is no multiple of three."""
    here = masked & (torch.arange(masked.shape[1]) % 3 > 0)
    return torch.where(here.any(-1, keepdim=True), here, masked)


PROMPTS = [random_ids(1, n, n)[0].tolist() for n in (3, 8)]
HOLES = [[5, MASK, 7, MASK, MASK, 9, 3, MASK, 4], [MASK, 7, 7, 3, MASK, 20, MASK]]


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (1.0, 0.8)])
@pytest.mark.parametrize("tau_keep", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("select", [None, some])
def test_parallel_looks_are_writing_one_by_one(temperature, top_p, tau_keep, select):
    """In rows with holes and in bundles with gaps."""
    model = with_head()
    d = replace(AT_ONCE, temperature=temperature, top_p=top_p, tau_keep=tau_keep, select=select)
    looks = []
    ours = generate(model, PROMPTS + HOLES, d, seed=2, on_step=lambda rows, s: looks.extend(s.look.looks.tolist()))
    slow = generate(model, PROMPTS + HOLES, replace(d, look=slow_look), seed=2)
    assert [(o.tokens, o.nfe["full"]) for o in ours] == [(o.tokens, o.nfe["full"]) for o in slow]
    if tau_keep == 0:
        assert max(looks) > 2  # drafts were wrong
    if tau_keep == 1:
        assert max(looks) == 1  # refused at once


def test_a_row_alone_is_the_specification_and_the_same_in_company():
    model = with_head()
    for tau_keep in (0.0, 0.02):
        d = replace(AT_ONCE, tau_keep=tau_keep)
        together = generate(model, PROMPTS + HOLES, d)
        for prompt, out in zip(PROMPTS + HOLES, together, strict=True):
            assert generate_one(model, prompt, d)[:2] == (out.tokens, out.nfe)
    drawn = replace(d, temperature=1.0)
    first = [generate(model, [*PROMPTS, *HOLES][:n], drawn, seed=1)[0].tokens for n in (1, 4)]
    assert first[0] == first[1]
    assert model.partial_cost == 1 / 4


class ByHand(Head):
    """Two to one after even tokens, three to one after odd ones, for the token that is one higher."""

    def forward(self, model, states, tokens, asked):
        before = F.pad(tokens[:, :-1], (1, 0))
        favourite = F.one_hot((before + 1) % 4, 6).float()
        odds = torch.where(before % 2 == 0, 2.0, 3.0)
        return (favourite * odds.log()[..., None])[asked]


def looked(tau_keep, z=(5, 5, 1, 5)):
    """Four tokens, an eos that is never written, and the mask; Stage A likes 2 at its first mask, and nothing else."""
    model = tiny_model(vocab_size=6, mask_id=5, eos_id=4, block_length=4)
    second = ByHand(model.cfg, 8)
    z = torch.tensor([z])
    logits = torch.zeros(1, 4, 6)
    logits[..., 4] = float("-inf")
    logits[0, 0, 2] = 1e-3
    token = torch.full((1, 4), 2)
    a = StageA(z, None, torch.zeros(1, 4, 64), logits, token, torch.full((1, 4), 0.3), z * 0.0, Decoding())
    a.d = replace(a.d, tau_keep=tau_keep)
    return second.look(SimpleNamespace(model=model), a, z == 5)


def test_what_it_refuses_by_hand():
    """0 _ is followed by 1 (2/5), 1 by 2 (3/6), and behind the visible 1 comes 2 (3/6): .4, .2, .1 together."""
    for tau_keep, written in ((0.0, [1, 1, 0, 1]), (0.15, [1, 1, 0, 0]), (0.3, [1, 0, 0, 0])):
        look = looked(tau_keep)
        assert look.written.int().tolist() == [written]
        assert look.token[0, look.written[0]].tolist() == [1, 2, 2][: sum(written)]
    torch.testing.assert_close(looked(0.0).conf[0, [0, 1, 3]], torch.tensor([0.4, 0.5, 0.5]), rtol=0, atol=1e-3)

    # where it is not sure of its own first token, Stage A's is written
    look = looked(0.5)
    assert look.written.int().tolist() == [[1, 0, 0, 0]] and look.token[0, 0] == 2 and look.conf[0, 0] == 0.3


def test_looks_by_hand():
    """Drafts 2 0 . 0. The first look finds 1 at the first place and 3 behind the draft 2; the second 2 behind 1; that
    differs from 3, and the third finds what is behind the visible 1, the same as ever."""
    look = looked(0.0)
    assert look.looks.tolist() == [3] and look.partial.tolist() == [3.0]
    assert looked(0.45).looks.tolist() == [1]  # the first is not sure enough: nothing else matters
    assert looked(0.0, z=(5, 0, 1, 0)).looks.tolist() == [1]


def test_at_holes_a_head_that_was_taught_ends_stands_aside():
    """Where the leftmost are written first: Stage A's first token alone, until nothing visible is behind a mask."""
    model, steps = with_head(order="leftmost"), []
    (out,) = generate(model, HOLES[:1], AT_ONCE, on_step=lambda rows, s: steps.append(s))
    for s in steps[:3]:
        first = int((s.stage_a.z[0] == MASK).nonzero()[0, 0])
        assert s.look.written[0].nonzero().tolist() == [[first]] and s.look.looks == 0
        assert s.after[0, first] == s.stage_a.token[0, first]
    assert steps[4].look.written.sum() > 1 and steps[4].look.looks > 0
    assert out.nfe["partial"] == sum(int(s.look.looks) for s in steps)


# --- training
def test_the_target_is_what_the_base_writes_from_the_left_in_blocks_of_one():
    """A beam of one against whole rows, each read up to the mask that is written next."""
    model, x = tiny_model(std=0.12), random_ids(3, 24)
    masked = (torch.arange(24) % 8 >= 5).repeat(3, 1)
    z = x.masked_fill(masked, MASK)
    known = {}
    args = flags(read_in="ones")
    found = from_the_left(model, a_batch(x), z, masked, args, known)
    for r, end in [(r, e) for r in range(3) for e in (8, 16, 24)]:
        ids = x[r, :end].clone()
        ids[-3:] = MASK
        for i in range(end - 3, end):
            so_far = ids[None, : i + 1]
            logits = model(so_far, model.context(so_far >= 0, block_length=1))[0, i]
            logits[MASK] = float("-inf")
            ids[i] = logits.argmax()
        assert torch.equal(found[r, end - 8 : end], ids[-8:])
    wide = from_the_left(model, a_batch(x), z, masked, flags(read_in="ones", beam=4), {})
    blocks = from_the_left(model, a_batch(x), z, masked, flags(read_in="blocks"), {})
    assert not torch.equal(wide, found) and not torch.equal(blocks, found)
    assert torch.equal(wide[~masked], x[~masked])

    # what has been written for the same visible tokens is remembered, with other blocks beside it
    order = [2, 0, 2]
    again = from_the_left(model, a_batch(x[order]), z[order], masked, args, known)
    assert torch.equal(again, found[order]) and len(known) == 9


def test_the_loss_is_the_cross_entropy_of_every_mask_after_the_tokens_before_it():
    model, args, x = with_head(), flags(), random_ids(6, 24)
    head.head_alone(model, args)
    loss, terms = head_step(model, a_batch(x), args, target=clean_tokens)
    z, kind = masks_as_decoded(model, a_batch(x), args)
    ce = []
    for row, start in [(r, s) for r in range(6) for s in (0, 8, 16)]:
        ids = torch.cat([x[row, :start], z[row, start : start + 8]])[None]
        ctx = model.context(ids >= 0)
        states = model.last_n(model.prefix(ids, ctx), ctx)[0, start:]
        logits = model.head(states)
        logits[:, MASK] = float("-inf")
        wanted = x[row, start : start + 8].tolist()
        for i in (kind[row, start : start + 8] == M).nonzero()[:, 0].tolist():
            ce.append(-next_logits(model, states, logits, wanted, i).log_softmax(-1)[wanted[i]])
    torch.testing.assert_close(loss, torch.stack(ce).sum(), rtol=1e-4, atol=1e-3)
    assert terms["head"][1] == len(ce) > 30
    loss.backward()
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None} == {"second_look"}


def test_on_a_toy_it_writes_whole_phrases_at_once(tmp_path, monkeypatch, capsys):
    """Stage A alone writes none. The base has not learned to read in blocks of one: it reads in its own."""
    size = ["--data", "modes", "--toy", "n_ctx=2", "--batch_size", 32, "--device", "cpu"]
    base = ["--stage_a_only", "--corruption", "mask", "--max_iters", 160, "--learning_rate", 4e-3]
    caller(train, monkeypatch, capsys)(*size, *base, "--out_dir", tmp_path / "base")
    learn = ["--init_from", tmp_path / "base", "--read_in", "blocks", "--max_iters", 40, "--width", 64]
    caller(head, monkeypatch, capsys)(*size, *learn, "--out_dir", tmp_path / "head")
    model = load_model(tmp_path / "head", "cpu", torch.float32)
    task = toy.make("modes", n_ctx=2)
    contexts = torch.arange(2)
    shares = []
    for n_rounds in (0, 1):
        d = replace(AT_ONCE, gen_length=task.m, n_rounds=n_rounds, holes=False)
        answers = torch.tensor([o.tokens for o in generate(model, task.prompt(contexts).tolist(), d)])
        shares.append(coherent(task, contexts, answers).float().mean())
    assert shares == [0.0, 1.0]


def test_it_trains_resumes_and_decodes_from_its_folder_alone(tmp_path, monkeypatch, capsys):
    base = a_base(tmp_path, monkeypatch, capsys)
    run = [*TOY, "--init_from", base, "--width", 32, "--beam", 2]
    goes_on_bit_for_bit(head, run, tmp_path, monkeypatch, capsys)
    given = ["--ckpt", tmp_path / "whole", "--prompt_ids", "4,4,5", "--gen_length", 4, "--json"]
    record = json.loads(caller(sample, monkeypatch, capsys)(*given))
    assert len(record["tokens"]) > 0 and record["nfe"]["partial"] > 0
    assert all(name.startswith("second_look.") for name in load_file(tmp_path / "whole" / "adapter.safetensors"))
    about = json.loads((tmp_path / "whole" / "adapter.json").read_text())
    assert about["head"] == {"module": "beyond.head", "width": 32}
    assert about["decoding"] == {"tau_m2t": -1.0, "tau_t2t": None, "tau_keep": 0.5}

    # a user's mistakes are one line
    call = caller(head, monkeypatch, capsys)
    new = [*run, "--out_dir", tmp_path / "new"]
    assert "--corruption mask" in call.fails(*new, "--corruption", "draft")
    assert "--n_rounds 2" in call.fails(*new, "--n_rounds", 2)
