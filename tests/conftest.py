"""Options of the test suite, and what many tests read: the released checkpoint, rows of a toy.

pytest --bench_data DIR      also go through the real benchmark files in DIR (tests/released/test_harness.py)
"""

import os
from pathlib import Path

import pytest

# The models are so small that several threads would wait longer than they work. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--bench_data", metavar="DIR", help="folder with the published benchmark files, one folder a task")


@pytest.fixture(autouse=True)
def unflushed(monkeypatch):
    """Files of tests need not outlive a power cut. (test_mistakes.py has a function of its own here.)"""
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """The golden checkpoint in our layout; tests only read it."""
    from common import GOLDEN

    import convert_weights

    folder = tmp_path_factory.mktemp("golden") / "ours"
    convert_weights.convert(GOLDEN, folder)
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """Rows of a toy."""
    from resuming import toy_rows

    return toy_rows(tmp_path_factory.mktemp("rows") / "pairs")


@pytest.fixture(scope="session")
def on_pairs(pairs) -> list:
    """Flags of a small run on these rows, for train.py and base.py."""
    return ["--data", pairs, "--batch_size", 4, "--device", "cpu"]


@pytest.fixture(scope="session")
def scratch(on_pairs) -> list:
    """The folder of such a run from scratch."""
    how = ["--init_from", "scratch", "--n_last", 2, "--learning_rate", 3e-3]
    return [*on_pairs, *how, "--corruption", "random"]
