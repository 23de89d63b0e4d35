"""Don't Commit Alone (Lin Yao, 2026) in one file, on a toy to check by hand: python tiny.py, two minutes.

A masked diffusion language model is a GPT that looks both ways. It fills the gaps in a text, which
are called masks. To be fast it fills several masks in one step, but it chooses each word alone, and so
the words may not fit together. Say that "city" is followed by New York (with probability .40), San
Francisco (.20), San Diego (.16), San Jose (.12) or San Juan (.12). The likeliest first word is San
(.60), the likeliest second word is York (.40), and so the model writes "San York".

The paper's method, CoCommit, has two stages. Stage A is the plain pass: at each mask it gives every
word a probability. The surest masks are the bundle, which this step will fill. Before they are filled,
Stage B goes back to what the first layers gave. To the states of the bundle it adds a learned vector, the
marker, and it runs the last layers once more. Its likeliest words are written: here they are "San York"
again. Stage B knows which masks are being filled, but not with which words. Our change, causal Stage B,
mends this: a mask also sees a draft of the word before it.

Left out are edits of written words, blocks, the mixture of experts, and LoRA on a frozen model. Of
causal.py four things are left out, too: Stage B has its own layers there, its logits are added to Stage
A's log-probabilities, a bundle may have gaps, and a gate may leave masks of a bundle unfilled. Lines
with the tag # CoCommit are the paper's (some also hand on what causal Stage B needs). Lines with # causal
are our change. The line with # alpha is another loss (see fill_loss), which one row of the table tries.
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

# --- the toy: a row is a context, which is one word, and a phrase of two words. COUNTS says how many of a
# context's 25 rows have each phrase. TEXT, the batch of every training step, has each row three times
COUNTS = {"city New York": 10, "city San Francisco": 5, "city San Diego": 4, "city San Jose": 3,
          "city San Juan": 3, "dish hot dog": 8, "dish ice cream": 7, "dish ice cube": 5, "dish ice tea": 5}
TOKENS = ["[M]"] + sorted(set(" ".join(COUNTS).split()))
MASK = 0  # the mask is a token like any other
PHRASES = torch.tensor([[TOKENS.index(word) for word in phrase.split()] for phrase in COUNTS])
TEXT = PHRASES.repeat_interleave(3 * torch.tensor(list(COUNTS.values())), dim=0)  # 150 rows
HOLES = PHRASES.masked_fill(torch.arange(3) > 0, MASK)  # city [M] [M], and from row 5 on dish [M] [M]

# --- the model: a GPT in two parts, because its last layers run twice
C, H = 32, 2  # channels, heads
N_LAYER, N_LAST, N_ROUNDS = 2, 1, 1  # L layers; Stage B runs the last n again, K times
# R rows, T positions, V tokens. z, the words and masks that the model reads, is (R, T), as are masked,
# bundle and fill, which are True at some of its words. h, the states between the layers, is (R, T, C)
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
            # causal: the note also says which word is before (F.pad shifts the words right by one), and
            # it is scaled to the size of h. All words see everything outside the bundle. Only words of
            # the bundle see into it, each itself and those on its left
            if tokens is not None:  # causal
                before = F.rms_norm(self.wte(F.pad(tokens, (1, -1), value=MASK)), [C])  # causal
                note = h.square().mean(2, True).sqrt() * (marker + before @ self.show.T)  # causal
                inside = bundle[:, None, None]  # causal
                sees = ~inside | (inside & inside.mT).tril()  # causal
            h = self.last_n(h + bundle[..., None] * note, sees)  # CoCommit
        return h  # CoCommit

# a GPT's layer with RMSNorm in place of LayerNorm, and SwiGLU in place of GELU; `rotate` normalises queries
# and keys (QK norm), and turns them
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

# rotary positions in place of learned position embeddings (wpe): the further on a position is, the more
# x is turned
def rotate(x):
    first, second = F.rms_norm(x, x.shape[-1:]).chunk(2, dim=-1)
    angle = torch.arange(x.shape[2])[:, None] * 10000 ** -torch.arange(0, 1, 1 / first.shape[-1])
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

# --- the loss
# The paper adds up the cross-entropies of the words. Where both words are hidden, no term sees the other
# word, so the sum is least at the marginals, which are the probabilities of each word alone. Stage A
# learns these already. But if Stage B sees the word before, the same sum is a joint loss, because
# p(first) p(second | first) = p(both).
# Another way is the alpha loss (AlphaDLM, arXiv 2609.38066), which scores the phrase as a whole. At alpha 1
# it is least if the likeliest phrase gets probability 1. To write that phrase is the paper's aim. But
# training may end at a close second: at ice cream (.28), not at hot dog (.32).
def fill_loss(logits, target, fill, alpha):
    # for each row, the sum of the log-probabilities of the words to fill
    log_p = -(fill * F.cross_entropy(logits.mT, target, reduction="none")).sum(1)
    loss = -log_p
    if alpha > 0:
        loss = (1 - (alpha * log_p).exp()) / alpha  # alpha
    return loss.sum() / target.numel()

# --- training
def some_of(allowed):  # draw one or two of each row's allowed words
    # a word draws a number: below 1 if it is allowed, else above 1. The smallest one or two win, if allowed
    lot = torch.rand(allowed.shape) + ~allowed
    last = torch.randint(2, (len(lot), 1))
    return allowed & (lot <= lot.sort(dim=1).values.gather(1, last))

def train(start, alpha_b=None, causal=False):
    """Train a copy of a model: Stage A by the paper's loss (alpha 0), and Stage B by alpha_b, if that is given."""
    model = Model()
    model.load_state_dict(start.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 700)
    for _ in range(700):
        # hide one word or both, but not the context
        masked = some_of(torch.arange(3).expand(TEXT.shape) > 0)
        z = TEXT.masked_fill(masked, MASK)
        # Stage A fills every mask
        h = model.prefix(z)
        loss = fill_loss(model.logits(model.last_n(h)), TEXT, masked, 0)
        # Stage B fills the bundle, one or two of the masks; causal Stage B reads the true words there
        if alpha_b is not None:  # CoCommit
            bundle = some_of(masked)  # CoCommit
            tokens = torch.where(bundle, TEXT, z) if causal else None  # CoCommit
            logits = model.logits(model.coordinate(h, bundle, tokens))  # CoCommit
            loss = loss + fill_loss(logits, TEXT, bundle, alpha_b)  # CoCommit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model

# --- decoding
@torch.no_grad()
def decode(model, z, tau, looks, causal=False):
    """Fill all masks, with at most `looks` passes of Stage B a step -> z, forwards, each step's probabilities."""
    probs, n_looks = [], 0
    while (masked := z == MASK).any():
        h = model.prefix(z)
        logits = model.logits(model.last_n(h))
        # Stage A picks the bundle: the surest mask, and all masks that are surer than tau
        sure = logits.softmax(-1).amax(-1) * masked
        bundle = masked & ((sure > tau) | (sure == sure.amax(1, keepdim=True)))
        for _ in range(looks):  # CoCommit
            draft = torch.where(bundle, logits.argmax(-1), z)  # CoCommit
            logits = model.logits(model.coordinate(h, bundle, draft if causal else None))  # CoCommit
            n_looks += 1  # CoCommit
            # causal: the first word of the bundle reads no draft, so one look makes it final. A later word has
            # read drafts, and is final if this look has changed none on its left. changed.cumsum(1) counts the
            # changes up to and at a word. If it exceeds the word's own change (0 or 1), there is one on its left
            changed = bundle & (logits.argmax(-1) != draft)  # causal
            if not (bundle & (changed.cumsum(1) > changed)).any():  # causal
                break  # causal
        # the bundle gets its likeliest words (Eq. 2)
        z = torch.where(bundle, logits.argmax(-1), z)
        probs.append(logits.softmax(-1))
    return z, len(probs) + n_looks * N_ROUNDS * N_LAST / N_LAYER, probs

def report(name, model, looks=0, causal=False):  # print a row of the table: both words in one step
    z, forwards, (p,) = decode(model, HOLES, -1, looks, causal)
    if causal:  # it reads each true phrase, and so gives p(second | first)  # causal
        p = model.logits(model.coordinate(model.prefix(HOLES), HOLES == MASK, PHRASES)).softmax(-1)  # causal
    # p of the five phrases with "city" is p(first) p(second); for causal Stage B it is p(first) p(second | first)
    q = p.gather(2, PHRASES[..., None])[:5, 1:, 0].prod(1)
    city, dish = [" ".join(TOKENS[token] for token in row[1:]) for row in z[[0, 5]]]
    print(f"{name:22}{q[0]:9.2f}{q[1:].sum():9.2f}{1 - q.sum():11.2f}{forwards:10.1f}  {city}, {dish}")
    return model

if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seed", type=int, default=0, help="the seed of all random numbers (default: 0)")
    torch.manual_seed(options.parse_args().seed)
    torch.set_num_threads(1)  # faster for small matrices
    print("P(phrase | city)       New York  San ...  no phrase  forwards  city, dish")
    print("the text                   0.40     0.60       0.00")
    stage_a = report("Stage A", train(Model()))
    report("Stage A, twice as long", train(stage_a))
    report("Stage B, the paper's", train(stage_a, 0), 1)  # CoCommit
    report("Stage B, alpha 1", train(stage_a, 1), 1)  # CoCommit
    # New York is causal Stage B's likeliest phrase (.40), and yet it writes San Francisco (.20): greedily, from
    # the left, it begins with the likeliest word, San (.60), and the likeliest phrase does not begin with San
    causal = report("Stage B, causal", train(stage_a, 0, True), 2, True)  # causal
    # what it writes with at most 0 looks (Stage A's draft), 1 look, and 2 looks. One is enough: the draft San
    # stays, so the second word has read the right first word
    words = torch.cat([decode(causal, HOLES, -1, looks, True)[0][0, 1:] for looks in range(3)])  # causal
    print("causal, draft {} {}, 1 look {} {}, 2 looks {} {}".format(*[TOKENS[t] for t in words]))  # causal
