"""The page's engine against PyTorch, and the page in a browser where there is one.

pytest tests/tools/test_playground.py
"""

import base64
import json
import re
import shutil
import unicodedata
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, command_line, random_ids, refused, tiny_model
from test_trace_page import HOSTILE, browse, in_browser

import sample
from cache import in_full
from checkpoint import load_model, load_tokenizer, save_adapter, save_model
from evaluate import draw_names, wilson
from lib.data import exists, unicode_names
from lib.show import verdict
from lib.tokenizer import byte_tokenizer
from lib.util import generator, write_json
from model import Model
from sample import Decoding, generate, generate_one
from tools import playground

BASE = ROOT / "assets" / "names"
JOINT = BASE / "joint"
NAMES = Decoding(gen_length=32, eos_early_stop=True, tau_t2t=None, n_rounds=0)
GATES = {"surest": (-1.0, 0.1, 0.2), "leftmost": (-1.0, 0.2, 0.5)}


@pytest.fixture(scope="module")
def html() -> str:
    """The page of the shipped model with its joint head."""
    return playground.page(str(BASE), str(JOINT))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE, "bpe")


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return list(draw_names(200, "held out", tokenizer).values())


@pytest.fixture(scope="module", params=["surest", "leftmost"])
def of_order(request, tmp_path_factory) -> Path:
    """The shipped folder, as if it were best written in this order."""
    folder = tmp_path_factory.mktemp(request.param) / "names"
    shutil.copytree(BASE, folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"order": request.param})
    return folder


@pytest.fixture(scope="module")
def html_of_order(of_order) -> str:
    return playground.page(str(of_order), str(of_order / "joint"), "GREEK")


def shipped(adapter: Path | None) -> Model:
    return load_model(BASE, "cpu", torch.float32, adapter)


def answer(folder: Path, html: str, script: str, **given) -> object:
    """What `script` returns, run in the page with `given` in its sight."""
    variables = json.dumps(given).replace("<", "\\u003c")
    wrapped = f"""
        play(false);
        const given = {variables};
        const answer = (() => {{ {script} }})();
        const result = document.createElement("pre");
        result.id = "result";
        result.textContent = JSON.stringify(answer);
        document.head.replaceChildren();
        document.body.replaceChildren(result);
    """
    return json.loads(browse(folder, html, script=wrapped).text["result"])


def engine_settings(d: Decoding, stage: str, tau_keep: float = 0.5) -> dict:
    return asdict(d) | {"stage": stage, "tau_keep": tau_keep}


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


def decode_with_logits(
    model: Model, prompts: list[list[int]], d: Decoding
) -> tuple[list[list[int]], torch.Tensor, int]:
    """Tokens of each prompt, all rows of logits in the order in which they were computed, and the number of blocks."""
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.reshape(-1, out.shape[-1])))
    outputs = [generate(model, [prompt], d)[0] for prompt in prompts]
    hook.remove()
    return [o.tokens for o in outputs], torch.cat(rows), sum(o.nfe["full"] for o in outputs)


def check_logits(folder: Path, html: str, model: Model, prompts: list[list[int]], d: Decoding, stage: str) -> int:
    tokens, logits, blocks = decode_with_logits(model, prompts, d)
    found = answer(folder, html, RECORD_LOGITS, prompts=prompts, d=engine_settings(d, stage))
    assert found["tokens"] == tokens and found["calls"] == len(logits)
    numbers = np.frombuffer(base64.b64decode(found["logits"]), np.float32).reshape(logits.shape)
    assert np.abs(numbers - logits.float().numpy()).max() < 1e-3
    return blocks


@in_browser
def test_both_stages_logits_are_pytorchs_on_fifty_blocks(html, prompts, tmp_path):
    joint = replace(NAMES, n_rounds=1, tau_m2t=0.1)
    assert check_logits(tmp_path, html, shipped(JOINT), prompts[:26], joint, "joint") >= 50


@in_browser
def test_selection_by_hand(html, tmp_path):
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
    assert answer(tmp_path, html, script, cases=cases) == [bundle for *_, bundle in cases]

    # a visible token takes no part, and where nothing is masked nothing is written
    script = """return ["leftmost", "surest"].flatMap((order) =>
        [selectBundle([0.01, 0.7, 0.6, 0.5], [1, 2, 3], 0.4, order), selectBundle([0.5], [], 0.4, order)]);"""
    assert answer(tmp_path, html, script) == [[1, 2], [], [1, 2, 3], []]


@in_browser
def test_what_is_kept_of_a_look_by_hand(html, tmp_path):
    """The head wants 5 6 7 8, by .9, .7, .6 and .9. From the left Stage A starts with the first position, else with the
    third, of which it is the surest."""
    cases = [
        ([5, 0, 0, 0], 0.5, "leftmost", [0, 1], [5, 6, 7, 8]),  # .9, .63, .378
        ([5, 0, 0, 0], 0.95, "leftmost", [0], [5, 6, 7, 8]),  # the first is always written
        ([1, 6, 7, 8], 0.5, "leftmost", [0], [1, 6, 7, 8]),  # Stage A starts with another token
        ([1, 6, 7, 8], 0.0, "leftmost", [0, 1, 2, 3], [5, 6, 7, 8]),  # nothing is refused
        ([0, 0, 7, 0], 0.65, "surest", [0, 1, 2, 3], [5, 6, 7, 8]),
        ([0, 0, 7, 0], 0.8, "surest", [0, 2, 3], [5, 6, 7, 8]),
        ([5, 6, 1, 8], 0.65, "surest", [2], [5, 6, 1, 8]),
    ]
    script = """return given.cases.map(([token_a, tau_keep, order]) => {
        const s = {token: [5, 6, 7, 8], conf: [0.9, 0.7, 0.6, 0.9], token_a, conf_a: [0.2, 0.3, 0.4, 0.3]};
        return [keepChain(s, [0, 1, 2, 3], tau_keep, order), s.token];
    });"""
    assert answer(tmp_path, html, script, cases=cases) == [list(case[3:]) for case in cases]


COUNTS = """
    return given.settings.map((d) => given.prompts.map((prompt) => {
        const {tokens, nfe} = generateOne(model, prompt, d);
        return [tokens, nfe.full, nfe.partial, nfe.commit];
    }));
"""


@in_browser
def test_tokens_and_counts_are_samples_for_each_order_decoder_and_gate(of_order, html_of_order, prompts, tmp_path):
    base = load_model(of_order, "cpu", torch.float32)
    joint = load_model(of_order, "cpu", torch.float32, of_order / "joint")
    jobs = [("one at a time", base, replace(NAMES, tau_m2t=1.0), "A")]
    for tau in GATES[base.cfg.order]:
        jobs.append((f"factorised {tau}", base, replace(NAMES, tau_m2t=tau), "A"))
        jobs.append((f"joint {tau}", joint, replace(NAMES, tau_m2t=tau, n_rounds=1), "joint"))
    settings = [engine_settings(d, stage, joint.tau_keep) for _, _, d, stage in jobs]
    watch = """
        let others = 0;
        const plain = keepChain;
        keepChain = (s, asked, tau_keep, order) => {
            const [first] = firstOf(s.conf_a, asked, order);
            others += s.token[first] !== s.token_a[first] ? 1 : 0;
            return plain(s, asked, tau_keep, order);
        };
    """
    script = f"{watch} const found = (() => {{ {COUNTS} }})(); return {{found, others}};"
    found = answer(tmp_path, html_of_order, script, settings=settings, prompts=prompts[:16])
    assert found["others"] > 0  # heads that wanted another first token are among them
    for (name, model, d, _), here in zip(jobs, found["found"], strict=True):
        outputs = generate(model, prompts[:16], d)
        expected = [[o.tokens, *(o.nfe[kind] for kind in ("full", "partial", "commit"))] for o in outputs]
        wrong = [prompt for prompt, a, b in zip(prompts, here, expected, strict=False) if a != b]
        assert len(here) == len(expected) and not wrong, (name, wrong)


def odd_model(**overrides) -> Model:
    """A small random model of bytes: group-limited routing with biases, two rounds of Stage B."""
    return tiny_model(vocab_size=272, eos_id=256, mask_id=257, max_len=128, tokenizer="bytes", **overrides)


@in_browser
@pytest.mark.parametrize("kind", ["Stage B", "LoRA", "bare"])
def test_other_checkpoints_decode_as_generate_one_does(kind, tmp_path):
    """Two rounds of Stage B, edits, blocks before the current one, biases; LoRA over them, from the left; one expert
    alone, tied."""
    extras = dict(qkv_bias=True, proj_bias=True)
    if kind == "LoRA":
        extras["order"] = "leftmost"
    if kind == "bare":
        extras = dict(n_shared=0, n_active=1, tied=True, n_rounds=1, n_dense=0, routed_scaling=1.0)
    model = odd_model(**extras)
    save_model(model, tmp_path / "base")
    adapter = None
    if kind == "LoRA":
        model.add_lora(4, 8, generator("tests", "lora"))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0.0, 0.1, generator=generator("tests", name))
        save_adapter(model, tmp_path / "adapter", {"base": str(tmp_path / "base"), "lora_r": 4, "lora_alpha": 8})
        adapter = str(tmp_path / "adapter")
    model = load_model(tmp_path / "base", "cpu", torch.float32, adapter)
    html = playground.page(str(tmp_path / "base"), adapter)
    K = model.cfg.n_rounds
    starts = [random_ids(1, n, n, 250)[0].tolist() for n in (3, 8, 13, 21)]
    settings = [
        (Decoding(gen_length=20, tau_m2t=0.4, tau_t2t=0.3, max_post_steps=2, n_rounds=K), "B"),
        (Decoding(gen_length=20, tau_m2t=0.4, tau_t2t=0.0, max_post_steps=3, n_rounds=0), "A"),
        (Decoding(gen_length=20, tau_m2t=-1.0, tau_t2t=None, eos_early_stop=True, n_rounds=K), "B"),
    ]
    check_logits(tmp_path, html, model, starts, settings[0][0], "B")
    found = answer(tmp_path, html, COUNTS, prompts=starts, settings=[engine_settings(*s) for s in settings])
    edits = 0
    for (d, _), here in zip(settings, found, strict=True):
        for prompt, counts in zip(starts, here, strict=True):
            tokens, nfe, states = generate_one(model, prompt, d)
            assert counts == [tokens, nfe["full"], nfe["partial"], nfe["commit"]]
            visible = [(a, b) for z, y in pairwise(states) for a, b in zip(z, y, strict=True) if a != 257]
            edits += sum(a != b for a, b in visible)
    assert edits > 100 or kind == "bare"


@in_browser
def test_of_equals_the_first_is_taken(tmp_path):
    """With a head of zeros every token of every mask is equally likely: token 0, at the leftmost mask."""
    model = odd_model(n_rounds=1)
    model.lm_head.weight.data.zero_()
    save_model(model, tmp_path)
    d = Decoding(gen_length=5, tau_m2t=0.5, tau_t2t=None, n_rounds=0)
    script = "return generateOne(model, given.prompt, given.d).steps.map((s) => [s.bundle, s.token[0]]);"
    found = answer(tmp_path, playground.page(str(tmp_path), None), script, prompt=[65] * 3, d=engine_settings(d, "A"))
    assert found == [[[t], 0] for t in range(3, 8)]


@in_browser
def test_records_are_those_of_sample_json(html, tokenizer, tmp_path, monkeypatch, capsys):
    """But for what only one of them holds: `passes`, and what the page adds."""
    names = ["BOX DRAWINGS", "GREEK SMALL", "latin"]
    argv = ["--ckpt", BASE, "--adapter", JOINT, "--device", "cpu", "--gen_length", 32, "--json"]
    argv += ["--tau_m2t", 0, "--tau_t2t", "none", *(a for name in names for a in ("--prompt", name))]
    lines = command_line(sample, monkeypatch, capsys, *argv)[1].splitlines()
    script = "return given.names.map((name) => recordOf(promptOf(name).prompt, decoding(data.decoders[1])));"
    for line, found in zip(lines, answer(tmp_path, html, script, names=names), strict=True):
        record = json.loads(line)
        del record["nfe"]["passes"]
        assert found["nfe"] == record.pop("nfe")
        assert found["counts"][-1] == [found["nfe"][kind] for kind in ("full", "partial", "commit")]
        assert found["pieces"].items() >= record.pop("pieces").items()
        for here, there in zip(found["steps"], record.pop("steps"), strict=True):
            for key in ("start", "before", "after", "bundle"):
                assert here[key] == there[key]
            assert np.allclose(here["conf"], there["conf"], atol=2e-4)
            assert [(f["at"], f["token"], f["token_a"]) for f in here["fill"]] == [
                (f["at"], f["token"], f["token_a"]) for f in there["fill"]
            ]
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
def test_the_pages_tokenizers_are_the_models(html, tokenizer, tmp_path):
    save_model(odd_model(), tmp_path / "bytes")
    pages = [(html, tokenizer), (playground.page(str(tmp_path / "bytes"), None), byte_tokenizer())]
    script = """return given.texts.map((text) => [encode(model, text), decode(model, encode(model, text))])
        .concat([[given.broken, decode(model, given.broken)]]);"""
    for page, tok in pages:
        broken = [*"é".encode()[:1], 65, *"\ufeff".encode()]
        names = list(unicode_names())[::97]
        found = answer(tmp_path, page, script, texts=TEXTS + names, broken=broken)
        assert found == [[ids, tok.decode(ids)] for ids in (*map(tok.encode, TEXTS + names), broken)]


@in_browser
def test_the_judge_knows_every_name_and_no_other(html, tmp_path):
    every = [name for code in range(0x110000) if (name := unicodedata.name(chr(code), ""))]
    real = every[::41] + [name for name in every if re.search(r"HANGUL|TANGUT|KHITAN|NUSHU|COMPATIBILITY", name)][::29]
    wrong = [name[:-1] for name in real] + [name + " SIGN" for name in real] + [name.lower() for name in real[::9]]
    wrong += ["", "NULL", "LINE FEED", "CJK UNIFIED IDEOGRAPH-4e00", "CJK UNIFIED IDEOGRAPH-04E00", "SPACE-0020"]
    wrong += ["CJK UNIFIED IDEOGRAPH-2B81E", "CJK UNIFIED IDEOGRAPH-33FF", "LATIN SMALL LETTER A-0061", "漢"]
    found = answer(tmp_path, html, "return given.names.map(verdict);", names=real + wrong)
    assert found == [verdict(name) for name in real + wrong]
    assert len(real) > 3000 and sum(exists(name) is None for name in wrong) > 5000


def test_no_two_names_share_a_hash_and_the_set_is_small():
    names = ["A", "B"]
    assert playground.hash_name("", 7) == 7 and playground.hash_name("a", 0x811C9DC5) == 0xE40C292C  # FNV-1a's own
    seed, hashes = playground.seed_without_collision(names)
    assert seed == 1 and len(set(hashes)) == 2
    data = playground.names_data()
    packed = base64.b64decode(data["hashes"])
    hashes = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    assert len(set(hashes)) == len(hashes) == sum(count for _, count in data["runs"])
    assert len(json.dumps(data)) < 300_000


def test_a_collision_is_seen(monkeypatch):
    monkeypatch.setattr(playground, "hash_name", lambda name, seed: seed if seed < 5 else len(name) + seed)
    assert playground.seed_without_collision(["A", "BB"])[0] == 5


# ---------------------------------------------------------------------------------------------------------------------
# the page


def test_the_page_is_one_file_that_asks_nothing_of_a_network(html):
    assert len(html.encode()) < 8e6
    script = html.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert (
        re.findall(r"https?:|\bsrc=|\bhref=|@import|url\(|\bimport\(|fetch\(|XMLHttp|WebSocket|innerHTML", script) == []
    )
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', html)[1]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert len((ROOT / "tools" / "engine.js").read_text().splitlines()) <= 420


@in_browser
def test_it_opens_on_what_goes_wrong_and_what_does_not(html, tokenizer, tmp_path):
    """Factorised no such character, by the other two one that exists; names and forwards are those of PyTorch."""
    seen = browse(tmp_path, html)
    opening = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])["prompt"]
    prompt = tokenizer.encode(opening)
    ways = {"factorised": (None, -1.0, 0), "joint head": (JOINT, -1.0, 1), "one at a time": (None, 1.0, 0)}
    names, steps = {}, []
    for way, (adapter, tau, n_rounds) in ways.items():
        model = shipped(adapter)
        (out,) = generate(model, [prompt], replace(NAMES, tau_m2t=tau, n_rounds=n_rounds), trace=True)
        names[way] = tokenizer.decode(prompt + out.tokens)
        steps.append(len(out.steps))
        said = verdict(names[way]).strip("()") if way == "factorised" else verdict(names[way])
        cost = round(in_full(out.nfe, model.partial_cost), 2)
        assert f"{said}, {cost:g} forward" in seen.text["runs"]
    assert [exists(name) is not None for name in names.values()] == [False, True, True]
    assert f"“{names['factorised']}” names no character" in seen.text["seen"]
    assert f"“{names['joint head']}” is {exists(names['joint head'])}" in seen.text["seen"]
    assert "They first differ after step " in " ".join(seen.text["differ"].split())
    last = max(steps)
    assert seen.text["now"] == f"step {last} of {last}" and seen.text["play"] == "Play"  # it played by itself
    marked = [c for c in seen.cells if "not as in another run" in c["aria-label"]]
    assert marked and all("differ" in c["class"] for c in marked)


@in_browser
def test_a_mask_shows_both_stages_and_moves_when_another_is_written(html, tokenizer, tmp_path):
    """By PyTorch: the five likeliest tokens of Stage A and of the joint head, before and after a token is put in."""
    prompt = tokenizer.encode("BOX DRAWINGS")
    light, heavy = (tokenizer.encode(f"BOX DRAWINGS {word}")[2] for word in ("LIGHT", "HEAVY"))
    read = """
        const lists = () => [...document.querySelectorAll(".lists > div")].map((list) =>
            [...list.querySelectorAll(".option")].map((b) => [b.querySelector(".name").textContent,
                b.querySelector(".share").textContent]));
        const cells = () => [...document.querySelectorAll(".block")[1].querySelectorAll(".cell")];
        document.getElementById("prompt").value = "BOX DRAWINGS";
        ask(0);
        cells()[2].click();
        const first = lists();
        cells()[3].click();
        const second = lists();
        cells()[2].click();
        [...document.querySelectorAll(".lists > div")[0].querySelectorAll(".option")]
            .find((b) => b.querySelector(".name").textContent === "·HEAVY").click();
        return {first, second, moved: chosen.at, third: lists(), at: now, label: cells()[2].getAttribute("aria-label"),
            counts: traces[1].counts.slice(0, 2), focused: document.activeElement.className,
            panel: document.getElementById("panel").textContent};
    """
    found = answer(tmp_path, html, read)

    def probabilities(z: list[int]) -> list[torch.Tensor]:
        """Of Stage A and of the joint head, at all masks of z that they look at: (8, V), (n, V)."""
        rows = []
        hook = model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out))
        generate(model, [z], replace(NAMES, gen_length=8 - len(z), tau_m2t=-1.0, n_rounds=1))
        hook.remove()
        return [rows[0][0].softmax(-1), rows[1].softmax(-1)]

    def five(p: torch.Tensor) -> list[list[str]]:
        top = p.topk(5)
        pieces = {tokenizer.eos_id: "∎"}
        names = [pieces.get(i, tokenizer.piece(i)) for i in top.indices.tolist()]
        return [[name, f"{share:.2f}"] for name, share in zip(names, top.values.tolist(), strict=True)]

    model = shipped(JOINT)
    a, b = probabilities(prompt)
    assert len(b) == 6  # every mask is in the bundle
    assert found["first"] == [five(a[2]), five(b[0])] and found["second"] == [five(a[3]), five(b[1])]
    assert light != heavy and found["first"][0][0][0] == "·LIGHT"

    after_a, after_b = probabilities([*prompt, heavy])
    moved = found["moved"]
    assert moved == 3 + int((after_a[3:] - a[3:]).abs().sum(-1).argmax())
    now = [[name, share.split(" → ")[-1]] for name, share in found["third"][0]]
    was = [share.split(" → ")[0] for _, share in found["third"][0]]
    assert now == five(after_a[moved])
    assert was == [f"{float(a[moved][i]):.2f}" for i in after_a[moved].topk(5).indices]
    assert [[name, share.split(" → ")[-1]] for name, share in found["third"][1]] == five(after_b[moved - 3])
    assert found["at"] == 1 and "written by hand" in found["label"] and found["counts"] == [[0, 0, 0], [0, 0, 0]]
    assert found["focused"] == "option" and f"position {moved}" in found["panel"]


@in_browser
def test_a_refused_mask_is_marked_and_said(html, tokenizer, prompts, tmp_path):
    """Of the first beginning at which the head refuses in its first step, by PyTorch."""
    d = replace(NAMES, tau_m2t=-1.0, n_rounds=1)
    outputs = generate(shipped(JOINT), prompts, d, trace=True)
    prompt, step = next((p, o.steps[0]) for p, o in zip(prompts, outputs, strict=True) if o.steps[0].get("refused"))
    script = f"document.getElementById('prompt').value = {json.dumps(tokenizer.decode(prompt))}; ask(1); play(false);"
    seen = browse(tmp_path, html, script=script)
    refused_cells = [c for c in seen.cells if "refused" in c["class"]]
    assert [int(c["data-at"]) for c in refused_cells] == [r["at"] for r in step["refused"]]
    assert all("mask" in c["class"].split() and c["mark"] == "?" for c in refused_cells)
    assert all("looked at, left masked" in c["aria-label"] for c in refused_cells)


@in_browser
def test_keys_step_but_not_where_one_types_and_all_is_labelled(html, tmp_path):
    script = """
        const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        const typed = document.getElementById("prompt");
        go(0);
        press(typed, "ArrowRight");
        press(document.getElementById("tau_m2t"), "End");
        const stays = now;
        press(document.body, "ArrowRight");
        press(document.querySelector("button.cell"), "ArrowRight");
        const steps = now;
        typed.value = "   ";
        document.getElementById("ask").requestSubmit();
        const wrong = document.getElementById("wrong").textContent;
        typed.value = "GREEK SMALL";
        document.getElementById("ask").requestSubmit();
        const unlabelled = [...document.querySelectorAll("button, input")].filter((e) => !e.hidden &&
            !e.labels?.length && !e.getAttribute("aria-label") && !e.textContent.trim());
        typed.focus();
        const outline = getComputedStyle(typed).outlineStyle + " " + getComputedStyle(typed).outlineWidth;
        return {stays, steps, wrong, after: document.getElementById("wrong").textContent, outline,
            prompt: decode(model, traces[0].prompt), unlabelled: unlabelled.length};
    """
    found = answer(tmp_path, html, script)
    assert (found["stays"], found["steps"]) == (0, 2)
    assert "at least one letter" in found["wrong"] and found["after"] == "" and found["prompt"] == "GREEK SMALL"
    assert found["unlabelled"] == 0 and found["outline"] == "solid 3px"


@in_browser
def test_the_gates_are_obeyed_and_any_text_is_text(html, tokenizer, tmp_path):
    script = """
        const set = (id, value) => {
            document.getElementById(id).value = value;
            for (const event of ["input", "change"]) document.getElementById(id).dispatchEvent(new Event(event));
        };
        document.getElementById("prompt").value = "BOX DRAWINGS";
        set("tau_m2t", 0.3);
        set("tau_keep", 0);
        const [factorised, joint] = traces.map((t) => [t.tokens, t.nfe.full, t.nfe.partial]);
        document.getElementById("prompt").value = given.hostile;
        ask();
        const shown = document.getElementById("seen").textContent;
        const cells = [...document.querySelectorAll(".block .token")].map((e) => e.textContent).join("");
        return {factorised, joint, shown, cells, bold: document.querySelectorAll("main b").length};
    """
    found = answer(tmp_path, html, script, hostile=HOSTILE)
    prompt = [tokenizer.encode("BOX DRAWINGS")]
    model = shipped(JOINT)
    model.tau_keep = 0.0
    for name, n_rounds in (("factorised", 0), ("joint", 1)):
        (out,) = generate(model, prompt, replace(NAMES, tau_m2t=0.3, n_rounds=n_rounds))
        assert found[name] == [out.tokens, out.nfe["full"], out.nfe["partial"]]
    assert HOSTILE in found["shown"] and HOSTILE in found["cells"] and found["bold"] == 0


@in_browser
def test_run_100_counts_what_exists_and_what_it_costs(html, tokenizer, prompts, tmp_path):
    few = prompts[:4]
    start = f"""
        play(false);
        data.beginnings.splice(0, Infinity, ...{json.dumps(few)});
        document.getElementById("run").click();
    """
    seen = browse(tmp_path, html, script=start)
    assert seen.text["progress"] == "4 of 4 names" and seen.text["run"] == "Run 4"
    assert seen.tags.count("svg") == 1 and seen.tags.count("circle") == 1 and seen.tags.count("path") == 1
    shared = {
        "factorised, all at once": (None, -1.0, 0),
        "joint head, all at once": (JOINT, -1.0, 1),
        "one at a time": (None, 1.0, 0),
    }
    table = seen.text["shares"]
    for label, (adapter, tau, n_rounds) in shared.items():
        model = shipped(adapter)
        outputs = generate(model, few, replace(NAMES, tau_m2t=tau, n_rounds=n_rounds))
        names = [tokenizer.decode(p + o.tokens) for p, o in zip(few, outputs, strict=True)]
        found = sum(exists(name) is not None for name in names)
        forwards = sum(in_full(o.nfe, model.partial_cost) for o in outputs) / 4
        low, high = (f"{100 * share:.0f}" for share in wilson(found, 4))
        assert f"{label}4{100 * found / 4:.0f} %{low}–{high} %{forwards:.2f}" in table, label


def phone_page(html: str, script: str) -> str:
    """The page in a frame as wide as a phone, since a window of Chromium's is never so narrow; then `script`."""
    inside = json.dumps(html.replace("</body>", f"<script>{script}</script></body>")).replace("<", "\\u003c")
    frame = '<p id="widths"></p><iframe width="360" height="740"></iframe>'
    measure = f"""const f = document.querySelector("iframe");
        f.onload = () => {{
            const e = f.contentDocument.documentElement;
            const cut = [...f.contentDocument.querySelectorAll("button")]
                .filter((b) => b.scrollWidth > b.clientWidth + 1);
            const chosen = f.contentDocument.querySelector(".chosen").getBoundingClientRect();
            const panel = f.contentDocument.getElementById("details").getBoundingClientRect();
            const hidden = chosen.bottom > panel.top && chosen.top < panel.bottom;
            document.getElementById("widths").textContent =
                `${{e.scrollWidth - e.clientWidth}} wider, ${{cut.length}} cut, hidden ${{hidden}}`;
        }};
        f.srcdoc = {inside};"""
    return f"<!DOCTYPE html><html><body>{frame}<script>{measure}</script></body></html>"


@in_browser
def test_a_phone_never_scrolls_sideways_and_sees_the_mask_it_asks_about(html, tmp_path):
    script = """play(false); go(0);
        document.querySelectorAll('.block')[2].querySelectorAll('.cell')[3].click();
        points = [{label: 'factorised, all at once', shape: 'triangle', run: 0, n: 9, found: 3, forwards: 14}];
        drawShares();"""
    seen = browse(tmp_path, phone_page(html, script))
    assert seen.text["widths"] == "0 wider, 0 cut, hidden false"


def luminance(colour: str) -> float:
    """WCAG's relative luminance of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_is_readable_in_both_modes(html):
    modes = re.findall(r":root \{([^}]*)\}", html)
    assert len(modes) == 2
    pairs = [("ink", "page"), ("soft", "page"), ("fill", "page"), ("edit", "page"), ("differ", "page"), ("ink", "cell")]
    pairs += [
        ("soft", "cell"),
        ("ink", "fill-back"),
        ("ink", "edit-back"),
        ("fill", "fill-back"),
        ("edit", "edit-back"),
    ]
    pairs += [("differ", "cell"), ("differ", "fill-back"), ("differ", "edit-back"), ("soft", "hatch")]
    for mode in modes:
        colours = dict(re.findall(r"--([\w-]+): (#\w+)", mode))
        for front, back in pairs:
            high, low = sorted((luminance(colours[front]), luminance(colours[back])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back, colours)


@in_browser
def test_dark_mode_is_the_systems(html, tmp_path):
    script = (
        "return matchMedia('(prefers-color-scheme: dark)').matches + getComputedStyle(document.body).backgroundColor;"
    )
    assert answer(tmp_path, html, script) == "falsergb(255, 255, 255)"
    dark = html.replace("(prefers-color-scheme: dark)", "(prefers-color-scheme: light)")  # as a dark system sees it
    assert answer(tmp_path, dark, "return getComputedStyle(document.body).backgroundColor;") == "rgb(20, 23, 27)"


# ---------------------------------------------------------------------------------------------------------------------
# the command line


@in_browser
def test_a_page_of_text_has_no_judge(tmp_path):
    save_model(odd_model(), tmp_path / "text")
    html = playground.page(str(tmp_path / "text"), None, "def <b>")
    seen = browse(tmp_path, html)
    assert "experiment" not in seen.text and "surprise" not in seen.text
    assert "factorised" in seen.text["runs"] and "Stage B" in seen.text["runs"] and "b" not in seen.tags[-50:]
    assert seen.at(4)[0]["token"] == "<"


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tiny_model(), tmp_path / "toy")
    save_model(odd_model(), tmp_path / "bytes")
    settings = json.loads((JOINT / "adapter.json").read_text())
    (tmp_path / "drafts").mkdir()
    (tmp_path / "drafts" / "adapter.safetensors").write_bytes((JOINT / "adapter.safetensors").read_bytes())
    write_json(tmp_path / "drafts" / "adapter.json", settings | {"extension": "beyond.chain"})
    call = lambda *argv: refused(playground, monkeypatch, capsys, *argv)  # noqa: E731
    assert "no checkpoint config" in call("--ckpt", "nowhere")
    assert "train.py --init_from DIR" in call("--ckpt", BASE, "--adapter", "nowhere")
    assert "wrong --ckpt for this adapter" in call("--ckpt", "bytes", "--adapter", JOINT)
    monkeypatch.setattr(playground, "load_model", lambda ckpt, *rest: load_model(ckpt, "cpu", torch.float32))
    assert "adapter of beyond.chain" in call("--ckpt", BASE, "--adapter", "drafts")
    monkeypatch.setattr(playground, "MOST_PARAMETERS", 1_000_000)
    assert "parameters: a page takes at most 1,000,000" in call("--ckpt", BASE)
    assert not list(tmp_path.glob("*.html"))


def test_one_command_writes_one_page(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "p.html"
    argv = ["--ckpt", BASE, "--prompt", "GREEK", "--out", out]
    code, said, _ = command_line(playground, monkeypatch, capsys, *argv)
    assert code == 0 and re.fullmatch(rf"wrote {out} \(\d\.\d MB\)\n", said)
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text(encoding="utf-8"))[1])
    assert data["prompt"] == "GREEK" and [d["name"] for d in data["decoders"]] == ["factorised", "one at a time"]
    assert {t["dtype"] for t in data["tensors"].values()} == {"bfloat16"}  # as in the file
