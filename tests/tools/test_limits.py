"""Counts on paper against hand-worked numbers. `pytest tests/tools/test_limits.py`"""

from dataclasses import replace

import pytest
import torch
from common import command_line, refused

from beyond.joint_head import JointHead
from checkpoint import PRESETS
from model import Model
from tools import limits

TINY = PRESETS["tiny"]


@pytest.mark.parametrize(
    "cfg", [*PRESETS.values(), replace(TINY, tied=True, qkv_bias=True, proj_bias=True, n_dense=2, n_rounds=2)]
)
def test_parameters_are_those_of_the_model(cfg):
    with torch.device("meta"):
        model = Model(cfg)
    assert sum(limits.parameters(cfg).values()) == sum(p.numel() for p in model.parameters())


def test_bytes_by_hand():
    """tiny: 4 layers, C 64, 4 heads and 2 key/value heads of 16, dense 128, experts of 32, V 320."""
    assert limits.forward_bytes(TINY, tokens=8, context=24, experts=5) == {
        "embedding": 2 * 8 * 64,
        "attention": 2 * 4 * (64 * 128 + 64 * 64),
        "norms": 2 * (4 * (2 * 64 + 2 * 16) + 64),
        "dense": 2 * 3 * 64 * 128,
        "router": 2 * 3 * 8 * 64,
        "shared": 2 * 3 * 3 * 64 * 32,
        "experts": 2 * 3 * 5 * 3 * 64 * 32,
        "head": 2 * 320 * 64,
        "markers": 0,
        "cache": 2 * 2 * 4 * 2 * 16 * 24,
    }
    # n = 3 of the 4 layers, none of them dense, and no embedding; the head and the marker once
    layers = 3 * (64 * 128 + 64 * 64 + 2 * 64 + 2 * 16 + 8 * 64 + 6 * 3 * 64 * 32 + 2 * 2 * 16 * 24)
    assert limits.stage_b_bytes(TINY, 8, 24, 5) == 2 * (layers + 64 + 320 * 64 + 64)


def test_a_joint_head_is_as_large_as_it_is_and_reads_the_lm_head_again():
    model = Model(replace(TINY, n_last=2))
    model.__class__ = JointHead
    model.give_head(2, 24, 0.5, torch.Generator())
    count, read = limits.joint_head(TINY, 24, 2)
    assert count == sum(p.numel() for p in model.joint_head.parameters())
    assert read == 2 * (count + 320 * 64)


def test_distinct_experts():
    assert limits.distinct_experts(TINY, 1) == 2  # one token, its 2 active experts
    assert limits.distinct_experts(TINY, 2) == 3.5  # a second one repeats each with probability 2/8
    assert limits.distinct_experts(PRESETS["llada2.1-mini"], 32) == pytest.approx(163.31, abs=0.01)


def test_flops_by_hand():
    """One block of 32 tokens: 130,560 active matrix entries, 20,480 of LoRA, 32 x 32 pairs in attention."""
    linear, lora, attention, head = 8_355_840, 1_310_720, 1_048_576, 1_310_720
    flops = limits.step_flops(TINY, 32)
    assert flops["draft"] == linear + lora + attention + 0.15 * head
    assert flops["forward"] == 7 / 4 * (linear + lora + attention)  # one prefix layer, three layers twice
    assert flops["backward"] == 7 / 4 * (linear + 2 * lora + 2 * attention)
    assert flops["head"] == 6 * head and flops["recomputed"] == 0
    assert limits.step_flops(TINY, 32, checkpointing=True)["recomputed"] == flops["forward"]


def test_the_released_geometry_on_paper(monkeypatch, capsys):
    code, out, err = command_line(limits, monkeypatch, capsys)
    assert code == 0, err
    for words in ("(256, 1024, 2048)", "layers 2..19 as layer 1", "16,255,640,576 parameters", "163.3 of 256 experts",
                  "H200, 4800 GB/s: at least 4.34 ms", "Stage B: 3.82 GB, 1.22 x n/L"):  # fmt: skip
        assert words in out
    assert "not measured" not in out
    code, out, _ = command_line(limits, monkeypatch, capsys, "--preset", "tiny", "--bandwidth", 1, "--context", 0)
    assert code == 0 and "tiny" in out and "1 GB/s" in out and "H200" not in out


@pytest.mark.parametrize("argv", [("--bandwidth", 0), ("--peak_flops", "inf"), ("--context", -1), ("--preset", "huge")])
def test_refusals(argv, monkeypatch, capsys):
    assert argv[0] in refused(limits, monkeypatch, capsys, *argv)
