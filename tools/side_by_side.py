"""The same beginnings of names, completed three ways: each token by itself, together, and jointly.

    one at a time    Stage A, one token a forward: slow, and what the model can do
    factorised       Stage A, every token above the gate at once: fast, and they need not belong together
    jointly          the same gate, but the bundle is written by the adapter: a joint head, which may refuse

Forwards are all of them, in full ones. `unicodedata` says what exists. Names held out from training, drawn by a fixed
rule, or your own beginnings.

    python -m tools.side_by_side                                     # assets/names and assets/names/joint, 20 seconds
    python -m tools.side_by_side --prompt "GREEK SMALL" --prompt "ARABIC LIGATURE"
"""

from dataclasses import replace
from pathlib import Path

import torch

from cache import in_full
from checkpoint import load_model, load_tokenizer
from data import Parser, bounded, exists, fail, pick_device
from evaluate import draw_names
from sample import Decoding, generate


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("side by side")
    group.add_argument("--ckpt", default="assets/names", help="a checkpoint of train.py --data names")
    group.add_argument("--adapter", default="assets/names/joint", help="its joint head, or Stage B")
    group.add_argument("--prompt", action="append", default=[], help="a beginning; repeat the flag for several")
    group.add_argument(
        "--prompts", type=bounded(int, 1), default=12, help="held-out names to begin, where none is given"
    )
    group.add_argument(
        "--tau_m2t", type=bounded(float, -1, 1), default=-1.0, help="the gate of the last two (-1: every mask at once)"
    )
    args = parser.parse_args()
    device = pick_device("auto")
    base, joint = (load_model(args.ckpt, device, torch.float32, adapter) for adapter in (None, args.adapter))
    if not (Path(args.ckpt) / "names.json").exists():
        fail(f"{args.ckpt} has no names.json: this takes a checkpoint of train.py --data names")
    tokenizer = load_tokenizer(Path(args.ckpt), base.cfg.tokenizer)
    prompts = [tokenizer.encode(text.rstrip()) for text in args.prompt]
    prompts = prompts or list(draw_names(args.prompts, "held out", tokenizer).values())
    d = Decoding(gen_length=32, eos_early_stop=True, tau_t2t=None, n_rounds=0)
    ways = {"one at a time": (base, replace(d, tau_m2t=1.0)), "factorised": (base, replace(d, tau_m2t=args.tau_m2t)),
            "jointly": (joint, replace(d, tau_m2t=args.tau_m2t, n_rounds=joint.cfg.n_rounds))}  # fmt: skip
    outputs = {way: generate(model, prompts, d) for way, (model, d) in ways.items()}
    width, totals = max(map(len, ways)), {way: [0, 0.0] for way in ways}
    for i, prompt in enumerate(prompts):
        print(tokenizer.decode(prompt))
        for way, (model, _) in ways.items():
            name, forwards = (
                tokenizer.decode(prompt + outputs[way][i].tokens),
                in_full(outputs[way][i].nfe, model.partial_cost),
            )
            char = exists(name)
            totals[way] = [totals[way][0] + bool(char), totals[way][1] + forwards]
            print(f"  {way:{width}}  {forwards:5.2f} forwards  {'+' if char else '-'}  {name}  {char or ''}")
    for way, (found, forwards) in totals.items():
        print(f"{way:{width}}: {found} of {len(prompts)} exist, {forwards / len(prompts):.2f} forwards a name")


if __name__ == "__main__":
    main()
