"""Decoding: Stage A picks the bundle, Stage B writes it (paper, Sec. 4.2), block after block.

    generate_one    the decoder as the paper has it: one row, greedy, no cache. Read this one
    step            one denoising step of many rows, greedy or sampling
    generate        `step` in cache.py's loop, for many rows and with an exact cache; tested equal to generate_one

With --n_rounds 0 (Stage B off) this is LLaDA2.1's released generate(), token for token and forward for forward, edge
cases included: strict gates, edits while masks remain, mask as an ordinary candidate. One departure, stated when it
happens: a block that can never end (nothing changes any more, or MAX_STEPS forwards) is left with a warning.

    python sample.py --ckpt out/names --prompt "ARABIC LIGATURE"                     # streams text, counts forwards
    python sample.py --ckpt out/names --prompt "GREEK" --prompt "LATIN" --watch      # every step of every block
    python sample.py --ckpt DIR --prompt_ids 5,9,12 --n_rounds 0 --json > run.json   # tokens, counts, steps
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cache import MAX_STEPS, Cached, Output, decode, in_full
from checkpoint import DTYPES, load_model, load_tokenizer
from corrupt import first_masked
from data import Parser, Tokenizer, bounded, check_names, exists, fail, pick_device
from model import Config, Model, sequence_context

# R rows in flight, T positions, B block_length, V vocabulary, K = n_rounds

MODES = {
    "q": dict(tau_m2t=0.7, tau_t2t=0.5),  # the released settings: quality
    "s": dict(tau_m2t=0.5, tau_t2t=0.0),  # speed; 0.0 edits on any disagreement, None would switch edits off
}


@dataclass(frozen=True)
class Decoding:
    """The settings of a decode (the switches of the paper's Table 2 are released/ablation.py's)."""

    gen_length: int = 256
    tau_m2t: float = 0.7  # fill masks whose probability is above; -1: every mask at once
    tau_t2t: float | None = 0.5  # edit above; 0.0: on any disagreement; None: never
    max_post_steps: int = 16  # forwards after the last mask; without edits none, nothing can change any more
    num_to_transfer: int = 1
    eos_early_stop: bool = False
    n_rounds: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@torch.inference_mode()
def generate_one(model: Model, prompt: list[int], d: Decoding) -> tuple[list[int], dict[str, int], list[list[int]]]:
    """-> tokens, forwards by kind, and the current block before every forward. Slow, and obviously right."""
    cfg, B, K, n, ids = model.cfg, model.cfg.block_length, d.n_rounds, len(prompt), list(prompt)
    nfe, seen, gate = dict(full=0, partial=0, commit=0), [], math.inf if d.tau_t2t is None else d.tau_t2t
    for start in range(n // B * B, n + d.gen_length, B):
        z, post = torch.tensor([(ids + [cfg.mask_id] * B)[: start + B]]), 0  # (1, T), the current block last
        ctx = sequence_context(cfg, torch.ones_like(z, dtype=torch.bool), model.compute_dtype)
        editable = torch.arange(start + B) >= max(n, start)
        for _ in range(MAX_STEPS):
            seen.append(z[0, start:].tolist())
            masked, before = (z == cfg.mask_id) & (torch.arange(start + B) >= start), z  # a stuck block may lie before
            h = model.prefix(z, ctx)
            logits = model.head(model.last_n(h, ctx))  # Stage A
            p = logits.softmax(-1).amax(-1).masked_fill(~masked, -2)
            best = p.argsort(descending=True, stable=True)[:, : d.num_to_transfer]
            bundle = p > d.tau_m2t
            if bundle.sum() < d.num_to_transfer:
                bundle = masked & torch.zeros_like(masked).scatter(1, best, True)
            if bundle.any() and K:
                logits = model.head(model.coordinate(h, bundle, ctx, K))  # Stage B, Eq. 4
            p, token = logits.softmax(-1).max(-1)
            edit = ~masked & editable & (p > gate) & (token != z)  # Eq. 3
            z = torch.where(bundle | edit, token, z)  # Eq. 2: everything is read from z as it was before the step
            nfe["full"], nfe["partial"] = nfe["full"] + 1, nfe["partial"] + K * bool(bundle.any())
            changed, post = not torch.equal(before, z), post + (not (z[:, start:] == cfg.mask_id).any())
            if not changed or post > d.max_post_steps * (gate < math.inf):
                break
        ids = z[0].tolist()
        if d.eos_early_stop and cfg.eos_id in ids[n:] and cfg.mask_id not in ids[n:]:
            break
        if start + B < n + d.gen_length:  # the next block will read this one: as it is now, and in every round
            nfe["commit"], nfe["partial"] = nfe["commit"] + changed, nfe["partial"] + max(0, K - 1)
    new = ids[n : n + d.gen_length]
    return new[: new.index(cfg.eos_id) + 1] if cfg.eos_id in new else new, nfe, seen


def candidates(logits: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor]:
    """(R, B, V) -> each position's token (R, B) and its probability (R, B). Greedy: the argmax. With temperature:
    scale, top-k, top-p, renormalise, draw by u (R, B) in [0, 1); the probability is the filtered distribution's."""
    if d.temperature == 0:
        token = logits.argmax(-1)
        return token, logits.softmax(-1).gather(-1, token[..., None])[..., 0]
    logits = logits / d.temperature
    if d.top_k:
        kth = logits.topk(min(d.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    p = p.masked_fill(p.cumsum(-1) - p > d.top_p, 0.0)  # keep up to and with the token that crosses top_p
    cdf = p.cumsum(-1)
    rank = torch.searchsorted(cdf, u[..., None] * cdf[..., -1:], right=True)
    rank = rank.clamp(max=(p > 0).sum(-1, keepdim=True) - 1)
    return order.gather(-1, rank)[..., 0], (p / cdf[..., -1:]).gather(-1, rank)[..., 0]


def select_bundle(conf: Tensor, masked: Tensor, d: Decoding) -> Tensor:
    """The masked positions above tau_m2t, or the num_to_transfer most confident ones where fewer pass. (R, B) bool."""
    passing = masked & (conf > d.tau_m2t)
    size = torch.full_like(masked[:, :1], d.num_to_transfer, dtype=torch.long)
    best = first_masked(-conf, masked, size, masked.shape[1])
    return torch.where((passing.sum(-1) >= d.num_to_transfer)[:, None], passing, best)


def step(engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
    """One step on the current blocks z (R, B): everything is read from z and written at once.

    prompt (R, B) bool: positions that are never edited. busy: whether any row has a mask left (known to the host).
    u (R, 3, B): with temperature, each stage draws by its own numbers. Selection favours positions whose draw happened
    to be a likely token; Stage B's fresh draw undoes that bias, so what is written follows the model's probabilities.
    (The third row is there for an extension whose marker carries a number.)
    """
    masked, gate = z == engine.cfg.mask_id, math.inf if d.tau_t2t is None else d.tau_t2t
    h, logits_a = engine.stage_a(z)  # the full forward
    token_a, conf_a = candidates(logits_a, u[:, 0], d)
    bundle = select_bundle(conf_a, masked, d)
    token, conf = token_a, conf_a
    if busy and d.n_rounds:  # without a mask there is no bundle, and Stage B would be Stage A
        token_b, conf_b = candidates(engine.stage_b(h, bundle), u[:, 1], d)
        coordinated = bundle.any(-1, keepdim=True)  # a row without a bundle writes from Stage A
        token, conf = torch.where(coordinated, token_b, token_a), torch.where(coordinated, conf_b, conf_a)
    edited = ~masked & ~prompt & (conf > gate) & (token != z)
    after = torch.where(bundle | edited, token, z)
    return dict(before=z, after=after, bundle=bundle, edited=edited, conf=conf, token_a=token_a, conf_a=conf_a)


def generate(
    model: Model, prompts: list[list[int]], d: Decoding, seed: int = 0, trace: bool = False,
    on_block: Callable[[int, Output], None] | None = None,
) -> list[Output]:  # fmt: skip
    """Decode every prompt (ids), as if alone but for exact ties, by the model's own step (an extension's) or `step`."""
    return decode(model, prompts, d, getattr(model, "step", step), seed, trace, on_block)


# fmt: off
def build_parser() -> Parser:
    def ids(text: str) -> list[int]:
        return [int(i) for i in text.split(",")]
    p, probability = Parser(__doc__), bounded(float, -1, 1)
    g = p.add_argument_group("model")
    g.add_argument("--ckpt", default="out/names", help="checkpoint folder of train.py or convert_weights.py")
    g.add_argument("--adapter", help="folder that train.py --init_from DIR, or a script of beyond/, wrote")
    g.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    g.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    g = p.add_argument_group("prompts")
    g.add_argument("--prompt", action="append", default=[], help="text; repeat the flag for several rows")
    g.add_argument("--prompts_file", help="a text file, one prompt a line")
    g.add_argument("--prompt_ids", type=ids, action="append", default=[], help="token ids, 1,2,3; repeat for several")
    g = p.add_argument_group("decoding")
    g.add_argument("--mode", choices=MODES, default="q", help="tau_m2t and tau_t2t: q 0.7, 0.5 (see there); s 0.5, 0")
    g.add_argument("--gen_length", type=bounded(int, 1), default=256, help="tokens; the last block is decoded whole")
    g.add_argument("--n_rounds", type=bounded(int, 0),
                   help="K; 0: Stage B off, the released decoder (default: as trained; 0 where no marker was trained)")
    g.add_argument("--tau_m2t", type=probability, help="fill above this probability (-1: every mask at once)")
    g.add_argument("--tau_t2t", type=bounded(float, 0, 1, none=True), default=argparse.SUPPRESS,
                   help='edit above this; 0: on any disagreement; "none": never (default: the mode\'s where Stage B is '
                        "off, 0 where it is on, as in the paper)")
    g.add_argument("--max_post_steps", type=bounded(int, 0), default=16, help="forwards after the last mask, at most")
    g.add_argument("--run_on", dest="eos_early_stop", action="store_false", help="decode --gen_length past eos, too")
    g.add_argument("--temperature", type=bounded(float, 0), default=0.0, help="0: argmax")
    g.add_argument("--top_k", type=bounded(int, 0), default=0, help="with temperature: the k best tokens (0: all)")
    g.add_argument("--top_p", type=bounded(float, 1e-6, 1), default=1.0, help="with temperature: so much mass (1: all)")
    g.add_argument("--seed", type=int, default=0)
    g = p.add_argument_group("output")
    g.add_argument("--watch", action="store_true", help="show every step; on a terminal in place (▒ a mask, ∎ the end)")
    g.add_argument("--json", action="store_true", help="one JSON object a prompt; tools/trace_page makes a page of it")
    return p
# fmt: on


def read_prompts(args: argparse.Namespace, tokenizer: Tokenizer | None, cfg: Config, named: bool) -> list[list[int]]:
    """Every prompt as ids, each checked to fit the model. In names a blank belongs to the word after it."""
    try:
        texts = args.prompt + (Path(args.prompts_file).read_text("utf-8").splitlines() if args.prompts_file else [])
    except (OSError, UnicodeDecodeError) as e:
        fail(f"--prompts_file {args.prompts_file} cannot be read as text: {e}")
    if texts and tokenizer is None:
        fail("this checkpoint has no tokenizer (a toy's tokens are numbers): use --prompt_ids")
    prompts = [tokenizer.encode(text.rstrip() if named else text) for text in texts] + args.prompt_ids
    if not prompts:
        fail("nothing to continue: give --prompt TEXT, --prompts_file FILE or --prompt_ids 1,2,3")
    for n, prompt in enumerate(prompts, 1):
        need = -(-(len(prompt) + args.gen_length) // cfg.block_length) * cfg.block_length
        if not prompt:
            fail(f"prompt {n} is empty: the model continues a text, give it at least one token")
        if not all(0 <= i < cfg.vocab_size for i in prompt):
            fail(f"prompt {n} has ids outside 0..{cfg.vocab_size - 1}, the model's vocabulary")
        if need > cfg.max_len:
            fail(f"prompt {n} of {len(prompt)} tokens and --gen_length {args.gen_length} need {need} positions, the "
                 f"model has {cfg.max_len}: shorten one of them")  # fmt: skip
    return prompts


def settle_args(args: argparse.Namespace, model: Model) -> Decoding:
    """Flags -> Decoding. Edits are ungated where Stage B is on (the paper's default), unless --tau_t2t is given."""
    if (K := args.n_rounds) is None:  # zero markers, as a converted checkpoint has: Stage B would be Stage A
        K = model.cfg.n_rounds if model.markers.any() or hasattr(model, "step") else 0
    if model.cfg.n_rounds < K:
        fail(f"--n_rounds {K}: this checkpoint has markers for 0..{model.cfg.n_rounds} rounds")
    given = {k: v for k, v in vars(args).items() if k in Decoding.__dataclass_fields__ and v is not None}
    gates = MODES[args.mode] | ({"tau_t2t": 0.0} if K else {})
    gates |= {"tau_t2t": args.tau_t2t} if "tau_t2t" in args else {}  # None is a value: no edits
    return Decoding(**gates | given | {"n_rounds": K})


def show_steps(record: dict) -> None:
    """One line a step for the block, and one for each token written: Stage A's choice where Stage B's differs."""
    name, gap = record["pieces"], " " if record["text"] is None else ""  # a toy's tokens are numbers
    for n, s in enumerate(record["steps"], 1):
        print(f"step {n:3} block {s['start']}: {gap.join(name[str(i)] for i in s['before'])}")
        for f in s["fill"]:
            other = f"   (A: {name[str(f['token_a'])]} {f['conf_a']:.2f})" if f["token_a"] != f["token"] else ""
            print(f"    fill {f['at']:5} {name[str(f['token'])]!r} {f['conf']:.2f}{other}")
        for e in s["edit"]:
            print(f"    edit {e['at']:5} {name[str(e['old'])]!r} -> {name[str(e['token'])]!r} {e['conf']:.2f}")
        print(f"    left {s['after'].count(record['mask_id'])} masked")


def play(record: dict) -> None:
    """The steps on a terminal: each block fills in place, on one line cut at the width. What a step writes is inverse,
    before and after, Stage A's choice struck out beside it where Stage B wrote another; all plain under NO_COLOR."""
    gap, width = " " * (record["text"] is None), shutil.get_terminal_size().columns
    name = {int(i): piece.replace("·", " ") + gap for i, piece in record["pieces"].items()}
    new, struck, off = ("", "", "") if os.environ.get("NO_COLOR") else ("\x1b[7m", "\x1b[9m", "\x1b[0m")
    for n, (s, last) in enumerate(zip(record["steps"], [{}, *record["steps"]], strict=False), 1):
        wish = {f["at"]: f.get("token_a", f["token"]) for f in s["fill"] + s["edit"]}
        print(end="\n" if n > 1 and last["start"] != s["start"] else "")
        for state in ("before", "after"):
            drawn = list(f"step {n:3}  ")  # characters, each with its style
            for at, i in enumerate(s[state], s["start"]):
                drawn += [new + c + off for c in name[i]] if at in wish else name[i]
                if state == "after" and wish.get(at, i) != i:
                    drawn += [struck + c + off for c in f"(A:{name[wish[at]]})"]
            print("\r\x1b[K\x1b[?7l" + "".join(drawn[:width]) + "\x1b[?7h", end="", flush=True)  # [?7l: never wrap
            time.sleep(0.25)
    print()


def verdict(name: str) -> str:
    """Of a model of names: the character, or that there is none."""
    char, case = exists(name), "" if name.isupper() else "; names are in upper case"
    return f"   {char} (U+{ord(char):04X})" if char else f"   (no such character{case})"


def run(args: argparse.Namespace) -> None:
    model = load_model(args.ckpt, pick_device(args.device), DTYPES[args.dtype], args.adapter)
    cfg, d, named = model.cfg, settle_args(args, model), (Path(args.ckpt) / "names.json").exists()
    tokenizer = load_tokenizer(Path(args.ckpt), cfg.tokenizer)
    prompts = read_prompts(args, tokenizer, cfg, named)
    judged = named and tokenizer and check_names(Path(args.ckpt), [tokenizer.decode(p) for p in prompts])
    traced, shown = args.watch or args.json, ""

    def stream(row: int, output: Output) -> None:
        nonlocal shown  # blocks as they finish, never half a character
        text = tokenizer.decode(prompts[0] + output.tokens).rstrip("\ufffd")
        print(text[len(shown) :], end="", flush=True)
        shown = text

    on_block = stream if len(prompts) == 1 and tokenizer and not traced else None
    for prompt, output in zip(prompts, generate(model, prompts, d, args.seed, traced, on_block), strict=True):
        text = tokenizer.decode(prompt + output.tokens) if tokenizer else str(output.tokens)
        n, nfe = len(output.tokens), output.nfe | {"all": in_full(output.nfe, cfg), "passes": output.passes}
        ids = {*prompt, *(i for s in output.steps for i in [*s["after"], *(f["token_a"] for f in s["fill"])])}
        pieces = {str(i): tokenizer.piece(i) if tokenizer else str(i) for i in sorted(ids)}
        record = dict(text=tokenizer and tokenizer.decode(output.tokens), tokens=output.tokens, steps=output.steps,
                      verdict=verdict(text).strip() if judged else None, nfe=nfe, nfe_per_token=nfe["full"] / max(1, n),
                      prompt=prompt, mask_id=cfg.mask_id, n_rounds=d.n_rounds,
                      pieces=pieces | {str(cfg.eos_id): "∎", str(cfg.mask_id): "▒"})  # fmt: skip
        if output.warning:
            print(f"warning: {output.warning}", file=sys.stderr)
        if args.json:
            print(json.dumps(record))
            continue
        if args.watch:
            (play if sys.stdout.isatty() else show_steps)(record)
        print(text[len(shown) :] + (verdict(text) if judged else ""))
        print(f"[{n} tokens; forwards: {nfe['full']} full, {nfe['partial']:g} partial (x {cfg.n_last}/{cfg.n_layer}), "
              f"{nfe['commit']} commit; {nfe['passes']} passes; {record['nfe_per_token']:.3f} full a token, "
              f"{nfe['all'] / max(1, n):.3f} in all]")  # fmt: skip


def main(args: argparse.Namespace | None = None) -> None:
    try:
        run(args or build_parser().parse_args())
    except KeyboardInterrupt:
        fail("interrupted")
    except torch.OutOfMemoryError:
        fail("out of memory: add --dtype bf16, shorten --gen_length, or give fewer prompts")


if __name__ == "__main__":
    main()
