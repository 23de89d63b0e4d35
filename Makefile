# make demo     train on the names of Unicode characters, then complete one (minutes, 2 cores)
# make test     run the test suite; make lint: ruff, lint and format
# make picture  joint against factorised on a toy whose answer is known (minutes)
# Each builds $(VENV) from requirements.txt first, if it is not there. None of them deletes or overwrites anything.

PYTHON ?= python3
VENV   ?= .venv
export PATH := $(abspath $(VENV))/bin:$(PATH)
.PHONY: demo test lint picture

$(VENV)/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "CoCommit needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
demo: $(VENV)/ready
	python train.py --n_last 3
	python sample.py --prompt "ARABIC LIGATURE" --tau_t2t none --watch
test: $(VENV)/ready  # in two halves, a core each
	python -m pytest -q tests/tools tests/released & half=$$!; failed=0; \
	python -m pytest -q --ignore tests/tools --ignore tests/released || failed=1; wait $$half || failed=1; exit $$failed
lint: $(VENV)/ready
	ruff check . && ruff format --check .
picture: $(VENV)/ready
	bash experiments/picture.sh
