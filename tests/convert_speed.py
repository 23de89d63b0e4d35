"""Memory and time of a conversion: a synthetic checkpoint of the released layout, fewer layers, each of full size.

It prints the converter's peak memory beside the largest shard, and its time beside that of a plain `cp`.

    python tests/convert_speed.py               # a tenth of LLaDA2.1-mini: 10 GB of disk for a minute
    python tests/convert_speed.py --scale 0.2
"""

import argparse
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from convert_weights import (  # noqa: E402
    CHUNK,
    DTYPES,
    Shards,
    Stored,
    Target,
    checkpoint_files,
    plan,
    released_config,
    write_folder,
)
from data import generator, write_json  # noqa: E402
from model import PRESETS  # noqa: E402


def measure(scale: float) -> None:
    """Convert a synthetic released checkpoint of about `scale` of LLaDA2.1-mini (fewer layers, each of full size)."""
    preset = PRESETS["llada2.1-mini"]
    cfg = replace(preset, n_layer=max(2, round(scale * preset.n_layer)), n_last=1)
    with tempfile.TemporaryDirectory(prefix="cocommit-bench-") as folder:
        noise, src, out, copy = (Path(folder) / name for name in ("noise", "released", "ours", "copy"))
        rng = generator("convert speed")
        noise.write_bytes(torch.randint(256, (CHUNK,), dtype=torch.uint8, generator=rng).numpy().tobytes())
        shards: Shards = [{} for _ in range(cfg.n_layer + 2)]
        for shard, name, _, released, part in plan(cfg):
            dtype = "F32" if name.endswith("expert_bias") else "BF16"
            size = math.prod(part) * DTYPES[dtype].itemsize
            pieces = [Stored(noise, name, dtype, part, 0, min(left, CHUNK)) for left in range(size, 0, -CHUNK)]
            shards[shard] |= {r: Target(dtype, part, pieces) for r in released}
        files = checkpoint_files(shards, src)
        files["config.json"] = partial(write_json, value=released_config(cfg))
        write_folder(src, files, 3 * sum(t.size for tensors in shards for t in tensors.values()))
        command = [sys.executable, ROOT / "convert_weights.py", "--src", src, "--out", out]
        command += ["--eos_id", "1", "--mask_id", "2"]
        best = {}
        for target, step in [(copy, ["cp", "-r", src, copy]), (out, command)] * 2:
            shutil.rmtree(target, ignore_errors=True)
            os.sync()  # so that no step pays for what was written before it
            start = time.perf_counter()
            subprocess.run(step, check=True)
            best[target] = min(time.perf_counter() - start, best.get(target, math.inf))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        largest = max(path.stat().st_size for path in out.iterdir())
    print(f"peak memory {peak / 1e9:.2f} GB = {peak / largest:.2f} x the largest output shard (bound: 1.5)")
    print(f"convert {best[out]:.1f} s, cp {best[copy]:.1f} s, each the better of two: {best[out] / best[copy]:.2f} x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.1, help="part of the released size, in (0, 1]")
    scale = parser.parse_args().scale
    if not 0 < scale <= 1:
        parser.error("--scale is in (0, 1]")
    measure(scale)
