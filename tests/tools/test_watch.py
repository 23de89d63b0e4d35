"""What --watch shows of a step, by hand. `pytest tests/tools/test_watch.py`"""

from types import SimpleNamespace

import pytest
import torch

from lib.util import MASK
from tools.watch import END, LEGEND, Screen, piece

PIECES = {4: b" San", 5: b" York", 6: b" New", 7: b" Francisco"}
TOKENIZER = SimpleNamespace(token_bytes=PIECES, special={}, decode=lambda ids: "In\x1b[2J the")

# Stage B writes "New", where Stage A says "San"; the last step edits, and Stage A would have written as much
PAPER = [
    dict(after=[6, 9, 9, 8], token_a=[4, 5, 5, 8], bundle=[1, 0, 0, 0], edited=[0, 0, 0, 0], partial=1.0),
    dict(after=[4, 5, 9, 8], token_a=[4, 5, 5, 8], bundle=[0, 1, 0, 0], edited=[1, 0, 0, 0], partial=0.0),
]
# after San it reads York, and writes Francisco and the end; it would not be sure of the last token
CAUSAL = [dict(after=[4, 7, 8, 9], token_a=[4, 5, 5, 8], bundle=[1, 1, 1, 0], edited=[0] * 4, partial=3.0)]
OF_PAPER = [
    f"step   1  In<U+001B>[2J the[ New](A:  San){MASK}{MASK}{END}  1 pass of Stage B",
    f"step   2  In<U+001B>[2J the{{ San}}[ York]{MASK}{END}",
]
OF_CAUSAL = [f"step   1  In<U+001B>[2J the[ San][ Francisco](A:  York)[{END}](A:  York){MASK}  3 passes of Stage B"]


@pytest.mark.parametrize("steps, tokenizer, lines", [
    (PAPER, TOKENIZER, OF_PAPER),
    (CAUSAL, TOKENIZER, OF_CAUSAL),
    (PAPER[1:], None, [f"step   1  1 2 {{4 }}[5 ]{MASK} {END} "]),  # numbers stand apart
])  # fmt: skip
def test_a_step_is_a_line(steps, tokenizer, lines, capsys):
    screen = Screen(tokenizer, mask_id=9, eos_id=8)
    for step in steps:
        now = SimpleNamespace(**{name: torch.tensor([of]) for name, of in step.items()})
        screen.on_step([SimpleNamespace(ids=[1, 2])], now)
    assert capsys.readouterr().out.splitlines() == [LEGEND, *lines]


def test_a_special_token_gives_a_terminal_no_command():
    assert piece(SimpleNamespace(token_bytes={}, special={"<\x1b[2J>": 3}), 3) == "<<U+001B>[2J>"
