"""The trace of a decode, to read: as lines of text, or as one HTML page that needs nothing but itself.

The page steps through the denoising steps of a run: what was filled, edited and left, with which confidence, the
bundle, both choices where Stage A and Stage B disagree, and the forwards counted so far. Two runs of the same prompt
stand side by side, step together, and say where they first differ. `page.html#step=3` opens it at step 3.

It refuses files that `sample.py --json` did not write, more than one prompt a file, more than two files, and two runs
of different prompts.

    python sample.py --prompt "def " --trace_html trace.html                        # the page of this run
    python sample.py --prompt "def " --json > ours.json                             # or keep the runs, and compare two
    python sample.py --prompt "def " --json --n_rounds 0 > base.json
    python trace_page.py ours.json base.json --out trace.html
"""

import json
import unicodedata
from pathlib import Path

from data import Parser, Tokenizer, fail, replace_file

# A record is one line of `sample.py --json`. Steps are counted from 1; "after step 0" is the prompt and masks.

GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
KEYS = {"tokens", "nfe", "nfe_per_token", "steps", "prompt", "mask_id", "n_rounds", "pieces"}


# ---------------------------------------------------------------------------------------------------------------------
# tokens as they are shown


def pieces(prompt: list[int], steps: list[dict], tokenizer: Tokenizer | None, mask_id: int) -> dict[str, str]:
    """Each id that a trace shows, as a JSON key -> its text. Toys have no tokenizer, their tokens are numbers."""
    ids = {*prompt, *(i for s in steps for i in (*s["before"], *s["after"], *(f["token_a"] for f in s["fill"])))}
    shown = {str(i): str(i) if tokenizer is None else piece(i, tokenizer) for i in sorted(ids)}
    return shown | {str(mask_id): "▒"}


def piece(token: int, tokenizer: Tokenizer) -> str:
    """A token's text with every character visible, bytes that are no UTF-8 as <E2>, special tokens by name."""
    raw = tokenizer.token_bytes.get(token, b"")
    if not raw:
        return {i: name for name, i in tokenizer.special.items()}.get(token, f"<{token}>")
    text = raw.decode("utf-8", errors="surrogateescape")
    carrier = "◌" if unicodedata.combining(text[0]) else ""  # for an accent whose letter is in another token
    return carrier + "".join(map(visible, text))


def visible(char: str) -> str:
    if 0xDC80 <= ord(char) <= 0xDCFF:  # surrogateescape's stand-in for one byte
        return f"<{ord(char) - 0xDC00:02X}>"
    if char in GLYPHS or char.isprintable():
        return GLYPHS.get(char, char)
    return f"<U+{ord(char):04X}>"


def show_trace(record: dict) -> None:
    """One line a step for the block, and one for each token written: Stage A's choice where Stage B's differs."""

    def name(token: int) -> str:
        return record["pieces"][str(token)]

    for n, s in enumerate(record["steps"], 1):
        print(f"step {n:3} block {s['start']}: {''.join(map(name, s['before']))}")
        for f in s["fill"]:
            other = f"   (A: {name(f['token_a'])} {f['conf_a']:.2f})" if f["token_a"] != f["token"] else ""
            print(f"    fill {f['at']:5} {name(f['token'])!r} {f['conf']:.2f}{other}")
        for e in s["edit"]:
            print(f"    edit {e['at']:5} {name(e['old'])!r} -> {name(e['token'])!r} {e['conf']:.2f}")
        print(f"    left {s['after'].count(record['mask_id'])} masked")


# ---------------------------------------------------------------------------------------------------------------------
# what the page needs to know beyond the records


def booked(record: dict) -> list[list[int]]:
    """[full, partial, commit] forwards after each step, in the way sample.py books them."""
    steps, K = record["steps"], record["n_rounds"]
    counts = [[0, 0, 0]]
    for s, following in zip(steps, [*steps[1:], None], strict=True):
        full, partial, commit = counts[-1]
        full, partial = full + 1, partial + K * bool(s["bundle"])
        if following and following["start"] != s["start"]:  # the next block will read this one
            partial, commit = partial + max(0, K - 1), commit + (s["before"] != s["after"])
        counts.append([full, partial, commit])
    return counts


def states(record: dict, length: int) -> list[list[int]]:
    """The sequence after step 0, 1, ...: prompt, what has been written, and masks up to `length` positions."""
    z = record["prompt"] + [record["mask_id"]] * (length - len(record["prompt"]))
    found = [z]
    for s in record["steps"]:
        z = z[: s["start"]] + s["after"] + z[s["start"] + len(s["after"]) :]
        found.append(z)
    return found


def divergence(a: dict, b: dict) -> tuple[int | None, str]:
    """The first step after which two runs differ (None: never), and the positions that differ in the end, "4, 6–9".

    Steps are matched by number; the run that ends first waits in its last state.
    """
    length = max(s["start"] + len(s["after"]) for r in (a, b) for s in r["steps"])
    of_a, of_b = states(a, length), states(b, length)
    n = max(len(of_a), len(of_b))
    of_a, of_b = of_a + of_a[-1:] * (n - len(of_a)), of_b + of_b[-1:] * (n - len(of_b))
    first = next((k for k in range(n) if of_a[k] != of_b[k]), None)
    differ = [x != y for x, y in zip(of_a[-1], of_b[-1], strict=True)] + [False]
    starts = [i for i, d in enumerate(differ) if d and not (i and differ[i - 1])]
    spans = [(i, differ.index(False, i) - 1) for i in starts]
    return first, ", ".join(f"{i}–{j}" if j > i else str(i) for i, j in spans)


def page(runs: list[tuple[str, dict]]) -> str:
    """The HTML of one run, or of two of the same prompt; each run is (label, record)."""
    data = {"traces": [dict(record, label=label, counts=booked(record)) for label, record in runs]}
    if len(runs) == 2:
        data["diverged"], data["differ"] = divergence(runs[0][1], runs[1][1])
    # inside <script>, "<" could end the element; as an escape it is the same JSON
    return PAGE.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))


def write_page(path: Path, runs: list[tuple[str, dict]]) -> None:
    replace_file(path, lambda p: p.write_text(page(runs), encoding="utf-8"))


PAGE = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Trace</title>
<style>
:root {
  --page: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d0d5dc; --cell: #f4f5f7; --hatch: #dfe3e8;
  --fill: #0a5ca8; --fill-back: #dcebfa; --edit: #a84300; --edit-back: #fde9d9; --differ: #8a1c7c;
}
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --ink: #e6e9ee; --soft: #9ba5b1; --line: #3a424d; --cell: #20252c; --hatch: #2d343d;
  --fill: #79bcff; --fill-back: #15334f; --edit: #ffab6e; --edit-back: #4a2a12; --differ: #f2a0e6;
} }
* { box-sizing: border-box; }
html { scroll-padding: 8rem 0 6rem; }
body { margin: 0; color: var(--ink); background: var(--page); font: 16px/1.45 system-ui, sans-serif; }
header, main, footer, .bar > div, #panel { max-width: 75rem; margin: 0 auto; padding: 0 1rem; }
h1 { font-size: 1.2rem; margin: 1rem 0 .25rem; }
h2 { font-size: 1rem; margin: 0; }
h3 { font-size: .8rem; font-weight: 400; color: var(--soft); margin: 0 0 .3rem; }
p { margin: 0; overflow-wrap: anywhere; }
.counts, footer { color: var(--soft); font-size: .875rem; }
.bar, #details { position: sticky; z-index: 1; background: var(--page); border: 0 solid var(--line); }
.bar { top: 0; border-bottom-width: 1px; }
.bar > div { padding-top: .6rem; padding-bottom: .5rem; }
.buttons { display: flex; flex-wrap: wrap; align-items: center; gap: .4rem; margin-bottom: .5rem; }
.buttons button { min-width: 2.4rem; padding: .3rem .5rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--cell); font: inherit; color: inherit; cursor: pointer; }
.buttons #play { min-width: 4.2rem; }
#jump { padding: 0; border: 0; background: none; font: inherit; color: var(--differ); text-decoration: underline;
  cursor: pointer; }
#now { margin-left: .4rem; }
#now, .counts { font-variant-numeric: tabular-nums; }
.track { position: relative; }
#slider { display: block; width: 100%; height: 1.6rem; margin: 0; accent-color: var(--fill); }
#flag { position: absolute; top: -.4rem; color: var(--differ); font-size: .7rem; transform: translateX(-50%); }
:focus-visible { outline: 3px solid var(--fill); outline-offset: 2px; }
.row { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); gap: .75rem 2rem;
  padding: .6rem 0; border-top: 1px solid var(--line); }
.row:not(.row ~ .row) { border: 0; }
.row:has(.block):not(:has(.block:not(.unopened))), .unopened *, .who { display: none; }
.current h3 { color: var(--ink); font-weight: 600; }
.cells { display: flex; flex-wrap: wrap; gap: 9px; padding: 4px; }
.cell { position: relative; min-width: 2.05rem; min-height: 2.9rem; max-width: 100%; padding: .8rem .3rem .45rem;
  border: 1px solid var(--line); border-radius: 5px; background: var(--cell); color: inherit; text-align: center;
  font: 1rem/1.1 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow: hidden; }
button.cell { cursor: pointer; }
.token, .other { display: block; white-space: pre-wrap; overflow-wrap: anywhere; }
.other { font-size: .7rem; margin-top: .2rem; padding-top: .15rem; border-top: 1px dotted; color: var(--ink); }
.mark { position: absolute; top: 1px; left: 3px; font-size: .65rem; font-weight: 700; }
.level { position: absolute; left: 0; bottom: 0; height: 3px; background: currentColor; opacity: .55; }
.differ::after { content: "≠"; position: absolute; top: 0; right: 3px; font-size: .8rem; color: var(--differ); }
.prompt { border-color: transparent transparent var(--soft); border-radius: 0; background: none; color: var(--soft); }
.mask { border: 1px dashed var(--soft); color: var(--soft);
  background: repeating-linear-gradient(135deg, var(--hatch) 0 4px, transparent 4px 8px); }
.fill { border: 2px solid var(--fill); background: var(--fill-back); color: var(--fill); }
.edit { border: 4px double var(--edit); background: var(--edit-back); color: var(--edit); }
.fill .token, .edit .token { color: var(--ink); font-weight: 600; }
.bundle { box-shadow: 0 0 0 2px var(--page), 0 0 0 4px var(--ink); }
.chosen .token { text-decoration: underline 2px; text-underline-offset: 4px; }
#details { bottom: 0; border-top-width: 1px; }
#panel { min-height: 4rem; max-height: 30vh; padding: .5rem 1rem; overflow: auto; font-size: .875rem; }
.legend { display: flex; flex-wrap: wrap; gap: .7rem 1.4rem; margin: .9rem 0; padding: 0 4px; list-style: none; }
.legend li { display: flex; align-items: center; gap: .6rem; }
footer { border-top: 1px solid var(--line); }
footer p { margin-bottom: 1rem; }
[hidden] { display: none !important; }
@media (max-width: 47rem) {
  .row { grid-template-columns: minmax(0, 1fr); }
  .who { display: inline; }
}
</style>
</head>
<body>
<header>
  <h1 id="title">Trace</h1>
  <p id="differ" hidden>They first differ after <button type="button" id="jump"></button>, <span id="ending"></span></p>
</header>
<section class="bar" aria-label="steps"><div>
  <div class="buttons">
    <button type="button" id="first" aria-label="start">|‹</button>
    <button type="button" id="back" aria-label="step back">‹</button>
    <button type="button" id="play">Play</button>
    <button type="button" id="next" aria-label="step on">›</button>
    <button type="button" id="last" aria-label="end">›|</button>
    <output id="now" for="slider"></output>
  </div>
  <div class="track">
    <span id="flag" aria-hidden="true" hidden>▼</span>
    <input type="range" id="slider" min="0" value="0" aria-label="denoising step">
  </div>
</div></section>
<main id="runs"><noscript><p>This page draws the trace with JavaScript, which is switched off.</p></noscript></main>
<section id="details" aria-label="token" aria-live="polite"><div id="panel"></div></section>
<footer>
  <ul class="legend" aria-label="legend">
    <li><span class="cell prompt"><span class="token">x</span></span> prompt</li>
    <li><span class="cell mask"><span class="token">▒</span></span> mask</li>
    <li><span class="cell fill bundle"><span class="mark">F</span><span class="token">x</span></span>
      filled in this step; the ring is the bundle, written together</li>
    <li><span class="cell fill bundle"><span class="mark">F</span><span class="token">x</span><span
      class="other">A y</span></span> Stage A alone would have written y</li>
    <li><span class="cell edit"><span class="mark">E</span><span class="token">x</span></span> edited in this step</li>
    <li><span class="cell"><span class="token">x</span></span> settled</li>
    <li id="differs" hidden><span class="cell differ"><span class="token">x</span></span> not as in the other run</li>
  </ul>
  <p>The bar under a token is the probability of the candidate there in the last step of its block so far. A full
  forward is Stage A, a partial one is Stage B (the last n layers again), a commit forward reads a block that its last
  step still changed; NFE/token counts the full ones. Keys: left and right, Home and End.</p>
</footer>
<script type="application/json" id="trace">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("trace").textContent);
const $ = (id) => document.getElementById(id);
const LETTER = {fill: "F", edit: "E"};
const STATE = {prompt: "prompt", mask: "masked", fill: "filled now", edit: "edited now", settled: "settled"};
const steps = Math.max(...data.traces.map((t) => t.steps.length));
let now = 0, timer = 0, chosen = []; // the step shown; the play timer; the [trace, position] in the panel

function make(parent, tag, cls, text = "") {
  const e = parent.appendChild(document.createElement(tag));
  e.className = cls;
  e.textContent = text;
  return e;
}

// The blocks of a run: where each starts, its first and last step (0 for a block of nothing but prompt), its prompt.
function blocksOf(t) {
  const blocks = [], B = t.steps[0].after.length;
  for (let start = 0; start < t.steps[0].start; start += B)
    blocks.push({start, first: 0, last: 0, ids: t.prompt.slice(start, start + B)});
  t.steps.forEach((s, i) => {
    if (!i || t.steps[i - 1].start !== s.start) blocks.push({start: s.start, first: i + 1});
    blocks.at(-1).last = i + 1;
  });
  return blocks;
}

// What a block shows after step k: tokens, probabilities (the prompt has none), and step k itself if it was here.
function look(t, b, k) {
  if (!b.first) return {ids: b.ids};
  if (k < b.first) return {ids: t.steps[b.first - 1].before, unopened: k > 0 || b.first > 1};
  const s = t.steps[Math.min(k, b.last) - 1];
  return {ids: s.after, conf: s.conf, step: k <= b.last ? s : undefined};
}

// One position of a block that looks like v: the token, its state, what this step did to it.
function position(t, at, v) {
  const here = (x) => x.at === at, i = at % t.B, id = v.ids[i];
  const fill = v.step?.fill.find(here), edit = v.step?.edit.find(here);
  const state = at < t.prompt.length ? "prompt" : edit ? "edit" : id === t.mask_id ? "mask" : fill ? "fill" : "settled";
  return {id, state, fill, edit, conf: state === "prompt" ? undefined : v.conf?.[i]};
}

// The same in words, and everything that happened to the position so far.
function describe(t, at, p, b) {
  const best = p.conf === undefined ? "" : `; candidate ${p.conf.toFixed(2)}`;
  const lines = [`position ${at}: ${t.pieces[p.id]} (${STATE[p.state]}${best})`];
  for (let k = b.first; k && k <= Math.min(now, b.last); k++) {
    const {fill: f, edit: e} = position(t, at, look(t, b, k));
    const a = f && f.token !== f.token_a ? `, Stage A alone ${t.pieces[f.token_a]} ${f.conf_a.toFixed(2)}` : "";
    if (f) lines.push(`step ${k}: wrote ${t.pieces[f.token]} ${f.conf.toFixed(2)}${a}`);
    if (e) lines.push(`step ${k}: ${t.pieces[e.old]} became ${t.pieces[e.token]} ${e.conf.toFixed(2)}`);
  }
  return lines;
}

function drawCell(cell, t, b, at, v, other) {
  const p = position(t, at, v), [mark, token, alone, level] = cell.children, lines = describe(t, at, p, b);
  const differs = other !== undefined && other !== p.id, isChosen = chosen[0] === t && chosen[1] === at;
  cell.className = "cell " + p.state;
  if (p.fill) cell.classList.add("bundle");
  if (differs) cell.classList.add("differ");
  if (isChosen) cell.classList.add("chosen");
  cell.tabIndex = v.step || !now ? 0 : -1; // Tab goes through the block at work, not through the whole text
  mark.textContent = LETTER[p.state] ?? "";
  token.textContent = t.pieces[p.id];
  alone.hidden = !p.fill || p.fill.token === p.fill.token_a;
  alone.textContent = alone.hidden ? "" : "A " + t.pieces[p.fill.token_a];
  level.style.width = 100 * (p.conf ?? 0) + "%";
  if (isChosen) $("panel").replaceChildren();
  if (isChosen) lines.forEach((line, i) => make($("panel"), "p", "", (i ? "" : t.label + ", ") + line));
  cell.title = lines.join("; ") + (differs ? "; not as in the other run" : "");
  cell.setAttribute("aria-label", cell.title);
}

function drawCounts(t, looks) {
  const n = Math.min(now, t.steps.length), [full, partial, commit] = t.counts[n], s = t.steps[Math.max(0, n - 1)];
  const masks = (ids) => ids.filter((id) => id === t.mask_id).length;
  const answer = t.blocks.flatMap((b) => looks.get(b.start).ids).slice(t.prompt.length).slice(0, t.tokens.length);
  const written = answer.length - masks(answer);
  const rate = n === t.steps.length ? t.nfe_per_token : full / written;
  t.counts_line.textContent = `forwards: ${full} full, ${partial} partial, ${commit} commit; NFE/token ` +
    (written ? rate.toFixed(2) : "–");
  t.step_line.textContent = n ? `${now > n ? `ended with step ${n}` : `block ${s.start}`}: ${s.fill.length} filled, ` +
    `${s.edit.length} edited, ${masks(s.after)} left masked` : `block ${s.start}: ${masks(s.before)} masked`;
}

function draw() {
  const looks = data.traces.map((t) => new Map(t.blocks.map((b) => [b.start, look(t, b, now)])));
  data.traces.forEach((t, n) => {
    drawCounts(t, looks[n]);
    for (const b of t.blocks) {
      const v = looks[n].get(b.start), other = looks[1 - n]?.get(b.start);
      b.box.className = "block" + (v.unopened ? " unopened" : v.step ? " current" : "");
      b.cells.forEach((cell, i) => drawCell(cell, t, b, b.start + i, v, other?.ids[i]));
    }
  });
  $("slider").value = now;
  $("now").textContent = `step ${now} of ${steps}`;
  $("slider").setAttribute("aria-valuetext", $("now").textContent);
}

function go(k, follow = true) {
  now = Math.max(0, Math.min(steps, k));
  draw();
  try { history.replaceState(null, "", "#step=" + now); } catch { /* browsers limit how often; the address may lag */ }
  if (follow) document.querySelector(".current")?.scrollIntoView({block: "nearest"});
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => { go(now + 1); if (now === steps) play(false); }, 700) : 0;
  $("play").textContent = on ? "Pause" : "Play";
}

function buildBlock(row, t, b) {
  b.box = make(row, "section", "block");
  const title = make(b.box, "h3", ""), cells = make(b.box, "div", "cells");
  if (data.traces.length > 1) make(title, "span", "who", t.label + ", ");
  title.append(`block ${b.start}–${b.start + t.B - 1}`);
  b.cells = Array.from({length: t.B}, (_, i) => {
    const cell = make(cells, "button", "cell");
    cell.type = "button";
    cell.dataset.at = b.start + i;
    for (const part of ["mark", "token", "other", "level"]) make(cell, "span", part);
    for (const event of ["click", "focus"]) // Safari does not focus what is tapped
      cell.addEventListener(event, () => { chosen = [t, b.start + i]; draw(); });
    return cell;
  });
}

function build() {
  const {traces, diverged, differ} = data, labels = traces.map((t) => t.label).join(" and ");
  const heads = make($("runs"), "div", "row");
  for (const t of traces) {
    const head = make(heads, "div", "");
    Object.assign(t, {blocks: blocksOf(t), B: t.steps[0].after.length});
    if (traces.length > 1) make(head, "h2", "", t.label);
    t.counts_line = make(head, "p", "counts");
    t.step_line = make(head, "p", "counts");
  }
  for (const start of [...new Set(traces.flatMap((t) => t.blocks.map((b) => b.start)))].sort((a, b) => a - b)) {
    const row = make($("runs"), "div", "row");
    for (const t of traces) {
      const b = t.blocks.find((b) => b.start === start);
      if (b) buildBlock(row, t, b); else make(row, "section", "block unopened");
    }
  }
  document.documentElement.style.setProperty("--columns", traces.length);
  document.title = $("title").textContent = "Trace of " + labels;
  make($("panel"), "p", "", "Tap a token, or move to it with Tab, to read what happened to it.");
  $("slider").max = steps;
  $("differs").hidden = traces.length < 2;
  if (traces.length < 2) return;
  $("differ").hidden = false;
  if (diverged === null) $("differ").textContent = "The two runs never differ.";
  if (diverged === null) return;
  $("jump").textContent = `step ${diverged}`;
  $("ending").textContent = differ ? `in the end at ${differ}.` : "and agree in the end.";
  $("flag").hidden = false;
  $("flag").style.left = `calc(8px + (100% - 16px) * ${diverged / steps})`; // the thumb is 16px wide
}

build();
const KEYS = {ArrowLeft: () => now - 1, ArrowRight: () => now + 1, Home: () => 0, End: () => steps};
const TARGETS = {first: KEYS.Home, back: KEYS.ArrowLeft, next: KEYS.ArrowRight, last: KEYS.End,
  jump: () => data.diverged};
for (const id in TARGETS) $(id)?.addEventListener("click", () => { play(false); go(TARGETS[id]()); });
$("play").addEventListener("click", () => { if (!timer && now === steps) go(0); play(!timer); });
$("slider").addEventListener("input", () => { play(false); go(Number($("slider").value), false); });
document.addEventListener("keydown", (e) => { // the slider steps by itself
  if (!(e.key in KEYS) || e.target === $("slider") || e.ctrlKey || e.altKey || e.metaKey || e.shiftKey) return;
  e.preventDefault();
  play(false);
  go(KEYS[e.key]());
});
const linked = () => go(Number(location.hash.match(/^#step=(\d+)$/)?.[1] ?? 0), false);
addEventListener("hashchange", linked);
linked();
</script>
</body>
</html>
"""


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def read_record(path: Path) -> dict:
    """The one record in a file that `sample.py --json` wrote."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as e:
        fail(f"cannot read {path}: {e.strerror}")
    except ValueError as e:
        fail(f"{path} is not what sample.py --json prints: {e}")
    if len(records) != 1:
        fail(f"{path} holds {len(records)} runs, a page shows one of each file: give sample.py one --prompt")
    if not isinstance(records[0], dict) or not records[0].keys() >= KEYS or not records[0]["steps"]:
        fail(f"{path} holds no trace: write it with sample.py --json")
    return records[0]


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("trace")
    group.add_argument("runs", nargs="+", metavar="RUN.json", help="one or two files that sample.py --json wrote")
    group.add_argument("--out", default="trace.html", help="the page to write")
    args = parser.parse_args()
    if len(args.runs) > 2:
        fail(f"{len(args.runs)} runs given: a page shows one, or two side by side")
    runs = [(Path(name).stem, read_record(Path(name))) for name in args.runs]
    if len({json.dumps([record["prompt"], record["mask_id"]]) for _, record in runs}) > 1:
        fail(f"{' and '.join(args.runs)} continue different prompts: side by side takes two runs of the same one")
    write_page(Path(args.out), runs)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
