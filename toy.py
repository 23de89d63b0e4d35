"""Toy tasks whose joint distribution is a table, so that every number about joint commitment is exact.

A toy maps a context to the probability of every tuple of an answer block. Marginals, entropies, total correlation
(TC, the marginal entropies' sum less the joint entropy), mode and distances follow by enumeration, in float64 and nats.

  modes        one of n_modes phrases; phrases 1 and 2 share tokens, so that the tuple of marginal argmaxes is no phrase
  pairs        m/2 keyed pairs (a, a + s mod V), the key s from the context
  mixed        m/4 times [f, u, a, g(a)], f from the context: u and a are equally unsure, but only a has a partner
  copy         x_1 uniform, each later x_i copies it, or with probability eps is drawn afresh: a dial for TC
  gaussian     a Gaussian copula, every correlation rho, cut into `levels` symbols of equal mass
  permutation  the context picks m of the V symbols, the answer is a uniform order of them
  sum          uniform subject to sum = c mod V: every proper subset is independent (V = 2 is parity)

Refused, with the numbers: a table of more than 65,536 tuples, an impossible size, a parameter that a task does not use.

    python toy.py                             # one row per task, about 3 seconds
    python toy.py --task modes --context 1    # the phrases of one context
    python toy.py --task copy --eps 0.3       # the noisy copy with more noise
    python toy.py --task sum --V 2 --m 8      # parity of eight bits
"""

import inspect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data import Parser, fail, generator
from model import sequence_context

if TYPE_CHECKING:
    from model import Model

# R rows, N contexts, S support tuples, m answer positions, V symbols, Q quadrature nodes

MAX_TUPLES = 65_536
MAX_CONTEXTS = 128


@dataclass(frozen=True)
class Toy:
    """One task as a table, on the CPU. Raises ValueError where a (context, tuple) no longer fits one int64.

    Where contexts differ in size, the shorter ones repeat their tuple 0 with probability 0.
    """

    name: str
    V: int
    m: int
    n_ctx: int
    support: Tensor  # (N, S, m) int64: the tuples
    prob: Tensor  # (N, S) float64: their probabilities, each row sums to 1
    closed_form: float | None  # TC in nats by a formula, where there is one

    def __post_init__(self) -> None:
        if self.n_ctx * self.V**self.m >= 2**63:
            raise ValueError(f"{self.n_ctx} contexts of {self.V}**{self.m} tuples exceed 2**63: lower --V or --m")

    @property
    def eos_id(self) -> int:
        """Model tokens are the answer symbols 0..V-1, the context tokens V..V+N-1, then eos and mask."""
        return self.V + self.n_ctx

    @property
    def mask_id(self) -> int:
        return self.V + self.n_ctx + 1

    @property
    def vocab_size(self) -> int:
        return self.V + self.n_ctx + 2

    def prompt(self, c: Tensor) -> Tensor:
        """(R,) int64 -> (R, m) int64: the context token m times, so that prompt and answer fill one block each."""
        return (self.V + c)[:, None].repeat(1, self.m)

    def sample(self, c: Tensor, generator: torch.Generator) -> Tensor:
        """(R,) int64 -> (R, m) int64: one exact draw per row."""
        return self.quantile(c, torch.rand(len(c), dtype=torch.float64, generator=generator))

    def quantile(self, c: Tensor, u: Tensor) -> Tensor:
        """(R,) int64, (R,) float64 in [0, 1) -> (R, m) int64: the tuple where c's cumulative probability passes u."""
        # Context n owns the stretch (n, n + 1] of one ascending CDF (N*S,): no (R, S) matrix, however many rows.
        cdf = self.prob.cumsum(-1)
        cdf = (cdf / cdf[:, -1:] + torch.arange(self.n_ctx)[:, None]).flatten()
        index = torch.searchsorted(cdf, c + u, right=True)
        index = index.minimum((c + 1) * self.support.shape[1] - 1)  # c + u can round up into the next context
        return self.support.flatten(0, 1)[index]

    def marginals(self) -> Tensor:
        """(N, m, V) float64."""
        index = self.support.transpose(1, 2)
        out = torch.zeros(self.n_ctx, self.m, self.V, dtype=torch.float64)
        return out.scatter_add_(2, index, self.prob[:, None].expand(index.shape))

    def h_joint(self) -> Tensor:
        """(N,) float64: joint entropy in nats."""
        return _entropy(self.prob)

    def h_marginals(self) -> Tensor:
        """(N, m) float64: entropy of every position in nats."""
        return _entropy(self.marginals())

    def tc(self) -> Tensor:
        """(N,) float64: total correlation in nats."""
        return self.h_marginals().sum(-1) - self.h_joint()

    def mode(self) -> Tensor:
        """(N, m) int64: the most probable tuple, the first one on ties."""
        return self.support[torch.arange(self.n_ctx), first_max(self.prob)]

    def log_prob(self, c: Tensor, tuples: Tensor) -> Tensor:
        """(R,), (R, ..., m) int64 -> (R, ...) float64 in nats, -inf outside the support and for ids >= V."""
        # A stable sort keeps tuple 0 ahead of the padding that repeats it with probability 0.
        codes, order = self._code(torch.arange(self.n_ctx), self.support).flatten().sort(stable=True)
        code = self._code(c, tuples)
        index = torch.searchsorted(codes, code).clamp(max=len(codes) - 1)
        known = (codes[index] == code) & ((tuples >= 0) & (tuples < self.V)).all(-1)
        return self.prob.flatten()[order[index]].log().masked_fill(~known, -math.inf)

    def coherent(self, c: Tensor, tuples: Tensor) -> Tensor:
        """(R,), (R, ..., m) int64 -> (R, ...) bool: is the tuple inside the support?"""
        return self.log_prob(c, tuples) > -math.inf

    def conditional(self, c: Tensor, z: Tensor) -> Tensor:
        """(R,), (R, m) int64 with -1 for masked -> (R, m, V) float64: the exact p(x_i | visible part of z).

        The ideal factorised decoder. A visible part of probability 0 has no conditional; its rows are uniform.
        """
        out = torch.full((len(z), self.m, self.V), 1 / self.V, dtype=torch.float64)
        for n in c.unique().tolist():  # by context, so that the support is not copied R times
            rows = (c == n).nonzero()[:, 0]
            fits = ((z[rows, None] == self.support[n]) | (z[rows, None] == -1)).all(-1)
            weight = fits * self.prob[n]
            possible = weight.sum(-1) > 0
            one_hot = torch.nn.functional.one_hot(self.support[n], self.V).double()
            joint = torch.einsum("rs,smv->rmv", weight[possible], one_hot)
            out[rows[possible]] = joint / joint.sum(-1, keepdim=True)
        return out

    def _code(self, c: Tensor, tuples: Tensor) -> Tensor:
        """One integer per (context, tuple): (R,), (R, ..., m) -> (R, ...)."""
        c = c.view(-1, *[1] * (tuples.dim() - 2))
        return c * self.V**self.m + (tuples * self.V ** torch.arange(self.m)).sum(-1)


def first_max(p: Tensor) -> Tensor:
    """(..., S) -> (...) int64: index of the largest entry, the first on ties, where rounding may have split a tie."""
    return (p >= p.amax(-1, keepdim=True) * (1 - 1e-9)).int().argmax(-1)


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats of aligned tables, (..., S) each -> (...); p complete, for KL(q || p) is inf if outside(q)."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Total variation of aligned tables, (..., S) each -> (...); q may leave mass outside the support of p."""
    return 0.5 * ((p - q).abs().sum(-1) + outside(q))


def outside(q: Tensor) -> Tensor:
    """(..., S) -> (...): the mass that q leaves outside the support, one minus its probability of a coherent tuple."""
    return (1 - q.sum(-1)).clamp(min=0)


def product_table(toy: Toy, c: Tensor, q_marginals: Tensor) -> Tensor:
    """(R,), (R, m, V) -> (R, S): what prod_i q_i gives each support tuple of c; padding gets 0, so it counts once."""
    q = q_marginals.gather(2, toy.support[c].transpose(1, 2)).prod(1)
    return q * (toy.prob[c] > 0)


def _contexts(n_ctx: int | None, most: int) -> int:
    most = min(most, MAX_CONTEXTS)
    n_ctx = min(32, most) if n_ctx is None else n_ctx
    if not 1 <= n_ctx <= most:
        raise ValueError(f"n_ctx must lie in 1..{most} here, not {n_ctx}")
    return n_ctx


def _tuples(V: int, k: int, flag: str = "--V") -> Tensor:
    """(V**k, k) int64: all tuples, the last position fastest."""
    if V**k > MAX_TUPLES:
        raise ValueError(f"{V}**{k} = {V**k:,} tuples, more than {MAX_TUPLES:,}: lower {flag} or --m")
    return torch.cartesian_prod(*[torch.arange(V)] * k).reshape(-1, k)


def _toy(name: str, V: int, support: Tensor, prob: Tensor | None, closed_form: float | None) -> Toy:
    """A Toy from support (N, S, m) and one prob (S,) shared by all contexts, or None for uniform."""
    N, S, m = support.shape
    prob = torch.full((S,), 1 / S, dtype=torch.float64) if prob is None else prob
    return Toy(name, V, m, N, support.contiguous(), prob.repeat(N, 1), closed_form)


def _shifted(base: Tensor, prob: Tensor, V: int, n_ctx: int | None, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """All tuples base (V**m, m), prob (V**m,) -> support (N, S, m), prob (S,), shifted by context and position."""
    most = len(base) // V  # tuples up to here start with 0: shifting all positions alike leaves the copy task as it is
    shift = base[rng.choice(most, _contexts(n_ctx, most), replace=False)]
    keep = prob > 0  # a probability that is 0, or underflows to it, is no support
    return (base[keep] + shift[:, None]) % V, prob[keep]


def modes(rng: np.random.Generator, V: int = 24, m: int = 4, n_ctx: int | None = None, n_modes: int = 3) -> Toy:
    """Weights 4 : 3 : 3 ...; where phrases 1 and 2 share a token, it (6) beats phrase 0, which wins the other half."""
    if n_modes > V:
        raise ValueError(f"{n_modes} modes need as many symbols at every position: V = {V} is too small")
    N = _contexts(n_ctx, MAX_CONTEXTS)
    phrases = rng.permuted(np.tile(np.arange(V), (N, m, 1)), axis=-1)[..., :n_modes]  # (N, m, S)
    shared = rng.permuted(np.tile(np.arange(m) < m // 2, (N, 1)), axis=-1)  # (N, m)
    phrases[shared, 2] = phrases[shared, 1]
    weight = torch.tensor([4.0] + [3.0] * (n_modes - 1), dtype=torch.float64)
    weight /= weight.sum()
    merged = torch.cat((weight[:1], weight[1:3].sum(0, keepdim=True), weight[3:]))
    closed_form = (m - m // 2 - 1) * _entropy(weight) + m // 2 * _entropy(merged)
    toy = _toy("modes", V, torch.from_numpy(phrases).transpose(1, 2), weight, closed_form.item())
    assert not toy.coherent(torch.arange(N), first_max(toy.marginals())).any(), "an argmax tuple is a phrase"
    return toy


def pairs(rng: np.random.Generator, V: int = 8, m: int = 4, n_ctx: int | None = None) -> Toy:
    """m/2 pairs (a, a + s mod V), a uniform, s = c; only a group that holds both members pays, ln V each."""
    if m % 2:
        raise ValueError(f"pairs needs an even m, not {m}")
    free = _tuples(V, m // 2)
    partner = (free + torch.arange(_contexts(n_ctx, V))[:, None, None]) % V  # (N, S, m/2)
    support = torch.stack((free.expand_as(partner), partner), -1).flatten(2)
    return _toy("pairs", V, support, None, m // 2 * math.log(V))


def mixed(rng: np.random.Generator, V: int = 8, m: int = 4, n_ctx: int | None = None) -> Toy:
    """m/4 times [f, u, a, g(a)], f = c, u and a uniform, g(a) = V - 1 - a: no rule on marginals can tell u from a."""
    if m % 4:
        raise ValueError(f"mixed needs an m that 4 divides, not {m}")
    N = _contexts(n_ctx, V)
    u, a = _tuples(V, m // 2).expand(N, -1, -1).unflatten(2, (-1, 2)).unbind(-1)  # (N, S, m/4) each
    f = torch.arange(N)[:, None, None].expand_as(a)
    return _toy("mixed", V, torch.stack((f, u, a, V - 1 - a), -1).flatten(2), None, m // 4 * math.log(V))


def noisy_copy(rng: np.random.Generator, V: int = 8, m: int = 4, n_ctx: int | None = None, eps: float = 0.05) -> Toy:
    """x_1 uniform; x_i = x_1 with probability 1 - eps, else uniform over all V; the context shifts each position."""
    base = _tuples(V, m)
    row = torch.full((V,), eps / V, dtype=torch.float64)
    row[0] += 1 - eps  # p(x_i - x_1 mod V)
    prob = row[(base[:, 1:] - base[:, :1]) % V].prod(-1) / V
    return _toy("copy", V, *_shifted(base, prob, V, n_ctx, rng), (m - 1) * (math.log(V) - _entropy(row).item()))


def gaussian(rng: np.random.Generator, levels: int = 8, m: int = 3, n_ctx: int | None = None, rho: float = 0.9) -> Toy:
    """z_i = sqrt(rho) f + sqrt(1 - rho) e_i, cut at the quantiles k/levels; the context shifts each position."""
    base = _tuples(levels, m, "--levels")
    # Given f, a cell's probability is a step of width sqrt(1 - rho), and the gaps of Gauss-Hermite nodes shrink only as
    # 1/sqrt(Q): at rho 0.99 even 200 nodes are off by 0.02 nats. The trapezoid rule on a decaying entire integrand
    # converges fast: 8 nodes a width leave about exp(-2 pi**2 * 64 / m), below rounding for all m that fit (m <= 16).
    width = math.sqrt(1 - rho)
    f = torch.arange(-9, 9, width / 8, dtype=torch.float64)
    node_weight = torch.exp(-(f**2) / 2)
    edges = torch.special.ndtri(torch.arange(levels + 1, dtype=torch.float64) / levels)
    edges = (edges - math.sqrt(rho) * f[:, None]) / (width * math.sqrt(2))  # (Q, V + 1)
    low, high = edges[:, :-1], edges[:, 1:]
    side = torch.where(low > 0, 1.0, -1.0)  # a tail's own erfc keeps its digits, where ndtr would cancel to 0
    cell = (torch.erfc(side * low) - torch.erfc(side * high)).abs() / 2  # (Q, V): p(x_i = v | f)
    half = [node_weight[:, None], torch.ones_like(node_weight[:, None])]
    for i in range(m):
        h = int(i >= m // 2)
        half[h] = torch.einsum("qa,qv->qav", half[h], cell).flatten(1)
    prob = (half[0].T @ half[1]).flatten()  # (V**m,): the sum over nodes, without a (Q, V**m) array
    return _toy("gaussian", levels, *_shifted(base, prob / prob.sum(), levels, n_ctx, rng), None)


def permutation(rng: np.random.Generator, V: int = 8, m: int = 4, n_ctx: int | None = None) -> Toy:
    """The context picks m distinct symbols of V; the answer is one of their m! orders, uniformly."""
    if m > V:
        raise ValueError(f"permutation needs m <= V, not m = {m} and V = {V}")
    if math.factorial(m) > MAX_TUPLES:
        raise ValueError(f"{m}! = {math.factorial(m):,} tuples, more than {MAX_TUPLES:,}: lower --m")
    N = _contexts(n_ctx, math.comb(V, m))
    chosen: dict[tuple[int, ...], None] = {}  # a set in order of drawing
    while len(chosen) < N:
        chosen[tuple(sorted(rng.choice(V, m, replace=False).tolist()))] = None
    orders = torch.tensor(list(itertools.permutations(range(m))))
    return _toy("permutation", V, torch.tensor(list(chosen))[:, orders], None, m * math.log(m) - math.lgamma(m + 1))


def modular_sum(rng: np.random.Generator, V: int = 5, m: int = 3, n_ctx: int | None = None) -> Toy:
    """Uniform over the tuples whose sum is c mod V: the dependence shows only in the full set."""
    c = torch.arange(_contexts(n_ctx, V))
    free = _tuples(V, m - 1).expand(len(c), -1, -1)
    support = torch.cat((free, (c[:, None, None] - free.sum(-1, keepdim=True)) % V), -1)
    return _toy("sum", V, support, None, math.log(V))


TASKS = dict(modes=modes, pairs=pairs, mixed=mixed, copy=noisy_copy, gaussian=gaussian, permutation=permutation)
TASKS["sum"] = modular_sum
# Two modes never mislead the argmaxes: the heavier one has more than half of the mass at every position.
BOUNDS = dict(V=(2, 1024), levels=(2, 1024), m=(2, 32), n_modes=(3, 1024), eps=(0, 1), rho=(0, 0.9999))


def make(name: str, *, seed: int = 0, **params: int | float | None) -> Toy:
    """Build a task with params V, m, n_ctx, eps, rho, levels, n_modes (None: the task's default) and seeded contexts.

    Raises ValueError, one sentence each: an unknown task, a parameter that the task does not use, an impossible size, a
    table of more than 65,536 tuples.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r}: choose from {', '.join(TASKS)}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, not {seed}")
    given = {key: value for key, value in params.items() if value is not None}
    used = list(inspect.signature(TASKS[name]).parameters)[1:]  # the first is the generator
    for key, value in given.items():
        if key not in used:
            raise ValueError(f"the {name} task does not use --{key}: it uses {', '.join('--' + u for u in used)}")
        if key in BOUNDS and not BOUNDS[key][0] <= value <= BOUNDS[key][1]:
            raise ValueError(f"{key} must lie in {BOUNDS[key][0]}..{BOUNDS[key][1]}, not {value}")
    return TASKS[name](np.random.default_rng(seed), **given)


def row(toy: Toy) -> str:
    """One line of main's table. The difference to the closed form is the largest over contexts."""
    joint, total, tc = (h.mean() for h in (toy.h_joint(), toy.h_marginals().sum(-1), toy.tc()))
    closed = f"{'-':>9}{'-':>9}"
    if toy.closed_form is not None:
        closed = f"{toy.closed_form:9.4f}{(toy.tc() - toy.closed_form).abs().max():9.0e}"
    ok = toy.coherent(torch.arange(toy.n_ctx), first_max(toy.marginals())).sum()
    return (
        f"{toy.name:<12}{toy.V:4}{toy.m:4}{toy.n_ctx:5}{toy.support.shape[1]:9,}{joint:10.4f}{total:9.4f}{tc:9.4f}"
        f"{closed}{toy.prob[0].max():9.4f}{f'{ok}/{toy.n_ctx}':>11}  {' '.join(map(str, toy.mode()[0].tolist()))}"
    )


def show_context(toy: Toy, c: int) -> None:
    """The eight likeliest answers of a context, and what a factorised step would write."""
    print(f"context {c} (prompt {','.join(map(str, toy.prompt(torch.tensor([c]))[0].tolist()))}):")
    best = toy.prob[c].sort(descending=True, stable=True).indices[:8]
    for p, answer in zip(toy.prob[c][best].tolist(), toy.support[c][best].tolist(), strict=True):
        if p > 0:
            print(f"  {p:.4f}  {' '.join(map(str, answer))}")
    alone = first_max(toy.marginals())[c]
    verdict = "coherent" if toy.coherent(torch.tensor([c]), alone[None])[0] else "impossible"
    print(f"  each token by itself: {' '.join(map(str, alone.tolist()))} ({verdict})")


def add_flags(group) -> None:
    """The sizes and dials of every task, each with the task's own default."""
    group.add_argument("--V", type=int, help="answer symbols, all tasks but gaussian")
    group.add_argument("--m", type=int, help="answer positions, which is also the block length")
    group.add_argument("--n_ctx", type=int, help="contexts (32, or as many as the task has)")
    group.add_argument("--eps", type=float, help="copy: chance that a copy is drawn afresh, 0 none .. 1 all (0.05)")
    group.add_argument("--rho", type=float, help="gaussian: correlation, 0 independent .. 0.9999 (0.9)")
    group.add_argument("--levels", type=int, help="gaussian: symbols of equal mass (8)")
    group.add_argument("--n_modes", type=int, help="modes: phrases per context, at least 3 (3)")


FLAGS = ("V", "m", "n_ctx", "eps", "rho", "levels", "n_modes")


class Rows:
    """A toy as training rows [prompt block | answer block]; row i is a function of (seed, i) alone."""

    def __init__(self, toy: Toy, *key: int | str):
        self.toy, self.key = toy, key

    def batch(self, first: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """x (R, 2m) int64, real (R, 2m) bool (all), prompt (R, 2m) bool (the first block)."""
        draws = [generator(*self.key, i) for i in range(first, first + rows)]
        c = torch.cat([torch.randint(self.toy.n_ctx, (1,), generator=g) for g in draws])
        u = torch.cat([torch.rand(1, dtype=torch.float64, generator=g) for g in draws])
        x = torch.cat([self.toy.prompt(c), self.toy.quantile(c, u)], dim=1)
        prompt = (torch.arange(2 * self.toy.m) < self.toy.m).expand_as(x)
        return x, torch.ones_like(prompt), prompt

    def count_real(self, first: int, rows: int) -> int:
        return rows * 2 * self.toy.m

    def describe(self) -> str:
        return "endless rows"


def answer_logits(model: "Model", ids: Tensor, n_rounds: int, u: Tensor | None = None) -> Tensor:
    """Rows [prompt block | answer block] (R, 2m) int64 -> logits of the answer (R, m, vocab) float32: Stage A for
    n_rounds 0, else Stage B with every masked position of the answer in the bundle, carrying u (R, 2m) if given."""
    m, bundle = ids.shape[1] // 2, ids == model.cfg.mask_id
    ctx = sequence_context(model.cfg, torch.ones_like(bundle), model.compute_dtype)
    ctx.current = torch.arange(2 * m, device=ids.device)[:, None] >= m  # the prompt is context, as in decoding
    h = model.prefix(ids, ctx)
    h = model.coordinate(h, bundle, ctx, n_rounds, u) if n_rounds else model.last_n(h, ctx)
    return model.head(h[:, m:])


@torch.no_grad()
def block_loss(model: "Model", toy: Toy, n_rounds: int) -> float:
    """Cross-entropy of the whole answer written in one step, exactly: sum_i E_p[-log q_i(x_i)] in nats, the mean over
    contexts. At least H + TC for any factorised q that depends on the context alone."""
    c = torch.arange(toy.n_ctx)
    ids = torch.cat([toy.prompt(c), torch.full((toy.n_ctx, toy.m), toy.mask_id)], dim=1).to(model.wte.weight.device)
    log_q = answer_logits(model, ids, n_rounds).double().log_softmax(-1)[..., : toy.V].cpu()
    return float(-(toy.marginals() * log_q).sum((1, 2)).mean())


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--task", choices=list(TASKS), help="one task (default: all of them)")
    add_flags(parser.add_argument_group("size and dependence"))
    group = parser.add_argument_group("contexts")
    group.add_argument("--seed", type=int, default=0, help="seed that the contexts are drawn with (0)")
    group.add_argument("--context", type=int, help="show the answers of this context of --task, the likeliest first")
    args = vars(parser.parse_args())
    task, context = args.pop("task"), args.pop("context")
    try:
        toys = [make(name, **args) for name in ([task] if task else TASKS)]
    except ValueError as error:
        fail(str(error))
    print("nats, means over contexts; argmax ok: contexts where the tuple of marginal argmaxes is coherent (a phrase)")
    print(
        "task           V   m  ctx  support  H(joint)  sum H_i       TC   closed     diff  p(mode)  argmax ok"
        "  mode of context 0"
    )
    for toy in toys:
        print(row(toy))
    if context is not None:
        if not task or not 0 <= context < toys[0].n_ctx:
            fail(f"--context {context} needs a --task, and one of its contexts 0..{toys[0].n_ctx - 1}")
        show_context(toys[0], context)


if __name__ == "__main__":
    main()
