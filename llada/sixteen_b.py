"""The whole released geometry with random weights: 20 layers, 256 experts, 157,184 tokens, on this machine.

Random weights give no useful answers. But they have as many bytes as trained ones, need as much memory and run the same
code, so they show what the released model needs. experiments/sixteen_b.sh has all the commands.

    python -m llada.sixteen_b write --out weights/released      # 32.5 GB in the released layout, a layer at a time
    python -m llada.sixteen_b check --ckpt weights/ours         # after convert_weights.py: every number in its place
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import PRESETS, read_config
from convert_weights import Plan, plan, survey, write_checkpoint
from lib.tokenizer import byte_spec
from lib.util import Parser, bounded, command, fail, generator, printable, progress, write_json
from llada.export import released_config


def random_tensor(name: str, shape: list[int]) -> Tensor:
    """A tensor that depends only on its released name. Norms are ones and router biases are zeros. The numbers of a
    matrix are normal, and scaled so that a product keeps its size."""
    if name.endswith("expert_bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    numbers = torch.empty(shape, dtype=torch.bfloat16)
    return numbers.normal_(0.0, shape[-1] ** -0.5, generator=generator("sixteen_b", name))


def random_shard(shard: list[Plan]) -> dict[str, Tensor]:
    return {name: random_tensor(name, planned.part) for planned in shard for name in planned.released}


def write(out: Path, layers: int) -> None:
    """Write the released layout, with a file for each layer, and a tokenizer of bytes, which has tokens for 258 of the
    157,184 ids."""
    cfg = replace(PRESETS["llada2.1-mini"], n_layer=layers, n_last=min(3, layers))
    config = released_config(cfg) | {"pad_token_id": 256}  # eos in that tokenizer
    files = {
        "tokenizer.json": partial(write_json, value=byte_spec()),
        "config.json": partial(write_json, value=config),
    }
    write_checkpoint(out, [partial(random_shard, shard) for shard in plan(cfg)], files)


def check(ckpt: Path) -> None:
    """Compare a converted folder with what `write` drew, tensor by tensor."""
    found = survey(ckpt)
    n = 0
    for planned in progress(sum(plan(read_config(ckpt)), []), "check"):
        parts = found.pop(planned.name).view(-1, *planned.part)
        for name, ours in zip(planned.released, parts, strict=True):
            if not torch.equal(ours, random_tensor(name, planned.part)):
                fail(f"{ckpt}: {planned.name} does not hold what was written as {name}")
        n += len(parts)
    print(f"{printable(ckpt)}: {n:,} released tensors are in their places, bit for bit")


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("job", choices=["write", "check"], help="what to do, see above")
    group = parser.add_argument_group("write")
    group.add_argument("--layers", type=bounded(int, 2), default=20, help="the number of layers, each of full size")
    group.add_argument("--out", type=Path, default=Path("weights/released"), help="a new or empty folder")
    group = parser.add_argument_group("check")
    group.add_argument("--ckpt", type=Path, default=Path("weights/ours"), help="the converted folder")
    args = parser.parse_args()

    if args.job == "write":
        write(args.out, args.layers)
    else:
        check(args.ckpt)


if __name__ == "__main__":
    main()
