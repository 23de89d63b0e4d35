"""The rows of the paper's Table 2, and that table on names, where every answer can be judged. Below them our controls,
which ask whether Stage B gains by marking what is written together.

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
def by_turns(
    engine: Engine, z: Tensor, given: Tensor, u: Tensor, d: Decoding, by_b: Callable[[Tensor], Tensor]
) -> Step:  # fmt: skip
    """Stage B writes some positions (Eq. 2 and 3), and Stage A the others. by_b: bundle (R, B) bool -> which ones, a
    bool tensor that broadcasts to (R, B)."""
    done = denoise(engine, z, given, u, d)
    b_writes = by_b(done.bundle)
    token = torch.where(b_writes, done.token, done.token_a)
    conf = torch.where(b_writes, done.conf, done.conf_a)

    visible = (z != engine.model.cfg.mask_id) & ~given
    edited = visible & (conf > d.edit_gate) & (token != z)
    after = torch.where(done.bundle | edited, token, z)
    return replace(done, after=after, edited=edited, token=token, conf=conf, over=(after == z).all(-1))


def marking(
    engine: Engine, z: Tensor, given: Tensor, u: Tensor, d: Decoding, marks: Callable[[Tensor, Tensor], Tensor],
    deeper: bool = False,
) -> Step:  # fmt: skip
    """The paper's step with other marks. marks: bundle and masks, (R, B) bool each -> the marked positions. Without any
    Stage B is Stage A. deeper: as additional depth, LastN(LastN(h)), which the paper's words may mean, too."""

    def stage_b(h: Tensor, bundle: Tensor, tokens: Tensor) -> Tensor:
        start = engine.states if deeper else h
        return engine.stage_b(start, marks(bundle, z == engine.model.cfg.mask_id), tokens)

    other = SimpleNamespace(model=engine.model, stage_a=engine.stage_a, stage_b=stage_b)
    return denoise(other, z, given, u, d)


def none(bundle: Tensor, masked: Tensor) -> Tensor:
    return torch.zeros_like(bundle)


def size(bundle: Tensor) -> Tensor:
    """How many masks a row's step fills: (R, 1)."""
    return bundle.sum(-1, keepdim=True)


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
    "B fills, A edits": ("adapter", {}, partial(by_turns, by_b=lambda bundle: bundle), 90.90, 0.27),
    "A fills, B edits": ("adapter", {}, partial(by_turns, by_b=lambda bundle: ~bundle), 90.90, 0.30),
    "B fills, edits off": ("adapter", dict(tau_t2t=None), denoise, 88.40, 0.30),
    "Stage B without marker": ("adapter", {}, partial(marking, marks=none), 90.37, 0.28),
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

# our controls, all but the first with the default's gates. "off": the same gates without Stage B
UNGATED = dict(tau_t2t=0.0)
CONTROLS = {
    "Stage B without marker, deeper": ("adapter", {}, partial(marking, marks=none, deeper=True)),
    "off": ("adapter", OFF | UNGATED, denoise),
    "every mask marked": ("adapter", UNGATED, partial(marking, marks=lambda bundle, masked: masked)),
    "only other masks marked": ("adapter", UNGATED, partial(marking, marks=lambda bundle, masked: masked & ~bundle)),
    "Stage B where one mask is filled": ("adapter", UNGATED, partial(by_turns, by_b=lambda bundle: size(bundle) == 1)),
    "Stage B where several are": ("adapter", UNGATED, partial(by_turns, by_b=lambda bundle: size(bundle) > 1)),
}
ROWS = MECHANISM | CONTROLS


def decoder_of(row: str, n_rounds: int) -> tuple[Decoding, Callable[..., Step]]:
    """The settings and the step of a row, for a model with this many rounds."""
    _, changes, step, *_ = ROWS[row]
    return Decoding(**Q | dict(n_rounds=n_rounds) | changes), step


def row_of(model: Model, row: str | None = None) -> str:
    """A row of Table 2, if it is one of this model's weights; without a name, its row of Table 1."""
    if type(model) is not Model:
        fail(f"{model.cfg.stage_b} Stage B is not a row of the paper's Table 2: judge it with evaluate.py")
    given = "adapter" if model.trained_b else "base"
    if row is None:
        row = {"base": BASE, "adapter": COCOMMIT}[given]
    if row not in ROWS:
        fail(f"{row!r} is no row of Table 2: those are {[*ROWS]}")
    weights, *_ = ROWS[row]
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
    prompts = draw_names(args.prompts, tokenizer)

    lines = []
    for name, (weights, _, _, *printed) in ROWS.items():
        d, step = decoder_of(name, models["adapter"].cfg.n_rounds)
        found = complete(models[weights], tokenizer, prompts, replace(d, gen_length=NAME_LENGTH, holes=True), step)
        of_paper = [f"{figure:.2f}" for figure in printed] or ["", ""]
        lines.append([name, *(f"{found[figure]:.3f}" for figure in FIGURES), *of_paper])
    print_table(["variant", *FIGURES, "| the paper's GSM8K", "NFE/token"], lines)
    print("forwards: of a name, everything counted; full: only the full ones, of a name (the paper's NFE: of a token)")


if __name__ == "__main__":
    main()
