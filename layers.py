"""What a layer of model.py is made of: matrices with LoRA, norms, SwiGLU, and the mixture of experts.

On a first reading it is enough that an MLP and a MoE map each token's state (C) to another one.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config

# C channels (n_embd), N tokens, E experts, A active experts

LORA_SCALE = 2.0  # lora_alpha / r (paper: 32 / 16)


def normal(*shape: int) -> nn.Parameter:
    """The first values of a matrix (..., in): random, and such that a product with it keeps its size."""
    return nn.Parameter(torch.empty(shape).normal_(0.0, shape[-1] ** -0.5))


class Linear(nn.Linear):
    """y = W x + 2 B A x, in the dtype of x: weights may be float32 where x is bf16.

    B (out, r) begins at zero, so the layer begins as W alone; A (r, in) begins at Kaiming's random values.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = False):
        super().__init__(n_in, n_out, bias)
        self.lora_A = self.lora_B = None  # until add_lora

    def reset_parameters(self) -> None:
        self.weight = normal(self.out_features, self.in_features)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def add_lora(self, r: int, generator: torch.Generator) -> None:
        # float32, like the markers
        A = torch.empty(r, self.in_features)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
        device = self.weight.device
        self.lora_A = nn.Parameter(A.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, r, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        y = self.product(x)
        if self.lora_A is None:
            return y
        down = F.linear(x, self.lora_A.to(x.dtype))
        return y + LORA_SCALE * F.linear(down, self.lora_B.to(x.dtype))

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Normalise in float32, cast back, then scale: the released order, which matters in bf16."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


class MLP(nn.Module):
    """SwiGLU. The gate's rows come first in `gate_up`."""

    def __init__(self, cfg: Config, width: int):
        super().__init__()
        self.gate_up = Linear(cfg.n_embd, 2 * width, bias=False)
        self.down = Linear(width, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    """A mixture of experts: each token goes through A of E small SwiGLUs, and through a shared one."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.router = normal(cfg.n_expert, cfg.n_embd)
        self.register_buffer("expert_bias", torch.zeros(cfg.n_expert))  # always float32
        self.times_chosen: Tensor | float = 0.0  # (E,): choices of each expert since the last `balance`
        # the experts' weights are stacked, so that one grouped matmul serves them all
        self.gate_up = normal(cfg.n_expert, 2 * cfg.d_expert, cfg.n_embd)
        self.down = normal(cfg.n_expert, cfg.n_embd, cfg.d_expert)
        self.shared = MLP(cfg, cfg.n_shared * cfg.d_expert) if cfg.n_shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (N, C)
        chosen, weights = self.route(tokens)  # (N, A) each
        y = self.experts(tokens, chosen, weights).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, C) -> chosen experts (N, A) int64 and their weights (N, A) float32."""
        chosen, weights = ROUTERS[self.cfg.router](self, x)
        # while it learns, count how often each expert is chosen, for `balance`
        if self.router.requires_grad and torch.is_grad_enabled():
            self.times_chosen = self.times_chosen + torch.bincount(chosen.flatten(), minlength=self.cfg.n_expert)
        return chosen, weights

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The routed experts: x (N, C), chosen and weights (N, A) -> (N, C). For each of N*A choices
        y[token] += weight * expert(x[token]), in float32, in an order that does not depend on the other tokens."""
        # the rows of x, sorted by expert; those of expert e end at ends[e]
        expert, order = chosen.flatten().sort(stable=True)  # (N*A,) each
        all_experts = torch.arange(len(self.router), device=x.device)
        ends = torch.searchsorted(expert, all_experts, right=True, out_int32=True)
        rows = F.embedding(order // self.cfg.n_active, x)  # x[order // A], with a faster backward

        # run every expert on its rows
        out = self.products(rows, ends)  # (N*A, C)

        # back to tokens: find the A rows of each token in `out`, and sum them with their weights
        place = order.argsort().view_as(chosen)
        return F.embedding_bag(place, out.float(), per_sample_weights=weights, mode="sum").to(x.dtype)

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate_up = F.grouped_mm(rows, self.gate_up.to(rows.dtype).transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down.to(rows.dtype).transpose(1, 2), offs=ends)

    def balance(self, rate: float) -> None:
        """Raise the bias of experts that were chosen too seldom, and lower that of the others (Wang et al., 2024)."""
        times = torch.as_tensor(self.times_chosen, device=self.expert_bias.device).float()
        self.expert_bias += rate * (times.mean() - times).sign()
        self.times_chosen = 0.0


def grouped_sigmoid(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """LLaDA2.1's router: x (N, C) -> chosen experts (N, A) int64 and their weights (N, A) float32.

    The bias decides who is chosen; the weights are the unbiased scores, normalised and scaled.
    """
    cfg = moe.cfg
    scores = torch.sigmoid(F.linear(x.float(), moe.router.float()))  # (N, E)
    biased = scores + moe.expert_bias

    # choose the best groups of experts; a group's score is the sum of its two best experts' scores
    groups = biased.view(len(x), cfg.n_group, -1)
    group_score = groups.topk(2, dim=-1).values.sum(-1)  # (N, n_group)
    best_groups = group_score.topk(cfg.topk_group, dim=-1).indices
    kept = torch.zeros_like(group_score, dtype=torch.bool).scatter(1, best_groups, True)

    # choose the best experts of those groups; the others get -inf, because a biased score may be below 0
    allowed = groups.masked_fill(~kept[..., None], float("-inf")).view_as(biased)
    chosen = allowed.topk(cfg.n_active, dim=-1).indices  # (N, A)

    weights = scores.gather(1, chosen)
    if cfg.n_active > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * cfg.routed_scaling


# Config.router is one of these names
ROUTERS: dict[str, Callable[[MoE, Tensor], tuple[Tensor, Tensor]]] = {"grouped sigmoid": grouped_sigmoid}
