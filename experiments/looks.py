"""How many looks causal Stage B takes, by the length of the bundle that it writes whole.

python -m experiments.looks assets/names/causal
"""

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint import load_model
from evaluate import NAMES, draw_names
from lib.tokenizer import load_tokenizer
from lib.util import command
from sample import generate


@command
def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    model = load_model(folder, "cpu", torch.float32)
    tokenizer = load_tokenizer(Path("data/names"))
    looks = defaultdict(list)

    def on_step(rows, done):
        for length, n in zip((done.z == model.cfg.mask_id).sum(-1).tolist(), done.partial.tolist(), strict=True):
            looks[length].append(n)

    prompts = list(draw_names(512, "held out", tokenizer).values())
    generate(model, prompts, replace(NAMES, tau_joint=0.0, tau_t2t=None), on_step=on_step)
    print("bundle  looks, mean  most  bundles")
    for length, counts in sorted(looks.items()):
        print(f"{length:6}  {sum(counts) / len(counts):11.2f}  {max(counts):4.0f}  {len(counts):7}")


if __name__ == "__main__":
    main()
