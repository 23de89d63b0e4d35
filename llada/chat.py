"""Put the released chat template around a text, to ask a converted checkpoint.

python sample.py --ckpt weights/llada2.1-mini --dtype bf16 --gen_length 2048 \\
    --prompt "$(python -m llada.chat 'Write a quicksort.')"
"""

import sys

from lib.util import command, fail

ROLES = ("<role>", "</role>", "<|role_end|>")  # the template works only if the tokenizer has these special tokens


def chat(user: str, system: str | None = None) -> str:
    """A SYSTEM turn, which is always there, one HUMAN turn, and the opening of an answer."""
    head = system + "\n" if system is not None else ""
    turns = f"<role>SYSTEM</role>{head}detailed thinking off<|role_end|><role>HUMAN</role>{user}<|role_end|>"
    return turns + "<role>ASSISTANT</role>"


@command
def main() -> None:
    texts = sys.argv[1:]
    if len(texts) not in (1, 2):
        fail("give one text, in quotes, and perhaps a system message after it: python -m llada.chat 'Why?'")
    print(chat(*texts), end="")


if __name__ == "__main__":
    main()
