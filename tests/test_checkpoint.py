"""Folders of weights: what comes back, what is refused, whose base is whose. `pytest tests/test_checkpoint.py`"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from common import ROOT, byte_model, random_adapter, random_ids
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import (
    about_adapter,
    base_of,
    judge_of,
    load_model,
    read_config,
    save_model,
    stage_b_of,
    stored,
    weights_hash,
)
from lib.tokenizer import byte_spec
from lib.util import Mistake, few_threads_if_small, write_json
from model import ROUTERS, Model

WEIGHTS = "model.safetensors"


def load(folder: Path, **how) -> Model:
    return load_model(folder, "cpu", torch.float32, **how)


def refusal(folder: Path, **how) -> str:
    """The words with which a folder is refused."""
    with pytest.raises(Mistake) as mistake:
        load(folder, **how)
    return str(mistake.value)


def forward(model: Model, stage_b: str = "paper") -> torch.Tensor:
    """Stage B's output."""
    ids = random_ids(1, 16)
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    h = model.prefix(ids, ctx)
    model.last_n(h, ctx)
    read = [ids] if stage_b == "causal" else []
    return model.logits(model.coordinate(h, ids < 20, ctx, model.cfg.n_rounds, *read))


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
    assert (model.lm_head.weight is model.wte.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) != tied
    back = load(tmp_path)
    assert back.cfg == model.cfg and type(back) is type(model) and stage_b_of(tmp_path) == stage_b
    assert all(torch.equal(back.state_dict()[name], p) for name, p in model.state_dict().items())
    torch.testing.assert_close(forward(back, stage_b), forward(model, stage_b))
    assert (back.lm_head.weight is back.wte.weight) == tied
    low = load_model(tmp_path, "cpu", torch.bfloat16)
    assert low.compute_dtype == low.wte.weight.dtype == torch.bfloat16
    assert {b.dtype for b in low.buffers()} == {torch.float32}  # expert_bias, to the last bit
    assert all(torch.equal(a, b) for a, b in zip(low.buffers(), model.buffers(), strict=True))


def test_more_rounds_than_were_trained_begin_at_zero_and_fewer_are_cut(base):
    markers = load(base).markers
    assert torch.equal(load(base, n_rounds=4, n_last=1).markers, torch.cat([markers, torch.zeros(2, 64)]))
    assert torch.equal(load(base, n_rounds=1).markers, markers[:1])


def test_tensors_that_do_not_fit_are_named(base):
    whole = load_file(base / WEIGHTS)
    for words, change in {
        "norm_f.weight: shape [63] there, shape [64] in the model": {"norm_f.weight": torch.zeros(63)},
        f"weights {base} cannot be read": {"markers": torch.zeros(2, 63)},
        f"weights {base} cannot be read, is damaged": {"markers": torch.zeros(())},
        "norm_f.weight: no such tensor there": {"norm_f.weight": None},
        "other: shape [1] there, no such tensor in the model": {"other": torch.zeros(1)},
    }.items():
        save_file({k: v for k, v in (whole | change).items() if v is not None}, base / WEIGHTS)
        assert words in refusal(base)


NAN, INF = float("nan"), float("inf")
OTHER_TYPES = (torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.int8, torch.bool)


def test_numbers_that_no_model_computes_with_are_named(base, adapter):
    """This holds for weights and adapters, and for any place in a tensor."""
    for path, names in (
        (base / WEIGHTS, ["wte.weight", "layers.2.mlp.gate_up", "layers.1.mlp.expert_bias"]),
        (adapter / "adapter.safetensors", ["layers.3.attn.qkv.lora_B", "markers"]),
    ):
        whole = load_file(path)
        for name, value, at in zip(names, (NAN, INF, -INF), (-1, 0, whole[names[-1]].numel() // 2), strict=False):
            tensor = whole[name].clone()
            tensor.view(-1)[at] = value
            save_file(whole | {name: tensor}, path)
            assert f"{name} holds NaN or infinity" in refusal(adapter)
        for dtype in OTHER_TYPES:
            save_file(whole | {name: whole[name].to(dtype)}, path)
            assert f"{name} is stored as {dtype}" in refusal(adapter)
        save_file(whole, path)

    # each type that weights may have is read, and as large a number as it has
    whole = load_file(base / WEIGHTS)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        whole["norm_f.weight"] = torch.full([64], torch.finfo(dtype).max, dtype=dtype)
        save_file(whole, base / WEIGHTS)
        assert load(base).norm_f.weight[0] == torch.finfo(dtype).max


def test_a_tensor_lies_in_one_shard(base):
    """It must be in the shard that the index names; otherwise the tensor of another shard would be read instead."""
    whole = load_file(base / WEIGHTS)
    (base / WEIGHTS).unlink()
    a, b = (dict(list(whole.items())[k::2]) for k in (0, 1))
    places = dict.fromkeys(a, "a.safetensors") | dict.fromkeys(b, "b.safetensors")
    name, tensor = next(iter(a.items()))
    moved = places | {name: "b.safetensors"}
    absent = {k: v for k, v in places.items() if k != name}

    def write(b: dict, index: dict) -> None:
        save_file(a, base / "a.safetensors")
        save_file(b, base / "b.safetensors")
        write_json(base / f"{WEIGHTS}.index.json", {"weight_map": index})

    write(b, places)
    read = load(base).state_dict()
    assert all(torch.equal(read[k], v) for k, v in whole.items())
    twice = b | {name: tensor + 1}
    for held, index in ((twice, places), (twice, moved), (twice, absent), (b, moved)):
        write(held, index)
        assert f"holds {name}, whose place is" in refusal(base)


# changes of a config that no machine can run, or that cannot be meant
IMPOSSIBLE = [
    (dict(n_embd=2**20, n_expert=2**20, n_group=2**10), "2^40 numbers"),
    (dict(n_head=2**20, n_kv_head=2**20, head_dim=2**20), "2^40 numbers"),
    (dict(n_embd=2**20, d_dense=2**20), "2^40 numbers"),
    (dict(n_layer=1000), "n_layer, n_dense and n_shared are 0..256"),
    (dict(n_head=3), "n_kv_head divides n_head"),
    (dict(n_kv_head=0), "sizes"),
    (dict(rotary_dim=17), "rotary_dim"),
    (dict(n_group=8), "in twos"),
    (dict(topk_group=5), "topk_group"),
    (dict(n_active=5), "n_active"),
    (dict(n_last=9), "n_last is 1..4"),
    (dict(n_rounds=0), "n_rounds"),
    (dict(n_embd=60), "multiples of 8"),
    (dict(d_expert=20), "multiples of 8"),
    (dict(block_length=4097, max_len=200_000), "block_length is 1..4096"),
    (dict(mask_id=272), "vocabulary"),
    (dict(norm_eps=0), "above 0"),
    (dict(eos_id=257), "eos_id and mask_id, both 257, are two tokens"),
    (dict(eos_id=-1, mask_id=-1), "no eos_id and mask_id"),
    (dict(eos_id=255), "eos_id is 255, and"),
    (dict(mask_id=258), "mask_id is 258, and"),
    (dict(router="no such router"), "(see model.py), not 'no such router'"),
    (dict(router=5), "router is 5"),
]


@pytest.mark.parametrize("change, words", IMPOSSIBLE, ids=map(str, IMPOSSIBLE))
def test_a_config_that_cannot_be_meant_is_refused(change, words, base):
    write_json(base / "tokenizer.json", byte_spec())
    path = base / "config.json"
    assert load(base).cfg.router in ROUTERS
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    line = refusal(base)
    assert words in line and str(path) in line


def test_a_whole_number_may_stand_for_a_real_one(base):
    """Other programs write whole numbers so, and they may be large. Older configs name no router."""
    path = base / "config.json"
    raw = json.loads(path.read_text()) | dict(rope_theta=2**64, routed_scaling=2**64)
    assert raw.pop("router") == "grouped sigmoid"
    path.write_text(json.dumps(raw))
    model = load(base)
    assert model.cfg.rope_theta == model.cfg.routed_scaling == 2.0**64
    assert model.cfg.router == "grouped sigmoid"
    assert forward(model).isfinite().all()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
def test_what_has_no_end_is_not_read(base, adapter):
    """In the place of each file there is a pipe to which nobody writes."""
    write_json(base / "tokenizer.json", byte_spec())
    for folder in (base, adapter):
        for path in folder.iterdir():
            kept = path.read_bytes()
            path.unlink()
            os.mkfifo(path)
            assert f"{path} cannot be read, is damaged, or of another kind: it is not an" in refusal(adapter)
            path.unlink()
            path.write_bytes(kept)
    load(adapter)


def test_a_shard_lies_in_its_folder(base):
    shutil.copyfile(base / WEIGHTS, base.parent / "outside.safetensors")
    for wrong in ("../outside.safetensors", str(base.parent / "outside.safetensors"), "a\0.safetensors", 5):
        (base / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"wte.weight": wrong}}))
        assert "index.json" in refusal(base) or "no safetensors file at" in refusal(base)


def test_causal_stage_b_begins_as_the_bases_last_layers_and_a_map_of_zeros(base):
    """So at first the token that a position is shown changes nothing. The copy has its own memory: the base's layers do
    not change when it learns."""
    causal = load(base, stage_b="causal", n_rounds=1, n_last=3)
    assert causal.show.shape == (64, 64) and not causal.show.any()
    for own, of_base in zip(causal.layers_b, causal.layers[1:], strict=True):
        assert all(map(torch.equal, own.state_dict().values(), of_base.state_dict().values()))
        assert own.attn.qkv.weight.data_ptr() != of_base.attn.qkv.weight.data_ptr()

    # n cannot be changed after training
    save_model(causal, base)
    assert load(base).cfg.n_last == 3
    for n_last in (2, 4):
        assert f"has 3 layers of its own: give --n_last 3, not {n_last}" in refusal(base, n_last=n_last)


def test_a_stage_b_that_nobody_knows_is_refused(base, adapter):
    config = base / "config.json"
    for path, other in ((adapter / "adapter.json", "other"), (config, "other"), (config, [])):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"stage_b": other}))
        assert f"a Stage B of the kind {other!r}, and the kinds are paper, causal" in refusal(path.parent)


def test_who_judges_a_models_writing_is_told_by_the_rows_that_it_learned(base, adapter):
    """meta.json says it, a copy of the rows' file; for an adapter its base says it."""
    assert judge_of(base) == judge_of(adapter) == {}
    for judge in ({"names": "14.0.0"}, {"toy": "pairs", "V": 3, "m": 2, "n_ctx": 32}):
        write_json(base / "meta.json", dict(vocab_size=272, eos_id=256, mask_id=257, n_plain=256, judge=judge))
        assert judge_of(base) == judge_of(adapter) == judge
    write_json(base / "meta.json", dict(vocab_size=272, eos_id=256, mask_id=257, n_plain=256, judge=None))
    assert judge_of(base) == {}


# --- which weights a folder holds
def test_a_hash_worked_by_hand(tmp_path):
    """A file of 40,960 bytes: the hash reads its size, then 16 bytes at every tenth byte. These pieces overlap, and at
    the end they are shorter."""
    raw = torch.arange(40_960, dtype=torch.int64).remainder(251).to(torch.uint8).numpy().tobytes()
    (tmp_path / WEIGHTS).write_bytes(raw)
    pieces = b"".join(raw[10 * i : 10 * i + 16] for i in range(4096))
    assert weights_hash(tmp_path) == hashlib.sha256(b"40960" + pieces).hexdigest()[:16]

    # all shards are hashed, in the order of their names
    a, b = raw[:8192], raw[:4096]
    for name, content in (("a.safetensors", a), ("b.safetensors", b)):
        (tmp_path / name).write_bytes(content)
    shards = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps(shards))
    (tmp_path / WEIGHTS).unlink()
    of_a, of_b = (b"".join(file[n * i : n * i + 16] for i in range(4096)) for file, n in ((a, 2), (b, 1)))
    by_hand = hashlib.sha256(b"8192" + of_a + b"4096" + of_b).hexdigest()
    assert weights_hash(tmp_path) == by_hand[:16]


def test_the_shipped_adapters_stand_on_the_shipped_base():
    names = Path(__file__).parent.parent / "assets" / "names"
    folders = [path.parent for path in names.glob("*/adapter.json")]
    assert names / "paper" in folders
    for folder in folders:
        about = about_adapter(folder)
        assert base_of(folder) == names and about["base_hash"] == weights_hash(names)


# --- an adapter's folder
def test_an_adapter_brings_its_base_and_its_own_settings(base, adapter, tmp_path, monkeypatch):
    """adapter.json names its base relative to its own folder, so both folders may be moved together."""
    expected = forward(random_adapter(tmp_path / "again", base, n_last=3))
    monkeypatch.chdir(tmp_path)
    for folder in (base, adapter):
        shutil.copytree(folder, tmp_path / "moved" / folder.name)
    for folder in (adapter, Path("adapter"), Path("moved/adapter")):
        model = load(folder)
        assert model.cfg == replace(read_config(base), n_last=3) == replace(read_config(folder), n_last=3)
        torch.testing.assert_close(forward(model), expected)
    assert base_of(Path("moved/adapter")) == Path("moved/base") and base_of(base) == base
    low = load_model(adapter, "cpu", torch.bfloat16)
    assert {p.dtype for p in low.learned().values()} == {torch.float32}
    assert stored(low).keys() == stored(load(base)).keys()


@pytest.mark.parametrize("stage_b, n_rounds", [("paper", 3), ("causal", 1)])
def test_an_adapter_of_every_kind_comes_back(stage_b, n_rounds, base, tmp_path):
    """On one of the layers; what it says is flat, and all that is needed."""
    folder = tmp_path / "kind"
    model = random_adapter(folder, base, stage_b, n_last=1, n_rounds=n_rounds)
    about = dict(base="../base", base_hash=weights_hash(base), n_last=1, n_rounds=n_rounds, block_length=8)
    assert about_adapter(folder) == about | dict(stage_b=stage_b, lora_r=4)
    assert stage_b_of(folder) == stage_b
    back = load(folder)
    assert type(back) is checkpoint.STAGE_B[stage_b]
    assert back.cfg == model.cfg == replace(read_config(base), n_last=1, n_rounds=n_rounds)
    assert torch.equal(forward(back, stage_b), forward(model, stage_b))
    learned = load_file(folder / "adapter.safetensors")
    assert learned.keys() == model.learned().keys()

    # other sizes that are asked for do not count, because the adapter has its own; only block_length does
    assert load(folder, n_last=2, n_rounds=2).cfg == model.cfg
    assert load(folder, block_length=1).cfg == replace(model.cfg, block_length=1)


def test_an_adapter_without_its_base_on_another_one_or_of_another_kind_is_refused(base, adapter, tmp_path):
    base.rename(tmp_path / "gone")
    assert f"adapter.json names {base} as its base, and no model is there" in refusal(adapter)

    save_model(byte_model(seed=1), base)
    line = refusal(adapter)
    assert f"{adapter} was trained on other weights than {base} holds now" in line
    assert "delete base_hash from adapter.json" in line

    # half of an adapter
    save_model(byte_model(), base)
    half = load_file(adapter / "adapter.safetensors")
    del half["markers"]
    save_file(half, adapter / "adapter.safetensors")
    assert "markers: no such tensor there" in refusal(adapter)

    # of another kind than its tensors
    about = json.loads((adapter / "adapter.json").read_text())
    for change in ({"stage_b": "causal", "n_rounds": 1}, {"n_rounds": 1}, {"n_last": 3}, {"lora_r": 8}):
        (adapter / "adapter.json").write_text(json.dumps(about | change))
        assert "is this adapter whole?" in refusal(adapter)
    (adapter / "adapter.json").write_text(json.dumps(about | {"lora_r": 0}))
    assert "LoRA of rank 0: the rank is 1 or more" in refusal(adapter)


def test_a_small_model_takes_two_threads_if_they_sleep(monkeypatch):
    """Of eight; and as many as OMP_NUM_THREADS says, if it is set."""
    monkeypatch.setattr("lib.util.THREADS", 8)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS")
    for waits, n_embd in product(("PASSIVE", "ACTIVE", ""), (256, 257)):
        monkeypatch.setenv("OMP_WAIT_POLICY", waits)
        few_threads_if_small(n_embd)
    assert asked == [2, 8, 1, 8, 1, 8]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    few_threads_if_small(256)
    assert len(asked) == 6


def test_every_script_lets_threads_sleep():
    """OpenMP reads its policy when torch is imported."""
    ask = "import sys, os, lib.first; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout.split() == ["False", "PASSIVE"]
