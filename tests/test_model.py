"""The transformer: who sees whom, experts, LoRA, the split and Eq. 4. `pytest tests/test_model.py`"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import MASK, random_ids, random_lora, tiny_config, tiny_model

from layers import MoE
from lib.util import generator
from model import Context, Model, rotary

CLOSE = dict(rtol=1e-4, atol=1e-4)


# --- who sees whom
@pytest.mark.parametrize("block_length", [1, 4])
def test_a_window_of_two_blocks_by_hand(block_length):
    """A position sees its own block and the one before: of the row itself, or of the clean copy."""
    model, T = tiny_model(block_length=block_length, window=2 * block_length), 6 * block_length
    real = torch.ones(1, T, dtype=torch.bool)
    block = torch.arange(T) // block_length
    sees = [[a - b in (0, 1) for b in block.tolist()] for a in block.tolist()]
    assert model.context(real).mask.tolist() == sees
    own = [[a == b for b in block.tolist()] + [a - b == 1 for b in block.tolist()] for a in block.tolist()]
    assert model.read_clean(random_ids(1, T), real).mask.tolist() == own


# --- experts
def experts_loop(moe: MoE, x, chosen, weights):
    """The loop in MoE.experts' docstring: every choice of every token, one after the other."""
    rows = []
    for token, experts, shares in zip(x, chosen, weights, strict=True):
        row = torch.zeros_like(token)
        for expert, weight in zip(experts.tolist(), shares, strict=True):
            gate, up = (moe.gate_up[expert] @ token).chunk(2)
            row = row + weight * (moe.down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("n_tokens", [1, 50])
def test_grouped_experts_equal_the_loop_with_gradients(n_tokens):
    moe = tiny_model().layers[1].mlp
    results = []
    for run in (moe.experts, partial(experts_loop, moe)):
        moe.zero_grad()
        x = torch.randn(n_tokens, 64, generator=generator("x")).requires_grad_()
        y = run(x, *moe.route(x))
        (y * torch.randn(y.shape, generator=generator("dy"))).sum().backward()
        results.append([y, x.grad, moe.gate_up.grad.clone(), moe.down.grad.clone(), moe.router.grad.clone()])
    for grouped, loop in zip(*results, strict=True):
        torch.testing.assert_close(grouped, loop, rtol=1e-4, atol=1e-5)


def four_experts(router: list[float]) -> MoE:
    """Four experts in 2 groups, of which 1 is kept; 2 experts are chosen. Each expert reads one of 4 channels."""
    moe = MoE(tiny_config(n_embd=4, n_expert=4, n_active=2, n_group=2, topk_group=1, n_shared=0))
    for p in moe.parameters():
        p.data.fill_(0.1)
    moe.router.data = torch.diag(torch.tensor(router))
    return moe


def test_the_bias_of_an_expert_follows_how_often_it_is_chosen():
    """Of 4 experts, 0 and 1 are chosen three times each, in two passes with gradients. The mean is 1.5, so their biases
    go down by the rate, and the others go up. Nothing is counted without gradients, or if the router does not learn."""
    moe = four_experts([2.0, 2.0, -2.0, -2.0])
    moe(torch.ones(1, 2, 4))
    moe(torch.ones(1, 1, 4))
    with torch.no_grad():
        moe(torch.ones(1, 7, 4))
    assert moe.times_chosen.tolist() == [3, 3, 0, 0]
    moe.balance(0.25)
    moe.balance(0.25)  # nothing was chosen since
    moe.requires_grad_(False)
    moe(torch.ones(1, 1, 4))
    moe.balance(0.25)
    assert moe.expert_bias.tolist() == [-0.25, -0.25, 0.25, 0.25]
    # scores of zero are 0 / (0 + 1e-20), not 0 / 0
    assert four_experts([-1e9] * 4).route(torch.ones(1, 4))[1].tolist() == [[0, 0]]


# --- the split
def noisy_rows() -> tuple[torch.Tensor, ...]:
    """Three rows of three blocks: clean (3, 24); z with masks, wrong and right tokens, none in the prompt or the
    padding; bundle, some of the masks; real."""
    clean = random_ids(3, 24, 1)
    real = torch.arange(24) < torch.tensor([24, 16, 24])[:, None]
    corruptible = real & (torch.arange(24) >= torch.tensor([3, 0, 8])[:, None])
    kind = random_ids(3, 24, 2, 8)
    z = clean.masked_fill(corruptible & (kind < 5), MASK)
    z = torch.where(corruptible & (kind == 5), (clean + 1) % MASK, z)
    return clean, z, (z == MASK) & (kind < 4), real


def with_clean_copy(model: Model, z, clean, real):
    """Both halves of rows [corrupted ; clean] as one row of twice the length, as LLaDA2.x trains: its Context."""
    T = z.shape[1]
    block = torch.arange(T) // model.cfg.block_length
    same, earlier = block[:, None] == block, block[:, None] > block
    sees = torch.cat([torch.cat([same, earlier], 1), torch.cat([torch.zeros_like(same), same | earlier], 1)])
    sees = (sees & real.repeat(1, 2)[:, None]) | torch.eye(2 * T, dtype=torch.bool)
    cos, sin = rotary(model.cfg, torch.arange(T).repeat(2), torch.float32)
    return torch.cat([z, clean], dim=1), Context(cos, sin, sees[:, None])


@pytest.mark.parametrize("n_last, n_rounds", [(1, 1), (2, 2), (1, 3)])
@torch.no_grad()
def test_stage_b_is_eq_4(n_rounds, n_last):
    """K times h <- LastN(h + 1_S * marker), by hand: in rows, and beside a clean copy, which is not marked."""
    model = tiny_model(n_rounds=n_rounds, n_last=n_last)
    clean, z, bundle, real = noisy_rows()
    for copy in (None, clean):
        ids, whole = (z, model.context(real)) if copy is None else with_clean_copy(model, z, clean, real)
        prefix = h = model.prefix(ids, whole)
        for marker in model.markers:
            h = h.clone()
            for r, t in bundle.nonzero().tolist():
                h[r, t] += marker
            for layer in model.layers[4 - n_last :]:
                h = layer(h, whole)
        ctx = model.context(real) if copy is None else model.read_clean(copy, real)
        of_a = model.last_n(model.prefix(z, ctx), ctx)
        of_b = model.coordinate(model.prefix(z, ctx), bundle, z, ctx)
        torch.testing.assert_close(of_a, model.last_n(prefix, whole)[:, :24], **CLOSE)
        torch.testing.assert_close(of_b[real], h[:, :24][real], **CLOSE)

        assert (of_a - of_b).abs().amax(-1)[bundle].min() > 0.01


def test_lora_merged_equals_unmerged():
    """LoRA learns in every qkv and proj, and besides it only the markers learn. At first it changes nothing: B is zero,
    and A is uniform up to 1 / sqrt(n_in), as PEFT's is."""
    model, ids = tiny_model(), random_ids(2, 16)
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    base = model(ids, ctx)
    model.adapt(4, generator("lora"))
    assert torch.equal(model(ids, ctx), base)
    A = torch.stack([layer.attn.qkv.lora_A for layer in model.layers])
    assert 0.99 / 8 < A.abs().max() <= 1 / 8 and A.mean().abs() < 0.01

    random_lora(model)
    own = {f"layers.{i}.attn.{which}.lora_{x}" for i in range(4) for which in ("qkv", "proj") for x in "AB"}
    assert model.learned().keys() == own | {"markers"}
    adapted = model(ids, ctx)
    assert (adapted - base).abs().max() > 0.1
    for layer in model.layers:
        for linear in (layer.attn.qkv, layer.attn.proj):  # y = W x + (alpha / r) B A x
            linear.weight.data += 8.0 / 4 * linear.lora_B.data @ linear.lora_A.data
            linear.lora_A = linear.lora_B = None
    torch.testing.assert_close(model(ids, ctx), adapted, **CLOSE)
