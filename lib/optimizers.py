"""The optimizers: AdamW, as in the paper, and Muon. They take what learns (name -> tensor), the highest rate, and the
markers' rate as a multiple of Adam's."""

import torch
from torch import Tensor

WEIGHT_DECAY = 0.01
ADAM = 0.4  # beside Muon: the peak of Adam's learning rate, as a share of Muon's


def adamw(learned: dict[str, Tensor], peak: float, marker_rate: float = 1.0) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only: norms and markers are not pulled to zero."""
    matrices = [p for name, p in learned.items() if p.dim() >= 2 and name != "markers"]
    others = [p for p in learned.values() if p.dim() < 2]
    decayed = dict(params=matrices, peak=peak, weight_decay=WEIGHT_DECAY)
    undecayed = dict(params=others, peak=peak, weight_decay=0.0)
    markers = dict(params=[learned["markers"]], peak=marker_rate * peak, weight_decay=0.0)
    return torch.optim.AdamW([decayed, undecayed, markers], betas=(0.9, 0.95), fused=True)


def muon(learned: dict[str, Tensor], peak: float, marker_rate: float = 1.0) -> torch.optim.Optimizer:
    """Muon for the matrices of the layers (attention, dense and shared MLPs, routers), and Adam without decay for the
    rest (embedding, output layer, stacked experts, ...)."""
    matrices = [p for name, p in learned.items() if name.startswith("layers") and p.dim() == 2]
    others = [p for name, p in learned.items() if not (name.startswith("layers") and p.dim() == 2)]
    of_matrices = dict(params=matrices, peak=peak, momentum=0.95, weight_decay=WEIGHT_DECAY)
    rest = dict(params=others, peak=ADAM * peak, weight_decay=0.0)
    adam = torch.optim.AdamW([rest], betas=(0.9, 0.95), fused=True)
    return Together(torch.optim.Muon([of_matrices], adjust_lr_fn="match_rms_adamw"), adam)


class Together:
    """Several optimizers that are used as one. Each of them has one group of parameters."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        self.param_groups = [part.param_groups[0] for part in parts]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Each parameter's moments, whichever optimizer has them."""
        return {p: part.state[p] for part in self.parts for p in part.param_groups[0]["params"]}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


OPTIMIZERS = {"adamw": adamw, "muon": muon}
