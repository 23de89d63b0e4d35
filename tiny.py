"""Don't Commit Alone (Lin Yao, 2026): the paper in one file, on a toy to check by hand.

A masked diffusion language model is a GPT that looks both ways and fills the holes in a text, its
masks. To be fast it fills several in one step, each by itself, and there it fails. Say that "city"
goes on with New York (.40), San Francisco (.35) or San Diego (.25). The likeliest first word is
San (.35 + .25 = .60), the likeliest second word is York (.40), and the model writes "San York".

The paper's method, CoCommit, looks twice. Stage A, the plain pass, picks the masks to write now:
the bundle. Stage B adds a learned vector there, the marker, runs the last layers once more, and
writes the bundle. Do its words agree? python tiny.py trains six models, in a minute, and answers
with a table. Tagged # CoCommit is what its model has more; the chain and the number are not its.
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

# --- the toy: a context, then one of its three phrases
PHRASES = ["city New York", "city San Francisco", "city San Diego",
           "dish hot dog", "dish ice cream", "dish ice tea",
           "star black hole", "star red giant", "star red dwarf"]
TOKENS = ["[M]"] + sorted(set(" ".join(PHRASES).split()))
MASK = 0  # the mask is a token, too
ROWS = torch.tensor([[TOKENS.index(word) for word in phrase.split()] for phrase in PHRASES])
TEXT = ROWS.repeat_interleave(torch.tensor([48, 42, 30] * 3), dim=0)  # .40, .35, .25 of 120

# --- the model: a GPT in two parts, because its last layers run twice
C = 32  # channels
H = 2  # heads
N_LAYER = 2  # L
N_LAST = 1  # n: the layers that Stage B runs again
N_ROUNDS = 1  # K: how often
# R rows, T positions, V tokens. z is (R, T), as are masked, bundle and fill; h is (R, T, C)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(TOKENS), C)
        self.layers = nn.Sequential(*[Block() for _ in range(N_LAYER)])
        self.lm_head = nn.Linear(C, len(TOKENS), bias=False)
        # a marker for each round: "you are written together"
        self.markers = nn.Parameter(torch.zeros(N_ROUNDS, C))  # CoCommit
        self.dial = nn.Parameter(torch.zeros(C))  # times a number  # CoCommit
    # Stage A is head(last_n(prefix(z))): tokens -> logits (R, T, V), as in any GPT
    def prefix(self, z):
        return self.layers[:-N_LAST](self.wte(z))
    def last_n(self, h):
        return self.layers[-N_LAST:](h)
    def head(self, h):
        return self.lm_head(F.rms_norm(h, [C]))
    # Stage B (Eq. 4): the last n layers run on the prefix's h once more, with the bundle marked. The
    # number (R, 1) is a lot that the bundle shares; only the last model learns its use
    def coordinate(self, h, bundle, number):  # CoCommit
        for marker in self.markers:  # CoCommit
            mark = marker + number[..., None] * self.dial  # CoCommit
            h = self.last_n(h + bundle[..., None] * mark)  # CoCommit
        return h  # CoCommit

class Block(nn.Module):
    """A GPT's block, with RMSNorm for LayerNorm and SwiGLU for GELU."""
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.proj = nn.Linear(C, C, bias=False)
        self.gate_up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(2 * C, C, bias=False)
    def forward(self, x):
        qkv = self.qkv(F.rms_norm(x, [C])).unflatten(2, (3, H, C // H))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (R, H, T, C / H) each
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v)  # no causal mask
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x, [C])).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

def rotate(x):
    """Rotary positions, for wpe: x is normalised, and turned by angles that grow with the position."""
    first, second = F.rms_norm(x, x.shape[-1:]).chunk(2, dim=-1)
    speed = 10000 ** -torch.arange(0, 1, 1 / first.shape[-1])
    angle = torch.arange(x.shape[2])[:, None] * speed
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

# --- training: what the model is shown, and what it is asked to write
def corrupt(x):
    """Mask some words of each row, few or many, but not its context."""
    masked = torch.rand(len(x), 1) > torch.rand(x.shape)
    masked[:, 0] = False
    return x.masked_fill(masked, MASK), masked

def draw_bundle(masked, s_max):  # the masks with the 1 to s_max lowest lots  # CoCommit
    lot = torch.rand(masked.shape) + ~masked  # CoCommit
    last = torch.randint(s_max, (len(masked), 1))  # CoCommit
    return masked & (lot <= lot.sort(dim=1).values.gather(1, last))  # CoCommit

@torch.no_grad()
def chain(base, z, bundle, u=None):
    """What the base writes into the bundle, a forward for each word; with u (R, 1), what u draws."""
    for t in range(1, z.shape[1]):
        p = base.head(base.last_n(base.prefix(z)))[:, t].softmax(-1)  # (R, V)
        word = p.argmax(-1, keepdim=True)  # (R, 1)
        here = bundle & (torch.arange(z.shape[1]) == t)
        if u is not None:
            # A word's piece of [0, 1) is as long as its p: a uniform u falls into it that often.
            # Where in the piece it falls is uniform again: u for the next word
            end = p.cumsum(-1)
            word = (end[:, :-1] <= u).sum(-1, keepdim=True)
            inside = 1 - (end.gather(1, word) - u) / p.gather(1, word)
            u = torch.where(here[:, t, None], inside, u)
        z = torch.where(here, word, z)
    return z

def choose_target(kind, base, z, fill):
    """What a stage is to write where `fill` is True, and Stage B's number. A target of yours: here."""
    # A position that decides by itself can at best give its word's probabilities, given what it sees:
    # z and the bundle. Given these the text's words are random, San .60, York .40. So with this
    # target Stage B learns what Stage A has already.
    if kind == "clean":
        return TEXT, torch.zeros(len(z), 1)
    # A chain is a function of z and the bundle, so every position can learn its part of one phrase.
    # (Stage A can, and cheaper. But then San is 1.00, not .60: no doubt is left to pick a bundle by.)
    if kind == "chain":
        return chain(base, z, fill), torch.zeros(len(z), 1)
    # But it is always the same phrase. A chain drawn by u is a function of z, the bundle and u: told u,
    # positions can agree on a phrase, and all that is random is u.
    u = torch.rand(len(z), 1)
    return chain(base, z, fill, u), 8 * u - 4

def fill_loss(logits, target, fill):  # Eq. 1; the full code has its terms for edits, too
    return (fill * F.cross_entropy(logits.mT, target, reduction="none")).mean()

def train(base, target_a="clean", target_b=None):
    """Train a copy of the base further: its Stage A and, given a target for it, Stage B."""
    model = Model()
    model.load_state_dict(base.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for step in range(400):
        z, masked = corrupt(TEXT)
        # Stage A fills every mask
        h = model.prefix(z)
        logits = model.head(model.last_n(h))
        target, _ = choose_target(target_a, base, z, masked)
        loss = fill_loss(logits, target, masked)
        # Stage B fills the bundle
        if target_b is not None:  # CoCommit
            bundle = draw_bundle(masked, 2)  # CoCommit
            target, number = choose_target(target_b, base, z, bundle)  # CoCommit
            logits = model.head(model.coordinate(h, bundle, number))  # CoCommit
            loss = loss + fill_loss(logits, target, bundle)  # CoCommit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in (0, 399):
            print(f"{loss.item():.2f} ", end="", flush=True)
    return model

@torch.no_grad()
def decode(model, z, tau, stage_b, number):
    """Write all masks of z -> z, the cost in forwards, the last step's p (R, T, V)."""
    forwards = 0
    while (masked := z == MASK).any():
        h = model.prefix(z)
        logits = model.head(model.last_n(h))
        forwards += 1
        # Stage A's rule for the bundle: the surest mask, and all whose best word is above tau
        sure = logits.softmax(-1).amax(-1) * masked
        bundle = masked & ((sure > tau) | (sure == sure.amax(1, keepdim=True)))
        if stage_b:  # CoCommit
            logits = model.head(model.coordinate(h, bundle, number))  # CoCommit
            forwards += N_ROUNDS * N_LAST / N_LAYER  # CoCommit
        p = logits.softmax(-1)
        z = torch.where(bundle, p.argmax(-1), z)
    return z, forwards, p

def report(name, model, stage_b=False):
    """A row of the table: both words in one step, 3 contexts, 1,000 numbers each."""
    z = ROWS[::3].masked_fill(torch.arange(3) > 0, MASK).repeat(1000, 1)
    z, forwards, p = decode(model, z, -1, stage_b, torch.linspace(-4, 4, 3000)[:, None])
    # "city" is every third row: how probable its phrases are if words are drawn
    q = (p[::3, 1, ROWS[:3, 1]] * p[::3, 2, ROWS[:3, 2]]).mean(0).tolist()
    # in how many contexts the likeliest words are a phrase
    right = 3 * (z[:, None] == ROWS).all(-1).any(-1).float().mean()
    print(f"{name:30}{q[0]:9.2f}{q[1]:14.2f}{q[2]:10.2f}{1 - sum(q):10.2f}{forwards:9.1f}{right:11.1f}")

if __name__ == "__main__":
    options = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    options.add_argument("--seed", type=int, default=0)
    torch.manual_seed(options.parse_args().seed)
    torch.set_num_threads(1)  # small matrices
    print("loss       P(phrase | city)               New York San Francisco San Diego no phrase forwards right of 3")
    print("           the text                           0.40          0.35      0.25      0.00")
    base = train(Model())
    report("Stage A", base)
    report("Stage A, trained as long again", train(base))
    report("Stage B, clean target (paper)", train(base, "clean", "clean"), True)  # CoCommit
    report("Stage B, chain target", train(base, "clean", "chain"), True)  # CoCommit
    report("Stage A, taught the chain", train(base, "chain"))
    report("Stage B, chain drawn by u", train(base, "clean", "drawn"), True)  # CoCommit
