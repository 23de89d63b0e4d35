# make picture  joint against factorised on a toy: a base, an adapter, the table, and one page with both decodes (minutes)
# make demo     train the split forward on the standard library's source, then sample with a trace (minutes, 2 cores)
# make test     run the test suite
# make lint     ruff: lint and format
# make joint    the README's tables of joint commitment on the toys: trains 82 small models (an hour or two, 2 cores)
# make text     the README's curves on text: a base, four adapters, quality against forwards, TC of bundles (2 hours)
# make figures  the README's figure of error against TC: trains seven noisy copies (ten minutes)
# Each builds $(VENV) from requirements.txt first, if it is not there.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
OUT    ?= out/stdlib

.PHONY: picture demo test lint joint text figures

$(VENV)/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "CoCommit needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

PICTURE = --prompt_ids 25,25,25,25 --gen_length 4 --select all --tau_t2t none
TEACH   = $(PY) train.py --data modes --init_from out/picture --n_last 2 --lora_scope marked --corruption mask --context clean \
          --learning_rate 3e-3 --batch_size 16 --max_iters 300 --eval_rows 8 --log_interval 100
picture: $(VENV)/ready
	rm -rf out/picture out/picture_clean out/picture_chain
	$(PY) train.py --data modes --n_ctx 8 --factorised --corruption mask --max_iters 1200 --log_interval 400 --out_dir out/picture
	$(TEACH) --out_dir out/picture_clean
	$(TEACH) --target chain --chain_beam 4 --out_dir out/picture_chain
	$(PY) joint.py --adapter out/picture_clean out/picture_chain
	$(PY) toy.py --task modes --n_ctx 8 --context 1
	$(PY) sample.py --ckpt out/picture --adapter out/picture_chain $(PICTURE) --trace
	$(PY) sample.py --ckpt out/picture $(PICTURE) --json > out/factorised.json
	$(PY) sample.py --ckpt out/picture --adapter out/picture_chain $(PICTURE) --json > out/joint.json
	$(PY) trace_page.py out/factorised.json out/joint.json --out out/picture.html

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

# The README's toy tables. A stem is TASK-SEED. Stopped, make begins again with the adapter it was at.
TASK   = $(word 1,$(subst -, ,$*))
SEED   = $(word 2,$(subst -, ,$*))
QUIET  = --log_interval 1000 --eval_interval 5000 --save_interval 5000
TRAIN  = $(PY) train.py --data $(TASK) --seed $(SEED) --corruption mask --learning_rate 3e-3 $(QUIET)
ADAPT  = $(TRAIN) --init_from out/base-$* --context clean --n_last 2 --batch_size 16 --max_iters 600 --eval_rows 8 \
         --lora_scope marked
CHAIN  = $(ADAPT) --target chain --chain_beam $(if $(filter gaussian,$(TASK)),8,4)
TOYS   = modes copy pairs mixed gaussian permutation
SEEDS  = 0 1 2
KINDS  = $(foreach t,$(TOYS),$(foreach s,$(SEEDS),$t-$s-clean $t-$s-chain) $t-0-clean_all $t-0-chain_all) $(SEEDS:%=pairs-%-chain3) \
         modes-0-noise copy-0-noise $(foreach t,modes pairs,$t-0-visible) \
         $(foreach n,1 2 3,sum-0-n$n_K1 sum-0-n$n_K2)

.DELETE_ON_ERROR:
joint: $(KINDS:%=out/joint/%/adapter.json)
	$(PY) joint.py --adapter $(KINDS:%=out/joint/%)

.SECONDARY:
out/base-sum-0/config.json: CONTEXTS =
CONTEXTS = --n_ctx 8
BASE   = $(TRAIN) $(CONTEXTS) --factorised --batch_size 64
out/base-%/config.json: $(VENV)/ready
	rm -rf $(@D) && $(BASE) --max_iters $(if $(filter modes,$(TASK)),4000,2000) --out_dir $(@D)
out/edit-%/config.json: $(VENV)/ready
	rm -rf $(@D) && $(BASE) --corruption random --max_iters 3000 --out_dir $(@D)
out/joint/%-clean/adapter.json: out/base-%/config.json
	rm -rf $(@D) && $(ADAPT) --out_dir $(@D)
out/joint/%-chain/adapter.json: out/base-%/config.json
	rm -rf $(@D) && $(CHAIN) --out_dir $(@D)
out/joint/%-chain3/adapter.json: out/base-%/config.json
	rm -rf $(@D) && $(CHAIN) --n_last 3 --out_dir $(@D)
out/joint/%-clean_all/adapter.json: out/base-%/config.json
	rm -rf $(@D) && $(ADAPT) --lora_scope all --learning_rate 1e-3 --out_dir $(@D)
out/joint/%-chain_all/adapter.json: out/base-%/config.json
	rm -rf $(@D) && $(CHAIN) --lora_scope all --learning_rate 1e-3 --out_dir $(@D)
out/joint/%-noise/adapter.json: out/base-%/config.json
	rm -rf $(@D) && $(ADAPT) --target chain --chain_noise --n_last 3 --s_min 4 --learning_rate 5e-3 --batch_size 32 --max_iters 5000 --out_dir $(@D)
out/joint/%-visible/adapter.json: out/edit-%/config.json
	rm -rf $(@D) && $(CHAIN) --init_from out/edit-$* --corruption draft --mark_visible --s_max 4 --n_last 3 --max_iters 1000 --out_dir $(@D)
define sum_rule
out/joint/%-n$(1)_K$(2)/adapter.json: out/base-%/config.json
	rm -rf $$(@D) && $$(CHAIN) --n_last $(1) --n_rounds $(2) $(if $(filter 2,$(2)),--sample_rounds) --max_iters 800 --out_dir $$(@D)
endef
$(foreach n,1 2 3,$(foreach k,1 2,$(eval $(call sum_rule,$(n),$(k)))))

# The README's curves on text. The learning rates are those with the lower validation loss, of the two tried for each.
WORDS  = $(PY) train.py --data stdlib --corruption mask --log_interval 100
FILLER = $(WORDS) --init_from out/text --context clean --confident_share 0.5 --n_last 2 --batch_size 2 \
         --max_iters 1000 --eval_rows 16 --eval_interval 2000
FILLERS = out/text_clean out/text_chain out/text_clean_all out/text_chain_all

text: $(FILLERS:%=%/adapter.json)
	$(PY) evaluate.py --data stdlib --ckpt out/text --adapter $(FILLERS) --curve --plot assets/curve.svg
	$(PY) evaluate.py --data stdlib --ckpt out/text --tc --draws 2 --plot assets/tc.svg
out/text/config.json: $(VENV)/ready
	rm -rf $(@D) && $(WORDS) --factorised --block_length 16 --max_iters 2400 $(SIZE) --out_dir $(@D)
out/text_clean/adapter.json: out/text/config.json
	rm -rf $(@D) && $(FILLER) --lora_scope marked --learning_rate 3e-3 --out_dir $(@D)
out/text_chain/adapter.json: out/text/config.json
	rm -rf $(@D) && $(FILLER) --lora_scope marked --learning_rate 3e-3 --target chain --out_dir $(@D)
out/text_clean_all/adapter.json: out/text/config.json
	rm -rf $(@D) && $(FILLER) --learning_rate 1e-3 --out_dir $(@D)
out/text_chain_all/adapter.json: out/text/config.json
	rm -rf $(@D) && $(FILLER) --learning_rate 1e-3 --target chain --out_dir $(@D)

# The README's figure of error against TC: noisy copies from certain to independent. Needs matplotlib.
DIAL   = 0.02 0.05 0.1 0.2 0.4 0.7 1.0
figures: $(DIAL:%=out/dial-%/config.json)
	$(PY) evaluate.py --data copy --ckpt $(DIAL:%=out/dial-%) --plot assets/dial.svg
out/dial-%/config.json: $(VENV)/ready
	rm -rf $(@D) && $(PY) train.py --data copy --eps $* --n_ctx 8 --n_last 2 --corruption mask --max_iters 800 --batch_size 64 \
	    --log_interval 1000 --eval_interval 50 --out_dir $(@D)
