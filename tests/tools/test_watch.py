"""What --watch shows of a step, by hand. `pytest tests/tools/test_watch.py`"""

import sys
from types import SimpleNamespace

import pytest
import torch

from decoding import Decoding
from lib.util import MASK
from tools import watch
from tools.watch import END, Screen, piece, width

PIECES = {4: b" San", 5: b" York", 6: b" New", 7: b" Francisco"}
TOKENIZER = SimpleNamespace(token_bytes=PIECES, special={}, decode=lambda ids: "In the")


@pytest.fixture
def shown(capsys):
    """shown(steps, d, tokenizer): the lines of one row, without the legend."""

    def show(steps: list[dict], d: Decoding, tokenizer: SimpleNamespace | None) -> list[str]:
        rows = [SimpleNamespace(number=0, ids=[1, 2], d=d)]
        screen = Screen(1, tokenizer, 9, 8)
        for step in steps:
            screen.on_step(rows, SimpleNamespace(**{name: torch.tensor([of]) for name, of in step.items()}))
        return capsys.readouterr().out.splitlines()[1:]

    return show


# Stage B writes "New", where Stage A says "San"; the last step edits, and Stage A would have written as much
PAPER = [
    dict(after=[6, 9, 9, 8], token_a=[4, 5, 5, 8], bundle=[1, 0, 0, 0], edited=[0, 0, 0, 0], partial=1.0),
    dict(after=[4, 5, 9, 8], token_a=[4, 5, 5, 8], bundle=[0, 1, 0, 0], edited=[1, 0, 0, 0], partial=1.0),
]
# after San it reads York, and writes Francisco and the end; it would not be sure of the last token
CAUSAL = [
    dict(z=[9, 9, 9, 9], after=[4, 7, 8, 9], token_a=[4, 5, 5, 8], bundle=[1, 1, 1, 0], edited=[0] * 4, partial=3.0),
    dict(z=[4, 7, 8, 9], after=[4, 7, 8, 8], token_a=[4, 5, 8, 8], bundle=[0, 0, 0, 1], edited=[0] * 4, partial=1.0),
]


def test_steps_of_the_paper_through_a_pipe(shown):
    """A step is a line; numbers stand apart."""
    lines = [f"[ New](A:  San){MASK}{MASK}{END}", f"{{ San}}[ York]{MASK}{END}"]
    assert shown(PAPER, Decoding(), TOKENIZER) == [f"step   1  In the{lines[0]}", f"step   2  In the{lines[1]}"]


def test_a_mended_draft_through_a_pipe(shown):
    """What was written, what Stage A's draft was, and in how many passes."""
    assert shown(CAUSAL, Decoding(tau_t2t=None), TOKENIZER) == [
        f"step   1  In the[ San][ Francisco](A:  York)[{END}](A:  York){MASK}  3 passes",
        f"step   2  In the San Francisco{END}[{END}]  1 pass",
    ]


def test_a_special_token_gives_a_terminal_no_command():
    assert piece(SimpleNamespace(token_bytes={}, special={"<\x1b[2J>": 3}), 3) == "<<U+001B>[2J>"


def test_a_line_is_drawn_again_over_all_of_its_columns(shown, monkeypatch):
    """With the paper's gates in a terminal of 20 columns, the first step of 27 takes two lines, and so the cursor goes
    up two. A character may take two columns, or none. A text that is too long loses its beginning."""
    assert width("a漢e\u0301\x1b[2mb\x1b[0m") == 5
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "")  # empty means unset
    monkeypatch.setattr(watch, "PACE", 0)
    monkeypatch.setattr(watch.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=20))
    first, second = shown(PAPER, Decoding(), None)
    assert width(first) == len("step   1  [6 ](A: 4 )▒ ▒ ∎ ") == 27
    assert second.startswith("\x1b[2F\x1b[Jstep   2")

    screen = Screen(1, None, 9, 8)
    assert screen.line("a漢字b", "." * 7) == "step   0  字b......."
    assert screen.line("a漢字b", "." * 12) == "step   0  ............"
