"""What the estimate of beyond.tc misses on bundles whose total correlation (TC) is known.

Each bundle is a table of tuples, so its TC is a sum. Its chain writes the tuple from left to right, by the table's own
conditionals. Stage A knows the first position, from which the chain starts; of the others it gives

    right       the chain's marginals: no mismatch
    too flat    7 parts of the marginal to 3 parts of the uniform distribution
    too sure    the marginal to the power of 1.5, normalised
    elsewhere   half the marginal, and half the same moved on by V / 2 symbols

A row is one bundle and one number of draws: the mean of the estimates, beside the true TC in nats, with the standard
error of the first. `between` are the bounds where Stage A is right. The jackknife's estimate is there to compare with:
it corrects the entropy of the average of the draws and does not look at Stage A.

    python -m tools.known_tc
"""

import torch
from torch import Tensor
from tqdm import tqdm

from beyond import tc
from evaluate import print_table
from lib.toy import Toy
from lib.util import Parser, bounded, generator

# S tuples, n positions, V symbols, D draws

HEAD = ["bundle", "TC", "draws", "right", "+-", "between", "too flat", "too sure", "elsewhere", "jackknife"]


# --- the bundles
def zipf(V: int) -> Tensor:
    """(V,) float64: probabilities in proportion to 1, 1/2, 1/3, .."""
    p = 1 / torch.arange(1, V + 1, dtype=torch.float64)
    return p / p.sum()


def one_at(first: float) -> Tensor:
    """(200,): one symbol has `first`, and a Zipf law the rest."""
    return torch.cat([torch.tensor([first], dtype=torch.float64), (1 - first) * zipf(199)])


def copies(p: Tensor, n: int = 2) -> Toy:
    """One symbol by p (V,), written n times: TC (n - 1) H(p)."""
    support = torch.arange(len(p))[:, None].repeat(1, n)
    return Toy("copies", len(p), support[None], p[None])


def pair(first: Tensor, second: Tensor) -> Toy:
    """A symbol by first (V,), then one by its row of second (V, V)."""
    V = len(first)
    symbols = torch.arange(V)
    joint = first[:, None] * second
    return Toy("pair", V, torch.cartesian_prod(symbols, symbols)[None], joint.view(1, -1))


def noisy_copy(p: Tensor, kept: float) -> Toy:
    """A symbol by p (V,), and with probability `kept` the same again, else another draw: at 0 they are independent."""
    return pair(p, kept * torch.eye(len(p), dtype=torch.float64) + (1 - kept) * p)


def softmax_table(p: Tensor, scale: float) -> Toy:
    """A symbol by p (V,), then one by a row of random logits."""
    V = len(p)
    logits = torch.randn(V, V, dtype=torch.float64, generator=generator("softmax table"))
    return pair(p, (scale * logits).softmax(-1))


def templates(*weights: float) -> Toy:
    """One of several phrases of 4 symbols of 50, no symbol in two of them: TC 3 H(weights)."""
    support = torch.arange(4 * len(weights)).view(1, -1, 4)
    return Toy("templates", 50, support, torch.tensor([weights], dtype=torch.float64))


BUNDLES = {
    "two independent, Zipf of 40": noisy_copy(zipf(40), 0.0),
    "two copies, Zipf of 8": copies(zipf(8)),
    "two copies, Zipf of 40": copies(zipf(40)),
    "two copies, Zipf of 100": copies(zipf(100)),
    "four copies, Zipf of 40": copies(zipf(40), 4),
    "two copies, one symbol at 97 %": copies(one_at(0.97)),
    "two copies, one symbol at 80 %": copies(one_at(0.8)),
    "a copy in 70 %, Zipf of 40": noisy_copy(zipf(40), 0.7),
    "a random softmax, Zipf of 40": softmax_table(zipf(40), 2.0),
    "two phrases of four": templates(0.6, 0.4),
    "five phrases of four": templates(0.4, 0.25, 0.2, 0.1, 0.05),
}


# --- what is known of them, and what is estimated
def chain_draws(task: Toy, draws: int, rng: torch.Generator) -> Tensor:
    """(D, n, V) float64: in each draw of a tuple, the conditional by which every position is written."""
    support = task.support[0]  # (S, n)
    prob = task.prob[0]  # (S,)
    drawn = support[torch.multinomial(prob, draws, replacement=True, generator=rng)]  # (D, n)

    # the tuples that agree with what is written, each with its probability, add up by their next symbol
    conditionals = []
    agrees = torch.ones(draws, len(support), dtype=torch.bool)
    for i in range(task.m):
        weight = agrees * prob
        total = weight.new_zeros(draws, task.V).index_add_(1, support[:, i], weight)
        conditionals.append(total / total.sum(-1, keepdim=True))
        agrees = agrees & (support[:, i] == drawn[:, i, None])
    return torch.stack(conditionals, dim=1)


def stages_a(task: Toy) -> dict[str, Tensor]:
    """Stage A's answers (n, V) float64, right and wrong."""
    right = task.marginals()[0]
    flat = 0.7 * right + 0.3 / task.V
    sure = right**1.5
    sure = sure / sure.sum(-1, keepdim=True)
    elsewhere = (right + right.roll(task.V // 2, -1)) / 2
    found = {"right": right, "too flat": flat, "too sure": sure, "elsewhere": elsewhere}
    return {name: torch.cat([right[:1], p[1:]]) for name, p in found.items()}


def jackknife(written: Tensor) -> float:
    """TC from the chain's log-probabilities in D draws (D, n, V), by the jackknife over draws."""
    c = written.exp()
    D = len(c)
    others = ((c.sum(0) - c) / (D - 1)).clamp(min=0)
    marginals = D * tc.entropy(c.mean(0)) - (D - 1) * tc.entropy(others).mean()
    return float(marginals - tc.entropy(c).mean())


def estimates(name: str, draws: int, times: int) -> dict[str, Tensor]:
    """TC of this bundle, estimated so many times, by column: (times,) float64 each."""
    task = BUNDLES[name]
    log_p = {stage_a: p.log() for stage_a, p in stages_a(task).items()}
    columns = {column: [] for column in [*log_p, "low", "high", "jackknife"]}
    for k in range(times):
        written = chain_draws(task, draws, generator("known tc", name, draws, k)).log()
        found = {stage_a: tc.terms(p, written) for stage_a, p in log_p.items()}
        for stage_a, values in found.items():
            columns[stage_a].append(values["TC"])
        columns["low"].append(found["right"]["low"])
        columns["high"].append(found["right"]["high"])
        columns["jackknife"].append(jackknife(written))
    return {column: torch.tensor(values, dtype=torch.float64) for column, values in columns.items()}


def row_of(name: str, draws: int, times: int) -> list[str]:
    """A row of the table."""
    found = estimates(name, draws, times)
    mean = {column: f"{float(values.mean()):z.2f}" for column, values in found.items()}
    error = float(found["right"].std()) / times**0.5
    true = float(BUNDLES[name].tc()[0])
    between = f"{mean['low']} .. {mean['high']}"
    row = [name, f"{true:z.2f}", str(draws), mean["right"], f"{error:.2f}", between]
    return row + [mean[column] for column in HEAD[len(row) :]]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--draws", type=bounded(int, 2), nargs="+", default=[16, 64], help="draws of the chain")
    parser.add_argument("--times", type=bounded(int, 2), default=400, help="estimates of each bundle")
    args = parser.parse_args()
    settings = [(name, draws) for name in BUNDLES for draws in args.draws]
    rows = [row_of(name, draws, args.times) for name, draws in tqdm(settings, desc="bundles", disable=None)]
    print_table(HEAD, rows)


if __name__ == "__main__":
    main()
