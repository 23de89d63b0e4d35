# Does this project run on a GPU, and how fast? Five minutes, and one table to paste into a report. Page: results/speed.
#     bash experiments/gpu.sh                   # the accelerator that torch finds, and the geometry of the 0.6 B model
#     bash experiments/gpu.sh --device cpu      # a tiny geometry: a minute or two
#     LAYERS=28 WIDTH=1024 bash experiments/gpu.sh --device cpu     # the 0.6 B model's, on a CPU
set -e
device=cuda
[ "$1" = --device ] && device=$2
[ "$device" = cpu ] && : "${LAYERS:=2}" "${WIDTH:=64}" "${LENGTH:=32}" "${ROWS:=1}"
layers=${LAYERS:-28} width=${WIDTH:-1024} length=${LENGTH:-256} rows=${ROWS:-8} dtype=${DTYPE:-bf16}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# measured NAME SCRIPT FLAGS: run a script, and write what it prints and what it took to $out/NAME
measured() {
  python -c 'if True:
    import resource, runpy, sys, time, torch
    began = time.perf_counter()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 1024 * resource.getrusage(0).ru_maxrss
    print(f"{time.perf_counter() - began:.1f} s, {peak / 1e9:.2f} GB")' "${@:2}" >"$out/$1" 2>"$out/err" || cat "$out/err"
}
row() { printf '| %s | %s |\n' "$1" "$2" >>"$out/table"; }
entries() { grep -o "\"$1\": [0-9.]*" "$2/log.jsonl" | cut -d' ' -f2 | cut -c1-6 | paste -sd' '; }
texts=$(ls README.md results/README.md results/*/README.md)

# ten steps of the paper's training on the recorded LLaDA2.1
measured converted convert_weights.py --src tests/data/golden_a --out "$out/golden_a"
measured rows prepare.py $texts --like "$out/golden_a" --out "$out/rows"
for d in cpu "$device"; do
  measured trained train.py --init_from "$out/golden_a" --data "$out/rows" --n_last 2 --seq_len 64 --batch_size 4 \
    --max_iters 10 --learning_rate 1e-3 --out_dir "$out/on $d$n" --device "$d"
  row "golden_a: the losses of ten steps on $d" "$(entries loss "$out/on $d$n")"
  n=2
done

# decodes of three families; without a tokenizer sample.py prints ids
for f in golden_a golden_sdar golden_a2d; do
  [ -e "$out/$f" ] || measured converted convert_weights.py --src tests/data/$f --out "$out/$f"
  rm "$out/$f/tokenizer.json"
  for d in cpu "$device"; do
    measured $f.$d sample.py --ckpt "$out/$f" --device "$d" --gen_length 96 --prompt_ids 7,211,39 --prompt_ids 99,127
  done
  cmp -s <(grep -v ' ms a \| GB' "$out/$f.cpu") <(grep -v ' ms a \| GB' "$out/$f.$device") && same=equal || same=DIFFERENT
  row "$f: tokens and forwards of two decodes on cpu and on $device" $same
done

# random weights of a large geometry: convert, decode by Stage A and by Stage B, train. Its tokens are the recorded ones
python -c "if True:
    from pathlib import Path
    from checkpoint import DTYPES, new_model, save_model
    from config import Config
    from lib.util import copy_file, generator
    cfg = Config(n_layer=$layers, n_embd=$width, d_dense=3 * $width, n_dense=$layers, n_head=16, n_kv_head=8, head_dim=128,
                 rotary_dim=128, rope_theta=1e6, vocab_size=151936, eos_id=300, mask_id=301, n_last=min(3, $layers), tied=True, decoder='a2d')
    model = new_model(cfg, generator('gpu.sh'))
    model.compute_dtype = DTYPES['$dtype']
    save_model(model, Path('$out/random'))
    copy_file(Path('tests/data/golden_a2d/tokenizer.json'), Path('$out/random/tokenizer.json'))"
# ONE token a step, and no text ends before $length tokens, because it may not write one
measured exported released/export.py --to hf --src "$out/random" --out "$out/released"
rm -r "$out/random"
measured converted convert_weights.py --src "$out/released" --out "$out/large"
measured like prepare.py $texts --like "$out/large" --out "$out/large_rows"
prompt=$(seq -s, 32)
how="--device $device --dtype $dtype"
measured a sample.py --ckpt "$out/large" $how --prompt_ids $prompt --gen_length $length
measured trained train.py --init_from "$out/large" --data "$out/large_rows" --seq_len 512 --batch_size $rows --micro_batch 1 \
  --max_iters 1 --out_dir "$out/adapter" $how
measured b sample.py --ckpt "$out/adapter" $how --prompt_ids $prompt --gen_length $length --tau_m2t 1 --tau_t2t none
size="$layers layers of $width, $dtype"
row "$size: convert" "$(tail -1 "$out/converted")"
row "$size: Stage A, a token a step; with loading" "$(grep -o '[0-9.]* ms a token' "$out/a"), $(tail -1 "$out/a")"
row "$size: Stage B, a token a step; with loading" "$(grep -o '[0-9.]* ms a token' "$out/b"), $(tail -1 "$out/b")"
row "$size: a training step of $rows rows of 512; in all" "$(entries ms "$out/adapter") ms, $(tail -1 "$out/trained")"

echo "bash experiments/gpu.sh $*, $(date +%F), $(python -c 'import torch, platform as p
print("torch", torch.__version__, "on", torch.cuda.get_device_name() if torch.cuda.is_available() else p.processor())')"
printf '|what|result|\n|---|---|\n'
cat "$out/table"
