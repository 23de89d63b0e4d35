"""Options of the test suite.

pytest --bench_data DIR      also go through the real benchmark files in DIR (tests/test_benchmarks.py says which)
"""


def pytest_addoption(parser):
    parser.addoption("--bench_data", metavar="DIR", help="folder with the published benchmark files, one folder a task")
