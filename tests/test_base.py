"""A base from scratch: rows that are read one by one, Muon's matrices, what is refused. `pytest tests/test_base.py`"""

import json
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, caller, random_ids, tiny_model
from resuming import assert_same_end, byte_rows, end_state, printed_line, stopped, toy_rows
from test_train import a_batch, flags

import base
import sample
import train
from base import base_step, muon
from train import cocommit_step

MUON = ["--optimizer", "muon", "--one_by_one", 0.5, "--context", "clean", "--dtype", "bf16"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return toy_rows(tmp_path_factory.mktemp("rows") / "pairs")


@pytest.fixture(scope="module")
def scratch(pairs):
    how = ["--data", pairs, "--init_from", "scratch", "--n_last", 2, "--learning_rate", 3e-3, "--mask_power", 1]
    return [*how, "--corruption", "random", "--batch_size", 4, "--device", "cpu"]


@pytest.fixture
def run(monkeypatch, capsys):
    """base.py in this process."""
    return caller(base, monkeypatch, capsys)


# --- the step
def test_rows_that_are_read_one_by_one_are_asked_for_every_token():
    """They are masked whole, prompts too; the others are what Stage A is shown beside Stage B."""
    model, batch = tiny_model(), a_batch()
    loss, terms = base_step(model, a_batch(), flags(one_by_one=1.0, context="clean"))
    single = tiny_model(block_length=1)
    ids = batch.clean.masked_fill(batch.real, MASK)
    logits = single(ids, single.context(batch.real, batch.clean))[:, :24]
    ce = F.cross_entropy(logits.mT, batch.clean, reduction="none")[batch.real].detach()
    assert terms["m2t_A"].tolist() == approx([float(ce.sum()), len(ce)], rel=1e-4)
    assert float(loss.detach()) == approx(float(ce.sum()), rel=1e-4)

    _, some = base_step(model, a_batch(), flags(one_by_one=0.5))
    _, none = base_step(model, a_batch(), flags(one_by_one=0.0))
    _, both = cocommit_step(model, a_batch(), flags())
    assert none["m2t_A"][1] < some["m2t_A"][1] < len(ce)
    of_stage_a = {name: both[name] for name in ("m2t_A", "edit_A", "clean_A")}
    torch.testing.assert_close(none, of_stage_a, rtol=1e-5, atol=1e-4)
    loss.backward()
    assert model.markers.grad is None


def test_a_row_of_one_block_is_read_one_by_one_from_its_clean_copy():
    """A single block reads nothing before it; one by one it does."""
    model, batch = tiny_model(), a_batch(T=8)
    batch.real[:], batch.free[:] = True, True
    single = tiny_model(block_length=1)
    ids = torch.full_like(batch.clean, MASK)
    logits = single(ids, single.context(batch.real, batch.clean))[:, :8]
    expected = float(F.cross_entropy(logits.mT, batch.clean, reduction="sum").detach())
    loss, _ = base_step(model, batch, flags(one_by_one=1.0, context="clean"))
    assert float(loss.detach()) == approx(expected, rel=1e-4)


# --- who learns by what
def test_muons_matrices_are_those_of_the_layers():
    """Attention, dense and shared MLPs, routers; by Adam, without decay, go embedding, output layer, the experts'
    stacks, norms, markers."""
    model = tiny_model()
    args = Namespace(learning_rate=0.01, weight_decay=0.5)
    optimizer = muon(model, args)
    names = {p: n for n, p in model.named_parameters()}
    matrices, rest = ({names[p] for p in group["params"]} for group in optimizer.param_groups)

    attention = {f"layers.{i}.attn.{which}.weight" for i in range(4) for which in ("qkv", "proj")}
    dense = {f"layers.0.mlp.{which}.weight" for which in ("gate_up", "down")}
    shared = {f"layers.{i}.mlp.shared.{which}.weight" for i in (1, 2, 3) for which in ("gate_up", "down")}
    routers = {f"layers.{i}.mlp.router" for i in (1, 2, 3)}
    assert matrices == attention | dense | shared | routers

    norms = {f"layers.{i}.{which}.weight" for i in range(4) for which in ("norm_1", "norm_2")}
    norms |= {f"layers.{i}.attn.{which}_norm.weight" for i in range(4) for which in "qk"}
    experts = {f"layers.{i}.mlp.{which}" for i in (1, 2, 3) for which in ("gate_up", "down")}
    assert rest == {"wte.weight", "lm_head.weight", "norm_f.weight", "markers"} | norms | experts
    assert matrices | rest == model.learned().keys() and not matrices & rest

    # decay is for the matrices alone, and Adam's rate is .4 of theirs
    settings = [(group["peak"], group["weight_decay"]) for group in optimizer.param_groups]
    assert settings == [(0.01, 0.5), (0.4 * 0.01, 0.0)]
    said = " ".join(muon.__doc__.split())
    for words in ("attention, dense and shared MLPs, routers", "without decay", "the experts' stacks"):
        assert words in said


def test_one_step_of_muon_by_hand():
    """The first momentum of a gradient G is .05 G, and Nesterov's .0975 G: orthogonalised, the size is gone. So the
    step is the rate times .2 sqrt(max(n, m)) times a matrix whose singular values are near one, after the decay."""
    model = tiny_model()
    optimizer = muon(model, Namespace(learning_rate=0.01, weight_decay=0.5))
    name = "layers.1.mlp.router"
    p = model.get_parameter(name)
    before = p.detach().clone()
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    for group in optimizer.param_groups:
        group["lr"] = group["peak"]
    optimizer.step()
    moved = before * (1 - 0.01 * 0.5) - p.detach()
    values = torch.linalg.svdvals(moved / (0.01 * 0.2 * max(p.shape) ** 0.5))
    assert values.min() > 0.6 and values.max() < 1.3  # five steps of Newton and Schulz leave .7 to 1.2
    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
    cosine = (moved * (u @ v)).sum() / moved.norm() / (u @ v).norm()
    assert cosine > 0.97
    assert all(torch.equal(q, r) for (n, q), r in zip(model.named_parameters(), tiny_model().parameters(), strict=True)
               if n != name)  # fmt: skip


# --- a run
@pytest.mark.parametrize("extra", [[], MUON], ids=["adamw", "muon"])
def test_four_steps_equal_two_and_resume_and_two(tmp_path, run, monkeypatch, capsys, scratch, extra):
    """Bit for bit, by the line that it printed."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    four = [*scratch, *extra, "--max_iters", 4, "--eval_interval", 3]
    run(*four, "--out_dir", whole)
    out = stopped(2, base, monkeypatch, capsys, *four, "--out_dir", parts)
    assert "saved at step 2 of 4; go on with: python base.py" in out
    script, argv = printed_line(out)
    assert script is base
    run(*argv)
    assert_same_end(whole, parts)

    # weights are float32 in every dtype; the experts' biases have moved
    tensors, log = end_state(whole)
    assert all(t.dtype == torch.float32 for t in tensors.values())
    biases = [tensor for name, tensor in tensors.items() if name.endswith("expert_bias")]
    assert len(biases) == 3 and all(bias.any() for bias in biases)

    # four steps, and validations after the third and the last, with the terms of Stage A
    terms = {f"{term}_A" for term in ("m2t", "edit", "clean")}
    assert len(log) == 6 and log[0]["tokens"] == 16
    assert log[0].keys() - terms == {"step", "loss", "grad_norm", "lr", "tokens"}
    assert log[-1]["val"] and log[-1].keys() - terms == {"step", "val"}
    assert all("m2t_A" in record for record in log)


def test_a_base_is_sampled_by_stage_a_and_adapted(tmp_path, run, monkeypatch, capsys):
    """From text, in bytes, to CoCommit on it: each line is what the one before says."""
    rows, folder = byte_rows(tmp_path / "rows"), tmp_path / "base"
    out = run("--data", rows, "--init_from", "scratch", "--block_length", 8, "--n_last", 1, "--max_iters", 2,
              "--batch_size", 4, "--device", "cpu", "--out_dir", folder)  # fmt: skip
    assert f"done; what it does now: python sample.py --prompt TEXT --ckpt {folder}" in out
    decode = caller(sample, monkeypatch, capsys)
    short = ["--prompt", "ab", "--gen_length", 8, "--device", "cpu"]
    assert "[Stage A alone, " in decode("--ckpt", folder, *short)
    on_top = tmp_path / "causal"
    caller(train, monkeypatch, capsys)("--data", rows, "--init_from", folder, "--stage_b", "copy", "--causal",
        "--max_iters", 2, "--batch_size", 4, "--device", "cpu", "--out_dir", on_top)  # fmt: skip
    assert "[causal Stage B, the paper's loss, n = 1 of 4, K = 1, the longest run" in decode("--ckpt", on_top, *short)


# --- what is refused
def test_a_base_is_from_scratch(run, tmp_path, scratch, pairs):
    run(*scratch, "--max_iters", 1, "--out_dir", tmp_path / "base")
    line = run.fails("--data", pairs, "--init_from", tmp_path / "base", "--out_dir", tmp_path / "b")
    assert "a base is trained from scratch" in line


def test_one_by_one_reads_a_clean_copy(run, tmp_path, scratch):
    """Those rows are all masks: without one two texts give the same states."""
    model, one = tiny_model(), torch.tensor([True])
    texts = [random_ids(1, 16, seed) for seed in (1, 2)]
    masks = torch.full((1, 16), MASK)
    real = torch.ones(1, 16, dtype=torch.bool)
    states = [model.prefix(masks, model.context(real, None, one)) for _ in texts]
    assert torch.equal(*states)
    beside = [model.prefix(masks, model.context(real, text, one))[:, :16] for text in texts]
    assert not torch.equal(*beside)

    line = run.fails(*scratch, "--one_by_one", 0.5, "--context", "corrupted", "--out_dir", tmp_path / "a")
    assert "give --context clean" in line and not (tmp_path / "a").exists()


UNUSED = [("--alpha", 0.5), ("--whole", 0.5), ("--causal",), ("--stage_b", "copy")]


@pytest.mark.parametrize("flag", UNUSED, ids=[flag[0] for flag in UNUSED])
def test_what_is_stage_bs_is_refused_and_never_ignored(flag, run, tmp_path, scratch):
    line = run.fails(*scratch, *flag, "--max_iters", 1, "--out_dir", tmp_path / "a")
    assert flag[0] in line and not (tmp_path / "a").exists()


def test_a_run_goes_on_by_its_own_script(tmp_path, run, monkeypatch, capsys, scratch):
    """Of the same settings the other one would make another model."""
    a, b = tmp_path / "a", tmp_path / "b"
    run(*scratch, "--max_iters", 1, "--out_dir", a)
    call = caller(train, monkeypatch, capsys)
    assert "one_by_one = 0.0 is no setting" in call.fails("--init_from", "resume", "--out_dir", a, "--max_iters", 2)
    call(*scratch, "--max_iters", 1, "--out_dir", b)
    assert "train.py" in run.fails("--init_from", "resume", "--out_dir", b, "--max_iters", 2)
    assert all(json.loads((folder / "train.json").read_text())["max_iters"] == 1 for folder in (a, b))
