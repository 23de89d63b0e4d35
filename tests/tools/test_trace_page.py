"""The trace as a page, and the page in a browser where there is one. `pytest tests/tools/test_trace_page.py`"""

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from common import MASK, ROOT, command_line, random_ids, refused, tiny_model

import sample
from checkpoint import load_model, save_model
from lib import show
from lib.show import show_steps
from lib.tokenizer import byte_tokenizer
from sample import Decoding, generate
from tools import trace_page
from tools.playground_speed import BROWSER, QUIET
from tools.trace_page import booked, page, picture, states

HOSTILE = '</script><!--<b>&"'
WORDS = {0: "In", 1: "·the", 2: "·city", 3: "·of", 4: "·San", 5: "·York", 6: "·New", 7: HOSTILE, MASK: "▒"}
M = MASK


def planted(joint: bool) -> dict:
    """A run by hand: three prompt tokens, blocks of four. At step 2 the bundle {4, 5} is written, where Stage A says
    "San", "York": Stage B writes "New", "York", the base writes Stage A's words and edits the first one at step 4."""
    first = (6, 4) if joint else (4, 4)  # (written, Stage A's)
    steps = [
        one_step(0, [0, 1, 2, M], {3: (3, 3)}),
        one_step(4, [M, M, M, M], {4: first, 5: (5, 5)}),
        one_step(4, [first[0], 5, M, M], {6: (7, 7)}),
        one_step(4, [first[0], 5, 7, M], {7: (M, M)}, {} if joint else {4: 6}),
    ]
    nfe = {"full": 4, "partial": 4 if joint else 0, "commit": 1, "all": 6.0 if joint else 5.0}  # n/L = 1/4
    pieces = {str(i): w for i, w in WORDS.items()}
    return dict(text="", verdict=None, tokens=[3, 6, 5, 7, M], nfe=nfe, nfe_per_token=0.8, partial_cost=0.25,
                steps=steps, prompt=[0, 1, 2], mask_id=M, n_rounds=int(joint), pieces=pieces)  # fmt: skip


def one_step(
    start: int, before: list[int], fill: dict[int, tuple[int, int]], edit: dict[int, int] | None = None
) -> dict:
    """What sample.py records of a step: fill {position: (token, Stage A's)}, edit {position: token}."""
    new = {at: token for at, (token, _) in fill.items()} | (edit or {})
    return dict(
        start=start, before=before, after=[new.get(start + i, t) for i, t in enumerate(before)], bundle=list(fill),
        fill=[dict(at=at, token=b, conf=0.75, token_a=a, conf_a=0.5) for at, (b, a) in fill.items()],
        edit=[dict(at=at, old=before[at - start], token=t, conf=0.75) for at, t in (edit or {}).items()],
        conf=[0.75] * len(before),
    )  # fmt: skip


RUNS = [("ours", planted(True)), ("base", planted(False))]


# ---------------------------------------------------------------------------------------------------------------------
# tokens as they are shown, counts, divergence


def test_every_character_of_a_token_can_be_seen():
    tok = byte_tokenizer()
    ids = [*b" \n\t\r\0A<", *"é".encode(), tok.eos_id, 260]
    assert list(map(tok.piece, ids)) == [*"·↵⇥␍", "<U+0000>", "A", "<", "<C3>", "<A9>", "<|endoftext|>", "<260>"]
    words = {0: " e\u0301".encode(), 1: b"a\xe2\x82", 2: "\u0301\u202e".encode()}
    tok = replace(tok, token_bytes=words)
    assert list(map(tok.piece, words)) == ["·e\u0301", "a<E2><82>", "◌\u0301<U+202E>"]


@pytest.mark.parametrize("n_rounds", [0, 1, 2])
def test_running_counts_end_in_the_decoders_and_states_in_its_text(n_rounds):
    d = Decoding(gen_length=29, tau_m2t=0.3, tau_t2t=0.0, max_post_steps=3, n_rounds=n_rounds)
    prompts = [random_ids(1, n, 100)[0].tolist() for n in (3, 13, 16)]
    commits = 0
    for prompt, out in zip(prompts, generate(tiny_model(), prompts, d, trace=True), strict=True):
        record = dict(steps=out.steps, n_rounds=n_rounds, prompt=prompt, mask_id=MASK)
        assert booked(record)[-1] == [out.nfe["full"], out.nfe["partial"], out.nfe["commit"]]
        assert states(record, 48)[-1][: len(prompt) + len(out.tokens)] == prompt + out.tokens
        commits += out.nfe["commit"]
    assert commits > 0


def test_counts_and_states_by_hand():
    ours = planted(True)
    assert booked(ours) == [[0, 0, 0], [1, 1, 1], [2, 2, 1], [3, 3, 1], [4, 4, 1]]
    assert booked(dict(ours, n_rounds=2))[1:3] == [[1, 3, 1], [2, 5, 1]]  # the first block's second round, read again
    assert states(ours, 9)[2] == [0, 1, 2, 3, 6, 5, M, M, M]


def refusing() -> dict:
    """`planted` by a joint head: it looks at two masks of four, writes one and refuses "York" at the other; then one
    mask is alone in its bundle, and the head does not look."""
    steps = [
        one_step(0, [0, 1, 2, M], {3: (3, 3)}),
        one_step(4, [M, M, M, M], {4: (6, 4)}) | {"refused": [dict(at=5, token=5, conf=0.25)]},
        one_step(4, [6, M, M, M], {5: (5, 5)}),
    ]
    nfe = {"full": 3, "partial": 0.5, "commit": 1, "all": 4.125}
    return dict(planted(True), steps=steps, tokens=[3, 6, 5], nfe=nfe)


def test_a_joint_heads_looks_are_shares_of_a_block():
    assert booked(refusing()) == [[0, 0, 0], [1, 0, 1], [2, 0.5, 1], [3, 0.5, 1]]
    d = Decoding(gen_length=32, tau_m2t=0.1, tau_t2t=None)
    model = load_model(ROOT / "assets" / "names", "cpu", torch.float32, ROOT / "assets" / "names" / "joint")
    prompts = [random_ids(1, 2, n, 900)[0].tolist() for n in range(20)]
    refused = 0
    for prompt, out in zip(prompts, generate(model, prompts, d, trace=True), strict=True):
        record = dict(steps=out.steps, n_rounds=1, prompt=prompt, mask_id=1023)
        refused += sum(len(s.get("refused", [])) for s in out.steps)
        if any("refused" in s for s in out.steps):
            assert booked(record)[-1] == [out.nfe["full"], out.nfe["partial"], out.nfe["commit"]]
    assert refused > 0


def test_steps_as_lines_by_hand(capsys):
    record = planted(True)
    show_steps(dict(record, steps=record["steps"][1:2]))
    assert capsys.readouterr().out.splitlines() == [
        "step   1 block 4: ▒▒▒▒",
        "    fill     4 '·New' 0.75   (A: ·San 0.50)",
        "    fill     5 '·York' 0.75",
        "    left 2 masked",
    ]
    show_steps(dict(record, steps=planted(False)["steps"][3:]))
    assert "    edit     4 '·San' -> '·New' 0.75" in capsys.readouterr().out.splitlines()


def test_steps_on_a_terminal_by_hand(monkeypatch, capsys):
    """The second block of `ours`: what is written is inverse, and Stage A's "San" struck out beside Stage B's "New"."""
    record = dict(planted(True), steps=planted(True)["steps"][:2])
    monkeypatch.setattr(show.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    styled = lambda style, text: "".join(f"\x1b[{style}m{c}\x1b[0m" for c in text)  # noqa: E731
    lines = [  # "before" and "after" of two steps
        "step   1  In the city" + styled(7, "▒"),
        "step   1  In the city" + styled(7, " of"),
        "step   2  " + styled(7, "▒▒") + "▒▒",
        "step   2  " + styled(7, " New") + styled(9, "(A: San)") + styled(7, " York") + "▒▒",
    ]
    show.play(record)
    shown = ["\r\x1b[K\x1b[?7l" + line + "\x1b[?7h" for line in lines]
    assert capsys.readouterr().out == "".join(shown[:2]) + "\n" + "".join(shown[2:]) + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "22")
    show.play(record)
    assert "step   2   New(A: San)\x1b" in capsys.readouterr().out  # cut, and in plain letters


# ---------------------------------------------------------------------------------------------------------------------
# the page as a file


class Page(HTMLParser):
    """What a browser would see of a page: its tags, the text of each element with an id, the cells of the runs."""

    EMPTY = {"meta", "input"}

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.open, self.text, self.cells = [], [], {}, []
        self.feed(html)
        assert self.open == []  # every element was closed, in order

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        if tag == "button" and "cell" in attrs.get("class", "").split():
            run = [a["class"] for _, a in self.open if "block" in a.get("class", "").split()]
            self.cells.append(dict(attrs, block=run[0]))
        if tag not in self.EMPTY:
            self.open.append((tag, attrs))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        around = [attrs for _, attrs in self.open]
        if any("hidden" in attrs for attrs in around):
            return
        for attrs in around:
            if "id" in attrs:
                self.text[attrs["id"]] = self.text.get(attrs["id"], "") + data
        if any("data-at" in attrs for attrs in around):
            self.cells[-1][around[-1]["class"]] = data  # of the parts of a cell: mark, token, other

    def at(self, position: int) -> list[dict]:
        """The cells of one position, one a run."""
        return [c for c in self.cells if c["data-at"] == str(position)]


def test_page_is_self_contained_and_holds_the_runs():
    html = page(RUNS)
    assert re.findall(r"https?:|\bsrc=|\bhref=|@import|url\(|\bimport\b|fetch|innerHTML", html) == []
    assert "<b>" not in html and "<!--" not in html and html.count("</script>") == 2
    seen = Page(html)
    assert seen.tags.count("script") == 2
    data = json.loads(seen.text["data"])
    for shown, (label, record) in zip(data["traces"], RUNS, strict=True):
        assert shown == record | {"label": label, "counts": booked(record)}


def test_what_sample_prints_becomes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = ["--gen_length", 9, "--device", "cpu", "--json"]
    for tokenizer, prompt in (("bytes", ["--prompt", "a <b>"]), ("toy", ["--prompt_ids", "5,9"])):
        model = tiny_model(vocab_size=272, eos_id=256, mask_id=257, max_len=128, tokenizer=tokenizer)
        save_model(model, tmp_path / tokenizer)
        code, out, err = command_line(sample, monkeypatch, capsys, "--ckpt", tokenizer, *run, *prompt)
        assert code == 0, err
        (tmp_path / "run.json").write_text(out)
        assert command_line(trace_page, monkeypatch, capsys, "run.json", "--out", f"pages/{tokenizer}.html")[0] == 0
        record = json.loads(out)
        assert (tmp_path / "pages" / f"{tokenizer}.html").read_text() == page([("run", record)])
        shown = {*record["prompt"], *(i for s in record["steps"] for i in (*s["before"], *s["after"]))}
        shown |= {f["token_a"] for s in record["steps"] for f in s["fill"]}
        assert shown <= set(map(int, record["pieces"])) and record["pieces"]["257"] == "▒"
        some = {"97": "a", "32": "·"} if tokenizer == "bytes" else {"5": "5", "9": "9"}
        assert record["pieces"].items() >= some.items()


# ---------------------------------------------------------------------------------------------------------------------
# the picture

SVG = "{http://www.w3.org/2000/svg}"


def frames_of(svg: str) -> dict[str, list[tuple[str, str]]]:
    """Id of each frame -> what is drawn in it, in order: (class, text)."""
    root = ElementTree.fromstring(svg)
    assert {e.tag for e in root.iter()} == {SVG + tag for tag in ("svg", "title", "style", "rect", "text", "g")}
    assert not any(key.startswith("on") or "href" in key for e in root.iter() for key in e.attrib)
    return {g.get("id"): [(e.get("class"), e.text) for e in g] for g in root.iter(SVG + "g")}


def test_picture_holds_every_state_in_its_frame():
    """Position after position: a token where there is one, a box for a mask, in all blocks that are open by then."""
    svg = picture(RUNS)
    assert "</script>" not in svg and "url(" not in svg and "@import" not in svg
    frames = frames_of(svg)
    assert list(frames) == [f"run{k}step{n}" for k in (0, 1) for n in range(5)]
    for k, (_, record) in enumerate(RUNS):
        for n, ids in enumerate(states(record, 8)):
            opened = ids[: 4 if n < 2 else 8]
            words = [WORDS[i].strip("·") for i in opened if i != M]
            drawn = frames[f"run{k}step{n}"]
            assert [text for kind, text in drawn if kind in ("prompt", "token")] == words
            boxes = [kind for kind, _ in drawn if kind in ("mask", "fill", "edit")]
            step = record["steps"][n - 1] if n else {"fill": [], "edit": []}
            assert boxes.count("fill") == len(step["fill"]) and boxes.count("edit") == len(step["edit"])
            assert boxes.count("mask") == opened.count(M) - sum(f["token"] == M for f in step["fill"])


def test_picture_by_hand():
    """Step 2 of `ours`: two forwards, a commit and two quarters of one so far; "New York" over the struck-out "San"."""
    frames = frames_of(picture(RUNS))
    assert frames["run0step2"] == [
        ("soft end", "3.5 forwards"), ("prompt", "In"), ("prompt", "the"), ("prompt", "city"), ("token", "of"),
        ("fill", None), ("token", "New"), ("wish", "San"), ("fill", None), ("token", "York"), ("mask", None),
        ("mask", None),
    ]  # fmt: skip
    assert [frames[f"run1step{n}"][0][1] for n in range(5)] == [
        "0 forwards", "2 forwards", "3 forwards", "4 forwards", "5 forwards"
    ]  # fmt: skip
    assert ("edit", None) in frames["run1step4"] and not any("wish" in drawn for drawn in frames["run1step4"])


def test_picture_runs_at_one_pace_for_every_forward():
    """A second of masks, 0.6 a forward, four of the end: 8.6 seconds for six forwards, 8 for five if alone."""
    ours, base = RUNS
    assert "animation-duration: 8.60s" in picture([ours, base]) and "animation-duration: 8.00s" in picture([base])
    times = re.findall(r"@keyframes run0step\d { (.*?) } #", picture([base]))
    at = lambda seconds: f"{100 * seconds / 8:.3f}%"  # noqa: E731
    visible, hidden = "{ visibility: visible }", "{ visibility: hidden }"
    assert times[0] == f"0.000% {visible} {at(2.2)} {hidden}"
    assert times[1] == f"0.000% {hidden} {at(2.2)} {visible} {at(2.8)} {hidden}"  # the first step and its commit
    assert times[4] == f"0.000% {hidden} {at(4.0)} {visible}" and len(times) == 5


def test_words_in_a_picture_never_overlap():
    """From left to right, each begins behind the last one's end; lines end inside the page."""
    wide = dict(planted(True), pieces=WORDS | {str(i): w * 8 for i, w in WORDS.items()})
    for record in (planted(True), wide):
        for g in ElementTree.fromstring(picture([("ours", record)])).iter(SVG + "g"):
            for kinds in (("prompt", "token"), ("wish",)):
                ends = {}
                for e in (e for e in g if e.get("class") in kinds):
                    x, y, length = float(e.get("x")), e.get("y"), float(e.get("textLength"))
                    assert x > ends.get(y, 0)
                    ends[y] = x + length
                    assert ends[y] <= 780 or len(e.text) > 79  # a word wider than the page has a line of its own


def test_a_picture_of_names_ends_in_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = ["--ckpt", ROOT / "assets" / "names", "--device", "cpu", "--prompt", "CANADIAN", "--json"]
    records = {}
    for name, tau in (("one_at_a_time", 1), ("factorised", -1)):
        out = command_line(sample, monkeypatch, capsys, *names, "--tau_m2t", tau)[1]
        (tmp_path / f"{name}.json").write_text(out, encoding="utf-8")
        records[name] = json.loads(out)
    argv = ["one_at_a_time.json", "factorised.json", "--out", "watch.svg"]
    assert command_line(trace_page, monkeypatch, capsys, *argv)[:2] == (0, "wrote watch.svg\n")
    svg = (tmp_path / "watch.svg").read_text(encoding="utf-8")
    frames = frames_of(svg)

    # one token a step, and everything in one; the verdicts are of one that exists and of one that does not
    slow, fast = records.values()
    steps = len(slow["steps"])
    assert steps == slow["nfe"]["full"] > len(fast["steps"]) == 1
    assert "(U+" in slow["verdict"] and fast["verdict"] == "(no such character)"
    last = frames[f"run0step{steps}"]
    assert last[-1] == ("yes", slow["verdict"]) and last[0][1] == f"{slow['nfe']['all']:g} forwards"
    assert frames["run1step1"][-1] == ("no", "no such character") and frames["run1step1"][0][1] == "1 forward"
    assert f"one at a time: {slow['nfe']['all']:g} forwards, {slow['verdict']}; factorised: 1 forwards" in svg


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = json.dumps(planted(True))
    files = {
        "good": good,
        "text": "def f(x):\n",
        "two": good + "\n" + good,
        "none": "",
        "list": "[1]",
        "old": json.dumps({k: v for k, v in planted(True).items() if k != "pieces"}),
        "other": json.dumps(dict(planted(True), prompt=[0, 1, 3])),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for argv, words in (
        (["nowhere"], "nowhere"),
        (["text"], "sample.py --json"),
        (["two"], "holds 2 runs"),
        (["none"], "holds 0 runs"),
        (["list"], "no trace"),
        (["old"], "no trace"),
        (["good", "other"], "different prompts"),
        (["good", "good", "good"], "3 runs"),
        (["good", "--out", "text/t.html"], "cannot write"),
    ):
        assert words in refused(trace_page, monkeypatch, capsys, *argv)


# ---------------------------------------------------------------------------------------------------------------------
# the page in a browser

in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


def browse(folder, html: str, where: str = "", script: str = "") -> Page:
    """The page as it stands after `script` has run at the address `where`."""
    file = folder / "page.html"
    file.write_text(html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    argv = [BROWSER, *QUIET.split(), f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*argv, file.as_uri() + where], capture_output=True, text=True, encoding="utf-8", timeout=900)
    return Page(done.stdout)


FIRST_DIFFERENCE = {
    "an edit brings it back": (planted(True), planted(False), "They first differ after step 2, and agree in the end."),
    "never": (planted(True), planted(True), "The runs never write different tokens."),
    # a run that ends first waits, and a mask is no token: runs go at different paces
    "masks": (
        dict(planted(True), steps=planted(True)["steps"][:2]),
        planted(True),
        "The runs never write different tokens.",
    ),
    "in the end": (
        dict(planted(True), steps=[*planted(True)["steps"][:3], one_step(4, [6, 5, 7, M], {7: (0, 0)}, {4: 1, 5: 1})]),
        dict(planted(False), steps=[*planted(False)["steps"][:3], one_step(4, [4, 5, 7, M], {7: (2, 2)}, {4: 6})]),
        "They first differ after step 2, in the end at 4–5, 7.",
    ),
}


@in_browser
@pytest.mark.parametrize("a, b, sentence", FIRST_DIFFERENCE.values(), ids=FIRST_DIFFERENCE)
def test_browser_says_where_runs_first_hold_different_tokens(a, b, sentence, tmp_path):
    seen = browse(tmp_path, page([("ours", a), ("base", b)]))
    assert " ".join(seen.text["differ"].split()) == sentence


@in_browser
def test_browser_shows_what_the_stages_disagree_on_and_where_the_runs_part(tmp_path):
    seen = browse(tmp_path, page(RUNS), "#step=2")
    assert seen.text["now"] == "step 2 of 4"
    ours, base = seen.at(4)
    assert (ours["token"], ours["other"], ours["mark"]) == ("·New", "A ·San", "F")
    assert ours["class"].split() == ["cell", "fill", "bundle", "differ"]
    assert "step 2: wrote ·New 0.75, Stage A alone ·San 0.50" in ours["aria-label"] == ours["title"]
    assert (base["token"], base.get("other"), base["class"]) == ("·San", None, ours["class"])
    assert [c["class"] for c in seen.at(5)] == ["cell fill bundle"] * 2 and "other" not in seen.at(5)[0]
    assert [c["class"] for c in seen.at(6)] == ["cell mask"] * 2
    assert [c["class"] for c in seen.at(0) + seen.at(3)] == ["cell prompt"] * 2 + ["cell settled"] * 2
    assert seen.text["jump"] == "step 2" and "and agree in the end" in seen.text["differ"]
    assert "2 full, 2 partial, 1 commit; NFE/token 0.67" in seen.text["runs"]  # tokens 3, 4 and 5 in two forwards
    assert "2 full, 0 partial, 1 commit" in seen.text["runs"] and "2 filled, 0 edited, 2 left" in seen.text["runs"]


@in_browser
def test_browser_shows_edits_masks_written_as_masks_and_any_text_as_text(tmp_path):
    seen = browse(tmp_path, page(RUNS[1:]), "#step=4")
    (edited,), (hostile,), (masked,) = seen.at(4), seen.at(6), seen.at(7)
    assert (edited["token"], edited["mark"], edited["class"]) == ("·New", "E", "cell edit")
    assert "step 2: wrote ·San 0.75; step 4: ·San became ·New 0.75" in edited["aria-label"]
    assert hostile["token"] == HOSTILE and "b" not in seen.tags
    assert masked["class"] == "cell mask bundle" and "mark" not in masked
    assert "1 filled, 1 edited, 1 left masked" in seen.text["runs"] and "NFE/token 0.80" in seen.text["runs"]
    assert "differ" not in seen.text  # one run has none to differ from


@in_browser
def test_browser_shows_what_a_joint_head_refused(tmp_path):
    (cell,) = browse(tmp_path, page([("ours", refusing())]), "#step=2").at(5)
    assert cell["class"].split() == ["cell", "refused", "mask"] and cell["mark"] == "?"
    assert "looked at, left masked" in cell["aria-label"] and "unsure of ·York 0.25" in cell["aria-label"]
    (cell,) = browse(tmp_path, page([("ours", refusing())]), "#step=3").at(5)
    assert cell["class"].split() == ["cell", "fill", "bundle"]


@in_browser
def test_browser_ends_in_the_verdict(tmp_path):
    runs = [
        ("ours", dict(planted(True), verdict="û (U+00FB)")),
        ("base", dict(planted(False), verdict="(no such character)")),
    ]
    seen = browse(tmp_path, page(runs), "#step=4").text["runs"]
    assert "✓ û (U+00FB), 6 forwards" in seen and "✗ no such character, 5 forwards" in seen
    seen = browse(tmp_path, page(runs), "#step=2").text["runs"]
    assert "3.5 forwards so far" in seen and "û" not in seen and "character" not in seen  # a partial one is n/L = 1/4


KEY = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}));"
SLIDE = "const s = document.getElementById('slider'); s.value = 3; s.dispatchEvent(new Event('input'));"
GESTURES = {
    "nothing": ("", 0),
    "right, right, left": (KEY % "ArrowRight" * 2 + KEY % "ArrowLeft", 1),
    "left of the start": (KEY % "ArrowLeft", 0),
    "end, right": (KEY % "End" + KEY % "ArrowRight", 4),
    "end, home": (KEY % "End" + KEY % "Home", 0),
    "slider": (SLIDE, 3),
    "first difference": ("document.getElementById('jump').click()", 2),
    "play to the end": ("document.getElementById('play').click()", 4),
}


@in_browser
@pytest.mark.parametrize("script, expected", GESTURES.values(), ids=GESTURES)
def test_browser_steps(script, expected, tmp_path):
    seen = browse(tmp_path, page(RUNS), "", script)
    assert seen.text["now"] == f"step {expected} of 4" and seen.text["play"] == "Play"
    opened = ["unopened" not in c["block"] for c in seen.at(4)]
    assert opened == [expected >= 2] * 2  # the second block begins with step 2


@in_browser
def test_browser_a_tap_shows_details_that_follow_the_steps(tmp_path):
    tap = "document.querySelector('button[data-at=\"4\"]').click();"
    seen = browse(tmp_path, page(RUNS), "#step=1", tap)
    assert seen.text["panel"] == "ours, position 4: ▒ (masked)"
    seen = browse(tmp_path, page(RUNS), "#step=1", tap + KEY % "ArrowRight")
    words = "ours, position 4: ·New (filled now; candidate 0.75)step 2: wrote ·New 0.75, Stage A alone ·San 0.50"
    assert seen.text["panel"] == words and "chosen" in seen.at(4)[0]["class"]


@in_browser
def test_browser_a_phone_never_scrolls_sideways_and_no_token_is_cut(tmp_path):
    """A token wider than the screen wraps. In a frame, since a window of Chromium's is never as narrow as a phone."""
    record = planted(True)
    wide = dict(record, pieces=record["pieces"] | {"5": "wide" * 50})
    frame = '<!DOCTYPE html><html><body><p id="widths"></p><iframe width="390" height="844"></iframe></body></html>'
    script = """const f = document.querySelector("iframe");
        f.onload = () => {
            const page = f.contentDocument, e = page.documentElement;
            page.getElementById("last").click();
            const cut = [...page.querySelectorAll("button.cell")].filter((c) => c.scrollWidth > c.clientWidth);
            document.getElementById("widths").textContent = `${e.scrollWidth - e.clientWidth}, ${cut.length} cut`;
        };
        f.srcdoc = """ + json.dumps(page([("ours", wide), RUNS[1]])).replace("<", "\\u003c")
    seen = browse(tmp_path, frame, script=script)
    assert seen.text["widths"] == "0, 0 cut"
