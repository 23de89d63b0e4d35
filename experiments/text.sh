# Shakespeare, one seed: a base; causal Stage B, the paper's, and causal Stage B without the token before, each on that
# base; and a left-to-right model of the base's size and steps. An hour on one thread. Then what held-out text costs.
# Page: results/text/README.md. Run from the root of the repository.
set -e
seed=${SEED:-1}
out=${OUT:-out/text-$seed}
text="--data data/shakespeare --seed $seed"
python base.py $text --config configs/text_base.toml --out_dir $out/base
python -m experiments.text half --ckpt $out/base
python train.py $text --config configs/text.toml --init_from $out/base --out_dir $out/causal
python base.py $text --config configs/text_base.toml --block_length 1 --one_by_one 1 --out_dir $out/left
python train.py $text --init_from $out/base --seq_len 256 --batch_size 4 --out_dir $out/paper
python -m experiments.text untold $text --config configs/text.toml --stage_b untold --init_from $out/base \
    --out_dir $out/untold
for system in base paper causal untold left; do
  python -m experiments.text bits --system $system --seed $seed --ckpt $out/$system --out $out/bits.jsonl
done

# draws, judged by the left-to-right model of another seed: JUDGE=2, whose run is in out/text-2
if [ -n "${JUDGE:-}" ]; then
  for system in causal base paper; do
    python -m experiments.text draws --system $system --seed $seed --ckpt $out/$system --judge_seed $JUDGE \
        --judge out/text-$JUDGE/left --out $out/draws.jsonl
  done
fi
