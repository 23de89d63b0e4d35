"""A moving picture of one name, written by three decoders on a common clock, from decodes that really run.

    base      Stage A alone: all masks of a block at once, each by itself
    paper     the paper's Stage B looks at them once more, together
    causal    causal Stage B mends Stage A's draft look by look, and writes what it is sure of

The clock counts forwards: a full one is 1, a look n/L. The picture is one SVG that moves by CSS alone, so that it
plays where a README shows it; a reader who asks for less motion sees how it ends.

    python -m tools.film                                  # chooses a beginning, and draws assets/decode.svg
    python -m tools.film --prompt "CANADIAN" --out a.svg
"""

from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from cache import Cached, Row, Uncached, in_full
from checkpoint import base_of, load_model
from evaluate import complete, draw_names
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import Parser, bounded, command, exists, fail, replace_file, verdict
from model import Model
from sample import Decoding, Step, generate, step_of
from tools.plots import BLUE, DARK, INK, ORANGE, PAGE

# R rows, B positions of a block; everything here is of one row

END = "end"
AT_ONCE = Decoding(gen_length=32, tau_m2t=-1.0, tau_t2t=None)

SECONDS = 5.0  # that a forward lasts, but all of them at most
AT_MOST = 18.0
PAUSE = 6.0  # at the end


# --- recording a decode
@dataclass(frozen=True)
class Chip:
    """What stands at a position: a token's letters, or none where it is a mask."""

    kind: str = "mask"  # or given, draft, mended, written; at the end good or bad
    word: str = ""
    draft: str = ""  # what Stage A would have written, where that is another word


@dataclass
class Frame:
    """What can be seen after so many forwards, and the pass that runs meanwhile."""

    at: float
    chips: list[Chip]
    doing: str


class Watched:
    """An engine that keeps what causal Stage B, or the paper's, is given to read: a list of tokens for each look."""

    def __init__(self, engine: Cached | Uncached):
        self.engine = engine
        self.model = engine.model
        self.read: list[list[int]] = []

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.engine.stage_a(z)

    def stage_b(self, h: Tensor, bundle: Tensor, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        self.read.append(tokens[0].tolist())
        return self.engine.stage_b(h, bundle, tokens, rows)


class Film:
    """A decode of one prompt, pass by pass: `step` and `on_step` are for generate."""

    def __init__(self, title: str, model: Model, tokenizer: Tokenizer, prompt: list[int], d: Decoding):
        self.title = title
        self.tokenizer = tokenizer
        self.eos_id = model.cfg.eos_id
        self.mask_id = model.cfg.mask_id
        self.look = model.partial_cost
        self.frames: list[Frame] = []
        self.context: list[int] | None = None  # the finished blocks
        [output] = generate(model, [prompt], d, step=self.step, on_step=self.on_step)

        text = tokenizer.decode(output.prompt + output.tokens)
        self.exists = exists(text) is not None
        self.verdict = verdict(text) if self.exists else "no such character"
        self.text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        self.n_written = len(output.tokens)
        self.forwards = in_full(output.nfe, self.look)

    def step(self, engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
        self.watched = Watched(engine)
        return step_of(d)(self.watched, z, given, u, d)

    def on_step(self, rows: list[Row], done: Step) -> None:
        """The frames of a step: Stage A's draft, each look at it, what is written."""
        [row] = rows
        if row.ids != self.context:
            self.begin_block(row)

        # Stage A
        drafts = self.watched.read
        self.frames[-1].doing = "Stage A drafts" if drafts else "Stage A writes"
        self.clock += 1

        # each look reads what the one before it has made
        for k in range(len(drafts)):
            chips = [self.drafted(drafts[: k + 1], i, chip) for i, chip in enumerate(self.block)]
            self.show(chips, f"Stage B, look {k + 1}")
            self.clock += float(done.partial) / len(drafts) * self.look

        self.block = [self.written(done, i, chip) for i, chip in enumerate(self.block)]
        self.show(self.block)

    def begin_block(self, row: Row) -> None:
        """What the prompt has of the next block, then masks."""
        before = [Chip("given", self.word(token)) for token in row.ids]
        if self.frames:
            before = self.frames[-1].chips
            self.frames[-1].doing = "reads the finished block again"
        self.context = row.ids
        self.before = before
        places = zip(row.block(), row.given(), strict=True)
        self.block = [Chip("given", self.word(token)) if own else Chip() for token, own in places]

        # the forwards that are booked: of finished blocks, and of reading them again
        self.clock = in_full(row.output.nfe, self.look)
        self.show(self.block)

    def show(self, block: list[Chip], doing: str = "") -> None:
        self.frames.append(Frame(self.clock, self.before + block, doing))

    def drafted(self, drafts: list[list[int]], i: int, chip: Chip) -> Chip:
        """Position i as the last of these looks reads it."""
        new = drafts[-1][i]
        if chip.kind != "mask" or new == self.mask_id:
            return chip
        mended = len(drafts) > 1 and new != drafts[-2][i]
        return Chip("mended" if mended else "draft", self.word(new))

    def written(self, done: Step, i: int, chip: Chip) -> Chip:
        """Position i after the step."""
        if not (done.bundle[0, i] or done.edited[0, i]):
            return chip
        token = int(done.after[0, i])
        alone = int(done.token_a[0, i])
        if token == alone:
            return Chip("written", self.word(token))
        return Chip("mended", self.word(token), draft=self.word(alone))

    def word(self, token: int) -> str:
        return END if token == self.eos_id else self.tokenizer.piece(token).replace("·", "")

    def ending(self) -> list[Chip]:
        """What is left at the end: nothing behind the end, and the written words well or badly written."""
        kind = "good" if self.exists else "bad"
        chips = self.frames[-1].chips
        ends = [i for i, chip in enumerate(chips) if chip.word == END and chip.kind != "given"]
        kept = chips[: ends[0] + 1] if ends else chips
        return [chip if chip.kind == "given" else replace(chip, kind=kind) for chip in kept]


def choose(ways: dict[str, tuple[Model, Decoding]], tokenizer: Tokenizer) -> list[int]:
    """The first held-out beginning of which the last way alone makes a name: of three tokens at least, one of them
    another than Stage A's draft; all ways in one block, so that their forwards compare."""
    prompts = draw_names(128, "held out", tokenizer)
    found = [complete(model, tokenizer, prompts, d)["found"] for model, d in ways.values()]
    for prompt, *others, last in zip(prompts.values(), *found, strict=True):
        if any(others) or not last:
            continue
        films = record(ways, tokenizer, prompt)
        mended = any(chip.draft for chip in films[-1].ending())
        if mended and films[-1].n_written > 3 and all(film.forwards < 2 for film in films):
            return prompt
    fail("no beginning tells these decoders apart: give --prompt")


def record(ways: dict[str, tuple[Model, Decoding]], tokenizer: Tokenizer, prompt: list[int]) -> list[Film]:
    return [Film(title, model, tokenizer, prompt, d) for title, (model, d) in ways.items()]


# --- drawing it
WIDTH = 440
LEFT = 16
LETTER = 8.4  # the width of one, at 14 pixels
TALL = 26  # a word's box


class Clock:
    """When what can be seen: a class and its keyframes for each pair of a beginning and an end, in forwards."""

    def __init__(self, forwards: float):
        self.forwards = forwards
        self.second = min(SECONDS, AT_MOST / forwards)
        self.length = forwards * self.second + PAUSE
        self.spans: dict[tuple[float, float | None], str] = {}
        self.bars: dict[str, float] = {}

    def share(self, at: float) -> str:
        return f"{100 * at * self.second / self.length:.2f}%"

    def seen(self, start: float, end: float | None, what: str) -> str:
        """What is seen from start to end; without motion the last picture stands."""
        if start == 0 and end is None:
            return what
        name = self.spans.setdefault((start, end), f"i{len(self.spans)}")
        hidden = "" if end is None else ' opacity="0"'
        return f'<g class="{name}"{hidden}>{what}</g>'

    def grown(self, end: float) -> str:
        """Attributes of a bar that grows from the start to this end."""
        name = f"b{len(self.bars)}"
        self.bars[name] = end
        return f'class="bar {name}"'

    def css(self) -> str:
        rules = [f"[class^=i] {{ animation: {self.length:.1f}s step-end infinite }}"]
        for (start, end), name in self.spans.items():
            keys = f"0% {{ opacity: {int(start == 0)} }}"
            if start > 0:
                keys += f" {self.share(start)} {{ opacity: 1 }}"
            if end is not None:
                keys += f" {self.share(end)} {{ opacity: 0 }}"
            rules.append(f".{name} {{ animation-name: {name} }} @keyframes {name} {{ {keys} }}")
        rules.append(f".bar {{ animation: {self.length:.1f}s linear infinite }}")
        for name, end in self.bars.items():
            keys = f"0% {{ transform: scaleX(0) }} {self.share(end)}, 100% {{ transform: none }}"
            rules.append(f".{name} {{ animation-name: {name} }} @keyframes {name} {{ {keys} }}")
        return "\n".join(rules)


def spans(states: list[tuple[float, object]]) -> list[tuple[float, float | None, object]]:
    """(when, what) in order -> (start, end, what): equal neighbours are one, what takes no time is none.

    (0, a) (1, a) (2, b)  ->  (0, 2, a) (2, None, b)
    """
    found: list[tuple[float, float | None, object]] = []
    for at, what in states:
        if found and found[-1][2] == what:
            continue
        if found:
            start, _, before = found.pop()
            if start < at:
                found.append((start, at, before))
        found.append((at, None, what))
    return found


def in_words(forwards: float) -> str:
    return f"{forwards:.5g} forward" + ("" if forwards == 1 else "s")


def columns(films: list[Film]) -> list[tuple[float, int, float]]:
    """Of each position x, line and width: wide enough for all that ever stands there, the same in every film. What is
    behind the end of every film has no place."""
    n = max(len(film.ending()) for film in films)
    letters = [2] * n
    for film in films:
        for frame in film.frames:
            for i, chip in enumerate(frame.chips[:n]):
                letters[i] = max(letters[i], len(chip.word))

    places = []
    x = LEFT
    line = 0
    for count in letters:
        width = count * LETTER + 10
        if x + width > WIDTH - LEFT:
            x = LEFT
            line += 1
        places.append((x, line, width))
        x += width + 4
    return places


def draw_chip(chip: Chip, x: float, y: float, width: float) -> str:
    """A word in its box, and under it the draft that it is not."""
    middle = x + width / 2
    box = f'<rect class="{chip.kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{TALL}" rx="4"/>'
    word = f'<text class="w {chip.kind}" x="{middle:.1f}" y="{y + 18}">{escape(chip.word)}</text>' if chip.word else ""
    draft = f'<text class="was" x="{middle:.1f}" y="{y + 39}">{escape(chip.draft)}</text>' if chip.draft else ""
    return box + word + draft


def draw_film(film: Film, places: list[tuple[float, int, float]], clock: Clock, top: int) -> tuple[list[str], int]:
    """A film's part of the picture from this height on, and the height where the next one begins."""
    frames = film.frames
    ending = film.ending()
    places = places[: len(frames[-1].chips)]
    n_lines = places[-1][1] + 1
    pitch = 46 if any(chip.draft for chip in ending) else 32

    # who it is, the forwards so far, and a bar that grows with them
    long = WIDTH - 2 * LEFT
    scale = long / clock.forwards
    parts = [f'<text class="head" x="{LEFT}" y="{top + 20}">{film.title}</text>']
    for start, end, spent in spans([(frame.at, frame.at) for frame in frames]):
        count = f'<text class="count" x="{WIDTH - LEFT}" y="{top + 20}">{in_words(spent)}</text>'
        parts.append(clock.seen(start, end, count))
    bar = f'x="{LEFT}" y="{top + 29}" height="4"'
    parts.append(f'<rect class="rail" {bar} width="{long}"/>')
    parts.append(f'<rect {clock.grown(film.forwards)} {bar} width="{film.forwards * scale:.1f}"/>')
    for frame in frames[1:-1]:
        parts.append(
            f'<rect class="gap" x="{LEFT + frame.at * scale - 0.75:.1f}" y="{top + 29}" width="1.5" height="4"/>'
        )

    # each position, state after state
    top += 42
    for i, (x, line, width) in enumerate(places):
        states = [(frame.at, frame.chips[i] if i < len(frame.chips) else None) for frame in frames]
        states.append((film.forwards, ending[i] if i < len(ending) else None))
        for start, end, chip in spans(states):
            if chip:
                parts.append(clock.seen(start, end, draw_chip(chip, x, top + line * pitch, width)))

    # the pass that runs; at the end the name, and what it names
    top += n_lines * pitch + 12
    doing = [(frame.at, frame.doing) for frame in frames[:-1]] + [(film.forwards, "")]
    for start, end, said in spans(doing):
        if said:
            parts.append(clock.seen(start, end, f'<text class="soft" x="{LEFT}" y="{top}">{said}</text>'))
    colour, sign = ("yes", "✓") if film.exists else ("no", "✗")
    name = f'<text class="name" x="{LEFT}" y="{top}">{escape(film.text)}</text>'
    judged = f'<text class="{colour}" x="{LEFT}" y="{top + 21}">{sign} {escape(film.verdict)}</text>'
    parts.append(clock.seen(film.forwards, None, name + judged))
    return parts, top + 38


# name -> on white, on a dark page
COLORS = {
    "page": (PAGE, DARK[PAGE]),
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": (INK, DARK[INK]),
    "blue": (BLUE, DARK[BLUE]),
    "red": (ORANGE, DARK[ORANGE]),
    "line": ("#d0d5dc", "#3d444d"),
    "hole": ("#e4e7eb", "#2a313b"),
}
STYLE = """
text { font: 15px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
.w, .was, .name { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.w, .was { text-anchor: middle }
.head, .yes, .no { font-weight: 600 }
.count { text-anchor: end }
.soft, .was { fill: var(--soft); font-size: 14px }
.was { font-size: 12px; text-decoration: line-through }
.yes { fill: var(--blue) }
.no { fill: var(--red) }
.card { fill: var(--page); stroke: var(--line) }
.line { stroke: var(--line) }
rect.mask, .rail { fill: var(--hole) }
rect.given, rect.draft, rect.written, rect.mended { fill: none }
rect.draft, rect.written { stroke: var(--soft) }
rect.draft { stroke-dasharray: 4 3 }
rect.mended { stroke: var(--blue); stroke-width: 2.5 }
rect.good { fill: var(--blue) }
rect.bad { fill: var(--red) }
text.draft { fill: var(--soft) }
text.good, text.bad { fill: var(--page) }
.gap { fill: var(--page) }
.bar { fill: var(--soft); transform-box: fill-box; transform-origin: left }"""


def style(clock: Clock) -> str:
    """Colours for both pages, and motion for those who have not asked for less."""
    light, dark = ("; ".join(f"--{name}: {pair[k]}" for name, pair in COLORS.items()) for k in (0, 1))
    return f"""<style>
svg {{ {light} }}
@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}{STYLE}
@media (prefers-reduced-motion: no-preference) {{
{clock.css()}
}}
</style>"""


def draw(films: list[Film], prompt: str, costs: str) -> str:
    """The whole picture; costs: a line that says what a forward is."""
    clock = Clock(max(film.forwards for film in films))
    places = columns(films)
    rule = f'<path class="line" d="M{LEFT} %dH{WIDTH - LEFT}"/>'
    parts = [
        f'<text x="{LEFT}" y="28">Complete a character’s name: <tspan class="name">{escape(prompt)}</tspan></text>'
    ]
    top = 42
    for film in films:
        drawn, below = draw_film(film, places, clock, top)
        parts += [rule % top, *drawn]
        top = below

    # what the boxes mean, and what a forward is
    parts.append(rule % top)
    for k, kind in enumerate(("draft", "mended", "written")):
        parts.append(draw_chip(Chip(kind, kind), LEFT + 84 * k, top + 14, 76))
    parts.append(f'<text class="soft" x="{LEFT}" y="{top + 62}">{costs}</text>')
    height = top + 76

    told = [f"{film.title}: {film.text}, {film.verdict}, {in_words(film.forwards)}" for film in films]
    size = f'viewBox="0 0 {WIDTH} {height}" width="{1.25 * WIDTH:.0f}" height="{1.25 * height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t">'
    title = f'<title id="t">Three decoders complete {escape(prompt)}. {escape("; ".join(told))}.</title>'
    card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join([head, title, style(clock), card, *parts, "</svg>", ""])


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--prompt", help="the beginning of a name (default: one that tells the three apart)")
    add("--ckpt", type=Path, default=Path("assets/names/causal"), help="causal Stage B (default: %(default)s)")
    add("--paper", type=Path, default=Path("assets/names/paper"), help="the paper's (default: %(default)s)")
    add("--tau_joint", type=bounded(float, 0, 1), default=0.5, help="causal: write the longest run surer than this")
    add("--out", type=Path, default=Path("assets/decode.svg"), help="the picture (default: %(default)s)")
    args = parser.parse_args()

    # three models, two of them the base's
    base, paper, causal = (load_model(at, "cpu", torch.float32) for at in (base_of(args.ckpt), args.paper, args.ckpt))
    tokenizer = load_tokenizer(base_of(args.ckpt))
    ways = {
        "base: Stage A alone": (base, replace(AT_ONCE, n_rounds=0)),
        "the paper's Stage B": (paper, replace(AT_ONCE, n_rounds=paper.cfg.n_rounds)),
        "causal Stage B": (causal, replace(AT_ONCE, n_rounds=causal.cfg.n_rounds, tau_joint=args.tau_joint)),
    }
    ids = tokenizer.encode(args.prompt) if args.prompt else choose(ways, tokenizer)
    films = record(ways, tokenizer, ids)

    prompt = tokenizer.decode(ids)
    costs = f"A forward: all {base.cfg.n_layer} layers. A look: {paper.cfg.n_last} of them, causal {causal.cfg.n_last}."
    text = draw(films, prompt, costs)
    replace_file(args.out, lambda path: path.write_text(text, encoding="utf-8"))
    for film in films:
        print(f"{film.title}: {film.text}, {film.verdict}, {in_words(film.forwards)}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
