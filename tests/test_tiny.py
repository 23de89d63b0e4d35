"""tiny.py does what the full code does. `pytest tests/test_tiny.py`"""

import ast
import itertools
import math
import random
import re
import subprocess
import sys

import pytest
import torch
from common import ROOT, approx

import tiny
from beyond import chain
from corrupt import M, three_term_loss
from lib.config import Config
from lib.output import up_to_eos
from model import Model
from sample import Decoding, generate_one

SOURCE = (ROOT / "tiny.py").read_text()
V = len(tiny.TOKENS)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def twins(seed: int, T: int, n_last: int, n_rounds: int, monkeypatch, std: float = 0.4) -> tuple[tiny.Model, Model]:
    """A random tiny model of three layers, blocks of T, and model.Model with its weights."""
    monkeypatch.setattr(tiny, "N_LAYER", 3)
    monkeypatch.setattr(tiny, "N_LAST", n_last)
    monkeypatch.setattr(tiny, "N_ROUNDS", n_rounds)
    small = tiny.Model()
    for i, p in enumerate(small.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=rng(100 * seed + i)) * std)
    cfg = Config(
        n_layer=3, n_head=tiny.H, n_kv_head=tiny.H, n_embd=tiny.C, head_dim=tiny.C // tiny.H, vocab_size=V,
        d_dense=2 * tiny.C, d_expert=1, n_expert=2, n_active=1, n_group=1, topk_group=1, mask_id=tiny.MASK, eos_id=1,
        n_dense=3, rope_theta=10000.0, rotary_dim=tiny.C // tiny.H, norm_eps=torch.finfo(torch.float32).eps,
        block_length=T, n_last=n_last, n_rounds=n_rounds,
    )  # fmt: skip
    full = Model(cfg)
    renamed = {
        re.sub(r"\.(qkv|proj)\.", r".attn.\1.", re.sub(r"\.(gate_up|down)\.", r".mlp.\1.", name)): value
        for name, value in small.state_dict().items()
        if name != "dial"
    }
    missing = full.load_state_dict(renamed, strict=False)
    assert not missing.unexpected_keys
    assert all("norm" in name for name in missing.missing_keys)  # ones, as tiny's norms have no weights
    return small, full


def context(full: Model, z: torch.Tensor):
    return full.context(torch.ones_like(z, dtype=torch.bool))


# --- the same functions
@pytest.mark.parametrize("n_last, K", [(1, 1), (2, 1), (2, 2)])
@torch.no_grad()
def test_both_stages_have_the_full_models_logits(n_last, K, monkeypatch):
    small, full = twins(n_last, 6, n_last, K, monkeypatch)
    z = torch.randint(V, (5, 6), generator=rng(0))
    bundle = torch.rand(5, 6, generator=rng(1)) < 0.5
    h = full.prefix(z, context(full, z))
    a = full.head(full.last_n(h, context(full, z)))
    b = full.head(full.coordinate(h, bundle, context(full, z), K))
    ours = small.prefix(z)
    assert torch.allclose(small.head(small.last_n(ours)), a, atol=1e-5, rtol=0)
    assert (b - a).abs().max() > 0.1  # markers do something here
    assert torch.allclose(small.head(small.coordinate(ours, bundle, torch.zeros(5, 1))), b, atol=1e-5, rtol=0)
    number = torch.ones(5, 1)
    assert (small.head(small.coordinate(ours, bundle, number)) - b).abs().max() > 0.1  # and so does the number


def test_the_decoder_is_generate_one_in_fifty_settings(monkeypatch):
    """Tokens and forwards, without edits. [M] is no candidate in a trained model: here it is made improbable."""
    several = 0
    for seed in range(50):
        draw = random.Random(seed)
        T, K = draw.randint(2, 8), draw.randint(1, 2)
        n = draw.randint(1, min(3, T - 1))
        n_last = draw.randint(1, 2)
        small, full = twins(seed, T, n_last, K, monkeypatch, draw.choice([0.2, 0.4, 0.7]))
        for model in (small, full):
            model.head = lambda h, head=model.head: head(h).index_fill(-1, torch.tensor([tiny.MASK]), -1e4)
        prompt = [draw.randrange(1, V) for _ in range(n)]
        tau = draw.choice([-1, 0.0, 0.2, 0.4, 0.7, 1.0])
        stage_b = draw.random() < 0.7
        d = Decoding(gen_length=T - n, tau_m2t=tau, tau_t2t=None, n_rounds=K * stage_b, eos_early_stop=False)
        tokens, nfe, _ = generate_one(full, prompt, d)
        z = torch.tensor([prompt + [tiny.MASK] * (T - n)])
        row, forwards, _ = tiny.decode(small, z, tau, stage_b, torch.zeros(1, 1))
        assert up_to_eos(row[0, n:].tolist(), 1) == tokens, f"seed {seed}"
        assert forwards == approx(nfe["full"] + nfe["partial"] * n_last / 3)
        several += nfe["full"] > 2
    assert several >= 10  # or the equality would be hollow


def test_the_fill_loss_is_equation_1s(monkeypatch):
    small, full = twins(0, 6, 1, 1, monkeypatch)
    h = torch.randn(7, 6, tiny.C, generator=rng(2))
    target = torch.randint(V, (7, 6), generator=rng(3))
    fill = torch.rand(7, 6, generator=rng(5)) < 0.4
    kind = torch.where(fill, M, 0).to(torch.uint8)
    theirs, _ = three_term_loss(full, h, target, kind, fill)
    assert tiny.fill_loss(small.head(h), target, fill).item() == approx(theirs.item() / kind.numel(), abs=1e-6)


def test_masks_are_drawn_with_the_probabilities_of_the_closed_form():
    """The ratio is uniform: of two words both are masked in 1/3 of the rows, either of them in 1/6, none in 1/3."""
    torch.manual_seed(0)
    R = 20_000
    x = tiny.TEXT.repeat(-(-R // len(tiny.TEXT)), 1)[:R]
    z, masked = tiny.corrupt(x)
    assert not masked[:, 0].any() and torch.equal(z, x.masked_fill(masked, tiny.MASK))
    code = masked[:, 1] + 2 * masked[:, 2]
    expected = {0: R / 3, 1: R / 6, 2: R / 6, 3: R / 3}
    chi2 = sum((int((code == c).sum()) - e) ** 2 / e for c, e in expected.items())
    assert chi2 < 16.3  # 3 degrees of freedom, one draw in a thousand is above


def test_bundles_are_drawn_row_by_row():
    """Of four masks, sizes 1 and 2 alike: each of the 4 singles in 1/8 of the rows, each of the 6 pairs in 1/12."""
    torch.manual_seed(0)
    R = 12_000
    masked = torch.tensor([False, True, True, True, True]).expand(R, 5)
    bundle = tiny.draw_bundle(masked, 2)
    assert not bundle[:, 0].any()
    code = (bundle[:, 1:] * torch.tensor([1, 2, 4, 8])).sum(1)
    expected = {c: R / 8 if c.bit_count() == 1 else R / 12 for c in range(1, 15) if c.bit_count() <= 2}
    chi2 = sum((int((code == c).sum()) - e) ** 2 / e for c, e in expected.items())
    assert set(code.tolist()) == set(expected)
    assert chi2 < 27.9  # 9 degrees of freedom, one draw in a thousand is above


def test_the_chain_is_beyond_chains_greedy_one_from_the_left(monkeypatch):
    monkeypatch.setattr(chain, "TIE", 0.0)
    small, full = twins(5, 6, 1, 1, monkeypatch)
    small.lm_head.weight.data[tiny.MASK] = full.lm_head.weight.data[tiny.MASK] = 0.0  # [M] is never the likeliest
    z = torch.randint(1, V, (40, 6), generator=rng(6))
    masked = torch.rand(40, 6, generator=rng(7)) < 0.7
    masked[:, 0] = False
    z = z.masked_fill(masked, tiny.MASK)
    bundle = masked & (torch.rand(40, 6, generator=rng(8)) < 0.7)

    @torch.no_grad()
    def look(z, left, k):
        log_p = full(z, context(full, z)).log_softmax(-1)
        sure = log_p.amax(-1).masked_fill(~left, -math.inf)
        return sure, *chain.best_tokens(log_p, k)

    written, _ = chain.greedy_chain(look, z, bundle, "leftmost")
    assert chain.longest(bundle) > 3
    assert torch.equal(tiny.chain(small, z, bundle), torch.where(bundle, written, z))


def test_the_drawn_chain_has_the_law_of_the_bases_own_draws():
    """Two words of a random model, drawn by one number: chi-squared against the product of its conditionals."""
    torch.manual_seed(3)
    base = tiny.Model()
    for p in base.parameters():
        p.data.normal_(std=0.5)
    base.lm_head.weight.data[6:] = 0.0
    base.lm_head.weight.data[6:, 0] = -9.0  # five words are enough
    R = 20_000
    z = torch.tensor([[3, tiny.MASK, tiny.MASK]])
    both = torch.tensor([[False, True, True]])
    drawn = tiny.chain(base, z.repeat(R, 1), both.repeat(R, 1), torch.rand(R, 1))

    with torch.no_grad():
        first = base.head(base.last_n(base.prefix(z)))[0, 1].double().softmax(-1)
        rows = torch.tensor([[3, word, tiny.MASK] for word in range(V)])
        second = base.head(base.last_n(base.prefix(rows)))[:, 2].double().softmax(-1)
    law = first[:, None] * second
    chi2, n = 0.0, 0
    rest = 0.0
    for a, b in itertools.product(range(V), repeat=2):
        e = R * float(law[a, b])
        count = int(((drawn[:, 1] == a) & (drawn[:, 2] == b)).sum())
        if e >= 10:
            chi2 += (count - e) ** 2 / e
            n += 1
        else:
            rest += e
    assert n > 10 and rest < 0.1 * R
    assert chi2 < n + 4.5 * math.sqrt(2 * n)


# --- the file
def test_it_is_four_screens_and_imports_torch_alone():
    lines = [line for line in SOURCE.splitlines() if line.strip()]
    assert len(SOURCE.splitlines()) <= 200
    assert sum(map(len, lines)) / len(lines) <= 56
    modules = {a.name.split(".")[0] for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module.split(".")[0] for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.ImportFrom)}
    assert modules == {"torch", "argparse"}


def test_without_the_tagged_lines_it_is_a_plain_masked_diffusion_model():
    tagged = [line for line in SOURCE.splitlines() if line.endswith("# CoCommit")]
    plain = "\n".join(line for line in SOURCE.splitlines() if not line.endswith("# CoCommit"))
    assert len(tagged) <= 30
    names = {n.attr for n in ast.walk(ast.parse(plain)) if isinstance(n, ast.Attribute)}
    assert not names & {"markers", "coordinate"}
    module: dict = {"__name__": "plain"}
    exec(compile(plain.replace("range(400)", "range(3)"), "plain", "exec"), module)
    base = module["train"](module["Model"]())
    z, forwards, _ = module["decode"](base, torch.tensor([[3, 0, 0]]), 1.0, False, None)
    assert z.shape == (1, 3) and forwards in (1, 2)


def test_the_toy_is_the_one_that_misleads():
    """Each word's likeliest value makes a pair that is no phrase, in every context."""
    for context_rows in tiny.ROWS.view(3, 3, 3).tolist():
        best = []
        for i in (1, 2):
            mass = {}
            for row, p in zip(context_rows, [0.40, 0.35, 0.25], strict=True):
                mass[row[i]] = mass.get(row[i], 0) + p
            best.append(max(mass, key=mass.get))
        assert [context_rows[0][0], *best] not in context_rows
    counts = [tiny.TEXT.tolist().count(row) for row in tiny.ROWS[:3].tolist()]
    assert [c / sum(counts) for c in counts] == approx([0.40, 0.35, 0.25])


def cells(table: str) -> dict[str, list[float]]:
    """The rows of tiny's table: name -> its numbers, without the loss."""
    found = {}
    for line in table.splitlines():
        match = re.fullmatch(r"(?:[\d.]+ [\d.]+)? *(\D*?(?:\(paper\))?) +((?:[\d.]+ *)+)", line)
        if match and not line.startswith("loss"):
            found[match[1]] = [float(number) for number in match[2].split()]
    return found


@pytest.fixture(scope="module")
def output() -> str:
    done = subprocess.run([sys.executable, ROOT / "tiny.py"], capture_output=True, text=True, check=True)
    return done.stdout


def test_it_prints_what_the_readme_shows(output):
    """Word for word; numbers of another processor may differ in the second decimal."""
    shown = (ROOT / "README.md").read_text().split("$ python tiny.py\n")[1].split("```")[0]
    assert re.sub(r"[\d.]+", "", output).split() == re.sub(r"[\d.]+", "", shown).split()
    ours, readme = cells(output), cells(shown)
    assert len(ours) == 7 and ours.keys() == readme.keys()
    for name, numbers in ours.items():
        assert numbers == approx(readme[name], abs=0.02), name


def test_it_prints_what_a_student_remembers(output):
    """Stage A by hand: San is .60, New .40, York .40, Francisco .35, Diego .25."""
    rows = cells(output)
    by_hand = [0.40 * 0.40, 0.60 * 0.35, 0.60 * 0.25]
    for name in ("Stage A", "Stage A, trained as long again", "Stage B, clean target (paper)"):
        *phrases, none, forwards, right = rows[name]
        assert phrases == approx(by_hand, abs=0.03) and none == approx(1 - sum(by_hand), abs=0.03) and right == 0
        assert forwards == (1.5 if "B" in name else 1.0)
    for name in ("Stage B, chain target", "Stage A, taught the chain"):
        assert rows[name][1] > 0.95 and rows[name][-1] == 3
    *drawn, none, forwards, right = rows["Stage B, chain drawn by u"]
    assert drawn == approx([0.40, 0.35, 0.25], abs=0.1) and none < 0.12 and forwards == 1.5


@pytest.mark.parametrize("seed", ["many", "1.5"])
def test_a_bad_seed_gets_one_line(seed):
    done = subprocess.run([sys.executable, ROOT / "tiny.py", "--seed", seed], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "--seed" in done.stderr
