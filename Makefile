# make test     run the test suite; make lint: check the code and its format with ruff
# make pages    draw the figures of results again, from the numbers beside them (needs matplotlib)
# Each of them first builds $(VENV) from requirements.txt, if it is not there.

PYTHON ?= python3
VENV   ?= .venv
export PATH := $(abspath $(VENV))/bin:$(PATH)
HALF = tests/tools tests/llada tests/test_configs.py tests/test_prepare.py tests/test_base.py
.PHONY: test lint pages

$(VENV)/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "CoCommit needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
test: $(VENV)/ready  # in two halves, each on one core
	python -m pytest -q $(HALF) & half=$$!; failed=0; \
	python -m pytest -q $(addprefix --ignore ,$(HALF)) || failed=1; wait $$half || failed=1; exit $$failed
lint: $(VENV)/ready
	ruff check . && ruff format --check .
pages: $(VENV)/ready
	python -m tools.plots
