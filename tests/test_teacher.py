"""A teacher's rows: what a beam writes. `pytest tests/test_teacher.py`"""

import numpy as np
import pytest
import torch
from common import EOS, MASK, V, caller, prompt, random_adapter, tiny_model

import prepare
from checkpoint import save_model
from decoding import Decoding
from lib.rows import HOLES_ALONE, Meta, read_split, write_meta, write_rows
from lib.util import write_json
from prepare import beam_search
from sample import generate

META = Meta(V, EOS, MASK, n_plain=MASK)


def log_p(model, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the token after each row: (R, T) -> (R, V)."""
    x = torch.cat([rows, torch.full_like(rows[:, :1], MASK)], dim=1)
    logits = model(x, model.context(torch.ones_like(x, dtype=torch.bool)))[:, -1]
    return logits.index_fill(-1, torch.tensor(MASK), -torch.inf).log_softmax(-1)


@torch.no_grad()
def likeliest_of_all(model, start: list[int]) -> list[int]:
    """The likeliest of all texts of two tokens, or of only eos; [] if it does not end with eos."""
    first = log_p(model, torch.tensor([start]))[0]  # (V,)
    second = log_p(model, torch.tensor([[*start, a] for a in range(V)]))
    both = first[:, None] + second
    both[EOS] = -torch.inf
    both[EOS, 0] = first[EOS]
    a, b = divmod(int(both.argmax()), V)
    text = [EOS] if a == EOS else [a, b]
    return text if text[-1] == EOS else []


def test_a_beam_that_keeps_all_texts_finds_the_likeliest():
    model = tiny_model(block_length=1)
    model.lm_head.weight.data[EOS] *= 1.5  # ends are likely, and unlikely, often enough
    prompts = [prompt(1 + r % 5, seed=r) for r in range(60)]
    found = beam_search(model, prompts, beam=V, gen_length=2)
    assert found == [likeliest_of_all(model, start) for start in prompts]
    assert {len(text) for text in found} == {0, 1, 2}


def test_a_beam_of_one_writes_the_likeliest_token_each_time():
    model = tiny_model(block_length=1)
    model.lm_head.weight.data[EOS] *= 1.5
    prompts = [prompt(1 + r % 5, seed=r) for r in range(20)]
    outputs = generate(model, prompts, Decoding(gen_length=12, tau_joint=1.0, tau_t2t=None, n_rounds=0))
    ended = [o.tokens if o.tokens[-1] == EOS else [] for o in outputs]
    assert beam_search(model, prompts, beam=1, gen_length=12) == ended
    assert 3 < sum(map(bool, ended)) < 18


def test_beginnings_are_continued_in_parts_that_fit_into_memory(monkeypatch):
    """With beams of 2 and 5 tokens to write, a part of at most 60 tokens has 4 prompts of up to 2 tokens, or 2 of up to
    10, or one. It is halved until it fits."""
    monkeypatch.setattr(prepare, "AT_ONCE", 4)
    monkeypatch.setattr(prepare, "TOKENS", 60)
    prompts = [[0] * n for n in (1, 1, 1, 1, 5, 10, 10, 10, 70)]
    parts = [[len(prompt) for prompt in some] for some in prepare.some_at_once(prompts, beam=2, gen_length=5)]
    assert parts == [[1, 1, 1, 1], [5, 10], [10], [10], [70]]


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    """Forty texts, and the folder of rows in which a model has continued their beginnings."""
    model = tiny_model()
    model.lm_head.weight.data[EOS] *= 1.5
    save_model(model, tmp_path / "base")
    texts = [np.array([*prompt(4, seed=r), EOS]) for r in range(40)]
    for split in ("train", "val"):
        write_rows(tmp_path / "text", split, texts, [-1] * 40, V)
    write_json(tmp_path / "text" / "tokenizer.json", {})
    write_meta(tmp_path / "text", META)

    # they are learned on the model that wrote them, or on the base of the adapter that did
    random_adapter(tmp_path / "adapter", tmp_path / "base")
    run = caller(prepare, monkeypatch, capsys)
    for name, out_dir in (("adapter", "by_adapter"), ("base", "written")):
        argv = ("--written_by", tmp_path / name, "--gen_length", 6, "--out", tmp_path / out_dir)
        out = run(tmp_path / "text", *argv)
        command = f"python train.py --data {tmp_path}/{out_dir} --config configs/text.toml --init_from {tmp_path}/base"
        assert out.endswith(f": {command}\n")
    return texts, tmp_path / "written"


def test_the_rows_are_completions_and_half_of_the_text(written):
    """A completion continues the beginning of a text, which is its prompt, and ends. Rows of the text teach only to
    fill holes."""
    texts, folder = written
    ids, starts, prompts = read_split(folder / "train.safetensors", V)
    rows = [ids[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert rows[-20:] == [text.tolist() for text in texts[::2]] and prompts[-20:].tolist() == [HOLES_ALONE] * 20

    beginnings = {tuple(text[:n]) for text in texts for n in (1, 2, 3)}
    completions = list(zip(rows[:-20], prompts[:-20].tolist(), strict=True))
    assert completions and all(row[-1] == EOS and tuple(row[:n]) in beginnings for row, n in completions)
