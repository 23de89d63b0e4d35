"""Settings that must be made before the large libraries are imported. So every script but tiny.py imports this first.

Ctrl-C prints one line even while they are being imported. After that lib.util.command takes care of it. And a thread
that waits for another one sleeps. By default it keeps its core busy, and on a busy machine it takes the time of the
thread for which it waits: a small model was trained 17 times slower by two threads than by one. Threads that sleep were
as fast as one, and on an idle machine 1.6 times faster.
"""

import os
import sys


def one_line(kind: type, value: BaseException, trace: object) -> None:
    """A sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, value, trace)


sys.excepthook = one_line
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
