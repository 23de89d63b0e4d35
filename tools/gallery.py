"""The gallery: one text under each corruption of corrupt.py, with kinds, bundle and every position's loss weight.

    python -m tools.gallery
    python -m tools.gallery --text "def add(a, b):\\n    return a + b" --block_length 8

M masked, W wrong-visible, G clean-visible, ^ in the bundle. Loss weights are in tenths, X is 1.0: X fill, 3 edit, 2
clean, 0 none. Stage A fills all of M, Stage B its bundle alone. The text's commonest byte stands in for the model's
draft.
"""

from collections import Counter

import torch

from corrupt import CORRUPTIONS, Corruption, G, M, W, corrupt, draw_bundle, loss_weights
from lib.tokenizer import byte_tokenizer
from lib.util import Parser, bounded, command, fail, generator

TOKENIZER = byte_tokenizer()
SHOWN = {TOKENIZER.mask_id: "▒", ord(" "): "·", ord("\n"): "↵"}


def letter(token: int) -> str:
    return SHOWN.get(token, chr(token) if 32 < token < 127 else "�")


def show(name: str, line: str, B: int) -> None:
    """A line, block by block."""
    blocks = [line[start : start + B] for start in range(0, len(line), B)]
    print(f"  {name:10}" + "  ".join(blocks).rstrip())


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("gallery").add_argument
    add("--text", default="def add(a, b):\n    return a + b\n", help=r"the text; \n is a line break")
    add("--block_length", type=bounded(int, 1), default=16, help="tokens that draw one mask ratio and one bundle")
    args = parser.parse_args()

    B = args.block_length
    ids = TOKENIZER.encode_document(args.text.replace("\\n", "\n")).tolist()
    if not ids:
        fail("--text is empty: give some text")
    x = torch.tensor([ids + [TOKENIZER.eos_id] * (-len(ids) % B)])  # (1, T)
    free = torch.arange(x.shape[1])[None] < len(ids)
    likeliest = Counter(ids).most_common(1)[0][0]

    print(__doc__[__doc__.index("M masked") :])
    for name in CORRUPTIONS:
        how = Corruption(name, B, TOKENIZER.mask_id, n_plain=256)
        rows = [generator(0, "gallery")]
        z, kind = corrupt(x, free, how, rows, lambda z, where: torch.full((int(where.sum()),), likeliest))
        bundle = draw_bundle(kind == M, B, 1, 4, rows)
        print(f"{name}: {int((kind == M).sum())} M, {int((kind == W).sum())} W, {int((kind == G).sum())} G")
        show("clean", "".join(map(letter, x[0].tolist())), B)
        show("input", "".join(map(letter, z[0].tolist())), B)
        show("kind", "".join(".MWG"[k] for k in kind[0].tolist()), B)
        show("bundle", "".join(" ^"[b] for b in bundle[0].tolist()), B)
        for stage, fill in (("A", kind == M), ("B", bundle)):
            weights = loss_weights(kind, fill)[0].tolist()
            show(f"loss in {stage}", "".join("0123456789X"[round(10 * weight)] for weight in weights), B)
        print()


if __name__ == "__main__":
    main()
