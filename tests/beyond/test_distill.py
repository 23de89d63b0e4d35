"""The Stage A that is taught the chain. `pytest tests/beyond/test_distill.py`"""

import json
from argparse import Namespace

import torch
from common import caller, random_ids, tiny_model
from resuming import goes_on_bit_for_bit
from runs import TOY, a_base
from safetensors.torch import load_file
from test_chain import a_batch, flags

import sample
from beyond import distill
from beyond.chain import chain_target, masks_as_decoded
from corrupt import M, cross_entropy, three_term_loss
from train import batch_context


def test_it_learns_the_teachers_chain_and_its_own_loss():
    """The teacher writes another chain than the model that learns would."""
    model, teacher, x = tiny_model(), tiny_model(seed=1), random_ids(4, 24)
    args = Namespace(**vars(flags()), own_loss=0.5)
    loss, terms = distill.distill_step(model, a_batch(x), args, teacher, chain_target)
    batch = a_batch(x)
    z, kind = masks_as_decoded(model, batch, args)
    masked = kind == M
    ctx = batch_context(model, batch, args)
    h = model.last_n(model.prefix(z, ctx), ctx)[:, :24]
    own, _ = three_term_loss(model, h, x, kind, fill=masked)
    wanted = chain_target(teacher, batch, z, masked, args)
    assert not torch.equal(wanted, chain_target(model, batch, z, masked, args))
    ce = cross_entropy(model, h[masked], wanted[masked]).sum()
    torch.testing.assert_close(loss, ce + 0.5 * own)
    assert terms["chain"][1] == terms["m2t_A"][1] == masked.sum()


def test_it_trains_resumes_and_is_a_checkpoint_of_its_own(tmp_path, monkeypatch, capsys):
    base = a_base(tmp_path, monkeypatch, capsys)
    (base / "names.json").write_text("{}")
    goes_on_bit_for_bit(distill, [*TOY, "--init_from", base, "--beam", 2], tmp_path, monkeypatch, capsys)
    given = ["--ckpt", tmp_path / "whole", "--prompt_ids", "4,4,5", "--gen_length", 4, "--n_rounds", 0, "--json"]
    assert json.loads(caller(sample, monkeypatch, capsys)(*given))["tokens"]

    # none of its weights is the base's any more
    learned, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", base))
    changed = {name for name in learned if not torch.equal(learned[name], before[name])}
    assert {name for name in learned if "attn" in name or "router" in name} <= changed
    assert (tmp_path / "whole" / "names.json").read_text() == "{}"  # what lay beside it

    run = [*TOY, "--init_from", base, "--out_dir", tmp_path / "run", "--corruption", "draft"]
    assert "--corruption mask" in caller(distill, monkeypatch, capsys).fails(*run)
