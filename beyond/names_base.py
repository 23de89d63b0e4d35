"""A base of names that is worth deciding on: written in any order, and from left to right, by one model.

Four things differ from train.py. What each of them is worth stands in results/names/recipe.md.

    the masks       of a block are its end, random ones behind a visible beginning, or random ones: what decoding meets
    the context     is clean, as it is in decoding: a noisy block reads the finished text before it
    blocks of one   a share of the rows is read as by a left-to-right model: every token of such a row is a target
    Muon            updates the layers' matrices by an orthogonal matrix (torch.optim.Muon), Adam all the rest

With --one_by_one 1 the same script trains the opponent, a left-to-right model: its checkpoint has blocks of one.
Nothing but masks has a loss, so that the model is not taught to judge or to edit what is visible.

    python -m beyond.names_base --out_dir out/names-base
    python -m beyond.names_base --init_from resume --out_dir out/names-base  # go on after Ctrl-C, kill or power cut
    python -m beyond.names_base --one_by_one 1 --out_dir out/left-to-right  # the same time, the same geometry
    python evaluate.py --data names --ckpt out/names-base
"""

import json
import math
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import checkpoint
from lib import data, util
from lib.tokenizer import Tokenizer, learn_bpe
from lib.util import Parser, bounded, fail, generator
from model import Config, Context, Model, rotary

# R rows, T positions, B block_length, V vocabulary

BLOCK = 8
SETTINGS = "base.json"


# --- what the model reads
def load_names(folder: Path) -> tuple[dict[str, list[Tensor]], Tokenizer]:
    """{"train": rows, "val": rows}, each row int64 ids, its last block filled with eos, as decoding fills it. The
    tokenizer is learned from all names, and written beside the weights."""
    if not (folder / "tokenizer.json").exists():
        util.write_json(folder / "tokenizer.json", learn_bpe(data.unicode_names(), data.NAMES_VOCAB))
        util.write_json(folder / "names.json", {"unidata_version": data.unicodedata.unidata_version})
    tokenizer = checkpoint.load_tokenizer(folder, "bpe")

    rows = {"train": [], "val": []}
    for name in data.unicode_names():
        ids = torch.from_numpy(tokenizer.encode_document(name)).long()
        rest = -len(ids) % BLOCK
        split = "val" if data.is_validation(name) else "train"
        rows[split].append(F.pad(ids, (0, rest), value=tokenizer.eos_id))
    return rows, tokenizer


def batch(rows: list[Tensor], step: int, size: int, seed: int) -> list[Tensor]:
    """The rows of one step, (R, T) int64 for each length T that occurs. Every epoch has an order of its own."""
    steps = len(rows) // size
    order = torch.randperm(len(rows), generator=generator(seed, "names", step // steps))
    here = order[step % steps * size :][:size].tolist()

    by_length = defaultdict(list)
    for i in here:
        by_length[len(rows[i])].append(rows[i])
    return [torch.stack(same) for _, same in sorted(by_length.items())]


def beside_clean(cfg: Config, T: int, B: int, dtype: torch.dtype) -> Context:
    """Context of rows [noisy ; clean] in blocks of B. The last block needs no clean copy, nothing reads it: 2T - B
    positions. A noisy block sees itself and the clean blocks before it, a clean one itself and those before it.

    T = 3, B = 1, noisy 0 1 2 and clean 0 1:      1 0 0 0 0
                                                  0 1 0 1 0
                                                  0 0 1 1 1
                                                  0 0 0 1 0
                                                  0 0 0 1 1
    """
    position = torch.cat([torch.arange(T), torch.arange(T - B)])
    noisy = torch.arange(2 * T - B) < T
    block = position // B
    same = block[:, None] == block
    earlier = block[:, None] > block
    reads_noisy = noisy[:, None] & same
    reads_clean = earlier | (~noisy[:, None] & same)
    cos, sin = rotary(cfg, position, dtype)
    return Context(cos, sin, torch.where(noisy, reads_noisy, reads_clean))


def draw_masks(n: int, B: int, rng: torch.Generator) -> Tensor:
    """Which positions of n blocks are masks, (n, B) bool: in 30 % the end of the block, in 30 % random ones behind a
    visible beginning, rather many, in 40 % random ones, their ratio U(0, 1)."""
    kind = torch.rand(n, 1, generator=rng)
    ratio = torch.rand(n, 1, generator=rng)
    noise = torch.rand(n, B, generator=rng)
    start = (torch.rand(n, 1, generator=rng) * B).long()
    end = torch.arange(B) >= start
    scattered = end & (noise < ratio.sqrt())
    anywhere = noise < ratio
    return torch.where(kind < 0.3, end, torch.where(kind < 0.6, scattered, anywhere))


# --- the loss
def fill_loss(model: Model, x: Tensor, masked: Tensor, B: int) -> Tensor:
    """Sum of cross-entropies, nats, at the masks of rows x (R, T) that are read in blocks of B beside a clean copy."""
    T = x.shape[1]
    z = x.masked_fill(masked, model.cfg.mask_id)
    ctx = beside_clean(model.cfg, T, B, model.compute_dtype)
    h = model.last_n(model.prefix(torch.cat([z, x[:, : T - B]], dim=1), ctx), ctx)
    return F.cross_entropy(model.head(h[:, :T][masked]), x[masked], reduction="sum")


def two_losses(model: Model, x: Tensor, one_by_one: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first rows of x (R, T) in blocks of one, every token a mask; the others in blocks with drawn masks."""
    R, T = x.shape
    first = round(R * one_by_one)
    causal = any_order = torch.zeros(())
    if first > 0:
        causal = fill_loss(model, x[:first], torch.ones(first, T, dtype=torch.bool), 1)
    if first < R:
        masked = draw_masks((R - first) * T // BLOCK, BLOCK, rng).view(R - first, T)
        any_order = fill_loss(model, x[first:], masked, BLOCK)
    return causal, any_order


@torch.no_grad()
def validate(model: Model, rows: list[Tensor], args: Namespace) -> dict[str, float]:
    """Nats a held-out token, the same rows and masks each time: left to right, and of the masks in any order."""
    sums = {"causal": 0.0, "any_order": 0.0}
    batches = batch(rows, 0, args.batch_size, args.seed)
    tokens = sum(x.numel() for x in batches)
    for x in batches:
        sums["causal"] += float(two_losses(model, x, 1, generator("validation"))[0]) / tokens
        sums["any_order"] += float(two_losses(model, x, 0, generator("validation"))[1]) / tokens
    return sums


# --- the run
class MuonAndAdam:
    """Muon for the matrices of the layers, which map states to states; Adam for embeddings, the head and norms."""

    def __init__(self, model: Model, args: Namespace):
        named = list(model.named_parameters())
        matrices = [p for name, p in named if name.startswith("layers.") and p.dim() == 2]
        others = [p for name, p in named if not (name.startswith("layers.") and p.dim() == 2)]
        muon = dict(lr=args.learning_rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        adam = dict(lr=args.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.parts = [torch.optim.Muon(matrices, **muon), torch.optim.AdamW(others, **adam)]
        self.peaks = [args.learning_rate, args.adam_rate]

    @property
    def state(self) -> dict[torch.nn.Parameter, dict[str, Tensor]]:
        """What both remember of each parameter."""
        owned = [(p, part) for part in self.parts for p in part.param_groups[0]["params"]]
        return {p: part.state[p] for p, part in owned}

    def step(self, share: float) -> None:
        """One update at this share of the peak learning rates."""
        for part, peak in zip(self.parts, self.peaks, strict=True):
            part.param_groups[0]["lr"] = peak * share
            part.step()
            part.zero_grad(set_to_none=True)


def learning_share(step: int, steps: int) -> float:
    """Linear warm-up over 2 % of the steps times a cosine to zero."""
    warm = min(1.0, (step + 1) / (0.02 * steps))
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def new_model(args: Namespace, tokenizer: Tokenizer) -> Model:
    size = dict(n_layer=args.n_layer, n_dense=args.n_layer, n_embd=args.n_embd, d_dense=args.width, n_last=1)
    heads = dict(n_head=args.n_embd // 32, n_kv_head=args.n_embd // 64)
    reads = dict(tokenizer="bpe", eos_id=tokenizer.eos_id, mask_id=tokenizer.mask_id, vocab_size=data.NAMES_VOCAB)
    reads["order"] = "leftmost"  # in which this model is better, see results/names/recipe.md
    reads["block_length"] = 1 if args.one_by_one == 1 else BLOCK
    cfg = checkpoint.check(replace(checkpoint.PRESETS["names"], **size, **heads, **reads))
    model = checkpoint.new_model(cfg, generator(args.seed, "init"))
    model.compute_dtype = checkpoint.DTYPES[args.dtype]
    return model


def train_step(model: Model, optimizer: MuonAndAdam, rows: list[Tensor], step: int, args: Namespace) -> float:
    """One update -> its loss, nats a token."""
    rng = generator(args.seed, "masks", step)
    batches = batch(rows, step, args.batch_size, args.seed)
    tokens = sum(x.numel() for x in batches)
    total = 0.0
    for x in batches:
        causal, any_order = two_losses(model, x, args.one_by_one, rng)
        loss = (causal + any_order) / tokens
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(learning_share(step, args.max_iters))
    return total


def run(args: Namespace, resume: bool) -> None:
    folder = Path(args.out_dir)
    rows, tokenizer = load_names(folder)
    model = new_model(args, tokenizer)
    optimizer = MuonAndAdam(model, args)
    done = 0
    if resume and (folder / "state.safetensors").exists():
        done = checkpoint.restore_state(model, optimizer, folder)
    util.write_json(folder / SETTINGS, vars(args))
    checkpoint.rewind_log(folder / "log.jsonl", done)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, steps {done}..{args.max_iters} of {args.batch_size} names -> {folder}")

    # PyTorch's flash attention on CPUs is four times slower than plain products on rows as short as these in bf16
    plain = sdpa_kernel(SDPBackend.MATH)
    with plain, checkpoint.interruptible() as caught, open(folder / "log.jsonl", "a", buffering=1) as log:
        for step in tqdm(range(done, args.max_iters), initial=done, total=args.max_iters, desc="train", disable=None):
            loss = train_step(model, optimizer, rows["train"], step, args)
            log.write(json.dumps({"step": step, "loss": round(loss, 4)}) + "\n")
            last = step + 1 == args.max_iters or bool(caught)
            if last or (step + 1) % args.eval_interval == 0:
                found = {k: round(v, 4) for k, v in validate(model, rows["val"], args).items()}
                log.write(json.dumps({"step": step + 1, "val": True} | found) + "\n")
                tqdm.write(f"step {step + 1}: {found}")
                checkpoint.save_state(model, optimizer, step + 1, folder)
                checkpoint.save_model(model, folder)
            if caught:
                print(f"saved at step {step + 1}; go on with --init_from resume --out_dir {folder}")
                raise SystemExit(130)


def build_parser() -> Parser:
    p, count = Parser(__doc__), bounded(int, 1)
    g = p.add_argument_group("training")
    g.add_argument("--one_by_one", type=bounded(float, 0, 1), default=0.35, help="share of the rows in blocks of one")
    g.add_argument("--max_iters", type=count, default=10000, help="steps; the cosine ends here")
    g.add_argument("--batch_size", type=count, default=256, help="names in a step")
    g.add_argument("--learning_rate", type=bounded(float, 1e-12), default=0.01, help="peak, of Muon")
    g.add_argument("--adam_rate", type=bounded(float, 1e-12), default=4e-3, help="peak, of embeddings, head and norms")
    g = p.add_argument_group("model, all layers dense")
    g.add_argument("--n_layer", type=count, default=8, help="layers")
    g.add_argument("--n_embd", type=count, default=128, help="channels, a multiple of 64; heads of 32")
    g.add_argument("--width", type=count, default=384, help="of the SwiGLU")
    g = p.add_argument_group("run")
    g.add_argument("--init_from", choices=["scratch", "resume"], default="scratch", help="resume: go on in --out_dir")
    g.add_argument("--out_dir", default="out/names-base", help="where the checkpoint and log.jsonl go")
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--dtype", choices=checkpoint.DTYPES, default="bf16", help="of activations; weights are float32")
    g.add_argument("--eval_interval", type=count, default=500, help="validate and save every so many steps")
    return p


def main() -> None:
    args = build_parser().parse_args()
    resume = args.init_from == "resume"
    folder = Path(args.out_dir)
    del args.init_from
    if resume:
        args = Namespace(
            **util.read_json(folder / SETTINGS, "run of this script to resume") | {"out_dir": args.out_dir}
        )
    elif (folder / SETTINGS).exists() or (folder / "config.json").exists():
        fail(f"{folder} already holds a run or a checkpoint: choose another --out_dir, or --init_from resume")
    if args.n_embd % 64 != 0:
        fail(f"--n_embd {args.n_embd} must be a multiple of 64, two heads of 32 share keys and values")
    run(args, resume)


if __name__ == "__main__":
    main()
