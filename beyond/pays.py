"""Does a Stage B pay? Existing names against everything that a decoder runs, for any systems, over their seeds.

A system is a name, a checkpoint, perhaps an adapter; systems of one name are its seeds, and are pooled. Each decodes
the same held-out and trained prompts (evaluate.py says how) at every tau_m2t, and own blocks at every tau_keep, too.

    exist     share of the completions that are names, held-out and trained prompts together, with Wilson's 95 %
    full      Stage A's forwards a token
    all       everything, in full forwards: a partial one counts n/L times the share of the block that it ran at
    serial    forwards one after the other, a partial one like a full one: what latency pays where weights are the cost

The second table is what a user with a budget gets: of each system the best setting that costs no more.

    python -m beyond.pays --system base out/base --system ours out/base out/joint --out pays.jsonl
"""

import json
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

import evaluate
import sample
from beyond.own_blocks import OwnBlocks
from checkpoint import load_model, load_tokenizer
from data import Parser, bounded, fail, pick_device, replace_file
from evaluate import print_table, wilson
from model import Model
from sample import MODES, Decoding

TAUS = {"one at a time": 1.0, "0.4": 0.4, "0.3": 0.3, "0.2": 0.2, "0.15": 0.15, "0.1": 0.1, "all at once": -1.0}
FINER = {str(tau): tau for tau in (0.12, 0.14, 0.17, 0.22, 0.25, 0.28)}  # for whom has no tau_keep
KEEP = (0.0, 0.3, 0.5, 0.7)
BUDGETS = (0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.5, 2.0)
COUNTED = ("full/token", "all/token", "serial/token")


def settings(model: Model, K: int, args: Namespace) -> dict[str, tuple[float, Decoding]]:
    """What a system is decoded by: label -> (tau_keep, settings). The released settings have edits, where asked for."""
    start = Decoding(gen_length=32, eos_early_stop=True, tau_t2t=None, n_rounds=K, temperature=args.temperature)
    taus = TAUS if isinstance(model, OwnBlocks) else TAUS | FINER
    gates = {f"tau_m2t {label}": replace(start, tau_m2t=tau) for label, tau in taus.items()}
    if args.edits:
        gates = {f"released {mode.upper()}": replace(start, **gate) for mode, gate in MODES.items()}
        gates |= {f"tau_m2t {tau}, edits {e}": replace(start, tau_m2t=tau, tau_t2t=e)
                  for tau in (0.3, 0.2, 0.1, -1.0) for e in (0.0, 0.5)}  # fmt: skip
    if not isinstance(model, OwnBlocks):
        return {label: (0.0, d) for label, d in gates.items()}
    return {f"{label}, keep {keep}": (keep, d) for keep in args.keep for label, d in gates.items() if d.tau_m2t < 1}


def counting(model: Model, looks: list[int]) -> None:
    """Let the model's step add to looks[0] the rows that its Stage B ran for."""
    plain = getattr(model, "step", sample.step)

    def step(engine, z, prompt, busy, u, d):
        s = plain(engine, z, prompt, busy, u, d)
        ran = s["partial"] > 0 if "partial" in s else s["bundle"].any(-1) & bool(d.n_rounds)
        looks[0] += int(ran.sum()) * max(1, d.n_rounds)
        return s

    model.step = step


def measure(name: str, ckpt: str, adapter: str | None, args: Namespace) -> list[dict]:
    """A record for each setting and group of prompts."""
    model = load_model(ckpt, pick_device("cpu"), torch.float32, adapter)
    tokenizer, looks, records = load_tokenizer(Path(ckpt), model.cfg.tokenizer), [0], []
    K = model.cfg.n_rounds if adapter else 0
    jobs = settings(model, K, args)
    counting(model, looks)
    groups = {group: evaluate.draw_names(args.prompts, group, tokenizer) for group in ("held out", "trained")}
    for label, (keep, d) in tqdm(jobs.items(), desc=f"{name} {adapter or ckpt}", leave=False, disable=None):
        model.tau_keep = keep
        for group, prompts in groups.items():
            looks[0] = 0
            r = evaluate.judge(model, tokenizer, prompts, d, args.seed)
            tokens = r["full/name"] * len(prompts) / r["full/token"]
            commit = r["all/token"] - r["full/token"] - r["partial/token"] * model.cfg.n_last / model.cfg.n_layer
            r["serial/token"] = r["full/token"] + commit + looks[0] / tokens
            records.append({"system": name, "ckpt": ckpt, "adapter": adapter, "setting": label, "group": group} | r)
            records[-1]["prompts"] = len(prompts)
    return records


def pool(records: list[dict]) -> dict[tuple[str, str], dict]:
    """(system, setting) -> existing names of all seeds and groups together, with their interval; mean forwards."""
    found = defaultdict(list)
    for r in records:
        found[r["system"], r["setting"]].append(r)
    pooled = {}
    for key, of in found.items():
        n, k = sum(r["prompts"] for r in of), round(sum(r["exist"] * r["prompts"] for r in of))
        low, high = wilson(k, n)
        means = {c: sum(r[c] * r["prompts"] for r in of) / n for c in (*COUNTED, "distinct", "repeated")}
        pooled[key] = {"exist": k / n, "low": low, "high": high, "n": n, **means}
    return pooled


def within(pooled: dict, system: str, budget: float, count: str) -> str:
    """The best setting of a system that costs no more, as "share (low .. high)"."""
    of = [p for (name, _), p in pooled.items() if name == system and p[count] <= budget]
    best = max(of, key=lambda p: p["exist"], default=None)
    return f"{best['exist']:.3f} ({best['low']:.3f}..{best['high']:.3f})" if best else "-"


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("what is compared")
    group.add_argument("--system", nargs="+", action="append", metavar="NAME CKPT [ADAPTER]", default=[])
    group.add_argument(
        "--prompts", type=bounded(int, 1), default=256, help="held-out and trained names, so many of each"
    )
    group.add_argument("--keep", nargs="+", type=bounded(float, 0, 1), default=KEEP, help="tau_keep of own blocks")
    group.add_argument("--edits", action="store_true", help="with edits: the released settings, and gates 0 and 0.5")
    group.add_argument("--temperature", type=bounded(float, 0), default=0.0, help="0: greedy")
    group.add_argument("--seed", type=int, default=0, help="of the draws, with a temperature")
    group.add_argument("--out", help="file for the records, a JSON object a line")
    group.add_argument("--records", nargs="+", default=[], help="files of records that were written before")
    args = parser.parse_args()
    if any(len(s) not in (2, 3) for s in args.system) or not args.system + args.records:
        fail("--system takes NAME CKPT or NAME CKPT ADAPTER; give at least one, or --records")
    records = [json.loads(line) for path in args.records for line in Path(path).read_text().splitlines()]
    for name, ckpt, *adapter in args.system:
        records += measure(name, ckpt, adapter[0] if adapter else None, args)
        if args.out:  # after each system: nothing that was measured is lost
            lines = "".join(json.dumps(r) + "\n" for r in records)
            replace_file(Path(args.out), lambda p, lines=lines: p.write_text(lines))
    pooled, shown = pool(records), ("exist", "low", "high", "distinct", "repeated", *COUNTED)
    print_table(["system", "setting", *shown, "prompts"],
                [[*key, *(f"{p[k]:.3f}" for k in shown), str(p["n"])] for key, p in pooled.items()])  # fmt: skip
    for count in ("all/token", "serial/token"):
        systems = dict.fromkeys(name for name, _ in pooled)
        print_table([f"at most, {count}", *map(str, BUDGETS)],
                    [[s, *(within(pooled, s, b, count) for b in BUDGETS)] for s in systems])  # fmt: skip


if __name__ == "__main__":
    main()
