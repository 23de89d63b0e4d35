"""The table of adapters on toys: its figures by hand. `pytest tests/beyond/test_toys.py`"""

import math
from types import SimpleNamespace

import pytest
import torch
from common import approx, command_line, refused, tiny_model

from beyond import noise, stage_b_only, toys
from beyond.toys import cell, kind, sampled_kl
from checkpoint import save_adapter, save_model
from lib import toy
from lib.util import generator, write_json

MODES = toy.make("modes", V=6, n_ctx=2)  # three phrases of 0.4, 0.3 and 0.3 in each context


def stub(monkeypatch, write):
    """A model whose Stage B writes what `write` makes of contexts (R,) and the answer's numbers u (R, m)."""

    def answer_log_probs(model, task, c, z, n_rounds):
        return write(c, model.u[:, MODES.m :]).log().double()

    monkeypatch.setattr(toy, "answer_log_probs", answer_log_probs)
    return SimpleNamespace(wte=SimpleNamespace(weight=torch.zeros(1)), cfg=SimpleNamespace(n_rounds=1), u=None)


def one_hot(phrase: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(phrase, MODES.V).float()


def test_the_kl_of_joint_samples_of_known_models(monkeypatch):
    model = stub(monkeypatch, lambda c, u: MODES.marginals()[c])  # ignores u: independent draws cost TC
    kl, error = sampled_kl(model, MODES, 64)
    assert kl == approx(float(MODES.tc().mean()), abs=1e-6) and error == approx(0, abs=1e-9)
    assert model.u is None  # nothing is left for the next pass

    model = stub(monkeypatch, lambda c, u: one_hot(MODES.quantile(c, u[:, 0].double())))  # Rosenblatt: the joint itself
    kl, error = sampled_kl(model, MODES, 8192)
    assert abs(kl) < 5e-4 and error < 1e-3

    def uniform_phrases(c, u):
        return one_hot(MODES.support[c, (3 * u[:, 0]).long()])

    truth = sum(p * math.log(3 * p) for p in (0.4, 0.3, 0.3))
    kl, error = sampled_kl(stub(monkeypatch, uniform_phrases), MODES, 8192)
    assert abs(kl - truth) < 4 * error < 0.03
    kl, error = sampled_kl(stub(monkeypatch, uniform_phrases), MODES, 64)  # few draws: the bias is taken off
    assert abs(kl - truth) < 4 * error


def test_what_makes_a_row():
    plain = dict(data=["modes"], max_iters=600, model=dict(n_last=2, n_rounds=1))
    chain = plain | dict(target="chain", beam=1, lora="stage_b")
    assert kind(plain) == ("modes", "clean", "all", "2", "1", "600")
    assert kind(chain) == ("modes", "chain greedy", "stage_b", "2", "1", "600")
    assert kind(chain | dict(beam=4, lora="all"))[1:3] == ("chain beam 4", "all")
    assert kind(chain | dict(target="clean", beam=4))[1] == "clean"
    assert kind(chain | dict(extension="beyond.noise"))[1] == "chain noise"
    assert kind(chain | dict(seed=1)) == kind(chain | dict(seed=2))
    assert cell("B mode", [1.0, 0.5]) == "0.750 (0.500)" and cell("A drift", [0.1, 0.3]) == "0.200 (0.300)"
    assert cell("error", [0.00012]) == "0.0001" and cell("chain", []) == "-"


@pytest.fixture
def folders(tmp_path):
    """A base, and adapters of every kind that have learned nothing: zero LoRA and zero markers."""

    def model():
        reads = dict(vocab_size=MODES.vocab_size, block_length=MODES.m, eos_id=MODES.eos_id, mask_id=MODES.mask_id)
        made = tiny_model(tokenizer="toy", n_rounds=1, **reads)
        made.markers.data.zero_()
        return made

    save_model(model(), tmp_path / "base")
    write_json(tmp_path / "base" / "toy.json", dict(name="modes", V=6, n_ctx=2))
    chain = dict(target="chain", beam=4, lora="stage_b")
    for name, given, adapt, extension in (
        ("plain", {}, lambda m: m.add_lora(2, 4, generator("lora")), {}),
        ("0", chain, lambda m: stage_b_only.adapt(m, 2, generator("lora")), {"extension": "beyond.stage_b_only"}),
        ("1", chain, lambda m: stage_b_only.adapt(m, 2, generator("lora")), {"extension": "beyond.stage_b_only"}),
        ("noise", chain, lambda m: noise.make_noisy(m, 2, generator("lora")), {"extension": "beyond.noise"}),
    ):
        made, settings = model(), dict(base=str(tmp_path / "base"), lora_r=2, lora_alpha=4)
        adapt(made)
        save_adapter(made, tmp_path / name, settings | extension)
        write_json(tmp_path / name / "train.json", dict(data=["modes"], max_iters=3, seed=0) | given)
    return tmp_path


def test_the_table_of_adapters_that_have_learned_nothing(folders, monkeypatch, capsys):
    """Stage B is Stage A, Stage A is the base, and a joint sample is an independent one."""
    names = [folders / name for name in ("plain", "0", "1", "noise")]
    code, out, _ = command_line(toys, monkeypatch, capsys, "--adapter", *names, "--draws", 16, "--device", "cpu")
    head, plain, chain, noisy = [[c.strip() for c in line.split("  ") if c] for line in out.splitlines()]
    assert code == 0 and head[6:] == ["seeds", *toys.COLUMNS]
    assert plain[:7] == ["modes", "clean", "all", "2", "1", "3", "1"] and plain[11:] == ["0.000", "-", "-"]
    assert chain[1:7] == ["chain beam 4", "stage_b", "2", "1", "3", "2"]
    assert chain[11] == "0.000 (0.000)"
    assert plain[7] == plain[8] == noisy[7] == noisy[8] and plain[9] == noisy[9]  # A, B and chain
    assert noisy[1] == "chain noise" and float(noisy[12]) > 1 and noisy[13] == "0.0000"


def test_what_has_no_table_is_refused(folders, monkeypatch, capsys):
    given = ["--adapter", folders / "0", folders / "text"]
    assert "no settings of an adapter" in refused(toys, monkeypatch, capsys, *given)
    write_json(folders / "text" / "train.json", dict(data=["stdlib"]))
    assert "no toy" in refused(toys, monkeypatch, capsys, *given)
    assert "--draws" in refused(toys, monkeypatch, capsys, "--adapter", folders / "noise", "--draws", 1)
