"""The released generate(), recorded: same tokens, same forwards, same state before every forward, cached and naive.

pytest tests/test_golden_decode.py
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint import load_model
from sample import Decoding, generate

GOLDEN = Path(__file__).parent / "data" / "golden_a"
CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "ours"
    subprocess.run([sys.executable, "convert_weights.py", "--src", GOLDEN, "--out", folder], check=True)
    return folder


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_released_generate(case, use_cache, ours):
    a = case["args"]
    d = Decoding(
        gen_length=a["gen_length"],
        tau_m2t=a["threshold"],
        tau_t2t=a["editing_threshold"],
        max_post_steps=a["max_post_steps"],
        num_to_transfer=a["num_to_transfer"],
        eos_early_stop=a["eos_early_stop"],
        n_rounds=0,
    )
    model = load_model(ours, "cpu", torch.float32, block_length=a["block_length"])
    out = generate(model, [case["prompt"]], d, use_cache=use_cache, trace=True)[0]
    assert out.tokens == case["output"]
    assert out.nfe["full"] == case["forwards"] and out.nfe["partial"] == 0
    blocks = {}
    for s in out.steps:
        blocks.setdefault(s["start"], []).append(s["before"])
        final = s["after"]
        end = s["start"] + len(final)
        recorded = next(b["states"] for b in case["blocks"] if b["end"] == end)
        assert recorded[len(blocks[s["start"]]) - 1] == s["before"]
        assert recorded[len(blocks[s["start"]])] == final
    assert [len(b) + 1 for b in blocks.values()] == [len(b["states"]) for b in case["blocks"]]
