"""The README and the pages quote the code and name files and flags that exist. `pytest tests/test_readme.py`"""

import importlib
import re
import shlex

import pytest
from common import ROOT, command_line

README = (ROOT / "README.md").read_text()
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for pattern in ("*.md", "*/README.md", "results/*.md", "results/*/README.md", "experiments/*.sh")
    for path in sorted(ROOT.glob(pattern))
}
# python train.py --flags, python -m tools.bench --flags, torchrun ... -m released.parallel --flags
SCRIPT = r"(?:python|torchrun [^\n]*?)(?: -m)? (beyond\.\w+|released\.\w+|tools\.\w+|\w+\.py)"
COMMAND = re.compile(SCRIPT + r"((?:[^`#\n\\]|\\\n)*)")
COMMANDS = [
    (name, m[1].removesuffix(".py"), m[2])
    for name, text in TEXTS.items()
    for line in text.split("git checkout")[:1]
    for m in COMMAND.finditer(line)
]


def test_quoted_code_is_the_code():
    """Each block of the README is consecutive lines of one file, but for blanks."""
    plain = lambda text: "\n".join(" ".join(line.split()) for line in text.splitlines())  # noqa: E731
    sources = [plain(path.read_text()) for path in ROOT.glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks and [b for b in blocks if not any(plain(b) in source for source in sources)] == []


@pytest.mark.parametrize("script", sorted({script for _, script, _ in COMMANDS}))
def test_flags_that_are_written_down_exist(script, monkeypatch, capsys):
    if script == "released.parallel":  # it passes its flags on
        script = "train"
    _, manual, _ = command_line(importlib.import_module(script), monkeypatch, capsys, "--help")
    known = set(re.findall(r"--\w+", manual)) | {"--compile"}
    for page, name, line in COMMANDS:
        if name == script:
            assert set(re.findall(r"(?<![\w-])--\w+", line)) <= known, (page, line)


def test_what_the_readme_shows_is_what_the_shipped_model_writes(monkeypatch, capsys):
    shown = re.findall(r"^\$ python sample.py ([^\n]*)\n((?:[^$`\n][^\n]*\n)+)", README, re.M)
    assert len(shown) >= 2
    monkeypatch.chdir(ROOT)
    for argv, expected in shown:
        words = shlex.split(argv, comments=True)
        code, out, _ = command_line(importlib.import_module("sample"), monkeypatch, capsys, *words)
        assert code == 0 and out == expected


def test_links_lead_somewhere():
    for name, text in TEXTS.items():
        folder = (ROOT / name).parent
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert link.startswith("http") or (folder / link).exists(), (name, link)
