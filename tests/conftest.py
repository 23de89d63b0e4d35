"""Options of the test suite, and the released checkpoint that many tests read.

pytest --bench_data DIR      also go through the real benchmark files in DIR (tests/llada/test_benchmarks.py)
"""

import os
from pathlib import Path

import pytest

# The models are so small that threads wait for each other longer than they work; before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--bench_data", metavar="DIR", help="folder with the published benchmark files, one folder a task")


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """The golden checkpoint in our layout, to be read alone."""
    from common import GOLDEN

    import convert_weights

    folder = tmp_path_factory.mktemp("golden") / "ours"
    convert_weights.convert(GOLDEN, folder)
    return folder
