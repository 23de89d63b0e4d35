"""The moving picture of three decodes. `pytest tests/tools/test_film.py`"""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from common import ROOT, approx, byte_model, caller

from cache import in_full
from lib.tokenizer import byte_tokenizer
from sample import Decoding, generate
from tools import film
from tools.film import Chip, Clock, Film

CITY, SAN, YORK, FRANCISCO, EOS, MASK = range(6)
WORDS = ["city", " San", " York", " Francisco"]
TOKENIZER = SimpleNamespace(
    token_bytes={i: word.encode() for i, word in enumerate(WORDS)}, special={},
    decode=lambda ids: "".join(WORDS[i] for i in ids if i < EOS).replace(" ", "·"),
)  # fmt: skip


def played(monkeypatch, drafts: list[list[int]], after: list[int], token_a: list[int]) -> Film:
    """A film of one step: a block whose prompt is "city"; what each look reads, and what is written in the end."""
    model = SimpleNamespace(cfg=SimpleNamespace(eos_id=EOS, mask_id=MASK), partial_cost=0.25)
    block = [CITY, MASK, MASK, MASK]
    output = SimpleNamespace(prompt=[CITY], tokens=after[1:], nfe=dict(full=0, partial=0, refresh=0))
    row = SimpleNamespace(ids=[], output=output, block=lambda: block, given=lambda: [True, False, False, False])

    def step(engine, z, given, u, d):
        for tokens in drafts:
            engine.stage_b(None, None, torch.tensor([tokens]))
        bundle = [old == MASK != new for old, new in zip(block, after, strict=True)]
        tensors = dict(z=block, after=after, token_a=token_a, bundle=bundle, edited=[False] * 4, partial=len(drafts))
        return SimpleNamespace(**{name: torch.tensor([of]) for name, of in tensors.items()})

    def generate(model, prompts, d, step, on_step):
        on_step(
            [row], step(SimpleNamespace(model=model, stage_a=None, stage_b=lambda *args: None), None, None, None, d)
        )
        output.nfe = dict(full=1, partial=len(drafts), refresh=0)
        return [output]

    monkeypatch.setattr(film, "step_of", lambda d: step)
    monkeypatch.setattr(film, "generate", generate)
    return Film("", model, TOKENIZER, [CITY], Decoding())


def test_looks_by_hand(monkeypatch):
    """Stage A drafts San York; the first look mends York, the second finds nothing more, the end is not written yet.
    A look is a quarter of a forward."""
    drafts = [[CITY, SAN, YORK, EOS], [CITY, SAN, FRANCISCO, EOS]]
    seen = played(monkeypatch, drafts, after=[CITY, SAN, FRANCISCO, MASK], token_a=[CITY, SAN, YORK, EOS])
    city = Chip("given", "city")
    assert [(frame.at, frame.doing, frame.chips) for frame in seen.frames] == [
        (0, "Stage A drafts", [city, Chip(), Chip(), Chip()]),
        (1, "Stage B, look 1", [city, Chip("draft", "San"), Chip("draft", "York"), Chip("draft", "end")]),
        (1.25, "Stage B, look 2", [city, Chip("draft", "San"), Chip("changed", "Francisco"), Chip("draft", "end")]),
        (1.5, "", [city, Chip("written", "San"), Chip("changed", "Francisco", draft="York"), Chip()]),
    ]
    assert seen.forwards == 1.5
    assert seen.ending()[1:3] == [Chip("bad", "San"), Chip("bad", "Francisco", draft="York")]


def test_without_stage_b_a_step_writes_at_once(monkeypatch):
    """What is behind the end is gone in the last picture."""
    seen = played(monkeypatch, [], after=[CITY, SAN, EOS, YORK], token_a=[CITY, SAN, EOS, YORK])
    assert [(frame.at, frame.doing) for frame in seen.frames] == [(0, "Stage A writes"), (1, "")]
    assert [chip.word for chip in seen.ending()] == ["city", "San", "end"]
    assert [chip.word for chip in seen.frames[-1].chips] == ["city", "San", "end", "York"]


@pytest.mark.parametrize("how", [dict(n_rounds=0), {}, dict(tau_joint=0.0), dict(tau_joint=0.9)])
def test_a_film_is_the_decode_and_its_forwards(how):
    """Over several blocks, read again where they are finished: the last picture is generate's text and cost."""
    d = Decoding(**dict(gen_length=24, tau_m2t=-1.0, tau_t2t=None) | how)
    model = byte_model(causal="tau_joint" in how)
    model.lm_head.weight.data[model.cfg.mask_id] = 0  # it never writes a mask
    [output] = generate(model, [[65, 66]], d)
    seen = Film("", model, byte_tokenizer(), [65, 66], d)
    written = [seen.word(token) for token in output.prompt + output.tokens]
    assert [chip.word for chip in seen.ending()][: len(written)] == written
    times = [frame.at for frame in seen.frames]
    cost = in_full(output.nfe, model.partial_cost)
    assert times == sorted(times) and times[0] == 0 and times[-1] == approx(cost) and seen.forwards == cost
    assert output.nfe["refresh"] >= 1


def test_the_clock_by_hand():
    """Two forwards of five seconds and six of pause: a forward is 5/16 of the loop. What ends is hidden at first."""
    clock = Clock(2)
    assert clock.seen(0, 1, "x") == '<g class="i0" opacity="0">x</g>'
    assert clock.seen(1, None, "x") == '<g class="i1">x</g>'
    css = clock.css()
    assert "[class^=i] { animation: 16.0s step-end infinite }" in css
    assert "@keyframes i0 { 0% { opacity: 1 } 31.25% { opacity: 0 } }" in css
    assert "@keyframes i1 { 0% { opacity: 0 } 31.25% { opacity: 1 } }" in css
    assert Clock(9).share(9) == "75.00%", "many forwards last 18 seconds together"


def parsed(svg: str) -> list[str]:
    """The texts of a picture, which is whole, and stands by itself."""
    assert not re.search(r"<script|href|url\(|@import|<image", svg)
    root = ElementTree.fromstring(svg)
    return [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.text]


def test_any_prompt_is_text(monkeypatch):
    seen = played(monkeypatch, [], after=[CITY, SAN, EOS, YORK], token_a=[CITY, SAN, EOS, YORK])
    svg = film.draw([seen], "<A>", "what a forward is")
    assert {"✗ no such character", "what a forward is"} <= set(parsed(svg)) and svg.count("&lt;A&gt;") == 2
    assert "prefers-reduced-motion" in svg and "prefers-color-scheme: dark" in svg


def test_the_committed_film_is_what_the_shipped_adapters_do(tmp_path, monkeypatch, capsys):
    """The same words are written at the same cost."""
    said = caller(film, monkeypatch, capsys)("--out", tmp_path / "film.svg")
    drawn = parsed((tmp_path / "film.svg").read_text())
    committed = (ROOT / "assets" / "decode.svg").read_text()
    assert drawn == parsed(committed) and len(committed.encode()) < 60_000
    for title in ("base: Stage A alone", "the paper's Stage B", "causal Stage B"):
        [cost] = re.findall(rf"^{title}: .*, (\S+ forwards?)$", said, re.M)
        assert title in drawn and cost in drawn
    assert drawn.count("✗ no such character") == 2 and sum(text.startswith("✓") for text in drawn) == 1
