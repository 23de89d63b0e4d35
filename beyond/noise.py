"""Joint samples in one pass: a marked position also carries a number u, and the target is the chain's draw by it.

A deterministic readout can be a mode or a product, never a sample of the joint. Here u, uniform in [0, 1), is added to
the marker as cosines, and the target is the tuple that inverse conditional CDFs give at these numbers (Rosenblatt's
transform): a Stage B that learns the map from u to tokens samples the bundle jointly in one pass; u = 0 is the greedy
chain. `sample.py --temperature 1` draws u where the adapter was trained with it.

    python -m beyond.noise --data modes --init_from out/base --n_last 3 --s_min 4 --corruption mask --out_dir out/noise
"""

import math
from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sample
import train
from beyond import chain
from beyond.chain import CleanCache, bundle_as_decoded, greedy_chain, leaders, stage_a_look
from beyond.stage_b_only import StageBOnly, adapt, stage_b_losses
from cache import Cached
from corrupt import M
from lib.util import fail, generator, uniform
from model import Model
from train import Batch, Losses, Recipe, corrupt_batch

# R rows, T positions, B block_length, P selected positions, C channels, V vocabulary

WAVES = 32  # cos(0), cos(pi u) .. cos(31 pi u): fine enough to tell CDF steps of 1/32 apart


# --- the model
class Noisy(StageBOnly):
    u: Tensor | None = None  # (R, T) float32 in [0, 1) of the pass at hand; None: zeros, the greedy chain

    def mark(self, h: Tensor, bundle: Tensor, round: int) -> Tensor:
        u = self.u
        if u is None:
            u = torch.zeros(bundle.shape, device=h.device)
        wave = torch.arange(WAVES, device=h.device, dtype=torch.float32)
        carried = torch.cos(math.pi * wave * u[..., None].float()) @ self.markers_noise  # (R, T, C)
        marker = bundle[..., None] * (self.markers[round] + carried).to(h.dtype)

        # a clean copy behind the rows is never marked
        return h + F.pad(marker, (0, 0, 0, h.shape[1] - bundle.shape[1]))

    def adapter_state(self) -> dict[str, Tensor]:
        return super().adapter_state() | {"markers_noise": self.markers_noise}


def noisy_step(
    engine: Cached, z: Tensor, prompt: Tensor, any_masked: bool, u: Tensor, d: sample.Decoding
) -> dict[str, Tensor]:
    """sample.step, with each row's third draw on the markers."""
    if d.temperature not in (0, 1):
        fail(f"--temperature {d.temperature}: this adapter was trained to sample jointly at 1 (or greedily at 0)")
    engine.model.u = u[:, 2]
    try:
        return sample.step(engine, z, prompt, any_masked, u, d)
    finally:
        engine.model.u = None


def make_noisy(model: Model, r: int, rng: torch.Generator) -> None:
    adapt(model, r, rng, Noisy)
    model.markers_noise = nn.Parameter(torch.zeros(WAVES, model.cfg.n_embd, device=model.markers.device))
    model.step = noisy_step


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter (checkpoint.load_adapter)."""
    make_noisy(model, settings["lora_r"], torch.Generator())


# --- the training step
def noise_step(model: Noisy, batch: Batch, args: Namespace) -> Losses:
    """chain_step with a number on every position, and with the chain's draw by these numbers as the target."""
    z, kind = corrupt_batch(model, batch, args)
    finished = CleanCache(model, batch)
    bundle = bundle_as_decoded(finished, z, kind == M, batch, args)

    # the numbers, and what the chain draws by them
    u = uniform(batch.draws, z.shape[1]).to(z.device)
    written = drawn_chain(finished, z, bundle, u)
    wanted = torch.where(bundle, written, batch.clean)

    # Stage B carries them on its markers
    model.u = u
    try:
        return stage_b_losses(model, batch, z, kind, bundle, wanted, args)
    finally:
        model.u = None


def drawn_chain(finished: CleanCache, z: Tensor, bundle: Tensor, u: Tensor) -> Tensor:
    """The chain's draw of each bundle by its positions' numbers u: (R, T) int64."""
    B = finished.B
    numbers = u.view(-1, B)

    def look(blocks: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        # the numbers of the positions that are looked at, in their order
        asked = numbers[where]
        pick = stage_a_look(finished, lambda log_p, k, chunk: quantile(log_p, asked[chunk]))
        return pick(blocks, where, k)

    written, _ = greedy_chain(look, z.view(-1, B), bundle.view(-1, B))
    return written.reshape(z.shape)


def quantile(log_p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """As chain.best_tokens, but the one token in which u (P,) falls: (P, 1) log-probabilities and tokens.

    The best token comes first and then the others by id, because the map from u to tokens is to be learned, and the
    order of near-equals is noise.
    """
    p = log_p.exp()
    best = leaders(log_p, 1)
    first = p.gather(-1, best)  # (P, 1)
    others = p.scatter(-1, best, 0.0).cumsum(-1)

    beyond = u[:, None] * (first + others[:, -1:]) - first
    other = torch.searchsorted(others, beyond, right=True)
    last = (others < others[:, -1:]).sum(-1, keepdim=True)
    other = torch.minimum(other, last)  # rounding: not past the last one
    token = torch.where(beyond < 0, best, other)
    return log_p.gather(-1, token), token


# --- the command line
def adapt_noisy(model: Model, args: Namespace) -> None:
    make_noisy(model, args.lora_r, generator(args.seed, "lora"))


def choose(args: Namespace) -> Recipe:
    chain.check(args)
    if args.beam > 1 or args.target == "clean" or args.lora == "all":
        fail(
            "joint samples are draws of the greedy chain's conditionals, by adapters in Stage B alone: no --beam, "
            "--target or --lora"
        )
    return Recipe(noise_step, adapt_noisy, "python -m beyond.noise", {"extension": "beyond.noise"})


def main() -> None:
    train.main(chain.build_parser(__doc__), choose)


if __name__ == "__main__":
    main()
