"""A small random model with confident, varied predictions, and a command line that runs in this process."""

import importlib
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import load_model, new_model, save_adapter, save_model
from config import PRESETS, Config
from decoding import Decoding, Output, Row, Step
from lib.rows import Meta, write_meta
from lib.util import generator, read_json, write_json
from model import Model
from prepare import BYTES
from sample import generate, generate_one
from toy import Toy

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden_a"  # as released, and what its code made of it
V, MASK, EOS = 40, 38, 39


def tiny_config(**overrides) -> Config:
    base = dict(vocab_size=V, block_length=8, mask_id=MASK, eos_id=EOS, n_last=2, n_rounds=2)
    return replace(PRESETS["tiny"], **base | overrides)


def tiny_model(seed: int = 0, std: float = 0.25, **overrides) -> Model:
    """A model whose parameters are all random, norms, router biases and markers too: no zero or one hides a mistake."""
    model = new_model(tiny_config(**overrides), generator("tests", seed))
    g = generator("tests", "weights", seed)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * std + (1.0 if p.dim() == 1 else 0.0))
    for b in model.buffers():
        b.copy_(torch.randn(b.shape, generator=g) * std)
    return model


def byte_model(seed: int = 0, **overrides) -> Model:
    """A tiny model that reads and writes bytes."""
    sizes = dict(vocab_size=272, eos_id=256, mask_id=257, max_len=128)
    return tiny_model(seed, **sizes | overrides)


def byte_spec() -> dict:
    """The content of a tokenizer.json that reads bytes."""
    return read_json(BYTES / "tokenizer.json", "tokenizer")


def names_folder(folder: Path, spec: dict | None = None, **overrides) -> Path:
    """A model of names with random weights; spec: the content of its tokenizer.json (left out: bytes)."""
    spec = spec or byte_spec()
    eos_id, mask_id = (token["id"] for token in spec["added_tokens"])
    model = byte_model(**dict(eos_id=eos_id, mask_id=mask_id) | overrides)
    save_model(model, folder)
    write_json(folder / "tokenizer.json", spec)
    write_meta(folder, Meta(model.cfg.vocab_size, eos_id, mask_id, n_plain=eos_id, judge={"names": "0"}))
    return folder


def merged_spec() -> dict:
    """A tokenizer of bytes with the merges aa, ab, aaa, and ab with a blank before it."""
    spec = byte_spec()
    spec["model"]["merges"] = [["a", "a"], ["a", "b"], ["aa", "a"], ["Ġ", "ab"]]
    spec["model"]["vocab"] |= {"aa": 256, "ab": 257, "aaa": 258, "Ġab": 259}
    for i, token in enumerate(spec["added_tokens"]):
        token["id"] = 260 + i
    return spec


def random_lora(model: Model, r: int = 4) -> None:
    """What learns beside the base, as after a training: LoRA that is not zero, a copy that is no longer the base."""
    model.adapt(r, generator("lora"))
    for name, p in model.learned().items():
        if "lora_B" in name:
            p.data.normal_(0, 0.1, generator=generator(name))
        elif name.startswith("layers_b."):
            p.data.add_(torch.randn(p.shape, generator=generator(name)), alpha=0.05)


def random_adapter(folder: Path, base: Path, stage_b: str = "paper", **overrides) -> Model:
    """Write an adapter's folder as train.py does, with random weights -> the model with this adapter."""
    model = load_model(base, "cpu", torch.float32, stage_b, **overrides)
    random_lora(model)
    model.markers.data.normal_(0, 0.3, generator=generator("markers"))
    if stage_b == "causal":
        model.show.data.normal_(0, 0.1, generator=generator("show"))
    save_adapter(model, folder, base, lora_r=4)
    return model


def command_line(script, monkeypatch, capsys, *argv: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `python script.py *argv`, or of `python -m script`."""
    monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", *map(str, argv)])
    try:
        script.main()
        code = 0
    except SystemExit as e:
        code = e.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def caller(script, monkeypatch, capsys, *first: object):
    """The script in this process: call(...) must succeed, call.fails(...) returns its one line of error. first: what
    every call begins with."""

    def call(*args) -> str:
        code, out, err = command_line(script, monkeypatch, capsys, *first, *args)
        assert code == 0, (args, err)
        return out

    def fails(*args) -> str:
        code, _, err = command_line(script, monkeypatch, capsys, *first, *args)
        lines = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
        assert (code, len(lines)) == (2, 1) and "Traceback" not in err, err
        return lines[0]

    call.fails = fails
    return call


def call_line(line: str, more: dict[str, list], monkeypatch, capsys) -> str:
    """What a page's line `python script.py FLAGS` or `python -m script FLAGS` prints; more: flags behind those, by
    script."""
    _, script, *flags = [word for word in shlex.split(line, comments=True) if word != "-m"]
    module = importlib.import_module(script.removesuffix(".py"))
    return caller(module, monkeypatch, capsys, *flags)(*more.get(script, []))


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


def prompt(n: int, seed: int = 0, high: int = MASK) -> list[int]:
    return random_ids(1, n, 100 + seed, high)[0].tolist()


def traced(model, prompts: list[list[int]], d: Decoding, **how) -> tuple[list[Output], list[list[dict]]]:
    """The output of each row, and its steps in plain numbers. fill and edit are positions of the text."""
    steps = [[] for _ in prompts]

    def add(rows: list[Row], step: Step) -> None:
        for r, row in enumerate(rows):
            start = len(row.ids)
            record = dict(start=start, before=step.z[r].tolist(), after=step.after[r].tolist())
            record["fill"] = (start + step.bundle[r].nonzero()[:, 0]).tolist()
            record["edit"] = (start + step.edited[r].nonzero()[:, 0]).tolist()
            record["conf"] = step.conf[r].tolist()
            steps[row.number].append(record)

    return generate(model, prompts, d, on_step=add, **how), steps


def assert_as_specified(model, prompts, d: Decoding, step=None) -> list[Output]:
    """Rows together, with a cache, and a row alone have the same tokens, forwards, and blocks before each forward."""
    outputs, steps = traced(model, prompts, d, step=step)
    for prompt, out, row in zip(prompts, outputs, steps, strict=True):
        tokens, nfe, seen = generate_one(model, prompt, d, step)
        assert [s["before"] for s in row] == seen
        assert (out.tokens, out.nfe) == (tokens, nfe)
    return outputs


approx = pytest.approx
