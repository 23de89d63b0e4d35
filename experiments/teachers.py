"""What could a head of names be taught? Four ways in which the base writes a name from the left, judged.

    python experiments/teachers.py --prompts 512 > results/names/teachers.jsonl

Run from the root of the repository.
"""

import argparse
import itertools
import json
import sys
from argparse import Namespace
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from beyond.chain import from_the_left
from checkpoint import load_model, load_tokenizer
from evaluate import NAMES, draw_names, judge
from lib.output import up_to_eos
from model import Model
from train import Batch


def complete(model: Model, prompt: list[int], args: Namespace) -> list[int]:
    """The prompt and what the teacher writes behind it, block by block, up to the end of the text."""
    cfg = model.cfg
    ids = torch.tensor([prompt])
    while ids.shape[1] < len(prompt) + NAMES.gen_length and cfg.eos_id not in ids:
        # the rest of this block is masks
        room = cfg.block_length - ids.shape[1] % cfg.block_length
        z = torch.nn.functional.pad(ids, (0, room), value=cfg.mask_id)
        masked = z == cfg.mask_id
        everything = torch.ones_like(masked)
        batch = Batch(z, everything, everything, cfg.mask_id, [])
        ids = from_the_left(model, batch, z, masked, args, known={})
    return up_to_eos(ids[0].tolist(), cfg.eos_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=Path("assets/names"), help="the base")
    parser.add_argument("--prompts", type=int, default=512, help="held-out names, the first third of each")
    args = parser.parse_args()

    model = load_model(args.ckpt, torch.device("cpu"), torch.float32)
    tokenizer = load_tokenizer(args.ckpt, model.cfg.tokenizer)
    prompts = draw_names(args.prompts, "held out", tokenizer)
    for read_in, beam in itertools.product(["blocks", "ones"], [1, 4]):
        teacher = Namespace(read_in=read_in, beam=beam)
        asked = tqdm(prompts.values(), desc=f"in {read_in}, beam of {beam}", disable=None)
        written = [tokenizer.decode(complete(model, ids, teacher)) for ids in asked]
        print(json.dumps({"read_in": read_in, "beam": beam} | judge(list(prompts), written)), flush=True)


if __name__ == "__main__":
    main()
