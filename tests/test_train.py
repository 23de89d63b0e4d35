"""Training: the doubled batch, who learns, resuming. `pytest tests/test_train.py`"""

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import approx, command_line, random_ids, refused, tiny_model
from safetensors.torch import load_file

import convert_weights
import corrupt
import sample
import toy
import train
from checkpoint import save_model
from corrupt import M, chain_decode, choose, three_term_loss
from data import generator
from model import sequence_context
from sample import Decoding, generate
from train import Marked, Objective, split_forward

TOY = ["--data", "pairs", "--V", 3, "--m", 2, "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]


def a_batch(R=3, T=24):
    x, z = random_ids(R, T, 1), random_ids(R, T, 2)
    kind = random_ids(R, T, 3, 4).to(torch.uint8)
    z = torch.where(kind == M, 38, z)
    real = torch.arange(T) < torch.tensor([T, T - 5, T - 11])[:, None]
    kind = kind * real
    bundle = (kind == M) & random_ids(R, T, 4, 2).bool()
    return x, z, kind, bundle, real


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("clean_copy", [False, True])
@pytest.mark.parametrize("n_rounds", [1, 2])
def test_doubled_batch_equals_two_separate_passes(n_rounds, clean_copy):
    model = tiny_model(n_rounds=n_rounds, noise=n_rounds == 2)
    x, z, kind, bundle, real = a_batch()
    T, u = x.shape[1], torch.rand(x.shape, generator=generator("u"))
    ctx = sequence_context(model.cfg, real, torch.float32, clean_copy)
    together, terms = split_forward(model, x, z, kind, Marked(bundle, x, kind, n_rounds, u), ctx)
    together.backward()
    doubled = gradients(model)

    model.zero_grad()
    ids = torch.cat([z, x], 1) if clean_copy else z
    marks = torch.cat([bundle, torch.zeros_like(bundle)], 1) if clean_copy else bundle
    u = torch.cat([u, torch.zeros_like(u)], 1) if clean_copy else u
    one, terms_1 = three_term_loss(model, model.last_n(model.prefix(ids, ctx), ctx)[:, :T], x, kind, kind == M)
    h = model.coordinate(model.prefix(ids, ctx), marks, ctx, n_rounds, u)
    two, terms_2 = three_term_loss(model, h[:, :T], x, kind, bundle)
    (one + two).backward()
    torch.testing.assert_close(together, one + two, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(terms, torch.stack([terms_1, terms_2]), rtol=1e-5, atol=1e-4)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(doubled[name], grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max()), msg=name)


def test_marks_reach_the_loss_of_branch_2_only():
    model = tiny_model(n_rounds=1)
    x, z, kind, bundle, real = a_batch()
    ctx = sequence_context(model.cfg, real, torch.float32)
    _, before = split_forward(model, x, z, kind, Marked(bundle, x, kind, 1), ctx)
    model.markers.data += 1.0
    _, after = split_forward(model, x, z, kind, Marked(bundle, x, kind, 1), ctx)
    torch.testing.assert_close(after[0], before[0])
    assert (after[1] - before[1]).abs()[:, 0].max() > 0.1
    _, unmarked = split_forward(model, x, z, kind, Marked(torch.zeros_like(bundle), x, kind, 1), ctx)
    torch.testing.assert_close(unmarked[1, 1:], before[0, 1:])  # nothing marked: branch 2 reads as branch 1 does
    assert unmarked[1, 0].tolist() == [0.0, 0.0]  # and fills nothing


def test_only_lora_and_markers_move_from_a_checkpoint(tmp_path, monkeypatch, capsys):
    base, ours = tmp_path / "base", tmp_path / "ours"
    assert command_line(train, monkeypatch, capsys, *TOY, "--max_iters", 3, "--out_dir", base)[0] == 0
    before = load_file(base / "model.safetensors")
    args = [*TOY, "--init_from", base, "--max_iters", 3, "--learning_rate", 0.1, "--out_dir", ours]
    code, out, _ = command_line(train, monkeypatch, capsys, *args)
    assert code == 0 and f"python evaluate.py --data pairs --ckpt {base} --adapter" in out
    assert load_file(base / "model.safetensors").keys() == before.keys()
    adapter = load_file(ours / "adapter.safetensors")
    assert not (ours / "model.safetensors").exists()
    assert len(adapter) == 4 * 4 + 1 and all("lora_" in k or k == "markers" for k in adapter)
    assert all(t.abs().sum() > 0 for t in adapter.values())


def end_state(folder):
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return load_file(folder / "state.safetensors"), [{k: v for k, v in r.items() if k != "ms"} for r in log]


@pytest.mark.parametrize(
    "extra", [[], ["--context", "clean", "--n_rounds", 2, "--corruption", "random"]], ids=["paper", "clean"]
)
def test_twenty_steps_equal_ten_and_resume_and_ten(tmp_path, monkeypatch, capsys, extra):
    run = [*TOY, *extra, "--max_iters", 20, "--eval_interval", 7, "--save_interval", 4]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    code, out, _ = command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 10)
    assert code == 0 and "--init_from resume" in out
    code, _, _ = command_line(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", tmp_path / "b")
    assert code == 0
    (tensors_a, log_a), (tensors_b, log_b) = end_state(tmp_path / "a"), end_state(tmp_path / "b")
    assert log_a == log_b and len([r for r in log_a if "loss" in r]) == 20
    assert tensors_a.keys() == tensors_b.keys()
    assert all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)


def test_an_adapter_run_resumes_bit_for_bit(tmp_path, monkeypatch, capsys):
    assert command_line(train, monkeypatch, capsys, *TOY, "--max_iters", 2, "--out_dir", tmp_path / "base")[0] == 0
    run = [*TOY, "--init_from", tmp_path / "base", "--max_iters", 6, "--learning_rate", 0.01]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 3)[0] == 0
    command_line(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", tmp_path / "b")
    (tensors_a, log_a), (tensors_b, log_b) = end_state(tmp_path / "a"), end_state(tmp_path / "b")
    assert log_a == log_b and all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    run = [sys.executable, "train.py", *map(str, TOY), "--max_iters", "100000", "--out_dir", str(tmp_path / "run")]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("step 3/") for line in lines)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"python train.py --init_from resume --out_dir {tmp_path / 'run'}" in out and "Traceback" not in out
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_kill_9_leaves_a_run_that_resumes_to_the_same_end(tmp_path, monkeypatch, capsys):
    run = [*map(str, TOY), "--max_iters", "40", "--save_interval", "1"]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    killed = [sys.executable, "train.py", *run, "--out_dir", str(tmp_path / "b")]
    process = subprocess.Popen(killed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert any(line.startswith("step 9/") for line in iter(process.stdout.readline, ""))
    time.sleep(0.01)
    process.kill()
    process.wait()
    assert command_line(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", tmp_path / "b")[0] == 0
    (tensors_a, log_a), (tensors_b, log_b) = end_state(tmp_path / "a"), end_state(tmp_path / "b")
    assert log_a == log_b and all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)


def test_a_run_killed_before_its_first_save_starts_again(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 3]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 2)[0] == 0
    (tmp_path / "b" / "state.safetensors").unlink()
    (tmp_path / "b" / "log.jsonl").write_bytes(b'{"step": 0}\n[]\n\xff')
    assert command_line(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", tmp_path / "b")[0] == 0
    (tensors_a, log_a), (tensors_b, log_b) = end_state(tmp_path / "a"), end_state(tmp_path / "b")
    assert log_a == log_b and all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)


def test_a_non_finite_loss_stops_before_the_weights_are_hurt(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 50, "--learning_rate", 1e30, "--grad_clip", 0, "--save_interval", 1, "--warmup", 0]
    line = refused(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "run")
    assert "at step" in line and str(tmp_path / "run") in line and "--learning_rate" in line


def test_micro_batches_change_only_rounding(tmp_path, monkeypatch, capsys):
    for name, micro in (("whole", 0), ("split", 1)):
        run = [*TOY, "--max_iters", 1, "--micro_batch", micro, "--out_dir", tmp_path / name]
        assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    whole, split = (end_state(tmp_path / n)[1][0] for n in ("whole", "split"))
    assert whole == pytest.approx(split, rel=1e-4)


def test_bf16_trains_float32_weights(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 3, "--dtype", "bf16", "--checkpointing", "--out_dir", tmp_path / "run"]
    assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    tensors, log = end_state(tmp_path / "run")
    assert all(t.dtype == torch.float32 for t in tensors.values()) and log[0]["loss"] < 10


def test_learning_rate_warms_up_and_ends_at_zero():
    args = replace_namespace(learning_rate=1.0, warmup=0.1, max_iters=100)
    rates = [train.learning_rate(s, args) for s in range(101)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[55] == pytest.approx(0.5) and rates[100] == pytest.approx(0.0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))


def replace_namespace(**values):
    args = train.build_parser(train.__doc__).parse_args([])
    for k, v in values.items():
        setattr(args, k, v)
    return args


def test_toy_rows_are_a_prompt_block_and_an_answer_block():
    args = replace_namespace(data=["pairs"], V=5, m=2)
    data, task = train.load_data(args, None)
    x, real, prompt = data["train"].batch(0, 50)
    assert real.all() and prompt.sum() == 100 and torch.equal(x[:, 0], x[:, 1])
    assert torch.equal((x[:, 2] + x[:, 0] - task.V) % 5, x[:, 3])  # the partner is shifted by the key
    assert torch.equal(data["train"].batch(20, 5)[0], x[20:25])
    assert not torch.equal(data["val"].batch(0, 50)[0], x)


def test_generator_is_a_function_of_its_key():
    assert torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "a")))
    assert not torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "b")))


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
    assert "wrong --ckpt" in refused(sample, monkeypatch, capsys, "--ckpt", other_base(tmp_path), "--adapter", ours)


def other_base(tmp_path):
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257, n_embd=32, n_last=1), tmp_path / "other")
    return tmp_path / "other"


def test_the_greedy_chain_is_the_one_at_a_time_decode(monkeypatch):
    """What the released loop writes when it may fill one token a step, but for near-equals."""
    monkeypatch.setattr(corrupt, "TIE", 0.0)
    model = tiny_model(n_rounds=1, eos_id=-1)
    prompt = random_ids(3, 8, 7)
    z = torch.cat([prompt, torch.full((3, 8), 38)], dim=1)
    bundle = z == 38
    ctx = sequence_context(model.cfg, torch.ones_like(bundle), torch.float32)
    chain, score = chain_decode(z, bundle, 8, 1, Objective.predict(SimpleNamespace(model=model), z, ctx, None))
    d = Decoding(gen_length=8, tau_m2t=1.0, tau_t2t=None, n_rounds=0, max_post_steps=0)
    greedy = torch.tensor([o.tokens for o in generate(model, prompt.tolist(), d)])
    assert torch.equal(chain, torch.cat([prompt, greedy], dim=1))
    zeros = Objective.predict(SimpleNamespace(model=model), z, ctx, torch.zeros(3, 16))
    drawn, drawn_score = chain_decode(z, bundle, 8, 1, zeros)  # u = 0 is the greedy chain
    assert torch.equal(drawn, chain) and torch.equal(drawn_score, score)


@pytest.mark.parametrize("task", ["modes", "pairs", "permutation", "sum"])
def test_with_exact_conditionals_a_chain_is_coherent_and_a_beam_finds_the_joint_mode(task):
    t = toy.make(task)
    c, z = torch.arange(t.n_ctx), torch.full((t.n_ctx, t.m), t.mask_id)

    def exact(z, where, k):
        log_p = t.conditional(c.repeat(len(z) // len(c)), z.masked_fill(z == t.mask_id, -1)).log()
        return choose(log_p[where], k)

    everything = torch.ones_like(z, dtype=torch.bool)
    greedy, beam = (chain_decode(z, everything, t.m, w, exact)[0] for w in (1, 5))
    assert t.coherent(c, greedy).all() and t.coherent(c, beam).all()
    best = t.log_prob(c, t.mode())
    torch.testing.assert_close(t.log_prob(c, beam), best)
    score = chain_decode(z, everything, t.m, 5, exact)[1][:, 0]
    torch.testing.assert_close(score.double(), best, rtol=0, atol=1e-6)
    if task == "modes":  # the shared token is the most probable one, and belongs to the lesser phrases
        assert (t.log_prob(c, greedy) < best - 0.1).all()


CDF_STEPS = {"modes": (dict(V=6, n_ctx=2), 10), "pairs": (dict(V=4, m=2), 4), "sum": (dict(V=3, m=2), 3)}


def grid(task: str) -> tuple[toy.Toy, torch.Tensor, torch.Tensor]:
    """A small toy, the midpoints u (n**m, m) that none of its conditional CDFs cuts, and as many masked answers z."""
    size, n = CDF_STEPS[task]
    t = toy.make(task, **size)
    u = torch.cartesian_prod(*[(torch.arange(n, dtype=torch.float64) + 0.5) / n] * t.m)
    return t, u, torch.full((len(u), t.m), t.mask_id)


@pytest.mark.parametrize("task", CDF_STEPS)
def test_a_grid_of_u_through_the_exact_chain_is_the_joint_distribution(task):
    """Rosenblatt: uniform u give the tuple with its own probability. The conditional CDFs of these tables step at
    multiples of 1/n only (modes: 0.6 for the shared token, then 1/2): a grid of n midpoints an axis counts exactly."""
    t, u, z = grid(task)
    for context in range(t.n_ctx):
        c = torch.full((len(u),), context)

        def exact(z, where, k, c=c):
            return choose(t.conditional(c, z.masked_fill(z == t.mask_id, -1)).log()[where], k, u[where])

        drawn, score = chain_decode(z, torch.ones_like(z, dtype=torch.bool), t.m, 1, exact)
        tuples, counts = torch.unique(drawn, dim=0, return_counts=True)
        torch.testing.assert_close(counts / len(u), t.log_prob(c[: len(tuples)], tuples).exp().float())
        torch.testing.assert_close(score[:, 0].double(), t.log_prob(c, drawn), rtol=0, atol=1e-6)


def test_near_equals_come_by_index():
    score = torch.tensor([[0.30, 0.29, 0.06, 0.31, 0.04], [0.2, 0.12, 0.5, 0.1, 0.08]]).log()
    assert corrupt.leaders(score, 4).tolist() == [[0, 1, 3, 2], [2, 0, 1, 3]]
    log_p, token, sure = choose(score, 2)
    torch.testing.assert_close(log_p.exp(), torch.tensor([[0.30, 0.29], [0.5, 0.2]]))
    assert token.tolist() == [[0, 1], [2, 0]] and sure.exp().tolist() == approx([0.31, 0.5])
    drawn = [choose(score[1:], 1, torch.tensor([u]))[1].item() for u in (0.0, 0.49, 0.51, 0.69, 0.71, 0.83, 0.93)]
    assert drawn == [2, 2, 0, 0, 1, 3, 4]  # the best first, then by id


def test_a_chain_leaves_the_rest_and_writes_each_block():
    z = torch.full((2, 12), 9)
    bundle = torch.tensor([[1, 0, 0, 1] * 3, [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1]]).bool()
    steps = []

    def predict(z, where, k):
        steps.append(int(where.sum()))
        return torch.zeros(steps[-1], k), torch.full((steps[-1], k), 3), torch.zeros(steps[-1])

    assert torch.equal(chain_decode(z, bundle, 4, 1, predict)[0], torch.where(bundle, 3, 9))
    assert steps == [
        11,
        6,
        2,
        1,
    ]  # one position a block and step: the largest bundle, four, sets the number of forwards


def test_adapters_of_the_marked_pass_leave_stage_a_bit_for_bit():
    model, ids = tiny_model(), random_ids(2, 24)
    ctx = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)
    before = model(ids, ctx)
    h = model.prefix(ids, ctx)
    unadapted = model.coordinate(h, ids < 20, ctx, 2)
    with_marked_lora(model)
    assert torch.equal(model(ids, ctx), before)
    assert (model.coordinate(h, ids < 20, ctx, 2) - unadapted).abs().max() > 0.1


def with_marked_lora(model):
    model.add_lora(4, 8.0, generator("lora"), "marked")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1, generator=generator(name))
    return model


@pytest.mark.parametrize("n_rounds", [1, 2])
def test_cached_equals_naive_with_adapters_of_the_marked_pass(n_rounds):
    model = with_marked_lora(tiny_model())
    d = Decoding(gen_length=29, tau_m2t=0.4, tau_t2t=0.5, max_post_steps=3, n_rounds=n_rounds)
    for n in (3, 8, 13):
        prompt = random_ids(1, n, 100)[0].tolist()
        cached, naive = (generate(model, [prompt], d, use_cache=c)[0] for c in (True, False))
        assert (cached.tokens, cached.nfe) == (naive.tokens, naive.nfe)
    factorised = generate(model, [prompt], replace(d, n_rounds=0))[0]
    assert factorised.tokens == generate(tiny_model(), [prompt], replace(d, n_rounds=0))[0].tokens
    assert cached.tokens != factorised.tokens


def test_noise_rounds_and_marks_on_visible_positions_train_and_come_back(tmp_path, monkeypatch, capsys):
    base = [*TOY, "--max_iters", 1, "--factorised", "--out_dir", tmp_path / "base"]
    assert command_line(train, monkeypatch, capsys, *base)[0] == 0
    run = [*TOY, "--init_from", tmp_path / "base", "--max_iters", 4, "--n_rounds", 3, "--sample_rounds"]
    run += ["--target", "chain", "--chain_noise", "--mark_visible", "--learning_rate", 1e-2]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "run")[0] == 0
    adapter = load_file(tmp_path / "run" / "adapter.safetensors")
    assert (adapter["noise"].abs().sum(-1) > 0).all() and (adapter["markers"].abs().sum(-1) > 0).all()
    given = ["--ckpt", tmp_path / "base", "--adapter", tmp_path / "run", "--prompt_ids", "4,4", "--gen_length", 2]
    assert command_line(sample, monkeypatch, capsys, *given, "--temperature", 1, "--mark_visible")[0] == 0
    assert "--temperature 0.5" in refused(sample, monkeypatch, capsys, *given, "--temperature", 0.5)


def test_what_a_marked_visible_position_is_asked_for():
    """The chain target of a marked position does not depend on what stands there, and its loss is that of a mask."""
    args = Namespace(seed=0, bundle_scope="block", s_min=8, s_max=8, mark_visible=True, sample_rounds=False,
                     target="chain", chain_beam=1, confident_share=0.0)  # fmt: skip
    model, x, asked = tiny_model(), random_ids(1, 16), []
    ctx = sequence_context(model.cfg, torch.ones_like(x, dtype=torch.bool), torch.float32)
    objective = SimpleNamespace(model=model, args=args, target_seconds=0.0)
    objective.predict = partial(Objective.predict, objective)
    for z in (x, random_ids(1, 16, seed=5)):  # all visible; all marked, since D takes 8 of each block of 8
        kind = torch.where(z == x, 3, 2).to(torch.uint8)
        two = Objective.marked(objective, x, z, kind, ctx, [generator("draw")], 0, False)
        assert two.bundle.all() and (two.kind == M).all()
        asked.append(two.target)
    assert torch.equal(*asked) and not torch.equal(asked[0], x)


@pytest.mark.parametrize("context", ["corrupted", "clean"])
def test_marked_scope_and_chain_target_train_from_the_command_line(context, tmp_path, monkeypatch, capsys):
    base = [*TOY, "--max_iters", 2, "--factorised", "--out_dir", tmp_path / "base"]
    assert command_line(train, monkeypatch, capsys, *base)[0] == 0
    run = [*TOY, "--init_from", tmp_path / "base", "--max_iters", 2, "--lora_scope", "marked", "--context", context]
    run += ["--target", "chain", "--chain_beam", 3, "--n_last", 2]
    code, out, _ = command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "run")
    assert code == 0 and "x a step without chain targets" in out
    adapter = load_file(tmp_path / "run" / "adapter.safetensors")
    assert {int(k.split(".")[1]) for k in adapter if "lora" in k} == {2, 3} and adapter["markers"].abs().sum() > 0
    scratch = [*TOY, "--lora_scope", "marked", "--out_dir", tmp_path]
    assert "--init_from DIR" in refused(train, monkeypatch, capsys, *scratch)
