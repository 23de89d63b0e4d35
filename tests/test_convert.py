"""Weight conversion: the released forward pass to 1e-4, every byte there and back, and every refusal by name.

pytest tests/test_convert.py        # CPU, seconds; the golden checkpoint is tests/data/golden_a
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import convert_weights
from checkpoint import load_model, save_adapter, save_model
from data import bpe_tokenizer
from model import PRESETS, Config, MoE, block_causal_mask, new_model, rotary, sequence_context

GOLDEN = Path(__file__).parent / "data" / "golden_a"
EXPECTED = load_file(GOLDEN / "expected.safetensors")
META = json.loads((GOLDEN / "expected.json").read_text())["meta"]
TOKENS = json.loads((GOLDEN / "tokenizer_expected.json").read_text())
INDEX = "model.safetensors.index.json"
MOE_LAYERS = (1, 2, 3)


@pytest.fixture
def run(monkeypatch, capsys):
    """convert_weights in this process: run(...) must succeed, run.fails(...) returns its one line of error."""

    def call(*args) -> str:
        monkeypatch.setattr(sys, "argv", ["convert_weights.py", *map(str, args)])
        convert_weights.main()
        return capsys.readouterr().out

    def fails(*args) -> str:
        with pytest.raises(SystemExit) as stop:
            call(*args)
        line = capsys.readouterr().err
        assert stop.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1, line
        return line

    call.fails = fails
    return call


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """The golden checkpoint in our layout, by the command line."""
    folder = tmp_path_factory.mktemp("golden") / "ours"
    command = [sys.executable, "convert_weights.py", "--src", GOLDEN, "--out", folder]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "189 tensors, 268,992 parameters + 48 router biases" in out and "6 shards" in out
    return folder


def golden_tensors() -> dict[str, torch.Tensor]:
    return {k: v for i in (1, 2) for k, v in load_file(GOLDEN / f"model-0000{i}-of-00002.safetensors").items()}


def released(folder: Path, tensors: dict[str, torch.Tensor] | None = None, tokenizer: bool = True, **config) -> Path:
    """A released-layout folder: the golden one with other tensors or config fields (... deletes a field)."""
    folder.mkdir(parents=True)
    tensors = golden_tensors() if tensors is None else tensors
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        save_file({k: tensors[k].contiguous() for k in part}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {k: file for file, part in halves.items() for k in part}}
    (folder / INDEX).write_text(json.dumps(index))
    raw = json.loads((GOLDEN / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    if tokenizer:
        shutil.copy(GOLDEN / "tokenizer.json", folder)
    return folder


def bits(folder: Path) -> dict[str, tuple]:
    """Every tensor of a folder as (dtype, shape, bytes)."""
    found = {}
    for path in folder.glob("*.safetensors"):
        if path.name != "markers.safetensors" and not path.name.startswith(("expected", "adapter")):
            for k, v in load_file(path).items():
                found[k] = (v.dtype, v.shape, v.contiguous().view(torch.uint8).numpy().tobytes())
    return found


# ---------------------------------------------------------------------------------------------------------------------
# the released forward pass


@pytest.fixture(scope="module")
def forward(ours):
    """The converted model and what every module put out on the golden input."""
    block_length = META["block_length_of_forward"]
    model = load_model(ours, "cpu", torch.float32, block_length=block_length).eval()
    seen = {}
    modules = {"wte": model.wte, "norm_f": model.norm_f, **{i: layer for i, layer in enumerate(model.layers)}}
    hooks = [
        m.register_forward_hook(lambda _, __, out, name=name: seen.setdefault(name, out)) for name, m in modules.items()
    ]
    for i in MOE_LAYERS:
        pre = model.layers[i].mlp.register_forward_pre_hook
        hooks.append(pre(lambda _, args, i=i: seen.setdefault(f"mlp {i}", args[0])))
    ids = EXPECTED["input_ids"]
    context = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)
    with torch.no_grad():
        seen["logits"] = model(ids, context)
    for hook in hooks:
        hook.remove()
    return model, seen


def test_mask_is_the_released_one():
    mask = block_causal_mask(EXPECTED["input_ids"].shape[1], META["block_length_of_forward"])
    assert torch.equal(mask, EXPECTED["attention_mask_bool"])


def test_hidden_states_and_logits(forward):
    _, seen = forward
    close = dict(rtol=0, atol=1e-4)
    torch.testing.assert_close(seen["wte"], EXPECTED["embeddings"], rtol=0, atol=0)
    for i, hidden in enumerate(EXPECTED["hidden_after_layer"]):
        torch.testing.assert_close(seen[i], hidden, **close)
    torch.testing.assert_close(seen["norm_f"], EXPECTED["hidden_final_norm"], **close)
    torch.testing.assert_close(seen["logits"], EXPECTED["logits"], **close)


@pytest.mark.parametrize("layer", MOE_LAYERS)
def test_router(forward, layer):
    model, seen = forward
    x = seen[f"mlp {layer}"].flatten(0, 1)
    chosen, weights = model.layers[layer].mlp.route(x)
    want = EXPECTED[f"router.{layer}.topk_idx"].long().flatten(0, 1)
    order, want_order = chosen.argsort(-1), want.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), want.gather(-1, want_order))
    want_weights = EXPECTED[f"router.{layer}.topk_weight"].flatten(0, 1).gather(-1, want_order)
    torch.testing.assert_close(weights.gather(-1, order), want_weights, rtol=0, atol=1e-5)


def test_training_forward_on_noisy_and_clean(forward):
    model, _ = forward
    noisy, clean = EXPECTED["train.noisy_ids"], EXPECTED["train.clean_ids"]
    real = torch.ones_like(noisy, dtype=torch.bool)
    context = sequence_context(model.cfg, real, torch.float32, clean_copy=True)
    with torch.no_grad():
        logits = model(torch.cat([noisy, clean], dim=1), context)[:, : noisy.shape[1]]
    torch.testing.assert_close(logits, EXPECTED["train.noisy_logits"], rtol=0, atol=1e-4)


def test_a_bfloat16_load_keeps_bias_and_angles_float32(ours):
    model = load_model(ours, "cpu", torch.bfloat16)
    biases = {k: v for k, v in model.named_buffers()}
    assert len(biases) == len(MOE_LAYERS)  # and no frequencies among them that a cast could round
    for i in MOE_LAYERS:
        stored = golden_tensors()[f"model.layers.{i}.mlp.gate.expert_bias"]
        assert torch.equal(biases[f"layers.{i}.mlp.expert_bias"], stored) and stored.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    positions = torch.tensor([0, 1000, 8000])
    for low, full in zip(
        rotary(model.cfg, positions, torch.bfloat16), rotary(model.cfg, positions, torch.float32), strict=True
    ):
        assert torch.equal(low, full.bfloat16())


def moe(n_active: int, scores: list[float], bias: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router of two groups of two experts, one kept, does with given scores (before the bias)."""
    cfg = replace(PRESETS["tiny"], n_embd=4, n_expert=4, n_group=2, topk_group=1, n_active=n_active, routed_scaling=1.0)
    layer = MoE(cfg)
    layer.router.data = torch.diag(torch.logit(torch.tensor(scores)))
    layer.expert_bias.copy_(torch.tensor(bias))
    return layer.route(torch.ones(1, 4))


def test_router_weights_of_all_zero_scores_are_zero():
    _, weights = moe(2, [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    assert weights.tolist() == [[0.0, 0.0]]  # 0 / (0 + 1e-20), not 0 / 0


def test_router_keeps_to_its_group_when_biased_scores_are_negative():
    chosen, weights = moe(2, [0.8, 0.2, 0.5, 0.5], [0.0, -1.0, -1.2, -1.2])  # biased: 0.8, -0.8 | -0.7, -0.7
    assert sorted(chosen[0].tolist()) == [0, 1]  # a group masked to 0 would win against -0.8
    torch.testing.assert_close(weights.sort().values, torch.tensor([[0.2, 0.8]]))  # unbiased, normalised


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer


def test_tokenizer_ids(ours):
    tokenizer = bpe_tokenizer(ours / "tokenizer.json")
    for case in TOKENS["strings"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        plain = case["text"]
        for name in TOKENS["special_ids"]:
            plain = plain.replace(name, "")
        assert tokenizer.decode(case["ids"]) == plain
    for case in TOKENS["chats"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        roles = [m["role"] for m in case["messages"]]
        if case["add_generation_prompt"] and roles in (["user"], ["system", "user"]):
            *system, user = (m["content"] for m in case["messages"])
            assert tokenizer.chat(user, *system) == case["ids"]


def test_tokenizer_whose_ids_are_not_in_merge_order(tmp_path):
    spec = json.loads((GOLDEN / "tokenizer.json").read_text())
    new = torch.randperm(312, generator=torch.Generator().manual_seed(0)).tolist()
    spec["model"]["vocab"] = {token: new[i] for token, i in spec["model"]["vocab"].items()}
    for token in spec["added_tokens"]:
        token["id"] = new[token["id"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = bpe_tokenizer(tmp_path / "tokenizer.json")
    for case in TOKENS["strings"]:
        assert tokenizer.encode(case["text"]) == [new[i] for i in case["ids"]], case["text"]
    assert tokenizer.mask_id == new[TOKENS["special_ids"]["<|mask|>"]]


def no_mask(spec):
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "<|mask|>"]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: s["model"]["merges"].reverse(), "not expressible"),
        (lambda s: s["model"]["merges"].append(s["model"]["merges"][0]), "not expressible"),
        (lambda s: s.update(normalizer={"type": "Lowercase"}), "normalizer"),
        (lambda s: s["added_tokens"][0].update(lstrip=True), "stripping added token"),
        (lambda s: s["pre_tokenizer"]["pretokenizers"].pop(), "pre-tokenizer"),
        (lambda s: s["model"].update(byte_fallback=True), "BPE option"),
        (lambda s: s["model"].update(type="Unigram"), "Unigram"),
        (no_mask, "no <|mask|> token"),
        (lambda s: s["added_tokens"][-1].update(id=320), "vocab_size = 320"),
    ],
)
def test_refused_tokenizers(change, says, run, tmp_path):
    src = released(tmp_path / "src")
    spec = json.loads((src / "tokenizer.json").read_text())
    change(spec)
    (src / "tokenizer.json").write_text(json.dumps(spec))
    line = run.fails("--src", src, "--out", tmp_path / "out")
    assert says in line and "tokenizer.json" in line and not (tmp_path / "out").exists()


def test_ids_without_a_tokenizer(run, tmp_path):
    src = released(tmp_path / "src", tokenizer=False)
    assert "--eos_id and --mask_id" in run.fails("--src", src, "--out", tmp_path / "out", "--eos_id", 305)
    assert "outside vocab_size" in run.fails("--src", src, "--out", tmp_path / "out", "--eos_id", 305, "--mask_id", 320)
    run("--src", src, "--out", tmp_path / "out", "--eos_id", 305, "--mask_id", 308)
    cfg = load_model(tmp_path / "out", "cpu", torch.float32).cfg
    assert (cfg.eos_id, cfg.mask_id, cfg.tokenizer) == (305, 308, "bpe")
    line = run.fails("--src", GOLDEN, "--out", tmp_path / "other", "--eos_id", 305, "--mask_id", 308)
    assert "has its own ids" in line


# ---------------------------------------------------------------------------------------------------------------------
# there and back


def variant(name: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Released checkpoints that differ where releases do."""
    tensors, g = golden_tensors(), torch.Generator().manual_seed(1)
    if name == "LLaDA2.0: all bfloat16":
        return {k: v.bfloat16() for k, v in tensors.items()}, {}
    if name == "LLaDA2.1: bias float32":
        return {k: v if k.endswith("expert_bias") else v.bfloat16() for k, v in tensors.items()}, {}
    if name == "biases":
        for i in range(4):
            tensors[f"model.layers.{i}.attention.query_key_value.bias"] = torch.randn(128, generator=g)
            tensors[f"model.layers.{i}.attention.dense.bias"] = torch.randn(64, generator=g)
        return tensors, {"use_bias": True, "use_qkv_bias": True}
    if name == "tied":
        del tensors["lm_head.weight"]
        return tensors, {"tie_word_embeddings": True}
    return tensors, {}


@pytest.mark.parametrize(
    "name", ["as it is", "LLaDA2.0: all bfloat16", "LLaDA2.1: bias float32", "biases", "tied", "small chunks"]
)
def test_round_trip_is_exact(name, run, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_weights, "CHUNK", 48 if name == "small chunks" else 1 << 20)
    tensors, config = variant(name)
    src = released(tmp_path / "src", tensors, **config)
    run("--src", src, "--out", tmp_path / "ours")
    run("--src", tmp_path / "ours", "--to", "hf", "--out", tmp_path / "back")
    assert bits(tmp_path / "back") == bits(src)
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (src / file).read_bytes()
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors.values())
    for k, file in index["weight_map"].items():
        with safe_open(tmp_path / "back" / file, "pt") as f:
            assert k in f.keys()  # noqa: SIM118 (a safe_open is no dict)
    stored = {k: dtype for k, (dtype, *_) in bits(tmp_path / "ours").items()}
    assert {dtype for k, dtype in stored.items() if k.endswith("expert_bias")} == {torch.float32}
    assert len(set(stored.values())) == (2 if name.startswith("LLaDA2") else 1)  # the rest keeps its dtype
    model = load_model(tmp_path / "ours", "cpu", torch.float32)
    assert "markers" not in stored and not model.markers.any()
    state = model.state_dict()
    for side, rows in (("gate", slice(0, 16)), ("up", slice(16, 32))):  # 10 sorts before 2 in the index
        expert = tensors[f"model.layers.2.mlp.experts.10.{side}_proj.weight"].float()
        assert torch.equal(state["layers.2.mlp.gate_up"][10, rows], expert)
    if name == "biases":
        assert torch.equal(state["layers.3.attn.proj.bias"], tensors["model.layers.3.attention.dense.bias"])
    assert (model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()) == (name == "tied")


def test_a_model_trained_here_exports_and_converts_back(run, tmp_path):
    cfg = replace(PRESETS["tiny"], eos_id=1, mask_id=2)
    model = new_model(cfg, torch.Generator().manual_seed(0))
    model.markers.data.fill_(0.5)
    save_model(model, tmp_path / "ours")
    out = run("--src", tmp_path / "ours", "--to", "hf", "--out", tmp_path / "hf")
    assert "dropped markers" in out and torch.equal(
        load_file(tmp_path / "hf" / "markers.safetensors")["markers"], model.markers
    )
    run("--src", tmp_path / "hf", "--out", tmp_path / "back", "--eos_id", 1, "--mask_id", 2)
    back = load_model(tmp_path / "back", "cpu", torch.float32)
    assert back.cfg == replace(cfg, tokenizer="bpe")
    for k, v in model.state_dict().items():
        assert k == "markers" or torch.equal(v, back.state_dict()[k]), k


def test_the_preset_is_the_release():
    names, parameters, biases, size = [], 0, 0, 0
    for _, _, shape, released_names, part in convert_weights.plan(PRESETS["llada2.1-mini"]):
        names += released_names
        count = torch.Size(part).numel() * len(released_names)
        assert count == torch.Size(shape).numel()
        is_bias = released_names[0].endswith("expert_bias")
        biases, parameters = biases + count * is_bias, parameters + count * (not is_bias)
        size += count * (4 if is_bias else 2)
    assert len(names) == len(set(names)) == 14_813
    assert (parameters, biases, size) == (16_255_638_528, 4_864, 32_511_296_512)
    shapes = {n: p for _, _, _, r, p in convert_weights.plan(PRESETS["llada2.1-mini"]) for n in r}
    assert shapes["model.word_embeddings.weight"] == shapes["lm_head.weight"] == [157184, 2048]
    assert shapes["model.layers.7.attention.query_key_value.weight"] == [3072, 2048]
    assert shapes["model.layers.0.mlp.up_proj.weight"] == [5120, 2048]
    assert shapes["model.layers.19.mlp.experts.255.down_proj.weight"] == [2048, 512]
    assert shapes["model.layers.1.mlp.shared_experts.gate_proj.weight"] == [512, 2048]
    assert "model.layers.0.mlp.gate.weight" not in shapes and "model.layers.20.input_layernorm.weight" not in shapes


# ---------------------------------------------------------------------------------------------------------------------
# adapters


@pytest.fixture
def adapter(ours, tmp_path):
    """A folder as train.py writes it, with random LoRA and markers; adapter(scope) -> (folder, model with it)."""

    def make(scope: str = "all"):
        g = torch.Generator().manual_seed(3)
        model = load_model(ours, "cpu", torch.float32, n_last=2, n_rounds=2).eval()
        model.add_lora(4, 8.0, g, scope)
        for tensor in model.adapter_state().values():
            tensor.copy_(torch.randn(tensor.shape, generator=g) * 0.1)
        settings = {"base": str(ours), "lora_r": 4, "lora_alpha": 8.0, "lora_scope": scope}
        save_adapter(model, tmp_path / scope, settings)
        return tmp_path / scope, model

    return make


def test_merged_export_has_the_logits_of_the_adapter(run, ours, adapter, tmp_path):
    folder, model = adapter()
    run("--src", ours, "--adapter", folder, "--to", "hf", "--out", tmp_path / "merged")
    run("--src", tmp_path / "merged", "--out", tmp_path / "reloaded")
    reloaded = load_model(tmp_path / "reloaded", "cpu", torch.float32).eval()
    base = load_model(ours, "cpu", torch.float32).eval()
    ids = EXPECTED["input_ids"]
    context = sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)
    with torch.no_grad():
        want, got, without = model(ids, context), reloaded(ids, context), base(ids, context)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert (want - without).abs().max() > 0.1
    for layer in model.layers:
        layer.attn.qkv.merge_lora()
        layer.attn.proj.merge_lora()
    assert all(torch.equal(v, reloaded.state_dict()[k]) for k, v in model.state_dict().items() if k != "markers")
    changed = {k for k, v in bits(tmp_path / "merged").items() if v != bits(GOLDEN)[k]}
    assert len(changed) == 8 and all(".query_key_value." in k or ".dense." in k for k in changed)
    with safe_open(tmp_path / "merged" / "markers.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("markers"), model.markers) and f.metadata()["n_last"] == "2"


def test_peft_layout(run, adapter, tmp_path):
    folder, model = adapter()
    run("--adapter", folder, "--to", "peft", "--out", tmp_path / "peft", "--src", "LLaDA2.1-mini")
    state = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(state) == 16
    prefix = "base_model.model.model.layers.3.attention"
    assert torch.equal(state[f"{prefix}.query_key_value.lora_A.weight"], model.layers[3].attn.qkv.lora_A)
    assert torch.equal(state[f"{prefix}.dense.lora_B.weight"], model.layers[3].attn.proj.lora_B)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["target_modules"] == ["query_key_value", "dense"] and config["layers_to_transform"] is None
    assert config["base_model_name_or_path"] == "LLaDA2.1-mini"
    assert torch.equal(load_file(tmp_path / "peft" / "markers.safetensors")["markers"], model.markers)


def test_an_adapter_of_the_marked_pass_goes_to_peft_but_not_into_the_weights(run, ours, adapter, tmp_path):
    folder, _ = adapter("marked")
    load_model(ours, "cpu", torch.float32, folder)  # as the other scripts do
    line = run.fails("--src", ours, "--adapter", folder, "--to", "hf", "--out", tmp_path / "merged")
    assert "marked pass only" in line and not (tmp_path / "merged").exists()
    run("--adapter", folder, "--to", "peft", "--out", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["layers_to_transform"] == [2, 3] and config["layers_pattern"] == "layers"
    assert len(load_file(tmp_path / "peft" / "adapter_model.safetensors")) == 8
    with safe_open(tmp_path / "peft" / "markers.safetensors", "pt") as f:
        assert f.metadata() == {"n_last": "2", "lora_scope": "marked"}


def test_refused_adapters(run, ours, adapter, tmp_path):
    folder, _ = adapter()
    out = ("--to", "hf", "--out", tmp_path / "merged", "--src", ours, "--adapter")
    assert "no adapter" in run.fails(*out, tmp_path / "nowhere")
    settings = json.loads((folder / "adapter.json").read_text())
    (folder / "adapter.json").write_text(json.dumps(settings | {"lora_r": 5}))
    assert "not of rank 5" in run.fails(*out, folder)
    (folder / "adapter.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "lora_alpha"}))
    assert "lora_alpha is missing" in run.fails(*out, folder)
    (folder / "adapter.json").write_text(json.dumps(settings | {"model": settings["model"] | {"n_layer": 5}}))
    assert "layers.4.attn.proj.lora_A is missing" in run.fails(*out, folder)
    (folder / "adapter.json").write_text(json.dumps(settings))
    whole = load_file(folder / "adapter.safetensors")
    save_file(whole | {"noise": torch.zeros(16, 64)}, folder / "adapter.safetensors")
    assert "--chain_noise" in run.fails(*out, folder)
    state = {k: torch.zeros(4, 5) if k.endswith("lora_A") else v for k, v in whole.items()}
    save_file(state, folder / "adapter.safetensors")
    assert "[128, 5], " in run.fails(*out, folder)
    assert not (tmp_path / "merged").exists()


# ---------------------------------------------------------------------------------------------------------------------
# damage


def cut(src: Path) -> None:
    data = (src / "b.safetensors").read_bytes()
    (src / "b.safetensors").write_bytes(data[:-1000])


def edit(change):
    """Rewrite the folder with changed tensors."""

    def damage(src: Path) -> None:
        tensors = golden_tensors()
        change(tensors)
        shutil.rmtree(src)
        released(src, tensors)

    return damage


def stack_experts(tensors: dict) -> None:
    for side in ("gate", "up", "down"):
        name = "model.layers.1.mlp.experts.{}" + f".{side}_proj.weight"
        tensors[f"model.layers.1.mlp.experts.{side}_proj"] = torch.stack(
            [tensors.pop(name.format(e)) for e in range(16)]
        )


def drop_from_file(src: Path) -> None:
    tensors = load_file(src / "a.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, src / "a.safetensors")


def drop_from_index(src: Path) -> None:
    index = json.loads((src / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (src / INDEX).write_text(json.dumps(index))


K, V = "model.layers.2.mlp.experts.9.up_proj.weight", torch.zeros(16, 64)
DAMAGE = {
    "cut shard": (cut, ["b.safetensors is cut short", "model."]),
    "missing shard": (lambda s: (s / "b.safetensors").unlink(), ["b.safetensors is missing", "model."]),
    "not safetensors": (lambda s: (s / "a.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"), ["a.safetensors"]),
    "empty shard": (lambda s: (s / "a.safetensors").write_bytes(b""), ["a.safetensors"]),
    "missing tensor": (edit(lambda t: t.pop(K)), [K, "missing"]),
    "missing in file": (drop_from_file, ["a.safetensors", "model.layers.0.mlp.up_proj.weight", "missing"]),
    "missing in index": (drop_from_index, ["b.safetensors", "model.norm.weight", "index"]),
    "extra tensor": (edit(lambda t: t.update({"model.extra.weight": V})), ["model.extra.weight", ".safetensors"]),
    "extra layer": (edit(lambda t: t.update({K.replace("2", "4", 1): V})), ["model.layers.4.", ".safetensors"]),
    "wrong shape": (edit(lambda t: t.update({K: V.T})), [K, "[64, 16]", "[16, 64]", ".safetensors"]),
    "mixed dtypes": (edit(lambda t: t.update({K: V.bfloat16()})), [K, "BF16", ".safetensors"]),
    "quantised": (edit(lambda t: t.update({K: V.to(torch.float8_e4m3fn)})), [K, "F8_E4M3", ".safetensors"]),
    "stacked experts": (edit(stack_experts), ["experts.", "stacked", ".safetensors"]),
    "no config": (lambda s: (s / "config.json").unlink(), ["config.json"]),
    "bad config": (lambda s: (s / "config.json").write_text("{"), ["config.json", "JSON"]),
    "no weights": (lambda s: [p.unlink() for p in (*s.glob("*.safetensors"), s / INDEX)], ["model.safetensors"]),
    "bad index": (lambda s: (s / INDEX).write_text('{"weight_map": []}'), [INDEX]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints(name, run, tmp_path):
    damage, says = DAMAGE[name]
    src = released(tmp_path / "src")
    damage(src)
    line = run.fails("--src", src, "--out", tmp_path / "out")
    assert all(word in line for word in says), line
    assert not (tmp_path / "out").exists()


def test_the_same_tensor_in_two_files(run, tmp_path):
    src = released(tmp_path / "src")
    save_file(load_file(src / "b.safetensors") | {"lm_head.weight": torch.zeros(320, 64)}, src / "b.safetensors")
    line = run.fails("--src", src, "--out", tmp_path / "out")
    assert "b.safetensors: lm_head.weight is also in a.safetensors" in line


@pytest.mark.parametrize(
    "field, value",
    [
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("hidden_act", "gelu"),
        ("score_function", "softmax"),
        ("use_qk_norm", False),
        ("norm_topk_prob", False),
        ("norm_head", True),
        ("norm_softmax", True),
        ("use_sliding_window", True),
        ("moe_router_enable_expert_bias", False),
        ("router_dtype", "bf16"),
        ("attention_dropout", 0.1),
        ("embedding_dropout", 0.1),
        ("output_dropout", 0.1),
        ("use_rmsnorm", False),
        ("using_split_qkv_in_self_attention", True),
        ("partial_rotary_factor", 1.0),
        ("partial_rotary_factor", "0.5"),
        ("rotary_dim", 16),
        ("model_type", "llama"),
        ("architectures", ["LLaDAModelLM"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("attention_sink", True),
        ("eos_token_id", 7),
        ("num_hidden_layers", "4"),
        ("num_hidden_layers", ...),
        ("use_bias", ...),
        ("use_bias", 0),
        ("n_group", 0),
        ("n_group", 3),
        ("rms_norm_eps", None),
    ],
)
def test_config_fields_are_refused_by_name(field, value, run, tmp_path):
    src = released(tmp_path / "src", **{field: value})
    line = run.fails("--src", src, "--out", tmp_path / "out")
    assert field in line and not (tmp_path / "out").exists()


def test_config_fields_that_may_be_absent_or_agree(run, tmp_path):
    src = released(tmp_path / "src", rotary_dim=..., use_qk_norm=True, eos_token_id=305, torch_dtype="float32")
    run("--src", src, "--out", tmp_path / "out")
    cfg = load_model(tmp_path / "out", "cpu", torch.float32).cfg
    assert cfg.rotary_dim == 8 and isinstance(cfg.rope_theta, float) and cfg.n_last == Config.n_last


# ---------------------------------------------------------------------------------------------------------------------
# output folders and flags


def test_an_interrupted_conversion_is_no_checkpoint_and_runs_again(run, ours, tmp_path, monkeypatch, capsys):
    out, write = tmp_path / "out", convert_weights.write_shard

    def stop(path, tensors):
        if "00004-of" in path.name:
            raise KeyboardInterrupt
        write(path, tensors)

    monkeypatch.setattr(convert_weights, "write_shard", stop)
    assert "interrupted" in run.fails("--src", GOLDEN, "--out", out)
    assert len(list(out.iterdir())) == 3
    with pytest.raises(SystemExit) as refused:
        load_model(out, "cpu", torch.float32)
    assert refused.value.code == 2 and "config.json" in capsys.readouterr().err
    monkeypatch.setattr(convert_weights, "write_shard", write)
    (out / ".model-00004-of-00006.safetensors.1.tmp").write_bytes(b"left by a run that was killed")
    run("--src", GOLDEN, "--out", out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in ours.iterdir()}


def test_output_folders_that_hold_something(run, ours, tmp_path, monkeypatch):
    before = {p.name: p.stat().st_mtime_ns for p in ours.iterdir()}
    assert "already holds" in run.fails("--src", GOLDEN, "--out", ours)
    assert "already holds" in run.fails("--src", ours, "--to", "hf", "--out", ours)
    assert before == {p.name: p.stat().st_mtime_ns for p in ours.iterdir()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert "thesis.txt" in run.fails("--src", GOLDEN, "--out", tmp_path / "mine")
    assert "cannot write" in run.fails("--src", GOLDEN, "--out", tmp_path / "mine" / "thesis.txt" / "out")
    monkeypatch.setattr(convert_weights.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    assert "are needed" in run.fails("--src", GOLDEN, "--out", tmp_path / "full")


@pytest.mark.parametrize(
    "args, says",
    [
        ([], "--out"),
        (["--out", "x"], "--src"),
        (["--src", GOLDEN], "--out"),
        (["--to", "peft", "--out", "x"], "--adapter"),
        (["--src", GOLDEN, "--out", "x", "--adapter", "a"], "--adapter"),
        (["--src", GOLDEN, "--out", "x", "--to", "hf", "--mask_id", "1"], "--mask_id"),
        (["--src", GOLDEN, "--out", "x", "--to", "onnx"], "onnx"),
        (["--src", "nowhere", "--out", "x"], "nowhere"),
        (["--src", GOLDEN, "--out", "x", "--to", "hf"], "released checkpoint"),
    ],
)
def test_wrong_flags(args, says, run):
    assert says in run.fails(*args)
    assert not Path("x").exists()


def test_converting_twice_says_so(run, ours, tmp_path):
    assert "already in our layout" in run.fails("--src", ours, "--out", tmp_path / "out")
