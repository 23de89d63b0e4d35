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
from common import ROOT, Steps, command_line, random_ids, random_lora, refused, tiny_model

import sample
from cache import in_full
from checkpoint import load_model, load_tokenizer, merge, save_adapter, save_model
from evaluate import draw_names
from lib.data import unicode_names
from lib.util import exists, generator, verdict
from sample import Decoding, Step, candidates, generate
from tools import playground

BASE = ROOT / "assets" / "names"
SHIPPED = [ROOT / folder for folder in playground.SHIPPED]
TOKENIZER = load_tokenizer(BASE, "bpe")
HOSTILE = '</script><!--<b>&"'

# each column of the page, all masks at once
FACTORISED = Decoding(gen_length=32, tau_m2t=-1.0, tau_t2t=0.5, n_rounds=0, holes=True)
STAGE_B = replace(FACTORISED, tau_t2t=0.0, n_rounds=1)
ONE_AT_A_TIME = replace(FACTORISED, tau_t2t=None)

FOUND = filter(None, map(shutil.which, ("google-chrome", "chromium", "chrome")))
BROWSER = next((path for path in FOUND if not path.startswith("/snap/")), None)  # a snap cannot read these folders
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --virtual-time-budget=10000000 --dump-dom"
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


def leftmost(engine, z, given, u, d) -> Step:
    """A step that writes the leftmost mask, by Stage A."""
    token, conf = candidates(engine.model.logits(engine.stage_a(z)[1]), u[:, 0], d)
    masked = z == engine.model.cfg.mask_id
    bundle = masked & (masked.cumsum(-1) == 1)
    after = torch.where(bundle, token, z)
    return Step(z, after, bundle, torch.zeros_like(bundle), token, conf, token, conf, torch.zeros(len(z)))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[Path]:
    """Two adapters of a random model of names: the paper's, and on it one with LoRA in Stage B alone. Two rounds."""
    base = tmp_path_factory.mktemp("small") / "base"
    save_model(tiny_model(vocab_size=1024, eos_id=1022, mask_id=1023, max_len=128, tokenizer="bpe"), base)
    for name in ("tokenizer.json", "names.json"):
        shutil.copy(BASE / name, base)
    paper = base.parent / "paper"
    alpha = base.parent / "alpha"
    for folder, below, lora_in in ((paper, base, "both"), (alpha, paper, "stage_b")):
        model = load_model(below, "cpu", torch.float32)
        merge(model, below)
        random_lora(model, lora_in)
        model.markers.data.normal_(0, 0.3, generator=generator("markers", lora_in))
        model.adapter["alpha"] = 0.5 if lora_in == "stage_b" else 0.0
        save_adapter(model, folder, below)
    return [paper, alpha]


@pytest.fixture(scope="module")
def small_page(small) -> str:
    return playground.page(small)


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
# decodes of a column's model by every setting; of the first one all logits, n_logits rows, in the order of computing
DECODE = """
    const {model} = columns[given.column];
    const seen = [];
    const plain = logits;
    logits = (model, h) => {
        const found = plain(model, h);
        if (seen.length < given.n_logits) seen.push(...found);
        return found;
    };
    const decodes = given.settings.map((d) => given.prompts.map((asked) => {
        const {prompt, tokens, nfe, steps} = generateOne(model, asked, d);
        return [prompt, tokens, nfe.full, nfe.partial, nfe.commit, steps.flatMap((s) => s.edited).length];
    }));
    let letters = "";
    for (const row of seen)
        for (const byte of new Uint8Array(row.buffer)) letters += String.fromCharCode(byte);
    return {decodes, logits: btoa(letters)};
"""


def with_holes(prompt: list[int]) -> list[int]:
    """Every third token is to be filled."""
    return [1023 if i % 3 == 1 else token for i, token in enumerate(prompt)]


@in_browser
@pytest.mark.parametrize("column", (1, 2))
@pytest.mark.parametrize("kind", ("random", "shipped"))
def test_it_decodes_as_generate_does(kind, column, small, tmp_path):
    """Of the first setting the logits, of all tokens and counts. Random: experts in groups, LoRA in both stages and in
    one, two rounds, edits, holes, blocks before the current one."""
    if kind == "random":
        folders = small
        prompts = [random_ids(1, n, n, 1000)[0].tolist() for n in (3, 8, 21)]
        prompts += [with_holes(prompt) for prompt in prompts]
        d = Decoding(gen_length=20, tau_m2t=0.4, n_rounds=2, holes=True)
        settings = [replace(d, tau_t2t=0.3, max_post_steps=2), replace(d, tau_t2t=0.0, max_post_steps=3, n_rounds=0)]
        settings += [replace(d, tau_m2t=-1.0, tau_t2t=None), ONE_AT_A_TIME]
    else:
        folders = SHIPPED
        prompts = list(draw_names(9, "held out", TOKENIZER).values())
        prompts += [with_holes(prompt + prompts[0]) for prompt in prompts[:3]]
        settings = [replace(STAGE_B, tau_m2t=tau) for tau in (-1.0, 0.3, 0.7)] + [FACTORISED, ONE_AT_A_TIME]

    # what PyTorch computes
    model = load_model(folders[column - 1], "cpu", torch.float32)
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.reshape(-1, out.shape[-1])))
    for prompt in prompts:
        generate(model, [prompt], settings[0])
    hook.remove()
    logits = torch.cat(rows).numpy()

    # and the page
    asked = [asdict(d) | {"leftmost": d == ONE_AT_A_TIME} for d in settings]
    given = dict(column=column, prompts=prompts, settings=asked, n_logits=len(logits))
    found = answer(tmp_path, playground.page(folders), DECODE, **given)
    numbers = np.frombuffer(base64.b64decode(found["logits"]), np.float32).reshape(logits.shape)
    assert np.abs(numbers - logits).max() < 1e-3
    edited = 0
    for d, decodes in zip(settings, found["decodes"], strict=True):
        step = leftmost if d == ONE_AT_A_TIME else sample.denoise
        for output, (*here, edits) in zip(generate(model, prompts, d, step=step), decodes, strict=True):
            assert here == [output.prompt, output.tokens, *output.nfe.values()], d
            edited += edits
    assert kind == "shipped" or edited > 20


@in_browser
def test_the_pages_tokenizer_and_judge_are_the_models(small_page, tmp_path):
    """Any text, and bytes that are none; every name, and no other."""
    texts = [" A  B\t\n C", "é ü 漢字 😀", "\u00a0x\u2003y\u0085z\ufeff", "<|mask|> and <|endoftext|>", HOSTILE]
    texts += list(unicode_names())[::97]
    broken = [*"é".encode()[:1], 65, *"\ufeff".encode()]
    names = [name for code in range(0x110000) if (name := unicodedata.name(chr(code), ""))][::41]
    names += [name[:-1] for name in names] + [name.lower() for name in names[::9]]
    names += ["", "NULL", "SPACE-0020", "漢", "constructor", "__proto__"]
    script = """return [given.names.map(verdict), decode(base, given.broken),
        given.texts.map((text) => [encode(base, text), decode(base, encode(base, text))])];"""
    verdicts, of_broken, coded = answer(tmp_path, small_page, script, texts=texts, broken=broken, names=names)
    assert coded == [[ids, TOKENIZER.decode(ids)] for ids in map(TOKENIZER.encode, texts)]
    assert of_broken == TOKENIZER.decode(broken)
    assert verdicts == [verdict(name) for name in names]


# --- the page of a model
@in_browser
def test_it_opens_on_what_goes_wrong_and_what_does_not(tmp_path):
    """No such character factorised, one that exists one at a time. The experiment counts it."""
    prompt = TOKENIZER.encode(playground.OF_NAMES["prompt"])
    script = """
        const seen = [...document.querySelectorAll("#seen tr")].map((row) => row.textContent);
        data.beginnings.splice(0, Infinity, given.prompt);
        await runAll();
        $("prompt").value = "   ";
        ask();
        const wrong = text("wrong");
        $("prompt").value = given.hostile;
        ask();
        const shown = cells().map((cell) => cell.parts[1]).join("");
        return [seen, text("shares"), wrong, shown, document.querySelectorAll("main b").length];
    """
    seen, shares, wrong, shown, bold = answer(
        tmp_path, playground.page(SHIPPED), script, prompt=prompt, hostile=HOSTILE
    )
    base, paper, alpha = [load_model(folder, "cpu", torch.float32) for folder in (BASE, *SHIPPED)]
    ways = {
        "factorised": generate(base, [prompt], FACTORISED),
        "Stage B, the paper's": generate(paper, [prompt], STAGE_B),
        "Stage B, alpha 0.5": generate(alpha, [prompt], STAGE_B),
        "one at a time": generate(base, [prompt], ONE_AT_A_TIME, step=leftmost),
    }
    for line, (way, (out,)) in zip(seen, ways.items(), strict=True):
        name = TOKENIZER.decode(prompt + out.tokens)
        forwards = in_full(out.nfe, base.partial_cost)
        there = exists(name) is not None
        said = "✓ " + verdict(name) if there else "✗ " + verdict(name).strip("()")
        assert line == f"{way} {round(forwards, 2):g} forwards{name}{said}"
        assert f"{way}{100 * there} %{forwards:.2f}" in shares
    assert "✗" in seen[0] and "✓" in seen[-1]
    assert "at least one letter" in wrong and HOSTILE.upper() in shown and bold == 0  # any text is text


@in_browser
def test_what_is_typed_a_link_and_gates_that_moved(small_page, tmp_path):
    """Upper case, _ for a mask; the prompt is in the address; numbers of other gates are old."""
    script = """
        const type = (typed, place) => {
            $("prompt").value = typed;
            $("prompt").setSelectionRange(place, place);
            $("prompt").dispatchEvent(new Event("input"));
            return [$("prompt").value, $("prompt").selectionStart];
        };
        const typed = [type("box _ a", 5), type("stra\u00dfe", 5)];
        type("box _ a", 0);
        $("ask").requestSubmit();
        play(false);
        const address = location.hash;
        const asked = traces[0].asked;
        location.hash = "prompt=greek+_";
        await new Promise((resume) => addEventListener("hashchange", () => setTimeout(resume), {once: true}));
        play(false);
        const linked = $("prompt").value;

        data.beginnings.length = 1;
        await runAll();
        const move = (value) => {
            $("tau_m2t").value = value;
            $("tau_m2t").dispatchEvent(new Event("input"));
            return [$("shares").className, text("stale")];
        };
        return {typed, address, asked, linked, moved: [move(0.5), move(0)]};
    """
    found = answer(tmp_path, small_page, script)
    assert found["typed"] == [["BOX ▒ A", 5], ["STRASSE", 6]]
    assert found["address"] == "#prompt=BOX+_+A" and 1023 in found["asked"]
    assert found["linked"] == "GREEK ▒"
    old = "These numbers are old: they are of tau_m2t 0.00, tau_t2t 0.00."
    assert found["moved"] == [["old", old], ["", ""]]


@in_browser
@pytest.mark.parametrize("column", (1, 2))
def test_a_mask_shows_both_stages_and_is_written_by_hand(column, small, small_page, tmp_path):
    """The likeliest token of each stage is the record's; what is put in is kept, and decoding goes on from there."""
    script = """
        const first = () => [...document.querySelectorAll(".lists > div")].map((list) =>
            list.querySelector(".option").textContent);
        $("prompt").value = "BOX DRAWINGS";
        $("tau_t2t").value = 1;
        ask(0);
        const at = traces[0].asked.length;
        const {steps, pieces} = traces[given.column];
        const say = (token, conf) => pieces[token] + conf.toFixed(2);
        const said = steps[0].fill.map((f) => [say(f.token_a, f.conf_a), say(f.token, f.conf)]);
        const shown = steps[0].fill.map((f) => {
            document.querySelectorAll(`button[data-at="${f.at}"]`)[given.column].click();
            return first();
        });
        document.querySelectorAll(`button[data-at="${at}"]`)[given.column].click();
        document.querySelectorAll(".option")[2].click();
        const byHand = cells().filter((cell) => cell.is.includes("byHand")).map((cell) => cell.at - at);
        const {prompt, tokens, nfe} = traces[given.column];
        return {said, shown, byHand, at: [now, chosen.at - at], prompt, tokens, full: nfe.full};
    """
    found = answer(tmp_path, small_page, script, column=column)
    assert len(found["said"]) > 1 and found["shown"] == found["said"]
    assert found["byHand"] == [0] and found["at"] == [1, 1]  # the panel goes on to the next mask

    # without edits it is as if that token had been given; and the step by hand asked the model nothing
    first, *others = found["tokens"]
    d = replace(STAGE_B, gen_length=31, n_rounds=2, tau_t2t=None)
    (out,) = generate(load_model(small[column - 1], "cpu", torch.float32), [[*found["prompt"], first]], d)
    assert first != TOKENIZER.eos_id and [others, found["full"]] == [out.tokens, out.nfe["full"]]


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    save_model(tiny_model(tokenizer="toy"), tmp_path / "toy")
    assert "has no tokenizer" in refused(playground, monkeypatch, capsys, "--ckpt", tmp_path / "toy")
    two = [SHIPPED[0], tmp_path / "toy"]
    assert "a page has one base" in refused(playground, monkeypatch, capsys, "--ckpt", *two)


def test_one_command_writes_one_page_that_asks_nothing_of_a_network(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "p.html"
    model = tiny_model(vocab_size=272, eos_id=256, mask_id=257)
    model.markers.data.zero_()
    save_model(model.bfloat16(), tmp_path / "base")
    code, said, _ = command_line(playground, monkeypatch, capsys, "--ckpt", tmp_path / "base", "--out", out)
    assert code == 0 and re.fullmatch(rf"wrote {out} \(\d\.\d MB\)\n", said)
    page = out.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert [d["name"] for d in data["decoders"]] == ["factorised", "one at a time"]

    # one link, to follow by hand, and nothing that loads
    asked = r"https?:[^\"]*|\bsrc=|@import|url\(|\bimport\(|fetch\(|XMLHttp|WebSocket|innerHTML"
    assert re.findall(asked, page) == ["https://arxiv.org/abs/2607.04469"]
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', page)[1]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@in_browser
def test_a_decode_is_shown_step_by_step(small, small_page, tmp_path):
    """After each of PyTorch's steps the block as it was left, what the stages disagree on, and edits."""
    d = replace(STAGE_B, tau_m2t=0.3, n_rounds=2)
    steps = Steps(1)
    model = load_model(small[0], "cpu", torch.float32)
    (out,) = generate(model, [TOKENIZER.encode("BOX DRAWINGS")], d, on_step=steps.add)
    script = """
        $("tau_m2t").value = 0.3;
        present([recordOf(promptOf("BOX DRAWINGS").prompt, 1)], 0);
        return [text("runs"), traces[0].steps.map((s, k) => (go(k + 1), cells()))];
    """
    heads, seen = answer(tmp_path, small_page, script)
    assert f"{out.nfe['full']} full, {out.nfe['partial']:g} partial, {out.nfe['commit']} commit" in heads

    piece = lambda token: {1022: "∎", 1023: "▒"}.get(token) or TOKENIZER.piece(token)  # noqa: E731
    (taken,) = steps.of_row
    for s, cells in zip(taken, seen, strict=True):
        cell = {cell["at"]: cell for cell in cells}
        assert [cell[s["start"] + i]["parts"][1] for i in range(8)] == list(map(piece, s["after"]))
        for f in s["fill"]:
            drafted = "" if f["token"] == f["token_a"] else "A " + piece(f["token_a"])
            assert cell[f["at"]]["is"] == "cell fill bundle"
            assert cell[f["at"]]["parts"] == ["F", piece(f["token"]), drafted, ""]
        for e in s["edit"]:
            old = s["before"][e["at"] - s["start"]]
            assert f"{piece(old)} became {piece(e['token'])}" in cell[e["at"]]["title"]
    assert any(s["edit"] for s in taken) and any(f["token"] != f["token_a"] for s in taken for f in s["fill"])
