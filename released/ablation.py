"""The switches of the paper's Table 2 that its ablations alone need: whose logits fill and edit, marker, bundle.

model.step = ablation.step        # then `generate` and `quality` take an Ablation in place of a Decoding
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cache import Cached
from corrupt import first_masked
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


def step(engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Ablation) -> dict[str, Tensor]:
    """One step on the current blocks z (R, B), as sample.step but for the switches."""
    masked = z == engine.cfg.mask_id
    h, logits = engine.stage_a(z)
    a = b = candidates(logits, u[:, 0], d)  # tokens (R, B), their probabilities (R, B)
    bundle = select_bundle(a[1], masked, d)
    if d.select == "entropy":
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        bundle = first_masked(entropy, masked, bundle.sum(-1, keepdim=True), masked.shape[1])
    if busy and d.n_rounds:
        marked = candidates(engine.stage_b(h, bundle & d.marker), u[:, 1], d)
        coordinated = bundle.any(-1, keepdim=True)  # a row without a bundle writes from Stage A
        b = [torch.where(coordinated, x, y) for x, y in zip(marked, a, strict=True)]
    (fill, fill_conf), (edit, edit_conf) = (b if stage == "B" else a for stage in (d.fill_from, d.edit_from))
    gate = math.inf if d.tau_t2t is None else d.tau_t2t
    edited = ~masked & ~prompt & (edit_conf > gate) & (edit != z)
    after = torch.where(bundle, fill, torch.where(edited, edit, z))
    conf = torch.where(bundle, fill_conf, edit_conf)
    return dict(before=z, after=after, bundle=bundle, edited=edited, conf=conf, token_a=a[0], conf_a=a[1])
