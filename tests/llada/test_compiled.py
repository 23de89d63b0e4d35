"""Compiled steps write what plain ones write. `pytest tests/llada/test_compiled.py`"""

import copy
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from common import assert_same, command_line, random_ids, random_lora, refused, tiny_model
from torch._dynamo import config as dynamo

import sample
from cache import Cached
from checkpoint import save_model
from decoding import Decoding
from lib.util import generator
from llada import compiled
from model import Model
from sample import generate

# up to 64 tokens at a time are few, which 6 rows of 8 are and 9 rows are not
CASES = dict(block_length=8, n_expert=16, n_active=2)
HEADERS = Path(sysconfig.get_paths()["include"], "Python.h")


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that dynamo makes, run as they are: what a C++ compiler adds is rounding. One model's graphs are
    another's where nothing but weights differs."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: compile(f, backend="eager", **how))


def both(**overrides) -> tuple[Model, Model]:
    """A model with an adapter that changes something, and the same one compiled."""
    plain = tiny_model(**CASES, **overrides)
    random_lora(plain)
    changed = copy.deepcopy(plain)
    compiled.compile_steps(changed)
    return plain, changed


def prompts(rows: int) -> list[list[int]]:
    """Rows of different lengths: shorter than a block, inside one, behind two."""
    return [random_ids(1, 3 + 5 * (row % 4), seed=row)[0].tolist() for row in range(rows)]


def test_how_many_graphs(graphs):
    """Two lengths of one row; then one for more rows: any number, any lengths, Stage B. What one row needs again is
    there. And dynamo's own limit stays what it was."""
    limit = dynamo.recompile_limit
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    _, model = both()
    compiled.compile_for_one_row(model)
    assert counters["unique_graphs"] == before + 2
    for rows, gen_length, more in ((1, 41, 0), (3, 9, 1), (6, 41, 1), (1, 9, 1)):
        generate(model, prompts(rows), Decoding(gen_length=gen_length, tau_m2t=-1, n_rounds=1))
        assert counters["unique_graphs"] == before + 2 + more
    assert dynamo.recompile_limit == limit


@pytest.mark.parametrize("stage_b, n_rounds", [("paper", 2), ("causal", 1)])
@torch.inference_mode()
def test_logits(stage_b, n_rounds, graphs):
    """Both stages and all rounds, behind contexts of one length and of two; and of nine rows, whose 72 tokens of 2
    choices are more than 8 for each of 16 experts, which run as they are. So does causal Stage B."""
    plain, changed = both(stage_b=stage_b, n_rounds=n_rounds)
    for lengths in ([16], [40, 8], [8] * 9):
        starts = [random_ids(1, n, seed=n)[0].tolist() for n in lengths]
        z = random_ids(len(lengths), 8)
        bundle = torch.rand(z.shape, generator=generator("bundle")) < 0.5
        found = []
        for model in (plain, changed):
            engine = Cached(model, starts, n_rounds)
            h, a = engine.stage_a(z)
            b = engine.stage_b(h, bundle, *([z] if stage_b == "causal" else []))
            engine.close(list(range(len(lengths))), z, True)
            found.append([model.logits(states) for states in (a, b, engine.stage_a(z)[1])])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not (shutil.which("g++") and HEADERS.exists()), reason="no g++, or no headers of Python")
def test_generated_code_writes_the_same_tokens():
    """Two rows behind contexts of one block and of two, a token a step: so one graph serves them from first to last."""
    plain, changed = both()
    d = Decoding(gen_length=13, tau_m2t=1.0, tau_t2t=None, n_rounds=1, eos_early_stop=False)
    starts = [random_ids(1, n, seed=n)[0].tolist() for n in (11, 19)]
    with dynamo.patch(assume_static_by_default=False):
        written = generate(changed, starts, d)
    for one, other in zip(written, generate(plain, starts, d), strict=True):
        assert len(one.tokens) == 13
        assert_same(one.tokens, other.tokens, "compiled")


def test_the_command_line_is_that_of_sample(graphs, tmp_path, monkeypatch, capsys):
    """It takes float32 alone on a CPU, and no model without experts."""
    run = ["--prompt_ids", "1,2,3", "--device", "cpu", "--gen_length", 9, "--n_rounds", 1, "--ckpt", tmp_path]
    save_model(tiny_model(**CASES), tmp_path)
    shown = command_line(sample, monkeypatch, capsys, *run)
    code, out, err = command_line(compiled, monkeypatch, capsys, *run)
    assert (code, out) == shown[:2] and code == 0
    assert "compiling" in err and "compiling" not in shown[2]
    assert "float32 on a CPU" in refused(compiled, monkeypatch, capsys, *run, "--dtype", "bf16")
    save_model(tiny_model(**CASES, n_dense=4), tmp_path)
    assert "no experts" in refused(compiled, monkeypatch, capsys, *run)
