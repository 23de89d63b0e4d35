"""Decoding: cached = naive, a row = itself alone, the step by hand. `pytest tests/test_sample.py`"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import EOS, MASK, approx, random_ids, tiny_model

import sample
from data import byte_tokenizer, generator
from sample import Decoding, Stream, candidates, generate, select_bundle

PROMPTS = {"short": 3, "one_block": 8, "inside_a_block": 13, "two_blocks": 16}
GATES = [(0.7, 0.5), (0.3, 0.0), (0.9, None)]


def prompt(n: int, seed: int = 0) -> list[int]:
    return random_ids(1, n, 100 + seed)[0].tolist()


@pytest.mark.parametrize("n_rounds", [0, 1, 2])
@pytest.mark.parametrize("gates", GATES, ids=str)
def test_cached_equals_naive(n_rounds, gates):
    """Tokens, forwards and every step, for prompts shorter than, equal to and ending inside a block."""
    model = tiny_model()
    d = Decoding(gen_length=29, tau_m2t=gates[0], tau_t2t=gates[1], max_post_steps=3, n_rounds=n_rounds)
    for n in PROMPTS.values():
        cached, naive = (generate(model, [prompt(n)], d, use_cache=c, trace=True)[0] for c in (True, False))
        assert cached.tokens == naive.tokens and len(cached.tokens) > 0
        assert cached.nfe == naive.nfe
        for a, b in zip(cached.steps, naive.steps, strict=True):
            assert (a["before"], a["after"], a["bundle"]) == (b["before"], b["after"], b["bundle"])
            assert a["conf"] == approx(b["conf"], abs=2e-4)


@pytest.mark.parametrize("n_rounds", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_equals_naive_with_noise_and_marks_on_visible_tokens(n_rounds, temperature):
    model = tiny_model(noise=True)
    d = Decoding(gen_length=29, tau_m2t=0.4, tau_t2t=0.2, max_post_steps=3, n_rounds=n_rounds, temperature=temperature)
    for e in (d, replace(d, mark_visible=True)):
        for n in PROMPTS.values():
            cached, naive = (generate(model, [prompt(n)], e, use_cache=c, trace=True)[0] for c in (True, False))
            assert (cached.tokens, cached.nfe) == (naive.tokens, naive.nfe)
        edits = [edit for s in cached.steps for edit in s["edit"]]
        assert edits and all(edit["at"] >= n for edit in edits)  # never the prompt


def test_joint_revision_marks_what_stage_a_would_edit_and_nothing_else():
    """Block of 4: position 0 is prompt, 1 a mask, 2 and 3 visible; Stage A disagrees with all of the last three."""
    marked = []

    class Engine:
        cfg = SimpleNamespace(mask_id=9)

        def stage_a(self, z):
            return z, 5 * torch.nn.functional.one_hot(torch.tensor([[7, 7, 7, 3]]), 10).float()

        def stage_b(self, h, marks, u):
            marked.append(marks.tolist())
            return 5 * torch.nn.functional.one_hot(torch.tensor([[5, 5, 5, 5]]), 10).float()

    z, is_prompt = torch.tensor([[1, 9, 2, 3]]), torch.tensor([[True, False, False, False]])
    d = Decoding(mark_visible=True, tau_t2t=0.5)
    s = sample.step(Engine(), z, is_prompt, True, torch.zeros(1, 3, 4), d)
    assert marked == [[[False, True, True, False]]]  # the mask, and the one visible token that Stage A would edit
    assert s["after"].tolist() == [[1, 5, 5, 3]] and s["edited"].tolist() == [[False, False, True, False]]
    plain = sample.step(Engine(), z, is_prompt, True, torch.zeros(1, 3, 4), replace(d, mark_visible=False))
    assert marked[1] == [[False, True, False, False]] and plain["after"].tolist() == [[1, 5, 5, 5]]
    off = sample.step(Engine(), z, is_prompt, True, torch.zeros(1, 3, 4), replace(d, tau_t2t=None))
    assert marked[2] == [[False, True, False, False]] and off["after"].tolist() == [[1, 5, 2, 3]]


def test_a_prompt_of_many_blocks_is_read_whole():
    """Longer than twice the room that a cache starts with."""
    for n in (8 * 17, 8 * 40 + 3):
        d = Decoding(gen_length=9, n_rounds=2)
        cached, naive = (generate(tiny_model(), [prompt(n)], d, use_cache=c)[0] for c in (True, False))
        assert cached.tokens == naive.tokens and cached.nfe == naive.nfe


def test_the_cases_above_exercise_commit_forwards_edits_and_disagreement():
    """The equality would be hollow if nothing happened: this model edits, commits and lets Stage B overrule Stage A."""
    d = Decoding(gen_length=29, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3)
    outputs = generate(tiny_model(), [prompt(n) for n in PROMPTS.values()], d, trace=True)
    steps = [s for o in outputs for s in o.steps]
    assert sum(o.nfe["commit"] for o in outputs) > 0
    assert any(s["edit"] for s in steps) and any(len(s["bundle"]) > 1 for s in steps)
    assert any(f["token"] != f["token_a"] for s in steps for f in s["fill"])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("n_rounds", [0, 1, 2])
def test_a_row_of_a_batch_equals_the_prompt_alone(n_rounds, temperature):
    model = tiny_model()
    d = Decoding(gen_length=30, tau_m2t=0.4, tau_t2t=0.6, max_post_steps=2, n_rounds=n_rounds, temperature=temperature)
    prompts = [prompt(n, i) for i, n in enumerate((3, 8, 13, 16, 21))]
    together = generate(model, prompts, d, seed=4, trace=True)
    for p, row in zip(prompts, together, strict=True):
        alone = generate(model, [p], d, seed=4, trace=True)[0]
        assert (alone.tokens, alone.nfe) == (row.tokens, row.nfe)
        assert [s["after"] for s in alone.steps] == [s["after"] for s in row.steps]


def test_equal_prompts_sample_different_texts_and_a_seed_repeats_them():
    model, d = tiny_model(), Decoding(gen_length=16, temperature=1.0)
    first, second = generate(model, [prompt(5), prompt(5)], d, seed=1)
    assert first.tokens != second.tokens
    assert [o.tokens for o in generate(model, [prompt(5), prompt(5)], d, seed=1)] == [first.tokens, second.tokens]


def test_without_marker_stage_b_writes_what_stage_a_would():
    model, d = tiny_model(), Decoding(gen_length=24, tau_m2t=0.3, tau_t2t=0.5)
    off = generate(model, [prompt(5)], replace(d, n_rounds=0))[0]
    marked = generate(model, [prompt(5)], d)[0]
    unmarked = generate(model, [prompt(5)], replace(d, marker=False))[0]
    from_a = generate(model, [prompt(5)], replace(d, fill_from="A", edit_from="A"))[0]
    assert unmarked.tokens == off.tokens == from_a.tokens != marked.tokens
    assert unmarked.nfe["partial"] > 0 == off.nfe["partial"]


def test_prompt_is_never_edited_and_partial_passes_are_counted():
    model, d = tiny_model(), Decoding(gen_length=19, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=4, n_rounds=2)
    out = generate(model, [prompt(13)], d, trace=True)[0]
    assert all(e["at"] >= 13 for s in out.steps for e in s["edit"])
    coordinated = sum(bool(s["bundle"]) for s in out.steps)
    blocks = len({s["start"] for s in out.steps})
    assert out.nfe["full"] == len(out.steps)
    assert out.nfe["partial"] == 2 * coordinated + (blocks - 1)  # K a step, and K - 1 for each block that is read again


def test_candidates_filter_and_renormalise_by_hand():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 4, 3)
    u = torch.tensor([[0.0, 0.624, 0.626, 0.999]])
    token, p = candidates(logits, u, Decoding(temperature=1.0, top_p=0.6))  # 0.5 < 0.6: the second crosses and stays
    assert token.tolist() == [[0, 0, 1, 1]]
    assert p[0].tolist() == approx([0.625, 0.625, 0.375, 0.375])
    token, p = candidates(logits, u, Decoding(temperature=1.0, top_k=1))
    assert token.tolist() == [[0, 0, 0, 0]] and p[0].tolist() == approx([1.0] * 4)
    token, p = candidates(logits, u, Decoding(temperature=0.5))  # squares: 0.25, 0.09, 0.04 of 0.38
    assert token.tolist() == [[0, 0, 0, 2]] and p[0, 0] == approx(0.25 / 0.38)
    token, p = candidates(logits, u, Decoding())
    assert token.tolist() == [[0, 0, 0, 0]] and p[0].tolist() == approx([0.5] * 4)


def test_sampled_frequencies_match_the_distribution():
    p = torch.tensor([0.1, 0.4, 0.05, 0.45])
    n = 40_000
    u = torch.rand(1, n, generator=generator("frequencies"))
    token, _ = candidates(p.log().expand(1, n, 4), u, Decoding(temperature=1.0))
    share = token[0].bincount(minlength=4) / n
    assert ((share - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all()


def bundle_of(d: Decoding) -> list[int]:
    conf = torch.tensor([[0.9, 0.7, 0.6, 0.2, 0.95]])
    masked = torch.tensor([[True, True, True, True, False]])
    # entropies rise from position 3 to position 0, against the confidences
    spread = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0])
    logits = torch.stack([torch.zeros(5), *[-10 / spread] * 3], dim=-1)[None]
    return select_bundle(conf, logits, masked, d)[0].nonzero()[:, 0].tolist()


def test_selection_by_hand():
    assert bundle_of(Decoding(tau_m2t=0.5)) == [0, 1, 2]
    assert bundle_of(Decoding(tau_m2t=0.7)) == [0]  # strictly above; the visible position never counts
    assert bundle_of(Decoding(tau_m2t=0.99)) == [0]  # nothing passes: the single most confident
    assert bundle_of(Decoding(tau_m2t=0.99, num_to_transfer=3)) == [0, 1, 2]
    assert bundle_of(Decoding(tau_m2t=0.0, num_to_transfer=9)) == [0, 1, 2, 3]
    assert bundle_of(Decoding(select="all")) == [0, 1, 2, 3]
    assert bundle_of(Decoding(select="entropy", tau_m2t=0.65)) == [2, 3]  # two, the least entropic


def test_a_block_that_never_ends_is_left_with_a_warning(monkeypatch):
    """The released loop hangs when mask is every position's best candidate; ours stops and says so."""
    model = tiny_model()
    logits = torch.zeros(1, 8, model.cfg.vocab_size)
    logits[..., MASK] = 9.0
    monkeypatch.setattr(model, "head", lambda h: logits.expand(len(h), -1, -1))
    out = generate(model, [prompt(3)], Decoding(gen_length=5))[0]
    assert out.tokens == [MASK] * 5 and "never" in out.warning
    monkeypatch.setattr(sample, "MAX_STEPS", 6)
    out = generate(model, [prompt(3)], Decoding(gen_length=5, temperature=0.01))[0]
    assert out.nfe["full"] == 6 and out.warning


def test_eos_cuts_the_answer_and_may_stop_it(monkeypatch):
    model = tiny_model()
    logits = torch.zeros(1, 8, model.cfg.vocab_size)
    logits[..., 5] = 9.0
    logits[0, 6, EOS] = 20.0
    monkeypatch.setattr(model, "head", lambda h: logits.expand(len(h), -1, -1))
    runs_on = generate(model, [prompt(3)], Decoding(gen_length=21))[0]
    stops = generate(model, [prompt(3)], Decoding(gen_length=21, eos_early_stop=True))[0]
    assert runs_on.tokens == stops.tokens == [5, 5, 5, EOS]
    assert runs_on.nfe["full"] == 3 * stops.nfe["full"]  # three blocks, one block


def test_stream_never_prints_half_a_character(capsys):
    tokens = byte_tokenizer().encode("aé€")
    stream = Stream(byte_tokenizer())
    shown = []
    for n in range(1, len(tokens) + 1):
        stream(0, SimpleNamespace(tokens=tokens[:n]))
        shown.append(capsys.readouterr().out)
    assert shown == ["a", "", "é", "", "", "€"]
