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
from common import ROOT, command_line, random_adapter, random_ids, refused, tiny_model

import sample
from checkpoint import load_model, load_tokenizer, save_adapter, save_model
from evaluate import draw_names
from lib.data import exists, unicode_names
from lib.output import in_full
from lib.show import verdict
from lib.util import generator
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


@pytest.fixture
def shipped() -> Model:
    return load_model(HEAD, "cpu", torch.float32)


@pytest.fixture(scope="module")
def names_page() -> str:
    """The page of the shipped head."""
    return playground.page(str(HEAD))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE, "bpe")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """LoRA on a small random model of bytes: what a preset may say, and those of names do not."""
    folder = tmp_path_factory.mktemp("bytes")
    geometry = dict(n_active=1, n_shared=0, n_dense=0, routed_scaling=1.0, qkv_bias=True, proj_bias=True, tied=True)
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257, max_len=128, **geometry), folder / "base")
    random_adapter(folder / "adapter", folder / "base")
    return folder / "adapter"


@pytest.fixture(scope="module")
def small_page(adapter) -> str:
    return playground.page(str(adapter))


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
    model.cfg.order = given.order;
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


def check_decodes(
    folder: Path, page: str, model: Model, prompts: list[list[int]], settings: list[tuple[Decoding, str]]
) -> dict:
    """Tokens and counts of every setting (and the stage that writes) are generate's, and of the first one the logits.
    -> what happened, how often."""
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.reshape(-1, out.shape[-1])))
    for prompt in prompts:
        generate(model, [prompt], settings[0][0])
    hook.remove()
    logits = torch.cat(rows).numpy()

    asked = [asdict(d) | {"stage": stage} for d, stage in settings]
    given = dict(prompts=prompts, settings=asked, n_logits=len(logits), order=model.cfg.order)
    found = answer(folder, page, DECODE, **given)
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
@pytest.mark.parametrize("order, gates", [("surest", (0.1, 0.2)), ("leftmost", (0.2, -1.0))])
def test_names_decode_as_generate_does(order, gates, names_page, shipped, tokenizer, tmp_path):
    """The shipped head and its base, as if the base were best written in this order, by each decoder and gate."""
    shipped.cfg.order = order
    shipped.second_look.cfg.order = order
    prompts = list(draw_names(9, "held out", tokenizer).values())
    prompts += [with_holes(prompt + prompts[0], shipped.cfg.mask_id) for prompt in prompts[:3]]
    settings = [(replace(WITH_HEAD, tau_m2t=tau), "head") for tau in gates]
    settings += [(replace(NAMES, tau_m2t=tau), "A") for tau in (1.0, *gates)]
    happened = check_decodes(tmp_path, names_page, shipped, prompts, settings)

    # wrong drafts and refusals are among them and, from the left, holes that the head leaves to Stage A
    assert happened["slow"] > 0 and happened["refused"] > 0
    assert (happened["aside"] > 0) == (order == "leftmost")


@in_browser
def test_stage_b_and_edits_decode_as_generate_does(adapter, small_page, tmp_path):
    """Two rounds by LoRA and markers, edits, holes, blocks before the current one."""
    starts = [random_ids(1, n, n, 250)[0].tolist() for n in (3, 8, 21)]
    starts += [with_holes(start, 257) for start in starts]
    d = Decoding(gen_length=20, tau_m2t=0.4, n_rounds=2, holes=True)
    settings = [
        (replace(d, tau_t2t=0.3, max_post_steps=2), "B"),
        (replace(d, tau_t2t=0.0, max_post_steps=3, n_rounds=0), "A"),
        (replace(d, tau_m2t=-1.0, tau_t2t=None), "B"),
    ]
    model = load_model(adapter, "cpu", torch.float32)
    assert check_decodes(tmp_path, small_page, model, starts, settings)["edited"] > 20


@in_browser
def test_the_pages_tokenizer_and_judge_are_the_models(names_page, tokenizer, tmp_path):
    """Any text, and bytes that are none; every name, and no other."""
    texts = [" A  B\t\n C", "é ü 漢字 😀", "\u00a0x\u2003y\u0085z\ufeff", "<|mask|> and <|endoftext|>", HOSTILE]
    texts += list(unicode_names())[::97]
    broken = [*"é".encode()[:1], 65, *"\ufeff".encode()]
    every = [name for code in range(0x110000) if (name := unicodedata.name(chr(code), ""))]
    names = every[::41]
    names += [name[:-1] for name in names] + [name.lower() for name in names[::9]]
    names += ["", "NULL", "CJK UNIFIED IDEOGRAPH-4e00", "CJK UNIFIED IDEOGRAPH-04E00", "CJK UNIFIED IDEOGRAPH-2B81E"]
    names += ["SPACE-0020", "LATIN SMALL LETTER A-0061", "漢", "constructor", "__proto__"]
    script = """return [given.names.map(verdict), decode(model, given.broken),
        given.texts.map((text) => [encode(model, text), decode(model, encode(model, text))])];"""
    verdicts, of_broken, coded = answer(tmp_path, names_page, script, texts=texts, broken=broken, names=names)
    assert coded == [[ids, tokenizer.decode(ids)] for ids in map(tokenizer.encode, texts)]
    assert of_broken == tokenizer.decode(broken)
    assert verdicts == [verdict(name) for name in names]


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
    save_model(tiny_model(tokenizer="toy"), tmp_path / "toy")
    model = tiny_model(vocab_size=272, eos_id=256, mask_id=257)
    save_model(model, tmp_path / "bytes")
    model.add_lora(2, 4, generator("lora"), stage_b_alone=True)
    about = dict(lora_r=2, lora_alpha=4, lora_in_stage_b_alone=True)
    save_adapter(model, tmp_path / "stage_b", tmp_path / "bytes", about)
    for folder, words in (("toy", "has no tokenizer"), ("stage_b", "of another kind")):
        assert words in refused(playground, monkeypatch, capsys, "--ckpt", tmp_path / folder)


def test_one_command_writes_one_page_that_asks_nothing_of_a_network(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "p.html"
    code, said, _ = command_line(playground, monkeypatch, capsys, "--ckpt", BASE, "--out", out)
    assert code == 0 and re.fullmatch(rf"wrote {out} \(\d\.\d MB\)\n", said)
    page = out.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert [d["name"] for d in data["decoders"]] == ["factorised", "one at a time"]
    assert {t["dtype"] for t in data["tensors"].values()} == {"bfloat16"}  # as in the file

    asked = r"https?:|\bsrc=|\bhref=|@import|url\(|\bimport\(|fetch\(|XMLHttp|WebSocket|innerHTML"
    assert re.findall(asked, page) == []
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', page)[1]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


# --- records of sample.py --json


@in_browser
def test_records_from_files_are_shown_step_by_step(adapter, small_page, tmp_path, monkeypatch, capsys):
    """What sample.py writes: after each step the block as it was left, what the stages disagree on, and edits. Other
    files are refused in a line, and what was shown stays."""
    argv = ["--ckpt", adapter, "--prompt", "ab", "--gen_length", 9, "--tau_m2t", 0.3, "--device", "cpu", "--json"]
    record = json.loads(command_line(sample, monkeypatch, capsys, *argv)[1])
    script = """
        const choose = async (...runs) => {
            const chosen = new DataTransfer();
            runs.forEach((run, i) => chosen.items.add(new File([JSON.stringify(run)], `run_${i}.json`)));
            $("unread").textContent = "reading";
            $("files").files = chosen.files;
            $("files").dispatchEvent(new Event("change"));
            while (text("unread") === "reading") await new Promise((resume) => setTimeout(resume, 10));
            return [text("unread"), traces.map((t) => t.label).join()];
        };
        const refused = [await choose({}), await choose(given.run, {...given.run, prompt: [3]})];
        const chosen = await choose(given.run);
        const seen = given.run.steps.map((s, k) => (go(k + 1), cells()));
        return {refused, chosen, seen, heads: text("runs")};
    """
    found = answer(tmp_path, small_page, script, run=record)
    for (said, labels), why in zip(found["refused"], ("holds no steps", "of one prompt"), strict=True):
        assert "not what sample.py --json writes" in said and why in said
        assert labels == "factorised,Stage B,one at a time"
    assert found["chosen"] == ["", "run_0"]
    assert f"{record['nfe']['full']} full, {record['nfe']['partial']:g} partial" in found["heads"]

    piece = lambda token: record["pieces"][str(token)]  # noqa: E731
    for s, cells in zip(record["steps"], found["seen"], strict=True):
        cell = {cell["at"]: cell for cell in cells}
        assert [cell[s["start"] + i]["parts"][1] for i in range(8)] == list(map(piece, s["after"]))
        for f in s["fill"]:
            drafted = [] if f["token"] == f["token_a"] else ["A " + piece(f["token_a"])]
            assert cell[f["at"]]["is"] == "cell fill bundle" and cell[f["at"]]["parts"][0] == "F"
            assert [part for part in cell[f["at"]]["parts"][2:] if part.startswith("A ")] == drafted
        for f in s["edit"]:
            assert f"{piece(f['old'])} became {piece(f['token'])}" in cell[f["at"]]["title"]
    assert any(s["edit"] for s in record["steps"]) and len(record["steps"]) > 3
