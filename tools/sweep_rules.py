"""Every rule of beyond/rules.py, at each value of its dial, on a model of names: a JSON object a line.

python -m tools.sweep_rules --ckpt out/names-base --prompts 512 > rules.jsonl
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import evaluate
from beyond.rules import RULES
from cache import Cached
from checkpoint import load_model, load_tokenizer
from data import Parser, bounded, pick_device
from sample import Decoding, generate

DIALS = {
    "threshold": (0.98, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0),
    "margin": (0.98, 0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02, 0.0, -1.0),
    "product": (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 1e-4, 0.0),
    "entropy_bound": (-1.0, 0.01, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 99.0),
    "factor": (0.1, 0.2, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 9.0),
    "fixed": (1, 2, 3, 4, 5, 6, 8),
    "longest_prefix": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.005, 0.001, 0.0),
}


def step_of(rule: Callable, dial: float) -> Callable:
    """A greedy decoding step whose bundle this rule picks; nothing visible is edited."""

    def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        _, logits = engine.stage_a(z)
        bundle = rule(logits, z == engine.cfg.mask_id, dial)
        conf, token = logits.softmax(-1).max(-1)
        after = torch.where(bundle, token, z)
        edited = torch.zeros_like(bundle)
        return dict(before=z, after=after, bundle=bundle, edited=edited, conf=conf, token_a=token, conf_a=conf)

    return step


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ckpt", required=True, help="checkpoint of beyond.names_base, or of train.py --data names")
    parser.add_argument("--prompts", type=bounded(int, 1), default=512, help="held-out beginnings")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="which ones")
    args = parser.parse_args()

    model = load_model(args.ckpt, pick_device("cpu"), torch.float32)
    tokenizer = load_tokenizer(Path(args.ckpt), model.cfg.tokenizer)
    prompts = evaluate.draw_names(args.prompts, "held out", tokenizer)
    different = [list(ids) for ids in dict.fromkeys(map(tuple, prompts.values()))]  # equal ones end alike
    greedy = Decoding(gen_length=32, eos_early_stop=True, tau_t2t=None, n_rounds=0)

    for rule in args.rules:
        for dial in DIALS[rule]:
            model.step = step_of(RULES[rule], dial)
            completed = {tuple(p): o for p, o in zip(different, generate(model, different, greedy), strict=True)}
            outputs = [completed[tuple(p)] for p in prompts.values()]
            written = [tokenizer.decode(p + o.tokens) for p, o in zip(prompts.values(), outputs, strict=True)]
            found = evaluate.judge(list(prompts), written, outputs, model.partial_cost)
            shown = {k: round(found[k], 4) for k in ("exist", "distinct", "all/token", "full/token")}
            print(json.dumps({"rule": rule, "dial": dial} | shown), flush=True)


if __name__ == "__main__":
    main()
