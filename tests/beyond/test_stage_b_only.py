"""Adapters that act in Stage B alone. `pytest tests/beyond/test_stage_b_only.py`"""

from dataclasses import replace

import pytest
import torch
from common import MASK, random_ids, settings, tiny_model

from beyond import chain, stage_b_only
from beyond.stage_b_only import StageBOnly, stage_b_losses, stage_b_recipe
from checkpoint import load_model, save_adapter, save_model
from corrupt import M, three_term_loss
from lib.util import generator
from model import sequence_context
from sample import Decoding, generate, generate_one
from train import Batch


def with_lora(model):
    stage_b_only.adapt(model, 4, generator("lora"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1, generator=generator(name))
    return model


def context(model, ids):
    return sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)


def test_adapters_of_stage_b_leave_stage_a_bit_for_bit():
    model, ids = tiny_model(), random_ids(2, 24)
    ctx = context(model, ids)
    before = model(ids, ctx)
    h = model.prefix(ids, ctx)
    unadapted = model.coordinate(h, ids < 20, ctx, 2)
    with_lora(model)
    assert isinstance(model, StageBOnly)
    assert torch.equal(model(ids, ctx), before) and torch.equal(model.prefix(ids, ctx), h)
    adapted = model.coordinate(h, ids < 20, ctx, 2)
    assert (adapted - unadapted)[:, 16:].abs().amax(-1).min() > 0.1
    torch.testing.assert_close(adapted[:, :16], unadapted[:, :16])  # finished blocks before the last are unadapted


@pytest.mark.parametrize("n_rounds", [1, 2])
def test_cached_equals_the_specification(n_rounds):
    model = with_lora(tiny_model())
    d = Decoding(gen_length=29, tau_m2t=0.4, tau_t2t=0.5, max_post_steps=3, n_rounds=n_rounds)
    for n in (3, 8, 13):
        prompt = random_ids(1, n, 100)[0].tolist()
        cached = generate(model, [prompt], d, trace=True)[0]
        tokens, nfe, seen = generate_one(model, prompt, d)
        assert (cached.tokens, cached.nfe, [s["before"] for s in cached.steps]) == (tokens, nfe, seen)
    factorised = generate(model, [prompt], replace(d, n_rounds=0))[0]
    assert factorised.tokens == generate(tiny_model(), [prompt], replace(d, n_rounds=0))[0].tokens
    assert cached.tokens != factorised.tokens


def a_batch():
    x = random_ids(3, 24, 1)
    kind = random_ids(3, 24, 3, 4).to(torch.uint8)
    z = torch.where(kind == M, MASK, random_ids(3, 24, 2))
    return x, z, kind, (kind == M) & random_ids(3, 24, 4, 2).bool()


def losses(model, context_name):
    x, z, kind, bundle = a_batch()
    everywhere = torch.ones_like(x, dtype=torch.bool)
    args = settings(chain.build_parser(""), context=context_name)
    return stage_b_losses(model, Batch(x, everywhere, everywhere, MASK, []), z, kind, bundle, x, args)


def test_stage_b_is_trained_as_it_decodes():
    """With --context clean each block's marked states are those of decoding it after the finished blocks before it."""
    model = with_lora(tiny_model())
    x, z, kind, bundle = a_batch()
    loss, terms = losses(model, "clean")
    by_block = 0.0
    for start in (0, 8, 16):
        end = start + 8
        ids = torch.cat([x[:, :start], z[:, start:end]], dim=1)
        here = bundle[:, :end] & (torch.arange(end) >= start)
        h = model.coordinate(model.prefix(ids, context(model, ids)), here, context(model, ids), 2)
        block = slice(start, end)
        part, _ = three_term_loss(model, h[:, block], x[:, block], kind[:, block], bundle[:, block])
        by_block = by_block + part
    torch.testing.assert_close(loss, by_block, rtol=1e-4, atol=1e-3)
    assert not terms[0].any() and terms[1, 0, 1] == bundle.sum()


@pytest.mark.parametrize("context_name", ["corrupted", "clean"])
def test_only_stage_bs_adapters_and_markers_have_a_gradient(context_name):
    model = with_lora(tiny_model())
    losses(model, context_name)[0].backward()
    with_grad = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    lora = {f"layers.{i}.attn.{w}.lora_{a}" for i in (2, 3) for w in ("qkv", "proj") for a in "AB"}
    assert with_grad == lora | {"markers"}


def test_stage_a_is_measured_in_validation():
    base = tiny_model()
    x, z, kind, bundle = a_batch()
    with torch.no_grad():
        _, terms = losses(with_lora(tiny_model()), "corrupted")
        h = base.last_n(base.prefix(z, context(base, z)), context(base, z))
        _, terms_a = three_term_loss(base, h, x, kind, kind == M)
    torch.testing.assert_close(terms[0], terms_a)


def test_a_saved_adapter_names_what_loads_it(tmp_path):
    save_model(tiny_model(), tmp_path / "base")
    model = with_lora(load_model(tmp_path / "base", "cpu", torch.float32))
    settings = dict(base=str(tmp_path / "base"), lora_r=4, lora_alpha=8)
    save_adapter(model, tmp_path / "adapter", settings | stage_b_recipe(None, "").extension)
    again = load_model(tmp_path / "base", "cpu", torch.float32, tmp_path / "adapter")
    assert isinstance(again, StageBOnly)
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    ids = random_ids(2, 16)
    ctx = context(model, ids)
    h = model.prefix(ids, ctx)
    assert torch.equal(again.coordinate(h, ids < 20, ctx, 2), model.coordinate(h, ids < 20, ctx, 2))
