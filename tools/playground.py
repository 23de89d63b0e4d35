"""The model in a browser: one HTML page that completes what one types, and needs nothing but itself.

The page holds the weights, the tokenizer and an engine in JavaScript (tools/engine.js, which computes what
model.py and sample.generate_one do). It shows several decoders side by side on the same beginning: all
masks at once, each by itself (factorised); the same masks by Stage B, a column for each adapter; and one
token at a time. A click on a mask shows what Stage A and Stage B would write there, and writes a token by
hand. For names the page also says whether a name exists, and counts how many of a hundred held-out
beginnings each decoder completes to one, and the forwards that it took.

    python -m tools.playground                                  # the shipped base and its two adapters
    python -m tools.playground --ckpt out/names --out mine.html # one's own; several adapters of one base: a column each
"""

import base64
import json
import sys
import unicodedata
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import about_adapter, base_of, load_model, load_tokenizer, names_of, next_base, read_tensors
from evaluate import draw_names
from lib.tokenizer import Tokenizer
from lib.util import Parser, command, fail, replace_file
from model import Model

HERE = Path(__file__).parent
SCRIPTS = ("engine.js", "viewer.js", "playground.js")
SHIPPED = [Path("assets/names/paper"), Path("assets/names/alpha")]
BEGINNINGS = 100  # held-out names to complete

# what the page completes first, and how many tokens it lets a model write
OF_NAMES = dict(prompt="CANADIAN", gen_length=32)
OF_TEXT = dict(prompt="import ", gen_length=64)

# --- the decoders, side by side
FACTORISED = dict(
    name="factorised", adapters=[], n_rounds=0, leftmost=False, tau_t2t=0.5,
    about="Every mask that is sure enough gets its own best token, all at once.",
)  # fmt: skip
ONE_AT_A_TIME = dict(
    name="one at a time", adapters=[], n_rounds=0, leftmost=True, tau_t2t=None,
    about="The leftmost mask, and then the model reads again: slow, but each token sees all before it.",
)  # fmt: skip
PAPERS = "The same masks, after they were marked and read once more; trained as in the paper."
ALPHAS = "The same, trained to get all that is marked right together (alpha {:g})."


def decoders(folders: list[Path]) -> list[dict]:
    """What the page shows: the base's two, and between them Stage B by each folder that has one.

    adapters: what lies on the base, the lowest first. leftmost: it writes the leftmost mask of all, whatever
    the gates.
    """
    found = []
    for folder in folders:
        model = load_model(folder, "cpu", torch.float32)
        if not model.markers.any():
            continue
        alpha = model.adapter.get("alpha", 0.0)
        name = f"Stage B, alpha {alpha:g}" if alpha else "Stage B, the paper's"
        about = ALPHAS.format(alpha) if alpha else PAPERS
        own = dict(name=name, about=about, adapters=adapters_data(folder), n_rounds=model.cfg.n_rounds)
        found.append(FACTORISED | own)
    return [FACTORISED, *found, ONE_AT_A_TIME]


# --- what the page holds
def tensors_data(tensors: dict[str, Tensor]) -> dict[str, dict]:
    """Their numbers in base64, four bytes each, or two where bfloat16 holds them exactly."""
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if torch.equal(tensor.bfloat16().float(), tensor):
            tensor = tensor.bfloat16()
        numbers = tensor.view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = {"dtype": dtype, "base64": base64.b64encode(numbers).decode()}
    return found


def adapters_data(folder: Path) -> list[dict]:
    """LoRA and markers as they are, of a folder and of what it lies on; of a base none."""
    about = about_adapter(folder)
    if not about:
        return []
    lora = {name: about[name] for name in ("lora_r", "lora_in")}
    tensors = tensors_data(dict(read_tensors([folder / "adapter.safetensors"])))
    return [*adapters_data(next_base(folder)), about["model"] | lora | {"tensors": tensors}]


def tokenizer_data(tokenizer: Tokenizer, vocab_size: int) -> dict:
    """What the page's tokenizer needs; bytes are written as the letters U+0000 to U+00FF."""
    letters = {token: tokenizer.token_bytes.get(token, b"").decode("latin-1") for token in range(vocab_size)}
    return {
        "bytes": list(letters.values()),
        "ranks": {letters[token]: token for token in tokenizer.ids},
        "special": tokenizer.special,
        "pieces": [tokenizer.piece(token) for token in range(vocab_size)],
    }


# --- the page
def page_data(folders: list[Path]) -> dict:
    """Everything that the page reads: geometry, weights, tokenizer, decoders and, of a model of names, all names."""
    base = base_of(folders[0])
    for folder in folders:
        if base_of(folder).resolve() != base.resolve():
            fail(f"{folder} stands on {base_of(folder)}, {folders[0]} on {base}: a page has one base")
    model = load_model(base, "cpu", torch.float32)
    tokenizer = load_tokenizer(base, model.cfg.tokenizer)
    check_page_can_run(base, model, tokenizer)

    data = {
        "cfg": asdict(model.cfg),
        "tensors": tensors_data(model.state_dict()),
        "decoders": decoders(folders),
        "tokenizer": tokenizer_data(tokenizer, model.cfg.vocab_size),
    }
    if names_of(base) is None:
        return data | OF_TEXT | {"names": None, "beginnings": []}

    # every name that Python knows, for the judge
    codes = {unicodedata.name(chr(code), ""): code for code in range(sys.maxunicode + 1)}
    del codes[""]  # what has no name
    beginnings = draw_names(BEGINNINGS, "held out", tokenizer)
    return data | OF_NAMES | {"names": codes, "beginnings": list(beginnings.values())}


def check_page_can_run(base: Path, model: Model, tokenizer: Tokenizer | None) -> None:
    """Refuse in one line what the page's engine cannot compute."""
    if tokenizer is None:
        fail(f"{base} has no tokenizer (a toy's tokens are numbers): a page needs a checkpoint of names or of text")
    if tokenizer.nfc or tokenizer.ids != list(range(len(tokenizer.ids))):
        fail(f"{base} has a tokenizer that train.py did not make: the page's tokenizer reads train.py's alone")
    if any(tensor.dtype == torch.int8 for tensor in model.state_dict().values()):
        fail(f"{base} has int8 weights: a page needs the model that they were made of")


def page(folders: list[Path]) -> str:
    """The HTML for a model's folder, or for adapters of one base."""
    read = lambda name: (HERE / name).read_text(encoding="utf-8")  # noqa: E731
    html = read("playground.html").replace("@STYLE@", read("playground.css"))
    html = html.replace("@SCRIPT@", "\n".join(map(read, SCRIPTS)))

    # inside <script>, "<" could end the element; as an escape it is the same JSON
    return html.replace("@DATA@", json.dumps(page_data(folders)).replace("<", "\\u003c"))


@command
def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument_group("playground").add_argument
    add("--ckpt", type=Path, nargs="+", default=SHIPPED, help="a model of train.py, or adapters of one base")
    add("--out", type=Path, default=Path("playground.html"), help="the page to write")
    args = parser.parse_args()
    html = page(args.ckpt)
    replace_file(args.out, lambda path: path.write_text(html, encoding="utf-8"))
    print(f"wrote {args.out} ({len(html.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
