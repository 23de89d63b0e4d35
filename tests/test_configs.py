"""Every run that the README, configs/ and the scripts name: it goes on by the line that it prints. And what a file of
settings may say. `pytest tests/test_configs.py`"""

import importlib
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from common import ROOT, command_line, names_folder, refused
from resuming import SCRIPTS, byte_rows, end_state, resumed

import train

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
TEXTS = [ROOT / "README.md", ROOT / "train.py", ROOT / "base.py", *CONFIGS]
COMMAND = re.compile(r"python ((?:train|base)\.py)((?: +[^\s#`\\]+| \\\n)*)")
TINY = ["--max_iters", 4, "--eval_interval", 3, "--batch_size", 4, "--device", "cpu"]


def runs() -> list[list[str]]:
    """Script and flags of every run that is written down and starts one."""
    found = {}
    for path in TEXTS:
        for script, flags in COMMAND.findall(path.read_text()):
            words = [script, *shlex.split(flags.replace("\\\n", " "))]
            if "resume" not in words and "..." not in flags:
                found[" ".join(words)] = words
    return list(found.values())


RUNS = runs()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A checkout in small: the files of configs/, and tiny rows and models where these lines look for them."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "configs", home / "configs")
    for name in ("names", "written"):
        byte_rows(home / "data" / name, prompt=-1, judge={"names": "0"})
    for name in ("mine", "modes", "fineweb"):
        byte_rows(home / "data" / name)
    for name in ("assets/names", "out/toy_base", "out/text_base"):
        names_folder(home / name, n_rounds=1, max_len=4096)
    names_folder(home / "weights" / "llada2.1-mini", n_rounds=1, max_len=4096, block_length=32)
    return home


def small(words: list[str], home: Path) -> list:
    """Flags that make such a run small."""
    config = {}
    if "--config" in words:
        config = tomllib.loads((home / words[words.index("--config") + 1]).read_text())
    flags = [*TINY]
    if config.get("init_from") == "scratch" or "scratch" in words:
        flags += ["--preset", "tiny"]
    if config.get("seq_len", 32) > 64:
        flags += ["--seq_len", 64]
    if config.get("dtype") == "bf16":
        flags += ["--dtype", "fp32"]  # on a CPU without bf16 instructions bf16 is many times slower
    return flags


def test_every_config_is_named_by_a_run():
    given = {words[words.index("--config") + 1] for words in RUNS if "--config" in words}
    assert given == {path.relative_to(ROOT).as_posix() for path in CONFIGS}
    names = {"base", "causal", "toy", "toy_base", "text", "text_base", "llada"}
    assert {path.stem for path in CONFIGS} == names
    assert ["train.py", "--n_last", "3"] in RUNS
    assert {lines[0][0] for lines in CHAINS} == {"toy.py", "prepare.py"}


# --- they run
def chains() -> list[list[list[str]]]:
    """Commands of the README and of the toys that follow from each other, beginning with one that writes rows: script
    and flags."""
    found = []
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "results/theorem/README.md"))
    for block in re.findall(r"^```\w*\n(.*?)^```", pages, re.S | re.M):
        for part in block.split("\n\n"):
            lines = [shlex.split(line, comments=True)[1:] for line in part.splitlines() if line.startswith("python ")]
            if lines and "--out" in lines[0] and "--written_by" not in lines[0]:
                found.append(lines)
    return found


CHAINS = chains()
ALONE = [words for words in RUNS if words not in sum(CHAINS, [])]


@pytest.mark.parametrize("words", ALONE, ids=[" ".join(words) for words in ALONE])
def test_a_run_that_is_written_down_resumes_by_the_line_that_it_prints(words, home, tmp_path, monkeypatch, capsys):
    """Commands that need other commands of the README are run below. test_train tests that a resumed run is the same
    bit for bit."""
    monkeypatch.chdir(home)
    script, *argv = words
    folder = tmp_path / "with a blank"
    resumed(SCRIPTS[script], folder, monkeypatch, capsys, *argv, *small(words, home))
    assert len(end_state(folder)[1]) == 7  # four steps and three validations


@pytest.mark.parametrize("lines", CHAINS, ids=lambda lines: " ".join(lines[0]))
def test_lines_of_the_readme_feed_one_another(lines, tmp_path, monkeypatch, capsys):
    """They run in a folder with only the configs and a text: each needs only what those before it wrote."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")
    Path("FOLDER").mkdir()
    for number in range(40):
        (Path("FOLDER") / f"{number}.txt").write_text(f"the text of number {number} " * 3)
    for script, *argv in lines:
        if script in SCRIPTS:
            argv += small([script, *argv], tmp_path)
        if script == "toy.py":
            argv += ["--rows", "64"]
        module = importlib.import_module(script.removesuffix(".py"))
        code, out, err = command_line(module, monkeypatch, capsys, *argv)
        assert code == 0, (script, argv, err)
        if script == "evaluate.py":
            assert ("KL(truth || drawn) in nats" if lines[0][0] == "toy.py" else "bits a token") in out


# --- a file of settings
def arguments(script, monkeypatch, *argv) -> dict:
    """The settings of a run, which is not started."""
    found = []
    monkeypatch.setattr(train, "run", lambda args, *given: found.append(args))
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, argv)])
    script.main()
    return vars(found[0])


def test_what_a_config_says_is_what_runs(home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)
    for path in CONFIGS:
        words = next(words for words in RUNS if f"configs/{path.name}" in words)
        found = arguments(SCRIPTS[words[0]], monkeypatch, *words[1:], "--out_dir", tmp_path)
        said = tomllib.loads(path.read_text())
        assert said.pop("out_dir") == f"out/{path.stem}" or path.stem == "llada"
        assert said and {name: found[name] for name in said} == said, path.name


def test_flags_win_over_the_config_and_the_config_over_defaults(home, monkeypatch):
    monkeypatch.chdir(home)
    toml = ["--config", "configs/llada.toml", "--data", "data/fineweb"]
    flags = ["--no-checkpointing", "--n_last", 2, "--learning_rate", 1e-4, "--context", "clean"]
    names = ("checkpointing", "n_last", "learning_rate", "context", "batch_size")

    def found(*argv) -> list:
        args = arguments(train, monkeypatch, *argv)
        return [args[name] for name in names]

    said = tomllib.loads(Path("configs/llada.toml").read_text())
    assert found("--n_last", 1) == [False, 1, 3e-4, "corrupted", 64]
    assert found(*toml) == [said[name] for name in names] == [True, 3, 1e-5, "corrupted", 8]
    assert found(*toml, *flags) == [False, 2, 1e-4, "clean", 8]


def test_a_stage_b_has_its_own_settings_whatever_flags_say(home, monkeypatch):
    monkeypatch.chdir(home)
    given = ["--stage_b", "causal", "--corruption", "draft", "--context", "corrupted"]
    args = arguments(train, monkeypatch, *given)
    assert (args["corruption"], args["context"]) == ("mask", "clean")


WRONG = {
    "learning_rat = 0.1": "learning_rat = 0.1 is not a setting",
    'config = "other.toml"': "config = 'other.toml' is not a setting",
    "seq_len = 32.5": "--seq_len: invalid int value: '32.5'",
    'stage_b = "both"': "--stage_b: invalid choice: 'both'",
    "n_last = true": "n_last = True: this setting has a value",
    "seed = false": "seed = False: this setting has a value",
    'checkpointing = "yes"': "checkpointing = 'yes': this setting is true or false",
    'data = ""': "--data is empty",
    'init_from = "resume"': "resume",
    "a = " + "[" * 10**4: "cannot be read, is damaged",
    "\xff": "cannot be read, is damaged",
}


@pytest.mark.parametrize("content", WRONG, ids=[repr(content[:30]) for content in WRONG])
def test_a_wrong_config_is_refused_in_one_line(content, home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(home)
    path = tmp_path / "wrong.toml"
    path.write_bytes(content.encode("latin-1"))
    line = refused(train, monkeypatch, capsys, "--config", path, "--out_dir", tmp_path / "out", *TINY)
    assert WRONG[content] in line and not (tmp_path / "out").exists()
