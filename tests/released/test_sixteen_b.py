"""A random checkpoint of the released layout, what a forward of it reads, and how two models are compared.

pytest tests/released/test_sixteen_b.py        # CPU, seconds; the geometry is a tiny one here
"""

import json
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from common import ROOT, caller, tiny_config
from safetensors.torch import load_file

import checkpoint
from checkpoint import load_model
from model import sequence_context
from released import int8, int8_quality, sixteen_b

NAMES = ROOT / "assets" / "names"


@pytest.fixture
def run(monkeypatch, capsys):
    """The script, for a geometry of four layers of width 64 that reads bytes."""
    cfg = tiny_config(vocab_size=320, eos_id=256, mask_id=257, n_last=3, n_rounds=1, tokenizer="bpe")
    monkeypatch.setitem(sixteen_b.PRESETS, "llada2.1-mini", cfg)
    monkeypatch.setattr(sixteen_b, "POOL", 2**14)
    sixteen_b.pool.cache_clear()
    return caller(sixteen_b, monkeypatch, capsys)


def test_written_converted_and_measured(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sixteen_b, "bandwidth", lambda: 1e9)
    out = run("write", "--layers", 4, "--out", tmp_path / "released")
    assert "random" in out
    weights = {k: v for p in (tmp_path / "released").glob("*.safetensors") for k, v in load_file(p).items()}
    down = [weights[f"model.layers.2.mlp.experts.{e}.down_proj.weight"].float() for e in range(8)]
    assert not torch.equal(down[0], down[1])
    # of std 1 / sqrt(width of a row): 8 x 64 x 32 numbers, so within 1 % or so
    assert torch.cat(down).std() == pytest.approx(32**-0.5, rel=0.05)
    assert weights["model.norm.weight"].unique().tolist() == [1]

    int8.convert(tmp_path / "released", tmp_path / "int8")
    out = run("measure", "--ckpt", tmp_path / "int8", "--tokens", 9)
    assert "plain reads of memory: 1.0 GB/s" in out
    for stages in ("Stage A alone", "Stage A and Stage B"):
        assert f"{stages}: 9 tokens in" in out


def test_bytes_that_a_forward_reads(run, tmp_path):
    """Counted by hand: every layer's own tensors, the chosen experts, the head; Stage B the last three layers'."""
    run("write", "--layers", 4, "--out", tmp_path / "released")
    int8.convert(tmp_path / "released", tmp_path / "int8")
    model = load_model(tmp_path / "int8", "cpu", torch.float32)
    read = sixteen_b.Read(model)
    ids = torch.arange(8)[None]
    ctx = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)
    with torch.inference_mode():
        size, experts = read.of(lambda: model(ids, ctx))
    # int8 numbers, and 2 bytes a scale: qkv 128 x 64, proj 64 x 64; norms of 64, 64, 16, 16 in bfloat16
    attention = 128 * 64 + 64 * 64 + 2 * (128 + 64) + 2 * (64 + 64 + 16 + 16)
    dense = 2 * 128 * 64 + 64 * 128 + 2 * (2 * 128 + 64)
    shared = 2 * 32 * 64 + 64 * 32 + 2 * (2 * 32 + 64)
    router = 2 * 8 * 64 + 4 * 8
    one_expert = 3 * 32 * 64 + 2 * (2 * 32 + 64)
    head = 320 * 64 + 2 * 320
    assert size == 4 * attention + dense + 3 * (shared + router) + round(3 * experts) * one_expert + head
    assert 2 <= experts <= 8


def test_watch_ends_as_its_command_does(capsys):
    with pytest.raises(SystemExit) as end:
        sixteen_b.watch(Namespace(command=[sys.executable, "-c", "import time; time.sleep(0.3); raise SystemExit(3)"]))
    assert end.value.code == 3
    if sys.platform == "linux":
        assert "peak memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, says",
    [
        (["write"], "--out"),
        (["watch"], "after --"),
        (["measure"], "--ckpt"),
        (["write", "--layers", 1, "--out", "x"], "--layers"),
        (["measure", "--ckpt", "x", "--device", "cuda"], "--bandwidth"),
    ],
)
def test_wrong_flags(args, says, run):
    assert says in run.fails(*args)


# ---------------------------------------------------------------------------------------------------------------------
# what int8 changes


def test_a_model_is_equal_to_itself(tmp_path, monkeypatch, capsys):
    """Against the very floats that the int8 weights stand for nothing differs, and KL is rounding."""
    int8.convert(NAMES, tmp_path / "int8")
    small = load_model(tmp_path / "int8", "cpu", torch.float32)
    state = small.state_dict()
    plain = {k: v for k, v in state.items() if not k.endswith("_scale")}
    for name in [k for k in plain if f"{k}_scale" in state]:
        plain[name] = int8.dequantise(state[name], state[f"{name}_scale"])
    floats = tmp_path / "floats"
    floats.mkdir()
    for name in ("config.json", "tokenizer.json", "names.json"):
        (floats / name).write_bytes((NAMES / name).read_bytes())
    checkpoint.save_tensors(floats / "model.safetensors", plain)
    config = json.loads((NAMES / "config.json").read_text())
    config["fingerprint"] = checkpoint.fingerprint(NAMES)  # so that its joint head fits
    (floats / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(int8_quality, "DTYPES", {"fp32": torch.float32})
    compare = caller(int8_quality, monkeypatch, capsys)
    for adapter in ([], ["--adapter", NAMES / "joint"]):
        out = compare("--ckpt", floats, "--int8", tmp_path / "int8", "--prompts", 4, "--gen_length", 8, *adapter)
        rows = [line.split(" fp32 ")[1].split() for line in out.splitlines() if " fp32 " in line]
        assert len(rows) == 5
        for answers, tokens, kl, best, positions, exist, exist_int8 in rows:
            assert (answers, tokens) == ("1.000", "1.000") and exist == exist_int8
            assert float(kl) < 1e-6 and (best == "1.0000" or positions == "0")


def test_equal_tokens():
    assert int8_quality.equal_tokens([1, 2, 3, 4], [1, 9, 3, 4]) == 0.75
    assert int8_quality.equal_tokens([1, 2], [1, 2, 3, 4]) == 0.5  # what is missing differs
    assert int8_quality.equal_tokens([], []) == 0.0


def test_divergence_by_hand():
    """KL of (1/2, 1/2) from (1/4, 3/4) is log(2 / sqrt(3)); both are best at another token."""

    class Two:
        cfg = replace(tiny_config(), block_length=2, mask_id=0)
        compute_dtype = torch.float32

        def __init__(self, *p):
            self.logits = torch.tensor(p).log()

        def prefix(self, ids, ctx):
            return torch.zeros(*ids.shape, 1)

        def last_n(self, h, ctx):
            return h

        def head(self, h):
            return self.logits.expand(*h.shape[:-1], 2)

    state = int8_quality.State(ids=[5, 0], start=0, bundle=[1])
    kl, best, count = int8_quality.divergence(Two(0.5, 0.5), Two(0.25, 0.75), [state], joint=False)
    assert kl == pytest.approx(0.5 * torch.tensor(4 / 3).log().item(), rel=1e-5)  # = log(2 / sqrt(3))
    assert (best, count) == (0.0, 1)


def test_recorded_runs(monkeypatch, capsys, tmp_path):
    int8.convert(ROOT / "tests" / "data" / "golden_a", tmp_path / "int8")
    monkeypatch.setattr(int8_quality, "DTYPES", {"fp32": torch.float32})
    compare = caller(int8_quality, monkeypatch, capsys)
    out = compare("--golden", ROOT / "tests" / "data" / "golden_a", "--int8", tmp_path / "int8")
    record = json.loads(out.splitlines()[-1])
    assert record["runs"] == 27 and 0 <= record["equal"] <= 27
    assert "not both" in compare.fails("--int8", tmp_path / "int8")
