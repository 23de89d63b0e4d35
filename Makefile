# make demo    train the split forward on the standard library's source, then sample with a trace (minutes, 2 cores)
# make test    run the test suite
# make lint    ruff: lint and format
# Each builds $(VENV) from requirements.txt first, if it is not there.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
OUT    ?= out/stdlib

.PHONY: demo test lint

$(VENV)/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "CoCommit needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# Greedily, a model this small writes mostly blanks, the likeliest byte of a far position: hence --temperature 1.
demo: $(VENV)/ready
	if test -f $(OUT)/train.json; then $(PY) train.py --init_from resume --out_dir $(OUT) --log_interval 50; \
	else $(PY) train.py --n_last 3 --out_dir $(OUT) --log_interval 50; fi
	$(PY) sample.py --ckpt $(OUT) --prompt "def " --gen_length 12 --temperature 1 --trace
	$(PY) sample.py --ckpt $(OUT) --prompt "def " --gen_length 396 --temperature 1 --tau_t2t none

test: $(VENV)/ready
	$(PY) -m pytest -q

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
