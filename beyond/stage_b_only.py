"""Adapters that act in Stage B alone: the last n layers again, at the current block's positions.

Stage A is then the base model bit for bit, what is gained is Stage B's alone, and training needs no gradient in the
prefix. (In the paper's scope LoRA acts in every layer and both stages, and a target other than the clean tokens pulls
Stage A along.) In decoding the finished blocks before the current one are unadapted: train with --context clean.

checkpoint.load_model comes here through `attach` when an adapter.json names this module.
"""

from argparse import Namespace
from dataclasses import replace

import torch
from torch import Tensor

from corrupt import M, three_term_loss
from lib.util import generator
from model import Context, Model
from train import Batch, Losses, Recipe, Step, batch_context

# R rows, T positions, C channels


class StageBOnly(Model):
    """A model whose LoRA lies in the last n layers and is switched on by `coordinate` alone."""

    def last_n(self, h: Tensor, ctx: Context) -> Tensor:
        return super().last_n(h, replace(ctx, lora=False))

    def coordinate(self, h: Tensor, bundle: Tensor, ctx: Context, n_rounds: int, first_round: int = 0) -> Tensor:
        # of a whole row, uncached, the last block is the current one
        T = h.shape[1]
        where = ctx.lora
        if where is True and self.cfg.block_length < T:
            where = torch.arange(T, device=h.device)[:, None] >= T - self.cfg.block_length
        for i in range(first_round, n_rounds):
            h = super().last_n(self.mark(h, bundle, i), replace(ctx, round=i, lora=where))
        return h


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    adapt(model, settings["lora_r"], torch.Generator())


def adapt(model: Model, r: int, rng: torch.Generator, kind: type[Model] = StageBOnly) -> None:
    """What learns: LoRA in the last n layers, and the markers."""
    model.__class__ = kind
    model.add_lora(r, 2 * r, rng, first=model.cfg.n_layer - model.cfg.n_last)


def stage_b_recipe(step: Step, command: str) -> Recipe:
    """A recipe that trains such adapters by `step`."""

    def adapt_model(model: Model, args: Namespace) -> None:
        adapt(model, args.lora_r, generator(args.seed, "lora"))

    return Recipe(step, adapt_model, command, {"extension": "beyond.stage_b_only"})


def stage_b_losses(
    model: Model, batch: Batch, z: Tensor, kind: Tensor, bundle: Tensor, wanted: Tensor, args: Namespace
) -> Losses:
    """Stage B's loss. Stage A is the frozen base and has no gradient; its terms are measured in validation."""
    T = z.shape[1]
    ctx = batch_context(model, batch, args)
    with torch.no_grad():
        h = model.prefix(z, ctx)

    # the adapters act at every noisy position, but not on the clean copy behind
    noisy = torch.arange(h.shape[1], device=h.device)[:, None] < T
    stage_b = model.coordinate(h, bundle, replace(ctx, lora=noisy), model.cfg.n_rounds)
    loss, terms_b = three_term_loss(model, stage_b, wanted, kind, fill=bundle)

    terms_a = torch.zeros_like(terms_b)
    if not torch.is_grad_enabled():
        stage_a = model.last_n(h, ctx)
        _, terms_a = three_term_loss(model, stage_a, batch.clean, kind, fill=kind == M)
    return loss, torch.stack([terms_a, terms_b])
