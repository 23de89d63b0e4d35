// The viewer: decodes one below the other, step by step, and a panel about the token that was tapped. A record of a
// decode is made in playground.js (recordOf).
const $ = (id) => document.getElementById(id);
const LETTER = {fill: "F", edit: "E", byHand: "H"};
const STATE = {prompt: "given", mask: "masked", fill: "filled now", byHand: "written by hand", edit: "edited now",
  settled: "settled"};
const HINT = "Tap a token to see what happened to it; step back and tap a mask to see what could stand there.";
const PACE = 900; // milliseconds a step, in play
let traces = []; // the runs shown: records, each with its blocks and the elements that show it
let steps = 0; // of the longest run
let now = 0; // the step shown
let timer = 0; // of play
let chosen = null; // {run, at}: the cell in the panel

function make(parent, tag, cls, text = "") {
  const e = parent.appendChild(document.createElement(tag));
  e.className = cls;
  e.textContent = text;
  return e;
}

// --- what a run holds after a step

// The blocks of a run: where each starts, its first and last step (0 for a block of nothing but prompt), its prompt.
function blocksOf(t) {
  const blocks = [];
  for (let start = 0; start < t.steps[0].start; start += t.B)
    blocks.push({start, first: 0, last: 0, ids: t.prompt.slice(start, start + t.B)});
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
  return {ids: s.after, conf: s.byHand ? undefined : s.conf, step: k <= b.last ? s : undefined};
}

// One position of a block that looks like v: the token, its state, what this step did to it.
function position(t, at, v, b) {
  const here = (x) => x.at === at;
  const i = at % t.B;
  const id = v.ids[i];
  const fill = v.step?.fill.find(here);
  const edit = v.step?.edit.find(here);
  const given = !b.first || t.steps[b.first - 1].before[i] !== t.mask_id;
  let state = "settled";
  if (given) state = "prompt";
  else if (edit) state = "edit";
  else if (id === t.mask_id) state = "mask";
  else if (fill) state = v.step.byHand ? "byHand" : "fill";
  return {id, state, fill, edit, conf: state === "prompt" ? undefined : v.conf?.[i]};
}

// The steps of a block up to now.
const stepsOf = (t, b) => (b.first ? t.steps.slice(b.first - 1, Math.min(now, b.last)) : []);

// What a step thought of place i before it wrote: Stage A's draft, then each pass up to the one that is final. Of the
// paper's Stage B the draft alone, where it wrote another token.
function thoughts(s, i, mask_id) {
  const drafted = {by: "A", token: s.token_a[i], conf: s.conf_a[i]};
  if (s.before[i] !== mask_id) return [];
  if (!s.passes.length) return s.after[i] === mask_id || s.after[i] === drafted.token ? [] : [drafted];
  const settled = s.passes.findIndex((pass) => pass.final[i]);
  const seen = settled < 0 ? s.passes : s.passes.slice(0, settled + 1);
  return [drafted, ...seen.map((pass, n) =>
    ({by: `${n + 1}`, token: pass.token[i], conf: pass.conf[i], final: pass.final[i]}))];
}

// --- drawing

// A position in words, and everything that happened to it so far.
function describe(t, at, p, b) {
  const best = p.conf === undefined ? "" : `; candidate ${p.conf.toFixed(2)}`;
  const lines = [`position ${at}: ${t.pieces[p.id]} (${STATE[p.state]}${best})`];
  const say = ({token, conf}) => `${t.pieces[token]} ${conf.toFixed(2)}`;
  for (const [n, s] of stepsOf(t, b).entries()) {
    const fill = s.fill.find((x) => x.at === at);
    const edit = s.edit.find((x) => x.at === at);
    const said = thoughts(s, at - b.start, t.mask_id).map((by) =>
      (by.by === "A" ? "Stage A drafted " : `pass ${by.by}: `) + say(by) + (by.final ? ", final" : ""));
    if (fill) said.push(s.byHand ? `${t.pieces[fill.token]} was written by hand` : `wrote ${say(fill)}`);
    if (edit) said.push(`${t.pieces[edit.old]} became ${say(edit)}`);
    if (said.length) lines.push(`step ${b.first + n}: ${said.join("; ")}`);
  }
  return lines;
}

function drawCell(cell, t, b, at, v) {
  const p = position(t, at, v, b);
  const lines = describe(t, at, p, b);
  const [mark, token, before, level] = cell.children;
  const isChosen = chosen?.at === at && traces[chosen.run] === t;
  cell.className = "cell " + p.state;
  if (p.state === "byHand") cell.classList.add("fill");
  if (p.fill && p.state !== "byHand") cell.classList.add("bundle");
  if (isChosen) cell.classList.add("chosen");
  mark.textContent = LETTER[p.state] ?? "";
  token.textContent = t.pieces[p.id];
  // what the step that wrote it thought; later only if the draft was another token
  const i = at - b.start;
  const wrote = stepsOf(t, b).findLast((s) => s.before[i] === t.mask_id);
  const tells = wrote && (wrote === v.step || wrote.token_a[i] !== wrote.after[i]);
  const thought = tells ? thoughts(wrote, i, t.mask_id) : [];
  before.hidden = !thought.length;
  before.replaceChildren();
  for (const {by, token, final} of thought)
    make(before, "span", final ? "final" : "", `${by} ${t.pieces[token]}${final ? " ✓" : ""}`);
  level.style.width = 100 * (p.conf ?? 0) + "%";
  cell.title = lines.join("; ");
  cell.setAttribute("aria-label", cell.title);
  if (isChosen) drawPanel(t, b, at, v, lines);
}

function drawPanel(t, b, at, v, lines) {
  $("panel").replaceChildren();
  lines.forEach((line, i) => make($("panel"), "p", "", (i ? "" : t.label + ", ") + line));
  whatElse($("panel"), t, b, at, v);
}

const rounded = (forwards) => Number(forwards.toFixed(2));

function drawLine(t) {
  const n = Math.min(now, t.steps.length);
  const s = t.steps[Math.max(0, n - 1)];
  const masks = (ids) => ids.filter((id) => id === t.mask_id).length;
  const done = `${s.fill.length} filled, ${s.edit.length} edited, ${masks(s.after)} left masked`;
  const {full, partial, refresh} = t.nfe;
  const cost = `all forwards: ${full} full, ${rounded(partial)} partial, ${refresh} refresh`;
  t.stepLine.textContent = `step ${n} of ${t.steps.length}: ${n ? done : `${masks(s.before)} masked`} (${cost})`;
}

function draw() {
  for (const t of traces) {
    drawLine(t);
    for (const b of t.blocks) {
      const v = look(t, b, now);
      b.box.className = "block" + (v.unopened ? " unopened" : "");
      b.cells.forEach((cell, i) => drawCell(cell, t, b, b.start + i, v));
    }
  }
  $("slider").value = now;
  $("now").textContent = `step ${now} of ${steps}`;
  $("slider").setAttribute("aria-valuetext", $("now").textContent);
}

// --- building

function buildBlock(parent, t, b, run) {
  b.box = make(parent, "section", "block");
  b.box.setAttribute("aria-label", `block ${b.start}–${b.start + t.B - 1}`);
  b.cells = Array.from({length: t.B}, (_, i) => {
    const cell = make(b.box, "button", "cell");
    cell.type = "button";
    cell.dataset.at = b.start + i;
    for (const part of ["mark", "token", "other", "level"]) make(cell, "span", part);
    cell.addEventListener("click", () => { play(false); chosen = {run, at: b.start + i}; draw(); });
    return cell;
  });
}

// Shows these records at a step.
function show(records, step) {
  traces = records;
  steps = Math.max(...traces.map((t) => t.steps.length));
  $("runs").replaceChildren();
  traces.forEach((t, run) => {
    t.blocks = blocksOf(t);
    const again = run > 0 && traces[run - 1].decoder === t.decoder; // the same decoder, on another beginning
    const box = again ? $("runs").lastChild : make($("runs"), "article", "run");
    const head = make(box, "div", "head");
    make(head, "h2", "", again ? "" : t.label);
    make(head, "p", "counts", again ? "" : t.about);
    const decode = make(box, "div", "");
    const blocks = make(decode, "div", "blocks");
    for (const b of t.blocks) buildBlock(blocks, t, b, run);
    t.stepLine = make(decode, "p", "counts");
  });
  $("slider").max = steps;
  if (!chosen) $("panel").textContent = HINT;
  go(step);
}

// --- moving

function go(k) {
  now = Math.max(0, Math.min(steps, k));
  draw();
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => { go(now + 1); if (now === steps) play(false); }, PACE) : 0;
  $("play").textContent = on ? "Pause" : "Play";
}

const KEYS = {ArrowLeft: () => now - 1, ArrowRight: () => now + 1, Home: () => 0, End: () => steps};
const TARGETS = {first: KEYS.Home, back: KEYS.ArrowLeft, next: KEYS.ArrowRight, last: KEYS.End};
for (const id in TARGETS) $(id).addEventListener("click", () => { play(false); go(TARGETS[id]()); });
$("play").addEventListener("click", () => { if (!timer && now === steps) go(0); play(!timer); });
$("slider").addEventListener("input", () => { play(false); go(Number($("slider").value)); });
document.addEventListener("keydown", (e) => { // sliders and text fields have these keys for themselves
  if (!Object.hasOwn(KEYS, e.key) || ["INPUT", "TEXTAREA"].includes(e.target.tagName)) return;
  if (e.ctrlKey || e.altKey || e.metaKey || e.shiftKey) return;
  e.preventDefault();
  play(false);
  go(KEYS[e.key]());
});
