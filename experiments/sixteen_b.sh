# The whole released geometry with random weights, end to end: written in the released layout, converted to ours,
# compared with what was written, converted to int8, decoded with Stage A alone, an adapter trained on it,
# decoded with Stage B.
# Every command prints its time and its memory at the peak. Page: results/sixteen_b/README.md.
# Two cores: an hour, 66 GB of disk at the peak, 24 GB of memory. A folder is deleted as soon as it has been
# converted, and everything at the end. LAYERS=4 is the same in minutes, with 4 of the 20 layers.
# Run from the root of the repository.
set -e
layers=${LAYERS:-20}
folder=${FOLDER:-weights/sixteen_b}
tokens=${TOKENS:-2048}
watch() {
  echo
  echo "\$ $*"
  /usr/bin/time -f "[%e s; peak memory %M KB, mapped files included]" "$@"
}

watch python -m llada.sixteen_b write --layers "$layers" --out "$folder/released"
watch python convert_weights.py --src "$folder/released" --out "$folder/ours"
rm -r "$folder/released"
watch python -m llada.sixteen_b check --ckpt "$folder/ours"
watch python -m llada.int8 --src "$folder/ours" --out "$folder/int8"
rm -r "$folder/ours"

watch python sample.py --ckpt "$folder/int8" --dtype bf16 --tau_m2t 1 --tau_t2t none --gen_length 64 \
  --prompt "The quick brown fox"  # one token a step

watch python prepare.py stdlib --max_docs 50 --like "$folder/int8" --out "$folder/rows"
watch python train.py --init_from "$folder/int8" --n_last 3 --data "$folder/rows" --dtype bf16 --checkpointing \
  --context corrupted --seq_len "$tokens" --batch_size 1 --max_iters 3 --out_dir "$folder/adapter"
watch python sample.py --ckpt "$folder/adapter" --dtype bf16 --tau_t2t none --gen_length 4 \
  --prompt "The quick brown fox"
rm -r "$folder/int8" "$folder/rows" "$folder/adapter"
