"""The head: a causal look at Stage A's final states, and at the token before each position.

    logits_i = log p_A(x_i) + LMHead(Block(norm(h_i) + Show(embedding(x_{i-1}))))      attention looks left in the block

Stage B is told which positions are written together, but not what is written there. The head sees it: x_{i-1} is the
token before, whether it was visible, or written by an earlier look, or at first a draft, Stage A's own.

It reads in parallel looks. A look gives a token at every position. All up to and with the first that differs from its
draft are final: they are what writing one by one would give. The new tokens are the next drafts. Usually two looks or
three find all of it; B always do. With temperature it draws by the chain rule: with given random numbers a draw is a
function of the tokens before it, and the same looks find it. A look costs one of the L layers.

It may refuse. It writes the longest prefix of the masks whose product of its probabilities is above tau_keep. Where
that is nothing, Stage A's first token is written alone, and the next step sees more. At holes, with something visible
behind a mask, the head stands aside, and Stage A's surest token is written: it is taught ends of blocks alone.

It is taught what the base writes from the left, the best of a beam, where the base reads in blocks of one. Such a
base (train.py --one_by_one) reads better so than in its own blocks, but takes a forward a token. With the clean tokens
as its target the head learns the law of the text, for draws.

    python -m beyond.head train --out_dir out/head                                  # on assets/names
    python -m beyond.head train --target clean --out_dir out/draws                  # then sample --temperature 1
    python -m beyond.head sample --ckpt out/head --prompt "ARABIC LIGATURE" --tau_keep 0.8
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoint
import train
from beyond.chain import chain_target, log_probs
from cache import Cached, Uncached, in_full
from lib.util import (
    Parser,
    bounded,
    command,
    entry,
    fail,
    first_masked,
    generator,
    pick_device,
    uniform,
    verdict,
)
from model import Block, Config, Context, Linear, Model, block_causal_mask, rotary
from sample import Decoding, Step, candidates, generate, read_prompts
from train import Batch, Losses, batch_context, clean_tokens

# R rows, T positions of a row, B block_length, C channels, V vocabulary, P positions that are asked

READ_BY = "python -m beyond.head sample --ckpt"
HEAD = dict(
    width=384, target="chain", beam=4, read_in="ones", context="clean",
    max_iters=1500, batch_size=64, learning_rate=5e-3, out_dir="out/head",
)  # fmt: skip


# --- the head
class Head(nn.Module):
    """One dense block of the model's geometry, and a map that shows each position the token before it."""

    def __init__(self, cfg: Config, width: int):
        super().__init__()
        self.cfg = replace(cfg, n_dense=cfg.n_layer, d_dense=width)
        self.block = Block(self.cfg, 0)
        self.show = Linear(cfg.n_embd, cfg.n_embd)

    def init_weights(self, rng: torch.Generator) -> None:
        """Random, but for the projections to the residual stream: with those at zero a block changes nothing."""
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight", "bias")):
                p.data.zero_()
            elif p.dim() == 2:
                drawn = torch.empty(p.shape).normal_(0.0, self.cfg.n_embd**-0.5, generator=rng)
                p.data.copy_(drawn)

    def forward(self, model: Model, states: Tensor, tokens: Tensor, asked: Tensor) -> Tensor:
        """What the head adds to Stage A's log-probabilities where it is asked.

        states (R, B, C) Stage A's final ones; tokens (R, B) int64, as far as they are known; asked (R, B)
        bool -> (P, V) float32.
        """
        # the token before each position; before the first of a block there is none
        before = model.wte(tokens).to(states.dtype)
        before = F.pad(before[:, :-1], (0, 0, 1, 0))  # (R, B, C)

        # states grow with depth, and the output layer norms them anyway
        x = F.rms_norm(states, states.shape[-1:]) + self.show(before)

        # attention to the left, inside the block, whose states have seen the context
        B = tokens.shape[1]
        cos, sin = rotary(self.cfg, torch.arange(B, device=x.device), x.dtype)
        x = self.block(x, Context(cos, sin, block_causal_mask(B, 1, x.device)))
        return model.logits(x[asked])


# --- decoding
def head_step(
    engine: Cached | Uncached, z: Tensor, given: Tensor, u: Tensor, d: Decoding, tau_keep: float = 0.5
) -> Step:
    """One step by the head in the place of Stage B, see sample.denoise. Nothing is edited."""
    model = engine.model
    masked = z == model.cfg.mask_id

    # Stage A: one full forward
    _, states = engine.stage_a(z)
    stage_a = log_probs(model, states)  # (R, B, V)
    token_a, conf_a = candidates(stage_a, u[:, 0], d)

    # the head looks at the masks of every row but those with holes
    behind = masked.cumsum(-1) > 0
    holes = (behind & ~masked).any(-1, keepdim=True)  # (R, 1)
    mine = masked & ~holes
    token, conf, final, looks = look(model, states, stage_a, z, mine, u[:, 1], d, tau_keep)

    # it writes the longest prefix that is sure enough
    place = torch.arange(z.shape[1], device=z.device).float().expand(z.shape)
    written = prefix(conf, mine & final, tau_keep, place)

    # where that is nothing, Stage A's token alone: the first, or at holes the surest
    alone = ~written.any(-1, keepdim=True)
    one = first_masked(torch.where(holes, -conf_a, place), masked, 1)
    written = torch.where(alone, one, written)
    own = mine & ~(alone & one)
    token = torch.where(own, token, token_a)
    conf = torch.where(own, conf, conf_a)

    after = torch.where(written, token, z)
    return Step(z, after, written, torch.zeros_like(masked), token, conf, token_a, conf_a, looks.float())


def look(
    model: Model, states: Tensor, stage_a: Tensor, z: Tensor, mine: Tensor, u: Tensor, d: Decoding, tau_keep: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As many looks as each row needs: the head's tokens at `mine`, their probabilities, which of them are final
    (R, B), and how many looks each row had (R,).

    states (R, B, C) and stage_a (R, B, V) log-probabilities; mine (R, B) bool; u (R, B) in [0, 1).
    """
    # the first drafts are Stage A's, drawn by the numbers that the head draws by
    draft, _ = candidates(stage_a, u, d)
    tokens = torch.where(mine, draft, z)
    conf = torch.ones_like(u)
    final = ~mine
    looks = torch.zeros_like(z[:, 0])

    live = mine.any(-1)  # (R,)
    while live.any():
        # a look at the rows that are not done
        asked = ~final & live[:, None]
        added = model.head(model, states[live], tokens[live], asked[live])
        found, p = candidates(stage_a[asked] + added, u[asked], d)
        new = tokens.masked_scatter(asked, found)
        conf = conf.masked_scatter(asked, p)
        looks = looks + live

        # what has read nothing but final tokens is final: all up to and with the first that differs
        differs = new != tokens
        earlier = differs.cumsum(-1) - differs.long()
        final = final | (asked & (earlier == 0))
        tokens = new

        # a row is done when all is final, or when what is final falls below tau_keep
        together = conf.masked_fill(~(mine & final), 1.0).prod(-1)
        live = live & ~final.all(-1) & (together > tau_keep)
    return tokens, conf, final, looks


def prefix(probability: Tensor, bundle: Tensor, keep: float, key: Tensor) -> Tensor:
    """Of the bundle, in the order of key, the longest prefix whose product of probabilities is above `keep`: all
    (R, B) -> (R, B) bool.

    .9 .5 .8 from the left, keep 0.4: the first two, .45 together; with keep 0.95 none.
    """
    order = key.masked_fill(~bundle, float("inf")).argsort(dim=-1, stable=True)
    p = probability.masked_fill(~bundle, 0.0).gather(-1, order)
    passing = p.cumprod(-1) > keep
    return torch.zeros_like(bundle).scatter(-1, order, passing)


# --- a base with a head, and its folder
def add_head(model: Model, width: int) -> Head:
    """Freeze the model, and put on it a head, which learns."""
    model.requires_grad_(False)
    model.cfg = replace(model.cfg, n_last=1)  # what one look costs, in layers
    model.head = Head(model.cfg, width).to(model.wte.weight.device)
    model.adapter = {"read_by": READ_BY, "width": width}
    return model.head


def load_head(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Model:
    """A base with the head of this folder."""
    about = checkpoint.about_adapter(folder)
    if about.get("read_by") != READ_BY:
        fail(f"{folder} holds no head; `python -m beyond.head train` makes one")
    base = checkpoint.next_base(folder)
    checkpoint.check_base(base, folder)
    model = checkpoint.load_model(base, device, dtype)
    checkpoint.merge(model, base)
    add_head(model, entry(about, "width", int, folder))

    path = folder / "adapter.safetensors"
    state = dict(checkpoint.read_tensors([path]))
    checkpoint.check_fit(path, state, model.adapter_state(), "is this head whole?")
    model.load_state_dict(state, strict=False)
    return model


# --- the training step
def teach(model: Model, batch: Batch, args: Namespace, target: Callable = clean_tokens) -> Losses:
    """The head's loss at all masks, each read after the wanted tokens before it; Stage A is the frozen base."""
    # what the model is shown: the first tokens of each block, as a prompt or its own writing leaves them
    B = model.cfg.block_length
    R, T = batch.clean.shape
    n_visible = (uniform(batch.draws, T // B) * B).long().repeat_interleave(B, dim=1)  # (R, T), 0 .. B-1
    masked = torch.arange(T) % B >= n_visible
    masked = batch.free & masked.to(batch.free.device)
    z = batch.clean.masked_fill(masked, model.cfg.mask_id)
    wanted = target(model, batch, z, masked)

    # Stage A's final states
    with torch.no_grad():
        ctx = batch_context(model, batch, args)
        states = model.last_n(model.prefix(z, ctx), ctx)[:, :T]  # (R, T, C)
        stage_a = log_probs(model, states[masked])  # (P, V)

    # all positions in one look, block by block
    blocks = states.reshape(-1, B, states.shape[-1])
    added = model.head(model, blocks, wanted.view(-1, B), masked.view(-1, B))
    ce = F.cross_entropy(stage_a + added, wanted[masked], reduction="none")
    return ce.sum(), {"head": torch.stack([ce.detach().sum(), masked.sum()])}


# --- the commands
def train_head() -> None:
    parser = train.build_parser(__doc__)
    add = parser.add_argument_group("head").add_argument
    # fmt: off
    add("--width", type=bounded(int, 1), help="of the head's SwiGLU (384)")
    add("--target", choices=["chain", "clean"], help="what it is taught: the base's own writing (chain), or the text")
    add("--beam", type=bounded(int, 1), help="hypotheses of the chain (4)")
    add("--read_in", choices=["ones", "blocks"], help="how the base reads while it writes: in blocks of one (ones)")
    # fmt: on
    args = train.read_arguments(parser, "-m beyond.head train", **HEAD)
    if args.init_from == "scratch":
        fail("a head stands on a trained base: give one by --init_from DIR")
    if args.context != "clean":
        fail("a head reads what decoding will show it: --context clean")

    # the base, its head, and what teaches it
    corpus = train.load_corpus(args)
    model = train.load_base(args, corpus)
    add_head(model, args.width).init_weights(generator(args.seed, "head"))
    target = clean_tokens
    if args.target == "chain":
        target = partial(chain_target, beam=args.beam, order="left", one_by_one=args.read_in == "ones")
    train.loop(model, corpus, partial(teach, target=target), train.make_optimizer(model, args), args)


def sample_head() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--ckpt", type=Path, required=True, help="a head's folder")
    add("--prompt", action="append", default=[], help="text, in which each ▒ is one token to fill; repeat for rows")
    add("--prompt_ids", type=lambda text: [int(i) for i in text.split(",")], action="append", default=[],
        help="token ids, 1,2,3; repeat for several rows")
    add("--gen_length", type=bounded(int, 0), default=256, help="tokens after the prompt")
    add("--tau_keep", type=bounded(float, 0, 1), default=0.5, help="write what together is surer than this")
    add("--temperature", type=bounded(float, 0), default=0.0, help="0: argmax; else at least 0.001")
    add("--seed", type=int, default=0)
    add("--device", default="auto")
    # fmt: on
    args = parser.parse_args()
    if 0 < args.temperature < 1e-3:
        fail(f"--temperature {args.temperature} is as good as 0, which is greedy: give 0, or at least 0.001")
    model = load_head(args.ckpt, pick_device(args.device), torch.float32)
    tokenizer = checkpoint.load_tokenizer(args.ckpt, model.cfg.tokenizer)
    judged = checkpoint.names_of(args.ckpt) is not None
    prompts = read_prompts(args, tokenizer, model.cfg, args.gen_length, judged)

    d = Decoding(
        gen_length=args.gen_length, tau_t2t=None, n_rounds=0, holes=True, temperature=args.temperature
    )  # fmt: skip
    for output in generate(model, prompts, d, args.seed, step=partial(head_step, tau_keep=args.tau_keep)):
        text = tokenizer.decode(output.prompt + output.tokens) if tokenizer else str(output.tokens)
        print(text, "  " + verdict(text) if judged else "")
        nfe = output.nfe
        cost = model.partial_cost
        count = f"{nfe['full']} full + {nfe['partial']:g} looks x {cost:.3g} + {nfe['commit']} commit"
        print(f"[{len(output.tokens)} tokens; forwards: {count} = {in_full(nfe, cost):.3g}]")


COMMANDS = {"train": train_head, "sample": sample_head}


@command
def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        fail(f"python -m beyond.head COMMAND, one of {', '.join(COMMANDS)}; each has --help")
    COMMANDS[sys.argv.pop(1)]()


if __name__ == "__main__":
    main()
