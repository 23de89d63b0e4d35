"""Training: the split forward, who learns, resuming. `pytest tests/test_train.py`"""

import json
import re
import sys
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, approx, caller, random_ids, random_lora, tiny_config, tiny_model
from resuming import assert_same_end, end_state, stopped
from safetensors.torch import load_file

import checkpoint
import sample
import train
from checkpoint import load_model
from corrupt import G, M, W, draw_bundle
from lib.data import cosine
from lib.util import generator, settings_line
from train import RUNS, Batch, base_step, cocommit_step, corrupt_batch, stage_a_draft

TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 4, "--device", "cpu"]


def flags(**values) -> Namespace:
    return Namespace(**train.PAPER | dict(corruption="random", s_max=4) | values)


def a_batch(R=3, T=24) -> Batch:
    """Rows of 24, 19 and 13 tokens, the first two of them a prompt; the same draws each time it is called."""
    clean = random_ids(R, T, 1)
    real = torch.arange(T) < torch.tensor([T, T - 5, T - 11])[:, None]
    draws = [generator("tests", "draws", r) for r in range(R)]
    return Batch(clean, real, real & (torch.arange(T) > 1), MASK, draws)


@pytest.fixture
def run(monkeypatch, capsys):
    """train.py in this process."""
    return caller(train, monkeypatch, capsys)


# --- the step
@pytest.mark.parametrize("context", ["corrupted", "clean"])
def test_the_step_by_hand(context):
    """Eq. 1 in both stages from one prefix: Stage A fills all of M, Stage B its bundle; W and G count in both."""
    model, args, batch = tiny_model(), flags(context=context), a_batch()
    loss, terms = cocommit_step(model, a_batch(), args)

    z, kind = corrupt_batch(model, batch, args)
    bundle = draw_bundle(kind == M, 8, 1, 4, batch.draws)
    ctx = model.context(batch.real, batch.clean if context == "clean" else None)
    h = model.prefix(z, ctx)
    by_hand = 0
    stages = {"A": (model.last_n(h, ctx), kind == M), "B": (model.coordinate(h, bundle, ctx, 2), bundle)}
    for stage, (states, fill) in stages.items():
        ce = F.cross_entropy(model.logits(states[:, :24]).mT, batch.clean, reduction="none")
        for name, where, weight in (("m2t", fill, 1.0), ("edit", kind == W, 0.3), ("clean", kind == G, 0.2)):
            assert where.any()
            by_hand = by_hand + weight * ce[where].sum()
            term = torch.stack([ce[where].sum(), where.sum()]).detach()
            torch.testing.assert_close(terms[f"{name}_{stage}"], term, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-4)


def test_a_bundle_and_a_target_of_ones_own_are_stage_bs_alone():
    model, args = tiny_model(n_rounds=1), flags()

    def all_masks(model, batch, masked, args):
        return masked

    def next_token(model, batch, z, bundle):
        assert (z[bundle] == MASK).all()
        return torch.where(bundle, (batch.clean + 1) % MASK, batch.clean)

    _, clean = cocommit_step(model, a_batch(), args)
    _, whole = cocommit_step(model, a_batch(), args, bundle=all_masks)
    _, flag = cocommit_step(model, a_batch(), flags(bundle="whole"))
    assert all(torch.equal(whole[name], flag[name]) for name in whole)
    _, other = cocommit_step(model, a_batch(), args, target=next_token)
    assert whole["m2t_B"][1] == clean["m2t_A"][1] > clean["m2t_B"][1]
    assert {name for name in clean if not torch.equal(other[name], clean[name])} == {"m2t_B"}
    assert other["m2t_B"][1] == clean["m2t_B"][1]


def test_a_draft_is_stage_as_choice_and_never_a_mask():
    model, z = tiny_model(), random_ids(2, 16).masked_fill(random_ids(2, 16, 3, 2).bool(), MASK)
    real = torch.arange(16) < torch.tensor([[16], [11]])
    where = (z == MASK) & real
    batch = Batch(z, real, real, MASK, [])
    best = model(z, model.context(real)).argmax(-1)[where].mode().values
    model.lm_head.weight.data[MASK] = 1.1 * model.lm_head.weight.data[best]
    logits = model(z, model.context(real))
    assert (logits.argmax(-1)[where] == MASK).any()
    logits[..., MASK] = float("-inf")
    assert torch.equal(stage_a_draft(model, batch, flags(), z, where), logits.argmax(-1)[where])
    assert not stage_a_draft(model, batch, flags(), z, torch.zeros_like(where)).numel()


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


def test_alpha_is_stage_bs_alone():
    model = tiny_model(n_rounds=1)
    loss, terms = cocommit_step(model, a_batch(), flags(bundle="whole"))
    by_alpha, same = cocommit_step(model, a_batch(), flags(bundle="whole", alpha=1.0))
    assert all(torch.equal(terms[name], same[name]) for name in terms)  # the log has cross-entropies
    blocks = int(terms["m2t_B"][1])  # at most: 1 - P is below 1
    assert 0 < by_alpha - (loss - terms["m2t_B"][0]) < blocks


# --- who learns, and how fast
@pytest.mark.parametrize("lora", [False, True])
def test_weight_decay_is_for_matrices(lora):
    """Not for norms, and not for markers, which are added to states."""
    model = tiny_model()
    if lora:
        random_lora(model)
    groups = train.make_optimizer(model, flags(weight_decay=0.5, learning_rate=1.0)).param_groups
    names = {p: n for n, p in model.named_parameters()}
    decayed, undecayed = ({names[p] for p in g["params"]} for g in groups)
    assert [(g["weight_decay"], g["peak"], g["betas"]) for g in groups] == [(w, 1.0, (0.9, 0.95)) for w in (0.5, 0.0)]
    assert decayed | undecayed == {n for n, p in model.named_parameters() if p.requires_grad}
    assert "markers" in undecayed and all("norm" in n for n in undecayed - {"markers"})
    assert not any("norm" in n for n in decayed) and len(decayed) > 15


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [cosine(it, 1000) for it in range(1001)]
    assert rates[:10] == approx([0.1 * k for k in range(1, 11)])  # 1 % of the steps
    assert rates[505] == approx(0.5) and rates[1000] == approx(0.0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))


# --- a run
def test_a_recorded_run_is_repeated(tmp_path, monkeypatch, capsys):
    """The first losses and gradient norms of a run, as an earlier version had them, which balanced no experts."""
    monkeypatch.setattr(train, "BALANCE", 0.0)
    argv = ["--data", "modes", "--toy", "V=12", "m=4", "n_ctx=8", "--batch_size", 8, "--device", "cpu"]
    argv += ["--n_rounds", 2, "--n_last", 2, "--s_max", 16, "--corruption", "draft"]
    argv += ["--max_iters", 30, "--out_dir", tmp_path]
    stopped(6, train, monkeypatch, capsys, *argv)
    log = end_state(tmp_path)[1]
    assert [r["loss"] for r in log] == approx([1.423839, 1.380841, 1.293146, 1.185699, 1.111017, 1.897321], rel=1e-4)
    norms = [1.067918, 1.044259, 0.9943082, 0.8183043, 1.160377, 1.712444]
    assert [r["grad_norm"] for r in log] == approx(norms, rel=1e-3)
    assert [r["lr"] for r in log] == approx([0.003 * cosine(it, 30) for it in range(6)])
    assert [r["edit_B"] for r in log[:3]] == approx([2.960117, 2.951241, 3.025655], rel=1e-4)


def test_micro_batches_change_only_rounding(tmp_path, run):
    for micro in (0, 1):
        run(*TOY, "--max_iters", 1, "--micro_batch", micro, "--out_dir", tmp_path / str(micro))
    whole, split = (end_state(tmp_path / name)[1] for name in "01")
    assert len(whole) == len(split) == 2  # a step and its validation
    assert all(a == approx(b, rel=1e-4) for a, b in zip(whole, split, strict=True))


def test_a_non_finite_loss_stops_before_the_weights_are_hurt(tmp_path, run):
    hot = ["--max_iters", 50, "--learning_rate", 1e30, "--grad_clip", 0, "--eval_interval", 1]
    line = run.fails(*TOY, *hot, "--out_dir", tmp_path)
    assert "is not finite" in line and str(tmp_path) in line and "--learning_rate" in line
    assert all(t.isfinite().all() for k, t in end_state(tmp_path)[0].items() if k.startswith("param."))


# --- resuming


CLEAN = ["--context", "clean", "--n_rounds", 2, "--corruption", "draft"]
MUON = ["--stage_a_only", "--optimizer", "muon", "--one_by_one", 0.5, "--dtype", "bf16"]


@pytest.mark.parametrize("extra", [[], CLEAN, MUON], ids=["paper", "clean", "muon"])
def test_four_steps_equal_two_and_resume_and_two(tmp_path, run, monkeypatch, capsys, extra):
    """Bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    four = [*TOY, *extra, "--max_iters", 4, "--eval_interval", 3]
    run(*four, "--out_dir", whole)
    out = stopped(2, train, monkeypatch, capsys, *four, "--out_dir", parts)
    assert "saved at step 2 of 4; go on with: python train.py" in out
    run("--init_from", "resume", "--out_dir", parts)
    assert_same_end(whole, parts)

    # weights are float32 in every dtype; the experts' biases have moved
    tensors, log = end_state(whole)
    assert all(t.dtype == torch.float32 for t in tensors.values())
    biases = [tensor for name, tensor in tensors.items() if name.endswith("expert_bias")]
    assert len(biases) == 3 and all(bias.any() for bias in biases)

    # four steps, and validations after the third and the last, with the terms of each stage
    stages = "A" if extra == MUON else "AB"
    terms = {f"{term}_{stage}" for term in ("m2t", "edit", "clean") for stage in stages}
    assert len(log) == 6 and log[0]["tokens"] == 16
    assert log[0].keys() - terms == {"step", "loss", "grad_norm", "lr", "tokens"}
    assert log[-1]["val"] and log[-1].keys() - terms == {"step", "val"}
    assert all({f"m2t_{stage}" for stage in stages} <= record.keys() for record in log)


def test_an_adapter_run_moves_the_adapter_alone_and_resumes_on_its_base(tmp_path, run, monkeypatch, capsys):
    """In bf16; K = 2 and n = 3 are the base's, and are not given again."""
    base, a, b = tmp_path / "base", tmp_path / "a", tmp_path / "b"
    run(*TOY, "--n_rounds", 2, "--n_last", 3, "--max_iters", 2, "--out_dir", base)
    weights = (base / "model.safetensors").read_bytes()
    six = [*TOY, "--init_from", base, "--max_iters", 6, "--learning_rate", 0.1, "--dtype", "bf16"]
    assert f"python evaluate.py --ckpt {a}" in run(*six, "--out_dir", a)
    assert (base / "model.safetensors").read_bytes() == weights and not (a / "model.safetensors").exists()
    adapter = load_file(a / "adapter.safetensors")
    assert len(adapter) == 4 * 4 + 1 and all("lora_" in k or k == "markers" for k in adapter)
    assert all(t.abs().sum() > 0 for t in adapter.values())
    about = dict(base="../base", base_fingerprint=checkpoint.fingerprint(base), model=dict(n_last=3, n_rounds=2))
    about |= dict(lora_r=16, lora_in="both", alpha=0.0)
    assert json.loads((a / "adapter.json").read_text()) == about

    # another base in the place of its own
    stopped(3, train, monkeypatch, capsys, *six, "--out_dir", b)
    resume = ["--init_from", "resume", "--out_dir", b, "--micro_batch", 4, "--checkpointing"]
    model = load_model(base, "cpu", torch.float32)
    model.wte.weight.data *= 2
    checkpoint.save_model(model, base)
    assert "it is another one" in run.fails(*resume)
    (base / "model.safetensors").write_bytes(weights)

    run(*resume)  # with what an out-of-memory error wants changed
    assert_same_end(a, b)
    saved = json.loads((b / "train.json").read_text())
    assert saved["init_from"] == str(base) and saved["checkpointing"] and "resume" not in saved


def test_a_run_that_dies_between_two_saves_goes_on_to_the_same_end(tmp_path, run, monkeypatch):
    """It dies in step 4, whose line of the log is cut short; what is good is the state after step 2."""
    a, b = tmp_path / "a", tmp_path / "b"
    ten = [*TOY, "--max_iters", 10, "--eval_interval", 2]
    run(*ten, "--out_dir", a)
    log, record = b / "log.jsonl", train.report

    def die(written, *rest, **how):
        record(written, *rest, **how)
        assert written["step"] < 3

    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(train, "report", die)
        run(*ten, "--out_dir", b)
    log.write_bytes(log.read_bytes()[:-9])
    run("--init_from", "resume", "--out_dir", b)
    assert_same_end(a, b)

    # one that dies before its first save starts again
    (b / "state.safetensors").unlink()
    log.write_bytes(b'{"step": 0}\n[]\n\xff')
    run("--init_from", "resume", "--out_dir", b)
    assert_same_end(a, b)


# --- a step of one's own
def test_a_step_of_ones_own_is_looped(tmp_path, monkeypatch):
    """Four rows a step, and eight times as many to validate."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, TOY), "--max_iters", "2", "--out_dir", str(tmp_path)])
    args = train.read_arguments()
    corpus = train.load_corpus(args)
    model = train.start(args, corpus)
    before = float(model.wte.weight.data.square().sum())
    shapes = []

    def square_of_the_embedding(model, batch, args):
        shapes.append(tuple(batch.clean.shape))
        loss = model.wte.weight.square().sum()
        return loss, {"own": torch.stack([loss.detach(), torch.ones(())])}

    train.loop(model, corpus, square_of_the_embedding, train.make_optimizer(model, args), args)
    first, _, last = end_state(tmp_path)[1]
    assert first["own"] == approx(before) and last["own"] < before and last["val"]
    assert shapes == [(4, 4)] * (2 + 8)


# --- the paper's setting, and what is not given
def test_a_released_checkpoint_is_adapted_on_records_and_sampled(golden, tmp_path, run, monkeypatch, capsys):
    """The released layout, its tokenizer, one padded document a row, LoRA in bf16, then decoding with the adapter."""
    ours, records = tmp_path / "ours", tmp_path / "docs.jsonl"
    texts = [f"def f{n}(x):\n    return x + {n}\n" * (1 + n % 3) for n in range(60)]
    records.write_text("".join(json.dumps({"text": t, "int_score": 3, "token_count": 300}) + "\n" for t in texts))
    argv = ["--init_from", golden, "--data", records, "--seq_len", 64, "--max_iters", 2, "--batch_size", 4]
    argv += ["--n_last", 2, "--dtype", "bf16", "--learning_rate", 0.01, "--device", "cpu", "--out_dir", ours]
    assert "blocks of 32" in run(*argv)
    decode, brief = caller(sample, monkeypatch, capsys), ("--gen_length", 8, "--device", "cpu")
    written = [decode("--ckpt", ckpt, "--prompt", "def f", *brief) for ckpt in (golden, ours)]
    texts = [out.split("\n[")[0] for out in written]
    assert texts[0] != texts[1] and re.search(r"^\[[1-8] tokens; ", written[1], re.M)


@pytest.mark.parametrize("kind", RUNS)
def test_what_a_run_defaults_to(kind, tmp_path, monkeypatch):
    """The table's row, and sizes of the checkpoint or the preset; --help shows it."""
    monkeypatch.chdir(tmp_path)
    reads, *how = kind.split()
    scratch = how == ["from", "scratch"]
    base = tiny_config(block_length=32, n_rounds=2, n_last=3, tokenizer={"names": "bpe"}.get(reads, reads))
    monkeypatch.setattr(checkpoint, "read_config", lambda folder: base)
    argv = {"names": [], "toy": TOY[:5]}.get(reads, ["--data", "a.txt"])
    if scratch:
        argv += ["--stage_a_only"]
    elif reads != "names":
        argv += ["--init_from", "base"]
    if how == ["by", "alpha"]:
        argv += ["--alpha", 0.5]

    def settled(*more) -> dict:
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, [*argv, *more])])
        return vars(train.read_arguments())

    row = {name: value for name, value in RUNS[kind].items() if value is not None}
    sizes = checkpoint.PRESETS[row["preset"]] if scratch else base
    expected = dict(run=kind, init_from="scratch" if scratch else "base")
    expected |= dict(n_last=sizes.n_last, n_rounds=sizes.n_rounds)
    expected |= {name: row[name] for name in row.keys() - {"data", "toy", "stage_a_only", "alpha"}}
    B = 2 if reads == "toy" else row.get("block_length", sizes.block_length)
    expected |= dict(block_length=B, s_max=B if reads == "toy" else B // 2)
    found = settled()
    assert found == found | expected
    given = settled("--learning_rate", 0.5, "--n_rounds", 4)
    assert (given["learning_rate"], given["n_rounds"]) == (0.5, 4)

    manual = " ".join(train.build_parser().format_help().split())
    shown = manual[manual.index(f"{kind}: ") :]
    for name, value in RUNS[kind].items():
        assert value == RUNS["bpe"][name] or settings_line({name: value}) in shown, name
    for name, value in train.PAPER.items():
        assert settings_line({name: value}) in manual, name
    assert {action.dest for action in train.build_parser()._actions} - {"help"} == train.PAPER.keys()


def test_rows_of_validation_are_those_of_every_seed():
    corpus = train.load_corpus(flags(data=["pairs"], toy=["V=3", "m=2"]))
    batches = [train.get_batch(corpus, "val", 0, 4, seed, "cpu") for seed in (0, 1)]
    assert torch.equal(batches[0].clean, batches[1].clean)
    first, second = (torch.stack([torch.rand(3, generator=g) for g in batch.draws]) for batch in batches)
    assert torch.equal(first, second)
    first, second = (train.get_batch(corpus, "train", 0, 4, seed, "cpu").draws for seed in (0, 1))
    assert not torch.equal(torch.rand(3, generator=first[0]), torch.rand(3, generator=second[0]))
