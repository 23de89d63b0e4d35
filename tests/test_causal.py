"""Causal Stage B: what it sees, its probability of a bundle, its passes, its beam. `pytest tests/test_causal.py`"""

import itertools
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, assert_as_specified, prompt, random_ids, random_lora, tiny_model
from test_model import CLOSE, noisy_rows

import causal
from cache import Engine
from causal import CausalModel, bundle_mask, token_before
from corrupt import kinds
from decoding import ALL, CAUSAL, Decoding
from lib.rows import Batch
from lib.util import generator
from model import Context, Model
from sample import generate
from train import cocommit_step

# R rows, T positions, B block_length, V vocabulary


def causal_model(**sizes) -> Model:
    """A random causal model, whose copy of the last layers is no longer the base's."""
    model = tiny_model(stage_b="causal", **dict(n_rounds=1) | sizes)
    random_lora(model)
    return model


def places(*at: int, T: int = 8) -> torch.Tensor:
    """(1, T) bool."""
    return torch.isin(torch.arange(T), torch.tensor(at))[None]


def said(engine: Engine, z: torch.Tensor, bundle: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of an engine's Stage B in the current blocks: (R, B, V)."""
    h, _ = engine.stage_a(z)
    return engine.model.logits(engine.stage_b(h, bundle, tokens)).log_softmax(-1)


def of_tokens(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(R, B, V), (R, B) int64 -> (R, B)."""
    return log_p.gather(-1, tokens[..., None])[..., 0]


# --- what a position is shown, and whom it sees
def test_what_a_position_is_shown_and_whom_it_sees_by_hand():
    """The token on its left in its block, whatever is in the bundle. Positions 1 and 2 of four are the bundle."""
    assert token_before(torch.tensor([[1, 2, 3, 4, 5, 6]]), 3, 9).tolist() == [[9, 1, 2, 9, 4, 5]]
    assert token_before(torch.tensor([[1, 2]]), 8, 9).tolist() == [[9, 1]]
    ctx = Context(None, None, torch.ones(4, 5, dtype=torch.bool))
    sees = bundle_mask(places(1, 2, T=4), ctx)[0, 0].int().tolist()
    assert sees == [[1, 0, 0, 1, 1], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]


def test_stage_a_stays_the_base():
    """Only the copy of the last layers, the marker and Show learn, and Stage A uses none of them. Where nothing is
    marked and the copy is still the base's, Stage B is Stage A, and it reads Stage A's keys of the blocks before."""
    model, ids = tiny_model(stage_b="causal", n_rounds=1), random_ids(2, 16)
    model.layers_b.load_state_dict(model.layers[2:].state_dict())
    every = torch.ones(2, 16, dtype=torch.bool)
    ctx = model.read_clean(ids, every)
    base = model(ids, ctx)
    h = model.prefix(ids, ctx)
    assert torch.equal(model.logits(model.coordinate(h, ~every, ids, ctx)), base)

    model.adapt(4, generator("lora"))
    own = {f"layers_b.{i}.{name}" for i in (0, 1) for name, _ in model.layers[2 + i].named_parameters()}
    assert model.learned().keys() == own | {"markers", "show"}
    for p in model.learned().values():
        p.data.fill_(torch.inf)
    assert torch.equal(model(ids, model.read_clean(ids, every)), base)
    assert not model.coordinate(h, every, ids, ctx).isfinite().all()


# --- what is trained is what decodes
@torch.no_grad()
def test_a_bundle_has_the_probability_that_it_was_trained_with():
    """In training there are whole rows with a clean copy, of several blocks, with a prompt and padding, and the loss
    has their log-probability. In decoding each block is read after the finished ones before it, beside other rows."""
    model = causal_model(n_last=3)
    clean, z, bundle, real = noisy_rows()
    tokens = torch.where(bundle, clean, z)
    ctx = model.read_clean(clean, real)
    trained = model.logits(model.coordinate(model.prefix(z, ctx), bundle, tokens, ctx)).log_softmax(-1)
    log_p = torch.zeros(3, 24)
    for start in (0, 8, 16):
        rows = real[:, start].nonzero()[:, 0]
        block = slice(start, start + 8)
        engine = Engine(model, clean[rows, :start].tolist(), 1)
        found = said(engine, z[rows, block], bundle[rows, block], tokens[rows, block])
        torch.testing.assert_close(found, trained[rows, block], **CLOSE)
        log_p[rows, block] = of_tokens(found, clean[rows, block])

    model.corrupt_and_draw = lambda *given: (z, kinds(clean, z, real, MASK), bundle)
    batch = Batch(clean, real, real, torch.arange(9), [])
    _, terms = cocommit_step(model, batch, Namespace(context="clean"))
    assert terms["m2t_B"].tolist() == approx([-float(log_p[bundle].sum()), int(bundle.sum())], rel=1e-4)


def test_what_is_masked_by_hand(monkeypatch):
    """Blocks of four. The first number of a block decides: below .25 (whole_share) it is masked whole; then half of the
    rest is masked from a place on; otherwise each position whose number is below the block's ratio is masked. A prompt
    never is. All masks are the bundle."""
    numbers = iter([[[0.2, 0.6, 0.63]], [[0.9, 0.5, 0.5]], [[0.4, 0.6, 0.1, 0.9] * 3]])
    monkeypatch.setattr(causal, "of_blocks", lambda draws, T, B: torch.tensor(next(numbers)).repeat_interleave(B, 1))
    monkeypatch.setattr(causal, "uniform", lambda draws, n: torch.tensor(next(numbers)))
    model = SimpleNamespace(cfg=SimpleNamespace(block_length=4, mask_id=MASK))
    clean = random_ids(1, 12)
    prompt = torch.arange(12)[None] < 1
    batch = Batch(clean, ~prompt, ~prompt, torch.arange(9), [])
    z, kind, bundle = CausalModel.corrupt_and_draw(model, batch, None, Namespace(whole_share=0.25))
    assert bundle.int().tolist() == [[0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0]]
    assert torch.equal(z == MASK, bundle) and torch.equal(z[~bundle], clean[~bundle])
    assert torch.equal(kind == 1, bundle)


# --- passes
def holed(n: int, *at: int) -> list[int]:
    return [MASK if i in at else token for i, token in enumerate(prompt(n))]


# from the left, and with holes
PROMPTS = [prompt(n, n) for n in (3, 8, 13, 16)]
PROMPTS += [holed(16, 9, 12, 13), holed(8, 0, 1, 2, 4, 6), holed(13, 2, 10), holed(16, 8, 14, 15)]


@pytest.mark.parametrize("d", [
    CAUSAL, replace(CAUSAL, tau_m2t=0.05), replace(CAUSAL, beam=3), replace(CAUSAL, n_rounds=0)
])  # fmt: skip
def test_decoding_equals_the_specification(d):
    """Rows together, with a cache, and each row alone, whose whole text every pass reads."""
    model = causal_model(std=0.12, n_layer=3, decoder="left")
    outputs = assert_as_specified(model, PROMPTS, replace(d, gen_length=9))
    assert all(out.nfe["partial"] > 0 for out in outputs) == (d.n_rounds > 0)


@pytest.mark.parametrize("tau, temperature", [(ALL, 0.0), (ALL, 1.0), (0.01, 1.0)])
def test_passes_find_what_is_found_in_order(tau, temperature, monkeypatch):
    """Also in draws, by the same random numbers. In order, a pass makes one token final."""
    # smaller weights, whose draws are likely enough to be written together
    model = causal_model(std=0.12, n_layer=3)
    d = replace(CAUSAL, gen_length=9, tau_m2t=tau, temperature=temperature)
    found = generate(model, PROMPTS, d, 3)

    def in_order(engine, h, masked, drafts, u, d):
        conf, passes = torch.ones(drafts.shape), masked.sum(-1).float()
        for i in range(drafts.shape[1]):
            logits = causal.never_mask(model.logits(engine.stage_b(h, masked, drafts)), model)
            token, p = causal.candidates(logits, u, d)
            here = masked & (torch.arange(drafts.shape[1]) == i)
            drafts, conf = torch.where(here, token, drafts), torch.where(here, p, conf)
        return drafts, conf, torch.ones_like(masked), passes

    monkeypatch.setattr(causal, "passes_until_final", in_order)
    for a, b in zip(found, generate(model, PROMPTS, d, 3), strict=True):
        assert (a.prompt, a.tokens, a.nfe["full"]) == (b.prompt, b.tokens, b.nfe["full"])
        assert a.nfe["partial"] <= b.nfe["partial"]


def run_of(drafts, z, tau=ALL, p=0.8) -> tuple[list[list[int]], list[float]]:
    """The rows after one step, and how many passes they took. Stage A gives the drafts, and Stage B counts: its token
    is the one before plus one, and position 0 has 1. Every token has the probability p. Token 10 is the mask."""

    def logits(token):
        hot = F.one_hot(token, 11).float()
        return (hot * p + (1 - hot) * (1 - p) / 9).log()

    model = SimpleNamespace(cfg=SimpleNamespace(mask_id=10), logits=lambda states: states)
    engine = SimpleNamespace(
        model=model,
        stage_a=lambda z: (z, logits(torch.tensor(drafts))),
        stage_b=lambda h, bundle, tokens: logits((F.pad(tokens[:, :-1], (1, 0)) + 1) % 10),
    )
    z = torch.tensor(z)
    given, u = torch.zeros_like(z).bool(), torch.zeros(len(z), 2, z.shape[1])
    made = CausalModel.denoise(model, engine, z, given, u, Decoding(tau_m2t=tau))
    assert torch.equal(made.bundle, made.after != z) and not made.edited.any()
    return made.after.tolist(), made.partial.tolist()


def test_passes_by_hand():
    """Stage B would write 1 2 3 4. After a pass the first token that differs from its draft is final, and so are all
    tokens before it."""
    right, masks = [1, 2, 3, 4], [10, 10, 10, 10]

    # right drafts take one pass, and so do drafts of which only the last is wrong
    assert run_of([right], [masks]) == ([right], [1])
    assert run_of([[1, 2, 3, 7]], [masks]) == ([right], [1])
    # a pass corrects one token, but the next one has not read the correction: 1 7 3 4 -> 1 2 8 4 -> 1 2 3 9 -> 1 2 3 4
    assert run_of([[1, 7, 3, 4]], [masks]) == ([right], [3])
    # rows that are done take no further passes, and a row without a mask takes none
    assert run_of([[1, 7, 3, 4], right, right], [masks, masks, right]) == ([right] * 3, [3, 1, 0])
    # visible tokens stay, and the tokens after them count on from them
    assert run_of([[1, 2, 3, 6]], [[10, 10, 5, 10]]) == ([[1, 2, 5, 6]], [1])

    # the products are .5, .25, .125: a run is strictly above the gate, and has at least one token
    assert run_of([right], [masks], 0.25, p=0.5) == ([[1, 10, 10, 10]], [1])
    assert run_of([right], [masks], 0.24, p=0.5) == ([[1, 2, 10, 10]], [1])
    assert run_of([[7, 7, 7, 7]], [masks], 1.0) == ([[1, 10, 10, 10]], [1])
    # no pass is taken for tokens below the gate: two tokens are final after the first pass, at .64
    assert run_of([[1, 7, 3, 4]], [masks], 0.7) == ([[1, 10, 10, 10]], [1])
    assert run_of([[1, 7, 3, 4]], [masks], 0.6) == ([[1, 2, 10, 10]], [2])


def test_a_model_that_favours_the_mask_never_writes_it():
    """Its draws are those of the probabilities without the mask."""
    model = causal_model()
    model.lm_head.weight.data[MASK] = 0
    model.norm_f.weight.data[0] = 50.0
    model.lm_head.weight.data[MASK, 0] = 1.0
    d = Decoding(gen_length=16, tau_m2t=ALL, tau_t2t=None, temperature=1.0, eos_early_stop=False)
    greedy = replace(d, temperature=0.0)
    for out in generate(model, [prompt(8), prompt(3)], d) + generate(model, [prompt(8)], greedy):
        assert MASK not in out.tokens and out.warning is None


# --- the beam
@pytest.mark.parametrize("start", [[6, 6, 6], [6, 1, 6], [2, 6, 6]])
@torch.no_grad()
def test_a_wide_beam_finds_the_likeliest_text(start):
    """Of a block of three, with a hole or a prompt in it, beside another row; all texts are enumerated."""
    model = causal_model(std=0.35, block_length=3, vocab_size=8, mask_id=6, eos_id=7)
    symbols = [i for i in range(8) if i != 6]
    texts = torch.tensor([
        text for text in itertools.product(symbols, repeat=3)
        if all(a in (6, b) for a, b in zip(start, text, strict=True))
    ])  # fmt: skip
    z = torch.tensor([start] * len(texts))
    engine = Engine(model, [[1, 2, 3]] * len(texts), 1)
    h, _ = engine.stage_a(z)
    logits = model.logits(engine.stage_b(h, z == 6, texts))
    logits[..., 6] = -torch.inf
    log_p = (of_tokens(logits.log_softmax(-1), texts) * (z == 6)).sum(-1)
    assert float(log_p.exp().sum()) == approx(1, rel=1e-4)

    engine = Engine(model, [[1, 2, 3], [3, 1, 2]], 1)
    both = torch.tensor([start, [0, 6, 6]])
    best = model.denoise(engine, both, both < 0, torch.zeros(2, 2, 3), replace(CAUSAL, beam=343))
    assert best.after[0].tolist() == texts[log_p.argmax()].tolist()
    assert float(best.conf[0].log().sum()) == approx(float(log_p.max()), abs=1e-3)
    assert best.partial.tolist() == [(z[0] == 6).sum(), 2]
