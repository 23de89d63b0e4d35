"""Decoding: generate = the specification, a row = itself alone, the step by hand. `pytest tests/test_sample.py`"""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import EOS, MASK, approx, assert_same, command_line, random_ids, refused, tiny_config, tiny_model

import cache
import sample
from checkpoint import save_model
from lib import show
from lib.tokenizer import byte_tokenizer
from lib.util import generator
from sample import Decoding, Output, candidates, generate, generate_one, select_bundle

LENGTHS = [3, 8, 13, 16, 21]  # shorter than a block of 8, one block, inside a block, two blocks, inside the third
GATES = [(0.7, 0.5), (0.3, 0.0), (0.9, None), (-1, 0.3)]


def prompt(n: int, seed: int = 0, high: int = MASK) -> list[int]:
    return random_ids(1, n, 100 + seed, high)[0].tolist()


def assert_equal_to_the_specification(model, prompts: list[list[int]], d: Decoding) -> list[Output]:
    """Tokens, forwards of each kind and the block before every forward: cached, batched rows against one row alone."""
    outputs = generate(model, prompts, d, trace=True)
    for p, out in zip(prompts, outputs, strict=True):
        tokens, nfe, seen = generate_one(model, p, d)
        assert_same([s["before"] for s in out.steps], seen, "generate", "generate_one")
        assert (out.tokens, out.nfe) == (tokens, nfe)
    return outputs


# --- the specification


@pytest.mark.parametrize("n_rounds", [0, 1, 2])
@pytest.mark.parametrize("gates", GATES, ids=str)
def test_generate_equals_the_specification(n_rounds, gates):
    d = Decoding(gen_length=19, tau_m2t=gates[0], tau_t2t=gates[1], max_post_steps=3, n_rounds=n_rounds)
    outputs = assert_equal_to_the_specification(tiny_model(), [prompt(n) for n in LENGTHS], d)
    assert all(0 < len(out.tokens) <= 19 for out in outputs)


@pytest.mark.parametrize("seed", range(24))
def test_generate_equals_the_specification_whatever_the_settings(seed):
    """Prompts may hold masks, and blocks may be left with masks or oscillate."""
    draw = random.Random(seed)
    d = Decoding(
        gen_length=draw.randint(1, 18),
        tau_m2t=draw.choice([-1, 0.0, 0.3, 0.5, 0.7, 0.95, 1.0]),
        tau_t2t=draw.choice([None, 0.0, 0.3, 0.5, 0.9]),
        max_post_steps=draw.choice([0, 1, 3, 16]),
        num_to_transfer=draw.choice([1, 1, 2, 3, 20]),
        eos_early_stop=draw.random() < 0.5,
        n_rounds=seed % 3,
    )
    order = draw.choice(["surest", "leftmost"])
    B, n_last, std = draw.choice([1, 3, 4, 8]), draw.randint(1, 4), draw.choice([0.15, 0.25, 0.35])
    # two tokens at least, and the first of them is no mask: see the exception below
    prompts = [prompt(1, seed + 1) + prompt(n, seed, high=MASK + 2) for n in draw.sample(range(1, 19), 3)]
    assert_equal_to_the_specification(tiny_model(seed, std, block_length=B, n_last=n_last, order=order), prompts, d)


def test_a_prompt_of_many_blocks_is_read_whole():
    """Longer than the room that a cache starts with, several times."""
    d = Decoding(gen_length=9, n_rounds=2)
    assert_equal_to_the_specification(tiny_model(), [prompt(n) for n in (8 * 40 + 3, 8 * 17, 2)], d)


def test_the_cases_above_exercise_commit_forwards_edits_and_disagreement():
    """The equality would be hollow if nothing happened: this model edits, commits and lets Stage B overrule Stage A."""
    d = Decoding(gen_length=29, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3)
    outputs = generate(tiny_model(), [prompt(n) for n in LENGTHS], d, trace=True)
    steps = [s for o in outputs for s in o.steps]
    assert sum(o.nfe["commit"] for o in outputs) > 0
    assert any(s["edit"] for s in steps) and any(len(s["bundle"]) > 1 for s in steps)
    assert any(f["token"] != f["token_a"] for s in steps for f in s["fill"])


@pytest.mark.parametrize("n", [3, 8, 13])
def test_the_stated_exception_is_an_exact_tie(n):
    """A prompt of masks and nothing else: attention over equal values is that value, so all positions of a block have
    equal logits, and which mask is filled first is a matter of rounding. Where a row of a batch leaves the row alone or
    the specification, it leaves them at such a tie, between positions of equal confidence."""
    d, ties = Decoding(gen_length=16, tau_m2t=1.0, tau_t2t=None, n_rounds=0), 0
    for seed in range(2):
        model = tiny_model(seed)
        together = generate(model, [[MASK] * n, prompt(13), prompt(5)], d, trace=True)[0]
        assert together.steps[0]["conf"] == approx([together.steps[0]["conf"][0]] * 8, abs=1e-4)
        alone = [s["before"] for s in generate(model, [[MASK] * n], d, trace=True)[0].steps]
        for states in (alone, generate_one(model, [MASK] * n, d)[2]):
            apart = [i for i, (s, z) in enumerate(zip(together.steps, states, strict=False)) if s["before"] != z]
            if apart:
                step, after = together.steps[apart[0] - 1], states[apart[0]]
                (here,), (there,) = (
                    [i for i, t in enumerate(z) if t != step["before"][i]] for z in (step["after"], after)
                )
                assert here != there and step["conf"][here] == approx(step["conf"][there], abs=1e-4)
                ties += 1
    if not ties:
        pytest.skip("this machine rounds every tie alike")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("n_rounds", [0, 1, 2])
def test_a_row_of_a_batch_equals_the_prompt_alone(n_rounds, temperature):
    model = tiny_model()
    d = Decoding(gen_length=30, tau_m2t=0.4, tau_t2t=0.6, max_post_steps=2, n_rounds=n_rounds, temperature=temperature)
    prompts = [prompt(n, i) for i, n in enumerate(LENGTHS)]
    together = generate(model, prompts, d, seed=4, trace=True)
    for p, row in zip(prompts, together, strict=True):
        alone = generate(model, [p], d, seed=4, trace=True)[0]
        assert (alone.tokens, alone.nfe) == (row.tokens, row.nfe)
        for a, b in zip(alone.steps, row.steps, strict=True):
            assert (a["start"], a["before"], a["after"], a["bundle"]) == (
                b["start"],
                b["before"],
                b["after"],
                b["bundle"],
            )
            assert a["conf"] == approx(b["conf"], abs=2e-4)


def test_a_trace_changes_nothing():
    d = Decoding(gen_length=30, tau_m2t=0.4, tau_t2t=0.6, temperature=0.8)
    plain, traced = (generate(tiny_model(), [prompt(3), prompt(13)], d, trace=t) for t in (False, True))
    assert [(o.tokens, o.nfe) for o in plain] == [(o.tokens, o.nfe) for o in traced]
    assert not plain[0].steps and len(traced[0].steps) == traced[0].nfe["full"]


def test_equal_prompts_sample_different_texts_and_a_seed_repeats_them():
    model, d = tiny_model(), Decoding(gen_length=16, temperature=1.0)
    first, second = generate(model, [prompt(5), prompt(5)], d, seed=1)
    assert first.tokens != second.tokens
    assert [o.tokens for o in generate(model, [prompt(5), prompt(5)], d, seed=1)] == [first.tokens, second.tokens]


def test_with_zero_markers_stage_b_writes_what_stage_a_would():
    model, d = tiny_model(), Decoding(gen_length=24, tau_m2t=0.3, tau_t2t=0.5)
    marked = generate(model, [prompt(5)], d)[0]
    off = generate(model, [prompt(5)], replace(d, n_rounds=0))[0]
    model.markers.data.zero_()
    unmarked = generate(model, [prompt(5)], d)[0]
    assert unmarked.tokens == off.tokens != marked.tokens
    assert unmarked.nfe["partial"] > 0 == off.nfe["partial"]


def test_prompt_is_never_edited_and_partial_passes_are_counted():
    d = Decoding(gen_length=19, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=4, n_rounds=2)
    out = generate(tiny_model(), [prompt(13)], d, trace=True)[0]
    assert all(e["at"] >= 13 for s in out.steps for e in s["edit"])
    coordinated = sum(bool(s["bundle"]) for s in out.steps)
    blocks = len({s["start"] for s in out.steps})
    assert out.nfe["full"] == len(out.steps)
    assert out.nfe["partial"] == 2 * coordinated + (blocks - 1)  # K a step, and K - 1 for each block that is read again


def test_a_step_may_count_a_fraction_of_a_partial_forward():
    """A step whose Stage B runs the bundle's positions alone says so, and that share of a block is what is counted."""

    def sparse(*args) -> dict:
        s = sample.step(*args)
        return s | dict(partial=s["bundle"].float().mean(-1))

    model, d = tiny_model(), Decoding(gen_length=13, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3)
    whole = generate(model, [prompt(3)], d, trace=True)[0]
    model.step = sparse  # as an extension's adapter brings its own
    part = generate(model, [prompt(3)], d)[0]
    assert part.tokens == whole.tokens and part.nfe["full"] == whole.nfe["full"]
    assert part.nfe["partial"] == sum(len(s["bundle"]) for s in whole.steps) / 8 < whole.nfe["partial"]
    assert isinstance(whole.nfe["partial"], int)


def test_a_finished_block_costs_no_pass_of_its_own():
    """Blocks of 5, 8 and 8 tokens, one a step. What closes a block goes beside the next one's first forward: two passes
    fewer, whether that is a forward that finds nothing to change or a commit; and all are read all the same."""
    model, d = tiny_model(), Decoding(gen_length=21, tau_m2t=1.0, tau_t2t=1.0, n_rounds=0)  # no edit is above 1
    (out,) = generate(model, [prompt(3)], d)
    assert (out.nfe["full"], out.nfe["commit"], out.passes, out.blocks) == (21 + 3, 0, 21 + 1, 21 + 3)
    (out,) = generate(model, [prompt(3)], replace(d, tau_t2t=None))
    assert (out.nfe["full"], out.nfe["commit"], out.passes, out.blocks) == (21, 2, 21, 21 + 2)
    # three rows in step share every pass; a row out of step is waited for, and then only a commit carries a next block
    assert [o.passes for o in generate(model, [prompt(3, i) for i in range(3)], d)] == [21 + 1] * 3
    assert generate(model, [prompt(3), prompt(5)], d)[0].passes == 21 + 3
    assert generate(model, [prompt(3), prompt(5)], replace(d, tau_t2t=None))[0].passes == 21


def test_what_was_read_ahead_of_an_edit_is_thrown_away():
    d = Decoding(gen_length=29, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3, eos_early_stop=False)
    for out in (generate(tiny_model(), [prompt(n)], d)[0] for n in LENGTHS):
        closings = out.nfe["full"] + out.nfe["commit"] - out.passes  # blocks but the last, each closed by a shared pass
        assert 0 < closings <= 4 and out.blocks > out.passes + closings


# --- one step


def test_a_step_by_hand():
    """Block of 4: position 0 is prompt, 1 a mask, 2 and 3 visible. Stage A disagrees with 0 and 2, Stage B with all of
    them. The bundle is Stage A's choice, every token written is Stage B's, the prompt stays."""
    seen = []

    class Engine:
        cfg = SimpleNamespace(mask_id=9, order="surest")

        def stage_a(self, z):
            return z, 5 * torch.nn.functional.one_hot(torch.tensor([[7, 7, 7, 3]]), 10).float()

        def stage_b(self, h, bundle):
            seen.append(bundle.tolist())
            return 5 * torch.nn.functional.one_hot(torch.tensor([[5, 5, 5, 5]]), 10).float()

    z, is_prompt = torch.tensor([[1, 9, 2, 3]]), torch.tensor([[True, False, False, False]])

    def after(z, any_masked=True, **settings) -> list[int]:
        d = Decoding(**dict(tau_t2t=0.5) | settings)
        return sample.step(Engine(), z, is_prompt, any_masked, torch.zeros(1, 3, 4), d)["after"][0].tolist()

    assert after(z) == [1, 5, 5, 5] and seen == [[[False, True, False, False]]]
    assert after(z, tau_t2t=None) == [1, 5, 2, 3]  # no edits
    assert after(z, tau_t2t=0.99) == [1, 5, 2, 3]  # 5 / (5 + 9) of the mass in logits is 0.94: below the gate
    assert after(z, n_rounds=0) == [1, 7, 7, 3] and len(seen) == 3  # Stage A alone
    assert after(torch.tensor([[1, 4, 2, 3]]), any_masked=False) == [1, 7, 7, 3]  # without a mask there is no bundle
    assert after(torch.tensor([[1, 4, 2, 3]])) == [1, 7, 7, 3]  # nor where only another row has one


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


def bundle_of(conf: list[float], order: str = "surest", **settings) -> list[int]:
    """Of five positions the last is visible."""
    masked = torch.tensor([[True, True, True, True, False]])
    return select_bundle(torch.tensor([conf]), masked, Decoding(**settings), order)[0].nonzero()[:, 0].tolist()


def test_selection_by_hand():
    conf = [0.9, 0.7, 0.6, 0.2, 0.95]
    assert bundle_of(conf, tau_m2t=0.5) == [0, 1, 2]
    assert bundle_of(conf, tau_m2t=0.7) == [0]  # strictly above; the visible position never counts
    assert bundle_of(conf, tau_m2t=0.99) == [0]  # nothing passes: the single most confident
    assert bundle_of(conf, tau_m2t=0.99, num_to_transfer=3) == [0, 1, 2]
    assert bundle_of(conf, tau_m2t=0.0, num_to_transfer=9) == [0, 1, 2, 3]
    assert bundle_of(conf, tau_m2t=-1) == [0, 1, 2, 3]  # every mask at once
    assert bundle_of([0.2, 0.3, 0.3, 0.3, 0.3], tau_m2t=0.5, num_to_transfer=2) == [1, 2]  # of equals the leftmost


def test_from_the_left_the_product_has_to_pass():
    """.9, .9 x .7 = .63, .63 x .6 = .378, .378 x .9 = .3402"""
    conf = [0.9, 0.7, 0.6, 0.9, 0.95]
    assert bundle_of(conf, "leftmost", tau_m2t=0.37) == [0, 1, 2]
    assert bundle_of(conf, "leftmost", tau_m2t=0.379) == [0, 1]  # though the fourth is as sure as the first
    assert bundle_of(conf, "leftmost", tau_m2t=1.0) == [0]  # left to right, one at a time
    assert bundle_of(conf, "leftmost", tau_m2t=1.0, num_to_transfer=2) == [0, 1]
    assert bundle_of(conf, "leftmost", tau_m2t=-1) == [0, 1, 2, 3]

    # a visible token takes no part in the product
    masked = torch.tensor([[False, True, True, True]])
    picked = select_bundle(torch.tensor([[0.01, 0.7, 0.6, 0.5]]), masked, Decoding(tau_m2t=0.4), "leftmost")
    assert picked.tolist() == [[False, True, True, False]]


# --- how a block ends


def test_a_block_that_never_ends_is_left_with_a_warning(monkeypatch):
    """The released loop hangs when mask is every position's best candidate; ours stops and says so."""
    model = tiny_model()
    logits = torch.zeros(1, 8, model.cfg.vocab_size)
    logits[..., MASK] = 9.0
    monkeypatch.setattr(model, "head", lambda h: logits.expand(len(h), -1, -1))
    out = assert_equal_to_the_specification(model, [prompt(3)], Decoding(gen_length=5))[0]
    assert out.tokens == [MASK] * 5 and "never" in out.warning
    monkeypatch.setattr(cache, "MAX_STEPS", 6)
    out = generate(model, [prompt(3)], Decoding(gen_length=5, temperature=0.01))[0]
    assert out.nfe["full"] == 6 and out.warning


def test_a_block_that_goes_round_in_circles_is_left_after_max_steps(monkeypatch):
    monkeypatch.setattr(cache, "MAX_STEPS", 6)
    monkeypatch.setattr(sample, "MAX_STEPS", 6)
    model, turn = tiny_model(), iter(range(10_000))

    def head(h):  # the best token of every position is another one each time
        return 9.0 * torch.nn.functional.one_hot(torch.full(h.shape[:2], next(turn) % 5), model.cfg.vocab_size)

    monkeypatch.setattr(model, "head", head)
    d = Decoding(gen_length=10, n_rounds=0, tau_t2t=0.0, max_post_steps=99)
    (out,) = generate(model, [prompt(3)], d)
    turn = iter(range(10_000))
    tokens, nfe, _ = generate_one(model, prompt(3), d)
    assert nfe == dict(full=12, partial=0, commit=1) and nfe["full"] == out.nfe["full"] and not out.warning
    assert len(tokens) == len(out.tokens) == 10


def test_eos_cuts_the_answer_and_may_stop_it(monkeypatch):
    model = tiny_model()
    logits = torch.zeros(1, 8, model.cfg.vocab_size)
    logits[..., 5] = 9.0
    logits[0, 6, EOS] = 20.0
    monkeypatch.setattr(model, "head", lambda h: logits.repeat(len(h), h.shape[1] // 8, 1))
    runs_on, stops = (
        assert_equal_to_the_specification(model, [prompt(3)], Decoding(gen_length=21, eos_early_stop=e))[0]
        for e in (False, True)
    )
    assert runs_on.tokens == stops.tokens == [5, 5, 5, EOS]
    assert runs_on.nfe["full"] == 3 * stops.nfe["full"]  # three blocks, one block


# --- the command line


def test_a_stream_never_prints_half_a_character(tmp_path, monkeypatch, capsys):
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257, n_rounds=1), tmp_path)
    shown, tokens = [], byte_tokenizer().encode("aé€")

    def one_token_a_block(model, prompts, d, seed, trace, on_block):
        shown.append(capsys.readouterr().out)
        for n in range(1, len(tokens) + 1):
            output = Output(tokens[:n], dict(full=n, partial=0, commit=0))
            on_block(0, output)
            shown.append(capsys.readouterr().out)
        return [output]

    monkeypatch.setattr(sample, "generate", one_token_a_block)
    code, rest, err = command_line(sample, monkeypatch, capsys, "--ckpt", tmp_path, "--prompt", "x", "--device", "cpu")
    assert code == 0, err
    assert "".join(shown) == "xaé€" and "\ufffd" not in "".join(shown) + rest
    assert shown[-6:] == ["a", "", "é", "", "", "€"] or shown[-6:] == ["xa", "", "é", "", "", "€"]


def test_a_checkpoint_without_its_tokenizer_decodes_ids_and_says_what_text_needs(tmp_path, monkeypatch, capsys):
    """A released checkpoint may come without tokenizer.json: its ids still decode."""
    save_model(tiny_model(tokenizer="bpe"), tmp_path)
    run = ["--ckpt", tmp_path, "--gen_length", 12, "--device", "cpu"]
    code, out, err = command_line(sample, monkeypatch, capsys, *run, "--prompt_ids", "5,9,12", "--json")
    assert code == 0, err
    record = json.loads(out)
    d = Decoding(gen_length=12, tau_t2t=0.0, n_rounds=2)
    assert record["text"] is None and record["tokens"] == generate_one(tiny_model(), [5, 9, 12], d)[0]
    code, out, err = command_line(sample, monkeypatch, capsys, *run, "--prompt_ids", "5,9,12", "--watch")
    assert code == 0 and str(record["tokens"]) in out, err
    assert "no tokenizer" in refused(sample, monkeypatch, capsys, *run, "--prompt", "text")


def settled(model, *argv: str) -> Decoding:
    return sample.settle_decoding(show.build_parser("", sample.MODES).parse_args(argv), model)


def test_edits_are_ungated_where_stage_b_is_on_unless_the_gate_is_given():
    trained, converted = tiny_model(), tiny_model()
    converted.markers.data.zero_()
    # a Decoding made by hand has the same defaults
    assert settled(trained) == Decoding(n_rounds=2) and Decoding(n_rounds=2).tau_t2t == 0.0
    assert settled(converted) == settled(trained, "--n_rounds", "0") == Decoding(n_rounds=0)
    assert (Decoding(n_rounds=0).tau_m2t, Decoding(n_rounds=0).tau_t2t) == (0.7, 0.5)
    assert settled(trained, "--mode", "s") == Decoding(tau_m2t=0.5, tau_t2t=0.0, n_rounds=2)
    assert settled(converted, "--mode", "s") == Decoding(tau_m2t=0.5, tau_t2t=0.0, n_rounds=0)
    assert settled(converted, "--run_on") == Decoding(eos_early_stop=False, n_rounds=0)
    for given, gate in {"0.3": 0.3, "0.5": 0.5, "none": None}.items():
        assert settled(trained, "--tau_t2t", given).tau_t2t == settled(converted, "--tau_t2t", given).tau_t2t == gate
    assert settled(converted, "--n_rounds", "1").tau_t2t == 0.0  # Stage B is asked for


def test_what_was_written_from_the_left_stands_unless_the_gate_is_given():
    model = tiny_model(order="leftmost")
    for more in ([], ["--n_rounds", "0"], ["--mode", "s"]):
        assert settled(model, *more).tau_t2t is None
        assert settled(model, *more, "--tau_t2t", "0.5").tau_t2t == 0.5


def test_benchmark_runs_settle_their_gates_the_same_way():
    from released import run

    assert run.settle_decoding is sample.settle_decoding
    flags = ["--task", "gsm8k", "--task_file", "x", "--ckpt", "x", "--out", "x.jsonl"]
    for more, K, gate in (([], 0, 0.5), (["--adapter", "x"], 2, 0.0), (["--adapter", "x", "--tau_t2t", "0.5"], 2, 0.5)):
        d = run.decoding(run.build_parser().parse_args(flags + more), tiny_config())
        assert (d.n_rounds, d.tau_m2t, d.tau_t2t) == (K, 0.7, gate)
