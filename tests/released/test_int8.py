"""Int8 weights: what they stand for, and the same model through them. `pytest tests/released/test_int8.py`"""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from common import caller, names_folder, random_adapter, random_ids, random_lora, tiny_model
from resuming import byte_rows

import lib.int8
import train
from checkpoint import load_model, save_model
from decoding import Decoding
from lib.int8 import KERNEL_WIDTH, kernel_takes, multiply, quantise
from lib.util import Mistake, generator, read_json, write_json
from model import Model
from released import int8
from sample import generate


@pytest.fixture(scope="module")
def experts(golden, tmp_path_factory) -> Path:
    """The golden checkpoint in int8."""
    folder = tmp_path_factory.mktemp("int8") / "experts"
    int8.convert(golden, folder)
    return folder


def dequantise(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return numbers.float() * scale.float()[..., None]


def as_floats(small: Model) -> Model:
    """An ordinary model with the float32 matrices that the int8 ones stand for."""
    state = small.state_dict()
    for name in [name for name in state if name.endswith("_scale")]:
        matrix = name.removesuffix("_scale")
        state[matrix] = dequantise(state[matrix], state.pop(name))
    model = Model(small.cfg)
    model.load_state_dict(state, assign=True)
    model.tie()
    return model


def random_matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator("matrix", *shape))


# --- numbers
def test_a_matrix_by_hand():
    # 63.5 = 127 / 2, so the first row's scale is 1/2; halves go to the even number; a row of zeros has scale 1
    w = torch.tensor([[63.5, -1.0, 0.25, 0.75], [0.0, 0.0, 0.0, 0.0], [-254.0, 3.0, 1.9, 127.0]])
    numbers, scale = quantise(w)
    assert numbers.tolist() == [[127, -2, 0, 2], [0, 0, 0, 0], [-127, 2, 1, 64]]
    assert scale.tolist() == [0.5, 1.0, 2.0]
    assert (numbers.dtype, scale.dtype) == (torch.int8, torch.bfloat16)


@pytest.mark.parametrize("rows, columns, shift", [(1, 32, 0), (12, 32, 0), (13, 32, 0), (2, 24, 0), (2, 32, 1)])
def test_products_are_those_of_the_floats(rows, columns, shift, monkeypatch):
    """In bfloat16 by the kernel, for few rows; but of 24 columns, no multiple of 16, it would read past the end, and a
    matrix may not begin at an odd address."""
    numbers, scale = quantise(random_matrix(70, columns))
    w = dequantise(numbers, scale)
    numbers = torch.zeros(70 * columns + shift, dtype=torch.int8)[shift:].view(70, columns).copy_(numbers)
    x = random_matrix(rows, columns)
    assert kernel_takes(x.bfloat16(), numbers) == (rows <= 12 and columns == 32 and shift == 0)
    for unpacked in (2**20, 320):  # the matrix whole, and ten rows at a time
        monkeypatch.setattr(lib.int8, "UNPACKED", unpacked)
        torch.testing.assert_close(multiply(x, numbers, scale), x @ w.T)
        # a sum of products, rounded at most twice
        y = multiply(x.bfloat16(), numbers, scale)
        torch.testing.assert_close(y, (x.bfloat16().float() @ w.T).bfloat16(), rtol=2**-7, atol=2**-7)


# --- the model
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_that_of_the_floats(tied, tmp_path):
    """No weight of a matrix is off by more than half a scale, and all else stays as it is. Through them come the same
    logits of both stages, and the gradients of what learns."""
    original = tiny_model(tied=tied, qkv_bias=True, proj_bias=True)
    save_model(original, tmp_path / "ours")
    int8.convert(tmp_path / "ours", tmp_path / "int8")
    small = load_model(tmp_path / "int8", "cpu", torch.float32)
    plain = as_floats(small)
    scales = {name.removesuffix("_scale"): s for name, s in small.state_dict().items() if name.endswith("_scale")}
    # attention, the dense layer, routed and shared experts, the head
    assert len(scales) == 2 * 4 + 2 + 3 * 4 + (not tied)
    for name, weight in original.state_dict().items():
        off = (plain.state_dict()[name] - weight).abs()
        assert (off <= 0.5001 * scales[name].float()[..., None] if name in scales else off == 0).all(), name

    ids = random_ids(2, 24)
    bundle = torch.arange(24).expand(2, 24) % 3 == 0
    found = []
    for model in (small, plain):
        random_lora(model)
        ctx = model.context(torch.ones_like(ids, dtype=torch.bool))
        h = model.prefix(ids, ctx)
        a = model.logits(model.last_n(h, ctx))
        b = model.logits(model.coordinate(h, bundle, ids, ctx))
        (a.log_softmax(-1)[..., 0].sum() + b.log_softmax(-1)[..., 1].sum()).backward()
        found.append((a, b, {name: p.grad for name, p in model.learned().items()}))
    (a, b, gradients), (plain_a, plain_b, plain_gradients) = found
    torch.testing.assert_close((a, b), (plain_a, plain_b), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients, plain_gradients, rtol=1e-3, atol=1e-4)
    assert all(grad.abs().max() > 0 for grad in gradients.values())


def test_an_adapter_of_the_original_fits(golden, experts, tmp_path):
    """It is told that these are the same weights in another form, and decodes with them in bfloat16."""
    shutil.copytree(experts, tmp_path / "base")
    adapter = random_adapter(tmp_path / "adapter", golden, n_last=2)
    path = tmp_path / "adapter" / "adapter.json"
    about = read_json(path, "adapter") | {"base": "../base"}
    write_json(path, about)
    with pytest.raises(Mistake, match="in another form, delete base_hash"):
        load_model(tmp_path / "adapter", "cpu", torch.bfloat16)
    del about["base_hash"]
    write_json(path, about)
    small = load_model(tmp_path / "adapter", "cpu", torch.bfloat16)
    torch.testing.assert_close(small.learned(), adapter.learned(), rtol=0, atol=0)
    (output,) = generate(small, [[1, 2, 3]], Decoding(gen_length=4))
    assert output.nfe["partial"] > 0


def test_lora_learns_on_it(tmp_path, monkeypatch, capsys):
    """From the command line: trained, saved and loaded."""
    int8.convert(names_folder(tmp_path / "ours"), tmp_path / "int8")
    rows = byte_rows(tmp_path / "rows")
    run = ["--data", rows, "--init_from", tmp_path / "int8", "--batch_size", 4, "--max_iters", 2, "--device", "cpu"]
    call = caller(train, monkeypatch, capsys)
    assert "is int8" in call.fails(*run, "--lora_r", 0, "--out_dir", tmp_path / "none")
    call(*run, "--learning_rate", 0.01, "--out_dir", tmp_path / "out")
    learned = load_model(tmp_path / "out", "cpu", torch.float32).learned()
    assert "layers.0.attn.qkv.lora_B" in learned and all(p.any() for p in learned.values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_stay_in_their_files(experts):
    model = load_model(experts, "cpu", torch.bfloat16)
    maps = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split("-") for line in maps if str(experts) in line]
    for tensor in (model.layers[1].mlp.gate_up, model.lm_head.weight, model.wte.weight):
        at = tensor.data_ptr()
        assert tensor.dtype != torch.int8 or at % KERNEL_WIDTH == 0
        assert any(int(start, 16) <= at < int(rest.split()[0], 16) for start, rest, *_ in places)
