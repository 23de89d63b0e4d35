"""What makes the records of the results pages. `pytest tests/test_measure.py`"""

from dataclasses import replace

import pytest
import torch
from common import caller, names_folder, random_adapter

from checkpoint import load_model, save_model
from evaluate import LEFT
from experiments import measure
from experiments.measure import COMPARED, beam_by_token, mcnemar
from lib.names import draw_names
from lib.util import read_lines, write_json
from sample import generate


def test_mcnemars_p_by_hand():
    """Five of five alike: 2 / 32. Nine of ten: 2 (1 + 10) / 1,024."""
    assert [mcnemar(*counts) for counts in ((5, 0), (0, 5), (1, 9), (2, 2), (0, 0))] == [1 / 16, 1 / 16, 11 / 512, 1, 1]


@pytest.mark.parametrize("prompt", ([70, 71, 72], [90]))
def test_a_beam_by_token_is_greedy_with_one_text_and_exact_with_all(prompt, tmp_path, monkeypatch):
    """In blocks of one: with one text it writes what sample.py writes; with as many texts as there are tokens it finds
    the likeliest of all pairs, or a text that ends after one token."""
    names_folder(tmp_path, n_layer=2, n_last=1)
    one = load_model(tmp_path, "cpu", torch.float32, block_length=1)
    monkeypatch.setattr(measure, "NAME_LENGTH", 2)
    [greedy] = generate(one, [prompt], replace(LEFT, gen_length=2))
    assert beam_by_token(one, prompt, 1) == (prompt + greedy.tokens, len(greedy.tokens))

    def log_p(texts: torch.Tensor) -> torch.Tensor:
        """The next token after each text: a pass of the model with blocks of one, whose last position is a mask."""
        ids = torch.cat([texts, torch.full_like(texts[:, :1], one.cfg.mask_id)], dim=1)
        found = one(ids, one.context(torch.ones_like(ids, dtype=torch.bool)))[:, -1].log_softmax(-1)
        found[:, one.cfg.mask_id] = -torch.inf
        return found

    V = one.cfg.vocab_size
    first = log_p(torch.tensor([prompt]))[0]
    pairs = first[:, None] + log_p(torch.tensor([[*prompt, token] for token in range(V)]))
    ends = first[one.cfg.eos_id]
    pairs[one.cfg.eos_id] = -torch.inf
    best = [one.cfg.eos_id] if ends > pairs.max() else [int(pairs.argmax()) // V, int(pairs.argmax()) % V]
    assert beam_by_token(one, prompt, V)[0] == prompt + best


def test_controls_are_pairs_of_rows(tmp_path, monkeypatch, capsys):
    base = names_folder(tmp_path / "base", n_layer=2, n_last=1)
    random_adapter(tmp_path / "adapter", base)
    monkeypatch.setattr(measure, "NAME_LENGTH", 4)
    monkeypatch.setattr(measure, "draw_names", lambda n, tokenizer: draw_names(3, tokenizer))
    out = tmp_path / "records.jsonl"
    flags = ["--system", "draft", "--seed", 0, "--out", out]
    caller(measure, monkeypatch, capsys)("controls", "--ckpt", tmp_path / "adapter", *flags)
    records = read_lines(out, {"gate": float, "gained": int})
    assert [(r["gate"], r["row"], r["against"]) for r in records] == COMPARED


def test_the_rows_of_a_base_of_a_left_to_right_model_and_of_adapters(tmp_path, monkeypatch, capsys):
    """A left-to-right model has learned in blocks of one alone, and has that way alone."""
    base, left = (names_folder(tmp_path / name, n_layer=2, n_last=1) for name in ("base", "left"))
    for folder in (base, left):  # a base has no Stage B
        model = load_model(folder, "cpu", torch.float32)
        model.markers.data.zero_()
        save_model(model, folder)
    write_json(left / "train.json", {"one_by_one": 1.0})
    random_adapter(tmp_path / "paper", base)
    random_adapter(tmp_path / "causal", base, "causal", n_rounds=1)
    monkeypatch.setattr(measure, "NAME_LENGTH", 4)
    monkeypatch.setattr(measure, "draw_names", lambda n, tokenizer: draw_names(2, tokenizer))
    last = {"base": "in blocks of one, a beam of 4", "left": "in blocks of one token"}
    last |= {"paper": "Stage B, gates .7 and .5", "causal": "Stage B, the longest run above 0.5"}
    counts = dict(base=10, left=1, paper=5, causal=3)
    for name, row in last.items():
        out = tmp_path / f"{name}.jsonl"
        flags = ["--ckpt", tmp_path / name, "--system", name, "--seed", 0, "--out", out]
        caller(measure, monkeypatch, capsys)("names", *flags)
        records = read_lines(out, {"exist": float})
        assert (len(records), records[-1]["row"]) == (counts[name], row)
