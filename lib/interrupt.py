"""Every script imports this first, so that Ctrl-C prints one line even while the large libraries are imported. After
that lib.util.command takes care of Ctrl-C."""

import os
import sys


def one_line(kind: type, value: BaseException, trace: object) -> None:
    """A sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(2)
    sys.__excepthook__(kind, value, trace)


sys.excepthook = one_line
