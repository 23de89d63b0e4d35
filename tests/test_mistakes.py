"""A user's mistake or a damaged file: one line that names it, exit code 2, and nothing is written. What is written is
whole, whoever is killed while writing. A mistake of ours keeps its traceback. `pytest tests/test_mistakes.py`"""

import json
import os
import shutil
import signal
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from common import GOLDEN, byte_model, byte_spec, caller, command_line, random_adapter
from resuming import assert_same_end, byte_rows, toy_rows

import base
import checkpoint
import convert_weights
import evaluate
import prepare
import sample
import toy
import train
from lib import util
from lib.run import interruptible, report, rewind_log, tell_what_is_next
from lib.util import Mistake, alone_in, append_line, read_lines, write_json
from released import export, int8

CPU = ["--device", "cpu"]
SMALL = ["--batch_size", 2, "--max_iters", 2, "--eval_interval", 1, *CPU]
TOY = ["--data", "TREE/pairs", "--init_from", "scratch", *SMALL, "--out_dir", "OUT"]
TEXT = ["--data", "TREE/text", "--init_from", "TREE/bytes", "--seq_len", 32, *SMALL, "--out_dir", "OUT"]
SAMPLE = ["--ckpt", "TREE/bytes", "--prompt", "a", "--gen_length", 1, *CPU]
OUT = ["--out", "OUT"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder of every kind that a command reads."""
    tree = tmp_path_factory.mktemp("tree")
    checkpoint.save_model(byte_model(n_layer=2, n_last=1), tree / "bytes")
    write_json(tree / "bytes" / "tokenizer.json", byte_spec())
    random_adapter(tree / "adapter", tree / "bytes")
    shutil.copytree(GOLDEN, tree / "released")
    toy_rows(tree / "pairs")
    byte_rows(tree / "text")
    (tree / "link").symlink_to("nowhere")
    (tree / "records").mkdir()
    record = json.dumps({"text": "hello " * 9, "int_score": 4, "token_count": 300})
    (tree / "records" / "a.jsonl").write_text(f"{record}\n" * 5)

    # a tokenizer whose letters have other numbers
    spec = byte_spec()
    spec["model"]["vocab"] |= {"a": 98, "b": 97}
    write_json(byte_rows(tree / "other") / "tokenizer.json", spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *placed(TOY, OUT=tree / "toy", TREE=tree)])
        train.main()
    return tree


def placed(argv: list, **folders: Path) -> list[str]:
    """A command line in which each name is replaced by its folder."""
    line = "\n".join(map(str, argv))
    for name, folder in folders.items():
        line = line.replace(name, str(folder))
    return line.split("\n")


# --- what is typed: a command, and what its one line says
TYPED = [
    # a value with a dash or control characters
    (sample, [*SAMPLE, "--prompt", "-->"], "with =, as in --prompt=-->"),
    (sample, ["--prompt=--"], "--prompt=--: -- cannot be a value"),
    (sample, [*SAMPLE, "--ckpt", "a\x1b[2J"], r"control characters in it: 'a\x1b[2J'"),
    # no such place, a place of another kind, one that is taken
    (train, ["--config", "TREE/none.toml", *TOY], "no config at TREE/none.toml"),
    (train, [*TEXT, "--init_from", "TREE/adapter"], "--init_from TREE/bytes"),
    (prepare, ["names", "--out", "TREE/text"], "TREE/text already holds rows"),
    (train, [*TOY, "--out_dir", "TREE/toy"], "already holds a run"),
    (toy, ["modes", "--out", "TREE/link"], "TREE/link is a link to nowhere"),
    # sizes that do not fit each other
    (train, [*TOY, "--block_length", 8], "made for blocks of 2"),
    (train, [*TEXT, "--seq_len", 100], "--seq_len 100"),
    (train, [*TEXT, "--n_last", 3], "--n_last 3: this model has 2 layers"),
    (sample, [*SAMPLE, "--prompt", "x" * 128], "128 tokens"),
    (sample, [*SAMPLE, "--prompt_ids", 272], "ids outside 0..271"),
    (base, TEXT, "a base is trained from scratch"),
    (base, [*TOY, "--one_by_one", 0.5, "--context", "corrupted"], "give --context clean"),
    (base, [*TOY, "--stage_b", "causal", "--corruption", "mask"], "a base has no Stage B"),
    (sample, [*SAMPLE, "--prompt", ""], "is empty"),
    # tokens of another kind, also if their ids fit
    (train, [*TEXT, "--data", "TREE/other"], "--like TREE/bytes"),
    (sample, [*SAMPLE, "--ckpt", "TREE/toy"], "--prompt_ids"),
]  # fmt: skip


@pytest.mark.parametrize("script, argv, says", TYPED)
def test_a_mistake_in_what_is_typed(script, argv, says, tree, tmp_path, monkeypatch, capsys):
    argv, (says,) = (placed(words, TREE=tree, OUT=tmp_path / "out") for words in (argv, [says]))
    assert says in caller(script, monkeypatch, capsys).fails(*argv)
    assert not (tmp_path / "out").exists()


def test_a_config(tree, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.toml"
    run = caller(train, monkeypatch, capsys)
    texts = {f"{name} = true": f"a.toml: a file cannot set {name} " for name in ("help", "config", "typo")}
    texts |= {'init_from = "resume"': "cannot set init_from to resume", "a = [": "cannot be read"}
    for text, says in (texts | {"seq_len = 32.5": "--seq_len: invalid int value: '32.5'"}).items():
        path.write_text(text)
        assert says in run.fails("--config", path, *SMALL, "--out_dir", tmp_path / "out")

    # a byte order mark is no mistake; ~ is the home folder, also where a shell does not know it
    path.write_text('out_dir = "~/runs/a"', encoding="utf-8-sig")
    monkeypatch.setenv("HOME", str(tmp_path))
    run("--config", path, *placed(TOY[:-2], TREE=tree))
    caller(sample, monkeypatch, capsys)("--ckpt=~/runs/a", "--prompt_ids", 1, "--gen_length", 1, *CPU)


# --- files that are damaged: a folder, its file, a command that reads it, and what an entry of the file becomes
GONE = object()
IT = ["--data", "IT", "--init_from", "scratch", "--seq_len", 32, *SMALL, "--out_dir", "OUT"]
DECODE = ["--ckpt", "IT", *SAMPLE[2:]]
RESUME = ["--init_from", "resume", "--out_dir", "IT", "--max_iters", 2]
READERS = [
    ("bytes", "config.json", sample, DECODE, {"n_layer": -1, "rope_theta": float("nan"), "eos_id": True}),
    ("bytes", "model.safetensors", sample, DECODE, {"markers/dtype": "I32", "markers/shape": [9], "markers": GONE}),
    ("bytes", "tokenizer.json", sample, DECODE, {"model/vocab": None, "added_tokens/0": 4, "added_tokens/1/id": "4"}),
    ("adapter", "adapter.json", sample, DECODE, {"base": "nowhere", "n_last": 4.5, "stage_b": "x", "lora_r": 0}),
    ("adapter", "adapter.safetensors", sample, DECODE, {"markers/dtype": "I32", "markers": GONE}),
    ("toy", "meta.json", evaluate, ["--ckpt", "IT", *CPU], {}),
    ("toy", "config.json", train, RESUME, {"rope_theta": 2e4}),  # of another model than the run's
    ("toy", "train.json", train, RESUME, {"init_from": GONE, "seq_len": "x", "unknown": 1}),
    ("toy", "state.safetensors", train, RESUME, {"param.markers/shape": [9], "__metadata__": GONE}),
    ("pairs", "meta.json", train, IT, {"mask_id": GONE}),
    ("pairs", "train.safetensors", train, IT, {"ids/shape": [4], "starts/dtype": "I32", "prompts": GONE}),
    ("released", "config.json", convert_weights, ["--src", "IT", *OUT], {"num_experts": None, "use_bias": True}),
]  # fmt: skip


def damaged(raw: bytes, name: str, place: str, value: object) -> bytes:
    """The file with another value at one place of its JSON; in a file of tensors this is the header."""
    n = int.from_bytes(raw[:8], "little") + 8 if name.endswith(".safetensors") else 0
    about = json.loads(raw[8:n] or raw)
    *outer, last = [int(key) if key.isdecimal() else key for key in place.split("/")]
    holder = about
    for key in outer:
        holder = holder[key]
    holder[last] = value
    if value is GONE:
        del holder[last]
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text + raw[n:] if n else text


@pytest.mark.parametrize("folder, name, script, argv, entries", READERS)
def test_a_damaged_file_is_named(folder, name, script, argv, entries, tree, tmp_path, monkeypatch, capsys):
    it, out = tree / "it", tmp_path / "out"
    shutil.rmtree(it, ignore_errors=True)
    shutil.copytree(tree / folder, it)
    raw = (it / name).read_bytes()
    contents = [b"null", b"\xff\xfe", raw[: len(raw) // 2]]
    contents += [damaged(raw, name, place, value) for place, value in entries.items()]

    run = caller(script, monkeypatch, capsys)
    argv = placed(argv, IT=it, OUT=out, TREE=tree)
    for content in contents:
        (it / name).write_bytes(content)
        line = run.fails(*argv)
        assert str(it) in line or "--init_from" in line, content[-200:]
        assert not out.exists()
    (it / name).write_bytes(raw)
    run(*argv)


def test_lines_that_are_cut_short(tmp_path):
    """A record after such a line gets a line of its own. Of a log, what came before the last save is kept, with that
    save's validation. Another line that cannot be read is refused, and the log stays as it is."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n"')
    append_line(path, {"n": 7})
    assert list(read_lines(path, {"n": int})) == [{"n": 1}, {"n": 7}]

    kept = [b'{"step": 0}', b'{"step": 1}', b'{"step": 2, "val": true}']
    dropped = [b'{"step": 2}', b'{"step": 3, "val": true}', b'{"st']
    path.write_bytes(b"\n".join([*kept, *dropped]))
    rewind_log(path, 2)
    assert path.read_bytes() == b"".join(line + b"\n" for line in kept)
    for bad in (b"5", b'{"st', b'{"step": "1"}', b"\xff", b"[" * 9999):
        path.write_bytes(b"\n".join([kept[0], bad, kept[2], b""]))
        with pytest.raises(Mistake, match="line 2 of .*r.jsonl"):
            rewind_log(path, 2)
        assert path.read_bytes().splitlines() == [kept[0], bad, kept[2]]


# --- what is written is whole
def killed_at(k: int, script, monkeypatch, argv: list[str]) -> None:
    """A command gets SIGKILL before it renames its k-th file."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    files = []

    def replace(source, target):
        files.append(target)
        if len(files) > k:
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(sys, "argv", [script.__name__, *argv])
    try:
        script.main()
    finally:
        os._exit(1)


@pytest.mark.parametrize("script, argv", [
    (train, ["--data", "TREE/pairs", "--init_from", "TREE/toy", *SMALL, "--out_dir", "OUT"]),
    (convert_weights, ["--src", "TREE/released", *OUT]),
    (export, ["--to", "hf", "--src", "TREE/bytes", *OUT]),
    (int8, ["--src", "TREE/bytes", *OUT]),
    (toy, ["pairs", "--rows", 64, *OUT]),
    (prepare, ["TREE/records/a.jsonl", *OUT]),
])  # fmt: skip
def test_what_is_written_is_whole_whatever_a_kill_leaves(script, argv, tree, tmp_path, monkeypatch, capsys):
    """A file is on the disk before it has its name, and its name before the next file. After a kill the command goes
    on, and leaves nothing of its own. And no second run writes into the folder meanwhile."""
    whole = tmp_path / "whole"
    run = caller(script, monkeypatch, capsys)
    with alone_in(whole):
        assert f"another run is writing into {whole}" in run.fails(*placed(argv, OUT=whole, TREE=tree))
    assert not whole.exists()

    rename = os.replace
    events = []

    def replace(source, target):
        at = os.stat(source).st_ino, os.stat(target.parent).st_ino
        rename(source, target)
        events.append((target.name, *at))

    before = os.umask(0o027)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: events.append(os.fstat(number).st_ino))
        patch.setattr(os, "replace", replace)
        run(*placed(argv, OUT=whole, TREE=tree))
    os.umask(before)
    renamed = [i for i, event in enumerate(events) if isinstance(event, tuple)]
    assert all((events[i - 1], events[i + 1]) == events[i][1:] for i in renamed)
    # there is no other way to write a file, and all have the same rights; the folder is in its own folder's list
    files = {path.name: path for path in whole.iterdir()}
    assert {events[i][0]: 0o640 for i in renamed} == {name: path.stat().st_mode & 0o777 for name, path in files.items()}
    assert tmp_path.stat().st_ino in events[: renamed[0]]
    # a state says how many lines of the log are before it: they are on the disk first
    states = [i for i in renamed if events[i][0] == "state.safetensors"]
    assert len(states) == (2 if script is train else 0)
    assert all(files["log.jsonl"].stat().st_ino in events[i - 3 : i] for i in states)

    # the first save, and of a run also the second, between its state and what it has learned
    for k in (2, 6) if script is train else (2,):
        out = tmp_path / f"killed at {k}"
        killed_at(k, script, monkeypatch, placed(argv, OUT=out, TREE=tree))
        assert len(list(out.glob(f"{util.UNFINISHED}*/*"))) == 1
        if script is not train:  # a folder that has these is whole
            assert not {path.name for path in out.iterdir()} & {"config.json", "meta.json"}
        resumes = (out / "train.json").exists()
        run(*(["--init_from", "resume", "--out_dir", out] if resumes else placed(argv, OUT=out, TREE=tree)))
        if script is train:
            assert_same_end(out, whole)
        assert {path.name for path in out.iterdir()} == files.keys()
        varies = {"log.jsonl", "train.json", "state.safetensors"}  # the time, the folder
        assert all((out / name).read_bytes() == files[name].read_bytes() for name in files.keys() - varies)


def test_several_that_append_to_one_file(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_line(tmp_path / "r.jsonl", {"n": n}), range(200)))
    assert sorted(record["n"] for record in read_lines(tmp_path / "r.jsonl", {"n": int})) == list(range(200))


def test_a_folder_that_is_deleted_under_a_run_is_not_written_to(tmp_path):
    """Another run may have made it again."""
    out = tmp_path / "out"
    with alone_in(out):
        write_json(out / "a.json", {})
        shutil.rmtree(out)
        out.mkdir()
        for write in (partial(write_json, out / "b.json", {}), partial(report, {"step": 0}, out)):
            with pytest.raises(Mistake, match="deleted or moved"):
                write()
    assert not list(out.iterdir())

    # what fails because the folder is gone says so, and not that space should be freed
    with pytest.raises(Mistake, match="deleted or moved"), alone_in(tmp_path / "b"):
        shutil.rmtree(tmp_path / "b")
        raise OSError("No such file or directory")


# --- runs
def test_a_resume_keeps_its_settings_and_reads_what_it_has_read(tree, tmp_path, monkeypatch, capsys):
    """Also from another folder with other rows of the same name; moved with what it reads; with rows elsewhere."""
    run = caller(train, monkeypatch, capsys)
    for home, rows in (("ours", "pairs"), ("theirs", "text")):
        shutil.copytree(tree / rows, tmp_path / home / "rows")
    shutil.copytree(tree / "toy", tmp_path / "ours" / "base")
    monkeypatch.chdir(tmp_path / "ours")
    run("--data", "rows", "--init_from", "base", *SMALL, "--out_dir", "out")

    monkeypatch.chdir(tmp_path / "theirs")
    again = ["--init_from", "resume", "--out_dir", "../ours/out", "--max_iters", 3]
    for change, says in ((["--s_max", 3], "--s_max 3 differs"), (["--data", "rows"], "other tokens")):
        assert says in run.fails(*again, *change)
    run(*again)
    saved = util.read_json(tmp_path / "ours" / "out" / "train.json", "run")
    assert (saved["data"], saved["init_from"]) == ("../rows", "../base")

    (tmp_path / "ours").rename(tmp_path / "moved")
    moved = ["--init_from", "resume", "--out_dir", "../moved/out"]
    run(*moved, "--max_iters", 4)
    (tmp_path / "moved" / "rows").rename(tmp_path / "rows")
    assert "no data at" in run.fails(*moved)
    run(*moved, "--data", "../rows", "--max_iters", 5)

    # the rows must be those that it has read, and the base is needed, too
    shutil.copy(tmp_path / "rows" / "val.safetensors", tmp_path / "rows" / "train.safetensors")
    assert "trained on other rows" in run.fails(*moved)
    (tmp_path / "moved" / "base").rename(tmp_path / "base")
    assert "correct init_from in ../moved/out/train.json" in run.fails(*moved)


@pytest.mark.parametrize("before, caught", [(signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])])
def test_a_lost_terminal_stops_a_run_as_ctrl_c_does(before, caught, monkeypatch):
    """But not under nohup, which has the signal ignored."""
    monkeypatch.setattr(os, "dup2", lambda *numbers: None)
    monkeypatch.setattr(os, "write", lambda *message: (_ for _ in ()).throw(BrokenPipeError))  # nor does a pipe read on
    old = signal.signal(signal.SIGHUP, before)
    with interruptible() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert asked == caught
    signal.signal(signal.SIGHUP, old)


# --- what is printed
def test_a_terminal_is_given_no_command(tree, monkeypatch, capsys):
    assert util.printable("a\x1b[2J\rb\x9b\u202ex\ud800") == "a<U+001B>[2J<U+000D>b<U+009B><U+202E>x<U+D800>"
    assert util.printable("é漢\u3000😀\u200d\u00a0\n\t") == "é漢\u3000😀\u200d\u00a0\n\t"
    out = caller(sample, monkeypatch, capsys)(*placed([*SAMPLE, "--prompt", "a\x1b[2J\x07", "--watch"], TREE=tree))
    assert "\x1b[2J" not in out and "\x07" not in out and "a<U+001B>[2J<U+0007>" in out


def test_a_list_flag_that_is_given_twice_adds_up_but_not_to_its_default():
    parser = util.Parser("")
    parser.add_argument_group("g").add_argument("--ckpt", nargs="+", default=["shipped"])
    for argv, ckpt in (("", "shipped"), ("--ckpt a", "a"), ("--ckpt a b --ckpt c", "a b c")):
        assert parser.parse_args(argv.split()).ckpt == ckpt.split()


# --- one handler for all, and our own mistakes
def test_what_a_user_can_mend_is_one_line_and_what_only_we_can_is_a_traceback(tree, monkeypatch, capsys):
    def full(model, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.Model, "begin_from", full)
    assert "No space left on device" in caller(sample, monkeypatch, capsys).fails(*placed(SAMPLE, TREE=tree))

    # an error of the code is none of the file that it is about
    monkeypatch.setattr(checkpoint.Model, "begin_from", lambda model, state: state["ours"])
    with pytest.raises(KeyError, match="ours"):
        command_line(sample, monkeypatch, capsys, *placed(SAMPLE, TREE=tree))


def test_a_run_says_what_its_last_validation_and_its_best_one_were(tmp_path, capsys):
    for step, ce in enumerate((3.0, 2.0, 2.505)):
        append_line(tmp_path / "log.jsonl", dict(step=step, val=True, m2t_A=1.0, m2t_B=ce))
    tell_what_is_next(2, Namespace(out_dir=tmp_path, max_iters=2))
    risen = "on held-out rows m2t_B is 2.505 after step 2, and was 2 after step 1: it has risen, so take fewer steps\n"
    assert capsys.readouterr().out.startswith(f"{risen}done; ")
