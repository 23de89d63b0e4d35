"""The page's engine against PyTorch, what the page shows of a decode, and of a record of sample.py --json.

Most of it needs a browser: apt install chromium. `pytest tests/tools/test_playground.py`
"""

import base64
import html
import json
import re
import shutil
import subprocess
import unicodedata
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from common import MASK, ROOT, command_line, random_ids, refused, tiny_model

import sample
from beyond.head import Head
from checkpoint import load_model, load_tokenizer, save_adapter, save_model
from evaluate import draw_names
from lib import show
from lib.data import exists, unicode_names
from lib.output import in_full
from lib.show import verdict
from lib.tokenizer import byte_tokenizer
from lib.util import generator, write_json
from model import Model
from sample import Decoding, generate, generate_one
from tools import playground

BASE = ROOT / "assets" / "names"
HEAD = BASE / "head"
NAMES = Decoding(gen_length=32, tau_t2t=None, n_rounds=0, holes=True)
WITH_HEAD = replace(NAMES, n_rounds=1, tau_keep=0.5)
GATES = {"surest": (-1.0, 0.1, 0.2), "leftmost": (-1.0, 0.2, 0.5)}
HOSTILE = '</script><!--<b>&"'

FOUND = filter(None, map(shutil.which, ("google-chrome", "chromium", "chrome")))
BROWSER = next((path for path in FOUND if not path.startswith("/snap/")), None)  # a snap cannot read these folders
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --virtual-time-budget=10000000 --dump-dom"
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


@pytest.fixture(scope="module")
def shipped() -> Model:
    return load_model(HEAD, "cpu", torch.float32)


@pytest.fixture(scope="module")
def names_page() -> str:
    """The page of the shipped head."""
    return playground.page(str(HEAD))


@pytest.fixture(scope="module")
def bytes_page(tmp_path_factory) -> str:
    """A small page, of a random model of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    save_model(odd_model(), folder)
    return playground.page(str(folder))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE, "bpe")


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return list(draw_names(200, "held out", tokenizer).values())


@pytest.fixture(scope="module", params=["surest", "leftmost"])
def of_order(request, tmp_path_factory) -> Path:
    """The shipped folders, as if the base were best written in this order."""
    folder = tmp_path_factory.mktemp(request.param) / "names"
    shutil.copytree(BASE, folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"order": request.param})
    return folder / "head"


def odd_model(**overrides) -> Model:
    """A small random model of bytes: group-limited routing with biases, two rounds of Stage B."""
    return tiny_model(vocab_size=272, eos_id=256, mask_id=257, max_len=128, **overrides)


def answer(folder: Path, page: str, script: str, **given) -> object:
    """What `script` returns, run in the page with `given` in its sight."""
    variables = json.dumps(given).replace("<", "\\u003c")
    wrapped = f"""
        play(false);
        const given = {variables};
        const text = (id) => $(id).textContent;
        const cells = () => [...document.querySelectorAll("button.cell")].map((cell) => ({{
            at: Number(cell.dataset.at), is: cell.className, title: cell.title,
            parts: [...cell.children].map((part) => (part.hidden ? "" : part.textContent))}}));
        (async () => {{ {script} }})().catch(String).then((answer) => {{
            const result = document.createElement("pre");
            result.id = "result";
            result.textContent = JSON.stringify(answer);
            document.head.replaceChildren();
            document.body.replaceChildren(result);
        }});
    """
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{wrapped}</script></body>"), encoding="utf-8")
    argv = [BROWSER, *QUIET.split(), f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, encoding="utf-8", timeout=900)
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert result, done.stderr[-2000:]
    return json.loads(html.unescape(result[1]))


def engine_settings(d: Decoding, stage: str) -> dict:
    return asdict(d) | {"stage": stage}


# ---------------------------------------------------------------------------------------------------------------------
# the engine

RECORD_LOGITS = """
    const seen = [];
    const plain = head;
    head = (model, h) => { const found = plain(model, h); seen.push(...found); return found; };
    const tokens = given.prompts.map((prompt) => generateOne(model, prompt, given.d).tokens);
    head = plain;
    const numbers = new Float32Array(seen.length * model.cfg.vocab_size);
    seen.forEach((row, i) => numbers.set(row, i * row.length));
    const bytes = new Uint8Array(numbers.buffer);
    let letters = "";
    for (const byte of bytes) letters += String.fromCharCode(byte);
    return {tokens, calls: seen.length, logits: btoa(letters)};
"""


def check_logits(folder: Path, page: str, model: Model, prompts: list[list[int]], d: Decoding, stage: str) -> int:
    """All rows of logits, in the order in which they are computed -> how many forwards there were."""
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.reshape(-1, out.shape[-1])))
    outputs = [generate(model, [prompt], d)[0] for prompt in prompts]
    hook.remove()
    logits = torch.cat(rows)

    found = answer(folder, page, RECORD_LOGITS, prompts=prompts, d=engine_settings(d, stage))
    assert found["tokens"] == [o.tokens for o in outputs] and found["calls"] == len(logits)
    numbers = np.frombuffer(base64.b64decode(found["logits"]), np.float32).reshape(logits.shape)
    assert np.abs(numbers - logits.float().numpy()).max() < 1e-3
    return sum(o.nfe["full"] for o in outputs)


@in_browser
def test_both_stages_logits_are_pytorchs_on_fifty_blocks(names_page, shipped, prompts, tmp_path):
    assert check_logits(tmp_path, names_page, shipped, prompts[:26], replace(WITH_HEAD, tau_m2t=0.1), "head") >= 50


@in_browser
def test_selection_by_hand(bytes_page, tmp_path):
    """tests/test_sample.py's cases. From the left the products are .9, .63, .378 and .3402."""
    cases = [
        ([0.9, 0.7, 0.6, 0.9], 0.37, "leftmost", [0, 1, 2]),
        ([0.9, 0.7, 0.6, 0.9], 0.379, "leftmost", [0, 1]),  # though the fourth is as sure as the first
        ([0.9, 0.7, 0.6, 0.9], 1.0, "leftmost", [0]),
        ([0.9, 0.7, 0.6, 0.9], -1.0, "leftmost", [0, 1, 2, 3]),
        ([0.9, 0.7, 0.6, 0.9], 0.65, "surest", [0, 1, 3]),
        ([0.6, 0.7, 0.9, 0.9], 1.0, "surest", [2]),  # of equals the leftmost
        ([0.9, 0.7, 0.6, 0.9], -1.0, "surest", [0, 1, 2, 3]),
    ]
    script = "return given.cases.map(([conf, gate, order]) => selectBundle(conf, [0, 1, 2, 3], gate, order));"
    assert answer(tmp_path, bytes_page, script, cases=cases) == [bundle for *_, bundle in cases]

    # a visible token takes no part, and where nothing is masked nothing is written
    script = """return ["leftmost", "surest"].flatMap((order) =>
        [selectBundle([0.01, 0.7, 0.6, 0.5], [1, 2, 3], 0.4, order), selectBundle([0.5], [], 0.4, order)]);"""
    assert answer(tmp_path, bytes_page, script) == [[1, 2], [], [1, 2, 3], []]


HEAD_BY_HAND = """
    headAdds = (model, last, tokens, asked) => asked.map((t) => {
        const before = t ? tokens[t - 1] : 0;
        const row = new Float32Array(6);
        row[(before + 1) % 4] = Math.log(before % 2 === 0 ? 2 : 3);
        return row;
    });
    const byHand = ([z, order, tau_keep]) => {
        const logits = z.map((_, t) => Float32Array.from([0, 0, t === 0 ? 1e-3 : 0, 0, -Infinity, 0]));
        const a = {last: [], logits, token_a: [2, 2, 2, 2], conf_a: [0.3, 0.3, 0.3, 0.3]};
        const bundle = [0, 1, 2, 3].filter((t) => z[t] === 5);
        return headLook({cfg: {mask_id: 5, order}}, z, a, bundle, tau_keep);
    };
"""


@in_browser
def test_what_a_head_writes_by_hand(bytes_page, tmp_path):
    """tests/beyond/test_head.py's cases: two to one after even tokens, three to one after odd ones, for the token that
    is one higher; a mask is 5. 0 _ is followed by 1 (2/5), 1 by 2 (3/6), and behind the visible 1 comes 2 (3/6)."""
    z = [5, 5, 1, 5]
    cases = [
        ((z, "surest", 0.0), [0, 1, 3], [], [1, 2, 2, 2], 3),
        ((z, "surest", 0.15), [0, 1], [3], [1, 2, 2, 2], 3),  # .4, .2, .1 together
        ((z, "surest", 0.3), [0], [1, 3], [1, 2, 2, 2], 2),
        ((z, "surest", 0.5), [0], [1, 3], [2, 3, 2, 2], 1),  # not sure of its first token: Stage A's
        (([5, 0, 1, 0], "surest", 0.0), [0], [], [1, 2, 2, 2], 1),
        (([5, 5, 5, 5], "leftmost", 0.0), [0, 1, 2, 3], [], [1, 2, 3, 0], 4),
        ((z, "leftmost", 0.0), [0], [1, 3], [2, 2, 2, 2], 0),  # it stands aside: a token stands behind a mask
        (([1, 0, 5, 5], "leftmost", 0.0), [2, 3], [], [2, 2, 1, 2], 2),
    ]
    script = f"""{HEAD_BY_HAND} return given.cases.map((given) => {{
        const s = byHand(given);
        return [s.bundle, s.refused, s.token, s.nLooks, s.partial, s.conf];
    }});"""
    found = answer(tmp_path, bytes_page, script, cases=[given for given, *_ in cases])
    for (given, written, refused_, token, looks), here in zip(cases, found, strict=True):
        assert here[:5] == [written, refused_, token, looks, looks], given
    assert [found[0][5][t] for t in (0, 1, 3)] == pytest.approx([0.4, 0.5, 0.5], abs=1e-3)
    assert found[3][5][0] == found[6][5][0] == 0.3


@in_browser
def test_looks_by_hand(bytes_page, tmp_path):
    """Drafts 2 0 . 0. The first look finds 1 at the first place and 3 behind the draft 2; the second 2 behind 1; that
    differs from 3, and the third finds what is behind the visible 1, the same as ever."""
    script = f"""{HEAD_BY_HAND}
        return byHand([[5, 5, 1, 5], "surest", 0]).looks.map((asked) => asked.map((x) => [x.t, x.token, x.final]));"""
    assert answer(tmp_path, bytes_page, script) == [
        [[0, 2, False], [1, 0, False], [3, 0, False]],
        [[0, 1, True], [1, 3, False], [3, 2, False]],
        [[1, 2, True], [3, 2, False]],
        [[3, 2, True]],
    ]


COUNTS = """
    return given.settings.map((d) => given.prompts.map((asked) => {
        const {prompt, tokens, nfe} = generateOne(model, asked, d);
        return [prompt, tokens, nfe.full, nfe.partial, nfe.commit, nfe.looks];
    }));
"""


def counted(prompt: list[int], tokens: list[int], nfe: dict) -> list:
    return [prompt, tokens, *(nfe[kind] for kind in ("full", "partial", "commit", "looks"))]


def with_holes(prompt: list[int], mask_id: int) -> list[int]:
    """Every third token is to be filled."""
    return [mask_id if i % 3 == 1 else token for i, token in enumerate(prompt)]


@in_browser
def test_tokens_and_counts_are_samples_for_each_order_decoder_and_gate(of_order, prompts, tmp_path):
    model = load_model(of_order, "cpu", torch.float32)
    asked = prompts[:16] + [with_holes(prompt + prompts[0], model.cfg.mask_id) for prompt in prompts[:4]]
    jobs = [(replace(NAMES, tau_m2t=1.0), "A")]
    for tau in GATES[model.cfg.order]:
        jobs += [(replace(NAMES, tau_m2t=tau), "A"), (replace(WITH_HEAD, tau_m2t=tau), "head")]
    watch = """
        const kinds = {slow: 0, refused: 0, aside: 0};
        const plain = headLook;
        headLook = (...asked) => {
            const s = plain(...asked);
            kinds.slow += s.nLooks > 2 ? 1 : 0;
            kinds.refused += s.nLooks > 0 && s.refused.length > 0 ? 1 : 0;
            kinds.aside += s.nLooks === 0 ? 1 : 0;
            return s;
        };
    """
    script = f"{watch} const found = (() => {{ {COUNTS} }})(); return {{found, kinds}};"
    page = playground.page(str(of_order), "GREEK")
    found = answer(tmp_path, page, script, settings=[engine_settings(*job) for job in jobs], prompts=asked)
    kinds = found["kinds"]  # wrong drafts, refusals and holes are among them
    assert kinds["slow"] > 0 and kinds["refused"] > 0
    assert (kinds["aside"] > 0) == (model.cfg.order == "leftmost")
    for (d, stage), here in zip(jobs, found["found"], strict=True):
        expected = [counted(o.prompt, o.tokens, o.nfe) for o in generate(model, asked, d)]
        wrong = [prompt for prompt, a, b in zip(asked, here, expected, strict=True) if a != b]
        assert not wrong, (d, stage)


@in_browser
@pytest.mark.parametrize("kind", ["Stage B", "LoRA", "bare", "head"])
def test_other_checkpoints_decode_as_generate_does(kind, tmp_path):
    """Two rounds of Stage B, edits, holes, blocks before the current one, biases; LoRA over them, from the left; one
    expert alone, tied; a random head, whose drafts are mostly wrong."""
    extras = dict(qkv_bias=True, proj_bias=True)
    if kind == "LoRA":
        extras["order"] = "leftmost"
    if kind == "bare":
        extras = dict(n_shared=0, n_active=1, tied=True, n_rounds=1, n_dense=0, routed_scaling=1.0)
    if kind == "head":
        extras["n_rounds"] = 1
    model = odd_model(**extras)
    save_model(model, tmp_path / "base")
    folder = tmp_path / "base"
    if kind == "LoRA":
        model.add_lora(4, 8, generator("tests", "lora"))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0.0, 0.1, generator=generator("tests", name))
        folder = tmp_path / "adapter"
        save_adapter(model, folder, tmp_path / "base", {"lora_r": 4, "lora_alpha": 8})
    if kind == "head":
        model.second_look = Head(model.cfg, width=24)
        for name, p in model.second_look.named_parameters():
            p.data = 0.3 * torch.randn(p.shape, generator=generator(name)) + (1.0 if p.dim() == 1 else 0.0)
        folder = tmp_path / "head"
        save_adapter(model, folder, tmp_path / "base", {"head": {"module": "beyond.head", "width": 24}})
    model = load_model(folder, "cpu", torch.float32)
    page = playground.page(str(folder))
    stage = "head" if kind == "head" else "B"

    starts = [random_ids(1, n, n, 250)[0].tolist() for n in (3, 8, 13, 21)]
    starts += [with_holes(start, 257) for start in starts]
    d = Decoding(gen_length=20, tau_m2t=0.4, n_rounds=model.cfg.n_rounds, holes=True)
    settings = [
        (replace(d, tau_t2t=0.3, max_post_steps=2), stage),
        (replace(d, tau_t2t=0.0, max_post_steps=3, n_rounds=0), "A"),
        (replace(d, tau_m2t=-1.0, tau_t2t=None, tau_keep=0.02), stage),
    ]
    check_logits(tmp_path, page, model, starts, settings[0][0], stage)
    found = answer(tmp_path, page, COUNTS, prompts=starts, settings=[engine_settings(*s) for s in settings])
    edits = []
    for (d, _), here in zip(settings, found, strict=True):
        outputs = generate(model, starts, d, on_step=lambda rows, step: edits.append(int(step.edited.sum())))
        assert here == [counted(o.prompt, o.tokens, o.nfe) for o in outputs]
        tokens, nfe, _ = generate_one(model, starts[2], d)
        assert here[2] == counted(starts[2], tokens, nfe)
    assert sum(edits) > 100 or kind == "bare"


@in_browser
def test_of_equals_the_first_is_taken(tmp_path):
    """With a head of zeros every token of every mask is equally likely: token 0, at the leftmost mask."""
    model = odd_model(n_rounds=1)
    model.lm_head.weight.data.zero_()
    save_model(model, tmp_path)
    d = Decoding(gen_length=5, tau_m2t=0.5, tau_t2t=None, n_rounds=0)
    script = "return generateOne(model, given.prompt, given.d).steps.map((s) => [s.bundle, s.token[0]]);"
    found = answer(tmp_path, playground.page(str(tmp_path)), script, prompt=[65] * 3, d=engine_settings(d, "A"))
    assert found == [[[t], 0] for t in range(3, 8)]


@in_browser
def test_records_are_those_of_sample_json(names_page, tmp_path, monkeypatch, capsys):
    """But for what the page adds."""
    names = ["BOX DRAWINGS", "GREEK SMALL", "latin", "CANADIAN ▒▒▒ DZU"]
    argv = ["--ckpt", HEAD, "--device", "cpu", "--gen_length", 32, "--json", "--tau_m2t", 0]
    argv += [a for name in names for a in ("--prompt", name)]
    lines = command_line(sample, monkeypatch, capsys, *argv)[1].splitlines()
    script = "return given.names.map((name) => recordOf(promptOf(name).prompt, decoding(data.decoders[1])));"
    for line, found in zip(lines, answer(tmp_path, names_page, script, names=names), strict=True):
        record = json.loads(line)
        assert found["pieces"].items() >= record.pop("pieces").items()
        for here, there in zip(found["steps"], record.pop("steps"), strict=True):
            assert here.keys() == there.keys() | {"byHand", "looks"}
            assert max(0, len(here["looks"]) - 1) == there["partial"]  # the first are the drafts
            assert np.allclose(here.pop("conf"), there.pop("conf"), atol=2e-4)
            for key in ("fill", "edit", "refused"):
                for a, b in zip(here.pop(key), there.pop(key), strict=True):
                    assert a == pytest.approx(b, abs=2e-4)
            assert here.items() >= there.items()
        assert {key: found[key] for key in record} == record


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer and judge

TEXTS = [
    "BOX DRAWINGS",
    " A  B\t\n C",
    "é ü 漢字 😀",
    "\u00a0x\u2003y\u0085z\ufeff",
    "<|mask|> and <|endoftext|>",
    HOSTILE,
]


@in_browser
def test_the_pages_tokenizers_are_the_models(names_page, bytes_page, tokenizer, tmp_path):
    pages = [(names_page, tokenizer), (bytes_page, byte_tokenizer())]
    script = """return given.texts.map((text) => [encode(model, text), decode(model, encode(model, text))])
        .concat([[given.broken, decode(model, given.broken)]]);"""
    for page, tok in pages:
        broken = [*"é".encode()[:1], 65, *"\ufeff".encode()]
        names = list(unicode_names())[::97]
        found = answer(tmp_path, page, script, texts=TEXTS + names, broken=broken)
        assert found == [[ids, tok.decode(ids)] for ids in (*map(tok.encode, TEXTS + names), broken)]


@in_browser
def test_the_judge_knows_every_name_and_no_other(names_page, tmp_path):
    every = [name for code in range(0x110000) if (name := unicodedata.name(chr(code), ""))]
    real = every[::41] + [name for name in every if re.search(r"HANGUL|TANGUT|KHITAN|NUSHU|COMPATIBILITY", name)][::29]
    wrong = [name[:-1] for name in real] + [name + " SIGN" for name in real] + [name.lower() for name in real[::9]]
    wrong += ["", "NULL", "LINE FEED", "CJK UNIFIED IDEOGRAPH-4e00", "CJK UNIFIED IDEOGRAPH-04E00", "SPACE-0020"]
    wrong += ["CJK UNIFIED IDEOGRAPH-2B81E", "CJK UNIFIED IDEOGRAPH-33FF", "LATIN SMALL LETTER A-0061", "漢"]
    wrong += ["constructor", "__proto__"]
    found = answer(tmp_path, names_page, "return given.names.map(verdict);", names=real + wrong)
    assert found == [verdict(name) for name in real + wrong]
    assert len(real) > 3000 and sum(exists(name) is None for name in wrong) > 5000


# ---------------------------------------------------------------------------------------------------------------------
# the page of a model


def test_the_page_is_one_file_that_asks_nothing_of_a_network(names_page):
    assert len(names_page.encode()) < 8e6
    asked = r"https?:|\bsrc=|\bhref=|@import|url\(|\bimport\(|fetch\(|XMLHttp|WebSocket|innerHTML"
    assert re.findall(asked, names_page) == []
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', names_page)[1]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@in_browser
def test_it_opens_on_what_goes_wrong_and_what_does_not(names_page, shipped, tokenizer, tmp_path):
    """Factorised no such character, by the other two one that exists; names and forwards are those of PyTorch."""
    opening = json.loads(re.search(r'id="data">(.*?)</script>', names_page)[1])["prompt"]
    prompt = tokenizer.encode(opening)
    seen = answer(tmp_path, names_page, 'go(99); return [text("seen"), text("runs"), text("differ")];')
    names = {}
    for way, d in (("factorised", NAMES), ("head", WITH_HEAD), ("one at a time", replace(NAMES, tau_m2t=1.0))):
        d = d if way == "one at a time" else replace(d, tau_m2t=-1.0)
        (out,) = generate(shipped, [prompt], d)
        names[way] = tokenizer.decode(prompt + out.tokens)
        said = verdict(names[way]).strip("()") if way == "factorised" else verdict(names[way])
        assert f"{said}, {round(in_full(out.nfe, shipped.partial_cost), 2):g} forward" in seen[1]
    assert [exists(name) is not None for name in names.values()] == [False, True, True]
    assert f"“{names['factorised']}” names no character" in seen[0]
    assert f"“{names['head']}” is {exists(names['head'])}" in seen[0]
    assert "They first differ after step " in seen[2]


@in_browser
def test_a_mask_shows_both_stages_and_moves_when_another_is_written(names_page, shipped, tokenizer, tmp_path):
    """By PyTorch: the five likeliest tokens of Stage A and of the head, before and after a token is put in."""
    prompt = tokenizer.encode("BOX DRAWINGS")
    heavy = tokenizer.encode("BOX DRAWINGS HEAVY")[2]
    script = """
        const lists = () => [...document.querySelectorAll(".lists > div")].map((list) =>
            [...list.querySelectorAll(".option")].map((b) => [b.querySelector(".name").textContent,
                b.querySelector(".share").textContent]));
        const tap = (at) => document.querySelectorAll(".block")[1].querySelectorAll(".cell")[at].click();
        $("prompt").value = "BOX DRAWINGS";
        ask(0);
        tap(2);
        const first = lists();
        tap(3);
        const second = lists();
        tap(2);
        [...document.querySelectorAll(".lists > div")[0].querySelectorAll(".option")]
            .find((b) => b.querySelector(".name").textContent === "·HEAVY").click();
        const byHand = cells().filter((cell) => cell.is.includes("byHand")).map((cell) => cell.at);
        return {first, second, moved: chosen.at, third: lists(), at: now, byHand, panel: text("panel"),
            counts: traces[1].counts.slice(0, 2)};
    """
    found = answer(tmp_path, names_page, script)

    def probabilities(z: list[int]) -> list[torch.Tensor]:
        """Of Stage A and of the head, at all masks of z, each in the last look that asked for it: (8, V), (n, V)."""
        rows = []
        hook = shipped.lm_head.register_forward_hook(lambda module, given, out: rows.append(out))
        looks = []
        d = replace(WITH_HEAD, gen_length=8 - len(z), tau_m2t=-1.0)
        generate(shipped, [z], d, on_step=lambda rows, step: looks.append(int(step.look.looks[0])))
        hook.remove()

        # a look asks for what is not final, the last masks
        stage_a = rows[0][0].clone()
        stage_a[:, shipped.cfg.mask_id] = float("-inf")
        both = stage_a[len(z) :].log_softmax(-1)
        head = torch.zeros_like(both)
        for added in rows[1 : 1 + looks[0]]:
            head[-len(added) :] = (both[-len(added) :] + added).softmax(-1)
        return [rows[0][0].softmax(-1), head]

    def five(p: torch.Tensor) -> list[list[str]]:
        top = p.topk(5)
        names = ["∎" if i == tokenizer.eos_id else tokenizer.piece(i) for i in top.indices.tolist()]
        return [[name, f"{share:.2f}"] for name, share in zip(names, top.values.tolist(), strict=True)]

    a, b = probabilities(prompt)
    assert len(b) == 6  # every mask is in the bundle
    assert found["first"] == [five(a[2]), five(b[0])] and found["second"] == [five(a[3]), five(b[1])]

    # the panel moves to the mask at which Stage A's answer moved the most
    after_a, after_b = probabilities([*prompt, heavy])
    moved = 3 + int((after_a[3:] - a[3:]).abs().sum(-1).argmax())
    assert found["moved"] == moved and f"position {moved}" in found["panel"]
    now = [[[name, share.split(" → ")[-1]] for name, share in shown] for shown in found["third"]]
    assert now == [five(after_a[moved]), five(after_b[moved - 3])]
    was = [share.split(" → ")[0] for _, share in found["third"][0]]
    assert was == [f"{float(a[moved][i]):.2f}" for i in after_a[moved].topk(5).indices]
    assert found["at"] == 1 and found["byHand"] == [2] and found["counts"] == [[0, 0, 0], [0, 0, 0]]


@in_browser
def test_the_gates_are_obeyed_and_any_text_is_text(names_page, shipped, tokenizer, tmp_path):
    script = """
        const set = (id, value) => {
            $(id).value = value;
            for (const event of ["input", "change"]) $(id).dispatchEvent(new Event(event));
        };
        $("prompt").value = "BOX DRAWINGS";
        set("tau_m2t", 0.3);
        set("tau_keep", 0);
        const runs = traces.slice(0, 2).map((t) => [t.tokens, t.nfe.full, t.nfe.partial]);
        $("prompt").value = "   ";
        ask();
        const wrong = text("wrong");
        $("prompt").value = given.hostile;
        ask();
        const shown = cells().map((cell) => cell.parts[1]).join("");
        return {runs, wrong, seen: text("seen"), shown, bold: document.querySelectorAll("main b").length};
    """
    found = answer(tmp_path, names_page, script, hostile=HOSTILE)
    prompt = [tokenizer.encode("BOX DRAWINGS")]
    for n_rounds, run in enumerate(found["runs"]):
        (out,) = generate(shipped, prompt, replace(NAMES, tau_m2t=0.3, n_rounds=n_rounds))
        assert run == [out.tokens, out.nfe["full"], out.nfe["partial"]]
    assert "at least one letter" in found["wrong"]
    assert HOSTILE in found["seen"] and HOSTILE in found["shown"] and found["bold"] == 0


@in_browser
def test_run_100_counts_what_exists_and_what_it_costs(names_page, shipped, tokenizer, prompts, tmp_path):
    few = prompts[:4]
    script = """
        data.beginnings.splice(0, Infinity, ...given.few);
        await runAll();
        return [text("progress"), text("shares")];
    """
    progress, table = answer(tmp_path, names_page, script, few=few)
    assert progress == "4 of 4 names"
    ways = {"factorised": (-1.0, 0), "head": (-1.0, 1), "one at a time": (1.0, 0)}
    for label, (tau, n_rounds) in ways.items():
        outputs = generate(shipped, few, replace(WITH_HEAD, tau_m2t=tau, n_rounds=n_rounds))
        names = [tokenizer.decode(p + o.tokens) for p, o in zip(few, outputs, strict=True)]
        found = sum(exists(name) is not None for name in names)
        forwards = sum(in_full(o.nfe, shipped.partial_cost) for o in outputs) / 4
        assert f"{label}{100 * found / 4:.0f} %{forwards:.2f}" in table, label


@in_browser
def test_a_page_of_text_has_no_judge(tmp_path):
    save_model(odd_model(), tmp_path)
    script = 'return [$("experiment").hidden, $("surprise").hidden, text("runs"), cells()[4].parts[1]];'
    *hidden, runs, cell = answer(tmp_path, playground.page(str(tmp_path), "def <b>"), script)
    assert hidden == [True, True] and "factorised" in runs and "Stage B" in runs and cell == "<"


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    save_model(odd_model(tokenizer="toy"), tmp_path / "toy")
    save_model(odd_model(), tmp_path / "bytes")
    model = load_model(tmp_path / "bytes", "cpu", torch.float32)
    model.add_lora(2, 4, generator("lora"), stage_b_alone=True)
    about = dict(lora_r=2, lora_alpha=4, lora_in_stage_b_alone=True)
    save_adapter(model, tmp_path / "stage_b", tmp_path / "bytes", about)
    call = lambda folder: refused(playground, monkeypatch, capsys, "--ckpt", folder, "--out", tmp_path / "p.html")  # noqa: E731
    assert "no checkpoint config" in call("nowhere")
    assert "has no tokenizer" in call(tmp_path / "toy")
    assert "of another kind" in call(tmp_path / "stage_b")
    monkeypatch.setattr(playground, "MOST_PARAMETERS", 1000)
    assert "parameters: a page takes at most 1,000" in call(tmp_path / "bytes")
    assert not list(tmp_path.glob("*.html"))


def test_one_command_writes_one_page(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "p.html"
    argv = ["--ckpt", BASE, "--prompt", "GREEK", "--out", out]
    code, said, _ = command_line(playground, monkeypatch, capsys, *argv)
    assert code == 0 and re.fullmatch(rf"wrote {out} \(\d\.\d MB\)\n", said)
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text(encoding="utf-8"))[1])
    assert data["prompt"] == "GREEK" and [d["name"] for d in data["decoders"]] == ["factorised", "one at a time"]
    assert {t["dtype"] for t in data["tensors"].values()} == {"bfloat16"}  # as in the file


# ---------------------------------------------------------------------------------------------------------------------
# records of sample.py --json

WORDS = {0: "In", 1: "·the", 2: "·city", 3: "·of", 4: "·San", 5: "·York", 6: "·New", 7: HOSTILE, MASK: "▒"}
M = MASK


def one_step(start: int, before: list[int], fill: dict, partial: float = 0, edit: dict | None = None) -> dict:
    """What sample.py records of a step: fill {position: (token, Stage A's)}, edit {position: token}."""
    new = {at: token for at, (token, _) in fill.items()} | (edit or {})
    return dict(
        start=start, before=before, after=[new.get(start + i, t) for i, t in enumerate(before)], partial=partial,
        fill=[dict(at=at, token=b, conf=0.75, token_a=a, conf_a=0.5) for at, (b, a) in fill.items()],
        edit=[dict(at=at, old=before[at - start], token=t, conf=0.75) for at, t in (edit or {}).items()],
        refused=[], conf=[0.75] * len(before),
    )  # fmt: skip


def planted(joint: bool) -> dict:
    """A run by hand: three prompt tokens, blocks of four. At step 2 the bundle {4, 5} is written, where Stage A says
    "San", "York": Stage B writes "New", "York", the base writes Stage A's words and edits the first one at step 4."""
    first = (6, 4) if joint else (4, 4)  # (written, Stage A's)
    steps = [
        one_step(0, [0, 1, 2, M], {3: (3, 3)}, joint),
        one_step(4, [M, M, M, M], {4: first, 5: (5, 5)}, joint),
        one_step(4, [first[0], 5, M, M], {6: (7, 7)}, joint),
        one_step(4, [first[0], 5, 7, M], {7: (M, M)}, joint, {} if joint else {4: 6}),
    ]
    nfe = {"full": 4, "partial": 4 if joint else 0, "commit": 1, "all": 6.0 if joint else 5.0}  # n/L = 1/4
    pieces = {str(i): w for i, w in WORDS.items()}
    return dict(text="", verdict=None, tokens=[3, 6, 5, 7, M], nfe=nfe, nfe_per_token=0.8, partial_cost=0.25,
                steps=steps, prompt=[0, 1, 2], mask_id=M, n_rounds=int(joint), pieces=pieces)  # fmt: skip


def refusing() -> dict:
    """`planted` by a head: it looks at two masks of four, writes one and refuses "York" at the other."""
    steps = planted(True)["steps"][:2]
    steps[1] = one_step(4, [M, M, M, M], {4: (6, 4)}, 0.5) | {"refused": [dict(at=5, token=5, conf=0.25)]}
    look = lambda a, b, final: [dict(at=4, token=a, final=final), dict(at=5, token=b, final=False)]  # noqa: E731
    steps[1]["looks"] = [look(4, 7, False), look(6, 5, True)]
    return dict(planted(True), steps=steps)


SHOW = "showRecords(given.runs.map((run, i) => [`run ${i}.json`, JSON.stringify(run)]));"


@in_browser
def test_where_runs_first_hold_different_tokens(bytes_page, tmp_path):
    ours, base = planted(True), planted(False)
    other = [one_step(4, [6, 5, 7, M], {7: (0, 0)}, 0, {4: 1, 5: 1}), one_step(4, [4, 5, 7, M], {7: (2, 2)}, 0, {4: 6})]
    cases = [
        ([ours, base], "They first differ after step 2, and agree in the end."),  # an edit brings it back
        ([ours, ours], "The runs never write different tokens."),
        # a run that ends first waits, and a mask is no token: runs go at different paces
        ([dict(ours, steps=ours["steps"][:2]), ours], "The runs never write different tokens."),
        (
            [dict(run, steps=[*run["steps"][:3], step]) for run, step in zip((ours, base), other, strict=True)],
            "They first differ after step 2, in the end at 4–5, 7.",
        ),
    ]
    script = f"return given.cases.map((runs) => {{ {SHOW.replace('given.runs', 'runs')} return text('differ'); }});"
    assert answer(tmp_path, bytes_page, script, cases=[runs for runs, _ in cases]) == [said for _, said in cases]


@in_browser
def test_a_record_is_shown_step_by_step(bytes_page, tmp_path):
    """What the stages disagree on, edits, masks that are written as masks, any text as text, counts, the verdict."""
    runs = [dict(planted(True), verdict="û (U+00FB)"), dict(planted(False), verdict="(no such character)")]
    script = f"""
        {SHOW}
        go(2);
        const second = [cells(), text("runs"), text("now")];
        document.querySelector('button[data-at="4"]').click();
        const panel = text("panel");
        go(4);
        return {{second, panel, end: [cells(), text("runs")], bold: document.querySelectorAll("main b").length}};
    """
    found = answer(tmp_path, bytes_page, script, runs=runs)
    shown, heads, now = found["second"]
    at = lambda cells, position: [cell for cell in cells if cell["at"] == position]  # noqa: E731
    ours, base = at(shown, 4)
    assert ours["parts"][:3] == ["F", "·New", "A ·San"] and base["parts"][:3] == ["F", "·San", ""]
    assert ours["is"] == base["is"] == "cell fill bundle differ"
    assert "step 2: wrote ·New 0.75, Stage A alone ·San 0.50" in ours["title"]
    kinds = {0: "cell prompt", 3: "cell settled", 5: "cell fill bundle", 6: "cell mask"}
    assert {k: [c["is"] for c in at(shown, k)] for k in kinds} == {k: [kind] * 2 for k, kind in kinds.items()}
    assert "2 full, 2 partial, 1 commit" in heads and "2 full, 0 partial, 1 commit" in heads
    assert "3.5 forwards so far" in heads and "2 filled, 0 edited, 2 left" in heads and now == "step 2 of 4"
    assert found["panel"].startswith("run 0, position 4: ·New (filled now; candidate 0.75)step 2: wrote ·New 0.75")

    # the end: an edit, text that is no markup, a mask that was written as a mask, verdicts
    shown, heads = found["end"]
    edited, hostile, masked = (at(shown, k)[1] for k in (4, 6, 7))
    assert edited["parts"][:2] == ["E", "·New"] and edited["is"] == "cell edit"
    assert "step 2: wrote ·San 0.75; step 4: ·San became ·New 0.75" in edited["title"]
    assert hostile["parts"][1] == HOSTILE and found["bold"] == 0 and masked["is"] == "cell mask bundle"
    assert "✓ û (U+00FB), 6 forwards" in heads and "✗ no such character, 5 forwards" in heads


@in_browser
def test_what_a_head_refused_is_marked(bytes_page, tmp_path):
    script = f"""
        {SHOW}
        go(2);
        return [4, 5].map((at) => cells().find((cell) => cell.at === at)).concat([traces[0].counts]);
    """
    written, cell, counts = answer(tmp_path, bytes_page, script, runs=[refusing()])
    assert cell["is"] == "cell refused mask" and cell["parts"][0] == "?"
    assert "looked at, left masked" in cell["title"] and "unsure of ·York 0.25" in cell["title"]
    assert f"step 2: draft {HOSTILE}, look 1 ·York; step 2: left" in cell["title"]
    assert "step 2: draft ·San, look 1 ·New (final); step 2: wrote ·New" in written["title"]
    assert counts == [[0, 0, 0], [1, 1, 1], [2, 1.5, 1]]


@in_browser
def test_running_counts_end_in_the_decoders(bytes_page, shipped, prompts, tmp_path):
    """Of Stage B with 0, 1 and 2 rounds, with edits, and of a head."""
    starts = [random_ids(1, n, 100)[0].tolist() for n in (3, 13, 16)]
    d = Decoding(gen_length=29, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3, holes=True)
    jobs = [(odd_model(), starts, replace(d, n_rounds=n_rounds)) for n_rounds in (0, 1, 2)]
    jobs += [(shipped, prompts[:5], replace(WITH_HEAD, tau_m2t=0.1))]
    records = []
    for model, asked, d in jobs:
        steps = show.Steps(len(asked))
        for number, output in enumerate(generate(model, asked, d, on_step=steps.add)):
            records.append(show.make_record([], output, steps.of_row[number], model.cfg, d.n_rounds, None, False))
    found = answer(tmp_path, bytes_page, "return given.runs.map((run) => countsOf(run).at(-1));", runs=records)
    expected = [[record["nfe"][kind] for kind in ("full", "partial", "commit")] for record in records]
    assert found == [pytest.approx(counts) for counts in expected]
    assert sum(commit for *_, commit in expected) > 0 and any(s["refused"] for r in records for s in r["steps"])


@in_browser
def test_files_are_chosen_and_steps_are_taken(bytes_page, tmp_path):
    """Files that are none of sample.py's are refused in a line, and what was shown stays."""
    script = """
        const choose = async (...texts) => {
            const chosen = new DataTransfer();
            texts.forEach((text, i) => chosen.items.add(new File([text], `run_${i}.json`)));
            $("unread").textContent = "reading";
            $("files").files = chosen.files;
            $("files").dispatchEvent(new Event("change"));
            while (text("unread") === "reading") await new Promise((resume) => setTimeout(resume, 10));
            return [text("unread"), traces.map((t) => t.label).join()];
        };
        const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", {key}));
        const [one, other] = given.runs.map((run) => JSON.stringify(run));
        const steps = [];
        const refused = [await choose("def f(x):"), await choose("{}"), await choose(one, other)];
        const shown = await choose(one, one);
        for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft"]) {
            press(key);
            steps.push(now);
        }
        $("slider").value = 3;
        $("slider").dispatchEvent(new Event("input"));
        return {refused, shown, steps: [...steps, now]};
    """
    runs = [planted(True), dict(planted(True), prompt=[0, 1, 3])]
    found = answer(tmp_path, bytes_page, script, runs=runs)
    for (said, labels), why in zip(found["refused"], ("", "holds no steps", "of one prompt"), strict=True):
        assert "not what sample.py --json writes" in said and why in said
        assert labels == "factorised,Stage B,one at a time"
    assert found["shown"] == ["", "run_0,run_1"]
    assert found["steps"] == [1, 2, 1, 4, 4, 0, 0, 3]
