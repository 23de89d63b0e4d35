"""Decoding: generate = the specification, a row = itself alone, the step by hand. `pytest tests/test_sample.py`"""

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, assert_as_specified, caller, prompt, random_lora, tiny_model, traced

import cache
import sample
from checkpoint import save_model
from decoding import ALL, CAUSAL, PAPER, RELEASED, SETTINGS, Decoding, candidates, decoding_of
from lib.util import Mistake
from sample import SELECT, by_confidence, by_entropy, certified, denoise, from_the_left, generate, generate_one


# --- the specification
@pytest.mark.parametrize("seed", range(15))
def test_generate_equals_the_specification_whatever_the_settings(seed, monkeypatch):
    """Prompts may hold masks. Blocks may be left with masks, or change until no more steps are allowed."""
    draw = random.Random(seed)
    if seed >= 12:
        monkeypatch.setattr(sample, "MAX_STEPS", 0)
    d = Decoding(
        gen_length=draw.randint(1, 18),
        tau_m2t=draw.choice([-1, 0.0, 0.3, 0.5, 0.7, 0.95, 1.0]),
        tau_t2t=draw.choice([None, 0.0, 0.3, 0.5, 0.9]),
        max_post_steps=draw.choice([0, 1, 3, 16]),
        num_to_transfer=draw.choice([1, 1, 2, 3, 20]),
        eos_early_stop=draw.random() < 0.5,
        n_rounds=seed % 3,
    )
    B, n_last, std = draw.choice([1, 3, 4, 8]), draw.randint(1, 4), draw.choice([0.15, 0.25, 0.35])
    # two tokens at least, the first no mask: positions of a text of masks alone have equal logits, an exact tie
    prompts = [prompt(1, seed + 1) + prompt(n, seed, high=MASK + 2) for n in draw.sample(range(1, 19), 3)]
    model = tiny_model(seed, std, block_length=B, n_last=n_last, window=draw.choice([0, 2 * B, 3 * B]))
    if seed % 4 > 1:
        random_lora(model)
    d = replace(d, holes=draw.random() < 0.5, select=draw.choice([*SELECT]))
    monkeypatch.setattr(cache, "PIECE", draw.choice([1, 8, 512]))  # so much of a prompt is read at a time
    assert_as_specified(model, prompts, d)


def test_everything_is_made_on_the_models_device():
    """Both decoders run if the default device is another one, so they also run on an accelerator."""
    model, d = tiny_model(), Decoding(gen_length=9, tau_m2t=0.3, max_post_steps=2, n_rounds=2)
    first, second = prompt(11), prompt(3)
    expected = generate_one(model, first, d)
    with torch.device("meta"):
        assert generate_one(model, first, d) == expected
        assert generate(model, [first, second], d)[0].tokens == expected[0]


@pytest.mark.parametrize("n_rounds", [0, 1, 2])
def test_a_sampled_row_of_a_batch_equals_the_prompt_alone(n_rounds):
    """An equal prompt beside it gets another continuation."""
    model = tiny_model(n_layer=3)
    d = Decoding(gen_length=17, tau_m2t=0.4, tau_t2t=0.6, max_post_steps=2, n_rounds=n_rounds, temperature=0.8)
    # shorter than a block of 8, one block, inside a block, two blocks, inside the third
    prompts = [prompt(n, i) for i, n in enumerate((3, 8, 13, 16, 21))]
    together, rows = traced(model, [*prompts, prompts[0]], d, seed=4)
    assert together[0].tokens != together[-1].tokens
    for p, out, row in zip(prompts, together, rows, strict=False):
        (alone,), (steps,) = traced(model, [p], d, seed=4)
        assert (alone.tokens, alone.nfe) == (out.tokens, out.nfe)
        for a, b in zip(steps, row, strict=True):
            assert a["conf"] == approx(b["conf"], abs=2e-4)
            assert (a["start"], a["before"], a["after"]) == (b["start"], b["before"], b["after"])


def test_what_a_decode_costs_is_what_runs():
    """Blocks of 5, 8 and 8 tokens take 21 forwards, each of which writes a token. With edits each block takes one more,
    which finds nothing to change. Without edits all blocks except the last are read once more, also in round two."""
    model, first, last = tiny_model(), [], []
    model.layers[0].register_forward_hook(lambda layer, given, out: first.append(len(out)))
    model.layers[3].register_forward_hook(lambda layer, given, out: last.append(len(out)))
    edited = Decoding(gen_length=21, tau_m2t=1.0, tau_t2t=1.0, n_rounds=0)  # no edit is above 1
    plain = replace(edited, tau_t2t=None)
    twice = replace(plain, n_rounds=2)
    for d, full, refresh, partial in ((edited, 24, 0, 0), (plain, 21, 2, 0), (twice, 21, 2, 44)):
        first.clear()
        last.clear()
        nfe = generate(model, [prompt(3)], d)[0].nfe
        assert nfe == dict(full=full, refresh=refresh, partial=partial)
        assert len(first) == full + refresh and len(last) == len(first) + partial


# --- one step
def test_a_step_by_hand():
    """Block of 4: position 0 is prompt, 1 a mask, 2 and 3 visible. Stage A disagrees with 0 and 2, Stage B with all of
    them. The bundle is Stage A's choice, every token written is Stage B's, the prompt stays."""
    seen = []

    class Engine:
        cfg = SimpleNamespace(mask_id=9)
        model = SimpleNamespace(cfg=cfg, logits=lambda h: 5 * h)

        def stage_a(self, z):
            return z, F.one_hot(torch.tensor([[7, 7, 7, 3]]), 10).float()

        def stage_b(self, h, bundle, tokens):
            assert h[0, 2:].tolist() == [2, 3]  # what Stage A's forward left
            assert tokens.tolist() == [[1, 7, 2, 3]]  # its draft in the bundle
            seen.append(bundle.tolist())
            return F.one_hot(torch.tensor([[5, 5, 5, 5]]), 10).float()

    given = torch.tensor([[True, False, False, False]])

    def after(*z, **settings) -> list[int]:
        d = Decoding(**dict(tau_t2t=0.5) | settings)
        return denoise(Engine(), torch.tensor([z]), given, torch.zeros(1, 2, 4), d).after[0].tolist()

    assert after(1, 9, 2, 3) == [1, 5, 5, 5] and seen == [[[False, True, False, False]]]
    assert after(1, 9, 2, 3, tau_t2t=None) == [1, 5, 2, 3]  # no edits
    assert after(1, 9, 2, 3, tau_t2t=0.99) == [1, 5, 2, 3]  # e^5 / (e^5 + 9) is 0.94: below the gate
    assert after(1, 9, 2, 3, n_rounds=0) == [1, 7, 7, 3] and len(seen) == 3  # Stage A alone
    assert after(1, 4, 2, 3) == [1, 7, 7, 3] and len(seen) == 3  # without a mask there is no bundle


def test_candidates_filter_and_renormalise_by_hand():
    """The probabilities are 0.5, 0.3 and 0.2."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 4, 3)
    u = torch.tensor([[0.0, 0.624, 0.626, 0.999]])
    two = [0.625, 0.625, 0.375, 0.375]  # of 5/8 and 3/8
    for d, tokens, shares in (
        (Decoding(), [0, 0, 0, 0], [0.5] * 4),
        (Decoding(temperature=1.0, top_p=0.6), [0, 0, 1, 1], two),  # 0.5 < 0.6: the second crosses and stays
        (Decoding(temperature=1.0, top_k=2), [0, 0, 1, 1], two),
        (Decoding(temperature=0.5), [0, 0, 0, 2], [25 / 38] * 3 + [4 / 38]),  # squares: 0.25, 0.09, 0.04
    ):
        token, p = candidates(logits, u, d)
        assert token.tolist() == [tokens] and p[0].tolist() == approx(shares)

    # the first two of three equals share [0, 1/2) and [1/2, 1)
    token, _ = candidates(torch.zeros(1, 3, 3), torch.tensor([[0.0, 0.49, 0.5]]), Decoding(temperature=1.0, top_k=2))
    assert token.tolist() == [[0, 0, 1]]


CONF = [0.9, 0.7, 0.95, 0.6, 0.2]
MASKS = torch.tensor([[True, True, False, True, True]])  # of five positions the third is visible, and never counts


@pytest.mark.parametrize("rule, conf, tau_m2t, at_least, bundle", [
    (by_confidence, CONF, 0.5, 1, [0, 1, 3]),
    (by_confidence, CONF, 0.7, 1, [0]),  # strictly above
    (by_confidence, CONF, 0.99, 1, [0]),  # nothing passes: the single most confident
    (by_confidence, CONF, 0.99, 3, [0, 1, 3]),
    (by_confidence, CONF, 0.0, 9, [0, 1, 3, 4]),
    (by_confidence, CONF, -1, 1, [0, 1, 3, 4]),  # every mask at once
    (by_confidence, [0.2, 0.3, 0.3, 0.3, 0.3], 0.5, 2, [1, 3]),  # of equals the leftmost
    (by_confidence, [0.2, 0.3, 0.3, 0.3 + 1e-6, 0.3], 0.5, 1, [3]),  # however near they are
    # the product is .8, .64, .512, .026: it must be above the gate, but at least one mask is taken
    (from_the_left, [0.8, 0.8, 0.1, 0.8, 0.05], 0.5, 1, [0, 1, 3]),
    (from_the_left, [0.8, 0.8, 0.1, 0.8, 0.05], 1.0, 1, [0]),
    (from_the_left, [0.5, 0.5, 0.1, 0.5, 0.05], 0.25, 1, [0]),  # strictly above
    # 1 - p is .1, .2, .3: .1 + .2 + .2 = .5, and .1 + .2 + .3 + .3 = .9 are at most 1
    (certified, [0.9, 0.8, 0.95, 0.7, 0.2], 0.7, 1, [0, 1, 3]),
    # .3 + .3 + .3 is, and a third mask at .7 is not: 1.2
    (certified, [0.7, 0.7, 0.95, 0.7, 0.2], 0.7, 1, [0, 1]),
    (certified, [0.75, 0.625, 0.95, 0.1, 0.1], 0.7, 1, [0, 1]),  # .25 + .375 + .375 is 1
    (certified, [0.2, 0.4, 0.95, 0.3, 0.1], 0.7, 1, [1]),  # the surest one, though 2 (1 - p) > 1
])  # fmt: skip
def test_selection_by_hand(rule, conf, tau_m2t, at_least, bundle):
    d = Decoding(tau_m2t=tau_m2t, num_to_transfer=at_least)
    assert rule(None, torch.tensor([conf]), MASKS, d).nonzero()[:, 1].tolist() == bundle


@pytest.mark.parametrize("tau_m2t, bundle", [(0.45, [0, 4]), (0.5, [4]), (-1, [0, 1, 3, 4])])
def test_selection_by_entropy_by_hand(tau_m2t, bundle):
    """As many masks as by the paper's rule, but those of the least entropy. The second mask has the highest
    probability, but a long tail, so the first and the last mask have less entropy."""
    rows = [[0.5, 0.5], [0.52, *[0.04] * 12], [1.0], [1 / 13] * 13, [0.4, 0.6]]
    p = torch.tensor([row + [0.0] * (13 - len(row)) for row in rows])[None]
    d, conf = Decoding(tau_m2t=tau_m2t), p.amax(-1).index_fill(1, torch.tensor(4), 0.3)
    assert by_entropy(p.log(), conf, MASKS, d).nonzero()[:, 1].tolist() == bundle


@pytest.mark.parametrize("window", [0, 3])
def test_a_left_to_right_model_takes_one_forward_a_token(window, monkeypatch):
    model = tiny_model(block_length=1, n_rounds=1, window=window)
    d = replace(SETTINGS["left"], gen_length=9, eos_early_stop=False)
    texts = [prompt(n, n) for n in (1, 4, 7)]
    for out in assert_as_specified(model, texts, d):
        assert out.nfe == dict(full=9, partial=0, refresh=0)

    # three prompts are read, and then nine tokens of all rows
    calls = []
    prefix = model.prefix
    monkeypatch.setattr(model, "prefix", lambda *given: calls.append(1) or prefix(*given))
    generate(model, texts, d)
    assert len(calls) == 3 + 9


# --- how a block ends
def test_a_block_that_never_ends_is_left_with_a_warning(monkeypatch):
    """The released loop hangs if every position's best candidate is the mask. Ours stops, and says so."""
    model = tiny_model()
    logits = torch.zeros(1, 8, model.cfg.vocab_size)
    logits[..., MASK] = 9.0
    monkeypatch.setattr(model, "logits", lambda h: logits.expand(len(h), -1, -1))
    out = assert_as_specified(model, [prompt(3)], Decoding(gen_length=5))[0]
    assert out.tokens == [MASK] * 5 and "no step fills them" in out.warning
    assert out.nfe["full"] == 1  # greedy, a step that changes nothing is the last; a draw may be another one
    monkeypatch.setattr(sample, "MAX_STEPS", 6)
    out = generate(model, [prompt(3)], Decoding(gen_length=5, temperature=0.01))[0]
    assert out.nfe["full"] == 6 + 8 and out.warning


# --- the command line
TRAINED = replace(PAPER, n_rounds=2)


@pytest.mark.parametrize("kind, argv, expected", [
    # the settings of the checkpoint's Stage B; those of the released model if it has none, or is off
    ("paper", "", TRAINED),
    ("paper", "--n_rounds 0", RELEASED),
    ("converted", "", RELEASED),
    ("causal", "", CAUSAL),
    # a flag changes a field, and nothing else
    ("paper", "--tau_t2t none --select left", replace(TRAINED, tau_t2t=None, select="left")),
    ("causal", "--tau_m2t 0.5 --beam 4", replace(CAUSAL, tau_m2t=0.5, beam=4)),
    ("a2d", "", SETTINGS["a2d"]),
    ("causal", "--n_rounds 0 --select left", replace(RELEASED, select="left")),
    # what is drawn is not drawn again, unless that is asked for
    ("paper", "--temperature 1", replace(TRAINED, temperature=1.0, tau_t2t=None)),
    ("paper", "--temperature 1 --tau_t2t 0", replace(TRAINED, temperature=1.0)),
    # a flag that the step does not read is refused
    ("causal", "--select left", "causal Stage B does not read it, the paper's step does"),
    ("paper", "--beam 2", "paper Stage B does not read it, causal Stage B does"),
    ("causal", "--n_rounds 0 --beam 2", "Stage A does not read it"),
    ("paper", "--top_k 4", "nothing without a temperature"),
    ("paper", "--tau_m2t all --select left", "--tau_m2t all fills all masks"),
    ("paper", "--n_rounds 3", "markers for 0..2 rounds"),
    ("causal", "--beam 4 --temperature 1", "leave out --temperature"),
    ("paper", "--temperature 1e-9", "too small to divide by"),
])  # fmt: skip
def test_what_a_decode_defaults_to(kind, argv, expected):
    model = tiny_model(n_rounds=1, stage_b="causal") if kind == "causal" else tiny_model()
    if kind in ("converted", "a2d"):
        model.markers.data.zero_()
        model.cfg.decoder = "a2d" if kind == "a2d" else "llada"
    args = sample.build_parser().parse_args(argv.split())
    if isinstance(expected, Decoding):
        assert decoding_of(args, model) == expected
    else:
        with pytest.raises(Mistake, match=expected):
            decoding_of(args, model)


def test_what_a_run_says_that_it_cost_and_ran_by():
    nfe = dict(full=6, partial=4, refresh=1)
    forwards = "forwards: 6 full + 4 partial x 0.375 + 1 refresh = 8.5"
    assert [sample.cost(n, nfe, 3 / 8) for n in (0, 1, 5)] == [
        f"0 tokens; {forwards}", f"1 token; {forwards}, 8.500 per token", f"5 tokens; {forwards}, 1.700 per token",
    ]  # fmt: skip
    paper, causal = tiny_model(), tiny_model(stage_b="causal", n_rounds=1)
    for model, d, says in (
        (paper, TRAINED, "Stage B, n = 2 of 4, K = 2, gates 0.7 and 0"),
        (paper, replace(RELEASED, select="left"), "Stage A alone, gates 0.7 and 0.5, selected by left"),
        (paper, replace(TRAINED, tau_m2t=ALL, temperature=0.5), "K = 2, all at once, drawn at temperature 0.5"),
        (causal, replace(CAUSAL, tau_m2t=0.5, beam=2), "causal Stage B, n = 2 of 4, K = 1, the longest run above 0.5"),
        (causal, replace(CAUSAL, n_rounds=0, tau_m2t=1.0), "Stage A alone, gates 1 and none"),
    ):
        assert says in sample.what_ran(Path("x"), model, d)


def test_ms_a_token(tmp_path, monkeypatch, capsys):
    """The time of decoding is divided by the tokens that were written, filled holes among them."""
    save_model(tiny_model(max_len=264), tmp_path)  # room for the prompt of 3, and 256 more, in blocks of 8
    clock = iter([1.0, 3.1])
    monkeypatch.setattr(sample.time, "perf_counter", lambda: next(clock))
    prompt_ids = f"5,{MASK},9"
    out = caller(sample, monkeypatch, capsys)("--ckpt", tmp_path, "--prompt_ids", prompt_ids, "--device", "cpu")
    n = int(re.search(r"^\[(\d+) tokens", out, re.M)[1])
    assert f"{2100 / n:.1f} ms a token" in out


def test_weights_whose_logits_overflow_are_said(tmp_path, monkeypatch, capsys):
    model = tiny_model()
    model.norm_f.weight.data.fill_(3e38)
    save_model(model, tmp_path)
    fails = caller(sample, monkeypatch, capsys).fails
    for drawn in ([], ["--temperature", 1]):
        line = fails("--ckpt", tmp_path, "--prompt_ids", "5,9", "--device", "cpu", *drawn)
        assert "logits are not finite" in line
