"""Stage A taught the chain: no second look, and the opponent that one has to beat.

The targets are beyond/chain.py's, what the base writes into a bundle one token at a time. Here the model itself learns
to write them at once, in every pass: its own weights, or LoRA in every layer, from the masks of joint_head.py. What it
forgets by that (decoding one at a time it is no longer the base), the base's own loss, mixed in, is to keep.

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
from beyond.chain import CleanCache, bundle_as_decoded, stage_b_target
from beyond.joint_head import masks_as_decoded, summed
from cache import Cached
from corrupt import M, cross_entropy, three_term_loss
from lib.util import bounded, fail
from model import Model
from sample import Decoding
from train import Batch, Losses, Recipe, batch_context, lora_everywhere

# R rows, T positions, B block_length


# --- the model
class Distilled(Model):
    """A model whose Stage A alone decodes; all of its weights are the adapter."""

    def step(
        self, engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding
    ) -> dict[str, Tensor]:
        s = sample.step(engine, z, prompt, any_masked, u, replace(d, n_rounds=0))
        return s | {"partial": torch.zeros(len(z), device=z.device)}

    def adapter_state(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    model.__class__ = Distilled
    if settings.get("weights") == "lora":
        model.add_lora(settings["lora_r"], settings["lora_alpha"], torch.Generator())


# --- the training step
def distill_step(model: Distilled, batch: Batch, args: Namespace) -> Losses:
    """Stage A's loss to the chain on the bundle, and own_loss times Eq. 1's to the clean tokens."""
    z, kind = masks_as_decoded(model, batch, args)
    masked = kind == M

    # the chain is the teacher's: the base, as it was before anything was learned
    teacher = model.teacher[0]
    finished = CleanCache(teacher, batch)
    bundle = bundle_as_decoded(finished, z, masked, batch, args)
    wanted = stage_b_target(finished, z, bundle, batch, args)

    # one pass, two losses
    ctx = batch_context(model, batch, args)
    h = model.last_n(model.prefix(z, ctx), ctx)
    own, terms_own = three_term_loss(model, h, batch.clean, kind, fill=masked)
    ce = cross_entropy(model, h[:, : z.shape[1]][bundle], wanted[bundle])

    terms = torch.zeros_like(terms_own)
    terms[0] = summed(ce)
    return ce.sum() + args.own_loss * own, torch.stack([terms_own, terms])


# --- the command line
def adapt(model: Model, args: Namespace) -> None:
    """What learns: all weights, or LoRA's."""
    teacher = copy.deepcopy(model).requires_grad_(False)
    if args.weights == "lora":
        lora_everywhere(model, args)
    model.__class__ = Distilled
    model.teacher = [teacher]  # in a list, so that it is no part of the model


def choose(args: Namespace) -> Recipe:
    chain.check(args)
    if args.corruption != "mask":
        fail("the chain writes masks, and the opponent is trained on them alone: --corruption mask")
    extension = {"extension": "beyond.distill", "weights": args.weights}
    return Recipe(distill_step, adapt, "python -m beyond.distill", extension)


def main() -> None:
    p = chain.build_parser(__doc__)
    p.set_defaults(corruption="mask", confident_share=0.75, s_min=2, s_max=8, learning_rate=1e-3, batch_size=64)
    add = p.add_argument_group("distillation (beyond the paper)").add_argument
    add("--weights", choices=["all", "lora"], default="all", help="which weights learn: all, or LoRA's")
    add("--own_loss", type=bounded(float, 0), default=1.0, help="weight of the base's own loss (0: none)")
    train.main(p, choose)


if __name__ == "__main__":
    main()
