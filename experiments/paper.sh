# The paper's own way, from the released weights to its Tables 1 to 3: convert, prepare, train n = 3, 6 and 9, 49 runs of
# seven benchmarks, tables. Nothing is downloaded. At its real size it has not run; each command has, on a small
# checkpoint of the released layout.
# Stopped or killed, the same command goes on. Page: llada/README.md. Run from the root of the repository.
set -e
# the released weights (inclusionAI/LLaDA2.1-mini), and .parquet files of HuggingFaceFW/fineweb-edu
released=${RELEASED:-LLaDA2.1-mini}
documents=${DOCUMENTS:-fineweb_edu}
max_docs=${MAX_DOCS:-50000}
# published files of the benchmarks, a folder a task; a task without its file is left out
bench=${BENCH:-bench}
# what is written
weights=${WEIGHTS:-weights/llada2.1-mini}
data=${DATA:-data/fineweb}
out=${OUT:-out/paper}
runs=${RUNS:-runs/paper}
# sizes: Stage B's layers, more flags of train.py and of llada.run, tokens of an answer
n1=${N1:-3}
n2=${N2:-6}
n3=${N3:-9}
train=${TRAIN:-}
decode="${DECODE:---dtype bf16}"
gen_length=${GEN_LENGTH:-16384}

# weights and rows
if [ ! -e "$weights/config.json" ]; then
  python convert_weights.py --src "$released" --out "$weights"
fi
if [ ! -e "$data/meta.json" ]; then
  python prepare.py "$documents" --max_docs "$max_docs" --like "$weights" --out "$data"
fi

# adapters: 12,500 steps each, into out/paper/n3, n6 and n9
for n in $n1 $n2 $n3; do
  if [ -e "$out/n$n/train.json" ]; then
    python train.py --init_from resume --out_dir "$out/n$n"
  else
    python train.py --config configs/llada.toml --data "$data" --init_from "$weights" --n_last $n --out_dir "$out/n$n" $train
  fi
done

# every task: the base (Table 1), n = 3 without a gate on edits (Tables 1 and 3) and with one (the text below Table 2),
# n = 6 and 9 (Table 3)
for task in gsm8k cmath gpqa drop piqa humaneval mbpp; do
  case $task in
    gsm8k | cmath) file=$task/test.jsonl ;;
    gpqa) file=gpqa/gpqa_diamond.csv ;;
    drop) file=drop/drop_v0_dev.jsonl.gz ;;
    piqa) file=piqa/dev.jsonl ;;
    humaneval) file=humaneval_plus/HumanEvalPlus.jsonl.gz ;;
    mbpp) file=mbpp_plus/MbppPlus.jsonl.gz ;;
  esac
  if [ ! -e "$bench/$file" ]; then
    echo "no $bench/$file: $task is left out"
    continue
  fi
  run="python -m llada.run --task $task --task_file $bench/$file --gen_length $gen_length $decode"
  $run --ckpt $weights --out $runs/$task-base.jsonl
  $run --ckpt $out/n$n1 --out $runs/$task-n$n1.jsonl
  $run --ckpt $out/n$n1 --out $runs/$task-gated.jsonl --row "Stage B, gated edits"
  $run --ckpt $out/n$n2 --out $runs/$task-n$n2.jsonl
  $run --ckpt $out/n$n3 --out $runs/$task-n$n3.jsonl
done

# GSM8K: the other rows of Table 2
if [ -e "$bench/gsm8k/test.jsonl" ]; then
  row="python -m llada.run --task gsm8k --task_file $bench/gsm8k/test.jsonl --gen_length $gen_length $decode"
  $row --ckpt $out/n$n1 --out $runs/table2-02.jsonl --row "adapter, Stage B off"
  $row --ckpt $out/n$n1 --out $runs/table2-05.jsonl --row "B fills, A edits"
  $row --ckpt $out/n$n1 --out $runs/table2-06.jsonl --row "A fills, B edits"
  $row --ckpt $out/n$n1 --out $runs/table2-07.jsonl --row "B fills, edits off"
  $row --ckpt $out/n$n1 --out $runs/table2-08.jsonl --row "Stage B without marker"
  $row --ckpt $out/n$n1 --out $runs/table2-09.jsonl --row "entropy selection, same size"
  $row --ckpt $out/n$n1 --out $runs/table2-10.jsonl --row "Stage B, tau_m2t 0.5"
  $row --ckpt $out/n$n1 --out $runs/table2-11.jsonl --row "Stage B, tau_m2t 0.3"
  $row --ckpt $out/n$n1 --out $runs/table2-12.jsonl --row "adapter, Stage B off, tau_m2t 0.5"
  $row --ckpt $out/n$n1 --out $runs/table2-13.jsonl --row "adapter, Stage B off, tau_m2t 0.3"
  $row --ckpt $weights --out $runs/table2-14.jsonl --row "released, tau_m2t 0.5"
  $row --ckpt $weights --out $runs/table2-15.jsonl --row "released, tau_m2t 0.3"
  $row --ckpt $weights --out $runs/table2-16.jsonl --row "released, both gates removed"
  $row --ckpt $out/n$n1 --out $runs/table2-17.jsonl --row "all masks at once"
fi

# HumanEval+ and MBPP+ count once EvalPlus has judged them: each of their runs has printed the command
python -m llada.tables main --runs "$runs"
python -m llada.tables mechanism --runs "$runs"
python -m llada.tables gates --runs "$runs"
python -m llada.tables lastn --runs "$runs"
