"""The released generate(), recorded: the same tokens, forwards and states. `pytest tests/test_golden_decode.py`"""

import json

import pytest
import torch
from common import GOLDEN, traced

from checkpoint import load_model
from sample import Decoding, generate_one

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

    # the specification
    tokens, nfe, seen = generate_one(model, case["prompt"], d)
    assert (seen, tokens) == (before, case["output"])
    assert nfe == dict(full=case["forwards"], partial=0, refresh=nfe["refresh"])

    # the decoder with a cache
    (out,), (steps,) = traced(model, [case["prompt"]], d)
    assert ([s["before"] for s in steps], [s["after"] for s in steps]) == (before, after)
    assert [s["start"] + a["block_length"] for s in steps] == ends
    assert (out.tokens, out.nfe) == (case["output"], nfe)
