"""What lies where, and who imports whom. `pytest tests/test_layout.py`"""

import re
import sys
import tomllib

import pytest
from common import ROOT

# arrows point down: a file imports what stands on a lower floor, or in its own folder
FLOORS = [
    {"lib", "tiny"},
    {"model"},
    {"corrupt", "cache", "checkpoint"},
    {"train", "sample"},
    {"evaluate", "convert_weights"},
    {"beyond"},
    {"released"},
    {"tools"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FOLDERS = {"lib", "beyond", "released", "tools"}
FILES = {p.relative_to(ROOT).as_posix(): p for f in (".", *FOLDERS) for p in sorted((ROOT / f).glob("*.py"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = {re.match(r"\w+", p)[0] for p in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])}


def part(name: str) -> str:
    """model.py -> model, lib/util.py -> lib"""
    return name.split("/")[0].removesuffix(".py")


def imports(text: str) -> set[str]:
    """First names of all imported modules, those inside functions too."""
    return set(re.findall(r"^ *(?:from (?=\S+ import )|import )(\w+)", text, re.M))


def test_the_root_is_the_card():
    root = {part(name) for name in FILES if "/" not in name}
    assert root == FLOOR.keys() - FOLDERS


@pytest.mark.parametrize("name", FILES)
def test_arrows_point_down_to_what_is_stated(name):
    found = imports(FILES[name].read_text())
    ours = found & FLOOR.keys()
    assert found - ours <= STATED | set(sys.stdlib_module_names)
    here = part(name)
    below = {other for other in FLOOR if FLOOR[other] < FLOOR[here]}
    assert ours <= below | FOLDERS & {here}

    # the root comes to beyond/ and released/ by one door: the module that a JSON file names
    assert "importlib" not in found or name == "checkpoint.py" or "/" in name


def test_nothing_is_patched_or_put_on_from_outside():
    for name, path in FILES.items():
        text = path.read_text()
        assert not re.findall(r"TYPE_CHECKING|__class__ =|\bhasattr\(|object\.__setattr__", text), name
        assert not re.findall(r"import pickle|torch\.(?:save|load)\b|np\.(?:save|load)\b", text), name  # no pickle
