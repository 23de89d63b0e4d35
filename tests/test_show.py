"""What a decode shows of itself: tokens that can be seen, and its steps. `pytest tests/test_show.py`"""

from dataclasses import replace

from lib.show import MASK, show_steps
from lib.tokenizer import byte_tokenizer

PIECES = {"0": "In", "1": "·the", "2": "·city", "3": "·of", "4": "·San", "5": "·York", "6": "·New", "9": MASK}


def test_every_character_of_a_token_can_be_seen():
    tok = byte_tokenizer()
    ids = [*b" \n\t\r\0A<", *"é".encode(), tok.eos_id, 260]
    assert list(map(tok.piece, ids)) == [*"·↵⇥␍", "<U+0000>", "A", "<", "<C3>", "<A9>", "<|endoftext|>", "<260>"]
    words = {0: " e\u0301".encode(), 1: b"a\xe2\x82", 2: "\u0301\u202e".encode()}
    tok = replace(tok, token_bytes=words)
    assert list(map(tok.piece, words)) == ["·e\u0301", "a<E2><82>", "◌\u0301<U+202E>"]


def test_steps_by_hand(capsys):
    """Stage B writes "New", where Stage A says "San"; a head refuses "York"; the last step edits."""
    first = dict(start=4, after=[6, 9, 9, 9], fill=[dict(at=4, token=6, token_a=4, conf=0.75, conf_a=0.5)], edit=[])
    first["refused"] = [dict(at=5, token=5, conf=0.25)]
    second = dict(start=4, after=[4, 5, 9, 9], fill=[dict(at=5, token=5, token_a=5, conf=0.9, conf_a=0.9)], refused=[])
    second["edit"] = [dict(at=4, old=6, token=4, conf=0.75)]
    record = dict(text="", pieces=PIECES, steps=[first, second])
    show_steps(record, styled=False)
    assert capsys.readouterr().out.splitlines() == [
        f"step   1  block   4  [ New](A:  San){MASK}( York? 0.25){MASK}{MASK}",
        f"step   2  block   4  [ San][ York]{MASK}{MASK}",
    ]
    show_steps(record, styled=True)
    assert "\x1b[7m New\x1b[0m(A:  San)" in capsys.readouterr().out

    # a toy's tokens are numbers, with a blank between them
    toy = dict(record, text=None, pieces={i: i for i in PIECES} | {"9": MASK}, steps=[second])
    show_steps(toy, styled=False)
    assert capsys.readouterr().out == f"step   1  block   4  [4 ][5 ]{MASK} {MASK} \n"
