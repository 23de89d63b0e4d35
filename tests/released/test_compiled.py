"""Compiled steps write what plain ones write. `pytest tests/released/test_compiled.py`"""

import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import assert_same, command_line, random_ids, random_lora, refused, tiny_model

import sample
from cache import Cached
from checkpoint import save_model
from lib.util import generator
from model import Model, MoE
from released import compiled
from released.compiled import CompiledModel
from sample import Decoding, generate

# 16 experts, 2 of them active: up to 64 tokens at a time are few, which 6 rows of 8 are and 9 rows are not
CASES = dict(block_length=8, n_expert=16, n_active=2)
HEADERS = Path(sysconfig.get_paths()["include"], "Python.h")


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that dynamo makes, run without generated code: what a C++ compiler adds is rounding. One model's
    graphs are another's where nothing but weights differs."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: compile(f, backend="aot_eager", **how))


def both(adapters: bool = False, **overrides) -> tuple[Model, CompiledModel]:
    """A model and the same one compiled, perhaps with adapters that change something."""
    plain = tiny_model(**CASES, **overrides)
    changed = CompiledModel(plain.cfg)
    changed.load_state_dict(plain.state_dict())
    for model in (plain, changed):
        if adapters:
            random_lora(model)
    return plain, changed


def prompts(rows: int) -> list[list[int]]:
    """Rows of different lengths: shorter than a block, inside one, behind two."""
    return [random_ids(1, 3 + 5 * (row % 4), seed=row)[0].tolist() for row in range(rows)]


def test_how_many_graphs(graphs):
    """Two lengths of one row, with the next block and without. Then one for more rows: any number, any lengths, Stage
    B. What one row needs again is there."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    _, model = both()
    compiled.compile_for_one_row(model)
    assert counters["unique_graphs"] == before + 4
    for rows, gen_length, more in ((1, 41, 0), (3, 9, 1), (6, 41, 1), (1, 9, 1)):
        generate(model, prompts(rows), Decoding(gen_length=gen_length, tau_m2t=-1, n_rounds=1))
        assert counters["unique_graphs"] == before + 4 + more


@torch.inference_mode()
def test_logits(graphs, monkeypatch):
    """Both stages, two rounds, adapters, alone and with the next block beside, behind contexts of one and of two
    lengths."""
    plain, changed = both(adapters=True, n_rounds=2)
    function = changed.run_block
    ran = set()
    monkeypatch.setattr(changed, "run_block", lambda block, *args: ran.add(block) or function(block, *args))
    for lengths in ([16], [40, 9]):
        starts = [random_ids(1, n, seed=n)[0].tolist() for n in lengths]
        z = random_ids(len(lengths), 8)
        bundle = torch.rand(z.shape, generator=generator("bundle")) < 0.5
        found = []
        for model in (plain, changed):
            engine = Cached(model, starts, 2)
            h, a = engine.stage_a(z)
            b = engine.stage_b(h, bundle)
            engine.read(z, z)
            found.append([model.head(states) for states in (a, b, *engine.next, *engine.last)])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert ran == {layer for layer in changed.layers if isinstance(layer.mlp, MoE)}


@torch.inference_mode()
def test_what_runs_as_it_is(monkeypatch):
    """A prompt, a row without a cache, adapters at some positions; and 65 tokens of 2 choices, which are more than 8
    for each of 16 experts: the compiled function is not called."""
    plain, changed = both()
    monkeypatch.setattr(changed, "run_block", None)
    x = torch.randn(9, 16, plain.cfg.n_embd, generator=generator("x"))
    ctx = plain.context(torch.ones(1, 16, dtype=torch.bool))
    assert torch.equal(changed.run_layers(x[:1], ctx, 0, 4), plain.run_layers(x[:1], ctx, 0, 4))

    engine = Cached(plain, [[1] * 16], 0)
    one = x[:1, :8]
    some = replace(engine.cache.context(), lora=torch.arange(8)[:, None] > 3)
    assert torch.equal(changed.run_layers(one, some, 0, 4), plain.run_layers(one, some, 0, 4))
    many = Cached(plain, [[1]] * 9, 0).cache.context()
    assert torch.equal(changed.run_layers(x[:, :8], many, 0, 4), plain.run_layers(x[:, :8], many, 0, 4))


@pytest.mark.skipif(not (shutil.which("g++") and HEADERS.exists()), reason="no g++, or no headers of Python")
def test_generated_code_writes_the_same_tokens():
    plain, changed = both()
    d = Decoding(gen_length=21, tau_m2t=0.5, n_rounds=1)
    for one, other in zip(generate(changed, prompts(3), d), generate(plain, prompts(3), d), strict=True):
        assert_same(one.tokens, other.tokens, "compiled")


RUN = ["--prompt_ids", "1,2,3", "--device", "cpu", "--gen_length", 9, "--n_rounds", 1]


def test_the_command_line_is_that_of_sample(graphs, tmp_path, monkeypatch, capsys):
    save_model(tiny_model(**CASES), tmp_path)
    shown = command_line(sample, monkeypatch, capsys, "--ckpt", tmp_path, *RUN)
    code, out, err = command_line(compiled, monkeypatch, capsys, "--ckpt", tmp_path, *RUN)
    assert (code, out) == shown[:2] and code == 0
    assert "compiling" in err and "compiling" not in shown[2]


def test_what_is_not_compiled(tmp_path, monkeypatch, capsys):
    """Other numbers, and no experts."""
    run = [compiled, monkeypatch, capsys, *RUN, "--ckpt", tmp_path]
    save_model(tiny_model(**CASES, n_dense=4), tmp_path)
    assert "no experts" in refused(*run)
    assert "float32 on a CPU" in refused(*run, "--dtype", "bf16")
