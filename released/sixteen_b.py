"""The whole released geometry with random weights: 20 layers, 256 experts, 157,184 tokens, on the machine at hand.

Random weights say nothing about answers. They read as many bytes, take as much memory and pass through the same code as
trained ones, so they show what the released model needs. experiments/sixteen_b.sh is the whole run.

    python -m released.sixteen_b write --out weights/released      # 32.5 GB in the released layout, a layer at a time
    python -m released.sixteen_b prices --ckpt out/head            # seconds of a forward, of Stage B, of a look
"""

import json
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cache import Cached
from checkpoint import load_model
from convert_weights import Plan, plan, write_checkpoint
from lib.config import DTYPES, PRESETS
from lib.tokenizer import learn_bpe
from lib.util import Parser, bounded, command, generator, interleaved, pick_device, write_json
from model import Model
from released.export import released_config

TURNS = 9  # of which the median is taken


# --- a random checkpoint
def random_tensor(name: str, shape: list[int]) -> Tensor:
    """A function of its name. Norms are ones, router biases zeros; a matrix is normal, of a size that keeps a sum over
    a row at 1."""
    if name.endswith("expert_bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    numbers = torch.empty(shape, dtype=torch.bfloat16)
    return numbers.normal_(0.0, shape[-1] ** -0.5, generator=generator("sixteen_b", name))


def random_shard(shard: list[Plan]) -> dict[str, Tensor]:
    return {name: random_tensor(name, planned.part) for planned in shard for name in planned.released}


def write(out: Path, layers: int) -> None:
    """The released layout, a file a layer, with a tokenizer of bytes: 258 of the 157,184 tokens have a text."""
    cfg = replace(PRESETS["llada2.1-mini"], n_layer=layers, n_last=min(3, layers))
    config = released_config(cfg) | {"pad_token_id": 256}  # the end of a text, in that tokenizer
    files = {
        "tokenizer.json": partial(write_json, value=learn_bpe([], 258)),
        "config.json": partial(write_json, value=config),
    }
    write_checkpoint(out, [partial(random_shard, shard) for shard in plan(cfg)], files)


# --- time
@torch.inference_mode()
def forwards(model: Model) -> dict[str, float]:
    """Median seconds of each forward of a block that is half masks, behind a block of context; they take turns."""
    cfg = model.cfg
    device = model.wte.weight.device
    ordinary = max(1, cfg.vocab_size - 512)  # without what is special at the end of the vocabulary
    z = torch.randint(ordinary, (1, cfg.block_length), generator=generator("sixteen_b", "block")).to(device)
    engine = Cached(model, z.tolist(), 1)
    masked = torch.arange(cfg.block_length, device=device)[None] >= cfg.block_length // 2
    z = z.masked_fill(masked, cfg.mask_id)
    h, states = engine.stage_a(z)

    # nobody reads the logits of a commit; a head makes them of the masks, the others of the block
    sides = {
        "full": lambda: model.head(engine.stage_a(z)[1]),
        "commit": lambda: engine.stage_a(z),
        "stage_b": lambda: model.head(engine.stage_b(h, masked)),
    }
    if model.second_look is not None:
        sides["head"] = lambda: model.second_look(model, states, z, masked)

    def clock() -> float:
        # a GPU works on after the call
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    seconds = interleaved(*sides.values(), repeats=TURNS, clock=clock)
    return dict(zip(sides, seconds, strict=True))


def prices(args: Namespace) -> None:
    device = pick_device(args.device)
    model = load_model(args.ckpt, device, DTYPES[args.dtype])
    cfg = model.cfg
    what = f"{cfg.n_layer} layers, blocks of {cfg.block_length}, n = {cfg.n_last}"
    print(f"{args.ckpt}: {what}; {torch.get_num_threads()} threads, {device}, {args.dtype}")
    print(json.dumps({name: round(taken, 4) for name, taken in forwards(model).items()}))


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("job", choices=["write", "prices"], help="see above")
    group = parser.add_argument_group("write")
    group.add_argument("--layers", type=bounded(int, 2), default=20, help="of 20; each is of full size")
    group.add_argument("--out", type=Path, default=Path("weights/released"), help="new or empty folder")
    group = parser.add_argument_group("prices")
    group.add_argument("--ckpt", type=Path, default=Path("weights/int8"), help="a model's folder, or an adapter's")
    group.add_argument("--device", default="cpu", help="auto (cuda, then mps, then cpu), or one by name")
    group.add_argument("--dtype", choices=DTYPES, default="bf16", help="of activations")
    args = parser.parse_args()

    if args.job == "write":
        write(args.out, args.layers)
    else:
        prices(args)


if __name__ == "__main__":
    main()
