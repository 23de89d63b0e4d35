"""The released forward pass, to 1e-4. `pytest tests/test_golden_forward.py`"""

import json

import pytest
import torch
from common import GOLDEN
from safetensors.torch import load_file

from checkpoint import load_model
from model import rotary

EXPECTED = load_file(GOLDEN / "expected.safetensors")
META = json.loads((GOLDEN / "expected.json").read_text())["meta"]
CLOSE = dict(rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def model(golden):
    return load_model(golden, "cpu", torch.float32, block_length=META["block_length_of_forward"])


def by_expert(chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(N, A) each -> (N, E): the weight of every expert, 0 where it is not chosen."""
    return torch.zeros(len(chosen), 16).scatter(1, chosen, weights)


@torch.no_grad()
def test_hidden_states_routes_and_logits(model):
    ids = EXPECTED["input_ids"]
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    assert torch.equal(ctx.mask, EXPECTED["attention_mask_bool"])
    h = model.wte(ids)
    assert torch.equal(h, EXPECTED["embeddings"])
    for i, layer in enumerate(model.layers):
        if i > 0:
            x = layer.norm_2(h + layer.attn(layer.norm_1(h), ctx)).flatten(0, 1)
            expected = [EXPECTED[f"router.{i}.topk_{what}"].flatten(0, 1) for what in ("idx", "weight")]
            routes = by_expert(expected[0].long(), expected[1])
            torch.testing.assert_close(by_expert(*layer.mlp.route(x)), routes, rtol=0, atol=1e-5)
        h = layer(h, ctx)
        torch.testing.assert_close(h, EXPECTED["hidden_after_layer"][i], **CLOSE)
    torch.testing.assert_close(model.norm_f(h), EXPECTED["hidden_final_norm"], **CLOSE)
    torch.testing.assert_close(model(ids, ctx), EXPECTED["logits"], **CLOSE)


@torch.no_grad()
def test_training_forward_on_noisy_and_clean(model):
    noisy, clean = EXPECTED["train.noisy_ids"], EXPECTED["train.clean_ids"]
    ctx = model.read_clean(clean, torch.ones_like(noisy, dtype=torch.bool))
    logits = model(noisy, ctx)[:, : noisy.shape[1]]
    torch.testing.assert_close(logits, EXPECTED["train.noisy_logits"], **CLOSE)


def test_angles_are_float32_in_every_dtype(model):
    positions = torch.tensor([0, 1000, 8000])
    full = rotary(model.cfg, positions, torch.float32)
    low = rotary(model.cfg, positions, torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(low, full, strict=True))
