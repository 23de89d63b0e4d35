"""What decoders do to a known joint distribution. `pytest tests/test_evaluate.py`

The small models are trained here, three seeds each; the statements are theorems plus "the marginals were learned".
"""

import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import approx, command_line, conditional, refused, tiny_model

import checkpoint
import evaluate
import toy
import train
from checkpoint import load_model, save_model
from evaluate import ONE_STEP, distances, one_step_table, quality
from tools.plots import chain_table
from toy import answer_log_probs

SIZES = {  # and more flags
    "modes": ["V=6", "n_ctx=2", "--max_iters", 600],
    "pairs": ["V=4", "m=2"],
    "mixed": ["V=4"],
    "copy": ["V=4", "m=3", "n_ctx=4"],
    "gaussian": ["levels=4", "m=3", "n_ctx=4", "--max_iters", 500],
    "permutation": ["V=4", "m=3", "n_ctx=3"],
    "sum": ["V=3", "--max_iters", 600],  # parity-like: learned late
}
SMALL = ["--n_last", 1, "--batch_size", 64, "--max_iters", 250, "--eval_interval", 10_000, "--device", "cpu",
         "--corruption", "mask", "--learning_rate", 5e-3, "--log_interval", 10_000, "--eval_rows", 1]  # fmt: skip
ORDER = [(t, s) for t in SIZES for s in range(3)]


def train_one(task: str, seed: int, run: str) -> None:
    torch.set_num_threads(1)
    checkpoint.PRESETS["tiny"] = replace(checkpoint.PRESETS["tiny"], n_layer=2, n_embd=32, d_dense=64, n_last=1)
    flags = [*SMALL, "--toy", *SIZES[task], "--seed", seed, "--out_dir", run]
    sys.argv = ["train.py", "--data", task, *map(str, flags)]
    train.main()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(task, seed) -> (model, toy, folder), trained once for all tests, the next in the order meanwhile."""
    folder, jobs, done = tmp_path_factory.mktemp("toys"), {}, {}
    # its own processes: one core each, and the preset is theirs alone
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:

        def get(task: str, seed: int):
            i = ORDER.index((task, seed))
            for key in ORDER[i : i + 2]:
                if key not in jobs:
                    jobs[key] = pool.submit(train_one, *key, str(folder / "-".join(map(str, key))))
            if (task, seed) not in done:
                jobs[task, seed].result()
                run = str(folder / f"{task}-{seed}")
                done[task, seed] = load_model(run, "cpu", torch.float32), evaluate.load_task(task, run), run
            return done[task, seed]

        yield get


each_task_and_seed = pytest.mark.parametrize("task, seed", ORDER)


@each_task_and_seed
def test_one_step_error_is_tc_plus_the_marginals_own(task, seed, trained):
    """KL(p || prod q_i) = TC + sum_i KL(p_i || q_i), and what a trained model adds to TC is under 2 % of it."""
    net, t, _ = trained(task, seed)
    c = torch.arange(t.n_ctx)
    q = answer_log_probs(net, t, c, torch.full((t.n_ctx, t.m), -1), 0)
    p = t.marginals()
    own = (torch.xlogy(p, p) - p * q).sum((1, 2))
    forward = toy.kl(t.prob, one_step_table(net, t, 0))
    torch.testing.assert_close(forward, t.tc() + own, rtol=0, atol=1e-6)
    assert float(own.mean()) < 0.02 * float(t.tc().mean())


@each_task_and_seed
def test_one_at_a_time_is_coherent(task, seed, trained):
    net, t, _ = trained(task, seed)
    assert quality(net, t, evaluate.DECODERS["one at a time"])["coherent"] >= 0.99
    assert distances(t, chain_table(net, t))["forward_kl"] < float(t.tc().mean())  # what no product can reach


@each_task_and_seed
def test_clean_targets_cannot_take_stage_b_below_tc(task, seed, trained):
    """The theorem: Stage B's bundle is drawn independently of the clean tokens, so its minimiser is the marginals."""
    net, t, _ = trained(task, seed)
    c, z = torch.arange(t.n_ctx), torch.full((t.n_ctx, t.m), -1)
    a, b = (answer_log_probs(net, t, c, z, k) for k in (0, 1))
    assert float((a.exp() * (a - b)).sum(-1).max()) < 0.01
    assert (toy.kl(t.prob, one_step_table(net, t, 1)) >= t.tc() - 1e-9).all()


def oracle(t, monkeypatch):
    """The ideal factorised decoder in the model's place."""

    def log_probs(_, task, c, z, n_rounds):
        return conditional(task, c, z).log()

    monkeypatch.setattr(toy, "answer_log_probs", log_probs)
    return SimpleNamespace()


@pytest.mark.parametrize("task", SIZES)
def test_with_exact_conditionals_the_chain_is_exact_and_the_product_pays_tc(task, monkeypatch):
    t = toy.make(task)
    t = t if t.support.shape[1] <= 512 else toy.make(task, V=4, m=3)
    net = oracle(t, monkeypatch)
    chain = distances(t, chain_table(net, t))
    assert chain["forward_kl"] == approx(0.0, abs=1e-9) and chain["tv"] == approx(0.0, abs=1e-9)
    assert distances(t, one_step_table(net, t, 0))["forward_kl"] == approx(float(t.tc().mean()), abs=1e-9)


def test_keyed_pairs_in_one_step_by_hand(monkeypatch):
    """V = 8, two pairs: valid with probability 8**-2, so TV = 1 - 1/64 and KL = 2 ln 8."""
    t = toy.make("pairs")
    d = distances(t, one_step_table(oracle(t, monkeypatch), t, 0))
    assert d["tv"] == approx(1 - 1 / 64) and d["outside"] == approx(1 - 1 / 64)
    assert d["forward_kl"] == approx(2 * math.log(8)) and d["reverse_kl"] == math.inf


def test_block_loss_is_the_entropy_of_the_marginals_at_the_least(trained):
    net, t, _ = trained("modes", 0)
    floor = float(torch.special.entr(t.marginals()).sum((1, 2)).mean())
    floors = toy.floors(net, t)
    for k, stage in enumerate("AB"):
        assert floor <= floors[f"block_{stage}"] < floor * 1.02
        forward = distances(t, one_step_table(net, t, k))["forward_kl"]
        assert floors[f"block_{stage}"] == approx(floor - float(t.tc().mean()) + forward)
    assert floors["floor_factorised"] == approx(floor) and floors["floor_joint"] == approx(float(t.h_joint().mean()))


def test_forwards_of_each_decoder(trained):
    net, t, _ = trained("modes", 0)
    one = quality(net, t, ONE_STEP)
    assert one["nfe_full"] == one["nfe_partial"] == approx(1 / t.m)
    single = quality(net, t, evaluate.DECODERS["one at a time"])
    assert (single["nfe_full"], single["nfe_partial"]) == (approx(1.0), 0.0)


def test_report_and_json_from_the_command_line(trained, monkeypatch, capsys):
    _, t, run = trained("modes", 0)
    code, out, _ = command_line(evaluate, monkeypatch, capsys, "--data", "modes", "--ckpt", run)
    assert code == 0 and all(name in out for name in evaluate.DECODERS)
    _, out, _ = command_line(evaluate, monkeypatch, capsys, "--data", "modes", "--ckpt", run, "--json")
    report = json.loads(out)
    assert report["tc"] == approx(float(t.tc().mean())) and report["h_joint"] == approx(float(t.h_joint().mean()))
    assert set(report["decoders"]) == set(evaluate.DECODERS)
    assert report["decoders"]["Stage A, one step"]["reverse_kl"] is None and "Infinity" not in out  # JSON has no inf
    assert len(out.splitlines()) == 1


def test_an_adapter_is_evaluated_with_its_own_rounds(trained, tmp_path, monkeypatch, capsys):
    _, _, run = trained("modes", 0)
    train_adapter = ["--data", "modes", *SMALL, "--init_from", run, "--max_iters", 2, "--n_rounds", 2]
    assert command_line(train, monkeypatch, capsys, *train_adapter, "--out_dir", tmp_path / "n1")[0] == 0
    both = ["--data", "modes", "--ckpt", run, "--adapter", tmp_path / "n1", "--json"]
    code, out, err = command_line(evaluate, monkeypatch, capsys, *both)
    assert code == 0, err
    decoders = json.loads(out)["decoders"]
    assert decoders["Stage B, one step"]["nfe_partial"] == approx(2 * decoders["Stage B, one step"]["nfe_full"])
    assert all(d["nfe_partial"] == 0 for name, d in decoders.items() if "released" in name)


def test_mistakes(trained, tmp_path, monkeypatch, capsys):
    _, t, run = trained("modes", 0)
    assert "another toy" in refused(evaluate, monkeypatch, capsys, "--data", "pairs", "--ckpt", run)
    assert "'poems'" in refused(evaluate, monkeypatch, capsys, "--data", "poems", "--ckpt", run)
    assert "--ckpt" in refused(evaluate, monkeypatch, capsys, "--data", "modes")
    save_model(tiny_model(), tmp_path)  # of text
    assert "no toy settings" in refused(evaluate, monkeypatch, capsys, "--data", "modes", "--ckpt", tmp_path)
    settings = json.loads(Path(run, "toy.json").read_text())
    assert torch.equal(evaluate.load_task("modes", run).support, t.support)
    for wrong, says in (({"V": "many"}, "V=many"), ({"colour": 3}, "colour=3"), ({"n_modes": 99}, "99 modes")):
        (tmp_path / "toy.json").write_text(json.dumps(settings | wrong))
        assert says in refused(evaluate, monkeypatch, capsys, "--data", "modes", "--ckpt", tmp_path)
    assert "--data names" in refused(evaluate, monkeypatch, capsys, "--data", "modes", "--ckpt", run, "--seed", 1)
