"""The model in a browser: one HTML page that completes what one types, and needs nothing but itself.

The page holds the weights, the tokenizer and an engine in JavaScript (tools/engine.js, which computes what model.py and
sample.generate_one do), and shows up to three decoders side by side on the same beginning: one token at a time, every
likely token at once (factorised), and jointly, by a joint head or by the paper's Stage B. A click on a mask shows what
both stages would write there. For a checkpoint of names it also says whether the name exists, and completes a hundred
held-out beginnings with each decoder to draw the names that exist against the forwards.

It takes a checkpoint of train.py on names or on text with at most 20 million parameters, and an adapter of the paper's
kind (LoRA and markers) or a joint head.

    python -m tools.playground --ckpt assets/names --adapter assets/names/joint --out playground.html
    python -m tools.playground --ckpt out/names --out mine.html      # one's own: two decoders, three with a Stage B
"""

import base64
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from checkpoint import adapter_settings, load_model, load_tokenizer, read_tensors, weight_files
from data import Parser, Tokenizer, fail, replace_file, unicodedata
from evaluate import draw_names
from model import Model
from tools.trace_page import fill_template

HERE = Path(__file__).parent
MOST_PARAMETERS = 20_000_000
LONGEST_NAME, LONGEST_TEXT = 32, 64  # tokens that the page lets a model write

# How a joint head's adapter names itself (adapter.json's "extension"), its tensors, and its setting: here alone.
JOINT_HEADS = ("beyond.own_blocks", "beyond.joint_head")
JOINT_TENSORS = ("own.", "joint_head.")
TAU_KEEP = "tau_keep"


# ---------------------------------------------------------------------------------------------------------------------
# the model


def shipped(tensor: Tensor) -> Tensor:
    """A tensor in the dtype that it has in its file, if the page can read that one: bf16 or float32."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def collect_tensors(ckpt: str, adapter: str | None) -> dict[str, Tensor]:
    """Every tensor that decoding needs, by model.py's names; a joint head's blocks are joint_head.0, joint_head.1, ...

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
        elif name.startswith(JOINT_TENSORS):
            _, rest = name.split(".", 1)
            tensors[f"joint_head.{rest}"] = shipped(tensor)
        elif "lora_" not in name:
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
    if extension and extension not in JOINT_HEADS:
        fail(f"{adapter} is an adapter of {extension}: a page takes the paper's adapters and joint heads")


def decoders(model: Model, joint: bool) -> list[dict]:
    """The columns of the page: name, one line about it, which stage writes, rounds, and whether it follows the gate."""
    columns = [
        {
            "name": "one at a time", "stage": "A", "n_rounds": 0, "gated": False,
            "about": "The surest token alone, then a new forward: slow, and what the model can do.",
        },
        {
            "name": "factorised", "stage": "A", "n_rounds": 0, "gated": True,
            "about": "All likely masks in one forward, each with its own best token, none knowing the others.",
        },
    ]  # fmt: skip
    if joint:
        columns.append({
            "name": "joint head", "stage": "joint", "n_rounds": 1, "gated": True,
            "about": "The same masks, then a small second look that decides them together and may leave some masked.",
        })  # fmt: skip
    elif model.markers.any():
        columns.append({
            "name": "Stage B", "stage": "B", "n_rounds": model.cfg.n_rounds, "gated": True,
            "about": "The same masks, marked, then the last n layers once more: the paper's way.",
        })  # fmt: skip
    return columns


def tokenizer_data(tokenizer: Tokenizer, vocab_size: int) -> dict:
    """What the page's tokenizer needs; bytes are written as the letters U+0000 to U+00FF."""
    letters = {token: tokenizer.token_bytes.get(token, b"").decode("latin-1") for token in range(vocab_size)}
    return {
        "bytes": list(letters.values()),
        "ranks": {letters[token]: rank for rank, token in enumerate(tokenizer.ids)},
        "ids": tokenizer.ids,
        "special": tokenizer.special,
        "pieces": [tokenizer.piece(token) for token in range(vocab_size)],
    }


def model_data(ckpt: str, adapter: str | None) -> dict:
    """Everything that tools/engine.js reads: geometry, weights, tokenizer; and the decoders that they make possible."""
    model = load_model(ckpt, "cpu", torch.float32, adapter)
    tokenizer = load_tokenizer(Path(ckpt), model.cfg.tokenizer)
    check_page_can_run(ckpt, adapter, model, tokenizer)
    tensors = collect_tensors(ckpt, adapter)
    joint_blocks = {name.split(".")[1] for name in tensors if name.startswith("joint_head.")}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return {
        "cfg": asdict(model.cfg),
        "weights": base64.b64encode(save(contiguous)).decode(),
        "n_joint": len(joint_blocks),
        "tau_keep": getattr(model, TAU_KEEP, None),
        "tokenizer": tokenizer_data(tokenizer, model.cfg.vocab_size),
        "decoders": decoders(model, bool(joint_blocks)),
    }
