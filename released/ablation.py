"""The switches of the paper's Table 2, and that table on a toy, where every answer is known.

A switch says which masks make up the bundle, whose logits fill and edit, and whether Stage B sees a marker. For the
benchmarks run.py takes a row by its name. On a toy, from a base of `train.py --data TOY --stage_a_only --out_dir
out/base` and an adapter of `train.py --data TOY --init_from out/base --out_dir out/adapter`:

    python -m released.ablation --ckpt out/adapter      # each row beside the paper's figures for GSM8K
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cache import Cached
from checkpoint import base_of, load_model
from evaluate import load_task, print_table, quality
from lib.util import Parser, command, first_masked, pick_device
from sample import Decoding, Look, StageA, candidates, look_again, select_bundle

# R rows in flight, B block_length, V vocabulary


# ---------------------------------------------------------------------------------------------------------------------
# the switches


@dataclass(frozen=True)
class Switches:
    """As they stand here, the paper's method. (All masks at once: tau_m2t -1; no Stage B: n_rounds 0.)"""

    select: str = "confidence"  # or "entropy": as many positions as confidence would take, but the least entropic ones
    fill_from: str = "B"  # which stage's logits write masks, and which write edits
    edit_from: str = "B"
    marker: bool = True  # False: Stage B runs the layers again without the marker


def switched(d: Decoding, s: Switches) -> Decoding:
    """The same decoder with these switches set."""
    if s.select == "entropy":
        d = replace(d, select=partial(least_entropic, d))
    if d.n_rounds > 0 and s != Switches(select=s.select):
        d = replace(d, look=partial(switched_look, s))
    return d


def plain(d: Decoding, s: Switches) -> dict:
    """Both in plain values, as a run file has them."""
    values = {f.name: getattr(d, f.name) for f in fields(d) if f.name not in ("select", "look")}
    return values | asdict(s)


def least_entropic(d: Decoding, p: Tensor, masked: Tensor) -> Tensor:
    """As many masks as confidence would take, but those of the least entropy. p (R, B, V), masked (R, B) -> (R, B)."""
    bundle = select_bundle(p.amax(-1), masked, d.tau_m2t, d.num_to_transfer, "surest")
    entropy = torch.special.entr(p).sum(-1)
    return first_masked(entropy, masked, bundle.sum(-1, keepdim=True), masked.shape[1])


def switched_look(s: Switches, engine: Cached, a: StageA, bundle: Tensor) -> Look:
    """Stage B with or without its marker, and what is taken from which stage."""
    any_bundle = bool(bundle.any())
    b = look_again(engine, replace(a, d=replace(a.d, look=None)), bundle, any_bundle)
    if any_bundle and not s.marker:
        token, conf = candidates(engine.model.head(engine.stage_b(a.h, torch.zeros_like(bundle))), a.u, a.d)
        coordinated = bundle.any(-1, keepdim=True)
        b = replace(b, token=torch.where(coordinated, token, a.token), conf=torch.where(coordinated, conf, a.conf))

    stages = {"A": a, "B": b}
    fill = stages[s.fill_from]
    edit = stages[s.edit_from]
    token = torch.where(bundle, fill.token, edit.token)
    conf = torch.where(bundle, fill.conf, edit.conf)
    return replace(b, token=token, conf=conf)


# ---------------------------------------------------------------------------------------------------------------------
# Table 2, by the names of its rows: whose weights, what differs from the released Q settings with Stage B, the paper's
# accuracy and full forwards per token

Q = dict(tau_m2t=0.7, tau_t2t=0.5)
BASE = "released, factorised"
COCOMMIT = "Stage B, ungated edits (default)"
MECHANISM = {
    BASE: ("base", dict(n_rounds=0), 89.61, 0.26),
    "adapter, Stage B off": ("adapter", dict(n_rounds=0), 90.75, 0.28),
    "Stage B, gated edits": ("adapter", {}, 91.13, 0.28),
    COCOMMIT: ("adapter", dict(tau_t2t=0.0), 91.13, 0.34),
    "B fills, A edits": ("adapter", dict(edit_from="A"), 90.90, 0.27),
    "A fills, B edits": ("adapter", dict(fill_from="A"), 90.90, 0.30),
    "B fills, edits off": ("adapter", dict(tau_t2t=None), 88.40, 0.30),
    "Stage B without marker": ("adapter", dict(marker=False), 90.37, 0.28),
    "entropy selection, same size": ("adapter", dict(select="entropy"), 90.30, 0.27),
    "Stage B, tau_m2t 0.5": ("adapter", dict(tau_m2t=0.5), 88.40, 0.24),
    "Stage B, tau_m2t 0.3": ("adapter", dict(tau_m2t=0.3), 84.00, 0.22),
    "adapter, Stage B off, tau_m2t 0.5": ("adapter", dict(tau_m2t=0.5, n_rounds=0), 88.48, 0.23),
    "adapter, Stage B off, tau_m2t 0.3": ("adapter", dict(tau_m2t=0.3, n_rounds=0), 83.70, 0.22),
    "released, tau_m2t 0.5": ("base", dict(tau_m2t=0.5, n_rounds=0), 86.73, 0.26),
    "released, tau_m2t 0.3": ("base", dict(tau_m2t=0.3, n_rounds=0), 79.15, 0.30),
    "released, both gates removed": ("base", dict(tau_m2t=0.0, tau_t2t=0.0, n_rounds=0), 83.40, 0.15),
    "all masks at once": ("adapter", dict(tau_m2t=-1.0, tau_t2t=0.0), 79.91, 0.10),
}


def variant(changes: dict, n_rounds: int) -> tuple[Decoding, Switches]:
    """The decoder of a row of Table 2."""
    switches = {f.name: changes[f.name] for f in fields(Switches) if f.name in changes}
    plain = {name: value for name, value in changes.items() if name not in switches}
    return Decoding(**Q | {"n_rounds": n_rounds} | plain), Switches(**switches)


# ---------------------------------------------------------------------------------------------------------------------
# the table on a toy


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}"


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
    for name, (weights, changes, accuracy, nfe) in MECHANISM.items():
        d, switches = variant(changes, models["adapter"].cfg.n_rounds)
        found = quality(models[weights], task, switched(d, switches))
        gate = d.tau_m2t
        if gate < 0:  # every mask at once
            gate = None
        figures = [found[k] for k in ("coherent", "mode_hit", "lost", "full/token", "partial/token")]
        rows.append([name, *map(number, [gate, d.tau_t2t, *figures]), f"{accuracy:.2f}", f"{nfe:.2f}"])
    head = ["variant", "tau_m2t", "tau_t2t", "coherent", "mode", "lost", "full/tok", "partial/tok", "paper", "NFE"]
    print_table(head, rows)


if __name__ == "__main__":
    main()
