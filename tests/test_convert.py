"""Weight conversion: every tensor in its place and back, and every token id. `pytest tests/test_convert.py`"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import GOLDEN, caller
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import convert_weights
from checkpoint import load_model, read_config
from config import PRESETS
from lib.tokenizer import bpe_tokenizer
from released import export
from released.chat import chat

TOKENS = json.loads((GOLDEN / "tokenizer_expected.json").read_text())


@pytest.fixture
def run(monkeypatch, capsys):
    return caller(convert_weights, monkeypatch, capsys)


def changed(folder: Path, name: str, change) -> Path:
    """A released checkpoint: a golden one in another folder, after change(tensors, config, tokenizer)."""
    src = GOLDEN.parent / name
    tensors = {k: v for path in src.glob("model*.safetensors") for k, v in load_file(path).items()}
    config, spec = (json.loads((src / file).read_text()) for file in ("config.json", "tokenizer.json"))
    change(tensors, config, spec)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file, value in (("config.json", config), ("tokenizer.json", spec)):
        (folder / file).write_text(json.dumps(value))
    return folder


def bits(folder: Path) -> dict[str, tuple]:
    """Every tensor of a folder as (dtype, shape, bytes)."""
    found = {}
    for path in folder.glob("*.safetensors"):
        if path.name != "markers.safetensors" and not path.name.startswith(("expected", "adapter")):
            for k, v in load_file(path).items():
                found[k] = (v.dtype, v.shape, v.contiguous().view(torch.uint8).numpy().tobytes())
    return found


# --- tokenizer
def test_tokenizer_ids(golden):
    tokenizer = bpe_tokenizer(golden / "tokenizer.json")
    for case in TOKENS["strings"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        plain = case["text"]
        for name in TOKENS["special_ids"]:
            plain = plain.replace(name, "")
        assert tokenizer.decode(case["ids"]) == plain
    for case in TOKENS["chats"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        roles = [m["role"] for m in case["messages"]]
        if case["add_generation_prompt"] and roles in (["user"], ["system", "user"]):
            *system, user = (m["content"] for m in case["messages"])
            assert tokenizer.encode(chat(user, *system)) == case["ids"]


# --- what is where, and the way back
def tied(t: dict, c: dict, s: dict) -> None:
    """Tied, and in bfloat16."""
    del t["lm_head.weight"]
    t |= {k: v.bfloat16() for k, v in t.items()}
    c["tie_word_embeddings"] = True


def biased(t: dict, c: dict, s: dict) -> None:
    """In bfloat16 but for the routers' biases, with biases elsewhere, too, and with other fields in the config."""
    g = torch.Generator().manual_seed(1)
    for i in range(4):
        t[f"model.layers.{i}.attention.query_key_value.bias"] = torch.randn(128, generator=g)
        t[f"model.layers.{i}.attention.dense.bias"] = torch.randn(64, generator=g)
    t |= {k: v if k.endswith("expert_bias") else v.bfloat16() for k, v in t.items()}
    del c["rotary_dim"]
    c |= dict(use_bias=True, use_qkv_bias=True, use_qk_norm=True)
    c |= dict(eos_token_id=305, bos_token_id=None, torch_dtype="float32")


@pytest.mark.parametrize("form, n_tensors", [(tied, 46), (biased, 55)])
def test_every_tensor_is_in_its_place_and_comes_back(form, n_tensors, run, golden, tmp_path, monkeypatch, capsys):
    src, ours, back = (tmp_path / folder for folder in ("src", "ours", "back"))
    out = run("--src", changed(src, "golden_a", form), "--out", ours)
    tensors = load_file(src / "model.safetensors")
    assert f"{n_tensors} tensors in 6 shards" in out
    assert {dtype for dtype, *_ in bits(ours).values()} == {tensor.dtype for tensor in tensors.values()}
    model = load_model(ours, "cpu", torch.float32)
    assert not model.markers.any()
    assert replace(model.cfg, tied=False, qkv_bias=False, proj_bias=False) == read_config(golden)
    for side, rows in (("gate", slice(0, 16)), ("up", slice(16, 32))):  # 10 sorts before 2 in the index
        expert = tensors[f"model.layers.2.mlp.experts.10.{side}_proj.weight"].float()
        assert torch.equal(model.state_dict()["layers.2.mlp.gate_up"][10, rows], expert)
    assert (model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()) == (form is tied)
    assert "already holds" in run.fails("--src", src, "--out", ours)

    # the way back
    caller(export, monkeypatch, capsys)("--to", "hf", "--src", ours, "--out", back)
    assert bits(back) == bits(src)
    for file in ("config.json", "tokenizer.json"):
        assert (back / file).read_bytes() == (src / file).read_bytes()
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors.values())
    for k, file in index["weight_map"].items():
        with safe_open(back / file, "pt") as f:
            assert k in f.keys() and f.metadata() == {"format": "pt"}  # noqa: SIM118 (a safe_open is no dict)


def test_the_preset_is_the_release():
    parts = {}
    for planned in sum(convert_weights.plan(PRESETS["llada2.1-mini"]), []):
        parts |= planned.released
    numbers = {name: torch.Size(part).numel() for name, part in parts.items()}
    biases = sum(n for name, n in numbers.items() if name.endswith("expert_bias"))
    total = sum(numbers.values())
    assert len(parts) == 14_813
    assert (total - biases, biases, 2 * total + 2 * biases) == (16_255_638_528, 4_864, 32_511_296_512)
    assert parts["model.word_embeddings.weight"] == parts["lm_head.weight"] == [157184, 2048]
    assert parts["model.layers.7.attention.query_key_value.weight"] == [3072, 2048]
    assert parts["model.layers.19.mlp.experts.255.down_proj.weight"] == [2048, 512]


# --- checkpoints that are not what they should be
K, V = "model.layers.2.mlp.experts.9.up_proj.weight", torch.zeros(16, 64)
# what is done to the tensors, to config.json and to tokenizer.json
REFUSED = [
    (lambda t, c, s: t.pop(K), [K, "no such tensor there"]),
    (lambda t, c, s: t.update({K: V.to(torch.float8_e4m3fn)}), [K, "float8_e4m3fn"]),
    (lambda t, c, s: c.update(partial_rotary_factor=1.0), ["rotary_dim and partial_rotary_factor disagree"]),
    (lambda t, c, s: s["added_tokens"][-1].update(id=320), ["vocab_size is 320", "tokenizer.json"]),
    (lambda t, c, s: c.update(rope_parameters={"rope_type": "yarn"}), ["rope_type = 'yarn' is not implemented"]),
]


@pytest.mark.parametrize("change, says", REFUSED, ids=[says[0] for _, says in REFUSED])
def test_what_is_not_what_it_should_be_is_refused(change, says, run, tmp_path):
    line = run.fails("--src", changed(tmp_path / "src", "golden_a", change), "--out", tmp_path / "out")
    assert all(word in line for word in says), line
    assert not (tmp_path / "out" / "config.json").exists()
