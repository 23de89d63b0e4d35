"""A base from scratch: rows that are read one by one, Muon's matrices, what is refused. `pytest tests/test_base.py`"""

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, caller, tiny_model
from test_train import a_batch, flags

import base
import train
from base import base_step
from lib.optimizers import muon
from lib.util import read_json
from train import cocommit_step


# --- the step
@pytest.mark.parametrize("T", [24, 8])
def test_rows_that_are_read_one_by_one_are_asked_for_every_token(T):
    """All of such a row is masked, also its prompt. Each token reads the clean copy before it, also in one block."""
    model, batch = tiny_model(), a_batch(T=T)
    single = tiny_model(block_length=1)
    ids = batch.clean.masked_fill(batch.real, MASK)
    logits = single(ids, single.read_clean(batch.clean, batch.real))
    ce = F.cross_entropy(logits.mT, batch.clean, reduction="none")[batch.real].detach()

    loss, terms = base_step(model, a_batch(T=T), flags(one_by_one=1.0, context="clean"))
    assert terms["m2t_A"].tolist() == approx([float(ce.sum()), len(ce)], rel=1e-4)
    assert float(loss.detach()) == approx(float(ce.sum()), rel=1e-4)
    loss.backward()
    assert model.markers.grad is None


def test_the_other_rows_are_what_stage_a_is_shown_beside_stage_b():
    model = tiny_model()
    _, both = cocommit_step(model, a_batch(), flags())
    none, some, all_of_them = (base_step(model, a_batch(), flags(one_by_one=p))[1] for p in (0.0, 0.5, 1.0))
    of_stage_a = {name: both[name] for name in ("m2t_A", "edit_A", "clean_A")}
    torch.testing.assert_close(none, of_stage_a, rtol=1e-5, atol=1e-4)
    assert none["m2t_A"][1] < some["m2t_A"][1] < all_of_them["m2t_A"][1]


# --- who learns by what
def test_muons_matrices_are_those_of_the_layers():
    """Adam, without decay, takes the embedding, the output layer, the experts' stacks, norms and markers."""
    model = tiny_model()
    optimizer = muon(model.learned(), 0.01)
    names = {p: n for n, p in model.named_parameters()}
    matrices, rest = ({names[p] for p in group["params"]} for group in optimizer.param_groups)

    of_layers = {name for name, p in model.layers.named_parameters(prefix="layers") if p.dim() == 2}
    assert matrices == of_layers and rest == model.learned().keys() - matrices

    # decay is for the matrices alone, and Adam's rate is .4 of theirs
    settings = [(group["peak"], group["weight_decay"]) for group in optimizer.param_groups]
    assert settings == [(0.01, 0.01), (0.4 * 0.01, 0.0)]


def test_one_step_of_muon_by_hand():
    """After the decay it is the rate times .2 sqrt(max(n, m)) times a matrix whose singular values are near one."""
    model = tiny_model()
    optimizer = muon(model.learned(), 0.01)
    p = model.get_parameter("layers.1.mlp.router")
    before = p.detach().clone()
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    for group in optimizer.param_groups:
        group["lr"] = group["peak"]
    optimizer.step()
    moved = before * (1 - 0.01 * 0.01) - p.detach()
    values = torch.linalg.svdvals(moved / (0.01 * 0.2 * max(p.shape) ** 0.5))
    assert values.min() > 0.6 and values.max() < 1.3  # five steps of Newton and Schulz leave .7 to 1.2
    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
    cosine = (moved * (u @ v)).sum() / moved.norm() / (u @ v).norm()
    assert cosine > 0.97


# --- a run
def test_a_run_goes_on_by_its_own_script(tmp_path, monkeypatch, capsys, scratch):
    """From the same settings the other script would make another model."""
    a, b = tmp_path / "a", tmp_path / "b"
    run = caller(base, monkeypatch, capsys)
    run(*scratch, "--max_iters", 1, "--out_dir", a)
    assert read_json(a / "train.json", "run")["one_by_one"] == 0  # a plain base reads no row from the left
    call = caller(train, monkeypatch, capsys)
    assert "of another script" in call.fails("--init_from", "resume", "--out_dir", a, "--max_iters", 2)
    call(*scratch, "--max_iters", 1, "--out_dir", b)
    assert "train.py" in run.fails("--init_from", "resume", "--out_dir", b, "--max_iters", 2)
