"""Damaged files over all commands, in one process: each is one line that names it, exit code 2, and nothing is written.
And a mistake of ours keeps its traceback. `pytest tests/test_damage.py`"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import GOLDEN, byte_model, caller, command_line, merged_spec, names_folder, random_adapter
from resuming import byte_rows, toy_rows

import base
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
from lib.tokenizer import byte_spec
from lib.util import write_json
from model import Model

CPU = ["--device", "cpu"]
TOY = ["--batch_size", 2, "--max_iters", 2, "--eval_interval", 1, *CPU]
FROM_SCRATCH = ["--data", "TREE/pairs", "--init_from", "scratch", *TOY]
ONE = ["--seq_len", 32, "--batch_size", 1, "--max_iters", 1, "--out_dir", "OUT", *CPU]
ON_TOY = ["--init_from", "IT", "--data", "TREE/pairs", *ONE]
ON_BYTES = ["--init_from", "IT", "--data", "TREE/text", *ONE]
ON_ROWS = ["--init_from", "scratch", "--data", "IT", *ONE]
LIKE = ["--init_from", "TREE/bytes", "--data", "IT", *ONE]
SAMPLE = ["--ckpt", "IT", "--prompt", "a", "--gen_length", 1, *CPU]
ON_A = ["--ckpt", "TREE/bytes", "--prompt", "a", "--gen_length", 1, *CPU]
JUDGED = ["--ckpt", "IT", *CPU]
RESUME = ["--init_from", "resume", "--out_dir", "IT", "--max_iters", 2]
CONVERT = ["--src", "IT", "--out", "OUT"]
PREPARE = ["TREE/records/a.jsonl", "--like", "IT", "--out", "OUT"]

# what a file may have become
OTHERS = [b"", b"{", b"null", b"\xff\xfe", b"[" * 10**5]
# and one of its entries
GONE = object()
NONSENSE = [GONE, None, True, -1, 4.5, "4", [], {"a": 1}, float("nan"), 10**10, 10**400, "a\0b"]

SIZES = ["n_layer", "n_embd", "n_head", "head_dim", "n_expert", "n_group"]
MORE = ["n_dense", "n_last", "n_rounds", "block_length", "rope_theta", "causal", "unknown"]
CONFIG = [*SIZES, "vocab_size", "eos_id", *(f"{name}?" for name in MORE)]
TOKENIZER = ["model", "model/vocab", "model/merges", "model/merges/0?", "model/merges/0/1", "model/vocab/a",
             "added_tokens", "added_tokens/1", "added_tokens/1/id", "added_tokens/1/content", "pre_tokenizer",
             "pre_tokenizer/pretokenizers/0", "pre_tokenizer/pretokenizers/0/pattern/Regex"]  # fmt: skip
ADAPTER = ["base", "n_last", "n_rounds", "causal", "block_length", "stage_b", "lora_r", "alpha", "base_hash?"]
META = ["vocab_size", "eos_id", "mask_id", "n_plain"]
HEADER = ["markers", "markers/dtype", "markers/shape", "markers/data_offsets"]

# a folder, a file of it, a command that reads it, and entries; those with a question mark may be missing
READERS = [
    ("bytes", "config.json", sample, SAMPLE, CONFIG),
    ("bytes", "config.json", train, ON_BYTES, []),
    ("toy", "config.json", evaluate, JUDGED, []),
    ("bytes", "model.safetensors", sample, SAMPLE, HEADER),
    ("shards", "model.safetensors.index.json", sample, SAMPLE, ["weight_map", "weight_map/markers?"]),
    ("bpe", "tokenizer.json", sample, SAMPLE, TOKENIZER),
    ("bpe", "tokenizer.json", prepare, PREPARE, ["model"]),
    ("text", "tokenizer.json", prepare, PREPARE, ["model"]),
    ("text", "tokenizer.json", train, LIKE, []),
    ("bpe", "meta.json", sample, SAMPLE, []),
    ("names", "meta.json", train, ON_BYTES, []),
    ("toy", "meta.json", evaluate, JUDGED, ["judge", "judge/toy", "judge/V?"]),
    ("adapter", "adapter.json", sample, SAMPLE, ADAPTER),
    ("causal", "adapter.json", sample, SAMPLE, ["causal", "stage_b"]),
    ("cocommit", "adapter.json", sample, SAMPLE, ["n_rounds", "stage_b"]),
    ("adapter", "adapter.safetensors", sample, SAMPLE, ["markers"]),
    ("toy", "train.json", train, RESUME, []),
    ("toy-base", "train.json", base, RESUME, []),
    ("toy-adapter", "adapter.json", train, RESUME, ["base"]),
    ("toy", "state.safetensors", train, RESUME, ["param.markers/shape", "step.wte.weight/dtype", "__metadata__/step"]),
    ("pairs", "meta.json", train, ON_ROWS, [*META, "block_length?"]),
    ("pairs", "meta.json", base, ON_ROWS, []),
    ("text", "meta.json", train, LIKE, META),
    ("toy", "meta.json", train, ON_TOY, ["judge"]),
    ("pairs", "train.safetensors", train, ON_ROWS, ["ids/shape", "starts", "prompts/dtype"]),
    ("text", "val.safetensors", train, ON_ROWS, ["ids", "starts/data_offsets"]),
    ("records", "a.jsonl", prepare, ["IT/a.jsonl", "--out", "OUT"], ["text"]),
    ("released", "config.json", convert_weights, CONVERT, ["num_experts", "head_dim", "rms_norm_eps", "use_bias"]),
    ("released", "tokenizer.json", convert_weights, CONVERT, ["model", "added_tokens/0/id"]),
    ("released", "model.safetensors.index.json", convert_weights, CONVERT, ["weight_map"]),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder of every kind that a command reads."""
    tree = tmp_path_factory.mktemp("tree")
    save_model(byte_model(n_layer=2, n_last=1), tree / "bytes")
    write_json(tree / "bytes" / "tokenizer.json", byte_spec())
    names_folder(tree / "bpe", merged_spec(), n_layer=2, n_last=1)
    names_folder(tree / "names", n_layer=2, n_last=1)
    random_adapter(tree / "adapter", tree / "bytes")
    random_adapter(tree / "causal", tree / "bytes", "copy", causal=True)
    random_adapter(tree / "cocommit", tree / "bytes", "lora", n_rounds=1)
    shutil.copytree(GOLDEN, tree / "released")
    shutil.copytree(tree / "bytes", tree / "shards")
    names = dict.fromkeys(["markers", "wte.weight"], "model.safetensors")
    write_json(tree / "shards" / "model.safetensors.index.json", {"weight_map": names})
    toy_rows(tree / "pairs")
    byte_rows(tree / "text")
    (tree / "records").mkdir()
    record = json.dumps({"text": "hello " * 9, "int_score": 4, "token_count": 300})
    (tree / "records" / "a.jsonl").write_text(f"{record}\n" * 5)

    for script, start, folder in (
        (train, FROM_SCRATCH, "toy"),
        (base, FROM_SCRATCH, "toy-base"),
        (train, ["--data", "TREE/pairs", "--init_from", "TREE/toy", *TOY], "toy-adapter"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            argv = placed([*start, "--out_dir", f"TREE/{folder}"], TREE=tree)
            patch.setattr(sys, "argv", [script.__name__, *argv])
            script.main()
    return tree


def placed(argv: list, **folders: Path) -> list[str]:
    """A command line with a folder in each name's place."""
    line = "\n".join(map(str, argv))
    for name, folder in folders.items():
        line = line.replace(name, str(folder))
    return line.split("\n")


def damaged(raw: bytes, name: str, place: str) -> Iterator[bytes]:
    """Any nonsense in one place of a file's JSON, which is the header of tensors, and the first of records."""
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
    """Could an entry that was `before` say that, too?"""
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


def test_of_a_damaged_log_what_is_whole_is_kept(tree, tmp_path, monkeypatch, capsys):
    run = caller(train, monkeypatch, capsys)
    shutil.copytree(tree / "toy", tmp_path / "it")
    log = tmp_path / "it" / "log.jsonl"
    raw = log.read_bytes()
    for content in (*OTHERS, *damaged(raw, log.name, "step")):
        log.write_bytes(content)
        run(*placed(RESUME, IT=tmp_path / "it"))


META_CHANGES = [
    {"block_length": -8}, {"block_length": 3}, {"block_length": 16}, {"block_length": None}, {"judge": {}},
    {"judge": {"toy": 5}}, {"judge": {"names": 5}}, {"eos_id": 0}, {"mask_id": 0}, {"n_plain": 0}, {"n_plain": 15},
    {"vocab_size": 40_000}, {"vocab_size": 2**40},
]  # fmt: skip


@pytest.mark.parametrize("change", META_CHANGES, ids=map(str, META_CHANGES))
@pytest.mark.parametrize("rows", ["pairs", "text"])
def test_damaged_words_about_rows(change, rows, tree, tmp_path, monkeypatch, capsys):
    """A length of blocks that rows are not of, ids that are others: one line, or a run that ends."""
    folder = tmp_path / "rows"
    shutil.copytree(tree / rows, folder)
    write_json(folder / "meta.json", json.loads((folder / "meta.json").read_text()) | change)
    bad = change.get("block_length") or 0
    wrong = bad < 0 or rows == "pairs" and bad > 0 or change.get("vocab_size", 0) > 2**15
    code, _, err = command_line(train, monkeypatch, capsys, *placed(ON_ROWS, IT=folder, OUT=tmp_path / "out"))
    errors = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert code in ((2,) if wrong else (0, 2)) and len(errors) == code // 2, err


PLANTED = [
    (checkpoint, "check_config", TypeError, sample, ON_A),
    (checkpoint, "check_fit", KeyError, sample, ["--ckpt", "TREE/adapter", "--prompt", "a"]),
    (Model, "tie", AttributeError, sample, ON_A),
    (lib.tokenizer, "merge_bytes", ValueError, sample, ["--ckpt", "TREE/bpe", "--prompt", "a"]),
    (sample, "candidates", RuntimeError, sample, [*ON_A, "--n_rounds", 0]),
    (lib.rows.Rows, "epoch_order", KeyError, train, [*FROM_SCRATCH, "--out_dir", "OUT"]),
    (toy, "draw_rows", IndexError, toy, ["pairs", "--out", "OUT"]),
    (convert_weights, "plan", KeyError, convert_weights, ["--src", "TREE/released", "--out", "OUT"]),
]


@pytest.mark.parametrize("module, name, error, script, argv", PLANTED, ids=[name for _, name, *_ in PLANTED])
def test_a_mistake_of_ours_keeps_its_traceback(module, name, error, script, argv, tree, tmp_path, monkeypatch, capsys):
    def broken(*given, **how):
        raise error("ours")

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(error, match="ours"):
        command_line(script, monkeypatch, capsys, *placed(argv, OUT=tmp_path / "out", TREE=tree))
