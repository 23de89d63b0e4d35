"""What lies where, and who imports whom. `pytest tests/test_layout.py`"""

import ast
import json
import re
import subprocess
import sys
import tomllib

import pytest
from common import ROOT

# arrows point down: a file imports what stands on a lower floor, or in its own folder
FLOORS = [
    {"lib", "tiny"},
    {"model", "toy"},
    {"corrupt", "cache", "checkpoint"},
    {"train", "sample"},
    {"base", "prepare", "evaluate", "convert_weights"},
    {"llada"},
    {"tools"},
    {"experiments"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FOLDERS = {"lib", "llada", "tools", "experiments"}
FILES = {p.relative_to(ROOT).as_posix(): p for f in (".", *FOLDERS) for p in sorted((ROOT / f).glob("*.py"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = {re.match(r"\w+", p)[0] for p in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])}
# the arrows up, when they are asked for: the moving view of a decode, and a name that stands for a type
LAZY = {("sample.py", "tools"), ("cache.py", "sample")}


def imports(text: str) -> set[str]:
    """First names of all imported modules, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_the_root_is_the_card():
    root = {name.removesuffix(".py") for name in FILES if "/" not in name}
    assert root == FLOOR.keys() - FOLDERS
    lib = {name.removeprefix("lib/") for name in FILES if name.startswith("lib/")}
    assert lib == {"int8.py", "rows.py", "run.py", "tokenizer.py", "util.py"}


@pytest.mark.parametrize("name", FILES)
def test_arrows_point_down_to_what_is_stated(name):
    found = imports(FILES[name].read_text())
    ours = found & FLOOR.keys()
    assert found - ours <= STATED | set(sys.stdlib_module_names)
    here = name.split("/")[0].removesuffix(".py")
    below = {other for other in FLOOR if FLOOR[other] < FLOOR[here]}
    up = ours - below - (FOLDERS & {here})
    assert {(name, other) for other in up} <= LAZY
    assert "/" in name or not found & {"importlib", "pickle"}


def test_text_is_read_in_one_place():
    """So who does not import lib.tokenizer has no tiktoken."""
    assert {name for name in FILES if "tiktoken" in imports(FILES[name].read_text())} == {"lib/tokenizer.py"}


# --- what an import brings along
LOADED = """
import importlib, json, sys
import torch, tqdm, safetensors.torch
found = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    here = {n for n in sys.modules if n.split(".")[0] in HERE}
    found[name] = sorted(here | {"tiktoken"} & sys.modules.keys())
    for n in here:
        del sys.modules[n]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Of every file of the root the modules of ours that its import brings along, in a process of its own."""
    # train.py first: once it is imported, tiktoken stays
    root = {name.removesuffix(".py") for name in FILES if "/" not in name} - {"tiny"}
    names = sorted(root, key=lambda name: name != "train")
    code = LOADED.replace("HERE", repr(set(FLOOR)))
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: set(found) for name, found in json.loads(done.stdout).items()}


ROWS = "lib lib.util lib.rows"
READS = "lib lib.util lib.tokenizer"
TRAIN = "corrupt checkpoint model lib.run " + ROWS
BRINGS = {
    "train": TRAIN,  # rows, and nothing of where they are from
    "base": "train " + TRAIN,
    "sample": "cache checkpoint model " + READS,  # nothing of training
    "toy": ROWS,  # rows are written without a model
    "prepare": "lib.rows " + READS,
}


@pytest.mark.parametrize("name", BRINGS)
def test_an_import_brings_along_what_it_needs(name, loaded):
    assert loaded[name] - {"tiktoken"} == {name, *BRINGS[name].split()}


def test_the_root_brings_along_no_folder_but_lib(loaded):
    assert "tiktoken" not in loaded["train"]
    for name, found in loaded.items():
        assert not {module.split(".")[0] for module in found} & {"llada", "tools", "experiments", "tiny"}, name
