"""The model in a browser: one HTML page that completes what one types, and needs nothing but itself.

The page holds the weights, the tokenizer and an engine in JavaScript (tools/engine.js, which computes what model.py and
sample.generate_one do). It shows up to three decoders side by side on the same beginning: all tokens at once
(factorised), the same jointly (by a joint head, or by the paper's Stage B), and one token at a time, in the order in
which the model is best written (Config.order: the surest mask first, or the leftmost). A click on a mask
shows what both stages would write there, and what changes when another mask is written by hand. For a checkpoint of
names the page also says whether a name exists, and it completes a hundred held-out beginnings with each decoder, to
draw how many names exist against the forwards that they took.

It takes a checkpoint of train.py on names or on text with at most 20 million parameters, and an adapter of the paper's
kind (LoRA and markers) or a joint head.

    python -m tools.playground --ckpt assets/names --adapter assets/names/joint --out playground.html
    python -m tools.playground --ckpt out/names --out mine.html      # one's own: two decoders, three with a Stage B
"""

import base64
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import adapter_settings, load_model, load_tokenizer, read_tensors, weight_files
from evaluate import draw_names
from lib.data import exists
from lib.tokenizer import Tokenizer, unicodedata
from lib.util import Parser, fail, replace_file
from model import Model
from sample import Decoding, generate
from tools.trace_page import fill_template

HERE = Path(__file__).parent
MOST_PARAMETERS = 20_000_000
LONGEST_NAME = 32  # tokens that the page lets a model of names write
LONGEST_TEXT = 64  # ... and one of text
BEGINNINGS = 100  # held-out names to complete
TAU_M2T = 0.0  # the gate that the page opens with: every mask at once
VIEWER = "<!-- here the viewer of tools/trace_page.html stands: the steps, the runs side by side, the panel -->\n"

# What a joint head's adapter.json calls the module and its settings. Its tensors are joint_head.BLOCK.PART.
JOINT_HEAD = "beyond.joint_head"
HEAD_LAYERS = "head_layers"
TAU_KEEP = "tau_keep"


# ---------------------------------------------------------------------------------------------------------------------
# the model


def is_joint_head(adapter: str | None) -> bool:
    return adapter is not None and adapter_settings(adapter).get("extension") == JOINT_HEAD


def shipped(tensor: Tensor) -> Tensor:
    """A tensor in the dtype that it has in its file, if the page can read that one: bf16 or float32."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def collect_tensors(ckpt: str, adapter: str | None) -> dict[str, Tensor]:
    """Every tensor that decoding needs, by the model's names.

    LoRA acts everywhere, so it is added to its matrix, W + (alpha / r) B A, which then is float32.
    """
    tensors = {name: shipped(tensor) for name, tensor in read_tensors(weight_files(Path(ckpt)))}
    if adapter is None:
        return tensors
    settings = adapter_settings(adapter)
    added = dict(read_tensors([Path(adapter) / "adapter.safetensors"]))
    for name, tensor in added.items():
        if name.endswith("lora_A"):
            weight = name.replace("lora_A", "weight")
            delta = added[name.replace("lora_A", "lora_B")].float() @ tensor.float()
            tensors[weight] = tensors[weight].float() + settings["lora_alpha"] / settings["lora_r"] * delta
        elif not name.endswith("lora_B"):
            tensors[name] = shipped(tensor)
    return tensors


def check_page_can_run(ckpt: str, adapter: str | None, model: Model, tokenizer: Tokenizer | None) -> None:
    """Refuse in one line what the engine cannot compute, or what would be too slow or too large for a page."""
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > MOST_PARAMETERS:
        fail(f"{ckpt} has {parameters:,} parameters: a page takes at most {MOST_PARAMETERS:,}")
    if tokenizer is None:
        fail(f"{ckpt} has no tokenizer (a toy's tokens are numbers): a page needs a checkpoint of names or of text")
    if tokenizer.nfc or tokenizer.ids != list(range(len(tokenizer.ids))):
        fail(f"{ckpt} has a tokenizer that train.py did not make: the page's tokenizer reads train.py's alone")
    extension = adapter_settings(adapter).get("extension") if adapter else None
    if extension and not is_joint_head(adapter):
        fail(f"{adapter} is an adapter of {extension}: a page takes the paper's adapters and joint heads")


def decoders(model: Model, joint: bool) -> list[dict]:
    """The columns of the page: name and a line about it, the shape that stands for it, which stage writes the bundle,
    rounds, and whether it follows the gate (if not, it writes one token at a time)."""
    factorised = {
        "name": "factorised", "shape": "triangle", "stage": "A", "n_rounds": 0, "gated": True,
        "about": "Every mask that passes the gate in one forward, each with its own best token.",
    }  # fmt: skip
    joint_head = {
        "name": "joint head", "shape": "circle", "stage": "joint", "n_rounds": 1, "gated": True,
        "about": "The same masks, decided together by a small second look, which may refuse.",
    }  # fmt: skip
    stage_b = {
        "name": "Stage B", "shape": "circle", "stage": "B", "n_rounds": model.cfg.n_rounds, "gated": True,
        "about": "The same masks, marked, and the last n layers once more: the paper's way.",
    }  # fmt: skip
    one_at_a_time = {
        "name": "one at a time", "shape": "square", "stage": "A", "n_rounds": 0, "gated": False,
        "about": f"The {model.cfg.order} mask, then a new forward. Slow, and what the model can do.",
    }  # fmt: skip
    if joint:
        return [factorised, joint_head, one_at_a_time]
    if model.markers.any():
        return [factorised, stage_b, one_at_a_time]
    return [factorised, one_at_a_time]


def tokenizer_data(tokenizer: Tokenizer, vocab_size: int) -> dict:
    """What the page's tokenizer needs; bytes are written as the letters U+0000 to U+00FF."""
    letters = {token: tokenizer.token_bytes.get(token, b"").decode("latin-1") for token in range(vocab_size)}
    return {
        "bytes": list(letters.values()),
        "ranks": {letters[token]: token for token in tokenizer.ids},
        "special": tokenizer.special,
        "pieces": [tokenizer.piece(token) for token in range(vocab_size)],
    }


def tensor_data(tensor: Tensor) -> dict:
    """One tensor: its numbers in base64, two or four bytes each."""
    numbers = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "base64": base64.b64encode(numbers).decode()}


def model_data(ckpt: str, adapter: str | None, model: Model, tokenizer: Tokenizer) -> dict:
    """Everything that tools/engine.js reads: geometry, weights, tokenizer; and the decoders that they make possible."""
    tensors = collect_tensors(ckpt, adapter)
    head = adapter_settings(adapter) if is_joint_head(adapter) else {}
    return {
        "cfg": asdict(model.cfg),
        "tensors": {name: tensor_data(tensor) for name, tensor in tensors.items()},
        "n_joint": head.get(HEAD_LAYERS, 0),
        "tau_keep": head.get(TAU_KEEP),
        "partial_cost": model.partial_cost,
        "tokenizer": tokenizer_data(tokenizer, model.cfg.vocab_size),
        "decoders": decoders(model, is_joint_head(adapter)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# the names, for the judge and for the experiment


def hash_name(name: str, seed: int) -> int:
    """FNV-1a in 32 bits, as tools/playground.js has it."""
    for byte in name.encode():
        seed = ((seed ^ byte) * 16777619) % 2**32
    return seed


def seed_without_collision(names: list[str]) -> tuple[int, list[int]]:
    """The first seed at which no two names share a hash, and the hashes."""
    for seed in range(1, 1000):
        hashes = [hash_name(name, seed) for name in names]
        if len(set(hashes)) == len(names):
            return seed, hashes
    fail("no seed keeps the hashes of all names apart")


def names_data() -> dict:
    """All names of Python's unicodedata, in 32 bits each: a hash, in the order of their characters' numbers.

    runs: [first character, how many] of characters side by side. Names that end in their character's number need no
    hash: numbered holds [first, last, what stands before the number]. A text that is no name is taken for one with a
    probability of about one in a hundred thousand.
    """
    runs, numbered, named = [], [], []
    last = {"named": -2, "numbered": -2}
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        number = f"{code:04X}"
        if name.endswith(f"-{number}"):
            front = name.removesuffix(number)
            if last["numbered"] == code - 1 and numbered[-1][2] == front:
                numbered[-1][1] = code
            else:
                numbered.append([code, code, front])
            last["numbered"] = code
        elif name:
            named.append(name)
            if last["named"] == code - 1:
                runs[-1][1] += 1
            else:
                runs.append([code, 1])
            last["named"] = code
    seed, hashes = seed_without_collision(named)
    packed = b"".join(h.to_bytes(4, "little") for h in hashes)
    return {"seed": seed, "hashes": base64.b64encode(packed).decode(), "runs": runs, "numbered": numbered}


def telling_prompt(model: Model, tokenizer: Tokenizer, beginnings: list[list[int]], columns: list[dict]) -> str:
    """A beginning that shows the effect: factorised its name does not exist, and by the decoders beside it it does."""
    start = Decoding(gen_length=LONGEST_NAME, eos_early_stop=True, tau_t2t=None)
    names = []
    for column in columns:
        tau_m2t = TAU_M2T if column["gated"] else 1.0
        outputs = generate(model, beginnings, replace(start, n_rounds=column["n_rounds"], tau_m2t=tau_m2t))
        names.append([tokenizer.decode(ids + o.tokens) for ids, o in zip(beginnings, outputs, strict=True)])

    for ids, factorised, *others in zip(beginnings, *names, strict=True):
        if exists(factorised) is None and all(exists(name) for name in others):
            return tokenizer.decode(ids)
    return tokenizer.decode(beginnings[0])


# ---------------------------------------------------------------------------------------------------------------------
# the page


def page(ckpt: str, adapter: str | None, prompt: str | None = None) -> str:
    """The HTML for a checkpoint folder and, perhaps, an adapter's; it opens on this prompt, or on a telling one."""
    model = load_model(ckpt, "cpu", torch.float32, adapter)
    tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
    check_page_can_run(ckpt, adapter, model, tokenizer)
    data = model_data(ckpt, adapter, model, tokenizer)
    data |= {"names": None, "beginnings": [], "gen_length": LONGEST_TEXT, "tau_m2t": TAU_M2T}
    if (Path(ckpt) / "names.json").exists():
        beginnings = list(draw_names(BEGINNINGS, "held out", tokenizer).values())
        data |= {"names": names_data(), "beginnings": beginnings, "gen_length": LONGEST_NAME}
        prompt = prompt or telling_prompt(model, tokenizer, beginnings, data["decoders"])
    data["prompt"] = prompt or "import "

    above, below = (HERE / "playground.html").read_text(encoding="utf-8").split(VIEWER)
    style = (HERE / "playground.css").read_text(encoding="utf-8")
    scripts = [(HERE / name).read_text(encoding="utf-8") for name in ("engine.js", "playground.js")]
    return fill_template(data, style=style, above=above, below=below, script="\n".join(scripts))


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("playground")
    group.add_argument("--ckpt", default="assets/names", help="a checkpoint of train.py, on names or on text")
    group.add_argument("--adapter", help="an adapter of it: LoRA and markers, or a joint head")
    group.add_argument("--prompt", help="the beginning that the page opens on (default: one that shows the effect)")
    group.add_argument("--out", default="playground.html", help="the page to write")
    args = parser.parse_args()
    html = page(args.ckpt, args.adapter, args.prompt)
    replace_file(Path(args.out), lambda path: path.write_text(html, encoding="utf-8"))
    print(f"wrote {args.out} ({len(html.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
