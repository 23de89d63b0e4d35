"""What each ingredient of own_blocks.py is worth: the same training and the same decoder with one of them changed.

    singles     bundles of one token are trained and looked at again, too
    suffixes    masks are random in every block, no block is masked to its end
    marked      Stage B changes every position of the block, not the bundle's alone (a partial forward is whole)
    own         no weights of its own: the last n layers read again from the prefix, LoRA in Stage B alone
    marker      a learned vector is added at the bundle's positions, whose states have a root mean square of 1
    rounds2     the blocks run twice (rounds4: four times), each time on what they left at the bundle

Two more need no change: bundles drawn at random are `python -m beyond.own_blocks --confident_share 0`, and nothing is
refused with `--keep 0` of pays.py.

    python -m beyond.ablation --change suffixes --data names --init_from out/base --n_last 1 --out_dir out/no-suffixes
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from beyond.own_blocks import OwnBlocks, OwnBlocksObjective
from torch import Tensor, nn

import sample
import train
from beyond import own_blocks
from beyond.stage_b_only import StageBOnly, StageBOnlyObjective, adapt
from cache import Cached
from corrupt import Corruption
from data import generator
from model import Context, Model
from sample import Decoding
from train import Losses

# R rows, T positions, B block_length, C channels, n bundle positions

CHANGES = ("singles", "suffixes", "marked", "own", "marker", "rounds2", "rounds4")


class Changed(OwnBlocks):
    """Own blocks with `change`, one of the above that says what is run."""

    change = ""

    def give_blocks(self, width: int, tau_keep: float, rng: torch.Generator) -> None:
        super().give_blocks(width, tau_keep, rng)
        self.rounds = int(self.change.removeprefix("rounds")) if self.change.startswith("rounds") else 1
        self.least = 1 if self.change == "singles" else 2
        if self.change == "marker":
            self.own.register_parameter("marker", nn.Parameter(torch.zeros(self.cfg.n_embd)))

    def second_look(self, h: Tensor, bundle: Tensor) -> Tensor:
        h, where = F.rms_norm(h, h.shape[-1:]), bundle[..., None]
        if self.change == "marker":
            h = h + where * self.own.marker
        if self.change == "marked":
            return super().second_look(h, torch.ones_like(bundle)).view_as(h)[bundle]
        for _ in range(1, self.rounds):
            h = h.masked_scatter(where, super().second_look(h, bundle))
        return super().second_look(h, bundle)

    def step(self, engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        s = super().step(engine, z, prompt, busy, u, d)
        whole = (s["partial"] > 0).float() if self.change == "marked" else s["partial"]
        return s | {"partial": whole * self.rounds}


class Again(StageBOnly):
    """The last n layers again, with LoRA, as the paper's Stage B; bundles and refusal are those of own blocks."""

    change, least, kept = "own", 2, OwnBlocks.kept

    def step(self, engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        s = sample.step(engine, z, prompt, busy, u, d)
        marked = s["bundle"] & (s["bundle"].sum(-1, keepdim=True) >= self.least) & bool(d.n_rounds)
        written = s["bundle"] & ~marked | self.kept(s["conf"], marked)
        after = torch.where(s["bundle"] & ~marked, s["token_a"], torch.where(marked & ~written, z, s["after"]))
        return s | {"after": after, "bundle": written, "partial": marked.any(-1).float()}


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    Ablation.adapt(model, Namespace(**settings, seed=0))


class Ablation(OwnBlocksObjective):
    command = "python -m beyond.ablation"

    def __init__(self, model: Model, *given):
        super().__init__(model, *given)
        self.extension |= {"extension": "beyond.ablation", "change": self.args.change}
        if self.args.change == "suffixes":
            self.corruption = Corruption(**vars(self.corruption))

    @staticmethod
    def adapt(model: Model, args: Namespace) -> None:
        if args.change == "own":
            adapt(model, args.lora_r, generator(args.seed, "lora"), Again)
            model.tau_keep = args.tau_keep
        else:
            model.__class__, model.change = Changed, args.change
            model.give_blocks(args.width, args.tau_keep, generator(args.seed, "own blocks"))

    def stages(self, x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, target: Tensor, ctx: Context) -> Losses:
        kept = StageBOnlyObjective if self.args.change == "own" else OwnBlocksObjective
        return kept.stages(self, x, z, kind, bundle, target, ctx)


def settle(args: Namespace) -> type[Ablation]:
    own_blocks.settle(args)
    return Ablation


def main() -> None:
    p = own_blocks.build_parser(__doc__)
    p.add_argument("--change", choices=CHANGES, required=True, help="the ingredient, see above")
    train.main(p, settle)


if __name__ == "__main__":
    main()
