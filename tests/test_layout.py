"""Which file imports which. `pytest tests/test_layout.py`"""

import ast
import re
import sys
import tomllib

import pytest
from common import ROOT

# imports point down: a file imports files of lower floors, or of its own folder
FLOORS = [
    {"lib", "tiny"},
    {"config", "toy"},
    {"layers"},
    {"model"},
    {"corrupt", "cache", "decoding"},
    {"causal"},
    {"checkpoint"},
    {"settings"},
    {"train", "sample"},
    {"base", "prepare", "evaluate", "convert_weights"},
    {"released"},
    {"tools"},
    {"experiments"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FOLDERS = {"lib", "released", "tools", "experiments"}
FILES = {p.relative_to(ROOT).as_posix(): p for f in (".", *FOLDERS) for p in sorted((ROOT / f).glob("*.py"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = {re.match(r"\w+", p)[0] for p in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])}
# the one import of a higher floor, which runs only with --watch
LAZY = {("sample.py", "tools")}


def imports(text: str) -> set[str]:
    """The first names of all imported modules, also of those that are imported inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


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


@pytest.mark.parametrize("name", [name for name, path in FILES.items() if "\ndef main(" in path.read_text()])
def test_a_script_runs_when_it_is_called_and_not_when_it_is_imported(name):
    assert FILES[name].read_text().endswith('\n\nif __name__ == "__main__":\n    main()\n')
