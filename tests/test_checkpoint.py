"""Folders of weights: what comes back, what is refused, whose base is whose. `pytest tests/test_checkpoint.py`"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import ROOT, approx, byte_model, random_adapter, random_ids, tiny_config
from safetensors.torch import load_file, save_file

import checkpoint
import config
from checkpoint import about_adapter, base_hash, base_of, load_model, read_config, save_adapter, save_model
from config import PRESETS
from lib.util import Mistake, generator, write_json
from model import Model

WEIGHTS = "model.safetensors"


def load(folder: Path, **how) -> Model:
    return load_model(folder, "cpu", torch.float32, **how)


def refusal(folder: Path, **how) -> str:
    """The words with which a folder is refused."""
    with pytest.raises(Mistake) as mistake:
        load(folder, **how)
    return str(mistake.value)


def forward(model: Model) -> torch.Tensor:
    """Stage B's output."""
    ids = random_ids(1, 16)
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    return model.logits(model.coordinate(model.prefix(ids, ctx), ids < 20, ids, ctx))


@pytest.fixture
def base(tmp_path):
    save_model(byte_model(), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    random_adapter(tmp_path / "adapter", base, n_last=3)
    return tmp_path / "adapter"


# --- a model's folder
@pytest.mark.parametrize("tied, stage_b", [(False, "paper"), (True, "paper"), (False, "causal")])
def test_a_folder_gives_back_the_model(tied, stage_b, tmp_path):
    model = byte_model(tied=tied, stage_b=stage_b, n_rounds=1)
    save_model(model, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) != tied
    back = load(tmp_path)
    assert back.cfg == model.cfg and type(back) is type(model)
    assert all(torch.equal(back.state_dict()[name], p) for name, p in model.state_dict().items())
    assert (back.lm_head.weight is back.wte.weight) == tied
    low = load_model(tmp_path, "cpu", torch.bfloat16)
    assert low.compute_dtype == low.wte.weight.dtype == torch.bfloat16
    assert all(map(torch.equal, low.buffers(), model.buffers()))  # expert_bias, to the last bit


def test_more_rounds_than_were_trained_begin_at_zero_and_fewer_are_cut(base):
    markers = load(base).markers
    assert torch.equal(load(base, n_rounds=4, n_last=1).markers, torch.cat([markers, torch.zeros(2, 64)]))
    assert torch.equal(load(base, n_rounds=1).markers, markers[:1])


def test_infinity_in_an_adapter_is_named(adapter):
    path, name = adapter / "adapter.safetensors", "layers.3.attn.qkv.lora_B"
    tensors = load_file(path)
    tensors[name].view(-1)[5] = float("inf")
    save_file(tensors, path)
    assert f"{name} holds NaN or infinity" in refusal(adapter)


def test_first_values_have_the_stated_size():
    """1 in the embedding, .02 in the output layer, 1 / sqrt(64) in matrices, and 1 / sqrt(2 * 4) of this in those that
    are added to the residual stream."""
    tensors = checkpoint.new_model(tiny_config(), generator("init")).state_dict()
    sizes = {"wte.weight": 1, "lm_head.weight": 0.02, "layers.1.attn.qkv.weight": 1 / 8, "layers.1.mlp.gate_up": 1 / 8}
    sizes |= dict.fromkeys(("layers.1.attn.proj.weight", "layers.1.mlp.down", "layers.0.mlp.down.weight"), 8**-1.5)
    assert {name: float(tensors[name].std()) for name in sizes} == approx(sizes, rel=0.05)


# changes of a config that cannot be computed, or that cannot be meant: the first value that is too large or too small
IMPOSSIBLE = [
    (dict(n_head=0), "sizes are above 0"),
    (dict(n_layer=1025), "n_layer is at most 1,024"),
    (dict(n_head=3), "n_kv_head divides n_head"),
    (dict(n_embd=60), "multiples of 8"),
    (dict(d_expert=28), "multiples of 8"),
    (dict(rotary_dim=15), "rotary_dim is even, and at most head_dim"),
    (dict(rotary_dim=18), "rotary_dim is even, and at most head_dim"),
    (dict(n_expert=9), "n_group divides n_expert"),
    (dict(n_group=8), "in twos"),
    (dict(topk_group=5), "topk_group is 1..n_group"),
    (dict(n_active=5), "n_active experts fit into topk_group groups"),
    (dict(n_last=5), "n_last is 1..4"),
    (dict(n_rounds=1025), "n_rounds is 1..1,024"),
    (dict(max_len=2**20 + 1), "sizes are 0..1,048,576"),
    (dict(window=-1), "sizes are 0..1,048,576"),
    (dict(d_dense=0), "d_dense"),
    (dict(n_shared=0), "n_shared"),
    (dict(rope_theta=0.0), "rope_theta"),
    (dict(norm_eps=-1e-6), "norm_eps"),
    (dict(block_length=129), "block_length is 1..128"),
    (dict(mask_id=272), "vocabulary"),
    (dict(mask_id=-1), "vocabulary"),
    (dict(eos_id=257), "eos_id and mask_id, both 257, are two tokens"),
    (dict(router="no such router"), ", not 'no such router'"),
]


@pytest.mark.parametrize("change, words", IMPOSSIBLE)
def test_a_config_that_cannot_be_meant_is_refused(change, words, base):
    path = base / "config.json"
    write_json(path, json.loads(path.read_text()) | change)
    line = refusal(base)
    assert words in line and str(path) in line


@pytest.mark.parametrize("cfg", [
    *PRESETS.values(),
    # the least and the greatest values
    tiny_config(n_kv_head=1, n_group=1, topk_group=1, n_active=1, n_rounds=1, n_last=1, block_length=1),
    tiny_config(n_layer=1024, n_rounds=1024, rotary_dim=16, max_len=2**20, n_dense=0, d_dense=0),
    # without experts
    tiny_config(n_dense=4, n_embd=60, n_expert=0, n_group=0, topk_group=0, n_active=0, d_expert=0, n_shared=0),
])  # fmt: skip
def test_a_possible_config(cfg):
    config.check_config(cfg)


def test_a_config_without_a_field_is_refused(base):
    """A default could be another model's value. Only fields that came later may lack, and 600000 is a real number."""
    path = base / "config.json"
    raw = json.loads(path.read_text()) | dict(rope_theta=600_000)
    del raw["router"], raw["stage_b"], raw["decoder"], raw["window"], raw["int8"]
    path.write_text(json.dumps(raw))
    assert load(base).cfg.stage_b == "paper"
    for name in raw:
        path.write_text(json.dumps({key: value for key, value in raw.items() if key != name}))
        assert f"{name} is None" in refusal(base)


def test_causal_stage_b_begins_as_the_bases_last_layers_and_a_map_of_zeros(base):
    """So at first the token that a position is shown changes nothing. The copy has its own memory."""
    causal = load(base, stage_b="causal", n_rounds=1, n_last=3)
    assert not causal.show.any()
    for own, of_base in zip(causal.layers_b, causal.layers[1:], strict=True):
        assert all(map(torch.equal, own.state_dict().values(), of_base.state_dict().values()))
        assert own.attn.qkv.weight.data_ptr() != of_base.attn.qkv.weight.data_ptr()


@pytest.mark.parametrize("folder, preset", [("names", "names"), ("shakespeare", "text")])
def test_a_shipped_base_has_its_presets_geometry(folder, preset):
    cfg = read_config(ROOT / "assets" / folder)
    of_run = ("vocab_size", "eos_id", "mask_id", "window", "block_length", "n_last", "decoder")
    assert cfg == replace(PRESETS[preset], **{name: getattr(cfg, name) for name in of_run})


def test_presets():
    """Blocks are as long as the paper's. Those of text have all layers, half of them, and a third."""
    assert PRESETS["llada2.1-mini"].block_length == 32
    assert [PRESETS[name].n_layer for name in ("text", "text_small", "text_two")] == [6, 6 // 2, 6 // 3]


# --- which weights a folder holds
@pytest.mark.parametrize("path", sorted((ROOT / "assets").glob("*/*/adapter.json")))
def test_the_shipped_adapters_stand_on_the_shipped_bases(path):
    base = path.parent.parent
    assert base_of(path.parent) == base and about_adapter(path.parent)["base_hash"] == base_hash(base)


# --- an adapter's folder
@pytest.mark.parametrize("stage_b, n_rounds", [("paper", 3), ("causal", 1)])
def test_an_adapter_of_every_kind_comes_back(stage_b, n_rounds, base, tmp_path, monkeypatch):
    """adapter.json names its base relative to its own folder, so both folders may be moved together."""
    model = random_adapter(tmp_path / "kind", base, stage_b, n_last=1, n_rounds=n_rounds)
    about = dict(base="../base", base_hash=base_hash(base), n_last=1, n_rounds=n_rounds, block_length=8)
    monkeypatch.chdir(tmp_path)
    Path("moved").mkdir()
    base.rename("moved/base")
    folder = Path("kind").rename("moved/kind")
    assert about_adapter(folder) == about | dict(stage_b=stage_b, lora_r=4)
    assert base_of(folder) == base_of(Path("moved/base")) == Path("moved/base")
    assert read_config(folder).stage_b == stage_b
    back = load(folder)
    assert type(back) is type(model)
    assert back.cfg == model.cfg == replace(read_config(base_of(folder)), n_last=1, n_rounds=n_rounds, stage_b=stage_b)
    assert torch.equal(forward(back), forward(model))
    assert load_file(folder / "adapter.safetensors").keys() == checkpoint.adapter_tensors(model).keys()
    low = load_model(folder, "cpu", torch.bfloat16)
    assert {p.dtype for p in low.learned().values()} == {torch.float32}

    # its block length may be another
    assert load(folder, block_length=1).cfg == replace(model.cfg, block_length=1)


def test_an_adapter_on_another_base_or_of_another_kind_is_refused(base, adapter):
    save_model(byte_model(seed=1), base)
    assert f"{adapter} was trained on another model than {base} holds now" in refusal(adapter)

    # of the same weights, but with other positions
    save_model(byte_model(rope_theta=1e3), base)
    assert "(its config, " in refusal(adapter)

    # of another kind than its tensors
    save_model(byte_model(), base)
    about = json.loads((adapter / "adapter.json").read_text())
    for name, value, more in (("stage_b", "causal", {"n_rounds": 1}), ("n_rounds", 1, {}), ("lora_r", 8, {})):
        write_json(adapter / "adapter.json", about | {name: value} | more)
        assert "adapter.json has" in refusal(adapter) and "and was written with" in refusal(adapter)
    base.rename(base.parent / "gone")
    write_json(adapter / "adapter.json", about)
    assert f"adapter.json names {base} as its base, and no model is there" in refusal(adapter)


def test_a_base_that_is_replaced_while_an_adapter_learns_is_said(base, tmp_path):
    model = load(base)
    model.adapt(4, torch.Generator())
    save_model(byte_model(seed=1), base)
    with pytest.raises(Mistake, match="was replaced while an adapter was trained on it"):
        save_adapter(model, tmp_path / "adapter", base, 4)
    assert not (tmp_path / "adapter").exists()
