# Joint samples in one pass: the marker carries random numbers, the target is the chain drawn with them. Two toys.
# About 15 minutes on 2 cores. Page: results/noise/README.md. Run from the root of the repository.
set -e
python train.py --data modes --toy n_ctx=8 --stage_a_only --corruption mask --batch_size 64 --max_iters 4000 \
  --learning_rate 3e-3 --log_interval 1000 --eval_interval 1000 --out_dir out/noise/base-modes
python train.py --data copy --toy n_ctx=8 --stage_a_only --corruption mask --batch_size 64 --max_iters 2000 \
  --learning_rate 3e-3 --log_interval 1000 --eval_interval 1000 --out_dir out/noise/base-copy
for task in modes copy; do
  python -m beyond.noise --data $task --init_from out/noise/base-$task --n_last 3 --s_min 4 --corruption mask \
    --learning_rate 5e-3 --batch_size 32 --max_iters 5000 --eval_rows 8 --log_interval 500 --eval_interval 1000 \
    --out_dir out/noise/$task
done
python -m beyond.toys --adapter out/noise/modes out/noise/copy
