"""The joint head on Stage A's final states, and the Stage A that is taught the same chain (distill).
`pytest tests/beyond/test_joint_head.py`
"""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, caller, random_ids, settings, tiny_model
from runs import TOY, a_base, goes_on_bit_for_bit
from safetensors.torch import load_file
from test_chain import a_batch, endless_model

import sample
from beyond import chain, distill, joint_head
from beyond.chain import bundle_as_decoded, chain_target, masks_as_decoded
from beyond.joint_head import JointHead, joint_head_step
from corrupt import M, cross_entropy, three_term_loss
from lib.settings import build_parser
from lib.util import generator
from model import Context, rotary
from sample import Decoding, generate
from train import batch_context, clean_tokens

FACTORISED = Decoding(gen_length=21, tau_m2t=0.3, tau_t2t=None, n_rounds=0, max_post_steps=0)
WITH_HEAD = replace(FACTORISED, n_rounds=1)


def with_head(std=0.3, **overrides):
    model = endless_model(**overrides)
    model.second_look = JointHead(model.cfg, width=24)
    model.second_look.init_weights(generator("head"))
    for name, p in model.second_look.named_parameters():
        p.data += std * torch.randn(p.shape, generator=generator(name))
    return model


def context(model, ids):
    return model.context(torch.ones_like(ids, dtype=torch.bool))


def flags(**values):
    parser = build_parser("")
    chain.add_flags(parser)
    parser.set_defaults(corruption="mask", confident_share=0.75, s_min=2, s_max=8, own_loss=0.5)
    return settings(parser, **values)


# --- decoding
def plain_decode(model, prompt, d):
    """One row, no cache, positions one by one -> tokens, forwards, the share of a block that the head looked at."""
    B, ids, full, share = model.cfg.block_length, list(prompt), 0, 0.0
    commits = 0
    for start in range(len(prompt) // B * B, len(prompt) + d.gen_length, B):
        z = torch.tensor([(ids + [MASK] * B)[: start + B]])
        before = None
        # [M] itself may be written, for good
        while (z[0, start:] == MASK).any() and (before is None or not torch.equal(z, before)):
            before = z.clone()
            h = model.last_n(model.prefix(z, context(model, z)), context(model, z))[:, start:]
            conf, token = model.head(h)[0].softmax(-1).max(-1)
            masked = [i for i in range(B) if z[0, start + i] == MASK]
            bundle = [i for i in masked if conf[i] > d.tau_m2t] or [max(masked, key=lambda i: conf[i])]
            writes = {i: int(token[i]) for i in bundle}
            if len(bundle) > 1:
                first = max(bundle, key=lambda i: conf[i])
                conf, again = second_look_by_position(model, h[0], bundle)
                wanted = {i: int(t) for i, t in zip(bundle, again, strict=True)}
                sure = {i for i, c in zip(bundle, conf, strict=True) if c > d.tau_keep}
                if d.tau_keep == 0:
                    writes = wanted
                elif wanted[first] != token[first]:
                    writes = {first: int(token[first])}
                else:
                    writes = {i: wanted[i] for i in sure | {first}}
                share += len(bundle) / B
            for i, t in writes.items():
                z[0, start + i] = t
            full += 1
        ids = z[0].tolist()
        commits += start + B < len(prompt) + d.gen_length and MASK not in ids[start:]
    return ids[len(prompt) : len(prompt) + d.gen_length], full, commits, share


def second_look_by_position(model, h, bundle):
    """h (B, C): each bundle position as a query of its own."""
    y = F.rms_norm(h, h.shape[-1:])
    ctx = Context(*rotary(model.cfg, torch.arange(len(h)), torch.float32), None)
    block = model.second_look.block
    attended = block.attn(block.norm_1(y)[None], ctx)[0]
    new = []
    for i in bundle:
        x = y[i] + attended[i]
        new.append(x + block.mlp(block.norm_2(x)))
    return model.head(torch.stack(new)).softmax(-1).max(-1)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("tau_keep", [0.0, 0.5, 1.0])
def test_the_decode_is_the_plain_one(tau_keep, cached):
    model = with_head()
    prompts = [random_ids(1, n, n)[0].tolist() for n in (3, 8, 13)]
    for tau in (0.1, 0.3):
        d = replace(WITH_HEAD, tau_m2t=tau, tau_keep=tau_keep)
        for prompt, out in zip(prompts, generate(model, prompts, d, cached=cached), strict=True):
            tokens, full, commits, share = plain_decode(model, prompt, d)
            assert (out.tokens, out.nfe["full"], out.nfe["commit"]) == (tokens, full, commits)
            assert out.nfe["partial"] == pytest.approx(share, abs=1e-6) and share > 0
            assert out.nfe["partial"] <= out.nfe["looks"] <= full
    assert model.partial_cost == 1 / 4


def test_a_fresh_head_is_stage_a_and_a_gate_above_all_writes_one_token_a_step():
    base, prompt = endless_model(), random_ids(1, 5)[0].tolist()
    fresh = with_head(std=0.0)
    together = generate(fresh, [prompt], WITH_HEAD)[0]
    assert together.tokens == generate(base, [prompt], FACTORISED)[0].tokens and together.nfe["partial"] > 0
    one = generate(fresh, [prompt], replace(WITH_HEAD, tau_m2t=-1, tau_keep=1.0))[0]
    assert one.tokens == generate(base, [prompt], replace(FACTORISED, tau_m2t=1.0))[0].tokens
    assert one.nfe["full"] == 27  # 3 masks in the prompt's block, then 24


def test_a_single_token_is_not_looked_at_again():
    prompt = random_ids(1, 5)[0].tolist()
    out = generate(with_head(), [prompt], replace(WITH_HEAD, tau_m2t=1.0))[0]
    base = generate(endless_model(), [prompt], replace(FACTORISED, tau_m2t=1.0))[0]
    assert out.tokens == base.tokens and out.nfe["partial"] == out.nfe["looks"] == 0


def test_each_row_and_block_is_looked_at_as_if_alone():
    head, h = with_head().second_look, torch.randn(5, 8, 64, generator=generator("h"))
    bundle = random_ids(5, 8, 3, 2).bool()
    alone = [head(h[i : i + 1], bundle[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(head(h, bundle), torch.cat(alone))


def test_edits_are_stage_as():
    """Where nothing is masked any more, and beside a bundle, the released edits go on as they do without Stage B."""
    model, prompt = with_head(std=0.0), random_ids(1, 5)[0].tolist()
    d = replace(FACTORISED, tau_t2t=0.0, max_post_steps=3)
    edits = []
    ours = generate(model, [prompt], replace(d, n_rounds=1), on_step=lambda rows, s: edits.append(s.edited.sum()))[0]
    assert ours.tokens == generate(model, [prompt], d)[0].tokens and sum(edits) > 0


def test_from_the_left_a_prefix_of_the_bundle_is_kept():
    """All masks are looked at; those are written whose product of confidences passes, and the first one always."""
    model = with_head(order="leftmost")
    d = replace(WITH_HEAD, gen_length=8, tau_m2t=-1.0, tau_keep=0.01)
    steps = []
    for seed in range(24):
        generate(model, random_ids(1, 8, seed).tolist(), d, on_step=lambda rows, s: steps.append(s))
    lengths = set()
    others = 0
    for s in steps:
        masked = s.stage_a.z[0] == MASK
        written = s.look.written[0]
        n = int(written.sum())
        assert torch.equal(written, masked & (masked.cumsum(0) <= n)) and torch.equal(
            s.after[0] == MASK, masked ^ written
        )
        if masked.sum() < 2:
            continue

        # the first is Stage A's; nothing goes with it where the head would write another
        logits = model.head(model.second_look(s.stage_a.states, masked[None]))
        conf, token = logits.softmax(-1).max(-1)
        first = int(s.stage_a.token[0, masked][0])
        assert s.after[0, written][0] == first
        if first != token[0]:
            assert n == 1
            others += 1
            continue

        # the product passes up to the last that was written, and not with the next
        assert torch.equal(s.after[0, written], token[:n])
        together = conf.double().cumprod(0)
        assert n == 1 or together[n - 1] > 0.01
        assert n == len(together) or together[n] <= 0.01
        lengths.add(n)
    assert len(lengths) > 1 and others > 0


# --- training
def test_the_head_is_trained_on_what_it_decodes():
    """The loss is the cross-entropy of the head to its target, block by block, from states with a clean context; and
    bundles of one are left out."""
    model, args, x = with_head(std=0.1), flags(confident_share=0.0, s_min=1), random_ids(8, 24)
    joint_head.head_alone(model, args)
    loss, terms = joint_head_step(model, a_batch(x), args, target=clean_tokens)
    batch = a_batch(x)
    z, kind = masks_as_decoded(model, batch, args)
    bundle = bundle_as_decoded(model, batch, z, kind == M, args)
    ce, sizes = [], set()
    for row, start in [(r, s) for r in range(8) for s in (0, 8, 16)]:
        ids = torch.cat([x[row, :start], z[row, start : start + 8]])[None]
        h = model.last_n(model.prefix(ids, context(model, ids)), context(model, ids))[:, start:]
        here = bundle[row, start : start + 8]
        sizes.add(int(here.sum()))
        if here.sum() > 1:
            logits = model.head(model.second_look(h, here[None]))
            ce.append(F.cross_entropy(logits, x[row, start : start + 8][here], reduction="none"))
    ce = torch.cat(ce)
    assert sizes >= {0, 1, 2}
    torch.testing.assert_close(loss, ce.sum(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(terms["head"][0], ce.detach().sum(), rtol=1e-4, atol=1e-3)
    assert terms["head"][1] == len(ce)
    loss.backward()
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None} == {"second_look"}


def test_a_batch_without_a_bundle_has_no_loss():
    model, args = with_head(), flags(s_min=1, s_max=1)
    loss, terms = joint_head_step(model, a_batch(random_ids(2, 16)), args, target=chain_target)
    loss.backward()
    assert loss == 0 and terms["head"].tolist() == [0, 0]


def test_a_distilled_stage_a_learns_the_teachers_chain_and_its_own_loss():
    """The teacher writes another chain than the model that learns would."""
    model, teacher, args, x = tiny_model(), tiny_model(seed=1), flags(), random_ids(4, 24)
    loss, terms = distill.distill_step(model, a_batch(x), args, teacher, chain_target)
    batch = a_batch(x)
    z, kind = masks_as_decoded(model, batch, args)
    bundle = bundle_as_decoded(teacher, batch, z, kind == M, args)
    ctx = batch_context(model, batch, args)
    h = model.last_n(model.prefix(z, ctx), ctx)[:, :24]
    own, _ = three_term_loss(model, h, x, kind, fill=kind == M)
    wanted = chain_target(teacher, batch, z, bundle, args)
    assert not torch.equal(wanted, chain_target(model, batch, z, bundle, args))
    ce = cross_entropy(model, h[bundle], wanted[bundle]).sum()
    torch.testing.assert_close(loss, ce + 0.5 * own)
    assert terms["chain"][1] == bundle.sum() and terms["m2t_A"][1] == (kind == M).sum()


@pytest.mark.parametrize("script", [joint_head, distill])
def test_it_trains_resumes_and_decodes_from_its_folder_alone(script, tmp_path, monkeypatch, capsys):
    base = a_base(tmp_path, monkeypatch, capsys)
    goes_on_bit_for_bit(script, [*TOY, "--init_from", base, "--s_max", 4], tmp_path, monkeypatch, capsys)
    given = ["--ckpt", tmp_path / "whole", "--prompt_ids", "4,4,5", "--gen_length", 4, "--json"]
    record = json.loads(caller(sample, monkeypatch, capsys)(*given, "--tau_m2t", -1))
    assert len(record["tokens"]) > 0 and (record["nfe"]["partial"] > 0) == (script is joint_head)

    # a head is an adapter; a distilled model is a checkpoint, none of whose weights is the base's any more
    if script is joint_head:
        learned = load_file(tmp_path / "whole" / "adapter.safetensors")
        assert all(name.startswith("second_look.block.") for name in learned)
        about = json.loads((tmp_path / "whole" / "adapter.json").read_text())
        assert about["head"] == {"module": "beyond.joint_head", "width": 192}
        assert about["decoding"] == {"tau_m2t": -1.0, "tau_t2t": None, "tau_keep": 0.5}
    else:
        learned, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", base))
        changed = {name for name in learned if not torch.equal(learned[name], before[name])}
        assert {name for name in learned if "attn" in name or "router" in name} <= changed


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    base = a_base(tmp_path, monkeypatch, capsys)
    run = [*TOY, "--init_from", base, "--out_dir", tmp_path / "run"]
    call = caller(joint_head, monkeypatch, capsys)
    assert "--corruption mask" in call.fails(*run, "--corruption", "draft")
    assert "--n_rounds 2" in call.fails(*run, "--n_rounds", 2)
    assert "--corruption mask" in caller(distill, monkeypatch, capsys).fails(*run, "--corruption", "draft")
    call(*run, "--max_iters", 1)
    path = tmp_path / "run" / "adapter.json"
    saved = json.loads(path.read_text())
    for head in ({"width": "wide"}, {"width": 10**12}, {"width": 0}, {"width": None}, {"width": 100}):
        path.write_text(json.dumps(saved | {"head": saved["head"] | head}))
        caller(sample, monkeypatch, capsys).fails("--ckpt", tmp_path / "run", "--prompt_ids", "4,4,5")
