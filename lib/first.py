"""A setting that must be made before torch is imported. So every script but tiny.py imports this first.

A thread that waits sleeps. By default it keeps its core busy, which on a busy machine is slower, up to 17 times.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
