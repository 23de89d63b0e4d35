"""The table of adapters on toys: its figures by hand. `pytest tests/beyond/test_toys.py`"""

import pytest
from common import command_line, refused, tiny_model

from beyond import toys
from beyond.toys import cell, kind
from checkpoint import save_adapter, save_model
from lib import toy
from lib.util import generator, write_json

MODES = toy.make("modes", V=6, n_ctx=2)  # three phrases of 0.4, 0.3 and 0.3 in each context


def test_what_makes_a_row():
    plain = dict(data=["modes"], max_iters=600)
    chain = plain | dict(target="chain", beam=1, lora="stage_b")
    assert kind(plain) == ["modes", "clean", "all"]
    assert kind(chain) == ["modes", "chain greedy", "stage_b"]
    assert kind(chain | dict(beam=4, lora="all"))[1:] == ["chain beam 4", "all"]
    assert kind(chain | dict(target="clean", beam=4))[1] == "clean"
    assert cell("B mode", [1.0, 0.5]) == "0.750 (0.500)" and cell("A drift", [0.1, 0.3]) == "0.200 (0.300)"
    assert cell("A drift", [-0.00012]) == "0.000"


@pytest.fixture
def folders(tmp_path):
    """A base, an adapter of the paper's kind, and two seeds of one in Stage B alone. They have learned nothing: zero
    LoRA and zero markers."""

    def model():
        reads = dict(vocab_size=MODES.vocab_size, block_length=MODES.m, eos_id=MODES.eos_id, mask_id=MODES.mask_id)
        made = tiny_model(tokenizer="toy", n_rounds=1, **reads)
        made.markers.data.zero_()
        return made

    save_model(model(), tmp_path / "base")
    write_json(tmp_path / "base" / "toy.json", dict(name="modes", V=6, n_ctx=2))
    chain = dict(target="chain", beam=4, lora="stage_b")
    for name, given, alone, seed in (("plain", {}, False, 0), ("0", chain, True, 0), ("1", chain, True, 1)):
        made = model()
        made.add_lora(2, 4.0, generator("lora"), stage_b_alone=alone)
        about = dict(lora_r=2, lora_alpha=4, lora_in_stage_b_alone=alone)
        save_adapter(made, tmp_path / name, tmp_path / "base", about)
        write_json(tmp_path / name / "train.json", dict(data=["modes"], max_iters=3, seed=seed) | given)
    return tmp_path


def test_the_table_of_adapters_that_have_learned_nothing(folders, monkeypatch, capsys):
    """Stage B is Stage A, and Stage A is the base."""
    names = [folders / name for name in ("plain", "0", "1")]
    code, out, _ = command_line(toys, monkeypatch, capsys, "--ckpt", *names, "--device", "cpu")
    head, plain, chain = [[c.strip() for c in line.split("  ") if c] for line in out.splitlines()]
    assert code == 0 and head[6:] == ["seeds", *toys.COLUMNS]
    assert plain[:7] == ["modes", "clean", "all", "2", "1", "3", "1"] and plain[11] == "0.000"
    assert chain[1:7] == ["chain beam 4", "stage_b", "2", "1", "3", "2"] and chain[11] == "0.000 (0.000)"
    assert plain[7] == plain[8]  # A and B


def test_what_has_no_table_is_refused(folders, monkeypatch, capsys):
    given = ["--ckpt", folders / "0", folders / "text"]
    assert "no settings of an adapter" in refused(toys, monkeypatch, capsys, *given)
    write_json(folders / "text" / "train.json", dict(data=["stdlib"]))
    assert "no toy" in refused(toys, monkeypatch, capsys, *given)
