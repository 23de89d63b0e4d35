"""The picture of tiny.py: the probability of each pair of words in its first context, under the truth and under three
one-step decoders whose two words are drawn from their probabilities. It trains as `python tiny.py` does.

    python -m tools.tiny_picture --out assets/tiny.svg
"""

from pathlib import Path

from torch import Generator, Tensor

import tiny
from lib.util import Parser, replace_file

SERIES = ["truth", "Stage A", "Stage B, clean target", "Stage B, chain target"]
PAIRS = [
    ("New", "York"),
    ("San", "Francisco"),
    ("San", "Diego"),
    ("San", "York"),
    ("New", "Francisco"),
    ("New", "Diego"),
]
TITLE = (
    "Both words in one step. Stage A, and Stage B with the clean target, give almost half to pairs that are no phrase. "
    "Stage B with the chain target gives nearly everything to San Francisco."
)
STYLE = """
  .page { fill: #ffffff; stroke: #d0d5dc; } .axis { stroke: #59636e; } .s0 { fill: #59636e; } .s1 { fill: #d98a4b; }
  .s2 { fill: #f0c39c; } .s3 { fill: #0a5ca8; } .mid { text-anchor: middle; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1b1f24; }
  .head { font-size: 15px; font-weight: 600; } .small { font-size: 10px; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14171b; stroke: #3a424d; } .axis { stroke: #9ba5b1; } .s0 { fill: #9ba5b1; } .s1 { fill: #ffab6e; }
    .s2 { fill: #8a5a34; } .s3 { fill: #79bcff; } text { fill: #e6e9ee; }
  }
"""


def truth() -> dict[tuple[str, str], float]:
    """The table of the first context."""
    phrases = [tuple(tiny.TOKENS[i] for i in row[1:]) for row in tiny.ROWS[0].tolist()]
    return dict(zip(phrases, tiny.P.tolist(), strict=True))


def of(word: Tensor) -> dict[tuple[str, str], float]:
    """Probabilities (3, 2, V) of each word by itself -> those of the pairs in the first context."""
    first, second = word[0]
    return {(a, b): float(first[tiny.TOKENS.index(a)] * second[tiny.TOKENS.index(b)]) for a, b in PAIRS}


def draw(tables: list[dict[tuple[str, str], float]]) -> str:
    """Two panels of bars, 200 pixels for a probability of 1: the three phrases, and the three pairs that are none."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 320" width="800" height="320" role="img">']
    parts.append(f"<title>{TITLE}</title>")
    parts.append(f"<style>{STYLE}</style>")
    parts.append('<rect class="page" x="0.5" y="0.5" width="799" height="319" rx="6"/>')
    for i, name in enumerate(SERIES):
        x = 30 + [0, 80, 180, 370][i]
        parts.append(f'<rect class="s{i}" x="{x}" y="16" width="12" height="12"/>')
        parts.append(f'<text x="{x + 18}" y="27">{name}</text>')
    for panel, title in enumerate(["phrases", "pairs that are no phrase"]):
        left = 20 + 390 * panel
        parts.append(f'<text class="head" x="{left + 10}" y="58">{title}</text>')
        parts.append(f'<path class="axis" d="M{left} 280h370"/>')
        for j, pair in enumerate(PAIRS[3 * panel : 3 * panel + 3]):
            start = left + 10 + 122 * j
            parts.append(f'<text class="mid" x="{start + 54}" y="300">{" ".join(pair)}</text>')
            for i, table in enumerate(tables):
                p = table.get(pair, 0.0)
                x = start + 27 * i
                height = 200 * p
                parts.append(f'<rect class="s{i}" x="{x}" y="{280 - height:.1f}" width="24" height="{height:.1f}"/>')
                parts.append(f'<text class="mid small" x="{x + 12}" y="{276 - height:.1f}">{p:.2f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    p = Parser(__doc__)
    p.add_argument_group("picture").add_argument("--out", default="assets/tiny.svg", help="where it is written")
    p.add_argument_group("run").add_argument("--seed", type=int, default=0, help="as tiny.py's")
    args = p.parse_args()
    rng = Generator().manual_seed(args.seed % 2**32)
    base = tiny.train(rng)
    a = tiny.report("Stage A", base, 0.3, 0)
    clean = tiny.report("Stage B, clean target", tiny.train(rng, base), 0.3, 1)
    chain = tiny.report("Stage B, chain target", tiny.train(rng, base, chained=True), 0.3, 1)
    svg = draw([truth(), of(a), of(clean), of(chain)])
    replace_file(Path(args.out), lambda path: path.write_text(svg))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
