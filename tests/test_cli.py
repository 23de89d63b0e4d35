"""A user's mistake: one line that says what is wrong and what to do, exit code 2. `pytest tests/test_cli.py`"""

import io
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import ROOT, byte_model, caller, command_line, names_folder, random_adapter, refused, tiny_model
from resuming import byte_rows, toy_rows

import base
import evaluate
import sample
import train
from checkpoint import load_model, save_model
from lib.rows import read_meta
from lib.tokenizer import byte_spec, byte_tokenizer
from lib.util import command, fail, read_json, write_json

SCRATCH = ["--init_from", "scratch", "--batch_size", 2, "--device", "cpu"]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    """A model of bytes."""
    folder = tmp_path_factory.mktemp("ckpt")
    save_model(byte_model(), folder)
    write_json(folder / "tokenizer.json", byte_spec())
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory, ckpt) -> Path:
    """Rows of a toy and of text, a model of names, one of the toy, and an adapter."""
    tree = tmp_path_factory.mktemp("tree")
    toy_rows(tree / "pairs")
    byte_rows(tree / "text")
    names_folder(tree / "names")
    random_adapter(tree / "adapter", ckpt)
    of_toy(tree / "toy", tree / "pairs")
    return tree


def of_toy(folder: Path, rows: Path) -> Path:
    """A model of these rows' tokens."""
    meta = read_meta(rows)
    ids = dict(vocab_size=meta.vocab_size, eos_id=meta.eos_id, mask_id=meta.mask_id)
    save_model(tiny_model(**ids, block_length=meta.block_length or 8), folder)
    shutil.copyfile(rows / "meta.json", folder / "meta.json")
    return folder


def placed(argv: list, tree: Path) -> list[str]:
    """TREE/names -> where it lies"""
    return [str(word).replace("TREE", str(tree)) for word in argv]


# --- the one handler
def raising(error: BaseException):
    @command
    def main():
        raise error

    return SimpleNamespace(__name__="script", main=main)


def test_what_a_user_can_mend_is_one_line_and_what_only_we_can_is_a_traceback(monkeypatch, capsys):
    allocator = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    for error, words in (
        (OSError(28, "No space left on device"), "No space left on device"),
        (KeyboardInterrupt(), "interrupted"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError(), "out of memory"),
        (allocator, "out of memory"),
    ):
        assert words in refused(raising(error), monkeypatch, capsys)
    for error in (RuntimeError("ours"), AssertionError()):
        with pytest.raises(type(error)):
            command_line(raising(error), monkeypatch, capsys)
    assert command_line(raising(SystemExit(130)), monkeypatch, capsys) == (130, "", "")

    # several lines, or a NUL byte in a name, are one line
    script = SimpleNamespace(__name__="script", main=command(lambda: fail("a\nb \0 c")))
    assert refused(script, monkeypatch, capsys) == "error: a b \\0 c"


def test_a_reader_who_leaves_is_no_error():
    """`python toy.py | head -1`, the pipe closed before the rest is written."""
    argv = [sys.executable, "toy.py"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 141 and not err


# --- mistakes, one of each kind

TEXT = ["--prompt", "a"]
ON_TEXT = ["--data", "TREE/text", "--init_from", "CKPT", "--block_length", 8]
ON_TOY = ["--data", "TREE/pairs", "--init_from", "scratch"]
CORRUPTED = [*ON_TEXT, "--context", "corrupted"]
MISTAKES = [
    # train.py: the command line, and what it refuses in these words
    (train, ["--learning_rate", "inf"], "--learning_rate: must lie in"),
    (train, ["--init_from", "resume"], "no training run to resume"),
    (train, [*ON_TEXT, "--seq_len", 100], "--seq_len 100 must be a multiple of --block_length 8"),
    (train, [*ON_TEXT, "--seq_len", 256], "at most 128"),
    (train, [*ON_TEXT, "--one_by_one", 0.5], "unrecognized arguments: --one_by_one 0.5"),
    (train, [*ON_TOY, "--block_length", 8], "are not of whole blocks of 8"),
    # n and K are the model's own, or possible ones; an adapter has its own, and is no place to start
    (train, [*ON_TEXT, "--n_last", 5], "n_last is 1..4 (n_layer), not 5"),
    (train, [*ON_TOY, "--n_last", 99], "n_last is 1..4 (n_layer), not 99"),
    (train, [*ON_TEXT, "--n_rounds", 1001], "n_rounds is 1..1000"),
    (
        train,
        [*ON_TEXT[:2], "--init_from", "TREE/adapter", "--n_last", 1],
        "start from the model that it stands on, CKPT",
    ),
    # what Stage B sees before it
    (train, [*CORRUPTED, "--stage_b", "lora"], "give --context clean"),
    (train, [*CORRUPTED, "--stage_b", "copy"], "give --context clean"),
    (train, [*CORRUPTED, "--causal"], "give --context clean"),
    (train, [*ON_TEXT, "--stage_b", "lora", "--lora_r", 0], "--stage_b lora needs a rank"),
    (train, [*ON_TOY, "--stage_b", "lora"], "stand on a trained base"),
    (train, [*ON_TOY, "--stage_b", "copy"], "stand on a trained base"),
    # base.py
    (base, [*ON_TOY, "--one_by_one", 1.5], "--one_by_one: must lie in"),
    (base, [*ON_TOY, "--optimizer", "sgd"], "--optimizer: invalid choice"),
    (sample, [], "nothing to continue"),
    (sample, [*TEXT, "--prompt", ""], "prompt 2 is empty"),
    (sample, ["--prompt", "x" * 120], "120 tokens"),
    (sample, ["--prompt_ids", "5,9999"], "0..271"),
    (sample, ["--prompt_ids", "a"], "--prompt_ids: 'a' is no list of ids like 1,2,3"),
    (sample, [*TEXT, "--n_rounds", 5], "for 0..2 rounds"),
    (sample, [*TEXT, "--temperature", "1e-40"], "at least 0.001"),
    (sample, [*TEXT, "--tau_m2t", "nan"], "must lie in -1..1"),
    (sample, [*TEXT, "--n_rounds", 0, "--tau_joint", 0.5, "--tau_m2t", 0.7], "leave out --tau_m2t"),
    (sample, [*TEXT, "--ckpt", "TREE/toy"], "use --prompt_ids"),
    # evaluate.py
    (evaluate, ["--ckpt", "CKPT"], "so nothing judges it: python sample.py"),
    (evaluate, ["--ckpt", "TREE/toy", "TREE/names"], "several folders are compared on names alone"),
]
GIVEN = {
    train: ["--out_dir", "OUT"], base: ["--out_dir", "OUT"],
    sample: ["--ckpt", "CKPT", "--gen_length", 16], evaluate: [],
}  # fmt: skip


@pytest.mark.parametrize("script, argv, words", MISTAKES, ids=[words for _, _, words in MISTAKES])
def test_a_mistake_is_named(script, argv, words, ckpt, tree, tmp_path, monkeypatch, capsys):
    argv = [*GIVEN[script], *argv, "--device", "cpu"]
    out = tmp_path / "out"
    argv = [word.replace("CKPT", str(ckpt)).replace("OUT", str(out)) for word in placed(argv, tree)]
    assert words.replace("CKPT", str(ckpt)) in refused(script, monkeypatch, capsys, *argv)
    assert not out.exists()


def test_n_and_k_that_are_given_are_those_of_the_adapter(ckpt, tree, tmp_path, monkeypatch, capsys):
    """And the length of its blocks. So they stand in its settings, and in the model that is loaded from it."""
    argv = ["--data", tree / "text", "--init_from", ckpt, "--n_last", 1, "--n_rounds", 3, "--max_iters", 1]
    argv += ["--block_length", 4]
    argv += ["--batch_size", 2, "--device", "cpu", "--out_dir", tmp_path / "out"]
    caller(train, monkeypatch, capsys)(*argv)
    cfg = load_model(tmp_path / "out", "cpu", torch.float32).cfg
    for file in ("train.json", "adapter.json"):
        about = read_json(tmp_path / "out" / file, "file")
        found = about["n_last"], about["n_rounds"], about["block_length"]
        assert found == (cfg.n_last, cfg.n_rounds, cfg.block_length) == (1, 3, 4)


def test_a_run_is_not_overwritten_and_a_resume_keeps_its_settings(tree, tmp_path, monkeypatch, capsys):
    run = caller(train, monkeypatch, capsys)
    a, file = tmp_path / "a", tmp_path / "file"
    two = [*SCRATCH, "--data", tree / "pairs", "--max_iters", 2, "--out_dir"]
    run(*two, a)
    before = {path.name: path.read_bytes() for path in a.iterdir()}
    assert "already holds a run" in run.fails(*two, a)
    again = ["--init_from", "resume", "--out_dir", a]
    assert "--s_max 3 differs" in run.fails(*again, "--s_max", 3)
    for change in (["--n_last", 1], ["--n_rounds", 4], ["--data", tree / "text"], ["--causal"], ["--config", "x.toml"]):
        assert f"{change[0]} " in run.fails(*again, *change)
    file.write_text("in the way")
    assert "cannot write" in run.fails(*two, file / "run")
    assert {path.name: path.read_bytes() for path in a.iterdir()} == before
    assert file.read_text() == "in the way"


def test_rows_of_other_tokens_than_the_models_are_refused(ckpt, tree, tmp_path, monkeypatch, capsys):
    """Also where their numbers are the same: another tokenizer, another toy or another size of it, a toy's rows on a
    model of text, and text on a model of a toy."""
    # the ids of this toy are 0..223, its contexts 224..255, then eos and the mask, as of bytes
    like_bytes = toy_rows(tmp_path / "like bytes", "modes", V=224)
    assert (read_meta(like_bytes).eos_id, read_meta(like_bytes).mask_id) == (256, 257)
    of_it = of_toy(tmp_path / "of it", like_bytes)

    # a tokenizer whose letters have other numbers
    other = byte_rows(tmp_path / "other")
    spec = byte_spec()
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    write_json(other / "tokenizer.json", spec)

    # toys of two kinds, and of two sizes, with as many symbols and contexts
    pairs, sums = (toy_rows(tmp_path / name, name, V=4, m=m) for name, m in (("pairs", 2), ("sum", 2)))
    longer = toy_rows(tmp_path / "longer", "pairs", V=4, m=4)
    swapped = [toy_rows(tmp_path / f"V {V}", "modes", V=V, m=2, n_ctx=40 - V) for V in (16, 24)]
    assert len({(read_meta(rows).eos_id, read_meta(rows).vocab_size) for rows in (pairs, sums, longer)}) == 1
    assert len({read_meta(rows).eos_id for rows in swapped}) == 1
    of_pairs, of_swapped = of_toy(tmp_path / "of pairs", pairs), of_toy(tmp_path / "of swapped", swapped[0])

    for model, rows in (
        (ckpt, other), (ckpt, like_bytes), (tree / "names", tree / "pairs"), (tree / "names", like_bytes),
        (of_it, tree / "text"), (of_pairs, sums), (of_pairs, longer), (of_swapped, swapped[1]),
    ):  # fmt: skip
        argv = ["--data", rows, "--init_from", model, "--max_iters", 1, "--batch_size", 2, "--device", "cpu"]
        line = refused(train, monkeypatch, capsys, *argv, "--out_dir", tmp_path / "out")
        assert line == f"error: --data {rows} has other tokens than --init_from {model}: prepare it with --like {model}"

    # its own, and text by its tokenizer, are read
    call = caller(train, monkeypatch, capsys)
    for number, (model, rows) in enumerate(((of_it, like_bytes), (tree / "names", tree / "text"))):
        call("--data", rows, "--init_from", model, "--max_iters", 1, "--batch_size", 2, "--device", "cpu",
             "--out_dir", tmp_path / str(number))  # fmt: skip


# --- what is shown


def test_text_and_ids_agree(ckpt, monkeypatch, capsys):
    def decoded(*argv):
        run = ["--ckpt", ckpt, "--gen_length", 9, "--device", "cpu", *argv]
        return command_line(sample, monkeypatch, capsys, *run)[1]

    by_text = decoded("--prompt", "ab")
    assert decoded("--prompt_ids", "97,98") == by_text
    d = sample.Decoding(gen_length=9, tau_m2t=0.7, tau_t2t=0.0, n_rounds=2, holes=True)  # the defaults
    model, decode = load_model(ckpt, "cpu", torch.float32), byte_tokenizer().decode
    tokens, nfe, _ = sample.generate_one(model, [97, 98], d)
    total = nfe["full"] + nfe["refresh"] + nfe["partial"] / 2  # n = 2 of 4 layers
    assert by_text.startswith(f"{decode([97, 98, *tokens])}\n[{len(tokens)} tokens; forwards: {nfe['full']} full + ")
    assert f"{nfe['partial']:g} partial x 0.5 + {nfe['refresh']} refresh = {total:.3g}, " in by_text

    # holes are filled, in two blocks, before anything is printed, and what is given stays
    (output,) = sample.generate(model, [[257 if c == "▒" else ord(c) for c in "a▒cdefgh▒j"]], d)
    filled = output.prompt
    assert filled[:1] + filled[2:8] + filled[9:] == list(b"acdefghj") and 257 not in filled
    assert decoded("--prompt", "a▒cdefgh▒j").startswith(decode(filled))

    # a seed may be any whole number, and is hashed
    drawn = [decoded("--prompt", "a", "--temperature", 1, "--seed", seed) for seed in (0, 2**64, 2**64, -1)]
    assert drawn[0] != drawn[1] == drawn[2] != drawn[3] != drawn[0]


@pytest.fixture(scope="module")
def of_names(tmp_path_factory):
    """Its tokens are bytes."""
    return names_folder(tmp_path_factory.mktemp("names"))


def test_a_name_is_judged(of_names, monkeypatch, capsys):
    """A blank at the end of a prompt is the beginning of the next token, and not one of its own."""
    for name, words in {
        "LATIN SMALL LETTER A": "a (U+0061)",
        "QQQ": "(no such character)",
        "latin": "(no such character; names are in upper case)",
    }.items():
        assert sample.verdict(name) == words

    def decoded(*argv):
        code, out, err = command_line(sample, monkeypatch, capsys, "--ckpt", of_names, "--gen_length", 3, *argv)
        assert (code, err) == (0, "")
        return out

    blank, without = decoded("--prompt", "ARABIC ▒"), decoded("--prompt", "ARABIC▒")
    assert blank == without and "(no such character" in blank


def test_the_readmes_training_then_its_evaluation(of_names, tmp_path, monkeypatch, capsys):
    """Two steps of it, on a small model in assets/names, then what it says comes next."""
    shutil.copytree(of_names, tmp_path / "assets" / "names")
    byte_rows(tmp_path / "data" / "names", prompt=-1, judge={"names": "0"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "NAMES", replace(evaluate.NAMES, gen_length=8))
    run = caller(train, monkeypatch, capsys)
    out = run("--n_last", 3, "--max_iters", 2, "--batch_size", 4)
    assert "data/names: 56 rows, " in out and "python evaluate.py --ckpt out/names" in out
    out = caller(evaluate, monkeypatch, capsys)("--ckpt", "out/names", "--prompts", 2)
    assert "2 held-out names" in out and "Stage B" in out


def test_a_console_without_our_signs_is_no_error(ckpt, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    argv = ["sample.py", "--ckpt", str(ckpt), "--prompt", "a", "--gen_length", "9", "--watch"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "stdout", console)
    sample.main()
    assert b"step   1  a" in console.buffer.getvalue()
