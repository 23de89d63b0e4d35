"""The control of causal Stage B: the same layers, rows and steps, but a position is not shown the token before. It
attends to the whole bundle, which is masks to it, and not only to the bundle on its left.

It is trained as train.py trains, with train.py's flags:

    python -m experiments.control --config configs/text.toml --data data/shakespeare --out_dir out/control
"""

import sys
from dataclasses import replace

import torch
from torch import Tensor

import train
from cache import Cached, Uncached
from causal import CausalModel, bundle_mask, causal_denoise
from checkpoint import STAGE_B
from decoding import Decoding, Step
from lib.util import command
from model import Context


class Control(CausalModel):
    """It sees the whole bundle, and is shown no token."""

    def sees(self, bundle: Tensor, ctx: Context) -> Tensor:
        return bundle_mask(torch.zeros_like(bundle), ctx)

    def note(self, bundle: Tensor, ctx: Context, tokens: Tensor, before_block: Tensor | None) -> Tensor:
        return self.markers[0]  # (C,): the same at every position


def control_denoise(engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """causal_denoise, with one look counted: the tokens do not depend on drafts, so another look finds the same."""
    done = causal_denoise(engine, z, given, u, d)
    return replace(done, partial=done.partial.clamp(max=1))


Control.decoding_step = staticmethod(control_denoise)
STAGE_B["control"] = Control


@command
def main() -> None:
    # argv[0] is for the printed command to go on; the last flag wins over a config's stage_b
    sys.argv = ["-m experiments.control", *sys.argv[1:], "--stage_b", "control"]
    train.run(train.read_arguments(train.build_parser(__doc__)))


if __name__ == "__main__":
    main()
