"""What a decode costs, by hand. `pytest tests/beyond/test_costs.py`

Two layers of 8 channels, 2 heads and 1 key/value head of 4; a vocabulary of 10; blocks of 4:

    attention       qkv 8 x (2 + 1 + 1) 4 = 128, proj 8 x 8 = 64              192
    dense layer     attention, SwiGLU of 3: 8 x 6 + 3 x 8 = 72                264
    expert layer    attention, router 4 x 8 = 32, 2 of 4 experts of 5, each
                    8 x 10 + 5 x 8 = 120, and the shared one                  584
    N, VC                                                                     848, 80
"""

import pytest
import torch

from beyond import joint_head, sampling_head
from beyond.costs import SHADOWS, VERIFICATION, costs, full_forward
from checkpoint import new_model
from lib.util import generator
from model import Config

FORWARDS = {"full": 3, "partial": 0.75, "commit": 2}


def model(**changes):
    sizes = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=8, head_dim=4, vocab_size=10, d_dense=3, d_expert=5)
    experts = dict(n_expert=4, n_active=2, n_group=2, topk_group=1, n_shared=1, rotary_dim=4)
    return new_model(Config(**sizes | experts | dict(block_length=4, n_last=1) | changes), generator("costs"))


def give_head(extension, **own):
    """A head of one block, its SwiGLU of 6 channels: attention 192, MLP 8 x 12 + 6 x 8 = 144."""
    headed = model()
    extension.attach(headed, dict(head_layers=1, width=6) | own)
    return headed


def test_a_full_forward():
    assert full_forward(model()) == 4 * (848 + 80)
    assert full_forward(model(n_active=1)) == 4 * (848 - 120 + 80)
    assert full_forward(model(tied=True)) == 4 * (848 + 80)


def test_the_papers_stage_b():
    """The last layer and the LM head at all 4 positions, three quarters of a time; commit forwards have no LM head."""
    found = costs(model(), FORWARDS, looks=1)
    assert found == {"all": 3 + 2 + 0.75 / 2, "mult": 3 * 3712 + 2 * 3392 + 0.75 * 4 * (584 + 80), "serial": 6}


def test_a_joint_head():
    """One look at 3 of 4 positions: all 4 are read."""
    found = costs(give_head(joint_head, tau_keep=0.5), FORWARDS, looks=1)
    assert found["mult"] == 3 * 3712 + 2 * 3392 + 4 * 192 + 3 * (144 + 80)
    assert found["all"] == 5 + 0.75 / 2 and found["serial"] == 6


def test_a_sampling_head():
    """Two looks, at 2 positions and at 1: 12 states are read each time, 4 of them with drafts (a map of 8 x 8)."""
    found = costs(give_head(sampling_head, looks=2), FORWARDS, looks=2)
    assert found["mult"] == 3 * 3712 + 2 * 3392 + 2 * (12 * 192 + 4 * 64) + 3 * (144 + 80)
    assert found["all"] == 5 + 0.75 / 2 and found["serial"] == 7


def test_a_rule_s_second_reading():
    """3 full and 2 commit forwards, and 2 readings of 4 positions. WINO's shadows are a second block in the same pass,
    with the LM head. S2D2 reads two blocks in a pass of its own: 4 drafts, and 4 masks that alone have the LM head."""
    forwards = {"full": 3, "partial": 0, "commit": 2}
    plain = 3 * 3712 + 2 * 3392
    found = costs(model(), forwards, 2, SHADOWS)
    assert found == {"all": 5 + 2, "mult": plain + 2 * 4 * (848 + 80), "serial": 5}
    found = costs(model(), forwards, 2, VERIFICATION)
    assert found == {"all": 5 + 2 * 2, "mult": plain + 2 * (4 * 848 + 4 * (848 + 80)), "serial": 5 + 2}


def test_left_to_right_a_pass_reads_two_tokens_and_writes_one():
    """3 tokens, the last of which needs no commit forward: none of the other two is counted either."""
    found = costs(model(block_length=1), {"full": 3, "partial": 0, "commit": 2}, looks=0)
    assert found == {"all": 3, "mult": 3 * (2 * 848 + 80), "serial": 3}


@pytest.mark.parametrize("first", [0, 1])
def test_lora_counts_as_merged(first):
    adapted = model()
    adapted.add_lora(2, 4.0, torch.Generator(), first)
    assert costs(adapted, FORWARDS, 1) == costs(model(), FORWARDS, 1)
