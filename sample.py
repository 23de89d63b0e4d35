"""Decoding: Stage A picks the bundle, Stage B writes it (paper, Sec. 4.2), block after block.

    generate_one    the decoder as the paper has it: one row, greedy, no cache. Read this one
    step            one denoising step of many rows, greedy or sampling
    generate        `step` in cache.py's loop, for many rows and with an exact cache; tested equal to generate_one

With --n_rounds 0 (Stage B off) and a gate on edits this is LLaDA2.1's released generate(), token
for token and forward for forward, edge cases included: strict gates, edits while masks remain, mask
as an ordinary candidate. It departs from it in two ways:

  - Without edits (--tau_t2t none) a block ends with its last mask. The released loop, with a gate that nothing passes,
    reads the block once more and finds nothing to do: the same tokens, one forward more in every block.
  - A block that can never end (nothing changes any more, or MAX_STEPS forwards) is left with a warning.

    python sample.py --ckpt out/names --prompt "ARABIC LIGATURE"                     # streams text, counts forwards
    python sample.py --ckpt out/names --prompt "GREEK" --prompt "LATIN" --watch      # every step of every block
    python sample.py --ckpt DIR --prompt_ids 5,9,12 --n_rounds 0 --json > run.json   # tokens, counts, steps

To change   which masks are written in a step   edit   select_bundle, which generate_one and step both use
            what is printed, and the flags             show.py
"""

import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cache import MAX_STEPS, Cached, Output, decode, up_to_eos
from checkpoint import DTYPES, load_model, load_tokenizer
from lib import show
from lib.data import check_names
from lib.util import fail, first_masked, pick_device
from model import Context, Model, sequence_context

# R rows in flight, T positions, B block_length, V vocabulary, K = n_rounds

MODES = {
    "q": dict(tau_m2t=0.7, tau_t2t=0.5),  # the released settings: quality
    "s": dict(tau_m2t=0.5, tau_t2t=0.0),  # speed
}


@dataclass(frozen=True)
class Decoding:
    """The settings of a decode. (The switches of the paper's Table 2 are released/ablation.py's.)"""

    gen_length: int = 256
    tau_m2t: float = 0.7  # fill masks whose probability is above; -1: every mask at once
    # edit a visible token where another has more than this; 0.0: on any disagreement; None: never.
    # "default": 0.0 where Stage B is on, as in the paper; 0.5 where it is off, as released
    tau_t2t: float | str | None = "default"
    max_post_steps: int = 16  # forwards after the last mask; without edits none, nothing can change any more
    num_to_transfer: int = 1  # masks that are written in a step at least
    eos_early_stop: bool = True
    n_rounds: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.tau_t2t == "default":
            gate = 0.0 if self.n_rounds > 0 else MODES["q"]["tau_t2t"]
            object.__setattr__(self, "tau_t2t", gate)

    @property
    def edits(self) -> bool:
        return self.tau_t2t is not None

    @property
    def edit_gate(self) -> float:
        """What an edit's probability must exceed; nothing exceeds infinity."""
        if self.tau_t2t is None:
            return math.inf
        return self.tau_t2t


# --- the decoder as the paper has it
@torch.inference_mode()
def generate_one(model: Model, prompt: list[int], d: Decoding) -> tuple[list[int], dict[str, int], list[list[int]]]:
    """Continue one prompt (ids), greedily -> tokens, forwards by kind, and the current block before
    every forward.

    Slow: every forward reads the whole text again. It is the specification of `generate`.
    """
    cfg = model.cfg
    B = cfg.block_length
    n_prompt = len(prompt)
    end = n_prompt + d.gen_length
    first_block = n_prompt // B * B  # where the block starts in which the prompt ends

    ids = list(prompt)
    nfe = dict(full=0, partial=0, commit=0)
    seen = []
    for start in range(first_block, end, B):
        # the text so far, then masks to the end of this block
        z = torch.tensor([ids + [cfg.mask_id] * (start + B - len(ids))])  # (1, T)
        position = torch.arange(start + B)
        in_block = position >= start
        generated = position >= n_prompt
        ctx = sequence_context(cfg, torch.ones_like(z, dtype=torch.bool), model.compute_dtype)

        steps_without_mask = 0
        for _ in range(MAX_STEPS):
            seen.append(z[0, start:].tolist())
            before = z

            # one step of denoising
            z, bundle = denoise(model, z, in_block, generated, ctx, d)

            # what it cost
            nfe["full"] += 1
            if bundle.any():
                nfe["partial"] += d.n_rounds

            # a block is finished when nothing changes, or after max_post_steps without a mask
            changed = not torch.equal(z, before)
            if cfg.mask_id not in z[0, start:]:
                steps_without_mask += 1
            post_steps = d.max_post_steps if d.edits else 0
            if not changed or steps_without_mask > post_steps:
                break

        ids = z[0].tolist()
        new = ids[n_prompt:]
        if d.eos_early_stop and cfg.eos_id in new and cfg.mask_id not in new:
            break

        # a decoder with a cache must read the block once more if its last step changed it, and
        # once for each further round: that is counted here, too
        if start + B < end:
            nfe["commit"] += int(changed)
            nfe["partial"] += max(0, d.n_rounds - 1)
    return up_to_eos(ids[n_prompt:end], cfg.eos_id), nfe, seen


def denoise(
    model: Model, z: Tensor, in_block: Tensor, generated: Tensor, ctx: Context, d: Decoding
) -> tuple[Tensor, Tensor]:
    """One step on the current block: z (1, T) int64 -> what it becomes, and the bundle (1, T) bool.

    in_block and generated (T,) bool: the current block's positions, and all behind the prompt.
    """
    # a mask in an earlier block was left there for good
    masked = in_block & (z == model.cfg.mask_id)
    visible = in_block & generated & ~masked

    # Stage A: one full forward
    h = model.prefix(z, ctx)
    logits = model.head(model.last_n(h, ctx))

    # which masks are written now
    probability = logits.softmax(-1).amax(-1)
    bundle = select_bundle(probability, masked, d, model.cfg.order)

    # Stage B looks at the bundle again (Eq. 4), unless there is none
    if d.n_rounds > 0 and bundle.any():
        logits = model.head(model.coordinate(h, bundle, ctx, d.n_rounds))

    # fill the bundle (Eq. 2) and edit what is visible (Eq. 3), both from z as it was
    probability, token = logits.softmax(-1).max(-1)
    edited = visible & (probability > d.edit_gate) & (token != z)
    return torch.where(bundle | edited, token, z), bundle


def select_bundle(probability: Tensor, masked: Tensor, d: Decoding, order: str) -> Tensor:
    """Which masks are written in this step: those that pass tau_m2t, or the first num_to_transfer of
    the order where fewer pass.

    surest      passes where its probability is above tau_m2t (the paper)
    leftmost    passes where the product of the masks' probabilities, up to and with its own, is

    probability (R, T) float32, the best token's at every position; masked (R, T) bool -> (R, T)
    bool.
    """
    if order == "leftmost":
        together = torch.where(masked, probability, 1.0).cumprod(-1)
        passing = masked & (together > d.tau_m2t)
    else:
        passing = masked & (probability > d.tau_m2t)

    # the first ones of the order, the leftmost of equals
    size = torch.full_like(masked[:, :1], d.num_to_transfer, dtype=torch.long)
    first = first_masked(precedence(probability, order), masked, size, masked.shape[1])

    enough = passing.sum(-1, keepdim=True) >= d.num_to_transfer
    return torch.where(enough, passing, first)


def precedence(probability: Tensor, order: str) -> Tensor:
    """What comes first in this order has the smallest number: (R, T) float32 -> (R, T) float32."""
    if order == "leftmost":
        place = torch.arange(probability.shape[1], device=probability.device)
        return place.to(probability.dtype).expand_as(probability)
    return -probability


# --- the same for many rows, and with temperature
def step(engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
    """One step on the current blocks z (R, B): everything is read from z and written at once.

    prompt (R, B) bool: positions that are never edited
    any_masked: whether any row has a mask left, which the host knows
    u (R, 3, B) in [0, 1): with temperature, each stage draws by its own numbers (the third row is
        for an extension whose marker carries a number)

    With temperature, selection favours positions whose draw happened to be a likely token. Stage B
    draws anew and so undoes that bias: what is written follows the model's probabilities.
    """
    masked = z == engine.cfg.mask_id
    visible = ~masked & ~prompt

    # Stage A: one full forward
    h, logits_a = engine.stage_a(z)
    token_a, conf_a = candidates(logits_a, u[:, 0], d)

    # which masks are written now
    bundle = select_bundle(conf_a, masked, d, engine.cfg.order)

    # Stage B looks at the bundles again; a row without one writes from Stage A
    token = token_a
    conf = conf_a
    if d.n_rounds > 0 and any_masked:
        token_b, conf_b = candidates(engine.stage_b(h, bundle), u[:, 1], d)
        coordinated = bundle.any(-1, keepdim=True)
        token = torch.where(coordinated, token_b, token_a)
        conf = torch.where(coordinated, conf_b, conf_a)

    # fill the bundle (Eq. 2), edit what is visible (Eq. 3)
    edited = visible & (conf > d.edit_gate) & (token != z)
    after = torch.where(bundle | edited, token, z)
    return dict(before=z, after=after, bundle=bundle, edited=edited, conf=conf, token_a=token_a, conf_a=conf_a)


def candidates(logits: Tensor, u: Tensor, d: Decoding) -> tuple[Tensor, Tensor]:
    """Each position's token and its probability: logits (..., V) -> (...) int64, (...) float32.

    Greedy: the argmax. With temperature: scale, top-k, top-p, renormalise, draw by u (...) in [0,
    1); the probability is the filtered distribution's.
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


def generate(
    model: Model, prompts: list[list[int]], d: Decoding, seed: int = 0, trace: bool = False,
    on_block: Callable[[int, Output], None] | None = None,
) -> list[Output]:  # fmt: skip
    """Decode every prompt (ids), as if alone but for exact ties, by the model's own step (an
    extension's) or `step`.
    """
    return decode(model, prompts, d, step_of(model), seed, trace, on_block)


def step_of(model: Model) -> Callable:
    """What decodes this model: its own step, which an extension has given it, or `step`."""
    if model.step is not None:
        return model.step
    return step


# --- the command line
def settle_decoding(args: Namespace, model: Model) -> Decoding:
    """Flags -> Decoding. Unless --tau_t2t is given, edits are ungated where Stage B is on (the
    paper's default), and there are none where the leftmost masks are written first.
    """
    # Stage B is on as it was trained; where all markers are zero, as in a converted checkpoint, it
    # would be Stage A
    n_rounds = args.n_rounds
    if n_rounds is None:
        trained = bool(model.markers.any()) or model.step is not None
        n_rounds = model.cfg.n_rounds if trained else 0
    if n_rounds > model.cfg.n_rounds:
        fail(f"--n_rounds {n_rounds}: this checkpoint has markers for 0..{model.cfg.n_rounds} rounds")

    gates = dict(MODES[args.mode])
    if n_rounds > 0:
        gates["tau_t2t"] = "default"  # the paper's, see Decoding
    if model.cfg.order == "leftmost":
        gates["tau_t2t"] = None  # what was written from the left stands
    if args.tau_m2t is not None:
        gates["tau_m2t"] = args.tau_m2t
    if "tau_t2t" in args:  # None is a value: no edits
        gates["tau_t2t"] = args.tau_t2t
    return Decoding(
        gen_length=args.gen_length, max_post_steps=args.max_post_steps, eos_early_stop=args.eos_early_stop,
        n_rounds=n_rounds, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, **gates,
    )  # fmt: skip


def run(args: Namespace) -> None:
    # the model and its text
    folder = Path(args.ckpt)
    model = load_model(folder, pick_device(args.device), DTYPES[args.dtype], args.adapter)
    tokenizer = load_tokenizer(folder, model.cfg.tokenizer)
    d = settle_decoding(args, model)

    # what is continued; a model of names is judged
    of_names = (folder / "names.json").exists()
    prompts = show.read_prompts(args, tokenizer, model.cfg, of_names)
    judged = False
    if of_names and tokenizer:
        judged = check_names(folder, [tokenizer.decode(p) for p in prompts])

    # a single text appears as its blocks finish, unless its steps are asked for
    traced = args.watch or args.json
    stream = show.Stream(prompts[0], tokenizer)
    on_block = None
    if len(prompts) == 1 and tokenizer and not traced:
        on_block = stream.show
    outputs = generate(model, prompts, d, args.seed, traced, on_block)
    for prompt, output in zip(prompts, outputs, strict=True):
        record = show.make_record(prompt, output, model, d.n_rounds, tokenizer, judged)
        show.show(record, output, stream, args)


def main(args: Namespace | None = None) -> None:
    if args is None:
        args = show.build_parser(__doc__, MODES).parse_args()
    try:
        run(args)
    except KeyboardInterrupt:
        fail("interrupted")
    except torch.OutOfMemoryError:
        fail("out of memory: add --dtype bf16, shorten --gen_length, or give fewer prompts")


if __name__ == "__main__":
    sys.exit(main())
