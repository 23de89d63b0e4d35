"""`sample.py --watch`: a line for every step of decoding, marked as LEGEND says."""

from decoding import Row, Step
from lib.tokenizer import Tokenizer
from lib.util import MASK

END = "∎"
LEGEND = f"[written now]  [Stage B's](A: what Stage A would write)  {{edited}}  {MASK} a mask  {END} the end"
GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


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
    """One character, in a form that can be seen, takes no new line, and gives a terminal no command."""
    if character in GLYPHS:
        return GLYPHS[character]
    if character.isprintable():
        return character

    # surrogateescape has decoded bytes that are not UTF-8 to U+DC80..U+DCFF
    code = ord(character)
    return f"<{code - 0xDC00:02X}>" if 0xDC80 <= code <= 0xDCFF else f"<U+{code:04X}>"


class Screen:
    """Prints the steps of all rows. tokenizer: None if tokens are numbers."""

    def __init__(self, tokenizer: Tokenizer | None, mask_id: int, eos_id: int):
        self.tokenizer = tokenizer
        self.signs = {eos_id: END, mask_id: MASK}
        self.steps = 0
        print(LEGEND)

    def on_step(self, rows: list[Row], step: Step) -> None:
        """A line for each row that is being decoded: the text before its block, and the block after the step."""
        self.steps += 1
        for r, row in enumerate(rows):
            passes = int(step.partial[r])
            of_b = f"  {passes} pass{'es' * (passes > 1)} of Stage B" if passes else ""
            print(f"step {self.steps:3}  {self.before(row.ids)}{self.block(step, r)}{of_b}")

    def before(self, ids: list[int]) -> str:
        """The text before a block, on one line, or numbers if tokens are numbers."""
        if not self.tokenizer:
            return "".join(f"{i} " for i in ids)
        return "".join(" " if letter == " " else visible(letter) for letter in self.tokenizer.decode(ids))

    def block(self, step: Step, r: int) -> str:
        """Row r's block after the step."""
        line = ""
        for i, token in enumerate(step.after[r].tolist()):
            word = self.word(token)
            alone = int(step.token_a[r, i])
            if step.edited[r, i]:
                line += f"{{{word}}}"
            elif step.bundle[r, i]:
                line += f"[{word}]" + (f"(A: {self.word(alone)})" if token != alone else "")
            else:
                line += word
        return line

    def word(self, token: int) -> str:
        """A token as it is shown; a number is followed by a blank."""
        if not self.tokenizer:
            return self.signs.get(token, str(token)) + " "
        return self.signs.get(token) or piece(self.tokenizer, token).replace("·", " ")
