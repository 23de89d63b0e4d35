"""Released LLaDA2.x checkpoints -> our layout.

    # config.json, shards, index and tokenizer.json -> the folder that every script loads; 32.5 GB for 2.1-mini
    python convert_weights.py --src LLaDA2.1-mini/ --out weights/llada2.1-mini

Our tensors are released tensors laid end to end (NAMES), so nothing is computed (only a bfloat16 `expert_bias`,
LLaDA2.0's, becomes float32); one layer at a time is read. The way back, and adapters to PEFT: released/export.py.
`config.json` is written last: a folder without one is incomplete, and running the same command again completes it.
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
from torch import Tensor
from tqdm import tqdm

from checkpoint import check, check_fit, open_tensors, stored, weight_files
from data import EOS, MASK, Parser, bpe_tokenizer, fail, read_json, replace_file, write_json
from model import Config, Model

# C channels (n_embd), E experts, F expert width

# Released name -> ours; {i} is a layer, {e} an expert. Where several released tensors have one name here, ours is all
# of them laid end to end in memory: expert by expert, and within an expert in the order of this table. So the experts'
# gate_proj (F, C) and up_proj (F, C) become gate_up (E, 2F, C), and their down_proj (C, F) becomes down (E, C, F).
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
# Released config field -> ours. All of these must be there: the released class has other defaults than the releases.
FIELDS = {
    "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "vocab_size": "vocab_size", "head_dim": "head_dim",
    "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head", "intermediate_size": "d_dense",
    "moe_intermediate_size": "d_expert", "num_experts": "n_expert", "num_experts_per_tok": "n_active",
    "n_group": "n_group", "topk_group": "topk_group", "routed_scaling_factor": "routed_scaling",
    "first_k_dense_replace": "n_dense", "num_shared_experts": "n_shared", "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps", "max_position_embeddings": "max_len", "use_qkv_bias": "qkv_bias",
    "use_bias": "proj_bias", "tie_word_embeddings": "tied",
}
ROTARY = ("partial_rotary_factor", "rotary_dim")  # one of them, or both if they agree
# What the model implements; any other value is refused, and absent means this value (except model_type).
MUST_BE = {
    "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "hidden_act": "silu", "use_rmsnorm": True,
    "use_qk_norm": True, "using_split_qkv_in_self_attention": False, "rope_scaling": None, "use_sliding_window": False,
    "score_function": "sigmoid", "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "norm_topk_prob": True,
    "norm_head": False, "norm_softmax": False, "attention_dropout": 0.0, "embedding_dropout": 0.0,
    "output_dropout": 0.0,
}
# What changes nothing at inference. Ids come from the tokenizer; a different eos or mask here is refused.
IGNORED = {
    "_name_or_path", "transformers_version", "auto_map", "dtype", "torch_dtype", "initializer_range", "use_cache",
    "sliding_window", "max_window_layers",  # read only under use_sliding_window
    "output_router_logits", "pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id",
}
# fmt: on
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TEXT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
INDEX = "model.safetensors.index.json"


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
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def parts(self) -> Iterator[Tensor]:
        """Its pieces one after the other, in memory one at a time."""
        for path, pieces in groupby(self.pieces, lambda piece: piece.file):
            with open_tensors(path) as file:
                yield from (file.get_tensor(piece.name).to(DTYPES[self.dtype]) for piece in pieces)


Shards = list[dict[str, Target]]  # the tensors of each output file
Files = dict[str, Callable[[Path], None]]  # file name -> what writes it, in the order of writing


def survey(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no dict)
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    fail(f"{path}: {name} is stored as {part.get_dtype()}: quantised weights are not read")
                if name in found:
                    fail(f"{path}: {name} is also in {found[name].file.name}: copy the folder again")
                found[name] = Stored(path, name, part.get_dtype(), part.get_shape())
    return found


def plan(cfg: Config) -> Iterator[tuple[int, str, list[int], list[str], list[int]]]:
    """Our tensors, each once: (shard, our name, its shape, the released names in it in order, the shape of each). One
    shard for the embedding, one for every layer, one for the final norm and the head. No markers: there are none."""
    with torch.device("meta"):
        ours = stored(Model(cfg))
    del ours["markers"]
    for name, tensor in ours.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        shard = 0 if name == "wte.weight" else int(layer[1]) + 1 if layer else cfg.n_layer + 1
        template = re.sub(r"^layers\.\d+", "layers.{i}", name)
        released = [r for r, o in NAMES.items() if o == template]
        experts = range(cfg.n_expert if "{e}" in released[0] else 1)
        names = [r.format(i=layer and layer[1], e=e) for e in experts for r in released]
        shape = list(tensor.shape)
        part = shape if len(names) == 1 else [math.prod(shape[:-1]) // len(names), shape[-1]]
        yield shard, name, shape, names, part


def to_ours(found: dict[str, Stored], cfg: Config, folder: Path) -> Shards:
    """Our tensors from released ones."""
    expected = {r: torch.empty(part, device="meta") for *_, released, part in plan(cfg) for r in released}
    hint = "the checkpoint is incomplete, or another framework's"
    check_fit(folder, found, expected, hint, {"lm_head.weight": "tied to the embedding"})
    shards: Shards = [{} for _ in range(cfg.n_layer + 2)]
    for shard, name, shape, released, _ in plan(cfg):
        pieces = [found[r] for r in released]
        if odd := [p for p in pieces if p.dtype != pieces[0].dtype]:
            fail(f"{odd[0].file}: {odd[0].name} is {odd[0].dtype}, but {pieces[0].name} is {pieces[0].dtype}")
        dtype = "F32" if name.endswith("expert_bias") else pieces[0].dtype  # router choices hang on small differences
        shards[shard][name] = Target(dtype, shape, pieces)
    return shards


def our_config(raw: dict, path: Path, eos_id: int, mask_id: int) -> Config:
    """Our Config from a released config.json; every field of it is used, checked or in IGNORED."""
    for name, value in MUST_BE.items():  # the first one, model_type, has to be there
        if raw.get(name, value if name != "model_type" else None) != value:
            fail(f"{path}: {name} = {raw.get(name)!r} is not implemented, only {value!r} is")
    if unknown := sorted(raw.keys() - {*MUST_BE, *FIELDS, *ROTARY, *IGNORED}):
        fail(f"{path}: unknown field {unknown[0]} = {raw[unknown[0]]!r}: it may change the model, so it is not ignored")
    for name, ours in (("eos_token_id", eos_id), ("mask_token_id", mask_id)):
        if raw.get(name) not in (ours, None):
            fail(f"{path}: {name} = {raw[name]}, the tokenizer says {ours}")
    kinds = {f.name: f.type for f in fields(Config)}
    values = {}
    for name, ours in FIELDS.items():
        kind, value = kinds[ours], raw.get(name)
        if name == "num_shared_experts" and name in raw and value is None:  # the released code's way to say "none"
            value = 0
        if type(value) is not kind and not (kind is float and type(value) is int):
            fail(f"{path}: {name} = {value!r} should be a {kind.__name__}" if name in raw else f"{path} lacks {name}")
        values[ours] = kind(value)
    factor, rotary = (raw.get(name) for name in ROTARY)
    width = rotary if factor is None else factor * values["head_dim"]
    if not isinstance(width, int | float) or rotary not in (None, int(width)):
        fail(f"{path}: rotary_dim = {rotary} and partial_rotary_factor = {factor} disagree (or both are missing)")
    n_last = min(Config.n_last, values["n_layer"])
    values |= dict(eos_id=eos_id, mask_id=mask_id, rotary_dim=int(width), n_last=n_last)
    return check(Config(**values, tokenizer="bpe"))


def write_shard(path: Path, tensors: dict[str, Target]) -> None:
    """A safetensors file written piece by piece: memory does not grow with the shard."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        header[name] = dict(dtype=t.dtype, shape=t.shape, data_offsets=[at, at := at + t.size])
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            for part in (part for t in tensors.values() for part in t.parts()):
                f.write(part.contiguous().flatten().view(torch.uint8).numpy())

    replace_file(path, write)


def copy_file(source: Path, path: Path) -> None:
    replace_file(path, partial(shutil.copyfile, source))


def checkpoint_files(shards: Shards, text_from: Path, **metadata: str) -> Files:
    """The shards, then their index, then the tokenizer files of another folder."""
    named = {f"model-{i:05}-of-{len(shards):05}.safetensors": tensors for i, tensors in enumerate(shards, 1)}
    total = sum(t.size for tensors in shards for t in tensors.values())
    weight_map = {name: file for file, tensors in named.items() for name in tensors}
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    files: Files = {file: partial(write_shard, tensors=tensors) for file, tensors in named.items()}
    files[INDEX] = partial(write_json, value=index)
    return files | {name: partial(copy_file, text_from / name) for name in TEXT if (text_from / name).exists()}


def write_folder(out: Path, files: Files, size: int) -> None:
    """Write `files`, `size` bytes in all. The last one marks the folder as complete; without it, go on again."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = {p.name: p.stat().st_size for p in out.iterdir()}
    except OSError as e:
        fail(f"--out {out} cannot be used: {e.strerror or e}")
    free = shutil.disk_usage(out).free + sum(there.values())
    if (last := list(files)[-1]) in there:
        fail(f"--out {out} already holds a result ({last}): choose another folder, or delete this one first")
    left = [name for name in there if re.fullmatch(r"\..*\.tmp", name)]  # by a run that was killed
    if odd := sorted(there.keys() - {*files, *left}):
        fail(f"--out {out} holds {odd[0]}, which is not part of this conversion: choose an empty folder")
    if size > free:
        fail(f"--out {out}: {size / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
    for name in left:
        (out / name).unlink()
    for name, write in tqdm(files.items(), desc="write", unit="file", leave=False, disable=None):
        write(out / name)


def announce(found: dict[str, Stored], shards: Shards, src: Path, out: Path) -> int:
    """Say what is about to be read and written; returns the bytes to write."""
    biases = sum(math.prod(t.shape) for name, t in found.items() if name.endswith("expert_bias"))
    parameters = sum(math.prod(t.shape) for t in found.values()) - biases
    sizes = [sum(t.size for t in tensors.values()) for tensors in shards]
    print(f"read   {src}: {len(found):,} tensors, {parameters:,} parameters + {biases:,} router biases")
    print(f"write  {out}: {len(shards)} shards, {sum(sizes) / 1e9:.2f} GB, the largest {max(sizes) / 1e9:.2f} GB")
    return sum(sizes)


def convert(src: Path, out: Path) -> None:
    path, text = src / "config.json", src / "tokenizer.json"
    raw = read_json(path, "released config")
    if "n_layer" in raw:
        fail(f"{src} is already in our layout; `python -m released.export --to hf` is the way back")
    tokenizer = bpe_tokenizer(text)
    if missing := [name for name in (EOS, MASK) if name not in tokenizer.special]:
        fail(f"{text} has no {missing[0]} token")
    cfg = our_config(raw, path, tokenizer.eos_id, tokenizer.mask_id)
    if tokenizer.vocab_size > cfg.vocab_size:
        fail(f"{text} has ids up to {tokenizer.vocab_size - 1}, {path} has vocab_size = {cfg.vocab_size}")
    found = survey(src)
    shards = to_ours(found, cfg, src)
    bias = next((t.dtype for name, t in found.items() if name.endswith("expert_bias")), "F32")
    files = checkpoint_files(shards, src, released_expert_bias=bias)
    files["released_config.json"] = partial(copy_file, path)
    files["config.json"] = partial(write_json, value=asdict(cfg))
    write_folder(out, files, announce(found, shards, src, out))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--src", type=Path, required=True, help="folder of the released checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder, or one left incomplete")
    args = parser.parse_args()
    try:
        convert(**vars(args))
    except KeyboardInterrupt:
        fail(f"interrupted: {args.out} is incomplete; the same command completes it")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
