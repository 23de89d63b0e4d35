"""The switches of the paper's Table 2 that its ablations alone need: whose logits fill and edit, marker, bundle.

model.step = ablation.step        # then `generate` and `quality` take an Ablation in place of a Decoding
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cache import Cached
from lib.util import first_masked
from sample import Decoding, candidates, select_bundle

# R rows in flight, B block_length


@dataclass(frozen=True)
class Ablation(Decoding):
    """The paper's method as it is. (All masks at once: tau_m2t -1; no Stage B: n_rounds 0; no edits: tau_t2t None.)"""

    select: str = "confidence"  # or "entropy": as many positions as confidence would take, but the least entropic ones
    fill_from: str = "B"  # which stage's logits write masks, and which write edits
    edit_from: str = "B"
    marker: bool = True  # False: Stage B runs the layers again without the marker

    def switched(self) -> bool:
        return (self.select, self.fill_from, self.edit_from, self.marker) != ("confidence", "B", "B", True)


def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Ablation) -> dict[str, Tensor]:
    """One step on the current blocks z (R, B), as sample.step but for the switches."""
    masked = z == engine.cfg.mask_id
    visible = ~masked & ~prompt

    # Stage A, and the bundle by confidence
    h, logits_a = engine.stage_a(z)
    token_a, conf_a = candidates(logits_a, u[:, 0], d)
    bundle = select_bundle(conf_a, masked, d, engine.cfg.order)

    # or as many masks, but those of the least entropy
    if d.select == "entropy":
        log_p = logits_a.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        bundle = first_masked(entropy, masked, bundle.sum(-1, keepdim=True), masked.shape[1])

    # Stage B; a row without a bundle writes from Stage A
    token_b = token_a
    conf_b = conf_a
    if any_masked and d.n_rounds > 0:
        marked = bundle & d.marker
        token, conf = candidates(engine.stage_b(h, marked), u[:, 1], d)
        coordinated = bundle.any(-1, keepdim=True)
        token_b = torch.where(coordinated, token, token_a)
        conf_b = torch.where(coordinated, conf, conf_a)

    # which stage fills, and which edits
    stages = {"A": (token_a, conf_a), "B": (token_b, conf_b)}
    fill, fill_conf = stages[d.fill_from]
    edit, edit_conf = stages[d.edit_from]
    edited = visible & (edit_conf > d.edit_gate) & (edit != z)
    after = torch.where(edited, edit, z)
    after = torch.where(bundle, fill, after)
    conf = torch.where(bundle, fill_conf, edit_conf)
    return dict(before=z, after=after, bundle=bundle, edited=edited, conf=conf, token_a=token_a, conf_a=conf_a)
