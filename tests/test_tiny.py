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


# --- by hand: the toy's own probabilities in place of a model
class Truth:
    """Stage A knows p(word | the words that it sees), and causal Stage B knows p(word | the words on its left)."""

    def prefix(self, z: Tensor) -> Tensor:
        return z

    def last_n(self, z: Tensor) -> Tensor:
        # the share of rows with each phrase, if the phrase fits what is seen
        share = torch.tensor(list(tiny.COUNTS.values())) / 25
        fits = ((z[:, None] == tiny.PHRASES) | (z[:, None] == tiny.MASK)).all(-1) * share
        p = torch.einsum("rf,ftv->rtv", fits, torch.eye(V)[tiny.PHRASES])
        return (p / p.sum(-1, keepdim=True)).log()

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor) -> Tensor:
        left = [tokens.masked_fill(torch.arange(3) >= i, tiny.MASK) for i in range(3)]
        return torch.stack([self.last_n(seen)[:, i] for i, seen in enumerate(left)], dim=1)

    def logits(self, h: Tensor) -> Tensor:
        return h


def words(z: Tensor) -> str:
    return " ".join(tiny.TOKENS[i] for i in z)


# gate, looks, causal -> what is written, forwards, and the probabilities to draw New York and hot dog
@pytest.mark.parametrize(
    "tau, looks, causal, city, dish, forwards, new_york, hot_dog",
    [
        (-1, 0, False, "city San York", "dish ice dog", 1.0, 0.40 * 0.40, 0.32 * 0.32),
        (0.39, 0, False, "city San York", "dish ice cream", 2.0, 0.40 * 0.40, 0.32),  # at .39 dog (.32) waits
        (0.7, 0, False, "city San Francisco", "dish ice cream", 2.0, 0.40, 0.32),
        (-1, 2, True, "city San Francisco", "dish ice cream", 1.5, 0.40, 0.32),
    ],
)
def test_decoding_by_hand(tau, looks, causal, city, dish, forwards, new_york, hot_dog):
    z, found, _ = tiny.decode(Truth(), tiny.HOLES, tau, looks, causal)
    assert (words(z[0]), words(z[5]), found) == (city, dish, forwards)
    drawn = tiny.decode(Truth(), tiny.HOLES, tau, looks, causal, tiny.PHRASES)[2]
    assert drawn[[0, 5]].tolist() == approx([new_york, hot_dog])


@pytest.mark.parametrize("row, phrase", [(0, "city New York"), (5, "dish hot dog")])
def test_a_beam_of_two_finds_the_likeliest_phrase_by_hand(row, phrase):
    z, forwards = tiny.beam_search(Truth(), tiny.HOLES[[row]], 2)
    assert (words(z), forwards) == (phrase, 2.0)


# --- the same functions as the full code's
def twins(monkeypatch, seed: int, T: int, n_last: int, K: int = 1, std: float = 0.4, kind=Model):
    """A random tiny model of three layers, and the full code's model with the same weights and blocks of T. As after
    training, the mask is never the likeliest word. tiny.py's causal Stage B has no layers of its own and is not added
    to Stage A, so here CausalModel's layers are copies of the last ones, and nothing is added."""
    monkeypatch.setattr(tiny, "N_LAYER", 3)
    monkeypatch.setattr(tiny, "N_LAST", n_last)
    monkeypatch.setattr(tiny, "N_ROUNDS", K)
    small = tiny.Model()
    for i, p in enumerate(small.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=rng(100 * seed + i)) * std)
    small.lm_head.weight.data[tiny.MASK] = small.lm_head.weight.data[1] / 2
    full = kind(Config(
        n_layer=3, n_head=tiny.H, n_kv_head=tiny.H, n_embd=tiny.C, head_dim=tiny.C // tiny.H, vocab_size=V,
        d_dense=2 * tiny.C, d_expert=1, n_expert=2, n_active=1, n_group=1, topk_group=1,
        eos_id=tiny.MASK, mask_id=tiny.MASK,  # no token ends a text
        n_dense=3, rope_theta=10000.0, rotary_dim=tiny.C // tiny.H, norm_eps=torch.finfo(torch.float32).eps,
        block_length=T, n_last=n_last, n_rounds=K,
    ))  # fmt: skip

    # the full model's names of the same weights; its norms are ones, as tiny's have no weights
    state = {name: torch.ones_like(p) for name, p in full.state_dict().items() if "norm" in name}
    for name, value in small.state_dict().items():
        name = re.sub(r"\.(qkv|proj)\.", r".attn.\1.", re.sub(r"\.(gate_up|down)\.", r".mlp.\1.", name))
        state[name] = value
        if name.startswith(f"layers.{3 - n_last}") and kind is CausalModel:
            state[name.replace(f"layers.{3 - n_last}", "layers_b.0")] = value
    if kind is Model:
        del state["show"]
    else:
        full.add_to = lambda log_p_a, states: full.logits(states)
    full.load_state_dict(state)
    return small, full


@pytest.mark.parametrize("kind, n_last, K", [(Model, 2, 2), (CausalModel, 1, 1)])
@torch.no_grad()
def test_both_stages_have_the_full_models_logits(kind, n_last, K, monkeypatch):
    """Bundles have any shape, except that causal ones are one run, as tiny's are."""
    small, full = twins(monkeypatch, 2, 6, n_last, K, kind=kind)
    tokens = torch.randint(V, (5, 6), generator=rng(0))
    bundle = torch.rand(5, 6, generator=rng(1)) < 0.5
    if kind is CausalModel:
        first = torch.tensor([0, 1, 2, 3, 6])[:, None]
        bundle = (torch.arange(6) >= first) & (torch.arange(6) < first + 4)
    z = tokens.masked_fill(bundle, tiny.MASK)
    ctx = full.context(torch.ones_like(z, dtype=torch.bool))
    h = full.prefix(z, ctx)
    a = full.logits(full.last_n(h, ctx))
    assert torch.allclose(small.logits(small.last_n(small.prefix(z))), a, atol=1e-5, rtol=0)

    read = (tokens,) if kind is CausalModel else ()
    b = full.logits(full.coordinate(h, bundle, ctx, K, *read))
    assert torch.allclose(small.logits(small.coordinate(small.prefix(z), bundle, *read)), b, atol=1e-5, rtol=0)
    assert (b - a).abs().max() > 0.1  # markers do something here


def test_the_fill_loss_is_the_full_codes(monkeypatch):
    """Of seven rows the first has nothing to fill, and in the last everything is filled."""
    small, full = twins(monkeypatch, 0, 6, 1)
    h = torch.randn(7, 6, tiny.C, generator=rng(2))
    target = torch.randint(V, (7, 6), generator=rng(3))
    fill = torch.rand(7, 6, generator=rng(5)) < torch.tensor([0, 0.2, 0.2, 0.4, 0.4, 0.7, 1])[:, None]
    theirs, _ = three_term_loss(full, h, target, torch.where(fill, M, 0).to(torch.uint8), fill)
    assert tiny.fill_loss(small.logits(h), target, fill).item() == approx(theirs.item() / 42)


@torch.no_grad()
def test_the_papers_decoder_is_generate_one_in_fifty_settings(monkeypatch):
    """Tokens, and forwards with everything counted: prompts with masks, gates, and no to two rounds."""
    seen = dict(stage_b=0, several=0, at_once=0)
    for seed in range(50):
        draw = random.Random(seed)
        T, K = draw.randint(2, 8), seed % 3
        n = draw.randint(1, min(3, T - 1))
        small, full = twins(monkeypatch, seed, T, draw.randint(1, 2), max(K, 1), draw.choice([0.2, 0.4, 0.7]))
        prompt = [draw.randrange(V) for _ in range(n)]
        tau = draw.choice([-1, 0.0, 0.2, 0.4, 0.7, 1.0])
        d = Decoding(gen_length=T - n, tau_m2t=tau, tau_t2t=None, n_rounds=K, eos_early_stop=False)
        tokens, nfe, _ = generate_one(full, prompt, d)

        z = torch.tensor([prompt + [tiny.MASK] * (T - n)])
        written, forwards, _ = tiny.decode(small, z, tau, K > 0)
        assert written[0, n:].tolist() == tokens and torch.equal(written[z != tiny.MASK], z[z != tiny.MASK])
        assert forwards == approx(nfe["full"] + nfe["partial"] * full.partial_cost)
        seen["stage_b"] += nfe["partial"] > 0
        seen["several"] += nfe["full"] > 2
        seen["at_once"] += nfe["full"] == 1 and T - n > 2
    assert min(seen.values()) >= 5, seen  # or the equality would be hollow


@torch.no_grad()
def test_looks_and_beams_against_the_enumerated_table(monkeypatch):
    """A context and three words: causal Stage B gives each of the V^3 tuples a probability."""
    differ = 0
    for seed in range(10):
        small, _ = twins(monkeypatch, seed, 4, 2, std=0.7)
        z = torch.tensor([[3, 0, 0, 0]])
        every = torch.cartesian_prod(torch.tensor([3]), *[torch.arange(V)] * 3)
        states = small.coordinate(small.prefix(z), z == tiny.MASK, every)
        p = small.logits(states).softmax(-1).gather(2, every[..., None])[:, 1:, 0]
        table = p.prod(1).view(V, V, V)
        assert table.sum().item() == approx(1, abs=1e-4)

        # two beginnings of one word, the likeliest two of theirs with a second word, and of these with a third
        first = table.sum((1, 2)).topk(2).indices.tolist()
        second = sorted(((table[a, b].sum(), a, b) for a in first for b in range(V)), reverse=True)[:2]
        _, *best = max((table[a, b, c], a, b, c) for _, a, b in second for c in range(V))
        found, forwards = tiny.beam_search(small, z, 2)
        assert found[1:].tolist() == best and forwards == 1 + 3 * 2 / 3

        # looks write what a beam of one writes, from the left
        greedy = tiny.decode(small, z, -1, 3, True)[0][0, 1:].tolist()
        assert tiny.beam_search(small, z, 1)[0][1:].tolist() == greedy
        differ += best != greedy
    assert differ >= 2


def test_masks_and_bundles_are_drawn_as_the_full_code_draws_them():
    """In the full code the share of masks is uniform: of two words both are masked in 1/3 of the rows, each alone in
    1/6, and none in 1/3. tiny leaves out rows without a mask, which have no loss. Of four masks, bundles of 1 and of 2
    are equally likely: each single mask has 1/8, and each pair has 1/12."""
    torch.manual_seed(0)
    laws = {2: [0, 1 / 4, 1 / 4, 1 / 2], 4: [{1: 1 / 8, 2: 1 / 12}.get(code.bit_count(), 0.0) for code in range(16)]}
    for n, law in laws.items():
        drawn = tiny.some_of((torch.arange(n + 1) > 0).expand(8000, n + 1))
        code = (drawn * 2 ** torch.arange(n + 1)).sum(1) / 2  # the first word is never drawn
        assert [(code == i).float().mean().item() for i in range(2**n)] == approx(law, abs=0.025)

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
    out = run(plain.replace("700", "3"))
    assert re.findall(r"^Stage .*?(?=  )", out, re.M) == ["Stage A, all at once", "Stage A, gate .7"]


def test_it_prints_the_committed_table():
    """Word for word, after 250 steps; on another processor the numbers may differ."""
    found = run(SOURCE.replace("700", "250"))
    shown = (ROOT / "results" / "theorem" / "tiny.txt").read_text().removeprefix("$ python tiny.py\n")
    number = r"\d+\.\d+"
    assert re.sub(number, "", found).split() == re.sub(number, "", shown).split()
    ours, theirs = ([float(x) for x in re.findall(number, text)] for text in (found, shown))
    assert ours == approx(theirs, abs=0.05)
