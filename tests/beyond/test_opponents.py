"""Every rule on one block of five positions and four tokens, worked out by hand.

position      0     1     2     3     4
probability  .90   .60   .50   .80   .98     of the best token
             .10   .40   .25   .10   .02     of the second
              0     0    .25   .10    0      and so on
state        mask  mask  mask  mask  visible

Then the two looks, by hand on an engine that is told its logits, and against the same loop for one
row, without a cache, which keeps what it remembers in local variables.
"""

import math
from dataclasses import replace

import pytest
import torch
from common import EOS, MASK, random_ids, tiny_model

from beyond import opponents
from beyond.opponents import causal_mask, read_beside, rule, s2d2, t2m
from cache import Cached
from model import Context, block_causal_mask, rotary
from sample import Decoding, StageA, generate

# R = 1 row, B = 5 positions, V = 4 tokens

TABLE = [[0.9, 0.1, 0, 0], [0.4, 0.6, 0, 0], [0.25, 0.25, 0.5, 0], [0.8, 0.1, 0.1, 0], [0.98, 0.02, 0, 0]]
P = torch.tensor([TABLE])
MASKED = torch.tensor([[True, True, True, True, False]])
OFF = Decoding(gen_length=16, tau_t2t=None, n_rounds=0)


def at(bundle: torch.Tensor) -> list[int]:
    return bundle[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "dial", "bundle"),
    [
        # strictly above; the visible position, surest of all, is never chosen
        ("threshold", 0.55, [0, 1, 3]),
        ("threshold", 0.95, [0]),  # none passes: the surest
        ("threshold", 0.0, [0, 1, 2, 3]),
        # margins: .8, .2, .25, .7
        ("margin", 0.75, [0]),
        ("margin", 0.22, [0, 2, 3]),
        ("margin", -1.0, [0, 1, 2, 3]),
        # products, surest first: .9, .72, .432, .216
        ("product", 0.73, [0]),
        ("product", 0.71, [0, 3]),
        ("product", 0.43, [0, 1, 3]),
        ("product", 0.2, [0, 1, 2, 3]),
        # entropies: 0 .325, 3 .639, 1 .673, 2 1.040; sum without the largest: 0, .325, .964, 1.637
        ("entropy_bound", -1.0, [0]),
        ("entropy_bound", 0.33, [0, 3]),
        ("entropy_bound", 0.97, [0, 1, 3]),
        ("entropy_bound", math.inf, [0, 1, 2, 3]),
        # (n + 1) (1 - c_n): .2, .6, 1.6, 2.5
        ("factor", 0.1, [0]),
        ("factor", 0.61, [0, 3]),
        ("factor", 1.61, [0, 1, 3]),
        ("factor", 3.0, [0, 1, 2, 3]),
        # the surest so many, at most all
        ("fixed", 2, [0, 3]),
        ("fixed", 9, [0, 1, 2, 3]),
        # products, from the left: .9, .54, .27, .216
        ("longest_prefix", 1.0, [0]),
        ("longest_prefix", 0.53, [0, 1]),
        ("longest_prefix", 0.22, [0, 1, 2]),
        ("longest_prefix", 0.0, [0, 1, 2, 3]),
    ],
)
def test_what_a_rule_picks(name, dial, bundle):
    assert at(rule(name, dial)(P, MASKED)) == bundle


@pytest.mark.parametrize("name", opponents.RULES)
def test_rows_are_chosen_apart_and_a_finished_row_is_left_alone(name):
    both = torch.cat([P, P])
    masked = torch.cat([MASKED, torch.zeros_like(MASKED)])
    alone = rule(name, 1)(P, MASKED)
    assert torch.equal(rule(name, 1)(both, masked), torch.cat([alone, torch.zeros_like(alone)]))


def test_a_prefix_ends_at_the_first_that_fails():
    # (n + 1) (1 - c_n) need not rise: 2 * .4 = .8, then 3 * .4 = 1.2, then 4 * .4 = 1.6; a later mask is no way round
    passes = lambda sure: torch.tensor([[True, False, True]])  # noqa: E731
    assert at(opponents.surest(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), passes)) == [0]
    equal = torch.tensor([[[0.6, 0.4, 0, 0]] * 3])
    assert at(opponents.factor(equal, torch.ones(1, 3, dtype=torch.bool), 1.3)) == [0, 1]


def test_entropy_bound_bounds_what_is_lost():
    """Two fair coins that always agree: TC = ln 2 is what writing both at once loses, and sum H - max H is the same."""
    coins = torch.full((1, 2, 2), 0.5)
    masked = torch.ones(1, 2, dtype=torch.bool)
    assert at(opponents.entropy_bound(coins, masked, math.log(2) + 1e-6)) == [0, 1]
    assert at(opponents.entropy_bound(coins, masked, math.log(2) - 1e-6)) == [0]


@pytest.mark.parametrize("name", opponents.RULES)
def test_the_ends_of_a_dial_are_one_at_a_time_and_all_at_once(name):
    """On a block of 8, of which this model is never sure: 8 forwards, and 1."""
    model = small(std=0.05)
    prompt = random_ids(1, 8)[0].tolist()
    forwards = []
    for dial in (opponents.DIALS[name][0], opponents.DIALS[name][-1]):
        d = replace(OFF, gen_length=8, select=rule(name, dial))
        forwards.append(generate(model, [prompt], d)[0].nfe["full"])
    assert forwards == [8, 1]


# --- Stage B that refuses
@torch.inference_mode()
def test_stage_b_writes_the_longest_prefix_that_is_sure_enough():
    """All masks of a block at once, against Stage B's own probabilities; of nothing sure Stage A's first token."""
    model = small(std=0.05)
    steps = []
    prompt = random_ids(1, 3)[0].tolist()
    d = replace(OFF, gen_length=5, tau_m2t=-1.0, n_rounds=1)
    generate(model, [prompt], d, on_step=lambda rows, s: steps.append(s))
    together = steps[0].look.conf[0, 3:].cumprod(-1)
    stage_b = steps[0].look.token
    for k in range(5):
        refused = replace(d, tau_keep=float(together[k]), look=opponents.refusing)
        steps.clear()
        generate(model, [prompt], refused, on_step=lambda rows, s: steps.append(s))
        look = steps[0].look
        assert at(look.written) == [3, *range(4, 3 + k)] and look.looks == 1
        whose = steps[0].stage_a.token if k == 0 else stage_b
        assert look.token[0, 3] == whose[0, 3]


# --- T2M
# own probabilities of the tokens in z: .1, .4, .5, .1, .02
Z = torch.tensor([[1, 0, 2, 1, 1]])


def test_t2m_takes_back_what_became_improbable():
    written = torch.tensor([[False, True, True, True, True]])
    never = torch.zeros_like(Z)

    def taken(doubt=0.1, written=written, times=never, p=P, z=Z):
        return at(opponents.doubted(p, z, written, times, doubt, most=3))

    assert taken() == [4]
    # a quarter of four written tokens is one, the least probable; of eight it would be two
    assert taken(0.45) == [4]
    p, z, eight, times = (torch.cat([x, x], dim=1) for x in (P, Z, written, never))
    assert taken(0.45, eight, times, p, z) == [4, 9]
    # three times a position, and no more; a prompt never
    assert taken(0.45, times=torch.tensor([[0, 0, 0, 0, 3]])) == [3]
    assert taken(written=torch.zeros_like(written)) == []


def small(**changes):
    """A tiny model of which no step writes a mask, or an end: other tokens are above them."""
    model = tiny_model(**dict(std=0.15) | changes)
    model.lm_head.weight.data[[MASK, EOS]] = 0
    return model.requires_grad_(False)


def test_t2m_takes_a_token_back_three_times_in_a_row_s_block():
    """Token 1 at position 1 has .05 in every pass: it is taken back until it has been three times, in every block of
    every row, and in every decode anew. A given one stays."""
    M = 3
    p = torch.tensor([[[0.6, 0.4, 0, 0], [0.95, 0.05, 0, 0]]])
    z = torch.tensor([[M, 1]])
    look = t2m()

    def after(engine, given=(False, False)):
        a = StageA(z, torch.tensor([given]), None, None, p.log(), p.argmax(-1), p.amax(-1), None, OFF)
        found = look(engine, a, z == M)
        assert found.partial.tolist() == [0] and found.looks.tolist() == [0]
        return torch.where(found.written, found.token, z).tolist()

    engine = Cached(tiny_model(mask_id=M), [[]], 0)
    for _ in range(3):
        assert after(engine) == [[0, M]]
    assert after(engine) == [[0, 1]]
    engine.cache.lengths = [2]  # its next block
    assert after(engine) == [[0, M]]
    engine.rows = [7]  # another row in the same place
    assert after(engine, given=(False, True)) == [[0, 1]]
    assert after(Cached(tiny_model(mask_id=M), [[]], 0)) == [[0, M]]  # another decode


# --- S2D2
def test_verified_keeps_drafts_up_to_the_first_that_differs():
    """Read from left to right the model would write 0, 1, 2, 0, 0. The leftmost run of masks alone is judged."""
    tokens, filled = opponents.verified(P, torch.tensor([[0, 1, 0, 0, 3]]), MASKED)
    assert at(filled) == [0, 1, 2]  # 2 is the first that differs: it is written as the model would
    assert tokens.tolist() == [[0, 1, 2, 0, 3]]
    tokens, filled = opponents.verified(P, torch.tensor([[0, 1, 2, 0, 3]]), MASKED)
    assert at(filled) == [0, 1, 2, 3]  # all agree; position 4 is visible and stays
    masked = torch.tensor([[False, True, False, True, True]])
    tokens, filled = opponents.verified(P, torch.tensor([[3, 1, 3, 1, 1]]), masked)
    assert at(filled) == [1]
    assert tokens.tolist() == [[3, 1, 3, 1, 1]]


def test_who_sees_whom_is_the_drawing():
    drawn = ["1. ..", "11 ..", ".. 1.", "1. .1"]
    assert causal_mask(2).tolist() == [[c == "1" for c in row.replace(" ", "")] for row in drawn]


def read_uncached(model, ids):
    """The second reading of one row, whole text and no cache: ids (T,), the last B of them the block -> (B, V)."""
    T, B = len(ids), model.cfg.block_length
    mask = torch.zeros(T + B, T + B, dtype=torch.bool)
    mask[:T, :T] = block_causal_mask(T, B)
    mask[T - B :, : T - B] = True
    mask[T - B :, T - B :] = causal_mask(B)
    position = torch.cat([torch.arange(T), torch.arange(T - B, T)])
    cos, sin = rotary(model.cfg, position, torch.float32)
    both = torch.tensor([ids + [MASK] * B])
    return model(both, Context(cos, sin, mask))[0, T:]


@torch.inference_mode()
def test_a_second_reading_is_that_of_the_whole_text():
    """Rows with no, one and two blocks before the one that is read; the cache is as it was."""
    model = small()
    prompts = [random_ids(1, n, n)[0].tolist() for n in (0, 8, 16)]
    z = random_ids(3, 8)
    z[:, 5:] = MASK
    engine = Cached(model, prompts, 0)
    engine.read(z, next_z=z)  # the next block's keys have to stay as well
    before = engine.cache.kv.clone()
    beside = read_beside(engine, z)
    assert torch.equal(engine.cache.kv, before)
    for row, prompt in enumerate(prompts):
        alone = read_uncached(model, prompt + z[row].tolist())
        torch.testing.assert_close(beside[row], alone, rtol=1e-4, atol=1e-4)
    assert (beside - model.head(engine.last[1])).abs().max() > 0.1  # and it is no reading of the block itself


def test_s2d2_writes_what_blocks_of_one_would():
    """A first block: every token but the block's last is the left-to-right model's, from the same weights in blocks of
    one; in fewer passes than tokens somewhere. (The last mask has no draft beside it, and is written unread.)"""
    model = small(std=0.1)
    one = small(std=0.1, block_length=1)
    prompts = random_ids(12, 2).tolist()
    d = replace(OFF, gen_length=6)
    outputs = generate(model, prompts, replace(d, tau_m2t=-1.0, look=s2d2))
    expected = generate(one, prompts, replace(d, tau_m2t=1.0))
    assert [o.tokens[:5] for o in outputs] == [o.tokens[:5] for o in expected]
    assert min(o.nfe["full"] for o in outputs) < 6


# --- whole decodes
LOOKS = {
    "t2m": replace(OFF, select=rule("threshold", 0.1), look=t2m(), tau_t2t=1.0),
    "s2d2": replace(OFF, tau_m2t=-1.0, look=s2d2),
}


def by_hand(model, prompt, name):
    """One row without a cache -> tokens, passes over a block while it is decoded, second readings."""
    B = model.cfg.block_length
    ids = list(prompt)
    passes = looks = taken_back = 0
    while len(ids) < len(prompt) + OFF.gen_length:
        # a block begins, and nothing is remembered
        start = len(ids) // B * B
        generated = torch.arange(start, start + B)[None] >= len(prompt)
        ids = ids + [MASK] * (start + B - len(ids))
        times = torch.zeros(1, B, dtype=torch.long)
        while True:
            # Stage A reads the whole text
            text = torch.tensor([ids])
            p = model(text, model.context(torch.ones_like(text, dtype=torch.bool)))[:, start:].softmax(-1)
            token = p.argmax(-1)
            passes += 1

            z = text[:, start:]
            masked = z == MASK
            if name == "t2m":
                bundle = opponents.threshold(p, masked, 0.1)
                taken = opponents.doubted(p, z, generated & ~masked, times, 0.1, 3)
                times = times + taken
                taken_back += int(taken.sum())
            else:
                taken = torch.zeros_like(masked)
                bundle = masked
                if masked.sum() > 1:
                    looks += 1
                    draft = torch.where(masked, token, z)
                    causal = read_uncached(model, ids[:start] + draft[0].tolist())
                    token, bundle = opponents.verified(causal[None], draft, masked)

            # T2M has judged a block that it leaves as it is; S2D2 ends with the last mask
            after = torch.where(bundle, token, z).masked_fill(taken, MASK)
            ids[start:] = after[0].tolist()
            if torch.equal(after, z) or (name == "s2d2" and MASK not in ids[start:]):
                break
    return ids[len(prompt) : len(prompt) + OFF.gen_length], passes, looks, taken_back


@pytest.mark.parametrize("name", LOOKS)
@torch.inference_mode()
def test_a_decode_is_the_loop_without_a_cache(name):
    """Rows of all lengths, decoded together, twice, and each by the loop for one: tokens, passes, second readings,
    which cost two blocks each."""
    model = small()
    prompts = [random_ids(1, n, n)[0].tolist() for n in (3, 8, 1, 17, 6)]
    outputs = generate(model, prompts, LOOKS[name])
    again = generate(model, prompts, LOOKS[name])
    assert [(o.tokens, o.nfe) for o in again] == [(o.tokens, o.nfe) for o in outputs]
    total = 0
    for output, prompt in zip(outputs, prompts, strict=True):
        tokens, passes, looks, taken_back = by_hand(model, prompt, name)
        assert output.tokens == tokens
        assert output.nfe["full"] == passes and output.nfe["looks"] == looks
        assert output.nfe["partial"] * model.partial_cost == pytest.approx(2 * looks)
        total += looks + taken_back
    assert total > 0 and len({o.nfe["full"] for o in outputs}) > 1  # or nothing would tell rows apart
