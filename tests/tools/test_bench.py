"""The cache against none, at toy size. `pytest tests/tools/test_bench.py`"""

from dataclasses import replace

import torch
from common import caller

from checkpoint import PRESETS
from tools import bench

TINY = replace(PRESETS["tiny"], vocab_size=272, eos_id=256, mask_id=257, block_length=8)


def test_the_cache_against_none(monkeypatch, capsys):
    """At sizes at which a measurement takes a moment. The integral of a constant cost is tokens times it."""
    monkeypatch.setattr(bench, "CASES", ((TINY, 1), (TINY, 3)))
    monkeypatch.setattr(bench, "BEFORE", (0, 16, 32))
    monkeypatch.setattr(bench, "LENGTHS", (16, 32))
    monkeypatch.setattr(bench, "interleaved", lambda *sides, repeats: [0.5, 1.0])
    out = caller(bench, monkeypatch, capsys)()
    assert out.count("all of 32 tokens (sum of its steps): cached 16.00 s, uncached 32.00 s: 2.0x") == 2


def test_a_measured_step_is_a_step_of_decoding():
    """Half of the block is written, and one mask is, by Stage B; with the cache and without it."""
    model = bench.random_model(TINY)
    steps = [bench.one_step(engine(model, [bench.prompt(16)] * 2, 1), 2)() for engine in (bench.Cached, bench.Uncached)]
    for step in steps:
        assert (step.z == TINY.mask_id).sum(1).tolist() == [4, 4] and step.bundle.sum(1).tolist() == [1, 1]
        assert step.partial.tolist() == [1, 1]
        assert torch.equal(step.after, steps[0].after)
