"""Chain targets: what they are, where they are refused, confident bundles. `pytest tests/beyond/test_chain.py`"""

import json
import math

import pytest
import torch
from common import MASK, approx, coherent, command_line, conditional, random_ids, refused, settings, tiny_model
from safetensors.torch import load_file

import sample
import toy
import train
from beyond import chain
from beyond.chain import Chain, ChainStageBOnly, chain_decode, choose, leaders, longest
from checkpoint import save_model
from corrupt import G, M
from data import generator
from model import sequence_context
from sample import Decoding, generate

TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 4, "--eval_rows", 4, "--device", "cpu"]


def an_objective(model, kind=Chain, **values):
    """kind: Chain, or a class derived from it."""
    values = {"corruption": "mask", "wrong_rate": 0.0} | values
    args = settings(chain.build_parser(chain.__doc__), **values)
    return kind(model, {}, 38, args, torch.device("cpu"))


def context(model, x, clean_copy=False):
    return sequence_context(model.cfg, torch.ones_like(x, dtype=torch.bool), torch.float32, clean_copy)


# ---------------------------------------------------------------------------------------------------------------------
# the chain


def test_the_greedy_chain_is_the_one_at_a_time_decode(monkeypatch):
    """What the released loop writes when it may fill one token a step, but for near-equals."""
    monkeypatch.setattr(chain, "TIE", 0.0)
    model = tiny_model(n_rounds=1, eos_id=-1)
    prompt = random_ids(3, 8, 7)
    z = torch.cat([prompt, torch.full((3, 8), MASK)], dim=1)
    bundle = z == MASK
    written, _ = chain_decode(z, bundle, 8, 1, an_objective(model).predict(z, context(model, z)), 8)
    d = Decoding(gen_length=8, tau_m2t=1.0, tau_t2t=None, n_rounds=0, max_post_steps=0)
    greedy = torch.tensor([o.tokens for o in generate(model, prompt.tolist(), d)])
    assert torch.equal(written, torch.cat([prompt, greedy], dim=1))


@pytest.mark.parametrize("task", ["modes", "pairs", "permutation", "sum"])
def test_with_exact_conditionals_a_chain_is_coherent_and_a_beam_finds_the_joint_mode(task):
    t = toy.make(task)
    c, z = torch.arange(t.n_ctx), torch.full((t.n_ctx, t.m), t.mask_id)

    def exact(z, where, k):
        log_p = conditional(t, c.repeat(len(z) // len(c)), z.masked_fill(z == t.mask_id, -1)).log()
        return choose(log_p[where], k)

    everything = torch.ones_like(z, dtype=torch.bool)
    greedy, beam = (chain_decode(z, everything, t.m, w, exact, t.m)[0] for w in (1, 5))
    assert coherent(t, c, greedy).all() and coherent(t, c, beam).all()
    best = t.log_prob(c, t.mode())
    torch.testing.assert_close(t.log_prob(c, beam), best)
    score = chain_decode(z, everything, t.m, 5, exact, t.m)[1][:, 0]
    torch.testing.assert_close(score.double(), best, rtol=0, atol=1e-6)
    if task == "modes":  # the shared token is the most probable one, and belongs to the lesser phrases
        assert (t.log_prob(c, greedy) < best - 0.1).all()


def test_near_equals_come_by_index():
    score = torch.tensor([[0.30, 0.29, 0.06, 0.31, 0.04], [0.2, 0.12, 0.5, 0.1, 0.08]]).log()
    assert leaders(score, 4).tolist() == [[0, 1, 3, 2], [2, 0, 1, 3]]
    log_p, token, sure = choose(score, 2)
    torch.testing.assert_close(log_p.exp(), torch.tensor([[0.30, 0.29], [0.5, 0.2]]))
    assert token.tolist() == [[0, 1], [2, 0]] and sure.exp().tolist() == approx([0.31, 0.5])


def test_a_chain_target_takes_the_lower_id_of_near_equals():
    """Where a draft, plain argmax, takes the other one: tests/test_train.py."""
    model = tiny_model()
    logits = torch.full((40,), -5.0)
    logits[[7, 21, MASK]] = torch.tensor([1.0, 1.05, 9.0])
    model.head = lambda h: logits.repeat(len(h), 1)
    x = random_ids(2, 16)
    bundle = random_ids(2, 16, 3, 2).bool()
    target = an_objective(model, beam=1).predict(x, context(model, x))(x, bundle, 1)[1]
    assert target.tolist() == [[7]] * int(bundle.sum())
    objective = an_objective(model)
    objective.notes["target_ms"] = 0.0
    z = x.masked_fill(bundle, MASK)
    assert torch.equal(objective.target(x, z, bundle, [], context(model, x)), torch.where(bundle, 7, x))


def test_a_chain_leaves_the_rest_and_writes_each_block():
    z = torch.full((2, 12), 9)
    bundle = torch.tensor([[1, 0, 0, 1] * 3, [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1]]).bool()
    asked = []

    def predict(z, where, k):
        asked.append(int(where.sum()))
        return torch.zeros(asked[-1], k), torch.full((asked[-1], k), 3), torch.zeros(asked[-1])

    assert longest(bundle, 4) == 4
    assert torch.equal(chain_decode(z, bundle, 4, 1, predict, 4)[0], torch.where(bundle, 3, 9))
    assert asked == [11, 6, 2, 1]  # one position a block and step: the largest bundle sets the number of forwards


def test_without_a_bundle_there_is_nothing_to_write():
    model, x = tiny_model(), random_ids(2, 16)
    objective, nothing = an_objective(model), torch.zeros(2, 16, dtype=torch.bool)
    objective.notes["target_ms"] = 0.0
    assert torch.equal(objective.target(x, x, nothing, [], context(model, x)), x)
    assert [len(t) for t in objective.predict(x, context(model, x))(x, nothing, 2)] == [0, 0, 0]


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
    objective = an_objective(model, beam=beam)
    objective.notes["target_ms"] = 0.0
    ctx = context(model, x, clean_copy=True)
    target = objective.target(x, z, bundle, [], ctx)
    assert torch.equal(target[~bundle], x[~bundle])
    alone = x.clone()
    for start in (0, 8, 16):
        end = start + 8
        ids = torch.cat([x[:, :start], z[:, start:end]], dim=1)
        here = bundle[:, :end] & (torch.arange(end) >= start)
        predict = objective.predict(ids, context(model, ids))
        written, _ = chain_decode(ids, here, 8, beam, predict, longest(here, 8))
        alone[:, start:end] = torch.where(here, written, x[:, :end])[:, start:]
    assert torch.equal(target, alone)
    assert torch.equal(objective.target(x, z, bundle, [], context(model, x)), alone)  # whatever the stages read


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


def with_sure(objective, sure):
    """An objective to whom the masks of a batch are as sure as given, (R, T) log-probabilities."""
    objective.predict = lambda x, ctx: lambda z, where, k: (None, None, sure[where])
    return objective


def confident(sure, masked, share=1.0, s_min=2, s_max=2, key="b"):
    model = tiny_model(block_length=4)
    objective = with_sure(an_objective(model, confident_share=share, s_min=s_min, s_max=s_max), sure)
    x, kind = random_ids(*sure.shape), torch.where(masked, M, G)
    return objective.bundle(x, x, kind, [generator(key, i) for i in range(len(x))], None)


def test_confident_bundles_are_the_surest_masks_of_their_block():
    masked = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1]]).bool()
    sure = torch.tensor([[-3.0, -1.0, -2.0, 0.0, -5.0, -0.1, 0.0, -0.2]])  # log-probabilities, 0 where not masked
    assert confident(sure, masked).tolist() == [[False, True, True, False, False, True, False, True]]
    rows = sure.repeat(600, 1), masked.repeat(600, 1)
    shares = confident(*rows, share=0.5, s_min=1, s_max=1)[:, :3].float().mean(0)
    # the surest: 1/2 + 1/2 * 1/3; each other 1/6
    assert (shares - torch.tensor([1, 4, 1]) / 6).abs().max() < 4 * math.sqrt(2 / 9 / 600)


def test_unsure_masks_are_as_good_as_any():
    """Three masks, s = 2: the best two, though all are less likely than exp(-2), where a bundle of one used to end."""
    masked = torch.tensor([[True, False, True, True]])
    assert confident(torch.tensor([[-2.5, 0.0, -2.6, -3.0]]), masked).tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_a_confident_bundle_has_s_positions_or_all_there_are(s):
    masked = random_ids(300, 8, 1, 2).bool()
    sure = -8 * torch.rand(300, 8, generator=generator("sure")) * masked
    bundle = confident(sure, masked, s_min=s, s_max=s).view(-1, 4)
    masked, sure = masked.view(-1, 4), sure.view(-1, 4)
    assert torch.equal(bundle.sum(-1), masked.sum(-1).clamp(max=s)) and not (bundle & ~masked).any()
    least, most = sure.masked_fill(~bundle, 0).amin(-1), sure.masked_fill(~masked | bundle, -math.inf).amax(-1)
    assert (least >= most).all()  # no mask left out is surer than one taken


def test_without_a_share_bundles_are_the_papers():
    model, x = tiny_model(), random_ids(3, 24)
    kind, draws = torch.where(random_ids(3, 24, 1, 2) > 0, M, G), lambda: [generator("p", i) for i in range(3)]
    ours = an_objective(model, s_max=5).bundle(x, x, kind, draws(), None)
    args = settings(train.build_parser(train.__doc__), s_max=5, corruption="mask", wrong_rate=0.0)
    papers = train.Objective(model, {}, 38, args, torch.device("cpu")).bundle(x, x, kind, draws(), None)
    assert torch.equal(ours, papers)


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
    assert all(0 < s["target_ms"] < s["ms"] for s in steps)
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


def test_help_is_a_manual(monkeypatch, capsys):
    code, out, _ = command_line(chain, monkeypatch, capsys, "--help")
    assert code == 0 and chain.__doc__.splitlines()[0] in out and "--beam" in out and "--n_last" in out


def test_both_scopes_have_the_same_targets():
    """Stage A, which writes them, is the base in both before anything is learned."""
    x = random_ids(2, 16)
    bundle = random_ids(2, 16, 3, 2).bool()
    found = []
    for kind in (Chain, ChainStageBOnly):
        model = tiny_model()
        kind.adapt(model, settings(chain.build_parser(chain.__doc__), lora_r=4))
        objective = an_objective(model, kind)
        objective.notes["target_ms"] = 0.0
        found.append(objective.target(x, x.masked_fill(bundle, MASK), bundle, [], context(model, x, True)))
    assert torch.equal(*found)
