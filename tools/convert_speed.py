"""Memory and time of a conversion: a synthetic checkpoint of the released layout, fewer layers, each of full size.

It prints the converter's peak memory beside the largest shard, and its time beside that of a plain `cp`.

    python -m tools.convert_speed               # a tenth of LLaDA2.1-mini: 10 GB of disk for a minute
    python -m tools.convert_speed --scale 0.2
"""

import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import PRESETS
from convert_weights import Target, checkpoint_files, plan, write_folder
from lib.tokenizer import learn_bpe
from lib.util import Parser, write_json
from model import Config
from released.export import released_config

NOISE = torch.randint(256, (1 << 20,), dtype=torch.uint8)


class Noise(Target):
    """A tensor of random bytes, made in small parts: a process starts with the peak memory of the one that started it,
    so this one must stay small for the converter's to be seen."""

    def parts(self) -> Iterator[Tensor]:
        for left in range(self.size, 0, -len(NOISE)):
            yield NOISE[:left]


def write_released(folder: Path, cfg: Config) -> None:
    """Noise in the released layout, one file a layer, by the converter's own writer."""
    shards: list[dict[str, Target]] = [{} for _ in range(cfg.n_layer + 2)]
    for shard, name, _, released, part in plan(cfg):
        dtype = "F32" if name.endswith("expert_bias") else "BF16"
        shards[shard] |= {r: Noise(dtype, part, []) for r in released}
    files = checkpoint_files(shards, folder) | {"tokenizer.json": partial(write_json, value=learn_bpe([], 258))}
    files["config.json"] = partial(write_json, value=released_config(cfg))
    write_folder(folder, files, 3 * sum(t.size for tensors in shards for t in tensors.values()))


def measure(scale: float) -> None:
    """Convert a synthetic released checkpoint of about `scale` of LLaDA2.1-mini (fewer layers, each of full size)."""
    preset = PRESETS["llada2.1-mini"]
    cfg = replace(preset, n_layer=max(2, round(scale * preset.n_layer)), n_last=1)
    with tempfile.TemporaryDirectory(prefix="cocommit-") as folder:
        src, out, copy = (Path(folder) / name for name in ("released", "ours", "copy"))
        write_released(src, cfg)
        command = [sys.executable, "convert_weights.py", "--src", src, "--out", out]
        best = {}
        for target, step in [(copy, ["cp", "-r", src, copy]), (out, command)] * 2:
            shutil.rmtree(target, ignore_errors=True)
            os.sync()  # so that no step pays for what was written before it
            start = time.perf_counter()
            subprocess.run(step, check=True)
            best[target] = min(time.perf_counter() - start, best.get(target, math.inf))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        largest = max(path.stat().st_size for path in out.iterdir())
    print(f"peak memory {peak / 1e9:.2f} GB = {peak / largest:.2f} x the largest output shard")
    print(f"convert {best[out]:.1f} s, cp {best[copy]:.1f} s, each the better of two: {best[out] / best[copy]:.2f} x")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--scale", type=float, default=0.1, help="part of the released size, in (0, 1]")
    scale = parser.parse_args().scale
    if not 0 < scale <= 1:
        parser.error("--scale is in (0, 1]")
    measure(scale)


if __name__ == "__main__":
    main()
