"""What a file of settings says is what runs, and README's path from a text to a sample works line by line.
`pytest tests/test_configs.py`"""

import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from common import ROOT, call_line

import base
import settings
import train

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
SMALL = ["--max_iters", "4", "--eval_interval", "3", "--batch_size", "4", "--seq_len", "64", "--device", "cpu"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_a_config_says_is_what_runs(path, monkeypatch):
    """By the command in its head. Flags win over the config, and the config over defaults."""
    found = []
    monkeypatch.setattr(settings, "settle", lambda args: None)
    monkeypatch.setattr(train, "run", lambda args, *step: found.append(vars(args)))
    monkeypatch.chdir(ROOT)
    script, flags = re.search(rf"python (train|base)\.py (.*configs/{path.name}.*)", path.read_text()).groups()
    for more in ([], ["--seed", "7", "--learning_rate", "0.5"]):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *shlex.split(flags), *more])
        {"train": train, "base": base}[script].main()
    said = tomllib.loads(path.read_text())
    ours, other = found
    assert said and {name: ours[name] for name in said} == said
    assert other == ours | dict(seed=7, learning_rate=0.5)


def test_lines_of_the_readme_feed_one_another(tmp_path, monkeypatch, capsys):
    """In a folder with only the configs and a text: each command needs only what those before it wrote."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")
    Path("FOLDER").mkdir()
    for number in range(40):
        (Path("FOLDER") / f"{number}.txt").write_text(f"the text of number {number} " * 3)
    [block] = re.findall(r"^```\n(python prepare\.py FOLDER.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    # the paper's Stage B takes that config, too, though it does not use all of it
    paper = "python train.py --config configs/text.toml --stage_b paper --n_last 4 --out_dir out/paper"
    for line in [*block.splitlines(), paper]:
        call_line(line, {"train.py": SMALL, "base.py": [*SMALL, "--preset", "tiny"]}, monkeypatch, capsys)
