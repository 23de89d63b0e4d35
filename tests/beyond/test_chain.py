"""Chain targets: what they are, where they are refused, confident bundles. `pytest tests/beyond/test_chain.py`"""

import json
import math

import pytest
import torch
from common import MASK, coherent, command_line, conditional, random_ids, refused, settings, tiny_model
from safetensors.torch import load_file

import sample
import train
from beyond import chain, stage_b_only
from beyond.chain import (
    CleanCache,
    beam_chain,
    best_tokens,
    bundle_as_decoded,
    greedy_chain,
    leaders,
    longest,
    stage_a_look,
    stage_b_target,
)  # fmt: skip
from checkpoint import save_model
from corrupt import draw_bundle
from lib import toy
from lib.util import generator
from model import sequence_context
from sample import Decoding, generate
from train import Batch, lora_everywhere

TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]


def flags(**values):
    return settings(chain.build_parser(chain.__doc__), **{"corruption": "mask"} | values)


def a_batch(clean, key="draws"):
    everywhere = torch.ones_like(clean, dtype=torch.bool)
    draws = [generator("tests", key, i) for i in range(len(clean))]
    return Batch(clean, everywhere, everywhere, MASK, draws)


def target_of(model, x, z, bundle, **values):
    return stage_b_target(CleanCache(model, a_batch(x)), z, bundle, a_batch(x), flags(**values))


def whole_rows(model):
    """A look at every position of rows z (R, T) that are read as they are, the last block being in work."""

    def look(z, where, k):
        real = torch.ones_like(z, dtype=torch.bool)
        logits = model(z, sequence_context(model.cfg, real, torch.float32))
        logits[..., MASK] = float("-inf")
        log_p = logits.log_softmax(-1)
        token = leaders(log_p, k)
        sure = log_p.amax(-1).masked_fill(~where, float("-inf"))
        return sure, log_p.gather(-1, token), token

    return look


# ---------------------------------------------------------------------------------------------------------------------
# the chain


@pytest.mark.parametrize("order", ["surest", "leftmost"])
def test_the_greedy_chain_is_the_one_at_a_time_decode(order, monkeypatch):
    """What the released loop writes when it may fill one token a step, but for near-equals."""
    monkeypatch.setattr(chain, "TIE", 0.0)
    model = tiny_model(n_rounds=1, eos_id=-1, order=order)
    prompt = random_ids(3, 8, 7)
    masks = torch.full((3, 8), MASK)
    finished = CleanCache(model, a_batch(torch.cat([prompt, prompt], dim=1)))
    last = torch.stack([prompt, masks], dim=1).view(-1, 8)  # two blocks a row
    written, _ = greedy_chain(stage_a_look(finished), last, last == MASK, order)
    d = Decoding(gen_length=8, tau_m2t=1.0, tau_t2t=None, n_rounds=0, max_post_steps=0)
    greedy = torch.tensor([o.tokens for o in generate(model, prompt.tolist(), d)])
    assert torch.equal(written.view(3, 2, 8), torch.stack([prompt, greedy], dim=1))


@pytest.mark.parametrize("order", ["surest", "leftmost"])
def test_the_greedy_chain_is_a_beam_of_one(order):
    model = tiny_model(seed=1)
    x = random_ids(6, 24, 1)
    bundle = random_ids(6, 24, 3, 3) > 0
    bundle[0, :8] = False  # a block without a bundle
    blocks = x.masked_fill(bundle, MASK).view(-1, 8)
    look = stage_a_look(CleanCache(model, a_batch(x)))
    written, score = greedy_chain(look, blocks, bundle.view(-1, 8), order)
    beam, beam_score = beam_chain(look, blocks, bundle.view(-1, 8), 1, order)
    assert torch.equal(written, beam) and not torch.equal(written, x.view(-1, 8))
    torch.testing.assert_close(score, beam_score)
    assert score[0] == 0 and (score <= 0).all() and score.sum() < -1


@pytest.mark.parametrize("task", ["modes", "pairs", "permutation", "sum"])
def test_with_exact_conditionals_a_chain_is_coherent_and_a_beam_finds_the_joint_mode(task):
    t = toy.make(task)
    c = torch.arange(t.n_ctx)
    z = torch.full((t.n_ctx, t.m), t.mask_id)

    def exact(z, where, k):
        log_p = conditional(t, c, z.masked_fill(z == t.mask_id, -1)).log()
        token = leaders(log_p, k)
        return log_p.amax(-1).masked_fill(~where, float("-inf")), log_p.gather(-1, token).float(), token

    everything = torch.ones_like(z, dtype=torch.bool)
    greedy, greedy_score = greedy_chain(exact, z, everything)
    beam, beam_score = beam_chain(exact, z, everything, 5)
    assert coherent(t, c, greedy).all() and coherent(t, c, beam).all()
    best = t.log_prob(c, t.mode())
    torch.testing.assert_close(t.log_prob(c, beam), best)
    torch.testing.assert_close(beam_score.double(), best, rtol=0, atol=1e-6)
    torch.testing.assert_close(greedy_score.double(), t.log_prob(c, greedy), rtol=0, atol=1e-6)
    if task == "modes":  # the shared token is the most probable one, and belongs to the lesser phrases
        assert (t.log_prob(c, greedy) < best - 0.1).all()


def test_near_equals_come_by_index():
    score = torch.tensor([[0.30, 0.29, 0.06, 0.31, 0.04], [0.2, 0.12, 0.5, 0.1, 0.08]]).log()
    assert leaders(score, 4).tolist() == [[0, 1, 3, 2], [2, 0, 1, 3]]
    log_p, token = best_tokens(score, 2, slice(0, 2))
    torch.testing.assert_close(log_p.exp(), torch.tensor([[0.30, 0.29], [0.5, 0.2]]))
    assert token.tolist() == [[0, 1], [2, 0]]


def test_a_chain_target_takes_the_lower_id_of_near_equals():
    """Where a draft, plain argmax, takes the other one: tests/test_train.py. How sure it is says the largest."""
    model = tiny_model()
    logits = torch.full((40,), -5.0)
    logits[[7, 21, MASK]] = torch.tensor([1.0, 1.05, 9.0])
    model.head = lambda h: logits.repeat(len(h), 1)
    x = random_ids(2, 16)
    bundle = random_ids(2, 16, 3, 2).bool()
    look = stage_a_look(CleanCache(model, a_batch(x)))
    sure, log_p, token = look(x.view(-1, 8), bundle.view(-1, 8), 1)
    asked = bundle.view(-1, 8)
    assert token[asked].tolist() == [[7]] * int(bundle.sum())
    torch.testing.assert_close(sure[asked] - log_p[asked][:, 0], torch.full((int(bundle.sum()),), 0.05))
    assert (sure[~asked] == -math.inf).all() and (log_p[~asked] == -math.inf).all()
    z = x.masked_fill(bundle, MASK)
    assert torch.equal(target_of(model, x, z, bundle), torch.where(bundle, 7, x))


def test_a_chain_leaves_the_rest_and_writes_each_block():
    blocks = torch.full((6, 4), 9)
    bundle = torch.tensor([[1, 0, 0, 1]] * 3 + [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()
    asked = []

    def look(z, where, k):
        asked.append(int(where.sum()))
        sure = torch.zeros(z.shape).masked_fill(~where, float("-inf"))
        return sure, torch.zeros(*z.shape, k), torch.full((*z.shape, k), 3)

    assert longest(bundle) == 4
    assert torch.equal(greedy_chain(look, blocks, bundle)[0], torch.where(bundle, 3, 9))
    assert asked == [11, 6, 2, 1]  # one position a block and step: the largest bundle sets the number of forwards


def test_without_a_bundle_there_is_nothing_to_write():
    model, x = tiny_model(), random_ids(2, 16)
    nothing = torch.zeros(2, 16, dtype=torch.bool)
    assert torch.equal(target_of(model, x, x, nothing), x)
    look = stage_a_look(CleanCache(model, a_batch(x)))
    sure, log_p, _ = look(x.view(-1, 8), nothing.view(-1, 8), 2)
    assert log_p.shape == (4, 8, 2) and (sure == -math.inf).all() and (log_p == -math.inf).all()


# ---------------------------------------------------------------------------------------------------------------------
# the context of a target


@pytest.mark.parametrize("beam", [1, 3])
def test_a_later_blocks_target_is_that_of_the_block_alone(beam):
    """Rows of three blocks with masks and a bundle in each: every chain reads finished text, as decoding does."""
    model = tiny_model(seed=1)
    x = random_ids(4, 24, 1)
    masked = random_ids(4, 24, 2, 3) > 0
    bundle = masked & (random_ids(4, 24, 3, 3) > 0)
    z = x.masked_fill(masked, MASK)
    target = target_of(model, x, z, bundle, beam=beam)
    assert torch.equal(target[~bundle], x[~bundle])
    for start in (0, 8, 16):
        end = start + 8
        ids = torch.cat([x[:, :start], z[:, start:end]], dim=1)
        here = bundle[:, :end] & (torch.arange(end) >= start)
        written, _ = beam_chain(whole_rows(model), ids, here, beam)
        alone = torch.where(here, written, x[:, :end])
        assert torch.equal(target[:, start:end], alone[:, start:])


def test_chain_targets_in_a_corrupted_context_are_refused_on_rows_of_several_blocks(tmp_path, monkeypatch, capsys):
    base, text = tmp_path / "base", tmp_path / "a.txt"
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257, n_rounds=1), base)
    text.write_text("one two three four five six seven eight\n" * 40)
    run = ["--data", text, "--init_from", base, "--seq_len", 32, "--batch_size", 2, "--max_iters", 1, "--eval_rows", 2]
    run += ["--device", "cpu", "--corruption", "mask", "--s_max", 3]
    corrupted = [*run, "--context", "corrupted", "--out_dir", tmp_path / "a"]
    assert "--context clean" in refused(chain, monkeypatch, capsys, *corrupted)
    assert "--context clean" in refused(chain, monkeypatch, capsys, *corrupted, "--lora", "all")
    assert not (tmp_path / "a").exists()
    assert command_line(chain, monkeypatch, capsys, *corrupted, "--target", "clean")[0] == 0  # the paper's target
    assert command_line(chain, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b")[0] == 0  # clean is the default


# ---------------------------------------------------------------------------------------------------------------------
# bundles


def confident(sure, masked, monkeypatch, share=1.0, s_min=2, s_max=2, key="b"):
    """The bundles of blocks of four whose masks are as sure as given, (R, T) log-probabilities."""
    monkeypatch.setattr(chain, "stage_a_look", lambda finished: lambda z, where, k: (sure.view(z.shape), None, None))
    x = random_ids(*sure.shape)
    finished = CleanCache(tiny_model(block_length=4), a_batch(x))
    args = flags(confident_share=share, s_min=s_min, s_max=s_max)
    return bundle_as_decoded(finished, x, masked, a_batch(x, key), args)


def test_confident_bundles_are_the_surest_masks_of_their_block(monkeypatch):
    masked = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1]]).bool()
    sure = torch.tensor([[-3.0, -1.0, -2.0, 0.0, -5.0, -0.1, 0.0, -0.2]])  # log-probabilities, 0 where not masked
    assert confident(sure, masked, monkeypatch).tolist() == [[False, True, True, False, False, True, False, True]]
    rows = sure.repeat(600, 1), masked.repeat(600, 1)
    shares = confident(*rows, monkeypatch, share=0.5, s_min=1, s_max=1)[:, :3].float().mean(0)
    # the surest: 1/2 + 1/2 * 1/3; each other 1/6
    assert (shares - torch.tensor([1, 4, 1]) / 6).abs().max() < 4 * math.sqrt(2 / 9 / 600)


def test_unsure_masks_are_as_good_as_any(monkeypatch):
    """Three masks, s = 2: the best two, though all are less likely than exp(-2), where a bundle of one used to end."""
    masked = torch.tensor([[True, False, True, True]])
    assert confident(torch.tensor([[-2.5, 0.0, -2.6, -3.0]]), masked, monkeypatch).tolist() == [
        [True, False, True, False]
    ]


@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_a_confident_bundle_has_s_positions_or_all_there_are(s, monkeypatch):
    masked = random_ids(300, 8, 1, 2).bool()
    sure = -8 * torch.rand(300, 8, generator=generator("sure")) * masked
    bundle = confident(sure, masked, monkeypatch, s_min=s, s_max=s).view(-1, 4)
    masked, sure = masked.view(-1, 4), sure.view(-1, 4)
    assert torch.equal(bundle.sum(-1), masked.sum(-1).clamp(max=s)) and not (bundle & ~masked).any()
    least, most = sure.masked_fill(~bundle, 0).amin(-1), sure.masked_fill(~masked | bundle, -math.inf).amax(-1)
    assert (least >= most).all()  # no mask left out is surer than one taken


def test_without_a_share_bundles_are_the_papers():
    x = random_ids(3, 24)
    masked = random_ids(3, 24, 1, 2) > 0
    finished = CleanCache(tiny_model(), a_batch(x))
    bundle = bundle_as_decoded(finished, x, masked, a_batch(x, "p"), flags(s_max=5))
    assert torch.equal(bundle, draw_bundle(masked, 8, 1, 5, a_batch(x, "p").draws))


# ---------------------------------------------------------------------------------------------------------------------
# from the command line


@pytest.fixture
def base(tmp_path, monkeypatch, capsys):
    run = [*TOY, "--max_iters", 2, "--stage_a_only", "--out_dir", tmp_path / "base"]
    assert command_line(train, monkeypatch, capsys, *run)[0] == 0
    return tmp_path / "base"


@pytest.mark.parametrize("context", ["corrupted", "clean"])
@pytest.mark.parametrize("lora, extension", [("stage_b", "beyond.stage_b_only"), ("all", None)])
def test_chain_targets_train_and_decode(context, lora, extension, base, tmp_path, monkeypatch, capsys):
    run = [*TOY, "--init_from", base, "--max_iters", 2, "--lora", lora, "--context", context, "--beam", 3]
    run += ["--n_last", 2, "--out_dir", tmp_path / "run"]
    assert command_line(chain, monkeypatch, capsys, *run)[0] == 0
    adapter = load_file(tmp_path / "run" / "adapter.safetensors")
    adapted = {int(k.split(".")[1]) for k in adapter if "lora" in k}
    assert adapted == ({2, 3} if lora == "stage_b" else {0, 1, 2, 3}) and adapter["markers"].abs().sum() > 0
    assert json.loads((tmp_path / "run" / "adapter.json").read_text()).get("extension") == extension
    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()][:2]
    assert all(("m2t_A" in s) == (lora == "all") for s in steps)  # in Stage B's scope Stage A is not trained
    given = ["--ckpt", base, "--adapter", tmp_path / "run", "--prompt_ids", "4,4", "--gen_length", 2, "--json"]
    code, out, _ = command_line(sample, monkeypatch, capsys, *given)
    assert code == 0 and json.loads(out)["nfe"]["partial"] > 0


def test_a_chain_run_resumes_bit_for_bit(base, tmp_path, monkeypatch, capsys):
    run = [*TOY, "--init_from", base, "--max_iters", 6, "--learning_rate", 0.01, "--confident_share", 0.5, "--beam", 2]
    assert command_line(chain, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    code, out, _ = command_line(chain, monkeypatch, capsys, *run, "--out_dir", tmp_path / "b", "--stop_at", 3)
    assert code == 0 and f"python -m beyond.chain --init_from resume --out_dir {tmp_path / 'b'}" in out
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "b"]
    assert command_line(chain, monkeypatch, capsys, *resume)[0] == 0
    a, b = (load_file(tmp_path / name / "state.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


MISTAKES = {
    "no base": (["--init_from", "scratch"], ["--init_from DIR"]),
    "without stage B": (["--init_from", "scratch", "--stage_a_only"], ["--init_from DIR"]),
    "one bundle a row": (["--bundle_scope", "sequence"], ["--bundle_scope block"]),
    "no beam": (["--beam", 0], ["--beam"]),
    "a beam wider than the vocabulary": (["--beam", 8], ["--beam 8", "vocabulary"]),
    "share": (["--confident_share", 1.5], ["--confident_share", "1.5"]),
    "scope": (["--lora", "marked"], ["--lora"]),
    "target": (["--target", "joint"], ["--target"]),
}


@pytest.mark.parametrize("argv, words", MISTAKES.values(), ids=MISTAKES)
def test_chain_refuses(argv, words, base, tmp_path, monkeypatch, capsys):
    line = refused(chain, monkeypatch, capsys, *TOY, "--init_from", base, "--out_dir", tmp_path / "run", *argv)
    assert all(w in line for w in words), line
    assert not (tmp_path / "run").exists()  # the corrected command can go there


def test_help_is_a_manual(monkeypatch, capsys):
    code, out, _ = command_line(chain, monkeypatch, capsys, "--help")
    assert code == 0 and chain.__doc__.splitlines()[0] in out and "--beam" in out and "--n_last" in out


def test_both_scopes_have_the_same_targets():
    """Stage A, which writes them, is the base in both before anything is learned."""
    x = random_ids(2, 16)
    bundle = random_ids(2, 16, 3, 2).bool()
    args = flags(lora_r=4)
    found = []
    for adapt in (stage_b_only.stage_b_recipe(chain.chain_step, "").adapt, lora_everywhere):
        model = tiny_model()
        adapt(model, args)
        found.append(target_of(model, x, x.masked_fill(bundle, MASK), bundle))
    assert torch.equal(*found)
