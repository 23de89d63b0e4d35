"""Joint samples in one pass: a marked position also carries a number u, and the target is the chain's draw by it.

A deterministic readout can be a mode or a product, never a sample of the joint. Here u, uniform in [0, 1), is added to
the marker as cosines, and the target is the tuple that inverse conditional CDFs give at these numbers (Rosenblatt's
transform): a Stage B that learns the map from u to tokens samples the bundle jointly in one pass; u = 0 is the greedy
chain. `sample.py --temperature 1` draws u where the adapter was trained with it.

    python -m beyond.noise --data modes --init_from out/base --n_last 3 --s_min 4 --corruption mask --out_dir out/noise
"""

import math
import time
from argparse import Namespace

import torch
from torch import Tensor, nn

import sample
import train
from beyond import chain
from beyond.chain import ChainStageBOnly, build_parser, chain_decode, leaders, longest, settle
from beyond.stage_b_only import StageBOnly, adapt
from cache import Cached
from corrupt import Draws, uniform
from data import fail, generator
from model import Context, Model

# R rows, T positions, n selected positions, C channels, V vocabulary

WAVES = 32  # cos(0), cos(pi u) .. cos(31 pi u): fine enough to tell CDF steps of 1/32 apart


class Noisy(StageBOnly):
    u: Tensor | None = None  # (R, T) float32 in [0, 1) of the pass at hand; None: zeros, the greedy chain

    def mark(self, h: Tensor, bundle: Tensor, round: int) -> Tensor:
        u = torch.zeros(bundle.shape, device=h.device) if self.u is None else self.u
        wave = torch.arange(WAVES, device=h.device, dtype=torch.float32)
        carried = torch.cos(math.pi * wave * u[..., None].float()) @ self.markers_noise  # (R, T, C)
        return h + bundle[..., None] * (self.markers[round] + carried).to(h.dtype)

    def adapter_state(self) -> dict[str, Tensor]:
        return super().adapter_state() | {"markers_noise": self.markers_noise}


def noisy_step(engine: Cached, z: Tensor, prompt: Tensor, busy: bool, u: Tensor, d: sample.Decoding) -> dict:
    """sample.step, with each row's third draw on the markers."""
    if d.temperature not in (0, 1):
        fail(f"--temperature {d.temperature}: this adapter was trained to sample jointly at 1 (or greedily at 0)")
    engine.model.u = u[:, 2]
    try:
        return sample.step(engine, z, prompt, busy, u, d)
    finally:
        engine.model.u = None


def make_noisy(model: Model, r: int, rng: torch.Generator) -> None:
    adapt(model, r, rng, Noisy)
    model.markers_noise = nn.Parameter(torch.zeros(WAVES, model.cfg.n_embd, device=model.markers.device))
    model.step = noisy_step


def attach(model: Model, settings: dict) -> None:
    """Make a loaded model ready for the tensors of such an adapter (checkpoint.load_adapter)."""
    make_noisy(model, settings["lora_r"], torch.Generator())


def quantile(log_p: Tensor, k: int, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As chain.choose, but the one token in which u (n,) falls: the best token comes first and then the others by id,
    because the map from u to tokens is to be learned, and the order of near-equals is noise."""
    p, best = log_p.exp(), leaders(log_p, 1)
    first = p.gather(-1, best)  # (n, 1)
    others = p.scatter(-1, best, 0.0).cumsum(-1)
    beyond = u[:, None] * (first + others[:, -1:]) - first
    other = torch.searchsorted(others, beyond, right=True)
    other = torch.minimum(other, (others < others[:, -1:]).sum(-1, keepdim=True))  # rounding: not past the last one
    token = torch.where(beyond < 0, best, other)
    return log_p.gather(-1, token), token, log_p.amax(-1)


class Noise(ChainStageBOnly):
    command, extension = "python -m beyond.noise", {"extension": "beyond.noise"}

    @staticmethod
    def adapt(model: Model, args: Namespace) -> None:
        make_noisy(model, args.lora_r, generator(args.seed, "lora"))

    def target(self, x: Tensor, z: Tensor, bundle: Tensor, draws: Draws, ctx: Context) -> Tensor:
        start, B = time.perf_counter(), self.model.cfg.block_length
        self.u = uniform(draws, x.shape[1]).to(x.device)
        written, _ = chain_decode(z, bundle, B, 1, self.predict_by(x, ctx, self.u), longest(bundle, B))
        self.notes["target_ms"] += 1e3 * (time.perf_counter() - start)
        return torch.where(bundle, written, x)

    def predict_by(self, x: Tensor, ctx: Context, u: Tensor):
        def draw(z: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
            pieces = iter(u[where].split(chain.PIECE))
            return self.predict(x, ctx, lambda log_p, k: quantile(log_p, k, next(pieces)))(z, where, k)

        return draw

    def by_length(self, real: Tensor) -> list[tuple[slice, int]]:
        """All rows at full length: u is of whole rows."""
        return [(slice(None), real.shape[1])]

    def stages(self, x, z, kind, bundle, target, ctx):
        self.model.u = self.beside_clean_copy(x, z, self.u, ctx)[1]
        try:
            return super().stages(x, z, kind, bundle, target, ctx)
        finally:
            self.model.u = None


def settle_noise(args: Namespace) -> type[Noise]:
    settle(args)
    if args.beam > 1 or args.target == "clean" or args.lora == "all":
        fail("joint samples are draws of the greedy chain's conditionals, by adapters in Stage B alone: no --beam, "
             "--target or --lora")  # fmt: skip
    return Noise


def main() -> None:
    train.main(build_parser(__doc__), settle_noise)


if __name__ == "__main__":
    main()
