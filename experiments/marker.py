"""The marker, scaled so that it can be seen: h + 1_S rms(h) marker, for any Stage B, with drawn bundles.

Stage B by alpha and causal Stage B learn with it; then it is left on, taken away, or put at the other positions of the
block, and the same beginnings are completed.

    python -m experiments.marker --init_from assets/names --config configs/alpha.toml --whole 0 --out_dir out/marked
    python -m experiments.marker --measure out/marked --seed 1
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

import train
from checkpoint import load_model
from evaluate import NAMES, complete, draw_names
from lib.tokenizer import load_tokenizer
from lib.util import command
from model import Model

WHERE = "on"  # or off, elsewhere


def mark(self, h, bundle, i, shown=None):
    """Model.mark, always scaled."""
    mark = self.markers[i]
    size = h.float().square().mean(-1, keepdim=True).sqrt()
    at = {"on": bundle, "off": torch.zeros_like(bundle), "elsewhere": ~bundle}[WHERE][..., None]
    marked = at * size * mark
    if shown is not None:
        token = F.rms_norm(self.wte(shown).float(), [self.cfg.n_embd])
        marked = marked + bundle[..., None] * size * F.linear(token, self.show.float())
    return h + marked.to(h.dtype)


def measure(folder: Path) -> None:
    global WHERE
    model = load_model(folder, "cpu", torch.float32)
    tokenizer = load_tokenizer(Path("data/names"))
    prompts = draw_names(512, "held out", tokenizer)
    found = []
    hook = model.layers[-model.cfg.n_last].register_forward_pre_hook(
        lambda _, args: found.append(float(args[0].float().square().mean().sqrt()))
    )
    ways = {"all at once": dict(tau_m2t=-1.0), "above .3": dict(tau_m2t=0.3), "above .7": dict(tau_m2t=0.7)}
    if model.cfg.causal:
        ways = {"whole blocks": dict(tau_joint=0.0), "longest run above .5": dict(tau_joint=0.5)} | ways
    for name, how in ways.items():
        for WHERE in ("on", "off", "elsewhere"):
            d = replace(NAMES, tau_t2t=None, **how)
            got = complete(model, tokenizer, prompts, d)
            record = dict(ckpt=str(folder), way=name, marker=WHERE, exist=round(got["exist"], 4), n=len(prompts))
            record |= dict(forwards=round(got["forwards"], 3), digits="".join("01"[x] for x in got["found"]))
            print(json.dumps(record), flush=True)
    hook.remove()
    size = float(model.markers.square().mean().sqrt())
    print(json.dumps(dict(ckpt=str(folder), marker_rms=size, states_rms=sum(found) / len(found))))


@command
def main() -> None:
    Model.mark = mark
    if "--measure" in sys.argv:
        torch.set_num_threads(1)
        measure(Path(sys.argv[sys.argv.index("--measure") + 1]))
    else:
        train.run(train.read_arguments())


if __name__ == "__main__":
    main()
