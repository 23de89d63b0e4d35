"""Two hundred damaged files over all commands, in one process: each is one line and exit code 2, or does no harm. And a
mistake of ours keeps its traceback. `pytest tests/test_damage.py`"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import GOLDEN, byte_model, command_line, names_folder, random_adapter

import checkpoint
import convert_weights
import evaluate
import lib.data
import lib.tokenizer
import sample
import train
from checkpoint import save_model
from lib.data import learn_bpe

N = 200
NONSENSE = [None, True, -1, 0, 5, 4.5, "4", "", [], [3], {}, {"a": 1}, float("nan"), 10**10, 10**400, "a\0b"]
FILES = [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 10**5, b'{"a": ' * 10**5, b'{"a": 1}']
CPU = ["--device", "cpu"]
TOY = ["--data", "pairs", "--toy", "V=3", "m=2", "--batch_size", 2, "--max_iters", 2, "--eval_interval", 1, *CPU]
SHORT = ["--gen_length", 1, "--n_rounds", 0, *CPU]
ONE = ["--seq_len", 32, "--batch_size", 1, "--max_iters", 1, "--out_dir", "OUT", *CPU]
ADAPT = ["--init_from", "IT", "--data", "pairs", "--max_iters", 1, "--batch_size", 1, "--out_dir", "OUT", *CPU]
RESUME = ["--init_from", "resume", "--out_dir", "IT"]
CONVERT = ["--src", "IT", "--out", "OUT"]

# a folder, a file of it, and a command that reads it
READERS = [
    ("bytes", "config.json", sample, ["--ckpt", "IT", "--prompt_ids", 1, *SHORT]),
    ("bytes", "model.safetensors", sample, ["--ckpt", "IT", "--prompt", "a", *SHORT]),
    ("bpe", "tokenizer.json", sample, ["--ckpt", "IT", "--prompt", "a", *SHORT]),
    ("bpe", "tokenizer.json", train, ["--init_from", "IT", "--data", "TREE/records/a.jsonl", *ONE]),
    ("bpe", "names.json", sample, ["--ckpt", "IT", "--prompt", "a", *SHORT]),
    ("adapter", "adapter.json", sample, ["--ckpt", "IT", "--prompt", "a", *SHORT]),
    ("adapter", "adapter.safetensors", sample, ["--ckpt", "IT", "--prompt", "a", *SHORT]),
    ("toy", "train.json", train, RESUME),
    ("toy", "log.jsonl", train, RESUME),
    ("toy", "state.safetensors", train, RESUME),
    ("toy", "toy.json", train, ADAPT),
    ("toy", "toy.json", evaluate, ["--ckpt", "IT", *CPU]),
    ("toy", "config.json", evaluate, ["--ckpt", "IT", *CPU]),
    ("toy-adapter", "train.json", train, RESUME),
    ("toy-adapter", "adapter.json", train, RESUME),
    ("toy-adapter", "state.safetensors", train, RESUME),
    ("records", "a.jsonl", train, ["--data", "IT/a.jsonl", *ONE]),
    ("released", "config.json", convert_weights, CONVERT),
    ("released", "tokenizer.json", convert_weights, CONVERT),
    ("released", "model.safetensors.index.json", convert_weights, CONVERT),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder of every kind that a command reads."""
    tree = tmp_path_factory.mktemp("tree")
    save_model(byte_model(n_layer=2, n_last=1), tree / "bytes")
    names_folder(tree / "bpe", learn_bpe(["aaa ab", "aaa ab"], 270), n_layer=2, n_last=1)
    random_adapter(tree / "adapter", tree / "bytes")
    shutil.copytree(GOLDEN, tree / "released")
    (tree / "records").mkdir()
    record = json.dumps({"text": "hello " * 9, "int_score": 4, "token_count": 300})
    (tree / "records" / "a.jsonl").write_text(f"{record}\n" * 5)
    return tree


def placed(argv: list, **folders: Path) -> list[str]:
    """A command line with a folder in each name's place."""
    line = "\n".join(map(str, argv))
    for name, folder in folders.items():
        line = line.replace(name, str(folder))
    return line.split("\n")


def places(value: object) -> Iterator[tuple]:
    """(an object or a list, a key of it) of everything inside a JSON value; of lists the first two."""
    if isinstance(value, dict):
        keys = list(value)[:40]
    else:
        keys = range(len(value[:2])) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def damaged(raw: bytes, name: str, draw: random.Random) -> bytes:
    """What such a file may have become: another file, half of it, or with one value changed or gone."""
    if draw.random() < 0.25:
        return draw.choice([*FILES, raw[: len(raw) // 2]])

    # the JSON in it, and what stands behind
    after = b""
    if name.endswith(".safetensors"):
        n = int.from_bytes(raw[:8], "little")
        raw, after = raw[8 : 8 + n], raw[8 + n :]
    if name.endswith(".jsonl"):
        raw, after = raw.split(b"\n", 1)
        after = b"\n" + after

    whole = json.loads(raw)
    holder, key = draw.choice(list(places(whole)))
    if draw.random() < 0.1:
        del holder[key]
    else:
        holder[key] = draw.choice(NONSENSE)
    text = json.dumps(whole).encode()
    if name.endswith(".safetensors"):
        return len(text).to_bytes(8, "little") + text + after
    return text + after


def test_two_hundred_damaged_files(tree, tmp_path, monkeypatch, capsys):
    run = lambda script, *argv: command_line(script, monkeypatch, capsys, *argv)  # noqa: E731
    assert run(train, *TOY, "--out_dir", tree / "toy")[0] == 0
    assert run(train, *TOY, "--init_from", tree / "toy", "--out_dir", tree / "toy-adapter")[0] == 0

    refusals = 0
    it, out = tree / "it", tmp_path / "out"
    draw = random.Random(0)
    for number in range(N):
        # every kind of file in turn
        folder, name, script, argv = READERS[number % len(READERS)]
        for old in (it, out):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(tree / folder, it)
        content = damaged((it / name).read_bytes(), name, draw)
        (it / name).write_bytes(content)
        code, _, err = run(script, *placed(argv, IT=it, OUT=out, TREE=tree))
        errors = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
        assert code in (0, 2) and len(errors) == code // 2, (folder, name, content[:200], err)
        refusals += code == 2
    assert refusals > 0.6 * N


PLANTED = [
    (checkpoint, "check_config", TypeError, sample, ["--ckpt", "TREE/bytes", "--prompt", "a"]),
    (checkpoint, "check_fit", KeyError, sample, ["--ckpt", "TREE/adapter", "--prompt", "a"]),
    (lib.tokenizer, "merge_bytes", ValueError, sample, ["--ckpt", "TREE/bpe", "--prompt", "a"]),
    (sample, "candidates", RuntimeError, sample, ["--ckpt", "TREE/bytes", "--prompt", "a", *SHORT]),
    (lib.data, "is_validation", AttributeError, train, ["--data", "TREE/records/a.jsonl", *ONE]),
    (train, "corrupt", IndexError, train, [*TOY, "--out_dir", "OUT"]),
    (convert_weights, "plan", KeyError, convert_weights, ["--src", "TREE/released", "--out", "OUT"]),
]


@pytest.mark.parametrize("module, name, error, script, argv", PLANTED, ids=[name for _, name, *_ in PLANTED])
def test_a_mistake_of_ours_keeps_its_traceback(module, name, error, script, argv, tree, tmp_path, monkeypatch, capsys):
    def broken(*given, **how):
        raise error("ours")

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(error, match="ours"):
        command_line(script, monkeypatch, capsys, *placed(argv, OUT=tmp_path / "out", TREE=tree))
