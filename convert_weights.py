"""Released checkpoints -> our layout: LLaDA2.x, Tiny-A2D, SDAR. This is the one file that knows the released names.

    # reads config.json, shards, index and tokenizer.json; writes a folder that every script loads (2.1-mini: 32.5 GB)
    python convert_weights.py --src LLaDA2.1-mini/ --out weights/llada2.1-mini

Our tensors are released tensors laid end to end (see NAMES), so nothing is computed, and dtypes do not change. Only
one layer at a time is in memory. If the command was interrupted, run it again. released/export.py converts back.
A further family is a record in FAMILIES, and its decoder a name in decoding.SETTINGS.
"""

import lib.first  # noqa: F401

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import check_fit, check_floats, read_tensors, refuse_nan, save_tensors, stored, weight_files
from config import Config, check_config
from lib.tokenizer import bpe_tokenizer
from lib.util import Parser, alone_in, bounded, checked_entry, command, copy_file, fail, progress, read_json, write_json
from model import Model

# C channels (n_embd), E experts, F expert width

# Released name -> our name; {i} is a layer, {e} an expert. If several released tensors have one name of ours, they are
# laid end to end: expert by expert, and within an expert in the order of the table. So the experts'
# gate_proj (F, C) and up_proj (F, C) become gate_up (E, 2F, C), and down_proj (C, F) becomes down (E, C, F).
NAMES = {
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.norm_1.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.norm_2.weight",
    "model.layers.{i}.mlp.gate_proj.weight": "layers.{i}.mlp.gate_up.weight",
    "model.layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.gate_up.weight",
    "model.layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.down.weight",
    "model.norm.weight": "norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}
LLADA_NAMES = NAMES | {
    "model.word_embeddings.weight": "wte.weight",
    "model.layers.{i}.attention.query_key_value.weight": "layers.{i}.attn.qkv.weight",
    "model.layers.{i}.attention.query_key_value.bias": "layers.{i}.attn.qkv.bias",
    "model.layers.{i}.attention.query_layernorm.weight": "layers.{i}.attn.q_norm.weight",
    "model.layers.{i}.attention.key_layernorm.weight": "layers.{i}.attn.k_norm.weight",
    "model.layers.{i}.attention.dense.weight": "layers.{i}.attn.proj.weight",
    "model.layers.{i}.attention.dense.bias": "layers.{i}.attn.proj.bias",
    "model.layers.{i}.mlp.gate.weight": "layers.{i}.mlp.router",
    "model.layers.{i}.mlp.gate.expert_bias": "layers.{i}.mlp.expert_bias",
    "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "layers.{i}.mlp.gate_up",
    "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "layers.{i}.mlp.gate_up",
    "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "layers.{i}.mlp.down",
    "model.layers.{i}.mlp.shared_experts.gate_proj.weight": "layers.{i}.mlp.shared.gate_up.weight",
    "model.layers.{i}.mlp.shared_experts.up_proj.weight": "layers.{i}.mlp.shared.gate_up.weight",
    "model.layers.{i}.mlp.shared_experts.down_proj.weight": "layers.{i}.mlp.shared.down.weight",
}
QWEN_NAMES = NAMES | {"model.embed_tokens.weight": "wte.weight"} | {
    f"model.layers.{{i}}.self_attn.{released}.weight": f"layers.{{i}}.attn.{ours}.weight"
    for released, ours in (
        ("q_proj", "qkv"), ("k_proj", "qkv"), ("v_proj", "qkv"), ("o_proj", "proj"), ("q_norm", "q_norm"),
        ("k_norm", "k_norm"),
    )
}  # fmt: skip

# fmt: off
# Released config field -> our field. All must be given: the released class has other defaults than the released models
FIELDS = {
    "num_hidden_layers": "n_layer", "hidden_size": "n_embd",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_len",
    "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head", "head_dim": "head_dim",
    "intermediate_size": "d_dense", "rope_theta": "rope_theta", "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied", "block_size": "block_length",
}
LLADA_FIELDS = FIELDS | {
    "moe_intermediate_size": "d_expert", "num_experts": "n_expert", "num_experts_per_tok": "n_active",
    "n_group": "n_group", "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling", "num_shared_experts": "n_shared",
    "first_k_dense_replace": "n_dense", "use_qkv_bias": "qkv_bias", "use_bias": "proj_bias",
}

# What the model implements: any other value is refused, but a field may be absent
MUST_BE = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False, "attention_dropout": 0.0}
LLADA_MUST_BE = MUST_BE | {
    "architectures": ["LLaDA2MoeModelLM"],
    "use_rmsnorm": True, "use_qk_norm": True, "using_split_qkv_in_self_attention": False,
    "score_function": "sigmoid", "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "norm_topk_prob": True,
    "norm_head": False, "norm_softmax": False,
    "embedding_dropout": 0.0, "output_dropout": 0.0, "is_encoder_decoder": False,
}
QWEN_MUST_BE = MUST_BE | {"attention_bias": False, "partial_rotary_factor": 1.0}
# of newer versions of transformers, see `older_form`
FORMS = {"layer_types": ["full_attention"], "rope_type": "default"}

# Fields that change nothing at inference; ids are read apart
IGNORED = {
    "model_type", "_name_or_path", "transformers_version", "auto_map", "dtype", "torch_dtype", "initializer_range",
    "use_cache", "sliding_window", "max_window_layers",  # the last two are read only with use_sliding_window
    "output_router_logits", "pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id",
}
QWEN_IGNORED = IGNORED | {
    "architectures", "attn_implementation", "fuse_cross_entropy", "debug", "micro_forward", "use_deepep", "ep_size",
    "skip_checkpoint",
}

# Fields of ours that a released config has no place for. If a model has others than are assumed, released.export adds
# them to config.json under our names
BESIDE = ("block_length", "n_last", "n_rounds", "window", "decoder", "eos_id", "mask_id")
# fmt: on


@dataclass(frozen=True)
class Family:
    """What is particular to a family of released checkpoints."""

    decoder: str  # how its models write, a name in decoding.SETTINGS
    names: dict[str, str]
    fields: dict[str, str]
    must_be: dict[str, object]
    ignored: set[str]
    assumed: dict[str, object] = field(default_factory=dict)  # the values of fields that may be absent
    adds_mask: bool = False  # its tokenizer may lack the mask, which then is the first free id


QWEN = dict(names=QWEN_NAMES, must_be=QWEN_MUST_BE, ignored=QWEN_IGNORED)
LLADA = Family("llada", LLADA_NAMES, LLADA_FIELDS, LLADA_MUST_BE, IGNORED, assumed={"block_size": 32})
FAMILIES = {  # by their model_type
    "llada2_moe": LLADA,
    "a2d-qwen3": Family("a2d", fields=FIELDS, assumed={"block_size": 32}, adds_mask=True, **QWEN),
    "sdar": Family("sdar", fields=FIELDS, **QWEN),
}
TEXT = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
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
    """One of our tensors, and the released ones that it is made of, cut along its rows."""

    name: str
    shape: list[int]
    released: dict[str, list[int]]  # name -> shape, in their order in memory


def plan(cfg: Config, family: Family = LLADA) -> list[list[Plan]]:
    """All our tensors in shards: the embedding; each layer; the final norm and the output layer."""
    ours = stored(Model(cfg))  # which takes no memory
    ours.pop("markers")  # a released checkpoint has none

    # a projection for queries, keys or values has a row for each dim of its heads; other parts are equal
    heads = {"q_proj": cfg.n_head, "k_proj": cfg.n_kv_head, "v_proj": cfg.n_kv_head}

    shards: list[list[Plan]] = [[] for _ in range(cfg.n_layer + 2)]
    for name, tensor in ours.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        shard = 0 if name == "wte.weight" else -1
        if layer:
            shard = 1 + int(layer[1])

        shape = list(tensor.shape)
        parts = {part: heads.get(part.split(".")[-2], 1) for part in released_names(name, cfg.n_expert, family)}
        released = dict.fromkeys(parts, shape)
        if len(parts) > 1:
            unit = math.prod(shape[:-1]) // sum(parts.values())
            released = {part: [unit * share, shape[-1]] for part, share in parts.items()}
        shards[shard].append(Plan(name, shape, released))
    return shards


def released_names(name: str, n_expert: int, family: Family) -> list[str]:
    """The released tensors that one of ours is made of, in their order in memory."""
    layer = re.search(r"\d+|$", name)[0]
    patterns = [released for released, ours in family.names.items() if ours.replace("{i}", layer) == name]
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
def read_released(path: Path) -> tuple[dict, Family]:
    """A released config.json and its family."""
    raw = read_json(path, "released config")
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        fail(f"{path}: model_type = {kind!r} is not implemented, only {', '.join(FAMILIES)}")
    return raw, FAMILIES[kind]


def older_form(raw: dict, path: Path) -> dict:
    """A config.json of any version of transformers, with all about rotary embeddings beside the other fields, and each
    of the layers' types once."""
    rope = checked_entry({"rope_parameters": {}} | raw, "rope_parameters", dict, path)
    flat = {name: value for name, value in (raw | rope).items() if name != "rope_parameters"}
    if isinstance(flat.get("layer_types"), list):
        flat["layer_types"] = sorted(map(str, {*flat["layer_types"]}))
    return flat


def our_config(src: Path, raw: dict, family: Family) -> Config:
    """Our Config. Every field of the released config.json, raw, is used, checked or ignored by name."""
    path = src / "config.json"
    raw = older_form(raw, path)
    must_be = family.must_be | FORMS
    for name, value in must_be.items():
        if name in raw and raw[name] != value:
            fail(f"{path}: {name} = {raw[name]!r} is not implemented, only {value!r} is")
    known = {*must_be, *family.fields, "partial_rotary_factor", "rotary_dim", *BESIDE, *family.ignored}
    for name in sorted(raw.keys() - known):
        fail(f"{path}: unknown field {name} = {raw[name]!r}: it may change the model, so it cannot be ignored")

    kinds = {field.name: field.type for field in fields(Config)}
    raw = family.assumed | raw
    values = {ours: checked_entry(raw, name, kinds[ours], path) for name, ours in family.fields.items()}
    if "n_dense" not in values:
        values["n_dense"] = values["n_layer"]
        raw = {"partial_rotary_factor": 1.0} | raw
    values["rotary_dim"] = round(checked_entry(raw, "partial_rotary_factor", float, path) * values["head_dim"])
    if raw.get("rotary_dim", values["rotary_dim"]) != values["rotary_dim"]:
        fail(f"{path}: rotary_dim and partial_rotary_factor disagree")

    # what a released config does not say
    values |= dict(n_last=min(Config.n_last, values["n_layer"]), decoder=family.decoder)
    values |= {name: checked_entry(raw, name, kinds[name], path) for name in BESIDE if name in raw}
    values |= ids_of(src, raw, family, values["vocab_size"])
    cfg = Config(**values)
    check_config(cfg, path)
    return cfg


def ids_of(src: Path, raw: dict, family: Family, vocab_size: int) -> dict[str, int]:
    """Which token ends an answer, and which is the mask: by the released configs, or else by the tokens' names."""
    # generation_config.json goes first. Of several tokens the first ends an answer here: in chats the end of a turn
    path = src / "generation_config.json"
    said = read_json(path, "released config") if path.exists() else {}
    eos = said.get("eos_token_id") or raw.get("eos_token_id")
    eos, *others = eos if isinstance(eos, list) and eos else [eos]
    if others:
        print(f"an answer ends with token {eos}; the released code may also end it with {others}")

    text = src / "tokenizer.json"
    mask = raw.get("mask_id", raw.get("mask_token_id"))
    tokenizer = bpe_tokenizer(text, None, raw.get("eos_id", eos), mask, family.adds_mask)
    if tokenizer.vocab_size > vocab_size:
        fail(f"{text} has ids up to {tokenizer.vocab_size - 1}, but vocab_size is {vocab_size} in config.json")
    return {"eos_id": tokenizer.eos_id, "mask_id": tokenizer.mask_id}


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
            for tensor in tensors:
                refuse_nan(f"what goes into {out}", tensor, tensors[tensor])
            save(out / name, tensors)
            weight_map |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
            del tensors  # before the next ones come
        write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        for name, write in files.items():
            write(out / name)
    print(f"wrote {out}: {len(weight_map):,} tensors in {len(shards)} shards, {size / 1e9:.2f} GB")


def convert(src: Path, out: Path, block_length: int | None = None) -> None:
    """Convert the released checkpoint in `src` to ours in `out`. Everything is checked before anything is written."""
    raw, family = read_released(src / "config.json")
    if "mdlm" in f"{src.resolve().name} {raw.get('_name_or_path')}".lower():
        fail(f"{src} is an mdlm model by its name: such models see the whole text, which is not implemented")
    if block_length:
        raw = raw | {"block_size": block_length, "block_length": block_length}
    cfg = our_config(src, raw, family)
    found = survey(src)
    shards = plan(cfg, family)

    # there must be all tensors of the plan, and no others
    expected = {}
    for planned in sum(shards, []):
        expected |= {name: torch.empty(shape, device="meta") for name, shape in planned.released.items()}
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
    parser.add_argument("--block_length", type=bounded(int, 1, 10**9),
        help="tokens of a block (default: block_size in its config.json; LLaDA and A2D: 32 without that)")  # fmt: skip
    args = parser.parse_args()
    convert(args.src, args.out, args.block_length)


if __name__ == "__main__":
    main()
