"""The gallery: one text under each corruption of corrupt.py, with kinds, bundle and every position's loss weight.

python -m tools.gallery
python -m tools.gallery --text "def add(a, b):\\n    return a + b" --block_length 8
"""

from collections import Counter

import torch
from torch import Tensor

from corrupt import CORRUPTIONS, Corruption, G, M, W, corrupt, draw_bundle, loss_weights
from lib.tokenizer import byte_tokenizer
from lib.util import Parser, bounded, command, fail, generator

# T positions of the one row, B block_length


def show(x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, B: int, mask_id: int) -> None:
    """Blocks of one row: clean, input, kind, bundle, and the loss weight in both stages in tenths (A is 1.0)."""

    def text(ids: Tensor) -> str:
        return "".join("▒" if t == mask_id else chr(t) if 32 < t < 127 else {32: "·", 10: "↵"}.get(t, "�") for t in ids)

    def tenths(fill: Tensor) -> str:
        return "".join("0123456789A"[round(10 * w)] for w in loss_weights(kind, fill)[0].tolist())

    lines = {
        "clean": text(x[0].tolist()),
        "input": text(z[0].tolist()),
        "kind": "".join(".MWG"[k] for k in kind[0].tolist()),
        "bundle": "".join("^" if b else " " for b in bundle[0].tolist()),
        "loss in A": tenths(kind == M),
        "loss in B": tenths(bundle),
    }
    for name, line in lines.items():
        print(f"  {name:10}" + "  ".join(line[a : a + B] for a in range(0, len(line), B)).rstrip())
    print()


@command
def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("gallery")
    group.add_argument("--text", default="def add(a, b):\n    return a + b\n", help=r"the text; \n is a line break")
    group.add_argument(
        "--block_length", type=bounded(int, 1), default=16, help="tokens that draw one mask ratio and one bundle"
    )
    group.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer, B = byte_tokenizer(), args.block_length
    ids = tokenizer.encode_document(args.text.replace("\\n", "\n")).tolist()
    if not ids:
        fail("--text is empty: give some text")
    x = torch.tensor([ids + [tokenizer.eos_id] * (-len(ids) % B)])
    free = torch.arange(x.shape[1])[None] < len(ids)
    likeliest = Counter(ids).most_common(1)[0][0]  # stands in for the model that writes the draft
    print("M masked, W wrong-visible, G clean-visible, ^ in the bundle; loss weights in tenths: A = 1.0 fill, 3 = 0.3")
    print("edit, 2 = 0.2 clean, 0 = none. Stage A fills all of M, Stage B its bundle alone. The text's commonest byte")
    print("stands in for the model's draft.\n")
    for name in CORRUPTIONS:
        how = Corruption(name, B, tokenizer.mask_id, n_plain=256)
        rows = [generator(args.seed, "gallery")]
        z, kind = corrupt(x, free, how, rows, lambda z, where: torch.full((int(where.sum()),), likeliest))
        print(f"{name}: " + ", ".join(f"{int((kind == k).sum())} {n}" for k, n in ((M, "M"), (W, "W"), (G, "G"))))
        show(x, z, kind, draw_bundle(kind == M, B, 1, 4, rows), B, tokenizer.mask_id)


if __name__ == "__main__":
    main()
