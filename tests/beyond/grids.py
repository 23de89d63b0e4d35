"""Grids of u that no conditional CDF of a small toy cuts: the chain's draws by them count its joint exactly."""

import torch
from torch import Tensor

from lib import toy

# task -> its size, and n: the conditional CDFs of these tables step at multiples of 1/n only (modes: 0.6 for the shared
# token, then 1/2)
CDF_STEPS = {"modes": (dict(V=6, n_ctx=2), 10), "pairs": (dict(V=4, m=2), 4), "sum": (dict(V=3, m=2), 3)}


def grid(task: str) -> tuple[toy.Toy, Tensor, Tensor]:
    """A small toy, the midpoints u (n**m, m) that none of its conditional CDFs cuts, and as many masked answers z."""
    size, n = CDF_STEPS[task]
    t = toy.make(task, **size)
    u = torch.cartesian_prod(*[(torch.arange(n, dtype=torch.float64) + 0.5) / n] * t.m)
    return t, u, torch.full((len(u), t.m), t.mask_id)
