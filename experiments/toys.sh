# What each decoder loses on the seven toys: both stages trained from scratch by the paper's loss, then Stage B by alpha.
# About 20 minutes on 2 cores. Page: results/theorem/README.md. Run from the root of the repository.
set -e
for task in modes pairs mixed copy gaussian permutation sum; do
  python train.py --data $task --n_last 2 --out_dir out/toys/$task
  python evaluate.py --ckpt out/toys/$task
  python train.py --data $task --init_from out/toys/$task --alpha 1 --out_dir out/toys/$task-alpha
  python evaluate.py --ckpt out/toys/$task-alpha
done
