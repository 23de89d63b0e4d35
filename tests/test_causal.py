"""Causal Stage B: who sees what, its probability of a bundle, its looks. `pytest tests/test_causal.py`

On random weights, with Show not zero: nothing is hidden by what is not learned yet.
"""

import math
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, assert_as_specified, prompt, random_ids, random_lora, tiny_config, tiny_model, traced

import toy
import train
from cache import Cached, Uncached
from checkpoint import new_model
from evaluate import answer_log_probs, causal_table, one_step_table
from lib.rows import Batch
from lib.util import generator
from model import Context, Model, causal_mask
from sample import Decoding, Step, candidates, generate, longest_run

# R rows, T positions, B block_length, V vocabulary, m positions of a bundle

CLOSE = dict(rtol=1e-4, atol=1e-4)


def settings() -> Namespace:
    """Of a step: masks alone, most of them, and all of a block's are its bundle."""
    corruption = dict(corruption="mask", mask_power=0.3, ends=0.0)
    return Namespace(**corruption, s_max=2, whole=1.0, context="clean", alpha=0.0)


def toy_batch(t: toy.Toy, x: torch.Tensor, *key: int) -> Batch:
    """Rows x of a toy; the same draws each time it is called."""
    free = torch.arange(2 * t.m).expand_as(x) >= t.m
    draws = [generator("draws", *key, r) for r in range(len(x))]
    return Batch(x, torch.ones_like(free), free, torch.arange(t.V), draws)


def causal_model(stage_b: str | None = None, **sizes) -> Model:
    model = tiny_model(causal=True, **sizes)
    if stage_b:
        random_lora(model, stage_b)
    return model


def places(*at: int, T: int = 8) -> torch.Tensor:
    """(1, T) bool."""
    return torch.isin(torch.arange(T), torch.tensor(at))[None]


def log_probs(engine, h, a, bundle, tokens, *rows) -> torch.Tensor:
    """What Stage B says after an engine's Stage A, whose prefix and final states are h and a: (R, B, V)."""
    model = engine.model
    logits_a = model.logits(a)
    for some in rows:
        logits_a = logits_a[some]
    return model.logits_b(engine.stage_b(h, bundle, tokens, *rows), logits_a).log_softmax(-1)


def of_tokens(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(R, B, V), (R, B) int64 -> (R, B)."""
    return log_p.gather(-1, tokens[..., None])[..., 0]


def context(model: Model, ids: torch.Tensor, clean: torch.Tensor | None = None) -> Context:
    return model.context(torch.ones_like(ids, dtype=torch.bool), clean)


# --- Eq. 4
def test_what_a_position_is_shown_by_hand():
    """The token before it. Of rows by themselves the first has none; behind a finished token it is that, and beside a
    clean copy the clean one of the block before."""
    model = tiny_model(causal=True, block_length=2)
    tokens, none, every = torch.tensor([[1, 2, 3, 4]]), places(T=4), places(0, 1, 2, 3, T=4)
    clean = torch.tensor([[5, 6, 7, 8]])
    bare = Context(None, None, None)
    for bundle in (none, every):
        assert model.token_before(tokens[:, :2], bundle[:, :2], bare).tolist() == [[MASK, 1]]
        behind = replace(bare, last=torch.tensor([9]))
        assert model.token_before(tokens[:, :2], bundle[:, :2], behind).tolist() == [[9, 1]]
        assert model.token_before(tokens, bundle, replace(bare, clean=clean)).tolist() == [[MASK, 1, 6, 3]]

    # where that is none of the bundle, the bundle's last token before it, but none of another block
    model.cfg.block_length = 5
    tokens, clean = torch.arange(10)[None], torch.arange(10, 20)[None]
    shown = model.token_before(tokens, places(1, 2, 4, 7, 9, T=10), replace(bare, clean=clean))
    assert shown.tolist() == [[MASK, 0, 1, 2, 2, 14, 5, 6, 7, 7]]


def test_the_mark_by_hand():
    """Two channels. h = (3, 4) has a mean square of 12.5; the token before is (2, 0), normalised (sqrt 2, 0)."""
    model = tiny_model(causal=True, n_embd=2)
    model.markers.data = torch.tensor([[0.5, 0.25]])
    model.show.data = torch.tensor([[1.0, 7.0], [-1.0, 7.0]])
    model.wte.weight.data[5] = torch.tensor([2.0, 0.0])
    h = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]])
    marked = model.mark(h, torch.tensor([[False, True]]), 0, torch.tensor([[5, 5]]))
    size, root = math.sqrt(12.5), math.sqrt(2)
    assert marked[0].tolist() == [[3, 4], approx([3 + size * (0.5 + root), 4 + size * (0.25 - root)], abs=1e-5)]
    # the paper's mark is what was learned, as it is
    assert model.mark(h, torch.tensor([[False, True]]), 0).tolist() == [[[3, 4], [3.5, 4.25]]]


def test_the_mask_by_hand():
    """Positions 1 and 2 of three are the bundle, behind a key of the text before; 0 and 2 are it in the second row."""
    bundle = torch.cat([places(1, 2, T=3), places(0, 2, T=3)])
    first = [[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]]
    second = [[1, 1, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1]]
    for ctx in (
        Context(None, None, torch.ones(3, 4, dtype=torch.bool)),
        Context(None, None, None, cache=SimpleNamespace(used=4)),
    ):
        assert causal_mask(bundle, ctx).int().tolist() == [[first], [second]]
    # what nobody may attend to stays unseen
    unseen = torch.tensor([True, True, True, False]).expand(2, 1, 1, 4)
    assert not causal_mask(bundle, Context(None, None, unseen))[..., 3].any()


@pytest.mark.parametrize("at", [range(8), (1, 2, 5, 6)])
@torch.no_grad()
def test_who_sees_the_bundle(at):
    """Another token at one of its places changes nothing there, nothing to the left, and nothing outside of the bundle;
    it does change all that is behind it in the bundle. So does another state, which also changes its own place."""
    model = causal_model()
    bundle = places(*at)
    z = random_ids(1, 8, 1).masked_fill(bundle, MASK)
    tokens = torch.where(bundle, random_ids(1, 8, 2, MASK // 2), z)
    engine = Cached(model, [prompt(8)], 2)
    h, a = engine.stage_a(z)
    before = log_probs(engine, h, a, bundle, tokens)[0]

    def assert_changed(h, tokens, seen, at_least):
        change = (log_probs(engine, h, a, bundle, tokens)[0] - before).abs().amax(-1)  # (B,)
        assert (change[~seen] < 1e-4).all() and (change[seen] > at_least).all()

    for i in at:
        behind = bundle[0] & (torch.arange(8) > i)
        other = tokens.clone()
        other[0, i] += MASK // 2
        assert_changed(h, other, behind, 1e-2)
        other = h.clone()
        other[0, i] = h[0, (i + 1) % 8]
        assert_changed(other, tokens, behind | places(i)[0], 1e-3)


@pytest.mark.parametrize("stage_b", ["shared", "copy"])
@torch.no_grad()
def test_with_nothing_shown_and_no_bundle_it_is_the_papers_stage_b(stage_b):
    """Without a bundle nobody is hidden from anybody, and nothing is marked: bit for bit in whole rows."""
    causal, paper = causal_model(), tiny_model()
    paper.load_state_dict(causal.state_dict(), strict=False)
    for model in (causal, paper):
        random_lora(model, stage_b)
    causal.show.data.zero_()
    noisy, clean, none = random_ids(2, 24), random_ids(2, 24, 1), torch.zeros(2, 24, dtype=torch.bool)
    for copy in (None, clean):
        ctx = context(causal, noisy, copy)
        found = [model.coordinate(model.prefix(noisy, ctx), none, ctx, 2, noisy) for model in (causal, paper)]
        assert torch.equal(*found)

    engines = [Cached(model, [prompt(8), prompt(16)], 2) for model in (causal, paper)]
    block = noisy[:, :8]
    found = [engine.stage_b(engine.stage_a(block)[0], none[:, :8], block) for engine in engines]
    torch.testing.assert_close(*found, **CLOSE)


# --- what is trained is what decodes
def noisy_rows(R: int, T: int) -> tuple[torch.Tensor, ...]:
    """Clean rows; z with masks, wrong and right tokens, none in the prompt or the padding; bundle; real positions."""
    clean = random_ids(R, T, 1)
    real = torch.arange(T) < torch.tensor([24, 16, 24])[:, None]
    free = real & (torch.arange(T) >= torch.tensor([3, 0, 8])[:, None])
    kind = random_ids(R, T, 2, 8)
    z = clean.masked_fill(free & (kind < 5), MASK)
    z = torch.where(free & (kind == 5), (clean + 1) % MASK, z)
    return clean, z, (z == MASK) & (kind < 4), real


@pytest.mark.parametrize("stage_b, causal, n_last, n_rounds", [
    ("shared", False, 1, 2), ("shared", True, 2, 2), ("lora", False, 2, 2),
    ("lora", True, 1, 1), ("copy", False, 2, 1), ("copy", True, 2, 2),
])  # fmt: skip
@torch.no_grad()
def test_a_bundle_has_the_probability_that_it_was_trained_with(stage_b, causal, n_last, n_rounds):
    """Whole rows with a clean copy, of several blocks, a prompt and padding, in training; in decoding each block with
    all before it finished, by itself, from the whole text, and in the company of the others, all of them or some. And
    so has Stage A."""
    model = tiny_model(causal=causal, n_last=n_last, n_rounds=n_rounds)
    random_lora(model, stage_b)
    clean, z, bundle, real = noisy_rows(3, 24)
    tokens = torch.where(bundle, clean, z)
    ctx = model.context(real, clean)
    h = model.prefix(z, ctx)
    logits_a = model.logits(model.last_n(h, ctx)[:, :24])
    states = model.coordinate(h, bundle, ctx, n_rounds, tokens)
    trained = of_tokens(model.logits_b(states, logits_a).log_softmax(-1), clean)

    for start in (0, 8, 16):
        rows = [r for r in range(3) if real[r, start]]
        of_block = lambda x, start=start, rows=rows: x[rows, start : start + 8]  # noqa: E731
        asked = of_block(bundle)
        assert asked.any()
        for kind in (Cached, Uncached):
            engine = kind(model, [clean[r, :start].tolist() for r in rows], n_rounds)
            h, a = engine.stage_a(of_block(z))
            torch.testing.assert_close(model.logits(a), of_block(logits_a), **CLOSE)
            for some in ([], [torch.arange(len(rows))], [torch.tensor([len(rows) - 1])]):
                found = log_probs(engine, h, a, asked, of_block(tokens), *some)
                of = some[0] if some else slice(None)
                log_p = of_tokens(found, of_block(clean)[of])
                torch.testing.assert_close(log_p[asked[of]], of_block(trained)[of][asked[of]], **CLOSE)


def test_the_papers_loss_is_minus_the_log_probability_of_the_bundles():
    """Of one training step: the sum of Stage B's cross-entropies is what the decoder gives a toy's answers, here of a
    causal copy. A prompt's block, and an answer whose masks are the bundle."""
    t = toy.make("pairs", V=4, m=4)
    model = causal_model("copy", vocab_size=16, eos_id=t.eos_id, mask_id=t.mask_id, block_length=t.m)
    x = toy.draw_rows(t, 6, generator("rows"))
    c, answer = x[:, 0] - t.V, x[:, t.m :]
    with torch.no_grad():
        loss, terms = train.cocommit_step(model, toy_batch(t, x), settings())
        z, _ = train.corrupt_batch(model, toy_batch(t, x), settings())
    masked = (z == t.mask_id)[:, t.m :]
    log_p = answer_log_probs(model, t, c, answer.masked_fill(masked, -1), 2, answer)
    log_p = of_tokens(log_p, answer)[masked]
    assert terms["m2t_B"].tolist() == approx([-float(log_p.sum()), int(masked.sum())], rel=1e-4)
    assert len(log_p) > 6 and not masked.all()


# --- the chain rule
@pytest.mark.parametrize("at, stage_b, n_rounds", [
    (range(8), "shared", 1), (range(3, 8), "lora", 2), ((1, 2, 5, 6), "copy", 2),
])  # fmt: skip
@torch.no_grad()
def test_one_pass_has_the_log_probability_of_as_many_looks(at, stage_b, n_rounds):
    """Each of which reads what is written before its position, and no more."""
    model = causal_model(stage_b, n_rounds=n_rounds)
    bundle, text = places(*at), random_ids(1, 8, 2)
    z = text.masked_fill(bundle, MASK)
    engine = Cached(model, [prompt(16)], n_rounds)
    h, a = engine.stage_a(z)
    at_once = of_tokens(log_probs(engine, h, a, bundle, text), text)[bundle].sum()
    written = z.clone()
    one_by_one = 0.0
    for i in at:
        one_by_one += float(of_tokens(log_probs(engine, h, a, bundle, written), text)[0, i])
        written[0, i] = text[0, i]
    assert float(at_once) == approx(one_by_one, abs=1e-3)


@torch.no_grad()
def test_a_toys_tables_are_enumerations():
    """Every pair of tokens, two by two: the first read with nothing, the second with the first, each time the whole
    text anew. All of them have the probability 1; Stage A's table is a product."""
    # two contexts, three symbols, two positions, and a model whose vocabulary has nothing more
    support = torch.tensor([[[0, 1], [1, 2], [2, 2]], [[1, 0], [0, 0], [2, 1]]])
    t = toy.Toy("small", 3, support, torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]], dtype=torch.float64))
    sizes = dict(vocab_size=t.vocab_size, eos_id=t.eos_id, mask_id=t.mask_id, block_length=2)
    model = causal_model(std=0.1, **sizes)
    tables = causal_table(model, t), one_step_table(model, t, 0)
    for c in range(t.n_ctx):
        ids = torch.tensor([[t.V + c] * 2 + [t.mask_id] * 2])
        ctx = replace(context(model, ids), decoded=slice(2, 4), before=slice(0, 2), last=ids[:, 1])
        h = model.prefix(ids, ctx)
        p_a = model.logits(model.last_n(h, ctx))[0, 2:].double().softmax(-1)

        def p(i, *tokens, h=h, ctx=ctx):
            states = model.coordinate(h, places(0, 1, T=2), ctx, 2, torch.tensor([tokens]))
            return model.logits(states)[0, i].double().softmax(-1)

        first = p(0, t.mask_id, t.mask_id)
        joint = torch.stack([first[a] * p(1, a, t.mask_id) for a in range(t.vocab_size)])
        assert float(joint.sum()) == approx(1)
        for s, (a, b) in enumerate(t.support[c].tolist()):
            possible = float(t.prob[c, s] > 0)
            assert float(tables[0][c, s]) == approx(possible * float(joint[a, b]), rel=1e-4)
            assert float(tables[1][c, s]) == approx(possible * float(p_a[0, a] * p_a[1, b]), rel=1e-4)
        # Stage B's table is none: what stands before a token counts
        assert (joint / joint.sum(1, keepdim=True)).std(0).max() > 1e-3


# --- looks
def one_by_one(engine, z, given, u, d: Decoding) -> Step:
    """longest_run without drafts and without an early end: a look a position, which takes that position alone."""
    model = engine.model
    masked = z == model.cfg.mask_id
    h, a = engine.stage_a(z)
    token, conf, run = z.clone(), torch.ones(z.shape), torch.ones(len(z), dtype=torch.float64)
    bundle = torch.zeros_like(masked)
    for j in range(z.shape[1]):
        found, p = candidates(model.logits_b(engine.stage_b(h, masked, token), model.logits(a)), u[:, 1], d)
        here = masked[:, j]
        token[:, j] = torch.where(here, found[:, j], token[:, j])
        conf[:, j] = torch.where(here, p[:, j], 1.0)
        run = run * conf[:, j]
        # what is written: the positions up to which the product is above the gate, and the first
        is_first = here & ~masked[:, :j].any(-1)
        bundle[:, j] = here & ((run > d.tau_joint) | is_first)
    after = torch.where(bundle, token, z)
    looks = d.n_rounds * masked.sum(-1).float()
    return Step(z, after, bundle, torch.zeros_like(masked), token, conf, token, conf, looks)


def holed(n: int, *at: int) -> list[int]:
    ids = prompt(n)
    for i in at:
        ids[i] = MASK
    return ids


# from the left, and with holes
PROMPTS = [prompt(n, n) for n in (3, 8, 13, 16)]
PROMPTS += [holed(16, 9, 12, 13), holed(8, 0, 1, 2, 4, 6), holed(13, 2, 10), holed(16, 8, 14, 15)]


@pytest.mark.parametrize("tau_joint, stage_b, temperature", [
    (0.0, "lora", 0.0), (0.0, "copy", 1.0), (0.01, "copy", 0.0), (0.01, "copy", 1.0), (0.3, "shared", 1.0),
])  # fmt: skip
def test_looks_find_what_one_by_one_writes(tau_joint, stage_b, temperature):
    """Token for token: greedily, and with draws, which are functions of their random numbers and of the tokens before.
    There are no more looks than masks."""
    # smaller weights, whose draws are likely enough to be written together
    model = causal_model(stage_b, std=0.12, n_layer=3)
    d = Decoding(gen_length=9, tau_joint=tau_joint, tau_t2t=None, n_rounds=2, holes=True, temperature=temperature)

    def decoded(step) -> tuple[list, list[Step]]:
        steps = []
        return generate(model, PROMPTS, d, 3, step, lambda _, done: steps.append(done)), steps

    ours, our_steps = decoded(longest_run)
    theirs, their_steps = decoded(one_by_one)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt, a.tokens, a.nfe["full"]) == (b.prompt, b.tokens, b.nfe["full"])
        assert a.nfe["partial"] <= b.nfe["partial"]

    saved = 0
    together = []
    for a, b in zip(our_steps, their_steps, strict=True):
        assert torch.equal(a.after, b.after) and torch.equal(a.bundle, b.bundle)
        assert a.conf[a.bundle].tolist() == approx(b.conf[b.bundle].tolist(), abs=1e-3)
        masks, looks = (a.z == MASK).sum(-1), a.partial / 2
        assert (looks <= masks).all() and ((looks >= 1) == (masks > 0)).all()
        assert (a.bundle.any(-1) == (masks > 0)).all()  # a token at least
        saved += int((masks - looks).sum())
        together += a.bundle.sum(-1).tolist()
    assert saved > 0
    if tau_joint == 0:
        assert all(torch.equal(a.bundle, a.z == MASK) for a in our_steps)  # among it a mask, where that is the draw
    else:
        assert max(together) > 1 or tau_joint == 0.3


class Counting:
    """An engine whose Stage A drafts what it is told, and whose Stage B counts on from the token before; position 0
    counts on from 0. Every token has the probability p."""

    def __init__(self, drafts: list[list[int]], p: float):
        self.drafts = torch.tensor(drafts)
        self.looked: list[list[int]] = []
        cfg = SimpleNamespace(mask_id=9, causal=True)
        self.model = SimpleNamespace(cfg=cfg, logits=lambda states: states, logits_b=lambda states, logits_a: states)
        self.p = p

    def logits(self, token):
        """Of ten tokens one has the probability p, and the others share the rest."""
        hot = F.one_hot(token, 10).float()
        return (hot * self.p + (1 - hot) * (1 - self.p) / 9).log()

    def stage_a(self, z):
        return z, self.logits(self.drafts)

    def stage_b(self, h, bundle, tokens, rows):
        self.looked.append(rows.tolist())
        return self.logits((F.pad(tokens[rows][:, :-1], (1, 0)) + 1) % 10)


def run_of(drafts, z, tau_joint=0.0, p=0.8) -> tuple[list[list[int]], list[float], list[list[int]]]:
    """The rows after a step, their looks, and who took part in each."""
    engine = Counting(drafts, p)
    z = torch.tensor(z)
    zeros = torch.zeros(*z.shape[:1], 2, z.shape[1])
    d = Decoding(tau_joint=tau_joint, n_rounds=1)
    done = longest_run(engine, z, torch.zeros_like(z, dtype=torch.bool), zeros, d)
    assert torch.equal(done.bundle, done.after != z) and not done.edited.any()
    return done.after.tolist(), done.partial.tolist(), engine.looked


def test_looks_by_hand():
    """Stage B would write 1 2 3 4. After a look all up to and with the first that differs from its draft are final."""
    right = [1, 2, 3, 4]
    masks = [9, 9, 9, 9]
    # drafts that are right take one look, and so do those that are wrong in the last, or in any one
    assert run_of([right], [masks]) == ([right], [1], [[0]])
    assert run_of([[1, 2, 3, 7]], [masks]) == ([right], [1], [[0]])
    # one is mended in the first look, which what follows has not read: 1 7 3 4 -> 1 2 8 4 -> 1 2 3 9 -> 1 2 3 4
    assert run_of([[1, 7, 3, 4]], [masks]) == ([right], [3], [[0]] * 3)
    # nothing right: a look a token
    assert run_of([[7, 7, 7, 7]], [masks]) == ([right], [4], [[0]] * 4)
    # rows that are done leave the looks, and a row without a mask takes no part
    three = [[1, 7, 3, 4], right, right]
    assert run_of(three, [masks, masks, right]) == ([right] * 3, [3, 1, 0], [[0, 1], [0], [0]])
    # visible tokens stay: 5 is the end of what is counted on from, and 3 and 6 are what follows it
    assert run_of([[1, 2, 3, 6]], [[9, 9, 5, 9]]) == ([[1, 2, 5, 6]], [1], [[0]])

    # .8, .64, .512, .41 are the products: a run above .6 is two tokens, above .9 it is one, the first
    assert run_of([right], [masks], 0.6) == ([[1, 2, 9, 9]], [1], [[0]])
    assert run_of([right], [masks], 0.9) == ([[1, 9, 9, 9]], [1], [[0]])
    # strictly above: .5 and .25, whose logarithms no machine rounds apart
    assert run_of([right], [masks], 0.25, p=0.5) == ([[1, 9, 9, 9]], [1], [[0]])
    assert run_of([right], [masks], 0.24, p=0.5) == ([[1, 2, 9, 9]], [1], [[0]])
    # nobody looks on for what falls below the gate: two tokens are final after the first look, at .64
    assert run_of([[1, 7, 3, 4]], [masks], 0.7) == ([[1, 9, 9, 9]], [1], [[0]])
    assert run_of([[1, 7, 3, 4]], [masks], 0.6) == ([[1, 2, 9, 9]], [2], [[0]] * 2)


def assert_run(done: Step, z: torch.Tensor, p: torch.Tensor, token: torch.Tensor, tau: float) -> None:
    """By hand: the leftmost masks whose probabilities have a product above tau, and at least one, have their token."""
    masked = z == MASK
    run = torch.where(masked, p, 1.0).cumprod(-1)
    written = masked & ((run > tau) | (masked.cumsum(-1) == 1))
    assert torch.equal(done.bundle, written) and torch.equal(done.after, torch.where(written, token, z))


@torch.no_grad()
def test_without_stage_b_the_run_is_stage_as_own():
    model = tiny_model(std=0.15)
    ids = torch.tensor([holed(16, 9, 12, 13, 15), holed(16, 8, 9, 10, 11, 14)])
    z = ids[:, 8:]
    p, token = model(ids, context(model, ids))[:, 8:].softmax(-1).max(-1)
    written = []
    for tau in (0.0, 1e-4, 0.01, 0.2, 1.0):
        engine = Cached(model, ids[:, :8].tolist(), 0)
        d = Decoding(n_rounds=0, tau_joint=tau, holes=True)
        done = longest_run(engine, z, z != MASK, torch.zeros(2, 2, 8), d)
        assert done.partial.tolist() == [0, 0]
        assert_run(done, z, p, token, tau)
        written += done.bundle.sum(-1).tolist()
    assert written[:2] == [4, 5] and written[-2:] == [1, 1] and len(set(written)) > 3


# --- the decoders
@pytest.mark.parametrize("stage_b, tau_joint, n_rounds", [
    ("shared", 0.3, 2), ("lora", 0.0, 1), ("lora", None, 2), ("copy", 0.3, 2), ("copy", None, 1),
    (None, 0.0, 0), (None, 0.3, 0),
])  # fmt: skip
def test_generate_equals_the_specification(stage_b, tau_joint, n_rounds):
    """By the longest run, and by the paper's gates with a causal Stage B, one look a step. Prompts end in a block, with
    it, and have holes."""
    model = causal_model(stage_b, std=0.15)
    d = Decoding(gen_length=9, tau_joint=tau_joint, tau_m2t=0.1, tau_t2t=None, n_rounds=n_rounds, holes=True)
    if stage_b == "copy":
        d = replace(d, tau_t2t=0.0, max_post_steps=2)  # with edits, where there are any
    texts = [prompt(3), prompt(8), holed(16, 3, 9, 12), holed(13, 10, 12)]
    assert_as_specified(model, texts, d)


@pytest.mark.parametrize("tau_joint", [0.05, None])
def test_a_row_of_eight_is_the_row_alone(tau_joint):
    """Of several lengths, with holes and without, in blocks that end at different steps after different looks."""
    model = causal_model("copy", std=0.12, n_layer=3)
    d = Decoding(
        gen_length=7, n_rounds=2, tau_joint=tau_joint, tau_m2t=0.2, tau_t2t=None, temperature=0.9, holes=True,
        eos_early_stop=False,
    )  # fmt: skip
    texts = [holed(n, 1, n - 2) if n % 3 == 0 else prompt(n, n) for n in range(3, 19, 2)]
    together, steps = traced(model, texts, d, seed=5)
    assert len({out.nfe["partial"] for out in together}) > 2
    for text, out, of_row in zip(texts, together, steps, strict=True):
        (single,), (alone,) = traced(model, [text], d, seed=5)
        assert (single.prompt, single.tokens, single.nfe) == (out.prompt, out.tokens, out.nfe)
        assert [s["after"] for s in alone] == [s["after"] for s in of_row]


def test_a_stage_b_that_sees_no_tokens_looks_once():
    """The paper's, on runs: what one look says of every mask is final. The steps by the same rule as Stage A's run."""
    model = tiny_model(std=0.15, n_layer=3)
    random_lora(model, "copy")
    d = Decoding(gen_length=9, tau_joint=0.1, tau_t2t=None, n_rounds=2, eos_early_stop=False)
    outputs = assert_as_specified(model, [prompt(3), prompt(8)], d, both=(False, True))
    # each of them in two blocks, the first of which is read in a second round
    assert [out.nfe["partial"] for out in outputs] == [2 * out.nfe["full"] + 1 for out in outputs]

    text = holed(16, 8, 9, 12, 13, 14)
    z = torch.tensor([text[8:]])
    with torch.no_grad():
        engine = Cached(model, [text[:8]], 2)
        done = longest_run(engine, z, z != MASK, torch.zeros(1, 2, 8), d)
        h, a = engine.stage_a(z)
        p, token = log_probs(engine, h, a, z == MASK, z).exp().max(-1)
    assert_run(done, z, p, token, 0.1)


# --- it learns what tokens are together
def test_the_papers_own_loss_teaches_it_pairs():
    """(a, a + c mod 3) with a uniform: TC = ln 3. Trained from scratch by the paper's step, causal Stage B loses less
    than a tenth of it, and its Stage A, which is the paper's, cannot lose less than all."""
    t = toy.make("pairs", V=3, m=2)
    sizes = dict(n_layer=2, n_dense=2, n_embd=32, d_dense=64, n_last=1, n_rounds=1, block_length=2)
    cfg = tiny_config(**sizes, vocab_size=16, eos_id=t.eos_id, mask_id=t.mask_id, causal=True)
    model = new_model(cfg, generator("init"))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for it in range(125):
        x = toy.draw_rows(t, 64, generator("rows", it))
        loss, _ = train.cocommit_step(model, toy_batch(t, x, it), settings())
        (loss / x.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    tc = float(t.tc().mean())
    assert tc == approx(math.log(3))
    joint, product = causal_table(model, t), one_step_table(model, t, 0)
    assert (joint.sum(-1) <= 1).all()
    assert float(toy.kl(t.prob, joint).mean()) < tc / 10
    assert tc - 1e-9 <= float(toy.kl(t.prob, product).mean()) < 1.2 * tc
