"""The model in a browser: one HTML page that completes what a user types, and needs no other file and no server.

The page has the weights, the tokenizer and an engine in JavaScript (tools/engine.js, which computes what model.py and
sample.generate do). It shows several decoders on the same beginning, step by step. A click on a mask shows what Stage A
and Stage B would write there, and lets the user write a token. For names the page also says whether a name exists, and
counts how many of a hundred held-out beginnings a decoder completes to a name. A model of plain text draws every token.

    python -m tools.playground                                         # the shipped base and its two adapters
    python -m tools.playground --ckpt out/names --out out/mine.html    # your own, or several adapters of one base
"""

import base64
import json
import math
import re
import sys
import unicodedata
import zlib
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import about_adapter, base_of, check_same_tokens, judge_of, load_model, read_config
from lib.names import draw_names
from lib.rows import Rows, read_meta
from lib.run import setting_of_run
from lib.tokenizer import GPT2, WORDS, Tokenizer, load_tokenizer
from lib.util import Parser, command, fail, printable, replace_file
from model import Model
from tools.watch import piece

HERE = Path(__file__).parent
SCRIPTS = ("engine.js", "viewer.js", "playground.js")
SHIPPED = [Path("assets/names/paper"), Path("assets/names/causal")]
TITLE = b"<title>Words that are written together should agree</title>"
BEGINNINGS = 100  # held-out names to complete, or held-out texts to continue
BEGINNING = 56  # the most tokens of such a text that are given

# the gates when the page opens. Plain text is drawn, in whole blocks, without edits, which would draw tokens again
GATES = dict(tau_m2t=0.7, tau_t2t=0.0, tau_run=0.5, temperature=0.0)
GATES_OF_TEXT = GATES | dict(tau_t2t=1.0, tau_run=0.0, temperature=1.0)

# the decoders, by the fields of decoding.Decoding. A gate is a number, or the name of the slider that sets it; with
# in_table the page's table counts it
BY_GATES = dict(
    n_rounds=0, select="confidence", tau_m2t="tau_m2t", tau_t2t="tau_t2t", temperature="temperature", in_table=True
)  # fmt: skip
BY_RUNS = BY_GATES | dict(select="left", tau_m2t="tau_run", tau_t2t=None)
ONE_AT_A_TIME = BY_RUNS | dict(
    name="base, one at a time", tau_m2t=1.0, about="The leftmost mask; then the model reads again.",
)  # fmt: skip
RUN = "From the left, while the joint probability is above tau_run."
GATED = "All masks above tau_m2t, each by itself; edits above 0.5."
OF_BASE = [
    ONE_AT_A_TIME,
    BY_RUNS | dict(name="base, longest run", about=RUN),
    BY_GATES | dict(name="base, edits gated", tau_t2t=0.5, in_table=False, about=GATED),
]
OF_DRAWN_BASE = [
    BY_RUNS | dict(name="base, all at once", tau_m2t=0.0, about="A whole block, each mask by itself."),
    ONE_AT_A_TIME,
]
OFF = "All masks above tau_m2t, each by itself, by its Stage A alone."
ON = "The same masks are marked, and read once more by Stage B."
ON_DRAWN = "The masks above tau_m2t are marked, and read once more by Stage B. Drawn here; sample.py is greedy."
CAUSAL = "Stage A drafts (A); a pass (1, 2 ...) of Stage B reads the drafts on the left; ✓ is final."


def with_stage_b(model: Model, draws: bool) -> list[dict]:
    """The decoders that the page shows for a model with a Stage B; if it was not trained there are none."""
    if not model.trained_b:
        return []
    on = dict(n_rounds=model.cfg.n_rounds)
    if model.cfg.stage_b == "causal":
        return [BY_RUNS | on | dict(name="causal Stage B", about=CAUSAL)]
    if draws:
        return [BY_GATES | on | dict(name="paper, Stage B", about=ON_DRAWN)]
    off = BY_GATES | dict(name="paper, Stage B off", about=OFF)
    return [off, off | on | dict(name="paper, Stage B on", about=ON)]


# --- what the page holds
def half(model: Model) -> Model:
    """Round the model's parameters to bfloat16, as they are in the page. The experts' biases are not rounded."""
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    return model


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def weights_data(tensors: list[Tensor]) -> str:
    """All numbers end to end as float32: first the lowest byte of every number, then the next byte of every number, and
    so on. The two lower bytes of a bfloat16 number are zero, and take no space when they are packed."""
    numbers = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
    return packed(numbers.view(torch.uint8).view(-1, 4).T.contiguous().numpy().tobytes())


def names_data() -> str:
    """The name of every code point, each on its own line, which is empty if it has none."""
    return packed("\n".join(unicodedata.name(chr(code), "") for code in range(sys.maxunicode + 1)).encode())


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
    models = {folder: half(load_model(folder, "cpu", torch.float32)) for folder in dict.fromkeys([base, *folders])}
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
    decoders = [decoder | dict(number=0) for decoder in (OF_DRAWN_BASE if draws else OF_BASE)]
    tensors = []
    about_models = []
    for number, (folder, model) in enumerate(models.items()):
        about = about_adapter(folder)
        own = model.learned() if about else model.state_dict()
        sizes = {name: tensor.numel() for name, tensor in own.items()}
        kind = {"lora_r": about.get("lora_r"), "stage_b": model.cfg.stage_b}
        about_models.append({"cfg": asdict(model.cfg), "sizes": sizes} | kind)
        tensors += own.values()
        if folder in folders:
            decoders += [decoder | dict(number=number) for decoder in with_stage_b(model, draws)]

    held_out = list(draw_names(BEGINNINGS, "held out", tokenizer).values()) if of_names else held_out_texts(base)
    return {
        "models": about_models,
        "weights": weights_data(tensors),
        "decoders": decoders,
        "gates": GATES_OF_TEXT if draws else GATES,
        "tokenizer": tokenizer_data(tokenizer, models[base].cfg.vocab_size),
        "gen_length": 32 if of_names else 64,
        "names": names_data() if of_names else None,
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


def page(folders: list[Path]) -> str:
    """The HTML of the page for a model's folder, or for adapters of one base."""
    read = lambda name: (HERE / name).read_text(encoding="utf-8")  # noqa: E731
    html = read("playground.html").replace("@STYLE@", read("playground.css"))
    html = html.replace("@SCRIPT@", "\n".join(map(read, SCRIPTS)))

    # inside <script> a "<" could end the element, so it is written as an escape, which means the same in JSON
    return html.replace("@DATA@", json.dumps(page_data(folders)).replace("<", "\\u003c"))


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--ckpt", type=Path, nargs="+", default=SHIPPED, help="a model's folder, or those of adapters of one base")
    add("--out", type=Path, default=Path("playground.html"), help="the page to write")
    args = parser.parse_args()
    # a slip of the hand would cost a model: only an earlier page is written again
    if args.out.exists() and not (args.out.is_file() and TITLE in args.out.read_bytes()):
        fail(f"--out {args.out} is there already, and is not an earlier page")
    html = page(args.ckpt)
    replace_file(args.out, lambda path: path.write_text(html, encoding="utf-8"))
    print(f"wrote {printable(args.out)} ({len(html.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
