"""Corruption, bundle and loss against their stated definitions. `pytest tests/test_corrupt.py`"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, V, approx, random_ids, tiny_config

import corrupt
from corrupt import NONE, Corruption, G, M, W, draw_bundle, three_term_loss
from lib.util import generator

B = 8


def off_by_one(z, where):
    """A draft that is right on even ids and wrong on odd ones."""
    clean = random_ids(*z.shape)
    return torch.where(clean % 2 == 0, clean, (clean + 1) % MASK)[where]


def corrupted(name, R=2000, corruptible=None, **rates):
    x = random_ids(R, 64)
    corruptible = torch.ones_like(x, dtype=torch.bool) if corruptible is None else corruptible
    draws = [generator("tests", r) for r in range(R)]
    how = Corruption(name, B, MASK, torch.arange(5, MASK), draws, off_by_one, **rates)
    z, k = corrupt.corrupt(x, corruptible, how)
    return x, z, k


# --- what the model is shown
@pytest.mark.parametrize("name", corrupt.CORRUPTIONS)
def test_m_w_g_partition_the_corruptible_positions(name):
    corruptible = random_ids(64, 64, 9, 2).bool()
    x, z, k = corrupted(name, 64, corruptible)
    assert torch.equal(z[~corruptible], x[~corruptible]) and (k[~corruptible] == NONE).all()
    assert torch.equal(k == M, corruptible & (z == MASK))
    assert torch.equal(k == W, corruptible & (z != MASK) & (z != x))
    assert torch.equal(k == G, corruptible & (z == x))
    assert ((k == W).any()) == (name != "mask")


def test_mask_count_of_a_block():
    """With a ratio ~ U(0, 1) the count is uniform on 0..B, to four standard deviations. U ** 0.5 has the mean 2/3, and
    with it all 8 positions are masked with the probability E[(U ** 0.5) ** 8] = 1/5."""
    _, _, k = corrupted("mask")
    counts = (k == M).view(-1, B).sum(-1).bincount(minlength=B + 1)
    p, n = 1 / (B + 1), counts.sum()
    assert ((counts / n - p).abs() < 4 * math.sqrt(p * (1 - p) / n)).all(), counts

    _, _, k = corrupted("mask", mask_power=0.5)
    masked = (k == M).view(-1, B).sum(-1).double()
    assert masked.mean() / B == approx(2 / 3, abs=4 * 0.25 / math.sqrt(len(masked)))
    assert (masked == B).double().mean() == approx(1 / 5, abs=4 * math.sqrt(0.2 * 0.8 / len(masked)))


def test_random_replaces_up_to_a_fifth_of_what_is_visible():
    """The mean is half of a fifth. Each block draws its own rate, so some have several wrong tokens and others none."""
    rate = 0.2
    x, z, k = corrupted("random")
    visible = int((k != M).sum())
    expected = rate / 2 * (1 - 1 / MASK)  # a draw that happens to equal the clean token leaves it clean
    assert int((k == W).sum()) / visible == approx(expected, abs=5 * math.sqrt(expected / visible))
    assert z[k == W].unique().tolist() == [*range(5, MASK)]  # the ordinary tokens

    # of blocks without a mask the number of wrong tokens is U(0, rate)'s mixture of binomials: both that are wrong
    # of two tokens with probability rate ** 2 / 3, where tokens by themselves would have rate ** 2 / 4
    whole = (k == W).view(-1, B)[~(k == M).view(-1, B).any(-1)]
    both = (whole[:, :-1] & whole[:, 1:]).double().mean()
    assert both == approx(rate**2 / 3 * (1 - 1 / MASK) ** 2, abs=4 * rate**2 / 3 / math.sqrt(len(whole)) / rate)


def test_drafts_by_hand(monkeypatch):
    """The rates of two blocks are .2 * .9 and .2 * .1, so visible tokens with a number below .18 and .02 are replaced.
    Stage A reads masks in their places, and writes 7 8 9 8. Right drafts are G, wrong ones W."""
    drawn = iter([torch.tensor([[0.9] * 4 + [0.1] * 4]), torch.tensor([[0.0, 0.17, 0.1, 0.19, 0.01, 0.03, 0.0, 0.0]])])
    monkeypatch.setattr(corrupt, "uniform", lambda draws, n: next(drawn))
    monkeypatch.setattr(corrupt, "of_blocks", lambda draws, T, B: next(drawn))
    clean = torch.tensor([[5, 6, 8, 5, 6, 7, 8, 9]])
    masked = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1]]).bool()
    seen = []
    how = Corruption("draft", 4, MASK, clean, [], lambda *args: seen.extend(args) or torch.tensor([7, 8, 9, 8]))

    z = corrupt.own_drafts(clean.masked_fill(masked, MASK), masked, ~masked, how)
    assert seen[0].tolist() == [[MASK, MASK, MASK, 5, MASK, 7, MASK, MASK]]
    assert z.tolist() == [[MASK, 7, 8, 5, 9, 7, 8, MASK]]
    assert corrupt.kinds(clean, z, clean > 0, MASK).tolist() == [[M, W, G, G, W, G, G, M]]


# --- the bundle
def test_a_bundle_by_hand(monkeypatch):
    """For s ~ U{2..5} u = .6 gives 4, u = .99 gives 5, and u = 0 gives 2. The masks with the smallest numbers are the
    bundle, whatever blocks they are in; of equal ones the leftmost. If a row has fewer masks, all are the bundle."""
    lots = torch.tensor([[0.5, 0.1, 0.4, 0.9, 0.2, 0.0], [0.5, 0.1, 0.4, 0.9, 0.2, 0.0], [0.3] * 6])
    drawn = iter([torch.tensor([[0.6], [0.99], [0.0]]), lots])
    monkeypatch.setattr(corrupt, "uniform", lambda draws, n: next(drawn))
    masked = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    bundle = draw_bundle(masked, 2, 5, [])
    assert bundle.int().tolist() == [[1, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]]


# --- the loss
def test_loss_by_hand():
    """Two of four masks are filled; then there are W and G. In Eq. 1 their cross-entropies have the weights 1, .3 and
    .2, and the other masks have none."""
    logits = torch.randn(1, 6, V, generator=generator("logits"))
    kind = torch.tensor([[M, M, M, M, W, G]], dtype=torch.uint8)
    fill = torch.tensor([[True, False, True, False, True, True]])  # fill is of masks alone
    target = torch.tensor([[1, 2, 3, 4, 5, 6]])
    model = SimpleNamespace(logits=lambda h: h, cfg=tiny_config())
    loss, ce = three_term_loss(model, logits, target, kind, fill)
    expected = F.cross_entropy(logits[0], target[0], reduction="none")
    torch.testing.assert_close(ce, expected[None] * torch.tensor([1, 0, 1, 0, 1, 1]))
    torch.testing.assert_close(loss, expected[0] + expected[2] + 0.3 * expected[4] + 0.2 * expected[5])


def test_chunked_loss_equals_whole_loss_with_gradients_and_keeps_no_logits():
    """A pretended vocabulary makes the chunks as small as 64 positions. The backward makes their logits again."""
    results = []
    for pretended_vocab in (V, 2**20):
        h = torch.randn(4, 64, 16, generator=generator("h")).requires_grad_()
        w = torch.randn(16, V, generator=generator("w")).requires_grad_()
        kind = random_ids(4, 64, 3, 4).to(torch.uint8)
        rows, kept = [], []

        def logits(x, w=w, rows=rows):
            rows.append(len(x))
            return x @ w

        model = SimpleNamespace(logits=logits, cfg=tiny_config(vocab_size=pretended_vocab))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            loss, ce = three_term_loss(model, h, random_ids(4, 64), kind, kind == M)
        loss.backward()
        results.append([loss, ce, h.grad, w.grad])
    torch.testing.assert_close(*results)
    assert max(rows) == 64 and not any(shape[-1] == V for shape in kept)  # of the last run
