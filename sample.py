"""Decoding: Stage A picks the bundle, Stage B writes it (paper, Sec. 4.2), block after block, with an exact cache.

With --n_rounds 0 (Stage B off) this is LLaDA2.1's released generate(), token for token and forward for forward, edge
cases included: strict gates, edits while masks remain, mask as an ordinary candidate. Two departures, both stated when
they happen: a block that can never end (nothing changes any more, or MAX_STEPS forwards) is left with a warning, and
rows of a batch are independent of each other, where the released code takes one row.

It refuses an empty prompt and one that does not fit the model's positions.

    python sample.py --ckpt out/stdlib --prompt "def "                              # streams text, then counts forwards
    python sample.py --ckpt out/stdlib --prompt "def " --prompt "class " --trace    # every step of every block
    python sample.py --ckpt out/stdlib --prompt "def " --trace_html trace.html      # the same as a page to step through
    python sample.py --ckpt weights/llada2.1-mini --adapter out/cocommit --chat --prompt "Write a quicksort." --mode q
    python sample.py --ckpt DIR --prompt_ids 5,9,12 --n_rounds 0 --json             # tokens, counts, steps
"""

import argparse
import codecs
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cache import Cached, Naive
from checkpoint import DTYPES, load_model, load_tokenizer
from corrupt import uniform
from data import Parser, Tokenizer, fail, generator, peak_memory, pick_device
from model import Model
from trace_page import pieces, show_trace, step_record, write_page

# R rows in flight, B block_length, V vocabulary, C channels, P prompt tokens, K = n_rounds

MODES = {
    "q": dict(tau_m2t=0.7, tau_t2t=0.5),  # quality
    "s": dict(tau_m2t=0.5, tau_t2t=0.0),  # speed: 0.0 edits on any disagreement; "none" would switch edits off
}
MAX_STEPS = 1024  # forwards in one block


@dataclass(frozen=True)
class Decoding:
    """The switches of the paper's Table 2. tau_t2t None: no edits; 0.0: edit on any disagreement."""

    gen_length: int = 256
    tau_m2t: float = 0.7
    tau_t2t: float | None = 0.5
    max_post_steps: int = 16
    num_to_transfer: int = 1
    eos_early_stop: bool = False
    n_rounds: int = 1
    select: str = "confidence"  # confidence | entropy (same bundle size) | all (every mask at once)
    fill_from: str = "B"  # which stage's logits write masks, and which write edits
    edit_from: str = "B"
    marker: bool = True  # False: Stage B runs the layers again without the marker
    mark_visible: bool = False  # mark the visible tokens that Stage A would edit as well, and rewrite them jointly
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass
class Output:
    """One row: generated tokens up to and with eos, forwards by kind, and every step (if a trace was asked for)."""

    tokens: list[int]
    nfe: dict[str, int]  # full: Stage A; partial: Stage B rounds, n/L of a full one each; commit: see close()
    steps: list[dict] = field(default_factory=list)
    warning: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# one denoising step


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


def select_bundle(conf: Tensor, logits: Tensor, masked: Tensor, d: Decoding) -> Tensor:
    """The masked positions above tau_m2t, or the num_to_transfer most confident ones where fewer pass. (R, B) bool."""
    if d.select == "all":
        return masked
    passing = masked & (conf > d.tau_m2t)
    best = top(conf, masked, torch.full_like(masked.sum(-1), d.num_to_transfer))
    bundle = torch.where((passing.sum(-1) >= d.num_to_transfer)[:, None], passing, best)
    if d.select == "entropy":  # as many positions as confidence would take, but the least entropic ones
        log_p = logits.log_softmax(-1)
        bundle = top((log_p.exp() * log_p).sum(-1), masked, bundle.sum(-1))
    return bundle


def top(score: Tensor, masked: Tensor, size: Tensor) -> Tensor:
    """The size (R,) best masked positions of each row, (R, B) bool; the leftmost of equals."""
    order = score.masked_fill(~masked, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    return masked & (order.argsort(-1) < size[:, None])


def step(engine: "Cached | Naive", z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
    """One step on the current blocks z (R, B): everything is read from z and written at once.

    prompt (R, B) bool: positions that are never edited. busy: whether any row has a mask left (known to the host).
    u (R, 3, B): with temperature, each stage draws by its own numbers. Selection favours positions whose draw happened
    to be a likely token; Stage B's fresh draw undoes that bias, so what is written follows the model's probabilities.
    The third number is what the marker carries, where the model was trained with it (--chain_noise).
    """
    masked = z == engine.cfg.mask_id
    h, logits_a = engine.stage_a(z)  # the full forward
    token_a, conf_a = candidates(logits_a, u[:, 0], d)
    bundle = select_bundle(conf_a, logits_a, masked, d)
    gate = float("inf") if d.tau_t2t is None else d.tau_t2t
    marks = bundle
    if d.mark_visible:  # beyond the paper: joint revision
        marks = bundle | (~masked & ~prompt & (token_a != z) & (conf_a > gate))
    token_b, conf_b = token_a, conf_a
    if (busy or d.mark_visible) and d.n_rounds:  # without a mask there is no bundle, and Stage B would be Stage A
        logits_b = engine.stage_b(h, marks if d.marker else torch.zeros_like(marks), u[:, 2])
        token_b, conf_b = candidates(logits_b, u[:, 1], d)
        coordinated = marks.any(-1, keepdim=True)  # a row without marks writes from Stage A
        token_b, conf_b = torch.where(coordinated, token_b, token_a), torch.where(coordinated, conf_b, conf_a)
    fill, fill_conf = (token_b, conf_b) if d.fill_from == "B" else (token_a, conf_a)
    edit, edit_conf = (token_b, conf_b) if d.edit_from == "B" else (token_a, conf_a)
    editable = marks & ~masked if d.mark_visible else ~masked & ~prompt & (edit_conf > gate)
    edited = editable & (edit != z)
    after = torch.where(bundle, fill, torch.where(edited, edit, z))
    conf = torch.where(bundle, fill_conf, edit_conf)
    return dict(before=z, after=after, bundle=bundle, marks=marks, edited=edited, conf=conf, token_a=token_a,
                conf_a=conf_a)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# the loop over blocks


class Row:
    """What the host knows of one prompt."""

    def __init__(self, prompt: list[int], gen_length: int, B: int, rng: torch.Generator):
        self.prompt, self.end, self.B, self.rng = prompt, len(prompt) + gen_length, B, rng
        self.ids = prompt[: len(prompt) // B * B]  # finished blocks
        self.since = 0  # the step of the trace with which the current block began
        self.output = Output([], {"full": 0, "partial": 0, "commit": 0})

    def next_block(self, mask_id: int) -> tuple[list[int], int]:
        """The next block as it starts, what is left of the prompt and then masks, and how much of it is prompt."""
        rest = self.prompt[len(self.ids) : len(self.ids) + self.B]
        return rest + [mask_id] * (self.B - len(rest)), len(rest)

    def close_block(self, block: list[int], eos_id: int, mask_id: int, eos_early_stop: bool) -> bool:
        """Take over a finished block -> whether this was the last one."""
        self.ids = self.ids + block
        new = self.ids[len(self.prompt) :]
        kept = new[: self.end - len(self.prompt)]
        self.output.tokens = kept[: kept.index(eos_id) + 1] if eos_id in kept else kept
        return len(self.ids) >= self.end or (eos_early_stop and eos_id in new and mask_id not in new)


@torch.inference_mode()
def generate(
    model: Model, prompts: list[list[int]], d: Decoding, *, seed: int = 0, use_cache: bool = True, trace: bool = False,
    on_block: Callable[[int, Output], None] | None = None,
) -> list[Output]:  # fmt: skip
    """Decode every prompt (ids), each as if it were alone: tokens, counts and draws do not depend on the other rows.

    Rows finish blocks at their own pace. `on_block(i, output so far)` is called when row i finishes one.
    """
    cfg, B, device = model.cfg, model.cfg.block_length, model.wte.weight.device
    # a generator is a function of the prompt, and of how many equal prompts come before it
    keys = [("sample", tuple(p), prompts[:i].count(p)) for i, p in enumerate(prompts)]
    rows = [Row(p, d.gen_length, B, generator(seed, *key)) for p, key in zip(prompts, keys, strict=True)]
    outputs, position = [row.output for row in rows], {id(row): i for i, row in enumerate(rows)}
    engine = (Cached if use_cache else Naive)(model, prompts, d.n_rounds)
    starts = [row.next_block(cfg.mask_id) for row in rows]
    z = torch.tensor([block for block, _ in starts], device=device)  # (R, B)
    n_prompt = torch.tensor([n for _, n in starts], device=device)  # (R,)
    counts = torch.zeros(3, len(rows), dtype=torch.long, device=device)  # of this block: full, partial, post steps
    busy, history = True, []
    while rows:
        prompt = torch.arange(B, device=device) < n_prompt[:, None]
        u = torch.zeros(len(rows), 3, B, device=device)
        if d.temperature > 0:
            u = uniform([row.rng for row in rows], 3 * B).view(-1, 3, B).to(device)
        s = step(engine, z, prompt, busy, u, d)
        had_mask, changed, z = (z == cfg.mask_id).any(-1), (s["after"] != z).any(-1), s["after"]
        has_mask = (z == cfg.mask_id).any(-1)
        counts += torch.stack([torch.ones_like(changed), s["marks"].any(-1), ~has_mask])
        # nothing changed and nothing ever will, or the stated bound: the released loop would go on for ever
        stuck = has_mask & ((~changed & (d.temperature == 0)) | (counts[0] >= MAX_STEPS))
        closing = (~had_mask & ~changed) | (counts[2] > d.max_post_steps) | stuck
        if trace:
            history.append((rows, s))
        closing, has_mask, changed, stuck = torch.stack([closing, has_mask, changed, stuck]).tolist()  # the one sync
        busy = any(has_mask)
        if any(closing):
            ended = []
            for r in (r for r, c in enumerate(closing) if c):
                row, block, (full, partial, _) = rows[r], z[r].tolist(), counts[:, r].tolist()
                if row.close_block(block, cfg.eos_id, cfg.mask_id, d.eos_early_stop):
                    ended.append(r)
                if stuck[r]:
                    row.output.warning = f"a block was left with masks after {full} forwards that would never fill it"
                book_block(row, full, partial, d, changed[r], r in ended, history)
                if on_block:
                    on_block(position[id(row)], row.output)
            going = [r for r, c in enumerate(closing) if c and r not in ended]
            if going:
                engine.close(z, going, any(changed[r] for r in going))
            z, n_prompt, counts = open_blocks(rows, going, z, n_prompt, counts, cfg.mask_id)
            if ended:
                kept = [r for r in range(len(rows)) if r not in ended]
                rows, z, n_prompt, counts = [rows[r] for r in kept], z[kept], n_prompt[kept], counts[:, kept]
                if rows:
                    engine.keep(kept)
            busy = True
    return outputs


def book_block(row: Row, full: int, partial: int, d: Decoding, changed: bool, ended: bool, history: list) -> None:
    """Book a finished block. A commit forward is needed if the last forward still changed the block and another block
    will read it; with K > 1 that block also needs this one's states of the further rounds, K - 1 partial passes. The
    naive decode books the same: the record is of the procedure, not of how it was run."""
    row.output.nfe["full"] += full
    row.output.nfe["partial"] += partial * d.n_rounds + (0 if ended else max(0, d.n_rounds - 1))
    row.output.nfe["commit"] += changed and not ended
    for rows, s in history[row.since :]:
        row.output.steps.append(step_record(s, rows.index(row), len(row.ids) - row.B))
    row.since = len(history)


def open_blocks(rows, going, z, n_prompt, counts, mask_id) -> tuple[Tensor, Tensor, Tensor]:
    """The next block of the rows `going`; the others are in the middle of theirs."""
    z, n_prompt, counts = z.clone(), n_prompt.clone(), counts.clone()
    for r in going:
        block, n = rows[r].next_block(mask_id)
        z[r], n_prompt[r], counts[:, r] = torch.tensor(block, device=z.device), n, 0
    return z, n_prompt, counts


# ---------------------------------------------------------------------------------------------------------------------
# the command line


# fmt: off
def build_parser() -> Parser:
    p = Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--ckpt", default="out/stdlib", help="checkpoint folder of train.py or convert_weights.py")
    g.add_argument("--adapter", help="folder of LoRA and markers that train.py --init_from DIR wrote")
    g.add_argument("--block_length", type=int, help="tokens decoded together (default: as trained)")
    g.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    g.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    g = p.add_argument_group("prompts")
    g.add_argument("--prompt", action="append", default=[], help="text; repeat the flag for several rows")
    g.add_argument("--prompts_file", help="a text file, one prompt a line")
    g.add_argument("--prompt_ids", action="append", default=[], help="raw token ids, 1,2,3; repeat for several rows")
    g.add_argument("--chat", action="store_true", help="wrap each prompt in the released chat template")
    g.add_argument("--system", help="system message of the chat")
    g = p.add_argument_group("decoding")
    g.add_argument("--mode", choices=MODES, default="q", help="q: tau_m2t 0.7, tau_t2t 0.5; s: 0.5 and 0.0")
    g.add_argument("--gen_length", type=int, default=256, help="tokens to generate; the last block is decoded whole")
    g.add_argument("--tau_m2t", type=number, help="fill masks whose probability is above this (strictly)")
    g.add_argument("--tau_t2t", type=number_or_none,
                   help='edit above this; 0: on any disagreement (the paper\'s default for Stage B); "none": never')
    g.add_argument("--max_post_steps", type=int, default=16, help="forwards after the last mask was filled, at most")
    g.add_argument("--num_to_transfer", type=int, default=1, help="fill at least so many a step")
    g.add_argument("--eos_early_stop", action="store_true", help="stop after the block in which eos appears")
    g.add_argument("--temperature", type=float, default=0.0, help="0: argmax (the joint mode is a greedy notion)")
    g.add_argument("--top_k", type=int, default=0, help="with temperature: keep the k best tokens (0: all)")
    g.add_argument("--top_p", type=float, default=1.0, help="with temperature: keep this much mass (1: all)")
    g.add_argument("--seed", type=int, default=0)
    g = p.add_argument_group("Stage B (paper, Table 2)")
    g.add_argument("--n_rounds", type=int,
                   help="K; 0: Stage B off, the released decoder (default: as trained; 0 where no marker was trained)")
    g.add_argument("--fill_from", choices=["A", "B"], default="B", help="which stage's logits fill masks")
    g.add_argument("--edit_from", choices=["A", "B"], default="B", help="which stage's logits edit")
    g.add_argument("--mark_visible", action="store_true",
                   help="mark what Stage A would edit too, and rewrite it jointly (as train.py --mark_visible taught)")
    g.add_argument("--no_marker", action="store_true", help="run the last n layers again, but unmarked")
    g.add_argument("--select", choices=["confidence", "entropy", "all"], default="confidence",
                   help="bundle: above the gate; as many, but least entropic; every mask")
    g = p.add_argument_group("output")
    g.add_argument("--trace", action="store_true", help="show every step: filled, edited, left, with confidences")
    g.add_argument("--trace_html", metavar="FILE", help="write one page that shows every step of the one prompt")
    g.add_argument("--json", action="store_true",
                   help="one JSON object a prompt: text, tokens, nfe, nfe_per_token, steps; trace_page.py reads it")
    g.add_argument("--no_cache", action="store_true", help="the naive twin: recompute everything at every step")
    return p
# fmt: on


def number_or_none(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):  # it compares false: it would silently mean "never"
        raise argparse.ArgumentTypeError(f'{text!r} is neither a number nor "none"')
    return value


def number(text: str) -> float:
    value = number_or_none(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def read_prompts(args: argparse.Namespace, tokenizer: Tokenizer | None, model: Model) -> list[list[int]]:
    if args.system is not None and not args.chat:
        fail("--system is a message of the chat template: add --chat")
    texts = list(args.prompt)
    if args.prompts_file:
        try:
            texts += Path(args.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            fail(f"--prompts_file {args.prompts_file} cannot be read as text: {e}")
    if texts and tokenizer is None:
        fail("this checkpoint is a toy, its tokens are numbers: use --prompt_ids")
    encode = (lambda t: tokenizer.chat(t, args.system)) if args.chat else (lambda t: tokenizer.encode(t))
    prompts = [encode(t) for t in texts]
    try:
        prompts += [[int(i) for i in ids.split(",")] for ids in args.prompt_ids]
    except ValueError:
        fail(f"--prompt_ids takes numbers with commas between them, like 5,9,12, not {' '.join(args.prompt_ids)!r}")
    if not prompts:
        fail("nothing to continue: give --prompt TEXT, --prompts_file FILE or --prompt_ids 1,2,3")
    B, longest, vocab = model.cfg.block_length, model.cfg.max_len, model.cfg.vocab_size
    for n, prompt in enumerate(prompts, 1):
        if not prompt:
            fail(f"prompt {n} is empty: the model continues a text, give it at least one token")
        if not all(0 <= i < vocab for i in prompt):
            fail(f"prompt {n} has ids outside 0..{vocab - 1}, the model's vocabulary")
        if (need := -(-(len(prompt) + args.gen_length) // B) * B) > longest:
            fail(f"prompt {n} of {len(prompt)} tokens and --gen_length {args.gen_length} need {need} positions, the "
                 f"model has {longest}: shorten one of them")  # fmt: skip
    return prompts


def settle_args(args: argparse.Namespace, model: Model) -> Decoding:
    for name, least in dict(gen_length=1, max_post_steps=0, num_to_transfer=1, temperature=0, top_k=0).items():
        if not least <= getattr(args, name) < float("inf"):
            fail(f"--{name} must be at least {least} and finite, not {getattr(args, name)}")
    if not 0 < args.top_p <= 1:
        fail(f"--top_p is a share above 0 and up to 1, not {args.top_p}")
    if model.cfg.noise and args.temperature not in (0, 1):
        fail(f"--temperature {args.temperature}: this checkpoint was trained to sample jointly at 1 (or greedily at 0)")
    rounds = args.n_rounds
    if rounds is None:  # zero markers, as a converted checkpoint has: Stage B would be Stage A
        rounds = model.cfg.n_rounds if model.markers.any() else 0
    if not 0 <= rounds <= model.cfg.n_rounds:
        fail(f"--n_rounds {rounds}: this checkpoint has markers for 0..{model.cfg.n_rounds} rounds")
    gates = {k: v if getattr(args, k) is None else getattr(args, k) for k, v in MODES[args.mode].items()}
    if any(a.startswith("--tau_t2t") for a in sys.argv):  # given as "none", it reads as None
        gates["tau_t2t"] = args.tau_t2t
    names = ("gen_length", "max_post_steps", "num_to_transfer", "eos_early_stop", "temperature", "top_k", "top_p")
    names += ("fill_from", "edit_from", "select", "mark_visible")
    kept = {k: getattr(args, k) for k in names}
    return Decoding(**gates, **kept, n_rounds=rounds, marker=not args.no_marker)


def counts_line(output: Output, model: Model, seconds: float | None = None) -> str:
    """Forwards by kind, the paper's figure (full forwards a token) and the honest one (all, in full forwards)."""
    n, nfe = max(1, len(output.tokens)), output.nfe
    share = model.cfg.n_last / model.cfg.n_layer
    total = nfe["full"] + nfe["commit"] + nfe["partial"] * share
    speed = ""
    if seconds:
        speed = f", {n / seconds:.0f} tokens/s, {1e3 * seconds / max(1, nfe['full']):.1f} ms a full forward"
        speed += peak_memory(model.wte.weight.device)
    return (f"{len(output.tokens)} tokens; forwards: {nfe['full']} full, {nfe['partial']} partial (x {share:.2f}), "
            f"{nfe['commit']} commit; {nfe['full'] / n:.3f} full a token, {total / n:.3f} in all{speed}")  # fmt: skip


class Stream:
    """Prints one row's text as its blocks finish, never half a character."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.shown = tokenizer, 0
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, row: int, output: Output) -> None:
        new, self.shown = output.tokens[self.shown :], len(output.tokens)
        print(self.utf8.decode(self.tokenizer.decode_bytes(new)), end="", flush=True)


def run(args: argparse.Namespace) -> None:
    device = pick_device(args.device)
    model = load_model(args.ckpt, device, DTYPES[args.dtype], args.adapter, block_length=args.block_length)
    tokenizer = load_tokenizer(Path(args.ckpt), model.cfg.tokenizer)
    d = settle_args(args, model)
    prompts = read_prompts(args, tokenizer, model)
    if args.trace_html and len(prompts) > 1:
        fail(f"--trace_html shows one prompt a page, not {len(prompts)}: run once for each")
    stream = None
    if len(prompts) == 1 and tokenizer is not None and not args.json:
        print(tokenizer.decode(prompts[0]), end="", flush=True)
        stream = Stream(tokenizer)
    start = time.perf_counter()
    outputs = generate(model, prompts, d, seed=args.seed, use_cache=not args.no_cache,
                       trace=bool(args.trace or args.trace_html or args.json), on_block=stream)  # fmt: skip
    seconds = time.perf_counter() - start
    for prompt, output in zip(prompts, outputs, strict=True):
        text = None if tokenizer is None else tokenizer.decode(output.tokens)
        if output.warning:
            print(f"warning: {output.warning}", file=sys.stderr)
        per_token = output.nfe["full"] / max(1, len(output.tokens))
        record = dict(text=text, tokens=output.tokens, nfe=output.nfe, nfe_per_token=per_token, steps=output.steps,
                      prompt=prompt, mask_id=model.cfg.mask_id, n_rounds=d.n_rounds,
                      pieces=pieces(prompt, output.steps, tokenizer, model.cfg.mask_id))  # fmt: skip
        if args.trace_html:
            write_page(Path(args.trace_html), [(Path(args.adapter or args.ckpt).name, record)])
            print(f"wrote {args.trace_html}", file=sys.stderr)
        if args.json:
            print(json.dumps(record))
            continue
        if stream is None:
            print(tokenizer.decode(prompt) + text if tokenizer else output.tokens)
        print()
        if args.trace:
            show_trace(record)
        print(f"[{counts_line(output, model, seconds if len(outputs) == 1 else None)}]")


def main() -> None:
    args = build_parser().parse_args()
    try:
        run(args)
    except KeyboardInterrupt:
        fail("interrupted")
    except torch.OutOfMemoryError:
        fail("out of memory: add --dtype bf16, shorten --gen_length, or give fewer prompts")


if __name__ == "__main__":
    main()
