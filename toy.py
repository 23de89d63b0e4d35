"""Toy tasks whose joint distribution is a table, so that every number about joint commitment is exact.

A toy maps a context to the probability of every tuple of an answer block. Marginals, entropies, total correlation
(TC, the marginal entropies' sum less the joint entropy), mode and distances follow by enumeration, in float64 and nats.

Each task is described at its function below; c is the context. Sizes: V symbols, m answer positions (the block
length), n_ctx contexts (32, or as many as there are); n_modes (3), eps (0.05), rho (0.9) and levels (8, in place of V)
are one task's. `python -m tools.toys` prints the tables.
"""

import inspect
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data import fail, generator
from model import Model, sequence_context

# R rows, N contexts, S support tuples, m answer positions, V symbols, Q quadrature nodes

MAX_TUPLES = 65_536
ROWS = 4096  # in one forward


@dataclass
class Toy:
    """One task as a table, on the CPU. Contexts of fewer tuples repeat their tuple 0 with probability 0."""

    name: str
    V: int
    support: Tensor  # (N, S, m) int64: the tuples
    prob: Tensor  # (N, S) float64: their probabilities, each row sums to 1

    def __post_init__(self) -> None:
        self.n_ctx, _, self.m = self.support.shape
        self.eos_id, self.mask_id, self.vocab_size = (self.V + self.n_ctx + i for i in range(3))  # after the contexts

    def prompt(self, c: Tensor) -> Tensor:
        """(R,) int64 -> (R, m) int64: the context token m times, so that prompt and answer fill one block each."""
        return (self.V + c)[:, None].repeat(1, self.m)

    def quantile(self, c: Tensor, u: Tensor) -> Tensor:
        """(R,) int64, (R,) float64 in [0, 1) -> (R, m) int64: the tuple where c's cumulative probability passes u."""
        cdf = self.prob.cumsum(-1)[c]  # (R, S)
        index = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]
        return self.support[c, index.clamp(max=cdf.shape[1] - 1)]

    def marginals(self) -> Tensor:
        """(N, m, V) float64."""
        weight = self.prob[..., None].expand_as(self.support)  # (N, S, m)
        return weight.new_zeros(self.n_ctx, self.V, self.m).scatter_add_(1, self.support, weight).mT

    def h_joint(self) -> Tensor:
        """(N,) float64: joint entropy in nats."""
        return torch.special.entr(self.prob).sum(-1)

    def tc(self) -> Tensor:
        """(N,) float64: total correlation in nats."""
        return torch.special.entr(self.marginals()).sum((1, 2)) - self.h_joint()

    def mode(self) -> Tensor:
        """(N, m) int64: the most probable tuple, the first one on ties."""
        best = self.prob >= self.prob.amax(-1, keepdim=True) * (1 - 1e-9)  # rounding may have split a tie
        return self.support[torch.arange(self.n_ctx), best.int().argmax(-1)]

    def log_prob(self, c: Tensor, tuples: Tensor) -> Tensor:
        """(R,), (R, m) int64 -> (R,) float64 in nats, -inf outside the support."""
        same = (tuples[:, None] == self.support[c]).all(-1)  # (R, S)
        return (same * self.prob[c]).sum(-1).log()


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats of aligned tables, (..., S) each -> (...); p complete: KL(q || p) is inf if q leaves it."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def product_table(toy: Toy, c: Tensor, q_marginals: Tensor) -> Tensor:
    """(R,), (R, m, V) -> (R, S): what prod_i q_i gives each support tuple of c; padding gets 0, so it counts once."""
    return q_marginals.gather(2, toy.support[c].mT).prod(1) * (toy.prob[c] > 0)


def _contexts(n_ctx: int | None, most: int) -> int:
    if n_ctx and n_ctx > most:
        fail(f"n_ctx must lie in 1..{most} here, not {n_ctx}")
    return n_ctx or min(32, most)


def _tuples(V: int, k: int) -> Tensor:
    """(V**k, k) int64: all tuples, the last position fastest."""
    if V**k > MAX_TUPLES:
        fail(f"{V}**{k} = {V**k:,} tuples, more than {MAX_TUPLES:,}: take fewer symbols or a smaller m")
    return torch.cartesian_prod(*[torch.arange(V)] * k).reshape(-1, k)


Rng = np.random.Generator
Table = tuple[int, Tensor, Tensor | None]  # V, support (N, S, m), one prob (S,) for all contexts or uniform


def _shifted(base: Tensor, prob: Tensor, V: int, n_ctx: int | None, rng: Rng) -> Table:
    """All tuples base (V**m, m) with prob (V**m,), shifted by context and position."""
    most = len(base) // V  # tuples up to here start with 0: shifting all positions alike leaves the copy task as it is
    shift = base[rng.choice(most, _contexts(n_ctx, most), replace=False)]
    keep = prob > 0  # a probability that is 0, or underflows to it, is no support
    return V, (base[keep] + shift[:, None]) % V, prob[keep]


def modes(rng: Rng, V: int = 24, m: int = 4, n_ctx: int | None = None, n_modes: int = 3) -> Table:
    """One of n_modes phrases, weights 4 : 3 : 3 ...; where phrases 1 and 2 share a token, it (6) beats phrase 0, which
    wins the other half: the tuple of marginal argmaxes is no phrase."""
    if n_modes > V:
        fail(f"{n_modes} modes need as many symbols at every position: V = {V} is too small")
    N = _contexts(n_ctx, 128)
    phrases = rng.permuted(np.tile(np.arange(V), (N, m, 1)), axis=-1)[..., :n_modes]  # (N, m, S)
    shared = rng.permuted(np.tile(np.arange(m) < m // 2, (N, 1)), axis=-1)  # (N, m)
    phrases[shared, 2] = phrases[shared, 1]
    weight = torch.tensor([4.0] + [3.0] * (n_modes - 1), dtype=torch.float64)
    return V, torch.from_numpy(phrases).transpose(1, 2), weight / weight.sum()


def pairs(rng: Rng, V: int = 8, m: int = 4, n_ctx: int | None = None) -> Table:
    """m/2 pairs (a, a + s mod V), a uniform, s = c; only a group that holds both members pays, ln V each."""
    if m % 2:
        fail(f"pairs needs an even m, not {m}")
    free = _tuples(V, m // 2)
    partner = (free + torch.arange(_contexts(n_ctx, V))[:, None, None]) % V  # (N, S, m/2)
    return V, torch.stack((free.expand_as(partner), partner), -1).flatten(2), None


def mixed(rng: Rng, V: int = 8, m: int = 4, n_ctx: int | None = None) -> Table:
    """m/4 times [f, u, a, g(a)], f = c, u and a uniform, a's partner g(a) = V - 1 - a: no marginal tells u from a."""
    if m % 4:
        fail(f"mixed needs an m that 4 divides, not {m}")
    N = _contexts(n_ctx, V)
    u, a = _tuples(V, m // 2).expand(N, -1, -1).unflatten(2, (-1, 2)).unbind(-1)  # (N, S, m/4) each
    f = torch.arange(N)[:, None, None].expand_as(a)
    return V, torch.stack((f, u, a, V - 1 - a), -1).flatten(2), None


def noisy_copy(rng: Rng, V: int = 8, m: int = 4, n_ctx: int | None = None, eps: float = 0.05) -> Table:
    """x_1 uniform; x_i = x_1 with probability 1 - eps, else uniform over all V: a dial for TC. Shifted by context."""
    base = _tuples(V, m)
    p = eps / V + (1 - eps) * (torch.arange(V) == 0).double()  # of x_i - x_1 mod V
    return _shifted(base, p[(base[:, 1:] - base[:, :1]) % V].prod(-1) / V, V, n_ctx, rng)


def gaussian(rng: Rng, levels: int = 8, m: int = 3, n_ctx: int | None = None, rho: float = 0.9) -> Table:
    """z_i = sqrt(rho) f + sqrt(1 - rho) e_i, every correlation rho, cut at quantiles k/levels; shifted by context."""
    base = _tuples(levels, m)
    # Given f, a cell is a step of width sqrt(1 - rho), too sharp for Gauss-Hermite (200 nodes: 0.02 nats off at rho
    # 0.99). The trapezoid rule converges fast: 8 nodes a width leave exp(-2 pi**2 * 64 / m), less than rounding.
    width = math.sqrt(1 - rho)
    f = torch.arange(-9, 9, width / 8, dtype=torch.float64)
    edges = torch.special.ndtri(torch.arange(levels + 1, dtype=torch.float64) / levels)
    edges = (edges - math.sqrt(rho) * f[:, None]) / (width * math.sqrt(2))  # (Q, V + 1)
    low, high = edges[:, :-1], edges[:, 1:]
    side = torch.where(low > 0, 1.0, -1.0)  # a tail's own erfc keeps its digits, where ndtr would cancel to 0
    cell = (torch.erfc(side * low) - torch.erfc(side * high)).abs() / 2  # (Q, V): p(x_i = v | f)
    left, right = (cell[:, _tuples(levels, n)].prod(-1) for n in (m // 2, m - m // 2))  # halves: no (Q, V**m) array
    prob = ((torch.exp(-(f**2) / 2)[:, None] * left).T @ right).flatten()  # (V**m,): the sum over nodes
    return _shifted(base, prob / prob.sum(), levels, n_ctx, rng)


def permutation(rng: Rng, V: int = 8, m: int = 4, n_ctx: int | None = None) -> Table:
    """The context picks m distinct symbols of V; the answer is one of their m! orders, uniformly."""
    if m > V or math.factorial(m) > MAX_TUPLES:
        fail(f"permutation needs m <= V and m! <= {MAX_TUPLES:,}, not m = {m} and V = {V}")
    N = _contexts(n_ctx, math.comb(V, m))
    chosen: dict[tuple[int, ...], None] = {}  # a set in order of drawing
    while len(chosen) < N:
        chosen[tuple(sorted(rng.choice(V, m, replace=False).tolist()))] = None
    orders = torch.tensor(list(itertools.permutations(range(m))))
    return V, torch.tensor(list(chosen))[:, orders], None


def modular_sum(rng: Rng, V: int = 5, m: int = 3, n_ctx: int | None = None) -> Table:
    """Uniform over the tuples whose sum is c mod V (V = 2: parity): the dependence shows only in the full set."""
    c = torch.arange(_contexts(n_ctx, V))
    free = _tuples(V, m - 1).expand(len(c), -1, -1)
    return V, torch.cat((free, (c[:, None, None] - free.sum(-1, keepdim=True)) % V), -1), None


TASKS = dict(modes=modes, pairs=pairs, mixed=mixed, copy=noisy_copy, gaussian=gaussian, permutation=permutation)
TASKS["sum"] = modular_sum
# Two modes never mislead the argmaxes: the heavier one has more than half of the mass at every position.
BOUNDS = dict(V=(2, 1024), m=(2, 32), n_ctx=(1, 128), levels=(2, 1024), n_modes=(3, 1024), eps=(0.0, 1.0),
              rho=(0.0, 0.9999))  # fmt: skip


def make(name: str, *, seed: int = 0, **given: int | float) -> Toy:
    """Build a task with seeded contexts. Refused: a size that the task does not use or that is impossible, a table of
    more than 65,536 tuples."""
    used = list(inspect.signature(TASKS[name]).parameters)[1:]  # the first is the generator
    for key, value in given.items():
        if key not in used:
            fail(f"the {name} task does not use {key}: it uses {', '.join(used)}")
        if not BOUNDS[key][0] <= value <= BOUNDS[key][1]:
            fail(f"{key} must lie in {BOUNDS[key][0]:g}..{BOUNDS[key][1]:g}, not {value}")
    V, support, prob = TASKS[name](np.random.default_rng(seed), **given)
    N, S, _ = support.shape
    prob = torch.full((S,), 1 / S, dtype=torch.float64) if prob is None else prob
    return Toy(name, V, support.contiguous(), prob.repeat(N, 1))


def sizes(given: list[str]) -> dict[str, int | float]:
    """["V=12", "eps=0.3"] -> {"V": 12, "eps": 0.3}; one line about what is no size."""
    try:
        return {key: type(BOUNDS[key][0])(value) for key, _, value in (text.partition("=") for text in given)}
    except (KeyError, ValueError):
        fail(f"{' '.join(given)!r} is no size of a toy: KEY=VALUE with {', '.join(BOUNDS)}, like V=12")


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


@torch.no_grad()
def answer_log_probs(model: Model, toy: Toy, c: Tensor, z: Tensor, n_rounds: int) -> Tensor:
    """log q(x_i | z) of answer blocks z (R, m) int64, masked where -1, in contexts c (R,): (R, m, V) float64. Stage A
    for n_rounds 0, else Stage B with every masked position in the bundle. Mass on non-answer tokens stays lost."""
    out = []
    for c_part, z_part in zip(c.split(ROWS), z.split(ROWS), strict=True):
        ids = torch.cat([toy.prompt(c_part), z_part.masked_fill(z_part < 0, toy.mask_id)], dim=1)
        ids = ids.to(model.wte.weight.device)
        bundle = ids == toy.mask_id
        ctx = sequence_context(model.cfg, torch.ones_like(bundle), model.compute_dtype)
        h = model.prefix(ids, ctx)
        h = model.coordinate(h, bundle, ctx, n_rounds) if n_rounds else model.last_n(h, ctx)
        out.append(model.head(h[:, toy.m :]).cpu().double())
    return torch.cat(out).log_softmax(-1)[..., : toy.V]


def floors(model: Model, toy: Toy) -> dict[str, float]:
    """The loss of the whole answer in one step, sum_i E_p[-log q_i(x_i)], by each stage, and between which figures it
    must lie: the best joint and the best factorised one. Nats, means over contexts."""
    losses, c, masks = {}, torch.arange(toy.n_ctx), torch.full((toy.n_ctx, toy.m), -1)
    for stage, n_rounds in (("A", 0), ("B", model.cfg.n_rounds)):
        log_q = answer_log_probs(model, toy, c, masks, n_rounds)
        losses[f"block_{stage}"] = float(-(toy.marginals() * log_q).sum((1, 2)).mean())
    h, tc = float(toy.h_joint().mean()), float(toy.tc().mean())
    return losses | {"floor_joint": h, "floor_factorised": h + tc}
