// The page around the engine (tools/engine.js) and the viewer (tools/trace_page.html): what is typed becomes one record
// for each decoder, and the viewer shows them side by side.

const model = readModel(data);
const SHAPES = {square: "■", triangle: "▲", circle: "●"}; // of the decoders, beside their colours
let byHand = data.decoders.map(() => ({})); // of each decoder: {number of a step: {at, token}}
let earlier = null; // {run, step, answers}: what both stages said before a token was written by hand

// ---------------------------------------------------------------------------------------------------------------------
// what the page holds

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

function readModel({cfg, tokenizer, n_joint, partial_cost, tensors: stored}) {
  const tensors = {};
  for (const [name, tensor] of Object.entries(stored)) tensors[name] = readTensor(tensor);
  if (cfg.tied) tensors["lm_head.weight"] = tensors["wte.weight"];
  return {cfg, tokenizer, n_joint, partial_cost, tensors};
}

// ---------------------------------------------------------------------------------------------------------------------
// the judge: a name is found by its hash among those of all characters, or ends in its character's number

// FNV-1a, 32 bits, started by a seed at which no two names share a hash (tools/playground.py looks for it)
function hash(text) {
  let h = data.names.seed;
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 16777619);
  return h >>> 0;
}

// {codes: hash of a name -> code point, numbered: [first, last, what stands before the number]}
function readNames(names) {
  const hashes = new Uint32Array(fromBase64(names.hashes).buffer);
  const codes = new Map();
  let i = 0;
  for (const [first, count] of names.runs) for (let k = 0; k < count; k++) codes.set(hashes[i++], first + k);
  return {codes, numbered: names.numbered};
}

const known = data.names && readNames(data.names);

// The character of exactly this name, or undefined.
function exists(name) {
  const [, front, number] = name.match(/^(.*-)([0-9A-F]{4,6})$/) ?? [];
  const code = Number.parseInt(number, 16);
  const inRun = ([first, last, before]) => first <= code && code <= last && before === front;
  const canonical = number === code.toString(16).toUpperCase().padStart(4, "0");
  const found = number && canonical && known.numbered.some(inRun) ? code : known.codes.get(hash(name));
  return found === undefined ? undefined : String.fromCodePoint(found);
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

// ---------------------------------------------------------------------------------------------------------------------
// decoding

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
    return {before: z, after, bundle: [at], edited: [], token: after, conf: sure, token_a: after, conf_a: sure,
      partial: 0, byHand: true};
  };
  return {stage: decoder.stage, n_rounds: decoder.n_rounds, tau_m2t: decoder.gated ? tau_m2t : 1, tau_keep, byHand,
    tau_t2t: null, max_post_steps: 16, gen_length: data.gen_length, eos_early_stop: true};
}

// One of the engine's steps, as sample.py records it; and whether it was made by hand.
function stepRecord(s) {
  const {start, before, after, byHand = false} = s;
  const round = (p) => Number(p.toFixed(4));
  const fill = s.bundle.map((t) => ({at: start + t, token: after[t], conf: round(s.conf[t]), token_a: s.token_a[t],
    conf_a: round(s.conf_a[t])}));
  const edit = s.edited.map((t) => ({at: start + t, old: before[t], token: after[t], conf: round(s.conf[t])}));
  const record = {start, before, after, bundle: fill.map((f) => f.at), fill, edit, conf: s.conf.map(round), byHand};
  if (!s.refused) return record;
  const refused = s.refused.map((t) => ({at: start + t, token: s.token[t], conf: round(s.conf[t])}));
  return {...record, refused};
}

// A decode as one record of `sample.py --json`; `counts` are the forwards after each step.
function recordOf(prompt, d) {
  const {tokens, nfe, steps, counts} = generateOne(model, prompt, d);
  const {eos_id, mask_id} = model.cfg;
  const shown = [...prompt, ...steps.flatMap((s) => [...s.after, ...s.token_a, ...s.token])];
  const pieces = Object.fromEntries(shown.map((id) => [id, model.tokenizer.pieces[id]]));
  Object.assign(pieces, {[eos_id]: "∎", [mask_id]: "▒"});
  return {text: decode(model, tokens), verdict: verdict(decode(model, [...prompt, ...tokens])), tokens, nfe,
    nfe_per_token: nfe.full / Math.max(1, tokens.length), partial_cost: model.partial_cost,
    steps: steps.map(stepRecord), prompt, mask_id, n_rounds: d.n_rounds, pieces, counts};
}

// One decoder's run, as the viewer takes it.
function complete(prompt, run) {
  const decoder = data.decoders[run];
  const record = recordOf(prompt, decoding(decoder, byHand[run]));
  return Object.assign(record, {label: decoder.name, about: decoder.about,
    name: decode(model, [...prompt, ...record.tokens])});
}

function promptOf(text) {
  const prompt = encode(model, known ? text.trimEnd() : text);
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

function present(records, step) {
  $("undo").hidden = byHand.every((hand) => !Object.keys(hand).length);
  if ($("undo").hidden) $("seen").textContent = whatIsSeen(records);
  show(records, step);
  document.querySelectorAll(".head h2").forEach((title, run) => {
    const shape = document.createElement("span");
    shape.className = `shape ${data.decoders[run].shape}`;
    shape.textContent = SHAPES[data.decoders[run].shape] + " ";
    shape.setAttribute("aria-hidden", "true");
    title.prepend(shape);
  });
}

// What the decoders wrote, and how that came about.
function whatIsSeen(records) {
  const wrote = (t) => {
    if (!known) return `its text took ${Number(t.nfe.all.toFixed(2))} forwards`;
    return `“${t.name}” ` + (t.verdict.includes("U+") ? `is ${t.verdict.split(" ")[0]}` : "names no character");
  };
  const [factorised, other] = records;
  const how = {
    joint: "The joint head looks at the same masks again and decides them together",
    B: "Stage B marks the same masks and reads them again",
    A: "One token at a time, each knows what stands there already",
  };
  const first = "Factorised, the masks are written at once and none knows what the others take";
  return `${first}: ${wrote(factorised)}. ${how[data.decoders[1].stage]}: ${wrote(other)}.`;
}

// ---------------------------------------------------------------------------------------------------------------------
// the panel: what both stages would write at a mask, and what a token put in by hand changes about it

const second = data.decoders.find((decoder) => decoder.stage !== "A"); // the joint head or Stage B, if there is one

// Probabilities of every token at the masks of block b as it stands: {a, b: position -> Float32Array, bundle}. The
// bundle is the gate's, and `at` with it.
function answersFor(t, b, at) {
  const ctx = newContext();
  const finished = t.blocks.filter((block) => block.start < b.start);
  for (const block of finished) finishBlock(model, look(t, block, now).ids, ctx, second?.n_rounds ?? 0);

  const z = look(t, b, now).ids;
  const masked = [...z.keys()].filter((i) => z[i] === t.mask_id);
  const {h, last, logits} = stageA(model, z, ctx);
  const picked = selectBundle(candidates(logits).conf, masked, gates().tau_m2t, model.cfg.order);
  const bundle = masked.filter((i) => picked.includes(i) || b.start + i === at);

  const answers = {a: new Map(), b: new Map(), bundle: bundle.map((i) => b.start + i)};
  for (const i of masked) answers.a.set(b.start + i, softmax(logits[i]));
  if (second?.stage === "joint" && bundle.length > 1) {
    const rows = head(model, jointHead(model, last, bundle));
    bundle.forEach((i, j) => answers.b.set(b.start + i, softmax(rows[j])));
  }
  if (second?.stage === "B") {
    const rows = head(model, coordinate(model, h, bundle, ctx, second.n_rounds));
    for (const i of bundle) answers.b.set(b.start + i, softmax(rows[i]));
  }
  return answers;
}

morePanel = (panel, t, b, at, v) => {
  if (v.ids[at - b.start] !== t.mask_id) {
    make(panel, "p", "hint", "Step back until this token is a mask to see what else could stand here.");
    return;
  }
  const run = traces.indexOf(t);
  const answers = answersFor(t, b, at);
  const before = earlier?.run === run && earlier.step === now ? earlier.answers : null;
  if (before) make(panel, "p", "hint", "The mask that moved the most; ticks are from before you wrote a token.");
  const lists = make(panel, "div", "lists");
  const write = (token) => writeByHand(run, b, at, token, answers);
  list(lists, "Stage A", "this position by itself", answers.a.get(at), before?.a.get(at), write);
  if (!second) return;
  const together = `positions ${spans(answers.bundle)} together`;
  const alone = "not asked: no other mask passes tau_m2t";
  list(lists, second.name, answers.b.has(at) ? together : alone, answers.b.get(at), before?.b.get(at), write);
};

// The five likeliest tokens as buttons with bars; `before`: the same distribution, earlier.
function list(parent, title, about, p, before, write) {
  const box = make(parent, "div", "");
  make(make(box, "h4", "", title), "span", "", about);
  for (const token of p ? largest(p, 5) : []) {
    const button = make(box, "button", "option");
    button.type = "button";
    const bar = make(button, "span", "level");
    if (before) make(button, "span", "was").style.left = `${100 * before[token]}%`;
    const piece = token === model.cfg.eos_id ? "∎" : model.tokenizer.pieces[token];
    const share = (before ? `${before[token].toFixed(2)} → ` : "") + p[token].toFixed(2);
    make(button, "span", "name", piece);
    make(button, "span", "share", share);
    button.setAttribute("aria-label", `write ${piece} by hand, probability ${share.replace("→", "to")}`);
    button.addEventListener("click", () => write(token));
    bar.style.width = `${100 * (before ? before[token] : p[token])}%`;
    requestAnimationFrame(() => (bar.style.width = `${100 * p[token]}%`));
  }
}

// The run goes on from here with this token, and the panel moves to the mask at which Stage A's answer moved the most.
function writeByHand(run, b, at, token, answers) {
  play(false);
  const k = Math.min(now, traces[run].steps.length);
  const before = Object.entries(byHand[run]).filter(([step]) => step < k);
  byHand[run] = {...Object.fromEntries(before), [k]: {at, token}};
  earlier = {run, step: k + 1, answers};
  chosen = {run, at};
  present(traces.map((t, i) => (i === run ? complete(t.prompt, run) : t)), k + 1);

  const t = traces[run];
  const after = answersFor(t, t.blocks.find((block) => block.start === b.start), at);
  const moved = ([position, p]) => p.reduce((sum, value, i) => sum + Math.abs(value - answers.a.get(position)[i]), 0);
  const [most] = [...after.a.entries()].sort((x, y) => moved(y) - moved(x));
  if (!most) return;
  chosen.at = most[0];
  draw();
  document.querySelector(".option")?.focus({preventScroll: true});
  showChosen();
}

// ---------------------------------------------------------------------------------------------------------------------
// the experiment: names that exist against forwards, over held-out beginnings

let points = []; // {label, shape, run, n, found, forwards}
let running = false;

// Wilson's 95 % interval of a share of which k of n were seen.
function wilson(k, n) {
  const z2 = 1.959963984540054 ** 2;
  const middle = (k + z2 / 2) / (n + z2);
  const spread = Math.sqrt((z2 * k * (n - k)) / n + (z2 * z2) / 4) / (n + z2);
  return [middle - spread, middle + spread];
}

function labelOf(decoder) {
  const {tau_m2t, tau_keep} = gates();
  const keeps = decoder.stage === "joint" && tau_keep !== data.tau_keep ? `, keep ${tau_keep}` : "";
  const gate = tau_m2t === 0 ? "all at once" : tau_m2t;
  return decoder.name + (decoder.gated ? `, ${gate}${keeps}` : "");
}

// One beginning after the other, each with every decoder that has no point at these gates yet.
async function runAll() {
  running = true;
  $("run").textContent = "Stop";
  points = points.filter((point) => point.n === data.beginnings.length); // what was stopped begins again
  const settings = data.decoders.map((decoder) => decoding(decoder));
  const fresh = {n: 0, found: 0, forwards: 0};
  const added = data.decoders.map((decoder, run) => ({label: labelOf(decoder), shape: decoder.shape, run, ...fresh}));
  const isNew = added.filter((point) => !points.some((old) => old.label === point.label));
  points = [...points, ...isNew];
  for (const [i, prompt] of data.beginnings.entries()) {
    if (!running) break;
    for (const point of isNew) {
      const record = generateOne(model, prompt, settings[point.run]);
      point.n += 1;
      point.found += exists(decode(model, [...prompt, ...record.tokens])) !== undefined;
      point.forwards += record.nfe.all;
    }
    $("progress").textContent = `${i + 1} of ${data.beginnings.length} names`;
    drawShares();
    await new Promise((resume) => setTimeout(resume));
  }
  running = false;
  $("run").textContent = `Run ${data.beginnings.length}`;
  drawShares();
}

function drawShares() {
  const rows = points.filter((point) => point.n);
  $("shares").hidden = !rows.length;
  const body = $("shares").tBodies[0];
  body.replaceChildren();
  for (const {label, shape, n, found, forwards} of rows) {
    const row = make(body, "tr", "");
    const title = make(row, "th", "");
    title.scope = "row";
    make(title, "span", `shape ${shape}`, SHAPES[shape] + " ");
    title.append(label);
    const [low, high] = wilson(found, n).map((share) => (100 * share).toFixed(0));
    const cells = [n, `${((100 * found) / n).toFixed(0)} %`, `${low}–${high} %`, (forwards / n).toFixed(2)];
    for (const text of cells) make(row, "td", "", String(text));
  }
  drawChart(rows);
}

function drawChart(rows) {
  $("chart").replaceChildren();
  if (!rows.length) return;
  const width = Math.min(720, $("chart").clientWidth || 720);
  const height = 300;
  const left = 52;
  const right = 16;
  const top = 12;
  const bottom = 40;
  const most = Math.max(8, ...rows.map((point) => Math.ceil(point.forwards / point.n)));
  const x = (forwards) => left + (forwards / most) * (width - left - right);
  const y = (share) => height - bottom - share * (height - bottom - top);
  const svg = draws($("chart"), "svg", {viewBox: `0 0 ${width} ${height}`, role: "img"});
  svg.style.maxWidth = `${width}px`;
  svg.setAttribute("aria-label", "names that exist against forwards a name; the table below holds the numbers");

  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    draws(svg, "line", {class: "axis", x1: left, x2: width - right, y1: y(share), y2: y(share)});
    draws(svg, "text", {class: "soft", x: left - 6, y: y(share) + 4, "text-anchor": "end"}, `${100 * share} %`);
  }
  for (let forwards = 0; forwards <= most; forwards += 2)
    draws(svg, "text", {class: "soft", x: x(forwards), y: height - bottom + 18, "text-anchor": "middle"}, forwards);
  const middle = {class: "soft", x: x(most / 2), y: height - 4, "text-anchor": "middle"};
  draws(svg, "text", middle, "forwards a name, all counted");

  for (const {label, shape, n, found, forwards} of rows) {
    const at = x(forwards / n);
    const share = y(found / n);
    const [low, high] = wilson(found, n);
    const group = draws(svg, "g", {class: shape});
    draws(group, "line", {class: "interval", x1: at, x2: at, y1: y(low), y2: y(high)});
    const cap = {class: "interval", x1: at - 4, x2: at + 4};
    for (const end of [low, high]) draws(group, "line", {...cap, y1: y(end), y2: y(end)});
    drawPoint(group, shape, at, share);
    const toTheLeft = at > 0.7 * width;
    const beside = toTheLeft ? {x: at - 10, "text-anchor": "end"} : {x: at + 10};
    draws(group, "text", {...beside, y: share + 4}, label);
  }
}

// A square, a triangle or a circle: the decoders differ by shape as well as by colour.
function drawPoint(group, shape, x, y) {
  if (shape === "square") draws(group, "rect", {class: "point", x: x - 5, y: y - 5, width: 10, height: 10});
  if (shape === "triangle") draws(group, "path", {class: "point", d: `M${x - 6},${y + 5} h12 l-6,-11 z`});
  if (shape === "circle") draws(group, "circle", {class: "point", cx: x, cy: y, r: 5.5});
}

function draws(parent, tag, attributes, text = "") {
  const e = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.textContent = text;
  return e;
}

// ---------------------------------------------------------------------------------------------------------------------
// what one can touch

function showGates() {
  const {tau_m2t, tau_keep} = gates();
  $("tau_m2t_value").textContent = tau_m2t.toFixed(2);
  $("tau_keep_value").textContent = tau_keep.toFixed(2);
}

// Completes the prompt and plays it from the start; who asks for no motion sees the end.
function begin() {
  play(false);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  ask(still ? Infinity : 0);
  if (!still && !$("wrong").textContent) play(true);
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
$("undo").addEventListener("click", () => ask(now));
for (const gate of ["tau_m2t", "tau_keep"]) {
  $(gate).addEventListener("input", showGates);
  $(gate).addEventListener("change", () => { play(false); ask(); });
}
$("run").addEventListener("click", () => { if (running) running = false; else runAll(); });
$("clear").addEventListener("click", () => {
  running = false;
  points = [];
  $("progress").textContent = "";
  drawShares();
});

document.title = $("title").textContent = "Tokens that are written together should agree";
$("prompt").value = data.prompt;
$("tau_m2t").value = data.tau_m2t;
if (data.tau_keep !== null) $("tau_keep").value = data.tau_keep;
for (const keeper of document.querySelectorAll(".keep")) keeper.hidden = second?.stage !== "joint";
for (const order of ["surest", "leftmost"])
  for (const rule of document.querySelectorAll(`.${order}`)) rule.hidden = model.cfg.order !== order;
$("gates").open = matchMedia("(min-width: 47rem)").matches;
$("experiment").hidden = $("surprise").hidden = !known;
following = !known; // a name fits the screen
showGates();
if (!known) $("kind").textContent = "text";

// the step in its address, or the whole from the start
if (location.hash) ask(linked());
else begin();
