"""Our Stage B: a few dense blocks of its own, on Stage A's finished states, which change the bundle's positions alone.

    y <- y + 1_S * Block(y)      n_last times, from y = Stage A's final states, normed; S the bundle

The paper's Stage B reads the last n layers again. This one has its own weights (a dense block beside a mixture of
experts is small), reads no cache (attention stays inside the block of text, whose states have seen the context), keeps
what is not in the bundle at Stage A's states, and begins as Stage A: its output projections are zero. It is trained on
chain targets (chain.py), and it may refuse: of a bundle, what it is not sure of (tau_keep) stays masked, for the next
step to decide; only the surest is always written. A bundle of one token has nothing to coordinate and is written as is.

There is no marker: what it would say, the positions that are asked, changes nothing on names (results/pays).

    python train.py --stage_a_only --n_last 2 --out_dir out/base
    python -m beyond.own_blocks --data names --init_from out/base --n_last 1 --max_iters 1200 --out_dir out/joint
    python sample.py --ckpt out/base --adapter out/joint --tau_m2t 0.1 --tau_t2t none --prompt "ARABIC LIGATURE"
"""

from argparse import Namespace
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sample
import train
from beyond import chain
from beyond.chain import Chain
from cache import Cached
from corrupt import Corruption, Draft, Draws, G, M, first_masked, three_term_loss, uniform
from data import bounded, fail, generator
from model import Block, Context, Model, rotary
from sample import Decoding, candidates
from train import Losses, Objective

# R rows, T positions, B block_length, Z = T / B blocks, C channels, V vocabulary, n bundle positions


class OwnBlocks(Model):
    """A model with a Stage B of its own; Stage A is the base bit for bit."""

    least = 2  # tokens in a bundle that is looked at again

    def give_blocks(self, width: int, tau_keep: float, rng: torch.Generator) -> None:
        """Freeze the base and add n_last dense blocks that change nothing yet. Float32, as all trained weights."""
        cfg = replace(self.cfg, n_dense=self.cfg.n_layer, d_dense=width)
        self.requires_grad_(False)
        self.own, self.tau_keep = nn.ModuleList(Block(cfg, i) for i in range(cfg.n_last)), tau_keep
        for name, p in self.own.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                p.data.zero_()
            elif p.dim() == 2:
                p.data.normal_(0.0, cfg.n_embd**-0.5, generator=rng)
        self.own.to(self.wte.weight.device)

    def second_look(self, h: Tensor, bundle: Tensor) -> Tensor:
        """Stage B. h (R, B, C) Stage A's final states of one block a row, bundle (R, B) bool -> states before the head
        at the bundle's positions, (n, C)."""
        y = F.rms_norm(h, h.shape[-1:])  # states grow with depth, and the head norms them anyway
        ctx = Context(*rotary(self.cfg, torch.arange(h.shape[1], device=h.device), h.dtype), mask=None)
        for block in self.own:
            x = y[bundle] + block.attn(block.norm_1(y), ctx)[bundle]
            y = y.masked_scatter(bundle[..., None], x + block.mlp(block.norm_2(x)))
        return y[bundle]

    def kept(self, conf: Tensor, marked: Tensor) -> Tensor:
        """Of the positions that Stage B looked at, which it is sure of; the surest of a row always. All (R, B)."""
        surest = first_masked(-conf, marked, torch.ones_like(marked[:, :1], dtype=torch.long), marked.shape[1])
        return marked & (surest | (conf > self.tau_keep))

    def step(self, engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: Decoding) -> dict[str, Tensor]:
        """`sample.step` with Stage A alone, then this Stage B where there is a bundle of two or more. What it refuses
        is taken out of the bundle. "partial" (R,) is the share of the block that Stage B ran at."""
        s = sample.step(engine, z, prompt, busy, u, replace(d, n_rounds=0))
        marked = s["bundle"] & (s["bundle"].sum(-1, keepdim=True) >= self.least) & bool(d.n_rounds)
        if not busy or not marked.any():
            return s | {"partial": torch.zeros(len(z), device=z.device)}
        token, conf = candidates(self.head(self.second_look(engine.h_a, marked)), u[:, 1][marked], d)  # (n,) twice
        token, conf = s["token_a"].masked_scatter(marked, token), s["conf_a"].masked_scatter(marked, conf)
        written = s["bundle"] & ~marked | self.kept(conf, marked)
        after = torch.where(marked, torch.where(written, token, z), s["after"])
        return s | {"after": after, "bundle": written, "conf": conf, "partial": marked.float().mean(-1)}

    def adapter_state(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.state_dict().items() if k.startswith("own.")}


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    model.__class__ = OwnBlocks
    width, tau_keep = settings.get("width"), settings.get("tau_keep")
    if type(width) is not int or not 0 < width < 2**20 or type(tau_keep) not in (int, float) or not 0 <= tau_keep <= 1:
        fail("adapter.json of own blocks: width must be a positive number, tau_keep a probability")
    if model.cfg.n_rounds > 1:
        fail("adapter.json of own blocks: they run once, n_rounds must be 1")
    model.give_blocks(width, tau_keep, torch.Generator())


class Suffixes(Corruption):
    """Masks alone; in half of the blocks they are moved to its end, as many: a prompt leaves the rest to be written."""

    def __call__(self, x: Tensor, free: Tensor, draws: Draws, draft: Draft) -> tuple[Tensor, Tensor]:
        z, kind = super().__call__(x, free, draws, draft)
        R, B, masked = len(x), self.block_length, kind == M
        from_the_end = -torch.arange(x.shape[1], device=x.device).float().expand(x.shape)
        last = first_masked(from_the_end, free, masked.view(R, -1, B).sum(-1), B)
        moved = (uniform(draws, x.shape[1] // B) < 0.5).repeat_interleave(B, dim=1).to(x.device)
        masked = torch.where(moved, last, masked)
        return x.masked_fill(masked, self.mask_id), torch.where(masked, M, torch.where(free, G, 0)).to(torch.uint8)


class OwnBlocksObjective(Chain):
    command = "python -m beyond.own_blocks"

    def __init__(self, model: Model, *given):
        super().__init__(model, *given)
        self.corruption = Suffixes(**vars(self.corruption))
        self.extension = {"extension": "beyond.own_blocks"} | {k: getattr(self.args, k) for k in ("width", "tau_keep")}

    @staticmethod
    def adapt(model: Model, args: Namespace) -> None:
        model.__class__ = OwnBlocks
        model.give_blocks(args.width, args.tau_keep, generator(args.seed, "own blocks"))

    def bundle(self, x: Tensor, z: Tensor, kind: Tensor, draws: Draws, ctx: Context) -> Tensor:
        """As `Chain` draws them, but for blocks with a single mask, which have nothing to coordinate."""
        bundle, B = super().bundle(x, z, kind, draws, ctx), self.model.cfg.block_length
        return bundle & (bundle.view(len(z), -1, B).sum(-1) >= self.model.least).repeat_interleave(B, dim=1)

    def by_length(self, real: Tensor) -> list[tuple[slice, int]]:
        """All rows at full length: only blocks with a bundle run."""
        return [(slice(None), real.shape[1])]

    def stages(self, x: Tensor, z: Tensor, kind: Tensor, bundle: Tensor, target: Tensor, ctx: Context) -> Losses:
        """Stage B's loss; Stage A is the frozen base, whose terms are measured in validation."""
        model, B = self.model, self.model.cfg.block_length
        asked = bundle.view(-1, B).any(-1) | ~torch.tensor(torch.is_grad_enabled(), device=z.device)
        asked[0] |= ~asked.any()  # attention takes no batch of nothing
        h = self.reader(x, ctx)(z.view(-1, B)[asked], asked.nonzero()[:, 0])  # (n blocks, B, C)
        h_b = model.second_look(h, bundle.view(-1, B)[asked])  # (n, C)
        loss, terms_b = three_term_loss(model, h_b, target[bundle], kind[bundle], fill=kind[bundle] == M)
        terms_a = torch.zeros_like(terms_b)
        if not torch.is_grad_enabled():
            terms_a = three_term_loss(model, h.view(*x.shape, -1), x, kind, kind == M)[1]
        return loss, torch.stack([terms_a, terms_b])


def settle(args: Namespace) -> type[Objective]:
    if args.corruption != "mask" or args.context != "clean" and not train.is_toy(args):
        fail("own blocks read what decoding will show them: --corruption mask and --context clean")
    if args.n_rounds > 1:
        fail(f"--n_rounds {args.n_rounds}: own blocks run once; for more of them, --n_last")
    if args.lora == "all":
        fail("--lora all: own blocks have weights of their own, and Stage A is the base")
    chain.settle(args)
    return OwnBlocksObjective


def build_parser(doc: str) -> train.Parser:
    p = chain.build_parser(doc)
    p.set_defaults(corruption="mask", confident_share=0.75, s_min=2, s_max=8, learning_rate=5e-3, batch_size=64)
    g = p.add_argument_group("own blocks (beyond the paper; n_last of them)")
    g.add_argument("--width", type=bounded(int, 1), default=192, help="of their SwiGLU")
    g.add_argument("--tau_keep", type=bounded(float, 0, 1), default=0.5,
                   help="in decoding, what Stage B is less sure of stays masked (0: nothing is refused)")  # fmt: skip
    return p


def main() -> None:
    train.main(build_parser(__doc__), settle)


if __name__ == "__main__":
    main()
