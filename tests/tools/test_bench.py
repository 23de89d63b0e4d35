"""What the cache saves, at toy size. `pytest tests/tools/test_bench.py`"""

from dataclasses import replace

from common import caller

from config import PRESETS
from tools import bench


def test_ratios_by_hand(monkeypatch, capsys):
    """One text takes 0.4 seconds, 16 take 1.6 together, and one takes 4 if each forward reads the whole text."""
    tiny = replace(PRESETS["tiny"], vocab_size=272, eos_id=256, mask_id=257, block_length=8)
    monkeypatch.setattr(bench, "SIZES", {"tiny": tiny})
    monkeypatch.setattr(bench, "LENGTHS", (16,))

    def timed(*sides):
        one, many, whole = (side() for side in sides)
        assert len(one) == 1 and len(many) == 16
        assert one[0].tokens == many[0].tokens == whole[0]
        return [0.4, 1.6, 4.0]

    monkeypatch.setattr(bench, "interleaved", timed)
    out = caller(bench, monkeypatch, capsys)()
    assert out.splitlines()[-1].split() == ["tiny,", "16", "tokens", "25.0", "6.2", "250.0", "10.0", "40.0"]
