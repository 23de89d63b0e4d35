"""The switches of Table 2: none set, the decoder for use; each set, what it says. `pytest tests/released`"""

from dataclasses import replace

import torch
from common import caller, random_ids, tiny_model

import train
from released import ablation
from released.ablation import MECHANISM, Switches, switched
from sample import Decoding, denoise, generate


def prompt(n: int) -> list[int]:
    return random_ids(1, n, 100)[0].tolist()


def test_with_no_switch_set_it_is_the_decoder_for_use():
    d = Decoding(tau_m2t=0.4, n_rounds=2)
    assert switched(d, Switches()) is d
    # and a look that takes everything from Stage B is Stage B's
    d = Decoding(gen_length=30, tau_m2t=0.4, tau_t2t=0.5, max_post_steps=2, temperature=0.8)
    prompts = [prompt(n) for n in (3, 8, 13)]
    same = replace(d, look=lambda *what: ablation.switched_look(Switches(), *what))
    model = tiny_model()
    assert generate(model, prompts, same, seed=4) == generate(model, prompts, d, seed=4)


def test_without_marker_stage_b_writes_what_stage_a_would():
    model = tiny_model()
    d = Decoding(gen_length=24, tau_m2t=0.3, tau_t2t=0.5)
    off = generate(model, [prompt(5)], replace(d, n_rounds=0))[0]
    marked = generate(model, [prompt(5)], d)[0]
    unmarked = generate(model, [prompt(5)], switched(d, Switches(marker=False)))[0]
    from_a = generate(model, [prompt(5)], switched(d, Switches(fill_from="A", edit_from="A")))[0]
    assert unmarked.tokens == off.tokens == from_a.tokens != marked.tokens
    assert unmarked.nfe["partial"] == from_a.nfe["partial"] > 0 == off.nfe["partial"]


class Engine:
    """Five positions; Stage A writes 7 with given confidences, Stage B writes 5 surely; id 9 is the mask."""

    n_rounds = 1
    second_look = None

    def __init__(self, logits: list[list[float]]):
        self.cfg = type("cfg", (), {"mask_id": 9, "order": "surest"})
        self.logits = torch.tensor([logits])
        self.model = self

    def head(self, states):
        return states

    def stage_a(self, z):
        return self.logits, self.logits

    def stage_b(self, h, bundle):
        return 9.0 * torch.nn.functional.one_hot(torch.full(bundle.shape, 5), 10)


def one_step(engine: Engine, z: list[int], d: Decoding):
    given = torch.zeros(1, len(z), dtype=torch.bool)
    return denoise(engine, torch.tensor([z]), given, torch.zeros(1, 2, 5), d, masks=True)


def test_whose_logits_fill_and_whose_edit():
    engine = Engine([[0.0] * 7 + [9.0] + [0.0] * 2] * 5)
    for fill, edit in ((5, 5), (5, 7), (7, 5), (7, 7)):
        stages = {5: "B", 7: "A"}
        d = switched(Decoding(tau_t2t=0.0), Switches(fill_from=stages[fill], edit_from=stages[edit]))
        assert one_step(engine, [9, 9, 1, 2, 3], d).after.tolist() == [[fill, fill, edit, edit, edit]]


def test_selection_by_entropy_by_hand():
    # position i: token 0 has probability p, and the rest is spread over 9 - i others: more spread, more entropy
    rows = []
    for p, others in ((0.9, 9), (0.8, 9), (0.6, 1), (0.55, 1), (0.99, 1)):
        rows.append([p] + [(1 - p) / others] * others + [1e-9] * (9 - others))
    engine = Engine(torch.tensor(rows).log().tolist())
    z, d = [9, 9, 9, 9, 1], Decoding(tau_m2t=0.7, tau_t2t=None, n_rounds=0)
    assert one_step(engine, z, d).bundle.tolist() == [[True, True, False, False, False]]
    # entropies: 0.545, 0.940, 0.673, 0.688; the last position is not masked
    d = switched(d, Switches(select="entropy"))
    assert one_step(engine, z, d).bundle.tolist() == [[True, False, True, False, False]]


def test_the_table_on_a_toy(tmp_path, monkeypatch, capsys):
    """From the command line, of a base and an adapter that are hardly trained."""
    learn = caller(train, monkeypatch, capsys)
    toy = ["--data", "modes", "--toy", "V=6", "n_ctx=2", "--device", "cpu", "--batch_size", 4, "--max_iters", 2]
    learn(*toy, "--stage_a_only", "--out_dir", tmp_path / "base")
    learn(*toy, "--init_from", tmp_path / "base", "--n_last", 1, "--out_dir", tmp_path / "adapter")
    out = caller(ablation, monkeypatch, capsys)("--ckpt", tmp_path / "adapter", "--device", "cpu")
    assert [line.split("  ")[0] for line in out.splitlines()[1:]] == list(MECHANISM)
