"""How long a forward of a block takes in a browser: the playground's engine in headless Chromium, on this machine.

It reads every held-out beginning of the page as the decoder does at first, all other positions masked, and prints
milliseconds: a full forward (Stage A), a second look of the joint head or of Stage B at every mask, and a whole name by
each of the page's decoders.

    python -m tools.playground_speed --ckpt assets/names --adapter assets/names/joint
"""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from lib.util import Parser, fail
from tools.playground import page

FOUND = filter(None, map(shutil.which, ("google-chrome", "chromium", "chrome")))
BROWSER = next((path for path in FOUND if not path.startswith("/snap/")), None)  # a snap cannot read these folders
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --virtual-time-budget=5000 --dump-dom"

MEASURE = """
play(false);
const B = model.cfg.block_length;
const blocks = data.beginnings.filter((prompt) => prompt.length < B);
const padded = blocks.map((prompt) => Array.from({length: B}, (_, t) => prompt[t] ?? model.cfg.mask_id));
const masksOf = (z) => [...z.keys()].filter((t) => z[t] === model.cfg.mask_id);

// Milliseconds that `work` takes on average over the beginnings, the second time.
function time(inputs, work) {
  inputs.forEach(work);
  const start = performance.now();
  inputs.forEach(work);
  return (performance.now() - start) / inputs.length;
}

const measured = {"a full forward": time(padded, (z) => stageA(model, z, newContext()))};
const states = padded.map((z) => ({...stageA(model, z, newContext()), bundle: masksOf(z)}));
if (second?.stage === "joint")
  measured["a second look"] = time(states, (s) => head(model, jointHead(model, s.last, s.bundle)));
if (second?.stage === "B")
  measured["a second look"] = time(states, (s) => head(model, coordinate(model, s.h, s.bundle, newContext(), 1)));
for (const decoder of data.decoders)
  measured[`a name, ${decoder.name}`] = time(blocks, (prompt) => generateOne(model, prompt, decoding(decoder)));
const result = document.createElement("pre");
result.id = "result";
result.textContent = JSON.stringify(measured);
document.head.replaceChildren();
document.body.replaceChildren(result);
"""


def dump(browser: str, html: str, folder: Path, script: str) -> str:
    """The page's HTML after `script` has run at its end."""
    file = folder / "page.html"
    file.write_text(html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    argv = [browser, *QUIET.split(), f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    return subprocess.run(argv, capture_output=True, text=True, encoding="utf-8").stdout


def main() -> None:
    parser = Parser(__doc__)
    group = parser.add_argument_group("speed")
    group.add_argument("--ckpt", default="assets/names", help="a checkpoint of train.py --data names")
    group.add_argument("--adapter", help="an adapter of it")
    args = parser.parse_args()
    if BROWSER is None:
        fail("no Chromium here: install one (apt install chromium)")
    html = page(args.ckpt, args.adapter)
    with tempfile.TemporaryDirectory() as folder:
        found = re.search(r'<pre id="result">(.*?)</pre>', dump(BROWSER, html, Path(folder), MEASURE))
    if found is None:
        fail(f"{args.ckpt} has no held-out names to read (names.json): this takes a checkpoint of names")
    for what, milliseconds in json.loads(found[1]).items():
        print(f"{what:24} {milliseconds:7.2f} ms")


if __name__ == "__main__":
    main()
