"""The bases of results/pays: models of names with 4 experts of 128, of any depth. `train.py` and two flags more.

The preset has 8 experts of 64 today; the page's models were trained before it had. With --twice the last layer runs a
second time with the same weights: a model that is deeper, and no larger. A file holds both copies, so it is read like
any other checkpoint.

    python -m tools.deeper_base --layers 5 --max_iters 1400 --out_dir out/deep
    python -m tools.deeper_base --layers 5 --twice --max_iters 1400 --out_dir out/twice
"""

from argparse import Namespace
from dataclasses import replace

import torch

import presets
import settings
import train
from data import Parser, bounded
from model import Config, Model
from train import Recipe, stage_a_step


class LastLayerTwice(Model):
    """A model whose last layer is the one before it once more."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        once, again = self.layers[-2:]
        again.norm_1 = once.norm_1
        again.norm_2 = once.norm_2
        again.mlp = once.mlp

        # Attention itself stays: it knows its layer, and so where its keys lie
        again.attn.qkv = once.attn.qkv
        again.attn.proj = once.attn.proj
        again.attn.q_norm = once.attn.q_norm
        again.attn.k_norm = once.attn.k_norm

    def state_dict(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        """With a copy for every layer: a file cannot hold one tensor under two names."""
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


def build_parser() -> Parser:
    p = settings.build_parser(__doc__)
    p.set_defaults(stage_a_only=True, n_last=2, batch_size=256)
    add = p.add_argument_group("geometry").add_argument
    add("--layers", type=bounded(int, 2), default=4, help="how many, n_last of them Stage B's")
    add("--twice", action="store_true", help="the last layer is the one before it once more, the same weights")
    return p


def choose(args: Namespace) -> Recipe:
    """Sets the geometry that train.py builds, for this process."""
    presets.PRESETS["names"] = replace(presets.PRESETS["names"], n_layer=args.layers, n_expert=4, d_expert=128)
    presets.Model = Model
    if args.twice:
        presets.Model = LastLayerTwice
    return Recipe(stage_a_step, command="python -m tools.deeper_base")


def main() -> None:
    train.main(build_parser(), choose)


if __name__ == "__main__":
    main()
