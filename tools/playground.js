// The page around the engine (engine.js) and the viewer (viewer.js): what is typed becomes one record for each decoder,
// and the viewer shows them side by side.

const data = JSON.parse($("data").textContent);
const base = readModel(data);
const columns = data.decoders.map(readColumn);
let byHand = columns.map(() => ({})); // of each column: {number of a step: {at, token}}
let sharesAt = ""; // the gates of the table of shares

// --- what the page holds

function fromBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

// A bfloat16 number is the upper half of a float32 whose lower half is zero.
function readTensor({dtype, base64}) {
  const {buffer} = fromBase64(base64);
  if (dtype === "float32") return new Float32Array(buffer);
  const upper = new Uint16Array(buffer);
  const halves = new Uint16Array(2 * upper.length);
  upper.forEach((half, i) => (halves[2 * i + 1] = half));
  return new Float32Array(halves.buffer);
}

function readTensors(stored) {
  return Object.fromEntries(Object.entries(stored).map(([name, tensor]) => [name, readTensor(tensor)]));
}

function readModel({cfg, tokenizer, tensors: stored}) {
  const tensors = readTensors(stored);
  return {cfg, tokenizer, tensors, marked: tensors};
}

// One of the page's decoders, with its model: the base, with the adapters that lie on it.
function readColumn(decoder) {
  const adapters = decoder.adapters.map((adapter) => ({...adapter, tensors: readTensors(adapter.tensors)}));
  return {...decoder, model: adapters.reduce(adapted, base)};
}

// --- the judge: is a name in the list of all?

const known = data.names;

// The character of exactly this name, or undefined.
function exists(name) {
  return Object.hasOwn(known, name) ? String.fromCodePoint(known[name]) : undefined;
}

// As sample.py says it.
function verdict(name) {
  if (!known) return null;
  const character = exists(name);
  const upper = /\p{Lu}/u.test(name) && name === name.toUpperCase();
  const hint = upper ? "" : "; names are in upper case";
  if (character === undefined) return `(no such character${hint})`;
  return `${character} (U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")})`;
}

// --- decoding

const gates = () => ({tau_m2t: Number($("tau_m2t").value), tau_t2t: Number($("tau_t2t").value)});

// The engine's settings for a column, and the tokens {number of a step: {at, token}} that are written by hand: such a
// step asks the model nothing.
function decoding({n_rounds, leftmost, tau_t2t}, hand = {}) {
  const chosen = gates();
  const edits = chosen.tau_t2t < 1 ? chosen.tau_t2t : null;
  const byHand = (z, start, n) => {
    if (!(n in hand)) return undefined;
    const at = hand[n].at - start;
    const after = z.map((id, t) => (t === at ? hand[n].token : id));
    const conf = z.map(() => 1);
    const said = {token: after, conf, token_a: after, conf_a: conf};
    return {...said, before: z, after, bundle: [at], edited: [], partial: 0, byHand: true};
  };
  return {n_rounds, leftmost, tau_m2t: chosen.tau_m2t, tau_t2t: n_rounds ? edits : tau_t2t, byHand,
    max_post_steps: 16, gen_length: data.gen_length, eos_early_stop: true};
}

// One of the engine's steps, with absolute positions of what it wrote.
function stepRecord(s) {
  const {start, before, after, byHand} = s;
  const round = (p) => Number(p.toFixed(4));
  const fill = s.bundle.map((t) => ({at: start + t, token: after[t], conf: round(s.conf[t]), token_a: s.token_a[t],
    conf_a: round(s.conf_a[t])}));
  const edit = s.edited.map((t) => ({at: start + t, old: before[t], token: after[t], conf: round(s.conf[t])}));
  return {start, before, after, fill, edit, conf: s.conf.map(round), byHand};
}

// One column's run, as the viewer takes it.
function recordOf(asked, run) {
  const {name: label, about, model, ...column} = columns[run];
  const {prompt, tokens, nfe, steps} = generateOne(model, asked, decoding(column, byHand[run]));
  const {eos_id, mask_id, block_length: B} = model.cfg;
  const shown = [...prompt, ...steps.flatMap((s) => [...s.before, ...s.after, ...s.token_a])];
  const pieces = Object.fromEntries(shown.map((id) => [id, model.tokenizer.pieces[id]]));
  Object.assign(pieces, {[eos_id]: "∎", [mask_id]: "▒"});
  const text = decode(model, [...prompt, ...tokens]);
  return {label, about, asked, prompt, tokens, text, verdict: verdict(text), mask_id, B, nfe, pieces,
    steps: steps.map(stepRecord)};
}

// The ids of a text, in which each ▒ is one token to fill.
function encodeWithHoles(text) {
  const parts = text.split("▒").map((part) => encode(base, known ? part.trimEnd() : part));
  return parts.flatMap((ids, i) => (i ? [base.cfg.mask_id, ...ids] : ids));
}

function promptOf(text) {
  const {block_length: B, max_len} = base.cfg;
  const prompt = encodeWithHoles(text);
  const need = Math.ceil((prompt.length + data.gen_length) / B) * B;
  if (!prompt.length) return {wrong: "The model continues a text: type at least one letter."};
  if (need > max_len) return {wrong: "This beginning is too long for the model."};
  return {prompt};
}

// Completes what stands in the prompt box, and shows it at `step` (the last one, if not given).
function ask(step = Infinity) {
  const text = asTyped($("prompt").value);
  $("prompt").value = text;
  const {prompt, wrong} = promptOf(text);
  $("wrong").textContent = wrong ?? "";
  if (wrong) return;
  const plain = known ? text.replaceAll("▒", "_") : text;
  history.replaceState(null, "", "#" + new URLSearchParams({prompt: plain}));
  chosen = null;
  byHand = columns.map(() => ({}));
  present(columns.map((_, run) => recordOf(prompt, run)), step);
}

// Names are in upper case, and have no underscore: that is a mask.
const asTyped = (text) => (known ? text.toUpperCase().replaceAll("_", "▒") : text);

// Shows one record for each column.
function present(records, step) {
  summarise(records);
  show(records, step);
}

// A line for each run: what it wrote, and what that is.
function summarise(records) {
  const body = $("seen").tBodies[0];
  body.replaceChildren();
  for (const t of records) {
    const {said, className} = judged(t);
    const row = make(body, "tr", "");
    const head = make(row, "th", "", t.label);
    head.scope = "row";
    make(head, "span", "", ` ${rounded(t.nfe.all)} forwards`);
    const cell = make(row, "td", "");
    make(cell, "span", "written", t.text);
    make(cell, "span", className, said);
  }
}

// --- the panel: what both stages would write at a mask, and a token put there by hand

// Probabilities of every token at position `at` of block b as it stands: {a, b}, by Stage A and, where the column has
// it, by Stage B. The bundle is the gate's, and `at` with it.
function answersAt(column, t, b, at) {
  const {model, n_rounds} = column;
  const ctx = newContext();
  const finished = t.blocks.filter((block) => block.start < b.start);
  for (const block of finished) finishBlock(model, look(t, block, now).ids, ctx, n_rounds);

  const z = look(t, b, now).ids;
  const here = at - b.start;
  const masked = [...z.keys()].filter((i) => z[i] === t.mask_id);
  const h = prefix(model, z, ctx);
  const stageA = logits(model, lastN(model, h, ctx));
  const a = softmax(stageA[here]);
  if (!n_rounds) return {a};
  const picked = selectBundle(candidates(stageA).conf, masked, gates());
  const bundle = masked.filter((i) => picked.includes(i) || i === here);
  return {a, b: softmax(logits(model, coordinate(model, h, bundle, ctx, n_rounds))[here])};
}

// What the viewer's panel shows of a token that looks like v, below what happened to it.
function whatElse(panel, t, b, at, v) {
  if (v.ids[at - b.start] !== t.mask_id) {
    make(panel, "p", "counts", "Step back until this token is a mask to see what else could stand here.");
    return;
  }
  const run = traces.indexOf(t);
  const answers = answersAt(columns[run], t, b, at);
  const lists = make(panel, "div", "lists");
  const write = (token) => writeByHand(run, at, token);
  list(lists, "Stage A", "this position by itself", answers.a, write);
  if (answers.b) list(lists, "Stage B", "with the rest of the bundle", answers.b, write);
}

// The five likeliest tokens as buttons with bars.
function list(parent, title, about, p, write) {
  const box = make(parent, "div", "");
  make(make(box, "h4", "", title), "span", "", about);
  for (const token of largest(p, 5)) {
    const button = make(box, "button", "option");
    button.type = "button";
    make(button, "span", "level").style.width = `${100 * p[token]}%`;
    make(button, "span", "name", token === base.cfg.eos_id ? "∎" : base.tokenizer.pieces[token]);
    make(button, "span", "share", p[token].toFixed(2));
    button.addEventListener("click", () => write(token));
  }
}

// The run goes on from here with this token, and the panel moves to the first mask that is left.
function writeByHand(run, at, token) {
  play(false);
  const k = Math.min(now, traces[run].steps.length);
  const before = Object.entries(byHand[run]).filter(([step]) => step < k);
  byHand[run] = {...Object.fromEntries(before), [k]: {at, token}};
  const records = traces.map((t, i) => (i === run ? recordOf(t.asked, run) : t));
  const {start, after} = records[run].steps[k];
  const left = after.indexOf(base.cfg.mask_id);
  chosen = {run, at: left < 0 ? at : start + left};
  present(records, k + 1);
}

// --- the experiment: how many names exist, and the forwards that they took, over held-out beginnings

// One beginning after the other, each by every decoder.
async function runAll() {
  $("run").disabled = true;
  const sums = columns.map((column) => ({column, d: decoding(column), found: 0, forwards: 0}));
  sharesAt = gateText();
  showGates();
  for (const [i, prompt] of data.beginnings.entries()) {
    for (const sum of sums) {
      const {tokens, nfe} = generateOne(sum.column.model, prompt, sum.d);
      sum.found += exists(decode(base, [...prompt, ...tokens])) === undefined ? 0 : 1;
      sum.forwards += nfe.all;
    }
    drawShares(sums, i + 1);
    await new Promise((resume) => setTimeout(resume));
  }
  $("run").disabled = false;
}

function drawShares(sums, n) {
  $("run").textContent = `${n} of ${data.beginnings.length}`;
  $("shares").hidden = false;
  const body = $("shares").tBodies[0];
  body.replaceChildren();
  for (const {column, found, forwards} of sums) {
    const row = make(body, "tr", "");
    make(row, "th", "", column.name).scope = "row";
    make(row, "td", "", `${((100 * found) / n).toFixed(0)} %`);
    make(row, "td", "", (forwards / n).toFixed(2));
  }
}

// --- what one can touch

function gateText() {
  const {tau_m2t, tau_t2t} = gates();
  return `tau_m2t ${tau_m2t.toFixed(2)}, tau_t2t ${tau_t2t.toFixed(2)}`;
}

// The gates in words; a table of other gates is old.
function showGates() {
  const old = sharesAt !== "" && sharesAt !== gateText();
  $("gate_values").textContent = gateText();
  $("shares").classList.toggle("old", old);
  $("stale").textContent = old ? `These numbers are old: they are of ${sharesAt}.` : "";
}

// Completes the prompt and plays it from the start.
function begin() {
  play(false);
  ask(0);
  if (!$("wrong").textContent) play(true);
}

// A link's prompt, or the page's own.
function fromLink() {
  $("prompt").value = new URLSearchParams(location.hash.slice(1)).get("prompt") ?? data.prompt;
  begin();
}

$("ask").addEventListener("submit", (e) => {
  e.preventDefault();
  begin();
});
$("prompt").addEventListener("input", (e) => {
  const {value, selectionStart: place} = e.target;
  if (e.isComposing || asTyped(value) === value) return;
  e.target.value = asTyped(value);
  const after = asTyped(value.slice(0, place)).length;
  e.target.setSelectionRange(after, after);
});
$("surprise").addEventListener("click", () => {
  const prompt = data.beginnings[Math.floor(Math.random() * data.beginnings.length)];
  $("prompt").value = decode(base, prompt);
  $("ask").requestSubmit();
});
addEventListener("hashchange", fromLink);
for (const gate of ["tau_m2t", "tau_t2t"]) {
  $(gate).addEventListener("input", showGates);
  $(gate).addEventListener("change", () => { play(false); ask(); });
}
$("run").addEventListener("click", runAll);
$("asked").textContent = known ? "beginning of a name; _ is one token to fill" : "beginning; ▒ is one token to fill";
$("of_names").hidden = !known;
$("of_text").hidden = Boolean(known);
$("experiment").hidden = $("surprise").hidden = !known;
$("edits").hidden = !columns.some((column) => column.n_rounds);
showGates();
fromLink();
