"""tiny.py does what the full code does. `pytest tests/test_tiny.py`"""

import ast
import random
import re
import subprocess
import sys

import pytest
import torch
from common import ROOT, approx
from torch import Tensor

import tiny
from beyond import chain
from corrupt import M, three_term_loss
from lib.config import Config
from model import Context, Model
from sample import Decoding, generate_one

SOURCE = (ROOT / "tiny.py").read_text()
V = len(tiny.TOKENS)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def twins(seed: int, T: int, n_last: int, K: int, monkeypatch, std: float = 0.4) -> tuple[tiny.Model, Model]:
    """A random tiny model of three layers, K rounds and blocks of T, and model.Model with its weights. As after
    training, the mask is never the likeliest word."""
    monkeypatch.setattr(tiny, "N_LAYER", 3)
    monkeypatch.setattr(tiny, "N_LAST", n_last)
    monkeypatch.setattr(tiny, "N_ROUNDS", K)
    small = tiny.Model()
    for i, p in enumerate(small.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=rng(100 * seed + i)) * std)
    small.lm_head.weight.data[tiny.MASK] = small.lm_head.weight.data[1] / 2
    cfg = Config(
        n_layer=3, n_head=tiny.H, n_kv_head=tiny.H, n_embd=tiny.C, head_dim=tiny.C // tiny.H, vocab_size=V,
        d_dense=2 * tiny.C, d_expert=1, n_expert=2, n_active=1, n_group=1, topk_group=1,
        eos_id=tiny.MASK, mask_id=tiny.MASK,  # no token ends a text
        n_dense=3, rope_theta=10000.0, rotary_dim=tiny.C // tiny.H, norm_eps=torch.finfo(torch.float32).eps,
        block_length=T, n_last=n_last, n_rounds=K,
    )  # fmt: skip
    full = Model(cfg)
    renamed = {
        re.sub(r"\.(qkv|proj)\.", r".attn.\1.", re.sub(r"\.(gate_up|down)\.", r".mlp.\1.", name)): value
        for name, value in small.state_dict().items()
    }
    missing = full.load_state_dict(renamed, strict=False)
    assert missing.unexpected_keys == ["dial"]
    assert all("norm" in name for name in missing.missing_keys)  # ones, as tiny's norms have no weights
    return small, full


def context(full: Model, z: Tensor) -> Context:
    return full.context(torch.ones_like(z, dtype=torch.bool))


def assert_law(drawn: Tensor, law: list[float]) -> None:
    """Chi-squared of drawn numbers 0..n-1 against their probabilities; what is expected less than five times is
    counted together. The limit is five standard deviations above the mean."""
    found = torch.bincount(drawn, minlength=len(law))
    expected = len(drawn) * torch.tensor(law)
    assert found[expected == 0].sum() == 0
    often = expected >= 5
    chi2 = ((found - expected) ** 2 / expected)[often].sum()
    rare = expected[~often].sum()
    if rare > 0:
        chi2 += (found[~often].sum() - rare) ** 2 / rare
    freedom = int(often.sum())
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


# --- the same functions
@pytest.mark.parametrize("n_last, K", [(1, 1), (2, 2)])
@torch.no_grad()
def test_both_stages_have_the_full_models_logits(n_last, K, monkeypatch):
    small, full = twins(n_last, 6, n_last, K, monkeypatch)
    z = torch.randint(V, (5, 6), generator=rng(0))
    bundle = torch.rand(5, 6, generator=rng(1)) < 0.5
    h = full.prefix(z, context(full, z))
    a = full.head(full.last_n(h, context(full, z)))
    ours = small.prefix(z)
    assert torch.allclose(small.head(small.last_n(ours)), a, atol=1e-5, rtol=0)

    # a number moves every marker along the dial
    for number in (0.0, 0.7):
        full.markers.data = small.markers + number * small.dial
        b = full.head(full.coordinate(h, bundle, context(full, z), K))
        marked = small.coordinate(ours, bundle, torch.full((5, 1), number))
        assert (b - a).abs().max() > 0.1  # markers do something here
        assert torch.allclose(small.head(marked), b, atol=1e-5, rtol=0)


def test_the_decoder_is_generate_one_in_fifty_settings(monkeypatch):
    """Tokens, and forwards with everything counted: prompts with masks, gates, no round to two."""
    seen = dict(stage_b=0, several=0, at_once=0)
    for seed in range(50):
        draw = random.Random(seed)
        T, K = draw.randint(2, 8), seed % 3
        n = draw.randint(1, min(3, T - 1))
        small, full = twins(seed, T, draw.randint(1, 2), max(K, 1), monkeypatch, draw.choice([0.2, 0.4, 0.7]))
        prompt = [draw.randrange(V) for _ in range(n)]
        tau = draw.choice([-1, 0.0, 0.2, 0.4, 0.7, 1.0])
        d = Decoding(gen_length=T - n, tau_m2t=tau, tau_t2t=None, n_rounds=K, eos_early_stop=False)
        tokens, nfe, _ = generate_one(full, prompt, d)
        z = torch.tensor([prompt + [tiny.MASK] * (T - n)])
        written, forwards, p = tiny.decode(small, z, tau, K > 0, torch.zeros(1, 1))
        assert written[0, n:].tolist() == tokens and p.shape == (1, T, V), f"seed {seed}"
        assert forwards == approx(nfe["full"] + nfe["partial"] * full.partial_cost)
        seen["stage_b"] += nfe["partial"] > 0
        seen["several"] += nfe["full"] > 2
        seen["at_once"] += nfe["full"] == 1 and T - n > 2
    assert min(seen.values()) >= 5, seen  # or the equality would be hollow


def test_the_fill_loss_is_equation_1s(monkeypatch):
    small, full = twins(0, 6, 1, 1, monkeypatch)
    h = torch.randn(7, 6, tiny.C, generator=rng(2))
    target = torch.randint(V, (7, 6), generator=rng(3))
    fill = torch.rand(7, 6, generator=rng(5)) < 0.4
    kind = torch.where(fill, M, 0).to(torch.uint8)
    theirs, _ = three_term_loss(full, h, target, kind, fill)
    assert tiny.fill_loss(small.head(h), target, fill).item() == approx(theirs.item() / kind.numel(), abs=1e-6)


def test_masks_and_bundles_are_drawn_as_the_full_code_draws_them():
    """The share of masks is uniform: of two words both are masked in 1/3 of the rows, either alone in 1/6, none in 1/3.
    Of four masks, bundles of 1 and of 2 are alike: each single has 1/8, each pair 1/12."""
    torch.manual_seed(0)
    x = tiny.TEXT.repeat(25, 1)
    z, masked = tiny.corrupt(x)
    assert not masked[:, 0].any() and torch.equal(z, x.masked_fill(masked, tiny.MASK))
    assert_law(masked[:, 1] + 2 * masked[:, 2], [1 / 3, 1 / 6, 1 / 6, 1 / 3])

    masks = torch.tensor([False, True, True, True, True]).expand(len(x), 5)
    bundle = tiny.draw_bundle(masks, 2)
    law = [{1: 1 / 8, 2: 1 / 12}.get(code.bit_count(), 0.0) for code in range(16)]
    assert not bundle[:, 0].any()
    assert_law((bundle[:, 1:] * torch.tensor([1, 2, 4, 8])).sum(1), law)

    # where there are fewer masks, it is all of them
    alone = torch.tensor([[False, False, True]]).expand(50, 3)
    assert torch.equal(tiny.draw_bundle(alone, 3), alone)


def test_the_likeliest_chain_is_beyond_chains_from_the_left(monkeypatch):
    small, full = twins(5, 6, 1, 1, monkeypatch)
    z = torch.randint(1, V, (40, 6), generator=rng(6))
    masked = torch.rand(40, 6, generator=rng(7)) < 0.7
    masked[:, 0] = False  # the context
    z = z.masked_fill(masked, tiny.MASK)
    bundle = masked & (torch.rand(40, 6, generator=rng(8)) < 0.7)

    @torch.no_grad()
    def look(z, left, k):
        log_p = full(z, context(full, z)).log_softmax(-1)
        token = log_p.topk(k).indices
        return log_p.amax(-1), log_p.gather(-1, token), token

    written, _ = chain.beam_chain(look, z, bundle, 1, "leftmost", tie=0.0)
    assert bundle.sum(-1).max() > 3
    assert torch.equal(tiny.chain(small, z, bundle), written)


@torch.no_grad()
def test_the_drawn_chain_has_the_law_of_drawing_from_left_to_right(monkeypatch):
    """Two words are written, at 1 and 3; position 2 stays a mask. The exact table of pairs is the full model's
    p(first) p(second | first)."""
    small, full = twins(3, 4, 1, 1, monkeypatch, std=0.25)
    z = torch.tensor([[5, tiny.MASK, tiny.MASK, tiny.MASK]])
    bundle = torch.tensor([[False, True, False, True]])
    first = full(z, context(full, z))[0, 1].softmax(-1)  # (V,)
    written = z.repeat(V, 1)
    written[:, 1] = torch.arange(V)
    second = full(written, context(full, written))[:, 3].softmax(-1)  # (V, V)
    law = (first[:, None] * second).flatten()

    R = 20_000
    drawn = tiny.chain(small, z.expand(R, 4), bundle.expand(R, 4), torch.rand(R, 1, generator=rng(0)))
    assert (drawn[:, 2] == tiny.MASK).all() and (R * law >= 5).sum() > 50
    assert_law(drawn[:, 1] * V + drawn[:, 3], law.tolist())


# --- the file
def test_it_is_four_screens_and_imports_torch_alone():
    lines = [line for line in SOURCE.splitlines() if line.strip()]
    assert len(SOURCE.splitlines()) <= 200
    assert sum(map(len, lines)) / len(lines) <= 56
    modules = set(re.findall(r"^ *(?:import|from) (\w+)", SOURCE, re.M))
    assert modules == {"torch", "argparse"}


def test_without_the_tagged_lines_it_is_a_plain_masked_diffusion_model(tmp_path):
    """It trains, decodes and prints the rows of Stage A."""
    tagged = [line for line in SOURCE.splitlines() if line.endswith("# CoCommit")]
    plain = "\n".join(line for line in SOURCE.splitlines() if not line.endswith("# CoCommit"))
    assert len(tagged) <= 24
    names = {n.attr for n in ast.walk(ast.parse(plain)) if isinstance(n, ast.Attribute)}
    names |= {n.id for n in ast.walk(ast.parse(plain)) if isinstance(n, ast.Name)}
    assert not names & {"markers", "dial", "coordinate", "draw_bundle"}
    (tmp_path / "plain.py").write_text(plain.replace("range(400)", "range(3)"))
    done = subprocess.run([sys.executable, tmp_path / "plain.py"], capture_output=True, text=True, check=True)
    assert re.findall(r"Stage \w.*?(?=  )", done.stdout) == [
        "Stage A", "Stage A, trained as long again", "Stage A, taught the chain"
    ]  # fmt: skip


def test_the_table_is_the_readmes_and_what_a_student_remembers():
    """Word for word; numbers of another processor may differ in the second decimal. Stage A by hand: San has .60, New
    .40, York .40, Francisco .35, Diego .25."""
    done = subprocess.run([sys.executable, ROOT / "tiny.py"], capture_output=True, text=True, check=True)
    shown = (ROOT / "README.md").read_text().split("$ python tiny.py\n")[1].split("```")[0]
    number = r"\d+\.\d+"
    assert re.sub(number, "", done.stdout).split() == re.sub(number, "", shown).split()
    ours = [[float(x) for x in re.findall(number, line)] for line in done.stdout.splitlines()[2:]]
    theirs = [[float(x) for x in re.findall(number, line)] for line in shown.splitlines()[2:]]
    assert ours == [approx(row, abs=0.02) for row in theirs]

    # behind the losses: three phrases, no phrase, forwards, contexts that come out right
    counts = [tiny.TEXT.tolist().count(row) for row in tiny.ROWS[:3].tolist()]
    assert [c / sum(counts) for c in counts] == approx([0.40, 0.35, 0.25])
    a, longer, clean, chained, taught, drawn = [row[2:] for row in ours]
    by_hand = approx([0.40 * 0.40, 0.60 * 0.35, 0.60 * 0.25, 0.48], abs=0.03)
    for row, cost in ((a, 1.0), (longer, 1.0), (clean, 1.5)):
        assert row[:4] == by_hand and row[4:] == [cost, 0.0]
    for row, cost in ((chained, 1.5), (taught, 1.0)):
        assert row[1] > 0.95 and row[4:] == [cost, 3.0]
    assert drawn[:4] == approx([0.40, 0.35, 0.25, 0.0], abs=0.1) and drawn[4:] == [1.5, 3.0]
