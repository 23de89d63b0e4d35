"""Corruption, bundle and loss against their stated definitions. `pytest tests/test_corrupt.py`"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, V, approx, random_ids, tiny_config

from corrupt import NONE, Corruption, G, M, W, alpha_loss, corrupt, draw_bundle, three_term_loss
from lib.util import generator

B = 8


def streams(n, *key):
    return [generator("tests", *key, i) for i in range(n)]


def off_by_one(z, where):
    """A draft that is right on even ids and wrong on odd ones."""
    clean = random_ids(*z.shape)
    return torch.where(clean % 2 == 0, clean, (clean + 1) % MASK)[where]


def corrupted(kind, R=64, T=64, free=None, key="a", **rates):
    x = random_ids(R, T)
    free = torch.ones_like(x, dtype=torch.bool) if free is None else free
    z, k = corrupt(x, free, Corruption(kind, B, MASK, torch.arange(MASK), **rates), streams(R, key), off_by_one)
    return x, z, k


@pytest.mark.parametrize("kind", ["mask", "random", "draft"])
def test_m_w_g_partition_the_free_positions(kind):
    free = random_ids(64, 64, 9, 2).bool()
    x, z, k = corrupted(kind, free=free)
    assert torch.equal(z[~free], x[~free]) and (k[~free] == NONE).all()
    assert torch.equal(k == M, free & (z == MASK))
    assert torch.equal(k == W, free & (z != MASK) & (z != x))
    assert torch.equal(k == G, free & (z == x))
    assert ((k == W).any()) == (kind != "mask")


def test_mask_count_of_a_block():
    """Of a ratio ~ U(0, 1) it is uniform on 0..B; U ** 0.5 has the mean 2/3, and U ** 4 (8 masks of 8) 1/5."""
    _, _, k = corrupted("mask", R=2000)
    counts = (k == M).view(-1, B).sum(-1).bincount(minlength=B + 1).double()
    n, p = counts.sum(), 1 / (B + 1)
    assert ((counts / n - p).abs() < 4 * math.sqrt(p * (1 - p) / n)).all()

    _, _, k = corrupted("mask", R=2000, mask_power=0.5)
    masked = (k == M).view(-1, B).sum(-1).double()
    assert masked.mean() / B == approx(2 / 3, abs=4 * 0.25 / math.sqrt(n))
    assert (masked == B).double().mean() == approx(1 / 5, abs=4 * math.sqrt(0.2 * 0.8 / n))


def test_random_replaces_up_to_a_fifth_of_what_is_visible():
    """In the mean half of it; and a block with a high rate of its own has several, another one none."""
    rate = 0.2
    x, z, k = corrupted("random", R=2000)
    visible = int((k != M).sum())
    expected = rate / 2 * (1 - 1 / MASK)  # a draw that happens to equal the clean token leaves it clean
    assert int((k == W).sum()) / visible == approx(expected, abs=5 * math.sqrt(expected / visible))
    assert int(z[k == W].max()) == MASK - 1  # every ordinary token, and never a special one

    # of blocks without a mask the number of wrong tokens is U(0, rate)'s mixture of binomials: both that are wrong
    # of two tokens with probability rate ** 2 / 3, where tokens by themselves would have rate ** 2 / 4
    whole = (k == W).view(-1, B)[~(k == M).view(-1, B).any(-1)]
    both = (whole[:, :-1] & whole[:, 1:]).double().mean()
    assert both == approx(rate**2 / 3 * (1 - 1 / MASK) ** 2, abs=4 * rate**2 / 3 / math.sqrt(len(whole)) / rate)


def test_a_draft_fills_three_tenths_of_the_masks():
    x, z, k = corrupted("draft", R=2000)
    _, _, masks_alone = corrupted("mask", R=2000)
    masked = int((masks_alone == M).sum())
    assert int((k == M).sum()) / masked == approx(0.7, abs=4 * math.sqrt(0.21 / masked))
    drafted = (masks_alone == M) & (k != M)
    assert torch.equal(k[drafted] == W, x[drafted] % 2 == 1)  # wrong drafts are W, right ones join G
    assert (k[masks_alone != M] == G).all()  # what is visible stays


def test_ends_are_masked_from_a_uniform_place_on():
    _, _, k = corrupted("mask", R=2000, ends=1.0)
    masked = (k == M).view(-1, B)
    assert (masked[:, 1:] >= masked[:, :-1]).all()
    counts = masked.sum(-1).bincount(minlength=B + 1)[1:].double()
    assert ((counts / len(masked) - 1 / B).abs() < 4 * math.sqrt((1 - 1 / B) / B / len(masked))).all()


def test_bundle_size_is_uniform_and_its_members_are_masked():
    masked = torch.ones(3000, 64, dtype=torch.bool)
    masked[:, 1] = False
    bundle = draw_bundle(masked, 16, 3, 6, streams(3000, "bundle"))
    assert not (bundle & ~masked).any()
    sizes = bundle.view(-1, 16).sum(-1).bincount(minlength=7).double()
    n = sizes.sum()
    assert sizes[:3].sum() == 0 and ((sizes[3:] / n - 0.25).abs() < 4 * math.sqrt(0.25 * 0.75 / n)).all()
    # which ones: 4.5 of the 16 masks of a block on average, of 15 in the first
    share = bundle.double().mean(0)
    expected = torch.tensor([4.5 / 15, 4.5 / 16]).repeat_interleave(torch.tensor([16, 48]))
    expected[1] = 0
    assert ((share - expected).abs() <= 4.5 * (expected * (1 - expected) / 3000).sqrt()).all()

    # a block with few masks gives all of them
    masked[:] = False
    masked[:, [2, 11]] = True
    assert torch.equal(draw_bundle(masked, 8, 5, 9, streams(3000, "few")), masked)


def test_alpha_by_hand():
    """P = 1/2 and 1/4: at alpha 1 the loss is 1 - P, at 1/2 it is 2 (1 - sqrt(P)), at 0 the sum of cross-entropies."""
    ce = torch.tensor([2.0, 4.0]).log()
    assert float(alpha_loss(ce, 1.0)) == approx(1 / 2 + 3 / 4)
    assert float(alpha_loss(ce, 0.5)) == approx(2 * (1 - 0.5**0.5) + 2 * (1 - 0.25**0.5))
    assert float(alpha_loss(ce, 0.0)) == approx(3 * math.log(2)) == approx(float(alpha_loss(ce, 1e-6)), abs=1e-5)
    # the improbable is told from the impossible: 1 - P with P = e^-30 is 1, and alpha = 0 is 30
    assert float(alpha_loss(torch.tensor([30.0]), 1e-7)) == approx(30, abs=1e-3)

    # its gradient is cross-entropy's times P ** alpha
    for alpha in (0.0, 0.5, 1.0):
        ce = torch.tensor([2.0, 4.0]).log().requires_grad_()
        alpha_loss(ce, alpha).backward()
        assert ce.grad.tolist() == approx([0.5**alpha, 0.25**alpha])


def added(h, logits_a):
    """As Model.logits_b of states that are logits."""
    return h + logits_a.log_softmax(-1)


@pytest.mark.parametrize("alpha, adds", [(0.0, True), (0.5, False)])
def test_loss_by_hand(alpha, adds):
    """Blocks of two: a bundle of both, a bundle of one of two masks, then W and G: the loss of two bundles, and 0.3 and
    0.2 of cross-entropies. Of a Stage B that adds to Stage A's log-probabilities, beside a clean copy, which has no
    loss."""
    logits = torch.randn(1, 6, V, generator=generator("logits"))
    kind = torch.tensor([[M, M, M, M, W, G]], dtype=torch.uint8)
    fill = torch.tensor([[True, True, True, False, False, False]])
    target = torch.tensor([[1, 2, 3, 4, 5, 6]])
    stage_a = torch.randn(1, 12, V, generator=generator("stage a"))
    model = SimpleNamespace(logits=lambda h: h, logits_b=added, cfg=tiny_config(block_length=2))
    total, terms = three_term_loss(model, logits, target, kind, fill, alpha, stage_a if adds else None)
    log_p = logits.log_softmax(-1)
    if adds:
        log_p = (log_p + stage_a[:, :6]).log_softmax(-1)
    ce = F.cross_entropy(log_p[0], target[0], reduction="none")
    bundles = alpha_loss(torch.stack([ce[0] + ce[1], ce[2]]), alpha)
    torch.testing.assert_close(total, bundles + 0.3 * ce[4] + 0.2 * ce[5])
    for name, expected in (("m2t", ce[:3]), ("edit", ce[4:5]), ("clean", ce[5:])):
        assert terms[name].tolist() == approx([float(expected.sum()), len(expected)])


@pytest.mark.parametrize("adds", [False, True])
def test_chunked_loss_equals_whole_loss_with_gradients_and_keeps_no_logits(adds):
    """A pretended vocabulary makes chunks of 64 rows, whose logits the backward pass makes again."""
    results = []
    for pretended_vocab in (V, 2**20):
        h = torch.randn(4, 64, 16, generator=generator("h")).requires_grad_()
        w = torch.randn(16, V, generator=generator("w")).requires_grad_()
        stage_a = torch.randn(4, 64, 16, generator=generator("stage a")).requires_grad_() if adds else None
        kind = random_ids(4, 64, 3, 4).to(torch.uint8)
        rows, kept = [], []

        def logits(x, w=w, rows=rows):
            rows.append(len(x))
            return x @ w

        of_b = lambda x, logits_a, logits=logits: added(logits(x), logits_a)  # noqa: E731
        model = SimpleNamespace(logits=logits, logits_b=of_b, cfg=tiny_config(vocab_size=pretended_vocab))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            total, terms = three_term_loss(model, h, random_ids(4, 64), kind, kind == M, 0.0, stage_a)
        total.backward()
        results.append([total, *terms.values(), h.grad, w.grad] + ([stage_a.grad] if adds else []))
    torch.testing.assert_close(*results)
    assert max(rows) == 64 and not any(shape[-1] == V for shape in kept)  # of the last run
