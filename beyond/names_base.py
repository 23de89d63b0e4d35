"""A base of names that is worth deciding on: written in any order, and from left to right, by one model.

It is train.py's loop with another recipe. What each part of it is worth stands on results/names.

    the masks       of a block are its end, random ones behind a visible beginning, or random ones: what decoding meets
    the context     is clean, as it is in decoding: a noisy block reads the finished text before it
    blocks of one   a share of the rows is read as by a left-to-right model: every token of such a row is a target
    Muon            updates the layers' matrices by an orthogonal matrix (torch.optim.Muon), Adam all the rest

With --one_by_one 1 the same script trains the opponent, a left-to-right model: its checkpoint has blocks of one.
Nothing but masks has a loss, so that the model is not taught to judge or to edit what is visible.

    python -m beyond.names_base --seed 1 --out_dir out/names-base           # assets/names: half an hour on one thread
    python -m beyond.names_base --init_from resume --out_dir out/names-base # go on after Ctrl-C, kill or power cut
    python -m beyond.names_base --one_by_one 1 --out_dir out/left-to-right  # the same time, the same geometry
    python evaluate.py --data names --ckpt out/names-base
"""

from argparse import Namespace
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from corrupt import Draws, cross_entropy, summed
from lib.config import PRESETS, Config
from lib.settings import build_parser
from lib.util import bounded, fail, uniform
from model import Model
from train import Batch, Losses, Recipe

# R rows, T positions, B block_length, Z = T / B blocks of a row, P masks

ADAM = 0.4  # the peak of embeddings, head and norms, beside the matrices' 1


# --- the training step
def names_step(model: Model, batch: Batch, args: Namespace) -> Losses:
    """Some rows in blocks of one, every token a mask; the others in the model's blocks, with drawn masks."""
    B = model.cfg.block_length
    device = batch.clean.device
    one_by_one = uniform(batch.draws, 1)[:, 0] < args.one_by_one
    masked = draw_masks(batch.draws, batch.clean.shape[1], B)
    masked = (masked | one_by_one[:, None]).to(device) & batch.free

    total = torch.zeros((), device=device)
    terms = {}
    for name, block_length, chosen in (("causal", 1, one_by_one), ("any_order", B, ~one_by_one)):
        if chosen.any():
            ce = fill_loss(model, batch.clean[chosen], batch.real[chosen], masked[chosen], block_length)
            total = total + ce.sum()
            terms[name] = summed(ce)
    return total, terms


def draw_masks(draws: Draws, T: int, B: int) -> Tensor:
    """(R, T) bool: in 30 % of the blocks the end is masked, in 30 % random positions behind a visible beginning, rather
    many, in 40 % random ones, their ratio U(0, 1)."""

    def of_blocks() -> Tensor:
        return uniform(draws, T // B).repeat_interleave(B, dim=1)

    kind = of_blocks()
    ratio = of_blocks()
    noise = uniform(draws, T)
    end = torch.arange(T) % B >= (of_blocks() * B).long()
    scattered = end & (noise < ratio.sqrt())
    anywhere = noise < ratio
    return torch.where(kind < 0.3, end, torch.where(kind < 0.6, scattered, anywhere))


def fill_loss(model: Model, clean: Tensor, real: Tensor, masked: Tensor, block_length: int) -> Tensor:
    """Cross-entropies at the masks of rows (R, T), which are read in such blocks beside their clean copy: (P,)."""
    z = clean.masked_fill(masked, model.cfg.mask_id)
    ctx = model.context(real, clean, block_length)

    # PyTorch's flash attention on CPUs is four times slower than plain products on rows as short as these in bf16
    with sdpa_kernel(SDPBackend.MATH):
        h = model.last_n(model.prefix(z, ctx), ctx)[:, : z.shape[1]]
    return cross_entropy(model, h[masked], clean[masked])


# --- what the loop is handed
class MuonAndAdam:
    """Muon for the matrices of the layers, which map states to states; Adam for embeddings, the head and norms."""

    def __init__(self, model: Model, args: Namespace):
        matrices = []
        others = []
        for name, p in model.named_parameters():
            if name.startswith("layers.") and p.dim() == 2:
                matrices.append(p)
            else:
                others.append(p)
        peak = args.learning_rate
        muon = dict(params=matrices, peak=peak, momentum=0.95, weight_decay=args.weight_decay)
        adam = dict(params=others, peak=ADAM * peak, betas=(0.9, 0.95), weight_decay=0.0)
        self.parts = [
            torch.optim.Muon([muon], lr=peak, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([adam], lr=ADAM * peak, fused=True),
        ]
        self.param_groups = [part.param_groups[0] for part in self.parts]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """What both remember of each parameter."""
        found = {}
        for part in self.parts:
            for p in part.param_groups[0]["params"]:
                found[p] = part.state[p]
        return found

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def geometry(args: Namespace) -> Config:
    """Eight dense layers, and the order in which such a model is better (results/names)."""
    return replace(PRESETS["names"], n_layer=8, n_dense=8, order="leftmost")


def choose(args: Namespace) -> Recipe:
    if args.init_from != "scratch":
        fail(f"--init_from {args.init_from}: a base of names begins from scratch")
    if args.one_by_one == 1:
        args.block_length = 1
    return Recipe(names_step, geometry=geometry, optimizer=MuonAndAdam)


def main() -> None:
    parser = build_parser(__doc__)
    parser.set_defaults(
        init_from="scratch", n_last=1, seq_len=32, batch_size=256, learning_rate=0.01, max_iters=2798, dtype="bf16",
        eval_interval=400, eval_rows=256, out_dir="out/names-base",
    )  # fmt: skip
    parser.add_argument(
        "--one_by_one", type=bounded(float, 0, 1), default=0.35, help="share of the rows that are read in blocks of one"
    )
    train.main(parser, choose)


if __name__ == "__main__":
    main()
