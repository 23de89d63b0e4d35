"""A small random model with confident, varied predictions, and a command line that runs in this process."""

import math
import runpy
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import new_model
from lib.config import PRESETS, Config
from lib.toy import Toy
from lib.util import generator
from model import Model

ROOT = Path(__file__).resolve().parent.parent
V, MASK, EOS = 40, 38, 39


def tiny_config(**overrides) -> Config:
    base = dict(vocab_size=V, block_length=8, mask_id=MASK, eos_id=EOS, n_last=2, n_rounds=2)
    return replace(PRESETS["tiny"], **base | overrides)


def tiny_model(seed: int = 0, std: float = 0.25, **overrides) -> Model:
    """Every parameter random, norms, router bias and markers included: nothing is hidden by a zero or a one."""
    model = new_model(tiny_config(**overrides), generator("tests", seed))
    g = generator("tests", "weights", seed)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * std + (1.0 if p.dim() == 1 else 0.0))
    for b in model.buffers():
        b.copy_(torch.randn(b.shape, generator=g) * std)
    return model


def settings(parser, **values) -> Namespace:
    """What the parser makes of an empty command line, with these values instead."""
    args = parser.parse_args([])
    assert values.keys() <= vars(args).keys()
    return Namespace(**vars(args) | values)


def command_line(script, monkeypatch, capsys, *argv: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `python script.py *argv` (`python -m` for a script in one of the doors)."""
    monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", *map(str, argv)])
    try:
        script.main() if hasattr(script, "main") else runpy.run_path(script.__file__, run_name="__main__")
        code = 0
    except SystemExit as e:
        code = e.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def caller(script, monkeypatch, capsys):
    """The script in this process: call(...) must succeed, call.fails(...) returns its one line of error."""

    def call(*args) -> str:
        code, out, err = command_line(script, monkeypatch, capsys, *args)
        assert code == 0, err
        return out

    call.fails = lambda *args: refused(script, monkeypatch, capsys, *args)
    return call


def refused(script, monkeypatch, capsys, *argv: object) -> str:
    """The one line with which a user's mistake is refused."""
    code, _, err = command_line(script, monkeypatch, capsys, *argv)
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert code == 2, err
    assert len(lines) == 1 and "Traceback" not in err
    return lines[0]


def random_ids(rows: int, T: int, seed: int = 0, high: int = MASK) -> torch.Tensor:
    return torch.randint(high, (rows, T), generator=generator("tests", "ids", seed))


def coherent(t: Toy, c: torch.Tensor, tuples: torch.Tensor) -> torch.Tensor:
    """(R,), (R, m) int64 -> (R,) bool: is the tuple inside the support?"""
    return t.log_prob(c, tuples) > -math.inf


def conditional(t: Toy, c: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """(R,), (R, m) int64 with -1 for masked -> (R, m, V) float64: the exact p(x_i | visible part of z), the ideal
    factorised decoder. A visible part of probability 0 has no conditional; its rows are uniform."""
    support = t.support[c]  # (R, S, m)
    fits = ((z[:, None] == support) | (z[:, None] == -1)).all(-1)
    weight = (fits * t.prob[c])[..., None].expand_as(support)
    joint = torch.zeros(len(z), t.V, t.m, dtype=torch.float64).scatter_add_(1, support, weight).mT
    total = joint.sum(-1, keepdim=True)
    return torch.where(total > 0, joint / total, 1 / t.V)


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


approx = pytest.approx
