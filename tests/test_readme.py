"""The README quotes the code and names flags that exist. `pytest tests/test_readme.py`"""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
from common import command_line

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = sorted(p for p in ROOT.glob("*.py"))
ALLOWED = {"torch", "numpy", "safetensors", "tiktoken", "tqdm"} | {p.stem for p in SCRIPTS}
OPTIONAL = {"matplotlib", "pyarrow", "evalplus"}


def test_quoted_code_is_the_code():
    """Each block of the README is consecutive lines of one file, but for the indentation."""
    plain = lambda text: "\n".join(line.strip() for line in text.splitlines())  # noqa: E731
    sources = [plain(p.read_text()) for p in SCRIPTS]
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2 and [b for b in blocks if not any(plain(b) in source for source in sources)] == []


COMMANDS = sorted(set(re.findall(r"(?:python|torchrun [^\n]*?) (\w+)\.py((?:[^`#\n\\]|\\\n)*)", README)))


@pytest.mark.parametrize("script", sorted({s for s, _ in COMMANDS}))
def test_flags_in_the_readme_exist(script, monkeypatch, capsys):
    _, manual, _ = command_line(importlib.import_module(script), monkeypatch, capsys, "--help")
    used = {flag for s, line in COMMANDS if s == script for flag in re.findall(r"--\w+", line)}
    assert used <= set(re.findall(r"--\w+", manual))


def test_every_file_is_on_the_map():
    listed = set(re.findall(r"^(\w+\.py) ", README, re.M))
    assert listed == {p.name for p in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_only_the_stated_packages_are_imported(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported <= ALLOWED | OPTIONAL | set(sys.stdlib_module_names)
