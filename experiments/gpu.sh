# Is this project right on a GPU, and how fast? Five minutes, and one table to paste into a report or into results/speed.
#     bash experiments/gpu.sh                                     # a CUDA GPU, and the geometry of the 0.6 B model
#     bash experiments/gpu.sh --device cpu                        # a tiny geometry, a minute of processor time
#     LAYERS=28 WIDTH=1024 bash experiments/gpu.sh --device cpu   # the 0.6 B model's; with WIDTH=2048 the 1.7 B model's
set -e; device=${2:-cuda}  # after --device
[ $device != cpu ] || : "${LAYERS:=2}" "${WIDTH:=64}" "${LENGTH:=32}" "${ROWS:=1}"
: "${LAYERS:=28}" "${WIDTH:=1024}" "${LENGTH:=256}" "${ROWS:=8}" "${DTYPE:=bf16}"
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
row() { printf '|%s|%s|\n' "$1" "$2" >>"$out/table"; }

# measured WHAT SCRIPT FLAGS: run a script; its seconds, the processor's, and its peak of memory go into the table if WHAT is there
measured() {
  python -c 'if True:
    import resource, runpy, sys, time, torch
    began, sys.argv = time.perf_counter(), sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 1024 * resource.getrusage(0).ru_maxrss
    print(f"{time.perf_counter() - began:.1f} s, processor {time.process_time():.1f} s, {peak / 1e9:.2f} GB")' "${@:2}" >"$out/said" || exit 1
  [ -z "$1" ] || row "$1" "$(grep -o '[0-9.]* ms a token, ' "$out/said")$(tail -n 1 "$out/said")"
}

# decodes of three families, on the CPU and on the device; without a tokenizer sample.py prints ids
for family in golden_sdar golden_a2d golden_a; do
  measured "" convert_weights.py --src tests/data/$family --out "$out/$family"
  mv "$out/$family/tokenizer.json" "$out"
  for d in cpu $device; do
    measured "" sample.py --ckpt "$out/$family" --device $d --gen_length 96 --prompt_ids 7,211,39 --prompt_ids 99,127
    head -n 4 "$out/said" >"$out/on $d"
  done
  row "$family: two decodes on $device, tokens and forwards as on the CPU" "$(cmp "$out/on cpu" "$out/on $device" && echo equal)"
done

# ten steps of the paper's training on the last of them, the recorded LLaDA2.1
mv "$out/tokenizer.json" "$out/golden_a"
measured "" prepare.py README.md results/*/*.md --like "$out/golden_a" --out "$out/rows"
for d in cpu $device; do
  measured "" train.py --init_from "$out/golden_a" --data "$out/rows" --n_last 2 --seq_len 64 --batch_size 4 --max_iters 10 \
    --learning_rate 1e-3 --out_dir "$out/run$((n += 1))" --device $d
  row "golden_a: losses of ten steps on $d" "$(grep -o '"loss": [0-9.]*' "$out/run$n/log.jsonl" | cut -c 9-15 | paste -s)"
done

# random weights of a large geometry (untied, or a mask would write itself): decode a token a step, train, decode by both stages
python -c "if True:
    from checkpoint import *; cfg = Config(n_layer=$LAYERS, n_embd=$WIDTH, d_dense=3 * $WIDTH, n_dense=$LAYERS, n_head=16, n_kv_head=8, head_dim=128,
                 rotary_dim=128, rope_theta=1e6, vocab_size=151936, eos_id=305, mask_id=308, n_last=2)
    model = new_model(cfg, torch.Generator()); model.compute_dtype = DTYPES['$DTYPE']
    save_model(model, Path('$out/large'))"
cp "$out/golden_a/tokenizer.json" "$out/large"
size="$LAYERS layers of $WIDTH, $DTYPE"
decode="--device $device --dtype $DTYPE --gen_length $LENGTH --tau_m2t 1 --tau_t2t none --prompt_ids $(seq -s , 32)"
measured "$size: $LENGTH tokens by Stage A" sample.py --ckpt "$out/large" $decode
measured "" prepare.py README.md results/*/*.md --like "$out/large" --out "$out/large/rows"
measured "$size: a training step of $ROWS rows of 512, and two validations" train.py --init_from "$out/large" \
  --data "$out/large/rows" --seq_len 512 --batch_size $ROWS --micro_batch 1 --max_iters 1 --out_dir "$out/adapter" \
  --device $device --dtype $DTYPE
row "the step alone: ms" "$(grep -o '"ms": [0-9]*' "$out/adapter/log.jsonl" | cut -c 7-)"
measured "$size: $LENGTH tokens by both stages" sample.py --ckpt "$out/adapter" $decode
echo "$(date +%F), experiments/gpu.sh, $device, $(nvidia-smi -L 2>/dev/null || echo $(nproc) threads), $(pip list 2>/dev/null | grep '^torch ')"
printf '|what|result|\n|---|---|\n%s\n' "$(cat "$out/table")"
