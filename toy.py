"""Toy tasks whose joint distribution is a table, so that every number about them is exact.

    python toy.py                                # the seven tasks: what each is, and what one step loses
    python toy.py modes --out DIR                # write rows of one task to train on (lib/rows.py describes them)
    python toy.py copy eps=0.3 V=12 --out DIR    # write a task in another size

A toy's prompt repeats one token, its context. Its answer is a tuple of symbols, which fills one block. In each context
a task gives every answer a probability, so entropies can be summed exactly, in nats. The sizes of a task:

    V         the number of symbols
    m         the number of positions in an answer
    n_ctx     the number of contexts, 32 at most by default; a task may have fewer
    eps       of copy (0.05)
    rho       of gaussian (0.9), which has levels (8) in place of V

`python train.py --data DIR --config configs/toy_base.toml` trains a model on such rows, and
`python evaluate.py --ckpt out/toy_base` says what its decoders lose.
"""

import lib.first  # noqa: F401

import inspect
import itertools
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lib.rows import Meta, refuse_full, write_meta, write_rows
from lib.util import Parser, alone_in, bounded, command, fail, generator, print_table, quoted

# R rows, N contexts, S support tuples, m answer positions, V symbols, Q quadrature nodes

MAX_TUPLES = 65_536


@dataclass
class Toy:
    """One task as a table."""

    name: str
    V: int
    support: Tensor  # (N, S, m) int64: the tuples
    prob: Tensor  # (N, S) float64: their probabilities, each row sums to 1

    def __post_init__(self) -> None:
        self.n_ctx, _, self.m = self.support.shape

        # token ids: the symbols, then one token for each context, then the two special ones
        self.eos_id = self.V + self.n_ctx
        self.mask_id = self.eos_id + 1
        self.vocab_size = self.mask_id + 1

    def prompt(self, c: Tensor) -> Tensor:
        """(R,) int64 -> (R, m) int64: a block that is full of the context's token."""
        return (self.V + c)[:, None].repeat(1, self.m)

    def quantile(self, c: Tensor, u: Tensor) -> Tensor:
        """(R,), (R,) float64 in [0, 1) -> (R, m): the tuples where context c's cumulative probability passes u."""
        index = torch.empty_like(c)
        for n in c.unique().tolist():
            here = c == n
            cdf = self.prob[n].cumsum(0)  # (S,)
            # by rounding the last sum may not be 1, so u is a share of that sum
            index[here] = torch.searchsorted(cdf, u[here] * cdf[-1], right=True)
        return self.support[c, index.clamp(max=self.prob.shape[1] - 1)]

    def marginals(self) -> Tensor:
        """(N, m, V) float64."""
        # at each position a tuple adds its probability to that of its symbol
        weight = self.prob[..., None].expand_as(self.support)  # (N, S, m)
        total = weight.new_zeros(self.n_ctx, self.V, self.m)
        return total.scatter_add_(1, self.support, weight).mT

    def h_joint(self) -> Tensor:
        """(N,) float64: joint entropy in nats."""
        return torch.special.entr(self.prob).sum(-1)

    def tc(self) -> Tensor:
        """(N,) float64: total correlation in nats."""
        h_marginals = torch.special.entr(self.marginals()).sum((1, 2))
        return (h_marginals - self.h_joint()).clamp(min=0)  # by rounding it may be below 0

    def log_prob(self, c: Tensor, tuples: Tensor) -> Tensor:
        """(R,), (R, m) int64 -> (R,) float64 in nats, -inf outside the support."""
        same = (tuples[:, None] == self.support[c]).all(-1)  # (R, S)
        return (same * self.prob[c]).sum(-1).log()


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats of two tables over the same tuples, (..., S) each -> (...). The sum of q may be below 1."""
    total = (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)
    return total.clamp(min=0)  # by rounding it may be below 0


# --- the tasks: each returns V, the support (N, S, m), whose tuples differ, and their probabilities (S,) in any context
Rng = np.random.Generator
Table = tuple[int, Tensor, Tensor]


def _tuples(V: int, k: int) -> Tensor:
    """(V**k, k) int64: all tuples, the last position fastest."""
    if V**k > MAX_TUPLES:
        fail(f"{V}**{k} = {V**k:,} tuples are more than {MAX_TUPLES:,}: take fewer symbols or a smaller m")
    symbols = torch.arange(V)
    return torch.cartesian_prod(*[symbols] * k).reshape(-1, k)


def _uniform(support: Tensor) -> Tensor:
    S = support.shape[1]
    return torch.full((S,), 1 / S, dtype=torch.float64)


def _shifted(base: Tensor, prob: Tensor, V: int, n_ctx: int, rng: Rng) -> Table:
    """All tuples base (V**m, m), with probabilities prob (V**m,), shifted in each context and position."""
    # a shift is one of the V**(m-1) tuples that start with 0, because to shift all positions alike does not change the
    # copy task
    most = len(base) // V
    shift = base[rng.choice(most, min(n_ctx, most), replace=False)]  # (N, m)

    # a tuple whose probability is 0, or underflows to 0, is not in the support
    keep = prob > 0
    support = (base[keep] + shift[:, None]) % V  # (N, S, m)
    return V, support, prob[keep]


def modes(rng: Rng, V: int = 24, m: int = 4, n_ctx: int = 32) -> Table:
    """The answer is one of three phrases of the context, with weights 4 : 3 : 3. Phrases 1 and 2 are alike at half of
    the positions. There their common symbol is the likeliest (6 to 4), and elsewhere phrase 0's is. So the likeliest
    symbols of all positions together are not a phrase.
    """
    if V < 3:
        fail(f"modes needs three symbols, one for each phrase: V = {V} is too small")

    # at every position the phrases have different symbols, the first three of a shuffled alphabet
    alphabet = np.tile(np.arange(V), (n_ctx, m, 1))
    phrases = rng.permuted(alphabet, axis=-1)[..., :3]  # (N, m, S)

    # but phrase 2 takes those of phrase 1 at half of the positions, which each context draws
    half = np.tile(np.arange(m) < m // 2, (n_ctx, 1))
    shared = rng.permuted(half, axis=-1)  # (N, m)
    phrases[shared, 2] = phrases[shared, 1]

    support = torch.from_numpy(phrases).transpose(1, 2)  # (N, S, m)
    return V, support, torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)


def pairs(rng: Rng, V: int = 8, m: int = 4, n_ctx: int = 32) -> Table:
    """The answer is m/2 pairs (a, a + c mod V), each with a uniform a: TC is ln V for each pair."""
    if m % 2:
        fail(f"pairs needs an even m, not {m}")
    c = torch.arange(min(n_ctx, V))[:, None, None]
    a = _tuples(V, m // 2).expand(len(c), -1, -1)  # (N, S, m/2)

    # the members of a pair are neighbours: (N, S, m/2, 2) -> (N, S, m)
    support = torch.stack((a, (a + c) % V), -1).flatten(2)
    return V, support, _uniform(support)


def mixed(rng: Rng, V: int = 8, m: int = 4, n_ctx: int = 32) -> Table:
    """The answer is m/4 groups (c, u, a, V - 1 - a), with u and a uniform: the marginals of u and a are the same."""
    if m % 4:
        fail(f"mixed needs an m that 4 divides, not {m}")
    c = torch.arange(min(n_ctx, V))[:, None, None]

    # u and a of every group: (S, m/2) -> (N, S, m/4) each
    free = _tuples(V, m // 2).expand(len(c), -1, -1)
    u = free[..., 0::2]
    a = free[..., 1::2]

    # the members of a group are neighbours: (N, S, m/4, 4) -> (N, S, m)
    support = torch.stack((c.expand_as(a), u, a, V - 1 - a), -1).flatten(2)
    return V, support, _uniform(support)


def noisy_copy(rng: Rng, V: int = 8, m: int = 4, n_ctx: int = 32, eps: float = 0.05) -> Table:
    """x_1 is uniform. Each other x_i is x_1 or, with probability eps, uniform: the larger eps, the less TC. Then every
    context adds to each position but the first a number of its own, mod V."""
    # p[d]: the probability that x_i - x_1 mod V is d
    p = torch.full((V,), eps / V, dtype=torch.float64)
    p[0] += 1 - eps

    base = _tuples(V, m)  # (V**m, m)
    difference = (base[:, 1:] - base[:, :1]) % V  # (V**m, m - 1)
    prob = p[difference].prod(-1) / V
    return _shifted(base, prob, V, n_ctx, rng)


def gaussian(rng: Rng, levels: int = 8, m: int = 3, n_ctx: int = 32, rho: float = 0.9) -> Table:
    """Let z_i = sqrt(rho) f + sqrt(1 - rho) e_i, with f and e_i standard normal, so every correlation is rho. x_i
    says between which of the quantiles k/levels z_i lies. Then every context adds to each position but the first a
    number of its own, mod levels.
    """
    base = _tuples(levels, m)  # (V**m, m)

    # p(x) is the integral over f of prod_i p(x_i | f), by the trapezoid rule. As a function of f a factor
    # is a step of width sqrt(1 - rho), and with 8 nodes to a width the error is below rounding
    width = math.sqrt(1 - rho)
    f = torch.arange(-9, 9, width / 8, dtype=torch.float64)  # (Q,)
    density = torch.exp(-(f**2) / 2)

    # p(x_i | f) of every level: e_i lies between two edges
    quantile = torch.special.ndtri(torch.arange(levels + 1, dtype=torch.float64) / levels)
    edges = (quantile - math.sqrt(rho) * f[:, None]) / width  # (Q, V + 1)
    level = torch.special.ndtr(edges).diff().clamp(min=0)  # (Q, V)

    # the product over positions in two halves, so that no array has Q times V**m numbers
    left = level[:, _tuples(levels, m // 2)].prod(-1)  # (Q, V**(m//2))
    right = level[:, _tuples(levels, m - m // 2)].prod(-1)
    prob = (density[:, None] * left).T @ right  # the sum over nodes
    prob = prob.flatten()  # (V**m,)
    return _shifted(base, prob / prob.sum(), levels, n_ctx, rng)


def permutation(rng: Rng, V: int = 8, m: int = 4, n_ctx: int = 32) -> Table:
    """The context picks m of the V symbols, and the answer is one of their m! orders, uniformly."""
    if m > V or math.factorial(m) > MAX_TUPLES:
        fail(f"permutation needs m <= V and m! <= {MAX_TUPLES:,}, not m = {m} and V = {V}")
    N = min(n_ctx, math.comb(V, m))

    # no two contexts pick the same symbols; a dict keeps the order in which they were drawn
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < N:
        chosen[tuple(sorted(rng.choice(V, m, replace=False).tolist()))] = None

    # (N, m) symbols at (S, m) places -> (N, S, m)
    orders = torch.tensor(list(itertools.permutations(range(m))))
    support = torch.tensor(list(chosen))[:, orders]
    return V, support, _uniform(support)


def modular_sum(rng: Rng, V: int = 5, m: int = 3, n_ctx: int = 32) -> Table:
    """The answer is a tuple whose sum is c mod V, uniformly (with V = 2, parity): any m - 1 positions are
    independent."""
    c = torch.arange(min(n_ctx, V))[:, None, None]
    free = _tuples(V, m - 1).expand(len(c), -1, -1)  # (N, S, m - 1)
    last = (c - free.sum(-1, keepdim=True)) % V  # (N, S, 1)
    support = torch.cat((free, last), -1)
    return V, support, _uniform(support)


TASKS = {
    "modes": modes,
    "pairs": pairs,
    "mixed": mixed,
    "copy": noisy_copy,
    "gaussian": gaussian,
    "permutation": permutation,
    "sum": modular_sum,
}
# the least and the largest value of every size; a size with integers here is an integer
BOUNDS = {
    "V": (2, 1024),
    "m": (2, 32),
    "n_ctx": (1, 128),
    "levels": (2, 1024),
    "eps": (0.0, 1.0),
    "rho": (0.0, 0.9999),
}


# --- building a toy, and rows to train on
def sizes(given: list[str]) -> dict[str, int | float]:
    """["V=12", "eps=0.3"] -> {"V": 12, "eps": 0.3}"""
    try:
        items = [text.split("=") for text in given]
        return {key: type(BOUNDS[key][0])(value) for key, value in items}
    except (KeyError, ValueError):
        fail(f"{' '.join(given)!r} is not a size of a toy: give KEY=VALUE, like V=12; keys are {', '.join(BOUNDS)}")


def make(name: str, **given: int | float) -> Toy:
    """Build a task, always with the same contexts. A size that it does not use is refused."""
    if name not in list(TASKS):
        fail(f"there is no task {name!r:.80}: the tasks are {', '.join(TASKS)}")
    task = TASKS[name]
    _, *used = inspect.signature(task).parameters  # the first is rng
    for key, value in given.items():
        if key not in used:
            fail(f"the {name} task does not use {key}: it uses {', '.join(used)}")
        low, high = BOUNDS[key]
        if type(value) is not type(low) or not low <= value <= high:
            fail(f"{key} must be in {low:g}..{high:g}, not {value}")

    V, support, prob = task(np.random.default_rng(0), **given)
    return Toy(name, V, support.contiguous(), prob.repeat(len(support), 1))


def write_toy(folder: Path, name: str, given: dict[str, int | float], rows: int, seed: int) -> None:
    """Write `rows` rows to train on, and 4,096 of validation, which are the same for every seed."""
    refuse_full(folder)
    toy = make(name, **given)
    vocab_size = math.ceil(toy.vocab_size / 16) * 16
    for split, R, key in (("train", rows, [seed, "rows"]), ("val", 4096, ["validation rows"])):
        # (R, 2m) int64: a block that is full of the context's token, then a block with an answer
        rng = generator(*key)
        c = torch.randint(toy.n_ctx, (R,), generator=rng)
        u = torch.rand(R, dtype=torch.float64, generator=rng)  # each answer's place in its context
        x = torch.cat([toy.prompt(c), toy.quantile(c, u)], dim=1)
        write_rows(folder, split, list(x.numpy()), [toy.m] * R, vocab_size)
        print(f"{split:5}  {R:,} rows, {x.numel():,} tokens")

    # all sizes, so that the task can be built again even if a default changes
    _, *used = inspect.signature(TASKS[name]).parameters.values()
    judge = {"toy": name} | {size.name: size.default for size in used} | given
    write_meta(folder, Meta(vocab_size, toy.eos_id, toy.mask_id, toy.V, toy.m, judge))


# --- what is printed
ABOUT_TASKS = """
answers   the number of possible answers in a context
H         the entropy of an answer in nats; this and the next two are means over contexts
TC        the total correlation in nats: the sum of the positions' entropies minus H. A step that draws each
          position by itself loses KL(truth || drawn) = TC from the true marginals, and more from others
drawn     the probability that the answer is possible if each position is drawn from its true marginal

An answer has m symbols, x_1 to x_m, out of V. c is its context."""


def show_all() -> None:
    """A row for each task."""
    rows = []
    for name in TASKS:
        toy = make(name)
        sizes = [toy.V, toy.m, toy.n_ctx, toy.support.shape[1]]

        # one step: each position draws its symbol by itself
        drawn = toy.marginals().gather(2, toy.support.mT).prod(1).sum(-1)
        exact = [toy.h_joint(), toy.tc(), drawn]
        rows.append([name, *map(str, sizes), *(f"{number.mean():.3f}" for number in exact)])
    print_table(["task", "V", "m", "contexts", "answers", "H", "TC", "drawn"], rows)
    print(ABOUT_TASKS)

    # what each task is: its docstring
    for name, task in TASKS.items():
        what = " ".join(inspect.getdoc(task).split())
        print(textwrap.fill(f"{name:12}{what}", 105, subsequent_indent=" " * 12))
    print("\nrows of a task to train on: python toy.py modes --out data/modes")


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("task", nargs="?", choices=TASKS, help="a task (left out: show all seven)")
    add("size", nargs="*", metavar="KEY=VALUE", help="sizes of the task, as explained above")
    add("--out", type=Path, metavar="DIR", help="write rows of the task to this new folder")
    add("--rows", type=bounded(int, 1, 10**7), default=200_000, help="the number of rows to train on")
    add("--seed", type=int, default=0, help="the seed of the rows to train on")
    args = parser.parse_intermixed_args()

    if (args.task is None) != (args.out is None):
        fail("a task and --out belong together: python toy.py modes --out data/modes")
    if args.task is None:
        show_all()
        return
    with alone_in(args.out):
        write_toy(args.out, args.task, sizes(args.size), args.rows, args.seed)
    print(f"{args.out} is ready: python train.py --data {quoted(args.out)} --config configs/toy_base.toml")


if __name__ == "__main__":
    main()
