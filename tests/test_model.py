"""The transformer: who sees whom, experts, LoRA, the split. `pytest tests/test_model.py`"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import approx, random_ids, random_lora, tiny_config, tiny_model

from checkpoint import check_config
from lib.util import Mistake, generator
from model import Linear, MoE, block_causal_mask, doubled_mask


def context(ids, model, clean=None):
    return model.context(torch.ones_like(ids, dtype=torch.bool), clean)


def test_the_masks_by_hand():
    """Two blocks of two; and two blocks of one beside their clean copy, n0 n1 c0 c1: n1 sees c0, but not its own c1."""
    assert block_causal_mask(4, 2).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert doubled_mask(2, 1).int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_padding_is_not_attended_to():
    model, ids = tiny_model(), random_ids(2, 24)
    real = torch.arange(24) < torch.tensor([[13], [24]])
    padded = model(ids, model.context(real))
    refilled = model(ids.masked_fill(~real, 3), model.context(real))
    torch.testing.assert_close(padded[real], refilled[real], rtol=1e-4, atol=1e-4)
    short = ids[:1, :13]
    torch.testing.assert_close(padded[:1, :13], model(short, context(short, model)), rtol=1e-4, atol=1e-4)


def test_rows_that_are_read_one_by_one_are_rows_of_blocks_of_one():
    """Beside a row of the model's own blocks, with padding, and beside clean copies."""
    model, ids, clean = tiny_model(), random_ids(2, 24), random_ids(2, 24, 1)
    single = tiny_model(block_length=1)
    real = torch.arange(24) < torch.tensor([[24], [17]])
    for copy in (None, clean):
        both = model(ids, model.context(real, copy, torch.tensor([True, False])))
        for row, of in ((0, single), (1, model)):
            one = slice(row, row + 1)
            alone = of(ids[one], of.context(real[one], None if copy is None else copy[one]))
            torch.testing.assert_close(both[one][:, :24], alone[:, :24], rtol=1e-4, atol=1e-4)


def experts_loop(moe: MoE, x, chosen, weights):
    """What MoE.experts says that it computes: every choice of every token, one after the other."""
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
    """In 2 groups, of which 1 is kept; 2 experts are chosen. Each reads one of 4 channels."""
    moe = MoE(tiny_config(n_embd=4, n_expert=4, n_active=2, n_group=2, topk_group=1))
    for p in moe.parameters():
        p.data.fill_(0.1)
    moe.router.data = torch.diag(torch.tensor(router))
    return moe


def route(scores: list[float], bias: list[float]) -> tuple[list[int], list[float]]:
    """The experts that are chosen, in order, and their weights."""
    moe = four_experts(torch.logit(torch.tensor(scores)).tolist())
    moe.expert_bias.copy_(torch.tensor(bias))
    chosen, weights = moe.route(torch.ones(1, 4))
    order = chosen[0].argsort()
    return chosen[0][order].tolist(), weights[0][order].tolist()


def test_router_by_hand():
    # groups score 0.9 + 0.5 = 1.4 and 0.75 + 0.75 = 1.5: the second is kept although expert 0 is the best
    assert route([0.9, 0.5, 0.75, 0.75], [0, 0, 0, 0]) == ([2, 3], approx([1.25, 1.25]))
    # the bias moves the choice, the weights stay unbiased: 2.5 x 0.9 / 1.4
    assert route([0.9, 0.5, 0.75, 0.75], [0, 0.2, 0, 0]) == ([0, 1], approx([2.25 / 1.4, 1.25 / 1.4]))
    # biased 0.8, -0.8 | -0.7, -0.7: a group masked to 0 would win against -0.8
    assert route([0.8, 0.2, 0.5, 0.5], [0, -1, -1.2, -1.2]) == ([0, 1], approx([2.0, 0.5]))
    # 0 / (0 + 1e-20), not 0 / 0
    assert route([0, 0, 0, 0], [0, 0, 0, 0])[1] == [0, 0]


def test_the_bias_of_an_expert_follows_how_often_it_is_chosen():
    """Of 4 experts 0 and 1 are chosen thrice each, in two passes with gradients: mean 1.5, so they sink by a rate, the
    others rise. A pass without gradients, or a router that does not learn, counts nothing."""
    moe = four_experts([2.0, 2.0, -2.0, -2.0])
    moe(torch.ones(1, 2, 4))
    moe(torch.ones(1, 1, 4))
    with torch.no_grad():
        moe(torch.ones(1, 7, 4))
    assert moe.used.tolist() == [3, 3, 0, 0]
    moe.balance(0.25)
    assert moe.expert_bias.tolist() == [-0.25, -0.25, 0.25, 0.25]
    moe.balance(0.25)  # nothing was chosen since
    moe.requires_grad_(False)
    moe(torch.ones(1, 1, 4))
    moe.balance(0.25)
    assert moe.expert_bias.tolist() == [-0.25, -0.25, 0.25, 0.25]


def test_stage_b_without_marker_is_stage_a():
    model, ids = tiny_model(), random_ids(2, 16)
    ctx, bundle = context(ids, model), random_ids(2, 16, 5, 2).bool()
    h = model.prefix(ids, ctx)
    stage_a = model.last_n(h, ctx)
    assert not torch.equal(stage_a, model.coordinate(h, bundle, ctx, 1))
    assert torch.equal(stage_a, model.coordinate(h, torch.zeros_like(bundle), ctx, 1))
    model.markers.data.zero_()
    assert torch.equal(stage_a, model.coordinate(h, bundle, ctx, 1))
    model.adapt("shared", 4, generator("lora"))  # B is zero
    assert torch.equal(stage_a, model.coordinate(model.prefix(ids, ctx), bundle, ctx, 1))

    # A is uniform up to 1 / sqrt(n_in), as PEFT's is
    A = torch.stack([layer.attn.qkv.lora_A for layer in model.layers])
    assert 0.99 / 8 < A.abs().max() <= 1 / 8 and A.mean().abs() < 0.01


def test_lora_merged_equals_unmerged():
    model, ids = tiny_model(), random_ids(2, 16)
    base = model(ids, context(ids, model))
    random_lora(model)
    adapted = model(ids, context(ids, model))
    assert (adapted - base).abs().max() > 0.1
    for layer in model.layers:
        for linear in (layer.attn.qkv, layer.attn.proj):  # y = W x + (alpha / r) B A x
            linear.weight.data += 8.0 / 4 * linear.lora_B.data @ linear.lora_A.data
            linear.lora_A = linear.lora_B = None
    torch.testing.assert_close(model(ids, context(ids, model)), adapted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage_b", ["lora", "copy"])
def test_what_is_stage_bs_alone_leaves_stage_a_the_base(stage_b):
    """It lies in the last n layers, and acts on rows but not on a clean copy behind them, whose keys and values are
    Stage A's, bit for bit."""
    model, ids = tiny_model(), random_ids(2, 16)
    ctx, bundle = context(ids, model, ids), torch.zeros(2, 16, dtype=torch.bool)
    h = model.prefix(ids, ctx)
    base = model.last_n(h, ctx)
    keys = model.read_before(h, ctx, 2).cache.kv
    random_lora(model, stage_b)

    # of LoRA its matrices in the last two layers learn, of a copy all that it has
    own = {f"layers_b.{i}.attn.{which}.lora_{x}" for i in (0, 1) for which in ("qkv", "proj") for x in "AB"}
    if stage_b == "copy":
        own = {f"layers_b.{name}" for name, _ in model.layers[2:].named_parameters()}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == model.learned().keys() == own | {"markers"}
    assert torch.equal(model.last_n(h, ctx), base)
    kept = model.read_before(h, ctx, 2).cache.kv
    assert kept.keys() == keys.keys() == {(layer, i) for layer in (2, 3) for i in (0, 1)}
    assert all(torch.equal(a, b) for at in keys for a, b in zip(kept[at], keys[at], strict=True))
    assert (model.coordinate(h, bundle, ctx, 1) - base[:, :16]).abs().amax(-1).min() > 0

    # without a mark, and with layers that are Stage A's, rows beside their copy are Stage A
    own, model.layers_b = model.layers_b, None
    torch.testing.assert_close(model.coordinate(h, bundle, ctx, 1), base[:, :16], rtol=1e-4, atol=1e-4)

    # nothing of it is computed in Stage A, whatever else a reader puts on these layers, as LoRA on every Linear
    model.layers_b = own
    for linear in own.modules():
        if isinstance(linear, Linear) and linear.lora_A is None:
            linear.add_lora(4, generator("more"))
            linear.lora_B.data.fill_(torch.inf)
    for name, p in model.learned().items():
        if "proj.lora_B" in name or "proj.weight" in name:
            p.data.fill_(torch.inf)
    assert torch.equal(model.last_n(h, ctx), base) and model(ids, ctx).isfinite().all()
    assert not model.coordinate(h, bundle, ctx, 1).isfinite().all()


def test_a_copy_adds_to_what_stage_a_says():
    """Any other Stage B answers by itself. By hand: e^0 = 1 and 3 beside Stage A's 1/4 and 3/4 are 1 : 9."""
    for stage_b in ("shared", "lora", "copy"):
        model = tiny_model()
        model.adapt(stage_b, 4, generator("lora"))
        model.logits = lambda h: h
        ours, base = torch.tensor([1.0, 3.0]).log(), torch.tensor([2.0, 6.0]).log()
        found = model.logits_b(ours, base).softmax(-1).tolist()
        assert found == approx([0.1, 0.9] if stage_b == "copy" else [0.25, 0.75])


@pytest.mark.parametrize("stage_b", ["shared", "copy"])
def test_layers_that_are_computed_again_in_the_backward_have_the_same_gradients(stage_b):
    """Beside a clean copy, whose keys Stage B keeps, in two rounds."""
    model, ids = tiny_model(causal=True), random_ids(2, 16)
    random_lora(model, stage_b)
    bundle = random_ids(2, 16, 5, 2).bool()
    results = []
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        model.zero_grad()
        ctx = context(ids, model, ids.flip(1))
        h = model.prefix(ids, ctx)
        states = model.coordinate(h, bundle, ctx, 2, ids)
        logits_a = model.logits(model.last_n(h, ctx)[:, :16])
        log_p = model.logits_b(states, logits_a).log_softmax(-1)
        (log_p[..., 0].sum() + logits_a.sum()).backward()
        results.append({name: p.grad for name, p in model.learned().items()})
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert all(grad.abs().max() > 0 for grad in results[0].values())


def test_impossible_geometry_is_refused():
    for words, field in (
        ("n_last is 1..4", dict(n_last=9)), ("sizes", dict(n_kv_head=0)), ("rotary_dim", dict(rotary_dim=17)),
        ("in twos", dict(n_group=8)), ("topk_group", dict(topk_group=5)), ("n_active", dict(n_active=5)),
        ("n_rounds", dict(n_rounds=0)), ("block_length", dict(block_length=4097)), ("vocabulary", dict(mask_id=40)),
        ("0 or above", dict(mask_id=-1)), ("above 0", dict(norm_eps=float("nan"))),
    ):  # fmt: skip
        with pytest.raises(Mistake, match=words):
            check_config(tiny_config(**field))
