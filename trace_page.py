"""The trace of a decode, to read: as lines of text, or as one HTML page that needs nothing but itself.

The page steps through the denoising steps of a run: what was filled, edited and left, with which confidence, the
bundle, both choices where Stage A and Stage B disagree, and the forwards counted so far. Two runs of the same prompt
stand side by side, step together, and say where they first differ. `page.html#step=3` opens it at step 3.

It refuses files that `sample.py --json` did not write, more than one prompt a file, more than two files, and two runs
of different prompts.

    python sample.py --prompt "def " --trace_html trace.html                        # the page of this run
    python sample.py --prompt "def " --json > ours.json                             # or keep the runs, and compare two
    python sample.py --prompt "def " --json --n_rounds 0 > base.json
    python trace_page.py ours.json base.json --out trace.html
"""

import json
import unicodedata
from pathlib import Path

from torch import Tensor

from data import Parser, Tokenizer, fail, replace_file

# A record is one line of `sample.py --json`. Steps are counted from 1; "after step 0" is the prompt and masks.

GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
KEYS = {"tokens", "nfe", "nfe_per_token", "steps", "prompt", "mask_id", "n_rounds", "pieces"}
STEP = {"start", "before", "after", "bundle", "marked", "fill", "edit", "conf"}


# ---------------------------------------------------------------------------------------------------------------------
# a step as a record


def step_record(s: dict[str, Tensor], r: int, start: int) -> dict:
    """One step of one row in plain numbers; positions are absolute."""
    v = {k: t[r].tolist() for k, t in s.items()}
    bundle = [i for i, b in enumerate(v["bundle"]) if b]
    edited = [i for i, e in enumerate(v["edited"]) if e]
    return {
        "start": start,
        "before": v["before"],
        "after": v["after"],
        "bundle": [start + i for i in bundle],
        "marked": any(v["marks"]),
        "fill": [dict(at=start + i, token=v["after"][i], conf=round(v["conf"][i], 4), token_a=v["token_a"][i],
                      conf_a=round(v["conf_a"][i], 4)) for i in bundle],
        "edit": [dict(at=start + i, old=v["before"][i], token=v["after"][i], conf=round(v["conf"][i], 4))
                 for i in edited],
        "conf": [round(c, 4) for c in v["conf"]],
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# tokens as they are shown


def pieces(prompt: list[int], steps: list[dict], tokenizer: Tokenizer | None, mask_id: int) -> dict[str, str]:
    """Each id that a trace shows, as a JSON key -> its text. Toys have no tokenizer, their tokens are numbers."""
    ids = {*prompt, *(i for s in steps for i in (*s["before"], *s["after"], *(f["token_a"] for f in s["fill"])))}
    shown = {str(i): str(i) if tokenizer is None else piece(i, tokenizer) for i in sorted(ids)}
    return shown | {str(mask_id): "▒"}


def piece(token: int, tokenizer: Tokenizer) -> str:
    """A token's text with every character visible, bytes that are no UTF-8 as <E2>, special tokens by name."""
    raw = tokenizer.token_bytes.get(token, b"")
    if not raw:
        return {i: name for name, i in tokenizer.special.items()}.get(token, f"<{token}>")
    text = raw.decode("utf-8", errors="surrogateescape")
    carrier = "◌" if unicodedata.combining(text[0]) else ""  # for an accent whose letter is in another token
    return carrier + "".join(map(visible, text))


def visible(char: str) -> str:
    if 0xDC80 <= ord(char) <= 0xDCFF:  # surrogateescape's stand-in for one byte
        return f"<{ord(char) - 0xDC00:02X}>"
    if char in GLYPHS or char.isprintable():
        return GLYPHS.get(char, char)
    return f"<U+{ord(char):04X}>"


def show_trace(record: dict) -> None:
    """One line a step for the block, and one for each token written: Stage A's choice where Stage B's differs."""

    def name(token: int) -> str:
        return record["pieces"][str(token)]

    gap = " " if record["text"] is None else ""  # a toy's tokens are numbers
    for n, s in enumerate(record["steps"], 1):
        print(f"step {n:3} block {s['start']}: {gap.join(map(name, s['before']))}")
        for f in s["fill"]:
            other = f"   (A: {name(f['token_a'])} {f['conf_a']:.2f})" if f["token_a"] != f["token"] else ""
            print(f"    fill {f['at']:5} {name(f['token'])!r} {f['conf']:.2f}{other}")
        for e in s["edit"]:
            print(f"    edit {e['at']:5} {name(e['old'])!r} -> {name(e['token'])!r} {e['conf']:.2f}")
        print(f"    left {s['after'].count(record['mask_id'])} masked")


# ---------------------------------------------------------------------------------------------------------------------
# what the page needs to know beyond the records


def booked(record: dict) -> list[list[int]]:
    """[full, partial, commit] forwards after each step, in the way sample.py books them."""
    steps, K = record["steps"], record["n_rounds"]
    counts = [[0, 0, 0]]
    for s, following in zip(steps, [*steps[1:], None], strict=True):
        full, partial, commit = counts[-1]
        full, partial = full + 1, partial + K * s["marked"]
        if following and following["start"] != s["start"]:  # the next block will read this one
            partial, commit = partial + max(0, K - 1), commit + (s["before"] != s["after"])
        counts.append([full, partial, commit])
    return counts


def states(record: dict, length: int) -> list[list[int]]:
    """The sequence after step 0, 1, ...: prompt, what has been written, and masks up to `length` positions."""
    z = record["prompt"] + [record["mask_id"]] * (length - len(record["prompt"]))
    found = [z]
    for s in record["steps"]:
        z = z[: s["start"]] + s["after"] + z[s["start"] + len(s["after"]) :]
        found.append(z)
    return found


def divergence(a: dict, b: dict) -> tuple[int | None, str]:
    """The first step after which two runs differ (None: never), and the positions that differ in the end, "4, 6–9".

    Steps are matched by number; the run that ends first waits in its last state.
    """
    length = max(s["start"] + len(s["after"]) for r in (a, b) for s in r["steps"])
    of_a, of_b = states(a, length), states(b, length)
    n = max(len(of_a), len(of_b))
    of_a, of_b = of_a + of_a[-1:] * (n - len(of_a)), of_b + of_b[-1:] * (n - len(of_b))
    first = next((k for k in range(n) if of_a[k] != of_b[k]), None)
    differ = [x != y for x, y in zip(of_a[-1], of_b[-1], strict=True)] + [False]
    starts = [i for i, d in enumerate(differ) if d and not (i and differ[i - 1])]
    spans = [(i, differ.index(False, i) - 1) for i in starts]
    return first, ", ".join(f"{i}–{j}" if j > i else str(i) for i, j in spans)


def page(runs: list[tuple[str, dict]]) -> str:
    """The HTML of one run, or of two of the same prompt; each run is (label, record)."""
    data = {"traces": [dict(record, label=label, counts=booked(record)) for label, record in runs]}
    if len(runs) == 2:
        data["diverged"], data["differ"] = divergence(runs[0][1], runs[1][1])
    # inside <script>, "<" could end the element; as an escape it is the same JSON
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return template.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))


def write_page(path: Path, runs: list[tuple[str, dict]]) -> None:
    replace_file(path, lambda p: p.write_text(page(runs), encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def read_record(path: Path) -> dict:
    """The one record in a file that `sample.py --json` wrote."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as e:
        fail(f"cannot read {path}: {e.strerror}")
    except ValueError as e:
        fail(f"{path} is not what sample.py --json prints: {e}")
    if len(records) != 1:
        fail(f"{path} holds {len(records)} runs, a page shows one of each file: give sample.py one --prompt")
    steps = records[0].get("steps") if isinstance(records[0], dict) else None
    if not steps or not records[0].keys() >= KEYS or not all(isinstance(s, dict) and s.keys() >= STEP for s in steps):
        fail(f"{path} holds no trace: write it with sample.py --json")
    return records[0]


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("trace")
    group.add_argument("runs", nargs="+", metavar="RUN.json", help="one or two files that sample.py --json wrote")
    group.add_argument("--out", default="trace.html", help="the page to write")
    args = parser.parse_args()
    if len(args.runs) > 2:
        fail(f"{len(args.runs)} runs given: a page shows one, or two side by side")
    runs = [(Path(name).stem, read_record(Path(name))) for name in args.runs]
    if len({json.dumps([record["prompt"], record["mask_id"]]) for _, record in runs}) > 1:
        fail(f"{' and '.join(args.runs)} continue different prompts: side by side takes two runs of the same one")
    write_page(Path(args.out), runs)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
