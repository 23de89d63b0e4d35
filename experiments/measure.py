"""What the pages of results quote of a checkpoint, for one seed: a record for each row, appended to a file.

bits     bits a byte of 16,384 held-out bytes, each block from masks, in each way that the model has
draws    forwards a byte of 16 drawn texts, and ms a byte, for one text alone and for 16 together
names    the share of 512 held-out names that exist, and forwards a name, for each row that evaluate.py has

python -m experiments.measure bits --ckpt assets/shakespeare/causal --system causal --seed 1 --out out/bits.jsonl
python -m experiments.measure names --ckpt assets/names/paper --system paper --seed 1 --out out/names.jsonl
"""

import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint import base_of, load_model
from decoding import CAUSAL
from evaluate import BASE_ROWS, LEFT, NAME_LENGTH, bits_of_rows, complete, forwards, rows_of
from lib.names import draw_names
from lib.rows import read_corpus
from lib.tokenizer import load_tokenizer
from lib.util import Parser, append_line, command
from model import Model
from sample import generate

CPU = torch.device("cpu")
TEXT = Path("data/shakespeare")
SEQ_LEN = 256
BLOCK = 16  # all models are judged on the rows of these blocks
N_BYTES = 16384
BEGINNING = 56  # bytes of each beginning that is continued
DRAWN = replace(CAUSAL, select="left", gen_length=200, temperature=1.0, eos_early_stop=False)  # whole blocks
N_NAMES = 512


def load(folder: Path, **overrides) -> Model:
    return load_model(folder, CPU, torch.float32, **overrides)


def bits(args: Namespace) -> list[dict]:
    model = load(args.ckpt)
    corpus = read_corpus(TEXT, SEQ_LEN, 0, BLOCK, 0)

    # a left-to-right model has blocks of one: what its mask says is the next byte
    if model.cfg.block_length == 1:
        ways = [("one at a time", model, "Stage A")]
    elif model.trained_b:
        ways = [("Stage A", model, "Stage A"), ("Stage B", model, "Stage B")]
    else:
        ways = [("Stage A", model, "Stage A"), ("one at a time", model, "one at a time")]
        ways.append(("in blocks of one", load(args.ckpt, block_length=1), "Stage A"))

    records = []
    for row, model, way in ways:
        found = bits_of_rows(model, corpus, way, N_BYTES, None)
        records.append(dict(row=row, bits=found["bits"] / found["tokens"], bytes=found["tokens"]))
    return records


def draws(args: Namespace) -> list[dict]:
    model = load(args.ckpt)
    rows = read_corpus(TEXT, SEQ_LEN, 0, BLOCK, 0).rows["val"].rows
    beginnings = [rows[i][:BEGINNING].tolist() for i in range(16)]

    # a step writes the whole block; without Stage B also one byte
    rules = {"all at once": replace(DRAWN, n_rounds=model.cfg.n_rounds if model.trained_b else 0)}
    if not model.trained_b:
        rules["one at a time"] = replace(DRAWN, tau_m2t=1.0, n_rounds=0)

    records = []
    for row, d in rules.items():
        record = dict(row=row)
        for n in (1, 16):
            began = time.perf_counter()
            outputs = generate(model, beginnings[:n], d, seed=args.seed)
            n_bytes = sum(len(output.tokens) for output in outputs)
            record[f"ms_{n}"] = 1e3 * (time.perf_counter() - began) / n_bytes
        record["forwards"] = forwards(model, outputs) / n_bytes

        # in blocks of one our loop takes two forwards a byte: one fills its mask, one reads it. A left-to-right loop
        # needs one
        if model.cfg.block_length == 1:
            record = {key: value if key == "row" else value / 2 for key, value in record.items()}
        records.append(record)
    return records


def names(args: Namespace) -> list[dict]:
    tokenizer = load_tokenizer(base_of(args.ckpt))
    prompts = draw_names(N_NAMES, "held out", tokenizer)
    model = load(args.ckpt)
    rows = [(name, model, d) for name, d in (rows_of(model) if model.trained_b else BASE_ROWS).items()]
    if not model.trained_b:
        rows.append(("in blocks of one token", load(args.ckpt, block_length=1), LEFT))

    records = []
    for name, model, d in rows:
        found = complete(model, tokenizer, prompts, replace(d, gen_length=NAME_LENGTH))
        # a left-to-right loop needs m forwards for m tokens, ours takes 2 m - 1
        cost = (found["forwards"] + 1) / 2 if model.cfg.block_length == 1 else found["forwards"]
        records.append(dict(row=name, exist=found["exist"], forwards=round(cost, 4)))
    return records


WHAT = {"bits": bits, "draws": draws, "names": names}


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
