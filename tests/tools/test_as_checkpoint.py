"""A distilled Stage A as a checkpoint. `pytest tests/tools/test_as_checkpoint.py`"""

import json

import pytest
import torch
from common import caller, random_ids, tiny_model

from beyond.distill import Distilled
from checkpoint import load_model, save_adapter, save_model
from lib.util import generator, write_json
from model import sequence_context
from tools import as_checkpoint


@pytest.fixture
def call(monkeypatch, capsys):
    return caller(as_checkpoint, monkeypatch, capsys)


@pytest.fixture
def folders(tmp_path):
    """A base, and an adapter whose every weight is another model's."""
    base = tmp_path / "base"
    save_model(tiny_model(seed=0), base)
    for name in ("tokenizer.json", "names.json"):
        write_json(base / name, {"of": name})

    learned = tiny_model(seed=1)
    learned.__class__ = Distilled
    settings = dict(base=str(base), lora_r=2, lora_alpha=4, extension="beyond.distill", weights="all")
    save_adapter(learned, tmp_path / "distilled", settings)
    return tmp_path


def test_it_is_the_distilled_model_bit_for_bit(folders, call):
    """The same logits as the base with its adapter has, which are not the base's; its tokenizer; a base of its own."""
    out = folders / "new" / "out"
    call("--ckpt", folders / "base", "--adapter", folders / "distilled", "--out", out)
    ids = random_ids(2, 16)
    models = {
        "alone": load_model(out, "cpu", torch.float32),
        "adapted": load_model(folders / "base", "cpu", torch.float32, folders / "distilled"),
        "base": load_model(folders / "base", "cpu", torch.float32),
    }
    logits = {}
    with torch.no_grad():
        for name, model in models.items():
            real = torch.ones_like(ids, dtype=torch.bool)
            logits[name] = model(ids, sequence_context(model.cfg, real, torch.float32))
    assert torch.equal(logits["alone"], logits["adapted"])
    assert not torch.allclose(logits["alone"], logits["base"], atol=0.1)
    assert models["alone"].cfg == models["base"].cfg
    for name in ("tokenizer.json", "names.json"):
        assert (out / name).read_bytes() == (folders / "base" / name).read_bytes()
    assert not (out / "toy.json").exists()


def test_mistakes(folders, call):
    def why(**changes):
        flags = dict(ckpt=folders / "base", adapter=folders / "distilled", out=folders / "out") | changes
        line = call.fails(*(word for name, value in flags.items() for word in (f"--{name}", value)))
        assert not (folders / "out").exists()
        return line

    # other adapters, and one whose weights are LoRA's
    lora = tiny_model()
    lora.add_lora(2, 4, generator("lora"))
    save_adapter(lora, folders / "lora", dict(base=str(folders / "base"), lora_r=2, lora_alpha=4))
    assert "does not hold all weights" in why(adapter=folders / "lora")
    settings = json.loads((folders / "distilled" / "adapter.json").read_text())
    write_json(folders / "lora" / "adapter.json", settings | {"weights": "lora"})
    assert "does not hold all weights" in why(adapter=folders / "lora")
    assert "no adapter" in why(adapter=folders / "base")

    # another base, and a folder that is taken
    save_model(tiny_model(seed=2), folders / "other")
    assert "wrong --ckpt" in why(ckpt=folders / "other")
    assert "already holds" in why(out=folders / "base")
