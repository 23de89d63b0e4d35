"""The page's engine against PyTorch, and what the page shows of a decode.
`pytest tests/tools/test_playground.py`; most of it needs a browser: apt install chromium.
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
from common import ROOT, Steps, command_line, merged_spec, random_adapter, random_ids, refused, tiny_model

import checkpoint
from cache import Cached
from causal import CausalModel, causal_denoise
from checkpoint import load_model, save_model
from decoding import Decoding, Output, Step, in_full
from lib.names import draw_names, exists, verdict
from lib.rows import Meta, write_meta
from lib.tokenizer import bpe_tokenizer, byte_spec, load_tokenizer
from lib.util import Mistake, write_json
from model import ROUTERS, Model, grouped_sigmoid
from prepare import unicode_names
from sample import generate, step_of
from tools import playground
from tools.watch import piece

BASE = ROOT / "assets" / "names"
BPE = ROOT / "tests" / "data" / "bpe"
SHIPPED = [ROOT / folder for folder in playground.SHIPPED]
TOKENIZER = load_tokenizer(BASE)
HOSTILE = '</script><!--<b>&"'

# each decoder of the page, with its gates as it opens: the paper's
FACTORISED = Decoding(gen_length=32, tau_t2t=0.5, n_rounds=0, holes=True)
STAGE_B_OFF = replace(FACTORISED, tau_t2t=0.0)
STAGE_B = replace(FACTORISED, tau_t2t=0.0, n_rounds=1)
CAUSAL = replace(STAGE_B, tau_t2t=None, tau_joint=0.5)
LONGEST_RUN = replace(CAUSAL, n_rounds=0)
ONE_AT_A_TIME = replace(LONGEST_RUN, tau_joint=1.0)
# the shipped page's, in order: its name, the number of its model, its settings
SHOWN = {
    "base, one at a time": (0, ONE_AT_A_TIME),
    "base, longest run": (0, LONGEST_RUN),
    "base, edits gated": (0, FACTORISED),
    "paper, Stage B off": (1, STAGE_B_OFF),
    "paper, Stage B on": (1, STAGE_B),
    "causal Stage B": (2, CAUSAL),
}

FOUND = filter(None, map(shutil.which, ("google-chrome", "chromium", "chrome")))
BROWSER = next((path for path in FOUND if not path.startswith("/snap/")), None)  # a snap cannot read these folders
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --virtual-time-budget=10000000 --dump-dom"
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[Path]:
    """Adapters of a random model of names: the paper's, with two rounds, and a causal one."""
    folder = tmp_path_factory.mktemp("small")
    base = folder / "base"
    save_model(tiny_model(vocab_size=1024, eos_id=1022, mask_id=1023, max_len=128), base)
    for name in ("tokenizer.json", "meta.json"):
        shutil.copy(BASE / name, base)
    random_adapter(folder / "paper", base)
    random_adapter(folder / "causal", base, "causal", n_last=3, n_rounds=1)
    return [folder / "paper", folder / "causal"]


def read(folder: Path) -> Model:
    """The model with the numbers that a page has."""
    return playground.half(load_model(folder, "cpu", torch.float32))


@pytest.fixture(scope="module")
def small_page(small) -> str:
    return playground.page(small)


def answer(folder: Path, page: str, script: str, **given) -> object:
    """What `script` returns, run in the page with `given` in its sight."""
    variables = json.dumps(given).replace("<", "\\u003c")
    wrapped = f"""
        const given = {variables};
        const text = (id) => $(id).textContent;
        const cells = () => [...document.querySelectorAll("button.cell")].map((cell) => ({{
            at: Number(cell.dataset.at), is: cell.className, title: cell.title,
            parts: [...cell.children].map((part) => (part.hidden ? "" : part.textContent))}}));
        (async () => {{ await ready; play(false); {script} }})().catch(String).then((answer) => {{
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


@pytest.fixture(scope="module")
def told(small_page, tmp_path_factory) -> dict:
    """What these scripts return in the page, by name: one after the other, each from the sliders as they were."""
    scripts = dict(looks=LOOKS, coded=CODED, by_hand=BY_HAND, steps=STEPS)
    from_start = "for (const gate of GATES) $(gate).value = data.gates[gate];"
    each = [f"{name}: await (async () => {{ {from_start} {script} }})()," for name, script in scripts.items()]
    return answer(tmp_path_factory.mktemp("told"), small_page, f"return {{ {' '.join(each)} }};", **GIVEN)


# --- the engine
# decodes of each model by every setting, in steps; of the first setting all logits, n_logits rows, as they are computed
DECODE = """
    const plain = logits;
    const decodes = () => given.cases.map(({number, prompts, settings, numbers, n_logits}) => {
        const {model} = decoders.find((decoder) => decoder.number === number);
        const seen = [];
        logits = (model, h) => {
            const found = plain(model, h);
            if (seen.length < n_logits) seen.push(...found);
            return found;
        };
        const decodes = settings.map((d, i) => prompts.map((asked, j) => {
            const draws = (n) => numbers[i][j][n];
            const {prompt, tokens, nfe, steps} = generateOne(model, asked, {...d, draws});
            const {full, partial, refresh} = nfe;
            const drafts = (s) => s.bundle.map((t) => s.token_a[t]);
            return [prompt, tokens, full, partial, refresh,
                steps.map((s) => [s.before, s.after, s.bundle, s.edited, drafts(s), s.partial])];
        }));
        let letters = "";
        for (const row of seen)
            for (const byte of new Uint8Array(row.buffer)) letters += String.fromCharCode(byte);
        return {decodes, logits: btoa(letters)};
    });
"""


def decoded(model: Model, prompt: list[int], d: Decoding) -> tuple[list, list]:
    """The same by PyTorch, and the numbers by which each step drew."""
    steps = []
    numbers = []
    step_of_model = step_of(model, d)

    def watched(engine, z, given, u, d) -> Step:
        numbers.append(u[0].tolist())
        return step_of_model(engine, z, given, u, d)

    def add(rows: list, step: Step) -> None:
        places = [tensor[0].nonzero()[:, 0].tolist() for tensor in (step.bundle, step.edited)]
        drafts = step.token_a[step.bundle].tolist()
        steps.append([step.z[0].tolist(), step.after[0].tolist(), *places, drafts, float(step.partial)])

    [output] = generate(model, [prompt], d, step=watched, on_step=add)
    return [output.prompt, output.tokens, *output.nfe.values(), steps], numbers


def with_holes(prompt: list[int]) -> list[int]:
    """Every third token is to be filled."""
    return [1023 if i % 3 == 1 else token for i, token in enumerate(prompt)]


@in_browser
def test_it_decodes_as_generate_does(small, small_page, tmp_path):
    """Step by step, and of the first setting all logits: experts in groups, LoRA, two rounds, a copy of the last
    layers, looks, edits, holes, blocks before the current one; and tokens drawn by the same numbers."""
    # with these no two experts, or tokens that are written, are so close that rounding decides
    prompts = [random_ids(1, n, 600 + n, 1000)[0].tolist() for n in (3, 8, 21)]
    prompts = [prompts[0], with_holes(prompts[1]), with_holes(prompts[2])]
    cases = []
    for folder in small:
        model = read(folder)
        d = Decoding(gen_length=12, tau_m2t=0.4, n_rounds=model.cfg.n_rounds, holes=True)
        edits = replace(d, tau_t2t=0.0, max_post_steps=2)
        all_at_once = replace(d, tau_m2t=-1.0, tau_t2t=None)
        settings = [replace(edits, tau_t2t=0.3), replace(edits, n_rounds=0), all_at_once]
        settings.append(replace(ONE_AT_A_TIME, gen_length=12))
        # drawn: the longest run of a base, the gates of Stage A alone, and with Stage B; so, too, with edits
        drawn = replace(d, temperature=1.5, tau_t2t=None)
        settings += [replace(drawn, n_rounds=0, tau_joint=0.1), replace(drawn, n_rounds=0), drawn]
        settings.append(replace(edits, temperature=0.7))
        if isinstance(model, CausalModel):
            settings = [replace(all_at_once, tau_joint=tau) for tau in (0.0, 0.1, 1.0)]
            settings += [replace(all_at_once, tau_joint=tau, temperature=1.5) for tau in (0.0, 0.1)]
        cases.append((model, prompts, settings))

    found = compare(cases, small_page, tmp_path)
    of_paper, of_causal = [
        [step for decodes in of_model for decode in decodes for step in decode[-1]] for of_model in found
    ]
    # what is drawn is not the likeliest
    assert found[1][0] != found[1][3] and found[1][1] != found[1][4]
    assert sum(len(edited) for *_, edited, _, _ in of_paper) > 20
    assert sum(partial > 2 for *_, partial in of_causal) > 5  # more than two looks


def logits_of(model: Model, prompts: list[list[int]], d: Decoding) -> np.ndarray:
    """Of a decode all logits, as they are computed."""
    rows = []

    def keep(module, given, out) -> None:
        # a look of causal Stage B asks for Stage A's again, and the page does not
        again = isinstance(model, CausalModel) and any(torch.equal(out[0], seen) for seen in rows)
        if not again:
            rows.append(out[0])

    hook = model.lm_head.register_forward_hook(keep)
    for prompt in prompts:
        generate(model, [prompt], d)
    hook.remove()
    return torch.cat(rows).numpy()


def compare(cases: list[tuple[Model, list, list[Decoding]]], page: str, folder: Path) -> list:
    """Decode by PyTorch and in the page, adapter after adapter -> the decodes, by adapter, setting and prompt."""
    logits = [logits_of(model, prompts, settings[0]) for model, prompts, settings in cases]
    expected = [[[decoded(model, prompt, d) for prompt in prompts] for d in of] for model, prompts, of in cases]
    given = []
    for number, (_, prompts, settings) in enumerate(cases, 1):
        case = dict(number=number, prompts=prompts, settings=list(map(asdict, settings)))
        case["numbers"] = [[numbers for _, numbers in decodes] for decodes in expected[number - 1]]
        given.append(case | dict(n_logits=len(logits[number - 1])))

    found = answer(folder, page, f"{DECODE} return decodes();", cases=given)
    for (_, _, settings), here, of_torch, by_torch in zip(cases, found, logits, expected, strict=True):
        of_page = np.frombuffer(base64.b64decode(here["logits"]), np.float32).reshape(of_torch.shape)
        assert np.abs(of_page - of_torch).max() < 1e-3
        for d, decodes, pairs in zip(settings, here["decodes"], by_torch, strict=True):
            assert decodes == [decode for decode, _ in pairs], d
    return [here["decodes"] for here in found]


@torch.inference_mode()
def looks_of(model: Model, prompt: list[int]) -> list[list[int]]:
    """What each look at the first block reads, and what it is in the end, by PyTorch."""
    engine = Cached(model, [[]], 1)
    read_by_stage_b = []
    stage_b = engine.stage_b

    def watched(h, bundle, tokens):
        read_by_stage_b.append(tokens[0].tolist())
        return stage_b(h, bundle, tokens)

    engine.stage_b = watched
    z = torch.tensor([prompt + [1023] * (8 - len(prompt))])
    done = causal_denoise(engine, z, z != 1023, torch.zeros(1, 2, 8), replace(CAUSAL, tau_joint=0.0))
    return [*read_by_stage_b, done.after[0].tolist()]


LOOKS = """
    $("tau_joint").value = 0;
    const {prompt} = promptOf("BOX DRAWINGS");
    present([recordOf(prompt, decoders.findIndex((decoder) => decoder.number === 2))], 1);
    return [cells(), traces[0].steps[0].partial];
"""


@in_browser
def test_a_looks_tokens_are_shown_up_to_the_final_one(small, told):
    """Stage A's draft, then what each look makes of the tokens that it reads. A token is final once it has read what is
    written before it in the end."""
    prompt = TOKENIZER.encode("BOX DRAWINGS")
    cells, partial = told["looks"]
    drafts = looks_of(read(small[1]), prompt)
    final = drafts[-1]
    assert partial == len(drafts) - 1 > 2
    for i in range(len(prompt), 8):
        # the look that has read nothing but final tokens is the last that is shown
        last = next(k for k in range(1, len(drafts)) if drafts[k - 1][:i] == final[:i])
        written = "A " + sign(drafts[0][i])
        written += "".join(f"{k} {sign(drafts[k][i])}" for k in range(1, last + 1)) + " ✓"
        assert cells[i]["parts"][1:3] == [sign(final[i]), written]


def sign(token: int) -> str:
    return {1022: "∎", 1023: "▒"}.get(token) or piece(TOKENIZER, token)


def some_names() -> list[str]:
    """Names, and what is none."""
    names = [name for code in range(0x110000) if (name := unicodedata.name(chr(code), ""))][::41]
    names += [name[:-1] for name in names] + [name.lower() for name in names[::9]]
    return [*names, "", "NULL", "SPACE-0020", "漢", "constructor", "__proto__"]


GIVEN = dict(
    texts=[
        " A  B\t\n C", "é ü 漢字 😀", "\u00a0x\u2003y\u0085z\ufeff", "<|mask|> and <|endoftext|>", HOSTILE,
        "constructor", "toString", "__proto__", "valueOf", "<|mask|>constructor<|mask|>", *list(unicode_names())[::97],
    ],
    broken=[*"é".encode()[:1], 65, *"\ufeff".encode()],
    names=some_names(),
)  # fmt: skip
CODED = """
    return [given.names.map(verdict), decode(base, given.broken),
        given.texts.map((text) => [encode(base, text), decode(base, encode(base, text))])];
"""


@in_browser
def test_the_pages_tokenizer_and_judge_are_the_models(told):
    """Any text, and bytes that are none; every name, and no other."""
    verdicts, of_broken, coded = told["coded"]
    assert coded == [[ids, TOKENIZER.decode(ids)] for ids in map(TOKENIZER.encode, GIVEN["texts"])]
    assert of_broken == TOKENIZER.decode(GIVEN["broken"])
    assert verdicts == [verdict(name) for name in GIVEN["names"]]


def page_of(folder: Path, spec: dict) -> str:
    """That of a random model with this tokenizer."""
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    eos_id, mask_id = ids["<|endoftext|>"], ids["<|mask|>"]
    save_model(tiny_model(vocab_size=352, eos_id=eos_id, mask_id=mask_id), folder)
    write_json(folder / "tokenizer.json", spec)
    write_meta(folder, Meta(352, eos_id, mask_id, n_plain=eos_id))
    return playground.page([folder])


# a text page's decoders, in order: the number of the model, its settings
ALL_AT_ONCE = Decoding(gen_length=16, tau_t2t=None, tau_joint=0.0, n_rounds=0, temperature=1.0)
DRAWN = {
    "base, all at once": (0, ALL_AT_ONCE),
    "base, one at a time": (0, replace(ALL_AT_ONCE, tau_joint=1.0)),
    "paper, Stage B": (1, replace(ALL_AT_ONCE, tau_joint=None, n_rounds=2)),
    "causal Stage B": (2, replace(ALL_AT_ONCE, n_rounds=1)),
}


def test_a_page_of_text_begins_with_held_out_text():
    """Its first beginning is that of results/text, whose draws are in README. Without rows there is none."""
    base = ROOT / "assets" / "shakespeare"
    found = playground.held_out_texts(base)
    drawn = (ROOT / "results" / "text" / "draws.jsonl").read_text().splitlines()
    first = next(json.loads(line)["first"][0] for line in drawn if "first" in json.loads(line))
    assert first.startswith(load_tokenizer(base).decode(found[0]))
    assert [len(ids) for ids in found] == 100 * [56]
    assert playground.held_out_texts(base / "paper") == []


@in_browser
def test_a_page_of_text_draws_and_reads_an_own_bpe(tmp_path, monkeypatch):
    """It opens at temperature 1 with seed 1 and the first held-out beginning, which may have several lines. Each
    decoder writes what Python writes by the same numbers. Its ids are those of tests/data/bpe: special tokens come
    first, and names of what every object has are text."""
    lines = [json.loads(line) for line in (BPE / "stock.jsonl").read_text().splitlines()]
    texts = [text for text, *_ in lines] + ["constructor", "toString"]
    expected = [ids for _, ids, _ in lines] + list(map(bpe_tokenizer(BPE / "stock.json").encode, texts[-2:]))
    page_of(tmp_path / "base", json.loads((BPE / "stock.json").read_text()))
    models = [tmp_path / "base", tmp_path / "paper", tmp_path / "causal"]
    random_adapter(models[1], models[0])
    random_adapter(models[2], models[0], "causal", n_last=3, n_rounds=1)
    script = """
        const lines = () => [...document.querySelectorAll("#seen th")].map((head) => head.textContent);
        const tokens = () => traces.map((t) => t.tokens);
        const opened = [$("prompt").value, text("gate_values"), lines(), $("again").hidden];
        const drawn = [tokens()];
        const numbers = Array.from({length: 100}, (_, n) => draws(n));
        $("again").click();
        drawn.push(tokens());
        seed = 1;
        ask();
        drawn.push(tokens());
        $("temperature").value = 0;
        $("temperature").dispatchEvent(new Event("input"));
        const still = [text("gate_values"), $("again").hidden];
        return {ids: given.texts.map((text) => encode(base, text)), opened, drawn, numbers, still};
    """
    tokenizer = load_tokenizer(models[0])
    begins = "ROMEO:\nA rose"
    monkeypatch.setattr(playground, "held_out_texts", lambda base: [tokenizer.encode(begins)])
    page = playground.page(models[1:]).replace('"gen_length": 64', '"gen_length": 16')  # to be quick
    found = answer(tmp_path, page, script, texts=texts)
    assert found["ids"] == expected
    at = "tau_m2t 0.70, tau_t2t 1.00, tau_joint 0.00"
    prompt, said, lines, hidden = found["opened"]
    assert [prompt, said, hidden] == [begins, f"{at}, temperature 1.00, seed 1", False]
    assert found["still"] == [at, True]

    # another seed is another text, and the same one the same
    first, other, again = found["drawn"]
    assert first == again and all(one != two for one, two in zip(first, other, strict=True))
    for line, tokens, (way, (number, d)) in zip(lines, first, DRAWN.items(), strict=True):
        out = drawn_by(found["numbers"], read(models[number]), tokenizer.encode(prompt), d)
        assert tokens == out.tokens
        n = sum(len(tokenizer.token_bytes.get(token, b"")) for token in tokens)
        assert line == f"{way} {round(in_full(out.nfe, read(models[number]).partial_cost) / n, 2):g} forwards a byte"

    # numbers in [0, 1), and in the mean a half
    numbers = np.array(found["numbers"])
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.03


def drawn_by(numbers: list, model: Model, prompt: list[int], d: Decoding) -> Output:
    """A decode whose steps draw by these numbers, in order."""
    left = iter(torch.tensor(numbers))

    def fed(engine, z, given, u, d) -> Step:
        return step_of(model, d)(engine, z, given, next(left)[None], d)

    return generate(model, [prompt], d, step=fed)[0]


def other_pattern(spec: dict) -> None:
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\d|\D+"


OTHERS = {
    "another pattern": other_pattern,
    "a normaliser": lambda spec: spec.update(normalizer={"type": "NFC"}),
    "a word": lambda spec: spec["added_tokens"].append({"id": 270, "content": "a word"}),
    "a late special token": lambda spec: spec["added_tokens"][0].update(normalized=True),
    "merges by other ids": lambda spec: spec["model"]["vocab"].update(aa=257, ab=256),
    "a token that nothing makes": lambda spec: spec["model"]["vocab"].update(zz=270),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_tokenizer_that_the_page_cannot_follow_is_refused(change, tmp_path):
    spec = merged_spec()
    page_of(tmp_path / "follows", spec)
    OTHERS[change](spec)
    with pytest.raises(Mistake, match="the page cannot compute"):
        page_of(tmp_path / "not", spec)


# --- the page of a model
@in_browser
def test_the_shipped_page_opens_on_the_first_held_out_beginning(tmp_path):
    """Whatever comes of it. Each decoder writes what the Python one writes, and the experiment counts it. What is typed
    is upper case, with _ for a mask, and is in the address; and an address is decoded."""
    [prompt] = draw_names(1, "held out", TOKENIZER).values()
    script = """
        const seen = [...document.querySelectorAll("#seen tr")].map((row) => row.textContent);
        const asked = traces[0].asked;
        data.beginnings.splice(0, Infinity, asked);
        await runAll();
        $("prompt").value = "   ";
        ask();
        const wrong = text("wrong");
        $("prompt").value = given.hostile;
        ask();
        const shown = cells().map((cell) => cell.parts[1]).join("");
        const bold = document.querySelectorAll("main b").length;

        $("prompt").value = "box _ a";
        $("prompt").dispatchEvent(new Event("input"));
        $("ask").requestSubmit();
        play(false);
        const typed = [$("prompt").value, location.hash, traces[0].asked.includes(1023)];
        location.hash = "prompt=greek+_";
        await new Promise((resume) => addEventListener("hashchange", () => setTimeout(resume), {once: true}));
        play(false);
        return {asked, seen, shares: text("shares"), wrong, shown, bold, typed, linked: $("prompt").value};
    """
    page = playground.page(SHIPPED)
    assert len(page.encode()) <= 6e6
    found = answer(tmp_path, page, script, hostile=HOSTILE)
    models = list(map(read, [BASE, *SHIPPED]))
    assert found["asked"] == prompt
    for line, (way, (number, d)) in zip(found["seen"], SHOWN.items(), strict=True):
        [out] = generate(models[number], [prompt], d)
        name = TOKENIZER.decode(prompt + out.tokens)
        forwards = in_full(out.nfe, models[number].partial_cost)
        there = exists(name) is not None
        said = "✓ " + verdict(name) if there else "✗ " + verdict(name).strip("()")
        assert line == f"{way} {round(forwards, 2):g} forwards{name}{said}"
        counted = f"{way}{100 * there} %{forwards:.2f}{forwards / len(out.tokens):.3f}"
        assert (counted in found["shares"]) == (way != "base, edits gated")
    assert "at least one letter" in found["wrong"]
    assert HOSTILE.upper() in found["shown"] and found["bold"] == 0  # any text is text
    assert found["typed"] == ["BOX ▒ A", "#prompt=BOX+_+A", True] and found["linked"] == "GREEK ▒"


BY_HAND = """
    const first = () => [...document.querySelectorAll(".lists > div")].map((list) =>
        list.querySelector(".option").textContent);
    const touch = (number) => {
        ask(0);
        const run = decoders.findIndex((decoder) => decoder.number === number && decoder.n_rounds);
        const at = traces[0].asked.length;
        const {steps, pieces} = traces[run];
        const say = (token, conf) => pieces[token] + conf.toFixed(2);
        const said = steps[0].fill.map((f) => [say(f.token_a, f.conf_a), say(f.token, f.conf)]);
        const shown = steps[0].fill.map((f) => {
            document.querySelectorAll(`button[data-at="${f.at}"]`)[run].click();
            return first();
        });
        document.querySelectorAll(`button[data-at="${at}"]`)[run].click();
        document.querySelectorAll(".option")[2].click();
        const byHand = cells().filter((cell) => cell.is.includes("byHand")).map((cell) => cell.at - at);
        const {prompt, tokens, nfe} = traces[run];
        return {said, shown, byHand, at: [now, chosen.at - at], prompt, tokens, full: nfe.full};
    };
    $("prompt").value = "BOX DRAWINGS";
    $("tau_m2t").value = $("tau_joint").value = 0;
    $("tau_t2t").value = 1;
    return [1, 2].map(touch);
"""


@in_browser
def test_a_mask_shows_both_stages_and_is_written_by_hand(small, told):
    """The likeliest token of each stage is the record's; what is put in is kept, and decoding goes on from there."""
    for model, found in zip(map(read, small), told["by_hand"], strict=True):
        assert len(found["said"]) > 1 and found["shown"] == found["said"]
        assert found["byHand"] == [0] and found["at"] == [1, 1]  # the panel goes on to the next mask

        # without edits it is as if that token had been given; and the step by hand asked the model nothing
        first, *others = found["tokens"]
        tau_joint = 0.0 if isinstance(model, CausalModel) else None
        d = replace(STAGE_B, gen_length=31, n_rounds=model.cfg.n_rounds, tau_m2t=0.0, tau_t2t=None, tau_joint=tau_joint)
        (out,) = generate(model, [[*found["prompt"], first]], d)
        assert first != TOKENIZER.eos_id and [others, found["full"]] == [out.tokens, out.nfe["full"]]


@pytest.mark.parametrize("own", ["router", "Stage B"])
def test_a_model_that_the_engine_does_not_know_is_refused(own, tmp_path, monkeypatch, capsys):
    """Its page would show what another model writes."""
    monkeypatch.setitem(ROUTERS, "own", grouped_sigmoid)
    monkeypatch.setitem(checkpoint.STAGE_B, "own", type("Own", (Model,), {}))
    router = "own" if own == "router" else "grouped sigmoid"
    base = tmp_path / "base"
    save_model(tiny_model(vocab_size=1024, eos_id=1022, mask_id=1023, router=router), base)
    for name in ("tokenizer.json", "meta.json"):
        shutil.copy(BASE / name, base)
    random_adapter(tmp_path / "adapter", base, "own" if own == "Stage B" else "paper")
    assert "a router or a Stage B of your own" in refused(
        playground, monkeypatch, capsys, "--ckpt", tmp_path / "adapter"
    )


def test_one_command_writes_one_page_that_asks_nothing_of_a_network(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "p.html"
    model = tiny_model(vocab_size=272, eos_id=256, mask_id=257)
    model.markers.data.zero_()
    save_model(model, tmp_path / "base")
    write_json(tmp_path / "base" / "tokenizer.json", byte_spec())
    code, said, _ = command_line(playground, monkeypatch, capsys, "--ckpt", tmp_path / "base", "--out", out)
    assert code == 0 and re.fullmatch(rf"wrote {out} \(\d\.\d MB\)\n", said)
    page = out.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert [d["name"] for d in data["decoders"]] == list(SHOWN)[:3]

    # one link, to follow by hand, and nothing that loads
    asked = r"https?:[^\"]*|\bsrc=|@import|url\(|\bimport\(|fetch\(|XMLHttp|WebSocket|innerHTML"
    assert re.findall(asked, page) == ["https://arxiv.org/abs/2607.04469"]
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', page)[1]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


STEPS = """
    $("tau_m2t").value = 0.3;
    const run = decoders.findIndex((decoder) => decoder.name === "paper, Stage B on");
    present([recordOf(promptOf("BOX DRAWINGS").prompt, run)], 0);
    return [text("runs"), traces[0].steps.map((s, k) => (go(k + 1), cells()))];
"""


@in_browser
def test_a_decode_is_shown_step_by_step(small, told):
    """After each of PyTorch's steps the block as it was left, what the stages disagree on, and edits."""
    d = replace(STAGE_B, tau_m2t=0.3, n_rounds=2)
    steps = Steps(1)
    (out,) = generate(read(small[0]), [TOKENIZER.encode("BOX DRAWINGS")], d, on_step=steps.add)
    heads, seen = told["steps"]
    assert f"{out.nfe['full']} full, {out.nfe['partial']:g} partial, {out.nfe['refresh']} refresh" in heads

    (taken,) = steps.of_row
    for s, cells in zip(taken, seen, strict=True):
        cell = {cell["at"]: cell for cell in cells}
        assert [cell[s["start"] + i]["parts"][1] for i in range(8)] == list(map(sign, s["after"]))
        for f in s["fill"]:
            drafted = "" if f["token"] == f["token_a"] else "A " + sign(f["token_a"])
            assert cell[f["at"]]["is"] == "cell fill bundle"
            assert cell[f["at"]]["parts"] == ["F", sign(f["token"]), drafted, ""]
        for e in s["edit"]:
            old = s["before"][e["at"] - s["start"]]
            assert f"{sign(old)} became {sign(e['token'])}" in cell[e["at"]]["title"]
    assert any(s["edit"] for s in taken) and any(f["token"] != f["token_a"] for s in taken for f in s["fill"])
