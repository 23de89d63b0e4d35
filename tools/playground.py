"""The model in a browser: one HTML page that completes what a user types, and needs no other file and no server.

The page has the weights, the tokenizer and an engine in JavaScript (tools/engine.js, which computes what model.py and
sample.generate do). It shows several decoders on the same beginning, step by step, as sample.py decodes. A click on a
mask shows what Stage A and Stage B would write there, and lets the user write a token. For names the page also says
whether a name exists, and counts how many of 100 held-out beginnings become a name. A model of text draws every token.

    python -m tools.playground                                         # two pages: Shakespeare, and names
    python -m tools.playground --ckpt out/names --out out/mine.html    # your own, or several adapters of one base
"""

import base64
import json
import math
import re
import sys
import unicodedata
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import about_adapter, adapter_tensors, base_of, check_same_tokens, judge_of, load_model, read_config
from decoding import SETTINGS, settings_of
from lib.names import draw_names
from lib.rows import Rows, read_meta
from lib.run import setting_of_run
from lib.tokenizer import GPT2, WORDS, Tokenizer, load_tokenizer
from lib.util import Parser, command, fail, printable, replace_file
from model import Model
from tools.watch import piece

HERE = Path(__file__).parent
SCRIPTS = ("engine.js", "viewer.js", "playground.js")
NAMES, TEXT = [[Path("assets", of, kind) for kind in ("paper", "causal")] for of in ("names", "shakespeare")]
TITLE = b"<title>Words that are written together should agree</title>"
BEGINNINGS = 100  # held-out names to complete, or held-out texts to continue
BEGINNING = 56  # the most tokens of such a text that are given

LEFT = "The leftmost mask; then the model reads again."
GATED = "All masks above tau_m2t, each by itself, by Stage A alone."
AT_ONCE = "All masks of a block, each by itself."
ON = "The masks above tau_m2t are marked, and read once more by Stage B."
ON_AT_ONCE = "All masks of a block are marked, and read once more by Stage B."
CAUSAL = "Stage A drafts (A); a pass (1, 2 ...) of Stage B reads the drafts on the left; ✓ is final."


def decoders_of(model: Model, with_b: bool, draws: bool) -> list[dict]:
    """The decoders that the page shows for a model, with Stage B or as a base: the fields of a decoding.Decoding each,
    and `gates`, those that have a slider. Its own settings are sample.py's, which edits nothing if a token is drawn."""
    kind = model.cfg.stage_b if with_b else "base"
    own = replace(settings_of(model), n_rounds=model.cfg.n_rounds) if with_b else SETTINGS[model.cfg.decoder]
    own = replace(own, tau_t2t=None if draws else own.tau_t2t)
    off = replace(own, n_rounds=0)
    at_once = replace(own, tau_m2t=-1.0, tau_t2t=None)
    shown = {
        "base": {
            "base, one at a time": (LEFT, SETTINGS["left"]),
            "base, gates": (GATED, own),
            "base, all at once": (AT_ONCE, at_once),
        },
        "paper": {
            "paper, Stage B off": (GATED, off),
            "paper, Stage B": (ON, own),
            "paper, all at once": (ON_AT_ONCE, at_once),
        },
        "causal": {"causal Stage B": (CAUSAL, own)},
    }[kind]
    if own == SETTINGS["left"]:
        del shown["base, gates"]
    if draws:
        shown.pop("paper, Stage B off", None)  # to be quicker
    decoders = []
    for name, (about, d) in shown.items():
        fixed = name.endswith(("at a time", "at once"))
        gates = [gate for gate in ("tau_m2t", "tau_t2t") if not fixed and getattr(d, gate) is not None]
        d = replace(d, temperature=float(draws), gen_length=48 if draws else 32)
        decoders.append(asdict(d) | dict(name=name, about=about, kind=kind, gates=gates))
    return decoders


# --- what the page holds
def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def weights_data(tensors: list[Tensor]) -> str:
    """All numbers end to end as float32: first the lowest byte of every number, then the next byte of every number, and
    so on. The two lower bytes of a bfloat16 number are zero, and take no space when they are packed."""
    numbers = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
    return packed(numbers.view(torch.uint8).view(-1, 4).T.contiguous().numpy().tobytes())


def tokenizer_data(tokenizer: Tokenizer, vocab_size: int) -> dict:
    """What the page's tokenizer needs. Bytes are written as the characters U+0000 to U+00FF."""
    # \s means other blanks in JavaScript. If several special tokens begin at one place, the longest counts
    words = tokenizer.pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
    longest_first = sorted(tokenizer.special, key=len, reverse=True)
    return {
        "words": words,
        "names": f"({'|'.join(map(re.escape, longest_first))})",
        "bytes": [tokenizer.token_bytes.get(token, b"").decode("latin-1") for token in range(vocab_size)],
        "special": tokenizer.special,
        "pieces": [piece(tokenizer, token) for token in range(vocab_size)],
    }


# --- the page
def page_data(folders: list[Path]) -> dict:
    """Everything that the page reads: geometry, weights, tokenizer, decoders and, for a model of names, all names."""
    base = base_of(folders[0])
    for folder in folders:
        read_config(folder)  # it must be a model's folder, or an adapter's
        if base_of(folder).resolve() != base.resolve():
            fail(f"{folder} has the base {base_of(folder)}, and {folders[0]} has {base}: give adapters of one base")
    models = {folder: load_model(folder, "cpu", torch.float32) for folder in dict.fromkeys([base, *folders])}
    tokenizer = load_tokenizer(base)
    if tokenizer is None:
        fail(f"{base} has no tokenizer (a toy's tokens are numbers): give a model of names or of text")
    if tokenizer.pattern not in (WORDS, GPT2):
        fail(f"{base} has a tokenizer that the page cannot compute: it knows prepare.py's and plain ByteLevel ones")
    for folder, model in models.items():
        own = model.cfg.router != "grouped sigmoid" or model.cfg.stage_b not in ("paper", "causal")
        if own or model.cfg.int8:
            fail(f"{folder} is int8, or has a router or a Stage B of your own: the page's engine.js cannot compute it")
    of_names = "names" in judge_of(base)
    draws = not of_names  # the most probable text repeats itself

    # of an adapter the page has what was learned; the rest is the base's
    decoders = [decoder | dict(number=0) for decoder in decoders_of(models[base], False, draws)]
    tensors = []
    about_models = []
    for number, (folder, model) in enumerate(models.items()):
        about = about_adapter(folder)
        own = adapter_tensors(model) if about else model.state_dict()
        sizes = {name: tensor.numel() for name, tensor in own.items()}
        kind = {"lora_r": about.get("lora_r"), "stage_b": model.cfg.stage_b}
        about_models.append({"cfg": asdict(model.cfg), "sizes": sizes} | kind)
        tensors += own.values()
        if folder in folders and model.trained_b:
            decoders += [decoder | dict(number=number) for decoder in decoders_of(model, True, draws)]

    # the name of every code point, each on its own line, which is empty if it has none
    names = "\n".join(unicodedata.name(chr(code), "") for code in range(sys.maxunicode + 1))
    held_out = list(draw_names(BEGINNINGS, tokenizer).values()) if of_names else held_out_texts(base)
    return {
        "models": about_models,
        "weights": weights_data(tensors),
        "decoders": decoders[::-1],  # Stage B comes first
        "tokenizer": tokenizer_data(tokenizer, models[base].cfg.vocab_size),
        "names": packed(names.encode()) if of_names else None,
        "beginnings": held_out,
    }


def held_out_texts(base: Path) -> list[list[int]]:
    """The beginnings of held-out texts, spread evenly over the base's validation rows, if that folder is here."""
    named = setting_of_run(base, "data", str)
    data = Path(named) if named else None
    if data is None or not (data / "meta.json").exists():
        return []
    check_same_tokens(data, base)
    rows = Rows(data, "val", read_meta(data), seq_len=256, seed=0).rows
    places = torch.linspace(0, len(rows) - 1, min(BEGINNINGS, len(rows))).int().tolist()
    return [rows[i][: min(BEGINNING, math.ceil(len(rows[i]) / 3))].tolist() for i in places]


def page(folders: list[Path], beside: str = "") -> str:
    """The HTML of the page for a model's folder, or for adapters of one base. beside: the file of another page."""
    read = lambda name: (HERE / name).read_text(encoding="utf-8")  # noqa: E731
    html = read("playground.html").replace("@STYLE@", read("playground.css"))
    html = html.replace("@SCRIPT@", "\n".join(map(read, SCRIPTS)))
    html = html.replace("@BESIDE@", f' <a href="{beside}">The page of another model.</a>' if beside else "")

    # inside <script> a "<" could end the element, so it is written as an escape, which means the same in JSON
    return html.replace("@DATA@", json.dumps(page_data(folders)).replace("<", "\\u003c"))


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--ckpt", type=Path, nargs="+", help="a model's folder, or those of adapters of one base (default: the shipped "
        "ones of Shakespeare, and of names on a second page)")  # fmt: skip
    add("--out", type=Path, default=Path("playground.html"), help="the page to write")
    args = parser.parse_args()
    second = args.out.with_stem(args.out.stem + "_names")
    pages = [(args.out, args.ckpt, "")]
    if not args.ckpt:
        pages = [(args.out, TEXT, second.name), (second, NAMES, args.out.name)]
    for out, folders, beside in pages:
        # a slip of the hand would cost a model: only an earlier page is written again
        if out.exists() and not (out.is_file() and TITLE in out.read_bytes()):
            fail(f"--out {out} is there already, and is not an earlier page")
        html = page(folders, beside)
        replace_file(out, lambda path, html=html: path.write_text(html, encoding="utf-8"))
        print(f"wrote {printable(out)} ({len(html.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
