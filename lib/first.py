"""A setting that must be made before torch is imported. So every script but tiny.py imports this first.

A thread that waits for another one sleeps. By default it keeps its core busy, and on a busy machine it takes the time
of the thread for which it waits: a small model was trained 17 times slower by two threads than by one.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
