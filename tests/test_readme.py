"""What is written down holds: commands parse, links lead somewhere, README's code is the code, and its samples are what
the shipped models write. `pytest tests/test_readme.py`"""

import ast
import importlib
import re
import shlex

import pytest
from common import ROOT, command_line

from lib.util import Parser

PAGES = {path.relative_to(ROOT): path.read_text() for path in sorted(ROOT.rglob("*.md")) if ".venv" not in path.parts}
README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"python(?: -m)? ((?:experiments|released|tools)\.\w+|\w+\.py)((?:[^`#\n\\;|>&]|\\\n)*)")


def test_commands_that_are_written_down_parse(monkeypatch, capsys):
    """Each is given to its script, which is stopped when it has read its command line."""
    texts = [text.split("git checkout")[0] for text in PAGES.values()]
    texts += [path.read_text() for path in ROOT.glob("configs/*.toml")]
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[elt]*/*.py")]:
        texts.append(ast.get_docstring(ast.parse(path.read_text())) or "")
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
    """Each block of the README is consecutive lines of one file, but for blanks."""
    plain = lambda text: "\n".join(" ".join(line.split()) for line in text.splitlines())  # noqa: E731
    sources = [plain(path.read_text()) for path in ROOT.glob("*.py")]
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        assert any(plain(block) in source for source in sources), block


def test_what_the_readme_shows_is_what_the_shipped_model_writes(monkeypatch, capsys):
    """A line `$ python sample.py FLAGS`, and below it what is printed, in whatever time."""
    untimed = lambda text: re.sub(r"[\d.]+ ms", "ms", text)  # noqa: E731
    shown = re.findall(r"^\$ python sample.py ([^\n]*)\n((?:[^$`\n][^\n]*\n)+)", README, re.M)
    assert shown
    monkeypatch.chdir(ROOT)
    for argv, expected in shown:
        words = shlex.split(argv, comments=True)
        code, out, _ = command_line(importlib.import_module("sample"), monkeypatch, capsys, *words)
        assert (code, untimed(out)) == (0, untimed(expected))
