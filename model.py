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
  - the MLP is a mixture of experts in every layer but the first `n_dense`; both are in layers.py
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from config import Config
from layers import MLP, Linear, MoE, RMSNorm

# R rows, T positions, S keys, C channels (n_embd), H heads, G key/value heads, D head dim, V vocabulary,
# P chosen positions, L layers, n = n_last, K = n_rounds, B block_length


# adds the keys and values of the blocks before to those of a pass: (slot, round, k, v), with k and v (R, G, T, D)
# -> what the pass attends to, (R, G, S, D) each; its own come first
AddKeys = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Context:
    """What a pass through the layers needs besides the states. On a first reading cos, sin and mask are enough."""

    cos: Tensor  # (T, 1, rotary_dim / 2), or (R, T, 1, ...) where rows are at different positions
    sin: Tensor
    mask: Tensor  # bool, broadcasts to (R, H, T, S): who attends to whom
    add_keys: AddKeys | None = None  # adds the blocks before: finished ones, or in training their clean copies
    i_round: int = 0  # the round of Stage B whose keys and values are added
    n_rounds: int = 1  # K: how many rounds Stage B takes

    def inside(self, block_length: int) -> "Context":
        """The same pass without other blocks: each position sees of its own block what it saw, and nothing else."""
        T = self.cos.shape[-3]
        block = torch.arange(T, device=self.cos.device) // block_length
        own = block[:, None] == block[None, :]
        return replace(self, add_keys=None, mask=self.mask[..., :T] & own)


# --- the method
class Model(nn.Module):
    """Stage A and the paper's Stage B. Another Stage B is a subclass with another `coordinate`, named in
    checkpoint.STAGE_B. Its own parameters begin as the class makes them, learn, and are saved. It may also have

        fixed                                 settings that its training fixes, name -> value        (else none)
        corrupt_and_draw(batch, ctx, args)    what it is shown while it learns    (else train.corrupt_and_draw)
        settings                              how it decodes                      (else decoding.PAPER)
        unread                                flags of sample.py that its step does not read     (else "beam")
        denoise(engine, z, given, u, d)       a decoding step                     (else sample.denoise)
        told(clean, states), partial_cost     see below

    A method that calls functions of train.py or sample.py imports them itself, inside. An example with a layer of its
    own is in tests/test_stage_b_of_ones_own.py, and cache.check_stage_b tries any coordinate.
    """

    BASE = ("wte", "layers", "norm_f", "lm_head")  # all parameters outside these are Stage B's own
    fixed: dict[str, object] = {}
    unread: tuple[str, ...] = ("beam",)

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        # the base takes no memory until its weights are loaded or drawn (checkpoint.py)
        with torch.device("meta"):
            self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
            self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.n_layer))
            self.norm_f = RMSNorm(cfg.n_embd, cfg.norm_eps)
            self.lm_head = Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.tie()
        for i, layer in enumerate(self.layers):
            layer.attn.slot = i
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

    def context(self, real: Tensor, one_by_one: Tensor | None = None) -> Context:
        """The Context of a pass over whole rows, whose blocks see the blocks before them as they stand in the row.

        real (R, T) bool: False on padding. A padded position is seen by itself alone.
        one_by_one (R,) bool: True for rows whose blocks have one token, so that they are read from left to right.
        """
        cos, sin = rotary(self.cfg, torch.arange(real.shape[1], device=real.device), self.compute_dtype)
        mask = self.who_sees_whom(real, one_by_one, block_causal_mask)
        return Context(cos, sin, mask, n_rounds=self.cfg.n_rounds)

    def read_clean(self, clean: Tensor, real: Tensor, one_by_one: Tensor | None = None) -> Context:
        """Read the clean rows (R, T) int64 -> the Context in which a corrupted block sees the clean blocks before it,
        as in decoding. The clean rows are read in every round, unmarked. For real and one_by_one see `context`."""
        ctx = self.context(real, one_by_one)
        if self.cfg.block_length >= real.shape[1] and one_by_one is None:
            return ctx  # a row of one block has no block before it
        kept = {}

        def keep(slot: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            kept[slot, i_round] = (k, v)
            return k, v

        def add(slot: int, i_round: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            clean_k, clean_v = kept[slot, i_round]
            return torch.cat([k, clean_k], dim=2), torch.cat([v, clean_v], dim=2)

        h = self.prefix(clean, replace(ctx, add_keys=keep))
        for i in range(self.cfg.n_rounds):
            h = self.last_n(h, replace(ctx, add_keys=keep, i_round=i))
        return replace(ctx, add_keys=add, mask=self.who_sees_whom(real, one_by_one, beside_clean_mask))

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
        """What a partial forward costs, as a share of a full one: it runs n of L layers, and Stage B's own ones. A
        Stage B that runs others says so here."""
        own = sum(isinstance(module, Layer) for module in self.modules()) - self.cfg.n_layer
        return (self.cfg.n_last + own) / self.cfg.n_layer

    # --- what learns
    def own(self) -> dict[str, Tensor]:
        """Stage B's own parameters and buffers, by name: the markers, and what a subclass adds."""
        tensors = self.state_dict(keep_vars=True).items()
        return {name: tensor for name, tensor in tensors if name.split(".")[0] not in self.BASE}

    def adapt(self, r: int, generator: torch.Generator) -> None:
        """Freeze the base, and let learn what is beside it (paper, Sec. 5.1): LoRA of rank r in every qkv and proj (0:
        none), and Stage B's own parameters."""
        self.requires_grad_(False)
        for layer in self.layers if r > 0 else ():
            layer.attn.qkv.add_lora(r, generator)
            layer.attn.proj.add_lora(r, generator)

        # always float32, whatever the model's dtype: an update of 1e-5 is lost in a bf16 parameter
        for tensor in self.own().values():
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.float()
                tensor.requires_grad_(True)

    def begin_from(self, state: dict[str, Tensor]) -> None:
        """Add to a base's tensors (name -> tensor) what is Stage B's own and they lack, as its class has made it.
        There is one marker for each round: a surplus one is cut off, and a new one begins at zero."""
        device = state["wte.weight"].device
        for name, made in self.own().items():
            begun = state.get(name, made.detach())
            if name == "markers" and begun.shape[1:] == made.shape[1:]:
                begun = torch.cat([begun.to(made), made.detach()])[: len(made)]
            state[name] = begun.to(device)

    def learned(self) -> dict[str, Tensor]:
        """The parameters that learn, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @property
    def trained_b(self) -> bool:
        """Was Stage B trained? With zero markers the paper's first round is Stage A."""
        return bool(self.markers.any())

    def told(self, clean: Tensor, states: Tensor) -> Tensor:
        """Which tokens Stage B reads in the bundle while it learns, and while it is measured: Stage A's drafts, as in
        decoding. They may be the true ones only if each position reads none but tokens on its left. (The paper's Stage
        B reads none, so it is told masks.)

        clean (P,) int64: the true tokens. states (P, C): Stage A's -> (P,) int64."""
        if type(self).coordinate is Model.coordinate:
            return torch.full_like(clean, self.cfg.mask_id)
        return self.drafts(states)

    @torch.no_grad()
    def drafts(self, states: Tensor) -> Tensor:
        """Stage A's likeliest tokens, but never a mask: states (P, C) -> (P,) int64."""
        no_mask = torch.zeros(self.cfg.vocab_size, device=states.device)
        no_mask[self.cfg.mask_id] = float("-inf")
        # the logits of 1,024 positions at a time
        return torch.cat([(self.logits(part) + no_mask).argmax(-1) for part in states.split(1024)])


# --- who sees whom
def block_causal_mask(
    T: int, block_length: int, window: int, device: torch.device | str = "cpu", first: int = 0
) -> Tensor:
    """(T - first, T) bool, query by key: a position sees its own block, and the earlier blocks that are in the window.
    The queries are positions first..T-1.

    T = 4, block_length = 2:      1 1 0 0
                                  1 1 0 0
                                  1 1 1 1
                                  1 1 1 1
    """
    block = torch.arange(T, device=device) // block_length
    blocks_back = block[first:, None] - block[None, :]
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
    """A layer at some depth: dense in the first n_dense, then with experts. One that is not in Model.layers, such as a
    Stage B's own, sees its own block alone; to see the blocks before, it takes another layer's slot."""

    def __init__(self, cfg: Config, depth: int = 0):
        super().__init__()
        self.norm_1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn = Attention(cfg)
        self.norm_2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg, cfg.d_dense) if depth < cfg.n_dense else MoE(cfg)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = x + self.attn(self.norm_1(x), ctx)
        return x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        # the layer of the model whose keys of the blocks before it reads; None: it sees its own block alone
        self.slot: int | None = None
        # the rows of its weight: all query heads, then all key heads, then all value heads
        self.qkv = Linear(cfg.n_embd, (cfg.n_head + 2 * cfg.n_kv_head) * cfg.head_dim, bias=cfg.qkv_bias)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.proj = Linear(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=cfg.proj_bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        R, T, _ = x.shape
        cfg = self.cfg
        if self.slot is None:
            ctx = ctx.inside(cfg.block_length)
        qkv = self.qkv(x).view(R, T, -1, cfg.head_dim)
        q, k, v = qkv.split([cfg.n_head, cfg.n_kv_head, cfg.n_kv_head], dim=2)

        # normalise queries and keys, then rotate them together
        qk = rotate(torch.cat([self.q_norm(q), self.k_norm(k)], dim=2), ctx)
        q, k = qk.split([cfg.n_head, cfg.n_kv_head], dim=2)
        q = q.transpose(1, 2)  # (R, H, T, D)
        k = k.transpose(1, 2)  # (R, G, T, D)
        v = v.transpose(1, 2)

        # add the keys and values of the blocks before
        if ctx.add_keys is not None:
            k, v = ctx.add_keys(self.slot, ctx.i_round, k, v)
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
