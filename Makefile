# make test     run the test suite; make lint: check the code and its format with ruff
# make test-benchmarks    lm-eval's tasks end to end, in an environment of their own, which takes minutes to install
# make pages    draw the figures of results again, from the numbers beside them (needs matplotlib)
# Each of them first builds $(VENV) from requirements.txt, if it is not there.

PYTHON ?= python3
VENV   ?= .venv
export PATH := $(abspath $(VENV))/bin:$(PATH)
HALF = tests/tools tests/released tests/test_configs.py tests/test_prepare.py tests/test_base.py
.PHONY: test test-benchmarks lint pages

$(VENV)/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "CoCommit needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
test: $(VENV)/ready  # in two halves, each on one core
	python -m pytest -q $(HALF) & half=$$!; failed=0; \
	python -m pytest -q $(addprefix --ignore ,$(HALF)) || failed=1; wait $$half || failed=1; exit $$failed
test-benchmarks:  # BENCH=DIR: also two items of each published file in DIR
	$(PYTHON) -m venv $(VENV)/benchmarks
	$(VENV)/benchmarks/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -e ".[benchmarks]"
	$(VENV)/benchmarks/bin/python -m pytest -q tests/released/test_harness.py $(if $(BENCH),--bench_data $(BENCH))
lint: $(VENV)/ready
	ruff check . && ruff format --check .
pages: $(VENV)/ready
	python -m tools.tables
