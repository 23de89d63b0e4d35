"""Text: spans, filling them, forced chains, the best within a budget by hand. `pytest tests/beyond/test_text.py`"""

import json
import math
import re
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import MASK, approx, caller, command_line, random_ids, refused, tiny_model

from beyond import decoders, rule_steps, rules, spans, stage_b_only, text
from beyond.distill import Distilled
from beyond.joint_head import JointHead
from beyond.pays import counted
from beyond.spans import FILL, blocks, chain, cut, fill, pieces, stage_a_log_probs
from cache import Cached
from checkpoint import save_adapter, save_model
from lib.data import is_validation
from lib.tokenizer import byte_tokenizer
from lib.util import generator
from sample import generate

SOURCE = "class A:\n    def double(self, x):\n        return 2 * x\n\n\ndef f(a, b):\n    # add\n    return a + b\n"


def test_spans_lie_inside_a_later_block_of_held_out_functions():
    assert [p for p, _ in pieces("a.py", SOURCE)] == [
        "def f(a, b):\n    # add\n    return a + b\n",
        "def double(self, x):\n    return 2 * x\n",
    ]
    odd = "class A:\n    def f(self):\n        return 1\n# at the margin\n        pass\n\x0c\ndef g(b):\n    return b\n"
    assert list(pieces("a.py", odd)) == [("def g(b):\n    return b\n", True)]  # f's own text is no Python
    assert list(pieces("a.txt", "x")) == [("x", False)] and list(pieces("a.py", "def (")) == []
    names = [n for n in (f"{i}.py" for i in range(400)) if is_validation(n)]
    documents = [(n, SOURCE) for n in names] + [("0.py" if not is_validation("0.py") else "x", SOURCE * 3)]
    found = cut(documents, byte_tokenizer(), 8, 64, 1000)
    assert len(found) == 2 * len(names)  # nothing from a training document
    z, inside = blocks(found, 8, MASK)
    assert torch.equal(z == MASK, inside) and inside.any(-1).all() and inside.sum(-1).max() <= 6
    for s, row, here in zip(found, z.tolist(), inside.tolist(), strict=True):
        assert s.start >= 8 and s.start % 8 == 0 and s.start + 8 <= len(s.piece)
        assert [t for t, h in zip(row, here, strict=True) if not h] == [
            t for t, h in zip(s.piece[s.start : s.start + 8], here, strict=True) if not h
        ]


@torch.inference_mode()
def test_a_forced_chain_scores_what_is_forced_and_the_greedy_one_scores_itself():
    model = tiny_model()
    engine = Cached(model, [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, 0)
    z = torch.tensor([[MASK] * 8, [1, MASK, MASK, 4, 5, 6, MASK, 8]])
    log_p = stage_a_log_probs(engine)
    tokens, score = chain(log_p, z, z == MASK)
    again, forced = chain(log_p, z, z == MASK, forced=tokens)
    assert torch.equal(again, tokens) and torch.equal(forced, score)
    one = torch.tensor([[9, MASK, 9, 9, 9, 9, 9, 9]] * 2)  # a single mask: the chain is the marginal
    _, score = chain(log_p, one, one == MASK, forced=torch.full_like(one, 7))
    torch.testing.assert_close(score, log_p(one)[:, 1, 7])
    left = stage_a_log_probs(engine, mask_too=True)  # a mask that a decoder has left there has a score too
    assert chain(left, one, one == MASK, forced=one)[1].isfinite().all()


@torch.inference_mode()
def test_a_score_is_the_forced_chains_and_is_computed_once():
    engine, known = Cached(tiny_model(), [[1, 2, 3, 4, 5, 6, 7, 8], [9] * 16, [3] * 8], 0), {}
    z = torch.tensor([[1, MASK, MASK, 4, 5, 6, MASK, 8]] * 3)
    first, second = (torch.where(z == MASK, t, z) for t in (7, torch.tensor([[7], [8], [7]])))
    whole = [chain(stage_a_log_probs(engine, True), z, z == MASK, forced=w)[1].tolist() for w in (first, second)]
    assert text.scores(engine, z, z == MASK, first, known) == approx(whole[0]) and len(known) == 3
    assert text.scores(engine, z, z == MASK, second, known) == approx(whole[1]) and len(known) == 4  # row 1 alone
    assert text.scores(None, z, z == MASK, first, known) == approx(whole[0])


@torch.inference_mode()
def test_one_at_a_time_fills_what_the_greedy_chain_does():
    engine = Cached(tiny_model(n_rounds=1), [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, 0)
    z = torch.tensor([[MASK] * 8, [1, MASK, MASK, 4, 5, 6, MASK, 8]])
    written, full, partial = fill(engine, z, replace(FILL, tau_m2t=1.0, n_rounds=0))
    assert full.tolist() == [8, 3] and partial.tolist() == [0, 0]
    assert torch.equal(written, chain(stage_a_log_probs(engine), z, z == MASK)[0])
    assert fill(engine, z, replace(FILL, tau_m2t=0.0, n_rounds=0))[1].tolist() == [1, 1]  # the base's first point


def with_head(model, std=0.3):
    """A joint head that says something else than Stage A."""
    model.__class__ = JointHead
    model.give_head(head_layers=1, width=8, tau_keep=0.5, rng=generator("head"))
    for name, p in model.joint_head.named_parameters():
        p.data += std * torch.randn(p.shape, generator=generator(name))
    return model


@torch.inference_mode()
@pytest.mark.parametrize("keep", [None, 0.0, 0.3, 1.0])
def test_blocks_are_filled_as_the_decoder_itself_does(keep):
    """Rows with 5, 8 and 3 masks at the end of a block, filled together, and decoded one by one."""
    model = tiny_model(n_rounds=1, eos_id=-1)
    if keep is not None:
        model = with_head(model)
        model.tau_keep = keep
    prompts = [random_ids(1, n, n)[0].tolist() for n in (11, 16, 21)]
    z = torch.tensor([(p + [MASK] * 8)[len(p) // 8 * 8 :][:8] for p in prompts])
    for tau in (-1.0, 0.1, 0.3):
        d = replace(FILL, tau_m2t=tau)
        written, full, partial = fill(Cached(model, prompts, 1), z, d)
        for r, prompt in enumerate(prompts):
            (alone,) = generate(model, [prompt], replace(d, gen_length=8 - len(prompt) % 8))
            assert written[r].tolist()[len(prompt) % 8 :] == alone.tokens
            assert {"full": full[r], "partial": partial[r], "commit": 0} == alone.nfe


@torch.inference_mode()
def test_blocks_are_edited_as_the_decoder_itself_does():
    """What was written may change until nothing does, or so many forwards after the last mask. What is given stands."""
    model = tiny_model(n_rounds=1, eos_id=-1)
    prompts = [random_ids(1, n, n)[0].tolist() for n in (11, 16, 21)]
    z = torch.tensor([(p + [MASK] * 8)[len(p) // 8 * 8 :][:8] for p in prompts])
    forwards = []
    for most in (0, 1, 16):
        d = replace(FILL, tau_m2t=0.1, tau_t2t=0.1, max_post_steps=most)
        written, full, partial = fill(Cached(model, prompts, 1), z, d)
        forwards.append(full.tolist())
        assert torch.equal(written[z != MASK], z[z != MASK])
        for r, prompt in enumerate(prompts):
            (alone,) = generate(model, [prompt], replace(d, gen_length=8 - len(prompt) % 8))
            assert written[r].tolist()[len(prompt) % 8 :] == alone.tokens
            assert {"full": full[r], "partial": partial[r], "commit": 0} == alone.nfe
    assert forwards[0] < forwards[1] < forwards[2]


@torch.inference_mode()
def test_a_rule_fills_blocks():
    """Two surest masks a step: of 5 and of 2."""
    model = tiny_model()
    model.step = rules.step_of(rules.fixed, 2)
    z = torch.tensor([[1, MASK, 2, MASK, MASK, 3, MASK, MASK], [MASK, 1, 2, 3, MASK, 4, 5, 6]])
    written, full, partial = fill(Cached(model, [[9] * 8, [7] * 8], 0), z, replace(FILL, n_rounds=0))
    assert full.tolist() == [3, 1] and partial.tolist() == [0, 0] and not (written == MASK).any()
    assert torch.equal(written[z != MASK], z[z != MASK])


@pytest.mark.parametrize("label", ["klass 0.2", "t2m 0.1", "wino 0.3", "s2d2"])
@torch.inference_mode()
def test_a_rule_that_remembers_fills_blocks_as_the_decoder_itself_does(label):
    """Rows with 5, 8 and 3 masks at the end of a block, filled together, and decoded one by one."""
    model = tiny_model(eos_id=-1)
    s = next(s for s in decoders.settings_of_rule_steps(replace(FILL, n_rounds=0)) if s.label == label)
    looks = Counter()
    looks_alone = Counter()
    prompts = [random_ids(1, n, n)[0].tolist() for n in (11, 16, 21)]
    z = torch.tensor([(p + [MASK] * 8)[len(p) // 8 * 8 :][:8] for p in prompts])
    model.step = counted(s.step, looks)
    written, full, _ = fill(Cached(model, prompts, 0), z, s.decoding)
    model.step = counted(s.step, looks_alone)
    for r, prompt in enumerate(prompts):
        looks_alone.clear()
        (alone,) = generate(model, [prompt], replace(s.decoding, gen_length=8 - len(prompt) % 8))
        assert written[r].tolist()[len(prompt) % 8 :] == alone.tokens
        assert alone.nfe["full"] == full[r] and looks[r] == looks_alone[0]
    assert (s.reading is None) == (looks.total() == 0)


@torch.inference_mode()
def test_a_second_reading_costs_what_it_reads():
    """S2D2 reads two blocks in each of its steps, but for one that finds a single mask. A span of one mask, one of
    five: the first one costs its one forward, the other two forwards more in each step before its last mask."""
    model = tiny_model()
    (s,) = [s for s in decoders.settings_of_rule_steps(replace(FILL, n_rounds=0)) if s.label == "s2d2"]
    z = torch.tensor([[MASK, 1, 2, 3, 4, 5, 6, 7], [1, MASK, 2, MASK, MASK, 3, MASK, MASK]])
    cut = [spans.Span(0, [9] * 8 + [1] * 8, 8, slice(0, 8), python=False)] * 2
    task = text.Task(cut, byte_tokenizer(), z, z == MASK, [[9] * 8] * 2, np.array([1, 5]))

    looks = Counter()
    model.step = counted(s.step, looks)
    engine, judge = Cached(model, task.contexts, 0), Cached(model, task.contexts, 0)
    measured = text.measure_setting(engine, s, looks, task, judge, {})

    # how many masks the second row had before each of its steps
    masks = []

    def see(rows, z, bundle, conf):
        masks.extend((z[rows == 1] == MASK).sum(-1).tolist())

    fill(engine, z, s.decoding, see)
    assert masks[0] == 5
    read_twice = sum(n > 1 for n in masks)
    assert measured["serial"] == approx([1, (len(masks) + read_twice) / 5])
    assert measured["all"] == approx([1, (len(masks) + 2 * read_twice) / 5])


@torch.inference_mode()
def test_what_a_step_leaves_in_its_engine_is_gone_in_the_next_fill():
    """A step that writes the number of its call."""
    model = tiny_model()

    def step(engine, z, prompt, any_masked, u, d):
        engine.calls = getattr(engine, "calls", 0) + 1
        first = (z == MASK) & ((z == MASK).cumsum(-1) == 1)
        return {"after": z.masked_fill(first, engine.calls), "bundle": first, "conf_a": u[:, 0]}

    model.step = step
    engine = Cached(model, [[1] * 8], 0)
    z = torch.tensor([[9, MASK, 9, MASK, MASK, 9, 9, 9]])
    for _ in range(2):
        assert fill(engine, z, replace(FILL, n_rounds=0))[0].tolist() == [[9, 1, 9, 2, 3, 9, 9, 9]]


@torch.inference_mode()
def test_a_joint_head_runs_at_the_share_of_the_block_that_is_masked():
    """Every mask at once, blocks of 8, 5 and 2 masks. Without refusal one look at each; where all but the surest is
    refused, one at 5, 4, 3 and 2 masks (a last one is written as it is), and one at 2."""
    model, d = with_head(tiny_model(n_rounds=1)), replace(FILL, tau_m2t=-1.0)
    z = torch.tensor([[1, MASK, 2, MASK, MASK, 3, MASK, MASK], [MASK, 1, 2, 3, MASK, 4, 5, 6]])
    for keep, forwards, share in ((0.0, [1, 1], [5 / 8, 2 / 8]), (1.0, [5, 2], [14 / 8, 2 / 8])):
        model.tau_keep = keep
        written, full, partial = fill(Cached(model, [[9] * 8, [7] * 8], 1), z, d)
        assert full.tolist() == forwards and partial.tolist() == share and not (written == MASK).any()
    one = fill(Cached(model, [[9] * 8, [7] * 8], 1), z, replace(d, tau_m2t=1.0))
    assert one[1].tolist() == [5, 2] and one[2].tolist() == [0, 0]  # nothing to coordinate


@torch.inference_mode()
def test_filling_ends_where_nothing_but_masks_is_written():
    model, prompt = tiny_model(n_rounds=1, eos_id=-1), [1] * 8
    model.head = lambda h: torch.nn.functional.one_hot(torch.full(h.shape[:-1], MASK), 40).float()
    z = torch.full((1, 8), MASK)
    written, full, partial = fill(Cached(model, [prompt], 1), z, FILL)
    (alone,) = generate(model, [prompt], replace(FILL, gen_length=8))
    assert torch.equal(written, z) and alone.tokens == [MASK] * 8
    assert {"full": full[0], "partial": partial[0], "commit": 0} == alone.nfe and full[0] == 1


@torch.inference_mode()
def test_a_row_that_is_done_or_stuck_neither_counts_nor_is_seen():
    """A step of its own that writes the first mask, but in the row that is all masks, where it would never write; and
    a row without a mask, which is none of its business."""
    model, seen = tiny_model(), []

    def step(engine, z, prompt, any_masked, u, d):
        engine.stage_a(z)
        first = (z == MASK) & ((z == MASK).cumsum(-1) == 1)
        writes = first & ~(z == MASK).all(-1, keepdim=True)
        after = torch.where(writes, 7, z)
        return {"after": after, "bundle": first, "conf_a": u[:, 0], "partial": torch.full((len(z),), 0.25)}

    def see(rows, z, bundle, conf):
        seen.append((rows.tolist(), z[:, 0].tolist(), bundle.sum(-1).tolist()))

    model.step = step
    z = torch.tensor([[MASK] + [2] * 7, [MASK] * 8, [3] * 8, [1] * 5 + [MASK] * 3])
    written, full, partial = fill(Cached(model, [[1] * 8] * 4, 0), z, FILL, see)
    assert written.tolist() == [[7] + [2] * 7, [MASK] * 8, [3] * 8, [1] * 5 + [7] * 3]
    assert full.tolist() == [1, 1, 0, 3] and partial.tolist() == [0.25, 0.25, 0, 0.75]
    assert seen == [([0, 1, 3], [MASK, MASK, 1], [1, 1, 1]), ([3], [1], [1]), ([3], [1], [1])]


def test_what_was_written_is_judged_as_text():
    tokenizer, piece = byte_tokenizer(), "def f(a):\n    return a + a\n"
    ids = tokenizer.encode_document(piece).tolist()
    python, prose = (spans.Span(0, ids, 8, slice(4, 7), kind) for kind in (True, False))
    written = torch.tensor([list(s) for s in (b":\n    re", b":\n  ) re", b": f f f ")])
    got = text.quality([python, python, prose], written, tokenizer)
    assert got["exact"].tolist() == [1, 0, 0]
    assert got["parses"].tolist()[:2] == [1, 0] and np.isnan(got["parses"][2])  # prose parses never, and is not asked
    assert got["stutter"].tolist() == [0, 0, approx(2 / 5)]  # def f a | f f f, from the block before: 5 pairs


def record(system, setting, seed, score, cost, parses):
    """Of one seed: the score of each span, what it costs by all counts, and whether it parses."""
    same = dict.fromkeys(("exact", "stutter"), [0.5] * len(score))
    costs = dict.fromkeys(text.COSTS, cost)
    return dict(system=system, ckpt=f"{seed}", adapter=None, setting=setting, score=score, parses=parses) | same | costs


def test_the_tables_of_budgets_by_hand(capsys):
    """Two documents of a span each, two decoders of one setting. A mean of 0 and 1 is 0, 1/2 or 1 in a quarter, a half
    and a quarter of the resamples; the head is 1/4 better in each span, so in each resample. No span parses or not."""
    none = [math.nan] * 2
    records = [
        record("base", "one", 0, [-1.0, 0.0], [0.5, 0.3], none),  # costs 0.4
        record("head", "one", 0, [-0.75, 0.25], [0.6, 0.3], none),  # costs 0.45
    ]
    text.show_budgets(records, [0, 1], "head")
    out = capsys.readouterr().out
    assert "parses" not in out and "stutter" not in out

    # all, mult and serial are equal here: a table of each for score and exact, and the differences
    tables = [[re.split("  +", line) for line in table.splitlines()] for table in out.split("\n\n")]
    tables = [{row[0]: dict(zip(table[0][1:], row[1:], strict=True)) for row in table[1:]} for table in tables if table]
    scores = [t for t in tables if "-0.500 [-1.000, 0.000]" in t.get("base", {}).values()]
    more = [t for t in tables if "+0.250 [+0.250, +0.250]" in t.get("base", {}).values()]
    assert len(scores) == len(more) == 3 and scores[0] == scores[1] == scores[2] and more[0] == more[1] == more[2]
    base, head = scores[0]["base"], scores[0]["head"]
    assert base["0.35"] == head["0.35"] == "-" and base["0.4"] == base["1.0"] == "-0.500 [-1.000, 0.000]"
    assert head["0.4"] == "-" and head["0.45"] == head["1.0"] == "-0.250 [-0.750, 0.250]"
    assert more[0]["base"]["0.4"] == "-" and more[0]["base"]["0.45"] == "+0.250 [+0.250, +0.250]"


def test_what_does_not_apply_is_left_out():
    """Spans 0 and 2 are Python, of documents 5 and 7."""
    nan = math.nan
    records = [
        record("base", "one", 0, [0.0] * 4, [1.0] * 4, [1.0, nan, 0.0, nan]),
        record("base", "two", 0, [0.0] * 4, [2.0] * 4, [1.0, nan, 1.0, nan]),
    ]
    systems, cluster = text.measured_by("parses", records, [5, 6, 7, 7])
    assert systems["base"].values.tolist() == [[[1, 0]], [[1, 1]]] and cluster.tolist() == [0, 1]
    assert {k: of.tolist() for k, of in systems["base"].figures.items()} == dict.fromkeys(text.COSTS, [[1], [2]])
    assert text.present(records) == ["score", "exact", "parses"]


def test_seeds_are_drawn_like_documents(capsys):
    """Two seeds with scores of 0 and 1 in every span: in a resample 0, 1/2 or 1."""
    flat = [math.nan] * 3
    records = [record("base", "one", seed, [float(seed)] * 3, [1.0] * 3, flat) for seed in (0, 1)]
    text.show_settings(records, [0, 1, 2])
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert re.split("  +", row) == [
        "base",
        "one",
        *["1.000"] * 3,
        "0.500 [0.000, 1.000]",
        *["0.500 [0.500, 0.500]"] * 2,
    ]


def distilled(model):
    model.__class__ = Distilled


@pytest.fixture
def folders(tmp_path):
    """A base, text, and untrained adapters: of both stages, of Stage B alone, a joint head, a distilled Stage A."""
    ids = dict(vocab_size=272, eos_id=256, mask_id=257, n_rounds=1)
    save_model(tiny_model(**ids), tmp_path / "base")
    settings = dict(base=str(tmp_path / "base"), lora_r=2, lora_alpha=4)
    head = dict(extension="beyond.joint_head", head_layers=1, width=8, tau_keep=0.5)
    for name, attach, extension in (
        ("all", lambda m: m.add_lora(2, 4, generator("lora")), {}),
        ("b", lambda m: stage_b_only.adapt(m, 2, generator("lora")), {"extension": "beyond.stage_b_only"}),
        ("head", lambda m: with_head(m, 0.0), head),
        ("distilled", distilled, {"extension": "beyond.distill", "weights": "all"}),
    ):
        model = tiny_model(**ids)
        attach(model)
        save_adapter(model, tmp_path / name, settings | extension)
    (tmp_path / "text").mkdir()
    for name in [n for n in (f"{i}.py" for i in range(200)) if is_validation(n)]:
        (tmp_path / "text" / name).write_text(SOURCE)
    return tmp_path


def given(folders, *names):
    """Flags: each name once, with the adapter of that name on the base."""
    argv = ["--data", folders / "text", "--spans", 6, "--device", "cpu", "--system", "base", folders / "base"]
    for name in names:
        argv += ["--system", name, folders / "base", folders / name]
    return argv


@pytest.fixture
def few(monkeypatch):
    """Few settings: one at a time, all at once, one between, and S2D2, which has no dial."""
    monkeypatch.setattr(rules, "DIALS", {"threshold": (1.0, 0.0), "fixed": (2,)})
    monkeypatch.setattr(rule_steps, "DIALS", {"klass": (), "wino": (), "t2m": ()})
    monkeypatch.setattr(decoders, "GATES", (1.0, 0.3))
    monkeypatch.setattr(decoders, "KEEP", (0.0, 1.0))
    monkeypatch.setattr(decoders, "ABOVE", (0.0,))
    monkeypatch.setattr(decoders, "KEEP_OF_THOSE", (0.0,))


def test_the_report_from_the_command_line(folders, few, monkeypatch, capsys):
    argv = given(folders, "all", "b", "head", "distilled")
    lines = caller(text, monkeypatch, capsys)(*argv, "--against", "base").splitlines()
    assert "6 of them in Python functions" in lines[0]
    head, *curves = [re.split("  +", line) for line in lines[1 : lines.index("")]]
    assert head == ["system", "setting", "all", "mult", "serial", "score", "exact", "parses", "stutter"]
    settings = {name: [] for name, *_ in curves}
    for name, label, *_ in curves:
        settings[name].append(label)
    free, gates = ["threshold 1", "threshold 0", "fixed 2", "s2d2"], ["tau_m2t 1", "tau_m2t 0.3"]
    looks = ["tau_keep 0", "tau_keep 1", "tau_m2t 0, tau_keep 0", "off, threshold 1"]
    stage_b = {"all": gates, "all, off": gates, "b": gates, "b, off": gates}
    assert settings == {"base": free, "head": looks, "distilled": free} | stage_b
    at = {(name, label): figures for name, label, *figures in curves}

    # untrained: a distilled Stage A is the base, and so are LoRA with Stage B off and what the head writes
    assert [at["distilled", label] for label in free] == [at["base", label] for label in free]
    one, once = at["base", "threshold 1"], at["base", "threshold 0"]
    assert at["all, off", "tau_m2t 1"] == at["b, off", "tau_m2t 1"] == at["head", "off, threshold 1"] == one
    mine, alone = at["head", "tau_keep 0"], at["head", "tau_keep 1"]
    assert mine[3:] == once[3:] and once[0] == once[1] == once[2]
    assert all(float(dearer) > float(cheaper) for dearer, cheaper in zip(mine[:3], once[:3], strict=True))
    assert at["head", "tau_m2t 0, tau_keep 0"] == mine
    assert one[2] == "1.000" and alone[3:] == one[3:]  # all but the surest refused

    # three measures by three costs; against itself a distilled Stage A that was never trained has nothing
    tables = "\n".join(lines)
    assert all(tables.count(f"at most, {kind}/token") == 3 for kind in text.COSTS)
    assert all(f"\n{m}: the best setting that costs no more" in tables for m in text.MEASURES)
    alike = [line for line in lines if line.startswith("distilled") and "+0.000 [+0.000, +0.000]" in line]
    assert len(alike) == 9 and not any("+0.0" in line.replace("+0.000", "") for line in alike)


def test_records_print_the_same_tables_and_are_not_measured_again(folders, few, monkeypatch, capsys):
    call, path, more = caller(text, monkeypatch, capsys), folders / "r.jsonl", folders / "more.jsonl"
    spans_read, tables = call(*given(folders, "all"), "--out", path).split("\n", 1)
    head, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(head["clusters"]["documents"]) == 6 and len(records) == 4 + 4
    assert [(r["system"], r["setting"]) for r in records[:2]] == [("base", "threshold 1"), ("base", "threshold 0")]
    assert all(len(r[k]) == 6 for r in records for k in text.FIGURES)
    assert [r["system"] for r in records[4:]] == ["all", "all", "all, off", "all, off"]
    assert call("--records", path) == tables

    # what they lack is measured, and nothing else
    measured = []
    measure_system = text.measure_system
    monkeypatch.setattr(text, "measure_system", lambda *args: measured.append(args[0]) or measure_system(*args))
    assert call(*given(folders, "all"), "--records", path) == spans_read + "\n" + tables and not measured
    both = call(*given(folders, "all", "distilled"), "--records", path, "--out", more)
    assert measured == ["distilled"] and call("--records", more) == both.split("\n", 1)[1]
    whole = call(*given(folders, "all", "distilled"))
    assert whole == both

    # what does not belong together
    assert "other spans" in call.fails(*given(folders), "--records", path, "--spans", 5)
    other = folders / "other.jsonl"
    other.write_text(json.dumps(head) + "\n" + json.dumps({"system": "base", "found": "11", "mult/token": 1}) + "\n")
    assert "measure again" in call.fails("--records", other)  # of pays.py
    assert "twice" in call.fails("--records", path, path)


def test_each_seed_is_judged_by_its_own_base(folders, few):
    """A second base likes other tokens. A system that is both bases the wrong way round has the same figures but for
    the score; together they are what each is alone."""
    other = tiny_model(vocab_size=272, eos_id=256, mask_id=257, n_rounds=1)
    other.lm_head.weight.data = other.lm_head.weight.data.roll(1, 0)
    save_model(other, folders / "other")
    first, second = str(folders / "base"), str(folders / "other")

    def measured(*systems):
        args = Namespace(data=[folders / "text"], spans=6, plot=None, out=None, device="cpu", system=systems)
        return text.measure(args, {}, [])[1]

    alone = measured(["base", first]) + measured(["base", second])
    both = measured(["base", first], ["base", second], ["crossed", second], ["crossed", first])
    assert [r["setting"] for r in alone] == ["threshold 1", "threshold 0", "fixed 2", "s2d2"] * 2
    assert both[:8] == alone

    # the first of the crossed seeds is the second base, judged by the first one
    crossed = both[12:] + both[8:12]
    for own, other in zip(alone, crossed, strict=True):
        assert all(own[k] == other[k] for k in text.FIGURES if k != "score")
        assert np.mean(other["score"]) < np.mean(own["score"]) - 0.1  # a judge likes what it would have written


def test_the_picture(folders, few, monkeypatch, capsys):
    argv = given(folders, "head")
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        assert "pip install matplotlib" in refused(text, m, capsys, *argv, "--plot", folders / "c.svg")
    pytest.importorskip("matplotlib")
    assert "must end in" in refused(text, monkeypatch, capsys, *argv, "--plot", folders / "c.what")
    code, out, _ = command_line(text, monkeypatch, capsys, *argv, "--plot", folders / "c.svg")
    assert code == 0 and out.splitlines()[-1].startswith("wrote") and (folders / "c.svg").stat().st_size > 1000


def test_what_cannot_be_compared_is_refused(folders, monkeypatch, capsys):
    def why(*argv, systems=()):
        return refused(text, monkeypatch, capsys, *(systems or given(folders, "head")), *argv)

    assert "--spans" in why("--spans", 1)
    assert "--records" in why(systems=["--data", folders / "text"])
    assert "--against heads" in why("--against", "heads") and "base, head" in why("--against", "heads")
    assert "--system head has 2 seeds, the base has 1" in why("--system", "head", folders / "base", folders / "head")
    assert "the base first" in why(systems=["--data", "stdlib", "--system", "head", folders / "base", folders / "head"])
    assert "NAME CKPT" in why("--system", "nothing")
    save_model(tiny_model(tokenizer="toy"), folders / "toy")
    assert "tables are exact" in why(systems=["--data", folders / "text", "--system", "toy", folders / "toy"])
    assert "other tokens" in why("--system", "toy", folders / "toy")
    assert "other tokens" in why("--system", "base", folders / "toy", systems=given(folders))  # a later seed, too
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257, block_length=4), folders / "fours")
    assert "other tokens or blocks" in why("--system", "fours", folders / "fours")
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=258), folders / "mask")
    assert "other tokens or blocks" in why("--system", "base", folders / "mask", systems=given(folders))
    mixed = ["base", folders / "base"], ["head", folders / "base", folders / "distilled"]
    assert "not of one kind" in why(*(word for s in mixed for word in ("--system", *s)))
    (folders / "text" / "short.txt").write_text("x")
    assert "give more text" in why("--data", folders / "text" / "short.txt")
