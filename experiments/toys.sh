# The seven toys, one seed: a base with both stages by the paper's loss, then causal Stage B on it. And the strongest
# opponent one at a time: a base that learns from masks alone, for as many steps as both.
# 50 to 120 minutes on one thread. Page: results/theorem/README.md. Run from the root of the repository.
set -e
seed=${SEED:-0}
out=${OUT:-out/toys-$seed}
for task in modes pairs mixed copy gaussian permutation sum; do
  echo "== $task seed $seed"
  python toy.py $task --seed $seed --out $out/data-$task
  run="--data $out/data-$task --seed $seed"
  python train.py --config configs/toy_base.toml $run --out_dir $out/$task-base
  echo "-- base"
  python evaluate.py --ckpt $out/$task-base

  # a sum depends on all of its symbols at once: three layers, and longer
  on_base="--config configs/toy.toml $run --init_from $out/$task-base"
  as_long=2500
  if [ $task = sum ]; then
    on_base="$on_base --n_last 3 --max_iters 3000"
    as_long=4000
  fi
  python train.py $on_base --out_dir $out/$task-causal
  echo "-- causal"
  python evaluate.py --ckpt $out/$task-causal
  python train.py --config configs/toy_base.toml $run --corruption mask --max_iters $as_long --out_dir $out/$task-masks
  echo "-- masks"
  python evaluate.py --ckpt $out/$task-masks
done
