"""The rows of Table 2: what each may have in the place of the paper's method. `pytest tests/released`"""

from dataclasses import replace
from functools import partial

import torch
from common import caller, random_ids, tiny_model

import train
from released import ablation
from released.ablation import MECHANISM, decoding_of, least_entropic, mixed, unmarked
from sample import Decoding, denoise, generate


def prompt(n: int) -> list[int]:
    return random_ids(1, n, 100)[0].tolist()


def test_without_marker_stage_b_writes_what_stage_a_would():
    model = tiny_model()
    d = Decoding(gen_length=24, tau_m2t=0.3, tau_t2t=0.5)
    decoders = {"off": dict(n_rounds=0), "on": {}, "A": dict(look=partial(mixed, "A", "A")), "no": dict(look=unmarked)}
    found = {name: generate(model, [prompt(5)], replace(d, **change))[0] for name, change in decoders.items()}
    assert found["no"].tokens == found["off"].tokens == found["A"].tokens != found["on"].tokens
    assert found["no"].nfe["partial"] == found["A"].nfe["partial"] > 0 == found["off"].nfe["partial"]


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
    for row, (fill, edit) in {
        "Stage B, gated edits": (5, 5),
        "B fills, A edits": (5, 7),
        "A fills, B edits": (7, 5),
        "adapter, Stage B off": (7, 7),
    }.items():
        after = one_step(engine, [9, 9, 1, 2, 3], decoding_of(row, 1)).after
        assert after.tolist() == [[fill, fill, edit, edit, edit]]


def test_selection_by_entropy_by_hand():
    # position i: token 0 has probability p, and the rest is spread over 9 - i others: more spread, more entropy
    rows = []
    for p, others in ((0.9, 9), (0.8, 9), (0.6, 1), (0.55, 1), (0.99, 1)):
        rows.append([p] + [(1 - p) / others] * others + [0.0] * (9 - others))
    # two are above 0.7; entropies: 0.545, 0.940, 0.673, 0.688; the last position is not masked
    masked = torch.tensor([[True, True, True, True, False]])
    assert least_entropic(torch.tensor([rows]), masked).tolist() == [[True, False, True, False, False]]


def test_the_table_on_a_toy(tmp_path, monkeypatch, capsys):
    """From the command line, of a base and an adapter that are hardly trained."""
    learn = caller(train, monkeypatch, capsys)
    toy = ["--data", "modes", "--toy", "V=6", "n_ctx=2", "--device", "cpu", "--batch_size", 4, "--max_iters", 2]
    learn(*toy, "--stage_a_only", "--out_dir", tmp_path / "base")
    learn(*toy, "--init_from", tmp_path / "base", "--n_last", 1, "--out_dir", tmp_path / "adapter")
    out = caller(ablation, monkeypatch, capsys)("--ckpt", tmp_path / "adapter", "--device", "cpu")
    assert [line.split("  ")[0] for line in out.splitlines()[1:]] == list(MECHANISM)
