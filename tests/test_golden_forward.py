"""The released forward pass to 1e-4, on the golden checkpoint in our layout. `pytest tests/test_golden_forward.py`"""

import json

import pytest
import torch
from common import GOLDEN
from safetensors.torch import load_file

from checkpoint import load_model
from model import block_causal_mask, rotary

EXPECTED = load_file(GOLDEN / "expected.safetensors")
META = json.loads((GOLDEN / "expected.json").read_text())["meta"]
MOE_LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def forward(golden):
    """The converted model, and what every module put out on the golden input, which it reads first."""
    block_length = META["block_length_of_forward"]
    model = load_model(golden, "cpu", torch.float32, block_length=block_length).eval()
    seen = {}

    def keep(name, tensor):
        if name not in seen:
            seen[name] = tensor

    modules = {"wte": model.wte, "norm_f": model.norm_f, **dict(enumerate(model.layers))}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
    for i in MOE_LAYERS:
        model.layers[i].mlp.register_forward_pre_hook(lambda _, args, i=i: keep(f"mlp {i}", args[0]))
    ids = EXPECTED["input_ids"]
    context = model.context(torch.ones_like(ids, dtype=torch.bool))
    with torch.no_grad():
        seen["logits"] = model(ids, context)
    return model, seen


def test_mask_is_the_released_one():
    mask = block_causal_mask(EXPECTED["input_ids"].shape[1], META["block_length_of_forward"])
    assert torch.equal(mask, EXPECTED["attention_mask_bool"])


def test_hidden_states_and_logits(forward):
    _, seen = forward
    close = dict(rtol=0, atol=1e-4)
    torch.testing.assert_close(seen["wte"], EXPECTED["embeddings"], rtol=0, atol=0)
    for i, hidden in enumerate(EXPECTED["hidden_after_layer"]):
        torch.testing.assert_close(seen[i], hidden, **close)
    torch.testing.assert_close(seen["norm_f"], EXPECTED["hidden_final_norm"], **close)
    torch.testing.assert_close(seen["logits"], EXPECTED["logits"], **close)


@pytest.mark.parametrize("layer", MOE_LAYERS)
def test_router(forward, layer):
    model, seen = forward
    x = seen[f"mlp {layer}"].flatten(0, 1)
    chosen, weights = model.layers[layer].mlp.route(x)
    want = EXPECTED[f"router.{layer}.topk_idx"].long().flatten(0, 1)
    order, want_order = chosen.argsort(-1), want.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), want.gather(-1, want_order))
    want_weights = EXPECTED[f"router.{layer}.topk_weight"].flatten(0, 1).gather(-1, want_order)
    torch.testing.assert_close(weights.gather(-1, order), want_weights, rtol=0, atol=1e-5)


def test_training_forward_on_noisy_and_clean(forward):
    model, _ = forward
    noisy, clean = EXPECTED["train.noisy_ids"], EXPECTED["train.clean_ids"]
    real = torch.ones_like(noisy, dtype=torch.bool)
    context = model.context(real, clean)
    with torch.no_grad():
        logits = model(noisy, context)[:, : noisy.shape[1]]
    torch.testing.assert_close(logits, EXPECTED["train.noisy_logits"], rtol=0, atol=1e-4)


def test_angles_are_float32_in_every_dtype(forward):
    model, _ = forward
    positions = torch.tensor([0, 1000, 8000])
    full = rotary(model.cfg, positions, torch.float32)
    low = rotary(model.cfg, positions, torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(low, full, strict=True))
