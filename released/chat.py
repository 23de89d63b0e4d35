"""Put a model's chat template around a question, to ask a converted checkpoint.

    python -m released.chat --ckpt weights/a2d 'How many legs have three cats?'
    python sample.py --ckpt weights/a2d --prompt_ids $(python -m released.chat --ckpt weights/a2d --ids 'How many ...?')

The shell's $(...) drops line ends at the end of a text, and two of the templates end in one: so give sample.py the ids.
"""

from pathlib import Path

from checkpoint import base_of, read_config
from lib.tokenizer import load_tokenizer
from lib.util import Parser, command, fail


def chat(user: str, system: str | None = None, decoder: str = "llada") -> str:
    """A system turn, a user's turn, and the opening of an answer. decoder: Config.decoder, which tells the families."""
    # LLaDA's system turn is always there
    if decoder == "llada":
        head = system + "\n" if system is not None else ""
        turns = f"<role>SYSTEM</role>{head}detailed thinking off<|role_end|><role>HUMAN</role>{user}<|role_end|>"
        return turns + "<role>ASSISTANT</role>"

    # Tiny-A2D answers without thinking, and says so
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system is not None else ""
    thinking = "<think>\n\n</think>\n\n" if decoder == "a2d" else ""
    return f"{head}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{thinking}"


@command
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ckpt", type=Path, required=True, help="a model's folder, or an adapter's")
    parser.add_argument("--ids", action="store_true", help="print token ids, for sample.py --prompt_ids")
    parser.add_argument("text", help="what is asked, in quotes")
    args = parser.parse_args()
    tokenizer = load_tokenizer(base_of(args.ckpt))
    if tokenizer is None or not tokenizer.turns:
        fail(f"{args.ckpt} has no tokens for the turns of a chat: give sample.py the text itself")
    prompt = chat(args.text, decoder=read_config(args.ckpt).decoder)
    print(",".join(map(str, tokenizer.encode(prompt))) if args.ids else prompt, end="")


if __name__ == "__main__":
    main()
