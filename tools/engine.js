"use strict";
// The model in a page: what model.py, causal.py and sample.generate compute, for one row.
//
//   const h = prefix(model, z, ctx);                               // first L - n layers, shared by both stages
//   const a = logits(model, lastN(model, h, ctx));                 // Stage A: factorised
//   logits(model, coordinate(model, h, bundle, ctx, K));           // Stage B: marked, the last n layers again
//
// States are rows: an array with one Float32Array of C numbers for each of the T positions of the current block.
// Finished blocks are keys and values in ctx.past: no block attends to a later one, so they never change.
// A model is {cfg: a Config, tensors: name -> Float32Array, stage_b: "paper" or "causal", copy: of a causal one the
// tensors of Stage B's pass, tokenizer: {bytes: each token's, as letters, ranks: the same the other way round, special,
// pieces, and two patterns, words and names of special tokens}}.
//
// T positions of the block, C channels (n_embd), H query heads, G key and value heads, D head dim, V vocabulary
const MAX_STEPS = 1024; // the most forwards in one block, besides one for each of its tokens
const LORA_SCALE = 2;

// --- the tokenizer: byte-level BPE, with bytes as the letters U+0000 to U+00FF

function encode(model, text) {
  const {special, ranks, names, words} = model.tokenizer;
  const found = [];
  for (const [i, part] of text.split(new RegExp(names)).entries()) {
    // between two texts stands the name of a special token
    if (i % 2) {
      found.push(special[part]);
      continue;
    }
    for (const word of part.match(new RegExp(words, "gu")) ?? []) {
      const bytes = [...new TextEncoder().encode(word)].map((byte) => String.fromCharCode(byte));
      found.push(...mergeBytes(bytes, ranks).map((token) => ranks.get(token)));
    }
  }
  return found;
}

// The pair that was learned first is merged first, of equals the one on the left, until no pair is known.
function mergeBytes(parts, ranks) {
  while (true) {
    const pairs = parts.slice(1).map((right, i) => ranks.get(parts[i] + right) ?? Infinity);
    const lowest = Math.min(...pairs);
    if (lowest === Infinity) return parts;
    const i = pairs.indexOf(lowest);
    parts.splice(i, 2, parts[i] + parts[i + 1]);
  }
}

// Special tokens have no bytes, and bytes that are no UTF-8 become U+FFFD.
function decode(model, ids) {
  const letters = ids.map((id) => model.tokenizer.bytes[id]).join("");
  return new TextDecoder("utf-8", {ignoreBOM: true}).decode(Uint8Array.from(letters, (letter) => letter.charCodeAt(0)));
}

// --- layers, on rows

const add = (rows, others) => rows.map((row, t) => row.map((value, c) => value + others[t][c]));
const sigmoid = (value) => 1 / (1 + Math.exp(-value));
const silu = (value) => value * sigmoid(value);

function dot(W, first, x) {
  let [sum, other, i] = [0, 0, 0];
  for (; i + 1 < x.length; i += 2) { // two sums, for a processor adds both at a time
    sum += W[first + i] * x[i];
    other += W[first + i + 1] * x[i + 1];
  }
  return i < x.length ? sum + other + W[first + i] * x[i] : sum + other;
}

// y = W x + bias for each row, W (out, in).
function linear(rows, W, bias) {
  return rows.map((x) => {
    const y = new Float32Array(W.length / x.length);
    for (let o = 0; o < y.length; o++) y[o] = dot(W, o * x.length, x) + (bias ? bias[o] : 0);
    return y;
  });
}

// Root mean square norm, scaled.
function rmsNorm(x, weight, eps) {
  let squares = 0;
  for (const value of x) squares += value * value;
  const scale = 1 / Math.sqrt(squares / x.length + eps);
  return x.map((value, c) => value * scale * weight[c]);
}

const norm = (model, name, rows) => rows.map((x) => rmsNorm(x, model.tensors[name + ".weight"], model.cfg.norm_eps));

// Half-rotation of the first rotary_dim numbers of a head, in place: first half against second half.
function rotate(cfg, x, position) {
  const half = cfg.rotary_dim / 2;
  for (let i = 0; i < half; i++) {
    const angle = position * cfg.rope_theta ** (-i / half);
    const first = x[i];
    const second = x[half + i];
    x[i] = first * Math.cos(angle) - second * Math.sin(angle);
    x[half + i] = second * Math.cos(angle) + first * Math.sin(angle);
  }
}

// Heads number `from` to `end` of a fused row.
function heads(model, row, from, end) {
  const D = model.cfg.head_dim;
  return Array.from({length: end - from}, (_, i) => row.slice((from + i) * D, (from + i + 1) * D));
}

// Queries and keys are normed, each head by itself, and then rotated to their position.
function place(model, name, ofHead, position) {
  const normed = norm(model, name, ofHead);
  normed.forEach((x) => rotate(model.cfg, x, position));
  return normed;
}

// A block sees itself, in both directions, and the finished blocks in the window of training, whose keys and values are
// kept. `slot`: whose finished keys and values.
// In causal Stage B (ctx.bundle) only its positions see the bundle: each itself and those on its left.
function attention(model, name, rows, ctx, slot) {
  const {n_head: H, n_kv_head: G, head_dim: D, block_length: B, window} = model.cfg;
  const {tensors} = model;
  const qkv = linear(rows, tensors[name + ".qkv.weight"], tensors[name + ".qkv.bias"]);
  const q = qkv.map((row, t) => place(model, name + ".q_norm", heads(model, row, 0, H), ctx.start + t));
  const newK = qkv.map((row, t) => place(model, name + ".k_norm", heads(model, row, H, H + G), ctx.start + t));
  const newV = qkv.map((row) => heads(model, row, H + G, H + 2 * G));

  // a block that is finished leaves its keys and values
  const past = ctx.past[slot] ?? {k: [], v: []};
  const k = past.k.concat(newK);
  const v = past.v.concat(newV);
  const first = window ? Math.max(0, k.length - (Math.ceil(window / B) - 1) * B) : 0; // that the next block sees
  if (ctx.keep) ctx.past[slot] = {k: k.slice(first), v: v.slice(first)};
  const sees = (t, s) => !ctx.bundle?.includes(s) || (ctx.bundle.includes(t) && s <= t);
  // H / G query heads share one head of keys and values
  const mixed = q.map((ofHead, t) => {
    const seen = [...k.keys()].filter((s) => sees(t, s - past.k.length));
    const y = new Float32Array(H * D);
    ofHead.forEach((query, i) => y.set(attend(query, k, v, Math.floor((i * G) / H), seen), i * D));
    return y;
  });
  return linear(mixed, tensors[name + ".proj.weight"], tensors[name + ".proj.bias"]);
}

// One query of one head: the values of head g at the places that it sees, weighted by the softmax of the scores.
function attend(query, k, v, g, seen) {
  const weights = softmax(seen.map((s) => dot(k[s][g], 0, query) / Math.sqrt(query.length)));
  const y = new Float32Array(query.length);
  weights.forEach((weight, j) => v[seen[j]][g].forEach((value, c) => (y[c] += weight * value)));
  return y;
}

// SwiGLU; the gate's rows come first.
function swiglu(rows, gateUp, down) {
  const hidden = linear(rows, gateUp).map((row) => {
    const width = row.length / 2;
    return row.subarray(0, width).map((gate, i) => silu(gate) * row[width + i]);
  });
  return linear(hidden, down);
}

// The experts of one row -> expert -> weight. The bias decides who is chosen, inside the topk_group best of n_group
// groups (a group is as good as its two best); the weights are the unbiased scores, normalised and scaled.
function route(model, name, x) {
  const {n_expert, n_group, topk_group, n_active, routed_scaling} = model.cfg;
  const groupOf = (expert) => Math.floor((expert * n_group) / n_expert);
  const scores = [...linear([x], model.tensors[name + ".router"])[0].map(sigmoid)];
  const biased = scores.map((score, expert) => score + model.tensors[name + ".expert_bias"][expert]);
  const groupScores = Array.from({length: n_group}, (_, group) => {
    const members = biased.filter((_, expert) => groupOf(expert) === group);
    const [best, second] = largest(members, 2);
    return members[best] + members[second];
  });
  const kept = largest(groupScores, topk_group);
  const allowed = biased.map((score, expert) => (kept.includes(groupOf(expert)) ? score : -Infinity));
  const chosen = largest(allowed, n_active);
  const total = n_active > 1 ? chosen.reduce((sum, expert) => sum + scores[expert], 1e-20) : 1;
  return new Map(chosen.map((expert) => [expert, (scores[expert] / total) * routed_scaling]));
}

// Mixture of experts: each expert on the rows that chose it and, on all rows, a shared one.
function moe(model, name, rows) {
  const {tensors} = model;
  const {n_expert} = model.cfg;
  const part = (W, expert) => W.subarray((expert * W.length) / n_expert, ((expert + 1) * W.length) / n_expert);
  const y = rows.map((x) => new Float32Array(x.length));
  const routes = rows.map((x) => route(model, name, x));
  for (let expert = 0; expert < n_expert; expert++) {
    const mine = [...rows.keys()].filter((t) => routes[t].has(expert));
    if (!mine.length) continue;
    const gateUp = part(tensors[name + ".gate_up"], expert);
    const out = swiglu(mine.map((t) => rows[t]), gateUp, part(tensors[name + ".down"], expert));
    mine.forEach((t, j) => out[j].forEach((value, c) => (y[t][c] += routes[t].get(expert) * value)));
  }
  const shared = tensors[name + ".shared.gate_up.weight"];
  return shared ? add(y, swiglu(rows, shared, tensors[name + ".shared.down.weight"])) : y;
}

function mlp(model, name, rows) {
  if (name + ".router" in model.tensors) return moe(model, name, rows);
  return swiglu(rows, model.tensors[name + ".gate_up.weight"], model.tensors[name + ".down.weight"]);
}

function run(model, rows, ctx, first, end) {
  for (let i = first; i < end; i++) {
    const name = "layers." + i;
    const slot = i + ctx.round * model.cfg.n_last; // each round of Stage B has slots of its own
    rows = add(rows, attention(model, name + ".attn", norm(model, name + ".norm_1", rows), ctx, slot));
    rows = add(rows, mlp(model, name + ".mlp", norm(model, name + ".norm_2", rows)));
  }
  return rows;
}

// --- an adapter

// The base with what an adapter has learned: LoRA, which is added to its matrix, the markers, Show; and `layers_b.J`,
// causal Stage B's own copy of layer L - n + J, beside which Stage A stays the base.
function adapted(base, {cfg, lora_r, stage_b, tensors: learned}) {
  const tensors = {...base.tensors, ...learned};
  for (const name of Object.keys(learned).filter((name) => name.endsWith("lora_A"))) {
    const target = name.replace("lora_A", "weight");
    const B = learned[name.replace("lora_A", "lora_B")];
    tensors[target] = withLora(base.tensors[target], learned[name], B, lora_r);
  }

  // the copy by the names of the layers that it is a copy of
  const copy = {...tensors};
  for (const name of Object.keys(tensors).filter((name) => name.startsWith("layers_b."))) {
    const layer = (_, j) => `layers.${cfg.n_layer - cfg.n_last + Number(j)}`;
    copy[name.replace(/^layers_b\.(\d+)/, layer)] = tensors[name];
  }
  return {...base, cfg, stage_b, tensors, copy};
}

// W + 2 B A. W (out, in), A (r, in), B (out, r).
function withLora(W, A, B, r) {
  const width = A.length / r;
  return W.map((value, i) => {
    const row = Math.floor(i / width);
    let sum = 0;
    for (let k = 0; k < r; k++) sum += B[row * r + k] * A[k * width + (i % width)];
    return value + LORA_SCALE * sum;
  });
}

// --- the split, by the project's names

// Where the current block stands (start), what it sees of the finished ones (past), and whether it is finished now
// (keep).
const newContext = () => ({start: 0, round: 0, past: [], keep: false});

function prefix(model, z, ctx) {
  const {n_layer, n_last, n_embd: C} = model.cfg;
  const embedded = z.map((id) => model.tensors["wte.weight"].slice(id * C, (id + 1) * C));
  return run(model, embedded, ctx, 0, n_layer - n_last);
}

function lastN(model, h, ctx) {
  return run(model, h, ctx, model.cfg.n_layer - model.cfg.n_last, model.cfg.n_layer);
}

// The paper's Head: final norm and output layer.
function logits(model, h) {
  return linear(norm(model, "norm_f", h), model.tensors["lm_head.weight"]);
}

// h + 1_S * mark; what the mark of a state is, markOf(state, position) says.
function marked(h, bundle, markOf) {
  return h.map((row, t) => {
    if (!bundle.includes(t)) return row;
    const mark = markOf(row, t);
    return row.map((value, c) => value + mark[c]);
  });
}

// Eq. 4: K times h <- LastN(h + 1_S * marker).
function coordinate(model, h, bundle, ctx, n_rounds) {
  for (let round = 0; round < n_rounds; round++) {
    const marker = model.tensors.markers.subarray(round * h[0].length, (round + 1) * h[0].length);
    h = lastN(model, marked(h, bundle, () => marker), {...ctx, round});
  }
  return h;
}

// --- causal Stage B

// One pass. `tokens`: in the bundle the drafts, and elsewhere what the block shows. A position of the bundle is shown
// the token on its left in the block, and the first position a mask.
function causalCoordinate(model, h, bundle, ctx, tokens) {
  const before = (t) => (t > 0 ? tokens[t - 1] : model.cfg.mask_id);
  const states = marked(h, bundle, (row, t) => shown(model, row, before(t)));
  return lastN({...model, tensors: model.copy}, states, {...ctx, bundle});
}

// Logits by which a mask cannot be written.
const neverMask = ({cfg}, rows) => rows.map((row) => row.map((value, id) => (id === cfg.mask_id ? -Infinity : value)));

// rms(h) * (marker + Show(the token before)): what is added to a state h of the bundle.
function shown(model, h, token) {
  const C = h.length;
  const embedded = model.tensors["wte.weight"].slice(token * C, (token + 1) * C);
  const [show] = linear([rmsNorm(embedded, new Float32Array(C).fill(1), 2 ** -23)], model.tensors.show);
  const rms = Math.sqrt(h.reduce((sum, value) => sum + value * value, 0) / C);
  return model.tensors.markers.map((value, c) => rms * (value + show[c]));
}

// --- decoding

function softmax(logits) {
  const highest = logits.reduce((a, b) => Math.max(a, b));
  const p = Float32Array.from(logits, (value) => Math.exp(value - highest));
  const total = p.reduce((a, b) => a + b);
  return p.map((value) => value / total);
}

// Where the k largest are, largest first; of equals the first.
function largest(values, k) {
  return [...values.keys()].sort((a, b) => values[b] - values[a] || a - b).slice(0, k);
}

// What a token is drawn from: the softmax at this temperature; at 0, which is greedy, the softmax at 1.
const shares = (row, {temperature}) => softmax(temperature > 0 ? row.map((value) => value / temperature) : row);

// Each row's token and its probability: the likeliest, the first of equals; or, with temperature, the one in whose
// share u[t] falls.
function candidates(logits, u, d) {
  const p = logits.map((row) => shares(row, d));
  const likeliest = (row) => row.indexOf(row.reduce((a, b) => Math.max(a, b)));
  const token = logits.map((row, t) => (d.temperature > 0 ? drawn(p[t], u[t]) : likeliest(row)));
  return {token, conf: p.map((row, t) => row[token[t]])};
}

// p: the probabilities of one row; u in [0, 1).
function drawn(p, u) {
  const mass = p.reduce((sum, value) => sum + value);
  let sum = 0;
  const place = p.findIndex((value) => (sum += value) > u * mass);
  return place < 0 ? p.findLastIndex((value) => value > 0) : place; // rounding: not past the last one
}

// The numbers by which sample.py draws with this --seed: n, a step -> B in [0, 1) for each stage.
function numbersOf(seed, prompt, B) {
  const next = generator(`(${seed}, 'sample', (${prompt.join(", ")}${prompt.length > 1 ? "" : ","}), 0)`);
  const numbers = [];
  return (n) => {
    while (numbers.length <= n) numbers.push([0, 1].map(() => Array.from({length: B}, next)));
    return numbers[n];
  };
}

// lib.util.generator: a function of the key alone, whose SHA-256 is the seed of torch's Mersenne twister.
function generator(key) {
  const [high, low] = sha256(key);
  const state = [(high << 24) | (low >>> 8)];
  const next = (word, i) => (Math.imul(1812433253, word ^ (word >>> 30)) + i) | 0;
  while (state.length < 624) state.push(next(state.at(-1), state.length));
  let at = 0; // the word that is drawn next, and in its place that of the next round
  return () => {
    const both = (state[at] & 0x80000000) | (state[(at + 1) % 624] & 0x7fffffff);
    state[at] = state[(at + 397) % 624] ^ (both >>> 1) ^ (both & 1 ? 0x9908b0df : 0);
    let bits = state[at];
    at = (at + 1) % 624;
    bits ^= bits >>> 11;
    bits ^= (bits << 7) & 0x9d2c5680;
    bits ^= (bits << 15) & 0xefc60000;
    return ((bits ^ (bits >>> 18)) & 0xffffff) / 2 ** 24; // a float32 has 24 bits
  };
}

// SHA-256 of ASCII text -> eight words. Its constants are digits of the roots of the first primes.
function sha256(text) {
  const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  const digits = (root) => primes.map((p) => ((root(p) % 1) * 2 ** 32) | 0);
  const K = digits(Math.cbrt);
  const turn = (word, ...by) => by.reduce((sum, n) => sum ^ ((word >>> n) | (word << (32 - n))), 0);

  const words = new Int32Array(Math.ceil((text.length + 9) / 64) * 16); // the text, a bit, and the length at the end
  [...text, "\x80"].forEach((letter, i) => (words[i >> 2] |= letter.charCodeAt(0) << (24 - 8 * (i % 4))));
  words[words.length - 1] = 8 * text.length;
  let hash = digits(Math.sqrt).slice(0, 8);
  for (let first = 0; first < words.length; first += 16) {
    const w = [...words.subarray(first, first + 16)];
    let [a, b, c, d, e, f, g, h] = hash;
    for (let t = 0; t < 64; t++) {
      const [x, y] = [w[t - 15], w[t - 2]];
      if (t > 15) w[t] = (w[t - 16] + w[t - 7] + (turn(x, 7, 18) ^ (x >>> 3)) + (turn(y, 17, 19) ^ (y >>> 10))) | 0;
      const one = h + turn(e, 6, 11, 25) + ((e & f) ^ (~e & g)) + K[t] + w[t];
      const two = turn(a, 2, 13, 22) + ((a & b) ^ (a & c) ^ (b & c));
      [a, b, c, d, e, f, g, h] = [(one + two) | 0, a, b, c, (d + one) | 0, e, f, g];
    }
    hash = [a, b, c, d, e, f, g, h].map((word, i) => (word + hash[i]) | 0);
  }
  return hash;
}

// The logarithm of what the probability of a run of tokens must exceed, where tau_m2t is about runs; -1: of all.
const logGate = ({tau_m2t}) => (tau_m2t > 0 ? Math.log(tau_m2t) : -Infinity);

// The leftmost masks whose probabilities have a product above tau_m2t, and at least one -> positions in the block.
function fromTheLeft(conf, masked, d) {
  let run = 0;
  return masked.filter((t, i) => (run += Math.log(conf[t])) > logGate(d) || i === 0);
}

// The masks that pass tau_m2t, or the surest one where none does.
function byConfidence(conf, masked, {tau_m2t}) {
  const passing = masked.filter((t) => conf[t] > tau_m2t);
  if (passing.length > 0) return passing;

  // of equals, to five digits, the leftmost
  const digits = (t) => Math.round(1e5 * conf[t]);
  const best = Math.max(...masked.map(digits));
  return masked.filter((t) => digits(t) === best).slice(0, 1);
}

const masksOf = (model, z) => [...z.keys()].filter((t) => z[t] === model.cfg.mask_id);

// The paper's step on the block z: everything is read from z and written at once. given: which positions are the
// prompt's. u: the numbers by which each stage draws. d: the fields of decoding.Decoding.
function denoise(model, z, ctx, d, u, given) {
  const masked = masksOf(model, z);
  const visible = (t) => !given[t] && !masked.includes(t);

  // Stage A, and which masks are written now
  const h = prefix(model, z, ctx);
  const logitsA = logits(model, lastN(model, h, ctx));
  const {token: token_a, conf: conf_a} = candidates(logitsA, u[0], d);
  const select = d.select === "left" ? fromTheLeft : byConfidence;
  const bundle = select(conf_a, masked, d);

  // Stage B runs with the bundle marked (Eq. 4)
  let [token, conf, partial] = [token_a, conf_a, 0];
  if (d.n_rounds > 0 && bundle.length > 0) {
    ({token, conf} = candidates(logits(model, coordinate(model, h, bundle, ctx, d.n_rounds)), u[1], d));
    partial = d.n_rounds;
  }

  // fill the bundle (Eq. 2), edit what is visible (Eq. 3)
  const gate = d.tau_t2t ?? Infinity;
  const edited = [...z.keys()].filter((t) => visible(t) && conf[t] > gate && token[t] !== z[t]);
  const after = z.map((id, t) => (bundle.includes(t) || edited.includes(t) ? token[t] : id));
  return {before: z, after, bundle, edited, token, conf, token_a, conf_a, partial, passes: []};
}

// Causal Stage B's step: all masks are its bundle. Passes read the whole block until every token that may be written is
// final; the longest run from the left above the gate is written, and at least one token. passes: after each one the
// block's tokens, their probabilities, and which are final. Both stages draw by the same numbers, u[1].
function causalDenoise(model, z, ctx, d, u) {
  const masked = masksOf(model, z);
  const h = prefix(model, z, ctx);
  const logitsA = neverMask(model, logits(model, lastN(model, h, ctx)));
  const {token: token_a, conf: conf_a} = candidates(logitsA, u[1], d);

  // Stage A's tokens are the first drafts. The first token that differs from its draft is final, and all before it
  const passes = [];
  let [drafts, conf, run] = [z.map((id, t) => (masked.includes(t) ? token_a[t] : id)), conf_a, []];
  const sure = () => run.reduce((sum, t) => sum + Math.log(conf[t]), 0) > logGate(d); // else no more may be written
  while (run.length < masked.length && (!passes.length || sure())) {
    const states = causalCoordinate(model, h, masked, ctx, drafts);
    const found = candidates(neverMask(model, logits(model, states)), u[1], d);
    const token = z.map((id, t) => (masked.includes(t) ? found.token[t] : id));
    const differs = token.findIndex((id, t) => id !== drafts[t]);
    const final = z.map((_, t) => differs < 0 || t <= differs);
    run = masked.filter((t) => final[t]);
    passes.push({token, conf: found.conf, final});
    [drafts, conf] = [token, found.conf];
  }

  const bundle = fromTheLeft(conf, run, d);
  const after = z.map((id, t) => (bundle.includes(t) ? drafts[t] : id));
  return {before: z, after, bundle, edited: [], token: drafts, conf, token_a, conf_a, partial: passes.length, passes};
}

// A finished block leaves its keys and values in every round (there it is unmarked), and the next one stands behind it.
function finishBlock(model, z, ctx, n_rounds) {
  ctx.keep = true;
  let h = prefix(model, z, ctx);
  for (let round = 0; round < Math.max(1, n_rounds); round++) h = lastN(model, h, {...ctx, round});
  ctx.keep = false;
  ctx.start += z.length;
}

// The decoder as the paper has it, block after block, from the first hole of the prompt on -> the prompt with its holes
// filled, tokens, forwards by kind, and all steps, each with the position `start` of its block.
// d.byHand(z, start, number of the step): a step by hand, which takes no forward, or undefined.
// d.draws(number of the step): with temperature the numbers by which each stage draws, B in [0, 1) for each.
function generateOne(model, prompt, d) {
  const {block_length: B, mask_id, eos_id} = model.cfg;
  const end = prompt.length + d.gen_length;
  const step = model.stage_b === "causal" && d.n_rounds > 0 ? causalDenoise : denoise;
  const ctx = newContext();
  const nfe = {full: 0, partial: 0, refresh: 0};
  const steps = [];
  const first = prompt.includes(mask_id) ? prompt.indexOf(mask_id) : prompt.length;
  while (ctx.start + B <= first) finishBlock(model, prompt.slice(ctx.start, ctx.start + B), ctx, d.n_rounds);
  const ids = prompt.slice(0, ctx.start);
  while (ids.length < end) {
    const start = ids.length;
    let z = Array.from({length: B}, (_, t) => prompt[start + t] ?? mask_id);
    const given = z.map((id) => id !== mask_id);
    let changed = true;
    let post = 0; // forwards since the last mask
    for (let forwards = 0; forwards < MAX_STEPS + B; ) {
      const hand = d.byHand?.(z, start, steps.length);
      const u = d.temperature > 0 ? d.draws(steps.length) : [];
      const s = hand ?? step(model, z, ctx, d, u, given);
      steps.push({...s, start});
      z = s.after;
      nfe.full += hand ? 0 : 1;
      nfe.partial += s.partial;
      if (hand) continue;
      forwards++;
      changed = z.some((id, t) => id !== s.before[t]);
      post += z.includes(mask_id) ? 0 : 1;
      const still = !changed && !(d.temperature > 0 && z.includes(mask_id)); // what is drawn next may be another token
      if (still || post > (d.tau_t2t === null ? 0 : d.max_post_steps)) break;
    }
    ids.push(...z);
    const written = ids.slice(prompt.length);
    const ended = d.eos_early_stop && written.includes(eos_id) && !written.includes(mask_id);
    if (ended || ids.length >= end) break;

    // the next block will read this one: once more if its last step changed it, and in every round
    nfe.refresh += changed ? 1 : 0;
    nfe.partial += Math.max(0, d.n_rounds - 1);
    finishBlock(model, z, ctx, d.n_rounds);
  }

  const tokens = ids.slice(prompt.length, end);
  if (tokens.includes(eos_id)) tokens.length = tokens.indexOf(eos_id) + 1;
  const all = nfe.full + nfe.refresh + (nfe.partial * model.cfg.n_last) / model.cfg.n_layer;
  return {prompt: ids.slice(0, prompt.length), tokens, nfe: {...nfe, all}, steps};
}
