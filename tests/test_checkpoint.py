"""Folders of weights: what comes back, what is refused, and which base an adapter belongs to.

pytest tests/test_checkpoint.py
"""

import hashlib
import json
import math
import os
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import GOLDEN, command_line, random_ids, refused, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn

import convert_weights
import sample
from checkpoint import (
    base_of,
    decoding_defaults,
    fingerprint,
    load_model,
    load_tokenizer,
    read_config,
    save_adapter,
    save_model,
    stored,
    weight_files,
)
from lib.util import Mistake, generator
from model import Model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NONSENSE = [None, True, -1, 0, 5, 4.0, 4.5, "4", "", [], {}, math.nan, math.inf, 10**10, 10**400]


def load(folder: Path, **how) -> Model:
    return load_model(folder, "cpu", torch.float32, **how)


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def model_of(seed: int = 0, **overrides):
    return tiny_model(seed, vocab_size=272, eos_id=256, mask_id=257, max_len=128, **overrides)


def forward(model: Model) -> torch.Tensor:
    ids = random_ids(1, 16)
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    h = model.prefix(ids, ctx)
    return model.head(model.coordinate(h, ids < 20, ctx, model.cfg.n_rounds))


@pytest.fixture
def base(tmp_path):
    save_model(model_of(), tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, **overrides) -> Model:
    """`base` with a LoRA and markers, all of them random."""
    model = load(base, **overrides)
    model.add_lora(2, 4, generator("lora"))
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator("adapter", name)) * 0.1)
    return model


@pytest.fixture
def adapter(base, tmp_path):
    save_adapter(adapted(base, n_last=3), tmp_path / "adapter", base, {"lora_r": 2, "lora_alpha": 4})
    return tmp_path / "adapter"


# --- a model's folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_back_the_model(tied, tmp_path):
    model = model_of(tied=tied)
    save_model(model, tmp_path)
    assert (model.lm_head.weight is model.wte.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) != tied
    back = load(tmp_path)
    assert back.cfg == model.cfg
    assert all(torch.equal(back.state_dict()[name], p) for name, p in model.state_dict().items())
    torch.testing.assert_close(forward(back), forward(model))
    assert (back.lm_head.weight is back.wte.weight) == tied
    low = load_model(tmp_path, "cpu", torch.bfloat16)
    assert low.compute_dtype == low.wte.weight.dtype == torch.bfloat16
    assert {b.dtype for b in low.buffers()} == {torch.float32}  # expert_bias

    # more rounds than were trained begin at zero, fewer are cut
    four = load(tmp_path, n_rounds=4, n_last=1).markers
    assert torch.equal(four, torch.cat([model.markers, torch.zeros(2, 64)]))
    assert torch.equal(load(tmp_path, n_rounds=1).markers, model.markers[:1])


def test_any_nonsense_in_a_config_is_a_mistake_or_a_model(base):
    raw = json.loads((base / "config.json").read_text())
    refusals = 0
    for field in [*raw, "loader", "model_type", "unknown"]:
        for value in NONSENSE:
            (base / "config.json").write_text(json.dumps(raw | {field: value}))
            try:
                load(base)
            except Mistake:
                refusals += 1
    assert refusals > 0.8 * len(raw) * len(NONSENSE)
    (base / "config.json").write_text(json.dumps(raw | {"rope_theta": 600000}))  # a whole number for a float
    assert load(base).cfg.rope_theta == 600000


@pytest.mark.parametrize("n_layer", [5, 999])
def test_layers_that_are_not_stored_are_not_built(n_layer, base):
    change_json(base / "config.json", n_layer=n_layer)
    with pytest.raises(Mistake, match=f"n_layer {n_layer}, but no tensor layers.{n_layer - 1}"):
        load(base, kind=lambda cfg, head: pytest.fail("the model was built"))


def test_tensors_that_do_not_fit_are_named(base):
    whole = load_file(base / WEIGHTS)
    for words, change in {
        "markers: shape .2, 63. there, shape .2, 64. in the model": {"markers": torch.zeros(2, 63)},
        "markers: shape .. there": {"markers": torch.zeros(())},
        "norm_f.weight: no such tensor there": {"norm_f.weight": None},
        "other: shape .1. there, no such tensor in the model": {"other": torch.zeros(1)},
    }.items():
        save_file({k: v for k, v in (whole | change).items() if v is not None}, base / WEIGHTS)
        with pytest.raises(Mistake, match=words):
            load(base)


def cut_into_shards(folder: Path) -> None:
    """The same tensors in two files, the later names in the first of them."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    half = len(names) // 2
    weight_map = {}
    for file, part in (("a.safetensors", names[half:]), ("b.safetensors", names[:half])):
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_hold_the_same_model_and_lie_in_its_folder(base):
    before = load(base).state_dict()
    shutil.copyfile(base / WEIGHTS, base.parent / "outside.safetensors")
    cut_into_shards(base)
    assert weight_files(base) == [base / "a.safetensors", base / "b.safetensors"]
    after = load(base).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for wrong in ("../outside.safetensors", str(base.parent / "outside.safetensors"), "..", "", "a\0.safetensors", 5):
        change_json(base / INDEX, weight_map={"wte.weight": wrong})
        with pytest.raises(Mistake, match="is not the name of a .safetensors file of this folder"):
            load(base)
    for wrong in (5, None, [["a"]]):
        change_json(base / INDEX, weight_map=wrong)
        with pytest.raises(Mistake, match="weight index"):
            load(base)


def test_weights_may_be_read_by_whom_other_files_may_be_read(tmp_path):
    """By everybody, but for those whom the process's own mask shuts out."""
    before = os.umask(0o027)
    save_model(tiny_model(), tmp_path)
    os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


# --- the fingerprint of a base


def a_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_fingerprint_worked_by_hand(tmp_path):
    """1 is 3F80 and -2 is C000 in bfloat16, lower byte first in memory; a small tensor is in all four runs. Of 1000
    values the runs of 256 begin at 0, 248, 496 and 744."""
    few, many = torch.tensor([1.0, -2.0]), torch.arange(1000.0).bfloat16()
    folder = a_folder(tmp_path / "base", {"b": few, "a": many.view(10, 100), "markers": torch.ones(3)})
    top_halves = [struct.pack("<f", value)[2:] for value in many.tolist()]
    runs = b"".join(b"".join(top_halves[first : first + 256]) for first in (0, 248, 496, 744))
    by_hand = hashlib.sha256(b"a[10, 100]" + runs + b"b[2]" + 4 * b"\x80\x3f\x00\xc0").hexdigest()
    assert fingerprint(folder) == by_hand[:16]


def test_one_base_in_another_dtype_in_shards_or_with_other_markers_is_the_same(base, tmp_path):
    save_model(load_model(base, "cpu", torch.bfloat16), tmp_path / "bf16")
    assert load_file(tmp_path / "bf16" / WEIGHTS)["wte.weight"].dtype == torch.bfloat16
    save_model(load(base, n_rounds=4), tmp_path / "four")
    found = {fingerprint(folder) for folder in (base, tmp_path / "bf16", tmp_path / "four")}
    cut_into_shards(tmp_path / "four")
    assert found == {fingerprint(tmp_path / "four")}

    # six shards without markers, and one file with them
    convert_weights.convert(GOLDEN, tmp_path / "converted")
    save_model(load(tmp_path / "converted"), tmp_path / "again")
    assert "markers" in load_file(tmp_path / "again" / WEIGHTS)
    assert fingerprint(tmp_path / "converted") == fingerprint(tmp_path / "again")

    # one value in one norm makes another base
    model = load(base)
    model.layers[3].norm_1.weight.data[0] += 0.1
    save_model(model, tmp_path / "other")
    assert fingerprint(tmp_path / "other") not in found


# --- an adapter's folder


def test_an_adapter_brings_its_base_and_its_own_settings(base, adapter, tmp_path, monkeypatch):
    """Its base lies where adapter.json says, seen from its own folder: both may move together."""
    expected = forward(adapted(base, n_last=3))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved").mkdir()
    for folder in (base, adapter):
        shutil.copytree(folder, tmp_path / "moved" / folder.name)
    for folder in (adapter, Path("adapter"), Path("moved/adapter")):
        model = load(folder)
        assert model.cfg == replace(read_config(base), n_last=3) == replace(read_config(folder), n_last=3)
        torch.testing.assert_close(forward(model), expected)
    assert base_of(Path("moved/adapter")) == Path("moved/base") and base_of(base) == base
    assert load_tokenizer(adapter, "bytes").decode([97]) == "a"
    low = load_model(adapter, "cpu", torch.bfloat16)
    assert {p.dtype for name, p in low.named_parameters() if name in low.adapter_state()} == {torch.float32}
    assert stored(low).keys() == stored(load(base)).keys()


def test_an_adapter_acts_in_stage_b_alone_if_it_says_so(base, tmp_path):
    model = load(base)
    model.add_lora(2, 4, generator("lora"), stage_b_alone=True)
    about = {"lora_r": 2, "lora_alpha": 4, "lora_in_stage_b_alone": True}
    save_adapter(model, tmp_path / "adapter", base, about)
    back = load(tmp_path / "adapter")
    assert back.lora_in_stage_b_alone and back.adapter_state().keys() == model.adapter_state().keys()

    with pytest.raises(Mistake, match="nowhere"):  # a base that is not there
        save_adapter(model, tmp_path / "new", tmp_path / "nowhere", about)
    assert not (tmp_path / "new").exists()


def test_an_adapter_without_its_base_or_on_another_one_is_refused(base, adapter, tmp_path, monkeypatch, capsys):
    sampled = ["--ckpt", adapter, "--prompt", "a", "--gen_length", 8, "--device", "cpu"]
    assert command_line(sample, monkeypatch, capsys, *sampled)[0] == 0
    ours = fingerprint(base)
    base.rename(tmp_path / "gone")
    line = refused(sample, monkeypatch, capsys, *sampled)
    assert f"adapter.json names {base} as its base, where no checkpoint is" in line

    save_model(model_of(seed=1), base)
    line = refused(sample, monkeypatch, capsys, *sampled)
    assert f"fingerprint is {ours}" in line and f"{base} has {fingerprint(base)}: it is another one" in line

    # one that was made of it, in coarser values say, carries its fingerprint
    change_json(base / "config.json", fingerprint=ours)
    assert command_line(sample, monkeypatch, capsys, *sampled)[0] == 0

    # another geometry under the same fingerprint, and half of an adapter
    save_model(model_of(n_layer=5), base)
    change_json(base / "config.json", fingerprint=ours)
    assert "was trained with n_layer 4, the base has 5" in refused(sample, monkeypatch, capsys, *sampled)
    save_model(model_of(), base)
    half = load_file(adapter / "adapter.safetensors")
    del half["markers"]
    save_file(half, adapter / "adapter.safetensors")
    assert "markers: no such tensor there" in refused(sample, monkeypatch, capsys, *sampled)


def test_any_nonsense_in_an_adapter_is_a_mistake_or_a_model(adapter):
    whole = json.loads((adapter / "adapter.json").read_text())
    wrong = [{key: value} for key in (*whole, "head", "decoding") for value in (*NONSENSE, "a\0b", "/nowhere")]
    wrong += [{"model": whole["model"] | {key: value}} for key in whole["model"] for value in NONSENSE]
    wrong += [{"head": {"module": module}} for module in ("os", "beyond.nothere", "released.int8", "beyond..os", 5)]
    wrong += [{"decoding": {key: "x"}} for key in ("tau_m2t", "seed")]
    texts = [json.dumps(whole | changes) for changes in wrong]
    texts += [json.dumps({k: v for k, v in whole.items() if k != key}) for key in whole]
    refusals = 0
    for text in texts:
        (adapter / "adapter.json").write_text(text)
        try:
            load(adapter)
            decoding_defaults(adapter)
        except Mistake:
            refusals += 1
    assert refusals > 0.8 * len(texts)


class Scale(nn.Module):
    n_layer = 1

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))


def test_a_head_is_built_by_the_module_that_its_adapter_names(base, tmp_path, monkeypatch):
    module = SimpleNamespace(build=lambda cfg, about: Scale(about["width"] * cfg.n_last))
    monkeypatch.setitem(sys.modules, "beyond.stand_in", module)
    model = load(base, make_head=lambda cfg: Scale(3 * cfg.n_last))
    model.second_look.scale.data.uniform_(generator=generator("head"))
    about = {"head": {"module": "beyond.stand_in", "width": 3}, "decoding": {"tau_m2t": -1, "tau_t2t": None}}
    save_adapter(model, tmp_path / "adapter", base, about)
    assert load_file(tmp_path / "adapter" / "adapter.safetensors").keys() == {"second_look.scale"}
    back = load(tmp_path / "adapter")
    assert torch.equal(back.second_look.scale, model.second_look.scale) and back.partial_cost == 1 / 4
    assert decoding_defaults(tmp_path / "adapter") == {"tau_m2t": -1.0, "tau_t2t": None}
    assert decoding_defaults(base) == {}
