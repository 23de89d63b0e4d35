"""Training: the split forward, who learns, resuming. `pytest tests/test_train.py`"""

import json
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, ROOT, approx, caller, random_ids, refused, settings, tiny_config, tiny_model
from resuming import assert_same_end, end_state, goes_on_bit_for_bit, stopped
from safetensors.torch import load_file

import checkpoint
import sample
import train
from checkpoint import load_model
from corrupt import G, M, W, draw_bundle
from lib.run import micro_batches, schedule
from lib.settings import build_parser, settle_new
from lib.util import generator
from train import Batch, cocommit_step, corrupt_batch, stage_a_draft, stage_a_step

TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 4, "--device", "cpu"]


def flags(**values):
    return settings(build_parser(train.__doc__), **dict(corruption="random", s_max=4) | values)


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
        ce = F.cross_entropy(model.head(states[:, :24]).mT, batch.clean, reduction="none")
        for name, where, weight in (("m2t", fill, 1.0), ("edit", kind == W, 0.3), ("clean", kind == G, 0.2)):
            assert where.any()
            by_hand = by_hand + weight * ce[where].sum()
            term = torch.stack([ce[where].sum(), where.sum()]).detach()
            torch.testing.assert_close(terms[f"{name}_{stage}"], term, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-4)


def test_stage_a_only_is_stage_a_alone():
    model, args = tiny_model(), flags()
    _, both = cocommit_step(model, a_batch(), args)
    loss, terms = stage_a_step(model, a_batch(), args)
    assert set(terms) == {"m2t_A", "edit_A", "clean_A"}
    for name, term in terms.items():
        torch.testing.assert_close(term, both[name], rtol=1e-5, atol=1e-4)
    loss.backward()
    assert model.markers.grad is None


def test_a_bundle_and_a_target_of_ones_own_are_stage_bs_alone():
    model, args = tiny_model(n_rounds=1), flags()

    def all_masks(model, batch, z, masked, args):
        assert torch.equal(masked, z == MASK)
        return masked

    def next_token(model, batch, z, bundle, args):
        assert (z[bundle] == MASK).all()
        return torch.where(bundle, (batch.clean + 1) % MASK, batch.clean)

    _, clean = cocommit_step(model, a_batch(), args)
    _, whole = cocommit_step(model, a_batch(), args, bundle=all_masks)
    _, other = cocommit_step(model, a_batch(), args, target=next_token)
    assert whole["m2t_B"][1] == clean["m2t_A"][1] > clean["m2t_B"][1]
    assert {name for name in clean if not torch.equal(other[name], clean[name])} == {"m2t_B"}
    assert other["m2t_B"][1] == clean["m2t_B"][1]


def test_a_draft_is_stage_as_choice_and_never_a_mask():
    model, z = tiny_model(), random_ids(2, 16).masked_fill(random_ids(2, 16, 3, 2).bool(), MASK)
    real = torch.arange(16) < torch.tensor([[16], [11]])
    where = (z == MASK) & real
    best = model(z, model.context(real)).argmax(-1)[where].mode().values
    model.lm_head.weight.data[MASK] = 1.1 * model.lm_head.weight.data[best]
    logits = model(z, model.context(real))
    assert (logits.argmax(-1)[where] == MASK).any()
    logits[..., MASK] = float("-inf")
    assert torch.equal(stage_a_draft(model, z, where, real), logits.argmax(-1)[where])
    assert not stage_a_draft(model, z, torch.zeros_like(where), real).numel()


# --- who learns, and how fast


@pytest.mark.parametrize("lora", [False, True])
def test_weight_decay_is_for_matrices(lora):
    """Not for norms, and not for markers, which are added to states."""
    model = tiny_model()
    if lora:
        train.lora_everywhere(model, flags(lora_r=4))
        about = train.about_lora(flags(lora_r=4))
        assert model.layers[0].attn.qkv.lora_scale == about["lora_alpha"] / about["lora_r"] == 2
    groups = train.make_optimizer(model, flags(weight_decay=0.5, learning_rate=1.0)).param_groups
    names = {p: n for n, p in model.named_parameters()}
    decayed, undecayed = ({names[p] for p in g["params"]} for g in groups)
    assert [(g["weight_decay"], g["peak"], g["betas"]) for g in groups] == [(w, 1.0, (0.9, 0.95)) for w in (0.5, 0.0)]
    assert decayed | undecayed == {n for n, p in model.named_parameters() if p.requires_grad}
    assert "markers" in undecayed and all("norm" in n for n in undecayed - {"markers"})
    assert not any("norm" in n for n in decayed) and len(decayed) > 15


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [schedule(step, flags(max_iters=1000)) for step in range(1001)]
    assert rates[:10] == approx([0.1 * k for k in range(1, 11)])  # 1 % of the steps
    assert rates[505] == approx(0.5) and rates[1000] == approx(0.0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))


# --- a run


def test_a_recorded_run_is_repeated(tmp_path, monkeypatch, capsys):
    """The first losses and gradient norms of a run, as they were before the two stages had their names."""
    argv = ["--data", "modes", "--toy", "V=12", "m=4", "n_ctx=8", "--batch_size", 8, "--device", "cpu"]
    argv += ["--n_rounds", 2, "--n_last", 2, "--s_max", 16, "--max_iters", 30, "--out_dir", tmp_path]
    stopped(6, train, monkeypatch, capsys, *argv)
    log = end_state(tmp_path)[1]
    assert [r["loss"] for r in log] == approx([1.80016, 1.735206, 1.716287, 1.534201, 1.390626, 1.968375], rel=1e-4)
    norms = [1.354996, 1.252859, 1.165804, 0.9850049, 1.233773, 1.797619]
    assert [r["grad_norm"] for r in log] == approx(norms, rel=1e-3)
    assert [r["lr"] for r in log] == approx([0.003 * schedule(step, flags(max_iters=30)) for step in range(6)])
    assert [r.get("edit_B") for r in log[:3]] == [None, approx(3.088376, rel=1e-4), approx(2.807017, rel=1e-4)]


def test_micro_batches_change_only_rounding(tmp_path, run):
    assert micro_batches(10, 5, flags(batch_size=8, micro_batch=2)) == [(10, 2), (12, 2), (14, 1)]
    for micro in (0, 1):
        run(*TOY, "--max_iters", 1, "--micro_batch", micro, "--out_dir", tmp_path / str(micro))
    whole, split = (end_state(tmp_path / name)[1] for name in "01")
    assert len(whole) == len(split) == 2  # a step and its validation
    assert all(a == approx(b, rel=1e-4) for a, b in zip(whole, split, strict=True))


def test_bf16_trains_float32_weights_and_the_log_names_terms_by_stage(tmp_path, run):
    run(*TOY, "--max_iters", 2, "--eval_interval", 1, "--dtype", "bf16", "--checkpointing", "--out_dir", tmp_path)
    tensors, (first, *_, last) = end_state(tmp_path)
    assert all(t.dtype == torch.float32 for t in tensors.values())
    terms = {f"{term}_{stage}" for term in ("m2t", "edit", "clean") for stage in "AB"}
    assert first.keys() - terms == {"step", "loss", "grad_norm", "lr", "tokens"} and first["tokens"] == 16
    assert {"m2t_A", "m2t_B"} <= first.keys() & last.keys()
    assert last["val"] and last.keys() - terms == {"step", "val"}


def test_a_non_finite_loss_stops_before_the_weights_are_hurt(tmp_path, run):
    hot = ["--max_iters", 50, "--learning_rate", 1e30, "--grad_clip", 0, "--eval_interval", 1]
    line = run.fails(*TOY, *hot, "--out_dir", tmp_path)
    assert "is not finite" in line and str(tmp_path) in line and "--learning_rate" in line
    assert all(t.isfinite().all() for k, t in end_state(tmp_path)[0].items() if k.startswith("param."))


# --- resuming


CLEAN = ["--context", "clean", "--n_rounds", 2, "--corruption", "draft"]


@pytest.mark.parametrize("extra", [[], CLEAN, ["--stage_a_only"]], ids=["paper", "clean", "stage a"])
def test_four_steps_equal_two_and_resume_and_two(tmp_path, monkeypatch, capsys, extra):
    run = [*TOY, *extra, "--eval_interval", 3]
    goes_on_bit_for_bit(train, run, tmp_path, monkeypatch, capsys)
    assert len(end_state(tmp_path / "whole")[1]) == 6  # four steps, and validations after the third and the last


def test_an_adapter_run_moves_lora_and_markers_alone_and_resumes_on_its_own_base(tmp_path, run, monkeypatch, capsys):
    base, a, b = tmp_path / "base", tmp_path / "a", tmp_path / "b"
    run(*TOY, "--max_iters", 2, "--out_dir", base)
    weights = (base / "model.safetensors").read_bytes()
    six = [*TOY, "--init_from", base, "--max_iters", 6, "--learning_rate", 0.1]
    assert f"python evaluate.py --ckpt {a}" in run(*six, "--out_dir", a)
    assert (base / "model.safetensors").read_bytes() == weights and not (a / "model.safetensors").exists()
    adapter = load_file(a / "adapter.safetensors")
    assert len(adapter) == 4 * 4 + 1 and all("lora_" in k or k == "markers" for k in adapter)
    assert all(t.abs().sum() > 0 for t in adapter.values())
    geometry = dict(n_last=3, n_rounds=1)
    about = dict(base="../base", base_fingerprint=checkpoint.fingerprint(base), model=geometry)
    assert json.loads((a / "adapter.json").read_text()) == about | dict(lora_r=16, lora_alpha=32)

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


def test_kill_9_leaves_a_run_that_resumes_to_the_same_end(tmp_path, run):
    a, b = tmp_path / "a", tmp_path / "b"
    ten = [*map(str, TOY), "--max_iters", "10", "--eval_interval", "2"]
    run(*ten, "--out_dir", a)
    killed = [sys.executable, "train.py", *ten, "--out_dir", str(b)]
    process = subprocess.Popen(killed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = b / "log.jsonl"
    began = time.monotonic()
    while not log.exists() or log.read_bytes().count(b"loss") < 3:
        assert time.monotonic() < began + 60, "no third step within a minute"
        time.sleep(0.01)
    process.kill()
    process.wait()
    run("--init_from", "resume", "--out_dir", b)
    assert_same_end(a, b)

    # one that was killed before its first save starts again
    (b / "state.safetensors").unlink()
    log.write_bytes(b'{"step": 0}\n[]\n\xff')
    run("--init_from", "resume", "--out_dir", b)
    assert_same_end(a, b)


# --- a way of training of one's own


def zeros(model, batch, z, bundle, args):
    return torch.where(bundle, 0, batch.clean)


def script_of(recipe: train.Recipe):
    return SimpleNamespace(__name__="mine", main=lambda: train.main(choose=lambda args: recipe))


def test_a_recipe_of_ones_own_is_resumed_by_it_alone(tmp_path, run, monkeypatch, capsys):
    """With another step, or by train.py, not at all, and nothing is lost."""
    out, mine = tmp_path / "out", script_of(train.Recipe(step=partial(cocommit_step, target=zeros)))
    stopped(2, mine, monkeypatch, capsys, *TOY, "--max_iters", 4, "--out_dir", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    resume = ["--init_from", "resume", "--out_dir", out]
    for other in (train, script_of(train.Recipe(step=stage_a_step))):
        line = refused(other, monkeypatch, capsys, *resume)
        assert "is trained by train.py:cocommit_step(target=test_train.py:zeros)" in line
        assert "go on with python mine.py --init_from resume" in line
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    caller(mine, monkeypatch, capsys)(*resume)


# --- the paper's setting, and what is not given


def test_a_released_checkpoint_is_adapted_on_records_and_sampled(golden, tmp_path, run, monkeypatch, capsys):
    """The released layout, its tokenizer, one padded document a row, LoRA in bf16, then decoding with the adapter."""
    ours, records = tmp_path / "ours", tmp_path / "docs.jsonl"
    texts = [f"def f{n}(x):\n    return x + {n}\n" * (1 + n % 3) for n in range(60)]
    records.write_text("".join(json.dumps({"text": t, "int_score": 3, "token_count": 300}) + "\n" for t in texts))
    argv = ["--init_from", golden, "--data", records, "--seq_len", 64, "--max_iters", 2, "--batch_size", 4]
    argv += ["--n_last", 2, "--dtype", "bf16", "--learning_rate", 0.01, "--device", "cpu", "--out_dir", ours]
    assert "blocks of 32" in run(*argv)
    decode, tokens = caller(sample, monkeypatch, capsys), []
    for ckpt in (golden, ours):
        out = decode("--ckpt", ckpt, "--prompt", "def f", "--gen_length", 8, "--json", "--device", "cpu")
        tokens.append(json.loads(out)["tokens"])
    assert tokens[0] != tokens[1] and len(tokens[1]) <= 8


# preset, seq_len, block_length, batch_size, learning_rate, corruption, max_iters, n_last, s_max, out_dir
DEFAULTS = {
    "names scratch": ("names", 16, 8, 64, 4e-3, "mask", 1800, None, 4, "out/names"),
    "names checkpoint": (None, 32, None, 64, 1e-3, "draft", 300, 3, 16, "out/names"),
    "bytes scratch": ("text", 256, 8, 8, 3e-3, "random", 1300, None, 4, "out/text"),
    "toy checkpoint": (None, None, None, 128, 1e-5, "draft", 1000, 3, 2, "out/toy"),
    "bpe checkpoint": (None, 2048, None, 8, 1e-5, "draft", 12500, 3, 16, "out/cocommit"),
}
READS = {"names": [], "bytes": ["--data", "a.txt"], "bpe": ["--data", "a.txt"], "toy": [*TOY[:5]]}


def test_what_a_run_defaults_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for case, expected in DEFAULTS.items():
        reads, start = case.split()
        cfg = tiny_config(block_length=32, tokenizer={"names": "bpe"}.get(reads, reads))
        argv = [*READS[reads], "--init_from", start]
        args = settle_new(build_parser("").parse_args(argv), lambda folder, cfg=cfg: cfg)
        names = ("preset", "seq_len", "block_length", "batch_size", "learning_rate", "corruption", "max_iters")
        assert tuple(getattr(args, name) for name in (*names, "n_last", "s_max", "out_dir")) == expected
        assert (args.s_min, args.eval_rows, args.log_interval, args.n_rounds, args.lora_r) == (1, 64, 50, 1, 16)

    # names start from the shipped base, unless they cannot
    for more, start in (([], "assets/names"), (["--stage_a_only"], "scratch")):
        args = settle_new(build_parser("").parse_args(more), lambda folder: tiny_config(tokenizer="bpe"))
        assert args.init_from == start
