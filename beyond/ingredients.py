"""What each ingredient of the joint head is worth: the same training and the same decoder with one of them changed.

    singles      bundles of one token are trained and looked at again, too
    suffixes     masks are random in every block; in no block are they moved to its end
    everywhere   the head changes every position of the block, not the bundle's alone (a partial forward is whole)
    own          no weights of its own: the last n layers run again from the prefix, with LoRA, as the paper's Stage B
    marker       a learned vector is added at the bundle's positions, whose states have a root mean square of 1
    rounds2      the head runs twice (rounds4: four times), each time on what it left at the bundle

Two more need no change of the code: bundles drawn at random are `python -m beyond.joint_head --confident_share 0`, and
nothing is refused with `--keep 0` of pays.py.

    python -m beyond.ingredients --change suffixes --data names --init_from out/base --out_dir out/no-suffixes
"""

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sample
import train
from beyond import joint_head, stage_b_only
from beyond.chain import CleanCache, bundle_as_decoded, stage_b_target
from beyond.joint_head import JointHead, joint_head_step, masks_as_decoded, without_small_ones
from beyond.stage_b_only import StageBOnly, stage_b_losses
from cache import Cached
from corrupt import M
from data import Parser, fail, generator
from model import Model
from sample import Decoding, select_bundle
from train import Batch, Losses, Recipe, Step, corrupt_batch

# R rows, B block_length, N blocks of a batch, C channels, P bundle positions


# --- what is run
class Singles(JointHead):
    least = 1


class Everywhere(JointHead):
    def second_look(self, h: Tensor, bundle: Tensor) -> Tensor:
        everything = torch.ones_like(bundle)
        y = super().second_look(h, everything)  # (R * B, C)
        return y.view_as(h)[bundle]

    def step(
        self, engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding
    ) -> dict[str, Tensor]:
        s = super().step(engine, z, prompt, any_masked, u, d)
        ran = s["partial"] > 0
        return s | {"partial": ran.float()}


class Marked(JointHead):
    def add_marker(self) -> None:
        marker = torch.zeros(self.cfg.n_embd, device=self.wte.weight.device)
        self.joint_head.register_parameter("marker", nn.Parameter(marker))

    def second_look(self, h: Tensor, bundle: Tensor) -> Tensor:
        y = F.rms_norm(h, h.shape[-1:])
        return super().second_look(y + bundle[..., None] * self.joint_head.marker, bundle)


class TwoRounds(JointHead):
    rounds = 2

    def second_look(self, h: Tensor, bundle: Tensor) -> Tensor:
        for _ in range(self.rounds - 1):
            y = super().second_look(h, bundle)
            h = h.masked_scatter(bundle[..., None], y)
        return super().second_look(h, bundle)

    def step(
        self, engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding
    ) -> dict[str, Tensor]:
        s = super().step(engine, z, prompt, any_masked, u, d)
        return s | {"partial": self.rounds * s["partial"]}


class FourRounds(TwoRounds):
    rounds = 4


class LastLayersAgain(StageBOnly):
    """The paper's Stage B in the place of the joint head. Bundles and refusals are the joint head's."""

    least = JointHead.least

    def step(
        self, engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding
    ) -> dict[str, Tensor]:
        s = sample.step(engine, z, prompt, any_masked, u, d)
        looked_at = s["bundle"] & (s["bundle"].sum(-1, keepdim=True) >= self.least)
        if d.n_rounds == 0:
            looked_at = torch.zeros_like(looked_at)

        # a bundle of one is Stage A's; of the others what is kept is written, what is refused stays masked
        kept = select_bundle(s["conf"], looked_at, replace(d, tau_m2t=self.tau_keep), self.cfg.order)
        refused = looked_at & ~kept
        single = s["bundle"] & ~looked_at
        after = torch.where(single, s["token_a"], s["after"])
        after = torch.where(refused, z, after)
        partial = looked_at.any(-1).float()
        return s | {"after": after, "bundle": s["bundle"] & ~refused, "partial": partial}


# --- what is trained
def last_layers_step(model: LastLayersAgain, batch: Batch, args: Namespace) -> Losses:
    """joint_head_step with LoRA in the last n layers instead of a head."""
    z, kind = masks_as_decoded(model, batch, args)

    # the same bundle, the same target
    finished = CleanCache(model, batch)
    bundle = bundle_as_decoded(finished, z, kind == M, batch, args)
    bundle = without_small_ones(bundle, model.cfg.block_length, model.least)
    wanted = stage_b_target(finished, z, bundle, batch, args)
    return stage_b_losses(model, batch, z, kind, bundle, wanted, args)


# --- the changes
@dataclass(frozen=True)
class Change:
    model: type[Model] = JointHead
    step: Step = joint_head_step


CHANGES = {
    "singles": Change(model=Singles),
    "suffixes": Change(step=partial(joint_head_step, masks=corrupt_batch)),
    "everywhere": Change(model=Everywhere),
    "own": Change(model=LastLayersAgain, step=last_layers_step),
    "marker": Change(model=Marked),
    "rounds2": Change(model=TwoRounds),
    "rounds4": Change(model=FourRounds),
}


def become(model: JointHead, kind: type[JointHead]) -> None:
    """Of a model with a joint head, the one that a change makes of it."""
    model.__class__ = kind
    if kind is Marked:
        model.add_marker()


def adapt_last_layers(model: Model, r: int, tau_keep: float, rng: torch.Generator) -> None:
    """LoRA in the last n layers, and no head."""
    stage_b_only.adapt(model, r, rng, LastLayersAgain)
    model.tau_keep = tau_keep


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    change = settings.get("change")
    if change not in CHANGES:
        fail(f"adapter.json of an ingredient: change must be one of {', '.join(CHANGES)}, not {change!r}")

    # a joint head's settings are checked where they are read
    kind = CHANGES[change].model
    if kind is not LastLayersAgain:
        joint_head.attach(model, settings)
        become(model, kind)
        return
    tau_keep = settings.get("tau_keep")
    if type(tau_keep) not in (int, float) or not 0 <= tau_keep <= 1:
        fail(f"adapter.json of an ingredient: tau_keep must be a probability, not {tau_keep!r}")
    adapt_last_layers(model, settings["lora_r"], tau_keep, torch.Generator())


# --- the command line
def adapt(model: Model, args: Namespace) -> None:
    """What learns: a head, or LoRA in the last n layers."""
    kind = CHANGES[args.change].model
    if kind is LastLayersAgain:
        adapt_last_layers(model, args.lora_r, args.tau_keep, generator(args.seed, "lora"))
        return
    joint_head.give_head(model, args)
    become(model, kind)


def choose(args: Namespace) -> Recipe:
    if args.change is None:
        fail(f"--change names the ingredient: one of {', '.join(CHANGES)}")
    joint_head.check(args)
    extension = dict(
        extension="beyond.ingredients", change=args.change, head_layers=args.head_layers, width=args.width,
        tau_keep=args.tau_keep,
    )  # fmt: skip
    return Recipe(CHANGES[args.change].step, adapt, "python -m beyond.ingredients", extension)


def build_parser(doc: str) -> Parser:
    p = joint_head.build_parser(doc)
    add = p.add_argument_group("ingredient (beyond the paper)").add_argument
    add("--change", choices=CHANGES, help="the ingredient, see above")
    return p


def main() -> None:
    train.main(build_parser(__doc__), choose)


if __name__ == "__main__":
    main()
