"""The paper's marker, tested on names: Stage B on, off, and with its marker at the wrong positions.

Adapters are trained by train.py's own step, at two rates, with the paper's marker, and with one that is scaled by
rms(h), the size of the states to which it is added. Then Stage A and Stage B are compared at the same positions, and as
decoders. "Elsewhere" means at all other masks in the first comparison, and at all other positions of the block in the
second. Each training appends one record, and a training whose record is there already is not done again.

    python -m experiments.marker --base assets/names --seed 1 --out out/marker
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import train
from cache import Cached
from checkpoint import STAGE_B, load_model
from corrupt import M, draw_bundle
from decoding import Decoding, Step
from evaluate import NAME_DECODING, complete, names_tokenizer
from lib.names import draw_names
from lib.rows import read_corpus
from lib.util import Parser, append_line, command, pick_device, read_lines
from model import Context, Model
from sample import denoise

N = 256  # how many names are completed
SETTINGS = {"300 steps": [300, 3e-4], "faster": [300, 3e-3]}  # steps and learning rate: the default, and ten times it


class ScaledModel(Model):
    """The paper's model with a marker in units of the states' size: h + 1_S * rms(h) * marker."""

    def coordinate(self, h: Tensor, bundle: Tensor, ctx: Context, n_rounds: int) -> Tensor:
        marked = F.pad(bundle, (0, h.shape[1] - bundle.shape[1]), value=False)[..., None]
        for i in range(n_rounds):
            size = h.float().square().mean(-1, keepdim=True).sqrt()
            h = h + marked * (size * self.markers[i]).to(h.dtype)
            h = self.last_n(h, replace(ctx, i_round=i))
        return h


# --- at the same positions of held-out rows
@torch.no_grad()
def compare_stages(model: Model, args: Namespace) -> dict[str, float]:
    """On the bundles of held-out rows: the cross-entropy in nats of Stage A, of Stage B, and of Stage B with the marker
    at all other masks; the largest change of a probability, and the share of argmaxes that change; and the rms of the
    states and of the marker."""
    corpus = read_corpus(Path(args.data), args.seq_len, args.seed, args.block_length, args.batch_size)
    nats = {"nats_A": [], "nats_B": [], "nats_elsewhere": []}
    moved = []
    argmax = []
    sizes = []
    for batch in train.micro_batches(corpus, "val", 0, 256, model, args):
        z, kind = train.corrupt_batch(model, batch, args)
        masked = kind == M
        bundle = draw_bundle(masked, train.S_MIN, args.s_max, batch.draws)
        ctx = train.batch_context(model, batch, args)
        h = model.prefix(z, ctx)
        target = batch.clean[bundle]
        stage_a = model.logits(model.last_n(h, ctx)[bundle])
        stage_b = model.logits(model.coordinate(h, bundle, ctx, 1)[bundle])
        elsewhere = model.logits(model.coordinate(h, masked & ~bundle, ctx, 1)[bundle])
        for name, logits in zip(nats, (stage_a, stage_b, elsewhere), strict=True):
            nats[name] += F.cross_entropy(logits, target, reduction="none").tolist()
        moved.append(float((stage_a.softmax(-1) - stage_b.softmax(-1)).abs().max()))
        argmax += (stage_a.argmax(-1) != stage_b.argmax(-1)).tolist()
        sizes.append(float(h.float().square().mean().sqrt()))
    found = {name: sum(values) / len(values) for name, values in nats.items()}
    size = sum(sizes) / len(sizes)
    marker = float(model.markers.square().mean().sqrt())
    return found | dict(moved=max(moved), argmaxes=sum(argmax) / len(argmax), states=size, marker=marker)


# --- as decoders
class Elsewhere:
    """An engine whose Stage B marks all positions of the block except the bundle."""

    def __init__(self, engine: Cached):
        self.engine = engine
        self.model = engine.model
        self.stage_a = engine.stage_a

    def stage_b(self, h: Tensor, bundle: Tensor) -> Tensor:
        return self.engine.stage_b(h, ~bundle)


def elsewhere(engine: Cached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """The paper's step with the marker at the wrong positions."""
    return denoise(Elsewhere(engine), z, given, u, d)


def compare_texts(model: Model, base: Path) -> dict[str, object]:
    """The share of completed names that exist with Stage B on, off, and with its marker elsewhere, and how many texts
    differ from those with Stage B off: at the paper's gates, and with all masks at once."""
    tokenizer = names_tokenizer(base)
    prompts = draw_names(N, "held out", tokenizer)
    found = {}
    for name, d in (("gates", NAME_DECODING), ("at_once", replace(NAME_DECODING, tau_m2t=-1.0, tau_t2t=None))):
        ways: dict[str, tuple[Decoding, Callable | None]] = {
            "off": (replace(d, n_rounds=0), None),
            "on": (d, None),
            "elsewhere": (d, elsewhere),
        }
        written = {}
        for way, (how, step) in ways.items():
            done = complete(model, tokenizer, prompts, how, step)
            written[way] = done["written"]
            found[f"{name}_{way}"] = done["exist"]
            differ = sum(a != b for a, b in zip(written[way], written["off"], strict=True))
            found[f"{name}_{way}_differ"] = differ
    return found


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a model of names")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kind", choices=["paper", "scaled"], nargs="+", default=["paper", "scaled"])
    parser.add_argument("--setting", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--out", type=Path, required=True, help="a folder for the adapters and marker.jsonl")
    given = parser.parse_args()
    sys.argv[0] = "-m experiments.marker"  # evaluate.py does not know the scaled marker, so no run may name it

    STAGE_B["scaled"] = ScaledModel
    path = given.out / "marker.jsonl"
    there = read_lines(path, {}) if path.exists() else []
    for kind in given.kind:
        for setting in given.setting:
            record = dict(kind=kind, setting=setting, seed=given.seed)
            if any(record.items() <= other.items() for other in there):
                continue
            steps, rate = SETTINGS[setting]
            folder = given.out / f"{kind}-{setting.replace(' ', '_')}-{given.seed}"
            flags = train.build_parser().parse_args([
                "--init_from", str(given.base), "--seed", str(given.seed), "--stage_b", kind, "--n_last", "3",
                "--max_iters", str(steps), "--learning_rate", str(rate), "--out_dir", str(folder),
            ])  # fmt: skip
            flags.resume = (folder / "train.json").exists()  # goes on after an interruption
            train.settle(flags)
            train.run(flags)

            model = load_model(folder, pick_device("auto"), torch.float32)
            record |= compare_stages(model, flags) | compare_texts(model, given.base)
            append_line(path, record)
            print(json.dumps(record))


if __name__ == "__main__":
    main()
