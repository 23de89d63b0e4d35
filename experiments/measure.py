"""What the pages of results quote of a checkpoint, for one seed: a record for each row, appended to a file.

bits     bits a byte of 16,384 held-out bytes, each block from masks, in each way that the model has
draws    forwards a byte of 16 drawn texts, and ms a byte, for one text alone and for 16 together
names    the share of all held-out beginnings that become existing names, forwards a name, and how many of the real
         names are of the training half, for each row that evaluate.py has, and for opponents
controls how many of them become existing names with Stage B off, on, and by the controls of released/ablation.py; names
         gained and lost against Stage B off (or the base), and McNemar's exact p

python -m experiments.measure bits --ckpt assets/shakespeare/causal --system causal --seed 1 --out out/bits.jsonl
python -m experiments.measure names --ckpt assets/names/paper --system paper --seed 1 --out out/names.jsonl
"""

import json
import math
import time
from argparse import Namespace
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F

from checkpoint import base_of, judge_of, load_model
from decoding import CAUSAL, PAPER, Decoding, up_to_eos
from evaluate import BASE_ROWS, LEFT, NAME_LENGTH, bits_of_rows, compare, complete, forwards, rows_of
from lib.names import draw_names, exists, names_of
from lib.rows import read_corpus
from lib.run import setting_of_run
from lib.tokenizer import load_tokenizer
from lib.util import Parser, append_line, command
from model import Model
from released.ablation import BASE, COCOMMIT, CONTROLS, GATED, ROWS, decoder_of
from sample import generate

load = partial(load_model, device="cpu", dtype=torch.float32)
TEXT = Path("data/shakespeare")
NAMES = Path("data/names")
SEQ_LEN = 256
BLOCK = 16  # all models are judged on the rows of these blocks
N_BYTES = 16384
BEGINNING = 56  # bytes of each beginning that is continued
DRAWN = replace(CAUSAL, select="left", gen_length=200, temperature=1.0, eos_early_stop=False)  # whole blocks
IN_ONE = "in blocks of one token"

# a comparison of the controls: the gate, a row, and the row that it is compared with
CONTROLLED = [row for row in CONTROLS if row not in ("off", "Stage B without marker, deeper")]
COMPARED = [(gate, row, "off") for gate in (0.7, 0.3) for row in ("off", COCOMMIT, *CONTROLLED)]
COMPARED += [(0.7, GATED, "adapter, Stage B off"), (0.7, COCOMMIT, BASE)]


def bits(args: Namespace) -> Iterator[dict]:
    model = load(args.ckpt)
    of_names = "names" in judge_of(args.ckpt)
    corpus = read_corpus(NAMES, 32, 0, 8, 0) if of_names else read_corpus(TEXT, SEQ_LEN, 0, BLOCK, 0)

    # a left-to-right model has blocks of one: what its mask says is the next byte
    if model.cfg.block_length == 1:
        ways = [("one at a time", model, "Stage A")]
    elif model.trained_b:
        ways = [("Stage A", model, "Stage A"), ("Stage B", model, "Stage B")]
    else:
        ways = [("Stage A", model, "Stage A"), ("one at a time", model, "one at a time")]
        ways.append(("in blocks of one", load(args.ckpt, block_length=1), "Stage A"))

    for row, model, way in ways:
        found = bits_of_rows(model, corpus, way, N_BYTES, None)
        yield dict(row=row, bits=found["bits"] / found["tokens"], bytes=found["tokens"])


def draws(args: Namespace) -> Iterator[dict]:
    model = load(args.ckpt)
    rows = read_corpus(TEXT, SEQ_LEN, 0, BLOCK, 0).rows["val"].rows
    beginnings = [rows[i][:BEGINNING].tolist() for i in range(16)]

    # a step writes the whole block; without Stage B also one byte
    ways = {"all at once": (model, replace(DRAWN, n_rounds=model.cfg.n_rounds if model.trained_b else 0))}
    if not model.trained_b:
        one = replace(DRAWN, tau_m2t=1.0, n_rounds=0)
        ways |= {"one at a time": (model, one), "in blocks of one": (load(args.ckpt, block_length=1), one)}

    for row, (model, d) in ways.items():
        found = {}
        for n in (1, 16):
            began = time.perf_counter()
            outputs = generate(model, beginnings[:n], d, seed=args.seed)
            n_bytes = sum(len(output.tokens) for output in outputs)
            found[f"ms_{n}"] = 1e3 * (time.perf_counter() - began) / n_bytes
        found["forwards"] = forwards(model, outputs) / n_bytes

        yield dict(row=row) | found


def names(args: Namespace) -> Iterator[dict]:
    tokenizer = load_tokenizer(base_of(args.ckpt))
    prompts = draw_names(10**9, tokenizer)
    known = set(names_of("train"))
    rows = name_rows(args.ckpt)
    for name, (model, d) in rows.items():
        found = complete(model, tokenizer, prompts, replace(d, gen_length=NAME_LENGTH))
        yield counted(name, found["written"], found["forwards"], known)
    if "all at once" in rows:  # a base
        one, _ = rows[IN_ONE]
        found = [beam_by_token(one, prompt, 4) for prompt in prompts.values()]
        written = [tokenizer.decode(text) for text, _ in found]
        yield counted("in blocks of one, a beam of 4", written, sum(m for _, m in found) / len(found), known)


def name_rows(ckpt: Path) -> dict[str, tuple[Model, Decoding]]:
    """Under the name of each row: what decodes, and how."""
    model = load(ckpt)
    if model.trained_b:
        ways = rows_of(model)
        if "beam" in model.unread:
            ways["Stage B, gates .7 and .5"] = replace(PAPER, tau_t2t=0.5)
        else:
            ways["Stage B, the longest run above 0.5"] = replace(CAUSAL, tau_m2t=0.5)
        return {name: (model, d) for name, d in ways.items()}

    # a left-to-right model has one way
    in_one = {IN_ONE: (load(ckpt, block_length=1), LEFT)}
    if setting_of_run(ckpt, "one_by_one", float) == 1:
        return in_one
    runs = {f"the longest run above {tau}": replace(LEFT, tau_m2t=tau) for tau in (0.7, 0.2, 0.1)}
    return {name: (model, d) for name, d in (BASE_ROWS | runs).items()} | in_one


def counted(row: str, written: list[str], cost: float, known: Container[str]) -> dict:
    """known: how many of the real names are among those of the training half."""
    real = [name for name in written if exists(name)]
    shares = dict(exist=len(real) / len(written), forwards=round(cost, 4))
    return dict(row=row) | shares | dict(known=sum(name in known for name in real), real=len(real))


@torch.inference_mode()
def beam_by_token(model: Model, prompt: list[int], U: int) -> tuple[list[int], int]:
    """The likeliest text that a beam of U finds; the model has blocks of one -> the text up to its eos, and its
    forwards. The beam ends with the first text that is both finished and likeliest."""
    eos, mask = model.cfg.eos_id, model.cfg.mask_id
    texts = torch.tensor([prompt])
    score = torch.zeros(1)
    for _ in range(NAME_LENGTH):
        ids = F.pad(texts, (0, 1), value=mask)
        log_p = model(ids, model.context(torch.ones_like(ids, dtype=torch.bool)))[:, -1].log_softmax(-1)
        log_p[:, mask] = -torch.inf
        ended = texts[:, -1] == eos
        log_p[ended] = -torch.inf
        log_p[ended, eos] = 0.0
        score, best = (score[:, None] + log_p).flatten().topk(U)
        texts = torch.cat([texts[best // log_p.shape[1]], (best % log_p.shape[1])[:, None]], dim=1)
        if texts[0, -1] == eos:
            break
    return prompt + up_to_eos(texts[0, len(prompt) :].tolist(), eos), texts.shape[1] - len(prompt)


def controls(args: Namespace) -> Iterator[dict]:
    """At the paper's gate, and at one of .3, where steps fill more masks."""
    tokenizer = load_tokenizer(base_of(args.ckpt))
    models = {"adapter": load(args.ckpt), "base": load(base_of(args.ckpt))}
    prompts = draw_names(10**9, tokenizer)
    known = set(names_of("train"))

    @cache
    def completed(gate: float, row: str) -> dict:
        weights, *_ = ROWS[row]
        d, step = decoder_of(row, models[weights].cfg.n_rounds)
        d = replace(d, tau_m2t=gate, gen_length=NAME_LENGTH, holes=True)
        return complete(models[weights], tokenizer, prompts, d, step)

    for gate, row, against in COMPARED:
        found = completed(gate, row)
        counts = compare(completed(gate, against)["written"], found["written"])
        counts["p"] = mcnemar(counts["gained"], counts["lost"])
        yield dict(gate=gate, against=against) | counted(row, found["written"], found["forwards"], known) | counts


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p: how often a fair coin is at least as one-sided in gained + lost throws."""
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n)


WHAT = {what.__name__: what for what in (bits, draws, names, controls)}


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--ckpt", type=Path, required=True)
    parser.add_argument("--system", required=True, help="what the pages call it")
    parser.add_argument("--seed", type=int, required=True, help="of the training; texts are drawn by it, too")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for found in WHAT[args.what](args):
        record = dict(system=args.system, seed=args.seed) | found
        append_line(args.out, record)
        print(json.dumps(record))


if __name__ == "__main__":
    main()
