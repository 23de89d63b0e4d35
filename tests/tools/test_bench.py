"""The cache at toy size, and the released code by stand-ins. `pytest tests/tools/test_bench.py`"""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from common import caller, refused

from lib.config import PRESETS
from tools import bench

TINY = replace(PRESETS["tiny"], vocab_size=272, eos_id=256, mask_id=257, block_length=8)


@pytest.fixture
def small(monkeypatch):
    """Sizes at which a measurement takes a moment."""
    sizes = dict(GEOMETRIES=dict.fromkeys(bench.GEOMETRIES, TINY), OFFICIAL=replace(TINY, block_length=4))
    sizes |= dict(CONTEXTS=(0, 16, 32), LENGTHS=(16, 32), ROWS=3)
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)


def test_the_cache_against_none(small, monkeypatch, capsys):
    out = caller(bench, monkeypatch, capsys)()
    assert out.startswith("$ python -m tools.bench \n") and torch.__version__ in out
    for words in ("Decoding 3 at once", "all of 32 tokens (integrated)"):
        assert words in out


CONFIGURATION = """
class LLaDA2MoeConfig:
    def __init__(self, **fields):
        self.fields = fields
"""
MODELING = """
import torch
import convert_weights, sample
from checkpoint import new_model
from .configuration_llada2_moe import LLaDA2MoeConfig
from tools import bench

SHIFT = 0

class Layers(torch.nn.Module):
    def forward(self, ids, attention_mask):
        assert attention_mask.dtype == torch.float32

class LLaDA2MoeModelLM(torch.nn.Module):  # the official names and numbers of its tensors, and our decoder
    def __init__(self, config):
        super().__init__()
        self.cfg, self.model = bench.OFFICIAL, Layers()
        assert config.fields["hidden_size"] == self.cfg.n_embd

    def load_state_dict(self, state):
        self.ours = new_model(self.cfg, torch.Generator())
        own = self.ours.state_dict()
        for planned in sum(convert_weights.plan(self.cfg), []):
            flat = torch.cat([state[name].flatten() for name in planned.released])
            own[planned.name].copy_(flat.view(planned.shape))

    def generate(self, ids, gen_length, block_length, threshold, editing_threshold, eos_id, mask_id):
        self.model(ids, attention_mask=torch.ones(1, dtype=torch.bfloat16))  # masks are so, whatever the weights are
        d = sample.Decoding(gen_length=gen_length, tau_m2t=threshold, tau_t2t=None, n_rounds=0)
        return torch.tensor([sample.generate_one(self.ours, ids[0].tolist(), d)[0]]) + SHIFT
"""
FORK = """
    def generate_batch(self, prompts, **settings):
        return [self.generate(ids, **settings) for ids in prompts]
"""


def test_the_official_code_is_given_our_weights_and_must_write_our_tokens(small, tmp_path, monkeypatch, capsys):
    """Stand-ins for its two files, and for the fork's, take the released tensors and decode by generate_one; and then
    wrongly."""
    (tmp_path / "transformers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    folders = {"released": MODELING, "fork": MODELING + FORK, "shifted": MODELING.replace("SHIFT = 0", "SHIFT = 1")}
    for name, modeling in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "configuration_llada2_moe.py").write_text(CONFIGURATION)
        (tmp_path / name / "modeling_llada2_moe.py").write_text(modeling)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no generated code
    run = ["--official", tmp_path / "released", tmp_path / "fork", "--lengths", 16, 32, "--compile"]
    out = caller(bench, monkeypatch, capsys)(*run)
    released, _, forked = out.partition("the fork with a cache")
    for part in (released, forked):
        assert "1 x 16 tokens, all the same" in part and "1 x 32 tokens, all the same" in part
        assert part.count("      ours, compiled:") >= 2
    assert "3 x 16 tokens, all the same" in forked and "3 x" not in released
    assert "differ" in refused(bench, monkeypatch, capsys, "--official", tmp_path / "shifted", "--lengths", 16)
