"""What is written down holds: commands parse, links lead somewhere, README's code is the code, and its samples are what
the shipped models write. `pytest tests/test_readme.py`"""

import ast
import importlib
import re
import shlex
import sys
import types

import pytest
import torch
from common import ROOT, command_line

from lib.util import Parser

PAGES = {path.relative_to(ROOT): path.read_text() for path in sorted(ROOT.rglob("*.md")) if ".venv" not in path.parts}
README = (ROOT / "README.md").read_text()
LEARN = (ROOT / "learn" / "README.md").read_text()
COMMAND = re.compile(r"python(?: -m)? ((?:experiments|released|tools)\.\w+|\w+\.py)((?:[^`#\n\\;|>&]|\\\n)*)")


def test_commands_that_are_written_down_parse(monkeypatch, capsys):
    """Each is given to its script, which is stopped when it has read its command line."""
    texts = [text.split("git checkout")[0] for text in PAGES.values()]
    texts += [path.read_text() for path in ROOT.glob("configs/*.toml")]
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[elt]*/*.py")]:
        texts.append(ast.get_docstring(ast.parse(path.read_text())) or "")
    # a command inside another one, $(...), is one of its own
    texts += [inner for text in texts for inner in re.findall(r"\$\((python[^)]*)\)", text)]
    texts = [re.sub(r"\$\([^)]*\)", "1,2", text) for text in texts]
    # a name without a word behind it may be a mention, and dots stand for more than is written
    found = {m.groups() for text in texts for m in COMMAND.finditer(text) if m[2].strip() and "..." not in m[2]}
    found = {(script, line) for script, line in found if script != "tiny.py"}  # it has no flags
    assert len(found) > 60

    class Parsed(Exception):
        pass

    def stop(usual):
        def parse(self, *given):
            usual(self, *given)
            raise Parsed

        return parse

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(Parser, name, stop(getattr(Parser, name)))
    for script, line in sorted(found):
        module = importlib.import_module(script.removesuffix(".py"))
        words = shlex.split(line.replace("\\\n", " "))
        with pytest.raises(Parsed):
            print(script, command_line(module, monkeypatch, capsys, *words))


def test_links_lead_somewhere():
    for name, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert link.startswith("http") or (ROOT / name.parent / link).exists(), (name, link)


def test_quoted_code_is_the_code():
    """Each block of README, and each class in learn, is consecutive lines of one file, but for blanks."""
    plain = lambda text: "\n".join(" ".join(line.split()) for line in text.splitlines())  # noqa: E731
    sources = [plain(path.read_text()) for path in [*ROOT.glob("*.py"), *ROOT.glob("tests/*_own.py")]]
    blocks = re.findall(r"```python\n(.*?)```", README, re.S) + re.findall(r"```python\n(class .*?)```", LEARN, re.S)
    assert len(blocks) > 1
    for block in blocks:
        assert any(plain(block) in source for source in sources), block


def test_what_the_readme_shows_is_what_the_shipped_model_writes(monkeypatch, capsys):
    """A line `$ python sample.py FLAGS`, and below it what is printed, in whatever time."""
    untimed = lambda text: re.sub(r"; [\d.]+ ms a token, threads: \d+", "", text)  # noqa: E731
    shown = re.findall(r"^\$ python sample.py ([^\n]*)\n((?:(?![$`])[^\n]*\n)+)", README + LEARN, re.M)
    assert shown
    monkeypatch.chdir(ROOT)
    for argv, expected in shown:
        words = shlex.split(argv, comments=True)
        code, out, _ = command_line(importlib.import_module("sample"), monkeypatch, capsys, *words)
        assert (code, untimed(out)) == (0, untimed(expected))


def test_what_learn_names_is_there():
    """[file.py](../file.py) `name`, `Class.method`: each is defined in this file."""
    found = re.findall(r"\(\.\./([\w/]+\.py)\):?((?:,? `[\w.]+`)+)", LEARN)
    assert len(found) > 30
    for file, names in found:
        text = (ROOT / file).read_text()
        for name, method in re.findall(r"`(\w+)\.?(\w*)`", names):
            [rest] = re.findall(rf"^(?:def |class )?{name}\b(.*)", text, re.M | re.S)
            assert not method or f"    def {method}(" in rest, (file, name, method)


def test_exercises_on_tiny_print_the_rows_that_learn_shows(monkeypatch, capsys):
    """After 3 steps in place of 700, so that only the names of the rows are the same."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    names = lambda text: re.findall(r"^(.*?)(?:  |: )", text, re.M)  # noqa: E731
    start, *exercises = re.findall(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", LEARN, re.S)
    for code, table in exercises[:4]:
        monkeypatch.setitem(sys.modules, "tiny", tiny := types.ModuleType("tiny"))
        exec((ROOT / "tiny.py").read_text().replace("700", "3"), tiny.__dict__)
        exec(start[0] + code, {})
        assert names(capsys.readouterr().out) == names(table) != []
