"""A trace of a decode, to read: one HTML page that needs nothing but itself, or a picture that moves.

The page steps through the denoising steps of a run: what was filled, edited and left, with which confidence, the
bundle, both choices where Stage A and Stage B disagree, and the forwards counted so far. Two runs of the same prompt
stand side by side, step together, and say where they first differ. `page.html#step=3` opens it at step 3.

The picture, if --out ends in .svg, is an image for a README: the runs fill below each other, at one pace for every
forward, and start again. What a step writes is framed, what Stage A alone would have written stands struck out under
it, and in the end a model of names' completion is the name of a character or of none. It holds no script; who asks for
reduced motion, or has a viewer without animation, sees the last state.

It refuses files that `sample.py --json` did not write, more than one prompt a file, more than two files, and two runs
of different prompts.

    python sample.py --ckpt assets/names --prompt "LATIN SMALL LETTER" --tau_m2t 1  --json > one_at_a_time.json
    python sample.py --ckpt assets/names --prompt "LATIN SMALL LETTER" --tau_m2t -1 --json > factorised.json
    python -m tools.trace_page factorised.json --out trace.html                       # one run
    python -m tools.trace_page one_at_a_time.json factorised.json --out trace.html    # two, to compare
    python -m tools.trace_page one_at_a_time.json factorised.json --out watch.svg     # as a moving picture
"""

import json
import re
from pathlib import Path
from xml.sax.saxutils import escape

from lib.util import Parser, fail, replace_file

# A record is one line of `sample.py --json`. Steps are counted from 1; "after step 0" is the prompt and masks.

KEYS = {"text", "verdict", "tokens", "nfe", "nfe_per_token", "partial_cost", "steps", "prompt", "mask_id", "n_rounds"}
KEYS |= {"pieces"}
STEP = {"start", "before", "after", "bundle", "fill", "edit", "conf"}


# ---------------------------------------------------------------------------------------------------------------------
# what the page needs to know beyond the records


def booked(record: dict) -> list[list[int]]:
    """[full, partial, commit] forwards after each step, in the way the decoder books them.

    Stage B runs K times where there is a bundle. A joint head looks at a share of the block, what it wrote and what it
    refused, where these are two positions or more.
    """
    steps = record["steps"]
    K = record["n_rounds"]
    by_joint_head = any("refused" in s for s in steps)
    counts = [[0, 0, 0]]
    for s, following in zip(steps, [*steps[1:], None], strict=True):
        full, partial, commit = counts[-1]
        full += 1
        if not by_joint_head:
            partial += K * bool(s["bundle"])
        else:
            looked_at = len(s["bundle"]) + len(s.get("refused", []))
            partial += looked_at / len(s["after"]) if looked_at > 1 else 0
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


def fill_template(data: dict, **parts: str) -> str:
    """The viewer with this data and these parts of its page: style, above and below (the runs), script."""
    template = (Path(__file__).parent / "trace_page.html").read_text(encoding="utf-8")
    # inside <script>, "<" could end the element; as an escape it is the same JSON
    parts["data"] = json.dumps(data).replace("<", "\\u003c")
    return re.sub(r"@([A-Z]+)@", lambda found: parts.get(found[1].lower(), ""), template)


SCRIPT = """
document.title = $("title").textContent = "Trace of " + data.traces.map((t) => t.label).join(" and ");
for (const legend of document.querySelectorAll(".by_hand")) legend.hidden = true;
show(data.traces, linked());
"""


def page(runs: list[tuple[str, dict]]) -> str:
    """The HTML of one run, or of two of the same prompt; each run is (label, record)."""
    traces = [dict(record, label=label, counts=booked(record)) for label, record in runs]
    return fill_template({"traces": traces}, script=SCRIPT)


# ---------------------------------------------------------------------------------------------------------------------
# the picture: lengths in pixels, times in seconds

WIDTH, MARGIN, LINE, GAP = 800, 20, 48, 3  # LINE: of tokens and of the small ones under them; GAP: between tokens
LETTER, SMALL = 9.6, 7.2  # a letter's width at 16 and at 12 pixels; textLength makes it so in whatever font there is
OPENING, FORWARD, ENDING = 1.0, 0.6, 4.0  # nothing but masks, each forward, the verdict

STYLE = """
  .page { fill: #ffffff; stroke: #d0d5dc; } .mask { fill: #e9ecf0; stroke: #59636e; stroke-dasharray: 4 3; }
  .fill { fill: #dcebfa; stroke: #0a5ca8; stroke-width: 2; } .edit { fill: #fde9d9; stroke: #a84300; stroke-width: 2; }
  text { fill: #1b1f24; font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .name { font-size: 16px; font-weight: 600; } .soft, .prompt, .wish { fill: #59636e; } .end { text-anchor: end; }
  .token, .prompt, .wish { font: 16px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
  .wish { font-size: 12px; text-decoration: line-through; } .yes, .no { font-size: 16px; font-weight: 600; }
  .yes { fill: #0a5ca8; } .no { fill: #a84300; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14171b; stroke: #3a424d; } .mask { fill: #2d343d; stroke: #9ba5b1; }
    .fill { fill: #15334f; stroke: #79bcff; } .edit { fill: #4a2a12; stroke: #ffab6e; } text { fill: #e6e9ee; }
    .soft, .prompt, .wish { fill: #9ba5b1; } .yes { fill: #79bcff; } .no { fill: #ffab6e; }
  }
  .frame { visibility: hidden; animation-timing-function: step-end; animation-iteration-count: infinite; }
  .last { visibility: visible; }
  @media (prefers-reduced-motion: reduce) { .frame { animation: none !important; } }
"""


def forwards(record: dict) -> list[float]:
    """All forwards in full ones after step 0, 1, ..."""
    cost = record["partial_cost"]
    return [full + cost * partial + commit for full, partial, commit in booked(record)]


def text_of(record: dict, token: int) -> str:
    """A token as it stands in the text: blanks are blanks, and a toy's numbers have one between them."""
    return " " * (record["text"] is None) + record["pieces"][str(token)].replace("·", " ")


def places(record: dict, seen: list[list[int]]) -> list[tuple[float, int, float, float]]:
    """Where each position stands, whatever it holds in the states `seen`: (x, line, width, the blank in its front), as
    wide as its widest token or the widest that is struck out under it."""
    wishes = {f["at"]: f["token_a"] for s in record["steps"] for f in s["fill"] if f["token_a"] != f["token"]}
    found, x, line = [], MARGIN, 0
    for at, tokens in enumerate(zip(*seen, strict=True)):
        texts = [text_of(record, i) for i in {*tokens} - {record["mask_id"]}] or ["▒"]
        blank = LETTER * any(t.startswith(" ") for t in texts)
        wish = SMALL * len(text_of(record, wishes[at]).strip()) if at in wishes else 0
        width = blank + max(wish, *(LETTER * len(t.strip()) for t in texts))
        if x + width > WIDTH - MARGIN and x > MARGIN:
            x, line = MARGIN, line + 1
        found.append((x, line, width, blank))
        x += width + GAP
    return found


def letters(x: float, y: float, kind: str, text: str, size: float) -> str:
    """One word, at a fixed width in whatever font there is."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" textLength="{size * len(text):.1f}">{escape(text)}</text>'


def frame(record: dict, n: int, ids: list[int], where: list[tuple[float, int, float, float]], top: int) -> list[str]:
    """The elements of the text `ids` after step n, as far as blocks are open by then; its first line is at `top`."""
    step, out = record["steps"][max(0, n - 1)], []
    written = {f["at"]: (kind, f) for kind in ("fill", "edit") for f in step[kind]} if n else {}
    for at, token in enumerate(ids[: step["start"] + len(step["after"])]):
        (x, line, width, blank), masked = where[at], token == record["mask_id"]
        kind, f = written.get(at, ("mask" if masked else "", {}))
        y = top + LINE * line
        if kind:
            box = f'x="{x + blank - 1:.1f}" y="{y}" width="{width - blank + 2:.1f}" height="26" rx="4"'
            out.append(f'<rect class="{kind}" {box}/>')
        if not masked:
            shown = "prompt" if at < len(record["prompt"]) else "token"
            out.append(letters(x + blank, y + 19, shown, text_of(record, token).strip(" "), LETTER))
        if f.get("token_a", token) != token:
            out.append(letters(x + blank, y + 40, "wish", text_of(record, f["token_a"]).strip(" "), SMALL))
    return out


def panel(run: int, label: str, record: dict, top: int, total: float) -> tuple[list[str], int]:
    """One run below `top`, a frame for each state, each with its time in a loop of `total` seconds -> elements, and
    where the run ends."""
    last, times = record["steps"][-1], [OPENING + FORWARD * n for n in forwards(record)]
    seen = states(record, last["start"] + len(last["after"]))
    where = places(record, seen)
    bottom = top + 36 + LINE * (where[-1][1] + 1)
    out = [f'<text class="name" x="{MARGIN}" y="{top + 22}">{escape(label)}</text>']
    for n, (ids, cost) in enumerate(zip(seen, forwards(record), strict=True)):
        name, ends = f"run{run}step{n}", n + 1 == len(seen)
        shows = [(0, "visible")] if n == 0 else [(0, "hidden"), (times[n], "visible")]
        shows += [] if ends else [(times[n + 1], "hidden")]
        keys = " ".join(f"{100 * at / total:.3f}% {{ visibility: {how} }}" for at, how in shows)
        out.append(f"<style>@keyframes {name} {{ {keys} }} #{name} {{ animation-name: {name} }}</style>")
        out.append(f'<g id="{name}" class="{"frame last" if ends else "frame"}">')
        count = f"{cost:.4g} forward{'' if cost == 1 else 's'}"
        out.append(f'<text class="soft end" x="{WIDTH - MARGIN}" y="{top + 22}">{count}</text>')
        out += frame(record, n, ids, where, top + 36)
        if ends and (said := record["verdict"]):
            kind, said = ("yes", said) if "U+" in said else ("no", said.strip("()"))
            out.append(f'<text class="{kind}" x="{MARGIN}" y="{bottom + 8}">{escape(said)}</text>')
        out.append("</g>")
    return out, bottom + 24 * bool(record["verdict"])


def picture(runs: list[tuple[str, dict]]) -> str:
    """The SVG of one run, or of two of the same prompt below each other; each run is (label, record)."""
    runs = [(label.replace("_", " "), record) for label, record in runs]
    total = OPENING + FORWARD * max(forwards(record)[-1] for _, record in runs) + ENDING
    out, top = [], 10
    for k, (label, record) in enumerate(runs):
        elements, top = panel(k, label, record, top, total)
        out += elements
    overruled = any(f["token_a"] != f["token"] for _, record in runs for s in record["steps"] for f in s["fill"])
    legend = "framed: written in this step" + "; struck out: what Stage A alone would have written" * overruled
    title = "; ".join(f"{label}: {forwards(r)[-1]:.4g} forwards, {r['verdict'] or 'done'}" for label, r in runs)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 34}" width="{WIDTH}" height="{top + 34}" '
        'role="img">', f"<title>{escape(title)}</title>",
        f"<style>{STYLE}  .frame {{ animation-duration: {total:.2f}s; }}\n</style>",
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{top + 33}" rx="8"/>', *out,
        f'<text class="soft" x="{MARGIN}" y="{top + 18}">{legend}</text>', "</svg>\n",
    ])  # fmt: skip


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
    group.add_argument("--out", default="trace.html", help="the page to write; .svg: a moving picture")
    args = parser.parse_args()
    if len(args.runs) > 2:
        fail(f"{len(args.runs)} runs given: a page shows one, or two side by side")
    runs = [(Path(name).stem, read_record(Path(name))) for name in args.runs]
    if len({json.dumps([record["prompt"], record["mask_id"]]) for _, record in runs}) > 1:
        fail(f"{' and '.join(args.runs)} continue different prompts: side by side takes two runs of the same one")
    draw = picture if Path(args.out).suffix == ".svg" else page
    replace_file(Path(args.out), lambda p: p.write_text(draw(runs), encoding="utf-8"))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
