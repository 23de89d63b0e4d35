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
from data import generator
from model import Context, Model
from train import Objective

# R rows, T positions, B block_length, C channels


class StageBOnly(Model):
    """A model whose LoRA lies in the last n layers and is switched on by `coordinate` alone."""

    def last_n(self, h: Tensor, ctx: Context) -> Tensor:
        return super().last_n(h, replace(ctx, lora=False))

    def coordinate(self, h: Tensor, bundle: Tensor, ctx: Context, n_rounds: int) -> Tensor:
        T, where = h.shape[1], ctx.lora
        if where is True and self.cfg.block_length < T:  # a whole row, uncached: its last block is the current one
            where = torch.arange(T, device=h.device)[:, None] >= T - self.cfg.block_length
        for i in range(n_rounds):
            h = super().last_n(self.mark(h, bundle, i), replace(ctx, round=i, lora=where))
        return h


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    adapt(model, settings["lora_r"], torch.Generator())


def adapt(model: Model, r: int, rng: torch.Generator, kind: type[Model] = StageBOnly) -> None:
    model.__class__ = kind
    model.add_lora(r, 2 * r, rng, first=model.cfg.n_layer - model.cfg.n_last)


class StageBOnlyObjective(Objective):
    extension = {"extension": "beyond.stage_b_only"}

    @staticmethod
    def adapt(model: Model, args: Namespace) -> None:
        adapt(model, args.lora_r, generator(args.seed, "lora"))

    def stages(
        self, x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, target: Tensor, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        """Stage B's loss. Stage A is the frozen base and has no gradient; its terms are measured in validation."""
        model, T = self.model, x.shape[1]
        ids, marked = self.beside_clean_copy(x, z, bundle, ctx)
        with torch.no_grad():
            h = model.prefix(ids, ctx)
        everywhere = torch.arange(ids.shape[1], device=ids.device)[:, None] < T  # but not on the clean copy
        h_b = model.coordinate(h, marked, replace(ctx, lora=everywhere), model.cfg.n_rounds)
        loss, terms_b = three_term_loss(model, h_b[:, :T], target, kind, fill=bundle)
        terms_a = torch.zeros_like(terms_b)
        if not torch.is_grad_enabled():
            terms_a = three_term_loss(model, model.last_n(h, ctx)[:, :T], x, kind, kind == M)[1]
        return loss, torch.stack([terms_a, terms_b])
