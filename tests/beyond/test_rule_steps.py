"""Steps that remember, take back or verify. `pytest tests/beyond/test_rule_steps.py`

By hand, on an engine that is told its logits; and against the same loops for one row, without a cache, which keep what
they remember in local variables.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from common import MASK, random_ids, tiny_model

from beyond import decoders, pays, rule_steps, rules
from beyond.rule_steps import Followed, causal_mask, read_beside, shadow_mask
from cache import Cached
from model import Context, block_causal_mask, rotary, sequence_context
from sample import Decoding, generate

# R rows, B positions of a block, V tokens

M = 3  # the mask, of a vocabulary of 4 tokens
OFF = Decoding(gen_length=16, tau_t2t=None, n_rounds=0)
DIALED = [("klass", 0.2), ("wino", 0.2), ("wino", 0.1), ("t2m", 0.1), ("s2d2", None)]


class Told(Followed):
    """An engine whose passes say what a test has written down: probabilities (R, B, V), one table a pass."""

    def __init__(self, tables, lengths):
        self.cfg = SimpleNamespace(mask_id=M)
        self.tables = iter(tables)
        self.numbers = list(range(len(lengths)))
        self.memory = {}
        self.cache = SimpleNamespace(lengths=lengths)

    def stage_a(self, z):
        return None, torch.tensor(next(self.tables)).log()


def take(step, engine, z):
    """One step on blocks without a prompt."""
    z = torch.tensor(z)
    return step(engine, z, torch.zeros_like(z, dtype=torch.bool), True, None, OFF)


def at(positions):
    return [row.nonzero()[:, 0].tolist() for row in positions]


def small(**changes):
    """A tiny model of which no step writes a mask: other tokens are above it. Nor does a text end early."""
    model = tiny_model(**dict(eos_id=-1, std=0.15) | changes)
    model.lm_head.weight.data[MASK] = 0
    return model.requires_grad_(False)


def some_prompts():
    """Of several lengths; one of them fills two blocks, and a token more."""
    return [random_ids(1, n, n)[0].tolist() for n in (3, 8, 1, 17, 6)]


def setting(name, dial):
    label = name
    if dial is not None:
        label = f"{name} {dial:g}"
    return next(s for s in decoders.settings_of_rule_steps(OFF) if s.label == label)


# --- what an engine remembers
def test_memory_is_a_row_s_and_a_block_s():
    """Three rows. Row 1 goes on to its next block, row 0 leaves: row 2, now the second, keeps what is its own."""
    engine = Followed.__new__(Followed)
    engine.numbers, engine.memory = [0, 1, 2], {}
    engine.cache = SimpleNamespace(lengths=[8, 8, 16], keep=lambda rows: None)
    engine.h_a, engine.next = torch.zeros(3, 1), None
    none = torch.zeros(3, 1)
    assert [value.tolist() for value in engine.recall(none, none - 1)] == [[[0], [0], [0]], [[-1], [-1], [-1]]]
    engine.remember(torch.tensor([[5.0], [6.0], [7.0]]), none)
    assert engine.recall(none, none)[0].tolist() == [[5], [6], [7]]
    engine.keep([1, 2])
    engine.cache.lengths = [16, 16]
    assert engine.recall(none[:2] - 1, none[:2])[0].tolist() == [[-1], [7]]


# --- by hand
def test_klass_waits_in_each_row_for_itself():
    """Two positions, .9 and .6 sure in every pass: nothing moves. In its third pass over a block a row has been calm
    for two, and fills what is surer than the dial. Row 1 begins a block one pass later."""
    table = [[0.9, 0.1, 0, 0], [0.4, 0.6, 0, 0]]
    engine = Told([[table, table]] * 4, lengths=[0, 0])
    step = rule_steps.klass(0.5)
    both = [[M, M], [M, M]]
    assert at(take(step, engine, both)["bundle"]) == [[0], [0]]  # nothing is calm yet: the surest
    engine.cache.lengths = [0, 2]
    assert at(take(step, engine, both)["bundle"]) == [[0], [0]]
    third = take(step, engine, both)
    assert at(third["bundle"]) == [[0, 1], [0]]
    assert third["after"].tolist() == [[0, 1], [0, M]]
    assert at(take(step, engine, both)["bundle"]) == [[0, 1], [0, 1]]


def test_t2m_takes_a_token_back_three_times():
    """Token 1 at position 1 has .05 in every pass: it is taken back until it has been three times, in every block."""
    table = [[[0.6, 0.4, 0, 0], [0.95, 0.05, 0, 0]]]
    engine = Told([table] * 6, lengths=[0])
    step = rule_steps.t2m(0.5)
    for _ in range(3):
        s = take(step, engine, [[M, 1]])
        assert at(s["bundle"]) == [[0]] and s["after"].tolist() == [[0, M]]
    assert take(step, engine, [[M, 1]])["after"].tolist() == [[0, 1]]
    engine.cache.lengths = [2]
    assert take(step, engine, [[M, 1]])["after"].tolist() == [[0, M]]
    engine.numbers = [7]  # another row in the same place
    assert take(step, engine, [[M, 1]])["after"].tolist() == [[0, M]]


def test_t2m_leaves_the_prompt_alone():
    engine = Told([[[[0.6, 0.4, 0, 0], [0.95, 0.05, 0, 0]]]], lengths=[0])
    s = rule_steps.t2m(0.5)(engine, torch.tensor([[M, 1]]), torch.tensor([[False, True]]), True, None, OFF)
    assert s["after"].tolist() == [[0, 1]]


def test_wino_takes_back_by_what_the_shadows_say(monkeypatch):
    """Five positions, two rows. The first step writes three tokens in row 0 and one in row 1, and reads no shadows. The
    next one writes two in each. The shadows give all that was written .2: row 0 takes two back, one less than it
    wrote before, the leftmost of equals; row 1 wrote one before, and takes nothing back."""
    sure, unsure = [0.8, 0.2, 0, 0], [0.4, 0.3, 0.3, 0]
    first = [[sure] * 3 + [unsure] * 2, [sure] + [unsure] * 4]
    second = [[sure] * 5, [sure] * 3 + [unsure] * 2]
    shadows = [[[0.2, 0.8, 0, 0]] * 5] * 2
    read = []

    def told(engine, z, sees):
        read.append(z.tolist())
        assert torch.equal(sees, shadow_mask(5))
        return torch.tensor(shadows).log()

    monkeypatch.setattr(rule_steps, "read_beside", told)
    engine = Told([first, second], lengths=[0, 0])
    step = rule_steps.wino(0.5)
    s = take(step, engine, [[M] * 5] * 2)
    assert s["after"].tolist() == [[0, 0, 0, M, M], [0, M, M, M, M]]
    assert s["looks"].tolist() == [0, 0] and read == []
    before = s["after"].tolist()
    s = take(step, engine, before)
    assert s["after"].tolist() == [[M, M, 0, 0, 0], [0, 0, 0, M, M]]
    assert s["looks"].tolist() == [1, 1] and read == [before]


def test_s2d2_reads_the_drafts_and_keeps_a_run(monkeypatch):
    """Drafts 0 0 0; from left to right the model would write 0 1 2. The second is written as it would, the third waits.
    A row with a single mask writes its draft, unread."""
    sure = [0.8, 0.1, 0.1, 0]
    causal = [[sure, [0.1, 0.8, 0.1, 0], [0.1, 0.1, 0.8, 0]]] * 2

    def told(engine, z, sees):
        assert z[0].tolist() == [0, 0, 0] and torch.equal(sees, causal_mask(3))
        return torch.tensor(causal).log()

    monkeypatch.setattr(rule_steps, "read_beside", told)
    engine = Told([[[sure] * 3] * 2], lengths=[0, 0])
    s = take(rule_steps.s2d2(), engine, [[M, M, M], [2, 1, M]])
    assert s["after"].tolist() == [[0, 1, M], [2, 1, 0]]
    assert at(s["bundle"]) == [[0, 1], [2]] and s["looks"].tolist() == [1, 0]


# --- a second reading
def drawn(rows):
    return torch.tensor([[c == "1" for c in row.replace(" ", "")] for row in rows])


def test_who_sees_whom_is_the_drawings():
    assert torch.equal(shadow_mask(2), drawn(["11 ..", "11 ..", ".1 11", "1. 11"]))
    assert torch.equal(causal_mask(2), drawn(["1. ..", "11 ..", ".. 1.", "1. .1"]))


def read_uncached(model, ids, sees):
    """The same for one row, whole text and no cache: ids (T,), the last B of them the block -> (B, V)."""
    T, B = len(ids), model.cfg.block_length
    mask = torch.zeros(T + B, T + B, dtype=torch.bool)
    mask[:T, :T] = block_causal_mask(T, B)
    mask[T - B :, : T - B] = True
    mask[T - B :, T - B :] = sees
    position = torch.cat([torch.arange(T), torch.arange(T - B, T)])
    cos, sin = rotary(model.cfg, position, torch.float32)
    both = torch.tensor([ids + [MASK] * B])
    return model(both, Context(cos, sin, mask))[0, T:]


@pytest.mark.parametrize("sees", [shadow_mask, causal_mask])
def test_a_second_reading_is_that_of_the_whole_text(sees):
    """Rows with no, one and two blocks before the one that is read; the cache is as it was."""
    model = small()
    prompts = [random_ids(1, n, n)[0].tolist() for n in (0, 8, 16)]
    z = random_ids(3, 8)
    z[:, 5:] = MASK
    with torch.inference_mode():
        engine = Cached(model, prompts, 0)
        _, logits = engine.stage_a(z)
        engine.read(z, ahead=True)  # the next block's keys have to stay as well
        before = engine.cache.kv.clone()
        beside = read_beside(engine, z, sees(8))
        assert torch.equal(engine.cache.kv, before)
        for row, prompt in enumerate(prompts):
            alone = read_uncached(model, prompt + z[row].tolist(), sees(8))
            torch.testing.assert_close(beside[row], alone, rtol=1e-4, atol=1e-4)
    assert (beside - logits).abs().max() > 0.1  # and it is no reading of the block itself


# --- whole decodes
def by_hand(model, prompt, name, dial):
    """One row without a cache -> tokens, passes over a block while it is decoded, second readings."""
    B = model.cfg.block_length
    ids = list(prompt)
    passes = looks = 0
    while len(ids) < len(prompt) + OFF.gen_length:
        # a block begins, and nothing is remembered
        start = len(ids) // B * B
        generated = torch.arange(start, start + B)[None] >= len(prompt)
        ids = ids + [MASK] * (start + B - len(ids))
        log_p = calm = n_last = None
        times = torch.zeros(1, B, dtype=torch.long)
        while True:
            # Stage A reads the whole text
            text = torch.tensor([ids])
            ctx = sequence_context(model.cfg, torch.ones_like(text, dtype=torch.bool), torch.float32)
            logits = model(text, ctx)[:, start:]
            token = logits.argmax(-1)
            passes += 1

            # what the rule fills
            z = text[:, start:]
            masked = z == MASK
            bundle = masked
            if name in ("wino", "t2m"):
                bundle = rules.threshold(logits, masked, dial)
            if name == "klass":
                bundle, log_p, calm = rules.klass(logits, masked, dial, log_p, calm)
            if name == "s2d2" and masked.sum() > 1:
                looks += 1
                draft = torch.where(masked, token, z)
                causal = read_uncached(model, ids[:start] + draft[0].tolist(), causal_mask(B))
                token, bundle = rules.verified(causal[None], draft, masked)

            # what it takes back
            written = generated & ~masked
            taken = torch.zeros_like(masked)
            if name == "t2m":
                taken = rules.t2m(logits, z, written, times)
                times = times + taken
            if name == "wino":
                n_new = bundle.sum(-1, keepdim=True)
                if written.any():
                    looks += 1
                    unseen = read_uncached(model, ids, shadow_mask(B))
                    taken = rules.wino(unseen[None], z, written, n_new, n_last)
                n_last = n_new

            # T2M has judged a block that it leaves as it is; the others end with the last mask
            after = torch.where(bundle, token, z).masked_fill(taken, MASK)
            ids[start:] = after[0].tolist()
            if torch.equal(after, z) or (name != "t2m" and MASK not in ids[start:]):
                break
    return ids[len(prompt) : len(prompt) + OFF.gen_length], passes, looks


@pytest.mark.parametrize(("name", "dial"), DIALED)
def test_a_decode_is_the_loop_without_a_cache(name, dial):
    """Rows of all lengths, decoded together, and each by the loop for one: tokens, passes, second readings."""
    model = small()
    prompts = some_prompts()
    s = setting(name, dial)
    looks = Counter()
    model.step = pays.counted(s.step, looks)
    outputs = generate(model, prompts, s.decoding)
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):
            tokens, passes, read = by_hand(model, prompt, name, dial)
            assert outputs[row].tokens == tokens
            assert outputs[row].nfe["full"] == passes and outputs[row].nfe["partial"] == 0
            assert looks[row] == read
    assert len({o.nfe["full"] for o in outputs}) > 1  # rows part, or nothing would tell them apart
    if name in ("wino", "s2d2"):
        assert looks.total() > 0


@pytest.mark.parametrize(("name", "dial"), [("wino", 0.2), ("t2m", 0.1)])
def test_tokens_are_taken_back(name, dial):
    """What the decodes above would not show if it never happened: a visible token is a mask in the next state."""
    model = small()
    s = setting(name, dial)
    model.step = s.step
    prompts = some_prompts()
    taken = 0
    for output in generate(model, prompts, s.decoding, trace=True):
        for record in output.steps:
            pairs = zip(record["before"], record["after"], strict=True)
            taken += sum(before != MASK and after == MASK for before, after in pairs)
    assert taken > 0


def test_s2d2_writes_what_blocks_of_one_would():
    """A first block: every token but the block's last is the left-to-right model's, from the same weights in blocks of
    one; in fewer passes than tokens somewhere. (The last mask has no draft beside it, and is written unread.)"""
    model = small(std=0.1)
    one = small(std=0.1, block_length=1)
    prompts = random_ids(12, 2).tolist()
    model.step = rule_steps.s2d2()
    outputs = generate(model, prompts, Decoding(gen_length=6, tau_t2t=None, n_rounds=0))
    expected = generate(one, prompts, Decoding(gen_length=6, tau_t2t=None, n_rounds=0, tau_m2t=1.0))
    assert [o.tokens[:5] for o in outputs] == [o.tokens[:5] for o in expected]
    assert min(o.nfe["full"] for o in outputs) < 6


def test_a_step_begins_every_decode_anew():
    """The same step, twice: what the first decode has left behind is not remembered."""
    model = small()
    prompts = some_prompts()[:2]
    for name, dial in DIALED:
        s = setting(name, dial)
        model.step = s.step
        first, second = (generate(model, prompts, s.decoding) for _ in range(2))
        assert [(o.tokens, o.nfe) for o in first] == [(o.tokens, o.nfe) for o in second]
