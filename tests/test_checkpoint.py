"""Folders of weights: what comes back, what is refused, whose base is whose. `pytest tests/test_checkpoint.py`"""

import hashlib
import json
import math
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import byte_model, random_adapter, random_ids, tiny_model
from safetensors.torch import load_file, save_file

from checkpoint import base_of, fingerprint, load_model, load_tokenizer, read_config, save_model, stored
from lib.util import Mistake
from model import Model

WEIGHTS = "model.safetensors"
NONSENSE = [None, True, -1, 0, 5, 4.0, 4.5, "4", "", [], {}, math.nan, math.inf, 10**10, 10**400]


def load(folder: Path, **how) -> Model:
    return load_model(folder, "cpu", torch.float32, **how)


def refusal(folder: Path, **how) -> str:
    """The words with which a folder is refused."""
    with pytest.raises(Mistake) as mistake:
        load(folder, **how)
    return str(mistake.value)


def forward(model: Model) -> torch.Tensor:
    ids = random_ids(1, 16)
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    h = model.prefix(ids, ctx)
    return model.logits(model.coordinate(h, ids < 20, ctx, model.cfg.n_rounds))


@pytest.fixture
def base(tmp_path):
    save_model(byte_model(), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    random_adapter(tmp_path / "adapter", base, n_last=3)
    return tmp_path / "adapter"


# --- a model's folder
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_back_the_model(tied, tmp_path):
    model = byte_model(tied=tied)
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
    assert {b.dtype for b in low.buffers()} == {torch.float32}  # expert_bias, to the last bit
    assert all(torch.equal(a, b) for a, b in zip(low.buffers(), model.buffers(), strict=True))

    # more rounds than were trained begin at zero, fewer are cut
    four = load(tmp_path, n_rounds=4, n_last=1).markers
    assert torch.equal(four, torch.cat([model.markers, torch.zeros(2, 64)]))
    assert torch.equal(load(tmp_path, n_rounds=1).markers, model.markers[:1])


def test_tensors_that_do_not_fit_are_named(base):
    whole = load_file(base / WEIGHTS)
    for words, change in {
        "markers: shape [2, 63] there, shape [2, 64] in the model": {"markers": torch.zeros(2, 63)},
        "markers: shape [] there": {"markers": torch.zeros(())},
        "norm_f.weight: no such tensor there": {"norm_f.weight": None},
        "other: shape [1] there, no such tensor in the model": {"other": torch.zeros(1)},
    }.items():
        save_file({k: v for k, v in (whole | change).items() if v is not None}, base / WEIGHTS)
        assert words in refusal(base)


def test_a_shard_lies_in_its_folder(base):
    shutil.copyfile(base / WEIGHTS, base.parent / "outside.safetensors")
    for wrong in ("../outside.safetensors", str(base.parent / "outside.safetensors"), "a\0.safetensors", 5):
        (base / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"wte.weight": wrong}}))
        assert "is not the name of a .safetensors file of this folder" in refusal(base)


def test_weights_may_be_read_by_whom_other_files_may_be_read(tmp_path):
    """By everybody, but for those whom the process's own mask shuts out."""
    before = os.umask(0o027)
    save_model(tiny_model(), tmp_path)
    os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


# --- the fingerprint of a base
def test_a_fingerprint_worked_by_hand(tmp_path):
    """1 is 3F80 and -2 is C000 in bfloat16, lower byte first in memory. Of 20 rows of the embedding 0, 2, .. 14 are in
    it, of nine values of the norm the first eight."""
    norm, rows = torch.tensor(4 * [1.0, -2.0] + [5.0]), torch.arange(40.0).view(20, 2)
    save_file({"norm_f.weight": norm, "wte.weight": rows, "markers": torch.ones(3)}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    embedding = b"".join(struct.pack("<f", x)[2:] for row in range(0, 16, 2) for x in (2 * row, 2 * row + 1))
    by_hand = hashlib.sha256(b"[20, 2]" + embedding + b"[9]" + 4 * b"\x80\x3f\x00\xc0").hexdigest()
    assert fingerprint(tmp_path) == by_hand[:16]


def test_one_base_in_shards_in_one_file_or_in_another_dtype_is_the_same(golden, tmp_path):
    """Six shards without markers, and one file with them."""
    for dtype in (torch.float32, torch.bfloat16):
        save_model(load_model(golden, "cpu", dtype), tmp_path / str(dtype))
        assert load_file(tmp_path / str(dtype) / WEIGHTS)["wte.weight"].dtype == dtype
        assert fingerprint(golden) == fingerprint(tmp_path / str(dtype))


# --- an adapter's folder
def test_an_adapter_brings_its_base_and_its_own_settings(base, adapter, tmp_path, monkeypatch):
    """Its base lies where adapter.json says, seen from its own folder: both may move together."""
    expected = forward(random_adapter(tmp_path / "again", base, n_last=3))
    monkeypatch.chdir(tmp_path)
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


def test_an_adapter_without_its_base_on_another_one_or_of_another_kind_is_refused(base, adapter, tmp_path):
    ours = fingerprint(base)
    base.rename(tmp_path / "gone")
    assert f"adapter.json names {base} as its base, where no checkpoint is" in refusal(adapter)

    save_model(byte_model(seed=1), base)
    line = refusal(adapter)
    assert f"fingerprint is {ours}" in line and f"{base} has {fingerprint(base)}: it is another one" in line

    # half of an adapter
    save_model(byte_model(), base)
    half = load_file(adapter / "adapter.safetensors")
    del half["markers"]
    save_file(half, adapter / "adapter.safetensors")
    assert "markers: no such tensor there" in refusal(adapter)

    # a folder of another kind
    about = json.loads((adapter / "adapter.json").read_text())
    (adapter / "adapter.json").write_text(json.dumps(about | {"read_by": "python -m somewhere.else --ckpt DIR"}))
    assert "it is read by `python -m somewhere.else --ckpt DIR`" in refusal(adapter)


@pytest.mark.parametrize("file, more", [("config.json", ["model_type", "unknown", "int8"]), ("adapter.json", [])])
def test_any_nonsense_is_a_mistake_or_a_model(file, more, base, adapter):
    folder = base if file == "config.json" else adapter
    whole = json.loads((folder / file).read_text())
    parts = whole.get("model", {})
    wrong = [{field: value} for field in (*whole, *more) for value in (*NONSENSE, "a\0b", "/nowhere")]
    wrong += [{"model": parts | {key: value}} for key in parts for value in NONSENSE]
    contents = [whole | changes for changes in wrong]
    contents += [{k: v for k, v in whole.items() if k != key} for key in whole]
    refusals = 0
    for content in contents:
        (folder / file).write_text(json.dumps(content))
        try:
            load(folder)
        except Mistake:
            refusals += 1
    assert refusals > 0.75 * len(contents)
