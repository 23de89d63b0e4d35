"""Folders of weights: what is refused before anything is built, and which base an adapter belongs to.

pytest tests/test_checkpoint.py
"""

import hashlib
import json
import math
import os
import struct
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from common import command_line, refused, tiny_config, tiny_model
from safetensors.torch import load_file, save_file

import checkpoint
import convert_weights
import sample
import train
from checkpoint import (
    adapter_settings,
    check_base,
    fingerprint,
    load_model,
    open_tensors,
    read_config,
    save_adapter,
    save_model,
    weight_files,
)
from lib.util import generator
from model import Config
from presets import FIELDS, check

GOLDEN = Path(__file__).parent / "data" / "golden_a"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 2, "--eval_rows", 2, "--device", "cpu"]


def line_of(capsys, call, *args, **kwargs) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(SystemExit) as stop:
        call(*args, **kwargs)
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def model_of(seed: int = 0, **overrides):
    return tiny_model(seed, vocab_size=272, eos_id=256, mask_id=257, max_len=128, **overrides)


@pytest.fixture
def base(tmp_path):
    save_model(model_of(), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    """A LoRA and markers for `base`, all of them random."""
    model = load_model(base, "cpu", torch.float32)
    model.add_lora(2, 4, generator("lora"))
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator("adapter", name)) * 0.1)
    save_adapter(model, tmp_path / "adapter", {"base": str(base), "lora_r": 2, "lora_alpha": 4})
    return tmp_path / "adapter"


# ---------------------------------------------------------------------------------------------------------------------
# the fields of config.json


@pytest.mark.parametrize(
    "field, value",
    [
        ("n_layer", 4.0),
        ("n_layer", True),
        ("n_layer", "4"),
        ("n_layer", None),
        ("n_layer", 0),
        ("n_layer", 5),
        ("n_layer", 999),
        ("n_layer", 1_000_000_000),
        ("n_embd", 127.5),
        ("n_embd", 2**40),
        ("n_embd", [64]),
        ("n_expert", 10**9),
        ("norm_eps", math.nan),
        ("norm_eps", math.inf),
        ("norm_eps", 0),
        ("rope_theta", math.nan),
        ("rope_theta", "1e4"),
        ("routed_scaling", True),
        ("tied", 0),
        ("tied", "no"),
        ("qkv_bias", 1),
        ("n_dense", -1),
        ("eos_id", -2),
        ("mask_id", 257.0),
        ("tokenizer", 5),
        ("tokenizer", ["bytes"]),
        ("order", "rightmost"),
    ],
)
def test_a_wrong_field_is_one_line_that_names_it(field, value, base, monkeypatch, capsys):
    change_json(base / "config.json", **{field: value})
    line = refused(sample, monkeypatch, capsys, "--ckpt", base, "--prompt", "a", "--device", "cpu")
    assert field in line, line


def test_every_field_has_a_type_and_a_range():
    """The table against the dataclass, so that a new field cannot be forgotten."""
    kinds = {f.name: f.type for f in fields(Config)}
    assert kinds.pop("tokenizer") is str and kinds.pop("order") is str
    assert {name: kind for name, (kind, _, _) in FIELDS.items()} == kinds


@pytest.mark.parametrize("name", FIELDS)
def test_the_ends_of_a_range_and_what_is_beyond(name, capsys):
    kind, low, high = FIELDS[name]
    nothing_of_it = ["1", None, [], {}, math.nan, math.inf, -math.inf]
    if kind is bool:
        beyond = [0, 1]
    elif kind is int:
        beyond = [low - 1, high + 1, float(low), True]
    else:
        beyond = [0, -1, high * 2, True]
    for value in nothing_of_it + beyond:
        assert f"impossible model: {name} must be" in line_of(capsys, check, replace(tiny_config(), **{name: value}))
    for value in (low, high):  # possible here; another rule may still refuse it
        assert checkpoint.fits(value, kind, low, high)


def test_a_whole_number_may_stand_for_a_number(base):
    change_json(base / "config.json", rope_theta=600000)
    assert read_config(base).rope_theta == 600000
    load_model(base, "cpu", torch.float32)


@pytest.mark.parametrize("n_layer", [5, 999])
def test_layers_that_are_not_stored_are_not_built(n_layer, base, monkeypatch, capsys):
    change_json(base / "config.json", n_layer=n_layer)
    monkeypatch.setattr(checkpoint, "Model", lambda cfg: pytest.fail("the model was built"))
    line = line_of(capsys, load_model, base, "cpu", torch.float32)
    assert f"n_layer {n_layer}, but no tensor layers.{n_layer - 1}.* is stored" in line


@pytest.mark.parametrize("shape", [[], [64], [2, 63], [1, 2, 64]])
def test_markers_of_another_shape_are_refused(shape, base, capsys):
    save_file(load_file(base / WEIGHTS) | {"markers": torch.zeros(shape)}, base / WEIGHTS)
    assert f"markers: shape {shape} there" in line_of(capsys, load_model, base, "cpu", torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# the index of shards


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


def test_shards_hold_the_same_model(base):
    before = load_model(base, "cpu", torch.float32).state_dict()
    cut_into_shards(base)
    assert weight_files(base) == [base / "a.safetensors", base / "b.safetensors"]
    after = load_model(base, "cpu", torch.float32).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("weight_map", [5, None, [], "a.safetensors", {"wte.weight": 5}, {"wte.weight": ["a"]}])
def test_a_weight_map_of_another_type(weight_map, base, monkeypatch, capsys):
    cut_into_shards(base)
    change_json(base / INDEX, weight_map=weight_map)
    assert "weight_map" in refused(sample, monkeypatch, capsys, "--ckpt", base, "--prompt", "a", "--device", "cpu")


def test_weights_may_be_read_by_whom_other_files_may_be_read(tmp_path):
    """By everybody, but for those whom the process's own mask shuts out."""
    before = os.umask(0o027)
    save_model(tiny_model(), tmp_path)
    os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"config.json": 0o640, WEIGHTS: 0o640}


@pytest.mark.parametrize(
    "kind", ["{outside}", "../outside.safetensors", "sub/a.safetensors", "..", "", "a\0.safetensors"]
)
def test_a_weight_map_names_files_of_its_folder(kind, base, capsys):
    """A whole checkpoint lies outside, and is not read."""
    outside = base.parent / "outside.safetensors"
    (base / WEIGHTS).rename(outside)
    name = kind.format(outside=outside)
    (base / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    line = line_of(capsys, load_model, base, "cpu", torch.float32)
    assert "weight_map" in line and "is not the name of a .safetensors file of this folder" in line


# ---------------------------------------------------------------------------------------------------------------------
# the fingerprint of a base


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


def test_a_few_values_of_each_tensor_stand_for_all(tmp_path):
    """Which values of 10,000 are read: the first of a run and the last, and none between two runs."""
    seen = []
    unchanged = fingerprint(a_folder(tmp_path / "base", {"a": torch.zeros(10_000)}))
    for i in (0, 255, 256, 3247, 3248, 3503, 3504, 6495, 6496, 9743, 9744, 9999):
        tensor = torch.zeros(10_000)
        tensor[i] = 1
        if fingerprint(a_folder(tmp_path / "base", {"a": tensor})) != unchanged:
            seen.append(i)
    assert seen == [0, 255, 3248, 3503, 6496, 9744, 9999]


def test_names_and_shapes_count(tmp_path):
    values = torch.arange(12.0)
    all_of_them = {"a": values.view(3, 4)}, {"a": values.view(4, 3)}, {"b": values.view(3, 4)}
    assert len({fingerprint(a_folder(tmp_path / "base", tensors)) for tensors in all_of_them}) == 3


def test_one_base_in_another_dtype_in_shards_or_with_other_markers_is_the_same(base, adapter, tmp_path):
    save_model(load_model(base, "cpu", torch.bfloat16), tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16" / WEIGHTS)
    assert stored["wte.weight"].dtype == torch.bfloat16 and not torch.equal(
        stored["wte.weight"].float(), load_file(base / WEIGHTS)["wte.weight"]
    )
    assert fingerprint(tmp_path / "bf16") == fingerprint(base)

    save_model(load_model(base, "cpu", torch.float32, n_rounds=4), tmp_path / "four")
    assert fingerprint(tmp_path / "four") == fingerprint(base)
    cut_into_shards(tmp_path / "four")
    assert fingerprint(tmp_path / "four") == fingerprint(base)

    for folder in (base, tmp_path / "bf16", tmp_path / "four"):
        assert load_model(folder, "cpu", torch.float32, adapter).adapter_state().keys()


def test_a_converted_base_keeps_its_fingerprint(tmp_path):
    """Six shards without markers, and one file with them."""
    convert_weights.convert(GOLDEN, tmp_path / "converted")
    save_model(load_model(tmp_path / "converted", "cpu", torch.float32), tmp_path / "again")
    assert "markers" in load_file(tmp_path / "again" / WEIGHTS)
    assert fingerprint(tmp_path / "converted") == fingerprint(tmp_path / "again")


def test_an_adapter_on_a_base_of_another_seed_is_refused(base, adapter, tmp_path, monkeypatch, capsys):
    save_model(model_of(seed=1), tmp_path / "other")
    sampled = ["--prompt", "a", "--gen_length", 8, "--device", "cpu"]
    assert command_line(sample, monkeypatch, capsys, *sampled, "--ckpt", base, "--adapter", adapter)[0] == 0
    line = refused(sample, monkeypatch, capsys, *sampled, "--ckpt", tmp_path / "other", "--adapter", adapter)
    assert "wrong --ckpt" in line and f"trained on {base} when its fingerprint was {fingerprint(base)}" in line
    assert f"of {tmp_path / 'other'} is {fingerprint(tmp_path / 'other')}" in line


def test_a_base_that_was_trained_further_is_another_one(base, adapter, capsys):
    model = load_model(base, "cpu", torch.float32)
    model.layers[3].norm_1.weight.data[0] += 0.1  # one value in one norm
    save_model(model, base)
    assert "wrong --ckpt" in line_of(capsys, load_model, base, "cpu", torch.float32, adapter)


def test_a_folder_may_carry_the_fingerprint_of_what_it_was_made_from(base, adapter, tmp_path, capsys):
    """Coarser values, as int8 would make them."""
    model = load_model(base, "cpu", torch.float32)
    for p in model.parameters():
        p.data.copy_((p.data * 16).round() / 16)
    save_model(model, tmp_path / "coarse")
    assert "wrong --ckpt" in line_of(capsys, load_model, tmp_path / "coarse", "cpu", torch.float32, adapter)
    change_json(tmp_path / "coarse" / "config.json", fingerprint=fingerprint(base))
    assert load_model(tmp_path / "coarse", "cpu", torch.float32, adapter).cfg == read_config(base)
    check_base(tmp_path / "coarse", adapter)


def test_a_run_does_not_resume_on_a_changed_base(tmp_path, monkeypatch, capsys):
    base, run = tmp_path / "base", tmp_path / "run"
    assert command_line(train, monkeypatch, capsys, *TOY, "--max_iters", 1, "--out_dir", base)[0] == 0
    adapt = [*TOY, "--init_from", base, "--max_iters", 3, "--stop_at", 1, "--out_dir", run]
    assert command_line(train, monkeypatch, capsys, *adapt)[0] == 0
    trained_on = (base / WEIGHTS).read_bytes()
    model = load_model(base, "cpu", torch.float32)
    model.wte.weight.data *= 2
    save_model(model, base)
    resume = ["--init_from", "resume", "--out_dir", run]
    assert f"trained on {base} when" in refused(train, monkeypatch, capsys, *resume)
    (base / WEIGHTS).write_bytes(trained_on)
    assert command_line(train, monkeypatch, capsys, *resume)[0] == 0


# ---------------------------------------------------------------------------------------------------------------------
# adapter.json


@pytest.mark.parametrize(
    "field, value",
    [
        ("base", 5),
        ("base_fingerprint", None),
        ("lora_r", True),
        ("lora_r", 2.0),
        ("lora_r", 0),
        ("lora_alpha", math.nan),
        ("lora_alpha", "4"),
        ("n_layer", True),
        ("n_last", 2.0),
        ("n_rounds", 0),
        ("extension", "os.path"),
    ],
)
def test_a_wrong_setting_of_an_adapter_is_one_line(field, value, base, adapter, monkeypatch, capsys):
    settings = adapter_settings(adapter)
    inside = settings["model"] if field in settings["model"] else settings
    inside[field] = value
    (adapter / "adapter.json").write_text(json.dumps(settings))
    given = ["--ckpt", base, "--adapter", adapter, "--prompt", "a", "--device", "cpu"]
    assert f"adapter.json: {field} is missing or wrong" in refused(sample, monkeypatch, capsys, *given)


def test_an_adapter_without_a_fingerprint_is_refused(adapter, capsys):
    settings = adapter_settings(adapter)
    del settings["base_fingerprint"]
    (adapter / "adapter.json").write_text(json.dumps(settings))
    assert "base_fingerprint is missing" in line_of(capsys, adapter_settings, adapter)


def test_an_adapter_of_a_base_that_is_not_there_is_not_saved(adapter, tmp_path, capsys):
    model = model_of()
    settings = {"base": str(tmp_path / "nowhere"), "lora_r": 2, "lora_alpha": 4}
    assert "nowhere" in line_of(capsys, save_adapter, model, tmp_path / "new", settings)
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------------------------------------------------------
# paths


@pytest.mark.parametrize("flag", ["--ckpt", "--adapter"])
def test_a_path_with_a_nul_byte_cannot_be_read(flag, base, monkeypatch, capsys):
    given = {"--ckpt": base} | {flag: "a\0b"}
    argv = [word for pair in given.items() for word in pair]
    assert r"a\0b" in refused(sample, monkeypatch, capsys, *argv, "--prompt", "a", "--device", "cpu")


@pytest.mark.parametrize("flag", ["--out_dir", "--init_from"])
def test_a_path_with_a_nul_byte_is_no_folder_of_a_run(flag, tmp_path, monkeypatch, capsys):
    given = {"--out_dir": tmp_path / "out"} | {flag: "a\0b"}
    argv = [word for pair in given.items() for word in pair]
    assert r"a\0b" in refused(train, monkeypatch, capsys, *TOY, *argv)
    assert r"a\0b" in refused(train, monkeypatch, capsys, "--init_from", "resume", "--out_dir", "a\0b")


def test_a_tensor_file_with_a_nul_byte_in_its_name_is_one_line(adapter, tmp_path, capsys):
    def read():
        with open_tensors(tmp_path / "a\0b"):
            pytest.fail("opened")

    assert r"a\0b" in line_of(capsys, read)
    assert r"a\0b" in line_of(capsys, fingerprint, "a\0b")
    change_json(adapter / "adapter.json", base="a\0b")
    assert r"a\0b" in line_of(capsys, save_adapter, model_of(), tmp_path / "new", adapter_settings(adapter))
