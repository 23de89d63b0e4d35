"""Decoding: Stage A picks the bundle, Stage B writes it (paper, Sec. 4.2), block after block.

    denoise         one step on the current blocks: Eq. 2, 3 and 4
    generate_one    the decoder as the paper has it: one row, greedy, no cache. Read this one
    generate        the same for many rows, with an exact cache and temperature; tested equal to generate_one

With --n_rounds 0 (Stage B off) and a gate on edits this is LLaDA2.1's released generate(), token for
token and forward for forward. Two things differ: without edits (--tau_t2t none) a block ends with its
last mask, which the released loop reads once more; and a block that can never end is left, with a warning.

    python sample.py --prompt "CANADIAN"                            # text, and what it cost in forwards
    python sample.py --prompt "CANADIAN SYLLABICS ▒▒▒ DZU" --watch  # every step; each ▒ is a token to fill
    python sample.py --ckpt DIR --prompt_ids 5,9,12 --n_rounds 0 --json > run.json   # tokens, counts, steps
A hole sees its own block and what is before it, not later blocks: attention is causal across blocks.

To change   which masks are written in a step   give   Decoding(select=f), f(probabilities, masked) -> bundle
            what looks at the bundle again             Decoding(look=f), or a head: Model(cfg, second_look=head)
            flags, and what is printed          edit   lib/show.py
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cache import Cached, Uncached
from checkpoint import decoding_defaults, load_model, load_tokenizer, names_of
from lib import show
from lib.config import DTYPES
from lib.output import Output, Row, in_full, up_to_eos
from lib.util import command, fail, first_masked, pick_device, uniform
from model import Model

# R rows in flight, T positions, B block_length, C channels, V vocabulary, K = n_rounds

MAX_STEPS = 1024  # forwards in one block


@dataclass(frozen=True)
class Decoding:
    """The settings of a decode. As they stand here they are the paper's."""

    gen_length: int = 256  # tokens; the last block is decoded whole
    tau_m2t: float = 0.7  # fill masks whose probability is above; -1: every mask at once
    tau_t2t: float | None = 0.0  # edit a visible token where another has more than this; None: never
    tau_keep: float = 0.0  # a head leaves masked what does not pass this
    n_rounds: int = 1  # K; 0: Stage B is off
    max_post_steps: int = 16  # forwards after the last mask
    num_to_transfer: int = 1  # masks that are written in a step at least
    eos_early_stop: bool = True
    holes: bool = False  # fill the masks in a prompt, too; the released decoder leaves them
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    # a rule of one's own: probabilities (R, B, V), masked (R, B) bool -> the bundle (R, B) bool
    select: Callable[[Tensor, Tensor], Tensor] | None = None
    # what looks at the bundle again, in the place of Stage B: see `stage_b_look`
    look: Callable[["Cached | Uncached", "StageA", Tensor], "Look"] | None = None


@dataclass
class StageA:
    """The current blocks, and what Stage A says of them."""

    z: Tensor  # (R, B) int64, before the step
    h: Tensor  # (R, B, C) prefix states
    states: Tensor  # (R, B, C) final states, before the LM head
    logits: Tensor  # (R, B, V)
    token: Tensor  # (R, B) int64: what it would write
    conf: Tensor  # (R, B) float32: how probable that is
    u: Tensor  # (R, B) in [0, 1): the numbers by which the next look draws, if it does
    d: Decoding


@dataclass
class Look:
    """What came of looking at the bundle again, and what it cost each row."""

    token: Tensor  # (R, B) int64
    conf: Tensor  # (R, B) float32
    written: Tensor  # (R, B) bool: where `token` is written; the rest of the bundle stays masked
    partial: Tensor  # (R,) float32: partial forwards; one at some positions is that share of one
    looks: Tensor  # (R,) int64: passes one after the other


@dataclass
class Step:
    """One step on the current blocks."""

    stage_a: StageA
    bundle: Tensor  # (R, B) bool
    look: Look
    edited: Tensor  # (R, B) bool
    after: Tensor  # (R, B) int64


# --- one step
def denoise(engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding, masks: bool) -> Step:
    """One step on the current blocks z (R, B) int64: everything is read from z and written at once.

    given (R, B) bool: positions that are never edited. masks: has any row one left? u (R, 2, B) in [0, 1):
    each stage draws by its own numbers. Selection favours positions whose draw happened to be likely;
    Stage B draws anew, so that what is written follows the model's probabilities.
    """
    model = engine.model
    masked = z == model.cfg.mask_id
    visible = ~masked & ~given

    # Stage A: one full forward
    h, states = engine.stage_a(z)
    logits = model.head(states)
    token, conf = candidates(logits, u[:, 0], d)
    stage_a = StageA(z, h, states, logits, token, conf, u[:, 1], d)

    # which masks are written now
    if d.select is None:
        bundle = select_bundle(conf, masked, d.tau_m2t, d.num_to_transfer, model.cfg.order)
    else:
        bundle = d.select(logits.softmax(-1), masked)

    # Stage B looks at the bundle again (Eq. 4), unless there is none
    look = look_again(engine, stage_a, bundle, masks)

    # fill the bundle (Eq. 2), edit what is visible (Eq. 3), both from z as it was
    edited = torch.zeros_like(visible)
    if d.tau_t2t is not None:
        edited = visible & (look.conf > d.tau_t2t) & (look.token != z)
    after = torch.where(look.written | edited, look.token, z)
    return Step(stage_a, bundle, look, edited, after)


def look_again(engine: Cached | Uncached, a: StageA, bundle: Tensor, masks: bool) -> Look:
    """The second look: one's own, a head's, Stage B's, or none."""
    if a.d.look is not None:
        return a.d.look(engine, a, bundle)
    if a.d.n_rounds == 0 or not masks:
        none = torch.zeros(len(bundle), device=bundle.device)
        return Look(a.token, a.conf, bundle, none, none.long())
    if engine.model.second_look is not None:
        return engine.model.second_look.look(engine, a, bundle)
    return stage_b_look(engine, a, bundle)


def stage_b_look(engine: Cached | Uncached, a: StageA, bundle: Tensor) -> Look:
    """Stage B: K rounds of the last n layers with the bundle marked. It writes all of the bundle."""
    logits = engine.model.head(engine.stage_b(a.h, bundle))
    token, conf = candidates(logits, a.u, a.d)

    # a row without a bundle stays with Stage A
    coordinated = bundle.any(-1, keepdim=True)
    token = torch.where(coordinated, token, a.token)
    conf = torch.where(coordinated, conf, a.conf)
    rounds = engine.n_rounds * coordinated[:, 0].long()
    return Look(token, conf, bundle, rounds.float(), rounds)


def select_bundle(probability: Tensor, masked: Tensor, tau_m2t: float, at_least: int, order: str) -> Tensor:
    """The masks that pass tau_m2t; where these are too few, the first `at_least` of the order.

    surest      passes where its probability is above tau_m2t (the paper)
    leftmost    passes where the product of the masks' probabilities, up to and with its own, is

    probability (R, B) float32, of the best token; masked (R, B) bool -> (R, B) bool.
    """
    # what comes first in this order has the smallest key
    sure = probability
    key = -probability
    if order == "leftmost":
        sure = torch.where(masked, probability, 1.0).cumprod(-1)
        key = torch.zeros_like(probability)
    passing = masked & (sure > tau_m2t)

    # the first ones, the leftmost of equals
    size = torch.full_like(masked[:, :1], at_least, dtype=torch.long)
    first = first_masked(key, masked, size, masked.shape[1])

    enough = passing.sum(-1, keepdim=True) >= at_least
    return torch.where(enough, passing, first)


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


# --- the decoder as the paper has it
@torch.inference_mode()
def generate_one(model: Model, prompt: list[int], d: Decoding) -> tuple[list[int], dict[str, float], list[list[int]]]:
    """Continue one prompt, greedily -> tokens, forwards, the block before each forward.

    Slow: every forward reads the whole text again. It is the specification of `generate`.
    """
    mask_id = model.cfg.mask_id
    B = model.cfg.block_length
    end = len(prompt) + d.gen_length

    # decoding begins with the block where the prompt ends, or where its first hole is
    first = len(prompt)
    if d.holes and mask_id in prompt:
        first = prompt.index(mask_id)
    start = first // B * B
    ids = prompt[:start]
    engine = Uncached(model, [ids], d.n_rounds)

    nfe = dict(full=0, partial=0, commit=0, looks=0)
    seen = []
    while start < end:
        # what the prompt has of this block, then masks
        of_prompt = prompt[start : start + B]
        z = torch.tensor([of_prompt + [mask_id] * (B - len(of_prompt))])  # (1, B)
        given = torch.arange(B)[None] < len(of_prompt)
        if d.holes:
            given = given & (z != mask_id)

        steps_without_mask = 0
        for _ in range(MAX_STEPS):
            # one step of denoising, and what it cost
            seen.append(z[0].tolist())
            step = denoise(engine, z, given, torch.zeros(1, 2, B), d, mask_id in z[0])
            nfe["full"] += 1
            nfe["partial"] += float(step.look.partial)
            nfe["looks"] += int(step.look.looks)

            # a block is finished when nothing changes, or after max_post_steps without a mask;
            # without edits nothing can change after the last mask
            changed = not torch.equal(step.after, z)
            z = step.after
            if mask_id not in z[0]:
                steps_without_mask += 1
            post_steps = 0 if d.tau_t2t is None else d.max_post_steps
            if not changed or steps_without_mask > post_steps:
                break

        engine.close([0], z)
        ids = ids + z[0].tolist()
        start += B
        new = ids[len(prompt) :]
        if d.eos_early_stop and model.cfg.eos_id in new and mask_id not in new:
            break

        # a decoder with a cache must read the block once more if its last step changed it, and
        # once for each further round: that is counted here, too
        if start < end:
            nfe["commit"] += int(changed)
            nfe["partial"] += max(0, d.n_rounds - 1)
    return up_to_eos(ids[len(prompt) : end], model.cfg.eos_id), nfe, seen


# --- the same for many rows
@torch.inference_mode()
def generate(
    model: Model, prompts: list[list[int]], d: Decoding, seed: int = 0,
    on_step: Callable[[list[Row], Step], None] | None = None, cached: bool = True,
) -> list[Output]:  # fmt: skip
    """Decode every prompt as if alone (up to exact ties, which more rows may round otherwise).

    on_step(rows in flight, step) sees every step.
    """
    device = model.wte.weight.device
    rows = [Row(i, prompts, d, model.cfg, seed) for i in range(len(prompts))]
    outputs = [row.output for row in rows]
    engine = (Cached if cached else Uncached)(model, [row.ids for row in rows], d.n_rounds)

    # the current blocks; and of each: forwards, partial ones, looks, steps without a mask
    z = torch.tensor([row.block(0) for row in rows], device=device)
    given = torch.tensor([row.given() for row in rows], device=device)
    counts = torch.zeros(4, len(rows), device=device)
    masks = True
    while True:
        # one step, and what it cost
        u = random_numbers(rows, d, z)
        step = denoise(engine, z, given, u, d, masks)
        if on_step:
            on_step(rows, step)
        changed = (step.after != z).any(-1)  # (R,)
        z = step.after
        masked = (z == model.cfg.mask_id).any(-1)
        counts += torch.stack([torch.ones_like(changed), step.look.partial, step.look.looks, ~masked])

        # which blocks are finished; and which could be after the next pass, if it changes nothing
        finished = is_finished(changed, masked, counts, d)
        goes_on = ~finished & ~masked
        if d.eos_early_stop:
            goes_on = goes_on & ~(z == model.cfg.eos_id).any(-1)

        # a step's one wait for the device
        finished, changed, goes_on, masked = torch.stack([finished, changed, goes_on, masked]).tolist()
        staying = []
        for r, row in enumerate(rows):
            last = finished[r] and row.finish(z[r].tolist(), counts[:3, r].tolist(), changed[r])
            if not last:
                staying.append(r)
        if not staying:
            return outputs

        # the next pass reads the next blocks beside the current ones where a finished block must be
        # read once more anyway, or where all rows may go on with theirs
        closed = [place for place, r in enumerate(staying) if finished[r]]
        masks = bool(closed) or any(masked[r] for r in staying)
        commit_due = any(finished[r] and changed[r] for r in staying)
        all_go_on = all(goes_on[r] and rows[r].has_another_block() for r in staying)
        if len(staying) < len(rows):
            engine.keep(staying)
            rows = [rows[r] for r in staying]
            z = z[staying]
            given = given[staying]
            counts = counts[:, staying]
        if commit_due or all_go_on:
            # a row that has closed its block has booked it: its next block is its current one, 0
            next_z = [row.block(int(r not in closed)) for r, row in enumerate(rows)]
            engine.read(z, torch.tensor(next_z, device=device))

        # finished blocks join the context
        if closed:
            engine.close(closed, z)
            z[closed] = torch.tensor([rows[r].block(0) for r in closed], device=device)
            given[closed] = torch.tensor([rows[r].given() for r in closed], device=device)
            counts[:, closed] = 0


def random_numbers(rows: list[Row], d: Decoding, z: Tensor) -> Tensor:
    """(R, 2, B) in [0, 1) for z (R, B), by each row's own generator; 0 where none is drawn."""
    R, B = z.shape
    if d.temperature == 0:
        return torch.zeros(R, 2, B, device=z.device)
    return uniform([row.rng for row in rows], 2 * B).view(R, 2, B).to(z.device)


def is_finished(changed: Tensor, masked: Tensor, counts: Tensor, d: Decoding) -> Tensor:
    """Which rows' blocks are finished, (R,) bool: nothing changes any more, or a bound is reached.

    changed, masked (R,) bool: did the step change the block, has it a mask left. counts (4, R): `generate`'s.
    """
    still = ~changed
    if d.temperature > 0:  # a sampled step may change nothing, and the next one something
        still = still & ~masked
    post_steps = 0 if d.tau_t2t is None else d.max_post_steps
    return still | (counts[3] > post_steps) | (counts[0] >= MAX_STEPS)


# --- the command line
def settle_decoding(args: Namespace, model: Model, own: dict) -> Decoding:
    """Every default of a decode: what the flags say; else what the folder was made for (own); else the
    paper's setting, or the released one where Stage B is off.
    """
    # Stage B is on where it was trained; with the zero markers of a converted checkpoint it is Stage A
    trained = bool(model.markers.any()) or model.second_look is not None
    n_rounds = args.n_rounds
    if n_rounds is None:
        n_rounds = model.cfg.n_rounds if trained else 0
    if n_rounds > model.cfg.n_rounds:
        fail(f"--n_rounds {n_rounds}: this checkpoint has markers for 0..{model.cfg.n_rounds} rounds")

    # the paper's, as they stand in Decoding; without Stage B the released ones
    settings = {}
    if n_rounds == 0:
        settings["tau_t2t"] = 0.5
    if model.cfg.order == "leftmost":
        settings["tau_t2t"] = None  # what was written from the left stands
    if n_rounds > 0:
        settings |= own
    for name in ("gen_length", "tau_m2t", "tau_t2t", "tau_keep", "temperature", "top_k", "top_p"):
        if name in args:  # a flag that was not given is not there
            settings[name] = getattr(args, name)
    return Decoding(n_rounds=n_rounds, holes=True, **settings)


@command
def main(load: Callable[..., Model] = load_model) -> None:
    """`load` loads the model: another one may give it faster layers."""
    args = show.build_parser(__doc__).parse_args()

    # the model and its text
    folder = Path(args.ckpt)
    model = load(folder, pick_device(args.device), DTYPES[args.dtype])
    tokenizer = load_tokenizer(folder, model.cfg.tokenizer)
    d = settle_decoding(args, model, decoding_defaults(folder))

    # what is continued; a model of names is judged
    judged = tokenizer is not None and names_of(folder) is not None
    prompts = show.read_prompts(args, tokenizer, model.cfg, d.gen_length, judged)

    # the steps are kept where they are asked for
    steps = show.Steps(len(prompts))
    on_step = steps.add if args.watch or args.json else None
    outputs = generate(model, prompts, d, args.seed, on_step)
    for prompt, output, of_row in zip(prompts, outputs, steps.of_row, strict=True):
        output.nfe["all"] = in_full(output.nfe, model.partial_cost)
        record = show.make_record(prompt, output, of_row, model.cfg, d.n_rounds, tokenizer, judged)
        show.show(record | {"partial_cost": model.partial_cost}, output.warning, tokenizer, args)


if __name__ == "__main__":
    main()
