"""Joint samples in one pass: the map from u to tuples, and its adapters. `pytest tests/beyond/test_noise.py`"""

import json

import pytest
import torch
from common import MASK, command_line, conditional, random_ids, refused, settings, tiny_model
from grids import CDF_STEPS, grid
from safetensors.torch import load_file

import sample
import train
from beyond import chain, noise
from beyond.chain import CleanCache, bundle_as_decoded, greedy_chain, stage_a_look
from beyond.noise import Noisy, drawn_chain, make_noisy, noise_step, noisy_step, quantile
from cache import Cached
from corrupt import M
from lib.util import generator
from model import sequence_context
from train import Batch, corrupt_batch

TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]


def a_batch(clean):
    everywhere = torch.ones_like(clean, dtype=torch.bool)
    draws = [generator("draw", i) for i in range(len(clean))]
    return Batch(clean, everywhere, everywhere, MASK, draws)


def noisy_model(**overrides):
    model = tiny_model(**overrides)
    make_noisy(model, 4, generator("lora"))
    for name, p in model.named_parameters():
        if "lora_B" in name or name == "markers_noise":
            p.data.normal_(0, 0.1, generator=generator(name))
    return model


@pytest.mark.parametrize("task", CDF_STEPS)
def test_a_grid_of_u_through_the_exact_chain_is_the_joint_distribution(task):
    """Rosenblatt: uniform u give the tuple with its own probability. The conditional CDFs of these tables step at
    multiples of 1/n only (modes: 0.6 for the shared token, then 1/2): a grid of n midpoints an axis counts exactly."""
    t, u, z = grid(task)
    for context in range(t.n_ctx):
        c = torch.full((len(u),), context)

        def exact(z, where, k, c=c):
            log_p = conditional(t, c, z.masked_fill(z == t.mask_id, -1)).log()
            drawn_log_p, token = quantile(log_p.flatten(0, 1), u.flatten())
            sure = log_p.amax(-1).masked_fill(~where, float("-inf"))
            return sure, drawn_log_p.view(*z.shape, 1), token.view(*z.shape, 1)

        drawn, score = greedy_chain(exact, z, torch.ones_like(z, dtype=torch.bool))
        tuples, counts = torch.unique(drawn, dim=0, return_counts=True)
        torch.testing.assert_close(counts / len(u), t.log_prob(c[: len(tuples)], tuples).exp().float())
        torch.testing.assert_close(score.double(), t.log_prob(c, drawn), rtol=0, atol=1e-6)


def test_the_best_token_comes_first_and_the_others_by_id():
    log_p = torch.tensor([[0.2, 0.12, 0.5, 0.1, 0.08]]).log()
    drawn = [quantile(log_p, torch.tensor([u]))[1].item() for u in (0.0, 0.49, 0.51, 0.69, 0.71, 0.83, 0.93)]
    assert drawn == [2, 2, 0, 0, 1, 3, 4]
    torch.testing.assert_close(quantile(log_p, torch.tensor([0.71]))[0].exp(), torch.tensor([[0.12]]))
    near = torch.tensor([[0.30, 0.29, 0.06, 0.31, 0.04]]).log()  # of near-equals the first: token 0
    assert [quantile(near, torch.tensor([u]))[1].item() for u in (0.0, 0.29, 0.31, 0.66, 0.97)] == [0, 0, 1, 3, 4]


def test_u_of_zero_is_the_greedy_chain():
    model, x = tiny_model(), random_ids(3, 16, 7)
    bundle = random_ids(3, 16, 3, 3) > 0
    z = x.masked_fill(bundle, MASK)
    finished = CleanCache(model, a_batch(x))
    greedy, _ = greedy_chain(stage_a_look(finished), z.view(-1, 8), bundle.view(-1, 8))
    assert torch.equal(drawn_chain(finished, z, bundle, torch.zeros(3, 16)), greedy.view(3, 16))
    assert not torch.equal(drawn_chain(finished, z, bundle, torch.full((3, 16), 0.999)), greedy.view(3, 16))


@pytest.mark.parametrize("at_once", [1024, 3])
def test_u_reaches_the_target_at_its_own_position(at_once, monkeypatch):
    """Every position is drawn by its own number, whatever else is in the bundle and in however many parts."""
    monkeypatch.setattr(chain, "AT_ONCE", at_once)
    model, x = tiny_model(), random_ids(2, 16, 7)
    u = torch.rand(2, 16, generator=generator("u"))
    finished = CleanCache(model, a_batch(x))
    bundle = random_ids(2, 16, 5, 2).bool()
    whole = drawn_chain(finished, x.masked_fill(bundle, MASK), bundle, u)
    assert torch.equal(whole[~bundle], x[~bundle])

    # one mask in every block: its token is the quantile of what the model says there
    alone = torch.zeros_like(bundle)
    alone[0, 2] = alone[0, 13] = alone[1, 0] = alone[1, 15] = True
    z = x.masked_fill(alone, MASK)
    drawn = drawn_chain(finished, z, alone, u)
    for row, at in alone.nonzero().tolist():
        before = at // 8 * 8  # finished blocks are read as they are
        ids = torch.cat([x[row, :before], z[row, before : before + 8]])[None]
        ctx = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)
        logits = model(ids, ctx)[0, at]
        logits[MASK] = float("-inf")
        assert drawn[row, at] == quantile(logits.log_softmax(-1)[None], u[row, at][None])[1].item()


def test_marked_positions_carry_their_u_and_nothing_else_does():
    model = noisy_model(n_rounds=1)
    h, bundle = torch.zeros(2, 8, 64), random_ids(2, 8, 3, 2).bool()
    without = model.mark(h, bundle, 0)
    model.u = torch.zeros(2, 8)
    assert torch.equal(model.mark(h, bundle, 0), without)  # no u: zeros
    model.u = torch.rand(2, 8, generator=generator("u"))
    marked = model.mark(h, bundle, 0)
    assert (marked[~bundle] == 0).all() and (marked - without)[bundle].abs().amax(-1).min() > 0.1
    waves = torch.cos(torch.pi * torch.arange(32) * model.u[..., None])
    expected = model.markers[0] + waves @ model.markers_noise
    torch.testing.assert_close(marked[bundle], expected[bundle], rtol=1e-4, atol=1e-4)


def test_training_marks_by_the_u_of_its_targets_and_forgets_it(monkeypatch):
    model, x = noisy_model(), random_ids(2, 16)
    args = settings(chain.build_parser(""), corruption="mask")
    marked, asked = [], []
    mark, losses = model.mark, noise.stage_b_losses

    def kept_mark(h, bundle, i):
        marked.append((model.u, bundle, mark(h, bundle, i) - h))
        return h + marked[-1][2]

    def kept_losses(model, batch, z, kind, bundle, wanted, args):
        asked.append((z, bundle, wanted))
        return losses(model, batch, z, kind, bundle, wanted, args)

    model.mark = kept_mark
    monkeypatch.setattr(noise, "stage_b_losses", kept_losses)
    noise_step(model, a_batch(x), args)

    # the same draws: masks, bundle, then a number for every position
    batch = a_batch(x)
    z, kind = corrupt_batch(model, batch, args)
    finished = CleanCache(model, batch)
    bundle = bundle_as_decoded(finished, z, kind == M, batch, args)
    u = torch.stack([torch.rand(16, generator=g) for g in batch.draws])
    assert bundle.any() and torch.equal(asked[0][0], z) and torch.equal(asked[0][1], bundle)
    assert torch.equal(asked[0][2], torch.where(bundle, drawn_chain(finished, z, bundle, u), x))
    assert len(marked) == 2 and model.u is None
    for seen, marks, added in marked:
        assert torch.equal(seen, u) and torch.equal(marks, bundle)
        assert added.shape[1] == 32 and not added[:, 16:].any()  # the clean copy is never marked
        assert torch.equal(added[:, :16].any(-1), bundle)


@torch.inference_mode()
def test_a_step_of_decoding_marks_by_the_third_draw():
    model = noisy_model(n_rounds=1)
    engine, z = Cached(model, [[1, 2, 3, 4, 5, 6, 7, 8]], 1), torch.full((1, 8), MASK)
    u, prompt = torch.rand(1, 3, 8, generator=generator("u")), torch.zeros(1, 8, dtype=torch.bool)
    d = sample.Decoding(tau_m2t=-1.0, temperature=1.0)
    assert model.step is noisy_step
    by = [model.step(engine, z, prompt, True, u, d)["after"] for u in (u, u, torch.cat([u[:, :2], 1 - u[:, 2:]], 1))]
    assert torch.equal(by[0], by[1]) and not torch.equal(by[0], by[2]) and model.u is None


def test_noise_trains_and_comes_back(tmp_path, monkeypatch, capsys):
    base = [*TOY, "--max_iters", 1, "--stage_a_only", "--out_dir", tmp_path / "base"]
    assert command_line(train, monkeypatch, capsys, *base)[0] == 0
    run = [*TOY, "--init_from", tmp_path / "base", "--max_iters", 4, "--n_rounds", 3, "--learning_rate", 1e-2]
    assert command_line(noise, monkeypatch, capsys, *run, "--out_dir", tmp_path / "run")[0] == 0
    adapter = load_file(tmp_path / "run" / "adapter.safetensors")
    assert (adapter["markers_noise"].abs().sum(-1) > 0).all() and (adapter["markers"].abs().sum(-1) > 0).all()
    assert json.loads((tmp_path / "run" / "adapter.json").read_text())["extension"] == "beyond.noise"
    given = ["--ckpt", tmp_path / "base", "--adapter", tmp_path / "run", "--prompt_ids", "4,4", "--gen_length", 2]
    for temperature in (0, 1):
        assert command_line(sample, monkeypatch, capsys, *given, "--temperature", temperature)[0] == 0
    assert "--temperature 0.5" in refused(sample, monkeypatch, capsys, *given, "--temperature", 0.5)
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "b"]
    code, out, _ = command_line(noise, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 2)
    assert code == 0 and "python -m beyond.noise --init_from resume" in out
    assert command_line(noise, monkeypatch, capsys, *resume)[0] == 0
    again = load_file(tmp_path / "b" / "adapter.safetensors")
    assert all(torch.equal(again[k], adapter[k]) for k in adapter)


@pytest.mark.parametrize("extra", [["--beam", 2], ["--target", "clean"], ["--lora", "all"]], ids=lambda e: e[0])
def test_noise_refuses_what_is_no_draw_of_the_greedy_chain(extra, tmp_path, monkeypatch, capsys):
    base = [*TOY, "--max_iters", 1, "--stage_a_only", "--out_dir", tmp_path / "base"]
    assert command_line(train, monkeypatch, capsys, *base)[0] == 0
    run = [*TOY, "--init_from", tmp_path / "base", "--out_dir", tmp_path / "run", *extra]
    assert extra[0] in refused(noise, monkeypatch, capsys, *run)


def test_noise_refuses_scratch_and_explains_itself(tmp_path, monkeypatch, capsys):
    assert "--init_from DIR" in refused(noise, monkeypatch, capsys, *TOY, "--out_dir", tmp_path)
    code, out, _ = command_line(noise, monkeypatch, capsys, "--help")
    assert code == 0 and noise.__doc__.splitlines()[0] in out


def test_waves_are_not_decayed():
    model = noisy_model()
    assert isinstance(model, Noisy)
    args = settings(chain.build_parser(""), learning_rate=1.0)
    decayed, undecayed = train.make_optimizer(model, args).param_groups
    assert {id(p) for p in undecayed["params"]} == {id(model.markers), id(model.markers_noise)}
    assert len(decayed["params"]) == 8 and undecayed["weight_decay"] == 0
