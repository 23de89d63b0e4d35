"""README's way for a laptop, on tiny checkpoints: convert, ask, prepare, train, ask, export. `pytest tests/released`"""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from common import ROOT, call_line

SMALL = ["--max_iters", "2", "--batch_size", "2", "--seq_len", "32", "--n_last", "2", "--device", "cpu"]


@pytest.mark.parametrize(("name", "only"), [("golden_a2d", ["--block_length", "8"]), ("golden_sdar", [])])
def test_each_command_needs_only_what_those_before_it_wrote(name, only, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")
    shutil.copytree(ROOT / "tests" / "data" / name, "Qwen3-0.6B-diffusion-bd3lm-v0.1")
    Path("fineweb_edu").mkdir()
    for number in range(40):
        Path(f"fineweb_edu/{number}.txt").write_text(f"the text of number {number} " * 3)
    more = {"convert_weights.py": only, "train.py": SMALL, "sample.py": ["--gen_length", "8"]}
    call = partial(call_line, more=more, monkeypatch=monkeypatch, capsys=capsys)

    readme = (ROOT / "released" / "README.md").read_text()
    [block] = re.findall(r"^```\n(python convert_weights\.py --src Qwen3.*?)^```", readme, re.S | re.M)
    lines = [line for line in block.splitlines() if "released.harness" not in line]
    assert len(lines) == 6
    for line in lines:
        call(re.sub(r"\$\((.*?)\)", lambda inner: call(inner[1]), line))
    assert {file.name for file in Path("weights/a2d_merged").iterdir()} >= {"config.json", "markers.safetensors"}
