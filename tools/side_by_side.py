"""The same beginnings of names, completed three ways: each token by itself, all together, and with a joint head.

    one at a time    Stage A, one token a forward, in the order of the model: slow, and what it can do
    factorised       Stage A, every token that passes the gate at once: fast, and they need not belong together
    joint head       the same gate; the head writes the bundle, and may refuse a part of it

Forwards are counted in full ones, everything included. `unicodedata` says which names exist: +, or -.

The beginnings are those of names held out from training, drawn by a fixed rule: the first third of a name's tokens, so
that some end inside a word. Each of those is marked. Or give your own, as many letters as you like.

    python -m tools.side_by_side                                     # assets/names and its joint head
    python -m tools.side_by_side --prompt "GREEK SMALL" --prompt "ARABIC LIGATURE"
"""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch

from cache import Output, in_full
from checkpoint import adapter_settings, load_model, load_tokenizer
from evaluate import draw_names
from lib.data import exists
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, fail, pick_device
from model import Model
from sample import Decoding, generate

Way = tuple[Model, Decoding]


# --- what is completed
def beginnings(args: Namespace, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """What is printed above the three completions -> the ids of the beginning."""
    # in names a blank belongs to the word after it
    if args.prompt:
        return {text: tokenizer.encode(text.rstrip()) for text in args.prompt}

    found = {}
    for name, ids in draw_names(args.prompts, "held out", tokenizer).items():
        start = tokenizer.decode(ids)
        title = f"{start}   (of {name})"
        if inside_a_word(name, len(start)):
            title = f"{start}~   (of {name}, cut inside a word)"
        found[title] = ids
    return found


def inside_a_word(name: str, at: int) -> bool:
    """Whether name[:at] ends in the middle of a word: ("GREEK SMALL", 8) does, 5 and 6 do not."""
    if not 0 < at < len(name):
        return False
    before = name[at - 1]
    after = name[at]
    return before.isalnum() and after.isalnum()


# --- how
def three_ways(args: Namespace) -> dict[str, Way]:
    """Name -> model and settings."""
    device = pick_device("auto")
    base = load_model(args.ckpt, device, torch.float32)
    adapted = load_model(args.ckpt, device, torch.float32, args.adapter)

    # an adapter of another kind is not called a joint head
    name = "adapter"
    if adapter_settings(args.adapter).get("extension") == "beyond.joint_head":
        name = "joint head"

    start = Decoding(gen_length=32, tau_t2t=None, n_rounds=0)
    gated = replace(start, tau_m2t=args.tau_m2t)
    return {
        "one at a time": (base, replace(start, tau_m2t=1.0)),
        "factorised": (base, gated),
        name: (adapted, replace(gated, n_rounds=adapted.cfg.n_rounds)),
    }


# --- what is shown
def show(prompts: dict[str, list[int]], ways: dict[str, Way], outputs: dict[str, list[Output]], tok: Tokenizer) -> None:
    """Every completion with what it cost, then the sums of each way."""
    width = max(map(len, ways))
    exist = dict.fromkeys(ways, 0)
    forwards = dict.fromkeys(ways, 0.0)

    for i, (title, prompt) in enumerate(prompts.items()):
        print(title)
        for way, (model, _) in ways.items():
            output = outputs[way][i]
            name = tok.decode(prompt + output.tokens)
            cost = in_full(output.nfe, model.partial_cost)
            char = exists(name)
            mark = "-"
            if char:
                mark = "+"
                exist[way] += 1
            forwards[way] += cost
            print(f"  {way:{width}}  {cost:5.2f} forwards  {mark}  {name}  {char or ''}".rstrip())

    print()
    for way in ways:
        mean = forwards[way] / len(prompts)
        print(f"{way:{width}}: {exist[way]} of {len(prompts)} exist, {mean:.2f} forwards a name")


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("side by side").add_argument
    # fmt: off
    add("--ckpt", default="assets/names", help="a checkpoint of train.py --data names")
    add("--adapter", default="assets/names/joint", help="its joint head, or another adapter of it")
    add("--prompt", action="append", default=[], help="a beginning; repeat the flag for several")
    add("--prompts", type=bounded(int, 1), default=12, help="how many held-out names to begin, where none is given")
    add("--tau_m2t", type=bounded(float, -1, 1), default=-1.0,
        help="the gate of the last two (-1: every mask at once)")
    # fmt: on
    args = parser.parse_args()

    folder = Path(args.ckpt)
    if not (folder / "names.json").exists():
        fail(f"{folder} has no names.json: this takes a checkpoint of train.py --data names")
    ways = three_ways(args)
    tokenizer = load_tokenizer(folder, "bpe")
    if tokenizer is None:
        fail(f"{folder} has no tokenizer.json: copy the folder again")
    prompts = beginnings(args, tokenizer)
    for title, ids in prompts.items():
        if not ids:
            fail(f"--prompt {title!r} is empty: a name is continued, give it at least one letter")

    outputs = {}
    for way, (model, d) in ways.items():
        outputs[way] = generate(model, list(prompts.values()), d)
    show(prompts, ways, outputs, tokenizer)


if __name__ == "__main__":
    main()
