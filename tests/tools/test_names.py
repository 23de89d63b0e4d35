"""The judge of names: shares and forwards by hand, every decoder in the table. `pytest tests/tools/test_names.py`"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from common import approx, command_line, refused, tiny_model

import sample
from cache import Output
from checkpoint import PRESETS, new_model, save_model
from data import byte_tokenizer, generator, learn_bpe, write_json
from released.tables import wilson
from sample import Decoding
from tools import names


def test_the_verdict_is_the_character_or_that_there_is_none():
    assert sample.verdict("LATIN SMALL LETTER A") == "   a (U+0061)"
    assert sample.verdict("ARABIC LIGATURE LAM WITH WITH MEEM ISOLATED FORM") == "   (no such character)"
    assert "upper case" in sample.verdict("latin small letter a")


def test_shares_and_forwards_by_hand(monkeypatch):
    """Four prompts: A, A again, B, and a name that is none: 3 of 4 exist, 2 of 4 are different ones. Each takes 2 full,
    4 partial (n/L = 1/4) and 1 commit forwards for 2 tokens: 1 full a token, and (2 + 1 + 1) / 2 = 2 in all."""
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("LATIN SMALL LETTER ")
    answers = iter(["A", "A", "B", "?"])

    def written(model, prompts, d, seed):
        nfe = {"full": 2, "partial": 4, "commit": 1}
        return [Output([*tokenizer.encode(next(answers)), tokenizer.eos_id], dict(nfe)) for _ in prompts]

    monkeypatch.setattr(names, "generate", written)
    model = SimpleNamespace(cfg=SimpleNamespace(n_last=1, n_layer=4))
    r = names.judge(model, tokenizer, [prompt] * 4, Decoding(), 0)
    assert (r["exist"], r["distinct"]) == (0.75, 0.5) and (r["low"], r["high"]) == wilson(3, 4)
    assert (r["full"], r["partial"], r["all"]) == (1.0, 2.0, 2.0)


def test_prompts_are_the_first_third_and_a_function_of_their_key():
    tokenizer = byte_tokenizer()
    prompts = names.prompts_of(["ABCDEFG", "ABCDEF"], tokenizer, 2, "key")
    assert sorted(map(tokenizer.decode, prompts)) == ["AB", "ABC"]
    assert prompts == names.prompts_of(["ABCDEFG", "ABCDEF"], tokenizer, 5, "key")


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    spec = learn_bpe([], 258)
    write_json(folder / "tokenizer.json", spec)
    write_json(folder / "names.json", {"unidata_version": "0"})
    cfg = replace(PRESETS["tiny"], vocab_size=272, eos_id=256, mask_id=257, block_length=8, tokenizer="bpe", n_last=2)
    save_model(new_model(cfg, generator("names")), folder)
    return folder


def test_every_decoder_is_judged_on_held_out_and_trained_names(ckpt, tmp_path, monkeypatch, capsys):
    code, out, _ = command_line(names, monkeypatch, capsys, "--ckpt", ckpt, "--prompts", 2, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and {r["prompts"] for r in records} == {"held out", "trained"}
    assert [r["decoder"] for r in records[:9]] == [*names.FACTORISED, "released Q", "released S"]
    assert all(r["partial"] == 0 and r["all"] == approx(r["full"], abs=1) for r in records)
    code, out, _ = command_line(sample, monkeypatch, capsys, "--ckpt", ckpt, "--prompt", "LATIN ", "--gen_length", 4)
    assert code == 0 and "no such character" in out
    save_model(tiny_model(tokenizer="toy"), tmp_path / "toy")
    assert "toy" in refused(names, monkeypatch, capsys, "--ckpt", tmp_path / "toy")
