"""The page's engine against PyTorch, in a browser (apt install chromium). `pytest tests/tools/test_playground.py`"""

import html
import json
import math
import re
import shutil
import subprocess
import unicodedata
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from common import ROOT, caller, names_folder, random_adapter, random_ids

from checkpoint import load_model
from decoding import Decoding, Step, decoding_of, in_full
from evaluate import BASE_ROWS, rows_of
from lib.names import draw_names, exists, verdict
from lib.tokenizer import load_tokenizer
from lib.util import read_json
from model import Model
from sample import build_parser, generate
from tools import playground

BASE = ROOT / "assets" / "names"
SHIPPED = [ROOT / folder for folder in playground.NAMES]
TOKENIZER = load_tokenizer(BASE)
HOSTILE = '</script><!--<b>&"'

# each decoder of a page: the number of its model, and the flags by which sample.py decodes so
AT_ONCE = "--tau_m2t all --tau_t2t none"
SHOWN = {
    "base, one at a time": (0, "--n_rounds 0 --select left --tau_m2t 1 --tau_t2t none"),
    "base, gates": (0, "--n_rounds 0"), "base, all at once": (0, "--n_rounds 0 " + AT_ONCE),
    "paper, Stage B off": (1, "--n_rounds 0 --tau_t2t 0"),
    "paper, Stage B": (1, ""), "paper, all at once": (1, AT_ONCE), "causal Stage B": (2, ""),
}  # fmt: skip

FOUND = filter(None, map(shutil.which, ("google-chrome", "chromium", "chrome")))
BROWSER = next((path for path in FOUND if not path.startswith("/snap/")), None)  # a snap cannot read these folders
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --virtual-time-budget=10000000 --dump-dom"
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


def small_models(folder: Path) -> list[Path]:
    """A random base of names with a window of two blocks, the paper's adapter, of two rounds, and a causal one."""
    base = names_folder(folder / "base", read_json(BASE / "tokenizer.json", "tokenizer"), vocab_size=1024, window=16)
    random_adapter(folder / "paper", base)
    random_adapter(folder / "causal", base, "causal", n_last=3, n_rounds=1)
    return [base, folder / "paper", folder / "causal"]


def read(folder: Path) -> Model:
    return load_model(folder, "cpu", torch.float32)


def asked(name: str, models: list[Model], *flags: str) -> tuple[Model, Decoding]:
    """What sample.py decodes by, for the decoder of this name on the page."""
    number, own = SHOWN[name]
    return models[number], decoding_of(build_parser().parse_args([*own.split(), *flags]), models[number])


def answer(folder: Path, page: str, script: str, **given) -> object:
    """What `script` returns, run in the page with `given` in its sight."""
    variables = json.dumps(given).replace("<", "\\u003c")
    wrapped = f"""
        const given = {variables};
        const text = (id) => $(id).textContent;
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


# --- the engine
# decodes of each model by every setting, in steps
DECODE = """
    return given.cases.map(({number, prompts, settings}) => {
        const {model} = decoders.find((decoder) => decoder.number === number);
        return settings.map((d) => prompts.map((asked) => {
            const draws = numbersOf(given.seed, asked, model.cfg.block_length);
            const {prompt, tokens, nfe, steps} = generateOne(model, asked, {...d, draws});
            const drafts = (s) => s.bundle.map((t) => s.token_a[t]);
            return [prompt, tokens, nfe.full, nfe.partial, nfe.refresh,
                steps.map((s) => [s.before, s.after, s.bundle, s.edited, drafts(s), s.partial])];
        }));
    });
"""
SEED = 4


def decoded(model: Model, prompt: list[int], d: Decoding) -> list:
    """The same by PyTorch."""
    steps = []

    def add(rows: list, step: Step) -> None:
        places = [tensor[0].nonzero()[:, 0].tolist() for tensor in (step.bundle, step.edited)]
        drafts = step.token_a[step.bundle].tolist()
        steps.append([step.z[0].tolist(), step.after[0].tolist(), *places, drafts, float(step.partial)])

    [output] = generate(model, [prompt], d, SEED, on_step=add)
    return [output.prompt, output.tokens, *output.nfe.values(), steps]


def settings_of(folder: Path, model: Model) -> list[Decoding]:
    """Greedy and drawn: the paper's gates and edits, Stage B off, everything at once, the longest run."""
    d = Decoding(gen_length=12, tau_m2t=0.4, tau_t2t=None, n_rounds=model.cfg.n_rounds, holes=True)
    if folder.name == "causal":
        runs = [replace(d, tau_m2t=tau) for tau in (-1.0, 0.1, 1.0)]
        return [*runs, *(replace(run, temperature=1.5) for run in runs[:2])]
    edits = replace(d, tau_t2t=0.0, max_post_steps=2)
    return [
        replace(edits, tau_t2t=0.3),
        replace(edits, n_rounds=0),
        replace(d, tau_m2t=-1.0),
        replace(d, tau_m2t=0.1, select="left", n_rounds=0, temperature=1.5),
        replace(edits, temperature=0.7),
    ]


@in_browser
def test_it_decodes_as_generate_does(tmp_path):
    """Step by step: experts in groups, LoRA, two rounds, a copy of the last layers, passes, edits, holes, blocks before
    the current one, of which some are outside the window; and tokens drawn by the numbers of sample.py's --seed."""
    # with these, and this seed, no two experts or tokens that are written are so close that rounding decides
    prompts = [random_ids(1, n, 600 + n, 1000)[0].tolist() for n in (1, 3, 8, 45)]
    # every third token of the longer ones is to be filled
    prompts[2:] = [[1023 if i % 3 == 1 else token for i, token in enumerate(prompt)] for prompt in prompts[2:]]
    _, *adapters = small_models(tmp_path)
    given = []
    expected = []
    for number, folder in enumerate(adapters, 1):
        model = read(folder)
        settings = settings_of(folder, model)
        given.append(dict(number=number, prompts=prompts, settings=list(map(asdict, settings))))
        expected.append([[decoded(model, prompt, d) for prompt in prompts] for d in settings])

    found = answer(tmp_path, playground.page(adapters), DECODE, cases=given, seed=SEED)
    for case, here, there in zip(given, found, expected, strict=True):
        for d, one, other in zip(case["settings"], here, there, strict=True):
            assert one == other, d

    # there were edits, blocks that took several passes, and draws that are not the likeliest
    of_paper, of_causal = [[step for decodes in of for decode in decodes for step in decode[-1]] for of in expected]
    assert sum(len(edited) for *_, edited, _, _ in of_paper) > 20
    assert sum(partial > 2 for *_, partial in of_causal) > 5
    assert expected[1][0] != expected[1][3]


# --- tokens and names
TEXTS = [
    " A  B\t\n C", "é ü 漢字 😀", "\u00a0x\u2003y\u0085z\ufeff", "<|mask|> and <|endoftext|>", HOSTILE,
    "constructor", "toString", "__proto__", "<|mask|>constructor<|mask|>",
]  # fmt: skip
CODED = """
    return [given.names.map(verdict),
        given.texts.map((text) => [encode(base, text), decode(base, encode(base, text))])];
"""


@in_browser
def test_the_pages_tokenizer_and_judge_are_the_models(tmp_path):
    """Any text; every name, and no other."""
    names = [name for code in range(0x110000) if (name := unicodedata.name(chr(code), ""))][::41]
    texts = [*TEXTS, *names]
    names += [name[:-1] for name in names] + ["", "NULL", "SPACE-0020", "漢", "constructor", "__proto__", "space"]
    page = playground.page(small_models(tmp_path)[1:])
    verdicts, coded = answer(tmp_path, page, CODED, names=names, texts=texts)
    assert coded == [[ids, TOKENIZER.decode(ids)] for ids in map(TOKENIZER.encode, texts)]
    assert verdicts == [verdict(name) for name in names]


# --- pages
@in_browser
def test_the_shipped_page_opens_with_two_held_out_names_and_agrees_with_sample_and_evaluate(tmp_path):
    """Each decoder writes what sample.py writes, in as many forwards, and counts what a row of evaluate.py counts. What
    is typed is upper case, with _ for a mask, and is in the address."""
    prompts = draw_names(4, TOKENIZER)
    script = """
        const seen = [...document.querySelectorAll("#seen tbody tr")].map((row) =>
            [row.cells[0], ...row.querySelectorAll(".line")].map((part) => part.textContent));
        data.beginnings.length = given.n;
        $("run").click();
        while ($("run").disabled) await new Promise((resume) => setTimeout(resume, 50));
        const type = (value) => {
            $("prompt").value = value;
            $("ask").requestSubmit();
            play(false);
        };
        type(given.hostile);
        const bold = document.querySelectorAll("main b").length;
        type("box _ a");
        const typed = [$("prompt").value, location.hash, traces[0].asked.includes(1023)];
        const {bottom} = $("run").getBoundingClientRect();
        return {seen, counts, bottom, bold, typed};
    """
    page = playground.page(SHIPPED)
    assert len(page.encode()) <= 7e6
    found = answer(tmp_path, page, script, hostile=HOSTILE, n=len(prompts))
    models = list(map(read, [BASE, *SHIPPED]))
    for [name, *lines], counts in zip(found["seen"], found["counts"], strict=True):
        model, d = asked(name, models)
        assert d in [*BASE_ROWS.values(), *rows_of(model).values()]
        outputs = generate(model, list(prompts.values()), replace(d, gen_length=32))
        names = [TOKENIZER.decode(out.prompt + out.tokens) for out in outputs]
        forwards = [in_full(out.nfe, model.partial_cost) for out in outputs]
        assert counts == dict(n=len(names), found=sum(map(bool, map(exists, names))), forwards=sum(forwards)), name
        for line, written, cost in zip(lines, names[:2], forwards[:2], strict=True):
            cost = math.floor(100 * cost + 0.5) / 100  # as toFixed(2)
            assert line == f"{written}{'✓' if exists(written) else '✗'} {verdict(written)}forwards: {cost:g}", name
    assert len(found["seen"]) == len(SHOWN) and found["bottom"] < 800
    assert found["bold"] == 0 and found["typed"] == ["BOX ▒ A", "#prompt=BOX+_+A", True]


def test_one_command_writes_one_page_that_asks_nothing_of_a_network(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "p.html"
    base = names_folder(tmp_path / "base")
    call = caller(playground, monkeypatch, capsys)
    for _ in range(2):  # an earlier page is written again
        call("--ckpt", base, "--out", out)
    page = out.read_text(encoding="utf-8")

    # one link, to follow by hand, and nothing that loads
    asked = r"https?:[^\"]*|\bsrc=|@import|url\(|\bimport\(|fetch\(|XMLHttp|WebSocket|innerHTML"
    assert re.findall(asked, page) == ["https://arxiv.org/abs/2607.04469"]
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in page

    # nothing but a page is overwritten
    other = tmp_path / "other.html"
    other.write_text("<title>mine</title>")
    for path in (base / "model.safetensors", other, tmp_path):
        call.fails("--ckpt", base, "--out", path)
    assert other.read_text() == "<title>mine</title>" and (base / "model.safetensors").stat().st_size > 1000
