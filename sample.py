"""Decoding, block after block: Stage A picks the bundle, or all masks are it, and Stage B writes (paper, Sec. 4.2).

    denoise         one step of the paper on the current blocks: Eq. 4, 2 and 3
    longest_run     one step of causal Stage B: it looks at all masks, and writes what it is sure of together
    generate_one    the decoder as the paper has it: one row, greedy, no cache. Read this one
    generate        the same for many rows, with an exact cache and temperature; tested equal to generate_one

With --n_rounds 0 (Stage B off) and a gate on edits this is LLaDA2.1's released generate(), token for
token and forward for forward. Two things differ: without edits (--tau_t2t none) a block ends with its
last mask, which the released loop reads once more; and a block that can never end is left, with a warning.

    python sample.py --prompt "CANADIAN"                            # text, and what it cost in forwards
    python sample.py --prompt "MATHEMATICAL ▒▒▒▒ CAPITAL B" --watch  # every step; each ▒ is a token to fill
    python sample.py --prompt "CANADIAN" --ckpt assets/names/paper  # the paper's Stage B
    python sample.py --ckpt DIR --prompt_ids 5,9,12 --n_rounds 0    # token ids, and Stage A alone

A hole sees its own block and what is before it, not later blocks: attention is causal across blocks.

To change   how a step selects and writes   write   a function like denoise, of a causal Stage B like longest_run, and
                                                    call generate(model, prompts, d, step=yours) with, say,
                                                    d = Decoding(tau_joint=0.5, tau_t2t=None, holes=True);
                                                    load_model and load_tokenizer(base_of(folder)) read a folder
"""

import argparse
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cache import Cached, Output, Row, Uncached, in_full, up_to_eos
from checkpoint import DTYPES, base_of, judge_of, load_model
from lib.tokenizer import Tokenizer, load_tokenizer
from lib.util import (
    MASK,
    Parser,
    bounded,
    command,
    fail,
    first_masked,
    or_none,
    pick_device,
    printable,
    uniform,
    verdict,
)
from model import Config, Model

# R rows in flight, T positions, B block_length, C channels, V vocabulary, K = n_rounds

MAX_STEPS = 1024  # forwards in one block


@dataclass(frozen=True)
class Decoding:
    """The settings of a decode. As they stand here they are the paper's, but for gen_length, which is 16,384 there."""

    gen_length: int = 256  # tokens; the last block is decoded whole
    tau_m2t: float = 0.7  # fill masks whose probability is above; -1: every mask at once
    tau_t2t: float | None = 0.0  # edit a visible token where another has more than this; None: never
    n_rounds: int = 1  # K; 0: Stage B is off
    tau_joint: float | None = None  # causal: write the longest run that is surer than this; None: by the paper's gates
    max_post_steps: int = 16  # forwards after the last mask
    num_to_transfer: int = 1  # masks that are written in a step at least
    eos_early_stop: bool = True
    holes: bool = False  # fill the masks in a prompt, too; the released decoder leaves them
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0

    @property
    def edit_gate(self) -> float:
        """What a probability must exceed to edit: nothing does where edits are off."""
        return math.inf if self.tau_t2t is None else self.tau_t2t

    @property
    def post_steps(self) -> int:
        """Forwards after the last mask: without edits nothing can change any more."""
        return 0 if self.tau_t2t is None else self.max_post_steps


@dataclass
class Step:
    """What a step did to the current blocks, and what it cost beside Stage A's forward."""

    z: Tensor  # (R, B) int64, before it
    after: Tensor  # (R, B) int64
    bundle: Tensor  # (R, B) bool: the masks that it wrote
    edited: Tensor  # (R, B) bool
    token: Tensor  # (R, B) int64: what it would write at each position
    conf: Tensor  # (R, B) float32: how probable that is
    token_a: Tensor  # (R, B) int64: what Stage A would write
    conf_a: Tensor  # (R, B) float32
    partial: Tensor  # (R,) float32: partial forwards


# --- one step
def denoise(engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """One step on the current blocks z (R, B) int64: everything is read from z and written at once.

    given (R, B) bool: positions that are never edited. u (R, 2, B) in [0, 1): each stage draws by its own
    numbers. Selection favours positions whose draw happened to be likely; Stage B draws anew, so that
    what is written follows the model's probabilities.
    """
    model = engine.model
    masked = z == model.cfg.mask_id
    visible = ~masked & ~given

    # Stage A: one full forward
    h, states = engine.stage_a(z)
    logits_a = model.logits(states)
    token_a, conf_a = candidates(logits_a, u[:, 0], d)

    # which masks are written now
    bundle = select_bundle(conf_a, masked, d.tau_m2t, d.num_to_transfer)

    # Stage B looks again, at the bundle (Eq. 4); a row without a bundle stays with Stage A
    token = token_a
    conf = conf_a
    coordinated = bundle.any(-1, keepdim=True) & (d.n_rounds > 0)
    if coordinated.any():
        states = engine.stage_b(h, bundle, torch.where(bundle, token_a, z))
        token_b, conf_b = candidates(model.logits_b(states, logits_a), u[:, 1], d)
        token = torch.where(coordinated, token_b, token_a)
        conf = torch.where(coordinated, conf_b, conf_a)

    # fill the bundle (Eq. 2), edit what is visible (Eq. 3), both from z as it was
    edited = visible & (conf > d.edit_gate) & (token != z)
    after = torch.where(bundle | edited, token, z)
    partial = d.n_rounds * coordinated[:, 0].float()
    return Step(z, after, bundle, edited, token, conf, token_a, conf_a, partial)


def longest_run(engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """One step of causal Stage B, see denoise: the bundle is all masks of a block.

    It looks until every token has read tokens that are final, and writes the longest run from the left whose
    probabilities have a product above tau_joint, and at least one token. Nothing is edited. With Stage B off tokens and
    probabilities are Stage A's; a Stage B that sees no tokens looks once.
    """
    model = engine.model
    masked = z == model.cfg.mask_id

    # Stage A: one full forward. Its tokens are the first drafts, drawn by the numbers that Stage B draws by
    h, states = engine.stage_a(z)
    logits_a = model.logits(states)
    token_a, conf_a = candidates(logits_a, u[:, 1], d)
    token = torch.where(masked, token_a, z)
    conf = torch.where(masked, conf_a, 1.0)
    final = ~masked | (d.n_rounds == 0)

    # a look of the rows that are not done: each token is read after the drafts before it. A row is done when all is
    # final, or when what is final falls below the gate
    gate = math.log(d.tau_joint) if d.tau_joint > 0 else -math.inf
    looks = torch.zeros_like(conf[:, 0])
    while (live := ~final.all(-1) & (torch.where(final, conf, 1.0).log().sum(-1) > gate)).any():
        rows = live.nonzero()[:, 0]
        states = engine.stage_b(h, masked, token, rows)
        found, p = candidates(model.logits_b(states, logits_a[rows]), u[rows, 1], d)
        found = torch.where(final[rows], token[rows], found)
        conf[rows] = torch.where(final[rows], conf[rows], p)

        # what has read nothing but final tokens is final: all up to and with the first that differs from its draft
        differs = (found != token[rows]) & model.cfg.causal
        final[rows] |= differs.cumsum(-1) - differs.long() == 0
        token[rows] = found
        looks += live

    # write the longest run, and at least its first token
    sure = masked & final & (conf.log().cumsum(-1) > gate)
    bundle = sure | (masked & (masked.cumsum(-1) == 1))
    after = torch.where(bundle, token, z)
    return Step(z, after, bundle, torch.zeros_like(masked), token, conf, token_a, conf_a, d.n_rounds * looks)


def select_bundle(probability: Tensor, masked: Tensor, tau_m2t: float, at_least: int = 1) -> Tensor:
    """The masks whose best token's probability is above tau_m2t, or the `at_least` surest, if that is more.

    probability (R, B) float32, masked (R, B) bool -> (R, B) bool.
    """
    passing = masked & (probability > tau_m2t)
    surest = first_masked(-probability, masked, at_least)
    enough = passing.sum(-1, keepdim=True) >= at_least
    return torch.where(enough, passing, surest)


def candidates(logits: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor]:
    """Each position's token and its probability: logits (..., V) -> (...) int64, (...) float32.

    Greedy: the argmax. With temperature: drawn by u (...) in [0, 1) from what the filters leave.
    """
    if d.temperature == 0:
        token = logits.argmax(-1)
        p = logits.softmax(-1).gather(-1, token[..., None])
        return token, p[..., 0]

    # scale, and cut to the top k
    logits = logits / d.temperature
    if d.top_k:
        kth = logits.topk(min(d.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))

    # cut to top_p: up to and with the token that crosses it
    p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    p = p.masked_fill(p.cumsum(-1) - p > d.top_p, 0.0)

    # draw: the token in whose share of the mass that is left u falls
    cdf = p.cumsum(-1)
    mass = cdf[..., -1:]
    place = torch.searchsorted(cdf, u[..., None] * mass, right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    place = torch.minimum(place, last)  # rounding: not past the last one
    return order.gather(-1, place)[..., 0], (p / mass).gather(-1, place)[..., 0]


def step_of(d: Decoding) -> Callable[..., Step]:
    """The paper's step, or causal Stage B's."""
    return denoise if d.tau_joint is None else longest_run


# --- the decoder as the paper has it
@torch.inference_mode()
def generate_one(
    model: Model, prompt: list[int], d: Decoding, step: Callable[..., Step] | None = None
) -> tuple[list[int], dict[str, float], list[list[int]]]:
    """Continue one prompt, greedily -> tokens, forwards, the block before each forward.

    Slow: every forward reads the whole text again. It is the specification of `generate`.
    """
    step = step or step_of(d)
    mask_id = model.cfg.mask_id
    B = model.cfg.block_length
    device = model.wte.weight.device
    end = len(prompt) + d.gen_length

    # decoding begins with the block where the prompt ends, or where its first hole is
    first = len(prompt)
    if d.holes and mask_id in prompt:
        first = prompt.index(mask_id)
    start = first // B * B
    ids = prompt[:start]
    engine = Uncached(model, [ids], d.n_rounds)

    nfe = dict(full=0, partial=0, refresh=0)
    seen = []
    while start < end:
        # what the prompt has of this block, then masks
        of_prompt = prompt[start : start + B]
        z = torch.tensor([of_prompt + [mask_id] * (B - len(of_prompt))], device=device)  # (1, B)
        given = torch.arange(B, device=device)[None] < len(of_prompt)
        if d.holes:
            given = given & (z != mask_id)

        steps_without_mask = 0
        for _ in range(MAX_STEPS):
            # one step of denoising, and what it cost
            seen.append(z[0].tolist())
            done = step(engine, z, given, torch.zeros(1, 2, B, device=device), d)
            nfe["full"] += 1
            nfe["partial"] += float(done.partial)

            # a block is finished when nothing changes, or after max_post_steps without a mask
            changed = not torch.equal(done.after, z)
            z = done.after
            if mask_id not in z[0]:
                steps_without_mask += 1
            if not changed or steps_without_mask > d.post_steps:
                break

        engine.close([0], z, changed)
        ids = ids + z[0].tolist()
        start += B
        new = ids[len(prompt) :]
        if d.eos_early_stop and model.cfg.eos_id in new and mask_id not in new:
            break

        # a decoder with a cache must read the block once more if its last step changed it, and
        # once for each further round: that is counted here, too
        if start < end:
            nfe["refresh"] += int(changed)
            nfe["partial"] += max(0, d.n_rounds - 1)
    return up_to_eos(ids[len(prompt) : end], model.cfg.eos_id), nfe, seen


# --- the same for many rows
@torch.inference_mode()
def generate(
    model: Model, prompts: list[list[int]], d: Decoding, seed: int = 0, step: Callable[..., Step] | None = None,
    on_step: Callable[[list[Row], Step], None] | None = None, cached: bool = True,
) -> list[Output]:  # fmt: skip
    """Decode every prompt as if alone (up to exact ties, which more rows may round otherwise).

    on_step(rows in flight, what the step did) sees every step.
    """
    step = step or step_of(d)
    device = model.wte.weight.device
    rows = [Row(i, prompts, d, model.cfg, seed) for i in range(len(prompts))]
    outputs = [row.output for row in rows]
    # nothing is asked for behind whole blocks
    rows = [row for row in rows if len(row.ids) < len(row.prompt) + d.gen_length]
    if not rows:
        return outputs
    engine = (Cached if cached else Uncached)(model, [row.ids for row in rows], d.n_rounds)

    # the current blocks; and of each: forwards, partial ones, steps without a mask
    z = torch.tensor([row.block() for row in rows], device=device)
    given = torch.tensor([row.given() for row in rows], device=device)
    counts = torch.zeros(3, len(rows), device=device)
    while True:
        # one step, and what it cost
        done = step(engine, z, given, random_numbers(rows, d, z), d)
        if on_step:
            on_step(rows, done)
        changed = (done.after != z).any(-1)  # (R,)
        z = done.after
        masked = (z == model.cfg.mask_id).any(-1)
        counts += torch.stack([torch.ones_like(done.partial), done.partial, ~masked])

        # the blocks that are finished: nothing changes any more, or a bound is reached
        still = ~changed
        if d.temperature > 0:  # a sampled step may change nothing, and the next one something
            still = still & ~masked
        finished = still | (counts[2] > d.post_steps) | (counts[0] >= MAX_STEPS)
        finished, changed = torch.stack([finished, changed]).tolist()

        # book them; a row whose last block it was leaves
        staying = []
        for r, row in enumerate(rows):
            full, partial, _ = counts[:, r].tolist() if finished[r] else (0, 0, 0)
            if not (finished[r] and row.finish(z[r].tolist(), full, partial, changed[r])):
                staying.append(r)
        if not staying:
            return outputs
        if len(staying) < len(rows):
            engine.keep(staying)
            rows = [rows[r] for r in staying]
            z = z[staying]
            given = given[staying]
            counts = counts[:, staying]

        # a finished block joins the context, and the row begins its next one
        closed = [place for place, r in enumerate(staying) if finished[r]]
        if closed:
            engine.close(closed, z, any(changed[staying[place]] for place in closed))
            z[closed] = torch.tensor([rows[place].block() for place in closed], device=device)
            given[closed] = torch.tensor([rows[place].given() for place in closed], device=device)
            counts[:, closed] = 0


def random_numbers(rows: list[Row], d: Decoding, z: Tensor) -> Tensor:
    """(R, 2, B) in [0, 1) for z (R, B), by each row's own generator; 0 where none is drawn."""
    R, B = z.shape
    if d.temperature == 0:
        return torch.zeros(R, 2, B, device=z.device)
    return uniform([row.rng for row in rows], 2 * B).view(R, 2, B).to(z.device)


# --- what is asked for
def token_ids(text: str) -> list[int]:
    """1,2,3 -> [1, 2, 3]"""
    try:
        return [int(i) for i in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ids like 1,2,3") from None


def temperature(text: str) -> float:
    """0, or so much that logits divided by it stay finite."""
    value = bounded(float, 0)(text)
    if 0 < value < 1e-3:
        raise argparse.ArgumentTypeError(f"{value:g} is as good as 0, which is greedy: give 0, or at least 0.001")
    return value


def build_parser() -> Parser:
    parser = Parser(__doc__)
    some = bounded(int, 0, 10**9)
    share = bounded(float, 0, 1)

    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--ckpt", type=Path, default=Path("assets/names/causal"),
        help="a model's folder, or an adapter's (default: %(default)s)")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations (default: %(default)s)")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[],
        help=f"text, in which each {MASK} is one token to fill; repeat the flag for several rows")
    add("--prompt_ids", type=token_ids, action="append", default=[],
        help="token ids, 1,2,3; repeat for several rows")

    add = parser.add_argument_group("decoding").add_argument
    add("--gen_length", type=some, default=256,
        help="tokens after the prompt; the last block is decoded whole (default: %(default)s)")
    add("--n_rounds", type=some,
        help="K; 0: Stage B off (default: the checkpoint's own; 0 where its markers are zero)")
    add("--tau_joint", type=share,
        help="causal Stage B: write the longest run of masks whose tokens together are surer than this; 0: all of a "
             "block. With Stage B off the run is Stage A's (default: 0.5 for a causal Stage B)")
    add("--tau_m2t", type=bounded(float, -1, 1),
        help="the paper's bundle: the masks whose probability is above; -1: every mask at once (default: 0.7, where "
             "--tau_joint is not used)")
    add("--tau_t2t", type=or_none(share), default=argparse.SUPPRESS,
        help='edit above this; 0: on any disagreement; "none": never (default: 0 as in the paper, 0.5 as released '
             "where Stage B is off, none with --tau_joint)")
    add("--temperature", type=temperature, default=0.0, help="0: argmax; else at least 0.001 (default: 0)")
    add("--top_k", type=some, default=0, help="with temperature: the k best tokens (default: 0, all)")
    add("--top_p", type=bounded(float, 1e-6, 1), default=1.0, help="with temperature: so much mass (default: 1)")
    add("--seed", type=int, default=0, help="any whole number, of any size: it is hashed (default: 0)")

    add = parser.add_argument_group("output").add_argument
    add("--watch", action="store_true", help="show every step")
    # fmt: on
    return parser


def settle_decoding(args: Namespace, model: Model) -> Decoding:
    """Stage B is on where it was trained; with the zero markers of a converted checkpoint it is Stage A."""
    n_rounds = args.n_rounds
    if n_rounds is None:
        n_rounds = model.cfg.n_rounds if model.markers.any() else 0
    if n_rounds > model.cfg.n_rounds:
        fail(f"--n_rounds {n_rounds}: this checkpoint has markers for 0..{model.cfg.n_rounds} rounds")

    # causal Stage B writes runs, or the paper's bundle where its gate is given
    tau_joint = args.tau_joint
    if tau_joint is None and model.cfg.causal and n_rounds > 0 and args.tau_m2t is None:
        tau_joint = 0.5
    usual = 0.5 if n_rounds == 0 else 0.0
    if tau_joint is not None:
        usual = None
        if args.tau_m2t is not None or vars(args).get("tau_t2t") is not None:
            fail("--tau_joint writes runs and edits nothing: leave out --tau_m2t and --tau_t2t, or it")
    return Decoding(
        gen_length=args.gen_length, tau_m2t=0.7 if args.tau_m2t is None else args.tau_m2t,
        tau_t2t=vars(args).get("tau_t2t", usual), n_rounds=n_rounds, tau_joint=tau_joint, holes=True,
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
    )  # fmt: skip


def read_prompts(
    args: Namespace, tokenizer: Tokenizer | None, cfg: Config, gen_length: int, of_names: bool
) -> list[list[int]]:
    """Every prompt as ids, each checked to fit the model."""
    if args.prompt and tokenizer is None:
        fail("this checkpoint has no tokenizer (a toy's tokens are numbers): use --prompt_ids")
    prompts = [encode_with_holes(text, tokenizer, cfg.mask_id, of_names) for text in args.prompt]
    prompts += args.prompt_ids
    if not prompts:
        fail("nothing to continue: give --prompt TEXT or --prompt_ids 1,2,3")
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, number, gen_length, cfg)
    return prompts


def encode_with_holes(text: str, tokenizer: Tokenizer, mask_id: int, of_names: bool) -> list[int]:
    """Text to ids; each MASK in it is one mask."""
    ids = []
    for part in text.split(MASK):
        if of_names:  # in names a blank belongs to the word after it
            part = part.rstrip()
        ids += [*tokenizer.encode(part), mask_id]
    return ids[:-1]


def check_prompt(prompt: list[int], number: int, gen_length: int, cfg: Config) -> None:
    if not prompt:
        fail(f"prompt {number} is empty: the model continues a text, give it at least one token")
    if not all(0 <= i < cfg.vocab_size for i in prompt):
        fail(f"prompt {number} has ids outside 0..{cfg.vocab_size - 1}, the model's vocabulary")
    # the last block is decoded whole
    need = math.ceil((len(prompt) + gen_length) / cfg.block_length) * cfg.block_length
    if need > cfg.max_len:
        fail(
            f"prompt {number} of {len(prompt)} tokens and --gen_length {gen_length} need {need} positions, the model "
            f"has {cfg.max_len}: shorten one of them"
        )


# --- what is shown
def what_ran(model: Model, d: Decoding) -> str:
    """The last line of every run: Stage B, n = 3 of 8, K = 1, gates 0.7 and 0"""
    stage = "Stage A alone"
    if d.n_rounds > 0:
        kind = "causal Stage B" if model.cfg.causal else "Stage B"
        stage = f"{kind}, n = {model.cfg.n_last} of {model.cfg.n_layer}, K = {d.n_rounds}"
    if d.tau_joint is not None:
        return f"{stage}, the longest run above {d.tau_joint:g}"
    edits = "none" if d.tau_t2t is None else f"{d.tau_t2t:g}"
    return f"{stage}, gates {d.tau_m2t:g} and {edits}"


def write(args: Namespace, model: Model) -> None:
    """Continue every prompt, and print what came of it."""
    tokenizer = load_tokenizer(base_of(args.ckpt))
    d = settle_decoding(args, model)

    # what is continued; a model of names is judged
    judged = "names" in judge_of(args.ckpt)
    prompts = read_prompts(args, tokenizer, model.cfg, d.gen_length, judged)

    # every step is shown where it is asked for
    on_step = None
    if args.watch:
        from tools.watch import Screen

        on_step = Screen(len(prompts), tokenizer, model.cfg.mask_id, model.cfg.eos_id).on_step
    outputs = generate(model, prompts, d, args.seed, on_step=on_step)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.warning:
            print(f"warning: {output.warning}", file=sys.stderr)

        # the text, or a toy's numbers
        text = tokenizer.decode(output.prompt + output.tokens) if tokenizer else ""
        said = ["  " + verdict(text)] if judged else []
        print(printable(text) or output.tokens, *said)

        # what it cost
        n = len(output.tokens) + prompt.count(model.cfg.mask_id)
        nfe = output.nfe
        total = in_full(nfe, model.partial_cost)
        print(f"[{n} tokens; forwards: {nfe['full']} full + {nfe['partial']:g} partial x {model.partial_cost:.3g} + "
              f"{nfe['refresh']} refresh = {total:.3g}, {total / max(1, n):.3f} per token]")  # fmt: skip
    print(f"[{what_ran(model, d)}]")


@command
def main() -> None:
    args = build_parser().parse_args()
    model = load_model(args.ckpt, pick_device(args.device), DTYPES[args.dtype])
    write(args, model)


if __name__ == "__main__":
    main()
