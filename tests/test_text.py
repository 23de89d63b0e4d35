"""What experiments/text.py counts, and experiments/control.py. `pytest tests/test_text.py`"""

import torch
from common import ROOT, approx, command_line, random_ids, tiny_model

from causal import CausalModel, causal_denoise
from checkpoint import load_model
from decoding import Decoding
from evaluate import bits_of_batch
from experiments import control
from experiments.control import Control, control_denoise
from experiments.text import cost_of, cut, distinct
from lib.rows import Batch
from lib.util import read_json
from sample import generate, step_of

# R rows, T positions


def test_distinct_by_hand():
    """1234, 2341, 3412, 4123, and 1234 again."""
    assert distinct(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4]])) == approx(4 / 5)
    assert distinct(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])) == approx(1 / 2)


def test_beginnings_and_endings_lie_side_by_side():
    text = torch.arange(2000)
    beginnings, endings = cut(text)
    assert beginnings.shape == (256, 56) and endings.shape == (256, 200)
    assert beginnings[0].tolist() == list(range(56)) and endings[-1, -1] == 1998
    assert (endings[:, 0] - beginnings[:, -1] == 1).all()


def test_bits_of_an_ending_are_those_of_its_bytes_alone():
    """The chain rule by hand: each byte of two blocks is read in a row of its own, with the bytes before it."""
    model = tiny_model(block_length=4)
    x = random_ids(2, 12)
    real = torch.ones_like(x, dtype=torch.bool)
    by_hand = 0.0
    for at in range(4, 12):
        corruptible = torch.zeros_like(real)
        corruptible[:, at // 4 * 4 : at // 4 * 4 + 4] = True
        bits = bits_of_batch(model, Batch(x, real, corruptible, torch.empty(0), []), "one at a time")
        by_hand += float(bits[:, at].sum())
    assert cost_of(model, x[:, :4], x[:, 4:], "one at a time") == approx(by_hand / 16)


def test_the_control_reads_no_token():
    """With other tokens its states are the same; those of causal Stage B change."""
    for kind, reads in ((CausalModel, True), (Control, False)):
        model = tiny_model(stage_b="causal", n_rounds=1)
        model.__class__ = kind
        z = random_ids(1, 8)
        bundle = torch.ones_like(z, dtype=torch.bool)
        ctx = model.context(bundle)
        h = model.prefix(z, ctx)
        model.last_n(h, ctx)
        first, second = (model.coordinate(h, bundle, ctx, 1, random_ids(1, 8, seed=s)) for s in (1, 2))
        assert torch.equal(first, second) != reads


def test_the_control_takes_one_look():
    """By its own step it writes the tokens that causal_denoise writes by it, and one look is counted."""
    model = tiny_model(stage_b="causal", n_rounds=1)
    model.__class__ = Control
    for gate in (0.0, 0.3):
        d = Decoding(gen_length=24, tau_joint=gate, tau_t2t=None, temperature=1.0)
        ours, theirs = (
            generate(model, [[1, 2, 3], [4]], d, seed=3, step=step) for step in (control_denoise, causal_denoise)
        )
        assert [o.tokens for o in ours] == [o.tokens for o in theirs]
        for one, many in zip(ours, theirs, strict=True):
            assert one.nfe["full"] == many.nfe["full"] == one.nfe["partial"] <= many.nfe["partial"]
    assert step_of(model, d) is control_denoise


def test_the_control_is_trained_whatever_the_config_says(tmp_path, monkeypatch, capsys):
    """configs/text.toml is for causal Stage B."""
    out = tmp_path / "control"
    flags = f"--config configs/text.toml --data data/shakespeare --init_from assets/shakespeare --out_dir {out}"
    monkeypatch.chdir(ROOT)
    code, said, err = command_line(control, monkeypatch, capsys, *flags.split(), "--max_iters", "1", "--seq_len", "16")
    assert code == 0, err
    # evaluate.py would refuse it
    assert f"done: {out}" in said and "evaluate.py" not in said
    assert read_json(out / "adapter.json", "adapter")["stage_b"] == "control"
    assert isinstance(load_model(out, "cpu", torch.float32), Control)
