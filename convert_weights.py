"""Released LLaDA2.x checkpoints -> our layout. This is the one file that knows the released names.

    # reads config.json, shards, index and tokenizer.json; writes a folder that every script loads (2.1-mini: 32.5 GB)
    python convert_weights.py --src LLaDA2.1-mini/ --out weights/llada2.1-mini

Our tensors are released tensors laid end to end (see NAMES), so nothing is computed, and dtypes do not change. Only
one layer at a time is in memory. If the command was interrupted, run it again. released/export.py converts back.
"""

import lib.first  # noqa: F401

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import SIZES, check_fit, check_floats, read_tensors, save_tensors, stored, weight_files
from config import Config, check_config
from lib.tokenizer import bpe_tokenizer
from lib.util import Parser, alone_in, checked_entry, command, copy_file, fail, progress, read_json, write_json
from model import Model

# C channels (n_embd), E experts, F expert width

# Released name -> our name; {i} is a layer, {e} an expert. If several released tensors have one name of ours, they are
# laid end to end: expert by expert, and within an expert in the order of this table. So the experts'
# gate_proj (F, C) and up_proj (F, C) become gate_up (E, 2F, C), and down_proj (C, F) becomes down (E, C, F).
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

# fmt: off
# Released config field -> our field. All must be given: the released class has other defaults than the released models.
FIELDS = {
    "num_hidden_layers": "n_layer", "hidden_size": "n_embd",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_len",
    "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head", "head_dim": "head_dim",
    "intermediate_size": "d_dense", "moe_intermediate_size": "d_expert",
    "num_experts": "n_expert", "num_experts_per_tok": "n_active",
    "n_group": "n_group", "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling", "num_shared_experts": "n_shared",
    "first_k_dense_replace": "n_dense", "rope_theta": "rope_theta", "rms_norm_eps": "norm_eps",
    "use_qkv_bias": "qkv_bias", "use_bias": "proj_bias", "tie_word_embeddings": "tied",
}

# What the model implements. Any other value is refused. Every field except model_type may be absent.
MUST_BE = {
    "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"],
    "hidden_act": "silu", "use_rmsnorm": True, "use_qk_norm": True, "using_split_qkv_in_self_attention": False,
    "rope_scaling": None, "use_sliding_window": False,
    "score_function": "sigmoid", "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "norm_topk_prob": True,
    "norm_head": False, "norm_softmax": False,
    "attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0, "is_encoder_decoder": False,
}
# Fields that change nothing at inference. Ids come from the tokenizer; another eos or mask here is refused.
IGNORED = {
    "_name_or_path", "transformers_version", "auto_map", "dtype", "torch_dtype", "initializer_range", "use_cache",
    "sliding_window", "max_window_layers",  # read only with use_sliding_window
    "output_router_logits", "pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id",
}
# fmt: on
TEXT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
INDEX = "model.safetensors.index.json"

Shard = Callable[[], dict[str, Tensor]]  # makes the tensors of one file, just before they are written
Files = dict[str, Callable[[Path], None]]  # file name -> the function that writes it, in the order of writing


# --- tensors: which released ones make which of ours
def survey(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, name -> tensor, mapped from its file. Quantised ones are refused."""
    found = dict(read_tensors(weight_files(folder)))
    check_floats(folder, found)
    return found


@dataclass(frozen=True)
class Plan:
    """One of our tensors, and the released ones that it is made of: equal parts, cut along its rows."""

    name: str
    shape: list[int]
    released: list[str]
    part: list[int]  # the shape of each released one


def plan(cfg: Config) -> list[list[Plan]]:
    """All our tensors in shards: the embedding; each layer; the final norm and the output layer."""
    with torch.device("meta"):
        ours = stored(Model(cfg))
    ours.pop("markers")  # a released checkpoint has none

    shards: list[list[Plan]] = [[] for _ in range(cfg.n_layer + 2)]
    for name, tensor in ours.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        shard = 0 if name == "wte.weight" else -1
        if layer:
            shard = 1 + int(layer[1])

        shape = list(tensor.shape)
        released = released_names(name, cfg.n_expert)
        part = shape
        if len(released) > 1:
            part = [math.prod(shape[:-1]) // len(released), shape[-1]]
        shards[shard].append(Plan(name, shape, released, part))
    return shards


def released_names(name: str, n_expert: int) -> list[str]:
    """The released tensors that one of ours is made of, in their order in memory."""
    layer = re.search(r"\d+|$", name)[0]
    patterns = [released for released, ours in NAMES.items() if ours.replace("{i}", layer) == name]
    if "{e}" in patterns[0]:
        return [pattern.format(i=layer, e=e) for e in range(n_expert) for pattern in patterns]
    return [pattern.format(i=layer) for pattern in patterns]


def our_tensors(found: dict[str, Tensor], shard: list[Plan]) -> dict[str, Tensor]:
    """The tensors of one shard of ours, from released ones."""
    tensors = {}
    for planned in shard:
        # no tensor is needed twice, and a file is unmapped when all its tensors are gone
        pieces = [found.pop(name) for name in planned.released]
        tensors[planned.name] = torch.cat(pieces).view(planned.shape)
    return tensors


# --- config.json
def our_config(src: Path) -> Config:
    """Our Config. Every field of the released config.json is used, checked or in IGNORED."""
    path = src / "config.json"
    raw = read_json(path, "released config")
    for name, value in MUST_BE.items():
        given = name in raw or name == "model_type"
        if given and raw.get(name) != value:
            fail(f"{path}: {name} = {raw.get(name)!r} is not implemented, only {value!r} is")
    for name in sorted(raw.keys() - {*MUST_BE, *FIELDS, "partial_rotary_factor", "rotary_dim", *SIZES, *IGNORED}):
        fail(f"{path}: unknown field {name} = {raw[name]!r}: it may change the model, so it cannot be ignored")

    # the tokenizer says which ids end a text and mask a position
    text = src / "tokenizer.json"
    tokenizer = bpe_tokenizer(text)
    ids = {"eos_id": tokenizer.eos_id, "mask_id": tokenizer.mask_id}
    for name, ours in ids.items():
        field = name.replace("_id", "_token_id")
        if raw.get(field) not in (ours, None):
            fail(f"{path}: {field} = {raw[field]}, and the tokenizer has {ours}")

    kinds = {field.name: field.type for field in fields(Config)}
    values = {ours: checked_entry(raw, name, kinds[ours], path) for name, ours in FIELDS.items()}
    values["rotary_dim"] = int(checked_entry(raw, "partial_rotary_factor", float, path) * values["head_dim"])
    if raw.get("rotary_dim", values["rotary_dim"]) != values["rotary_dim"]:
        fail(f"{path}: rotary_dim and partial_rotary_factor disagree")

    assumed = assumed_sizes(values["n_layer"])
    values |= {name: checked_entry(assumed | raw, name, int, path) for name in assumed}
    if tokenizer.vocab_size > values["vocab_size"]:
        fail(f"{text} has ids up to {tokenizer.vocab_size - 1}, but vocab_size is {values['vocab_size']} in {path}")
    cfg = Config(**values, **ids)
    check_config(cfg, path)
    return cfg


def assumed_sizes(n_layer: int) -> dict[str, int]:
    """The sizes for which a released config has no entry. If a model has others, released.export adds them."""
    return {"block_length": Config.block_length, "n_last": min(Config.n_last, n_layer), "n_rounds": Config.n_rounds}


# --- writing
def copies(src: Path, *names: str) -> Files:
    """These files of another folder, to be copied, if they exist."""
    return {name: partial(copy_file, src / name) for name in names if (src / name).exists()}


def save_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    save_tensors(path, tensors, {"format": "pt"})  # transformers reads no file without this entry


def write_checkpoint(
    out: Path, shards: list[Shard], files: Files, save: Callable[[Path, dict], None] = save_shard
) -> None:
    """Write the shards (one at a time is in memory), then their index, then the other files, config.json last."""
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {}
    size = 0
    with alone_in(out):
        if (out / "config.json").exists():
            fail(f"--out {out} already holds a checkpoint: choose another folder, or delete this one first")
        for name, shard in zip(progress(names, "write"), shards, strict=True):
            tensors = shard()
            save(out / name, tensors)
            weight_map |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
            del tensors  # before the next ones come
        write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        for name, write in files.items():
            write(out / name)
    print(f"wrote {out}: {len(weight_map):,} tensors in {len(shards)} shards, {size / 1e9:.2f} GB")


def convert(src: Path, out: Path) -> None:
    """Convert the released checkpoint in `src` to ours in `out`. Everything is checked before anything is written."""
    cfg = our_config(src)
    found = survey(src)
    shards = plan(cfg)

    # there must be all tensors of the plan, and no others
    expected = {}
    for planned in sum(shards, []):
        expected |= {name: torch.empty(planned.part, device="meta") for name in planned.released}
    dropped = {"lm_head.weight": "tied to the embedding"}
    check_fit(src, found, expected, "the checkpoint is incomplete, or another framework's", dropped)

    files = copies(src, *TEXT)
    files["released_config.json"] = partial(copy_file, src / "config.json")
    files["config.json"] = partial(write_json, value=asdict(cfg))
    write_checkpoint(out, [partial(our_tensors, found, shard) for shard in shards], files)


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--src", type=Path, required=True, help="the folder of the released checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="a new folder, or an incomplete one")
    args = parser.parse_args()
    convert(args.src, args.out)


if __name__ == "__main__":
    main()
