# The paper's own way, from the released weights to its Tables 1 to 3: convert, prepare, train n = 3, 6 and 9, 49 runs of
# seven benchmarks, tables. At its real size it has not run; each command has, on a small checkpoint. It needs
# `pip install -e ".[benchmarks]"`. Killed, the same command goes on. Page: released/README.md.
set -e
# the released weights (inclusionAI/LLaDA2.1-mini), and .parquet files of HuggingFaceFW/fineweb-edu
released=${RELEASED:-LLaDA2.1-mini}
documents=${DOCUMENTS:-fineweb_edu}
max_docs=${MAX_DOCS:-50000}
# published files of the benchmarks, a folder a task; a task without its file is left out
bench=${BENCH:-bench}
weights=${WEIGHTS:-weights/llada2.1-mini}
data=${DATA:-data/fineweb}
out=${OUT:-out/paper}
runs=${RUNS:-runs/paper}
# n of the adapters, the first of which is Table 1's; more flags of train.py and of released.harness
sizes=${SIZES:-3 6 9}
first=${sizes%% *}
train=${TRAIN:-}
decode=${DECODE:---dtype bf16 --gen_length 16384}

[ -e "$weights/config.json" ] || python convert_weights.py --src "$released" --out "$weights"
[ -e "$data/meta.json" ] || python prepare.py "$documents" --max_docs "$max_docs" --like "$weights" --out "$data"

# adapters: 12,500 steps each, into out/paper/n3, n6 and n9
for n in $sizes; do
  if [ -e "$out/n$n/train.json" ]; then
    python train.py --init_from resume --out_dir "$out/n$n"
  else
    python train.py --config configs/llada.toml --data "$data" --init_from "$weights" --n_last $n --out_dir "$out/n$n" $train
  fi
done

# answer NAME CKPT [ROW]: the task by this model, into a folder that all tasks share
answer() {
  set -- --out "$runs/$1" --ckpt "$2" ${3:+--row "$3"}
  python -m released.harness --tasks $task --task_file "$bench/$file" $decode "$@" </dev/null
}

# every task: the base (Table 1), n = 3 without a gate on edits (Tables 1 and 3) and with one (the text below Table 2),
# n = 6 and 9 (Table 3)
while read -r task file; do
  [ -e "$bench/$file" ] || { echo "no $bench/$file: $task is left out"; continue; }
  answer base "$weights"
  answer gated "$out/n$first" "Stage B, gated edits"
  for n in $sizes; do
    answer n$n "$out/n$n"
  done
done <<END
gsm8k gsm8k/test.jsonl
cmath cmath/test.jsonl
gpqa gpqa/gpqa_diamond.csv
drop drop/drop_v0_dev.jsonl.gz
piqa piqa/dev.jsonl
humaneval humaneval_plus/HumanEvalPlus.jsonl.gz
mbpp mbpp_plus/MbppPlus.jsonl.gz
END

# GSM8K: the other rows of Table 2
task=gsm8k
file=gsm8k/test.jsonl
while read -r row && [ -e "$bench/$file" ]; do
  ckpt=$out/n$first
  case $row in released*) ckpt=$weights ;; esac
  answer "$row" "$ckpt" "$row"
done <<END
adapter, Stage B off
B fills, A edits
A fills, B edits
B fills, edits off
Stage B without marker
entropy selection, same size
Stage B, tau_m2t 0.5
Stage B, tau_m2t 0.3
adapter, Stage B off, tau_m2t 0.5
adapter, Stage B off, tau_m2t 0.3
released, tau_m2t 0.5
released, tau_m2t 0.3
released, both gates removed
all masks at once
END

# HumanEval+ and MBPP+ count once EvalPlus has judged them
for table in main mechanism gates lastn; do
  python -m released.tables $table --runs "$runs"
done
