"""The judge of names: how many completions are names of Unicode characters, and what they cost in forwards.

Asked for the rest of a name whose first third of tokens is given, a decoder writes a name that exists or one that does
not: `unicodedata` knows, nobody argues. Names held out from training and names trained on are told apart; a held-out
prompt may be completed to a name that was trained on, which counts. Forwards: full ones a token (the paper's NFE), and
all of them a token, a partial one as n/L, a commit as one. Intervals are Wilson's, 95 %.

    python -m tools.names --ckpt out/names
    python -m tools.names --ckpt out/names --adapter out/names_joint --prompts 512 --json
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint import DTYPES, load_model, load_tokenizer
from data import Parser, Tokenizer, bounded, exists, fail, generator, is_validation, pick_device, unicode_names
from evaluate import print_table
from model import Model
from released.tables import wilson
from sample import MODES, Decoding, generate

STOP = Decoding(gen_length=32, eos_early_stop=True, tau_t2t=None, n_rounds=0)
FACTORISED = {"one at a time": 1.0, "tau_m2t 0.5": 0.5, "tau_m2t 0.4": 0.4, "tau_m2t 0.3": 0.3, "tau_m2t 0.2": 0.2,
              "tau_m2t 0.1": 0.1, "all at once": -1.0}  # fmt: skip
JOINT = {k: v for k, v in FACTORISED.items() if v < 0.5}


def prompts_of(names: list[str], tokenizer: Tokenizer, n: int, key: str) -> list[list[int]]:
    """The first third of the tokens (rounded up) of n names, drawn without replacement by the key."""
    drawn = torch.randperm(len(names), generator=generator("names", key))[:n].tolist()
    ids = [tokenizer.encode_documents([names[i]])[0].tolist() for i in drawn]
    return [i[: -(-len(i) // 3)] for i in ids]


def judge(model: Model, tokenizer: Tokenizer, prompts: list[list[int]], d: Decoding, seed: int) -> dict[str, float]:
    """Existing names, different existing names, and forwards a token, of one decoder over the prompts."""
    found, nfe, tokens = [], {"full": 0, "partial": 0, "commit": 0}, 0
    for a in range(0, len(prompts), 64):
        part = prompts[a : a + 64]
        for prompt, output in zip(part, generate(model, part, d, seed=seed), strict=True):
            name = tokenizer.decode(prompt + output.tokens)  # eos is no text
            found += [name] if exists(name) else []
            tokens += len(output.tokens)
            nfe = {kind: n + output.nfe[kind] for kind, n in nfe.items()}
    total = nfe["full"] + nfe["commit"] + nfe["partial"] * model.cfg.n_last / model.cfg.n_layer
    low, high = wilson(len(found), len(prompts))
    return {"exist": len(found) / len(prompts), "low": low, "high": high, "distinct": len(set(found)) / len(prompts),
            "full": nfe["full"] / tokens, "partial": nfe["partial"] / tokens, "all": total / tokens}  # fmt: skip


def decoders(model: Model, adapters: dict[str, Model], temperature: float) -> dict[str, tuple[Model, Decoding]]:
    """Name -> (weights, settings): the base's, the released settings, and every adapter's with Stage B."""
    start = replace(STOP, temperature=temperature)
    out = {name: (model, replace(start, tau_m2t=tau)) for name, tau in FACTORISED.items()}
    out |= {f"released {mode.upper()}": (model, replace(start, **gates)) for mode, gates in MODES.items()}
    for folder, adapted in adapters.items():
        joint = replace(start, n_rounds=adapted.cfg.n_rounds)
        out |= {f"{folder}, {name}": (adapted, replace(joint, tau_m2t=tau)) for name, tau in JOINT.items()}
    return out


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ckpt", required=True, help="a checkpoint of train.py --data names")
    parser.add_argument("--adapter", nargs="+", default=[], help="adapters that were trained from it")
    parser.add_argument(
        "--prompts", type=bounded(int, 1), default=256, help="held-out and trained names, so many of each"
    )
    parser.add_argument("--temperature", type=bounded(float, 0), default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the draws, with a temperature")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    parser.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    parser.add_argument("--json", action="store_true", help="one JSON object a decoder and group")
    args = parser.parse_args()
    device, dtype = pick_device(args.device), DTYPES[args.dtype]
    model = load_model(args.ckpt, device, dtype)
    tokenizer = load_tokenizer(Path(args.ckpt), model.cfg.tokenizer) or fail(f"{args.ckpt} is a toy: it has no names")
    adapters = {folder: load_model(args.ckpt, device, dtype, folder) for folder in args.adapter}
    groups: dict[str, list[str]] = {"held out": [], "trained": []}
    for name in unicode_names():
        groups["held out" if is_validation(name) else "trained"].append(name)
    jobs, rows = decoders(model, adapters, args.temperature), []
    bar = tqdm(total=len(jobs) * len(groups), desc="judge", disable=None)
    for group, names in groups.items():
        prompts = prompts_of(names, tokenizer, args.prompts, group)
        for name, (weights, d) in jobs.items():
            r = judge(weights, tokenizer, prompts, d, args.seed)
            bar.update()
            if args.json:
                print(json.dumps({"decoder": name, "prompts": group, **r}))
            rows.append([name, group, f"{r['exist']:.3f}", f"{r['low']:.3f} .. {r['high']:.3f}", f"{r['distinct']:.3f}",
                         *(f"{r[k]:.2f}" for k in ("full", "partial", "all"))])  # fmt: skip
    bar.close()
    if not args.json:
        print_table(["decoder", "prompts", "exist", "95 %", "distinct", "full/tok", "partial/tok", "all/tok"], rows)


if __name__ == "__main__":
    main()
