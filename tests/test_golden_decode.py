"""The released generate(), recorded: same tokens, same forwards, same state before every forward, by generate (cached)
and by its specification generate_one.

pytest tests/test_golden_decode.py
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint import load_model
from sample import Decoding, generate, generate_one

GOLDEN = Path(__file__).parent / "data" / "golden_a"
CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "ours"
    subprocess.run([sys.executable, "convert_weights.py", "--src", GOLDEN, "--out", folder], check=True)
    return folder


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_released_generate(case, ours):
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
    states = [b["states"] for b in case["blocks"]]  # of each block: before the first forward, and after each

    tokens, nfe, seen = generate_one(model, case["prompt"], d)
    assert tokens == case["output"]
    assert nfe["full"] == case["forwards"] and nfe["partial"] == 0
    assert seen == [state for block in states for state in block[:-1]]

    out = generate(model, [case["prompt"]], d, trace=True)[0]
    assert out.tokens == case["output"] and out.nfe == nfe
    blocks = {}
    for s in out.steps:
        blocks.setdefault(s["start"] + a["block_length"], [s["before"]]).append(s["after"])
    assert blocks == {b["end"]: b["states"] for b in case["blocks"]}
