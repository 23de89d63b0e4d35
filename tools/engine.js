"use strict";
// The model in a page: what model.py, sample.generate_one and the joint head of beyond/ compute, for one prompt, greedily.
//
//   h = prefix(model, z, ctx)                            the first L - n layers, shared by both stages
//   head(model, lastN(model, h, ctx))                    Stage A: factorised
//   head(model, coordinate(model, h, bundle, ctx, K))    Stage B: marked, the same last n layers again
//   head(model, jointHead(model, last, bundle))          the joint head: its own blocks, on Stage A's final states
//
// States are rows: an array with one Float32Array of C numbers for each of the T positions of the current block.
// Finished blocks are keys and values in ctx.past: no block attends to a later one, so they never change.
//
// T positions of the block, C channels (n_embd), H query heads, G key and value heads, D head dim, V vocabulary

// ---------------------------------------------------------------------------------------------------------------------
// weights, as tools/playground.py puts them into the page

function fromBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

// A bfloat16 number is the upper half of a float32 whose lower half is zero.
function readTensor({dtype, shape, base64}) {
  let {buffer} = fromBase64(base64);
  if (dtype === "bfloat16") {
    const upper = new Uint16Array(buffer);
    const halves = new Uint16Array(2 * upper.length);
    upper.forEach((half, i) => (halves[2 * i + 1] = half));
    buffer = halves.buffer;
  }
  return Object.assign(new Float32Array(buffer), {shape});
}

function loadModel(data) {
  const tensors = {};
  for (const [name, stored] of Object.entries(data.tensors)) tensors[name] = readTensor(stored);
  if (data.cfg.tied) tensors["lm_head.weight"] = tensors["wte.weight"];
  return {cfg: data.cfg, tensors, nJoint: data.n_joint, tokenizer: data.tokenizer};
}

// ---------------------------------------------------------------------------------------------------------------------
// the tokenizer: byte-level BPE, bytes written as the letters U+0000 to U+00FF

function encode(model, text) {
  const {special, ranks, ids} = model.tokenizer;
  const found = [];
  for (const part of text.split(/(<\|endoftext\|>|<\|mask\|>)/)) {
    if (part in special) {
      found.push(special[part]);
      continue;
    }
    // a word and the blank before it, or blanks
    for (const word of part.match(/ ?\P{White_Space}+|\p{White_Space}+/gu) ?? []) {
      const bytes = [...new TextEncoder().encode(word)].map((byte) => String.fromCharCode(byte));
      for (const token of mergeBytes(bytes, ranks)) found.push(ids[ranks[token]]);
    }
  }
  return found;
}

// The pair that was learned first is merged first, of equals the one on the left, until no pair is known.
function mergeBytes(parts, ranks) {
  while (true) {
    const pairs = parts.slice(1).map((right, i) => ranks[parts[i] + right] ?? Infinity);
    const lowest = Math.min(...pairs);
    if (lowest === Infinity) return parts;
    const i = pairs.indexOf(lowest);
    parts.splice(i, 2, parts[i] + parts[i + 1]);
  }
}

// Special tokens have no bytes, and bytes that are no UTF-8 become U+FFFD.
function decode(model, ids) {
  const letters = ids.map((id) => model.tokenizer.bytes[id]).join("");
  return new TextDecoder().decode(Uint8Array.from(letters, (letter) => letter.charCodeAt(0)));
}

// ---------------------------------------------------------------------------------------------------------------------
// layers, on rows

const add = (rows, others) => rows.map((row, t) => row.map((value, c) => value + others[t][c]));
const silu = (value) => value / (1 + Math.exp(-value));

function dot(W, first, x) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += W[first + i] * x[i];
  return sum;
}

// y = W x for one row, four numbers at a time: a browser's arithmetic is as fast as it reads.
function multiply(W, x) {
  const n = x.length;
  const y = new Float32Array(W.length / n);
  let o = 0;
  for (; o + 4 <= y.length; o += 4) {
    const [first, second, third, fourth] = [o * n, o * n + n, o * n + 2 * n, o * n + 3 * n];
    let [a, b, c, d] = [0, 0, 0, 0];
    for (let i = 0; i < n; i++) {
      const value = x[i];
      a += W[first + i] * value;
      b += W[second + i] * value;
      c += W[third + i] * value;
      d += W[fourth + i] * value;
    }
    [y[o], y[o + 1], y[o + 2], y[o + 3]] = [a, b, c, d];
  }
  for (; o < y.length; o++) y[o] = dot(W, o * n, x);
  return y;
}

// y = W x + bias for each row; W (out, in) may be one expert's part of a larger tensor.
function linear(rows, W, bias) {
  const y = rows.map((x) => multiply(W, x));
  return bias ? y.map((row) => row.map((value, o) => value + bias[o])) : y;
}

// Root mean square norm, scaled by `weight` where there is one.
function rmsNorm(x, weight, eps) {
  let squares = 0;
  for (const value of x) squares += value * value;
  const scale = 1 / Math.sqrt(squares / x.length + eps);
  return x.map((value, c) => value * scale * (weight ? weight[c] : 1));
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

// `count` heads of a fused row, from head number `from` on, normed (each by itself) and rotated.
function heads(model, name, row, from, count, position) {
  const D = model.cfg.head_dim;
  return Array.from({length: count}, (_, i) => {
    const x = row.slice((from + i) * D, (from + i + 1) * D);
    if (name === "") return x; // values
    const normed = rmsNorm(x, model.tensors[name + ".weight"], model.cfg.norm_eps);
    rotate(model.cfg, normed, position);
    return normed;
  });
}

// A block sees itself, in both directions, and every finished block. `slot`: whose finished keys and values.
function attention(model, name, rows, ctx, slot) {
  const {n_head: H, n_kv_head: G} = model.cfg;
  const {tensors} = model;
  const qkv = linear(rows, tensors[name + ".qkv.weight"], tensors[name + ".qkv.bias"]);
  const q = qkv.map((row, t) => heads(model, name + ".q_norm", row, 0, H, ctx.start + t));
  const newK = qkv.map((row, t) => heads(model, name + ".k_norm", row, H, G, ctx.start + t));
  const newV = qkv.map((row) => heads(model, "", row, H + G, G));

  // what there is to attend to; a block that is finished leaves its keys and values
  const past = ctx.past[slot] ?? {k: [], v: []};
  const k = past.k.concat(newK);
  const v = past.v.concat(newV);
  if (ctx.keep) ctx.past[slot] = {k, v};

  // H / G query heads share one head of keys and values
  const mixed = q.map((ofHead) => {
    const y = new Float32Array(H * model.cfg.head_dim);
    ofHead.forEach((query, i) => y.set(attend(query, k, v, Math.floor((i * G) / H)), i * query.length));
    return y;
  });
  return linear(mixed, tensors[name + ".proj.weight"], tensors[name + ".proj.bias"]);
}

// One query of one head: the values, weighted by the softmax of the scores.
function attend(query, k, v, g) {
  const weights = softmax(k.map((key) => dot(key[g], 0, query) / Math.sqrt(query.length)));
  const y = new Float32Array(query.length);
  weights.forEach((weight, s) => v[s][g].forEach((value, c) => (y[c] += weight * value)));
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

// The experts of one row, each with its weight. The bias decides who is chosen, inside the topk_group best of n_group
// groups (a group is as good as its two best); the weights are the unbiased scores, normalised and scaled.
function route(model, name, x) {
  const {n_expert: E, n_group, topk_group, n_active, routed_scaling} = model.cfg;
  const scores = linear([x], model.tensors[name + ".router"])[0].map((value) => 1 / (1 + Math.exp(-value)));
  const biased = add([scores], [model.tensors[name + ".expert_bias"]])[0];
  const groupOf = (expert) => Math.floor((expert * n_group) / E);

  const groupScores = Array.from({length: n_group}, (_, group) => {
    const members = [...biased].filter((_, expert) => groupOf(expert) === group).sort((a, b) => b - a);
    return members[0] + members[1];
  });
  const kept = largest(groupScores, topk_group);
  const allowed = [...biased].map((score, expert) => (kept.includes(groupOf(expert)) ? score : -Infinity));
  const chosen = largest(allowed, n_active);

  const total = n_active > 1 ? chosen.reduce((sum, expert) => sum + scores[expert], 1e-20) : 1;
  return chosen.map((expert) => ({expert, weight: (scores[expert] / total) * routed_scaling}));
}

// One expert's matrix of a stack.
function expertOf(stack, expert) {
  const size = stack.length / stack.shape[0];
  return stack.subarray(expert * size, (expert + 1) * size);
}

// Mixture of experts: each row's own experts and, for all rows, a shared one.
function moe(model, name, rows) {
  const {tensors} = model;
  const routed = rows.map((x) => {
    const y = new Float32Array(x.length);
    for (const {expert, weight} of route(model, name, x)) {
      const gateUp = expertOf(tensors[name + ".gate_up"], expert);
      const [out] = swiglu([x], gateUp, expertOf(tensors[name + ".down"], expert));
      out.forEach((value, c) => (y[c] += weight * value));
    }
    return y;
  });
  const shared = tensors[name + ".shared.gate_up.weight"];
  return shared ? add(routed, swiglu(rows, shared, tensors[name + ".shared.down.weight"])) : routed;
}

function mlp(model, name, rows) {
  const {tensors} = model;
  if (name + ".router" in tensors) return moe(model, name, rows);
  return swiglu(rows, tensors[name + ".gate_up.weight"], tensors[name + ".down.weight"]);
}

function run(model, rows, ctx, first, end) {
  for (let layer = first; layer < end; layer++) {
    const name = "layers." + layer;
    const slot = layer + ctx.round * model.cfg.n_last; // each round of Stage B has a context of its own
    rows = add(rows, attention(model, name + ".attn", norm(model, name + ".norm_1", rows), ctx, slot));
    rows = add(rows, mlp(model, name + ".mlp", norm(model, name + ".norm_2", rows)));
  }
  return rows;
}

// ---------------------------------------------------------------------------------------------------------------------
// the split, by the project's names

// Where a block stands (start), and what it sees of the finished ones.
const newContext = () => ({start: 0, round: 0, keep: false, past: []});

function prefix(model, z, ctx) {
  const {n_layer, n_last, n_embd: C} = model.cfg;
  const wte = model.tensors["wte.weight"];
  return run(model, z.map((id) => wte.slice(id * C, (id + 1) * C)), ctx, 0, n_layer - n_last);
}

function lastN(model, h, ctx) {
  return run(model, h, ctx, model.cfg.n_layer - model.cfg.n_last, model.cfg.n_layer);
}

function head(model, h) {
  return linear(norm(model, "norm_f", h), model.tensors["lm_head.weight"]);
}

// Eq. 4: K times h <- LastN(h + 1_S * marker).
function coordinate(model, h, bundle, ctx, n_rounds) {
  for (let round = 0; round < n_rounds; round++) {
    const marker = model.tensors["markers"].subarray(round * h[0].length, (round + 1) * h[0].length);
    const marked = h.map((row, t) => (bundle.includes(t) ? add([row], [marker])[0] : row));
    h = lastN(model, marked, {...ctx, round});
  }
  return h;
}

// Stage A: one full forward -> prefix states, final states, logits.
function stageA(model, z, ctx) {
  const h = prefix(model, z, ctx);
  const last = lastN(model, h, ctx);
  return {h, last, logits: head(model, last)};
}

// The joint head: y <- y + 1_S * Block(y), inside the block of text alone -> the states of the bundle's positions.
function jointHead(model, last, bundle) {
  const y = last.map((row) => rmsNorm(row, null, 2 ** -23));
  for (let i = 0; i < model.nJoint; i++) {
    const name = "joint_head." + i;
    const mixed = attention(model, name + ".attn", norm(model, name + ".norm_1", y), newContext(), 0);
    const x = add(bundle.map((t) => y[t]), bundle.map((t) => mixed[t]));
    const written = add(x, mlp(model, name + ".mlp", norm(model, name + ".norm_2", x)));
    bundle.forEach((t, j) => (y[t] = written[j]));
  }
  return bundle.map((t) => y[t]);
}

// ---------------------------------------------------------------------------------------------------------------------
// decoding

const MAX_STEPS = 1024; // forwards in one block

function softmax(logits) {
  const highest = logits.reduce((a, b) => Math.max(a, b));
  const p = Float32Array.from(logits, (value) => Math.exp(value - highest));
  const total = p.reduce((a, b) => a + b);
  return p.map((value) => value / total);
}

// The k largest, largest first; of equals the first.
function largest(values, k) {
  return [...values.keys()].sort((a, b) => values[b] - values[a] || a - b).slice(0, k);
}

// Each row's likeliest token, the first of equals, and its probability.
function candidates(logits) {
  const found = logits.map((row) => {
    const token = row.indexOf(row.reduce((a, b) => Math.max(a, b)));
    return [token, softmax(row)[token]];
  });
  return {token: found.map(([token]) => token), conf: found.map(([, conf]) => conf)};
}

// The masks above tau_m2t, or the most confident one where none passes -> positions in the block.
function selectBundle(conf, masked, tau_m2t) {
  const passing = masked.filter((t) => conf[t] > tau_m2t);
  const best = largest(masked.map((t) => conf[t]), 1);
  return passing.length ? passing : best.map((i) => masked[i]);
}

// What the joint head is sure of, and always the surest; the rest it leaves masked.
function keep(conf, asked, tau_keep) {
  const [surest] = largest(asked.map((t) => conf[t]), 1);
  return asked.filter((t, i) => i === surest || conf[t] > tau_keep);
}

// One step on the block z: everything is read from z and written at once. `first`: the first position after the prompt.
// d: the fields of sample.Decoding, and which `stage` writes the bundle: "A", "B" or "joint".
function step(model, z, ctx, d, first) {
  const masked = [...z.keys()].filter((t) => z[t] === model.cfg.mask_id);
  const {h, last, logits} = stageA(model, z, ctx);
  const ofA = candidates(logits);
  const asked = selectBundle(ofA.conf, masked, d.tau_m2t);

  let [{token, conf}, bundle, partial] = [ofA, asked, 0];
  if (d.stage === "B" && asked.length > 0) {
    ({token, conf} = candidates(head(model, coordinate(model, h, asked, ctx, d.n_rounds))));
    partial = d.n_rounds;
  }
  if (d.stage === "joint" && asked.length > 1) {
    const ofJoint = candidates(head(model, jointHead(model, last, asked)));
    [token, conf] = [[...token], [...conf]];
    asked.forEach((t, i) => ([token[t], conf[t]] = [ofJoint.token[i], ofJoint.conf[i]]));
    bundle = keep(conf, asked, d.tau_keep);
    partial = asked.length / z.length;
  }

  // Eq. 3 edits what is visible, Eq. 2 fills the bundle
  const gate = d.tau_t2t ?? Infinity;
  const edited = [...z.keys()].filter((t) => t >= first && !masked.includes(t) && conf[t] > gate && token[t] !== z[t]);
  const after = z.map((id, t) => (bundle.includes(t) || edited.includes(t) ? token[t] : id));
  return {before: z, after, asked, bundle, edited, token, conf, ofA, partial};
}

// What a step leaves in the record; positions are absolute.
function stepRecord(s, start) {
  const round = (p) => Number(p.toFixed(4));
  const fill = s.bundle.map((t) => ({at: start + t, token: s.after[t], conf: round(s.conf[t]),
    token_a: s.ofA.token[t], conf_a: round(s.ofA.conf[t])}));
  const edit = s.edited.map((t) => ({at: start + t, old: s.before[t], token: s.after[t], conf: round(s.conf[t])}));
  const refused = s.asked.filter((t) => !s.bundle.includes(t)).map((t) => start + t);
  return {start, before: s.before, after: s.after, bundle: fill.map((f) => f.at), fill, edit,
    conf: [...s.conf].map(round), refused, byHand: Boolean(s.byHand)};
}

// A step that writes one token by hand, and asks the model nothing.
function handStep(z, start, {at, token}) {
  const after = z.map((id, t) => (start + t === at ? token : id));
  const sure = {token: after, conf: z.map(() => 1)};
  return {before: z, after, asked: [], bundle: [at - start], edited: [], ...sure, ofA: sure, partial: 0, byHand: true};
}

// The decoder as the paper has it: blocks from left to right, steps until a block is full and nothing changes any more.
// -> a record like those of `sample.py --json`; `counts` are the forwards [full, partial, commit] after each step.
// d.hand: {number of a step: {at, token}}, tokens that are written by hand, for no forward.
function generateOne(model, prompt, d) {
  const {block_length: B, mask_id, eos_id, n_last, n_layer} = model.cfg;
  const [n, end, K] = [prompt.length, prompt.length + d.gen_length, d.n_rounds];
  const [ctx, steps, counts, nfe] = [newContext(), [], [[0, 0, 0]], {full: 0, partial: 0, commit: 0}];
  const ids = [];
  while (ids.length + B <= n) finishBlock(model, prompt.slice(ids.length, ids.length + B), ids, ctx, K);

  while (ids.length < end) {
    const start = ids.length;
    let z = Array.from({length: B}, (_, t) => prompt[start + t] ?? mask_id);
    let [changed, post] = [true, 0];
    for (let forwards = 0; forwards < MAX_STEPS; ) {
      const byHand = d.hand?.[steps.length];
      const s = byHand ? handStep(z, start, byHand) : step(model, z, ctx, d, n - start);
      z = s.after;
      steps.push(stepRecord(s, start));
      if (!byHand) {
        forwards++;
        nfe.full += 1;
        nfe.partial += s.partial;
      }
      counts.push(Object.values(nfe));
      if (byHand) continue;
      changed = z.some((id, t) => id !== s.before[t]);
      post += !z.includes(mask_id);
      if (!changed || post > (d.tau_t2t === null ? 0 : d.max_post_steps)) break;
    }

    // the next block will read this one: once more if its last step changed it, and in every round
    const written = [...ids, ...z].slice(n);
    const ended = d.eos_early_stop && written.includes(eos_id) && !written.includes(mask_id);
    if (ended || start + B >= end) {
      ids.push(...z);
      break;
    }
    nfe.commit += changed;
    nfe.partial += Math.max(0, K - 1);
    counts[counts.length - 1] = Object.values(nfe);
    finishBlock(model, z, ids, ctx, K);
  }

  let tokens = ids.slice(n, end);
  if (tokens.includes(eos_id)) tokens = tokens.slice(0, tokens.indexOf(eos_id) + 1);
  nfe.all = nfe.full + nfe.commit + (nfe.partial * n_last) / n_layer;
  const seen = [...ids, ...steps.flatMap((s) => s.fill.map((f) => f.token_a))];
  const pieces = Object.fromEntries(seen.map((id) => [id, model.tokenizer.pieces[id]]));
  Object.assign(pieces, {[eos_id]: "∎", [mask_id]: "▒"});
  return {text: decode(model, tokens), tokens, steps, nfe, counts, nfe_per_token: nfe.full / Math.max(1, tokens.length),
    prompt, mask_id, n_rounds: K, pieces};
}

// A finished block is read once more, for its keys and values in every round (there it is unmarked).
function finishBlock(model, z, ids, ctx, n_rounds) {
  ctx.keep = true;
  let h = prefix(model, z, ctx);
  for (let round = 0; round < Math.max(1, n_rounds); round++) h = lastN(model, h, {...ctx, round});
  ctx.keep = false;
  ctx.start += z.length;
  ids.push(...z);
}
