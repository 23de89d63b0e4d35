"""The released chat template around a text: what a converted checkpoint is asked.

python sample.py --ckpt weights/llada2.1-mini --dtype bf16 --gen_length 2048 \\
    --prompt "$(python -m llada.chat 'Write a quicksort.')"
"""

import sys

ROLES = ("<role>", "</role>", "<|role_end|>")  # special tokens: without them the template is no turns, only text


def chat(user: str, system: str | None = None) -> str:
    """A SYSTEM turn that is always there, one HUMAN turn, the opening of an answer."""
    head = system + "\n" if system is not None else ""
    turns = f"<role>SYSTEM</role>{head}detailed thinking off<|role_end|><role>HUMAN</role>{user}<|role_end|>"
    return turns + "<role>ASSISTANT</role>"


if __name__ == "__main__":
    print(chat(*sys.argv[1:]), end="")  # the user's text, and perhaps a system message
