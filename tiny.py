"""Joint token commitment: the paper's method in one file, on a toy to check by hand.

A masked diffusion language model is a GPT that looks both ways and fills in masked words, several
in a step, each by itself. Here it writes "San York": both are the likeliest words of their places.
The paper's idea: Stage A, the plain pass, picks the words to write now, the bundle; Stage B marks
them and runs the last n layers again, so that they can agree. Does it work? python tiny.py shows it.
Lines that a plain model would not have end in "# CoCommit"; without them it runs, Stage A alone.
"""

# fmt: off
import argparse

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

# --- the toy: a context, then one of its three phrases, with probability P
TABLE = """
  city   New York     San Francisco   San Diego
  dish   hot dog      ice cream       ice tea
  star   black hole   red giant       red dwarf
"""
P = torch.tensor([0.40, 0.35, 0.25])
TOKENS = sorted(set(TABLE.split())) + ["[M]"]  # the mask is a token, too
MASK = len(TOKENS) - 1
IDS = torch.tensor([TOKENS.index(t) for t in TABLE.split()]).view(3, 7)
ROWS = IDS[:, [[0, 1, 2], [0, 3, 4], [0, 5, 6]]]  # (3 contexts, 3 phrases, 3 tokens)
TEXT = ROWS.repeat_interleave((160 * P).round().long(), dim=1).flatten(0, 1)  # (480, 3)

# --- the model, a GPT that looks both ways: R rows, T positions, C channels, H heads, V tokens
C, H, N_LAYER, N_LAST = 32, 2, 2, 1  # N_LAST, n: the layers that Stage B runs again

def rotate(x: Tensor) -> Tensor:
    """Queries or keys (R, H, T, D): normalised, then turned by an angle that grows along T."""
    T, D = x.shape[-2:]
    x = F.rms_norm(x, [D])
    angle = torch.arange(T)[:, None] * 10000 ** -(torch.arange(0, D, 2) / D)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.proj = nn.Linear(C, C, bias=False)
        self.gate_up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(2 * C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(F.rms_norm(x, [C])).unflatten(2, (3, H, C // H))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (R, H, T, C / H) each
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v)  # every word sees every word
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x, [C])).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

class Model(nn.Module):
    def __init__(self, rng: Generator):
        super().__init__()
        self.wte = nn.Embedding(len(TOKENS), C)
        self.layers = nn.Sequential(*[Block() for _ in range(N_LAYER)])
        self.lm_head = nn.Linear(C, len(TOKENS), bias=False)
        for p in self.parameters():
            nn.init.normal_(p, std=C**-0.5, generator=rng)
        # "you are written together": a learned vector for each of K rounds of Stage B
        self.markers = nn.Parameter(torch.zeros(1, C))  # CoCommit

    # a plain forward is head(last_n(prefix(z))), cut where Stage B comes in again
    def prefix(self, z: Tensor) -> Tensor:
        return self.layers[:-N_LAST](self.wte(z))
    def last_n(self, h: Tensor) -> Tensor:
        return self.layers[-N_LAST:](h)
    def head(self, h: Tensor) -> Tensor:
        return self.lm_head(F.rms_norm(h, [C]))
    # Stage B, Eq. 4: mark the bundle and run the last n layers again, K times
    def coordinate(self, h: Tensor, bundle: Tensor, K: int) -> Tensor:  # CoCommit
        for marker in self.markers[:K]:  # CoCommit
            h = self.last_n(h + bundle[..., None] * marker)  # CoCommit
        return h  # CoCommit

NONE, M, W, G = 0, 1, 2, 3  # --- training: the context; a masked, a wrong, a good word

def corrupt(x: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
    """Clean text x (R, T) -> z (R, T), which the model sees, and every position's kind."""
    word = torch.arange(x.shape[1]) > 0
    ratio = torch.rand(len(x), 1, generator=rng)
    masked = word & (torch.rand(x.shape, generator=rng) < ratio)
    z = x.masked_fill(masked, MASK)
    wrong = word & ~masked & (torch.rand(x.shape, generator=rng) < 0.1)  # CoCommit
    other = (torch.rand(x.shape, generator=rng) * MASK).long()  # CoCommit
    z = torch.where(wrong, other, z)  # CoCommit
    kind = (word * G).repeat(len(x), 1)
    kind[z != x] = W  # CoCommit
    kind[masked] = M
    return z, kind

def three_term_loss(logits: Tensor, target: Tensor, kind: Tensor, fill: Tensor) -> Tensor:
    """Eq. 1: fill what is masked, correct what is wrong, leave what is good."""
    weight = 1.0 * fill
    weight = weight + 0.3 * (kind == W) + 0.2 * (kind == G)  # CoCommit
    return (weight * F.cross_entropy(logits.mT, target, reduction="none")).mean()

# the bundle in training: 1 to s_max of the masked words, drawn blindly
def draw_bundle(masked: Tensor, s_max: int, rng: Generator) -> Tensor:  # CoCommit
    size = 1 + (torch.rand(len(masked), 1, generator=rng) * s_max).long()  # CoCommit
    key = torch.rand(masked.shape, generator=rng).masked_fill(~masked, 2)  # CoCommit
    return masked & (key <= key.sort(dim=1).values.gather(1, size - 1))  # CoCommit

def train(rng: Generator, base: Model | None = None, chained: bool = False) -> Model:
    """The base, Stage A alone; or from a base both stages, Stage B with one of two targets."""
    model = Model(rng)
    model.load_state_dict((base or model).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for _ in range(400):
        z, kind = corrupt(TEXT, rng)
        # Stage A fills every masked word
        h = model.prefix(z)
        logits = model.head(model.last_n(h))
        loss = three_term_loss(logits, TEXT, kind, fill=kind == M)
        # Stage B fills the bundle. The target is the line to change. The paper's: the text's own
        # words, and the best guess at them is Stage A's once more. Ours: a chain, one phrase
        if base is not None:  # CoCommit
            bundle = draw_bundle(kind == M, 2, rng)  # CoCommit
            target = chain(base, TEXT, z, bundle) if chained else TEXT  # CoCommit
            logits = model.head(model.coordinate(h, bundle, 1))  # CoCommit
            loss = loss + three_term_loss(logits, target, kind, fill=bundle)  # CoCommit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model

# --- decoding a prompt and n_new masks, one block. tau_t2t = 1: no edits
@torch.no_grad()
def decode(model, prompt, n_new, tau_m2t, tau_t2t, K, max_post_steps=0):
    z = torch.tensor([prompt + [MASK] * n_new])
    answer = torch.arange(z.shape[1]) >= len(prompt)
    full = partial = post_steps = 0
    for _ in range(1024):  # some rows are edited to and fro
        # Stage A, a full forward, picks the bundle: masks above the gate, or else the surest
        masked = z == MASK
        h = model.prefix(z)
        logits = model.head(model.last_n(h))
        full += 1
        p = logits.softmax(-1).amax(-1).masked_fill(~masked, -2)
        bundle = p > tau_m2t
        if not bundle.any():
            bundle[0, p.argmax()] = masked.any()
        # Stage B, K partial forwards, each n layers of N_LAYER
        if bundle.any() and K > 0:  # CoCommit
            logits = model.head(model.coordinate(h, bundle, K))  # CoCommit
            partial += K  # CoCommit
        p, token = logits.softmax(-1).max(-1)
        after = torch.where(bundle, token, z)  # Eq. 2 fills the bundle, Eq. 3 edits
        after = torch.where(answer & ~masked & (p > tau_t2t), token, after)  # CoCommit
        post_steps += int(not (after == MASK).any())
        if torch.equal(after, z) or post_steps > max_post_steps:
            break
        z = after
    return after[0].tolist(), full, partial

# the chain: what the base would write into the bundle word by word, the surest word first
def chain(base: Model, x: Tensor, z: Tensor, bundle: Tensor) -> Tensor:  # CoCommit
    for _ in range(bundle.sum(1).max()):  # CoCommit
        left = bundle & (z == MASK)  # CoCommit
        p, token = base.head(base.last_n(base.prefix(z)))[..., :MASK].softmax(-1).max(-1)  # CoCommit
        surest = p.masked_fill(~left, -1).argmax(1, keepdim=True)  # CoCommit
        z = torch.where(left & (torch.arange(z.shape[1]) == surest), token, z)  # CoCommit
    return torch.where(bundle, z, x)  # CoCommit

# --- what is written; what share is a phrase if words were drawn
@torch.no_grad()
def report(name: str, model: Model, tau_m2t: float, K: int) -> Tensor:
    z = ROWS[:, 0].masked_fill(torch.arange(3) > 0, MASK)
    h = model.prefix(z)
    logits = model.head(model.last_n(h))
    if K > 0:  # CoCommit
        logits = model.head(model.coordinate(h, z == MASK, K))  # CoCommit
    word = logits[:, 1:].softmax(-1)
    q = word[:, 0].gather(1, ROWS[..., 1]) * word[:, 1].gather(1, ROWS[..., 2])
    kl = (P * (P / q).log()).sum(1).mean().clamp(max=3)
    written = [decode(model, c, 2, tau_m2t, 1, K) for c in IDS[:, :1].tolist()]
    right = sum(row in TEXT.tolist() for row, _, _ in written)
    row, full, partial = written[0]
    drawn = f"{q.sum(1).mean():7.1f}{kl:12.1f}" if tau_m2t < 1 else " " * 19
    print(f"{name:23}{' '.join(TOKENS[i] for i in row[1:]):15}{right} of 3{drawn}{full:5} + {partial}")
    return word

if __name__ == "__main__":
    options = argparse.ArgumentParser("tiny.py", usage=argparse.SUPPRESS)
    options.add_argument("--seed", type=int, default=0, help="of the weights and the masks")
    rng = Generator().manual_seed(options.parse_args().seed % 2**32)
    print(f"True:   .40          .35            .25{TABLE}\n{'':23}writes         phrases  drawn  KL (max 3)  forwards")
    base = train(rng)
    report("one word at a time", base, 1, 0)
    report("Stage A", base, 0.3, 0)
    report("Stage B, clean target", train(rng, base), 0.3, 1)  # CoCommit
    report("Stage B, chain target", train(rng, base, chained=True), 0.3, 1)  # CoCommit
    print("Clean words teach B what A knows: each word's own probability. A chain is one phrase.")
