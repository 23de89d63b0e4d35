"""tiny.py does what the full code does. `pytest tests/test_tiny.py`"""

import contextlib
import io
import random
import re
import sys

import pytest
import torch
from common import ROOT, approx
from torch import Tensor

import tiny
from causal import CausalModel
from corrupt import M, three_term_loss
from decoding import Decoding
from model import Config, Model
from sample import generate_one

SOURCE = (ROOT / "tiny.py").read_text()
V = len(tiny.TOKENS)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def twins(
    monkeypatch, seed: int, T: int, n_last: int, K: int, std: float = 0.4, causal: bool = False
) -> tuple[tiny.Model, Model]:  # fmt: skip
    """A random tiny model of three layers, with K rounds and blocks of T, and model.Model or causal.CausalModel with
    the same weights. As after training, the mask is never the likeliest word. tiny.py's causal Stage B has no layers of
    its own and is not added to Stage A, so here CausalModel's layers are copies of the last ones, and nothing is added.
    """
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
    full = CausalModel(cfg) if causal else Model(cfg)
    renamed = {
        re.sub(r"\.(qkv|proj)\.", r".attn.\1.", re.sub(r"\.(gate_up|down)\.", r".mlp.\1.", name)): value
        for name, value in small.state_dict().items()
        if causal or name != "show"
    }
    if causal:
        first = 3 - n_last
        own = [(name.split(".", 2), value) for name, value in renamed.items() if name.startswith("layers.")]
        renamed |= {f"layers_b.{int(i) - first}.{rest}": value for (_, i, rest), value in own if int(i) >= first}
        full.add_to = lambda log_p_a, states: full.logits(states)
    missing = full.load_state_dict(renamed, strict=False)
    assert missing.unexpected_keys == []
    assert all("norm" in name for name in missing.missing_keys)  # ones, as tiny's norms have no weights
    return small, full


def assert_law(drawn: Tensor, law: list[float]) -> None:
    """Chi-squared of drawn numbers 0..n-1 against their probabilities: at most five deviations above its mean."""
    found = torch.bincount(drawn, minlength=len(law))
    expected = len(drawn) * torch.tensor(law)
    possible = expected > 0
    assert found[~possible].sum() == 0
    chi2 = ((found - expected) ** 2 / expected)[possible].sum()
    freedom = int(possible.sum())
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


# --- the same functions
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_both_stages_have_the_full_models_logits(causal, monkeypatch):
    """Bundles have any shape, except that causal ones are one run, as tiny's are."""
    K = 1 if causal else 2
    small, full = twins(monkeypatch, 2, 6, 2, K, causal=causal)
    tokens = torch.randint(V, (5, 6), generator=rng(0))
    bundle = torch.rand(5, 6, generator=rng(1)) < 0.5
    if causal:
        first = torch.tensor([0, 1, 2, 3, 6])[:, None]
        bundle = (torch.arange(6) >= first) & (torch.arange(6) < first + 4)
    z = tokens.masked_fill(bundle, tiny.MASK)
    ctx = full.context(torch.ones_like(z, dtype=torch.bool))
    h = full.prefix(z, ctx)
    ours = small.prefix(z)
    a = full.logits(full.last_n(h, ctx))
    assert torch.allclose(small.logits(small.last_n(ours)), a, atol=1e-5, rtol=0)

    read = (tokens,) if causal else ()
    b = full.logits(full.coordinate(h, bundle, ctx, K, *read))
    coordinated = small.coordinate(ours, bundle, *read)
    assert torch.allclose(small.logits(coordinated), b, atol=1e-5, rtol=0)
    # markers do something here, and so do the tokens of causal Stage B
    assert (b - a).abs().max() > 0.1
    if causal:
        other = full.logits(full.coordinate(h, bundle, ctx, 1, tokens.roll(1, dims=0)))
        assert (b - other).abs().max() > 0.1


def assert_decodes_alike(
    small: tiny.Model, full: Model, prompt: list[int], d: Decoding, tau: float, looks: int
) -> dict:
    """tiny's decode is generate_one: tokens, and forwards with everything counted -> these."""
    tokens, nfe, _ = generate_one(full, prompt, d)
    z = torch.tensor([prompt + [tiny.MASK] * d.gen_length])
    written, forwards, steps = tiny.decode(small, z, tau, looks, isinstance(full, CausalModel))
    assert written[0, len(prompt) :].tolist() == tokens
    assert torch.equal(written[z != tiny.MASK], z[z != tiny.MASK])
    assert forwards == approx(nfe["full"] + nfe["partial"] * full.partial_cost)
    assert len(steps) == nfe["full"] and all(p.shape == (*z.shape, V) for p in steps)
    return nfe


def test_causal_looks_are_generate_ones(monkeypatch):
    """All masks are the bundle."""
    several = 0
    for seed in range(15):
        draw = random.Random(seed)
        T = draw.randint(3, 8)
        n = draw.randint(1, T - 2)
        small, full = twins(monkeypatch, seed, T, draw.randint(1, 2), 1, draw.choice([0.2, 0.4, 0.7]), causal=True)
        prompt = [draw.randrange(1, V) for _ in range(n)]  # no mask: one run
        d = Decoding(gen_length=T - n, tau_joint=0.0, tau_t2t=None, eos_early_stop=False)
        several += assert_decodes_alike(small, full, prompt, d, -1, T)["partial"] > 1
    assert several >= 5


def test_the_decoder_is_generate_one_in_fifty_settings(monkeypatch):
    """The settings are prompts with masks, gates, and no to two rounds."""
    seen = dict(stage_b=0, several=0, at_once=0)
    for seed in range(50):
        draw = random.Random(seed)
        T, K = draw.randint(2, 8), seed % 3
        n = draw.randint(1, min(3, T - 1))
        small, full = twins(monkeypatch, seed, T, draw.randint(1, 2), max(K, 1), draw.choice([0.2, 0.4, 0.7]))
        prompt = [draw.randrange(V) for _ in range(n)]
        tau = draw.choice([-1, 0.0, 0.2, 0.4, 0.7, 1.0])
        d = Decoding(gen_length=T - n, tau_m2t=tau, tau_t2t=None, n_rounds=K, eos_early_stop=False)
        nfe = assert_decodes_alike(small, full, prompt, d, tau, K > 0)
        seen["stage_b"] += nfe["partial"] > 0
        seen["several"] += nfe["full"] > 2
        seen["at_once"] += nfe["full"] == 1 and T - n > 2
    assert min(seen.values()) >= 5, seen  # or the equality would be hollow


def test_the_fill_loss_and_its_gradient_are_the_full_codes(monkeypatch):
    """This is without alpha, for which there is test_alpha.py. Of seven rows the first has nothing to fill, and in the
    last everything is filled. The states are small, so that probabilities are neither 0 nor 1."""
    small, full = twins(monkeypatch, 0, 6, 1, 1, std=0.1)
    h = torch.randn(7, 6, tiny.C, generator=rng(2)).requires_grad_()
    target = torch.randint(V, (7, 6), generator=rng(3))
    fill = torch.rand(7, 6, generator=rng(5)) < torch.tensor([0, 0.2, 0.2, 0.4, 0.4, 0.7, 1])[:, None]
    kind = torch.where(fill, M, 0).to(torch.uint8)
    theirs, _ = three_term_loss(full, h, target, kind, fill)
    ours = tiny.fill_loss(small.logits(h), target, fill, 0)
    assert ours.item() == approx(theirs.item() / kind.numel(), abs=1e-6)
    slopes = [torch.autograd.grad(loss, h)[0] for loss in (ours, theirs / kind.numel())]
    assert slopes[0].abs().max() > 1e-4 and torch.allclose(*slopes, atol=1e-7, rtol=1e-4)


def test_masks_and_bundles_are_drawn_as_the_full_code_draws_them():
    """In the full code the share of masks is uniform: of two words both are masked in 1/3 of the rows, each alone in
    1/6, and none in 1/3. tiny leaves out rows without a mask, which have no loss. Of four masks, bundles of 1 and of 2
    are equally likely: each single mask has 1/8, and each pair has 1/12."""
    torch.manual_seed(0)
    masked = tiny.some_of(torch.tensor([False, True, True]).expand(4000, 3))
    assert not masked[:, 0].any()
    assert_law(masked[:, 1] + 2 * masked[:, 2], [0, 1 / 4, 1 / 4, 1 / 2])

    masks = torch.tensor([False, True, True, True, True]).expand(4000, 5)
    bundle = tiny.some_of(masks)
    law = [{1: 1 / 8, 2: 1 / 12}.get(code.bit_count(), 0.0) for code in range(16)]
    assert not bundle[:, 0].any()
    assert_law((bundle[:, 1:] * torch.tensor([1, 2, 4, 8])).sum(1), law)

    # where there are fewer masks, it is all of them
    alone = torch.tensor([[False, False, True]]).expand(50, 3)
    assert torch.equal(tiny.some_of(alone), alone)


# --- the file
def run(source: str) -> str:
    """What the file prints."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(sys, "argv", ["tiny.py"])
        exec(source, {"__name__": "__main__"})
    return shown.getvalue()


def test_without_the_tagged_lines_it_is_a_plain_masked_diffusion_model():
    """It trains, decodes and prints the rows of Stage A."""
    plain = "\n".join(line for line in SOURCE.splitlines() if not line.endswith(("# CoCommit", "# causal")))
    assert not re.search("markers|coordinate", plain)
    out = run(plain.replace("range(700)", "range(3)"))
    assert re.findall(r"Stage \w.*?(?=  )", out) == ["Stage A", "Stage A, twice as long"]


def test_one_line_is_not_the_papers():
    """Without this line alpha changes nothing, and both Stage Bs take the same steps."""
    assert [line.strip() for line in SOURCE.splitlines() if line.endswith("# alpha")] == [
        "loss = (1 - (alpha * log_p).exp()) / alpha  # alpha"
    ]
    short = SOURCE.replace("range(700)", "range(8)")
    short = short.replace("model = Model()", "torch.manual_seed(0); model = Model()")
    with_it, without = (run(of) for of in (short, short.replace("loss = (1 -", "_ = (1 -")))
    rows = [re.findall(r"(?:Stage B, the paper's|Stage B, alpha 1) +(.*)", out) for out in (with_it, without)]
    assert rows[0][0] != rows[0][1] and rows[1][0] == rows[1][1] == rows[0][0]


def test_the_table_is_what_a_student_remembers():
    """The numbers of each row and what it writes, then the line below the table. Stage A by hand: San has .60, New .40,
    York .40, Francisco .20. Stage B with alpha needs all of its steps, and the others need only 250."""
    steps = "700 if alpha_b else 250"
    found = run(SOURCE.replace("range(700)", f"range({steps})").replace("optimizer, 700", f"optimizer, {steps}"))
    _, *table = found.splitlines()
    rows = {}
    for line in table[:6]:
        name, numbers, written = re.fullmatch(r"(.*?)  +((?: *\d\.\d+)+) *(.*)", line).groups()
        rows[name] = [float(x) for x in numbers.split()] + [written] * bool(written)
    assert rows["the text"] == [0.40, 0.60, 0.0]
    by_hand = approx([0.40 * 0.40, 0.60 * 0.60, 0.48], abs=0.03)
    for name, cost in (("Stage A", 1.0), ("Stage A, twice as long", 1.0), ("Stage B, the paper's", 1.5)):
        assert rows[name][:3] == by_hand and rows[name][3:] == [cost, "San York, ice dog"]
    assert rows["Stage B, alpha 1"][0] > 0.95 and rows["Stage B, alpha 1"][3:] == [1.5, "New York, ice cream"]

    assert rows["Stage B, causal"][:3] == approx([0.40, 0.60, 0.0], abs=0.03)
    assert rows["Stage B, causal"][3:] == [1.5, "San Francisco, ice cream"]

    [looks] = table[6:]
    assert looks == "causal, draft San York, 1 look San Francisco, 2 looks San Francisco"

    # the output is the committed one, word for word; on another processor the numbers may differ
    shown = (ROOT / "results" / "theorem" / "tiny.txt").read_text().removeprefix("$ python tiny.py\n")
    number = r"\d+\.\d+"
    assert re.sub(number, "", found).split() == re.sub(number, "", shown).split()
    ours, theirs = ([float(x) for x in re.findall(number, text)] for text in (found, shown))
    assert ours == approx(theirs, abs=0.1)
