"""The joint head on Stage A's final states. `pytest tests/beyond/test_joint_head.py`"""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from common import MASK, caller, random_ids, settings, tiny_model
from safetensors.torch import load_file

import sample
import train
from beyond import distill, joint_head
from beyond.chain import CleanCache
from beyond.joint_head import JointHead, joint_head_step, masks_as_decoded
from corrupt import G, M
from lib.util import generator
from model import Context, rotary, sequence_context
from sample import Decoding, generate
from train import Batch, corrupt_batch

TOY = ["--data", "pairs", "--toy", "V=3", "m=4", "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]
FACTORISED = Decoding(gen_length=21, tau_m2t=0.3, tau_t2t=None, n_rounds=0, max_post_steps=0)


def with_head(model, tau_keep=0.5, std=0.3, width=24, head_layers=2):
    model.__class__ = JointHead
    model.give_head(head_layers, width, tau_keep, generator("head"))
    for name, p in model.joint_head.named_parameters():
        p.data += std * torch.randn(p.shape, generator=generator(name))
    return model


def context(model, ids):
    return sequence_context(model.cfg, torch.ones_like(ids, dtype=torch.bool), torch.float32)


def a_batch(clean, real=None, free=None):
    if real is None:
        real = torch.ones_like(clean, dtype=torch.bool)
    if free is None:
        free = real
    draws = [generator("b", i) for i in range(len(clean))]
    return Batch(clean, real, free, MASK, draws)


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
                sure = {i for i, c in zip(bundle, conf, strict=True) if c > model.tau_keep}
                if model.tau_keep == 0:
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
    for block in model.joint_head:
        attended = block.attn(block.norm_1(y)[None], ctx)[0]
        new = y.clone()
        for i in bundle:
            x = y[i] + attended[i]
            new[i] = x + block.mlp(block.norm_2(x))
        y = new
    return model.head(y[bundle]).softmax(-1).max(-1)


@pytest.mark.parametrize("head_layers", [1, 2])
@pytest.mark.parametrize("tau_keep", [0.0, 0.5, 1.0])
def test_the_cached_decode_is_the_plain_one(head_layers, tau_keep):
    model = with_head(tiny_model(n_rounds=1, eos_id=-1), tau_keep, head_layers=head_layers)
    prompts = [random_ids(1, n, n)[0].tolist() for n in (3, 8, 13)]
    for tau in (0.1, 0.3):
        d = replace(FACTORISED, tau_m2t=tau, n_rounds=1)
        for prompt, out in zip(prompts, generate(model, prompts, d), strict=True):
            tokens, full, commits, share = plain_decode(model, prompt, d)
            assert (out.tokens, out.nfe["full"], out.nfe["commit"]) == (tokens, full, commits)
            assert out.nfe["partial"] == pytest.approx(share, abs=1e-6) and share > 0


def test_a_fresh_head_is_stage_a_and_a_gate_above_all_writes_one_token_a_step():
    base, prompt = tiny_model(n_rounds=1, eos_id=-1), random_ids(1, 5)[0].tolist()
    fresh = with_head(tiny_model(n_rounds=1, eos_id=-1), tau_keep=0.0, std=0.0)
    together = generate(fresh, [prompt], replace(FACTORISED, n_rounds=1))[0]
    assert together.tokens == generate(base, [prompt], FACTORISED)[0].tokens and together.nfe["partial"] > 0
    fresh.tau_keep = 1.0
    one = generate(fresh, [prompt], replace(FACTORISED, n_rounds=1, tau_m2t=-1))[0]
    assert one.tokens == generate(base, [prompt], replace(FACTORISED, tau_m2t=1.0))[0].tokens
    assert one.nfe["full"] == 27  # 3 masks in the prompt's block, then 24


def test_a_single_token_is_not_looked_at_again():
    model, prompt = with_head(tiny_model(n_rounds=1, eos_id=-1)), random_ids(1, 5)[0].tolist()
    out = generate(model, [prompt], replace(FACTORISED, tau_m2t=1.0, n_rounds=1))[0]
    base = generate(tiny_model(n_rounds=1, eos_id=-1), [prompt], replace(FACTORISED, tau_m2t=1.0))[0]
    assert out.tokens == base.tokens and out.nfe["partial"] == 0


def test_each_row_and_block_is_looked_at_as_if_alone():
    model, h = with_head(tiny_model()), torch.randn(5, 8, 64, generator=generator("h"))
    bundle = random_ids(5, 8, 3, 2).bool()
    together = model.second_look(h, bundle)
    alone = [model.second_look(h[i : i + 1], bundle[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_edits_are_stage_as():
    """Where nothing is masked any more, and beside a bundle, the released edits go on as they do without Stage B."""
    model, prompt = with_head(tiny_model(n_rounds=1, eos_id=-1), tau_keep=0.0, std=0.0), random_ids(1, 5)[0].tolist()
    d = replace(FACTORISED, tau_t2t=0.0, max_post_steps=3)
    ours, base = (generate(model, [prompt], replace(d, n_rounds=k), trace=True)[0] for k in (1, 0))
    assert ours.tokens == base.tokens and any(s["edit"] for s in ours.steps)


def test_a_record_shows_what_was_refused():
    """A gate above all: of a bundle of eight Stage A's surest is written, and seven are refused with what the head
    wanted."""
    model, prompt = with_head(tiny_model(n_rounds=1, eos_id=-1), tau_keep=1.0), random_ids(1, 8)[0].tolist()
    d = replace(FACTORISED, gen_length=8, tau_m2t=-1.0, n_rounds=1)
    out = generate(model, [prompt], d, trace=True)[0]
    wanted = {}
    for n, s in enumerate(out.steps[:7]):
        left = 8 - n
        assert len(s["fill"]) == 1 and len(s["refused"]) == left - 1
        assert s["bundle"] == [f["at"] for f in s["fill"]]
        looked_at = s["fill"] + s["refused"]
        assert sorted(f["at"] for f in looked_at) == [8 + i for i, t in enumerate(s["before"]) if t == MASK]
        assert all(s["after"][f["at"] - 8] == MASK for f in s["refused"])
        wanted[n] = {(f["at"], f["token"]) for f in s["refused"]}
    base = generate(tiny_model(n_rounds=1, eos_id=-1), [prompt], replace(d, tau_m2t=1.0, n_rounds=0), trace=True)[0]
    for ours, its in zip(out.steps, base.steps, strict=True):
        assert [(f["at"], f["token"]) for f in ours["fill"]] == [(f["at"], f["token"]) for f in its["fill"]]
    assert "refused" not in out.steps[7]  # a single one is not looked at
    kept = generate(with_head(tiny_model(n_rounds=1, eos_id=-1), tau_keep=0.0), [prompt], d, trace=True)[0]
    assert kept.steps[0]["refused"] == [] and len(kept.steps) == 1
    assert {(f["at"], f["token"]) for f in kept.steps[0]["fill"]} > wanted[0]  # refusing changes no wish


@pytest.mark.parametrize("padded", [False, True])
def test_noisy_blocks_read_the_clean_ones_as_decoding_does(padded):
    """CleanCache.read = the noisy half of [noisy ; clean], for any of the blocks."""
    model, x = tiny_model(), random_ids(4, 24)
    real = torch.ones_like(x, dtype=torch.bool)
    if padded:
        real = torch.arange(24) < torch.tensor([[24], [16], [24], [8]])
    z = x.masked_fill(random_ids(4, 24, 5, 2).bool(), MASK)
    ctx = sequence_context(model.cfg, real, torch.float32, clean=x)
    whole = model.last_n(model.prefix(z, ctx), ctx)[:, :24]
    z, whole, some = z.view(12, 8), whole.reshape(12, 8, -1), torch.tensor([7, 0, 11])
    finished = CleanCache(model, a_batch(x, real))
    torch.testing.assert_close(finished.read(z, torch.arange(12)), whole, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(finished.read(z[some], some), whole[some], atol=1e-4, rtol=1e-5)


def test_half_of_the_blocks_have_their_masks_at_the_end():
    x = random_ids(400, 16)
    real = (torch.arange(16) < 14).expand(400, 16)
    free = real & (torch.arange(16) >= 2)  # a prompt, and padding
    model, args = tiny_model(), settings(joint_head.build_parser(""))
    plain = corrupt_batch(model, a_batch(x, real, free), args)[1] == M
    z, kind = masks_as_decoded(model, a_batch(x, real, free), args)
    assert torch.equal(kind == M, z == MASK) and torch.equal((kind == G) | (kind == M), free)
    assert torch.equal(z[kind != M], x[kind != M])
    count, before = (k.view(400, 2, 8).sum(-1) for k in (kind == M, plain))
    assert torch.equal(count, before)
    ends = torch.stack([torch.arange(8) >= 8 - count[:, 0, None], torch.arange(8) >= 6 - count[:, 1, None]], dim=1)
    suffix = ((kind == M).view(400, 2, 8) == ends & free.view(400, 2, 8)).all(-1)
    same = ((kind == M) == plain).view(400, 2, 8).all(-1)
    assert (suffix | same).all() and 0.5 < suffix.float().mean() < 0.75  # half, and those that were so before


def test_all_masks_are_at_the_end_where_the_leftmost_are_written_first():
    x = random_ids(100, 16)
    z, kind = masks_as_decoded(tiny_model(order="leftmost"), a_batch(x), settings(joint_head.build_parser("")))
    masked = (z == MASK).view(200, 8)
    count = masked.sum(-1, keepdim=True)
    assert torch.equal(masked, torch.arange(8) >= 8 - count)
    assert torch.equal(kind == M, z == MASK) and set(count[:, 0].tolist()) == set(range(9))


def test_from_the_left_a_prefix_of_the_bundle_is_kept():
    """All masks are looked at; those are written whose product of confidences passes, and the first one always."""
    model = with_head(tiny_model(n_rounds=1, eos_id=-1, order="leftmost"), tau_keep=0.01)
    d = replace(FACTORISED, gen_length=8, tau_m2t=-1.0, n_rounds=1)
    lengths = set()
    others = 0
    for seed in range(6):
        prompt = random_ids(1, 8, seed)
        out = generate(model, prompt.tolist(), d, trace=True)[0]
        for s in out.steps:
            if "refused" not in s:
                continue

            # Stage A and the head of this block, without a cache
            z = torch.cat([prompt, torch.tensor([s["before"]])], dim=1)
            h = model.last_n(model.prefix(z, context(model, z)), context(model, z))[:, 8:]
            masked = z[:, 8:] == MASK
            token_a = int(model.head(h[masked])[0].argmax())
            token_b = int(model.head(model.second_look(h, masked))[0].argmax())
            written = sorted(s["fill"], key=lambda f: f["at"])
            left_over = sorted(s["refused"], key=lambda f: f["at"])
            looked_at = [f["at"] for f in written + left_over]
            assert looked_at == [8 + i for i, t in enumerate(s["before"]) if t == MASK]

            # the first is Stage A's; nothing goes with it where the head would write another
            assert written[0]["token"] == token_a
            if token_a != token_b:
                assert len(written) == 1
                others += 1
                continue

            # the product passes up to the last that was written, and not with the next
            together = torch.tensor([f["conf"] for f in written + left_over], dtype=torch.float64).cumprod(0)
            n = len(written)
            assert n == 1 or together[n - 1] > 0.01
            assert not left_over or together[n] <= 0.01
            lengths.add(n)
    assert len(lengths) > 1 and others > 0


def test_training_asks_for_bundles_of_two_and_more(monkeypatch):
    model = tiny_model(n_rounds=1)
    args = settings(joint_head.build_parser(""), confident_share=0.5, s_min=1, s_max=8, width=8)
    joint_head.give_head(model, args)
    seen = []
    target = joint_head.stage_b_target

    def kept(finished, z, bundle, batch, args):
        seen.append((z, bundle))
        return target(finished, z, bundle, batch, args)

    monkeypatch.setattr(joint_head, "stage_b_target", kept)
    loss, terms = joint_head_step(model, a_batch(random_ids(64, 16)), args)
    z, bundle = seen[0]
    size = bundle.view(64, 2, 8).sum(-1)
    assert not (size == 1).any() and (size == 0).any() and (size > 1).any() and not (bundle & (z != MASK)).any()
    assert int(terms[1, 0, 1]) == int(bundle.sum()) and not terms[0].any()
    loss.backward()
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None} == {"joint_head"}

    # a micro-batch of few rows may have no bundle at all
    model.zero_grad()
    monkeypatch.setattr(joint_head, "bundle_as_decoded", lambda finished, z, masked, batch, args: masked & False)
    loss, terms = joint_head_step(model, a_batch(random_ids(2, 16)), args)
    loss.backward()
    assert loss == 0 and terms.sum() == 0
    assert not any(p.grad.any() for p in model.joint_head.parameters() if p.grad is not None)


def test_the_head_is_trained_on_what_it_decodes():
    """The loss is the cross-entropy of second_look to the chain, block by block, from states with a clean context; in
    validation Stage A's terms are the base's."""
    model = with_head(tiny_model(n_rounds=1), std=0.1)
    args = settings(joint_head.build_parser(""), target="clean", confident_share=0.0)
    x = random_ids(4, 24)
    with torch.no_grad():
        loss, terms = joint_head_step(model, a_batch(x), args)
    batch = a_batch(x)
    z, kind = masks_as_decoded(model, batch, args)
    bundle = train.draw_bundle(kind == M, 8, args.s_min, args.s_max, batch.draws)
    ce, ce_a = [], []
    for row, start in [(r, s) for r in range(4) for s in (0, 8, 16)]:
        ids = torch.cat([x[row, :start], z[row, start : start + 8]])[None]
        h = model.last_n(model.prefix(ids, context(model, ids)), context(model, ids))[:, start:]
        block = slice(start, start + 8)
        masked = kind[row, block] == M
        ce_a.append(F.cross_entropy(model.head(h)[0, masked], x[row, block][masked], reduction="sum"))
        here = bundle[row, block]
        if here.sum() > 1:
            logits = model.head(model.second_look(h, here[None]))
            ce.append(F.cross_entropy(logits, x[row, block][here], reduction="sum"))
    torch.testing.assert_close(loss, sum(ce), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(terms[0, 0, 0], sum(ce_a), rtol=1e-4, atol=1e-3)


@pytest.fixture
def base(tmp_path, monkeypatch, capsys):
    caller(train, monkeypatch, capsys)(*TOY, "--max_iters", 2, "--stage_a_only", "--out_dir", tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("script", [joint_head, distill])
def test_adapters_train_resume_and_decode(script, base, tmp_path, monkeypatch, capsys):
    call = caller(script, monkeypatch, capsys)
    run = [*TOY, "--init_from", base, "--max_iters", 4]
    call(*run, "--out_dir", tmp_path / "a")
    call(*run, "--out_dir", tmp_path / "b", "--stop_at", 2)
    call("--init_from", "resume", "--out_dir", tmp_path / "b")
    a, b = (load_file(tmp_path / name / "adapter.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert all(k.startswith("joint_head.") for k in a) == (script is joint_head)
    given = ["--ckpt", base, "--adapter", tmp_path / "a", "--prompt_ids", "4,4,5", "--gen_length", 4, "--json"]
    record = json.loads(caller(sample, monkeypatch, capsys)(*given, "--tau_m2t", -1))
    assert len(record["tokens"]) > 0 and (record["nfe"]["partial"] > 0) == (script is joint_head)


def test_mistakes_are_one_line(base, tmp_path, monkeypatch, capsys):
    call = caller(joint_head, monkeypatch, capsys)
    run = [*TOY, "--init_from", base, "--out_dir", tmp_path / "run"]
    assert "--corruption mask" in call.fails(*run, "--corruption", "draft")
    assert "--n_rounds 2" in call.fails(*run, "--n_rounds", 2)
    assert "--lora all" in call.fails(*run, "--lora", "all")
    assert "--init_from" in call.fails(*TOY, "--out_dir", tmp_path / "run")
    call(*run, "--max_iters", 1)
    saved = json.loads((tmp_path / "run" / "adapter.json").read_text())
    given = ["--ckpt", base, "--adapter", tmp_path / "run", "--prompt_ids", "4,4,5"]
    wrong = [("width", "wide"), ("width", True), ("width", 10**12), ("tau_keep", 7), ("tau_keep", float("nan"))]
    wrong += [("head_layers", None), ("head_layers", 0)]
    wrong += [("model", saved["model"] | {"n_rounds": 2})]
    for key, value in wrong:
        (tmp_path / "run" / "adapter.json").write_text(json.dumps(saved | {key: value}))
        line = caller(sample, monkeypatch, capsys).fails(*given)
        assert ("n_rounds" if key == "model" else key) in line
