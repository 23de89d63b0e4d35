"""The rows of the paper's Table 2, and that table on names, where every answer can be judged.

A row says whose weights decode, with which gates, and by which step. Two of the steps are defined here, the others in
sample.py. released/harness.py answers a benchmark as any of these rows does. Causal Stage B has no row.

    python -m released.ablation --ckpt assets/names/paper      # or your own: python train.py --n_last 3
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from cache import Engine
from checkpoint import base_of, judge_of, load_model
from decoding import ALL, Decoding, Step
from evaluate import NAME_LENGTH, complete
from lib.names import draw_names
from lib.tokenizer import load_tokenizer
from lib.util import Parser, bounded, command, fail, pick_device, print_table
from model import Model
from sample import denoise

FIGURES = ("exist", "forwards", "full")  # the figures of a row on names, see evaluate.complete


# --- steps other than the paper's; they take and return what sample.denoise does
def by_turns(engine: Engine, z: Tensor, given: Tensor, u: Tensor, d: Decoding, b_fills: bool) -> Step:
    """One stage fills the bundle (Eq. 2); beside it the other edits (Eq. 3)."""
    done = denoise(engine, z, given, u, d)
    by_b = done.bundle if b_fills else ~done.bundle
    token = torch.where(by_b, done.token, done.token_a)
    conf = torch.where(by_b, done.conf, done.conf_a)

    visible = (z != engine.model.cfg.mask_id) & ~given
    edited = visible & (conf > d.edit_gate) & (token != z)
    after = torch.where(done.bundle | edited, token, z)
    return replace(done, after=after, edited=edited, token=token, conf=conf, over=(after == z).all(-1))


def unmarked(engine: Engine, z: Tensor, given: Tensor, u: Tensor, d: Decoding, deeper: bool) -> Step:
    """The paper's step without a marker: the last n layers run again on the prefix states, which is Stage A. deeper:
    the other reading of the paper's words, as additional depth: LastN(LastN(h))."""

    def stage_b(h: Tensor, bundle: Tensor, tokens: Tensor) -> Tensor:
        start = engine.states if deeper else h
        return engine.stage_b(start, torch.zeros_like(bundle), tokens)

    without = SimpleNamespace(model=engine.model, stage_a=engine.stage_a, stage_b=stage_b)
    return denoise(without, z, given, u, d)


# --- Table 2
BASE = "released, factorised"
COCOMMIT = "Stage B, ungated edits (default)"
GATED = "Stage B, gated edits"
Q = dict(tau_m2t=0.7, tau_t2t=0.5)  # the released quality setting
OFF = dict(n_rounds=0)

# name of a row -> whose weights; how its settings differ from Q with Stage B; its step; the paper's accuracy and NFE
MECHANISM = {
    BASE: ("base", OFF, denoise, 89.61, 0.26),
    "adapter, Stage B off": ("adapter", OFF, denoise, 90.75, 0.28),
    GATED: ("adapter", {}, denoise, 91.13, 0.28),
    COCOMMIT: ("adapter", dict(tau_t2t=0.0), denoise, 91.13, 0.34),
    "B fills, A edits": ("adapter", {}, partial(by_turns, b_fills=True), 90.90, 0.27),
    "A fills, B edits": ("adapter", {}, partial(by_turns, b_fills=False), 90.90, 0.30),
    "B fills, edits off": ("adapter", dict(tau_t2t=None), denoise, 88.40, 0.30),
    "Stage B without marker": ("adapter", {}, partial(unmarked, deeper=False), 90.37, 0.28),
    "entropy selection, same size": ("adapter", dict(select="entropy"), denoise, 90.30, 0.27),
    "Stage B, tau_m2t 0.5": ("adapter", dict(tau_m2t=0.5), denoise, 88.40, 0.24),
    "Stage B, tau_m2t 0.3": ("adapter", dict(tau_m2t=0.3), denoise, 84.00, 0.22),
    "adapter, Stage B off, tau_m2t 0.5": ("adapter", OFF | dict(tau_m2t=0.5), denoise, 88.48, 0.23),
    "adapter, Stage B off, tau_m2t 0.3": ("adapter", OFF | dict(tau_m2t=0.3), denoise, 83.70, 0.22),
    "released, tau_m2t 0.5": ("base", OFF | dict(tau_m2t=0.5), denoise, 86.73, 0.26),
    "released, tau_m2t 0.3": ("base", OFF | dict(tau_m2t=0.3), denoise, 79.15, 0.30),
    "released, both gates removed": ("base", OFF | dict(tau_m2t=0.0, tau_t2t=0.0), denoise, 83.40, 0.15),
    "all masks at once": ("adapter", dict(tau_m2t=ALL, tau_t2t=0.0), denoise, 79.91, 0.10),
}


def decoder_of(row: str, n_rounds: int) -> tuple[Decoding, Callable[..., Step]]:
    """The settings and the step of a row, for a model with this many rounds."""
    _, changes, step, *_ = MECHANISM[row]
    return Decoding(**Q | dict(n_rounds=n_rounds) | changes), step


def row_of(model: Model, row: str | None = None, decode: str | None = None) -> str:
    """The row of Table 2 that is asked for by its name or by --decode, if it is one of this model's weights."""
    if model.cfg.stage_b != "paper":
        fail(f"{model.cfg.stage_b} Stage B is not a row of the paper's Table 2: judge it with evaluate.py")
    given = "adapter" if model.trained_b else "base"
    if row is None:
        decode = decode or {"base": "released", "adapter": "paper"}[given]
        released = {"base": BASE, "adapter": "adapter, Stage B off"}[given]
        row = {"released": released, "paper": COCOMMIT}.get(decode, decode)
    if row not in MECHANISM:
        fail(f"{row!r} is no row of Table 2, and no decoder: those are released and paper, and rows are {[*MECHANISM]}")
    weights, *_ = MECHANISM[row]
    if weights != given:
        fail(f"the row {row!r} is about the {weights}, and this is the {given}")
    return row


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ckpt", type=Path, required=True, help="an adapter's folder")
    parser.add_argument("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    parser.add_argument("--prompts", type=bounded(int, 1), default=256, help="the number of names to complete")
    args = parser.parse_args()
    base = base_of(args.ckpt)
    if base == args.ckpt or "names" not in judge_of(base):
        fail(f"{args.ckpt} is not an adapter of a model of names: the table compares such an adapter with its base")
    tokenizer = load_tokenizer(base)
    load = partial(load_model, device=pick_device(args.device), dtype=torch.float32)
    models = {"adapter": load(args.ckpt), "base": load(base)}
    row_of(models["adapter"])  # it has one
    prompts = draw_names(args.prompts, "held out", tokenizer)

    # "without marker" has a second reading, which is a row of its own here
    rows = MECHANISM | {"Stage B without marker, deeper": ("adapter", {}, partial(unmarked, deeper=True), 90.37, 0.28)}
    K = models["adapter"].cfg.n_rounds
    lines = []
    for name, (weights, changes, step, accuracy, nfe) in rows.items():
        d = Decoding(**Q | dict(n_rounds=K) | changes)
        found = complete(models[weights], tokenizer, prompts, replace(d, gen_length=NAME_LENGTH, holes=True), step)
        lines.append([name, *(f"{found[figure]:.3f}" for figure in FIGURES), f"{accuracy:.2f}", f"{nfe:.2f}"])
    print_table(["variant", *FIGURES, "| the paper's GSM8K", "NFE/token"], lines)
    print("forwards: of a name, everything counted; full: only the full ones, of a name (the paper's NFE: of a token)")


if __name__ == "__main__":
    main()
