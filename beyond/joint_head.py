"""The joint head: a dense block of its own that looks once more at Stage A's final states and writes the bundle.

    y <- y + 1_S * Block(y)      head_layers times, from y = Stage A's final states, normed; S the bundle

The paper's Stage B runs the last n layers again, with a marker. The joint head is no Stage B: it has weights of its
own (a dense block beside a mixture of experts is small), reads no cache (attention stays inside the block of text,
whose states have seen the context), keeps what is not in the bundle at Stage A's states, and starts as Stage A,
because its output projections are zero. It is trained on chain targets (chain.py). A bundle of one token has nothing
to coordinate and is written as it is.

It may refuse. What does not pass tau_keep, by the same rule as Stage A's tau_m2t, stays masked, for the next step to
decide. A chain starts with Stage A's own first token, which is therefore always written; where the head would write
another there, the rest of what it wants is refused as well.

There is no marker. It would say which positions are asked, and on names that changes nothing (results/pays/weak_base).

    python train.py --stage_a_only --n_last 2 --out_dir out/base
    python -m beyond.joint_head --data names --init_from out/base --max_iters 1200 --out_dir out/joint
    python sample.py --ckpt out/base --adapter out/joint --tau_m2t 0.1 --tau_t2t none --prompt "ARABIC LIGATURE"
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sample
import settings
import train
from beyond import chain
from beyond.chain import CleanCache, bundle_as_decoded, stage_b_target
from cache import Cached
from corrupt import M, cross_entropy, kinds, three_term_loss
from lib.util import Parser, bounded, fail, first_masked, generator, uniform
from model import Block, Config, Context, Model, rotary
from sample import Decoding, candidates, select_bundle
from train import Batch, Losses, Recipe, corrupt_batch

# R rows, T positions, B block_length, Z = T / B blocks, N blocks of a batch, C channels, V vocabulary,
# P bundle positions


# --- the head
def dense_blocks(cfg: Config, n: int, width: int, rng: torch.Generator) -> nn.ModuleList:
    """n blocks of a model's geometry, dense ones, whose projections to the residual stream are zero."""
    cfg = replace(cfg, n_dense=cfg.n_layer, d_dense=width)
    blocks = nn.ModuleList(Block(cfg, i) for i in range(n))
    for name, p in blocks.named_parameters():
        if name.endswith(("proj.weight", "down.weight")):
            p.data.zero_()
        elif p.dim() == 2:
            p.data.normal_(0.0, cfg.n_embd**-0.5, generator=rng)
    return blocks


class JointHead(Model):
    """A model with a joint head; Stage A is the base bit for bit."""

    least = 2  # tokens in a bundle that is looked at again

    def give_head(self, head_layers: int, width: int, tau_keep: float, rng: torch.Generator) -> None:
        """Freeze the base and add dense blocks that change nothing yet. Float32, as all trained weights are."""
        self.requires_grad_(False)
        self.tau_keep = tau_keep
        self.joint_head = dense_blocks(self.cfg, head_layers, width, rng).to(self.wte.weight.device)

    @property
    def partial_cost(self) -> float:
        """What one look at a whole block costs, in full forwards: the head's layers beside the model's."""
        return len(self.joint_head) / self.cfg.n_layer

    def second_look(self, h: Tensor, bundle: Tensor) -> Tensor:
        """h (R, B, C) Stage A's final states of one block a row, bundle (R, B) bool -> states before the LM head at the
        bundle's positions, (P, C)."""
        # states grow with depth, and the LM head norms them anyway
        y = F.rms_norm(h, h.shape[-1:])
        cos, sin = rotary(self.cfg, torch.arange(h.shape[1], device=h.device), h.dtype)
        ctx = Context(cos, sin, mask=None)
        for block in self.joint_head:
            # all positions are read, the bundle's alone are changed
            x = y[bundle] + block.attn(block.norm_1(y), ctx)[bundle]
            x = x + block.mlp(block.norm_2(x))
            y = y.masked_scatter(bundle[..., None], x)
        return y[bundle]

    def step(
        self, engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: Decoding
    ) -> dict[str, Tensor]:
        """`sample.step` with Stage A alone, then the head where there is a bundle of two or more (--n_rounds 0: off).

        What it refuses is taken out of the bundle. "partial" (R,) is the share of the block that it looked at.
        """
        s = sample.step(engine, z, prompt, any_masked, u, replace(d, n_rounds=0))
        looked_at = s["bundle"] & (s["bundle"].sum(-1, keepdim=True) >= self.least)
        if d.n_rounds == 0 or not any_masked or not looked_at.any():
            return s | {"partial": torch.zeros(len(z), device=z.device)}

        # its tokens, and how sure it is of them
        logits = self.head(self.second_look(engine.h_a, looked_at))  # (P, V)
        token, conf = candidates(logits, u[:, 1][looked_at], d)
        token = s["token_a"].masked_scatter(looked_at, token)
        conf = s["conf_a"].masked_scatter(looked_at, conf)

        # what it keeps is written, what it refuses stays masked
        kept = looked_at
        if self.tau_keep > 0:
            gate = replace(d, tau_m2t=self.tau_keep, num_to_transfer=0)
            passing = select_bundle(conf, looked_at, gate, self.cfg.order)

            # a head that wants another first token has another chain in mind: nothing of it is kept
            one = replace(d, tau_m2t=1.0, num_to_transfer=1)  # no probability is above 1: the first of the order
            first = select_bundle(s["conf_a"], looked_at, one, self.cfg.order)
            other = first & (token != s["token_a"])
            kept = first | (passing & ~other.any(-1, keepdim=True))
            token = torch.where(other, s["token_a"], token)
            conf = torch.where(other, s["conf_a"], conf)
        refused = looked_at & ~kept
        after = torch.where(kept, token, s["after"])
        after = torch.where(refused, z, after)
        return s | {
            "after": after, "bundle": s["bundle"] & ~refused, "conf": conf, "token": token, "refused": refused,
            "partial": looked_at.float().mean(-1),
        }  # fmt: skip

    def adapter_state(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.state_dict().items() if k.startswith("joint_head.")}


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter."""
    head_layers = settings.get("head_layers")
    width = settings.get("width")
    tau_keep = settings.get("tau_keep")
    for name, value in (("head_layers", head_layers), ("width", width)):
        if type(value) is not int or not 0 < value < 2**20:
            fail(f"adapter.json of a joint head: {name} must be a positive number, not {value!r}")
    if type(tau_keep) not in (int, float) or not 0 <= tau_keep <= 1:
        fail(f"adapter.json of a joint head: tau_keep must be a probability, not {tau_keep!r}")
    if model.cfg.n_rounds > 1:
        fail("adapter.json of a joint head: it looks once, n_rounds must be 1")
    model.__class__ = JointHead
    model.give_head(head_layers, width, tau_keep, torch.Generator())


# --- the training step
def masks_as_decoded(model: Model, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor]:
    """z and kind (R, T): masks alone. In half of the blocks they are moved to its end, as many: a prompt leaves the
    rest of its block to be written. In all of them where the leftmost are written first: then nothing else is met."""
    z, kind = corrupt_batch(model, batch, args)
    R, T = z.shape
    B = model.cfg.block_length
    masked = kind == M

    # as many positions, counted from the end
    size = masked.view(R, T // B, B).sum(-1)
    from_the_end = -torch.arange(T, device=z.device).float().expand(R, T)
    last = first_masked(from_the_end, batch.free, size, B)

    share = 0.5
    if model.cfg.order == "leftmost":
        share = 1.0
    moved = uniform(batch.draws, T // B) < share
    moved = moved.repeat_interleave(B, dim=1).to(z.device)
    masked = torch.where(moved, last, masked)
    z = batch.clean.masked_fill(masked, model.cfg.mask_id)
    kind = kinds(batch.clean, z, batch.free, model.cfg.mask_id)
    return z, kind.masked_fill(masked, M)


def joint_head_step(model: JointHead, batch: Batch, args: Namespace, masks: Callable = masks_as_decoded) -> Losses:
    """The head's loss on chain targets; Stage A is the frozen base."""
    # what the model is shown: masks alone, in half of the blocks at its end, as a prompt leaves them
    z, kind = masks(model, batch, args)
    masked = kind == M

    # the bundle, and what the base would write into it one token at a time
    finished = CleanCache(model, batch)
    bundle = bundle_as_decoded(finished, z, masked, batch, args)
    bundle = without_small_ones(bundle, model.cfg.block_length, model.least)
    wanted = stage_b_target(finished, z, bundle, batch, args)

    # Stage A's final states of the blocks that have a bundle (attention takes no batch of nothing)
    blocks = z.view(-1, model.cfg.block_length)  # (R * Z, B)
    in_bundle = bundle.view(-1, model.cfg.block_length)
    asked = in_bundle.any(-1)
    asked[0] |= ~asked.any()
    h = finished.read(blocks[asked], asked.nonzero()[:, 0])  # (N, B, C)

    # the head looks again, and is asked for the bundle alone
    h = model.second_look(h, in_bundle[asked])
    ce = cross_entropy(model, h, wanted[bundle])
    terms = torch.zeros(2, 3, 2, device=z.device)
    terms[1, 0] = summed(ce)
    if not torch.is_grad_enabled():
        terms[0] = stage_a_terms(finished, batch, z, kind)
    return ce.sum(), terms


def summed(ce: Tensor) -> Tensor:
    """(P,) cross-entropies -> (2,): their sum and their number, as a term of the log."""
    return torch.stack([ce.detach().sum(), torch.tensor(float(len(ce)), device=ce.device)])


def without_small_ones(bundle: Tensor, B: int, least: int) -> Tensor:
    """(R, T) bool without the bundles of fewer than `least` tokens, which have nothing to coordinate."""
    size = bundle.view(len(bundle), -1, B).sum(-1)
    return bundle & (size >= least).repeat_interleave(B, dim=1)


@torch.no_grad()
def stage_a_terms(finished: CleanCache, batch: Batch, z: Tensor, kind: Tensor) -> Tensor:
    """(3, 2): the frozen base's own terms, for the validation."""
    blocks = z.view(-1, finished.B)
    h = finished.read(blocks, torch.arange(len(blocks), device=z.device))
    _, terms = three_term_loss(finished.model, h.view(*z.shape, -1), batch.clean, kind, fill=kind == M)
    return terms


# --- the command line
def build_parser(doc: str) -> Parser:
    p = chain.build_parser(doc)
    p.set_defaults(
        corruption="mask", confident_share=0.75, s_min=2, s_max=8, learning_rate=5e-3, batch_size=64
    )  # fmt: skip
    add = p.add_argument_group("joint head (beyond the paper)").add_argument
    # fmt: off
    add("--head_layers", type=bounded(int, 1), default=1, help="dense blocks of the head")
    add("--width", type=bounded(int, 1), default=192, help="of their SwiGLU")
    add("--tau_keep", type=bounded(float, 0, 1), default=0.5,
        help="in decoding, what does not pass this stays masked (0: nothing is refused)")
    # fmt: on
    return p


def check(args: Namespace) -> None:
    """Refuse what cannot be meant."""
    if args.corruption != "mask" or (args.context != "clean" and not settings.is_toy(args)):
        fail("a joint head reads what decoding will show it: --corruption mask and --context clean")
    if args.n_rounds > 1:
        fail(f"--n_rounds {args.n_rounds}: a joint head looks once; for more layers, --head_layers")
    if args.lora == "all":
        fail("--lora all: a joint head has weights of its own, and Stage A is the base")
    chain.check(args)


def give_head(model: Model, args: Namespace) -> None:
    """What learns: the head."""
    model.__class__ = JointHead
    model.give_head(args.head_layers, args.width, args.tau_keep, generator(args.seed, "joint head"))


def choose(args: Namespace) -> Recipe:
    check(args)
    extension = dict(
        extension="beyond.joint_head", head_layers=args.head_layers, width=args.width, tau_keep=args.tau_keep
    )
    return Recipe(joint_head_step, give_head, "python -m beyond.joint_head", extension)


def main() -> None:
    train.main(build_parser(__doc__), choose)


if __name__ == "__main__":
    main()
