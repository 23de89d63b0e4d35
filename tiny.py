"""Don't Commit Alone (Lin Yao, 2026) in one file, on a toy to check by hand: python tiny.py, a minute.

A masked diffusion language model is a GPT that looks both ways. It fills the gaps in a text, which are called masks. To
be fast it fills several at once, but it chooses each word alone, and so the words may not fit together. Say that "city"
is followed by New York (probability .40), San Francisco (.20), San Diego (.16), San Jose (.12) or San Juan (.12). The
likeliest first word is San (.60), the likeliest second word is York (.40), and so the model writes "San York".

The paper's method, CoCommit, has two stages. Stage A is the plain pass: at each mask it gives every word a probability.
The masks whose likeliest words are above a gate, or else the surest mask alone, are the bundle, which this step fills.
Stage B adds a learned vector, the marker, to the bundle's hidden states after the first layers, and runs the last
layers once more. Its likeliest words are written. It knows which masks are being filled, but not with which words, and
so it, too, writes "San York" if it fills both. At the paper's gate of .7 it fills one: first San, then Francisco in a
second step. (In any text, two likeliest words above .7 are also the likeliest pair. For three see results/theorem.) Our
change, causal Stage B, fits the words together in one step: a mask also sees a draft of the word before it.

Left out are edits of written words, blocks, the mixture of experts, and LoRA on a frozen model. In causal.py Stage B
also has its own layers, its bundle is always all masks of a block, and a gate may leave some of these for a later step.
Lines with # CoCommit are the paper's (some also hand on what causal Stage B needs), those with # causal are our change.
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

# --- the toy: a row is a context, which is one word, and a phrase of two words. COUNTS says how many of a
# context's 25 rows have each phrase. TEXT, the batch of every training step, has each row three times
COUNTS = {"city New York": 10, "city San Francisco": 5, "city San Diego": 4, "city San Jose": 3,
          "city San Juan": 3, "dish hot dog": 8, "dish ice cream": 7, "dish ice cube": 5, "dish ice tea": 5}
MASK = 0  # the mask is a token like any other
def toy(counts):
    tokens = ["[M]"] + sorted(set(" ".join(counts).split()))
    phrases = torch.tensor([[tokens.index(word) for word in phrase.split()] for phrase in counts])
    text = phrases.repeat_interleave(3 * torch.tensor(list(counts.values())), dim=0)
    return tokens, phrases, text, phrases.masked_fill(torch.arange(phrases.shape[1]) > 0, MASK)
TOKENS, PHRASES, TEXT, HOLES = toy(COUNTS)  # HOLES has city [M] [M] for each phrase of city

# --- the model: a GPT in two parts, because its last layers run twice
C, H = 32, 2  # channels, heads
N_LAYER, N_LAST, N_ROUNDS = 2, 1, 1  # L layers; Stage B runs the last n of them again, in K rounds
# R rows, T positions, V tokens. z, what the model reads, is (R, T), and so are masked, bundle and fill, which
# are True at some of its words. h, the states between the layers, is (R, T, C)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(TOKENS), C)
        self.layers = nn.Sequential(*[Layer() for _ in range(N_LAYER)])
        self.lm_head = nn.Linear(C, len(TOKENS), bias=False)
        # each round's marker says "you are written together"; show, a matrix, says "this word is before you"
        self.markers = nn.Parameter(torch.zeros(N_ROUNDS, C))  # CoCommit
        self.show = nn.Parameter(torch.zeros(C, C))  # causal
    # Stage A is logits(last_n(prefix(z))): tokens -> (R, T, V), as in any GPT
    def prefix(self, z):
        return self.layers[:-N_LAST](self.wte(z))
    def last_n(self, h, sees=None):
        for layer in self.layers[-N_LAST:]:
            h = layer(h, sees)
        return h
    def logits(self, h):
        return self.lm_head(F.rms_norm(h, [C]))
    # Stage B (Eq. 4): the last n layers run once more, with the bundle marked
    def coordinate(self, h, bundle, tokens=None):  # CoCommit
        for marker in self.markers:  # CoCommit
            note, sees = marker, None  # CoCommit
            # causal: the note also says which word is before (F.pad shifts the words right by one). It is scaled to
            # the size of h, because the layers normalise what they read: beside a large h a small note goes unread
            if tokens is not None:  # causal
                before = F.rms_norm(self.wte(F.pad(tokens, (1, -1), value=MASK)), [C])  # causal
                note = h.square().mean(2, True).sqrt() * (marker + before @ self.show.T)  # causal
                # all words see everything outside the bundle. Only words of the bundle see into it, each itself and
                # those on its left. With the bundle 0 1 1, the three words see 1 0 0, 1 1 0 and 1 1 1
                inside = bundle[:, None, None]  # causal
                sees = ~inside | (inside & inside.mT).tril()  # causal
            h = self.last_n(h + bundle[..., None] * note, sees)  # CoCommit
        return h  # CoCommit

# a GPT's layer, but with RMSNorm for LayerNorm, SwiGLU for GELU, and normalised queries and keys (in `rotate`)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.proj = nn.Linear(C, C, bias=False)
        self.gate_up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(2 * C, C, bias=False)
    def forward(self, x, sees=None):
        qkv = self.qkv(F.rms_norm(x, [C])).unflatten(2, (3, H, C // H))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (R, H, T, C / H) each
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, sees)  # None: sees all
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x, [C])).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

# rotary positions in place of learned ones (wpe): the further on a position is, the more x is turned
def rotate(x):
    first, second = F.rms_norm(x, x.shape[-1:]).chunk(2, dim=-1)
    angle = torch.arange(x.shape[2])[:, None] * 10000 ** -torch.arange(0, 1, 1 / first.shape[-1])
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

# --- the loss: the paper adds up the cross-entropies of the words. Where both words are hidden, no term sees the
# other word, so the sum is least at the marginals, the probabilities of each word alone. Stage A learns these
# already. But if Stage B sees the word before, the same sum is a joint loss: p(first) p(second | first) = p(both)
def fill_loss(logits, target, fill):
    return (fill * F.cross_entropy(logits.mT, target, reduction="none")).sum() / target.numel()

# --- training
def some_of(allowed, logits=None):  # draw one or more of each row's allowed words, by chance alone
    # each word draws a number, below 1 if it is allowed, else above. Of those allowed, the least one or two win:
    #     allowed 0 1 1    lot 1.3 .9 .4    the smallest 0 0 1    the smallest two 0 1 1
    lot = torch.rand(allowed.shape) + ~allowed
    last = torch.randint(lot.shape[1] - 1, (len(lot), 1))
    return allowed & (lot <= lot.sort(dim=1).values.gather(1, last))

def train(start, stage_b=None, draw_bundle=some_of):
    """Train a copy: Stage A, and Stage B if "paper" or "causal". Its bundle: draw_bundle(masks, Stage A's logits)."""
    model = Model()
    model.load_state_dict(start.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 700)
    for _ in range(700):
        # hide one word or more, but not the context
        masked = some_of(torch.arange(TEXT.shape[1]).expand(TEXT.shape) > 0)
        z = TEXT.masked_fill(masked, MASK)
        # Stage A fills every mask
        h = model.prefix(z)
        logits = model.logits(model.last_n(h))
        loss = fill_loss(logits, TEXT, masked)
        # Stage B fills the bundle, some of the masks; causal Stage B reads the true words there
        if stage_b:  # CoCommit
            bundle = draw_bundle(masked, logits)  # CoCommit
            tokens = torch.where(bundle, TEXT, z) if stage_b == "causal" else None  # CoCommit
            logits = model.logits(model.coordinate(h, bundle, tokens))  # CoCommit
            loss = loss + fill_loss(logits, TEXT, bundle)  # CoCommit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model

# --- decoding
def decode(model, z, tau, passes, causal=False, phrases=None):
    """Fill all masks, with `phrases` if given; up to `passes` passes of Stage B a step -> z, forwards, p(z)."""
    p, forwards, masked = torch.ones(len(z)), 0, z == MASK
    while masked.any():
        h = model.prefix(z)
        logits = model.logits(model.last_n(h))
        forwards += 1
        # Stage A picks the bundle: the surest mask, and all masks that are surer than tau
        sure = logits.softmax(-1).amax(-1) * masked
        bundle = masked & ((sure > tau) | (sure == sure.amax(1, keepdim=True)))
        words = logits.argmax(-1) if phrases is None else phrases
        for _ in range(passes):  # CoCommit
            draft = torch.where(bundle, words, z)  # CoCommit
            logits = model.logits(model.coordinate(h, bundle, draft if causal else None))  # CoCommit
            words = logits.argmax(-1) if phrases is None else phrases  # CoCommit
            forwards += N_ROUNDS * N_LAST / N_LAYER  # CoCommit
            # causal: Stage B takes passes until all words are final. (Here one is enough: San stays, and so
            # Francisco has read the right word.) A word is final if none on its left has changed:
            #     changed 0 0 1 0 1    changed.cumsum(1) - changed 0 0 0 1 1    final 1 1 1 0 0
            changed = (bundle & (words != draft)).long()  # causal
            if not (bundle & (changed.cumsum(1) - changed > 0)).any():  # causal
                break  # causal
        # the bundle gets its words (Eq. 2), and is filled, even if a word is [M]
        z = torch.where(bundle, words, z)
        masked = masked & ~bundle
        p = p * logits.softmax(-1).gather(2, z[..., None])[..., 0].where(bundle, 1).prod(1)
    return z, forwards, p

# The likeliest phrase may not begin with the likeliest word. So a beam keeps the `size` likeliest beginnings of the
# row z (1, T). The first layers read the row once, which is counted as a forward of Stage A. Then each pass of causal
# Stage B adds a word to every beginning, from the left. Beginnings are rows of one pass, which counts as n/L, as ever
def beam_search(model, z, size):  # causal
    h, bundle, log_p = model.prefix(z), z == MASK, torch.zeros(1)  # causal
    for i in bundle[0].nonzero()[:, 0]:  # causal
        logits = model.logits(model.coordinate(h, bundle, z))[:, i]  # causal
        log_p, best = (log_p[:, None] + logits.log_softmax(-1)).flatten().topk(size)  # causal
        z = z[best // len(TOKENS)]  # causal
        z[:, i] = best % len(TOKENS)  # causal
    return z[0], 1 + bundle.sum().item() * N_LAST / N_LAYER  # causal

@torch.no_grad()
def report(name, model, tau=-1, passes=0, causal=False, beam=0):  # print a row of the table
    z, forwards, _ = decode(model, HOLES, tau, passes, causal)
    for row in range(len(z)) if beam else ():  # causal
        z[row], forwards = beam_search(model, HOLES[[row]], beam)  # causal
    # the probability of drawing each phrase of the first context: decode is made to write each, likely or not
    q = decode(model, HOLES, tau, passes, causal, PHRASES)[2][PHRASES[:, 0] == PHRASES[0, 0]]
    written = {context: " ".join(TOKENS[word] for word in words) for context, *words in z.tolist()}
    print(f"{name:22}{q[0]:9.2f}{q[1:].sum():9.2f}{1 - q.sum():11.2f}{forwards:10.1f}  {', '.join(written.values())}")
    return model

if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seed", type=int, default=0, help="the seed of all random numbers (default: 0)")
    torch.manual_seed(options.parse_args().seed)
    torch.set_num_threads(1)  # faster for small matrices
    print("P(phrase | city)       New York  San ...  no phrase  forwards  city, dish")
    print("the text                   0.40     0.60       0.00")
    stage_a = report("Stage A, all at once", train(Model()))
    report("Stage A, gate .7", stage_a, 0.7)
    paper = report("Stage B, all at once", train(stage_a, "paper"), passes=1)  # CoCommit
    report("Stage B, gate .7", paper, 0.7, passes=1)  # CoCommit
    causal = report("causal, all at once", train(stage_a, "causal"), passes=HOLES.shape[1], causal=True)  # causal
    report("causal, beam of 2", causal, passes=HOLES.shape[1], causal=True, beam=2)  # causal
    print("The paper in full: corrupt.py, model.py, train.py, sample.py. Our change: causal.py.")
