"""A model's geometry: its fields, what they must be, and the ones that there are."""

from dataclasses import dataclass, fields

import torch

from lib.util import fail

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    order: str = "surest"  # which masks of a block are written first: the "surest", or the "leftmost"
    tokenizer: str = "bytes"  # "bytes", "bpe" (tokenizer.json beside the weights) or "toy" (toy.json beside them)

    def __post_init__(self) -> None:
        """Refuse what no model can be built from, and what one would silently get wrong."""
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.type is float and type(value) is int  # 600000 for 600000.0
            if type(value) is not field.type and not whole:
                fail(f"impossible model: {field.name} is of type {field.type.__name__}, and {value!r} is not")

        group = self.n_expert // max(1, self.n_group)
        sizes = (self.n_head, self.n_kv_head, self.n_embd, self.head_dim, self.n_expert)
        counts = (self.n_layer, self.n_dense, self.n_shared)
        scales = (self.norm_eps, self.rope_theta, self.routed_scaling)
        ids = (self.eos_id, self.mask_id)
        for holds, what in (
            (all(0 < n <= 2**20 for n in (*sizes, self.d_dense, self.d_expert)), "sizes are 1..1,048,576"),
            (all(0 < x < 1e30 for x in scales), "norm_eps, rope_theta and routed_scaling are above 0, and finite"),
            (all(0 <= n <= 2**10 for n in counts), "n_layer, n_dense and n_shared are 0..1024"),
            (self.n_head % max(1, self.n_kv_head) == 0, "n_head is a multiple of n_kv_head"),
            (self.rotary_dim in range(2, self.head_dim + 1, 2), "rotary_dim is even, and at most head_dim"),
            (self.n_expert == group * self.n_group and group > 1, "n_group divides n_expert, in twos or more"),
            (1 <= self.topk_group <= self.n_group, "topk_group is 1..n_group"),
            (1 <= self.n_active <= self.topk_group * group, "n_active experts fit into topk_group groups"),
            (1 <= self.n_last <= self.n_layer, f"n_last is 1..{self.n_layer} (n_layer), not {self.n_last}"),
            (1 <= self.n_rounds <= 1000, "n_rounds is 1..1000"),
            (1 <= self.block_length <= self.max_len, f"block_length is 1..{self.max_len} (max_len)"),
            (max(ids) < self.vocab_size <= 2**20, "eos_id and mask_id are in the vocabulary, of 1,048,576 at most"),
            (min(ids) >= 0 or ids == (-1, -1), "eos_id and mask_id are 0 or above"),  # a preset has none yet
            (self.order in ("surest", "leftmost"), "order is surest or leftmost"),
            (self.tokenizer in ("bytes", "bpe", "toy"), "tokenizer is bytes, bpe or toy"),
        ):
            if not holds:
                fail(f"impossible model: it must be that {what}")


# fmt: off
PRESETS = {
    # tests and toys: every mechanism is there, and nothing is larger than it must be
    "tiny": Config(
        n_layer=4, n_embd=64, n_head=4, n_kv_head=2, head_dim=16, rotary_dim=8,
        d_dense=128, d_expert=32, n_expert=8, n_active=2, n_group=4, topk_group=2,
        vocab_size=320, max_len=4096,
    ),
    # names of Unicode characters, in minutes on two CPU cores
    "names": Config(
        n_layer=6, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, rotary_dim=16, rope_theta=1e4,
        d_dense=384, d_expert=64, n_expert=8, n_active=2, n_group=2, topk_group=2,
        vocab_size=1024, max_len=512,
    ),
    # any text, in bytes
    "text": Config(
        n_layer=6, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, rotary_dim=16, rope_theta=1e4,
        d_dense=384, d_expert=128, n_expert=16, n_active=2, n_group=4, topk_group=2,
        vocab_size=272, max_len=8192,
    ),
    # the released 16B geometry
    "llada2.1-mini": Config(
        n_layer=20, n_embd=2048, n_head=16, n_kv_head=4, head_dim=128,
        d_dense=5120, d_expert=512, n_expert=256, n_active=8, n_group=8, topk_group=4,
        vocab_size=157184, eos_id=156892, mask_id=156895, tokenizer="bpe",
    ),
}
# fmt: on
