"""Decoding: generate = the specification, a row = itself alone, the step by hand. `pytest tests/test_sample.py`"""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import EOS, MASK, V, approx, assert_same, caller, random_ids, random_lora, tiny_config, tiny_model
from torch import nn

import sample
from checkpoint import save_model
from lib import show
from lib.output import in_full
from lib.show import Steps
from model import Model
from sample import Decoding, Look, Output, candidates, denoise, generate, generate_one, select_bundle

LENGTHS = [3, 8, 13, 16, 21]  # shorter than a block of 8, one block, inside a block, two blocks, inside the third
GATES = [(0.7, 0.5), (0.3, 0.0), (0.9, None), (-1, 0.3)]


def prompt(n: int, seed: int = 0, high: int = MASK) -> list[int]:
    return random_ids(1, n, 100 + seed, high)[0].tolist()


def traced(model, prompts: list[list[int]], d: Decoding, **how) -> tuple[list[Output], list[list[dict]]]:
    """What comes out of each row, and its steps."""
    steps = Steps(len(prompts))
    outputs = generate(model, prompts, d, on_step=steps.add, **how)
    return outputs, steps.of_row


def assert_equal_to_the_specification(model, prompts: list[list[int]], d: Decoding, both=(True,)) -> list[Output]:
    """Tokens, forwards of each kind and the block before every forward: rows together against a row alone.

    both: with a cache, or also without one."""
    expected = [generate_one(model, p, d) for p in prompts]
    for cached in both:
        outputs, steps = traced(model, prompts, d, cached=cached)
        for out, row, (tokens, nfe, seen) in zip(outputs, steps, expected, strict=True):
            assert_same([s["before"] for s in row], seen, f"cached {cached}, generate")
            assert (out.tokens, out.nfe) == (tokens, nfe)
    return outputs


# --- the specification


@pytest.mark.parametrize("n_rounds", [0, 1, 2])
@pytest.mark.parametrize("gates", GATES, ids=str)
def test_generate_equals_the_specification(n_rounds, gates):
    d = Decoding(gen_length=19, tau_m2t=gates[0], tau_t2t=gates[1], max_post_steps=3, n_rounds=n_rounds)
    outputs = assert_equal_to_the_specification(tiny_model(n_layer=3), [prompt(n) for n in LENGTHS], d)
    assert all(0 < len(out.tokens) <= 19 for out in outputs)


@pytest.mark.parametrize("seed", range(27))
def test_generate_equals_the_specification_whatever_the_settings(seed, monkeypatch):
    """Prompts may hold masks, which are filled or left, and blocks may be left with masks or oscillate, the last ones
    until no more steps are allowed."""
    draw = random.Random(seed)
    if seed >= 24:
        monkeypatch.setattr(sample, "MAX_STEPS", 4)
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
    # two tokens at least, the first no mask: positions of a text of masks alone have equal logits, an exact tie
    prompts = [prompt(1, seed + 1) + prompt(n, seed, high=MASK + 2) for n in draw.sample(range(1, 19), 3)]
    model = tiny_model(seed, std, block_length=B, n_last=n_last, order=order)
    if seed % 4 > 1:
        random_lora(model, stage_b_alone=seed % 4 == 3)
    assert_equal_to_the_specification(model, prompts, replace(d, holes=draw.random() < 0.5), both=(False, True))


def test_a_prompt_of_many_blocks_is_read_whole():
    """Longer than the room that a cache starts with, several times."""
    d = Decoding(gen_length=9, n_rounds=2)
    assert_equal_to_the_specification(tiny_model(), [prompt(n) for n in (8 * 40 + 3, 8 * 17, 2)], d)


@pytest.mark.parametrize("n_rounds", [0, 1, 2])
def test_a_sampled_row_of_a_batch_equals_the_prompt_alone(n_rounds):
    model = tiny_model(n_layer=3)
    d = Decoding(gen_length=17, tau_m2t=0.4, tau_t2t=0.6, max_post_steps=2, n_rounds=n_rounds, temperature=0.8)
    prompts = [prompt(n, i) for i, n in enumerate(LENGTHS)]
    together, rows = traced(model, prompts, d, seed=4)
    for p, out, row in zip(prompts, together, rows, strict=True):
        (alone,), (steps,) = traced(model, [p], d, seed=4)
        assert (alone.tokens, alone.nfe) == (out.tokens, out.nfe)
        for a, b in zip(steps, row, strict=True):
            assert [a[k] for k in ("start", "before", "after")] == [b[k] for k in ("start", "before", "after")]
            assert a["conf"] == approx(b["conf"], abs=2e-4)


def test_equal_prompts_sample_different_texts_and_a_seed_repeats_them():
    model, d = tiny_model(), Decoding(gen_length=11, temperature=1.0)
    first, second = generate(model, [prompt(5), prompt(5)], d, seed=1)
    assert first.tokens != second.tokens
    assert [o.tokens for o in generate(model, [prompt(5), prompt(5)], d, seed=1)] == [first.tokens, second.tokens]


def test_prompt_is_never_edited_and_partial_passes_are_counted():
    """And what is said of generate is not hollow: this model edits, commits, and lets Stage B overrule Stage A."""
    d = Decoding(gen_length=19, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=4, n_rounds=2)
    model = tiny_model()
    outputs, rows = traced(model, [prompt(13), prompt(21)], d)
    for out, steps, n in zip(outputs, rows, (13, 21), strict=True):
        assert all(e["at"] >= n for s in steps for e in s["edit"])
        coordinated, blocks = sum(bool(s["fill"]) for s in steps), len({s["start"] for s in steps})
        assert out.nfe["full"] == len(steps) and out.nfe["looks"] == 2 * coordinated
        assert out.nfe["partial"] == 2 * coordinated + (blocks - 1)  # K a step, K - 1 for each block read again
        in_all = out.nfe["full"] + out.nfe["commit"] + out.nfe["partial"] * 2 / 4  # n = 2 of 4 layers
        assert in_full(out.nfe, model.partial_cost) == in_all
    steps = rows[0] + rows[1]
    assert any(s["edit"] for s in steps) and any(len(s["fill"]) > 1 for s in steps) and outputs[0].nfe["commit"]
    assert any(f["token"] != f["token_a"] for s in steps for f in s["fill"])


def test_a_finished_block_costs_no_pass_of_its_own():
    """Blocks of 5, 8 and 8 tokens, one a step. What closes a block goes beside the next one's first forward: two passes
    fewer, whether that is a forward that finds nothing to change or a commit; and all are read all the same."""
    model, passes = tiny_model(), []
    model.layers[0].register_forward_hook(lambda layer, given, out: passes.append(out.shape[1] // 8))
    d = Decoding(gen_length=21, tau_m2t=1.0, tau_t2t=1.0, n_rounds=0)  # no edit is above 1

    def decoded(prompts, d):
        passes.clear()
        nfe = generate(model, prompts, d)[0].nfe
        return nfe["full"], nfe["commit"], len(passes), sum(passes)

    unedited = replace(d, tau_t2t=None)
    assert decoded([prompt(3)], d) == (21 + 3, 0, 21 + 1, 21 + 3)
    assert decoded([prompt(3)], unedited) == (21, 2, 21, 21 + 2)
    # three rows in step share every pass; a row out of step is waited for, and then only a commit carries a next block
    assert decoded([prompt(3, i) for i in range(3)], d)[2] == 21 + 1
    assert decoded([prompt(3), prompt(5)], d)[2] == 21 + 3
    assert decoded([prompt(3), prompt(5)], unedited)[2] == 21

    # what was read ahead of an edit is thrown away: more is read than passes and the blocks that they close
    d = Decoding(gen_length=29, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3, eos_early_stop=False)
    full, commit, n_passes, blocks = decoded([prompt(3)], d)
    closings = full + commit - n_passes
    assert 0 < closings <= 3 and blocks > n_passes + closings


# --- given text, and rules and looks of one's own


def test_holes_are_filled_and_what_is_given_stays():
    """Holes in the first block of three, the others given; in the last alone; and none."""
    texts = [prompt(20), prompt(13), prompt(11)]
    for at in (2, 5):
        texts[0][at] = MASK
    texts[1][12] = MASK
    d = Decoding(gen_length=6, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3, holes=True, eos_early_stop=False)
    outputs, rows = traced(tiny_model(), texts, d)
    for out, steps, text in zip(outputs, rows, texts, strict=True):
        holes = [i for i, token in enumerate(text) if token == MASK]
        assert [i for i in range(len(text)) if out.prompt[i] != text[i]] == holes and MASK not in out.prompt
        written = {f["at"] for s in steps for f in s["fill"] + s["edit"]}
        assert {i for i in written if i < len(text)} == set(holes) and len(out.tokens) == 6
    assert [steps[0]["start"] for steps in rows] == [0, 8, 8]
    assert_equal_to_the_specification(tiny_model(), texts, d)
    # holes alone may be asked for; and as released a mask in a finished block is left
    assert generate(tiny_model(), texts[:1], replace(d, gen_length=0))[0].tokens == []
    assert generate(tiny_model(), texts[:1], replace(d, holes=False))[0].prompt == texts[0]


def test_a_rule_of_ones_own_selects_the_bundle():
    """The two rightmost masks, a step; and a rule that says what the paper's says is the paper's."""

    def rightmost(p, masked):
        assert p.shape == (*masked.shape, V) and torch.allclose(p.sum(-1), torch.ones(masked.shape))
        return masked & (masked.flip(1).cumsum(1).flip(1) <= 2)

    def the_papers(p, masked):
        return select_bundle(p.amax(-1), masked, 0.3, 1, "surest")

    d = Decoding(gen_length=13, tau_m2t=0.3, tau_t2t=None, n_rounds=2)
    texts = [prompt(3), prompt(13)]
    assert_equal_to_the_specification(tiny_model(), texts, replace(d, select=rightmost))
    rows = traced(tiny_model(), texts, replace(d, select=rightmost))[1]
    filled = [[f["at"] for f in s["fill"]] for s in rows[0]]
    assert filled == [[6, 7], [4, 5], [3], *[[i, i + 1] for i in (14, 12, 10, 8)]]
    plain, ruled = (generate(tiny_model(), texts, replace(d, select=f)) for f in (None, the_papers))
    assert [(o.tokens, o.nfe) for o in plain] == [(o.tokens, o.nfe) for o in ruled]


class SurestOnly(nn.Module):
    """A head that writes the surest of the bundle, by the states that Stage A has left, for that share of a forward."""

    n_layer = 3

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def look(self, engine, a, bundle):
        token, conf = candidates(engine.model.head(a.states * self.scale), a.u, a.d)
        surest = conf.masked_fill(~bundle, -1).argmax(-1, keepdim=True)
        written = bundle & (torch.arange(bundle.shape[1]) == surest)
        return Look(token, conf, written, bundle.float().mean(-1), bundle.any(-1).long())


@pytest.mark.parametrize("by", ["a look", "a head"])
def test_a_look_of_ones_own_writes_what_it_says_and_costs_what_it_says(by):
    model, head = tiny_model(), SurestOnly(64)
    d = Decoding(gen_length=13, tau_m2t=0.1, tau_t2t=None)
    if by == "a look":
        d = replace(d, look=head.look)
    else:
        model.second_look = head
        assert model.partial_cost == 3 / 4 and model.adapter_state().keys() == {"second_look.scale"}
        off = generate(model, [prompt(3)], replace(d, n_rounds=0))[0]
        assert off.nfe["partial"] == off.nfe["looks"] == 0
    texts = [prompt(3), prompt(13), prompt(8)]
    outputs = assert_equal_to_the_specification(model, texts, d, both=(False, True))

    rows = traced(model, texts, d)[1]
    for out, row in zip(outputs, rows, strict=True):
        assert all(len(s["fill"]) == 1 for s in row) and any(s["refused"] for s in row)
        sizes = [len(s["fill"] + s["refused"]) for s in row]
        assert out.nfe["partial"] == sum(sizes) / 8 and out.nfe["looks"] == out.nfe["full"] == len(row)


# --- one step


def test_a_step_by_hand():
    """Block of 4: position 0 is prompt, 1 a mask, 2 and 3 visible. Stage A disagrees with 0 and 2, Stage B with all of
    them. The bundle is Stage A's choice, every token written is Stage B's, the prompt stays."""
    seen = []

    class Engine:
        n_rounds = 1
        model = SimpleNamespace(cfg=SimpleNamespace(mask_id=9, order="surest"), second_look=None, head=lambda h: 5 * h)

        def stage_a(self, z):
            return z, F.one_hot(torch.tensor([[7, 7, 7, 3]]), 10).float()

        def stage_b(self, h, bundle):
            assert h[0, 2:].tolist() == [2, 3]  # what Stage A's forward left
            seen.append(bundle.tolist())
            return F.one_hot(torch.tensor([[5, 5, 5, 5]]), 10).float()

    given = torch.tensor([[True, False, False, False]])

    def after(*z, masks=True, **settings) -> list[int]:
        d = Decoding(**dict(tau_t2t=0.5) | settings)
        return denoise(Engine(), torch.tensor([z]), given, torch.zeros(1, 2, 4), d, masks).after[0].tolist()

    assert after(1, 9, 2, 3) == [1, 5, 5, 5] and seen == [[[False, True, False, False]]]
    assert after(1, 9, 2, 3, tau_t2t=None) == [1, 5, 2, 3]  # no edits
    assert after(1, 9, 2, 3, tau_t2t=0.99) == [1, 5, 2, 3]  # e^5 / (e^5 + 9) is 0.94: below the gate
    assert after(1, 9, 2, 3, n_rounds=0) == [1, 7, 7, 3] and len(seen) == 3  # Stage A alone
    assert after(1, 4, 2, 3, masks=False) == [1, 7, 7, 3] and len(seen) == 3  # without a mask there is no bundle
    assert after(1, 4, 2, 3) == [1, 7, 7, 3]  # nor where only another row has one


def test_candidates_filter_and_renormalise_by_hand():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 4, 3)
    u = torch.tensor([[0.0, 0.624, 0.626, 0.999]])
    token, p = candidates(logits, u, Decoding(temperature=1.0, top_p=0.6))  # 0.5 < 0.6: the second crosses and stays
    assert token.tolist() == [[0, 0, 1, 1]]
    assert p[0].tolist() == approx([0.625, 0.625, 0.375, 0.375])
    for top_k, kept in ((1, [1.0] * 4), (2, [0.625, 0.625, 0.375, 0.375])):
        _, p = candidates(logits, u, Decoding(temperature=1.0, top_k=top_k))
        assert p[0].tolist() == approx(kept)
    token, p = candidates(logits, u, Decoding(temperature=0.5))  # squares: 0.25, 0.09, 0.04 of 0.38
    assert token.tolist() == [[0, 0, 0, 2]] and p[0, 0] == approx(0.25 / 0.38)
    # two equals share [0, 1/2) and [1/2, 1)
    token, _ = candidates(torch.zeros(1, 3, 2), torch.tensor([[0.0, 0.49, 0.5]]), Decoding(temperature=1.0))
    assert token.tolist() == [[0, 0, 1]]
    token, p = candidates(logits, u, Decoding())
    assert token.tolist() == [[0, 0, 0, 0]] and p[0].tolist() == approx([0.5] * 4)


def bundle_of(conf: list[float], tau_m2t: float, at_least: int = 1, order: str = "surest") -> list[int]:
    """Of five positions the last is visible."""
    masked = torch.tensor([[True, True, True, True, False]])
    return select_bundle(torch.tensor([conf]), masked, tau_m2t, at_least, order)[0].nonzero()[:, 0].tolist()


def test_selection_by_hand():
    conf = [0.9, 0.7, 0.6, 0.2, 0.95]
    assert bundle_of(conf, 0.5) == [0, 1, 2]
    assert bundle_of(conf, 0.7) == [0]  # strictly above; the visible position never counts
    assert bundle_of(conf, 0.99) == [0]  # nothing passes: the single most confident
    assert bundle_of(conf, 0.99, 3) == [0, 1, 2]
    assert bundle_of(conf, 0.65, 2) == [0, 1]  # as many as asked for pass
    assert bundle_of(conf, 0.5, 2) == [0, 1, 2]  # and more
    assert bundle_of(conf, 0.0, 9) == [0, 1, 2, 3]
    assert bundle_of(conf, -1) == [0, 1, 2, 3]  # every mask at once
    assert bundle_of([0.2, 0.3, 0.3, 0.3, 0.3], 0.5, 2) == [1, 2]  # of equals the leftmost


def test_from_the_left_the_product_has_to_pass():
    """.9, .9 x .7 = .63, .63 x .6 = .378, .378 x .9 = .3402"""
    conf = [0.9, 0.7, 0.6, 0.9, 0.95]
    assert bundle_of(conf, 0.37, order="leftmost") == [0, 1, 2]
    assert bundle_of(conf, 0.379, order="leftmost") == [0, 1]  # though the fourth is as sure as the first
    assert bundle_of(conf, 1.0, order="leftmost") == [0]  # left to right, one at a time
    assert bundle_of(conf, 1.0, 2, order="leftmost") == [0, 1]
    assert bundle_of(conf, 1.0, 4, order="leftmost") == [0, 1, 2, 3]  # what is visible comes last, at any place
    assert bundle_of(conf, -1, order="leftmost") == [0, 1, 2, 3]

    # a visible token takes no part in the product
    masked = torch.tensor([[False, True, True, True]])
    picked = select_bundle(torch.tensor([[0.01, 0.7, 0.6, 0.5]]), masked, 0.4, 1, "leftmost")
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
    monkeypatch.setattr(sample, "MAX_STEPS", 6)
    out = generate(model, [prompt(3)], Decoding(gen_length=5, temperature=0.01))[0]
    assert out.nfe["full"] == 6 and out.warning


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


class Stop(Exception):
    pass


@pytest.mark.parametrize("n_rounds", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_host_synchronisation_a_step(n_rounds, temperature, monkeypatch):
    """On the meta device nothing has a value: whatever asks for one (item, bool, nonzero, a copy to the host) raises.
    The one .tolist() that decides whether to go on is answered by hand: no block closes, everything else is so."""
    with torch.device("meta"):
        model = Model(tiny_config()).to(torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    steps, asked = [], []

    def answer(flags):
        asked.append(tuple(flags.shape))
        if len(asked) == 5:
            raise Stop
        return [[False] * 3] + [[True] * 3] * (len(flags) - 1)

    monkeypatch.setattr(torch.Tensor, "tolist", answer)
    d = Decoding(gen_length=16, n_rounds=n_rounds, temperature=temperature)
    with pytest.raises(Stop):
        generate(model, [[1], [2, 3], [EOS, MASK, 4]], d, on_step=lambda rows, step: steps.append(1))
    assert asked == [(asked[0][0], 3)] * 5 and len(steps) == 5


# --- the command line


def test_a_checkpoint_without_its_tokenizer_decodes_ids_and_says_what_text_needs(tmp_path, monkeypatch, capsys):
    """A released checkpoint may come without tokenizer.json."""
    save_model(tiny_model(tokenizer="bpe"), tmp_path)
    run = caller(sample, monkeypatch, capsys)
    given = ["--ckpt", tmp_path, "--gen_length", 12, "--device", "cpu"]
    record = json.loads(run(*given, "--prompt_ids", "5,9,12", "--json"))
    d = Decoding(gen_length=12, tau_t2t=0.0, n_rounds=2)
    assert record["text"] is None and record["tokens"] == generate_one(tiny_model(), [5, 9, 12], d)[0]
    watched = run(*given, "--prompt_ids", "5,9,12", "--watch")
    assert watched.startswith("step   1  block   0  5 9 12") and f"\n{record['tokens']}\n" in watched
    assert " per token]" in watched and "\x1b" not in watched
    assert "no tokenizer" in run.fails(*given, "--prompt", "text")


def settled(model, *argv: str, **own) -> Decoding:
    return sample.settle_decoding(show.build_parser("").parse_args(argv), model, own)


def test_what_a_decode_defaults_to():
    """The flags; else what the folder was made for; else the paper's, or the released one where Stage B is off."""
    trained, converted, leftmost = tiny_model(), tiny_model(), tiny_model(order="leftmost")
    converted.markers.data.zero_()
    papers, off = Decoding(n_rounds=2, holes=True), ["--n_rounds", "0"]
    released = Decoding(n_rounds=0, tau_t2t=0.5, holes=True)
    assert settled(trained) == papers
    assert (papers.tau_m2t, papers.tau_t2t, papers.tau_keep, papers.eos_early_stop) == (0.7, 0.0, 0.0, True)
    assert settled(converted) == settled(trained, *off) == released
    assert settled(converted, "--n_rounds", "1").tau_t2t == 0.0  # Stage B is asked for
    for given, gate in {"0.3": 0.3, "0.5": 0.5, "none": None}.items():
        assert settled(trained, "--tau_t2t", given).tau_t2t == settled(converted, "--tau_t2t", given).tau_t2t == gate

    # what was written from the left stands, unless the gate is given
    for more in ([], off):
        assert settled(leftmost, *more).tau_t2t is None and settled(leftmost, *more, "--tau_t2t", "0.5").tau_t2t == 0.5

    # an adapter's own settings are for its Stage B
    own = dict(tau_m2t=-1.0, tau_t2t=None, tau_keep=0.5)
    for K in (1, 2):
        assert settled(trained, "--n_rounds", str(K), **own) == replace(papers, n_rounds=K, **own)
    assert settled(trained, "--tau_m2t", "0.9", **own).tau_m2t == 0.9
    assert settled(trained, *off, **own) == released
    converted.second_look = SurestOnly(64)
    assert settled(converted).n_rounds == 2  # a head is on as it was trained, and needs no marker
