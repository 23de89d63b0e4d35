"""The model: LLaDA2.1's block-causal mixture-of-experts transformer, split where CoCommit needs it split.

What differs from a GPT:
  - attention is bidirectional inside a block of `block_length` tokens and causal across blocks; no shift, the logit at
    position i is for token i
  - a masked position is an input token like any other (`mask_id`)
  - per-head RMSNorm on queries and keys before a rotary embedding of the first `rotary_dim` dims only
  - grouped-query attention with one fused qkv projection, no biases
  - after the first dense layer(s) a mixture of experts: sigmoid router in float32, a bias that takes part in the choice
    but not in the weights, group-limited top-k, routed scaling, one shared expert
What CoCommit adds: LoRA on qkv and the output projection, `markers`, and the visible split (paper, Sec. 4.1, Eq. 4)

    h = model.prefix(ids, ctx)                                          # first L - n layers, shared by both stages
    logits_A = model.head(model.last_n(h, ctx))                         # Stage A: factorised
    logits_B = model.head(model.coordinate(h, bundle, ctx, n_rounds))   # Stage B: marked, the same last n layers again
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from cache import KVCache

# R rows, T positions, S keys, C channels (n_embd), H heads, G key/value heads, D head dim, V vocabulary,
# N = R*T tokens, E experts, A active experts, F expert width, L layers, n = n_last, K = n_rounds, B block_length


@dataclass(kw_only=True)
class Config:
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    head_dim: int
    vocab_size: int  # rows of the embedding; released vocabularies are padded, so the tokenizer may use fewer
    d_dense: int  # width of the SwiGLU in the first n_dense layers
    d_expert: int
    n_expert: int
    n_active: int
    n_group: int  # experts are chosen inside the `topk_group` best of `n_group` groups
    topk_group: int
    eos_id: int = -1
    mask_id: int = -1
    n_dense: int = 1
    n_shared: int = 1  # shared experts, as one SwiGLU of n_shared * d_expert
    routed_scaling: float = 2.5
    rope_theta: float = 600000.0
    rotary_dim: int = 64
    norm_eps: float = 1e-6
    max_len: int = 32768
    block_length: int = 32
    qkv_bias: bool = False
    proj_bias: bool = False
    tied: bool = False  # LM head = embedding
    n_last: int = 3  # n: how many layers Stage B runs again
    n_rounds: int = 1  # K: how many markers there are
    tokenizer: str = "bytes"  # "bytes", "bpe" (tokenizer.json beside the weights) or "toy" (toy.json beside them)


def block_causal_mask(T: int, block_length: int, device: torch.device | str = "cpu") -> Tensor:
    """(T, T) bool, True where the query (row) may attend to the key (column): its own block and every earlier one.

    T = 4, block_length = 2:      1 1 0 0
                                  1 1 0 0
                                  1 1 1 1
                                  1 1 1 1
    """
    block = torch.arange(T, device=device) // block_length
    return block[:, None] >= block[None, :]


def doubled_mask(T: int, block_length: int, device: torch.device | str = "cpu") -> Tensor:
    """(2T, 2T) bool for [noisy ; clean] side by side: noisy blocks see themselves and *clean* earlier blocks, clean
    blocks see clean ones, so that every noisy block is trained in the context that decoding will give it."""
    block = torch.arange(T, device=device) // block_length
    same, earlier = block[:, None] == block[None, :], block[:, None] > block[None, :]
    noisy = torch.cat([same, earlier], dim=1)
    clean = torch.cat([torch.zeros_like(same), same | earlier], dim=1)
    return torch.cat([noisy, clean], dim=0)


@dataclass
class Context:
    """What a pass needs besides hidden states: the same for Stage A and Stage B, for training and decoding."""

    cos: Tensor  # (T, 1, rotary_dim / 2), or (R, T, 1, ...) where rows are at different positions
    sin: Tensor
    mask: Tensor | None  # bool, broadcasts to (R, H, T, S); None: everything may attend to everything
    cache: "KVCache | None" = None
    round: int = 0  # which round's keys and values of the context to use (Stage B with K > 1)
    lora: bool | Tensor = True  # where adapters act: everywhere (the paper), nowhere, or at (T, 1) bool positions
    pieces: list[tuple[slice, Tensor]] | None = None  # of a long row: some queries, all keys that any of them sees


def rotary(cfg: Config, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., T) positions -> cos and sin, (..., T, 1, rotary_dim / 2), the 1 for the heads. Angles are float32 whatever
    the model's dtype, because bf16 frequencies are off by radians after a thousand positions; and there is no buffer
    that a `.to(bf16)` could round."""
    exponent = torch.arange(0, cfg.rotary_dim, 2, device=positions.device, dtype=torch.float32) / cfg.rotary_dim
    angle = positions.float()[..., None, None] * cfg.rope_theta**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def sequence_context(cfg: Config, real: Tensor, dtype: torch.dtype, clean_copy: bool = False) -> Context:
    """Context of whole rows. real: (R, T) bool, False on padding, which nobody attends to but itself (a query needs
    one key). With `clean_copy` rows are [noisy ; clean], 2T long, positions 0..T-1 twice; one block needs no copy. A
    long mask is half empty, of [noisy ; clean] three quarters: 256 queries at a time get the keys that they need."""
    T, clean_copy = real.shape[1], clean_copy and real.shape[1] > cfg.block_length
    positions = torch.arange(T, device=real.device)
    mask = (doubled_mask if clean_copy else block_causal_mask)(T, cfg.block_length, real.device)
    if clean_copy:
        positions, real = positions.repeat(2), real.repeat(1, 2)
    runs = [slice(a, a + 256) for a in range(0, len(mask), 256)]
    pieces = [(run, mask[run].any(0).nonzero()[:, 0]) for run in runs] if len(runs) > 1 else None
    if not real.all():
        itself = torch.eye(len(mask), dtype=torch.bool, device=real.device)
        mask = ((mask & real[:, None, :]) | itself)[:, None]  # (R, 1, T, S)
    return Context(*rotary(cfg, positions, dtype), mask, pieces=pieces)


class RMSNorm(nn.Module):
    """Normalise in float32, cast back, then scale: the order of the released code, which matters in bf16."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


class Linear(nn.Linear):
    """A linear layer that computes in its input's dtype (master weights may be float32 under bf16 activations), with an
    optional LoRA: y = W x + (alpha / r) B A x, A (r, in) Kaiming, B (out, r) zero, so that it starts as W alone."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False):
        super().__init__(n_in, n_out, bias)
        self.lora_A = self.lora_B = None  # until add_lora

    def add_lora(self, r: int, alpha: float, generator: torch.Generator) -> None:
        A, device = torch.empty(r, self.in_features), self.weight.device
        nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(A.to(device))  # float32: an update of 1e-5 is lost in a bf16 parameter
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, r, device=device))
        self.lora_scale = alpha / r

    def forward(self, x: Tensor, lora: bool | Tensor = True) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        if self.lora_A is None or lora is False:
            return y
        delta = self.lora_scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        return y + (delta if lora is True else delta * lora)


class Attention(nn.Module):
    def __init__(self, cfg: Config, layer: int):
        super().__init__()
        self.heads, self.head_dim, self.rotary_dim, self.layer = cfg.n_head, cfg.head_dim, cfg.rotary_dim, layer
        self.kv_heads = cfg.n_kv_head
        # rows: all query heads, then all key heads, then all value heads
        self.qkv = Linear(cfg.n_embd, (cfg.n_head + 2 * cfg.n_kv_head) * cfg.head_dim, bias=cfg.qkv_bias)
        self.q_norm, self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps), RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.proj = Linear(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=cfg.proj_bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        R, T, _ = x.shape
        qkv = self.qkv(x, ctx.lora).view(R, T, -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        qk = self.rotate(torch.cat([self.q_norm(q), self.k_norm(k)], dim=2), ctx)
        q, k = qk.split([self.heads, self.kv_heads], dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (R, H, T, D), (R, G, T, D) twice
        if ctx.cache is not None:
            k, v = ctx.cache.update(self.layer, ctx.round, k, v)
        attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
        parts = [attend(q[:, :, i], k[:, :, j], v[:, :, j], ctx.mask[..., i, :][..., j]) for i, j in ctx.pieces or ()]
        y = torch.cat(parts, dim=2) if parts else attend(q, k, v, ctx.mask)  # (R, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(R, T, -1), ctx.lora)

    def rotate(self, x: Tensor, ctx: Context) -> Tensor:
        """Half-rotation (first half against second half) of the first rotary_dim dims; the rest pass through."""
        half = self.rotary_dim // 2
        first, second, rest = x.split([half, half, self.head_dim - self.rotary_dim], dim=-1)
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


class MoE(nn.Module):
    """Routed experts plus a shared one. Expert weights are stacked tensors: one grouped matmul for all of them."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.n_group, self.topk_group, self.n_active = cfg.n_group, cfg.topk_group, cfg.n_active
        self.routed_scaling = cfg.routed_scaling
        self.router = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd))
        self.register_buffer("expert_bias", torch.zeros(cfg.n_expert))  # float32 in every dtype of the model
        self.gate_up = nn.Parameter(torch.empty(cfg.n_expert, 2 * cfg.d_expert, cfg.n_embd))
        self.down = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd, cfg.d_expert))
        self.shared = MLP(cfg, cfg.n_shared * cfg.d_expert) if cfg.n_shared else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, C) -> chosen experts (N, A) int64 and their weights (N, A) float32.

        The bias decides who is chosen; the weights are the unbiased scores of the chosen, normalised and scaled. A
        group's score is that of its two best; groups not kept are at -inf, because a kept score may be negative."""
        scores = torch.sigmoid(F.linear(x.float(), self.router.float()))  # (N, E)
        biased = scores + self.expert_bias
        groups = biased.view(len(x), self.n_group, -1)
        group_score = groups.topk(2, dim=-1).values.sum(-1)  # (N, n_group)
        kept = torch.zeros_like(group_score, dtype=torch.bool)
        kept.scatter_(1, group_score.topk(self.topk_group, dim=-1).indices, True)
        allowed = groups.masked_fill(~kept[..., None], float("-inf")).view_as(biased)
        chosen = allowed.topk(self.n_active, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.n_active > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.routed_scaling

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # (N, C)
        chosen, weights = self.route(flat)
        y = self.experts(flat, chosen, weights).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sort the N*A (token, expert) pairs by expert, run every expert on its run of rows, sum each token's A rows by
        weight: in float32, in an order that does not depend on the tokens beside it."""
        expert, order = chosen.flatten().sort(stable=True)  # (N*A,) twice
        ends = torch.searchsorted(expert, torch.arange(len(self.router), device=x.device), right=True, out_int32=True)
        rows = F.embedding(order // self.n_active, x)  # (N*A, C), x[order // A] with a faster backward
        gate, up = F.grouped_mm(rows, self.gate_up.to(x.dtype).transpose(1, 2), offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.to(x.dtype).transpose(1, 2), offs=ends)
        place = order.argsort().view_as(chosen)  # (N, A): where in out the rows of a token are
        return F.embedding_bag(place, out.float(), per_sample_weights=weights, mode="sum").to(x.dtype)


class Block(nn.Module):
    def __init__(self, cfg: Config, layer: int):
        super().__init__()
        self.norm_1, self.attn = RMSNorm(cfg.n_embd, cfg.norm_eps), Attention(cfg, layer)
        self.norm_2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg, cfg.d_dense) if layer < cfg.n_dense else MoE(cfg)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = x + self.attn(self.norm_1(x), ctx)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(cfg.n_layer))
        self.norm_f = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.lm_head = Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tied:
            self.lm_head.weight = self.wte.weight
        self.markers = nn.Parameter(torch.zeros(cfg.n_rounds, cfg.n_embd))
        self.compute_dtype = torch.float32
        self.checkpointing = False

    def prefix(self, ids: Tensor, ctx: Context) -> Tensor:
        """Prefix: embedding and the first L - n layers. (R, T) int64 -> (R, T, C)."""
        h = self.wte(ids).to(self.compute_dtype)
        return self.run(h, ctx, 0, self.cfg.n_layer - self.cfg.n_last)

    def last_n(self, h: Tensor, ctx: Context) -> Tensor:
        """LastN: the remaining n layers, on h as it is given. (R, T, C) -> (R, T, C)."""
        return self.run(h, ctx, self.cfg.n_layer - self.cfg.n_last, self.cfg.n_layer)

    def head(self, h: Tensor) -> Tensor:
        """Head: final norm and LM head. (..., C) -> (..., V) float32."""
        return self.lm_head(self.norm_f(h)).float()

    def mark(self, h: Tensor, bundle: Tensor, round: int) -> Tensor:
        """h + 1_S * marker_round. With a zero marker or an empty bundle this is h, and Stage B is Stage A."""
        return h + bundle[..., None] * self.markers[round].to(h.dtype)

    def coordinate(self, h: Tensor, bundle: Tensor, ctx: Context, n_rounds: int) -> Tensor:
        """Eq. 4: K times h <- LastN(h + 1_S * marker_i), from the prefix states h (R, T, C) and bundle (R, T) bool."""
        for i in range(n_rounds):
            h = self.last_n(self.mark(h, bundle, i), replace(ctx, round=i))
        return h

    def forward(self, ids: Tensor, ctx: Context) -> Tensor:
        """The factorised model: (R, T) int64 -> (R, T, V) float32 logits."""
        return self.head(self.last_n(self.prefix(ids, ctx), ctx))

    def run(self, h: Tensor, ctx: Context, first: int, end: int) -> Tensor:
        again = self.checkpointing and torch.is_grad_enabled()
        for layer in self.layers[first:end]:
            h = checkpoint(layer, h, ctx, use_reentrant=False) if again else layer(h, ctx)
        return h

    def add_lora(self, r: int, alpha: float, generator: torch.Generator, first: int = 0) -> None:
        """Freeze everything, then add LoRA to qkv and proj of the layers from `first` on; it and the markers train."""
        self.requires_grad_(False)
        for layer in self.layers[first:]:
            layer.attn.qkv.add_lora(r, alpha, generator)
            layer.attn.proj.add_lora(r, alpha, generator)
        self.markers = nn.Parameter(self.markers.float())

    def adapter_state(self) -> dict[str, Tensor]:
        """What an adapter is made of, by name: LoRA matrices and markers."""
        return {k: v for k, v in self.state_dict().items() if "lora_" in k or k == "markers"}
