"""tiny.py does what the full code does. `pytest tests/test_tiny.py`"""

import contextlib
import io
import math
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from common import ROOT, approx
from torch import Tensor

import tiny
from causal import CausalModel
from config import Config
from corrupt import NONE, M, three_term_loss
from decoding import Decoding
from model import Model
from sample import generate

SOURCE = (ROOT / "tiny.py").read_text()
V = len(tiny.TOKENS)
NEVER = torch.tensor(tiny.MASK)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- by hand: the toy's own probabilities in place of a model
class Truth:
    """Stage A knows p(word | the words that it sees), and causal Stage B knows p(word | the words on its left)."""

    def prefix(self, z: Tensor) -> Tensor:
        return z

    def last_n(self, z: Tensor) -> Tensor:
        # the share of rows with each phrase, if the phrase fits what is seen
        share = (tiny.TEXT[:, None] == tiny.PHRASES).all(-1).float().mean(0)
        fits = ((z[:, None] == tiny.PHRASES) | (z[:, None] == tiny.MASK)).all(-1) * share
        p = torch.einsum("rf,ftv->rtv", fits, torch.eye(len(tiny.TOKENS))[tiny.PHRASES])
        return (p / p.sum(-1, keepdim=True)).log()

    def coordinate(self, h: Tensor, bundle: Tensor, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        left = [tokens.masked_fill(torch.arange(T) >= i, tiny.MASK) for i in range(T)]
        return torch.stack([self.last_n(seen)[:, i] for i, seen in enumerate(left)], dim=1)

    def logits(self, h: Tensor) -> Tensor:
        return h


def words(z: Tensor) -> str:
    return " ".join(tiny.TOKENS[i] for i in z)


# gate, passes, causal -> what is written, forwards, and the probabilities to draw New York and hot dog
@pytest.mark.parametrize(
    "tau, passes, causal, city, dish, forwards, new_york, hot_dog",
    [
        (-1, 0, False, "city San York", "dish ice dog", 1.0, 0.40 * 0.40, 0.32 * 0.32),
        (0.7, 0, False, "city San Francisco", "dish ice cream", 2.0, 0.40, 0.32),
        (-1, 2, True, "city San Francisco", "dish ice cream", 1.5, 0.40, 0.32),
    ],
)
def test_decoding_by_hand(tau, passes, causal, city, dish, forwards, new_york, hot_dog):
    z, found, _ = tiny.decode(Truth(), tiny.HOLES, tau, passes, causal)
    assert (words(z[0]), words(z[5]), found) == (city, dish, forwards)
    drawn = tiny.decode(Truth(), tiny.HOLES, tau, passes, causal, tiny.PHRASES)[2]
    assert drawn[[0, 5]].tolist() == approx([new_york, hot_dog])


def test_a_beam_of_two_finds_the_likeliest_phrases_by_hand():
    for row, phrase in ((0, "city New York"), (5, "dish hot dog")):
        z, forwards = tiny.beam_search(Truth(), tiny.HOLES[[row]], 2)
        assert (words(z), forwards) == (phrase, 2.0)


def test_three_words_above_the_gate_may_be_the_least_likely_phrase_by_hand(monkeypatch):
    """Milk, sugar and lemon have .73 each, so the gate of .7 fills all three. Together they have .20, less than any of
    the other three phrases with .27."""
    tea = {"tea milk sugar lemon": 6, "tea milk sugar no": 8, "tea milk no lemon": 8, "tea no sugar lemon": 8}
    for name, value in zip(("TOKENS", "PHRASES", "TEXT", "HOLES"), tiny.toy(tea), strict=True):
        monkeypatch.setattr(tiny, name, value)
    for how, phrase, forwards in (((0.7, 0), "lemon", 1.0), ((-1, 3, True), "no", 1.5)):
        z, found, _ = tiny.decode(Truth(), tiny.HOLES, *how)
        assert (words(z[0]), found) == (f"tea milk sugar {phrase}", forwards)


def test_decoding_ends_even_if_masks_are_written(monkeypatch):
    monkeypatch.setattr(Truth, "logits", lambda _, h: torch.eye(V)[tiny.MASK].expand_as(h))
    z, forwards, _ = tiny.decode(Truth(), tiny.HOLES, 1.0, 0)
    assert torch.equal(z, tiny.HOLES) and forwards <= 2


# --- the same functions as the full code's
def twins(monkeypatch, seed: int, kind: type[Model], T: int, n_last: int, K: int = 1, std: float = 0.4):
    """A random tiny model of three layers, and the full code's model with the same weights and blocks of T. The mask is
    nearly impossible, as after training. tiny.py's causal Stage B has no layers of its own, so here CausalModel's are
    copies of the last ones."""
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
        eos_id=-1, mask_id=tiny.MASK,  # no token ends a text
        n_dense=3, rope_theta=10000.0, rotary_dim=tiny.C // tiny.H, norm_eps=torch.finfo(torch.float32).eps,
        block_length=T, n_last=n_last, n_rounds=K, stage_b="paper" if kind is Model else "causal",
    ))  # fmt: skip

    # the full model's names of the same weights; its norms are ones, as tiny's have no weights
    state = {name: torch.ones(p.shape) for name, p in full.state_dict().items() if "norm" in name}
    for name, value in small.state_dict().items():
        name = re.sub(r"\.(qkv|proj)\.", r".attn.\1.", re.sub(r"\.(gate_up|down)\.", r".mlp.\1.", name))
        if kind is CausalModel or name != "show":
            state[name] = value
    full.begin_from(state)
    full.load_state_dict(state, assign=True)
    return small, full


def test_the_loss_is_the_full_codes():
    """Of Eq. 1 the term of what is filled."""
    logits, target = torch.randn(5, 6, V, generator=rng(0)), torch.randint(1, V, (5, 6), generator=rng(1))
    fill = torch.rand(5, 6, generator=rng(2)) < 0.6
    full = SimpleNamespace(logits=lambda h: h, cfg=SimpleNamespace(vocab_size=V))
    loss, _ = three_term_loss(full, logits, target, torch.where(fill, M, NONE).to(torch.uint8), fill)
    assert tiny.fill_loss(logits, target, fill).item() == approx(loss.item() / 30)


@pytest.mark.parametrize("kind", [Model, CausalModel])
@torch.no_grad()
def test_the_decoders_are_the_full_codes_in_fifty_settings(kind, monkeypatch):
    """Tokens, and forwards with everything counted. Prompts have masks. The paper's decoder has gates, and no to two
    rounds; causal Stage B fills all masks at once, in as many passes as it takes, or by a beam of two."""
    several = 0
    for seed in range(50):
        draw = random.Random(seed)
        causal = kind is CausalModel
        T = draw.randint(3, 8)
        n = draw.randint(1, T - 2)
        K = 1 if causal else seed % 3
        tau = 0.0 if causal else draw.choice([-1, 0.0, 0.2, 0.4, 0.7, 1.0])
        beam = 1 + seed % 2 if causal else 1
        small, full = twins(monkeypatch, seed, kind, T, draw.randint(1, 2), max(K, 1), draw.choice([0.2, 0.4, 0.7]))
        prompt = [draw.randrange(1, V), *(draw.randrange(V) for _ in range(n - 1))]  # of masks alone, all are as sure
        d = Decoding(gen_length=T - n, tau_m2t=tau, tau_t2t=None, n_rounds=K, beam=beam)
        [output] = generate(full, [prompt], d)

        z = torch.tensor([prompt + [tiny.MASK] * (T - n)])
        if causal:  # causal.py never writes [M]
            small.logits = lambda h, of=small: tiny.Model.logits(of, h).index_fill(2, NEVER, -math.inf)
        if beam > 1:
            written, forwards = tiny.beam_search(small, z, beam)
        else:
            [written], forwards, _ = tiny.decode(small, z, -1 if causal else tau, T if causal else K > 0, causal)
        assert written[n:].tolist() == output.tokens
        assert forwards == approx(output.nfe["full"] + output.nfe["partial"] * full.partial_cost)
        several += 1 < forwards < T - n + 1
    assert several >= 10  # or the equality would be hollow


def test_training_hides_any_word_but_the_context(monkeypatch):
    class Asked(Exception):
        pass

    def ask(may: Tensor) -> Tensor:
        raise Asked(may[0].tolist())

    monkeypatch.setattr(tiny, "some_of", ask)
    with pytest.raises(Asked, match=re.escape("[False, True, True]")):
        tiny.train(tiny.Model())


def test_masks_and_bundles_are_drawn_as_the_full_code_draws_them():
    """In the full code the share of masks is uniform: of two words both are masked in 1/3 of the rows, each alone in
    1/6, and none in 1/3. tiny leaves out rows without a mask, which have no loss. So one and two are equally likely, as
    in bundles of at most two."""
    torch.manual_seed(0)
    drawn = tiny.some_of((torch.arange(3) > 0).expand(8000, 3))
    code = (drawn * torch.tensor([4, 1, 2])).sum(1)  # the first word is never drawn
    assert [(code == i).float().mean().item() for i in range(1, 4)] == approx([1 / 4, 1 / 4, 1 / 2], abs=0.025)


# --- the file
def run(source: str, *flags: str) -> str:
    """What the file prints."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(sys, "argv", ["tiny.py", *flags])
        exec(source, {"__name__": "__main__"})
    return shown.getvalue()


def test_without_the_tagged_lines_it_is_a_plain_masked_diffusion_model():
    """It trains, decodes and prints the rows of Stage A, by seed 0 if no other is given."""
    plain = "\n".join(line for line in SOURCE.splitlines() if not line.endswith(("# CoCommit", "# causal")))
    assert not re.search("markers|coordinate", plain)
    out = run(plain.replace("700", "3"))
    assert out == run(plain.replace("700", "3"), "--seed", "0") != run(plain.replace("700", "3"), "--seed", "1")
    assert re.findall(r"^Stage .*?(?=  )", out, re.M) == ["Stage A, all at once", "Stage A, gate .7"]


def test_it_prints_the_committed_table():
    """Word for word, after 250 steps; on another processor the numbers may differ."""
    found = run(SOURCE.replace("700", "250"))
    shown = (ROOT / "results" / "theorem" / "tiny.txt").read_text().removeprefix("$ python tiny.py\n")
    number = r"\d+\.\d+"
    assert re.sub(number, "", found).split() == re.sub(number, "", shown).split()
    ours, theirs = ([float(x) for x in re.findall(number, text)] for text in (found, shown))
    assert ours == approx(theirs, abs=0.05)
