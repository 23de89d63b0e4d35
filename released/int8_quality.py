"""What int8 weights change of a trained model: tokens, probabilities, and the recorded runs of the official code.

Copies of one checkpoint decode the same prompts:

    float32           the checkpoint as it is, with which every other copy is compared
    bfloat16          the same in bfloat16
    int8              the products of float32 activations with what the integers stand for: only the weights differ
    int8, bfloat16    all activations in bfloat16, which the CPU's int8 kernel needs
    int4              with --int4: each 32 weights along the input are integers -7 .. 7 times a scale in bfloat16

Every state that the float32 copy went through is then read by all, and the distributions over the masked positions are
compared there: KL(float32 || the copy) in nats a position, of Stage A; of a joint head, where --adapter brings one, at
the bundles that it looked at. Of names, it also prints which shares of the completions exist, and how many existing
names the copy lost and won.

    python -m released.int8 --src assets/names --out weights/names-int8
    python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8 --int4
    python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8 --int4 --adapter assets/names/joint
    python -m released.int8_quality --golden tests/data/golden_a --int8 weights/golden-int8      # the 27 recorded runs

There is no int4 format: the matrices that int8 stores are rounded in memory, and stay floats.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cache import Output
from checkpoint import DTYPES, load_model, load_tokenizer, stored
from evaluate import GATES, draw_names, print_table
from lib import data, util
from lib.tokenizer import Tokenizer
from lib.util import Parser, bounded, fail
from model import Config, Model, sequence_context
from released.int8 import int8_model
from sample import MODES, Decoding, generate

# S states, T positions, B block_length, P positions of all states, V vocabulary, N and K rows and columns of a matrix

PROMPT = 32  # tokens of a text that are its prompt
GROUP = 32  # weights of a row that share a scale in int4
SCALES = 16  # that are tried for each group
TOGETHER = 256  # states that are read at once


def decoders(gen_length: int, joint: bool, order: str) -> dict[str, Decoding]:
    """Without edits, from one token a step to all at once, and the released settings, which write the surest first."""
    start = Decoding(gen_length=gen_length, tau_t2t=None, n_rounds=int(joint))
    gates = GATES[order]
    if not joint:  # a joint head has nothing to look at where one token is written
        gates = {"one at a time": 1.0} | gates
    found = {name: replace(start, tau_m2t=tau) for name, tau in gates.items()}
    if not joint and order == "surest":
        found |= {f"released {mode.upper()}": replace(start, **taus) for mode, taus in MODES.items()}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# the copies


def round_to_int4(w: Tensor) -> Tensor:
    """(..., N, K) any float -> (..., N, K) float32: what integers -7 .. 7 and one scale for each GROUP of a row's
    weights leave of it. Of SCALES scales, from the one that reaches the largest weight to half of it, a group takes
    that with the least squared error."""
    groups = w.float().unflatten(-1, (-1, GROUP))
    reaching = groups.abs().amax(-1, keepdim=True) / 7
    best = torch.zeros_like(groups)
    least = groups.square().sum(-1, keepdim=True)
    for part in torch.linspace(1.0, 0.5, SCALES):
        scale = (part * reaching).bfloat16().float()
        rounded = (groups / scale).round().clamp(-7, 7) * scale
        error = (rounded - groups).square().sum(-1, keepdim=True)
        # a group of zeros has no scale, and stays as it is
        better = error < least
        best = torch.where(better, rounded, best)
        least = torch.where(better, error, least)
    return best.flatten(-2)


def make_int4(model: Model) -> None:
    """Round every matrix that int8 would store."""
    matrices = [name for name, tensor in stored(int8_model(model.cfg)).items() if tensor.dtype == torch.int8]
    state = model.state_dict()
    rounded = {}
    for name in matrices:
        if state[name].shape[-1] % GROUP:
            fail(f"--int4: {name} has rows of {state[name].shape[-1]} weights, which are no groups of {GROUP}")
        rounded[name] = round_to_int4(state[name])
    model.load_state_dict(rounded, strict=False, assign=True)


def load_copies(args: Namespace) -> dict[str, Model]:
    """Name -> model, the float32 one first."""
    fp32 = torch.float32
    bf16 = torch.bfloat16
    copies = {
        "float32": load_model(args.ckpt, "cpu", fp32, args.adapter),
        "bfloat16": load_model(args.ckpt, "cpu", bf16, args.adapter),
        "int8": load_model(args.int8, "cpu", fp32, args.adapter),
        "int8, bfloat16": load_model(args.int8, "cpu", bf16, args.adapter),
    }
    if args.int4:
        copies["int4"] = load_model(args.ckpt, "cpu", fp32, args.adapter)
        make_int4(copies["int4"])
    return copies


# ---------------------------------------------------------------------------------------------------------------------
# the comparison


@dataclass
class State:
    """What a step of a decode saw: finished blocks and the current one, and the bundle that it looked at."""

    ids: list[int]
    start: int
    bundle: list[int]  # positions


def states(prompt: list[int], output: Output, block_length: int) -> Iterator[State]:
    """Every state of a row, in order."""
    done = prompt[: len(prompt) // block_length * block_length]
    for step, following in zip(output.steps, [*output.steps[1:], None], strict=True):
        refused = [place["at"] for place in step.get("refused", [])]
        yield State(done + step["before"], step["start"], step["bundle"] + refused)
        if following is None or following["start"] != step["start"]:
            done = done + step["after"]


def together(seen: list[State]) -> Iterator[list[State]]:
    """States of one length, so many at a time as are read at once."""
    by_length = sorted(seen, key=lambda state: len(state.ids))
    for _, alike in groupby(by_length, key=lambda state: len(state.ids)):
        alike = list(alike)
        for first in range(0, len(alike), TOGETHER):
            yield alike[first : first + TOGETHER]


@torch.inference_mode()
def log_probs(model: Model, seen: list[State], joint: bool) -> Tensor:
    """(P, V) float32: Stage A's at the masks of each state's block, or the joint head's at its bundle, if that has two
    tokens or more."""
    if joint:
        seen = [state for state in seen if len(state.bundle) > 1]
    else:  # a decoder that edits goes on after the last mask
        seen = [state for state in seen if model.cfg.mask_id in state.ids[state.start :]]
    found = [torch.zeros(0, model.cfg.vocab_size)]
    for alike in together(seen):
        ids = torch.tensor([state.ids for state in alike])  # (S, T)
        start = alike[0].start
        ctx = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), model.compute_dtype)
        h = model.last_n(model.prefix(ids, ctx), ctx)[:, start:]  # (S, B, C)
        if joint:
            bundle = torch.zeros_like(ids, dtype=torch.bool)
            for row, state in zip(bundle, alike, strict=True):
                row[state.bundle] = True
            h = model.second_look(h, bundle[:, start:])
        else:
            h = h[ids[:, start:] == model.cfg.mask_id]
        found.append(model.head(h).log_softmax(-1))
    return torch.cat(found)


def divergence(p: Tensor, q: Tensor) -> tuple[float, float]:
    """KL(p || q) of log-probabilities (P, V), mean nats a position, and the share of positions with the same best."""
    n = max(1, len(p))
    kl = F.kl_div(q, p, log_target=True, reduction="sum")
    same = (p.argmax(-1) == q.argmax(-1)).sum()
    return float(kl) / n, float(same) / n


def equal_tokens(a: list[int], b: list[int]) -> float:
    """Share of places at which two answers have the same token; a place that one of them lacks differs."""
    same = sum(x == y for x, y in zip(a, b, strict=False))
    return same / max(len(a), len(b), 1)


def read_prompts(args: Namespace, cfg: Config, tokenizer: Tokenizer) -> list[list[int]]:
    """The first third of held-out names, or the first tokens of held-out texts."""
    if args.data == "names":
        return list(draw_names(args.prompts, "held out", tokenizer).values())
    rows = data.load_sequences([args.data], tokenizer, 4 * PROMPT, 0, 0, cfg.block_length)[1]
    x, real, _ = rows.batch(0, args.prompts)
    return [row[:PROMPT].tolist() for row, here in zip(x, real, strict=True) if here[:PROMPT].all()]


def existing(prompts: list[list[int]], outputs: list[Output], tokenizer: Tokenizer) -> list[bool]:
    """Of names: which completions are some character's name."""
    written = [tokenizer.decode(p + o.tokens) for p, o in zip(prompts, outputs, strict=True)]
    return [data.exists(name) is not None for name in written]


def compare_names(before: list[bool], after: list[bool]) -> list[str]:
    """Cells of a table: the share that exists in the copy, and how many existing names it lost and won."""
    lost = sum(b and not a for b, a in zip(before, after, strict=True))
    won = sum(a and not b for b, a in zip(before, after, strict=True))
    return [f"{sum(after) / len(after):.3f}", str(lost), str(won)]


def compare(args: Namespace) -> None:
    """A table: a line for each decoder and each copy, the float32 one first."""
    joint = args.adapter is not None
    names = args.data == "names"
    copies = load_copies(args)
    exact = copies["float32"]
    tokenizer = load_tokenizer(args.ckpt, exact.cfg.tokenizer)
    prompts = read_prompts(args, exact.cfg, tokenizer)
    stage = "the joint head" if joint else "Stage A"
    print(f"{args.ckpt} and {args.int8}: {len(prompts)} prompts; probabilities of {stage}")

    table = []
    for decoder, d in decoders(args.gen_length, joint, exact.cfg.order).items():
        expected = generate(exact, prompts, d, trace=True)
        seen = [s for p, o in zip(prompts, expected, strict=True) for s in states(p, o, exact.cfg.block_length)]
        p = log_probs(exact, seen, joint)
        for name, model in tqdm(copies.items(), desc=decoder, unit="copy", leave=False, disable=None):
            # what it writes
            given = generate(model, prompts, d)
            pairs = [(a.tokens, b.tokens) for a, b in zip(expected, given, strict=True)]
            whole = sum(a == b for a, b in pairs) / len(pairs)
            tokens = sum(equal_tokens(a, b) for a, b in pairs) / len(pairs)

            # what it thinks of the same states
            kl, best = divergence(p, log_probs(model, seen, joint))
            line = [decoder, name, f"{whole:.3f}", f"{tokens:.3f}", f"{kl:.6f}", f"{best:.4f}", str(len(p))]
            if names:
                line += compare_names(existing(prompts, expected, tokenizer), existing(prompts, given, tokenizer))
            table.append(line)
    head = ["decoder", "copy", "answers equal", "tokens equal", "KL, nats", "same best", "positions"]
    if names:
        head += ["exist", "lost", "won"]
    print_table(head, table)


def golden(args: Namespace) -> None:
    """How many of the official code's recorded runs stay equal, token for token. Tiny random weights: a hard case."""
    path = args.golden / "expected.json"
    cases = util.read_json(path, "recorded runs")["cases"]
    for dtype in DTYPES:
        equal, shares = 0, 0.0
        for case in cases:
            a = case["args"]
            d = Decoding(
                gen_length=a["gen_length"],
                tau_m2t=a["threshold"],
                tau_t2t=a["editing_threshold"],
                max_post_steps=a["max_post_steps"],
                num_to_transfer=a["num_to_transfer"],
                eos_early_stop=a["eos_early_stop"],
                n_rounds=0,
            )
            model = load_model(args.int8, "cpu", DTYPES[dtype], block_length=a["block_length"])
            tokens = generate(model, [case["prompt"]], d)[0].tokens
            equal += tokens == case["output"]
            shares += equal_tokens(tokens, case["output"])
        print(json.dumps({"activations": dtype, "runs": len(cases), "equal": equal, "tokens": shares / len(cases)}))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ckpt", type=Path, help="the checkpoint as it is")
    parser.add_argument("--int8", type=Path, required=True, help="the same in int8")
    parser.add_argument("--int4", action="store_true", help="also rounds the checkpoint to 4 bits, in memory")
    parser.add_argument("--adapter", type=Path, help="a joint head, for all copies")
    parser.add_argument("--golden", type=Path, help="instead of --ckpt: a folder of recorded runs of the official code")
    parser.add_argument("--data", default="names", help="where prompts are from: names, stdlib, or a file or folder")
    parser.add_argument("--prompts", type=bounded(int, 1), default=256, help="held-out names, or texts")
    parser.add_argument("--gen_length", type=bounded(int, 1), default=32, help="tokens of an answer, at most")
    args = parser.parse_args()
    if (args.ckpt is None) == (args.golden is None):
        fail("give --ckpt, or --golden, and not both")
    if args.golden and args.int4:
        fail("--int4 is for --ckpt")
    if args.golden:
        golden(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
