"""Int8 weights: what they stand for, and the same model through them.

pytest tests/released/test_int8.py        # CPU, seconds
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from common import ROOT, caller, random_ids, tiny_model
from safetensors.torch import load_file, save_file

import checkpoint
import convert_weights
import sample
import train
from checkpoint import load_model, save_model
from lib.util import Mistake
from model import Linear, Model, MoE
from released import export, int8

NAMES, GOLDEN = ROOT / "assets" / "names", ROOT / "tests" / "data" / "golden_a"
DOWN = "layers.2.mlp.down.weight"


@pytest.fixture
def decode(monkeypatch, capsys):
    return caller(sample, monkeypatch, capsys)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> Path:
    """assets/names in int8."""
    folder = tmp_path_factory.mktemp("int8") / "names"
    int8.convert(NAMES, folder)
    shutil.copytree(NAMES / "head", folder / "head")
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A mixture of experts in int8."""
    folder = tmp_path_factory.mktemp("experts") / "golden"
    int8.convert(GOLDEN, folder)
    return folder


@pytest.fixture(scope="module")
def names_as_floats(names, tmp_path_factory) -> Path:
    """The floats that the int8 folder stands for, as an ordinary checkpoint."""
    folder = tmp_path_factory.mktemp("floats") / "names"
    shutil.copytree(NAMES, folder)
    model = as_floats(load_model(names, "cpu", torch.float32))
    checkpoint.save_tensors(folder / "model.safetensors", checkpoint.stored(model))
    config = json.loads((folder / "config.json").read_text())
    config["fingerprint"] = checkpoint.fingerprint(NAMES)  # so that the head of the shipped base fits
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantise(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return numbers.float() * scale.float()[..., None]


def as_floats(small: Model) -> Model:
    """An ordinary model with the float32 matrices that the int8 ones stand for."""
    state = small.state_dict()
    floats = {}
    for name, tensor in state.items():
        if tensor.dtype == torch.int8:
            tensor = dequantise(tensor, state[f"{name}_scale"])
        if not name.endswith("_scale"):
            floats[name] = tensor
    model = Model(small.cfg)
    model.load_state_dict(floats)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def random_matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_pass(model: Model, ids: torch.Tensor, bundle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of Stage A and of Stage B."""
    ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
    h = model.prefix(ids, ctx)
    return model.head(model.last_n(h, ctx)), model.head(model.coordinate(h, bundle, ctx, model.cfg.n_rounds))


# ---------------------------------------------------------------------------------------------------------------------
# numbers


def test_a_matrix_by_hand():
    # 63.5 = 127 / 2, so the first row's scale is 1/2; halves go to the even number; a row of zeros has scale 1
    w = torch.tensor([[63.5, -1.0, 0.25, 0.75], [0.0, 0.0, 0.0, 0.0], [-254.0, 3.0, 1.9, 127.0]])
    numbers, scale = int8.quantise(w)
    assert numbers.tolist() == [[127, -2, 0, 2], [0, 0, 0, 0], [-127, 2, 1, 64]]
    assert scale.tolist() == [0.5, 1.0, 2.0]
    assert (numbers.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    back = [[63.5, -1.0, 0.0, 1.0], [0.0] * 4, [-254.0, 4.0, 2.0, 128.0]]
    assert dequantise(numbers, scale).tolist() == back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_is_off_by_more_than_half_a_scale(dtype):
    w = (random_matrix(3, 500, 64) * torch.logspace(-20, 20, 500)[:, None]).to(dtype)
    numbers, scale = int8.quantise(w)
    error = (w.double() - numbers.double() * scale.double()[..., None]).abs()
    assert (error <= 0.5000001 * scale.double()[..., None]).all()
    # the scale is the least bfloat16 for which the largest number fits
    largest = w.double().abs().amax(-1)
    one_less = torch.nextafter(scale, torch.zeros_like(scale)).double()
    assert (largest <= 127 * scale.double() * (1 + 1e-7)).all() and (largest > 127 * one_less * (1 - 1e-7)).all()


@pytest.mark.parametrize("rows", [1, 3, 12, 13, 40])
def test_products_and_gradients_are_those_of_the_floats(rows, monkeypatch):
    numbers, scale = int8.quantise(random_matrix(70, 32))
    w = numbers.float() * scale.float()[:, None]
    x, g = random_matrix(rows, 32, seed=1), random_matrix(rows, 70, seed=2)
    for unpacked in (2**20, 320):  # the matrix whole, and ten rows at a time
        monkeypatch.setitem(int8.UNPACKED, "cpu", unpacked)
        torch.testing.assert_close(int8.multiply(x, numbers, scale), x @ w.T)
        torch.testing.assert_close(int8.multiply_back(g, numbers, scale), g @ w)
        # in bfloat16, by the kernel for few rows: a sum of 32 products, rounded at most twice
        y = int8.multiply(x.bfloat16(), numbers, scale)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), x.bfloat16().float() @ w.T, rtol=2**-7, atol=2**-7)


def test_the_kernel_gets_only_what_it_can_read():
    """A matrix of 24 columns has no multiple of 16: the kernel would read past its end."""
    numbers, scale = int8.quantise(random_matrix(5, 24))
    x = random_matrix(2, 24, seed=1).bfloat16()
    assert not int8.kernel_takes(x, numbers) and int8.kernel_takes(x[:, :16], numbers[:, :16])
    expected = x.float() @ dequantise(numbers, scale).T
    torch.testing.assert_close(int8.multiply(x, numbers, scale).float(), expected, rtol=2**-6, atol=2**-6)
    # nor one that begins at an odd address, where the kernel's reads are not allowed
    numbers, scale = int8.quantise(random_matrix(5, 32))
    moved = torch.zeros(5 * 32 + 1, dtype=torch.int8)[1:].view(5, 32).copy_(numbers)
    x = random_matrix(2, 32, seed=1).bfloat16()
    assert not int8.kernel_takes(x, moved) and int8.kernel_takes(x, numbers)
    expected = int8.multiply(x, numbers, scale).float()
    torch.testing.assert_close(int8.multiply(x, moved, scale).float(), expected, rtol=2**-6, atol=2**-6)


def test_sorted_rows_meet_their_matrices():
    """Five matrices, two of which nobody asks for: no matter what is in them."""
    numbers, scale = int8.quantise(random_matrix(5, 8, 16))
    w = dequantise(numbers, scale)
    scale[1], scale[4] = float("nan"), float("nan")
    ends = torch.tensor([2, 2, 3, 7, 7], dtype=torch.int32)
    which = torch.tensor([0, 0, 2, 3, 3, 3, 3])
    x = random_matrix(7, 16, seed=1).requires_grad_()
    y = int8.Product.apply(x, numbers, scale, ends)
    torch.testing.assert_close(y, torch.einsum("mk,mnk->mn", x, w[which]))
    g = random_matrix(7, 8, seed=2)
    (given,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(given, torch.einsum("mn,mnk->mk", g, w[which]))
    # a GPU's way
    torch.testing.assert_close(int8.all_active(x.detach(), numbers, scale, ends, back=False), y.detach())
    torch.testing.assert_close(int8.all_active(g, numbers, scale, ends, back=True), given)


# ---------------------------------------------------------------------------------------------------------------------
# the model


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_that_of_the_floats(tied, tmp_path):
    """Logits of both stages, and the gradients of adapters and markers."""
    original = tiny_model(tied=tied, qkv_bias=True, proj_bias=True)
    save_model(original, tmp_path / "ours")
    int8.convert(tmp_path / "ours", tmp_path / "int8")
    small = load_model(tmp_path / "int8", "cpu", torch.float32)
    plain = as_floats(small)
    kept = {"wte.weight", "norm_f.weight", "layers.2.mlp.router", "layers.0.attn.qkv.bias", "markers"}
    assert all(torch.equal(small.state_dict()[name], original.state_dict()[name]) for name in kept)
    assert (type(small.lm_head) is Linear) == tied

    ids = random_ids(2, 24)
    bundle = torch.arange(24).expand(2, 24) % 3 == 0
    for model in (small, plain):
        model.add_lora(4, 8, torch.Generator().manual_seed(0))
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.data.copy_(0.1 * random_matrix(*p.shape))
    expected, given = a_pass(plain, ids, bundle), a_pass(small, ids, bundle)
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for logits_a, logits_b in (given, expected):
        (logits_a.log_softmax(-1)[..., 0].sum() + logits_b.log_softmax(-1)[..., 1].sum()).backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    assert {n for n, p in small.named_parameters() if p.requires_grad} == gradients.keys()
    for name, p in small.named_parameters():
        if p.requires_grad:
            assert p.grad.abs().max() > 0, name
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


def test_only_active_experts_are_read(experts):
    model = load_model(experts, "cpu", torch.float32)
    layer = next(module for module in model.modules() if isinstance(module, MoE))
    x = random_matrix(1, model.cfg.n_embd)
    chosen, weights = layer.route(x)
    expected = layer.experts(x, chosen, weights)
    others = torch.ones(model.cfg.n_expert, dtype=torch.bool).index_fill(0, chosen[0], False)
    assert others.sum() == model.cfg.n_expert - model.cfg.n_active
    for scale in ("gate_up_scale", "down_scale"):
        poisoned = getattr(layer, scale).masked_fill(others[:, None], float("nan"))
        setattr(layer, scale, poisoned)
    assert torch.equal(layer.experts(x, chosen, weights), expected)


def test_decoding_is_that_of_the_floats(names, names_as_floats, decode):
    """sample.py, by --ckpt alone, and with a head on top."""
    prompts = [arg for text in ("ARABIC LIGATURE", "GREEK SMALL", "CJK") for arg in ("--prompt", text)]
    for part in (".", "head"):
        runs = []
        for folder in (names, names_as_floats):
            out = decode("--ckpt", folder / part, *prompts, "--gen_length", 24, "--json")
            runs.append([json.loads(line) for line in out.splitlines()])
        for a, b in zip(*runs, strict=True):
            assert a["tokens"] == b["tokens"] and a["nfe"] == b["nfe"]
    bf16 = decode("--ckpt", names, *prompts, "--gen_length", 24, "--dtype", "bf16", "--json")
    assert len(bf16.splitlines()) == 3


def test_adapters_train_as_on_the_floats(names, names_as_floats, monkeypatch, capsys, tmp_path):
    call = caller(train, monkeypatch, capsys)
    learned, logs = {}, {}
    for kind, folder in (("int8", names), ("floats", names_as_floats)):
        out = tmp_path / kind
        call("--init_from", folder, "--n_last", 2, "--max_iters", 2, "--batch_size", 4,
             "--learning_rate", 1e-3, "--out_dir", out)  # fmt: skip
        learned[kind] = load_file(out / "adapter.safetensors")
        logs[kind] = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert learned["int8"].keys() == learned["floats"].keys()

    # losses and gradients; not the weights, whose first steps by AdamW have the size of the learning rate
    steps = [[r for r in log if "grad_norm" in r] for log in logs.values()]
    assert len(steps[0]) == 2
    for a, b in zip(*steps, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["loss"] > 0
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3) and a["grad_norm"] > 0
    model = load_model(tmp_path / "int8", "cpu", torch.bfloat16)
    assert model.layers[0].attn.qkv.lora_B.any() and model.markers.any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_stay_in_their_files(experts):
    model = load_model(experts, "cpu", torch.bfloat16)
    maps = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split("-") + [line] for line in maps if str(experts) in line]
    for tensor in (model.layers[1].mlp.gate_up, model.lm_head.weight, model.wte.weight):
        at = tensor.data_ptr()
        assert tensor.dtype != torch.int8 or at % int8.KERNEL_WIDTH == 0
        assert any(int(start, 16) <= at < int(rest.split()[0], 16) for start, rest, *_ in places)


# ---------------------------------------------------------------------------------------------------------------------
# converting


def test_released_and_our_layout_give_the_same_folder(tmp_path):
    int8.convert(GOLDEN, tmp_path / "a")
    convert_weights.convert(GOLDEN, tmp_path / "ours")
    int8.convert(tmp_path / "ours", tmp_path / "b")
    assert {p.name for p in (tmp_path / "a").iterdir()} == {p.name for p in (tmp_path / "b").iterdir()}
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config.pop("fingerprint") == checkpoint.fingerprint(tmp_path / "ours")  # whose adapters fit
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == config
    for path in (tmp_path / "a").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    # every matrix, and nothing else
    ours, small = tensors(tmp_path / "ours"), tensors(tmp_path / "a")
    matrices = {name for name, t in small.items() if t.dtype == torch.int8}
    assert {name.removesuffix("_scale") for name in small.keys() - ours.keys()} == matrices
    assert len(matrices) == 2 * 4 + 2 + 3 * 4 + 1  # attention, the dense layer, routed and shared experts, the head
    for name, tensor in ours.items():
        if name in matrices:
            numbers, scale = int8.quantise(tensor)
            assert torch.equal(small[name], numbers) and torch.equal(small[f"{name}_scale"], scale)
        else:
            assert torch.equal(small[name], tensor)


def test_what_is_not_converted(names, tmp_path, monkeypatch, capsys):
    convert = caller(int8, monkeypatch, capsys)
    assert "already" in convert.fails("--src", names, "--out", tmp_path / "out")
    broken = shutil.copytree(NAMES, tmp_path / "broken", ignore=shutil.ignore_patterns("head"))
    weights = load_file(broken / "model.safetensors")
    weights[DOWN][2, 3] = float("inf")
    save_file(weights, broken / "model.safetensors")
    line = convert.fails("--src", broken, "--out", tmp_path / "out")
    assert DOWN in line and "infinite" in line
    # int8 is no way back to floats
    hf = caller(export, monkeypatch, capsys)
    assert "quantised" in hf.fails("--to", "hf", "--src", names, "--out", tmp_path / "hf")


DAMAGE = {
    "no scale": (lambda t: t.pop(f"{DOWN}_scale"), f"{DOWN}_scale: no such tensor there"),
    "floats for numbers": (lambda t: t.update({DOWN: t[DOWN].float()}), f"{DOWN} is stored as torch.float32"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_refused(name, names, tmp_path):
    change, says = DAMAGE[name]
    folder = shutil.copytree(names, tmp_path / "damaged", ignore=shutil.ignore_patterns("head"))
    path = next(p for p in folder.glob("*.safetensors") if DOWN in load_file(p))
    found = {k: v.clone() for k, v in load_file(path).items()}
    change(found)
    save_file(found, path)
    with pytest.raises(Mistake, match=says):
        load_model(folder, "cpu", torch.float32)
