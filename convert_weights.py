"""Released LLaDA2.x checkpoints -> our layout. This is the one file that knows the released names.

    # config.json, shards, index and tokenizer.json -> the folder that every script loads; 32.5 GB for 2.1-mini
    python convert_weights.py --src LLaDA2.1-mini/ --out weights/llada2.1-mini

Our tensors are released tensors laid end to end (see NAMES), so nothing is computed, except that a
bfloat16 `expert_bias` (LLaDA2.0's) becomes float32. Tensors are read one at a time. The way back,
and adapters to PEFT: released/export.py.

`config.json` is written last: a folder without one is incomplete, and running the same command
again completes it.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from checkpoint import check_fit, stored, weight_files
from lib.config import Config
from lib.tokenizer import EOS, MASK, bpe_tokenizer
from lib.util import Parser, command, fail, read_json, reading, replace_file, write_json
from model import Model

# C channels (n_embd), E experts, F expert width

# Released name -> ours; {i} is a layer, {e} an expert. Where several released tensors have one name
# here, ours is all of them laid end to end in memory: expert by expert, and within an expert in the
# order of this table. So the experts' gate_proj (F, C) and up_proj (F, C) become gate_up (E, 2F,
# C), and down_proj (C, F) becomes down (E, C, F).
NAMES = {
    "model.word_embeddings.weight": "wte.weight",
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.norm_1.weight",
    "model.layers.{i}.attention.query_key_value.weight": "layers.{i}.attn.qkv.weight",
    "model.layers.{i}.attention.query_key_value.bias": "layers.{i}.attn.qkv.bias",
    "model.layers.{i}.attention.query_layernorm.weight": "layers.{i}.attn.q_norm.weight",
    "model.layers.{i}.attention.key_layernorm.weight": "layers.{i}.attn.k_norm.weight",
    "model.layers.{i}.attention.dense.weight": "layers.{i}.attn.proj.weight",
    "model.layers.{i}.attention.dense.bias": "layers.{i}.attn.proj.bias",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.norm_2.weight",
    "model.layers.{i}.mlp.gate_proj.weight": "layers.{i}.mlp.gate_up.weight",
    "model.layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.gate_up.weight",
    "model.layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.down.weight",
    "model.layers.{i}.mlp.gate.weight": "layers.{i}.mlp.router",
    "model.layers.{i}.mlp.gate.expert_bias": "layers.{i}.mlp.expert_bias",
    "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "layers.{i}.mlp.gate_up",
    "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "layers.{i}.mlp.gate_up",
    "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "layers.{i}.mlp.down",
    "model.layers.{i}.mlp.shared_experts.gate_proj.weight": "layers.{i}.mlp.shared.gate_up.weight",
    "model.layers.{i}.mlp.shared_experts.up_proj.weight": "layers.{i}.mlp.shared.gate_up.weight",
    "model.layers.{i}.mlp.shared_experts.down_proj.weight": "layers.{i}.mlp.shared.down.weight",
    "model.norm.weight": "norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}

# Released config field -> ours. All must be there: the released class has other defaults than the
# releases.
FIELDS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "intermediate_size": "d_dense",
    "moe_intermediate_size": "d_expert",
    "num_experts": "n_expert",
    "num_experts_per_tok": "n_active",
    "n_group": "n_group",
    "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling",
    "first_k_dense_replace": "n_dense",
    "num_shared_experts": "n_shared",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_len",
    "use_qkv_bias": "qkv_bias",
    "use_bias": "proj_bias",
    "tie_word_embeddings": "tied",
}
ROTARY = ("partial_rotary_factor", "rotary_dim")  # one of them, or both if they agree

# fmt: off
# What the model implements. Any other value is refused; absent means this value (except
# model_type).
MUST_BE = {
    "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"],
    "hidden_act": "silu", "use_rmsnorm": True, "use_qk_norm": True, "using_split_qkv_in_self_attention": False,
    "rope_scaling": None, "use_sliding_window": False,
    "score_function": "sigmoid", "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "norm_topk_prob": True,
    "norm_head": False, "norm_softmax": False,
    "attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0,
}
# What changes nothing at inference. Ids come from the tokenizer; a different eos or mask here is
# refused.
IGNORED = {
    "_name_or_path", "transformers_version", "auto_map", "dtype", "torch_dtype", "initializer_range", "use_cache",
    "sliding_window", "max_window_layers",  # read only under use_sliding_window
    "output_router_logits", "pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id",
}
# fmt: on
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TEXT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
INDEX = "model.safetensors.index.json"


# ----------------------------------------------------------------------------------------------------------------
# tensors: which released ones make which of ours


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file."""

    file: Path
    name: str
    dtype: str  # a key of DTYPES
    shape: list[int]


@dataclass
class Target:
    """A tensor to write: stored ones end to end, as `dtype`."""

    dtype: str
    shape: list[int]
    pieces: list[Stored]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def parts(self) -> Iterator[Tensor]:
        """Its pieces one after the other, in memory one at a time."""
        # neighbours in one file are read while it is open
        for path, pieces in groupby(self.pieces, key=lambda piece: piece.file):
            with reading(path, "safetensors file"), safe_open(path, "pt") as file:
                for piece in pieces:
                    yield file.get_tensor(piece.name).to(DTYPES[self.dtype])


Shards = list[dict[str, Target]]  # the tensors of each output file
Files = dict[str, Callable[[Path], None]]  # file name -> what writes it, in the order of writing


def survey(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        with reading(path, "safetensors file"), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no dict)
                part = file.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in DTYPES:
                    fail(f"{path}: {name} is stored as {dtype}: quantised weights are not read")
                if name in found:
                    fail(f"{path}: {name} is also in {found[name].file.name}: copy the folder again")
                found[name] = Stored(path, name, dtype, part.get_shape())
    return found


def released_names(name: str, layer: int | None, n_expert: int) -> list[str]:
    """The released tensors that one of ours is made of, in their order in memory."""
    # NAMES knows layers and experts by {i} and {e}
    template = re.sub(r"^layers\.\d+", "layers.{i}", name)
    patterns = [released for released, ours in NAMES.items() if ours == template]
    if "{e}" in patterns[0]:
        return [pattern.format(i=layer, e=e) for e in range(n_expert) for pattern in patterns]
    return [pattern.format(i=layer) for pattern in patterns]


def plan(cfg: Config) -> Iterator[tuple[int, str, list[int], list[str], list[int]]]:
    """Our tensors, each once: (shard, our name, its shape, the released names in it in order, the
    shape of each).

    There is one shard for the embedding, one for every layer, and one for the final norm and the
    head.
    """
    with torch.device("meta"):
        ours = stored(Model(cfg))
    del ours["markers"]  # a released checkpoint has none

    for name, tensor in ours.items():
        match = re.match(r"layers\.(\d+)\.", name)
        layer = None
        if match:
            layer = int(match[1])
            shard = 1 + layer
        elif name == "wte.weight":
            shard = 0
        else:
            shard = 1 + cfg.n_layer

        # several released tensors are equal parts of ours, cut along its rows
        shape = list(tensor.shape)
        names = released_names(name, layer, cfg.n_expert)
        part = shape
        if len(names) > 1:
            part = [math.prod(shape[:-1]) // len(names), shape[-1]]
        yield shard, name, shape, names, part


def to_ours(found: dict[str, Stored], cfg: Config, folder: Path) -> Shards:
    """Our tensors from released ones: all of them, and no others."""
    expected = {}
    for *_, names, part in plan(cfg):
        for name in names:
            expected[name] = torch.empty(part, device="meta")
    hint = "the checkpoint is incomplete, or another framework's"
    check_fit(folder, found, expected, hint, {"lm_head.weight": "tied to the embedding"})

    shards: Shards = [{} for _ in range(cfg.n_layer + 2)]
    for shard, name, shape, names, _ in plan(cfg):
        pieces = [found[released] for released in names]
        first = pieces[0]
        for piece in pieces:
            if piece.dtype != first.dtype:
                fail(f"{piece.file}: {piece.name} is {piece.dtype}, but {first.name} is {first.dtype}")

        # which experts are chosen hangs on small differences, so the router's bias is float32
        dtype = "F32" if name.endswith("expert_bias") else first.dtype
        shards[shard][name] = Target(dtype, shape, pieces)
    return shards


# ----------------------------------------------------------------------------------------------------------------
# config.json


def our_config(raw: dict, path: Path, eos_id: int, mask_id: int) -> Config:
    """Our Config from a released config.json; every field of it is used, checked or in IGNORED."""
    for name, value in MUST_BE.items():
        given = name in raw or name == "model_type"
        if given and raw.get(name) != value:
            fail(f"{path}: {name} = {raw.get(name)!r} is not implemented, only {value!r} is")

    known = {*MUST_BE, *FIELDS, *ROTARY, *IGNORED}
    for name in sorted(raw.keys() - known):
        fail(f"{path}: unknown field {name} = {raw[name]!r}: it may change the model, so it is not ignored")

    # the tokenizer has the last word on ids
    for name, ours in {"eos_token_id": eos_id, "mask_token_id": mask_id}.items():
        if raw.get(name) not in (ours, None):
            fail(f"{path}: {name} = {raw[name]}, the tokenizer says {ours}")

    kinds = {field.name: field.type for field in fields(Config)}
    values = {ours: config_value(raw, name, kinds[ours], path) for name, ours in FIELDS.items()}
    values["rotary_dim"] = rotary_width(raw, values["head_dim"], path)
    values["n_last"] = min(Config.n_last, values["n_layer"])
    return Config(**values, eos_id=eos_id, mask_id=mask_id, tokenizer="bpe")


def config_value(raw: dict, name: str, kind: type, path: Path) -> bool | int | float:
    """One field of a released config.json, of this type."""
    if name not in raw:
        fail(f"{path} lacks {name}")
    value = raw[name]

    # the released code's way to say that there are none
    if name == "num_shared_experts" and value is None:
        value = 0

    # a whole number will do where a float is meant; but True is no number, and 0 is not False
    whole = kind is float and type(value) is int
    if type(value) is not kind and not whole:
        fail(f"{path}: {name} = {value!r} should be a {kind.__name__}")
    return kind(value)


def rotary_width(raw: dict, head_dim: int, path: Path) -> int:
    """Channels of a head that rotary embeddings turn, from the share of them, from their number, or
    from both.
    """
    factor = raw.get("partial_rotary_factor")
    rotary = raw.get("rotary_dim")
    width = rotary
    if factor is not None:
        width = factor * head_dim

    if not isinstance(width, int | float) or rotary not in (None, int(width)):
        fail(f"{path}: rotary_dim = {rotary} and partial_rotary_factor = {factor} disagree (or both are missing)")
    return int(width)


# ----------------------------------------------------------------------------------------------------------------
# writing


def write_shard(path: Path, tensors: dict[str, Target]) -> None:
    """A safetensors file written piece by piece: memory does not grow with the shard."""
    header = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, target in tensors.items():
        end = start + target.size
        header[name] = dict(dtype=target.dtype, shape=target.shape, data_offsets=[start, end])
        start = end

    # the format: the header's length in 8 bytes, the header padded to a multiple of 8, the tensors'
    # bytes
    raw = json.dumps(header).encode()
    while len(raw) % 8:
        raw += b" "

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(len(raw).to_bytes(8, "little"))
            file.write(raw)
            for target in tensors.values():
                for part in target.parts():
                    file.write(part.contiguous().flatten().view(torch.uint8).numpy())

    replace_file(path, write)


def copy_file(source: Path, path: Path) -> None:
    replace_file(path, partial(shutil.copyfile, source))


def checkpoint_files(shards: Shards, text_from: Path, **metadata: str) -> Files:
    """The shards, then their index, then the tokenizer files of another folder."""
    files: Files = {}
    weight_map = {}
    total = 0
    for i, tensors in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        files[file] = partial(write_shard, tensors=tensors)
        for name, target in tensors.items():
            weight_map[name] = file
            total += target.size

    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    files[INDEX] = partial(write_json, value=index)
    for name in TEXT:
        if (text_from / name).exists():
            files[name] = partial(copy_file, text_from / name)
    return files


def write_folder(out: Path, files: Files, size: int) -> None:
    """Write `files`, `size` bytes in all. The last one marks the folder as complete; without it, go
    on again.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = {path.name: path.stat().st_size for path in out.iterdir()}
    except OSError as e:
        fail(f"--out {out} cannot be used: {e.strerror or e}")

    # nothing of the user's may be overwritten
    last = list(files)[-1]
    if last in there:
        fail(f"--out {out} already holds a result ({last}): choose another folder, or delete this one first")
    left = [name for name in there if re.fullmatch(r"\..*\.tmp", name)]  # by a run that was killed
    for name in sorted(there.keys() - {*files, *left}):
        fail(f"--out {out} holds {name}, which is not part of this conversion: choose an empty folder")

    # what lies there from an earlier run will be replaced, so its space counts as free
    free = shutil.disk_usage(out).free + sum(there.values())
    if size > free:
        fail(f"--out {out}: {size / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")

    for name in left:
        (out / name).unlink()
    for name, write in tqdm(files.items(), desc="write", unit="file", leave=False, disable=None):
        write(out / name)


def announce(found: dict[str, Stored], shards: Shards, src: Path, out: Path) -> int:
    """Say what is about to be read and written; returns the bytes to write."""
    biases = sum(math.prod(tensor.shape) for name, tensor in found.items() if name.endswith("expert_bias"))
    parameters = sum(math.prod(tensor.shape) for tensor in found.values()) - biases
    sizes = [sum(target.size for target in tensors.values()) for tensors in shards]
    print(f"read   {src}: {len(found):,} tensors, {parameters:,} parameters + {biases:,} router biases")
    print(f"write  {out}: {len(shards)} shards, {sum(sizes) / 1e9:.2f} GB, the largest {max(sizes) / 1e9:.2f} GB")
    return sum(sizes)


def convert(src: Path, out: Path) -> None:
    """The released checkpoint in `src` becomes ours in `out`. Nothing is written before everything
    is checked.
    """
    path = src / "config.json"
    raw = read_json(path, "released config")
    if "n_layer" in raw:
        fail(f"{src} is already in our layout; `python -m released.export --to hf` is the way back")

    # the tokenizer says which ids end a text and mask a position
    text = src / "tokenizer.json"
    tokenizer = bpe_tokenizer(text)
    for name in (EOS, MASK):
        if name not in tokenizer.special:
            fail(f"{text} has no {name} token")
    cfg = our_config(raw, path, tokenizer.eos_id, tokenizer.mask_id)
    if tokenizer.vocab_size > cfg.vocab_size:
        fail(f"{text} has ids up to {tokenizer.vocab_size - 1}, {path} has vocab_size = {cfg.vocab_size}")

    found = survey(src)
    shards = to_ours(found, cfg, src)

    # the way back needs to know what the router's bias was stored as
    bias = "F32"
    for name, tensor in found.items():
        if name.endswith("expert_bias"):
            bias = tensor.dtype
            break
    files = checkpoint_files(shards, src, released_expert_bias=bias)
    files["released_config.json"] = partial(copy_file, path)
    files["config.json"] = partial(write_json, value=asdict(cfg))
    write_folder(out, files, announce(found, shards, src, out))


@command
def main(doc: str = __doc__, src: str = "folder of the released checkpoint", converter: Callable = convert) -> None:
    """The command line of a conversion, this one or another: its manual, what --src is, and what converts."""
    parser = Parser(doc)
    parser.add_argument("--src", type=Path, required=True, help=src)
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder, or one left incomplete")
    args = parser.parse_args()
    try:
        converter(args.src, args.out)
    except KeyboardInterrupt:
        fail(f"interrupted: {args.out} is incomplete; the same command completes it")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
