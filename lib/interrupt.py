"""Every script imports this first: so Ctrl-C gives one line even while the large libraries are being imported. After
that lib.util.command takes care of it."""

import os
import sys


def one_line(kind: type, value: BaseException, trace: object) -> None:
    """A sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(2)
    sys.__excepthook__(kind, value, trace)


sys.excepthook = one_line
