"""Counts on paper against hand-worked numbers, the sections at toy size, one host synchronisation a step.

pytest tests/test_bench.py
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import EOS, MASK, command_line, refused, tiny_config, tiny_model

import bench
import limits
import sample
from checkpoint import save_model
from model import PRESETS, Model
from sample import Decoding, generate

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


@pytest.fixture
def small(monkeypatch):
    cfg = replace(TINY, vocab_size=272, eos_id=256, mask_id=257, block_length=8)
    sizes = dict(text=cfg, deep=cfg, wide=cfg, lengths=(16, 32), contexts=(0, 16, 32), whole=16, batch=(1, 3))
    sizes |= dict(batch_tokens=8, rows=2, seq_len=32, loss_positions=256, moe=cfg, moe_tokens=(4, 32), repeats=1)
    monkeypatch.setattr(bench, "S", SimpleNamespace(**vars(bench.S) | sizes | dict(compile=False)))


SAYS = {
    "decode": ["all of 32 tokens (integrated)", "check: text, 16 tokens really decoded"],
    "batch": ["3 rows:"],
    "stageb": ["full forward"],
    "train": ["(L + n) / L = 1.750", "fp32 checkpointing", "fp32 adapters marked"],
    "moe": ["32 tokens: forward"],
    "limits": ["16,255,640,576 parameters", "163.3 of 256 experts", "H200, 4800 GB/s", "not measured"],
}


@pytest.mark.parametrize("section", SAYS)
def test_each_section_runs(section, small, monkeypatch, capsys):
    monkeypatch.setattr(bench, "peaks", lambda jobs, device: [10**6] * len(jobs))
    code, out, err = command_line(bench, monkeypatch, capsys, "--only", section)
    assert code == 0, err
    assert out.startswith(f"$ python bench.py --only {section}\n") and torch.__version__ in out
    assert all(words in out for words in SAYS[section]), out


def test_memory_of_the_loss_is_below_that_of_all_logits(small):
    """256 positions of 157,184 logits are 161 MB; log-probabilities and gradients are as much again, each."""
    jobs = [(bench.loss_step, (bench.S.loss, 256, which, "cpu")) for which in ("all logits", "branch 1")]
    whole, chunked = bench.peaks(jobs, torch.device("cpu"))
    assert whole > 3 * 161e6 and chunked < 0.6 * whole


def test_a_checkpoint_beside_its_floor(tmp_path, small, monkeypatch, capsys):
    save_model(tiny_model(), tmp_path)
    code, out, err = command_line(bench, monkeypatch, capsys, "--ckpt", tmp_path, "--bandwidth", 10)
    assert code == 0 and "eager" in out and "x the floor" in out, err
    code, out, err = command_line(bench, monkeypatch, capsys, "--ckpt", tmp_path)
    assert code == 0 and "eager" in out and "x the floor" not in out, err


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--only", "speed"], "speed"),
        (["--ckpt", "out", "--only", "moe"], "--only"),
        (["--bandwidth", 0], "--bandwidth"),
        (["--context", -1], "--context"),
    ],
)
def test_refusals(argv, word, monkeypatch, capsys):
    assert word in refused(bench, monkeypatch, capsys, *argv)


class Stop(Exception):
    pass


@pytest.mark.parametrize("n_rounds", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_host_synchronisation_a_step(n_rounds, temperature, monkeypatch):
    """On the meta device nothing has a value: whatever asks for one (item, bool, nonzero, a copy to the host) raises.
    The one .tolist() that decides whether to go on is answered by hand: no block closes, masks are left."""
    with torch.device("meta"):
        model = Model(tiny_config()).to(torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    steps, asked = [], []

    def counted_step(*args):
        steps.append(1)
        return step(*args)

    def answer(flags):
        asked.append(tuple(flags.shape))
        if len(asked) == 5:
            raise Stop
        return [[False] * 3, [True] * 3, [True] * 3, [False] * 3]

    step = sample.step
    monkeypatch.setattr(sample, "step", counted_step)
    monkeypatch.setattr(torch.Tensor, "tolist", answer)
    d = Decoding(gen_length=16, n_rounds=n_rounds, temperature=temperature)
    with pytest.raises(Stop):
        generate(model, [[1], [2, 3], [EOS, MASK, 4]], d)
    assert asked == [(4, 3)] * 5 and len(steps) == 5


def test_meta_refuses_every_way_of_asking():
    """What the test above rests on."""
    t = torch.zeros(3, device="meta")
    asks = (lambda: t[0].item(), lambda: bool(t[0] > 0), lambda: t.nonzero(), lambda: t[t > 0], lambda: t.cpu())
    for ask in (*asks, lambda: t.tolist(), lambda: t[0].to("cpu"), lambda: int(t[0])):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask()
