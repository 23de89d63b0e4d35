"""A user's mistake: one line that says what is wrong and what to do, exit code 2. `pytest tests/test_cli.py`"""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
import unicodedata

import pytest
import torch
from common import ROOT, command_line, refused, tiny_model

import convert_weights
import evaluate
import sample
import train
from checkpoint import load_model, save_model
from released import chat
from tools import gallery, random_weights, toys
from tools.trace_page import states


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ckpt")
    save_model(tiny_model(vocab_size=272, eos_id=256, mask_id=257, max_len=128), folder)
    return folder


TRAIN_MISTAKES = {
    "no such data": (["--data", "nowhere.txt"], ["nowhere.txt", "no such file"]),
    "unknown flag": (["--n_lats", 3], ["--n_lats", "--help"]),
    "not a number": (["--max_iters", "many"], ["--max_iters"]),
    "n_last too large": (["--data", "pairs", "--n_last", 9], ["n_last", "1..4"]),
    "n_last zero": (["--data", "pairs", "--n_last", 0], ["--n_last"]),
    "block against row": (["--data", __file__, "--seq_len", 100], ["--seq_len 100", "multiple"]),
    "row beyond the model": (["--data", __file__, "--seq_len", 16384], ["--seq_len", "8192"]),
    "no such checkpoint": (["--init_from", "nowhere"], ["nowhere", "config"]),
    "nothing to resume": (["--init_from", "resume", "--out_dir", "nowhere"], ["nowhere", "resume"]),
    "size of another toy": (["--data", "pairs", "--toy", "eps=0.1"], ["eps", "pairs"]),
    "table too large": (["--data", "copy", "--toy", "V=64", "m=8"], ["65,536"]),
    "no size": (["--data", "pairs", "--toy", "W=3"], ["W=3", "KEY=VALUE"]),
    "size without a number": (["--data", "pairs", "--toy", "V=many"], ["V=many"]),
    "size out of bounds": (["--data", "pairs", "--toy", "V=1"], ["V must lie in 2..1024"]),
    "size without a toy": (["--data", __file__, "--toy", "V=3"], ["--toy", "--data"]),
    "bundle bounds": (["--data", "pairs", "--s_min", 5, "--s_max", 2], ["--s_max"]),
    "rate": (["--replace_rate", 1.5], ["--replace_rate", "1.5"]),
    "rate of drafts": (["--draft_rate", -1], ["--draft_rate", "-1"]),
    "device": (["--data", "pairs", "--device", "warp"], ["--device"]),
    "learning rate": (["--data", "pairs", "--learning_rate", "-1"], ["--learning_rate"]),
    "no learning rate": (["--data", "pairs", "--learning_rate", "inf"], ["--learning_rate"]),
    "batch size": (["--data", "pairs", "--batch_size", 0], ["--batch_size"]),
    "negative clip": (["--data", "pairs", "--grad_clip", -1], ["--grad_clip"]),
    "nan decay": (["--data", "pairs", "--weight_decay", "nan"], ["--weight_decay"]),
    "negative micro batch": (["--data", "pairs", "--micro_batch", -3], ["--micro_batch"]),
    "a toy's block": (["--data", "pairs", "--block_length", 5], ["--block_length", "--toy m=4"]),
    "a toy's row": (["--data", "pairs", "--seq_len", 16], ["--seq_len", "--toy m=4"]),
    "no block": (["--block_length", 0], ["--block_length"]),
    "a geometry of its own": (["--data", "pairs", "--preset", "large"], ["--preset"]),
    "meta device": (["--data", "pairs", "--device", "meta"], ["--device"]),
}


@pytest.mark.parametrize("argv, words", TRAIN_MISTAKES.values(), ids=TRAIN_MISTAKES)
def test_train_refuses(argv, words, tmp_path, monkeypatch, capsys):
    out = [] if "--out_dir" in argv else ["--out_dir", tmp_path / "out"]
    line = refused(train, monkeypatch, capsys, *argv, *out)
    assert all(w in line for w in words), line


def test_train_refuses_damaged_and_unwritable(tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    assert "bad.jsonl" in refused(train, monkeypatch, capsys, "--data", bad, "--out_dir", tmp_path / "a")
    bad.write_text('{"body": "no text"}\n')
    assert "`text`" in refused(train, monkeypatch, capsys, "--data", bad, "--out_dir", tmp_path / "a")
    (tmp_path / "empty").mkdir()
    assert "no text" in refused(train, monkeypatch, capsys, "--data", tmp_path / "empty", "--out_dir", tmp_path / "a")
    (tmp_path / "file").write_text("in the way")
    args = ["--data", "pairs", "--out_dir", tmp_path / "file" / "run"]
    assert "cannot write" in refused(train, monkeypatch, capsys, *args)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_run_is_not_overwritten_and_a_resume_keeps_its_settings(tmp_path, monkeypatch, capsys):
    run = ["--data", "pairs", "--toy", "V=3", "m=2", "--max_iters", 2, "--batch_size", 2, "--eval_rows", 2]
    assert command_line(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")[0] == 0
    before = (tmp_path / "a" / "state.safetensors").read_bytes()
    assert "resume" in refused(train, monkeypatch, capsys, *run, "--out_dir", tmp_path / "a")
    resume = ["--init_from", "resume", "--out_dir", tmp_path / "a"]
    assert "--log_interval" in refused(train, monkeypatch, capsys, *resume, "--log_interval", 0)
    assert "--s_max 3 differs" in refused(train, monkeypatch, capsys, *resume, "--s_max", 3)
    assert (tmp_path / "a" / "state.safetensors").read_bytes() == before
    adapt = ["--init_from", tmp_path / "a", "--out_dir", tmp_path / "b"]
    other_size = ["--data", "pairs", "--toy", "V=4"]
    assert "another size" in refused(train, monkeypatch, capsys, *adapt, *other_size)
    assert "other tokens" in refused(train, monkeypatch, capsys, *adapt, "--data", "stdlib")
    assert "--preset" in refused(train, monkeypatch, capsys, *adapt, "--data", "pairs", "--preset", "tiny")
    assert "--stage_a_only" in refused(train, monkeypatch, capsys, *adapt, "--data", "pairs", "--stage_a_only")
    (tmp_path / "a" / "state.safetensors").write_bytes(before[: len(before) // 2])
    assert "damaged" in refused(train, monkeypatch, capsys, *resume)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    line = refused(train, monkeypatch, capsys, "--data", tmp_path / "a.parquet", "--out_dir", tmp_path / "a")
    assert "pip install pyarrow" in line


SAMPLE_MISTAKES = {
    "no prompt": ([], ["--prompt"]),
    "empty prompt": (["--prompt", ""], ["empty"]),
    "one of several is empty": (["--prompt", "a", "--prompt", ""], ["prompt 2"]),
    "too long": (["--prompt", "x" * 120, "--gen_length", 64], ["120 tokens", "128"]),
    "bad ids": (["--prompt_ids", "1,two"], ["--prompt_ids", "1,two"]),
    "ids outside": (["--prompt_ids", "5,9999"], ["271"]),
    "too many rounds": (["--prompt", "a", "--n_rounds", 5], ["--n_rounds 5", "0..2"]),
    "bad gate": (["--prompt", "a", "--tau_t2t", "off"], ["--tau_t2t", "none"]),
    "temperature": (["--prompt", "a", "--temperature", -1], ["--temperature"]),
    "a temperature that is greedy": (["--prompt", "a", "--temperature", "1e-40"], ["--temperature", "0.001"]),
    "a path with a NUL byte": (["--prompts_file", "a\0b"], ["--prompts_file", r"a\x00b"]),
    "nan temperature": (["--prompt", "a", "--temperature", "nan"], ["--temperature"]),
    "nan gate": (["--prompt", "a", "--tau_m2t", "nan"], ["--tau_m2t"]),
    "top_p": (["--prompt", "a", "--top_p", 0], ["--top_p"]),
    "length": (["--prompt", "a", "--gen_length", 0], ["--gen_length"]),
    "mode": (["--prompt", "a", "--mode", "x"], ["--mode"]),
    "no adapter": (["--prompt", "a", "--adapter", "nowhere"], ["nowhere"]),
    "negative rounds": (["--prompt", "a", "--n_rounds", -1], ["--n_rounds"]),
    "top_k": (["--prompt", "a", "--top_k", -1], ["--top_k"]),
}


@pytest.mark.parametrize("argv, words", SAMPLE_MISTAKES.values(), ids=SAMPLE_MISTAKES)
def test_sample_refuses(argv, words, ckpt, monkeypatch, capsys):
    line = refused(sample, monkeypatch, capsys, "--ckpt", ckpt, "--device", "cpu", "--gen_length", 16, *argv)
    assert all(w in line for w in words), line


def test_blank_lines_of_a_prompts_file_are_skipped_and_counted(ckpt, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.txt").write_text("one\n\n  \ntwo\n")
    argv = ["--ckpt", ckpt, "--prompts_file", tmp_path / "prompts.txt", "--gen_length", 8, "--json", "--device", "cpu"]
    code, out, err = command_line(sample, monkeypatch, capsys, *argv)
    assert code == 0 and len(out.splitlines()) == 2 and "2 blank lines" in err


def test_a_seed_may_be_any_whole_number(ckpt, monkeypatch, capsys):
    """It is hashed: beyond 64 bits, and below 0, each is a seed of its own."""
    argv = ["--ckpt", ckpt, "--prompt", "a", "--gen_length", 8, "--temperature", 1, "--json", "--device", "cpu"]
    texts = [command_line(sample, monkeypatch, capsys, *argv, "--seed", s)[1] for s in (0, 2**64, 2**64, -1)]
    assert texts[0] != texts[1] == texts[2] != texts[3] != texts[0]


def test_a_reader_who_leaves_is_no_error():
    """`python -m tools.toys | head -1`, the pipe closed before the rest is written. Every script has util.Parser."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tools.toys"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 141 and not err


def test_chat_needs_its_template(ckpt, monkeypatch, capsys):
    assert "<role>" in refused(chat, monkeypatch, capsys, "--ckpt", ckpt, "--prompt", "a")


def test_sample_refuses_damaged_checkpoints(ckpt, tmp_path, monkeypatch, capsys):
    def refuses(word, spoil):
        folder = tmp_path / word.replace(" ", "_")
        shutil.copytree(ckpt, folder)
        spoil(folder)
        line = refused(sample, monkeypatch, capsys, "--ckpt", folder, "--prompt", "a", "--device", "cpu")
        assert word in line, line

    weights = "model.safetensors"
    refuses("damaged", lambda f: (f / weights).write_bytes((f / weights).read_bytes()[:-100]))
    refuses("missing", lambda f: (f / weights).unlink())
    refuses("JSON", lambda f: (f / "config.json").write_text("{"))
    refuses("shape", lambda f: edit_config(f, '"vocab_size": 272', '"vocab_size": 300'))
    refuses("vocabulary", lambda f: edit_config(f, '"mask_id": 257', '"mask_id": 9999'))
    refuses("does not fit", lambda f: edit_config(f, '"n_layer"', '"n_layers"'))
    line = refused(sample, monkeypatch, capsys, "--ckpt", tmp_path / "nothing", "--prompt", "a")
    assert "no checkpoint config" in line


def edit_config(folder, old, new):
    text = (folder / "config.json").read_text()
    assert old in text
    (folder / "config.json").write_text(text.replace(old, new))


def test_json_and_text_and_ids_agree(ckpt, monkeypatch, capsys):
    common = ["--ckpt", ckpt, "--gen_length", 9, "--device", "cpu"]
    _, out, _ = command_line(sample, monkeypatch, capsys, *common, "--prompt", "ab", "--json")
    by_text = json.loads(out)
    _, out, _ = command_line(sample, monkeypatch, capsys, *common, "--prompt_ids", "97,98", "--json")
    assert json.loads(out) == by_text
    model = load_model(ckpt, "cpu", torch.float32)
    d = sample.Decoding(gen_length=9, tau_m2t=0.7, tau_t2t=0.0, n_rounds=2)  # the defaults
    assert by_text["tokens"] == sample.generate_one(model, [97, 98], d)[0]
    of_page = {"prompt", "mask_id", "n_rounds", "pieces"}
    assert set(by_text) == {"text", "verdict", "tokens", "nfe", "nfe_per_token", "partial_cost", "steps"} | of_page
    nfe = by_text["nfe"]
    assert nfe["all"] == nfe["full"] + nfe["commit"] + nfe["partial"] / 2  # n = 2 of 4 layers
    assert by_text["nfe_per_token"] == by_text["nfe"]["full"] / len(by_text["tokens"])
    code, out, _ = command_line(sample, monkeypatch, capsys, *common, "--prompt", "ab", "--watch", "--tau_t2t", "none")
    assert code == 0 and "step   1 block 0: ab" in out and "left 0 masked" in out and " per token]" in out
    code, out, _ = command_line(sample, monkeypatch, capsys, *common, "--prompt", "ab", "--prompt", "cd", "--mode", "s")
    assert code == 0 and out.count("forwards:") == 2


# --- a model of names, and those who ask it


NAMES = ["--ckpt", ROOT / "assets" / "names", "--device", "cpu", "--tau_m2t", "0.5"]


def test_a_blank_after_the_prompt_changes_nothing(monkeypatch, capsys):
    """In names a blank is the beginning of the next token; at the end of a prompt it would be a token of its own."""
    with_blank = command_line(sample, monkeypatch, capsys, *NAMES, "--prompt", "ARABIC LIGATURE ")
    without = command_line(sample, monkeypatch, capsys, *NAMES, "--prompt", "ARABIC LIGATURE")
    assert with_blank == without and without[0] == 0 and re.match(r"ARABIC LIGATURE \S", without[1])
    assert "empty" in refused(sample, monkeypatch, capsys, *NAMES, "--prompt", " ")


def test_a_prompt_that_begins_no_name_is_a_note_and_not_an_error(monkeypatch, capsys):
    for prompt, words in (("QQQ", "(no such character)"), ("latin", "names are in upper case")):
        code, out, err = command_line(sample, monkeypatch, capsys, *NAMES, "--prompt", prompt)
        assert code == 0 and words in out and err == f"note: no character's name begins with {prompt!r}\n"
    assert command_line(sample, monkeypatch, capsys, *NAMES, "--prompt", "CJK UNIFIED IDEOGRAPH-4E")[2] == ""


def test_a_python_of_another_unicode_says_so_and_completes(tmp_path, monkeypatch, capsys):
    prompt = ["--prompt", "LATIN SMALL LETTER", "--device", "cpu", "--tau_m2t", 1]
    shutil.copytree(ROOT / "assets" / "names", tmp_path / "names")
    _, out, _ = command_line(sample, monkeypatch, capsys, "--ckpt", tmp_path / "names", *prompt, "--json")
    text = json.loads(out)["text"]
    character = unicodedata.lookup(f"LATIN SMALL LETTER{text}")
    judged = f"   {character} (U+{ord(character):04X})"

    (tmp_path / "names" / "names.json").write_text('{"unidata_version": "1.1.5"}')
    code, out, err = command_line(sample, monkeypatch, capsys, "--ckpt", tmp_path / "names", *prompt)
    assert code == 0 and out.startswith(f"LATIN SMALL LETTER{text}{judged}\n")
    assert err.count("\n") == 1 and "1.1.5" in err and unicodedata.unidata_version in err


def on_a_terminal(*argv: object, **env: str) -> str:
    """What sample.py writes to a terminal of 48 columns."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 48))
    run = [sys.executable, ROOT / "sample.py", *argv]
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(list(map(str, run)), stdout=end, stderr=subprocess.PIPE, env=known | env) as process:
        os.close(end)
        written = b""
        with contextlib.suppress(OSError):  # how the end of a terminal is told on Linux
            while part := os.read(terminal, 4096):
                written += part
        assert process.wait() == 0, process.stderr.read()
    os.close(terminal)
    return written.decode().replace("\r\n", "\n")


FRAME = "\r\x1b[K\x1b[?7l"  # back to the line's first column, clear it, no wrapping


def test_watch_fills_the_block_in_place_on_a_terminal_and_is_plain_text_in_a_pipe(monkeypatch, capsys):
    argv = [*NAMES, "--prompt", "KANGXI RADICAL"]
    record = json.loads(command_line(sample, monkeypatch, capsys, *argv, "--json")[1])
    after = ["".join(record["pieces"][str(i)] for i in ids).replace("·", " ") for ids in states(record, 8)]
    name = "KANGXI RADICAL" + record["text"]
    assert after[0] == "KANGXI RADICAL▒▒▒▒▒▒" and after[-1] == name + "∎" * after[-1].count("∎")
    assert len(after) > 3  # from the left, a prefix a step
    frames = [f"step {n:3}  {line}"[:48] for n in range(1, len(after)) for line in after[n - 1 : n + 1]]
    ending = command_line(sample, monkeypatch, capsys, *argv)[1]

    coloured = on_a_terminal(*argv, "--watch")
    assert "\x1b[7m▒\x1b[0m" in coloured and re.search(r"\x1b\[7m ?[A-Z]+\x1b\[0m", coloured)
    plain = on_a_terminal(*argv, "--watch", NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*m", plain)
    assert plain == "".join(FRAME + frame + "\x1b[?7h" for frame in frames) + "\n" + ending
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain

    piped = command_line(sample, monkeypatch, capsys, *argv, "--watch")[1]
    assert "\x1b" not in piped and "\r" not in piped and piped.endswith(ending)
    token, conf = (record["steps"][0]["fill"][0][key] for key in ("token", "conf"))
    first = f"    fill     2 '{record['pieces'][str(token)]}' {conf:.2f}\n"
    assert piped.startswith("step   1 block 0: KANGXI·RADICAL▒▒▒▒▒▒\n" + first)


def test_gallery_and_toys_refuse(monkeypatch, capsys):
    assert "--text" in refused(gallery, monkeypatch, capsys, "--text", "")
    assert "65,536" in refused(toys, monkeypatch, capsys, "copy", "V=64", "m=8")


def test_a_mistake_in_a_real_process_is_one_line(tmp_path):
    run = [sys.executable, str(ROOT / "sample.py"), "--ckpt", str(tmp_path), "--prompt", "a"]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", [train, sample, evaluate, convert_weights, toys, gallery, random_weights])
def test_help_is_a_manual(script, monkeypatch, capsys):
    code, out, _ = command_line(script, monkeypatch, capsys, "--help")
    assert code == 0 and script.__doc__.splitlines()[0] in out


def test_no_pickle_anywhere(ckpt):
    assert {p.suffix for p in ckpt.iterdir()} == {".json", ".safetensors"}
    for path in [p for folder in (".", "beyond", "released", "tools") for p in (ROOT / folder).glob("*.py")]:
        assert not re.search(r"import pickle|torch\.(save|load)\b|np\.(save|load)\b", path.read_text()), path.name
