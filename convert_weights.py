"""Checkpoints in and out: LLaDA2.x as released -> our layout, and back; adapters -> PEFT.

    # released folder (config.json, shards, index, tokenizer.json) -> ours; the speed of a copy, 32.5 GB for 2.1-mini
    python convert_weights.py --src LLaDA2.1-mini/ --out weights/llada2.1-mini
    # ours + an adapter -> released layout, merged (without --adapter: the plain way back, bit for bit)
    python convert_weights.py --src weights/llada2.1-mini --adapter out/cocommit --to hf --out merged/
    # an adapter -> PEFT folder, with the markers beside it
    python convert_weights.py --adapter out/cocommit --to peft --out adapter/
    # a synthetic checkpoint of a tenth of the size: peak memory, and time against `cp`

Our tensors are released tensors laid end to end (see NAMES), so a conversion moves bytes and computes nothing, and its
memory does not grow with the checkpoint. Only merging and a bfloat16 `expert_bias` (LLaDA2.0) touch numbers.

It refuses a config field that our model does not implement or does not know, a missing, unknown, misshapen or cut-off
tensor, quantised or fused experts, a tokenizer that tiktoken cannot reproduce, and an --out that holds anything else.
`config.json` is written last: a folder without one is incomplete, and running the same command again completes it.
The released remote code (modeling_*.py) is no weight: for `--to hf` copy it from the released folder yourself.
"""

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import adapter_settings, read_config, read_tensors, weight_files, write_tensors
from data import EOS, MASK, Parser, bpe_tokenizer, fail, read_json, replace_file, write_json
from model import Config, Linear, Model

# C channels (n_embd), E experts, F expert width, K = n_rounds, r rank of an adapter

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
DROPPED = {  # what a source may hold and the result does not
    "lm_head.weight": "tied to the embedding",
    "markers": "the released layout has no place for them; they go to markers.safetensors",
}
FUSED = re.compile(r"\.(experts\.(gate|up|down|gate_up)_proj|switch_mlp\.)")  # other frameworks' stacked experts

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
IGNORED = {  # what changes nothing at inference, by the reason
    "a record": ("_name_or_path", "transformers_version", "auto_map"),
    "every stored tensor has its own": ("dtype", "torch_dtype"),
    "for new weights only": ("initializer_range",),
    "read only under use_sliding_window": ("sliding_window", "max_window_layers"),
    "ids come from the tokenizer; a different eos or mask here is refused":
        ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"),
    "a cache or an output, not the model": ("use_cache", "output_router_logits"),
}
# fmt: on
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TEXT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
INDEX, CHUNK = "model.safetensors.index.json", 1 << 20  # bytes read at a time


# ---------------------------------------------------------------------------------------------------------------------
# tensors in files, without reading them


@dataclass(frozen=True)
class Stored:
    """A tensor, or a run of its rows, as bytes of a file."""

    file: Path
    name: str
    dtype: str  # a key of DTYPES
    shape: list[int]
    start: int
    size: int

    def chunks(self) -> Iterator[bytes]:
        # Plain reads: pages of a memory map would count as this process's memory until the file is closed.
        try:
            with open(self.file, "rb") as f:
                f.seek(self.start)
                for left in range(self.size, 0, -CHUNK):
                    chunk = f.read(min(left, CHUNK))
                    if len(chunk) < min(left, CHUNK):
                        raise OSError("the file became shorter")
                    yield chunk
        except OSError as e:
            fail(f"{self.file} cannot be read at {self.name}: {e.strerror or e}")


@dataclass
class Target:
    """A tensor to write: the bytes of `pieces` end to end, cast if their dtype differs, `lora` (A, B, scale) merged."""

    dtype: str
    shape: list[int]
    pieces: list[Stored]
    lora: tuple[Tensor, Tensor, float] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def chunks(self) -> Iterator[bytes]:
        stored = (chunk for piece in self.pieces for chunk in piece.chunks())
        if self.dtype == self.pieces[0].dtype and self.lora is None:
            yield from stored
            return
        tensor = torch.frombuffer(bytearray().join(stored), dtype=DTYPES[self.pieces[0].dtype]).view(self.shape)
        if self.lora is not None:  # by the model's own layer: a float32 sum, rounded once
            with torch.device("meta"):
                layer = Linear(self.shape[1], self.shape[0])
            layer.weight, layer.lora_A, layer.lora_B = (nn.Parameter(t, False) for t in (tensor, *self.lora[:2]))
            layer.lora_scale = self.lora[2]
            layer.merge_lora()
            tensor = layer.weight.data
        yield tensor.to(DTYPES[self.dtype]).view(torch.uint8).numpy().data


Shards = list[dict[str, Target]]  # the tensors of each output file


def read_header(path: Path) -> list[Stored]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON header, then the tensors' bytes."""
    found = []
    try:
        with open(path, "rb") as f:
            total = path.stat().st_size
            first = 8 + int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(first - 8)) if first <= total else fail(f"{path} is cut short: copy it again")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if dtype not in DTYPES:
                fail(f"{path}: {name} is stored as {dtype}; read are {', '.join(DTYPES)}, not quantised weights")
            if first + end > total:
                fail(f"{path} is cut short: {name} ends at byte {first + end:,}, the file at {total:,}: copy it again")
            if end - start != math.prod(shape) * DTYPES[dtype].itemsize or start < 0:
                fail(f"{path} is damaged: {name} {shape} {dtype} cannot be {end - start:,} bytes: copy it again")
            found.append(Stored(path, name, dtype, shape, first + start, end - start))
    except FileNotFoundError:
        fail(f"{path} is missing, and so is an index that names other files: this folder holds no checkpoint")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fail(f"{path} is damaged or not a safetensors file ({e}): copy it again")
    return found


def survey(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name; the index, where there is one, must list exactly what the files hold."""
    has_index = (folder / INDEX).exists()
    listed = read_json(folder / INDEX, "weight index").get("weight_map") if has_index else {}
    if not isinstance(listed, dict):
        fail(f"{folder / INDEX} has no weight_map: copy it again")
    for name, file in listed.items():
        if not (folder / str(file)).is_file():
            fail(f"{folder / str(file)} is missing: the index says that it holds {name}: copy it too")
    found: dict[str, Stored] = {}
    for tensor in (t for path in weight_files(folder) for t in read_header(path)):
        if tensor.name in found:
            fail(f"{tensor.file}: {tensor.name} is also in {found[tensor.name].file.name}: which one counts?")
        if has_index and listed.get(tensor.name) != tensor.file.name:
            fail(f"{tensor.file}: unexpected tensor {tensor.name}: the index does not list it here")
        found[tensor.name] = tensor
    for name, file in listed.items():
        if name not in found:
            fail(f"{folder / file}: tensor {name} is missing, though the index lists it here: copy it again")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# released <-> ours


def plan(cfg: Config) -> Iterator[tuple[int, str, list[int], list[str], list[int]]]:
    """Our tensors, each once: (shard, our name, its shape, the released names in it in order, the shape of each).

    One shard for the embedding, one for every layer, one for the final norm and the head. No markers: released
    checkpoints have none, and load_model starts them at zero.
    """
    with torch.device("meta"):
        state = Model(cfg).state_dict()
    for name, tensor in state.items():
        if name == "markers" or (cfg.tied and name == "lm_head.weight"):
            continue
        layer = re.match(r"layers\.(\d+)\.", name)
        shard = 0 if name == "wte.weight" else int(layer[1]) + 1 if layer else cfg.n_layer + 1
        template = re.sub(r"^layers\.\d+", "layers.{i}", name)
        released = [r for r, ours in NAMES.items() if ours == template]
        experts = range(cfg.n_expert if "{e}" in released[0] else 1)
        names = [r.format(i=layer and layer[1], e=e) for e in experts for r in released]
        shape = list(tensor.shape)
        part = shape if len(names) == 1 else [math.prod(shape[:-1]) // len(names), shape[-1]]
        yield shard, name, shape, names, part


def take(found: dict[str, Stored], name: str, shape: list[int], folder: Path) -> Stored:
    """Use a source tensor up."""
    if name not in found:
        if fused := [f"{t.file}: {other}" for other, t in found.items() if FUSED.search(other)]:
            fail(
                f"{fused[0]} holds stacked experts of another framework: convert it back to one tensor an expert first"
            )
        fail(f"{folder}: tensor {name} is missing, in the files and in the index: the checkpoint is incomplete")
    tensor = found.pop(name)
    if tensor.shape != shape:
        fail(f"{tensor.file}: {name} has shape {tensor.shape}, config.json says {shape}")
    return tensor


def check_used_up(found: dict[str, Stored]) -> None:
    for name, tensor in found.items():
        if name not in DROPPED:
            fail(f"{tensor.file}: unexpected tensor {name}: this model has no such parameter")
        print(f"dropped {name}: {DROPPED[name]}")


def to_ours(found: dict[str, Stored], cfg: Config, folder: Path) -> Shards:
    """Our tensors from released ones; `found` is used up."""
    shards: Shards = [{} for _ in range(cfg.n_layer + 2)]
    for shard, name, shape, released, part in plan(cfg):
        pieces = [take(found, r, part, folder) for r in released]
        if odd := [p for p in pieces if p.dtype != pieces[0].dtype]:
            fail(f"{odd[0].file}: {odd[0].name} is {odd[0].dtype}, but {pieces[0].name} is {pieces[0].dtype}")
        dtype = "F32" if name.endswith("expert_bias") else pieces[0].dtype  # router choices hang on small differences
        shards[shard][name] = Target(dtype, shape, pieces)
    check_used_up(found)
    return shards


def to_released(
    found: dict[str, Stored], cfg: Config, folder: Path, lora: dict[str, Tensor], scale: float, bias_dtype: str
) -> Shards:
    """Released tensors from ours, `lora` (by our names) merged in; `found` is used up."""
    shards: Shards = [{} for _ in range(cfg.n_layer + 2)]
    for shard, name, shape, released, part in plan(cfg):
        whole = take(found, name, shape, folder)
        size = whole.size // len(released)
        dtype = bias_dtype if name.endswith("expert_bias") else whole.dtype
        A, B = (lora.get(name.removesuffix("weight") + side) for side in ("lora_A", "lora_B"))
        if A is not None and [B.shape[0], A.shape[1]] != shape:
            fail(f"the adapter's {name} is {[B.shape[0], A.shape[1]]}, {folder} has {shape}: trained on another model?")
        for k, r in enumerate(released):
            piece = replace(whole, start=whole.start + k * size, size=size)
            shards[shard][r] = Target(dtype, part, [piece], None if A is None else (A, B, scale))
    check_used_up(found)
    return shards


def our_config(raw: dict, path: Path, eos_id: int, mask_id: int) -> Config:
    """Our Config from a released config.json; every field of it is used, checked or in IGNORED."""
    if raw.get("model_type") != MUST_BE["model_type"]:
        fail(f"{path}: model_type {raw.get('model_type')!r} is not {MUST_BE['model_type']!r}: another architecture")
    known = {*MUST_BE, *FIELDS, *ROTARY, *(name for names in IGNORED.values() for name in names)}
    for name, value in raw.items():
        if name not in known:
            fail(f"{path}: unknown field {name} = {value!r}: it may change the model, so it is not ignored")
        if name in MUST_BE and value != MUST_BE[name]:
            fail(f"{path}: {name} = {value!r} is not implemented, only {MUST_BE[name]!r} is")
    for name, ours in (("eos_token_id", eos_id), ("mask_token_id", mask_id)):
        if raw.get(name) not in (ours, None):
            fail(f"{path}: {name} = {raw[name]}, the tokenizer (or flag) says {ours}")
    kinds = {f.name: f.type for f in fields(Config)}
    values: dict = {}
    for name, ours in FIELDS.items():
        kind, value = kinds[ours], raw.get(name)
        if name == "num_shared_experts" and name in raw and value is None:  # the released code's way to say "none"
            value = 0
        if type(value) is not kind and not (kind is float and type(value) is int):
            fail(f"{path}: {name} = {value!r} should be a {kind.__name__}" if name in raw else f"{path} lacks {name}")
        if kind is not bool and value <= 0 and ours not in ("n_dense", "n_shared"):
            fail(f"{path}: {name} = {value} should be positive")
        values[ours] = kind(value)
    factor, rotary = (raw.get(name) for name in ROTARY)
    width = rotary if factor is None else factor * values["head_dim"]
    if not isinstance(width, int | float) or rotary not in (None, int(width)):
        fail(f"{path}: rotary_dim = {rotary} and partial_rotary_factor = {factor} disagree (or both are missing)")
    if not 0 <= eos_id < values["vocab_size"] > mask_id >= 0:
        fail(f"{path}: eos id {eos_id} or mask id {mask_id} is outside vocab_size = {values['vocab_size']}")
    n_last = min(Config.n_last, values["n_layer"])
    return Config(**values, eos_id=eos_id, mask_id=mask_id, rotary_dim=int(width), n_last=n_last, tokenizer="bpe")


def released_config(cfg: Config) -> dict:
    """A released config.json for a model that was not converted from one."""
    ours = {name: getattr(cfg, field) for name, field in FIELDS.items()}
    rotary = {"partial_rotary_factor": cfg.rotary_dim / cfg.head_dim, "rotary_dim": cfg.rotary_dim}
    return {**MUST_BE, **ours, **rotary, "pad_token_id": cfg.eos_id, "use_cache": False}


# ---------------------------------------------------------------------------------------------------------------------
# folders: a dict of file name -> what writes it, in the order of writing

Files = dict[str, Callable[[Path], None]]


def write_shard(path: Path, tensors: dict[str, Target]) -> None:
    """One safetensors file, chunk by chunk: no tensor is ever whole in memory unless it is computed."""
    header: dict = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.size]}
        at += t.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            for t in tensors.values():
                f.writelines(t.chunks())

    replace_file(path, write)


def copy_file(source: Path, path: Path) -> None:
    replace_file(path, partial(shutil.copyfile, source))


def checkpoint_files(shards: Shards, text_from: Path, **metadata: str) -> Files:
    """The shards, then their index, then the tokenizer files of another folder."""
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files: Files = {file: partial(write_shard, tensors=tensors) for file, tensors in zip(names, shards, strict=True)}
    weight_map = {k: file for file, tensors in zip(names, shards, strict=True) for k in tensors}
    total = sum(t.size for tensors in shards for t in tensors.values())
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    files[INDEX] = partial(write_json, value=index)
    return files | {name: partial(copy_file, text_from / name) for name in TEXT if (text_from / name).exists()}


def write_folder(out: Path, files: Files, size: int) -> None:
    """Write `files`, `size` bytes in all. The last one marks the folder as complete; without it, go on again."""
    try:
        there = {p.name: p.stat().st_size for p in out.iterdir()} if out.is_dir() else {}
        if (last := list(files)[-1]) in there:
            fail(f"--out {out} already holds a result ({last}): choose another folder, or delete this one first")
        for name in there:
            if re.fullmatch(r"\..*\.tmp", name):
                (out / name).unlink()  # of a run that was killed
            elif name not in files:
                fail(f"--out {out} holds {name}, which is not part of this conversion: choose an empty folder")
        nearest = next(p for p in (out, *out.absolute().parents) if p.exists())
        free = shutil.disk_usage(nearest).free + sum(there.values())
    except OSError as e:
        fail(f"--out {out} cannot be used: {e.strerror or e}")
    if size > free:
        fail(f"--out {out}: {size / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
    for name, write in tqdm(files.items(), desc="write", unit="file", leave=False, disable=None):
        write(out / name)


def announce(found: dict[str, Stored], shards: Shards, src: Path, out: Path) -> int:
    """Say what is about to be read and written; returns the bytes to write."""
    biases = sum(math.prod(t.shape) for name, t in found.items() if name.endswith("expert_bias"))
    parameters = sum(math.prod(t.shape) for t in found.values()) - biases
    print(f"read   {src}: {len(found):,} tensors, {parameters:,} parameters + {biases:,} router biases, ", end="")
    print(f"{sum(t.size for t in found.values()) / 1e9:.2f} GB")
    sizes = [sum(t.size for t in tensors.values()) for tensors in shards]
    print(f"write  {out}: {len(shards)} shards, {sum(sizes) / 1e9:.2f} GB, the largest {max(sizes) / 1e9:.2f} GB")
    print(f"memory to load it: {parameters * 2 / 1e9:.1f} GB as bfloat16, {parameters * 4 / 1e9:.1f} GB as float32")
    return sum(sizes)


def token_ids(src: Path, eos_id: int | None, mask_id: int | None) -> tuple[int, int, int]:
    """(eos, mask, vocabulary) of tokenizer.json, or of the flags where there is none."""
    path = src / "tokenizer.json"
    if not path.exists():
        if eos_id is None or mask_id is None:
            fail(f"no {path}: copy it too, or give --eos_id and --mask_id (LLaDA2.x: 156892 and 156895)")
        return eos_id, mask_id, 0
    if eos_id is not None or mask_id is not None:
        fail(f"--eos_id and --mask_id are for a source without a tokenizer; {path} has its own ids")
    tokenizer = bpe_tokenizer(path)
    if missing := [name for name in (EOS, MASK) if name not in tokenizer.special]:
        fail(f"{path} has no {missing[0]} token")
    return tokenizer.eos_id, tokenizer.mask_id, tokenizer.vocab_size


# ---------------------------------------------------------------------------------------------------------------------
# the three conversions


def convert(args: argparse.Namespace) -> None:
    """Released -> ours."""
    path = args.src / "config.json"
    raw = read_json(path, "released config")
    if "n_layer" in raw:
        fail(f"{args.src} is already in our layout; --to hf is the way back")
    eos_id, mask_id, used = token_ids(args.src, args.eos_id, args.mask_id)
    cfg = our_config(raw, path, eos_id, mask_id)
    if used > cfg.vocab_size:
        fail(f"{args.src / 'tokenizer.json'} has ids up to {used - 1}, {path} has vocab_size = {cfg.vocab_size}")
    found = survey(args.src)
    shards = to_ours(dict(found), cfg, args.src)
    bias = next((t.dtype for name, t in found.items() if name.endswith("expert_bias")), "F32")
    files = checkpoint_files(shards, args.src, released_expert_bias=bias)
    files["released_config.json"] = partial(copy_file, path)
    files["config.json"] = partial(write_json, value=asdict(cfg))
    write_folder(args.out, files, announce(found, shards, args.src, args.out))


def export(args: argparse.Namespace) -> None:
    """Ours, with or without an adapter, -> released."""
    cfg, found = read_config(args.src), survey(args.src)
    if cfg.noise:
        fail(
            f"{args.src} was trained with --chain_noise: the released layout has no place for the noise of its markers"
        )
    lora, scale, markers, n_last = {}, 0.0, None, cfg.n_last
    if args.adapter is not None:
        settings, lora, markers = read_adapter(args.adapter)
        shape, scale, n_last = settings["model"], settings["scale"], settings["n_last"]
        if settings["lora_scope"] != "all":
            fail(f"{args.adapter} acts in the marked pass only (lora_scope marked): merged it would act in every pass")
        if (shape["n_layer"], shape["n_embd"]) != (cfg.n_layer, cfg.n_embd):
            fail(f"{args.adapter} is for {shape['n_layer']} layers of {shape['n_embd']}, not for {args.src}")
        if settings["base"].resolve() != args.src.resolve():
            print(f"note: the adapter was trained on {settings['base']}")
    elif "markers" in found:
        markers = next(t.clone() for _, name, t in read_tensors([found["markers"].file]) if name == "markers")
    index = read_json(args.src / INDEX, "weight index") if (args.src / INDEX).exists() else {}
    bias = index.get("metadata", {}).get("released_expert_bias", "F32")
    shards = to_released(dict(found), cfg, args.src, lora, scale, bias)
    files = checkpoint_files(shards, args.src)
    if markers is not None:
        files["markers.safetensors"] = partial(write_markers, markers=markers, n_last=n_last, scope="all")
    kept = args.src / "released_config.json"
    files["config.json"] = (
        partial(copy_file, kept) if kept.exists() else partial(write_json, value=released_config(cfg))
    )
    write_folder(args.out, files, announce(found, shards, args.src, args.out))


def read_adapter(folder: Path) -> tuple[dict, dict[str, Tensor], Tensor]:
    """(adapter.json, LoRA matrices by our names, markers (K, C)); exactly the matrices of its layers, of its rank."""
    settings = adapter_settings(folder)
    shape, r = settings["model"], settings["lora_r"]
    layers = range(0 if settings["lora_scope"] == "all" else shape["n_layer"] - shape["n_last"], shape["n_layer"])
    markers_shape = (shape["n_rounds"], shape["n_embd"])
    settings |= {"scale": settings["lora_alpha"] / r, "base": Path(settings["base"]), "n_last": shape["n_last"]}
    path = folder / "adapter.safetensors"
    state = {name: t.clone() for _, name, t in read_tensors([path])}
    expected = {f"layers.{i}.attn.{m}.lora_{side}" for i in layers for m in ("qkv", "proj") for side in "AB"}
    if "noise" in state:
        fail(f"{path} was trained with --chain_noise: neither layout has a place for the noise of its markers")
    if odd := sorted((expected | {"markers"}).symmetric_difference(state)):
        fail(f"{path}: tensor {odd[0]} is {'unexpected' if odd[0] in state else 'missing'}")
    if state["markers"].shape != markers_shape:
        fail(f"{path}: markers {list(state['markers'].shape)} should be {list(markers_shape)}")
    for name in expected:
        if state[name].dim() != 2 or state[name].shape[name.endswith("B")] != r:
            fail(f"{path}: {name} {list(state[name].shape)} is not of rank {r}")
    markers = state.pop("markers")
    return settings, state, markers


def write_markers(path: Path, markers: Tensor, n_last: int, scope: str) -> None:
    metadata = {"n_last": str(n_last), "lora_scope": scope}
    replace_file(path, lambda p: write_tensors(p, {"markers": markers}, metadata))


def to_peft(args: argparse.Namespace) -> None:
    """An adapter -> the folder that PEFT loads, and the markers, which PEFT has no place for."""
    settings, lora, markers = read_adapter(args.adapter)
    modules = {ours.split(".")[3]: name for name, ours in NAMES.items() if re.search(r"(qkv|proj)\.weight$", ours)}
    state = {}
    for name, tensor in lora.items():
        _, i, _, module, side = name.split(".")
        state[f"base_model.model.{modules[module].format(i=i).removesuffix('weight')}{side}.weight"] = tensor
    scope, n_last = settings["lora_scope"], settings["n_last"]
    if scope != "all":
        print("note: this adapter acts in the marked pass only; PEFT users must switch it off in the other passes")
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": str(args.src or settings["base"]),
        "r": settings["lora_r"],
        "lora_alpha": settings["lora_alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": [name.split(".")[-2] for name in modules.values()],
        "layers_to_transform": None if scope == "all" else sorted({int(name.split(".")[1]) for name in lora}),
        "layers_pattern": None if scope == "all" else "layers",
    }
    files: Files = {
        "adapter_model.safetensors": lambda path: replace_file(
            path, lambda p: write_tensors(p, state, {"format": "pt"})
        ),
        "markers.safetensors": partial(write_markers, markers=markers, n_last=n_last, scope=scope),
        "adapter_config.json": partial(write_json, value=config),
    }
    write_folder(args.out, files, sum(t.nbytes for t in state.values()))


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("folders")
    group.add_argument("--src", type=Path, help="checkpoint to read; with --to peft: the name of the base to record")
    group.add_argument("--out", type=Path, help="a new or empty folder, or one that an interrupted run left incomplete")
    group.add_argument("--to", choices=["ours", "hf", "peft"], default="ours", help="layout to write (default: ours)")
    group.add_argument("--adapter", type=Path, help="a folder of train.py: merged by --to hf, rewritten by --to peft")
    group = parser.add_argument_group("token ids, only for a released folder without tokenizer.json")
    group.add_argument("--eos_id", type=int, help="LLaDA2.x: 156892")
    group.add_argument("--mask_id", type=int, help="LLaDA2.x: 156895")
    args = parser.parse_args()
    given = {name for name, value in vars(args).items() if value is not None} - {"to"}
    run, needed, allowed = {
        "ours": (convert, {"src", "out"}, {"eos_id", "mask_id"}),
        "hf": (export, {"src", "out"}, {"adapter"}),
        "peft": (to_peft, {"adapter", "out"}, {"src"}),
    }[args.to]
    if missing := sorted(needed - given):
        parser.error(f"--to {args.to} needs --{missing[0]}")
    if extra := sorted(given - needed - allowed):
        parser.error(f"--{extra[0]} has no meaning with --to {args.to}")
    try:
        run(args)
    except KeyboardInterrupt:
        fail(f"interrupted: {args.out} is incomplete; the same command completes it")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
