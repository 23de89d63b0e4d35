"""Tiny-A2D and SDAR: their official code, recorded, and other geometries by a forward of ten lines.
`pytest tests/test_golden_families.py`"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import ROOT, traced
from safetensors.torch import load_file, save_file
from test_convert import bits

import convert_weights
import sample
from checkpoint import load_model
from decoding import SETTINGS, decoding_of
from lib.tokenizer import load_tokenizer
from lib.util import Mistake
from released.chat import chat
from released.export import to_hf

DATA = ROOT / "tests" / "data"


@pytest.fixture(scope="module", params=["golden_sdar", "golden_a2d"])
def family(request, tmp_path_factory):
    """The released folder, ours, and what the official code made of it."""
    src, ours = DATA / request.param, tmp_path_factory.mktemp("family") / "ours"
    convert_weights.convert(src, ours, block_length=None if "sdar" in request.param else 8)
    return src, ours, json.loads((src / "expected.json").read_text())


@torch.no_grad()
def test_logits(family):
    _, ours, expected = family
    model = load_model(ours, "cpu", torch.float32)
    for case in expected["logits"]:
        ids = torch.tensor([case["ids"]])
        logits = model(ids, model.context(torch.ones_like(ids, dtype=torch.bool)))[0]
        close = dict(rtol=0, atol=5e-5)  # they are rounded to five and four digits
        torch.testing.assert_close(logits[-8:, :8], torch.tensor(case["last"]), **close)
        torch.testing.assert_close(logits.logsumexp(-1), torch.tensor(case["sums"]), rtol=0, atol=2e-4)
        assert logits.argmax(-1).tolist() == case["argmax"]


def test_sample_without_flags_is_the_official_decoder(family):
    """Token for token, and block for block where these were recorded."""
    src, ours, expected = family
    model = load_model(ours, "cpu", torch.float32)
    plain = decoding_of(sample.build_parser().parse_args(["--ckpt", str(ours)]), model)
    assert plain == SETTINGS["sdar" if "sdar" in src.name else "a2d"] and plain.tau_t2t is None
    model.cfg.eos_id = -1  # no token ended the official runs
    for case in expected["generate"]:
        rule = dict(tau_m2t=case["threshold"]) if "threshold" in case else dict(num_to_transfer=case["tokens_a_step"])
        d = replace(plain, gen_length=len(case["out"]) - len(case["prompt"]), **rule)
        [output], [steps] = traced(model, [case["prompt"]], d)
        assert [*output.prompt, *output.tokens] == case["out"]
        seen = [step["before"] for step in steps]
        assert seen == case["blocks"] if "blocks" in case else len(seen) == case["steps"]


def test_ids_template_and_the_way_back(family, tmp_path):
    src, ours, _ = family
    tokenizer = load_tokenizer(ours)
    assert (tokenizer.eos_id, tokenizer.mask_id) == (302, 301)  # <|im_end|>, as generation_config.json says
    for case in json.loads((src / "tokenizer_expected.json").read_text()):
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
    thinking = "" if "sdar" in src.name else "<think>\n\n</think>\n\n"
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + thinking
    decoder = load_model(ours, "cpu", torch.float32).cfg.decoder
    assert chat("Hi", decoder=decoder) == turn
    assert chat("Hi", "Be kind.", decoder) == "<|im_start|>system\nBe kind.<|im_end|>\n" + turn

    to_hf(ours, tmp_path / "back")
    assert bits(tmp_path / "back") == bits(src)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (src / name).read_bytes()


# --- other geometries, and what is refused
def changed(folder: Path, name: str, change) -> Path:
    """A golden checkpoint in another folder, after change(tensors, config, tokenizer)."""
    src = DATA / name
    tensors = load_file(src / "model.safetensors")
    config, spec = (json.loads((src / file).read_text()) for file in ("config.json", "tokenizer.json"))
    change(tensors, config, spec)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file, value in (("config.json", config), ("tokenizer.json", spec)):
        (folder / file).write_text(json.dumps(value))
    return folder


def random_weights(t: dict, c: dict, seed: int = 0) -> None:
    """Fresh tensors of the geometry in c: 6 query heads, 3 for keys and values, of 8 dims each."""
    c |= dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8, num_hidden_layers=2, intermediate_size=40)
    g = torch.Generator().manual_seed(seed)
    shapes = {"q_proj": (48, 64), "k_proj": (24, 64), "v_proj": (24, 64), "o_proj": (64, 48), "q_norm": (8,)}
    shapes |= {"k_norm": (8,), "gate_proj": (40, 64), "up_proj": (40, 64), "down_proj": (64, 40)}
    for name in [*t]:
        if ".layers.2." in name:
            del t[name]
            continue
        shape = shapes.get(name.split(".")[-2], t[name].shape)
        t[name] = torch.randn(shape, generator=g) * 0.2 + (len(shape) == 1)


def untied(t: dict, c: dict, s: dict) -> None:
    """As a newer transformers writes Tiny-A2D. Its tokenizer lacks the mask, whose id is then the first free one."""
    t["lm_head.weight"] = torch.empty(320, 64)
    random_weights(t, c)
    c |= {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": c.pop("rope_theta")}}
    s["added_tokens"] = [token | {"id": i} for i, token in enumerate(s["added_tokens"], 300) if i != 301]
    c["block_size"] = 4


def tied(t: dict, c: dict, s: dict) -> None:
    random_weights(t, c)
    t["lm_head.weight"] = t["model.embed_tokens.weight"].clone()
    c |= {"tie_word_embeddings": True, "block_size": 4, "rope_theta": 5000.0}


def forward(t: dict, c: dict, ids: torch.Tensor, B: int) -> torch.Tensor:
    """Qwen3 with blocks, in float64, by itself: ids (T,) -> logits (T, V)."""
    t = {name: tensor.double() for name, tensor in t.items()}
    T, D = len(ids), c["head_dim"]
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    angle = torch.arange(T)[:, None] * theta ** -(torch.arange(0, D, 2).double() / D)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # (T, 1, D / 2)
    sees = torch.arange(T)[:, None] // B >= torch.arange(T) // B

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], t[name + ".weight"], 1e-6)

    def rotate(x):
        y = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([y.real, y.imag], -1)

    x = t["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm")
        q, k, v = ((h @ t[f"{at}self_attn.{n}_proj.weight"].T).view(T, -1, D) for n in "qkv")
        q, k = rotate(norm(q, at + "self_attn.q_norm")), rotate(norm(k, at + "self_attn.k_norm"))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        score = torch.einsum("thd,shd->hts", q, k) / math.sqrt(D)
        y = torch.einsum("hts,shd->thd", score.masked_fill(~sees, -math.inf).softmax(-1), v).flatten(1)
        x = x + y @ t[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm")
        gate, up, down = (t[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return norm(x, "model.norm") @ t["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T


@pytest.mark.parametrize(("name", "change"), [("golden_a2d", untied), ("golden_sdar", tied)])
@torch.no_grad()
def test_other_geometries(name, change, tmp_path):
    src = changed(tmp_path / "src", name, change)
    convert_weights.convert(src, tmp_path / "ours")
    model = load_model(tmp_path / "ours", "cpu", torch.float32)
    assert (model.cfg.block_length, model.cfg.n_kv_head, model.cfg.tied) == (4, 3, change is tied)
    ends = (302, 304) if change is untied else (300, 301)  # config.json's eos, and the mask
    assert (model.cfg.eos_id, model.cfg.mask_id) == ends
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert (tokenizer.eos_id, tokenizer.mask_id) == ends and tokenizer.decode([72, *ends]) == "i"
    ids = torch.randint(300, (14,), generator=torch.Generator().manual_seed(1))
    ids[9:] = model.cfg.mask_id
    ours = model(ids[None], model.context(torch.ones(1, 14, dtype=torch.bool)))[0]
    config = json.loads((src / "config.json").read_text())
    reference = forward(load_file(src / "model.safetensors"), config, ids, B=4)
    torch.testing.assert_close(ours.double(), reference, rtol=0, atol=1e-4)

    to_hf(tmp_path / "ours", tmp_path / "back")
    there = bits(src)
    if change is tied:
        del there["lm_head.weight"]  # it is the embedding
    assert bits(tmp_path / "back") == there


def first(t: dict) -> str:
    return "model.layers.0.self_attn.q_proj.weight"


REFUSED = {
    "model_type = 'sdar_moe'": lambda t, c, s: c.update(model_type="sdar_moe"),
    "model_type = 'a2d-qwen2'": lambda t, c, s: c.update(model_type="a2d-qwen2"),
    "use_sliding_window = True": lambda t, c, s: c.update(use_sliding_window=True),
    "layer_types = ['full_attention', 'sliding_attention']": lambda t, c, s: c.update(
        layer_types=["full_attention", "sliding_attention", "full_attention"]
    ),
    "rope_scaling = {'factor': 4}": lambda t, c, s: c.update(rope_scaling={"factor": 4}),
    "rope_type = 'yarn'": lambda t, c, s: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
    "rope_theta = 1000000.0, and 5": lambda t, c, s: c.update(rope_parameters={"rope_theta": 5}),
    "attention_bias = True": lambda t, c, s: c.update(attention_bias=True),
    "k_proj.bias: shape [32] there, no such tensor": lambda t, c, s: t.update(
        {"model.layers.0.self_attn.k_proj.bias": torch.zeros(32)}
    ),
    "is stored as torch.int8": lambda t, c, s: t.update({first(t): t[first(t)].to(torch.int8)}),
    "unknown field quantization_config": lambda t, c, s: c.update(quantization_config={"bits": 4}),
    "an mdlm model by its name": lambda t, c, s: c.update(_name_or_path="x/Qwen3-0.6B-diffusion-mdlm-v0.1"),
    "block_size is None": lambda t, c, s: c.pop("block_size"),
    "lm_head.weight differs from model.embed_tokens.weight": lambda t, c, s: c.update(tie_word_embeddings=True),
    "token 5, which should be <|mask|>": lambda t, c, s: c.update(mask_token_id=5) or s["added_tokens"].pop(1),
    "its mask is token 301, and 303": lambda t, c, s: c.update(mask_token_id=303),
    "there is no <|mask|>": lambda t, c, s: c.pop("mask_token_id") and s["added_tokens"].pop(1),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_by_name(says, tmp_path):
    src = changed(tmp_path / "src", "golden_sdar", REFUSED[says])
    with pytest.raises(Mistake) as mistake:
        convert_weights.convert(src, tmp_path / "out")
    assert says in str(mistake.value)
    assert not (tmp_path / "out" / "config.json").exists()
