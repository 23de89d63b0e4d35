"""Stage A taught the chain: no second pass, and the opponent that one has to beat.

The targets are beyond/chain.py's, what the base writes into a bundle one token at a time. Here the model itself learns
to write them at once, in every pass: its own weights, or LoRA in every layer, from the masks of own_blocks.py. What it
forgets by that (decoding one at a time it is no longer the base) the base's own loss, mixed in, is to keep.

    python -m beyond.distill --data names --init_from out/base --own_loss 1 --out_dir out/distilled
    python sample.py --ckpt out/base --adapter out/distilled --prompt "ARABIC LIGATURE" --tau_m2t 0.1
"""

import copy
from argparse import Namespace
from dataclasses import replace

import torch
from torch import Tensor

import sample
import train
from beyond import chain
from beyond.chain import Chain
from beyond.own_blocks import Suffixes
from cache import Cached
from corrupt import M, three_term_loss
from data import bounded, fail
from model import Context, Model
from sample import Decoding
from train import Losses, Objective

# R rows, T positions, B block_length


class Distilled(Model):
    """A model whose Stage A alone decodes; all of its weights are the adapter."""

    def step(self, engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        s = sample.step(engine, z, prompt, busy, u, replace(d, n_rounds=0))
        return s | {"partial": torch.zeros(len(z), device=z.device)}

    def adapter_state(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    model.__class__ = Distilled
    if settings.get("weights") == "lora":
        model.add_lora(settings["lora_r"], settings["lora_alpha"], torch.Generator())


class Distill(Chain):
    command = "python -m beyond.distill"

    def __init__(self, model: Model, *given):
        super().__init__(model, *given)
        self.extension = {"extension": "beyond.distill", "weights": self.args.weights}
        self.corruption = Suffixes(**vars(self.corruption))
        self.teacher = copy.deepcopy(model).requires_grad_(False)  # the base, before anything is learned or resumed

    @staticmethod
    def adapt(model: Model, args: Namespace) -> None:
        if args.weights == "lora":
            Objective.adapt(model, args)
        model.__class__ = Distilled

    def stages(self, x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, target: Tensor, ctx: Context) -> Losses:
        """Stage A's loss to the chain on the bundle, and own_loss times Eq. 1's to the clean tokens; terms of both."""
        model, T = self.model, x.shape[1]
        ids, _ = self.beside_clean_copy(x, z, bundle, ctx)
        h = model.last_n(model.prefix(ids, ctx), ctx)[:, :T]
        own, terms_own = three_term_loss(model, h, x, kind, fill=kind == M)
        loss, terms = three_term_loss(model, h[bundle], target[bundle], kind[bundle], fill=kind[bundle] == M)
        return loss + self.args.own_loss * own, torch.stack([terms_own, terms])


def settle(args: Namespace) -> type[Objective]:
    if args.corruption != "mask":
        fail("the chain writes masks, and own blocks are trained on them alone: --corruption mask")
    chain.settle(args)
    return Distill


def main() -> None:
    p = chain.build_parser(__doc__)
    p.set_defaults(corruption="mask", confident_share=0.75, s_min=2, s_max=8, learning_rate=1e-3, batch_size=64)
    g = p.add_argument_group("distillation (beyond the paper)")
    g.add_argument("--weights", choices=["all", "lora"], default="all", help="which weights learn: all, or LoRA's")
    g.add_argument("--own_loss", type=bounded(float, 0), default=1.0, help="weight of the base's own loss (0: none)")
    train.main(p, settle)


if __name__ == "__main__":
    main()
