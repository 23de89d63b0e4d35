"""Weights in int8: the released 16 B parameters take 16.6 GB, for a 24 GB GPU or a laptop with 32 GB.

    # sample.py and released.harness take it as their --ckpt
    python -m released.int8 --src weights/llada2.1-mini --out weights/mini-int8

Every matrix (MLPs, attention, output layer) is stored as lib/int8.py describes; all else stays as it is.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import base_of, check_fit, read_config, save_tensors, stored
from config import Config
from convert_weights import TEXT, copies, plan, survey, write_checkpoint
from lib.int8 import KERNEL_WIDTH, quantise, use_int8
from lib.util import Parser, command, fail, write_json
from model import Model


def int8_tensors(found: dict[str, Tensor], names: list[str], matrices: set[str]) -> dict[str, Tensor]:
    """The tensors of a shard: matrices become integers and scales, and all others stay as they are."""
    tensors = {}
    for name in names:
        tensors[name] = found.pop(name)
        if name in matrices:
            tensors[name], tensors[f"{name}_scale"] = quantise(tensors[name])
    return tensors


def save_aligned(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file whose data begin at a multiple of 16 bytes, as the kernel needs it."""
    # a header ends at a multiple of 8; if that is not one of 16, it gets 8 bytes more
    for padding in ("", " " * 8):
        save_tensors(path, tensors, {"padding": padding})
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if (8 + header) % KERNEL_WIDTH == 0:
            break


def convert(src: Path, out: Path) -> None:
    if base_of(src) != src:
        fail(f"{src} is an adapter, which stays in float32: convert its base, {base_of(src)}")
    cfg = read_config(src)
    if cfg.stage_b != Config.stage_b:
        fail(f"{src}: its Stage B is not the paper's, and int8 has no place for it")
    found = survey(src)
    shards = [[planned.name for planned in shard] for shard in plan(cfg)]
    if "markers" in found:
        shards[0].append("markers")

    # the matrices are the tensors that use_int8 makes integers
    model = Model(cfg)
    expected = stored(model)
    check_fit(src, found, {name: expected[name] for name in sum(shards, [])}, "the checkpoint is incomplete")
    use_int8(model)
    matrices = {name for name, tensor in stored(model).items() if tensor.dtype == torch.int8}

    files = copies(src, *TEXT, "meta.json", "released_config.json")
    files["config.json"] = partial(write_json, value=asdict(cfg) | {"int8": True})
    write_checkpoint(out, [partial(int8_tensors, found, names, matrices) for names in shards], files, save_aligned)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--src", type=Path, required=True, help="a model's folder")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder, or an incomplete one")
    args = parser.parse_args()
    convert(args.src, args.out)


if __name__ == "__main__":
    main()
