"""The model in a browser: one HTML page that completes what one types, and needs nothing but itself.

The page holds the weights, the tokenizer and an engine in JavaScript (tools/engine.js, which computes what model.py and
sample.generate_one do). It shows up to three decoders side by side on the same beginning: all tokens at once
(factorised), the same jointly (by the head, or by the paper's Stage B), and one token at a time. A click on a mask
shows what both stages would write there, and writes a token by hand; on a token that the head wrote, its draft and
what each look made of it. For a checkpoint of names the page also says whether a name exists, and counts how many of a
hundred held-out beginnings each decoder completes to one, and the forwards that it took.

It shows what `sample.py --json` wrote, too: choose the files at the bottom of the page, of any model.

It takes a small model of train.py, of names or of text: alone, or with an adapter of the paper's kind (LoRA and
markers) or a head (beyond/head.py).

    python -m tools.playground                                       # the shipped head
    python -m tools.playground --ckpt out/names --out mine.html      # one's own: two decoders, three with a Stage B
"""

import base64
import json
import sys
import unicodedata
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import about_adapter, decoding_defaults, load_model, load_tokenizer, names_of
from evaluate import draw_names
from lib.tokenizer import Tokenizer
from lib.util import Parser, command, fail, replace_file
from model import Model

HERE = Path(__file__).parent
LONGEST_NAME = 32  # tokens that the page lets a model of names write
LONGEST_TEXT = 64  # ... and one of text
BEGINNINGS = 100  # held-out names to complete
ABOUT = {
    "factorised": "Every mask that passes the gate in one forward, each with its own best token.",
    "head": "The same masks, each after the token before it, in looks until nothing changes; it may refuse.",
    "Stage B": "The same masks, marked, and the last n layers once more: the paper's way.",
    "one at a time": "One mask, then a new forward. Slow, and what the model can do.",
}
SCRIPTS = ("engine.js", "viewer.js", "playground.js")


# --- the model
def check_page_can_run(folder: Path, model: Model, tokenizer: Tokenizer | None, about: dict) -> None:
    """Refuse in one line what the engine cannot compute."""
    if tokenizer is None:
        fail(f"{folder} has no tokenizer (a toy's tokens are numbers): a page needs a checkpoint of names or of text")
    if tokenizer.nfc or tokenizer.ids != list(range(len(tokenizer.ids))):
        fail(f"{folder} has a tokenizer that train.py did not make: the page's tokenizer reads train.py's alone")
    other_head = model.second_look is not None and about["head"]["module"] != "beyond.head"
    if other_head or model.lora_in_stage_b_alone:
        fail(f"{folder} is an adapter of another kind: a page takes the paper's adapters and beyond.head's")


def collect_tensors(model: Model, about: dict) -> dict[str, Tensor]:
    """Every tensor that decoding needs. LoRA acts everywhere, so it is added to its matrix: W + (alpha / r) B A."""
    tensors = model.state_dict()
    for name in list(tensors):
        if name.endswith("lora_A"):
            delta = tensors.pop(name.replace("lora_A", "lora_B")) @ tensors.pop(name)
            weight = name.replace("lora_A", "weight")
            tensors[weight] = tensors[weight] + about["lora_alpha"] / about["lora_r"] * delta
    return tensors


def tensor_data(tensor: Tensor) -> dict:
    """One tensor: its numbers in base64, four bytes each, or two where bfloat16 holds them exactly."""
    if torch.equal(tensor.bfloat16().float(), tensor):
        tensor = tensor.bfloat16()
    numbers = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "base64": base64.b64encode(numbers).decode()}


def decoders(model: Model) -> list[dict]:
    """What the page shows side by side: which stage writes the bundle, its rounds, and whether it follows the gate (if
    not, it writes one token at a time)."""
    found = [dict(name="factorised", stage="A", n_rounds=0, gated=True)]
    if model.second_look is not None:
        found.append(dict(name="head", stage="head", n_rounds=1, gated=True))
    elif model.markers.any():
        found.append(dict(name="Stage B", stage="B", n_rounds=model.cfg.n_rounds, gated=True))
    found.append(dict(name="one at a time", stage="A", n_rounds=0, gated=False))
    return [column | {"about": ABOUT[column["name"]]} for column in found]


def tokenizer_data(tokenizer: Tokenizer, vocab_size: int) -> dict:
    """What the page's tokenizer needs; bytes are written as the letters U+0000 to U+00FF."""
    letters = {token: tokenizer.token_bytes.get(token, b"").decode("latin-1") for token in range(vocab_size)}
    return {
        "bytes": list(letters.values()),
        "ranks": {letters[token]: token for token in tokenizer.ids},
        "special": tokenizer.special,
        "pieces": [tokenizer.piece(token) for token in range(vocab_size)],
    }


def names_data() -> dict:
    """All names of Python's unicodedata, for the page's judge.

    codes: name -> its character. Names that end in their character's number are in numbered: [first, last, what stands
    before the number].
    """
    codes = {}
    numbered = []
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        front = name.removesuffix(f"{code:04X}")
        if not name.endswith(f"-{code:04X}"):
            codes[name] = code
        elif numbered and numbered[-1][1:] == [code - 1, front]:
            numbered[-1][1] = code
        else:
            numbered.append([code, code, front])
    del codes[""]  # what has no name
    return {"codes": codes, "numbered": numbered}


# --- the page
def page_data(ckpt: str) -> dict:
    """Everything that the page reads: geometry, weights, tokenizer, decoders and, of a model of names, all names."""
    folder = Path(ckpt)
    model = load_model(folder, "cpu", torch.float32)
    tokenizer = load_tokenizer(folder, model.cfg.tokenizer)
    about = about_adapter(folder)
    check_page_can_run(folder, model, tokenizer, about)
    data = {
        "cfg": asdict(model.cfg),
        "tensors": {name: tensor_data(tensor) for name, tensor in collect_tensors(model, about).items()},
        "partial_cost": model.partial_cost,
        "tokenizer": tokenizer_data(tokenizer, model.cfg.vocab_size),
        "decoders": decoders(model),
        "tau_keep": decoding_defaults(folder).get("tau_keep", 0.0),
    }
    if names_of(folder) is None:
        return data | {"names": None, "beginnings": [], "gen_length": LONGEST_TEXT, "prompt": "import "}
    beginnings = list(draw_names(BEGINNINGS, "held out", tokenizer).values())
    names = {"names": names_data(), "beginnings": beginnings, "gen_length": LONGEST_NAME}
    return data | names | {"prompt": "CANADIAN"}


def page(ckpt: str) -> str:
    """The HTML for a model's folder or an adapter's."""
    read = lambda name: (HERE / name).read_text(encoding="utf-8")  # noqa: E731
    html = read("playground.html").replace("@STYLE@", read("playground.css"))
    html = html.replace("@SCRIPT@", "\n".join(map(read, SCRIPTS)))

    # inside <script>, "<" could end the element; as an escape it is the same JSON
    return html.replace("@DATA@", json.dumps(page_data(ckpt)).replace("<", "\\u003c"))


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("playground").add_argument
    add("--ckpt", default="assets/names/head", help="a model of train.py, on names or on text, or an adapter of one")
    add("--out", default="playground.html", help="the page to write")
    args = parser.parse_args()
    html = page(args.ckpt)
    replace_file(Path(args.out), lambda path: path.write_text(html, encoding="utf-8"))
    print(f"wrote {args.out} ({len(html.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
