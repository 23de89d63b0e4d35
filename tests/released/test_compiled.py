"""Compiled steps write what plain ones write. `pytest tests/released/test_compiled.py`"""

import shutil
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from common import approx, assert_same, command_line, random_ids, refused, tiny_config, tiny_model

import sample
from beyond import stage_b_only
from cache import Cached
from checkpoint import save_model
from lib.util import generator
from model import Model, MoE, sequence_context
from released import compiled
from released.int8 import int8_model
from sample import Decoding, generate, generate_one

# 16 experts, 2 of them active: up to 64 tokens at a time are few, which 6 rows of 8 are and 9 rows are not
CASES = dict(block_length=8, n_expert=16, n_active=2)
HEADERS = Path(sysconfig.get_paths()["include"], "Python.h")


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that dynamo makes, run without generated code: what a C++ compiler adds is rounding. One model's
    graphs are another's where nothing but weights differs."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: compile(f, backend="aot_eager", **how))


def prompts(rows: int) -> list[list[int]]:
    """Rows of different lengths: shorter than a block, inside one, behind two."""
    return [random_ids(1, 3 + 5 * (row % 4), seed=row)[0].tolist() for row in range(rows)]


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 5, 64])
def test_experts_as_a_sum_over_gathered_weights(n):
    """Each token's experts by hand: the sum of weight * down(silu(gate) * up) over its choices; and as model.MoE."""
    moe = tiny_model(**CASES).layers[-1].mlp
    x = torch.randn(n, moe.router.shape[1], generator=generator("x"))
    chosen, weights = moe.route(x)
    found = compiled.chosen_experts(moe, x, chosen, weights)
    torch.testing.assert_close(found, moe.experts(x, chosen, weights), rtol=1e-5, atol=1e-5)

    by_hand = torch.zeros_like(x[0])
    for expert, weight in zip(chosen[0], weights[0], strict=True):
        gate, up = (moe.gate_up[expert] @ x[0]).chunk(2)
        by_hand += weight * (moe.down[expert] @ (gate * gate.sigmoid() * up))
    assert found[0].tolist() == approx(by_hand.tolist(), rel=1e-4, abs=1e-4)


def with_adapters(model: Model, where: str) -> Model:
    """Adapters that change something: none, those of the paper, or in Stage B alone."""
    if where == "everywhere":
        model.add_lora(4, 8.0, generator("lora"))
    elif where == "stage_b":
        stage_b_only.adapt(model, 4, generator("lora"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator(name)) * 0.1
    return model


@torch.inference_mode()
@pytest.mark.parametrize("where", ["nowhere", "everywhere", "stage_b"])
def test_logits(graphs, where):
    """Both stages, two rounds, alone and with the next block beside, behind contexts of one and of two lengths."""
    plain, changed = (with_adapters(tiny_model(n_rounds=2, **CASES), where) for _ in range(2))
    compiled.compile_blocks(changed)
    function = changed.run_layers.args[1]
    ran = set()
    changed.run_layers = partial(
        compiled.run_layers, changed, lambda block, *args: ran.add(block) or function(block, *args)
    )
    for lengths in ([16], [0], [40, 9], [8, 8], [0, 0]):
        starts = [random_ids(1, n, seed=n)[0].tolist() if n else [] for n in lengths]
        z = random_ids(len(lengths), 8)
        bundle = torch.rand(z.shape, generator=generator("bundle")) < 0.5
        found = []
        for model in (plain, changed):
            engine = Cached(model, starts, 2)
            h, a = engine.stage_a(z)
            b = engine.stage_b(h, bundle)
            engine.read(z, ahead=True)
            found.append([a, b] + [model.head(states) for states in engine.next + engine.ready])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert ran == {layer for layer in changed.layers if isinstance(layer.mlp, MoE)}


@pytest.mark.parametrize("n_rounds", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 6, 9])
def test_the_same_tokens_as_the_specification(graphs, rows, n_rounds):
    """Steps of few tokens, and of too many until rows have finished."""
    d = Decoding(gen_length=13, tau_m2t=0.3, tau_t2t=0.3, max_post_steps=3, n_rounds=n_rounds)
    model = tiny_model(**CASES)
    specified = [generate_one(model, p, d) for p in prompts(rows)]
    compiled.compile_blocks(model)
    for output, (tokens, nfe, _) in zip(generate(model, prompts(rows), d), specified, strict=True):
        assert_same(output.tokens, tokens, "compiled", "generate_one")
        assert output.nfe == nfe


def test_how_many_graphs(graphs):
    """Two lengths of one row, with the next block and without. Then one for more rows: any number, any lengths, Stage
    B. What one row needs again is there."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    model = tiny_model(**CASES)
    compiled.compile_blocks(model)
    assert counters["unique_graphs"] == before + 4
    for rows, more in ((1, 0), (3, 1), (2, 1), (6, 1), (1, 1)):
        for gen_length in (9, 41):
            generate(model, prompts(rows), Decoding(gen_length=gen_length, tau_m2t=-1, n_rounds=1))
        assert counters["unique_graphs"] == before + 4 + more


@torch.inference_mode()
def test_what_runs_as_it_is():
    """A prompt, a row without a cache, adapters at some positions; and 65 tokens of 2 choices, which are more than 8
    for each of 16 experts: the compiled function is not called."""
    model = tiny_model(**CASES)
    model.add_lora(4, 8.0, generator("lora"))
    plain = partial(Model.run_layers, model)
    changed = partial(compiled.run_layers, model, None)

    ids = random_ids(1, 16)
    ctx = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)
    x = torch.randn(1, 16, model.cfg.n_embd, generator=generator("x"))
    assert torch.equal(changed(x, ctx, 0, 4), plain(x, ctx, 0, 4))

    engine = Cached(model, [[1] * 16], 0)
    some = replace(engine.cache.context(), lora=torch.arange(8)[:, None] > 3)
    assert torch.equal(changed(x[:, :8], some, 0, 4), plain(x[:, :8], some, 0, 4))
    engine.cache.filling = 0
    filling = replace(engine.cache.context(), cache=engine.cache)
    assert torch.equal(changed(x[:, :8], filling, 0, 4), plain(x[:, :8], filling, 0, 4))

    many = Cached(model, [[1]] * 9, 0).cache.context()
    x = torch.randn(9, 8, model.cfg.n_embd, generator=generator("x"))
    assert torch.equal(changed(x, many, 0, 4), plain(x, many, 0, 4))
    moe = model.layers[-1].mlp
    assert compiled.pays(moe, 64) and not compiled.pays(moe, 65)


@pytest.mark.skipif(not (shutil.which("g++") and HEADERS.exists()), reason="no g++, or no headers of Python")
def test_generated_code_writes_the_same_tokens():
    model = tiny_model(**CASES)
    d = Decoding(gen_length=21, tau_m2t=0.5, n_rounds=1)
    plain = [output.tokens for output in generate(model, prompts(3), d)]
    compiled.compile_blocks(model)
    for output, tokens in zip(generate(model, prompts(3), d), plain, strict=True):
        assert_same(output.tokens, tokens, "compiled", "plain")


def test_the_command_line_is_that_of_sample(graphs, tmp_path, monkeypatch, capsys):
    save_model(tiny_model(**CASES), tmp_path)
    monkeypatch.setattr(sample, "load_model", sample.load_model)  # put back afterwards
    run = ["--ckpt", tmp_path, "--prompt_ids", "1,2,3", "--gen_length", 9, "--device", "cpu", "--n_rounds", 1]
    shown = command_line(sample, monkeypatch, capsys, *run)
    code, out, err = command_line(compiled, monkeypatch, capsys, *run)
    assert (code, out) == shown[:2] and code == 0
    assert "compiling" in err and "compiling" not in shown[2]


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--dtype", "bf16"], "float32 on a CPU"),
        (["--ckpt", "nothing"], "nothing"),
        (["--prompt_ids", "x"], "--prompt_ids"),
    ],
)
def test_refusals(argv, word, graphs, tmp_path, monkeypatch, capsys):
    save_model(tiny_model(**CASES), tmp_path)
    monkeypatch.setattr(sample, "load_model", sample.load_model)
    assert word in refused(
        compiled, monkeypatch, capsys, "--ckpt", tmp_path, "--prompt_ids", "1", "--device", "cpu", *argv
    )


def test_models_that_are_refused(capsys):
    """Int8 experts; no experts; blocks that give each expert more than 8 tokens: 16 * 4 / 4 is 16."""
    cases = {"int8": int8_model(tiny_config(**CASES)).to_empty(device="cpu")}
    cases["no layer"] = tiny_model(**CASES | dict(n_dense=4))
    cases["4 experts"] = tiny_model(**CASES | dict(n_expert=4, n_active=4, n_group=1, topk_group=1, block_length=16))
    for word, model in cases.items():
        with pytest.raises(SystemExit):
            compiled.compile_blocks(model)
        assert word in capsys.readouterr().err


def test_no_compiler(monkeypatch, capsys):
    """What the compiler says is passed on in one line."""

    def broken(function, **how):
        def call(*args):
            raise RuntimeError("No working C++ compiler found\nlong story")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(SystemExit):
        compiled.compile_blocks(tiny_model(**CASES))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the steps cannot be compiled (No working C++ compiler found): install g++")
