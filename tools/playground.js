// The page around the engine (engine.js) and the viewer (viewer.js): what is typed becomes one record for each decoder,
// and the viewer shows them one below the other.

// Objects that inherit nothing: a prompt may be "constructor", which a plain object has as an entry.
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const ownAlone = (key, value) => (isObject(value) ? Object.assign(Object.create(null), value) : value);
const data = JSON.parse($("data").textContent, ownAlone);
const GATES = { // the fields of decoding.Decoding that sliders set: the value in each place, and what it does
  tau_m2t: [(place) => (place > 0 ? place : -1), "masks surer than this are written together, or else the surest"],
  tau_t2t: [(place) => (place < 1 ? place : null), "a written token is replaced by another that is surer than this"],
  temperature: [(place) => place, "a token is drawn from its probabilities, sharper below 1; 0: the likeliest"],
};
const OF_CAUSAL = "a step writes a whole block (all), or its leftmost tokens as long as they are together surer than " +
  "this. Then Stage A reads again, which costs forwards, and on names it wrote fewer that exist";
const sliders = new Map(); // label -> slider, such as "paper tau_m2t"
let base; // the model without an adapter
let decoders; // the page's, each with its model
let known; // of a model of names: name -> code point, of every character
let counts; // of each decoder, in the held-out beginnings: how many it has completed, to names, in how many forwards
let sharesAt = ""; // the gates of these shares
let seed = 0; // of the numbers by which tokens are drawn

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

// The value that a slider sets.
const valueOf = (label) => GATES[label.split(" ").at(-1)][0](Number(sliders.get(label).value));

// The engine's settings of a decoder for a beginning; and the tokens {number of a step: {at, token}} that are written
// by hand: such a step asks the model nothing.
function decoding(decoder, prompt, hand = {}) {
  const moved = decoder.gates.map((field) => [field, valueOf(`${decoder.kind} ${field}`)]);
  const byHand = (z, start, n) => {
    if (!Object.hasOwn(hand, n)) return undefined;
    const at = hand[n].at - start;
    const after = z.map((id, t) => (t === at ? hand[n].token : id));
    const conf = z.map(() => 1);
    const said = {token: after, conf, token_a: after, conf_a: conf, passes: []};
    return {...said, before: z, after, bundle: [at], edited: [], partial: 0, byHand: true};
  };
  const draws = numbersOf(seed, prompt, base.cfg.block_length);
  return {...decoder, ...Object.fromEntries(moved), temperature: valueOf("temperature"), byHand, draws};
}

// One of the engine's steps, with absolute positions of what it wrote.
function stepRecord(s) {
  const {start, before, after, token_a, conf, conf_a} = s;
  const fill = s.bundle.map((t) => ({at: start + t, token: after[t], conf: conf[t], token_a: token_a[t],
    conf_a: conf_a[t]}));
  const edit = s.edited.map((t) => ({at: start + t, old: before[t], token: after[t], conf: conf[t]}));
  return {...s, fill, edit};
}

// A decoder's run, as the viewer takes it.
function recordOf(decoder, asked, hand = {}) {
  const {name: label, about, model} = decoder;
  const {prompt, tokens, nfe, steps} = generateOne(model, asked, decoding(decoder, asked, hand));
  const {mask_id, block_length: B} = model.cfg;
  const text = decode(model, [...prompt, ...tokens]);
  return {decoder, hand, label, about, asked, prompt, tokens, text, verdict: verdict(text), mask_id, B, nfe,
    pieces: model.tokenizer.pieces, steps: steps.map(stepRecord)};
}

// The ids of a text, in which each ▒ is one token to fill.
function encodeWithHoles(text) {
  const parts = text.split("▒").map((part) => encode(base, known ? part.trimEnd() : part));
  return parts.flatMap((ids, i) => (i ? [base.cfg.mask_id, ...ids] : ids));
}

// What is wrong with a beginning.
function wrongWith(prompt) {
  const {block_length: B, max_len} = base.cfg;
  const need = Math.ceil((prompt.length + decoders[0].gen_length) / B) * B;
  if (!prompt.length) return "The model continues a text: type at least one letter.";
  return need > max_len ? "This beginning is too long for the model." : "";
}

// Completes what stands in the prompt box (names stand between commas), and shows it at `step` (left out: the last).
function ask(step = Infinity) {
  const text = asTyped($("prompt").value);
  $("prompt").value = text;
  const prompts = (known ? text.split(",").map((name) => name.trim()) : [text]).map(encodeWithHoles);
  $("wrong").textContent = prompts.map(wrongWith).find(Boolean) ?? "";
  if ($("wrong").textContent) return;
  toLink(known ? text.replaceAll("▒", "_") : text);
  chosen = null;
  present(decoders.flatMap((decoder) => prompts.map((prompt) => recordOf(decoder, prompt))), step);
}

// The address tells the prompt. A page inside another page (srcdoc) has no address that it may change.
function toLink(prompt) {
  try {
    history.replaceState(null, "", "#" + new URLSearchParams({prompt}));
  } catch {} // the page works all the same
}

// What is asked: names are in upper case and on one line, and have no underscore, which is a mask.
const asTyped = (text) => (known ? text.toUpperCase().replaceAll("_", "▒").replaceAll("\n", " ") : text);

// Shows the records: those of the first decoder, then those of the next.
function present(records, step) {
  summarise(records);
  show(records, step);
}

// A row for each decoder: what it wrote, what that is, and what it cost; and its shares of the held-out beginnings.
function summarise(records) {
  const body = $("seen").tBodies[0];
  body.replaceChildren();
  for (const decoder of decoders) {
    const row = make(body, "tr", "");
    make(row, "th", "", decoder.name).scope = "row";
    const cell = make(row, "td", "");
    for (const t of records.filter((t) => t.decoder === decoder)) {
      const there = known?.has(t.text);
      const line = make(cell, "div", "line");
      const whole = known || t.asked.includes(base.cfg.mask_id);
      make(line, "span", "written", whole ? t.text : decode(base, t.tokens).trim());
      if (known) make(line, "span", there ? "verdict yes" : "verdict", `${there ? "✓" : "✗"} ${t.verdict}`);
      make(line, "span", "cost", `forwards: ${rounded(t.nfe.all)}`);
    }
    if (known) for (const part of ["share", "share"]) make(row, "td", part);
  }
  drawShares();
}

// --- the panel: what both stages would write at a mask, and a token put there by hand

// Probabilities of every token at position `at` of block b as it stands: {a, b}, by Stage A and, where the decoder has
// it, by Stage B. The bundle is the gate's and `at`; a causal one is all masks, and reads the final tokens.
function answersAt(t, b, at) {
  const d = decoding(t.decoder, t.asked);
  const {model, n_rounds} = d;
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
  const u = d.draws(Math.max(now, b.first - 1)); // as the step from here on draws
  if (model.stage_b === "causal") {
    const {token} = causalDenoise(model, z, ctx, {...d, tau_m2t: -1}, u);
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
  const answers = answersAt(t, b, at);
  const lists = make(panel, "div", "lists");
  const write = (token) => writeByHand(traces.indexOf(t), at, token);
  list(lists, "Stage A", "this position by itself", answers.a, write);
  const sees = t.decoder.model.stage_b === "causal" ? "after the tokens before it" : "with the rest of the bundle";
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
  const {decoder, asked, hand} = traces[run];
  const before = Object.entries(hand).filter(([step]) => step < k);
  const record = recordOf(decoder, asked, {...Object.fromEntries(before), [k]: {at, token}});
  const records = traces.with(run, record);
  const {start, after} = records[run].steps[k];
  const left = after.indexOf(base.cfg.mask_id);
  chosen = {run, at: left < 0 ? at : start + left};
  present(records, k + 1);
}

// --- the experiment: how many names exist, and the forwards that they took, over held-out beginnings

// One beginning after the other, each by every decoder.
async function runAll() {
  $("run").disabled = true;
  const all = data.beginnings.map((prompt) => decoders.map((decoder) => decoding(decoder, prompt)));
  counts = decoders.map(() => ({n: 0, found: 0, forwards: 0}));
  sharesAt = gateText();
  showGates();
  for (const [i, prompt] of data.beginnings.entries()) {
    for (const [run, {model}] of decoders.entries()) {
      const {tokens, nfe} = generateOne(model, prompt, all[i][run]);
      counts[run].n++;
      counts[run].found += known.has(decode(base, [...prompt, ...tokens])) ? 1 : 0;
      counts[run].forwards += nfe.all;
    }
    $("run").textContent = `${i + 1} of ${data.beginnings.length}`;
    drawShares();
    await new Promise((resume) => setTimeout(resume));
  }
  $("run").disabled = false;
}

function drawShares() {
  for (const [run, {n, found, forwards}] of (counts ?? []).entries()) {
    const [exist, each] = $("seen").tBodies[0].rows[run].querySelectorAll(".share");
    exist.textContent = `${((100 * found) / n).toFixed(0)} % exist`;
    each.textContent = `${(forwards / n).toFixed(2)} forwards a name`;
  }
}

// --- what one can touch

// A slider for every gate that the decoders of a kind share.
function buildSliders() {
  const add = (label, opens, about) => {
    if (sliders.has(label)) return;
    const box = make($("sliders"), "label", "gate");
    make(box, "b", "", label);
    box.append(": " + about);
    const slider = make(box, "input", "");
    Object.assign(slider, {type: "range", min: 0, max: label === "temperature" ? 1.5 : 1, step: 0.05, value: opens});
    slider.addEventListener("input", showGates);
    slider.addEventListener("change", () => { play(false); ask(); });
    sliders.set(label, slider);
  };
  for (const {gates, kind, ...opens} of decoders)
    for (const gate of gates)
      add(`${kind} ${gate}`, opens[gate] ?? 1, kind === "causal" ? OF_CAUSAL : GATES[gate][1]);
  add("temperature", decoders[0].temperature, GATES.temperature[1]);
}

// In words; of what is drawn also by which seed.
function gateText() {
  const words = (value) => (value === null ? "none" : value < 0 ? "all" : String(value));
  const said = [...sliders.keys()].map((label) => `${label} ${words(valueOf(label))}`);
  return said.concat(valueOf("temperature") > 0 ? `seed ${seed}` : []).join(", ");
}

// What the sliders say; shares at other gates are old.
function showGates() {
  $("gate_values").textContent = gateText();
  $("again").hidden = valueOf("temperature") === 0;
  $("seen").classList.toggle("old", sharesAt !== gateText());
}

// A held-out beginning.
const beginning = (number) => decode(base, data.beginnings[number] ?? []);

// Completes the prompt and plays it from the start.
function begin() {
  play(false);
  ask(0);
  if (!$("wrong").textContent) play(true);
}

// A link's prompt (?prompt=... or #prompt=...), or the first beginnings: two names, or one text.
function fromLink() {
  const linked = (part) => new URLSearchParams(part.slice(1)).get("prompt");
  $("prompt").value = linked(location.hash) ?? linked(location.search) ??
    (known ? [0, 1].map(beginning).join(", ") : beginning(0));
  begin();
}

async function start() {
  const models = await readModels();
  decoders = data.decoders.map((decoder) => ({...decoder, model: models[decoder.number]}));
  if (data.names) known = await readNames();
  buildSliders();
  $("asked").textContent = known ? "beginnings, between commas; _ is one token to fill"
    : "a beginning; ▒ is one token to fill";
  for (const id of ["of_names", "run", "held_out"]) $(id).hidden = !known;
  $("surprise").hidden = !data.beginnings.length;
  $("prompt").rows = known ? 1 : 4;
  for (const id of ["of_text", "of_drawn"]) $(id).hidden = Boolean(known);
  showGates();
  fromLink();
}

$("ask").addEventListener("submit", (e) => {
  e.preventDefault();
  begin();
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
$("run").addEventListener("click", runAll);
const ready = start().catch((e) => ($("wrong").textContent = `This browser cannot run the page: ${e.message}`));
