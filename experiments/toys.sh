# What each decoder loses on the seven toys: both stages trained from scratch by the paper's loss, then Stage B by alpha.
# About 20 minutes a seed on one thread. Page: results/theorem/README.md. Run from the root of the repository.
set -e
seed=${SEED:-0}
out=${OUT:-out/toys-$seed}
for task in modes pairs mixed copy gaussian permutation sum; do
  python train.py --data $task --n_last 2 --seed $seed --out_dir $out/$task
  python evaluate.py --ckpt $out/$task
  python train.py --data $task --init_from $out/$task --alpha 1 --seed $seed --out_dir $out/$task-alpha
  python evaluate.py --ckpt $out/$task-alpha
done
