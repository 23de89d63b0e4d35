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
from lib.data import exists, unicode_names
from lib.output import in_full
from lib.show import verdict
from lib.tokenizer import byte_tokenizer
from lib.util import generator, write_json
from model import Model
from sample import Decoding, generate
from tools import playground

BASE = ROOT / "assets" / "names"
HEAD = BASE / "head"
NAMES = Decoding(gen_length=32, tau_t2t=None, n_rounds=0, holes=True)
WITH_HEAD = replace(NAMES, n_rounds=1, tau_keep=0.5)
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


# --- the engine

# decodes by every setting; of the first one all logits, n_logits rows, in the order in which they are computed
DECODE = """
    const happened = {edited: 0, slow: 0, refused: 0, aside: 0};
    const seen = [];
    const plain = head;
    head = (model, h) => {
        const found = plain(model, h);
        if (seen.length < given.n_logits) seen.push(...found);
        return found;
    };
    const decodes = given.settings.map((d) => given.prompts.map((asked) => {
        const {prompt, tokens, nfe, steps} = generateOne(model, asked, d);
        for (const s of steps) {
            happened.edited += s.edited.length;
            happened.slow += s.nLooks > 2 ? 1 : 0;
            happened.refused += s.nLooks > 0 && s.refused.length > 0 ? 1 : 0;
            happened.aside += d.stage === "head" && s.bundle.length > 0 && s.nLooks === 0 ? 1 : 0;
        }
        return [prompt, tokens, nfe.full, nfe.partial, nfe.commit, nfe.looks];
    }));
    const numbers = new Float32Array(seen.length * model.cfg.vocab_size);
    seen.forEach((row, i) => numbers.set(row, i * row.length));
    let letters = "";
    for (const byte of new Uint8Array(numbers.buffer)) letters += String.fromCharCode(byte);
    return {decodes, happened, logits: btoa(letters)};
"""


def check_decodes(folder: Path, ckpt: Path, prompts: list[list[int]], settings: list[tuple[Decoding, str]]) -> dict:
    """Tokens and counts of every setting (and the stage that writes) are generate's, and of the first one the logits.
    -> what happened, how often."""
    model = load_model(ckpt, "cpu", torch.float32)
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.reshape(-1, out.shape[-1])))
    for prompt in prompts:
        generate(model, [prompt], settings[0][0])
    hook.remove()
    logits = torch.cat(rows).numpy()

    asked = [asdict(d) | {"stage": stage} for d, stage in settings]
    given = dict(prompts=prompts, settings=asked, n_logits=len(logits))
    found = answer(folder, playground.page(str(ckpt), "GREEK"), DECODE, **given)
    numbers = np.frombuffer(base64.b64decode(found["logits"]), np.float32).reshape(logits.shape)
    assert np.abs(numbers - logits).max() < 1e-3

    for (d, stage), decodes in zip(settings, found["decodes"], strict=True):
        for output, here in zip(generate(model, prompts, d), decodes, strict=True):
            counts = [output.nfe[kind] for kind in ("full", "partial", "commit", "looks")]
            assert here == [output.prompt, output.tokens, *counts], (d, stage)
    return found["happened"]


def with_holes(prompt: list[int], mask_id: int) -> list[int]:
    """Every third token is to be filled."""
    return [mask_id if i % 3 == 1 else token for i, token in enumerate(prompt)]


@in_browser
@pytest.mark.parametrize("order, gates", [("surest", (0.1, 0.2, -1.0)), ("leftmost", (0.2, 0.5, -1.0))])
def test_names_decode_as_generate_does(order, gates, shipped, prompts, tmp_path):
    """The shipped head and its base, as if the base were best written in this order, by each decoder and gate."""
    folder = tmp_path / "names"
    shutil.copytree(BASE, folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"order": order})

    asked = prompts[:24] + [with_holes(prompt + prompts[0], shipped.cfg.mask_id) for prompt in prompts[:4]]
    settings = [(replace(WITH_HEAD, tau_m2t=tau), "head") for tau in gates]
    settings += [(replace(NAMES, tau_m2t=tau), "A") for tau in (1.0, *gates)]
    happened = check_decodes(tmp_path, folder / "head", asked, settings)

    # wrong drafts and refusals are among them and, from the left, holes that the head leaves to Stage A
    assert happened["slow"] > 0 and happened["refused"] > 0
    assert (happened["aside"] > 0) == (order == "leftmost")


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
    folder = tmp_path / "base"
    save_model(model, folder)
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

    starts = [random_ids(1, n, n, 250)[0].tolist() for n in (3, 8, 13, 21)]
    starts += [with_holes(start, 257) for start in starts]
    stage = "head" if kind == "head" else "B"
    d = Decoding(gen_length=20, tau_m2t=0.4, n_rounds=model.cfg.n_rounds, holes=True)
    settings = [
        (replace(d, tau_t2t=0.3, max_post_steps=2), stage),
        (replace(d, tau_t2t=0.0, max_post_steps=3, n_rounds=0), "A"),
        (replace(d, tau_m2t=-1.0, tau_t2t=None, tau_keep=0.02), stage),
    ]
    happened = check_decodes(tmp_path, folder, starts, settings)
    assert happened["edited"] > 100 or kind == "bare"


@in_browser
def test_selection_by_hand(bytes_page, tmp_path):
    """tests/test_sample.py's cases. From the left the products are .9, .63, .378 and .3402."""
    cases = [
        ([0.9, 0.7, 0.6, 0.9], 0.37, "leftmost", [0, 1, 2]),
        ([0.9, 0.7, 0.6, 0.9], 0.379, "leftmost", [0, 1]),  # though the fourth is as sure as the first
        ([0.9, 0.7, 0.6, 0.9], 1.0, "leftmost", [0]),
        ([0.9, 0.7, 0.6, 0.9], 0.65, "surest", [0, 1, 3]),
        ([0.6, 0.7, 0.9, 0.9], 1.0, "surest", [2]),  # of equals the leftmost
    ]
    script = """return given.cases.map(([conf, gate, order]) => selectBundle(conf, [0, 1, 2, 3], gate, order))
        .concat([candidates([[1, 3, 3]]).token]);"""
    assert answer(tmp_path, bytes_page, script, cases=cases) == [*(bundle for *_, bundle in cases), [1]]


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


# --- tokenizer and judge

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
    real = every[::41]
    wrong = [name[:-1] for name in real] + [name + " SIGN" for name in real] + [name.lower() for name in real[::9]]
    wrong += ["", "NULL", "CJK UNIFIED IDEOGRAPH-4e00", "CJK UNIFIED IDEOGRAPH-04E00", "CJK UNIFIED IDEOGRAPH-2B81E"]
    wrong += ["CJK UNIFIED IDEOGRAPH-33FF", "SPACE-0020", "LATIN SMALL LETTER A-0061", "漢", "constructor", "__proto__"]
    found = answer(tmp_path, names_page, "return given.names.map(verdict);", names=real + wrong)
    assert found == [verdict(name) for name in real + wrong]
    assert len(real) > 3000 and sum(exists(name) is None for name in wrong) > 5000


# --- the page of a model


@in_browser
def test_it_opens_on_what_goes_wrong_and_what_does_not(names_page, shipped, tokenizer, tmp_path):
    """README's beginning: no such character factorised, one that exists by the other two. The experiment counts it."""
    prompt = tokenizer.encode("CANADIAN")
    script = """
        go(99);
        const runs = text("runs");
        data.beginnings.splice(0, Infinity, given.prompt);
        await runAll();
        $("prompt").value = "   ";
        ask();
        const wrong = text("wrong");
        $("prompt").value = given.hostile;
        ask();
        const shown = cells().map((cell) => cell.parts[1]).join("");
        return [runs, text("shares"), wrong, shown, document.querySelectorAll("main b").length];
    """
    runs, shares, wrong, shown, bold = answer(tmp_path, names_page, script, prompt=prompt, hostile=HOSTILE)
    found = []
    ways = {"factorised": replace(NAMES, tau_m2t=-1.0), "head": replace(WITH_HEAD, tau_m2t=-1.0)}
    ways["one at a time"] = replace(NAMES, tau_m2t=1.0)
    for way, d in ways.items():
        (out,) = generate(shipped, [prompt], d)
        name = tokenizer.decode(prompt + out.tokens)
        forwards = in_full(out.nfe, shipped.partial_cost)
        found.append(exists(name) is not None)
        said = verdict(name) if found[-1] else "no such character"
        assert f"{said}, forwards: {round(forwards, 2):g}" in runs
        assert f"{way}{100 * found[-1]} %{forwards:.2f}" in shares
    assert found == [False, True, True]
    assert "at least one letter" in wrong and HOSTILE in shown and bold == 0  # any text is text


@in_browser
def test_a_mask_shows_both_stages_and_is_written_by_hand(names_page, shipped, tokenizer, tmp_path):
    """The likeliest token of each stage is the record's; what is put in is kept, and decoding goes on from there."""
    script = """
        const first = () => [...document.querySelectorAll(".lists > div")].map((list) =>
            list.querySelector(".option").textContent);
        $("prompt").value = "BOX DRAWINGS";
        ask(0);
        const {steps, pieces} = traces[1];
        const say = (token, conf) => pieces[token] + conf.toFixed(2);
        const said = steps[0].fill.map((f) => [say(f.token_a, f.conf_a), say(f.token, f.conf)]);
        const shown = steps[0].fill.map((f) => {
            document.querySelectorAll(`button[data-at="${f.at}"]`)[1].click();
            return first();
        });
        document.querySelectorAll('button[data-at="2"]')[1].click();
        [...document.querySelectorAll(".option")].find((b) => b.textContent.includes("·HEAVY")).click();
        const byHand = cells().filter((cell) => cell.is.includes("byHand")).map((cell) => cell.at);
        return {said, shown, byHand, at: [now, chosen.at], tokens: traces[1].tokens, full: traces[1].nfe.full};
    """
    found = answer(tmp_path, names_page, script)
    assert len(found["said"]) > 1 and found["shown"] == found["said"]
    assert found["byHand"] == [2] and found["at"] == [1, 3]  # the panel goes on to the next mask

    heavy = tokenizer.encode("BOX DRAWINGS HEAVY")
    (out,) = generate(shipped, [heavy], replace(WITH_HEAD, gen_length=31, tau_m2t=-1.0))
    assert found["tokens"] == heavy[2:] + out.tokens
    assert found["full"] == out.nfe["full"]  # the step by hand asked the model nothing


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    save_model(odd_model(tokenizer="toy"), tmp_path / "toy")
    save_model(odd_model(), tmp_path / "bytes")
    model = load_model(tmp_path / "bytes", "cpu", torch.float32)
    model.add_lora(2, 4, generator("lora"), stage_b_alone=True)
    about = dict(lora_r=2, lora_alpha=4, lora_in_stage_b_alone=True)
    save_adapter(model, tmp_path / "stage_b", tmp_path / "bytes", about)
    call = lambda folder: refused(playground, monkeypatch, capsys, "--ckpt", folder, "--out", tmp_path / "p.html")  # noqa: E731
    assert "has no tokenizer" in call(tmp_path / "toy")
    assert "of another kind" in call(tmp_path / "stage_b")


def test_one_command_writes_one_page_that_asks_nothing_of_a_network(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "p.html"
    argv = ["--ckpt", BASE, "--prompt", "GREEK", "--out", out]
    code, said, _ = command_line(playground, monkeypatch, capsys, *argv)
    assert code == 0 and re.fullmatch(rf"wrote {out} \(\d\.\d MB\)\n", said)
    page = out.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["prompt"] == "GREEK" and [d["name"] for d in data["decoders"]] == ["factorised", "one at a time"]
    assert {t["dtype"] for t in data["tensors"].values()} == {"bfloat16"}  # as in the file

    asked = r"https?:|\bsrc=|\bhref=|@import|url\(|\bimport\(|fetch\(|XMLHttp|WebSocket|innerHTML"
    assert re.findall(asked, page) == []
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', page)[1]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


# --- records of sample.py --json

WORDS = {0: "In", 1: "·the", 2: "·city", 3: "·of", 4: "·San", 5: "·York", 6: "·New", 7: HOSTILE, MASK: "▒"}
M = MASK


def one_step(start: int, before: list[int], fill: dict, edit: dict | None = None) -> dict:
    """What sample.py records of a step: fill {position: (token, Stage A's)}, edit {position: token}."""
    new = {at: token for at, (token, _) in fill.items()} | (edit or {})
    return dict(
        start=start, before=before, after=[new.get(start + i, t) for i, t in enumerate(before)], partial=1,
        fill=[dict(at=at, token=b, conf=0.75, token_a=a, conf_a=0.5) for at, (b, a) in fill.items()],
        edit=[dict(at=at, old=before[at - start], token=t, conf=0.75) for at, t in (edit or {}).items()],
        refused=[], conf=[0.75] * len(before),
    )  # fmt: skip


def planted() -> dict:
    """A run by hand: three prompt tokens, blocks of four. At step 2 the bundle {4, 5} is written, where Stage A says
    "San", "York" and Stage B "New", "York"; a word is refused at step 3, and step 4 edits the first word."""
    steps = [
        one_step(0, [0, 1, 2, M], {3: (3, 3)}),
        one_step(4, [M, M, M, M], {4: (6, 4), 5: (5, 5)}),
        one_step(4, [6, 5, M, M], {6: (7, 7)}) | {"refused": [dict(at=7, token=5, conf=0.25)]},
        one_step(4, [6, 5, 7, M], {7: (M, M)}, {4: 4}),
    ]
    steps[2]["looks"] = [[dict(at=7, token=7, final=False)], [dict(at=7, token=5, final=True)]]
    nfe = {"full": 4, "partial": 4, "commit": 1, "all": 6.0}  # n/L = 1/4
    pieces = {str(i): w for i, w in WORDS.items()}
    return dict(text="", verdict="û (U+00FB)", tokens=[3, 4, 5, 7, M], nfe=nfe, nfe_per_token=0.8, partial_cost=0.25,
                steps=steps, prompt=[0, 1, 2], mask_id=M, n_rounds=1, pieces=pieces)  # fmt: skip


@in_browser
def test_records_from_files_are_shown_step_by_step(bytes_page, tmp_path):
    """What the stages disagree on, edits, refusals, masks written as masks, any text as text, counts, the verdict.
    Files that are none of sample.py's are refused in a line, and what was shown stays."""
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
        const refused = [await choose("def f(x):"), await choose("{}"), await choose(one, other)];
        const chosen = await choose(one);
        press("ArrowRight");
        press("ArrowRight");
        const second = cells();
        document.querySelector('button[data-at="4"]').click();
        const panel = text("panel");
        go(3);
        const third = cells();
        press("End");
        return {refused, chosen, second, panel, third, end: cells(), heads: text("runs")};
    """
    found = answer(tmp_path, bytes_page, script, runs=[planted(), dict(planted(), prompt=[0, 1, 3])])
    for (said, labels), why in zip(found["refused"], ("", "holds no steps", "of one prompt"), strict=True):
        assert "not what sample.py --json writes" in said and why in said
        assert labels == "factorised,Stage B,one at a time"
    assert found["chosen"] == ["", "run_0"]

    second, third, end = found["second"], found["third"], found["end"]
    kinds = ["prompt"] * 3 + ["settled"] + ["fill bundle"] * 2 + ["mask"] * 2
    assert [cell["is"] for cell in second] == ["cell " + kind for kind in kinds]
    assert second[4]["parts"][:3] == ["F", "·New", "A ·San"]
    assert found["panel"].startswith("run_0, position 4: ·New (filled now; candidate 0.75)step 2: wrote ·New 0.75")
    assert third[7]["is"] == "cell refused mask" and third[7]["parts"][0] == "?"
    said = f"step 3: draft {HOSTILE}, look 1 ·York (final); step 3: left masked, unsure of ·York 0.25"
    assert said in third[7]["title"]

    assert end[4]["parts"][:2] == ["E", "·San"] and "step 4: ·New became ·San 0.75" in end[4]["title"]
    assert end[6]["parts"][1] == HOSTILE and end[7]["is"] == "cell mask bundle"
    assert "✓ û (U+00FB), forwards: 6" in found["heads"] and "4 full, 4 partial, 1 commit" in found["heads"]
