"""Evaluation: what each decoder does to a joint distribution that is known exactly.

On a toy (toy.py) nothing is estimated where it can be enumerated: the output distribution of a one-step decoder is a
product, that of one-at-a-time decoding a chain, and both are compared with the true table. Validity alone can be won
by always writing one phrase, so a distance between distributions stands beside it.

    python evaluate.py --data modes --ckpt out/modes                         # the decoders' table
    python evaluate.py --data modes --ckpt out/base --adapter out/n2 --json  # numbers, with an adapter
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import toy
from checkpoint import load_model, read_config
from data import Parser, fail, pick_device, read_json
from model import Model
from sample import MODES, Decoding, generate
from toy import Toy

# N contexts, S support tuples, m answer positions, V answer symbols, R rows of a forward

ROWS = 4096  # rows in one forward
ONE_STEP = Decoding(tau_m2t=-1, tau_t2t=None, max_post_steps=0)  # every mask at once
DECODERS = {
    "Stage A, one step": replace(ONE_STEP, n_rounds=0),
    "Stage B, one step": ONE_STEP,
    "threshold, no edits": Decoding(tau_m2t=0.95, tau_t2t=None),
    "threshold, edits": Decoding(tau_m2t=0.95, tau_t2t=0.9),
    "edits only (ICM)": replace(ONE_STEP, n_rounds=0, tau_t2t=0.0, max_post_steps=64),
    "one at a time": Decoding(tau_m2t=1.0, tau_t2t=None, n_rounds=0, max_post_steps=0),
    "released Q": Decoding(**MODES["q"], n_rounds=0),
    "released S": Decoding(**MODES["s"], n_rounds=0),
}


@torch.inference_mode()
def answer_log_probs(model: Model, task: Toy, c: Tensor, z: Tensor, n_rounds: int) -> Tensor:
    """log q(x_i | z) of answer blocks z (R, m) int64, masked where -1, in contexts c (R,): (R, m, V) float64. Stage A
    for n_rounds 0, else Stage B with every masked position in the bundle. Mass on non-answer tokens stays lost."""
    out = []
    for c_part, z_part in zip(c.split(ROWS), z.split(ROWS), strict=True):
        ids = torch.cat([task.prompt(c_part), z_part.masked_fill(z_part < 0, task.mask_id)], dim=1)
        out.append(toy.answer_logits(model, ids.to(model.wte.weight.device), n_rounds).cpu().double())
    return torch.cat(out).log_softmax(-1)[..., : task.V]


def one_step_table(model: Model, task: Toy, n_rounds: int) -> Tensor:
    """q over the support when all positions are drawn at once: (N, S) float64."""
    c = torch.arange(task.n_ctx)
    q = answer_log_probs(model, task, c, torch.full((task.n_ctx, task.m), -1), n_rounds).exp()
    return toy.product_table(task, c, q)


def chain_table(model: Model, task: Toy) -> Tensor:
    """q over the support when tokens are drawn one at a time, the most confident position first: (N, S) float64. A
    tuple has one path through the states: the position is a function of the state. Equal states are computed once."""
    N, S, m = task.support.shape
    c, x = torch.arange(N).repeat_interleave(S), task.support.reshape(N * S, m)
    z, log_q = torch.full_like(x, -1), torch.zeros(N * S, dtype=torch.float64)
    for _ in range(m):
        states, back = torch.unique(torch.cat([c[:, None], z], dim=1), dim=0, return_inverse=True)
        log_p = answer_log_probs(model, task, states[:, 0], states[:, 1:], 0)
        at = log_p.amax(-1).masked_fill(states[:, 1:] >= 0, -math.inf).argmax(-1)[back]  # (N*S,)
        token = x.gather(1, at[:, None])
        log_q += log_p[back, at, token[:, 0]]
        z = z.scatter(1, at[:, None], token)
    return log_q.exp().view(N, S) * (task.prob > 0)


def distances(task: Toy, q: Tensor) -> dict[str, float]:
    """Means over contexts, nats. Reverse KL is infinite as soon as q writes anything outside the support."""
    outside = float(toy.outside(q).mean())
    forward, tv = float(toy.kl(task.prob, q).mean()), float(toy.total_variation(task.prob, q).mean())
    reverse = float(toy.kl(q, task.prob).mean()) if outside < 1e-9 else math.inf
    return {"forward_kl": forward, "tv": tv, "reverse_kl": reverse, "outside": outside}


def quality(model: Model, task: Toy, d: Decoding) -> dict[str, float]:
    """Every context decoded once, greedily, by the decoder that users run: share of coherent answers and of joint
    modes, mean log-probability lost to the mode (over coherent answers), forwards a token."""
    c = torch.arange(task.n_ctx)
    outputs = generate(model, task.prompt(c).tolist(), replace(d, gen_length=task.m))
    answers = [o.tokens + [task.eos_id] * (task.m - len(o.tokens)) for o in outputs]  # an eos inside cuts the answer
    log_p, best = task.log_prob(c, torch.tensor(answers)), task.log_prob(c, task.mode())
    coherent, tokens = log_p > -math.inf, task.n_ctx * task.m
    return {
        "coherent": float(coherent.double().mean()),
        "mode_hit": float((log_p >= best - 1e-9).double().mean()),  # any of the most probable ones is the mode
        "lost": float((best - log_p)[coherent].mean()) if coherent.any() else math.inf,
        "nfe_full": sum(o.nfe["full"] for o in outputs) / tokens,
        "nfe_partial": sum(o.nfe["partial"] for o in outputs) / tokens,
    }


def evaluate_toy(model: Model, task: Toy) -> dict:
    """{task, tc, h_joint, decoders: {name: {...}}}, nats and means over contexts."""
    K = model.cfg.n_rounds
    decoders = {n: quality(model, task, replace(d, n_rounds=d.n_rounds and K)) for n, d in DECODERS.items()}
    decoders["Stage A, one step"] |= distances(task, one_step_table(model, task, 0))
    decoders["Stage B, one step"] |= distances(task, one_step_table(model, task, K))
    decoders["one at a time"] |= distances(task, chain_table(model, task))
    tc, h = float(task.tc().mean()), float(task.h_joint().mean())
    return {"task": task.name, "tc": tc, "h_joint": h, "decoders": decoders}


def number(value: float | None) -> str:
    return "-" if value is None else "inf" if math.isinf(value) else f"{value:.3f}"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    width = [max(len(r[k]) for r in [head, *rows]) for k in range(len(head))]
    for r in [head, *rows]:
        print("  ".join([r[0].ljust(width[0]), *(cell.rjust(w) for cell, w in zip(r[1:], width[1:], strict=True))]))


def print_toy(report: dict) -> None:
    h, tc = report["h_joint"], report["tc"]
    print(f"{report['task']}: H = {h:.4f} and H + TC = {h + tc:.4f} nats (the floors of a joint and of a factorised"
          f" one-step loss), TC = {tc:.4f}")  # fmt: skip
    print("greedy: coherent, joint-mode hit, log-probability lost; sampling: KL(p||q), total variation, KL(q||p)")
    keys = ["coherent", "mode_hit", "lost", "forward_kl", "tv", "reverse_kl", "nfe_full", "nfe_partial"]
    head = ["decoder", "coherent", "mode", "lost", "KL(p||q)", "TV", "KL(q||p)", "full/tok", "partial/tok"]
    print_table(head, [[name] + [number(v.get(k)) for k in keys] for name, v in report["decoders"].items()])


def load(ckpt: str, adapter: str | None, device: torch.device) -> Model:
    return load_model(ckpt, device, torch.float32, adapter)


def load_task(name: str, ckpt: str) -> Toy:
    """The toy that a checkpoint was trained on, from the toy.json beside it."""
    settings = read_json(Path(ckpt) / "toy.json", "toy settings (a checkpoint of train.py --data TOY)")
    if settings.pop("name", None) != name:
        fail(f"{ckpt} was trained on another toy than --data {name}")
    try:
        task = toy.make(name, **settings)
    except (TypeError, ValueError) as e:
        fail(f"{ckpt}/toy.json is damaged: {e}")
    cfg = read_config(Path(ckpt))
    if (cfg.vocab_size, cfg.mask_id, cfg.block_length) != (task.vocab_size, task.mask_id, task.m):
        fail(f"{ckpt}/toy.json is of a toy of another size than the model")
    return task


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("what")
    group.add_argument("--data", choices=toy.TASKS, required=True, help="the toy that the checkpoint was trained on")
    group.add_argument("--ckpt", nargs="+", required=True, help="checkpoint folders, a table for each")
    group.add_argument("--adapter", help="folder of LoRA and markers that was trained from the checkpoint")
    group.add_argument("--json", action="store_true", help="{task, tc, h_joint, decoders} a line for each checkpoint")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    args = parser.parse_args()
    for ckpt in args.ckpt:
        report = evaluate_toy(load(ckpt, args.adapter, pick_device(args.device)), load_task(args.data, ckpt))
        print(json.dumps(report).replace("Infinity", "null")) if args.json else print_toy(report)


if __name__ == "__main__":
    main()
