"""`sample.py --watch`: every step of decoding, as it happens.

With edits a row is one line in a terminal, drawn again after every step. Without, each step is a new line: Stage A's
draft, then what is written, and in how many passes.
"""

import math
import os
import re
import shutil
import sys
import time
import unicodedata

from decoding import Row, Step
from lib.tokenizer import Tokenizer
from lib.util import MASK

# R rows, B positions of a block

END = "∎"
LEGEND = f"[written now]  [Stage B's](A: what Stage A would write)  {{edited}}  {MASK} a mask  {END} the end"
GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
PACE = 0.4  # seconds for which a step is shown


def piece(tokenizer: Tokenizer, token: int) -> str:
    """A token's text with every character visible; of a special token, its name."""
    raw = tokenizer.token_bytes.get(token, b"")
    if not raw:
        names = {i: name for name, i in tokenizer.special.items()}
        text = names.get(token, f"<{token}>")
    else:
        text = raw.decode("utf-8", errors="surrogateescape")
    return "".join(visible(character) for character in text)


def visible(character: str) -> str:
    """One character, in a form that can be seen and takes no new line."""
    if character in GLYPHS:
        return GLYPHS[character]
    if character.isprintable():
        return character

    # surrogateescape has decoded bytes that are not UTF-8 to U+DC80..U+DCFF
    code = ord(character)
    return f"<{code - 0xDC00:02X}>" if 0xDC80 <= code <= 0xDCFF else f"<U+{code:04X}>"


def width(text: str) -> int:
    """The columns that a terminal gives a text: two to a wide character (漢), and none to an accent of its own."""
    plain = re.sub(r"\x1b\[\d+m", "", text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in plain)


class Screen:
    """Shows the steps of all rows. A terminal draws lines again in their places; a pipe, or a terminal with NO_COLOR,
    gets new lines. tokenizer: None if tokens are numbers."""

    CODES = {"green": 32, "yellow": 33, "magenta": 35, "dim": 2}

    def __init__(self, n_rows: int, tokenizer: Tokenizer | None, mask_id: int, eos_id: int):
        self.tokenizer = tokenizer
        self.signs = {eos_id: END, mask_id: MASK}
        self.mask_id = mask_id
        self.moves = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.lines = [""] * n_rows
        self.drawn: list[str] = []  # these lines as they are on the screen
        self.steps = 0
        print(LEGEND)

    def on_step(self, rows: list[Row], step: Step) -> None:
        """Show the rows that are being decoded after a step."""
        self.steps += 1
        from_the_left = rows[0].d.tau_t2t is None  # without edits a step writes for good
        for r, row in enumerate(rows):
            before = self.before(row.ids)
            block = self.block(step, r)
            n = int(step.partial[r])
            if from_the_left and n > 0:
                block += self.paint(f"  {n} pass{'es' * (n > 1)}", "dim")
            line = self.line(before, block)
            if not self.moves:
                print(line)
            elif from_the_left:
                # the draft, and in its place the line with what is written
                draft = self.line(before, self.draft(step, r))
                self.replace([], [draft])
                self.replace([draft], [line])
            self.lines[row.number] = line
        if self.moves and not from_the_left:
            self.replace(self.drawn, self.lines)
            self.drawn = list(self.lines)

    def replace(self, old: list[str], new: list[str]) -> None:
        """Draw these lines in the place of the old ones, which are the last that were drawn."""
        if old:
            # a line that is wider than the terminal stands on several of its lines
            columns = shutil.get_terminal_size().columns
            height = sum(max(1, math.ceil(width(line) / columns)) for line in old)
            print(f"\x1b[{height}F\x1b[J", end="")
        print("\n".join(new), flush=True)
        time.sleep(PACE)

    def before(self, ids: list[int]) -> str:
        """The text before a block, on one line, or numbers if tokens are numbers."""
        if not self.tokenizer:
            return "".join(f"{i} " for i in ids)
        return "".join(" " if letter == " " else visible(letter) for letter in self.tokenizer.decode(ids))

    def line(self, before: str, block: str) -> str:
        """A line with the text before a block, and the block."""
        # in a terminal a long text loses its beginning, as far as it takes a second line
        room = shutil.get_terminal_size().columns - 10 - width(block)
        if self.moves:
            before = before[max(0, len(before) - room) :]
            while before and width(before) > room:
                before = before[1:]
        return f"step {self.steps:3}  {before}{block}"

    def block(self, step: Step, r: int) -> str:
        """Row r's block after the step, marked as LEGEND says."""
        line = ""
        for i, token in enumerate(step.after[r].tolist()):
            word = self.word(token)
            alone = int(step.token_a[r, i])
            if step.edited[r, i]:
                line += self.paint(f"{{{word}}}", "magenta")
            elif step.bundle[r, i] and token == alone:
                line += self.paint(f"[{word}]", "green")
            elif step.bundle[r, i]:
                line += self.paint(f"[{word}]", "yellow") + self.paint(f"(A: {self.word(alone)})", "dim")
            else:
                line += self.paint(word, "dim") if word.startswith(MASK) else word
        return line

    def draft(self, step: Step, r: int) -> str:
        """Row r's block with Stage A's tokens in its masks."""
        line = ""
        for shown, token in zip(step.z[r].tolist(), step.token_a[r].tolist(), strict=True):
            line += self.paint(self.word(token), "dim") if shown == self.mask_id else self.word(shown)
        return line

    def word(self, token: int) -> str:
        """A token as it is shown; a number is followed by a blank."""
        if not self.tokenizer:
            return self.signs.get(token, str(token)) + " "
        return self.signs.get(token) or piece(self.tokenizer, token).replace("·", " ")

    def paint(self, text: str, colour: str) -> str:
        return f"\x1b[{self.CODES[colour]}m{text}\x1b[0m" if self.moves else text
