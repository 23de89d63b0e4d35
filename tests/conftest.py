"""Options of the test suite.

pytest --bench_data DIR      also go through the real benchmark files in DIR (tests/released/test_benchmarks.py)
"""

import os

# The models are so small that threads wait for each other longer than they work; before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--bench_data", metavar="DIR", help="folder with the published benchmark files, one folder a task")
