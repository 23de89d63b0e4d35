"""A moving picture of one name, written by three decoders on a common clock, from decodes that really run.

    base      Stage A alone: all masks of a block at once, each by itself
    paper     the paper's Stage B looks at them once more, together
    causal    causal Stage B mends Stage A's draft look by look, and writes what it is sure of

The clock counts forwards: a full one is 1, a look n/L. The picture is one SVG that moves by CSS alone, so that it
plays where a README shows it; a reader who asks for less motion sees how it ends.

    python -m tools.film                                    # draws assets/decode.svg
    python -m tools.film --prompt "GREEK SMALL" --out a.svg
"""

from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from cache import Cached, Row, in_full
from checkpoint import load_model
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import Parser, command, exists, replace_file, verdict
from model import Model
from sample import Decoding, Step, generate, step_of
from tools.watch import piece

# R rows, B positions of a block; everything here is of one row

SHIPPED = Path("assets/names")
PROMPT = "CANADIAN"  # the first held-out beginning of which causal Stage B alone makes a name, mending its draft
AT_ONCE = Decoding(gen_length=32, tau_m2t=-1.0, tau_t2t=None)
END = "end"


# --- recording a decode
@dataclass(frozen=True)
class Chip:
    """What stands at a position: a token's letters, or none where it is a mask."""

    kind: str = "mask"  # or given, draft, changed, written; at the end good or bad
    word: str = ""
    draft: str = ""  # what Stage A would have written, where that is another word


@dataclass
class Frame:
    """What can be seen after so many forwards, and the pass that runs meanwhile."""

    at: float
    chips: list[Chip]
    doing: str


class Film:
    """A decode of one prompt, pass by pass: `step` and `on_step` are for generate."""

    def __init__(self, title: str, model: Model, tokenizer: Tokenizer, prompt: list[int], d: Decoding):
        self.title = title
        self.model = model
        self.tokenizer = tokenizer
        self.chips = [Chip("given", self.word(token)) for token in prompt]
        self.frames: list[Frame] = []
        self.clock = 0.0
        [output] = generate(model, [prompt], d, step=self.step, on_step=self.on_step)
        self.show(self.chips, "", 0)

        text = tokenizer.decode(output.prompt + output.tokens)
        self.exists = exists(text) is not None
        self.verdict = verdict(text) if self.exists else "no such character"
        self.text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        self.forwards = in_full(output.nfe, self.model.partial_cost)
        self.told = f"{title}: {self.text}, {self.verdict}, {in_words(self.forwards)}"

    def step(self, engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
        """The decoder's own step; what each look of Stage B reads is kept."""
        self.read: list[list[int]] = []

        def stage_b(h: Tensor, bundle: Tensor, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
            self.read.append(tokens[0].tolist())
            return engine.stage_b(h, bundle, tokens, rows)

        watched = SimpleNamespace(model=engine.model, stage_a=engine.stage_a, stage_b=stage_b)
        return step_of(d)(watched, z, given, u, d)

    def on_step(self, rows: list[Row], done: Step) -> None:
        """The frames of a step: Stage A's draft, each look at it, what is written."""
        [row] = rows
        start = len(row.ids)
        end = start + done.z.shape[1]

        # a new block; what is booked beside steps is for reading the finished one again
        if len(self.chips) < end:
            booked = in_full(row.output.nfe, self.model.partial_cost)
            if booked > self.clock:
                self.show(self.chips, "reads the finished block again", booked - self.clock)
            self.chips += [Chip()] * (end - len(self.chips))

        # Stage A, then looks: each reads what the one before it has made
        self.show(self.chips, "Stage A drafts" if self.read else "Stage A writes", 1)
        for k, tokens in enumerate(self.read):
            before = self.read[max(0, k - 1)]
            block = map(self.drafted, self.chips[start:], before, tokens)
            cost = float(done.partial) / len(self.read) * self.model.partial_cost
            self.show([*self.chips[:start], *block], f"Stage B, look {k + 1}", cost)

        # what is written, and what Stage A would have written
        for i in done.bundle[0].nonzero()[:, 0].tolist():
            word = self.word(int(done.after[0, i]))
            draft = self.word(int(done.token_a[0, i]))
            self.chips[start + i] = Chip("written", word) if word == draft else Chip("changed", word, draft)

    def show(self, chips: list[Chip], doing: str, cost: float) -> None:
        self.frames.append(Frame(self.clock, list(chips), doing))
        self.clock += cost

    def drafted(self, chip: Chip, old: int, new: int) -> Chip:
        """A position as a look reads it, and as the look before has read it."""
        if chip.kind != "mask" or new == self.model.cfg.mask_id:
            return chip
        return Chip("draft" if new == old else "changed", self.word(new))

    def word(self, token: int) -> str:
        return END if token == self.model.cfg.eos_id else piece(self.tokenizer, token).replace("·", "")

    def ending(self) -> list[Chip]:
        """What is left at the end: nothing behind the end, and the written words well or badly written."""
        kind = "good" if self.exists else "bad"
        kept = []
        for chip in self.chips:
            kept.append(chip if chip.kind == "given" else replace(chip, kind=kind))
            if chip.word == END and chip.kind != "given":
                break
        return kept


def in_words(forwards: float) -> str:
    return f"{forwards:.5g} forward" + ("" if forwards == 1 else "s")


# --- drawing it
WIDTH = 440
LEFT = 16
LONG = WIDTH - 2 * LEFT
LETTER = 8.4  # the width of one, at 14 pixels
COLOURS = Path(__file__).with_name("film.css")  # on white and on a dark page


class Clock:
    """When what can be seen, in forwards: a class with keyframes of its own for each part that comes, goes or grows."""

    def __init__(self, forwards: float):
        self.forwards = forwards
        self.second = min(5.0, 18.0 / forwards)  # seconds that a forward lasts
        self.length = forwards * self.second + 6.0  # with a pause at the end
        self.rules: list[str] = []

    def share(self, at: float) -> str:
        return f"{100 * at * self.second / self.length:.2f}%"

    def seen(self, start: float, end: float | None, what: str) -> str:
        """What is seen from start to end; without motion the last picture stands."""
        keys = f"0% {{ opacity: {int(start == 0)} }}"
        if start > 0:
            keys += f" {self.share(start)} {{ opacity: 1 }}"
        if end is not None:
            keys += f" {self.share(end)} {{ opacity: 0 }}"
        hidden = "" if end is None else ' opacity="0"'
        return f'<g class="{self.animated("i", keys)}"{hidden}>{what}</g>'

    def grown(self, end: float) -> str:
        """Attributes of a bar that grows from the start to this end."""
        keys = f"0% {{ transform: scaleX(0) }} {self.share(end)}, 100% {{ transform: none }}"
        return f'class="bar {self.animated("b", keys)}" width="{end * LONG / self.forwards:.1f}"'

    def animated(self, kind: str, keys: str) -> str:
        name = f"{kind}{len(self.rules)}"
        self.rules.append(f".{name} {{ animation-name: {name} }} @keyframes {name} {{ {keys} }}")
        return name

    def css(self) -> str:
        """The motion, for those who have not asked for less."""
        steps = f"[class^=i] {{ animation: {self.length:.1f}s step-end infinite }}"
        bars = f".bar {{ animation: {self.length:.1f}s linear infinite }}"
        return "\n".join(["@media (prefers-reduced-motion: no-preference) {", steps, bars, *self.rules, "}"])


def columns(films: list[Film]) -> list[tuple[float, int, float]]:
    """Of each position x, line and width: wide enough for all that ever stands there, the same in every film. What is
    behind the end of every film has no place."""
    n = max(len(film.ending()) for film in films)
    letters = [2] * n
    for frame in (frame for film in films for frame in film.frames):
        for i, chip in enumerate(frame.chips[:n]):
            letters[i] = max(letters[i], len(chip.word))

    places = []
    x = LEFT
    line = 0
    for count in letters:
        width = count * LETTER + 10
        if x + width > LEFT + LONG:
            x = LEFT
            line += 1
        places.append((x, line, width))
        x += width + 4
    return places


def draw_chip(chip: Chip, x: float, y: float, width: float) -> str:
    """A word in its box, and under it the draft that it is not."""
    middle = x + width / 2
    drawn = f'<rect class="{chip.kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="26" rx="4"/>'
    if chip.word:
        drawn += f'<text class="w {chip.kind}" x="{middle:.1f}" y="{y + 18}">{escape(chip.word)}</text>'
    if chip.draft:
        drawn += f'<text class="was" x="{middle:.1f}" y="{y + 39}">{escape(chip.draft)}</text>'
    return drawn


def draw_film(film: Film, places: list[tuple[float, int, float]], clock: Clock, top: int) -> tuple[list[str], int]:
    """A film's part of the picture from this height on, and the height where the next one begins."""
    frames = [*film.frames[:-1], Frame(film.forwards, film.ending(), "")]
    n_lines = places[: len(film.chips)][-1][1] + 1
    pitch = 46 if any(chip.draft for chip in frames[-1].chips) else 32
    foot = top + 54 + n_lines * pitch

    # who it is, and a bar that grows with the forwards; where a pass ends it has a gap
    bar = f'y="{top + 29}" height="4"'
    parts = [
        f'<text class="head" x="{LEFT}" y="{top + 20}">{film.title}</text>',
        f'<rect class="rail" x="{LEFT}" {bar} width="{LONG}"/>',
        f'<rect x="{LEFT}" {bar} {clock.grown(film.forwards)}/>',
    ]
    for frame in frames[1:-1]:
        x = LEFT + frame.at * LONG / clock.forwards
        parts.append(f'<rect class="gap" x="{x - 0.75:.1f}" {bar} width="1.5"/>')

    # each frame until the next: the forwards so far, the words, the pass that runs
    ends = [frame.at for frame in frames[1:]] + [None]
    for frame, end in zip(frames, ends, strict=True):
        drawn = f'<text class="count" x="{LEFT + LONG}" y="{top + 20}">{in_words(frame.at)}</text>'
        for chip, (x, line, width) in zip(frame.chips, places, strict=False):
            drawn += draw_chip(chip, x, top + 42 + line * pitch, width)
        drawn += f'<text class="soft" x="{LEFT}" y="{foot}">{frame.doing}</text>'
        parts.append(clock.seen(frame.at, end, drawn))

    # at the end the name, and what it names
    colour, sign = ("yes", "✓") if film.exists else ("no", "✗")
    name = f'<text class="name" x="{LEFT}" y="{foot}">{escape(film.text)}</text>'
    judged = f'<text class="{colour}" x="{LEFT}" y="{foot + 21}">{sign} {escape(film.verdict)}</text>'
    parts.append(clock.seen(film.forwards, None, name + judged))
    return parts, foot + 38


def draw(films: list[Film], prompt: str, costs: str) -> str:
    """The whole picture; costs: a line that says what a forward is."""
    clock = Clock(max(film.forwards for film in films))
    places = columns(films)
    rule = f'<path class="line" d="M{LEFT} %dH{LEFT + LONG}"/>'
    asked = f'Complete a character’s name: <tspan class="name">{escape(prompt)}</tspan>'
    parts = [f'<text x="{LEFT}" y="28">{asked}</text>']
    top = 42
    for film in films:
        drawn, below = draw_film(film, places, clock, top)
        parts += [rule % top, *drawn]
        top = below

    # what the boxes mean, and what a forward is
    parts.append(rule % top)
    for k, kind in enumerate(("draft", "changed", "written")):
        parts.append(draw_chip(Chip(kind, kind), LEFT + 84 * k, top + 14, 76))
    parts.append(f'<text class="soft" x="{LEFT}" y="{top + 62}">{costs}</text>')
    height = top + 76

    told = escape("; ".join(film.told for film in films))
    size = f'viewBox="0 0 {WIDTH} {height}" width="{1.25 * WIDTH:.0f}" height="{1.25 * height:.0f}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t">',
        f'<title id="t">Three decoders complete {escape(prompt)}. {told}.</title>',
        f"<style>\n{COLOURS.read_text()}{clock.css()}\n</style>",
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *parts,
        "</svg>\n",
    ])  # fmt: skip


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--prompt", default=PROMPT, help="the beginning of a name")
    parser.add_argument("--out", type=Path, default=Path("assets/decode.svg"), help="the picture")
    args = parser.parse_args()

    # the shipped base, and the same with either Stage B
    folders = (SHIPPED, SHIPPED / "paper", SHIPPED / "causal")
    base, paper, causal = (load_model(folder, "cpu", torch.float32) for folder in folders)
    tokenizer = load_tokenizer(SHIPPED)
    prompt = tokenizer.encode(args.prompt)
    films = [
        Film("base: Stage A alone", base, tokenizer, prompt, replace(AT_ONCE, n_rounds=0)),
        Film("the paper's Stage B", paper, tokenizer, prompt, AT_ONCE),
        Film("causal Stage B", causal, tokenizer, prompt, replace(AT_ONCE, tau_joint=0.5)),
    ]
    costs = f"A forward: all {base.cfg.n_layer} layers. A look: {paper.cfg.n_last} of them, causal {causal.cfg.n_last}."
    text = draw(films, args.prompt, costs)
    replace_file(args.out, lambda path: path.write_text(text, encoding="utf-8"))
    for film in films:
        print(film.told)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
