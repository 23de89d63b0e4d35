"""Training: the split forward, who learns, resuming. `pytest tests/test_train.py`"""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import ROOT, approx, command_line, random_ids, refused, settings, tiny_config, tiny_model
from safetensors.torch import load_file

import checkpoint
import convert_weights
import sample
import train
from checkpoint import save_model
from corrupt import G, M, W, draw_bundle
from lib.util import generator
from model import sequence_context
from settings import build_parser, load_corpus, settle_new
from train import Batch, cocommit_step, corrupt_batch, stage_a_draft, stage_a_step

TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 4, "--eval_rows", 4, "--log_interval", 1]
TOY += ["--device", "cpu"]


def flags(**values):
    return settings(build_parser(train.__doc__), **{"corruption": "random"} | values)


def a_batch(R=3, T=24, draws_key="draws") -> Batch:
    """Rows of 24, 19 and 13 tokens; the same draws each time it is called."""
    clean = random_ids(R, T, 1)
    real = torch.arange(T) < torch.tensor([T, T - 5, T - 11])[:, None]
    draws = [generator("tests", draws_key, r) for r in range(R)]
    return Batch(clean, real, real, 38, draws)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------------------------------------------------------
# the step


def one_by_one(model, h, bundle, ctx, n_rounds):
    return model.last_n(h, ctx), model.coordinate(h, bundle, ctx, n_rounds)


@pytest.mark.parametrize("context", ["corrupted", "clean"])
@pytest.mark.parametrize("n_rounds", [1, 2])
def test_the_step_is_the_two_stages_one_by_one(n_rounds, context, monkeypatch):
    """States, losses and gradients of the doubled batch, against last_n and coordinate, one after the other."""
    model = tiny_model(n_rounds=n_rounds)
    args = flags(context=context)
    doubled = model.both_stages
    found = []
    for both_stages in (doubled, partial(one_by_one, model)):
        states = []

        def kept(*given, run=both_stages, states=states):
            states += run(*given)
            return states

        monkeypatch.setattr(model, "both_stages", kept)
        model.zero_grad()
        loss, terms = cocommit_step(model, a_batch(), args)
        loss.backward()
        assert states[0].shape[1] == 24 * (1 + (context == "clean"))
        found.append(dict(h_a=states[0], h_b=states[1], loss=loss, terms=terms) | gradients(model))
    plain, both = found
    assert plain.keys() == both.keys()
    for name, value in plain.items():
        size = float(value.detach().abs().max())
        torch.testing.assert_close(both[name], value, rtol=1e-4, atol=1e-4 * size, msg=name)


def test_the_loss_is_eq_1_of_both_stages():
    model, args = tiny_model(), flags()
    loss, terms = cocommit_step(model, a_batch(), args)
    weighted = (terms[..., 0] * torch.tensor([1.0, 0.3, 0.2])).sum()
    torch.testing.assert_close(loss.detach(), weighted)
    batch = a_batch()
    _, kind = corrupt_batch(model, batch, args)
    bundle = draw_bundle(kind == M, 8, args.s_min, args.s_max, batch.draws)
    assert terms[:, 0, 1].tolist() == [int((kind == M).sum()), int(bundle.sum())]  # all of M, the bundle alone
    assert terms[0, 1:, 1].tolist() == terms[1, 1:, 1].tolist() == [int((kind == k).sum()) for k in (W, G)]


def test_stage_a_only_is_stage_a_alone():
    model, args = tiny_model(), flags()
    _, both = cocommit_step(model, a_batch(), args)
    loss, terms = stage_a_step(model, a_batch(), args)
    torch.testing.assert_close(terms[0], both[0], rtol=1e-5, atol=1e-4)
    assert not terms[1].any()
    loss.backward()
    assert model.markers.grad is None


def test_marks_reach_the_loss_of_stage_b_only():
    model, args = tiny_model(n_rounds=1), flags()
    _, before = cocommit_step(model, a_batch(), args)
    model.markers.data += 1.0
    _, after = cocommit_step(model, a_batch(), args)
    torch.testing.assert_close(after[0], before[0])
    assert (after[1] - before[1]).abs()[:, 0].max() > 0.1


def test_the_target_is_stage_bs_alone():
    """A target of one's own, as the README shows it."""
    model, args = tiny_model(n_rounds=1), flags()

    def next_token(model, batch, z, bundle):
        return torch.where(bundle, (batch.clean + 1) % 38, batch.clean)

    _, clean = cocommit_step(model, a_batch(), args)
    _, other = cocommit_step(model, a_batch(), args, target=next_token)
    assert torch.equal(other[0], clean[0]) and torch.equal(other[1, 1:], clean[1, 1:])
    assert other[1, 0, 0] != clean[1, 0, 0]


def test_a_target_of_ones_own_is_three_lines(tmp_path, monkeypatch, capsys):
    """The README's example: it is called with (R, T) ids and a bundle of masks, and its loss is what is logged."""
    seen = []

    def mine(model, batch, z, bundle):
        seen.append((z[bundle] == model.cfg.mask_id).all())
        return torch.where(bundle, 0, batch.clean)

    def choose(args):
        return train.Recipe(step=partial(train.cocommit_step, target=mine))

    script = SimpleNamespace(__name__="train", main=lambda: train.main(choose=choose))
    run = [*TOY, "--max_iters", 60, "--learning_rate", 0.01, "--out_dir", tmp_path / "run"]
    code, out, err = command_line(script, monkeypatch, capsys, *run)
    assert code == 0 and all(seen) and len(seen) == 61, err
    log = end_state(tmp_path / "run")[1]
    assert log[-2]["m2t_B"] < 0.5 * log[-2]["m2t_A"]  # token 0 everywhere is easier than the toy


def test_a_draft_is_the_plain_argmax():
    """Also where the second best is within 0.1 nats: the lower id of near-equals (7 here) is a rule of chains alone."""
    logits = torch.full((40,), -5.0)
    logits[[7, 21, 38]] = torch.tensor([1.0, 1.05, 9.0])  # 38 is the mask: a draft that stays masked is none
    model = SimpleNamespace(cfg=tiny_config(), compute_dtype=torch.float32, prefix=lambda ids, ctx: ids[..., None])
    model.last_n, model.head = lambda h, ctx: h.float(), lambda h: logits.repeat(len(h), 1)
    where = random_ids(2, 16, 3, 2).bool()
    draft = stage_a_draft(model, random_ids(2, 16), where, torch.ones_like(where))
    assert draft.tolist() == [21] * int(where.sum())


def test_a_draft_is_stage_as_choice():
    model, z = tiny_model(), random_ids(2, 16).masked_fill(random_ids(2, 16, 3, 2).bool(), 38)
    real = torch.arange(16) < torch.tensor([[16], [11]])
    logits = model(z, sequence_context(model.cfg, real, torch.float32))
    logits[..., 38] = float("-inf")
    where = (z == 38) & real
    assert torch.equal(stage_a_draft(model, z, where, real), logits.argmax(-1)[where])
    assert not stage_a_draft(model, z, torch.zeros_like(where), real).numel()


# ---------------------------------------------------------------------------------------------------------------------
# who learns


def test_only_lora_and_markers_move_from_a_checkpoint(tmp_path, monkeypatch, capsys):
    base, ours = tmp_path / "base", tmp_path / "ours"
    assert command_line(train, monkeypatch, capsys, *TOY, "--max_iters", 3, "--out_dir", base)[0] == 0
    before = load_file(base / "model.safetensors")
    args = [*TOY, "--init_from", base, "--max_iters", 3, "--learning_rate", 0.1, "--out_dir", ours]
    code, out, _ = command_line(train, monkeypatch, capsys, *args)
    assert code == 0 and f"python evaluate.py --data pairs --ckpt {base} --adapter" in out
    after = load_file(base / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
    adapter = load_file(ours / "adapter.safetensors")
    assert not (ours / "model.safetensors").exists()
    assert len(adapter) == 4 * 4 + 1 and all("lora_" in k or k == "markers" for k in adapter)
    assert all(t.abs().sum() > 0 for t in adapter.values())
    saved = json.loads((ours / "adapter.json").read_text())
    assert saved.pop("base_fingerprint") == checkpoint.fingerprint(base)
    geometry = dict(n_layer=4, n_embd=64, n_head=4, n_kv_head=2, n_last=2, n_rounds=1)
    assert saved == dict(base=str(base), lora_r=16, lora_alpha=32, model=geometry)


@pytest.mark.parametrize("lora", [False, True])
def test_weight_decay_is_for_matrices(lora):
    """Not for norms, and not for what is added to states: markers, and an extension's markers_*."""
    model = tiny_model()
    model.markers_noise = torch.nn.Parameter(torch.zeros(32, 64))
    if lora:
        model.add_lora(4, 8.0, generator("lora"))
        model.markers_noise.requires_grad_(True)
    groups = train.make_optimizer(model, flags(weight_decay=0.5, learning_rate=1.0)).param_groups
    names = {p: n for n, p in model.named_parameters()}
    decayed, undecayed = ({names[p] for p in g["params"]} for g in groups)
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    assert decayed | undecayed == {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"markers", "markers_noise"} <= undecayed
    assert all("norm" in n for n in undecayed - {"markers", "markers_noise"})
    assert not any("norm" in n for n in decayed) and len(decayed) > 15


def test_learning_rate_warms_up_and_ends_at_zero():
    args = flags(learning_rate=1.0, max_iters=1000)
    rates = [train.learning_rate(s, args) for s in range(1001)]
    assert rates[:10] == approx([0.1 * k for k in range(1, 11)])  # 1 % of the steps
    assert rates[505] == approx(0.5) and rates[1000] == approx(0.0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_toy_rows_are_a_prompt_block_and_an_answer_block(tmp_path):
    args = settle_new(flags(data=["pairs"], toy=["V=5", "m=2"], out_dir=str(tmp_path), corruption=None))
    corpus = load_corpus(args)
    data = corpus.rows
    x, real, prompt = data["train"].batch(0, 50)
    assert corpus.n_plain == 5 and corpus.tokens["block_length"] == 2
    assert real.all() and prompt.sum() == 100 and torch.equal(x[:, 0], x[:, 1])
    assert torch.equal((x[:, 2] + x[:, 0] - 5) % 5, x[:, 3])  # the partner is shifted by the key
    assert torch.equal(data["train"].batch(20, 5)[0], x[20:25])
    assert not torch.equal(data["val"].batch(0, 50)[0], x)


def test_generator_is_a_function_of_its_key():
    assert torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "a")))
    assert not torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "b")))


def test_micro_batches_change_only_rounding(tmp_path, monkeypatch, capsys):
    for name, micro in (("whole", 0), ("split", 1)):
        run = [*TOY, "--max_iters", 1, "--micro_batch", micro, "--out_dir", tmp_path / name]
        assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    whole, split = (end_state(tmp_path / n)[1] for n in ("whole", "split"))
    assert len(whole) == len(split) == 2  # a step and its validation
    assert all(a == approx(b, rel=1e-4) for a, b in zip(whole, split, strict=True))


def test_bf16_trains_float32_weights(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 3, "--dtype", "bf16", "--checkpointing", "--out_dir", tmp_path / "run"]
    assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    tensors, log = end_state(tmp_path / "run")
    assert all(t.dtype == torch.float32 for t in tensors.values()) and log[0]["loss"] < 10


def test_the_log_names_terms_by_stage(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 2, "--eval_interval", 1, "--out_dir", tmp_path / "run"]
    assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    first, *_, last = end_state(tmp_path / "run")[1]
    terms = {f"{term}_{stage}" for term in ("m2t", "edit", "clean") for stage in "AB"}
    assert first.keys() - terms == {"step", "loss", "grad_norm", "lr", "tokens"} and first["tokens"] == 16
    assert last.keys() - terms == {"step", "val", "block_A", "block_B", "floor_joint", "floor_factorised"}
    assert last["floor_joint"] < last["floor_factorised"] < min(last["block_A"], last["block_B"])


# ---------------------------------------------------------------------------------------------------------------------
# resuming


def end_state(folder):
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return load_file(folder / "state.safetensors"), [{k: v for k, v in r.items() if k != "ms"} for r in log]


def assert_same_end(a, b):
    (tensors_a, log_a), (tensors_b, log_b) = end_state(a), end_state(b)
    assert log_a == log_b and tensors_a.keys() == tensors_b.keys()
    assert all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)


@pytest.mark.parametrize(
    "extra", [[], ["--context", "clean", "--n_rounds", 2, "--corruption", "draft"]], ids=["paper", "clean"]
)
def test_eight_steps_equal_four_and_resume_and_four(tmp_path, monkeypatch, capsys, extra):
    run = [*TOY, *extra, "--max_iters", 8, "--eval_interval", 3]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    code, out, _ = command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 4)
    assert code == 0 and f"python train.py --init_from resume --out_dir {tmp_path / 'b'}" in out
    code, _, _ = command_line(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", tmp_path / "b")
    assert code == 0
    assert_same_end(tmp_path / "a", tmp_path / "b")
    assert len([r for r in end_state(tmp_path / "a")[1] if "loss" in r]) == 8


def test_an_adapter_run_resumes_bit_for_bit(tmp_path, monkeypatch, capsys):
    assert command_line(train, monkeypatch, capsys, *TOY, "--max_iters", 2, "--out_dir", tmp_path / "base")[0] == 0
    run = [*TOY, "--init_from", tmp_path / "base", "--max_iters", 6, "--learning_rate", 0.01]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 3)[0] == 0
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "b", "--micro_batch", 4, "--checkpointing"]
    assert command_line(train, monkeypatch, capsys, *resume)[0] == 0  # what an out-of-memory error wants changed
    assert_same_end(tmp_path / "a", tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "train.json").read_text())
    assert saved["init_from"] == str(tmp_path / "base") and saved["checkpointing"] and "resume" not in saved


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    run = [sys.executable, "train.py", *map(str, TOY), "--max_iters", "100000", "--out_dir", str(tmp_path / "run")]
    process = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("step 3/") for line in lines)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"python train.py --init_from resume --out_dir {tmp_path / 'run'}" in out and "Traceback" not in out
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_kill_9_leaves_a_run_that_resumes_to_the_same_end(tmp_path, monkeypatch, capsys):
    run = [*map(str, TOY), "--max_iters", "20", "--eval_interval", "1"]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    killed = [sys.executable, "train.py", *run, "--out_dir", str(tmp_path / "b")]
    process = subprocess.Popen(killed, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert any(line.startswith("step 5/") for line in iter(process.stdout.readline, ""))
    time.sleep(0.01)
    process.kill()
    process.wait()
    assert command_line(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", tmp_path / "b")[0] == 0
    assert_same_end(tmp_path / "a", tmp_path / "b")


def test_a_run_killed_before_its_first_save_starts_again(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 3]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 2)[0] == 0
    (tmp_path / "b" / "state.safetensors").unlink()
    (tmp_path / "b" / "log.jsonl").write_bytes(b'{"step": 0}\n[]\n\xff')
    assert command_line(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", tmp_path / "b")[0] == 0
    assert_same_end(tmp_path / "a", tmp_path / "b")


def test_a_non_finite_loss_stops_before_the_weights_are_hurt(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 50, "--learning_rate", 1e30, "--grad_clip", 0, "--eval_interval", 1]
    line = refused(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "run")
    assert "is not finite" in line and str(tmp_path / "run") in line and "--learning_rate" in line
    tensors, _ = end_state(tmp_path / "run")
    assert all(t.isfinite().all() for k, t in tensors.items() if k.startswith("param."))


# ---------------------------------------------------------------------------------------------------------------------
# the paper's setting


def test_a_released_checkpoint_is_adapted_on_records_and_sampled(tmp_path, monkeypatch, capsys):
    """The released layout, its tokenizer, one padded document a row, LoRA in bf16, then decoding with the adapter."""
    golden = Path(__file__).parent / "data" / "golden_a"
    base, ours, records = tmp_path / "base", tmp_path / "ours", tmp_path / "docs.jsonl"
    assert command_line(convert_weights, monkeypatch, capsys, "--src", golden, "--out", base)[0] == 0
    texts = [f"def f{n}(x):\n    return x + {n}\n" * (1 + n % 3) for n in range(60)]
    records.write_text("".join(json.dumps({"text": t, "int_score": 3, "token_count": 300}) + "\n" for t in texts))
    run = ["--init_from", base, "--data", records, "--seq_len", 64, "--max_iters", 2, "--batch_size", 4, "--n_last", 2]
    run += ["--dtype", "bf16", "--eval_rows", 4, "--learning_rate", 0.01, "--device", "cpu", "--out_dir", ours]
    code, out, _ = command_line(train, monkeypatch, capsys, *run)
    assert code == 0 and "blocks of 32" in out
    common = ["--ckpt", base, "--prompt", "def f", "--gen_length", 8, "--json", "--device", "cpu"]
    tokens = []
    for adapter in ([], ["--adapter", ours]):
        code, out, _ = command_line(sample, monkeypatch, capsys, *common, *adapter)
        tokens.append(json.loads(out)["tokens"])
        assert code == 0 and len(tokens[-1]) <= 8
    assert tokens[0] != tokens[1]
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257, n_embd=32, n_last=1), tmp_path / "other")
    line = refused(sample, monkeypatch, capsys, "--ckpt", tmp_path / "other", "--adapter", ours)
    assert "wrong --ckpt" in line


def test_a_run_resumes_by_the_command_that_made_it(tmp_path, monkeypatch, capsys):
    """Chain targets in the paper's scope leave files that train.py could go on with, on another target."""
    from beyond import chain

    base, run = tmp_path / "base", tmp_path / "run"
    assert command_line(train, monkeypatch, capsys, *TOY, "--max_iters", 1, "--out_dir", base)[0] == 0
    given = [*TOY, "--init_from", base, "--lora", "all", "--corruption", "mask", "--max_iters", 2, "--stop_at", 1]
    assert command_line(chain, monkeypatch, capsys, *given, "--out_dir", run)[0] == 0
    line = refused(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", run)
    assert "python -m beyond.chain --init_from resume" in line
    assert command_line(chain, monkeypatch, capsys, "--init_from", "resume", "--out_dir", run)[0] == 0


@pytest.mark.parametrize("extension", ["beyond.nothere", "beyond.chain", 5, None, ["beyond.noise"]])
def test_an_adapter_names_an_extension_that_loads_adapters(extension, tmp_path, monkeypatch, capsys):
    base, ours = tmp_path / "base", tmp_path / "ours"
    assert command_line(train, monkeypatch, capsys, *TOY, "--max_iters", 1, "--out_dir", base)[0] == 0
    adapter = [*TOY, "--init_from", base, "--max_iters", 1, "--out_dir", ours]
    assert command_line(train, monkeypatch, capsys, *adapter)[0] == 0
    settings = json.loads((ours / "adapter.json").read_text())
    (ours / "adapter.json").write_text(json.dumps(settings | {"extension": extension}))
    prompt = ["--ckpt", base, "--adapter", ours, "--prompt_ids", "3", "--device", "cpu"]
    assert "extension" in refused(sample, monkeypatch, capsys, *prompt)
    (ours / "adapter.json").write_text(json.dumps(settings | {"model": settings["model"] | {"n_head": 8}}))
    assert "n_head 8" in refused(sample, monkeypatch, capsys, *prompt)
