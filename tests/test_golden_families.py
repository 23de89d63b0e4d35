"""Tiny-A2D and SDAR: their official code, recorded, and other forms of them. `pytest tests/test_golden_families.py`"""

import json
from dataclasses import replace

import pytest
import torch
from common import ROOT, traced
from test_convert import bits, changed

import convert_weights
import sample
from checkpoint import load_model, read_config
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


# --- other forms, and what is refused
def untied(t: dict, c: dict, s: dict) -> None:
    """As a newer transformers writes Tiny-A2D. Its tokenizer lacks the mask, whose id is then the first free one."""
    t["lm_head.weight"] = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
    c |= {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}
    del c["rope_theta"]
    s["added_tokens"] = [token | {"id": i} for i, token in enumerate(s["added_tokens"], 300) if i != 301]
    c["block_size"] = 4


def tied(t: dict, c: dict, s: dict) -> None:
    t["lm_head.weight"] = t["model.embed_tokens.weight"].clone()
    c |= {"tie_word_embeddings": True, "block_size": 4, "rope_theta": 5e3}


@pytest.mark.parametrize(("name", "change"), [("golden_a2d", untied), ("golden_sdar", tied)])
def test_other_forms_of_a_release(name, change, tmp_path):
    src, ours = changed(tmp_path / "src", name, change), tmp_path / "ours"
    convert_weights.convert(src, ours)
    cfg, tokenizer = read_config(ours), load_tokenizer(ours)
    assert (cfg.block_length, cfg.rope_theta, cfg.tied) == (4, 5e3, change is tied)
    ends = (302, 304) if change is untied else (300, 301)  # config.json's eos, and the mask
    assert (cfg.eos_id, cfg.mask_id) == (tokenizer.eos_id, tokenizer.mask_id) == ends
    assert tokenizer.decode([72, *ends]) == "i"

    to_hf(ours, tmp_path / "back")
    there = bits(src)
    if change is tied:
        del there["lm_head.weight"]  # it is the embedding
    assert bits(tmp_path / "back") == there


REFUSED = {
    "model_type = 'sdar_moe'": lambda t, c, s: c.update(model_type="sdar_moe"),
    "use_sliding_window = True": lambda t, c, s: c.update(use_sliding_window=True),
    "unknown field quantization_config": lambda t, c, s: c.update(quantization_config={"bits": 4}),
    "an mdlm model by its name": lambda t, c, s: c.update(_name_or_path="x/Qwen3-0.6B-diffusion-mdlm-v0.1"),
    "block_size is None": lambda t, c, s: c.pop("block_size"),
    "token 5, which should be <|mask|>": lambda t, c, s: c.update(mask_token_id=5) or s["added_tokens"].pop(1),
    "there is no <|mask|>": lambda t, c, s: c.pop("mask_token_id") and s["added_tokens"].pop(1),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_by_name(says, tmp_path):
    src = changed(tmp_path / "src", "golden_sdar", REFUSED[says])
    with pytest.raises(Mistake) as mistake:
        convert_weights.convert(src, tmp_path / "out")
    assert says in str(mistake.value)
    assert not (tmp_path / "out" / "config.json").exists()
