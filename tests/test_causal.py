"""Causal Stage B: what it sees, its probability of a bundle, its looks. `pytest tests/test_causal.py`

On random weights, with Show not zero: nothing is hidden by what is not learned yet.
"""

import itertools
import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, assert_as_specified, prompt, random_ids, random_lora, tiny_config, tiny_model, traced
from test_model import CLOSE, context, noisy_rows

import toy
from cache import Cached, Uncached
from causal import CausalModel, causal_denoise, causal_step, masks_and_bundle, token_before
from checkpoint import new_model
from decoding import Decoding, Step, candidates
from evaluate import causal_table, one_step_table
from lib.rows import Batch
from lib.util import generator
from model import Context, rotate
from sample import generate

# R rows, T positions, B block_length, V vocabulary, m positions of a bundle


def causal_model(**sizes) -> CausalModel:
    """A random causal model, whose copy of the last layers is no longer the base's."""
    model = tiny_model(stage_b="causal", **dict(n_rounds=1) | sizes)
    random_lora(model)
    return model


def places(*at: int, T: int = 8) -> torch.Tensor:
    """(1, T) bool."""
    return torch.isin(torch.arange(T), torch.tensor(at))[None]


def log_probs(model: CausalModel, states_b: torch.Tensor, states_a: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of Stage B: (R, T, V)."""
    return model.logits_b(torch.cat([states_b, states_a], dim=-1)).log_softmax(-1)


def said(engine: Cached | Uncached, z: torch.Tensor, bundle: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of an engine's Stage B in the current blocks: (R, B, V)."""
    h, a = engine.stage_a(z)
    return log_probs(engine.model, engine.stage_b(h, bundle, tokens), a)


def of_tokens(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(R, B, V), (R, B) int64 -> (R, B)."""
    return log_p.gather(-1, tokens[..., None])[..., 0]


# --- what a position is shown, and whom it sees
def test_what_a_position_is_shown_by_hand():
    """A position is shown the token before it, and the first position of a block the token before the block. If that
    token is not in the bundle, it is shown the nearest earlier bundle token of its block, if there is one."""
    tokens, before_blocks = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[9, 6]])
    for bundle in (places(T=4), places(0, 1, 2, 3, T=4)):
        assert token_before(tokens, bundle, before_blocks, 2).tolist() == [[9, 1, 6, 3]]
    assert token_before(tokens, places(0, T=4), before_blocks[:, :1], 8).tolist() == [[9, 1, 1, 1]]
    bundle = places(1, 2, 4, 7, 9, T=10)
    assert token_before(torch.arange(10)[None], bundle, before_blocks, 5).tolist() == [[9, 0, 1, 2, 2, 6, 5, 6, 7, 7]]


# --- Stage A stays the base, and Stage B reads its keys
def test_stage_a_stays_the_base_and_is_added_to():
    """Only the copy of the last layers, the marker and Show learn, and Stage A uses none of them. The sum by hand:
    Stage B's factors 1 and 3 times Stage A's 1/4 and 3/4 are 1 : 9."""
    model, ids = tiny_model(stage_b="causal", n_rounds=1), random_ids(2, 16)
    ctx, bundle = context(ids, model, ids), torch.ones(2, 16, dtype=torch.bool)
    base = model(ids, ctx)
    random_lora(model)
    own = {f"layers_b.{i}.{name}" for i in (0, 1) for name, _ in model.layers[2 + i].named_parameters()}
    assert model.learned().keys() == own | {"markers", "show"}
    assert not any("lora" in name for name, _ in model.named_parameters())
    for p in model.learned().values():
        p.data.fill_(torch.inf)
    h = model.prefix(ids, ctx)
    assert torch.equal(model.logits(model.last_n(h, ctx)), base)
    assert not model.coordinate(h, bundle, ctx, 1, ids).isfinite().all()

    model.logits = lambda h: h
    found = model.logits_b(torch.tensor([1.0, 3.0, 2.0, 6.0]).log()).softmax(-1)
    assert found.tolist() == approx([0.1, 0.9])


def heads_of(layer, x: torch.Tensor, ctx: Context) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a layer, (R, H, T, D) each; the two query heads of a key head are neighbours."""
    q, k, v = layer.attn.qkv(layer.norm_1(x)).unflatten(-1, (-1, 16)).split([4, 2, 2], dim=2)
    q, k = rotate(layer.attn.q_norm(q), ctx), rotate(layer.attn.k_norm(k), ctx)
    return tuple(of.transpose(1, 2).repeat_interleave(4 // of.shape[2], 1) for of in (q, k, v))


@torch.no_grad()
def test_it_reads_the_keys_that_stage_as_pass_has_left(monkeypatch):
    """With a clean copy, Stage B by hand: its own layers run on the marked rows, and the keys before a block are those
    of Stage A's layers on the clean text. No layer of Stage A runs again for this."""
    model = causal_model(n_last=3)
    clean, z, bundle, real = noisy_rows()
    tokens = torch.where(bundle, clean, z)
    ctx = model.context(real, clean)
    h = model.prefix(z, ctx)
    model.last_n(h, ctx)
    ran = []
    hooks = [layer.register_forward_hook(lambda *of: ran.append(of)) for layer in model.layers]
    found = model.coordinate(h, bundle, ctx, 1, tokens)
    assert not ran and len(hooks) == 4

    # what it starts from
    monkeypatch.setattr(model, "run_layers", lambda h, ctx, layers: h)
    marked = model.coordinate(h, bundle, ctx, 1, tokens)
    monkeypatch.undo()
    text_ctx = model.context(real)
    text = model.prefix(clean, text_ctx)
    block, at = torch.arange(24) // 8, torch.arange(24)
    within = (block[:, None] == block) & (~bundle[:, None] | (bundle[..., None] & (at <= at[:, None])))
    sees = torch.cat([within, (block[:, None] > block).expand(3, 24, 24)], dim=2) & real.repeat(1, 2)[:, None]
    for stage_a, stage_b in zip(model.layers[1:], model.layers_b, strict=True):
        q, k, v = heads_of(stage_b, marked, text_ctx)
        _, of_k, of_v = heads_of(stage_a, text, text_ctx)
        scores = q @ torch.cat([k, of_k], dim=2).mT / 4
        y = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1) @ torch.cat([v, of_v], dim=2)
        marked = marked + stage_b.attn.proj(y.transpose(1, 2).flatten(2))
        marked = marked + stage_b.mlp(stage_b.norm_2(marked))
        text = stage_a(text, text_ctx)
    torch.testing.assert_close(found[real], marked[real], **CLOSE)


# --- what is trained is what decodes
@pytest.mark.parametrize("n_last", [1, 2, 3])
@torch.no_grad()
def test_a_bundle_has_the_probability_that_it_was_trained_with(n_last):
    """In training there are whole rows with a clean copy, of several blocks, with a prompt and padding. In decoding
    each block is read after the finished ones before it, beside other rows, with a cache and without."""
    model = causal_model(n_last=n_last)
    clean, z, bundle, real = noisy_rows()
    tokens = torch.where(bundle, clean, z)
    ctx = model.context(real, clean)
    h = model.prefix(z, ctx)
    a = model.last_n(h, ctx)[:, :24]
    trained = log_probs(model, model.coordinate(h, bundle, ctx, 1, tokens), a)
    for start in (0, 8, 16):
        rows = real[:, start].nonzero()[:, 0]
        block = slice(start, start + 8)
        for kind in (Cached, Uncached):
            engine = kind(model, clean[rows, :start].tolist(), 1)
            torch.testing.assert_close(engine.stage_a(z[rows, block])[1], a[rows, block], **CLOSE)
            found = said(engine, z[rows, block], bundle[rows, block], tokens[rows, block])
            torch.testing.assert_close(found, trained[rows, block], **CLOSE)


def test_masks_and_bundles_by_hand(monkeypatch):
    """Two blocks of four; the first positions of the second row are its prompt. A block to continue is masked from a
    place on, and all masks are its bundle. In a block with holes the positions that draw below the ratio are masked,
    and the masks with the lowest lots are the bundle. A row that teaches holes alone has no block to continue. With a
    share of whole blocks the coin's highest draws mask a whole block (but no prompt, and not in rows of holes)."""
    numbers = [
        [[0.6, 0.1], [0.7, 0.8]],  # below one half: with holes
        [[0.5, 0.7], [0.0, 0.9]],  # the place, as a share of the block; or the ratio
        [[0.0, 0.4], [0.9, 0.9]],  # sizes: 1 + floor(4 u)
        [[0.0] * 4 + [0.3, 0.9, 0.1, 0.2], [0.0] * 8],  # lots
        [[0.0] * 4 + [0.6, 0.6, 0.8, 0.1], [0.0] * 8],  # what is compared with the ratio
    ]  # fmt: skip
    draws = itertools.cycle(numbers)
    for name in ("causal.uniform", "corrupt.uniform"):
        monkeypatch.setattr(name, lambda generators, n: torch.tensor(next(draws)))
    corruptible = torch.tensor([[True] * 8, [False] * 2 + [True] * 6])
    masked, bundle = masks_and_bundle(batch_of(corruptible, [None, None]), 4)
    assert masked.int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 1], [0, 0, 1, 1, 0, 0, 0, 1]]
    assert bundle.int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0, 1]]
    masked, bundle = masks_and_bundle(batch_of(corruptible, [None, None], torch.tensor([[True], [False]])), 4)
    assert masked.int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 1, 1, 0, 0, 0, 1]]
    assert bundle.int().tolist() == [[1, 0, 0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0, 1]]
    masked, bundle = masks_and_bundle(batch_of(corruptible, [None, None]), 4, 0.25)
    assert masked.int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1]]
    assert bundle.int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1]]
    masked, bundle = masks_and_bundle(batch_of(corruptible, [None, None], torch.tensor([[True], [False]])), 4, 1.0)
    assert masked.int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1]]
    assert bundle.int().tolist() == [[1, 0, 0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1]]


def test_a_rows_masks_do_not_depend_on_the_rows_beside_it():
    every = torch.ones(2, 64, dtype=torch.bool)
    masked, bundle = masks_and_bundle(batch_of(every, [generator("row", 0), generator("row", 1)]), 8)
    alone, bundle_alone = masks_and_bundle(batch_of(every[:1], [generator("row", 1)]), 8)
    assert torch.equal(masked[1:], alone) and torch.equal(bundle[1:], bundle_alone)


def batch_of(corruptible: torch.Tensor, draws: list, holes_alone: torch.Tensor | bool = False) -> Batch:
    """A batch with only what masks and bundles are drawn for."""
    return Batch(corruptible, corruptible, corruptible, torch.arange(9), draws, holes_alone)


def toy_batch(t: toy.Toy, x: torch.Tensor, *key: int) -> Batch:
    """Rows x of a toy as a batch, with the same draws at every call."""
    corruptible = torch.arange(2 * t.m).expand_as(x) >= t.m
    draws = [generator("draws", *key, r) for r in range(len(x))]
    return Batch(x, torch.ones_like(corruptible), corruptible, torch.arange(t.V), draws)


def test_the_papers_loss_is_minus_the_log_probability_of_the_bundles():
    """In one training step Stage B's sum over masks is the log-probability that the decoder gives these tokens. Eq. 1
    weighs it by 1, and right tokens by 0.2; there are no wrong ones."""
    t = toy.make("pairs", V=4, m=4)
    model = causal_model(vocab_size=16, eos_id=t.eos_id, mask_id=t.mask_id, block_length=t.m)
    x = toy.draw_rows(t, 12, generator("rows"))
    masks = masks_and_bundle(toy_batch(t, x), t.m)
    masked, bundle = (of[:, t.m :] for of in masks)
    assert 0 < bundle.sum() < masked.sum() < 48

    with torch.no_grad():
        loss, terms = causal_step(model, toy_batch(t, x), Namespace(whole_share=0.0))
        answer = x[:, t.m :]
        z = answer.masked_fill(masked, t.mask_id)
        engine = Cached(model, x[:, : t.m].tolist(), 1)
        log_p = of_tokens(said(engine, z, bundle, torch.where(bundle, answer, z)), answer)
    expected = {"m2t_B": bundle, "clean_B": ~masked}
    for name, where in expected.items():
        assert terms[name].tolist() == approx([-float(log_p[where].sum()), int(where.sum())], rel=1e-4)
    assert not terms["edit_B"].any()
    weighed = {"m2t_A": 1, "m2t_B": 1, "clean_A": 0.2, "clean_B": 0.2}
    assert float(loss) == approx(sum(weight * float(terms[name][0]) for name, weight in weighed.items()), rel=1e-4)


# --- the chain rule
@pytest.mark.parametrize("at", [range(8), range(3, 8), (1, 2, 5, 6)])
@torch.no_grad()
def test_one_pass_has_the_log_probability_of_as_many_looks(at):
    """Each look reads only what is written before its position."""
    model = causal_model()
    bundle, text = places(*at), random_ids(1, 8, 2)
    z = text.masked_fill(bundle, MASK)
    engine = Cached(model, [prompt(16)], 1)
    at_once = of_tokens(said(engine, z, bundle, text), text)[bundle].sum()
    written = z.clone()
    one_by_one = 0.0
    for i in at:
        one_by_one += float(of_tokens(said(engine, z, bundle, written), text)[0, i])
        written[0, i] = text[0, i]
    assert float(at_once) == approx(one_by_one, abs=1e-3)


@torch.no_grad()
def test_a_toys_tables_are_enumerations():
    """Every pair of tokens is read one by one: the first after nothing, the second after the first, and each time the
    whole text is read again. All pairs together have the probability 1, and Stage A's table is a product."""
    # two contexts, three symbols, two positions, and a model whose vocabulary has nothing more
    support = torch.tensor([[[0, 1], [1, 2], [2, 2]], [[1, 0], [0, 0], [2, 1]]])
    t = toy.Toy("small", 3, support, torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]], dtype=torch.float64))
    sizes = dict(vocab_size=t.vocab_size, eos_id=t.eos_id, mask_id=t.mask_id, block_length=2)
    model = causal_model(std=0.1, **sizes)
    tables = causal_table(model, t), one_step_table(model, t, 0)
    both, masks = places(0, 1, T=2), torch.tensor([[t.mask_id] * 2])
    for c in range(t.n_ctx):
        engine = Uncached(model, [[t.V + c] * 2], 1)
        p_a = model.logits(engine.stage_a(masks)[1])[0].double().softmax(-1)
        tokens = torch.tensor([[x, t.mask_id] for x in range(t.vocab_size)])
        first = said(engine, masks, both, masks)[0, 0].double().exp()
        second = torch.stack([said(engine, masks, both, pair[None])[0, 1].double().exp() for pair in tokens])
        joint = first[:, None] * second
        assert float(joint.sum()) == approx(1)
        for s, (x, y) in enumerate(t.support[c].tolist()):
            possible = float(t.prob[c, s] > 0)
            assert float(tables[0][c, s]) == approx(possible * float(joint[x, y]), rel=1e-4)
            assert float(tables[1][c, s]) == approx(possible * float(p_a[0, x] * p_a[1, y]), rel=1e-4)
        # Stage B's table is none: what stands before a token counts
        assert second.std(0).max() > 1e-3


# --- looks
def one_by_one(engine, z, given, u, d: Decoding) -> Step:
    """causal_denoise without drafts and without an early end: one look for each position, which writes only this
    position."""
    model = engine.model
    masked = z == model.cfg.mask_id
    h, a = engine.stage_a(z)
    token, conf, run = z.clone(), torch.ones(z.shape), torch.ones(len(z), dtype=torch.float64)
    bundle = torch.zeros_like(masked)
    for j in range(z.shape[1]):
        log_p = log_probs(model, engine.stage_b(h, masked, token), a)
        found, p = candidates(log_p, u[:, 1], d)
        here = masked[:, j]
        token[:, j] = torch.where(here, found[:, j], token[:, j])
        conf[:, j] = torch.where(here, p[:, j], 1.0)
        run = run * conf[:, j]
        # what is written: the positions up to which the product is above the gate, and the first
        is_first = here & ~masked[:, :j].any(-1)
        bundle[:, j] = here & ((run > d.tau_joint) | is_first)
    after = torch.where(bundle, token, z)
    return Step(z, after, bundle, torch.zeros_like(masked), token, conf, token, conf, masked.sum(-1).float())


def holed(n: int, *at: int) -> list[int]:
    return [MASK if i in at else token for i, token in enumerate(prompt(n))]


# from the left, and with holes
PROMPTS = [prompt(n, n) for n in (3, 8, 13, 16)]
PROMPTS += [holed(16, 9, 12, 13), holed(8, 0, 1, 2, 4, 6), holed(13, 2, 10), holed(16, 8, 14, 15)]


@pytest.mark.parametrize("tau_joint, temperature", [(0.0, 0.0), (0.0, 1.0), (0.01, 0.0), (0.01, 1.0), (1.0, 1.0)])
def test_looks_find_what_one_by_one_writes(tau_joint, temperature):
    """The tokens are the same, greedily and in draws, which are functions of their random numbers and of the tokens
    before them. There are no more looks than masks."""
    # smaller weights, whose draws are likely enough to be written together
    model = causal_model(std=0.12, n_layer=3)
    d = Decoding(gen_length=9, tau_joint=tau_joint, tau_t2t=None, holes=True, temperature=temperature)

    def decoded(step) -> tuple[list, list[Step]]:
        steps = []
        return generate(model, PROMPTS, d, 3, step, on_step=lambda _, done: steps.append(done)), steps

    ours, our_steps = decoded(None)  # left out, the step is the model's own
    theirs, their_steps = decoded(one_by_one)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt, a.tokens, a.nfe["full"]) == (b.prompt, b.tokens, b.nfe["full"])

    saved = together = 0
    for a, b in zip(our_steps, their_steps, strict=True):
        assert torch.equal(a.after, b.after) and torch.equal(a.bundle, b.bundle)
        assert a.conf[a.bundle].tolist() == approx(b.conf[b.bundle].tolist(), abs=1e-3)
        masks, written = (a.z == MASK).sum(-1), a.bundle.sum(-1)
        assert (a.partial <= masks).all()
        assert all(torch.equal(some > 0, masks > 0) for some in (a.partial, written))  # a look, and a token, at least
        if tau_joint == 0:
            assert torch.equal(written, masks)  # among it a mask, where that is the draw
        saved += int((masks - a.partial).sum())
        together = max(together, int(written.max()))
    assert saved > 0 and (together > 1) == (tau_joint < 1)


class Counting:
    """An engine whose Stage A gives the drafts of the test, and whose Stage B counts: its token is the one before plus
    one, and position 0 has 1. Every token has the probability p."""

    def __init__(self, drafts: list[list[int]], p: float):
        self.drafts = torch.tensor(drafts)
        cfg = SimpleNamespace(mask_id=9)
        self.model = SimpleNamespace(cfg=cfg, logits=lambda states: states, add_to=lambda log_p_a, logits: logits)
        self.p = p

    def logits(self, token):
        """Of ten tokens one has the probability p, and the others share the rest."""
        hot = F.one_hot(token, 10).float()
        return (hot * self.p + (1 - hot) * (1 - self.p) / 9).log()

    def stage_a(self, z):
        return z, self.logits(self.drafts)

    def stage_b(self, h, bundle, tokens):
        return self.logits((F.pad(tokens[:, :-1], (1, 0)) + 1) % 10)


def run_of(drafts, z, tau_joint=0.0, p=0.8) -> tuple[list[list[int]], list[float]]:
    """The rows after one step, and how many looks they took."""
    z = torch.tensor(z)
    zeros = torch.zeros(len(z), 2, z.shape[1])
    done = causal_denoise(Counting(drafts, p), z, torch.zeros_like(z).bool(), zeros, Decoding(tau_joint=tau_joint))
    assert torch.equal(done.bundle, done.after != z) and not done.edited.any()
    return done.after.tolist(), done.partial.tolist()


def test_looks_by_hand():
    """Stage B would write 1 2 3 4. After a look the first token that differs from its draft is final, and so are all
    tokens before it."""
    right = [1, 2, 3, 4]
    masks = [9, 9, 9, 9]
    # right drafts take one look, and so do drafts of which only the last is wrong
    assert run_of([right], [masks]) == ([right], [1])
    assert run_of([[1, 2, 3, 7]], [masks]) == ([right], [1])
    # a look corrects one token, but the next one has not read the correction: 1 7 3 4 -> 1 2 8 4 -> 1 2 3 9 -> 1 2 3 4
    assert run_of([[1, 7, 3, 4]], [masks]) == ([right], [3])
    # if no draft is right, each token takes one look
    assert run_of([[7, 7, 7, 7]], [masks]) == ([right], [4])
    # rows that are done take no further looks, and a row without a mask takes none
    assert run_of([[1, 7, 3, 4], right, right], [masks, masks, right]) == ([right] * 3, [3, 1, 0])
    # visible tokens stay, and the tokens after them count on from them
    assert run_of([[1, 2, 3, 6]], [[9, 9, 5, 9]]) == ([[1, 2, 5, 6]], [1])

    # the products are .8, .64, .512, .41: a run above .6 has two tokens, and above .9 it is the first token
    assert run_of([right], [masks], 0.6) == ([[1, 2, 9, 9]], [1])
    assert run_of([right], [masks], 0.9) == ([[1, 9, 9, 9]], [1])
    # strictly above: .5 and .25, whose logarithms no machine rounds apart
    assert run_of([right], [masks], 0.25, p=0.5) == ([[1, 9, 9, 9]], [1])
    assert run_of([right], [masks], 0.24, p=0.5) == ([[1, 2, 9, 9]], [1])
    # no look is taken for tokens below the gate: two tokens are final after the first look, at .64
    assert run_of([[1, 7, 3, 4]], [masks], 0.7) == ([[1, 9, 9, 9]], [1])
    assert run_of([[1, 7, 3, 4]], [masks], 0.6) == ([[1, 2, 9, 9]], [2])
    # one at a time: the first token is Stage B's, too
    assert run_of([[7, 7, 7, 7]], [masks], 1.0) == ([[1, 9, 9, 9]], [1])


# --- the decoders
@pytest.mark.parametrize("tau_joint, n_rounds", [(0.0, 1), (0.3, 1), (0.0, 0), (0.3, 0), (None, 0)])
def test_generate_equals_the_specification(tau_joint, n_rounds):
    """With causal Stage B; and with Stage B off, by the longest run or by the paper's gates. Prompts end inside a block
    or at its end, and some have holes."""
    d = Decoding(gen_length=9, tau_joint=tau_joint, tau_m2t=0.1, tau_t2t=None, n_rounds=n_rounds, holes=True)
    texts = [prompt(3), prompt(8), holed(16, 3, 9, 12), holed(13, 10, 12)]
    outputs = assert_as_specified(causal_model(std=0.15), texts, d, both=(False, True))
    assert all((out.nfe["partial"] > 0) == (n_rounds > 0) for out in outputs)


def test_a_row_of_eight_is_the_row_alone():
    """The rows have several lengths, with holes and without, and their blocks end at different steps."""
    model = causal_model(std=0.12, n_layer=3)
    d = Decoding(gen_length=7, tau_joint=0.05, tau_t2t=None, temperature=0.9, holes=True, eos_early_stop=False)
    texts = [holed(n, 1, n - 2) if n % 3 == 0 else prompt(n, n) for n in range(3, 19, 2)]
    together, steps = traced(model, texts, d, seed=5)
    assert len({out.nfe["partial"] for out in together}) > 2
    for text, out, of_row in zip(texts, together, steps, strict=True):
        (single,), (alone,) = traced(model, [text], d, seed=5)
        assert (single.prompt, single.tokens, single.nfe) == (out.prompt, out.tokens, out.nfe)
        assert [s["after"] for s in alone] == [s["after"] for s in of_row]


# --- it learns what tokens are together
def test_the_papers_own_loss_teaches_it_pairs():
    """(a, a + c mod 3) with a uniform a has TC = ln 3. Trained from scratch, causal Stage B loses less than a tenth of
    it, and Stage A, which is the paper's, cannot lose less than all of it."""
    t = toy.make("pairs", V=3, m=2)
    sizes = dict(n_layer=2, n_dense=2, n_embd=32, d_dense=64, n_last=1, n_rounds=1, block_length=2)
    cfg = tiny_config(**sizes, vocab_size=16, eos_id=t.eos_id, mask_id=t.mask_id)
    model = new_model(cfg, generator("init"), stage_b="causal")
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for it in range(150):
        x = toy.draw_rows(t, 64, generator("rows", it))
        loss, _ = causal_step(model, toy_batch(t, x, it), Namespace(whole_share=0.0))
        (loss / x.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    tc = float(t.tc().mean())
    assert tc == approx(math.log(3))
    joint, product = causal_table(model, t), one_step_table(model, t, 0)
    assert (joint.sum(-1) <= 1).all()
    assert float(toy.kl(t.prob, joint).mean()) < tc / 10
    assert tc - 1e-9 <= float(toy.kl(t.prob, product).mean()) < 1.2 * tc


def test_stage_b_counts_as_trained_when_a_parameter_that_began_at_zero_is_not_zero():
    """A Stage B of your own names its parameters in begin_at_zero; sample.py and evaluate.py ask this."""
    model = tiny_model(n_rounds=1, stage_b="causal")
    for moved in ((), ("markers",), ("show",), ("markers", "show")):
        for name in model.begin_at_zero:
            getattr(model, name).data.fill_(float(name in moved))
        assert model.trained_b == bool(moved)
