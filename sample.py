"""Decoding, block after block: Stage A picks the bundle, and Stage B writes it (paper, Sec. 4.2).

    denoise         one step on the current blocks: Eq. 4, 2 and 3
    generate_one    the paper's decoder in its simplest form: one row, greedy, no cache. Read this one
    generate        the same for many rows, with an exact cache and temperature; tested equal to generate_one

With Stage B off (--n_rounds 0) and temperature 0, this writes the same tokens, with the same forwards, as LLaDA2.1's
released generate(). But without edits (--tau_t2t none) the released loop spends one more step on a block, it fills no
holes in earlier blocks, and it does not cut off a block that would never end.

    python sample.py                                                # the paper's Stage B beside causal Stage B
    python sample.py --prompt "CANADIAN"                            # text, and what it cost in forwards
    python sample.py --prompt "MATHEMATICAL ▒▒▒▒ CAPITAL B" --watch  # every step; each ▒ is a token to fill
    python sample.py --ckpt DIR --prompt "..." --select entropy     # another rule for the bundle
    python sample.py --ckpt DIR --prompt_ids 5,9,12 --n_rounds 0    # token ids, and Stage A alone

A hole sees its own block and the blocks before it, but no later block: attention is causal across blocks.
"""

import lib.first  # noqa: F401

import math
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import decoding
from cache import Engine
from checkpoint import DTYPES, base_of, judge_of, load_model
from decoding import ALL, PAPER, Decoding, Output, Row, Step, candidates, decoding_of, in_full, reads_pairs, up_to_eos
from lib import names
from lib.tokenizer import load_tokenizer
from lib.util import MASK, Parser, bounded, command, fail, pick_device, printable, smallest_masks, uniform
from model import Model

# R rows that are being decoded, T positions, B block_length, C channels, V vocabulary, K = n_rounds

MAX_STEPS = 1024  # the most forwards in one block, besides one for each of its tokens


# --- one step
def denoise(engine: Engine, z: Tensor, given: Tensor, u: Tensor, d: Decoding) -> Step:
    """One step on the current blocks z (R, B) int64: everything is decided from z, and then written at once.

    given (R, B) bool: positions that are never edited. u (R, 2, B) in [0, 1): the random numbers by which each stage
    draws. Stage A's draws choose the bundle, so its tokens there are likely ones, which Stage B must not inherit.
    """
    model = engine.model
    masked = z == model.cfg.mask_id
    visible = ~masked & ~given

    # Stage A: one full forward
    h, states = engine.stage_a(z)
    logits = model.logits(states)
    token_a, conf_a = candidates(logits, u[:, 0], d)

    # which masks are written now
    bundle = SELECT[d.select](logits, conf_a, masked, d)

    # Stage B runs with the bundle marked (Eq. 4); a row without a bundle keeps Stage A's tokens. Without edits only the
    # bundle's logits are asked for: with 152 k tokens those of a block cost more than the last n layers
    token = token_a
    conf = conf_a
    coordinated = bundle.any(-1, keepdim=True) & (d.n_rounds > 0)
    if coordinated.any():
        states = engine.stage_b(h, bundle, torch.where(bundle, token_a, z))
        asked = coordinated & (bundle | (d.tau_t2t is not None))
        token_b, conf_b = candidates(model.logits(states[asked]), u[:, 1][asked], d)
        token = token_a.masked_scatter(asked, token_b)
        conf = conf_a.masked_scatter(asked, conf_b)

    # fill the bundle (Eq. 2), and edit tokens that stand already (Eq. 3); both look at z as it was
    edited = visible & (conf > d.edit_gate) & (token != z)
    after = torch.where(bundle | edited, token, z)

    # a greedy step that changes nothing would change nothing again, and a drawn one only if no mask is left
    over = (after == z).all(-1)
    if d.temperature > 0:
        over = over & ~masked.any(-1)
    partial_forwards = d.n_rounds * coordinated[:, 0].float()
    return Step(z, after, bundle, edited, token, conf, token_a, conf_a, partial_forwards, over)


def step_of(model: Model, d: Decoding) -> Callable[..., Step]:
    """The step of a model's own Stage B if it has one; else the paper's, which without Stage B is LLaDA2.1's own."""
    return getattr(model, "denoise", denoise) if d.n_rounds > 0 else denoise


# --- which masks are written now: logits of Stage A (R, B, V), its tokens' probabilities (R, B), masked (R, B) bool
# -> (R, B) bool. Another row of a batch can change the last digits of a probability, so where two masks are that near
# (more often in bf16) a row may depend on its batch
def by_confidence(logits: Tensor, conf: Tensor, masked: Tensor, d: Decoding) -> Tensor:
    """The paper's rule: the masks whose probability is above tau_m2t. If fewer than num_to_transfer are, the
    num_to_transfer surest."""
    passing = masked & (conf > d.tau_m2t)
    enough = passing.sum(-1, keepdim=True) >= d.num_to_transfer
    return torch.where(enough, passing, smallest_masks(-conf, masked, d.num_to_transfer))


def by_entropy(logits: Tensor, conf: Tensor, masked: Tensor, d: Decoding) -> Tensor:
    """As many masks as the paper's rule would take, but those of the least entropy (a row of Table 2)."""
    size = by_confidence(logits, conf, masked, d).sum(-1, keepdim=True)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return smallest_masks(entropy, masked, size)


def from_the_left(logits: Tensor, conf: Tensor, masked: Tensor, d: Decoding) -> Tensor:
    """The longest run: the leftmost masks whose probabilities have a product above tau_m2t, and at least one."""
    run = torch.where(masked, conf, 1.0).log().cumsum(-1)
    leftmost = masked & (masked.cumsum(-1) == 1)
    return masked & (run > d.log_gate) | leftmost


def certified(logits: Tensor, conf: Tensor, masked: Tensor, d: Decoding) -> Tensor:
    """The most of the surest masks whose likeliest tokens are together the likeliest tuple, by the bound of results/
    theorem: sum(1 - p_i) + max(1 - p_i) <= 1. At least one mask; tau_m2t is not used."""
    miss = torch.where(masked, 1 - conf, math.inf)
    largest = miss.sort(dim=-1).values  # of the first k the largest is the k-th
    size = (largest.cumsum(-1) + largest <= 1).sum(-1, keepdim=True)
    return smallest_masks(miss, masked, size.clamp(min=1))


SELECT = {"confidence": by_confidence, "entropy": by_entropy, "left": from_the_left, "certified": certified}


# --- the decoder as the paper has it
@torch.inference_mode()
def generate_one(
    model: Model, prompt: list[int], d: Decoding, step: Callable[..., Step] | None = None
) -> tuple[list[int], dict[str, float], list[list[int]]]:
    """Continue one prompt, greedily -> tokens, forwards, the block before each forward.

    Slow: every forward reads the whole text again. It is the specification of `generate`. step: a function like
    denoise (left out: that of the model's Stage B), which asks the engine for stage_a and stage_b.
    """
    step = step or step_of(model, d)
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

    # what was counted (nfe: number of function evaluations, that is, of forwards), and the blocks that were seen
    nfe = dict(full=0, partial=0, refresh=0)
    seen = []
    while start < end:
        # the prompt's tokens in this block, then masks
        of_prompt = prompt[start : start + B]
        z = torch.tensor([of_prompt + [mask_id] * (B - len(of_prompt))], device=device)  # (1, B)
        given = torch.arange(B, device=device)[None] < len(of_prompt)
        if d.holes:
            given = given & (z != mask_id)

        steps_without_mask = 0
        for _ in range(MAX_STEPS + B):
            # one step of denoising, and what it cost
            seen.append(z[0].tolist())
            made = step(WholeText(model, ids, d), z, given, torch.zeros(1, 2, B, device=device), d)
            nfe["full"] += 1
            nfe["partial"] += float(made.partial)

            # a block is finished when nothing changes, or after max_post_steps without a mask
            changed = not torch.equal(made.after, z)
            z = made.after
            if mask_id not in z[0]:
                steps_without_mask += 1
            if made.over.item() or steps_without_mask > d.post_steps:
                break

        ids = ids + z[0].tolist()
        start += B
        new = ids[len(prompt) :]
        if d.eos_early_stop and model.cfg.eos_id in new and mask_id not in new:
            break

        # a decoder with a cache must read the block once more if its last step changed it, and run the last n layers
        # on it for each further round: these forwards are counted here, too
        if start < end:
            nfe["refresh"] += int(changed and not reads_pairs(model.cfg, d))
            nfe["partial"] += max(0, d.n_rounds - 1)
    return up_to_eos(ids[len(prompt) : end], model.cfg.eos_id), nfe, seen


class WholeText:
    """What a step asks for, of a text whose last block is the current one: all of it is read again."""

    def __init__(self, model: Model, finished: list[int], d: Decoding):
        self.model = model
        self.finished = torch.tensor([finished], dtype=torch.long, device=model.wte.weight.device)
        self.d = d

    def stage_a(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z (1, B) -> prefix states and final states of the block, (1, B, C) each."""
        # the finished blocks do not change any more: they are the clean text before the current one
        ids = torch.cat([self.finished, z], dim=1)
        ctx = self.model.read_clean(ids, torch.ones_like(ids, dtype=torch.bool))
        self.ctx = replace(ctx, n_rounds=self.d.n_rounds)
        self.h = self.model.prefix(ids, self.ctx)
        n = self.finished.shape[1]
        return self.h[:, n:], self.model.last_n(self.h, self.ctx)[:, n:]

    def stage_b(self, h: Tensor, bundle: Tensor, tokens: Tensor) -> Tensor:
        """bundle and tokens (1, B) -> Stage B's states of the block, (1, B, C)."""
        n = self.finished.shape[1]
        finished = self.finished.expand(len(tokens), -1)
        marked = torch.cat([torch.zeros_like(finished, dtype=torch.bool), bundle], dim=1)
        whole = torch.cat([finished, tokens], dim=1)
        states = [self.model.coordinate(self.h, a[None], b[None], self.ctx) for a, b in zip(marked, whole, strict=True)]
        return torch.cat(states)[:, n:]

    def several(self, U: int) -> "WholeText":
        """The same text for each of U rows, which a beam reads one after the other."""
        return self


# --- the same for many rows
@torch.inference_mode()
def generate(
    model: Model, prompts: list[list[int]], d: Decoding, seed: int = 0, step: Callable[..., Step] | None = None,
    on_step: Callable[[list[Row], Step], None] | None = None,
) -> list[Output]:  # fmt: skip
    """Decode every prompt as if it were alone.

    step: a function like denoise (left out: that of the model's Stage B). on_step is called after every step, with the
    rows that are being decoded and with what the step did.
    """
    step = step or step_of(model, d)
    device = model.wte.weight.device
    twins: Counter[tuple[int, ...]] = Counter()
    rows = []
    for number, prompt in enumerate(prompts):
        rows.append(Row(number, prompt, twins[tuple(prompt)], d, model.cfg, seed))
        twins[tuple(prompt)] += 1
    outputs = [row.output for row in rows]

    # leave out rows whose blocks are all finished
    rows = [row for row in rows if not row.over]
    pairs = reads_pairs(model.cfg, d)
    engine = Engine(model, [row.ids for row in rows], d.n_rounds, pairs) if rows else None
    while rows:
        # one step on the current block of each row
        z = torch.tensor([row.block for row in rows], device=device)
        given = torch.tensor([row.given for row in rows], device=device)
        u = torch.zeros(len(rows), 2, z.shape[1], device=device)
        if d.temperature > 0:  # draws, by each row's own generator
            u = uniform([row.rng for row in rows], 2 * z.shape[1]).view_as(u).to(device)
        made = step(engine, z, given, u, d)
        if on_step:
            on_step(rows, made)
        if not made.conf.isfinite().all():
            fail("the model's logits are not finite: its weights are damaged, or its training diverged")

        # each row takes its block and what the step cost; a finished block is written down
        for row, *own in zip(rows, made.after.tolist(), made.partial.tolist(), made.over.tolist(), strict=True):
            row.take(*own, MAX_STEPS + z.shape[1])
            if row.finished:
                row.close()

        # a row leaves after its last block
        staying = [r for r, row in enumerate(rows) if not row.over]
        if not staying:
            break
        if len(staying) < len(rows):
            rows = [rows[r] for r in staying]
            engine.keep(staying)

        # a finished block is read by those after it, and its row begins the next one
        closed = [r for r, row in enumerate(rows) if row.finished]
        if closed:
            engine.close(closed, made.after[staying], any(rows[r].changed for r in closed))
            for r in closed:
                rows[r].begin()
    return outputs


# --- flags
def build_parser(doc: str = __doc__) -> Parser:
    parser = Parser(doc)
    some = bounded(int, 0, 10**9)

    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--ckpt", type=Path, nargs="+", default=[Path("assets/names/paper")],
        help="a model's folder, or an adapter's; several to compare")
    add("--device", default="auto", help="auto (an accelerator, or else the CPU), or the name of one")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[],
        help=f"text, in which each {MASK} is one token to fill (_ too, in a name); repeat the flag for several rows")
    add("--prompt_file", type=Path, action="append", default=[],
        help="a file that holds such a text; repeat the flag for several rows")
    add("--prompt_ids", type=decoding.token_ids, action="append", default=[],
        help="token ids, 1,2,3; repeat for several rows")
    add("--gen_length", type=some, default=256,
        help="tokens after the prompt, unless the text ends before; the last block is decoded whole")
    add("--seed", type=int, default=0, help="of what is drawn: any whole number, of any size")
    add("--watch", action="store_true", help="show every step")
    # fmt: on
    decoding.add_decoding(parser, SELECT)
    return parser


# --- what is shown
def what_ran(ckpt: Path, model: Model, d: Decoding) -> str:
    """The last line of every run: assets/names/paper: Stage B, n = 3 of 8, K = 1, gates 0.7 and 0"""
    stage = "Stage A alone"
    if d.n_rounds > 0:
        kind = "" if type(model) is Model else f"{model.cfg.stage_b} "
        stage = f"{kind}Stage B, n = {model.cfg.n_last} of {model.cfg.n_layer}, K = {d.n_rounds}"
    if d.tau_m2t == ALL:
        rule = "all at once"
    elif step_of(model, d) is denoise:
        rule = f"gates {d.tau_m2t:g} and {'none' if d.tau_t2t is None else f'{d.tau_t2t:g}'}"
    else:
        rule = f"the longest run above {d.tau_m2t:g}"
    rule += f", selected by {d.select}" if d.select != PAPER.select else ""
    rule += f", a beam of {d.beam}" if d.beam > 1 else ""
    if d.temperature > 0:
        rule += f", drawn at temperature {d.temperature:g}"
    return f"{ckpt}: {stage}, {rule}"


def cost(n: int, nfe: dict[str, float], partial_cost: float) -> str:
    """5 tokens; forwards: 6 full + 4 partial x 0.375 + 0 refresh = 7.5, 1.500 per token"""
    total = in_full(nfe, partial_cost)
    kinds = f"{nfe['full']} full + {nfe['partial']:g} partial x {partial_cost:.3g} + {nfe['refresh']} refresh"
    each = f", {total / n:.3f} per token" if n else ""
    return f"{n} token{'s' * (n != 1)}; forwards: {kinds} = {round(total, 2):g}{each}"


def write(args: Namespace, ckpt: Path) -> None:
    """Continue every prompt by one checkpoint, and print what came of it."""
    model = load_model(ckpt, pick_device(args.device), DTYPES[args.dtype])
    tokenizer = load_tokenizer(base_of(ckpt))
    d = decoding_of(args, model)

    # what is continued; the names that a model of names writes are judged
    of_names = "names" in judge_of(ckpt)
    prompts = decoding.read_prompts(args, tokenizer, model.cfg, d.gen_length, of_names)

    on_step = None
    if args.watch:
        from tools.watch import Screen

        on_step = Screen(tokenizer, model.cfg.mask_id, model.cfg.eos_id).on_step
    began = time.perf_counter()
    outputs = generate(model, prompts, d, args.seed, on_step=on_step)
    seconds = time.perf_counter() - began
    written = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.warning:
            print(f"warning: {output.warning}", file=sys.stderr)

        # the text, or a toy's numbers; of a chat, the answer without the question
        asked = tokenizer and tokenizer.turns & {*output.prompt}
        shown = output.tokens if asked else output.prompt + output.tokens
        text = tokenizer.decode(shown) if tokenizer else ""
        said = ["  " + names.verdict(text)] if of_names else []
        print(printable(text) or output.tokens, *said)

        n = len(output.tokens) + prompt.count(model.cfg.mask_id)
        cut = len(output.tokens) == d.gen_length > 0 and output.tokens[-1] != model.cfg.eos_id
        print(f"[{cost(n, output.nfe, model.partial_cost)}{'; cut off by --gen_length' * cut}]")
        written += n

    # the time of a short run says little
    ms = f"; {1e3 * seconds / max(1, written):.1f} ms a token, threads: {torch.get_num_threads()}"
    print(f"[{what_ran(ckpt, model, d)}{ms if seconds > 1 else ''}]")


# what runs without flags: both kinds of Stage B write all masks of a block at once
CONTRAST = """--ckpt assets/shakespeare/paper assets/shakespeare/causal --prompt ROMEO: --tau_m2t all --temperature 1
--gen_length 96"""


@command
def main() -> None:
    words = sys.argv[1:]
    if not words:
        words = CONTRAST.split()
        print(f"python sample.py {' '.join(words)}")
    args = build_parser().parse_args(words)
    for ckpt in args.ckpt:
        write(args, ckpt)


if __name__ == "__main__":
    main()
