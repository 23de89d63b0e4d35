"""The rows of Table 2: what each may do in the place of the paper's step. `pytest tests/released`"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import caller, names_folder, random_adapter, tiny_model

from decoding import Decoding
from evaluate import complete
from lib.names import draw_names
from lib.tokenizer import load_tokenizer
from lib.util import Mistake
from released import ablation
from released.ablation import BASE, COCOMMIT, MECHANISM, ROWS, decoder_of, row_of
from sample import denoise


def one_step(z: list[int], row: str, sure: tuple[float, ...] = (9.0,) * 5):
    """Five positions of ten tokens, id 9 is the mask: Stage A is sure of token 7, and Stage B of token 5 -> the step,
    and which positions were marked."""
    a, b = (torch.tensor([sure])[..., None] * F.one_hot(torch.tensor([[token] * 5]), 10) for token in (7, 5))
    model = SimpleNamespace(cfg=SimpleNamespace(mask_id=9), logits=lambda states: states)
    marked = []
    engine = SimpleNamespace(model=model, stage_a=lambda z: (a, a))
    engine.stage_b = lambda h, marks, tokens: marked.extend(marks.int().tolist()) or b
    d, step = decoder_of(row, 1)
    done = step(engine, torch.tensor([z]), torch.zeros(1, 5, dtype=torch.bool), torch.zeros(1, 2, 5), d)
    return done, marked


@pytest.mark.parametrize("row, fill, edit", [
    ("Stage B, gated edits", 5, 5),
    ("B fills, A edits", 5, 7),
    ("A fills, B edits", 7, 5),
    ("adapter, Stage B off", 7, 7),
    ("Stage B where several are", 5, 5),
    ("Stage B where one mask is filled", 7, 7),
])  # fmt: skip
def test_whose_logits_fill_and_whose_edit(row, fill, edit):
    done, _ = one_step([9, 9, 1, 2, 3], row)
    assert done.after.tolist() == [[fill, fill, edit, edit, edit]]
    assert done.bundle.tolist() == [[True, True, False, False, False]]
    assert done.partial.tolist() == [0.0 if row == "adapter, Stage B off" else 1.0] and not done.over.any()

    # without a bundle Stage A edits alone
    done, _ = one_step([1, 1, 1, 2, 7], row)
    assert done.after.tolist() == [[7] * 5] and done.partial.tolist() == [0.0]


@pytest.mark.parametrize("row, marked", [
    (COCOMMIT, [1, 0, 0, 0, 0]),
    ("every mask marked", [1, 1, 1, 0, 0]),
    ("only other masks marked", [0, 1, 1, 0, 0]),
    ("Stage B without marker", [0, 0, 0, 0, 0]),
])  # fmt: skip
def test_which_positions_are_marked(row, marked):
    """Three masks, of which Stage A is sure of one."""
    done, found = one_step([9, 9, 9, 1, 2], row, (9.0, 1.0, 1.0, 9.0, 9.0))
    assert found == [marked] and done.bundle.int().tolist() == [[1, 0, 0, 0, 0]]
    assert done.after.tolist() == [[5, 9, 9, 5, 5]]


def test_where_one_mask_is_filled():
    assert one_step([9, 1, 1, 2, 3], "Stage B where one mask is filled")[0].after.tolist() == [[5] * 5]
    assert one_step([9, 1, 1, 2, 3], "Stage B where several are")[0].after.tolist() == [[7] * 5]


def test_every_row_differs_from_the_released_quality_setting_as_the_paper_says():
    settings = {name: decoder_of(name, 2) for name in MECHANISM}
    assert settings["entropy selection, same size"][0].select == "entropy"
    d, step = settings[COCOMMIT]
    assert (d.n_rounds, d.tau_m2t, d.tau_t2t, step) == (2, 0.7, 0.0, denoise)
    assert len({(*of, MECHANISM[name][0]) for name, of in settings.items()}) == len(settings) == 17


def test_which_row_a_run_decodes_by():
    base = tiny_model()
    base.markers.data.zero_()
    adapter = tiny_model()
    assert row_of(base) == BASE
    assert row_of(adapter) == COCOMMIT
    assert row_of(adapter, "adapter, Stage B off") == "adapter, Stage B off"
    with pytest.raises(Mistake, match="is about the adapter, and this is the base"):
        row_of(base, COCOMMIT)


def test_the_table(tmp_path, monkeypatch, capsys):
    """From the command line, of a base and an adapter with random weights; and one row as its judge finds it."""
    base = names_folder(tmp_path / "base", n_layer=2, n_last=1)
    adapter = tmp_path / "adapter"
    model = random_adapter(adapter, base)
    monkeypatch.setattr(ablation, "NAME_LENGTH", 8)
    call = caller(ablation, monkeypatch, capsys)
    lines = call("--ckpt", adapter, "--device", "cpu", "--prompts", 2).splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == [*ROWS]

    tokenizer = load_tokenizer(base)
    found = complete(model, tokenizer, draw_names(2, tokenizer), Decoding(gen_length=8, n_rounds=2))
    (line,) = [line for line in lines if line.startswith(COCOMMIT)]
    figures = [f"{found[figure]:.3f}" for figure in ("exist", "forwards", "full")]
    assert line.split()[-5:] == [*figures, "91.13", "0.34"]

    assert "is not an adapter" in call.fails("--ckpt", base)
