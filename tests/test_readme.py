"""Pages, docstrings and shell scripts quote the code, and their commands parse. `pytest tests/test_readme.py`"""

import ast
import importlib
import re
import shlex
import subprocess
from itertools import pairwise

import pytest
from common import ROOT, command_line

from lib.util import Parser


def read(*patterns: str) -> dict[str, str]:
    """The files of these patterns: name -> text."""
    files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


PAGES = read("*.md", "*/README.md", "results/*.md", "results/*/README.md")
README = PAGES["README.md"]
# python train.py --flags, python -m tools.bench --flags, torchrun ... -m llada.parallel --flags
SCRIPT = r"(?:python|torchrun [^\n]*?)(?: -m)? ((?:experiments|llada|tools)\.\w+|\w+\.py)"
COMMAND = re.compile(SCRIPT + r"((?:[^`#\n\\;|>&]|\\\n)*)")


def shell_script(text: str) -> str:
    """With every variable replaced by the (first) value that it has, or 1 if it has none here."""
    values = dict(re.findall(r"for (\w+) in (?:\\\n)?\s*(\S+?)[;\s]", text))
    for name, value in re.findall(r'^\s*(\w+)=("[^"]*"|\S*)', text, re.M):
        values.setdefault(name, value.strip('"'))
    text = re.sub(r'^\s*\w+=("[^"]*"|\S*)$', "", text, flags=re.M)  # to set a variable is no command
    for _ in range(4):  # a value may hold a variable
        text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: values.get(found[1], found[2]), text)
        text = re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], "1"), text)
    return text


def commands() -> list[tuple[str, str, str]]:
    """(file, script, what stands behind it) of every command that is written down."""
    texts = {name: shell_script(text.split("git checkout")[0]) for name, text in PAGES.items()}
    texts |= {name: shell_script(text) for name, text in read("experiments/*.sh").items()}
    texts |= {name: text.replace("# python", "python") for name, text in read("configs/*.toml").items()}
    for name, text in read("*.py", "lib/*.py", "experiments/*.py", "llada/*.py", "tools/*.py").items():
        documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
        docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        texts[name] = "\n".join(docs)
    found = [(name, m[1].removesuffix(".py"), m[2]) for name, text in texts.items() for m in COMMAND.finditer(text)]
    # a name without a word behind it may be a mention, and dots stand for more than is written
    whole = [(name, script, line) for name, script, line in found if line.strip() and "..." not in line]
    return [(name, script, line) for name, script, line in whole if script != "tiny"]


COMMANDS = commands()


def test_quoted_code_is_the_code():
    """Each block of the README is consecutive lines of one file, but for blanks."""
    plain = lambda text: "\n".join(" ".join(line.split()) for line in text.splitlines())  # noqa: E731
    sources = [plain(path.read_text()) for path in ROOT.glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks and [b for b in blocks if not any(plain(b) in source for source in sources)] == []


class Parsed(Exception):
    pass


@pytest.mark.parametrize("script", sorted({script for _, script, _ in COMMANDS}))
def test_commands_that_are_written_down_parse(script, monkeypatch, capsys):
    """Each is given to its script, which is stopped when it has read its command line."""
    assert len(COMMANDS) > 100
    module = importlib.import_module(script.replace("llada.parallel", "train"))  # to which it passes its flags on
    for name in ("parse_args", "parse_intermixed_args"):
        usual = getattr(Parser, name)

        def stop(self, *given, usual=usual):
            usual(self, *given)
            raise Parsed

        monkeypatch.setattr(Parser, name, stop)
    wrong = []
    for file, name, line in COMMANDS:
        if name != script:
            continue
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        try:
            code, _, err = command_line(module, monkeypatch, capsys, *words)
            wrong.append((file, line.strip(), code, err))
        except Parsed:
            pass
    assert not wrong


def test_what_a_written_command_writes_is_ignored_by_git():
    """A folder or file behind --out, unless it is a DIR of the reader's."""
    places = set()
    for _, _, line in COMMANDS:
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        places |= {place for flag, place in pairwise(words) if flag in ("--out", "--out_dir") and place != "DIR"}
    done = subprocess.run(["git", "check-ignore", "--stdin"], input="\n".join(places), cwd=ROOT, capture_output=True,
                          text=True)  # fmt: skip
    if done.returncode == 128:
        pytest.skip("this is no checkout of git")
    assert len(places) > 10 and places - set(done.stdout.splitlines()) == set()


def test_what_the_readme_shows_is_what_the_shipped_model_writes(monkeypatch, capsys):
    shown = re.findall(r"^\$ python sample.py ([^\n]*)\n((?:[^$`\n][^\n]*\n)+)", README, re.M)
    assert len(shown) >= 1
    monkeypatch.chdir(ROOT)
    for argv, expected in shown:
        words = shlex.split(argv, comments=True)
        code, out, _ = command_line(importlib.import_module("sample"), monkeypatch, capsys, *words)
        assert code == 0 and out == expected


def test_what_one_changes_is_there():
    """Functions by their names."""
    table = README.split("|to change|")[1]
    names = re.findall(r"`(\w+)`", table.split("\n\n")[0])
    sources = "\n".join(path.read_text() for path in ROOT.glob("*.py"))
    assert len(names) >= 9
    assert [
        name for name in names if not re.search(rf"^(?:def|class) {name}\b|^{name}\b.* =|def {name}\(", sources, re.M)
    ] == []


def test_links_lead_somewhere():
    for name, text in PAGES.items():
        folder = (ROOT / name).parent
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert link.startswith("http") or (folder / link).exists(), (name, link)
