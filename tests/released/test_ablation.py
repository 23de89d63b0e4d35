"""The switches of Table 2: none set, the decoder for use; each set, what it says. `pytest tests/released`"""

from dataclasses import asdict, replace

import pytest
import torch
from common import random_ids, tiny_model

import cache
from lib import show
from released import ablation
from released.ablation import Ablation
from sample import MODES, Decoding, generate, settle_decoding


def prompt(n: int) -> list[int]:
    return random_ids(1, n, 100)[0].tolist()


def ablated():
    model = tiny_model()
    model.step = ablation.step
    return model


@pytest.mark.parametrize("n_rounds, temperature", [(0, 0.0), (1, 0.8), (2, 0.0)])
def test_with_no_switch_set_it_is_the_decoder_for_use(n_rounds, temperature, monkeypatch):
    monkeypatch.setattr(cache, "MAX_STEPS", 20)  # some blocks of this model never end
    d = Decoding(gen_length=30, tau_m2t=0.4, tau_t2t=0.2, max_post_steps=2, n_rounds=n_rounds, temperature=temperature)
    prompts = [prompt(n) for n in (3, 8, 13)]
    plain = generate(tiny_model(), prompts, d, seed=4, trace=True)
    assert generate(ablated(), prompts, Ablation(**asdict(d)), seed=4, trace=True) == plain
    assert not Ablation(**asdict(d)).switched() and Ablation(marker=False).switched()


def test_one_default_for_the_command_line_and_for_who_calls_it():
    """K = 1 without a gate on edits, the paper's method as it is; without Stage B the released gate of 0.5."""
    model = tiny_model(n_rounds=1)
    for n_rounds, gate in ((1, 0.0), (0, 0.5)):
        args = show.build_parser("", MODES).parse_args(["--n_rounds", str(n_rounds)])
        settled = settle_decoding(args, model)
        assert settled == Decoding(n_rounds=n_rounds) and settled.tau_t2t == gate
        assert Ablation(n_rounds=n_rounds) == Ablation(**asdict(settled))
    assert Ablation() == Ablation(n_rounds=1)


def test_without_marker_stage_b_writes_what_stage_a_would():
    model, d = ablated(), Ablation(gen_length=24, tau_m2t=0.3, tau_t2t=0.5)
    off = generate(model, [prompt(5)], replace(d, n_rounds=0))[0]
    marked = generate(model, [prompt(5)], d)[0]
    unmarked = generate(model, [prompt(5)], replace(d, marker=False))[0]
    from_a = generate(model, [prompt(5)], replace(d, fill_from="A", edit_from="A"))[0]
    assert unmarked.tokens == off.tokens == from_a.tokens != marked.tokens
    assert unmarked.nfe["partial"] > 0 == off.nfe["partial"]


class Engine:
    """Five positions; Stage A writes 7 with given confidences, Stage B writes 5 surely; id 9 is the mask."""

    def __init__(self, logits: list[list[float]]):
        self.cfg, self.logits = type("cfg", (), {"mask_id": 9, "order": "surest"}), torch.tensor([logits])

    def stage_a(self, z):
        return z, self.logits

    def stage_b(self, h, bundle):
        return 9.0 * torch.nn.functional.one_hot(torch.full_like(h, 5), 10)


def one_step(engine: Engine, z: list[int], d: Ablation) -> dict[str, list]:
    s = ablation.step(
        engine, torch.tensor([z]), torch.zeros(1, len(z), dtype=torch.bool), True, torch.zeros(1, 3, 5), d
    )
    return {k: v[0].tolist() for k, v in s.items()}


def test_whose_logits_fill_and_whose_edit():
    engine = Engine([[0.0] * 7 + [9.0] + [0.0] * 2] * 5)
    for fill, edit in ((5, 5), (5, 7), (7, 5), (7, 7)):
        stages = {5: "B", 7: "A"}
        d = Ablation(fill_from=stages[fill], edit_from=stages[edit], tau_t2t=0.0)
        assert one_step(engine, [9, 9, 1, 2, 3], d)["after"] == [fill, fill, edit, edit, edit]


def test_selection_by_entropy_by_hand():
    # position i: token 0 has probability p, and the rest is spread over 9 - i others: more spread, more entropy
    rows = []
    for p, others in ((0.9, 9), (0.8, 9), (0.6, 1), (0.55, 1), (0.99, 1)):
        rows.append([p] + [(1 - p) / others] * others + [1e-9] * (9 - others))
    engine = Engine(torch.tensor(rows).log().tolist())
    z, d = [9, 9, 9, 9, 1], Ablation(tau_m2t=0.7, tau_t2t=None)
    assert one_step(engine, z, d)["bundle"] == [True, True, False, False, False]
    # entropies: 0.545, 0.940, 0.673, 0.688; the last position is not masked
    assert one_step(engine, z, replace(d, select="entropy"))["bundle"] == [True, False, True, False, False]
