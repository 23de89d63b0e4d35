"""The paper's Tables 2 and 3 on a toy, where every answer is known: what each part of the method adds, and how n does.

A base of `train.py --data TOY --stage_a_only --out_dir out/base`, and for each n an adapter trained from it,
`train.py --data TOY --init_from out/base --n_last N --learning_rate 1e-3 --max_iters 500 --out_dir out/nN`.

    python -m released.toy_tables mechanism --data modes --ckpt out/base --adapter out/n2
    python -m released.toy_tables lastn --data modes --ckpt out/base --adapter out/n1 out/n2 out/n3
"""

from dataclasses import replace

import torch

from checkpoint import load_model
from evaluate import ONE_STEP, distances, load_task, one_step_table, print_table, quality
from lib import toy
from lib.toy import Toy
from lib.util import Parser, fail, pick_device
from released import ablation
from released.ablation import Ablation
from released.tables import MECHANISM
from sample import MODES, Decoding

Table = tuple[list[str], list[list[str]]]  # head, rows


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}"


def mechanism(ckpt: str, adapters: list[str], device: torch.device, task: Toy) -> Table:
    """Table 2: every variant of the decoder on the base or on base and adapter, beside the paper's GSM8K figures."""
    if len(adapters) != 1:
        fail("mechanism compares the base with one --adapter trained from it")
    models = {
        "base": load_model(ckpt, device, torch.float32),
        "adapter": load_model(ckpt, device, torch.float32, adapters[0]),
    }
    for model in models.values():
        model.step = ablation.step

    # every variant says what it changes of the released settings with Stage B
    start = Ablation(**MODES["q"], n_rounds=models["adapter"].cfg.n_rounds)
    rows = []
    for name, weights, changes, accuracy, nfe in MECHANISM:
        d = replace(start, **changes)
        r = quality(models[weights], task, d)
        gate = d.tau_m2t
        if gate < 0:  # every mask at once
            gate = None
        figures = [r[k] for k in ("coherent", "mode_hit", "lost", "nfe_full", "nfe_partial")]
        measured = [number(value) for value in (gate, d.tau_t2t, *figures)]
        rows.append([name, *measured, f"{accuracy:.2f}", f"{nfe:.2f}"])
    head = ["variant", "tau_m2t", "tau_t2t", "coherent", "mode", "lost", "full/tok", "partial/tok", "paper", "NFE"]
    return head, rows


def lastn(ckpt: str, adapters: list[str], device: torch.device, task: Toy) -> Table:
    """Table 3: adapters of several n, each writing the answer in one step, and with the paper's default decoder."""
    rows = []
    for folder in adapters:
        model = load_model(ckpt, device, torch.float32, folder)
        K = model.cfg.n_rounds

        # Stage B writes the whole answer at once
        one = quality(model, task, replace(ONE_STEP, n_rounds=K))
        one |= distances(task, one_step_table(model, task, K))
        figures = [one[k] for k in ("coherent", "mode_hit", "forward_kl")]

        # the paper's decoder
        default = quality(model, task, Decoding(n_rounds=K))
        figures += [default[k] for k in ("coherent", "mode_hit", "nfe_full")]
        rows.append([f"n = {model.cfg.n_last}", str(K), *map(number, figures)])

    print("one step: Stage B writes the whole answer at once; default: tau_m2t 0.7, ungated edits")
    head = ["trained and run at", "K", "one step: coherent", "mode", "KL(p||q)"]
    head += ["default: coherent", "mode", "full/tok"]
    return head, rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("table", choices=["mechanism", "lastn"], help="the paper's Table 2 or 3")
    parser.add_argument("--data", choices=toy.TASKS, required=True, help="the toy that the checkpoint was trained on")
    parser.add_argument("--ckpt", required=True, help="the base")
    parser.add_argument("--adapter", nargs="+", required=True, help="trained from the base: one, or one for each n")
    parser.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()
    task = load_task(args.data, args.ckpt)
    make = {"mechanism": mechanism, "lastn": lastn}[args.table]
    print_table(*make(args.ckpt, args.adapter, pick_device(args.device), task))


if __name__ == "__main__":
    main()
