// The page around the engine (engine.js) and the viewer (viewer.js): what is typed becomes one record for each decoder,
// and the viewer shows them side by side. It also shows records from files.

const data = JSON.parse($("data").textContent);
const model = readModel(data);
let byHand = data.decoders.map(() => ({})); // of each decoder: {number of a step: {at, token}}
let fromFiles = false; // whether the records shown are of files: of another model, perhaps

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

function readModel({cfg, tokenizer, partial_cost, tensors: stored}) {
  const tensors = {};
  for (const [name, tensor] of Object.entries(stored)) tensors[name] = readTensor(tensor);
  return {cfg, tokenizer, partial_cost, tensors};
}

// --- the judge: a name is in the list of all, or ends in its character's number

const known = data.names;

// The character of exactly this name, or undefined.
function exists(name) {
  const [, front, number] = name.match(/^(.*-)([0-9A-F]{4,6})$/) ?? [];
  const code = Number.parseInt(number, 16);
  const inRun = ([first, last, before]) => first <= code && code <= last && before === front;
  const canonical = number === code.toString(16).toUpperCase().padStart(4, "0");
  if (number && canonical && known.numbered.some(inRun)) return String.fromCodePoint(code);
  return Object.hasOwn(known.codes, name) ? String.fromCodePoint(known.codes[name]) : undefined;
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

const gates = () => ({tau_m2t: Number($("tau_m2t").value), tau_keep: Number($("tau_keep").value)});

// The fields of sample.Decoding for one of the page's decoders, and the tokens {number of a step: {at, token}} that are
// written by hand: such a step asks the model nothing.
function decoding(decoder, hand = {}) {
  const {tau_m2t, tau_keep} = gates();
  const byHand = (z, start, n) => {
    if (!(n in hand)) return undefined;
    const at = hand[n].at - start;
    const after = z.map((id, t) => (t === at ? hand[n].token : id));
    const sure = z.map(() => 1);
    const said = {token: after, conf: sure, token_a: after, conf_a: sure};
    const nothing = {edited: [], refused: [], looks: [], nLooks: 0, partial: 0};
    return {...nothing, ...said, before: z, after, bundle: [at], byHand: true};
  };
  return {stage: decoder.stage, n_rounds: decoder.n_rounds, tau_m2t: decoder.gated ? tau_m2t : 1, tau_keep, byHand,
    tau_t2t: null, max_post_steps: 16, gen_length: data.gen_length, eos_early_stop: true};
}

// One of the engine's steps, as sample.py records it; the head's looks, and whether it was made by hand.
function stepRecord(s) {
  const {start, before, after, byHand = false} = s;
  const round = (p) => Number(p.toFixed(4));
  const fill = s.bundle.map((t) => ({at: start + t, token: after[t], conf: round(s.conf[t]), token_a: s.token_a[t],
    conf_a: round(s.conf_a[t])}));
  const edit = s.edited.map((t) => ({at: start + t, old: before[t], token: after[t], conf: round(s.conf[t])}));
  const refused = s.refused.map((t) => ({at: start + t, token: s.token[t], conf: round(s.conf[t])}));
  const looks = s.looks.map((asked) => asked.map(({t, token, final}) => ({at: start + t, token, final})));
  return {start, before, after, fill, edit, refused, conf: s.conf.map(round), partial: s.partial, looks, byHand};
}

// A decode as one record of `sample.py --json`.
function recordOf(asked, d) {
  const {prompt, tokens, nfe, steps} = generateOne(model, asked, d);
  const {eos_id, mask_id} = model.cfg;
  const looked = steps.flatMap((s) => s.looks.flat().map((x) => x.token));
  const shown = [...prompt, ...looked, ...steps.flatMap((s) => [...s.after, ...s.token_a, ...s.token])];
  const pieces = Object.fromEntries(shown.map((id) => [id, model.tokenizer.pieces[id]]));
  Object.assign(pieces, {[eos_id]: "∎", [mask_id]: "▒"});
  const n_written = tokens.length + asked.filter((id) => id === mask_id).length;
  return {text: decode(model, tokens), verdict: verdict(decode(model, [...prompt, ...tokens])), tokens, nfe,
    n_written, partial_cost: model.partial_cost,
    steps: steps.map(stepRecord), prompt, mask_id, n_rounds: d.n_rounds, pieces};
}

// One decoder's run, as the viewer takes it.
function complete(prompt, run) {
  const decoder = data.decoders[run];
  const record = recordOf(prompt, decoding(decoder, byHand[run]));
  const name = decode(model, [...record.prompt, ...record.tokens]);
  return {...record, asked: prompt, label: decoder.name, about: decoder.about, name};
}

// The ids of a text, in which each ▒ is one token to fill.
function encodeWithHoles(text) {
  const parts = text.split("▒").map((part) => encode(model, known ? part.trimEnd() : part));
  return parts.flatMap((ids, i) => (i ? [model.cfg.mask_id, ...ids] : ids));
}

function promptOf(text) {
  const prompt = encodeWithHoles(text);
  const need = Math.ceil((prompt.length + data.gen_length) / model.cfg.block_length) * model.cfg.block_length;
  if (!prompt.length) return {wrong: "The model continues a text: type at least one letter."};
  if (need > model.cfg.max_len) return {wrong: "This beginning is too long for the model."};
  return {prompt};
}

// Completes what stands in the prompt box, and shows it at `step` (the last one, if not given).
function ask(step = Infinity) {
  const {prompt, wrong} = promptOf($("prompt").value);
  $("wrong").textContent = wrong ?? "";
  if (wrong) return;
  chosen = null;
  byHand = data.decoders.map(() => ({}));
  present(data.decoders.map((_, run) => complete(prompt, run)), step);
}

// Texts of files, [name, text] each, whose lines are records: shown side by side, from the start.
function showRecords(files) {
  const records = [];
  for (const [name, text] of files) {
    const lines = text.split("\n").filter((line) => line.trim());
    for (const line of lines) {
      const record = JSON.parse(line);
      if (!record.steps?.length) throw new Error(`${name} holds no steps`);
      records.push({...record, label: name.replace(/\.\w+$/, "")});
    }
  }
  const prompts = new Set(records.map((record) => String(record.prompt)));
  if (prompts.size !== 1) throw new Error(`side by side are runs of one prompt, these are of ${prompts.size}`);
  play(false);
  chosen = null;
  fromFiles = true;
  $("seen").textContent = "Runs of sample.py --json, from files.";
  show(records, 0);
}

// Shows one record for each decoder.
function present(records, step) {
  fromFiles = false;
  $("seen").textContent = whatIsSeen(records);
  show(records, step);
}

// What the decoders wrote, in a sentence.
function whatIsSeen(records) {
  const wrote = (t) => {
    if (!known) return `${t.label} took ${rounded(t.nfe.all)} forwards`;
    const what = t.verdict.includes("U+") ? `is ${[...t.verdict][0]}` : "names no character";
    return `${t.label} writes “${t.name}”, which ${what}`;
  };
  return records.map(wrote).join("; ") + ".";
}

// --- the panel: what both stages would write at a mask, and a token put there by hand

const second = data.decoders.find((decoder) => decoder.stage !== "A"); // the head or Stage B, if there is one

// Probabilities of every token at position `at` of block b as it stands: {a, b}, by Stage A and by what looks again,
// where it does. The bundle is the gate's, and `at` with it.
function answersAt(t, b, at) {
  const ctx = newContext();
  const finished = t.blocks.filter((block) => block.start < b.start);
  for (const block of finished) finishBlock(model, look(t, block, now).ids, ctx, second?.n_rounds ?? 0);

  const z = look(t, b, now).ids;
  const here = at - b.start;
  const masked = [...z.keys()].filter((i) => z[i] === t.mask_id);
  const {h, last, logits} = stageA(model, z, ctx);
  const {token: token_a, conf: conf_a} = candidates(logits);
  const picked = selectBundle(conf_a, masked, gates().tau_m2t, model.cfg.order);
  const bundle = masked.filter((i) => picked.includes(i) || i === here);

  let again;
  if (second?.stage === "head")
    again = headLook(model, z, {last, logits, token_a, conf_a}, bundle, gates().tau_keep).answers.get(here);
  if (second?.stage === "B")
    again = head(model, coordinate(model, h, bundle, ctx, second.n_rounds))[here];
  return {a: softmax(logits[here]), b: again && softmax(again)};
}

morePanel = (panel, t, b, at, v) => {
  if (fromFiles) return;
  if (v.ids[at - b.start] !== t.mask_id) {
    make(panel, "p", "counts", "Step back until this token is a mask to see what else could stand here.");
    return;
  }
  const answers = answersAt(t, b, at);
  const lists = make(panel, "div", "lists");
  const write = (token) => writeByHand(traces.indexOf(t), at, token);
  list(lists, "Stage A", "this position by itself", answers.a, write);
  const together = second?.stage === "head" ? "after the token before it" : "with the rest of the bundle";
  const alone = "it stands aside: a token stands behind a mask";
  if (second) list(lists, second.name, answers.b ? together : alone, answers.b, write);
};

// The five likeliest tokens as buttons with bars.
function list(parent, title, about, p, write) {
  const box = make(parent, "div", "");
  make(make(box, "h4", "", title), "span", "", about);
  for (const token of p ? largest(p, 5) : []) {
    const button = make(box, "button", "option");
    button.type = "button";
    make(button, "span", "level").style.width = `${100 * p[token]}%`;
    make(button, "span", "name", token === model.cfg.eos_id ? "∎" : model.tokenizer.pieces[token]);
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
  const records = traces.map((t, i) => (i === run ? complete(t.asked, run) : t));
  const {start, after} = records[run].steps[k];
  const left = after.indexOf(model.cfg.mask_id);
  chosen = {run, at: left < 0 ? at : start + left};
  present(records, k + 1);
}

// --- the experiment: how many names exist, and the forwards that they took, over held-out beginnings

// One beginning after the other, each by every decoder.
async function runAll() {
  $("run").disabled = true;
  const sums = data.decoders.map((decoder) => ({decoder, d: decoding(decoder), found: 0, forwards: 0}));
  for (const [i, prompt] of data.beginnings.entries()) {
    for (const sum of sums) {
      const {tokens, nfe} = generateOne(model, prompt, sum.d);
      sum.found += exists(decode(model, [...prompt, ...tokens])) === undefined ? 0 : 1;
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
  for (const {decoder, found, forwards} of sums) {
    const row = make(body, "tr", "");
    make(row, "th", "", decoder.name).scope = "row";
    make(row, "td", "", `${((100 * found) / n).toFixed(0)} %`);
    make(row, "td", "", (forwards / n).toFixed(2));
  }
}

// --- what one can touch

function showGates() {
  const {tau_m2t, tau_keep} = gates();
  $("gate_values").textContent = `tau_m2t ${tau_m2t.toFixed(2)}, tau_keep ${tau_keep.toFixed(2)}`;
}

// Completes the prompt and plays it from the start.
function begin() {
  play(false);
  ask(0);
  if (!$("wrong").textContent) play(true);
}

$("ask").addEventListener("submit", (e) => {
  e.preventDefault();
  begin();
});
$("surprise").addEventListener("click", () => {
  const prompt = data.beginnings[Math.floor(Math.random() * data.beginnings.length)];
  $("prompt").value = decode(model, prompt);
  $("ask").requestSubmit();
});
for (const gate of ["tau_m2t", "tau_keep"]) {
  $(gate).addEventListener("input", showGates);
  $(gate).addEventListener("change", () => { play(false); ask(); });
}
$("run").addEventListener("click", runAll);
$("files").addEventListener("change", async () => {
  try {
    showRecords(await Promise.all([...$("files").files].map(async (file) => [file.name, await file.text()])));
    $("unread").textContent = "";
    scrollTo(0, 0);
  } catch (problem) {
    $("unread").textContent = `This is not what sample.py --json writes: ${problem.message}.`;
  }
});
$("prompt").value = data.prompt;
$("tau_keep").value = data.tau_keep;
$("keep").hidden = second?.stage !== "head";
$("experiment").hidden = $("surprise").hidden = !known;
showGates();
if (!known) $("kind").textContent = "text";

begin();
