"""Some hundred damaged files over all commands, in one process: each is one line and exit code 2, or does no harm. And
a mistake of ours keeps its traceback. `pytest tests/test_damage.py`"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import GOLDEN, byte_model, caller, command_line, names_folder, random_adapter
from resuming import byte_rows, toy_rows
from safetensors.torch import load_file, save_file

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

NONSENSE = [None, True, -1, 0, 5, 4.5, "4", "", [], [3], {}, {"a": 1}, float("nan"), 10**10, 10**400, "a\0b"]
FILES = [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 10**5, b'{"a": ' * 10**5, b'{"a": 1}']
CPU = ["--device", "cpu"]
TOY = ["--batch_size", 2, "--max_iters", 2, "--eval_interval", 1, *CPU]
FROM_SCRATCH = ["--data", "TREE/pairs", "--init_from", "scratch", *TOY]
SHORT = ["--gen_length", 1, "--n_rounds", 0, *CPU]
ONE = ["--seq_len", 32, "--batch_size", 1, "--max_iters", 1, "--out_dir", "OUT", *CPU]
ADAPT = ["--init_from", "IT", "--data", "TREE/pairs", "--max_iters", 1, "--batch_size", 1, "--out_dir", "OUT", *CPU]
ON_BYTES = ["--data", "TREE/text", "--init_from", "IT", *ONE]
SAMPLE = ["--ckpt", "IT", "--prompt", "a", *SHORT]
RESUME = ["--init_from", "resume", "--out_dir", "IT", "--max_iters", 2]
CONVERT = ["--src", "IT", "--out", "OUT"]

# a folder, a file of it, and a command that reads it
READERS = [
    ("bytes", "config.json", sample, ["--ckpt", "IT", "--prompt_ids", 1, *SHORT]),
    ("bytes", "model.safetensors", sample, SAMPLE),
    ("bpe", "tokenizer.json", sample, SAMPLE),
    ("bpe", "tokenizer.json", prepare, ["TREE/records/a.jsonl", "--like", "IT", "--out", "OUT"]),
    ("bpe", "meta.json", sample, SAMPLE),
    ("names", "meta.json", train, ON_BYTES),
    ("bytes", "config.json", train, ON_BYTES),
    ("adapter", "adapter.json", sample, ["--ckpt", "IT", "--prompt", "a", "--gen_length", 1, *CPU]),
    ("adapter", "adapter.json", sample, ["--ckpt", "IT", "--prompt", "a", "--gen_length", 1, *CPU]),
    ("causal", "adapter.json", sample, ["--ckpt", "IT", "--prompt", "a", "--gen_length", 1, *CPU]),
    ("adapter", "adapter.safetensors", sample, SAMPLE),
    ("toy", "train.json", train, RESUME),
    ("toy", "log.jsonl", train, RESUME),
    ("toy", "state.safetensors", train, RESUME),
    ("toy", "meta.json", train, ADAPT),
    ("toy", "meta.json", evaluate, ["--ckpt", "IT", *CPU]),
    ("toy", "config.json", evaluate, ["--ckpt", "IT", *CPU]),
    ("toy", "train.json", sample, ["--ckpt", "IT", "--prompt_ids", "3,3", "--gen_length", 1, *CPU]),
    ("toy-adapter", "train.json", train, RESUME),
    ("toy-adapter", "adapter.json", train, RESUME),
    ("toy-adapter", "state.safetensors", train, RESUME),
    ("toy-base", "train.json", base, RESUME),
    ("pairs", "meta.json", train, ["--data", "IT", "--init_from", "scratch", *ONE]),
    ("pairs", "train.safetensors", train, ["--data", "IT", "--init_from", "scratch", *ONE]),
    ("pairs", "meta.json", base, ["--data", "IT", "--init_from", "scratch", *ONE]),
    ("text", "meta.json", train, ["--data", "IT", "--init_from", "scratch", *ONE]),
    ("text", "val.safetensors", train, ["--data", "IT", "--init_from", "scratch", *ONE]),
    ("text", "meta.json", train, ["--data", "IT", "--init_from", "TREE/bytes", *ONE]),
    ("text", "tokenizer.json", train, ["--data", "IT", "--init_from", "TREE/bytes", *ONE]),
    ("text", "tokenizer.json", prepare, ["TREE/records/a.jsonl", "--like", "IT", "--out", "OUT"]),
    ("records", "a.jsonl", prepare, ["IT/a.jsonl", "--out", "OUT"]),
    ("config", "a.toml", train, ["--config", "IT/a.toml", "--data", "TREE/pairs", *ONE]),
    ("config", "a.toml", train, ["--config", "IT/a.toml", "--data", "TREE/pairs", *ONE]),
    ("config", "b.toml", base, ["--config", "IT/b.toml", "--data", "TREE/pairs", *ONE]),
    ("released", "config.json", convert_weights, CONVERT),
    ("released", "tokenizer.json", convert_weights, CONVERT),
    ("released", "model.safetensors.index.json", convert_weights, CONVERT),
    ("cocommit", "adapter.json", sample, ["--ckpt", "IT", "--prompt", "a", "--gen_length", 1, *CPU]),
    ("cocommit", "adapter.safetensors", sample, SAMPLE),
]
N = 6 * len(READERS)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder of every kind that a command reads."""
    tree = tmp_path_factory.mktemp("tree")
    save_model(byte_model(n_layer=2, n_last=1), tree / "bytes")
    write_json(tree / "bytes" / "tokenizer.json", byte_spec())
    names_folder(tree / "bpe", merged(), n_layer=2, n_last=1)
    random_adapter(tree / "adapter", tree / "bytes")
    random_adapter(tree / "causal", tree / "bytes", "copy", causal=True)
    random_adapter(tree / "cocommit", tree / "bytes", "lora", n_rounds=1)
    names_folder(tree / "names", n_layer=2, n_last=1)
    shutil.copytree(GOLDEN, tree / "released")
    toy_rows(tree / "pairs")
    byte_rows(tree / "text")
    (tree / "config").mkdir()
    (tree / "config" / "a.toml").write_text(CONFIG + STAGE_B)
    (tree / "config" / "b.toml").write_text(CONFIG + BASE)
    (tree / "records").mkdir()
    record = json.dumps({"text": "hello " * 9, "int_score": 4, "token_count": 300})
    (tree / "records" / "a.jsonl").write_text(f"{record}\n" * 5)
    return tree


CONFIG = """
init_from = "scratch"
preset = "tiny"
n_last = 2
corruption = "random"
mask_power = 1.0
seed = 3
"""
STAGE_B = """alpha = 0.5
causal = true
whole = 0.5
"""
BASE = """one_by_one = 0.5
optimizer = "muon"
"""


def merged() -> dict:
    """Bytes, and the merges of aa and ab."""
    spec = byte_spec()
    spec["model"]["merges"] = [["a", "a"], ["a", "b"]]
    spec["model"]["vocab"] |= {"aa": 256, "ab": 257}
    for i, token in enumerate(spec["added_tokens"]):
        token["id"] = 258 + i
    return spec


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
    if name.endswith(".toml"):
        lines = raw.decode().splitlines()
        at = draw.randrange(1, len(lines))
        key = lines[at].split(" = ")[0]
        wrong = ["true", "-1", "0", "99", "4.5", "nan", "1e400", '"a"', "[3]", "{a = 1}", "", '"scratch"', "2026-01-01"]
        lines[at] = f"{draw.choice([key, key, key, 'key'])} = {draw.choice(wrong)}"
        return "\n".join(lines).encode()

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


def test_damaged_files(tree, tmp_path, monkeypatch, capsys):
    run = lambda script, *argv: command_line(script, monkeypatch, capsys, *argv)  # noqa: E731
    from_scratch = placed(FROM_SCRATCH, TREE=tree)
    assert run(train, *from_scratch, "--out_dir", tree / "toy")[0] == 0
    assert run(base, *from_scratch, "--out_dir", tree / "toy-base")[0] == 0
    on_toy = ["--data", tree / "pairs", "--init_from", tree / "toy", *TOY]
    assert run(train, *on_toy, "--out_dir", tree / "toy-adapter")[0] == 0

    def read(number: int, damage: random.Random | None) -> tuple[int, str]:
        """(exit code, what is said) of the command of this number, over its file as it is, or a damaged one."""
        folder, name, script, argv = READERS[number % len(READERS)]
        it, out = tree / "it", tmp_path / "out"
        for old in (it, out):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(tree / folder, it)
        content = (it / name).read_bytes()
        if damage:
            content = damaged(content, name, damage)
            (it / name).write_bytes(content)
        code, _, err = run(script, *placed(argv, IT=it, OUT=out, TREE=tree))
        return code, f"{folder} {name} {content[:200]} {err}"

    for number in range(len(READERS)):
        code, said = read(number, None)
        assert code == 0, said

    refusals = 0
    draw = random.Random(0)
    for number in range(N):
        # every kind of file in turn
        code, said = read(number, draw)
        errors = [line for line in said.replace("\r", "\n").splitlines() if "error: " in line]
        assert code in (0, 2) and len(errors) == code // 2, said
        refusals += code == 2
    assert refusals > 0.6 * N


# --- rows whose numbers are damaged, and not their file
ROWS = {
    "an id too large": lambda t: t["ids"].__setitem__(3, 300),
    "a negative id": lambda t: t["ids"].__setitem__(3, -1),
    "no ids": lambda t: t.pop("ids"),
    "ids of another type": lambda t: t.update(ids=t["ids"].double()),
    "starts that fall": lambda t: t.update(starts=t["starts"].flip(0)),
    "a document of nothing": lambda t: t["starts"].__setitem__(1, 0),
    "starts beyond the ids": lambda t: t["starts"].__setitem__(-1, 10**6),
    "fewer prompts": lambda t: t.update(prompts=t["prompts"][:-1]),
    "a prompt that is too long": lambda t: t["prompts"].__setitem__(0, 10**6),
    "two dimensions": lambda t: t.update(ids=t["ids"][None]),
    "no documents": lambda t: t.update(ids=t["ids"][:0], starts=t["starts"][:1], prompts=t["prompts"][:0]),
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("what", ROWS)
def test_damaged_rows(what, split, tree, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "rows"
    shutil.copytree(tree / "text", folder)
    tensors = load_file(folder / f"{split}.safetensors")
    ROWS[what](tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"{split}.safetensors")
    argv = ["--data", folder, "--init_from", tree / "bytes", *placed(ONE, OUT=tmp_path / "out")]
    line = caller(train, monkeypatch, capsys).fails(*argv)
    assert f"{split}.safetensors cannot be read, is damaged" in line and not (tmp_path / "out").exists()


META = [
    {"block_length": -1}, {"block_length": -8}, {"block_length": 3}, {"block_length": 5}, {"block_length": 8},
    {"block_length": 16}, {"block_length": None}, {"judge": None}, {"judge": {}}, {"judge": {"toy": "pairs"}},
    {"judge": {"toy": 5}}, {"judge": {"names": 5}}, {"judge": {"names": "0"}}, {"eos_id": 0}, {"mask_id": 0},
    {"n_plain": 0}, {"n_plain": 15}, {"vocab_size": 2**20}, {"vocab_size": 40_000}, {"vocab_size": 2**40},
]  # fmt: skip


@pytest.mark.parametrize("change", META, ids=map(str, META))
@pytest.mark.parametrize("rows", ["pairs", "text"])
def test_damaged_words_about_rows(change, rows, tree, tmp_path, monkeypatch, capsys):
    """A length of blocks that rows are not of, ids that are others: one line, or a run that ends."""
    folder = tmp_path / "rows"
    shutil.copytree(tree / rows, folder)
    write_json(folder / "meta.json", json.loads((folder / "meta.json").read_text()) | change)
    for script in (train, base):
        argv = ["--data", folder, "--init_from", "scratch", *placed(ONE, OUT=tmp_path / script.__name__)]
        code, _, err = command_line(script, monkeypatch, capsys, *argv)
        errors = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
        assert code in (0, 2) and len(errors) == code // 2, err
        bad = change.get("block_length") or 0
        if bad < 0 or rows == "pairs" and bad > 0 or change.get("vocab_size", 0) > 2**15:
            assert code == 2


PLANTED = [
    (checkpoint, "check_config", TypeError, sample, ["--ckpt", "TREE/bytes", "--prompt", "a"]),
    (checkpoint, "check_fit", KeyError, sample, ["--ckpt", "TREE/adapter", "--prompt", "a"]),
    (lib.tokenizer, "merge_bytes", ValueError, sample, ["--ckpt", "TREE/bpe", "--prompt", "a"]),
    (sample, "candidates", RuntimeError, sample, ["--ckpt", "TREE/bytes", "--prompt", "a", *SHORT]),
    (prepare, "is_validation", AttributeError, prepare, ["TREE/records/a.jsonl", "--out", "OUT"]),
    (lib.rows.Rows, "epoch_order", KeyError, train, [*FROM_SCRATCH, "--out_dir", "OUT"]),
    (toy, "draw_rows", IndexError, toy, ["pairs", "--out", "OUT"]),
    (train, "settle", TypeError, train, [*FROM_SCRATCH, "--out_dir", "OUT"]),
    (train, "corrupt", IndexError, train, [*FROM_SCRATCH, "--out_dir", "OUT"]),
    (base, "muon", ValueError, base, [*FROM_SCRATCH, "--optimizer", "muon", "--out_dir", "OUT"]),
    (convert_weights, "plan", KeyError, convert_weights, ["--src", "TREE/released", "--out", "OUT"]),
]


@pytest.mark.parametrize("module, name, error, script, argv", PLANTED, ids=[name for _, name, *_ in PLANTED])
def test_a_mistake_of_ours_keeps_its_traceback(module, name, error, script, argv, tree, tmp_path, monkeypatch, capsys):
    def broken(*given, **how):
        raise error("ours")

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(error, match="ours"):
        command_line(script, monkeypatch, capsys, *placed(argv, OUT=tmp_path / "out", TREE=tree))
