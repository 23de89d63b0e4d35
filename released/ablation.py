"""The rows of the paper's Table 2, and that table on a toy, where every answer is known.

A row says whose weights decode, which masks make up the bundle, whose logits fill and edit, and whether Stage B sees a
marker. For the benchmarks run.py takes a row by its name. On a toy, from a base of `train.py --data TOY --stage_a_only
--out_dir out/base` and an adapter of `train.py --data TOY --init_from out/base --out_dir out/adapter`:

    python -m released.ablation --ckpt out/adapter      # each row beside the paper's figures for GSM8K
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cache import Cached
from checkpoint import base_of, load_model
from evaluate import load_task, print_table, quality
from lib.util import Parser, command, first_masked, pick_device
from sample import Decoding, Look, StageA, candidates, select_bundle, stage_b_look

# R rows in flight, B block_length, V vocabulary


# --- what a row may have in the place of the paper's method
def least_entropic(p: Tensor, masked: Tensor) -> Tensor:
    """As many masks as confidence above 0.7 would take, but those of the least entropy. p (R, B, V), masked (R, B) bool
    -> (R, B) bool."""
    bundle = select_bundle(p.amax(-1), masked, 0.7, 1, "surest")
    entropy = torch.special.entr(p).sum(-1)
    return first_masked(entropy, masked, bundle.sum(-1, keepdim=True), masked.shape[1])


def mixed(fill_from: str, edit_from: str, engine: Cached, a: StageA, bundle: Tensor) -> Look:
    """Masks are written from one stage ("A" or "B"), and edits come from one."""
    b = stage_b_look(engine, a, bundle)
    stages = {"A": a, "B": b}
    fill = stages[fill_from]
    edit = stages[edit_from]
    token = torch.where(bundle, fill.token, edit.token)
    conf = torch.where(bundle, fill.conf, edit.conf)
    return replace(b, token=token, conf=conf)


def unmarked(engine: Cached, a: StageA, bundle: Tensor) -> Look:
    """Stage B, but the layers run again without the marker."""
    b = stage_b_look(engine, a, bundle)
    logits = engine.model.head(engine.stage_b(a.h, torch.zeros_like(bundle)))
    token, conf = candidates(logits, a.u, a.d)
    coordinated = bundle.any(-1, keepdim=True)
    return replace(b, token=torch.where(coordinated, token, a.token), conf=torch.where(coordinated, conf, a.conf))


# --- Table 2
BASE = "released, factorised"
COCOMMIT = "Stage B, ungated edits (default)"
Q = dict(tau_m2t=0.7, tau_t2t=0.5)  # the released quality setting
OFF = dict(n_rounds=0)

# by a row's name: whose weights, what differs from Q with Stage B, the paper's accuracy and full forwards per token
MECHANISM = {
    BASE: ("base", OFF, 89.61, 0.26),
    "adapter, Stage B off": ("adapter", OFF, 90.75, 0.28),
    "Stage B, gated edits": ("adapter", {}, 91.13, 0.28),
    COCOMMIT: ("adapter", dict(tau_t2t=0.0), 91.13, 0.34),
    "B fills, A edits": ("adapter", dict(look=partial(mixed, "B", "A")), 90.90, 0.27),
    "A fills, B edits": ("adapter", dict(look=partial(mixed, "A", "B")), 90.90, 0.30),
    "B fills, edits off": ("adapter", dict(tau_t2t=None), 88.40, 0.30),
    "Stage B without marker": ("adapter", dict(look=unmarked), 90.37, 0.28),
    "entropy selection, same size": ("adapter", dict(select=least_entropic), 90.30, 0.27),
    "Stage B, tau_m2t 0.5": ("adapter", dict(tau_m2t=0.5), 88.40, 0.24),
    "Stage B, tau_m2t 0.3": ("adapter", dict(tau_m2t=0.3), 84.00, 0.22),
    "adapter, Stage B off, tau_m2t 0.5": ("adapter", OFF | dict(tau_m2t=0.5), 88.48, 0.23),
    "adapter, Stage B off, tau_m2t 0.3": ("adapter", OFF | dict(tau_m2t=0.3), 83.70, 0.22),
    "released, tau_m2t 0.5": ("base", OFF | dict(tau_m2t=0.5), 86.73, 0.26),
    "released, tau_m2t 0.3": ("base", OFF | dict(tau_m2t=0.3), 79.15, 0.30),
    "released, both gates removed": ("base", OFF | dict(tau_m2t=0.0, tau_t2t=0.0), 83.40, 0.15),
    "all masks at once": ("adapter", dict(tau_m2t=-1.0, tau_t2t=0.0), 79.91, 0.10),
}


def decoding_of(row: str, n_rounds: int) -> Decoding:
    """The decoder of a row, for a model of so many rounds."""
    _, changes, *_ = MECHANISM[row]
    return Decoding(**Q | dict(n_rounds=n_rounds) | changes)


# --- the table on a toy
FIGURES = ("coherent", "mode", "full/token", "partial/token")


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ckpt", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()
    task = load_task(args.ckpt)
    load = partial(load_model, device=pick_device(args.device), dtype=torch.float32)
    models = {"adapter": load(args.ckpt), "base": load(base_of(args.ckpt))}

    rows = []
    for name, (weights, _, accuracy, nfe) in MECHANISM.items():
        d = decoding_of(name, models["adapter"].cfg.n_rounds)
        found = quality(models[weights], task, d)
        figures = [f"{found[k]:.3f}" for k in FIGURES]
        rows.append([name, *figures, f"{accuracy:.2f}", f"{nfe:.2f}"])
    print_table(["variant", *FIGURES, "paper", "NFE"], rows)


if __name__ == "__main__":
    main()
