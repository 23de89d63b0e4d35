"""Training: the split forward, who learns, resuming. `pytest tests/test_train.py`"""

import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, caller, names_folder, random_ids, tiny_model
from resuming import assert_resumes, assert_same_end, byte_rows, end_state, stopped
from safetensors.torch import load_file
from test_model import with_clean_copy

import base
import checkpoint
import config
import settings
import train
from checkpoint import load_model
from corrupt import G, M, W, draw_bundle
from lib.optimizers import adamw
from lib.rows import Batch, read_corpus, read_meta
from lib.util import generator
from train import cocommit_step, corrupt_batch, cosine


def flags(**values) -> Namespace:
    usual = dict(corruption="random", context="corrupted", s_max=4, learning_rate=1e-5, mask_power=1.0, one_by_one=0.0)
    return Namespace(**usual | values)


def a_batch(R=3, T=24) -> Batch:
    """Rows of 24, 19 and 13 tokens, of which the first two are a prompt, with the same draws at every call."""
    clean = random_ids(R, T, 1)
    real = torch.arange(T) < torch.tensor([T, T - 5, T - 11])[:, None]
    draws = [generator("tests", "draws", r) for r in range(R)]
    return Batch(clean, real, real & (torch.arange(T) > 1), torch.arange(MASK), draws)


@pytest.fixture
def run(monkeypatch, capsys):
    """train.py in this process."""
    return caller(train, monkeypatch, capsys)


# --- the step
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("context", ["corrupted", "clean"])
def test_the_step_by_hand(context, K):
    """Eq. 1 in both stages from one prefix: Stage A fills all of M, Stage B its bundle, and W and G count in both. Here
    unmarked and marked rows are one doubled batch, as in the paper, and one backward gives the same gradients."""
    model, batch = tiny_model(n_rounds=K), a_batch()
    loss, terms = cocommit_step(model, a_batch(), flags(context=context))
    found = torch.autograd.grad(loss, list(model.parameters()))

    z, kind = corrupt_batch(model, batch, None, flags(context=context))
    bundle = draw_bundle(kind == M, 1, 4, batch.draws)
    ids, ctx = z, model.context(batch.real)
    if context == "clean":  # corrupted and clean rows are one row of twice the length, as LLaDA2.x trains
        ids, ctx = with_clean_copy(model, z, batch.clean, batch.real)
    h = model.prefix(ids, ctx)
    marked = F.pad(bundle, (0, h.shape[1] - 24))[..., None]
    twice = replace(ctx, mask=ctx.mask.repeat(2, 1, 1, 1))
    a, b = model.last_n(torch.cat([h, h + marked * model.markers[0]]), twice).chunk(2)
    if K == 2:
        b = model.last_n(b + marked * model.markers[1], ctx)

    by_hand = 0
    logged = {}
    for stage, states, fill in (("A", a, kind == M), ("B", b, bundle)):
        ce = F.cross_entropy(model.logits(states[:, :24]).mT, batch.clean, reduction="none")
        for name, where, weight in (("m2t", fill, 1.0), ("edit", kind == W, 0.3), ("clean", kind == G, 0.2)):
            assert where.any()
            by_hand = by_hand + weight * ce[where].sum()
            logged[f"{name}_{stage}"] = torch.stack([ce[where].sum(), where.sum()]).detach()
        if stage == "A":  # at the very masks that Stage B fills
            logged["m2t_A_bundle"] = torch.stack([ce[bundle].sum(), bundle.sum()]).detach()
    states = h[:, :24][bundle]
    logged["states"] = torch.stack([(states.norm(dim=1) / 8).sum(), bundle.sum()]).detach()  # of 64 channels
    logged["marker"] = torch.stack([model.markers.norm() / (64 * K) ** 0.5 * bundle.sum(), bundle.sum()]).detach()
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(terms, logged, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, torch.autograd.grad(by_hand, list(model.parameters())), rtol=1e-3, atol=2e-3)


def test_a_draft_is_stage_as_choice_and_never_a_mask():
    model = tiny_model()
    states = torch.randn(1500, 64, generator=generator("states"))
    logits = model.logits(states)
    assert (logits.argmax(-1) == MASK).any()
    logits[..., MASK] = float("-inf")
    assert torch.equal(model.drafts(states), logits.argmax(-1))
    assert not model.drafts(states[:0]).numel()


# --- who learns, and how fast
def test_weight_decay_is_for_matrices():
    """It is not for norms, and not for markers, which are added to states and have a rate of their own."""
    model = tiny_model()
    groups = adamw(model.learned(), 1.0, 30.0).param_groups
    names = {p: n for n, p in model.named_parameters()}
    decayed, undecayed, markers = ({names[p] for p in g["params"]} for g in groups)
    assert [(g["weight_decay"], g["peak"]) for g in groups] == [(0.01, 1.0), (0.0, 1.0), (0.0, 30.0)]
    assert all(g["betas"] == (0.9, 0.95) for g in groups)
    assert markers == {"markers"} and undecayed == {name for name in names.values() if "norm" in name}
    assert decayed == set(names.values()) - undecayed - markers


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [cosine(it, 1000) for it in range(1001)]
    assert rates[:10] == approx([0.1 * k for k in range(1, 11)])  # 1 % of the steps
    assert rates[505] == approx(0.5) and rates[1000] == approx(0.0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_an_update_by_hand(tmp_path, run, monkeypatch, scratch):
    """By plain descent: the gradient is cut to a norm of 1, and each expert's bias moves by .001, up or down."""

    def descent(learned: dict, peak: float, marker_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([dict(params=[*learned.values()], peak=peak)], peak)

    monkeypatch.setitem(train.OPTIMIZERS, "adamw", descent)
    run(*scratch, "--max_iters", 1, "--out_dir", tmp_path)
    record = end_state(tmp_path)[1][1]
    model = load_model(tmp_path, "cpu", torch.float32)
    begun = checkpoint.new_model(model.cfg, generator(0, "init"))
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), begun.parameters(), strict=True)])
    assert record["grad_norm"] > 2 and float(moved.detach().norm()) == approx(record["lr"], rel=1e-3)
    for bias in model.buffers():
        assert set(bias.tolist()) <= {torch.tensor(x).item() for x in (-0.001, 0.0, 0.001)} and bias.any()


# --- a run
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(tmp_path, run, monkeypatch, scratch):
    """From the third step on the rate is 1e30."""
    monkeypatch.setattr(train, "cosine", lambda it, max_iters: 1e-33 if it < 2 else 1.0)
    hot = ["--max_iters", 50, "--learning_rate", 1e30, "--eval_interval", 1]
    line = run.fails(*scratch, *hot, "--out_dir", tmp_path)
    assert "of step 3 is not finite" in line and "--learning_rate" in line
    assert f"the checkpoint of step 2 in {tmp_path} is good" in line
    state, _ = end_state(tmp_path)
    assert all(t.isfinite().all() for t in state.values()) and state["step.wte.weight"] == 2


# --- resuming
MUON = ["--optimizer", "muon", "--one_by_one", 0.5, "--context", "clean", "--mask_power", 0.5, "--dtype", "bf16"]
RUNS = {"paper": (train, ["--corruption", "draft"]), "muon": (base, MUON)}


@pytest.mark.parametrize("name", RUNS)
def test_four_steps_equal_two_and_resume_and_two(tmp_path, monkeypatch, capsys, scratch, pairs, name):
    """Also tested: what such a run leaves in its folder."""
    script, extra = RUNS[name]
    argv = [*scratch, *extra, "--max_iters", 4, "--eval_interval", 3]
    folder = assert_resumes(script, tmp_path, monkeypatch, capsys, *argv)
    tensors, log = end_state(folder)

    # the ids are those of the rows
    cfg, meta = checkpoint.read_config(folder), read_meta(pairs)
    assert (cfg.vocab_size, cfg.eos_id, cfg.mask_id) == (meta.vocab_size, meta.eos_id, meta.mask_id)

    # weights are float32 in every dtype; the experts' biases have moved
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert all(tensors[f"param.layers.{i}.mlp.expert_bias"].any() for i in (1, 2, 3))

    # validations before the first step, after the third and the last
    assert [(record["step"], "val" in record) for record in log] == [
        (0, True), (0, False), (1, False), (2, False), (3, True), (3, False), (4, True),
    ]  # fmt: skip
    assert log[1].keys() >= {"loss", "grad_norm", "lr", "m2t_A"} and log[1]["tokens"] == 16
    if name == "paper":  # its marker begins at zero: Stage B is Stage A. Then it gains, or loses, at the same masks
        assert log[0]["B_less_A"] == approx(0, abs=1e-6)
        assert log[-1]["B_less_A"] == approx(log[-1]["m2t_B"] - log[-1]["m2t_A_bundle"]) != 0


@pytest.mark.parametrize("stage_b, K", [("paper", 2), ("causal", 1)])
def test_an_adapter_run_moves_the_adapter_alone_and_resumes_on_its_base(
    stage_b, K, tmp_path, run, monkeypatch, capsys, scratch, on_pairs
):  # fmt: skip
    """The run is in bf16. K and n = 3 are the base's, and need not be given again."""
    base, a, b = tmp_path / "base", tmp_path / "a", tmp_path / "b"
    run(*scratch, "--n_rounds", K, "--n_last", 3, "--max_iters", 2, "--out_dir", base)
    weights = (base / "model.safetensors").read_bytes()
    six = [*on_pairs, "--init_from", base, "--stage_b", stage_b]
    six += ["--max_iters", 6, "--learning_rate", 0.1, "--dtype", "bf16"]
    run(*six, "--out_dir", a)
    assert (base / "model.safetensors").read_bytes() == weights and not (a / "model.safetensors").exists()
    adapter = load_file(a / "adapter.safetensors")
    model = load_model(a, "cpu", torch.float32)
    assert adapter.keys() == checkpoint.adapter_tensors(model).keys()
    assert all(adapter[name].any() for name in model.learned())
    assert (model.cfg.n_last, model.cfg.n_rounds) == (3, K)

    # after an out-of-memory error it goes on with smaller batches; another base in the place of its own is refused
    stopped(3, train, monkeypatch, capsys, *six, "--out_dir", b)
    resume = ["--init_from", "resume", "--out_dir", b, "--micro_batch", 4, "--checkpointing"]
    run(*resume)
    assert_same_end(a, b)
    twice = {name: 2 * tensor for name, tensor in load_file(base / "model.safetensors").items()}
    checkpoint.save_tensors(base / "model.safetensors", twice)
    assert f"(config, tokenizer or weights) than {base} holds now" in run.fails(*resume)


def test_an_adapter_learns_beside_a_model_whatever_its_rank():
    of = [Namespace(init_from=name, lora_r=r) for name in ("scratch", "base") for r in (0, 1)]
    assert [settings.saves_adapter(args) for args in of] == [False, False, False, True]


def test_a_run_is_extended(tmp_path, run, monkeypatch, scratch):
    """After two steps the run takes four more: the log goes on after its old lines, with the schedule of six steps. It
    stays the model that it was, also if the preset has been edited since."""
    monkeypatch.setattr(train, "LOG_INTERVAL", 2)
    said = run(*scratch, "--max_iters", 2, "--out_dir", tmp_path)
    assert "step 2/2 | loss" in said and "step 1/2" not in said
    before = end_state(tmp_path)[1]
    written = (tmp_path / "config.json").read_text()
    for name, preset in config.PRESETS.items():
        monkeypatch.setitem(config.PRESETS, name, replace(preset, routed_scaling=1.0))
    run("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", 6, "--eval_interval", 5)
    assert (tmp_path / "config.json").read_text() == written
    tensors, log = end_state(tmp_path)
    assert log[:4] == before and [r["step"] for r in log] == [0, 0, 1, 2, 2, 3, 4, 5, 5, 6]
    assert [r["lr"] for r in log if "lr" in r][2:] == approx([3e-3 * cosine(it, 6) for it in (2, 3, 4, 5)])
    assert {float(t) for k, t in tensors.items() if k.startswith("step.")} == {6.0}

    # an earlier end is refused, and so is a run without its state
    assert "taken 6 steps already" in run.fails("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", 3)
    (tmp_path / "state.safetensors").unlink()
    assert "state.safetensors is gone" in run.fails("--init_from", "resume", "--out_dir", tmp_path)


# --- all weights of a checkpoint
def test_all_weights_of_a_checkpoint_learn(tmp_path, run, monkeypatch, capsys):
    """With --lora_r 0, into a model's folder of its own. Sizes that are left out are the checkpoint's."""
    source = names_folder(tmp_path / "source", block_length=4, max_len=32)  # as long as the rows
    rows = byte_rows(tmp_path / "rows", prompt=-1, judge={"names": "0"})
    theirs = load_file(source / "model.safetensors")
    argv = ["--data", rows, "--init_from", source, "--lora_r", 0, "--batch_size", 4, "--device", "cpu"]
    argv += ["--max_iters", 4, "--eval_interval", 3, "--learning_rate", 1e-3, "--dtype", "bf16"]

    # it resumes on its own weights, all of which move
    learned = assert_resumes(train, tmp_path, monkeypatch, capsys, *argv)
    assert checkpoint.read_config(learned) == checkpoint.read_config(source)
    ours, still = load_file(learned / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(still[name], t) for name, t in theirs.items())
    assert not {name for name, now in ours.items() if torch.equal(now, theirs[name].to(now.dtype))}


# --- the rows of a step
def test_a_step_of_ones_own_gets_its_rows_in_order(tmp_path, monkeypatch, scratch, pairs):
    """Four at a time, and eight times as many to validate. A step is told how much of the run is done."""
    seen = []
    elapsed = []

    def step(model, batch, args):
        seen.append(batch.clean)
        elapsed.append(batch.elapsed)
        return cocommit_step(model, batch, args)

    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, scratch), "--max_iters=2", f"--out_dir={tmp_path}"])
    train.run(settings.read_arguments(settings.build_parser("")), step)
    rows = read_corpus(pairs, 4, 0, 2, 4).rows
    held_out = rows["val"].batch(0, 32)[0]
    asked = torch.cat([held_out, rows["train"].batch(0, 8)[0], held_out])
    assert torch.equal(torch.stack(seen), asked.view(-1, 4, 4))
    assert elapsed == [0.0] * 9 + [0.5] + [1.0] * 8


# --- the paper's setting
def test_the_defaults_are_the_papers_except_for_sizes_and_what_small_models_do_not_need():
    """configs/llada.toml has the paper's values, here in brackets."""
    args = vars(settings.build_parser("").parse_args([])) | dict(n_last=3, n_rounds=1, block_length=32)
    args |= dict(corruption="draft", context="corrupted", marker_rate=3000.0)
    found = (
        "seq_len 32 (2048), max_iters 300 (12500), batch_size 64 (8), learning_rate 0.0003 (1e-05), "
        "marker_rate 3000.0 (1.0), checkpointing False (True), dtype fp32 (bf16)"
    )
    assert settings.differences(Namespace(**args)) == found
    args["init_from"] = "scratch"
    assert settings.differences(Namespace(**args)) == f"{found}, all weights learn (LoRA on a frozen model)"
