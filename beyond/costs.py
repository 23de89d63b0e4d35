"""What a decode costs: full forwards, multiplications, passes one after the other.

    all      in full forwards of the model: a commit forward is one, a partial one is model.partial_cost times the share
             of the block that it ran at, and a second reading one for each block that it reads
    mult     multiplications by weights
    serial   passes one after the other, a small one like a full one: what latency pays

Multiplications, of a block of B positions, where N is the number of weights of all layers and VC that of the LM head:

    full forward      B (N + VC)
    commit forward    B N                                     it writes nothing
    Stage B           B (the last n layers' + VC)             in each round
    joint head        B attention + (MLP + VC) at each position that it looks at, its own weights
    sampling head     B (3 attention + map) + the same: it reads three copies of a block, and drafts through a map
    WINO's shadows    B (N + VC)                              read in one pass with the block: no pass of their own
    S2D2's reading    B (2 N + VC)                            a pass of its own, over the drafts and masks beside them

Products of queries, keys and values with one another are left out (below 3 % on names). LoRA counts as merged. Of
routed experts, those that are active count.

A left-to-right model (block_length 1) needs no commit forward: the pass that reads a position's mask can read the token
before it, too. Each of its tokens is charged one pass in `all` and `serial`, and 2 N + VC multiplications.
"""

from dataclasses import dataclass

from torch import nn

from cache import in_full
from model import Model

# B block_length, N weights of all layers, C channels, V vocabulary


@dataclass(frozen=True)
class Reading:
    """What a rule of rule_steps.py reads by all layers, beside the block that Stage A reads."""

    blocks: int  # the last one's positions go through the LM head
    passes: int  # one after the other; 0: it shares Stage A's


SHADOWS = Reading(blocks=1, passes=0)
VERIFICATION = Reading(blocks=2, passes=1)


def weights(module: nn.Module, n_active: int = 0) -> int:
    """By how many weights a position is multiplied: matrices, and n_active of the stacked experts (E, out, in)."""
    total = 0
    for name, p in module.named_parameters():
        if "lora_" in name:
            continue
        if p.dim() == 2:
            total += p.numel()
        if p.dim() == 3:
            total += p[0].numel() * n_active
    return total


def costs(model: Model, nfe: dict[str, float], looks: int, reading: Reading | None = None) -> dict[str, float]:
    """all, mult and serial of forwards by kind (cache.Output, summed) with so many runs of Stage B, of a head, or, if
    one is given, of a rule's second reading."""
    layers, vocabulary = layers_and_vocabulary(model)
    B = model.cfg.block_length
    if B == 1:
        # no commit forwards, and nobody trains a head for blocks of one
        return {"all": nfe["full"], "mult": nfe["full"] * (2 * layers + vocabulary), "serial": nfe["full"]}

    # a rule's readings, with Stage B and heads off
    if reading is not None:
        once = B * (reading.blocks * layers + vocabulary)
        return {
            "all": in_full(nfe, model.partial_cost) + looks * reading.blocks,
            "mult": multiplications(model, nfe, 0) + looks * once,
            "serial": nfe["full"] + nfe["commit"] + looks * reading.passes,
        }
    return {
        "all": in_full(nfe, model.partial_cost),
        "mult": multiplications(model, nfe, looks),
        "serial": nfe["full"] + nfe["commit"] + looks,
    }


def full_forward(model: Model) -> int:
    """The multiplications of one full forward of a block."""
    layers, vocabulary = layers_and_vocabulary(model)
    return model.cfg.block_length * (layers + vocabulary)


def multiplications(model: Model, nfe: dict[str, float], looks: int) -> float:
    """By weights, see above; of a model with blocks of more than one."""
    B = model.cfg.block_length
    layers, vocabulary = layers_and_vocabulary(model)
    total = nfe["full"] * full_forward(model) + nfe["commit"] * B * layers

    # the partial forwards: the positions that are looked at, in blocks, and once a look what all positions are read by
    if hasattr(model, "joint_head"):
        attention, mlp = attention_and_mlp(model.joint_head)
        return total + looks * B * attention + nfe["partial"] * B * (mlp + vocabulary)
    if hasattr(model, "sampling_head"):
        attention, mlp = attention_and_mlp(model.sampling_head)
        read = 3 * attention + weights(model.show_draft)
        return total + looks * B * read + nfe["partial"] * B * (mlp + vocabulary)
    last = sum(weights(layer, model.cfg.n_active) for layer in model.layers[-model.cfg.n_last :])
    return total + nfe["partial"] * B * (last + vocabulary)


def layers_and_vocabulary(model: Model) -> tuple[int, int]:
    """N, and the LM head's weights."""
    layers = sum(weights(layer, model.cfg.n_active) for layer in model.layers)
    return layers, model.lm_head.weight.numel()


def attention_and_mlp(head: nn.ModuleList) -> tuple[int, int]:
    """The weights of a head's dense blocks."""
    attention = sum(weights(block.attn) for block in head)
    mlp = sum(weights(block.mlp) for block in head)
    return attention, mlp
