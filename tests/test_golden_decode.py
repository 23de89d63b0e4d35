"""The released generate(), recorded: same tokens, same forwards, same state before every forward, by generate (cached)
and by its specification generate_one.

pytest tests/test_golden_decode.py
"""

import json
from pathlib import Path

import pytest
import torch

import convert_weights
from checkpoint import load_model
from sample import Decoding, generate, generate_one

GOLDEN = Path(__file__).parent / "data" / "golden_a"
CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]


def first_difference(ours: list, theirs: list, names: tuple[str, str] = ("ours", "recorded")) -> str | None:
    """Where two decodes part first, in words, or None where they are equal. Both are of one of these kinds:

    tokens   [id, id, ...]
    states   [tokens before the first forward, after it, after the next, ...]
    blocks   [states of the first block, of the second, ...]
    """
    if ours == theirs:
        return None

    # the items before the first that differs are equal; there may be no more on one side
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    depth = max(depth_of(ours), depth_of(theirs))
    kind = {1: "tokens", 2: "states", 3: "blocks"}[depth]
    if same == min(len(ours), len(theirs)):
        return f"{names[0]} has {len(ours)} {kind}, {names[1]} {len(theirs)}; the first {same} are equal"

    if kind == "tokens":
        return f"token {same}: {names[0]} {ours[same]}, {names[1]} {theirs[same]}"
    if kind == "blocks":
        return f"block {same}, " + first_difference(ours[same], theirs[same], names)
    if same == 0:
        return f"state 0, before any forward: {names[0]} {ours[0]}, {names[1]} {theirs[0]}"

    # states: what did this step write, on either side, into the state that was the same for both?
    before = ours[same - 1]
    places = [i for i, pair in enumerate(zip(ours[same], theirs[same], strict=True)) if pair[0] != pair[1]]
    lines = [f"step {same}: the two differ at position {', '.join(map(str, places))}", f"  before: {before}"]
    for name, after in zip(names, (ours[same], theirs[same]), strict=True):
        wrote = [f"{after[i]} at {i}" for i in range(len(before)) if after[i] != before[i]]
        lines.append(f"  {name} wrote: {', '.join(wrote) or 'nothing'}")
    return "\n".join(lines)


def depth_of(nested: list) -> int:
    """1 of a list of numbers, 2 of a list of lists, and so on; an empty list is a list of numbers."""
    inner = [depth_of(item) for item in nested if isinstance(item, list)]
    return 1 + max(inner, default=0)


def assert_same(ours: list, theirs: list, name: str = "ours", other: str = "recorded") -> None:
    """Fails with the first difference alone, instead of two long lists."""
    difference = first_difference(ours, theirs, (name, other))
    if difference is not None:
        pytest.fail(difference, pytrace=False)


def in_blocks(states: list[list[int]], forwards: list[int]) -> list[list[list[int]]]:
    """The states before every forward, cut where blocks of so many forwards begin; the last takes all that is left."""
    blocks = []
    for count in forwards[:-1]:
        blocks.append(states[:count])
        states = states[count:]
    return [*blocks, states]


def test_the_first_difference_by_hand():
    a, b, c, d = [9, 9, 9], [9, 5, 9], [9, 5, 7], [4, 5, 7]
    assert first_difference([[a, b], [a, c]], [[a, b], [a, c]]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == "token 1: ours 2, recorded 4"
    assert first_difference([1, 2], [1]) == "ours has 2 tokens, recorded 1; the first 1 are equal"
    assert first_difference([], [[a], [a, b]]) == "ours has 0 blocks, recorded 2; the first 0 are equal"
    assert first_difference([[a, b], [a]], [[a, b], [a, b]], ("x", "y")) == (
        "block 1, x has 1 states, y 2; the first 1 are equal"
    )
    assert first_difference([b, d], [a, d]) == "state 0, before any forward: ours [9, 5, 9], recorded [9, 9, 9]"
    assert first_difference([[a], [a, b, c, d]], [[a], [a, b, d, d]]) == (
        "block 1, step 2: the two differ at position 0\n"
        "  before: [9, 5, 9]\n"
        "  ours wrote: 7 at 2\n"
        "  recorded wrote: 4 at 0, 7 at 2"
    )
    assert "recorded wrote: nothing" in first_difference([a, b], [a, a])
    assert in_blocks([a, b, c, d], [1, 1]) == [[a], [b, c, d]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "ours"
    convert_weights.convert(GOLDEN, folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_released_generate(case, folder):
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
    model = load_model(folder, "cpu", torch.float32, block_length=a["block_length"])

    # of each block: the state before the first forward, and after each
    recorded = [block["states"] for block in case["blocks"]]
    forwards = [len(states) - 1 for states in recorded]

    # the specification: it tells the state before every forward
    tokens, nfe, seen = generate_one(model, case["prompt"], d)
    assert_same(in_blocks(seen, forwards), [states[:-1] for states in recorded], "generate_one")
    assert_same(tokens, case["output"], "generate_one")
    assert nfe["full"] == case["forwards"] and nfe["partial"] == 0

    # the cached decoder: its steps tell the state before and after every forward
    out = generate(model, [case["prompt"]], d, trace=True)[0]
    blocks = {}
    for s in out.steps:
        end = s["start"] + a["block_length"]
        blocks.setdefault(end, [s["before"]]).append(s["after"])
    assert list(blocks) == [block["end"] for block in case["blocks"]]
    assert_same(list(blocks.values()), recorded, "generate")
    assert_same(out.tokens, case["output"], "generate")
    assert out.nfe == nfe
