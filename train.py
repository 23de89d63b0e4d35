"""Split-forward training: Stage A and Stage B of every row after one shared prefix, one backward (paper, Sec. 4.1).

From `scratch` everything trains, markers included. From a checkpoint the backbone is frozen and LoRA and the markers
train: the paper's setting, whose recipe is the default there. Each random number is a function of (seed, row), so a
resumed run continues bit for bit, and rows split over other micro-batches draw the same.

    python train.py --n_last 3                                       # names of Unicode characters, minutes on 2 cores
    python train.py --data modes --n_last 2 --out_dir out/modes      # a toy with known total correlation, a minute
    python train.py --init_from resume --out_dir out/names           # go on after Ctrl-C, kill or power cut
    python train.py --init_from weights/llada2.1-mini --n_last 3 --data fineweb_edu/*.parquet --out_dir out/cocommit
"""

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import checkpoint
import data
import toy
from corrupt import WRONG_RATE, Corruption, Draws, M, draw_bundle, three_term_loss
from data import Parser, bounded, fail, generator
from model import Context, Model, sequence_context

# R rows, T positions, C channels, K = n_rounds

# settings: what is not given depends on what the model reads ("bpe" is the paper's setting) and on where it starts
# fmt: off
READS = {
    "names": dict(preset="names", seq_len=16, block_length=8, batch_size=64, max_iters=2100, out_dir="out/names",
                  learning_rate=4e-3, corruption="mask"),
    "bytes": dict(preset="text", seq_len=256, block_length=8, batch_size=8, max_iters=1300, out_dir="out/text"),
    "toy": dict(preset="tiny", batch_size=128, max_iters=1000, out_dir="out/toy"),
    "bpe": dict(seq_len=2048, batch_size=8, max_iters=12500, out_dir="out/cocommit"),
}
SCRATCH = dict(learning_rate=3e-3, corruption="random")  # there is no draft worth learning from yet
ADAPTER = dict(learning_rate=1e-5, corruption="draft")
FREE_ON_RESUME = {"init_from", "out_dir", "device", "stop_at", "log_interval", "micro_batch", "checkpointing"}


def build_parser(doc: str) -> Parser:
    p, count, some, share = Parser(doc), bounded(int, 1), bounded(int, 0), bounded(float, 0, 1)
    g = p.add_argument_group("data")
    g.add_argument("--data", nargs="+", default=["names"],
                   help=f"names, stdlib, a toy ({', '.join(toy.TASKS)}), or .txt / folder / .jsonl[.gz] / .parquet")
    g.add_argument("--toy", nargs="+", default=[], metavar="KEY=VALUE", help="sizes of a toy, see toy.py")
    g.add_argument("--seq_len", type=count, help="tokens in a row, one document a row (names 16, bytes 256, else 2048)")
    g.add_argument("--max_docs", type=some, default=0, help="stop reading after so many documents (paper 50000; 0 all)")
    g = p.add_argument_group("model")
    g.add_argument("--init_from", default="scratch", help="scratch, resume, or a checkpoint (LoRA and markers train)")
    g.add_argument("--preset", choices=checkpoint.PRESETS, help="geometry from scratch (names, text, tiny for toys)")
    g.add_argument("--n_last", type=count, help="n, the layers of Stage B (paper 3 of 20; half, or a checkpoint's)")
    g.add_argument("--n_rounds", type=count, default=1, help="K, rounds of Stage B, one marker each (paper 1)")
    g.add_argument("--block_length", type=count, help="tokens decoded together (8; a checkpoint's own; a toy's answer)")
    g.add_argument("--lora_r", type=count, default=16, help="rank of the adapters, alpha = 2 r (paper 16 and 32)")
    g.add_argument("--stage_a_only", action="store_true", help="from scratch without Stage B: a base to adapt later")
    g = p.add_argument_group("corruption and bundle")
    g.add_argument("--corruption", choices=WRONG_RATE, help="see corrupt.py (random from scratch; draft from a "
                   "checkpoint, the paper)")
    g.add_argument("--wrong_rate", type=share, help="visible tokens replaced (random, 0.1), masks drafted (draft, 0.3)")
    g.add_argument("--context", choices=["corrupted", "clean"], default="corrupted", help="earlier blocks: corrupted "
                   "too (paper), or clean as in decoding, rows [noisy ; clean]")
    g.add_argument("--bundle_scope", choices=["block", "sequence"], default="block", help="draw the bundle in each "
                   "block, as decoding does, or once in a row (the paper leaves it open)")
    g.add_argument("--s_min", type=count, default=1, help="smallest bundle (paper 1)")
    g.add_argument("--s_max", type=count, default=16, help="largest bundle (paper 16, half a block; 8 is all of ours)")
    g = p.add_argument_group("optimisation")
    g.add_argument("--max_iters", type=count, help="optimizer steps; the cosine ends here (paper 12500)")
    g.add_argument("--batch_size", type=count, help="rows in one optimizer step (paper 8)")
    g.add_argument("--micro_batch", type=some, default=0, help="rows in one forward; gradients accumulate (0: all)")
    g.add_argument("--learning_rate", type=bounded(float, 1e-12), help="peak (3e-3 from scratch; adapters 1e-5, paper)")
    g.add_argument("--weight_decay", type=share, default=0.01, help="on matrices; not on norms and markers")
    g.add_argument("--grad_clip", type=bounded(float, 0), default=1.0, help="largest gradient norm (0: no clipping)")
    g.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward: less memory, slower")
    g = p.add_argument_group("run")
    g.add_argument("--out_dir", help="where checkpoints and log.jsonl go")
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), or one by name")
    g.add_argument("--dtype", choices=checkpoint.DTYPES, default="fp32", help="activations; frozen weights too")
    g.add_argument("--log_interval", type=count, default=1, help="print every so many steps (log.jsonl has them all)")
    g.add_argument("--eval_interval", type=count, default=250, help="validate and save every so many steps")
    g.add_argument("--eval_rows", type=count, default=64, help="validation rows, the same ones each time")
    g.add_argument("--stop_at", type=some, default=0, help="save and stop after this step, as Ctrl-C would (0: run on)")
    return p
# fmt: on


# --- the learning signal
def split_forward(model: Model, ids: Tensor, bundle: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """The split: h = prefix(ids), and of it last_n(h), Stage A, and coordinate(h, bundle), Stage B: states (R, T, C)
    twice. Both are run as one doubled batch, as the paper trains. ids (R, T) int64, bundle (R, T) bool."""
    h, mask = model.prefix(ids, ctx), ctx.mask
    twice = replace(ctx, mask=mask if mask.dim() == 2 else mask.repeat(2, 1, 1, 1))  # padded rows have one mask each
    h_a, h_b = model.last_n(torch.cat([h, model.mark(h, bundle, 0)]), twice).chunk(2)
    for i in range(1, model.cfg.n_rounds):  # further rounds are Stage B's alone
        h_b = model.last_n(model.mark(h_b, bundle, i), ctx)
    return h_a, h_b


Losses = tuple[Tensor, Tensor]  # the weighted sum (scalar, nats); terms (2 stages, 3, 2): cross-entropy, positions


class Objective:
    """Rows -> loss. What beyond/ changes of the paper it changes by overriding methods of this class."""

    command = "python train.py"
    extension: dict = {}  # what an extension writes into adapter.json, so that its adapters are loaded through it

    def __init__(self, model: Model, rows: dict, n_plain: int, args: Namespace, device: torch.device):
        self.model, self.rows, self.args, self.device = model, rows, args, device
        self.notes, cfg = {}, model.cfg  # notes: what an extension adds to a line of the log
        self.corruption = Corruption(args.corruption, cfg.block_length, cfg.mask_id, n_plain, args.wrong_rate)

    @staticmethod
    def adapt(model: Model, args: Namespace) -> None:
        """LoRA in every layer, in both stages (paper, Sec. 5.1)."""
        model.add_lora(args.lora_r, 2 * args.lora_r, generator(args.seed, "lora"))

    def __call__(self, first: int, n: int, stream: str = "train") -> Losses:
        """Eq. 1 over rows first .. first+n of a stream, in both stages; all draws of a row come from its index."""
        x, real, prompt = (t.to(self.device) for t in self.rows[stream].batch(first, n))
        draws = [generator(self.args.seed, stream, i) for i in range(first, first + n)]
        z, kind = self.corruption(x, real & ~prompt, draws, lambda z, where: self.draft(z, where, real))
        context = partial(sequence_context, self.model.cfg, dtype=self.model.compute_dtype,
                          clean_copy=self.args.context == "clean")  # fmt: skip
        ctx = context(real)
        bundle = self.bundle(x, z, kind, draws, ctx)
        inputs = x, z, kind, bundle, self.target(x, z, bundle, draws, ctx)
        parts = [self.stages(*(t[r, :T] for t in inputs), context(real[r, :T])) for r, T in self.by_length(real)]
        return sum(loss for loss, _ in parts), sum(terms for _, terms in parts)

    def by_length(self, real: Tensor) -> list[tuple[Tensor | slice, int]]:
        """Which rows fit into one block, two, four ..., and the positions: the stages skip the padding behind."""
        B, T = self.model.cfg.block_length, real.shape[1]
        widths = torch.tensor([min(T, B << (-(-n // B) - 1).bit_length()) for n in real.sum(1).tolist()])
        return [((widths == width).to(real.device), width) for width in widths.unique().tolist()]

    @torch.no_grad()
    def draft(self, z: Tensor, where: Tensor, real: Tensor) -> Tensor:
        """The pass that writes the model's own errors: Stage A's argmax at (R, T) bool `where`. It reads z as it is,
        without the clean copy of earlier blocks: a draft has to be plausible, not as good as decoding would have it."""
        ctx, tokens = sequence_context(self.model.cfg, real, self.model.compute_dtype), [z.new_empty(0)]
        for h in self.model.last_n(self.model.prefix(z, ctx), ctx)[where].split(1024):  # logits of these alone
            logits = self.model.head(h)
            logits[:, self.model.cfg.mask_id] = float("-inf")  # a draft that stays masked is none
            tokens.append(logits.argmax(-1))
        return torch.cat(tokens)

    def bundle(self, x: Tensor, z: Tensor, kind: Tensor, draws: Draws, ctx: Context) -> Tensor:
        """Drawn in every block, the earlier ones too: a block sees marked masks before it, where decoding has finished
        text. The paper trains so; --context clean takes both marks and masks out of what a block sees."""
        group = self.model.cfg.block_length if self.args.bundle_scope == "block" else z.shape[1]
        return draw_bundle(kind == M, group, self.args.s_min, self.args.s_max, draws)

    def target(self, x: Tensor, z: Tensor, bundle: Tensor, draws: Draws, ctx: Context) -> Tensor:
        """What Stage B is asked to write into the bundle: the clean tokens."""
        return x

    def stages(self, x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, target: Tensor, ctx: Context) -> Losses:
        """Both stages and their losses. All (R, T); ctx is of these rows, or of rows [z ; x] of 2T."""
        model, T = self.model, x.shape[1]
        ids, marked = self.beside_clean_copy(x, z, bundle, ctx)
        if self.args.stage_a_only:
            h_a = model.last_n(model.prefix(ids, ctx), ctx)
            loss, terms = three_term_loss(model, h_a[:, :T], x, kind, fill=kind == M)
            return loss, torch.stack([terms, torch.zeros_like(terms)])
        h_a, h_b = split_forward(model, ids, marked, ctx)
        loss_a, terms_a = three_term_loss(model, h_a[:, :T], x, kind, fill=kind == M)  # fill on all of M
        loss_b, terms_b = three_term_loss(model, h_b[:, :T], target, kind, fill=bundle)  # fill on the bundle only
        return loss_a + loss_b, torch.stack([terms_a, terms_b])

    def beside_clean_copy(self, x: Tensor, z: Tensor, bundle: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """(z, bundle), or with --context clean [z ; x]: the copy is only read, without marks or loss."""
        if len(ctx.cos) == x.shape[1]:
            return z, bundle
        return torch.cat([z, x], dim=1), torch.cat([bundle, torch.zeros_like(bundle)], dim=1)


# --- the run
def run(args: Namespace, objective_class: type[Objective]) -> None:
    device, folder = data.pick_device(args.device), Path(args.out_dir)
    rows, n_plain, tokens = load_rows(args)
    model = checkpoint.start(args, tokens, objective_class.adapt, device)
    objective, optimizer = objective_class(model, rows, n_plain, args, device), make_optimizer(model, args)
    started = args.resume and (folder / "state.safetensors").exists()  # a run killed before its first save starts again
    done = saved = checkpoint.restore_state(model, optimizer, folder) if started else 0
    data.write_json(folder / "train.json", {k: v for k, v in vars(args).items() if k != "resume"})
    checkpoint.rewind_log(folder / "log.jsonl", done)
    cfg, learned = model.cfg, sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{' '.join(args.data)}: {rows['train'].describe()} to train on, {rows['val'].describe()} to validate")
    print(f"training {learned:,} parameters on {device} in {args.dtype}; n = {cfg.n_last} of {cfg.n_layer} layers, K = "
          f"{cfg.n_rounds}, blocks of {cfg.block_length}; steps {done}..{args.max_iters} -> {folder}")  # fmt: skip

    last = min(args.max_iters, args.stop_at or args.max_iters)
    resume = f"{objective.command} --init_from resume --out_dir {folder}"
    with checkpoint.interruptible() as caught, open(folder / "log.jsonl", "a", buffering=1) as log:
        for step in tqdm(range(done, last), initial=done, total=args.max_iters, desc="train", disable=None):
            start, first = time.perf_counter(), step * args.batch_size
            n_real = rows["train"].count_real(first, args.batch_size)  # one denominator for all micro-batches
            total, terms = 0.0, 0.0
            for a, n in pieces(first, args.batch_size, args):
                loss, part = objective(a, n)  # rows, corruption, bundle, the two stages, Eq. 1
                (loss / n_real).backward()
                total, terms = total + float(loss.detach()) / n_real, terms + part
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf))
            if not math.isfinite(total + norm):
                good = f"step {saved} in {folder} ({resume})" if saved else "none yet"
                fail(f"the loss is {total} (gradient norm {norm}) at step {step + 1}; last good checkpoint: {good}; "
                     "lower --learning_rate in a new --out_dir")  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record = dict(step=step, loss=total, grad_norm=norm, lr=learning_rate(step, args), tokens=n_real)
            record |= named_terms(terms) | {"ms": 1e3 * (time.perf_counter() - start)} | objective.notes
            report(record, f"step {step + 1}/{args.max_iters}", log, shown=(step + 1) % args.log_interval == 0)
            if (step + 1) % args.eval_interval == 0 or step + 1 == args.max_iters:
                report(validate(objective, step + 1), f"validation after step {step + 1}", log, shown=True)
            stop = bool(caught)  # asked once: a signal between the save and the break would lose this step
            if stop or step + 1 == last or (step + 1) % args.eval_interval == 0:
                save(model, optimizer, step + 1, args, objective)
                saved = step + 1
            if stop:
                break
    if saved < args.max_iters:
        print(f"saved at step {saved} of {args.max_iters}; go on with: {resume}")
        raise SystemExit(130 if caught else 0)
    ckpt = str(folder) if args.init_from == "scratch" else f"{args.init_from} --adapter {folder}"
    script = f"evaluate.py --data {args.data[0]}" if is_toy(args) else "sample.py --prompt TEXT"
    print(f"done; next: python {script} --ckpt {ckpt}")


def learning_rate(step: int, args: Namespace) -> float:
    """Linear warm-up over 1 % of the steps (paper), then a cosine to zero at max_iters."""
    warm = max(1, round(0.01 * args.max_iters))
    if step < warm:
        return args.learning_rate * (step + 1) / warm
    return args.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, args.max_iters - warm)))


def pieces(first: int, n: int, args: Namespace) -> list[tuple[int, int]]:
    """Rows first .. first+n in micro-batches: (first, number) of each."""
    size = args.micro_batch or args.batch_size
    return [(a, min(size, first + n - a)) for a in range(first, first + n, size)]


def make_optimizer(model: Model, args: Namespace) -> torch.optim.AdamW:
    """Weight decay is for matrices: norms scale and markers are added, zero is not where they should be pulled to."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decays = {n for n, p in named if p.dim() >= 2 and not n.startswith("markers")}
    groups = [{"params": [p for n, p in named if n in decays], "weight_decay": args.weight_decay},
              {"params": [p for n, p in named if n not in decays], "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)


def named_terms(terms: Tensor) -> dict[str, float]:
    """Mean cross-entropy in nats of each term of each stage; a term without positions is left out."""
    names = [f"{term}_{stage}" for stage in "AB" for term in ("m2t", "edit", "clean")]
    return {k: float(s / n) for k, (s, n) in zip(names, terms.view(6, 2).tolist(), strict=True) if n}


@torch.no_grad()
def validate(objective: Objective, step: int) -> dict:
    """The terms of both stages on held-out rows; on a toy also the loss of the whole answer in one step, exactly."""
    args = objective.args
    parts = [objective(a, n, "val")[1] for a, n in pieces(0, args.eval_rows, args)]
    floors = toy.floors(objective.model, objective.rows["val"].toy) if is_toy(args) else {}
    return {"step": step, "val": True} | named_terms(torch.stack(parts).sum(0)) | floors


def report(record: dict, head: str, log, shown: bool) -> None:
    """One line of log.jsonl, and one for people."""
    log.write(json.dumps(record) + "\n")
    if shown:
        tqdm.write(" | ".join([head, *(f"{k} {v:.4g}" for k, v in record.items() if k not in ("step", "val"))]))


def save(model: Model, optimizer, step: int, args: Namespace, objective: Objective) -> None:
    """The resume file first, then the checkpoint that sample.py reads."""
    folder = Path(args.out_dir)
    checkpoint.save_state(model, optimizer, step, folder)
    if args.init_from == "scratch":
        checkpoint.save_model(model, folder)
    else:
        lora = dict(base=args.init_from, lora_r=args.lora_r, lora_alpha=2 * args.lora_r)
        checkpoint.save_adapter(model, folder, lora | objective.extension)
    if is_toy(args):
        data.write_json(folder / "toy.json", {"name": args.data[0]} | toy.sizes(args.toy))


# --- before the first step
def is_toy(args: Namespace) -> bool:
    return len(args.data) == 1 and args.data[0] in toy.TASKS


def load_rows(args: Namespace) -> tuple[dict, int, dict]:
    """{"train": rows, "val": rows}, the number of ordinary tokens, and what these tokens make of a Config."""
    if is_toy(args):
        ids = toy.make(args.data[0], **toy.sizes(args.toy))
        rows = toy.Rows(ids, args.seed, "rows"), toy.Rows(ids, args.seed, "validation rows")
        kind, n_plain, B, V = "toy", ids.V, ids.m, ids.vocab_size
    else:
        scratch, kind = args.init_from == "scratch", "bpe" if args.data == ["names"] else "bytes"
        folder = Path(args.out_dir if scratch else args.init_from)
        if scratch and kind == "bpe" and not (folder / "tokenizer.json").exists():
            data.write_json(folder / "tokenizer.json", data.learn_bpe(data.unicode_names(), data.NAMES_VOCAB))
            data.write_json(folder / "names.json", {"unidata_version": data.unicodedata.unidata_version})
        kind = kind if scratch else checkpoint.read_config(folder).tokenizer
        ids = checkpoint.load_tokenizer(folder, kind) or fail(f"{folder} has no tokenizer.json to read text with")
        n_plain, B, V = min(ids.special.values()), args.block_length, -(-ids.vocab_size // 16) * 16
        fill = B or checkpoint.read_config(folder).block_length
        rows = data.load_sequences(args.data, ids, args.seq_len, args.seed, args.max_docs, fill)
    tokens = dict(tokenizer=kind, eos_id=ids.eos_id, mask_id=ids.mask_id, vocab_size=V, block_length=B)
    return dict(zip(("train", "val"), rows, strict=True)), n_plain, tokens


def settle(args: Namespace, given: set[str]) -> Namespace:
    """Fill in what was not given, from the saved run when resuming, else from READS and SCRATCH or ADAPTER."""
    if args.init_from == "resume":
        args.out_dir = args.out_dir or READS["names"]["out_dir"]
        saved = checkpoint.resumable(Path(args.out_dir), vars(args), given - FREE_ON_RESUME)
        changed = {k: getattr(args, k) for k in given & FREE_ON_RESUME | {"stop_at", "out_dir"}}
        return Namespace(**saved | changed | {"init_from": saved["init_from"], "resume": True})
    args.resume, scratch = False, args.init_from == "scratch"
    reads = "toy" if is_toy(args) else "names" if args.data == ["names"] else "bytes"
    if not scratch:
        tokens = checkpoint.read_config(Path(args.init_from)).tokenizer
        if (tokens == "toy") != is_toy(args):
            fail(f"--init_from {args.init_from} reads other tokens than --data {' '.join(args.data)} has")
        reads = tokens if reads == "bytes" else reads
        if is_toy(args) and not args.toy:  # the checkpoint's own size, unless another one is asked for
            saved = data.read_json(Path(args.init_from) / "toy.json", "toy settings of the checkpoint")
            args.toy = [f"{k}={v}" for k, v in saved.items() if k != "name" and args.data == [saved.get("name")]]
    if args.preset and not scratch:
        fail("--preset is a geometry from scratch; a checkpoint has its own: leave it out")
    if bool(args.block_length or args.seq_len if is_toy(args) else args.toy):
        fail("--block_length and --seq_len are for text, a toy (named by --data) has its size from --toy m=4")
    if args.stage_a_only and not scratch:
        fail("--stage_a_only trains a base from scratch, from a checkpoint Stage B is what there is to train")
    if args.s_max < args.s_min:
        fail(f"--s_max {args.s_max} is below --s_min {args.s_min}")
    for name, value in ((SCRATCH if scratch else ADAPTER) | READS[reads]).items():
        if getattr(args, name) is None and (scratch or name not in ("preset", "block_length")):
            setattr(args, name, value)
    args.wrong_rate = WRONG_RATE[args.corruption] if args.wrong_rate is None else args.wrong_rate
    if any((Path(args.out_dir) / name).exists() for name in ("train.json", "config.json")):
        fail(f"{args.out_dir} already holds a run or a checkpoint: choose another --out_dir, or --init_from resume")
    return args


def main(parser: Parser | None = None, choose: Callable[[Namespace], type[Objective]] = lambda args: Objective) -> None:
    args = (parser or build_parser(__doc__)).parse_args()
    args = settle(args, {a[2:].split("=")[0] for a in sys.argv[1:] if a.startswith("--")})
    objective = choose(args)
    if args.resume and args.command != objective.command:
        fail(f"{args.out_dir} holds a run of another objective: go on with {args.command} --init_from resume")
    args.command = objective.command
    try:
        run(args, objective)
    except KeyboardInterrupt:
        fail("interrupted at once: what was done since the last save is lost; go on with --init_from resume")
    except torch.OutOfMemoryError:
        fail("out of memory: lower --micro_batch or --seq_len, or add --checkpointing")


if __name__ == "__main__":
    main()
