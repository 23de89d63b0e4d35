# Shakespeare, one seed: a base; on it causal Stage B (as long as the shipped one learned, and by its config's own 800
# steps), the paper's Stage B, and the control of causal Stage B; and a left-to-right model of the base's size and steps.
# One to two hours on one thread. Then what held-out text costs. Page: results/text/README.md. Run from the root of the
# repository.
set -e
seed=${SEED:-1}
out=${OUT:-out/text-$seed}
text="--data data/shakespeare --seed $seed"
as_base="--config configs/text_base.toml --max_iters 2000"
python base.py $text $as_base --out_dir $out/base
python -m experiments.text half --ckpt $out/base
on_base="--config configs/text.toml --init_from $out/base"
python train.py $text $on_base --max_iters 3000 --out_dir $out/causal
python train.py $text $on_base --out_dir $out/short
python -m experiments.control $text $on_base --out_dir $out/control
python base.py $text $as_base --block_length 1 --one_by_one 1 --out_dir $out/left
python train.py $text --init_from $out/base --seq_len 256 --batch_size 4 --out_dir $out/paper
for system in base paper causal short control left; do
  python -m experiments.text bits --system $system --seed $seed --ckpt $out/$system --out $out/bits.jsonl
done

# draws, judged by the left-to-right model of another seed: JUDGE=2, whose run is in out/text-2
if [ -n "${JUDGE:-}" ]; then
  for system in causal base paper left; do
    python -m experiments.text draws --system $system --seed $seed --ckpt $out/$system --judge_seed $JUDGE \
        --judge out/text-$JUDGE/left --out $out/draws.jsonl
  done
fi
