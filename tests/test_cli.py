"""A user's mistake: one line that says what is wrong and what to do, exit code 2. `pytest tests/test_cli.py`"""

import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import ROOT, byte_model, caller, command_line, names_folder, refused

import evaluate
import sample
import train
from checkpoint import load_model, save_model
from lib import util
from lib.data import learn_bpe
from lib.tokenizer import byte_tokenizer
from lib.util import END, MASK, Screen, command, fail

TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 2, "--device", "cpu"]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ckpt")
    save_model(byte_model(), folder)
    return folder


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
        (KeyboardInterrupt(), "interrupted; a training run goes on"),
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
MISTAKES = [
    # train.py: the command line, and what it refuses in these words
    (train, ["--learning_rate", "inf"], "--learning_rate: must lie in"),
    (train, ["--init_from", "resume"], "no training run to resume"),
    (train, ["--data", __file__, "--seq_len", 100], "--seq_len 100 must be a multiple"),
    (train, ["--data", __file__, "--toy", "V=3"], "name the toy by --data"),
    (train, ["--data", "pairs", "--seq_len", 16], "--toy m=4"),
    (train, ["--data", "pairs", "--stage_a_only", "--alpha", 1], "leave out --init_from and --alpha"),
    (train, ["--data", "pairs", "--one_by_one", 0.5], "add --stage_a_only"),
    (sample, [], "nothing to continue"),
    (sample, [*TEXT, "--prompt", ""], "prompt 2 is empty"),
    (sample, ["--prompt", "x" * 120], "120 tokens"),
    (sample, ["--prompt_ids", "5,9999"], "0..271"),
    (sample, [*TEXT, "--n_rounds", 5], "for 0..2 rounds"),
    (sample, [*TEXT, "--temperature", "1e-40"], "at least 0.001"),
    (sample, [*TEXT, "--tau_m2t", "nan"], "must lie in -1..1"),
]


@pytest.mark.parametrize("script, argv, words", MISTAKES, ids=[words for _, _, words in MISTAKES])
def test_a_mistake_is_named(script, argv, words, ckpt, tmp_path, monkeypatch, capsys):
    given = ["--out_dir", tmp_path / "out"] if script is train else ["--ckpt", ckpt, "--gen_length", 16]
    assert words in refused(script, monkeypatch, capsys, *given, *argv, "--device", "cpu")


def test_a_run_is_not_overwritten_and_a_resume_keeps_its_settings(tmp_path, monkeypatch, capsys):
    run = caller(train, monkeypatch, capsys)
    a, b, file = tmp_path / "a", tmp_path / "b", tmp_path / "file"
    two = [*TOY, "--max_iters", 2, "--out_dir"]
    run(*two, a)
    before = {path.name: path.read_bytes() for path in a.iterdir()}
    assert "already holds a run" in run.fails(*two, a)
    assert "--s_max 3 differs" in run.fails("--init_from", "resume", "--out_dir", a, "--s_max", 3)
    adapt = ["--init_from", a, "--out_dir", b, "--data"]
    assert "another size" in run.fails(*adapt, "pairs", "--toy", "V=4")
    assert "other tokens" in run.fails(*adapt, "stdlib")
    file.write_text("in the way")
    assert "cannot write" in run.fails(*two, file / "run")
    assert {path.name: path.read_bytes() for path in a.iterdir()} == before
    assert file.read_text() == "in the way"


# --- what is shown

PIECES = {4: "·San", 5: "·York", 6: "·New"}


def test_text_and_ids_agree(ckpt, monkeypatch, capsys):
    def decoded(*argv):
        run = ["--ckpt", ckpt, "--gen_length", 9, "--device", "cpu", *argv]
        return command_line(sample, monkeypatch, capsys, *run)[1]

    by_text = decoded("--prompt", "ab")
    assert decoded("--prompt_ids", "97,98") == by_text
    d = sample.Decoding(gen_length=9, tau_m2t=0.7, tau_t2t=0.0, n_rounds=2, holes=True)  # the defaults
    model, decode = load_model(ckpt, "cpu", torch.float32), byte_tokenizer().decode
    tokens, nfe, _ = sample.generate_one(model, [97, 98], d)
    total = nfe["full"] + nfe["commit"] + nfe["partial"] / 2  # n = 2 of 4 layers
    assert by_text.startswith(f"{decode([97, 98, *tokens])}\n[{len(tokens)} tokens; forwards: {nfe['full']} full + ")
    assert f"{nfe['partial']:g} partial x 0.5 + {nfe['commit']} commit = {total:.3g}, " in by_text

    # holes are filled, in two blocks, before anything is printed, and what is given stays
    (output,) = sample.generate(model, [[257 if c == "▒" else ord(c) for c in "a▒cdefgh▒j"]], d)
    filled = output.prompt
    assert filled[:1] + filled[2:8] + filled[9:] == list(b"acdefghj") and 257 not in filled
    assert decoded("--prompt", "a▒cdefgh▒j").startswith(decode(filled))

    # a seed may be any whole number, and is hashed
    drawn = [decoded("--prompt", "a", "--temperature", 1, "--seed", seed) for seed in (0, 2**64, 2**64, -1)]
    assert drawn[0] != drawn[1] == drawn[2] != drawn[3] != drawn[0]


def test_every_character_of_a_token_can_be_seen():
    tok = byte_tokenizer()
    ids = [*b" \n\t\r\0A<", *"é".encode(), tok.eos_id, 260]
    assert list(map(tok.piece, ids)) == [*"·↵⇥␍", "<U+0000>", "A", "<", "<C3>", "<A9>", "<|endoftext|>", "<260>"]
    words = {0: " e\u0301".encode(), 1: b"a\xe2\x82", 2: "\u202e".encode()}
    tok = replace(tok, token_bytes=words)
    assert list(map(tok.piece, words)) == ["·e\u0301", "a<E2><82>", "<U+202E>"]


def test_steps_by_hand(monkeypatch, capsys):
    """Stage B writes "New", where Stage A says "San"; the last step edits, and Stage A would have written as much."""
    steps = [
        dict(after=[6, 9, 9, 8], token_a=[4, 5, 5, 8], bundle=[1, 0, 0, 0], edited=[0, 0, 0, 0]),
        dict(after=[4, 5, 9, 8], token_a=[4, 5, 5, 8], bundle=[0, 1, 0, 0], edited=[1, 0, 0, 0]),
    ]
    lines = [f"[ New](A:  San){MASK}{MASK}{END}", f"{{ San}}[ York]{MASK}{END}"]
    rows = [SimpleNamespace(number=0, ids=[1, 2])]
    tokenizer = SimpleNamespace(piece=PIECES.get, decode=lambda ids: "In the")

    def shown() -> str:
        screen = Screen(1, tokenizer, 9, 8)
        for step in steps:
            screen.on_step(rows, SimpleNamespace(**{name: torch.tensor([of]) for name, of in step.items()}))
        return capsys.readouterr().out.partition("\n")[2]  # without the legend

    # through a pipe a step is a line; numbers stand apart
    assert shown().splitlines() == [f"step   1  In the{lines[0]}", f"step   2  In the{lines[1]}"]
    tokenizer = None
    assert shown().splitlines()[0] == f"step   1  1 2 [6 ](A: 4 ){MASK} {MASK} {END} "

    # a terminal draws it in colour, the second step in the place of the first
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(util, "PACE", 0)
    first, second = shown().splitlines()
    assert first.startswith("\x1b[2Kstep   1  1 2 \x1b[33m[6 ]\x1b[0m\x1b[2m(A: 4 )\x1b[0m")
    assert second.startswith("\x1b[1F\x1b[2Kstep   2  1 2 \x1b[35m{4 }\x1b[0m\x1b[32m[5 ]\x1b[0m")


@pytest.fixture(scope="module")
def of_names(tmp_path_factory):
    """Its tokens are bytes."""
    return names_folder(tmp_path_factory.mktemp("names"), learn_bpe([], 258))


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
    monkeypatch.chdir(tmp_path)
    run = caller(train, monkeypatch, capsys)
    out = run("--n_last", 3, "--max_iters", 2, "--batch_size", 4)
    assert "a run of the kind 'names'" in out and "python evaluate.py --ckpt out/names" in out
    out = caller(evaluate, monkeypatch, capsys)("--ckpt", "out/names", "--prompts", 2)
    assert "2 held-out names" in out and "Stage B" in out


def test_a_console_without_our_signs_is_no_error(ckpt):
    argv = [sys.executable, "sample.py", "--ckpt", ckpt, "--prompt", "a", "--gen_length", "9", "--watch"]
    env = dict(PYTHONIOENCODING="cp1252", OMP_NUM_THREADS="1")
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and b"step   1  a" in done.stdout
