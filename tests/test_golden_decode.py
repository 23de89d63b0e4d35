"""The released generate(), recorded: the same tokens, forwards and states. `pytest tests/test_golden_decode.py`"""

import json

import pytest
import torch
from common import GOLDEN, Steps, assert_same

from checkpoint import load_model
from sample import Decoding, generate, generate_one

CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_released_generate(case, golden):
    a = case["args"]
    model = load_model(golden, "cpu", torch.float32, block_length=a["block_length"])
    same = {name: a[name] for name in ("gen_length", "max_post_steps", "num_to_transfer", "eos_early_stop")}
    d = Decoding(tau_m2t=a["threshold"], tau_t2t=a["editing_threshold"], n_rounds=0, **same)

    # a block's states: before the first forward, and after each
    blocks = case["blocks"]
    before = [z for block in blocks for z in block["states"][:-1]]
    after = [z for block in blocks for z in block["states"][1:]]
    ends = [block["end"] for block in blocks for _ in block["states"][1:]]

    # the specification: it tells the state before every forward
    tokens, nfe, seen = generate_one(model, case["prompt"], d)
    assert_same(seen, before, "generate_one")
    assert_same(tokens, case["output"], "generate_one")
    assert nfe["full"] == case["forwards"] and nfe["partial"] == 0

    # the cached decoder: its steps tell the state before and after every forward
    steps = Steps(1)
    out = generate(model, [case["prompt"]], d, on_step=steps.add)[0]
    (taken,) = steps.of_row
    assert_same([s["before"] for s in taken], before, "generate")
    assert_same([s["after"] for s in taken], after, "generate")
    assert [s["start"] + a["block_length"] for s in taken] == ends
    assert_same(out.tokens, case["output"], "generate")
    assert out.nfe == nfe
