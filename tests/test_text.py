"""What experiments/text.py counts, and its control. `pytest tests/test_text.py`"""

import torch
from common import approx, random_ids, tiny_model

from causal import CausalModel
from evaluate import bits_of_batch
from experiments.text import Untold, cost_of, cut, distinct
from lib.rows import Batch

# R rows, T positions


def test_distinct_by_hand():
    """1234, 2341, 3412, 4123, and 1234 again."""
    assert distinct(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4]])) == approx(4 / 5)
    assert distinct(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])) == approx(1 / 2)


def test_beginnings_and_endings_lie_side_by_side():
    text = torch.arange(2000)
    beginnings, endings = cut(text)
    assert beginnings.shape == (256, 56) and endings.shape == (256, 200)
    assert beginnings[0].tolist() == list(range(56)) and endings[-1, -1] == 1998
    assert (endings[:, 0] - beginnings[:, -1] == 1).all()


def test_bits_of_an_ending_are_those_of_its_bytes_alone():
    """The chain rule by hand: each byte of two blocks is read in a row of its own, with the bytes before it."""
    model = tiny_model(block_length=4)
    x = random_ids(2, 12)
    real = torch.ones_like(x, dtype=torch.bool)
    by_hand = 0.0
    for at in range(4, 12):
        corruptible = torch.zeros_like(real)
        corruptible[:, at // 4 * 4 : at // 4 * 4 + 4] = True
        bits = bits_of_batch(model, Batch(x, real, corruptible, torch.empty(0), []), "one at a time")
        by_hand += float(bits[:, at].sum())
    assert cost_of(model, x[:, :4], x[:, 4:], "one at a time") == approx(by_hand / 16)


def test_the_control_reads_no_token():
    """With other tokens its states are the same; those of causal Stage B change."""
    for kind, reads in ((CausalModel, True), (Untold, False)):
        model = tiny_model(stage_b="causal", n_rounds=1)
        model.__class__ = kind
        z = random_ids(1, 8)
        bundle = torch.ones_like(z, dtype=torch.bool)
        ctx = model.context(bundle)
        h = model.prefix(z, ctx)
        model.last_n(h, ctx)
        first, second = (model.coordinate(h, bundle, ctx, 1, random_ids(1, 8, seed=s)) for s in (1, 2))
        assert torch.equal(first, second) != reads
