"""sample.py with the released chat template around each prompt.

python -m released.chat --ckpt weights/llada2.1-mini --adapter out/cocommit --prompt "Write a quicksort." --mode q
"""

from pathlib import Path

import sample
from checkpoint import load_tokenizer, read_config
from lib.show import build_parser
from lib.util import fail


def chat(user: str, system: str | None = None) -> str:
    """The released template: a SYSTEM turn that is always there, one HUMAN turn, the opening of an answer."""
    head = system + "\n" if system is not None else ""
    turns = f"<role>SYSTEM</role>{head}detailed thinking off<|role_end|><role>HUMAN</role>{user}<|role_end|>"
    return turns + "<role>ASSISTANT</role>"


def main() -> None:
    parser = build_parser(__doc__, sample.MODES)
    parser.add_argument("--system", help="system message")
    args = parser.parse_args()
    tokenizer = load_tokenizer(Path(args.ckpt), read_config(Path(args.ckpt)).tokenizer)
    if tokenizer is None or "<role>" not in tokenizer.special:
        fail(f"{args.ckpt}: the chat template needs a tokenizer with <role> and <|role_end|>: use sample.py")
    args.prompt = [chat(text, args.system) for text in args.prompt]
    sample.main(args)


if __name__ == "__main__":
    main()
