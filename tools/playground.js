// The page around the engine (engine.js) and the viewer (viewer.js): what is typed becomes one record for each decoder,
// and the viewer shows them one below the other.

// Objects that inherit nothing: a prompt may be "constructor", which a plain object has as an entry.
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const ownAlone = (key, value) => (isObject(value) ? Object.assign(Object.create(null), value) : value);
const data = JSON.parse($("data").textContent, ownAlone);
const GATES = Object.keys(data.gates); // the sliders
let base; // the model without an adapter
let decoders; // the page's, each with its model
let known; // of a model of names: name -> code point, of every character
let byHand; // of each decoder: {number of a step: {at, token}}
let sharesAt = ""; // the gates of the table of shares
let seed = 1; // of the numbers by which tokens are drawn

// --- what the page holds

// The bytes that playground.py packed: deflated, in base64.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// All models, the base first. Their numbers lie end to end: the first byte of each, then the second of each, and so on.
async function readModels() {
  const planes = await unpack(data.weights);
  const n = planes.length / 4;
  const bytes = planes.map((_, i) => planes[(i % 4) * n + Math.floor(i / 4)]);
  let at = 0;
  const read = (size) => new Float32Array(bytes.buffer, 4 * at, size, (at += size));
  const named = (sizes) => Object.fromEntries(Object.entries(sizes).map(([name, size]) => [name, read(size)]));
  const [first, ...adapters] = data.models.map((model) => ({...model, tensors: named(model.sizes)}));

  const {cfg} = first;
  const ranks = new Map(data.tokenizer.bytes.map((letters, id) => [letters, id]));
  Object.assign(data.tokenizer.pieces, {[cfg.eos_id]: "∎", [cfg.mask_id]: "▒"});
  base = adapted({tokenizer: {...data.tokenizer, ranks}}, first);
  return [base, ...adapters.map((adapter) => adapted(base, adapter))];
}

// Line n has the name of code point n; most lines are empty.
async function readNames() {
  const names = new TextDecoder().decode(await unpack(data.names)).split("\n");
  return new Map(names.map((name, code) => [name, code]).filter(([name]) => name));
}

// The character of exactly this name, or that there is none, as sample.py says it.
function verdict(name) {
  if (!known) return null;
  if (!known.has(name)) return "(no such character)";
  const code = known.get(name);
  return `${String.fromCodePoint(code)} (U+${code.toString(16).toUpperCase().padStart(4, "0")})`;
}

// --- decoding

const gates = () => Object.fromEntries(GATES.map((gate) => [gate, Number($(gate).value)]));

// The numbers by which both stages draw in step n: a function of the seed, of the step and, in the table, of the
// beginning's number.
function draws(n, beginning = 0) {
  const next = generator((seed * MAX_STEPS + beginning) * MAX_STEPS + n);
  return [0, 1].map(() => Array.from({length: base.cfg.block_length}, next));
}

// The engine's settings for a decoder, whose gates may be the names of the page's; and the tokens {number of a step:
// {at, token}} that are written by hand: such a step asks the model nothing.
function decoding({n_rounds, ...own}, hand = {}) {
  const chosen = {...gates(), tau_t2t: gates().tau_t2t < 1 ? gates().tau_t2t : null};
  const settings = Object.fromEntries(Object.entries(own).map(([name, value]) =>
    [name, GATES.includes(value) ? chosen[value] : value]));
  const byHand = (z, start, n) => {
    if (!Object.hasOwn(hand, n)) return undefined;
    const at = hand[n].at - start;
    const after = z.map((id, t) => (t === at ? hand[n].token : id));
    const conf = z.map(() => 1);
    const said = {token: after, conf, token_a: after, conf_a: conf, passes: []};
    return {...said, before: z, after, bundle: [at], edited: [], partial: 0, byHand: true};
  };
  return {...settings, n_rounds, byHand, draws,
    max_post_steps: 16, gen_length: data.gen_length, eos_early_stop: true};
}

// One of the engine's steps, with absolute positions of what it wrote.
function stepRecord(s) {
  const {start, before, after, token_a, conf, conf_a} = s;
  const fill = s.bundle.map((t) => ({at: start + t, token: after[t], conf: conf[t], token_a: token_a[t],
    conf_a: conf_a[t]}));
  const edit = s.edited.map((t) => ({at: start + t, old: before[t], token: after[t], conf: conf[t]}));
  return {...s, fill, edit};
}

// One decoder's run, as the viewer takes it.
function recordOf(asked, run) {
  const {name: label, about, model} = decoders[run];
  const {prompt, tokens, nfe, steps} = generateOne(model, asked, decoding(decoders[run], byHand[run]));
  const {mask_id, block_length: B} = model.cfg;
  const text = decode(model, [...prompt, ...tokens]);
  return {label, about, asked, prompt, tokens, text, verdict: verdict(text), mask_id, B, nfe,
    pieces: model.tokenizer.pieces, steps: steps.map(stepRecord)};
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
  toLink(known ? text.replaceAll("▒", "_") : text);
  chosen = null;
  byHand = decoders.map(() => ({}));
  present(decoders.map((_, run) => recordOf(prompt, run)), step);
}

// The address tells the prompt. A page inside another page (srcdoc) has no address that it may change.
function toLink(prompt) {
  try {
    history.replaceState(null, "", "#" + new URLSearchParams({prompt}));
  } catch {} // the page works all the same
}

// Names are in upper case and on one line, and have no underscore: that is a mask.
const asTyped = (text) => (known ? text.toUpperCase().replaceAll("_", "▒").replaceAll("\n", " ") : text);

// Shows one record for each decoder.
function present(records, step) {
  summarise(records);
  show(records, step);
}

// Forwards for each byte that was written, in the holes of the prompt too: what stood there has no bytes.
function aByte({asked, prompt, tokens, nfe}) {
  const bytes = (ids) => ids.reduce((sum, id) => sum + base.tokenizer.bytes[id].length, 0);
  return rounded(nfe.all / Math.max(1, bytes([...prompt, ...tokens]) - bytes(asked)));
}

// A line for each run: what it wrote, and what that is.
function summarise(records) {
  const body = $("seen").tBodies[0];
  body.replaceChildren();
  for (const t of records) {
    const there = known?.has(t.text);
    const said = known ? `${there ? "✓" : "✗"} ${t.verdict.replace(/\((no.*)\)/, "$1")}` : "";
    const row = make(body, "tr", "");
    const head = make(row, "th", "", t.label);
    head.scope = "row";
    make(head, "span", "", ` ${known ? `${rounded(t.nfe.all)} forwards` : `${aByte(t)} forwards a byte`}`);
    const cell = make(row, "td", "");
    make(cell, "span", "written", t.text);
    make(cell, "span", there ? "verdict yes" : "verdict", said);
  }
}

// --- the panel: what both stages would write at a mask, and a token put there by hand

// Probabilities of every token at position `at` of block b as it stands: {a, b}, by Stage A and, where the decoder has
// it, by Stage B. The bundle is the gate's and `at`; a causal one is all masks, and reads the final tokens.
function answersAt(decoder, t, b, at) {
  const {model, n_rounds} = decoder;
  const d = decoding(decoder);
  const ctx = newContext();
  const finished = t.blocks.filter((block) => block.start < b.start);
  for (const block of finished) finishBlock(model, look(t, block, now).ids, ctx, n_rounds);

  const z = look(t, b, now).ids;
  const here = at - b.start;
  const masked = masksOf(model, z);
  const h = prefix(model, z, ctx);
  const stageA = logits(model, lastN(model, h, ctx));
  const a = shares(stageA[here], d);
  if (!n_rounds) return {a};
  const u = draws(Math.max(now, b.first - 1)); // as the step from here on draws
  if (model.stage_b === "causal") {
    const {token} = causalDenoise(model, z, ctx, {...d, tau_m2t: 0}, u);
    const states = causalCoordinate(model, h, masked, ctx, token);
    return {a, b: shares(neverMask(model, logits(model, states))[here], d)};
  }
  const picked = byConfidence(candidates(stageA, u[0], d).conf, masked, d);
  const bundle = masked.filter((i) => picked.includes(i) || i === here);
  return {a, b: shares(logits(model, coordinate(model, h, bundle, ctx, n_rounds))[here], d)};
}

// What the viewer's panel shows of a token that looks like v, below what happened to it.
function whatElse(panel, t, b, at, v) {
  if (v.ids[at - b.start] !== t.mask_id) {
    make(panel, "p", "counts", "Step back until this token is a mask to see what else could stand here.");
    return;
  }
  const run = traces.indexOf(t);
  const answers = answersAt(decoders[run], t, b, at);
  const lists = make(panel, "div", "lists");
  const write = (token) => writeByHand(run, at, token);
  list(lists, "Stage A", "this position by itself", answers.a, write);
  const sees = decoders[run].model.stage_b === "causal" ? "after the tokens before it" : "with the rest of the bundle";
  if (answers.b) list(lists, "Stage B", sees, answers.b, write);
}

// The five likeliest tokens as buttons with bars.
function list(parent, title, about, p, write) {
  const box = make(parent, "div", "");
  make(make(box, "h4", "", title), "span", "", about);
  for (const token of largest(p, 5)) {
    const button = make(box, "button", "option");
    button.type = "button";
    make(button, "span", "level").style.width = `${100 * p[token]}%`;
    make(button, "span", "name", base.tokenizer.pieces[token]);
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

// One beginning after the other, each by every decoder of the table.
async function runAll() {
  $("run").disabled = true;
  const rows = decoders.filter((decoder) => decoder.in_table);
  const sums = rows.map((decoder) => ({decoder, d: decoding(decoder), found: 0, forwards: 0, tokens: 0}));
  sharesAt = gateText();
  showGates();
  for (const [i, prompt] of data.beginnings.entries()) {
    for (const sum of sums) {
      const d = {...sum.d, draws: (n) => draws(n, i + 1)};
      const {tokens, nfe} = generateOne(sum.decoder.model, prompt, d);
      sum.found += known.has(decode(base, [...prompt, ...tokens])) ? 1 : 0;
      sum.forwards += nfe.all;
      sum.tokens += tokens.length;
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
  for (const {decoder, found, forwards, tokens} of sums) {
    const row = make(body, "tr", "");
    make(row, "th", "", decoder.name).scope = "row";
    make(row, "td", "", `${((100 * found) / n).toFixed(0)} %`);
    make(row, "td", "", (forwards / n).toFixed(2));
    make(row, "td", "", (forwards / tokens).toFixed(3));
  }
}

// --- what one can touch

// In words; of what is drawn also by which seed.
function gateText() {
  const {temperature, ...others} = gates();
  const said = Object.entries(others).map(([gate, value]) => `${gate} ${value.toFixed(2)}`);
  if (temperature > 0) said.push(`temperature ${temperature.toFixed(2)}, seed ${seed}`);
  return said.join(", ");
}

// What the sliders say; a table of other gates is old.
function showGates() {
  const old = sharesAt !== "" && sharesAt !== gateText();
  $("gate_values").textContent = gateText();
  $("again").hidden = gates().temperature === 0;
  $("shares").classList.toggle("old", old);
  $("stale").textContent = old ? `These numbers are old: they are of ${sharesAt}.` : "";
}

// A held-out beginning.
function beginning(number) {
  return data.beginnings.length ? decode(base, data.beginnings[number]) : "";
}

// Completes the prompt and plays it from the start.
function begin() {
  play(false);
  ask(0);
  if (!$("wrong").textContent) play(true);
}

// A link's prompt (?prompt=... or #prompt=...), or the first beginning.
function fromLink() {
  const linked = (part) => new URLSearchParams(part.slice(1)).get("prompt");
  $("prompt").value = linked(location.hash) ?? linked(location.search) ?? beginning(0);
  begin();
}

async function start() {
  const models = await readModels();
  decoders = data.decoders.map((decoder) => ({...decoder, model: models[decoder.number]}));
  if (data.names) known = await readNames();
  for (const gate of GATES) {
    $(gate).value = data.gates[gate];
    $(gate).parentElement.hidden = !decoders.some((decoder) => Object.values(decoder).includes(gate));
  }
  $("asked").textContent = `a beginning; ${known ? "_" : "▒"} is one token to fill`;
  $("of_names").hidden = $("experiment").hidden = !known;
  $("surprise").hidden = !data.beginnings.length;
  $("prompt").rows = known ? 1 : 4;
  $("of_text").hidden = Boolean(known);
  $("of_drawn").hidden = !($("gates").open = data.gates.temperature > 0);
  showGates();
  fromLink();
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
// A name ends with Enter; a text may have several lines. The Enter that ends the composition of a character is no end:
// Safari gives it the code 229, and says that nothing is composed.
$("prompt").addEventListener("keydown", (e) => {
  if (!known || e.key !== "Enter" || e.isComposing || e.keyCode === 229) return;
  e.preventDefault();
  $("ask").requestSubmit();
});
$("surprise").addEventListener("click", () => {
  $("prompt").value = beginning(Math.floor(Math.random() * data.beginnings.length));
  $("ask").requestSubmit();
});
$("again").addEventListener("click", () => {
  seed++;
  showGates();
  begin();
});
addEventListener("hashchange", fromLink);
for (const gate of GATES) {
  $(gate).addEventListener("input", showGates);
  $(gate).addEventListener("change", () => { play(false); ask(); });
}
$("run").addEventListener("click", runAll);
const ready = start().catch((e) => ($("wrong").textContent = `This browser cannot run the page: ${e.message}`));
