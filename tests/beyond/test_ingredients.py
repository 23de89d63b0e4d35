"""Own blocks with one ingredient changed. `pytest tests/beyond/test_own_ablation.py`"""

import json
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from beyond.ablation import CHANGES, Ablation
from beyond.own_blocks import OwnBlocks
from common import caller, random_ids, tiny_model

import sample
import train
from beyond import ablation
from beyond.stage_b_only import StageBOnly
from data import generator
from sample import Decoding, generate

TOY = ["--data", "pairs", "--toy", "V=3", "m=4", "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]
D = Decoding(gen_length=19, tau_m2t=0.3, tau_t2t=None, max_post_steps=0)


def changed(change, std=0.3, tau_keep=0.5, **cfg):
    """A model with that change, its trained parts random."""
    model = tiny_model(n_rounds=1, eos_id=-1, **cfg)
    args = Namespace(change=change, width=24, tau_keep=tau_keep, lora_r=4, seed=0)
    Ablation.adapt(model, args)
    for name, p in model.adapter_state().items():
        p.data += std * torch.randn(p.shape, generator=generator(name))
    return model


def states(model, h, bundle):
    """What the block of OwnBlocks itself makes of h, everywhere that `bundle` says, (R, B, C)."""
    return h.masked_scatter(bundle[..., None], OwnBlocks.second_look(model, h, bundle))


H = F.rms_norm(torch.randn(5, 8, 64, generator=generator("h")), (64,))
BUNDLE = random_ids(5, 8, 3, 2).bool()


def test_every_position_changed_is_own_blocks_at_every_position():
    model = changed("marked", 0.05, n_last=2)
    everywhere = states(model, H, torch.ones_like(BUNDLE))
    # normed once more than OwnBlocks norms it
    torch.testing.assert_close(model.second_look(H, BUNDLE), everywhere[BUNDLE], atol=1e-4, rtol=1e-4)
    alone = OwnBlocks.second_look(model, H, BUNDLE)  # the second block sees what the first made of the others
    assert not torch.allclose(model.second_look(H, BUNDLE), alone, atol=1e-3)


def test_rounds_go_on_from_what_the_last_one_left():
    model, h = changed("rounds4", 0.05), H
    for _ in range(3):
        h = states(model, h, BUNDLE)
    torch.testing.assert_close(model.second_look(H, BUNDLE), OwnBlocks.second_look(model, h, BUNDLE))


def test_a_marker_is_added_at_the_bundle_alone():
    model = changed("marker", 0.05)
    moved = H + BUNDLE[..., None] * model.own.marker
    torch.testing.assert_close(model.second_look(H, BUNDLE), OwnBlocks.second_look(model, moved, BUNDLE))
    model.own.marker.data.zero_()
    torch.testing.assert_close(model.second_look(H, BUNDLE), OwnBlocks.second_look(model, H, BUNDLE))


def partial(model, tau=0.3):
    prompts = [random_ids(1, n, n)[0].tolist() for n in (5, 13)]
    return sum(out.nfe["partial"] for out in generate(model, prompts, replace(D, tau_m2t=tau)))


def test_what_a_partial_forward_is_counted_as():
    """The same tokens of the same weights: a whole block instead of the bundle, twice as often, singles too."""
    plain = partial(changed("suffixes", 0.0))  # adapters that change nothing
    whole, twice = (partial(changed(c, 0.0)) for c in ("marked", "rounds2"))
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


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_train_and_decode(change, tmp_path, monkeypatch, capsys):
    base, run = tmp_path / "base", tmp_path / "run"
    caller(train, monkeypatch, capsys)(*TOY, "--max_iters", 2, "--stage_a_only", "--out_dir", base)
    given = ["--init_from", base, "--n_last", 1, "--max_iters", 2, "--out_dir", run]
    caller(ablation, monkeypatch, capsys)(*TOY, *given, "--change", change)
    out = ["--ckpt", base, "--adapter", run, "--prompt_ids", "4,4,5", "--gen_length", 4, "--json", "--tau_m2t", -1]
    assert json.loads(caller(sample, monkeypatch, capsys)(*out))["nfe"]["partial"] > 0
