"""Corruption, bundle and loss against their stated definitions. `pytest tests/test_corrupt.py`"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, V, approx, command_line, random_ids

from corrupt import NONE, Corruption, G, M, W, corrupt, draw_bundle, loss_weights, three_term_loss
from lib.util import generator
from tools import gallery

B = 8


def streams(n, *key):
    return [generator("tests", *key, i) for i in range(n)]


def off_by_one(z, where):
    """A draft that is right on even ids and wrong on odd ones."""
    clean = random_ids(*z.shape)
    return torch.where(clean % 2 == 0, clean, (clean + 1) % MASK)[where]


def corrupted(kind, R=64, T=64, free=None, key="a"):
    x = random_ids(R, T)
    free = torch.ones_like(x, dtype=torch.bool) if free is None else free
    z, k = corrupt(x, free, Corruption(kind, B, MASK, MASK), streams(R, key), off_by_one)
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


def test_mask_count_of_a_block_is_uniform():
    """A ratio ~ U(0, 1) makes the number of masks in a block uniform on 0..B, each with probability 1 / (B + 1)."""
    _, _, k = corrupted("mask", R=2000, T=64)
    counts = (k == M).view(-1, B).sum(-1).bincount(minlength=B + 1).double()
    n, p = counts.sum(), 1 / (B + 1)
    assert ((counts / n - p).abs() < 4 * math.sqrt(p * (1 - p) / n)).all()


def test_random_replaces_a_tenth_of_what_is_visible():
    x, z, k = corrupted("random", R=2000)
    visible = int((k != M).sum())
    expected = 0.1 * (1 - 1 / MASK)  # a draw that happens to equal the clean token leaves it clean
    assert int((k == W).sum()) / visible == approx(expected, abs=4 * math.sqrt(expected / visible))
    assert int(z[k == W].max()) == MASK - 1  # every ordinary token, and never a special one


def test_a_draft_fills_three_tenths_of_the_masks():
    x, z, k = corrupted("draft", R=2000)
    _, _, masks_alone = corrupted("mask", R=2000)
    masked = int((masks_alone == M).sum())
    assert int((k == M).sum()) / masked == approx(0.7, abs=4 * math.sqrt(0.21 / masked))
    drafted = (masks_alone == M) & (k != M)
    assert torch.equal(k[drafted] == W, x[drafted] % 2 == 1)  # wrong drafts are W, right ones join G


def test_same_seed_same_bytes_and_rows_are_independent():
    _, z, _ = corrupted("random")
    assert torch.equal(z, corrupted("random")[1])
    assert not torch.equal(z, corrupted("random", key="b")[1])
    x = random_ids(64, 64)
    free = torch.ones(3, 64, dtype=torch.bool)
    some, _ = corrupt(x[5:8], free, Corruption("random", B, MASK, MASK), streams(64, "a")[5:8])
    assert torch.equal(some, z[5:8])


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


def test_a_block_with_few_masks_gives_all_of_them():
    masked = torch.zeros(50, 16, dtype=torch.bool)
    masked[:, [2, 11]] = True
    assert torch.equal(draw_bundle(masked, 8, 5, 9, streams(50, "few")), masked)


def test_loss_by_hand():
    """Four positions, one of each kind and an unselected mask: 1.0 ce_0 + 0.3 ce_1 + 0.2 ce_2 + 0 ce_3."""
    logits = torch.randn(1, 4, V, generator=generator("logits"))
    kind = torch.tensor([[M, W, G, M]], dtype=torch.uint8)
    fill = torch.tensor([[True, False, False, False]])
    target = torch.tensor([[1, 2, 3, 4]])
    model = SimpleNamespace(head=lambda h: h, cfg=SimpleNamespace(vocab_size=V))
    total, terms = three_term_loss(model, logits, target, kind, fill)
    ce = F.cross_entropy(logits[0], target[0], reduction="none")
    torch.testing.assert_close(total, 1.0 * ce[0] + 0.3 * ce[1] + 0.2 * ce[2])
    for name, expected in zip(("m2t", "edit", "clean"), ce[:3], strict=True):
        torch.testing.assert_close(terms[name], torch.stack([expected, torch.ones(())]))
    assert loss_weights(kind, fill).tolist() == [[1.0, approx(0.3), approx(0.2), 0.0]]


def test_chunked_loss_equals_whole_loss_with_gradients_and_keeps_no_logits():
    """A pretended vocabulary makes chunks of 64 rows, whose logits the backward pass makes again."""
    results = []
    for pretended_vocab in (V, 2**20):
        h = torch.randn(4, 64, 16, generator=generator("h")).requires_grad_()
        w = torch.randn(16, V, generator=generator("w")).requires_grad_()
        kind = random_ids(4, 64, 3, 4).to(torch.uint8)
        rows, kept = [], []

        def head(x, w=w, rows=rows):
            rows.append(len(x))
            return x @ w

        model = SimpleNamespace(head=head, cfg=SimpleNamespace(vocab_size=pretended_vocab))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            total, terms = three_term_loss(model, h, random_ids(4, 64), kind, kind == M)
        total.backward()
        results.append([total, *terms.values(), h.grad, w.grad])
    torch.testing.assert_close(*results)
    assert max(rows) == 64 and not any(shape[-1] == V for shape in kept)  # of the last run


def test_gallery_shows_each_corruption_with_its_weights(monkeypatch, capsys):
    code, out, _ = command_line(gallery, monkeypatch, capsys, "--text", "spam and eggs")
    words = ("mask:", "random:", "draft:", "loss in A", "loss in B", "bundle", "▒")
    assert code == 0 and all(word in out for word in words)
