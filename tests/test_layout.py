"""What lies where, who imports whom, and how long it may get. `pytest tests/test_layout.py`"""

import ast
import re
import sys
import tomllib

import pytest
from common import ROOT

import settings

CORE = ["model.py", "corrupt.py", "train.py", "sample.py"]  # what a reader of the paper reads
ROOT_FILES = {*CORE, "tiny.py", "settings.py", "cache.py", "checkpoint.py", "presets.py"}
ROOT_FILES |= {"evaluate.py", "convert_weights.py"}
DOORS = {"beyond", "released", "tools"}
FILES = {p.relative_to(ROOT).as_posix(): p for f in (".", "lib", *DOORS) for p in sorted((ROOT / f).glob("*.py"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = {re.match(r"\w+", p)[0] for p in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])}


def imports(tree: ast.AST) -> set[str]:
    """First names of all imported modules, those inside functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import: no folder here is a package"
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Name) and node.id == "__import__":
            found.add("importlib")
    return found


def test_the_root_holds_these_files():
    assert {p.name for p in ROOT.glob("*.py")} == ROOT_FILES


def test_the_root_opens_two_doors_by_name():
    """beyond/, released/ and tools/ import the root. The root comes to beyond/ by the name in an adapter.json alone, to
    released/ by the name in a config.json."""
    for name in sorted(ROOT_FILES):
        tree = ast.parse((ROOT / name).read_text())
        assert not imports(tree) & DOORS, name
        by_name = {f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)
                   if isinstance(n, ast.Attribute | ast.Name) and ast.unparse(n).startswith("importlib.")}  # fmt: skip
        assert by_name == ({"load_adapter", "weights_loader"} if name == "checkpoint.py" else set()), name
        assert ("importlib" in imports(tree)) == (name == "checkpoint.py"), name


def test_train_has_few_flags():
    flags = [a for a in settings.build_parser("")._actions if a.option_strings and a.dest != "help"]
    assert len(flags) <= 33


@pytest.mark.parametrize("name", FILES)
def test_only_the_stated_packages_are_imported(name):
    ours = {"lib"}
    if not name.startswith("lib/"):
        ours |= {file.removesuffix(".py") for file in ROOT_FILES}
    if "/" in name:
        ours |= DOORS
    assert imports(ast.parse(FILES[name].read_text())) <= STATED | ours | set(sys.stdlib_module_names)
