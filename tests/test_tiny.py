"""tiny.py does what the full code does. `pytest tests/test_tiny.py`"""

import ast
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
from corrupt import Corruption, corrupt, draw_bundle, three_term_loss
from lib.config import Config
from model import Model, sequence_context
from sample import Decoding, generate_one

SOURCE = (ROOT / "tiny.py").read_text()
V = len(tiny.TOKENS)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def twins(seed: int, T: int, n_last: int, monkeypatch, std: float = 0.4) -> tuple[tiny.Model, Model]:
    """A random tiny model of three layers, two markers and blocks of T, and model.Model with its weights."""
    monkeypatch.setattr(tiny, "N_LAYER", 3)
    monkeypatch.setattr(tiny, "N_LAST", n_last)
    small = tiny.Model(rng(seed))
    small.markers = torch.nn.Parameter(torch.zeros(2, tiny.C))
    for i, p in enumerate(small.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=rng(100 * seed + i)) * std)
    cfg = Config(
        n_layer=3, n_head=tiny.H, n_kv_head=tiny.H, n_embd=tiny.C, head_dim=tiny.C // tiny.H, vocab_size=V,
        d_dense=2 * tiny.C, d_expert=1, n_expert=1, n_active=1, n_group=1, topk_group=1, mask_id=tiny.MASK,
        n_dense=3, rope_theta=10000.0, rotary_dim=tiny.C // tiny.H, norm_eps=torch.finfo(torch.float32).eps,
        block_length=T, n_last=n_last, n_rounds=2,
    )  # fmt: skip
    full = Model(cfg)
    renamed = {
        re.sub(r"\.(qkv|proj)\.", r".attn.\1.", re.sub(r"\.(gate_up|down)\.", r".mlp.\1.", name)): value
        for name, value in small.state_dict().items()
    }
    missing = full.load_state_dict(renamed, strict=False)
    assert not missing.unexpected_keys
    assert all("norm" in name for name in missing.missing_keys)  # ones, as tiny's norms have no weights
    return small, full


def context(full: Model, z: torch.Tensor):
    return sequence_context(full.cfg, torch.ones_like(z, dtype=torch.bool), torch.float32)


# --- the same functions


@pytest.mark.parametrize("n_last", [1, 2])
@torch.no_grad()
def test_both_stages_have_the_full_models_logits(n_last, monkeypatch):
    small, full = twins(n_last, 6, n_last, monkeypatch)
    z = torch.randint(V, (5, 6), generator=rng(0))
    bundle = torch.rand(5, 6, generator=rng(1)) < 0.5
    h = full.prefix(z, context(full, z))
    a = full.head(full.last_n(h, context(full, z)))
    ours = small.prefix(z)
    assert torch.allclose(small.head(small.last_n(ours)), a, atol=1e-5, rtol=0)
    for K in (1, 2):
        b = full.head(full.coordinate(h, bundle, context(full, z), K))
        assert (b - a).abs().max() > 0.1  # markers do something here
        assert torch.allclose(small.head(small.coordinate(ours, bundle, K)), b, atol=1e-5, rtol=0)


def test_the_decoder_is_generate_one_in_fifty_settings(monkeypatch):
    """Tokens, full and partial forwards: prompts with masks, gates, edits, blocks that stay masked or never settle."""
    seen = dict(edits=0, stage_b=0, stuck=0, endless=0, several=0)
    for seed in range(50):
        draw = random.Random(seed)
        T, n, K = draw.randint(2, 8), draw.randint(1, 3), seed % 3
        n = min(n, T - 1)
        small, full = twins(seed, T, draw.randint(1, 2), monkeypatch, draw.choice([0.2, 0.4, 0.7]))
        prompt = [draw.randrange(V) for _ in range(n)]
        m2t = draw.choice([-1, 0.0, 0.2, 0.4, 0.7, 1.0])
        t2t = draw.choice([None, 0.0, 0.3, 0.6])
        post = draw.choice([0, 1, 3, 16])
        d = Decoding(gen_length=T - n, tau_m2t=m2t, tau_t2t=t2t, max_post_steps=post, n_rounds=K, eos_early_stop=False)
        tokens, nfe, states = generate_one(full, prompt, d)
        edits = (1, 0) if t2t is None else (t2t, post)
        row, n_full, n_partial = tiny.decode(small, prompt, T - n, m2t, edits[0], K, edits[1])
        assert (row[n:], n_full, n_partial) == (tokens, nfe["full"], nfe["partial"]), f"seed {seed}"
        seen["edits"] += t2t is not None
        seen["stage_b"] += n_partial > 0
        seen["stuck"] += tiny.MASK in row[n:]
        seen["endless"] += n_full >= 16
        seen["several"] += n_full > 2
    assert min(seen["edits"], seen["stage_b"], seen["several"]) >= 10, seen  # or the equality would be hollow


def test_equation_1_is_the_full_codes(monkeypatch):
    small, full = twins(0, 6, 1, monkeypatch)
    h = torch.randn(7, 6, tiny.C, generator=rng(2))
    target = torch.randint(V, (7, 6), generator=rng(3))
    kind = torch.randint(4, (7, 6), generator=rng(4))
    fill = (kind == tiny.M) & (torch.rand(7, 6, generator=rng(5)) < 0.6)
    theirs, _ = three_term_loss(full, h, target, kind.to(torch.uint8), fill)
    ours = tiny.three_term_loss(small.head(h), target, kind, fill)
    assert ours.item() == approx(theirs.item() / kind.numel(), abs=1e-6)


def test_one_row_is_corrupted_as_in_the_full_code_from_the_same_random_numbers():
    how = Corruption("random", 6, tiny.MASK, tiny.MASK, replace_rate=0.1)
    kinds = set()
    for seed in range(300):
        x = torch.randint(tiny.MASK, (1, 6), generator=rng(1000 + seed))
        free = torch.arange(6)[None] > 0
        z, kind = corrupt(x, free, how, [rng(seed)])
        ours_z, ours_kind = tiny.corrupt(x, rng(seed))
        assert torch.equal(ours_z, z) and torch.equal(ours_kind, kind.long())
        kinds |= set(ours_kind.flatten().tolist())
    assert kinds == {0, 1, 2, 3}


def test_one_rows_bundle_is_the_full_codes_from_the_same_random_numbers():
    sizes = set()
    for seed in range(300):
        masked = torch.rand(1, 6, generator=rng(1000 + seed)) < 0.6
        bundle = draw_bundle(masked, 6, 1, 4, [rng(seed)])
        assert torch.equal(tiny.draw_bundle(masked, 4, rng(seed)), bundle)
        sizes.add(int(bundle.sum()))
    assert sizes == {0, 1, 2, 3, 4}


def test_a_batch_is_corrupted_row_by_row_with_the_probabilities_of_the_closed_form():
    """The mask ratio is uniform: of two words both are masked in 1/3 of the rows, one of them in 1/3, none in 1/3. A
    visible word becomes another with 0.1 (1 - 1/MASK). Chi-squared over the nine kinds of a pair of words."""
    R = 20_000
    x = tiny.TEXT.repeat(-(-R // len(tiny.TEXT)), 1)[:R]
    _, kind = tiny.corrupt(x, rng(0))
    wrong = 0.1 * (1 - 1 / tiny.MASK)
    visible = {tiny.W: wrong, tiny.G: 1 - wrong}
    chi2 = 0.0
    for a in (tiny.M, tiny.W, tiny.G):
        for b in (tiny.M, tiny.W, tiny.G):
            n_masked = (a == tiny.M) + (b == tiny.M)
            p = {2: 1 / 3, 1: 1 / 6, 0: 1 / 3}[n_masked] * visible.get(a, 1) * visible.get(b, 1)
            count = int(((kind[:, 1] == a) & (kind[:, 2] == b)).sum())
            chi2 += (count - R * p) ** 2 / (R * p)
    assert (kind[:, 0] == tiny.NONE).all()
    assert chi2 < 26.1  # 8 degrees of freedom, one draw in a thousand is above


def test_a_batchs_bundles_are_drawn_row_by_row():
    """Of four masks, sizes 1 and 2 alike: each of the 4 singles in 1/8 of the rows, each of the 6 pairs in 1/12."""
    R = 12_000
    masked = torch.tensor([False, True, True, True, True]).expand(R, 5)
    bundle = tiny.draw_bundle(masked, 2, rng(0))
    assert not bundle[:, 0].any()
    code = (bundle[:, 1:] * torch.tensor([1, 2, 4, 8])).sum(1)
    expected = {c: R / 8 if c.bit_count() == 1 else R / 12 for c in range(1, 15) if c.bit_count() <= 2}
    chi2 = sum((int((code == c).sum()) - e) ** 2 / e for c, e in expected.items())
    assert set(code.tolist()) == set(expected)
    assert chi2 < 27.9  # 9 degrees of freedom, one draw in a thousand is above


def test_the_chain_is_beyond_chains_greedy_one(monkeypatch):
    monkeypatch.setattr(chain, "TIE", 0.0)
    small, full = twins(5, 6, 1, monkeypatch)
    z = torch.randint(tiny.MASK, (40, 6), generator=rng(6))
    masked = torch.rand(40, 6, generator=rng(7)) < 0.7
    z = z.masked_fill(masked, tiny.MASK)
    bundle = masked & (torch.rand(40, 6, generator=rng(8)) < 0.7)

    @torch.no_grad()
    def look(z, left, k):
        logits = full(z, context(full, z))
        logits[..., tiny.MASK] = -math.inf
        log_p = logits.log_softmax(-1)
        sure = log_p.amax(-1).masked_fill(~left, -math.inf)
        return sure, *chain.best_tokens(log_p, k, slice(None))

    steps = chain.longest(bundle)
    written, _ = chain.greedy_chain(look, z, bundle)
    x = torch.randint(tiny.MASK, (40, 6), generator=rng(9))
    assert steps > 3
    assert torch.equal(tiny.chain(small, x, z, bundle), torch.where(bundle, written, x))


# --- the file


def test_it_is_four_screens_and_imports_torch_alone():
    lines = [line for line in SOURCE.splitlines() if line.strip()]
    assert len(SOURCE.splitlines()) <= 200
    assert sum(map(len, lines)) / len(lines) <= 56
    modules = {a.name.split(".")[0] for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module.split(".")[0] for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.ImportFrom)}
    assert modules == {"torch", "argparse"}


def test_without_the_tagged_lines_it_is_a_plain_masked_diffusion_model():
    """At most 40 of them; what is left trains, decodes and reports Stage A, and never speaks of the rest."""
    tagged = [line for line in SOURCE.splitlines() if line.endswith("# CoCommit")]
    plain = "\n".join(line for line in SOURCE.splitlines() if not line.endswith("# CoCommit"))
    assert len(tagged) <= 40
    names = {n.id for n in ast.walk(ast.parse(plain)) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(ast.parse(plain)) if isinstance(n, ast.Attribute)}
    assert not names & {"markers", "coordinate", "chain", "draw_bundle", "edit"}
    module: dict = {"__name__": "plain"}
    exec(compile(plain.replace("range(400)", "range(3)"), "plain", "exec"), module)
    base = module["train"](rng(0))
    row, full, partial = module["decode"](base, tiny.ROWS[0, 0, :1].tolist(), 2, 1, 1, 0)
    assert (len(row), full, partial) == (3, 2, 0)


def test_the_toy_is_the_one_that_misleads():
    """Each word's likeliest value makes a pair that is no phrase, in every context."""
    for phrases in tiny.ROWS.tolist():
        best = []
        for i in (1, 2):
            mass = {}
            for row, p in zip(phrases, [0.40, 0.35, 0.25], strict=True):
                mass[row[i]] = mass.get(row[i], 0) + p
            best.append(max(mass, key=mass.get))
        assert [phrases[0][0], *best] not in phrases
    counts = [tiny.TEXT.tolist().count(row) for row in tiny.ROWS[0].tolist()]
    assert [c / sum(counts) for c in counts] == approx([0.40, 0.35, 0.25])


@pytest.fixture(scope="module")
def output() -> str:
    done = subprocess.run([sys.executable, ROOT / "tiny.py"], capture_output=True, text=True, check=True)
    return done.stdout


def test_it_prints_what_the_readme_shows(output):
    shown = (ROOT / "README.md").read_text().split("$ python tiny.py\n")[1].split("```")[0]
    assert output == shown


def test_it_prints_what_a_student_remembers(output):
    rows = [line.split("  ") for line in output.splitlines()]
    cells = {row[0]: [c.strip() for c in row[1:] if c.strip()] for row in rows}
    assert cells["one word at a time"] == ["San Francisco", "3 of 3", "2 + 0"]
    assert cells["Stage A"] == ["San York", "0 of 3", "0.5", "0.7", "1 + 0"]
    assert cells["Stage B, clean target"] == ["San York", "0 of 3", "0.5", "0.7", "1 + 1"]
    assert cells["Stage B, chain target"] == ["San Francisco", "3 of 3", "1.0", "3.0", "1 + 1"]


@pytest.mark.parametrize("seed", ["many", "1.5"])
def test_a_bad_seed_gets_one_line(seed):
    done = subprocess.run([sys.executable, ROOT / "tiny.py", "--seed", seed], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "--seed" in done.stderr
