"""The head: parallel looks against writing one by one, what it refuses, learns. `pytest tests/beyond/test_head.py`"""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, caller, coherent, random_ids, tiny_config, tiny_model
from runs import TOY, a_base, resumes
from safetensors.torch import load_file
from test_chain import a_batch, flags

import toy
import train
from beyond import head
from beyond.head import Head, add_head, head_step, load_head, teach
from cache import Uncached
from checkpoint import load_model
from lib.util import Mistake, generator
from model import Context, rotary
from sample import Decoding, Step, candidates, denoise, generate, generate_one
from train import clean_tokens

D = Decoding(gen_length=21, tau_t2t=None, n_rounds=0, holes=True)


def with_head(std=0.3, **overrides):
    model = tiny_model(n_rounds=1, **overrides)
    for name, p in add_head(model, width=24).named_parameters():
        p.data = std * torch.randn(p.shape, generator=generator(name)) + (1.0 if p.dim() == 1 else 0.0)
    return model


# --- decoding
def next_logits(model, states, tokens, i):
    """The head's logits at position i of one block, after the tokens before it: nothing behind i is read."""
    before = torch.cat([torch.zeros(1, states.shape[-1]), model.wte(torch.tensor(tokens[:i], dtype=torch.long))])
    x = F.rms_norm(states[: i + 1], states.shape[-1:]) + model.head.show(before)
    ctx = Context(*rotary(model.cfg, torch.arange(i + 1), torch.float32), mask=None)
    stage_a = model.logits(states[i])
    stage_a[MASK] = float("-inf")
    return stage_a.log_softmax(-1) + model.logits(model.head.block(x[None], ctx)[0, i])


def one_by_one(engine, z, given, u, d, tau_keep):
    """The same step row by row and token by token, with no drafts; what it costs is not counted."""
    model = engine.model
    _, states = engine.stage_a(z)
    logits = model.logits(states)
    logits[..., MASK] = float("-inf")
    token_a, conf_a = candidates(logits, u[:, 0], d)
    after = z.clone()
    for r, row in enumerate(z.tolist()):
        places = [i for i, token in enumerate(row) if token == MASK]
        if not places:
            continue
        if any(token != MASK for token in row[places[0] :]):  # a hole: Stage A's surest
            first = max(places, key=lambda i: float(conf_a[r, i]))
            after[r, first] = token_a[r, first]
            continue
        together = 1.0
        for i in places:
            token, p = candidates(next_logits(model, states[r], row, i), u[r, 1, i], d)
            row[i] = int(token)
            together *= float(p)
            if together > tau_keep:
                after[r, i] = row[i]
        if after[r, places[0]] == MASK:
            after[r, places[0]] = token_a[r, places[0]]
    none = torch.zeros_like(z, dtype=torch.bool)
    return Step(z, after, none, none, token_a, conf_a, token_a, conf_a, torch.zeros(len(z)))


PROMPTS = [random_ids(1, n, n)[0].tolist() for n in (3, 8)]
HOLES = [[5, MASK, 7, MASK, MASK, 9, 3, MASK, 4], [MASK, 7, 7, 3, MASK, 20, MASK]]


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (1.0, 0.8)])
@pytest.mark.parametrize("tau_keep", [0.0, 0.02, 1.0])
def test_parallel_looks_are_writing_one_by_one(temperature, top_p, tau_keep):
    """In blocks that a prompt begins, in whole ones, and in rows with holes."""
    model = with_head()
    d = replace(D, temperature=temperature, top_p=top_p)
    looks = []

    def on_step(rows, step):
        looks.extend(step.partial.tolist())

    ours = generate(model, PROMPTS + HOLES, d, 2, partial(head_step, tau_keep=tau_keep), on_step)
    slow = generate(model, PROMPTS + HOLES, d, 2, partial(one_by_one, tau_keep=tau_keep))
    assert [(o.tokens, o.prompt, o.nfe["full"]) for o in ours] == [(o.tokens, o.prompt, o.nfe["full"]) for o in slow]
    assert min(looks) == 0  # at holes it stands aside
    if tau_keep == 0:
        assert max(looks) > 2  # drafts were wrong
    if tau_keep == 1:
        assert max(looks) == 1  # refused at once


def test_a_row_alone_is_the_specification_and_the_same_in_company():
    model = with_head()
    for tau_keep in (0.0, 0.02):
        step = partial(head_step, tau_keep=tau_keep)
        together = generate(model, PROMPTS + HOLES, D, step=step)
        for prompt, out in zip(PROMPTS + HOLES, together, strict=True):
            assert generate_one(model, prompt, D, step)[:2] == (out.tokens, out.nfe)
    drawn = replace(D, temperature=1.0)
    first = [generate(model, [*PROMPTS, *HOLES][:n], drawn, seed=1, step=step)[0].tokens for n in (1, 4)]
    assert first[0] == first[1]
    assert model.partial_cost == 1 / 4  # a look is one of four layers


class ByHand(Head):
    """Two to one after even tokens, three to one after odd ones, for the token that is one higher."""

    def forward(self, model, states, tokens, asked):
        before = F.pad(tokens[:, :-1], (1, 0))
        favourite = F.one_hot((before + 1) % 4, 6).float()
        odds = torch.where(before % 2 == 0, 2.0, 3.0)
        return (favourite * odds.log()[..., None])[asked]


def stepped(tau_keep, z=(5, 5, 5, 5)):
    """Four tokens, an eos that is never written, and the mask. Stage A likes 2 at its first place, and nothing else;
    its states are its logits."""
    z = torch.tensor([z])
    cfg = tiny_config(vocab_size=6, mask_id=5, eos_id=4, block_length=4)
    logits = torch.zeros(1, 4, 6)
    logits[..., 4] = float("-inf")
    logits[0, 0, 2] = 1e-3
    model = SimpleNamespace(cfg=cfg, head=ByHand(cfg, 8), logits=lambda states: states)
    engine = SimpleNamespace(model=model, stage_a=lambda z: (None, logits))
    return head_step(engine, z, z < 0, torch.zeros(1, 2, 4), D, tau_keep)


def test_what_it_refuses_and_how_often_it_looks_by_hand():
    """0 is followed by 1 (2/5), 1 by 2 (3/6), 2 by 3 (2/5), 3 by 0 (3/6): .4, .2, .08, .04 together.

    Drafts 2 0 0 0. The first look finds 1, and 3 1 1 behind the drafts; the second 2 behind 1, and so on: the last
    place is final with the fourth. What is refused needs no look, nor does what is behind it.
    """
    for tau_keep, after, looks in (
        (0.0, [1, 2, 3, 0], 4),
        (0.06, [1, 2, 3, 5], None),
        (0.15, [1, 2, 5, 5], None),
        (0.3, [1, 5, 5, 5], 2),  # with the second token it falls below
        (0.45, [2, 5, 5, 5], 1),  # not sure of its own first token: Stage A's is written
    ):
        step = stepped(tau_keep)
        assert step.after.tolist() == [after] and not step.edited.any()
        assert step.bundle.tolist() == [[token != 5 for token in after]]
        assert looks in (None, step.partial.item())
    expected = torch.tensor([[0.4, 0.5, 0.4, 0.5]])
    torch.testing.assert_close(stepped(0.0).conf, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(stepped(0.45).conf[0, 0], torch.tensor(0.25), rtol=0, atol=1e-3)
    assert stepped(0.0, (5, 5, 5, 1)).partial.tolist() == [0.0]  # a hole: Stage A alone


# --- training
def test_the_loss_is_the_cross_entropy_of_every_mask_after_the_tokens_before_it():
    model = with_head()
    x = random_ids(6, 24)
    shown = []

    def target(model, batch, z, masked):
        shown.extend([z, masked])
        return clean_tokens(model, batch, z, masked)

    loss, terms = teach(model, a_batch(x), flags(), target)
    z, masked = shown
    ce = []
    for row, start in [(r, s) for r in range(6) for s in (0, 8, 16)]:
        block = slice(start, start + 8)
        n_masked = int(masked[row, block].sum())
        assert 1 <= n_masked <= 8 and masked[row, block].tolist() == [i >= 8 - n_masked for i in range(8)]
        engine = Uncached(model, [x[row, :start].tolist()], 0)
        states = engine.stage_a(z[row : row + 1, block])[1][0]
        wanted = x[row, block].tolist()
        for i in range(8 - n_masked, 8):
            ce.append(-next_logits(model, states, wanted, i).log_softmax(-1)[wanted[i]])
    torch.testing.assert_close(loss, torch.stack(ce).sum(), rtol=1e-4, atol=1e-3)
    assert terms["head"][1] == len(ce) > 30
    loss.backward()
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None} == {"head"}
    assert all(name.startswith("head.") for name in model.adapter_state())


def test_on_a_toy_it_writes_whole_phrases_at_once(tmp_path, monkeypatch, capsys):
    """Stage A alone writes none. The base has not learned to read in blocks of one: it reads in its own."""
    size = ["--data", "modes", "--toy", "n_ctx=2", "--batch_size", 32, "--device", "cpu"]
    base = ["--stage_a_only", "--corruption", "mask", "--max_iters", 160, "--learning_rate", 4e-3]
    caller(train, monkeypatch, capsys)(*size, *base, "--out_dir", tmp_path / "base")
    learn = ["--init_from", tmp_path / "base", "--read_in", "blocks", "--max_iters", 40, "--width", 64]
    caller(head, monkeypatch, capsys)("train", *size, *learn, "--out_dir", tmp_path / "head")
    model = load_head(tmp_path / "head", "cpu", torch.float32)
    task = toy.make("modes", n_ctx=2)
    contexts = torch.arange(2)
    d = Decoding(gen_length=task.m, tau_m2t=-1.0, tau_t2t=None, n_rounds=0)
    shares = []
    for step in (denoise, partial(head_step, tau_keep=0.0)):
        answers = torch.tensor([o.tokens for o in generate(model, task.prompt(contexts).tolist(), d, step=step)])
        shares.append(coherent(task, contexts, answers).float().mean())
    assert shares == [0.0, 1.0]


# --- its folder, and its commands
def test_it_trains_resumes_and_decodes_from_its_folder_alone(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--init_from", a_base(tmp_path, monkeypatch, capsys), "--width", 32, "--beam", 2]
    resumes(head, ["train"], run, tmp_path, monkeypatch, capsys)
    folder = tmp_path / "whole"
    given = ["--ckpt", folder, "--prompt_ids", "4,4,5", "--gen_length", 5]
    out = caller(head, monkeypatch, capsys)("sample", *given, "--tau_keep", 0)
    assert "looks x 0.25 + " in out
    assert all(name.startswith("head.") for name in load_file(folder / "adapter.safetensors"))
    about = json.loads((folder / "adapter.json").read_text())
    assert about["read_by"] == "python -m beyond.head sample --ckpt" and about["width"] == 32

    # a user's mistakes are one line
    fails = caller(head, monkeypatch, capsys).fails
    new = [*run, "--out_dir", tmp_path / "new"]
    assert "--context clean" in fails("train", *new, "--context", "corrupted")
    assert "--init_from DIR" in fails("train", *new, "--init_from", "scratch")
    assert "train, sample;" in fails()
    assert "holds no head" in fails("sample", "--ckpt", tmp_path / "base", "--prompt_ids", "4")

    # other commands say which one reads it
    with pytest.raises(Mistake, match="it is read by `python -m beyond.head sample --ckpt`"):
        load_model(folder, "cpu", torch.float32)
