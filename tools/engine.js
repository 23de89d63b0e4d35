"use strict";
// The model in a page: what model.py, sample.generate_one and beyond/head.py compute, greedily, for one row.
//
//   const h = prefix(model, z, ctx);                          // first L - n layers, shared by both stages
//   head(model, lastN(model, h, ctx));                        // Stage A: factorised
//   head(model, coordinate(model, h, bundle, ctx, n_rounds)); // Stage B: marked, the same last n layers again
//   headLook(model, z, a, bundle, tau_keep);                  // the head: looks at Stage A's final states
//
// States are rows: an array with one Float32Array of C numbers for each of the T positions of the current block.
// Finished blocks are keys and values in ctx.past: no block attends to a later one, so they never change.
// A model is {cfg: a Config, tensors: name -> Float32Array, tokenizer, partial_cost}.
//
// T positions of the block, C channels (n_embd), H query heads, G key and value heads, D head dim, V vocabulary
const MAX_STEPS = 1024; // forwards in one block

// --- the tokenizer: byte-level BPE, with bytes as the letters U+0000 to U+00FF

function encode(model, text) {
  const {special, ranks} = model.tokenizer;
  const found = [];
  for (const part of text.split(/(<\|endoftext\|>|<\|mask\|>)/)) {
    if (part in special) {
      found.push(special[part]);
      continue;
    }
    // a word and the blank before it, or blanks
    for (const word of part.match(/ ?\P{White_Space}+|\p{White_Space}+/gu) ?? []) {
      const bytes = [...new TextEncoder().encode(word)].map((byte) => String.fromCharCode(byte));
      found.push(...mergeBytes(bytes, ranks).map((token) => ranks[token]));
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
  return new TextDecoder("utf-8", {ignoreBOM: true}).decode(Uint8Array.from(letters, (letter) => letter.charCodeAt(0)));
}

// --- layers, on rows

const add = (rows, others) => rows.map((row, t) => row.map((value, c) => value + others[t][c]));
const sigmoid = (value) => 1 / (1 + Math.exp(-value));
const silu = (value) => value * sigmoid(value);

function dot(W, first, x) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += W[first + i] * x[i];
  return sum;
}

// y = W x + bias for each row, W (out, in).
function linear(rows, W, bias) {
  return rows.map((x) => {
    const y = new Float32Array(W.length / x.length);
    for (let o = 0; o < y.length; o++) y[o] = dot(W, o * x.length, x) + (bias ? bias[o] : 0);
    return y;
  });
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

// A block sees itself, in both directions, and every finished block. `slot`: whose finished keys and values.
function attention(model, name, rows, ctx, slot) {
  const {n_head: H, n_kv_head: G, head_dim: D} = model.cfg;
  const {tensors} = model;
  const qkv = linear(rows, tensors[name + ".qkv.weight"], tensors[name + ".qkv.bias"]);
  const q = qkv.map((row, t) => place(model, name + ".q_norm", heads(model, row, 0, H), ctx.start + t));
  const newK = qkv.map((row, t) => place(model, name + ".k_norm", heads(model, row, H, H + G), ctx.start + t));
  const newV = qkv.map((row) => heads(model, row, H + G, H + 2 * G));

  // a block that is finished leaves its keys and values
  const past = ctx.past[slot] ?? {k: [], v: []};
  const k = past.k.concat(newK);
  const v = past.v.concat(newV);
  if (ctx.keep) ctx.past[slot] = {k, v};
  // H / G query heads share one head of keys and values
  const mixed = q.map((ofHead, t) => {
    const y = new Float32Array(H * D);
    const seen = ctx.causal ? k.slice(0, t + 1) : k;
    ofHead.forEach((query, i) => y.set(attend(query, seen, v, Math.floor((i * G) / H)), i * D));
    return y;
  });
  return linear(mixed, tensors[name + ".proj.weight"], tensors[name + ".proj.bias"]);
}

// One query of one head: the values of head g, weighted by the softmax of the scores.
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

// A transformer block of this name.
function layer(model, name, rows, ctx, slot) {
  rows = add(rows, attention(model, name + ".attn", norm(model, name + ".norm_1", rows), ctx, slot));
  return add(rows, mlp(model, name + ".mlp", norm(model, name + ".norm_2", rows)));
}

function run(model, rows, ctx, first, end) {
  for (let i = first; i < end; i++) {
    const slot = i + ctx.round * model.cfg.n_last; // each round of Stage B has a context of its own
    rows = layer(model, "layers." + i, rows, ctx, slot);
  }
  return rows;
}

// --- the split, by the project's names

// Where the current block stands (start), what it sees of the finished ones (past), whether it is one now (keep), and
// whether attention looks left alone in it (causal).
const newContext = () => ({start: 0, round: 0, past: [], keep: false, causal: false});

function embed(model, ids) {
  const C = model.cfg.n_embd;
  return ids.map((id) => model.tensors["wte.weight"].slice(id * C, (id + 1) * C));
}

function prefix(model, z, ctx) {
  const {n_layer, n_last} = model.cfg;
  return run(model, embed(model, z), ctx, 0, n_layer - n_last);
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
    const marker = model.tensors.markers.subarray(round * h[0].length);
    const marked = h.map((row, t) => (bundle.includes(t) ? row.map((value, c) => value + marker[c]) : row));
    h = lastN(model, marked, {...ctx, round});
  }
  return h;
}

// Stage A, one full forward -> prefix states, final states, logits.
function stageA(model, z, ctx) {
  const h = prefix(model, z, ctx);
  const last = lastN(model, h, ctx);
  return {h, last, logits: head(model, last)};
}

// What the head adds to Stage A's log-probabilities at the positions `asked`: a block on Stage A's final states and the
// token before each position. It is inside the block of text alone, and attention looks left.
function headAdds(model, last, tokens, asked) {
  const none = new Float32Array(model.cfg.n_embd); // before the first of a block
  const before = [none, ...embed(model, tokens.slice(0, -1))];
  const shown = linear(before, model.tensors["second_look.show.weight"]);
  const x = add(last.map((row) => rmsNorm(row, null, 2 ** -23)), shown);
  const y = layer(model, "second_look.block", x, {...newContext(), causal: true}, 0);
  return head(model, asked.map((t) => y[t]));
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

// Each row's likeliest token, the first of equals, and its probability.
function candidates(logits) {
  const token = logits.map((row) => row.indexOf(row.reduce((a, b) => Math.max(a, b))));
  return {token, conf: logits.map((row, t) => softmax(row)[token[t]])};
}

// The masks that pass a gate. From the left a mask passes where the product of all up to and with its own is above it.
function passing(conf, masked, gate, order) {
  let together = 1;
  return masked.filter((t) => {
    together *= conf[t];
    return (order === "leftmost" ? together : conf[t]) > gate;
  });
}

// The first of the model's order, the leftmost of equals, in an array; nothing of nothing.
function firstOf(conf, masked, order) {
  if (order === "leftmost") return masked.slice(0, 1);
  return largest(masked.map((t) => conf[t]), 1).map((i) => masked[i]);
}

// The masks that pass tau_m2t, or the first one where none does -> positions in the block.
function selectBundle(conf, masked, tau_m2t, order) {
  const found = passing(conf, masked, tau_m2t, order);
  return found.length > 0 ? found : firstOf(conf, masked, order);
}

// Is something visible behind a mask? From the left the head has been taught masks at a block's end alone.
function standsAside(model, z, bundle) {
  const {mask_id, order} = model.cfg;
  return order !== "surest" && z.some((id, t) => t > bundle[0] && id !== mask_id);
}

// Log-probabilities among tokens: a mask is none.
function logProbs(logits, mask_id) {
  const among = logits.map((value, id) => (id === mask_id ? -Infinity : value));
  const highest = among.reduce((a, b) => Math.max(a, b));
  const total = among.reduce((sum, value) => sum + Math.exp(value - highest), 0);
  return among.map((value) => value - highest - Math.log(total));
}

// The head writes the bundle, or a prefix of it: drafts, then looks until nothing changes, or what is final is refused.
// a: {last, logits, token_a, conf_a} of Stage A -> what changes about a step, and `answers`: position -> logits.
// looks: the drafts, then what each look wrote, [{t, token, final}].
function headLook(model, z, a, bundle, tau_keep) {
  const stage_a = a.logits.map((row) => logProbs(row, model.cfg.mask_id));
  const mine = standsAside(model, z, bundle) ? [] : bundle;

  // the first drafts are Stage A's
  const draft = candidates(stage_a).token;
  const tokens = z.map((id, t) => (mine.includes(t) ? draft[t] : id));
  const conf = z.map(() => 1);
  const answers = new Map();
  const looks = mine.length ? [mine.map((t) => ({t, token: draft[t], final: false}))] : [];

  let open = mine; // what is not final
  let final = [];
  let live = mine.length > 0;
  while (live) {
    const added = headAdds(model, a.last, tokens, open);
    const rows = added.map((row, i) => row.map((value, id) => value + stage_a[open[i]][id]));
    const found = candidates(rows);

    // what has read nothing but final tokens is final: all up to and with the first that differs
    const differs = open.findIndex((t, i) => found.token[i] !== tokens[t]);
    const n = differs < 0 ? open.length : differs + 1;
    looks.push(open.map((t, i) => ({t, token: found.token[i], final: i < n})));
    open.forEach((t, i) => {
      [tokens[t], conf[t]] = [found.token[i], found.conf[i]];
      answers.set(t, rows[i]);
    });
    final = final.concat(open.slice(0, n));
    open = open.slice(n);
    live = open.length > 0 && final.reduce((product, t) => product * conf[t], 1) > tau_keep;
  }

  // the longest prefix that is sure enough, or else Stage A's first token alone
  const sure = passing(conf, final, tau_keep, "leftmost");
  const written = sure.length ? sure : bundle.slice(0, 1);
  const own = (t) => mine.includes(t) && (sure.length > 0 || t !== bundle[0]);
  const nLooks = Math.max(0, looks.length - 1); // each reads the whole block
  return {
    token: tokens.map((id, t) => (own(t) ? id : a.token_a[t])),
    conf: conf.map((p, t) => (own(t) ? p : a.conf_a[t])),
    bundle: written,
    refused: bundle.filter((t) => !written.includes(t)),
    partial: nLooks,
    nLooks,
    looks,
    answers,
  };
}

// One step on the block z: everything is read from z and written at once. given: which positions are the prompt's.
// d: the fields of sample.Decoding, and the `stage` that writes the bundle: "A", "B" or "head".
function step(model, z, ctx, d, given) {
  const {mask_id, order} = model.cfg;
  const masked = [...z.keys()].filter((t) => z[t] === mask_id);
  const {h, last, logits} = stageA(model, z, ctx);
  const {token: token_a, conf: conf_a} = candidates(logits);
  const asked = selectBundle(conf_a, masked, d.tau_m2t, order);
  const s = {before: z, bundle: asked, refused: [], token: token_a, conf: conf_a, token_a, conf_a, partial: 0,
    nLooks: 0, looks: []};

  if (d.stage === "B" && asked.length > 0) {
    Object.assign(s, candidates(head(model, coordinate(model, h, asked, ctx, d.n_rounds))));
    s.partial = s.nLooks = d.n_rounds;
  }
  if (d.stage === "head" && asked.length > 0) {
    Object.assign(s, headLook(model, z, {last, logits, token_a, conf_a}, asked, d.tau_keep));
  }

  // Eq. 3 edits what is visible, Eq. 2 fills the bundle
  const gate = d.tau_t2t ?? Infinity;
  const visible = (t) => !given[t] && !masked.includes(t);
  s.edited = [...z.keys()].filter((t) => visible(t) && s.conf[t] > gate && s.token[t] !== z[t]);
  s.after = z.map((id, t) => (s.bundle.includes(t) || s.edited.includes(t) ? s.token[t] : id));
  return s;
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
// d.byHand(z, start, number of the step): a step that somebody else makes, for no forward, or undefined.
function generateOne(model, prompt, d) {
  const {block_length: B, mask_id, eos_id} = model.cfg;
  const end = prompt.length + d.gen_length;
  const ctx = newContext();
  const nfe = {full: 0, partial: 0, commit: 0, looks: 0};
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
    for (let forwards = 0; forwards < MAX_STEPS; ) {
      const hand = d.byHand?.(z, start, steps.length);
      const s = hand ?? step(model, z, ctx, d, given);
      steps.push({...s, start});
      z = s.after;
      nfe.full += hand ? 0 : 1;
      nfe.partial += s.partial;
      nfe.looks += s.nLooks;
      if (hand) continue;
      forwards++;
      changed = z.some((id, t) => id !== s.before[t]);
      post += z.includes(mask_id) ? 0 : 1;
      if (!changed || post > (d.tau_t2t === null ? 0 : d.max_post_steps)) break;
    }
    ids.push(...z);
    const written = ids.slice(prompt.length);
    const ended = d.eos_early_stop && written.includes(eos_id) && !written.includes(mask_id);
    if (ended || ids.length >= end) break;

    // the next block will read this one: once more if its last step changed it, and in every round
    nfe.commit += changed ? 1 : 0;
    nfe.partial += Math.max(0, d.n_rounds - 1);
    finishBlock(model, z, ctx, d.n_rounds);
  }

  const tokens = ids.slice(prompt.length, end);
  if (tokens.includes(eos_id)) tokens.length = tokens.indexOf(eos_id) + 1;
  const all = nfe.full + nfe.commit + nfe.partial * model.partial_cost;
  return {prompt: ids.slice(0, prompt.length), tokens, nfe: {...nfe, all}, steps};
}
