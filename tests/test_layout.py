"""What lies where, and who imports whom. `pytest tests/test_layout.py`"""

import ast
import re
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
    {"evaluate", "convert_weights"},
    {"beyond"},
    {"llada"},
    {"tools"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FOLDERS = {"lib", "beyond", "llada", "tools"}
FILES = {p.relative_to(ROOT).as_posix(): p for f in (".", *FOLDERS) for p in sorted((ROOT / f).glob("*.py"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = {re.match(r"\w+", p)[0] for p in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])}
# the one arrow up: load_model reads int8 weights, and then alone
LAZY = {("checkpoint.py", "llada")}


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
    assert {name for name in FILES if name.startswith("lib/")} == {"lib/data.py", "lib/tokenizer.py", "lib/util.py"}


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
