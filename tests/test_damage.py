"""Damaged files over all commands, in one process: each is one line that names it, exit code 2, and nothing is written.
What is written is whole, whoever is killed while writing. And a mistake of ours keeps its traceback.
`pytest tests/test_damage.py`"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import GOLDEN, byte_model, caller, command_line, merged_spec, names_folder, random_adapter
from resuming import assert_same_end, byte_rows, toy_rows

import checkpoint
import convert_weights
import evaluate
import lib.rows
import lib.tokenizer
import prepare
import sample
import toy
import train
from checkpoint import save_model
from lib.run import rewind_log
from lib.tokenizer import byte_spec
from lib.util import UNFINISHED, Mistake, alone_in, replace_file, write_json
from llada import export, int8

CPU = ["--device", "cpu"]
TOY = ["--batch_size", 2, "--max_iters", 2, "--eval_interval", 1, *CPU]
FROM_SCRATCH = ["--data", "TREE/pairs", "--init_from", "scratch", *TOY]
ONE = ["--seq_len", 32, "--batch_size", 1, "--max_iters", 1, "--out_dir", "OUT", *CPU]
ON_ROWS = ["--init_from", "scratch", "--data", "IT", *ONE]
LIKE = ["--init_from", "TREE/bytes", "--data", "IT", *ONE]
SAMPLE = ["--ckpt", "IT", "--prompt", "a", "--gen_length", 1, *CPU]
ON_A = ["--ckpt", "TREE/bytes", "--prompt", "a", "--gen_length", 1, *CPU]
JUDGED = ["--ckpt", "IT", *CPU]
RESUME = ["--init_from", "resume", "--out_dir", "IT", "--max_iters", 2]
CONVERT = ["--src", "IT", "--out", "OUT"]

# what a file may have become
OTHERS = [b"", b"{", b"null", b"\xff\xfe", b"[" * 10**5]
# and one of its entries
GONE = object()
NONSENSE = [GONE, None, True, -1, 4.5, "4", [], {"a": 1}, float("nan"), 10**10, 10**400, "a\0b"]

SIZES = ["n_layer", "n_embd", "n_head", "head_dim", "n_expert", "n_group"]
MORE = ["n_dense", "n_last", "n_rounds", "block_length", "rope_theta", "stage_b", "unknown"]
CONFIG = [*SIZES, "vocab_size", "eos_id", *(f"{name}?" for name in MORE)]
TOKENIZER = ["model", "model/vocab", "model/merges", "model/merges/0?", "model/merges/0/1", "model/vocab/a",
             "added_tokens", "added_tokens/1", "added_tokens/1/id", "added_tokens/1/content", "pre_tokenizer",
             "pre_tokenizer/pretokenizers/0", "pre_tokenizer/pretokenizers/0/pattern/Regex"]  # fmt: skip
ADAPTER = ["base", "n_last", "n_rounds", "block_length", "stage_b", "lora_r", "base_hash?"]
META = ["vocab_size", "eos_id", "mask_id", "n_plain"]
HEADER = ["markers", "markers/dtype", "markers/shape", "markers/data_offsets"]

# of each kind of file a folder that has it, a command that reads it, and entries; those with a question mark may be
# missing
READERS = [
    ("bytes", "config.json", sample, SAMPLE, CONFIG),
    ("bytes", "model.safetensors", sample, SAMPLE, HEADER),
    ("shards", "model.safetensors.index.json", sample, SAMPLE, ["weight_map", "weight_map/markers?"]),
    ("bpe", "tokenizer.json", sample, SAMPLE, TOKENIZER),
    ("text", "tokenizer.json", train, LIKE, []),
    ("toy", "meta.json", evaluate, JUDGED, ["judge", "judge/toy", "judge/V?"]),
    ("adapter", "adapter.json", sample, SAMPLE, ADAPTER),
    ("adapter", "adapter.safetensors", sample, SAMPLE, ["markers"]),
    ("toy", "train.json", train, RESUME, []),
    ("toy", "state.safetensors", train, RESUME, ["param.markers/shape", "step.wte.weight/dtype", "__metadata__/step"]),
    ("pairs", "meta.json", train, ON_ROWS, [*META, "block_length?"]),
    ("pairs", "train.safetensors", train, ON_ROWS, ["ids/shape", "starts/data_offsets", "prompts/dtype"]),
    ("records", "a.jsonl", prepare, ["IT/a.jsonl", "--out", "OUT"], ["text"]),
    ("released", "config.json", convert_weights, CONVERT, ["num_experts", "head_dim", "rms_norm_eps", "use_bias"]),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder of every kind that a command reads."""
    tree = tmp_path_factory.mktemp("tree")
    save_model(byte_model(n_layer=2, n_last=1), tree / "bytes")
    write_json(tree / "bytes" / "tokenizer.json", byte_spec())
    names_folder(tree / "bpe", merged_spec(), n_layer=2, n_last=1)
    random_adapter(tree / "adapter", tree / "bytes")
    shutil.copytree(GOLDEN, tree / "released")
    shutil.copytree(tree / "bytes", tree / "shards")
    names = dict.fromkeys(["markers", "wte.weight"], "model.safetensors")
    write_json(tree / "shards" / "model.safetensors.index.json", {"weight_map": names})
    toy_rows(tree / "pairs")
    byte_rows(tree / "text")
    (tree / "records").mkdir()
    record = json.dumps({"text": "hello " * 9, "int_score": 4, "token_count": 300})
    (tree / "records" / "a.jsonl").write_text(f"{record}\n" * 5)

    with pytest.MonkeyPatch.context() as patch:
        argv = placed([*FROM_SCRATCH, "--out_dir", "TREE/toy"], TREE=tree)
        patch.setattr(sys, "argv", ["train.py", *argv])
        train.main()
    return tree


def placed(argv: list, **folders: Path) -> list[str]:
    """A command line in which each name is replaced by its folder."""
    line = "\n".join(map(str, argv))
    for name, folder in folders.items():
        line = line.replace(name, str(folder))
    return line.split("\n")


def damaged(raw: bytes, name: str, place: str) -> Iterator[bytes]:
    """Put any nonsense in one place of a file's JSON. In a file of tensors this is the header, and in a file of records
    it is the first one."""
    head = after = b""
    if name.endswith(".safetensors"):
        n = int.from_bytes(raw[:8], "little")
        raw, after = raw[8 : 8 + n], raw[8 + n :]
    if name.endswith(".jsonl"):
        raw, after = raw.split(b"\n", 1)
        after = b"\n" + after

    *outer, last = [int(key) if key.isdecimal() else key for key in place.removesuffix("?").split("/")]
    for value in NONSENSE:
        holder = whole = json.loads(raw)
        for key in outer:
            holder = holder[key]
        before = holder.get(last) if isinstance(holder, dict) else holder[last]
        if might_be(value, before) or value is GONE and place.endswith("?"):
            continue
        holder[last] = value
        if value is GONE:
            del holder[last]
        text = json.dumps(whole).encode()
        if name.endswith(".safetensors"):
            head = len(text).to_bytes(8, "little")
        yield head + text + after


def might_be(value: object, before: object) -> bool:
    """Could this be a valid value in the place of `before`?"""
    if isinstance(before, float):
        return type(value) is not bool and value in (-1, 4.5, 10**10)
    same_type = type(value) is type(before) and isinstance(value, str | list | dict | bool)
    return value == before or same_type


@pytest.mark.parametrize("folder, name, script, argv, entries", READERS)
def test_a_damaged_file_is_one_line_that_names_it(
    folder, name, script, argv, entries, tree, tmp_path, monkeypatch, capsys
):  # fmt: skip
    it, out = tree / "it", tmp_path / "out"
    shutil.rmtree(it, ignore_errors=True)
    shutil.copytree(tree / folder, it)
    raw = (it / name).read_bytes()
    damages = [(name, content) for content in (*OTHERS, raw[: len(raw) // 2])]
    # the nonsense is spread over the entries, and each of them has some
    of_entries = [[(place.strip("?").split("/")[-1], c) for c in damaged(raw, name, place)] for place in entries]
    for k in range(max(len(entries), len(NONSENSE)) if entries else 0):
        of_entry = of_entries[k % len(entries)]
        damages.append(of_entry[k % len(of_entry)])

    run = caller(script, monkeypatch, capsys)
    argv = placed(argv, IT=it, OUT=out, TREE=tree)
    for key, content in damages:
        (it / name).write_bytes(content)
        line = run.fails(*argv)
        assert str(it) in line or key in line, content[-200:]
        assert not out.exists()
    (it / name).write_bytes(raw)
    run(*argv)


def test_of_a_log_the_lines_of_before_a_step_are_kept(tmp_path):
    """A validation at the step of the last save is kept, because it is of the saved weights. A damaged line is dropped,
    and the others stay."""
    log = tmp_path / "log.jsonl"
    kept = [b'{"step": 0}', b'{"step": 1}', b'{"step": 2, "val": true}']
    dropped = [b"{", b"\0\0", b"5", b'"step"', b"\xff", b'{"step": 2}', b'{"step": 3, "val": true}']
    for place in range(4):
        log.write_bytes(b"\n".join([*kept[:place], *dropped, *kept[place:]]))
        rewind_log(log, 2)
        assert log.read_bytes() == b"".join(line + b"\n" for line in kept)


CHANGES = [
    *[("pairs", {"block_length": length}) for length in (-8, 3, 16)], ("text", {"block_length": -8}),
    *[(rows, {"vocab_size": size}) for rows in ("pairs", "text") for size in (40_000, 2**40)],
    # the end, the mask and the ordinary tokens are the tokenizer's
    *[("text", change) for change in ({"eos_id": 257}, {"mask_id": 258}, {"n_plain": 257})],
]  # fmt: skip


@pytest.mark.parametrize("rows, change", CHANGES, ids=map(str, CHANGES))
def test_words_about_rows_that_the_rows_contradict_are_refused(rows, change, tree, tmp_path, monkeypatch, capsys):
    """meta.json may state a block length that the rows do not have, or ids that are not theirs."""
    folder = tmp_path / "rows"
    shutil.copytree(tree / rows, folder)
    write_json(folder / "meta.json", json.loads((folder / "meta.json").read_text()) | change)
    caller(train, monkeypatch, capsys).fails(*placed(ON_ROWS, IT=folder, OUT=tmp_path / "out"))


# --- what is written is whole
WRITERS = {
    "a base": (train, [*FROM_SCRATCH, "--out_dir", "OUT"]),
    "an adapter": (train, ["--data", "TREE/pairs", "--init_from", "TREE/toy", *TOY, "--out_dir", "OUT"]),
    "convert": (convert_weights, ["--src", "TREE/released", "--out", "OUT"]),
    "export": (export, ["--to", "hf", "--src", "TREE/bytes", "--out", "OUT"]),
    "int8": (int8, ["--src", "TREE/bytes", "--out", "OUT"]),
    "toy": (toy, ["pairs", "--rows", 64, "--out", "OUT"]),
    "prepare": (prepare, ["TREE/records/a.jsonl", "--out", "OUT"]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_next(
    name, tree, tmp_path, monkeypatch, capsys
):  # fmt: skip
    """Whatever a power cut leaves is whole: every file is flushed, then renamed, then its folder is flushed."""
    out = tmp_path / "out"
    script, argv = WRITERS[name]
    flush, rename = os.fsync, os.replace
    events = []

    def fsync(number):
        flush(number)
        events.append(os.fstat(number).st_ino)

    def replace(source, target):
        at = os.stat(source).st_ino, os.stat(target.parent).st_ino
        rename(source, target)
        events.append((target.name, *at))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    before = os.umask(0o027)
    caller(script, monkeypatch, capsys)(*placed(argv, OUT=out, TREE=tree))
    os.umask(before)

    renamed = [i for i, event in enumerate(events) if isinstance(event, tuple)]
    for i in renamed:
        _, file, folder = events[i]
        assert (events[i - 1], events[i + 1]) == (file, folder)
    # there is no other way to write a file, and all have the same rights; the folder is in its own folder's list
    assert {events[i][0] for i in renamed} == {path.name for path in out.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}
    assert out.parent.stat().st_ino in events[: renamed[0]]

    # a state says how many lines of the log are before it: they are on the disk first
    states = [i for i, event in enumerate(events) if isinstance(event, tuple) and event[0] == "state.safetensors"]
    assert len(states) == (2 if script is train else 0)
    assert all((out / "log.jsonl").stat().st_ino in events[i - 3 : i] for i in states)


def killed_at(k: int, script, monkeypatch, argv: list[str]) -> None:
    """Run a command in a process that gets SIGKILL when its k-th file is about to be renamed. Beside it is a temporary
    file of safetensors."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    files = []

    def replace(source, target):
        files.append(target)
        if len(files) > k:
            (source.parent / ".tmpAbC123").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(sys, "argv", [script.__name__, *argv])
    try:
        script.main()
    finally:
        os._exit(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("name", WRITERS)
def test_a_command_that_was_killed_goes_on_and_leaves_nothing_of_its_own(name, k, tree, monkeypatch, capsys):
    script, argv = WRITERS[name]
    out, whole = tree / f"killed {name} {k}", tree / f"whole {name}"
    killed_at(k, script, monkeypatch, placed(argv, OUT=out, TREE=tree))
    assert (out / UNFINISHED / ".tmpAbC123").exists()
    assert script is train or not {path.name for path in out.iterdir()} & {"config.json", "meta.json"}  # what is whole

    run = caller(script, monkeypatch, capsys)
    resumes = (out / "train.json").exists()
    run(*(["--init_from", "resume", "--out_dir", out] if resumes else placed(argv, OUT=out, TREE=tree)))
    if not whole.exists():
        run(*placed(argv, OUT=whole, TREE=tree))
    if script is train:
        assert_same_end(out, whole)
    varies = {"log.jsonl", "train.json"}  # the time, the folder
    a, b = ({path.name: path for path in folder.iterdir()} for folder in (out, whole))
    assert a.keys() == b.keys()
    assert all(path.read_bytes() == b[name].read_bytes() for name, path in a.items() if name not in varies)


@pytest.mark.parametrize("name", WRITERS)
def test_two_runs_do_not_write_into_one_folder(name, tree, tmp_path, monkeypatch, capsys):
    script, argv = WRITERS[name]
    out = tmp_path / "out"
    run = caller(script, monkeypatch, capsys)
    with alone_in(out):
        assert f"another run is writing into {out}" in run.fails(*placed(argv, OUT=out, TREE=tree))
        assert not list(out.iterdir())
    run(*placed(argv, OUT=out, TREE=tree))

    # nor does one go on beside itself
    if script is train:
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with alone_in(out):
            assert "another run is writing" in run.fails("--init_from", "resume", "--out_dir", out, "--max_iters", 3)
        assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_rows_that_go_while_a_run_learns_are_not_missed(tree, tmp_path, monkeypatch, capsys):
    """The checkpoint still says what its ids mean."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    shutil.copytree(tree / "text", rows)
    expected = {name: (rows / name).read_bytes() for name in ("meta.json", "tokenizer.json")}
    monkeypatch.setattr(train, "report", lambda *given, **how: shutil.rmtree(rows, ignore_errors=True))
    caller(train, monkeypatch, capsys)(*placed(ON_ROWS, IT=rows, OUT=out))
    assert {name: (out / name).read_bytes() for name in expected} == expected


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "folder" / "file"

    def half(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    replace_file(path, lambda temporary: temporary.write_bytes(b"whole"))
    with pytest.raises(Mistake, match="cannot write .*file: .*No space left"):
        replace_file(path, half)
    assert path.read_bytes() == b"whole" and list(path.parent.iterdir()) == [path]


def test_a_folder_is_left_as_it_was_found(tmp_path):
    """If a run fails, a folder that was made for it is removed. A folder that was there stays, and is not locked."""
    for folder in (tmp_path / "a" / "b", tmp_path):
        with pytest.raises(Mistake, match="ours"), alone_in(folder):
            raise Mistake("ours")
    assert list(tmp_path.iterdir()) == []


# --- and our own mistakes
PLANTED = [
    (checkpoint, "check_config", TypeError, sample, ON_A),
    (lib.tokenizer, "merge_bytes", ValueError, sample, ["--ckpt", "TREE/bpe", "--prompt", "a"]),
    (lib.rows.Rows, "epoch_order", KeyError, train, [*FROM_SCRATCH, "--out_dir", "OUT"]),
    (convert_weights, "plan", KeyError, convert_weights, ["--src", "TREE/released", "--out", "OUT"]),
]


@pytest.mark.parametrize("module, name, error, script, argv", PLANTED, ids=[name for _, name, *_ in PLANTED])
def test_a_mistake_of_ours_keeps_its_traceback(module, name, error, script, argv, tree, tmp_path, monkeypatch, capsys):
    def broken(*given, **how):
        raise error("ours")

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(error, match="ours"):
        command_line(script, monkeypatch, capsys, *placed(argv, OUT=tmp_path / "out", TREE=tree))
