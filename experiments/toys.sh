# What each decoder loses on the seven toys, with both stages trained from scratch (the paper's clean target).
# About 10 minutes on 2 cores. Page: results/theorem/README.md. Run from the root of the repository.
set -e
for task in modes pairs mixed copy gaussian permutation sum; do
  python train.py --data $task --n_last 2 --out_dir out/toys/$task
  python evaluate.py --ckpt out/toys/$task
done
