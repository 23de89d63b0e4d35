"""The toys' tables: entropies, total correlation, and whether the tuple of marginal argmaxes is possible at all.

python -m tools.toys                         # one row per task, about 2 seconds
python -m tools.toys modes --context 1       # the phrases of one context
python -m tools.toys sum V=2 m=8             # parity of eight bits; sizes as toy.py says
"""

import math

import torch

from lib.toy import TASKS, make, sizes
from lib.util import Parser, bounded, command, fail


def first_max(p: torch.Tensor) -> torch.Tensor:
    """(..., S) -> (...) int64: index of the largest entry, the first on ties, where rounding may have split a tie."""
    return (p >= p.amax(-1, keepdim=True) * (1 - 1e-9)).int().argmax(-1)


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("toy").add_argument
    add("task", nargs="?", choices=TASKS, help="one task (default: all of them)")
    add("sizes", nargs="*", metavar="KEY=VALUE", help="sizes of the task, see above")
    add("--seed", type=bounded(int, 0), default=0, help="seed that the contexts are drawn with (0)")
    add("--context", type=int, help="show the answers of this context of the task, the likeliest first")
    args = parser.parse_intermixed_args()
    toys = [make(name, seed=args.seed, **sizes(args.sizes)) for name in ([args.task] if args.task else TASKS)]
    if args.context is not None and not (args.task and 0 <= args.context < toys[0].n_ctx):
        fail(f"--context {args.context} needs a task, and one of its contexts 0..{toys[0].n_ctx - 1}")
    print("nats, means over contexts; argmax ok: contexts where the tuple of marginal argmaxes is coherent (a phrase)")
    print("task           V   m  ctx  support  H(joint)  sum H_i       TC  p(mode)  argmax ok  mode of context 0")
    for toy in toys:
        h, tc, alone = float(toy.h_joint().mean()), float(toy.tc().mean()), first_max(toy.marginals())
        ok = toy.log_prob(torch.arange(toy.n_ctx), alone) > -math.inf  # inside the support
        print(f"{toy.name:<12}{toy.V:4}{toy.m:4}{toy.n_ctx:5}{toy.support.shape[1]:9,}{h:10.4f}{h + tc:9.4f}{tc:9.4f}"
              f"{toy.prob[0].max():9.4f}{f'{ok.sum()}/{len(ok)}':>11}  {toy.mode()[0].tolist()}")  # fmt: skip
    if (c := args.context) is not None:
        print(f"context {c}, prompt {toy.prompt(torch.tensor([c]))[0].tolist()}, its likeliest answers:")
        for i in toy.prob[c].argsort(descending=True, stable=True)[:8]:
            print(f"  {toy.prob[c, i]:.4f}  {toy.support[c, i].tolist()}")
        print(f"  each token by itself: {alone[c].tolist()} ({'coherent' if ok[c] else 'impossible'})")


if __name__ == "__main__":
    main()
