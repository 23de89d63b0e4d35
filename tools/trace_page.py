"""The trace of a decode, to read: one HTML page that needs nothing but itself.

The page steps through the denoising steps of a run: what was filled, edited and left, with which confidence, the
bundle, both choices where Stage A and Stage B disagree, and the forwards counted so far. Two runs of the same prompt
stand side by side, step together, and say where they first differ. `page.html#step=3` opens it at step 3.

It refuses files that `sample.py --json` did not write, more than one prompt a file, more than two files, and two runs
of different prompts.

    python sample.py --prompt "GREEK " --json > ours.json
    python sample.py --prompt "GREEK " --json --n_rounds 0 > base.json
    python -m tools.trace_page ours.json --out trace.html                 # one run
    python -m tools.trace_page ours.json base.json --out trace.html       # two, to compare
"""

import json
from pathlib import Path

from data import Parser, fail, replace_file

# A record is one line of `sample.py --json`. Steps are counted from 1; "after step 0" is the prompt and masks.

KEYS = {"tokens", "nfe", "nfe_per_token", "steps", "prompt", "mask_id", "n_rounds", "pieces"}
STEP = {"start", "before", "after", "bundle", "fill", "edit", "conf"}


# ---------------------------------------------------------------------------------------------------------------------
# what the page needs to know beyond the records


def booked(record: dict) -> list[list[int]]:
    """[full, partial, commit] forwards after each step, in the way the decoder books them."""
    steps, K = record["steps"], record["n_rounds"]
    counts = [[0, 0, 0]]
    for s, following in zip(steps, [*steps[1:], None], strict=True):
        full, partial, commit = counts[-1]
        full, partial = full + 1, partial + K * bool(s["bundle"])
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
    replace_file(Path(args.out), lambda p: p.write_text(page(runs), encoding="utf-8"))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
