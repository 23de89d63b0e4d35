"""The joint head with one ingredient changed. `pytest tests/beyond/test_ingredients.py`"""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, caller, random_ids, settings, tiny_model

import sample
import train
from beyond import ingredients
from beyond.ingredients import CHANGES
from beyond.joint_head import JointHead
from beyond.stage_b_only import StageBOnly
from corrupt import M
from data import generator
from sample import Decoding, generate

TOY = ["--data", "pairs", "--toy", "V=3", "m=4", "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]
D = Decoding(gen_length=19, tau_m2t=0.3, tau_t2t=None, max_post_steps=0)


def flags(change, **values):
    return settings(ingredients.build_parser(""), change=change, width=24, lora_r=4, **values)


def changed(change, std=0.3, tau_keep=0.5, head_layers=1):
    """A model with that change, its trained parts random."""
    model = tiny_model(n_rounds=1, eos_id=-1)
    ingredients.adapt(model, flags(change, tau_keep=tau_keep, head_layers=head_layers))
    for name, p in model.adapter_state().items():
        p.data += std * torch.randn(p.shape, generator=generator(name))
    return model


def states(model, h, bundle):
    """What the joint head itself makes of h, everywhere that `bundle` says, (R, B, C)."""
    return h.masked_scatter(bundle[..., None], JointHead.second_look(model, h, bundle))


H = F.rms_norm(torch.randn(5, 8, 64, generator=generator("h")), (64,))
BUNDLE = random_ids(5, 8, 3, 2).bool()


def test_everywhere_is_the_head_at_every_position():
    model = changed("everywhere", 0.05, head_layers=2)
    everywhere = states(model, H, torch.ones_like(BUNDLE))
    torch.testing.assert_close(model.second_look(H, BUNDLE), everywhere[BUNDLE])
    alone = JointHead.second_look(model, H, BUNDLE)  # the second layer sees what the first made of the others
    assert not torch.allclose(model.second_look(H, BUNDLE), alone, atol=1e-3)


def test_rounds_go_on_from_what_the_last_one_left():
    model, h = changed("rounds4", 0.05), H
    for _ in range(3):
        h = states(model, h, BUNDLE)
    torch.testing.assert_close(model.second_look(H, BUNDLE), JointHead.second_look(model, h, BUNDLE))


def test_a_marker_is_added_at_the_bundle_alone():
    model = changed("marker", 0.05)
    moved = H + BUNDLE[..., None] * model.joint_head.marker
    torch.testing.assert_close(model.second_look(H, BUNDLE), JointHead.second_look(model, moved, BUNDLE))
    model.joint_head.marker.data.zero_()
    torch.testing.assert_close(model.second_look(H, BUNDLE), JointHead.second_look(model, H, BUNDLE))


def partial(model, tau=0.3):
    prompts = [random_ids(1, n, n)[0].tolist() for n in (5, 13)]
    return sum(out.nfe["partial"] for out in generate(model, prompts, replace(D, tau_m2t=tau)))


def test_what_a_partial_forward_is_counted_as():
    """The same tokens of the same weights: a whole block instead of the bundle, twice as often, singles too."""
    plain = partial(changed("suffixes", 0.0))  # adapters that change nothing
    whole, twice = (partial(changed(c, 0.0)) for c in ("everywhere", "rounds2"))
    assert twice == pytest.approx(2 * plain) and whole == int(whole) and whole > plain
    assert partial(changed("suffixes"), 1.0) == 0
    assert partial(changed("singles", 0.0), 1.0) == pytest.approx(2 * 19 / 8)  # each token once, an eighth of a block


def test_the_layers_again_refuse_and_leave_singles_alone():
    prompt = random_ids(1, 5)[0].tolist()
    base = tiny_model(n_rounds=1, eos_id=-1)
    one = generate(base, [prompt], replace(D, tau_m2t=1.0, n_rounds=0))[0]
    for tau in (1.0, -1.0):  # bundles of one are Stage A's; and nothing but the surest of a bundle passes a gate of 1
        again = changed("own", 0.3 if tau == 1.0 else 0.0, tau_keep=1.0)
        again.markers.data.zero_()
        assert generate(again, [prompt], replace(D, tau_m2t=tau))[0].tokens == one.tokens
    again, paper = changed("own", tau_keep=0.0), changed("own")
    paper.__class__ = StageBOnly
    d = replace(D, gen_length=11, tau_m2t=-1.0)  # bundles of two and more are written as the paper writes them
    assert generate(again, [prompt], d)[0].tokens == generate(paper, [prompt], d)[0].tokens


def a_batch(seed=0):
    everywhere = torch.ones(32, 16, dtype=torch.bool)
    draws = [generator("b", seed, i) for i in range(32)]
    return train.Batch(random_ids(32, 16), everywhere, everywhere, MASK, draws)


def test_what_each_change_trains(monkeypatch):
    """Where the masks are, and how large a bundle is at least."""
    asked = {}
    draw_bundles = ingredients.bundle_as_decoded
    for change in ("singles", "suffixes", "own", "marker"):

        def kept(finished, z, masked, batch, args, change=change):
            bundle = draw_bundles(finished, z, masked, batch, args)
            asked[change] = masked.view(-1, 8), bundle.view(-1, 8).sum(-1)
            return bundle

        for module in (ingredients, ingredients.joint_head):
            monkeypatch.setattr(module, "bundle_as_decoded", kept)
        args = flags(change, s_min=1, s_max=2)
        model = changed(change)
        _, terms = CHANGES[change].step(model, a_batch(), args)
        size = asked[change][1]
        assert (size == 1).any() and (size == 2).any()
        if change != "singles":
            size = size[size > 1]
        assert int(terms[1, 0, 1]) == int(size.sum())
    assert torch.equal(asked["singles"][0], asked["own"][0]) and torch.equal(asked["own"][0], asked["marker"][0])
    _, kind = train.corrupt_batch(model, a_batch(), args)
    assert torch.equal(asked["suffixes"][0], (kind == M).view(-1, 8))
    assert not torch.equal(asked["suffixes"][0], asked["marker"][0])


@pytest.fixture
def base(tmp_path, monkeypatch, capsys):
    caller(train, monkeypatch, capsys)(*TOY, "--max_iters", 2, "--stage_a_only", "--out_dir", tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_train_and_decode(change, base, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    given = ["--init_from", base, "--max_iters", 2, "--out_dir", run, "--stop_at", 1]
    call = caller(ingredients, monkeypatch, capsys)
    call(*TOY, *given, "--change", change)
    call("--init_from", "resume", "--out_dir", run)
    out = ["--ckpt", base, "--adapter", run, "--prompt_ids", "4,4,5", "--gen_length", 4, "--json", "--tau_m2t", -1]
    assert json.loads(caller(sample, monkeypatch, capsys)(*out))["nfe"]["partial"] > 0


def test_mistakes_are_one_line(base, tmp_path, monkeypatch, capsys):
    call = caller(ingredients, monkeypatch, capsys)
    run = [*TOY, "--init_from", base, "--out_dir", tmp_path / "run", "--max_iters", 1]
    assert "--change" in call.fails(*run)
    assert "--corruption mask" in call.fails(*run, "--change", "own", "--corruption", "draft")
    call(*run, "--change", "own")
    saved = json.loads((tmp_path / "run" / "adapter.json").read_text())
    for key, value in (("change", None), ("change", "more"), ("tau_keep", "high"), ("tau_keep", 2)):
        (tmp_path / "run" / "adapter.json").write_text(json.dumps(saved | {key: value}))
        given = ["--ckpt", base, "--adapter", tmp_path / "run", "--prompt_ids", "4,4,5"]
        assert key in caller(sample, monkeypatch, capsys).fails(*given)
