"""A step of decoding waits for the device once. `pytest tests/test_device.py`"""

import pytest
import torch
from common import EOS, MASK, tiny_config

import sample
from model import Model
from sample import Decoding, generate


class Stop(Exception):
    pass


@pytest.mark.parametrize("n_rounds", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_host_synchronisation_a_step(n_rounds, temperature, monkeypatch):
    """On the meta device nothing has a value: whatever asks for one (item, bool, nonzero, a copy to the host) raises.
    The one .tolist() that decides whether to go on is answered by hand: no block closes, everything else is so."""
    with torch.device("meta"):
        model = Model(tiny_config()).to(torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    steps, asked = [], []

    def counted_step(*args):
        steps.append(1)
        return denoise(*args)

    def answer(flags):
        asked.append(tuple(flags.shape))
        if len(asked) == 5:
            raise Stop
        return [[False] * 3] + [[True] * 3] * (len(flags) - 1)

    denoise = sample.denoise
    monkeypatch.setattr(sample, "denoise", counted_step)
    monkeypatch.setattr(torch.Tensor, "tolist", answer)
    d = Decoding(gen_length=16, n_rounds=n_rounds, temperature=temperature)
    with pytest.raises(Stop):
        generate(model, [[1], [2, 3], [EOS, MASK, 4]], d)
    assert asked == [(asked[0][0], 3)] * 5 and len(steps) == 5
