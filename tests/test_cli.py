"""A user's mistake: one line that says what is wrong and what to do, exit code 2. `pytest tests/test_cli.py`"""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import ROOT, approx, byte_model, caller, command_line, names_folder, random_adapter, refused, tiny_model
from resuming import byte_rows, toy_rows

import base
import evaluate
import prepare
import sample
import toy
import train
from checkpoint import load_model, save_model
from decoding import Decoding
from experiments import names
from lib import util
from lib.names import verdict
from lib.rows import read_meta
from lib.tokenizer import byte_spec, byte_tokenizer
from lib.util import Parser, append_line, command, fail, printable, progress, quoted, read_json, read_lines, write_json
from llada import ablation
from llada import run as runs
from tools import bench, playground, plots

NAMES = ROOT / "data/names"
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
    shutil.copytree(tree / "names", tree / "mute")
    (tree / "mute" / "tokenizer.json").unlink()
    shutil.copytree(tree / "adapter", tree / "itself")
    shutil.copy(ckpt / "config.json", tree / "itself")
    write_json(tree / "itself" / "adapter.json", read_json(tree / "adapter" / "adapter.json", "file") | {"base": "."})
    return tree


def of_toy(folder: Path, rows: Path) -> Path:
    """A model of these rows' tokens."""
    meta = read_meta(rows)
    ids = dict(vocab_size=meta.vocab_size, eos_id=meta.eos_id, mask_id=meta.mask_id)
    save_model(tiny_model(**ids, block_length=meta.block_length or 8), folder)
    shutil.copyfile(rows / "meta.json", folder / "meta.json")
    return folder


# --- the one handler
def script_of(main) -> SimpleNamespace:
    return SimpleNamespace(__name__="script", main=command(main))


def test_what_a_user_can_mend_is_one_line_and_what_only_we_can_is_a_traceback(monkeypatch, capsys):
    def raising(error: BaseException) -> SimpleNamespace:
        def main():
            raise error

        return script_of(main)

    allocator = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    for error, words in (
        (OSError(28, "No space left on device"), "No space left on device"), (KeyboardInterrupt(), "interrupted"),
        (MemoryError(), "memory"), (torch.OutOfMemoryError(), "memory"), (allocator, "memory"),
    ):  # fmt: skip
        assert words in refused(raising(error), monkeypatch, capsys)
    for error in (RuntimeError("ours"), AssertionError()):
        with pytest.raises(type(error)):
            command_line(raising(error), monkeypatch, capsys)
    assert command_line(raising(SystemExit(130)), monkeypatch, capsys) == (130, "", "")

    # several lines, a NUL byte or an escape in a name are one line that a terminal only shows
    line = refused(script_of(lambda: fail("a\nb \0 \x1b[2J")), monkeypatch, capsys)
    assert line == "error: a b <U+0000> <U+001B>[2J"


def test_a_reader_who_leaves_is_no_error():
    """As in `python toy.py | head -1`, the pipe is closed before the rest is written."""
    argv = [sys.executable, "toy.py"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 141 and not err


# --- what is printed
def test_a_terminal_is_given_no_command():
    """Escapes, halves of characters, and characters that change the direction of writing are made visible. Any other
    character stays, and so do line ends and tabs."""
    for text, shown in (
        ("a\x1b[2J\x07\rb", "a<U+001B>[2J<U+0007><U+000D>b"), ("\x9b\u202ex\ud800", "<U+009B><U+202E>x<U+D800>"),
        ("é漢\u3000😀\u200d\u00a0\n\t", "é漢\u3000😀\u200d\u00a0\n\t"),
    ):  # fmt: skip
        assert printable(text) == shown
    for folder in ("out/a", "my run; ls", "it's $HOME"):
        assert shlex.split(quoted(folder)) == [folder]


def test_progress_through_a_pipe_is_a_line_now_and_then(monkeypatch, capsys):
    """Here each item takes ten seconds, and four items came before."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(util.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(util, "EVERY", 25)
    assert list(progress("abcdef", "items", done=4)) == list("abcdef")
    assert capsys.readouterr().err.splitlines() == ["items: 7 of 10", "items: 10 of 10"]


def test_help_shows_folders_as_they_are_typed(monkeypatch, capsys):
    for script in (train, base, sample, evaluate, bench, playground, plots):
        code, out, _ = command_line(script, monkeypatch, capsys, "--help")
        assert code == 0 and "PosixPath" not in out and str(ROOT) not in out
    assert "(default: 1/1)" in " ".join(runs.build_parser().format_help().split())
    parser = Parser("")
    parser.add_argument("--ckpt", type=Path, nargs="+", default=[Path("a b"), Path("c")], help="%%")
    parser.add_argument("--edits", nargs="+", default=[None], help="x")
    assert "% (default: a b c)" in parser.format_help() and "x (default: none)" in parser.format_help()


def test_a_record_that_is_cut_short_is_left_out(tmp_path):
    """The next record gets a line of its own, also after a record that lacks only its line end."""
    path = tmp_path / "new" / "r.jsonl"
    for held, there in ((None, []), (b'{"n": 1}\n{"n"', [1]), (b'{"n": 1}\n{"n": 2}', [1, 2]), (b'{"n', [])):
        if held is not None:
            path.write_bytes(held)
            assert [record["n"] for record in read_lines(path, {"n": int})] == there
        append_line(path, {"n": 7})
        assert [record["n"] for record in read_lines(path, {"n": int})] == [*there, 7]
        assert path.read_bytes().count(b"\n") == len(there) + 1


# --- mistakes, one of each kind: a script, what is typed, and what the one line names
ON_TEXT = ["--data", "TREE/text", "--init_from", "CKPT", "--block_length", 8]
ON_TOY = ["--data", "TREE/pairs", "--init_from", "scratch"]
MEASURE = ["measure", "--system", "x", "--seed", 1, "--out", "OUT"]
OUT = ["--out", "OUT"]
WRITTEN = ["TREE/text", "--written_by", "CKPT", *OUT]
MISTAKES = [
    (train, ["--learning_rate", "inf"], "--learning_rate"),
    (train, ["--init_from", "resume"], "--out_dir"),
    (train, [*ON_TEXT, "--seq_len", 100], "--seq_len 100"),
    (train, [*ON_TEXT, "--seq_len", 256], "128"),
    (train, [*ON_TEXT, "--one_by_one", 0.5], "--one_by_one"),
    (train, [*ON_TEXT, "--preset", "text"], "--preset text does nothing"),
    (train, [*ON_TOY, "--block_length", 8], "made for blocks of 2"),
    (train, [*ON_TOY, "--block_length", 1], "made for blocks of 2"),
    # n and K are the model's own, or possible ones; an adapter has its own, and is no place to start
    (train, [*ON_TEXT, "--n_last", 5], "--n_last 5: this model has 4 layers"),
    (train, [*ON_TEXT, "--n_rounds", 1001], "1..1000"),
    (train, [*ON_TEXT[:2], "--init_from", "TREE/adapter", "--n_last", 1], "CKPT"),
    (train, [*ON_TOY, "--stage_b", "causal", "--n_rounds", 2], "--n_rounds 1"),
    (train, ["--config", "TREE/none.toml"], "TREE/none.toml"),
    (base, [*ON_TOY, "--one_by_one", 1.5], "--one_by_one"),
    (base, ["--data", NAMES, "--init_from", ROOT / "assets/names"], "--init_from"),
    (base, [*ON_TOY, "--stage_b", "causal"], "--stage_b"),
    (base, [*ON_TOY, "--one_by_one", 0.5, "--context", "corrupted"], "--context clean"),
    (prepare, ["names", *OUT, "--like", "TREE/pairs"], "TREE/pairs has no tokenizer.json"),
    (prepare, ["names", *OUT, "--like", "TREE/none.json"], "TREE/none.json"),
    (prepare, ["names", "--out", NAMES], f"{NAMES} already holds rows"),
    # flags that would do nothing, and a teacher of other tokens
    (prepare, [*WRITTEN, "--max_docs", 9], "--max_docs"),
    (prepare, [*WRITTEN, "--like", NAMES], "--like"),
    (prepare, ["TREE/text", *WRITTEN], "one folder"),
    (prepare, [*WRITTEN, "--gen_length", 127], "the model has 128 positions"),
    (prepare, ["names", *OUT, "--beam", 9], "--beam"),
    (prepare, ["names", *OUT, "--gen_length", 9], "--gen_length"),
    (prepare, ["TREE/text", "--written_by", "TREE/toy", *OUT], "--like TREE/toy"),
    (toy, ["poems"], "'poems'"),
    (toy, ["modes"], "--out"),
    (toy, ["modes", "--out", NAMES], f"{NAMES} already holds rows"),
    (toy, ["copy", "m=8", *OUT], "8**8 = 16,777,216 tuples"),
    (toy, ["modes", "V=2", *OUT], "V = 2"),
    (toy, ["pairs", "m=3", *OUT], "even m, not 3"),
    (toy, ["gaussian", "rho=nan", *OUT], "rho must be in 0..0.9999"),
    (toy, ["gaussian", "V=8", *OUT], "it uses levels, m, n_ctx, rho"),
    (toy, ["modes", "V=x", *OUT], "'V=x'"),
    (sample, [], "--prompt"),
    (sample, ["--prompt", "a", "--prompt", ""], "prompt 2"),
    (sample, ["--prompt", "x" * 120], "120 tokens"),
    (sample, ["--prompt_ids", "5,9999"], "0..271"),
    (sample, ["--prompt_ids", "a"], "--prompt_ids"),
    (sample, ["--prompt", "a", "--temperature", "1e-40"], "--temperature"),
    (sample, ["--prompt", "a", "--n_rounds", 0, "--tau_joint", 0.5, "--tau_m2t", 0.7], "--tau_m2t"),
    (sample, ["--prompt", "a", "--ckpt", "TREE/toy"], "--prompt_ids"),
    (sample, ["--prompt", "a", "--ckpt", "TREE/itself"], "TREE/itself as its base"),
    (evaluate, ["--ckpt", "CKPT"], "--data"),
    (evaluate, ["--ckpt", "CKPT", "--data", "TREE/text", "--seq_len", 100], "multiple of the block length, 8"),
    (evaluate, ["--ckpt", "CKPT", "--data", "TREE/text", "--seq_len", 1024], "--seq_len 1024 must be at most 128"),
    (evaluate, ["--ckpt", "TREE/toy", "TREE/names"], "--ckpt"),
    # a flag that would do nothing
    (sample, ["--prompt", "a", "--top_k", 5], "--temperature 1"),
    (evaluate, ["--ckpt", "TREE/names", "--data", "TREE/text"], "--data does nothing"),
    (evaluate, ["--ckpt", "TREE/toy", "--prompts", 2], "--prompts does nothing"),
    (evaluate, ["--ckpt", "CKPT", "--temperature", 1], "--temperature does nothing"),
    # what only a model of names can be asked, and a base that is none
    *[(bench, ["--names", folder], folder) for folder in ("TREE/toy", "TREE/mute", "CKPT", "TREE/text")],
    *[(names, [*MEASURE, "--way", "run", "--ckpt", of], of) for of in ("TREE/toy", "TREE/mute", "CKPT")],
    (names, [*MEASURE, "--way", "threshold", "--ckpt", "TREE/names", "--dial", 2], "--dial"),
    (ablation, ["--ckpt", "TREE/adapter"], "TREE/adapter is not an adapter of a model of names"),
    (names, ["compare", "TREE/pairs/meta.json", "--against", "x"], "meta.json"),
    (names, ["measure"], " measure --help)"),
    (playground, ["--ckpt", "TREE/toy"], "TREE/toy has no tokenizer"),
    (playground, ["--ckpt", ROOT / "assets/names/paper", "TREE/toy"], "TREE/toy"),
    # a flag that names a place, and none is named
    (train, ["--out_dir", ""], "--out_dir"),
    (sample, ["--prompt", "a", "--ckpt", ""], "--ckpt"),
    (prepare, ["", "--out", "OUT"], "SOURCE"),
]  # fmt: skip
CPU = ["--device", "cpu"]
GIVEN = {
    train: ["--out_dir", "OUT", *CPU], base: ["--out_dir", "OUT", *CPU],
    sample: ["--ckpt", "CKPT", "--gen_length", 16, *CPU], evaluate: CPU,
}  # fmt: skip


@pytest.mark.parametrize("script, argv, named", MISTAKES)
def test_a_mistake_is_named(script, argv, named, ckpt, tree, tmp_path, monkeypatch, capsys):
    def placed(word: object) -> str:
        return str(word).replace("TREE", str(tree)).replace("CKPT", str(ckpt)).replace("OUT", str(tmp_path / "out"))

    argv = map(placed, [*GIVEN.get(script, []), *argv])
    assert placed(named) in refused(script, monkeypatch, capsys, *argv)
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_overwritten_and_a_resume_keeps_its_settings(tree, tmp_path, monkeypatch, capsys):
    run = caller(train, monkeypatch, capsys)
    a, file = tmp_path / "a", tmp_path / "file"
    two = [*SCRATCH, "--data", tree / "pairs", "--max_iters", 2, "--out_dir"]
    run(*two, a)
    before = {path.name: path.read_bytes() for path in a.iterdir()}
    assert "already holds a run" in run.fails(*two, a)
    again = ["--init_from", "resume", "--out_dir", a]
    assert "--s_max 3 differs" in run.fails(*again, "--s_max", 3)
    for change in (["--n_last", 1], ["--data", tree / "text"], ["--stage_b", "causal"], ["--config", "x.toml"]):
        assert f"{change[0]} " in run.fails(*again, *change)
    file.write_text("in the way")
    assert "cannot write" in run.fails(*two, file / "run")

    # nor are files of the user's, which have no run beside them
    for name in ("tokenizer.json", "log.jsonl", "model.safetensors"):
        own = tmp_path / name.split(".")[0] / name
        own.parent.mkdir()
        own.write_text("mine")
        assert f"({name})" in run.fails(*two, own.parent)
        assert own.read_text() == "mine"

    # a run whose settings are gone
    (tmp_path / "empty").mkdir()
    write_json(tmp_path / "empty" / "train.json", {})
    assert "init_from is None" in run.fails("--init_from", "resume", "--out_dir", tmp_path / "empty")
    assert {path.name: path.read_bytes() for path in a.iterdir()} == before
    assert file.read_text() == "in the way"


def test_rows_of_other_tokens_than_the_models_are_refused(ckpt, tree, tmp_path, monkeypatch, capsys):
    """They are refused even if their ids fit: another tokenizer, another toy, a toy's rows on a model of text, and text
    on a model of a toy."""
    # the ids of this toy are 0..223, its contexts 224..255, then eos and the mask, as of bytes
    like_bytes = toy_rows(tmp_path / "like bytes", "modes", V=224)
    of_it = of_toy(tmp_path / "of it", like_bytes)

    # a tokenizer whose letters have other numbers
    other = byte_rows(tmp_path / "other")
    spec = byte_spec()
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    write_json(other / "tokenizer.json", spec)

    pairs, sums = (toy_rows(tmp_path / name, name, V=4, m=2) for name in ("pairs", "sum"))
    of_pairs = of_toy(tmp_path / "of pairs", pairs)
    for rows in ((tree / "text", like_bytes), (pairs, sums)):
        assert len({(read_meta(of).eos_id, read_meta(of).mask_id) for of in rows}) == 1

    call = caller(train, monkeypatch, capsys)
    how = ["--max_iters", 1, "--batch_size", 2, "--device", "cpu", "--out_dir"]
    for model, rows in ((ckpt, other), (ckpt, like_bytes), (of_it, tree / "text"), (of_pairs, sums)):
        line = call.fails("--data", rows, "--init_from", model, *how, tmp_path / "out")
        assert str(rows) in line and f"--like {quoted(model)}" in line

    # its own, and text by its tokenizer, are read
    for number, (model, rows) in enumerate(((of_it, like_bytes), (tree / "names", tree / "text"))):
        call("--data", rows, "--init_from", model, *how, tmp_path / str(number))


# --- what sample.py and evaluate.py say
@pytest.fixture
def said(monkeypatch, capsys):
    def said(folder: Path, *argv) -> str:
        return caller(sample, monkeypatch, capsys)("--ckpt", folder, "--gen_length", 9, "--device", "cpu", *argv)

    return said


def test_text_and_ids_agree(ckpt, said):
    by_text = said(ckpt, "--prompt", "ab")
    assert said(ckpt, "--prompt_ids", "97,98") == by_text
    d = Decoding(gen_length=9, tau_m2t=0.7, tau_t2t=0.0, n_rounds=2, holes=True)  # the defaults
    model, decode = load_model(ckpt, "cpu", torch.float32), byte_tokenizer().decode
    tokens, nfe, _ = sample.generate_one(model, [97, 98], d)
    text = printable(decode([97, 98, *tokens]))
    assert by_text.startswith(text)
    total = nfe["full"] + nfe["refresh"] + nfe["partial"] / 2  # n = 2 of 4 layers
    figures = [float(x) for x in re.findall(r"\d+(?:\.\d+)?", by_text[len(text) :].splitlines()[1])]
    expected = [len(tokens), nfe["full"], nfe["partial"], 0.5, nfe["refresh"], total, total / len(tokens)]
    assert figures == approx(expected, rel=0.01)

    # a prompt that fills all of the 128 positions, with what is written
    assert said(ckpt, "--prompt", "x" * 119).startswith("x" * 119)

    # holes are filled, in two blocks, before anything is printed, and what is given stays
    (output,) = sample.generate(model, [[257 if c == "▒" else ord(c) for c in "a▒cdefgh▒j"]], d)
    filled = output.prompt
    assert filled[:1] + filled[2:8] + filled[9:] == list(b"acdefghj") and 257 not in filled
    assert said(ckpt, "--prompt", "a▒cdefgh▒j").startswith(printable(decode(filled)))

    # a seed may be any whole number, and is hashed
    drawn = [said(ckpt, "--prompt", "a", "--temperature", 1, "--seed", seed) for seed in (0, 2**64, 2**64, -1)]
    assert drawn[0] != drawn[1] == drawn[2] != drawn[3] != drawn[0]


def test_a_name_is_judged(tree, said):
    """A blank at the end of a prompt belongs to the next token, and is no token of its own."""
    assert "a (U+0061)" in verdict("LATIN SMALL LETTER A")
    assert verdict("RIGHT-TO-LEFT OVERRIDE") == "<U+202E> (U+202E)"
    assert all("no such character" in verdict(name) for name in ("QQQ", "latin"))
    blank, without = said(tree / "names", "--prompt", "ARABIC ▒"), said(tree / "names", "--prompt", "ARABIC▒")
    assert blank == without and "no such character" in blank


def test_a_prompt_with_escapes_is_shown(ckpt, said):
    for how in ([], ["--watch"]):
        out = said(ckpt, "--prompt", "a\x1b[2J\x07", *how)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", out) and "a<U+001B>[2J<U+0007>" in out


def test_a_console_without_our_signs_is_no_error(ckpt, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    argv = ["sample.py", "--ckpt", str(ckpt), "--prompt", "a", "--gen_length", "9", "--watch"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "stdout", console)
    sample.main()
    assert b"step   1  a" in console.buffer.getvalue()
