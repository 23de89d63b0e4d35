"""Put the released chat template around a text, to ask a converted checkpoint.

python sample.py --ckpt weights/llada2.1-mini --dtype bf16 --gen_length 2048 \\
    --prompt "$(python -m released.chat 'Write a quicksort.')"
"""

from lib.util import Parser, command


def chat(user: str, system: str | None = None) -> str:
    """A SYSTEM turn, which is always there, one HUMAN turn, and the opening of an answer."""
    head = system + "\n" if system is not None else ""
    turns = f"<role>SYSTEM</role>{head}detailed thinking off<|role_end|><role>HUMAN</role>{user}<|role_end|>"
    return turns + "<role>ASSISTANT</role>"


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("text", help="what is asked, in quotes")
    args = parser.parse_args()
    print(chat(args.text), end="")


if __name__ == "__main__":
    main()
