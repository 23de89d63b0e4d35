"""What int8 weights change of a trained model: tokens, probabilities, and the recorded runs of the official code.

Two copies of one checkpoint decode the same prompts. Every state that the float32 one went through is then read by
both, and the distributions over the masked positions are compared there: KL(float32 || int8) in nats a position, of
Stage A; of a joint head, where --adapter brings one, at the bundles that it wrote.

    python -m released.int8 --src assets/names --out weights/names-int8
    python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8
    python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8 --adapter assets/names/joint
    python -m released.int8_quality --golden tests/data/golden_a --int8 weights/golden-int8      # the 27 recorded runs

Of names, it also prints which shares of the completions exist, with float32 and with int8.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import data
from cache import Output
from checkpoint import DTYPES, load_model, load_tokenizer
from data import Parser, bounded, fail
from evaluate import draw_names, print_table
from model import Config, Model, sequence_context
from sample import MODES, Decoding, generate
from tokenizer import Tokenizer

# T positions, B block_length, C channels, V vocabulary

PROMPT = 32  # tokens of a text that are its prompt


def decoders(gen_length: int, joint: bool, order: str) -> dict[str, Decoding]:
    """Without edits, from one token a step to all at once, and the released settings, which write the surest first."""
    start = Decoding(gen_length=gen_length, eos_early_stop=True, tau_t2t=None, n_rounds=int(joint))
    found = {"one at a time": replace(start, tau_m2t=1.0)}
    found |= {f"tau_m2t {tau}": replace(start, tau_m2t=tau) for tau in (0.4, 0.2, 0.1)}
    found |= {"all at once": replace(start, tau_m2t=-1.0)}
    if not joint and order == "surest":
        found |= {f"released {mode.upper()}": replace(start, **gates) for mode, gates in MODES.items()}
    return found


@dataclass
class State:
    """What a step of a decode saw: finished blocks and the current one, and the bundle that it wrote."""

    ids: list[int]
    start: int
    bundle: list[int]  # positions


def states(prompt: list[int], output: Output, block_length: int) -> Iterator[State]:
    """Every state of a row with a mask in it, in order."""
    done = prompt[: len(prompt) // block_length * block_length]
    for step, following in zip(output.steps, [*output.steps[1:], None], strict=True):
        yield State(done + step["before"], step["start"], step["bundle"])
        if following is None or following["start"] != step["start"]:
            done = done + step["after"]


def log_probs(model: Model, state: State, joint: bool) -> Tensor | None:
    """(positions, V) float32: Stage A's at the masks of the block, or the joint head's at its bundle, if it has one."""
    ids = torch.tensor([state.ids])
    ctx = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), model.compute_dtype)
    h = model.last_n(model.prefix(ids, ctx), ctx)[:, state.start :]
    if not joint:
        masked = ids[0, state.start :] == model.cfg.mask_id
        return model.head(h[:, masked])[0].log_softmax(-1)
    if len(state.bundle) < 2:
        return None
    bundle = torch.zeros(1, model.cfg.block_length, dtype=torch.bool)
    bundle[0, torch.tensor(state.bundle) - state.start] = True
    return model.head(model.second_look(h, bundle)).log_softmax(-1)


@torch.inference_mode()
def divergence(exact: Model, small: Model, seen: list[State], joint: bool) -> tuple[float, float, int]:
    """KL(exact || small), mean nats a position; share of positions with the same best token; positions."""
    total, same, count = 0.0, 0, 0
    for state in seen:
        p = log_probs(exact, state, joint)
        if p is None or not len(p):
            continue
        q = log_probs(small, state, joint)
        total += float(F.kl_div(q, p, log_target=True, reduction="sum"))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(p)
    return total / max(1, count), same / max(1, count), count


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


def share_that_exists(prompts: list[list[int]], outputs: list[Output], tokenizer: Tokenizer) -> str:
    """Of names: the share of completions that are some character's name."""
    written = [tokenizer.decode(p + o.tokens) for p, o in zip(prompts, outputs, strict=True)]
    return f"{sum(data.exists(name) is not None for name in written) / len(written):.3f}"


def compare(args: Namespace) -> None:
    """A table: a line for each decoder and each dtype of the int8 model's activations."""
    joint = args.adapter is not None
    names = args.data == "names"
    exact = load_model(args.ckpt, "cpu", torch.float32, args.adapter)
    tokenizer = load_tokenizer(args.ckpt, exact.cfg.tokenizer)
    prompts = read_prompts(args, exact.cfg, tokenizer)
    stage = "the joint head" if joint else "Stage A"
    print(f"{args.ckpt} against {args.int8}: {len(prompts)} prompts; probabilities of {stage}")
    table = []
    for name, d in decoders(args.gen_length, joint, exact.cfg.order).items():
        expected = generate(exact, prompts, d, trace=True)
        seen = [s for p, o in zip(prompts, expected, strict=True) for s in states(p, o, exact.cfg.block_length)]
        for dtype in DTYPES:
            small = load_model(args.int8, "cpu", DTYPES[dtype], args.adapter)
            given = generate(small, prompts, d)
            pairs = [(a.tokens, b.tokens) for a, b in zip(expected, given, strict=True)]
            whole = sum(a == b for a, b in pairs) / len(pairs)
            tokens = sum(equal_tokens(a, b) for a, b in pairs) / len(pairs)
            kl, best, count = divergence(exact, small, seen, joint)
            line = [name, dtype, f"{whole:.3f}", f"{tokens:.3f}", f"{kl:.6f}", f"{best:.4f}", str(count)]
            exist = [share_that_exists(prompts, outputs, tokenizer) for outputs in (expected, given) if names]
            table.append(line + exist)
    head = ["decoder", "activations", "answers equal", "tokens equal", "KL, nats", "same best", "positions"]
    head += ["exist, float32", "exist, int8"] if names else []
    print_table(head, table)


def golden(args: Namespace) -> None:
    """How many of the official code's recorded runs stay equal, token for token. Tiny random weights: a hard case."""
    path = args.golden / "expected.json"
    cases = data.read_json(path, "recorded runs")["cases"]
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
    parser.add_argument("--adapter", type=Path, help="a joint head, for both")
    parser.add_argument("--golden", type=Path, help="instead of --ckpt: a folder of recorded runs of the official code")
    parser.add_argument("--data", default="names", help="where prompts are from: names, stdlib, or a file or folder")
    parser.add_argument("--prompts", type=bounded(int, 1), default=256, help="held-out names, or texts")
    parser.add_argument("--gen_length", type=bounded(int, 1), default=32, help="tokens of an answer, at most")
    args = parser.parse_args()
    if (args.ckpt is None) == (args.golden is None):
        fail("give --ckpt, or --golden, and not both")
    if args.golden:
        golden(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
