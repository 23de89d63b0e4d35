"""The model: LLaDA2.1's block-causal mixture-of-experts transformer, split where CoCommit needs it.

The split is the method (paper, Sec. 4.1 and Eq. 4), and all of it is in class Model:

    h = model.prefix(ids, ctx)                                             # first L - n layers, shared by both stages
    logits_A = model.logits(model.last_n(h, ctx))                          # Stage A: each token by itself
    logits_B = model.logits(model.coordinate(h, bundle, tokens, ctx))      # Stage B: marked, the last n layers again

The rest is the architecture. What differs from a GPT:

  - a text is cut into blocks of `block_length` tokens; a token attends to all of its own block and of earlier ones
  - nothing is shifted: the logits at position i are for token i
  - a mask is an input token like any other (`mask_id`)
  - queries and keys are normalised per head, then a rotary embedding turns their first `rotary_dim` dims only
  - attention has grouped queries, one fused qkv projection, and no biases unless the config has them
  - the MLP is a mixture of experts in every layer but the first `n_dense`
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from config import Config

# R rows, T positions, S keys, C channels (n_embd), H heads, G key/value heads, D head dim, V vocabulary,
# N = R*T tokens, P chosen positions, E experts, A active experts, L layers, n = n_last, K = n_rounds, B block_length

LORA_SCALE = 2.0  # lora_alpha / r (paper: 32 / 16)


# adds keys and values that an earlier pass has left to those of a pass: (layer, round, k, v), with k and v
# (R, G, T, D) -> what the pass attends to, (R, G, S, D) each; its own come first
Keys = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Context:
    """What a pass through the layers needs besides the states. On a first reading cos, sin and mask are enough."""

    cos: Tensor  # (T, 1, rotary_dim / 2), or (R, T, 1, ...) where rows are at different positions
    sin: Tensor
    mask: Tensor  # bool, broadcasts to (R, H, T, S): who attends to whom
    keys: Keys | None = None  # adds the blocks before: clean ones in training, finished ones in decoding
    i_round: int = 0  # the round of Stage B whose keys and values are added
    n_rounds: int = 1  # K: how many rounds Stage B takes


# --- the method
class Model(nn.Module):
    """Stage A and the paper's Stage B. Another Stage B is a subclass with another `coordinate`: its own parameters
    learn, begin at zero on a base, and are saved. tests/test_stage_b_of_ones_own.py has one in 20 lines."""

    BASE = ("wte", "layers", "norm_f", "lm_head")  # all parameters outside these are Stage B's own

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.n_layer))
        self.norm_f = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.lm_head = Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.tie()
        # one marker for each round of Stage B; they start at zero
        self.markers = nn.Parameter(torch.zeros(cfg.n_rounds, cfg.n_embd))
        self.compute_dtype = torch.float32
        self.checkpointing = False

    def tie(self) -> None:
        """Make the embedding the output layer, too, if the config says so."""
        if self.cfg.tied:
            self.lm_head.weight = self.wte.weight

    def prefix(self, ids: Tensor, ctx: Context) -> Tensor:
        """The embedding and the first L - n layers. (R, T) int64 -> (R, T, C)."""
        h = self.wte(ids).to(self.compute_dtype)
        return self.run_layers(h, ctx, self.layers[: -self.cfg.n_last])

    def last_n(self, h: Tensor, ctx: Context) -> Tensor:
        """The paper's LastN: the last n layers. (R, T, C) -> (R, T, C)."""
        return self.run_layers(h, ctx, self.layers[-self.cfg.n_last :])

    def logits(self, h: Tensor) -> Tensor:
        """The paper's Head: final norm and output layer. (..., C) -> (..., V) float32."""
        return self.lm_head(self.norm_f(h)).float()

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        """Stage B, Eq. 4: K times h <- LastN(h + 1_S * marker_i), from the prefix states.

        h (R, T, C), bundle (R, T) bool -> (R, T, C). tokens (R, T) int64: drafts in the bundle, and z elsewhere. The
        paper's Stage B knows which positions are written together, but not with what: it does not read them.
        """
        for i in range(ctx.n_rounds):
            h = h + bundle[..., None] * self.markers[i].to(h.dtype)
            h = self.last_n(h, replace(ctx, i_round=i))
        return h

    def forward(self, ids: Tensor, ctx: Context) -> Tensor:
        """Stage A in one call: (R, T) int64 -> (R, T, V) float32 logits."""
        return self.logits(self.last_n(self.prefix(ids, ctx), ctx))

    def run_layers(self, h: Tensor, ctx: Context, layers: nn.ModuleList) -> Tensor:
        for layer in layers:
            again = self.checkpointing and torch.is_grad_enabled()
            h = recompute(layer, h, ctx, use_reentrant=False) if again else layer(h, ctx)
        return h

    def context(self, real: Tensor, clean: Tensor | None = None, one_by_one: Tensor | None = None) -> Context:
        """The Context of a pass over whole rows.

        real (R, T) bool: False on padding. A padded position is seen by itself alone.
        clean (R, T) int64: the clean rows. They are read here, so that a corrupted block sees the clean blocks before
        it, as in decoding. Without them it sees corrupted blocks.
        one_by_one (R,) bool: True for rows whose blocks have one token, so that they are read from left to right.
        """
        T = real.shape[1]
        cos, sin = rotary(self.cfg, torch.arange(T, device=real.device), self.compute_dtype)
        ctx = Context(cos, sin, self.who_sees_whom(real, one_by_one, block_causal_mask), n_rounds=self.cfg.n_rounds)
        if clean is None or (self.cfg.block_length >= T and one_by_one is None):
            return ctx  # a row of one block has no block before it to read

        # read the clean rows in every round, unmarked, and keep their keys and values
        kept = {}

        def write(layer: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            kept[layer, i_round] = (k, v)
            return k, v

        def read(layer: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            clean_k, clean_v = kept[layer, i_round]
            return torch.cat([k, clean_k], dim=2), torch.cat([v, clean_v], dim=2)

        h = self.prefix(clean, replace(ctx, keys=write))
        for i in range(self.cfg.n_rounds):
            h = self.last_n(h, replace(ctx, keys=write, i_round=i))
        return replace(ctx, keys=read, mask=self.who_sees_whom(real, one_by_one, beside_clean_mask))

    def who_sees_whom(self, real: Tensor, one_by_one: Tensor | None, make_mask: Callable) -> Tensor:
        """(T, S) bool, or (R, 1, T, S) where rows differ. make_mask: one of the two below."""
        T = real.shape[1]
        window = self.cfg.window or T
        mask = make_mask(T, self.cfg.block_length, window, real.device)
        if one_by_one is not None:
            mask = torch.where(one_by_one[:, None, None], make_mask(T, 1, window, real.device), mask)
        if not real.all():
            S = mask.shape[-1]
            itself = torch.eye(T, S, dtype=torch.bool, device=real.device)
            mask = (mask & real.repeat(1, S // T)[:, None]) | itself
        return mask if mask.dim() == 2 else mask[:, None]  # the same for all heads

    @property
    def partial_cost(self) -> float:
        """What a partial forward costs, as a share of a full one: it runs n of L layers."""
        return self.cfg.n_last / self.cfg.n_layer

    # --- what learns
    def own(self) -> dict[str, Tensor]:
        """Stage B's own parameters, by name: the markers, and what a subclass adds."""
        return {name: p for name, p in self.named_parameters() if name.split(".")[0] not in self.BASE}

    def adapt(self, r: int, generator: torch.Generator) -> None:
        """Freeze the base, and let learn what is beside it (paper, Sec. 5.1): LoRA of rank r in every qkv and proj (0:
        none), and Stage B's own parameters."""
        self.requires_grad_(False)
        for layer in self.layers if r > 0 else ():
            layer.attn.qkv.add_lora(r, generator)
            layer.attn.proj.add_lora(r, generator)

        # always float32, whatever the model's dtype: an update of 1e-5 is lost in a bf16 parameter
        for p in self.own().values():
            p.data = p.data.float()
            p.requires_grad_(True)

    def begin_from(self, state: dict[str, Tensor]) -> None:
        """Add to a base's tensors (name -> tensor) what Stage B needs and they lack: its own parameters begin at zero.
        There is one marker for each round, so a surplus one is cut off."""
        like = state["wte.weight"]
        for name, p in self.own().items():
            zeros = torch.zeros(p.shape, device=like.device, dtype=like.dtype)
            begun = state.get(name, zeros)
            if name == "markers" and begun.shape[1:] == p.shape[1:]:
                begun = torch.cat([begun.to(like.dtype), zeros])[: len(p)]
            state[name] = begun

    def learned(self) -> dict[str, Tensor]:
        """The parameters that learn, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @property
    def trained_b(self) -> bool:
        """Was Stage B trained? With zero markers the paper's first round is Stage A."""
        return bool(self.markers.any())

    def told(self, clean: Tensor, states: Tensor) -> Tensor:
        """Which tokens Stage B reads in the bundle while it learns, and while it is measured: of the right ones,
        clean (P,) int64, and Stage A's states (P, C) -> (P,) int64. Here they are Stage A's drafts, as in decoding. (A
        Stage B that sees only tokens on the left may be told the right ones.)"""
        return self.drafts(states)

    @torch.no_grad()
    def drafts(self, states: Tensor) -> Tensor:
        """Stage A's likeliest tokens, but never a mask: states (P, C) -> (P,) int64."""
        no_mask = torch.zeros(self.cfg.vocab_size, device=states.device)
        no_mask[self.cfg.mask_id] = float("-inf")
        # the logits of 1,024 positions at a time
        return torch.cat([(self.logits(part) + no_mask).argmax(-1) for part in states.split(1024)])


# --- who sees whom
def block_causal_mask(T: int, block_length: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """(T, T) bool, query by key: a position sees its own block, and the earlier blocks that are in the window.

    T = 4, block_length = 2:      1 1 0 0
                                  1 1 0 0
                                  1 1 1 1
                                  1 1 1 1
    """
    block = torch.arange(T, device=device) // block_length
    blocks_back = block[:, None] - block[None, :]
    return (blocks_back >= 0) & (blocks_back * block_length < window)


def beside_clean_mask(T: int, block_length: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """(T, 2T) bool, query by key: a corrupted position of row z sees its own block, and the *clean* blocks before it,
    those of row x.

    T = 4, block_length = 2:      z0 z1 z2 z3   x0 x1 x2 x3
                                   1  1  0  0    0  0  0  0
                                   1  1  0  0    0  0  0  0
                                   0  0  1  1    1  1  0  0
                                   0  0  1  1    1  1  0  0
    """
    sees = block_causal_mask(T, block_length, window, device)
    own = sees & sees.T
    return torch.cat([own, sees & ~own], dim=1)


# --- the layers
class Layer(nn.Module):
    def __init__(self, cfg: Config, layer: int):
        super().__init__()
        self.norm_1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn = Attention(cfg, layer)
        self.norm_2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg, cfg.d_dense) if layer < cfg.n_dense else MoE(cfg)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = x + self.attn(self.norm_1(x), ctx)
        return x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    def __init__(self, cfg: Config, layer: int):
        super().__init__()
        self.cfg = cfg
        self.layer = layer
        # the rows of its weight: all query heads, then all key heads, then all value heads
        self.qkv = Linear(cfg.n_embd, (cfg.n_head + 2 * cfg.n_kv_head) * cfg.head_dim, bias=cfg.qkv_bias)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.proj = Linear(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=cfg.proj_bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        R, T, _ = x.shape
        cfg = self.cfg
        qkv = self.qkv(x).view(R, T, -1, cfg.head_dim)
        q, k, v = qkv.split([cfg.n_head, cfg.n_kv_head, cfg.n_kv_head], dim=2)

        # normalise queries and keys, then rotate them together
        qk = rotate(torch.cat([self.q_norm(q), self.k_norm(k)], dim=2), ctx)
        q, k = qk.split([cfg.n_head, cfg.n_kv_head], dim=2)
        q = q.transpose(1, 2)  # (R, H, T, D)
        k = k.transpose(1, 2)  # (R, G, T, D)
        v = v.transpose(1, 2)

        # add the keys and values of the blocks before
        if ctx.keys is not None:
            k, v = ctx.keys(self.layer, ctx.i_round, k, v)
        y = F.scaled_dot_product_attention(q, k, v, ctx.mask, enable_gqa=True)
        return self.proj(y.transpose(1, 2).reshape(R, T, -1))


def rotary(cfg: Config, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., T) positions -> cos and sin, (..., T, 1, rotary_dim / 2) each, the 1 for the heads."""
    # always float32, whatever the model's dtype: bf16 angles are off by radians after a thousand positions
    exponent = torch.arange(0, cfg.rotary_dim, 2, device=positions.device, dtype=torch.float32) / cfg.rotary_dim
    angle = positions.float()[..., None, None] * cfg.rope_theta**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, ctx: Context) -> Tensor:
    """Rotate the first rotary_dim dims of (R, T, heads, D), each dim of their first half with one of the second."""
    half = ctx.cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * ctx.cos - second * ctx.sin, second * ctx.cos + first * ctx.sin, rest], dim=-1)


class MLP(nn.Module):
    """SwiGLU. The gate's rows come first in `gate_up`."""

    def __init__(self, cfg: Config, width: int):
        super().__init__()
        self.gate_up = Linear(cfg.n_embd, 2 * width, bias=False)
        self.down = Linear(width, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


# (On a first reading skip the next ninety lines: MoE is an MLP.)
class MoE(nn.Module):
    """A mixture of experts: each token goes through A of E small SwiGLUs, and through a shared one."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.router = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd))
        self.register_buffer("expert_bias", torch.zeros(cfg.n_expert))  # always float32
        self.times_chosen: Tensor | float = 0.0  # (E,): choices of each expert since the last `balance`, see the router
        # the experts' weights are stacked, so that one grouped matmul serves them all
        self.gate_up = nn.Parameter(torch.empty(cfg.n_expert, 2 * cfg.d_expert, cfg.n_embd))
        self.down = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd, cfg.d_expert))
        self.shared = MLP(cfg, cfg.n_shared * cfg.d_expert) if cfg.n_shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (N, C)
        chosen, weights = self.route(tokens)  # (N, A) each
        y = self.experts(tokens, chosen, weights).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, C) -> chosen experts (N, A) int64 and their weights (N, A) float32."""
        return ROUTERS[self.cfg.router](self, x)

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

    # while it learns, count how often each expert is chosen, for `balance`
    if moe.router.requires_grad and torch.is_grad_enabled():
        moe.times_chosen = moe.times_chosen + torch.bincount(chosen.flatten(), minlength=cfg.n_expert)

    weights = scores.gather(1, chosen)
    if cfg.n_active > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * cfg.routed_scaling


# Config.router is one of these names
ROUTERS: dict[str, Callable[[MoE, Tensor], tuple[Tensor, Tensor]]] = {"grouped sigmoid": grouped_sigmoid}


class RMSNorm(nn.Module):
    """Normalise in float32, cast back, then scale: the released order, which matters in bf16."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


class Linear(nn.Linear):
    """y = W x + 2 B A x, in the dtype of x: weights may be float32 where x is bf16.

    B (out, r) begins at zero, so the layer begins as W alone; A (r, in) begins at Kaiming's random values.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = False):
        super().__init__(n_in, n_out, bias)
        self.lora_A = self.lora_B = None  # until add_lora

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
